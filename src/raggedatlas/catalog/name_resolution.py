"""Which gene a name means: features known by a name alone, resolved by gene tables and by the features that have accessions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.feature_registration import BY_HAND
from raggedatlas.catalog.genes import ALIAS, LEVELS, SYMBOL, Claim, Genes, text_owners
from raggedatlas.model.accessions import UNKNOWN

_HAND_RANK, _FILE_RANK = -1, 2
"""Ranks of symbols given by hand and in files; those of gene tables come between."""


@dataclass(frozen=True)
class _Candidate:
    """A feature, or a gene that no feature of the atlas is, that a name may mean; `row` is -1 for the latter."""

    level: int
    rank: int
    row: int
    gene: str
    evidence: str
    table: str | None = None


@dataclass
class NamedFeatures:
    """What became of the features that are known by a name alone.

    Parameters
    ----------
    joined : dict of int to int
        Registry row -> the row that it counts as.
    evidence : dict of int to str
        Why, for those that joined.
    sources : dict of int to str
        The gene table that says so, for those that joined by one.
    ambiguous : dict of int to tuple of int
        Registry row -> the rows that it may be, where there are several.
    genes : dict of int to str
        Registry row -> the gene that it is by the tables, for features that have an accession or stand for others of their gene.
    """

    joined: dict[int, int] = field(default_factory=dict)
    evidence: dict[int, str] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)
    ambiguous: dict[int, tuple[int, ...]] = field(default_factory=dict)
    genes: dict[int, str] = field(default_factory=dict)

    def join(self, row: int, into: int, why: _Candidate) -> None:
        """Let a row count as another."""
        self.joined[row], self.evidence[row] = into, why.evidence
        if why.table is not None:
            self.sources[row] = why.table


class NameResolver:
    """Finds the gene of each feature that is known by a name alone.

    Parameters
    ----------
    registry : pyarrow.Table
        Rows of a feature registry.
    ids : pyarrow.ChunkedArray of str
        For each row the accession that stands for its gene, or its name.
    accession : (n_features,) bool
        Which rows have an accession.
    target : (n_features,) int64
        Row that each counts as by its accession, or as the first of its name and organism.
    tables : Genes or None
        The gene tables in use.
    """

    def __init__(
        self,
        registry: pa.Table,
        ids: pa.ChunkedArray,
        accession: NDArray[np.bool_],
        target: NDArray[np.int64],
        tables: Genes | None,
    ) -> None:
        self._names: list[str] = pc.fill_null(registry.column("feature_id"), registry.column("uid")).to_pylist()
        self._organisms = [organism or UNKNOWN for organism in registry.column("organism").to_pylist()]
        self._accession, self._target = accession, target
        gene = np.ones(len(target), bool)
        if "other_type" in registry.column_names:
            gene = registry.column("other_type").is_null().to_numpy()
        self._plain = np.flatnonzero(~accession & gene & (target == np.arange(len(target)))).tolist()
        wanted = pa.array([self._names[row] for row in self._plain], pa.string())
        self._by_name: dict[str, list[int]] = {}
        for row in self._plain:
            self._by_name.setdefault(self._names[row], []).append(row)
        self._by_symbol = _rows_by_text(registry.column("symbol"), wanted)
        self._by_alias = _rows_by_alias(registry.column("aliases"), wanted)
        for rows in (*self._by_symbol.values(), *self._by_alias.values()):
            rows[:] = [row for row in rows if gene[row]]
        self._claims: dict[str, list[Claim]] = {} if tables is None else tables.claims(wanted)
        known = _known_rows(ids, accession, tables)
        self._gene_of = {row: gene for row, gene in known.items() if target[row] == row}
        self._row_of = {gene: row for row, gene in self._gene_of.items()}
        self._in_tables = {*known}
        self._by_hand: set[int] = set()
        if "symbol_source" in registry.column_names:
            by_hand = pc.fill_null(pc.equal(registry.column("symbol_source"), BY_HAND), fill_value=False)
            self._by_hand = {*np.flatnonzero(by_hand.to_numpy()).tolist()}

    def resolve(self, uids: Sequence[str]) -> NamedFeatures:
        """Resolve all of them.

        Parameters
        ----------
        uids : sequence of str
            Feature uids, which decide between equals.
        """
        found = NamedFeatures(genes=dict(self._gene_of))
        of_gene: dict[str, list[tuple[int, _Candidate]]] = {}
        for row in self._plain:
            candidates = self._candidates(row)
            rows = sorted({one.row for one in candidates if one.row >= 0})
            if len(rows) > 1:
                best = min(one.rank for one in candidates if one.row >= 0)
                first = sorted({one.row for one in candidates if one.row >= 0 and one.rank == best})
                rows = first if len(first) == 1 and best < _FILE_RANK else rows
            if len(rows) == 1:
                found.join(row, rows[0], min((one for one in candidates if one.row == rows[0]), key=_order))
                continue
            if rows:
                found.ambiguous[row] = tuple(rows)
                continue
            best = min((one.rank for one in candidates), default=0)
            unregistered = [one for one in candidates if one.rank == best]
            if len({one.gene for one in unregistered}) == 1:
                of_gene.setdefault(unregistered[0].gene, []).append((row, min(unregistered, key=_order)))
            else:
                self._by_known_organism(row, found)
        for gene, members in of_gene.items():
            self._join_each_other(gene, members, uids, found)
        return found

    def _candidates(self, row: int) -> list[_Candidate]:
        """Return what the name of a row may mean, at the first level at which it means anything."""
        name, organism = self._names[row], self._organisms[row]
        found = [
            _Candidate(
                claim.level, claim.rank, self._row_of.get(claim.gene, -1), claim.gene, claim.evidence, claim.table
            )
            for claim in self._claims.get(name, ())
            if UNKNOWN in (organism, claim.organism) or organism == claim.organism
        ]
        for level, rows in ((SYMBOL, self._by_symbol.get(name, ())), (ALIAS, self._by_alias.get(name, ()))):
            for other in rows:
                if not self._fits(row, other) or (level == SYMBOL and not self._accession[other]):
                    continue
                by_hand = level == SYMBOL and other in self._by_hand
                # The symbol of a gene that the tables know is theirs; what a file calls it is one more name of it.
                at = ALIAS if other in self._in_tables and not by_hand else level
                rank = _HAND_RANK if by_hand else _FILE_RANK
                found.append(_Candidate(at, rank, int(self._target[other]), "", f"{LEVELS[at]} {name}"))
        first = min((one.level for one in found), default=0)
        return [one for one in found if one.level == first]

    def _fits(self, row: int, other: int) -> bool:
        """Tell whether a row may count as another: another one, of a compatible organism."""
        organisms = self._organisms[row], self._organisms[other]
        return row not in (other, self._target[other]) and (UNKNOWN in organisms or organisms[0] == organisms[1])

    def _by_known_organism(self, row: int, found: NamedFeatures) -> None:
        """Join a name of an unknown organism with the one feature of this name whose organism is known."""
        if self._organisms[row] != UNKNOWN:
            return
        rows = [other for other in self._by_name[self._names[row]] if self._organisms[other] != UNKNOWN]
        if len(rows) == 1:
            found.joined[row], found.evidence[row] = rows[0], f"name of a known organism {self._names[row]}"
        elif rows:
            found.ambiguous[row] = tuple(rows)

    def _join_each_other(
        self, gene: str, members: list[tuple[int, _Candidate]], uids: Sequence[str], found: NamedFeatures
    ) -> None:
        """Join the features whose names mean a gene that has no accession in the atlas; the one of the best name stands for it."""
        first, _ = min(members, key=lambda one: (one[1].level, self._organisms[one[0]] == UNKNOWN, uids[one[0]]))
        found.genes[first] = gene
        for row, candidate in members:
            if row != first:
                found.join(row, first, candidate)


def _order(one: _Candidate) -> tuple[int, str, str]:
    """Order candidates that mean the same: the best source first."""
    return one.rank, one.evidence, one.table or ""


def _known_rows(ids: pa.ChunkedArray, accession: NDArray[np.bool_], tables: Genes | None) -> dict[int, str]:
    """Return the rows with an accession that the tables know, and the accession that stands for each."""
    if tables is None:
        return {}
    listed = tables.rows.column("accession").combine_chunks()
    every = pa.concat_arrays([listed, pa.array([*tables.same.values()], listed.type)])
    rows = np.flatnonzero(accession & pc.is_in(ids, value_set=every).to_numpy())
    return dict(zip(rows.tolist(), ids.take(pa.array(rows)).to_pylist(), strict=True))


def _rows_by_text(column: pa.ChunkedArray, wanted: pa.Array) -> dict[str, list[int]]:
    """Return the rows of each wanted text."""
    rows = np.flatnonzero(pc.is_in(column, value_set=wanted, skip_nulls=True).to_numpy())
    found: dict[str, list[int]] = {}
    for row, text in zip(rows.tolist(), column.take(pa.array(rows)).to_pylist(), strict=True):
        found.setdefault(text, []).append(row)
    return found


def _rows_by_alias(column: pa.ChunkedArray, wanted: pa.Array) -> dict[str, list[int]]:
    """Return the rows that have each wanted text among their aliases."""
    lists = column.combine_chunks()
    owners, texts = pc.list_parent_indices(lists).to_numpy(), pc.list_flatten(lists)
    hits = np.flatnonzero(pc.is_in(texts, value_set=wanted, skip_nulls=True).to_numpy(zero_copy_only=False))
    found: dict[str, list[int]] = {}
    for owner, text in zip(owners[hits].tolist(), texts.take(pa.array(hits)).to_pylist(), strict=True):
        found.setdefault(text, []).append(owner)
    return found


def find_connected_rows(
    registry: pa.Table, touched: pa.Array, links: Mapping[str, str | None], tables: Genes | None
) -> NDArray[np.int64]:
    """Return the rows of a registry that are connected with some features, theirs included.

    Features are connected by a common id, symbol or alias, by a gene whose names or accessions they have, and by a link made by hand.
    What a feature counts as depends on features that it is connected with, and on no others.

    Parameters
    ----------
    registry : pyarrow.Table
        Rows of a feature registry.
    touched : pyarrow.Array of str
        Feature uids.
    links : mapping of str to str or None
        Links made by hand, feature uid -> target uid.
    tables : Genes or None
        The gene tables in use.

    Returns
    -------
    (n_rows,) int64
        Ascending.
    """
    owners, texts = _nodes(registry, links, tables)
    inside = np.zeros(max(registry.num_rows, int(owners.max(initial=-1)) + 1), bool)
    inside[: registry.num_rows] = pc.is_in(registry.column("uid"), value_set=touched).to_numpy()
    fresh = inside.copy()
    while fresh.any():
        shared = texts.filter(pa.array(fresh[owners])).unique()
        fresh = np.zeros(len(inside), bool)
        fresh[owners[pc.is_in(texts, value_set=shared).to_numpy()]] = True
        fresh &= ~inside
        inside |= fresh
    return np.flatnonzero(inside[: registry.num_rows])


def _nodes(
    registry: pa.Table, links: Mapping[str, str | None], tables: Genes | None
) -> tuple[NDArray[np.int64], pa.ChunkedArray]:
    """Return every text that connects, and the number of its owner: rows of the registry first, then genes, then links."""
    pairs = [(uid, into) for uid, into in links.items() if into is not None]
    ends = pa.array([uid for pair in pairs for uid in pair], pa.string())
    linked = np.flatnonzero(pc.is_in(registry.column("uid"), value_set=ends).to_numpy())
    names = pc.fill_null(registry.column("feature_id"), registry.column("uid"))
    found = [text_owners(column) for column in (names, registry.column("symbol"), registry.column("aliases"))]
    found.append((linked, registry.column("uid").take(pa.array(linked)).combine_chunks()))
    n = registry.num_rows
    if tables is not None:
        columns = ("accession", "symbol", "previous", "aliases", "same")
        found += [(own + n, texts) for own, texts in (text_owners(tables.rows.column(name)) for name in columns)]
        n += tables.rows.num_rows
    found.append((n + np.arange(len(ends)) // 2, ends))
    texts = pa.chunked_array([texts for _, texts in found], pa.string())
    named = pc.fill_null(pc.not_equal(texts, ""), fill_value=False)
    return np.concatenate([own for own, _ in found])[named.to_numpy()], texts.filter(named)
