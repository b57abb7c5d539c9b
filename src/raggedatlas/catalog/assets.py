"""Assets of an atlas: the registries of what is attached to cells, its arrays and files, and the leases of what writes them."""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import CELLS, DATASETS, GEOMETRY, RESULTS, Catalog, ensure_table
from raggedatlas.errors import ConflictError, CorruptError, NotFoundError, QueryError
from raggedatlas.model.assets import GEOMETRY_SCHEMA, RESULTS_SCHEMA, GeometryRecord, ResultRecord, without_deleted
from raggedatlas.model.records import (
    DATASETS_SCHEMA,
    DatasetRecord,
    entries_from_table,
    entries_to_table,
    read_json,
    utc_now,
)
from raggedatlas.model.spaces import PointerKind, pointer_columns
from raggedatlas.store.arrays import ArraySpec, create_group, read_group, write_group_attributes
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader
from raggedatlas.store.sql import equals, in_list, is_not_null
from raggedatlas.store.tables import Tables, update_columns

if TYPE_CHECKING:
    from raggedatlas.model.reports import MaintenanceReport

GRACE = timedelta(hours=1)
"""How long the arrays of a writer on another machine may be unchanged before the writer counts as dead."""

_YOUNG = timedelta(minutes=1)
_ATTRIBUTE, _LEASE = "raggedatlas", "ingest"


def take_lease(catalog: Catalog, dataset_uid: str, owner: Mapping[str, Any] | None = None) -> None:
    """Create the group of a dataset, with a lease that names the process that will commit it.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    dataset_uid : str
        The new dataset.
    owner : mapping or None
        What `this_process` gave in that process; None is this one.

    Raises
    ------
    ConflictError
        If a purge is unfinished.
    """
    create_group(catalog.arrays, dataset_uid, {_ATTRIBUTE: {_LEASE: dict(owner or this_process())}})
    # A purge leaves its mark before it looks for leases, and an add its lease before it looks for the mark: one of them sees the other.
    catalog.refuse_unfinished_purge("add()")


def release_lease(catalog: Catalog, dataset_uid: str) -> None:
    """Remove the lease of a dataset that is committed or dropped; a deleted group is not created again."""
    if read_lease(catalog, dataset_uid):
        write_group_attributes(catalog.arrays, dataset_uid, {_ATTRIBUTE: {}})


def is_atlas_group(attributes: Mapping[str, Any], space: str) -> bool:
    """Return whether the attributes of a group are empty, a lease, or a description that this package writes."""
    ours = attributes.get(_ATTRIBUTE, {})
    if not set(attributes) <= {_ATTRIBUTE} or not isinstance(ours, dict):
        return False
    holds = {"feature_space": space, "kind": ours.get("kind")}
    return set(ours) <= {_LEASE} or (ours == holds and ours["kind"] in {kind.value for kind in PointerKind})


def read_lease(catalog: Catalog, dataset_uid: str) -> dict[str, Any] | None:
    """Return the lease of a dataset's group: empty after its add has finished, None if there never was one."""
    try:
        attributes = read_group(catalog.arrays, dataset_uid).attributes
    # A lease that cannot be read counts as none: `process_alive` then goes by the age of the files.
    except (NotFoundError, CorruptError):
        return None
    ours = attributes.get(_ATTRIBUTE)
    if not isinstance(ours, dict):
        return None
    lease = ours.get(_LEASE)
    return lease if isinstance(lease, dict) else {}


def lease_alive(catalog: Catalog, dataset_uid: str, grace: timedelta = GRACE) -> bool:
    """Return whether an `add` may still be writing a dataset's group.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    dataset_uid : str
        The dataset.
    grace : timedelta
        For a writer on another machine: how long its newest object may be unchanged.

    Returns
    -------
    bool
        On this machine and since this boot, whether that very process runs. For other machines, whether something was
        written within `grace`. Without a note, whether something was written within the last minute.
    """
    lease = read_lease(catalog, dataset_uid)
    if lease == {}:
        return False
    return process_alive(lease, catalog.arrays.child(dataset_uid), grace)


