"""Copies from any format into any other: equal when whole, what anndata would select when not, text of every type, and nothing when stopped."""

import datetime as dt
import gc
import os
import signal
import subprocess
import sys
import warnings
import weakref
import zipfile
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import FeatureError, NotFoundError, QueryError, SchemaError, SourceError
from raggedatlas.formats.anndata import validate
from raggedatlas.formats.composite_source import SourceParts
from raggedatlas.formats.copying import copy, read
from raggedatlas.formats.registry import open_sink, open_source
from raggedatlas.formats.subset import select_cells
from reading import read_anndata
from support.anndata_strategies import anndatas, assert_equal, assert_same, assert_same_matrix
from support.hypothesis_profile import examples

DATA = Path(__file__).parent.parent / "data"
TARGETS = [("x.h5ad", {}), ("x.zarr", {"zarr_format": 2}), ("x.zarr", {"zarr_format": 3})]


def everything(n: int = 6, m: int = 4) -> ad.AnnData:
    """Return an AnnData with every kind of element beside its matrices."""
    rng = np.random.default_rng(0)
    adata = ad.AnnData(
        sp.random(n, m, 0.5, "csr", np.float32, random_state=0),
        obs=pd.DataFrame(
            {"kind": pd.Categorical(["T", "B"] * (n // 2)), "percent.mt": np.arange(n) / 10},
            index=[f"c{i}" for i in range(n)],
        ),
        var=pd.DataFrame({"gene_symbols": [f"S{i}" for i in range(m)]}, index=[f"g{i}" for i in range(m)]),
    )
    adata.layers["csc"] = sp.csc_matrix(adata.X)
    adata.layers["dense"] = rng.normal(size=(n, m))
    adata.raw = ad.AnnData(
        sp.csr_matrix(rng.poisson(1, (n, m + 1))), var=pd.DataFrame(index=[f"r{i}" for i in range(m + 1)])
    )
    adata.obsm["pca"] = rng.normal(size=(n, 2))
    adata.obsm["sparse"] = sp.csc_matrix(np.eye(n, 3))
    adata.obsm["table"] = pd.DataFrame({"a": np.arange(n), "b": [f"t{i}" for i in range(n)]}, index=adata.obs_names)
    adata.varm["loadings"] = rng.normal(size=(m, 2))
    adata.obsp["graph"] = sp.csr_matrix(np.eye(n))
    adata.varp["dense"] = np.eye(m)
    adata.uns = {
        "kind_colors": np.array(["#000000", "#ffffff"], dtype=object),
        "nested": {"number": 1.5, "text": "a", "deeper": {"graph": sp.csr_matrix(np.eye(2)), "flag": True}},
        "nothing": None,
        "table": pd.DataFrame({"x": pd.Categorical(["a", None])}, index=["i", "j"]),
    }
    return adata


@pytest.mark.parametrize(("name", "options"), TARGETS)
@given(adata=anndatas())
@examples(2)
def test_a_copy_is_equal(tmp_path_factory: pytest.TempPathFactory, name: str, options: Any, adata: ad.AnnData) -> None:
    """Matrices of any form and type, layers, raw and tables of every kind come back from anndata as they were."""
    made = copy(adata, open_sink(tmp_path_factory.mktemp("x") / name, **options))
    found = read_anndata(made)
    # Missing text has a type of its own in files, and anndata 0.13 gives text of a Zarr folder as objects.
    text = [value if isinstance(value, str) else None for value in found.obs["text"]]
    found.obs["text"] = pd.array(text, dtype=adata.obs["text"].dtype)
    assert_same(adata, found)


@pytest.mark.parametrize(
    ("start", "name", "options"),
    [("memory", *TARGETS[0]), ("h5ad", *TARGETS[1]), ("h5ad", *TARGETS[2]), ("zarr", *TARGETS[0])],
)
def test_everything_beside_the_matrices_is_kept(tmp_path: Path, start: str, name: str, options: Any) -> None:
    """obsm, varm, obsp, varp, uns, raw and every layer are equal by anndata's own comparison, from any start."""
    adata = everything()
    source: Any = adata
    if start != "memory":
        with warnings.catch_warnings(action="ignore"):
            source = tmp_path / f"in.{start}"
            adata.write_h5ad(source) if start == "h5ad" else adata.write_zarr(source)
        adata = read_anndata(source)
    found = read_anndata(copy(source, open_sink(tmp_path / name, **options)))
    for given_layer, back in ((adata.layers[k], found.layers[k]) for k in ("csc", "dense")):
        assert_same_matrix("layer", given_layer, back)
    if start == "memory":
        # What anndata itself changes on the way through a file is not ours to compare.
        with warnings.catch_warnings(action="ignore"):
            adata.write_h5ad(tmp_path / "plain.h5ad")
        adata = read_anndata(tmp_path / "plain.h5ad")
    assert_equal(adata, found, exact=name == "x.h5ad" and start != "zarr")


def test_reading_an_element_of_selected_cells_changes_nothing() -> None:
    """Which cells the matrices of a selection are of is known before any of its elements is read, which may be on another thread."""
    parts = SourceParts(
        4,
        lambda: pd.DataFrame(index=list("abcd")),
        (),
        {},
        present={"mod/rna/obs": np.array([3, 1])},
        elements={"mod/rna/obsm/x": lambda: np.array([[30], [10]])},
    )
    selected = select_cells(parts, np.array([0, 3]))
    before = {key: cells.tolist() for key, cells in selected.present.items()}
    assert selected.elements["mod/rna/obsm/x"]().tolist() == [[30]]
    assert before == {"mod/rna/obs": [1]} == {key: cells.tolist() for key, cells in selected.present.items()}


@pytest.mark.parametrize("name", ["pbmc68k_reduced.h5ad", "pbmc_5k_protein_v3.h5ad"])
def test_real_files_come_back_equal(tmp_path: Path, name: str) -> None:
    """Files of other people, old layouts among them, are equal after h5ad -> zarr 2 -> h5ad."""
    copy(DATA / name, open_sink(tmp_path / "x.zarr", zarr_format=2))
    copy(tmp_path / "x.zarr", tmp_path / "x.h5ad")
    given_file, found = read_anndata(DATA / name), read_anndata(tmp_path / "x.h5ad")
    for adata in (given_file, found):
        # NaN is not equal to itself, also where it belongs.
        adata.varm = {k: np.nan_to_num(v) for k, v in adata.varm.items()}
    assert_equal(given_file, found, exact=True)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *(("lung_C144.h5", target) for target in ("x.h5ad", "x.zarr")),
        *(("wu2020.h5mu", target) for target in ("x.zarr", "x.h5ad")),
        *((name, "x.h5mu") for name in ("pbmc_5k_protein_v3.h5ad", "zarr", "mtx")),
    ],
)
def test_every_format_goes_into_every_other(tmp_path: Path, name: str, target: str) -> None:
    """Sources of each kind reach targets of each kind with their cells, features and sum of values."""
    source: Any = DATA / name
    if name in ("zarr", "mtx"):
        source = _folder(tmp_path, name)
    options = {"modality": "gex"} if name == "wu2020.h5mu" and target == "x.h5ad" else {}
    made = open_source(copy(source, tmp_path / target, **options))
    opened = open_source(source)
    key, at = (next(i.key for i in s.describe().matrices if i.key.endswith("X")) for s in (opened, made))
    assert opened.describe().matrix(key).shape == made.describe().matrix(at).shape  # type: ignore[union-attr]
    totals = [
        sum(float(b.layers["values"].sum()) for (b,) in s.blocks((k,), 50)) for s, k in ((opened, key), (made, at))
    ]
    assert totals[0] == pytest.approx(totals[1])
    assert options or opened.cells().num_rows == made.cells().num_rows
    opened.close()
    made.close()


def _folder(tmp_path: Path, kind: str) -> Path:
    if kind == "zarr":
        return Path(copy(everything(), tmp_path / "in.zarr"))
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "matrix.mtx").write_text("%%MatrixMarket matrix coordinate integer general\n3 2 3\n1 1 5\n3 1 1\n2 2 4\n")
    (folder / "barcodes.tsv").write_text("c0\nc1\n")
    (folder / "features.tsv").write_text("".join(f"g{i}\tS{i}\tGene Expression\n" for i in range(3)))
    return folder


