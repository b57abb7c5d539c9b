"""Measure raggedatlas, one operation per process.

``python benchmarks/ours.py OP --data FOLDER --atlas FOLDER`` prints one JSON line.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import measuring

if TYPE_CHECKING:
    from measuring import Asked, Figure


def measure_import(asked: Asked, figure: Figure) -> None:
    """Import the package and its main class (``import raggedatlas`` alone loads nothing)."""
    del asked
    before = len(sys.modules)
    with measuring.timed(figure):
        from raggedatlas import RaggedAtlas  # noqa: F401
    figure.extra["modules"] = len(sys.modules) - before


def measure_add(asked: Asked, figure: Figure) -> None:
    """Create an atlas, add the files in one call, and snapshot (which optimizes first).

    The peer's package imports itself and its libraries at once and ours when they are needed, so these are imported before.
    """
    import anndata  # noqa: F401
    import lance  # noqa: F401

    from raggedatlas import RaggedAtlas

    made = measuring.manifest(asked.data)
    with measuring.timed(figure):
        atlas = RaggedAtlas.create(str(asked.atlas), **asked.setting)
        atlas.add([str(asked.data / name) for name in made["files"]])
        added = time.perf_counter()
        atlas.snapshot()
        figure.extra["snapshot_seconds"] = time.perf_counter() - added
    figure.cells, figure.nnz = sum(made["cells"]), sum(made["nnz"])


def measure_add_csc(asked: Asked, figure: Figure) -> None:
    """Write the column-sorted copy of every dataset, and snapshot."""
    import raggedatlas as ra

    made = measuring.manifest(asked.data)
    atlas = ra.RaggedAtlas.open(str(asked.atlas))
    with measuring.timed(figure):
        for name in made["files"]:
            atlas.add_csc(name.removesuffix(".h5ad"))
        atlas.snapshot()
    figure.cells, figure.nnz = sum(made["cells"]), sum(made["nnz"])


def _open(asked: Asked) -> Any:
    import raggedatlas as ra

    return ra.RaggedAtlas.checkout_latest(str(asked.atlas))


def measure_open(asked: Asked, figure: Figure) -> None:
    """Open the newest snapshot; the first time loads the table library."""
    import raggedatlas  # noqa: F401

    for _ in range(asked.repeats):
        with measuring.timed(figure):
            view = _open(asked)
    figure.cells = sum(counted_cells(view).values())


def counted_cells(view: Any) -> dict[str, int]:
    counted = view.query().count("cell_type")
    if hasattr(counted, "to_pylist"):
        rows = [list(row.values()) for row in counted.to_pylist()]
    else:
        rows = [list(row) for row in dict(counted).items()]
    return {str(row[0]): int(row[-1]) for row in rows}


def measure_count(asked: Asked, figure: Figure) -> None:
    """Count the cells of each cell type."""
    view = _open(asked)
    for _ in range(asked.repeats):
        with measuring.timed(figure):
            counted = counted_cells(view)
    figure.cells = sum(counted.values())
    figure.answer = {"groups": len(counted), "cells": figure.cells}


def measure_cell_type(asked: Asked, figure: Figure) -> None:
    """Take every cell of one cell type, over the union of the genes, to AnnData."""
    made = measuring.manifest(asked.data)
    view = _open(asked)
    for _ in range(asked.repeats):
        with measuring.timed(figure):
            adata = view.query().where(f"cell_type = '{made['cell_type']}'").to_anndata()
        figure.answer = measuring.matrix_answer(adata)
        del adata
    figure.cells, figure.nnz = figure.answer["cells"], figure.answer["nnz"]


def measure_genes(asked: Asked, figure: Figure) -> None:
    """Take fifty genes over all cells to AnnData."""
    made = measuring.manifest(asked.data)
    view = _open(asked)
    for _ in range(asked.repeats):
        with measuring.timed(figure):
            adata = view.query().features(made["common_genes"]).to_anndata()
        figure.answer = measuring.matrix_answer(adata)
        del adata
    figure.cells, figure.nnz = figure.answer["cells"], figure.answer["nnz"]


MEASURES = {
    "import": measure_import,
    "add": measure_add,
    "add_csc": measure_add_csc,
    "open": measure_open,
    "count": measure_count,
    "cell_type": measure_cell_type,
    "genes": measure_genes,
    "genes_csc": measure_genes,
}

if __name__ == "__main__":
    measuring.run("raggedatlas", MEASURES)
