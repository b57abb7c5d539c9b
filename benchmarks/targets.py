"""What the loader has to reach, as data, and whether the figures of one sitting reach it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MEMORY_MB = 1 << 20


@dataclass(frozen=True)
class Sitting:
    """Everything that was measured in one sitting.

    Parameters
    ----------
    figures
        Measurement key -> one figure per round.
    sizes
        Store -> bytes per non-zero of each kind of array.
    cores
        Processors of the machine.
    """

    figures: Mapping[str, list[dict[str, Any]]]
    sizes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cores: int = 1

    def values(self, key: str, of: Callable[[dict[str, Any]], float]) -> list[float]:
        """One number of every figure of a measurement."""
        return [of(figure) for figure in self.figures.get(key, [])]

    def median(self, key: str, of: Callable[[dict[str, Any]], float]) -> float | None:
        """Median over the rounds; None where nothing was measured."""
        found = self.values(key, of)
        return statistics.median(found) if found else None

    def best(self, *keys: str) -> float | None:
        """Highest median rate among some settings of one system."""
        found = [rate for key in keys if (rate := self.median(key, cells_per_second)) is not None]
        return max(found, default=None)

    def size(self, store: str, *kinds: str) -> float | None:
        """Bytes per non-zero of some kinds of arrays of a store."""
        held = self.sizes.get(store)
        return None if held is None else sum(held.get(kind, 0.0) for kind in kinds)


def cells_per_second(figure: dict[str, Any]) -> float:
    """Rate of the counted part."""
    return float(figure["cells"] / sum(figure["seconds"]))


def add_rate(figure: dict[str, Any]) -> float:
    """Cells added in a second; the snapshot afterwards is not part of it."""
    return float(figure["cells"] / (figure["seconds"][0] - figure["extra"].get("snapshot_seconds", 0.0)))


def milliseconds(figure: dict[str, Any]) -> float:
    """Median of single calls."""
    return statistics.median(figure["seconds"]) * 1e3


def warm_seconds(figure: dict[str, Any]) -> float:
    """Best call after the first."""
    return float(min(figure["seconds"][1:] or figure["seconds"]))


def first_seconds(figure: dict[str, Any]) -> float:
    """First call of the process, with whatever it loads or compiles."""
    return float(figure["seconds"][0])


def anonymous_mb(figure: dict[str, Any]) -> float:
    """Return the peak anonymous memory of the process."""
    return float(figure["peak_anon_rss_mb"])


def threads(figure: dict[str, Any]) -> float:
    """Threads alive while batches come."""
    return float(figure["extra"]["threads_loading"])


@dataclass(frozen=True)
class Target:
    """One line of the goal.

    Parameters
    ----------
    what
        What is compared.
    least, aim
        What must be reached, and what is hoped for (None: nothing more).
    value
        Sitting -> the figure; None where a part of it was not measured.
    unit
        ``x`` for a ratio, else what the figure is in.
    less
        Whether a smaller figure is better.
    """

    what: str
    least: float
    aim: float | None
    value: Callable[[Sitting], float | None]
    unit: str = "x"
    less: bool = False

    def reached(self, value: float, goal: float) -> bool:
        """Whether a figure is as good as a goal."""
        return value <= goal if self.less else value >= goal

    def verdict(self, value: float | None) -> str:
        """Return the figure against its target, in words."""
        if value is None:
            return "not measured"
        if not self.reached(value, self.least):
            return "NOT REACHED"
        if self.aim is None:
            return "reached"
        return "reached, and the aim" if self.reached(value, self.aim) else "reached, not the aim"


def over(above: float | None, below: float | None) -> float | None:
    """Divide, where both were measured."""
    return None if above is None or not below else above / below


def _rates(ours: str, *theirs: str) -> Callable[[Sitting], float | None]:
    return lambda s: over(s.best(ours), s.best(*theirs))


def _faster(ours: str, theirs: str, of: Callable[[dict[str, Any]], float]) -> Callable[[Sitting], float | None]:
    return lambda s: over(s.median(theirs, of), s.median(ours, of))


ARRAYS = ("indices", "values", "indptr")
RANDOM_512 = "packed.512"
CELLSTREAM = ("cellstream.1", "cellstream.n2", "cellstream.c2")
ANNBATCH = ("annbatch.64", "annbatch.32")

TARGETS = (
    Target(
        "fully random, batch 512, vs homeobox map-style", 20, 35, _rates(RANDOM_512, "homeobox.map", "homeobox.map.obs")
    ),
    Target("same vs homeobox iterable (64k x 2)", 10, 20, _rates(RANDOM_512, "homeobox.iterable")),
    Target(
        "memory of homeobox iterable / ours",
        20,
        None,
        lambda s: over(s.median("homeobox.iterable", anonymous_mb), s.median(RANDOM_512, anonymous_mb)),
    ),
    Target("same vs annbatch at its best block-shuffled setting", 2.5, 4.5, _rates(RANDOM_512, *ANNBATCH)),
    Target("same vs cellstream at its best", 1.0, 1.5, _rates(RANDOM_512, *CELLSTREAM)),
    Target("same vs scipy X[idx] in memory, both on 2 threads", 0.5, 1.0, _rates(RANDOM_512, "scipy.2")),
    Target("batch 64 relative to own 512", 0.75, 0.95, _rates("packed.64", RANDOM_512)),
    Target("batch 4,096 relative to own 512", 0.75, 0.95, _rates("packed.4096", RANDOM_512)),
    Target("one random row", 0.2, 0.05, lambda s: s.median("packed.row", milliseconds), "ms", less=True),
    Target("sequential scan vs annbatch", 2.5, 5, _rates("packed.scan", "annbatch.scan")),
    Target("sequential scan vs homeobox iterable", 6, 12, _rates("packed.scan", "homeobox.scan")),
    Target("peak anonymous memory, batch 512", 350, 150, lambda s: s.median(RANDOM_512, anonymous_mb), "MB", less=True),
    Target(
        "bytes per non-zero vs homeobox",
        0.72,
        0.62,
        lambda s: over(s.size("packed", *ARRAYS), s.size("homeobox", *ARRAYS)),
        less=True,
    ),
    Target(
        "bytes per non-zero vs cellstream",
        0.92,
        0.80,
        lambda s: over(s.size("packed", *ARRAYS), s.size("cellstream", "whole")),
        less=True,
    ),
    Target(
        "bytes per non-zero, archive, vs homeobox",
        0.55,
        0.45,
        lambda s: over(s.size("archive", *ARRAYS), s.size("homeobox", *ARRAYS)),
        less=True,
    ),
    Target(
        "add from h5ad vs homeobox",
        2,
        4,
        lambda s: over(s.median("add.packed", add_rate), s.median("add.homeobox", add_rate)),
    ),
    Target("peak anonymous memory of add", 1024, None, lambda s: s.median("add.packed", anonymous_mb), "MB", less=True),
    Target(
        "one cell type to AnnData, union, vs homeobox", 8, 15, _faster("packed.type", "homeobox.type", warm_seconds)
    ),
    Target(
        "50 genes x all cells without CSC, vs homeobox", 6, 10, _faster("packed.genes", "homeobox.genes", warm_seconds)
    ),
    Target(
        "50 genes x all cells with CSC, vs homeobox",
        4,
        8,
        _faster("packed.genes_csc", "homeobox.genes_csc", warm_seconds),
    ),
    Target("CSC copy, bytes per non-zero", 1.1, 0.8, lambda s: s.size("packed-csc", "csc") or None, "B", less=True),
    Target(
        "standard codec, fully random, vs homeobox map-style",
        6,
        11,
        _rates("standard.512", "homeobox.map", "homeobox.map.obs"),
    ),
    Target(
        "threads alive while loading, beyond the cores",
        4,
        None,
        lambda s: None if (n := s.median(RANDOM_512, threads)) is None else n - s.cores,
        "",
        less=True,
    ),
)