@pytest.mark.long
def test_a_mudata_comes_back_equal(tmp_path: Path) -> None:
    """Modalities with different cells, global tables and what stands beside them survive h5mu -> zarr -> h5mu."""
    mudata = pytest.importorskip("mudata")
    rng = np.random.default_rng(0)
    mods = {
        name: ad.AnnData(
            sp.csr_matrix(rng.poisson(1.0, (len(cells), m)).astype(np.float32)),
            obs=pd.DataFrame({"q": rng.normal(size=len(cells))}, index=cells),
            var=pd.DataFrame(index=[f"{name}{i}" for i in range(m)]),
            uns={"made": name},
        )
        for name, cells, m in (("rna", ["a", "b", "c"], 4), ("prot", ["d", "b"], 2))
    }
    with warnings.catch_warnings(action="ignore"):
        mdata = mudata.MuData(mods)
        mdata.obs["batch"] = ["x", "y", "x", "y"]
        mdata.obsm["joint"] = rng.normal(size=(4, 2))
        mdata.uns["about"] = {"n": 1}
        mdata.write(tmp_path / "in.h5mu")
        copy(tmp_path / "in.h5mu", tmp_path / "x.zarr")
        found = mudata.read(copy(tmp_path / "x.zarr", tmp_path / "x.h5mu"))
        expected = mudata.read(tmp_path / "in.h5mu")
    for name in mods:
        assert_equal(expected[name], found[name], exact=True)
        np.testing.assert_array_equal(expected.obsmap[name], found.obsmap[name])
        np.testing.assert_array_equal(expected.varmap[name], found.varmap[name])
    pd.testing.assert_frame_equal(expected.obs, found.obs)
    pd.testing.assert_frame_equal(expected.var, found.var)
    np.testing.assert_array_equal(expected.obsm["joint"], found.obsm["joint"])
    assert found.uns["about"]["n"] == 1
    some = open_source(copy(tmp_path / "in.h5mu", tmp_path / "some.h5mu", where="batch = 'y'"))
    assert [some.describe().matrix(f"mod/{name}/X").shape[0] for name in mods] == [1, 2]  # type: ignore[union-attr]
    some.close()


