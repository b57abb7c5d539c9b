"""Which features are the same: a mapping over the registry, derived from it and from links made by hand, and revocable.

Two tables. `_feature_links` holds what people said, with what they revoked since. `_feature_identity` holds what follows from
the registries and those links: for each feature that counts as another one, that other one, in one step. Queries apply the
second table when they are planned; it is a pure function of registries and links, so the order of files and of snapshots does
not matter.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import (
    FACTS,
    GENE_TABLE,
    IDENTITY,
    LINKS,
    REGISTRY_COLUMNS,
    Catalog,
    ensure_table,
    refuse_wrong_columns,
)
from raggedatlas.catalog.genes import Genes, NameResolver, find_connected_rows, read_genes
from raggedatlas.catalog.layouts import BY_HAND, registry_rows
from raggedatlas.errors import ConflictError, FeatureError, StoreError
from raggedatlas.model.accessions import UNKNOWN, are_accessions
from raggedatlas.model.ids import feature_uids
from raggedatlas.model.validation import Problem
from raggedatlas.store.tables import CHANGED_AT, LISTING

IDENTITY_SCHEMA = pa.schema(
    [
        pa.field("space", pa.string(), nullable=False),
        pa.field("feature_uid", pa.string(), nullable=False),
        pa.field("target_uid", pa.string(), nullable=False),
        pa.field("relation", pa.string(), nullable=False),
        pa.field("evidence", pa.string(), nullable=False),
        pa.field("by_hand", pa.bool_(), nullable=False),
        pa.field("source", pa.string()),
        pa.field("source_sha256", pa.string()),
        pa.field("made_at", pa.timestamp("us", "UTC")),
    ]
)
"""One row per feature that counts as another; `target_uid` never counts as a third. `source` is the gene table that says so. `made_at` is when
the link was made by hand, or when the atlas got the table; a row that follows from files alone has no time, since it does not depend on
when it was derived."""

LINKS_SCHEMA = pa.schema(
    [
        pa.field("space", pa.string(), nullable=False),
        pa.field("feature_uid", pa.string(), nullable=False),
        pa.field("target_uid", pa.string()),
        pa.field("evidence", pa.string(), nullable=False),
        pa.field("created_at", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("revoked_at", pa.timestamp("us", "UTC")),
    ]
)
"""One row per link made by hand, in the order of making; without a target the feature stands alone."""

FACTS_SCHEMA = pa.schema(
    [
        pa.field("space", pa.string(), nullable=False),
        pa.field("feature_uid", pa.string(), nullable=False),
        pa.field("symbol", pa.string()),
        pa.field("symbol_source", pa.string()),
        pa.field("previous", pa.list_(pa.string()), nullable=False),
        pa.field("aliases", pa.list_(pa.string()), nullable=False),
        pa.field("biotype", pa.string()),
    ]
)
"""One row per feature whose gene the gene tables know. Its symbol, the source of that, and its aliases take the place of those in the
registry, and hold what the registry says too; `previous` are those aliases that are previous symbols."""

GENE_SPACE = "gene_expression"
"""The space whose features gene tables speak of: a protein's name may be that of a gene, and is not the gene."""

_INPUTS = b"raggedatlas.inputs"
"""Schema metadata of `_feature_identity`: the versions of the tables that it was derived from, and of the rules."""

_RULES = 3
_SAME = "same"

_NO_FACTS = pa.Table.from_batches([], FACTS_SCHEMA)  # `empty_table` would import pandas


@dataclass(frozen=True)
class Identity:
    """What follows from one registry and the links made by hand; rows are those of the registry."""

    target: NDArray[np.int64]  # (n_features,): row that each feature counts as; its own where it counts as itself
    evidence: Mapping[int, str]  # row -> why it counts as another
    sources: Mapping[int, str]  # row -> the gene table by which it counts as another
    by_hand: frozenset[int]  # rows whose link was made by hand, those that stand alone by hand included
    # row -> the features that it may be the same as, where there are several; it stands alone
    ambiguous: Mapping[int, tuple[int, ...]]
    # row of a feature that counts as itself -> the accession by which the gene tables know its gene
    genes: Mapping[int, str]


