"""Compiled loops over blocks: what the value policy asks about, order of rows, dense to sparse, and a fast running hash."""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from raggedatlas.store.kernels import walk_bits


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
def scan_whole(values: NDArray[Any]) -> tuple[int, int, bool]:
    """Scan floats that are probably all whole numbers; several times faster than `scan_floats`, which says where others are.

    Returns
    -------
    tuple
        Smallest and largest value, and whether all values are whole and within 32 bits; if not, the first two mean nothing.
    """
    low, high, strange = np.int32(0x7FFFFFFF), np.int32(-0x80000000), 0
    for i in range(values.size):
        v = values[i]
        inside = abs(v) < 2147483520.0
        whole = np.int32(v if inside else values.dtype.type(0))
        strange |= (not inside) | (whole != v)
        low, high = min(low, whole), max(high, whole)
    return int(low), int(high), strange == 0


@numba.njit(nogil=True, cache=True)
def rows_ascend(indptr: NDArray[np.int64], indices: NDArray[Any]) -> bool:
    """Tell whether the columns of every row ascend strictly."""
    before, after = indices[:-1], indices[1:]
    falls = 0
    for i in range(before.size):
        falls += after[i] <= before[i]
    for row in range(1, indptr.size - 1):
        at = indptr[row]
        if indptr[row - 1] < at < indices.size:
            falls -= indices[at] <= indices[at - 1]
    return falls == 0


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
def claim_places(columns: NDArray[Any], taken: NDArray[np.int64], places: NDArray[np.int64]) -> None:
    """Give every entry the next free place of its column.

    Parameters
    ----------
    columns : (n,) unsigned integers
        Column of each entry; the caller has checked that each is below the length of `taken`.
    taken : (n_columns,) int64
        Next free place of each column, moved on in place.
    places : (n,) int64
        Filled with the place of each entry.
    """
    for i in range(columns.size):
        column = columns[i]
        places[i] = taken[column]
        taken[column] += 1


@numba.njit(nogil=True, cache=True)
def scatter(values: NDArray[Any], places: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Put every value at its place, which the caller has checked."""
    for i in range(values.size):
        out[places[i]] = values[i]


@numba.njit(nogil=True, cache=True)
def move_runs(values: NDArray[Any], starts: NDArray[np.int64], at: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy run i, ``values[starts[i]:starts[i + 1]]``, to ``out[at[i]:]``; the caller has checked that there is room."""
    for run in range(at.size):
        shift = at[run] - starts[run]
        for i in range(starts[run], starts[run + 1]):
            out[i + shift] = values[i]


@numba.njit(nogil=True, cache=True)
def place_rows(
    rows: tuple[NDArray[np.int64], NDArray[np.uint32]],
    values: NDArray[Any],
    places: NDArray[np.uint32],
    out_columns: NDArray[np.uint32],
    out_values: NDArray[Any],
) -> None:
    """Renumber the columns of rows and sort each row by the new numbers: one bit a column, then the bits in their order.

    Parameters
    ----------
    rows : (indptr, columns)
        Bounds, from any start, (n + 1,) int64; and the columns from there on, each below the length of `places` and at most
        once in a row, both of which the caller has checked.
    values : (n_entries,) unsigned integers
        The values, or their bits.
    places : (n_columns,) uint32
        A permutation: new number of each column.
    out_columns, out_values : (n_entries,) uint32, as `values`
        Filled.
    """
    indptr, columns = rows
    one, six, start = np.uint64(1), np.uint64(6), indptr[0]
    words = np.zeros((places.size + 63) // 64, np.uint64)
    slots, found = np.empty(places.size, values.dtype), np.empty(places.size + 8, np.uint32)
    for row in range(indptr.size - 1):
        first, last = indptr[row] - start, indptr[row + 1] - start
        for i in range(first, last):
            place = np.uint64(places[columns[i]])
            words[place >> six] |= one << (place & np.uint64(63))
            slots[place] = values[i]
        walk_bits(words, found)
        row_columns, row_values = out_columns[first:last], out_values[first:last]
        for i in range(last - first):
            row_columns[i] = found[i]
            row_values[i] = slots[found[i]]


@numba.njit(inline="always")
def _mixed(first: np.uint64, second: np.uint64, value: np.uint64) -> tuple[np.uint64, np.uint64]:
    first = (first ^ value) * np.uint64(0x9E3779B97F4A7C15)
    first ^= first >> np.uint64(29)
    second = (second + value) * np.uint64(0xD6E8FEB86659FD93)
    return first, (second << np.uint64(31)) | (second >> np.uint64(33))


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
        first, second = _mixed(first, second, np.uint64(values[i]))
    state[0], state[1] = first, second


@numba.njit(nogil=True, cache=True)
def mix_both(one: NDArray[Any], of_one: NDArray[np.uint64], two: NDArray[Any], of_two: NDArray[np.uint64]) -> None:
    """Do what `mix` does, for two arrays of one length at a time: each step of one fills the wait for the other's."""
    a, b, c, d = of_one[0], of_one[1], of_two[0], of_two[1]
    for i in range(one.size):
        a, b = _mixed(a, b, np.uint64(one[i]))
        c, d = _mixed(c, d, np.uint64(two[i]))
    of_one[0], of_one[1], of_two[0], of_two[1] = a, b, c, d
