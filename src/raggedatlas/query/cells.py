"""The cells of a query: which a filter, a sample, an order and a limit choose, and what is read of them."""

import hashlib
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import group_by_dataset, read_records
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.identity import GENE_SPACE
from raggedatlas.catalog.terms import term_source
from raggedatlas.errors import QueryError
from raggedatlas.model.assets import result_columns
from raggedatlas.model.frames import DATASET, IDS, metadata_columns, nan_to_null
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.spaces import PointerKind, pointer_columns
from raggedatlas.query.spec import QuerySpec, Sample
from raggedatlas.store.filters import Columns, Filter, to_sql, warn_of_unknown
from raggedatlas.store.runtime import prefetch, release_unused_memory
from raggedatlas.store.sql import in_list
from raggedatlas.store.sql_parser import as_filter
from raggedatlas.store.tables import ROW_ID, Tables, walk

DATASET_UID = "dataset_uid"
"""Column of the cell table that names the dataset of each cell."""

BLOCK_CELLS = 2**16
"""Cells of a block: enough that a call for each block costs little for each cell."""

_LISTED_ROWS = 2**14
"""Up to this many rows are asked for by a list of row ids; for more, reading all of a column is faster."""

_UID_CHARS = 16
_UID = re.compile(b"[0-9a-f]{16}")


