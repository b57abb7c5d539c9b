"""A snapshot checks what changed since the one before, and finds the same as a check of everything."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import raggedatlas as ra
from raggedatlas.catalog import assets, maintenance, optimization, snapshots, validation, versions
from raggedatlas.catalog.catalog import CELLS, Catalog, create_catalog
from raggedatlas.errors import CorruptError
from raggedatlas.store.location import Location
from raggedatlas.store.upkeep import LARGE_ROWS, SMALL_ROWS, Size, choose_fragments, parts_to_merge
from support.atlases import small_anndata, write_dataset

Two = tuple[Catalog, str, str]


def add(catalog: Catalog, name: str, last: str = "record") -> str:
    return write_dataset(catalog, name, ["A", "B"], np.ones((5, 2), "u1"), {"kind": ["x"] * 5}, last=last)  # type: ignore[arg-type]


@pytest.mark.long
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(["add", "half", "drop", "repair", "rename", "snapshot", "optimize"]), max_size=8))
def test_counts_are_those_of_a_complete_check(tmp_path_factory: pytest.TempPathFactory, steps: list[str]) -> None:
    """Whatever happened in between, a snapshot has the counts that a check of everything gives, which finds no problem."""
    catalog = create_catalog(Location(str(tmp_path_factory.mktemp("a") / "atlas")))
    for number, step in enumerate([*steps, "snapshot", "add", "snapshot"]):
        names = [record.name for record in assets.read_records(catalog)]
        if step in ("add", "half"):
            add(catalog, f"d{number}", "record" if step == "add" else "cells")
        elif step == "drop" and names:
            assets.drop_dataset(catalog, names[0])
        elif step == "rename" and names:
            maintenance.rename_dataset(catalog, names[0], f"r{number}")
        elif step == "repair":
            maintenance.repair(catalog)
        elif step == "optimize":
            optimization.optimize(catalog)
        elif step == "snapshot":
            record = snapshots.snapshot(catalog)
            whole = validation.check_content(catalog.at(record), "rows", None)
            assert not [problem for problem in whole.problems if problem.level == "must"]
            assert (record.n_cells, record.n_datasets, record.ignored) == (
                whole.n_cells, whole.n_datasets, whole.ignored,
            )  # fmt: skip


def copy_cell(catalog: Catalog, dataset: str, **columns: object) -> None:
    row = catalog.tables.read(CELLS, where=f"dataset_uid = '{dataset}'").slice(0, 1)
    for name, value in columns.items():
        at = row.schema.get_field_index(name)
        row = row.set_column(at, row.schema.field(at), pa.array([value], row.schema.field(at).type))
    catalog.tables.append(CELLS, row)


def point_outside(catalog: Catalog, first: str, second: str) -> None:
    pointer = {"zarr_group": f"{first}/gene_expression", "start": 0, "end": 1, "zarr_row": 10**6}
    copy_cell(catalog, first, uid="0" * 16, gene_expression=pointer)


DAMAGE: dict[str, tuple[str, Callable[[Catalog, str, str], object]]] = {
    "a cell of an old dataset again": ("duplicate-uid", lambda c, first, _: copy_cell(c, first)),
    "an old uid in another dataset": (
        "duplicate-uid",
        lambda c, first, second: copy_cell(
            c, second, uid=c.tables.read(CELLS, ["uid"], f"dataset_uid = '{first}'").column(0)[0].as_py()
        ),
    ),
    "no uid": ("cell-uid", lambda c, first, _: copy_cell(c, first, uid="x")),
    "a pointer outside": ("pointer-bounds", point_outside),
    "a pointer into another dataset": (
        "pointer-group",
        lambda c, first, second: copy_cell(
            c, first, uid="0" * 16, gene_expression={"zarr_group": f"{second}/gene_expression", "start": 0, "end": 1, "zarr_row": 0}
        ),
    ),
    "cells of an old dataset gone": ("cell-count", lambda c, first, _: c.tables.delete(CELLS, f"dataset_uid = '{first}'")),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("compacted", [False, True])
def test_damage_since_the_last_snapshot_is_found(two: Two, name: str, *, compacted: bool) -> None:
    """What is wrong in new or changed rows is found, also against rows that are not read again, and nothing is recorded."""
    catalog, first, second = two
    record = snapshots.snapshot(catalog)
    rule, damage = DAMAGE[name]
    damage(catalog, first, second)
    if compacted:
        optimization.optimize(catalog)
    found = validation.check_content(
        catalog.tip().hold().at(versions.consistent_versions(catalog)), "rows", catalog.at(record)
    )
    assert rule in {problem.rule for problem in found.problems}
    with pytest.raises(CorruptError, match="not sound"):
        snapshots.snapshot(catalog)
    assert snapshots.list_versions(catalog) == [record]


def test_an_unchanged_atlas_is_not_read(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of what the last one holds records the same, under its own number and label, and reads no table but the list."""
    catalog = two[0]
    first = snapshots.snapshot(catalog, "one")
    for owner, name in ((validation, "check_content"), (snapshots, "write_manifest"), (snapshots, "update_tables")):
        monkeypatch.delattr(owner, name)
    second = snapshots.snapshot(catalog, "two")
    same = {"version": 2, "label": "two", "created_at": second.created_at}
    assert second == first.model_copy(update=same).sealed()
    monkeypatch.undo()
    assert validation.validate(catalog, "deep") == []
    snapshots.drop_snapshot(catalog, "one")
    maintenance.gc(catalog, dry_run=False)
    assert not validation.validate(catalog.at(second), "deep")


