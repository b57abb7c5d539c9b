"""Sinks: what they write opens equal in anndata and mudata, keeps the rules of names and tables, and nothing is visible before the end."""

import datetime as dt
import json
import re
import shutil
import warnings
from ast import literal_eval
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas import RaggedAtlas
from raggedatlas.errors import AtlasError, CorruptError, DuplicateError, SchemaError, SourceError, StoreError
from raggedatlas.formats import element_writer, output_files
from raggedatlas.formats.anndata import sink as anndata_sink
from raggedatlas.formats.anndata import validate
from raggedatlas.formats.containers import open_hdf5, open_zarr
from raggedatlas.formats.copying import copy, read
from raggedatlas.formats.registry import open_sink, open_source
from raggedatlas.model.batch import CsrBlock, DenseBlock
from raggedatlas.model.frames import arrow_to_frame
from raggedatlas.model.protocols import Sink, SinkMatrix
from reading import read_anndata
from support.anndata_strategies import assert_equal
from support.hypothesis_profile import examples

ENDINGS = [
    ("x.h5ad", {}),
    ("x.h5ad", {"compression": None}),
    ("x.h5ad", {"compression": "lzf"}),
    ("x.zarr", {}),
    ("x.zarr", {"zarr_format": 2}),
]


def frames(n_obs: int, n_var: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical.from_codes(np.arange(n_obs) % 3 - 1, ["T", "B", "NK"], ordered=True),
            "n": np.arange(n_obs, dtype=np.int16),
            "text": [f"t{i}" for i in range(n_obs)],
            "maybe": pd.array([None, *range(1, n_obs)], dtype="Int32"),
        },
        index=[f"cell{i}" for i in range(n_obs)],
    )
    return obs, pd.DataFrame(index=[f"g{i}" for i in range(n_var)])


def pour(sink: Sink, matrices: dict[str, Any], step: int) -> None:
    """Write matrices in blocks."""
    sink.begin(
        tuple(SinkMatrix.of(k, "csr" if sp.issparse(m) else "dense", m.dtype, m.shape) for k, m in matrices.items())
    )
    for key, matrix in matrices.items():
        for start in range(0, matrix.shape[0], step):
            part = matrix[start : start + step]
            if sp.issparse(part):
                block = CsrBlock(part.indptr.astype(np.int64), part.indices, {"values": part.data}, part.shape[1])
                sink.write(key, block)
            else:
                sink.write(key, DenseBlock({"values": part}))


def finish(sink: Sink, **elements: Any) -> str:
    """Write elements and commit."""
    for key, value in elements.items():
        sink.element(key, value)
    return sink.commit()


def tables(n_obs: int, n_var: int, prefix: str = "") -> dict[str, Any]:
    """Return obs and var by their keys."""
    return dict(zip((f"{prefix}obs", f"{prefix}var"), frames(n_obs, n_var), strict=True))


@pytest.mark.parametrize(("name", "options"), ENDINGS)
@given(
    dtype=st.sampled_from(["bool", "uint8", "int32", "int64", "float32", "float64"]),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 7)),
    step=st.integers(1, 9),
)
@examples(2)
def test_what_is_written_opens_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, options: Any, dtype: str, shape: Any, step: int
) -> None:
    """Sparse and dense matrices of any dtype, frames and uns come back equal from anndata and from our own source."""
    path = tmp_path_factory.mktemp("out") / name
    rng = np.random.default_rng(0)
    dense = rng.integers(0, 2, shape).astype(dtype)
    matrices = {
        "X": sp.csr_array(dense),
        "layers/dense": dense,
        "obsm/e": dense[:, :1].astype(np.float64),
        "obsm/s": sp.csr_array(dense),
    }
    obs, var = frames(*shape)
    sink = open_sink(path, **options)
    pour(sink, matrices, step)
    uns = {"atlas": {"query": "all", "n": 3}}
    assert finish(sink, obs=obs, var=var, uns=uns, **{"varm/v": np.ones((shape[1], 2))}) == str(path)
    found = read_anndata(path)
    np.testing.assert_array_equal(found.X.toarray(), dense)
    assert found.X.format == "csr"
    assert found.X.dtype == dtype
    assert found.X.indptr.dtype == np.int32
    np.testing.assert_array_equal(found.layers["dense"], dense)
    np.testing.assert_array_equal(found.obsm["s"].toarray(), dense)
    assert found.uns["atlas"]["query"] == "all"
    source = open_source(path)
    ours = arrow_to_frame(source.cells())
    pd.testing.assert_frame_equal(ours, found.obs, check_index_type=False)
    pd.testing.assert_frame_equal(found.obs, obs, check_index_type=False)
    ((block,),) = source.blocks(("X",), 100)
    np.testing.assert_array_equal(block.layers["values"], matrices["X"].data)
    source.close()


