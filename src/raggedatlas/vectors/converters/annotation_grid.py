"""The spatial index of annotations: levels from coarse to fine, each with a random part of them, in cells."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.converters.annotation_records import pack_list
from raggedatlas.vectors.selection import counts_to_offsets

PER_CELL = 5_000
"""About how many annotations a cell of the spatial index holds."""

MOST_SPREAD, MOST_BITS = 8, 48
"""Cells become no finer where an annotation lies in so many of them, or their numbers have so many bits."""

Boxes = tuple[NDArray[np.float64], NDArray[np.float64]]


def write_cells(
    path: Path, annotations: tuple[NDArray[np.uint64], list[bytes]], boxes: Boxes, bounds: Boxes
) -> list[dict[str, Any]]:
    """Write the spatial index; each annotation stands on one level, in all cells that its box touches.

    Parameters
    ----------
    path : Path
        The folder of the annotations; a folder for each level is made in it.
    annotations : ((N,) uint64, list of N bytes)
        Ids and records.
    boxes : ((N, D) float64, (N, D) float64)
        Least and greatest coordinates of each.
    bounds : ((D,) float64, (D,) float64)
        Of all of them; the grid fills them.

    Returns
    -------
    list of dict
        What the info says of each level.
    """
    ids, records = annotations
    low, high = bounds
    left = np.random.default_rng(0).permutation(len(ids))
    shape = np.ones(len(low), np.int64)
    levels: list[dict[str, Any]] = []
    while len(left) or not levels:
        size = (high - low) / shape
        first, last = (np.clip(((corner[left] - low) / size).astype(np.int64), 0, shape - 1) for corner in boxes)
        taken = left[: _how_many(first, last, shape)]
        key = f"spatial{len(levels)}"
        (path / key).mkdir()
        codes, rows = _touched(first[: len(taken)], last[: len(taken)], shape)
        cells, starts = np.unique(codes, return_index=True)
        limit = 1
        for cell, members in zip(cells, np.split(taken[rows], starts[1:]), strict=False):
            name = "_".join(map(str, np.unravel_index(cell, tuple(shape))))
            (path / key / name).write_bytes(pack_list(ids, records, members))
            limit = max(limit, len(members))
        levels.append({"key": key, "grid_shape": shape.tolist(), "chunk_size": size.tolist(), "limit": limit})
        left = left[len(taken) :]
        shape = np.where(size >= size.max() / 2, shape * 2, shape)
    return levels


def _how_many(first: NDArray[np.int64], last: NDArray[np.int64], shape: NDArray[np.int64]) -> int:
    """Return how many of the annotations that are left stand on a level: all, where finer cells would not help."""
    if not len(first):
        return 0
    codes = np.ravel_multi_index(tuple(first.T), tuple(shape))
    most = int(np.unique(codes, return_counts=True)[1].max())
    spreads = float(np.prod(last - first + 1, axis=1).mean())
    if most <= PER_CELL or spreads > MOST_SPREAD or np.log2(shape).sum() >= MOST_BITS:
        return len(first)
    return int(len(first) * PER_CELL / most)


def _touched(
    first: NDArray[np.int64], last: NDArray[np.int64], shape: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return codes of the cells that boxes of cells touch, ascending, and the row of the box at each."""
    spans = last - first + 1
    counts = np.prod(spans, axis=1).astype(np.int64)
    rows = np.repeat(np.arange(len(first)), counts)
    within = np.arange(len(rows)) - np.repeat(counts_to_offsets(counts)[:-1], counts)
    cells = np.empty((len(rows), len(shape)), np.int64)
    for axis in range(len(shape) - 1, -1, -1):
        cells[:, axis] = first[rows, axis] + within % spans[rows, axis]
        within //= spans[rows, axis]
    codes = np.asarray(np.ravel_multi_index(tuple(cells.T), tuple(shape)), np.int64)
    order = np.argsort(codes, kind="stable")
    return codes[order], rows[order]
