"""The cells of a query (filter, search, sample, sort, limit), and what comes with them: members of obsm, results, centroids, colors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import find_geometries, group_by_dataset, read_records, read_specs, rows_of_stores
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.terms import term_source
from raggedatlas.errors import CorruptError, QueryError
from raggedatlas.model.assets import VALUES, ResultRecord, annotation_columns, result_columns
from raggedatlas.model.frames import (
    DATASET,
    IDS,
    ColumnFacts,
    arrow_to_series,
    column_stacks,
    facts_of,
    metadata_columns,
    nan_to_null,
    remove_unused_categories,
)
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.spaces import AXES, FeatureSpace, PointerKind, pointer_columns
from raggedatlas.query.modalities import DEFAULT_SPACE, CellPointers, join_dtypes, pointer_column
from raggedatlas.query.read_plan import GroupPlan, InMemoryRows, PartPlan, QuerySpec, ReadPlan, SpacePlan
from raggedatlas.store.arrays import ArraySpec
from raggedatlas.store.filters import Columns, Filter, warn_of_unknown
from raggedatlas.store.read import ArrayReader
from raggedatlas.store.runtime import release_unused_memory
from raggedatlas.store.sql import in_list
from raggedatlas.store.sql_parser import as_filter, to_sql
from raggedatlas.store.tables import ROW_ID, Tables, walk

if TYPE_CHECKING:
    pass

_NAMES = ("uid", "cell_name")

DATASET_UID = "dataset_uid"
"""Column of the cell table that names the dataset of each cell."""


@dataclass(frozen=True, eq=False)
class DatasetNames:
    """All datasets of an atlas, in the order in which they were added.

    Parameters
    ----------
    uids : tuple of str
        Their uids.
    codes : (n_datasets,) int32
        Position of each name in `distinct`.
    distinct : pyarrow.Array of str
        The names; datasets may share one.
    """

    uids: tuple[str, ...]
    codes: NDArray[np.int32]
    distinct: pa.Array

    @classmethod
    def of(cls, datasets: Mapping[str, str]) -> "DatasetNames":
        """Number the names of datasets; `datasets` maps uids to names."""
        position: dict[str, int] = {}
        codes = [position.setdefault(name, len(position)) for name in datasets.values()]
        return cls(tuple(datasets), np.array(codes, np.int32), pa.array(list(position), pa.string()))


@dataclass(frozen=True)
class Cells:
    """Selected cells with some of their columns.

    Parameters
    ----------
    table : pyarrow.Table
        One row per cell; stored columns and pointers as ``<column>.<part>``.
    dataset_code : (n_cells,) int32
        Position of each cell's dataset in `datasets`.
    datasets : DatasetNames
        Every dataset of the atlas.
    rank : pyarrow.Table
        Columns that a search adds: distance or score of each cell; no columns without a search.
    """

    table: pa.Table
    dataset_code: NDArray[np.int32]
    datasets: DatasetNames
    rank: pa.Table

    @property
    def n(self) -> int:
        """Number of cells."""
        return len(self.dataset_code)

    def take(self, rows: NDArray[np.int64]) -> "Cells":
        """Keep some cells, in the order given."""
        at = pa.array(rows)
        rank = self.rank.take(at) if self.rank.num_columns else self.rank
        return Cells(self.table.take(at), self.dataset_code[rows], self.datasets, rank)

    def names(self) -> pa.DictionaryArray:
        """Return the dataset name of each cell, as a dictionary array in the order in which the datasets were added."""
        codes = self.datasets.codes[self.dataset_code]
        return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), self.datasets.distinct)

    def column(self, columns: Columns, name: str) -> pa.ChunkedArray:
        """Return a column by its public name, `dataset` included; NaN becomes null."""
        if name == DATASET:
            return pa.chunked_array([self.names().cast(pa.string())])
        return nan_to_null(self.table.column(columns.stored(name)))

    def pointers(self, schema: pa.Schema) -> CellPointers:
        """Return the array positions of the cells, for every pointer column that was read."""
        found = {}
        for name, (_, kind) in pointer_columns(schema).items():
            first, last = pointer_parts(name, kind)
            if first in self.table.column_names:
                start = self.table.column(first)
                valid = start.is_valid().to_numpy()
                # A null pointer becomes the empty range [0, 0).
                starts = _numbers(start)
                ends = starts + valid if kind is PointerKind.DENSE else _numbers(self.table.column(last))
                found[name] = (starts, ends, valid)
        return CellPointers(self.dataset_code, self.datasets.uids, found)


def _numbers(column: pa.ChunkedArray) -> NDArray[np.int64]:
    values: NDArray[np.int64] = (column.fill_null(0) if column.null_count else column).to_numpy()
    return values


def cell_columns(catalog: Catalog) -> Columns:
    """Return the columns that a query may name."""
    datasets = group_by_dataset(read_records(catalog))
    names = {uid: records[0].name or uid for uid, records in datasets.items()}
    layouts = {uid: _layouts(records) for uid, records in datasets.items()}
    return Columns(catalog.tables.schema(CELLS), names, layouts, term_source(catalog))


def _layouts(records: Sequence[DatasetRecord]) -> tuple[str, ...]:
    """Return the feature layouts of a dataset: that of its genes first, those of single layers that are stored apart last."""
    ordered = sorted(records, key=lambda r: ("__" in pointer_column(r), r.feature_space != DEFAULT_SPACE))
    return tuple(dict.fromkeys(record.layout_uid for record in ordered if record.layout_uid))


def metadata_names(columns: Columns, asked: Sequence[str] | None) -> tuple[str, ...]:
    """Return the stored names of the requested metadata columns; None requests all.

    Raises
    ------
    QueryError
        For an unknown column or a pointer column.
    """
    if asked is None:
        return tuple(metadata_columns(columns.schema))
    pointers = pointer_columns(columns.schema)
    vectors = result_columns(columns.schema)
    found = [columns.stored(name) for name in asked if name != DATASET]
    wrong = [name for name in found if name in pointers]
    if wrong:
        raise QueryError(f"obs({wrong[0]!r}) names a pointer column; ask for its values with .spaces({wrong[0]!r}).")
    held = [name for name in found if name in vectors]
    if held:
        raise QueryError(f"obs({held[0]!r}) names a result of a model; take it along with .with_results({held[0]!r}).")
    return tuple(dict.fromkeys(name for name in found if name not in {"uid", "cell_name"}))


def read_cells(
    catalog: Catalog,
    spec: QuerySpec,
    columns: Columns,
    more: Sequence[str],
    pointers: Sequence[str],
    *,
    bounded: bool = False,
    ids: NDArray[np.uint64] | None = None,
) -> Cells:
    """Read the cells that the filters keep, in table order; cells of datasets without a record are invisible.

    Parameters
    ----------
    catalog : Catalog
        At a version.
    spec : QuerySpec
        Its filters are used here.
    columns : Columns
        What may be named.
    more : sequence of str
        Stored columns to read in addition to the ids.
    pointers : sequence of str
        Pointer columns to read.
    bounded : bool
        Whether to read in the least memory, and names of cells only where `more` asks for them.
    ids : (k,) uint64, or None
        Stable row ids: read these cells only, which the filters keep, in this order.
    """
    schema = columns.schema
    kinds = pointer_columns(schema)
    parts = [part for name in pointers if name in kinds for part in dict.fromkeys(pointer_parts(name, kinds[name][1]))]
    wanted = list(dict.fromkeys([*(() if bounded else _NAMES), DATASET_UID, *more, *parts]))
    where = to_sql(spec.filters, columns)
    uids = pa.array(list(columns.datasets), pa.string())
    if ids is None and bounded and (bare := _walk_cells(catalog, wanted, where, uids)) is not None:
        table, codes = bare
    elif ids is not None:
        table = read_rows(catalog.tables, wanted, where, ids)
        codes = pc.index_in(table.column(DATASET_UID), value_set=uids)
    else:
        table = catalog.tables.read(CELLS, wanted, where, row_ids=True)
        codes = pc.index_in(table.column(DATASET_UID), value_set=uids)
    # Cells of a dataset without a record are left by an `add` that is under way or was killed.
    if codes.null_count:
        table, codes = table.filter(codes.is_valid()), codes.drop_null()
    if ids is None:
        warn_of_values(catalog, spec, columns, len(codes))
    code = codes.to_numpy().astype(np.int32, copy=False)
    del codes
    release_unused_memory()
    return Cells(table, code, DatasetNames.of(columns.datasets), pa.table({}))


def warn_of_values(catalog: Catalog, spec: QuerySpec, columns: Columns, n_found: int) -> None:
    """Warn of values that filters ask for and no cell has, after `n_found` cells were found."""
    # The values of a column are read, to suggest near ones, only if no cell was found.
    warn_of_unknown(spec.filters, columns, partial(_texts, catalog, columns) if not n_found else lambda _: None)


def read_rows(tables: Tables, wanted: Sequence[str], where: str | None, ids: NDArray[np.uint64]) -> pa.Table:
    """Read some rows of the cell table and their `ROW_ID`, in the order of `ids`, all of which pass the filter."""
    if len(ids) <= _LISTED_ROWS:
        table = tables.read(CELLS, wanted, in_list(ROW_ID, ids.tolist()), row_ids=True)
    else:
        kept, n_lacking = [], len(ids)
        for batch in walk(tables, CELLS, wanted, where):
            kept.append(batch.filter(pc.is_in(batch.column(ROW_ID), value_set=pa.array(ids))))
            n_lacking -= kept[-1].num_rows
            if not n_lacking:
                break
        table = pa.Table.from_batches(kept)
    found = table.column(ROW_ID).to_numpy()
    by_id = np.argsort(found, kind="stable")
    at = by_id[np.searchsorted(found[by_id], ids)] if len(found) else by_id
    return table if np.array_equal(found, ids) else table.take(pa.array(at))


_LISTED_ROWS = 2**14
"""Up to this many rows are asked for by a list of row ids; for more, reading all of a column is faster."""


def uid_bytes(column: pa.ChunkedArray) -> NDArray[np.bytes_]:
    """Return uids as an array of bytes: one block of memory, which is indexed for batches and hashed as it is."""
    made = [_fixed_width(chunk) for chunk in column.chunks]
    if any(chunk is None for chunk in made) or not made:
        return np.array(column.cast(pa.binary()).to_pylist(), dtype=np.bytes_)
    return np.concatenate([chunk for chunk in made if chunk is not None])


def _fixed_width(texts: pa.Array) -> NDArray[np.bytes_] | None:
    """Return the texts of an array, without a copy, if all are as long as a uid usually is."""
    if not pa.types.is_string(texts.type) or texts.null_count or not len(texts):
        return None
    bounds = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    if (np.diff(bounds) != _UID_CHARS).any():
        return None
    return np.frombuffer(texts.buffers()[2], np.uint8)[bounds[0] : bounds[-1]].view(f"S{_UID_CHARS}")


_UID_CHARS = 16


def find_cells(catalog: Catalog, conditions: Sequence[str | Mapping[str, Any] | Filter]) -> tuple[pa.Array, str]:
    """Return the uids of the cells that satisfy all conditions, which `Query.where` describes, and these as text."""
    spec = QuerySpec(filters=tuple(as_filter(condition) for condition in conditions))
    cells = read_cells(catalog, spec, cell_columns(catalog), (), ())
    return cells.table.column("uid").combine_chunks(), spec.describe().removeprefix("where ")


def _texts(catalog: Catalog, columns: Columns, name: str) -> list[str] | None:
    """Read the distinct values of a text column; None for other columns, and for ids, which are unique to each cell."""
    target = columns.target(name)
    if target.family != "text" or target.name in IDS:
        return None
    found: dict[str, None] = {}
    for batch in walk(catalog.tables, CELLS, [target.name]):
        found |= dict.fromkeys(pc.unique(batch.column(target.name)).drop_null().to_pylist())
    return list(found)


def _walk_cells(
    catalog: Catalog, wanted: list[str], where: str | None, uids: pa.Array
) -> tuple[pa.Table, pa.ChunkedArray] | None:
    """Read cells with dataset codes in place of dataset uids; None if they are not stored in the order of their row ids."""
    batches, codes, last = [], [], -1
    for batch in walk(catalog.tables, CELLS, wanted, where):
        ids = batch.column(ROW_ID).to_numpy()
        # Rows that an update moved come in the order of files; the caller then reads all at once and sorts.
        if len(ids) and (int(ids[0]) <= last or not bool((ids[1:] > ids[:-1]).all())):
            return None
        last = int(ids[-1]) if len(ids) else last
        # A code takes 4 bytes, the uid that it stands for 16 and an offset, in every row.
        codes.append(pc.index_in(batch.column(DATASET_UID), value_set=uids))
        batches.append(batch.drop_columns([DATASET_UID]))
    return (pa.Table.from_batches(batches), pa.chunked_array(codes)) if batches else None


def pointer_parts(name: str, kind: PointerKind) -> tuple[str, str]:
    """Return the columns of a pointer that say where a cell begins and ends."""
    return (f"{name}.start", f"{name}.end") if kind is PointerKind.SPARSE else (f"{name}.position", f"{name}.position")


def is_in_order(tables: Tables, where: str | None = None) -> bool:
    """Return whether the cells are stored in table order, which no longer holds when some were updated; reads no column but those of `where`."""
    last = -1
    for batch in walk(tables, CELLS, [], where):
        found = batch.column(ROW_ID).to_numpy()
        if len(found) and (int(found[0]) <= last or not _ascends(found)):
            return False
        last = int(found[-1]) if len(found) else last
    return True


Rows = range | NDArray[np.uint64]
"""Row ids of the cell table; mostly they are all of a range."""


@dataclass(frozen=True)
class CellRows:
    """Rows of the cell table, by stable row id.

    Parameters
    ----------
    tables : Tables
        At a version.
    where : str or None
        A condition that all of them meet.
    ids : range or (n_cells,) uint64
        Their stable row ids, in order.
    """

    tables: Tables
    where: str | None
    ids: Rows

    @classmethod
    def of(cls, tables: Tables, where: str | None, ids: NDArray[np.uint64]) -> "CellRows":
        """Keep row ids in the least memory."""
        return cls(tables, where, _short(ids))

    def take(self, rows: NDArray[np.int64]) -> "CellRows":
        """Keep some cells, in the order given."""
        ids = self.ids
        # Converted first: NumPy adds int64 and uint64 to float64.
        taken = rows.astype(np.uint64) + np.uint64(ids.start) if isinstance(ids, range) else ids[rows]
        return replace(self, ids=_short(taken))

    def read(self, column: str) -> pa.ChunkedArray:
        """Read a column of these cells into memory."""
        if len(self.ids) <= _LISTED_ROWS:
            return read_rows(self.tables, [column], self.where, _array(self.ids)).column(column)
        table = self.tables.read(CELLS, [column], self.where, row_ids=True)
        # These ascend, as `Tables.read` sorts by row id, so they can be searched.
        found = table.column(ROW_ID).to_numpy()
        values = table.column(column)
        return (
            values
            if _same(_short(found), self.ids)
            else values.take(pa.array(np.searchsorted(found, _array(self.ids))))
        )

    def chunks(self, column: str) -> Iterator[pa.Array]:
        """Iterate over the chunks of a column; cells stored in another order are read at once first."""
        if not self.in_order:
            yield from self.read(column).chunks
            return
        for batch in walk(self.tables, CELLS, [column], self.where):
            found = batch.column(ROW_ID).to_numpy()
            values = batch.column(column)
            if isinstance(self.ids, range):
                # Ids ascend here, see `in_order`, so a range of ids is one slice of the batch.
                first, last = np.searchsorted(found, [self.ids.start, self.ids.stop]).tolist()
                yield values.slice(first, last - first)
            else:
                yield values.filter(pa.array(np.isin(found, self.ids, assume_unique=True)))

    @cached_property
    def in_order(self) -> bool:
        """Whether the cells, and the rows of the table among which they are, come in ascending order of row ids."""
        return (isinstance(self.ids, range) or _ascends(self.ids)) and is_in_order(self.tables, self.where)


@dataclass(frozen=True)
class LazyTable:
    """The part of `pyarrow.Table` that the `obs` of a plan needs; text and numbers are read from the cell table on access.

    Parameters
    ----------
    schema : pyarrow.Schema
        Its columns with their facts.
    rows : CellRows
        Where they are read.
    stored : mapping of str to str
        Column -> its name in the cell table.
    held : mapping of str to pyarrow.ChunkedArray
        Columns held in memory: small ones, and those that no table stores.
    """

    schema: pa.Schema
    rows: CellRows
    stored: Mapping[str, str]
    held: Mapping[str, pa.ChunkedArray]

    @property
    def num_rows(self) -> int:
        """Number of cells."""
        return len(self.rows.ids)

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, in order."""
        return list(self.schema.names)

    def column(self, which: int | str) -> pa.ChunkedArray:
        """Read one column."""
        name = self.schema.names[which] if isinstance(which, int) else which
        return self.held[name] if name in self.held else self.rows.read(self.stored[name])

    def chunks(self, which: int) -> Iterator[pa.Array]:
        """Iterate over the chunks of one column."""
        name = self.schema.names[which]
        yield from self.held[name].chunks if name in self.held else self.rows.chunks(self.stored[name])

    def take(self, rows: pa.Array) -> "LazyTable":
        """Keep some cells, in the order given."""
        held = {name: column.take(rows) for name, column in self.held.items()}
        return replace(self, rows=self.rows.take(rows.to_numpy()), held=held)

    def select(self, names: Sequence[str]) -> "LazyTable":
        """Keep some columns."""
        return replace(self, schema=pa.schema([self.schema.field(name) for name in names]))


