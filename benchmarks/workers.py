"""`add` of 16 files by two worker processes compared with one call on the same cores, and the measured times on up to 64 workers.

Run ``python -m benchmarks.workers [cells per file]``. One call and the workers take turns, each into a new atlas, after the workers have
imported the package. The simulation gives the measured times of the tasks of one worker alone to any number of workers, each the next
task when it is done with one, and adds what the caller does alone: judging and committing, as measured.
"""

import heapq
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

from raggedatlas.atlas import RaggedAtlas

N_FILES, N_GENES, N_ENTRIES, TURNS = 16, 20_000, 1_500, 3
WORKERS = (1, 2, 4, 8, 16, 32, 64)


def write_files(folder: Path, n_cells: int) -> list[Path]:
    """Write files of counts, each with about `N_ENTRIES` entries a cell and five columns of obs."""
    paths = [folder / f"f{i:02}.h5ad" for i in range(N_FILES)]
    for seed, path in enumerate(paths):
        rng = np.random.default_rng(seed)
        share = rng.permutation((np.arange(N_GENES) + 20.0) ** -0.7)
        columns = rng.choice(N_GENES, n_cells * N_ENTRIES, p=share / share.sum())
        rows = np.repeat(np.arange(n_cells), N_ENTRIES)
        counts = sp.coo_matrix((np.ones(len(rows), np.float32), (rows, columns)), (n_cells, N_GENES)).tocsr()
        obs = pd.DataFrame(
            {f"c{i}": pd.Categorical(rng.integers(0, 9, n_cells).astype(str)) for i in range(4)}
            | {"score": rng.random(n_cells)},
            index=[f"{seed}-{i}" for i in range(n_cells)],
        )
        ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=[f"g{i}" for i in range(N_GENES)])).write_h5ad(path)
    return paths


def timed_add(folder: Path, paths: Sequence[Path], executor: Executor | None) -> float:
    """Add the files to a new atlas, and remove it."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        atlas = RaggedAtlas.create(f"{place}/atlas")
        begun = time.perf_counter()
        atlas.add(list(paths), progress=False, executor=executor)
        return time.perf_counter() - begun


class _Here(Executor):
    """Runs tasks at once, and notes how long each took."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"_Survey": [], "_Order": [], "_Stage": []}

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        from concurrent.futures import Future
        from pickle import loads

        future: Future[Any] = Future()
        begun = time.perf_counter()
        future.set_result(fn(*args, **kwargs))
        self.seconds[type(loads(args[0])).__name__].append(time.perf_counter() - begun)
        return future


def measure_tasks(folder: Path, paths: Sequence[Path]) -> tuple[list[float], list[float], float]:
    """Measure the tasks one after the other, and the work of the caller."""
    here = _Here()
    total = timed_add(folder, paths, here)
    surveys, stages = [*here.seconds["_Survey"], *here.seconds["_Order"]], here.seconds["_Stage"]
    return surveys, stages, total - sum(surveys) - sum(stages)


def simulate(tasks: Sequence[float], n_workers: int) -> float:
    """Give each task to the worker that is free first."""
    free = [0.0] * n_workers
    for seconds in tasks:
        heapq.heappush(free, heapq.heappop(free) + seconds)
    return max(free)


def main() -> None:
    """Measure, simulate, print."""
    n_cells = int(sys.argv[1]) if len(sys.argv) > 1 else 4_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_files(folder, n_cells)
        n_bytes = sum(path.stat().st_size for path in paths)
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            timed_add(folder, paths[:2], pool)
            timed_add(folder, paths[:2], None)
            found = [(timed_add(folder, paths, None), timed_add(folder, paths, pool)) for _ in range(TURNS)]
        surveys, stages, alone = measure_tasks(folder, paths)
    # 64 workers have more than 16 files: the measured tasks, again and again, and the caller's share of each.
    times = {n: simulate(surveys * 64, n) + simulate(stages * 64, n) for n in WORKERS}
    print(json.dumps({
        "files": N_FILES, "cells_per_file": n_cells, "bytes": n_bytes, "cores": os.cpu_count(), "load": os.getloadavg()[0],
        "one_call_s": [round(one, 2) for one, _ in found], "two_workers_s": [round(two, 2) for _, two in found],
        "median_ratio": round(median(one / two for one, two in found), 2),
        "survey_s": round(median(surveys), 3), "stage_s": round(median(stages), 3), "caller_s_per_file": round(alone / N_FILES, 3),
        "workers_s": {n: round(seconds, 1) for n, seconds in times.items()},
        "speedup_of_workers": {n: round(times[1] / seconds, 1) for n, seconds in times.items()},
        "speedup_with_caller": {
            n: round((times[1] + 64 * alone) / max(seconds, 64 * alone), 1) for n, seconds in times.items()
        },
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
