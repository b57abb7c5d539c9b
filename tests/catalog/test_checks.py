"""Validation: silent on sound atlases, and each kind of damage found by its rule at the level that promises it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.catalog import assets, file_checks, maintenance, optimization, snapshots, validation
from raggedatlas.catalog.assets import read_records
from raggedatlas.catalog.catalog import CELLS, DATASETS, LAYOUTS, Catalog
from raggedatlas.model.records import DATASETS_SCHEMA, DatasetRecord
from raggedatlas.store.arrays import ArrayWriter
from raggedatlas.store.upkeep import clean_up
from support.atlases import SPACE, write_dataset

Two = tuple[Catalog, str, str]
LEVELS: tuple[validation.Level, ...] = ("quick", "rows", "deep")


def rules(catalog: Catalog, level: validation.Level) -> set[str]:
    return {problem.rule for problem in validation.validate(catalog, level) if problem.level == "must"}


def change_record(catalog: Catalog, uid: str, **changes: object) -> None:
    rows = [
        (record.model_copy(update=changes) if record.uid == uid else record).model_dump()
        for record in read_records(catalog)
    ]
    table = pa.Table.from_pylist(rows, schema=DATASETS_SCHEMA)
    assert catalog.tables.overwrite_if(DATASETS, table, catalog.tables.version(DATASETS))


def change_cells(catalog: Catalog, change: Callable[[int, dict[str, Any]], None]) -> None:
    rows = catalog.tables.read(CELLS)
    changed = rows.to_pylist()
    for i, row in enumerate(changed):
        change(i, row)
    table = pa.Table.from_pylist(changed, schema=rows.schema)
    assert catalog.tables.overwrite_if(CELLS, table, catalog.tables.version(CELLS))


def specs_without(record: DatasetRecord, path: str) -> str:
    return json.dumps({key: spec for key, spec in record.array_specs.items() if key != path})


def test_a_sound_atlas_has_no_problems_at_any_level(two: Two) -> None:
    """Tip and snapshot are silent at every level once indices are assigned."""
    catalog = two[0]
    record = snapshots.snapshot(catalog)
    for level in LEVELS:
        assert validation.validate(catalog, level) == []
        assert validation.validate(catalog.at(record), level) == []


def test_an_empty_atlas_is_sound(atlas: Catalog) -> None:
    """An atlas without datasets validates and snapshots."""
    assert validation.validate(atlas, "deep") == []
    assert snapshots.snapshot(atlas).n_datasets == 0


def test_validation_writes_nothing(two: Two) -> None:
    """No table gets a new version."""
    catalog = two[0]
    before = {name: catalog.tables.version(name) for name in catalog.tables.names()}
    assert validation.validate(catalog, "deep") == []
    assert {name: catalog.tables.version(name) for name in catalog.tables.names()} == before


@pytest.mark.parametrize("name", [CELLS, DATASETS, LAYOUTS, f"{SPACE}_registry"])
def test_a_missing_table_is_found_at_once(two: Two, name: str) -> None:
    """At the tip a lost table is reported, not raised."""
    catalog = two[0]
    catalog.tables.location.child(f"{name}.lance").delete_prefix()
    if name == f"{SPACE}_registry":
        assert rules(catalog, "quick") == {"missing-registry"}
    else:
        assert rules(catalog, "quick") == {"missing-table"}


def test_a_lost_version_of_a_snapshot_is_found(two: Two) -> None:
    """When something else cleaned up, the snapshot and the table are named."""
    from datetime import timedelta

    catalog = two[0]
    record = snapshots.snapshot(catalog)
    catalog.tables.untag(CELLS, record.tag)
    assets.drop_dataset(catalog, two[1])
    clean_up(catalog.tables, CELLS, timedelta(0))
    [problem] = [p for p in validation.validate(catalog) if p.level == "must"]
    assert (problem.rule, problem.path) == ("lost-version", "snapshot 1")
    assert rules(catalog.at(record), "quick") == {"missing-table"}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"feature_space": "nonsense"}, "unknown-space"),
        ({"n_entries": 1}, "array-spec"),
        ({"layers": ["counts", "other"]}, "array-spec"),
        ({"arrays": "{"}, "array-spec"),
        ({"arrays": '{"csr/indices": {"path": "x"}}'}, "array-spec"),
        ({"n_features": 99}, "layout-size"),
        ({"layout_uid": "0" * 16}, "missing-layout"),
        ({"zarr_group": "../evil"}, "group-name"),
        ({"feature_space": "protein_abundance"}, "missing-registry"),
    ],
)
def test_quick_finds_a_wrong_inventory(two: Two, changes: dict[str, object], rule: str) -> None:
    """What the record alone shows is found at the first level, and no level raises."""
    catalog, first, _ = two
    change_record(catalog, first, **changes)
    for level in LEVELS:
        assert rule in rules(catalog, level)


def test_quick_finds_columns_pointing_nowhere(two: Two) -> None:
    """A pointer column of an unknown space, or of the wrong kind, is found."""
    from raggedatlas.model.spaces import PointerKind, pointer_field

    catalog = two[0]
    catalog.tables.add_columns(
        CELLS,
        [pointer_field("p", PointerKind.SPARSE, "nowhere"), pointer_field("q", PointerKind.DENSE, SPACE)],
    )
    assert rules(catalog, "quick") == {"unknown-space", "space-kind"}


def test_quick_finds_wrong_features(two: Two) -> None:
    """Repeated indices, layouts that disagree with the registry, and features it lacks are found."""
    catalog = two[0]
    optimization.optimize(catalog)
    table = f"{SPACE}_registry"
    rows = catalog.tables.read(table)
    at = rows.column_names.index("global_index")
    wrong = rows.set_column(at, rows.schema.field(at), pa.array([0, 0, 1, 2], pa.int64()))
    catalog.tables.merge(table, ["uid"], wrong, update=True)
    assert rules(catalog, "quick") == {"global-index", "layout-index"}
    catalog.tables.delete(table, "global_index = 0")
    assert rules(catalog, "quick") == {"global-index", "layout-index", "layout-features"}
    catalog.tables.append(table, rows.slice(3))
    assert "duplicate-feature" in rules(catalog, "quick")


@pytest.mark.parametrize(
    ("part", "value", "rule"),
    [
        ("start", -1, "pointer-bounds"),
        ("end", 10**9, "pointer-bounds"),
        ("zarr_row", 10**9, "pointer-bounds"),
        ("zarr_row", 7, "pointer-rows"),
        ("zarr_group", "ffffffffffffffff/gene_expression", "pointer-group"),
        ("zarr_group", None, "pointer-group"),
    ],
)
def test_rows_finds_a_wrong_pointer(two: Two, part: str, value: object, rule: str) -> None:
    """One cell whose pointer is out of bounds, repeated, or leads elsewhere is found."""
    catalog = two[0]

    def change(i: int, row: dict[str, Any]) -> None:
        if i == 3:
            row[SPACE] = {**row[SPACE], part: value}

    change_cells(catalog, change)
    assert rules(catalog, "quick") == set()
    assert rule in rules(catalog, "rows")
    assert rule in rules(catalog, "deep")


def test_rows_finds_pointers_into_another_dataset(two: Two) -> None:
    """A cell that points into the group of another dataset is no cell of that group."""
    catalog, _, second = two

    def change(i: int, row: dict[str, Any]) -> None:
        if i == 3:
            row[SPACE] = {"zarr_group": f"{second}/{SPACE}", "start": 0, "end": 0, "zarr_row": 0}

    change_cells(catalog, change)
    assert rules(catalog, "rows") == {"pointer-group", "cell-count"}


def test_rows_finds_cells_that_are_missing_or_twice_there(two: Two) -> None:
    """A deleted cell, a repeated uid, and a uid of another form are found."""
    catalog = two[0]
    assert catalog.tables.delete(CELLS, "cell_name = 'cell-4'") == 2
    assert rules(catalog, "rows") == {"cell-count"}

    def change(i: int, row: dict[str, Any]) -> None:
        row["uid"] = "not a uid" if i == 0 else "0" * 16 if i < 3 else row["uid"]

    change_cells(catalog, change)
    assert rules(catalog, "rows") == {"cell-count", "cell-uid", "duplicate-uid"}


def test_deep_finds_pointers_that_were_swapped(two: Two) -> None:
    """Ranges inside the arrays that are not the row's own are found against ``csr/indptr``."""
    catalog = two[0]

    def change(i: int, row: dict[str, Any]) -> None:
        if i in {0, 1}:
            row[SPACE] = {**row[SPACE], "zarr_row": 1 - i}

    change_cells(catalog, change)
    assert rules(catalog, "rows") == set()
    assert rules(catalog, "deep") == {"pointer-bounds"}


