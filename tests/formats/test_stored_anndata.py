"""AnnData files and objects as sources: equal to anndata's own reading, whatever their age and layout."""

import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr

from raggedatlas.formats.anndata.source import h5ad_source, object_source, zarr_source
from raggedatlas.formats.composite_source import CompositeSource
from raggedatlas.model.batch import CsrBlock
from raggedatlas.model.frames import arrow_to_frame
from raggedatlas.testing.conformance import dense as dense_blocks
from reading import dense

DATA = Path(__file__).parent.parent / "data"


def matrix_of(source: CompositeSource, key: str, n_rows: int = 97) -> Any:
    """Read a whole matrix through its blocks."""
    info = next(m for m in source.describe().matrices if m.key == key)
    return dense_blocks([block for (block,) in source.blocks((key,), n_rows)], info)


def assert_same_frame(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(
        found, pd.DataFrame(expected), check_names=False, check_index_type=False, check_column_type=False
    )


def assert_reads_as(source: CompositeSource, adata: ad.AnnData) -> None:
    """Compare all that a source gives with an AnnData."""
    assert_same_frame(arrow_to_frame(source.cells()), adata.obs)
    assert_same_frame(arrow_to_frame(source.features("var")), adata.var)
    schema = source.describe()
    keys = {"X"} if adata.X is not None else set()
    keys |= {f"layers/{name}" for name in adata.layers if name is not None} | {f"obsm/{name}" for name in adata.obsm}
    if adata.raw is not None:
        keys.add("raw/X")
        assert_same_frame(arrow_to_frame(source.features("raw/var")), adata.raw.var)
        np.testing.assert_array_equal(matrix_of(source, "raw/X"), dense(adata.raw.X))
    assert {m.key for m in schema.matrices} == keys
    for m in schema.matrices:
        if m.key != "raw/X":
            group, _, name = m.key.partition("/")
            value = adata.X if group == "X" else getattr(adata, group)[name]
            value = value.to_numpy() if isinstance(value, pd.DataFrame) else value
            assert m.dtype == value.dtype
            assert m.form == ("dense" if not sp.issparse(value) else value.format)
            np.testing.assert_array_equal(matrix_of(source, m.key), dense(value))
    source.close()


@pytest.fixture
def everything() -> ad.AnnData:
    """A small AnnData with one of each kind of element."""
    rng = np.random.default_rng(7)
    x = sp.random_array((20, 6), density=0.4, rng=rng, format="csr", dtype=np.float32)
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical(["T", "B", None, "T"] * 5, categories=["T", "B", "unused"], ordered=True),
            "n": np.arange(20, dtype=np.int32),
            "maybe": pd.array([1, None] * 10, dtype="Int64"),
            "flag": np.arange(20) % 2 == 0,
            "text": [f"t{i}" for i in range(20)],
        },
        index=[f"c{i}" for i in range(20)],
    )
    adata = ad.AnnData(x, obs=obs, var=pd.DataFrame({"symbol": list("abcdef")}, index=[f"g{i}" for i in range(6)]))
    adata.raw = adata.copy()
    adata = adata[:, :5].copy()
    adata.layers["csc"] = sp.csc_matrix(adata.X).astype(np.float64)
    adata.layers["dense"] = np.asarray(adata.X.todense()).astype(np.int16)
    adata.obsm["X_pca"] = rng.normal(size=(20, 3))
    adata.obsm["table"] = pd.DataFrame({"p1": np.arange(20.0), "p2": np.arange(20.0)}, index=obs.index)
    adata.varm["loadings"] = rng.normal(size=(5, 2))
    adata.obsp["graph"] = sp.eye_array(20, format="csr")
    adata.uns = {"one": 1, "nested": {"two": "2"}}
    return adata


@pytest.mark.parametrize("name", sorted(p.name for p in DATA.glob("*.h5ad")))
def test_real_files_read_as_anndata_reads_them(name: str) -> None:
    """A real file gives what anndata gives: frames, dtypes, categories, matrices, raw."""
    with warnings.catch_warnings(action="ignore"):
        expected = ad.read_h5ad(DATA / name)
    assert_reads_as(h5ad_source(DATA / name), expected)


