"""Finding a few columns in packed chunks: blocks are searched, not unpacked and mapped value by value.

This module imports numba at the top, so it is imported inside functions only.
"""

# ruff: noqa: PLR0917 - functions that are called at an address take plain numbers

import numpy as np

from raggedatlas.store.kernels import Integer, address_function, compiled
from raggedatlas.store.lanes import BLOCK, SIXTEEN, byte_at, first_not_below, load, popcount, store
from raggedatlas.store.packing import ASCENDING, BITMAP, HEAD_BYTES, SKIP, SKIP_BYTES
from raggedatlas.store.unpacking import block_bytes, entry_at, seek, unpack_narrow


@compiled
def _word(address: Integer, i: Integer) -> Integer:
    """Return entry i of uint32 at an address."""
    return load(np.uint64(address + 4 * i), 4)


@compiled
def _from(words: Integer, n: Integer, value: Integer) -> Integer:
    """Return the first place among n ascending uint32 that is not below a value.

    The sign of a difference moves on, not a branch: that would be guessed wrongly every other time.
    """
    low, left, sought = np.int64(0), np.int64(n), np.int64(value)
    while left > 0:
        half = (left + 1) >> 1
        low += half & ((np.int64(_word(words, low + half - 1)) - sought) >> 63)
        left -= half
    return low


@compiled
def _note(out: tuple[Integer, Integer], n: Integer, place: Integer, number: Integer) -> None:
    """Write the n-th find: a place among the wanted, and the number of a value."""
    store(np.uint64(out[0] + 8 * n), 8, np.uint64(place))
    store(np.uint64(out[1] + 8 * n), 8, np.uint64(number))


@compiled
def _pick_bitmap(
    body: Integer,
    n_bytes: Integer,
    base: Integer,
    start: Integer,
    wanted: tuple[Integer, Integer],
    out: tuple[Integer, Integer],
) -> Integer:
    """Test the bit of every wanted column, and count the bits below the set ones; return how many are set."""
    n, byte, rank = 0, np.int64(0), np.int64(start)
    for i in range(_from(wanted[0], wanted[1], base), wanted[1]):
        place = np.int64(_word(wanted[0], i) - base)
        if place >> 3 >= n_bytes:
            break
        while byte + 8 <= place >> 3:
            rank += popcount(load(np.uint64(body + byte), 8))
            byte += 8
        while byte < place >> 3:
            rank += popcount(np.uint64(byte_at(np.uint64(body + byte))))
            byte += 1
        bits = byte_at(np.uint64(body + byte))
        if bits >> (place & 7) & 1:
            _note(out, n, i, rank + popcount(np.uint64(bits & ((1 << (place & 7)) - 1))))
            n += 1
    return n


@compiled
def _pick_ascending(
    values: Integer, size: Integer, start: Integer, wanted: tuple[Integer, Integer], out: tuple[Integer, Integer]
) -> Integer:
    """Search every wanted column among ascending ones; return how many are there."""
    n, group, last = 0, np.int64(0), _word(values, size - 1)
    for i in range(_from(wanted[0], wanted[1], _word(values, 0)), wanted[1]):
        column = _word(wanted[0], i)
        if column > last:
            break
        # Behind the last value lies anything, but that is not below the column and comes first.
        while group + SIXTEEN < size and _word(values, group + SIXTEEN - 1) < column:
            group += SIXTEEN
        at = group + first_not_below(np.uint64(values + 4 * group), np.uint32(column))
        if _word(values, at) == column:
            _note(out, n, i, start + at)
            n += 1
    return n


@compiled
def _pick_any(
    values: tuple[Integer, Integer, Integer],
    start: Integer,
    wanted: tuple[Integer, Integer],
    out: tuple[Integer, Integer],
) -> Integer:
    """Look every value, plus a number, up among the wanted columns; return how many are."""
    n = 0
    for j in range(values[1]):
        column = np.uint64(np.uint32(_word(values[0], j) + values[2]))
        i = _from(wanted[0], wanted[1], column)
        if i < wanted[1] and _word(wanted[0], i) == column:
            _note(out, n, i, start + j)
            n += 1
    return n


@compiled
def _keep_inside(out: tuple[Integer, Integer], n: Integer, first: Integer, last: Integer) -> Integer:
    """Leave out what lies outside a range; return how many stay."""
    kept = 0
    for i in range(n):
        number = np.int64(load(np.uint64(out[1] + 8 * i), 8))
        if first <= number < last:
            _note(out, kept, load(np.uint64(out[0] + 8 * i), 8), number)
            kept += 1
    return kept


