"""Encoded chunks that lie one behind the other: one piece of memory for many, as a Python object of each would cost more than to write it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from raggedatlas.store.files import Piece


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRun:
    """Some encoded chunks.

    Parameters
    ----------
    data : bytes or memoryview
        The chunks, one behind the other.
    ends : (n_chunks,) int64
        Where each ends in `data`; the next begins there.
    """

    data: Piece
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, chunk: bytes) -> Self:
        """Take one chunk."""
        return cls(chunk, np.array([len(chunk)], np.int64))

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.ends)

    def chunks(self) -> list[memoryview]:
        """Give each chunk by itself."""
        whole = memoryview(self.data)
        return [whole[start:stop] for start, stop in pairwise([0, *self.ends.tolist()])]

    def cut(self, n: int) -> tuple[Self, Self]:
        """Part the first `n` chunks, more than none and fewer than all, from the rest."""
        whole, at = memoryview(self.data), int(self.ends[n - 1])
        return type(self)(whole[:at], self.ends[:n]), type(self)(whole[at:], self.ends[n:] - at)


def count_chunks(runs: Sequence[ChunkRun]) -> int:
    """Add up the chunks of all runs."""
    return sum(map(len, runs))


def cut_runs(runs: Sequence[ChunkRun], n: int) -> tuple[list[ChunkRun], list[ChunkRun]]:
    """Part the first `n` chunks of some runs from the rest.

    Examples
    --------
    >>> pair = ChunkRun(b"abc", np.array([1, 3]))
    >>> before, after = cut_runs([ChunkRun.of(b"x"), pair], 2)
    >>> [run.data if isinstance(run.data, bytes) else run.data.tobytes() for run in (*before, *after)]
    [b'x', b'a', b'bc']
    """
    before: list[ChunkRun] = []
    left = n
    for i, run in enumerate(runs):
        if left >= len(run):
            before.append(run)
            left -= len(run)
        elif left:
            first, rest = run.cut(left)
            return [*before, first], [rest, *runs[i + 1 :]]
        else:
            return before, list(runs[i:])
    return before, []
