"""Passes over blocks of a source: what the value policy asks about, and dense to sparse."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.store.native import library

_STEP = 2**15
"""Floats that NumPy looks at before it goes on, so that they stay in the cache."""


@dataclass
class FloatScan:
    """What floats are.

    Parameters
    ----------
    low, high : float
        Smallest and largest finite value; 0 when there is none.
    fractional, strange, negative : int
        Position of the first finite value with a fraction, the first that is not finite, and the first finite one below 0;
        -1 for none.
    """

    low: float = np.inf
    high: float = -np.inf
    fractional: int = -1
    strange: int = -1
    negative: int = -1


def scan_floats(values: NDArray[Any]) -> FloatScan:
    """Scan floats, (n,), once.

    Examples
    --------
    >>> scan_floats(np.array([1.0, np.nan, 0.5]))
    FloatScan(low=0.5, high=1.0, fractional=2, strange=1, negative=-1)
    """
    found = FloatScan()
    for start in range(0, values.size, _STEP):
        part = values[start : start + _STEP]
        finite = np.isfinite(part)
        if not finite.all():
            found.strange = _first(found.strange, ~finite, start)
            # Numbers that are not finite take the place of one that is, else of 0.
            part = np.where(finite, part, part[np.argmax(finite)] if finite.any() else 0)
            if not finite.any():
                continue
        low = float(part.min())
        found.low, found.high = min(found.low, low), max(found.high, float(part.max()))
        found.fractional = _first(found.fractional, (np.floor(part) != part) & finite, start)
        if low < 0:
            found.negative = _first(found.negative, (part < 0) & finite, start)
    if found.low > found.high:
        found.low, found.high = 0.0, 0.0
    return found


def _first(known: int, marks: NDArray[np.bool_], start: int) -> int:
    """Return the position of the first mark, unless an earlier one is known; -1 for none."""
    if known >= 0:
        return known
    at = int(np.argmax(marks))
    return start + at if marks[at] else -1


def scan_whole(values: NDArray[Any]) -> tuple[int, int, bool]:
    """Scan floats that are probably all whole numbers; several times faster than `scan_floats`, which says where others are.

    Parameters
    ----------
    values : (n,) float32 or float64
        At least one.

    Returns
    -------
    tuple
        Smallest and largest value, and whether all values are whole and within 32 bits; if not, the first two mean nothing.
    """
    bounds = np.empty(2, np.int64)
    whole = library().ra_scan_whole(values, values.size, values.itemsize, bounds)
    return int(bounds[0]), int(bounds[1]), bool(whole)


def dense_to_csr(values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[Any]]:
    """Collect the values of a 2-D array that are not zero, row by row.

    Parameters
    ----------
    values : (n, m) numbers of at most 8 bytes, or booleans

    Returns
    -------
    tuple
        indptr (n + 1,) int64, indices uint32, and values of the same dtype. NaN counts as not zero.

    Examples
    --------
    >>> dense_to_csr(np.array([[0.0, 2.0], [-0.0, 0.0]]))
    (array([0, 1, 1]), array([1], dtype=uint32), array([2.]))
    """
    n, m = values.shape
    dense, is_float = np.ascontiguousarray(values), values.dtype.kind == "f"
    indptr = np.empty(n + 1, np.int64)
    library().ra_count_dense(dense, n, m, dense.itemsize, is_float, indptr)
    indices, kept = np.empty(indptr[-1], np.uint32), np.empty(indptr[-1], values.dtype)
    library().ra_take_dense(dense, n, m, dense.itemsize, is_float, indptr, indices, kept)
    return indptr, indices, kept
