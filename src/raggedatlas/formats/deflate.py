"""Deflate and byte shuffling as HDF5's gzip and shuffle filters do them, with ISA-L where it is installed."""

import zlib
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


@cache
def deflater() -> Any:  # noqa: ANN401  (a module with the functions of zlib)
    """Return ISA-L's stand-in for `zlib` where the extra `isal` is installed, else `zlib`; either reads what the other wrote.

    Examples
    --------
    >>> zlib.decompress(deflater().compress(b"cells", 1))
    b'cells'
    """
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


def inflate(data: Any, n_bytes: int) -> bytes:  # noqa: ANN401  (any buffer)
    """Decompress a zlib stream that must hold exactly `n_bytes`; never makes more than that.

    Parameters
    ----------
    data : buffer
        The compressed bytes.
    n_bytes : int
        What they must become.

    Raises
    ------
    ValueError
        If they are damaged, or become more or fewer bytes.

    Examples
    --------
    >>> inflate(zlib.compress(b"cells"), 5)
    b'cells'
    """
    engine = deflater()
    stream = engine.decompressobj()
    try:
        out: bytes = stream.decompress(data, n_bytes)
        # The end of the stream carries its checksum, which is only compared when it is reached.
        surplus = b"" if stream.eof else stream.decompress(stream.unconsumed_tail, 1)
    except engine.error as error:
        raise ValueError(f"a compressed chunk is damaged: {error}") from error
    if len(out) != n_bytes or surplus or not stream.eof:
        raise ValueError(
            f"a compressed chunk holds {'more' if surplus else 'fewer'} bytes than the {n_bytes:,} of a chunk"
        )
    return out


def deflate(data: Any, level: int) -> bytes:  # noqa: ANN401  (any buffer)
    """Compress to a zlib stream; ISA-L knows levels up to 3 and takes 3 for those beyond, zlib up to 9."""
    engine = deflater()
    made: bytes = engine.compress(data, level if engine is zlib else min(level, 3))
    return made


def shuffle(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Put the first bytes of all values first, then the second ones, and so on.

    Parameters
    ----------
    values : (n,) array
        Of any fixed width.

    Returns
    -------
    (itemsize, n) uint8

    Examples
    --------
    >>> shuffle(np.array([1, 2], "<u2")).tolist()
    [[1, 2], [0, 0]]
    """
    width = values.dtype.itemsize
    out = np.empty((width, len(values)), np.uint8)
    words = values.view(f"<u{width}") if width in (1, 2, 4, 8) else None
    if words is None:
        out[...] = values.view(np.uint8).reshape(-1, width).T
        return out
    for i in range(width):
        # Shifting whole words is several times faster than copying every fourth byte.
        np.copyto(out[i], words >> words.dtype.type(8 * i) if i else words, casting="unsafe")
    return out


def unshuffle(data: Any, out: NDArray[Any]) -> None:  # noqa: ANN401  (any buffer)
    """Undo `shuffle` into an array.

    Parameters
    ----------
    data : buffer
        ``itemsize * n`` bytes.
    out : (n,) array
        Where the values go.

    Examples
    --------
    >>> out = np.empty(2, "<u2")
    >>> unshuffle(bytes([1, 2, 0, 0]), out)
    >>> out.tolist()
    [1, 2]
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
