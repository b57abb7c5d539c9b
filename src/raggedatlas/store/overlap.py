"""Reading the next step while this one is worked on, and writing the last one: one thread ahead, one behind."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

A = TypeVar("A")


def read_ahead(steps: Iterator[A], depth: int = 1) -> Generator[A, None, None]:
    """Walk through steps, the next of which are made on a thread of its own while the caller works on this one.

    Close it (`contextlib.closing`) where the walk may end early; whatever is being made then is waited for.

    Parameters
    ----------
    steps : iterator
        Used from that thread alone. What it raises is raised here, in its turn.
    depth : int
        How many steps may be ready before the caller asks for them.

    Examples
    --------
    >>> list(read_ahead(iter("abc")))
    ['a', 'b', 'c']
    """
    with ThreadPoolExecutor(1, thread_name_prefix="raggedatlas-read") as pool:
        coming: deque[Future[list[A]]] = deque(pool.submit(_take_one, steps) for _ in range(depth))
        try:
            while found := coming.popleft().result():
                coming.append(pool.submit(_take_one, steps))
                yield found[0]
        finally:
            for step in coming:
                step.cancel()


class WriteBehind:
    """Does jobs one after the other on a thread of its own, while the caller prepares the next.

    The end of the context waits for all jobs and raises what one raised. Where the context is left with an error, the running job is
    waited for, the others are not begun, and their errors are dropped.

    Parameters
    ----------
    depth : int
        How many jobs may be unfinished.

    Examples
    --------
    >>> done = []
    >>> with WriteBehind() as later:
    ...     for i in range(3):
    ...         later(lambda i=i: done.append(i))
    >>> done
    [0, 1, 2]
    """

    def __init__(self, depth: int = 1) -> None:
        self._depth = depth
        self._running: deque[Future[None]] = deque()
        self._failed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="raggedatlas-write")

    def __enter__(self) -> Self:
        """Begin without a job."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the jobs, or for the running one alone."""
        try:
            if kind is None:
                self.settle()
        finally:
            self._failed = True
            self._pool.shutdown(cancel_futures=True)

    def __call__(self, job: Callable[[], object]) -> None:
        """Have a job done after the others; wait for the first of them where too many are unfinished.

        Raises
        ------
        Exception
            What an earlier job raised; no job is begun after it.
        """
        if len(self._running) == self._depth:
            self._running.popleft().result()
        self._running.append(self._pool.submit(self._run, job))

    def settle(self) -> None:
        """Wait until no job is left.

        Raises
        ------
        Exception
            What a job raised.
        """
        while self._running:
            self._running.popleft().result()

    def _run(self, job: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            job()
        except BaseException:
            self._failed = True
            raise


def _take_one(steps: Iterator[A]) -> list[A]:
    """Take the next step, or nothing at the end; a StopIteration cannot be an error of a future."""
    for step in steps:
        return [step]
    return []
