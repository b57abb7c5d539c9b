"""Measure raggedatlas reading, writing, copying and validating h5ad files, one operation per process.

``python benchmarks/ours_anndata_io.py OP --data FOLDER --atlas FOLDER --setting JSON`` prints one JSON line.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import measuring
import numpy as np

if TYPE_CHECKING:
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
    target = asked.data / f"ours-{asked.setting['compression']}.h5ad"
    if not asked.setting.get("first"):
        view.query().limit(100).write(str(target), compression=asked.setting["compression"], overwrite=True)
    for _ in range(asked.repeats):
        target.unlink(missing_ok=True)
        with measuring.timed(figure):
            view.query().write(str(target), compression=asked.setting["compression"])
    figure.extra["bytes"] = target.stat().st_size
    target.unlink()


def measure_dataset(asked: Asked, figure: Figure) -> None:
    """Write the only dataset of an atlas as it was added."""
    import raggedatlas as ra

    view = ra.RaggedAtlas.checkout_latest(str(asked.atlas))
    (name,) = view.list_datasets()["name"]
    target = asked.data / f"ours-dataset-{asked.setting['compression']}.h5ad"
    for _ in range(asked.repeats):
        target.unlink(missing_ok=True)
        with measuring.timed(figure):
            view.dataset(name).write(target, compression=asked.setting["compression"])
    figure.extra["bytes"] = target.stat().st_size
    target.unlink()


def measure_copy(asked: Asked, figure: Figure) -> None:
    """Copy a file into another of the same format."""
    from raggedatlas.formats.copying import copy
    from raggedatlas.formats.registry import open_sink

    target = asked.data / f"ours-copy-{asked.setting['compression']}.h5ad"
    for _ in range(asked.repeats):
        target.unlink(missing_ok=True)
        with measuring.timed(figure):
            copy(asked.data / "plain.h5ad", open_sink(target, compression=asked.setting["compression"]))
    figure.extra["bytes"] = target.stat().st_size
    target.unlink()


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
    "validate": measure_validate,
}
"""Operation -> what measures it."""

if __name__ == "__main__":
    measuring.run("raggedatlas", MEASURES)
