"""Counts and sums per group of cells, streamed in blocks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.assets import group_by_dataset, read_records
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import QueryError, SourceError
from raggedatlas.model.arguments import Progress, brief
from raggedatlas.model.batch import Batch, Block, CsrBlock
from raggedatlas.model.choices import Missing
from raggedatlas.model.frames import (
    DATASET,
    ColumnFacts,
    arrow_to_series,
    facts_of,
    nan_to_null,
    remove_unused_categories,
)
from raggedatlas.query.cells import (
    BLOCK_CELLS,
    DATASET_UID,
    cell_columns,
    group_codes,
    metadata_names,
    walk_cells,
    warn_of_values,
)
from raggedatlas.query.modalities import make_var
from raggedatlas.query.outputs import atlas_facts
from raggedatlas.query.plan import cells_table, pin_cells, plan_read, plan_rows
from raggedatlas.query.read import PartReader, ReadPlan, SpacePlan, block_plans, read_batches, read_block, refuse_arrays
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.executors import IN_FLIGHT, Workers, in_order, run_tasks
from raggedatlas.store.filters import Columns, warn_of_unknown
from raggedatlas.store.location import Location
from raggedatlas.store.runtime import release_unused_memory
from raggedatlas.store.sql import in_list
from raggedatlas.store.sql_parser import as_filter

if TYPE_CHECKING:
    import anndata as ad
    import pandas as pd

T = TypeVar("T")

PARTIAL_BYTES = 2**30
"""Approximate bytes of block sums that may wait for earlier blocks."""

SIZE = "n_cells"
"""Column of `obs` that says how many cells each group has."""

COUNT_CELLS = 2**20
"""Approximate number of cells that a worker counts at once."""


def count(
    spec: QuerySpec, catalog: Catalog, by: Sequence[str] | None, executor: Executor | Workers | None = None
) -> "int | pd.Series[int]":
    """Count the selected cells, in total or per group; see `Query.count`."""
    columns = cell_columns(catalog)
    by = None if by is None else tuple(by)
    divided = executor is not None and spec.search is None and spec.sample is None and spec.limit is None
    parts: list[tuple[str, ...] | None] = [None]
    if divided:
        # The datasets, in their order, in runs of about `COUNT_CELLS` cells.
        runs: dict[int, list[str]] = {0: []}
        n_before = 0
        for uid, records in group_by_dataset(read_records(catalog)).items():
            runs.setdefault(n_before // COUNT_CELLS, []).append(uid)
            n_before += records[0].n_cells
        parts = [tuple(run) for run in runs.values()]
    tasks = [partial(_count_cells, spec, catalog, by or (), datasets) for datasets in parts]
    counts = list(in_order(run_tasks(tasks, executor if divided else None, place=catalog.location)))
    total = sum(int(n.sum()) for _, n in counts)
    if divided and not total:
        return count(spec, catalog, by)  # and warn of values that no cell has
    if divided:
        warn_of_unknown(spec.filters, columns)
    if by is None:
        return total
    import pandas as pd

    obs, sizes = _joined(counts, by, columns)
    frame = frame_of(obs, by, columns)
    made = pd.Series(sizes, name="n_cells", dtype=np.int64)
    return made.groupby([frame[name] for name in by], dropna=False, observed=True, sort=True).sum()


Groups = tuple[pa.Table, NDArray[np.int64]]
"""A cell of each group, as `obs` has it, and how many cells each has."""


def _count_cells(spec: QuerySpec, catalog: Catalog, by: tuple[str, ...], datasets: tuple[str, ...] | None) -> Groups:
    """Return the groups of the selected cells of some or all datasets; without columns that make groups, the number of cells."""
    columns = cell_columns(catalog)
    spec = replace(spec, obs=tuple(name for name in by if name != DATASET))
    if datasets is not None:
        spec = replace(spec, filters=(*spec.filters, as_filter(in_list(DATASET_UID, datasets))))
    if spec.search is not None or spec.sample is not None or spec.limit is not None:
        cells, obs = plan_rows(spec, catalog, columns)
        return _groups(obs, np.ones(cells.n, np.int64), by, columns) if by else (pa.table({}), np.array([cells.n]))
    catalog, metadata = pin_cells(catalog), metadata_names(columns, spec.obs)
    found: list[Groups] = []
    n_cells, n_groups, most = 0, 0, BLOCK_CELLS
    ids = [name for name in ("uid", "cell_name") if name in by]
    for cells in walk_cells(catalog.tables, spec, columns, [*ids, *metadata]):
        n_cells += cells.n
        if by:
            found.append(_distinct(cells_table(cells, metadata), by, columns))
            n_groups += len(found[-1][1])
        if n_groups > most:
            found = [_joined(found, by, columns)]
            n_groups = len(found[0][1])
            most = max(BLOCK_CELLS, 2 * n_groups)
    if datasets is None:  # else the caller knows all values
        warn_of_values(catalog, spec, columns, n_cells)
    return _joined(found, by, columns) if by else (pa.table({}), np.array([n_cells]))


def _distinct(obs: pa.Table, by: Sequence[str], columns: Columns) -> Groups:
    """Return rows that differ in what they are grouped by, and how many are like each: fewer rows, for what decides which values are equal."""
    codes, n_codes = np.zeros(len(obs), np.int64), 1
    # Nothing else is kept: a dictionary, such as that of all datasets, would come with every block.
    grouping = {field.name: (column, field) for column, field in _grouping_columns(obs, by, columns).values()}
    kept = pa.table(
        [column for column, _ in grouping.values()], schema=pa.schema([field for _, field in grouping.values()])
    )
    for column in kept.columns:
        own, values = group_codes(column)
        codes, n_codes = codes * len(values) + own, n_codes * len(values)
        if n_codes > BLOCK_CELLS:  # it would take more than it spares
            return kept, np.ones(len(obs), np.int64)
    sizes, first = np.bincount(codes, minlength=n_codes), first_cells(codes, n_codes)
    there = np.flatnonzero(sizes)
    there = there[np.argsort(first[there])]
    return kept.take(pa.array(first[there])), sizes[there]


def _joined(found: Sequence[Groups], by: Sequence[str], columns: Columns) -> Groups:
    """Put equal groups together."""
    return _groups(pa.concat_tables([obs for obs, _ in found]), np.concatenate([n for _, n in found]), by, columns)


def _groups(obs: pa.Table, sizes: NDArray[np.int64], by: Sequence[str], columns: Columns) -> Groups:
    """Put rows of equal values together, and add up their sizes."""
    frame = frame_of(obs, by, columns)
    numbers = frame.groupby(list(by), dropna=False, observed=True, sort=True).ngroup().to_numpy()
    _, first = np.unique(numbers, return_index=True)
    totals = np.zeros(len(first), np.int64)
    np.add.at(totals, numbers, sizes)
    return obs.take(pa.array(first)), totals


@dataclass(frozen=True)
class GroupedCells:
    """The selected cells of one feature space, in groups."""

    space: SpacePlan
    facts: Mapping[str, Any]  # of the result; see `atlas_facts`
    codes: NDArray[np.int64]  # (n_cells,): group of each cell, numbered in sorted order; a missing value is last
    obs: "pd.DataFrame"  # a row for each group: its values, and `n_cells`

    def sorted(self) -> "GroupedCells":
        """Return the same cells, read group by group."""
        order = np.argsort(self.codes, kind="stable")
        return replace(self, space=self.space.take(order), codes=self.codes[order])

    @property
    def n_groups(self) -> int:
        """Number of groups."""
        return len(self.obs)

    def partials(
        self,
        add: Callable[[Block, NDArray[np.int64], int], T],
        executor: Executor | Workers | None,
        place: Location,
        n_bytes: int,
    ) -> Iterator[T]:
        """Yield what a function makes of each block of cells, their groups, and the number of columns, in order.

        The workers of `executor` call `add`, which must be picklable; one result takes at most `n_bytes`.
        """
        space = self.space
        (part,) = space.parts
        reader = PartReader(space, part)
        # Column-sorted copies are read for all cells at once, so they cannot be divided into tasks of some rows.
        if executor is None or reader.column_copies():
            for rows, block in reader.read_blocks():
                yield add(block, self.codes[rows], space.n_cols)
            return
        # The same blocks as above, added in the same order: others would round sums of floats differently.
        tasks = (partial(_add_planned, add, plan, self.codes[rows]) for rows, plan in block_plans(space, part))
        in_flight = max(4, min(IN_FLIGHT, PARTIAL_BYTES // (n_bytes + 1)))
        yield from in_order(run_tasks(tasks, executor, place=place, in_flight=in_flight))


def plan_layer(spec: QuerySpec, catalog: Catalog, what: str) -> ReadPlan:
    """Plan to read one layer of one feature space, and refuse a query of several; `what` names the call in messages."""
    if len(spec.layers) > 1:
        raise QueryError(f"{what} reads one layer, the query names {list(spec.layers)}; choose one with layer=...")
    plan = plan_read(spec, catalog)
    if len(plan.spaces) != 1:
        raise QueryError(
            f"{what} reads one feature space, the query names {list(plan.spaces)}; name one with .spaces(...)."
        )
    refuse_arrays(plan.single(), f"The result of {what}")
    return plan


def with_all_features(spec: QuerySpec) -> QuerySpec:
    """Return a query that reads every feature, because the sum of a cell is over all of them, whatever the query keeps."""
    return replace(spec, features=(), join="union", missing="zero")


def kept_features(spec: QuerySpec, catalog: Catalog, space: SpacePlan) -> NDArray[np.bool_]:
    """Return which features of a space that was planned by `with_all_features` the query keeps, (n_features,) bool."""
    if not spec.features and spec.join == "union" and spec.missing != "drop":
        return np.ones(space.n_cols, bool)
    # No values are read, so none has to be marked as not measured, for which some types have no room.
    missing: Missing = "drop" if spec.missing == "drop" else "zero"
    kept = plan_read(replace(spec, obs=(), missing=missing), catalog).spaces[space.name].features
    return np.isin(space.features.astype(str), kept.astype(str))


def group_cells(spec: QuerySpec, catalog: Catalog, by: Sequence[str], what: str) -> GroupedCells:
    """Find the groups of the selected cells; `what` names the call in messages."""
    import pandas as pd

    if SIZE in by:
        raise QueryError(
            f"{what} by {SIZE!r}: the result has a column {SIZE!r}, the number of cells; annotate the values under another name."
        )
    plan = plan_layer(replace(spec, obs=tuple(c for c in by if c != DATASET)), catalog, what)
    space = plan.single()
    frame = frame_of(plan.obs, by, cell_columns(catalog))
    codes = frame.groupby(list(by), dropna=False, observed=True, sort=True).ngroup().to_numpy().astype(np.int64)
    n_groups = int(codes.max(initial=-1)) + 1
    obs = frame.iloc[first_cells(codes, n_groups)].reset_index(drop=True)
    text = [["(missing)" if gone else str(v) for v, gone in zip(obs[n], obs[n].isna(), strict=True)] for n in by]
    obs[SIZE] = np.bincount(codes, minlength=n_groups)
    obs.index = pd.Index(["_".join(parts) for parts in zip(*text, strict=True)], dtype=object)
    facts = atlas_facts(plan)
    # Of many cells the names take more memory than all else.
    del plan, frame
    release_unused_memory()
    return GroupedCells(space, facts, codes, obs)


def first_cells(codes: NDArray[np.int64], n_groups: int) -> NDArray[np.int64]:
    """Return the first cell of each group, (n_groups,), -1 for a group without cells; `codes` are the groups of the cells."""
    first = np.full(n_groups, -1, np.int64)
    # Of repeated indices the last value stays; assigned in reverse, that is the first cell of the group.
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    return first


def aggregate(
    spec: QuerySpec, catalog: Catalog, by: Sequence[str], executor: Executor | Workers | None = None
) -> "ad.AnnData":
    """Sum one layer per group of cells; see `Query.aggregate`.

    In memory are one block of cells, and four dense matrices of groups by features.
    """
    import anndata as ad

    grouped = group_cells(spec, catalog, by, "aggregate")
    space, n_groups, obs = grouped.space, grouped.n_groups, grouped.obs
    sums, nonzero = np.zeros((n_groups, space.n_cols)), np.zeros((n_groups, space.n_cols), np.int64)
    # With all groups in its block, a partial result is as large as `sums` and `nonzero`.
    for groups, summed, counted in grouped.partials(
        add_block, executor, catalog.location, sums.nbytes + nonzero.nbytes
    ):
        sums[groups] += summed
        nonzero[groups] += counted
    measured = count_measured(space, grouped.codes, n_groups)
    mean = np.divide(sums, measured, out=np.full(sums.shape, np.nan), where=measured > 0)
    var = make_var(space, catalog, spec.names)
    layers = {"sum": sums, "mean": mean, "count_nonzero": nonzero, "n_measured": measured}
    made = ad.AnnData(X=None, obs=obs, var=var.frame(), shape=sums.shape if not len(obs) else None, layers=layers)
    if space.space.has_features:
        made.varm["measured"] = var.measured(space)
    made.uns["atlas"] = {**grouped.facts, "by": np.array(list(by), dtype=object)}
    return made


def _add_planned(add: Callable[[Block, NDArray[np.int64], int], T], space: SpacePlan, codes: NDArray[np.int64]) -> T:
    return add(read_block(space), codes, space.n_cols)


def add_block(
    block: Block, codes: NDArray[np.int64], n_cols: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Return the groups in a block, and their sums and numbers of values other than zero, (n_groups, n_cols) each."""
    groups, codes = np.unique(codes, return_inverse=True)
    shape = (len(groups), n_cols)
    (values,) = block.layers.values()
    if isinstance(block, CsrBlock):
        # Group and column as one number, so that one `bincount` sums every pair.
        at = np.repeat(codes, np.diff(block.indptr)) * n_cols + block.indices
        kept = (values != 0) & ~np.isnan(values) if values.dtype.kind == "f" else values != 0
        weights = values[kept].astype(np.float64)
        sums = np.bincount(at[kept], weights, len(groups) * n_cols).astype(np.float64, copy=False)
        nonzero = np.bincount(at[kept], minlength=len(groups) * n_cols)
        return groups, sums.reshape(shape), nonzero.reshape(shape)
    summed, counted = np.zeros(shape), np.zeros(shape, np.int64)
    clean = values.astype(np.float64)
    clean[np.isnan(clean)] = 0
    # Not `+=`, which would add only one of the cells of a group.
    np.add.at(summed, codes, clean)
    np.add.at(counted, codes, clean != 0)
    return groups, summed, counted