def _short(ids: NDArray[np.uint64]) -> Rows:
    # Ascending ids are consecutive if the ends are as far apart as their number says.
    if len(ids) and int(ids[-1]) - int(ids[0]) == len(ids) - 1 and _ascends(ids):
        return range(int(ids[0]), int(ids[-1]) + 1)
    return ids


def _array(ids: Rows) -> NDArray[np.uint64]:
    return np.arange(ids.start, ids.stop, dtype=np.uint64) if isinstance(ids, range) else ids


def _ascends(ids: NDArray[np.uint64]) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def _same(one: Rows, other: Rows) -> bool:
    if isinstance(one, range) or isinstance(other, range):
        return one == other if isinstance(one, range) and isinstance(other, range) else False
    return np.array_equal(one, other)


OBSM = "obsm/"


@dataclass(frozen=True, slots=True)
class _Member:
    """One dataset's member of `obsm`: its values, and the type that they had in the file."""

    spec: ArraySpec
    dtype: np.dtype[Any]

    @property
    def width(self) -> int:
        return self.spec.shape[1]


def plan_obsm(plan: ReadPlan, space: SpacePlan, catalog: Catalog) -> dict[str, SpacePlan]:
    """Plan the members of `obsm` that a result has.

    Parameters
    ----------
    plan : ReadPlan
        For the cells.
    space : SpacePlan
        The space in X; for multimodal files, `obsm` of its modality is used.
    catalog : Catalog
        At the version of the plan.

    Returns
    -------
    dict of str to SpacePlan
        Name -> a plan with the layer `VALUES`. These are dense matrices that have the same width in every dataset of the result
        that has one of the name; cells of the others have NaN. Names for which that does not hold, or whose types have no
        common one that is exact, are left to the datasets.
    """
    part = space.parts[0]
    used = np.unique(part.code[part.code >= 0]).tolist()
    datasets = group_by_dataset(read_records(catalog))
    by_path = {record.zarr_group: record for records in datasets.values() for record in records}
    offered: dict[str, dict[int, _Member]] = {}
    if any(part.groups[code].path not in by_path for code in used):
        return {}  # X is a model's result, which is no file's
    for code in used:
        record = by_path[part.groups[code].path]
        for name, member in _members(record, datasets[record.uid]).items():
            offered.setdefault(name, {})[code] = member
    rows: NDArray[np.int64] | None = None
    found = {}
    for name, members in offered.items():
        lacking = len(members) < len(used) or bool((part.code < 0).any())
        dtype = join_dtypes({member.dtype for member in members.values()}, nan=lacking)
        if dtype is None or len({member.width for member in members.values()}) > 1:
            continue
        # Sparse groups need another read of the cell table for this, so it is done once and only if a member joins.
        if rows is None:
            rows = part.start if space.space.kind is PointerKind.DENSE else _rows_of(plan, part, by_path, catalog)
        found[name] = _plan(name, members, part, rows, dtype, catalog, lacking=lacking)
    return found


