"""Which ids were written before: eight bytes for each, however long they are, of which most lie in a file."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raggedatlas.store.location import store_errors

LONGEST = 2**20
"""Hashes of a run in memory; longer ones are put into a file and are not merged any more."""

_RATIO = 8


class SeenIds:
    """The hashes of all ids so far, in few sorted runs; each run in memory is much longer than the next.

    Parameters
    ----------
    folder : pathlib.Path or None
        Where long runs are put, into files without a name, which go with the process; None takes the system's place.

    Examples
    --------
    >>> seen = SeenIds()
    >>> seen.add(hashes_of(["a", "b"]))
    >>> seen.meets(hashes_of(["c", "a"])), seen.meets(hashes_of(["c", "d"])), len(seen)
    (True, False, 2)
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._runs: list[NDArray[np.int64]] = []
        self._stored: list[NDArray[np.int64]] = []

    def __len__(self) -> int:
        """Count the ids."""
        return sum(map(len, (*self._stored, *self._runs)))

    def meets(self, hashes: NDArray[np.int64]) -> bool:
        """Tell whether sorted hashes hold one twice, or one that is known: the ids themselves are to be compared then."""
        if bool(np.any(hashes[1:] == hashes[:-1])):
            return True
        return any(
            bool(np.any(run[np.minimum(np.searchsorted(run, hashes), len(run) - 1)] == hashes))
            for run in (*self._stored, *self._runs)
        )

    def add(self, hashes: NDArray[np.int64]) -> None:
        """Remember sorted hashes, merging runs that are not much longer than the next."""
        self._runs.append(hashes)
        while len(self._runs) > 1 and len(self._runs[-1]) * _RATIO >= len(self._runs[-2]):
            merged = np.concatenate([self._runs.pop(), self._runs.pop()])
            # a stable sort merges two sorted runs in one pass
            merged.sort(kind="stable")
            self._runs.append(merged)
        if len(self._runs[0]) >= LONGEST:
            self._stored.append(self._store(self._runs.pop(0)))

    def _store(self, run: NDArray[np.int64]) -> NDArray[np.int64]:
        with store_errors(f"write into {self._folder}"), tempfile.TemporaryFile(dir=self._folder) as file:
            run.tofile(file)
            file.flush()
            # the mapping keeps the file
            return np.memmap(file, np.int64, "r", shape=run.shape)


def hashes_of(ids: Sequence[str]) -> NDArray[np.int64]:
    """Hash ids, sorted; equal ids have equal hashes within one process."""
    return np.sort(np.fromiter(map(hash, ids), np.int64, len(ids)))