@dataclass(frozen=True)
class Cells:
    """Selected cells with some of their columns, and the places in arrays that their pointers lead to."""

    table: pa.Table  # one row per cell; stored columns
    dataset_code: NDArray[np.int32]  # (n_cells,): position of each cell's dataset among those of `columns`
    columns: Columns  # the columns and datasets of the atlas
    # distance or score of each cell; no columns without a search
    rank: pa.Table = field(default_factory=lambda: pa.table({}))
    # pointer column -> start and end of the entries of each cell, and whether it has any pointer there
    places: Mapping[str, tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]] = field(default_factory=dict)

    @classmethod
    def of(cls, table: pa.Table, columns: Columns, pointers: Sequence[str] = ()) -> "Cells":
        """Turn the uids of datasets into codes, and pointers into places; cells of datasets without a record are left out."""
        codes = pc.index_in(table.column(DATASET_UID), value_set=pa.array(list(columns.datasets), pa.string()))
        # They are left by an `add` that is under way or was killed.
        if codes.null_count:
            table, codes = table.filter(codes.is_valid()), codes.drop_null()
        places = {}
        for name in pointers:
            first, last = pointer_parts(columns.schema, name)
            start = table.column(first)
            valid = start.is_valid().to_numpy()
            # A null pointer becomes the empty range [0, 0).
            starts, ends = (
                (column.fill_null(0) if column.null_count else column).to_numpy()
                for column in (start, table.column(last))
            )
            places[name] = (starts, starts + valid if first == last else ends, valid)
            table = table.drop_columns(list({first, last}))
        return cls(table, codes.to_numpy().astype(np.int32, copy=False), columns, places=places)

    @classmethod
    def joined(cls, parts: "Sequence[Cells]") -> "Cells":
        """Put blocks of cells together, in table order."""
        first, *others = parts
        cells = first
        if others:
            table = pa.concat_tables([cells.table for cells in parts])
            places = {
                name: tuple(np.concatenate([part.places[name][i] for part in parts]) for i in range(3))
                for name in first.places
            }
            codes = np.concatenate([cells.dataset_code for cells in parts])
            cells = cls(table, codes, first.columns, places=places)  # type: ignore[arg-type]
        ids = cells.table.column(ROW_ID).to_numpy()
        return cells if _ascends(ids) else cells.take(np.argsort(ids, kind="stable"))

    @property
    def n(self) -> int:
        """Number of cells."""
        return len(self.dataset_code)

    def take(self, rows: NDArray[np.int64]) -> "Cells":
        """Keep some cells, in the order given."""
        at = pa.array(rows)
        rank = self.rank.take(at) if self.rank.num_columns else self.rank
        places = {name: (start[rows], end[rows], valid[rows]) for name, (start, end, valid) in self.places.items()}
        return Cells(self.table.take(at), self.dataset_code[rows], self.columns, rank, places)

    def names(self) -> pa.DictionaryArray:
        """Return the dataset name of each cell, as a dictionary array in the order in which the datasets were added."""
        # Datasets may share a name.
        names = self.columns.datasets.values()
        position = {name: i for i, name in enumerate(dict.fromkeys(names))}
        codes = np.array([position[name] for name in names], np.int32)[self.dataset_code]
        return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(list(position), pa.string()))

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column by its public name, `dataset` included; NaN becomes null."""
        if name == DATASET:
            return pa.chunked_array([self.names().cast(pa.string())])
        return nan_to_null(self.table.column(self.columns.stored(name)))

    def pointing(self, pointers: Sequence[str]) -> NDArray[np.bool_]:
        """Return a mask of the cells that have any of some pointers."""
        found = np.zeros(self.n, bool)
        for name in pointers:
            if name in self.places:
                found |= self.places[name][2]
        return found


def pointer_parts(schema: pa.Schema, name: str) -> tuple[str, str]:
    """Return the columns of a pointer that say where a cell begins and ends; one column says both for a dense space."""
    sparse = pointer_columns(schema)[name][1] is PointerKind.SPARSE
    return (f"{name}.start", f"{name}.end") if sparse else (f"{name}.position", f"{name}.position")


def pointer_column(record: DatasetRecord) -> str:
    """Return the cell column that points into a group."""
    return record.pointer or record.feature_space


def cell_columns(catalog: Catalog) -> Columns:
    """Return the columns that a query may name."""
    names, layouts = {}, {}
    for uid, records in group_by_dataset(read_records(catalog)).items():
        names[uid] = records[0].name or uid
        # The layout of the genes first, those of single layers that are stored apart last.
        ordered = sorted(records, key=lambda r: ("__" in pointer_column(r), r.feature_space != GENE_SPACE))
        layouts[uid] = tuple(dict.fromkeys(record.layout_uid for record in ordered if record.layout_uid))
    return Columns(catalog.tables.schema(CELLS), names, layouts, partial(term_source, catalog))


def metadata_names(columns: Columns, asked: Sequence[str] | None) -> tuple[str, ...]:
    """Return the stored names of the requested metadata columns, without ids and `dataset`; None requests all."""
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

    Of `spec` only the filters are used. `more` are stored columns to read in addition to the ids. `bounded` reads in
    the least memory, and names of cells only where `more` asks for them. `ids`, (k,), are stable row ids: only these
    cells are read, all of which the filters keep, in this order.
    """
    pointers = [name for name in pointers if name in pointer_columns(columns.schema)]
    wanted = list(dict.fromkeys([*(() if bounded else ("uid", "cell_name")), *more]))
    where = to_sql(spec.filters, columns)
    if ids is None and bounded:
        cells = Cells.joined([*walk_cells(catalog.tables, spec, columns, wanted, pointers)])
    else:
        parts = [part for name in pointers for part in pointer_parts(columns.schema, name)]
        asked = list(dict.fromkeys([*wanted, DATASET_UID, *parts]))
        if ids is None:
            table = catalog.tables.read(CELLS, asked, where, row_ids=True)
        else:
            table = read_rows(catalog.tables, asked, where, ids)
        cells = Cells.of(table, columns, pointers)
        del table
    if ids is None:
        warn_of_values(catalog, spec, columns, cells.n)
    release_unused_memory()
    return cells


