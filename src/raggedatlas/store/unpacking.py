"""Unpacking packed chunks, whole or only the blocks that a range touches, compiled; every bound is checked first.

This module imports numba at the top, so it is imported inside functions only.
"""

# ruff: noqa: PLR0917 - functions that are called at an address take plain numbers

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.store.chunks import BAD_CHECKSUM, BAD_SIZE, GOOD, crc32c_of
from raggedatlas.store.elements import write_mapped, write_values
from raggedatlas.store.kernels import Flag, Integer, address_function, compiled
from raggedatlas.store.lanes import (
    BLOCK,
    LANES,
    add_up,
    byte_at,
    call5,
    call7,
    load,
    popcount,
    spread_byte,
    store,
    unpack_full,
    unpack_position,
)
from raggedatlas.store.packing import (
    ASCENDING,
    BITMAP,
    HEAD_BYTES,
    MAGIC,
    MOST_WIDTH,
    RAW,
    SKIP,
    SKIP_BYTES,
    STREAM_BELOW,
    TAIL_BYTES,
    VERSION,
    body_bytes,
    byte_class,
)


def _bit_places() -> NDArray[np.uint32]:
    """List the places of the set bits of every byte, lowest first, (256, 8)."""
    places = np.zeros((256, 8), np.uint32)
    for byte in range(256):
        found = [bit for bit in range(8) if byte >> bit & 1]
        places[byte, : len(found)] = found
    return places


BIT_PLACES = _bit_places()


@compiled
def block_bytes(n: Integer, kind: Integer, third: Integer, base_bytes: Integer, itemsize: Integer) -> Integer:
    """Return the payload bytes of a block by its three bytes in the table; -1 for a kind that does not exist."""
    width = kind & 63
    if width <= MOST_WIDTH:
        return base_bytes + body_bytes(n, width) + third * (1 + (1 << (kind >> 6)))
    if width == BITMAP:
        return base_bytes + third
    return base_bytes + n * itemsize if width == RAW and third == 0 else -1


@compiled
def entry_at(table: Integer, n_blocks: Integer, block: Integer) -> tuple[Integer, Integer, Integer]:
    """Return the entry of a block in the table: its values, its kind and its third byte."""
    count = byte_at(np.uint64(table + block)) + 1
    return count, byte_at(np.uint64(table + n_blocks + block)), byte_at(np.uint64(table + 2 * n_blocks + block))


