"""Purge: nothing of a dataset is left, in any snapshot or byte, and everything else is as it was."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from raggedatlas.catalog import checks, purge, snapshots, upkeep
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.datasets import purged, read_records
from raggedatlas.errors import ConflictError, CorruptError, NotFoundError
from raggedatlas.testing.atlases import write_dataset

Dying = Callable[[int], contextlib.AbstractContextManager[list[str]]]
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
    upkeep.drop_dataset(catalog, first)
    snapshots.snapshot(catalog, "three")
    write_dataset(catalog, "d", ["E", "F"], np.ones((5, 2), "u1"))
    return third


@pytest.mark.parametrize("still_there", [False, True])
def test_nothing_is_left_of_a_purged_dataset(two: Two, still_there: bool) -> None:
    """No cell uid of it is in any file; snapshots keep number, label and their other content; the log names it."""
    catalog, first, second = two
    gone = cells_of(catalog, first)
    third = make_history(catalog, first)
    if still_there:
        snapshots.restore(catalog, "two")
    kept = {
        r.label: catalog.at(r).tables.read(CELLS, where=f"dataset_uid <> '{first}'")
        for r in snapshots.list_versions(catalog)
    }
    tip = catalog.tables.read(CELLS, where=f"dataset_uid <> '{first}'")
    assert any(uid.encode() in bytes_of(catalog) for uid in gone)
    report = purge.purge(catalog, "a")
    assert report.groups == (first,)
    assert report.n_cells == (30 if still_there else 0)
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
        assert checks.validate(catalog.at(record), "deep") == []
    assert catalog.tables.read(CELLS).equals(tip)
    assert not [p for p in checks.validate(catalog, "deep") if not checks.is_note(p)]
    assert snapshots.snapshot(catalog).version == 4
    with pytest.raises(NotFoundError, match="Neither"):
        purge.purge(catalog, first)


def test_a_dead_purge_is_finished_by_repair(two: Two, dying: Dying) -> None:
    """Wherever a purge dies, snapshots are refused until repair has finished it, and then nothing is left."""
    catalog, first, second = two
    snapshots.snapshot(catalog)
    n, finished, victim = 0, False, first
    while not finished:
        gone = cells_of(catalog, victim)
        tip = catalog.tables.read(CELLS, where=f"dataset_uid <> '{victim}'")
        with dying(n) as done:
            purge.purge(catalog, victim)
            finished = True
        begun = purge.unfinished_purge(catalog) is not None
        if begun:
            assert "unfinished-purge" in {p.rule for p in checks.validate(catalog)}
            with pytest.raises(CorruptError, match="unfinished-purge"):
                snapshots.snapshot(catalog)
            with pytest.raises(ConflictError, match="repair"):
                purge.purge(catalog, second)
        upkeep.repair(catalog)
        if begun or finished:
            after = bytes_of(catalog)
            assert not [uid for uid in gone if uid.encode() in after], done
            assert catalog.tables.read(CELLS).equals(tip), done
            assert not [p for p in checks.validate(catalog, "deep") if not checks.is_note(p)], done
            victim = write_dataset(catalog, f"v{n}", ["A", "B"], np.ones((6, 2), "u1"))
            snapshots.snapshot(catalog)
        n += 2
    assert n > 10
    for record in snapshots.list_versions(catalog):
        assert not checks.validate(catalog.at(record), "deep")


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
