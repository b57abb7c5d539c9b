"""Compiled loops over chunks, without the GIL: pieces, and Blosc and crc32c by function pointer.

This module imports numba at the top, so it is imported inside functions only.
"""

# ruff: noqa: ANN401, PLR0917, TID253 - numba's code generators are called with objects of no public type

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from raggedatlas.store.checksums import crc32c_function
from raggedatlas.store.kernels import compiled

GOOD, BAD_CHECKSUM, BAD_SIZE, BAD_FRAME = 0, 1, 2, 3
PLAIN, BLOSC = 0, 1
BLOSC_OVERHEAD = 16


_LZ4 = ctypes.create_string_buffer(b"lz4")
LZ4_NAME = ctypes.addressof(_LZ4)
"""Address of the name of the codec that is written."""


class NativeFunctions(NamedTuple):
    """Addresses of the C functions that the kernels call."""

    decompress: int
    compress: int
    crc32c: int


@cache
def native_functions() -> NativeFunctions | None:
    """Return the addresses of Blosc's functions in numcodecs and of crc32c in google-crc32c.

    Their wheels export them without promising to; where one is missing, the answer is None and callers go through the
    Python functions of both packages, chunk by chunk.
    """
    from numcodecs import blosc

    checksum = crc32c_function()
    try:
        library = ctypes.CDLL(blosc.__file__)
        found = (library.blosc_decompress_ctx, library.blosc_compress_ctx, checksum)
    except (OSError, AttributeError):
        return None
    if checksum is None:
        return None
    return NativeFunctions(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found))


def _make_pointer(typing_context: Any, address: Any) -> Any:
    """Turn an integer address into a pointer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), generate


def _make_blosc_decompress(typing_context: Any, function: Any, source: Any, target: Any, size: Any) -> Any:
    """Call ``int blosc_decompress_ctx(src, dest, destsize, 1)`` at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte_pointer, word, number = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(number, [byte_pointer, byte_pointer, word, number])
        call = builder.inttoptr(arguments[0], kind.as_pointer())
        source, target = (builder.inttoptr(item, byte_pointer) for item in arguments[1:3])
        return builder.call(call, [source, target, arguments[3], ir.Constant(number, 1)])

    return types.int32(types.uint64, types.uint64, types.uint64, types.uint64), generate


def _make_blosc_compress(
    typing_context: Any,
    function: Any,
    name: Any,
    width: Any,
    size: Any,
    source: Any,
    target: Any,
) -> Any:
    """Call ``int blosc_compress_ctx(5, 1, width, size, src, dest, size + 16, name, 0, 1)`` at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte_pointer, word, number = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(
            number,
            [number, number, word, word, byte_pointer, byte_pointer, word, byte_pointer, word, number],
        )
        function, name, width, size, source, target = arguments
        room = builder.add(size, ir.Constant(word, BLOSC_OVERHEAD))
        call = builder.inttoptr(function, kind.as_pointer())
        name, source, target = (builder.inttoptr(item, byte_pointer) for item in (name, source, target))
        level, shuffle, threads = (ir.Constant(number, value) for value in (5, 1, 1))
        block = ir.Constant(word, 0)
        return builder.call(call, [level, shuffle, width, size, source, target, room, name, block, threads])

    return types.int32(*(types.uint64,) * 6), generate


def _make_crc32c(typing_context: Any, function: Any, source: Any, size: Any) -> Any:
    """Call ``uint32_t crc32c_extend(0, data, size)`` at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte_pointer, word, number = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(number, [number, byte_pointer, word])
        call = builder.inttoptr(arguments[0], kind.as_pointer())
        source = builder.inttoptr(arguments[1], byte_pointer)
        return builder.call(call, [ir.Constant(number, 0), source, arguments[2]])

    return types.uint32(types.uint64, types.uint64, types.uint64), generate


