"""Terms of ontologies: what `under` asks for, and a table of terms with its names, ancestors and near matches."""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import QueryError
from raggedatlas.model.accessions import GeneTableInfo

TERMS = "terms"
"""Kind of a stored table, as `GENES` and `ORTHOLOGS` are."""

TERMS_SCHEMA = pa.schema(
    [
        pa.field("table", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("label", pa.string(), nullable=False),
        pa.field("synonyms", pa.list_(pa.string()), nullable=False),
        pa.field("parents", pa.list_(pa.string()), nullable=False),
        pa.field("part_of", pa.list_(pa.string()), nullable=False),
        pa.field("replaced_by", pa.string()),
        pa.field("deprecated", pa.bool_(), nullable=False),
    ]
)
"""One row per term; `parents` has the ids of is_a, and also those of part_of in tables that do not tell the two apart."""

PACKAGE = "cellxgene-ontology-guide"
"""Source of the packaged ontologies, whose tables join is_a and part_of."""

SUFFIX = "_ontology_term_id"
"""What the column of term ids is called after that of the labels, as in CELLxGENE's schema."""

COLUMN_ONTOLOGIES = {
    "cell_type": ("CL",),
    "tissue": ("UBERON",),
    "disease": ("MONDO", "PATO"),
    "assay": ("EFO",),
    "development_stage": ("HsapDv", "MmusDv", "FBdv", "WBls"),
    "organism": ("NCBITaxon",),
    "sex": ("PATO",),
    "self_reported_ethnicity": ("HANCESTRO",),
}
"""Ontologies of the columns of CELLxGENE's schema; disease has PATO for its term "normal"."""

_ID = re.compile(r"(?:\S*[/#])?([A-Za-z]+)[:_]([A-Z0-9]*\d[A-Z0-9]*)")
_DECORATION = re.compile(r" \((?:organoid|cell culture)\)$")
_NEAR = 0.4
"""Least score of a near match."""
_MOST_NAMES, _BEGINNING = 250_000, 3
"""Of a table with more names than this, near matches begin with the same letters."""
_MOST_IDS = 50_000
"""Near ids are looked for among at most so many."""


@dataclass(frozen=True)
class Under:
    """A term and everything under it, to be compared with a column in a filter; made by `raggedatlas.under`."""

    term: str  # name, synonym or id
    ontology: str | None = None  # None is that of the column
    part_of: bool = True  # whether parts count too

    def __repr__(self) -> str:
        """Return the call."""
        ontology = "" if self.ontology is None else f", ontology={self.ontology!r}"
        return f"under({self.term!r}{ontology}{'' if self.part_of else ', part_of=False'})"


def id_prefix(text: str) -> str:
    """Return the prefix of a term id, however it is spelled; empty for other text.

    Examples
    --------
    >>> [id_prefix(t) for t in ("CL:0000084", "http://purl.obolibrary.org/obo/CL_0000084", "T_cell")]
    ['CL', 'CL', '']
    """
    match = _ID.fullmatch(text)
    return match[1] if match else ""


def fold(text: str) -> str:
    """Return a name as names are compared: in lower case, with single spaces."""
    folded: str = _folded(pa.array([text], pa.string()))[0].as_py()
    return folded


def _folded(texts: pa.Array) -> pa.Array:
    return pc.utf8_trim_whitespace(pc.replace_substring_regex(pc.utf8_lower(texts), r"\s+", " "))


@dataclass(frozen=True)
class Match:
    """What a text names in a table of terms."""

    # "id", "old id", "name", "synonym", "deprecated" (an id that nothing replaces), or "" (nothing has this name).
    kind: str
    rows: tuple[int, ...] = ()  # of the terms; several where the name is ambiguous
    note: str = ""  # what became of a deprecated id


@dataclass(frozen=True)
class _Edges:
    """Rows of terms and of those directly above them, ordered by the former; `bounds` has where each row begins."""

    child: NDArray[np.int64]
    parent: NDArray[np.int64]
    bounds: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Terms:
    """The terms of one ontology, or of several."""

    infos: tuple[GeneTableInfo, ...]  # which tables they are
    rows: pa.Table  # of `TERMS_SCHEMA`
    _above: dict[tuple[int, bool], frozenset[int]] = field(default_factory=dict, repr=False)

    @property
    def version(self) -> str:
        """The names of the ontologies with their releases, or with what identifies a table that states none."""
        return ", ".join(f"{info.name} {info.release or info.sha256[:12]}" for info in self.infos)

    @property
    def names(self) -> str:
        """The names of the ontologies."""
        return ", ".join(info.name for info in self.infos)

    @cached_property
    def ids(self) -> pa.Array:
        """The ids, (n_terms,)."""
        return self.rows.column("id").combine_chunks()

    @cached_property
    def deprecated(self) -> NDArray[np.bool_]:
        """Which terms are deprecated, (n_terms,)."""
        found: NDArray[np.bool_] = self.rows.column("deprecated").to_numpy()
        return found

    @cached_property
    def _named(self) -> tuple[pa.Array, NDArray[np.int64], int]:
        """All names of terms in use, folded; the row of each; and how many are labels, which come first."""
        labels = self.rows.column("label").combine_chunks()
        lists = self.rows.column("synonyms").combine_chunks()
        of_synonym = pc.list_parent_indices(lists).to_numpy().astype(np.int64)
        in_use = ~self.deprecated
        shown = in_use & pc.not_equal(labels, "").to_numpy(zero_copy_only=False)
        used = in_use[of_synonym]
        texts = [labels.filter(pa.array(shown)), pc.list_flatten(lists).filter(pa.array(used))]
        owners = np.concatenate([np.flatnonzero(shown), of_synonym[used]])
        return _folded(pa.concat_arrays(texts)), owners, int(shown.sum())

    def row(self, text: str) -> int | None:
        """Return the row of an id, spelled ``CL:0000084``, ``CL_0000084`` or as its address."""
        match = _ID.fullmatch(text)
        spelled = [text, f"{match[1]}:{match[2]}", f"{match[1]}_{match[2]}"] if match else [text]
        for one in spelled:
            found = pc.index(self.ids, one).as_py()
            if found >= 0:
                return int(found)
        return None

    def find(self, text: str) -> Match:
        """Look a text up: an id, else a name, else a synonym; case does not count in names."""
        row = self.row(text)
        if row is not None:
            return self._in_use(row)
        folded, owners, n_labels = self._named
        hits = np.flatnonzero(pc.equal(folded, fold(text)).to_numpy(zero_copy_only=False))
        if not len(hits):
            return Match("")
        # A name is that of its own term although it may be a synonym of others.
        labels = hits[hits < n_labels]
        rows = np.unique(owners[labels if len(labels) else hits])
        return Match("name" if len(labels) else "synonym", tuple(rows.tolist()))

    def _in_use(self, row: int) -> Match:
        """Follow the replacements of a deprecated term."""
        first, seen = row, {row}
        while self.deprecated[row]:
            replacement = self.rows.column("replaced_by")[row].as_py()
            following = self.row(replacement) if replacement else None
            if following is None or following in seen:
                why = f"replaced by {replacement}, which {self.names} lacks" if replacement else "without a replacement"
                return Match("deprecated", (), f"The term {self.describe(first)} is deprecated, {why}")
            row = following
            seen.add(row)
        if row == first:
            return Match("id", (row,))
        note = f"The term {self.ids[first].as_py()} is deprecated; {self.describe(row)} is used, which replaces it."
        return Match("old id", (row,), note)

    def describe(self, row: int) -> str:
        """Return label and id of a term."""
        return f"{self.label(row)!r} ({self.ids[row].as_py()})"

    def label(self, row: int) -> str:
        """Return the label of a term."""
        text: str = self.rows.column("label")[row].as_py()
        return text

    def near(self, text: str, n: int = 3) -> list[tuple[int, float]]:
        """Return at most `n` terms with names similar to `text` as row and score, best first.

        The score is the share of common sequences of three characters (Dice's coefficient), 1 for the same letters and
        digits; ``+`` counts as ``positive``.
        """
        names, owners, _ = self._named
        asked, _ = _trigrams(_folded(pa.array([text], pa.string())))
        if len(owners) > _MOST_NAMES:
            # Of more than a million names, only those that begin alike are compared.
            alike = pc.starts_with(names, fold(text)[:_BEGINNING])
            owners, (codes, bounds) = owners[alike.to_numpy(zero_copy_only=False)], _trigrams(names.filter(alike))
        else:
            codes, bounds = self._trigrams
        # Every name has at least one sequence, so no segment is empty; of booleans `reduceat` would give "or".
        shared = np.add.reduceat(np.isin(codes, asked).astype(np.int64), bounds[:-1]) if len(owners) else np.empty(0)
        score = 2 * shared / (np.diff(bounds) + len(asked))
        # The best name of each term: sorted by score, the first of each term is kept.
        order = np.lexsort((owners, -score))[: 50 * n]
        best: dict[int, float] = {}
        for at in order.tolist():
            if score[at] >= _NEAR:
                best.setdefault(int(owners[at]), round(float(score[at]), 2))
        return list(best.items())[:n]

    @cached_property
    def _trigrams(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return _trigrams(self._named[0])

    @cached_property
    def _edges(self) -> dict[bool, _Edges]:
        """Edges upward: by is_a, and (key True) by is_a and part_of."""
        return {False: self._read_edges(("parents",)), True: self._read_edges(("parents", "part_of"))}

    def _read_edges(self, columns: Sequence[str]) -> _Edges:
        child, parent = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for name in columns:
            lists = self.rows.column(name).combine_chunks()
            child.append(pc.list_parent_indices(lists).to_numpy().astype(np.int64))
            rows = pc.fill_null(pc.index_in(pc.list_flatten(lists), value_set=self.ids), -1)
            parent.append(rows.to_numpy().astype(np.int64))
        children, parents = np.concatenate(child), np.concatenate(parent)
        children, parents = children[parents >= 0], parents[parents >= 0]
        order = np.argsort(children, kind="stable")
        children, parents = children[order], parents[order]
        return _Edges(children, parents, np.searchsorted(children, np.arange(len(self.ids) + 1)))

    def ancestors(self, row: int, *, part_of: bool = True) -> frozenset[int]:
        """Return the rows of a term and of all above it."""
        known = self._above.get((row, part_of))
        if known is not None:
            return known
        edges, found, stack = self._edges[part_of], {row}, [row]
        while stack:
            at = stack.pop()
            above = {*edges.parent[edges.bounds[at] : edges.bounds[at + 1]].tolist()} - found
            found |= above
            stack += above
        self._above[row, part_of] = frozenset(found)
        return self._above[row, part_of]

    def count_under(self, rows: Iterable[int], *, part_of: bool = True) -> int:
        """Count terms in use that are under some terms, those included."""
        edges, inside = self._edges[part_of], np.zeros(len(self.ids), bool)
        inside[[*rows]] = True
        while True:
            fresh = edges.child[inside[edges.parent] & ~inside[edges.child]]
            if not len(fresh):
                return int((inside & ~self.deprecated).sum())
            inside[fresh] = True

    @cached_property
    def levels(self) -> NDArray[np.int64]:
        """How many steps each term is below a term without parents, by the shortest way, (n_terms,); -1 for deprecated ones."""
        edges = self._edges[True]
        levels = np.where(np.diff(edges.bounds) == 0, 0, -1)
        levels[self.deprecated] = -1
        for level in range(len(levels)):
            fresh = edges.child[(levels[edges.parent] == level) & (levels[edges.child] < 0)]
            if not len(fresh):
                break
            levels[fresh] = level + 1
        return levels

    def parts_of_value(self, text: str, *, label: bool) -> tuple[tuple[int, ...], ...]:
        """Return what a value of a column means: for each of its parts, separated by ``||``, the terms that it may be.

        Names count only if `label` is true, ids always.
        """
        found = []
        for part in text.split(" || "):
            match = self.find(_DECORATION.sub("", part.strip()))
            if label or match.kind in {"id", "old id"}:
                found.append(match.rows)
        return tuple(rows for rows in found if rows)

    def covered(self, text: str, *, label: bool) -> frozenset[int]:
        """Return the rows of all terms under which a value of a column is; of an ambiguous label, those above each candidate."""
        every: frozenset[int] = frozenset()
        for rows in self.parts_of_value(text, label=label):
            every |= frozenset.intersection(*(self.ancestors(row) for row in rows))
        return every


def _trigrams(texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the different sequences of three bytes of each text, as numbers, and where each text begins; signs become spaces."""
    spelled = pc.replace_substring(texts, "+", " positive ")
    spelled = pc.utf8_trim(pc.replace_substring_regex(spelled, r"[^\pL\pN]+", " "), " ")
    # Two spaces before and one after, so that the beginning of a text counts more than its end.
    padded = pc.binary_join_element_wise("  ", spelled, " ", "").cast(pa.large_string())
    padded = padded.combine_chunks() if isinstance(padded, pa.ChunkedArray) else padded
    _, offsets, data = padded.buffers()
    starts = np.frombuffer(offsets, np.int64)[: len(padded) + 1] if len(padded) else np.zeros(1, np.int64)
    letters = np.frombuffer(data or b"", np.uint8)[: starts[-1]].astype(np.int64)
    codes = (letters[:-2] << 16) | (letters[1:-1] << 8) | letters[2:]
    # Those that begin at the last two bytes of a text would go on into the next one; every text has three bytes or more.
    inside = np.ones(len(letters), bool)
    inside[starts[1:] - 1] = inside[starts[1:] - 2] = False
    owners = np.repeat(np.arange(len(padded)), np.diff(starts) - 2)
    # Once for each text, however often a word is repeated in it.
    keys = np.unique((owners << 24) | codes[inside[: len(codes)]])
    return keys & 0xFFFFFF, np.searchsorted(keys >> 24, np.arange(len(padded) + 1))


@dataclass(frozen=True)
class TermColumns:
    """The columns of the cell table that say which term a cell has: of ids, of labels, or both."""

    name: str  # name of the labels
    ids: str | None  # stored column
    labels: str | None  # stored column


@dataclass(frozen=True)
class TermSource:
    """Where terms and the values of columns come from."""

    values: Callable[[str], Sequence[str]]  # returns the distinct texts of a stored column
    # Returns the names of all ontologies, and other prefixes of ids with the ontology that has them.
    known: Callable[[], dict[str, str]]
    read: Callable[[str], Terms]  # reads an ontology by its name

    def find(self, columns: TermColumns, ontology: str | None = None, term: str = "") -> Terms:
        """Return the terms of the ontologies of a column, or of the named one.

        `ontology` None takes those of the column in CELLxGENE's schema and those of its ids. `term` is what is asked
        for, whose id decides where nothing else does. An id of an ontology that is not among the chosen ones is
        refused.
        """
        known = {name.casefold(): of for name, of in self.known().items()}
        if ontology is not None:
            chosen = [self._named(ontology, known)]
        else:
            ids = [] if columns.ids is None else self.values(columns.ids)
            prefixes = dict.fromkeys(id_prefix(one) for text in ids for one in text.split(" || "))
            chosen = [*COLUMN_ONTOLOGIES.get(columns.name, ()), *(known.get(one.casefold(), "") for one in prefixes)]
        own = known.get(id_prefix(term).casefold(), "")
        chosen = [name for name in dict.fromkeys(chosen) if name] or ([own] if own else [])
        if not chosen:
            raise QueryError(
                f"Which ontology has the terms of {columns.name!r} is not known; say ontology=..., e.g. under('T cell', ontology='CL')."
            )
        if own and own not in chosen:
            raise QueryError(
                f"{term} is a term of {own}, and {columns.name!r} is asked for terms of {', '.join(chosen)}; say ontology={own!r} to ask "
                "for it all the same, or ask another column."
            )
        tables = [self.read(name) for name in chosen]
        if len(tables) == 1:
            return tables[0]
        infos = tuple(info for table in tables for info in table.infos)
        return Terms(infos, pa.concat_tables([table.rows for table in tables]))

    def _named(self, ontology: str, known: dict[str, str]) -> str:
        found = known.get(ontology.casefold())
        if found is None:
            near = difflib.get_close_matches(ontology, [*self.known()], n=3, cutoff=0.4)
            raise QueryError(
                f"There is no ontology {ontology!r}; there are {', '.join(sorted({*known.values()}))}."
                + (f" Did you mean {' or '.join(map(repr, near))}?" if near else "")
            )
        return found


@dataclass(frozen=True)
class Expansion:
    """What `under` means in one column: the values with which cells are kept."""

    columns: TermColumns
    roots: tuple[str, ...]  # the terms that were asked for
    n_terms: int  # how many terms are under them, those included
    version: str  # ontologies with their releases
    ids: tuple[str, ...]  # values of the column of ids
    labels: tuple[str, ...]  # values of the column of labels; a label counts for cells without an id
    notes: tuple[str, ...]  # what became of deprecated ids

    def describe(self) -> str:
        """Return one line with the terms, the version of the ontology, and the values that are matched."""
        said = [
            f"{what} {', '.join(map(repr, values[:8]))}" + (f", ... {len(values):,} in all" if len(values) > 8 else "")
            for what, values in (("ids", self.ids), ("labels of cells without an id", self.labels))
            if values
        ]
        return (
            f"under {self.columns.name}: {' and '.join(self.roots)}, {self.n_terms:,} terms of {self.version}; "
            f"{'; '.join(said) or 'no cell has one of them'}"
        )


def expand(columns: TermColumns, under: Under, source: TermSource) -> Expansion:
    """Find the values of columns that are under a term."""
    terms = source.find(columns, under.ontology, under.term)
    match = find_term(terms, under.term)
    if not under.part_of and any(info.source.startswith(PACKAGE) for info in terms.infos):
        raise QueryError(
            f"{under!r}: the tables of {PACKAGE} do not tell part_of from is_a; leave part_of out, or load a table of {terms.names} with "
            "both columns by atlas.load_terms(...)."
        )
    roots = {*match.rows}

    def matches(text: str, *, label: bool) -> bool:
        parts = terms.parts_of_value(text, label=label)
        return any(all(terms.ancestors(row, part_of=under.part_of) & roots for row in part) for part in parts)

    ids = () if columns.ids is None else source.values(columns.ids)
    labels = () if columns.labels is None else source.values(columns.labels)
    return Expansion(
        columns, tuple(terms.describe(row) for row in match.rows), terms.count_under(roots, part_of=under.part_of), terms.version,
        tuple(sorted(text for text in ids if matches(text, label=False))),
        tuple(sorted(text for text in labels if matches(text, label=True))),
        (match.note,) if match.note else (),
    )  # fmt: skip


def find_term(terms: Terms, text: str) -> Match:
    """Return the term of a name or id; of several ontologies, one of each.

    A message lists near matches where there is none. A name that several terms of one ontology have, and an id that is
    deprecated without a replacement, are refused.
    """
    match = terms.find(text)
    if match.kind == "deprecated":
        raise QueryError(f"{match.note}; ask for another term of {terms.version}.")
    if not match.rows:
        prefix = id_prefix(text).casefold() if ":" in text else ""
        form = f"^{re.escape(prefix)}[:_]"
        if prefix and not pc.any(pc.match_substring_regex(terms.ids, form, ignore_case=True)).as_py():
            raise QueryError(f"{text} is a term of another ontology than {terms.version}; name one of its terms.")
        raise QueryError(f"There is no term {text!r} in {terms.version}.{suggest_terms(terms, text)}")
    tables = terms.rows.column("table").take(pa.array(match.rows)).to_pylist()
    if len({*tables}) < len(tables):
        raise QueryError(
            f"{text!r} names several terms of {terms.version}: {', '.join(map(terms.describe, match.rows))}; ask for one by its id."
        )
    return match


def suggest_terms(terms: Terms, text: str) -> str:
    """Return the near matches of a name or an id as the end of a message; empty where there are none."""
    rows: list[Any] = [row for row, _ in terms.near(text)]
    if id_prefix(text) and len(terms.ids) <= _MOST_IDS:
        near = difflib.get_close_matches(text, terms.ids.to_pylist(), n=3, cutoff=0.8)
        rows = [terms.row(one) for one in near]
    return f" Did you mean {', '.join(map(terms.describe, rows))}?" if rows else ""