@pytest.mark.long
@given(rows=st.sets(st.integers(0, 5), min_size=1), columns=st.lists(st.integers(0, 3), unique=True, min_size=1))
@examples(3)
def test_a_part_is_what_anndata_would_select(
    tmp_path_factory: pytest.TempPathFactory, rows: set[int], columns: list[int]
) -> None:
    """Chosen cells and features, in the order of the features asked, give anndata's own slice: without unused categories and their colors."""
    with warnings.catch_warnings(action="ignore"):
        adata = read_anndata(_written(everything(), tmp_path_factory.mktemp("x") / "in.h5ad"))
        wanted = adata[sorted(rows), columns].copy()
    made = copy(adata, tmp_path_factory.mktemp("x") / "x.h5ad", where=sorted(rows), features=[f"S{i}" for i in columns])
    found = read_anndata(made)
    assert_equal(wanted, found)


def _written(adata: ad.AnnData, path: Path) -> Path:
    adata.write_h5ad(path)
    return path


def test_cells_are_chosen_by_conditions_and_layers_by_name(tmp_path: Path) -> None:
    """SQL over obs knows the index and cleaned names; named layers stay and the others go; raw keeps its features."""
    some = read_anndata(
        copy(everything(), tmp_path / "x.h5ad", where="kind = 'B' AND percent_mt > 0.2", layers=["X", "raw"])
    )
    assert list(some.obs_names) == ["c3", "c5"]
    assert not some.layers
    assert some.raw.shape == (2, 5)
    other = read_anndata(copy(everything(), tmp_path / "y.h5ad", where="cell_name = 'c1'", layers=["dense"]))
    assert other.X is None
    assert other.raw is None
    assert other.layers["dense"].shape == (1, 4)


@pytest.mark.parametrize(
    ("choice", "error", "said"),
    [
        ({"where": "nowhere = 1"}, QueryError, "Columns are"),
        ({"where": [9]}, QueryError, "numbers of rows"),
        ({"where": [2, 0, 2]}, QueryError, "row 2 more than once"),
        ({"where": [True]}, QueryError, "one truth value"),
        ({"where": np.array([], bool)}, QueryError, "one truth value"),
        ({"features": ["g9"]}, FeatureError, "g9"),
        ({"features": ["g1", "S1"]}, FeatureError, "same features"),
        ({"layers": ["counts"]}, NotFoundError, "counts"),
        ({"modality": "atac"}, NotFoundError, "atac"),
        ({}, SourceError, "modality="),
    ],
)
def test_choices_that_cannot_be_are_refused(tmp_path: Path, choice: Any, error: type[Exception], said: str) -> None:
    """A wrong choice is told by name, and nothing is left of the copy; of several modalities one must be chosen."""
    source = everything() if choice else DATA / "wu2020.h5mu"
    with pytest.raises(error, match=said):
        copy(source, tmp_path / "x.h5ad", **choice)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "options"), TARGETS)
