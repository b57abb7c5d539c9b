"""CXGs that cellxgene wrote with the TileDB of 2020 are read equal to the h5ad that they were made of."""

import zipfile
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

import raggedatlas as ra
from raggedatlas.formats.cxg import inspect, validate
from raggedatlas.formats.cxg.source import cxg_source
from reading import dense

# The input was written by anndata 0.7.
pytestmark = pytest.mark.filterwarnings("ignore::anndata.OldFormatWarning")

WRITERS = ("0.5.9", "0.6.6")
FILES = {
    "unnamed": ("unnamed", "dense"),
    "dense": ("0.1", "dense"),
    "sparse": ("0.1", "sparse"),
    "shifted": ("0.2.0", "sparse"),
}
SHIFT = 0.5
"""What the maker added to each value of ``shifted``."""


@pytest.fixture(scope="module", params=WRITERS)
def written(request: pytest.FixtureRequest, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CXGs of one release of TileDB, unpacked beside their input."""
    folder = tmp_path_factory.mktemp("foreign")
    with zipfile.ZipFile(data_dir / f"cxg_tiledb_{request.param}.zip") as stored:
        stored.extractall(folder)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_what_cellxgene_wrote_in_2020_is_read(written: Path, name: str, tmp_path: Path) -> None:
    """Values, names, columns, categories, embeddings, colours and title are those of the h5ad, by rows and by columns; no must is broken."""
    path, want = written / f"{name}.cxg", ad.read_h5ad(written / "input.h5ad")
    values = dense(want.X) + np.float32(SHIFT if name == "shifted" else 0)
    back = ad.read_h5ad(ra.copy(path, tmp_path / "back.h5ad"))
    np.testing.assert_array_equal(dense(back.X), values)
    assert sp.issparse(back.X) == (name == "sparse")
    source = cxg_source(path)
    np.testing.assert_array_equal(dense(source.columns([7, 3])), values[:, [7, 3]])
    np.testing.assert_array_equal(dense(source.columns(["GENE4"])), values[:, [4]])
    source.close()
    assert (list(back.obs_names), list(back.var_names)) == (list(want.obs_names), list(want.var_names))
    for table, given in ((back.obs, want.obs), (back.var, want.var)):
        assert list(table.columns) == list(given.columns)
        for column in given:
            assert table[column].tolist() == given[column].tolist(), column
    assert list(back.obs["cell_type"].cat.categories) == list(want.obs["cell_type"].cat.categories)
    for key in ("X_umap", "X_pca"):
        assert back.obsm[key].dtype == want.obsm[key].dtype
        np.testing.assert_array_equal(back.obsm[key], want.obsm[key])
    if name != "unnamed":
        assert back.uns["title"] == name
        assert back.uns["cell_type_colors"].tolist() == want.uns["cell_type_colors"].tolist()
    # Version and layout are as they were written, every array can be inspected, and every value is valid.
    assert [str(p) for p in validate(path, "full") if p.level != "practice"] == []
    found = inspect(path)
    assert (found.version, found.layout) == FILES[name]
    assert [(e.path, e.fault) for e in (found.root, *found.root.children) if e.fault] == []
