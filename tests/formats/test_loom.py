"""Loom files, written here as their specifications say, and read without loompy."""

import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

import raggedatlas as ra
from raggedatlas.errors import SourceError

MATRIX = np.array([[1, 0], [0, 2**25 + 1], [3, 4]])
"""Three genes of two cells."""


def write_loom(path: Path, dtype: str = "int32", **members: Any) -> NDArray[np.integer]:
    """Write the cells, a layer of another type, and further members: names have ``__`` for ``/``."""
    with h5py.File(path, "w") as file:
        file["matrix"] = MATRIX.astype(dtype)
        file["layers/spliced"] = (MATRIX // 2).astype("uint32")
        file["row_attrs/Gene"] = ["CD3E", "CD19", "LYZ"]
        file["row_attrs/Accession"] = [b"ENSG00000198851", b"ENSG00000177455", b"ENSG00000090382"]
        file["col_attrs/CellID"] = ["a", "ä"]
        file["col_attrs/cluster"] = [b"T", b"B"]
        file["attrs/LOOM_SPEC_VERSION"] = "3.0.0"
        for name, value in members.items():
            file[name.replace("__", "/")] = value
    return MATRIX.astype(dtype)


@pytest.mark.parametrize("dtype", ["int32", "float64", ">i8", "float16", "uint8"])
def test_a_file_comes_back(tmp_path: Path, dtype: str) -> None:
    """Values, also those beyond float32, layers in their type, names and columns are those of the file, transposed."""
    with np.errstate(over="ignore"):
        matrix = write_loom(tmp_path / "a.loom", dtype)
    data = ra.read(tmp_path / "a.loom")
    np.testing.assert_array_equal(data.X.toarray(), matrix.T)
    assert data.X.dtype == ("float32" if dtype == "float16" else np.dtype(dtype).newbyteorder("="))
    np.testing.assert_array_equal(data.layers["spliced"].toarray(), MATRIX.T // 2)
    assert (data.layers["spliced"].dtype, data.uns) == (np.dtype("uint32"), {"LOOM_SPEC_VERSION": "3.0.0"})
    assert (list(data.obs_names), list(data.var_names)) == (["a", "ä"], ["CD3E", "CD19", "LYZ"])
    assert (data.obs["cluster"].tolist(), list(data.var)) == (["T", "B"], ["Accession"])


def test_a_file_is_added(tmp_path: Path) -> None:
    """Through an atlas as any other file, with its embeddings and graphs."""
    write_loom(
        tmp_path / "a.loom",
        col_attrs__pca=np.eye(2),
        col_graphs__KNN__a=[0],
        col_graphs__KNN__b=[1],
        col_graphs__KNN__w=[0.5],
    )
    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    atlas.add(tmp_path / "a.loom", progress=False)
    found = atlas.checkout(atlas.snapshot()).query().features("CD19").to_anndata()
    assert found.X.toarray().tolist() == [[0], [2**25 + 1]]
    assert found.obs["cluster"].tolist() == ["T", "B"]
    kept = atlas.dataset("a").to_anndata()
    assert (kept.obsm["pca"].tolist(), kept.obsp["KNN"].toarray().tolist()) == ([[1, 0], [0, 1]], [[0, 0.5], [0, 0]])


def test_attributes_and_graphs_of_every_kind(tmp_path: Path) -> None:
    """Text of both specifications, several axes, graphs and attributes without a value each get their place."""
    write_loom(
        tmp_path / "a.loom",
        col_attrs__Tissue=np.array([b"C&#243;rtex", b"AT&T &amp; x"]),
        col_attrs__Note=["Größe &amp;", ""],
        col_attrs__tags=np.array([["a", "b"], ["c", "d"]], dtype=object),
        row_attrs__loadings=np.arange(6.0).reshape(3, 2),
        row_attrs__Aliases=h5py.Empty("S1"),
        row_graphs__near__a=[0, 2],
        row_graphs__near__b=[1, 2],
        row_graphs__near__w=[1.0, 2.0],
    )
    with h5py.File(tmp_path / "a.loom", "r+") as file:
        file.attrs["CreationDate"] = "2018"
    source = ra.open_source(tmp_path / "a.loom")
    assert source.describe().left_out["row_attrs/Aliases"] == "attribute without a value"
    data = ra.read(source)
    source.close()
    assert data.obs["Tissue"].tolist() == ["Córtex", "AT&T & x"]
    assert (data.obs["Note"].tolist(), data.obsm["tags"].tolist()) == (["Größe &amp;", ""], [["a", "b"], ["c", "d"]])
    assert data.varm["loadings"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert data.varp["near"].toarray().tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 2]]
    assert data.uns["CreationDate"] == "2018"


@pytest.mark.parametrize(
    ("member", "value", "said"),
    [
        ("col_attrs__x", [1, 2, 3], "col_attrs/x has shape"),
        ("layers__x", np.ones((2, 3)), "layers/x has shape"),
        ("layers__x__y", [1], "where a matrix of features by cells belongs"),
        ("col_graphs__k__a", [0], "col_graphs/k/b"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, member: str, value: Any, said: str) -> None:
    """Naming the element."""
    write_loom(tmp_path / "a.loom", **{member: value})
    with pytest.raises(SourceError, match=said):
        ra.read(tmp_path / "a.loom")


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """The message names the element and its text."""
    write_loom(tmp_path / "a.loom", col_attrs__place=np.array([b"M\xfcnchen", b"Wien"]))
    with pytest.raises(SourceError, match=r"col_attrs/place has the text b'M\\xfcnchen', which is not UTF-8"):
        ra.read(tmp_path / "a.loom")


def test_an_edge_beyond_the_nodes_is_refused(tmp_path: Path) -> None:
    """Before SciPy makes a matrix of it."""
    write_loom(tmp_path / "a.loom", col_graphs__k__a=[0], col_graphs__k__b=[2], col_graphs__k__w=[1.0])
    with pytest.raises(SourceError, match="no graph of 2 nodes"):
        ra.read(tmp_path / "a.loom")


def test_another_hdf5_file_is_refused(tmp_path: Path) -> None:
    """By what it lacks."""
    with h5py.File(tmp_path / "a.loom", "w") as file:
        file["matrix"] = [1]
    with pytest.raises(SourceError, match="no loom file: it has no col_attrs, row_attrs"):
        ra.read(tmp_path / "a.loom")


def test_a_large_matrix_is_never_dense(tmp_path: Path) -> None:
    """A file that would fill 80 MB is copied in half of that."""
    with h5py.File(tmp_path / "a.loom", "w") as file:
        matrix = file.create_dataset("matrix", (1_000, 20_000), "float32", chunks=(500, 500), compression="gzip")
        matrix[:, ::2_000] = 1
        file.create_group("row_attrs")
        file.create_group("col_attrs")
    tracemalloc.start()
    ra.copy(tmp_path / "a.loom", tmp_path / "a.h5ad")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40e6
    assert ra.read(tmp_path / "a.h5ad").X.nnz == 10_000