def test_text_is_written_as_plain_string_arrays(tmp_path: Path) -> None:
    """Index and text columns are string-array, which every reader since 0.8 knows; text with holes is nullable."""
    sink = open_sink(tmp_path / "x.h5ad")
    obs, var = frames(3, 2)
    obs["holes"] = pd.array(["a", None, "c"], dtype="string")
    sink.begin(())
    finish(sink, obs=obs, var=var)
    with h5py.File(tmp_path / "x.h5ad") as file:
        for name in ("_index", "text", "holes", "kind/categories"):
            kind = "nullable-string-array" if name == "holes" else "string-array"
            assert file[f"obs/{name}"].attrs["encoding-type"] == kind
    assert read_anndata(tmp_path / "x.h5ad").obs["holes"].isna().tolist() == [False, True, False]


def test_an_aborted_mudata_leaves_nothing(tmp_path: Path) -> None:
    """Until commit the name does not exist; abort leaves the folder as it was."""
    sink = open_sink(tmp_path / "x.h5mu")
    pour(sink, {"mod/rna/X": np.ones((3, 2))}, 2)
    assert not (tmp_path / "x.h5mu").exists()
    sink.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x.h5ad", "x.zarr"])
def test_existing_files_are_kept_unless_said_otherwise(tmp_path: Path, name: str) -> None:
    """An existing target is refused by name, and replaced whole with overwrite=True."""
    for value in (1.0, 2.0):
        write_constant(tmp_path / name, value)
    with pytest.raises(DuplicateError, match="overwrite=True"):
        open_sink(tmp_path / name)
    assert read_anndata(tmp_path / name).X.max() == 2.0
    assert [p.name for p in tmp_path.iterdir()] == [name]


def write_constant(path: Path, value: float) -> None:
    sink = open_sink(path, overwrite=True)
    try:
        pour(sink, {"X": np.full((2, 2), value)}, 2)
        finish(sink, **tables(2, 2))
    except BaseException:
        sink.abort()
        raise


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the new folder cannot take the place of the former one, that is there as before, and nothing beside it."""
    path = tmp_path / "x.zarr"
    write_constant(path, 1.0)
    rename = Path.rename

    def refused(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            raise PermissionError(13, "denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(StoreError, match="denied"):
        write_constant(path, 2.0)
    assert [p.name for p in tmp_path.iterdir()] == ["x.zarr"]
    assert read_anndata(path).X.max() == 1.0


def test_a_link_to_a_folder_is_replaced(tmp_path: Path) -> None:
    """Overwriting a link to a folder replaces the link, and leaves the folder that it led to."""
    write_constant(tmp_path / "far.zarr", 1.0)
    (tmp_path / "x.zarr").symlink_to(tmp_path / "far.zarr")
    write_constant(tmp_path / "x.zarr", 2.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["far.zarr", "x.zarr"]
    assert [read_anndata(tmp_path / name).X.max() for name in ("far.zarr", "x.zarr")] == [1.0, 2.0]


ROWS = DenseBlock({"values": np.ones((3, 2))})
MISUSES: dict[str, Callable[[Sink], Any]] = {
    "was not announced": lambda sink: sink.write("layers/none", ROWS),
    "takes dense rows of shape": lambda sink: sink.write("X", DenseBlock({"values": np.ones((1, 3))})),
    "cannot take complex64": lambda sink: sink.write("X", DenseBlock({"values": np.ones((1, 2), np.complex64)})),
    "received 0 of its 3 rows": lambda sink: finish(sink, **tables(3, 2)),
    "obs was not written": lambda sink: (sink.write("X", ROWS), sink.commit()),
    "ask for": lambda sink: (sink.write("X", ROWS), finish(sink, **tables(4, 2))),
    "odd": lambda sink: sink.element("uns", {"deep": {"odd": object()}}),
    "groups within groups": lambda sink: sink.element("uns/../../x", 1),
}


@pytest.mark.parametrize("said", MISUSES)
def test_wrong_use_is_refused_by_name(tmp_path: Path, said: str) -> None:
    """Each way to misuse a sink is told, and nothing becomes visible."""
    sink = open_sink(tmp_path / "x.h5ad")
    sink.begin((SinkMatrix.of("X", "dense", "f8", (3, 2)),))
    with pytest.raises(SchemaError, match=said):
        MISUSES[said](sink)
    sink.abort()
    assert list(tmp_path.iterdir()) == []


def test_places_and_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """An unknown ending, option, compression or format and an absent folder are told."""
    for name, options, said in (
        ("x.csv", {}, r"\.h5ad, \.h5mu, \.zarr"),
        ("x.h5ad", {"zarr_format": 2}, "zarr_format"),
        ("x.h5ad", {"compression": "zip"}, "compression"),
        ("x.zarr", {"zarr_format": 4}, "choose 2 or 3"),
    ):
        with pytest.raises(SourceError, match=said):
            open_sink(tmp_path / name, **options)
    with pytest.raises(StoreError, match="make it first"):
        open_sink(tmp_path / "absent" / "x.h5ad")
    assert list(tmp_path.iterdir()) == []


def test_pointers_turn_64_bit_when_they_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row pointers are int64 for matrices so wide that their columns are."""
    sink = open_sink(tmp_path / "x.zarr")
    sink.begin((SinkMatrix.of("obsm/wide", "csr", "f4", (1, 2**31)),))
    sink.write(
        "obsm/wide", CsrBlock(np.array([0, 1]), np.array([2**31 - 1]), {"values": np.ones(1, np.float32)}, 2**31)
    )
    finish(sink, **tables(1, 1))
    source = open_source(tmp_path / "x.zarr")
    ((block,),) = source.blocks(("obsm/wide",), 1)
    assert isinstance(block, CsrBlock)
    assert block.indices.tolist() == [2**31 - 1]
    source.close()


