"""Packing a chunk of unsigned integers into small blocks, compiled; the byte format is in docs/reference/packed-codec.md.

This module imports numba at the top, so it is imported inside functions only.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.store.chunks import copy_bytes, crc32c_of
from raggedatlas.store.kernels import Flag, Integer, address_function, compiled
from raggedatlas.store.lanes import (
    BLOCK,
    LANES,
    SIXTEEN,
    WORD_BITS,
    above,
    call3,
    leading_zeros,
    mark_sixteen,
    pack_full,
    store,
    trailing_zeros,
)
from raggedatlas.store.rings import shared_ring
from raggedatlas.store.runs import ChunkRun

HEAD_BYTES = 16
MAGIC, VERSION = 0x7072, 1
SKIP = 8
SKIP_BYTES = 8
TAIL_BYTES = 8
STREAM_BELOW = 64
BITMAP, RAW = 33, 34
MOST_WIDTH = 32
ASCENDING = 4
_MOST_SPAN = 8 * 255
_SHORT = 32
_SEVEN_EIGHTHS = 7
_EXCEPTION_PENALTY = 1
_LEAST_EXCEPTION = 2 + _EXCEPTION_PENALTY


def packed_bound(n: int, itemsize: int) -> int:
    """Return how many bytes `n` packed values take at most."""
    n_blocks = n // 8 + n // 32 + 2
    return HEAD_BYTES + TAIL_BYTES + n * itemsize + n_blocks * (3 + 1 + itemsize) + SKIP_BYTES


@compiled
def is_ascending(values: NDArray[Any]) -> Flag:
    """Tell whether at least seven of eight neighbours ascend strictly."""
    # Sums of 32 bits: twice as many fit a register.
    ascents = np.uint32(0)
    before, after = values[:-1], values[1:]
    for i in range(after.size):
        ascents = np.uint32(ascents + np.uint32(after[i] > before[i]))
    return values.size > 1 and np.int64(ascents) * 8 >= (values.size - 1) * _SEVEN_EIGHTHS


@compiled
def _next_stop(
    values: NDArray[Any], start: Integer, ascending: Flag, breaks: NDArray[np.int64], at: Integer
) -> Integer:
    """Return where the block that begins at `start` ends; `at` is the first break beyond it."""
    stop = min(start + BLOCK, values.size)
    if ascending:
        before, after = values[start : stop - 1], values[start + 1 : stop]
        falls = np.uint32(0)
        for i in range(after.size):
            falls = np.uint32(falls + np.uint32(after[i] <= before[i]))
        # Counting has no branch and most blocks have no fall; where there is one, it is looked for.
        for i in range(after.size if falls else 0):
            if after[i] <= before[i]:
                return start + i + 1
        return stop
    while at < breaks.size and breaks[at] < stop:
        if breaks[at] - start >= _SHORT:
            return breaks[at]
        at += 1
    return stop


@compiled
def _least(values: NDArray[Any]) -> Integer:
    """Return the smallest value."""
    least = values[0]
    for i in range(values.size):
        least = min(least, values[i])
    return np.uint64(least)


@compiled
def _cut(
    values: NDArray[Any], ascending: Flag, breaks: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[Integer, Integer]:
    """Cut a chunk into blocks; return their number and the largest base."""
    n_blocks, start, at, largest = 0, 0, 0, np.uint64(0)
    while start < values.size:
        while at < breaks.size and breaks[at] <= start:
            at += 1
        stop = _next_stop(values, start, ascending, breaks, at)
        base = np.uint64(values[start]) if ascending else _least(values[start:stop])
        largest = max(largest, base)
        stops[n_blocks] = stop
        n_blocks += 1
        start = stop
    return n_blocks, largest


@compiled
def byte_class(bits: Integer) -> Integer:
    """Return c such that ``1 << c`` bytes hold so many bits: 0 to 3."""
    return 0 if bits <= 8 else 1 if bits <= 16 else 2 if bits <= 32 else 3


@compiled
def body_bytes(n: Integer, width: Integer) -> Integer:
    """Return the bytes of `n` values of `width` bits: a stream of bits where few, else whole words of eight lanes."""
    if n < STREAM_BELOW:
        return (n * width + 7) >> 3
    positions = (n + LANES - 1) // LANES
    return 4 * LANES * ((positions * width + 31) >> 5)


@compiled
def _choose_width(x: NDArray[Any], most: Integer) -> tuple[Integer, Integer, Integer]:
    """Choose the width that makes values of at most `most` bits smallest; return width, exceptions, their byte class.

    The width is -1 where none of at most 32 bits leaves few enough exceptions.
    """
    best_width, best_bytes, best_beyond = -1, 1 << 40, 0
    for width in range(min(most, MOST_WIDTH), -1, -1):
        beyond: Integer = 0
        if width < most:
            limit = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
            small, larger = x.dtype.type(limit), np.uint32(0)
            for i in range(x.size):
                larger = np.uint32(larger + np.uint32(x[i] > small))
            beyond = np.int64(larger)
        if beyond > 255 or beyond * _LEAST_EXCEPTION >= best_bytes:
            break
        size = body_bytes(x.size, width) + beyond * (1 + (1 << byte_class(most - width)) + _EXCEPTION_PENALTY)
        if size < best_bytes:
            best_width, best_bytes, best_beyond = width, size, beyond
    return best_width, best_beyond, byte_class(most - best_width)


@compiled
def _pack_stream(x: NDArray[np.uint32], n: Integer, width: Integer, address: Integer) -> None:
    """Pack values into one stream of bits at an address."""
    held, n_held = np.uint64(0), 0
    for i in range(n):
        held |= np.uint64(x[i]) << np.uint64(n_held)
        n_held += width
        while n_held >= 8:
            store(np.uint64(address), 1, held & np.uint64(255))
            address += 1
            held >>= np.uint64(8)
            n_held -= 8
    if n_held:
        store(np.uint64(address), 1, held)


@compiled
def _pack_bitmap(values: NDArray[Any], bits: NDArray[np.uint64]) -> None:
    """Set one bit for every value of an ascending block, counted from its first."""
    bits[:] = 0
    first, n_vectors = np.uint64(values[0]), 0
    if values.itemsize == 4:
        n_vectors = values.size // SIXTEEN
    for start in range(0, n_vectors * SIXTEEN, SIXTEEN):
        word = (np.uint64(values[start]) - first) >> np.uint64(6)
        base = first + (word << np.uint64(6))
        if np.uint64(values[start + SIXTEEN - 1]) - base < np.uint64(2 * WORD_BITS):
            address = np.uint64(values.ctypes.data + 4 * start)
            mark_sixteen(address, np.uint32(base), np.uint64(bits.ctypes.data) + (word << np.uint64(3)))
        else:
            _mark_each(values[start : start + SIXTEEN], first, bits)
    _mark_each(values[n_vectors * SIXTEEN :], first, bits)


@compiled
def _mark_each(values: NDArray[Any], first: Integer, bits: NDArray[np.uint64]) -> None:
    """Set one bit for every value, counted from `first`."""
    for i in range(values.size):
        place = np.uint64(values[i]) - first
        bits[place >> np.uint64(6)] |= np.uint64(1) << (place & np.uint64(63))


@compiled
def _pack_exceptions(
    x: NDArray[Any], places: NDArray[np.uint32], choice: tuple[Integer, Integer, Integer], address: Integer
) -> None:
    """Write the places of values that are too wide, then what of them does not fit.

    `places` is room for the places; behind `x` there is room to a multiple of 64 values.
    """
    width, beyond, size = choice
    shift = np.uint64(width)
    small = x.dtype.type((np.uint64(1) << shift) - np.uint64(1))
    found = 0
    if x.itemsize == 4:
        for first in range(0, x.size, WORD_BITS):
            marks = above(np.uint64(x.ctypes.data + 4 * first), np.uint32(small))
            if first + WORD_BITS > x.size:
                marks &= (np.uint64(1) << np.uint64(x.size - first)) - np.uint64(1)
            while marks != 0:
                places[found] = first + trailing_zeros(marks)
                marks &= marks - np.uint64(1)
                found += 1
    else:
        # Without a branch: which values are too wide cannot be foretold.
        for i in range(x.size):
            places[found] = i
            found += x[i] > small
    for i in range(beyond):
        store(np.uint64(address + i), 1, np.uint64(places[i]))
        store(np.uint64(address + beyond + (i << size)), 1 << size, np.uint64(x[places[i]]) >> shift)


@compiled
def _differences(values: NDArray[Any], ascending: Flag, base: Integer, x: NDArray[Any]) -> Integer:
    """Fill `x` with gaps less one or differences from the base; return the bits of the largest."""
    one, most = x.dtype.type(1), x.dtype.type(0)
    if ascending:
        x[0] = 0
        before, after, gaps = values[:-1], values[1:], x[1:]
        for i in range(after.size):
            gap = x.dtype.type(x.dtype.type(after[i]) - x.dtype.type(before[i]) - one)
            gaps[i] = gap
            most = max(most, gap)
    else:
        least = x.dtype.type(base)
        for i in range(values.size):
            value = x.dtype.type(x.dtype.type(values[i]) - least)
            x[i] = value
            most = max(most, value)
    return 64 - leading_zeros(np.uint64(most))


@address_function(3)
def _pack_lanes(width: Integer, source: Integer, target: Integer) -> Integer:
    """Pack 256 uint32 into eight lanes."""
    pack_full(width, np.uint64(source), np.uint64(target))
    return 0


@compiled
def _encode_block(
    values: NDArray[Any],
    ascending: Flag,
    base_bytes: Integer,
    address: Integer,
    scratch: tuple[NDArray[Any], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint64], Integer, Integer],
) -> tuple[Integer, Integer, Integer]:
    """Write the payload of one block at an address; return its kind, its third byte, and its size."""
    n = values.size
    x, low, words, bits = scratch[0][:n], scratch[1], scratch[2], scratch[3]
    base = np.uint64(values[0]) if ascending else _least(values)
    most = _differences(values, ascending, base, x)
    width, beyond, size = _choose_width(x, most)
    itemsize = scratch[5]
    raw = n * itemsize
    packed = body_bytes(n, width) + beyond * (1 + (1 << size)) if width >= 0 else raw + 1
    span = np.int64(min(np.uint64(values[n - 1]) - base, np.uint64(_MOST_SPAN))) + 1
    bitmap = (span + 7) >> 3 if ascending and span <= _MOST_SPAN else raw + 1
    store(np.uint64(address), base_bytes, base)
    body = address + base_bytes
    if raw < packed and raw < bitmap:
        for i in range(n):
            store(np.uint64(body + i * itemsize), itemsize, np.uint64(x[i]))
        return RAW, 0, base_bytes + raw
    if bitmap < packed:
        _pack_bitmap(values, bits)
        copy_bytes(np.uint64(body), np.uint64(bits.ctypes.data), np.uint64(bitmap))
        return BITMAP, bitmap, base_bytes + bitmap
    mask = np.uint32((np.uint64(1) << np.uint64(width)) - np.uint64(1))
    for i in range(n):
        low[i] = np.uint32(x[i]) & mask
    if n < STREAM_BELOW:
        _pack_stream(low, n, width, body)
    else:
        low[n:] = 0
        call3(scratch[4], (width, low.ctypes.data, words.ctypes.data))
        copy_bytes(np.uint64(body), np.uint64(words.ctypes.data), np.uint64(body_bytes(n, width)))
    if beyond:
        _pack_exceptions(x, low, (width, beyond, size), body + body_bytes(n, width))
    return width | (size << 6 if beyond else 0), beyond, base_bytes + packed


def encode_packed(values: NDArray[Any], breaks: NDArray[np.int64], out: NDArray[np.uint8]) -> int:
    """Pack one chunk.

    Parameters
    ----------
    values : (n,) unsigned integers
        The chunk; n at least 1.
    breaks : (k,) int64
        Places, ascending, where a block should begin if the chunk does not ascend; they only make it smaller and faster.
    out : uint8
        Room for `packed_bound` bytes.

    Returns
    -------
    int
        Bytes written.
    """
    wide = np.dtype(np.uint64 if values.itemsize == 8 else np.uint32)
    # Narrow values are widened first, so that one compiled variant serves three types.
    plain = values.astype(wide, copy=False)
    return int(_encode((plain, values.itemsize), breaks, np.empty(BLOCK, wide), out, _pack_lanes.address))


@compiled
def _encode(
    chunk: tuple[NDArray[Any], Integer],
    breaks: NDArray[np.int64],
    x: NDArray[Any],
    out: NDArray[np.uint8],
    lanes: Integer,
) -> Integer:
    """Pack one chunk, given with the width of its elements.

    `x` has room for the differences of a block, `lanes` is the address of `_pack_lanes`.
    """
    values, itemsize = chunk
    n = values.size
    ascending = is_ascending(values)
    stops = np.empty(n // 8 + n // _SHORT + 2, np.int64)
    n_blocks, largest = _cut(values, ascending, breaks, stops)
    base_class = byte_class(64 - leading_zeros(np.uint64(largest)))
    address = np.int64(out.ctypes.data)
    flags = byte_class(8 * itemsize) | (ASCENDING if ascending else 0) | base_class << 3
    store(np.uint64(address), 2, np.uint64(MAGIC))
    store(np.uint64(address + 2), 1, np.uint64(VERSION))
    store(np.uint64(address + 3), 1, np.uint64(flags))
    store(np.uint64(address + 4), 4, np.uint64(n))
    store(np.uint64(address + 8), 4, np.uint64(n_blocks))
    table = HEAD_BYTES + SKIP_BYTES * ((n_blocks + SKIP - 1) // SKIP)
    payload = table + 3 * n_blocks
    words = np.zeros(BLOCK, np.uint32), np.empty(BLOCK, np.uint32), np.empty(_MOST_SPAN // 64 + 2, np.uint64)
    scratch = x, words[0], words[1], words[2], lanes, itemsize
    start, position = 0, 0
    for block in range(n_blocks):
        if block % SKIP == 0:
            skip = address + HEAD_BYTES + SKIP_BYTES * (block // SKIP)
            store(np.uint64(skip), 4, np.uint64(start))
            store(np.uint64(skip + 4), 4, np.uint64(position))
        stop = stops[block]
        kind, third, size = _encode_block(
            values[start:stop], ascending, 1 << base_class, address + payload + position, scratch
        )
        out[table + block] = stop - start - 1
        out[table + n_blocks + block] = kind
        out[table + 2 * n_blocks + block] = third
        position += size
        start = stop
    total = payload + position + TAIL_BYTES
    out[payload + position : total] = 0
    store(np.uint64(address + 12), 4, np.uint64(total))
    return int(total)


def encode_packed_run(values: NDArray[Any], chunk: int, breaks: NDArray[np.int64], crc32c: int) -> ChunkRun:
    """Pack whole chunks, each with its crc32c behind it, in one call that holds no lock.

    Parameters
    ----------
    values : (c * chunk,) unsigned integers
        Chunks, one behind the other.
    chunk : int
        Values of one chunk.
    breaks : (k,) int64
        Places in `values`, ascending, as `encode_packed` takes them.
    crc32c : int
        Address of the checksum function, as `native_functions` gives it.

    Returns
    -------
    ChunkRun
        Of c chunks.
    """
    n_chunks = values.size // chunk
    wide = np.dtype(np.uint64 if values.itemsize == 8 else np.uint32)
    # What is narrower is widened chunk by chunk, where it stays in the cache.
    plain = values if values.dtype == wide else np.empty(chunk, wide)
    # Most of it is never touched; memory that is used again need not be cleared by the system either.
    out = shared_ring().take(n_chunks * (packed_bound(chunk, values.itemsize) + 4), np.dtype(np.uint8))
    ends = np.zeros(n_chunks + 1, np.int64)
    _encode_run(
        (plain, values.view(np.uint8), values.itemsize, chunk), breaks, out, ends, (_pack_lanes.address, crc32c)
    )
    # Copied by NumPy, which holds no lock meanwhile.
    return ChunkRun(out[: ends[-1]].copy().data, ends[1:])


@compiled
def _widen(stored: NDArray[np.uint8], itemsize: Integer, values: NDArray[Any]) -> None:
    """Copy little-endian integers of one or two bytes into wider ones."""
    if itemsize == 1:
        for i in range(values.size):
            values[i] = stored[i]
    else:
        for i in range(values.size):
            values[i] = stored[2 * i] | np.uint32(stored[2 * i + 1]) << np.uint32(8)


@compiled
def _encode_run(
    chunks: tuple[NDArray[Any], NDArray[np.uint8], Integer, Integer],
    breaks: NDArray[np.int64],
    out: NDArray[np.uint8],
    ends: NDArray[np.int64],
    addresses: tuple[Integer, Integer],
) -> None:
    """Pack chunk after chunk and note where each ends; `values` holds one chunk at a time where they are narrower than its type."""
    values, stored, itemsize, chunk = chunks
    lanes, crc32c = addresses
    x = np.empty(BLOCK, values.dtype)
    last = 0
    for i in range(ends.size - 1):
        first = last
        while last < breaks.size and breaks[last] < (i + 1) * chunk:
            last += 1
        at = ends[i]
        if itemsize == values.itemsize:
            part = values[i * chunk : (i + 1) * chunk]
        else:
            part = values
            _widen(stored[i * chunk * itemsize : (i + 1) * chunk * itemsize], itemsize, part)
        n = _encode((part, itemsize), breaks[first:last] - i * chunk, x, out[at:], lanes)
        crc = crc32c_of(crc32c, np.int64(out.ctypes.data) + at, n)
        store(np.uint64(out.ctypes.data + at + n), 4, np.uint64(crc))
        ends[i + 1] = at + n + 4