def test_records_come_back_as_records(tmp_path: Path, name: str, options: Any) -> None:
    """A structured array, whatever its fields are called, is written as anndata writes it and read as records."""
    records = np.array([("a", 1.0), ("b", 2.0)], dtype=[("CD4+/CD25 T Reg", "O"), ("score", "f4")])
    adata = ad.AnnData(np.ones((2, 2), np.float32), uns={"rank": {"genes": records}})
    made = copy(adata, open_sink(tmp_path / name, **options))
    found = read_anndata(made).uns["rank"]["genes"]
    assert found.dtype.names == records.dtype.names
    for field in records.dtype.names:
        assert found[field].tolist() == records[field].tolist()
    assert [str(problem) for problem in validate(made)] == []


@pytest.mark.long
def test_records_of_anndata_0_13_are_read(tmp_path: Path) -> None:
    """A Zarr 3 store with rankings, as anndata 0.13 and zarr 3.4 write them, is valid and copied and added without loss."""
    stored = tmp_path / "in.zarr"
    with zipfile.ZipFile(DATA / "records_anndata_0.13.zarr.zip") as archive:
        archive.extractall(stored)
    assert [str(problem) for problem in validate(stored) if problem.level == "must"] == []
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(stored, "d", progress=False)
    copies = [
        read_anndata(copy(stored, open_sink(tmp_path / name, overwrite=True, **options))) for name, options in TARGETS
    ]
    for found in (*copies, atlas.dataset("d").to_anndata()):
        ranking = found.uns["rank_genes_groups"]
        assert ranking["names"].dtype.names == ("CD4+/CD25 T Reg", "T/NK", "B")
        assert [tuple(row) for row in ranking["names"]] == [("CD3E", "NKG7", "MS4A1"), ("CD4", "GNLY", "CD79A")]
        assert [tuple(row) for row in ranking["scores"].tolist()] == [(1.5, 2.5, 3.5), (0.5, 1.0, 2.0)]
        assert found.uns["complex"] == 1 + 2j


class Lazy:
    """What an element needs to be taken for one of dask, which is not installed here."""

    __module__ = "dask.array.core"

    def __init__(self, values: Any) -> None:
        self.shape, self._values = values.shape, values

    def compute(self) -> Any:
        return self._values


def test_dask_arrays_are_computed(tmp_path: Path) -> None:
    """Elements that are dask arrays, also within mappings, become what they compute to, in files and in an atlas."""
    wanted = ad.AnnData(np.ones((3, 2), np.float32), obs=pd.DataFrame(index=["a", "b", "c"]))
    lazy, values = wanted.copy(), np.arange(6.0).reshape(3, 2)
    wanted.uns = {"outer": values, "params": {"inner": sp.csr_matrix(values)}}
    lazy.uns = {"outer": Lazy(values), "params": {"inner": Lazy(sp.csr_matrix(values))}}
    assert_same(wanted, read_anndata(copy(lazy, tmp_path / "x.zarr")))
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(lazy, "d", progress=False)
    assert_same(wanted, atlas.dataset("d").to_anndata())


@pytest.mark.parametrize("columns", [{}, {"flag": [True, False, True], "n": [1, 2, 3]}])
def test_tables_that_make_no_matrix_are_kept_as_tables(tmp_path: Path, columns: dict[str, Any]) -> None:
    """A table in obsm without columns, or with truths beside numbers, comes back from files and from an atlas."""
    names = ["a", "b", "c"]
    adata = ad.AnnData(np.ones((3, 2), np.float32), obs=pd.DataFrame(index=names))
    adata.obsm["table"] = pd.DataFrame(columns, index=names)
    theirs = read_anndata(_written(adata.copy(), tmp_path / "theirs.h5ad"))
    assert_equal(theirs, read_anndata(copy(adata, tmp_path / "x.h5ad")))
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(adata, "d", progress=False)
    assert_equal(adata, atlas.dataset("d").to_anndata())


def with_complex() -> ad.AnnData:
    """Return an AnnData with complex numbers wherever it takes numbers."""
    phases = np.array([[1 + 2j, 0, 3j], [0, -1, 0]], np.complex64)
    adata = ad.AnnData(phases, layers={"sparse": sp.csr_matrix(phases), "csc": sp.csc_matrix(phases.astype(complex))})
    adata.obsm["m"], adata.obsp["p"], adata.varp["p"] = phases, sp.csr_matrix(phases[:, :2]), np.eye(3) * 1j
    adata.uns = {"scalar": np.complex64(1 - 1j), "deep": {"scalar": np.complex128(2j)}, "array": phases[0]}
    return adata


