"""Filters of stored bytes that HDF5 and Zarr share: deflate, LZF, and shuffled bytes."""

import zlib
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.store.native import GOOD, library


@cache
def deflater() -> Any:  # noqa: ANN401  (a module with the functions of zlib)
    """Return `isal.isal_zlib` if the extra `isal` is installed, else `zlib`; both read each other's output."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


def inflate(data: Any, n_bytes: int, *, wrapped: bool = False) -> bytes:  # noqa: ANN401  (any buffer)
    """Decompress a zlib stream that must contain exactly `n_bytes`; never allocates more than that.

    `n_bytes` is at least 1; `wrapped` says that the stream is that of a gzip file.
    """
    engine = deflater()
    stream = engine.decompressobj(zlib.MAX_WBITS + 16 * wrapped)
    try:
        # zlib takes a limit of 0 for none.
        out: bytes = stream.decompress(data, n_bytes)
        # zlib verifies the checksum only when the end of the stream is reached.
        surplus = b"" if stream.eof else stream.decompress(stream.unconsumed_tail, 1)
    except engine.error as error:
        raise ValueError(f"a compressed chunk is damaged: {error}") from error
    if len(out) != n_bytes or surplus or not stream.eof:
        raise ValueError(
            f"a compressed chunk holds {'more' if surplus else 'fewer'} bytes than the {n_bytes:,} of a chunk"
        )
    return out


def deflate(data: Any, level: int) -> bytes:  # noqa: ANN401  (any buffer)
    """Compress to a zlib stream; ISA-L supports levels up to 3 and uses 3 for higher ones, zlib up to 9."""
    engine = deflater()
    made: bytes = engine.compress(data, level if engine is zlib else min(level, 3))
    return made


def shuffle(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Shuffle bytes: the first bytes of all values, then the second bytes, and so on.

    `values`, (n,), may have any fixed width; the result is (itemsize, n).
    """
    width = values.dtype.itemsize
    out = np.empty((width, len(values)), np.uint8)
    words = values.view(f"<u{width}") if width in (1, 2, 4, 8) else None
    if words is None:
        out[...] = values.view(np.uint8).reshape(-1, width).T
        return out
    for i in range(width):
        # Shifting words is several times faster than copying every fourth byte.
        np.copyto(out[i], words >> words.dtype.type(8 * i) if i else words, casting="unsafe")
    return out


def unshuffle(data: Any, out: NDArray[Any]) -> None:  # noqa: ANN401  (any buffer)
    """Reverse `shuffle` into an array.

    `data` has ``itemsize * n`` bytes for the n values of `out`.
    """
    width = out.dtype.itemsize
    columns = np.frombuffer(data, np.uint8).reshape(width, len(out))
    if width not in (1, 2, 4, 8):
        out.view(np.uint8).reshape(-1, width)[...] = columns.T
        return
    words = out.view(f"<u{width}")
    words[...] = columns[width - 1]
    for i in range(width - 2, -1, -1):
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, columns[i], out=words)


def decode_lzf(data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    r"""Decompress an LZF stream that must fill `out` exactly."""
    if library().ra_decode_lzf(data, data.size, out, out.size) != GOOD:
        raise ValueError(f"an LZF stream is damaged or does not hold the {out.size:,} bytes of a chunk")