def walk_cells(
    tables: Tables,
    spec: QuerySpec,
    columns: Columns,
    wanted: Sequence[str],
    pointers: Sequence[str] = (),
    *,
    n_rows: int | None = None,
) -> Generator[Cells, None, None]:
    """Walk over the cells that the filters keep, a block at a time, as they are stored.

    Cells of datasets without a record are left out, and there is at least one block, which may be empty. `tables` are
    at a version, so that they can be walked over again. `ROW_ID` comes with the stored columns `wanted`. A block, but
    the last, has at least `n_rows` rows; None takes `BLOCK_CELLS`.
    """
    parts = [part for name in pointers for part in pointer_parts(columns.schema, name)]
    asked = list(dict.fromkeys([*wanted, DATASET_UID, *parts]))

    def read() -> Iterator[pa.Table]:
        held: list[pa.RecordBatch] = []
        n_held = 0
        for batch in walk(tables, CELLS, asked, to_sql(spec.filters, columns)):
            held.append(batch)
            n_held += batch.num_rows
            if n_held >= (n_rows or BLOCK_CELLS):
                yield pa.Table.from_batches(held)
                held, n_held = [], 0
        if held:
            yield pa.Table.from_batches(held)

    # The next block is read while the caller looks at one.
    with closing(prefetch(read())) as blocks:
        # At least one block, so that the columns are known.
        first = next(blocks, None)
        first = read_rows(tables, asked, None, np.empty(0, np.uint64)) if first is None else first
        for table in chain([first], blocks):
            cells = Cells.of(table, columns, pointers)
            # A code takes 4 bytes, the uid that it stands for 16 and an offset, in every row.
            yield cells if DATASET_UID in wanted else replace(cells, table=cells.table.drop_columns([DATASET_UID]))


def read_rows(tables: Tables, wanted: Sequence[str], where: str | None, ids: NDArray[np.uint64]) -> pa.Table:
    """Read some rows of the cell table and their `ROW_ID`, in the order of `ids`, all of which pass the filter."""
    if len(ids) <= _LISTED_ROWS:
        table = tables.read(CELLS, wanted, in_list(ROW_ID, ids.tolist()), row_ids=True)
    else:
        kept, n_lacking, ascending = [], len(ids), np.sort(ids)
        for batch in walk(tables, CELLS, wanted, where):
            kept.append(batch.filter(pa.array(_are_among(batch.column(ROW_ID).to_numpy(), ascending))))
            n_lacking -= kept[-1].num_rows
            if not n_lacking:
                break
        table = pa.Table.from_batches(kept)
    found = table.column(ROW_ID).to_numpy()
    by_id = np.argsort(found, kind="stable")
    at = by_id[np.searchsorted(found[by_id], ids)] if len(found) else by_id
    return table if np.array_equal(found, ids) else table.take(pa.array(at))


def is_in_order(tables: Tables, where: str | None = None) -> bool:
    """Return whether the cells are stored in table order, which no longer holds when some were updated; reads no column but those of `where`."""
    last = -1
    for batch in walk(tables, CELLS, [], where):
        found = batch.column(ROW_ID).to_numpy()
        if len(found) and (int(found[0]) <= last or not _ascends(found)):
            return False
        last = int(found[-1]) if len(found) else last
    return True


def warn_of_values(catalog: Catalog, spec: QuerySpec, columns: Columns, n_found: int) -> None:
    """Warn of values that filters ask for and no cell has, after `n_found` cells were found."""

    def texts(name: str) -> list[str] | None:
        target = columns.target(name)
        # Ids are unique to each cell. The values of others are read, to suggest near ones, only if no cell was found.
        if n_found or target.family != "text" or target.name in IDS:
            return None
        found: dict[str, None] = {}
        for batch in walk(catalog.tables, CELLS, [target.name]):
            found |= dict.fromkeys(pc.unique(batch.column(target.name)).drop_null().to_pylist())
        return list(found)

    warn_of_unknown(spec.filters, columns, texts)


