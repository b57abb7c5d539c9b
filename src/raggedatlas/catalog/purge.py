"""Purge: take a dataset out of every snapshot too, down to the bytes."""

import json
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from datetime import timedelta
from functools import partial

import pyarrow.compute as pc

from raggedatlas.catalog.catalog import CELLS, DATASETS, GEOMETRY, RESULTS, VERSIONS, Catalog
from raggedatlas.catalog.datasets import PURGED_KEY, group_by_dataset, purged, read_records
from raggedatlas.catalog.geometries import every_geometry
from raggedatlas.catalog.geometry_purge import rewrite_geometries, stores_of
from raggedatlas.catalog.result_purge import clean_arrays, every_result, remove_old_arrays, rewrite_results
from raggedatlas.catalog.results import read_results
from raggedatlas.catalog.tidy import clean_up, tidy_table
from raggedatlas.catalog.versions import (
    change_versions,
    heal_tags,
    list_versions,
    one_of,
    refuse_running,
    untag_everywhere,
)
from raggedatlas.errors import ConflictError, CorruptError, NotFoundError
from raggedatlas.model.records import DATASETS_SCHEMA, AtlasVersionRecord, utc_now
from raggedatlas.model.reports import UpkeepReport
from raggedatlas.store.tables import Tables

_MARK = "raggedatlas.purging"

_TABLES = (CELLS, DATASETS, RESULTS, GEOMETRY)
"""Tables that hold something of a dataset; the last two are not in every atlas."""

Rewriters = Mapping[str, Callable[[int], int]]
"""Table -> what makes the newest version of it like an old one, without the dataset."""


def purge(catalog: Catalog, uid_or_name: str) -> UpkeepReport:
    """Remove a dataset from the tip and from every snapshot: arrays, cells, record, and all older table versions.

    For data that must not be kept, such as a withdrawn consent. Every snapshot that held the dataset is written anew
    without it and keeps its number, label and time; the purge is logged in the atlas. Results of models lose the rows of its
    cells; what was computed from them for others stays. What other datasets may share stays:
    features, layouts, and category names in column metadata.

    **Exclusive**: nothing else may use the atlas while this runs, because old table versions become the newest for a while
    and all versions that no snapshot names are deleted. After a crash `repair` (or the same call) finishes the job, and until then
    `validate` reports ``unfinished-purge`` and no snapshot is taken.

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
        If an `add` is under way, or another purge was not finished.
    """
    catalog.require_tip("purge")
    unfinished = unfinished_purge(catalog)
    uid = uid_or_name if unfinished is not None and unfinished["uid"] == uid_or_name else _find(catalog, uid_or_name)
    if unfinished is not None and unfinished["uid"] != uid:
        raise ConflictError(
            f"The purge of {unfinished['uid']} in {catalog.location.uri} was not finished; run repair() first."
        )
    if unfinished is None:
        refuse_running(catalog, "purge")
    return _purge(catalog, uid)


def resume_purge(catalog: Catalog) -> list[str]:
    """Finish a purge whose process died; return the datasets purged."""
    unfinished = unfinished_purge(catalog)
    if unfinished is None:
        return []
    _purge(catalog, str(unfinished["uid"]))
    return [str(unfinished["uid"])]


def unfinished_purge(catalog: Catalog) -> dict[str, str | int] | None:
    """Give the mark of a purge under way: dataset uid, and the versions of the tables that are the true tip."""
    mark: dict[str, str | int] | None = json.loads(catalog.tip().tables.metadata(VERSIONS).get(_MARK) or "null")
    return mark


def refuse_unfinished(catalog: Catalog) -> None:
    """Refuse to go on while a purge is half done.

    Raises
    ------
    CorruptError
        Naming the dataset and the way out.
    """
    unfinished = unfinished_purge(catalog)
    if unfinished is not None:
        raise CorruptError(
            f"The purge of dataset {unfinished['uid']} in {catalog.location.uri} was not finished; run repair() first [unfinished-purge]."
        )


