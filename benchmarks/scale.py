"""Show how the cost of adding and of reading grows: with cells, non-zeros a cell, datasets and threads.

Each point makes its own data, a few datasets at a time, adds them to one atlas, and reads it back in fresh
processes. ``python benchmarks/loader.py --scale cells,datasets`` runs it.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compare import HERE, Campaign, System, measure, row, spread
from machine import Neighbours, cores
from maker import Recipe

BASE = Recipe()
NAMES = ("open", "loader", "row")


@dataclass(frozen=True)
class Point:
    """One place on one axis: the data, and the threads that read it."""

    axis: str
    label: str
    recipe: Recipe
    threads: int = 2


def _cells(cells: int) -> list[Point]:
    """Total cells from a quarter of the base to ten times it, in datasets of the base size."""
    points = [Point("cells", f"{cells:,} cells in 1 dataset", _repeated(cells, 1, genes=(30_000,)))]
    return points + [Point("cells", f"{cells * n:,} cells in {n} datasets", _repeated(cells, n)) for n in (4, 10, 40)]


def _repeated(cells: int, n: int, genes: tuple[int, ...] = BASE.genes) -> Recipe:
    kinds = [i % len(genes) for i in range(n)]
    return Recipe(cells, genes=tuple(genes[i] for i in kinds), library=tuple(BASE.library[i] for i in kinds))


def _nonzeros(cells: int) -> list[Point]:
    """Library sizes from a quarter of the base to four times it."""
    return [
        Point("nonzeros", f"library x {factor:g}", Recipe(cells // 2, library=tuple(n * factor for n in BASE.library)))
        for factor in (0.25, 1.0, 4.0)
    ]


def _datasets(cells: int) -> list[Point]:
    """The same number of cells in ever more datasets, each with 5,000 genes of its own."""
    return [
        Point(
            "datasets",
            f"{n:,} datasets of {max(cells * 4 // n, 1):,} cells",
            Recipe(max(cells * 4 // n, 1), genes=(5_000,) * n, library=(4_000.0,) * n),
        )
        for n in (4, 30, 200, 1_000)
    ]


def _threads(cells: int) -> list[Point]:
    """One thread and all of them, on the base data."""
    recipe = Recipe(cells)
    return [Point("threads", f"{n} threads" if n > 1 else "1 thread", recipe, n) for n in (1, max(cores(), 2))]


POINTS: dict[str, Callable[[int], list[Point]]] = {
    "cells": _cells,
    "nonzeros": _nonzeros,
    "datasets": _datasets,
    "threads": _threads,
}
AXES = tuple(POINTS)


def sit(axes: Sequence[str], cells: int, rounds: int, folder: Path) -> tuple[str, str]:
    """Measure every point of some axes; the page and the JSON."""
    points = [point for axis in axes for point in POINTS[axis](cells)]
    kept = [measure_point(point, rounds, folder) for point in points]
    return page(kept), json.dumps({"scale": kept}, indent=1)


def measure_point(point: Point, rounds: int, folder: Path) -> dict[str, Any]:
    """Build the atlas of a point, read it, and remove it."""
    work = folder / "scale"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    campaign = Campaign(work / "data", work, rounds, repeats=3)
    ours = System("raggedatlas", Path(sys.executable), HERE / "ours_loader.py")
    figures: dict[str, list[dict[str, Any]]] = {}
    failures: list[str] = []

    def run(op: str, script: str, setting: Mapping[str, Any]) -> None:
        with Neighbours() as neighbours:
            system = System(ours.name, ours.python, HERE / script)
            outcome = measure(system, op, campaign, work / "atlas", setting)
        if isinstance(outcome, str):
            failures.append(f"{op}: {outcome}")
        else:
            figures.setdefault(op, []).append({**outcome, "others_cores": neighbours.cores})
        print(f"  {point.label} {op}: {outcome if isinstance(outcome, str) else sum(outcome['seconds'])}", flush=True)

    run("build", "ours_loader.py", {"recipe": asdict(point.recipe)})
    for number in range(rounds):
        run("open", "ours.py", {})
        run("loader", "ours_loader.py", {"threads": point.threads, "seed": number})
        run("row", "ours_loader.py", {"seed": number})
    shutil.rmtree(work, ignore_errors=True)
    return {"axis": point.axis, "label": point.label, "figures": figures, "failures": failures}


def page(kept: Sequence[Mapping[str, Any]]) -> str:
    """One table for all points, as Markdown."""
    heads = ["axis", "point", "nnz/cell", "add cells/s", "add ms/dataset", "add MB", "B/nnz"]
    heads += ["random cells/s", "M nnz/s", "MB", "one row, ms", "open, ms"]
    rows = [row(heads), row(["---"] * len(heads))]
    for point in kept:
        figures = point["figures"]
        if all(figures.get(name) for name in ("build", *NAMES)):
            rows.append(row([point["axis"], point["label"], *_cells_of(figures)]))
        else:
            rows.append(row([point["axis"], point["label"], "; ".join(dict.fromkeys(point["failures"]))]))
    return "\n".join(["# How the cost grows", "", *rows]) + "\n"


def _cells_of(figures: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    built, loads = figures["build"][0], figures["loader"]
    adding = sum(built["seconds"])
    rates = [f["cells"] / sum(f["seconds"]) for f in loads]
    flow = statistics.median(f["nnz"] / sum(f["seconds"]) for f in loads) / 1e6
    return [
        f"{built['nnz'] / built['cells']:,.0f}",
        f"{built['cells'] / adding:,.0f}",
        f"{adding / len(built['seconds']) * 1e3:,.0f}",
        f"{built['peak_anon_rss_mb']:,.0f}",
        f"{built['bytes_in_arrays'] / built['nnz']:.3f}",
        spread(rates, 0),
        f"{flow:,.0f}",
        f"{statistics.median(f['peak_anon_rss_mb'] for f in loads):,.0f}",
        spread([statistics.median(f["seconds"]) * 1e3 for f in figures["row"]], 3),
        spread([min(f["seconds"][1:]) * 1e3 for f in figures["open"]], 1),
    ]
