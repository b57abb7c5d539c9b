"""Laws of memory that is used again."""

import gc
import weakref

import numpy as np

from raggedatlas.store import rings


def test_a_ring_keeps_no_more_memory_than_it_may() -> None:
    """Of pieces that are let go, as many are kept as fit the number and the bytes that are allowed."""
    ring = rings.BufferRing(4, 2**20)
    held = [ring.take(2**18, np.dtype(np.uint8)) for _ in range(9)]
    del held
    assert 0 < sum(item.size for item in ring.free) <= 2**20
    ring = rings.BufferRing(4)
    held = [ring.take(2**18, np.dtype(np.uint8)) for _ in range(9)]
    del held
    assert len(ring.free) == 4


def test_large_blocks_share_a_ring_while_anyone_holds_it() -> None:
    """Whoever asks gets the same ring, until nobody has it any more."""
    gc.collect()  # what other tests left may hold it
    one = rings.shared_ring()
    assert rings.shared_ring() is one
    memory = one.take(2**17, np.dtype(np.uint8))
    at = memory.ctypes.data
    del memory
    assert rings.shared_ring().take(2**17, np.dtype(np.uint8)).ctypes.data == at
    gone = weakref.ref(one)
    del one
    assert gone() is None
