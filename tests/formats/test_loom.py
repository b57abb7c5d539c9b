"""Loom files, read by anndata; the file is written here as its specification says, since loompy is optional."""

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

import raggedatlas as ra
from raggedatlas.errors import MissingExtraError, SourceError


def write_loom(path: Path, dtype: str = "int32") -> NDArray[np.integer]:
    """Write two cells of three genes, and a layer."""
    matrix = np.array([[1, 0], [0, 2**25 + 1], [3, 4]], dtype)
    with h5py.File(path, "w") as file:
        file["matrix"] = matrix
        file["layers/spliced"] = matrix // 2
        file["row_attrs/Gene"] = [b"CD3E", b"CD19", b"LYZ"]
        file["row_attrs/Accession"] = [b"ENSG00000198851", b"ENSG00000177455", b"ENSG00000090382"]
        file["col_attrs/CellID"] = [b"a", b"b"]
        file["col_attrs/cluster"] = [b"T", b"B"]
        file["attrs/LOOM_SPEC_VERSION"] = b"3.0.0"
        file.create_group("row_graphs")
        file.create_group("col_graphs")
    return matrix


def test_a_file_comes_back(tmp_path: Path) -> None:
    """Values, also those beyond float32, layers, names and columns are those of the file, transposed."""
    pytest.importorskip("loompy")
    matrix = write_loom(tmp_path / "a.loom")
    data = ra.read(tmp_path / "a.loom")
    np.testing.assert_array_equal(data.X.toarray(), matrix.T)
    np.testing.assert_array_equal(data.layers["spliced"].toarray(), matrix.T // 2)
    assert (list(data.obs_names), list(data.var_names)) == (["a", "b"], ["CD3E", "CD19", "LYZ"])
    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    atlas.add(tmp_path / "a.loom", progress=False)
    found = atlas.checkout(atlas.snapshot()).query().features("CD19").to_anndata()
    assert found.X.toarray().tolist() == [[0], [2**25 + 1]]
    assert found.obs["cluster"].tolist() == ["T", "B"]


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra."""
    write_loom(tmp_path / "a.loom")
    monkeypatch.setitem(sys.modules, "loompy", None)
    with pytest.raises(MissingExtraError, match=r"raggedatlas\[loom\]"):
        ra.read(tmp_path / "a.loom")


def test_another_hdf5_file_is_refused(tmp_path: Path) -> None:
    """By what it lacks."""
    with h5py.File(tmp_path / "a.loom", "w") as file:
        file["matrix"] = [1]
    with pytest.raises(SourceError, match="no loom file: it has no col_attrs, row_attrs"):
        ra.read(tmp_path / "a.loom")
