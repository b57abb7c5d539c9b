"""Purge: take a dataset out of every snapshot too, down to the bytes."""

import json
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from functools import partial

import pyarrow.compute as pc

from raggedatlas.catalog.catalog import CELLS, DATASETS, GEOMETRY, PURGE_KEY, RESULTS, VERSIONS, Catalog
from raggedatlas.catalog.datasets import PURGED_KEY, group_by_dataset, purged, read_records
from raggedatlas.catalog.geometries import read_all_geometries
from raggedatlas.catalog.geometry_purge import find_stores_with_dataset, rewrite_geometries
from raggedatlas.catalog.leases import process_alive, this_process
from raggedatlas.catalog.manifests import remove_manifests, seal_versions, write_manifest
from raggedatlas.catalog.optimize import optimize_table, vacuum_tables
from raggedatlas.catalog.result_purge import every_result, purge_arrays, remove_old_arrays, rewrite_results
from raggedatlas.catalog.results import read_results
from raggedatlas.catalog.versions import (
    NUMBERED,
    PENDING,
    PURGE_TAG,
    PURGING,
    change_versions,
    delete_manifest_log,
    list_versions,
    refuse_running_adds,
    repair_tags,
    untag_everywhere,
)
from raggedatlas.errors import AtlasError, ConflictError, NotFoundError
from raggedatlas.model.records import DATASETS_SCHEMA, AtlasVersionRecord, PurgeMark, utc_now
from raggedatlas.model.reports import MaintenanceReport
from raggedatlas.store.sql import equals, negation
from raggedatlas.store.tables import Tables

_TABLES = (CELLS, DATASETS, RESULTS, GEOMETRY)
"""Tables that hold something of a dataset; the last two are not in every atlas."""

Rewriters = Mapping[str, Callable[[int], int]]
"""Table -> what makes the newest version of it like an old one, without the dataset."""


def purge(catalog: Catalog, uid_or_name: str) -> MaintenanceReport:
    """Remove a dataset from the tip and from every snapshot: arrays, cells, record, and all older table versions.

    For data that must not be kept, such as a withdrawn consent. Every snapshot that held the dataset is written anew
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
    """Note which versions of the tables are the current content, once nobody writes any more."""
    try:
        # The mark stops every call from now on. What was under way before is seen here, by its lease or by its commit.
        refuse_running_adds(catalog, "purge")
    except AtlasError:
        catalog.tables.update_metadata(VERSIONS, {PURGE_KEY: "null"})
        raise
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
    n_bytes += catalog.arrays.child(uid).delete_prefix() + remove_old_arrays(catalog)
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
        # Nothing has been rewritten before the mark was there, so the tag cannot come too late to keep the version.
        catalog.tables.tag(name, f"{PURGING}{uid}", version)
    stores = find_stores_with_dataset(catalog, uid, tips)
    rewrite: Rewriters = {
        CELLS: partial(_rewrite_cells, catalog, uid),
        RESULTS: partial(rewrite_results, catalog, purge_arrays(catalog, uid, tips)),
        GEOMETRY: partial(rewrite_geometries, catalog, stores),
        DATASETS: partial(_rewrite_records, catalog, uid),
    }
    fresh: dict[tuple[str, int], int] = {}
    for record in list_versions(catalog):
        _purge_snapshot(catalog, uid, record, (rewrite, stores, fresh))
    for name, make in rewrite.items():
        if name in tips:
            make(tips[name])
    done = mark.model_copy(update={"stage": "deleting", "tables": {}, "stores": sorted(stores)})
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


def _purge_snapshot(
    catalog: Catalog,
    uid: str,
    record: AtlasVersionRecord,
    means: tuple[Rewriters, AbstractSet[str], dict[tuple[str, int], int]],
) -> None:
    """Make table versions without the dataset, name them in the snapshot's row, and move its tags there."""
    then, (rewrite, stores, fresh) = catalog.at(record), means
    n = then.tables.count(CELLS, equals("dataset_uid", uid))
    had = any(r.uid == uid for r in read_records(then))
    held = any(uid in result.cells_of for result in read_results(then))
    shapes = any(geometry.uid in stores for geometry in read_all_geometries(then))
    if not (n or had or held or shapes or any(then.tables.has_deleted_rows(name) for name in (CELLS, DATASETS))):
        return
    versions = {}
    for name in _TABLES:
        if name not in record.table_versions:
            continue
        old = record.table_versions[name]
        if (name, old) not in fresh:
            fresh[name, old] = rewrite[name](old)
        versions[name] = fresh[name, old]
    versions = {**record.table_versions, **versions}
    changed = record.model_copy(
        update={
            "table_versions": versions,
            "manifest": write_manifest(catalog, versions),
            "n_cells": record.n_cells - (n if had else 0),
            "n_datasets": record.n_datasets - had,
            "ignored": [other for other in record.ignored if other != uid],
        }
    )
    change_versions(catalog, lambda old: [changed if r.version == record.version else r for r in old])
    delete_manifest_log(catalog)
    for name, version in versions.items():
        catalog.tables.tag(name, record.tag, version)


def _rewrite_cells(catalog: Catalog, uid: str, version: int) -> int:
    """Make a cell table like that of a version, without the dataset's cells, the newest; return its version."""
    own = equals("dataset_uid", uid)
    kept = Tables(catalog.tables.location, {CELLS: version}).count(CELLS, negation(own))
    if catalog.tables.version(CELLS) != version:
        catalog.tables.restore(CELLS, version)
    catalog.tables.delete(CELLS, own)
    # Rows of a dataset that was dropped before are in the files until these are written anew.
    if catalog.tables.has_deleted_rows(CELLS):
        optimize_table(catalog, CELLS, everything=True, results=every_result(catalog))
    made = catalog.tables.version(CELLS)
    if Tables(catalog.tables.location, {CELLS: made}).count(CELLS) != kept:
        raise _concurrent_write_error(catalog)
    return made


def _rewrite_records(catalog: Catalog, uid: str, version: int) -> int:
    """Make an inventory like that of a version, without the dataset, the newest; return its version."""
    rows = Tables(catalog.tables.location, {DATASETS: version}).read(DATASETS)
    rows = rows.filter(pc.not_equal(rows.column("uid"), uid)).cast(DATASETS_SCHEMA)
    at = catalog.tables.version(DATASETS)
    if not catalog.tables.overwrite_if(DATASETS, rows, at):
        raise _concurrent_write_error(catalog)
    return at + 1


def _concurrent_write_error(catalog: Catalog) -> ConflictError:
    return ConflictError(
        f"Somebody wrote to {catalog.location.uri} during a purge, which needs it alone; run repair() to finish it."
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
