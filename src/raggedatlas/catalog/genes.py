"""Gene tables of an atlas, and the genes that names, symbols and accessions resolve to."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import GENE_TABLE, ORTHOLOG_TABLE, TERM_TABLE, Catalog, ensure_table
from raggedatlas.catalog.layouts import BY_HAND
from raggedatlas.errors import CorruptError, DuplicateError, NotFoundError
from raggedatlas.model.accessions import (
    GENES,
    GENES_SCHEMA,
    ORTHOLOGS,
    ORTHOLOGS_SCHEMA,
    UNKNOWN,
    GeneTable,
    GeneTableInfo,
    infos_from_json,
    infos_to_json,
)
from raggedatlas.model.terms import TERMS, TERMS_SCHEMA

_INFOS = b"raggedatlas.gene_tables"
"""Schema metadata of these tables: the list of loaded tables, so that it changes in the commit that changes their rows."""

_STORED = {
    GENES: (GENE_TABLE, GENES_SCHEMA),
    ORTHOLOGS: (ORTHOLOG_TABLE, ORTHOLOGS_SCHEMA),
    TERMS: (TERM_TABLE, TERMS_SCHEMA),
}

SYMBOL, PREVIOUS, ALIAS = 0, 1, 2
"""How a gene has a name; the first that any gene has decides."""

LEVELS = ("symbol", "previous symbol", "alias")


@dataclass(frozen=True)
class Claim:
    """A gene that may have some name, or a feature that may be meant by it."""

    level: int  # `SYMBOL`, `PREVIOUS` or `ALIAS`
    # who says so: 0 the authority that names genes, 1 an annotation; before and after these, `_HAND_RANK` and `_FILE_RANK`
    rank: int
    gene: str  # accession that stands for the gene; empty for a feature that no gene table knows by the name
    organism: str  # common name
    evidence: str  # for people
    table: str = ""  # the table that says so
    row: int = -1  # the feature; -1 where the gene is none of the atlas


@dataclass(frozen=True)
class Facts:
    """What the tables know of one gene."""

    symbol: str | None  # of the best table that has one
    source: str  # that table and its release
    previous: tuple[str, ...]
    aliases: tuple[str, ...]  # other names and, unlike in `previous`, other accessions of the gene
    biotype: str | None  # of the best table that has one


@dataclass(frozen=True)
class Genes:
    """The gene tables in use."""

    infos: tuple[GeneTableInfo, ...]
    rows: pa.Table  # of `GENES_SCHEMA`, in any order

    @cached_property
    def info_of(self) -> dict[str, GeneTableInfo]:
        """Name -> table."""
        return {info.name: info for info in self.infos}

    @cached_property
    def _pairs(self) -> dict[tuple[str, str], str]:
        """Another accession and an Ensembl id of one gene -> the first table by name that says so."""
        listed = pc.greater(pc.list_value_length(self.rows.column("same")), 0)
        rows = self.rows.filter(listed).select(["accession", "same", "table"])
        pairs: dict[tuple[str, str], str] = {}
        for accession, others, table in zip(*(rows.column(i).to_pylist() for i in range(3)), strict=True):
            every = {accession, *others}
            ensembl = {one for one in every if one.startswith("ENS")}
            for pair in itertools.product(every - ensembl, ensembl):
                pairs[pair] = min(table, pairs.get(pair, table))
        return pairs

    @cached_property
    def same(self) -> dict[str, str]:
        """Accession -> the Ensembl id of its gene, where the tables give one for one; all others stand for themselves."""
        pairs = self._pairs
        ends: dict[str, set[str]] = {}
        starts: dict[tuple[str, str], set[str]] = {}
        for one, end in pairs:
            ends.setdefault(one, set()).add(end)
            starts.setdefault((end, one.split(":")[0]), set()).add(one)
        # One for one in both directions: neither several Ensembl ids for it, nor several of its prefix for the id.
        return {one: end for one, end in pairs if len(ends[one]) == 1 and len(starts[end, one.split(":")[0]]) == 1}

    def source_of_same(self, accession: str) -> str | None:
        """Return the table by which another accession stands for one; None where it stands for itself."""
        return self._pairs.get((accession, self.same.get(accession, "")))

    def claims(self, names: pa.Array) -> dict[str, list[Claim]]:
        """Return for each of some names the genes that may have it."""
        found: dict[str, list[Claim]] = {}
        for level, column in enumerate(("symbol", "previous", "aliases")):
            owners, texts = text_owners(self.rows.column(column))
            hits = np.flatnonzero(pc.is_in(texts, value_set=names, skip_nulls=True).to_numpy(zero_copy_only=False))
            rows = self.rows.select(["table", "accession", "organism"]).take(pa.array(owners[hits]))
            columns = (c.to_pylist() for c in rows.columns)
            for name, table, accession, organism in zip(texts.take(pa.array(hits)).to_pylist(), *columns, strict=True):
                info = self.info_of[table]
                gene, cited = self.same.get(accession, accession), info.cite(LEVELS[level])
                found.setdefault(name, []).append(Claim(level, info.rank, gene, organism, cited, table))
        return found

    def facts(self, genes: Iterable[str]) -> dict[str, Facts]:
        """Return what the tables know of some genes, each named by the accession that stands for it."""
        known: dict[str, list[dict[str, Any]]] = {}
        for row in self._rows_of({*genes}):
            known.setdefault(self.same.get(row["accession"], row["accession"]), []).append(row)
        return {gene: self._merged(gene, rows) for gene, rows in known.items()}

    def names(self, gene: str) -> dict[str, str]:
        """Return every name and accession of a gene, with the best evidence for it."""
        found: dict[str, tuple[int, int, str]] = {}
        for row in self._rows_of({gene}):
            info = self.info_of[row["table"]]
            ids = [row["accession"], *row["same"]]
            for level, names in enumerate(([row["symbol"]], row["previous"], row["aliases"], ids)):
                cited = (level, info.rank, info.cite((*LEVELS, "id")[level]))
                # Tuples compare by level, then by rank of the table: the best evidence for a name is kept.
                found |= {name: min(found.get(name, cited), cited) for name in names if name}
        return {name: best[2] for name, best in found.items()}

    def _rows_of(self, genes: set[str]) -> list[dict[str, Any]]:
        """Return the rows of some genes, each named by the accession that stands for it."""
        every = pa.array([*genes, *(one for one, end in self.same.items() if end in genes)], pa.string())
        rows: list[dict[str, Any]] = self.rows.filter(
            pc.is_in(self.rows.column("accession"), value_set=every)
        ).to_pylist()
        # An asked accession may itself count as that of another gene, to which its rows then belong.
        return [row for row in rows if self.same.get(row["accession"], row["accession"]) in genes]

    def _merged(self, gene: str, rows: list[dict[str, Any]]) -> Facts:
        def best(column: str) -> tuple[str | None, str]:
            ranked = [(self.info_of[row["table"]].rank, row["table"], row[column]) for row in rows if row[column]]
            _, table, value = min(ranked, default=(0, "", None))
            return value, self.info_of[table].cite(column) if table else ""

        symbol, source = best("symbol")
        previous = {name for row in rows for name in row["previous"]} - {symbol}
        others = {name for row in rows for name in (*row["aliases"], *row["same"], row["accession"], row["symbol"])}
        aliases = others - previous - {symbol, gene, None}
        return Facts(symbol, source, tuple(sorted(previous)), tuple(sorted(aliases)), best("biotype")[0])


def read_genes(catalog: Catalog) -> Genes | None:
    """Read the gene tables in use; None where there are none."""
    if not catalog.tables.has(GENE_TABLE):
        return None
    infos = _infos(catalog, GENE_TABLE)
    return Genes(infos, read_rows(catalog, GENE_TABLE, GENES_SCHEMA, infos)) if infos else None


def read_orthologs(catalog: Catalog) -> tuple[tuple[GeneTableInfo, ...], pa.Table] | None:
    """Read the ortholog tables in use: which they are, and their pairs in any order; None where there are none."""
    if not catalog.tables.has(ORTHOLOG_TABLE):
        return None
    infos = _infos(catalog, ORTHOLOG_TABLE)
    return (infos, read_rows(catalog, ORTHOLOG_TABLE, ORTHOLOGS_SCHEMA, infos)) if infos else None


def read_rows(catalog: Catalog, stored: str, schema: pa.Schema, infos: Sequence[GeneTableInfo]) -> pa.Table:
    """Read the rows of some of the tables that are stored as one."""
    rows = catalog.tables.read(stored)
    if rows.schema.names != schema.names or rows.schema.types != schema.types:
        raise _damaged(stored)
    return rows.filter(pc.is_in(rows.column("table"), value_set=pa.array([info.name for info in infos], pa.string())))


def _damaged(stored: str) -> CorruptError:
    return CorruptError(f"Table {stored!r} is damaged; run validate('deep') and restore the atlas from a copy.")


def list_tables(catalog: Catalog) -> tuple[GeneTableInfo, ...]:
    """List the tables that an atlas, or a snapshot, holds, by name."""
    found = [info for stored, _ in _STORED.values() if catalog.tables.has(stored) for info in _infos(catalog, stored)]
    return tuple(sorted(found, key=lambda info: info.name))


def _infos(catalog: Catalog, stored: str) -> tuple[GeneTableInfo, ...]:
    try:
        return infos_from_json((catalog.tables.schema(stored).metadata or {}).get(_INFOS, b"[]").decode())
    except (ValueError, TypeError, KeyError) as error:
        raise _damaged(stored) from error


def put_tables(catalog: Catalog, tables: Sequence[GeneTable]) -> None:
    """Keep tables in the atlas; one of a name that is there already replaces it."""
    catalog = catalog.session("identity.load()")
    kind_of = {info.name: info.kind for info in list_tables(catalog)}
    for table in tables:
        # `setdefault` also catches two given tables of one name and different kinds.
        there = kind_of.setdefault(table.info.name, table.info.kind)
        if there != table.info.kind:
            raise DuplicateError(
                f"{table.info.name!r} is the name of a table of {there} in {catalog.location.uri}, and this one is of {table.info.kind}; choose "
                "another with name=..., or remove that one first."
            )
    for kind, (stored, schema) in _STORED.items():
        fresh = [table for table in tables if table.info.kind == kind]
        if fresh:
            names = {table.info.name for table in fresh}
            _change(catalog, stored, schema, names, fresh)


def remove_table(catalog: Catalog, name: str) -> None:
    """Remove a table from the atlas; snapshots keep it."""
    catalog = catalog.session("identity.remove()")
    info = next((info for info in list_tables(catalog) if info.name == name), None)
    if info is None:
        raise NotFoundError(
            f"The atlas {catalog.location.uri} has no table {name!r}; it has {[i.name for i in list_tables(catalog)]}."
        )
    if not _change(catalog, *_STORED[info.kind], {name}, []):
        # Another process has removed it meanwhile.
        remove_table(catalog, name)


def restore_tables(catalog: Catalog, then: Catalog) -> None:
    """Make the tables of a snapshot, `then`, the newest again."""
    for kind, (stored, schema) in _STORED.items():
        if not catalog.tables.has(stored):
            continue
        infos = _infos(then, stored) if then.tables.has(stored) else ()
        if infos == _infos(catalog, stored):
            continue
        rows = read_rows(then, stored, schema, infos) if infos else schema.empty_table()
        kept = [GeneTable(info, rows.filter(pc.equal(rows.column("table"), info.name))) for info in infos]
        _change(catalog, stored, schema, {info.name for info in list_tables(catalog) if info.kind == kind}, kept)


def _change(catalog: Catalog, stored: str, schema: pa.Schema, gone: set[str], fresh: Sequence[GeneTable]) -> bool:
    """Take some tables away and put others in, as one commit; return whether that changed anything.

    If not, nothing is written. A table that is loaded again unchanged keeps the time at which the atlas got it.
    """
    ensure_table(catalog.tables, stored, schema)

    def once() -> bool:
        # Before the rest is read: if that is newer, the commit below fails and the attempt is repeated.
        at = catalog.tables.version(stored)
        old = _infos(catalog, stored)
        # Keyed without the time, so that the same table loaded again is found and keeps the first one.
        there, now = {replace(info, loaded_at=""): info for info in old}, datetime.now(UTC).isoformat()
        dated = [
            one if one.loaded_at else there.get(one, replace(one, loaded_at=now)) for one in (t.info for t in fresh)
        ]
        infos = (*(info for info in old if info.name not in gone), *dated)
        if {*infos} == {*old}:
            return False
        kept = read_rows(catalog, stored, schema, [info for info in old if info.name not in gone]).cast(schema)
        every = pa.concat_tables([kept, *(table.rows.cast(schema) for table in fresh)])
        stamped = every.replace_schema_metadata({_INFOS: infos_to_json(infos).encode()})
        catalog.tables.overwrite(stored, stamped, at)
        return True

    return catalog.tables.retry(stored, once)


def text_owners(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], pa.Array]:
    """Return every text of a column of texts or of lists of texts, and the row that has it."""
    values = column.combine_chunks()
    if pa.types.is_string(values.type):
        return np.arange(len(values)), values
    return pc.list_parent_indices(values).to_numpy(), pc.list_flatten(values)


_HAND_RANK, _FILE_RANK = -1, 2
"""Ranks of symbols given by hand and in files; those of gene tables come between."""


@dataclass
class NamedFeatures:
    """What became of the features that are known by a name alone.

    `genes` has features that have an accession or stand for others of their gene.
    """

    joined: dict[int, int] = field(default_factory=dict)  # registry row -> the row that it counts as
    evidence: dict[int, str] = field(default_factory=dict)  # why, for those that joined
    sources: dict[int, str] = field(default_factory=dict)  # the gene table that says so, for those that joined by one
    # registry row -> the rows that it may be, where there are several
    ambiguous: dict[int, tuple[int, ...]] = field(default_factory=dict)
    genes: dict[int, str] = field(default_factory=dict)  # registry row -> the gene that it is by the tables

    def join(self, row: int, into: int, why: Claim) -> None:
        """Let a row count as another."""
        self.joined[row], self.evidence[row] = into, why.evidence
        if why.table:
            self.sources[row] = why.table


class NameResolver:
    """Finds the gene of each feature that is known by a name alone.

    For each row of the feature registry, `ids` has the accession that stands for its gene, or its name; `accession`,
    (n_features,), is whether it has an accession; and `target`, (n_features,), is the row that it counts as by its
    accession, or as the first of its name and organism. `tables` are the gene tables in use.
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
        gene = registry.column("other_type").is_null().to_numpy()
        self._plain = np.flatnonzero(~accession & gene & (target == np.arange(len(target)))).tolist()
        wanted = pa.array([self._names[row] for row in self._plain], pa.string())
        self._by_name: dict[str, list[int]] = {}
        for row in self._plain:
            self._by_name.setdefault(self._names[row], []).append(row)
        self._by_symbol = _rows_by_text(registry.column("symbol"), wanted)
        self._by_alias = _rows_by_text(registry.column("aliases"), wanted)
        # Symbols of antibodies and the like are no evidence of genes.
        for rows in (*self._by_symbol.values(), *self._by_alias.values()):
            rows[:] = [row for row in rows if gene[row]]
        self._claims: dict[str, list[Claim]] = {} if tables is None else tables.claims(wanted)
        known: dict[int, str] = {}
        if tables is not None:
            listed = tables.rows.column("accession").combine_chunks()
            every = pa.concat_arrays([listed, pa.array([*tables.same.values()], listed.type)])
            at = np.flatnonzero(accession & pc.is_in(ids, value_set=every).to_numpy())
            known = dict(zip(at.tolist(), ids.take(pa.array(at)).to_pylist(), strict=True))
        self._gene_of = {row: gene for row, gene in known.items() if target[row] == row}
        self._row_of = {gene: row for row, gene in self._gene_of.items()}
        self._in_tables = {*known}
        by_hand = pc.fill_null(pc.equal(registry.column("symbol_source"), BY_HAND), fill_value=False)
        self._by_hand = {*np.flatnonzero(by_hand.to_numpy()).tolist()}

    def resolve(self, uids: Sequence[str]) -> NamedFeatures:
        """Resolve all of them; feature uids decide between equals."""
        found = NamedFeatures(genes=dict(self._gene_of))
        of_gene: dict[str, list[tuple[int, Claim]]] = {}
        for row in self._plain:
            candidates = self._candidates(row)
            rows = sorted({one.row for one in candidates if one.row >= 0})
            # Of several features, only a source better than files may choose, and only if it names a single one.
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
            # No feature has the gene (`row` is -1): features whose names mean the same gene join each other below.
            best = min((one.rank for one in candidates), default=0)
            unregistered = [one for one in candidates if one.rank == best]
            if len({one.gene for one in unregistered}) == 1:
                of_gene.setdefault(unregistered[0].gene, []).append((row, min(unregistered, key=_order)))
            else:
                # A name of an unknown organism joins the one feature of this name whose organism is known.
                others = self._by_name[self._names[row]] if self._organisms[row] == UNKNOWN else []
                others = [other for other in others if self._organisms[other] != UNKNOWN]
                if len(others) == 1:
                    found.joined[row], found.evidence[row] = others[0], f"name of a known organism {self._names[row]}"
                elif others:
                    found.ambiguous[row] = tuple(others)
        # Features whose names mean a gene that has no accession in the atlas join each other; the one of the best name stands for it.
        for gene, members in of_gene.items():
            stands, _ = min(members, key=lambda one: (one[1].level, self._organisms[one[0]] == UNKNOWN, uids[one[0]]))
            found.genes[stands] = gene
            for row, candidate in members:
                if row != stands:
                    found.join(row, stands, candidate)
        return found

    def _candidates(self, row: int) -> list[Claim]:
        """Return what the name of a row may mean, at the first level at which it means anything."""
        name, organism = self._names[row], self._organisms[row]
        found = [
            replace(claim, row=self._row_of.get(claim.gene, -1))
            for claim in self._claims.get(name, ())
            if UNKNOWN in (organism, claim.organism) or organism == claim.organism
        ]
        for level, rows in ((SYMBOL, self._by_symbol.get(name, ())), (ALIAS, self._by_alias.get(name, ()))):
            for other in rows:
                # Another feature, of a compatible organism.
                fits = row not in (other, self._target[other]) and (
                    UNKNOWN in (organism, self._organisms[other]) or organism == self._organisms[other]
                )
                if not fits or (level == SYMBOL and not self._accession[other]):
                    continue
                by_hand = level == SYMBOL and other in self._by_hand
                # The symbol of a gene that the tables know is theirs; what a file calls it is one more name of it.
                at = ALIAS if other in self._in_tables and not by_hand else level
                rank = _HAND_RANK if by_hand else _FILE_RANK
                found.append(Claim(at, rank, "", organism, f"{LEVELS[at]} {name}", row=int(self._target[other])))
        first = min((one.level for one in found), default=0)
        return [one for one in found if one.level == first]


