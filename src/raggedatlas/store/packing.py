"""Packing unsigned integers into small blocks; the byte format is in docs/reference/packed-codec.md."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.store.native import library
from raggedatlas.store.rings import shared_ring
from raggedatlas.store.runs import ChunkRun


def encode_packed(values: NDArray[Any], breaks: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Pack one chunk.

    Parameters
    ----------
    values : (n,) unsigned integers
        The chunk; n at least 1.
    breaks : (k,) int64
        Places, ascending, where a block should begin if the chunk does not ascend; they only make it smaller and faster.

    Returns
    -------
    uint8
        The packed bytes, without a checksum.
    """
    out = np.empty(library().ra_packed_room(values.size, values.itemsize), np.uint8)
    n = library().ra_pack(values, values.size, values.itemsize, breaks, breaks.size, out, out.size)
    return out[:n]


def encode_packed_run(values: NDArray[Any], chunk: int, breaks: NDArray[np.int64]) -> ChunkRun:
    """Pack chunks, each with its crc32c behind it, in one call that holds no lock.

    Parameters
    ----------
    values : (c * chunk,) unsigned integers
        Chunks, one behind the other.
    chunk : int
        Values of one chunk.
    breaks : (k,) int64
        Places in `values`, ascending, as `encode_packed` takes them.

    Returns
    -------
    ChunkRun
        Of c chunks.
    """
    n_chunks = values.size // chunk
    # Most of it is never touched; memory that is used again need not be cleared by the system either.
    room = n_chunks * (library().ra_packed_room(chunk, values.itemsize) + 4)
    out = shared_ring().take(room, np.dtype(np.uint8))
    ends, own = np.empty(n_chunks, np.int64), breaks.copy()
    n = library().ra_pack_chunks(values, n_chunks, chunk, values.itemsize, own, own.size, out, out.size, ends)
    # Copied by NumPy, which holds no lock meanwhile.
    return ChunkRun(out[:n].copy().data, ends)
