"""What snapshots, `purge` and one more `add` cost as an atlas grows, and how many requests they make of an object store.

    python benchmarks/maintenance.py snapshot --cells 5000000   # seconds, anonymous bytes a cell: nothing changed, one dataset more
    python benchmarks/maintenance.py requests                   # of an atlas of three datasets on S3: all, and in sequence; --datasets 1000
    python benchmarks/maintenance.py purge --snapshots 200
    python benchmarks/maintenance.py add --datasets 100 1000 10000
    python benchmarks/maintenance.py pack --datasets 1000       # objects and bytes, and reading, before and after they share a bundle

Each prints rows of a table. Seconds are of the clock and of the process; each measure is in a process of its own, which has imported
what it needs before.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from measuring import MemoryWatch, anonymous_kib

import raggedatlas as ra
from raggedatlas.catalog.assets import Commit, commit_records, read_records
from raggedatlas.catalog.catalog import CELLS
from raggedatlas.model.ids import new_uid, new_uids

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.atlases import small_anndata, write_dataset
from support.object_store import FaultyProxy, Remote, count_in_sequence


def timed(action: Callable[[], object]) -> dict[str, float]:
    """Return seconds of the clock and of the process, and the peak of anonymous memory above what was there before."""
    before, watch = anonymous_kib(), MemoryWatch()
    clock, process = time.perf_counter(), time.process_time()
    with watch:
        action()
    return {
        "seconds": time.perf_counter() - clock,
        "cpu": time.process_time() - process,
        "mb": max(0, watch.peak_kib - before) / 1024,
    }


def apart(*words: object) -> list[dict[str, Any]]:
    """Run a measure of this file in a process of its own, and return what it printed."""
    done = subprocess.run(
        [sys.executable, __file__, *map(str, words)], stdout=subprocess.PIPE, check=True, text=True, env=os.environ
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def show(line: dict[str, Any]) -> None:
    """Print a line for the process that asked."""
    print(json.dumps(line), flush=True)


# ---- snapshots of many cells


def make_cells(folder: Path, n_cells: int, per_dataset: int = 500_000) -> None:
    """Make an atlas of thin cells: two features, one value each."""
    atlas = ra.RaggedAtlas.create(str(folder))
    for number in range(max(1, n_cells // per_dataset)):
        n = min(n_cells, per_dataset)
        counts = np.zeros((n, 2), np.uint8)
        counts[:, 0] = 1
        types = pa.array(["B", "T", "NK"]).take(pa.array(np.arange(n) % 3))
        write_dataset(atlas._catalog, f"d{number}", ["CD3E", "MS4A1"], counts, {"cell_type": types.to_pylist()})
    atlas.snapshot("first")


def measure_snapshot(folder: Path) -> None:
    """Take a snapshot with nothing changed, then one after a small dataset was added, with what that takes."""
    atlas = ra.RaggedAtlas.open(str(folder))
    n_cells = sum(record.n_cells for record in read_records(atlas._catalog))
    small = [small_anndata(number) for number in (1, 2)]
    for name, before in (
        ("nothing changed", lambda: None),
        ("one dataset more", lambda: atlas.add(small[0], "small", organism="human", progress=False)),
        ("nothing changed after it", lambda: None),
    ):
        before()
        found = timed(atlas.snapshot)
        show({"what": name, "cells": n_cells, **found, "bytes a cell": found["mb"] * 2**20 / n_cells})


# ---- requests


def serve() -> None:
    """Run moto until the standard input ends."""
    import logging

    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
    sys.stdin.read()
    server.stop()


def measure_requests(latency: float, verbose: bool, n_datasets: int) -> None:
    """Count the requests of snapshots of an atlas of three datasets, or of copies of the first."""
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as moto,
    ):
        assert moto.stdout is not None
        with FaultyProxy(moto.stdout.readline().strip()) as proxy:
            local = Path(folder) / "my.atlas"
            atlas = ra.RaggedAtlas.create(str(local))
            for seed in (1, 2, 3):
                atlas.add(small_anndata(seed), f"d{seed}", organism="human", progress=False)
            if n_datasets > 3:
                multiply(atlas, n_datasets - 3)
            remote = Remote.make(proxy)
            remote.upload(local)
            proxy.latency = latency
            opened = ra.RaggedAtlas.open(remote.uri, storage_options=remote.options)
            for name, before in (
                ("first snapshot", lambda: None),
                ("nothing changed", lambda: None),
                ("one dataset more", lambda: opened.add(small_anndata(4), "d4", organism="human", progress=False)),
                ("one dataset less", lambda: opened.drop_dataset("d2")),
            ):
                before()
                proxy.requests.clear()
                found = timed(opened.snapshot)
                seen = list(proxy.requests)
                if verbose:
                    began = seen[0].began
                    for request in sorted(seen, key=lambda one: one.began):
                        path = request.path.split("my.atlas/", 1)[-1]
                        print(
                            f"{request.began - began:.3f} {request.ended - began:.3f} {request.method} {path[:110]} {request.query[:100]} {request.status}"
                        )
                show({"what": name, "requests": len(seen), "in sequence": count_in_sequence(seen), **found})
        moto.terminate()


# ---- purge


def measure_purge(n_snapshots: int) -> None:
    """Purge one of three datasets from many snapshots, between which a cell table changed by one tiny dataset."""
    with tempfile.TemporaryDirectory() as folder:
        atlas = ra.RaggedAtlas.create(folder + "/a")
        for seed in (1, 2, 3):
            atlas.add(small_anndata(seed), f"d{seed}", organism="human", progress=False)
        for number in range(n_snapshots):
            write_dataset(atlas._catalog, f"more{number}", ["CD3E", "MS4A1"], np.eye(2, dtype=np.uint8))
            atlas.snapshot()
        show({"what": f"purge, {n_snapshots} snapshots", **timed(lambda: atlas.purge("d2"))})
        problems = atlas.validate("deep")
        assert not [p for p in problems if p.level == "must"], problems
        show({"what": "validate deep", "problems": len(problems)})


# ---- one dataset more


def multiply(atlas: "ra.RaggedAtlas", n: int) -> None:
    """Register copies of the first dataset under uids of their own, in one commit: its cells, and links to its files."""
    catalog = atlas._catalog
    first = read_records(catalog)[0]
    cells = catalog.tables.read(CELLS, where=f"dataset_uid = '{first.uid}'")
    records, rows = [], []
    for _ in range(n):
        uid = new_uid()
        shutil.copytree(catalog.arrays.child(first.uid).path, catalog.arrays.child(uid).path, copy_function=os.link)
        facts = {
            "uid": uid,
            "name": f"{first.name}-{uid}",
            "zarr_group": f"{uid}/{first.feature_space}",
            "content_hash": uid,
        }
        for name in ("arrays", "facts"):
            facts[name] = getattr(first, name).replace(first.uid, uid)
        records.append(first.model_copy(update=facts))
        own = cells.set_column(0, cells.schema.field(0), new_uids(cells.num_rows))
        own = own.set_column(1, cells.schema.field(1), pa.array([uid] * cells.num_rows, pa.string()))
        at = cells.schema.get_field_index(first.pointer)
        pointer = own.column(at).combine_chunks()
        parts = [pointer.field(i) for i in range(pointer.type.num_fields)]
        parts[pointer.type.get_field_index("zarr_group")] = pa.array(
            [f"{uid}/{first.feature_space}"] * cells.num_rows, pa.string()
        )
        rows.append(
            own.set_column(at, cells.schema.field(at), pa.StructArray.from_arrays(parts, fields=list(pointer.type)))
        )
    catalog.tables.append(CELLS, pa.concat_tables(rows))
    commit_records(catalog, lambda _old: Commit(tuple(records)))


def measure_add(sizes: list[int], repeats: int) -> None:
    """Add tiny datasets to an atlas that has ever more of them."""
    with tempfile.TemporaryDirectory() as folder:
        atlas = ra.RaggedAtlas.create(folder + "/a")
        atlas.add(small_anndata(0), "d0", organism="human", progress=False)
        there, seed = 1, 1
        for size in sizes:
            while there < size:
                step = min(1000, size - there)
                multiply(atlas, step)
                there += step
            took = [timed(atlas.snapshot)]
            took.append(timed(atlas.snapshot))
            adds = []
            for _ in range(repeats):
                source = small_anndata(seed)
                adds.append(
                    timed(
                        lambda source=source, seed=seed: atlas.add(source, f"s{seed}", organism="human", progress=False)
                    )
                )  # type: ignore[misc]
                seed, there = seed + 1, there + 1
            row = {key: statistics.median(one[key] for one in adds[1:] or adds) for key in ("seconds", "cpu")}
            took.append(timed(atlas.snapshot))
            show({"what": "add", "datasets": size, **row})
            for name, one in zip(("first snapshot", "nothing changed", "after adds"), took, strict=True):
                show({"what": name, "datasets": size, **one})


def measure_pack(n_datasets: int, repeats: int) -> None:
    """Let small datasets share bundles, and read the same cells of the snapshots before and after in turn."""
    with tempfile.TemporaryDirectory() as folder:
        atlas = ra.RaggedAtlas.create(folder + "/a")
        atlas.add(small_anndata(0, 1000), "d0", organism="human", progress=False)
        multiply(atlas, n_datasets - 1)
        atlas.snapshot()
        store = Path(folder) / "a" / "zarr_store"

        def count() -> dict[str, int]:
            sizes = [path.stat().st_size for path in store.rglob("*") if path.is_file()]
            return {"objects": len(sizes), "bytes": sum(sizes)}

        show({"what": "files of their own", "datasets": n_datasets, **count()})
        show({"what": "optimize", "datasets": n_datasets, **timed(atlas.optimize)})
        show({"what": "optimize again", "datasets": n_datasets, **timed(atlas.optimize)})
        atlas.snapshot()
        queries = {name: atlas.checkout(n).query().sample(20_000) for name, n in (("own", 1), ("shared", 2))}
        took: dict[str, list[float]] = {name: [] for name in queries}
        for _ in range(repeats):
            for name, query in queries.items():
                took[name].append(timed(query.to_anndata)["cpu"])
        for name, seconds in took.items():
            show({"what": f"sample of 20,000 cells, {name} files", "cpu": statistics.median(seconds)})
        atlas.drop_snapshot(1)
        show({"what": "gc", **timed(lambda: atlas.gc(dry_run=False, grace=timedelta(0)))})
        show({"what": "one bundle", "datasets": n_datasets, **count()})


def main() -> None:
    """Measure what the command line names, and print it as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("snapshot", "requests", "purge", "add", "pack", "serve", "one"))
    parser.add_argument("--cells", type=int, nargs="+", default=[500_000])
    parser.add_argument(
        "--datasets", type=int, nargs="+", help="for add, by default 10 100 1000; for requests, by default 3"
    )
    parser.add_argument("--snapshots", type=int, nargs="+", default=[20])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--verbose", action="store_true", help="each request")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.what == "snapshot":
        for n_cells in asked.cells:
            with tempfile.TemporaryDirectory() as folder:
                make_cells(Path(folder) / "a", n_cells)
                for line in apart("one", "--folder", Path(folder) / "a"):
                    show(line)
    elif asked.what in ("purge", "pack"):
        for n in asked.snapshots if asked.what == "purge" else asked.datasets:
            measure_purge(n) if asked.what == "purge" else measure_pack(n, asked.repeats)
    else:
        {
            "serve": serve,
            "one": lambda: measure_snapshot(asked.folder),
            "requests": lambda: measure_requests(asked.latency, asked.verbose, (asked.datasets or [3])[0]),
            "add": lambda: measure_add(asked.datasets, asked.repeats),
        }[asked.what]()


if __name__ == "__main__":
    main()
