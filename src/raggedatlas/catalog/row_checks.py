"""Checks of the rows of the cell table: ids, pointers, counts and values, of all rows or of those that changed since a snapshot."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.array_checks import BACK, described_paths
from raggedatlas.catalog.assets import read_assets, read_records, read_specs
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.cells import count_cells, in_datasets
from raggedatlas.model.assets import deleted_counts, result_columns
from raggedatlas.model.ids import uid_numbers
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.spaces import PointerKind, SparseZarrPointer, pointer_columns
from raggedatlas.model.validation import Problem
from raggedatlas.store.read import ArrayReader, read_slice
from raggedatlas.store.sql import equals, in_list
from raggedatlas.store.storage_errors import check_rows as checked
from raggedatlas.store.storage_errors import lance_errors
from raggedatlas.store.tables import Tables, index_serves

if TYPE_CHECKING:
    import lance

_LOOKED_UP = 10_000
"""Most uids that are looked up in the index of the cells; for more, their column is read."""

_FILTERED = 500
"""Most datasets whose rows are read by a filter that lists them."""


@dataclass
class _GroupCheck:
    """Pointers into one group, accumulated over the batches of the cell table, with one boolean per row.

    Deleted cells leave as many rows, and entries of these, without a pointer. `drop` is the call that drops what is
    attached to cells of several datasets; empty for a group of one.
    """

    record: DatasetRecord
    drop: str = ""
    deleted: tuple[int, int] = (0, 0)
    rows: NDArray[np.bool_] = field(init=False)
    n: int = 0
    n_entries: int = 0
    outside: int = 0
    repeated: int = 0

    def __post_init__(self) -> None:
        self.rows = np.zeros(max(0, self.record.n_cells), bool)

    def add(self, at: NDArray[np.int64], start: NDArray[np.int64] | None, end: NDArray[np.int64] | None) -> None:
        """Add the pointers of a batch of cells."""
        self.n += len(at)
        # Only these may index `rows`; a null is -1.
        good = (at >= 0) & (at < self.record.n_cells)
        if start is not None and end is not None:
            inside = (start >= 0) & (start <= end) & (end <= self.record.n_entries)
            self.n_entries += int((end - start)[inside].sum())
            self.outside += int((~inside).sum())
        self.outside += int((~good).sum())
        # A row is repeated within this batch, or because `rows` has it from an earlier one.
        unique, counts = np.unique(at[good], return_counts=True)
        self.repeated += int((counts - 1).sum()) + int(self.rows[unique].sum())
        self.rows[unique] = True

    def problems(self) -> list[Problem]:
        """Return the problems of the group."""
        record, found = self.record, []
        call = self.drop or f"drop_dataset({record.uid!r})"
        drop = f"Drop it with {call} and add it again, or restore() a snapshot."
        if self.outside:
            text = f"{self.outside:,} pointers lie outside the arrays"
            found.append(Problem("pointer-bounds", "must", record.zarr_group, text, drop))
        if self.repeated:
            text = f"{self.repeated:,} cells share a row with another cell"
            found.append(Problem("pointer-rows", "must", record.zarr_group, text, drop))
        n_cells, n_entries = record.n_cells - self.deleted[0], record.n_entries - self.deleted[1]
        if not self.drop and self.n != n_cells:
            less = f", of which {self.deleted[0]:,} were deleted" if self.deleted[0] else ""
            text = f"{self.n:,} cells point into a group that holds {record.n_cells:,}{less}"
            found.append(Problem("cell-count", "must", record.zarr_group, text, drop))
        # With cells missing or outside, the sum of entries differs for that reason and is no problem of its own.
        elif self.n_entries != n_entries and "csr/indices" in described_paths(record) and not self.outside:
            text = f"the cells' ranges hold {self.n_entries:,} entries together, the group has {n_entries:,}"
            found.append(Problem("pointer-bounds", "must", record.zarr_group, text, drop))
        return found


@dataclass(frozen=True)
class Changed:
    """Fragments of a table that differ between two of its versions, by their data files and deletion files.

    `now` and `then` are the table at the versions.
    """

    now: "lance.LanceDataset"
    then: "lance.LanceDataset"
    fresh: "list[lance.LanceFragment]"  # of the newer version: those that the older one does not have
    kept: "list[lance.LanceFragment]"  # of the newer version: those that the older one has, too
    gone: "list[lance.LanceFragment]"  # of the older version: those that the newer one does not have

    @classmethod
    def between(cls, name: str, tables: Tables, before: Tables | None) -> "Changed":
        """Compare a table at two versions; without an older one, everything is fresh."""
        now, then = tables.open(name), (before or tables).open(name)
        mine = {_files(fragment): fragment for fragment in now.get_fragments()}
        old = {} if before is None else {_files(fragment): fragment for fragment in then.get_fragments()}
        return cls(
            now,
            then,
            [fragment for key, fragment in mine.items() if key not in old],
            [fragment for key, fragment in mine.items() if key in old],
            [fragment for key, fragment in old.items() if key not in mine],
        )

    def values(self, column: str) -> set[str]:
        """Return the values of a column of text in the rows that came, went or changed."""
        found: set[str] = set()
        for table, fragments in ((self.now, self.fresh), (self.then, self.gone)):
            for batch in _scan(table, fragments, [column]):
                found.update(batch.column(0).unique().to_pylist())
        return found


def _files(fragment: "lance.LanceFragment") -> str:
    """Return what the rows of a fragment are in: its files, which never change."""
    facts = fragment.metadata
    return f"{[(file.path, file.fields) for file in facts.files]} {facts.deletion_file}"


def _scan(
    table: "lance.LanceDataset",
    fragments: "list[lance.LanceFragment]",
    columns: Sequence[str],
    where: str | None = None,
) -> Iterator[pa.RecordBatch]:
    """Read some columns of some fragments, a bounded number of rows at a time."""
    if fragments:
        with lance_errors(table.uri):
            # Reading far ahead takes memory and, from a disk, saves no time.
            scanner = table.scanner(
                columns=[*columns], fragments=fragments, filter=where, batch_readahead=4, fragment_readahead=4,
                use_scalar_index=index_serves(table, where),
            )  # fmt: skip
            for batch in scanner.to_batches():
                yield checked(batch, table.uri)


@dataclass(frozen=True)
class CellCheck:
    """What a check of the rows of the cell table found.

    Rules ``pointer-bounds``, ``pointer-rows``, ``pointer-group``, ``cell-count``, ``cell-uid``, ``duplicate-uid``,
    ``uncommitted-cells``, and of assets ``result-count`` and the like.
    """

    problems: list[Problem]
    touched: set[str] | None  # datasets all of whose rows were looked at; None is all
    counts: dict[str, int]  # rows of each of these now, in table order and with those of datasets without a record
    before: dict[str, int]  # rows of each of these at the earlier version


class _Walk:
    """What the batches of the cell table say, against the records of the datasets."""

    def __init__(self, catalog: Catalog, records: Sequence[DatasetRecord]) -> None:
        schema = catalog.tables.schema(CELLS)
        assets = [(kind, one, kind.group(one)) for kind, found in read_assets(catalog).items() for one in found]
        self._catalog, self._assets = catalog, {one.column: (kind, one, group) for kind, one, group in assets if group}
        marked = result_columns(schema)
        # A marked column without a record belongs to an `add` of a result that is under way or died: nobody reads it.
        pointers = {n: of for n, of in pointer_columns(schema).items() if n not in marked or n in self._assets}
        shapes = {name for name, (_, kind) in pointers.items() if kind is PointerKind.GEOMETRY}
        self._pointers = {name: kind for name, (_, kind) in pointers.items() if name not in shapes}
        deletions = catalog.deletions() if records else ()
        self._groups = {
            record.zarr_group: _GroupCheck(record, deleted=deleted_counts(deletions, record.uid, record.zarr_group))
            for record in records
            if record.pointer not in shapes
        }
        # An asset has one array for all datasets: its pointers come from any of them, and need not use every row.
        self._groups |= {
            group.zarr_group: _GroupCheck(group, drop=kind.drop_call(one)) for kind, one, group in self._assets.values()
        }
        self._counts: dict[str, dict[str, int]] = {column: {} for column in self._assets if column in schema.names}
        self._datasets = {record.uid for record in records}
        self._foreign: dict[tuple[str, str], int] = {}
        self.counts: dict[str, int] = {}
        self.columns = list(dict.fromkeys(["uid", "dataset_uid", *self._pointers, *self._counts]))

    def add(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Add some rows, and return those of datasets with a record."""
        count_cells(batch.column("dataset_uid"), self.counts)
        rows = batch.filter(in_datasets(batch, self._datasets))
        for name, kind in self._pointers.items():
            pointing = rows.filter(pc.is_valid(rows.column(name)))
            pointer, owner = pointing.column(name), pointing.column("dataset_uid")
            path = pc.fill_null(pc.struct_field(pointer, "zarr_group"), "").dictionary_encode()
            codes = path.indices.to_numpy()
            parts = ("zarr_row", "start", "end") if kind is PointerKind.SPARSE else ("position",)
            values = [pc.fill_null(pc.struct_field(pointer, part), -1).to_numpy() for part in parts]
            for code, group in enumerate(path.dictionary.to_pylist()):
                here = codes == code
                seen = self._groups.get(group)
                if seen is not None and seen.record.pointer in {"", name}:
                    if not seen.drop:
                        here &= pc.equal(owner, seen.record.uid).to_numpy(zero_copy_only=False)
                    mine = [value[here] for value in values]
                    seen.add(mine[0], *(mine[1:] or (None, None)))
                    # What is left points into a group of another dataset.
                    here = (codes == code) & ~here
                if here.any():
                    self._foreign[name, group] = self._foreign.get((name, group), 0) + int(here.sum())
        for name, found in self._counts.items():
            count_cells(rows.column("dataset_uid").filter(pc.is_valid(rows.column(name))), found)
        return rows

    def problems(self, touched: AbstractSet[str] | None) -> list[Problem]:
        """Return the problems of some datasets, all of whose rows were added, or of all."""
        known = self._datasets
        problems = [
            Problem("uncommitted-cells", "practice", CELLS, f"{n:,} cells of dataset {uid} have no record: an add is under way, or died",
                    "If it died, run repair().")
            for uid, n in self.counts.items() if uid not in known
        ]  # fmt: skip
        problems += [
            Problem("pointer-group", "must", CELLS, f"{n:,} pointers in column {column!r} lead to {group!r}, which is not a group of their dataset",
                    "Restore a snapshot, or drop the dataset and add it again.")
            for (column, group), n in self._foreign.items()
        ]  # fmt: skip
        for group in self._groups.values():
            if touched is None or group.drop or group.record.uid in touched:
                problems += group.problems()
        looked_at = known if touched is None else known & touched
        for name, found in self._counts.items():
            kind, one, _ = self._assets[name]
            problems += kind.check_counts(self._catalog, one, found, looked_at)
        return problems


