"""Cells that are mapped from a file of records are those that are held in memory, and the file is shared, bounded and never trusted."""

import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raggedatlas.catalog.catalog import CELLS, Catalog, create_catalog
from raggedatlas.ingest.add import add
from raggedatlas.loader import cells
from raggedatlas.loader.loader import Loader
from raggedatlas.query.query import Query
from raggedatlas.query.split import Split
from raggedatlas.store.location import Location
from raggedatlas.store.record_files import RecordFolder
from raggedatlas.wings.trainers.lightning import split_loader
from support.atlases import write_dataset
from support.small import make_file

OBS = ["kind", "donor", "percent.mt", "n", "flag", "plate", "dataset", "cell_name"]


def as_values(loader: Loader) -> list[Any]:
    """Return everything that the batches of an epoch hold."""
    found: list[Any] = []
    for batch in loader:
        found += [batch.rows, batch.uids, *(batch.obs[name] for name in batch.obs)]
        for space in batch.spaces.values():
            found += [
                space.X.toarray() if hasattr(space.X, "toarray") else space.X,
                space.present,
                space.layout,
                space.measured(),
            ]
    return found


WAYS: dict[str, Any] = {
    "all": lambda query, **more: Loader(query, 16, obs=OBS, **more),
    "some": lambda query, **more: Loader(query.where({"kind": "B"}), 16, obs=OBS, **more),
    "two spaces": lambda query, **more: Loader(
        query.spaces("gene_expression", "protein_abundance"), 16, obs=["kind"], **more
    ),
    "some have it": lambda query, **more: Loader(query.spaces("protein_abundance"), 16, **more),
    "no values": lambda query, **more: Loader(query.spaces([]), 16, obs=OBS, **more),
    "layers": lambda query, **more: Loader(query.layers("log", "counts"), 16, **more),
    "categories": lambda query, **more: Loader(
        query, 16, obs=["donor"], categories={"donor": ["D2", "D9", "D1"]}, **more
    ),
    "balance": lambda query, **more: Loader(query, 16, balance="kind", **more),
    "group": lambda query, **more: Loader(query, 16, obs=["plate"], group="plate", **more),
    "weights": lambda query, **more: Loader(query, 16, weights="percent.mt", **more),
    "blocks": lambda query, **more: Loader(query, 16, shuffle="blocks", rank=1, world_size=2, **more),
}


def test_categories_of_an_array_have_a_file_of_their_own(small: Any, mapped: Path) -> None:
    """Long arrays that differ in the middle, which their text leaves out, give codes of their own."""
    names = np.array([f"D{i}" for i in range(2_000)], object)
    other = names.copy()
    other[[1, 1_000]] = other[[1_000, 1]]
    for known in (names, other):
        loader = Loader(small.query, 16, obs=["donor"], categories={"donor": known})
        assert loader.categories["donor"].tolist() == known.tolist()
    assert len(list(mapped.glob("*.plan"))) == 2