def plan_colors(plan: ReadPlan, catalog: Catalog) -> dict[str, NDArray[np.object_]]:
    """Return ``<column>_colors`` for every categorical column of a result whose colors are known and agree.

    The colors of the newest annotation of a column come first. Where two datasets of the result have different colors for one category,
    the column has none. Other categories take the color of the first dataset of the atlas that has one.

    Returns
    -------
    dict of str to (n_categories,) object array
        One for each category that occurs, in the order of the categories.
    """
    datasets = group_by_dataset(read_records(catalog))
    names = {records[0].name or uid: uid for uid, records in datasets.items()}
    used = set(pc.unique(plan.obs.column("dataset")).to_pylist()) if "dataset" in plan.obs.column_names else set()
    near = [names[name] for name in names if name in used]
    colors = {uid: _colors(datasets[uid]) for uid in [*near, *(uid for uid in datasets if uid not in near)]}
    schema = catalog.tables.schema(CELLS)
    stacks, annotated = column_stacks(schema), annotation_columns(schema)
    found = {}
    for field in plan.obs.schema:
        facts = facts_of(field)
        if facts is None or facts.kind != "categorical" or not facts.categories:
            continue
        stack = stacks.get(field.name, (field.name,))
        merged = _merged([colors[uid].get(stack[-1], {}) for uid in near])
        own: dict[str, str] = {}
        # Newest first in `stack`, so the newest annotation comes last here and its colors stay.
        for column in reversed([column for column in stack if column in annotated]):
            own |= annotated[column].columns[field.name].colors
        if merged is None and not own:
            continue
        merged = {**(merged or {}), **own}
        for uid in datasets:
            merged = {**colors[uid].get(stack[-1], {}), **merged}
        listed = [merged.get(str(category)) for category in _occurring(plan.obs, field, facts)] if merged else []
        if listed and None not in listed:
            found[f"{field.name}_colors"] = np.array(listed, dtype=object)
    return found


