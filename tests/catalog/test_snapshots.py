"""Snapshots: durable, numbered without gaps in meaning, consistent, restorable."""

import contextlib
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from raggedatlas.catalog import assets, maintenance, optimization, purge, snapshots, validation, versions
from raggedatlas.catalog.assets import drop_dataset, find_dataset, group_by_dataset, read_records
from raggedatlas.catalog.catalog import CELLS, DATASETS, VERSIONS, Catalog, open_catalog
from raggedatlas.catalog.maintenance import rename_dataset
from raggedatlas.catalog.validation import validate
from raggedatlas.catalog.versions import find_version, list_versions
from raggedatlas.errors import (
    ArgumentError,
    ConflictError,
    CorruptError,
    DuplicateError,
    NameRefusedError,
    NotFoundError,
    ReadOnlyError,
    SchemaError,
)
from raggedatlas.model.records import PurgeMark
from raggedatlas.model.schemas import HoxBaseSchema
from raggedatlas.model.spaces import SparseZarrPointer
from raggedatlas.store.location import Location
from raggedatlas.store.tables import Tables
from support.atlases import write_dataset

Dying = Callable[[int], contextlib.AbstractContextManager[list[str]]]
Two = tuple[Catalog, str, str]
MATRIX = np.array([[1, 0], [0, 2], [3, 4]], dtype="u1")


def uids(catalog: Catalog) -> list[str]:
    return [record.uid for record in read_records(catalog)]


def test_a_snapshot_holds_what_was_there_and_nothing_later(two: Two) -> None:
    """A snapshot reads equal after later adds and drops, and refuses writes."""
    catalog, first, second = two
    record = snapshots.snapshot(catalog, "paper")
    view = catalog.at(record)
    cells = view.tables.read(CELLS)
    write_dataset(catalog, "c", ["E"], np.ones((3, 1), "u1"), {"new": [1, 2, 3]})
    assets.drop_dataset(catalog, first)
    again = catalog.at(snapshots.find_version(catalog, "paper"))
    assert uids(again) == [first, second]
    assert again.tables.read(CELLS).equals(cells)
    assert (record.version, record.n_cells, record.n_datasets, record.ignored) == (1, 50, 2, [])
    with pytest.raises(ReadOnlyError):
        snapshots.snapshot(view)


def test_another_thread_may_remove_what_is_looked_up(two: Two) -> None:
    """Whether an object is in the cache and what it is are one look-up; the cache keeps the last three of a kind."""
    catalog, *_ = two
    view = catalog.at(snapshots.snapshot(catalog))

    class Removed(str):
        """A key that another thread removes between two look-ups."""

        __slots__ = ()
        n_hashed = 0

        def __hash__(self) -> int:
            Removed.n_hashed += 1
            if Removed.n_hashed == 2:
                view._memo["kind"].clear()
            return str.__hash__(self)

    for name in "abcd":
        assert view.remember("kind", name, partial(list, name)) == [name]
    assert list(view._memo["kind"]) == ["b", "c", "d"]
    assert view.remember("kind", Removed("d"), lambda: ["new"]) == ["d"]


@pytest.mark.long
def test_an_old_snapshot_survives_optimize_and_every_clean_up(two: Two) -> None:
    """Clean-up of all versions that nobody names leaves every snapshot as it was, however old."""
    catalog, first, _ = two
    records = [snapshots.snapshot(catalog)]
    before = {1: catalog.at(records[0]).tables.read(CELLS)}
    for i in range(3):
        write_dataset(catalog, f"more{i}", ["A", f"G{i}"], MATRIX)
        records.append(snapshots.snapshot(catalog))
        before[i + 2] = catalog.at(records[-1]).tables.read(CELLS)
    assets.drop_dataset(catalog, first)
    optimization.optimize(catalog)
    maintenance.gc(catalog, dry_run=False, keep=timedelta(0))
    for record in snapshots.list_versions(catalog):
        view = catalog.at(record)
        assert view.tables.read(CELLS).equals(before[record.version])
        assert not validation.validate(view, "deep")


