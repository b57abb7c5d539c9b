"""Who commits second is answered as if it had begun second, whatever both found before they wrote: nothing is there twice."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raggedatlas import RaggedAtlas
from raggedatlas.catalog import assets
from raggedatlas.catalog.catalog import CELLS, DATASETS
from raggedatlas.errors import ConflictError, DuplicateError, SourceError
from raggedatlas.store.tables import Tables
from raggedatlas.wings.vectors.attachment import make_transcripts
from support.atlases import make_modelled, small_anndata, write_results
from support.spatial import spots


def meanwhile(step: str, other: Callable[[], Any]) -> Callable[[str, int, int], None]:
    """A progress callback that does something else once, when a step is reported."""
    waiting = [other]

    def progress(told: str, _done: int, _total: int) -> None:
        if told == step and waiting:
            waiting.pop()()

    return progress


def check_once(atlas: RaggedAtlas, n_cells: Mapping[str, int]) -> None:
    """These datasets are there, each once and sound, and nothing is left of any other."""
    listed = atlas.list_datasets()
    assert sorted(zip(listed["name"], listed["n_cells"], strict=True)) == sorted(n_cells.items())
    assert atlas._catalog.tables.count(CELLS) == sum(n_cells.values())
    groups = {name for name in atlas._catalog.arrays.list_children() if name != "zarr.json"}
    assert set(listed.index) == groups - {group.split("/")[0] for group in atlas.results()["uid"]}
    assert [problem for problem in atlas.validate("deep") if problem.level == "must"] == []


def add(atlas: RaggedAtlas, seed: int, name: str | None = None, **choices: Any) -> Any:
    source = small_anndata(seed, 6)
    return RaggedAtlas.open(atlas.uri).add(source, name, organism="human", **{"progress": False, **choices})


@pytest.mark.parametrize("name", ["x", "y"])
def test_the_same_content_is_refused(atlas: RaggedAtlas, name: str) -> None:
    """By its content, whatever it is called."""
    race = meanwhile("cells", lambda: add(atlas, 0, "x"))
    with pytest.raises(DuplicateError, match="same cells, features and values as the dataset 'x'"):
        add(atlas, 0, name, progress=race)
    check_once(atlas, {"x": 6})


def test_the_same_content_is_skipped(atlas: RaggedAtlas) -> None:
    """The report is that of a source that was there before."""
    report = add(atlas, 0, "y", on_duplicate="skip", progress=meanwhile("cells", lambda: add(atlas, 0, "x")))
    assert (report.status, report.dataset_uid, report.spaces) == ("skipped", "", ())
    check_once(atlas, {"x": 6})


def test_content_and_name_are_replaced(atlas: RaggedAtlas) -> None:
    """A dataset with the same content, and another of the same name, go in the commit that brings the new one."""

    def others() -> None:
        add(atlas, 0, "x")
        add(atlas, 1, "y")

    report = add(atlas, 0, "y", on_duplicate="replace", progress=meanwhile("cells", others))
    assert report.status == "replaced"
    atlas.gc(dry_run=False)
    check_once(atlas, {"y": 6})


@pytest.mark.parametrize("on_duplicate", ["error", "skip"])
def test_a_chosen_name_is_refused(atlas: RaggedAtlas, on_duplicate: str) -> None:
    """Other content under a name that the caller chose."""
    with pytest.raises(DuplicateError, match="called 'x' already"):
        add(atlas, 0, "x", on_duplicate=on_duplicate, progress=meanwhile("cells", lambda: add(atlas, 1, "x")))
    check_once(atlas, {"x": 6})


@pytest.mark.long
def test_a_name_that_nobody_chose_gets_a_number(atlas: RaggedAtlas, tmp_path: Path) -> None:
    """The name of the file is taken meanwhile: the dataset is called as if it had come later."""
    small_anndata(0, 6).write_h5ad(tmp_path / "x.h5ad")
    race = meanwhile("cells", lambda: [add(atlas, 1, "x"), add(atlas, 2, "x-2")])
    report = atlas.add(tmp_path / "x.h5ad", organism="human", progress=race)
    assert report.name == "x-3"
    assert "the name 'x' is taken; this dataset is called 'x-3'" in report.notes
    check_once(atlas, {"x": 6, "x-2": 6, "x-3": 6})


@pytest.mark.parametrize("on_duplicate", ["error", "skip"])
def test_one_of_several_that_share_a_commit(atlas: RaggedAtlas, on_duplicate: str) -> None:
    """The others are committed, and the one is refused or skipped."""
    race = meanwhile("cells", lambda: add(atlas, 1, "b"))
    sources = [small_anndata(seed, 6) for seed in range(3)]

    def run() -> Any:
        return atlas.add(sources, organism="human", on_duplicate=on_duplicate, progress=race)

    if on_duplicate == "error":
        with pytest.raises(SourceError, match="1 of 3 sources were refused, the other 2 are in the atlas"):
            run()
    else:
        assert [report.status for report in run()] == ["added", "skipped", "added"]
    check_once(atlas, {"b": 6, "anndata": 6, "anndata-3": 6})


def test_a_replacement_is_one_commit(atlas: RaggedAtlas) -> None:
    """Whoever looks after the commit finds the new dataset alone; a process that dies then leaves only cells that nobody sees."""
    add(atlas, 0, "x")
    seen: list[list[str]] = []

    def die() -> None:
        seen.append(list(RaggedAtlas.open(atlas.uri).list_datasets().index))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add(atlas, 1, "x", on_duplicate="replace", progress=meanwhile("records", die))
    assert seen == [list(atlas.list_datasets().index)]
    atlas.repair()
    check_once(atlas, {"x": 6})


@pytest.mark.parametrize("there", [0, 1])
def test_two_commits_of_one_version_collide(atlas: RaggedAtlas, there: int) -> None:
    """Of two commits that were chosen by the same inventory, the second is chosen again, also in an empty inventory."""
    for seed in range(there):
        add(atlas, seed)
    add(atlas, 7, "second")
    catalog, inventories = atlas._catalog, []
    row = assets.find_dataset(catalog, "second")[0]
    atlas.drop_dataset("second")

    def renamed(name: str) -> assets.Commit:
        return assets.Commit((row.model_copy(update={"uid": name * 16, "zarr_group": f"{name * 16}/x", "name": name}),))

    def choose(old: list[Any]) -> assets.Commit:
        inventories.append([record.name for record in old])
        if len(inventories) == 1:
            assets.commit_records(catalog, lambda _old: renamed("a"))
        return renamed("b")

    assets.commit_records(catalog, choose)
    first = ["anndata"] * there
    assert inventories == [first, [*first, "a"]]
    assert [record.name for record in assets.read_records(catalog)] == [*first, "a", "b"]


@pytest.mark.parametrize("there", [0, 1])
def test_a_commit_whose_answer_is_lost_is_done_once(
    atlas: RaggedAtlas, monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    """A commit that was done and reported as failed is found, and is no twin of itself."""
    for seed in range(there):
        add(atlas, seed, "first")
    original = Tables.append_alone

    def lost(self: Tables, name: str, *args: Any, **kwargs: Any) -> Any:
        done = original(self, name, *args, **kwargs)
        if name == DATASETS:
            raise ConflictError("the answer was lost")
        return done

    monkeypatch.setattr(Tables, "append_alone", lost)
    assert add(atlas, 5, "x").status == "added"
    monkeypatch.undo()
    check_once(atlas, {"x": 6} | ({"first": 6} if there else {}))


def test_twins_that_are_there_are_reported(atlas: RaggedAtlas) -> None:
    """The same content twice is a problem, the same name twice a note, at every level."""
    add(atlas, 0, "x")
    add(atlas, 1, "y")
    rows = atlas._catalog.tables.read(DATASETS)
    x, y = rows.column("uid").to_pylist()
    twin = rows.to_pylist()[0] | {"uid": y, "zarr_group": f"{y}/other"}
    atlas._catalog.tables.append(DATASETS, type(rows).from_pylist([twin | {"uid": "0" * 16}], schema=rows.schema))
    found = {problem.rule: problem for problem in atlas.validate()}
    assert x in found["duplicate-dataset"].message
    assert "drop_dataset('0000000000000000')" in found["duplicate-dataset"].fix
    assert found["duplicate-name"].level == "practice"
    assert found["duplicate-dataset"].level == "must"


@pytest.mark.long
@pytest.mark.parametrize("as_", ["space", "vector"])
def test_results_of_one_name(tmp_path: Path, as_: str) -> None:
    """A result is refused, skipped or put in the place of the other; no column and no array of the loser is left."""
    own = make_modelled(tmp_path / "own")
    other = write_results(tmp_path / "other", own.uids[own.known], own.values + 1)
    atlas = own.open()

    def race() -> Callable[[str, int, int], None]:
        return meanwhile(
            "column", lambda: own.open().add(own.folder / "z", "z", on_duplicate="replace", progress=False)
        )

    with pytest.raises(DuplicateError, match="result 'z'"):
        atlas.add(other, "z", as_=as_, progress=race())
    assert atlas.add(other, "z", as_=as_, on_duplicate="skip", progress=False).status == "skipped"
    atlas.drop_result("z")
    assert atlas.add(other, "z", as_=as_, on_duplicate="skip", progress=race()).status == "skipped"
    atlas.drop_result("z")
    assert atlas.add(other, "z", as_=as_, on_duplicate="replace", progress=race()).status == "replaced"
    view = atlas.checkout(atlas.snapshot())
    np.testing.assert_array_equal(view.query().with_results("z").to_anndata().obsm["z"], own.expected(own.values + 1))
    assert view.validate("deep") == []
    atlas.gc(dry_run=False)
    assert [c for c in atlas._catalog.tables.schema(CELLS).names if c.startswith("z")] == [
        atlas.results()["column"]["z"]
    ]


@pytest.mark.long
@pytest.mark.parametrize("counts", [False, True], ids=["cells", "counts"])
def test_geometry_that_brings_cells(atlas: RaggedAtlas, counts: bool) -> None:
    """New cells of the same objects come once; another dataset of the same name keeps it."""
    choices: dict[str, Any] = {"counts": True, "cells": "cell_id"} if counts else {}
    places = np.arange(12, dtype=np.float32).reshape(6, 2)
    points = make_transcripts(places, list("ABCABC"), list("xxyyzz")) if counts else spots()

    def other() -> Any:
        return RaggedAtlas.open(atlas.uri).add(points, on_duplicate="replace", progress=False, **choices)

    with pytest.raises(DuplicateError):
        atlas.add(points, progress=meanwhile("cells", other), **choices)
    first = atlas.list_datasets()
    assert len(first) == len(atlas.geometries()) == 1
    assert atlas.add(points, on_duplicate="skip", progress=False, **choices).status == "skipped"
    atlas.drop_dataset(first.index[0])
    atlas.gc(dry_run=False)
    report = atlas.add(points, on_duplicate="skip", progress=meanwhile("cells", other), **choices)
    assert report.status == "skipped"
    name, n = atlas.list_datasets()[["name", "n_cells"]].iloc[0]
    atlas.repair()
    assert len(atlas.geometries()) == 1
    assert atlas.add(points, on_duplicate="replace", progress=meanwhile("cells", other), **choices).status == "replaced"
    assert list(atlas.list_datasets()["name"]) == [name]
    assert atlas._catalog.tables.count(CELLS) == n
    assert len(atlas.geometries()) == 1
    assert [problem for problem in atlas.validate("deep") if problem.level == "must"] == []