def _make_copy(typing_context: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy bytes between two addresses; numba does not vectorise such a loop over indexed bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source = (builder.inttoptr(item, cgutils.voidptr_t) for item in arguments[:2])
        copy: Any = cgutils.raw_memcpy
        copy(builder, target, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), generate


frame_pointer: Any = intrinsic(_make_pointer)
copy_bytes: Any = intrinsic(_make_copy)
_crc32c: Any = intrinsic(_make_crc32c)
_blosc_decompress: Any = intrinsic(_make_blosc_decompress)
_blosc_compress: Any = intrinsic(_make_blosc_compress)


@compiled
def crc32c_of(function: int, address: int, size: int) -> int:
    """Return the crc32c of bytes at an address, by the function at another."""
    return int(_crc32c(np.uint64(function), np.uint64(address), np.uint64(size)))


@compiled
def split_ranges(starts: NDArray[np.int64], ends: NDArray[np.int64], chunk: int) -> tuple[NDArray[np.int64], ...]:
    """Cut ranges of rows at chunk borders.

    Parameters
    ----------
    starts, ends : (k,) int64
        Half-open row ranges.
    chunk : int
        Rows of one chunk.

    Returns
    -------
    four (p,) int64
        Of each piece: chunk number, first row inside the chunk, number of rows, first row in the output.
    """
    total = 0
    for i in range(starts.size):
        if ends[i] > starts[i]:
            total += (ends[i] - 1) // chunk - starts[i] // chunk + 1
    chunks = np.empty(total, np.int64)
    sources = np.empty(total, np.int64)
    lengths = np.empty(total, np.int64)
    targets = np.empty(total, np.int64)
    piece = 0
    position = 0
    for i in range(starts.size):
        row = starts[i]
        while row < ends[i]:
            number = row // chunk
            stop = min(ends[i], (number + 1) * chunk)
            chunks[piece] = number
            sources[piece] = row - number * chunk
            lengths[piece] = stop - row
            targets[piece] = position
            position += stop - row
            row = stop
            piece += 1
    return chunks, sources, lengths, targets


@compiled
def copy_ranges(
    scratch: NDArray[np.uint8],
    out: NDArray[np.uint8],
    pieces: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    bounds: tuple[int, int],
    width: int,
) -> None:
    """Copy pieces ``bounds[0]:bounds[1]`` of one decoded chunk to their places.

    Parameters
    ----------
    scratch : (chunk_rows * width,) uint8
        The decoded chunk.
    out : (n_rows * width,) uint8
        The output.
    pieces : three (p,) int64
        First row inside the chunk, number of rows, first row in the output.
    bounds : two int
        The pieces that lie in this chunk.
    width : int
        Bytes of one row.
    """
    sources, lengths, targets = pieces
    for piece in range(bounds[0], bounds[1]):
        source = scratch.ctypes.data + sources[piece] * width
        target = out.ctypes.data + targets[piece] * width
        copy_bytes(np.uint64(target), np.uint64(source), np.uint64(lengths[piece] * width))


@compiled
def _uint32_at(data: NDArray[np.uint8], i: int) -> int:
    """Read a little-endian uint32."""
    low = np.int64(data[i]) | (np.int64(data[i + 1]) << 8)
    return int(low | (np.int64(data[i + 2]) << 16) | (np.int64(data[i + 3]) << 24))


@compiled
def decode_frame(
    data: NDArray[np.uint8],
    address: int,
    target: int,
    n_bytes: int,
    codec: tuple[int, bool, int, int],
) -> int:
    """Check and decode one chunk to an address that has room for `n_bytes`; return a status."""
    kind, checksum, decompress, crc32c = codec
    size = data.size
    if checksum:
        size -= 4
        if size < 0:
            return BAD_CHECKSUM
        if np.int64(_crc32c(np.uint64(crc32c), np.uint64(address), np.uint64(size))) != _uint32_at(data, size):
            return BAD_CHECKSUM
    if kind == PLAIN:
        if size != n_bytes:
            return BAD_SIZE
        copy_bytes(np.uint64(target), np.uint64(address), np.uint64(n_bytes))
        return GOOD
    if size < 16 or _uint32_at(data, 4) != n_bytes or _uint32_at(data, 12) != size:
        return BAD_SIZE
    done = _blosc_decompress(np.uint64(decompress), np.uint64(address), np.uint64(target), np.uint64(n_bytes))
    return GOOD if done == n_bytes else BAD_FRAME


@compiled
def decode_chunks(
    frames: tuple[NDArray[np.uint64], NDArray[np.int64]],
    scratch: NDArray[np.uint8],
    fill: NDArray[np.uint8],
    out: NDArray[np.uint8],
    pieces: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    codec: tuple[int, bool, int, int],
) -> tuple[int, int]:
    """Check and decode a run of chunks and copy their pieces to the output.

    Parameters
    ----------
    frames : (c,) uint64 and (c,) int64
        Address and size of the stored bytes of every chunk; size -1 stands for a chunk of fill values.
    scratch : (chunk_rows * width,) uint8
        Room for one decoded chunk.
    fill : (width,) uint8
        One row of fill values.
    out : (n_rows * width,) uint8
        The output.
    pieces : (c + 1,), then three (p,) int64
        Bounds of the pieces of each chunk; then first row inside the chunk, number of rows, first row in the output.
    codec : (int, bool, int, int)
        PLAIN or BLOSC, whether a crc32c follows, addresses of Blosc's decompress and of crc32c.

    Returns
    -------
    (int, int)
        Status and the number of the first bad chunk; status GOOD where all went well.
    """
    addresses, sizes = frames
    bounds, sources, lengths, targets = pieces
    width = fill.size
    rows = scratch.size // width
    n_bytes = scratch.size
    for chunk in range(addresses.size):
        first, last = bounds[chunk], bounds[chunk + 1]
        if sizes[chunk] < 0:
            for i in range(scratch.size):
                scratch[i] = fill[i % width]
            copy_ranges(scratch, out, (sources, lengths, targets), (first, last), width)
            continue
        data = carray(frame_pointer(addresses[chunk]), (sizes[chunk],), np.uint8)
        whole = last == first + 1 and lengths[first] == rows
        target = out.ctypes.data + targets[first] * width if whole else scratch.ctypes.data
        status = decode_frame(data, addresses[chunk], target, n_bytes, codec)
        if status != GOOD:
            return status, chunk
        if not whole:
            copy_ranges(scratch, out, (sources, lengths, targets), (first, last), width)
    return GOOD, 0


@compiled
def encode_chunks(
    values: NDArray[np.uint8],
    n_bytes: int,
    width: int,
    codec: tuple[int, int, int],
    out: NDArray[np.uint8],
) -> NDArray[np.int64]:
    """Encode a run of chunks with Blosc lz4, byte shuffle and crc32c, one behind the other.

    Parameters
    ----------
    values : (c * n_bytes,) uint8
        The chunks' bytes.
    n_bytes : int
        Bytes of one chunk.
    width : int
        Bytes of one element, for the shuffle.
    codec : (int, int, int)
        Addresses of Blosc's compress, of the codec's name and of crc32c.
    out : uint8
        Room for ``c * (n_bytes + 20)`` bytes.

    Returns
    -------
    (c,) int64
        Stored bytes of every chunk; -1 from the first that failed on.
    """
    compress, name, crc32c = codec
    sizes = np.full(values.size // n_bytes, -1, np.int64)
    position = 0
    for chunk in range(sizes.size):
        done = _blosc_compress(
            np.uint64(compress),
            np.uint64(name),
            np.uint64(width),
            np.uint64(n_bytes),
            np.uint64(values.ctypes.data + chunk * n_bytes),
            np.uint64(out.ctypes.data + position),
        )
        if done <= 0:
            return sizes
        stored = np.uint64(out.ctypes.data + position)
        crc = np.int64(_crc32c(np.uint64(crc32c), stored, np.uint64(done)))
        for byte in range(4):
            out[position + done + byte] = (crc >> (8 * byte)) & 0xFF
        sizes[chunk] = done + 4
        position += sizes[chunk]
    return sizes