@pytest.mark.parametrize("form", ["csr", "csc"])
@pytest.mark.parametrize("name", ["x.h5ad", "x.zarr"])
def test_more_entries_than_32_bits_count_get_wide_pointers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: Any
) -> None:
    """Beyond the most that int32 can count, pointers are int64 and indices stay narrow; at that number all are narrow."""
    for most, dtype in ((12, np.int32), (11, np.int64)):
        monkeypatch.setattr(anndata_sink, "NARROW_MOST", most)
        sink = open_sink(tmp_path / name, overwrite=True)
        block = CsrBlock(
            np.array([0, 4, 8, 12]), np.tile(np.arange(4, dtype=np.int32), 3), {"values": np.ones(12, "f4")}, 4
        )
        sink.begin((SinkMatrix.of("X", form, "f4", (3, 4)),))
        sink.write("X", block)
        finish(sink, **tables(3, 4))
        found = read_anndata(tmp_path / name).X
        assert found.format == form
        assert (found.toarray() == 1).all()
        container = open_hdf5(tmp_path / name) if name == "x.h5ad" else open_zarr(tmp_path / name)
        assert container.get("X/indptr").dtype == dtype
        assert container.get("X/indices").dtype == np.int32
        container.close()


@pytest.mark.parametrize("n_entries", [3, 5])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_announced_entries_must_come(tmp_path: Path, n_entries: int, compression: str | None) -> None:
    """Where the number of entries was said to be exact, more are refused when they come, and fewer at the end."""
    sink = open_sink(tmp_path / "x.h5ad", compression=compression)
    sink.begin((SinkMatrix("X", "csr", np.dtype("f4"), (2, 2), n_entries, exact=True),))
    block = CsrBlock(np.array([0, 2, 4]), np.array([0, 1, 0, 1], np.int32), {"values": np.ones(4, "f4")}, 2)

    def write() -> None:
        sink.write("X", block)
        finish(sink, **tables(2, 2))

    with pytest.raises(SchemaError, match=f"of its {n_entries}|takes {n_entries} rows or entries"):
        write()
    sink.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["bool", "uint8", ">i4", "float16", "float64"])