def uid_bytes(column: pa.ChunkedArray) -> NDArray[np.bytes_]:
    """Return uids as an array of bytes: one block of memory, which is indexed for batches and hashed as it is."""
    made = []
    for texts in column.chunks:
        # Without a copy, if all are as long as a uid usually is.
        plain = pa.types.is_string(texts.type) and not texts.null_count and len(texts)
        bounds = (
            np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1] if plain else None
        )
        if bounds is None or (np.diff(bounds) != _UID_CHARS).any():
            break
        made.append(np.frombuffer(texts.buffers()[2], np.uint8)[bounds[0] : bounds[-1]].view(f"S{_UID_CHARS}"))
    if len(made) < column.num_chunks or not made:
        return np.array(column.cast(pa.binary()).to_pylist(), dtype=np.bytes_)
    return np.concatenate(made)


def find_cells(catalog: Catalog, conditions: Sequence[str | Mapping[str, Any] | Filter]) -> tuple[pa.Array, str]:
    """Return the uids of the cells that satisfy all conditions, which `Query.where` describes, and these as text."""
    spec = QuerySpec(filters=tuple(as_filter(condition) for condition in conditions))
    cells = read_cells(catalog, spec, cell_columns(catalog), (), ())
    return cells.table.column("uid").combine_chunks(), " AND ".join(map(repr, spec.filters))


