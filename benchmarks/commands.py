"""Measure processor seconds of small commands in fresh processes, and what the libraries that they import cost alone.

    python benchmarks/commands.py --out                     # this checkout, seven rounds
    python benchmarks/commands.py --before ../before --out  # and an older checkout, in turns

Each command is run with the bytecode of all modules, and as in an image without any: Python then neither finds nor writes
``.pyc`` files, in the first three rounds only, as it takes three times as long. A round before the first makes the bytecode.
Prints a page in Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from compare import HERE, row, spread, versions
from environments import ROOT
from machine import Neighbours, described

FLOORS = {"interpreter": "pass", "`import lance`": "import lance", "`import pyarrow`": "import pyarrow"}
FLOORS |= {"`import lance`, pandas put off": "from raggedatlas.cli import defer_pandas_import as d; d(); import lance"}
FLOORS |= {"`import typer`": "import typer", "`import pydantic`": "from pydantic import BaseModel, TypeAdapter"}
MAIN = "from raggedatlas.cli import main; main()"
FILE = str(ROOT / "tests/data/lung_C144.h5")
PACKAGES = ("pylance", "pyarrow", "numpy", "pandas", "pydantic", "typer", "rich")

ROUNDS_WITHOUT = 3
"""Rounds without bytecode."""

Times = dict[tuple[str, str, bool], list[tuple[float, float]]]
"""Command, name of the checkout and whether there is bytecode -> processor and wall seconds of each round."""


def lines_of(atlas: Path) -> Iterator[tuple[str, list[str]]]:
    """Give names and arguments of Python, in an order that works on one atlas."""
    yield from ((name, ["-c", code]) for name, code in FLOORS.items())
    for name, *words in (
        ["`--help`", "--help"],
        ["`create`", "create", str(atlas)],
        ["`ls`, empty", "ls", str(atlas)],
        ["`add`", "add", str(atlas), FILE],
        ["`ls`", "ls", str(atlas)],
        ["`snapshot`", "snapshot", str(atlas)],
        ["`query` of two genes", "query", str(atlas), "-f", "CD3E", "-f", "CD79A"],
    ):
        yield name, ["-c", MAIN, *words]


def seconds(line: list[str], source: Path, unwritten: Path | None) -> tuple[float, float]:
    """Run Python; its processor and wall seconds. `unwritten` is a folder without bytecode, which stays so."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {
        "PYTHONPATH": str(source / "src")
    }
    if unwritten is not None:
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(unwritten)}
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        child = subprocess.Popen([sys.executable, *line], stdout=output, stderr=subprocess.STDOUT, env=environment)
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(line)}: {output.read().decode()[-400:]}")
    return used.ru_utime + used.ru_stime, wall


def measure(sources: dict[str, Path], rounds: int) -> Times:
    """Run all commands of all checkouts in turns."""
    times: Times = {}
    for number in range(rounds + 1):
        ways = [(version, compiled) for version in sources for compiled in (True, False)]
        for version, compiled in ways[:: 1 if number % 2 else -1]:
            if not compiled and number not in range(1, ROUNDS_WITHOUT + 1):
                continue
            with tempfile.TemporaryDirectory() as folder:
                for name, line in lines_of(Path(folder, "small.atlas")):
                    found = seconds(line, sources[version], None if compiled else Path(folder, "unwritten"))
                    if number:
                        times.setdefault((name, version, compiled), []).append(found)
    return times


def page(times: Times, sources: dict[str, Path], rounds: int, others: Neighbours) -> str:
    """Format the page."""
    machine = ", ".join(f"{name} {value}" for name, value in described().items())
    ways = [(version, compiled) for compiled in (True, False) for version in sources]
    names = list(dict.fromkeys(name for name, _, _ in times))

    def cell(measured: list[tuple[float, float]]) -> str:
        used, wall = zip(*measured, strict=True)
        return f"{spread(list(used), 2)}, {statistics.median(wall):.2f}"

    lines = [
        f"# Small commands, {date.today()}",
        "",
        f"{machine}; other processes used {others.cores:.1f} cores meanwhile. {versions(Path(sys.executable), PACKAGES)}.",
        "",
        f"Processor seconds (user and system) of a fresh process, median of {rounds} rounds in turns ({min(rounds, ROUNDS_WITHOUT)} without bytecode) with the range in brackets, and the median "
        "by the clock after the comma. The first rows are what the interpreter and libraries cost alone. `add` is of `tests/data/lung_C144.h5` "
        "(250 cells, 33,539 features), warm page cache. Made by `benchmarks/commands.py`.",
        "",
        row(["", *(f"{version}{'' if compiled else ', no `.pyc`'}" for version, compiled in ways)]),
        row(["---"] * (1 + len(ways))),
        *(row([name, *(cell(times[name, *way]) for way in ways)]) for name in names),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parse, measure, print the page, and keep it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--before", type=Path, help="an older checkout; import it once first, as that compiles its kernels"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", action="store_true", help="keep the page in benchmarks/results")
    asked = parser.parse_args()
    sources = {**({} if asked.before is None else {"before": asked.before.resolve()}), "now": ROOT}
    with Neighbours() as others:
        times = measure(sources, asked.rounds)
    text = page(times, sources, asked.rounds, others)
    print(text)
    if asked.out:
        (HERE / "results" / f"{date.today()}-commands.md").write_text(text)


if __name__ == "__main__":
    main()