def _purge(catalog: Catalog, uid: str) -> UpkeepReport:
    tables = catalog.tables
    mark = unfinished_purge(catalog) or _begin(catalog, uid)
    n_cells = n_stores = 0
    if CELLS in mark:
        tips = {name: int(mark[name]) for name in _TABLES if name in mark}
        stores = stores_of(catalog, uid, tips)
        rewrite: Rewriters = {
            CELLS: partial(_rewrite_cells, catalog, uid),
            RESULTS: partial(rewrite_results, catalog, clean_arrays(catalog, uid, tips)),
            GEOMETRY: partial(rewrite_geometries, catalog, stores),
            DATASETS: partial(_rewrite_records, catalog, uid),
        }
        n_cells = Tables(tables.location, tips).count(CELLS, one_of("dataset_uid", [uid]))
        fresh: dict[tuple[str, int], int] = {}
        for record in list_versions(catalog):
            _purge_snapshot(catalog, uid, record, (rewrite, stores, fresh))
        for name, make in rewrite.items():
            if name in tips:
                make(tips[name])
        n_stores = sum(catalog.arrays.child(store).delete_prefix() for store in stores)
        tables.update_metadata(VERSIONS, {_MARK: json.dumps({"uid": uid})})
    untag_everywhere(catalog, _tag(uid), list(_TABLES))
    n_bytes = n_stores + catalog.arrays.child(uid).delete_prefix() + remove_old_arrays(catalog)
    log = {**purged(catalog), uid: utc_now()}
    tables.update_metadata(DATASETS, {PURGED_KEY: json.dumps(log, sort_keys=True)})
    notes = heal_tags(catalog)
    there = [name for name in (*_TABLES, VERSIONS) if catalog.tables.has(name)]
    n_bytes += clean_up(catalog, there, timedelta(0), notes)
    tables.update_metadata(VERSIONS, {_MARK: "null"})
    return UpkeepReport(groups=(uid,), n_cells=n_cells, n_bytes=n_bytes, notes=tuple(notes))


def _begin(catalog: Catalog, uid: str) -> Mapping[str, str | int]:
    """Hold the tip of the tables, and write down in one commit that a purge has begun."""
    tips = {name: catalog.tables.version(name) for name in _TABLES if catalog.tables.has(name)}
    for name, version in tips.items():
        catalog.tables.tag(name, _tag(uid), version)
    mark: dict[str, str | int] = {"uid": uid, **tips}
    catalog.tables.update_metadata(VERSIONS, {_MARK: json.dumps(mark)})
    return mark


def _purge_snapshot(
    catalog: Catalog,
    uid: str,
    record: AtlasVersionRecord,
    means: tuple[Rewriters, AbstractSet[str], dict[tuple[str, int], int]],
) -> None:
    """Make table versions without the dataset, name them in the snapshot's row, and move its tags there."""
    then, (rewrite, stores, fresh) = catalog.at(record), means
    n = then.tables.count(CELLS, one_of("dataset_uid", [uid]))
    had = any(r.uid == uid for r in read_records(then))
    held = any(uid in result.cells_of for result in read_results(then))
    if not (n or had or held or any(geometry.uid in stores for geometry in every_geometry(then))):
        return
    versions = {}
    for name in _TABLES:
        if name not in record.table_versions:
            continue
        old = record.table_versions[name]
        if (name, old) not in fresh:
            fresh[name, old] = rewrite[name](old)
        versions[name] = fresh[name, old]
    changed = record.model_copy(
        update={
            "table_versions": {**record.table_versions, **versions},
            "n_cells": record.n_cells - (n if had else 0),
            "n_datasets": record.n_datasets - had,
            "ignored": [other for other in record.ignored if other != uid],
        }
    )
    change_versions(catalog, lambda old: [changed if r.version == record.version else r for r in old])
    for name, version in versions.items():
        catalog.tables.tag(name, record.tag, version)


def _rewrite_cells(catalog: Catalog, uid: str, version: int) -> int:
    """Make a cell table like that of a version, without the dataset's cells, the newest; return its version."""
    if catalog.tables.version(CELLS) != version:
        catalog.tables.restore(CELLS, version)
    if catalog.tables.delete(CELLS, one_of("dataset_uid", [uid])):
        tidy_table(catalog, CELLS, everything=True, results=every_result(catalog))
    return catalog.tables.version(CELLS)


def _rewrite_records(catalog: Catalog, uid: str, version: int) -> int:
    """Make an inventory like that of a version, without the dataset, the newest; return its version."""
    rows = Tables(catalog.tables.location, {DATASETS: version}).read(DATASETS)
    rows = rows.filter(pc.not_equal(rows.column("uid"), uid)).cast(DATASETS_SCHEMA)
    at = catalog.tables.version(DATASETS)
    if not catalog.tables.overwrite_if(DATASETS, rows, at):
        raise ConflictError(
            f"Somebody wrote to {catalog.location.uri} during a purge, which needs it alone; run repair() to finish it."
        )
    return catalog.tables.version(DATASETS)


def _find(catalog: Catalog, uid_or_name: str) -> str:
    """Find a dataset at the tip, or else in the snapshots from the newest to the oldest."""
    for view in [catalog, *(catalog.at(record) for record in reversed(list_versions(catalog)))]:
        datasets = group_by_dataset(read_records(view))
        if uid_or_name in datasets:
            return uid_or_name
        named = [uid for uid, records in datasets.items() if records[0].name == uid_or_name]
        if len(named) > 1:
            raise NotFoundError(f"{len(named)} datasets are called {uid_or_name!r}; use one of their uids: {named}.")
        if named:
            return named[0]
    raise NotFoundError(f"Neither the tip nor any snapshot of {catalog.location.uri} has a dataset {uid_or_name!r}.")


def _tag(uid: str) -> str:
    return f"purging-{uid}"