def test_plain_arrays_lie_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Without compression arrays of known length are contiguous in HDF5, also behind the user block of MuData; bytes are right; values of sparse
    matrices have a type that SciPy holds."""
    monkeypatch.setattr(output_files, "STEP_BYTES", 1)
    values = np.arange(1, 13).reshape(4, 3).astype(dtype)
    sparse = sp.csr_matrix(values.astype(np.float32))
    for name, prefix in (("x.h5ad", ""), ("x.h5mu", "mod/rna/")):
        sink = open_sink(tmp_path / name, compression=None)
        exact = SinkMatrix(f"{prefix}X", "csr", np.dtype(dtype), (4, 3), 12, exact=True)
        sink.begin((exact, SinkMatrix.of(f"{prefix}layers/dense", "dense", dtype, (4, 3))))
        for row in range(4):
            own = slice(3 * row, 3 * row + 3)
            part = CsrBlock(np.array([0, 3]), sparse.indices[own], {"values": values.ravel()[own]}, 3)
            sink.write(f"{prefix}X", part)
            sink.write(f"{prefix}layers/dense", DenseBlock({"values": values[row : row + 1]}))
        finish(sink, **tables(4, 3, prefix), **({"obs": frames(4, 3)[0][[]]} if prefix else {}))
        with h5py.File(tmp_path / name) as file:
            held = {">i4": "int32", "float16": "float32"}.get(dtype, dtype)
            for path, expected, stored_as in (("X/data", values.ravel(), held), ("layers/dense", values, dtype)):
                stored = file[prefix + path]
                assert (stored.chunks, stored.dtype) == (None, np.dtype(stored_as))
                np.testing.assert_array_equal(stored[...], expected)
            assert file[f"{prefix}X/indices"].chunks is None
            assert file[f"{prefix}X/indptr"][...].tolist() == [0, 3, 6, 9, 12]
        assert (tmp_path / name).read_bytes().startswith(b"MuData" if prefix else b"\x89HDF")


def test_a_disk_that_fails_meanwhile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure to bring earlier bytes to the disk, which a system tells only once, ends the export and leaves nothing."""

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output_files, "STEP_BYTES", 1)
    monkeypatch.setattr("os.fdatasync", full, raising=False)
    sink = open_sink(tmp_path / "x.h5ad", compression=None)

    def write() -> None:
        pour(sink, {"X": np.ones((3, 2))}, 1)
        finish(sink, **tables(3, 2))

    with pytest.raises(StoreError, match="No space left"):
        write()
    sink.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("compression", ["gzip", None])
@pytest.mark.parametrize("name", ["x.h5ad", "x.h5mu"])
def test_files_are_written_without_positioned_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, compression: str | None
) -> None:
    """HDF5 files are written also where the system has no `pwrite` and no `fdatasync`, as on Windows."""
    for missing in ("pread", "pwrite", "fdatasync"):
        monkeypatch.delattr("os." + missing, raising=False)
    prefix = "mod/rna/" if name.endswith("h5mu") else ""
    sink = open_sink(tmp_path / name, compression=compression)
    pour(sink, {f"{prefix}X": np.arange(6.0).reshape(3, 2)}, 1)
    finish(sink, **tables(3, 2, prefix), **({"obs": frames(3, 2)[0][[]]} if prefix else {}))
    with h5py.File(tmp_path / name) as file:
        np.testing.assert_array_equal(file[f"{prefix}X"][...], np.arange(6.0).reshape(3, 2))
    assert (tmp_path / name).read_bytes().startswith(b"MuData" if prefix else b"\x89HDF")


def test_two_writers_of_a_path_do_not_share_a_file(tmp_path: Path) -> None:
    """Of two calls that write one path at the same time, the last one to end counts, whole."""
    path = tmp_path / "x"
    with output_files.atomic_write(path) as second, output_files.atomic_write(path) as first:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]


TARGETS: list[tuple[str, dict[str, Any]]] = [("x.h5ad", {}), ("x.zarr", {"zarr_format": 2}), ("x.zarr", {})]
IDS = ["hdf5", "zarr2", "zarr3"]


def small(n: int = 3) -> ad.AnnData:
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical(np.arange(n) % 2),
            "byte": np.zeros(n, np.int8),
            "score": np.arange(float(n)),
            "text": pd.Series([f"t{i}" for i in range(n)], dtype=object).to_numpy(),
            "holes": pd.array([None, *range(1, n)], dtype="Int32"),
        },
        index=[f"c{i}" for i in range(n)],
    )
    return ad.AnnData(sp.csr_matrix(np.eye(n, 3, dtype=np.float32)), obs=obs, var=pd.DataFrame(index=list("abc")))


