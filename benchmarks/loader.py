"""Measure the training loader against its peers and print the results.

One command makes the data, the peers' environments and their stores, runs every system in a process of
its own, taking turns in one sitting, prints the tables, and writes JSON and a plot.

``python benchmarks/loader.py --out`` is the full size: 4 x 50,000 cells, five rounds.
``python benchmarks/loader.py --cells 1000 --rounds 1 --seconds 3`` shows that everything runs.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import plot
import scale
from compare import HERE, memcpy_rate, processor
from environments import SYSTEMS, missing_systems
from maker import Recipe, make
from measurements import ROWS
from page import disagreements, page
from sitting import Run, Wanted, as_json, remove, run_all
from targets import TARGETS
from union import make_union


def heading(run: Run, missing: dict[str, str], rate: float) -> list[str]:
    """Say what the figures depend on."""
    made, wanted = run.made, run.wanted
    busy = [figure["others_cores"] for figures in run.figures.values() for figure in figures]
    lines = [
        f"# Training loaders, {dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "",
        f"- {machine.cores()} cores ({processor()}), {machine.memory_gib():.0f} GiB; warm page cache, local disk, no "
        f"conversion to tensors; memcpy on one thread {rate / 1e9:.1f} GB/s",
        f"- other processes used {sum(busy) / max(len(busy), 1):.2f} cores on average, at most {max(busy, default=0):.2f} "
        f"during one measurement; load average at the end {os.getloadavg()[0]:.1f}",
        f"- data: {len(made.files)} datasets, {sum(made.cells):,} cells, genes "
        f"{' / '.join(f'{g:,}' for g in made.genes)}, {sum(made.nnz):,} non-zeros ({made.nnz_per_cell:,.0f} per cell)",
        f"- rounds: {wanted.rounds}; a fresh process per measurement, systems taking turns; each reads its files once, "
        "takes a few batches, and is then timed over complete epochs, or up to "
        f"{wanted.pace['seconds']:g} s where it does not work in bursts; medians and ranges",
        "- a ratio against a system with several settings is against its best one",
    ]
    drivers = {f["extra"]["driver"] for fs in run.figures.values() for f in fs if "driver" in f["extra"]}
    lines += [f"- homeobox driven by: {driver}" for driver in sorted(drivers)]
    lines += [f"- {name}: {SYSTEMS[name].versions()}" for name in SYSTEMS if name in wanted.systems]
    return lines + [f"- {name}: not installed: {reason}" for name, reason in missing.items()]


def notes(run: Run) -> list[list[str]]:
    """Return the notes to the tables: goals not reached, failures, answers that differ."""
    sitting = run.sitting()
    short = [
        f"- {t.what}: {value:.3g}{t.unit if t.unit == 'x' else ' ' + t.unit} where {'at most' if t.less else 'at least'} "
        f"{t.least:g} is asked for"
        for t in TARGETS
        if (value := t.value(sitting)) is not None and not t.reached(value, t.least)
    ]
    failed = [f"- {key}: {text}" for key, texts in run.failures.items() for text in dict.fromkeys(texts)]
    differing = disagreements(sitting, run.totals())
    agreed = ["Answers agree wherever more than one was given."]
    return [
        ["Not reached:", "", *short] if short else [],
        ["Failed:", "", *failed] if failed else [],
        ["Different answers:", "", *differing] if differing else agreed,
    ]


def make_peers(systems: list[str]) -> None:
    """Let the script make the environments that the asked systems need."""
    if set(systems) - {"raggedatlas", "scipy"}:
        subprocess.run(["bash", str(HERE / "peers.sh"), "loader"], stdout=sys.stderr, check=False)


def compile_first(wanted: Wanted, folder: Path) -> None:
    """Do everything of ours once on few cells, so that no counted process compiles what later ones find compiled."""
    ours = replace(wanted, systems=wanted.systems & {"raggedatlas"}, rounds=1, pace={"seconds": 1.0, "least": 0.1})
    print("not counted: compiling", flush=True)
    run_all(Run(ours, make(folder / "data", Recipe(cells=300)), folder))
    remove(folder)


def sit(asked: argparse.Namespace, folder: Path) -> tuple[str, str]:
    """Make everything and measure; the page and the JSON."""
    if not asked.no_peers:
        make_peers(asked.systems)
    missing = missing_systems(asked.systems)
    for name, reason in missing.items():
        print(f"{name} is not measured: {reason}", flush=True)
    made = make(folder / "data", Recipe(cells=asked.cells, seed=asked.seed))
    if {"scipy", "cellstream", "scdataset"} & (set(asked.systems) - set(missing)):
        make_union(folder / "data")
    pace = {"seconds": asked.seconds, "least": asked.least}
    systems = frozenset(asked.systems) - frozenset(missing)
    wanted = Wanted(frozenset(asked.only), systems, asked.rounds, limit=asked.limit, pace=pace)
    compile_first(wanted, folder / "compiling")
    run = Run(wanted, made, folder)
    try:
        run_all(run)
    except KeyboardInterrupt:
        print("stopped early; the page holds what was measured until then", flush=True)
    rate = memcpy_rate()
    sitting = run.sitting()
    extra: dict[str, Any] = {
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": {**machine.described(), "processor": processor(), "memcpy_bytes_per_second": rate},
        "versions": {name: SYSTEMS[name].versions() for name in sorted(systems)},
        "missing": missing,
        "targets": [
            {"what": t.what, "value": (v := t.value(sitting)), "least": t.least, "aim": t.aim, "verdict": t.verdict(v)}
            for t in TARGETS
        ],
    }
    return page(sitting, heading(run, missing, rate), notes(run)), as_json(run, extra)


def split(known: tuple[str, ...]) -> Any:
    """Read names with commas between them."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(f"{unknown} not among {', '.join(known)}")
        return names

    return parse


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cells", type=int, default=50_000, help="cells per dataset, of four")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes per measurement")
    parser.add_argument("--seconds", type=float, default=20.0, help="where an epoch is cut")
    parser.add_argument("--least", type=float, default=3.0, help="epochs are added until this many seconds have passed")
    parser.add_argument("--limit", type=float, default=1_800.0, help="seconds after which a process is given up")
    parser.add_argument("--only", type=split(ROWS), default=list(ROWS), help=f"rows: {','.join(ROWS)}")
    parser.add_argument("--systems", type=split(tuple(SYSTEMS)), default=list(SYSTEMS), help=",".join(SYSTEMS))
    parser.add_argument("--keep", type=Path, help="folder for data and stores, used again where they are there")
    parser.add_argument("--no-peers", action="store_true", help="do not make or renew the peers' environments")
    parser.add_argument(
        "--scale", type=split(scale.AXES), nargs="?", const=list(scale.AXES), help="how cost grows instead"
    )
    parser.add_argument("--out", type=Path, nargs="?", const=HERE / "results", help="keep page, JSON and plot here")
    return parser


def main() -> None:
    """Measure, print, and keep what is asked for."""
    asked = arguments().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped either way, it still reports
    with tempfile.TemporaryDirectory(prefix="raggedatlas-loader-") as work:
        folder = asked.keep or Path(work)
        folder.mkdir(parents=True, exist_ok=True)
        if asked.scale:
            text, kept = scale.sit(asked.scale, asked.cells, asked.rounds, folder)
        else:
            text, kept = sit(asked, folder)
    print(text)
    target = asked.out or HERE / "data"
    target.mkdir(parents=True, exist_ok=True)
    name = f"{dt.datetime.now(dt.UTC):%Y-%m-%d}-{'scale' if asked.scale else 'loader'}"
    (target / f"{name}.md").write_text(text)
    (target / f"{name}.json").write_text(kept)
    drawn = plot.draw(target / f"{name}.json", target / f"{name}.png")
    print(
        f"kept {target / name}.md, .json{' and .png' if drawn else ' (no plot: no shuffled reads, or no matplotlib)'}"
    )


if __name__ == "__main__":
    main()
