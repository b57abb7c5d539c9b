"""The ways to break each numbered rule of a CXG, one folder with one fault for each."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raggedatlas.wings.cxg.tiledb_arrays import context, import_tiledb
from support.cxg_files import (
    EMBEDDINGS,
    N_OBS,
    N_VAR,
    OBS,
    OBS_HINTS,
    SHIFT,
    VALUES,
    VAR,
    VAR_HINTS,
    Form,
    create,
    make_group,
    set_hints,
    set_meta,
    write_dense,
    write_frame,
    write_half,
    write_sparse,
)

Change = Callable[[Path], None]

META = "cxg_group_metadata"


@dataclass(frozen=True, slots=True)
class CxgDamage:
    """One way to break one rule.

    Parameters
    ----------
    rule : str
        The rule.
    form : str
        Which of the small CXGs is damaged.
    label : str
        What is done.
    change : callable
        Does it to the folder.
    level : {"must", "should", "practice"}
        How bad it is.
    also : frozenset of str
        Other rules that this breaks.
    """

    rule: str
    form: Form
    label: str
    change: Change
    level: str = "must"
    also: frozenset[str] = frozenset()


def _damages(*found: tuple[Any, ...]) -> Iterator[CxgDamage]:
    """Read rows of rule, form, label, change, and, in any order, a milder level and what else is broken."""
    for rule, form, label, change, *rest in found:
        also = next((one for one in rest if isinstance(one, set)), set())
        level = next((one for one in rest if isinstance(one, str)), "must")
        yield CxgDamage(rule, form, label, change, level, frozenset(also))


def _drop(*names: str) -> Change:
    def change(path: Path) -> None:
        for name in names:
            shutil.rmtree(path / name)

    return change


def _meta(name: str, **values: Any) -> Change:
    return lambda path: set_meta(path / name, **values)


def _json(key: str, value: Any) -> Change:
    return _meta(META, **{key: json.dumps(value)})


def _hints(table: str, **hints: Any) -> Change:
    return lambda path: set_hints(path, table, **hints)


def _dense(name: str, values: Any, **options: Any) -> Change:
    return lambda path: write_dense(path / name, np.asarray(values), **options)


def _obs(column: str, values: Any, hint: Any = None) -> Change:
    """Write obs again with another or one more column."""
    hints = {**OBS_HINTS, column: hint or OBS_HINTS.get(column, {"type": "int32"})}
    return lambda path: write_frame(path / "obs", {**OBS, column: np.asarray(values)}, hints)


def _entries() -> tuple[Any, Any, Any]:
    rows, columns = np.nonzero(VALUES)
    return rows, columns, VALUES[rows, columns]


def _half(change: Callable[[Any, Any, Any], tuple[Any, Any, Any]], *, both: bool = True) -> Change:
    """Write Xr, and mostly Xc, again with other entries: cells, features, values."""

    def write(path: Path) -> None:
        rows, columns, values = change(*_entries())
        write_half(path / "Xr", "obs", N_OBS, (rows, columns, values))
        if both:
            write_half(path / "Xc", "var", N_VAR, (columns, rows, values))

    return write


def _replaced(values: Any, at: Any, value: Any) -> Any:
    changed = values.copy()
    changed[at] = value
    return changed


def _array_as_group(name: str) -> Change:
    def change(path: Path) -> None:
        shutil.rmtree(path / name)
        make_group(path / name)

    return change


def _group_as_array(name: str) -> Change:
    return lambda path: write_dense(path / name, np.zeros(1))


def _cut(name: str) -> Change:
    """Cut a file of values short."""

    def change(path: Path) -> None:
        # Files of attributes begin with `a`; those of coordinates, with `d`, stay intact.
        largest = max((path / name).rglob("a*.tdb"), key=lambda at: at.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-9])

    return change


def _scratch(name: str, pattern: str) -> Change:
    """Overwrite the middle of a file."""

    def change(path: Path) -> None:
        at = next(one for one in sorted((path / name).rglob(pattern)) if one.is_file() and one.stat().st_size)
        raw = bytearray(at.read_bytes())
        # Nothing is compressed here: the middle of `Xr` is values, which become NaN; that of six codes is a header.
        middle = len(raw) // 2
        raw[middle - 4 : middle + 4] = b"\xff" * 8
        at.write_bytes(bytes(raw))

    return change


def _emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _filled() -> tuple[Any, Any, Any]:
    rows, columns = np.nonzero(np.ones_like(VALUES))
    # From 1, so that no zero is stored (C20).
    return rows, columns, np.arange(1, 1 + VALUES.size, dtype="f4")


def _unmark(path: Path) -> None:
    for mark in ("__tiledb_group.tdb", "__group", "__meta"):
        at = path / mark
        if at.is_dir():
            shutil.rmtree(at)
        at.unlink(missing_ok=True)


def _part(name: str, *starts: int) -> Change:
    """Write only some rows of an array, two from each start."""

    def change(path: Path) -> None:
        tiledb = import_tiledb()
        with tiledb.open(str(path / name), ctx=context()) as array:
            schema = array.schema
        old = [schema.domain.dim(i) for i in range(schema.domain.ndim)]
        axes = [tiledb.Dim(d.name, domain=d.domain, tile=1, dtype=d.dtype, ctx=context()) for d in old]
        attributes = [schema.attr(i) for i in range(schema.nattr)]
        # `create` removes the old array with its metadata.
        meta = _metadata(path / name)
        create(path / name, axes, attributes)
        columns = OBS if name == "obs" else VAR
        with tiledb.open(str(path / name), "w", ctx=context()) as array:
            for start in starts:
                rows = slice(start, start + 2)
                if name in ("obs", "var"):
                    array[rows] = {k: v[rows].astype("U") if v.dtype == object else v[rows] for k, v in columns.items()}
                else:
                    others = schema.shape[1:]
                    array[(rows, *(slice(0, n) for n in others))] = np.ones((2, *others), "f4")
        set_meta(path / name, **meta)

    return change


def _metadata(path: Path) -> dict[str, Any]:
    with import_tiledb().open(str(path), ctx=context()) as array:
        return dict(array.meta.items())


def _sparse_frame(table: str) -> Change:
    def change(path: Path) -> None:
        tiledb, meta = import_tiledb(), _metadata(path / table)
        n = N_OBS if table == "obs" else N_VAR
        axis = tiledb.Dim("__dim_0", domain=(0, n - 1), tile=n, dtype=np.uint32, ctx=context())
        create(path / table, [axis], [tiledb.Attr("name_0", dtype="U", var=True, ctx=context())], sparse=True)
        with tiledb.open(str(path / table), "w", ctx=context()) as array:
            array[np.arange(n)] = np.array([f"n{i}" for i in range(n)])
        set_meta(path / table, **meta)

    return change


def _two_values(path: Path) -> None:
    tiledb = import_tiledb()
    axes = [
        tiledb.Dim(n, domain=(0, s - 1), tile=s, dtype=np.uint32, ctx=context()) for n, s in (("obs", 6), ("var", 5))
    ]
    create(path / "X", axes, [tiledb.Attr(n, dtype=np.float32, ctx=context()) for n in ("", "more")])
    with tiledb.open(str(path / "X"), "w", ctx=context()) as array:
        array[:, :] = {"": VALUES, "more": VALUES}


def _several_per_row(path: Path) -> None:
    tiledb, meta = import_tiledb(), _metadata(path / "obs")
    axis = tiledb.Dim("__dim_0", domain=(0, N_OBS - 1), tile=N_OBS, dtype=np.uint32, ctx=context())
    pair = np.dtype([("", np.int32), ("", np.int32)])
    create(
        path / "obs",
        [axis],
        [tiledb.Attr("name_0", dtype="U", var=True, ctx=context()), tiledb.Attr("pair", dtype=pair, ctx=context())],
    )
    with tiledb.open(str(path / "obs"), "w", ctx=context()) as array:
        array[:] = {"name_0": OBS["name_0"].astype("U"), "pair": np.zeros(N_OBS, pair)}
    set_meta(path / "obs", **meta)


def _large_tile(path: Path) -> None:
    tiledb = import_tiledb()
    axes = [
        tiledb.Dim(f"__dim_{i}", domain=(0, n - 1), tile=t, dtype=np.uint32, ctx=context())
        for i, (n, t) in enumerate(((N_OBS, N_OBS), (8_000_000, 8_000_000)))
    ]
    # Declared and never written, which breaks C23 too but takes no space.
    create(path / "emb" / "wide", axes, [tiledb.Attr("", dtype=np.float32, ctx=context())])


def _sparse_x(path: Path) -> None:
    _drop("Xr", "Xc")(path)
    write_sparse(path / "X", _entries())


def _obs_of(n: int) -> Change:
    return lambda path: write_frame(path / "obs", {name: values[:n] for name, values in OBS.items()}, OBS_HINTS)


_OTHER_N = "another number of cells"
_TEXT = np.array(["1", "2", "3", "4", "5", "6"], dtype=object)

GENERAL = tuple(_damages(
    ("C00", "dense", "values cut short", _cut("X")),
    ("C00", "split", "half of the values are missing", _cut("Xr")),
    ("C00", "split", "a column overwritten", _scratch("obs", "a1.tdb")),
    ("C00", "dense", "a schema overwritten", _scratch("emb/umap/__schema", "*")),
    ("C01", "split", "the mark of the group is lost", _unmark),
    ("C01", "split", "an empty folder", _emptied),
    ("C02", "split", "axes of 64 bits", _dense("emb/umap", EMBEDDINGS["umap"], dim_dtype=np.uint64)),
    ("C02", "dense", "axes from 1", _dense("X", VALUES, names=("obs", "var"), start=1)),
    ("C02", "dense", "metadata of two cells of 64 bits", lambda path: _again(path, np.zeros(2))),
    ("C03", "dense", "X of float64", _dense("X", VALUES.astype("f8"), names=("obs", "var")), "should"),
    ("C03", "split", "an embedding of float64", _dense("emb/umap", EMBEDDINGS["umap"].astype("f8")), "practice"),
    ("C03", "split", "values of int32", _half(lambda r, c, v: (r, c, v.astype("i4"))), "should"),
    ("C04", "dense", "X of dates", _dense("X", VALUES.astype("i8").astype("M8[s]"), names=("obs", "var"))),
    ("C04", "split", "an embedding of booleans", _dense("emb/umap", EMBEDDINGS["umap"] > 0)),
    ("C05", "split", "a tile of ten million cells", lambda path: write_half(path / "Xr", "obs", N_OBS, _entries(), capacity=10_000_000), "practice"),
    ("C05", "split", "a dense tile of 180 MB", _large_tile, "practice", {"C23"}),
    ("C07", "dense", "NaN in a dense X", _dense("X", _replaced(VALUES, (2, 2), np.nan), names=("obs", "var")), "practice"),
    ("C07", "split", "an infinite value in Xr and Xc", _half(lambda r, c, v: (r, c, _replaced(v, 2, -np.inf))), "practice"),
    # One of 30 values is 3.3 %, below `SPARSEST`.
    ("C06", "dense", "a dense X of one value", _dense("X", np.eye(N_OBS, N_VAR, dtype="f4") * (np.arange(N_VAR) < 1), names=("obs", "var")), "should"),
    ("C06", "split", "a sparse X without zeros", _half(lambda r, c, v: _filled()), "should"),
))  # fmt: skip


def _again(path: Path, values: Any) -> None:
    meta = _metadata(path / META)
    write_dense(path / META, values, dim_dtype=np.uint64)
    set_meta(path / META, **meta)


ARRAYS = tuple(_damages(
    ("C10", "split", "no obs", _drop("obs")),
    ("C10", "split", "obs is a group", _array_as_group("obs")),
    # Only `name_0` is written again: hints (C30) and colours (C53) of the other columns point nowhere.
    ("C10", "split", "obs is sparse", _sparse_frame("obs"), {"C30", "C53"}),
    ("C10", "split", "two rows of obs are written", _part("obs", 0)),
    ("C10", "split", "rows in the middle of obs are not written", _part("obs", 0, 4)),
    ("C11", "split", "no var", _drop("var")),
    ("C11", "split", "var is sparse", _sparse_frame("var"), {"C30"}),
    ("C11", "dense", "two rows of var are written", _part("var", 0)),
    ("C12", "split", "a column without a name", _obs("", OBS["n_counts"])),
    ("C12", "split", "two numbers a row", _several_per_row, {"C28", "C30", "C53"}),
    ("C13", "split", "codes without categories", _hints("obs", kind={"type": "categorical"})),
    ("C13", "old", "codes before 0.3.0", _obs("kind", OBS["kind"]), "practice"),
    ("C13", "split", "codes in var", lambda path: write_frame(path / "var", {**VAR, "part": np.zeros(N_VAR, "i1")}, {**VAR_HINTS, "part": {"type": "categorical", "categories": ["a"]}}), "practice"),
    ("C13", "split", "codes of 64 bits", _obs("kind", OBS["kind"].astype("i8")), "practice"),
    ("C14", "dense", "X of one axis", _dense("X", VALUES[:, 0], names=("obs",))),
    ("C14", "dense", "two rows of X are written", _part("X", 0)),
    ("C14", "dense", "rows in the middle of X are not written", _part("X", 0, 4)),
    ("C15", "split", "Xr is dense", _dense("Xr", VALUES[:, 0], names=("obs",))),
    ("C15", "split", "columns under another name", lambda path: write_half(path / "Xr", "obs", N_OBS, _entries(), other="gene")),
    ("C15", "split", "columns are fractions", lambda path: write_half(path / "Xr", "obs", N_OBS, _entries(), other_dtype=np.float32)),
    ("C16", "split", "rows under another name", lambda path: write_half(path / "Xc", "var", N_VAR, (_entries()[1], _entries()[0], _entries()[2]), other="cell")),
    ("C16", "split", "Xc is dense", _dense("Xc", VALUES[0], names=("var",))),
    ("C17", "dense", "no X", _drop("X")),
    ("C17", "split", "no Xc", _drop("Xc")),
    ("C17", "split", "X beside Xr and Xc", _dense("X", VALUES, names=("obs", "var"))),
    ("C18", "split", "X with two sparse axes", _sparse_x, "practice"),
    ("C19", "split", "values overwritten", _scratch("Xr", "a0.tdb"), {"C07"}),
    ("C19", "split", "another value in Xr", _half(lambda r, c, v: (r, c, _replaced(v, 2, 9)), both=False)),
    ("C19", "split", "a value is not in Xr", _half(lambda r, c, v: (r[1:], c[1:], v[1:]), both=False)),
    # `Xc` keeps the entry in its place, so the halves differ as well (C19).
    ("C20", "split", "a column out of range", _half(lambda r, c, v: (r, _replaced(c, 3, 99), v), both=False), {"C19"}),
    ("C20", "split", "a place twice", _half(lambda r, c, v: (np.append(r, r[0]), np.append(c, c[0]), np.append(v, v[1])))),
    ("C20", "split", "a stored zero", _half(lambda r, c, v: (np.append(r, 0), np.append(c, 1), np.append(v, np.float32(0)))), "practice"),
    ("C20", "sparse", "a place twice", lambda path: write_sparse(path / "X", (np.array([0, 0, 1]), np.array([1, 1, 1]), np.ones(3, "f4")))),
    ("C21", "split", "no emb", _drop("emb")),
    ("C21", "split", "emb is an array", _group_as_array("emb")),
    ("C22", "split", "an empty emb", _drop("emb/umap", "emb/pca")),
    ("C23", "split", "one coordinate", _dense("emb/umap", EMBEDDINGS["umap"][:, :1])),
    ("C23", "split", "no second axis", _dense("emb/umap", EMBEDDINGS["umap"][:, 0])),
    ("C23", "split", "a named attribute", _dense("emb/umap", EMBEDDINGS["umap"], attribute="xy")),
    ("C23", "split", "two rows are written", _part("emb/umap", 0)),
    ("C23", "split", "no row is written", _part("emb/umap")),
    ("C23", "split", "rows in the middle are not written", _part("emb/umap", 4, 0)),
    ("C24", "split", "an infinite coordinate", _dense("emb/umap", _replaced(EMBEDDINGS["umap"], (1, 0), np.inf)), "practice"),
    ("C24", "split", "no coordinate", _dense("emb/umap", EMBEDDINGS["umap"] * np.float32("nan")), "practice"),
    ("C25", "split", "an embedding called X_tsne", _dense("emb/X_tsne", EMBEDDINGS["umap"]), "practice"),
    ("C26", "unnamed", "being the unnamed version", lambda path: None, "practice"),
    ("C26", "split", "a group in its place", _array_as_group(META), "must"),
    ("C27", "split", "uns is a group", _array_as_group("uns"), "practice"),
    ("C27", "split", "bytes in uns", _meta("uns", spatial=b"\x80\x04}\x94.")),
    ("C27", "split", "no JSON in uns", _meta("uns", spatial="{'a': 1}")),
    ("C29", "split", "a spatial that is no library", _meta("uns", spatial='{"is_single": true}'), "practice"),
    ("C29", "split", "pixels in uns", _meta("uns", spatial='{"a": {"images": {"hires": [[0.5]]}, "scalefactors": {"spot_diameter_fullres": 1, "tissue_hires_scalef": 1}}}'), "practice"),
    ("C28", "split", "int64", _obs("n_counts", OBS["n_counts"].astype("i8"))),
    ("C28", "split", "float64", _obs("percent.mt", OBS["percent.mt"].astype("f8"))),
    ("C28", "split", "int16", _obs("n_counts", OBS["n_counts"].astype("i2")), "practice"),
    ("C28", "split", "a boolean of int32", _obs("is_useful", OBS["is_useful"].astype("i4"))),
    ("C28", "split", "a boolean that is 2", _obs("is_useful", _replaced(OBS["is_useful"], 0, 2))),
    ("C28", "split", "a boolean that is always true", _obs("is_useful", np.ones(N_OBS, "u1")), "practice"),
    ("C28", "split", "bytes as text", _obs("sample", np.array([b"a", b"b", b"c", b"d", b"e", b"f"])), "practice"),
    ("C28", "split", "numbers of 64 bits as categories", _obs("batch", OBS["batch"].astype("i8"))),
))  # fmt: skip

HINTS = tuple(_damages(
    ("C30", "split", "no cxg_schema", _meta("obs", cxg_schema=None), "practice"),
    ("C30", "split", "no JSON", _meta("obs", cxg_schema="{index: name_0}")),
    ("C30", "split", "a list", _meta("var", cxg_schema="[]")),
    ("C30", "split", "no index", _hints("obs", index=None), "practice"),
    ("C30", "split", "an index that is no column", _hints("var", index="gene")),
    ("C30", "split", "an unknown type", _hints("obs", n_counts={"type": "int128"})),
    ("C30", "split", "a hint that is text", _hints("obs", n_counts="int32")),
    ("C30", "split", "a category twice", _hints("obs", kind={"type": "categorical", "categories": ["T", "B", "B"]})),
    ("C30", "split", "categories that are no list", _hints("obs", kind={"type": "categorical", "categories": "TBN"})),
    ("C30", "split", "categories of numbers", _hints("obs", kind={"type": "categorical", "categories": [1, 2, 3]}), "practice"),
    ("C30", "split", "a column without a hint", _hints("obs", n_counts=None), "practice"),
    ("C30", "split", "a hint without a column", _hints("obs", gone={"type": "int32"}), "practice"),
    ("C32", "split", "two cells of a name", _obs("name_0", _replaced(OBS["name_0"], 4, "cell 1")), "practice"),
    ("C32", "split", "two features of a name", lambda path: write_frame(path / "var", {**VAR, "feature_name": _replaced(VAR["feature_name"], 4, "LYZ")}, VAR_HINTS), "practice"),
    ("C31", "split", "a code beyond", _obs("kind", _replaced(OBS["kind"], 0, 3))),
    ("C31", "split", "a code below -1", _obs("kind", _replaced(OBS["kind"], 0, -2))),
))  # fmt: skip

MATRIX = tuple(_damages(
    ("C40", "dense", "a named attribute", _dense("X", VALUES, names=("obs", "var"), attribute="counts")),
    ("C40", "dense", "two attributes", _two_values),
    ("C41", "sparse", "in version 0.3.0", _meta(META, cxg_version="0.3.0"), "practice", {"C18"}),
    ("C41", "split", "beside Xr and Xc", _dense("X_col_shift", SHIFT), "practice"),
    ("C42", "old", "beside a dense X", _dense("X_col_shift", SHIFT)),
    ("C43", "sparse", "a named attribute", _dense("X_col_shift", SHIFT, attribute="shift")),
    ("C43", "sparse", "two axes", _dense("X_col_shift", np.ones((N_VAR, 2), "f4"))),
    ("C43", "sparse", "float64", _dense("X_col_shift", SHIFT.astype("f8")), "practice"),
    ("C44", "sparse", "a shift that is missing", _dense("X_col_shift", _replaced(SHIFT, 2, np.nan))),
    ("C45", "sparse", "zeros", _dense("X_col_shift", SHIFT * 0), "practice"),
))  # fmt: skip

METADATA = tuple(_damages(
    ("C50", "split", "no version", _meta(META, cxg_version=None)),
    ("C50", "split", "an unknown version", _meta(META, cxg_version="0.3.1")),
    ("C50", "dense", "no version at all", _meta(META, cxg_version="latest")),
    ("C50", "dense", "a number", _meta(META, cxg_version=0.2)),
    ("C51", "split", "no properties", _meta(META, cxg_properties=None), "practice"),
    ("C51", "split", "a list", _json("cxg_properties", [])),
    ("C51", "split", "a title that is a number", _json("cxg_properties", {"title": 3})),
    ("C51", "split", "about is no address", _json("cxg_properties", {"title": "Small", "about": "see the paper"})),
    ("C52", "split", "a misspelt key", _meta(META, cxg_property="{}"), "practice"),
    ("C53", "split", "no JSON", _meta(META, cxg_category_colors="red")),
    ("C53", "split", "colours under a name with _colors", _json("cxg_category_colors", {"kind_colors": {"T cell": "#ff0000"}}), "practice"),
    ("C53", "split", "eight digits", _json("cxg_category_colors", {"kind": {"T cell": "#ff0000ff"}})),
    ("C53", "split", "colours of no column", _json("cxg_category_colors", {"gone": {"T cell": "#ff0000"}}), "practice"),
    ("C53", "split", "a list of colours", _json("cxg_category_colors", {"kind": ["#ff0000"]})),
    ("C60", "split", "no JSON", _meta(META, corpora="{'title': 1}")),
    ("C60", "split", "no title", _json("corpora", {"schema_version": "5.1.0"}), "practice"),
    ("C60", "sparse", "no normalisation", _json("corpora", {"schema_version": "2.0.0", "title": "Small"}), "practice"),
    ("C60", "split", "a default embedding that is not there", _json("corpora", {"schema_version": "5.1.0", "title": "Small", "default_embedding": "X_tsne"}), "practice"),
    ("C61", "split", "two titles", _json("corpora", {"schema_version": "5.1.0", "title": "Large"}), "practice"),
    ("C70", "split", "Xr in version 0.2.0", _meta(META, cxg_version="0.2.0"), "practice", {"C13"}),
    ("C70", "old", "corpora in version 0.1", _json("corpora", {"schema_version": "2.0.0", "title": "Small", "X_normalization": "none"}), "practice"),
    # The sixth cell of `Xr` and `Xc` is then beyond the axis (C20).
    ("C71", "split", _OTHER_N, _obs_of(5), {"C20"}),
    ("C71", "dense", _OTHER_N, _obs_of(4)),
    ("C71", "split", "another number of features", lambda path: write_half(path / "Xc", "var", N_VAR + 1, (_entries()[1], _entries()[0], _entries()[2]))),
    ("C71", "split", "an embedding of fewer cells", _dense("emb/umap", EMBEDDINGS["umap"][:4])),
    ("C71", "sparse", "shifts of fewer features", _dense("X_col_shift", SHIFT[:3])),
))  # fmt: skip

DAMAGES: tuple[CxgDamage, ...] = (*GENERAL, *ARRAYS, *HINTS, *MATRIX, *METADATA)
"""All of them, in the order of the rules."""
