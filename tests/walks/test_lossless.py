"""The walk of real files: in as they are, queried as one, out as MuData, and each given back whole."""

from pathlib import Path

import anndata as ad
import numpy as np
import pytest

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.formats.copying import read_source
from raggedatlas.formats.registry import open_source
from support.anndata_strategies import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore")

CITE = ("pbmc_10k_protein_v3", "pbmc_5k_protein_v3")
PROTEINS = {"obsm/protein_expression": "protein_abundance"}


@pytest.mark.nightly
def test_real_files_become_one_mudata_and_come_back_equal(data_dir: Path, tmp_path: Path) -> None:
    """Two CITE-seq sets with other genes and a 10x run: a joined query holds their proteins, mudata reads it, nothing is lost."""
    mudata = pytest.importorskip("mudata")
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    for name in CITE:
        atlas.add(data_dir / f"{name}.h5ad", organism="human", spaces=PROTEINS, progress=False)
    atlas.add(data_dir / "lung_C144.h5", progress=False)
    view = atlas.checkout(atlas.snapshot())
    query = view.query().spaces("gene_expression", "protein_abundance").join("union")
    found = mudata.read_h5mu(query.write(str(tmp_path / "joined.h5mu")))
    given = {name: ad.read_h5ad(data_dir / f"{name}.h5ad") for name in CITE}
    rna, proteins = found["gene_expression"], found["protein_abundance"]
    assert (rna.n_obs, proteins.n_obs) == (650, 400)
    for name, adata in given.items():
        cells = proteins.obs_names[found.obs.loc[proteins.obs_names, "dataset"] == name]
        assert found.obs.loc[cells, "cell_name"].tolist() == adata.obs_names.tolist()
        names = atlas.dataset(name).var("protein_abundance").index
        there = np.isin(proteins.var_names, names)
        assert there.sum() == len(names)
        np.testing.assert_array_equal(proteins[cells, names].X, np.asarray(adata.obsm["protein_expression"]))
        assert not proteins[cells, ~there].X.any()
        counts = rna[cells].X
        assert counts.sum() == adata.X.sum()
        np.testing.assert_array_equal(np.diff(counts.indptr), np.count_nonzero(np.asarray(adata.to_df()), axis=1))
    for where in (atlas, view):
        for name, adata in given.items():
            assert_equal(adata, where.dataset(name).to_anndata())
        source = open_source(data_dir / "lung_C144.h5")
        assert_equal(read_source(source), where.dataset("lung_C144").to_anndata())
        source.close()
    for name, adata in given.items():
        assert_equal(adata, ad.read_h5ad(atlas.dataset(name).write(tmp_path / f"{name}.h5ad")))


def told(adata: ad.AnnData) -> ad.AnnData:
    """Put a number that occurs nowhere else for NaN, which is not equal to itself."""
    adata.varm = {name: np.nan_to_num(values, nan=-7777.25) for name, values in adata.varm.items()}
    return adata


@pytest.mark.nightly
def test_a_dataset_outlives_what_happens_around_it(data_dir: Path, tmp_path: Path) -> None:
    """Others joining with other columns, snapshots, optimize, dropped neighbours, clean-up and purge: still equal, and valid."""
    given = told(ad.read_h5ad(data_dir / "pbmc68k_reduced.h5ad"))
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(data_dir / f"{CITE[1]}.h5ad", organism="human", progress=False)
    atlas.add(data_dir / "pbmc68k_reduced.h5ad", embeddings=["X_umap"], progress=False)
    dataset = atlas.dataset("pbmc68k_reduced")
    assert_equal(given, told(dataset.to_anndata()))
    atlas.snapshot("before")
    atlas.add(data_dir / "lung_C144.h5", progress=False)
    atlas.optimize()
    atlas.drop_dataset("lung_C144")
    atlas.drop_dataset(CITE[1])
    atlas.purge(CITE[1])
    atlas.gc(dry_run=False)
    view = atlas.checkout(atlas.snapshot("after"))
    for where in (atlas, view):
        assert_equal(given, told(where.dataset("pbmc68k_reduced").to_anndata()))
    assert [p for p in atlas.validate("deep") if p.rule != "unassigned-index"] == []
    again = RaggedAtlas.create(str(tmp_path / "again"))
    again.add(where.dataset("pbmc68k_reduced").write(tmp_path / "x.h5ad"), "d", progress=False)
    assert_equal(given, told(again.dataset("d").to_anndata()))