def count_measured(space: SpacePlan, codes: NDArray[np.int64], n_groups: int) -> NDArray[np.int64]:
    """Count the cells of each group that measured each feature, (n_groups, n_features); `codes` are the groups of the cells."""
    if not space.space.has_features:
        return np.repeat(np.bincount(codes, minlength=n_groups)[:, None], space.n_cols, axis=1)
    # Cells of each group by layout, times which columns each layout measured.
    return count_layouts(space, codes, n_groups) @ space.measured.astype(np.int64)


def count_layouts(space: SpacePlan, codes: NDArray[np.int64], n_groups: int) -> NDArray[np.int64]:
    """Count the cells of each group by their layout, (n_groups, n_layouts)."""
    known = space.layout_code >= 0
    pairs = codes[known] * len(space.layouts) + space.layout_code[known]
    return np.bincount(pairs, minlength=n_groups * len(space.layouts)).reshape(n_groups, len(space.layouts))


def _grouping_columns(
    obs: pa.Table, by: Sequence[str], columns: Columns
) -> dict[str, tuple[pa.ChunkedArray, pa.Field]]:
    """Return the grouping columns under the requested names, dictionaries as text."""
    found: dict[str, tuple[pa.ChunkedArray, pa.Field]] = {}
    for name in by:
        stored = None if name in obs.column_names else columns.stored(name)
        # `obs` has the columns under the names that are shown; a group may be named by any of a column's names.
        shown = name if stored is None else columns.shown.get(stored, stored)
        column, field = obs.column(shown), obs.schema.field(shown)
        if pa.types.is_nested(column.type):
            raise QueryError(f"Groups cannot be made of {name!r}, which holds {column.type}.")
        if pa.types.is_dictionary(column.type):
            column, field = column.cast(pa.string()), field.with_type(pa.string())
        found[name] = column, field
    return found