@pytest.mark.parametrize(("name", "options"), TARGETS, ids=IDS)
def test_columns_of_a_table_share_their_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: Any
) -> None:
    """A76: all columns, codes, values, masks and the index of a table are cut by the same number of rows, the last chunk too."""
    monkeypatch.setattr(element_writer, "COLUMN_CHUNK", 4)
    path = copy(small(10), open_sink(tmp_path / name, **options))
    root: Any = h5py.File(path) if name == "x.h5ad" else zarr.open_group(path, mode="r")
    paths = ["_index", "byte", "score", "text", "kind/codes", "holes/values", "holes/mask"]
    nodes = [root[f"obs/{at}"] for at in paths]
    nodes = [node["values"] if isinstance(node, zarr.Group) else node for node in nodes]  # nullable text of pandas 3
    assert {node.chunks for node in nodes} == {(4,)}
    assert root["var/_index"].chunks == (3,)
    assert root["obs/kind/categories"].chunks == (2,)
    if name == "x.h5ad":
        root.close()
    assert validate(path, "full") == []
    found = read_anndata(path)
    assert found.obs["text"].tolist() == small(10).obs["text"].tolist()
    assert found.obs["holes"].isna().tolist() == [True, *[False] * 9]


def test_slashes_in_columns_are_kept_where_they_can_be(tmp_path: Path) -> None:
    """A77: HDF5 lists every column and finds one with a slash again, which the rule calls unusual; Zarr refuses it by name."""
    adata = small()
    adata.obs["CD4/CD8"] = [1, 2, 3]
    path = copy(adata, tmp_path / "x.h5ad")
    pd.testing.assert_series_equal(read_anndata(path).obs["CD4/CD8"], adata.obs["CD4/CD8"])
    assert [(p.rule, p.path) for p in validate(path, "full")] == [("A77", "obs")]
    for options in ({}, {"zarr_format": 2}):
        with pytest.raises(SchemaError, match="obs: the column 'CD4/CD8' has a name that Zarr"):
            copy(path, open_sink(tmp_path / "x.zarr", **options))
    assert [at.name for at in tmp_path.iterdir()] == ["x.h5ad"]


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_names_that_differ_in_case_alone_are_read_back(tmp_path: Path, zarr_format: int) -> None:
    """zarr-python's own consolidated metadata mix the members of two groups whose names differ in case alone; ours do not."""
    adata = small()
    adata.obs["Study"], adata.obs["study"] = pd.Categorical(["a", "b", "c"]), pd.Categorical(["d", None, "d"])
    path = copy(adata, open_sink(tmp_path / "x.zarr", zarr_format=zarr_format))
    found = read_anndata(path).obs
    assert found["Study"].tolist() == ["a", "b", "c"]
    assert found["study"].isna().tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["x.h5ad", "x.zarr"])
