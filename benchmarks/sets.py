"""Sets of perturbed cells with matched controls: cells per second against `Loader(shuffle="full")` on the same atlas, against cell-load on the same
files, and the start and memory with many thin cells.

`python benchmarks/sets.py --cells 200000` makes its atlas in a temporary folder; ``--peer PYTHON`` names an interpreter that has cell-load;
``--thin 10000000`` adds the start and memory with as many cells of ten values, and ``--perturbations`` of each kind.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
from scipy.sparse import csr_matrix

import raggedatlas as ra

N_FEATURES = 2_000
SET, SETS = 64, 8
KEYS, CONTROL, MATCH = ["gene", "cell_type"], {"gene": "non-targeting"}, ["dataset", "cell_type"]

PEER = """
import json, sys, time
from cell_load.data_modules import PerturbationDataModule
folder, seconds, sets, size = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
data = PerturbationDataModule(
    toml_config_path=folder + "/split.toml", embed_key="X_hvg", num_workers=0, batch_col="batch", pert_col="gene", cell_type_key="cell_type",
    control_pert="non-targeting", batch_size=sets, cell_sentence_len=size, should_yield_control_cells=False, basal_mapping_strategy="random",
)
data.setup()
def batches():
    while True:
        yield from data.train_dataloader()
found = batches()
for _ in range(3):
    next(found)
n, began = 0, time.perf_counter()
while time.perf_counter() - began < seconds:
    batch = next(found)
    n += len(batch["pert_cell_emb"]) + len(batch["ctrl_cell_emb"])
print(json.dumps(n / (time.perf_counter() - began)))
"""


def make(folder: Path, n_cells: int, n_values: int, n_perturbations: int) -> None:
    """Make an atlas of four screens, their files with dense `obsm["X_hvg"]`, and the file of cell-load."""
    rng, atlas = np.random.default_rng(0), ra.RaggedAtlas.create(folder / "a.atlas")
    n, names = n_cells // 4, np.array(["non-targeting", *(f"P{i}" for i in range(n_perturbations))])
    (folder / "screens").mkdir()
    for number in range(4):
        columns = np.sort(rng.integers(0, N_FEATURES, (n, n_values), dtype=np.int32), axis=1)
        data = rng.geometric(0.6, columns.size).astype(np.float32)
        counts = csr_matrix((data, columns.ravel(), np.arange(n + 1, dtype=np.int64) * n_values), (n, N_FEATURES))
        counts.sum_duplicates()
        codes = np.where(rng.random(n) < 0.1, 0, rng.integers(1, n_perturbations + 1, n))
        obs = pd.DataFrame(
            {
                "gene": pd.Categorical.from_codes(codes, names),
                "cell_type": pd.Categorical(rng.choice(["K562", "RPE1"], n)),
                "batch": pd.Categorical(rng.choice(["1", "2"], n)),
            },
            [f"{number}-{i}" for i in range(n)],
        )
        part = ad.AnnData(counts, obs, pd.DataFrame(index=[f"GENE{i}" for i in range(N_FEATURES)]))
        atlas.add(part, f"s{number}", organism="human", progress=False)
        part.obsm["X_hvg"] = counts.toarray()
        part.write_h5ad(folder / "screens" / f"s{number}.h5ad")
    atlas.snapshot()
    (folder / "split.toml").write_text(
        f"[datasets]\nscreens = '{folder}/screens/'\n[training]\nscreens = 'train'\n[zeroshot]\n[fewshot.'screens.K562']\ntest = ['P1']\n"
    )


def speed(batches: Iterator[Any], size: Any, seconds: float) -> float:
    """Return cells per second."""
    for _ in range(3):
        next(batches)
    n, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        n += size(next(batches))
    return n / (time.perf_counter() - began)


def epochs(loader: Any) -> Iterator[Any]:
    """Yield batches without end."""
    while True:
        yield from loader


def thin(folder: Path, n_cells: int, n_perturbations: int) -> None:
    """Make an atlas of thin cells in ten datasets."""
    rng, atlas = np.random.default_rng(1), ra.RaggedAtlas.create(folder / "thin.atlas")
    names = np.array(["non-targeting", *(f"P{i}" for i in range(n_perturbations))])
    n = n_cells // 10
    for number in range(10):
        columns = np.sort(rng.integers(0, 200, (n, 10), dtype=np.int32) + 200 * np.arange(10, dtype=np.int32), axis=1)
        counts = csr_matrix(
            (np.ones(columns.size, np.float32), columns.ravel(), np.arange(n + 1, dtype=np.int64) * 10), (n, N_FEATURES)
        )
        codes = np.where(rng.random(n) < 0.1, 0, rng.integers(1, n_perturbations + 1, n))
        obs = pd.DataFrame({"gene": pd.Categorical.from_codes(codes, names)}, [str(i) for i in range(n)])
        made = ad.AnnData(counts, obs, pd.DataFrame(index=[f"GENE{i}" for i in range(N_FEATURES)]))
        atlas.add(made, f"t{number}", organism="human", progress=False)
    atlas.snapshot()


START = """
import json, sys, threading, time
import raggedatlas as ra
from pathlib import Path
def anonymous():
    return 1024 * int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")).split()[1])