def check_rows(
    catalog: Catalog,
    records: Sequence[DatasetRecord],
    before: Catalog | None = None,
    suspects: AbstractSet[str] = frozenset(),
) -> CellCheck:
    """Check the ids and pointers of cells against the records of the datasets.

    Of all cells, or of the datasets whose rows have changed. `catalog` is pinned, and `records` are those of all
    datasets. `before` is a snapshot that was checked: rows in files that it has, too, are only read of datasets some of
    whose rows are in others; uids of new cells are compared with all. `suspects` are looked at even if none of their
    rows has changed, because their records have.
    """
    walk = _Walk(catalog, records)
    if before is not None and walk.columns != _Walk(before, ()).columns:
        before = None
    change = Changed.between(CELLS, catalog.tables, None if before is None else before.tables)
    uids, old_uids = (_Uids(sum(f.count_rows() for f in fragments)) for fragments in (change.fresh, change.gone))
    for batch in _scan(change.now, change.fresh, walk.columns):
        uids.add(walk.add(batch).column("uid"))
    counts_before: dict[str, int] = {}
    touched = None
    if before is not None:
        for batch in _scan(change.then, change.gone, ["uid", "dataset_uid"]):
            old_uids.add(batch.column("uid"))
            count_cells(batch.column("dataset_uid"), counts_before)
        touched = {*walk.counts, *counts_before, *suspects}
        # Add the rows of touched datasets in fragments that have not changed; `counts_before` has the earlier rows in the others.
        deleted = before.n_deleted()
        totals = {record.uid: record.n_cells_added - deleted.get(record.uid, 0) for record in read_records(before)}
        # Of a dataset without a record it is not known how many rows there were.
        totals |= dict.fromkeys(before.snapshot.ignored if before.snapshot else (), np.iinfo(np.int64).max)
        wanted = [uid for uid in touched if counts_before.get(uid, 0) < totals.get(uid, 0)]
        where = in_list("dataset_uid", wanted) if len(wanted) <= _FILTERED else None
        for batch in _scan(change.now, change.kept, walk.columns, where) if wanted else ():
            own = batch.filter(in_datasets(batch, wanted))
            walk.add(own)
            count_cells(own.column("dataset_uid"), counts_before)
    problems = walk.problems(touched) + uids.problems() + uids.problems_with(change, old_uids)
    return CellCheck(problems, touched, walk.counts, counts_before)


