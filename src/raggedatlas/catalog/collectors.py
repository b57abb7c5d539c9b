"""What `gc`, `repair`, `purge` and `optimize` take away: one table of collectors, and which of these calls each of them serves."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from raggedatlas.catalog.assets import (
    GRACE,
    PURGED_KEY,
    alive_among,
    asset_kinds,
    delete_cells_without_record,
    group_by_dataset,
    lease_alive,
    purged,
    read_records,
    refuse_unknown_assets,
)
from raggedatlas.catalog.bundles import bundles_with
from raggedatlas.catalog.catalog import CELLS, DATASETS, VERSIONS, Catalog, shares_bundles
from raggedatlas.catalog.cells import cells_per_dataset
from raggedatlas.catalog.deletion import remove_dead_deletions
from raggedatlas.catalog.inventory import Inventory, dataset_folders, shared_folders
from raggedatlas.catalog.kept_tables import MARKERS
from raggedatlas.catalog.versions import (
    HEAD,
    NUMBERED,
    PENDING,
    PURGE_TAG,
    UID,
    for_tables,
    list_versions,
    repair_tags,
    untag_everywhere,
)
from raggedatlas.errors import ConflictError, NotFoundError
from raggedatlas.model.records import DatasetRecord, datasets_from_table, utc_now
from raggedatlas.model.wings import asset_tables
from raggedatlas.store.bundle import SHARED
from raggedatlas.store.location import Location
from raggedatlas.store.manifests import FOLDER
from raggedatlas.store.runtime import map_groups, map_requests, prefetch_map
from raggedatlas.store.storage_errors import refused_columns
from raggedatlas.store.tables import LISTING, Tables
from raggedatlas.store.upkeep import clean_up

if TYPE_CHECKING:
    from raggedatlas.model.reports import MaintenanceReport

KEEP = timedelta(days=7)
"""How long table versions without a snapshot are kept, so that readers of the tip can finish."""

T = TypeVar("T")

Call = Literal["gc", "dry run", "repair", "purge", "optimize"]


@dataclass
class Sweep:
    """One call that takes things away, and what it has taken."""

    catalog: Catalog  # at the tip
    call: Call  # whose collectors run; ``"dry run"`` is that of `gc`
    # how long files of a writer elsewhere, and provisional tags, may be unchanged before their process counts as dead
    grace: timedelta = GRACE
    keep: timedelta = KEEP  # age up to which table versions without a snapshot are kept
    tables: Sequence[str] | None = None  # those whose tags and old versions are looked at; None is all
    purged: Sequence[str] = ()  # the dataset that is purged, then the assets that are deleted with it
    groups: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    n_cells: int = 0
    n_bytes: int = 0

    def run(self) -> "MaintenanceReport":
        """Run the collectors of the call, in the order of the table."""
        if self.call != "optimize":
            refuse_unknown_assets(self.catalog, f"{self.call}()")
        for group in COLLECTORS:
            steps = [collector for collector, calls in group if self.call in calls]
            parts = [replace(self, groups=[], kept=[], notes=[], n_cells=0, n_bytes=0) for _ in steps]
            self.catalog.location.side_by_side([partial(step, part) for step, part in zip(steps, parts, strict=True)])
            for part in parts:
                self.groups += part.groups
                self.kept += part.kept
                self.notes += part.notes
                self.n_cells += part.n_cells
                self.n_bytes += part.n_bytes
        return self.report()

    def report(self) -> "MaintenanceReport":
        """Return what was taken away."""
        # Here, as a snapshot, which sweeps too, reports nothing.
        from raggedatlas.model.reports import MaintenanceReport

        return MaintenanceReport(
            groups=tuple(self.groups), n_cells=self.n_cells, n_bytes=self.n_bytes, dry_run=self.call == "dry run",
            kept=tuple(dict.fromkeys(self.kept)), notes=tuple(self.notes),
        )  # fmt: skip

    def table_names(self) -> Sequence[str]:
        """Return the tables whose tags and old versions are looked at."""
        tables = self.catalog.tables
        if self.tables is not None:
            return self.tables
        return [name for name, there in for_tables(self.catalog, tables.has, tables.names()).items() if there]

    def oldest(self) -> datetime:
        """Return since when something must be unchanged to count as left by a dead process."""
        return datetime.now(UTC) - self.grace


def kept_versions(catalog: Catalog, names: Sequence[str], read: Callable[[Tables, str], T]) -> Iterator[T]:
    """Read tables at the tip, at every version that a tag or a snapshot holds, and at the tip again if it has moved.

    All of these as they are now, whatever the session has seen before. The tip comes again so that what is restored, or
    committed by a process whose lease was looked at before, is seen at least once.
    """
    tables = catalog.tables

    def tips() -> set[tuple[str, int]]:
        tables.refresh([LISTING, *names])
        return {*tables.versions(names).items()}

    def look(name: str, version: int) -> T | None:
        pinned = tables.at({name: version})
        # A tagged version may be gone; `validate` reports it (rule `lost-version`).
        return read(pinned, name) if pinned.has(name) else None

    def read_all(found: set[tuple[str, int]]) -> Iterator[T]:
        # A few at once: an atlas may have a thousand snapshots.
        n, steps = 4 if catalog.location.is_local else 16, [partial(look, *one) for one in sorted(found, reverse=True)]
        with contextlib.closing(prefetch_map(lambda step: step(), steps, threads=n, depth=n)) as ahead:
            yield from (one for one in ahead if one is not None)

    there = [*tips()]
    # After the tips: what they have lost since is in a snapshot, or is gone.
    steps: list[Callable[[], Any]] = [partial(tables.tags, name) for name, _ in there]
    steps.append(partial(tables.refresh, [VERSIONS]))
    *tags, _ = catalog.location.side_by_side(steps)
    found = {*there, *((name, at) for (name, _), own in zip(there, tags, strict=True) for at in own.values())}
    listed = [record.table_versions for record in list_versions(catalog)]
    found |= {(name, own[name]) for own in listed for name in names if name in own}
    yield from read_all(found)
    yield from read_all(tips() - found)


def reached_folders(catalog: Catalog) -> set[str]:
    """Return the folders of the Zarr store that a kept view names.

    By the uids in its tables, and the bundles that its datasets name for frames or for arrays. Read from the columns as
    they are stored, so that a damaged record frees nothing.
    """

    def read(tables: Tables, name: str) -> set[str]:
        texts = ("facts", "arrays") if name == DATASETS and shares_bundles(catalog) else ()
        rows = tables.read(name, ["uid", *texts])
        named = (shared_folders(rows.column(text).to_pylist()) for text in texts)
        return set[str](rows.column("uid").to_pylist()).union(*named)

    return set[str]().union(*kept_versions(catalog, (DATASETS, *asset_tables()), read))


# ---- tables and cells


def remove_half_tables(sweep: Sweep) -> None:
    """Remove folders of tables that were never completed: no version, and nothing written for a while."""
    tables = sweep.catalog.tables
    for name in tables.names():
        folder = tables.location.child(f"{name}.lance")
        try:
            tables.open(name)
        except NotFoundError:
            newest = folder.last_modified()
            if newest is None or newest <= sweep.oldest():
                folder.delete_prefix()
                sweep.notes.append(f"removed the table {name}, which was never completed")


def drop_refused_columns(sweep: Sweep) -> None:
    """Drop columns for whose sake Lance does not read a table."""
    refused = [*refused_columns(sweep.catalog.tables.schema(CELLS))]
    if refused:
        sweep.catalog.tables.drop_columns(CELLS, refused)
    text = "removed the cell column {}, which Lance cannot read; the frames of the datasets have it"
    sweep.notes += [text.format(name) for name in refused]


def remove_deletions(sweep: Sweep) -> None:
    """Remove the records of deletions that died before a cell was deleted."""
    sweep.notes += remove_dead_deletions(sweep.catalog)


def delete_stray_cells(sweep: Sweep) -> None:
    """Delete the cells of datasets without a record that no process is adding. Records are read last."""
    catalog = sweep.catalog
    counts = cells_per_dataset(catalog)
    known = {record.uid for record in read_records(catalog)}
    fresh = [uid for uid in counts if uid not in known]
    alive = alive_among(catalog, [uid for uid in fresh if UID.fullmatch(uid)], sweep.grace)
    if fresh:
        catalog.tables.refresh([DATASETS])
        known = {record.uid for record in read_records(catalog)}
    dead = [uid for uid in fresh if uid not in alive and uid not in known]
    sweep.n_cells += delete_cells_without_record(catalog, dead)
    sweep.kept += [uid for uid in fresh if uid in alive and uid not in known]


def repair_assets(sweep: Sweep) -> None:
    """Remove what dead processes left of what is attached to cells."""
    for kind in asset_kinds():
        sweep.notes += kind.repair(sweep.catalog, sweep.grace)


# ---- the Zarr store


def free_folders(sweep: Sweep) -> None:
    """Delete folders that no kept view reaches and no living process has a lease on.

    The tip is read before and, as it is then, after the leases are looked at, and every kept version last. So a dataset
    that is committed, or caught by a snapshot and dropped, while this runs, is seen in at least one of them.
    """
    catalog = sweep.catalog
    # Bundles that datasets share have leases, too, from before they are written until records name them.
    there = Inventory(catalog)
    before = there.uids | there.folders
    named = (name for name in catalog.arrays.list_children() if UID.fullmatch(name) or SHARED.fullmatch(name))
    unknown = [name for name in named if name not in before]
    alive = alive_among(catalog, unknown, sweep.grace)
    reached = reached_folders(catalog) if unknown else set[str]()
    free = [name for name in unknown if name not in reached and name not in alive]
    sweep.groups += free
    sweep.kept += [name for name in unknown if name in alive and name not in reached]
    take = Location.size if sweep.call == "dry run" else Location.delete_prefix
    sweep.n_bytes += sum(catalog.location.side_by_side([partial(take, catalog.arrays.child(name)) for name in free]))


def delete_replaced_files(sweep: Sweep) -> None:
    """Delete files of datasets of which every kept version reads a shared bundle instead, once the bundle is older than the grace."""
    catalog = sweep.catalog
    if not shares_bundles(catalog):
        return
    left = {name for name in catalog.arrays.list_children() if UID.fullmatch(name)}
    shared: dict[str, str] = {}

    def read(tables: Tables, name: str) -> dict[str, list[DatasetRecord]]:
        rows = tables.read(name, ["uid", "zarr_group", "feature_space", "n_cells", "arrays", "facts"])
        return group_by_dataset(datasets_from_table(rows))

    for there in kept_versions(catalog, [DATASETS], read):
        for uid in there.keys() & left:
            bundles = shared_folders([there[uid][0].facts])
            if uid in dataset_folders(there[uid]) or not bundles:
                left.discard(uid)
            else:
                shared[uid] = min(bundles)
        if not left:
            break
    ages: dict[str, datetime | None] = {}
    for uid in sorted(left & shared.keys()):
        folder, place = shared[uid], catalog.arrays.child(uid)
        if folder not in ages:
            ages[folder] = catalog.arrays.child(folder).last_modified()
        age = ages[folder]
        # What was opened before the bundle was there may still be reading.
        if age is None or age > sweep.oldest() or lease_alive(catalog, uid, sweep.grace):
            continue
        # Deleted rows are named by the table of cells; copies of linked files are no part of any bundle.
        other = ("frames/deleted.", "source.")
        keys = [(key, size) for key, size, _ in place.list_objects() if not key.startswith(other)]
        sweep.n_bytes += sum(size for _, size in keys)
        if keys and sweep.call != "dry run":
            # A group must not list arrays that are gone.
            place.delete_objects([key for key, _ in sorted(keys, key=lambda file: not file[0].endswith("zarr.json"))])
            for folder, _, _ in os.walk(place.checked_path(), topdown=False) if place.is_local else ():
                # Not empty where there are deleted rows, or another process is writing.
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()


def remove_unnamed_frames(sweep: Sweep) -> None:
    """Remove lists of deleted rows that no deletion of a kept view names: a process that dies before it records its deletion leaves them."""
    catalog, oldest = sweep.catalog, sweep.oldest()
    folders = [catalog.arrays.child(uid, "frames") for uid in group_by_dataset(read_records(catalog))]
    there = [
        (folder, key, size)
        for folder, listing in zip(folders, map_requests(Location.list_objects, folders), strict=True)
        for key, size, when in listing
        if key.startswith("deleted.") and when <= oldest
    ]
    if not there:
        return
    # Records are read last, so that the files of a deletion that was recorded meanwhile stay.
    views = kept_versions(catalog, [CELLS], lambda tables, _: catalog.with_tables(tables))
    named = {f"{record.frame}.arrow" for view in views for record in view.recorded_deletions()}
    for folder, key, size in there:
        if key not in named:
            folder.delete_objects([key])
            sweep.n_bytes += size


def note_purge(sweep: Sweep) -> None:
    """Log the purge."""
    log = {**purged(sweep.catalog), sweep.purged[0]: utc_now()}
    sweep.catalog.tables.update_metadata(DATASETS, {PURGED_KEY: json.dumps(log, sort_keys=True)})


def delete_purged(sweep: Sweep) -> None:
    """Delete the folders of what is purged, and arrays of what is attached to cells that no record names any more; no other process writes."""
    catalog, arrays = sweep.catalog, sweep.catalog.arrays
    freed = catalog.location.side_by_side([arrays.child(uid).delete_prefix for uid in sweep.purged])
    sweep.n_bytes += sum(freed)
    views = [catalog, *map(catalog.at, list_versions(catalog))]
    named: dict[str, set[str]] = {}
    for groups in map_groups(lambda view: Inventory(view).asset_groups, views):
        for group in groups:
            named.setdefault(group.zarr_group, set()).update(group.array_specs)
    for place, paths in named.items():
        folder = arrays.child(*place.split("/"), "layers")
        for name in folder.list_children():
            if name != "zarr.json" and f"layers/{name}" not in paths:
                sweep.n_bytes += folder.child(name).delete_prefix()


def delete_purged_bundles(sweep: Sweep) -> None:
    """Delete shared bundles with files of what is purged, which no record names any more."""
    found = bundles_with(sweep.catalog, sweep.purged[0])
    free = found - reached_folders(sweep.catalog) if found else set[str]()
    sweep.n_bytes += sum(sweep.catalog.arrays.child(folder).delete_prefix() for folder in free)


# ---- tags, and versions of tables


def repair_snapshot_tags(sweep: Sweep) -> None:
    """Put the tags of snapshots where they belong, before what removes versions without one."""
    sweep.notes += repair_tags(sweep.catalog)


def remove_stray_tags(sweep: Sweep) -> None:
    """Remove tags without a snapshot or purge.

    A purge removes its own, and those of snapshots that are being taken, too. Tags are read before snapshots, so that a
    concurrent snapshot is not affected.
    """
    tables = sweep.catalog.tables
    tags = for_tables(sweep.catalog, tables.tag_names, sweep.table_names())
    purges = sweep.call == "purge"
    # This brings the list of snapshots up to date, too.
    held = sweep.catalog.tables.unfinished_purge() is not None and not purges
    numbers = {record.version for record in list_versions(sweep.catalog)}
    oldest = time.time() - sweep.grace.total_seconds()

    def stray(tag: str) -> bool:
        numbered, pending = NUMBERED.fullmatch(tag), PENDING.fullmatch(tag)
        if numbered is not None:
            return int(numbered["number"]) not in numbers
        if PURGE_TAG.fullmatch(tag) is not None:
            return not held
        return pending is not None and (purges or int(pending["seconds"]) < oldest)

    free: dict[str, list[str]] = {}
    for name, names in tags.items():
        for tag in filter(stray, names):
            free.setdefault(tag, []).append(name)
            if not purges:
                sweep.notes.append(f"tag {tag} of {name} belongs to no snapshot")
    for tag, names in free.items() if sweep.call != "dry run" else ():
        untag_everywhere(sweep.catalog, tag, names)


def remove_old_versions(sweep: Sweep) -> None:
    """Remove versions of tables that have no tag and are older than those of readers of the tip."""
    tables, names = sweep.catalog.tables, sweep.table_names()
    # Lance leaves all versions from the one that is open on.
    tables.refresh(names)

    def remove(name: str) -> int | None:
        try:
            return clean_up(tables, name, sweep.keep)
        except ConflictError:
            return None

    each = sweep.catalog.location.side_by_side([partial(remove, name) for name in names])
    freed = dict(zip(names, each, strict=True))
    sweep.n_bytes += sum(n or 0 for n in freed.values())
    sweep.notes += [f"{name}: others were writing; not cleaned up" for name, n in freed.items() if n is None]


def remove_manifests(sweep: Sweep) -> None:
    """Remove manifests that are of no snapshot."""
    oldest, folder = sweep.oldest(), sweep.catalog.tables.location.child(FOLDER)
    there = [(key, size, when) for key, size, when in folder.list_objects() if key != HEAD]
    sweep.catalog.tables.refresh([VERSIONS] if there else [])
    # Snapshots are read last, so that a concurrently recorded one keeps its manifest.
    named = {record.manifest for record in list_versions(sweep.catalog)} if there else set[str]()
    free = [(key, size) for key, size, when in there if key.split(".")[0] not in named and when <= oldest]
    folder.delete_objects([key for key, _ in free])
    sweep.n_bytes += sum(size for _, size in free)


def remove_markers(sweep: Sweep) -> None:
    """Remove tables of markers that are of no snapshot; a purge changes the root hashes of those with the dataset."""
    folder = sweep.catalog.tables.location.child(MARKERS)
    there = folder.list_children()
    sweep.catalog.tables.refresh([VERSIONS] if there else [])
    # Snapshots are read last, so that what is kept of one that was taken meanwhile stays.
    roots = {record.root_hash for record in list_versions(sweep.catalog)} if there else set[str]()
    for free in (folder.child(name) for name in there if name not in roots):
        sweep.n_bytes += free.size() if sweep.call == "dry run" else free.delete_prefix()


COLLECTORS: Sequence[Sequence[tuple[Callable[[Sweep], None], Sequence[Call]]]] = (
    ((remove_half_tables, ["repair"]),),
    ((drop_refused_columns, ["repair"]),),
    ((remove_deletions, ["repair"]),),
    ((delete_stray_cells, ["repair"]),),
    ((repair_assets, ["repair"]),),
    (
        (free_folders, ["gc", "dry run", "repair"]),
        (note_purge, ["purge"]),
        (delete_purged, ["purge"]),
        (repair_snapshot_tags, ["gc", "repair", "purge", "optimize"]),
        (remove_stray_tags, ["gc", "dry run", "purge"]),
    ),
    # After the tags: versions are kept by these, and a purge takes away those on what it has rewritten.
    (
        (delete_replaced_files, ["gc", "dry run"]),
        (remove_old_versions, ["gc", "purge", "optimize"]),
        (remove_manifests, ["gc", "purge"]),
        (remove_markers, ["gc", "dry run", "purge"]),
        (remove_unnamed_frames, ["gc"]),
        (delete_purged_bundles, ["purge"]),
    ),
)
"""Collectors in the order in which they run, each with the calls that run it; those of a group run side by side in an object store."""
