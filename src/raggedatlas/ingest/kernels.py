"""Compiled loops over blocks: what the value policy asks about, order of rows, dense to sparse, and a fast running hash."""

from typing import Any, TypeAlias

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
    low, high, strange = np.int32(0x7FFFFFFF), np.int32(-0x80000000), np.uint32(0)
    # The largest float of 32 bits that is an int32, too; whatever is beyond it, or no number, is not equal to it.
    limit = values.dtype.type(2147483520.0)
    for i in range(values.size):
        v = values[i]
        inside = v if v < limit else limit
        inside = inside if inside > -limit else -limit
        whole = np.int32(inside)
        strange = np.uint32(strange | np.uint32(values.dtype.type(whole) != v))
        low, high = min(low, whole), max(high, whole)
    return int(low), int(high), strange == 0


@numba.njit(nogil=True, cache=True)
def rows_ascend(indptr: NDArray[np.int64], indices: NDArray[Any]) -> bool:
    """Tell whether the columns of every row ascend strictly."""
    before, after = indices[:-1], indices[1:]
    # Sums of 32 bits: twice as many fit a register.
    narrow = np.uint32(0)
    for i in range(before.size):
        narrow = np.uint32(narrow + np.uint32(after[i] <= before[i]))
    falls: Integer = np.int64(narrow)
    for row in range(1, indptr.size - 1):
        at = indptr[row]
        if indptr[row - 1] < at < indices.size:
            falls -= indices[at] <= indices[at - 1]
    return bool(falls == 0)


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
    """List the set bits, ascending, from place `at` on, and clear them, with the value of each beside it.

    `slots` has 65 more than there are bits; up to four places behind the last are overwritten.
    """
    one, four = np.uint64(1), np.uint64(4)
    for w in range(words.size):
        bits = words[w]
        if bits == 0:
            continue
        words[w] = 0
        first, count = np.uint64(64 * w), np.uint64(popcount(bits))
        begin, after = at, at + count
        while True:
            # Most words have few bits or very many; four at a time wastes little and is foretold well.
            for k in range(4):
                place = first + np.uint64(trailing_zeros(bits))
                out_columns[begin + np.uint64(k)] = place
                out_values[begin + np.uint64(k)] = slots[place]
                bits &= bits - one
            if count <= four:
                break
            count -= four
            begin += four
        at = after


@numba.njit(nogil=True, cache=True)
def place_rows(
    rows: tuple[NDArray[np.int64], NDArray[np.uint32]],
    values: NDArray[Any],
    places: NDArray[Any],
    out_columns: NDArray[np.uint32],
    out_values: NDArray[Any],
) -> int:
    """Renumber the columns of rows and sort each row by the new numbers: one bit a column, then the bits in their order.

    Parameters
    ----------
    rows : (indptr, columns)
        Bounds, from any start, (n + 1,) int64; and the columns from there on, which ascend in each row as the caller has
        checked.
    values : (n_entries,) unsigned integers, or float32
        The values, or their bits; floats become the integers of at most 32 bits that `out_values` takes, as the caller has
        checked.
    places : (n_columns,) uint16 or uint32
        A permutation: new number of each column.
    out_columns, out_values : (n_entries,) uint32, unsigned integers
        Filled.

    Returns
    -------
    int
        The first row that names a column beyond `places`; the rows from there on are not placed. -1 if there is none.
    """
    indptr, columns = rows
    one, six, start = np.uint64(1), np.uint64(6), indptr[0]
    n_columns = np.uint32(places.size)
    words = np.zeros((places.size + 63) // 64, np.uint64)
    slots = np.empty(64 * words.size + 65, out_values.dtype)
    spare_columns, spare_values = np.empty(places.size + 4, np.uint32), np.empty(places.size + 4, out_values.dtype)
    for row in range(indptr.size - 1):
        first, last = indptr[row] - start, indptr[row + 1] - start
        # Rows ascend, so the largest is their last, or their first where a source's negative numbers came to look large.
        if last > first and max(columns[first], columns[last - 1]) >= n_columns:
            return row
        # Counted from 0, so that no number can be one from the end.
        row_columns, row_values = columns[first:last], values[first:last]
        for i in range(row_columns.size):
            place = np.uint64(places[row_columns[i]])
            words[place >> six] |= one << (place & np.uint64(63))
            slots[place] = np.int64(row_values[i])
        if last + 4 <= out_columns.size:
            _take_marked(words, slots, np.uint64(first), out_columns, out_values)
        else:
            _take_marked(words, slots, np.uint64(0), spare_columns, spare_values)
            out_columns[first:last] = spare_columns[: last - first]
            out_values[first:last] = spare_values[: last - first]
    return -1


HASH_LANES = 16
"""Hashes that `mix` runs side by side; a compiler puts them into one register or few."""


Four: TypeAlias = tuple[np.uint64, np.uint64, np.uint64, np.uint64]
"""Four lanes: compiled code keeps them in registers."""


@numba.njit(inline="always")
def _mixed(lane: np.uint64, value: np.uint64) -> np.uint64:
    lane = (lane ^ value) * np.uint64(0x9E3779B97F4A7C15)
    return lane ^ (lane >> np.uint64(29))


@numba.njit(inline="always")
def _mixed_four(lanes: Four, values: NDArray[Any], at: Integer) -> Four:
    a, b = _mixed(lanes[0], np.uint64(values[at])), _mixed(lanes[1], np.uint64(values[at + 1]))
    c, d = _mixed(lanes[2], np.uint64(values[at + 2])), _mixed(lanes[3], np.uint64(values[at + 3]))
    return a, b, c, d


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
    s, inner = state, values[head:end]
    a, b = (s[0], s[1], s[2], s[3]), (s[4], s[5], s[6], s[7])
    c, d = (s[8], s[9], s[10], s[11]), (s[12], s[13], s[14], s[15])
    for number in range(rounds):
        i = number * HASH_LANES
        a, b = _mixed_four(a, inner, i), _mixed_four(b, inner, i + 4)
        c, d = _mixed_four(c, inner, i + 8), _mixed_four(d, inner, i + 12)
    for lane in range(4):
        s[lane], s[4 + lane], s[8 + lane], s[12 + lane] = a[lane], b[lane], c[lane], d[lane]
    for i in range(end, values.size):
        place = (at + i) & last
        state[place] = _mixed(state[place], np.uint64(values[i]))
    state[HASH_LANES] += np.uint64(values.size)
