"""Maintenance: compact and index tables, collect what nothing reaches, repair, rename and purge."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import (
    GEOMETRY_ASSETS,
    GRACE,
    PURGED_KEY,
    RESULT_ASSETS,
    asset_uids,
    clear_orphaned_pointers,
    find_dataset,
    find_deleted_datasets,
    group_by_dataset,
    lease_alive,
    orphaned_columns,
    process_alive,
    purged,
    read_geometries,
    read_records,
    read_specs,
    remove_datasets_from_geometries,
    this_process,
)
from raggedatlas.catalog.catalog import (
    CELLS,
    DATASETS,
    GEOMETRY,
    IDENTITY,
    IDENTITY_TABLES,
    LAYOUTS,
    OPTIONAL,
    PURGE_KEY,
    RESULTS,
    VERSIONS,
    Catalog,
)
from raggedatlas.catalog.deletion import refuse_running_deletion, remove_dead_deletions, remove_unnamed_frames
from raggedatlas.catalog.identity import update_identity
from raggedatlas.catalog.integrity import remove_manifests, seal_versions, write_manifest
from raggedatlas.catalog.layouts import reindex_registry, sync_layouts
from raggedatlas.catalog.versions import (
    NUMBERED,
    PENDING,
    PURGE_TAG,
    PURGING,
    UID,
    assign_indices,
    cells_per_dataset,
    change_versions,
    delete_manifest_log,
    list_versions,
    refuse_running_adds,
    registry_tables,
    repair_tags,
    untag_everywhere,
)
from raggedatlas.errors import AtlasError, ConflictError, DuplicateError, NameRefusedError, NotFoundError
from raggedatlas.model.assets import ResultRecord
from raggedatlas.model.ids import check_length
from raggedatlas.model.records import DATASETS_SCHEMA, AtlasVersionRecord, PurgeMark, utc_now
from raggedatlas.model.reports import MaintenanceReport
from raggedatlas.store.arrays import ArrayWriter
from raggedatlas.store.read import ArrayReader, read_slice
from raggedatlas.store.sql import all_of, equals, in_list, is_not_null, negation
from raggedatlas.store.tables import Tables

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
    # Here compaction comes first: an index that is built afterwards contains no deleted row.
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
    notes = ["dense feature indices assigned"] if assign_indices(catalog) else []
    # Repeated rows come from two appends, and thus at least two fragments.
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
        # Before the clean-up, which removes versions without a tag.
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
    catalog.refuse_unfinished_purge("rename_dataset()")
    if not name.strip():
        raise NameRefusedError("A dataset needs a name that is not empty.")
    check_length(name, "name of a dataset")
    tables = Tables(catalog.tables.location)

    def attempt() -> None:
        version = tables.version(DATASETS)
        # Read at the version that the merge checks: of two renames to one name, the second sees the first.
        pinned = Catalog(catalog.location, Tables(tables.location, {DATASETS: version}), catalog.arrays)
        records = find_dataset(pinned, uid_or_name)
        if any(r.name == name and r.uid != records[0].uid for r in read_records(pinned)):
            raise DuplicateError(f"Another dataset of {catalog.location.uri} is called {name!r}; choose another name.")
        rows = [record.model_copy(update={"name": name}).model_dump() for record in records]
        changed = pa.Table.from_pylist(rows, schema=DATASETS_SCHEMA)
        tables.merge(DATASETS, ["zarr_group"], changed, update=True, retry=False, read_version=version)

    tables.retry(DATASETS, attempt)


_LAYERS = "layers"
_BLOCK_BYTES = 2**24

_TABLES = (CELLS, DATASETS, RESULTS, GEOMETRY)
"""Tables with data of a dataset; an atlas need not have the last two."""


def purge(catalog: Catalog, uid_or_name: str) -> MaintenanceReport:
    """Remove a dataset from the tip and from every snapshot: arrays, cells, record, and all older table versions.

    For data that must not be kept, such as a withdrawn consent. Every snapshot that held the dataset is rewritten
    without it and keeps its number, label and time; the purge is logged in the atlas. Results of models lose the rows of its
    cells; what was computed from them for others stays. What other datasets may share stays:
    features, layouts, and category names in column metadata.

    A purge makes the content of old snapshots the newest version of a table for a while, and deletes all versions that no
    snapshot names. So it first leaves a mark in the atlas that names the versions of the current content. Until the purge is
    finished, readers of the tip read these, every other write is refused, and `validate` reports ``unfinished-purge``. After
    a crash, `repair` or the same call finishes the job.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    uid_or_name : str
        Uid, or name, of a dataset of the tip or of any snapshot.

    Raises
    ------
    NotFoundError
        If neither the tip nor a snapshot has it.
    ConflictError
        If an `add` is under way, another purge is not finished, or another process is running this one.
    """
    catalog.require_writable("purge")
    catalog = catalog.tip()
    mark = catalog.unfinished_purge()
    if mark is None:
        uid, name = _find(catalog, uid_or_name)
        refuse_running_adds(catalog, "purge")
        refuse_running_deletion(catalog, "purge")
        mark = PurgeMark(uid=uid, name=name)
    elif uid_or_name not in (mark.uid, mark.name or _name_of(catalog, mark)):
        catalog.refuse_unfinished_purge(f"purge({uid_or_name!r})")
    return _run(catalog, mark)


def resume_purge(catalog: Catalog) -> list[str]:
    """Finish a purge whose process died; return the datasets purged.

    Raises
    ------
    ConflictError
        If the process that runs the purge has not died.
    """
    catalog = catalog.tip()
    mark = catalog.unfinished_purge()
    if mark is None:
        return []
    _run(catalog, mark)
    return [mark.uid]


def _run(catalog: Catalog, mark: PurgeMark) -> MaintenanceReport:
    """Run a purge to its end, from wherever an earlier call left it."""
    mark = _take_over(catalog, mark)
    n_cells = 0
    if mark.stage == "begun":
        mark = _begin(catalog, mark)
    if mark.stage == "rewriting":
        n_cells = Tables(catalog.tables.location, mark.tables).count(CELLS, equals("dataset_uid", mark.uid))
        mark = _rewrite_all(catalog, mark)
    return _delete(catalog, mark, n_cells)


def _take_over(catalog: Catalog, mark: PurgeMark) -> PurgeMark:
    """Write this process into the mark, in a commit that fails if another process does so at the same time."""
    at = catalog.tables.version(VERSIONS)
    there = Catalog(catalog.location, Tables(catalog.tables.location, {VERSIONS: at}), catalog.arrays)
    # Read at the version that the commit below checks, so of two processes one loses.
    known = PurgeMark.from_json(there.tables.metadata(VERSIONS).get(PURGE_KEY, "null"))
    here = this_process()
    if known is not None:
        own = all(known.owner.get(key) == here[key] for key in ("host", "pid", "process_start", "namespace"))
        if known.uid != mark.uid or (not own and known.owner and process_alive(known.owner, catalog.tables.location)):
            raise _running(catalog, known)
    taken = (known or mark).model_copy(update={"owner": here})
    if not catalog.tables.update_metadata_if(VERSIONS, {PURGE_KEY: taken.model_dump_json()}, at):
        raise _running(catalog, catalog.unfinished_purge() or mark)
    return taken


def _running(catalog: Catalog, mark: PurgeMark) -> ConflictError:
    return ConflictError(
        f"The purge of dataset {mark.shown} in {catalog.location.uri} is being run by process {mark.owner.get('pid')} of "
        f"{mark.owner.get('host')}, since {mark.owner.get('started_at')}; wait until it has finished. A process on another machine counts "
        "as dead once the tables have been untouched for an hour."
    )


def _begin(catalog: Catalog, mark: PurgeMark) -> PurgeMark:
    """Record which table versions are the current content, once no other process writes."""
    try:
        # The mark stops every call from now on. What was under way before is seen here, by its lease or by its commit.
        refuse_running_adds(catalog, "purge")
        refuse_running_deletion(catalog, "purge")
    except AtlasError:
        catalog.tables.update_metadata(VERSIONS, {PURGE_KEY: "null"})
        raise
    # Until two reads agree: a commit that was under way when the mark was written is then included.
    while mark.tables != (newest := _newest(catalog)):
        mark = mark.model_copy(update={"tables": newest})
    mark = mark.model_copy(update={"stage": "rewriting"})
    _write_mark(catalog, mark)
    return mark


def _write_mark(catalog: Catalog, mark: PurgeMark) -> None:
    catalog.tables.update_metadata(VERSIONS, {PURGE_KEY: mark.model_dump_json()})


def _newest(catalog: Catalog) -> dict[str, int]:
    return {name: catalog.tables.version(name) for name in _TABLES if catalog.tables.has(name)}


def _delete(catalog: Catalog, mark: PurgeMark, n_cells: int) -> MaintenanceReport:
    """Delete the arrays and all table versions that no snapshot names, then take the mark away."""
    tables, uid = catalog.tables, mark.uid
    n_bytes = sum(catalog.arrays.child(store).delete_prefix() for store in mark.stores)
    n_bytes += catalog.arrays.child(uid).delete_prefix() + _delete_unnamed_arrays(catalog)
    log = {**purged(catalog), uid: utc_now()}
    tables.update_metadata(DATASETS, {PURGED_KEY: json.dumps(log, sort_keys=True)})
    notes = repair_tags(catalog)
    there = [name for name in (*_TABLES, VERSIONS) if tables.has(name)]
    _untag_others(catalog, there)
    n_bytes += vacuum_tables(catalog, there, timedelta(0), notes) + remove_manifests(catalog, timedelta(0))
    tables.update_metadata(VERSIONS, {PURGE_KEY: "null"})
    seal_versions(catalog)
    return MaintenanceReport(groups=(uid,), n_cells=n_cells, n_bytes=n_bytes, notes=tuple(notes))


def _rewrite_all(catalog: Catalog, mark: PurgeMark) -> PurgeMark:
    """Write every snapshot and then the tip without the dataset; return the mark of what remains to be done."""
    uid, tips = mark.uid, mark.tables
    for name, version in tips.items():
        # Nothing is rewritten before the mark exists, so the tag cannot come too late to keep the version.
        catalog.tables.tag(name, f"{PURGING}{uid}", version)
    rewriter = _Rewriter(catalog, uid, tips)
    for record in list_versions(catalog):
        _purge_snapshot(catalog, record, rewriter)
    for name in (CELLS, RESULTS, GEOMETRY, DATASETS):
        if name in tips:
            rewriter.rewrite(name, tips[name])
    done = mark.model_copy(update={"stage": "deleting", "tables": {}, "stores": sorted(rewriter.stores)})
    # From here on readers of the tip go by the newest versions again; what these do not name can be deleted.
    _write_mark(catalog, done)
    return done


def _untag_others(catalog: Catalog, names: Sequence[str]) -> None:
    """Remove the tags of snapshots that were never recorded, and of this and earlier purges: they hold versions with the dataset."""
    known = {record.tag for record in list_versions(catalog)}
    for name in names:
        for tag in catalog.tables.tags(name):
            if tag not in known and any(kind.fullmatch(tag) for kind in (NUMBERED, PENDING, PURGE_TAG)):
                untag_everywhere(catalog, tag, [name])


def _purge_snapshot(catalog: Catalog, record: AtlasVersionRecord, rewriter: "_Rewriter") -> None:
    """Create table versions without the dataset, name them in the snapshot's row, and move its tags to them."""
    pinned, uid = catalog.at(record), rewriter.uid
    n = pinned.tables.count(CELLS, equals("dataset_uid", uid))
    listed = any(r.uid == uid for r in read_records(pinned))
    in_results = any(uid in result.cells_of for result in RESULT_ASSETS.read(pinned))
    in_geometry = any(geometry.uid in rewriter.stores for geometry in GEOMETRY_ASSETS.read(pinned))
    # A dataset that was dropped before this snapshot may still be in its files, as deleted rows.
    deleted = any(pinned.tables.has_deleted_rows(name) for name in (CELLS, DATASETS))
    if not (n or listed or in_results or in_geometry or deleted):
        return
    old = record.table_versions
    versions = {**old, **{name: rewriter.version(name, old[name]) for name in _TABLES if name in old}}
    changed = record.model_copy(
        update={
            "table_versions": versions,
            "manifest": write_manifest(catalog, versions),
            "n_cells": record.n_cells - (n if listed else 0),
            "n_datasets": record.n_datasets - listed,
            "ignored": [other for other in record.ignored if other != uid],
        }
    )
    # The row before the tags: if the process dies in between, `repair_tags` moves them to what the row names.
    change_versions(catalog, lambda old: [changed if r.version == record.version else r for r in old])
    delete_manifest_log(catalog)
    for name, version in versions.items():
        catalog.tables.tag(name, record.tag, version)


