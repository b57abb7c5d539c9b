"""Optimize, drop, gc, repair: what is needed stays, what nothing needs goes."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raggedatlas.catalog import assets, collectors, maintenance, optimization, purge, snapshots, validation
from raggedatlas.catalog.assets import read_records
from raggedatlas.catalog.catalog import CELLS, DATASETS, IDENTITY, LAYOUTS, Catalog
from raggedatlas.catalog.layouts import BY_HAND, register_features
from raggedatlas.errors import (
    ConflictError,
    CorruptError,
    DuplicateError,
    NameRefusedError,
    NotFoundError,
    SchemaError,
    StoreError,
)
from raggedatlas.model.ids import check_given_name, fit_name
from raggedatlas.model.spaces import FeatureSpace, PointerKind
from raggedatlas.store import tables
from raggedatlas.store.arrays import create_group, read_group, write_group_attributes
from raggedatlas.store.tables import Tables
from support.atlases import SPACE, write_dataset

Dying = Callable[[int], contextlib.AbstractContextManager[list[str]]]
Two = tuple[Catalog, str, str]
NOW = timedelta(0)
HOUR = timedelta(hours=1)


def kill_writer(catalog: Catalog, uid: str) -> None:
    """Make a lease look like that of a process on this machine that has ended."""
    lease = assets.read_lease(catalog, uid)
    assert lease
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = {**lease, "pid": int(child.stdout)}
    write_group_attributes(catalog.arrays, uid, {"raggedatlas": {"ingest": dead}})


def test_optimize_assigns_indices_and_settles_every_table(two: Two) -> None:
    """Afterwards indices are 0..N-1 in registry and layouts, each table is one fragment, and every index covers it."""
    catalog = two[0]
    optimization.optimize(catalog)
    assert validation.validate(catalog, "deep") == []
    registry = catalog.tables.read(f"{SPACE}_registry", ["global_index"]).column(0).to_pylist()
    assert sorted(registry) == [0, 1, 2, 3]
    for name in (CELLS, DATASETS, LAYOUTS, f"{SPACE}_registry"):
        assert catalog.tables.settled(name)
    assert catalog.tables.indices(CELLS) == {"uid_btree_idx": ["uid"], "dataset_uid_btree_idx": ["dataset_uid"]}
    assert set(catalog.tables.indices(LAYOUTS)) == {
        "layout_uid_btree_idx",
        "feature_uid_btree_idx",
        "feature_uid_fts_idx",
    }


def test_optimize_twice_writes_nothing(two: Two) -> None:
    """Where nothing changed, no table gets a new version."""
    catalog = two[0]
    optimization.optimize(catalog)
    before = {name: catalog.tables.version(name) for name in catalog.tables.names()}
    optimization.optimize(catalog)
    assert {name: catalog.tables.version(name) for name in catalog.tables.names()} == before


def test_optimize_cleans_a_table_up_once(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that it writes itself, whose clean-up beside another of the same table would be in vain."""
    cleaned: list[str] = []

    def clean_up(_: Tables, name: str, __: timedelta) -> int:
        cleaned.append(name)
        return 0

    snapshots.snapshot(two[0])
    write_dataset(two[0], "c", ["A", "ZZ"], np.ones((2, 2), "u1"))
    monkeypatch.setattr(collectors, "clean_up", clean_up)
    optimization.optimize(two[0])
    assert IDENTITY in cleaned
    assert len(cleaned) == len(set(cleaned))


@pytest.mark.long
def test_optimize_keeps_row_order(two: Two) -> None:
    """Compaction and indexes change no row and no order."""
    catalog = two[0]
    for i in range(4):
        write_dataset(catalog, f"m{i}", ["A", f"G{i}"], np.ones((5, 2), "u1"))
    before = catalog.tables.read(CELLS)
    optimization.optimize(catalog)
    assert catalog.tables.read(CELLS).equals(before)


