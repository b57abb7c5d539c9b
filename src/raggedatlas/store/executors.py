"""Tasks on the workers of any executor, a bounded number at a time; errors of tasks are distinguished from lost workers."""

import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar
from uuid import uuid4

from raggedatlas.errors import ArgumentError, AtlasError, WorkersError
from raggedatlas.model.arguments import checked
from raggedatlas.store.location import Location
from raggedatlas.store.storage_errors import plain_reason

T = TypeVar("T")

IN_FLIGHT = 128
"""Most tasks between the oldest that is not finished and the newest that was sent, which bounds the memory for tasks and results."""

_NOT_SENT = (pickle.PicklingError, TypeError, AttributeError)
"""What executors report about results that cannot be pickled; errors of tasks themselves come as values."""


@checked
@dataclass(frozen=True)
class Workers:
    """An executor, and what to do about its workers that die or hang; ``executor=`` takes one in the place of an executor.

    Parameters
    ----------
    executor : concurrent.futures.Executor
        Whose workers compute; the caller shuts it down.
    timeout : float or None
        Seconds without a finished task after which a call fails. None waits indefinitely.
    retries : int
        How often a task is sent again that was lost with its worker, where the executor goes on without that worker, as dask does.

    Examples
    --------
    >>> from concurrent.futures import ProcessPoolExecutor
    >>> with ProcessPoolExecutor(2) as pool:  # doctest: +SKIP
    ...     atlas.add(files, executor=Workers(pool, timeout=3600))
    """

    executor: Executor
    timeout: float | None = None
    retries: int = 1

    def __post_init__(self) -> None:
        """Refuse limits that cannot be kept."""
        if self.retries < 0 or (self.timeout is not None and self.timeout <= 0):
            raise ArgumentError(
                f"Workers takes timeout as seconds above 0 or None and retries as 0 or more, not {self.timeout} and {self.retries}."
            )


def run_tasks(
    tasks: Iterable[Callable[[], T]],
    executor: Executor | Workers | None,
    *,
    place: Location | None = None,
    in_flight: int = IN_FLIGHT,
    lost: str = "Nothing was written.",
) -> Generator[tuple[int, T], None, None]:
    """Run tasks and yield their results as they arrive, each with the number of its task.

    Close it (`contextlib.closing`) where the walk may end early: tasks that have not begun are cancelled then, and
    those that run are waited for, unless a worker hangs.

    `tasks` are picklable, by cloudpickle where it is installed, and taken one by one as workers become free. A task may
    run twice where a worker is lost, but yields one result. Without an executor they run here, one after the other.
    `place` is what every worker must reach. At most `in_flight` tasks are ahead of the oldest that is not finished.
    `lost` is a sentence about what has become of the caller's work, for the message about lost workers.

    Raises `WorkersError` if workers die, hang, or do not reach the place; `ArgumentError` if a task or a result cannot
    be pickled; and what a task raised.
    """
    if executor is None:
        for number, task in enumerate(tasks):
            yield number, task()
        return
    workers = executor if isinstance(executor, Workers) else Workers(executor)
    # Threads get the task itself; `_work` recognizes by `bytes` that a task was pickled and its error must be too.
    shared = isinstance(workers.executor, ThreadPoolExecutor)
    run = _SubmittedTasks[T](workers, place, lost)
    numbered = enumerate(tasks)
    n_sent = 0
    try:
        while True:
            # A task sent again keeps its number and holds the window back, which bounds what `in_order` keeps.
            oldest = min((sent.number for sent in run.flying.values()), default=n_sent)
            for number, task in islice(numbered, max(0, oldest + in_flight - n_sent)):
                run.send(_Sent(number, task if shared else _pickled(task)))
                n_sent += 1
            if not run.flying:
                return
            yield from run.finished()
    finally:
        run.close()


def in_order(results: Generator[tuple[int, T], None, None]) -> Generator[T, None, None]:
    """Return the results of `run_tasks` in the order of the tasks."""
    held: dict[int, T] = {}
    given = 0
    with closing(results):
        for number, result in results:
            held[number] = result
            while given in held:
                yield held.pop(given)
                given += 1


@contextmanager
def spawned(n: int) -> Iterator[Executor]:
    """Start local processes that end with this one, however it ends."""
    # Here, as most processes start none.
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # Not fork: reads from an object store hang in a forked child, and `Location.store` refuses them.
    with ProcessPoolExecutor(n, mp_context=get_context("spawn"), initializer=_follow_parent) as pool:
        try:
            yield pool
        except BaseException:
            # Cancels what has not begun, for which the pool's own exit would wait. Not after success: the pool then ends
            # in the background, and in a process of multiprocessing, which does not wait for that, its workers never do.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@dataclass(frozen=True)
class _Sent:
    number: int
    task: Callable[[], Any] | bytes
    attempt: int = 0


