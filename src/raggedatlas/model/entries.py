"""Records as rows of an Arrow table, and back: what is read from an atlas is parsed here, and nowhere else."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast, get_origin

import pyarrow as pa
from pydantic import BaseModel, TypeAdapter, ValidationError

from raggedatlas.errors import CorruptError

Record = TypeVar("Record", bound=BaseModel)
T = TypeVar("T")


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


def record_from_row(record: type[Record], row: Mapping[str, Any], table: str, key: str) -> Record:
    """Read one row of a table; a null is the field's default.

    Parameters
    ----------
    record : type
        What a row is.
    row : mapping of str to any
        Column -> value.
    table, key : str
        The table, and the column that names a row in messages.

    Raises
    ------
    CorruptError
        If a value is not what the record has there; the message names table, row and field.

    Examples
    --------
    >>> class Named(BaseModel):
    ...     name: str
    ...     size: int = 0
    >>> record_from_row(Named, {"name": "a", "size": None}, "things", "name")
    Named(name='a', size=0)
    """
    try:
        return record(**{name: value for name, value in row.items() if value is not None})
    except (ValidationError, UnicodeDecodeError) as error:
        raise _damaged(error, table, row.get(key)) from error


def read_json(kind: type[T], text: str, table: str, row: object, field: str) -> T:
    """Read the JSON text of one field of a row; the text of a frozen object is parsed once.

    Parameters
    ----------
    kind : type
        What it holds: a frozen pydantic model or dataclass, or a type such as ``dict[str, int]``.
    text : str
        The field; empty text stands for an empty object.
    table, row, field : str
        Where it is, for messages.

    Raises
    ------
    CorruptError
        If it is no JSON, or holds something else.

    Examples
    --------
    >>> read_json(dict[str, int], '{"a": 1}', "things", "first", "sizes")
    {'a': 1}
    """
    try:
        # A dict is the caller's own; objects are frozen and can be shared.
        parse = _parse if get_origin(kind) is dict else _parsed
        return cast("T", parse(kind, text or "{}"))
    except (ValidationError, TypeError) as error:
        raise _damaged(error, table, row, field) from error


def _parse(kind: Any, text: str) -> Any:  # noqa: ANN401
    return _adapter(kind).validate_json(text)


_parsed: Any = lru_cache(maxsize=1024)(_parse)


@lru_cache(maxsize=64)
def _adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401
    return TypeAdapter(kind)


def _damaged(error: Exception, table: str, row: object, field: str = "") -> CorruptError:
    """Name table, row and field of what does not parse."""
    first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
    place = ".".join([field, *map(str, first["loc"])]).strip(".")
    return CorruptError(
        f"Table {table!r}, row {str(row)!r}: the field {place!r} is damaged: {first['msg']}. Run validate('deep'), and "
        "restore the atlas from a copy or a snapshot with restore()."
    )


def entries_to_table(records: Sequence[BaseModel], schema: pa.Schema) -> pa.Table:
    """Write records as rows of a table."""
    return pa.Table.from_pylist([record.model_dump() for record in records], schema=schema)


def entries_from_table(record: type[Record], table: pa.Table, name: str) -> list[Record]:
    """Read rows of a table as records, in the order of adding (``created_at``); where a row has nothing, the field's default stands.

    Raises
    ------
    CorruptError
        If a row is damaged; the message names the table by `name`, the row by its uid, and the field.
    """
    made = [record_from_row(record, row, name, "uid") for row in rows_of(table, name)]
    return sorted(made, key=lambda entry: str(getattr(entry, "created_at")))  # noqa: B009 - records have one; their base has not


def rows_of(table: pa.Table, name: str) -> list[dict[str, Any]]:
    """Give the rows of a table as Python objects.

    Raises
    ------
    CorruptError
        If text in it is not valid UTF-8; the message names the table by `name`.
    """
    try:
        return cast("list[dict[str, Any]]", table.to_pylist())
    except UnicodeDecodeError as error:
        raise CorruptError(
            f"Table {name!r} holds text that is not UTF-8 ({error}); restore the atlas from a copy or a snapshot with restore()."
        ) from error
