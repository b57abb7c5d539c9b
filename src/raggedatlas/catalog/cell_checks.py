"""Checks over the rows of the cell table, in one walk and in memory of one bit per cell."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.array_checks import described_paths
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.results import visible_columns
from raggedatlas.model.assets import ResultRecord, result_columns
from raggedatlas.model.pointers import PointerKind, pointer_columns
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.reports import AtlasProblem


@dataclass
class _GroupCheck:
    """What the walk has seen of one group."""

    record: DatasetRecord
    owned: bool = True
    rows: NDArray[np.bool_] = field(init=False)
    n: int = 0
    n_entries: int = 0
    outside: int = 0
    repeated: int = 0

    def __post_init__(self) -> None:
        self.rows = np.zeros(max(0, self.record.n_cells), bool)

    def take(self, at: NDArray[np.int64], start: NDArray[np.int64] | None, end: NDArray[np.int64] | None) -> None:
        """Take in some cells' pointers."""
        self.n += len(at)
        good = (at >= 0) & (at < self.record.n_cells)
        if start is not None and end is not None:
            inside = (start >= 0) & (start <= end) & (end <= self.record.n_entries)
            self.n_entries += int((end - start)[inside].sum())
            self.outside += int((~inside).sum())
        self.outside += int((~good).sum())
        unique, counts = np.unique(at[good], return_counts=True)
        self.repeated += int((counts - 1).sum()) + int(self.rows[unique].sum())
        self.rows[unique] = True

    def problems(self) -> list[AtlasProblem]:
        """Say what was wrong."""
        record, found = self.record, []
        drop = f"Drop the dataset with drop_dataset({record.uid!r}) and add it again, or restore() a snapshot."
        if not self.owned:
            drop = f"Drop the result with drop_result({record.name!r}) and add it again, or restore() a snapshot."
        if self.outside:
            found.append(
                AtlasProblem(
                    "pointer-bounds", record.zarr_group, f"{self.outside:,} pointers lie outside the arrays", drop
                )
            )
        if self.repeated:
            found.append(
                AtlasProblem(
                    "pointer-rows", record.zarr_group, f"{self.repeated:,} cells share a row with another cell", drop
                )
            )
        if self.owned and self.n != record.n_cells:
            text = f"{self.n:,} cells point into a group that holds {record.n_cells:,}"
            found.append(AtlasProblem("cell-count", record.zarr_group, text, drop))
        elif self.n_entries != record.n_entries and "csr/indices" in described_paths(record) and not self.outside:
            text = f"the cells' ranges hold {self.n_entries:,} entries together, the group has {record.n_entries:,}"
            found.append(AtlasProblem("pointer-bounds", record.zarr_group, text, drop))
        return found


def check_rows(catalog: Catalog, records: Sequence[DatasetRecord]) -> list[AtlasProblem]:
    """Check the ids and pointers of every cell against the inventory.

    Parameters
    ----------
    catalog : Catalog
        Pinned.
    records : sequence of DatasetRecord
        The inventory.

    Returns
    -------
    list of AtlasProblem
        Rules ``pointer-bounds``, ``pointer-rows``, ``pointer-group``, ``cell-count``, ``cell-uid``, ``duplicate-uid``,
        ``uncommitted-cells``, ``result-count``.
    """
    schema = catalog.tables.schema(CELLS)
    visible = visible_columns(catalog)
    marked = result_columns(schema)
    pointers = {name: of for name, of in pointer_columns(schema).items() if name not in marked or name in visible}
    shapes = {name for name, (_, kind) in pointers.items() if kind is PointerKind.GEOMETRY}
    pointers = {name: of for name, of in pointers.items() if name not in shapes}
    groups = {record.zarr_group: _GroupCheck(record) for record in records if record.pointer not in shapes}
    groups |= {r.zarr_group: _GroupCheck(r.as_group(), owned=False) for r in visible.values() if r.zarr_group}
    # vectors are counted where every byte is read: to tell null from values their column must be decoded
    pointing = [column for column, record in visible.items() if record.kind == "space" and column in schema.names]
    counts: dict[str, dict[str, int]] = {column: {} for column in pointing}
    datasets = {record.uid for record in records}
    uids: list[pa.Array] = []
    uncommitted: dict[str, int] = {}
    foreign: dict[tuple[str, str], int] = {}
    for batch in catalog.tables.batches(CELLS, list(dict.fromkeys(["uid", "dataset_uid", *pointers, *counts]))):
        known = pc.is_in(batch.column("dataset_uid"), value_set=pa.array(list(datasets), pa.string()))
        for entry in pc.value_counts(batch.column("dataset_uid").filter(pc.invert(known))).to_pylist():
            uncommitted[str(entry["values"])] = uncommitted.get(str(entry["values"]), 0) + entry["counts"]
        rows = batch.filter(known)
        uids.append(rows.column("uid"))
        for name, (_, kind) in pointers.items():
            _take_pointers(rows, name, kind, groups, foreign)
        for name, found in counts.items():
            count_results(rows, name, found)
    problems = [
        AtlasProblem("uncommitted-cells", CELLS, f"{n:,} cells of dataset {uid} have no record: an add is under way, or died",
                "If it died, run repair().")
        for uid, n in uncommitted.items()
    ]  # fmt: skip
    problems += [
        AtlasProblem("pointer-group", CELLS, f"{n:,} pointers in column {column!r} lead to {group!r}, which is no group of their dataset",
                "Restore a snapshot, or drop the dataset and add it again.")
        for (column, group), n in foreign.items()
    ]  # fmt: skip
    problems += [problem for seen in groups.values() for problem in seen.problems()]
    for name, found in counts.items():
        problems += check_counts(visible[name], found, datasets)
    return problems + _check_uids(uids)


