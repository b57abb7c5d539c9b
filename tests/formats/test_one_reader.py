"""`read` and `copy` stand on one source: both give the same values, or refuse in the same words."""

import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raggedatlas as ra
from formats.test_loom import write_loom
from formats.test_tenx import write_h5, write_mtx
from raggedatlas.errors import AtlasError, NotFoundError
from raggedatlas.formats.registry import READERS
from raggedatlas.testing.anndata_strategies import anndatas, assert_same
from raggedatlas.testing.cxg_files import write_cxg
from raggedatlas.testing.hypothesis_profile import examples

mudata = pytest.importorskip("mudata")
pytestmark = pytest.mark.filterwarnings("ignore")

TYPES = ["Gene Expression", "Antibody Capture", "Peaks", "Gene Expression", "CRISPR Guide Capture", "Peaks", "Peaks"]


def two_modalities(adata: ad.AnnData) -> Any:
    """Return a MuData whose second modality lacks the first cell."""
    with warnings.catch_warnings(action="ignore"):
        return mudata.MuData({"rna": adata, "prot": adata[1:, :1].copy()})


def outcome(get: Any) -> Any:
    """Return what a call gives, or the words of its refusal."""
    try:
        return get()
    except AtlasError as error:
        return f"{type(error).__name__}: {error}"


def assert_law(path: Path, **choice: Any) -> Any:
    """Assert that a file and its copy read equal, or are refused in the same words; return what is read."""
    found = outcome(lambda: ra.read(path, **choice))
    target = path.parent / ("copy.h5mu" if isinstance(found, mudata.MuData) else "copy.h5ad")
    target.unlink(missing_ok=True)
    copied = outcome(lambda: ra.read(ra.copy(path, target, **choice)))
    if isinstance(found, str) or isinstance(copied, str):
        assert found == copied
    elif isinstance(found, mudata.MuData):
        assert list(found.mod) == list(copied.mod)
        for name in found.mod:
            assert_same(copied[name], found[name])
            np.testing.assert_array_equal(copied.obsmap[name], found.obsmap[name])
        pd.testing.assert_frame_equal(copied.obs, found.obs)
        assert list(copied.var_names) == list(found.var_names)
    else:
        assert_same(copied, found)
    return found


@pytest.mark.parametrize("name", sorted(READERS))
@given(adata=anndatas(), types=st.sampled_from([TYPES, TYPES[:1] * 7, None]))
@examples(1)
def test_every_format_is_read_as_it_is_copied(
    tmp_path_factory: pytest.TempPathFactory, name: str, adata: ad.AnnData, types: list[str] | None
) -> None:
    """Each format that the registry knows has its maker here; without one the test fails."""
    folder = tmp_path_factory.mktemp("law")
    makers = {
        "h5ad": lambda path: ra.copy(adata, path),
        "zarr": lambda path: ra.copy(adata, path),
        "h5mu": lambda path: ra.copy(two_modalities(adata), path),
        "cxg": write_cxg,
        "loom": lambda path: write_loom(path, col_attrs__pca=np.eye(2)),
        "10x-h5": lambda path: write_h5(path, types),
        "10x-mtx": lambda path: write_mtx(path, packed=True, types=types is not None),
    }
    if name == "soma":
        pytest.skip("test_soma.py compares it, since it is written by another process")
    path = folder / f"x.{name.removeprefix('10x-')}"
    with warnings.catch_warnings(action="ignore"):
        makers[name](path)
    assert_law(path)


@pytest.mark.parametrize(
    ("modality", "columns", "same"),
    [("rna", [0, 3], "Gene Expression"), ("prot", [1], "Antibody Capture"), ("atac", [2, 5, 6], "Peaks")],
)
def test_feature_types_of_10x_are_modalities(tmp_path: Path, modality: str, columns: list[int], same: str) -> None:
    """A file with several gives a MuData, and each by its short name and by its feature type."""
    write_h5(tmp_path / "x.h5", TYPES)
    whole = assert_law(tmp_path / "x.h5")
    assert list(whole.mod) == ["rna", "prot", "atac", "CRISPR Guide Capture"]
    for name in (modality, same):
        part = assert_law(tmp_path / "x.h5", modality=name)
        assert list(part.var_names) == [f"ENSG{i}" for i in columns]
        np.testing.assert_array_equal(part.X.toarray(), whole[modality].X.toarray())
    with pytest.raises(NotFoundError, match="CRISPR Guide Capture"):
        ra.read(tmp_path / "x.h5", modality="Custom")


def test_frames_with_other_names_are_refused_alike(tmp_path: Path) -> None:
    """A frame of obsm whose rows have other names than the cells has one answer."""
    adata = ad.AnnData(np.ones((2, 1)), obsm={"p": pd.DataFrame({"a": [1, 2]}, index=["0", "1"])})
    adata.write_h5ad(tmp_path / "x.h5ad")
    with h5py.File(tmp_path / "x.h5ad", "r+") as file:
        file["obs/_index"][...] = [b"c0", b"c1"]
    assert "obsm/p has the name '0' in row 0, where obs has 'c0'" in assert_law(tmp_path / "x.h5ad")
