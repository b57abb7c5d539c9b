"""Reading the next step while this one is worked on, and writing the last one: one thread ahead, one behind."""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

A = TypeVar("A")


def read_ahead(steps: Iterator[A]) -> Generator[A, None, None]:
    """Walk through steps, the next of which is made on a thread of its own while the caller works on this one.

    Close it (`contextlib.closing`) where the walk may end early; whatever is being made then is waited for.

    Parameters
    ----------
    steps : iterator
        Used from that thread alone. What it raises is raised here, in its turn.

    Examples
    --------
    >>> list(read_ahead(iter("abc")))
    ['a', 'b', 'c']
    """
    with ThreadPoolExecutor(1, thread_name_prefix="raggedatlas-read") as pool:
        coming: Future[list[A]] = pool.submit(_take_one, steps)
        while found := coming.result():
            coming = pool.submit(_take_one, steps)
            yield found[0]


@contextmanager
def write_behind() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Give a call that has jobs done one after the other on a thread of its own, each while the caller prepares the next.

    The call waits for the job before it and raises what that raised, as does the end of the context. Where the context is
    left with an error, the running job is waited for and its own error is dropped.

    Examples
    --------
    >>> done = []
    >>> with write_behind() as later:
    ...     for i in range(3):
    ...         later(lambda i=i: done.append(i))
    >>> done
    [0, 1, 2]
    """
    with ThreadPoolExecutor(1, thread_name_prefix="raggedatlas-write") as pool:
        running: list[Future[None]] = []

        def later(job: Callable[[], None]) -> None:
            if running:
                running.pop().result()
            running.append(pool.submit(job))

        yield later
        if running:
            running.pop().result()


def _take_one(steps: Iterator[A]) -> list[A]:
    """Take the next step, or nothing at the end; a StopIteration cannot be an error of a future."""
    for step in steps:
        return [step]
    return []
