"""Epochs of peers over one file, for `linked.py`; runs in their environment.

``python peer_linked.py annbatch|annbatch-zarr|tiledbsoma FILE STORE SECONDS`` prints JSON. `annbatch` writes a collection of its own from an h5ad,
`annbatch-zarr` reads the Zarr folder as it is, and `tiledbsoma` reads random cells of a copy.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

BATCH = 512


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _annbatch(loader: Any) -> Iterator[int]:
    return (batch["X"].shape[0] for batch in loader)


def _open(group: Any) -> Any:
    import anndata as ad

    return ad.AnnData(X=ad.io.sparse_dataset(group["X"]), obs=ad.io.read_elem(group["obs"])[["cell_type"]])


def _loader() -> Any:
    import annbatch
    import zarr
    import zarrs  # noqa: F401 - registers its pipeline

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    return annbatch.Loader(
        batch_size=BATCH,
        chunk_size=64,
        preload_nchunks=64,
        shuffle=True,
        preload_to_gpu=False,
        rng=np.random.default_rng(0),
    )


def own_collection(file: str, store: str) -> Iterator[int]:
    """Iterate over a collection that annbatch writes of the file."""
    import annbatch

    shutil.rmtree(store, ignore_errors=True)
    collection = annbatch.DatasetCollection(store)
    collection.add_adatas([file], shuffle=True, rng=np.random.default_rng(0))
    return _annbatch(_loader().use_collection(collection, load_adata=_open))


def same_zarr(file: str, store: str) -> Iterator[int]:
    """Iterate over the Zarr folder as it is."""
    import zarr

    return _annbatch(_loader().add_adata(_open(zarr.open_group(file, mode="r"))))


def soma(file: str, store: str) -> Iterator[int]:
    """Read random cells of a copy, a batch a call."""
    import anndata as ad
    import tiledbsoma
    import tiledbsoma.io

    shutil.rmtree(store, ignore_errors=True)
    tiledbsoma.io.from_anndata(store, ad.read_h5ad(file), measurement_name="RNA")
    experiment = tiledbsoma.Experiment.open(store)
    matrix = experiment.ms["RNA"].X["data"]
    order = np.random.default_rng(0).permutation(experiment.obs.count)
    for start in range(0, len(order), BATCH):
        cells = np.sort(order[start : start + BATCH])
        matrix.read((cells,)).tables().concat()
        yield len(cells)


PEERS: dict[str, Callable[[str, str], Iterator[int]]] = {
    "annbatch": own_collection, "annbatch-zarr": same_zarr, "tiledbsoma": soma,
}  # fmt: skip


def main() -> None:
    """Print cells per second of processor and wall time, after the first batch."""
    name, file, store, seconds = sys.argv[1:]
    sizes = PEERS[name](file, store)
    next(sizes)
    wall, cpu, cells = time.perf_counter(), _cpu(), 0
    for size in sizes:
        cells += size
        if time.perf_counter() - wall > float(seconds):
            break
    rates = {"cells_per_cpu_s": cells / (_cpu() - cpu), "cells_per_s": cells / (time.perf_counter() - wall)}
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
