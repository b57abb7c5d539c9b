"""Manifests: every table file that a snapshot reaches has a recorded hash, and validation compares all of them."""

import contextlib
import datetime as dt
from collections.abc import Callable

import numpy as np
import pytest

from raggedatlas.catalog import assets, integrity, maintenance, purge, snapshots
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.validation import validate
from raggedatlas.catalog.versions import HEAD, list_versions
from raggedatlas.errors import CorruptError
from raggedatlas.model.validation import Problem
from raggedatlas.store.manifests import FOLDER, read_manifest
from support.atlases import write_dataset

Two = tuple[Catalog, str, str]


def found(catalog: Catalog) -> list[Problem]:
    return [problem for problem in validate(catalog, "deep") if problem.level == "must"]


def test_a_missing_or_cut_file_is_named(two: Two) -> None:
    """The problem names the file below ``lance_db``."""
    catalog = two[0]
    record = snapshots.snapshot(catalog)
    named = next(
        p for p in read_manifest(catalog.tables.location, record.manifest) if p.startswith("cells.lance/data/")
    )
    file = catalog.tables.location.path / named
    before = file.read_bytes()
    file.write_bytes(before[:-1])
    assert ("table-file", named) in {(p.rule, p.path) for p in found(catalog.at(record))}
    file.unlink()
    assert ("table-file", named) in {(p.rule, p.path) for p in found(catalog)}


@pytest.mark.long
def test_a_snapshot_hashes_only_files_that_no_earlier_one_reaches(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing changed no table file is read again."""
    catalog = two[0]
    snapshots.snapshot(catalog)
    read: list[str] = []
    digest = integrity.digest_file
    monkeypatch.setattr(integrity, "digest_file", lambda place, key: read.append(key) or digest(place, key))
    record = snapshots.snapshot(catalog)
    assert {path for path in read if not path.startswith("atlas_versions") and "/_refs/" not in path} == set()
    assert record.manifest == list_versions(catalog)[0].manifest
    write_dataset(catalog, "c", ["A"], np.ones((5, 1), "u1"), {"kind": ["z"] * 5})
    read.clear()
    snapshots.snapshot(catalog)
    assert any(path.startswith("cells.lance/data") for path in read)


@pytest.mark.long
@pytest.mark.parametrize("n", range(0, 24, 5))
def test_a_snapshot_whose_process_dies_leaves_files_that_agree(
    two: Two, dying: Callable[[int], contextlib.AbstractContextManager[list[str]]], n: int
) -> None:
    """Wherever it dies, what is recorded agrees with the files; another snapshot leaves nothing unverified."""
    catalog = two[0]
    snapshots.snapshot(catalog)
    write_dataset(catalog, "c", ["A"], np.ones((5, 1), "u1"), {"kind": ["z"] * 5})
    with dying(n):
        snapshots.snapshot(catalog)
    assert found(catalog) == []
    maintenance.repair(catalog)
    assert not any(problem.rule == "unverified-files" for problem in validate(catalog, "deep"))
    snapshots.snapshot(catalog)
    assert validate(catalog, "deep") == []


@pytest.mark.nightly
def test_upkeep_keeps_what_is_recorded(two: Two) -> None:
    """After forgetting, purging, restoring, clean-up and repair every remaining snapshot agrees with its files, and none is unverified."""
    catalog, first, second = two
    for _ in range(3):
        snapshots.snapshot(catalog)
    everything = dt.timedelta(0)
    steps: list[Callable[[], object]] = [
        lambda: snapshots.drop_snapshot(catalog, 2),
        lambda: maintenance.gc(catalog, dry_run=False, grace=everything, keep=everything),
        lambda: assets.drop_dataset(catalog, second),
        lambda: snapshots.snapshot(catalog),
        lambda: purge.purge(catalog, first),
        lambda: snapshots.restore(catalog, 1),
        lambda: maintenance.repair(catalog),
        lambda: snapshots.snapshot(catalog),
    ]
    for step in steps:
        step()
        assert [p for p in validate(catalog, "deep") if p.rule != "unassigned-index"] == []
        assert all(validate(catalog.at(record), "deep") == [] for record in list_versions(catalog))


@pytest.mark.long
def test_clean_up_removes_manifests_that_no_snapshot_names(two: Two) -> None:
    """What a forgotten or never recorded snapshot left goes; what is named stays, and so does what was written just now."""
    catalog = two[0]
    snapshots.snapshot(catalog)
    snapshots.drop_snapshot(catalog, 1)
    write_dataset(catalog, "c", ["A"], np.ones((5, 1), "u1"), {"kind": ["z"] * 5})
    record = snapshots.snapshot(catalog)
    folder = catalog.tables.location.path / FOLDER
    maintenance.gc(catalog, dry_run=False)
    assert len(list(folder.iterdir())) == 3
    maintenance.gc(catalog, dry_run=False, grace=dt.timedelta(0))
    assert {file.name for file in folder.iterdir()} == {HEAD, f"{record.manifest}.json"}


def test_a_manifest_that_is_not_what_its_name_says_is_refused(two: Two) -> None:
    """Content that parses but has another hash is damage."""
    catalog = two[0]
    record = snapshots.snapshot(catalog)
    catalog.tables.location.write_bytes(f"{FOLDER}/{record.manifest}.json", b'{"files":{},"version":0}')
    with pytest.raises(CorruptError, match="is not its name"):
        read_manifest(catalog.tables.location, record.manifest)
    assert {problem.rule for problem in found(catalog)} == {"manifest"}


def test_what_a_killed_writer_left_is_removed(two: Two) -> None:
    """`gc` removes a temporary file among the manifests, whose name no object may have."""
    catalog = two[0]
    record = snapshots.snapshot(catalog)
    folder = catalog.tables.location.path / FOLDER
    left = folder / f".{record.manifest}.json.1234abcd.tmp"
    left.write_bytes(b"half")
    maintenance.gc(catalog, dry_run=False, grace=dt.timedelta(0))
    assert {file.name for file in folder.iterdir()} == {HEAD, f"{record.manifest}.json"}