def derive_identity(
    registry: pa.Table, space: str, links: Mapping[str, str | None], tables: Genes | None = None
) -> Identity:
    """Return which features of a registry, whose rows may be in any order, are the same.

    Features with the same accession are the same, and so are those with the same name and organism. A feature known by
    a name alone is the gene that has this name as its symbol, else as a previous symbol, else as an alias; the first of
    these that any gene of a compatible organism has decides. It joins the one feature with an accession of these genes;
    where there are several, the one that the authority names so, else none. Where none is registered, features whose
    names mean one gene join each other. A feature that no gene claims, and whose organism is unknown, is the one
    feature known by its name of a known organism. What stands among genes and is none, such as an antibody, joins
    nothing by its name. Symbols and aliases are those of the gene tables; a file's symbol stands for a gene that no
    table knows, and is else an alias. Links made by hand come before all of these, and no automatic row may close a
    circle with them.

    `links` maps a feature uid to the uid that it is the same as by hand; None keeps it apart from all others. `tables`
    are the gene tables in use, which speak of gene expression alone.
    """
    tables = tables if space == GENE_SPACE else None
    uids = registry.column("uid").to_pylist()
    row_of = {uid: row for row, uid in enumerate(uids)}
    names = pc.fill_null(registry.column("feature_id"), registry.column("uid"))
    accession = are_accessions(names).to_numpy(zero_copy_only=False)
    target = np.arange(len(uids))
    evidence: dict[int, str] = {}
    sources: dict[int, str] = {}
    ids = names if tables is None else _standing_ids(names, tables)
    _join_repeated(registry, ids, accession, uids, space, target, evidence)
    found = NameResolver(registry, ids, accession, target, tables).resolve(uids)
    target[list(found.joined)] = list(found.joined.values())
    evidence |= found.evidence
    if tables is not None:
        said = ((row, tables.source_of_same(names[row].as_py())) for row in evidence if accession[row])
        sources = {row: table for row, table in said if table is not None} | found.sources
    ambiguous = found.ambiguous
    by_hand = {
        row_of[uid]: row_of.get(into, -1) if into else row_of[uid] for uid, into in links.items() if uid in row_of
    }
    for row, into in by_hand.items():
        # A link to a feature that this registry lacks is damage, which `validate` reports; the feature stands alone.
        target[row] = into if into >= 0 else row
        evidence[row] = "by hand"
        sources.pop(row, None)
        ambiguous.pop(row, None)
    _end_chains(target, frozenset(by_hand))
    genes = {row: gene for row, gene in found.genes.items() if target[row] == row}
    return Identity(target, evidence, sources, frozenset(by_hand), ambiguous, genes)


def _join_repeated(
    registry: pa.Table, ids: pa.ChunkedArray, accession: NDArray[np.bool_], uids: list[str], space: str,
    target: NDArray[np.int64], evidence: dict[int, str],
) -> None:  # fmt: skip
    """Join the features of one accession, or of one name and organism: columns of one file."""
    organisms = pc.fill_null(registry.column("organism"), UNKNOWN)
    kinds = pc.fill_null(registry.column("other_type"), "")
    # An accession denotes one gene by itself; a name does so only within its organism and kind.
    owners = pc.if_else(pa.array(accession), "", pc.binary_join_element_wise(kinds, organisms, "\0"))
    keys = pc.binary_join_element_wise(owners, ids, "\0")
    counts = pc.value_counts(keys)
    repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    if not len(repeated):
        return
    rows = np.flatnonzero(pc.is_in(keys, value_set=repeated).to_numpy())
    groups: dict[str, list[int]] = {}
    for row, key in zip(rows.tolist(), keys.take(pa.array(rows)).to_pylist(), strict=True):
        groups.setdefault(key, []).append(row)
    for members in groups.values():
        name = ids[members[0]].as_py()
        [current] = feature_uids(space, [name], organisms[members[0]].as_py())
        # The uid that files get today comes first; ties go by uid, so the order of registration does not matter.
        first = min(members, key=lambda row: (uids[row] != current, uids[row]))
        for row in members:
            if row != first:
                target[row] = first
                evidence[row] = f"accession {name}" if accession[row] else f"name {name}"


def _standing_ids(names: pa.ChunkedArray, tables: Genes) -> pa.ChunkedArray:
    """Return for each id the accession that stands for its gene."""
    rows = np.flatnonzero(pc.is_in(names, value_set=pa.array(list(tables.same), pa.string())).to_numpy())
    if not len(rows):
        return names
    mask = np.zeros(len(names), bool)
    mask[rows] = True
    into = [tables.same[name] for name in names.take(pa.array(rows)).to_pylist()]
    return pa.chunked_array([pc.replace_with_mask(names.combine_chunks(), mask, pa.array(into, names.type))])


