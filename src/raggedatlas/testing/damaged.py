"""A small AnnData file with every kind of element, written by hand, and ways to break each rule of its format."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import scipy.sparse as sp
import zarr
from anndata.io import write_elem as write_member

Form = Literal["hdf5", "zarr2", "zarr3"]
FORMS: tuple[Form, ...] = ("hdf5", "zarr2", "zarr3")

N_OBS, N_VAR = 3, 4

AWKWARD_FORM = {
    "class": "ListOffsetArray", "offsets": "i64", "form_key": "node0",
    "content": {"class": "NumpyArray", "primitive": "int64", "form_key": "node1"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Damage:
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


def open_for_writing(path: Path) -> Any:  # noqa: ANN401  (a group of either library)
    """Open a file or folder to change it; HDF5 must be closed by the caller."""
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
    with warnings.catch_warnings(action="ignore"):
        if form == "hdf5":
            with h5py.File(path, "w") as root:
                _fill(root, awkward=awkward)
        else:
            _fill(zarr.open_group(path, mode="w", zarr_format=2 if form == "zarr2" else 3), awkward=awkward)
    return path


def declare(node: Any, kind: str, version: str) -> Any:  # noqa: ANN401
    """Set the encoding of a node, and return it."""
    node.attrs["encoding-type"], node.attrs["encoding-version"] = kind, version
    return node


def put(root: Any, path: str, values: Any, *, keep: bool = True, **attributes: Any) -> Any:  # noqa: ANN401
    """Replace an array, or make one; attributes stay unless `keep` is false. Text is given as an array of dtype S or U."""
    parent, _, name = path.rpartition("/")
    group = root[parent] if parent else root
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


def group_at(root: Any, path: str, kind: str = "", version: str = "") -> Any:  # noqa: ANN401
    """Replace an element by an empty group."""
    if path in root:
        del root[path]
    made = root.create_group(path)
    return declare(made, kind, version) if kind else made


def write_elem(root: Any, path: str, value: Any) -> None:  # noqa: ANN401
    """Write an element through anndata's own writer, which takes no slashes in names."""
    parent, _, name = path.rpartition("/")
    write_member(root[parent] if parent else root, name, value)


def texts(*values: str) -> Any:  # noqa: ANN401
    """Make an array of text that is written with a length of its own for each."""
    return np.array(values, dtype=object)


def _fill(root: Any, *, awkward: bool) -> None:  # noqa: ANN401
    declare(root, "anndata", "0.1.0")
    matrix = sp.csr_matrix(np.array([[1, 0, 2, 0], [0, 0, 0, 3], [4, 5, 0, 0]], np.float32))
    write_elem(root, "X", matrix)
    for name in ("layers", "obsm", "varm", "obsp", "varp", "uns"):
        declare(root.create_group(name), "dict", "0.1.0")
    _fill_frames(root)
    write_elem(root, "layers/dense", np.ones((N_OBS, N_VAR)))
    write_elem(root, "layers/csc", matrix.tocsc())
    write_elem(root, "obsm/pca", np.ones((N_OBS, 2), np.float32))
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


def _fill_frames(root: Any) -> None:  # noqa: ANN401
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


def _fill_awkward(root: Any) -> None:  # noqa: ANN401
    group = declare(root["obsm"].create_group("ragged"), "awkward-array", "0.1.0")
    group.attrs["form"], group.attrs["length"] = json.dumps(AWKWARD_FORM), N_OBS
    write_elem(group, "node0-offsets", np.array([0, 2, 2, 5]))
    write_elem(group, "node1-data", np.arange(5))


def frame(root: Any, path: str, index: str, names: Any, columns: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Write a dataframe with a plain index."""
    group = declare(root.create_group(path), "dataframe", "0.2.0")
    group.attrs["_index"] = index
    write_elem(group, index, names)
    for name, values in columns.items():
        write_elem(group, name, values)
    listed(group, list(columns))


def listed(group: Any, names: list[str]) -> None:  # noqa: ANN401
    """Set column-order."""
    if isinstance(group, h5py.Group):
        group.attrs.create(
            "column-order", np.array(names, dtype=object), dtype=h5py.string_dtype(), shape=(len(names),)
        )
    else:
        group.attrs["column-order"] = names
