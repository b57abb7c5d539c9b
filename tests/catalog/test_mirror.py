"""Mirrors: `sync` copies what snapshots reach, only what differs, and the target never shows a part."""

import datetime as dt
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raggedatlas.catalog import assets, maintenance, mirror, purge, snapshots
from raggedatlas.catalog.catalog import Catalog, DatasetRecords, create_catalog, open_catalog
from raggedatlas.catalog.validation import validate
from raggedatlas.catalog.versions import list_versions
from raggedatlas.errors import ConflictError, CorruptError, NotFoundError, StoreError
from raggedatlas.ingest.csc import add_csc
from raggedatlas.model.arguments import no_progress
from raggedatlas.model.reports import MaintenanceReport
from raggedatlas.query.query import Query
from raggedatlas.store.location import Location
from raggedatlas.store.manifests import read_manifest
from raggedatlas.store.tables import Tables
from support.atlases import write_dataset

Two = tuple[Catalog, str, str]


def copy(catalog: Catalog, target: Location, *, dry_run: bool = False) -> MaintenanceReport:
    return mirror.sync(catalog, target, dry_run=dry_run, progress=no_progress)


def contents(catalog: Catalog) -> dict[int, tuple[Any, Any]]:
    """Return cells and values of every snapshot."""
    found = {}
    for record in list_versions(catalog):
        view = catalog.at(record)
        data = Query(view).to_anndata() if record.n_cells else None
        found[record.version] = (
            record.created_at,
            None if data is None else (data.obs_names.tolist(), data.X.toarray()),
        )
    return found


def assert_equal(catalog: Catalog, target: Location) -> None:
    ours, theirs = contents(catalog), contents(open_catalog(target))
    assert ours.keys() == theirs.keys()
    for number, (created, data) in ours.items():
        assert theirs[number][0] == created
        if data is not None:
            assert theirs[number][1][0] == data[0]
            np.testing.assert_array_equal(theirs[number][1][1], data[1])
    assert [p for p in validate(open_catalog(target), "deep") if p.level == "must"] == []


@pytest.mark.long
def test_a_mirror_has_the_snapshots_and_follows_them(two: Two, tmp_path: Path) -> None:
    """Through additions, column-sorted copies, drops of datasets and snapshots, and a purge; what is equal is not copied again."""
    catalog, first, second = two
    target = Location(tmp_path / "mirror")
    snapshots.snapshot(catalog, "one")
    planned = copy(catalog, target, dry_run=True)
    assert planned.dry_run
    assert sorted(planned.groups) == sorted([first, second])
    assert not target.exists()
    assert copy(catalog, target).n_bytes >= planned.n_bytes > 0
    assert_equal(catalog, target)
    again = copy(catalog, target)
    assert (again.groups, again.n_bytes) == ((), 0)

    third = write_dataset(catalog, "c", ["A", "D"], np.ones((4, 2), "u1"), {"kind": ["z"] * 4})
    add_csc(catalog, first, "gene_expression", None)
    assets.drop_dataset(catalog, second)
    snapshots.snapshot(catalog)
    assert sorted(copy(catalog, target).groups) == sorted([first, third])
    assert_equal(catalog, target)

    snapshots.drop_snapshot(catalog, 1)
    maintenance.gc(catalog, dry_run=False, grace=dt.timedelta(0))
    copy(catalog, target)
    assert_equal(catalog, target)
    maintenance.gc(open_catalog(target), dry_run=False, grace=dt.timedelta(0))
    assert not (target.path / "zarr_store" / second).exists()

    purge.purge(catalog, third)
    copy(catalog, target)
    assert_equal(catalog, target)


@pytest.fixture
def grown(two: Two, tmp_path: Path) -> tuple[Catalog, Location]:
    """An atlas with a snapshot, its mirror, and a second snapshot that the mirror lacks."""
    catalog, target = two[0], Location(tmp_path / "mirror")
    snapshots.snapshot(catalog)
    copy(catalog, target)
    write_dataset(catalog, "c", ["A", "D"], np.ones((4, 2), "u1"), {"kind": ["z"] * 4})
    snapshots.snapshot(catalog)
    return catalog, target


