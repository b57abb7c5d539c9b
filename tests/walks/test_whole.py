"""Laws of what an atlas gives back: all of a file, equal by anndata's own comparison, whatever happened since."""

import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import Phase, given, settings

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.formats.copying import copy
from support.anndata_strategies import assert_equal, assert_identical, assert_same, wholes
from support.hypothesis_profile import examples

pytestmark = [
    # anndata 0.13 asks pandas 3 for options that pandas 3 deprecates.
    pytest.mark.filterwarnings("ignore:The '(future.infer_string|mode.chained_assignment)' option:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Support for Awkward Arrays"),
]
NO_SHRINKING = [Phase.explicit, Phase.reuse, Phase.generate]


def read_back(path: str | Path) -> ad.AnnData:
    with warnings.catch_warnings(action="ignore"):
        return ad.read_zarr(path) if Path(path).is_dir() else ad.read_h5ad(path)


def written(adata: ad.AnnData, path: Path) -> Path:
    settings = {"allow_write_nullable_strings": True, "zarr_write_format": 2}
    with warnings.catch_warnings(action="ignore"), ad.settings.override(**settings):
        adata.write_zarr(path) if path.suffix == ".zarr" else adata.write_h5ad(path)
    return path


def law_of_one_file(folder: Path, adata: ad.AnnData) -> None:
    """File -> atlas -> object, h5ad and zarr: each as anndata reads the file that it writes itself."""
    atlas = RaggedAtlas.create(str(folder / "atlas"))
    atlas.add(written(adata, folder / "in.h5ad"), "d", progress=False)
    dataset = atlas.dataset("d")
    assert_equal(read_back(folder / "in.h5ad"), dataset.to_anndata())
    assert_equal(read_back(folder / "in.h5ad"), read_back(dataset.write(folder / "x.h5ad")))
    for zarr_format in (2, 3):
        made = dataset.write(folder / "x.zarr", zarr_format=zarr_format, overwrite=True)
        assert_equal(read_back(folder / "in.h5ad"), read_back(made))


@pytest.mark.long
@given(adata=wholes())
@settings(examples(2), phases=NO_SHRINKING)
def test_any_file_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, adata: ad.AnnData) -> None:
    """Elements of every kind, in every group, nested and empty, with odd names, come back from an atlas as they were."""
    law_of_one_file(tmp_path_factory.mktemp("x"), adata)


@given(adata=wholes())
@settings(examples(2), phases=NO_SHRINKING)
def test_any_object_comes_back_as_from_a_file(tmp_path_factory: pytest.TempPathFactory, adata: ad.AnnData) -> None:
    """What was added from memory comes back with the types that anndata reads from an h5ad file of it; tables with their own."""
    folder = tmp_path_factory.mktemp("x")
    atlas = RaggedAtlas.create(str(folder / "atlas"))
    atlas.add(adata, "d", progress=False)
    # A copy, since anndata turns text into categories when it writes.
    back, file = atlas.dataset("d").to_anndata(), read_back(written(adata.copy(), folder / "x.h5ad"))
    for group in ("obsm", "varm", "obsp", "varp", "uns"):
        assert_identical(group, dict(getattr(file, group)), dict(getattr(back, group)))
    for frame in ("obs", "var"):
        assert_identical(frame, getattr(adata, frame), getattr(back, frame))
    assert_same(adata, back)


def without() -> dict[str, ad.AnnData]:
    """Return AnnData objects without cells, without a matrix, without features, and without anything."""
    obs = pd.DataFrame({"kind": ["a", "b", "a"]}, index=["x", "y", "z"])
    every = ad.AnnData(sp.csr_matrix(np.eye(3, 4, dtype=np.float32)), obs=obs, layers={"d": np.ones((3, 4))})
    every.obsm["p"], every.obsp["q"] = np.eye(3), sp.eye(3, format="csr")
    raw = ad.AnnData(np.zeros((3, 0), np.float32))
    raw.raw = ad.AnnData(np.eye(3, dtype=np.float32))
    return {
        "cells": every[:0].copy(),
        "matrix": ad.AnnData(obs=obs, obsm={"p": np.eye(3)}, uns={"n": 1}),
        "matrix but with features": ad.AnnData(obs=obs, var=pd.DataFrame(index=["g", "h"]), obsp={"q": np.eye(3)}),
        "columns": ad.AnnData(np.zeros((3, 0), np.float32), obs=obs),
        "columns but with raw": raw,
        "cells and matrix": ad.AnnData(obs=obs[:0], var=pd.DataFrame(index=["g"])),
        "anything": ad.AnnData(),
    }


@pytest.mark.parametrize("lacking", list(without()))
def test_files_without_cells_or_matrices_come_back_equal(tmp_path: Path, lacking: str) -> None:
    """An empty well, metadata alone, receptors without a matrix: each is copied, added beside others, reported, and given back."""
    path = written(without()[lacking], tmp_path / "in.h5ad")
    adata = read_back(path)
    for name in ("x.h5ad", "x.zarr"):
        assert_equal(adata, read_back(copy(path, tmp_path / name)))
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(ad.AnnData(np.ones((2, 3), np.float32)), "other", progress=False)
    report = atlas.add(path, "d", progress=False)
    assert any("no cells" in note for note in report.notes) == (adata.n_obs == 0)
    assert any("no matrix" in note for note in report.notes) == (lacking not in ("cells", "columns but with raw"))
    assert_equal(adata, atlas.dataset("d").to_anndata())
    assert_equal(adata, read_back(atlas.dataset("d").write(tmp_path / "y.h5ad")))
    atlas.snapshot()
    assert atlas.validate("deep") == []
    query = RaggedAtlas.checkout_latest(str(tmp_path / "atlas")).query()
    assert len(query.to_pandas()) == 2 + adata.n_obs
    assert query.where(f"dataset_uid != '{report.dataset_uid}'").to_anndata().shape == (2, 3)
