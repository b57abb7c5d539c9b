"""A small AnnData file with every kind of element, written by hand, and ways to break each rule of its format."""

import atexit
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import h5py
import numpy as np
import scipy.sparse as sp
import zarr
from anndata.io import write_elem as write_member

from raggedatlas.formats.output_files import consolidate

Form = Literal["hdf5", "zarr2", "zarr3"]
FORMS: tuple[Form, ...] = ("hdf5", "zarr2", "zarr3")

N_OBS, N_VAR = 3, 4

AWKWARD_FORM = {
    "class": "ListOffsetArray", "offsets": "i64", "form_key": "node0",
    "content": {"class": "NumpyArray", "primitive": "int64", "form_key": "node1"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AnnDataDamage:
    """One way to break one rule.

    Parameters
    ----------
    rule : str
        The rule.
    place : str
        The element that is changed; ``""`` for the root.
    label : str
        What is done.
    change : callable
        Does it to the root of a file that is open for writing.
    also : frozenset of str
        Other rules that this breaks.
    forms : tuple of str
        Kinds of file in which it can be done.
    awkward : bool
        Whether the file must have an awkward array.
    """

    rule: str
    place: str
    label: str
    change: Callable[[Any], None]
    also: frozenset[str] = frozenset()
    forms: tuple[Form, ...] = FORMS
    awkward: bool = False


def open_for_writing(path: Path) -> Any:
    """Open a file or folder to change it; HDF5 must be closed by the caller."""
    # Consolidated metadata would still describe the elements that a change removes.
    return zarr.open_group(path, mode="r+", use_consolidated=False) if path.is_dir() else h5py.File(path, "r+")


def damage(path: Path, change: Callable[[Any], None]) -> None:
    """Change a file in place."""
    root = open_for_writing(path)
    with warnings.catch_warnings(action="ignore"):
        change(root)
    if isinstance(root, h5py.File):
        root.close()


def write_good(path: Path, form: Form, *, awkward: bool = False) -> Path:
    """Write a file that breaks no rule (with an awkward array: none but A152, which is about having one).

    Parameters
    ----------
    path : Path
        Where to.
    form : {"hdf5", "zarr2", "zarr3"}
        Which kind.
    awkward : bool
        Whether it has an awkward array in obsm.
    """
    template = _template(form, awkward=awkward)
    if template.is_file():
        return Path(shutil.copyfile(template, path))
    shutil.rmtree(path, ignore_errors=True)
    return Path(shutil.copytree(template, path))


@cache
def _template(form: Form, *, awkward: bool) -> Path:
    """Write a file once per process: a copy of it takes a fraction of the time."""
    folder = mkdtemp(prefix="raggedatlas-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / form
    with warnings.catch_warnings(action="ignore"):
        if form == "hdf5":
            with h5py.File(path, "w") as root:
                _fill(root, awkward=awkward)
        else:
            _fill(zarr.open_group(path, mode="w", zarr_format=2 if form == "zarr2" else 3), awkward=awkward)
    return path


def declare(node: Any, kind: str, version: str) -> Any:
    """Set the encoding of a node, and return it."""
    node.attrs["encoding-type"], node.attrs["encoding-version"] = kind, version
    return node


def put(root: Any, path: str, values: Any, *, keep: bool = True, **attributes: Any) -> Any:
    """Replace an array, or make one; attributes stay unless `keep` is false. Text is given as an array of dtype S or U."""
    parent, _, name = path.rpartition("/")
    group = root[parent] if parent else root
    # Attributes go with the old array, and the encoding is among them.
    kept = dict(group[name].attrs) if keep and name in group else {}
    if name in group:
        del group[name]
    values = np.asarray(values)
    if isinstance(root, h5py.Group):
        made = group.create_dataset(name, data=values)
    else:
        made = group.create_array(name, shape=values.shape, dtype=values.dtype, chunks=values.shape)
        made[...] = values
    for key, value in {**kept, **attributes}.items():
        made.attrs[key] = value
    return made


def group_at(root: Any, path: str, kind: str = "", version: str = "") -> Any:
    """Replace an element by an empty group."""
    if path in root:
        del root[path]
    made = root.create_group(path)
    return declare(made, kind, version) if kind else made


def write_elem(root: Any, path: str, value: Any) -> None:
    """Write an element through anndata's own writer, which takes no slashes in names."""
    parent, _, name = path.rpartition("/")
    write_member(root[parent] if parent else root, name, value)


def texts(*values: str) -> Any:
    """Create an array of text that is written with a length of its own for each."""
    return np.array(values, dtype=object)


def _fill(root: Any, *, awkward: bool) -> None:
    declare(root, "anndata", "0.1.0")
    matrix = sp.csr_matrix(np.array([[1, 0, 2, 0], [0, 0, 0, 3], [4, 5, 0, 0]], np.float32))
    write_elem(root, "X", matrix)
    for name in ("layers", "obsm", "varm", "obsp", "varp", "uns"):
        declare(root.create_group(name), "dict", "0.1.0")
    _fill_frames(root)
    write_elem(root, "layers/dense", np.ones((N_OBS, N_VAR)))
    write_elem(root, "layers/csc", matrix.tocsc())
    write_elem(root, "obsm/pca", np.ones((N_OBS, 2), np.float32))
    # A frame in `obsm` has the names of `obs` (A19).
    frame(root, "obsm/frame", "_index", texts("c1", "c2", "c3"), {"u": np.arange(N_OBS)})
    write_elem(root, "varm/loadings", np.ones((N_VAR, 2)))
    write_elem(root, "obsp/graph", sp.eye(N_OBS, format="csr"))
    write_elem(root, "varp/close", np.eye(N_VAR))
    declare(root.create_group("raw"), "raw", "0.1.0")
    write_elem(root, "raw/X", sp.csr_matrix(np.eye(N_OBS, 2, dtype=np.float32)))
    frame(root, "raw/var", "_index", texts("g1", "g2"), {})
    declare(root["raw"].create_group("varm"), "dict", "0.1.0")
    uns: Mapping[str, Any] = {
        "number": 3.5, "flag": True, "text": "ü", "list": np.arange(3), "names": texts("x", "y"), "none": None,
    }  # fmt: skip
    for name, value in uns.items():
        write_elem(root, f"uns/{name}", value)
    declare(root["uns"].create_group("deep"), "dict", "0.1.0")
    write_elem(root, "uns/deep/level", 1)
    if awkward:
        _fill_awkward(root)


def _fill_frames(root: Any) -> None:
    columns: dict[str, Any] = {"score": np.arange(3.0), "word": texts("x", "ü", "")}
    frame(root, "obs", "_index", texts("c1", "c2", "c3"), columns)
    kind = declare(root["obs"].create_group("kind"), "categorical", "0.2.0")
    kind.attrs["ordered"] = False
    write_elem(kind, "codes", np.array([0, 1, -1], np.int8))
    write_elem(kind, "categories", texts("B", "T"))
    nullable = {
        "count": ("nullable-integer", np.array([1, 2, 0])),
        "maybe": ("nullable-boolean", np.array([True, False, False])),
        "note": ("nullable-string-array", texts("a", "", "b")),
    }
    for name, (encoding, values) in nullable.items():
        group = declare(root["obs"].create_group(name), encoding, "0.1.0")
        write_elem(group, "values", values)
        write_elem(group, "mask", np.array([False, False, True]))
    root["obs/note"].attrs["na-value"] = "NA"
    listed(root["obs"], ["score", "word", "kind", "count", "maybe", "note"])
    frame(root, "var", "gene", texts("g1", "g2", "g3", "g4"), {"length": np.arange(N_VAR)})


def _fill_awkward(root: Any) -> None:
    group = declare(root["obsm"].create_group("ragged"), "awkward-array", "0.1.0")
    group.attrs["form"], group.attrs["length"] = json.dumps(AWKWARD_FORM), N_OBS
    write_elem(group, "node0-offsets", np.array([0, 2, 2, 5]))
    write_elem(group, "node1-data", np.arange(5))


def frame(root: Any, path: str, index: str, names: Any, columns: Mapping[str, Any]) -> None:
    """Write a dataframe with a plain index."""
    group = declare(root.create_group(path), "dataframe", "0.2.0")
    group.attrs["_index"] = index
    write_elem(group, index, names)
    for name, values in columns.items():
        write_elem(group, name, values)
    listed(group, list(columns))


def listed(group: Any, names: list[str]) -> None:
    """Set column-order."""
    if isinstance(group, h5py.Group):
        # An empty list has no type that h5py could infer, so type and shape are given.
        group.attrs.create(
            "column-order", np.array(names, dtype=object), dtype=h5py.string_dtype(), shape=(len(names),)
        )
    else:
        group.attrs["column-order"] = names


Change = Callable[[Any], None]

HDF5: tuple[Form, ...] = ("hdf5",)
ZARR: tuple[Form, ...] = ("zarr2", "zarr3")


def _set(path: str, **attributes: Any) -> Change:
    """Set attributes; names have underscores for dashes, None removes."""

    def change(root: Any) -> None:
        node = root[path] if path else root
        for key, value in attributes.items():
            name = key.replace("_", "-") if key != "_index" else key
            if value is None:
                del node.attrs[name]
            else:
                node.attrs[name] = value

    return change


def _put(path: str, values: Any, **attributes: Any) -> Change:
    """Replace the values of an array; its attributes stay."""
    named = {key.replace("_", "-"): value for key, value in attributes.items()}
    # A change returns nothing; `and` discards the array that `put` returns.
    return lambda root: put(root, path, values, **named) and None


def _drop(path: str) -> Change:
    def change(root: Any) -> None:
        del root[path]

    return change


def _array(path: str, values: Any, kind: str = "array", version: str = "0.2.0") -> Change:
    """Put an array of some encoding in the place of whatever is there."""

    def change(root: Any) -> None:
        if path in root:
            del root[path]
        declare(put(root, path, values, keep=False), kind, version)

    return change


def _group(path: str, kind: str, version: str) -> Change:
    return lambda root: group_at(root, path, kind, version) and None


def _element(path: str, value: Any) -> Change:
    """Replace an element through anndata's own writer."""

    def change(root: Any) -> None:
        parent, _, name = path.rpartition("/")
        if path in root:
            del root[path]
        write_member(root[parent] if parent else root, name, value)

    return change


def _damages(*found: tuple[Any, ...]) -> Iterator[AnnDataDamage]:
    """Read rows of rule, place, label, change, and what else is broken, the forms, or whether it must have awkward arrays."""
    for rule, place, label, change, *rest in found:
        also = next((r for r in rest if isinstance(r, set)), set())
        forms = next((r for r in rest if isinstance(r, tuple)), FORMS)
        yield AnnDataDamage(rule, place, label, change, frozenset(also), forms, awkward=place == "obsm/ragged")


_ANY = np.ones(2)
_SHORT = np.ones((N_OBS - 1, 2))
_VERSION = "9.9.9"


def _two_chunk_sizes(root: Any) -> None:
    for name, size in (("obs/score", 2), ("obs/word", 3)):
        parent, _, last = name.rpartition("/")
        values, attributes = root[name][...], dict(root[name].attrs)
        dtype = root[name].dtype
        del root[name]
        if isinstance(root, h5py.Group):
            made = root.create_dataset(name, data=values, dtype=dtype, chunks=(size,))
        else:
            made = root[parent].create_array(last, shape=values.shape, dtype=dtype, chunks=(size,))
            made[...] = values
        for key, value in attributes.items():
            made.attrs[key] = value


def _link_away(root: Any) -> None:
    root["uns/list"].file["uns/away"] = h5py.ExternalLink("elsewhere.h5", "x")


def _second_index(root: Any) -> None:
    write_member(root["var"], "_index", np.arange(N_VAR))
    # Listed, so that it does not break A77 as well.
    listed(root["var"], ["length", "_index"])


def _stray_group(root: Any) -> None:
    declare(root.create_group("extra"), "dict", "0.1.0")


def _added_later(root: Any) -> None:
    consolidate(root.store.root)
    write_member(root["uns"], "later", np.arange(2))


def _removed_later(root: Any) -> None:
    consolidate(root.store.root)
    shutil.rmtree(root.store.root / "uns" / "list")


def _changed_later(root: Any) -> None:
    consolidate(root.store.root)
    root["uns/deep"].attrs["note"] = "new"


def _nested_layer(root: Any) -> None:
    group = declare(root["layers"].create_group("x"), "dict", "0.1.0")
    write_member(group, "y", np.ones((N_OBS, N_VAR)))


def _no_text_form(root: Any) -> None:
    root["obsm/ragged"].attrs["form"] = "{"


def _ragged_frame(root: Any) -> None:
    # The frame is written again, since one short column would break A75 instead.
    del root["obsm/frame"]
    frame(root, "obsm/frame", "_index", texts("c1", "c2"), {"u": np.arange(2)})


GENERAL = tuple(_damages(
    ("A00", "uns/away", "a link to another file", _link_away, HDF5),
    ("A01", "layers/dense", "no encoding-type", _set("layers/dense", encoding_type=None)),
    ("A01", "layers/dense", "encoding-type is a number", _set("layers/dense", encoding_type=3)),
    ("A02", "layers/dense", "no encoding-version", _set("layers/dense", encoding_version=None)),
    ("A02", "layers/dense", "encoding-version is no version", _set("layers/dense", encoding_version="new")),
    ("A03", "uns/number", "unknown type", _set("uns/number", encoding_type="hologram")),
    ("A03", "uns/none", "unknown version", _set("uns/none", encoding_version=_VERSION)),
    ("A04", "uns/list", "type as bytes", _set("uns/list", encoding_type=np.bytes_(b"array")), HDF5),
    ("A05", "", "a member that was added later", _added_later, ZARR),
    ("A05", "", "a member that was removed", _removed_later, ZARR),
    ("A05", "", "an attribute that was changed", _changed_later, ZARR),
    ("A10", "uns/list", "an array as AnnData", _array("uns/list", _ANY, "anndata", "0.1.0")),
    ("A11", "", "no encoding", _set("", encoding_type=None)),
    ("A11", "", "another encoding", _set("", encoding_type="spatialdata")),
    ("A12", "var", "no var", _drop("var")),
    ("A12", "obs", "no obs", _drop("obs")),
    ("A13", "obs", "obs is an array", _array("obs", _ANY)),
    ("A13", "var", "var is a mapping", _group("var", "dict", "0.1.0")),
    ("A14", "X", "X is a mapping", _group("X", "dict", "0.1.0")),
    ("A15", "X", "X is too short", _array("X", np.ones((N_OBS - 1, N_VAR)))),
    ("A16", "layers/dense", "a layer is a mapping", _group("layers/dense", "dict", "0.1.0")),
    ("A16", "layers/x", "a layer within a group", _nested_layer),
    ("A17", "layers/dense", "a layer is too wide", _put("layers/dense", np.ones((N_OBS, N_VAR + 1)))),
    ("A18", "obsm/pca", "text in obsm", _element("obsm/pca", texts("a", "b", "c"))),
    ("A18", "obsm/pca", "one axis in obsm", _put("obsm/pca", np.ones(N_OBS))),
    ("A19", "obsm/pca", "obsm is too short", _put("obsm/pca", _SHORT)),
    ("A19", "obsm/frame", "a short frame in obsm", _ragged_frame),
    ("A19", "obsm/frame", "a frame of other names", _element("obsm/frame/_index", texts("c1", "c3", "c2"))),
    ("A20", "varm/loadings", "a mapping in varm", _group("varm/loadings", "dict", "0.1.0")),
    ("A21", "varm/loadings", "varm is too short", _put("varm/loadings", _SHORT)),
    ("A22", "obsp/graph", "text in obsp", _element("obsp/graph", texts("a", "b", "c"))),
    ("A23", "obsp/graph", "obsp is too narrow", _array("obsp/graph", np.ones((N_OBS, N_OBS - 1)))),
    ("A24", "varp/close", "a mapping in varp", _group("varp/close", "dict", "0.1.0")),
    ("A25", "varp/close", "varp is too short", _put("varp/close", _SHORT)),
    ("A26", "uns/list", "an entry of uns without encoding", _set("uns/list", encoding_type=None)),
    ("A26", "uns/deep/level", "deep in uns", _set("uns/deep/level", encoding_type=None)),
    ("A27", "raw", "raw without var", _drop("raw/var")),
    ("A27", "raw", "raw of another encoding", _set("raw", encoding_version=_VERSION)),
    ("A27", "raw", "raw is a mapping", _set("raw", encoding_type="dict")),
    ("A27", "raw", "raw/X is too wide", _array("raw/X", np.ones((N_OBS, 5)))),
    ("A27", "raw", "raw is an array", _array("raw", _ANY, "raw", "0.1.0")),
    ("A28", "extra", "a stray group at the root", _stray_group, HDF5),
    # The frame in `obsm` keeps the old names (A19).
    ("A29", "obs", "two cells of one name", _element("obs/_index", texts("c1", "c2", "c1")), {"A19"}),
    ("A30", "X", "X has three axes", _array("X", np.ones((N_OBS, N_VAR, 2))), {"A15"}),
    ("A30", "X", "X is text", _array("X", np.full((N_OBS, N_VAR), b"x"), "array")),
))  # fmt: skip

MATRICES = tuple(_damages(
    ("A40", "layers/dense", "a group as array", _group("layers/dense", "array", "0.2.0")),
    ("A41", "layers/dense", "another version", _set("layers/dense", encoding_version=_VERSION)),
    ("A50", "layers/csc", "an array as csc_matrix", _array("layers/csc", np.ones((N_OBS, N_VAR)), "csc_matrix", "0.1.0")),
    ("A51", "X", "no values", _drop("X/data")),
    ("A51", "layers/csc", "indices on two axes", _put("layers/csc/indices", np.zeros((1, 5), np.int32))),
    ("A51", "raw/X", "values of bytes", _put("raw/X/data", np.array([b"a", b"b"]))),
    ("A52", "X", "coo_matrix", _set("X", encoding_type="coo_matrix")),
    ("A53", "X", "another version", _set("X", encoding_version=_VERSION)),
    ("A54", "X", "no shape", _set("X", shape=None)),
    ("A54", "X", "a shape of three", _set("X", shape=[N_OBS, N_VAR, 1])),
    ("A54", "X", "a shape of fractions", _set("X", shape=[1.5, 2.0])),
    ("A55", "X", "too few pointers", _put("X/indptr", np.array([0, 2, 5], np.int32))),
    # A CSC matrix of four columns has five pointers; four are those of the rows.
    ("A55", "layers/csc", "pointers of the other axis", _put("layers/csc/indptr", np.array([0, 2, 3, 5], np.int32))),
    ("A56", "X", "pointers go down", _put("X/indptr", np.array([0, 3, 2, 5], np.int32))),
    ("A56", "X", "pointers start late", _put("X/indptr", np.array([1, 2, 3, 5], np.int32))),
    ("A57", "X", "pointers end early", _put("X/indptr", np.array([0, 2, 3, 4], np.int32))),
    ("A57", "X", "more values than indices", _put("X/data", np.ones(6, np.float32))),
    ("A58", "X", "a column out of range", _put("X/indices", np.array([0, 2, 4, 0, 1], np.int32))),
    ("A58", "layers/csc", "a row below zero", _put("layers/csc/indices", np.array([0, 2, 2, -1, 1], np.int32))),
    ("A59", "X", "columns unsorted", _put("X/indices", np.array([2, 0, 3, 0, 1], np.int32))),
    ("A59", "layers/csc", "a row twice", _put("layers/csc/indices", np.array([2, 2, 2, 0, 1], np.int32))),
    ("A60", "X", "unsigned pointers", _put("X/indptr", np.array([0, 2, 3, 5], np.uint64))),
    ("A60", "X", "indices are fractions", _put("X/indices", np.array([0, 2, 3, 0, 1], np.float32))),
    ("A61", "X/data", "values of half precision", _put("X/data", np.ones(5, np.float16))),
    # A dtype of Zarr 3 has no byte order; it is set by a codec.
    ("A61", "layers/csc/data", "values in another byte order", _put("layers/csc/data", np.ones(5, ">f4")), ("hdf5", "zarr2")),
))  # fmt: skip

FRAMES = tuple(_damages(
    ("A70", "obsm/frame", "an array as dataframe", _array("obsm/frame", np.ones((N_OBS, 1)), "dataframe")),
    ("A70", "obs", "an array as the table of cells", _array("obs", np.arange(N_OBS, dtype=np.uint8), "dataframe")),
    ("A71", "obs", "no _index", _set("obs", _index=None)),
    # The former index `gene` becomes a column that is not listed (A77).
    ("A71", "var", "_index names nothing", _set("var", _index="absent"), {"A77"}),
    ("A72", "var", "another version", _set("var", encoding_version=_VERSION)),
    ("A72", "obsm/frame", "the version of anndata 0.7", _set("obsm/frame", encoding_version="0.1.0")),
    ("A73", "obs", "no column-order", _set("obs", column_order=None)),
    ("A73", "obs", "column-order of numbers", _set("obs", column_order=[1, 2])),
    ("A73", "var", "a column that is not there", lambda root: listed(root["var"], ["length", "absent"])),
    ("A74", "var", "the index is a mapping", _group("var/gene", "dict", "0.1.0"), {"A75"}),
    ("A75", "obs", "a short column", _put("obs/score", np.ones(N_OBS - 1))),
    ("A76", "obs", "two chunk sizes", _two_chunk_sizes),
    ("A77", "var", "a column that is not listed", lambda root: listed(root["var"], [])),
    ("A73", "var", "a column twice", lambda root: listed(root["var"], ["length", "length"])),
    ("A78", "var", "a column called _index", _second_index),
    ("A80", "varm", "varm is an array", _array("varm", _ANY)),
    ("A80", "uns/deep", "an array as dict", _array("uns/deep", _ANY, "dict", "0.1.0")),
    ("A81", "uns/deep", "another version", _set("uns/deep", encoding_version=_VERSION)),
))  # fmt: skip

SCALARS = tuple(_damages(
    ("A90", "uns/number", "a scalar with an axis", _put("uns/number", np.array([3.5]))),
    ("A90", "uns/flag", "three values", _put("uns/flag", np.array([True, False, True]))),
    ("A90", "uns/text", "a group as string", _group("uns/text", "string", "0.2.0")),
    ("A91", "uns/number", "a number as array", _set("uns/number", encoding_type="array")),
    ("A91", "uns/number", "another version", _set("uns/number", encoding_version=_VERSION)),
    ("A92", "uns/number", "text as number", _array("uns/number", np.bytes_(b"3.5"), "numeric-scalar")),
    ("A93", "uns/text", "a text as string-array", _set("uns/text", encoding_type="string-array")),
    ("A93", "uns/text", "another version", _set("uns/text", encoding_version=_VERSION)),
    ("A94", "uns/text", "bytes", _array("uns/text", np.array(b"abc"), "string"), ZARR),
    ("A94", "uns/text", "a number as text", _array("uns/text", np.array(3), "string"), ZARR),
    ("A95", "uns/text", "fixed length", _array("uns/text", np.array(b"abc"), "string"), HDF5),
    ("A96", "layers/one", "a scalar among layers", _element("layers/one", 1.5), {"A16"}),
))  # fmt: skip

COLUMNS = tuple(_damages(
    ("A100", "obs/kind", "an array as categorical", _array("obs/kind", np.ones(N_OBS), "categorical")),
    ("A101", "obs/kind", "another version", _set("obs/kind", encoding_version=_VERSION)),
    ("A101", "obs/kind", "an unknown type", _set("obs/kind", encoding_type="factor")),
    ("A102", "obs/kind", "no flag", _set("obs/kind", ordered=None)),
    ("A102", "obs/kind", "a number as flag", _set("obs/kind", ordered=1)),
    ("A103", "obs/kind", "codes are fractions", _put("obs/kind/codes", np.array([0.0, 1.0, np.nan]))),
    ("A104", "obs/kind", "a code beyond", _put("obs/kind/codes", np.array([0, 2, 1], np.int8))),
    ("A105", "obs/kind", "a code below -1", _put("obs/kind/codes", np.array([0, 1, -2], np.int8))),
    ("A106", "obs/kind", "no categories", _drop("obs/kind/categories")),
    ("A107", "obs/kind", "a category twice", _element("obs/kind/categories", texts("B", "B"))),
    ("A107", "obs/kind", "a missing category", _element("obs/kind/categories", np.array([1.0, np.nan]))),
    ("A110", "obs/word", "a group as string-array", _group("obs/word", "string-array", "0.2.0"), {"A75"}),
    ("A111", "obs/word", "text as array", _set("obs/word", encoding_type="array")),
    ("A111", "obs/word", "another version", _set("obs/word", encoding_version=_VERSION)),
    ("A112", "obs/word", "fixed length", _put("obs/word", np.array(["x", "ü", ""])), ZARR),
    ("A112", "obs/word", "numbers as text", _put("obs/word", np.arange(3)), ZARR),
    ("A112", "obs/kind/categories", "categories of numbers as text", _put("obs/kind/categories", np.arange(4)), ZARR),
    ("A113", "obs/word", "fixed length", _put("obs/word", np.array([b"x", b"y", b"z"])), HDF5),
    ("A113", "obs/word", "invalid UTF-8", lambda root: root["obs/word"].__setitem__(0, b"\xff\xfe"), HDF5),
    ("A113", "obs/word", "numbers as text", _put("obs/word", np.arange(3)), HDF5),
    ("A113", "obs/kind/categories", "categories of numbers as text", _put("obs/kind/categories", np.arange(4)), HDF5),
    ("A120", "obs/count", "an array", _array("obs/count", np.arange(3), "nullable-integer", "0.1.0")),
    ("A121", "obs/count", "another version", _set("obs/count", encoding_version=_VERSION)),
    ("A122", "obs/count", "fractions", _put("obs/count/values", np.ones(3))),
    ("A123", "obs/count", "a mask of numbers", _put("obs/count/mask", np.array([0, 1, 0], np.uint8))),
    ("A123", "obs/count", "a short mask", _put("obs/count/mask", np.zeros(2, bool))),
    ("A130", "obs/maybe", "an array", _array("obs/maybe", np.ones(3, bool), "nullable-boolean", "0.1.0")),
    ("A131", "obs/maybe", "another version", _set("obs/maybe", encoding_version=_VERSION)),
    ("A132", "obs/maybe", "values of numbers", _put("obs/maybe/values", np.array([0, 1, 0], np.int8))),
    ("A133", "obs/maybe", "a mask of numbers", _put("obs/maybe/mask", np.array([0, 1, 0], np.int8))),
    ("A134", "obs/maybe", "a long mask", _put("obs/maybe/mask", np.zeros(4, bool))),
    ("A140", "obs/note", "an array", _array("obs/note", np.arange(3), "nullable-string-array", "0.1.0")),
    ("A141", "obs/note", "another version", _set("obs/note", encoding_version=_VERSION)),
    ("A142", "obs/note", "na-value is a number", _set("obs/note", na_value=3)),
    ("A143", "obs/note", "values of numbers", _put("obs/note/values", np.arange(3))),
    ("A144", "obs/note", "a mask of numbers", _put("obs/note/mask", np.array([0, 1, 0], np.int8))),
    ("A145", "obs/note", "a long mask", _put("obs/note/mask", np.zeros(4, bool))),
    ("A146", "obs/note", "an unknown na-value", _set("obs/note", na_value="gone")),
    ("A150", "obsm/ragged", "form is no JSON", _no_text_form),
    ("A150", "obsm/ragged", "a buffer is missing", _drop("obsm/ragged/node1-data")),
    ("A150", "obsm/ragged", "a buffer of another type", _put("obsm/ragged/node0-offsets", np.array([0, 2, 2, 5], np.int32))),
    ("A150", "obsm/ragged", "offsets go beyond the data", _put("obsm/ragged/node0-offsets", np.array([0, 2, 2, 9]))),
    ("A150", "obsm/ragged", "another version", _set("obsm/ragged", encoding_version=_VERSION)),
    ("A151", "obsm/ragged", "too short", _set("obsm/ragged", length=2)),
    ("A152", "obsm/ragged", "being one", lambda root: None),
))  # fmt: skip

DAMAGES: tuple[AnnDataDamage, ...] = (*GENERAL, *MATRICES, *FRAMES, *SCALARS, *COLUMNS)
"""All of them, in the order of the rules."""