@pytest.mark.parametrize(("name", "options"), TARGETS)
def test_complex_numbers_are_copied(tmp_path: Path, name: str, options: Any) -> None:
    """Complex numbers in matrices, beside them and alone come back as anndata gives them back, from memory and from files."""
    with warnings.catch_warnings(action="ignore"):
        with_complex().write_h5ad(tmp_path / "in.h5ad")
    for source in (with_complex(), tmp_path / "in.h5ad"):
        found = read_anndata(copy(source, open_sink(tmp_path / f"made_{name}", overwrite=True, **options)))
        assert_equal(read_anndata(tmp_path / "in.h5ad"), found, exact=True)


@pytest.mark.parametrize("dtype", [np.longlong, np.ulonglong])
@pytest.mark.parametrize(("name", "options"), TARGETS)
def test_the_other_integers_of_64_bits(tmp_path: Path, name: str, options: Any, dtype: Any) -> None:
    """Values of C's second type of that size, which Zarr does not know, are written anywhere, and so are numbers from 2**63 on."""

    def given(dtype: Any) -> ad.AnnData:
        values = np.arange(9).reshape(3, 3).astype(dtype)
        adata = ad.AnnData(values, layers={"s": sp.csr_matrix(values)}, obsm={"e": values}, varp={"p": values})
        adata.obs["n"] = values[0]
        adata.uns = {"one": dtype(7), "deep": {"some": values}, "table": pd.DataFrame({"n": values[0]})}
        return adata

    made = read_anndata(copy(given(dtype), open_sink(tmp_path / name, **options)))
    usual = np.int64 if dtype is np.longlong else np.uint64
    copy(given(usual), open_sink(tmp_path / f"usual_{name}", **options))
    assert_equal(read_anndata(tmp_path / f"usual_{name}"), made, exact=True)
    # anndata reads a single number of Zarr as a Python integer.
    large = ad.AnnData(np.ones((1, 1)), uns={"n": 2**64 - 1, "list": [2**63]})
    found = read_anndata(copy(large, open_sink(tmp_path / f"large_{name}", **options)))
    assert (found.uns["n"], found.uns["list"].tolist()) == (2**64 - 1, [2**63])


@pytest.mark.parametrize("dtype", ["float16", ">f4"])
@pytest.mark.parametrize(("name", "options"), TARGETS)
def test_types_that_scipy_does_not_hold(tmp_path: Path, name: str, options: Any, dtype: str) -> None:
    """Sparse matrices of half precision or foreign byte order, which anndata cannot read, are read and written as float32 wherever they are."""
    keys = ("X", "layers/csc", "obsm/s", "obsp/g", "raw/X", "uns/s")

    def given(*, of: str = "float32") -> ad.AnnData:
        def matrix(kind: Any = sp.csr_matrix) -> Any:
            made = kind(np.array([[1, 0, 2], [0, 0.5, 0], [3, 4, 0]], np.float32))
            made.data = made.data.astype(of)
            return made

        adata = ad.AnnData(matrix(), layers={"csc": matrix(sp.csc_matrix)}, uns={"s": matrix()})
        adata.raw = ad.AnnData(matrix())
        adata.obsm["s"], adata.obsp["g"] = matrix(), matrix()
        return adata

    path = tmp_path / "in.h5ad"
    expected = given()
    with warnings.catch_warnings(action="ignore"):
        expected.write_h5ad(path)
    with h5py.File(path, "r+") as file:
        for key in keys:
            values, attributes = file[key]["data"][...], dict(file[key]["data"].attrs)
            del file[key]["data"]
            file[key].create_dataset("data", data=values.astype(dtype)).attrs.update(attributes)
    with pytest.raises(ValueError, match="does not support dtype"):
        read_anndata(path)
    assert {(p.rule, p.path) for p in validate(path) if p.level == "must"} == {("A61", f"{key}/data") for key in keys}
    for source in (path, given(of=dtype)):
        made = copy(source, open_sink(tmp_path / f"made_{name}", overwrite=True, **options))
        assert_equal(expected, read_anndata(made), exact=True)
        assert validate(made) == []
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(path, "d", progress=False)
    assert_equal(expected, atlas.dataset("d").to_anndata(), exact=True)


def test_halves_that_were_dense_are_computed_with_when_sparse(tmp_path: Path) -> None:
    """A query gives cells of dense half-precision matrices as a sparse matrix that SciPy computes with; the dataset alone stays as it was."""
    dense = np.array([[0.5, 0.5], [2, 2]], np.float16)
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(ad.AnnData(dense), "d", progress=False)
    assert_same_matrix("X", dense, atlas.dataset("d").to_anndata().X)
    found = atlas.checkout(atlas.snapshot()).query().to_anndata()
    np.testing.assert_array_equal((found.X * 2).toarray(), dense * 2)


