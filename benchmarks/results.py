"""Measure the results layer against the public package hyrax: its Lance classes (0.13) and its .npy classes (0.6.10), in one run.

    python benchmarks/results.py               # 100,000 rows of 64 and 512 columns
    python benchmarks/results.py --rows 20000 --only float32x64

Needs the peers' environment (benchmarks/peers.sh results); without it only our own figures are taken. Every figure is from a
separate process; systems take turns. Prints a page in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare import child_environment
from environments import ROOT, Environment
from machine import Neighbours, cores

HERE = Path(__file__).parent
SHAPES = {
    "float32x64": ("float32", (64,)),
    "float16x512": ("float16", (512,)),
    "float32x512": ("float32", (512,)),
    "float64x512": ("float64", (512,)),
}
OURS, LANCE, NPY = "raggedatlas", "hyrax", "hyrax-npy"
HYRAX = ROOT / ".venv-peers-hyrax"
OLD = HYRAX / "hyrax-0.6.10"
SYSTEMS = {
    OURS: Environment(Path(sys.executable), ("raggedatlas",), ("raggedatlas", "numpy", "pylance", "torch")),
    LANCE: Environment(
        HYRAX / "bin/python", ("hyrax",), ("hyrax", "numpy", "pylance", "lancedb", "torch"), group="results"
    ),
    NPY: Environment(HYRAX / "bin/python", ("hyrax",), ("hyrax", "numpy", "torch"), (OLD,), group="results"),
}
FOLDERS = {OURS: "ours", LANCE: "hyrax", NPY: "npy"}
FEW = {"rows": 300, "batches": 8}
MANY = {"rows": 20_000, "batches": 60}

Figures = dict[tuple[str, str, str], dict[str, Any]]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    asked = parser.parse_args()
    systems = [OURS]
    for name in () if asked.no_peers else (LANCE, NPY):
        reason = SYSTEMS[name].why_missing(name)
        systems += [] if reason else [name]
        print(f"{name} is left out: {reason}" if reason else f"{name}: {SYSTEMS[name].versions()}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="results-") as folder, Neighbours() as neighbours:
        figures = measure_all(Path(folder), systems, asked)
    print(page(figures, asked.rows))
    print(f"\n{cores()} cores; others used {neighbours.cores:.2f} of them.")
    if asked.json:
        asked.json.write_text(json.dumps({"/".join(key): value for key, value in figures.items()}, indent=1))


def measure_all(folder: Path, systems: list[str], asked: argparse.Namespace) -> Figures:
    """Take every figure."""
    figures: Figures = {}

    def take(system: str, operation: str, name: str, place: Path, **setting: Any) -> None:
        figures[system, operation, name] = run(system, operation, place, setting)
        print(f"{name} {system} {operation}: {brief(figures[system, operation, name])}", file=sys.stderr, flush=True)

    for name in asked.only:
        dtype, shape = SHAPES[name]
        for operation in ("write", "read"):
            for system in systems:
                pace = MANY if system == OURS else FEW
                take(system, operation, name, folder / FOLDERS[system], n=asked.rows, dtype=dtype, shape=shape, **pace)
        if NPY in systems:
            for system in (OURS, LANCE):
                if system in systems:
                    take(system, "convert", name, folder / FOLDERS[NPY], **FEW)
    for times in (1, 4):
        take(OURS, "write", f"{times}x", folder / "memory", n=times * asked.rows, dtype="float32", shape=(64,))
    take(OURS, "write", "1000", folder / "many", n=1_000 * 512, dtype="float32", shape=(16,))
    return figures


def run(system: str, operation: str, place: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """One process; an empty answer where it failed."""
    environment = SYSTEMS[system]
    command = [
        str(environment.python),
        "-W",
        "ignore",
        str(HERE / "results_worker.py"),
        system,
        operation,
        str(place),
        json.dumps(setting),
    ]
    done = subprocess.run(
        command, env=child_environment(HERE, *environment.path), capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return {}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    os.sync()  # else the kernel writes out during the next measurement
    return answer


def brief(figure: dict[str, Any]) -> str:
    """One figure in a few words."""
    return ", ".join(f"{key} {value:.4g}" for key, value in figure.items()) or "failed"


def ratio(figures: Figures, operation: str, key: str, shape: str, peer: str) -> float | None:
    """How many times less we need."""
    ours, theirs = figures.get((OURS, operation, shape)), figures.get((peer, operation, shape))
    return theirs[key] / ours[key] if ours and theirs and ours[key] else None


ROWS: list[tuple[str, str, str, str]] = [
    ("one random row, µs", "read", "row", LANCE),
    ("512 random rows, µs a row", "read", "rows512", LANCE),
    ("a loop over rows, µs a row", "read", "walk", LANCE),
    ("the same by number, µs a row", "read", "walk_by_number", LANCE),
    ("all ids, µs a row", "read", "ids", LANCE),
    ("write in batches of 512, CPU s", "write", "cpu", LANCE),
    ("the same, wall s", "write", "wall", LANCE),
    ("the same, extra memory MB", "write", "peak_mb", LANCE),
    ("convert and compare, CPU s", "convert", "cpu", LANCE),
    ("the same, extra memory MB", "convert", "peak_mb", LANCE),
]

TARGETS: list[tuple[str, Callable[[Figures, str], float | None], float, float | None]] = [
    ("one random row, times hyrax", lambda f, s: ratio(f, "read", "row", s, LANCE), 50, 200),
    ("512 random rows, times hyrax", lambda f, s: ratio(f, "read", "rows512", s, LANCE), 7, 20),
    ("a loop over rows, times hyrax", lambda f, s: ratio(f, "read", "walk", s, LANCE), 100, None),
    ("ids, times hyrax", lambda f, s: ratio(f, "read", "ids", s, LANCE), 3, None),
    ("writing, times hyrax", lambda f, s: ratio(f, "write", "cpu", s, LANCE), 2, None),
    ("writing, times the .npy classes", lambda f, s: ratio(f, "write", "cpu", s, NPY), 1, None),
    ("convert and compare, times the public way", lambda f, s: ratio(f, "convert", "cpu", s, LANCE), 50, None),
]


def page(figures: Figures, n_rows: int) -> str:
    """Everything as Markdown."""
    lines = [f"# Results of a model, {n_rows:,} rows", ""]
    shapes = [name for name in SHAPES if (OURS, "read", name) in figures]
    for shape in shapes:
        lines += [f"## {shape}", "", "| | raggedatlas | hyrax 0.13 | hyrax 0.6.10, .npy |", "|---|---|---|---|"]
        for title, operation, key, _ in ROWS:
            cells = [figures.get((system, operation, shape), {}).get(key) for system in (OURS, LANCE, NPY)]
            lines.append(f"| {title} | " + " | ".join("" if cell is None else f"{cell:,.3g}" for cell in cells) + " |")
        lines += ["", *(_verdict(figures, target, shape) for target in TARGETS), *_size(figures, shape, n_rows), ""]
    small, large = (figures[OURS, "write", f"{times}x"]["peak_mb"] for times in (1, 4))
    versions = figures[OURS, "write", "1000"]["versions"]
    lines += [
        f"- extra memory of writing {n_rows:,} and {4 * n_rows:,} rows of 64 columns: {small:.0f} and {large:.0f} MB",
        f"- versions after 1,000 batches: {versions} (at most 3)",
    ]
    return "\n".join(lines)


def _verdict(
    figures: Figures, target: tuple[str, Callable[[Figures, str], float | None], float, float | None], shape: str
) -> str:
    title, value_of, least, aim = target
    value = value_of(figures, shape)
    if value is None:
        return f"- {title}: not measured"
    word = "NOT REACHED" if value < least else "reached" if aim is None or value < aim else "reached, and the aim"
    return f"- {title}: {value:,.1f}x, at least {least:g}x: {word}"


def _size(figures: Figures, shape: str, n_rows: int) -> list[str]:
    dtype, columns = SHAPES[shape]
    import numpy as np

    raw = n_rows * (np.dtype(dtype).itemsize * columns[0] + 16)
    sizes = {
        name: f"{100 * (figure['bytes'] / raw - 1):+.1f} %"
        for name in (OURS, LANCE, NPY)
        if (figure := figures.get((name, "write", shape)))
    }
    return [f"- disk over values and ids: {', '.join(f'{name} {size}' for name, size in sizes.items())}"]


if __name__ == "__main__":
    main()
