"""MuData: files are read without its package, objects with it, and what we write opens in it."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from raggedatlas.errors import SourceError
from raggedatlas.formats.copying import copy, read
from raggedatlas.formats.mudata import mudata_object_source, mudata_source
from raggedatlas.formats.registry import open_sink, open_source
from raggedatlas.model.batch import CsrBlock
from raggedatlas.model.frames import arrow_to_frame

mudata = pytest.importorskip("mudata")
pytestmark = pytest.mark.filterwarnings("ignore")

DATA = Path(__file__).parent.parent / "data"
MULTI: dict[str, dict[str, Any]] = {"x.zarr": {"multimodal": True}}


def two_modalities() -> Any:
    """Cells a, b, d with RNA and b, c, d (in another order) with protein."""
    rna = ad.AnnData(
        sp.csr_matrix(np.arange(6, dtype=np.float32).reshape(3, 2)),
        obs=pd.DataFrame({"n": [1, 2, 3], "flag": [True, False, True], "shared": list("xyz")}, index=list("abd")),
        var=pd.DataFrame(index=["g1", "g2"]),
    )
    prot = ad.AnnData(
        np.arange(3, dtype=np.float32).reshape(3, 1),
        obs=pd.DataFrame({"kind": pd.Categorical(["T", "B", "T"])}, index=list("dcb")),
        var=pd.DataFrame(index=["p1"]),
    )
    with warnings.catch_warnings(action="ignore"):
        return mudata.MuData({"rna": rna, "prot": prot})


def check(source: Any) -> None:
    """State what the two modalities are, by cell name."""
    schema = source.describe()
    assert {m.key: m.space for m in schema.matrices} == {
        "mod/rna/X": "gene_expression",
        "mod/prot/X": "protein_abundance",
    }
    cells = arrow_to_frame(source.cells())
    names = np.array(cells.index)
    assert sorted(names) == list("abcd")
    for modality, expected in (("rna", ["a", "b", "d"]), ("prot", ["d", "c", "b"])):
        assert names[source.present(f"mod/{modality}/X")].tolist() == expected
    assert cells.loc["d", "prot:kind"] == "T"
    assert cells.loc["a", "rna:n"] == 1
    assert pd.isna(cells.loc["c", "rna:n"])
    assert source.features("mod/prot/var").column(0).to_pylist() == ["p1"]
    source.close()


def test_files_and_object_say_the_same(tmp_path: Path) -> None:
    """A file, a Zarr folder and a zip file of it give one row per global cell, presence by obsmap and prefixed columns; so does the object."""
    mdata = two_modalities()
    mdata.write(tmp_path / "m.h5mu")
    mdata.write_zarr(tmp_path / "m.zarr")
    packed = shutil.make_archive(str(tmp_path / "m.zarr"), "zip", tmp_path / "m.zarr")
    for path in (tmp_path / "m.h5mu", tmp_path / "m.zarr", packed):
        source = open_source(path)
        assert source.describe().name == "m"
        check(source)
    check(open_source(mdata))


def test_view_of_an_object_is_placed_by_names() -> None:
    """A view's modalities are placed among the view's cells."""
    view = two_modalities()[["b", "d"]]
    source = mudata_object_source(view)
    names = np.array(arrow_to_frame(source.cells()).index)
    for key in ("mod/rna/X", "mod/prot/X"):
        cells = source.present(key)
        found = names if cells is None else names[cells]
        assert sorted(found) == ["b", "d"]


def test_real_file() -> None:
    """The real file has expression for fewer cells than it has cells, and a modality without a matrix, which is listed."""
    source = open_source(DATA / "wu2020.h5mu")
    schema = source.describe()
    gex = schema.matrix("mod/gex/X")
    assert gex is not None
    assert gex.space == "gene_expression"
    with h5py.File(DATA / "wu2020.h5mu") as file:
        n_cells, positions = file["obs/_index"].shape[0], file["obsmap/gex"][()]
        stored = sp.csr_matrix(
            tuple(file[f"mod/gex/X/{n}"][()] for n in ("data", "indices", "indptr")), shape=gex.shape
        )
    assert schema.n_cells == n_cells
    present = source.present("mod/gex/X")
    assert present is not None
    np.testing.assert_array_equal(positions[present], np.arange(1, gex.shape[0] + 1))
    blocks = [b for (b,) in source.blocks(("mod/gex/X",), 33)]
    assert all(isinstance(b, CsrBlock) for b in blocks)
    np.testing.assert_array_equal(np.concatenate([b.layers["values"] for b in blocks]), stored.data)
    assert schema.left_out["mod/airr"] == "modality without a matrix"
    source.close()


def test_matrices_of_different_heights_are_not_read_in_step(tmp_path: Path) -> None:
    """Modalities with different numbers of rows must be walked one by one, and this is said."""
    mdata = mudata.MuData({"rna": two_modalities().mod["rna"], "prot": two_modalities().mod["prot"][:2].copy()})
    with pytest.raises(SourceError, match="one by one"):
        open_source(mdata).blocks(("mod/rna/X", "mod/prot/X"), 2)


def test_obsmap_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """An obsmap that repeats a row is told by its modality."""
    two_modalities().write(tmp_path / "x.h5mu")
    with h5py.File(tmp_path / "x.h5mu", "r+") as file:
        file["obsmap/rna"][...] = 1
    with pytest.raises(SourceError, match="obsmap/rna"):
        mudata_source(tmp_path / "x.h5mu")


@pytest.mark.parametrize("start", ["object", "file"])
@pytest.mark.parametrize("name", ["x.h5mu", "x.zarr"])
def test_shared_tables_and_sparse_matrices_are_kept(tmp_path: Path, start: str, name: str) -> None:
    """Tables and sparse matrices in the shared obsm are copied, whole and for chosen cells."""
    given: Any = two_modalities()
    given.obsm["table"] = pd.DataFrame({"k": pd.Categorical(list("xyxz"))}, index=given.obs_names)
    given.obsm["sparse"] = sp.csr_matrix(np.arange(8.0).reshape(4, 2))
    expected = given.copy()
    if start == "file":
        given.write(tmp_path / "given.h5mu")
        given = tmp_path / "given.h5mu"
    for rows in (None, [1, 3]):
        made = read(copy(given, open_sink(tmp_path / name, overwrite=True, **MULTI.get(name, {})), where=rows))
        kept = slice(None) if rows is None else rows
        pd.testing.assert_frame_equal(made.obsm["table"], expected.obsm["table"].iloc[kept])
        np.testing.assert_array_equal(made.obsm["sparse"].toarray(), expected.obsm["sparse"].toarray()[kept])


def test_shared_tables_of_other_lengths_are_refused(tmp_path: Path) -> None:
    """A shared member that has not one row for each cell is refused by name."""
    given = two_modalities()
    given.obsm["sparse"] = sp.csr_matrix(np.arange(8.0).reshape(4, 2))
    given.write(tmp_path / "x.h5mu")
    with h5py.File(tmp_path / "x.h5mu", "r+") as file:
        ad.io.write_elem(file["obsm"], "sparse", sp.csr_matrix(np.ones((3, 2))))
    with pytest.raises(SourceError, match="obsm/sparse has 3 rows, but there are 4 cells"):
        copy(tmp_path / "x.h5mu", tmp_path / "y.h5mu")


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", ["x.h5mu", "x.zarr"])
def test_the_axis_is_kept(tmp_path: Path, axis: int, name: str) -> None:
    """What modalities share, cells, features or both, is what it was."""
    part = two_modalities().mod["rna"]
    other = part.copy()
    # Shared cells have the names of those of the other modality.
    other.obs_names = part.obs_names if axis != 1 else [f"{name} too" for name in part.obs_names]
    given = mudata.MuData({"a": part, "b": other}, axis=axis)
    back = read(copy(read(copy(given, tmp_path / name)), tmp_path / "again.h5mu"))
    assert (back.axis, back.shape) == (axis, given.shape)


@pytest.mark.parametrize("name", ["x.h5mu", "x.zarr"])
def test_modalities_without_a_matrix_keep_their_features(tmp_path: Path, name: str) -> None:
    """A modality without a matrix has its own features, not those of all; one of this kind alone stays a modality."""
    meta = ad.AnnData(obs=pd.DataFrame({"k": [1, 2]}, index=["a", "b"]), var=pd.DataFrame(index=["m"]))
    given = mudata.MuData({"rna": two_modalities().mod["rna"], "meta": meta})
    back = read(copy(given, tmp_path / name))
    assert back.mod["meta"].var_names.tolist() == ["m"]
    assert back.var_names.tolist() == given.var_names.tolist()
    alone = read(copy(mudata.MuData({"meta": meta}), tmp_path / f"alone-{name}"))
    assert list(alone.mod) == ["meta"]


def test_a_modality_with_a_slash_is_refused(tmp_path: Path) -> None:
    """A modality whose name a file would take for groups within groups is refused by name."""
    with pytest.raises(SourceError, match="modality 'a/b'"):
        copy(mudata.MuData({"a/b": two_modalities().mod["rna"]}), tmp_path / "x.h5mu")


def test_modalities_without_matrices_are_modalities(tmp_path: Path) -> None:
    """A MuData of tables alone becomes multimodal Zarr too, and reads back as it was."""
    given = two_modalities()
    for modality in given.mod.values():
        modality.X = None
    given.write_h5mu(tmp_path / "x.h5mu")
    back = read(copy(tmp_path / "x.h5mu", tmp_path / "x.zarr"))
    assert isinstance(back, mudata.MuData)
    assert {name: part.shape for name, part in back.mod.items()} == {"rna": (3, 2), "prot": (3, 1)}
    assert back["rna"].var_names.tolist() == ["g1", "g2"]
    assert back["rna"].obs["shared"].tolist() == list("xyz")
