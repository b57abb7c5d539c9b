"""Measure reading, writing, copying and validating h5ad files against anndata, in one run, and write a page.

Every operation runs in a fresh process; the two systems take turns, and who goes first changes with every round.
Reading is timed without the sums that compare the answers; wall and processor time are both given, because the
machine may be busy. ``python benchmarks/anndata_io.py --sizes 0.2 1 5 --rounds 5 --out`` keeps the page in
``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compare import HERE, Campaign, System, brief, measure, row, spread, versions
from machine import Neighbours, described
from maker import EXPECTED_NNZ_PER_CELL

PACKAGES = ("raggedatlas", "anndata", "h5py", "numpy", "isal", "hdf5plugin")
OURS, THEIRS = "raggedatlas", "anndata"
MAIN = 1.0
"""Size in GB at which the two systems are compared; at the others only our memory is looked at."""
QUICK = ("read", "whole", "validate")
"""Operations that only read; a process repeats them twice as often."""


@dataclass(frozen=True)
class Measurement:
    """One row of the page: an operation of one system with its settings."""

    label: str
    system: str
    op: str
    setting: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Where its figures are kept."""
        return f"{self.system} {self.op} {json.dumps(self.setting, sort_keys=True)}"


def _pair(label: str, op: str, setting: dict[str, Any]) -> list[Measurement]:
    return [Measurement(label, OURS, op, setting), Measurement(label, THEIRS, op, setting)]


PLAIN, GZIP = {"file": "plain.h5ad"}, {"file": "gzip.h5ad"}
COMPARED = [
    *_pair("read rows, gzip", "read", GZIP),
    *_pair("read rows, uncompressed", "read", PLAIN),
    Measurement("read whole, gzip", THEIRS, "whole", GZIP),
    Measurement("read whole, uncompressed", THEIRS, "whole", PLAIN),
    Measurement("validate in full, gzip", OURS, "validate", GZIP),
    Measurement("validate in full, uncompressed", OURS, "validate", PLAIN),
    *_pair("write, gzip", "write", {"compression": "gzip"}),
    *_pair("write, uncompressed", "write", {"compression": None}),
    Measurement("write, uncompressed, synced", THEIRS, "write", {"compression": None, "synced": True}),
    Measurement("write, zstd", OURS, "write", {"compression": "zstd"}),
    Measurement("write, gzip, first", OURS, "write", {"compression": "gzip", "first": True}),
    Measurement("write a dataset, gzip", OURS, "dataset", {"compression": "gzip"}),
    *_pair("copy, gzip", "copy", {"compression": "gzip"}),
]
GROWING = [
    Measurement("read rows, uncompressed", OURS, "read", PLAIN),
    Measurement("validate in full, uncompressed", OURS, "validate", PLAIN),
    Measurement("write, gzip", OURS, "write", {"compression": "gzip"}),
    Measurement("write, gzip, first", OURS, "write", {"compression": "gzip", "first": True}),
    Measurement("write a dataset, gzip", OURS, "dataset", {"compression": "gzip"}),
    Measurement("copy, gzip", OURS, "copy", {"compression": "gzip"}),
]
SCRIPTS = {OURS: HERE / "ours_anndata_io.py", THEIRS: HERE / "peer_anndata.py"}