def process_alive(note: Mapping[str, Any] | None, place: Location, grace: timedelta = GRACE) -> bool:
    """Return whether a process may still be writing.

    Parameters
    ----------
    note : mapping or None
        What `this_process` gave in that process; None where it left nothing.
    place : Location
        Where it writes.
    grace : timedelta
        For a process on another machine: how long the newest object of the location may be unchanged.
    """
    here = this_process()
    # A pid means something only on its host, since its boot and in its namespace.
    if note is not None and all(note.get(key) == here[key] for key in ("host", "boot_id", "namespace")):
        return _runs(note.get("pid"), note.get("process_start"))
    newest = place.last_modified()
    if newest is None:
        return False
    age = datetime.now(UTC) - newest
    return age < (_YOUNG if note is None else grace)


def this_process() -> dict[str, Any]:
    """Return a description of this process, from which `process_alive` later determines whether it still runs."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "boot_id": _text(Path("/proc/sys/kernel/random/boot_id")),
        # Two containers on one machine may share host name, boot id and process ids.
        "namespace": namespace,
        "started_at": utc_now(),
    }


def _runs(pid: object, process_start: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    # With /proc, the start time distinguishes a reused pid; elsewhere signal 0 only asks whether the pid exists.
    if Path("/proc/self/stat").exists():
        return bool(process_start) and _process_start(pid) == process_start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _process_start(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if unknown or a zombie."""
    # The command name may contain spaces and parentheses, so fields are counted from the last `)`:
    # 0 is the state (field 3 of proc(5)), 19 the start time (field 22).
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in {"Z", "X"} else ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


PURGED_KEY = "raggedatlas.purged"
"""Table metadata of `datasets`: JSON object, purged dataset uid -> time."""


Asset = TypeVar("Asset", ResultRecord, GeometryRecord)


@dataclass(frozen=True)
class AssetTable(Generic[Asset]):
    """The registry of one kind of asset: a small table with one record per row, replaced as a unit by a checked commit.

    Datasets have their own commit (`commit_records`), because an atlas has many of them and an `add` must append.

    Parameters
    ----------
    name : str
        Name of the table.
    record : type
        Class of the records.
    schema : pyarrow.Schema
        Schema of the table.
    """

    name: str
    record: type[Asset]
    schema: pa.Schema

    def read(self, catalog: Catalog) -> list[Asset]:
        """Return all records, oldest first; an empty list if the atlas or the snapshot has no such table."""
        memo = catalog._memo.get(self.name)
        if isinstance(memo, list):
            return memo
        tables = catalog.tables
        records = self.parse(tables.read(self.name)) if tables.has(self.name) else []
        if catalog.snapshot is not None:
            catalog._memo[self.name] = records
        return records

    def parse(self, rows: pa.Table) -> list[Asset]:
        """Return the records in some rows of the table, oldest first."""
        return entries_from_table(self.record, rows, self.name)

    def to_table(self, records: Sequence[Asset]) -> pa.Table:
        """Return records as rows of the table."""
        return entries_to_table(records, self.schema)

    def change(self, catalog: Catalog, update: Callable[[list[Asset]], list[Asset]]) -> list[Asset]:
        """Replace the records in one commit; the update is repeated when another writer commits first.

        Parameters
        ----------
        catalog : Catalog
            At the tip. The table is created if it does not exist.
        update : callable
            Gets the current records and returns the new ones, or the same object for "no change". An exception leaves the
            registry unchanged.

        Returns
        -------
        list of records
            The records after the commit.

        Raises
        ------
        ConflictError
            If other writers win every retry, or a purge is unfinished.
        """
        tables = Tables(catalog.tables.location)
        ensure_table(tables, self.name, self.schema)

        def attempt() -> list[Asset]:
            # Read at a fixed version, which the commit below checks: `update` never works on outdated records.
            version = tables.version(self.name)
            old = self.parse(Tables(tables.location, {self.name: version}).read(self.name))
            new = update(old)
            if new is not old and not tables.overwrite_if(self.name, self.to_table(new), version):
                raise ConflictError(f"{self.name} of {catalog.location.uri} changed")
            return new

        return tables.retry(self.name, attempt)

    def remove(self, catalog: Catalog, uids: AbstractSet[str]) -> list[Asset]:
        """Remove the records with some uids in one commit, and return those that were there."""
        removed: list[Asset] = []

        def without(old: list[Asset]) -> list[Asset]:
            # Replaced, not extended: `change` calls this again after a lost race.
            removed[:] = [record for record in old if record.uid in uids]
            return [record for record in old if record.uid not in uids] if removed else old

        self.change(catalog, without)
        return removed