def _end_chains(target: NDArray[np.int64], by_hand: frozenset[int]) -> None:
    """Follow every chain to its end; of a circle, the automatic steps are taken back."""
    own = np.arange(len(target))
    while True:
        ends = target[target]
        # Each round doubles the steps taken, so log2(n) rounds follow the longest chain.
        for _ in range(len(target).bit_length()):
            further = ends[ends]
            if np.array_equal(further, ends):
                break
            ends = further
        # An end that still counts as another one lies on a circle.
        circling = np.flatnonzero(target[ends] != ends)
        if not len(circling):
            break
        circle = np.unique(ends[circling])
        automatic = np.array([row for row in circle.tolist() if row not in by_hand], np.int64)
        # Links by hand alone never form a circle: `link_features` refuses the one that would close it.
        target[automatic if len(automatic) else circle] = own[automatic if len(automatic) else circle]
    target[:] = ends


def read_identity(catalog: Catalog, space: str) -> pa.Table | None:
    """Read which features of a space count as others; None where the atlas, or the snapshot, has no such table."""
    if not catalog.tables.has(IDENTITY):
        return None
    rows = _read_columns(catalog, IDENTITY, IDENTITY_SCHEMA)
    return rows.filter(pc.equal(rows.column("space"), space))


def read_facts(catalog: Catalog, space: str) -> pa.Table | None:
    """Read what the gene tables know of the features of a space; None where they know nothing."""
    if not catalog.tables.has(FACTS):
        return None
    rows = _read_columns(catalog, FACTS, FACTS_SCHEMA)
    rows = rows.filter(pc.equal(rows.column("space"), space))
    return rows if rows.num_rows else None


def links_version(catalog: Catalog) -> int:
    """Return the version of the links made by hand; that of an empty table where there is none yet."""
    return catalog.tables.versions([LINKS]).get(LINKS, 1)


def read_links(catalog: Catalog, *, revoked: bool = False) -> pa.Table:
    """Read the links made by hand, in the order of making, with those since revoked if asked."""
    rows = _read_columns(catalog, LINKS, LINKS_SCHEMA) if catalog.tables.has(LINKS) else LINKS_SCHEMA.empty_table()
    return rows if revoked else rows.filter(rows.column("revoked_at").is_null())


def _read_columns(catalog: Catalog, table: str, schema: pa.Schema) -> pa.Table:
    rows = catalog.tables.read(table)
    refuse_wrong_columns(rows.schema, schema, table)
    return rows.select(schema.names)


def active_links(links: pa.Table, space: str) -> dict[str, str | None]:
    """Return the links of one space that are not revoked: feature uid -> target uid, or None for one that stands alone."""
    rows = links.filter(pc.and_(pc.equal(links.column("space"), space), links.column("revoked_at").is_null()))
    return dict(zip(rows.column("feature_uid").to_pylist(), rows.column("target_uid").to_pylist(), strict=True))


def update_identity(catalog: Catalog, registries: Mapping[str, str]) -> bool:
    """Bring `_feature_identity` up to date, and return whether it, or what gene tables know of features, changed.

    After new or changed features, what is derived anew is those connected with them; after a change of links or gene
    tables, all.
    """
    catalog = catalog.session("identity.update()")

    def once() -> bool:
        there = _versions(catalog, registries)
        with_tables = GENE_TABLE in there
        derived_tables = (IDENTITY, FACTS) if with_tables else (IDENTITY,)
        if with_tables:
            ensure_table(catalog.tables, FACTS, FACTS_SCHEMA)
        if not {*derived_tables} <= there.keys():
            there = _versions(catalog, registries)
        # Versions are taken before the rows are read: newer rows under an older stamp are only derived once more.
        inputs = _inputs(there)
        stamps = {_stamp(catalog, name) if name in there else None for name in derived_tables}
        if stamps == {inputs}:
            return False
        old = _read_columns(catalog, IDENTITY, IDENTITY_SCHEMA) if IDENTITY in there else IDENTITY_SCHEMA.empty_table()
        old = old.cast(IDENTITY_SCHEMA)
        old_facts = _read_columns(catalog, FACTS, FACTS_SCHEMA).cast(FACTS_SCHEMA) if with_tables else _NO_FACTS
        links, tables = read_links(catalog), read_genes(catalog)
        # Two stamps: a process died between the two commits below, so everything is derived anew.
        stamp = stamps.pop() if len(stamps) == 1 else None
        derived = [
            _derived(catalog, space, table, links, tables, _derived_up_to(stamp, inputs, table), old, old_facts)
            for space, table in sorted(registries.items())
        ]
        rows = pa.concat_tables([IDENTITY_SCHEMA.empty_table(), *(mapping for mapping, _ in derived)])
        facts = pa.concat_tables([_NO_FACTS, *(facts for _, facts in derived)])
        if with_tables:
            catalog.tables.overwrite(FACTS, facts.replace_schema_metadata({_INPUTS: inputs}), there[FACTS])
        rows_with_stamp = rows.replace_schema_metadata({_INPUTS: inputs})
        if IDENTITY not in there:
            try:
                catalog.tables.create(IDENTITY, rows_with_stamp.schema, rows_with_stamp)
            except StoreError as error:
                catalog.tables.refresh([LISTING])
                if not catalog.tables.has(IDENTITY):
                    raise
                raise ConflictError(f"{IDENTITY} of {catalog.location.uri} was created by another process") from error
        else:
            catalog.tables.overwrite(IDENTITY, rows_with_stamp, there[IDENTITY])
        return not (rows.equals(old) and facts.equals(old_facts))

    return catalog.tables.retry(IDENTITY, once)