def _order(one: Claim) -> tuple[int, str, str]:
    """Order claims that mean the same: the best source first."""
    return one.rank, one.evidence, one.table


def _rows_by_text(column: pa.ChunkedArray, wanted: pa.Array) -> dict[str, list[int]]:
    """Return the rows that have each wanted text, in a column of texts or of lists of texts."""
    owners, texts = text_owners(column)
    hits = np.flatnonzero(pc.is_in(texts, value_set=wanted, skip_nulls=True).to_numpy(zero_copy_only=False))
    found: dict[str, list[int]] = {}
    for owner, text in zip(owners[hits].tolist(), texts.take(pa.array(hits)).to_pylist(), strict=True):
        found.setdefault(text, []).append(owner)
    return found


def find_connected_rows(
    registry: pa.Table, touched: pa.Array, links: Mapping[str, str | None], tables: Genes | None
) -> NDArray[np.int64]:
    """Return the rows of a registry that are connected with some features, theirs included, ascending.

    Features are connected by a common id, symbol or alias, by a gene whose names or accessions they have, and by a link
    made by hand. What a feature counts as depends on features that it is connected with, and on no others. `touched`
    are feature uids; `links` are made by hand, feature uid -> target uid.
    """
    owners, texts = _nodes(registry, links, tables)
    # Genes and links are nodes too, numbered after the rows; they connect rows but are not returned.
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
    # Two entries per link with one owner, which connects its two features.
    found.append((n + np.arange(len(ends)) // 2, ends))
    texts = pa.chunked_array([texts for _, texts in found], pa.string())
    named = pc.fill_null(pc.not_equal(texts, ""), fill_value=False)
    return np.concatenate([own for own, _ in found])[named.to_numpy()], texts.filter(named)
