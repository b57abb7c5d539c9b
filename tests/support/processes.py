"""Processes that a test starts: whatever the test does, none of them outlives it."""

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any


@contextmanager
def started(words: Sequence[str | Path], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Start a process that writes text into pipes, and kill it at the end of the block where it still runs.

    Parameters
    ----------
    words : sequence of str or Path
        What to run.
    **options
        Of `subprocess.Popen`; ``stdout`` and ``stderr`` are pipes unless they are given.

    Yields
    ------
    subprocess.Popen
        It has been waited for after the block, also where that ended by an error or a test's time was over.

    Examples
    --------
    >>> with started(["sleep", "60"]) as process:
    ...     pass
    >>> process.returncode
    -9
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with _interruptible():
        made = subprocess.Popen(words, text=True, **{**pipes, **options})
    with made as process:
        try:
            yield process
        finally:
            # Without this an error within the block would wait for a process that goes on.
            process.kill()
            process.wait()


@contextmanager
def processes() -> Iterator[Executor]:
    """Start two processes for tasks; those that hang at the end are killed."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        try:
            yield pool
        finally:
            # Before the pool's own exit, which waits for tasks that still run.
            for process in list((pool._processes or {}).values()):
                process.kill()


@contextmanager
def dask_workers() -> Iterator[Executor]:
    """Start a dask cluster of two processes on this machine, which gives a task up that killed two workers."""
    dask, distributed = import_module("dask"), import_module("distributed")
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=":0", silence_logs=50) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor()


POOLS: dict[str, Callable[[], AbstractContextManager[Executor]]] = {"processes": processes, "dask": dask_workers}
"""Kinds of executors that tests try."""


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make Ctrl-C reach processes that are started within; a run in the background ignores it, and its children inherit that."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
