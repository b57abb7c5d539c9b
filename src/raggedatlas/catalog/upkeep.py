"""Upkeep that a writer may run at any time beside others: optimize, drop a dataset."""

import datetime

from raggedatlas.catalog.catalog import CELLS, DATASETS, LAYOUTS, VERSIONS, Catalog
from raggedatlas.catalog.datasets import find_dataset
from raggedatlas.catalog.leases import release_lease
from raggedatlas.catalog.versions import assign_indices, heal_tags, one_of, registry_tables
from raggedatlas.catalog.features import sync_layouts
from raggedatlas.errors import ConflictError
from raggedatlas.model.reports import UpkeepReport

KEEP = datetime.timedelta(days=7)
"""How long table versions that no snapshot names are kept, so that readers of the tip finish in peace."""

INDEXES = {
    CELLS: (("uid", "BTREE"), ("dataset_uid", "BTREE")),
    LAYOUTS: (("layout_uid", "BTREE"), ("feature_uid", "BTREE"), ("feature_uid", "FTS")),
}
"""Indexes of the tables; registries have a BTREE on `uid`."""


def optimize(catalog: Catalog, keep: datetime.timedelta = KEEP) -> UpkeepReport:
    """Dedup, assign dense feature indices, compact, bring indexes up to date, and clean up (seed 000, ``optimize``).

    Runs beside any number of writers. A table that others keep changing is left for the next time. Where nothing changed
    since the last time, little is read and nothing written. Table versions that a snapshot names are never cleaned up,
    however old.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    keep : datetime.timedelta
        Age up to which table versions without a snapshot are kept too.

    Returns
    -------
    UpkeepReport
        Bytes freed, and a note per table that was changed or left.
    """
    catalog.require_tip("optimize")
    notes = []
    if assign_indices(catalog):
        notes.append("dense feature indices assigned")
    if not catalog.tables.settled(LAYOUTS):
        sync_layouts(catalog)
    names = {CELLS: True, DATASETS: True, LAYOUTS: True, **dict.fromkeys(registry_tables(catalog).values(), True)}
    changed = []
    for name in names:
        try:
            if tidy_table(catalog, name):
                changed.append(name)
                notes.append(f"{name}: compacted or indexed")
        except ConflictError:
            notes.append(f"{name}: others were writing; left for the next time")
    freed = 0
    if changed:
        notes += heal_tags(catalog)
        freed = clean_up(catalog, [*changed, VERSIONS], keep, notes)
    return UpkeepReport(n_bytes=freed, notes=tuple(notes))


def tidy_table(catalog: Catalog, name: str, *, everything: bool = False) -> bool:
    """Index and compact one table; indexes first, because fragments inside and outside an index do not merge.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    name : str
        Table.
    everything : bool
        Whether to rewrite whatever has a deleted row, and the indexes from scratch, so that nothing of it is left.

    Returns
    -------
    bool
        Whether anything was written.
    """
    columns = INDEXES.get(name, () if name in {DATASETS, VERSIONS} else (("uid", "BTREE"),))
    compacted = everything and catalog.tables.compact(name, everything=True)
    indexed = [catalog.tables.index(name, column, kind, rebuild=everything) for column, kind in columns]
    return (not everything and catalog.tables.compact(name)) or any(indexed) or compacted


def clean_up(catalog: Catalog, names: list[str], keep: datetime.timedelta, notes: list[str]) -> int:
    """Remove untagged versions of some tables that are older than a span; return the bytes freed."""
    freed = 0
    for name in names:
        try:
            freed += catalog.tables.clean_up(name, keep)
        except ConflictError:
            notes.append(f"{name}: others were writing; not cleaned up")
    return freed


def drop_dataset(catalog: Catalog, uid_or_name: str) -> UpkeepReport:
    """Take a dataset out of the atlas from now on; snapshots that hold it keep it, and `gc` frees what none holds.

    The record goes first, which makes the dataset invisible at once; then its cells. A process that dies in between leaves
    cells that nobody sees, and `repair` removes them.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    uid_or_name : str
        The dataset.

    Raises
    ------
    NotFoundError
        If there is no such dataset, or several of that name.
    """
    catalog.require_tip("drop_dataset")
    records = find_dataset(catalog, uid_or_name)
    uid = records[0].uid
    catalog.tables.delete(DATASETS, one_of("uid", [uid]))
    n = catalog.tables.delete(CELLS, one_of("dataset_uid", [uid]))
    release_lease(catalog, uid)
    return UpkeepReport(
        groups=tuple(record.zarr_group for record in records),
        n_cells=n,
        notes=("the arrays stay until gc() finds that no snapshot needs them",),
    )
