"""The registry of elements: it knows all that anndata knows, and what other writers make of the format is understood."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from anndata.io import write_elem

from raggedatlas.errors import SourceError
from raggedatlas.formats.anndata.elements import ELEMENTS, read_element
from raggedatlas.formats.anndata.source import h5ad_source
from raggedatlas.formats.containers import open_hdf5
from raggedatlas.formats.copying import copy
from raggedatlas.model.frames import arrow_to_frame


def made(tmp_path: Path, change: Callable[[h5py.File], Any]) -> Path:
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical(["a", "b", None]),
            "flag": [True, False, True],
            "text": ["x", "y", "ü"],
            "maybe": pd.array([1, None, 2], dtype="Int32"),
        },
        index=["c0", "c1", "c2"],
    )
    uns = {"array": np.arange(3), "graph": sp.csr_matrix(np.eye(2))}
    with warnings.catch_warnings(action="ignore"):
        ad.AnnData(sp.csr_matrix(np.eye(3, 2, dtype="f4")), obs=obs, uns=uns).write_h5ad(tmp_path / "x.h5ad")
    with h5py.File(tmp_path / "x.h5ad", "r+") as file:
        change(file)
    return tmp_path / "x.h5ad"


R_TRUTHS = h5py.enum_dtype({"FALSE": 0, "TRUE": 1, "NA": 2}, basetype="i4")
"""How R stores truth values, missing ones too."""


def replace(file: h5py.File, path: str, data: Any, **options: Any) -> None:
    kept = dict(file[path].attrs)
    del file[path]
    file.create_dataset(path, data=data, **options).attrs.update(kept)


def bytes_for_attributes(file: h5py.File) -> None:
    def change(_: str, node: Any) -> None:
        for name, value in list(node.attrs.items()):
            if isinstance(value, str):
                node.attrs[name] = np.bytes_(value.encode())
            elif isinstance(value, np.ndarray) and value.dtype.kind == "O":
                node.attrs[name] = np.array([text.encode() for text in value], dtype="S")

    file.visititems(change)
    change("", file)


def fixed_length_text(file: h5py.File) -> None:
    for path in ("obs/_index", "obs/text", "obs/kind/categories"):
        if not isinstance(file[path], h5py.Group):
            replace(file, path, np.array(list(file[path][...]), dtype="S8"))


def unsigned_codes(file: h5py.File) -> None:
    replace(file, "obs/kind/codes", np.array([0, 1, 1], np.uint8))
    replace(file, "obs/kind/categories", np.array(["a", "b"], dtype=object), dtype=h5py.string_dtype())


def nullable_text(file: h5py.File, path: str, values: Any, mask: Any, **attributes: Any) -> None:
    """Replace an array by a group of text and a mask."""
    del file[path]
    group = file.create_group(path)
    group.attrs.update({"encoding-type": "nullable-string-array", "encoding-version": "0.1.0", **attributes})
    write_elem(group, "values", np.array(values, dtype=object))
    write_elem(group, "mask", np.array(mask))


VARIANTS: dict[str, Callable[[h5py.File], Any]] = {
    "bytes for attributes": bytes_for_attributes,
    "fixed-length text": fixed_length_text,
    "truth of R": lambda file: replace(file, "obs/flag", np.array([1, 0, 1], "i4"), dtype=R_TRUTHS),
    "no order": lambda file: file["obs/kind"].attrs.__delitem__("ordered"),
    "number for order": lambda file: file["obs/kind"].attrs.__setitem__("ordered", np.int64(0)),
    "unsigned codes": unsigned_codes,
    "group as index": lambda file: nullable_text(file, "obs/_index", ["c0", "c1", "c2"], [False] * 3),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_other_writers_make_of_it_is_understood(tmp_path: Path, variant: str) -> None:
    """Every variant seen in the wild gives the cells that were meant."""
    source = h5ad_source(made(tmp_path, VARIANTS[variant]))
    cells = arrow_to_frame(source.cells())
    source.close()
    assert list(cells.index) == ["c0", "c1", "c2"]
    assert cells["flag"].tolist() == [True, False, True]
    assert cells["text"].tolist() == ["x", "y", "ü"]
    assert cells["kind"].astype(object).tolist()[:2] == ["a", "b"]
    assert not cells["kind"].cat.ordered
    assert cells["maybe"].dtype == "Int32"


def test_numbers_that_an_enumeration_lacks_are_refused(tmp_path: Path) -> None:
    """A truth value that is none of those that are named is not read as false."""
    path = made(tmp_path, lambda file: replace(file, "obs/flag", np.array([1, 0, 7], "i4"), dtype=R_TRUTHS))
    with pytest.raises(SourceError, match=r"obs/flag.*none of FALSE, NA, TRUE"):
        h5ad_source(path).cells()


def test_missing_truth_values_are_missing_everywhere(tmp_path: Path) -> None:
    """On one axis they are nullable; as one value and in a matrix, which AnnData cannot have of those, they are NaN."""

    def change(file: h5py.File) -> None:
        for name, values in {"row": [0, 1, 2], "table": [[0, 1], [2, 1]], "one": 2, "whole": [[0, 1]]}.items():
            file.create_dataset(f"uns/{name}", data=np.array(values, "i4"), dtype=R_TRUTHS)

    container = open_hdf5(made(tmp_path, change))
    assert read_element(container, "uns/row").tolist() == [False, True, pd.NA]
    np.testing.assert_array_equal(read_element(container, "uns/table"), [[0, 1], [np.nan, 1]])
    assert np.isnan(read_element(container, "uns/one"))
    assert read_element(container, "uns/whole").dtype == bool
    container.close()


def test_the_registry_knows_what_anndata_knows() -> None:
    """Each encoding that the installed anndata reads has an entry."""
    from anndata._io.specs.registry import _REGISTRY

    theirs = {(spec.encoding_type, spec.encoding_version) for _, spec, *_ in _REGISTRY.read}
    assert theirs
    assert theirs <= set(ELEMENTS)


UNREADABLE: dict[str, tuple[Callable[[h5py.File], Any], str, str]] = {
    "version": (
        lambda file: file["uns/array"].attrs.__setitem__("encoding-version", "9.0.0"),
        "uns/array", r"'9\.0\.0'; known are \['0\.2\.0'\]",
    ),
    "type": (
        lambda file: file["uns/array"].attrs.__setitem__("encoding-type", "mystery"),
        "uns/array", "'mystery' which nothing is registered for",
    ),
    "indices": (lambda file: file["uns/graph/indices"].__setitem__(0, 7), "uns/graph", "do not fit together"),
    "pointers": (lambda file: file["uns/graph/indptr"].__setitem__(1, 5), "uns/graph", "do not fit together"),
    "codes": (lambda file: file["obs/kind/codes"].__setitem__(0, 9), "obs", "outside its 2 categories"),
}  # fmt: skip


@pytest.mark.parametrize("fault", UNREADABLE)
def test_what_cannot_be_read_is_refused_by_path(tmp_path: Path, fault: str) -> None:
    """Unknown encodings and parts that do not fit are told with their path; the rest of the file is still read."""
    change, path, said = UNREADABLE[fault]
    container = open_hdf5(made(tmp_path, change))
    with pytest.raises(SourceError, match=said):
        read_element(container, path)
    assert read_element(container, "var") is not None
    container.close()


def test_graphs_of_old_files_move_to_obsp(tmp_path: Path) -> None:
    """What scanpy once kept in uns/neighbors is found in obsp, as anndata has it, and not twice."""

    def change(file: h5py.File) -> None:
        file.create_group("uns/neighbors").attrs.update({"encoding-type": "dict", "encoding-version": "0.1.0"})
        file.copy("uns/graph", "uns/neighbors/connectivities")
        file["uns/neighbors/connectivities"].attrs["shape"] = [3, 3]
        replace(file, "uns/neighbors/connectivities/indptr", np.array([0, 1, 2, 2], np.int32))

    source = h5ad_source(made(tmp_path, change))
    assert [info.key for info in source.describe().others] == ["obsp/connectivities"]
    assert source.element("uns/neighbors") == {}
    np.testing.assert_array_equal(source.element("obsp/connectivities").toarray(), np.diag([1.0, 1.0, 0.0]))
    source.close()


@pytest.mark.parametrize("stated", [None, "NA", "NaN", "gone", 3], ids=str)
def test_missing_text_is_missing_whatever_stands_for_it(tmp_path: Path, stated: Any) -> None:
    """A142, A146: na-value may be absent, NA or NaN; anything else is read as NA. The mask says what is missing."""

    attributes = {} if stated is None else {"na-value": stated}
    missing = [False, True, False]
    path = made(tmp_path, lambda file: nullable_text(file, "obs/text", ["x", "", "ü"], missing, **attributes))
    source = h5ad_source(path)
    text = arrow_to_frame(source.cells())["text"]
    assert text.isna().tolist() == [False, True, False]
    assert text.iloc[[0, 2]].tolist() == ["x", "ü"]
    source.close()
    with warnings.catch_warnings(action="ignore"):
        copied = ad.read_h5ad(copy(path, tmp_path / "y.h5ad")).obs["text"]
    assert copied.isna().tolist() == [False, True, False]


@pytest.mark.parametrize(
    "categories", [np.array([1.0, np.nan]), np.array(["a", "a"], dtype=object)], ids=["missing", "twice"]
)
def test_categories_are_there_once(tmp_path: Path, categories: Any) -> None:
    """A107: a missing category, or one that is there twice, is refused with its column; nothing is made of such a file."""

    def change(file: h5py.File) -> None:
        del file["obs/kind/categories"]
        write_elem(file["obs/kind"], "categories", categories)

    path = made(tmp_path, change)
    source = h5ad_source(path)
    with pytest.raises(SourceError, match="obs/kind"):
        source.cells()
    source.close()
    with pytest.raises(SourceError, match="obs/kind"):
        copy(path, tmp_path / "y.h5ad")
    assert [at.name for at in tmp_path.iterdir()] == ["x.h5ad"]
