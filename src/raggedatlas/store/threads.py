"""The thread pools of a process: for decoding, for waiting on object stores, for reading several remote groups."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

DECODE_THREADS = min(4, os.cpu_count() or 1)
REQUEST_THREADS = 16


@cache
def _pool(pid: int, kind: str) -> ThreadPoolExecutor:
    """Return the pool of a kind; a forked child has another pid and so its own pools."""
    size = max(1, DECODE_THREADS - 1) if kind == "decode" else REQUEST_THREADS
    return ThreadPoolExecutor(size, thread_name_prefix=f"raggedatlas-{kind}")


def map_decode(function: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Apply `function` to every item on this thread and the decoding threads, of which there are as many as cores in all.

    Each takes the next item when it is done with one, so a call may be made within another's function. The error of the first item
    that had one is raised, after all have ended.
    """
    if len(items) == 1:
        return [function(items[0])]
    outcomes: list[Future[B]] = [Future() for _ in items]
    waiting = deque(zip(outcomes, items, strict=True))
    helpers = [
        _pool(os.getpid(), "decode").submit(_work, function, waiting)
        for _ in range(min(DECODE_THREADS, len(items)) - 1)
    ]
    _work(function, waiting)
    for helper in helpers:
        if not helper.cancel():
            helper.result()
    return [outcome.result() for outcome in outcomes]


def _work(function: Callable[[A], B], waiting: "deque[tuple[Future[B], A]]") -> None:
    """Take item after item until none waits."""
    while True:
        try:
            outcome, item = waiting.popleft()
        except IndexError:
            return
        try:
            outcome.set_result(function(item))
        except Exception as error:  # noqa: BLE001  (whatever it is, the caller raises it)
            outcome.set_exception(error)


def map_requests(function: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Apply `function` to every item on the threads that wait for object stores, at most 16 at once."""
    return _map("requests", function, items)


def map_groups(function: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Apply `function` to every item on threads of their own, at most 16 at once; it may use the other pools in turn."""
    return _map("groups", function, items)


def beside(function: Callable[[A], B], item: A) -> "Future[B]":
    """Apply `function` on another thread while the caller goes on; it must not use the threads of `map_groups`."""
    return _pool(os.getpid(), "groups").submit(function, item)


def ahead(items: Iterator[A]) -> Iterator[A]:
    """Give the items of an iterator, the next of which is made on another thread while the caller uses one.

    Making them may use the threads of everything else here.

    Parameters
    ----------
    items : iterator
        Asked by one thread at a time.

    Raises
    ------
    Exception
        What the iterator raised, when its turn comes.

    Examples
    --------
    >>> list(ahead(iter([3, 1, 2])))
    [3, 1, 2]
    """
    pool = _pool(os.getpid(), "ahead")
    waiting = pool.submit(_one_more, items)
    try:
        while item := waiting.result():
            waiting = pool.submit(_one_more, items)
            yield item[0]
    finally:
        if not waiting.cancel():
            wait([waiting])


def _one_more(items: Iterator[A]) -> tuple[A, ...]:
    """Return the next item alone, or nothing at the end: what an item is worth as a truth value is its own affair."""
    for item in items:
        return (item,)
    return ()


def _map(kind: str, function: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Apply `function` in order; the first error is raised after all have ended."""
    if len(items) <= 1:
        return [function(item) for item in items]
    futures = [_pool(os.getpid(), kind).submit(function, item) for item in items]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]
