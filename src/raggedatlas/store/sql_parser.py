"""Conditions from people: SQL text, turned into the expressions of `filters`."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raggedatlas.errors import ArgumentError, QueryError
from raggedatlas.model.arguments import brief
from raggedatlas.model.terms import Under
from raggedatlas.store.filters import (
    DEEPEST,
    Columns,
    Combination,
    Comparison,
    Filter,
    IsNull,
    Membership,
    Negation,
    UnderTerm,
    Verbatim,
    all_equal,
    col,
    under,
    value_from_json,
)
from raggedatlas.store.sql import is_missing, quote_identifier, value_by_dataset

# Longer signs come before their beginnings, and a number directly before a letter is no token at all.
_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<text>'(?:[^']|'')*')
    |(?P<quoted>"(?:[^"]|"")+"|`(?:[^`]|``)+`)
    |(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?!\w))
    |(?P<word>[^\W\d]\w*)
    |(?P<sign><>|!=|<=|>=|==|::|\|\||--|/\*|[-+*/%=<>(),.\[\]])""",
    re.VERBOSE,
)
_KEYWORDS = {"AND", "OR", "NOT", "IN", "IS", "NULL", "TRUE", "FALSE", "LIKE", "ILIKE", "BETWEEN"}
"""Words that are never columns unless quoted."""

_SOFT_KEYWORDS = {
    "AS", "AT", "CASE", "CURRENT_DATE", "CURRENT_TIME", "CURRENT_TIMESTAMP", "DATE", "DISTINCT", "ELSE", "END", "ESCAPE", "FROM",
    "INTERVAL", "THEN", "TIME", "TIMESTAMP", "UNKNOWN", "WHEN", "ZONE",
}  # fmt: skip
"""Words that are columns where there is one of that name."""

