"""Purge: nothing of a dataset is left, in any snapshot or byte, and everything else is as it was."""

import contextlib
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.catalog import assets, maintenance, purge, snapshots, validation
from raggedatlas.catalog.assets import purged, read_records
from raggedatlas.catalog.catalog import CELLS, VERSIONS, Catalog, open_catalog
from raggedatlas.errors import ConflictError, NotFoundError
from raggedatlas.ingest import columns
from raggedatlas.model.spaces import FeatureSpace
from raggedatlas.store.location import Location
from raggedatlas.store.tables import PURGE_KEY
from raggedatlas.store.upkeep import compact
from support.atlases import small_anndata, write_dataset
from support.processes import started
from support.spatial import cloud

Dying = Callable[..., contextlib.AbstractContextManager[list[str]]]
Two = tuple[Catalog, str, str]


def bytes_of(catalog: Catalog) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(Path(catalog.location.uri).rglob("*")) if file.is_file())


def cells_of(catalog: Catalog, *datasets: str) -> list[str]:
    where = "dataset_uid IN ('" + "', '".join(datasets) + "')"
    return [str(uid) for uid in catalog.tables.read(CELLS, ["uid"], where).column(0).to_pylist()]


def make_history(catalog: Catalog, first: str) -> str:
    """Three snapshots: with both, with a third too, without the first; and a further dataset at the tip."""
    snapshots.snapshot(catalog, "one")
    third = write_dataset(catalog, "c", ["C", "E"], np.ones((10, 2), "u1"))
    snapshots.snapshot(catalog, "two")
    assets.drop_dataset(catalog, first)
    snapshots.snapshot(catalog, "three")
    write_dataset(catalog, "d", ["E", "F"], np.ones((5, 2), "u1"))
    return third


@pytest.mark.nightly
@pytest.mark.parametrize("versions_exist", [False, True])
def test_nothing_is_left_of_a_purged_dataset(two: Two, versions_exist: bool) -> None:
    """No cell uid of it is in any file; snapshots keep number, label and their other content; the log names it."""
    catalog, first, second = two
    gone = cells_of(catalog, first)
    third = make_history(catalog, first)
    if versions_exist:
        snapshots.restore(catalog, "two")
    kept = {
        r.label: catalog.at(r).tables.read(CELLS, where=f"dataset_uid <> '{first}'")
        for r in snapshots.list_versions(catalog)
    }
    tip = catalog.tables.read(CELLS, where=f"dataset_uid <> '{first}'")
    assert any(uid.encode() in bytes_of(catalog) for uid in gone)
    report = purge.purge(catalog, "a")
    assert report.groups == (first,)
    assert report.n_cells == (30 if versions_exist else 0)
    after = bytes_of(catalog)
    assert not [uid for uid in gone if uid.encode() in after]
    for uid in cells_of(catalog, second, third):
        assert uid.encode() in after
    assert list(purged(catalog)) == [first]
    records = snapshots.list_versions(catalog)
    assert [(r.version, r.label, r.n_cells, r.n_datasets) for r in records] == [
        (1, "one", 20, 1), (2, "two", 30, 2), (3, "three", 30, 2),
    ]  # fmt: skip
    for record in records:
        assert catalog.at(record).tables.read(CELLS).equals(kept[record.label])
        assert validation.validate(catalog.at(record), "deep") == []
    assert catalog.tables.read(CELLS).equals(tip)
    assert not [p for p in validation.validate(catalog, "deep") if p.level == "must"]
    assert snapshots.snapshot(catalog).version == 4
    with pytest.raises(NotFoundError, match="Neither"):
        purge.purge(catalog, first)


