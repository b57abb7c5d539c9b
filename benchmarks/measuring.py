"""Measure one process honestly: wall time, processor time, peak anonymous memory, bytes on disk.

Needs nothing but the standard library until a measurement asks for more, so that import times
measured with it are the package's own. Linux only (reads ``/proc``).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

OPERATIONS = ("import", "add", "open", "count", "cell_type", "genes", "add_csc", "genes_csc")


@dataclass
class Figure:
    """One operation, measured in one process.

    ``seconds`` and ``cpu_seconds`` hold one entry per repeat, the first with whatever the operation loads or compiles.
    ``process_seconds`` and ``process_cpu_seconds`` cover the complete process, interpreter and imports
    included. ``answer`` lets two systems be checked against each other.
    """

    system: str
    op: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    cells: int = 0
    nnz: int = 0
    peak_anon_rss_mb: float = 0.0
    idle_anon_rss_mb: float = 0.0
    bytes_on_disk: int = 0
    bytes_in_arrays: int = 0
    process_seconds: float = 0.0
    process_cpu_seconds: float = 0.0
    peak_threads: int = 0
    answer: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """What the command line of a measured process says."""

    op: str
    data: Path
    atlas: Path
    repeats: int
    setting: dict[str, Any] = field(default_factory=dict)


class MemoryWatch:
    """Sample the anonymous memory and the number of threads of this process, every few milliseconds."""

    def __init__(self, interval: float = 0.01) -> None:
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_kib = 0
        self.peak_threads = 0

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look(watching=0)

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self._look(watching=1)

    def _look(self, watching: int) -> None:
        text = _status()
        self.peak_kib = max(self.peak_kib, _number(text, b"RssAnon:"))
        self.peak_threads = max(self.peak_threads, _number(text, b"Threads:") - watching)


def _status() -> bytes:
    status = os.open("/proc/self/status", os.O_RDONLY)
    try:
        return os.read(status, 8192)
    finally:
        os.close(status)


def _number(status: bytes, field_name: bytes) -> int:
    _, _, rest = status.partition(field_name)
    return int(rest.split(None, 1)[0]) if rest else 0


def anonymous_kib() -> int:
    """Anonymous resident memory of this process, in KiB (``RssAnon``)."""
    return _number(_status(), b"RssAnon:")


def threads_alive() -> int:
    """Threads of this process, without the one that watches it."""
    return _number(_status(), b"Threads:") - 1


def bytes_on_disk(folder: Path) -> int:
    """Sum of the sizes of all files below a folder, or the size of a file; 0 where nothing is."""
    if folder.is_file():
        return folder.stat().st_size
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def manifest(data: Path) -> dict[str, Any]:
    """Read what the maker noted next to its files."""
    found: dict[str, Any] = json.loads((data / "manifest.json").read_text())
    return found


@contextmanager
def timed(figure: Figure) -> Iterator[None]:
    """Append the wall time of the body to ``figure.seconds``, its processor time to ``figure.cpu_seconds``."""
    started, used = time.perf_counter(), time.process_time()
    yield
    figure.cpu_seconds.append(time.process_time() - used)
    figure.seconds.append(time.perf_counter() - started)


def process_started() -> float:
    """Seconds since the start of this process, from its start time in clock ticks."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks


def matrix_answer(adata: Any) -> dict[str, Any]:
    """Sum up what two systems must agree on for a query that returns an AnnData."""
    return {
        "cells": int(adata.n_obs),
        "genes": int(adata.n_vars),
        "nnz": int(adata.X.nnz),
        "sum": float(adata.X.sum(dtype="float64")),
    }


def stored_answer(path: Path) -> dict[str, Any]:
    """Sum up X of an h5ad file in pieces, so that the memory of a measurement is not that of its check."""
    import h5py

    with h5py.File(path) as file:
        data = file["X/data"]
        total = sum(float(data[at : at + (1 << 20)].sum(dtype="float64")) for at in range(0, data.shape[0], 1 << 20))
        return {"shape": file["X"].attrs["shape"].tolist(), "sum": total}


def run(system: str, measures: Mapping[str, Callable[[Asked, Figure], None]]) -> None:
    """Run the one operation the command line names and print its figure as one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("op", choices=sorted(measures))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--atlas", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--setting", type=json.loads, default={}, help="what else an operation takes, as JSON")
    asked = Asked(**vars(parser.parse_args()))
    figure = Figure(system=system, op=asked.op, idle_anon_rss_mb=anonymous_kib() / 1024)
    with MemoryWatch() as watch:
        measures[asked.op](asked, figure)
    figure.peak_anon_rss_mb = watch.peak_kib / 1024
    figure.peak_threads = watch.peak_threads
    figure.bytes_on_disk = bytes_on_disk(asked.atlas)
    figure.bytes_in_arrays = bytes_on_disk(asked.atlas / "zarr_store")
    used = resource.getrusage(resource.RUSAGE_SELF)
    figure.process_cpu_seconds = used.ru_utime + used.ru_stime
    figure.process_seconds = process_started()
    sys.stdout.write(json.dumps(asdict(figure)) + "\n")