def test_the_records_of_each_snapshot_are_read_once(
    grown: tuple[Catalog, Location], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are most of what a call reads that has nothing to copy."""
    catalog, target = grown
    reads, original = list[str](), DatasetRecords.updated

    def updated(self: DatasetRecords, tables: Tables, version: int) -> DatasetRecords:
        reads.append(tables.location.uri)
        return original(self, tables, version)

    monkeypatch.setattr(DatasetRecords, "updated", updated)
    copy(catalog, target)
    assert reads.count(catalog.tables.location.uri) == 2
    assert reads.count(open_catalog(target).tables.location.uri) == 1


class DiedError(BaseException):
    """Stands for the end of the process."""


@pytest.mark.long
def test_a_call_that_dies_shows_the_mirror_as_it_was(
    grown: tuple[Catalog, Location], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any of the files: the snapshots of the mirror are those of before, sound, and the next call completes it."""
    catalog, target = grown
    total = int(copy(catalog, target, dry_run=True).notes[0].split("; ")[1].split()[0])
    original = mirror.write_blocks
    for n in sorted({0, 1, total // 3, total // 2, *range(total - 4, total)}):
        place = Location(tmp_path / f"copy{n}")
        shutil.copytree(target.path, place.path)
        done: list[str] = []

        def dying(*words: Any, done: list[str] = done, n: int = n) -> int:
            if len(done) == n:
                raise DiedError
            done.append(words[2])
            return original(*words)

        monkeypatch.setattr(mirror, "write_blocks", dying)
        with pytest.raises(DiedError):
            copy(catalog, place)
        monkeypatch.setattr(mirror, "write_blocks", original)
        there = open_catalog(place)
        assert [record.version for record in list_versions(there)] == [1], n
        assert [p for p in validate(there, "deep") if p.level == "must"] == [], n
        copy(catalog, place)
        assert_equal(catalog, place)


_LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
from raggedatlas.cli import main
sys.argv = ["raggedatlas", "sync", *sys.argv[1:3]]
main()
"""


@pytest.mark.long
@pytest.mark.parametrize("n_bytes", [100, 1000, 3000])
def test_a_process_that_cannot_write_more_ends_with_one_line(grown: tuple[Catalog, Location], n_bytes: int) -> None:
    """The system refuses files beyond a size: the mirror is as it was, nothing is left over, and the next call completes it."""
    catalog, target = grown
    words = [sys.executable, "-c", _LIMITED, catalog.location.uri, target.uri, str(n_bytes)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    (said,) = (line for line in ended.stderr.splitlines() if not line.startswith("sync: "))
    assert ended.returncode == 1
    assert re.match(rf"raggedatlas: Could not write {re.escape(target.uri)}/\S+: File too large", said)
    assert list(target.path.rglob("*.tmp")) == []
    there = open_catalog(target)
    assert [record.version for record in list_versions(there)] == [1]
    assert [p for p in validate(there, "deep") if p.level == "must"] == []
    copy(catalog, target)
    assert_equal(catalog, target)


def test_what_a_killed_process_left_is_no_damage_and_goes(
    grown: tuple[Catalog, Location], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a file lies apart from the files of stores; a later call removes it, once no other call can be writing it."""
    catalog, target = grown
    with monkeypatch.context() as patch:
        # A killed process does not come to its `finally`.
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(DiedError))
        with pytest.raises(DiedError):
            copy(catalog, target)
    (left,) = target.path.rglob("*.tmp")
    assert left.parent == target.path / mirror.PARTIAL
    copy(catalog, target)
    assert left.exists()
    long_ago = time.time() - 2 * assets.GRACE.total_seconds()
    os.utime(left, (long_ago, long_ago))
    copy(catalog, target)
    assert not left.parent.exists()
    assert_equal(catalog, target)


def test_a_snapshot_that_is_dropped_meanwhile(two: Two, tmp_path: Path) -> None:
    """The call says so, and the same call then copies the others."""
    catalog, target = two[0], Location(tmp_path / "mirror")
    snapshots.snapshot(catalog)
    write_dataset(catalog, "c", ["A"], np.ones((4, 1), "u1"), {"kind": ["z"] * 4})
    snapshots.snapshot(catalog)

    def drop(step: str, done: int, total: int) -> None:
        if step == "arrays" and done == total:
            snapshots.drop_snapshot(catalog, 1)

    with pytest.raises(ConflictError, match=r"Another process dropped the snapshots \[1\]"):
        mirror.sync(catalog, target, dry_run=False, progress=drop)
    copy(catalog, target)
    assert_equal(catalog, target)


@pytest.mark.parametrize("when", [0, 1])
def test_a_dataset_that_is_purged_meanwhile(two: Two, tmp_path: Path, when: int) -> None:
    """The call says so, before or after the arrays were copied, and the same call then copies what is left."""
    catalog, target = two[0], Location(tmp_path / "mirror")
    snapshots.snapshot(catalog)

    def take(step: str, done: int, total: int) -> None:
        if step == "arrays" and done == when * total:
            purge.purge(catalog, two[1])

    with pytest.raises(ConflictError, match=r"snapshots \[1\] of .*, or purged datasets from them"):
        mirror.sync(catalog, target, dry_run=False, progress=take)
    copy(catalog, target)
    assert_equal(catalog, target)


@pytest.mark.long
def test_a_damaged_file_is_not_copied(grown: tuple[Catalog, Location]) -> None:
    """A table file with another SHA-256 than recorded is refused by name, and the mirror stays as it was."""
    catalog, target = grown
    held = read_manifest(catalog.tables.location, list_versions(catalog)[0].manifest)
    key = next(
        k
        for k in read_manifest(catalog.tables.location, list_versions(catalog)[1].manifest)
        if "/data/" in k and k not in held
    )
    file = catalog.tables.location.path / key
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=key.rsplit("/", 1)[1]):
        copy(catalog, target)
    assert [record.version for record in list_versions(open_catalog(target))] == [1]


@pytest.mark.long
def test_damaged_shards_are_not_copied(grown: tuple[Catalog, Location]) -> None:
    """The mirror stays as it was, with nothing of the array, so that the next call copies the one that was put back."""
    catalog, target = grown
    (record,) = [record for record in assets.read_records(catalog) if record.name == "c"]
    key = f"{record.zarr_group}/csr/layers/counts/c/0"
    good = catalog.arrays.read_bytes(key)
    catalog.arrays.write_bytes(key, bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(CorruptError, match="csr/layers/counts/c do not have the SHA-256"):
        copy(catalog, target)
    assert [record.version for record in list_versions(open_catalog(target))] == [1]
    assert not target.child("zarr_store").child(*key.split("/")).exists()
    catalog.arrays.write_bytes(key, good)
    copy(catalog, target)
    assert_equal(catalog, target)


def _no_snapshot(catalog: Catalog, target: Location) -> Location:
    for record in list_versions(catalog):
        snapshots.untag_everywhere(catalog, record.tag, list(record.table_versions))
    shutil.rmtree(catalog.tables.location.path / "atlas_versions.lance")
    fresh = Location(target.uri + "2")
    create_catalog(fresh)
    shutil.copytree(
        fresh.child("lance_db", "atlas_versions.lance").path, catalog.tables.location.path / "atlas_versions.lance"
    )
    return target


def _within(catalog: Catalog, target: Location) -> Location:
    return catalog.location.child("mirror")


def _another_atlas(catalog: Catalog, target: Location) -> Location:
    other = create_catalog(Location(target.uri + "2"))
    write_dataset(other, "a", ["A"], np.ones((2, 1), "u1"), {"kind": ["x"] * 2})
    snapshots.snapshot(other)
    return other.location


def _no_snapshot_in_common(catalog: Catalog, target: Location) -> Location:
    snapshots.drop_snapshot(catalog, 1)
    return target


def _written_to(catalog: Catalog, target: Location) -> Location:
    write_dataset(open_catalog(target), "d", ["A"], np.ones((2, 1), "u1"), {"kind": ["x"] * 2})
    return target


@pytest.mark.long
@pytest.mark.parametrize(
    ("prepare", "error", "message"),
    [
        (_no_snapshot, NotFoundError, "has no snapshot to copy"),
        (_within, StoreError, "one is within the other"),
        (_another_atlas, StoreError, "is no mirror of it"),
        (_no_snapshot_in_common, StoreError, "no snapshot in common"),
        (_written_to, StoreError, "was written to"),
    ],
)
def test_what_is_no_mirror_is_refused(
    grown: tuple[Catalog, Location],
    prepare: Callable[[Catalog, Location], Location],
    error: type[Exception],
    message: str,
) -> None:
    """Before anything is written."""
    catalog, target = grown
    place = prepare(catalog, target)
    before = {file: file.stat().st_mtime_ns for file in place.path.rglob("*")} if place.exists() else {}
    with pytest.raises(error, match=message):
        copy(catalog, place)
    assert {file: file.stat().st_mtime_ns for file in place.path.rglob("*")} == before