class _Rewriter:
    """Makes versions of the tables without one dataset.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    uid : str
        The dataset.
    tips : mapping of str to int
        Versions of the tables with the current content.
    """

    def __init__(self, catalog: Catalog, uid: str, tips: Mapping[str, int]) -> None:
        self.catalog, self.uid = catalog, uid
        self.stores = _find_stores(catalog, uid, tips)
        self._arrays = _rewrite_arrays(catalog, uid, tips)
        self._versions: dict[tuple[str, int], int] = {}

    def version(self, name: str, old: int) -> int:
        """Return the rewritten version of a table version, which many snapshots may share."""
        if (name, old) not in self._versions:
            self._versions[name, old] = self.rewrite(name, old)
        return self._versions[name, old]

    def rewrite(self, name: str, old: int) -> int:
        """Write the content of a table version, without the dataset, as the newest version; return its number."""
        if name == CELLS:
            return self._rewrite_cells(old)
        tables = self.catalog.tables
        rows = Tables(tables.location, {name: old}).read(name)
        if name == DATASETS:
            rows = rows.filter(pc.not_equal(rows.column("uid"), self.uid)).cast(DATASETS_SCHEMA)
        elif name == RESULTS:
            rows = RESULT_ASSETS.to_table([self._without(record) for record in RESULT_ASSETS.parse(rows)])
        else:
            kept = [record for record in GEOMETRY_ASSETS.parse(rows) if record.uid not in self.stores]
            rows = GEOMETRY_ASSETS.to_table(kept)
        # `overwrite_if` succeeds only directly after `newest`, so the new version is the next number.
        newest = tables.version(name)
        if not tables.overwrite_if(name, rows, newest):
            raise _concurrent_write_error(self.catalog)
        return newest + 1

    def _rewrite_cells(self, old: int) -> int:
        tables, own = self.catalog.tables, equals("dataset_uid", self.uid)
        n_kept = Tables(tables.location, {CELLS: old}).count(CELLS, negation(own))
        if tables.version(CELLS) != old:
            tables.restore(CELLS, old)
        tables.delete(CELLS, own)
        # Deleted rows, also of a dataset that was dropped earlier, stay in the files until these are rewritten.
        if tables.has_deleted_rows(CELLS):
            results = {record.uid: record for _, record in _all_results(self.catalog, {})}
            optimize_table(self.catalog, CELLS, everything=True, results=list(results.values()))
        # Another process may have committed in between; a different number of rows reveals it.
        newest = tables.version(CELLS)
        if Tables(tables.location, {CELLS: newest}).count(CELLS) != n_kept:
            raise _concurrent_write_error(self.catalog)
        return newest

    def _without(self, record: ResultRecord) -> ResultRecord:
        """Return a result's record without the dataset."""
        cells = record.cells_of
        if self.uid not in cells:
            return record
        n = cells.pop(self.uid)
        changed = {"datasets": json.dumps(cells, sort_keys=True), "n_cells": record.n_cells - n}
        return record.model_copy(update=changed | self._arrays.get(record.uid, {}))


