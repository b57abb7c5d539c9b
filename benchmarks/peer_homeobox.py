"""Measure homeobox, one operation per process; run by the interpreter of ``.venv-peers``.

``python benchmarks/peer_homeobox.py OP --data FOLDER --atlas FOLDER`` prints one JSON line.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import measuring

if TYPE_CHECKING:
    from pathlib import Path

    from measuring import Asked, Figure

SPACE = "gene_expression"


def measure_import(asked: Asked, figure: Figure) -> None:
    """Import the package, once."""
    del asked
    before = len(sys.modules)
    with measuring.timed(figure):
        import homeobox  # noqa: F401
    figure.extra["modules"] = len(sys.modules) - before


def _create_or_open(asked: Asked) -> Any:
    import homeobox as hox
    from peer_homeobox_schemas import CellSchema, GeneFeature

    return hox.create_or_open_atlas(
        atlas_path=str(asked.atlas),
        obs_schemas={"cells": CellSchema},
        dataset_table_name="datasets",
        dataset_schema=hox.DatasetSchema,
        registry_schemas={SPACE: GeneFeature},
    )


def _feature_uids(genes: list[str]) -> list[str]:
    import pandas as pd
    from peer_homeobox_schemas import GeneFeature

    frame = pd.DataFrame({"gene_id": genes, "gene_symbol": ""}, index=genes)
    GeneFeature.compute_stable_uids(frame)
    return list(frame["uid"])


def _add_file(atlas: Any, path: Path) -> int:
    import anndata as ad
    import homeobox as hox
    import pandas as pd
    import polars as pl
    from peer_homeobox_schemas import GeneFeature

    # Backed: the matrix is streamed, as homeobox's own documentation advises for files.
    adata = ad.read_h5ad(path, backed="r")
    var = pd.DataFrame(
        {"gene_id": adata.var_names.to_numpy(), "gene_symbol": adata.var["gene_symbol"].to_numpy()},
        index=adata.var_names,
    )
    GeneFeature.compute_stable_uids(var)
    atlas.register_features(SPACE, pl.from_pandas(var))
    adata.var = var
    obs = adata.obs
    adata.obs = obs.assign(cell_type=obs["cell_type"].astype(str), donor=obs["donor"].astype(str))
    record = hox.DatasetSchema(zarr_group=path.stem, feature_space=SPACE, n_rows=adata.n_obs)
    cells = hox.add_from_anndata(atlas, adata, field_name=SPACE, zarr_layer="counts", dataset_record=record)
    adata.file.close()
    return int(cells)


def measure_add(asked: Asked, figure: Figure) -> None:
    """Create an atlas, add every file, optimize and snapshot."""
    import homeobox  # noqa: F401
    import peer_homeobox_schemas  # noqa: F401

    made = measuring.manifest(asked.data)
    with measuring.timed(figure):
        atlas = _create_or_open(asked)
        for name in made["files"]:
            figure.cells += _add_file(atlas, asked.data / name)
        added = time.perf_counter()
        atlas.optimize()
        atlas.snapshot()
        figure.extra["snapshot_seconds"] = time.perf_counter() - added
    figure.nnz = sum(made["nnz"])


def measure_add_csc(asked: Asked, figure: Figure) -> None:
    """Write the column-sorted copy of every dataset, and snapshot."""
    from homeobox.ingestion import add_csc

    made = measuring.manifest(asked.data)
    atlas = _create_or_open(asked)
    with measuring.timed(figure):
        for name in made["files"]:
            add_csc(atlas, zarr_group=name.removesuffix(".h5ad"), field_name=SPACE)
        atlas.snapshot()
    figure.cells, figure.nnz = sum(made["cells"]), sum(made["nnz"])


def _open(asked: Asked) -> Any:
    import homeobox as hox

    return hox.RaggedAtlas.checkout_latest(str(asked.atlas))


def measure_open(asked: Asked, figure: Figure) -> None:
    """Open the newest snapshot."""
    import homeobox  # noqa: F401

    for _ in range(asked.repeats):
        with measuring.timed(figure):
            atlas = _open(asked)
    figure.cells = int(atlas.query().count())


def measure_count(asked: Asked, figure: Figure) -> None:
    """Count the cells of each cell type."""
    atlas = _open(asked)
    for _ in range(asked.repeats):
        with measuring.timed(figure):
            counted = atlas.query().count("cell_type")
    number = next(name for name in counted.columns if name != "cell_type")
    figure.cells = int(counted[number].sum())
    figure.answer = {"groups": counted.height, "cells": figure.cells}


def measure_cell_type(asked: Asked, figure: Figure) -> None:
    """Take every cell of one cell type, over the union of the genes, to AnnData."""
    made = measuring.manifest(asked.data)
    atlas = _open(asked)
    for _ in range(asked.repeats):
        with measuring.timed(figure):
            adata = atlas.query().where(f"cell_type = '{made['cell_type']}'").to_anndata()
        figure.answer = measuring.matrix_answer(adata)
        del adata
    figure.cells, figure.nnz = figure.answer["cells"], figure.answer["nnz"]


def measure_genes(asked: Asked, figure: Figure) -> None:
    """Take fifty genes over all cells to AnnData."""
    made = measuring.manifest(asked.data)
    atlas = _open(asked)
    uids = _feature_uids(made["common_genes"])
    for _ in range(asked.repeats):
        with measuring.timed(figure):
            adata = atlas.query().features(uids, feature_space=SPACE).to_anndata()
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
    measuring.run("homeobox", MEASURES)
