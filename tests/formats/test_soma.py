"""SOMA experiments written by tiledbsoma, in a process of its own, are read as the AnnData they were made from."""

import subprocess
import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse as sp

import raggedatlas as ra
from raggedatlas.errors import AtlasError, LimitError, NotFoundError, SourceError
from raggedatlas.formats.matrix_readers import MatrixLocation
from raggedatlas.formats.registry import detect
from raggedatlas.formats.soma import SomaRows

tiledbsoma = pytest.importorskip("tiledbsoma")

WRITE = "import sys, anndata, tiledbsoma.io as io; io.from_anndata(sys.argv[2], anndata.read_h5ad(sys.argv[1]), measurement_name=sys.argv[3])"


@pytest.fixture(scope="module")
def adata() -> ad.AnnData:
    rng = np.random.default_rng(0)
    made = ad.AnnData(sp.random_array((50, 20), density=0.3, format="csr", dtype=np.float32, rng=rng))
    made.layers["counts"] = sp.csr_matrix(rng.poisson(1, (50, 20)).astype(np.float32))
    made.obs_names, made.var_names = [f"cell{i}" for i in range(50)], [f"gene{i}" for i in range(20)]
    made.obs["cell_type"] = pd.Categorical(["B", "T"] * 25)
    made.obsm["X_pca"] = rng.normal(size=(50, 3))
    return made


@pytest.fixture(scope="module")
def experiment(adata: ad.AnnData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("soma")
    adata.write_h5ad(folder / "a.h5ad")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WRITE, str(folder / "a.h5ad"), str(folder / "pbmc.soma"), "RNA"],
        check=True,
    )
    return folder / "pbmc.soma"


def test_an_experiment_is_read(experiment: Path, adata: ad.AnnData) -> None:
    """X, layers, obsm, names and categories are those of the AnnData."""
    assert detect(experiment) == "soma"
    found = ra.read(experiment)
    np.testing.assert_array_equal(found.X.toarray(), adata.X.toarray())
    np.testing.assert_array_equal(found.layers["counts"].toarray(), adata.layers["counts"].toarray())
    np.testing.assert_array_equal(found.obsm["X_pca"], adata.obsm["X_pca"])
    assert (list(found.obs_names), list(found.var_names)) == (list(adata.obs_names), list(adata.var_names))
    assert list(found.obs["cell_type"]) == list(adata.obs["cell_type"])


def test_an_experiment_is_streamed_and_added(experiment: Path, adata: ad.AnnData, tmp_path: Path) -> None:
    """Blocks of rows are those of the matrix, and an add names the dataset by the folder."""
    source = ra.open_source(experiment)
    blocks = [block for (block,) in source.blocks(("X",), 7)]
    assert [block.n_rows for block in blocks] == [7] * 7 + [1]
    rows = [sp.csr_matrix((b.layers["values"], b.indices, b.indptr), shape=(b.n_rows, 20)).toarray() for b in blocks]
    np.testing.assert_array_equal(np.concatenate(rows), adata.X.toarray())
    source.close()
    report = ra.RaggedAtlas.create(str(tmp_path / "a")).add(str(experiment), progress=False)
    assert (report.name, report.n_cells) == ("pbmc", 50)


def test_no_rows_are_a_block_without_rows(experiment: Path) -> None:
    """An empty range of cells is read as such, though slices of SOMA include their end."""
    with tiledbsoma.open(str(experiment)) as opened:
        rows = SomaRows(opened.ms["RNA"]["X"]["data"], (50, 20), MatrixLocation("x.soma", "X", str))
        block = rows.read(7, 7)
        assert (block.n_rows, block.n_cols, block.layers["values"].dtype) == (0, 20, np.float32)


def test_what_is_not_there_is_refused(experiment: Path, tmp_path: Path) -> None:
    """An unknown measurement is named with those there are; an experiment without its tables is damaged."""
    with pytest.raises(NotFoundError, match=r"no measurement 'ATAC'; there are \['RNA'\]"):
        ra.open_source(experiment, measurement="ATAC")
    import shutil

    broken = tmp_path / "broken.soma"
    shutil.copytree(experiment, broken)
    shutil.rmtree(broken / "ms" / "RNA" / "X")
    with pytest.raises(SourceError, match=r"broken\.soma"):
        ra.read(broken)


@pytest.mark.parametrize(
    ("ends", "error"),
    [((5, 0), SourceError), ((0, 2**40), LimitError), (None, SourceError)],
    ids=["row", "column", "dense"],
)
def test_an_embedding_that_does_not_fit_is_refused_by_name(
    adata: ad.AnnData, tmp_path: Path, ends: tuple[int, int] | None, error: type[AtlasError]
) -> None:
    """Entries beyond the cells, columns that no memory holds, and another number of rows never reach an atlas."""
    import tiledbsoma.io

    path = str(tmp_path / "made")
    tiledbsoma.io.from_anndata(path, adata[:3].copy(), measurement_name="RNA")
    with tiledbsoma.Experiment.open(path, "w") as experiment:
        obsm = experiment.ms["RNA"]["obsm"]
        if ends is None:
            dense = obsm.add_new_dense_ndarray("odd", type=pa.float64(), shape=(7, 2))
            dense.write((slice(0, 6), slice(0, 1)), pa.Tensor.from_numpy(np.ones((7, 2))))
        else:
            sparse = obsm.add_new_sparse_ndarray("odd", type=pa.float64(), shape=(10, 2**41))
            entry = {"soma_dim_0": [ends[0]], "soma_dim_1": [ends[1]], "soma_data": [1.0]}
            sparse.write(pa.table(entry))
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    with pytest.raises(error, match="obsm/odd"):
        atlas.add(path, progress=False)