def test_h5ad_reads_as_it_was(everything: ad.AnnData, tmp_path: Path) -> None:
    """A written file gives what was written."""
    everything.write_h5ad(tmp_path / "x.h5ad", compression="gzip")
    assert_reads_as(h5ad_source(tmp_path / "x.h5ad"), everything)


@pytest.mark.long
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_zarr_reads_as_it_was(everything: ad.AnnData, tmp_path: Path, zarr_format: int) -> None:
    """A Zarr folder of either format gives what was written."""
    with warnings.catch_warnings(action="ignore"):
        ad.io.write_elem(zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=zarr_format), "/", everything)
    assert_reads_as(zarr_source(tmp_path / "x.zarr"), everything)


def test_objects_and_views_read_as_they_are(everything: ad.AnnData) -> None:
    """An object in memory gives itself; a view, even of a view, gives what its copy would hold."""
    assert_reads_as(object_source(everything), everything)
    view = everything[::2][[3, 1, 7], [4, 0]]
    assert view.is_view
    assert_reads_as(object_source(view), view.copy())


def test_backed_reads_from_its_file(everything: ad.AnnData, tmp_path: Path) -> None:
    """A backed object reads X from its file and the rest from memory; so does a view of it."""
    everything.write_h5ad(tmp_path / "x.h5ad")
    backed = ad.read_h5ad(tmp_path / "x.h5ad", backed="r")
    source = object_source(backed)
    np.testing.assert_array_equal(matrix_of(source, "X", 3), dense(everything.X))
    np.testing.assert_array_equal(matrix_of(source, "raw/X", 3), dense(everything.raw.X))
    view = object_source(backed[4:9])
    np.testing.assert_array_equal(matrix_of(view, "X", 2), dense(everything.X)[4:9])
    assert source.describe().uri.endswith("x.h5ad")
    backed.file.close()


def test_what_is_left_out_is_listed(everything: ad.AnnData, tmp_path: Path) -> None:
    """Everything that is no matrix, cell or feature column stands in left_out, files and objects alike."""
    everything.obsm["mixed"] = pd.DataFrame({"t": ["x"] * 20, "n": np.arange(20)}, index=everything.obs_names)
    everything.write_h5ad(tmp_path / "x.h5ad")
    stored, held = h5ad_source(tmp_path / "x.h5ad"), object_source(everything)
    expected = {"obsp/graph", "varm/loadings", "uns/one", "uns/nested", "obsm/mixed"}
    assert expected == set(stored.describe().left_out) == set(held.describe().left_out)
    stored.close()


@pytest.mark.parametrize("shape", ["round", [1.5, 2, 3], np.array("x", h5py.string_dtype())])
def test_an_attribute_shape_is_of_sparse_matrices_only(everything: ad.AnnData, tmp_path: Path, shape: Any) -> None:
    """Of a group that is no sparse matrix the attribute `shape` is its writer's own: the encoding decides, as in anndata."""
    everything.write_h5ad(tmp_path / "x.h5ad")
    with h5py.File(tmp_path / "x.h5ad", "r+") as file:
        file["uns/nested"].attrs["shape"] = shape
    source = h5ad_source(tmp_path / "x.h5ad")
    assert source.describe().left_out["uns/nested"] == "dict"
    assert source.element("uns/nested") == ad.read_h5ad(tmp_path / "x.h5ad").uns["nested"]
    source.close()


def test_absent_or_null_x_is_no_matrix(everything: ad.AnnData, tmp_path: Path) -> None:
    """A file or object without X is read without it."""
    bare = ad.AnnData(obs=everything.obs, obsm={"e": np.ones((20, 2))})
    bare.write_h5ad(tmp_path / "x.h5ad")
    for source in (h5ad_source(tmp_path / "x.h5ad"), object_source(bare), object_source(bare[:5])):
        assert [m.key for m in source.describe().matrices] == ["obsm/e"]
        source.close()


def test_feature_types_name_the_space(everything: ad.AnnData, tmp_path: Path) -> None:
    """A matrix whose features are all peaks is chromatin accessibility; mixed ones stay gene expression."""
    for types, space in ((["Peaks"] * 5, "chromatin_accessibility"), (["Peaks"] * 4 + ["x"], "gene_expression")):
        everything.var["feature_types"] = types
        everything.write_h5ad(tmp_path / "x.h5ad")
        source = h5ad_source(tmp_path / "x.h5ad")
        for found in (source, object_source(everything)):
            matrix = found.describe().matrix("X")
            assert matrix is not None
            assert matrix.space == space
        source.close()