RESULT_ASSETS = AssetTable(RESULTS, ResultRecord, RESULTS_SCHEMA)
GEOMETRY_ASSETS = AssetTable(GEOMETRY, GeometryRecord, GEOMETRY_SCHEMA)


def _dropped(
    records: Iterable[DatasetRecord | ResultRecord | GeometryRecord], noun: str, n: int
) -> "MaintenanceReport":
    """Return the report of a drop: the groups that `gc` will free."""
    groups = tuple(record.zarr_group for record in records if record.zarr_group)
    notes = (f"the {noun} stay until gc() finds that no snapshot needs them",)
    from raggedatlas.model.reports import MaintenanceReport

    return MaintenanceReport(groups=groups, n_cells=n, notes=notes)


# ---- datasets


def read_records(catalog: Catalog) -> list[DatasetRecord]:
    """Return the records of all datasets, in the order in which they were added.

    Raises
    ------
    CorruptError
        If a record is damaged; the message names its row and field.
    """
    return [*catalog.dataset_records().records]


def group_by_dataset(records: Iterable[DatasetRecord]) -> dict[str, list[DatasetRecord]]:
    """Group records by dataset: uid -> records."""
    groups: dict[str, list[DatasetRecord]] = {}
    for record in records:
        # Not `setdefault`, which would make a list for every record: each `add` does this with all of them.
        if record.uid in groups:
            groups[record.uid].append(record)
        else:
            groups[record.uid] = [record]
    return groups


def dataset_rows(catalog: Catalog) -> list[dict[str, Any]]:
    """Return a summary of each dataset, in the order of adding; importing pandas for a frame takes longer than listing."""
    deleted = catalog.n_deleted()
    return [
        {
            "uid": uid,
            "name": records[0].name,
            "n_cells": records[0].n_cells_added - deleted.get(uid, 0),
            "spaces": ", ".join(dict.fromkeys(r.feature_space for r in records)),
            "layers": ", ".join(f"{r.feature_space}/{layer}" for r in records for layer in r.layers),
            "n_features": ", ".join(str(r.n_features) for r in records),
            "source": records[0].source,
            "created_at": records[0].created_at,
        }
        for uid, records in group_by_dataset(read_records(catalog)).items()
    ]


def find_dataset(
    catalog: Catalog, uid_or_name: str, records: Iterable[DatasetRecord] | None = None
) -> list[DatasetRecord]:
    """Return the records of one dataset, by uid or by name, among some records or all.

    Raises
    ------
    NotFoundError
        If no dataset, or more than one, has that name; the message lists them.
    """
    datasets = group_by_dataset(read_records(catalog) if records is None else records)
    if uid_or_name in datasets:
        return datasets[uid_or_name]
    named = [records for records in datasets.values() if records[0].name == uid_or_name]
    if len(named) == 1:
        return named[0]
    if named:
        uids = [records[0].uid for records in named]
        raise NotFoundError(f"{len(named)} datasets are called {uid_or_name!r}; use one of their uids: {uids}.")
    names = sorted(records[0].name for records in datasets.values())
    shown = names if len(names) <= 20 else [*names[:20], f"... and {len(names) - 20} more"]
    raise NotFoundError(f"There is no dataset {uid_or_name!r} in {catalog.location.uri}; there are {shown}.")


@dataclass(frozen=True)
class Commit:
    """Changes that one commit makes to the list of datasets.

    Parameters
    ----------
    records : tuple of DatasetRecord
        Records that become visible.
    replaces : frozenset of str
        Uids of datasets whose records are removed.
    """

    records: tuple[DatasetRecord, ...]
    replaces: frozenset[str] = frozenset()