_OPERATORS = {"=": "==", "==": "==", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_FLIPPED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_PAIRS = {"(": ")", "[": "]"}
_FITTING: dict[str, Any] = {"text": str, "boolean": bool, "integer": (int, float), "float": (int, float)}


@dataclass(frozen=True, slots=True)
class _Token:
    """One word, sign, literal or column of SQL text."""

    kind: str  # "text", "number", "word", "sign" or "column"; "quoted" until names are resolved
    text: str  # as Lance reads it
    column: str = ""  # of a column: the name that `Columns` knows; empty for a field of a struct column

    @property
    def keyword(self) -> str:
        """The word or sign in upper case; empty for literals and columns."""
        return self.text.upper() if self.kind in {"word", "sign"} else ""


def as_filter(condition: "str | Mapping[str, Any] | Filter") -> Filter:
    """Convert the argument of `where` to a filter: SQL text, a mapping as of `all_equal`, or an expression of `col`."""
    if isinstance(condition, Filter):
        return condition
    if isinstance(condition, str):
        if not condition.strip():
            raise QueryError("where('') holds no condition; leave it out, or write e.g. where(\"cell_type = 'B'\").")
        return Sql(condition)
    if isinstance(condition, Mapping):
        return all_equal(condition)
    raise QueryError(
        f"where takes SQL text, a mapping such as {{'cell_type': ['B', 'T']}}, or an expression such as col('n') > 3; got {condition!r}."
    )


def filter_from_dict(given: Mapping[str, Any], depth: int = 0) -> Filter:
    """Read what `Filter.to_dict` returns, nested `depth` levels deep in another filter.

    Missing and unknown keys raise `TypeError`, which `Query.from_dict` converts.
    """
    if depth > DEEPEST:
        raise QueryError(f"The filter nests more than {DEEPEST} levels deep; use isin for lists of values.")

    arguments = dict(given)
    operator = arguments.pop("operator", None)

    def inner(one: Mapping[str, Any]) -> Filter:
        return filter_from_dict(one, depth + 1)

    def combined(filters: Sequence[Mapping[str, Any]]) -> Filter:
        first, *others = map(inner, filters)
        return Combination(operator.upper(), (first, *others)) if others else first

    makers: dict[str, Callable[..., Filter]] = {
        "isin": lambda column, values: col(column).isin([value_from_json(value) for value in values]),
        "is_null": lambda column: col(column).is_null(),
        "startswith": lambda column, text: col(column).startswith(text),
        "contains": lambda column, text: col(column).contains(text),
        "under": lambda column, term, **options: col(column) == under(term, **options),
        "and": combined,
        "or": combined,
        "not": lambda filter: ~inner(filter),
        "sql": as_filter,
    }
    makers |= {
        sign: lambda column, value: Comparison(col(column).name, operator, value_from_json(value)) for sign in _FLIPPED
    }
    if operator not in makers:
        raise ArgumentError(f"A condition has an operator of {[*makers]}, not {brief(operator)}.")
    return makers[operator](**arguments)


@dataclass(frozen=True, eq=False, repr=False)
class Sql(Filter):
    """A condition that a person wrote in SQL; never built from data."""

    text: str

    def _parsed(self, columns: Columns) -> Filter:
        """Parse the text: one expression of Lance's SQL (DataFusion's functions).

        Names are those that results show, or those of the stored columns, quoted with double quotes or backticks where
        they hold other characters than letters, digits and underscores. Case counts in quoted names only.

        Comparisons of one column with literals, IN, IS NULL and BETWEEN become the expressions of `filters`, joined by
        AND, OR and NOT; anything else stays SQL, of stored columns, in which NaN of a float column is null.
        """
        parser = _Parser(self.text, columns)
        tokens = list(parser.resolved(list(parser.tokens())))
        if any(token.keyword == "CASE" for token in tokens):
            raise parser._refused("Lance does not evaluate CASE; write the cases with AND, OR and NOT")
        return parser.disjunction(tokens)

    def _sql(self, columns: Columns, depth: int) -> str:
        return self._parsed(columns).to_sql(columns, depth)

    def _opposite(self, columns: Columns, depth: int) -> str:
        return Negation(self._parsed(columns)).to_sql(columns, depth)

    def leaves(self, columns: Columns) -> Iterator[Filter]:
        """Yield the conditions that the text is made of."""
        yield from self._parsed(columns).leaves(columns)

    def to_dict(self) -> dict[str, Any]:
        """Return the condition in JSON's types."""
        return {"operator": "sql", "condition": self.text}

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class _Parser:
    text: str
    columns: Columns

    def tokens(self) -> Iterator[_Token]:
        """Split the text into tokens without spaces; columns are not resolved yet."""
        position, open_signs = 0, []
        while position < len(self.text):
            match = _TOKEN.match(self.text, position)
            if match is None:
                raise self._refused(f"nothing is understood from {self.text[position : position + 20]!r} on")
            kind, text = str(match.lastgroup), match.group()
            position = match.end()
            if kind == "space":
                continue
            if text in {"--", "/*"}:
                raise self._refused("it holds a comment")
            # A prefix as in `N'x'` may change what the quotes mean, and with it where the text ends.
            if kind == "word" and self.text[position : position + 1] == "'":
                raise self._refused(f"{text!r} cannot stand directly before a quote")
            if text in _PAIRS:
                open_signs.append(_PAIRS[text])
            elif text in {")", "]"} and (not open_signs or open_signs.pop() != text):
                raise self._refused(f"{text!r} closes nothing")
            yield _Token(kind, text)
        if open_signs:
            raise self._refused(f"{open_signs[-1]!r} is missing at the end")

    def resolved(self, tokens: Sequence[_Token]) -> Iterator[_Token]:
        """Replace names by columns; functions, keywords and types stay."""
        position = 0
        while position < len(tokens):
            token = tokens[position]
            if token.kind == "quoted" or (token.kind == "word" and self._may_be_column(tokens, position)):
                token_found, position = self._path(tokens, position)
                yield token_found
                continue
            yield token
            position += 1

    def _may_be_column(self, tokens: Sequence[_Token], at: int) -> bool:
        """Return whether a word is a column and not a keyword, function or type, judging by its neighbors."""
        word = tokens[at].keyword
        before = tokens[at - 1].keyword if at else ""
        after = tokens[at + 1] if at + 1 < len(tokens) else _Token("sign", "")
        # A name before `(` is a function, one after `::` or `AS` a type; an `AS` that begins the text is no keyword.
        if word in _KEYWORDS or after.text == "(" or before == "::" or (before == "AS" and at > 1):
            return False
        if word in _SOFT_KEYWORDS:
            return after.kind != "text" and self.columns.find(tokens[at].text, exact=False) is not None
        return True

    def _path(self, tokens: Sequence[_Token], at: int) -> tuple[_Token, int]:
        """Read a column, or a field of a struct column, and where it ends; an unquoted name may hold dots."""
        parts = [tokens[at]]
        # Names are at even distances from `at`, the dots between them at odd ones.
        while tokens[at + 2 * len(parts) - 1 : at + 2 * len(parts)] and tokens[at + 2 * len(parts) - 1].text == ".":
            following = tokens[at + 2 * len(parts) : at + 2 * len(parts) + 1]
            if not following or following[0].kind not in {"word", "quoted"}:
                break
            parts.append(following[0])
        names = [p.text if p.kind == "word" else p.text[1:-1].replace(p.text[0] * 2, p.text[0]) for p in parts]
        # The longest name first: `percent.mt` can be a column, or the field `mt` of a column `percent`.
        for n in range(len(parts), 0, -1):
            name = self.columns.find(".".join(names[:n]), exact=any(p.kind == "quoted" for p in parts[:n]))
            if name is not None:
                return self._column(name, names[n:]), at + 2 * len(parts) - 1
        if parts[0].text.startswith('"') and len(parts) == 1:
            from difflib import get_close_matches

            if not get_close_matches(names[0], self.columns.names, n=1, cutoff=0.6):
                raise self._refused(f"there is no column {names[0]!r}; text stands in single quotes: '{names[0]}'")
        # Called for its error, which suggests similar names.
        self.columns.stored(names[0])
        raise self._refused(f"there is no column {names[0]!r}")

    def _column(self, name: str, fields: Sequence[str]) -> _Token:
        virtual = self.columns.virtual(name)
        if virtual is not None:
            return _Token(
                "column",
                value_by_dataset({uid: values[0] if values else None for uid, values in virtual.items()}),
                name,
            )
        target = self.columns.target(name)
        if fields:
            # Without `column` the token is never part of a simple comparison: `Target` does not describe fields.
            return _Token("column", ".".join(map(quote_identifier, (target.name, *fields))))
        return _Token("column", target.sql, name)

    def disjunction(self, tokens: Sequence[_Token], depth: int = 0) -> Filter:
        """Parse conditions joined by OR, which binds weakest, and AND."""
        parts: list[Filter] = []
        for part in self._split(tokens, "OR"):
            joined = [self._single(one, depth) for one in self._split(part, "AND")]
            parts.append(joined[0] if len(joined) == 1 else Combination("AND", tuple(joined)))
        return parts[0] if len(parts) == 1 else Combination("OR", tuple(parts))

    def _split(self, tokens: Sequence[_Token], word: str) -> list[Sequence[_Token]]:
        """Split at a word outside parentheses, except at the AND of a BETWEEN."""
        parts: list[Sequence[_Token]] = []
        depth = start = between = 0
        for i, token in enumerate(tokens):
            depth += (token.text in _PAIRS) - (token.text in {")", "]"}) if token.kind == "sign" else 0
            if depth:
                continue
            between += token.keyword == "BETWEEN"
            if token.keyword == "AND" and between:
                between -= 1
            elif token.keyword == word:
                parts.append(tokens[start:i])
                start = i + 1
        parts.append(tokens[start:])
        if not all(parts):
            raise self._refused(f"a condition is missing beside {word}" if len(parts) > 1 else "a condition is missing")
        return parts

    def _single(self, tokens: Sequence[_Token], depth: int) -> Filter:
        if depth > DEEPEST:
            raise self._refused(f"it nests more than {DEEPEST} levels deep")
        if tokens[0].keyword == "NOT" and len(tokens) > 1:
            return Negation(self._single(tokens[1:], depth + 1))
        # `(n + 1) > 2` begins with a parenthesis too, whose partner is not the end.
        if tokens[0].text == "(" and _partner(tokens) == len(tokens) - 1:
            return self.disjunction(tokens[1:-1], depth + 1)
        simple = self._simple(tokens)
        return Verbatim(self._verbatim(tokens)) if simple is None else simple

    def _simple(self, tokens: Sequence[_Token]) -> Filter | None:
        """Read a comparison of one column with literals; None for anything else."""
        words = [token.keyword for token in tokens]
        if words[:2] == ["UNDER", "("]:
            return self._under(tokens)
        if not any(token.column for token in tokens):
            return None
        if not tokens[0].column:
            value, rest = self._literal(tokens)
            flips = len(rest) == 2 and rest[0].text in _OPERATORS and rest[1].column
            return self._comparison(rest[1], _FLIPPED[_OPERATORS[rest[0].text]], value) if flips else None
        column, rest = tokens[0], tokens[1:]
        if words[1:] in (["IS", "NULL"], ["IS", "NOT", "NULL"]):
            missing = IsNull(column.column)
            return missing if len(rest) == 2 else Negation(missing)
        if rest and rest[0].text in _OPERATORS:
            value, left = self._literal(rest[1:])
            return None if left else self._comparison(column, _OPERATORS[rest[0].text], value)
        negated = bool(rest) and rest[0].keyword == "NOT"
        condition = self._ranged(column, rest[1:] if negated else rest)
        return Negation(condition) if negated and condition is not None else condition

    def _under(self, tokens: Sequence[_Token]) -> Filter:
        """Read ``under(column, 'term')`` and ``under(column, 'term', 'ontology')``."""
        texts = [token.text[1:-1].replace("''", "'") for token in tokens[4:-1:2] if token.kind == "text"]
        signs = [token.text for token in (tokens[1], *tokens[3::2])]
        if len(texts) not in {1, 2} or signs != ["(", *"," * len(texts), ")"] or not tokens[2].column:
            raise self._refused(
                "under takes a column, a term and perhaps an ontology: under(cell_type, 'T cell', 'CL')"
            )
        return UnderTerm(tokens[2].column, Under(texts[0], texts[1] if len(texts) > 1 else None))

    def _ranged(self, column: _Token, rest: Sequence[_Token]) -> Filter | None:
        """Read ``IN (...)`` and ``BETWEEN ... AND ...``."""
        word = rest[0].keyword if rest else ""
        if word == "BETWEEN":
            least, left = self._literal(rest[1:])
            most, left = self._literal(left[1:]) if left and left[0].keyword == "AND" else (None, rest)
            ends = [self._comparison(column, ">=", least), self._comparison(column, "<=", most)]
            return None if left or None in ends else Combination("AND", tuple(end for end in ends if end is not None))
        if word != "IN" or len(rest) < 4 or rest[1].text != "(" or _partner(rest[1:]) != len(rest) - 2:
            return None
        values, left = [], rest[2:]
        while left:
            value, left = self._literal(left)
            if not left or left[0].text not in {",", ")"} or not self._fits(column, value):
                return None
            values.append(value)
            left = left[1:]
        return Membership(column.column, tuple(values))

    def _comparison(self, column: _Token, operator: str, value: Any) -> Filter | None:  # noqa: ANN401  (any literal)
        return Comparison(column.column, operator, value) if self._fits(column, value) else None

    def _fits(self, column: _Token, value: Any) -> bool:  # noqa: ANN401  (any literal)
        virtual = self.columns.virtual(column.column) is not None
        family = "text" if virtual else self.columns.target(column.column).family
        numeric = family in {"integer", "float"}
        return isinstance(value, _FITTING.get(family, ())) and not (numeric and isinstance(value, bool))

    def _literal(self, tokens: Sequence[_Token]) -> tuple[Any, Sequence[_Token]]:
        """Read a literal at the beginning, and what follows; None and the tokens where there is none."""
        minus = len(tokens) > 1 and tokens[0].text == "-" and tokens[1].kind == "number"
        first = tokens[1 if minus else 0] if tokens else _Token("sign", "")
        rest = tokens[2 if minus else 1 :]
        if first.kind == "text":
            return first.text[1:-1].replace("''", "'"), rest
        if first.keyword in {"TRUE", "FALSE"}:
            return first.keyword == "TRUE", rest
        if first.kind != "number":
            return None, tokens
        number: float = int(first.text) if first.text.isdecimal() else float(first.text)
        return (-number if minus else number, rest) if math.isfinite(number) else (None, tokens)

    def _verbatim(self, tokens: Sequence[_Token]) -> str:
        """Write tokens as SQL; what asks for NaN of a float column asks for a missing value."""
        texts, position = [], 0
        while position < len(tokens):
            token = tokens[position]
            called = (
                tokens[position + 2]
                if token.kind == "word"
                and tokens[position + 1 : position + 2] == [_Token("sign", "(")]
                and position + 3 < len(tokens)
                else None
            )
            # A float column is written as `nanvl(..., NULL)`, for which `isnan` never holds and `nanvl` does nothing.
            of_float = (
                called is not None
                and called.column != ""
                and self.columns.virtual(called.column) is None
                and self.columns.target(called.column).family == "float"
            )
            if of_float and token.keyword == "ISNAN" and tokens[position + 3].text == ")":
                texts.append("(" + is_missing(self.columns.target(tokens[position + 2].column)) + ")")
                position += 4
                continue
            texts.append("coalesce" if of_float and token.keyword == "NANVL" else token.text)
            position += 1
        return " ".join(texts)

    def _refused(self, why: str) -> QueryError:
        return QueryError(
            f"The filter {self.text!r} cannot be used: {why}; write one expression, "
            "e.g. \"cell_type = 'T cell' AND n_genes > 200\"."
        )


def _partner(tokens: Sequence[_Token]) -> int:
    """Return where the parenthesis that the tokens begin with is closed."""
    depth = 0
    for i, token in enumerate(tokens):
        depth += (token.text in _PAIRS) - (token.text in {")", "]"}) if token.kind == "sign" else 0
        if not depth:
            return i
    return -1
