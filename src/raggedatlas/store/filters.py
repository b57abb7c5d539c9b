"""Filters: expressions over cell columns and mappings; SQL text is parsed into the same expressions."""

import datetime as dt
import difflib
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from raggedatlas.errors import QueryError, UnknownValueWarning
from raggedatlas.model.arguments import checked
from raggedatlas.model.frames import (
    DATASET,
    IDS,
    LAYOUT,
    ColumnFacts,
    find_column,
    is_text,
    metadata_columns,
    shown_names,
)
from raggedatlas.model.terms import SUFFIX, Expansion, TermColumns, TermSource, Under, expand
from raggedatlas.store.sql import (
    Target,
    all_of,
    any_of,
    compare,
    in_list,
    is_member,
    is_missing,
    is_present,
    negation,
    plain_value,
    text_matches,
)

DEEPEST = 40
"""Levels to which conditions may nest."""

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
    """The columns that a filter may name."""

    schema: pa.Schema  # of the cell table
    datasets: Mapping[str, str] = field(default_factory=dict)  # uid -> name, which is the value of the column `dataset`
    # Dataset uid -> its feature layouts, any of which a result may show in `layout_uid`; that of its genes comes first.
    layouts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    terms: Callable[[], TermSource] | None = None  # returns where `under` looks terms and values up
    _expansions: dict[tuple[str, Under], Expansion] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def facts(self) -> dict[str, ColumnFacts]:
        """What the metadata columns were in their files, by stored name."""
        return metadata_columns(self.schema)

    @cached_property
    def shown(self) -> dict[str, str]:
        """The name under which results show each metadata column, by stored name."""
        return shown_names(self.schema)

    @property
    def names(self) -> list[str]:
        """Every name that can be used, as results show them."""
        virtual = [name for name in (DATASET, LAYOUT) if self.virtual(name) is not None]
        return list(dict.fromkeys([*(n for n in IDS if n in self.schema.names), *virtual, *self.shown.values()]))

    def virtual(self, name: str) -> Mapping[str, tuple[str, ...]] | None:
        """Return dataset uid -> values of a column that follows from the dataset; None for a stored column."""
        # A stored column `dataset` wins, and tables other than the cell table have no `dataset_uid`.
        if name == DATASET and name not in self.schema.names and "dataset_uid" in self.schema.names:
            return {uid: (value,) for uid, value in self.datasets.items()}
        return self.layouts if name == LAYOUT and self.layouts else None

    def stored(self, name: str) -> str:
        """Return the stored column of a name."""
        found = find_column(self.schema, name)
        if found is None:
            near = difflib.get_close_matches(name, self.names, n=1, cutoff=0.6)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise QueryError(f"There is no column {name!r}.{hint} Columns are {self.names}.")
        return found

    def find(self, name: str, *, exact: bool) -> str | None:
        """Return a column name as `target` and `virtual` take it, for a name that SQL text has; None if there is none.

        `exact` says whether case counts: in SQL it does not, unless the name is quoted.
        """
        if self.virtual(name) is not None or find_column(self.schema, name) is not None:
            return name
        if exact:
            return None
        folded = {n for n in (*self.names, *self.schema.names) if n.casefold() == name.casefold()}
        # Names that differ only in case are ambiguous, unless all of them lead to one stored column.
        columns = {find_column(self.schema, n) or n for n in folded}
        return folded.pop() if len(columns) == 1 else None

    def target(self, name: str) -> Target:
        """Describe the column of a name for a comparison."""
        stored = self.stored(name)
        facts = self.facts.get(stored)
        kind = self.schema.field(stored).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        return Target(stored, kind, facts.kind if facts else "")

    def expand(self, name: str, under: Under) -> Expansion:
        """Find the values that a column has under a term."""
        # One query asks for its SQL several times.
        known = self._expansions.get((name, under))
        if known is None:
            known = self._expansions[name, under] = expand(self.term_columns(name), under, self.term_source())
        return known

    def term_columns(self, name: str) -> TermColumns:
        """Return the columns with the ids and labels of terms."""
        if self.virtual(name) is not None:
            raise QueryError(f"The values of {name!r} are no terms of an ontology; name a column of the cells.")
        base = name.removesuffix(SUFFIX)
        if find_column(self.schema, base + SUFFIX) is None:
            self.stored(name)  # for its error, which suggests similar names
        labels = find_column(self.schema, base) if name == base else None
        found = TermColumns(base, find_column(self.schema, base + SUFFIX), labels)
        for stored in filter(None, (found.ids, found.labels)):
            if self.target(stored).family != "text":
                raise QueryError(
                    f"The column {name!r} holds {self.target(stored).type}, and terms of an ontology are text."
                )
        return found

    def term_source(self) -> TermSource:
        """Return where terms are looked up."""
        if self.terms is None:
            raise QueryError("under() asks for the terms of cells; it cannot be used here.")
        return self.terms()


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
        """Write the condition as SQL, every name and value quoted."""
        if depth > DEEPEST:
            raise QueryError(
                f"The filter nests more than {DEEPEST} levels deep; use col(...).isin([...]) for lists of values."
            )
        return self._sql(columns, depth)

    def _sql(self, columns: Columns, depth: int) -> str:
        raise QueryError(
            f"{type(self).__name__} is no complete filter; compare a column, e.g. col('cell_type') == 'B'."
        )

    def _opposite(self, columns: Columns, depth: int) -> str:
        return negation(self.to_sql(columns, depth + 1))

    def to_dict(self) -> dict[str, Any]:
        """Return the condition in JSON's types; `filter_from_dict` reads it."""
        raise QueryError(f"{type(self).__name__} is no complete filter.")

    def leaves(self, columns: Columns) -> Iterator["Filter"]:
        """Yield the conditions that this one is made of."""
        yield self

    def asked(self) -> Iterator[tuple[str, str]]:
        """Yield each column and text that cells are compared with for equality."""
        yield from ()


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
        return equal_to(self.name, value)

    def __ne__(self, value: object) -> "Filter":  # type: ignore[override]
        """Different; ``!= None`` asks for values that are there."""
        if value is None or isinstance(value, Under):
            return ~equal_to(self.name, value)
        return Comparison(self.name, "!=", plain_value(value))

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

    # `==` returns a filter, so sets and dictionaries could not tell columns apart.
    __hash__ = None  # type: ignore[assignment]

    def isin(self, values: Iterable[Any]) -> "Filter":
        """Be one of some values; None among them also takes missing values, and `under` a term with all under it."""
        if isinstance(values, Under):
            return UnderTerm(self.name, values)
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise QueryError(
                f"col({self.name!r}).isin takes a list of values, got {values!r}; write col({self.name!r}) == {values!r}."
            )
        listed = [v if v is None or isinstance(v, Under) else plain_value(v) for v in values]
        plain = tuple(v for v in listed if v is not None and not isinstance(v, Under))
        # SQL's IN is never true for a missing value, so None needs a condition of its own.
        parts: list[Filter] = [
            equal_to(self.name, v) for v in dict.fromkeys(listed) if v is None or isinstance(v, Under)
        ]
        parts = [Membership(self.name, plain), *parts] if plain or not parts else parts
        return parts[0] if len(parts) == 1 else Combination("OR", tuple(parts))

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


