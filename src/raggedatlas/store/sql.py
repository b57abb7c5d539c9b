"""SQL text: the only module that quotes names and values, and writes conditions for Lance and views for DuckDB."""

import datetime as dt
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

from raggedatlas.errors import QueryError

_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`""")
_COMMENT = re.compile(r"--|/\*|;")
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
    """A column of the cell table that a filter compares."""

    name: str  # as stored
    type: pa.DataType  # as stored
    kind: str = ""  # NumPy dtype it had in its file; empty when unknown

    @property
    def family(self) -> str:
        """What it can be compared with: ``text``, ``integer``, ``float``, ``boolean``, ``time``, ``date``, ``span``; else ``other``."""
        for family, test in _FAMILIES.items():
            if test(self.type):
                return family
        return "other"

    @property
    def sql(self) -> str:
        """The column as SQL; NaN counts as missing."""
        quoted = quote_identifier(self.name)
        return f"nanvl({quoted}, CAST(NULL AS DOUBLE))" if self.family == "float" else quoted

    @property
    def compared(self) -> str:
        """The column as SQL that literals can be compared with: Lance has no literal for a span of time."""
        return f"CAST({self.sql} AS BIGINT)" if self.family == "span" else self.sql


_FAMILIES = {
    "text": lambda t: pa.types.is_string(t) or pa.types.is_large_string(t),
    "integer": pa.types.is_integer,
    "float": pa.types.is_floating,
    "boolean": pa.types.is_boolean,
    "time": pa.types.is_timestamp,
    "date": pa.types.is_date,
    "span": pa.types.is_duration,
}
_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


def quote_identifier(name: str) -> str:
    """Quote a column name for Lance's SQL; a dot separates a struct column from its field.

    Examples
    --------
    >>> quote_identifier("n`x"), quote_identifier("spatial.zarr_group")
    ('`n``x`', '`spatial`.`zarr_group`')
    """
    return ".".join("`" + part.replace("`", "``") + "`" for part in name.split("."))


def equals(column: str, value: Any) -> str:  # noqa: ANN401  (any value that people compare with)
    """Write the condition that a column holds a value."""
    return comparison(column, "=", value)


def comparison(column: str, operator: str, value: Any) -> str:  # noqa: ANN401  (any value that people compare with)
    """Write the comparison of a column with a value."""
    return f"{quote_identifier(column)} {operator} {quote_literal(value)}"


def in_list(column: str, values: Iterable[Any]) -> str:
    """Write the condition that a column holds one of some values; no value at all never holds.

    Examples
    --------
    >>> in_list("uid", ["a", "it's"]), in_list("uid", [])
    ("`uid` IN ('a', 'it''s')", 'FALSE')
    """
    listed = ", ".join(map(quote_literal, values))
    return f"{quote_identifier(column)} IN ({listed})" if listed else "FALSE"


def is_null(column: str) -> str:
    """Write the condition that a column has no value."""
    return f"{quote_identifier(column)} IS NULL"


def is_not_null(column: str) -> str:
    """Write the condition that a column has a value."""
    return f"{quote_identifier(column)} IS NOT NULL"


def all_of(*conditions: str) -> str:
    """Join conditions that must all hold; none at all holds."""
    return " AND ".join(f"({condition})" for condition in conditions) or "TRUE"


def any_of(*conditions: str) -> str:
    """Join conditions of which one must hold; none at all never holds."""
    return " OR ".join(f"({condition})" for condition in conditions) or "FALSE"


def negation(condition: str) -> str:
    """Write the condition that another one is false."""
    return f"NOT ({condition})"


def quote_literal(value: Any) -> str:  # noqa: ANN401  (any value that people compare with)
    """Write a value as an SQL literal: text, a bool, a number, a datetime or date, or the NumPy scalar of one.

    What `plain_value` refuses is refused here, too, and spans of time.
    """
    value = plain_value(value)
    # Subclasses come first: a bool is an int, and a datetime is a date.
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        # Written with a minus sign, the digits alone would be 2**63, which no BIGINT holds.
        return f"CAST('{value}' AS BIGINT)" if value == -(2**63) else str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dt.datetime | np.datetime64):
        text = (value.isoformat() if isinstance(value, dt.datetime) else str(value)).replace("T", " ")
        # Without a precision Lance cuts nanoseconds off; with one it refuses years before 1678 and after 2261.
        has_nanoseconds = re.search(r"\.\d{6}(?!000)\d{3}", text) is not None
        return f"timestamp(9) '{text}'" if has_nanoseconds else f"timestamp '{text}'"
    if isinstance(value, dt.date):
        return f"date '{value.isoformat()}'"
    if not isinstance(value, str):
        raise QueryError(f"Only a column of spans of time can be compared with {value!r} ({type(value).__name__}).")
    return "'" + value.replace("'", "''") + "'"


def plain_value(value: Any) -> Any:  # noqa: ANN401  (any value that people compare with)
    """Convert NumPy and pandas scalars to Python's, and refuse values that no column can be compared with.

    `datetime64` and `timedelta64` stay as they are; times with a zone become naive UTC.
    """
    # pandas' NaT is a `datetime`.
    if isinstance(value, np.datetime64 | np.timedelta64 | dt.datetime) and str(value) == "NaT":
        raise QueryError("A filter cannot compare with NaT; ask for missing values with col(...).is_null().")
    if isinstance(value, np.datetime64 | np.timedelta64):
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
    if isinstance(value, bool | int | float | dt.date | dt.timedelta):
        return value
    raise QueryError(
        f"A filter cannot compare with {type(value).__name__} ({value!r}); use text, a number, True or False, a date, a time or a span of time."
    )


def compare(column: Target, operator: str, value: Any) -> str:  # noqa: ANN401  (any value that people compare with)
    """Write a comparison, exactly: numbers beyond the column's type as numbers, a date as its midnight, NaN as missing.

    `operator` is one of ``=``, ``<>``, ``<``, ``<=``, ``>`` and ``>=``.

    Examples
    --------
    >>> compare(Target("n", pa.int64()), ">", 2.5)
    '`n` >= 3'
    """
    value = plain_value(value)
    family, has_time = column.family, False
    if family == "date" and isinstance(value, dt.datetime | np.datetime64):
        # pandas' `Timestamp` has nanoseconds, which NumPy's constructor would drop.
        exact = value.to_datetime64() if hasattr(value, "to_datetime64") else np.datetime64(value)
        midnight = exact.astype("datetime64[D]")
        has_time, value = bool(exact != midnight), midnight.item()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        "text": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "integer": number,
        "float": number,
        "time": isinstance(value, dt.date | np.datetime64),
        "date": isinstance(value, dt.date),
        "span": isinstance(value, dt.timedelta | np.timedelta64),
    }.get(family, False)
    if not fits:
        raise QueryError(
            f"The column {column.name!r} holds {column.type}; it cannot be compared with {value!r} ({type(value).__name__})."
        )
    if family == "integer":
        return _compare_integer(column, operator, value)
    if family == "span":
        return _compare_integer(column, operator, _in_units(value, column.type.unit))
    if family == "float":
        return _compare_float(column, operator, value)
    if has_time:
        if operator in {"=", "<>"}:
            return _always(column, holds=operator == "<>")
        # A date before noon of a day is that day or an earlier one, and a date after it is a later one.
        operator = "<=" if operator in {"<", "<="} else ">"
    return f"{column.sql} {operator} {quote_literal(value)}"


def is_member(column: Target, values: Iterable[Any]) -> str:
    """Write the condition that a column holds one of some values; no value at all never holds."""
    single = [compare(column, "=", value) for value in values]
    start = f"{column.compared} = "
    # A value that no cell can have became a condition without a literal, and is left out here.
    literals = sorted({text.removeprefix(start) for text in single if text.startswith(start)})
    # Lance compares with one precision of time for all of a list.
    if any(literal.startswith("timestamp(9) '") for literal in literals):
        literals = [literal.replace("timestamp '", "timestamp(9) '", 1) for literal in literals]
    return f"{column.compared} IN ({', '.join(literals)})" if literals else _always(column, holds=False)


def value_by_dataset(values: Mapping[str, str | None]) -> str:
    """Write the value that each cell has by its dataset, as an expression: dataset uid -> value.

    Examples
    --------
    >>> value_by_dataset({"d1": "one"})
    "array_element(['one'], CAST(array_position(['d1'], `dataset_uid`) AS BIGINT))"
    """
    if not values:
        return "CAST(NULL AS STRING)"
    uids = ", ".join(map(quote_literal, values))
    listed = ", ".join("NULL" if value is None else quote_literal(value) for value in values.values())
    return f"array_element([{listed}], CAST(array_position([{uids}], {quote_identifier('dataset_uid')}) AS BIGINT))"


def is_missing(column: Target) -> str:
    """Write the condition that a column has no value."""
    return f"{column.sql} IS NULL"


def is_present(column: Target) -> str:
    """Write the condition that a column has a value."""
    return f"{column.sql} IS NOT NULL"


def text_matches(column: Target, function: str, text: str) -> str:
    """Write the condition that a text column begins with a text (``starts_with``) or contains it (``contains``)."""
    if column.family != "text":
        raise QueryError(f"The column {column.name!r} holds {column.type}; {function} needs text.")
    return f"{function}({column.sql}, {quote_literal(text)})"


def _compare_float(column: Target, operator: str, value: float) -> str:
    # 0.1 as float32 is not 0.1 as float64, so the literal is rounded as the stored values were.
    single = column.kind == "float32" or column.type == pa.float32()
    kind: type[np.floating[Any]] = np.float32 if single else np.float64
    largest = float(np.finfo(kind).max)
    with np.errstate(over="ignore"):
        rounded = float(kind(value)) if abs(value) <= float(np.finfo(np.float64).max) else math.inf
    if math.isfinite(rounded):
        return f"{column.sql} {operator} {quote_literal(rounded)}"
    if operator in {"=", "<>"}:
        return _always(column, holds=operator == "<>")
    # No value lies between the number and the largest of the type, beyond which there is infinity only.
    if value > 0:
        return f"{column.sql} {'<=' if operator in {'<', '<='} else '>'} {largest!r}"
    return f"{column.sql} {'>=' if operator in {'>', '>='} else '<'} {-largest!r}"


def _in_units(value: dt.timedelta | np.timedelta64, unit: str) -> Fraction:
    """Return how many units of a column a span is, exactly."""
    # pandas' `Timedelta` is a `timedelta` with nanoseconds, which `//` below would drop.
    exact: Any = value.to_timedelta64() if hasattr(value, "to_timedelta64") else value
    if isinstance(exact, np.timedelta64):
        try:
            count = int(exact.astype("timedelta64[ns]").astype(np.int64))
        except TypeError as error:
            raise QueryError(f"A filter cannot compare with {exact}: months and years differ in length.") from error
    else:
        count = exact // dt.timedelta(microseconds=1) * 1000
    return Fraction(count, _NANOSECONDS[unit])


def _compare_integer(column: Target, operator: str, value: float | Fraction) -> str:
    integer = math.floor(value)
    if integer != value:
        if operator in {"=", "<>"}:
            return _always(column, holds=operator == "<>")
        # n < 2.5 is n <= 2, and n > 2.5 is n >= 3.
        operator, integer = ("<=", integer) if operator in {"<", "<="} else (">=", integer + 1)
    lowest, highest = _BOUNDS["int64" if column.family == "span" else str(column.type)]
    if integer < lowest or integer > highest:
        # All values of the column are on one side of the number, so the comparison is decided without them.
        below = integer > highest
        return _always(
            column, holds=operator == "<>" or (operator in {"<", "<="} if below else operator in {">", ">="})
        )
    return f"{column.compared} {operator} {quote_literal(integer)}"


def _always(column: Target, *, holds: bool) -> str:
    """Write what holds for every value, or for none, and is unknown where the value is missing."""
    return f"{column.compared} {'=' if holds else '<>'} {column.compared}"


def parenthesized(where: str | None) -> str | None:
    """Enclose a filter in parentheses, after checking that nothing in it can close them early.

    Lance's parser ignores everything after a complete expression, so ``"n = 1) or so"`` would pass as ``"n = 1"``.
    """
    if where is None:
        return None
    bare, depth = _QUOTED.sub("''", where), 0
    for letter in bare:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
    if depth or _COMMENT.search(bare):
        raise QueryError(
            f"The filter {where!r} has a parenthesis without a partner, a comment or a semicolon outside quotes; write one expression, "
            "e.g. \"cell_type = 'T cell' AND n_genes > 200\"."
        )
    return f"({where})"


def create_view(name: str, columns: Mapping[str, str], source: str, present: str = "") -> str:
    """Return the definition of a view for DuckDB.

    `columns` maps the name of each column to its expression over `source`, which is what comes after FROM. Rows where
    the expression `present` is NULL are left out.

    Examples
    --------
    >>> create_view("cells", {"a share": "c.c1"}, "_cells c", "c.c1")
    'CREATE VIEW "cells" AS SELECT c.c1 AS "a share" FROM _cells c WHERE c.c1 IS NOT NULL'
    """
    shown = ", ".join(f"{expression} AS {_name(column)}" for column, expression in columns.items())
    condition = f" WHERE {present} IS NOT NULL" if present else ""
    return f"CREATE VIEW {_name(name)} AS SELECT {shown} FROM {source}{condition}"


def create_table(name: str, columns: str = "", source: str = "") -> str:
    """Return the definition of a temporary table for DuckDB: with some columns and no rows, or with all of a source."""
    return f"CREATE TEMP TABLE {_name(name)} " + (f"AS FROM {source}" if source else f"({columns})")


def _name(name: str) -> str:
    """Quote a name for DuckDB."""
    return '"' + name.replace('"', '""') + '"'
