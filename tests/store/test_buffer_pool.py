"""Laws of memory that is used again."""

import gc
import weakref

import numpy as np

from raggedatlas.store import runtime


def test_a_ring_keeps_no_more_memory_than_it_may() -> None:
    """Of pieces that are let go, as many are kept as fit the number and the bytes that are allowed."""
    pool = runtime.BufferPool(4, 2**20)
    held = [pool.take(2**18, np.dtype(np.uint8)) for _ in range(9)]
    del held
    assert 0 < sum(item.size for item in pool.free) <= 2**20
    pool = runtime.BufferPool(4)
    held = [pool.take(2**18, np.dtype(np.uint8)) for _ in range(9)]
    del held
    assert len(pool.free) == 4


def test_large_blocks_share_a_ring_while_anyone_holds_it() -> None:
    """Whoever asks gets the same pool, until nobody has it any more."""
    gc.collect()  # what other tests left may hold it
    one = runtime.shared_pool()
    assert runtime.shared_pool() is one
    memory = one.take(2**17, np.dtype(np.uint8))
    at = memory.ctypes.data
    del memory
    assert runtime.shared_pool().take(2**17, np.dtype(np.uint8)).ctypes.data == at
    gone = weakref.ref(one)
    del one
    assert gone() is None