@checked
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


@checked
def under(term: str, *, ontology: str | None = None, part_of: bool = True) -> Under:
    """Name a term of an ontology together with all terms under it, in place of a value in a filter.

    Parameters
    ----------
    term : str
        Name, synonym or id, e.g. ``"T cell"``, ``"T lymphocyte"`` or ``"CL:0000084"``. A deprecated id stands for the one that replaces it.
    ontology : str or None
        Its ontology. None takes that of the column: CL for ``cell_type``, UBERON for ``tissue``, MONDO for ``disease``, EFO for ``assay``,
        HsapDv, MmusDv and others for ``development_stage``, NCBITaxon for ``organism``; for other columns those of their ids.
    part_of : bool
        Whether parts of a term (lobes of the lung) count as well as its kinds. The packaged ontologies do not tell the two apart.

    Returns
    -------
    Under
        What the column is compared with. Cells are kept by the id in ``<column>_ontology_term_id``; those without an id by their label, if
        it is a name, a synonym or an id of the terms. `Query.explain` lists the values.

    Examples
    --------
    >>> col("cell_type") == under("T cell")
    col('cell_type').isin(under('T cell'))
    >>> query.where(tissue=under("lung"), disease=under("MONDO:0005550"))  # doctest: +SKIP
    """
    return Under(term, ontology, part_of)


