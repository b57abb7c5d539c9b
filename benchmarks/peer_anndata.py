"""Measure anndata reading and writing its files, one operation per process.

``python benchmarks/peer_anndata.py OP --data FOLDER --atlas FOLDER --setting JSON`` prints one JSON line.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING

import measuring
import numpy as np
from maker import Recipe, make
from ours_anndata_io import ROWS, ending

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from anndata import AnnData
    from measuring import Asked, Figure


def measure_prepare(asked: Asked, figure: Figure) -> None:
    """Make the files as anndata writes them by default, without and with gzip; not compared."""
    import anndata as ad

    cells = int(asked.setting["cells"])
    made = make(asked.data / "made", Recipe(cells=cells, seed=4, genes=(30_000, 25_000), library=(5_200.0, 5_200.0)))
    with measuring.timed(figure):
        adata = ad.read_h5ad(asked.data / "made" / made.files[0])
        adata.write_h5ad(asked.data / "plain.h5ad")
        if asked.setting["gzip"]:
            adata.write_h5ad(asked.data / "gzip.h5ad", compression="gzip")
        ad.read_h5ad(asked.data / "made" / made.files[1]).write_h5ad(asked.data / "other.h5ad")
    shutil.rmtree(asked.data / "made")
    figure.cells, figure.nnz = cells, made.nnz[0]


def measure_read(asked: Asked, figure: Figure) -> None:
    """Walk down X in row blocks by `sparse_dataset`; only the reading is timed, not the sums."""
    import h5py
    from anndata.io import sparse_dataset

    for _ in range(asked.repeats):
        spent, nnz, total, columns = 0.0, 0, 0.0, 0
        started = time.perf_counter()
        with h5py.File(asked.data / asked.setting["file"]) as file:
            matrix = sparse_dataset(file["X"])
            cells = matrix.shape[0]
            for start in range(0, cells, ROWS):
                block = matrix[start : start + ROWS]
                spent += time.perf_counter() - started
                nnz += block.nnz
                total += float(block.data.sum(dtype=np.float64))
                columns += int(block.indices.sum(dtype=np.int64))
                del block
                started = time.perf_counter()
        figure.seconds.append(spent)
    figure.cells, figure.nnz = cells, nnz
    figure.answer = {"cells": cells, "nnz": nnz, "sum": total, "columns": columns}


def measure_whole(asked: Asked, figure: Figure) -> None:
    """Read a complete file."""
    import anndata as ad

    for _ in range(asked.repeats):
        with measuring.timed(figure):
            adata = ad.read_h5ad(asked.data / asked.setting["file"])
        figure.nnz = int(adata.X.nnz)
        del adata


def measure_write(asked: Asked, figure: Figure) -> None:
    """Write an AnnData that is in memory already; where asked, wait until it is on the disk, as ours always does."""
    import anndata as ad

    adata = ad.read_h5ad(asked.data / "plain.h5ad")
    repeat(asked, figure, lambda target: write(adata, asked, target))


def measure_copy(asked: Asked, figure: Figure) -> None:
    """Read a complete file and write it."""
    import anndata as ad

    repeat(asked, figure, lambda target: write(ad.read_h5ad(asked.data / "plain.h5ad"), asked, target))


def write(adata: AnnData, asked: Asked, target: Path) -> None:
    """Write to h5ad, or to the Zarr format that is asked for."""
    import anndata as ad

    if "zarr_format" in asked.setting:
        # Shards are what anndata says that it will make by default, and warns of as long as nobody chooses.
        with ad.settings.override(zarr_write_format=asked.setting["zarr_format"], auto_shard_zarr_v3=False):
            adata.write_zarr(target)
    else:
        adata.write_h5ad(target, compression=asked.setting.get("compression"))
    if asked.setting.get("synced"):
        with target.open("rb") as file:
            os.fsync(file.fileno())


def repeat(asked: Asked, figure: Figure, act: Callable[[Path], None]) -> None:
    """Time the writing of a file as often as asked, and note how large it is."""
    target = asked.data / f"anndata-{asked.op}{ending(asked)}"
    for _ in range(asked.repeats):
        measuring.remove(target)
        with measuring.timed(figure):
            act(target)
    figure.extra["bytes"] = measuring.bytes_on_disk(target)
    measuring.remove(target)


MEASURES = {
    "prepare": measure_prepare,
    "read": measure_read,
    "whole": measure_whole,
    "write": measure_write,
    "copy": measure_copy,
}
"""Operation -> what measures it."""

if __name__ == "__main__":
    measuring.run("anndata", MEASURES)