def test_complex_numbers_in_an_atlas(tmp_path: Path) -> None:
    """An atlas keeps complex numbers beside the cells; as a layer they are refused by name before anything is written."""
    adata = with_complex()
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    with pytest.raises(SchemaError, match=r"X holds complex numbers \(complex64\).*layers="):
        atlas.add(adata, progress=False)
    adata.X = np.ones((2, 3), np.float32)
    del adata.layers["sparse"], adata.layers["csc"]
    with warnings.catch_warnings(action="ignore"):
        adata.write_h5ad(tmp_path / "in.h5ad")
    atlas.add(tmp_path / "in.h5ad", "d", progress=False)
    assert_equal(read_anndata(tmp_path / "in.h5ad"), atlas.dataset("d").to_anndata(), exact=True)


def test_what_no_h5ad_has_and_no_source_leave_nothing(tmp_path: Path) -> None:
    """A member that anndata's readers would stop at is refused with the way out; so is a source that cannot be."""
    sink = open_sink(tmp_path / "x.h5ad")
    with pytest.raises(SchemaError, match="uns/atlas"):
        sink.element("atlas", 1)
    sink.abort()
    with pytest.raises(NotFoundError, match="absent"):
        copy(tmp_path / "absent.h5ad", open_sink(tmp_path / "x.h5ad"))
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
import numpy as np
import scipy.sparse as sp
from raggedatlas.formats.registry import open_sink
from raggedatlas.model.batch import CsrBlock
from raggedatlas.model.protocols import SinkMatrix
sink = open_sink(sys.argv[1])
sink.begin((SinkMatrix.of("X", "csr", "f4", (10**9, 9)),))
rows = 100_000
block = CsrBlock(np.arange(rows + 1), np.zeros(rows, np.int32), {"values": np.ones(rows, np.float32)}, 9)
while True:
    sink.write("X", block)
    print("on", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["x.h5ad", "x.zarr"])