def equal_to(name: str, value: Any) -> Filter:  # noqa: ANN401  (any value that people compare with)
    """Return the condition that a column has a value, is missing (None), or is under a term."""
    if isinstance(value, Under):
        return UnderTerm(name, value)
    return IsNull(name) if value is None else Comparison(name, "==", plain_value(value))


def all_equal(values: Mapping[str, Any]) -> Filter:
    """Require ``{column: value, list of values, or None}`` of every cell; None asks for missing values.

    Examples
    --------
    >>> all_equal({"cell_type": ["B", "T"], "n": 3, "donor": None})
    (col('cell_type').isin(['B', 'T'])) & (col('n') == 3) & (col('donor').is_null())
    """
    if not values:
        raise QueryError("where({}) holds no condition; leave it out, or write e.g. where({'cell_type': ['B', 'T']}).")
    parts: list[Filter] = []
    for name, value in ((str(key), value) for key, value in values.items()):
        if isinstance(value, Filter | Mapping):
            raise QueryError(f"The value for {name!r} must be a value, a list of values or None; got {value!r}.")
        if isinstance(value, Iterable) and not isinstance(value, str | bytes):
            parts.append(Column(name).isin(value.tolist() if isinstance(value, np.ndarray) else value))
        else:
            parts.append(equal_to(name, value))
    return parts[0] if len(parts) == 1 else Combination("AND", tuple(parts))


def to_sql(filters: Sequence[Filter], columns: Columns) -> str | None:
    """Join filters with AND into one SQL condition; None when there are none."""
    if not filters:
        return None
    return all_of(*(part.to_sql(columns) for part in filters))


@dataclass(frozen=True, eq=False, repr=False)
class Condition(Filter):
    """A condition on one column.

    A column that follows from the dataset is compared here, value by value, and the datasets that meet the condition are
    listed. The opposite asks for a value beside the negation: Lance makes FALSE of ``a IN ('x') AND a IN ('y')``, also where
    ``a`` is missing, and the negation of that would hold.
    """

    column: str

    def _sql(self, columns: Columns, depth: int) -> str:
        virtual = columns.virtual(self.column)
        if virtual is None:
            return self._compared(columns.target(self.column))
        # `_holds` is None for a dataset without a value, which is in neither this list nor that of `_opposite`.
        return in_list("dataset_uid", [uid for uid, values in virtual.items() if self._any(values)])

    def _opposite(self, columns: Columns, depth: int) -> str:
        virtual = columns.virtual(self.column)
        if virtual is None:
            target = columns.target(self.column)
            return all_of(negation(self._compared(target)), is_present(target))
        return in_list("dataset_uid", [uid for uid, values in virtual.items() if self._any(values) is False])

    def _any(self, values: tuple[str, ...]) -> bool | None:
        """Decide the condition for a dataset, which has a layout for each of its spaces: it holds if it does for one of them."""
        decided = [self._holds(value) for value in values or (None,)]
        return None if None in decided else any(decided)

    def _compared(self, target: Target) -> str:
        """Write the condition on a stored column."""
        raise QueryError(f"{type(self).__name__} is no condition on {target.name!r}.")

    def _holds(self, value: str | None) -> bool | None:
        """Decide the condition for one value; None where the value is missing and nothing can be said."""
        return None


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Condition):
    """A column compared with a value."""

    operator: str
    value: Any

    def _compared(self, target: Target) -> str:
        return compare(target, _OPERATORS[self.operator][0], self.value)

    def _any(self, values: tuple[str, ...]) -> bool | None:
        if self.operator != "!=":
            return super()._any(values)
        # As the opposite of `==`: it holds if no value is equal.
        equal = Comparison(self.column, "==", self.value)._any(values)
        return None if equal is None else not equal

    def _holds(self, value: str | None) -> bool | None:
        text = _text(self.value, self.column)
        return None if value is None else _OPERATORS[self.operator][1](value, text)

    def asked(self) -> Iterator[tuple[str, str]]:
        """Yield the column and its text, for ``==`` and ``!=``."""
        if self.operator in {"==", "!="} and isinstance(self.value, str):
            yield self.column, self.value

    def to_dict(self) -> dict[str, Any]:
        """Return the condition in JSON's types."""
        return {"operator": self.operator, "column": self.column, "value": _value_to_json(self.value)}

    def __repr__(self) -> str:
        return f"col({self.column!r}) {self.operator} {self.value!r}"