@given(st.lists(st.one_of(st.integers(1, 50), st.integers(1, 2 * LARGE_ROWS)), max_size=40))
def test_fragments_are_rewritten_in_balance(rows: list[int]) -> None:
    """Large fragments stay, and where more rows than a few are rewritten together, none has more than the others together."""
    fragments = [Size(number, n) for number, n in enumerate(rows)]
    chosen = choose_fragments(fragments)
    runs: list[list[int]] = []
    for fragment in fragments:
        if fragment.number not in chosen:
            runs.append([])
        elif runs:
            runs[-1].append(fragment.rows)
        else:
            runs.append([fragment.rows])
    for run in filter(None, runs):
        assert len(run) > 1
        assert max(run) < LARGE_ROWS
        assert sum(run) <= SMALL_ROWS or 2 * max(run) <= sum(run)


def test_repeated_small_additions_rewrite_each_row_few_times() -> None:
    """Adding 1,000 rows 2,000 times rewrites a row some ten times, and leaves a handful of fragments and parts of the index."""
    fragments, parts, rewritten = [3 * LARGE_ROWS], [3 * LARGE_ROWS], 0
    for _ in range(2_000):
        fragments.append(1_000)
        n = parts_to_merge(parts, 1_000)
        parts = [*parts[: len(parts) - n], sum(parts[len(parts) - n :]) + 1_000]
        chosen = choose_fragments([Size(number, rows) for number, rows in enumerate(fragments)])
        if chosen:
            first = min(chosen)
            assert chosen == set(range(first, len(fragments)))
            rewritten += sum(fragments[first:])
            fragments = [*fragments[:first], sum(fragments[first:])]
        assert len(fragments) < 10
        assert len(parts) < 10
    assert rewritten / 2_000_000 < 40
    assert fragments[0] == 3 * LARGE_ROWS


def test_a_copied_record_says_what_its_own_facts_say(tmp_path: Path) -> None:
    """What a record keeps of its facts is not that of the record that it was copied from."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(small_anndata(1, 7), "one", progress=False)
    (record,) = assets.read_records(atlas._catalog)
    assert record.n_cells_added == 7
    assert record.feature_set
    other = record.model_copy(update={"facts": "{}", "n_cells": 3})
    assert (other.n_cells_added, other.feature_set) == (3, "")
    assert record.model_copy() == record
