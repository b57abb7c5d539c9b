"""Columns of one dataset that are one feature: what type holds their sums, and how rows that were read are added up."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.model.batch import CsrBlock
from raggedatlas.query.parts import SpacePlan


def sum_dtype(stored: np.dtype[Any], n: int) -> np.dtype[Any] | None:
    """Return the smallest dtype that holds every sum of n values of a dtype; of floats, their own.

    Returns
    -------
    numpy.dtype or None
        None where no type of whole numbers is wide enough.

    Examples
    --------
    >>> sum_dtype(np.dtype("uint8"), 2), sum_dtype(np.dtype("uint64"), 2) is None
    (dtype('uint16'), True)
    """
    if stored.kind == "f" or n == 1:
        return stored
    stored = np.dtype(np.uint8) if stored.kind == "b" else stored
    widths = [np.dtype(f"{stored.kind}{size}") for size in (1, 2, 4, 8)]
    largest = n * int(np.iinfo(stored).max)
    return next((wide for wide in widths if np.iinfo(wide).max >= largest), None)


def merged_columns(column_map: NDArray[np.int64], merged: NDArray[np.int64], n_cols: int) -> dict[int, list[int]]:
    """Return which local columns of a layout are added up: column of the result -> local columns, ascending."""
    own = column_map.copy()
    more = np.flatnonzero(column_map >= n_cols)
    own[more] = merged[column_map[more] - n_cols]
    return {column: np.flatnonzero(own == column).tolist() for column in np.unique(own[more]).tolist()}


def add_merged(block: CsrBlock, space: SpacePlan) -> CsrBlock:
    """Add the columns from `n_cols` on to those that they belong to.

    Parameters
    ----------
    block : CsrBlock
        With ``space.n_read`` columns, which ascend in every row if there are columns to add.
    space : SpacePlan
        Its plan; the dtypes of its layers hold every sum.

    Returns
    -------
    CsrBlock
        With ``space.n_cols`` columns, ascending as before.
    """
    n_cols = space.n_cols
    more = np.flatnonzero(block.indices >= n_cols) if len(space.merged) else np.empty(0, np.int64)
    if not len(more):
        return CsrBlock(block.indptr, block.indices, block.layers, n_cols)
    row = np.searchsorted(block.indptr, more, side="right") - 1
    column = space.merged[block.indices[more] - n_cols]
    n_more = np.bincount(row, minlength=block.n_rows)
    # Columns ascend, so those to be added are the last of their row; the others move up by what is taken out before them.
    stop = (block.indptr[1:] - n_more)[row]
    at = _search_rows(block.indices, block.indptr[row], stop, column)
    there = at < stop
    there[there] = block.indices[at[there]] == column[there]
    at -= (np.cumsum(n_more) - n_more)[row]
    keys, first, number = np.unique(row[~there] * n_cols + column[~there], return_index=True, return_inverse=True)
    places = at[~there][first]
    own = block.indices < n_cols
    layers: dict[str, NDArray[Any]] = {}
    for layer, values in block.layers.items():
        kept, fresh = values[own], np.zeros(len(keys), values.dtype)
        np.add.at(kept, at[there], values[more[there]])
        np.add.at(fresh, number, values[more[~there]])
        layers[layer] = np.insert(kept, places, fresh)
    indices = np.insert(block.indices[own], places, (keys % n_cols).astype(block.indices.dtype))
    lengths = np.diff(block.indptr) - n_more + np.bincount(keys // n_cols, minlength=block.n_rows)
    return CsrBlock(np.concatenate([[0], np.cumsum(lengths)]), indices, layers, n_cols)


def _search_rows(
    indices: NDArray[Any], start: NDArray[np.int64], stop: NDArray[np.int64], wanted: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each wanted column where it is, or belongs, among the ascending columns ``indices[start:stop]``."""
    low, high = start.copy(), stop.copy()
    while (unsettled := np.flatnonzero(low < high)).size:
        middle = (low[unsettled] + high[unsettled]) // 2
        below = indices[middle] < wanted[unsettled]
        low[unsettled[below]] = middle[below] + 1
        high[unsettled[~below]] = middle[~below]
    return low