@dataclass(frozen=True, eq=False, repr=False)
class Membership(Condition):
    """A column that holds one of some values."""

    values: tuple[Any, ...]

    def _compared(self, target: Target) -> str:
        return is_member(target, self.values)

    def _holds(self, value: str | None) -> bool | None:
        values = [_text(one, self.column) for one in self.values]
        return None if value is None else value in values

    def asked(self) -> Iterator[tuple[str, str]]:
        """Yield the column with each text."""
        yield from ((self.column, value) for value in self.values if isinstance(value, str))

    def to_dict(self) -> dict[str, Any]:
        """Return the condition in JSON's types, every value."""
        return {"operator": "isin", "column": self.column, "values": [_value_to_json(value) for value in self.values]}

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.values[:8])) + (
            f", ... {len(self.values)} in all" if len(self.values) > 8 else ""
        )
        return f"col({self.column!r}).isin([{shown}])"


@dataclass(frozen=True, eq=False, repr=False)
class IsNull(Condition):
    """A column without a value."""

    def _compared(self, target: Target) -> str:
        return is_missing(target)

    def _opposite(self, columns: Columns, depth: int) -> str:
        # IS NULL is never unknown, so IS NOT NULL alone is its opposite; Lance's NOT is not needed.
        if columns.virtual(self.column) is None:
            return is_present(columns.target(self.column))
        return super()._opposite(columns, depth)

    def _holds(self, value: str | None) -> bool | None:
        return value is None

    def to_dict(self) -> dict[str, Any]:
        """Return the condition in JSON's types."""
        return {"operator": "is_null", "column": self.column}

    def __repr__(self) -> str:
        return f"col({self.column!r}).is_null()"


@dataclass(frozen=True, eq=False, repr=False)
class TextMatch(Condition):
    """A text column that begins with a text or contains it."""

    how: str
    text: str

    def _compared(self, target: Target) -> str:
        return text_matches(target, "starts_with" if self.how == "startswith" else "contains", self.text)

    def _holds(self, value: str | None) -> bool | None:
        if value is None:
            return None
        return value.startswith(self.text) if self.how == "startswith" else self.text in value

    def to_dict(self) -> dict[str, Any]:
        """Return the condition in JSON's types."""
        return {"operator": self.how, "column": self.column, "text": self.text}

    def __repr__(self) -> str:
        return f"col({self.column!r}).{self.how}({self.text!r})"


