"""Measure raggedatlas and homeobox side by side and print one Markdown table.

Every operation runs in a fresh process; the two systems take turns, and who goes first changes with
every round, so that a slow minute of the machine falls on both. The data are made when missing.

``python benchmarks/compare.py --cells 5000 --rounds 3 --out`` also writes ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from maker import Made, Recipe, make
from measuring import OPERATIONS

HERE = Path(__file__).resolve().parent
LABELS = {
    "import": "import the package",
    "add": "add 4 files and snapshot",
    "open": "open the newest snapshot",
    "count": "count cells per cell type",
    "cell_type": "one cell type to AnnData",
    "genes": "50 genes x all cells",
    "add_csc": "write column-sorted copies",
    "genes_csc": "50 genes x all cells, with copies",
}
BYTES_PER_NNZ = 8
PACKAGES = ("homeobox", "lancedb", "pylance", "zarr", "anndata", "numpy", "pyarrow")


@dataclass(frozen=True)
class System:
    """One side: its name, its interpreter, the script that measures it, and what else it may import."""

    name: str
    python: Path
    script: Path
    path: tuple[Path, ...] = ()


@dataclass
class Measured:
    """All figures of one system and one operation, one per round; ``failures`` says what broke."""

    figures: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def first(self) -> list[float]:
        """Seconds of the first repeat of each process."""
        return [figure["seconds"][0] for figure in self.figures]

    def warm(self) -> list[float]:
        """Seconds of the best later repeat of each process, or of the only one."""
        return [min(figure["seconds"][1:] or figure["seconds"]) for figure in self.figures]

    def of(self, key: str) -> list[float]:
        """One number of every figure."""
        return [float(figure[key]) for figure in self.figures]


Results = dict[tuple[str, str], Measured]


@dataclass(frozen=True)
class Campaign:
    """What is measured: data, working folder, rounds, repeats inside a process, and its longest time in seconds."""

    data: Path
    work: Path
    rounds: int
    repeats: int
    limit: float = 3_600.0


def child_environment(*path: Path) -> dict[str, str]:
    """Give a measured process our environment, but let it keep compiled modules."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    found = os.pathsep.join(str(p) for p in (*path, HERE.parent / "src"))
    return {**kept, "PYTHONPATH": found, "PYTHONWARNINGS": "ignore"}


def measure(
    system: System, op: str, campaign: Campaign, atlas: Path, setting: Mapping[str, Any] | None = None
) -> dict[str, Any] | str:
    """Run one operation in a fresh process; its figure, or the last line of what went wrong."""
    command = [str(system.python), str(system.script), op]
    command += ["--data", str(campaign.data), "--atlas", str(atlas)]
    command += ["--repeats", str(campaign.repeats), "--setting", json.dumps(dict(setting or {}))]
    environment = child_environment(*system.path)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, timeout=campaign.limit
        )
    except subprocess.TimeoutExpired:
        return f"given up after {campaign.limit:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return lines[-1][:200]
    figure: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figure


def run_rounds(systems: list[System], campaign: Campaign) -> Results:
    """Measure every operation of every system, taking turns."""
    results: Results = {(s.name, op): Measured() for s in systems for op in OPERATIONS}
    for system in systems:  # compiles modules and fills the page cache; not counted
        measure(system, "import", campaign, campaign.work / "none")
    for number in range(campaign.rounds):
        order = systems if number % 2 == 0 else systems[::-1]
        for op in OPERATIONS:
            for system in order:
                atlas = campaign.work / f"{system.name}-{number}"
                outcome = measure(system, op, campaign, atlas)
                kept = results[system.name, op]
                if isinstance(outcome, str):
                    kept.failures.append(outcome)
                else:
                    kept.figures.append(outcome)
                print(f"  round {number + 1} {op:10s} {system.name}: {brief(outcome)}", flush=True)
        for system in systems:
            shutil.rmtree(campaign.work / f"{system.name}-{number}", ignore_errors=True)
    return results


def brief(outcome: dict[str, Any] | str) -> str:
    """One figure in a few words."""
    if isinstance(outcome, str):
        return f"failed: {outcome}"
    seconds = ", ".join(f"{s:.3f}" for s in outcome["seconds"])
    return f"{seconds} s, {outcome['peak_anon_rss_mb']:.0f} MB"


def memcpy_rate() -> float:
    """Bytes per second this machine copies on one thread, out of cache: best of seven."""
    source = np.ones(1 << 25, dtype=np.int64)
    target = np.empty_like(source)
    target[:] = source
    best = float("inf")
    for _ in range(7):
        started = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - started)
    return float(source.nbytes / best)