def frame_of(obs: pa.Table, by: Sequence[str], columns: Columns) -> "pd.DataFrame":
    """Return the grouping columns as a frame, under the requested names."""
    import pandas as pd

    rows = range(obs.num_rows)
    found = {}
    for name, (column, stored) in _grouping_columns(obs, by, columns).items():
        values = arrow_to_series(nan_to_null(column), facts_of(stored) or ColumnFacts(name, ""))
        found[name] = remove_unused_categories(values).set_axis(rows)
    return pd.DataFrame(found, index=pd.RangeIndex(obs.num_rows))


TASK_CELLS = 2**14
"""About how many cells one task has: opening arrays and sending a plan take as long for one batch as for many."""

UID = pa.field("uid", pa.string(), nullable=False)


def map_batches(
    plan: ReadPlan,
    function: Callable[[Batch], Any],
    size: int,
    schema: pa.Schema,
    executor: Executor | Workers | None,
    place: Location,
    progress: Progress | None,
) -> pa.Table:
    """Call a function with every batch of a plan, and concatenate the results into one table; see `Query.map`."""
    if size < 1:
        raise QueryError(f"map() got batch_size={size}; ask for at least one cell a batch.")
    if not len(schema) or len({*schema.names, "uid"}) <= len(schema):
        raise QueryError(
            f"map() got an output_schema with the columns {schema.names}; name at least one, each once, and not 'uid', which is put first."
        )
    # A multiple of the batch size, so that batches are the same however many tasks there are.
    per_task = max(1, TASK_CELLS // size) * size
    starts = range(0, plan.n_cells, per_task)
    tasks = (
        partial(_map_cells, plan.part(at, min(at + per_task, plan.n_cells)), function, size, schema, at)
        for at in starts
    )
    found: dict[int, pa.Table] = {}
    done = 0
    with closing(run_tasks(tasks, executor, place=place)) as results:
        for number, table in results:
            found[number] = table
            done += table.num_rows
            if progress is not None:
                progress("cells", done, plan.n_cells)
    made = pa.schema([UID, *schema], metadata=schema.metadata)
    # Tables arrive in any order. The empty one is for a query without cells, as there must be one to concatenate.
    return pa.concat_tables([made.empty_table(), *(found[number] for number in sorted(found))])


def _map_cells(plan: ReadPlan, function: Callable[[Batch], Any], size: int, schema: pa.Schema, first: int) -> pa.Table:
    """Call a function with the batches of some cells, of which the first is that number of the query."""
    tables = []
    for batch in read_batches(plan, size):
        cells = f"cells {first:,} to {first + batch.obs.num_rows - 1:,} of the query"
        try:
            given = function(batch)
        except Exception as error:
            error.add_note(f"The function of map() was given {cells}.")
            raise
        tables.append(_fitted(given, batch, schema, cells))
        first += batch.obs.num_rows
    return pa.concat_tables(tables)


def _fitted(given: Any, batch: Batch, schema: pa.Schema, cells: str) -> pa.Table:  # noqa: ANN401  (what a function gives)
    """Cast an output to a schema, or raise if a column does not fit."""
    if isinstance(given, pa.RecordBatch | pa.Table):
        given = dict(zip(given.schema.names, given.columns, strict=True))
    if not isinstance(given, Mapping):
        raise SourceError(
            f"The function of map() gave {brief(given)} for {cells}; it must give an Arrow table, a record batch, or a dictionary of arrays."
        )
    if {*given} != {*schema.names}:
        raise SourceError(
            f"The function of map() gave the columns {sorted(map(str, given))} for {cells}; output_schema has {schema.names}."
        )
    columns, n = [], batch.obs.num_rows
    for wanted in schema:
        try:
            values, arrow = given[wanted.name], wanted.type
            if not isinstance(values, pa.Array | pa.ChunkedArray):
                array = np.asarray(values) if getattr(values, "ndim", 1) == 2 else None
                if array is not None and pa.types.is_fixed_size_list(arrow) and array.shape[1] == arrow.list_size:
                    flat = pa.array(np.ascontiguousarray(array).ravel(), arrow.value_type)
                    values = pa.FixedSizeListArray.from_arrays(flat, arrow.list_size)
                else:
                    # With the type given, Arrow would cut off fractions.
                    values = pa.array(values)
            column = pa.chunked_array([values] if isinstance(values, pa.Array) else values).cast(arrow)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise SourceError(
                f"The function of map() gave values of {wanted.name!r} for {cells} that are not {wanted.type}: {error}."
            ) from error
        if len(column) != n:
            raise SourceError(
                f"The function of map() gave {len(column):,} values of {wanted.name!r} for {n:,} cells, {cells}."
            )
        if column.null_count and not wanted.nullable:
            raise SourceError(
                f"The function of map() gave {column.null_count:,} missing values of {wanted.name!r} for {cells}; output_schema allows none."
            )
        columns.append(column)
    uids = batch.obs.column("uid").cast(pa.string())
    return pa.Table.from_arrays([uids, *columns], schema=pa.schema([UID, *schema], metadata=schema.metadata))