def test_indices_never_change(two: Two) -> None:
    """A feature keeps its index through later adds; new ones count on, at once or, beside corrections of others, by `reindex`."""
    catalog = two[0]
    assert optimization.reindex(catalog) == 0
    before = catalog.tables.read(f"{SPACE}_registry", ["uid", "global_index"])
    assert sorted(before.column("global_index").to_pylist()) == list(range(4))
    write_dataset(catalog, "c", ["0", "A", "ZZ"], np.ones((2, 3), "u1"))
    after = catalog.tables.read(f"{SPACE}_registry", ["uid", "global_index"])
    assert after.slice(0, 4).equals(before)
    assert sorted(after.column("global_index").to_pylist()) == list(range(6))
    known = before.column("uid")[0].as_py()
    given = pa.table({"uid": ["f" * 16, known], "symbol": ["NEW", "CORRECTED"], "symbol_source": [BY_HAND] * 2})
    assert register_features(catalog, SPACE, given) == 1
    assert optimization.reindex(catalog, SPACE) == 1
    last = catalog.tables.read(f"{SPACE}_registry", ["uid", "global_index"])
    index = dict(zip(*last.to_pydict().values(), strict=True))
    assert index == {**dict(zip(*after.to_pydict().values(), strict=True)), "f" * 16: 6}
    assert catalog.tables.count(LAYOUTS, "global_index IS NULL") == 0
    with pytest.raises(NotFoundError, match="no features"):
        optimization.reindex(catalog, "embedding")
    with pytest.raises(NotFoundError):
        optimization.reindex(catalog, "nonsense")
    assert optimization.reindex(catalog, "protein_abundance") == 0


@pytest.mark.long
@pytest.mark.parametrize("index", [2**40, 2**63 - 1, -1, 2])
def test_indices_are_not_counted_on_from_damage(two: Two, index: int) -> None:
    """Where assigned indices are not dense, new features get none, and nothing is written; a second call once counted on."""
    catalog, table = two[0], f"{SPACE}_registry"
    optimization.reindex(catalog)
    rows = catalog.tables.read(table)
    values = [index if i == 3 else i for i in rows["global_index"].to_pylist()]
    at = rows.column_names.index("global_index")
    catalog.tables.overwrite_if(
        table, rows.set_column(at, rows.schema.field(at), [values]), catalog.tables.version(table)
    )
    write_dataset(catalog, "c", ["ZZ"], np.ones((2, 1), "u1"))
    before = catalog.tables.version(table)
    for call in (optimization.reindex, optimization.optimize, snapshots.snapshot):
        with pytest.raises(CorruptError, match=f"global_index of table '{table}'"):
            call(catalog)
    assert catalog.tables.version(table) == before
    assert "global-index" in {problem.rule for problem in validation.validate(catalog)}


def test_a_dropped_dataset_is_gone_now_and_there_before(two: Two) -> None:
    """Drop takes records and cells from the tip, by name or uid; snapshots keep them."""
    catalog, first, second = two
    view = catalog.at(snapshots.snapshot(catalog))
    report = assets.drop_dataset(catalog, "a")
    assert (report.n_cells, report.groups) == (30, (f"{first}/{SPACE}",))
    assert [r.uid for r in read_records(catalog)] == [second]
    assert catalog.tables.count(CELLS) == 20
    assert not validation.validate(catalog, "deep")
    assert not validation.validate(view, "deep")
    with pytest.raises(NotFoundError):
        assets.drop_dataset(catalog, "a")


def test_a_killed_drop_is_finished_by_repair(two: Two, dying: Dying) -> None:
    """Between the record's removal and that of the cells, the dataset is invisible but uncleared; repair removes its cells and arrays."""
    catalog, first, _ = two
    with dying(1) as done:
        assets.drop_dataset(catalog, first)
    assert done == [f"overwrite_if {DATASETS}"]
    assert {p.rule for p in validation.validate(catalog, "rows") if p.level == "must"} == set()
    report = maintenance.repair(catalog)
    assert (report.n_cells, report.groups) == (30, (first,))
    assert catalog.tables.count(CELLS) == 20


def test_gc_frees_only_what_nothing_reaches(two: Two) -> None:
    """A dropped dataset's arrays go once no snapshot has it; a dry run says so and removes nothing."""
    catalog, first, second = two
    snapshots.snapshot(catalog)
    assets.drop_dataset(catalog, first)
    assert maintenance.gc(catalog, dry_run=False).groups == ()
    snapshots.drop_snapshot(catalog, 1)
    size = catalog.arrays.child(first).size()
    dry = maintenance.gc(catalog)
    assert (dry.groups, dry.dry_run, dry.n_bytes) == ((first,), True, size)
    assert catalog.arrays.child(first).exists()
    assert maintenance.gc(catalog, dry_run=False).groups == (first,)
    assert catalog.arrays.list_children() == [second]
    assert not validation.validate(catalog, "deep")


