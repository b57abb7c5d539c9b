"""Lines become simpler by Douglas and Peucker's algorithm; closed ones stay rings."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.store.native import library
from raggedatlas.vectors.blobs import raise_fault
from raggedatlas.vectors.coarsening.options import (
    LevelStep,
    PyramidOptions,
    build_coarse_levels,
    masks_from_weights,
    nearest_kept,
    no_links,
)
from raggedatlas.vectors.shapes import Shapes


def vertex_tolerances(positions: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return for each vertex the largest tolerance at which Douglas and Peucker's algorithm keeps it; ends infinity.

    Parameters
    ----------
    positions : (N, D) array
        Vertices of lines, line after line.
    offsets : (lines + 1,) int64
        Where lines begin.

    Examples
    --------
    >>> vertex_tolerances(np.array([[0, 0], [1, 3], [2, 0]]), np.array([0, 3])).tolist()
    [inf, 3.0, inf]
    """
    weights, points = np.zeros(len(positions)), np.ascontiguousarray(positions, np.float64)
    room = int(np.diff(offsets).max(initial=0)) + 1
    pieces, bounds = np.empty((room, 2), np.int64), np.empty(room)
    fault = library().ra_weigh_lines(
        points, *points.shape, offsets.astype(np.int64), len(offsets) - 1, weights, pieces, bounds, room
    )
    raise_fault(fault, "A line")
    return weights


def keep_heaviest(weights: NDArray[np.float64], offsets: NDArray[np.int64], needed: NDArray[np.int64]) -> None:
    """Make the heaviest inner vertices of each line stay: `needed` of them, as far as there are so many."""
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    inner = np.flatnonzero(np.isfinite(weights) & (needed[owner] > 0))
    order = inner[np.lexsort((-weights[inner], owner[inner]))]
    first = np.flatnonzero(np.diff(owner[order], prepend=-1))
    rank = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    weights[order[rank < needed[owner[order]]]] = np.inf


def line_levels(shapes: Shapes, steps: PyramidOptions) -> Iterator[LevelStep]:
    """Yield coarser levels of lines, polylines and streamlines.

    Vertices are kept as they are, with their attributes; both ends always, and of a line whose ends lie in one place (a ring)
    also the two that matter most.
    """
    weights = vertex_tolerances(shapes.positions, shapes.offsets)
    counts = np.diff(shapes.offsets)
    needed = np.zeros(len(counts), np.int64)
    long = np.flatnonzero(counts > 3)
    closed = (shapes.positions[shapes.offsets[long]] == shapes.positions[shapes.offsets[long + 1] - 1]).all(1)
    needed[long[closed]] = 2
    keep_heaviest(weights, shapes.offsets, needed)
    points = shapes.positions.astype(np.float64)
    yield from build_coarse_levels(
        shapes, masks_from_weights(shapes, weights, steps), lambda kept: nearest_kept(points, kept), no_links
    )