@pytest.mark.parametrize("step", [pytest.param(17, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.nightly)])
def test_a_dead_purge_is_finished(two: Two, dying: Dying, tmp_path: Path, step: int) -> None:
    """Before whichever write a purge dies, the tip reads as before or without the dataset, and `repair` or the same call finishes it."""
    first = two[1]
    for name, label in (("c", "one"), ("d", "two"), ("e", "three")):
        snapshots.snapshot(two[0], label)
        write_dataset(two[0], name, ["B", name], np.ones((3, 2), "u1"))
    gone, before = cells_of(two[0], first), [record.uid for record in read_records(two[0])]
    others = f"dataset_uid <> '{first}'"
    with_it, tip = two[0].tables.read(CELLS), two[0].tables.read(CELLS, where=others)
    kept = {r.label: two[0].at(r).tables.read(CELLS, where=others) for r in snapshots.list_versions(two[0])}
    finish = itertools.cycle([maintenance.repair, lambda catalog: purge.purge(catalog, "a")])
    finished, stages = False, []
    for n in itertools.count(1, step):
        catalog = open_catalog(Location(shutil.copytree(two[0].location.uri, tmp_path / str(n))))
        with dying(n, files=True) as done:
            purge.purge(catalog, first)
            finished = True
        mark, now = catalog.tables.unfinished_purge(), catalog.current()
        stages.append("" if mark is None else mark.stage)
        # Without a mark it died before anything was written, or after everything.
        whole = mark.stage != "deleting" if mark is not None else not finished and "rewriting" not in stages
        assert [record.uid for record in read_records(now)] == (before if whole else before[1:]), done
        assert now.tables.read(CELLS).equals(with_it if whole else tip), done
        if mark is not None:
            assert "unfinished-purge" in {p.rule for p in validation.validate(catalog)}
            with pytest.raises(ConflictError, match=first):
                purge.purge(catalog, "b")
            next(finish)(catalog)
        elif whole:
            purge.purge(catalog, "a")
        assert catalog.tables.unfinished_purge() is None
        after = bytes_of(catalog)
        assert not [uid for uid in gone if uid.encode() in after], done
        assert catalog.tables.read(CELLS).equals(tip), done
        assert [record.uid for record in read_records(catalog)] == before[1:]
        records = snapshots.list_versions(catalog)
        assert [(record.label, record.n_datasets) for record in records] == [("one", 1), ("two", 2), ("three", 3)]
        for record in records:
            assert catalog.at(record).tables.read(CELLS).equals(kept[record.label]), done
        assert not [p for p in validation.validate(catalog, "deep") if p.level == "must"], done
        shutil.rmtree(catalog.location.uri)
        if finished:
            break
    assert {"rewriting", "", *(["begun", "deleting"] if step == 1 else [])} <= set(stages)


WRITING: dict[str, Callable[[RaggedAtlas], object]] = {
    "add": lambda atlas: atlas.add(small_anndata(5, 4), "new", organism="human", progress=False),
    "add_csc": lambda atlas: atlas.add_csc("b"),
    "register_features": lambda atlas: atlas.register_features(pa.table({"uid": ["0" * 16], "feature_id": ["x"]})),
    "register_space": lambda atlas: atlas.register_space(FeatureSpace(name="mine", kind="dense", has_features=False)),
    "reindex_registry": lambda atlas: atlas.reindex_registry(),
    "optimize": lambda atlas: atlas.optimize(),
    "snapshot": lambda atlas: atlas.snapshot(),
    "restore": lambda atlas: atlas.restore("one"),
    "drop_dataset": lambda atlas: atlas.drop_dataset("b"),
    "delete_cells": lambda atlas: atlas.delete_cells({"cell_name": "cell-1"}),
    "drop_result": lambda atlas: atlas.drop_result("z"),
    "drop_geometry": lambda atlas: atlas.drop_geometry("shapes"),
    "annotate": lambda atlas: atlas.annotate({"uid": ["0"], "label": ["B"]}),
    "drop_annotation": lambda atlas: atlas.drop_annotation("labels"),
    "gc": lambda atlas: atlas.gc(dry_run=False),
    "gc that only looks": lambda atlas: atlas.gc(),
    "drop_snapshot": lambda atlas: snapshots.drop_snapshot(atlas._catalog, 1),
    "another purge": lambda atlas: atlas.purge("b"),
    "identity.link": lambda atlas: atlas.identity.link("A", "B"),
    "identity.unlink": lambda atlas: atlas.identity.unlink("A"),
    "identity.update": lambda atlas: atlas.identity.update(),
    "identity.load": lambda atlas: atlas.identity.load("tests/data/gene_tables/hgnc_complete_set_extract.txt"),
    "identity.remove": lambda atlas: atlas.identity.remove("HGNC human"),
}
"""Every call that writes, but those that finish a purge. Results and geometry come by `add` too, and are refused below."""


def half_purged(catalog: Catalog, uid: str, dying: Dying) -> RaggedAtlas:
    """Let a purge die while it rewrites old snapshots; the handle was opened before."""
    atlas = RaggedAtlas(catalog)
    with dying(7):
        purge.purge(catalog, uid)
    assert catalog.current() is not catalog
    return atlas


