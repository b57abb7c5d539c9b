"""Measure what `save_to_database` promises: recall, time and size of the index that it makes on large embeddings.

    python benchmarks/recall.py                      # 200,000 and 1,000,000 rows of 64 float32
    python benchmarks/recall.py --rows 60000 --out

Two kinds of rows: like an embedding of cells (200 clusters that lie in 16 of the directions, with noise in all), and the hardest there
is (independent normal numbers in every direction). The verb reports a recall over its own 200 rows; here 300 other rows are asked by
`neighbors`, with the index and exactly. Prints a page in Markdown.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from machine import cores

from raggedatlas import ResultDataset, ResultDatasetWriter
from raggedatlas.wings.results import neighbors, save_to_database

WIDTH, CLUSTERS, PLANE = 64, 200, 16
QUERIES, K, BATCH = 300, 10, 8192
HEAD = "| rows | kind | index, CPU s | partitions probed | reported recall@10 | recall@10 of 300 other rows | a query by index, CPU ms | exactly, CPU ms | index, share of the values |"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[200_000, 1_000_000])
    parser.add_argument("--out", action="store_true", help="keep benchmarks/results/<date>-recall.md")
    asked = parser.parse_args()
    lines = [
        f"# The index of `save_to_database`, {date.today()}",
        "",
        f"{WIDTH} float32 a row, squared Euclidean distance, `least_recall=0.99`; {cores()} cores (load before: {os.getloadavg()[0]:.1f}), warm page cache.",
        "",
        HEAD,
        "|---" * HEAD.count(" | ") + "|---|",
    ]
    for n in asked.rows:
        for kind in ("clusters", "independent"):
            with tempfile.TemporaryDirectory(prefix="recall-") as folder:
                lines.append(row(Path(folder), n, kind))
                print(lines[-1], flush=True)
    text = "\n".join(lines)
    print(text)
    if asked.out:
        (Path(__file__).parent / "results" / f"{date.today()}-recall.md").write_text(text + "\n")


def row(folder: Path, n: int, kind: str) -> str:
    """Measure one embedding."""
    write(folder, n, kind)
    values = sum(path.stat().st_size for path in folder.rglob("*.lance"))
    start = time.process_time()
    report = save_to_database(folder)
    built = time.process_time() - start
    size = sum(path.stat().st_size for path in folder.rglob("_indices/**/*") if path.is_file())
    dataset = ResultDataset({}, folder)
    rows = np.random.default_rng(7).choice(n, QUERIES, replace=False)
    uids = [dataset.get_object_id(int(each)) for each in rows]
    neighbors(dataset, uids[:2], k=K)
    found, by_index = asked_for(dataset, uids, exact=False)
    true, exactly = asked_for(dataset, uids, exact=True)
    recall = len(found & true) / len(true)
    return (
        f"| {n:,} | {kind} | {built:.1f} | {report.nprobes} of {report.n_partitions} | {report.recall:.4f} | {recall:.4f} "
        f"| {by_index:.2f} | {exactly:.2f} | {100 * size / values:.0f} % |"
    )


def asked_for(dataset: ResultDataset, uids: list[str], *, exact: bool) -> tuple[set[tuple[Any, Any]], float]:
    """Pairs of a row and a neighbour, and processor milliseconds a row."""
    start = time.process_time()
    found = neighbors(dataset, uids, k=K, exact=exact)
    took = (time.process_time() - start) / len(uids) * 1e3
    return {*zip(found["query"].to_pylist(), found["uid"].to_pylist(), strict=True)}, took


def write(folder: Path, n: int, kind: str) -> None:
    """Write the embedding, in batches."""
    rng = np.random.default_rng(3)
    centres = rng.normal(size=(CLUSTERS, PLANE)) * 2
    plane = np.linalg.qr(rng.normal(size=(WIDTH, PLANE)))[0].T
    with ResultDatasetWriter(folder) as writer:
        for start in range(0, n, BATCH):
            k = min(BATCH, n - start)
            values = rng.normal(size=(k, WIDTH))
            if kind == "clusters":
                values = (centres[rng.integers(0, CLUSTERS, k)] + rng.normal(size=(k, PLANE))) @ plane + 0.1 * values
            writer.write_batch([f"{each:016x}" for each in range(start, start + k)], values.astype(np.float32))


if __name__ == "__main__":
    main()
