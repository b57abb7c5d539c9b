"""Filters from people, as values: expressions over columns and mappings, turned into SQL in one place."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from raggedatlas.catalog.cells import find_column, metadata_columns
from raggedatlas.errors import QueryError
from raggedatlas.query.literals import Target, compare, plain_value, quote_identifier, quote_literal

DATASET = "dataset"
"""The virtual column that holds a cell's dataset name."""

_DEEPEST = 40
_OPERATORS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "==": ("=", lambda a, b: bool(a == b)),
    "!=": ("<>", lambda a, b: bool(a != b)),
    "<": ("<", lambda a, b: bool(a < b)),
    "<=": ("<=", lambda a, b: bool(a <= b)),
    ">": (">", lambda a, b: bool(a > b)),
    ">=": (">=", lambda a, b: bool(a >= b)),
}


@dataclass(frozen=True)
class Columns:
    """The columns that a filter may name.

    Parameters
    ----------
    schema : pyarrow.Schema
        Of the cell table.
    datasets : mapping of str to str
        Dataset uid -> name.
    """

    schema: pa.Schema
    datasets: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Every name that can be used, as people know them."""
        facts = metadata_columns(self.schema)
        return ["uid", "cell_name", DATASET, "dataset_uid", *(f.name or stored for stored, f in facts.items())]

    def stored(self, name: str) -> str:
        """Find the stored column of a name.

        Raises
        ------
        QueryError
            If there is none; the message lists what there is.
        """
        found = find_column(self.schema, name)
        if found is None:
            near = difflib.get_close_matches(name, self.names, n=1, cutoff=0.6)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise QueryError(f"There is no column {name!r}.{hint} Columns are {self.names}.")
        return found

    def target(self, name: str) -> Target:
        """Describe the column of a name for a comparison."""
        stored = self.stored(name)
        facts = metadata_columns(self.schema).get(stored)
        kind = self.schema.field(stored).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        return Target(stored, kind, facts.kind if facts else "")


class Filter:
    """A condition on cells; combine with ``&``, ``|`` and ``~``.

    As in SQL, a comparison with a missing value is neither true nor false: neither ``col("donor") == "D1"`` nor its
    negation keeps a cell without a donor; ``col("donor").is_null()`` does. NaN counts as missing.

    Examples
    --------
    >>> (col("cell_type") == "B") & ~(col("n_genes") < 200)
    (col('cell_type') == 'B') & (~(col('n_genes') < 200))
    """

    def __and__(self, other: "Filter") -> "Filter":
        """Hold where both hold."""
        return _combine("AND", self, other)

    def __or__(self, other: "Filter") -> "Filter":
        """Hold where either holds."""
        return _combine("OR", self, other)

    def __invert__(self) -> "Filter":
        """Hold where this is false."""
        return Negation(self)

    def __bool__(self) -> bool:
        """Refuse ``and``, ``or``, ``not`` and chained comparisons, which Python would decide at once."""
        raise QueryError(
            f"The filter {self!r} has no truth value by itself; combine filters with '&', '|' and '~', in parentheses."
        )

    def to_sql(self, columns: Columns, depth: int = 0) -> str:
        """Write the condition as SQL, every name and value quoted.

        Raises
        ------
        QueryError
            For an unknown column, a value that does not fit its column, or nesting beyond all use.
        """
        if depth > _DEEPEST:
            raise QueryError(
                f"The filter nests more than {_DEEPEST} levels deep; use col(...).isin([...]) for lists of values."
            )
        return self._sql(columns, depth)

    def _sql(self, columns: Columns, depth: int) -> str:
        raise QueryError(
            f"{type(self).__name__} is no complete filter; compare a column, e.g. col('cell_type') == 'B'."
        )


@dataclass(frozen=True, eq=False)
class Column:
    """A column of the cell table, by its name there or in its file; comparisons with it make filters.

    Examples
    --------
    >>> col("percent.mt") < 5
    col('percent.mt') < 5
    >>> col("cell_type").isin(["B", "T"])
    col('cell_type').isin(['B', 'T'])
    """

    name: str

    def __eq__(self, value: object) -> "Filter":  # type: ignore[override]
        """Equal; ``== None`` asks for missing values."""
        return IsNull(self.name) if value is None else Comparison(self.name, "==", plain_value(value))

    def __ne__(self, value: object) -> "Filter":  # type: ignore[override]
        """Different; ``!= None`` asks for values that are there."""
        return ~IsNull(self.name) if value is None else Comparison(self.name, "!=", plain_value(value))

    def __lt__(self, value: object) -> "Filter":
        """Smaller."""
        return Comparison(self.name, "<", plain_value(value))

    def __le__(self, value: object) -> "Filter":
        """Smaller or equal."""
        return Comparison(self.name, "<=", plain_value(value))

    def __gt__(self, value: object) -> "Filter":
        """Larger."""
        return Comparison(self.name, ">", plain_value(value))

    def __ge__(self, value: object) -> "Filter":
        """Larger or equal."""
        return Comparison(self.name, ">=", plain_value(value))

    __hash__ = None  # type: ignore[assignment]

    def isin(self, values: Iterable[Any]) -> "Filter":
        """Be one of some values; None among them also takes missing values."""
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise QueryError(
                f"col({self.name!r}).isin takes a list of values, got {values!r}; write col({self.name!r}) == {values!r}."
            )
        listed = [None if v is None else plain_value(v) for v in values]
        members: Filter = Membership(self.name, tuple(v for v in listed if v is not None))
        return members | IsNull(self.name) if None in listed else members

    def is_null(self) -> "Filter":
        """Be missing; for a pointer column: lack that modality."""
        return IsNull(self.name)

    def startswith(self, text: str) -> "Filter":
        """Begin with a text; case counts, no character is special."""
        return TextMatch(self.name, "startswith", _text(text))

    def contains(self, text: str) -> "Filter":
        """Hold a text; case counts, no character is special."""
        return TextMatch(self.name, "contains", _text(text))

    def __bool__(self) -> bool:
        """Refuse to be a condition by itself."""
        raise QueryError(f"col({self.name!r}) is no condition; compare it, e.g. col({self.name!r}) == True.")


def col(name: str) -> Column:
    """Name a column in a filter.

    Parameters
    ----------
    name : str
        Its name in the cell table or in its file (``percent.mt``), or ``dataset`` for the dataset's name.

    Examples
    --------
    >>> col("donor").is_null() | (col("donor") == "D1")
    (col('donor').is_null()) | (col('donor') == 'D1')
    """
    return Column(name)


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Filter):
    """A column beside a value."""

    column: str
    operator: str
    value: Any

    def _sql(self, columns: Columns, depth: int) -> str:
        sql, holds = _OPERATORS[self.operator]
        if self.column == DATASET:
            value = _text(self.value)
            return _datasets(columns, lambda name: holds(name, value))
        return compare(columns.target(self.column), sql, self.value)

    def __repr__(self) -> str:
        return f"col({self.column!r}) {self.operator} {self.value!r}"


@dataclass(frozen=True, eq=False, repr=False)
class Membership(Filter):
    """A column among some values."""

    column: str
    values: tuple[Any, ...]

    def _sql(self, columns: Columns, depth: int) -> str:
        if self.column == DATASET:
            wanted = set(self.values)
            return _datasets(columns, lambda name: name in wanted)
        target = columns.target(self.column)
        single = [compare(target, "=", value) for value in self.values]
        start = f"{target.sql} = "
        literals = sorted({text.removeprefix(start) for text in single if text.startswith(start)})
        return f"{target.sql} IN ({', '.join(literals)})" if literals else f"{target.sql} <> {target.sql}"

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.values[:8])) + (
            f", ... {len(self.values)} in all" if len(self.values) > 8 else ""
        )
        return f"col({self.column!r}).isin([{shown}])"


@dataclass(frozen=True, eq=False, repr=False)
class IsNull(Filter):
    """A column without a value."""

    column: str

    def _sql(self, columns: Columns, depth: int) -> str:
        if self.column == DATASET:
            return "FALSE"
        return f"{columns.target(self.column).sql} IS NULL"

    def __repr__(self) -> str:
        return f"col({self.column!r}).is_null()"


@dataclass(frozen=True, eq=False, repr=False)
class TextMatch(Filter):
    """A text column that begins with a text or holds it."""

    column: str
    how: str
    text: str

    def _sql(self, columns: Columns, depth: int) -> str:
        if self.column == DATASET:
            begins = self.how == "startswith"
            return _datasets(columns, lambda name: name.startswith(self.text) if begins else self.text in name)
        target = columns.target(self.column)
        if target.family != "text":
            raise QueryError(f"The column {target.name!r} holds {target.type}; {self.how} needs text.")
        function = "starts_with" if self.how == "startswith" else "contains"
        return f"{function}({target.sql}, {quote_literal(self.text)})"

    def __repr__(self) -> str:
        return f"col({self.column!r}).{self.how}({self.text!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Combination(Filter):
    """Several conditions joined by AND or OR."""

    word: str
    parts: tuple[Filter, ...]

    def _sql(self, columns: Columns, depth: int) -> str:
        return f" {self.word} ".join(f"({part.to_sql(columns, depth + 1)})" for part in self.parts)

    def __repr__(self) -> str:
        return f" {'&' if self.word == 'AND' else '|'} ".join(f"({part!r})" for part in self.parts)


@dataclass(frozen=True, eq=False, repr=False)
class Negation(Filter):
    """The opposite of a condition.

    It is written with NOT before single comparisons only, beside a question for a value: what reads the SQL makes FALSE of
    ``a IN ('x') AND a IN ('y')``, also where ``a`` is missing, and the opposite of that would then hold.
    """

    inner: Filter

    def _sql(self, columns: Columns, depth: int) -> str:
        inner = self.inner
        if isinstance(inner, Negation):
            return inner.inner.to_sql(columns, depth + 1)
        if isinstance(inner, Combination):
            word = "OR" if inner.word == "AND" else "AND"
            return Combination(word, tuple(map(Negation, inner.parts))).to_sql(columns, depth)
        opposite = f"NOT ({inner.to_sql(columns, depth + 1)})"
        if isinstance(inner, Comparison | Membership | TextMatch) and inner.column != DATASET:
            return f"{opposite} AND {columns.target(inner.column).sql} IS NOT NULL"
        return opposite

    def __repr__(self) -> str:
        return f"~({self.inner!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Sql(Filter):
    """A condition that a person wrote in SQL; never quoted, so never from data."""

    text: str

    def _sql(self, columns: Columns, depth: int) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text


def as_filter(condition: "str | Mapping[str, Any] | Filter") -> Filter:
    """Turn what people pass to `where` into a filter.

    Parameters
    ----------
    condition : str, mapping or Filter
        SQL text, ``{column: value, list of values, or None}`` (all must hold), or an expression of `col`.

    Raises
    ------
    QueryError
        For anything else.

    Examples
    --------
    >>> as_filter({"cell_type": ["B", "T"], "n": 3, "donor": None})
    (col('cell_type').isin(['B', 'T'])) & (col('n') == 3) & (col('donor').is_null())
    """
    if isinstance(condition, Filter):
        return condition
    if isinstance(condition, str):
        if not condition.strip():
            raise QueryError("where('') holds no condition; leave it out, or write e.g. where(\"cell_type = 'B'\").")
        return Sql(condition)
    if isinstance(condition, Mapping):
        parts = [_from_item(str(name), value) for name, value in condition.items()]
        if parts:
            return parts[0] if len(parts) == 1 else Combination("AND", tuple(parts))
    raise QueryError(
        f"where takes SQL text, a mapping such as {{'cell_type': ['B', 'T']}}, or an expression such as col('n') > 3; got {condition!r}."
    )


def to_sql(filters: Sequence[Filter], columns: Columns) -> str | None:
    """Join filters with AND into one SQL condition; None when there are none."""
    if not filters:
        return None
    for part in filters:
        if isinstance(part, Sql):
            _refuse_unbalanced(part.text)
    return " AND ".join(f"({part.to_sql(columns)})" for part in filters)


def _from_item(name: str, value: Any) -> Filter:  # noqa: ANN401  (any value that people compare with)
    if isinstance(value, Filter | Mapping):
        raise QueryError(f"The value for {name!r} must be a value, a list of values or None; got {value!r}.")
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        values: Iterable[Any] = value.tolist() if isinstance(value, np.ndarray) else value
        return Column(name).isin(values)
    return IsNull(name) if value is None else Comparison(name, "==", plain_value(value))


def _combine(word: str, left: Filter, right: object) -> Filter:
    if not isinstance(right, Filter):
        raise QueryError(
            f"{right!r} is no filter; write comparisons in parentheses, e.g. (col('a') == 1) & (col('b') == 2)."
        )
    parts: list[Filter] = []
    for side in (left, right):
        parts.extend(side.parts if isinstance(side, Combination) and side.word == word else [side])
    return Combination(word, tuple(parts))


def _text(value: Any) -> str:  # noqa: ANN401  (what a person passed)
    if not isinstance(value, str):
        raise QueryError(f"A text is needed here, got {value!r}.")
    return str(plain_value(value))


def _datasets(columns: Columns, holds: Callable[[str], bool]) -> str:
    uids = [uid for uid, name in columns.datasets.items() if holds(name)]
    return f"{quote_identifier('dataset_uid')} IN ({', '.join(map(quote_literal, uids))})" if uids else "FALSE"


def _refuse_unbalanced(text: str) -> None:
    """Refuse SQL that would close the parentheses put around it."""
    depth, quote = 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"`":
            quote = character
        else:
            depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            break
    if depth or quote:
        raise QueryError(f"The filter {text!r} cannot be used: its parentheses or quotes do not match.")
