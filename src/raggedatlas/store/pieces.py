"""Which chunks ranges of rows touch, and the pieces of each."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raggedatlas.store.native import library

WAVE_BYTES = 64 * 2**20
"""Decoded bytes of the chunks that are fetched at once."""


@dataclass(frozen=True)
class ChunkPieces:
    """Which chunks a read touches, and the pieces of each."""

    chunks: NDArray[np.int64]  # numbers of the chunks, ascending
    bounds: NDArray[np.int64]  # (n_chunks + 1,): the pieces of each chunk
    sources: NDArray[np.int64]  # first row of each piece inside its chunk
    lengths: NDArray[np.int64]  # number of rows of each piece
    targets: NDArray[np.int64]  # first row of each piece in the output
    n_rows: int  # of all pieces


def plan_pieces(starts: NDArray[np.int64], ends: NDArray[np.int64], chunk_rows: int) -> ChunkPieces:
    """Cut ranges at chunk borders and sort the pieces by chunk."""
    starts, ends = np.ascontiguousarray(starts), np.ascontiguousarray(ends)
    n_pieces = library().ra_count_pieces(starts, ends, starts.size, chunk_rows)
    pieces = np.empty((4, n_pieces), np.int64)
    library().ra_split_ranges(starts, ends, starts.size, chunk_rows, pieces, n_pieces)
    chunks, sources, lengths, targets = pieces
    if chunks.size and (chunks[1:] < chunks[:-1]).any():
        order = np.argsort(chunks, kind="stable")
        chunks, sources, lengths, targets = (item[order] for item in (chunks, sources, lengths, targets))
    new = np.flatnonzero(np.concatenate([[True], chunks[1:] != chunks[:-1]])) if chunks.size else chunks
    bounds = np.append(new, chunks.size).astype(np.int64)
    return ChunkPieces(chunks[new], bounds, sources, lengths, targets, int((ends - starts).sum()))


def join_ranges(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join ranges that follow each other, as those of neighbouring rows do; what is read is the same.

    Examples
    --------
    >>> joined = join_ranges(np.array([0, 3, 9, 1]), np.array([3, 5, 9, 2]))
    >>> [item.tolist() for item in joined]
    [[0, 1], [5, 2]]
    """
    some = starts < ends
    starts, ends = starts[some], ends[some]
    new = starts[1:] != ends[:-1]
    return starts[np.append(True, new)[: starts.size]], ends[np.append(new, True)[: ends.size]]