def commit_records(catalog: Catalog, choose: Callable[[list[DatasetRecord]], Commit]) -> None:
    """Make datasets visible, rename or remove them, in one commit that conflicts with every other: the last write of an `add` (its commit point).

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    choose : callable
        Gets the records and returns the changes. If another writer changes them before the commit, it is called
        again with the new ones, so a name or content that it found free is still free when the commit is done. An
        exception leaves them unchanged.

    Raises
    ------
    ConflictError
        If other writers win every retry, or a purge is unfinished.
    """
    tables, tried = Tables(catalog.tables.location), set[tuple[str, str]]()

    def attempt() -> None:
        listed = catalog.dataset_records()
        version, old = listed.version, [*listed.records]
        if any((record.uid, record.name) in tried for record in old):
            return  # The previous attempt was committed although its response was lost.
        commit = choose(old)
        fresh = pa.Table.from_pylist([record.model_dump() for record in commit.records], schema=DATASETS_SCHEMA)
        # Before the commit, whose response may be lost: the next attempt then finds these in the table.
        tried.update((record.uid, record.name) for record in commit.records)
        if not commit.records and not commit.replaces:
            return
        pinned = tables.at({DATASETS: version})
        # An empty table has no first row on which concurrent merges would conflict (see below).
        if commit.replaces or not old:
            rows = pinned.read(DATASETS).cast(DATASETS_SCHEMA)
            kept = rows.filter(
                pc.invert(pc.is_in(rows.column("uid"), value_set=pa.array(sorted(commit.replaces), pa.string())))
            )
            if not tables.overwrite_if(DATASETS, pa.concat_tables([kept, fresh]), version):
                raise ConflictError(f"{DATASETS} of {catalog.location.uri} changed")
            return
        # Lance accepts two concurrent appends to one version. Rewriting the first row unchanged makes them conflict.
        first = pinned.read(DATASETS, where=equals("zarr_group", old[0].zarr_group)).cast(DATASETS_SCHEMA)
        changes_first = any(record.zarr_group == old[0].zarr_group for record in commit.records)
        both = fresh if changes_first else pa.concat_tables([first.slice(0, 1), fresh])
        tables.merge(DATASETS, ["zarr_group"], both, update=True, retry=False, read_version=version)

    tables.retry(DATASETS, attempt)


def drop_dataset(catalog: Catalog, uid_or_name: str) -> "MaintenanceReport":
    """Remove a dataset from the tip; snapshots that contain it keep it, and `gc` frees what no snapshot needs.

    The record is removed first, which makes the dataset invisible at once; then its cells. If the process dies in between,
    the remaining cells are invisible and `repair` removes them.

    Raises
    ------
    NotFoundError
        If there is no such dataset, or several have that name.
    """
    catalog.require_tip("drop_dataset")
    records: list[DatasetRecord] = []

    def choose(old: list[DatasetRecord]) -> Commit:
        # By its name at the moment of the commit: another process may rename it meanwhile.
        records[:] = find_dataset(catalog, uid_or_name, old)
        return Commit((), frozenset({records[0].uid}))

    commit_records(catalog, choose)
    return _dropped(records, "arrays", delete_cells_of_datasets(catalog, [records[0].uid]))


def delete_cells_without_record(catalog: Catalog, uids: Collection[str]) -> int:
    """Delete the cells of datasets that have no record, also at the moment of the commit; return their number."""

    def condition() -> str:
        # `restore` may have brought a record back; it changes the table of cells once more after that, so that this conflicts.
        return in_list("dataset_uid", sorted({*uids} - {record.uid for record in read_records(catalog)}))

    return catalog.tables.delete(CELLS, condition) if uids else 0


def delete_cells_of_datasets(catalog: Catalog, uids: Sequence[str]) -> int:
    """Delete the cells of datasets without a record, and remove the datasets from geometry; return the number of cells."""
    n = delete_cells_without_record(catalog, uids)
    remove_datasets_from_geometries(catalog, uids)
    for uid in uids:
        release_lease(catalog, uid)
    return n


def purged(catalog: Catalog) -> dict[str, str]:
    """Return the log of purged datasets: uid -> time."""
    text = catalog.newest_tables().metadata(DATASETS).get(PURGED_KEY, "{}")
    return dict(read_json(dict[str, str], text, DATASETS, "table metadata", PURGED_KEY))


def read_specs(record: DatasetRecord) -> dict[str, ArraySpec]:
    """Return the array descriptions of a record: path below the group -> spec.

    Raises
    ------
    CorruptError, LimitError, SchemaError
        If a description is invalid.
    """
    return {path: ArraySpec.from_json(json.dumps(spec)) for path, spec in record.array_specs.items()}