@dataclass
class Sitting:
    """All figures by size and measurement, and what failed."""

    figures: dict[float, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    other_cores: float = 0.0

    def of(self, size: float, measurement: Measurement, what: Callable[[dict[str, Any]], float]) -> list[float]:
        """One number of every figure."""
        return [what(figure) for figure in self.figures.get(size, {}).get(measurement.key, [])]


def wall(figure: dict[str, Any]) -> float:
    """Seconds of the best repeat of a process."""
    return float(min(figure["seconds"]))


def memory(figure: dict[str, Any]) -> float:
    """Peak anonymous memory in MB (1,000,000 bytes)."""
    return float(figure["peak_anon_rss_mb"]) * 2**20 / 1e6


@dataclass(frozen=True)
class Target:
    """A goal: our median against another."""

    what: str
    ours: Measurement
    theirs: Measurement
    least: float


def _find(label: str, system: str) -> Measurement:
    return next(m for m in COMPARED if m.label == label and m.system == system)


TARGETS = [
    Target("reading rows of gzip h5ad, times as fast as `sparse_dataset`", *(_find("read rows, gzip", s) for s in (OURS, THEIRS)), 1.8),
    Target("reading rows of uncompressed h5ad, times as fast", *(_find("read rows, uncompressed", s) for s in (OURS, THEIRS)), 1.8),
    Target("writing a query to h5ad, times as fast as anndata's gzip from memory", *(_find("write, gzip", s) for s in (OURS, THEIRS)), 2.0),
    Target("the same without compression on both sides", *(_find("write, uncompressed", s) for s in (OURS, THEIRS)), 2.0),
    Target("the same, both until the bytes are on the disk", _find("write, uncompressed", OURS), _find("write, uncompressed, synced", THEIRS), 0.0),
    Target("ours with gzip against anndata without", _find("write, gzip", OURS), _find("write, uncompressed", THEIRS), 0.0),
    Target("validating gzip in full, times as fast as reading its rows with anndata", _find("validate in full, gzip", OURS), _find("read rows, gzip", THEIRS), 1.0),
    Target("validating uncompressed in full, times as fast as reading its rows with anndata", _find("validate in full, uncompressed", OURS), _find("read rows, uncompressed", THEIRS), 1.0),
]  # fmt: skip


def sit(sizes: list[float], rounds: int, repeats: int, work: Path, only: list[str]) -> Sitting:
    """Make what is missing, and measure everything, or some labels only, taking turns."""
    sitting = Sitting()
    python = Path(sys.executable)
    systems = {name: System(name, python, script) for name, script in SCRIPTS.items()}
    with Neighbours() as others:
        for size in sizes:
            folder = work / f"{size:g}"
            campaign = Campaign(folder, work, rounds, repeats)
            prepare(systems, campaign, size)
            warm(folder)
            chosen = [m for m in (COMPARED if size == MAIN else GROWING) if not only or m.label in only]
            for number in range(rounds if size == MAIN else 1):
                for measurement in chosen if number % 2 == 0 else chosen[::-1]:
                    take(sitting, systems[measurement.system], measurement, campaign, size)
    sitting.other_cores = others.cores
    return sitting


def prepare(systems: dict[str, System], campaign: Campaign, size: float) -> None:
    """Make the files and the atlas of a size, unless they are there."""
    folder = campaign.data
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {"cells": int(size * 1e9 / 8 / EXPECTED_NNZ_PER_CELL), "gzip": size == MAIN}
    once = Campaign(folder, campaign.work, 1, 1)
    if not (folder / "done").exists():
        print(f"making {size:g} GB", flush=True)
        for system, op, setting in ((THEIRS, "prepare", wanted), (OURS, "build", {})):
            outcome = measure(systems[system], op, once, folder / "atlas", setting)
            if isinstance(outcome, str):
                raise SystemExit(f"{op} of {size:g} GB failed: {outcome}")
        (folder / "done").touch()


def warm(folder: Path) -> None:
    """Bring all files into the page cache, and let earlier writes come to rest."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def take(sitting: Sitting, system: System, measurement: Measurement, campaign: Campaign, size: float) -> None:
    """Measure one operation in a fresh process and keep its figure."""
    if measurement.op in QUICK:
        campaign = replace(campaign, repeats=2 * campaign.repeats)
    outcome = measure(system, measurement.op, campaign, campaign.data / "atlas", measurement.setting)
    print(f"  {size:g} GB {measurement.label:32s} {system.name}: {brief(outcome)}", flush=True)
    if isinstance(outcome, str):
        sitting.failures.append(f"{size:g} GB, {measurement.label}, {system.name}: {outcome}")
    else:
        sitting.figures.setdefault(size, {}).setdefault(measurement.key, []).append(outcome)


def goals(sitting: Sitting) -> list[str]:
    """Every goal, its figure, and whether it is reached."""
    rows = [row(["goal", "figure", "at least", "verdict"]), row(["---"] * 4)]
    for target in TARGETS:
        ours, theirs = (sitting.of(MAIN, m, wall) for m in (target.ours, target.theirs))
        if not ours or not theirs:
            rows.append(row([target.what, "-", f"{target.least:g}x", "not measured"]))
            continue
        value = statistics.median(theirs) / statistics.median(ours)
        verdict = "reached" if value >= target.least else "missed"
        asked = f"{target.least:g}x" if target.least else "-"
        rows.append(row([target.what, f"{value:.2f}x", asked, verdict if target.least else "no goal"]))
    peak = sitting.of(MAIN, _find("write, gzip", OURS), memory)
    if peak:
        middle = statistics.median(peak)
        rows.append(
            row(
                [
                    "memory of writing a query",
                    f"{middle:.0f} MB",
                    "at most 350 MB",
                    "reached" if middle <= 350 else "missed",
                ]
            )
        )
    for measurement in GROWING:
        seen = {size: sitting.of(size, measurement, memory) for size in sorted(sitting.figures)}
        known = {size: statistics.median(values) for size, values in seen.items() if values}
        if len(known) > 1:
            first, last = known[min(known)], known[max(known)]
            span = f"{min(known):g} to {max(known):g} GB"
            verdict = "reached" if last <= 1.25 * first else "missed"
            rows.append(
                row([f"memory of {measurement.label}, {span}", f"{last / first:.2f}x", "at most 1.25x", verdict])
            )
    return rows


def table(sitting: Sitting, size: float) -> list[str]:
    """Seconds, processor seconds and memory of every measurement of a size."""
    heads = [
        f"{size:g} GB",
        "system",
        "seconds, best of each process",
        "processor s of a process",
        "anonymous MB",
        "file MB",
    ]
    rows = [row(heads), row(["---"] * len(heads))]
    for measurement in COMPARED if size == MAIN else GROWING:
        seconds = sitting.of(size, measurement, wall)
        if not seconds:
            continue
        cpu = sitting.of(size, measurement, lambda f: float(f["process_cpu_seconds"]))
        made = [f["extra"].get("bytes", 0) / 1e6 for f in sitting.figures[size][measurement.key]]
        shown = f"{made[0]:,.0f}" if made[0] else "-"
        anonymous = spread(sitting.of(size, measurement, memory), 0)
        rows.append(row([measurement.label, measurement.system, spread(seconds, 2), spread(cpu, 1), anonymous, shown]))
    return rows


def disagreements(sitting: Sitting) -> list[str]:
    """What the two systems read with different values."""
    found = []
    for label in dict.fromkeys(m.label for m in COMPARED if m.op == "read"):
        figures = [f for m in COMPARED if m.label == label for f in sitting.figures.get(MAIN, {}).get(m.key, [])]
        answers = {json.dumps(figure["answer"], sort_keys=True) for figure in figures}
        found += [f"- {label}: {sorted(answers)}"] if len(answers) > 1 else []
    return found


def page(sitting: Sitting, rounds: int, repeats: int) -> str:
    """Return the page."""
    machine = ", ".join(f"{name} {value}" for name, value in described().items())
    heading = [
        "# Reading and writing h5ad, compared with anndata",
        "",
        f"{machine}; other processes used {sitting.other_cores:.1f} cores meanwhile. {versions(Path(sys.executable), PACKAGES)}.",
        f"{rounds} rounds at {MAIN:g} GB of values and indices, {repeats} writes or {2 * repeats} reads a process, of which the best counts, page cache warm. Steps of 2,000 rows.",
        'Peak memory is the process\'s own (`RssAnon`). anndata writes what is in its memory already and gets `compression="gzip"`;',
        "without that it writes uncompressed. Ours reads the query from the atlas, whose counts are of a smaller type, writes it, and waits",
        'until it is on the disk; "synced" is anndata followed by the same wait. Both have loaded their libraries before; "first" has not.',
    ]
    parts = [heading, goals(sitting), *(table(sitting, size) for size in sorted(sitting.figures))]
    wrong = disagreements(sitting)
    parts += [["Both systems read the same values."]] if not wrong else [["They disagree:", *wrong]]
    parts += [["Failed:", *(f"- {text}" for text in sitting.failures)]] if sitting.failures else []
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def main() -> None:
    """Parse, measure, print the page, and keep it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.2, MAIN], help="GB of values and indices")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--work", type=Path, default=HERE / "data" / "anndata-io", help="where files are made and kept")
    parser.add_argument("--only", nargs="+", default=[], help="labels of what is measured")
    parser.add_argument("--out", action="store_true", help="keep the page in benchmarks/results")
    asked = parser.parse_args()
    sitting = sit(asked.sizes, asked.rounds, asked.repeats, asked.work.resolve(), asked.only)
    text = page(sitting, asked.rounds, asked.repeats)
    print(text)
    folder = HERE / "results" if asked.out else asked.work
    name = f"{dt.datetime.now(dt.UTC).date()}-anndata_io"
    (folder / f"{name}.md").write_text(text)
    kept = {"machine": described(), "other_cores": sitting.other_cores, "failures": sitting.failures}
    kept["figures"] = {f"{size:g}": figures for size, figures in sitting.figures.items()}
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
