"""Optimize the tables: feature indices, compaction, indexes, and removal of old versions; what has not changed is not read."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from raggedatlas.catalog.bundles import pack_datasets
from raggedatlas.catalog.catalog import CELLS, DATASETS, IDENTITY, IDENTITY_TABLES, LAYOUTS, VERSIONS, Catalog
from raggedatlas.catalog.collectors import Sweep
from raggedatlas.catalog.identity import update_identity
from raggedatlas.catalog.integrity import seal_versions
from raggedatlas.catalog.layouts import Unnumbered, reindex_registry, sync_layouts, unnumbered_layouts
from raggedatlas.catalog.versions import registry_tables
from raggedatlas.errors import ConflictError, NotFoundError
from raggedatlas.model.wings import asset_tables
from raggedatlas.store.sql import is_null
from raggedatlas.store.upkeep import MANY_FRAGMENTS, compact, index, refresh_vectors

INDEXES = {
    CELLS: (("uid", "BTREE"), ("dataset_uid", "BTREE")),
    LAYOUTS: (("layout_uid", "BTREE"), ("feature_uid", "BTREE"), ("feature_uid", "FTS")),
}
"""Indexes of the tables; registries have a BTREE on `uid`."""

WORTH_INDEXING = 1 << 14
"""Rows without an index from which a snapshot updates it: fewer are scanned in less time than an index is opened."""


def index_table(catalog: Catalog, name: str, least: int = 1) -> bool:
    """Build or update the indexes of one table from `least` rows without one; return whether anything was written."""
    unindexed = {DATASETS, VERSIONS, *IDENTITY_TABLES, *asset_tables()}
    columns = INDEXES.get(name, () if name in unindexed else (("uid", "BTREE"),))
    indexed = [index(catalog.tables, name, column, kind, least=least) for column, kind in columns]
    return any([*indexed, name == CELLS and refresh_vectors(catalog.tables, CELLS)])


def optimize(catalog: Catalog) -> None:
    """Remove duplicates, assign dense feature indices, compact, update indexes, and remove old versions.

    Small datasets of one layout come to share files (see `pack_datasets`).

    Safe with concurrent writers. A table that others keep changing is left for the next call. If nothing changed since
    the last time, little is read and nothing written; what was added since is compacted and indexed by itself, and
    large fragments are not rewritten. Table versions that a snapshot names are never cleaned up, however old; others
    are kept up to the age `KEEP`.
    """
    catalog = catalog.session("optimize()")
    # First, because it leaves fragments of records to compact.
    pack_datasets(catalog)
    changed = update_tables(catalog)
    if not changed:
        return
    others = catalog.tables.versions((*asset_tables(), *IDENTITY_TABLES))
    # Each once, although some of the others may have changed too.
    Sweep(catalog, "optimize", tables=[*dict.fromkeys([*changed, VERSIONS, *others])]).run()
    seal_versions(catalog)


def update_tables(catalog: Catalog, least: int = 1) -> list[str]:
    """Assign feature indices, compact and index; return the tables that were changed.

    The catalog is held; afterwards it has the tables as this left them. An index is updated from `least` rows without
    one; with more than one, also a few fragments are left as they are.
    """
    registries, few = registry_tables(catalog), MANY_FRAGMENTS if least > 1 else 0
    changed: list[str] = []

    def one(name: str) -> None:
        # A table that others keep changing is left for the next call.
        with suppress(ConflictError):
            # Indexes first, because Lance does not merge indexed with unindexed fragments.
            indexed = index_table(catalog, name, least)
            # Deleted cells are left out, so that a snapshot does not keep them; other tables have deleted rows from every commit.
            n = 0 if name == CELLS and catalog.tables.has_deleted_rows(CELLS) else few
            if compact(catalog.tables, name, n) or indexed:
                changed.append(name)

    def features() -> None:
        unnumbered: list[Unnumbered] = []

        def number(space: str, table: str) -> None:
            # A small table is read at once: one request instead of two.
            if catalog.tables.count(table) <= WORTH_INDEXING or catalog.tables.count(table, is_null("global_index")):
                reindex_registry(catalog, space)

        def look() -> None:
            # If indices may be missing. Repeated rows come from two appends, and thus at least two fragments.
            if not catalog.tables.settled(LAYOUTS) or catalog.tables.count(LAYOUTS, is_null("global_index")):
                unnumbered.append(unnumbered_layouts(catalog))

        steps: list[Callable[[], None]] = [*(partial(number, *item) for item in registries.items()), look]
        catalog.location.side_by_side(steps)
        for name in registries.values():
            one(name)

        def identity() -> None:
            if update_identity(catalog, registries):
                changed.append(IDENTITY)

        # After the registries were compacted, because it notes the versions that it was derived from.
        steps = [partial(layouts, unnumbered), identity]
        catalog.location.side_by_side(steps)

    def layouts(unnumbered: Sequence[Unnumbered]) -> None:
        if unnumbered:
            sync_layouts(catalog, unnumbered[0])
        one(LAYOUTS)

    # These are overwritten, never appended to.
    others = [*catalog.tables.versions([*asset_tables()])]
    each: list[Callable[[], None]] = [partial(one, name) for name in (CELLS, DATASETS, *others)]
    catalog.location.side_by_side([features, *each])
    return changed


def refresh_identity(catalog: Catalog) -> None:
    """Derive the mapping of features after a change that is made; where a purge has begun since, the next call or snapshot does."""
    with suppress(ConflictError):
        update_identity(catalog, registry_tables(catalog))


def reindex(catalog: Catalog, space: str | None = None) -> int:
    """Assign dense indices to the features of one space, or of all, in registries and layouts; return how many."""
    catalog = catalog.session("reindex_registry()")
    there = registry_tables(catalog)
    if space is not None and space not in there:
        if catalog.space(space).has_features:
            return 0
        raise NotFoundError(f"The feature space {space!r} has no features: its columns have no names.")
    fresh = sum(reindex_registry(catalog, name) for name in (there if space is None else [space]))
    if fresh:
        sync_layouts(catalog)
    refresh_identity(catalog)
    return fresh