def _occurring(obs: "pa.Table | LazyTable", field: pa.Field, facts: ColumnFacts) -> list[Any]:
    """Return the categories of a column that occur, as `obs_frame` has them."""
    chunks = (
        obs.chunks(obs.schema.names.index(field.name)) if isinstance(obs, LazyTable) else obs.column(field.name).chunks
    )
    few = pa.chunked_array([pc.unique(chunk) for chunk in chunks], field.type)
    categories: list[Any] = remove_unused_categories(arrow_to_series(few, facts)).cat.categories.tolist()
    return categories


def _members(record: DatasetRecord, records: Sequence[DatasetRecord]) -> dict[str, _Member]:
    """Return the dense members of `obsm` of a dataset for the modality of one group, including those stored as embeddings."""
    own = record.file_facts.layers
    first = next(iter(own.values())).key if own else ""
    prefix = "/".join(first.split("/")[:2]) + "/" if first.startswith("mod/") else ""
    found = {}
    kept = read_specs(records[0])
    for key, extra in records[0].file_facts.extras.items():
        spec = kept.get(f"{extra.path}/data")
        if key.startswith(prefix + OBSM) and extra.form == "dense" and spec is not None and len(spec.shape) == 2:
            found[key.removeprefix(prefix + OBSM)] = _Member(spec, np.dtype(extra.dtype))
    for other in records:
        if other.zarr_group == record.zarr_group:
            continue
        specs = read_specs(other)
        for layer, fact in other.file_facts.layers.items():
            spec = specs.get(f"layers/{layer}")
            if fact.key.startswith(prefix + OBSM) and spec is not None and len(spec.shape) == 2:
                found[fact.key.removeprefix(prefix + OBSM)] = _Member(spec, np.dtype(fact.dtype))
    return found


