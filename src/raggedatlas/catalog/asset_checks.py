"""Checks of datasets, results and geometry: registry rows, and the cells that point to them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.array_checks import check_specs, described_paths
from raggedatlas.catalog.assets import geometry_columns, is_visible, read_records, visible_columns
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.errors import AtlasError
from raggedatlas.model.assets import GeometryRecord, ResultRecord, result_columns
from raggedatlas.model.pointers import AXES, PointerKind, pointer_columns
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.validation import AtlasProblem
from raggedatlas.store.location import Location, digest_files
from raggedatlas.store.sql import equals


@dataclass
class _GroupCheck:
    """Pointers into one group, accumulated over the batches of the cell table, with one boolean per row."""

    record: DatasetRecord
    owned: bool = True
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
        """Return the problems of the group."""
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
    # Vectors are counted at level "deep" only: telling nulls from values needs the column to be decoded.
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
        AtlasProblem("pointer-group", CELLS, f"{n:,} pointers in column {column!r} lead to {group!r}, which is not a group of their dataset",
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
    """Check that the number of cells with a result is, for every dataset, the recorded one."""
    wanted = {uid: n for uid, n in record.cells_of.items() if uid in datasets}
    found = {uid: n for uid, n in found.items() if uid in datasets}
    wrong = [uid for uid in {*wanted, *found} if wanted.get(uid, 0) != found.get(uid, 0)]
    if not wrong:
        return []
    text = f"{sum(found.values()):,} cells have the result {record.name!r}, {sum(wanted.values()):,} are recorded"
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
            seen.add(mine[0], *(mine[1:] or (None, None)))
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


def check_results(catalog: Catalog, records: Sequence[ResultRecord]) -> list[AtlasProblem]:
    """Check that every result has a unique name, its column, and matching array descriptions, without reading values.

    Returns
    -------
    list of AtlasProblem
        Rules ``duplicate-result``, ``result-column``, ``unknown-space``, ``array-spec``.
    """
    schema, spaces = catalog.tables.schema(CELLS), catalog.spaces()
    problems = [
        AtlasProblem("duplicate-result", name, f"{n} results are called {name!r}", "Run restore() of a snapshot.")
        for name, n in Counter(record.name for record in records).items()
        if n > 1
    ]
    for record in records:
        problems += _check_column(record, schema)
        if record.kind == "space":
            if record.space not in spaces:
                text = f"its feature space {record.space!r} is unknown"
                problems.append(AtlasProblem("unknown-space", record.name, text, "Define it with register_space()."))
            problems += check_specs(record.as_group(stored=True), spaces.get(record.space))
    return problems


def check_values(catalog: Catalog, records: Sequence[ResultRecord]) -> list[AtlasProblem]:
    """Check every vector of the results that are stored in the cell table (rules ``result-values``, ``result-count``)."""
    there = catalog.tables.schema(CELLS).names
    vectors = {record.column: record for record in records if record.kind == "vector" and record.column in there}
    datasets = {record.uid for record in read_records(catalog)}
    bad = dict.fromkeys(vectors, 0)
    counts: dict[str, dict[str, int]] = {column: {} for column in vectors}
    for batch in catalog.tables.batches(CELLS, ["dataset_uid", *vectors]) if vectors else ():
        for column in vectors:
            count_results(batch, column, counts[column])
            flat = batch.column(column).drop_null().flatten().to_numpy(zero_copy_only=False)
            bad[column] += int(np.count_nonzero(~np.isfinite(flat)))
    problems = [problem for c, found in counts.items() for problem in check_counts(vectors[c], found, datasets)]
    return problems + [
        AtlasProblem(
            "result-values", column, f"{n:,} of its values are not finite", "Restore a snapshot, or add it again."
        )
        for column, n in bad.items()
        if n
    ]


def _check_column(record: ResultRecord, schema: pa.Schema) -> list[AtlasProblem]:
    fix = f"Drop the result with drop_result({record.name!r}) and add it again, or restore() a snapshot."

    def wrong(text: str) -> list[AtlasProblem]:
        return [AtlasProblem("result-column", record.name, text, fix)]

    if record.column not in schema.names:
        return wrong(f"the cells have no column {record.column!r}")
    if result_columns(schema).get(record.column, ("", ""))[0] != record.uid:
        return wrong(f"the column {record.column!r} is not its own")
    kind = schema.field(record.column).type
    if record.kind == "space":
        pointed = pointer_columns(schema).get(record.column, ("", None))[0]
        return [] if pointed == record.space else wrong(f"the column {record.column!r} points into {pointed!r}")
    fits = pa.types.is_fixed_size_list(kind) and kind.list_size == record.width
    fits = fits and kind.value_type == pa.from_numpy_dtype(np.dtype(record.dtype))
    return [] if fits else wrong(f"the column {record.column!r} holds {kind}, not {record.width} x {record.dtype}")


_AGAIN = "Drop it with drop_geometry({name!r}) and add it again, or restore() a snapshot."


def _problem(record: GeometryRecord, rule: str, text: str) -> AtlasProblem:
    return AtlasProblem(rule, f"{record.name} {record.zarr_group}", text, _AGAIN.format(name=record.name))


def check_geometries(catalog: Catalog, records: Sequence[GeometryRecord]) -> list[AtlasProblem]:
    """Check that store names are unique per dataset, and that every store has its column and feature space, without reading pointers.

    Returns
    -------
    list of AtlasProblem
        Rules ``duplicate-geometry``, ``geometry-column``, ``unknown-space``, ``group-name``.
    """
    schema, spaces = catalog.tables.schema(CELLS), catalog.spaces()
    pointers, columns = pointer_columns(schema), set(geometry_columns(schema))
    problems = []
    for (name, uid), n in Counter((r.name, uid) for r in records for uid in r.cells_of).items():
        if n > 1:
            text = f"{n} stores called {name!r} have shapes of the dataset {uid}"
            problems.append(AtlasProblem("duplicate-geometry", name, text, "Run restore() of a snapshot."))
    for record in records:
        if record.column not in columns or pointers[record.column][0] != record.space:
            text = f"the cells have no column {record.column!r} of pointers into {record.space!r}"
            problems.append(_problem(record, "geometry-column", text))
        if record.space not in spaces:
            problems.append(_problem(record, "unknown-space", f"its feature space {record.space!r} is unknown"))
        if record.zarr_group != f"{record.uid}/{record.space}":
            problems.append(_problem(record, "group-name", f"the group is not {record.uid}/{record.space}"))
    return problems


def check_shapes(catalog: Catalog, records: Sequence[GeometryRecord]) -> list[AtlasProblem]:
    """Check every visible store's root, and the pointers of the cells to it.

    Pointers to an unregistered store are not a problem: nothing follows them, and `repair` removes them.

    Returns
    -------
    list of AtlasProblem
        Rules ``missing-store``, ``geometry-count``, ``geometry-box``, ``geometry-object``.
    """
    known = {record.uid for record in read_records(catalog)}
    schema = catalog.tables.schema(CELLS)
    problems = []
    for record in records:
        if not is_visible(record, known) or record.column not in schema.names:
            continue
        try:
            catalog.arrays.child(*record.zarr_group.split("/")).read_bytes("zarr.json")
        except AtlasError as error:
            problems.append(_problem(record, "missing-store", f"its root cannot be read: {error}"))
        where = equals(f"{record.column}.zarr_group", record.zarr_group)
        rows = catalog.tables.read(CELLS, ["dataset_uid", record.column], where)
        rows = rows.filter(pc.is_in(rows.column("dataset_uid"), value_set=pa.array(sorted(known), pa.string())))
        problems += _check_pointers(record, rows, known)
    return problems


def _check_pointers(record: GeometryRecord, rows: pa.Table, known: set[str]) -> list[AtlasProblem]:
    problems = []
    counts = {e["values"]: e["counts"] for e in pc.value_counts(rows.column("dataset_uid")).to_pylist()}
    wanted = {uid: n for uid, n in record.cells_of.items() if uid in known}
    if counts != {uid: n for uid, n in wanted.items() if n}:
        text = f"{sum(counts.values()):,} cells point to it, {sum(wanted.values()):,} are recorded"
        problems.append(_problem(record, "geometry-count", text))
    pointers = rows.column(1).combine_chunks()
    ids = pc.struct_field(pointers, "object_id")
    n_twice = len(ids) - pc.count_distinct(ids, mode="all").as_py()
    level = pc.fill_null(pc.struct_field(pointers, "level"), -1).to_numpy()
    bad = ids.null_count + int(np.count_nonzero((level < 0) | (level >= record.n_levels)))
    if n_twice or bad:
        text = f"{n_twice:,} cells share an object with another cell, {bad:,} have no object or a level that does not exist"
        problems.append(_problem(record, "geometry-object", text))
    wrong = 0
    for axis in AXES:
        least, greatest = (
            pc.struct_field(pointers, f"{axis}_{end}").to_numpy(zero_copy_only=False) for end in ("min", "max")
        )
        there = ~(np.isnan(least) & np.isnan(greatest))
        wrong += int(np.count_nonzero(there & ~((least <= greatest) & np.isfinite(least) & np.isfinite(greatest))))
    if wrong:
        problems.append(_problem(record, "geometry-box", f"{wrong:,} boxes are not finite, or end before they begin"))
    return problems


def check_store(arrays: Location, record: GeometryRecord) -> list[AtlasProblem]:
    """Check every byte of a visible store (rule ``store-files``)."""
    try:
        n_files, n_bytes, digest = digest_files(arrays.child(*record.zarr_group.split("/")))
    except AtlasError as error:
        return [_problem(record, "store-files", f"it cannot be read: {error}")]
    if digest == record.digest:
        return []
    text = f"its {n_files:,} files of {n_bytes:,} bytes are not the {record.n_files:,} of {record.n_bytes:,} that were written"
    return [_problem(record, "store-files", text)]
