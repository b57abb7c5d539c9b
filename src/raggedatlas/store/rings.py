"""Memory of large results and blocks that is used again."""

import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHARED_BYTES = 2**28
"""Free memory that the shared ring holds at most: about what one `add` has in use at once, so that none is asked for anew."""

SHARED_PIECES = 48
"""Free pieces that the shared ring holds at most."""


class BufferRing:
    """Memory of results that is used again once no array looks at it any more.

    An array from `take` owns its memory for as long as it or any view of it lives, so a held batch never changes; only memory
    that was let go is handed out again. Fresh memory costs a page fault for every 4 KiB, which takes as long as reading.

    Parameters
    ----------
    n_kept : int
        How many free pieces are kept; 0 turns reuse off.
    most_bytes : int, optional
        How much memory they have together at most.
    """

    def __init__(self, n_kept: int = 8, most_bytes: int | None = None) -> None:
        self.n_kept, self.most_bytes = n_kept, most_bytes
        # Letting go of an array can run inside `take`, in the same thread.
        self.lock = threading.RLock()
        self.free: list[NDArray[np.uint8]] = []

    def take(self, n: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialised (n,) array."""
        n_bytes = n * dtype.itemsize
        if not self.n_kept or n_bytes < 2**16:
            return np.empty(n, dtype)
        with self.lock:
            fit = [i for i, item in enumerate(self.free) if n_bytes <= item.size <= 4 * n_bytes]
            memory = self.free.pop(min(fit, key=lambda i: self.free[i].size)) if fit else None
        if memory is None:
            memory = np.empty(n_bytes + n_bytes // 8, np.uint8)
        # Chains of `base` end at the array that frombuffer made; when that goes, nothing can look at the memory. It is as
        # large as the result: SciPy copies what is a small part of its base.
        owner = np.frombuffer(memoryview(memory.data), dtype, n)
        weakref.finalize(owner, self._give_back, memory).atexit = False
        return owner.view()

    def _give_back(self, memory: NDArray[np.uint8]) -> None:
        """Keep memory that nothing looks at any more."""
        with self.lock:
            held = sum(item.size for item in self.free) + memory.size
            if len(self.free) < self.n_kept and (self.most_bytes is None or held <= self.most_bytes):
                self.free.append(memory)


_shared: weakref.WeakValueDictionary[str, BufferRing] = weakref.WeakValueDictionary()
_sharing = threading.Lock()


def shared_ring() -> BufferRing:
    """Return the ring of all that work through large blocks at the same time; it goes when the last of them goes.

    Examples
    --------
    >>> held = shared_ring()
    >>> shared_ring() is held
    True
    """
    with _sharing:
        ring = _shared.get("blocks")
        if ring is None:
            ring = _shared["blocks"] = BufferRing(SHARED_PIECES, SHARED_BYTES)
        return ring