def _rows_of(
    plan: ReadPlan, part: PartPlan, by_path: Mapping[str, DatasetRecord], catalog: Catalog
) -> NDArray[np.int64]:
    """Look up which row of its group each cell is, (n_cells,) int64."""
    rows = np.zeros(plan.n_cells, np.int64)
    uids = plan.obs.column("uid")
    pointers: dict[str, list[int]] = {}
    for code in np.unique(part.code[part.code >= 0]).tolist():
        pointers.setdefault(by_path[part.groups[code].path].pointer, []).append(code)
    for pointer, codes in pointers.items():
        wanted = [by_path[part.groups[code].path].uid for code in codes]
        column = f"{pointer}.zarr_row"
        table = catalog.tables.read(CELLS, ["uid", column], in_list("dataset_uid", wanted))
        here = np.flatnonzero(np.isin(part.code, codes))
        at = pc.index_in(uids.take(pa.array(here)), value_set=table.column("uid").combine_chunks())
        if at.null_count:
            raise CorruptError(
                f"{at.null_count:,} cells are not among those of the datasets {wanted}; run validate('deep'), and restore the atlas from a "
                "copy or a snapshot with restore()."
            )
        rows[here] = table.column(column).fill_null(0).to_numpy()[at.to_numpy()]
    return rows


