"""Sweeping: free what nothing reaches (`gc`), and mend what a dead process left (`repair`)."""

import datetime
import time

from raggedatlas.catalog.catalog import CELLS, DATASETS, Catalog
from raggedatlas.catalog.datasets import read_records
from raggedatlas.catalog.leases import GRACE, lease_alive
from raggedatlas.catalog.purge import resume_purge
from raggedatlas.catalog.upkeep import KEEP, clean_up
from raggedatlas.catalog.versions import (
    NUMBERED,
    PENDING,
    UID,
    cells_per_dataset,
    heal_tags,
    list_versions,
    one_of,
    untag_everywhere,
)
from raggedatlas.errors import NotFoundError
from raggedatlas.model.reports import UpkeepReport
from raggedatlas.store.tables import Tables


def gc(
    catalog: Catalog, *, dry_run: bool = True, grace: datetime.timedelta = GRACE, keep: datetime.timedelta = KEEP
) -> UpkeepReport:
    """Free what no kept snapshot, no dataset of the tip and no running `add` reaches.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    dry_run : bool
        Only look.
    grace : datetime.timedelta
        How long the arrays of a writer on another machine, and the provisional tags of a snapshot, may stand still
        before their process counts as dead.
    keep : datetime.timedelta
        Age up to which table versions without a snapshot are kept.

    Returns
    -------
    UpkeepReport
        Groups freed, or that would be, with their bytes.
    """
    catalog.require_tip("gc")
    notes: list[str] = []
    free, alive = unreached(catalog, grace)
    tags = _stray_tags(catalog, grace)
    notes += [f"tag {tag} of {table} belongs to no snapshot" for table, names in tags.items() for tag in names]
    if dry_run:
        n_bytes = sum(catalog.arrays.child(uid).size() for uid in free)
        return UpkeepReport(groups=tuple(free), n_bytes=n_bytes, dry_run=True, kept=tuple(alive), notes=tuple(notes))
    notes += heal_tags(catalog)
    for table, names in tags.items():
        for tag in names:
            untag_everywhere(catalog, tag, [table])
    n_bytes = sum(catalog.arrays.child(uid).delete_prefix() for uid in free)
    n_bytes += clean_up(catalog, [n for n in catalog.tables.names() if catalog.tables.has(n)], keep, notes)
    return UpkeepReport(groups=tuple(free), n_bytes=n_bytes, kept=tuple(alive), notes=tuple(notes))


def repair(catalog: Catalog, grace: datetime.timedelta = GRACE) -> UpkeepReport:
    """Mend what a dead process left: half-done adds, drops, purges, tables; nothing of a running `add` is touched.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    grace : datetime.timedelta
        As in `gc`.

    Returns
    -------
    UpkeepReport
        Cells without a record and unreached groups that were removed. Notes name the datasets whose arrays are missing: they
        cannot be mended, only restored from a copy or dropped.
    """
    catalog.require_tip("repair")
    notes = [f"finished the purge of {uid}" for uid in resume_purge(catalog)]
    notes += _remove_half_tables(catalog, grace)
    dead, alive = _cells_without_record(catalog, grace)
    n_cells = catalog.tables.delete(CELLS, one_of("dataset_uid", dead)) if dead else 0
    free, writing = unreached(catalog, grace)
    n_bytes = sum(catalog.arrays.child(uid).delete_prefix() for uid in free)
    notes += heal_tags(catalog)
    for record in read_records(catalog):
        if not catalog.arrays.child(*record.zarr_group.split("/")).exists():
            notes.append(
                f"the arrays {record.zarr_group} of dataset {record.name or record.uid} are missing: put them back from a copy, "
                f"or run drop_dataset({record.uid!r})"
            )
    kept = tuple(dict.fromkeys([*alive, *writing]))
    return UpkeepReport(groups=tuple(free), n_cells=n_cells, n_bytes=n_bytes, kept=kept, notes=tuple(notes))


def unreached(catalog: Catalog, grace: datetime.timedelta) -> tuple[list[str], list[str]]:
    """Find dataset groups that nothing reaches, and those that only a running `add` reaches.

    The tip is read before and after the leases are looked at, and every tagged inventory last. So a dataset that is
    committed, or caught by a snapshot and dropped, while this runs, is seen in at least one of them.
    """
    before = {record.uid for record in read_records(catalog)}
    groups = [name for name in catalog.arrays.list_children() if UID.fullmatch(name) and name not in before]
    alive = [uid for uid in groups if lease_alive(catalog, uid, grace)]
    reached = _reached(catalog) if groups else set()
    return [uid for uid in groups if uid not in reached and uid not in alive], [uid for uid in alive if uid not in reached]


def _reached(catalog: Catalog) -> set[str]:
    tables = Tables(catalog.tables.location)
    reached = {record.uid for record in read_records(catalog)}
    versions = set(tables.tags(DATASETS).values())
    versions |= {r.table_versions[DATASETS] for r in list_versions(catalog) if DATASETS in r.table_versions}
    for version in sorted(versions):
        pinned = Tables(tables.location, {DATASETS: version})
        if pinned.has(DATASETS):
            reached.update(pinned.read(DATASETS, ["uid"]).column("uid").to_pylist())
    return reached


def _stray_tags(catalog: Catalog, grace: datetime.timedelta) -> dict[str, list[str]]:
    """Find tags without a snapshot. Tags are read before snapshots, so that one taken meanwhile is no stray."""
    tables = Tables(catalog.tables.location)
    tags = {name: sorted(tables.tags(name)) for name in tables.names() if tables.has(name)}
    numbers = {record.version for record in list_versions(catalog)}
    oldest = time.time() - grace.total_seconds()

    def stray(tag: str) -> bool:
        numbered, pending = NUMBERED.fullmatch(tag), PENDING.fullmatch(tag)
        if numbered is not None:
            return int(numbered["number"]) not in numbers
        return pending is not None and int(pending["seconds"]) < oldest

    return {name: found for name, names in tags.items() if (found := [tag for tag in names if stray(tag)])}


def _cells_without_record(catalog: Catalog, grace: datetime.timedelta) -> tuple[list[str], list[str]]:
    """Find datasets that have cells but no record: dead ones, and those that are being added. Records are read last."""
    counts = cells_per_dataset(catalog)
    known = {record.uid for record in read_records(catalog)}
    fresh = [uid for uid in counts if uid not in known]
    alive = [uid for uid in fresh if UID.fullmatch(uid) and lease_alive(catalog, uid, grace)]
    known = {record.uid for record in read_records(catalog)} if fresh else known
    return [uid for uid in fresh if uid not in alive and uid not in known], [uid for uid in alive if uid not in known]


def _remove_half_tables(catalog: Catalog, grace: datetime.timedelta) -> list[str]:
    """Remove folders of tables that were never completed: no version, and nothing written for a while."""
    notes = []
    for name in catalog.tables.names():
        folder = catalog.tables.location.child(f"{name}.lance")
        try:
            catalog.tables.open(name)
        except NotFoundError:
            newest = folder.last_modified()
            if newest is None or datetime.datetime.now(datetime.UTC) - newest >= grace:
                folder.delete_prefix()
                notes.append(f"removed the table {name}, which was never completed")
    return notes