class _Uids:
    """Uids of cells as numbers: 8 bytes each."""

    def __init__(self, n: int) -> None:
        self._numbers = np.empty(n, np.uint64)
        self._n, self._bad = 0, 0

    def add(self, uids: pa.Array) -> None:
        """Add the uids of some rows."""
        numbers, valid = uid_numbers(uids)
        numbers = numbers if valid.all() else numbers[valid]
        self._numbers[self._n : self._n + len(numbers)] = numbers
        self._n += len(numbers)
        self._bad += len(valid) - len(numbers)

    def sorted(self) -> NDArray[np.uint64]:
        """Return all of them, in order."""
        self._numbers = self._numbers[: self._n]
        self._numbers.sort()
        return self._numbers

    def problems(self) -> list[Problem]:
        """Return the problems of the uids among each other."""
        problems = []
        if self._bad:
            text = f"{self._bad:,} cell uids are not 16 hex digits"
            problems.append(Problem("cell-uid", "must", CELLS, text, "Restore a snapshot."))
        numbers = self.sorted()
        return problems + _repeated(numbers[1:][numbers[1:] == numbers[:-1]])

    def problems_with(self, change: Changed, old: "_Uids") -> list[Problem]:
        """Return the problem of uids that cells in unchanged fragments have, too, apart from those that were in others before."""
        if not change.kept:
            return []
        there = old.sorted()
        new = self.sorted()
        new = new[~_among(new, there)]
        if not len(new):
            return []
        indexed = any(index.name == "uid_btree_idx" for index in change.now.describe_indices())
        wheres: Sequence[str | None] = [None]
        if indexed and len(new) <= _LOOKED_UP:
            texts = [f"{number:016x}" for number in new.tolist()]
            wheres = [in_list("uid", texts[at : at + 1000]) for at in range(0, len(texts), 1000)]
        found = []
        for where in wheres:
            for batch in _scan(change.now, change.kept, ["uid"], where):
                numbers, valid = uid_numbers(batch.column(0))
                found.append(numbers[valid & _among(numbers, new)])
        return _repeated(np.concatenate([*found, np.empty(0, np.uint64)]))