@pytest.mark.long
@pytest.mark.parametrize("last", ["lease", "arrays", "features", "layout", "columns", "cells"])
def test_what_a_killed_add_leaves_is_swept(two: Two, last: str) -> None:
    """While the writer lives nothing of it is touched; once it is dead, repair removes cells and arrays, gc arrays."""
    catalog, first, second = two
    uid = write_dataset(catalog, "half", ["A", "Q"], np.ones((4, 2), "u1"), {"more": ["t"] * 4}, last=last)  # type: ignore[arg-type]
    for report in (maintenance.repair(catalog), maintenance.gc(catalog, dry_run=False, grace=NOW)):
        assert (report.groups, report.kept, report.n_cells) == ((), (uid,), 0)
    kill_writer(catalog, uid)
    assert maintenance.gc(catalog).groups == (uid,)
    report = maintenance.repair(catalog)
    assert (report.groups, report.n_cells) == ((uid,), 4 if last == "cells" else 0)
    assert sorted(catalog.arrays.list_children()) == sorted([first, second])
    assert not validation.validate(catalog, "deep") or {p.rule for p in validation.validate(catalog, "deep")} == {
        "unassigned-index"
    }
    snapshots.snapshot(catalog)


def test_gc_leaves_names_that_are_not_ours(two: Two) -> None:
    """Only folders named like datasets are looked at."""
    catalog = two[0]
    create_group(catalog.arrays, "notes", {"by": "somebody"})
    assert maintenance.gc(catalog, dry_run=False, grace=NOW).groups == ()
    assert "notes" in catalog.arrays.list_children()


def test_stray_tags_are_removed_and_lost_ones_come_back(two: Two) -> None:
    """Tags without a snapshot go, young provisional ones stay, a snapshot's missing tag is put back."""
    catalog = two[0]
    record = snapshots.snapshot(catalog)
    version = catalog.tables.version(CELLS)
    young = f"pending-{int(datetime.now(UTC).timestamp())}-abcd"
    for tag in ("pending-1000-abcd", young, "atlas-v77", "mine"):
        catalog.tables.tag(CELLS, tag, version)
    catalog.tables.untag(CELLS, record.tag)
    dry = maintenance.gc(catalog)
    assert len(dry.notes) == 2
    maintenance.gc(catalog, dry_run=False)
    assert set(catalog.tables.tags(CELLS)) == {record.tag, young, "mine"}


def test_repair_reports_missing_arrays_and_clears_half_made_tables(two: Two) -> None:
    """Missing arrays are named with the way out; a table folder without a version is removed after the grace."""
    catalog, first, _ = two
    catalog.arrays.child(first).delete_prefix()
    catalog.tables.location.child("ghost.lance").write_bytes("data/x.lance", b"x")
    assert not any("ghost" in note for note in maintenance.repair(catalog).notes)
    notes = maintenance.repair(catalog, NOW).notes
    assert any("ghost" in note for note in notes)
    assert any(first in note and "drop_dataset" in note for note in notes)
    assert "ghost" not in catalog.tables.names()
    assert len(read_records(catalog)) == 2


def test_a_lease_lives_as_long_as_its_process(atlas: Catalog) -> None:
    """Same machine: the very process. Other machine: fresh objects. None: the last minute. Finished: never."""
    uid = "0123456789abcdef"
    assert not assets.lease_alive(atlas, uid)
    assets.take_lease(atlas, uid)
    lease = assets.read_lease(atlas, uid)
    assert lease is not None
    assert lease["pid"] == os.getpid()
    assert assets.lease_alive(atlas, uid, NOW)
    cases = {
        "process_start": ("1", HOUR, False),
        "pid": (-1, HOUR, False),
        "host": ("elsewhere", HOUR, True),
        "boot_id": ("another", HOUR, True),
        "namespace": ("pid:[1]", NOW, False),
    }
    for key, (value, grace, alive) in cases.items():
        write_group_attributes(atlas.arrays, uid, {"raggedatlas": {"ingest": {**lease, key: value}}})
        assert assets.lease_alive(atlas, uid, grace) is alive, key
    write_group_attributes(atlas.arrays, uid, {})
    assert assets.lease_alive(atlas, uid, NOW)
    assets.take_lease(atlas, uid)
    assets.release_lease(atlas, uid)
    assets.release_lease(atlas, uid)
    assert not assets.lease_alive(atlas, uid)
    assert read_group(atlas.arrays, uid).attributes == {"raggedatlas": {}}
    atlas.arrays.write_bytes(f"{uid}/zarr.json", b"{")
    assert assets.read_lease(atlas, uid) is None
    assets.release_lease(atlas, "ffffffffffffffff")
    assert "ffffffffffffffff" not in atlas.arrays.list_children()


