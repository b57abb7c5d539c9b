"""The list of snapshots: read and change it, and keep tags on the table versions that it names."""

import contextlib
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from raggedatlas.catalog.assets import alive_among
from raggedatlas.catalog.catalog import CELLS, DATASETS, IDENTITY_TABLES, LAYOUTS, VERSIONS, Catalog
from raggedatlas.catalog.inventory import Inventory
from raggedatlas.errors import ConflictError, CorruptError, NameRefusedError, NotFoundError, StoreError
from raggedatlas.model.ids import check_given_name
from raggedatlas.model.records import AtlasVersionRecord, versions_from_table, versions_to_table
from raggedatlas.model.wings import asset_tables
from raggedatlas.store.bundle import SHARED
from raggedatlas.store.manifests import FOLDER
from raggedatlas.store.runtime import map_fetches, map_groups
from raggedatlas.store.tables import LISTING, Tables

UID = re.compile(r"[0-9a-f]{16}")
"""Names of the dataset groups in the Zarr store."""

PENDING = re.compile(r"pending-(?P<seconds>\d+)-[0-9a-f]+")
"""Tags of a snapshot that is being taken: when it began, in seconds, and a random part."""

NUMBERED = re.compile(r"atlas-v(?P<number>\d+)")
"""Tags of recorded snapshots."""

PURGING = "purging-"
PURGE_TAG = re.compile(rf"{PURGING}[0-9a-f]+")
"""Tags of a purge: they keep the current content of the tables while that is not their newest version."""

HEAD = "head.json"
"""The file among the manifests that covers the list of snapshots; see ``catalog.integrity``."""

LATEST = "latest"
"""Alias of the newest snapshot, in place of its number or label."""

_ATTEMPTS = 60
_TRIES = 10
"""How often consistent versions are looked for while datasets vanish."""

T = TypeVar("T")


def list_versions(catalog: Catalog) -> list[AtlasVersionRecord]:
    """Return the snapshots, oldest first.

    Notes
    -----
    A row without table versions only keeps the number of a forgotten snapshot from being given again.
    """
    return [record for record in _read_versions(catalog)[1] if record.table_versions]


def _read_versions(catalog: Catalog) -> tuple[int, list[AtlasVersionRecord]]:
    """Return the version of the list of snapshots, and its rows; a session reads a version once."""
    tables, known = catalog.newest_tables(), catalog._memo.get(VERSIONS)
    if tables.session is None:
        held = tables.hold()
        return held.version(VERSIONS), versions_from_table(held.read(VERSIONS))
    at = tables.version(VERSIONS)
    if not isinstance(known, tuple) or known[0] != at:
        # Pinned to that version; the newest may be another one by now.
        catalog._memo[VERSIONS] = known = at, versions_from_table(tables.at({VERSIONS: at}).read(VERSIONS))
    return known


def find_version(catalog: Catalog, version: int | str | None = None) -> AtlasVersionRecord:
    """Return one snapshot, by its number, its label, or a number as text; None finds the newest, as does ``"latest"``."""
    records = list_versions(catalog)
    if not records:
        raise NotFoundError(f"The atlas {catalog.location.uri} has no snapshots yet; take one with snapshot().")
    if version is None:
        return records[-1]
    for record in records:
        if version in (record.version, record.label):
            return record
    if isinstance(version, str) and version.isascii() and version.isdigit():
        return find_version(catalog, int(version))
    if version == LATEST:
        return records[-1]
    shown = [f"{r.version} ({r.label})" if r.label else str(r.version) for r in records[-20:]]
    raise NotFoundError(f"There is no snapshot {version!r} of {catalog.location.uri}; there are {', '.join(shown)}.")


def check_label(label: str | None) -> None:
    """Raise if a label could be confused with a number, the newest snapshot or no snapshot, or is no name that can be given."""
    if label is None:
        return
    if not label.strip() or label.strip().isdigit() or label.strip() == LATEST:
        raise NameRefusedError(
            f"The label {label!r} is empty, a number or {LATEST!r}, which is the newest snapshot; choose a word, e.g. 'as-submitted'."
        )
    check_given_name(label, "label")


def change_versions(
    catalog: Catalog, change: Callable[[list[AtlasVersionRecord]], list[AtlasVersionRecord]]
) -> list[AtlasVersionRecord]:
    """Replace the list of snapshots in one commit, and return it; it is repeated when another writer commits first.

    `change` gets the current list and returns the new one, or the same object for "no change".
    """
    tables, chance = catalog.newest_tables(), random.Random()
    for attempt in range(_ATTEMPTS):
        at, old = _read_versions(catalog)
        new = change(old)
        # A table that is held may be an older one, which the commit notices.
        if new is not old and tables.overwrite_if(VERSIONS, versions_to_table(new), at):
            if tables.session is not None and tables.version(VERSIONS) == at + 1:
                catalog._memo[VERSIONS] = at + 1, new
            return new
        if new is old and (attempt or tables.session is None):
            return old
        tables.forget(VERSIONS)
        time.sleep(chance.uniform(0, min(1.0, 0.02 * 2**attempt)))
    raise ConflictError(
        f"Other writers kept changing the snapshots of {catalog.location.uri}; nothing was recorded. Run it again."
    )


def registry_tables(catalog: Catalog) -> dict[str, str]:
    """Return the existing registries: feature space -> table."""
    if catalog.tables.pinned is not None:
        there = set(catalog.tables.pinned)
        return {s.name: s.registry for s in catalog.spaces().values() if s.has_features and s.registry in there}
    wanted = {s.name: s.registry for s in catalog.spaces().values() if s.has_features}
    existing = catalog.tables.versions([*wanted.values()])
    return {space: table for space, table in wanted.items() if table in existing}


