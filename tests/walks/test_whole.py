"""Laws of what an atlas gives back: all of a file, equal by anndata's own comparison, whatever happened since."""

import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
from hypothesis import Phase, given, settings

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import SourceError
from raggedatlas.testing.effort import examples
from raggedatlas.testing.wholes import assert_equal, assert_identical, wholes

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
    # Zarr format 3 has no structured arrays that every anndata reads, so they would come as tables there.
    made = dataset.write(folder / "x.zarr", zarr_format=2)
    assert_equal(read_back(written(adata, folder / "in.zarr")), read_back(made))


@given(adata=wholes())
@settings(examples(4), phases=NO_SHRINKING)
def test_any_file_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, adata: ad.AnnData) -> None:
    """Elements of every kind, in every group, nested and empty, with odd names, come back from an atlas as they were."""
    law_of_one_file(tmp_path_factory.mktemp("x"), adata)


@given(adata=wholes())
@settings(examples(4), phases=NO_SHRINKING)
def test_any_object_comes_back_identical(tmp_path_factory: pytest.TempPathFactory, adata: ad.AnnData) -> None:
    """What was added from memory comes back with the same classes, types, order of keys and bits."""
    atlas = RaggedAtlas.create(str(tmp_path_factory.mktemp("x") / "atlas"))
    atlas.add(adata, "d", progress=False)
    back = atlas.dataset("d").to_anndata()
    for group in ("obsm", "varm", "obsp", "varp", "uns"):
        assert_identical(group, dict(getattr(adata, group)), dict(getattr(back, group)))
    for frame in ("obs", "var"):
        assert_identical(frame, getattr(adata, frame), getattr(back, frame))
    assert_equal(adata, back)


def test_files_without_cells_or_matrices_are_refused(tmp_path: Path) -> None:
    """An empty axis leaves nothing to query: no cells, or no matrix with columns, is refused by what is missing."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    for shape, said in (((0, 3), "no cells"), ((3, 0), "no matrix")):
        path = written(ad.AnnData(np.zeros(shape, np.float32)), tmp_path / f"{shape[0]}.h5ad")
        with pytest.raises(SourceError, match=said):
            atlas.add(path, progress=False)
    raw = ad.AnnData(np.zeros((3, 0), np.float32))
    raw.raw = ad.AnnData(np.eye(3, dtype=np.float32))
    atlas.add(written(raw, tmp_path / "raw.h5ad"), "raw", progress=False)
    assert_equal(read_back(tmp_path / "raw.h5ad"), atlas.dataset("raw").to_anndata())