def test_without_proc_a_process_is_looked_up_by_number(atlas: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system tells no start times, a running number counts as alive and a free one as dead."""
    monkeypatch.setattr(assets, "_text", lambda path: "")
    monkeypatch.setattr(Path, "exists", lambda path: False)
    uid = "0123456789abcdef"
    assets.take_lease(atlas, uid)
    assert assets.lease_alive(atlas, uid, NOW)
    lease = assets.read_lease(atlas, uid)
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = json.loads(json.dumps({**(lease or {}), "pid": int(child.stdout)}))
    write_group_attributes(atlas.arrays, uid, {"raggedatlas": {"ingest": dead}})
    assert not assets.lease_alive(atlas, uid, HOUR)


@pytest.mark.parametrize("other", ["rename", "space"])
def test_of_two_changes_to_one_name_the_second_sees_the_first(two: Two, monkeypatch, other: str) -> None:  # noqa: ANN001
    """One that comes between the look and the commit makes the commit look again, and then refuse."""
    catalog, first, second = two
    again, done = catalog.tip(), []
    renames = lambda of, uid: maintenance.rename_dataset(of, uid, "z")  # noqa: E731
    wide = lambda of, rank: of.add_space(FeatureSpace(name="z", kind=PointerKind.DENSE, has_features=False, rank=rank))  # noqa: E731
    change, own, theirs = (renames, first, second) if other == "rename" else (wide, 1, 2)
    name = "merge" if other == "rename" else "update_metadata_if"
    plain = getattr(Tables, name)

    def between(self, *given, **more):  # noqa: ANN001, ANN002, ANN202
        if not done:
            done.append(True)
            change(again, theirs)
        return plain(self, *given, **more)

    monkeypatch.setattr(Tables, name, between)
    with pytest.raises((DuplicateError, SchemaError)):
        change(catalog, own)
    assert [record.name for record in read_records(catalog)].count("z") == (other == "rename")


def test_a_licence_is_noted_although_another_commit_comes_first(two: Two, monkeypatch) -> None:  # noqa: ANN001
    """A change that keeps the name of its dataset is not taken for one that was done before."""
    catalog, first, second = two
    again, done, plain = catalog.tip(), [], Tables.merge

    def between(self, *given, **more):  # noqa: ANN001, ANN002, ANN202
        if not done:
            done.append(True)
            maintenance.rename_dataset(again, second, "z")
        return plain(self, *given, **more)

    monkeypatch.setattr(Tables, "merge", between)
    maintenance.set_license(catalog, first, "CC0-1.0")
    found = {record.uid: (record.name, record.file_facts.license) for record in read_records(catalog)}
    assert found == {first: ("a", "CC0-1.0"), second: ("z", "")}


def test_a_space_is_registered_in_a_bounded_number_of_attempts(two: Two, monkeypatch) -> None:  # noqa: ANN001
    """Where other writers win every time, the call ends with an error that says so, and the space is not there."""
    catalog, _, _ = two
    monkeypatch.setattr(tables, "_ATTEMPTS", 3)
    monkeypatch.setattr(Tables, "update_metadata_if", lambda self, *given: False)
    with pytest.raises(ConflictError, match="tried 3 times"):
        catalog.add_space(FeatureSpace(name="z", kind=PointerKind.DENSE, has_features=False))
    monkeypatch.undo()
    assert "z" not in catalog.tip().spaces()


NAMES = ["", " a", "a ", "x/../y", "a/b", "a\\b", "a..b", "a\nb", "0123456789abcdef", "n" * 201]


@pytest.mark.parametrize("name", NAMES)
def test_one_rule_for_given_names(two: Two, name: str) -> None:
    """What no dataset may be called is refused for every kind of name, before anything is written."""
    catalog, first, _ = two
    before = catalog.tables.versions(catalog.tables.names())
    calls = (
        lambda: maintenance.rename_dataset(catalog, first, name),
        lambda: snapshots.snapshot(catalog, name),
        lambda: check_given_name(name, "name of a result"),
    )
    for call in calls:
        with pytest.raises(NameRefusedError):
            call()
    assert catalog.tables.versions(catalog.tables.names()) == before
    assert check_given_name(fit_name(name)[:200], "name")


def test_a_purge_that_fails_can_be_finished_by_another_process(two: Two, monkeypatch) -> None:  # noqa: ANN001
    """It takes its process out of its mark; a commit of a snapshot that was under way is waited for."""
    catalog, first, _ = two
    snapshots.snapshot(catalog)
    plain, left = purge._rewrite_all, [StoreError("full"), ConflictError("compacted")]

    def failing(*given):  # noqa: ANN002, ANN202
        if left:
            raise left.pop(0)
        return plain(*given)

    monkeypatch.setattr(purge, "_rewrite_all", failing)
    with pytest.raises(StoreError, match="full"):
        purge.purge(catalog, first)
    mark = catalog.tables.unfinished_purge()
    assert mark is not None
    assert not mark.owner
    with pytest.raises(ConflictError, match="purge"):
        snapshots.snapshot(catalog)
    maintenance.repair(catalog)
    assert not left
    assert catalog.tables.unfinished_purge() is None
    assert len(read_records(catalog)) == 1