@pytest.mark.parametrize("way", WAYS)
def test_mapped_cells_are_those_in_memory(small: Any, way: str, mapped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, categories and state are equal: of cells in memory, written, mapped again, and unpickled."""
    with monkeypatch.context() as patch:
        patch.setattr(cells, "IN_MEMORY_CELLS", 2**17)
        expected = WAYS[way](small.query)
    assert not mapped.exists()
    written, again = (WAYS[way](small.query) for _ in range(2))
    assert len(list(mapped.glob("*.plan"))) == len(list(mapped.iterdir())) == 1
    text = pickle.dumps(written)
    values = as_values(expected)
    for found in (written, again, pickle.loads(text)):
        assert found.plan.cells.records is not None
        assert {k: v.tolist() for k, v in found.categories.items()} == {
            k: v.tolist() for k, v in expected.categories.items()
        }
        for one, other in zip(as_values(found), values, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
        found.load_state_dict(expected.state_dict())


def test_parts_of_mapped_cells(small: Any, mapped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits, and parts of parts, have the same cells."""
    split = Split.by(small.query, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(cells, "IN_MEMORY_CELLS", 2**17)
        whole = Loader(small.query, 8, obs=["kind"], balance="kind")
        expected = [
            *split_loader(whole, split).values(),
            whole.part(np.arange(60, 10, -1)).part(np.arange(3, 30)),
        ]
    loader = Loader(small.query, 8, obs=["kind"], balance="kind")
    found = [*split_loader(loader, split).values(), loader.part(np.arange(60, 10, -1)).part(np.arange(3, 30))]
    for one, other in zip(found, expected, strict=True):
        assert one.plan.uids.tolist() == other.plan.uids.tolist()
        assert one.state_dict() == other.state_dict()
        for value, wanted in zip(as_values(pickle.loads(pickle.dumps(one))), as_values(other), strict=True):
            np.testing.assert_array_equal(value, wanted)


def test_rows_that_an_update_moved(mapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells come in the order in which they were added, wherever their rows are in the table; those without a record do not come."""
    catalog = create_catalog(Location(str(tmp_path / "atlas")))
    for number, name in enumerate(("first", "second")):
        add(catalog, make_file(name, 30, number), {"name": name}, False)
    rows = catalog.tables.read(CELLS)
    catalog.tables.merge(CELLS, ["uid"], rows.slice(2, 30), update=True)
    write_dataset(catalog, "died", ["a"], np.ones((5, 1), "u1"), last="cells")
    query = Query(
        Catalog(
            catalog.location,
            replace(catalog.tables, pinned=catalog.tables.versions(catalog.tables.names())),
            catalog.arrays,
        )
    )
    with monkeypatch.context() as patch:
        patch.setattr(cells, "IN_MEMORY_CELLS", 2**17)
        expected = Loader(query, 16, obs=OBS)
    found, again = Loader(query, 16, obs=OBS), Loader(query, 16, obs=OBS)
    assert found.plan.uids.astype(str).tolist() == rows.column("uid").to_pylist()
    for one, other, wanted in zip(as_values(found), as_values(again), as_values(expected), strict=True):
        np.testing.assert_array_equal(one, wanted)
        np.testing.assert_array_equal(other, wanted)
    assert found.state_dict() == expected.state_dict()


def test_another_question_has_another_file(small: Any, mapped: Path) -> None:
    """What changes places, codes or cells changes the key; the seed does not."""
    for seed in (0, 1):
        Loader(small.query, obs=["donor"], seed=seed)
    assert len(list(mapped.glob("*.plan"))) == 1
    Loader(small.query, obs=["donor"], categories={"donor": ["D2", "D1"]})
    Loader(small.query, obs=["donor", "kind"])
    Loader(small.query.where({"donor": "D1"}), obs=["donor"])
    Loader(small.query.layers("log"), obs=["donor"])
    Loader(small.query, obs=["donor"], balance="kind")
    assert len(list(mapped.glob("*.plan"))) == 6


@pytest.mark.parametrize("damage", ["cut", "grown", "empty", "overwritten", "gone"])
def test_a_file_that_is_not_as_it_was_written_is_written_again(small: Any, mapped: Path, damage: str) -> None:
    """A damaged file is no error for a new loader; a pickle of one whose file is gone finds the cells again."""
    loader = Loader(small.query, 16, obs=["kind"], shuffle=None)
    text, expected = pickle.dumps(loader), as_values(loader)
    (file,) = mapped.glob("*.plan")
    content = file.read_bytes()
    # A new file: the memory of this one is mapped.
    file.unlink()
    changed = {"cut": content[:-9], "grown": content + b"x", "empty": b"", "overwritten": content[:-8] + b"RAPLAN99"}
    if damage in changed:
        file.write_bytes(changed[damage])
    for found in (pickle.loads(text), Loader(small.query, 16, obs=["kind"], shuffle=None)):
        for one, other in zip(as_values(found), expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert file.read_bytes() == content


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may write anywhere")
def test_a_home_that_cannot_be_written_to(small: Any, mapped: Path) -> None:
    """Cells are then in a temporary file."""
    mapped.parent.mkdir(mode=0o500)
    assert len(as_values(Loader(small.query, 16))) > 0
    assert not mapped.exists()


@pytest.mark.parametrize("name", ["", "/dev/null/nowhere"])
def test_no_folder(small: Any, mapped: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Without a folder that can be made, cells are in a file without a name, and a pickle holds them."""
    expected = as_values(Loader(small.query, 16, obs=["donor"]))
    monkeypatch.setenv("RAGGEDATLAS_CACHE_DIR", name)
    loader = Loader(small.query, 16, obs=["donor"])
    assert loader.plan.cells.records.path is None
    for found in (pickle.loads(pickle.dumps(loader)), loader):
        for one, other in zip(as_values(found), expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_folder_is_bounded(small: Any, mapped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files used longest ago go first, unfinished ones after a day; a plan larger than the folder may be is not kept."""
    Loader(small.query, obs=["donor"])
    (first,) = mapped.glob("*.plan")
    monkeypatch.setenv("RAGGEDATLAS_CACHE_SIZE", str(first.stat().st_blocks * 512 * 3 // 2))
    old, fresh = mapped / "a.part", mapped / "b.part"
    for file in (old, fresh):
        file.touch()
    os.utime(old, (0, 0))
    Loader(small.query, obs=["kind"])
    assert not first.exists()
    assert not old.exists()
    assert fresh.exists()
    (second,) = mapped.glob("*.plan")
    monkeypatch.setenv("RAGGEDATLAS_CACHE_SIZE", "10")
    loader = Loader(small.query, obs=["plate"])
    assert list(mapped.glob("*.plan")) == [second]
    assert len(as_values(loader)) > 0


def test_one_at_a_time_makes_a_plan(tmp_path: Path) -> None:
    """Who waited for the lock of another that failed has it alone: one that comes later waits in turn."""
    folder, entered, leave = RecordFolder(tmp_path, 10**6), threading.Event(), threading.Event()
    waiting = threading.Thread(target=lambda: _hold(folder, entered, leave))
    later, late = threading.Event(), threading.Thread(target=lambda: _hold(folder, later, leave))
    with folder.lock("k"):
        waiting.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    late.start()
    assert not later.wait(0.2)
    leave.set()
    assert later.wait(10)
    waiting.join()
    late.join()
    assert list(tmp_path.iterdir()) == []


def _hold(folder: RecordFolder, entered: threading.Event, leave: threading.Event) -> None:
    with folder.lock("k"):
        entered.set()
        assert leave.wait(10)