def test_what_cannot_be_opened_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A file that breaks a rule of readers is an error of ours, and nothing has its name."""
    write = output_files.write_element
    odd = lambda group, path, value, options: write(group, path, 1 if path == "obs" else value, options)  # noqa: E731
    monkeypatch.setattr(output_files, "write_element", odd)
    with pytest.raises(CorruptError, match="A13 must: obs"):
        copy(small(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


ONES, TWICE = np.ones((3, 3)), pd.DataFrame([[1, 2]] * 3, columns=["n", "n"], index=list("abc"))
NAMES: dict[str, tuple[str, Any]] = {
    "obs: the column '_index' bears the name": ("obs", pd.DataFrame({"_index": range(3)}, index=["c0", "c1", "c2"])),
    "uns/deep/table: the column '_index' bears the name": ("uns/deep", {"table": pd.DataFrame({"_index": [1]}, index=["r"])}),
    "var: the column 'n' is duplicated": ("var", TWICE),
    "uns/table: the column 'n' is duplicated": ("uns/table", TWICE),
    "'uns/a/b' has a '/' in its name": ("uns/a/b", 1),
    "uns/rank: the key 'T/NK' has a name": ("uns/rank", {"T/NK": np.arange(3)}),
    "'layers/a/b' has a '/' in its name": ("layers/a/b", ONES),
    "'obsm/a/b' has a '/' in its name": ("obsm/a/b", ONES),
    "'varm/a/b' has a '/' in its name": ("varm/a/b", ONES),
}  # fmt: skip
"""What is refused -> the element that is set, and its value."""


@pytest.mark.parametrize("said", NAMES)
def test_names_that_no_reader_would_find_again_are_refused(tmp_path: Path, said: str) -> None:
    """A78 and its like: reserved, repeated and nested names are told before any matrix is written, for each kind of file."""
    adata, (key, value) = small(), NAMES[said]
    group, _, name = key.partition("/")
    with warnings.catch_warnings(action="ignore"):
        getattr(adata, group).__setitem__(name, value) if name else setattr(adata, group, value)
    for name, options in TARGETS:
        with pytest.raises(SchemaError, match=said):
            copy(adata, open_sink(tmp_path / name, **options))
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "in_hdf5"),
    [("a\0b", False), ("\udc80", False), ("a\\b", True), (".zarray", True), ("zarr.json", True), ("x" * 256, True)],
    ids=["nul", "half", "backslash", "zarray", "zarr.json", "long"],
)
def test_names_that_a_file_would_change_are_refused(tmp_path: Path, name: str, in_hdf5: bool) -> None:
    """No member is lost, renamed, or written over another one, wherever it is; HDF5 has names that Zarr cannot have."""
    for place in ("layers", "obsm", "obsp", "varm", "uns", "deep"):
        adata = small()
        target = adata.uns.setdefault("deep", {}) if place == "deep" else getattr(adata, place)
        target.update({"a": ONES, name: 2 * ONES})
        for file, options in TARGETS:
            sink = open_sink(tmp_path / file, overwrite=True, **options)
            if in_hdf5 and file.endswith(".h5ad"):
                assert_equal(adata, read_anndata(copy(adata, sink)))
            else:
                with pytest.raises(SchemaError, match="has a name"):
                    copy(adata, sink)


def test_a_dataset_with_a_nested_key_is_kept_and_not_written(tmp_path: Path) -> None:
    """A key of `uns` with a slash comes back from an atlas as an object; writing it to a file is refused by name."""
    adata = small()
    adata.uns = {"plain": 1, "T/NK": {"n": 2}}
    atlas = RaggedAtlas.create(tmp_path / "a.atlas")
    dataset = atlas.dataset(atlas.add(adata, progress=False).dataset_uid)
    assert dataset.to_anndata().uns == adata.uns
    for name, _ in TARGETS[1:]:
        with pytest.raises(SchemaError, match="'uns/T/NK'"):
            dataset.write(tmp_path / name)
    assert [at.name for at in tmp_path.iterdir()] == ["a.atlas"]


@pytest.mark.parametrize("group", ["layers", "obsm", "varm", "obsp", "varp"])
@pytest.mark.parametrize("value", [1.5, "text", {"a": np.ones(3)}, np.float32(2), None], ids=lambda v: type(v).__name__)
def test_scalars_belong_into_uns(tmp_path: Path, group: str, value: Any) -> None:
    """A96: what has no rows is refused outside of `uns`, alone or in a mapping of members."""
    for key, element in ((f"{group}/x", value), (group, {"x": value})):
        sink = open_sink(tmp_path / "x.h5ad")
        with pytest.raises(SchemaError, match=f"{group}/x is of type .* put it into uns"):
            sink.element(key, element)
        sink.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("group", ["obsm", "varm"])
def test_members_have_the_rows_of_their_table(tmp_path: Path, group: str) -> None:
    """A table or array beside with more or fewer rows than its axis is refused, and nothing becomes visible."""
    for rows in (2, 4):
        sink = open_sink(tmp_path / "x.h5ad")
        sink.element("obs", small().obs)
        sink.element("var", small().var)
        sink.element(f"{group}/x", pd.DataFrame({"n": range(rows)}, index=[f"r{i}" for i in range(rows)]))
        with pytest.raises(SchemaError, match=rf"{group}/x has shape \({rows},\)"):
            sink.commit()
        sink.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> RaggedAtlas:
    """An atlas into which nothing gets."""
    return RaggedAtlas.create(tmp_path_factory.mktemp("atlas") / "a.atlas")


def _broken(where: str) -> ad.AnnData:
    """Give an AnnData with a sparse matrix that SciPy made without looking at its indices."""
    adata = small()
    wrong = sp.csr_matrix(np.eye(3))
    wrong.indices = np.array([0, 1, 9], np.int32)
    group, _, name = where.partition("/")
    if group == "raw":
        adata.raw = adata.copy()
        adata.raw.varm["g"] = wrong
    elif "/" in name:
        adata.uns["deep"] = {"g": wrong}
    else:
        getattr(adata, group)[name] = wrong
    return adata


@pytest.mark.parametrize(
    "where", ["obsp/g", "varp/g", "varm/g", "uns/g", "uns/deep/g", "raw/varm/g", "obsm/g", "layers/g"]
)
def test_objects_are_held_to_the_rules_of_entries(tmp_path: Path, atlas: RaggedAtlas, where: str) -> None:
    """A58 in memory: an entry outside of its matrix is refused by name, by a copy and by an atlas, and leaves nothing."""
    adata = _broken(where)
    with pytest.raises(SourceError, match=where):
        copy(adata, tmp_path / "x.h5ad")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SourceError, match=where):
        atlas.add(adata, progress=False)
    assert len(atlas.list_datasets()) == 0


COLUMNS: dict[str, Any] = {
    "integers": pd.array([1, None, 3], "Int16"),
    "booleans": pd.array([True, None, False], "boolean"),
    "flags": np.array([True, False, True]),
    "dates": pd.to_datetime(["2024-01-01", None, "1999-12-31 23:59:59"], format="mixed"),
    "ordered": pd.Categorical(["b", None, "a"], ["b", "a"], ordered=True),
    "numbers": pd.Categorical([2.5, None, 1.0]),
    "years": pd.Categorical([2020, 2021, 2020]),
    "unused": pd.Categorical([None, None, None], ["a"]),
    "empty": pd.Categorical([None, None, None], []),
    "objects": np.array(["x", None, ""], object),
    "mixed": np.array(["x", 1, None], object),
    "days": np.array([dt.date(2024, 1, 1), None, dt.date(2024, 1, 3)], object),
    "spans": pd.to_timedelta(["1h", None, "2D"]),
    "deltas": np.array([dt.timedelta(hours=1), None, dt.timedelta(2)], object),
    "wide": pd.array([2**60 + 1, None, -1], "Int64"),
    "reals": np.array([0.5, np.nan, 2.0]),
}
COLUMN_NAMES = ["G1", "g1", "G1/S", "_index", "_rowid", "_rowaddr", "", " ", ".", "..", ".hidden", "größe β", "n" * 300, "uid", "dataset", "cell_name", "layout_uid", "index", "__categories", "a\\b", "a\nb", 'q"q', "con", "obs"]  # fmt: skip
RESERVED = {"uid", "dataset", "cell_name", "layout_uid"}
EVERY: dict[str, dict[str, Any]] = {
    "x.h5ad": {},
    "x.v2.zarr": {"zarr_format": 2},
    "x.v3.zarr": {"zarr_format": 3},
    "x.h5mu": {},
    "x.cxg": {"compute_embedding": "pca", "wide_integers": "text"},
}

NEEDS = {".h5mu": "mudata", ".cxg": "tiledb"}


def plain(column: "pd.Series[Any]") -> list[Any]:
    """The values of a column, None for those that are missing; dates and spans as the ISO text that files have."""
    values = [None if pd.isna(v) else v for v in column.astype(object)]
    values = [pd.Timedelta(v).isoformat() if isinstance(v, dt.timedelta) else v for v in values]
    return [
        str(pd.Timestamp(v)) if isinstance(v, dt.date) or (isinstance(v, str) and v[:2] in ("19", "20")) else v
        for v in values
    ]


def as_labels(values: list[Any]) -> list[str | None]:
    """Values as the text that a CXG shows, whatever the type of the column."""
    return [v if v is None else str(int(v)) if isinstance(v, float) and v.is_integer() else str(v) for v in values]


def read_cxg(path: Path) -> pd.DataFrame:
    """Read `obs` of a CXG with TileDB alone, by the rules of the format."""
    import tiledb

    with tiledb.open(str(path / "obs")) as array:
        stored, hints = array[:], json.loads(array.meta["cxg_schema"])
    table = {}
    for name, values in stored.items():
        categories = hints[name].get("categories")
        coded = values.dtype.kind == "i" and categories is not None
        table[name] = [None if v < 0 else categories[v] for v in values.tolist()] if coded else values.tolist()
        if hints[name]["type"] == "boolean" or categories == ["False", "True"]:
            table[name] = [v if v is None or isinstance(v, str) else bool(v) for v in table[name]]
    return pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in table.items()})


def read_back(path: Path) -> list[pd.DataFrame]:
    """The cells of a file as our reader and those of other libraries give them."""
    ours = read(path)
    tables = [ours.obs if isinstance(ours, ad.AnnData) else next(iter(ours.mod.values())).obs]
    if path.suffix == ".cxg":
        return [*tables, read_cxg(path)]
    if path.suffix == ".h5mu":
        import mudata

        with warnings.catch_warnings(action="ignore"):
            return [*tables, next(iter(mudata.read_h5mu(path).mod.values())).obs]
    tables.append(read_anndata(path).obs)
    if path.suffix == ".zarr":
        packed = Path(shutil.make_archive(str(path), "zip", path))
        tables.append(read(packed).obs)
        packed.unlink()
    return tables


WAY_OUT = re.compile(
    r"(?:^|[;:.,] |\bor )(?:rename|choose|pass|leave|cast|convert|drop|write|use|store|give|keep|select|remove|fill|make|take|set|call)\b",
    re.I,
)
"""A verb of what to do instead, at the beginning of a sentence or clause."""


@pytest.mark.long
@pytest.mark.parametrize("road", ["copy", "dataset", "query"])
@given(st.dictionaries(st.sampled_from(COLUMN_NAMES), st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=4))
@examples(2)
def test_columns_are_written_for_all_readers_or_refused(
    tmp_path_factory: pytest.TempPathFactory, road: str, kinds: dict[str, str]
) -> None:
    """Whatever columns are called and hold, what a sink writes is read back equal, or it is refused first by the name of a column."""
    folder = tmp_path_factory.mktemp("law")
    obs = pd.DataFrame({name: COLUMNS[kind] for name, kind in kinds.items()}, index=["c0", "c1", "c2"])
    with warnings.catch_warnings(action="ignore"):
        adata = ad.AnnData(np.eye(3, dtype=np.float32), obs, pd.DataFrame(index=list("abc")))
    write: Any = lambda target: copy(adata, target)  # noqa: E731
    if road != "copy":
        atlas = RaggedAtlas.create(folder / "atlas")
        try:
            atlas.add(adata, "d", progress=False)
        except AtlasError as error:
            assert any(repr(name) in str(error) for name in kinds), error  # noqa: PT017
            assert WAY_OUT.search(str(error)), error  # noqa: PT017
            return
        write = atlas.dataset("d").write
        if road == "query":
            write = atlas.checkout(atlas.snapshot()).query().write
    (folder / "out").mkdir()
    for file, options in EVERY.items():
        path = folder / "out" / file
        if not find_spec(NEEDS.get(path.suffix, "anndata")):
            continue
        losses: list[Any] = []
        given = {**options, "on_losses": losses.extend} if file == "x.cxg" else options
        try:
            write(open_sink(path, **given) if road == "copy" else str(path), **(given if road != "copy" else {}))
        except AtlasError as error:
            assert any(repr(name) in str(error) for name in kinds), (file, error)  # noqa: PT017
            assert WAY_OUT.search(str(error)), (file, error)  # noqa: PT017
            assert list((folder / "out").iterdir()) == [], "left"
            continue
        # Values are converted, never lost; categories of numbers change their order.
        fates = {loss.fate for loss in losses if loss.key.startswith("obs/") and "read back sorted" not in loss.what}
        assert not {"lost", "changed"} & fates, losses
        for table in read_back(path):
            for name in kinds:
                # A CXG lists which columns it calls otherwise.
                told = [loss.what for loss in losses if loss.key == f"obs/{name}"]
                shown = next(
                    (literal_eval(what.split(" as ")[1]) for what in told if "no column of that" in what), name
                )
                # A query shows reserved and empty names under others, which the report of `add` lists.
                if road == "query" and (name in RESERVED or shown not in table):
                    continue
                expected, found = plain(obs[name]), plain(table[shown])
                if file == "x.cxg":
                    expected, found = as_labels(expected), as_labels(found)
                assert found == expected, (file, name)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
