"""Sums of counts per sample, compared with `scanpy.get.aggregate` on the same cells in memory: seconds, and memory above that of the process before.

`python benchmarks/pseudobulk.py --cells 200000` makes its atlas in a temporary folder; each call runs in a process of its own.
"""

import argparse
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from scipy.sparse import csr_matrix

import raggedatlas as ra

N_FEATURES = 20_000


def make(folder: Path, n_cells: int, n_values: int, n_groups: int, *, whole: bool) -> str:
    """Make an atlas of four datasets with samples of cells in any order, and one file of all cells."""
    rng, atlas, parts = np.random.default_rng(0), ra.RaggedAtlas.create(folder / "a.atlas"), []
    n = n_cells // 4
    for number in range(4):
        columns = np.sort(rng.integers(0, N_FEATURES, (n, n_values), dtype=np.int32), axis=1)
        data = rng.geometric(0.6, columns.size).astype(np.float32)
        counts = csr_matrix((data, columns.ravel(), np.arange(n + 1, dtype=np.int64) * n_values), (n, N_FEATURES))
        counts.sum_duplicates()
        obs = pd.DataFrame(
            {"sample": pd.Categorical(rng.integers(0, n_groups, n).astype(str))}, [f"{number}-{i}" for i in range(n)]
        )
        part = ad.AnnData(counts, obs, pd.DataFrame(index=[f"GENE{i}" for i in range(N_FEATURES)]))
        atlas.add(part, f"d{number}", organism="human", progress=False)
        if whole:
            parts.append(part)
    atlas.snapshot()
    if whole:
        ad.concat(parts).write_h5ad(folder / "all.h5ad")
    return atlas.uri


def ours(folder: str) -> Callable[[], object]:
    """Return the call on the atlas."""
    query = ra.open(f"{folder}/a.atlas").query()
    query.limit(1).pseudobulk("sample", min_cells=1)
    return lambda: query.pseudobulk("sample", min_cells=1)


def scanpy(folder: str) -> Callable[[], object]:
    """Return the call on the cells in memory, whose memory counts."""
    import scanpy

    def call() -> object:
        data = ad.read_h5ad(f"{folder}/all.h5ad")
        began = time.perf_counter()
        made = scanpy.get.aggregate(data, "sample", ["sum", "count_nonzero"])
        call.seconds = time.perf_counter() - began  # type: ignore[attr-defined]
        return made

    return call


def anonymous() -> int:
    """Return the anonymous memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def measure(
    make_call: Callable[[str], Callable[[], object]], folder: str, sent: "multiprocessing.Queue[tuple[float, int]]"
) -> None:
    """Send seconds and the most memory of a call."""
    call = make_call(folder)
    before, most, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    call()
    seconds = getattr(call, "seconds", time.perf_counter() - began)
    done.set()
    watcher.join()
    sent.put((seconds, most - before))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=200_000)
    parser.add_argument("--values", type=int, default=1_000)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--alone", action="store_true", help="without scanpy, which holds all sums densely")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="raggedatlas-pseudobulk-") as folder:
        make(Path(folder), options.cells, options.values, options.groups, whole=not options.alone)
        found = {}
        for call in (ours,) if options.alone else (ours, scanpy):
            queue: multiprocessing.Queue[tuple[float, int]] = spawn.Queue()
            process = spawn.Process(target=measure, args=(call, folder, queue))
            process.start()
            found[call.__name__] = queue.get()
            process.join()
    print(f"{options.cells:,} cells x {options.values:,} values into {options.groups:,} groups")
    seconds, memory = found["ours"]
    if options.alone:
        print(f"raggedatlas {seconds:.2f} s, {memory / 1e6:,.0f} MB")
        return
    seconds_scanpy, memory_scanpy = found["scanpy"]
    print(
        f"raggedatlas {seconds:.2f} s, {memory / 1e6:,.0f} MB; scanpy, without reading, {seconds_scanpy:.2f} s, {memory_scanpy / 1e6:,.0f} MB"
    )
    print(f"time {seconds / seconds_scanpy:.2f}x, memory {memory / memory_scanpy:.3f}x")


if __name__ == "__main__":
    main()