def test_a_killed_export_leaves_no_file_under_its_name(tmp_path: Path, name: str) -> None:
    """Killed in the middle of its writing, an export leaves nothing that a reader would take for its result."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / name)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(30):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    left = [path.name for path in tmp_path.iterdir()]
    assert left
    assert all(part.startswith(f".{name}.") and part.endswith(".partial") for part in left)
    made = copy(everything(), tmp_path / name)
    assert read_anndata(made).shape == (6, 4)


COMPRESSED = [("x.h5ad", c) for c in ("gzip", "zstd:9", "blosc", "lzf", None)]
COMPRESSED += [("x2.zarr", c) for c in ("blosc", "zstd", "gzip:4")]
COMPRESSED += [("x3.zarr", c) for c in ("blosc", "gzip", None, "lzf")]


@pytest.mark.parametrize(("name", "compression"), COMPRESSED)
def test_every_compression_opens_equal(tmp_path: Path, name: str, compression: str | None) -> None:
    """Whatever the compression, anndata reads the same; HDF5 holds shuffled chunks of 65,536 values, or plain arrays in one piece."""
    pytest.importorskip("hdf5plugin")
    options: dict[str, Any] = {"compression": compression}
    options |= {"zarr_format": int(name[1])} if name.endswith(".zarr") else {}
    if compression == "lzf" and name.endswith(".zarr"):
        with pytest.raises(SourceError, match="lzf"):
            open_sink(tmp_path / name, **options)
        return
    values = sp.random(400, 500, 0.5, "csr", np.float32, random_state=0)
    adata = ad.AnnData(values, layers={"dense": np.arange(200_000, dtype=np.int32).reshape(400, 500)})
    found = read_anndata(copy(adata, open_sink(tmp_path / name, **options)))
    assert_same(adata, found)
    if name == "x.h5ad":
        with h5py.File(tmp_path / name) as file:
            data = file["X/data"]
            assert data.chunks == (None if compression is None else (65_536,))
            if compression in ("gzip", "lzf"):
                assert (data.compression, data.shuffle) == (compression, True)


def test_plugins_that_are_not_installed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """zstd and blosc in HDF5 ask for the extra by its name, and unknown compressions list the known ones."""
    from raggedatlas.errors import MissingExtraError
    from raggedatlas.formats import output_files

    monkeypatch.setattr(output_files, "filter_available", lambda code: False)
    with pytest.raises(MissingExtraError, match=r"raggedatlas\[plugins\]"):
        open_sink(tmp_path / "x.h5ad", compression="zstd")
    for asked in ("zip", "gzip:10", "lzf:1", "zstd:x"):
        with pytest.raises(SourceError, match=r"choose one of|levels"):
            open_sink(tmp_path / "x.h5ad", compression=asked)
    assert list(tmp_path.iterdir()) == []


def test_members_without_a_name_are_read() -> None:
    """Members of every group whose name is empty are members, not the group."""
    nameless = ad.AnnData(
        np.ones((2, 2), np.float32), obsm={"": np.zeros((2, 3))}, layers={"": np.ones((2, 2))}, uns={"": 1}
    )
    back = read(nameless)
    assert (list(back.obsm), list(back.layers), dict(back.uns)) == ([""], list(nameless.layers), {"": 1})


KINDS = ("str", "object", "string[python]", "string[pyarrow]")

WAYS = {"h5ad": {}, "zarr 2": {"zarr_format": 2}, "zarr 3": {"zarr_format": 3}}


def texts(values: list[Any], kind: str) -> Any:
    return pd.Series(values, dtype=object).array if kind == "object" else pd.array(values, dtype=kind)


def cells(index: str, n_cells: int) -> ad.AnnData:
    """Return cells whose columns and categories have every type of text, with and without missing values, and their names one.

    Objects with missing values are left out: anndata writes them to no file.
    """
    words, holes = ["b", "", "ü"][:n_cells], ["b", None, "ü"][:n_cells]
    obs = {kind: texts(words, kind) for kind in KINDS}
    obs |= {f"{kind} with holes": texts(holes, kind) for kind in KINDS if kind not in ("object", "str")}
    # A generation of pandas whose ``str`` is of objects has no missing values in it.
    if isinstance(texts(words, "str").dtype, pd.StringDtype):
        obs["str with holes"] = texts(holes, "str")
    obs |= {f"categories of {kind}": pd.Categorical(texts(words, kind)) for kind in KINDS}
    obs |= {f"categories of {kind} with holes": pd.Categorical(texts(holes, kind)) for kind in KINDS}
    names = pd.Index(texts(["c1", "c2", "c3"][:n_cells], index), dtype=object if index == "object" else index)
    made = ad.AnnData(np.ones((n_cells, 1), np.float32), obs=pd.DataFrame(obs, index=names))
    # A table beside the cells is written as a whole, that of the cells column by column.
    made.obsm["table"] = made.obs.copy()
    return made


def types(frame: pd.DataFrame) -> dict[str, Any]:
    """Return every dtype, with how its text is stored and what stands for a missing one."""
    found = {str(name): column.dtype for name, column in frame.items()} | {"index": frame.index.dtype}
    inner = {
        f"categories of {name}": column.cat.categories.dtype
        for name, column in frame.items()
        if isinstance(column.dtype, pd.CategoricalDtype)
    }
    return {
        name: (str(dtype), getattr(dtype, "storage", ""), repr(getattr(dtype, "na_value", "")))
        for name, dtype in (found | inner).items()
    }


def written_by_anndata(adata: ad.AnnData, path: Path, way: str) -> Path:
    if way == "h5ad":
        adata.write_h5ad(path, convert_strings_to_categoricals=False)
    else:
        with ad.settings.override(zarr_write_format=int(way[-1])):
            adata.write_zarr(path, convert_strings_to_categoricals=False)
    return path


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("n_cells", [3, pytest.param(0, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("index", "way"),
    [
        # In the usual run, of Zarr a text that pandas keeps itself and one of pyarrow.
        pytest.param(index, way, marks=[] if way == "h5ad" or index in usual else [pytest.mark.nightly])
        for index in KINDS
        for way, usual in (("h5ad", KINDS), ("zarr 3", ("object", "string[pyarrow]")), ("zarr 2", ()))
    ],
)
def test_text_comes_back_with_the_type_that_anndata_gives_it(
    tmp_path: Path, index: str, way: str, n_cells: int
) -> None:
    """Columns, names and categories of every type of text, from memory and from a file of anndata's, into each format and an atlas."""
    ending = "h5ad" if way == "h5ad" else "zarr"
    adata = cells(index, n_cells)
    with ad.settings.override(allow_write_nullable_strings=True):
        stored = written_by_anndata(adata.copy(), tmp_path / f"theirs.{ending}", way)
        theirs = read_anndata(stored)
    found = [
        read_anndata(copy(adata, open_sink(tmp_path / f"memory.{ending}", **WAYS[way]))),
        read_anndata(copy(stored, open_sink(tmp_path / f"file.{ending}", **WAYS[way]))),
    ]
    if way == "h5ad" and n_cells:
        atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
        atlas.add(stored, "d", progress=False)
        found.append(atlas.dataset("d").to_anndata())
    for ours in found:
        for found_table, table in ((ours.obs, theirs.obs), (ours.obsm["table"], theirs.obsm["table"])):
            assert types(found_table) == types(table)
            pd.testing.assert_frame_equal(found_table, table)