def _concurrent_write_error(catalog: Catalog) -> ConflictError:
    return ConflictError(
        f"Another process wrote to {catalog.location.uri} during a purge, which needs exclusive access; run repair() to finish it."
    )


def _find(catalog: Catalog, uid_or_name: str) -> tuple[str, str]:
    """Find uid and name of a dataset at the tip, or else in the snapshots from the newest to the oldest."""
    for view in [catalog, *(catalog.at(record) for record in reversed(list_versions(catalog)))]:
        datasets = group_by_dataset(read_records(view))
        if uid_or_name in datasets:
            return uid_or_name, datasets[uid_or_name][0].name
        named = [uid for uid, records in datasets.items() if records[0].name == uid_or_name]
        if len(named) > 1:
            raise NotFoundError(f"{len(named)} datasets are called {uid_or_name!r}; use one of their uids: {named}.")
        if named:
            return named[0], uid_or_name
    raise NotFoundError(f"Neither the tip nor any snapshot of {catalog.location.uri} has a dataset {uid_or_name!r}.")


def _name_of(catalog: Catalog, mark: PurgeMark) -> str:
    """Look up the name that a mark of the first form lacks; empty where no table that is left has the dataset."""
    try:
        return _find(catalog.current(), mark.uid)[1]
    except NotFoundError:
        return ""


