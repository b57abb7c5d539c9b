"""Optimize: feature indices, table indexes, compaction, and removal of old table versions."""

from collections.abc import Sequence
from datetime import timedelta

from raggedatlas.catalog.catalog import CELLS, DATASETS, IDENTITY, IDENTITY_TABLES, LAYOUTS, OPTIONAL, VERSIONS, Catalog
from raggedatlas.catalog.feature_registration import reindex_registry, sync_layouts
from raggedatlas.catalog.identity import update_identity
from raggedatlas.catalog.manifests import seal_versions
from raggedatlas.catalog.versions import assign_indices, registry_tables, repair_tags
from raggedatlas.errors import ConflictError, NotFoundError
from raggedatlas.model.assets import ResultRecord
from raggedatlas.model.reports import MaintenanceReport

KEEP = timedelta(days=7)
"""How long table versions without a snapshot are kept, so that readers of the tip can finish."""

INDEXES = {
    CELLS: (("uid", "BTREE"), ("dataset_uid", "BTREE")),
    LAYOUTS: (("layout_uid", "BTREE"), ("feature_uid", "BTREE"), ("feature_uid", "FTS")),
}
"""Indexes of the tables; registries have a BTREE on `uid`."""


def optimize_table(
    catalog: Catalog, name: str, *, everything: bool = False, results: Sequence[ResultRecord] = ()
) -> bool:
    """Index and compact one table; indexes first, because Lance does not merge indexed with unindexed fragments.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    name : str
        Table.
    everything : bool
        Whether to rewrite all fragments with deleted rows and to rebuild the indexes, so that no deleted byte is left.
    results : sequence of ResultRecord
        Results whose vector indexes are rebuilt.

    Returns
    -------
    bool
        Whether anything was written.
    """
    columns = INDEXES.get(name, () if name in {DATASETS, VERSIONS, *OPTIONAL} else (("uid", "BTREE"),))
    compacted = everything and catalog.tables.compact(name, everything=True)
    indexed = [catalog.tables.index(name, column, kind, rebuild=everything) for column, kind in columns]
    if name == CELLS:
        indexed.append(_optimize_vector_indexes(catalog, results))
    return (not everything and catalog.tables.compact(name)) or any(indexed) or compacted


def _optimize_vector_indexes(catalog: Catalog, rebuilt: Sequence[ResultRecord]) -> bool:
    """Rebuild some vector indexes, and update the others."""
    there = catalog.tables.schema(CELLS).names
    for record in rebuilt:
        index = record.index_facts
        if index is not None and record.column in there:
            catalog.tables.index_vectors(CELLS, record.column, record.metric, index.n_partitions)
    return catalog.tables.refresh_vectors(CELLS) or bool(rebuilt)


def vacuum_tables(catalog: Catalog, names: list[str], keep: timedelta, notes: list[str]) -> int:
    """Remove untagged versions of some tables that are older than a span; return the bytes freed."""
    freed = 0
    for name in names:
        try:
            freed += catalog.tables.clean_up(name, keep)
        except ConflictError:
            notes.append(f"{name}: others were writing; not cleaned up")
    return freed


def optimize(catalog: Catalog, keep: timedelta = KEEP) -> MaintenanceReport:
    """Remove duplicates, assign dense feature indices, compact, update indexes, and remove old versions (seed 000, ``optimize``).

    Safe with concurrent writers. A table that others keep changing is left for the next call. If nothing changed
    since the last time, little is read and nothing written. Table versions that a snapshot names are never cleaned up,
    however old.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    keep : timedelta
        Age up to which table versions without a snapshot are kept too.

    Returns
    -------
    MaintenanceReport
        Bytes freed, and a note for each table that was changed or skipped.
    """
    catalog.require_tip("optimize")
    notes = []
    if assign_indices(catalog):
        notes.append("dense feature indices assigned")
    if not catalog.tables.settled(LAYOUTS):
        sync_layouts(catalog)
    changed = []
    optional = [*catalog.tables.versions(OPTIONAL)]
    names = (CELLS, DATASETS, LAYOUTS, *optional, *registry_tables(catalog).values())
    for name in (name for name in names if name not in IDENTITY_TABLES):  # these are overwritten, never appended to
        try:
            if optimize_table(catalog, name):
                changed.append(name)
                notes.append(f"{name}: compacted or indexed")
        except ConflictError:
            notes.append(f"{name}: others were writing; skipped until the next call")
    # Last, because it notes the versions of the registries that it was derived from.
    if update_identity(catalog, registry_tables(catalog)):
        changed.append(IDENTITY)
        notes.append("feature identities: recomputed")
    freed = 0
    if changed or keep < KEEP:
        notes += repair_tags(catalog)
        seal_versions(catalog)
        freed = vacuum_tables(catalog, [*(changed if keep >= KEEP else names), VERSIONS, *optional], keep, notes)
    return MaintenanceReport(n_bytes=freed, notes=tuple(notes))


def reindex(catalog: Catalog, space: str | None = None) -> int:
    """Assign dense indices to the features of one space, or of all, in registries and layouts.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    space : str or None
        Feature space; None takes all that have a registry.

    Returns
    -------
    int
        Number of indices assigned.

    Raises
    ------
    NotFoundError
        If the space is unknown or its columns are not features.
    """
    catalog.require_tip("reindex_registry")
    there = registry_tables(catalog)
    if space is not None and space not in there:
        if catalog.space(space).has_features:
            return 0
        raise NotFoundError(f"The feature space {space!r} has no features: its columns have no names.")
    fresh = sum(reindex_registry(catalog, name) for name in (there if space is None else [space]))
    if fresh:
        sync_layouts(catalog)
    update_identity(catalog, there)
    return fresh
