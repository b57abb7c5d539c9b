"""A function over all cells of a query, batch by batch, each cell once, into a table."""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from raggedatlas.errors import QueryError, SourceError
from raggedatlas.model.arguments import brief
from raggedatlas.model.batch import Batch
from raggedatlas.query.parts import ReadPlan
from raggedatlas.query.read import read_batches
from raggedatlas.store.executors import Workers, run_tasks
from raggedatlas.store.location import Location

TASK_CELLS = 2**14
"""About how many cells one task has: opening arrays and sending a plan take as long for one batch as for many."""

UID = pa.field("uid", pa.string(), nullable=False)

Progress = Callable[[str, int, int], None]
"""Called with ``"cells"``, how many are done, and how many there are."""


def map_batches(
    plan: ReadPlan,
    function: Callable[[Batch], Any],
    size: int,
    schema: pa.Schema,
    executor: Executor | Workers | None,
    place: Location,
    progress: Progress | None,
) -> pa.Table:
    """Call a function with every batch of a plan, and put what it gives into one table; see `Query.map`.

    Raises
    ------
    QueryError
        For a batch size or schema that cannot be.
    SourceError
        If the function gives something else than the schema says, naming the cells.
    """
    if size < 1:
        raise QueryError(f"map() got batch_size={size}; ask for at least one cell a batch.")
    if not len(schema) or len({*schema.names, "uid"}) <= len(schema):
        raise QueryError(
            f"map() got an output_schema with the columns {schema.names}; name at least one, each once, and not 'uid', which is put first."
        )
    per_task = max(1, TASK_CELLS // size) * size
    starts = range(0, plan.n_cells, per_task)
    tasks = (_MapTask(plan.part(at, min(at + per_task, plan.n_cells)), function, size, schema, at) for at in starts)
    found: dict[int, pa.Table] = {}
    done = 0
    with closing(run_tasks(tasks, executor, place=place)) as results:
        for number, table in results:
            found[number] = table
            done += table.num_rows
            if progress is not None:
                progress("cells", done, plan.n_cells)
    made = pa.schema([UID, *schema], metadata=schema.metadata)
    return pa.concat_tables([made.empty_table(), *(found[number] for number in sorted(found))])


@dataclass(frozen=True)
class _MapTask:
    plan: ReadPlan = field(repr=False)
    function: Callable[[Batch], Any]
    size: int
    schema: pa.Schema
    first: int

    def __call__(self) -> pa.Table:
        tables, first = [], self.first
        for batch in read_batches(self.plan, self.size):
            cells = f"cells {first:,} to {first + batch.obs.num_rows - 1:,} of the query"
            try:
                given = self.function(batch)
            except Exception as error:
                error.add_note(f"The function of map() was given {cells}.")
                raise
            tables.append(_fitted(given, batch, self.schema, cells))
            first += batch.obs.num_rows
        return pa.concat_tables(tables)


def _fitted(given: Any, batch: Batch, schema: pa.Schema, cells: str) -> pa.Table:  # noqa: ANN401  (what a function gives)
    """Give an output the types of a schema; refuse what does not fit."""
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
    columns = [_column(given[field.name], field, batch.obs.num_rows, cells) for field in schema]
    uids = batch.obs.column("uid").cast(pa.string())
    return pa.Table.from_arrays([uids, *columns], schema=pa.schema([UID, *schema], metadata=schema.metadata))


def _column(values: Any, wanted: pa.Field, n: int, cells: str) -> pa.ChunkedArray:  # noqa: ANN401
    try:
        column = _as_type(values, wanted.type)
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
    return column


def _as_type(values: Any, arrow: pa.DataType) -> pa.ChunkedArray:  # noqa: ANN401
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return pa.chunked_array([values] if isinstance(values, pa.Array) else values).cast(arrow)
    array = np.asarray(values) if getattr(values, "ndim", 1) == 2 else None
    if array is not None and pa.types.is_fixed_size_list(arrow) and array.shape[1] == arrow.list_size:
        flat = pa.array(np.ascontiguousarray(array).ravel(), arrow.value_type)
        return pa.chunked_array([pa.FixedSizeListArray.from_arrays(flat, arrow.list_size)]).cast(arrow)
    # With the type given, Arrow would cut off fractions.
    return pa.chunked_array([pa.array(values)]).cast(arrow)
