"""What else the machine does while something is measured, and what the machine is."""

from __future__ import annotations

import os
import platform
import resource
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0))


def memory_gib() -> float:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def busy_seconds() -> float:
    """Processor seconds that all processes of the machine have used since it started, waiting not counted."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _wait, irq, soft, steal = (int(field) for field in fields[:8])
    return (user + nice + system + irq + soft + steal) / _TICKS


def own_seconds() -> float:
    """Processor seconds of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@dataclass
class Neighbours:
    """Cores that other processes used on average while the body of a ``with`` ran, and the load before."""

    cores: float = 0.0
    load_before: float = 0.0

    def __enter__(self) -> Neighbours:
        self.load_before = os.getloadavg()[0]
        self._before = (busy_seconds(), own_seconds(), time.perf_counter())
        return self

    def __exit__(self, *_: object) -> None:
        busy, own, clock = self._before
        wall = time.perf_counter() - clock
        theirs = (busy_seconds() - busy) - (own_seconds() - own)
        self.cores = max(0.0, theirs / wall) if wall else 0.0


def described() -> dict[str, str | int | float]:
    """Name the machine, for the page and the JSON."""
    return {
        "cores": cores(),
        "memory_gib": round(memory_gib(), 1),
        "system": platform.system(),
        "kernel": platform.release(),
    }
