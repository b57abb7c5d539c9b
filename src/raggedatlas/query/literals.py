"""Quoting: the one place where names and values of people become SQL text."""

import datetime as dt
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from raggedatlas.errors import QueryError

_BOUNDS = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A column of the cell table that a filter compares.

    Parameters
    ----------
    name : str
        Its stored name.
    type : pyarrow.DataType
        Its stored type.
    kind : str
        NumPy dtype it had in its file; empty when unknown.
    """

    name: str
    type: pa.DataType
    kind: str = ""

    @property
    def family(self) -> str:
        """What it can be compared with: ``text``, ``integer``, ``float``, ``boolean``, ``time``, ``date``; else ``other``."""
        for family, test in _FAMILIES.items():
            if test(self.type):
                return family
        return "other"

    @property
    def sql(self) -> str:
        """The column as SQL; NaN counts as missing."""
        quoted = quote_identifier(self.name)
        return f"nanvl({quoted}, CAST(NULL AS DOUBLE))" if self.family == "float" else quoted


_FAMILIES = {
    "text": lambda t: pa.types.is_string(t) or pa.types.is_large_string(t),
    "integer": pa.types.is_integer,
    "float": pa.types.is_floating,
    "boolean": pa.types.is_boolean,
    "time": pa.types.is_timestamp,
    "date": pa.types.is_date,
}


def quote_identifier(name: str) -> str:
    """Quote a column name for Lance's SQL.

    Examples
    --------
    >>> quote_identifier("n`x")
    '`n``x`'
    """
    return "`" + name.replace("`", "``") + "`"


def quote_literal(value: Any) -> str:  # noqa: ANN401  (any value that people compare with)
    """Write a value as an SQL literal.

    Parameters
    ----------
    value : str, bool, int, float, datetime or date
        Or the NumPy scalar of one.

    Raises
    ------
    QueryError
        For NaN, infinities, text that is no Unicode, and other types.

    Examples
    --------
    >>> quote_literal("5'-end"), quote_literal(True), quote_literal(0.1), quote_literal(-3)
    ("'5''-end'", 'TRUE', '0.1', '-3')
    """
    value = plain_value(value)
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return f"CAST('{value}' AS BIGINT)" if value == -(2**63) else str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dt.datetime):
        return f"timestamp '{value.isoformat(sep=' ')}'"
    if isinstance(value, np.datetime64):
        return f"timestamp '{str(value).replace('T', ' ')}'"
    if isinstance(value, dt.date):
        return f"date '{value.isoformat()}'"
    return "'" + str(value).replace("'", "''") + "'"


def plain_value(value: Any) -> Any:  # noqa: ANN401  (any value that people compare with)
    """Turn NumPy and pandas scalars into Python's own, and refuse what no column can be compared with.

    Raises
    ------
    QueryError
        For NaN, infinities, text that is no Unicode, and other types.
    """
    if isinstance(value, np.datetime64):
        if np.isnat(value):
            raise QueryError("A filter cannot compare with NaT; ask for missing values with col(...).is_null().")
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise QueryError(f"A filter cannot compare with {value}; ask for missing values with col(...).is_null().")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise QueryError(
                f"A filter cannot compare with {value!r}: it is no Unicode text ({error.reason})."
            ) from error
        return str(value)
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).replace(tzinfo=None) if value.tzinfo else value
    if isinstance(value, bool | int | float | dt.date):
        return value
    raise QueryError(
        f"A filter cannot compare with {type(value).__name__} ({value!r}); use text, a number, True or False, a date or a time."
    )


def compare(column: Target, operator: str, value: Any) -> str:  # noqa: ANN401  (any value that people compare with)
    """Write a comparison, exactly: numbers beyond the column's type compare as numbers, NaN compares as missing.

    Parameters
    ----------
    column : Target
        The column.
    operator : {"=", "<>", "<", "<=", ">", ">="}
        SQL operator.
    value : scalar
        See `quote_literal`.

    Raises
    ------
    QueryError
        If the column cannot be compared with such a value.

    Examples
    --------
    >>> compare(Target("n", pa.int64()), ">", 2.5)
    '`n` >= 3'
    """
    value = plain_value(value)
    family = column.family
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        "text": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "integer": number,
        "float": number,
        "time": isinstance(value, dt.date | np.datetime64),
        "date": isinstance(value, dt.date),
    }.get(family, False)
    if not fits:
        raise QueryError(
            f"The column {column.name!r} holds {column.type}; it cannot be compared with {value!r} ({type(value).__name__})."
        )
    if family == "integer":
        return _compare_integer(column, operator, value)
    if family == "float":
        value = float(np.float32(value)) if column.kind == "float32" else _as_float(value)
    if family == "date" and isinstance(value, dt.datetime):
        value = value.date()
    return f"{column.sql} {operator} {quote_literal(value)}"


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise QueryError(f"The number {value} is beyond what a float column can hold.") from error


def _compare_integer(column: Target, operator: str, value: float) -> str:
    whole = math.floor(value)
    if whole != value:
        if operator in {"=", "<>"}:
            return _always(column, holds=operator == "<>")
        operator, whole = ("<=", whole) if operator in {"<", "<="} else (">=", whole + 1)
    lowest, highest = _BOUNDS[str(column.type)]
    if whole < lowest or whole > highest:
        below = whole > highest
        return _always(
            column, holds=operator == "<>" or (operator in {"<", "<="} if below else operator in {">", ">="})
        )
    return f"{column.sql} {operator} {quote_literal(whole)}"


def _always(column: Target, *, holds: bool) -> str:
    """Write what holds for every value, or for none, and is unknown where the value is missing."""
    return f"{column.sql} {'=' if holds else '<>'} {column.sql}"
