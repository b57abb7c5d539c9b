"""Which ids were written before: eight bytes for each, however long they are."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_RATIO = 8


class SeenIds:
    """The hashes of all ids so far, in few sorted runs; each run is much longer than the next.

    Examples
    --------
    >>> seen = SeenIds()
    >>> seen.add(hashes_of(["a", "b"]))
    >>> seen.meets(hashes_of(["c", "a"])), seen.meets(hashes_of(["c", "d"])), len(seen)
    (True, False, 2)
    """

    def __init__(self) -> None:
        self._runs: list[NDArray[np.int64]] = []

    def __len__(self) -> int:
        """Count the ids."""
        return sum(map(len, self._runs))

    def meets(self, hashes: NDArray[np.int64]) -> bool:
        """Tell whether sorted hashes hold one twice, or one that is known: the ids themselves are to be compared then."""
        if bool(np.any(hashes[1:] == hashes[:-1])):
            return True
        return any(
            bool(np.any(run[np.minimum(np.searchsorted(run, hashes), len(run) - 1)] == hashes)) for run in self._runs
        )

    def add(self, hashes: NDArray[np.int64]) -> None:
        """Remember sorted hashes, merging runs that are not much longer than the next."""
        self._runs.append(hashes)
        while len(self._runs) > 1 and len(self._runs[-1]) * _RATIO >= len(self._runs[-2]):
            last = self._runs.pop()
            # a stable sort merges two sorted runs in one pass
            self._runs[-1] = np.sort(np.concatenate([self._runs[-1], last]), kind="stable")


def hashes_of(ids: Sequence[str]) -> NDArray[np.int64]:
    """Hash ids, sorted; equal ids have equal hashes within one process."""
    return np.sort(np.fromiter(map(hash, ids), np.int64, len(ids)))
