"""The compiled loop of a gather that sorts: columns that are left out, or rows whose columns must ascend.

This module imports numba at the top, so it is imported inside functions only.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.store.chunks import GOOD
from raggedatlas.store.gathering import OUTSIDE, REPEATED, check_chunk_once, fetch_ahead, least, take
from raggedatlas.store.kernels import Flag, Integer, compiled, walk_bits
from raggedatlas.store.lanes import BLOCK, call5, call7, load, store

_ABSENT = -1


@compiled
def gather_placed(
    rows: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    arrays: tuple[tuple[Any, ...], tuple[Any, ...]],
    maps: tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]],
    picks: tuple[NDArray[np.uint32], NDArray[np.int32], NDArray[np.int64], tuple[Integer, Integer]],
    out: tuple[NDArray[np.int32], NDArray[Any], NDArray[np.int64]],
    room: tuple[Any, ...],
) -> tuple[Integer, Integer, Integer]:
    """Read rows as `gather_rows` does, leave out columns that map to -1, and sort every row.

    Parameters
    ----------
    rows, arrays
        As for `gather_rows`; columns and values.
    maps : tuple
        Column maps and their bounds as for `gather_rows`, then (g,) bool of those that leave nothing out.
    picks : tuple
        Of the groups of which few columns are kept: those, ascending (uint32), and the columns that they map to (int32), one
        group behind the other, with their (g + 1,) bounds, and the addresses of `pick_range` and `read_places`.
    out : tuple
        Columns (int32), values, and (n,) int64 for how many entries of each row were kept.
    room : tuple
        As for `gather_rows`, then int32 and uint32 for the longest row and eight more, zero bits for all columns in words of
        64, a slot for every column that holds any value read, and int64 for twice the longest row and 512 more.

    Returns
    -------
    (int, int, int)
        As for `gather_rows`; also `REPEATED` with a row that names a column twice.
    """
    order, group, start, stop, at = rows
    columns, values = arrays
    scratch, chunk0, chunk1, found_room, values_room, words, slots, pick_room = room
    held = np.full(2, -1, np.int64)
    own = (scratch.ctypes.data, chunk0.ctypes.data, held, 0), (scratch.ctypes.data, chunk1.ctypes.data, held, 1)
    size = 8 * (pick_room.size // 3)
    picked, found = pick_room.ctypes.data, found_room.ctypes.data
    picking = scratch.ctypes.data, picked, picked + size, values_room.ctypes.data, found
    tables = _addresses(columns), _addresses(values)
    column_maps, bounds, complete = maps
    for i in range(order.size):
        row = order[i]
        if i + 1 < order.size:
            later = order[i + 1]
            fetch_ahead(columns, group[later], (start[later], stop[later]))
        g, span = group[row], (start[row], stop[row])
        first, last, kept = np.int64(0), np.int64(0), np.int64(_ABSENT)
        if picks[2][g + 1] > picks[2][g]:
            begin, n = picks[2][g], picks[2][g + 1] - picks[2][g]
            wanted = picks[0].ctypes.data + 4 * begin, n, picks[1].ctypes.data + 4 * begin, *picks[3]
            status, slot, which, kept = _pick_row(tables, g, span, wanted, picking)
            if status != GOOD:
                return status, slot, which
            last = kept
        if kept == _ABSENT:
            column_map = column_maps.ctypes.data + 4 * bounds[g], bounds[g + 1] - bounds[g]
            status, slot = take(columns, g, span, own[0], column_map, (found, 2))
            if status != GOOD:
                return status, slot, 0
            first, last, kept = _span_of_kept(found_room, span[1] - span[0], complete[g])
            if kept < 0:
                return OUTSIDE, row, 0
            span = (start[row] + first, start[row] + max(first, last))
            status, slot = take(values, g, span, own[1], (0, 0), (values_room.ctypes.data, 2))
            if status != GOOD:
                return status, slot, 1
        if kept and not _place((found_room, values_room), (first, last, at[row], kept), out[:2], words, slots):
            return REPEATED, row, 0
        out[2][row] = kept
    return GOOD, 0, 0


@compiled
def _addresses(array: tuple[Any, ...]) -> tuple[Integer, ...]:
    """Give an array's facts as addresses, which two threads can hold without counting references to the same objects."""
    addresses, sizes, states, groups, native = array
    data = addresses.ctypes.data, sizes.ctypes.data, states.ctypes.data, groups.ctypes.data
    return *data, np.int64(native[2]), np.int64(native[1])


@compiled
def _signed(address: Integer, i: Integer) -> Integer:
    """Return entry i of int64 at an address."""
    return np.int64(load(np.uint64(address + 8 * i), 8))


@compiled
def _open_chunk(table: tuple[Integer, ...], group: Integer, number: Integer) -> tuple[Integer, Integer, Integer]:
    """Check a chunk of a group; return a status, its address, 0 if it is not stored, and its slot."""
    slot = _signed(table[3], 4 * group) + number
    address, size = _signed(table[0], slot), _signed(table[1], slot)
    if size < 0:
        return GOOD, np.int64(0), slot
    facts = address, size, _signed(table[3], 4 * group + 1), _signed(table[3], 4 * group + 3), table[5]
    return check_chunk_once(table[2] + slot, facts, table[4]), address, slot