@pytest.mark.nightly
def test_nothing_is_written_while_a_purge_is_unfinished(two: Two, dying: Dying, tmp_path: Path) -> None:
    """Every writing call on an open handle is refused by the name of the purge, and the tip reads as it was."""
    catalog, first, _ = two
    third = make_history(catalog, first)
    shown = RaggedAtlas(catalog).list_datasets()
    atlas = half_purged(catalog, third, dying)
    np.save(tmp_path / "batch_index.npy", np.zeros(1))
    further: dict[str, Callable[[RaggedAtlas], object]] = {
        "a result": lambda atlas: atlas.add(tmp_path, "z", progress=False),
        "geometry": lambda atlas: atlas.add(cloud(), progress=False),
        "transcripts": lambda atlas: atlas.add(cloud(), counts=True, progress=False),
    }
    for call, write in {**WRITING, **further}.items():
        with pytest.raises(ConflictError, match=rf"purge of dataset 'c' \({third}\)"):
            write(atlas)
        assert atlas.list_datasets().equals(shown), call
    assert atlas.dataset("d").n_cells == 5
    assert {p.rule for p in atlas.validate("rows") if p.level == "must"} == {"unfinished-purge"}
    atlas.purge("c")
    assert list(atlas.list_datasets()["name"]) == ["b", "d"]
    atlas.add(small_anndata(5, 4), "new", organism="human", progress=False)
    assert atlas.repair().n_cells == 0
    assert list(atlas.list_datasets()["name"]) == ["b", "d", "new"]


