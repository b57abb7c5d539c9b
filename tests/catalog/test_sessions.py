"""Calls that write go on with the tables of the last call: they see what others did since, whatever it was."""

import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import raggedatlas as ra
from raggedatlas.errors import DuplicateError
from raggedatlas.store.tables import Tables
from support.atlases import GENES, small_anndata


def add(atlas: ra.RaggedAtlas, seed: int, name: str) -> None:
    """Add a dataset with features of its own among others."""
    atlas.add(small_anndata(seed, 5, [*GENES[seed : seed + 5], f"own{seed}"]), name, organism="human", progress=False)


def names(atlas: ra.RaggedAtlas) -> list[str]:
    """Return the datasets that a process sees which opens the atlas now, once all of it was checked."""
    opened = ra.RaggedAtlas.open(atlas.uri)
    assert [problem for problem in opened.validate("deep") if problem.level == "must"] == []
    return [str(name) for name in opened.list_datasets()["name"]]


def test_calls_see_what_others_committed(tmp_path: Path) -> None:
    """Two objects that take turns find each other's names, content, columns and features."""
    one = ra.RaggedAtlas.create(tmp_path / "a")
    other = ra.RaggedAtlas.open(tmp_path / "a")
    for seed in range(4):
        add((one, other)[seed % 2], seed, f"d{seed}")
    with pytest.raises(DuplicateError, match="called 'd3' already"):
        add(one, 7, "d3")
    with pytest.raises(DuplicateError, match="same cells, features and values as the dataset 'd2'"):
        add(other, 2, "again")
    one.rename_dataset("d1", "second")
    other.drop_dataset("second")
    other.snapshot()
    add(one, 5, "d1")
    assert names(one) == ["d0", "d2", "d3", "d1"]


@pytest.mark.parametrize("n_before", [1, 3])
def test_another_atlas_at_the_address(tmp_path: Path, n_before: int) -> None:
    """An atlas that was deleted and made again, with fewer or more versions, is not taken for the one before."""
    folder = tmp_path / "a"
    atlas = ra.RaggedAtlas.create(folder)
    for seed in range(n_before):
        add(atlas, seed, f"before{seed}")
    shutil.rmtree(folder)
    again = ra.RaggedAtlas.create(folder)
    for seed in (5, 6):
        add(again, seed, f"now{seed}")
    add(atlas, 0, "before0")
    assert names(atlas) == ["now5", "now6", "before0"]


def test_a_copy_that_was_put_back(tmp_path: Path) -> None:
    """An older copy of the atlas in its place is what the next call finds."""
    folder, copy = tmp_path / "a", tmp_path / "copy"
    atlas = ra.RaggedAtlas.create(folder)
    add(atlas, 0, "first")
    shutil.copytree(folder, copy)
    for seed in (1, 2):
        add(atlas, seed, f"lost{seed}")
    shutil.rmtree(folder)
    shutil.move(copy, folder)
    add(atlas, 3, "third")
    assert names(atlas) == ["first", "third"]


def test_threads_share_an_atlas(tmp_path: Path) -> None:
    """Each call has a session of its own."""
    atlas = ra.RaggedAtlas.create(tmp_path / "a")
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(add, atlas, seed, f"d{seed}") for seed in range(8)]:
            done.result()
    assert sorted(names(atlas)) == [f"d{seed}" for seed in range(8)]


@pytest.mark.parametrize("commit", [0, 1, 2])
def test_a_purge_in_the_midst_of_a_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: int) -> None:
    """What another process purges between two commits of a call stays away: the call is made again."""
    atlas = ra.RaggedAtlas.create(tmp_path / "a")
    for seed in range(3):
        add(atlas, seed, f"d{seed}")
    atlas.snapshot()
    atlas.drop_dataset("d0")
    made, counted = Tables.attempt, itertools.count()

    def attempt(tables: Tables, *words: Any) -> Any:
        if next(counted) == commit:
            ra.RaggedAtlas.open(atlas.uri).purge("d1")
        return made(tables, *words)

    monkeypatch.setattr(Tables, "attempt", attempt)
    atlas.restore(1)
    assert next(counted) > commit
    assert names(atlas) == ["d0", "d2"]
