"""Compiled loops over blocks: what the value policy asks about, order of rows, dense to sparse, and a fast running hash."""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from raggedatlas.store.kernels import Integer, compiled
from raggedatlas.store.lanes import popcount, trailing_zeros


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


@compiled
def _take_marked(
    words: NDArray[np.uint64],
    slots: NDArray[Any],
    at: Integer,
    out_columns: NDArray[np.uint32],
    out_values: NDArray[Any],
) -> None:
    """Do what `walk_bits` does from place `at` on, with the value of each bit beside it: `slots` has 65 more than there are bits."""
    one, eight = np.uint64(1), np.uint64(8)
    for w in range(words.size):
        bits = words[w]
        if bits == 0:
            continue
        words[w] = 0
        first, count = np.uint64(64 * w), np.uint64(popcount(bits))
        begin, after = at, at + count
        while True:
            for k in range(8):
                place = first + np.uint64(trailing_zeros(bits))
                out_columns[begin + np.uint64(k)] = place
                out_values[begin + np.uint64(k)] = slots[place]
                bits &= bits - one
            if count <= eight:
                break
            count -= eight
            begin += eight
        at = after


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
    slots = np.empty(64 * words.size + 65, values.dtype)
    spare_columns, spare_values = np.empty(places.size + 8, np.uint32), np.empty(places.size + 8, values.dtype)
    for row in range(indptr.size - 1):
        first, last = indptr[row] - start, indptr[row + 1] - start
        for i in range(first, last):
            place = np.uint64(places[columns[i]])
            words[place >> six] |= one << (place & np.uint64(63))
            slots[place] = values[i]
        if last + 8 <= out_columns.size:
            _take_marked(words, slots, np.uint64(first), out_columns, out_values)
        else:
            _take_marked(words, slots, np.uint64(0), spare_columns, spare_values)
            out_columns[first:last] = spare_columns[: last - first]
            out_values[first:last] = spare_values[: last - first]


HASH_LANES = 16
"""Hashes that `mix` runs side by side; a compiler puts them into one register or few."""


@numba.njit(inline="always")
def _mixed(lane: np.uint64, value: np.uint64) -> np.uint64:
    lane = (lane ^ value) * np.uint64(0x9E3779B97F4A7C15)
    return lane ^ (lane >> np.uint64(29))


@numba.njit(nogil=True, cache=True)
def mix(values: NDArray[Any], state: NDArray[np.uint64]) -> None:
    """Take unsigned integers into a running hash, in turn into each of its lanes; where blocks begin makes no difference.

    It tells different contents apart, not forged ones: a cryptographic hash would take most of the time of an `add`.

    Parameters
    ----------
    values : (n,) unsigned integers
        What to take in.
    state : (17,) uint64
        The lanes, and how many values they took in; changed in place.
    """
    last = HASH_LANES - 1
    at: Integer = np.int64(state[HASH_LANES] & np.uint64(last))
    head: Integer = min((HASH_LANES - at) & last, values.size)
    for i in range(head):
        state[at + i] = _mixed(state[at + i], np.uint64(values[i]))
    rounds = (values.size - head) // HASH_LANES
    end = head + rounds * HASH_LANES
    rows = values[head:end].reshape(rounds, HASH_LANES)
    lanes = state[:HASH_LANES].copy()
    for row in range(rounds):
        for lane in range(HASH_LANES):
            lanes[lane] = _mixed(lanes[lane], np.uint64(rows[row, lane]))
    state[:HASH_LANES] = lanes
    for i in range(end, values.size):
        place = (at + i) & last
        state[place] = _mixed(state[place], np.uint64(values[i]))
    state[HASH_LANES] += np.uint64(values.size)
