"""Cells counted by terms of an ontology: how many are under each, as a tree and by level."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import QueryError
from raggedatlas.model.terms import SUFFIX, TermColumns, Terms
from raggedatlas.query.cells import cell_columns
from raggedatlas.query.compute import count
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.executors import Workers
from raggedatlas.store.ontologies import read_curated

if TYPE_CHECKING:
    import pandas as pd

_INDENT = 2
_BAR = 120
"""Pixels of the bar of all cells."""


@dataclass(frozen=True, eq=False)
class TermTree:
    """How many cells of a query are under each term of an ontology.

    The text and the HTML show terms that differ in their cells: of terms with the same cells under them, the one furthest from the
    root that is above those shown under it. `to_pandas` has all of them.

    Parameters
    ----------
    columns : TermColumns
        The columns of ids and labels.
    terms : Terms
        The ontology.
    sizes : (n_values,) int64
        Number of cells with each value of the column.
    values : mapping of int to frozenset of int
        Row of a term -> numbers of the values that are under it.
    own : mapping of int to int
        Row of a term -> number of cells with this term itself.
    """

    columns: TermColumns
    terms: Terms
    sizes: NDArray[np.int64]
    values: Mapping[int, frozenset[int]]
    own: Mapping[int, int]

    @cached_property
    def counts(self) -> dict[int, int]:
        """Row of a term -> number of cells with a value under it."""
        return {row: self._count(of) for row, of in self.values.items()}

    @property
    def n_cells(self) -> int:
        """Number of cells of the query."""
        return int(self.sizes.sum())

    def n_without(self, rows: Iterable[int]) -> int:
        """Count the cells that are under none of some terms."""
        return self.n_cells - self._count(frozenset[int]().union(*(self.values.get(row, ()) for row in rows)))

    def _count(self, values: frozenset[int]) -> int:
        return int(self.sizes[[*values]].sum())

    @cached_property
    def _shown(self) -> dict[int, int | None]:
        """The terms that are shown, in order, each with the shown term above it."""
        equal: dict[frozenset[int], list[int]] = {}
        for row, of in self.values.items():
            equal.setdefault(of, []).append(row)
        chosen: dict[frozenset[int], int] = {}
        for one in sorted(equal, key=len):
            inside = [self.terms.ancestors(row) for other, row in chosen.items() if other < one]
            # One that is above all that is shown under it, where there is such a term; of these the one furthest from the root.
            above_all = [row for row in equal[one] if all(row in ancestors for ancestors in inside)] or equal[one]
            chosen[one] = max(above_all, key=lambda row: (len(self.terms.ancestors(row)), self.terms.label(row)))
        sets = sorted(chosen, key=lambda one: (-len(one), self.terms.label(chosen[one])))
        above: dict[int, int | None] = {}
        for i, one in enumerate(sets):
            # Of all that contain it, the one with the fewest cells: a term may be under several, and is shown under one.
            larger = [other for other in sets[:i] if one < other]
            above_it = self.terms.ancestors(chosen[one])
            larger = [other for other in larger if chosen[other] in above_it] or larger
            smallest = min(
                larger, key=lambda other: (self.counts[chosen[other]], self.terms.label(chosen[other])), default=None
            )
            above[chosen[one]] = None if smallest is None else chosen[smallest]
        return above

    def _walk(self, parent: int | None = None, depth: int = 0) -> "list[tuple[int, int]]":
        """Return the shown terms in the order of the text, with their depths."""
        return [pair for row in self._below(parent) for pair in ((row, depth), *self._walk(row, depth + 1))]

    def _below(self, parent: int | None) -> list[int]:
        """Return the terms that are shown directly under one; those with most cells first."""
        below = [row for row, above in self._shown.items() if above == parent]
        return sorted(below, key=lambda row: (-self.counts[row], self.terms.label(row)))

    def to_pandas(self) -> "pd.DataFrame":
        """Return all terms with cells under them.

        Returns
        -------
        pandas.DataFrame
            Indexed by id: label, level (steps below the root), n_cells (under the term), n_own (with the term itself), shown (whether the
            text has it). By level, then label.
        """
        import pandas as pd

        rows = sorted(self.counts, key=lambda row: (self.terms.levels[row], self.terms.label(row)))
        return pd.DataFrame(
            {
                "label": [self.terms.label(row) for row in rows],
                "level": [int(self.terms.levels[row]) for row in rows],
                "n_cells": [self.counts[row] for row in rows],
                "n_own": [self.own.get(row, 0) for row in rows],
                "shown": [row in self._shown for row in rows],
            },
            index=pd.Index([self.terms.ids[row].as_py() for row in rows], dtype=object, name="id"),
        )

    def _rest(self) -> str:
        n = self.n_without(self.values)
        return f"{n:,} without a term" if n else ""

    def __repr__(self) -> str:
        """Return the tree as text, a line for each term."""
        lines = [f"{self.columns.name}: {self.n_cells:,} cells by {self.terms.version}"]
        for row, depth in self._walk():
            lines.append(
                f"{' ' * _INDENT * (depth + 1)}{self.terms.label(row)} ({self.terms.ids[row].as_py()}): {self.counts[row]:,}"
            )
        rest = self._rest()
        return "\n".join([*lines, *([" " * _INDENT + rest] if rest else [])])

    def _repr_html_(self) -> str:
        """Return the tree for a notebook: branches that fold, each with a bar."""
        head = f"<b>{escape(self.columns.name)}</b>: {self.n_cells:,} cells by {escape(self.terms.version)}"
        rest = f"<p>{self._rest()}</p>" if self._rest() else ""
        return f'{_STYLE}<div class="ra-terms"><p>{head}</p>{self._branches(None)}{rest}</div>'

    def _branches(self, parent: int | None) -> str:
        parts = []
        for row in self._below(parent):
            width = round(_BAR * self.counts[row] / max(1, self.n_cells), 1)
            line = (
                f'<i style="width:{width}px"></i>{escape(self.terms.label(row))} <code>{escape(self.terms.ids[row].as_py())}</code> '
                f"{self.counts[row]:,}"
            )
            inner = self._branches(row)
            parts.append(f"<details open><summary>{line}</summary>{inner}</details>" if inner else f"<p>{line}</p>")
        return "".join(parts)


_STYLE = (
    "<style>.ra-terms{font-size:12px}.ra-terms p{margin:1px 0 1px 14px}.ra-terms details{margin-left:14px}"
    ".ra-terms i{display:inline-block;height:9px;margin-right:6px;background:#4c78a8}.ra-terms code{opacity:.6}</style>"
)


def term_tree(
    spec: QuerySpec, catalog: Catalog, name: str, ontology: str | None, executor: Executor | Workers | None = None
) -> TermTree:
    """Count the cells of a query under each term; see `Query.tree`."""
    known = cell_columns(catalog)
    columns = known.term_columns(name)
    terms = known.term_source().find(columns, ontology)
    uid_name = columns.name + SUFFIX
    by = [shown for shown, stored in ((uid_name, columns.ids), (columns.name, columns.labels)) if stored is not None]
    counted: Any = count(spec, catalog, by, executor)
    frame = counted.reset_index().astype(object)
    own: dict[int, int] = {}
    values: dict[int, set[int]] = {}
    # By distinct pairs of id and label, never by cell.
    for number, pair in enumerate(frame.where(frame.notna(), None).to_dict("records")):
        text = pair.get(uid_name)
        label = text is None
        text = pair.get(columns.name) if label else text
        if text is None:
            continue
        for row in terms.covered(str(text), label=label):
            values.setdefault(row, set()).add(number)
        parts = terms.parts_of_value(str(text), label=label)
        for row in {rows[0] for rows in parts if len(rows) == 1}:
            own[row] = own.get(row, 0) + pair["n_cells"]
    sizes = counted.to_numpy().astype(np.int64)
    return TermTree(columns, terms, sizes, {row: frozenset(of) for row, of in values.items()}, own)


def count_level(tree: TermTree, level: int | str) -> "pd.Series[int]":
    """Count cells under the terms of a level; see `Query.count`."""
    import pandas as pd

    terms = tree.terms
    if isinstance(level, str):
        found: list[int | None] = [terms.row(uid) for uid in read_curated(level)]
    elif level < 0:
        raise QueryError(f"count() got level={level}; the terms without parents are level 0.")
    else:
        found = [*np.flatnonzero(terms.levels == level).tolist()]
    rows = sorted((row for row in {*found} if row is not None and row in tree.counts), key=terms.label)
    index: list[Any] = [(terms.ids[row].as_py(), terms.label(row)) for row in rows]
    sizes = [tree.counts[row] for row in rows]
    n_without = tree.n_without(rows)
    if n_without:
        index, sizes = [*index, (None, None)], [*sizes, n_without]
    names = [tree.columns.name + SUFFIX, tree.columns.name]
    # Not `from_tuples`, which refuses an empty list.
    levels = pd.MultiIndex.from_arrays([[pair[i] for pair in index] for i in (0, 1)], names=names)
    return pd.Series(sizes, levels, name="n_cells", dtype="int64")
