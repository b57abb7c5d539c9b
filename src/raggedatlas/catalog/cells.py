"""The cell table: add columns for new metadata and feature spaces, and keep the original type of each column."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.errors import SchemaError
from raggedatlas.model.frames import ColumnFacts, facts_of, is_text
from raggedatlas.store.sql import all_of, is_not_null, is_null
from raggedatlas.store.tables import Tables


@dataclass(frozen=True, slots=True)
class CellColumn:
    """A metadata column of an `add`.

    Parameters
    ----------
    stored : str
        Its name in the cell table.
    type : pyarrow.DataType
        Its stored type.
    facts : ColumnFacts
        Its type and categories in the file.
    """

    stored: str
    type: pa.DataType
    facts: ColumnFacts


def stored_type(arrow: pa.DataType) -> pa.DataType:
    """Return the type in which the cell table stores a column: the widest of its family, so that later files fit.

    Examples
    --------
    >>> stored_type(pa.int8()), stored_type(pa.float32()), stored_type(pa.uint64())
    (DataType(int64), DataType(double), DataType(uint64))
    """
    if pa.types.is_dictionary(arrow):
        return stored_type(arrow.value_type)
    if pa.types.is_integer(arrow):
        return pa.uint64() if arrow == pa.uint64() else pa.int64()
    if pa.types.is_floating(arrow):
        return pa.float64()
    return pa.string() if pa.types.is_large_string(arrow) else arrow


def column_conflict(field: pa.Field, column: CellColumn) -> str | None:
    """Return why a column cannot be appended to an existing one without changing a value, or None if it can."""
    if field.type == column.type:
        return None
    both = {str(field.type), str(column.type)}
    if both <= {"int64", "uint64"} or (str(field.type) == "double" and pa.types.is_integer(column.type)):
        return None
    return f"it is {column.type} here and {field.type} in the atlas"


def fit_values(name: str, values: pa.ChunkedArray, target: pa.DataType) -> pa.ChunkedArray:
    """Cast a column to its stored type without changing a value.

    Raises
    ------
    SchemaError
        If a value would change.
    """
    try:
        return values.cast(target, safe=True)
    except pa.ArrowInvalid as error:
        raise SchemaError(
            f"Column {name!r} does not fit the atlas's column of type {target} without changing a value ({error}); "
            f"rename it with obs={{{name!r}: 'another_name'}} or cast it with cast={{{name!r}: 'str'}}."
        ) from error


def add_cell_columns(catalog: Catalog, columns: Sequence[CellColumn], pointers: Sequence[pa.Field]) -> None:
    """Add the metadata and pointer columns that the cell table lacks, and join the facts of those it has.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    columns : sequence of CellColumn
        Metadata columns of a file.
    pointers : sequence of pyarrow.Field
        Pointer columns, as `pointer_field` makes them.
    """
    schema = catalog.tables.schema(CELLS)
    columns = _once(columns)
    fresh = [
        pa.field(c.stored, c.type, metadata=c.facts.to_metadata()) for c in columns if c.stored not in schema.names
    ]
    fresh += [p for p in pointers if p.name not in schema.names]
    if fresh:
        catalog.tables.add_columns(CELLS, fresh)
    for column in columns:
        if pa.types.is_string(column.type) and not pa.types.is_string(
            catalog.tables.schema(CELLS).field(column.stored).type
        ):
            _convert_to_text(catalog, column.stored)

    def joined(now: pa.Schema) -> Mapping[str, Mapping[bytes, bytes]]:
        updates = {}
        for column in columns:
            was = facts_of(now.field(column.stored))
            facts = column.facts if was is None else join_facts(was, column.facts)
            if facts != was:
                updates[column.stored] = facts.to_metadata()
        return updates

    if joined(catalog.tables.schema(CELLS)):
        catalog.tables.update_field_metadata(CELLS, joined)


def text_of(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return values of a cell column as text, for a column that is numeric in one file and text in another.

    Examples
    --------
    >>> text_of(pa.chunked_array([[1.5, 2.0, None]])).to_pylist()
    ['1.5', '2', None]
    """
    return values.cast(pa.string())


