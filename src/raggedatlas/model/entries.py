"""Entries of a registry: frozen records as rows of an Arrow table, and back."""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import pyarrow as pa
from pydantic import BaseModel

Record = TypeVar("Record", bound=BaseModel)


def entries_schema(record: type[BaseModel], kinds: Mapping[str, pa.DataType], needed: Collection[str]) -> pa.Schema:
    """Return the Arrow schema of a table of records: text, but for the fields that `kinds` names; `needed` are never null.

    Examples
    --------
    >>> class Named(BaseModel):
    ...     name: str
    ...     size: int = 0
    >>> entries_schema(Named, {"size": pa.int64()}, {"name"}).field("name").nullable
    False
    """
    return pa.schema(
        [pa.field(name, kinds.get(name, pa.string()), nullable=name not in needed) for name in record.model_fields]
    )


def entries_to_table(records: Sequence[BaseModel], schema: pa.Schema) -> pa.Table:
    """Write records as rows of a table."""
    return pa.Table.from_pylist([record.model_dump() for record in records], schema=schema)


def entries_from_table(record: type[Record], table: pa.Table) -> list[Record]:
    """Read rows of a table as records, in the order of adding (``created_at``); where a row has nothing, the field's default stands."""
    rows = [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]
    made = [record(**row) for row in rows]
    return sorted(made, key=lambda entry: str(getattr(entry, "created_at")))  # noqa: B009 - records have one; their base has not