@dataclass(frozen=True, eq=False, repr=False)
class UnderTerm(Filter):
    """A column that holds a term or one under it: by its id, or by its label where a cell has no id."""

    column: str
    under: Under

    def _sql(self, columns: Columns, depth: int) -> str:
        return self._either(columns, depth, opposite=False)

    def _opposite(self, columns: Columns, depth: int) -> str:
        # Not De Morgan's: a cell without an id is judged by its label in the opposite, too.
        return self._either(columns, depth, opposite=True)

    def _either(self, columns: Columns, depth: int, *, opposite: bool) -> str:
        found = columns.expand(self.column, self.under)
        of = found.columns
        parts: list[Filter] = []
        for name, values in ((of.ids, found.ids), (of.labels, found.labels)):
            if name is not None:
                inside = Membership(name, values)
                parts.append(Negation(inside) if opposite else inside)
        if of.ids is not None and of.labels is not None:
            parts[1] = Combination("AND", (IsNull(of.ids), parts[1]))
        return any_of(*(part.to_sql(columns, depth + 1) for part in parts))

    def to_dict(self) -> dict[str, Any]:
        """Return the condition in JSON's types."""
        return {"operator": "under", "column": self.column, **asdict(self.under)}

    def __repr__(self) -> str:
        return f"col({self.column!r}).isin({self.under!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Combination(Filter):
    """Several conditions joined by AND or OR."""

    word: str
    parts: tuple[Filter, ...]

    def _sql(self, columns: Columns, depth: int) -> str:
        join = all_of if self.word == "AND" else any_of
        return join(*(part.to_sql(columns, depth + 1) for part in self.parts))

    def _opposite(self, columns: Columns, depth: int) -> str:
        # De Morgan: NOT reaches single conditions only, as Lance's differs from SQL where values are missing.
        word = "OR" if self.word == "AND" else "AND"
        return Combination(word, tuple(map(Negation, self.parts))).to_sql(columns, depth)

    def leaves(self, columns: Columns) -> Iterator[Filter]:
        """Yield the conditions of the parts."""
        for part in self.parts:
            yield from part.leaves(columns)

    def to_dict(self) -> dict[str, Any]:
        """Return the condition in JSON's types."""
        return {"operator": self.word.lower(), "filters": [part.to_dict() for part in self.parts]}

    def __repr__(self) -> str:
        return f" {'&' if self.word == 'AND' else '|'} ".join(f"({part!r})" for part in self.parts)


