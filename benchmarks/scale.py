"""Show how the cost of adding and of reading grows: with cells, non-zeros a cell, datasets and threads.

Each point makes its own data, a few datasets at a time, adds them to one atlas, and reads it back in fresh
processes with one thread and with all. Cells are thin where many are asked for, so that two million fit a small
machine. ``python benchmarks/loader.py --scale cells,datasets`` runs it.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compare import HERE, Campaign, System, measure, processor, row, spread, versions
from machine import Neighbours, cores, memory_gib
from maker import Recipe

BASE = Recipe()
THIN = 250.0
"""Median counts of a cell where cells or datasets are many."""
PACE = {"least": 2.0, "seconds": 6.0}


@dataclass(frozen=True)
class Point:
    """One place on one axis: the data, and how many datasets are added in one call."""

    axis: str
    label: str
    recipe: Recipe
    at_once: int = 1


def _cells(cells: int) -> list[Point]:
    """Total cells from one dataset to forty, each of the base size and thin."""
    return [Point("cells", f"{cells * n:,} in {n} x {cells:,}", _repeated(cells, n)) for n in (1, 8, 40)]


def _repeated(cells: int, n: int) -> Recipe:
    return Recipe(cells, genes=tuple(BASE.genes[i % len(BASE.genes)] for i in range(n)), library=(THIN,) * n)


def _nonzeros(cells: int) -> list[Point]:
    """Library sizes from a tenth of the base to three times it, in a tenth of the cells."""
    return [
        Point(
            "non-zeros", f"library x {factor:g}", Recipe(cells // 10, library=tuple(n * factor for n in BASE.library))
        )
        for factor in (0.1, 1.0, 3.0)
    ]


def _datasets(cells: int) -> list[Point]:
    """As many cells as one dataset of the base size has, in ever more datasets with 2,000 genes of their own."""
    points = []
    for n in (4, 100, 1_000):
        recipe = Recipe(max(cells // n, 1), 0, (2_000,) * n, 4_000, 5, library=(2 * THIN,) * n)
        points.append(Point("datasets", f"{n:,} of {recipe.cells:,} cells", recipe, at_once=min(n, 100)))
    return points


POINTS: dict[str, Callable[[int], list[Point]]] = {
    "cells": _cells,
    "nonzeros": _nonzeros,
    "datasets": _datasets,
}
AXES = tuple(POINTS)


def sit(axes: Sequence[str], cells: int, rounds: int, folder: Path) -> tuple[str, str]:
    """Measure every point of some axes; the page and the JSON."""
    points = [point for axis in axes for point in POINTS[axis](cells)]
    kept: list[dict[str, Any]] = []
    try:
        for point in points:
            kept += [measure_point(point, rounds, folder)]
    except KeyboardInterrupt:
        print("stopped early; the page holds what was measured until then", flush=True)
    return page(kept, rounds), json.dumps({"scale": kept}, indent=1)


def measure_point(point: Point, rounds: int, folder: Path) -> dict[str, Any]:
    """Build the atlas of a point, read it, and remove it."""
    work = folder / "scale"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    campaign = Campaign(work / "data", work, rounds, repeats=3)
    figures: dict[str, list[dict[str, Any]]] = {}
    failures: list[str] = []

    def run(key: str, op: str, script: str, setting: Mapping[str, Any]) -> None:
        system = System("raggedatlas", Path(sys.executable), HERE / script)
        with Neighbours() as neighbours:
            outcome = measure(system, op, campaign, work / "atlas", setting)
        if isinstance(outcome, str):
            failures.append(f"{key}: {outcome}")
        else:
            figures.setdefault(key, []).append({**outcome, "others_cores": neighbours.cores})
        print(f"  {point.label} {key}: {outcome if isinstance(outcome, str) else sum(outcome['seconds'])}", flush=True)

    run("build", "build", "ours_loader.py", {"recipe": asdict(point.recipe), "at_once": point.at_once})
    for number in range(rounds):
        run("open", "open", "ours.py", {})
        for threads in _threads():
            run(f"loader.{threads}", "loader", "ours_loader.py", {"threads": threads, "seed": number, **PACE})
        run("row", "row", "ours_loader.py", {"seed": number})
    shutil.rmtree(work, ignore_errors=True)
    return {"axis": point.axis, "label": point.label, "figures": figures, "failures": failures}


def _threads() -> tuple[int, int]:
    return 1, max(cores(), 2)


def page(kept: Sequence[Mapping[str, Any]], rounds: int) -> str:
    """One table for all points, as Markdown."""
    few, many = _threads()
    heads = [
        "axis",
        "point",
        "nnz/cell",
        "add, cells/s",
        "M nnz/s",
        "ms/dataset",
        "MB",
        "B/nnz",
        "open, ms",
        "plan, ms",
    ]
    heads += [f"random cells/s, {few} thread", f"{many} threads", "M nnz/s", "MB", "one row, ms"]
    rows = [row(heads), row(["---"] * len(heads))]
    for point in kept:
        figures = point["figures"]
        if all(figures.get(name) for name in ("build", "open", "row", f"loader.{few}", f"loader.{many}")):
            rows.append(row([point["axis"], point["label"], *_columns(figures)]))
        else:
            rows.append(row([point["axis"], point["label"], "; ".join(dict.fromkeys(point["failures"]))]))
    busy = [f["others_cores"] for point in kept for figures in point["figures"].values() for f in figures]
    ours = System("raggedatlas", Path(sys.executable), HERE / "ours.py")
    lines = [
        f"# How the cost grows, {dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "",
        f"- {cores()} cores ({processor()}), {memory_gib():.0f} GiB; warm page cache, local disk",
        f"- other processes used {sum(busy) / max(len(busy), 1):.2f} cores on average, at most {max(busy, default=0):.2f} during "
        f"one measurement; load average at the end {os.getloadavg()[0]:.1f}",
        f"- rounds: {rounds}; a fresh process per measurement; batches of 512, two obs columns, epochs until {PACE['least']:g} s "
        f"have passed, cut after {PACE['seconds']:g} s; medians and ranges; each atlas is built once",
        "- open: the newest snapshot, in a process that has opened it before; plan: making the loader, imports included",
        "- where datasets are many, up to 100 are added in one call, which commits once",
        f"- {versions(ours.python)}",
    ]
    return "\n".join([*lines, "", *rows]) + "\n"


def _columns(figures: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    few, many = (figures[f"loader.{n}"] for n in _threads())
    built = figures["build"][0]
    adding = sum(built["seconds"])
    flow = statistics.median(f["nnz"] / sum(f["seconds"]) for f in many) / 1e6
    return [
        f"{built['nnz'] / built['cells']:,.0f}",
        f"{built['cells'] / adding:,.0f}",
        f"{built['nnz'] / adding / 1e6:,.1f}",
        f"{adding / built['extra']['datasets'] * 1e3:,.0f}",
        f"{built['peak_anon_rss_mb']:,.0f}",
        f"{built['bytes_in_arrays'] / built['nnz']:.3f}",
        spread([min(f["seconds"][1:]) * 1e3 for f in figures["open"]], 1),
        spread([f["extra"]["plan_seconds"] * 1e3 for f in many], 0),
        spread([f["cells"] / sum(f["seconds"]) for f in few], 0),
        spread([f["cells"] / sum(f["seconds"]) for f in many], 0),
        f"{flow:,.0f}",
        f"{statistics.median(f['peak_anon_rss_mb'] for f in many):,.0f}",
        spread([statistics.median(f["seconds"]) * 1e3 for f in figures["row"]], 3),
    ]