def spread(values: list[float], digits: int = 3) -> str:
    """Median and, of several values, their range."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def ratio(ours: list[float], peer: list[float]) -> str:
    """How many times less we need than the peer, by medians."""
    if not ours or not peer or not statistics.median(ours):
        return "-"
    return f"{statistics.median(peer) / statistics.median(ours):.2f}x"


def time_table(results: Results, systems: list[System], rate: float, total_nnz: int) -> list[str]:
    """Markdown rows: seconds of the first call and of a warm call in each system, and ratios."""
    names = [s.name for s in systems]
    heads = [f"{n} {kind}" for n in names for kind in ("first", "warm")]
    compared = len(names) == 2
    heads += ["ratio first", "ratio warm"] if compared else []
    heads += ["memcpy limit"]
    rows = [row(["operation, seconds", *heads]), row(["---"] * (len(heads) + 1))]
    for op in OPERATIONS:
        sides = [results[n, op] for n in names]
        cells = [LABELS[op]]
        for side in sides:
            cells += [spread(side.first()), spread(side.warm())] if side.figures else ["failed"] * 2
        if compared:
            cells += [ratio(sides[0].first(), sides[1].first())]
            cells += [ratio(sides[0].warm(), sides[1].warm())]
        rows.append(row([*cells, limit(op, sides, rate, total_nnz)]))
    return rows


def limit(op: str, sides: list[Measured], rate: float, total_nnz: int) -> str:
    """Seconds one memcpy of the bytes an operation must at least touch or deliver would take."""
    if op in ("import", "open", "count"):
        return "-"
    figures = [f for side in sides for f in side.figures]
    nnz = total_nnz if op in ("add", "add_csc", "genes") else max((f["nnz"] for f in figures), default=0)
    return f"{nnz * BYTES_PER_NNZ / rate:.4f}"


def process_table(results: Results, systems: list[System]) -> list[str]:
    """Return Markdown rows: wall seconds, processor seconds and peak anonymous memory of the process."""
    names = [s.name for s in systems]
    heads = [f"{n} {k}" for n in names for k in ("wall s", "CPU s", "anon MB")]
    heads += ["wall ratio", "memory ratio"] if len(names) == 2 else []
    rows = [row(["whole process", *heads]), row(["---"] * (len(heads) + 1))]
    for op in OPERATIONS:
        sides = [results[n, op] for n in names]
        cells = [LABELS[op]]
        for side in sides:
            cells += [spread(side.of("process_seconds"), 2)]
            cells += [spread(side.of("process_cpu_seconds"), 2)]
            cells += [spread(side.of("peak_anon_rss_mb"), 0)]
        if len(names) == 2:
            for key in ("process_seconds", "peak_anon_rss_mb"):
                cells.append(ratio(sides[0].of(key), sides[1].of(key)))
        rows.append(row(cells))
    return rows


def size_table(results: Results, systems: list[System], total_nnz: int) -> list[str]:
    """Return Markdown rows: bytes per stored count, of the arrays alone and of the complete atlas."""
    heads = ["arrays", "whole atlas", "arrays after column copies", "modules imported"]
    rows = [row(["bytes per non-zero", *heads]), row(["---"] * (len(heads) + 1))]
    for system in systems:
        added, copied = results[system.name, "add"], results[system.name, "add_csc"]
        imported = results[system.name, "import"].figures
        cells = [
            per_nnz(added, "bytes_in_arrays", total_nnz),
            per_nnz(added, "bytes_on_disk", total_nnz),
            per_nnz(copied, "bytes_in_arrays", total_nnz),
            str(imported[0]["extra"]["modules"]) if imported else "-",
        ]
        rows.append(row([system.name, *cells]))
    return rows


def per_nnz(measured: Measured, key: str, total_nnz: int) -> str:
    """Median of one size over the number of stored counts."""
    return spread([value / total_nnz for value in measured.of(key)], 3)


def disagreements(results: Results, systems: list[System]) -> list[str]:
    """Operations on which the two systems did not give the same answer."""
    found = []
    for op in OPERATIONS:
        answers = {
            s.name: json.dumps(f["answer"], sort_keys=True) for s in systems for f in results[s.name, op].figures
        }
        if len(set(answers.values())) > 1:
            found.append(f"- {op}: " + "; ".join(f"{k} {v}" for k, v in sorted(answers.items())))
    return found


def failures(results: Results) -> list[str]:
    """Operations that did not run, with the last line of the error."""
    return [
        f"- {name} {op}: {text}"
        for (name, op), measured in results.items()
        for text in dict.fromkeys(measured.failures)
    ]


def row(cells: list[str]) -> str:
    """One Markdown table row."""
    return "| " + " | ".join(cells) + " |"


def versions(python: Path, packages: Sequence[str] = PACKAGES, path: Sequence[Path] = ()) -> str:
    """Interpreter and package versions of one environment."""
    if not python.exists():
        return "not installed"
    code = (
        "import sys, platform, importlib.metadata as m\n"
        "have = {d.name.lower(): d.version for d in m.distributions()}\n"
        "print(platform.python_version(), *(f'{p} {have[p]}' for p in sys.argv[1:] if p in have),"
        " sep=', ')"
    )
    command = [str(python), "-c", code, *packages]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(*path), check=False)
    return "Python " + done.stdout.strip()


def processor() -> str:
    """Name of the processor."""
    with Path("/proc/cpuinfo").open() as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def conditions(systems: list[System], campaign: Campaign, made: Made, rate: float) -> list[str]:
    """List what the figures depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"- {cores} cores ({processor()}), {memory:.0f} GiB, {platform.system()}; warm page cache, "
        f"local disk; load average at the end {os.getloadavg()[0]:.1f}",
        f"- data: {len(made.files)} datasets, {sum(made.cells):,} cells, genes "
        f"{' / '.join(f'{g:,}' for g in made.genes)}, {sum(made.nnz):,} non-zeros "
        f"({made.nnz_per_cell:,.0f} per cell), seed {made.recipe.seed}",
        f"- {campaign.rounds} rounds, systems taking turns, a fresh process per operation, "
        f"{campaign.repeats} repeats in it; median (min-max) over the rounds",
        f"- memcpy, one thread: {rate / 1e9:.1f} GB/s; the limit is the time of one copy of the "
        f"{BYTES_PER_NNZ} bytes of each non-zero that the operation touches or delivers",
    ]
    return lines + [f"- {s.name}: {versions(s.python)}" for s in systems]


