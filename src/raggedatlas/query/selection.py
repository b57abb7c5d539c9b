"""Which cells a sample, an order and a limit choose: found while the cell table is streamed, in memory that grows with the chosen cells only."""

import hashlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import CELLS
from raggedatlas.errors import QueryError
from raggedatlas.model.frames import DATASET, metadata_columns
from raggedatlas.query.cells import DATASET_UID, Cells, DatasetNames, is_in_order, read_rows, uid_bytes
from raggedatlas.query.read_plan import QuerySpec, Sample
from raggedatlas.store.filters import Columns
from raggedatlas.store.runtime import prefetch
from raggedatlas.store.sql_parser import to_sql
from raggedatlas.store.tables import ROW_ID, Tables, walk

BLOCK_CELLS = 2**16
"""Cells of a block: enough that a call for each block costs little for each cell."""


def walk_cells(
    tables: Tables, spec: QuerySpec, columns: Columns, wanted: Sequence[str], n_rows: int | None = None
) -> Generator[Cells, None, None]:
    """Walk over the cells that the filters keep, a block at a time, as they are stored; those of datasets without a record are left out.

    Parameters
    ----------
    tables : Tables
        At a version, so that it can be walked over again.
    spec : QuerySpec
        Its filters are used here.
    columns : Columns
        What may be named.
    wanted : sequence of str
        Stored columns to read; `ROW_ID` comes with them.
    n_rows : int or None
        At least so many rows make a block, but the last; None takes `BLOCK_CELLS`.
    """
    datasets = DatasetNames.of(columns.datasets)
    uids = pa.array(datasets.uids, pa.string())
    asked = list(dict.fromkeys([*wanted, DATASET_UID]))
    # The next block is read while the caller looks at one.
    batches = walk(tables, CELLS, asked, to_sql(spec.filters, columns))
    with closing(prefetch(_blocks(batches, BLOCK_CELLS if n_rows is None else n_rows))) as blocks:
        # At least one block, so that the columns are known.
        first = next(blocks, None)
        first = read_rows(tables, asked, None, np.empty(0, np.uint64)) if first is None else first
        for table in chain([first], blocks):
            codes = pc.index_in(table.column(DATASET_UID), value_set=uids)
            visible = table
            if codes.null_count:
                visible, codes = table.filter(codes.is_valid()), codes.drop_null()
            if DATASET_UID not in wanted:
                visible = visible.drop_columns([DATASET_UID])
            yield Cells(visible, codes.to_numpy().astype(np.int32, copy=False), datasets, pa.table({}))


def _blocks(batches: Iterable[pa.RecordBatch], n_rows: int) -> Iterator[pa.Table]:
    """Put batches together to blocks of at least `n_rows` rows, but the last."""
    held: list[pa.RecordBatch] = []
    n_held = 0
    for batch in batches:
        held.append(batch)
        n_held += batch.num_rows
        if n_held >= n_rows:
            yield pa.Table.from_batches(held)
            held, n_held = [], 0
    if held:
        yield pa.Table.from_batches(held)


def choose_rows(tables: Tables, spec: QuerySpec, columns: Columns) -> tuple[NDArray[np.uint64], int]:
    """Find the cells that a sample or a limit chooses, in their order.

    Parameters
    ----------
    tables : Tables
        At a version.
    spec : QuerySpec
        With a sample or a limit, and without a search.
    columns : Columns
        What may be named.

    Returns
    -------
    (k,) uint64, int
        Stable row ids, and how many cells were looked at to choose them, 0 only where there are none.
    """
    wanted = [*needed_columns(spec, columns), *(["uid"] if spec.sample is not None else [])]
    # Order and limit choose among the sampled cells, so they wait until all of these are known.
    first = replace(spec, order=(), limit=None) if spec.sample is not None else spec
    # Only a limit is met by the first cells. One is looked at for a limit of 0 too, to know whether there is any.
    enough = None if spec.limit is None or spec.sample is not None or spec.order else max(1, spec.limit)
    n_rows = BLOCK_CELLS if enough is None else min(BLOCK_CELLS, enough)
    kept: list[Cells] = []
    n_kept, most, n_seen = 0, BLOCK_CELLS, 0
    with closing(walk_cells(tables, spec, columns, wanted, n_rows)) as blocks:
        for cells in blocks:
            kept, n_kept, n_seen = [*kept, cells], n_kept + cells.n, n_seen + cells.n
            if enough is not None and n_seen >= enough:
                # Cells further behind in the files come later in the table too, unless some were updated.
                if is_in_order(tables):
                    break
                enough = None
            if n_kept > most:
                kept = [arrange(_in_table_order(kept), first, columns)]
                n_kept = kept[0].n
                # Twice what is kept, so that each cell is looked at a bounded number of times.
                most = max(BLOCK_CELLS, 2 * n_kept)
    return arrange(_in_table_order(kept), spec, columns).table.column(ROW_ID).to_numpy(), n_seen


