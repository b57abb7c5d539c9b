"""Results of models are pinned, restored, dropped, purged, freed and checked like all else in an atlas."""

import datetime as dt
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raggedatlas import RaggedAtlas, ResultDataset
from raggedatlas.catalog.catalog import CELLS
from raggedatlas.errors import CorruptError, NotFoundError, ReadOnlyError
from raggedatlas.model.assets import RESULTS_SCHEMA, result_columns
from raggedatlas.store.upkeep import clean_up
from raggedatlas.wings.results import attachment as results
from raggedatlas.wings.results.assets import RESULTS
from support.atlases import Modelled, make_modelled

NOW = dt.timedelta(0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Modelled:
    """An atlas with the result in both forms, ``z`` and ``v``, in snapshot 2, and neither in snapshot 1."""
    own = make_modelled(tmp_path_factory.mktemp("kept"))
    atlas = own.open()
    for name, form in (("z", "space"), ("v", "vector")):
        atlas.add(ResultDataset({}, own.folder / "z"), name=name, as_=form, progress=False)
    atlas.snapshot("with")
    return own


@pytest.fixture
def own(made: Modelled, tmp_path: Path) -> Modelled:
    return made.moved(tmp_path / "own")


def check(view: Any, own: Modelled, names: str) -> None:
    """A view has exactly some results, each equal to what was added, for the cells that it has."""
    assert list(view.results().index) == list(names)
    assert view.validate("deep") == []
    if names:
        adata = view.query().with_results(*names).to_anndata()
        for name in names:
            np.testing.assert_array_equal(adata.obsm[name], own.expected().loc[adata.obs_names])


def groups(atlas: RaggedAtlas) -> set[str]:
    return {name for name in atlas._catalog.arrays.list_children() if name != "zarr.json"}


def test_the_registry_is_as_documented() -> None:
    """The table of results has these columns, in this order."""
    assert RESULTS_SCHEMA.names == [
        "uid", "name", "column", "zarr_group", "datasets", "content_hash", "source", "created_at", "kind", "dtype", "space", "width",
        "metric", "n_cells", "output", "verb", "model", "model_hash", "query", "snapshot", "parent", "config", "arrays", "checksums",
        "index",
    ]  # fmt: skip
    assert {f.name: str(f.type) for f in RESULTS_SCHEMA if f.type != pa.string()} == {
        "width": "int64",
        "n_cells": "int64",
    }


def test_snapshots_pin_results(own: Modelled) -> None:
    """A snapshot has the results of its time, whatever is dropped, optimized and freed after it."""
    atlas = own.open()
    assert RESULTS.table not in atlas.list_versions()[0].table_versions
    atlas.drop_result("z")
    third = atlas.snapshot()
    atlas.optimize()
    atlas.gc(dry_run=False, grace=NOW)
    for version, names in ((1, ""), (2, "zv"), (third, "v")):
        check(atlas.checkout(version), own, names)
    with pytest.raises(ReadOnlyError, match="drop_result"):
        atlas.checkout(2).drop_result("v")


def test_a_dropped_result_is_freed(own: Modelled) -> None:
    """What no snapshot holds goes with its array and column; what one holds stays until the snapshot is forgotten."""
    from raggedatlas.catalog.snapshots import drop_snapshot

    atlas = own.open()
    (result,) = groups(atlas) - set(atlas.list_datasets().index)
    for name in "zv":
        report = atlas.drop_result(name)
        assert "gc()" in report.notes[0]
    assert result_columns(atlas._catalog.tables.schema(CELLS)) == {}
    assert atlas.gc(grace=NOW).groups == ()
    drop_snapshot(atlas._catalog, 2)
    assert atlas.gc(grace=NOW).groups == (result,)
    assert atlas.gc(dry_run=False, grace=NOW).n_bytes > 0
    assert groups(atlas) == set(atlas.list_datasets().index)
    check(atlas.checkout(atlas.snapshot()), own, "")
    with pytest.raises(NotFoundError, match=r"no result 'z'; it has \[\]"):
        atlas.drop_result("z")


def test_the_bytes_of_a_dropped_column_go(own: Modelled) -> None:
    """The values of a vector column leave the disk once nothing names them."""
    from raggedatlas.catalog.snapshots import drop_snapshot

    atlas = own.open()
    needle = own.values[3].tobytes()
    folder = own.folder / "atlas" / "lance_db" / "cells.lance"

    def holds() -> bool:
        return any(needle in path.read_bytes() for path in folder.rglob("*.lance"))

    assert holds()
    atlas.drop_result("v")
    drop_snapshot(atlas._catalog, 2)
    atlas.optimize()
    clean_up(atlas._catalog.tables, CELLS, NOW)
    assert not holds()


@pytest.mark.nightly
def test_restore_brings_results_back_and_takes_later_ones(own: Modelled) -> None:
    """After restore the newest state has exactly the results of the snapshot."""
    atlas = own.open()
    for version, names in ((1, ""), (2, "zv"), (1, ""), (2, "zv")):
        atlas.restore(version)
        check(atlas.checkout(atlas.snapshot()), own, names)
    atlas.drop_result("v")
    atlas.restore("with")
    check(atlas.checkout(atlas.snapshot()), own, "zv")


@pytest.mark.parametrize("n", range(6))
def test_a_restore_that_dies_can_be_run_again(
    own: Modelled, dying: Callable[[int], AbstractContextManager[list[str]]], n: int
) -> None:
    """Wherever a restore dies, what is visible is sound, and the next one finishes it."""
    atlas = own.open()
    atlas.restore(1)
    with dying(n):
        atlas.restore(2)
    assert [p for p in own.open().validate("deep") if p.rule != "uncommitted-cells"] == []
    atlas = own.open()
    atlas.restore(2)
    check(atlas.checkout(atlas.snapshot()), own, "zv")


def test_dropping_a_dataset_leaves_the_others_their_results(own: Modelled) -> None:
    """The cells of a dropped dataset go with their results; those of the others keep theirs."""
    atlas = own.open()
    before = atlas.results()["n_cells"].tolist()
    atlas.drop_dataset("data-0")
    assert all(n < m for n, m in zip(atlas.results()["n_cells"], before, strict=True))
    check(atlas.checkout(atlas.snapshot()), own, "zv")
    atlas.drop_dataset("data-1")
    assert atlas.results()["n_cells"].tolist() == [0, 0]
    assert atlas.validate("deep") == []
    view = atlas.checkout(atlas.snapshot())
    assert view.query().spaces("z").to_anndata().shape == (0, 5)


@pytest.mark.long
@pytest.mark.parametrize("indexed", [False, True])
def test_a_purge_takes_the_values_out_of_results(
    made: Modelled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indexed: bool
) -> None:
    """After a purge no byte of the dataset's results is left, in no snapshot, and the others' results are as they were."""
    own = made.moved(tmp_path / "own")
    atlas = own.open()
    if indexed:
        monkeypatch.setattr(results, "INDEXED_CELLS", 5)
        atlas.add(own.folder / "z", "i", as_="vector", progress=False)
        atlas.snapshot()
    gone = atlas.checkout(2).query().where({"dataset": "data-0"}).to_pandas().index
    values = own.expected().loc[gone].dropna().to_numpy(np.float32)
    atlas.drop_result("z")  # it is in the snapshots alone
    report = atlas.purge("data-0")
    assert report.n_cells == len(gone)
    for version in [record.version for record in atlas.list_versions()]:
        view = atlas.checkout(version)
        check(view, own, "" if version == 1 else "zv" if version == 2 else "zvi")
        assert list(view.list_datasets()["name"]) == ["data-1"]
    assert atlas.validate("deep") == []
    kept = b"".join(path.read_bytes() for path in (own.folder / "atlas").rglob("*") if path.is_file())
    assert not [row for row in values if row.tobytes() in kept]
    if indexed:
        found = atlas.checkout(3).query().search(own.values[0], column="i", k=3).to_pandas()
        assert len(found) == 3


@pytest.mark.parametrize("n", [1, 3, 5, 8, 11])
def test_a_purge_that_dies_is_finished(
    own: Modelled, dying: Callable[[int], AbstractContextManager[list[str]]], n: int
) -> None:
    """Wherever a purge dies, repair finishes it, results included."""
    atlas = own.open()
    with dying(n):
        atlas.purge("data-0")
    atlas = own.open()
    atlas.repair()
    atlas.purge("data-0") if "data-0" in atlas.checkout(2).list_datasets()["name"].tolist() else None
    check(atlas.checkout(2), own, "zv")
    assert atlas.list_datasets()["name"].tolist() == ["data-1"]
    assert atlas.validate("deep") == []


@pytest.mark.parametrize("n", range(3))
def test_a_drop_that_dies_leaves_a_whole_atlas(
    own: Modelled, dying: Callable[[int], AbstractContextManager[list[str]]], n: int
) -> None:
    """Wherever a drop dies the result is there or not, and repair takes away a column that nobody names."""
    atlas = own.open()
    with dying(n):
        RESULTS.drop(atlas._catalog, "v")
    atlas = own.open()
    names = list(atlas.results().index)
    assert names == (["z", "v"] if n == 0 else ["z"])
    assert atlas.validate("deep") == []
    atlas.repair()
    assert [name for _, name in result_columns(atlas._catalog.tables.schema(CELLS)).values()] == names
    check(atlas.checkout(atlas.snapshot()), own, "".join(names))


def test_repair_names_the_columns_that_it_removes(own: Modelled) -> None:
    """A column of a result that is in no row is removed, and the note says which."""
    atlas = own.open()
    RESULTS.change(atlas._catalog, lambda old: [record for record in old if record.name != "v"])
    assert atlas.repair().notes[0] == "removed the cell columns ['v'] of unregistered results"
    assert atlas.repair().notes == ()


def damage_column(own: Modelled) -> None:
    own.open()._catalog.tables.drop_columns(CELLS, ["v"])


def damage_name(own: Modelled) -> None:
    atlas = own.open()
    RESULTS.change(atlas._catalog, lambda old: [r.model_copy(update={"name": "z"}) for r in old])


def damage_counts(own: Modelled) -> None:
    atlas = own.open()
    (uid, *_) = atlas.list_datasets().index
    RESULTS.change(atlas._catalog, lambda old: [r.model_copy(update={"datasets": f'{{"{uid}": 3}}'}) for r in old])


def damage_width(own: Modelled) -> None:
    atlas = own.open()
    RESULTS.change(atlas._catalog, lambda old: [r.model_copy(update={"width": 7}) for r in old])


def damage_space(own: Modelled) -> None:
    atlas = own.open()
    RESULTS.change(atlas._catalog, lambda old: [r.model_copy(update={"space": "nope"} if r.space else {}) for r in old])


def damage_bytes(own: Modelled) -> None:
    (group,) = (own.folder / "atlas" / "zarr_store").glob("*/z/layers/values")
    (shard,) = [path for path in group.rglob("*") if path.is_file() and path.name != "zarr.json"]
    data = bytearray(shard.read_bytes())
    data[10] ^= 255
    shard.write_bytes(bytes(data))


def damage_missing(own: Modelled) -> None:
    import shutil

    for path in (own.folder / "atlas" / "zarr_store").glob("*/z"):
        shutil.rmtree(path)


@pytest.mark.parametrize(
    ("damage", "level", "rule"),
    [
        (damage_column, "quick", "result-column"),
        (damage_name, "quick", "duplicate-result"),
        (damage_width, "quick", "result-column"),
        (damage_space, "quick", "unknown-space"),
        (damage_counts, "rows", "result-count"),
        (damage_missing, "rows", "missing-array"),
        (damage_bytes, "deep", "array-damaged"),
    ],
)
def test_damage_is_found(own: Modelled, damage: Callable[[Modelled], None], level: Any, rule: str) -> None:
    """Each way to be wrong is told by its rule, at its level, and no snapshot is taken of a change that is wrong."""
    damage(own)
    atlas = own.open()
    assert rule in {problem.rule for problem in atlas.validate(level)}
    # A snapshot does not look again for files of results that an earlier one has.
    if damage not in (damage_bytes, damage_missing):
        with pytest.raises(CorruptError, match=rule):
            atlas.snapshot()


def test_repair_names_missing_values(own: Modelled) -> None:
    """Values that are gone are told by the name of the result, with the way out."""
    damage_missing(own)
    assert any("drop_result('z')" in note for note in own.open().repair().notes)


def test_what_is_shown_of_an_atlas(own: Modelled) -> None:
    """The short and the HTML form name the results."""
    atlas = own.open()
    assert "result z: 20 cells, 5 x float32 in embedding" in repr(atlas)
    assert "result v: 20 cells, 5 x float32 in the cell table" in repr(atlas.checkout(2))
