"""Times differential expression of two sets of 200,000 made cells: Welch's test and Wilcoxon's, in processor and wall time.

Run as ``python benchmarks/differential.py GENES ENTRIES``: features of the atlas, and counts of each cell.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

import raggedatlas as ra

N, DATASETS = 200_000, 4


def make_dataset(rng: np.random.Generator, genes: int, entries: int) -> ad.AnnData:
    """Make counts whose genes are as unequal as those of real cells."""
    n = N // DATASETS
    weights = rng.gamma(0.3, 1, genes)
    columns = np.sort(rng.choice(genes, (n, entries), p=weights / weights.sum()), axis=1).astype(np.int32).ravel()
    counts = sp.csr_matrix((np.ones(n * entries, np.float32), columns, np.arange(n + 1) * entries), (n, genes))
    counts.sum_duplicates()
    obs = pd.DataFrame({"kind": rng.choice(["a", "b"], n)}, index=[f"c{i}" for i in range(n)])
    return ad.AnnData(counts, obs, pd.DataFrame(index=[f"g{i}" for i in range(genes)]))


def main(genes: int, entries: int) -> None:
    """Make an atlas, compare, and print a row of a table for each comparison."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        atlas = ra.RaggedAtlas.create(str(Path(folder) / "made.atlas"))
        total = 0
        for i in range(DATASETS):
            dataset = make_dataset(rng, genes, entries)
            total += dataset.X.nnz
            atlas.add(dataset, f"d{i}", progress=False)
        query = atlas.checkout(atlas.snapshot()).query()
        for method in ("t-test", "wilcoxon"):
            for name, group in {"half": {"kind": "a"}, "a quarter": {"dataset": "d0"}}.items():
                wall, cpu = time.perf_counter(), time.process_time()
                query.compare(group, method=method)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
                print(
                    f"| {genes:,} | {total / N:.0f} | {method} | {name} | {cpu:.1f} | {wall:.1f} | {peak:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
