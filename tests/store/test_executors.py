"""Tasks on workers: each result once whatever the executor, and one clear line for workers and tasks that fail."""

import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from raggedatlas.errors import ArgumentError, StoreError, WorkersError
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.location import Location
from support.processes import started

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


class Losing(Executor):
    """Loses every task some times, as a cluster does whose workers die."""

    def __init__(self, times: int) -> None:
        self.times, self.seen = times, dict[str, int]()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        key = args[-1].rpartition("-")[0]
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] <= self.times:
            future.set_exception(ConnectionError("worker is gone"))
        else:
            future.set_result(fn(*args, **kwargs))
        return future


@pytest.mark.parametrize("n", [0, 1, 23])
@pytest.mark.parametrize("in_flight", [1, 2, 128])
def test_every_result_comes_once_in_order(n: int, in_flight: int, processes: Executor, threads: Executor) -> None:
    """Whatever runs the tasks, each gives one result under its number."""
    for executor in (None, threads, processes, Workers(threads, timeout=60), Losing(1)):
        tasks = [partial(operator.mul, i, i) for i in range(n)]
        found = list(in_order(run_tasks(tasks, executor, in_flight=in_flight)))
        assert found == [i * i for i in range(n)]


def test_tasks_ahead_are_bounded(threads: Executor) -> None:
    """No task is taken while as many as allowed are ahead of the oldest that is not finished."""
    finish, taken = threading.Event(), list[int]()

    def tasks() -> Iterator[Any]:
        yield finish.wait
        for i in range(1, 20):
            taken.append(i)
            yield partial(int, i)

    with closing(run_tasks(tasks(), threads, in_flight=4)) as results:
        assert sorted(next(results)[0] for _ in range(3)) == [1, 2, 3]
        assert taken == [1, 2, 3]
        finish.set()
        assert len(list(results)) == 17


def test_an_error_of_a_task_is_raised_as_it_is(processes: Executor) -> None:
    """Errors keep their class and text, and say in a note where on the worker they came from."""
    with pytest.raises(ZeroDivisionError, match="division") as error:
        list(run_tasks([partial(operator.floordiv, 1, 0)], processes))
    assert "Traceback" in error.value.__notes__[0]
    with pytest.raises(StoreError, match="names a host"):
        list(run_tasks([partial(Location, "file://far/atlas")], processes))


def test_a_worker_that_dies_is_reported() -> None:
    """Where an executor breaks with its worker, the call says so and what has become of its work."""
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(WorkersError, match=r"A worker died: .*\. Nothing was written\. A worker was killed"),
    ):
        list(run_tasks([partial(os._exit, 1)], pool))


def test_a_lost_task_is_sent_again() -> None:
    """Where an executor goes on, a task is sent again as often as allowed, then the call gives up."""
    losing = Losing(2)
    assert list(run_tasks([partial(int, 7)], Workers(losing, retries=2))) == [(0, 7)]
    assert list(losing.seen.values()) == [3]
    with pytest.raises(
        WorkersError, match=r"lost with its worker 2 time\(s\), at last by: ConnectionError worker is gone"
    ):
        list(run_tasks([partial(int, 7)], Losing(2)))


def test_a_worker_that_hangs_is_reported(threads: Executor) -> None:
    """With a timeout, a call ends when no task finishes; tasks that finish in time begin it anew."""
    release = threading.Event()
    with pytest.raises(WorkersError, match=r"timeout=0\.5 seconds, 1 are with workers: a worker hangs"):
        list(run_tasks([partial(int, 1), release.wait], Workers(threads, timeout=0.5)))
    release.set()


def test_what_cannot_be_pickled_is_refused(processes: Executor, threads: Executor) -> None:
    """A task is refused before it is sent, a result when it comes; threads share memory and take both."""
    lock = threading.Lock()
    with pytest.raises(ArgumentError, match=r"The work cannot be sent to workers: .*lock"):
        list(run_tasks([lock.acquire], processes))
    with pytest.raises(ArgumentError, match=r"result of a task cannot be sent back from its worker: .*lock"):
        list(run_tasks([threading.Lock], processes))
    assert [result for _, result in run_tasks([lock.acquire], threads)] == [True]


def test_a_store_out_of_reach_is_reported(processes: Executor, tmp_path: Path) -> None:
    """A worker that does not find the atlas computes nothing."""
    with pytest.raises(
        WorkersError, match=r"A worker on .* does not reach .*gone: there is nothing at this address\. Put"
    ):
        list(run_tasks([partial((tmp_path / "made").mkdir)], processes, place=Location(str(tmp_path / "gone"))))
    assert list(tmp_path.iterdir()) == []


def test_an_executor_that_is_shut_down_is_reported(threads: Executor) -> None:
    """An executor that takes no tasks is named."""
    threads.shutdown()
    with pytest.raises(WorkersError, match="The executor takes no tasks: cannot schedule new futures after shutdown"):
        list(run_tasks([partial(int, 1)], threads))


def test_no_task_outlives_its_call() -> None:
    """When the walk ends early, tasks that wait are cancelled, and those that run are waited for."""
    begun, ended = list[int](), list[int]()

    def slow() -> None:
        begun.append(1)
        time.sleep(0.3)
        ended.append(1)

    with ThreadPoolExecutor(2) as pool:
        results = run_tasks([partial(int, 1), *[slow] * 9], pool)
        assert next(results) == (0, 1)
        results.close()
        assert len(begun) == len(ended) <= 3


@pytest.mark.parametrize("limits", [{"timeout": 0}, {"timeout": -1.0}, {"retries": -1}, {"executor": 4}])
def test_limits_are_refused(threads: Executor, limits: dict[str, Any]) -> None:
    """Workers take an executor, a positive time and a number of retries."""
    with pytest.raises(ArgumentError, match="Workers"):
        Workers(**{"executor": threads, **limits})


KILLED = """
import os, time
from functools import partial
from raggedatlas.store.executors import run_tasks, spawned
if __name__ == "__main__":
    with spawned(2) as pool:
        for _, pid in run_tasks([os.getpid] * 20, pool):
            print(pid, flush=True)
        print("done", flush=True)
        list(run_tasks([partial(time.sleep, 600)] * 2, pool))
"""


@pytest.mark.long
def test_own_processes_end_with_the_caller(tmp_path: Path) -> None:
    """Processes that a call started are gone after it is killed, also where they work."""
    (tmp_path / "script.py").write_text(KILLED)
    with started([sys.executable, str(tmp_path / "script.py")]) as run:
        assert run.stdout is not None
        pids = {int(line) for line in iter(run.stdout.readline, "done\n")}
        run.send_signal(signal.SIGKILL)
    assert pids
    end = time.monotonic() + 60
    while any(_runs(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False
