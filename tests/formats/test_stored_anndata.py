"""AnnData files and objects as sources: equal to anndata's own reading, whatever their age, layout and writer."""

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
import zarr
from anndata.io import write_elem

from raggedatlas.errors import SourceError
from raggedatlas.formats.anndata.elements import ELEMENTS, read_element
from raggedatlas.formats.anndata.source import h5ad_source, object_source, zarr_source
from raggedatlas.formats.composite_source import CompositeSource
from raggedatlas.formats.containers import open_hdf5, open_member
from raggedatlas.formats.copying import copy
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


@pytest.mark.parametrize("zarr_format", [None, 2, 3])
def test_what_was_written_is_read(everything: ad.AnnData, tmp_path: Path, zarr_format: Any) -> None:
    """An h5ad file and a Zarr folder of either format give what was written."""
    if zarr_format is None:
        everything.write_h5ad(tmp_path / "x.h5ad", compression="gzip")
        assert_reads_as(h5ad_source(tmp_path / "x.h5ad"), everything)
        return
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


def test_an_index_listed_as_a_column_of_a_frame_in_obsm_is_no_feature(everything: ad.AnnData, tmp_path: Path) -> None:
    """The features of a frame in obsm are those of its matrix, also where the order of its columns names its index."""
    everything.write_h5ad(tmp_path / "x.h5ad")
    with h5py.File(tmp_path / "x.h5ad", "r+") as file:
        file["obsm/table"].attrs["column-order"] = ["_index", "p1", "p2"]
    source = h5ad_source(tmp_path / "x.h5ad")
    assert source.describe().matrix("obsm/table").shape == (20, 2)
    assert source.features("obsm/table").column(0).to_pylist() == ["p1", "p2"]
    source.close()


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


def test_graphs_are_looked_for_where_old_files_have_them_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a remote store each look is a request."""
    looked: list[str] = []

    def look(uri: str, group: Any, name: str, at: str, places: Any) -> Any:
        looked.append(at)
        return open_member(uri, group, name, at, places)

    monkeypatch.setattr("raggedatlas.formats.containers.open_member", look)
    h5ad_source(made(tmp_path, lambda _: None)).close()
    assert "uns" in looked
    assert not [at for at in looked if at.startswith("uns/neighbors")]


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


def old_table(file: h5py.File) -> None:
    """Store `obs` as anndata 0.6 did, with a name that is not UTF-8."""
    del file["obs"]
    file["obs"] = np.array([(b"c0", 0), (b"caf\xe9", 1), (b"c2", 2)], [("index", "S5"), ("x", "f4")])


def old_order(file: h5py.File) -> None:
    """Store the names of columns as bytes."""
    file["obs"].attrs["column-order"] = np.array([b"kind", b"caf\xe9"])


@pytest.mark.parametrize(("change", "place"), [(old_table, "obs"), (old_order, "column-order of /obs")])
def test_names_that_are_not_utf8_are_refused(tmp_path: Path, change: Callable[[h5py.File], Any], place: str) -> None:
    """Old writers stored names as bytes; the message names the element."""
    with pytest.raises(SourceError, match=rf"{place} has the text b'caf\\xe9', which is not UTF-8"):
        h5ad_source(made(tmp_path, change)).cells()
