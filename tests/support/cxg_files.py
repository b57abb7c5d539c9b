"""Small CXG folders of every version and layout, written straight through TileDB, so that they owe nothing to our writer."""

import atexit
import json
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raggedatlas.wings.cxg.tiledb_arrays import context, import_tiledb, open_array

Form = Literal["split", "dense", "sparse", "old", "unnamed"]
FORMS: tuple[Form, ...] = ("split", "dense", "sparse", "old", "unnamed")
"""0.3.0 with Xr and Xc, 0.3.0 dense, 0.2.0 sparse with column shift, 0.1 dense, and the unnamed version."""

VERSIONS: dict[Form, str | None] = {
    "split": "0.3.0",
    "dense": "0.3.0",
    "sparse": "0.2.0",
    "old": "0.1",
    "unnamed": None,
}
KINDS = ("T cell", "B cell", "NK cell")

VALUES: NDArray[np.float32] = np.array(
    [
        [1, 0, 0, 2.5, 0],
        [0, 0, 3, 0, 0],
        [0, 4, 0, 0, 0],
        [0, 0, 5, 0, 6],
        [0, 0, 0, 0, 7],
        [8, 0, 0, 0, 0],
    ],
    np.float32,
)
"""Cells by features, of each."""

SHIFT: NDArray[np.float32] = np.array([0.5, 0, 0, 0, 0], np.float32)
"""Of the sparse form, subtracted from what is stored."""

N_OBS, N_VAR = VALUES.shape

OBS: dict[str, NDArray[Any]] = {
    "name_0": np.array([f"cell {i}" for i in range(N_OBS)], dtype=object),
    "kind": np.array([0, 1, 2, -1, 0, 1], np.int8),
    "sample": np.array(["a", "ä", "", "b", "b", "a"], dtype=object),
    "batch": np.array([7, 7, 9, 9, 9, 7], np.int32),
    "n_counts": np.arange(N_OBS, dtype=np.int32),
    "percent.mt": np.linspace(0, 1, N_OBS, dtype=np.float32),
    "is_useful": np.array([1, 0, 1, 1, 0, 1], np.uint8),
}
"""Columns of the cells: the index, codes with a missing value, text, a category of numbers, numbers, booleans."""

OBS_HINTS: dict[str, Any] = {
    "index": "name_0",
    "name_0": {"type": "string"},
    "kind": {"type": "categorical", "categories": list(KINDS)},
    "sample": {"type": "string"},
    "batch": {"type": "categorical"},
    "n_counts": {"type": "int32"},
    "percent.mt": {"type": "float32"},
    "is_useful": {"type": "boolean"},
}

VAR: dict[str, NDArray[Any]] = {
    "name_0": np.array([f"ENSG{i:011d}" for i in range(N_VAR)], dtype=object),
    "feature_name": np.array(["CD3D", "MS4A1", "NKG7", "LYZ", "PPBP"], dtype=object),
    "feature_is_filtered": np.array([0, 0, 1, 0, 0], np.uint8),
}

VAR_HINTS: dict[str, Any] = {
    "index": "feature_name",
    "name_0": {"type": "string"},
    "feature_name": {"type": "string"},
    "feature_is_filtered": {"type": "boolean"},
}

EMBEDDINGS: dict[str, NDArray[Any]] = {
    "umap": np.linspace(-1, 1, 2 * N_OBS, dtype=np.float32).reshape(N_OBS, 2),
    "pca": np.arange(3 * N_OBS, dtype=np.float32).reshape(N_OBS, 3),
}

COLORS = {"kind": dict(zip(KINDS, ("#ff0000", "#00ff00", "#0000FF"), strict=True))}

LIBRARIES = {
    "library": {
        "image_properties": {"resolution": "hires", "crop_coords": [10, 0, 90, 80], "width": 80, "height": 80},
        "scalefactors": {"spot_diameter_fullres": 89.5, "tissue_hires_scalef": 0.15},
    }
}

CORPORA = {"schema_version": "5.1.0", "title": "Small", "default_embedding": "X_umap"}


def write_cxg(path: str | Path, form: Form = "split") -> Path:
    """Write a small CXG without fault.

    Parameters
    ----------
    path : str or Path
        Its folder, which must not exist.
    form : {"split", "dense", "sparse", "old", "unnamed"}
        Which version and layout.

    Returns
    -------
    Path
        The folder.
    """
    return Path(shutil.copytree(_template(form), path))