NO_TEXT = {
    "numbers among text": np.array([1, "a"], object),
    "nothing among text": np.array(["a", None], object),
    "a list of both": [1, "a"],
    "a masked number": np.ma.masked_array([1, 2], [False, True]),
    "numbers and a missing value": pd.DataFrame({"x": [1, "a", None]}, dtype=object),
    "lists": pd.DataFrame({"x": pd.Series([[1], [2]])}),
    "bytes and a missing value": pd.DataFrame({"x": [b"a", None]}),
    "categories of both": pd.DataFrame({"x": pd.Categorical([1, "a"])}),
    "periods": pd.DataFrame({"x": pd.period_range("2020-01", periods=2, freq="M")}),
    "integers beyond 64 bits": pd.DataFrame({"x": pd.Series([2**80, 1], dtype=object)}),
    "a nameless row": pd.DataFrame({"x": [1, 2]}, index=["a", None]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["h5ad", "zarr 3"])
@pytest.mark.parametrize("value", NO_TEXT)
def test_values_that_would_become_text_are_refused(tmp_path: Path, value: str, way: str) -> None:
    """Objects of which a file would hold no more than their representation as text, or another value, are refused by name."""
    given = ad.AnnData(np.ones((2, 1), np.float32), uns={"odd": NO_TEXT[value]})
    with pytest.raises(SchemaError, match="uns/odd cannot be written"):
        copy(given, open_sink(tmp_path / f"x.{way[:4]}", **WAYS[way]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["h5ad", "zarr 3"])
def test_objects_and_categories_keep_their_values(tmp_path: Path, way: str) -> None:
    """Booleans and integers among objects stay that, categories of nullable numbers stay numbers, times become ISO text; missing stays missing."""
    obs = pd.DataFrame(
        {
            "flag": pd.Series([True, None, False], dtype=object),
            "nullable": pd.Categorical(pd.array([3, None, 1], dtype="Int64")),
            "arrow": pd.Categorical(pd.array([3, None, 1], dtype="int64[pyarrow]")),
            "count": pd.Series([2**60 + 1, None, 0], dtype=object),
            "time": pd.to_datetime(["2020-01-02", None, "2021-03-04 05:06:07.123456789"], format="mixed"),
            "day": pd.Series([dt.date(2020, 1, 2), None, dt.date(2021, 3, 4)], dtype=object),
            "span": pd.to_timedelta([1, None, 3], unit="h"),
            "zone": pd.Categorical(pd.to_datetime(["2020-01-02", None, "2021-03-04"]).tz_localize("Europe/Berlin")),
        }
    ).set_axis(["a", "b", "c"])
    back = read_anndata(
        copy(ad.AnnData(np.ones((3, 1), np.float32), obs=obs), open_sink(tmp_path / f"x.{way[:4]}", **WAYS[way]))
    ).obs
    assert back["flag"].tolist() == [True, pd.NA, False]
    assert back["count"].tolist() == [2**60 + 1, pd.NA, 0]
    for name, texts in {
        "time": ["2020-01-02T00:00:00", "2021-03-04T05:06:07.123456789"],
        "day": ["2020-01-02", "2021-03-04"],
        "span": ["P0DT1H0M0S", "P0DT3H0M0S"],
        "zone": ["2020-01-02T00:00:00+01:00", "2021-03-04T00:00:00+01:00"],
    }.items():
        assert back[name].isna().tolist() == [False, True, False]
        assert back[name].dropna().tolist() == texts
    for name in ("nullable", "arrow"):
        assert back[name].cat.categories.tolist() == [1, 3]
        assert back[name].cat.codes.tolist() == [1, -1, 0]


def test_arrays_of_a_read_file_go_with_the_object(tmp_path: Path) -> None:
    """Nothing else keeps them: reading one file after the other needs the memory of one."""
    adata = everything()
    del adata.raw  # which refers to its AnnData
    adata.write_h5ad(tmp_path / "x.h5ad")
    gc.collect()
    gc.disable()
    try:
        made = read(tmp_path / "x.h5ad")
        arrays = [weakref.ref(array) for array in (made.X.data.base, made.layers["dense"], made.obsm["pca"])]
        del made
        assert not [array for array in arrays if array() is not None]
    finally:
        gc.enable()
