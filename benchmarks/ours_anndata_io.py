"""Measure raggedatlas reading, writing, copying and validating AnnData files, one operation per process.

``python benchmarks/ours_anndata_io.py OP --data FOLDER --atlas FOLDER --setting JSON`` prints one JSON line.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import measuring
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from measuring import Asked, Figure

ROWS = 2_000
"""Rows of a step, for both systems."""


def measure_build(asked: Asked, figure: Figure) -> None:
    """Make the atlas that is written from; not compared."""
    import raggedatlas as ra

    with measuring.timed(figure):
        atlas = ra.RaggedAtlas.create(str(asked.atlas))
        atlas.add(str(asked.data / "plain.h5ad"))
        atlas.snapshot()


def measure_read(asked: Asked, figure: Figure) -> None:
    """Walk down X in row blocks; only the reading is timed, not the sums that compare the answers."""
    from raggedatlas.formats.registry import open_source

    for _ in range(asked.repeats):
        spent, cells, nnz, total, columns = 0.0, 0, 0, 0.0, 0
        started = time.perf_counter()
        source = open_source(asked.data / asked.setting["file"])
        walk = source.blocks(("X",), ROWS)
        while True:
            (block,) = next(walk, (None,))
            spent += time.perf_counter() - started
            if block is None:
                break
            values = block.layers["values"]
            cells, nnz = cells + block.n_rows, nnz + len(values)
            total, columns = (
                total + float(values.sum(dtype=np.float64)),
                columns + int(block.indices.sum(dtype=np.int64)),
            )
            del block, values
            started = time.perf_counter()
        source.close()
        figure.seconds.append(spent)
    figure.cells, figure.nnz = cells, nnz
    figure.answer = {"cells": cells, "nnz": nnz, "sum": total, "columns": columns}


def measure_write(asked: Asked, figure: Figure) -> None:
    """Write a query for every cell of an atlas to a file; unless asked for the first, libraries are loaded before, as anndata's are."""
    import raggedatlas as ra

    view = ra.RaggedAtlas.checkout_latest(str(asked.atlas))
    if not asked.setting.get("first"):
        target = asked.data / f"ours-first{ending(asked)}"
        view.query().limit(100).write(str(target), **options(asked), overwrite=True)
        measuring.remove(target)
    repeat(asked, figure, lambda target: view.query().write(str(target), **options(asked)))


def measure_dataset(asked: Asked, figure: Figure) -> None:
    """Write the only dataset of an atlas as it was added."""
    import raggedatlas as ra

    view = ra.RaggedAtlas.checkout_latest(str(asked.atlas))
    (name,) = view.list_datasets()["name"]
    repeat(asked, figure, lambda target: view.dataset(name).write(target, **options(asked)))


def measure_copy(asked: Asked, figure: Figure) -> None:
    """Copy a file into another."""
    copied(asked, figure, asked.data / "plain.h5ad")


def measure_memory(asked: Asked, figure: Figure) -> None:
    """Write an AnnData that is in memory already; libraries are loaded before."""
    import anndata as ad

    adata = ad.read_h5ad(asked.data / "plain.h5ad")
    copied(asked, figure, adata, adata[:100].copy())


def copied(asked: Asked, figure: Figure, source: object, first: object = None) -> None:
    """Copy something as often as asked; `first` is copied before the clock starts."""
    from raggedatlas.formats.copying import copy
    from raggedatlas.formats.registry import open_sink

    if first is not None:
        target = asked.data / f"ours-first{ending(asked)}"
        copy(first, open_sink(target, **options(asked)))
        measuring.remove(target)
    repeat(asked, figure, lambda target: copy(source, open_sink(target, **options(asked))))


def repeat(asked: Asked, figure: Figure, write: Callable[[Path], object]) -> None:
    """Time the writing of a file as often as asked, and note how large it is."""
    target = asked.data / f"ours-{asked.op}{ending(asked)}"
    for _ in range(asked.repeats):
        measuring.remove(target)
        with measuring.timed(figure):
            write(target)
    figure.extra["bytes"] = measuring.bytes_on_disk(target)
    measuring.remove(target)


def ending(asked: Asked) -> str:
    """Return the suffix of the format to write."""
    return ".zarr" if "zarr_format" in asked.setting else ".h5ad"


def options(asked: Asked) -> dict[str, Any]:
    """Return the options that are passed to the sink."""
    return {name: asked.setting[name] for name in ("compression", "zarr_format") if name in asked.setting}


def measure_validate(asked: Asked, figure: Figure) -> None:
    """Validate a file in full."""
    from raggedatlas.formats.anndata.validation import validate

    path = asked.data / asked.setting["file"]
    for _ in range(asked.repeats):
        with measuring.timed(figure):
            problems = validate(path, level="full")
    figure.answer = {"problems": len(problems)}


MEASURES = {
    "build": measure_build,
    "read": measure_read,
    "write": measure_write,
    "dataset": measure_dataset,
    "copy": measure_copy,
    "memory": measure_memory,
    "validate": measure_validate,
}
"""Operation -> what measures it."""

if __name__ == "__main__":
    measuring.run("raggedatlas", MEASURES)
