"""Published atlases: requests of opening and a first query, bytes of a random epoch, DataLoader workers, and publishing many datasets compared with `sync`.

`python benchmarks/published.py --cells 10000000` makes its atlases in a temporary folder. A web server on loopback waits `--latency` before each answer.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from scipy.sparse import csr_matrix

import raggedatlas as ra

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.object_store import WebServer, count_in_sequence


def make(folder: Path, n_datasets: int, n_cells: int, n_features: int, n_values: int) -> ra.RaggedAtlas:
    """Make an atlas of datasets of some cells, with a snapshot; each shares some of its features with others."""
    atlas, rng = ra.RaggedAtlas.create(folder), np.random.default_rng(0)
    files = []
    for number in range(n_datasets):
        columns = np.sort(rng.integers(0, n_features, (n_cells, n_values)), axis=1)
        counts = csr_matrix(
            (rng.integers(1, 9, columns.size).astype(np.float32), columns.ravel(), np.arange(n_cells + 1) * n_values),
            (n_cells, n_features),
        )
        counts.sum_duplicates()
        obs = pd.DataFrame(
            {"cell_type": pd.Categorical(rng.choice([f"type {i}" for i in range(20)], n_cells))},
            [f"{number}-{i}" for i in range(n_cells)],
        )
        var = pd.DataFrame(index=[f"GENE{i + (number % 20) * 5}" for i in range(n_features)])
        files.append(ad.AnnData(counts, obs, var))
        if len(files) == 100 or number == n_datasets - 1:
            atlas.add(files, organism="human", progress=False)
            files.clear()
    atlas.snapshot("v1")
    return atlas


def used(call: Callable[[], object]) -> float:
    """Return the processor seconds of a call."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    call()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def show_reading(folder: Path, latency: float) -> None:
    """Print requests and bytes of what readers do."""
    for n_cells, n_values in ((500, 100), (5_000, 1_000)):
        atlas = make(folder / f"reading-{n_cells}", 40, n_cells, 2_000, n_values)
        published = folder / f"published-{n_cells}"
        atlas.publish(published)
        local = atlas.checkout("v1").query()
        n_rows = sum(f.stat().st_size for f in (Path(atlas.uri) / "zarr_store").rglob("*") if f.is_file())
        shown = f"40 datasets of {n_cells:,} cells with {n_values:,} values"
        with WebServer(published, latency=latency) as server:
            began = time.perf_counter()
            view = ra.open(server.address)
            opened = len(server.requests), count_in_sequence(server.answered), time.perf_counter() - began
            found = view.query().where(cell_type="type 3").features(["GENE120", "GENE130"]).to_anndata()
            assert found.n_obs == local.where(cell_type="type 3").count()
            n_bytes = sum(one.n_bytes for one in server.answered)
            print(
                f"| {shown}: open; with a query of two genes of one type: requests, in sequence, bytes | {opened[0]}, {opened[1]}; "
                f"{len(server.requests)}, {count_in_sequence(server.answered)}, {n_bytes / 1e6:.1f} MB |"
            )
        with WebServer(published) as server:
            view = ra.open(server.address)
            query = view.query().sample(local.count() // 10, seed=1)
            share = n_rows * 0.1
            before = sum(one.n_bytes for one in server.answered)
            n = sum(len(batch) for batch in ra.Loader(query, 512, shuffle="full", seed=0))
            fetched = sum(one.n_bytes for one in server.answered) - before
            options = {"cache_dir": str(folder / f"cache-{n_cells}")}
            kept = ra.open(server.address, cache="10 GB", storage_options=options)
            before = sum(one.n_bytes for one in server.answered)
            sampled = kept.query().sample(local.count() // 10, seed=1)
            assert n == sum(len(batch) for batch in ra.Loader(sampled, 512, shuffle="full", seed=0))
            cached = sum(one.n_bytes for one in server.answered) - before
            print(
                f"| {shown}: random epoch of 10 % ({n:,} cells), bytes against those of their rows; with a cache on the disk "
                f"| {fetched / share:.2f}x, {cached / share:.2f}x of {share / 1e6:.1f} MB |"
            )


def show_publishing(folder: Path, n_cells: int) -> None:
    """Print files and processor time of publishing a thousand thin datasets, compared with `sync`."""
    atlas = make(folder / "many", 1_000, n_cells // 1_000, 200, 20)
    synced = used(lambda: atlas.sync(folder / "mirror"))
    published = used(lambda: atlas.publish(folder / "web"))
    n_files = sum(1 for _ in (folder / "web").iterdir())
    n_mirror = sum(1 for f in (folder / "mirror").rglob("*") if f.is_file())
    print(
        f"| publish {n_cells:,} thin cells of 1,000 datasets: files (of the mirror); processor time against sync | {n_files} ({n_mirror:,}); {published / synced:.2f}x of {synced:.1f} s |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=1_000_000)
    parser.add_argument("--latency", type=float, default=0.03)
    options = parser.parse_args()
    print("| | |\n|---|---|")
    with tempfile.TemporaryDirectory(prefix="raggedatlas-published-") as folder:
        show_reading(Path(folder), options.latency)
        show_publishing(Path(folder), options.cells)


if __name__ == "__main__":
    main()