def consistent_versions(catalog: Catalog) -> AtlasVersionRecord:
    """Choose consistent versions of all tables; nothing is tagged yet.

    The datasets and the assets are opened first, the rest after them, so every record finds its cells, layouts,
    features and columns: they were written before it. What a dataset or an asset that is dropped in between would lack
    is for the caller to see, by looking at both again (`versions_exist`).

    If the tables of the catalog are held, what has been opened before all of these is brought up to date. The record
    has number 0, and neither label nor counts.
    """
    tables = catalog.tables
    # During a purge, the current content is not the newest.
    if tables.pinned is not None:
        return held_versions(catalog)
    if tables.session is None:
        return held_versions(catalog.with_tables(tables.hold()))
    # With the listing: a dataset of a new feature space needs its registry.
    tables.refresh([LISTING, *(n for n in tables.held() if n not in (DATASETS, VERSIONS, *asset_tables()))])
    return held_versions(catalog)


def held_versions(catalog: Catalog) -> AtlasVersionRecord:
    """Return the versions at which tables are held; those that are not open yet are opened, the datasets before the others."""
    tables = catalog.tables
    versions = {DATASETS: tables.version(DATASETS)}
    versions |= tables.versions([*asset_tables()])
    # Before the registries, which only grow: every feature that it names is then in them.
    versions |= tables.versions(IDENTITY_TABLES)
    versions |= {name: tables.version(name) for name in (CELLS, LAYOUTS)}
    spaces = {name: space.to_json() for name, space in catalog.spaces().items()}
    versions |= {table: tables.version(table) for table in registry_tables(catalog).values()}
    return AtlasVersionRecord(version=0, table_versions=versions, spaces=spaces)


def tip_versions(catalog: Catalog) -> AtlasVersionRecord:
    """Return consistent table versions of the tip, without writing."""
    draft = consistent_versions(catalog)
    for _ in range(_TRIES):
        if versions_exist(catalog, draft):
            break
        draft = consistent_versions(catalog)
    return draft


def versions_exist(catalog: Catalog, draft: AtlasVersionRecord) -> bool:
    """Return whether every dataset and asset of the chosen versions is still in the atlas, so that none was dropped in between."""
    registries = [name for name in (DATASETS, *asset_tables()) if name in draft.table_versions]
    if catalog.tables.session is not None:
        catalog.tables.refresh(registries)
    if all(catalog.tables.version(name) == draft.table_versions[name] for name in registries):
        return True
    return Inventory(catalog.at(draft)).uids <= Inventory(catalog).uids


def for_tables(catalog: Catalog, function: Callable[[str], T], names: Sequence[str]) -> dict[str, T]:
    """Apply a function to tables, side by side where it waits for an object store: name -> result."""
    each = map(function, names) if catalog.location.is_local else map_fetches(function, names)
    return dict(zip(names, each, strict=True))


def repair_tags(catalog: Catalog) -> list[str]:
    """Put every recorded snapshot's tag on the table versions that it names; return what cannot be repaired."""
    # As they are now: a purge may have moved tags since the session began.
    catalog.tables.refresh([VERSIONS])
    tables, records = catalog.tables, list_versions(catalog)
    lost, moved = [], False

    def wrong(record: AtlasVersionRecord) -> list[str]:
        """Return the tables with another tag than the snapshot names, or a damaged one."""

        def right(name: str) -> bool:
            try:
                return tables.tagged(name, record.tag) == record.table_versions[name]
            except CorruptError:
                return False

        return [name for name, same in for_tables(catalog, right, [*record.table_versions]).items() if not same]

    for record, names in zip(records, map_groups(wrong, records), strict=True):
        for table in names:
            # Before the first tag moves, or a process that dies here leaves hashes of the old tag files.
            if not moved:
                delete_manifest_log(catalog)
            moved = True
            version = record.table_versions[table]
            try:
                tables.tag(table, record.tag, version)
            except (NotFoundError, StoreError):
                lost.append(f"snapshot {record.version}: version {version} of table {table!r} is gone")
    return lost


def delete_manifest_log(catalog: Catalog) -> None:
    """Delete the recorded hashes of tags, which are about to be moved; `seal_versions` records them again."""
    catalog.tables.location.write_bytes(f"{FOLDER}/{HEAD}", b"")


def untag_everywhere(catalog: Catalog, tag: str, tables: list[str]) -> None:
    """Remove a tag from some tables, where it is there, by one request."""
    with contextlib.suppress(StoreError):
        catalog.tables.location.delete_objects([f"{name}.lance/{Tables.tag_file(tag)}" for name in tables])


def refuse_running_adds(catalog: Catalog, action: str) -> None:
    """Raise if an `add` is running that would not survive an action."""
    there = Inventory(catalog)
    known = there.uids | there.folders
    # An `add` has a group before it has cells.
    fresh = [c for c in catalog.arrays.list_children() if (UID.fullmatch(c) or SHARED.fullmatch(c)) and c not in known]
    running = sorted(alive_among(catalog, fresh))
    if running:
        # One may have ended, and not taken its lease away yet.
        catalog.tables.refresh([LISTING, DATASETS, *asset_tables()])
        there = Inventory(catalog)
        running = [uid for uid in running if uid not in there.uids | there.folders]
    if running:
        raise ConflictError(
            f"{action} is not done while an add or optimize() is under way in {catalog.location.uri} (datasets, results or bundles {running}), "
            "because its cells or files would be lost. Wait for it; if it died, run repair()."
        )