def page(systems: list[System], campaign: Campaign, made: Made, results: Results) -> str:
    """Everything measured, as one Markdown page."""
    rate = memcpy_rate()
    total = sum(made.nnz)
    names = " and ".join(s.name for s in systems)
    parts = [
        [f"# {names}, {dt.datetime.now(dt.UTC):%Y-%m-%d}"],
        conditions(systems, campaign, made, rate),
        time_table(results, systems, rate, total),
        process_table(results, systems),
        size_table(results, systems, total),
    ]
    if broken := failures(results):
        parts.append(["Failed:", "", *broken])
    differing = disagreements(results, systems)
    agreement = "Answers agree wherever more than one was given."
    parts.append(["Different answers:", "", *differing] if differing else [agreement])
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def chosen_systems(only: str | None, peer_python: Path) -> list[System]:
    """Find the systems that can be measured here."""
    ours = System("raggedatlas", Path(sys.executable), HERE / "ours.py")
    peer = System("homeobox", peer_python, HERE / "peer_homeobox.py")
    found = [s for s in (ours, peer) if only in (None, s.name)]
    if peer in found and not peer_python.exists():
        print(f"{peer_python} is missing (run benchmarks/peers.sh); measuring raggedatlas alone")
        found.remove(peer)
    return found


def main() -> None:
    """Make the data, measure, print, and keep the page if asked."""
    parser = argparse.ArgumentParser(description="raggedatlas against homeobox, interleaved.")
    parser.add_argument("--cells", type=int, default=5_000, help="cells per dataset (full: 50000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes per operation")
    parser.add_argument("--repeats", type=int, default=3, help="repeats inside a process")
    parser.add_argument("--data", type=Path, help="folder of made data (made when missing)")
    parser.add_argument("--only", choices=("raggedatlas", "homeobox"))
    parser.add_argument("--peer-python", type=Path, default=HERE.parent / ".venv-peers/bin/python")
    parser.add_argument("--out", action="store_true", help="write benchmarks/results/<date>.md")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raggedatlas-bench-") as work:
        data = asked.data or Path(work) / "data"
        made = make(data, Recipe(cells=asked.cells, seed=asked.seed))
        campaign = Campaign(data, Path(work), asked.rounds, asked.repeats)
        systems = chosen_systems(asked.only, asked.peer_python)
        results = run_rounds(systems, campaign)
        text = page(systems, campaign, made, results)
    print(text)
    if asked.out:
        target = HERE / "results" / f"{dt.datetime.now(dt.UTC):%Y-%m-%d}.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)
        print(f"written to benchmarks/results/{target.name}")


if __name__ == "__main__":
    main()