@compiled
def check_packed(address: Integer, size: Integer, n: Integer, itemsize: Integer) -> Flag:
    """Tell whether the head and the tables of a packed chunk are in order.

    Parameters
    ----------
    address, size : int
        Where the chunk lies, and how many bytes it has without a checksum.
    n, itemsize : int
        Values that it must hold, and their width.

    Returns
    -------
    bool
        Whether every block lies inside, the blocks hold `n` values, and what they hold fits 256 values each.
    """
    if size < HEAD_BYTES + TAIL_BYTES or load(np.uint64(address), 2) != np.uint64(MAGIC):
        return False
    flags = byte_at(np.uint64(address + 3))
    n_blocks = np.int64(load(np.uint64(address + 8), 4))
    if byte_at(np.uint64(address + 2)) != VERSION or (flags & 3) != byte_class(8 * itemsize) or flags >> 5:
        return False
    if np.int64(load(np.uint64(address + 4), 4)) != n or np.int64(load(np.uint64(address + 12), 4)) != size:
        return False
    table = HEAD_BYTES + SKIP_BYTES * ((n_blocks + SKIP - 1) // SKIP)
    room = size - TAIL_BYTES - table - 3 * n_blocks
    if n_blocks > n or room < 0:
        return False
    start, position = np.int64(0), np.int64(0)
    base_bytes = np.int64(1) << (flags >> 3 & 3)
    payload = address + table + 3 * n_blocks
    for block in range(n_blocks):
        if block % SKIP == 0:
            skip = address + HEAD_BYTES + SKIP_BYTES * (block // SKIP)
            if np.int64(load(np.uint64(skip), 4)) != start or np.int64(load(np.uint64(skip + 4), 4)) != position:
                return False
        count, kind, third = entry_at(address + table, n_blocks, block)
        taken = block_bytes(count, kind, third, base_bytes, itemsize)
        if taken < 0 or position + taken > room:
            return False
        if not _is_sound(payload + position + base_bytes, (count, kind, third), (flags & ASCENDING) != 0):
            return False
        start += count
        position += taken
    return start == n and position == room


@compiled
def _is_sound(body: Integer, entry: tuple[Integer, Integer, Integer], ascending: Flag) -> Flag:
    """Tell whether a bitmap has as many bits as its block has values, and every exception has a place in its block."""
    count, kind, third = entry
    width = kind & 63
    if width == BITMAP:
        bits, whole = 0, third & ~7
        for i in range(0, whole, 8):
            bits += popcount(load(np.uint64(body + i), 8))
        for i in range(whole, third):
            bits += popcount(np.uint64(byte_at(np.uint64(body + i))))
        return ascending and bits == count and byte_at(np.uint64(body)) & 1 == 1
    if width <= MOST_WIDTH:
        places = body + body_bytes(count, width)
        for i in range(third):
            if byte_at(np.uint64(places + i)) >= count:
                return False
    return True


@compiled
def _unpack_lanes(body: Integer, n: Integer, width: Integer, scratch: Integer) -> None:
    """Unpack the values of eight lanes; fewer than 32 positions one by one."""
    if n > BLOCK - LANES:
        unpack_full(width, np.uint64(body), np.uint64(scratch))
        return
    mask = np.uint32((np.int64(1) << width) - 1)
    bit = np.int64(0)
    for position in range((n + LANES - 1) // LANES):
        shift = bit & 31
        crosses = np.uint8(shift + width > 32)
        source = np.uint64(body + (bit >> 5) * 4 * LANES) if width else np.uint64(scratch)
        unpack_position(source, np.uint32(shift), crosses, mask, np.uint64(scratch + 4 * LANES * position))
        bit += width


@compiled
def _unpack_stream(body: Integer, n: Integer, width: Integer, scratch: Integer) -> None:
    """Unpack a stream of bits; the zero bytes behind the last block keep the loads inside the chunk."""
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    bit, target = np.uint64(0), np.uint64(scratch)
    for _ in range(n):
        word = load(np.uint64(body) + (bit >> np.uint64(3)), 8)
        store(target, 4, (word >> (bit & np.uint64(7))) & mask)
        bit += np.uint64(width)
        target += np.uint64(4)


@compiled
def _unpack_bitmap(body: Integer, n_bytes: Integer, base: Integer, scratch: Integer) -> None:
    """Write base and place of every set bit, eight slots a byte of which the next byte overwrites the unused ones."""
    target, end = np.uint64(scratch), np.uint64(scratch + 4 * BLOCK)
    places = np.uint64(BIT_PLACES.ctypes.data)
    first = np.uint32(base)
    for i in range(n_bytes):
        byte = np.uint64(byte_at(np.uint64(body + i)))
        spread_byte(places + (byte << np.uint64(5)), first, target)
        target += np.uint64(popcount(byte)) << np.uint64(2)
        if target > end:
            return
        first = np.uint32(first + np.uint32(8))


@compiled
def _patch(body: Integer, entry: tuple[Integer, Integer, Integer], out: Integer, out_bytes: Integer) -> None:
    """Add what did not fit the width of a block."""
    n, kind, third = entry
    width = kind & 63
    places = body + body_bytes(n, width)
    size = np.int64(1) << (kind >> 6)
    highs = places + third
    shift = np.uint64(width)
    for i in range(third):
        at = np.uint64(out + byte_at(np.uint64(places + i)) * out_bytes)
        store(at, out_bytes, load(at, out_bytes) | (load(np.uint64(highs + i * size), size) << shift))


@compiled
def unpack_narrow(
    body: Integer,
    base: Integer,
    entry: tuple[Integer, Integer, Integer],
    ascending: Flag,
    itemsize: Integer,
    scratch: Integer,
) -> Integer:
    """Unpack one checked block of values of at most 4 bytes.

    Parameters
    ----------
    body, base : int
        Address behind the base, and the base.
    entry : three int
        Values, kind, and the third byte of the table.
    ascending : bool
        Whether the chunk ascends.
    itemsize : int
        Width of the values.
    scratch : int
        Address of 264 uint32 for the result, short of what is returned.

    Returns
    -------
    uint32
        What to add to every value.
    """
    n, kind, third = entry
    width = kind & 63
    if width == BITMAP:
        _unpack_bitmap(body, third, base, scratch)
        return np.uint32(0)
    if width == RAW:
        for i in range(n):
            store(np.uint64(scratch + 4 * i), 4, load(np.uint64(body + i * itemsize), itemsize))
    elif n < STREAM_BELOW:
        _unpack_stream(body, n, width, scratch)
    else:
        _unpack_lanes(body, n, width, scratch)
    if third:
        _patch(body, entry, scratch, 4)
    if ascending:
        add_up(np.uint64(scratch), np.uint32(base), n)
        return np.uint32(0)
    return np.uint32(base)


@compiled
def unpack_wide(
    body: Integer,
    base: Integer,
    entry: tuple[Integer, Integer, Integer],
    ascending: Flag,
    scratch: NDArray[np.uint32],
    out: NDArray[np.uint64],
) -> None:
    """Unpack one checked block of values of 8 bytes into `out`, (256,) uint64; `scratch` is (264,) uint32."""
    n, kind, third = entry
    width = kind & 63
    if width == RAW:
        for i in range(n):
            out[i] = load(np.uint64(body + 8 * i), 8)
    else:
        if width == BITMAP:
            _unpack_bitmap(body, third, 0, scratch.ctypes.data)
        elif n < STREAM_BELOW:
            _unpack_stream(body, n, width, scratch.ctypes.data)
        else:
            _unpack_lanes(body, n, width, scratch.ctypes.data)
        for i in range(n):
            out[i] = scratch[i]
        if width != BITMAP:
            _patch(body, entry, out.ctypes.data, 8)
    value = np.uint64(base)
    for i in range(n):
        if ascending and width != BITMAP:
            value += out[i]
            out[i] = value + np.uint64(i)
        else:
            out[i] += np.uint64(base)


@compiled
def seek(address: Integer, first: Integer) -> tuple[Integer, Integer, Integer]:
    """Find the block that holds a value of a checked chunk.

    Returns
    -------
    (int, int, int)
        Number of the block, number of its first value, and where its payload begins among all payloads.
    """
    n_blocks = np.int64(load(np.uint64(address + 8), 4))
    n_skips = (n_blocks + SKIP - 1) // SKIP
    low, high = np.int64(0), n_skips
    while high - low > 1:
        middle = (low + high) >> 1
        if np.int64(load(np.uint64(address + HEAD_BYTES + SKIP_BYTES * middle), 4)) <= first:
            low = middle
        else:
            high = middle
    skip = address + HEAD_BYTES + SKIP_BYTES * low
    block, start = low * SKIP, np.int64(load(np.uint64(skip), 4))
    position = np.int64(load(np.uint64(skip + 4), 4))
    table = address + HEAD_BYTES + SKIP_BYTES * n_skips
    flags = byte_at(np.uint64(address + 3))
    base_bytes, itemsize = np.int64(1) << (flags >> 3 & 3), np.int64(1) << (flags & 3)
    while True:
        count, kind, third = entry_at(table, n_blocks, block)
        if first < start + count:
            return block, start, position
        position += block_bytes(count, kind, third, base_bytes, itemsize)
        start += count
        block += 1


@address_function(7)
def unpack_range(
    address: Integer,
    first: Integer,
    last: Integer,
    scratch: Integer,
    column_map: Integer,
    out: Integer,
    form: Integer,
) -> Integer:
    """Unpack some values of a checked chunk of at most 4 bytes a value; only the blocks that hold them are touched.

    Addresses instead of arrays keep counted references, which two threads would fight over, out of the loop.

    Parameters
    ----------
    address : int
        Where the chunk lies.
    first, last : int
        First value and the one behind the last, inside the chunk.
    scratch : int
        Address of room for 264 uint32.
    column_map : int
        Address of a map, see `write_mapped`; 0 for none.
    out : int
        Address of the output.
    form : int
        The output's element type by `raggedatlas.store.elements.TYPE_CODES`, at least as wide as the values; with a map, how
        many entries that has.

    Returns
    -------
    int
        0.
    """
    n_blocks = np.int64(load(np.uint64(address + 8), 4))
    table = address + HEAD_BYTES + SKIP_BYTES * ((n_blocks + SKIP - 1) // SKIP)
    payload = table + 3 * n_blocks
    flags = byte_at(np.uint64(address + 3))
    ascending = (flags & ASCENDING) != 0
    base_bytes, itemsize = np.int64(1) << (flags >> 3 & 3), np.int64(1) << (flags & 3)
    block, start, position = seek(address, first)
    target = out
    width = np.int64(4) if column_map or form == 4 else np.int64(1) << min(form, 3)
    while start < last:
        entry = entry_at(table, n_blocks, block)
        base = load(np.uint64(payload + position), base_bytes)
        more = unpack_narrow(payload + position + base_bytes, base, entry, ascending, itemsize, scratch)
        low, high = max(first - start, 0), min(last - start, entry[0])
        if column_map:
            write_mapped(scratch + 4 * low, high - low, more, (column_map, form), target)
        else:
            write_values(scratch + 4 * low, high - low, more, target, form)
        target += (high - low) * width
        position += block_bytes(entry[0], entry[1], entry[2], base_bytes, itemsize)
        start += entry[0]
        block += 1
    return 0


@compiled
def unpack_all(address: Integer, n: Integer, out: NDArray[np.uint64]) -> None:
    """Unpack a whole checked chunk of 8 bytes a value to ``(n,)`` uint64."""
    scratch, wide = np.empty(BLOCK + LANES, np.uint32), np.empty(BLOCK, np.uint64)
    n_blocks = np.int64(load(np.uint64(address + 8), 4))
    table = address + HEAD_BYTES + SKIP_BYTES * ((n_blocks + SKIP - 1) // SKIP)
    flags = byte_at(np.uint64(address + 3))
    base_bytes = np.int64(1) << (flags >> 3 & 3)
    at = table + 3 * n_blocks
    start = 0
    for block in range(n_blocks):
        entry = entry_at(table, n_blocks, block)
        base = load(np.uint64(at), base_bytes)
        unpack_wide(at + base_bytes, base, entry, (flags & ASCENDING) != 0, scratch, wide)
        for i in range(entry[0]):
            out[start + i] = wide[i]
        at += block_bytes(entry[0], entry[1], entry[2], base_bytes, 8)
        start += entry[0]


@address_function(5)
def check_chunk(address: Integer, size: Integer, n: Integer, itemsize: Integer, crc32c: Integer) -> Integer:
    """Check the crc32c at the end of a packed chunk and then its head; return a status of `raggedatlas.store.chunks`.

    Parameters
    ----------
    address, size : int
        Where the chunk lies, and its bytes with the checksum.
    n, itemsize : int
        Values that it must hold, and their width.
    crc32c : int
        Address of the function that computes it.
    """
    if size < 4 or np.uint64(crc32c_of(crc32c, address, size - 4)) != load(np.uint64(address + size - 4), 4):
        return BAD_CHECKSUM
    return GOOD if check_packed(address, size - 4, n, itemsize) else BAD_SIZE


@compiled
def unpack_pieces(
    frames: tuple[NDArray[np.uint64], NDArray[np.int64]],
    pieces: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    per_chunk: Integer,
    functions: tuple[Integer, Integer, Integer],
    out: NDArray[Any],
) -> tuple[Integer, Integer]:
    """Check a run of packed chunks of at most 4 bytes a value and unpack pieces of them.

    Parameters
    ----------
    frames, pieces
        As `raggedatlas.store.chunks.decode_chunks` takes them; a chunk that is not stored is all zero.
    per_chunk : int
        Values of a chunk.
    functions : three int
        Addresses of crc32c, `check_chunk` and `unpack_range`.
    out : (n,) unsigned integers
        The output, of the array's dtype.

    Returns
    -------
    (int, int)
        Status and the number of the first bad chunk.
    """
    addresses, sizes = frames
    bounds, sources, lengths, targets = pieces
    scratch = np.empty(BLOCK + LANES, np.uint32)
    code = byte_class(8 * out.itemsize)
    for chunk in range(addresses.size):
        if sizes[chunk] >= 0:
            chunk_facts = np.int64(addresses[chunk]), sizes[chunk], per_chunk, out.itemsize, functions[0]
            status = call5(functions[1], chunk_facts)
            if status != GOOD:
                return status, chunk
        for piece in range(bounds[chunk], bounds[chunk + 1]):
            target = out[targets[piece] : targets[piece] + lengths[piece]]
            if sizes[chunk] < 0:
                target[:] = 0
            elif target.size:
                first = sources[piece]
                end = first + target.size
                piece_facts = np.int64(addresses[chunk]), first, end, scratch.ctypes.data, 0, target.ctypes.data, code
                call7(functions[2], piece_facts)
    return GOOD, 0
