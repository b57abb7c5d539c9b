"""Maintenance: rename datasets, collect what nothing reaches, and repair what killed processes leave."""

import time
from datetime import UTC, datetime, timedelta
from functools import partial

from raggedatlas.catalog.assets import (
    GRACE,
    RESULT_ASSETS,
    Commit,
    asset_columns,
    asset_uids,
    clear_orphaned_pointers,
    commit_records,
    find_dataset,
    find_deleted_datasets,
    lease_alive,
    orphaned_columns,
    read_geometries,
    read_records,
    remove_datasets_from_geometries,
)
from raggedatlas.catalog.bundles import (
    delete_replaced,
    find_replaced,
    referenced_bundles,
    shared_folders,
    stored_folders,
)
from raggedatlas.catalog.catalog import (
    CELLS,
    DATASETS,
    GEOMETRY,
    IDENTITY,
    RESULTS,
    Catalog,
)
from raggedatlas.catalog.deletion import remove_dead_deletions, remove_unnamed_frames
from raggedatlas.catalog.identity import update_identity
from raggedatlas.catalog.integrity import remove_manifests, seal_versions
from raggedatlas.catalog.optimization import KEEP, vacuum_tables
from raggedatlas.catalog.purge import resume_purge
from raggedatlas.catalog.versions import (
    NUMBERED,
    PENDING,
    PURGE_TAG,
    UID,
    cells_per_dataset,
    list_versions,
    registry_tables,
    repair_tags,
    untag_everywhere,
)
from raggedatlas.errors import DuplicateError, NotFoundError
from raggedatlas.model.ids import check_given_name
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.reports import MaintenanceReport
from raggedatlas.store.bundle import SHARED
from raggedatlas.store.sql import in_list
from raggedatlas.store.storage_errors import refused_columns
from raggedatlas.store.tables import Tables


def rename_dataset(catalog: Catalog, uid_or_name: str, name: str) -> None:
    """Give a dataset of the tip another name; snapshots keep the old one.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    uid_or_name : str
        The dataset.
    name : str
        Its new name.

    Raises
    ------
    NotFoundError, DuplicateError, NameRefusedError
        If no dataset or several have the old name, another has the new one, or it is empty, too long or cannot be printed.
    """
    catalog.require_tip("rename_dataset")
    check_given_name(name, "name of a dataset")

    def choose(old: list[DatasetRecord]) -> Commit:
        records = find_dataset(catalog, uid_or_name, old)
        if any(record.name == name and record.uid != records[0].uid for record in old):
            raise DuplicateError(f"Another dataset of {catalog.location.uri} is called {name!r}; choose another name.")
        return Commit(tuple(record.model_copy(update={"name": name}) for record in records))

    commit_records(catalog, choose)


def gc(
    catalog: Catalog, *, dry_run: bool = True, grace: timedelta = GRACE, keep: timedelta = KEEP
) -> MaintenanceReport:
    """Free data that no snapshot, no dataset or result of the tip and no running `add` references.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    dry_run : bool
        Only report.
    grace : timedelta
        How long the arrays of a writer on another machine, and the provisional tags of a snapshot, may be unchanged
        before their process counts as dead.
    keep : timedelta
        Age up to which table versions without a snapshot are kept.

    Returns
    -------
    MaintenanceReport
        Groups that were or would be freed, with their bytes.
    """
    catalog.require_tip("gc")
    notes: list[str] = []
    free, alive = find_unreferenced(catalog, grace)
    tags = _orphaned_tags(catalog, grace)
    notes += [f"tag {tag} of {table} belongs to no snapshot" for table, names in tags.items() for tag in names]
    if dry_run:
        n_bytes = sum(catalog.arrays.child(uid).size() for uid in free)
        n_bytes += sum(size for files in find_replaced(catalog, grace).values() for _, size in files)
        return MaintenanceReport(
            groups=tuple(free), n_bytes=n_bytes, dry_run=True, kept=tuple(alive), notes=tuple(notes)
        )
    notes += repair_tags(catalog)
    for table, names in tags.items():
        for tag in names:
            untag_everywhere(catalog, tag, [table])
    n_bytes = sum(catalog.arrays.child(uid).delete_prefix() for uid in free)
    n_bytes += delete_replaced(catalog, grace)
    n_bytes += vacuum_tables(catalog, [n for n in catalog.tables.names() if catalog.tables.has(n)], keep, notes)
    n_bytes += remove_manifests(catalog, grace) + remove_unnamed_frames(catalog, grace)
    seal_versions(catalog)
    return MaintenanceReport(groups=tuple(free), n_bytes=n_bytes, kept=tuple(alive), notes=tuple(notes))


