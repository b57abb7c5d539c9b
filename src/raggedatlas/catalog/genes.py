"""Gene tables of an atlas: keep, list and remove them, and look up what they say of names and accessions."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import GENE_TABLE, ORTHOLOG_TABLE, Catalog
from raggedatlas.errors import ConflictError, CorruptError, DuplicateError, NotFoundError, StoreError
from raggedatlas.model.genes import (
    GENES,
    GENES_SCHEMA,
    ORTHOLOGS,
    ORTHOLOGS_SCHEMA,
    GeneTable,
    GeneTableInfo,
    infos_from_json,
    infos_to_json,
)

_INFOS = b"raggedatlas.gene_tables"
"""Schema metadata of both tables: the list of loaded tables, so that it changes in the commit that changes their rows."""

_STORED = {GENES: (GENE_TABLE, GENES_SCHEMA), ORTHOLOGS: (ORTHOLOG_TABLE, ORTHOLOGS_SCHEMA)}

SYMBOL, PREVIOUS, ALIAS = 0, 1, 2
"""How a gene has a name; the first that any gene has decides."""

LEVELS = ("symbol", "previous symbol", "alias")


@dataclass(frozen=True)
class Claim:
    """A gene that may have some name.

    Parameters
    ----------
    level : int
        `SYMBOL`, `PREVIOUS` or `ALIAS`.
    rank : int
        Who says so: 0 the authority that names genes, 1 an annotation.
    gene : str
        Accession that stands for the gene.
    organism : str
        Common name.
    evidence : str
        For people.
    table : str
        The table that says so.
    """

    level: int
    rank: int
    gene: str
    organism: str
    evidence: str
    table: str


@dataclass(frozen=True)
class Facts:
    """What the tables know of one gene.

    Parameters
    ----------
    symbol : str or None
        Of the best table that has one.
    source : str
        That table and its release.
    previous, aliases : tuple of str
        Other names; other accessions of the gene are among the aliases.
    biotype : str or None
        Of the first table that has one.
    """

    symbol: str | None
    source: str
    previous: tuple[str, ...]
    aliases: tuple[str, ...]
    biotype: str | None


@dataclass(frozen=True)
class Genes:
    """The gene tables in use.

    Parameters
    ----------
    infos : tuple of GeneTableInfo
        Which they are.
    rows : pyarrow.Table
        Of `GENES_SCHEMA`, in any order.
    """

    infos: tuple[GeneTableInfo, ...]
    rows: pa.Table

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
                found |= {name: min(found.get(name, cited), cited) for name in names if name}
        return {name: best[2] for name, best in found.items()}

    def _rows_of(self, genes: set[str]) -> list[dict[str, Any]]:
        """Return the rows of some genes, each named by the accession that stands for it."""
        every = pa.array([*genes, *(one for one, end in self.same.items() if end in genes)], pa.string())
        rows: list[dict[str, Any]] = self.rows.filter(
            pc.is_in(self.rows.column("accession"), value_set=every)
        ).to_pylist()
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
    return Genes(infos, _rows(catalog, GENE_TABLE, GENES_SCHEMA, infos)) if infos else None


def read_orthologs(catalog: Catalog) -> tuple[tuple[GeneTableInfo, ...], pa.Table] | None:
    """Read the ortholog tables in use: which they are, and their pairs in any order; None where there are none."""
    if not catalog.tables.has(ORTHOLOG_TABLE):
        return None
    infos = _infos(catalog, ORTHOLOG_TABLE)
    return (infos, _rows(catalog, ORTHOLOG_TABLE, ORTHOLOGS_SCHEMA, infos)) if infos else None


def _rows(catalog: Catalog, stored: str, schema: pa.Schema, infos: Sequence[GeneTableInfo]) -> pa.Table:
    """Read the rows of some tables."""
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
    """Keep tables in the atlas; one of a name that is there already replaces it.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    tables : sequence of GeneTable
        As they were read.

    Raises
    ------
    DuplicateError
        If a table of the other kind has such a name.
    """
    catalog.require_tip("identity.load()")
    kind_of = {info.name: info.kind for info in list_tables(catalog)}
    for table in tables:
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
    """Remove a table from the atlas; snapshots keep it.

    Raises
    ------
    NotFoundError
        If there is no such table.
    """
    catalog.require_tip("identity.remove()")
    info = next((info for info in list_tables(catalog) if info.name == name), None)
    if info is None:
        raise NotFoundError(
            f"The atlas {catalog.location.uri} has no gene table {name!r}; it has {[i.name for i in list_tables(catalog)]}."
        )
    _change(catalog, *_STORED[info.kind], {name}, [])


def restore_tables(catalog: Catalog, then: Catalog) -> None:
    """Make the tables of a snapshot the newest again.

    Parameters
    ----------
    catalog, then : Catalog
        At the tip, and pinned to the snapshot.
    """
    for kind, (stored, schema) in _STORED.items():
        if not catalog.tables.has(stored):
            continue
        infos = _infos(then, stored) if then.tables.has(stored) else ()
        if infos == _infos(catalog, stored):
            continue
        rows = _rows(then, stored, schema, infos) if infos else schema.empty_table()
        kept = [GeneTable(info, rows.filter(pc.equal(rows.column("table"), info.name))) for info in infos]
        _change(catalog, stored, schema, {info.name for info in list_tables(catalog) if info.kind == kind}, kept)


def _change(catalog: Catalog, stored: str, schema: pa.Schema, gone: set[str], fresh: Sequence[GeneTable]) -> None:
    """Take some tables away and put others in, as one commit; nothing is written where nothing changes.

    A table that is loaded again unchanged keeps the time at which the atlas got it.
    """
    if not catalog.tables.has(stored):
        try:
            catalog.tables.create(stored, schema)
        except StoreError:
            if not catalog.tables.has(stored):
                raise

    def once() -> None:
        at = catalog.tables.version(stored)
        old = _infos(catalog, stored)
        there, now = {replace(info, loaded_at=""): info for info in old}, datetime.now(UTC).isoformat()
        dated = [
            one if one.loaded_at else there.get(one, replace(one, loaded_at=now)) for one in (t.info for t in fresh)
        ]
        infos = (*(info for info in old if info.name not in gone), *dated)
        if {*infos} == {*old}:
            return
        kept = _rows(catalog, stored, schema, [info for info in old if info.name not in gone]).cast(schema)
        every = pa.concat_tables([kept, *(table.rows.cast(schema) for table in fresh)])
        stamped = every.replace_schema_metadata({_INFOS: infos_to_json(infos).encode()})
        if not catalog.tables.overwrite_if(stored, stamped, at):
            raise ConflictError(f"{stored} of {catalog.location.uri} changed")

    catalog.tables.retry(stored, once)


def text_owners(column: pa.ChunkedArray) -> tuple[NDArray[np.int64], pa.Array]:
    """Return every text of a column of texts or of lists of texts, and the row that has it."""
    values = column.combine_chunks()
    if pa.types.is_string(values.type):
        return np.arange(len(values)), values
    return pc.list_parent_indices(values).to_numpy(), pc.list_flatten(values)