def files_of(catalog: Catalog, uid: str, path: str) -> list[Path]:
    folder = catalog.arrays.path / uid / SPACE / path
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name != "zarr.json")


@pytest.mark.parametrize("path", ["csr/indices", "csr/indptr", "csr/layers/counts"])
def test_missing_arrays_and_shards_are_found(two: Two, path: str) -> None:
    """A missing shard is found by ``deep``, a missing array or group by ``rows``."""
    catalog, first, second = two
    for file in files_of(catalog, first, path):
        file.unlink()
    assert rules(catalog, "rows") == set()
    assert rules(catalog, "deep") == {"array-damaged"}
    catalog.arrays.child(first, SPACE, *path.split("/")).delete_prefix()
    assert rules(catalog, "rows") == {"missing-array"}
    catalog.arrays.child(second).delete_prefix()
    assert len([p for p in validation.validate(catalog, "rows") if p.rule == "missing-array"]) == 4


def test_deep_finds_arrays_that_were_exchanged(two: Two) -> None:
    """Sound arrays with other values, other metadata, or feature numbers beyond the list are found."""
    catalog, first, _ = two
    [record] = [r for r in read_records(catalog) if r.uid == first]
    n = record.n_entries

    def write(path: str, values: np.ndarray[Any, Any]) -> None:
        catalog.arrays.child(first, SPACE, *path.split("/")).delete_prefix()
        writer = ArrayWriter(catalog.arrays, f"{record.zarr_group}/{path}", values.dtype, profile=catalog.codec())
        writer.append(values)
        writer.close()

    write("csr/layers/counts", np.full(n, 9, "u1"))
    assert rules(catalog, "deep") == {"checksum"}
    write("csr/layers/counts", np.full(n, 9, "u2"))
    assert rules(catalog, "deep") == {"array-metadata"}
    write("csr/layers/counts", np.full(n, 9, "u1"))
    write("csr/indices", np.full(n, 3, "u4"))
    change_record(catalog, first, checksums="{}")
    assert rules(catalog, "deep") == {"feature-bounds", "array-spec"}