def repair(catalog: Catalog, grace: timedelta = GRACE) -> MaintenanceReport:
    """Clean up after processes that died during an add, drop, purge or table creation; running adds are not affected.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    grace : timedelta
        As in `gc`.

    Returns
    -------
    MaintenanceReport
        Removed cells without a record and removed unreferenced groups. Notes name datasets whose arrays are missing: they
        cannot be repaired, only restored from a copy or dropped.
    """
    catalog.require_writable("repair")
    catalog = catalog.tip()
    # First, because all other writes are refused until the purge is finished.
    notes = [f"finished the purge of {uid}" for uid in resume_purge(catalog)]
    notes += _remove_half_tables(catalog, grace) + _drop_refused_columns(catalog) + remove_dead_deletions(catalog)
    dead, alive = _cells_without_record(catalog, grace)
    n_cells = catalog.tables.delete(CELLS, in_list("dataset_uid", dead)) if dead else 0
    stray = orphaned_columns(catalog, grace)
    if stray:
        catalog.tables.drop_columns(CELLS, stray, partial(asset_columns, catalog))
        notes.append(f"removed the cell columns {stray} of unregistered results")
    notes += _repair_geometry(catalog, grace)
    free, writing = find_unreferenced(catalog, grace)
    n_bytes = sum(catalog.arrays.child(uid).delete_prefix() for uid in free)
    notes += repair_tags(catalog)
    notes += [
        f"the shapes {record.zarr_group} of {record.name} are missing: put them back from a copy, or run drop_geometry({record.name!r})"
        for record in read_geometries(catalog)
        if not catalog.arrays.child(*record.zarr_group.split("/")).exists()
    ]
    notes += [
        f"the values {record.zarr_group} of the result {record.name} are missing: put them back from a copy, or run "
        f"drop_result({record.name!r})"
        for record in RESULT_ASSETS.read(catalog)
        if record.zarr_group and not catalog.arrays.child(*record.zarr_group.split("/")).exists()
    ]
    shared = {folder for folder in stored_folders(catalog) if SHARED.fullmatch(folder)}
    lost = {folder for folder in shared if not catalog.arrays.child(folder).exists()}
    for record in read_records(catalog):
        place = shared_folders([record.facts, record.arrays])
        if lost & place or not (place or catalog.arrays.child(*record.zarr_group.split("/")).exists()):
            notes.append(
                f"the arrays {record.zarr_group} of dataset {record.name or record.uid} are missing: put them back from a copy, "
                f"or run drop_dataset({record.uid!r})"
            )
    if catalog.tables.has(IDENTITY) and update_identity(catalog, registry_tables(catalog)):
        notes.append("feature identities: recomputed")
    seal_versions(catalog)
    kept = tuple(dict.fromkeys([*alive, *writing]))
    return MaintenanceReport(groups=tuple(free), n_cells=n_cells, n_bytes=n_bytes, kept=kept, notes=tuple(notes))


def _repair_geometry(catalog: Catalog, grace: timedelta) -> list[str]:
    """Remove deleted datasets from the geometry registry, and dangling pointers from the cells."""
    n_stores = remove_datasets_from_geometries(catalog, find_deleted_datasets(catalog, grace))
    n_pointers = clear_orphaned_pointers(catalog, grace)
    notes = [f"{n_stores:,} geometry stores named datasets that are gone"] if n_stores else []
    return notes + ([f"removed {n_pointers:,} pointers to unregistered shapes"] if n_pointers else [])


