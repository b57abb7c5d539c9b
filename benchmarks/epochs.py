"""Drive one loader or reader inside its own process and count what it delivers.

Every system is timed by the same three functions, so that warming up, cutting and counting are the
same for all: complete epochs of an iterator, rows fetched by one or more calling threads, and single
rows. A measurement is a number of complete epochs that together last ``least`` seconds, or what was
delivered when ``seconds`` were over. Needs only NumPy.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from measuring import anonymous_kib, threads_alive

if TYPE_CHECKING:
    from measuring import Asked, Figure
    from numpy.typing import NDArray

Counted = tuple[int, int]
"""Cells and non-zeros of one batch."""
Epoch = Callable[[int], Iterator[Counted]]
"""Number of an epoch -> its batches."""
Fetch = Callable[[Any], Counted]
"""(n,) int64 rows -> what was fetched."""

_READ_SIZE = 1 << 22


@dataclass(frozen=True)
class Pace:
    """How one measurement is driven.

    Parameters
    ----------
    batch
        Cells of a batch.
    seed
        Seed of the order.
    seconds
        Where an epoch is cut; None never cuts, for loaders that deliver in bursts.
    least
        Epochs are added until this many seconds have passed.
    warm
        Batches that are taken, and not counted, before the clock starts.
    callers
        Threads that ask for rows (readers without a loader of their own).
    shuffled
        Whether rows are asked for in a random order (readers without a loader of their own).
    """

    batch: int = 512
    seed: int = 0
    seconds: float | None = 20.0
    least: float = 3.0
    warm: int = 5
    callers: int = 1
    shuffled: bool = True


def pace_of(asked: Asked, **changed: Any) -> Pace:
    """Read the pace that the command line asks for."""
    names = Pace.__dataclass_fields__
    return Pace(**{**{k: v for k, v in asked.setting.items() if k in names}, **changed})


def touch(path: Path) -> None:
    """Read every file once, so that the page cache holds what is measured."""
    buffer = bytearray(_READ_SIZE)
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def timed_epochs(figure: Figure, pace: Pace, epoch: Epoch, warm: Epoch | None = None) -> None:
    """Time complete epochs of an iterator, cut after ``pace.seconds``.

    ``warm`` gives the batches that are taken beforehand; by default a first epoch that is left early.
    """
    _ready(figure)
    started = (warm or epoch)(0)
    for _ in islice(started, pace.warm):
        pass
    del started
    clock = _Clock(figure, pace)
    while not clock.enough():
        for cells, nnz in epoch(clock.epochs + 1):
            clock.count(cells, nnz)
            if clock.over():
                break
        else:
            clock.epochs += 1
    clock.stop()


def timed_callers(figure: Figure, pace: Pace, fetch: Fetch, n_rows: int) -> None:
    """Time rows fetched batch by batch, each calling thread taking the next batch of one order."""
    _ready(figure)
    rng = np.random.default_rng(pace.seed)

    def order() -> NDArray[np.int64]:
        return rng.permutation(n_rows) if pace.shuffled else np.arange(n_rows)

    first = order()
    for number in range(pace.warm):
        fetch(first[number * pace.batch : (number + 1) * pace.batch])
    clock = _Clock(figure, pace)
    while not clock.enough():
        if _one_pass(clock, pace, fetch, order()):
            clock.epochs += 1
    clock.stop()


def _one_pass(clock: _Clock, pace: Pace, fetch: Fetch, order: NDArray[np.int64]) -> bool:
    """Fetch one order with all callers; False where it was cut."""
    starts = iter(range(0, order.size, pace.batch))

    def call() -> bool:
        for start in starts:  # taking the next number is one step under the interpreter's lock
            clock.count(*fetch(order[start : start + pace.batch]))
            if clock.over():
                return False
        return True

    if pace.callers == 1:
        return call()
    with ThreadPoolExecutor(pace.callers) as pool:
        calls = [pool.submit(call) for _ in range(pace.callers)]
        whole = [one.result() for one in calls]
    return all(whole)


def timed_rows(figure: Figure, pace: Pace, fetch: Fetch, n_rows: int, calls: int = 400) -> None:
    """Time single random rows; ``figure.seconds`` holds one entry per call."""
    _ready(figure)
    rows = np.random.default_rng(pace.seed).permutation(n_rows)[: calls + 20]
    for number, row in enumerate(rows):
        started = time.perf_counter()
        cells, nnz = fetch(np.array([row], dtype=np.int64))
        took = time.perf_counter() - started
        if number >= 20:
            figure.seconds.append(took)
            figure.cells += cells
            figure.nnz += nnz


def _ready(figure: Figure) -> None:
    """Note the memory that imports and opening took."""
    figure.extra["ready_anon_mb"] = anonymous_kib() / 1024


class _Clock:
    """Wall and processor time of the counted part; safe to count from several threads."""

    def __init__(self, figure: Figure, pace: Pace) -> None:
        self._figure = figure
        self._pace = pace
        self._lock = threading.Lock()
        self.epochs = 0
        self._cpu = _cpu_seconds()
        self._started = time.perf_counter()

    def count(self, cells: int, nnz: int) -> None:
        """Add one delivered batch."""
        with self._lock:
            if not self._figure.cells:
                self._figure.extra["first_batch_seconds"] = self._elapsed()
                self._figure.extra["threads_loading"] = threads_alive()
            self._figure.cells += cells
            self._figure.nnz += nnz

    def over(self) -> bool:
        """Whether the epoch is to be cut."""
        return self._pace.seconds is not None and self._elapsed() >= self._pace.seconds

    def enough(self) -> bool:
        """Whether no other epoch is to be begun."""
        return self._elapsed() >= self._pace.least or self.over()

    def stop(self) -> None:
        """Keep what was measured."""
        wall = self._elapsed()
        figure = self._figure
        figure.seconds.append(wall)
        figure.extra["cores"] = (_cpu_seconds() - self._cpu) / wall
        figure.extra["whole_epochs"] = self.epochs

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