def _among(numbers: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which numbers are among some in ascending order."""
    if not len(known):
        return np.zeros(len(numbers), np.bool_)
    found: NDArray[np.bool_] = known[np.minimum(np.searchsorted(known, numbers), len(known) - 1)] == numbers
    return found


def _repeated(numbers: NDArray[np.uint64]) -> list[Problem]:
    if not len(numbers):
        return []
    shown = [f"{number:016x}" for number in np.unique(numbers)[:3].tolist()]
    text = f"{len(numbers):,} cells bear the uid of another cell, e.g. {shown}"
    return [Problem("duplicate-uid", "must", CELLS, text, "Restore a snapshot.")]


def check_pointers(catalog: Catalog, record: DatasetRecord) -> list[Problem]:
    """Compare the pointers of the cells with the bounds of the rows of a group whose arrays are sound (rule ``pointer-bounds``)."""
    if not record.pointer or "csr/indptr" not in described_paths(record):
        return []
    spec = read_specs(record)["csr/indptr"]
    indptr = read_slice(ArrayReader(catalog.arrays, spec), 0, spec.n_rows)
    rows = catalog.tables.read(CELLS, [record.pointer], equals("dataset_uid", record.uid))
    pointer = rows.column(record.pointer).combine_chunks()
    # A damaged record names a column of another kind, in which `check_rows` misses the rows.
    if pointer.type != SparseZarrPointer.arrow_type:
        return []
    pointer = pointer.filter(pc.equal(pc.struct_field(pointer, "zarr_group"), record.zarr_group))
    row, start, end = (pc.struct_field(pointer, part).to_numpy() for part in ("zarr_row", "start", "end"))
    # Other rows would index beyond `indptr`; `check_rows` reports them.
    good = (row >= 0) & (row < len(indptr) - 1)
    row, start, end = row[good], start[good], end[good]
    n = int(np.count_nonzero((indptr[row] != start) | (indptr[row + 1] != end)))
    text = f"{n:,} pointers are not where csr/indptr has their rows"
    return [Problem("pointer-bounds", "must", record.zarr_group, text, BACK)] if n else []
