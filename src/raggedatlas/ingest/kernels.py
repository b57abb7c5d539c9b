"""Compiled loops over blocks of values: what the value policy asks about, dense to sparse, and a fast running hash."""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray


@numba.njit(nogil=True, cache=True)
def scan_floats(values: NDArray[Any]) -> tuple[float, float, int, int, int]:
    """Scan floats once.

    Returns
    -------
    tuple
        Smallest and largest finite value (0 when there is none), and the position of the first fractional, the first
        non-finite and the first negative value; -1 for none.
    """
    low, high = np.inf, -np.inf
    fractional, strange, negative = -1, -1, -1
    for i in range(values.size):
        v = values[i]
        if not np.isfinite(v):
            if strange < 0:
                strange = i
            continue
        low = min(low, v)
        high = max(high, v)
        if fractional < 0 and v != np.floor(v):
            fractional = i
        if negative < 0 and v < 0:
            negative = i
    if low > high:
        low, high = 0.0, 0.0
    return low, high, fractional, strange, negative


@numba.njit(nogil=True, cache=True)
def dense_to_csr(values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[Any]]:
    """Collect the values of a 2-D array that are not zero, row by row.

    Returns
    -------
    tuple
        indptr (n + 1,) int64, indices uint32, and values of the same dtype. NaN counts as not zero.
    """
    n, m = values.shape
    indptr = np.zeros(n + 1, np.int64)
    for i in range(n):
        count = 0
        for j in range(m):
            count += values[i, j] != 0
        indptr[i + 1] = indptr[i] + count
    indices = np.empty(indptr[n], np.uint32)
    kept = np.empty(indptr[n], values.dtype)
    for i in range(n):
        at = indptr[i]
        for j in range(m):
            if values[i, j] != 0:
                indices[at] = j
                kept[at] = values[i, j]
                at += 1
    return indptr, indices, kept


@numba.njit(nogil=True, cache=True)
def mix(values: NDArray[Any], state: NDArray[np.uint64]) -> None:
    """Take unsigned integers into a running 128-bit hash, one after the other; where blocks begin makes no difference.

    It tells different contents apart, not forged ones: a cryptographic hash would take most of the time of an `add`.

    Parameters
    ----------
    values : (n,) unsigned integers
        What to take in.
    state : (2,) uint64
        Changed in place.
    """
    first, second = state[0], state[1]
    for i in range(values.size):
        v = np.uint64(values[i])
        first = (first ^ v) * np.uint64(0x9E3779B97F4A7C15)
        first ^= first >> np.uint64(29)
        second = (second + v) * np.uint64(0xD6E8FEB86659FD93)
        second = (second << np.uint64(31)) | (second >> np.uint64(33))
    state[0], state[1] = first, second
