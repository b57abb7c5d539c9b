"""Scenes for other viewers: a Parquet file for Embedding Atlas, a folder for Vitessce."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from raggedatlas.errors import QueryError
from raggedatlas.formats.output_files import written_aside
from raggedatlas.store.filters import calling_level
from raggedatlas.store.runtime import warnings_as
from raggedatlas.wings.viewer.columns import PointColumn
from raggedatlas.wings.viewer.palette import category_colors, read_colors
from raggedatlas.wings.viewer.scene import Scene

ID, X, Y = "id", "x", "y"
CELLS, CONFIG = "cells.adata.zarr", "vitessce.json"

_VITESSCE = "1.0.17"
_MAP = "X_map"
_ROOT = "A"


def write_parquet(scene: Scene, path: Path, *, genes: Sequence[str] = (), overwrite: bool = False) -> Path:
    """Write one Parquet file with ``id``, ``x``, ``y``, the metadata and genes, as Embedding Atlas opens it.

    Open it with ``embedding-atlas FILE --x x --y y --disable-projection``. A gene of the same name as a column is
    called ``gene:<name>``.
    """
    from pyarrow import parquet

    columns: dict[str, pa.Array] = {
        ID: scene.ids,
        X: pa.array(scene.coordinates[:, 0]),
        Y: pa.array(scene.coordinates[:, 1]),
    }
    for column in scene.columns:
        plain = column.values.cast(pa.string())
        if column.kind == "number":
            plain = pa.array(column.values.to_numpy(zero_copy_only=False), from_pandas=True)
        columns[_free(column.name, "obs", columns)] = plain
    for name, values in scene.read_genes(genes).items():
        columns[_free(name, "gene", columns)] = pa.array(values, from_pandas=True)
    with written_aside(path, overwrite=overwrite) as new:
        parquet.write_table(pa.table(columns), new, compression="zstd")
    return path


def _free(name: str, kind: str, taken: dict[str, pa.Array]) -> str:
    """Return a name that is not taken; DuckDB, which reads the file, ignores case."""
    known = {other.lower() for other in taken}
    while name.lower() in known:
        name = f"{kind}:{name}"
    return name


def write_vitessce(scene: Scene, path: Path, *, genes: Sequence[str] = (), overwrite: bool = False) -> Path:
    """Write a folder that Vitessce opens when it is served: cells as AnnData-Zarr, and a configuration.

    It holds ``vitessce.json`` and ``cells.adata.zarr``, whose X are the `genes`, and is to be served at the address of
    the scene's look, which the configuration names. Vitessce knows no missing values of genes: cells for which a gene
    was not measured have 0, of which a warning and the description in the configuration tell.
    """
    # First, so that an address that is refused leaves no files.
    config = vitessce_config(scene, genes)
    found = scene.read_genes(genes)
    values = np.column_stack([*found.values()]) if found else np.zeros((scene.n, 0), np.float32)
    lacking = {name: int(n) for name, n in zip(found, np.isnan(values).sum(axis=0), strict=True) if n}
    if lacking:
        genes_of = ", ".join(f"{name} of {n:,} cells" for name, n in lacking.items())
        note = f"Values that were not measured are 0 here: {genes_of}."
        warnings.warn(f"{path}: {note}", stacklevel=calling_level())
        config["description"] = " ".join(filter(None, [config["description"], note]))
    with written_aside(path, overwrite=overwrite) as folder:
        folder.mkdir()
        import anndata as ad
        import pandas as pd

        names = [_member(column.name, i) for i, column in enumerate(scene.columns)]
        obs = pd.DataFrame(index=pd.Index(scene.ids.to_pylist(), dtype=object, name=ID))
        for name, column in zip(names, scene.columns, strict=True):
            # Without their index: pandas would align a series with the ids, and all values would be missing.
            obs[name] = _series(column).to_numpy() if column.kind == "number" else _series(column).array
        var = pd.DataFrame(index=pd.Index(list(found), dtype=object))
        adata = ad.AnnData(
            X=np.where(np.isnan(values), np.float32(0), values), obs=obs, var=var, obsm={_MAP: scene.coordinates}
        )
        with warnings_as("ignore"):
            # By anndata in chunks of one gene, so that a viewer that shows a gene fetches only its column.
            adata.write_zarr(folder / CELLS, chunks=(scene.n, 1) if genes else None)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path


def _series(column: PointColumn) -> Any:  # noqa: ANN401  (a pandas series)
    import pandas as pd

    if column.kind == "category":
        codes = column.values.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        labels = pd.Index(column.values.dictionary.to_pylist(), dtype=object)
        return pd.Series(pd.Categorical.from_codes(codes, categories=labels))
    return pd.Series(column.values.to_numpy(zero_copy_only=False))


def _member(name: str, i: int) -> str:
    """Return a name that is valid in a path of a Zarr store."""
    return name if name.strip("._") and not set(name) & set('/\\"') and name != ID else f"column {i}"


def vitessce_config(scene: Scene, genes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the configuration of Vitessce: the map, the sets of cells with their colours, and genes if there are any.

    Raises `QueryError` for an address of the scene's look without a host, which Vitessce does not take.
    """
    sets = [
        {"name": column.name, "path": f"obs/{_member(column.name, i)}"}
        for i, column in enumerate(scene.columns)
        if column.kind == "category"
    ]
    sets.sort(key=lambda one: one["name"] != scene.colored_by())  # Vitessce colours by the first
    options: dict[str, Any] = {
        "obsEmbedding": [{"path": f"obsm/{_MAP}", "dims": [0, 1], "embeddingType": "map"}],
        "obsSets": sets,
    }
    if genes:
        options["obsFeatureMatrix"] = {"path": "X"}
    views = [_view("scatterplot", 0, 0, 8, 12, embedding=True), _view("obsSets", 8, 0, 4, 6)]
    views += [_view("featureList", 8, 6, 4, 6)] if genes else []
    address = scene.look.address
    parts = urlsplit(address)
    if parts.scheme not in {"http", "https"} or not parts.netloc or parts.query or parts.fragment:
        raise QueryError(
            f"address={address!r} is none that Vitessce reads from; write where the folder will be served, "
            "e.g. 'http://localhost:8000'."
        )
    found = []
    for column in scene.columns:
        if column.kind == "category":
            labels = column.values.dictionary.to_pylist()
            given = read_colors({column.name: column.colors}).get(column.name, {})
            for label, color in zip(labels, category_colors(labels, given), strict=True):
                found.append({"path": [column.name, label], "color": list(bytes.fromhex(color[1:]))})
    return {
        "version": _VITESSCE,
        "name": scene.look.title,
        "description": " ".join(filter(None, [scene.look.subtitle, *scene.notes])),
        "datasets": [
            {
                "uid": _ROOT,
                "name": scene.look.title,
                "files": [{"fileType": "anndata.zarr", "url": f"{address.rstrip('/')}/{CELLS}", "options": options}],
            }
        ],
        "coordinationSpace": {
            "dataset": {_ROOT: _ROOT},
            "embeddingType": {_ROOT: "map"},
            "obsSetColor": {_ROOT: found},
        },
        "layout": views,
        "initStrategy": "auto",
    }


def _view(component: str, x: int, y: int, w: int, h: int, *, embedding: bool = False) -> dict[str, Any]:
    scopes = {"dataset": _ROOT, "obsSetColor": _ROOT, **({"embeddingType": _ROOT} if embedding else {})}
    return {"component": component, "coordinationScopes": scopes, "x": x, "y": y, "w": w, "h": h}