def _versions(catalog: Catalog, registries: Mapping[str, str]) -> dict[str, int]:
    """Return the versions of those tables that exist of what the mapping is derived from, and of what is derived."""
    return catalog.tables.versions((LINKS, GENE_TABLE, *registries.values(), IDENTITY, FACTS))


def _inputs(versions: Mapping[str, int]) -> bytes:
    """Return what the mapping is derived from: versions of tables, and the rules."""
    tables = {name: version for name, version in versions.items() if name not in (IDENTITY, FACTS)}
    return json.dumps({"rules": _RULES, "tables": tables}, sort_keys=True).encode()


def _stamp(catalog: Catalog, table: str) -> bytes | None:
    """Return what a derived table was derived from."""
    found: bytes | None = (catalog.tables.schema(table).metadata or {}).get(_INPUTS)
    return found


def _derived_up_to(stamp: bytes | None, inputs: bytes, table: str) -> int | None:
    """Return the version of a registry up to which the mapping holds; None where links, gene tables or rules have changed."""
    if stamp is None:
        return None
    then, now = json.loads(stamp), json.loads(inputs)
    same = then["rules"] == now["rules"] and all(
        then["tables"].get(name) == now["tables"].get(name) for name in (LINKS, GENE_TABLE)
    )
    version: int | None = then["tables"].get(table) if same else None
    return version


def fresh_identity(catalog: Catalog, space: str, registries: Mapping[str, str]) -> pa.Table | None:
    """Read which features of a space count as others, or derive it where the newest state has features that are not derived yet."""
    if catalog.tables.pinned is not None:
        return read_identity(catalog, space)
    versions = _versions(catalog, registries)
    inputs, there = _inputs(versions), IDENTITY in versions
    stamp = _stamp(catalog, IDENTITY) if there else None
    if stamp == inputs:
        return read_identity(catalog, space)
    old = _read_columns(catalog, IDENTITY, IDENTITY_SCHEMA) if there else IDENTITY_SCHEMA.empty_table()
    table, links, tables = registries[space], read_links(catalog), read_genes(catalog)
    return _derived(catalog, space, table, links, tables, _derived_up_to(stamp, inputs, table), old, _NO_FACTS)[0]


def read_inputs(catalog: Catalog, table: str) -> pa.Table:
    """Read what identity is derived from, of one registry table."""
    wanted, there = (
        ("uid", "feature_id", "symbol", "aliases", "organism", "symbol_source", "other_type"),
        catalog.tables.schema(table),
    )
    refuse_wrong_columns(there, REGISTRY_COLUMNS, table)
    columns = [name for name in wanted if name in there.names]
    # A session has the registry in memory; a query needs few of its columns.
    if catalog.tables.session is not None:
        return registry_rows(catalog, table)[1].select(columns)
    return catalog.tables.read(table, columns)


