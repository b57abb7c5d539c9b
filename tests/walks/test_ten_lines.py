"""The first thing a person does, from the first line to the mask of what was measured."""

import warnings
from pathlib import Path

import anndata
import numpy as np

import raggedatlas as ra


def test_the_ten_lines(data_dir: Path, tmp_path: Path) -> None:
    """Create, add two real files with other genes, snapshot, query two symbols: a gene is measured where its file has it."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "pbmc.atlas"))
    atlas.add(data_dir / "lung_C144.h5")
    atlas.add(
        data_dir / "pbmc_10k_protein_v3.h5ad", organism="human", spaces={"obsm/protein_expression": "protein_abundance"}
    )
    view = atlas.checkout(atlas.snapshot("first"))
    adata = view.query().where("n_genes > 1000 OR n_genes IS NULL").features("CD79A", "SFTPC").to_anndata()
    assert adata.var["symbol"].tolist() == ["CD79A", "SFTPC"]
    names = view.list_datasets()["name"]
    layouts = adata.obs.groupby("dataset", observed=True)["layout_uid"].agg(set)
    measured = {name: adata.varm["measured"][next(iter(layouts[name]))].tolist() for name in names}
    assert measured == {"lung_C144": [True, True], "pbmc_10k_protein_v3": [True, False]}
    assert adata.uns["atlas"]


def test_the_answer_is_in_the_files(data_dir: Path, tmp_path: Path) -> None:
    """The counts that the ten lines give are those of the files, in the files' order of cells."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the file is older than anndata's present encoding
        source = anndata.read_h5ad(data_dir / "pbmc_10k_protein_v3.h5ad")
    atlas = ra.RaggedAtlas.create(str(tmp_path / "pbmc.atlas"))
    atlas.add(data_dir / "pbmc_10k_protein_v3.h5ad", organism="human")
    query = atlas.checkout(atlas.snapshot()).query().where("n_genes > 1000").features("MS4A1", "CD3E")
    rows = np.flatnonzero(source.obs["n_genes"] > 1000)
    columns = source.var_names.get_indexer(["MS4A1", "CD3E"])
    adata = query.to_anndata()
    assert adata.obs["cell_name"].tolist() == source.obs_names[rows].tolist()
    np.testing.assert_array_equal(adata.X.toarray(), source.X[np.ix_(rows, columns)])