class _SubmittedTasks(Generic[T]):
    """The tasks of one call that are with workers."""

    def __init__(self, workers: Workers, place: Location | None, lost: str) -> None:
        self.workers, self.place, self.lost = workers, place, lost
        # A task comes back as its result, or the error that it raised.
        self.flying: dict[Future[tuple[T, Exception | None]], _Sent] = {}
        self._name, self._hangs = uuid4().hex, False

    def send(self, sent: _Sent) -> None:
        # The attempt is an argument because dask takes calls with the same arguments for one.
        job = (sent.task, self.place, socket.gethostname(), f"{self._name}-{sent.number}-{sent.attempt}")
        try:
            self.flying[self.workers.executor.submit(_work, *job)] = sent
        except Exception as error:
            raise self._died(error) from error

    def finished(self) -> Iterator[tuple[int, T]]:
        """Wait until tasks have finished; those that were lost are sent again."""
        done = wait(self.flying, self.workers.timeout, FIRST_COMPLETED).done
        if not done:
            self._hangs = True
            raise WorkersError(
                f"No task has finished within timeout={self.workers.timeout:g} seconds, {len(self.flying):,} are with workers: a worker hangs, "
                f"or the workers are too few. {self.lost} Look at the workers, or allow more time with Workers(executor, timeout=...)."
            )
        for future in done:
            sent = self.flying.pop(future)
            # `exception()` raises for a cancelled future, which is handled like a task whose worker is lost.
            error = CancelledError() if future.cancelled() else future.exception()
            if error is None:
                result, failure = future.result()
                if failure is not None:
                    raise failure
                yield sent.number, result
                continue
            if isinstance(error, BrokenExecutor):
                raise self._died(error) from error
            if isinstance(error, _NOT_SENT):
                raise ArgumentError(
                    f"The result of a task cannot be sent back from its worker: {plain_reason(error)}. {self.lost} Return arrays, tables or other "
                    "values that pickle takes."
                ) from error
            if not isinstance(error, Exception):
                raise error
            if sent.attempt >= self.workers.retries:
                reason = f"{type(error).__name__} {plain_reason(error)}".strip()
                raise WorkersError(
                    f"A task was lost with its worker {sent.attempt + 1} time(s), at last by: {reason}. {self.lost} Look at the logs of the workers; "
                    "memory may have run out."
                ) from error
            self.send(_Sent(sent.number, sent.task, sent.attempt + 1))

    def close(self) -> None:
        """Cancel what has not begun, and wait for the rest."""
        running = [future for future in self.flying if not future.cancel()]
        if not self._hangs:
            wait(running, self.workers.timeout)

    def _died(self, error: BaseException) -> WorkersError:
        what = "A worker died" if isinstance(error, BrokenExecutor) else "The executor takes no tasks"
        # A script without a main guard is run again by every spawned process.
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        text, why = "", "A worker was killed, or memory ran out; try fewer workers."
        if script is not None and Path(script).suffix == ".py" and Path(script).is_file():
            text = Path(script).read_text(encoding="utf-8", errors="replace")
        if text and "__main__" not in text:
            why = f"{script} starts the run when it is imported, which every spawned process does; put the call under if __name__ == '__main__':."
        return WorkersError(f"{what}: {plain_reason(error)}. {self.lost} {why}")


def _pickled(task: object) -> bytes:
    """Pickle a task; what is defined in a script or notebook goes by value where cloudpickle is installed."""
    try:
        payload = pickle.dumps(task, protocol=5)
        # pickle refers to functions by module and name, and a worker has another `__main__`.
        if b"__main__" not in payload:
            return payload
        reason = ""
    except Exception as error:  # noqa: BLE001  (objects raise what they like)
        payload, reason = b"", plain_reason(error)
    try:
        import cloudpickle

        return bytes(cloudpickle.dumps(task, protocol=5))
    except ImportError:
        if payload:
            return payload
    except Exception as error:  # noqa: BLE001
        reason = plain_reason(error)
    raise ArgumentError(
        f"The work cannot be sent to workers: {reason}. Functions and classes must be defined at the top level of a module that workers "
        "can import, and hold no open files, locks or connections."
    )


def _work(
    task: Callable[[], Any] | bytes, place: Location | None, caller: str, attempt: str
) -> tuple[Any, Exception | None]:
    """Run a task on a worker; its error is a value, so any exception of the executor concerns the worker."""
    host = socket.gethostname()
    try:
        if place is not None:
            _reach(place, host)
        return (_unpickled(task, host) if isinstance(task, bytes) else task)(), None
    except Exception as error:  # noqa: BLE001  (the caller raises it)
        return None, _portable(error, "" if host == caller else host) if isinstance(task, bytes) else error


def _reach(place: Location, here: str) -> None:
    try:
        reason = "" if place.holds_files() else "there is nothing at this address"
    except AtlasError as error:
        reason = str(error)
    if reason:
        raise WorkersError(
            f"A worker on {here} does not reach {place.uri}: {reason.rstrip('.')}. Put the atlas where every worker finds it under the same "
            "address, in a shared folder or an object store, with the same credentials."
        )


def _unpickled(payload: bytes, here: str) -> Callable[[], Any]:
    try:
        task: Callable[[], Any] = pickle.loads(payload)
    except Exception as error:
        raise ArgumentError(
            f"A worker on {here} cannot read its task: {type(error).__name__}: {plain_reason(error)}. The worker needs the same packages, and "
            "functions must be defined in a module that it can import; a notebook or script needs cloudpickle for that."
        ) from error
    return task


def _portable(error: Exception, host: str) -> Exception:
    """Return a picklable error with the traceback of the worker as a note."""
    if isinstance(error, AtlasError):
        if host:
            error.args = (f"{error} (on the worker {host})", *error.args[1:])
    else:
        error.add_note("".join(traceback.format_exception(error)))
    try:
        # Some exceptions pickle but do not unpickle: their constructor takes other arguments than `args`.
        again = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001
        again = None
    if type(again) is type(error):
        return error
    substitute = RuntimeError(f"{type(error).__name__}: {error}")
    substitute.__notes__ = getattr(error, "__notes__", [])
    return substitute


def _follow_parent() -> None:
    """End this process when the one that started it ends."""
    from multiprocessing import connection, parent_process

    def end(sentinel: int) -> None:
        connection.wait([sentinel])
        # `sys.exit` would end only this thread, while the main thread may be in a task.
        os._exit(1)

    parent = parent_process()
    if parent is not None:
        threading.Thread(target=end, args=(parent.sentinel,), daemon=True).start()