@cache
def _template(form: Form) -> Path:
    """Write a CXG once per process: a copy of it takes a fraction of the time."""
    folder = mkdtemp(prefix="raggedatlas-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / f"{form}.cxg"
    make_group(path)
    old = form in ("sparse", "old", "unnamed")
    columns, hints = dict(OBS), dict(OBS_HINTS)
    if old:
        # Before 0.3.0 there are no codes (C13); categories are text, and a missing one is `nan`.
        columns["kind"] = np.array([KINDS[code] if code >= 0 else "nan" for code in OBS["kind"]], dtype=object)
        hints["kind"] = {"type": "categorical"}
    write_frame(path / "obs", columns, hints)
    write_frame(path / "var", VAR, VAR_HINTS)
    write_matrix(path, form)
    make_group(path / "emb")
    for name, values in EMBEDDINGS.items():
        write_dense(path / "emb" / name, values)
    if VERSIONS[form] is not None:
        write_dense(path / "cxg_group_metadata", np.zeros(1), dim_dtype=np.uint64)
        set_meta(path / "cxg_group_metadata", **group_metadata(form))
    if not old:
        write_dense(path / "uns", np.zeros(1), dim_dtype=np.uint64)
        set_meta(path / "uns", spatial=json.dumps(LIBRARIES))
    return path


def group_metadata(form: Form) -> dict[str, str]:
    """Return the metadata of the whole, as each version has them."""
    found = {
        "cxg_version": str(VERSIONS[form]),
        "cxg_properties": json.dumps({"title": "Small", "about": "https://example.org/small"}),
        "cxg_category_colors": json.dumps(COLORS),
    }
    # Version 0.1 has no corpora (C70), and schema 2 needs `X_normalization` (C60).
    if form != "old":
        extra = {"X_normalization": "none", "schema_version": "2.0.0"} if form == "sparse" else {}
        found["corpora"] = json.dumps({**CORPORA, **extra})
    return found


def write_matrix(path: Path, form: Form) -> None:
    """Write the expression values in the layout of a form."""
    if form == "split":
        rows, columns = np.nonzero(VALUES)
        write_half(path / "Xr", "obs", N_OBS, (rows, columns, VALUES[rows, columns]))
        # The last key of `lexsort` is the first to sort by: columns, then rows.
        order = np.lexsort((rows, columns))
        rows, columns = rows[order], columns[order]
        write_half(path / "Xc", "var", N_VAR, (columns, rows, VALUES[rows, columns]))
    elif form == "sparse":
        # Where the shift is not zero, every cell is stored, also those whose value is zero.
        stored = VALUES - SHIFT
        rows, columns = np.nonzero(stored)
        write_sparse(path / "X", (rows, columns, stored[rows, columns]))
        write_dense(path / "X_col_shift", SHIFT)
    else:
        write_dense(path / "X", VALUES, names=("obs", "var"))


def make_group(path: Path) -> None:
    """Create a TileDB group."""
    import_tiledb().group_create(str(path), ctx=context())


def write_frame(path: Path, columns: Mapping[str, NDArray[Any]], hints: Any) -> None:
    """Write a table in the place of whatever is there, with its ``cxg_schema`` unless that is None."""
    tiledb = import_tiledb()
    n = len(next(iter(columns.values())))
    attributes = [
        tiledb.Attr(
            name, dtype="U" if values.dtype == object else values.dtype, var=values.dtype == object, ctx=context()
        )
        for name, values in columns.items()
    ]
    create(path, [_dim("__dim_0", n)], attributes)
    with open_array(path, "w") as array:
        array[:] = {name: values.astype("U") if values.dtype == object else values for name, values in columns.items()}
    if hints is not None:
        set_meta(path, cxg_schema=json.dumps(hints))


def write_dense(
    path: Path,
    values: NDArray[Any],
    *,
    names: Sequence[str] = ("__dim_0", "__dim_1"),
    attribute: str = "",
    dim_dtype: Any = np.uint32,
    start: int = 0,
) -> None:
    """Write a dense array in the place of whatever is there."""
    tiledb = import_tiledb()
    axes = [_dim(name, n, dim_dtype, start) for name, n in zip(names, values.shape, strict=False)]
    create(path, axes, [tiledb.Attr(attribute, dtype=values.dtype, ctx=context())])
    with open_array(path, "w") as array:
        array[tuple(slice(start, start + n) for n in values.shape)] = {attribute: values} if attribute else values


def write_half(path: Path, axis: str, n: int, entries: tuple[NDArray[Any], ...], **options: Any) -> None:
    """Write `Xr` or `Xc`: places along the axis, along the other, and values."""
    tiledb = import_tiledb()
    places, others, values = entries
    other = options.pop("other", "var" if axis == "obs" else "obs")
    attributes = [
        tiledb.Attr("", dtype=values.dtype, ctx=context()),
        tiledb.Attr(other, dtype=options.pop("other_dtype", np.uint32), ctx=context()),
    ]
    create(path, [_dim(axis, n)], attributes, sparse=True, allows_duplicates=True, **options)
    with open_array(path, "w") as array:
        array[places] = {"": values, other: others}


def write_sparse(path: Path, entries: tuple[NDArray[Any], ...]) -> None:
    """Write `X` with two sparse axes: cells, features, values."""
    tiledb = import_tiledb()
    rows, columns, values = entries
    attributes = [tiledb.Attr("", dtype=values.dtype, ctx=context())]
    axes = [_dim("obs", N_OBS), _dim("var", N_VAR)]
    create(path, axes, attributes, sparse=True, allows_duplicates=True)
    with open_array(path, "w") as array:
        array[rows, columns] = values


def create(path: Path, axes: Sequence[Any], attributes: Sequence[Any], **options: Any) -> None:
    """Create an array in the place of whatever is there."""
    tiledb = import_tiledb()
    shutil.rmtree(path, ignore_errors=True)
    schema = tiledb.ArraySchema(tiledb.Domain(*axes, ctx=context()), attrs=list(attributes), ctx=context(), **options)
    tiledb.Array.create(str(path), schema, ctx=context())


def set_meta(path: Path, **values: Any) -> None:
    """Set metadata of an array; None removes."""
    with open_array(path, "w") as array:
        for key, value in values.items():
            if value is None:
                del array.meta[key]
            else:
                array.meta[key] = value


def set_hints(path: Path, name: str, **hints: Any) -> None:
    """Change entries of the ``cxg_schema`` of a table; None removes."""
    with open_array(path / name) as array:
        found = json.loads(array.meta["cxg_schema"])
    changed = {**found, **hints}
    set_meta(path / name, cxg_schema=json.dumps({key: value for key, value in changed.items() if value is not None}))


def _dim(name: str, n: int, dtype: Any = np.uint32, start: int = 0) -> Any:
    tiledb = import_tiledb()
    # Bounds are inclusive, and TileDB refuses a tile that is longer than its axis.
    return tiledb.Dim(name, domain=(start, start + n - 1), tile=min(n, 1000), dtype=dtype, ctx=context())
