"""Show how much anonymous memory calls over all cells take for each further cell, on thin atlases of two sizes.

    python benchmarks/cells.py [--cells 100000 1000000] [--only count loader] [--folder FOLDER]

Each call runs in a process of its own; its peak of `RssAnon` is sampled every 2 ms. The figure is the slope between the smallest and the
largest atlas, so that what imports and caches take cancels out. Also printed: the time of each call at the largest size, and how many random cells
a second of processor time the loader reads. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

N_GENES, PER_CELL, DATASET_CELLS, READ_CELLS = 500, 8, 250_000, 200_000


def thin_cells(n_cells: int, number: int) -> Any:
    """Return an AnnData of thin cells, which differ from one number to the next."""
    import anndata as ad
    import pandas as pd
    import scipy.sparse as sp

    rng, n = np.random.default_rng(number), n_cells
    columns = np.sort(
        rng.integers(0, N_GENES // PER_CELL, (n, PER_CELL))
        + np.arange(0, N_GENES - PER_CELL, N_GENES // PER_CELL)[:PER_CELL]
    )
    values = rng.integers(1, 9, n * PER_CELL).astype(np.float32)
    matrix = sp.csr_matrix((values, columns.ravel(), np.arange(0, n * PER_CELL + 1, PER_CELL)), (n, N_GENES))
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical.from_codes(rng.integers(0, 20, n), [f"type {i}" for i in range(20)]),
            "donor": np.char.add("donor ", rng.integers(0, 50, n).astype(str)),
            "score": rng.random(n),
        },
        index=np.char.add(f"cell {number} ", np.arange(n).astype(str)),
    )
    return ad.AnnData(matrix, obs=obs, var=pd.DataFrame(index=[f"GENE{i}" for i in range(N_GENES)]))


def make(folder: Path, n_cells: int) -> None:
    """Add datasets of at most `DATASET_CELLS` thin cells, and take a snapshot."""
    import raggedatlas as ra

    atlas = ra.RaggedAtlas.create(folder)
    for number, start in enumerate(range(0, n_cells, DATASET_CELLS)):
        cells = thin_cells(min(DATASET_CELLS, n_cells - start), number)
        atlas.add(cells, name=f"set {number}", organism="human")
    atlas.snapshot()


def _loader(query: Any, **choices: Any) -> Any:
    from raggedatlas.loader.loader import Loader

    return Loader(query, 512, obs=["cell_type", "donor", "score"], **choices)


CALLS: dict[str, Callable[[Any], Any]] = {
    "count()": lambda query: query.count(),
    "count() where": lambda query: query.where("score < 0.5").count(),
    "count('cell_type')": lambda query: query.count("cell_type"),
    "limit(1000)": lambda query: query.limit(1000).to_arrow(),
    "sample(1000)": lambda query: query.sample(1000).to_arrow(),
    "sample(50, by='cell_type')": lambda query: query.sample(50, by="cell_type").to_arrow(),
    "order_by('score').limit(1000)": lambda query: query.order_by("score").limit(1000).to_arrow(),
    "loader": _loader,
    "loader, made again": _loader,
    "loader, balance='cell_type'": lambda query: _loader(query, balance="cell_type"),
    "loader, weights='score'": lambda query: _loader(query, weights="score"),
    "loader, group='donor'": lambda query: _loader(query, group="donor"),
}


def anonymous() -> int:
    """Return the anonymous memory of this process in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def run(folder: Path, name: str) -> dict[str, float]:
    """Run one call, and return its figures."""
    import raggedatlas as ra

    view = ra.RaggedAtlas.checkout_latest(folder)
    view.query().where("score < 0").count()
    peaks, done = [anonymous()], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peaks.append(anonymous())

    before, watcher = anonymous(), threading.Thread(target=watch)
    watcher.start()
    start, wall = time.process_time(), time.perf_counter()
    made = CALLS[name](view.query())
    seconds, clock = time.process_time() - start, time.perf_counter() - wall
    done.set()
    watcher.join()
    found = {"peak": max(peaks) - before, "held": anonymous() - before, "seconds": seconds, "clock": clock}
    if name.startswith("loader"):
        batches = iter(made)
        next(batches)
        start, n = time.process_time(), 0
        for batch in batches:
            n += len(batch)
            if n >= READ_CELLS:
                break
        batches.close()
        found["read"] = n / (time.process_time() - start)
    return found


def main() -> None:
    """Print one Markdown row for each call."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cells", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--only", nargs="+", default=[], help="calls whose name begins with one of these")
    parser.add_argument("--folder", type=Path, help="where atlases are kept for the next run; else they are removed")
    parser.add_argument("--run", nargs=2, metavar=("ATLAS", "CALL"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        print(json.dumps(run(Path(asked.run[0]), asked.run[1])))
        return
    with tempfile.TemporaryDirectory(prefix="raggedatlas-cells-") as work:
        folder, cache = asked.folder or Path(work), Path(work) / "cache"
        for n in asked.cells:
            if not (folder / str(n)).exists():
                make(folder / str(n), n)
        print("| call | peak, bytes a cell | held, bytes a cell | processor s | s | random cells/s |")
        print("| --- | --- | --- | --- | --- | --- |")
        few, many = min(asked.cells), max(asked.cells)
        for name in CALLS:
            if asked.only and not any(name.startswith(start) for start in asked.only):
                continue
            least, most = (_child(folder / str(n), name, cache) for n in (few, many))
            peak, held = ((most[key] - least[key]) / max(1, many - few) for key in ("peak", "held"))
            read = f"{most['read']:,.0f}" if "read" in most else ""
            print(
                f"| `{name}` | {peak:.2f} | {held:.2f} | {most['seconds']:.2f} | {most['clock']:.2f} | {read} |",
                flush=True,
            )


def _child(atlas: Path, name: str, cache: Path) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--run", str(atlas), name]
    environment = {**os.environ, "RAGGEDATLAS_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