def array_columns(specs: Mapping[str, ArraySpec], checksums: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a record, as JSON, that describe its arrays: what `read_specs` and `array_checksums` read."""
    described = {path: json.loads(spec.to_json()) for path, spec in specs.items()}
    return {"arrays": json.dumps(described, sort_keys=True), "checksums": json.dumps(checksums, sort_keys=True)}


def array_readers(arrays: Location, record: DatasetRecord) -> dict[str, ArrayReader]:
    """Return a reader of every array of a record, with its recorded checksum: path below the group -> reader.

    Raises
    ------
    CorruptError, LimitError, SchemaError
        If the record describes invalid arrays.
    """
    checksums = record.array_checksums
    return {
        path: ArrayReader(arrays, spec, checksum=checksums.get(path, "")) for path, spec in read_specs(record).items()
    }


# ---- results of models


def find_result(catalog: Catalog, name: str) -> ResultRecord:
    """Return one result by its name.

    Raises
    ------
    NotFoundError
        If there is none; the message lists the existing results.
    """
    records = RESULT_ASSETS.read(catalog)
    for record in records:
        if record.name == name:
            return record
    raise NotFoundError(
        f"{catalog.location.uri} has no result {name!r}{_snapshot_suffix(catalog)}; it has {[r.name for r in records]}. "
        "Add one with atlas.add(ResultDataset({}, folder), name=...), and take a snapshot."
    )


def _snapshot_suffix(catalog: Catalog) -> str:
    return "" if catalog.snapshot is None else f" at snapshot {catalog.snapshot.version}"


def drop_result(catalog: Catalog, name: str) -> "MaintenanceReport":
    """Remove a result from the tip; snapshots that contain it keep it, and `gc` frees what no snapshot needs.

    The record is removed first, which makes the result invisible at once; then its column. If the process dies in between,
    the remaining column is invisible and `repair` removes it.

    Raises
    ------
    NotFoundError
        If there is no result of that name.
    """
    catalog.require_tip("drop_result")
    removed = RESULT_ASSETS.remove(catalog, {find_result(catalog, name).uid})
    if not removed:  # Another process has dropped or replaced it meanwhile.
        return drop_result(catalog, name)
    # Unless `restore` has brought it back meanwhile.
    catalog.tables.drop_columns(CELLS, [record.column for record in removed], partial(asset_columns, catalog))
    return _dropped(removed, "values", 0)


def asset_columns(catalog: Catalog) -> set[str]:
    """Return the cell columns of all results and geometry stores."""
    return {record.column for assets in (RESULT_ASSETS, GEOMETRY_ASSETS) for record in assets.read(catalog)}


def visible_columns(catalog: Catalog) -> dict[str, ResultRecord]:
    """Return the cell columns of all results: column -> result."""
    return {record.column: record for record in RESULT_ASSETS.read(catalog)}


# ---- geometry stores


def read_geometries(catalog: Catalog) -> list[GeometryRecord]:
    """Return the visible geometry stores: those with at least one dataset in the atlas."""
    records = GEOMETRY_ASSETS.read(catalog)
    datasets = {record.uid for record in read_records(catalog)} if records else set()
    return [record for record in records if is_visible(record, datasets)]


def is_visible(record: GeometryRecord, datasets: AbstractSet[str]) -> bool:
    """Return whether the atlas contains a dataset of a store; if the store's objects are the cells of a dataset, that one."""
    own = record.cells_of
    return record.uid in datasets if record.uid in own else bool(datasets & set(own))


def default_geometry(catalog: Catalog) -> str:
    """Return the only geometry of the atlas, or its only feature space.

    Raises
    ------
    QueryError
        If there are several, or none.
    """
    records = read_geometries(catalog)
    names = sorted({record.name for record in records})
    spaces = sorted({record.space for record in records})
    if not names:
        raise QueryError(
            f"{catalog.location.uri} has no geometry; add one with atlas.add('shapes.zv', link=...), and take a snapshot."
        )
    if len(names) > 1 and len(spaces) > 1:
        raise QueryError(f"The atlas has the geometries {names}; name one with space=...")
    return names[0] if len(names) == 1 else spaces[0]


def find_geometries(catalog: Catalog, name: str) -> list[GeometryRecord]:
    """Return the stores that a name refers to, over all datasets: stores of that name and stores of the feature space of that name.

    If a dataset has a store with exactly this name, its other stores are not returned, so that cell outlines are not mixed
    with nuclei. For other datasets all stores of the feature space are returned; `rows_of_stores` refuses a cell that has
    shapes in two of them.

    Raises
    ------
    NotFoundError
        If there is none; the message lists the existing names.
    """
    records = read_geometries(catalog)
    having = {uid for record in records if record.name == name for uid in record.cells_of}
    matches = [
        record
        for record in records
        if record.name == name or (record.space == name and not having & set(record.cells_of))
    ]
    if matches:
        return matches
    names = sorted({record.name for record in records})
    raise NotFoundError(
        f"{catalog.location.uri} has no geometry {name!r}{_snapshot_suffix(catalog)}; it has {names}. Add one with "
        "atlas.add('shapes.zv', link=..., space=...), and take a snapshot."
    )


def rows_of_stores(
    records: Sequence[GeometryRecord], table: pa.Table, name: str
) -> list[tuple[GeometryRecord, NDArray[np.int64]]]:
    """Return the rows of the cells that have shapes in each store.

    Parameters
    ----------
    records : sequence of GeometryRecord
        Stores from `find_geometries`.
    table : pyarrow.Table
        Cells, with ``<column>.zarr_group`` of every record, and ``uid`` for the message.
    name : str
        Name that was asked for.

    Returns
    -------
    list of (GeometryRecord, (n,) int64)
        Stores that have at least one of the rows.

    Raises
    ------
    QueryError
        If a cell has shapes in several stores.
    """
    parts = []
    # -1: no store yet; else the position in `records` of the store that has shapes of the cell.
    owner = np.full(table.num_rows, -1, np.int64)
    for i, record in enumerate(records):
        groups = table.column(f"{record.column}.zarr_group")
        rows = np.flatnonzero(pc.equal(groups, record.zarr_group).fill_null(fill_value=False).to_numpy())
        if (owner[rows] >= 0).any():
            row = int(rows[owner[rows] >= 0][0])
            names = sorted([records[owner[row]].name, record.name])
            # Tables of lazily read columns have no uid.
            cell = repr(table.column("uid")[row].as_py()) if "uid" in table.column_names else f"in row {row}"
            raise QueryError(
                f"The cell {cell} has the geometries {names} of the feature space {name!r}; name one "
                "of them with space=..., or choose cells that have one of them, with where(...) first."
            )
        owner[rows] = i
        if len(rows):
            parts.append((record, rows))
    return parts


def drop_geometry(catalog: Catalog, name: str, dataset: str | None = None) -> "MaintenanceReport":
    """Remove geometry from the tip; snapshots that contain it keep it, and `gc` frees what no snapshot needs.

    The record is removed first, which makes the shapes invisible at once; then the pointers of the cells. If the process
    dies in between, nothing follows the remaining pointers and `repair` removes them.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    name : str
        Its name, or its feature space.
    dataset : str or None
        Only of this dataset, by name or uid; None removes every store of the name.

    Raises
    ------
    NotFoundError
        If there is none.
    QueryError
        If its objects are the cells of a dataset, which must be dropped with `drop_dataset`.
    """
    catalog.require_tip("drop_geometry")
    records = find_geometries(catalog, name)
    names = sorted({record.name for record in records})
    if len(names) > 1:
        # Unlike a query, a drop never takes more than what is named.
        records = [record for record in records if record.name == name]
        if not records:
            raise NotFoundError(f"Several geometries are of the feature space {name!r}: {names}; name one of them.")
    if dataset is not None:
        uid = find_dataset(catalog, dataset)[0].uid
        records = [record for record in records if uid in record.cells_of]
        if not records:
            raise NotFoundError(f"The dataset {dataset!r} has no geometry {name!r}.")
    groups = {record.zarr_group for record in records}
    own = next((record for record in read_records(catalog) if record.zarr_group in groups), None)
    if own is not None:
        raise QueryError(
            f"The shapes {name!r} are the cells of the dataset {own.name or own.uid!r}, which would be left without any; take both out "
            f"with drop_dataset({own.uid!r})."
        )
    deletions = catalog.deletions()
    n_cells = sum(sum(without_deleted(record.cells_of, deletions, record.zarr_group).values()) for record in records)
    if not GEOMETRY_ASSETS.remove(catalog, {record.uid for record in records}):
        # Another process has dropped or replaced them meanwhile.
        return drop_geometry(catalog, name, dataset)
    clear_orphaned_pointers(catalog)
    return _dropped(records, "shapes", n_cells)


def remove_datasets_from_geometries(catalog: Catalog, uids: Iterable[str]) -> int:
    """Remove deleted datasets from the registry, and stores that have no other dataset; return the number of changed stores."""
    deleted = set(uids)
    if not deleted or not any(deleted & set(record.cells_of) for record in GEOMETRY_ASSETS.read(catalog)):
        return 0
    n_changed = 0

    def without(old: list[GeometryRecord]) -> list[GeometryRecord]:
        nonlocal n_changed
        # `restore` brings records back before geometry, each in a commit of its own.
        gone = deleted - {record.uid for record in read_records(catalog)}
        n_changed = sum(bool(gone & set(record.cells_of)) for record in old)
        kept = ((record, {u: n for u, n in record.cells_of.items() if u not in gone}) for record in old)
        left = [record.model_copy(update={"datasets": json.dumps(cells)}) for record, cells in kept if cells]
        return left if n_changed else old

    GEOMETRY_ASSETS.change(catalog, without)
    return n_changed


def geometry_columns(schema: pa.Schema, space: str | None = None) -> list[str]:
    """Return the cell columns that hold geometry pointers, of one feature space or of all."""
    columns = pointer_columns(schema).items()
    return [n for n, (of, kind) in columns if kind is PointerKind.GEOMETRY and space in {None, of}]


def groups_in_use(catalog: Catalog, groups: Iterable[str], grace: timedelta = GRACE) -> set[str]:
    """Return the groups that are registered or being written. The registry is read last."""
    candidates = set(groups)
    alive = {group for group in candidates if lease_alive(catalog, group.split("/")[0], grace)}
    return alive | (candidates & {record.zarr_group for record in GEOMETRY_ASSETS.read(catalog)})


def clear_orphaned_pointers(catalog: Catalog, grace: timedelta = GRACE) -> int:
    """Set pointers to missing stores to null, and drop empty columns that belong to no store or feature space.

    Returns
    -------
    int
        Number of cells that lost a pointer.
    """
    n_cleared = 0
    for column in geometry_columns(catalog.tables.schema(CELLS)):
        # Readers pass over orphaned pointers, so those of a column that others keep changing can stay.
        with contextlib.suppress(ConflictError):
            n_cleared += catalog.tables.retry(CELLS, partial(_clear, catalog, column, grace))
    named = {record.column for record in GEOMETRY_ASSETS.read(catalog)}
    spare = [c for c in geometry_columns(catalog.tables.schema(CELLS)) if c not in named and c not in catalog.spaces()]
    idle = [c for c in spare if not catalog.tables.count(CELLS, is_not_null(f"{c}.zarr_group"))]
    if idle:
        catalog.tables.drop_columns(CELLS, idle, partial(asset_columns, catalog))
    return n_cleared


def _clear(catalog: Catalog, column: str, grace: timedelta) -> int:
    # Pointers are read at the version that `update_columns` checks: a later commit to these rows is a conflict.
    version = catalog.tables.version(CELLS)
    pinned = Tables(catalog.tables.location, {CELLS: version})
    if column not in pinned.schema(CELLS).names:
        return 0
    rows = pinned.read(CELLS, ["uid", f"{column}.zarr_group"], is_not_null(f"{column}.zarr_group"))
    groups = rows.column(1)
    live = groups_in_use(catalog, pc.unique(groups).to_pylist(), grace)
    dead = rows.filter(pc.invert(pc.is_in(groups, value_set=pa.array(sorted(live), pa.string()))))
    if dead.num_rows:
        field = pinned.schema(CELLS).field(column)
        schema = pa.schema([dead.schema.field(0), field])
        nulls = pa.table([dead.column(0), pa.nulls(dead.num_rows, field.type)], schema=schema)
        update_columns(catalog.tables, CELLS, "uid", nulls, version)
    return int(dead.num_rows)