def find_unreferenced(catalog: Catalog, grace: timedelta) -> tuple[list[str], list[str]]:
    """Return unreferenced groups, and groups that only a running `add` references.

    The tip is read before and after the leases are looked at, and every tagged inventory last. So a dataset that is
    committed, or caught by a snapshot and dropped, while this runs, is seen in at least one of them.
    """
    before = asset_uids(catalog)
    # Bundles that datasets share have leases, too, from before they are written until records name them.
    before |= shared_folders(record.facts for record in read_records(catalog))
    named = (name for name in catalog.arrays.list_children() if UID.fullmatch(name) or SHARED.fullmatch(name))
    groups = [name for name in named if name not in before]
    alive = [uid for uid in groups if lease_alive(catalog, uid, grace)]
    reached = _referenced(catalog) if groups else set()
    return [uid for uid in groups if uid not in reached and uid not in alive], [
        uid for uid in alive if uid not in reached
    ]


def _referenced(catalog: Catalog) -> set[str]:
    tables = Tables(catalog.tables.location)
    reached = asset_uids(catalog) | referenced_bundles(catalog)
    for name in (DATASETS, RESULTS, GEOMETRY):
        versions = set(tables.tags(name).values()) if tables.has(name) else set()
        versions |= {r.table_versions[name] for r in list_versions(catalog) if name in r.table_versions}
        for version in sorted(versions):
            pinned = Tables(tables.location, {name: version})
            # A tagged version may be gone; `validate` reports it (rule `lost-version`).
            if pinned.has(name):
                reached.update(pinned.read(name, ["uid"]).column("uid").to_pylist())
    return reached


def _orphaned_tags(catalog: Catalog, grace: timedelta) -> dict[str, list[str]]:
    """Return tags without a snapshot or purge. Tags are read before snapshots, so that a concurrent snapshot is not affected."""
    tables = Tables(catalog.tables.location)
    tags = {name: sorted(tables.tags(name)) for name in tables.names() if tables.has(name)}
    numbers = {record.version for record in list_versions(catalog)}
    purging = catalog.unfinished_purge() is not None
    oldest = time.time() - grace.total_seconds()

    def stray(tag: str) -> bool:
        numbered, pending = NUMBERED.fullmatch(tag), PENDING.fullmatch(tag)
        if numbered is not None:
            return int(numbered["number"]) not in numbers
        if PURGE_TAG.fullmatch(tag) is not None:
            return not purging
        return pending is not None and int(pending["seconds"]) < oldest

    return {name: found for name, names in tags.items() if (found := [tag for tag in names if stray(tag)])}


def _cells_without_record(catalog: Catalog, grace: timedelta) -> tuple[list[str], list[str]]:
    """Return datasets that have cells but no record: dead ones, and those being added. Records are read last."""
    counts = cells_per_dataset(catalog)
    known = {record.uid for record in read_records(catalog)}
    fresh = [uid for uid in counts if uid not in known]
    alive = [uid for uid in fresh if UID.fullmatch(uid) and lease_alive(catalog, uid, grace)]
    known = {record.uid for record in read_records(catalog)} if fresh else known
    return [uid for uid in fresh if uid not in alive and uid not in known], [uid for uid in alive if uid not in known]


def _drop_refused_columns(catalog: Catalog) -> list[str]:
    """Drop columns for whose sake Lance does not read a table."""
    refused = [*refused_columns(catalog.tables.schema(CELLS))]
    if refused:
        catalog.tables.drop_columns(CELLS, refused)
    return [
        f"removed the cell column {name}, which Lance cannot read; the frames of the datasets have it"
        for name in refused
    ]


def _remove_half_tables(catalog: Catalog, grace: timedelta) -> list[str]:
    """Remove folders of tables that were never completed: no version, and nothing written for a while."""
    notes = []
    for name in catalog.tables.names():
        folder = catalog.tables.location.child(f"{name}.lance")
        try:
            catalog.tables.open(name)
        except NotFoundError:
            newest = folder.last_modified()
            if newest is None or datetime.now(UTC) - newest >= grace:
                folder.delete_prefix()
                notes.append(f"removed the table {name}, which was never completed")
    return notes