def _rewrite_arrays(catalog: Catalog, uid: str, tips: Mapping[str, int]) -> dict[str, dict[str, str]]:
    """Write a copy of each result array with the rows of the dataset set to zero; the old arrays are deleted later.

    Returns
    -------
    dict
        Result uid -> changed fields of its record.
    """
    records: dict[str, ResultRecord] = {}
    rows: dict[str, set[int]] = {}
    for tables, record in _all_results(catalog, tips):
        if record.zarr_group and uid in record.cells_of:
            records[record.uid] = record
            # If the dataset was dropped before, only older versions of the cell table know its rows.
            where = all_of(equals("dataset_uid", uid), is_not_null(record.column))
            own = tables.read(CELLS, [f"{record.column}.position"], where)
            rows.setdefault(record.uid, set()).update(own.column(0).to_pylist())
    return {
        one: _rewrite_array(catalog, record, np.array(sorted(rows[one]), np.int64), uid)
        for one, record in records.items()
    }


def _rewrite_array(catalog: Catalog, record: ResultRecord, rows: NDArray[np.int64], uid: str) -> dict[str, str]:
    ((_, spec),) = read_specs(record.as_group()).items()
    path = f"{_LAYERS}/without_{uid}"
    reader = ArrayReader(catalog.arrays, spec)
    writer = ArrayWriter(
        catalog.arrays, f"{record.zarr_group}/{path}", np.dtype(spec.dtype), spec.row_shape, profile=catalog.codec()
    )
    purged_rows = np.zeros(spec.n_rows, bool)
    purged_rows[rows] = True
    step = max(1, _BLOCK_BYTES // max(1, int(np.prod(spec.row_shape)) * np.dtype(spec.dtype).itemsize))
    for start in range(0, spec.n_rows, step):
        block = read_slice(reader, start, min(start + step, spec.n_rows))
        block[purged_rows[start : start + step]] = 0
        writer.append(block)
    specs = json.dumps({path: json.loads(writer.close().to_json())}, sort_keys=True)
    return {"arrays": specs, "checksums": json.dumps({path: writer.checksum})}


def _delete_unnamed_arrays(catalog: Catalog) -> int:
    """Delete the arrays of results that no registry names any more; return the bytes freed."""
    named: dict[str, set[str]] = {}
    for _, record in _all_results(catalog, {}):
        if record.zarr_group:
            named.setdefault(record.zarr_group, set()).update(record.array_specs)
    n_bytes = 0
    for group, paths in named.items():
        folder = catalog.arrays.child(*group.split("/"), _LAYERS)
        for name in folder.list_children():
            if name != "zarr.json" and f"{_LAYERS}/{name}" not in paths:
                n_bytes += folder.child(name).delete_prefix()
    return n_bytes


def _all_results(catalog: Catalog, tips: Mapping[str, int]) -> Iterator[tuple[Tables, ResultRecord]]:
    """Iterate over the results of all snapshots and of the tip, with the tables that belong to them."""
    tables = catalog.tables
    tip = {name: tables.version(name) for name in (CELLS, RESULTS) if tables.has(name)}
    for versions in [*(record.table_versions for record in list_versions(catalog)), {**tip, **tips}]:
        pinned = Catalog(catalog.location, Tables(tables.location, dict(versions)), catalog.arrays)
        for record in RESULT_ASSETS.read(pinned):
            yield pinned.tables, record


def _find_stores(catalog: Catalog, uid: str, tips: Mapping[str, int]) -> set[str]:
    """Return the geometry stores that have, or ever had, shapes of a dataset; they are deleted as a unit."""
    tables = [record.table_versions for record in list_versions(catalog)]
    versions = {pinned[GEOMETRY] for pinned in [*tables, tips] if GEOMETRY in pinned}
    rows = [Tables(catalog.tables.location, {GEOMETRY: version}).read(GEOMETRY) for version in versions]
    return {record.uid for table in rows for record in GEOMETRY_ASSETS.parse(table) if uid in record.cells_of}


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
        return MaintenanceReport(
            groups=tuple(free), n_bytes=n_bytes, dry_run=True, kept=tuple(alive), notes=tuple(notes)
        )
    notes += repair_tags(catalog)
    for table, names in tags.items():
        for tag in names:
            untag_everywhere(catalog, tag, [table])
    n_bytes = sum(catalog.arrays.child(uid).delete_prefix() for uid in free)
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
    notes += _remove_half_tables(catalog, grace) + remove_dead_deletions(catalog)
    dead, alive = _cells_without_record(catalog, grace)
    n_cells = catalog.tables.delete(CELLS, in_list("dataset_uid", dead)) if dead else 0
    stray = orphaned_columns(catalog, grace)
    if stray:
        catalog.tables.drop_columns(CELLS, stray)
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
    for record in read_records(catalog):
        if not catalog.arrays.child(*record.zarr_group.split("/")).exists():
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
    groups = [name for name in catalog.arrays.list_children() if UID.fullmatch(name) and name not in before]
    alive = [uid for uid in groups if lease_alive(catalog, uid, grace)]
    reached = _referenced(catalog) if groups else set()
    return [uid for uid in groups if uid not in reached and uid not in alive], [
        uid for uid in alive if uid not in reached
    ]


def _referenced(catalog: Catalog) -> set[str]:
    tables = Tables(catalog.tables.location)
    reached = asset_uids(catalog)
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