def _convert_to_text(catalog: Catalog, name: str) -> None:
    """Convert a numeric column to text.

    The old column keeps its values under another name until the new one is complete, so that a writer that
    commits in between loses nothing; rows added after the columns are renamed are refused by their type.
    """
    tables = catalog.tables
    was = tables.schema(CELLS).field(name)
    fresh, old = (_free(f"{name}__{word}", tables.schema(CELLS).names) for word in ("as_text", "before"))

    schema = pa.schema([pa.field(fresh, pa.string(), metadata=was.metadata)])

    def texts(at: Tables) -> pa.RecordBatchReader:
        batches = (pa.record_batch([batch.column(0).cast(pa.string())], schema) for batch in at.batches(CELLS, [name]))
        return pa.RecordBatchReader.from_batches(schema, batches)

    tables.fill_columns(CELLS, texts)
    tables.rename_columns(CELLS, {name: old, fresh: name})
    late = tables.read(CELLS, ["uid", old], all_of(is_null(name), is_not_null(old)))
    if late.num_rows:
        rows = pa.table({"uid": late.column("uid"), name: text_of(late.column(old))})
        tables.merge(CELLS, ["uid"], rows, update=True)
    tables.drop_columns(CELLS, [old])


def _free(name: str, taken: Sequence[str]) -> str:
    return name if name not in taken else _free(f"{name}_", taken)


def _once(columns: Sequence[CellColumn]) -> list[CellColumn]:
    found: dict[str, CellColumn] = {}
    for column in columns:
        known = found.get(column.stored)
        if known is not None:
            kind = column.type if pa.types.is_string(column.type) else known.type
            column = CellColumn(known.stored, kind, join_facts(known.facts, column.facts))  # noqa: PLW2901
        found[column.stored] = column
    return list(found.values())


def join_facts(old: ColumnFacts, new: ColumnFacts) -> ColumnFacts:
    """Combine the facts of one column from two files.

    Categories keep the older order and append new ones; they stay ordered only if both are ordered and neither
    contradicts the other's order. Different kinds of number join to what holds both; text and categorical join to categorical.

    Examples
    --------
    >>> a = ColumnFacts("stage", "categorical", ("I", "II"), ordered=True)
    >>> b = ColumnFacts("stage", "categorical", ("II", "III"), ordered=True)
    >>> join_facts(a, b).categories, join_facts(a, b).ordered
    (('I', 'II', 'III'), True)
    """
    texts = is_text(old.category_kind) and is_text(new.category_kind)
    if old.kind == new.kind == "categorical" and (old.category_kind == new.category_kind or texts):
        merged, consistent = _merge_categories(old.categories or (), new.categories or ())
        return replace(old, categories=merged, ordered=old.ordered and new.ordered and consistent)
    if old.kind == new.kind:
        return old
    kinds = {old.kind, new.kind}
    if "categorical" in kinds or any(map(is_text, kinds)):
        return (
            replace(old, kind="string", categories=None, ordered=False, category_kind="string")
            if _text(old)
            else replace(old, kind="")
        )
    with contextlib.suppress(TypeError, KeyError):
        import numpy as np

        return replace(old, kind=str(np.result_type(old.kind, new.kind)))
    return replace(old, kind="")


def _text(facts: ColumnFacts) -> bool:
    return facts.kind != "categorical" or is_text(facts.category_kind)


def _merge_categories(old: tuple[Any, ...], new: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
    if old == new:
        return old, True
    position = {value: i for i, value in enumerate(old)}
    shared = [position[value] for value in new if value in position]
    consistent = shared == sorted(shared)
    if not consistent or not shared:
        return (*old, *(v for v in new if v not in position)), False
    merged: list[Any] = []
    rest = list(old)
    for value in new:
        if value in position:
            upto = rest.index(value) + 1
            merged += rest[:upto]
            rest = rest[upto:]
        elif rest and any(v in position for v in new[new.index(value) :]):
            merged.append(value)
        else:
            merged += [*rest, value]
            rest = []
    return (*merged, *rest), True


def cell_rows(schema: pa.Schema, columns: Mapping[str, Any], n: int) -> pa.Table:
    """Return columns as rows of the cell table; missing columns are null.

    Parameters
    ----------
    schema : pyarrow.Schema
        Of the cell table.
    columns : mapping of str to array
        Stored name -> values.
    n : int
        Number of cells.
    """
    arrays = [columns[f.name] if f.name in columns else pa.nulls(n, f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema.remove_metadata())