def _plan(
    name: str,
    members: Mapping[int, _Member],
    part: PartPlan,
    rows: NDArray[np.int64],
    dtype: np.dtype[Any],
    catalog: Catalog,
    *,
    lacking: bool,
) -> SpacePlan:
    groups = tuple(
        GroupPlan(part.groups[code].path, "", None, {VALUES: ArrayReader(catalog.arrays, member.spec)})
        for code, member in members.items()
    )
    moved = np.full(len(part.groups) + 1, -1, np.int32)
    moved[list(members)] = np.arange(len(groups))
    code = moved[part.code]
    width = next(iter(members.values())).width
    one = PartPlan((VALUES,), groups, code, rows, rows + (code >= 0))
    space = FeatureSpace(name, PointerKind.DENSE, has_features=False, is_counts=False)
    nothing = np.full(len(code), -1, np.int32)
    return SpacePlan(
        name, space, np.empty(0, object), width, (), np.empty((0, 0), bool), {}, (one,), {VALUES: dtype}, nothing, code >= 0, lacking,
    )  # fmt: skip


def _colors(records: Sequence[DatasetRecord]) -> dict[str, dict[str, str]]:
    return records[0].file_facts.colors


def _merged(parts: Sequence[Mapping[str, str]]) -> dict[str, str] | None:
    """Merge color maps; None if two differ."""
    merged: dict[str, str] = {}
    for part in parts:
        if any(merged.get(category, color).lower() != color.lower() for category, color in part.items()):
            return None
        merged = {**part, **merged}
    return merged