@pytest.mark.parametrize("dotted", [True, False])
def test_structured_layout_of_anndata_0_5(tmp_path: Path, dotted: bool) -> None:
    """Files whose tables are structured arrays, with categories in uns and `raw.X` at the root, read by rows."""
    x = sp.random_array((4, 3), density=0.6, rng=np.random.default_rng(1), format="csr", dtype=np.float32)
    with h5py.File(tmp_path / "old.h5ad", "w") as file:
        group = file.create_group("X")
        for name in ("data", "indices", "indptr"):
            group[name] = getattr(x, name)
        group.attrs["h5sparse_format"], group.attrs["h5sparse_shape"] = b"csr", np.array([4, 3])
        obs = np.array(
            [(b"a", 0, 1.5), (b"b", 1, 2.5), (b"c", -1, 0.0), (b"d", 0, 1.0)],
            dtype=[("index", "S1"), ("kind", "i1"), ("score", "f4")],
        )
        file["obs"] = obs
        file["var"] = np.array([(b"g1",), (b"g2",), (b"g3",)], dtype=[("index", "S2")])
        file["uns/kind_categories"] = np.array([b"T", b"B"])
        file["obsm"] = np.array([([1, 2],), ([3, 4],), ([5, 6],), ([7, 8],)], dtype=[("X_umap", "f8", (2,))])
        if dotted:
            file["raw.X"] = np.arange(8, dtype=np.float32).reshape(4, 2)
            file["raw.var"] = np.array([(b"r1",), (b"r2",)], dtype=[("index", "S2")])
    source = h5ad_source(tmp_path / "old.h5ad")
    cells = arrow_to_frame(source.cells())
    assert list(cells.index) == ["a", "b", "c", "d"]
    assert cells["kind"].tolist()[:2] == ["T", "B"]
    assert cells["kind"].isna().tolist() == [False, False, True, False]
    np.testing.assert_array_equal(matrix_of(source, "X", 3), x.toarray())
    np.testing.assert_array_equal(matrix_of(source, "obsm/X_umap", 3)[:, 0], [1, 3, 5, 7])
    if dotted:
        np.testing.assert_array_equal(matrix_of(source, "raw/X", 3), np.arange(8).reshape(4, 2))
        assert source.features("raw/var").column("_index").to_pylist() == ["r1", "r2"]
    source.close()


def test_names_of_proteins_come_from_uns() -> None:
    """The older pattern, names in uns beside an array in obsm, gives the features of that array."""
    source = h5ad_source(DATA / "pbmc_5k_protein_v3.h5ad")
    matrix = source.describe().matrix("obsm/protein_expression")
    assert matrix is not None
    assert matrix.features == "obsm/protein_expression"
    names = source.features(matrix.features).column("_index").to_pylist()
    assert len(names) == matrix.shape[1]
    assert any("CD3" in name for name in names)
    source.close()


def test_int64_pointers_and_unsorted_duplicates_pass_through(tmp_path: Path) -> None:
    """What a file stores in a row comes as stored: order, duplicates and 64-bit pointers included."""
    adata = ad.AnnData(sp.csr_matrix((2, 4), dtype=np.int64))
    adata.write_h5ad(tmp_path / "x.h5ad")
    with h5py.File(tmp_path / "x.h5ad", "r+") as file:
        for name, values in {
            "indptr": np.array([0, 3, 4]),
            "indices": np.array([2, 0, 2, 1]),
            "data": np.arange(4),
        }.items():
            del file[f"X/{name}"]
            file[f"X/{name}"] = values
    source = h5ad_source(tmp_path / "x.h5ad")
    ((block,),) = source.blocks(("X",), 10)
    assert isinstance(block, CsrBlock)
    assert block.indices.tolist() == [2, 0, 2, 1]
    source.close()


def test_several_matrices_walk_in_step(everything: ad.AnnData) -> None:
    """Blocks of several matrices cover the same rows."""
    source = object_source(everything)
    for x, csc, pca in source.blocks(("X", "layers/csc", "obsm/X_pca"), 7):
        assert x.n_rows == csc.n_rows == pca.n_rows <= 7