@compiled
def _pick_row(
    tables: tuple[tuple[Integer, ...], tuple[Integer, ...]],
    group: Integer,
    span: tuple[Integer, Integer],
    wanted: tuple[Integer, Integer, Integer, Integer, Integer],
    room: tuple[Integer, Integer, Integer, Integer, Integer],
) -> tuple[Integer, Integer, Integer, Integer]:
    """Find the wanted columns of one row, map them and read their values; return a status, the bad slot, which array, and how many.

    `wanted` has the addresses of the columns, of what they map to, and of `pick_range` and `read_places`, and second, how many
    columns there are. `room` has the addresses of scratch, of three times as many int64 as a row and two blocks have entries,
    of the second third of these, of the values and of the columns found.
    """
    status, slot, kept = _pick_columns(tables[0], group, span, wanted, room)
    if status != GOOD:
        return status, slot, 0, kept
    for i in range(kept):
        target = load(np.uint64(wanted[2] + 4 * _signed(room[2], i)), 4)
        store(np.uint64(room[4] + 4 * i), 4, target)
    status, slot, kept = _pick_values(tables[1], group, kept, wanted[4], room)
    return status, slot, 1, kept


@compiled
def _pick_columns(
    table: tuple[Integer, ...],
    group: Integer,
    span: tuple[Integer, Integer],
    wanted: tuple[Integer, ...],
    room: tuple[Integer, ...],
) -> tuple[Integer, Integer, Integer]:
    """Write the numbers of the wanted entries and their places among the wanted; return a status, the bad slot, and how many.

    It is -1 where a chunk is not stored.
    """
    start, stop = span
    per_chunk, kept = _signed(table[3], 4 * group + 1), np.int64(0)
    while start < stop:
        number = start // per_chunk
        status, address, slot = _open_chunk(table, group, number)
        if status != GOOD or address == 0:
            return status, slot, np.int64(_ABSENT)
        low, high = start - number * per_chunk, min(stop - number * per_chunk, per_chunk)
        places = room[2] + 8 * kept
        numbers = places + 8 * (high - low + BLOCK)
        n = call7(wanted[3], (address, low, high, room[0], wanted[0], wanted[1], places))
        for i in range(n):
            store(np.uint64(room[1] + 8 * (kept + i)), 8, np.uint64(number * per_chunk + _signed(numbers, i)))
        kept += n
        start += high - low
    return GOOD, np.int64(0), kept


@compiled
def _pick_values(
    table: tuple[Integer, ...], group: Integer, kept: Integer, function: Integer, room: tuple[Integer, ...]
) -> tuple[Integer, Integer, Integer]:
    """Read the values of what `_pick_columns` found by `read_places`; return as it does."""
    per_chunk, i = _signed(table[3], 4 * group + 1), np.int64(0)
    while i < kept:
        number = _signed(room[1], i) // per_chunk
        status, address, slot = _open_chunk(table, group, number)
        if status != GOOD or address == 0:
            return status, slot, np.int64(_ABSENT)
        n, before = np.int64(0), number * per_chunk
        while i + n < kept and _signed(room[1], i + n) < before + per_chunk:
            store(np.uint64(room[2] + 8 * n), 8, np.uint64(_signed(room[1], i + n) - before))
            n += 1
        call5(function, (address, room[2], n, room[0], room[3] + 4 * i))
        i += n
    return GOOD, np.int64(0), kept


@compiled
def _span_of_kept(found: NDArray[np.int32], n: Integer, complete: Flag) -> tuple[Integer, Integer, Integer]:
    """Return the first kept of n entries, the one behind the last, and their number; -1 for a column outside its map."""
    if complete:
        return np.int64(0), n, n if least(found.ctypes.data, n) >= 0 else np.int64(-1)
    first, last, kept = n, np.int64(0), np.int64(0)
    for j in range(n):
        if found[j] >= 0:
            first = min(first, j)
            last = np.int64(j + 1)
            kept += 1
        elif found[j] < -1:
            return np.int64(0), np.int64(0), np.int64(-1)
    return first, last, kept


@compiled
def _place(
    taken: tuple[NDArray[np.int32], NDArray[np.uint32]],
    span: tuple[Integer, Integer, Integer, Integer],
    out: tuple[NDArray[np.int32], NDArray[Any]],
    words: NDArray[np.uint64],
    slots: NDArray[Any],
) -> Flag:
    """Write the kept entries of a row by ascending column; False if a column stands there twice. Words are left zero.

    `taken` has columns from the row's first entry on and values from `span`'s first on; `span` ends with the first output
    entry and the number that is kept.
    """
    found, read = taken
    first, last, start, kept = span
    one, six, low_bits = np.uint64(1), np.uint64(6), np.uint64(63)
    if kept == last - first:
        for j in range(kept):
            place = np.uint64(found[np.uint64(first + j)])
            words[place >> six] |= one << (place & low_bits)
            slots[place] = read[np.uint64(j)]
    else:
        for j in range(last - first):
            column = found[np.uint64(first + j)]
            if column >= 0:
                place = np.uint64(column)
                words[place >> six] |= one << (place & low_bits)
                slots[place] = read[np.uint64(j)]
    n = walk_bits(words, found)
    indices, values = out[0][start : start + n], out[1][start : start + n]
    for j in range(n):
        indices[j] = found[j]
        values[j] = slots[np.uint64(found[j])]
    return n == kept


@compiled
def close_gaps(
    at: NDArray[np.int64],
    indptr: NDArray[np.int64],
    found: tuple[NDArray[np.int32], NDArray[Any]],
    out: tuple[NDArray[np.int32], NDArray[Any]],
) -> None:
    """Copy rows that begin at `at` to where `indptr` says."""
    for row in range(indptr.size - 1):
        n = indptr[row + 1] - indptr[row]
        out[0][indptr[row] : indptr[row + 1]] = found[0][at[row] : at[row] + n]
        out[1][indptr[row] : indptr[row + 1]] = found[1][at[row] : at[row] + n]