@address_function(7)
def pick_range(
    address: Integer, first: Integer, last: Integer, scratch: Integer, wanted: Integer, n_wanted: Integer, out: Integer
) -> Integer:
    """Find some columns among values of a checked chunk of at most 4 bytes a value.

    Parameters
    ----------
    address : int
        Where the chunk lies.
    first, last : int
        First value and the one behind the last, inside the chunk.
    scratch : int
        Address of room for 264 uint32.
    wanted, n_wanted : int
        Address of distinct ascending uint32, and how many they are.
    out : int
        Address of room for ``2 * (last - first + 256)`` int64: the first half is filled with places in `wanted`, the second
        with the number, in the chunk, of the value that equals it, ascending.

    Returns
    -------
    int
        How many were found.
    """
    n_blocks = np.int64(load(np.uint64(address + 8), 4))
    table = address + HEAD_BYTES + SKIP_BYTES * ((n_blocks + SKIP - 1) // SKIP)
    payload = table + 3 * n_blocks
    flags = byte_at(np.uint64(address + 3))
    ascending = (flags & ASCENDING) != 0
    base_bytes, itemsize = np.int64(1) << (flags >> 3 & 3), np.int64(1) << (flags & 3)
    columns = wanted, n_wanted
    room = last - first + BLOCK
    greatest = _word(wanted, n_wanted - 1)
    block, start, position = seek(address, first)
    found = 0
    while start < last:
        entry = entry_at(table, n_blocks, block)
        base = load(np.uint64(payload + position), base_bytes)
        body = payload + position + base_bytes
        free = out + 8 * found, out + 8 * (room + found)
        if ascending and greatest < base:
            n = 0
        elif ascending and entry[1] & 63 == BITMAP:
            n = _pick_bitmap(body, entry[2], base, start, columns, free)
        else:
            more = unpack_narrow(body, base, entry, ascending, itemsize, scratch)
            if ascending:
                n = _pick_ascending(scratch, entry[0], start, columns, free)
            else:
                n = _pick_any((scratch, entry[0], more), start, columns, free)
        if start < first or start + entry[0] > last:
            n = _keep_inside(free, n, first, last)
        found += n
        position += block_bytes(entry[0], entry[1], entry[2], base_bytes, itemsize)
        start += entry[0]
        block += 1
    return found


@address_function(5)
def read_places(address: Integer, places: Integer, n: Integer, scratch: Integer, out: Integer) -> Integer:
    """Unpack single values of a checked chunk of at most 4 bytes a value; every block that holds one is unpacked once.

    Parameters
    ----------
    address : int
        Where the chunk lies.
    places, n : int
        Address of ascending int64, numbers of values in the chunk, and how many they are.
    scratch : int
        Address of room for 264 uint32.
    out : int
        Address of room for n uint32.

    Returns
    -------
    int
        0.
    """
    if n == 0:
        return 0
    n_blocks = np.int64(load(np.uint64(address + 8), 4))
    table = address + HEAD_BYTES + SKIP_BYTES * ((n_blocks + SKIP - 1) // SKIP)
    payload = table + 3 * n_blocks
    flags = byte_at(np.uint64(address + 3))
    ascending = (flags & ASCENDING) != 0
    base_bytes, itemsize = np.int64(1) << (flags >> 3 & 3), np.int64(1) << (flags & 3)
    wanted = np.int64(load(np.uint64(places), 8))
    block, start, position = seek(address, wanted)
    i = 0
    while i < n:
        entry = entry_at(table, n_blocks, block)
        if wanted < start + entry[0]:
            base = load(np.uint64(payload + position), base_bytes)
            more = unpack_narrow(payload + position + base_bytes, base, entry, ascending, itemsize, scratch)
            while i < n and wanted < start + entry[0]:
                store(np.uint64(out + 4 * i), 4, np.uint64(np.uint32(_word(scratch, wanted - start) + more)))
                i += 1
                wanted = np.int64(load(np.uint64(places + 8 * i), 8)) if i < n else wanted
        position += block_bytes(entry[0], entry[1], entry[2], base_bytes, itemsize)
        start += entry[0]
        block += 1
    return 0