def _derived(
    catalog: Catalog, space: str, table: str, made: pa.Table, tables: Genes | None, since: int | None, old: pa.Table, old_facts: pa.Table
) -> tuple[pa.Table, pa.Table]:  # fmt: skip
    """Derive the mapping of one space, and the facts that the gene tables know of its features; anew, or what has changed since a version.

    `made` are the links of all spaces that were made by hand.
    """
    made = made.filter(pc.equal(made.column("space"), space))
    links = active_links(made, space)
    tables = tables if space == GENE_SPACE else None
    if since is None:
        registry = read_inputs(catalog, table)
        identity = derive_identity(registry, space, links, tables)
        return _rows(registry, space, identity, made, tables), _fact_rows(registry, space, identity, tables)
    kept, kept_facts = (rows.filter(pc.equal(rows.column("space"), space)) for rows in (old, old_facts))
    # Compaction does not change this column of Lance, so only rows that were really written are found.
    if catalog.tables.session is not None:
        rows = registry_rows(catalog, table)[1]
        touched = rows.filter(pc.greater(rows.column(CHANGED_AT), since)).column("uid").combine_chunks()
    else:
        touched = catalog.tables.read(table, ["uid"], f"{CHANGED_AT} > {since}").column("uid").combine_chunks()
    if not len(touched):
        return kept, kept_facts
    registry = read_inputs(catalog, table)
    registry = registry.take(pa.array(find_connected_rows(registry, touched, links, tables)))
    identity = derive_identity(registry, space, links, tables)

    def put_in(before: pa.Table, fresh: pa.Table) -> pa.Table:
        gone = pc.is_in(before.column("feature_uid"), value_set=registry.column("uid").combine_chunks())
        return pa.concat_tables([before.filter(pc.invert(gone)), fresh]).sort_by("feature_uid")

    rows, facts = _rows(registry, space, identity, made, tables), _fact_rows(registry, space, identity, tables)
    return put_in(kept, rows), put_in(kept_facts, facts)


def _fact_rows(registry: pa.Table, space: str, identity: Identity, tables: Genes | None) -> pa.Table:
    """Return what is known of the features that gene tables know, the tables before files, and what people said before both."""
    if tables is None or not identity.genes:
        return FACTS_SCHEMA.empty_table()
    facts_of = tables.facts(identity.genes.values())
    own = registry.take(pa.array(list(identity.genes))).to_pylist()
    rows = []
    for row, gene in zip(own, identity.genes.values(), strict=True):
        facts = facts_of.get(gene)
        if facts is None:
            continue
        by_hand = row.get("symbol_source") == BY_HAND
        symbol, source = (row["symbol"], BY_HAND) if by_hand or not facts.symbol else (facts.symbol, facts.source)
        names = {*(row["aliases"] or ()), row["symbol"], facts.symbol, *facts.aliases, *facts.previous}
        rows.append(
            {
                "space": space, "feature_uid": row["uid"], "symbol": symbol, "symbol_source": source if by_hand or facts.symbol else None,
                "previous": facts.previous, "aliases": sorted(names - {None, "", symbol, row["feature_id"]}), "biotype": facts.biotype,
            }
        )  # fmt: skip
    return pa.Table.from_pylist(rows, schema=FACTS_SCHEMA).sort_by("feature_uid")


def _rows(registry: pa.Table, space: str, identity: Identity, links: pa.Table, tables: Genes | None) -> pa.Table:
    """Return the rows of the mapping, for the features that count as others."""
    moved = np.flatnonzero(identity.target != np.arange(len(identity.target)))
    uids = registry.column("uid")
    n = len(moved)
    infos = {} if tables is None else tables.info_of
    sources = [infos.get(identity.sources.get(row, "")) for row in moved.tolist()]
    made = dict(zip(links.column("feature_uid").to_pylist(), links.column("created_at").to_pylist(), strict=True))
    loaded = [
        datetime.fromisoformat(info.loaded_at) if info is not None and info.loaded_at else None for info in sources
    ]
    moved_uids = uids.take(pa.array(moved))
    rows = pa.table(
        [
            pa.array([space] * n, pa.string()),
            moved_uids,
            uids.take(pa.array(identity.target[moved])),
            pa.array([_SAME] * n, pa.string()),
            pa.array([identity.evidence[row] for row in moved.tolist()], pa.string()),
            pa.array([row in identity.by_hand for row in moved.tolist()], pa.bool_()),
            pa.array([info and info.name for info in sources], pa.string()),
            pa.array([info and info.sha256 for info in sources], pa.string()),
            pa.array(
                [made.get(uid, at) for uid, at in zip(moved_uids.to_pylist(), loaded, strict=True)],
                IDENTITY_SCHEMA.field("made_at").type,
            ),
        ],
        schema=IDENTITY_SCHEMA,
    )
    return rows.sort_by("feature_uid")