@pytest.mark.long
def test_numbers_rise_by_one_even_when_nothing_changed(two: Two) -> None:
    """Every snapshot is recorded, with the next number and its tag on every table."""
    catalog = two[0]
    records = [snapshots.snapshot(catalog) for _ in range(3)]
    assert [record.version for record in snapshots.list_versions(catalog)] == [1, 2, 3]
    assert records[1].table_versions == records[2].table_versions
    for record in records:
        for table, version in record.table_versions.items():
            assert catalog.tables.tags(table)[record.tag] == version
    assert not [tag for table in records[0].table_versions for tag in catalog.tables.tags(table) if "pending" in tag]


@pytest.mark.parametrize("version", [-1, 2**63, 2**70, 1.5, None])
def test_a_table_version_that_lance_cannot_have_is_refused(two: Two, version: object) -> None:
    """A snapshot, or an unfinished purge, that names such a version is `CorruptError`; Lance takes 64 bits (OverflowError)."""
    catalog = two[0]
    snapshots.snapshot(catalog)
    rows = catalog.tables.read(VERSIONS)
    text = json.dumps({CELLS: version})
    other = rows.set_column(rows.column_names.index("table_versions"), "table_versions", pa.array([text]))
    assert catalog.tables.overwrite_if(VERSIONS, other, catalog.tables.version(VERSIONS))
    with pytest.raises(
        CorruptError, match=r"Table 'atlas_versions', row '1': the field 'table_versions\.cells' is damaged"
    ):
        snapshots.list_versions(catalog)
    with pytest.raises(CorruptError, match="Table 'atlas_versions'"):
        PurgeMark.from_json(json.dumps({"uid": "a", "stage": "rewriting", "tables": {CELLS: version}}))


def test_labels_are_words_and_unique(two: Two) -> None:
    """A label is found, given once, and never taken for a number; what is missing is listed."""
    catalog = two[0]
    with pytest.raises(NotFoundError, match="no snapshots yet"):
        snapshots.find_version(catalog)
    snapshots.snapshot(catalog, "draft")
    with pytest.raises(DuplicateError, match="draft"):
        snapshots.snapshot(catalog, "draft")
    for label in ("", " ", "7"):
        with pytest.raises(NameRefusedError):
            snapshots.snapshot(catalog, label)
    assert (
        snapshots.find_version(catalog, "1")
        == snapshots.find_version(catalog, "draft")
        == snapshots.find_version(catalog)
    )
    with pytest.raises(NotFoundError, match=r"1 \(draft\)"):
        snapshots.find_version(catalog, 2)


def test_an_add_under_way_is_left_out(two: Two) -> None:
    """Cells without a record are named as ignored, counted nowhere, and visible once their record is there."""
    catalog = two[0]
    uid = write_dataset(catalog, "half", ["A"], np.ones((4, 1), "u1"), last="cells")
    record = snapshots.snapshot(catalog)
    assert (record.n_cells, record.n_datasets, record.ignored) == (50, 2, [uid])
    assert {p.rule for p in validation.validate(catalog, "rows")} == {"uncommitted-cells"}


def test_what_is_not_sound_is_not_recorded(two: Two) -> None:
    """A snapshot of a damaged atlas is refused with the problem named, and leaves no tag."""
    catalog, first, _ = two
    catalog.arrays.child(first, "gene_expression", "csr", "indices").delete_prefix()
    with pytest.raises(CorruptError, match="missing-array"):
        snapshots.snapshot(catalog)
    assert snapshots.list_versions(catalog) == []
    assert not catalog.tables.tags(CELLS)


@pytest.mark.nightly
def test_death_before_any_write_leaves_a_sound_atlas(two: Two, dying: Dying) -> None:
    """Wherever a snapshot dies, what is recorded is tagged, the rest leaves no trace after gc, and the next one works."""
    catalog = two[0]
    n, finished = 0, False
    while not finished:
        with dying(n) as done:
            snapshots.snapshot(catalog)
            finished = True
        for record in snapshots.list_versions(catalog):
            for table, version in record.table_versions.items():
                assert version in catalog.tables.tags(table).values(), (n, done)
        n += 1
    maintenance.gc(catalog, dry_run=False, grace=timedelta(0), keep=timedelta(0))
    records = snapshots.list_versions(catalog)
    assert [record.version for record in records] == list(range(1, len(records) + 1))
    assert len(records) > 1
    for record in records:
        assert not validation.validate(catalog.at(record), "rows")
        assert catalog.tables.tags(CELLS)[record.tag] == record.table_versions[CELLS]
    assert set(catalog.tables.tags(CELLS)) == {record.tag for record in records}