def centroid_columns(catalog: Catalog, asked: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Name the parts of pointer columns that hold the asked centroids."""
    columns = dict.fromkeys(record.column for name, _ in asked for record in find_geometries(catalog, name))
    return tuple(f"{column}.{part}" for column in columns for part in ("zarr_group", *AXES))


def centroid_plans(catalog: Catalog, asked: Sequence[tuple[str, str]], cells: Cells) -> dict[str, SpacePlan]:
    """Plan centroids that were read with the cells: name in `obsm` -> plan, NaN where a cell has no shape."""
    return {key: _plan_centroids(catalog, name, key, cells) for name, key in asked}


def _plan_centroids(catalog: Catalog, name: str, key: str, cells: Cells) -> SpacePlan:
    values = read_centroids(catalog, name, cells)
    group = GroupPlan(key, "", None, {VALUES: InMemoryRows.of(values, catalog.arrays)})
    start = np.arange(cells.n, dtype=np.int64)
    part = PartPlan((VALUES,), (group,), np.zeros(cells.n, np.int32), start, start + 1)
    space = FeatureSpace(key, PointerKind.DENSE, has_features=False, is_counts=False)
    return SpacePlan(
        key, space, np.empty(0, object), values.shape[1], (), np.empty((0, 0), bool), {}, (part,),
        {VALUES: np.dtype(np.float64)}, np.full(cells.n, -1, np.int32), np.ones(cells.n, bool),
    )  # fmt: skip


def read_centroids(catalog: Catalog, name: str, cells: Cells) -> NDArray[np.float64]:
    """Return the centroids of cells that were read with `centroid_columns`, (n_cells, D); NaN for cells without."""
    records = find_geometries(catalog, name)
    n_dims = max(len(record.axes) for record in records)
    made = np.full((cells.n, n_dims), np.nan)
    for record, here in rows_of_stores(records, cells.table, name):
        for i, axis in enumerate(AXES[:n_dims]):
            # Arrow turns nulls of float columns into NaN.
            made[here, i] = cells.table.column(f"{record.column}.{axis}").to_numpy()[here]
    return made


def column_vectors(cells: Cells, column: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the vectors of a column that was read, and a mask of the cells that have one.

    Returns
    -------
    tuple of (n_valid, width) array and (n_cells,) bool
    """
    stored = cells.table.column(column).combine_chunks()
    valid: NDArray[np.bool_] = stored.is_valid().to_numpy(zero_copy_only=False)
    flat = stored.drop_null().flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(int(valid.sum()), stored.type.list_size), valid


def plan_vectors(record: ResultRecord, cells: Cells, catalog: Catalog) -> SpacePlan:
    """Plan the vectors of a column of the cell table, which were read with the cells, like those of a feature space."""
    values, valid = column_vectors(cells, record.column)
    group = GroupPlan(record.column, "", None, {VALUES: InMemoryRows.of(values, catalog.arrays)})
    # Only cells with a vector have a row in `values`; its number is how many of them come before.
    start = np.maximum(np.cumsum(valid) - 1, 0)
    part = PartPlan((VALUES,), (group,), np.where(valid, 0, -1).astype(np.int32), start, start + valid)
    space = FeatureSpace(record.name, PointerKind.DENSE, has_features=False, is_counts=False)
    return SpacePlan(
        record.name, space, np.empty(0, object), record.width, (), np.empty((0, 0), bool), {}, (part,),
        {VALUES: np.dtype(record.dtype)}, np.full(cells.n, -1, np.int32), valid,
    )  # fmt: skip


def with_nan(plan: SpacePlan, dtype: np.dtype[Any] | None) -> SpacePlan:
    """Fill cells without a value with NaN, in a dtype that holds all values and NaN.

    Parameters
    ----------
    plan : SpacePlan
        Of a result.
    dtype : numpy dtype or None
        That dtype; None where there is none.

    Raises
    ------
    QueryError
        If there is none, and cells lack the result.
    """
    stored = plan.dtypes[VALUES]
    if plan.present.all():
        return plan
    if stored.kind != "f" and dtype is None:
        raise QueryError(
            f"The result {plan.name!r} is stored as {stored}, and no type holds these exactly together with NaN for the "
            f"{int((~plan.present).sum()):,} cells without it; leave them out with with_results({plan.name!r}, missing='drop')."
        )
    return replace(plan, nan=True, dtypes={VALUES: stored if stored.kind == "f" or dtype is None else dtype})