def test_deep_finds_a_layout_that_was_changed(two: Two) -> None:
    """A feature list that no longer hashes to its uid is found."""
    catalog, first, _ = two
    optimization.optimize(catalog)
    [record] = [r for r in read_records(catalog) if r.uid == first]
    rows = catalog.tables.read(LAYOUTS, where=f"layout_uid = '{record.layout_uid}'")
    swapped = rows.take([1, 0, 2])
    swapped = swapped.set_column(2, rows.schema.field(2), rows.column("local_index"))
    catalog.tables.merge(LAYOUTS, ["layout_uid", "local_index"], swapped, update=True)
    assert rules(catalog, "rows") == set()
    assert rules(catalog, "deep") == {"layout-hash"}


def test_an_undescribed_array_is_found(two: Two) -> None:
    """A layer that the record names but does not describe is found."""
    catalog, first, _ = two
    [record] = [r for r in read_records(catalog) if r.uid == first]
    change_record(catalog, first, arrays=specs_without(record, "csr/layers/counts"))
    assert rules(catalog, "quick") == {"array-spec"}


@pytest.mark.long
@given(n_cells=st.integers(1, 12), n_genes=st.integers(1, 6), seed=st.integers(0, 99))
def test_whatever_is_added_validates(
    tmp_path_factory: pytest.TempPathFactory, n_cells: int, n_genes: int, seed: int
) -> None:
    """Datasets of any shape, with empty rows and columns, are sound at every level."""
    from raggedatlas.catalog.catalog import create_catalog
    from raggedatlas.store.location import Location

    catalog = create_catalog(Location(str(tmp_path_factory.mktemp("any") / "atlas")))
    counts = np.random.default_rng(seed).poisson(0.3, (n_cells, n_genes)).astype("u1")
    write_dataset(catalog, "any", [f"g{i}" for i in range(n_genes)], counts)
    assert rules(catalog, "deep") == set()


def test_what_a_second_read_does_not_find_is_a_note(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are damaged on their way once stop no snapshot, and nobody is told to drop anything."""
    catalog = two[0]
    optimization.optimize(catalog)
    reads: list[int] = []
    original = validation.read_layouts

    def damaged_once(*args: Any, **kwargs: Any) -> Any:
        reads.append(1)
        return {} if len(reads) == 1 else original(*args, **kwargs)

    monkeypatch.setattr(validation, "read_layouts", damaged_once)
    (found,) = validation.validate(catalog)
    assert (found.rule, found.level) == ("seen-once", "practice")
    assert "do not drop" in found.fix
    reads.clear()
    assert snapshots.snapshot(catalog).version == 1


def test_a_dataset_that_is_dropped_and_freed_meanwhile_is_no_damage(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation beside a drop and a collection reports neither damage nor a failed read."""
    catalog, first, _ = two
    optimization.optimize(catalog)
    original, dropped = file_checks.check_bytes, []

    def check_bytes(*args: Any) -> Any:
        if not dropped:
            dropped.append(assets.drop_dataset(catalog.tip(), first))
            maintenance.gc(catalog.tip(), dry_run=False)
        return original(*args)

    monkeypatch.setattr(file_checks, "check_bytes", check_bytes)
    assert [problem for problem in validation.validate(catalog, "deep") if problem.rule != "unassigned-index"] == []
    assert dropped
