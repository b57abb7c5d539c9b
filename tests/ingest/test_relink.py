"""`relink` takes the same values at another place, whatever the chunks there, and nothing else."""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import anndata as ad
import pytest
from anndata.tests.helpers import assert_equal

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import DuplicateError, NotFoundError, SourceError, StaleSourceError
from support.atlases import small_anndata

Unchanged = Callable[[RaggedAtlas], AbstractContextManager[None]]


def made(*, several: bool = False) -> ad.AnnData:
    adata = small_anndata(3, 60)
    if several:
        adata.layers["half"] = adata.X * 0.5
    return adata


def linked(folder: Path, *, several: bool = False, full: bool = False) -> RaggedAtlas:
    made(several=several).write_h5ad(folder / "d.h5ad")
    atlas = RaggedAtlas.create(str(folder / "atlas"))
    atlas.add(folder / "d.h5ad", copy=False, hash="full" if full else "metadata", progress=False)
    return atlas


def address(atlas: RaggedAtlas) -> str:
    found = atlas.dataset("d").records[0].file_facts.linked
    assert found is not None
    assert atlas.list_datasets()["linked"].tolist() == [found.address]
    return found.address


def assert_read(atlas: RaggedAtlas, *, several: bool = False) -> None:
    assert_equal(atlas.dataset("d").to_anndata(), made(several=several), exact=True)
    assert [str(problem) for problem in atlas.validate("deep") if problem.level == "must"] == []


def test_a_moved_file_is_taken_by_what_is_recorded_of_it(tmp_path: Path) -> None:
    """With its time; the old snapshot keeps the old address, and `restore` names it again."""
    atlas = linked(tmp_path, several=True)
    atlas.snapshot()
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "d.h5ad", tmp_path / "elsewhere" / "new.h5ad")
    with pytest.raises(StaleSourceError):
        atlas.dataset("d").to_anndata()
    assert atlas.relink("d", tmp_path / "elsewhere" / "new.h5ad") == "../elsewhere/new.h5ad" == address(atlas)
    assert_read(atlas, several=True)
    atlas.snapshot()
    atlas.restore(1)
    assert address(atlas) == "../d.h5ad"


@pytest.mark.parametrize("full", [False, True])
def test_a_file_that_was_written_anew_is_compared(tmp_path: Path, full: bool) -> None:
    """With the old file, or by the hash of all values where there is no old file any more."""
    atlas = linked(tmp_path, several=not full, full=full)
    made(several=not full).write_h5ad(tmp_path / "packed.h5ad", compression="gzip")
    if full:
        (tmp_path / "d.h5ad").unlink()
    assert atlas.relink("d", tmp_path / "packed.h5ad") == "../packed.h5ad"
    (tmp_path / "d.h5ad").unlink(missing_ok=True)
    assert_read(atlas, several=not full)
    assert atlas.materialize() == ("d",)
    assert_equal(atlas.dataset("d").to_anndata(), made(several=not full), exact=True)


@pytest.mark.parametrize("moved", [False, True])
def test_values_are_hashed_later(tmp_path: Path, unchanged: Unchanged, moved: bool) -> None:
    """As `add` would have, of the recorded file or another; the hash then tells another file, and values that were changed in place."""
    atlas, expected = linked(tmp_path), RaggedAtlas.create(str(tmp_path / "full"))
    expected.add(tmp_path / "d.h5ad", copy=False, hash="full", progress=False)
    made().write_h5ad(tmp_path / "packed.h5ad", compression="gzip")
    atlas.relink("d", tmp_path / "packed.h5ad" if moved else None, hash="full")
    (first,) = atlas.dataset("d").records
    assert first.content_hash == expected.dataset("d").records[0].content_hash
    assert_read(atlas)
    with unchanged(atlas):
        atlas.relink("d", hash="full")
    there = tmp_path / ("packed.h5ad" if moved else "d.h5ad")
    (tmp_path / ("d.h5ad" if moved else "packed.h5ad")).unlink()
    there.rename(tmp_path / "else.h5ad")
    os.utime(tmp_path / "else.h5ad")
    atlas.relink("d", tmp_path / "else.h5ad")
    assert_read(atlas)


def test_the_same_values_twice_are_told_when_they_are_hashed(tmp_path: Path, unchanged: Unchanged) -> None:
    atlas = linked(tmp_path)
    made().write_h5ad(tmp_path / "same.h5ad")
    atlas.add(tmp_path / "same.h5ad", progress=False)
    with (
        unchanged(atlas),
        pytest.raises(DuplicateError, match="'d' has the same cells, features and values as the dataset 'same'"),
    ):
        atlas.relink("d", hash="full")


def test_it_is_read_after_optimize_and_gc(tmp_path: Path) -> None:
    """The new references are kept as the old ones are."""
    atlas = linked(tmp_path)
    made().write_h5ad(tmp_path / "packed.h5ad", compression="gzip")
    atlas.relink("d", tmp_path / "packed.h5ad")
    atlas.optimize()
    atlas.gc(dry_run=False)
    assert_read(atlas)


def value(adata: ad.AnnData) -> None:
    adata.X.data[5] += 1


def entry(adata: ad.AnnData) -> None:
    # The same values, the last entry of a row in the next one.
    adata.X.indptr[4] -= 1


def cells(adata: ad.AnnData) -> None:
    adata.obs_names = [f"other{i}" for i in range(adata.n_obs)]


def features(adata: ad.AnnData) -> None:
    adata.var_names = [f"OTHER{i}" for i in range(adata.n_vars)]


def dtype(adata: ad.AnnData) -> None:
    adata.X = adata.X.astype("f8")


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("change", [value, entry, cells, features, dtype])
def test_another_file_is_refused(
    tmp_path: Path, unchanged: Unchanged, change: Callable[[ad.AnnData], None], full: bool
) -> None:
    """One with another value, entry, cell, feature or type; the dataset stays as it is."""
    atlas, other = linked(tmp_path, full=full), made()
    change(other)
    other.write_h5ad(tmp_path / "other.h5ad")
    with unchanged(atlas), pytest.raises(SourceError, match=r"other\.h5ad"):
        atlas.relink("d", tmp_path / "other.h5ad")
    assert_read(atlas)


def test_what_cannot_be_compared_is_refused(tmp_path: Path, unchanged: Unchanged) -> None:
    """A new file where neither a hash nor the old file is there; a dataset that is not linked; no such dataset or file."""
    atlas = linked(tmp_path)
    made().write_h5ad(tmp_path / "packed.h5ad", compression="gzip")
    with unchanged(atlas), pytest.raises(NotFoundError, match="nope"):
        atlas.relink("nope", tmp_path / "packed.h5ad")
    with unchanged(atlas), pytest.raises((NotFoundError, SourceError)):
        atlas.relink("d", tmp_path / "nope.h5ad")
    os.utime(tmp_path / "d.h5ad", (0, 0))
    with unchanged(atlas), pytest.raises(SourceError, match="cannot be compared"):
        atlas.relink("d", tmp_path / "packed.h5ad")
    atlas.drop_dataset("d")
    atlas.add(tmp_path / "packed.h5ad", "d", progress=False)
    with unchanged(atlas), pytest.raises(SourceError, match="not linked"):
        atlas.relink("d", tmp_path / "packed.h5ad")
