"""Work done ahead by a few threads, handed over in order; the threads end with the iteration, however it ends."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def run_ahead(make: Callable[[A], B], items: Iterable[A], threads: int, ahead: int) -> Iterator[B]:
    """Apply `make` to every item on threads, a bounded number ahead, and give the results in order.

    Parameters
    ----------
    make : callable
        Runs on any of the threads.
    items : iterable
        What to make results of.
    threads : int
        How many; 0 works in the caller when it asks.
    ahead : int
        Results that are made, or being made, beyond the one handed over.

    Raises
    ------
    Exception
        What `make` raised, when its turn comes; nothing after it is made.

    Examples
    --------
    >>> list(run_ahead(abs, [-3, 1, -2], threads=2, ahead=2))
    [3, 1, 2]
    """
    if threads == 0:
        yield from map(make, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="raggedatlas-loader")
    waiting: deque[Future[B]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
