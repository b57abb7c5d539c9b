"""Measure scanpy's out-of-core steps on `query.lazy()`, on the result in memory, and on anndata's `read_lazy` of the exported file.

    python benchmarks/lazy.py --out                  # 4 x 50,000 cells, three rounds
    python benchmarks/lazy.py --cells 1000 --rounds 1

Each way runs in a fresh process, and all take turns. The steps are `normalize_total`, `log1p`, `highly_variable_genes` (2,000 genes) and `pca`
(30 components) of these genes; dask computes on threads, two chunks at once. `read_lazy` reads a Zarr file that the query wrote; writing
it is not counted. Prints a page in Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import maker
from compare import HERE, row, spread, versions
from machine import Neighbours, described, own_seconds
from measuring import MemoryWatch

WAYS = {"memory": "`to_anndata()`", "lazy": "`lazy()`", "read_lazy": "`read_lazy(exported)`"}
SPENT = {"seconds": ("seconds", 1), "cpu_seconds": ("processor s", 1), "anon_mb": ("peak anonymous MB", 0)}
N_GENES, N_COMPONENTS = 2_000, 30


def prepare(work: Path, cells: int) -> None:
    """Make the data, add them to an atlas, and export this, where that is not done yet."""
    import raggedatlas as ra

    if (work / "exported.zarr").exists():
        return
    maker.make(work / "data", maker.Recipe(cells))
    atlas = ra.RaggedAtlas.create(work / "atlas")
    for file in sorted((work / "data").glob("*.h5ad")):
        atlas.add(file, progress=False)
        file.unlink()
    atlas.checkout(atlas.snapshot()).query().write(work / "exported.zarr")


def one(way: str, work: Path) -> dict[str, Any]:
    """Run the steps one way, in this process."""
    import dask
    import numpy as np
    import scanpy as sc

    import raggedatlas as ra

    def read() -> Any:
        if way == "read_lazy":
            from anndata.experimental import read_lazy

            return read_lazy(work / "exported.zarr")
        query = ra.RaggedAtlas.checkout_latest(str(work / "atlas")).query()
        return query.to_anndata() if way == "memory" else query.lazy()

    with MemoryWatch() as watch, dask.config.set(scheduler="threads", num_workers=2):
        before, started = own_seconds(), time.perf_counter()
        adata = read()
        if way == "read_lazy":
            adata.obs = adata.obs.to_memory()
            adata.var = adata.var.to_memory()
        sc.pp.normalize_total(adata, target_sum=1e4)
        sc.pp.log1p(adata)
        sc.pp.highly_variable_genes(adata, n_top_genes=N_GENES)
        chosen = adata[:, adata.var["highly_variable"].to_numpy()].copy()
        sc.pp.pca(chosen, n_comps=N_COMPONENTS, svd_solver="covariance_eigh")
        scores = np.asarray(chosen.obsm["X_pca"])
        spent = {"seconds": time.perf_counter() - started, "cpu_seconds": own_seconds() - before}
    variance = [round(float(value), 2) for value in scores.var(axis=0)[:3]]
    return {**spent, "anon_mb": watch.peak_kib * 1024 / 1e6, "genes": sorted(chosen.var_names), "variance": variance}


def page(figures: dict[str, list[dict[str, Any]]], cells: int, others: float) -> str:
    """The page."""
    machine = ", ".join(f"{name} {value}" for name, value in described().items())
    agree = all(f["genes"] == figures["memory"][0]["genes"] for found in figures.values() for f in found)
    median = {way: {key: statistics.median(f[key] for f in found) for key in SPENT} for way, found in figures.items()}
    heads = ["way", *(name for name, _ in SPENT.values())]
    lines = [
        f"# Out-of-core steps of scanpy, {date.today()}",
        "",
        f"{machine}; other processes used {others:.1f} cores meanwhile. {versions(Path(sys.executable), ('anndata', 'dask', 'scanpy', 'scipy', 'zarr'))}.",
        f"4 x {cells:,} made-up cells, {len(figures['memory'])} rounds in turns, medians with the range in brackets; `normalize_total`, `log1p`,",
        f"{N_GENES:,} highly variable genes, {N_COMPONENTS} principal components. dask computes on two threads. The chosen genes are "
        f"{'the same' if agree else 'NOT the same'} in all. Writing the file for `read_lazy` is not counted.",
        "",
        row(heads),
        row(["---"] * len(heads)),
        *(
            row([WAYS[way], *(spread([f[key] for f in found], digits) for key, (_, digits) in SPENT.items())])
            for way, found in figures.items()
        ),
        "",
        f"`lazy()` takes {median['lazy']['anon_mb'] / median['memory']['anon_mb']:.2f} of the peak memory of the result in memory, and "
        f"{median['lazy']['seconds'] / median['read_lazy']['seconds']:.2f} of the time of `read_lazy` "
        f"({median['lazy']['cpu_seconds'] / median['read_lazy']['cpu_seconds']:.2f} of its processor time).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parse, measure, print the page, and keep it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cells", type=int, default=50_000, help="cells of each of four datasets")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--work", type=Path, help="where data and stores are made and kept; by default a temporary folder"
    )
    parser.add_argument("--out", action="store_true", help="keep the page in benchmarks/results")
    parser.add_argument("--one", choices=list(WAYS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(asked.one, asked.work)))
        return
    with tempfile.TemporaryDirectory() as temporary, Neighbours() as others:
        folder = asked.work or Path(temporary)
        prepare(folder, asked.cells)
        figures: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for number in range(asked.rounds):
            for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:
                command = [sys.executable, "-W", "ignore", __file__, "--one", way, "--work", str(folder)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                figures[way].append(json.loads(done.stdout.splitlines()[-1]))
    text = page(figures, asked.cells, others.cores)
    print(text)
    if asked.out:
        (HERE / "results" / f"{date.today()}-lazy.md").write_text(text)


if __name__ == "__main__":
    main()
