"""Measure what it costs to apply the identity of features when a query is planned.

    python benchmarks/identity.py                    # 1,000,000 features, 10,000 layouts of 1,000
    python benchmarks/identity.py --out

The registry, the mapping and the layouts are made in memory, since what is measured is the step between reading them and reading values:
which feature each column counts as, which columns of one dataset are one feature, and where each column of the result comes from. Each
case is planned with the mapping and with none. Memory is the most that Python, NumPy and Arrow hold above the inputs.

The second table is what snapshots pay: the first, which derives the mapping of all features and what gene tables know of them, and those after one more
dataset of 900 new names and 100 symbols (median of three); of these also the time of all that a snapshot does, of which the registry's compaction
and validation are the most. A snapshot of known features alone compares versions of tables, and derives nothing.
Prints a page in Markdown.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
from machine import cores

import raggedatlas as ra
from raggedatlas.catalog import identity as catalog_identity
from raggedatlas.catalog import optimization
from raggedatlas.catalog.features import Layout, Registry
from raggedatlas.catalog.genes import put_tables
from raggedatlas.catalog.identity import IDENTITY_SCHEMA
from raggedatlas.catalog.layouts import register_features
from raggedatlas.model.accessions import GENES_SCHEMA, GeneTable, GeneTableInfo
from raggedatlas.query.modalities import FeatureAxis, FeatureRows, build_axis

ASKED = 1_000
ROUNDS = 5
HEAD = "| query | columns of the result | mapping, CPU s | none, CPU s | mapping, MB | none, MB |"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--features", type=int, default=1_000_000)
    parser.add_argument("--layouts", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=1_000)
    parser.add_argument("--out", action="store_true", help="keep benchmarks/results/<date>-identity.md")
    asked = parser.parse_args()
    registry = make_registry(asked.features)
    layouts = make_layouts(asked.features, asked.layouts, asked.width)
    names = (
        registry.table.column("uid").take(pa.array(np.arange(0, asked.features, asked.features // ASKED))).to_pylist()
    )
    lines = [
        f"# Identity of features in the plan of a query, {date.today()}",
        "",
        f"{asked.features:,} registered features, a fifth of which count as another; {asked.layouts:,} layouts of {asked.width:,} features. "
        f"Medians of {ROUNDS} plans of processor time; {cores()} cores (load before: {os.getloadavg()[0]:.1f}).",
        "",
        HEAD,
        "|---" * HEAD.count(" | ") + "|---|",
    ]
    for kind, join, wanted in (
        (f"{len(names):,} features asked for", "union", names),
        ("features of at least 100 datasets", 100, None),
    ):
        lines.append(row(kind, registry, layouts, join, wanted))
        print(lines[-1], flush=True)
    lines += [
        "",
        "| registered features | in gene tables | mapping of all, CPU s | after one more dataset, CPU s | its snapshot, CPU s |",
        "|---|---|---|---|---|",
    ]
    for n, n_known in (
        (asked.features // 10, 0),
        (asked.features // 10, asked.features // 20),
        (asked.features, 0),
        (asked.features, asked.features // 20),
    ):
        with tempfile.TemporaryDirectory() as folder:
            lines.append(derived_row(n, n_known, folder))
        print(lines[-1], flush=True)
    text = "\n".join(lines)
    print(text)
    if asked.out:
        (Path(__file__).parent / "results" / f"{date.today()}-identity.md").write_text(text + "\n")


def make_registry(n: int) -> Registry:
    """Make a registry whose last fifth counts as the features before it, of which some are so joined by two."""
    numbers = np.arange(n)
    uids = pa.array([f"{number:016x}" for number in numbers * 2654435761 % 2**61])
    moved = numbers[-n // 5 :]
    into = np.random.default_rng(1).integers(0, n - len(moved), len(moved))
    columns = [pa.array(["gene_expression"] * len(moved)), uids.take(pa.array(moved)), uids.take(pa.array(into))]
    columns += [
        pa.array(["same"] * len(moved)),
        pa.array(["symbol"] * len(moved)),
        pa.array(np.zeros(len(moved), bool)),
        *(pa.nulls(len(moved), IDENTITY_SCHEMA.field(name).type) for name in ("source", "source_sha256", "made_at")),
    ]
    identity = pa.table(columns, schema=IDENTITY_SCHEMA)
    return Registry("gene_expression", pa.table({"uid": uids, "global_index": numbers}), identity)


def make_layouts(n: int, n_layouts: int, width: int) -> dict[str, Layout]:
    """Make layouts of features taken by chance, low numbers more often than high ones."""
    rng = np.random.default_rng(2)
    no_names = np.empty(0, object)  # looked at for features without an index only
    drawn = (np.unique((n * rng.random(width) ** 2).astype(np.int64)) for _ in range(n_layouts))
    return {f"{i:016x}": Layout(f"{i:016x}", no_names, rng.permutation(index)) for i, index in enumerate(drawn)}


def derived_row(n: int, n_known: int, folder: str) -> str:
    """Measure what a snapshot derives of an atlas whose features are ids with symbols, four fifths, and names: at first, and after one more dataset."""
    n_ids = n * 4 // 5
    drawn = np.random.default_rng(3).integers(0, n_ids, n - n_ids)
    registry = pa.table(
        {
            "uid": [f"{i:016x}" for i in range(n)], "feature_id": [*(f"ENSG{i:011d}" for i in range(n_ids)), *(f"S{i}" for i in drawn)],
            "symbol": pa.array([*(f"S{i}" for i in range(n_ids)), *[None] * len(drawn)], pa.string()),
            "aliases": pa.array([[]] * n, pa.list_(pa.string())),
            "organism": ["human", "unknown"] * (n // 2),
        }
    )  # fmt: skip
    rows = [
        {"table": "t", "accession": f"ENSG{i:011d}", "organism": "human", "symbol": f"S{i}", "previous": [f"P{i}"], "aliases": [f"A{i}", f"B{i}"], "same": []}
        for i in range(n_known)
    ]  # fmt: skip
    info = GeneTableInfo("t", "genes", "HGNC", "", ("human",), n_known, "")
    atlas = ra.RaggedAtlas.create(f"{folder}/{n}-{n_known}")
    atlas.add(dataset(0), "first", progress=False)
    register_features(atlas._catalog, "gene_expression", registry)
    put_tables(atlas._catalog, [GeneTable(info, pa.Table.from_pylist(rows, schema=GENES_SCHEMA))] if rows else [])
    spent: list[float] = []
    update = catalog_identity.update_identity

    def timed(*given: Any) -> bool:
        start = time.process_time()
        changed = update(*given)
        spent[-1] += time.process_time() - start
        return changed

    times = []
    with (
        mock.patch.object(optimization, "update_identity", timed),
    ):
        for i in range(1, 5):
            spent.append(0.0)
            start = time.process_time()
            atlas.snapshot()
            times.append(time.process_time() - start)
            atlas.add(dataset(i), f"d{i}", progress=False)
    shown = [spent[0], float(np.median(spent[1:])), float(np.median(times[1:]))]
    return f"| {n:,} | {n_known:,} | {' | '.join(f'{value:.2f}' for value in shown)} |"


def dataset(number: int) -> ad.AnnData:
    """Make a dataset of names, a tenth of which are symbols that the atlas knows."""
    names = [*(f"R{number}-{i}" for i in range(900)), *(f"S{i}" for i in range(number * 100, number * 100 + 100))]
    return ad.AnnData(
        np.ones((5, len(names)), np.float32),
        obs=pd.DataFrame(index=[f"{number}-{i}" for i in range(5)]),
        var=pd.DataFrame(index=names),
    )


def row(kind: str, registry: Registry, layouts: dict[str, Layout], join: str | int, wanted: list[str] | None) -> str:
    """Measure one query with the mapping and without."""
    plain = replace(registry, identity=IDENTITY_SCHEMA.empty_table())

    def plan(of: Registry) -> FeatureAxis:
        # A separate registry, as in a new snapshot: what is derived from it is computed again.
        features = FeatureRows(replace(of), layouts)
        datasets = [(uid,) for uid in layouts]
        return build_axis(features, datasets, main=list(layouts), join=join, asked=wanted)

    n_cols = len(plan(registry).features)
    times = [[seconds(plan, of) for of in (registry, plain)] for _ in range(ROUNDS)]
    mapped, none = np.median(np.array(times), axis=0)
    held = [most_held(plan, of) / 1e6 for of in (registry, plain)]
    return f"| {kind} | {n_cols:,} | {mapped:.2f} | {none:.2f} | {held[0]:.0f} | {held[1]:.0f} |"


def seconds(plan: Callable[[Registry], FeatureAxis], registry: Registry) -> float:
    """Processor seconds of one plan."""
    gc.collect()
    start = time.process_time()
    plan(registry)
    return time.process_time() - start


def most_held(plan: Callable[[Registry], FeatureAxis], registry: Registry) -> float:
    """Most bytes that one plan holds at a time, its result included."""
    gc.collect()
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        plan(registry)
        return tracemalloc.get_traced_memory()[1] + (pool.max_memory() or 0)
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(pa.system_memory_pool())


if __name__ == "__main__":
    main()
