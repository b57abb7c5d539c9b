"""The compiled loop of the gather: for every row find its chunks, unpack what it needs, map columns, place.

This module imports numba at the top, so it is imported inside functions only.
"""

# ruff: noqa: TID253

from typing import Any

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from raggedatlas.store.chunks import GOOD, decode_frame, frame_pointer
from raggedatlas.store.kernels import Integer, compiled
from raggedatlas.store.lanes import byte_at, call5, call7, prefetch, store

PACKED_CHUNKS = 2
"""Kind of chunk beside PLAIN and BLOSC of `raggedatlas.store.chunks`."""

CHECKED = 8
"""Added to the kind of a chunk that ends with its crc32c; packed chunks always do."""

SEEN = 1
OUTSIDE, REPEATED = 4, 5
_LINE = 64


@compiled
def arrange_rows(
    rows: tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]],
    groups: NDArray[np.int64],
    shards: tuple[tuple[NDArray[np.int64], NDArray[np.bool_]], tuple[NDArray[np.int64], NDArray[np.bool_]]],
    order: tuple[NDArray[np.int64], NDArray[np.int64]],
    at: NDArray[np.int64],
) -> tuple[Integer, Integer, Integer]:
    """Check rows, bound their entries in the result, and list those that have any with where they are stored.

    Parameters
    ----------
    rows : three arrays
        (n,) group, first entry and end of every row.
    groups : (g, 4) int64
        Entries of each group, those of the groups before it, columns that it has, and columns that are kept.
    shards : two pairs
        For columns and values: (g, 2) int64 of entries a shard and the group's first shard, and whether a shard is mapped.
    order : two (n,) int64
        Filled with the rows to read, and with the place of each among the entries of all groups.
    at : (n + 1,) int64
        Filled with the first output entry of every row.

    Returns
    -------
    (int, int, int)
        Number of rows to read, -1 and the row where one lies outside its group, -2 and the row where one has too many
        entries; entries of the longest row; and whether all shards are mapped.
    """
    group, start, end = rows
    n, longest, mapped = 0, np.int64(0), 1
    at[0] = 0
    for row in range(group.size):
        g = group[row]
        at[row + 1] = at[row]
        if g < 0:
            continue
        low, high = start[row], end[row]
        if low < 0 or high < low or high > groups[g, 0]:
            return -1, row, 0
        if high - low > groups[g, 2]:
            return -2, row, 0
        if high == low:
            continue
        at[row + 1] += min(high - low, groups[g, 3])
        longest = max(longest, high - low)
        order[0][n] = row
        order[1][n] = groups[g, 1] + low
        n += 1
        for k in range(2):
            grid, known = shards[k]
            first = grid[g, 1] + low // grid[g, 0]
            for shard in range(first, grid[g, 1] + (high - 1) // grid[g, 0] + 1):
                mapped &= known[shard]
    return n, longest, mapped


@compiled
def check_chunk_once(
    state: Integer, facts: tuple[Integer, Integer, Integer, Integer, Integer], function: Integer
) -> Integer:
    """Check a packed chunk when it is first read, by `check_chunk` at an address; `state` is the address of a byte."""
    if byte_at(np.uint64(state)) == SEEN:
        return GOOD
    status = call5(function, facts)
    if status == GOOD:
        store(np.uint64(state), 1, np.uint64(SEEN))
    return status


@compiled
def take(
    array: tuple[Any, ...],
    group: Integer,
    span: tuple[Integer, Integer],
    room: tuple[Integer, Integer, NDArray[np.int64], Integer],
    column_map: tuple[Integer, Integer],
    out: tuple[Integer, Integer],
) -> tuple[Integer, Integer]:
    """Read one range of one group's array to an address; return a status and the slot of the bad chunk.

    `room` has the address of 264 uint32, that of a decoded chunk, and the slots that are decoded there with the place of
    this array's own among them.
    """
    addresses, sizes, states, groups, native = array
    scratch, chunk, held, which = room
    first_slot, per_chunk = groups[group, 0], groups[group, 1]
    kind, itemsize = groups[group, 2], groups[group, 3]
    start, stop = span
    target, code = out
    form = column_map[1] if column_map[0] else code
    width = np.int64(4) if column_map[0] or code == 4 else np.int64(1) << min(code, 3)
    while start < stop:
        number = start // per_chunk
        slot = first_slot + number
        low, high = start - number * per_chunk, min(stop - number * per_chunk, per_chunk)
        address, size = np.int64(addresses[slot]), sizes[slot]
        if kind == PACKED_CHUNKS and size >= 0:
            facts = address, size, per_chunk, itemsize, np.int64(native[1])
            status = check_chunk_once(states.ctypes.data + slot, facts, native[2])
            if status != GOOD:
                return status, slot
            call7(native[3], (address, low, high, scratch, column_map[0], target, form))
        else:
            if held[which] != slot:
                status = _decode_whole((address, size), per_chunk * itemsize, kind, native, chunk)
                if status != GOOD:
                    return status, slot
                held[which] = slot
            source = chunk + low * itemsize
            call7(native[4], (source, itemsize, high - low, scratch, column_map[0], target, form))
        target += (high - low) * width
        start += high - low
    return GOOD, 0


@compiled
def _decode_whole(
    frame: tuple[Integer, Integer], n_bytes: Integer, kind: Integer, native: tuple[Integer, Integer], chunk: Integer
) -> Integer:
    """Decode a whole chunk of another codec to an address; one that is not stored is all zero."""
    address, size = frame
    if size < 0:
        carray(frame_pointer(np.uint64(chunk)), (n_bytes,), np.uint8)[:] = 0
        return GOOD
    data = carray(frame_pointer(np.uint64(address)), (size,), np.uint8)
    return decode_frame(data, address, chunk, n_bytes, (kind & 7, kind >= CHECKED, native[0], native[1]))


@compiled
def fetch_ahead(array: tuple[Any, ...], group: Integer, span: tuple[Integer, Integer]) -> None:
    """Ask for the cache lines that the next row will need: the head of its chunk, and about where its blocks lie."""
    addresses, sizes, _, groups, _ = array
    first_slot, per_chunk, kind = groups[group, 0], groups[group, 1], groups[group, 2]
    if kind != PACKED_CHUNKS or span[0] >= span[1]:
        return
    number = span[0] // per_chunk
    slot = first_slot + number
    address, size = np.int64(addresses[slot]), sizes[slot]
    if size < 0:
        return
    for line in range(5):
        prefetch(np.uint64(address + _LINE * line))
    low, high = span[0] - number * per_chunk, min(span[1] - number * per_chunk, per_chunk)
    begin, end = address + low * size // per_chunk, address + high * size // per_chunk
    while begin < end:
        prefetch(np.uint64(begin))
        begin += _LINE


@compiled
def gather_rows(
    rows: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    columns: tuple[Any, ...],
    values: tuple[Any, ...],
    maps: tuple[NDArray[np.int32], NDArray[np.int64]],
    out: tuple[NDArray[np.int32], NDArray[Any], Integer],
    room: tuple[NDArray[np.uint32], NDArray[np.uint8], NDArray[np.uint8]],
) -> tuple[Integer, Integer, Integer]:
    """Read rows of ragged groups straight into a CSR: their columns mapped, their values, nothing left out or sorted.

    Parameters
    ----------
    rows : five arrays
        (k,) order in which to read, then (n,) group, first entry, end and first output entry of every row.
    columns, values : tuple
        Addresses (uint64), sizes (int64; -1 for a chunk that is not stored) and states (uint8) of all chunks, (g, 4) int64
        of each group (first slot, entries of a chunk, kind, bytes of an entry), and the addresses of Blosc's decompress,
        crc32c, `check_chunk`, `unpack_range` and `copy_values`.
    maps : tuple
        Column maps (int32) one behind the other, each with a last entry -2 for columns beyond it, and their (g + 1,) bounds.
    out : tuple
        Columns (int32), values, and the element type of the values by `raggedatlas.store.elements.TYPE_CODES`.
    room : tuple
        (264,) uint32, and two of uint8 for one decoded chunk each.

    Returns
    -------
    (int, int, int)
        Status, slot of the bad chunk, and 0 where the columns, 1 where the values are bad.
    """
    order, group, start, stop, at = rows
    held = np.full(2, -1, np.int64)
    own = (room[0].ctypes.data, room[1].ctypes.data, held, 0), (room[0].ctypes.data, room[2].ctypes.data, held, 1)
    column_maps, bounds = maps
    for i in range(order.size):
        row = order[i]
        if i + 1 < order.size:
            later = order[i + 1]
            fetch_ahead(columns, group[later], (start[later], stop[later]))
            fetch_ahead(values, group[later], (start[later], stop[later]))
        g, n = group[row], stop[row] - start[row]
        span = (start[row], stop[row])
        column_map = column_maps.ctypes.data + 4 * bounds[g], bounds[g + 1] - bounds[g]
        found = out[0].ctypes.data + 4 * at[row]
        status, slot = take(columns, g, span, own[0], column_map, (found, 2))
        if status != GOOD:
            return status, slot, 0
        if least(found, n) < 0:
            return OUTSIDE, row, 0
        target = out[1].ctypes.data + out[1].itemsize * at[row]
        status, slot = take(values, g, span, own[1], (0, 0), (target, out[2]))
        if status != GOOD:
            return status, slot, 1
    return GOOD, 0, 0


@compiled
def least(address: Integer, n: Integer) -> Integer:
    """Return the smallest of n int32 at an address, or 0."""
    values = carray(frame_pointer(np.uint64(address)), (n,), np.int32)
    least = np.int32(0)
    for i in range(n):
        least = min(least, values[i])
    return least
