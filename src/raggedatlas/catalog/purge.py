"""Purge a dataset: remove it from the tip and from every snapshot, with all its bytes."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pyarrow.compute as pc

from raggedatlas.catalog.assets import (
    asset_kinds,
    find_dataset,
    is_this_process,
    process_alive,
    purged,
    read_records,
    refuse_held,
    refuse_unknown_assets,
    source_facts,
    this_process,
)
from raggedatlas.catalog.bundles import follow_moves, leave_out
from raggedatlas.catalog.catalog import CELLS, DATASETS, VERSIONS, Catalog
from raggedatlas.catalog.collectors import Sweep
from raggedatlas.catalog.deletion import refuse_running_deletion
from raggedatlas.catalog.integrity import last_manifest, seal_versions, write_manifest
from raggedatlas.catalog.inventory import Inventory
from raggedatlas.catalog.optimization import WORTH_INDEXING, index_table
from raggedatlas.catalog.versions import (
    PURGING,
    change_versions,
    delete_manifest_log,
    list_versions,
    refuse_running_adds,
)
from raggedatlas.errors import AtlasError, ConflictError, NotFoundError
from raggedatlas.model.records import DATASETS_SCHEMA, AtlasVersionRecord, PurgeMark, entries_to_table
from raggedatlas.model.reports import MaintenanceReport
from raggedatlas.model.wings import asset_tables
from raggedatlas.store.manifests import FileEntry
from raggedatlas.store.runtime import map_groups
from raggedatlas.store.sql import equals
from raggedatlas.store.tables import PURGE_KEY
from raggedatlas.store.upkeep import RowRemoval

_ATTEMPTS = 20


def purge(catalog: Catalog, uid_or_name: str) -> MaintenanceReport:
    """Remove a dataset from the tip and from every snapshot: arrays, cells, record, and all older table versions.

    For data that must not be kept, such as a withdrawn consent. It may be a dataset of the tip or of any snapshot. A
    file that it is linked to is not the atlas's and stays; the report names it. Every snapshot that held the dataset is
    rewritten without it and keeps its number, label and time; the purge is logged in the atlas. Results of models lose
    the rows of its cells; what was computed from them for others stays. What other datasets may share stays: features,
    layouts, and category names in column metadata.

    A purge makes the content of old snapshots the newest version of a table for a while, and deletes all versions that
    no snapshot names. So it first leaves a mark in the atlas that names the versions of the current content. Until the
    purge is finished, readers of the tip read these, every other write is refused, and `validate` reports
    ``unfinished-purge``. After a crash, `repair` or the same call finishes the job. It raises `ConflictError` if an
    `add` is under way, another call writes arrays of the dataset, another purge is not finished, or another process is
    running this one.
    """
    catalog = catalog.session("purge()", anew=True, purges=True)
    refuse_unknown_assets(catalog, "purge()")
    # `_take_over` looks again.
    mark, steps = catalog.tables.known_purge(), list[Callable[[], Any]]()
    if mark is None:
        uid, name = _find(catalog, uid_or_name)
        mark = PurgeMark(uid=uid, name=name)
        steps = [
            partial(refuse_running_adds, catalog, "purge()"), partial(refuse_running_deletion, catalog, "purge()"),
            partial(refuse_held, catalog, uid, name or uid, "purge()"),
        ]  # fmt: skip
    elif uid_or_name not in (mark.uid, mark.name):
        raise mark.refusal(f"purge({uid_or_name!r})", catalog.location.uri)
    steps.append(partial(_sources, catalog, mark.uid))
    *_, sources = catalog.location.side_by_side(steps)
    report = _run(catalog, mark)
    notes = [f"its values stay in {address}, which the atlas does not own" for address in sources]
    return replace(report, notes=(*report.notes, *notes))


def _sources(catalog: Catalog, uid: str) -> list[str]:
    """Return the addresses of files that a dataset is or was linked to."""

    def addresses(view: Catalog) -> list[str]:
        # A damaged record keeps no dataset from being purged.
        with suppress(AtlasError):
            facts = (source_facts(record) for record in read_records(view) if record.uid == uid)
            return [one.address for one in facts if one is not None]
        return []

    views = [catalog, *map(catalog.at, list_versions(catalog))]
    return [*dict.fromkeys(one for found in map_groups(addresses, views) for one in found)]


def resume_purge(catalog: Catalog) -> list[str]:
    """Finish a purge whose process died; return the datasets purged. Raises `ConflictError` if the process has not died."""
    mark = catalog.tables.known_purge()
    if mark is None:
        return []
    _run(catalog, mark)
    return [mark.uid]


def _run(catalog: Catalog, mark: PurgeMark) -> MaintenanceReport:
    """Run a purge to its end, from wherever an earlier call left it."""
    mark = _take_over(catalog, mark)
    catalog = replace(catalog, tables=replace(catalog.tables, purges=True))

    def once() -> MaintenanceReport:
        # As an attempt before this one left it.
        now, n_cells = catalog.tables.known_purge() or mark, 0
        if now.stage == "rewriting":
            now, n_cells = _rewrite_all(catalog, now)
        # The arrays go, and all table versions that no snapshot names; then the mark.
        there = [*catalog.tables.versions((*_purged_tables(), VERSIONS))]
        report = Sweep(
            catalog,
            "purge",
            timedelta(0),
            timedelta(0),
            there,
            (now.uid, *now.stores),
            groups=[now.uid],
            n_cells=n_cells,
        ).run()
        catalog.tables.update_metadata(VERSIONS, {PURGE_KEY: "null"})
        seal_versions(catalog)
        return report

    try:
        if mark.stage == "begun":
            mark = _begin(catalog, mark)
        # A snapshot that was under way when the mark was written may still compact tables.
        return catalog.tables.retry(CELLS, once)
    except BaseException:
        # Also when it is interrupted: this process does not go on, so that any other may finish it with `repair`.
        with suppress(AtlasError):
            left = catalog.tables.unfinished_purge()
            if left is not None:
                _write_mark(catalog, left.model_copy(update={"owner": {}}))
        raise


def _take_over(catalog: Catalog, mark: PurgeMark) -> PurgeMark:
    """Write this process into the mark, in a commit that fails if another process does so at the same time."""
    here = this_process()
    for _ in range(_ATTEMPTS):
        at = catalog.tables.version(VERSIONS)
        # Read at the version that the commit below checks, so of two processes one loses.
        known = PurgeMark.from_json(catalog.tables.at({VERSIONS: at}).metadata(VERSIONS).get(PURGE_KEY, "null"))
        if known is not None:
            own = is_this_process(known.owner) and known.owner.get("thread") == here["thread"]
            if not own and known.owner and process_alive(known.owner, catalog.tables.location):
                raise ConflictError(
                    f"The purge of dataset {known.shown} in {catalog.location.uri} is being run by process {known.owner.get('pid')} of "
                    f"{known.owner.get('host')}, since {known.owner.get('started_at')}; wait until it has finished. A process on another machine counts "
                    "as dead once the tables have been untouched for an hour."
                )
            if known.uid != mark.uid:
                catalog.refuse_unfinished_purge(f"purge({mark.uid!r})")
        taken = (known or mark).model_copy(update={"owner": here})
        # Another purge, which the next look finds, or a snapshot may commit first.
        if catalog.tables.update_metadata_if(VERSIONS, {PURGE_KEY: taken.model_dump_json()}, at):
            return taken
    raise _concurrent_write_error(catalog)


def _begin(catalog: Catalog, mark: PurgeMark) -> PurgeMark:
    """Record which table versions are the current content, once no other process writes."""
    try:
        # The mark stops every call from now on. What was under way before is seen here, by its lease or by its commit. What writes arrays of
        # the dataset itself, as add_csc() does, would go on after these are deleted.
        steps: list[Callable[[], Any]] = [
            catalog.tables.refresh, partial(refuse_running_adds, catalog, "purge()"),
            partial(refuse_held, catalog, mark.uid, mark.name or mark.uid, "purge()"),
        ]  # fmt: skip
        catalog.location.side_by_side(steps)
        refuse_running_deletion(catalog, "purge()")
        if mark.uid in purged(catalog):
            raise NotFoundError(f"Another process has purged the dataset {mark.shown} of {catalog.location.uri}.")
    except AtlasError:
        catalog.tables.update_metadata(VERSIONS, {PURGE_KEY: "null"})
        raise
    # A commit that was under way when the mark was written is now there, or conflicts with these and is refused (`open_to_change`).
    catalog.location.side_by_side([partial(catalog.tables.fence, name) for name in _newest(catalog)])
    mark = mark.model_copy(update={"stage": "rewriting", "tables": _newest(catalog)})
    _write_mark(catalog, mark)
    return mark


def _write_mark(catalog: Catalog, mark: PurgeMark) -> None:
    catalog.tables.update_metadata(VERSIONS, {PURGE_KEY: mark.model_dump_json()})


def _newest(catalog: Catalog) -> dict[str, int]:
    return catalog.tables.versions(_purged_tables())


def _purged_tables() -> tuple[str, ...]:
    """Return the tables with data of a dataset."""
    return CELLS, DATASETS, *asset_tables()


def _rewrite_all(catalog: Catalog, mark: PurgeMark) -> tuple[PurgeMark, int]:
    """Write every snapshot and then the tip without the dataset; return the mark of what remains to be done, and how many cells the tip had of it."""
    uid, tips = mark.uid, mark.tables
    # Nothing is rewritten before the mark exists, so the tags cannot come too late to keep the versions.
    steps: list[Callable[[], Any]] = [
        partial(_Rewriter, catalog, uid, tips),
        partial(catalog.tables.at(tips).count, CELLS, equals("dataset_uid", uid)),
        *(partial(catalog.tables.tag, name, f"{PURGING}{uid}", version) for name, version in tips.items()),
    ]
    rewriter, n_cells, *_ = catalog.location.side_by_side(steps)
    records = list_versions(catalog)
    # What they wait for is the disk or an object store, or Lance, which needs no lock of Python.
    map_groups(lambda name: rewriter.rewrite(name, [record.table_versions.get(name, 0) for record in records]), [*tips])
    hashed: dict[str, FileEntry] = {}
    found = [_without_dataset(catalog, record, rewriter, hashed) for record in records]
    changed = {record.version: record for record in found if record is not None}
    moved = [
        (name, record.tag, version)
        for record in records
        for name, version in changed.get(record.version, record).table_versions.items()
        if version != record.table_versions[name]
    ]
    if changed:
        # All rows in one commit, and before the tags: if the process dies in between, `repair_tags` moves them to what the rows name.
        steps = [
            partial(change_versions, catalog, lambda old: [changed.get(record.version, record) for record in old]),
            partial(delete_manifest_log, catalog),
            *(partial(catalog.tables.make_tag, name, version) for name, _, version in moved),
        ]
        _, _, *made = catalog.location.side_by_side(steps)
        catalog.location.side_by_side(
            [partial(catalog.tables.tag, *one, tag) for one, tag in zip(moved, made, strict=True)]
        )
    done = mark.model_copy(update={"stage": "deleting", "tables": {}, "stores": sorted(rewriter.assets)})
    # From here on readers of the tip go by the newest versions again; what these do not name can be deleted.
    _write_mark(catalog, done)
    return done, n_cells


def _without_dataset(
    catalog: Catalog, record: AtlasVersionRecord, rewriter: "_Rewriter", hashed: dict[str, FileEntry]
) -> AtlasVersionRecord | None:
    """Return a snapshot with table versions without the dataset; None if it has nothing of the dataset."""
    old = record.table_versions
    names = [name for name in _purged_tables() if name in old]
    versions = {**old, **{name: rewriter.made[name, old[name]] for name in names}}
    if versions == old:
        return None
    # A dataset that was dropped before this snapshot may still be in its files, as deleted rows.
    n_cells, n_records = (rewriter.removed.get((name, old[name]), 0) for name in (CELLS, DATASETS))
    listed = n_records > 0
    return record.model_copy(
        update={
            "table_versions": versions,
            "manifest": write_manifest(catalog, versions, *last_manifest(catalog, [record]), hashed),
            "n_cells": record.n_cells - (n_cells if listed else 0),
            "n_datasets": record.n_datasets - listed,
            "ignored": [other for other in record.ignored if other != rewriter.uid],
        }
    ).sealed()


class _Rewriter:
    """Makes versions of the tables without one dataset.

    `made` is what is left of each table and older version, and `removed` how many rows of it went, where some did.
    """

    def __init__(self, catalog: Catalog, uid: str, tips: Mapping[str, int]) -> None:
        self.catalog, self.uid, self.tips = catalog, uid, tips
        # All snapshots, and the tip with what is current of the tables.
        there = catalog.tables.at({**catalog.tables.versions((CELLS, *asset_tables())), **tips})
        views = [*map(catalog.at, list_versions(catalog)), catalog.with_tables(there)]
        assets = [Inventory(view).assets for view in views]
        self._seen = {kind: [one for found in assets for one in found[kind]] for kind in asset_kinds()}
        self._changes = {kind.table: (kind, kind.without_dataset(catalog, uid, views)) for kind in self._seen}
        # Assets from which data of the dataset cannot be removed are deleted, also those that had some in an older snapshot.
        self.assets = {
            one.uid for kind, change in self._changes.values() for one in self._seen[kind] if change(one) is None
        }
        versions = [record.table_versions.get(DATASETS, 0) for record in list_versions(catalog)]
        self.moves = leave_out(catalog, uid, [tips[DATASETS], *filter(None, versions)])
        self.made: dict[tuple[str, int], int] = {}
        self.removed: dict[tuple[str, int], int] = {}

    def rewrite(self, name: str, versions: Iterable[int]) -> None:
        """Write the content of versions of a table, without the dataset, each once, and at last that of the tip."""
        tip, tables = self.tips[name], self.catalog.tables
        older = sorted({*versions} - {0, tip})
        # Records that name a shared bundle which is written again are all written anew.
        if name == CELLS or (name == DATASETS and not self.moves):
            column = "dataset_uid" if name == CELLS else "uid"
            removal = RowRemoval(tables, name, equals(column, self.uid), [*older, tip])
            for version in (*older, tip):
                found = removal.find(version)
                self.made[name, version] = version
                if found.rewritten or (version == tip and tables.version(name) != version):
                    made = removal.write(version)
                    if name == CELLS:
                        for kind, records in self._seen.items():
                            kind.build_indexes(self.catalog, {one.uid: one for one in records}.values())
                        index_table(self.catalog, CELLS, WORTH_INDEXING)
                        made = tables.version(CELLS)
                    self.made[name, version], self.removed[name, version] = made, found.n_rows
            removal.read_back()
        else:
            for version in (*older, tip):
                self._overwrite(name, version)

    def _overwrite(self, name: str, old: int) -> None:
        """Write the content of a version of a table of assets or datasets, without the dataset, unless that changes nothing."""
        tables = self.catalog.tables
        pinned = tables.at({name: old})
        rows = pinned.read(name)
        if name == DATASETS:
            left = rows.filter(pc.not_equal(rows.column("uid"), self.uid)).cast(DATASETS_SCHEMA)
            left = follow_moves(self.moves, left)
        else:
            kind, change = self._changes[name]
            found = [change(record) for record in kind.parse(rows) if record.uid not in self.assets]
            left = entries_to_table([record for record in found if record is not None], kind.schema)
        newest = tables.version(name)
        is_newest = old == newest or old != self.tips[name]
        if is_newest and left.equals(rows.cast(left.schema)) and not pinned.has_deleted_rows(name):
            self.made[name, old] = old
            return
        # `overwrite_if` succeeds only directly after `newest`, so the new version is the next number.
        if not tables.overwrite_if(name, left, newest):
            raise _concurrent_write_error(self.catalog)
        self.made[name, old], self.removed[name, old] = newest + 1, rows.num_rows - left.num_rows


def _concurrent_write_error(catalog: Catalog) -> ConflictError:
    return ConflictError(
        f"Another process wrote to {catalog.location.uri} during a purge, which needs exclusive access; run repair() to finish it."
    )


def _find(catalog: Catalog, uid_or_name: str) -> tuple[str, str]:
    """Find uid and name of a dataset at the tip, or else in the snapshots from the newest to the oldest."""
    for view in [catalog, *(catalog.at(record) for record in reversed(list_versions(catalog)))]:
        records = read_records(view)
        if any(uid_or_name in (record.uid, record.name) for record in records):
            first = find_dataset(catalog, uid_or_name, records)[0]
            return first.uid, first.name
    raise NotFoundError(f"Neither the tip nor any snapshot of {catalog.location.uri} has a dataset {uid_or_name!r}.")