def _in_table_order(parts: Sequence[Cells]) -> Cells:
    table = pa.concat_tables([cells.table for cells in parts])
    cells = replace(parts[0], table=table, dataset_code=np.concatenate([cells.dataset_code for cells in parts]))
    ids = table.column(ROW_ID).to_numpy()
    return cells if bool((ids[1:] > ids[:-1]).all()) else cells.take(np.argsort(ids, kind="stable"))


def arrange(cells: Cells, spec: QuerySpec, columns: Columns) -> Cells:
    """Sample, order and limit cells that were read (and ranked)."""
    if spec.sample is not None:
        cells = cells.take(sample_rows(cells, spec.sample, columns))
    if spec.order:
        cells = cells.take(order_rows(cells, spec.order, columns))
    if spec.limit is not None and spec.limit < cells.n:
        cells = cells.take(np.arange(spec.limit))
    return cells


def needed_columns(spec: QuerySpec, columns: Columns) -> tuple[str, ...]:
    """Return the stored columns that sampling and ordering need."""
    names = [name for name, _ in spec.order]
    if spec.sample is not None and spec.sample.by is not None:
        names.append(spec.sample.by)
    return tuple(dict.fromkeys(columns.stored(name) for name in names if name != DATASET))


def sample_rows(cells: Cells, sample: Sample, columns: Columns) -> NDArray[np.int64]:
    """Sample cells by a hash of uid and seed, so that the result does not depend on compaction or filter order.

    Returns
    -------
    (k,) int64
        Rows, ascending.
    """
    key = hash_uids(uid_bytes(cells.table.column("uid")), sample.seed)
    if sample.by is None:
        if sample.n < len(key):
            # Sorting all of them would take several times as long.
            near = np.flatnonzero(key <= np.partition(key, sample.n)[sample.n])
            key, rows = key[near], near
        else:
            rows = np.arange(len(key))
        return np.sort(rows[np.argsort(key, kind="stable")[: sample.n]])
    groups, _ = group_codes(cells.column(columns, sample.by))
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
        block = uids[at : at + BLOCK_CELLS]
        made[at : at + len(block)] = _mix(_uid_numbers(block) ^ start)
    return made


def _uid_numbers(uids: NDArray[np.bytes_]) -> NDArray[np.uint64]:
    """Return the number that a uid of 16 hex digits is, and a hash of any other."""
    chars = np.ascontiguousarray(uids).view(np.uint8).reshape(len(uids), uids.dtype.itemsize)
    if chars.shape[1] < _UID_DIGITS:
        raw, regular = np.zeros(len(uids), np.uint64), np.zeros(len(uids), bool)
    else:
        # Eight digits at once: each is one byte of a word, the first digit the highest.
        words = np.ascontiguousarray(chars[:, :_UID_DIGITS]).view(">u8").astype(np.uint64)
        digits = (words & _each(0x0F)) + (words >> np.uint64(6) & _each(1)) * np.uint64(9)
        letters = digits + _each(6) >> np.uint64(4) & _each(1)
        written = digits + _each(ord("0")) + letters * np.uint64(ord("a") - ord("9") - 1)
        regular = ((words == written) & (digits & _each(0xF0) == 0)).all(axis=1) & ~chars[:, _UID_DIGITS:].any(axis=1)
        for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF)):
            digits = (digits | digits >> np.uint64(shift)) & np.uint64(mask)
        raw = digits[:, 0] << np.uint64(32) | digits[:, 1]
    for at in np.flatnonzero(~regular).tolist():
        raw[at] = int(hashlib.sha256(uids[at]).hexdigest()[:_UID_DIGITS], 16)
    return raw


_UID_DIGITS = 16


def _each(byte: int) -> np.uint64:
    """Return a word of eight equal bytes."""
    return np.uint64(byte * 0x0101010101010101)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64 bits with a bijection, so that no two uids collide."""
    # The finalizer of SplitMix64. Products of uint64 arrays wrap around without a warning.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def group_codes(values: pa.ChunkedArray) -> tuple[NDArray[np.int64], pa.Array]:
    """Encode the values of a column as codes; null is a group.

    Returns
    -------
    (codes, values)
        (n,) int64 into the values, which come in order of first appearance.
    """
    encoded = values.combine_chunks()
    encoded = encoded if pa.types.is_dictionary(encoded.type) else encoded.dictionary_encode(null_encoding="encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, encoded.dictionary


def order_rows(cells: Cells, order: Sequence[tuple[str, bool]], columns: Columns) -> NDArray[np.int64]:
    """Sort cells by columns; ties stay in their order, missing values come last.

    Ordered categoricals follow the order of their categories.
    """
    keys: dict[str, pa.ChunkedArray] = {}
    for i, (name, _) in enumerate(order):
        values = cells.column(columns, name)
        facts = None if name == DATASET else metadata_columns(columns.schema).get(columns.stored(name))
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
