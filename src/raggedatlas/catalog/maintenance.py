"""Maintenance: rename datasets, collect what nothing reaches, and repair what killed processes leave."""

from datetime import timedelta

from raggedatlas.catalog.assets import GRACE, Commit, commit_records, find_dataset, purged, was_purged
from raggedatlas.catalog.catalog import DATASETS, IDENTITY, Catalog
from raggedatlas.catalog.collectors import KEEP, Sweep
from raggedatlas.catalog.identity import update_identity
from raggedatlas.catalog.integrity import seal_versions
from raggedatlas.catalog.inventory import Inventory, shared_folders
from raggedatlas.catalog.purge import resume_purge
from raggedatlas.catalog.versions import registry_tables
from raggedatlas.errors import AtlasError, DuplicateError
from raggedatlas.model.ids import check_given_name, check_license
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.reports import MaintenanceReport
from raggedatlas.model.wings import asset_tables
from raggedatlas.store.bundle import SHARED
from raggedatlas.store.location import Location
from raggedatlas.store.runtime import map_fetches
from raggedatlas.store.tables import LISTING


def rename_dataset(catalog: Catalog, uid_or_name: str, name: str) -> None:
    """Give a dataset of the tip another name; snapshots keep the old one."""
    catalog = catalog.session("rename_dataset()")
    check_given_name(name, "name of a dataset")

    def choose(old: list[DatasetRecord]) -> Commit:
        records = find_dataset(catalog, uid_or_name, old)
        if any(record.name == name and record.uid != records[0].uid for record in old):
            raise DuplicateError(f"Another dataset of {catalog.location.uri} is called {name!r}; choose another name.")
        return Commit(tuple(record.model_copy(update={"name": name}) for record in records))

    commit_records(catalog, choose)


def set_license(catalog: Catalog, uid_or_name: str, license: str) -> None:
    """Note the licence of a dataset of the tip; snapshots keep the old one."""
    catalog = catalog.session("set_license()")
    check_license(license)

    def choose(old: list[DatasetRecord]) -> Commit:
        # The first record has the facts of the file.
        record = find_dataset(catalog, uid_or_name, old)[0]
        facts = record.file_facts.model_copy(update={"license": license})
        return Commit((record.model_copy(update={"facts": facts.to_json()}),))

    commit_records(catalog, choose)


def gc(
    catalog: Catalog, *, dry_run: bool = True, grace: timedelta = GRACE, keep: timedelta = KEEP
) -> MaintenanceReport:
    """Free data that no snapshot, no dataset or result of the tip and no running `add` references.

    `grace` and `keep` are those of `Sweep`. The report has the groups that were or, with `dry_run`, would be freed,
    with their bytes.
    """
    held = catalog.session("gc()", anew=True)
    earlier = purged(held)
    try:
        report = Sweep(held, "dry run" if dry_run else "gc", grace, keep).run()
        if not dry_run:
            seal_versions(held)
    except AtlasError:
        if not was_purged(held, earlier, "gc()"):
            raise
        return gc(catalog, dry_run=dry_run, grace=grace, keep=keep)
    return report


def repair(catalog: Catalog, grace: timedelta = GRACE) -> MaintenanceReport:
    """Clean up after processes that died during an add, drop, purge or table creation; running adds are not affected.

    The report has removed cells without a record and removed unreferenced groups. Its notes name datasets whose arrays
    are missing: they cannot be repaired, only restored from a copy or dropped.
    """
    held = catalog.session("repair()", anew=True, purges=True)
    # First, because all other writes are refused until the purge is finished.
    sweep = Sweep(held, "repair", grace, notes=[f"finished the purge of {uid}" for uid in resume_purge(held)])
    earlier = purged(held)
    try:
        sweep.run()
        sweep.notes += _missing(held)
        if held.tables.has(IDENTITY) and update_identity(held, registry_tables(held)):
            sweep.notes.append("feature identities: recomputed")
        seal_versions(held)
    except AtlasError:
        if not was_purged(held, earlier, "repair()"):
            raise
        return repair(catalog, grace)
    return sweep.report()


def _missing(catalog: Catalog) -> list[str]:
    """Say what is not in the Zarr store although the tip reaches it."""
    catalog.tables.refresh([LISTING, DATASETS, *asset_tables()])
    there = Inventory(catalog)
    named = {one.zarr_group for _, one in there.visible_assets if one.zarr_group}
    named |= {folder for folder in there.folders if SHARED.fullmatch(folder)}
    named |= {record.zarr_group for own in there.datasets.values() for record in own}
    places = [catalog.arrays.child(*group.split("/")) for group in named]
    each = (map if catalog.location.is_local else map_fetches)(Location.holds_files, places)
    lost = {group for group, held in zip(named, each, strict=True) if not held}
    notes = [
        f"the files {one.zarr_group} of the {kind.noun} {one.name} are missing: put them back from a copy, or run {kind.drop_call(one)}"
        for kind, one in there.visible_assets
        if one.zarr_group in lost
    ]
    for record in (record for own in there.datasets.values() for record in own):
        shared = shared_folders([record.facts, record.arrays])
        if lost & shared or (not shared and record.zarr_group in lost):
            notes.append(
                f"the arrays {record.zarr_group} of dataset {record.name or record.uid} are missing: put them back from a copy, "
                f"or run drop_dataset({record.uid!r})"
            )
    return notes