@dataclass(frozen=True, eq=False, repr=False)
class Negation(Filter):
    """The opposite of a condition; NOT is written before single conditions only."""

    inner: Filter

    def _sql(self, columns: Columns, depth: int) -> str:
        return self.inner._opposite(columns, depth)

    def _opposite(self, columns: Columns, depth: int) -> str:
        return self.inner.to_sql(columns, depth + 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the condition in JSON's types."""
        return {"operator": "not", "filter": self.inner.to_dict()}

    def leaves(self, columns: Columns) -> Iterator[Filter]:
        """Yield the conditions of which this is the opposite."""
        yield from self.inner.leaves(columns)

    def __repr__(self) -> str:
        return f"~({self.inner!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Verbatim(Filter):
    """A part of SQL text that is no simple comparison, in which names are already those of stored columns."""

    text: str

    def _sql(self, columns: Columns, depth: int) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text


def _value_to_json(value: Any) -> Any:  # noqa: ANN401  (what `plain_value` returns)
    """Write dates, times and spans of time as a mapping of their kind; other values are JSON's."""
    if isinstance(value, np.datetime64):
        return {"datetime64": str(value)}
    if isinstance(value, np.timedelta64 | dt.timedelta):
        # pandas' `Timedelta` is a `timedelta` with nanoseconds, which NumPy's constructor would drop.
        exact = value.to_timedelta64() if hasattr(value, "to_timedelta64") else np.timedelta64(value)
        unit, step = np.datetime_data(exact.dtype)
        return {"timedelta64": [int(exact.astype(np.int64)) * step, unit]}
    # A datetime is a date as well.
    if isinstance(value, dt.date):
        return {"datetime" if isinstance(value, dt.datetime) else "date": value.isoformat()}
    return value


def value_from_json(value: Any) -> Any:  # noqa: ANN401  (any value that people compare with)
    """Read a value of a condition as `Filter.to_dict` has it."""
    if not isinstance(value, Mapping):
        return plain_value(value)
    ((kind, text),) = value.items()
    if kind == "datetime" and re.search(r"\.\d{7}", text):
        # Only pandas' `Timestamp` has nanoseconds.
        from pandas import Timestamp

        return plain_value(Timestamp(text))
    readers: dict[str, Callable[[Any], Any]] = {
        "date": dt.date.fromisoformat,
        "datetime": dt.datetime.fromisoformat,
        "datetime64": np.datetime64,
        "timedelta64": lambda span: np.timedelta64(*span),
    }
    return plain_value(readers[kind](text))


def warn_of_unknown(
    filters: Sequence[Filter], columns: Columns, values: Callable[[str], Iterable[str] | None] = lambda _: None
) -> None:
    """Warn of texts and terms that filters ask for and no cell has, with the near matches, and of deprecated terms.

    Names of datasets and categories of `columns` are always compared; `values` returns those of another column of text,
    or None where they are not known. The warnings are `UnknownValueWarning`, for deprecated ids `UserWarning`.
    """
    known: dict[str, list[str] | None] = {}
    leaves = [leaf for part in filters for leaf in part.leaves(columns)]
    for leaf in leaves:
        if isinstance(leaf, UnderTerm):
            found_terms = columns.expand(leaf.column, leaf.under)
            for note in found_terms.notes:
                warnings.warn(note, stacklevel=calling_level())
            if not found_terms.ids and not found_terms.labels:
                message = f"No cell has a {found_terms.columns.name} under {' or '.join(found_terms.roots)} of {found_terms.version}."
                warnings.warn(message, UnknownValueWarning, stacklevel=calling_level())
    for name, text in dict.fromkeys(pair for leaf in leaves for pair in leaf.asked()):
        if name not in known:
            found = _listed(columns, name) or values(name)
            known[name] = None if found is None else list(found)
        there = known[name]
        if there is not None and text not in there:
            message = f"No cell has {name} {text!r}. {suggest(text, there)}"
            warnings.warn(message, UnknownValueWarning, stacklevel=calling_level())


def suggest(text: str, known: Sequence[str]) -> str:
    """Name what a misspelt value may have meant, or else what there is."""
    folded = text.casefold()
    spelled = difflib.get_close_matches(folded, {value.casefold() for value in known}, n=3, cutoff=0.6)
    near = [value for value in known if value.casefold() in spelled]
    near += [value for value in known if folded and folded in value.casefold() and value not in near]
    if near:
        return f"Did you mean {' or '.join(map(repr, near[:3]))}?"
    suffix = f", ... {len(known):,} in all" if len(known) > 10 else ""
    return f"Values are {', '.join(map(repr, known[:10]))}{suffix}." if known else "The column holds no text."


def _listed(columns: Columns, name: str) -> list[str] | None:
    """Return the values of a column that are known without reading cells: of datasets, and categories that are text."""
    virtual = columns.virtual(name)
    if virtual is not None:
        return [value for values in virtual.values() for value in values]
    stored = columns.stored(name)
    if stored == "dataset_uid" and columns.datasets:
        return list(columns.datasets)
    facts = columns.facts.get(stored)
    if facts is None or facts.kind != "categorical" or not facts.categories or not is_text(facts.category_kind):
        return None
    return list(facts.categories)


def calling_level() -> int:
    """Return the `stacklevel` at which a warning points at the code that called this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("raggedatlas."):
        level, frame = level + 1, frame.f_back
    return level


def _combine(word: str, left: Filter, right: object) -> Filter:
    if not isinstance(right, Filter):
        raise QueryError(
            f"{right!r} is no filter; write comparisons in parentheses, e.g. (col('a') == 1) & (col('b') == 2)."
        )
    # Joined flat, a chain of a hundred `|` is one level deep and stays within `DEEPEST`.
    parts: list[Filter] = []
    for side in (left, right):
        parts.extend(side.parts if isinstance(side, Combination) and side.word == word else [side])
    return Combination(word, tuple(parts))


def _text(value: Any, column: str = "") -> str:  # noqa: ANN401  (what a person passed)
    if not isinstance(value, str):
        what = f"The values of {column!r} are text" if column else "A text is needed here"
        raise QueryError(f"{what}, got {value!r}.")
    return str(plain_value(value))