view = ra.open(sys.argv[1])
loader = ra.Loader(view.query().limit(1000), 10)
next(iter(loader))
del loader
before, most, done = anonymous(), [0], threading.Event()
def watch():
    while not done.wait(0.005):
        most[0] = max(most[0], anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
began = time.perf_counter()
loader = ra.SetLoader(view.query(), "gene", {"gene": "non-targeting"}, ["dataset"], set_size=64, sets=8)
batches = iter(loader)
next(batches)
seconds = time.perf_counter() - began
for _ in range(200):
    next(batches)
done.set()
watcher.join()
print(json.dumps([seconds, most[0] - before, loader.n_sets]))
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=200_000)
    parser.add_argument("--values", type=int, default=500)
    parser.add_argument("--perturbations", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", default="")
    parser.add_argument("--thin", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raggedatlas-sets-") as name:
        folder = Path(name)
        if options.cells:
            make(folder, options.cells, options.values, options.perturbations)
            query = ra.open(str(folder / "a.atlas")).query()
            ways = {
                "csr": {"as_": "csr"},
                "dense": {"as_": "dense"},
            }
            for form, choices in ways.items():
                found: dict[str, list[float]] = {"sets": [], "cells": []}
                for _ in range(options.rounds):
                    sets = ra.SetLoader(query, KEYS, CONTROL, MATCH, set_size=SET, sets=SETS, **choices)
                    plain = ra.Loader(query, 2 * SET * SETS, obs=[*KEYS, "dataset"], **choices)
                    found["sets"].append(speed(epochs(sets), lambda b: len(b) + len(b.control), options.seconds))
                    found["cells"].append(speed(epochs(plain), len, options.seconds))
                ours, full = (float(np.median(values)) for values in found.values())
                print(f"{form}: SetLoader {ours:,.0f} cells/s, Loader {full:,.0f} cells/s, {ours / full:.2f}x")
                if options.peer and form == "dense":
                    command = [options.peer, "-c", PEER, name, str(options.seconds), str(SETS), str(SET)]
                    run = subprocess.run(command, capture_output=True, text=True, check=True)
                    peer = float(json.loads(run.stdout.splitlines()[-1]))
                    print(f"cell-load {peer:,.0f} cells/s of the dense obsm; SetLoader, dense, {ours / peer:.1f}x")
        if options.thin:
            thin(folder, options.thin, options.perturbations)
            environment = {**os.environ, "RAGGEDATLAS_CACHE_DIR": str(folder / "cache")}
            for state in ("first", "again"):
                command = [sys.executable, "-c", START, str(folder / "thin.atlas")]
                run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                seconds, memory, n_sets = json.loads(run.stdout.splitlines()[-1])
                print(
                    f"{options.thin:,} thin cells, {n_sets:,} sets, {state}: first batch after {seconds:.1f} s, {memory / 1e6:,.0f} MB"
                )


if __name__ == "__main__":
    main()
