"""Measure reading and writing CXG against a plain implementation with tiledb-py and against cellxgene's converter, in one run.

    python benchmarks/cxg.py                          # 50,000 cells x 10,000 genes, 18 million values; memory at 500,000 cells
    python benchmarks/cxg.py --cells 5000 --rows-growing 20000 --rounds 1   # does it all run?

Needs the extra cxg; cellxgene is measured where its environment is (benchmarks/peers.sh explorer). Every figure is from a process of
its own, after one small run that loads the libraries; systems take turns. Prints a page in Markdown; ``--out`` keeps it in
``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import child_environment, row, spread, versions
from environments import ROOT, Environment
from machine import Neighbours, described

HERE = Path(__file__).parent
OURS, PLAIN, CELLXGENE = "raggedatlas", "tiledb-py", "cellxgene"
EXPLORER = ROOT / ".venv-explorer"
PROGRAM = EXPLORER / "bin/cellxgene"
PACKAGES = ("raggedatlas", "tiledb", "anndata", "numpy", "h5py")
GENES, LIBRARY = 10_000, 475.0
"""Genes, and median counts of a cell that make 363 values each."""

SMALL, FEW = 500, 10_000
"""Cells of the run that warms up, and of the one that is written by zstd 22, which takes too long on more."""

PORTAL = {"level": 22, "capacity": 1_024_000, "shuffle": False}

Figures = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Row:
    """One line of the page: an operation of one system."""

    key: str
    label: str
    system: str


ROWS = [
    Row("write ours", "h5ad to CXG 0.3.0", OURS),
    Row("write plain", "h5ad to Xr, Xc and an embedding, `A[coordinates] = values`", PLAIN),
    Row("convert sparse", "`cellxgene convert -s 25`, CXG 0.2.0, X alone", CELLXGENE),
    Row("convert dense", "`cellxgene convert`, CXG 0.2.0, dense", CELLXGENE),
    Row("read ours", "CXG to AnnData", OURS),
    Row("read plain", "CXG to AnnData, `A[:]` of each array", PLAIN),
    Row("few ours", f"h5ad of {FEW:,} cells to CXG 0.3.0", OURS),
    Row("few zstd 22", "the same by `A[coordinates] = values`, with the Portal's zstd 22 and capacity 1,024,000", PLAIN),
]  # fmt: skip


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cells", type=int, default=50_000)
    parser.add_argument(
        "--rows-growing", type=int, default=500_000, help="cells of the file for which memory is looked at"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="keys of rows, for a part of a sitting")
    parser.add_argument("--data", type=Path, default=HERE / "data" / "cxg", help="where files are made and kept")
    parser.add_argument("--figures", type=Path, help="figures of earlier parts of the sitting, added to")
    parser.add_argument("--out", action="store_true", help="keep the page in benchmarks/results")
    asked = parser.parse_args()
    figures: Figures = json.loads(asked.figures.read_text()) if asked.figures and asked.figures.exists() else {}
    with tempfile.TemporaryDirectory(prefix="cxg-") as folder, Neighbours() as neighbours:
        measure_all(figures, Path(folder), asked)
    if asked.only is None or set(asked.only) & set(figures):
        figures.setdefault("others", []).append({"cores": neighbours.cores})
    if asked.figures:
        asked.figures.write_text(json.dumps(figures, indent=1))
    text = page(figures, asked)
    print(text)
    if asked.out:
        name = f"{dt.datetime.now(dt.UTC).date()}-cxg"
        (HERE / "results" / f"{name}.md").write_text(text)
        (HERE / "results" / f"{name}.json").write_text(json.dumps({"machine": described(), **figures}, indent=1))


def made_file(data: Path, cells: int) -> str:
    """Make the h5ad of so many cells, with an embedding, unless it is there."""
    path = data / f"{cells}" / "dataset0.h5ad"
    if (path.parent / "done").exists():
        return str(path)
    code = (
        "import sys, h5py, numpy as np; from pathlib import Path; from maker import Recipe, make; from anndata.io import write_elem\n"
        "folder, cells, genes, library = Path(sys.argv[1]), *map(int, sys.argv[2:4]), float(sys.argv[4])\n"
        "make(folder, Recipe(cells=cells, genes=(genes,), universe=genes, library=(library,)))\n"
        "places = np.random.default_rng(0).normal(size=(cells, 2)).astype(np.float32)\n"
        "with h5py.File(folder / 'dataset0.h5ad', 'r+') as file:\n"
        "    write_elem(file, 'obsm', {'X_umap': places})\n"
        "(folder / 'done').touch()\n"
    )
    line = [sys.executable, "-c", code, str(path.parent), str(cells), str(GENES), str(LIBRARY)]
    subprocess.run(line, cwd=HERE, env=child_environment(HERE), check=True)
    return str(path)


@dataclass
class Taking:
    """What is being measured: figures by row, where to work, and what is asked."""

    figures: Figures
    folder: Path
    asked: argparse.Namespace
    basic: dict[str, Any]

    def wanted(self, *keys: str) -> bool:
        """Whether any of these rows is asked for."""
        return not self.asked.only or any(key in self.asked.only for key in keys)

    def take(self, key: str, system: str, operation: str, place: str, **setting: Any) -> None:
        """Measure one row, if it is asked for."""
        if self.wanted(key):
            figure = run(system, operation, self.folder / place, {**self.basic, **setting})
            self.figures.setdefault(key, []).append(figure)
            print(f"{key}: {brief(figure)}", file=sys.stderr, flush=True)

    def by_turns(self, number: int, *rows: tuple[Any, ...]) -> None:
        """Measure some rows, in the other order every second round."""
        for key, system, operation, place, setting in rows if number % 2 == 0 else rows[::-1]:
            self.take(key, system, operation, place, **setting)


def measure_all(figures: Figures, folder: Path, asked: argparse.Namespace) -> None:
    """Take every figure that is asked for."""
    source, small, few = (made_file(asked.data, n) for n in (asked.cells, SMALL, min(FEW, asked.cells)))
    taking = Taking(figures, folder, asked, {"source": source, "small": small, "n_genes": GENES})
    reason = Environment(EXPLORER / "bin/python", ("server",), ("cellxgene",), group="explorer").why_missing(CELLXGENE)
    if reason:
        print(f"cellxgene is left out: {reason}", file=sys.stderr)
    for number in range(asked.rounds):
        plain = ("write plain", PLAIN, "write", "plain.cxg", {})
        taking.by_turns(number, ("write ours", OURS, "write", "ours.cxg", {}), plain)
        if not reason:
            words = {"program": str(PROGRAM), "words": ["-s", "25"]}
            taking.take("convert sparse", CELLXGENE, "convert", "theirs.cxg", **words)
    if not reason:
        taking.take("convert dense", CELLXGENE, "convert", "theirs.cxg", program=str(PROGRAM), words=[])
    if taking.wanted("read ours", "read plain"):
        run(OURS, "write", folder / "read.cxg", taking.basic)
        run(OURS, "write", folder / "small.cxg", {**taking.basic, "source": small})
        setting = {"small": str(folder / "small.cxg")}
        for number in range(asked.rounds):
            rows = [
                (key, system, "read", "read.cxg", setting)
                for key, system in (("read ours", OURS), ("read plain", PLAIN))
            ]
            taking.by_turns(number, *rows)
    taking.take("few ours", OURS, "write", "few.cxg", source=few)
    taking.take("few zstd 22", PLAIN, "write", "few22.cxg", source=few, schema=PORTAL)
    if asked.rows_growing and taking.wanted("grown"):
        taking.take("grown", OURS, "write", "grown.cxg", source=made_file(asked.data, asked.rows_growing))


def run(system: str, operation: str, place: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """One process; an empty answer where it failed."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(HERE / "cxg_worker.py"),
        system,
        operation,
        str(place),
        json.dumps(setting),
    ]
    done = subprocess.run(command, env=child_environment(HERE), capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return {}
    os.sync()  # else the kernel writes out during the next measurement
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def brief(figure: dict[str, Any]) -> str:
    """One figure in a few words."""
    return ", ".join(f"{k} {v:.4g}" for k, v in figure.items() if isinstance(v, int | float)) or "failed"


def values(figures: Figures, key: str, what: str) -> list[float]:
    """One number of every figure of a row."""
    return [float(figure[what]) for figure in figures.get(key, []) if what in figure]


def middle(figures: Figures, key: str, what: str) -> float | None:
    """The median of that."""
    found = values(figures, key, what)
    return statistics.median(found) if found else None


def times(key: str, other: str, what: str) -> Callable[[Figures], float | None]:
    """How many times less ours is."""

    def of(figures: Figures) -> float | None:
        ours, theirs = middle(figures, key, what), middle(figures, other, what)
        return theirs / ours if ours and theirs else None

    return of


GOALS: list[tuple[str, Callable[[Figures], float | None], str, float]] = [
    ("writing, times less processor time than `A[coordinates] = values`", times("write ours", "write plain", "cpu"), "least", 5),
    ("the same, times less memory", times("write ours", "write plain", "peak_mb"), "", 0),
    ("writing, times less processor time than `cellxgene convert -s 25`", times("write ours", "convert sparse", "cpu"), "", 0),
    ("memory of writing, MB", lambda f: middle(f, "write ours", "peak_mb"), "most", 500),
    ("memory of writing ten times the cells, MB", lambda f: middle(f, "grown", "peak_mb"), "most", 500),
    ("the same, over that of writing", times("write ours", "grown", "peak_mb"), "most", 1.25),
    ("reading to AnnData, times less processor time than `A[:]`", times("read ours", "read plain", "cpu"), "", 0),
    ("ten genes, times less processor time than `multi_index`", times("read ours", "read plain", "genes_ms"), "", 0),
    ("size of Xr and Xc over that of zstd 22", times("few zstd 22", "few ours", "matrix_bytes"), "most", 1.15),
]  # fmt: skip


def goals(figures: Figures) -> list[str]:
    """Every goal, its figure, and whether it is reached."""
    lines = [row(["goal", "figure", "asked", "verdict"]), row(["---"] * 4)]
    for what, of, kind, bound in GOALS:
        value = of(figures)
        if value is None:
            lines.append(row([what, "-", "-", "not measured"]))
            continue
        asked = f"at {kind} {bound:g}" if kind else "-"
        reached = value >= bound if kind == "least" else value <= bound
        lines.append(row([what, f"{value:,.3g}", asked, "" if not kind else "reached" if reached else "NOT REACHED"]))
    return lines


def page(figures: Figures, asked: argparse.Namespace) -> str:
    """Everything as Markdown."""
    machine = ", ".join(f"{name} {value}" for name, value in described().items())
    others = ", ".join(f"{one['cores']:.2f}" for one in figures.get("others", []))
    nnz = (middle(figures, "read ours", "nnz") or 0) / 1e6
    lines = [
        "# Reading and writing CXG", "",
        f"{asked.cells:,} cells x {GENES:,} genes, {nnz:.1f} million values, made; {machine}; other processes used {others} cores meanwhile.",
        f"{versions(Path(sys.executable), PACKAGES)}; cellxgene 0.16.8 with tiledb 0.34.0. Warm page cache; medians, and from least to most, of {asked.rounds} rounds",
        "where there are several. Processor seconds count every thread, after one small run that loads the libraries; of `cellxgene convert`, whose process",
        "cannot be warmed, those of its start are taken off. Memory is the peak of the process's own (`RssAnon`), libraries included. `A[coordinates] = values`",
        "writes the same arrays with the same filters in one piece from memory, without tables of cells and features. Our reader also looks for entries that",
        "come twice or lie beyond an axis.", "",
    ]  # fmt: skip
    lines += [
        *goals(figures),
        "",
        row(["", "system", "processor s", "wall s", "memory MB", "matrix MB", "ten genes, ms"]),
        row(["---"] * 7),
    ]
    for one in ROWS:
        if one.key not in figures:
            continue
        sizes = middle(figures, one.key, "matrix_bytes")
        cells = [spread(values(figures, one.key, what), digits) if values(figures, one.key, what) else "-" for what, digits in
                 (("cpu", 2), ("wall", 2), ("peak_mb", 0))]  # fmt: skip
        genes = values(figures, one.key, "genes_ms")
        lines.append(
            row(
                [
                    one.label,
                    one.system,
                    *cells,
                    f"{sizes / 1e6:.1f}" if sizes else "-",
                    spread(genes, 1) if genes else "-",
                ]
            )
        )
    if values(figures, "grown", "cpu"):
        grown = figures["grown"][-1]
        lines.append(row([f"h5ad of {asked.rows_growing:,} cells to CXG 0.3.0", OURS, f"{grown['cpu']:.1f}", f"{grown['wall']:.1f}",
                          f"{grown['peak_mb']:.0f}", f"{grown['matrix_bytes'] / 1e6:.1f}", "-"]))  # fmt: skip
    return "\n".join([*lines, "", *agreement(figures), ""])


def agreement(figures: Figures) -> list[str]:
    """Whether both readers gave the same."""
    said = {
        json.dumps([f["shape"], f["nnz"], f["sum"], f["genes_sum"]])
        for key in ("read ours", "read plain")
        for f in figures.get(key, [])
        if f
    }
    return (
        ["Both readers gave the same values." if len(said) == 1 else f"The readers disagree: {sorted(said)}"]
        if said
        else []
    )


if __name__ == "__main__":
    main()