def test_what_was_changed_before_a_purge_begins_is_not_refused(
    two: Two, dying: Dying, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A purge that begins between the commit of features and the mapping that follows from them: the call ends as it did."""
    catalog, first, _ = two
    third = make_history(catalog, first)
    register = columns.register_features

    def then_purged(*words: Any) -> int:
        n_new = register(*words)
        half_purged(catalog, third, dying)
        return n_new

    monkeypatch.setattr(columns, "register_features", then_purged)
    atlas = RaggedAtlas(catalog)
    assert atlas.register_features(pa.table({"uid": ["0" * 16], "feature_id": ["x"]})) == 1
    atlas.repair()
    assert "0" * 16 in atlas.features().index
    assert not [problem for problem in atlas.validate("deep") if problem.level == "must"]


@pytest.mark.parametrize("step", ["plan", "arrays", "cells"])
def test_an_add_under_way_and_a_purge_see_each_other(two: Two, step: str) -> None:
    """A purge called during an add is refused; where it came before the add had its lease, the add is. None loses anything."""
    catalog, first, _ = two
    atlas, refused = RaggedAtlas(catalog), []

    def purging(told: str, _done: int, _total: int) -> None:
        if told == step and not refused:
            with pytest.raises(ConflictError, match="under way") if step != "plan" else contextlib.nullcontext():
                purge.purge(catalog, first)
            refused.append(step)

    atlas.add(small_anndata(5, 4), "new", organism="human", progress=purging)
    assert refused
    assert catalog.tables.unfinished_purge() is None
    assert list(atlas.list_datasets()["name"]) == (["b", "new"] if step == "plan" else ["a", "b", "new"])
    assert not [p for p in atlas.validate("deep") if p.level == "must"]


@pytest.mark.long
def test_a_purge_under_way_refuses_the_add_that_was_planned_before(two: Two, dying: Dying) -> None:
    """An add that began before a purge, and takes its lease after it, is refused and leaves no arrays."""
    catalog, first, _ = two
    snapshots.snapshot(catalog, "one")
    atlas, begun = RaggedAtlas(catalog), []

    def purging(told: str, _done: int, _total: int) -> None:
        if told == "plan" and not begun:
            begun.append(half_purged(catalog, first, dying))

    with pytest.raises(ConflictError, match="unfinished-purge"):
        atlas.add(small_anndata(5, 4), "new", organism="human", progress=purging)
    purge.purge(catalog, "a")
    assert list(atlas.list_datasets()["name"]) == ["b"]
    assert {n for n in catalog.arrays.list_children() if n != "zarr.json"} == set(atlas.list_datasets().index)


@pytest.mark.long
@pytest.mark.parametrize("step", ["_rewrite_all", "Sweep"])
def test_a_purge_that_is_interrupted_can_be_finished_by_another_process(
    two: Two, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Its process lives on, in a notebook for instance, and is no longer named as the one that runs the purge."""
    catalog, first, _ = two
    snapshots.snapshot(catalog)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(purge, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        purge.purge(catalog, first)
    mark = catalog.tables.unfinished_purge()
    assert mark is not None
    assert mark.owner == {}
    repair = "import sys; from raggedatlas import RaggedAtlas; RaggedAtlas.open(sys.argv[1]).repair()"
    with started([sys.executable, "-c", repair, catalog.location.uri]) as other:
        assert other.wait() == 0, other.stderr
    assert [record.name for record in read_records(catalog)] == ["b"]
    assert catalog.tables.unfinished_purge() is None


@pytest.mark.long
def test_two_processes_do_not_run_one_purge(two: Two, dying: Dying) -> None:
    """While the process that purges is alive, neither `repair` nor the same call of another one joins in."""
    catalog, first, _ = two
    snapshots.snapshot(catalog)
    half_purged(catalog, first, dying)
    mark = catalog.tables.unfinished_purge()
    assert mark is not None
    with started([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        start = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        owner = {**mark.owner, "pid": other.pid, "process_start": start}
        text = mark.model_copy(update={"owner": owner}).model_dump_json()
        catalog.tables.update_metadata(VERSIONS, {PURGE_KEY: text})
        for call in (lambda: maintenance.repair(catalog), lambda: purge.purge(catalog, "a")):
            with pytest.raises(ConflictError, match=f"process {other.pid}"):
                call()
    purge.purge(catalog, "a")
    assert [record.name for record in read_records(catalog)] == ["b"]


def test_a_dataset_that_is_purged_before_the_mark_is_not_there(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes that both found it, the second says so, and leaves no mark."""
    catalog, first, _ = two
    take_over = purge._take_over

    def late(*given: Any) -> Any:
        monkeypatch.setattr(purge, "_take_over", take_over)
        purge.purge(open_catalog(Location(catalog.location.uri)), first)
        return take_over(*given)

    monkeypatch.setattr(purge, "_take_over", late)
    with pytest.raises(NotFoundError, match="Another process has purged the dataset 'a'"):
        purge.purge(catalog, "a")
    write_dataset(catalog, "c", ["C"], np.ones((3, 1), "u1"))
    assert {record.name for record in read_records(catalog.tip())} == {"b", "c"}


@pytest.mark.long
def test_no_file_keeps_a_dataset_that_was_dropped_before(two: Two) -> None:
    """Its rows are gone too where dropping only marked them as deleted, at the tip and in a snapshot that was taken since."""
    catalog = two[0]
    write_dataset(catalog, "large", ["A"], np.ones((400, 1), "u1"))
    compact(catalog.tables, CELLS)
    gone = cells_of(catalog, two[2])
    snapshots.snapshot(catalog)
    assets.drop_dataset(catalog, "b")
    snapshots.snapshot(catalog)
    assert any(uid.encode() in bytes_of(catalog) for uid in gone)
    purge.purge(catalog, "b")
    after = bytes_of(catalog)
    assert not [uid for uid in gone if uid.encode() in after]


def test_no_tag_keeps_a_purged_dataset(two: Two) -> None:
    """Versions that a snapshot which was never recorded, or an earlier purge, had tagged are gone too."""
    catalog, first, _ = two
    gone = cells_of(catalog, first)
    for tag in ("pending-1-ab", "purging-0123456789abcdef", "atlas-v99"):
        catalog.tables.tag(CELLS, tag, catalog.tables.version(CELLS))
    purge.purge(catalog, first)
    after = bytes_of(catalog)
    assert not [uid for uid in gone if uid.encode() in after]
    assert not catalog.tables.tags(CELLS)


def test_purge_waits_for_adds_and_finds_by_name(two: Two) -> None:
    """A purge is refused while an add is under way; unknown and ambiguous names are refused too."""
    catalog = two[0]
    with pytest.raises(NotFoundError, match="Neither"):
        purge.purge(catalog, "nobody")
    write_dataset(catalog, "b", ["A"], np.ones((2, 1), "u1"))
    with pytest.raises(NotFoundError, match="2 datasets"):
        purge.purge(catalog, "b")
    write_dataset(catalog, "half", ["A"], np.ones((2, 1), "u1"), last="cells")
    with pytest.raises(ConflictError, match="under way"):
        purge.purge(catalog, "a")
    assert len(read_records(catalog)) == 3