def change_links(
    catalog: Catalog, space: str, registry: pa.Table, links: Mapping[str, str | None], *, revoke: Iterable[str] = (),
    evidence: str = "by hand", read_version: int | None = None,
) -> None:  # fmt: skip
    """Make links by hand, and revoke others; a feature's newest link replaces the one before.

    Nothing changes if one is refused. `links` maps a feature uid to the target uid, or to None to keep it apart from
    all others. `revoke` are feature uids whose link is taken back. `evidence` says why, for people. `read_version` is
    the version of the links (`links_version`) by which this was decided: if they have changed since, it raises
    `ConflictError`; without it, the commit is repeated when another writer commits first.
    """
    catalog = catalog.session("identity.link()")
    ensure_table(catalog.tables, LINKS, LINKS_SCHEMA)
    gone = {*revoke, *links}
    name_of = dict(zip(registry.column("uid").to_pylist(), registry.column("feature_id").to_pylist(), strict=True))

    def once() -> None:
        at = links_version(catalog)
        if read_version not in (None, at):
            raise ConflictError(f"{LINKS} of {catalog.location.uri} changed")
        old = read_links(catalog, revoked=True).cast(LINKS_SCHEMA)
        active = {uid: into for uid, into in active_links(old, space).items() if uid not in gone} | dict(links)
        for start in active:
            seen, at_end = [start], active[start]
            while at_end is not None and at_end not in seen:
                seen.append(at_end)
                at_end = active.get(at_end)
            if at_end is not None:
                shown = " -> ".join(name_of.get(uid) or uid for uid in [*seen, at_end])
                raise FeatureError(f"These links by hand form a circle: {shown}; revoke one of them first.")
        now = pa.scalar(datetime.now(UTC), pa.timestamp("us", "UTC"))
        ours = pc.and_(
            pc.equal(old.column("space"), space),
            pc.is_in(old.column("feature_uid"), value_set=pa.array(sorted(gone), pa.string())),
        )
        revoked = pc.if_else(pc.and_(ours, old.column("revoked_at").is_null()), now, old.column("revoked_at"))
        kept = old.set_column(old.column_names.index("revoked_at"), LINKS_SCHEMA.field("revoked_at"), revoked)
        made = [
            {"space": space, "feature_uid": uid, "target_uid": into, "evidence": evidence, "created_at": now.as_py()}
            for uid, into in links.items()
        ]
        rows = pa.concat_tables([kept, pa.Table.from_pylist(made, schema=LINKS_SCHEMA)])
        catalog.tables.overwrite(LINKS, rows, at)

    if read_version is None:
        catalog.tables.retry(LINKS, once)
    else:
        once()


def restore_links(catalog: Catalog, then: Catalog) -> None:
    """Make the links of a snapshot, `then`, the newest again."""
    if not catalog.tables.has(LINKS):
        return
    links = read_links(then, revoked=True).cast(LINKS_SCHEMA)

    def once() -> None:
        at = catalog.tables.version(LINKS)
        old = read_links(catalog, revoked=True).cast(LINKS_SCHEMA)
        if not links.equals(old):
            catalog.tables.overwrite(LINKS, links, at)

    catalog.tables.retry(LINKS, once)


def check_identity(catalog: Catalog, space: str, uids: pa.ChunkedArray) -> list[Problem]:
    """Check that the mapping of one space is one step long and names features that are there."""
    rows = read_identity(catalog, space)
    if rows is None:
        return []
    sources, targets = rows.column("feature_uid"), rows.column("target_uid")
    named = pa.chunked_array([*sources.chunks, *targets.chunks], pa.string()).unique()
    wrong = named.filter(pc.invert(pc.is_in(named, value_set=uids.combine_chunks())))
    problems = []
    if wrong:
        text = f"{len(wrong):,} features of {space!r} that it names are not registered, for instance {wrong[0].as_py()}"
        problems.append(Problem("feature-identity", "must", IDENTITY, text, "Restore the atlas from a copy."))
    further = pc.any(pc.is_in(targets, value_set=sources.combine_chunks())).as_py()
    if further or pc.count_distinct(sources).as_py() < len(sources):
        text = f"features of {space!r} count as several others, or as one that counts as another"
        problems.append(Problem("feature-identity", "must", IDENTITY, text, "Restore the atlas from a copy."))
    return problems