def test_a_commit_that_seemed_to_fail_is_recorded_once(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the acknowledgement of the recording commit is lost, there is exactly one record."""
    catalog = two[0]
    original = Tables.overwrite_if
    lost: list[bool] = []

    def forgetful(self: Tables, *args: object) -> bool:
        done = original(self, *args)  # type: ignore[arg-type]
        if done and not lost:
            lost.append(True)
            return False
        return done

    monkeypatch.setattr(Tables, "overwrite_if", forgetful)
    record = snapshots.snapshot(catalog, "once")
    assert lost
    assert snapshots.list_versions(catalog) == [record]


def test_a_dataset_dropped_while_versions_are_chosen_is_not_half_there(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drop between the reading of the inventory and of the cells leads to another choice."""
    catalog, first, second = two
    original = versions.registry_tables
    calls = []

    def slow(view: Catalog) -> dict[str, str]:
        calls.append(view)
        if len(calls) == 2:
            assets.drop_dataset(catalog, first)
        return original(view)

    monkeypatch.setattr(versions, "registry_tables", slow)
    record = snapshots.snapshot(catalog)
    assert len(calls) > 3
    assert uids(catalog.at(record)) == [second]
    assert not validation.validate(catalog.at(record), "rows")


def test_restore_brings_back_and_keeps_the_rest(two: Two) -> None:
    """Restoring gives the snapshot's cells and datasets in their order, keeps spaces, indices and later snapshots."""
    catalog, first, second = two
    one = snapshots.snapshot(catalog)
    cells = catalog.at(one).tables.read(CELLS)
    index = catalog.tables.read("gene_expression_registry", ["uid", "global_index"])
    assets.drop_dataset(catalog, first)
    third = write_dataset(catalog, "c", ["A", "Z"], MATRIX, {"extra": [1, 2, 3]})
    later = snapshots.snapshot(catalog)
    spaces = catalog.spaces()
    snapshots.restore(catalog, 1)
    assert uids(catalog) == [first, second]
    assert catalog.tables.read(CELLS).equals(cells)
    assert catalog.spaces() == spaces
    assert not validation.validate(catalog, "deep")
    kept = catalog.tables.read("gene_expression_registry", ["uid", "global_index"])
    assert kept.slice(0, index.num_rows).equals(index)
    assert uids(catalog.at(later)) == [second, third]
    snapshots.restore(catalog, later.version)
    assert uids(catalog) == [second, third]
    assert snapshots.snapshot(catalog).n_cells == 23


@pytest.mark.long
def test_death_in_a_restore_leaves_a_complete_atlas(two: Two, dying: Dying) -> None:
    """Wherever a restore dies, no dataset is half there, and running it again finishes it."""
    catalog, first, second = two
    snapshots.snapshot(catalog)
    n, finished = 0, False
    while not finished:
        for uid in uids(catalog):
            assets.drop_dataset(catalog, uid)
        third = write_dataset(catalog, "c", ["A", "Z"], MATRIX)
        with dying(n):
            snapshots.restore(catalog, 1)
            finished = True
        assert not [p for p in validation.validate(catalog, "rows") if p.level == "must"], n
        snapshots.restore(catalog, 1)
        assert uids(catalog) == [first, second]
        assert third not in catalog.tables.read(CELLS, ["dataset_uid"]).column(0).to_pylist()
        n += 1
    assert n > 2


def test_restore_waits_for_adds(two: Two) -> None:
    """A restore is refused while an add is under way, whose cells it would lose."""
    catalog = two[0]
    snapshots.snapshot(catalog)
    write_dataset(catalog, "half", ["A"], np.ones((4, 1), "u1"), last="arrays")
    with pytest.raises(ConflictError, match="under way"):
        snapshots.restore(catalog, 1)


@pytest.mark.long
def test_a_forgotten_snapshot_is_gone_and_its_number_stays_taken(two: Two) -> None:
    """Forgetting the newest or an older snapshot removes row and tags; numbers are never given twice."""
    catalog = two[0]
    for _ in range(3):
        snapshots.snapshot(catalog)
    snapshots.drop_snapshot(catalog, 3)
    snapshots.drop_snapshot(catalog, 1)
    assert [record.version for record in snapshots.list_versions(catalog)] == [2]
    assert set(catalog.tables.tags(CELLS)) == {"atlas-v2"}
    assert snapshots.snapshot(catalog).version == 4
    for number in (2, 4):
        snapshots.drop_snapshot(catalog, number)
    assert snapshots.list_versions(catalog) == []
    assert snapshots.snapshot(catalog).version == 5
    with pytest.raises(NotFoundError):
        snapshots.drop_snapshot(catalog, 3)


def test_a_snapshot_is_dropped_by_label_and_its_bytes_are_freed(two: Two) -> None:
    """The report names it, and `gc` frees the arrays of a dataset that only this snapshot had."""
    catalog = two[0]
    snapshots.snapshot(catalog, "both")
    uid = read_records(catalog)[0].uid
    drop_dataset(catalog, uid)
    snapshots.snapshot(catalog, "one")
    assert maintenance.gc(catalog, dry_run=False).groups == ()
    assert any("1 (both)" in note for note in snapshots.drop_snapshot(catalog, "both").notes)
    n_bytes = catalog.arrays.child(uid).size()
    freed = maintenance.gc(catalog, dry_run=False, keep=timedelta(0))
    assert freed.groups == (uid,)
    assert freed.n_bytes >= n_bytes > 0
    assert not catalog.arrays.child(uid).exists()
    assert validate(catalog, "deep") == []


@pytest.mark.long
def test_a_drop_that_dies_before_any_write_has_dropped_one_snapshot_or_none(two: Two, dying: Dying) -> None:
    """The others are sound after each death, a second call finishes it, and gc leaves no tag of what was dropped."""
    catalog = two[0]
    n, finished = 0, False
    while not finished:
        before = [record.version for record in (snapshots.snapshot(catalog), *list_versions(catalog))][1:]
        with dying(n):
            snapshots.drop_snapshot(catalog, before[0])
            finished = True
        left = [record.version for record in list_versions(catalog)]
        assert left in (before, before[1:]), n
        assert not [p for p in validation.validate(catalog, "deep") if p.level == "must"], n
        if left == before:
            snapshots.drop_snapshot(catalog, before[0])
        maintenance.gc(catalog, dry_run=False)
        assert set(catalog.tables.tags(CELLS)) == {record.tag for record in list_versions(catalog)}, n
        n += 1
    assert n > 2


@pytest.mark.long
def test_old_snapshots_expire(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots go if every given condition says so; labels are kept unless asked, and the newest always is."""
    catalog = two[0]
    for label in ("submitted", None, None, None):
        snapshots.snapshot(catalog, label)
    later = datetime.now(UTC) + timedelta(days=10)

    def numbers(**conditions: Any) -> list[int]:
        report = snapshots.expire_snapshots(catalog, dry_run=True, **conditions)
        assert report.dry_run
        return [int(note.split()[1]) for note in report.notes if note.startswith("snapshot")]

    assert numbers(keep_last=2) == [2]
    assert numbers(keep_last=2, keep_labels=False) == [1, 2]
    assert numbers(keep_last=0, keep_labels=False) == [1, 2, 3]
    assert [numbers(keep_last=n, keep_labels=False) for n in (3, 4, 5, 7, 100)] == [[1], [], [], [], []]
    assert numbers(older_than=timedelta(days=1)) == []
    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "datetime", Mock(now=lambda _: later, fromisoformat=datetime.fromisoformat))
        assert numbers(older_than=timedelta(days=1)) == [2, 3]
        assert numbers(older_than=timedelta(days=1), keep_last=2) == [2]
        assert numbers(older_than=timedelta(days=11)) == []
    snapshots.expire_snapshots(catalog, keep_last=1)
    assert [record.version for record in list_versions(catalog)] == [1, 4]
    assert set(catalog.tables.tags(CELLS)) == {"atlas-v1", "atlas-v4"}
    for wrong in ({}, {"keep_last": -1}, {"older_than": timedelta(days=-1)}):
        with pytest.raises(ArgumentError, match="expire_snapshots"):
            snapshots.expire_snapshots(catalog, **wrong)  # type: ignore[arg-type]


def test_a_dataset_is_renamed_at_the_tip(two: Two) -> None:
    """All groups of the dataset get the name; snapshots keep the old one; a taken, empty or unknown name changes nothing."""
    catalog = two[0]
    first, second = group_by_dataset(read_records(catalog)).values()
    number = snapshots.snapshot(catalog).version
    rename_dataset(catalog, first[0].name, "another")
    assert {record.name for record in find_dataset(catalog, first[0].uid)} == {"another"}
    assert [records[0].uid for records in group_by_dataset(read_records(catalog)).values()] == [
        first[0].uid,
        second[0].uid,
    ]
    pinned = catalog.at(find_version(catalog, number))
    assert find_dataset(pinned, first[0].uid)[0].name == first[0].name
    version = catalog.tables.version(DATASETS)
    for old, new, error in (
        ("another", second[0].name, DuplicateError),
        ("another", " ", NameRefusedError),
        ("nothing", "x", NotFoundError),
    ):
        with pytest.raises(error):
            rename_dataset(catalog, old, new)
    with pytest.raises(ReadOnlyError):
        rename_dataset(pinned, "another", "x")
    assert catalog.tables.version(DATASETS) == version
    assert validate(catalog, "deep") == []


def test_diff_counts_what_changed(two: Two) -> None:
    """Datasets, cells, columns and features that came, went or changed are told apart."""
    import pyarrow as pa

    from raggedatlas.catalog.layouts import register_features
    from raggedatlas.model.ids import feature_uids

    catalog, first, second = two
    snapshots.snapshot(catalog)
    assets.drop_dataset(catalog, first)
    rows = catalog.tables.read(CELLS).slice(0, 4)
    at = rows.column_names.index("kind")
    changed = rows.set_column(at, rows.schema.field(at), pa.array(["z", "y", "z", None]))
    catalog.tables.merge(CELLS, ["uid"], changed, update=True)
    third = write_dataset(catalog, "c", ["B", "E"], MATRIX, {"extra": [1, 2, 3]})
    [uid] = feature_uids("gene_expression", ["D"], "human")
    register_features(catalog, "gene_expression", pa.table({"uid": [uid], "symbol": ["D2"]}))
    snapshots.snapshot(catalog)
    found = snapshots.diff(catalog, 1, 2)
    assert found.datasets_added == (f"c ({third})",)
    assert found.datasets_removed == (f"a ({first})",)
    assert (found.cells_added, found.cells_removed, found.cells_changed) == (3, 30, 3)
    assert found.features_added == {"gene_expression": ("E",)}
    assert found.features_removed == {}
    assert found.features_changed == {"gene_expression": ("D2",)}
    assert (found.columns_added, found.columns_removed) == (("extra",), ())
    back = snapshots.diff(catalog, 2, 1)
    assert (back.cells_added, back.cells_removed, back.cells_changed) == (30, 3, 3)
    assert back.features_removed == {"gene_expression": ("E",)}
    same = snapshots.diff(catalog, 2, 2)
    assert (same.cells_added, same.cells_removed, same.cells_changed, same.features_changed) == (0, 0, 0, {})
    assert second in uids(catalog)


def test_the_newest_snapshot_opens_by_address(two: Two) -> None:
    """``open_latest`` needs the address alone; a schema is compared with the columns there are."""

    class Fits(HoxBaseSchema):
        kind: str | None = None
        gene_expression: SparseZarrPointer | None = None

    class Other(HoxBaseSchema):
        kind: int | None = None
        gene_expression: SparseZarrPointer | None = None

    catalog = two[0]
    with pytest.raises(NotFoundError, match="no snapshots yet"):
        snapshots.open_latest(catalog.location)
    for _ in range(2):
        record = snapshots.snapshot(catalog)
    view = snapshots.open_latest(catalog.location, schema=Fits, arrays=Location(catalog.arrays.uri))
    assert view.snapshot == record
    with pytest.raises(SchemaError, match="kind"):
        snapshots.open_latest(catalog.location, schema=Other)
    with pytest.raises(NotFoundError):
        snapshots.open_latest(Location(f"{catalog.location.uri}-nowhere"))


def test_two_records_of_one_group_are_found(two: Two) -> None:
    """A record that was appended twice stops the next snapshot."""
    catalog = two[0]
    catalog.tables.append(DATASETS, catalog.tables.read(DATASETS).slice(0, 1))
    with pytest.raises(CorruptError, match="duplicate-record"):
        snapshots.snapshot(catalog)


def test_forgetting_and_restoring_need_the_tip(two: Two) -> None:
    """Every write is refused on a pinned catalog; the message begins with the name of the call."""
    catalog = two[0]
    view = catalog.at(snapshots.snapshot(catalog))
    for action in (
        lambda: snapshots.snapshot(view),
        lambda: snapshots.restore(view, 1),
        lambda: snapshots.drop_snapshot(view, 1),
        lambda: optimization.optimize(view),
        lambda: optimization.reindex(view),
        lambda: assets.drop_dataset(view, "a"),
        lambda: maintenance.gc(view),
        lambda: maintenance.repair(view),
    ):
        with pytest.raises(ReadOnlyError, match=r"^\w+\(\) cannot be done on snapshot 1 "):
            action()
    assert catalog.tables.count(VERSIONS) == 1
    assert catalog.tables.count(DATASETS) == 2


@pytest.mark.parametrize("write", ["overwrite_if", "tag"])
@pytest.mark.parametrize("at_tip", [True, False])
def test_a_whole_purge_during_a_snapshot_loses_nothing(
    two: Two, monkeypatch: pytest.MonkeyPatch, write: str, at_tip: bool
) -> None:
    """A purge that begins and ends before the tags or the record are written deletes versions that the snapshot is based on: it is taken again."""
    catalog, first, second = two
    snapshots.snapshot(catalog)
    if not at_tip:
        drop_dataset(catalog, first)
    write_dataset(catalog, "c", ["A", "ZZ"], np.ones((3, 2), "u1"))
    usual, done = getattr(Tables, write), []

    def late(self: Tables, name: str, *args: Any, **given: Any) -> Any:
        if not done and (write == "tag" or name == VERSIONS):
            done.append(True)
            purge.purge(open_catalog(catalog.location), first)
        return usual(self, name, *args, **given)

    taker = open_catalog(catalog.location)
    monkeypatch.setattr(Tables, write, late)
    record = snapshots.snapshot(taker)
    monkeypatch.undo()
    assert done == [True]
    assert record in list_versions(catalog)
    assert uids(catalog.at(record)) == uids(catalog.tip())
    assert first not in uids(catalog.tip())
    assert second in uids(catalog.tip())
    assert validate(catalog.tip(), "deep") == []


def test_a_whole_purge_during_a_drop_loses_nothing(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit of the drop is based on a version that the purge of another dataset deletes: it is made again."""
    catalog, first, second = two
    snapshots.snapshot(catalog)
    write_dataset(catalog, "c", ["A", "ZZ"], np.ones((3, 2), "u1"))
    usual, done = Tables.overwrite_if, []

    def late(self: Tables, name: str, *args: Any, **given: Any) -> Any:
        if not done and name == DATASETS:
            done.append(True)
            purge.purge(open_catalog(catalog.location), first)
        return usual(self, name, *args, **given)

    dropper = open_catalog(catalog.location)
    monkeypatch.setattr(Tables, "overwrite_if", late)
    drop_dataset(dropper, second)
    monkeypatch.undo()
    assert done == [True]
    assert [record.name for record in read_records(catalog.tip())] == ["c"]
    assert validate(catalog.tip(), "deep") == []
