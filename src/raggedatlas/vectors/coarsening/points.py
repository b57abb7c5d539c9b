"""Points become fewer: each level is a part of the finer one, evenly over space and over objects."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.coarsening.options import (
    LevelStep,
    PyramidOptions,
    build_coarse_levels,
    no_links,
    select_objects,
)
from raggedatlas.vectors.selection import object_rows
from raggedatlas.vectors.shapes import Shapes

CURVE_BITS = 63


def z_order_ranks(positions: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return each point's place on a Z-order curve through the box around all, (N,)."""
    n_dims = positions.shape[1]
    bits = min(CURVE_BITS // n_dims, 21)
    low = positions.min(0) if len(positions) else np.zeros(n_dims)
    width = positions.max(0) - low if len(positions) else np.ones(n_dims)
    scale = (2**bits - 1) / np.where(width > 0, width, 1)
    cells = ((positions - low) * scale).astype(np.int64)
    code = np.zeros(len(positions), np.int64)
    for bit in range(bits):
        for d in range(n_dims):
            code |= (cells[:, d] >> bit & 1) << (bit * n_dims + d)
    return code


def point_levels(shapes: Shapes, steps: PyramidOptions) -> Iterator[LevelStep]:
    """Yield coarser levels of a point cloud.

    The points of each object (of the cloud, without objects) are ordered along a Z-order curve, by chance where they share a
    place. Level k keeps every ``round(factor)**k``-th of them, beginning with the first: an even share of every region, at least
    one of each object. So a level is part of the finer one, and what a level adds to the coarser ones says all together.
    """
    owner = object_rows(shapes)
    chance = np.random.default_rng(steps.seed).permutation(shapes.n_vertices)
    order = np.lexsort((chance, z_order_ranks(shapes.positions.astype(np.float64)), owner))
    firsts = shapes.offsets[owner]
    stride = max(2, round(steps.factor))
    strides: list[int] = []

    def masks() -> Iterator[NDArray[np.bool_]]:
        rank = np.arange(len(order)) - firsts
        for level, objects in enumerate(select_objects(shapes, steps), 1):
            strides.append(stride**level)
            kept = np.zeros(len(order), bool)
            kept[order] = rank % strides[-1] == 0
            yield kept & objects[owner]

    def stand_in(kept: NDArray[np.bool_]) -> NDArray[np.int64]:
        rank = np.arange(len(kept)) - firsts
        stands = np.empty(len(kept), np.int64)
        stands[order] = order[firsts + rank // strides[-1] * strides[-1]]
        return stands

    yield from build_coarse_levels(shapes, masks(), stand_in, no_links)