def count_results(rows: pa.RecordBatch, name: str, found: dict[str, int]) -> None:
    """Count the cells of every dataset that have a value in a column."""
    having = rows.column("dataset_uid").filter(pc.is_valid(rows.column(name)))
    for entry in pc.value_counts(having).to_pylist():
        found[entry["values"]] = found.get(entry["values"], 0) + entry["counts"]


def check_counts(record: ResultRecord, found: Mapping[str, int], datasets: AbstractSet[str]) -> list[AtlasProblem]:
    """Check that as many cells of every dataset have a result as when it was added."""
    wanted = {uid: n for uid, n in record.cells_of.items() if uid in datasets}
    found = {uid: n for uid, n in found.items() if uid in datasets}
    wrong = [uid for uid in {*wanted, *found} if wanted.get(uid, 0) != found.get(uid, 0)]
    if not wrong:
        return []
    text = f"{sum(found.values()):,} cells have the result {record.name!r}, {sum(wanted.values()):,} were given it"
    fix = f"Drop the result with drop_result({record.name!r}) and add it again, or restore() a snapshot."
    return [AtlasProblem("result-count", record.column, text, fix)]


def _take_pointers(
    rows: pa.RecordBatch,
    name: str,
    kind: PointerKind,
    groups: Mapping[str, _GroupCheck],
    foreign: dict[tuple[str, str], int],
) -> None:
    rows = rows.filter(pc.is_valid(rows.column(name)))
    pointer = rows.column(name)
    path = pc.fill_null(pc.struct_field(pointer, "zarr_group"), "").dictionary_encode()
    codes = path.indices.to_numpy()
    owner = rows.column("dataset_uid")
    parts = ("zarr_row", "start", "end") if kind is PointerKind.SPARSE else ("position",)
    values = [pc.fill_null(pc.struct_field(pointer, part), -1).to_numpy() for part in parts]
    for code, group in enumerate(path.dictionary.to_pylist()):
        here = codes == code
        seen = groups.get(group)
        if seen is not None and seen.record.pointer in {"", name}:
            if seen.owned:
                here &= pc.equal(owner, seen.record.uid).to_numpy(zero_copy_only=False)
            mine = [value[here] for value in values]
            seen.take(mine[0], *(mine[1:] or (None, None)))
            here = (codes == code) & ~here
        if here.any():
            foreign[name, group] = foreign.get((name, group), 0) + int(here.sum())


def _check_uids(uids: list[pa.Array]) -> list[AtlasProblem]:
    every = pa.chunked_array(uids, pa.string())
    bad = len(every) - (pc.sum(pc.match_substring_regex(every, "^[0-9a-f]{16}$")).as_py() or 0)
    problems = []
    if bad:
        problems.append(
            AtlasProblem("cell-uid", CELLS, f"{bad:,} cell uids are not 16 hex digits", "Restore a snapshot.")
        )
    n_twice = len(every) - pc.count_distinct(every, mode="all").as_py()
    if n_twice:
        counts = pc.value_counts(every)
        twice = counts.filter(pc.greater(pc.struct_field(counts, "counts"), 1))
        shown = pc.struct_field(twice, "values").to_pylist()[:3]
        problems.append(
            AtlasProblem(
                "duplicate-uid",
                CELLS,
                f"{n_twice:,} cells bear the uid of another cell, e.g. {shown}",
                "Restore a snapshot.",
            )
        )
    return problems
