"""Which rows somebody asks for: numbers, slices, masks and arrays of any library, as checked row numbers."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import RowIndexError, RowTypeError
from raggedatlas.results.tensors import as_numpy


def as_rows(index: Any, n_rows: int) -> tuple[NDArray[np.int64], bool]:  # noqa: ANN401
    """Understand an index.

    Parameters
    ----------
    index : int, slice, sequence of int, integer array, boolean array, or tensor
        Whole numbers count from 0 and are never negative; slices are Python's; a mask has one value for each row.
    n_rows : int
        How many rows there are.

    Returns
    -------
    (k,) int64
        Row numbers in the order asked for, duplicates kept.
    bool
        Whether one row was asked for by its number, and not several.

    Raises
    ------
    RowIndexError
        For a number that is negative or too large, or a mask of another length (also an ``IndexError``).
    RowTypeError
        For anything else (also a ``TypeError``).

    Examples
    --------
    >>> as_rows([2, 2, 0], 3), as_rows(slice(None, None, -1), 3)
    ((array([2, 2, 0]), False), (array([2, 1, 0]), False))
    """
    if isinstance(index, slice):
        return np.arange(*index.indices(n_rows)), False
    given = as_numpy(index)
    if isinstance(given, list | tuple | range) and len(given) == 0:
        return np.empty(0, np.int64), False
    try:
        rows = np.asarray(given)
    except ValueError as error:
        raise _refused(index) from error
    if rows.dtype == bool and rows.ndim == 1:
        if len(rows) != n_rows:
            raise RowIndexError(f"A mask of {len(rows)} values is given for {n_rows:,} rows; it needs one for each.")
        return np.flatnonzero(rows), False
    if rows.dtype.kind not in "iu" or rows.ndim > 1:
        raise _refused(index)
    single = rows.ndim == 0
    rows = rows.reshape(-1)
    outside = (rows < 0) | (rows >= n_rows)
    if outside.any():
        raise RowIndexError(
            f"Row {rows[outside][0]} is asked for of {n_rows:,}; rows count from 0 to {n_rows - 1:,}, and negative numbers "
            "do not count from the end."
        )
    return rows.astype(np.int64, copy=False), single


def _refused(index: Any) -> RowTypeError:  # noqa: ANN401
    return RowTypeError(
        f"Rows are asked for by {index!r:.80} ({type(index).__name__}); expected a whole number, a slice, a mask, or whole "
        "numbers in one dimension."
    )
