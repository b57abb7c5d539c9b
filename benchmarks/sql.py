"""SQL on a snapshot, compared with DuckDB on a Parquet file of the same columns: seconds and processor seconds, the median of some rounds.

`python benchmarks/sql.py --cells 4000000` makes an atlas of five datasets, in a temporary folder.
"""

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import duckdb
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from scipy.sparse import csr_matrix

import raggedatlas as ra

QUERIES = (
    "SELECT cell_type, count(*) FROM {} GROUP BY 1",
    "SELECT dataset, avg(n_counts) FROM {} GROUP BY 1",
    "SELECT count(*) FROM {} WHERE n_counts < 100 AND cell_type = 'type 3'",
)


def make(folder: Path, n_cells: int) -> ra.AtlasView:
    """Make an atlas of cells with one count each."""
    rng, n, atlas = np.random.default_rng(0), n_cells // 5, ra.RaggedAtlas.create(folder / "a")
    for number in range(5):
        counts = csr_matrix((np.ones(n, np.float32), (np.arange(n), rng.integers(0, 5, n))), (n, 5))
        types = pd.Categorical(rng.choice([f"type {i}" for i in range(20)], n))
        obs = pd.DataFrame(
            {"cell_type": types, "n_counts": rng.integers(0, 9999, n)}, [f"{number}-{i}" for i in range(n)]
        )
        source = ad.AnnData(counts, obs, pd.DataFrame(index=[f"GENE{i}" for i in range(5)]))
        atlas.add(source, f"d{number}", organism="human", progress=False)
    return atlas.checkout(atlas.snapshot())


def measure(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the medians of seconds and processor seconds."""
    seconds, used = [], []
    for _ in range(rounds):
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        call()
        after = resource.getrusage(resource.RUSAGE_SELF)
        seconds.append(time.perf_counter() - began)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(seconds), statistics.median(used)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raggedatlas-sql-") as folder:
        view, file = make(Path(folder), options.cells), Path(folder) / "cells.parquet"
        pq.write_table(view.query().to_arrow(), file)
        print("| statement | atlas, s (processor s) | Parquet, s (processor s) | ratio |\n|---|---|---|---|")
        for query in QUERIES:
            ours = measure(lambda: view.sql(query.format("cells"), as_="arrow"), options.rounds)  # noqa: B023
            theirs = measure(lambda: duckdb.sql(query.format(f"'{file}'")).to_arrow_table(), options.rounds)  # noqa: B023
            shown = (f"{one:.3f} ({used:.3f})" for one, used in (ours, theirs))
            print(f"| `{query.format('cells')}` | {' | '.join(shown)} | {ours[0] / theirs[0]:.1f}x |")


if __name__ == "__main__":
    main()