def column_vectors(cells: Cells, column: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the vectors of a column that was read, (n_valid, width), and a mask of the cells that have one."""
    stored = cells.table.column(column).combine_chunks()
    valid: NDArray[np.bool_] = stored.is_valid().to_numpy(zero_copy_only=False)
    flat = stored.drop_null().flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(int(valid.sum()), stored.type.list_size), valid


def choose_rows(tables: Tables, spec: QuerySpec, columns: Columns) -> tuple[NDArray[np.uint64], int]:
    """Find the cells that a sample or a limit chooses, in their order, for a query without a search.

    `tables` are at a version. Returns stable row ids, and how many cells were looked at to choose them, 0 only where
    there are none.
    """
    wanted = [*needed_columns(spec, columns), *(["uid"] if spec.sample is not None else [])]
    # Order and limit choose among the sampled cells, so they wait until all of these are known.
    first = replace(spec, order=(), limit=None) if spec.sample is not None else spec
    # Only a limit is met by the first cells. One is looked at for a limit of 0 too, to know whether there is any.
    enough = None if spec.limit is None or spec.sample is not None or spec.order else max(1, spec.limit)
    n_rows = BLOCK_CELLS if enough is None else min(BLOCK_CELLS, enough)
    kept: list[Cells] = []
    n_kept, most, n_seen = 0, BLOCK_CELLS, 0
    with closing(walk_cells(tables, spec, columns, wanted, n_rows=n_rows)) as blocks:
        for cells in blocks:
            kept, n_kept, n_seen = [*kept, cells], n_kept + cells.n, n_seen + cells.n
            if enough is not None and n_seen >= enough:
                # Cells further behind in the files come later in the table too, unless some were updated.
                if is_in_order(tables):
                    break
                enough = None
            if n_kept > most:
                kept = [arrange(Cells.joined(kept), first)]
                n_kept = kept[0].n
                # Twice what is kept, so that each cell is looked at a bounded number of times.
                most = max(BLOCK_CELLS, 2 * n_kept)
    return arrange(Cells.joined(kept), spec).table.column(ROW_ID).to_numpy(), n_seen


def arrange(cells: Cells, spec: QuerySpec) -> Cells:
    """Sample, order and limit cells that were read (and ranked)."""
    if spec.sample is not None:
        cells = cells.take(sample_rows(cells, spec.sample))
    if spec.order:
        cells = cells.take(order_rows(cells, spec.order))
    if spec.limit is not None and spec.limit < cells.n:
        cells = cells.take(np.arange(spec.limit))
    return cells


def needed_columns(spec: QuerySpec, columns: Columns) -> tuple[str, ...]:
    """Return the stored columns that sampling and ordering need."""
    names = [name for name, _ in spec.order]
    if spec.sample is not None and spec.sample.by is not None:
        names.append(spec.sample.by)
    return tuple(dict.fromkeys(columns.stored(name) for name in names if name != DATASET))


def sample_rows(cells: Cells, sample: Sample) -> NDArray[np.int64]:
    """Sample cells by a hash of uid and seed, so that neither compaction nor filter order matters; the rows ascend."""
    key = hash_uids(uid_bytes(cells.table.column("uid")), sample.seed)
    if sample.by is None:
        if sample.n < len(key):
            # Sorting all of them would take several times as long.
            near = np.flatnonzero(key <= np.partition(key, sample.n)[sample.n])
            key, rows = key[near], near
        else:
            rows = np.arange(len(key))
        return np.sort(rows[np.argsort(key, kind="stable")[: sample.n]])
    groups, _ = group_codes(cells.column(sample.by))
    order = np.lexsort((key, groups))
    counts = np.bincount(groups, minlength=1)
    # Position within the group: after sorting, position minus where the group begins.
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort(order[rank < sample.n])


def hash_uids(uids: NDArray[np.bytes_], seed: int) -> NDArray[np.uint64]:
    """Hash cell uids with a seed, (n,) uint64: the same on every machine, and whatever other uids there are."""
    start = np.frombuffer(hashlib.sha256(f"sample {seed}".encode()).digest()[:8], "<u8")[0]
    made = np.empty(len(uids), np.uint64)
    for at in range(0, len(uids), BLOCK_CELLS):
        mixed = _uid_numbers(uids[at : at + BLOCK_CELLS]) ^ start
        # The finalizer of SplitMix64, a bijection, so that no two uids collide. Products of uint64 arrays wrap around without a warning.
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        made[at : at + len(mixed)] = mixed ^ (mixed >> np.uint64(31))
    return made


def _uid_numbers(uids: NDArray[np.bytes_]) -> NDArray[np.uint64]:
    """Return the number that a uid of 16 hex digits is, and a hash of any other."""
    text = np.ascontiguousarray(uids).tobytes()
    with suppress(ValueError):
        raw = bytes.fromhex(text.decode("ascii"))
        # `fromhex` takes capitals and spaces too.
        if uids.dtype.itemsize == _UID_CHARS and raw.hex().encode() == text:
            return np.frombuffer(raw, ">u8").astype(np.uint64)
    hexed = (uid if _UID.fullmatch(uid) else hashlib.sha256(uid).hexdigest()[:_UID_CHARS] for uid in uids.tolist())
    return np.array([int(digits, 16) for digits in hexed], np.uint64)


def group_codes(values: pa.ChunkedArray) -> tuple[NDArray[np.int64], pa.Array]:
    """Encode the values of a column as codes, and return these and the values, in order of first appearance; null is a group."""
    encoded = values.combine_chunks()
    encoded = encoded if pa.types.is_dictionary(encoded.type) else encoded.dictionary_encode(null_encoding="encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, encoded.dictionary


def order_rows(cells: Cells, order: Sequence[tuple[str, bool]]) -> NDArray[np.int64]:
    """Sort cells by columns; ties stay in their order, missing values come last.

    Ordered categoricals follow the order of their categories.
    """
    keys: dict[str, pa.ChunkedArray] = {}
    for i, (name, _) in enumerate(order):
        values = cells.column(name)
        facts = None if name == DATASET else metadata_columns(cells.columns.schema).get(cells.columns.stored(name))
        if facts is not None and facts.ordered and facts.categories:
            values = pc.index_in(values, value_set=pa.array(facts.categories).cast(values.type))
        if pa.types.is_nested(values.type):
            raise QueryError(
                f"order_by({name!r}): a column of {values.type} has no order; name a column of numbers, text or times."
            )
        keys[str(i)] = values
    # The row number as the last key keeps ties in their order.
    keys["row"] = pa.chunked_array([pa.array(np.arange(cells.n))])
    by = [(str(i), "descending" if down else "ascending") for i, (_, down) in enumerate(order)]
    sorted_rows = pc.sort_indices(pa.table(keys), sort_keys=[*by, ("row", "ascending")])
    rows: NDArray[np.int64] = sorted_rows.to_numpy().astype(np.int64)
    return rows


@dataclass(frozen=True)
class LazyTable:
    """The part of `pyarrow.Table` that the `obs` of a plan needs; text and numbers are read from the cell table on access."""

    schema: pa.Schema  # with the facts of the columns
    tables: Tables  # at a version
    where: str | None  # a condition that all cells meet
    ids: range | NDArray[np.uint64]  # (n_cells,): stable row ids of the cells, in order; mostly a range
    stored: Mapping[str, str]  # column -> its name in the cell table
    held: Mapping[str, pa.ChunkedArray]  # columns in memory: small ones, and those that no table stores

    @property
    def num_rows(self) -> int:
        """Number of cells."""
        return len(self.ids)

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, in order."""
        return list(self.schema.names)

    def column(self, which: int | str) -> pa.ChunkedArray:
        """Read one column."""
        name = self.schema.names[which] if isinstance(which, int) else which
        if name in self.held:
            return self.held[name]
        ids, stored = self.ids, self.stored[name]
        if len(ids) <= _LISTED_ROWS:
            return read_rows(self.tables, [stored], self.where, np.array(ids, np.uint64)).column(stored)
        table = self.tables.read(CELLS, [stored], self.where, row_ids=True)
        # These ascend, as `Tables.read` sorts by row id, so a range of them is one slice.
        found, values = table.column(ROW_ID).to_numpy(), table.column(stored)
        if isinstance(ids, range):
            first, last = np.searchsorted(found, np.array([ids.start, ids.stop], np.uint64)).tolist()
            return values.slice(first, last - first)
        return values if np.array_equal(found, ids) else values.take(pa.array(np.searchsorted(found, ids)))

    def chunks(self, which: int) -> Iterator[pa.Array]:
        """Iterate over the chunks of one column; cells that are stored in another order are read at once first."""
        name = self.schema.names[which]
        if name in self.held or not self._in_order:
            yield from self.column(name).chunks
            return
        for batch in walk(self.tables, CELLS, [self.stored[name]], self.where):
            found, values = batch.column(ROW_ID).to_numpy(), batch.column(self.stored[name])
            if isinstance(self.ids, range):
                first, last = np.searchsorted(found, np.array([self.ids.start, self.ids.stop], np.uint64)).tolist()
                yield values.slice(first, last - first)
            else:
                yield values.filter(pa.array(_are_among(found, self.ids)))

    @cached_property
    def _in_order(self) -> bool:
        """Whether the cells, and the rows of the table among which they are, come in ascending order of row ids."""
        return (isinstance(self.ids, range) or _ascends(self.ids)) and is_in_order(self.tables, self.where)

    def take(self, rows: pa.Array) -> "LazyTable":
        """Keep some cells, in the order given."""
        at, held = rows.to_numpy(), {name: column.take(rows) for name, column in self.held.items()}
        # Converted first: NumPy adds int64 and uint64 to float64.
        ids = at.astype(np.uint64) + np.uint64(self.ids.start) if isinstance(self.ids, range) else self.ids[at]
        return replace(self, ids=short_ids(ids), held=held)

    def select(self, names: Sequence[str]) -> "LazyTable":
        """Keep some columns."""
        return replace(self, schema=pa.schema([self.schema.field(name) for name in names]))


def short_ids(ids: NDArray[np.uint64]) -> range | NDArray[np.uint64]:
    """Return row ids in the least memory: as a range if they are one."""
    # Ascending ids are consecutive if the ends are as far apart as their number says.
    if len(ids) and int(ids[-1]) - int(ids[0]) == len(ids) - 1 and _ascends(ids):
        return range(int(ids[0]), int(ids[-1]) + 1)
    return ids


def _ascends(ids: NDArray[np.uint64]) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def _are_among(ids: NDArray[np.uint64], ascending: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which ids of a batch are among others; unlike `np.isin`, it does not look at all of these for each batch."""
    return np.searchsorted(ascending, ids, side="right") > np.searchsorted(ascending, ids)
