"""Assets of an atlas: datasets, the kinds of what else is attached to cells, and the leases of what writes them."""

import contextlib
import json
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.catalog import CELLS, DATASETS, IDENTITY_TABLES, LAYOUTS, Catalog, ensure_table
from raggedatlas.errors import (
    ArgumentError,
    AtlasError,
    ConflictError,
    CorruptError,
    MissingExtraError,
    NotFoundError,
    StoreError,
)
from raggedatlas.model.arrays import COLUMNS_CODEC, ArraySpec
from raggedatlas.model.assets import AssetRecord, ResultRecord, without_deleted
from raggedatlas.model.records import (
    DATASETS_SCHEMA,
    DatasetRecord,
    Link,
    SourceFacts,
    datasets_from_table,
    entries_from_table,
    entries_to_table,
    read_json,
    utc_now,
)
from raggedatlas.model.spaces import PointerKind
from raggedatlas.model.validation import Problem
from raggedatlas.model.wings import asset_tables, every_wing
from raggedatlas.store.arrays import create_group, read_group, write_group_attributes
from raggedatlas.store.codecs import array_decoder
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader, TransposedReader
from raggedatlas.store.sql import in_list
from raggedatlas.store.tables import LISTING

if TYPE_CHECKING:
    import pandas as pd

    from raggedatlas.model.reports import MaintenanceReport

GRACE = timedelta(hours=1)
"""How long the arrays of a writer on another machine may be unchanged before the writer counts as dead."""

_YOUNG = timedelta(minutes=1)
_ATTRIBUTE, _LEASE = "raggedatlas", "ingest"


def take_lease(catalog: Catalog, dataset_uid: str, owner: Mapping[str, Any] | None = None) -> None:
    """Create the group of a dataset, with a lease that names the process that will commit it.

    `owner` is what `this_process` gave in that process; None is this one.
    """
    create_group(catalog.arrays, dataset_uid, {_ATTRIBUTE: {_LEASE: dict(owner or this_process())}})
    # A purge leaves its mark before it looks for leases, and an add its lease before it looks for the mark: one of them sees the other.
    mark = catalog.tables.unfinished_purge(leased=True)
    if mark is not None:
        raise mark.refusal("add()", catalog.location.uri)


def release_lease(catalog: Catalog, dataset_uid: str, *, own: bool = False) -> None:
    """Remove the lease of a dataset that is committed or dropped. A deleted group is not created again; nobody deletes the group of an `own` lease."""
    if own or read_lease(catalog, dataset_uid):
        write_group_attributes(catalog.arrays, dataset_uid, {_ATTRIBUTE: {}})


_HELD, _HELD_LOCK = set[tuple[str, str]](), threading.Lock()
"""Leases that calls of this process hold: Zarr store and dataset."""


@contextlib.contextmanager
def hold_lease(catalog: Catalog, dataset: DatasetRecord, call: str) -> Iterator[Callable[[], None]]:
    """Hold the lease of a dataset of the atlas while a call writes arrays of it; refuse while another call holds it.

    What the caller knows of the dataset it reads again under the lease. It calls what it gets right before its commit:
    of two processes that take the lease at the same moment, the first then raises `ConflictError`.
    """
    uid, key = dataset.uid, (catalog.arrays.uri, dataset.uid)

    def refuse_other() -> None:
        if lease := _other_writer(catalog, uid):
            raise _held_error(catalog, dataset.name, call, lease)

    with _HELD_LOCK:
        if key in _HELD:
            raise _held_error(catalog, dataset.name, call, this_process())
        _HELD.add(key)
    try:
        refuse_other()
        take_lease(catalog, uid)
        yield refuse_other
    finally:
        # A lease that is left does no harm: this process may take it again, and it ends with the process.
        try:
            with contextlib.suppress(AtlasError):
                lease = read_lease(catalog, uid)
                if lease and is_this_process(lease):
                    release_lease(catalog, uid, own=True)
        finally:
            _HELD.discard(key)


def refuse_held(catalog: Catalog, uid: str, name: str, call: str) -> None:
    """Raise while a call, of this process or another, holds the lease of a dataset of the atlas."""
    lease = this_process() if (catalog.arrays.uri, uid) in _HELD else _other_writer(catalog, uid)
    if lease:
        raise _held_error(catalog, name, call, lease)


def _other_writer(catalog: Catalog, uid: str) -> dict[str, Any] | None:
    """Return the lease of a dataset if another process has it that may still be writing."""
    lease = read_lease(catalog, uid)
    is_other = lease and not is_this_process(lease) and process_alive(lease, catalog.arrays.child(uid))
    return lease if is_other else None


def _held_error(catalog: Catalog, name: str, call: str, lease: Mapping[str, Any]) -> ConflictError:
    return ConflictError(
        f"{call} is refused while process {lease.get('pid')} of {lease.get('host')} writes arrays of the dataset {name!r} of "
        f"{catalog.location.uri}, since {lease.get('started_at')}; wait until it has finished. A process on another machine counts as dead "
        "once it has written nothing for an hour."
    )


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

    On this machine and since this boot, this is whether that very process runs. For other machines, it is whether
    something was written within `grace`. Without a lease, it is whether something was written within the last minute.
    """
    lease = read_lease(catalog, dataset_uid)
    if lease == {}:
        return False
    return process_alive(lease, catalog.arrays.child(dataset_uid), grace)


def alive_among(catalog: Catalog, uids: Sequence[str], grace: timedelta = GRACE) -> set[str]:
    """Return those of some datasets whose groups an `add` may still be writing, side by side; see `lease_alive`."""
    alive = catalog.location.side_by_side([partial(lease_alive, catalog, uid, grace) for uid in uids])
    return {uid for uid, writes in zip(uids, alive, strict=True) if writes}


def process_alive(note: Mapping[str, Any] | None, place: Location, grace: timedelta = GRACE) -> bool:
    """Return whether a process may still be writing.

    `note` is what `this_process` gave in that process; None where it left nothing. `place` is where it writes. `grace`
    is how long the newest object there may be unchanged if the process is on another machine.
    """
    here = this_process()
    if note is not None and all(note.get(key) == here[key] for key in _SCOPE):
        return _runs(note.get("pid"), note.get("process_start"))
    newest = place.last_modified()
    if newest is None:
        return False
    age = datetime.now(UTC) - newest
    return age < (_YOUNG if note is None else grace)


_SCOPE = ("host", "boot_id", "namespace")
"""A pid means something only on its host, since its boot and in its namespace."""


def is_this_process(note: Mapping[str, Any]) -> bool:
    """Return whether a note is what `this_process` gave in this process."""
    here = this_process()
    return all(note.get(key) == here[key] for key in (*_SCOPE, "pid", "process_start"))


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
        "thread": threading.get_ident(),
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


Record = TypeVar("Record", bound=AssetRecord)


class AssetKind(ABC, Generic[Record]):
    """One kind of what is attached to cells, such as results of models; what the core does with assets, it does by this.

    A kind has a table with one record for each asset, replaced as a unit by a checked commit. An asset may have a cell column, a folder
    ``<uid>`` with files in the Zarr store, or both. It is added by an `raggedatlas.ingest.attachment.Attachment`: plan, stage, commit. A wing names
    its kinds in `Wing.assets`.

    Attributes
    ----------
    noun : str
        What messages call one.
    record : type
        Class of the records, which names the table: ``_`` and the name of the kind.
    schema : pyarrow.Schema
        Schema of the table.
    columns : tuple of str
        Columns of `frame`: fields of a record, `n_cells`, and `datasets`, the names of those with a cell. The first is the index.
    hint : str
        How to add one, for messages.
    attachment : str
        Where a function is that prepares to add one: ``(catalog, source, choices) -> Attachment``, with the keyword arguments of `add` as a mapping.
    """

    noun: str
    record: type[Record]
    schema: pa.Schema
    columns: tuple[str, ...]
    hint: str
    attachment: str

    @property
    def table(self) -> str:
        """Name of the table."""
        return self.record.table

    @abstractmethod
    def accepts(self, source: Any) -> bool:  # noqa: ANN401  (anything that can be added)
        """Return whether a source of `add` is one of this kind."""

    # -- the table

    def read(self, catalog: Catalog) -> list[Record]:
        """Return all records, oldest first; an empty list if the atlas or the snapshot has no such table."""
        memo = catalog._memo.get(self.table)
        if isinstance(memo, list):
            return memo
        tables = catalog.tables
        records = self.parse(tables.read(self.table)) if tables.has(self.table) else []
        if catalog.snapshot is not None:
            catalog._memo[self.table] = records
        return records

    def parse(self, rows: pa.Table) -> list[Record]:
        """Return the records in some rows of the table, oldest first."""
        return entries_from_table(self.record, rows, self.table)

    def change(self, catalog: Catalog, update: Callable[[list[Record]], list[Record]]) -> list[Record]:
        """Replace the records in one commit; the update is repeated when another writer commits first.

        Parameters
        ----------
        catalog : Catalog
            At the tip. The table is created if it does not exist.
        update : callable
            Gets the current records and returns the new ones, or the same object for "no change". An exception leaves the
            table unchanged.

        Returns
        -------
        list of records
            The records after the commit.

        Raises
        ------
        ConflictError
            If other writers win every retry, or a purge is unfinished.
        """
        tables = catalog.tables
        ensure_table(tables, self.table, self.schema)

        def attempt() -> list[Record]:
            # Read at a fixed version, which the commit below checks: `update` never works on outdated records.
            version = tables.version(self.table)
            old = self.parse(tables.at({self.table: version}).read(self.table))
            new = update(old)
            if new is not old:
                tables.overwrite(self.table, entries_to_table(new, self.schema), version)
            return new

        return tables.retry(self.table, attempt)

    def remove(self, catalog: Catalog, uids: AbstractSet[str]) -> list[Record]:
        """Remove the records with some uids in one commit, and return those that were there."""
        removed: list[Record] = []

        def without(old: list[Record]) -> list[Record]:
            # Replaced, not extended: `change` calls this again after a lost race.
            removed[:] = [record for record in old if record.uid in uids]
            return [record for record in old if record.uid not in uids] if removed else old

        self.change(catalog, without)
        return removed

    # -- what a view has

    def is_visible(self, record: Record, datasets: AbstractSet[str]) -> bool:
        """Return whether an asset is there for readers of an atlas with some datasets."""
        return True

    def visible(self, catalog: Catalog) -> list[Record]:
        """Return the records of what readers see, oldest first."""
        records = self.read(catalog)
        datasets = {record.uid for record in read_records(catalog)} if records else set()
        return [record for record in records if self.is_visible(record, datasets)]

    def find(self, catalog: Catalog, name: str) -> list[Record]:
        """Return the assets of a name.

        Raises
        ------
        NotFoundError
            If there is none; the message lists the existing names.
        """
        visible = self.visible(catalog)
        return [record for record in visible if record.name == name] or self.refuse(catalog, name)

    def refuse(self, catalog: Catalog, name: str) -> NoReturn:
        """Raise a NotFoundError that lists the existing names."""
        at = "" if catalog.snapshot is None else f" at snapshot {catalog.snapshot.version}"
        names = [*dict.fromkeys(record.name for record in self.visible(catalog))]
        raise NotFoundError(
            f"{catalog.location.uri} has no {self.noun} {name!r}{at}; it has {names}. Add one with {self.hint}, and take a snapshot."
        )

    def frame(self, catalog: Catalog) -> "pd.DataFrame":
        """List what readers see; cells that were deleted since, and those of datasets that are gone, are not counted."""
        import pandas as pd

        records = self.visible(catalog)
        names = {uid: own[0].name for uid, own in group_by_dataset(read_records(catalog)).items()} if records else {}
        deletions = catalog.deletions() if records else ()
        rows = []
        for record in records:
            left = without_deleted(record.cells_of, deletions, record.zarr_group or record.uid)
            cells = {uid: n for uid, n in left.items() if uid in names}
            counted = {"n_cells": sum(cells.values()), "datasets": ", ".join(names[uid] for uid in cells)}
            rows.append({**self.facts(record), **counted})
        return pd.DataFrame(rows, columns=[*self.columns]).set_index(self.columns[0])

    def facts(self, record: Record) -> dict[str, Any]:
        """Return the columns of `frame` for one record, but for `n_cells` and `datasets`."""
        return record.model_dump()

    def describe(self, row: Mapping[Any, Any]) -> str:
        """Summarize a row of `frame` in a few words, for overviews that give name and cells besides."""
        return ""

    # -- what it has in the Zarr store, and what is checked

    def group(self, record: Record) -> DatasetRecord | None:
        """Describe the arrays of an asset as those of a dataset are, for code that reads and checks these; None if it has none.

        Cells point to their rows by `AssetRecord.column`.
        """
        return None

    def digest(self, record: Record) -> str:
        """Return the SHA-256 over names and bytes of the files of an asset, as `digest_files` computes it; empty where `group` describes them."""
        return ""

    def problem(self, record: Record, rule: str, text: str) -> Problem:
        """Return a problem of an asset."""
        fix = f"Drop it with {self.drop_call(record)} and add it again, or restore() a snapshot."
        return Problem(rule, "must", f"{self.noun} {record.name} {record.zarr_group or record.uid}", text, fix)

    def drop_call(self, record: Record) -> str:
        """Return the call that drops an asset."""
        return f"drop_asset({self.table[1:]!r}, {record.name!r})"

    def check_records(self, catalog: Catalog, records: Sequence[Record]) -> list[Problem]:
        """Check records among each other and against the tables, without reading cells."""
        return []

    def check_cells(self, catalog: Catalog, records: Sequence[Record], *, values: bool) -> list[Problem]:
        """Check the cells of some assets, apart from pointers into arrays that `group` describes; `values` reads vectors, too."""
        return []

    def check_counts(
        self, catalog: Catalog, record: Record, found: Mapping[str, int], datasets: AbstractSet[str]
    ) -> list[Problem]:
        """Check that the number of cells with an asset is, for each of some datasets, the recorded one less the deleted cells."""
        left = without_deleted(record.cells_of, catalog.deletions(), record.zarr_group or record.uid)
        wanted = {uid: left.get(uid, 0) for uid in datasets if uid in left or uid in found}
        if all(found.get(uid, 0) == n for uid, n in wanted.items()):
            return []
        n_found = sum(found.get(uid, 0) for uid in wanted)
        text = f"{n_found:,} cells have the {self.noun} {record.name!r}, {sum(wanted.values()):,} are recorded"
        return [self.problem(record, f"{self.noun}-count", text)]

    # -- what takes away

    def drop(self, catalog: Catalog, name: str, dataset: str | None = None) -> "MaintenanceReport":
        """Remove an asset from the tip; snapshots that contain it keep it, and `gc` frees what no snapshot needs.

        The record is removed first, which makes the asset invisible at once; then its column. If the process dies in between,
        the remaining column is invisible and `repair` removes it.

        Raises
        ------
        NotFoundError
            If there is none of that name.
        ArgumentError
            If a dataset is named: other kinds than geometry have one asset for all datasets.
        """
        if dataset is not None:
            raise ArgumentError(f"A {self.noun} is dropped for all datasets; leave out dataset={dataset!r}.")
        catalog = catalog.session(f"drop_{self.noun}()")
        removed = self.remove(catalog, {record.uid for record in self.find(catalog, name)})
        if not removed:  # Another process has dropped or replaced it meanwhile.
            return self.drop(catalog, name, dataset)
        # Unless `restore` has brought it back meanwhile.
        columns = [record.column for record in removed if record.column]
        catalog.tables.drop_columns(CELLS, columns, partial(asset_columns, catalog))
        return dropped(removed, 0)

    def drop_datasets(self, catalog: Catalog, uids: AbstractSet[str]) -> None:
        """Forget datasets that have no record any more, where the records of assets must not name them."""

    def repair(self, catalog: Catalog, grace: timedelta) -> list[str]:
        """Remove what dead processes left in the tables; return notes."""
        return []

    def without_dataset(
        self, catalog: Catalog, uid: str, views: Sequence[Catalog]
    ) -> Callable[[Record], Record | None]:
        """Prepare a purge: write files anew without the data of a dataset, and return what changes a record; None where all of it goes.

        Parameters
        ----------
        catalog : Catalog
            At the tip; no other process writes.
        uid : str
            The dataset.
        views : sequence of Catalog
            All snapshots and the tip.
        """
        return lambda record: None if uid in record.cells_of else record

    def build_indexes(self, catalog: Catalog, records: Iterable[Record]) -> None:
        """Build the indexes of cell columns anew, after a purge has written the table of cells."""


@cache
def asset_kinds() -> tuple[AssetKind[Any], ...]:
    """Return the kinds of all wings."""
    return tuple(resolve_name(where) for wing in every_wing() for where in wing.assets.values())


def asset_kind(name: str) -> AssetKind[Any]:
    """Return one kind by its name, such as ``"results"``."""
    where = next((wing.assets[name] for wing in every_wing() if name in wing.assets), None)
    if where is None:
        names = [name for wing in every_wing() for name in wing.assets]
        raise MissingExtraError(f"No installed wing has assets of the kind {name!r}; there are {names}.")
    kind: AssetKind[Any] = resolve_name(where)
    return kind


def find_kind(source: Any) -> AssetKind[Any] | None:  # noqa: ANN401  (anything that can be added)
    """Return the kind of a source that is attached to cells; None for a source of cells."""
    kinds = (resolve_name(where) for wing in every_wing() for where in wing.assets.values())
    return next((kind for kind in kinds if kind.accepts(source)), None)


def read_assets(catalog: Catalog) -> dict[AssetKind[Any], list[Any]]:
    """Return the records of all kinds: kind -> records, oldest first."""
    return {kind: kind.read(catalog) for kind in asset_kinds()}


def read_results(catalog: Catalog) -> list[ResultRecord]:
    """Return the results of models, which queries read as members of `obsm`; an empty list where the wing is not installed."""
    with contextlib.suppress(MissingExtraError):
        return asset_kind("results").read(catalog)
    return []


def refuse_unknown_assets(catalog: Catalog, action: str) -> None:
    """Refuse what would lose assets of a kind that no installed wing has."""
    core = {LAYOUTS, *IDENTITY_TABLES, *(space.registry for space in catalog.spaces().values())}
    others = [name for name in catalog.tables.names() if name.startswith("_") and name not in core]
    unknown = [name for name in others if name not in asset_tables()]
    if unknown:
        raise MissingExtraError(
            f"{action} would lose what the tables {unknown} of {catalog.location.uri} name, and no installed wing knows them; install "
            "the package that wrote them."
        )


def dropped(records: Sequence[DatasetRecord | AssetRecord], n: int) -> "MaintenanceReport":
    """Return the report of a drop: the groups that `gc` will free."""
    groups = tuple(record.zarr_group for record in records if record.zarr_group)
    notes = ("the files stay until gc() finds that no snapshot needs them",)
    from raggedatlas.model.reports import MaintenanceReport

    return MaintenanceReport(groups=groups, n_cells=n, notes=notes)


def asset_columns(catalog: Catalog) -> set[str]:
    """Return the cell columns of all assets, as they are now."""
    catalog.tables.refresh([LISTING, *asset_tables()])
    return {record.column for records in read_assets(catalog).values() for record in records if record.column}


# ---- datasets


def read_records(catalog: Catalog) -> list[DatasetRecord]:
    """Return the records of all datasets, in the order in which they were added."""
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
            "linked": "" if (facts := source_facts(records[0])) is None else facts.address,
            "created_at": records[0].created_at,
        }
        for uid, records in group_by_dataset(read_records(catalog)).items()
    ]


def source_facts(first: DatasetRecord) -> SourceFacts | None:
    """Return what is recorded of the file that a dataset is linked to, by its first record; None where it is not linked."""
    # Most are not, and need not be parsed for it.
    return first.file_facts.linked if '"linked"' in first.facts else None


def source_rows(catalog: Catalog) -> list[dict[str, Any]]:
    """Return the files that datasets are linked to: address, size, time, and how many datasets."""
    rows: dict[str, dict[str, Any]] = {}
    for records in group_by_dataset(read_records(catalog)).values():
        facts = source_facts(records[0])
        if facts is not None:
            row = {"address": facts.address, "n_bytes": facts.n_bytes, "modified": facts.modified, "n_datasets": 0}
            rows.setdefault(facts.address, row)["n_datasets"] += 1
    return [*rows.values()]


def find_dataset(
    catalog: Catalog, uid_or_name: str, records: Iterable[DatasetRecord] | None = None
) -> list[DatasetRecord]:
    """Return the records of one dataset, by uid or by name, among some records or all."""
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
    """Changes that one commit makes to the list of datasets."""

    records: tuple[DatasetRecord, ...]  # those that become visible
    replaces: frozenset[str] = frozenset()  # uids of datasets whose records are removed


def commit_records(catalog: Catalog, choose: Callable[[list[DatasetRecord]], Commit]) -> None:
    """Make datasets visible, rename or remove them, in one commit that conflicts with every other.

    It is the last write of an `add` (its commit point). `choose` gets the records and returns the changes. If another
    writer changes the records before the commit, it is called again with the new ones, so a name or content that it
    found free is still free when the commit is done. If it raises, the records stay as they are.
    """
    tables, tried = catalog.tables, set[tuple[str, str]]()

    def attempt() -> None:
        listed = catalog.dataset_records()
        version, old = listed.version, [*listed.records]
        if any((record.uid, record.name) in tried for record in old):
            return  # The previous attempt was committed although its response was lost.
        commit = choose(old)
        fresh = pa.Table.from_pylist([record.model_dump() for record in commit.records], schema=DATASETS_SCHEMA)
        # Before the commit, whose response may be lost: the next attempt then finds these in the table. Records that keep their names are
        # changed once more instead.
        tried.update({(record.uid, record.name) for record in commit.records} - {(r.uid, r.name) for r in old})
        if not commit.records and not commit.replaces:
            return
        known = {record.zarr_group for record in old}
        if commit.replaces:
            rows = tables.at({DATASETS: version}).read(DATASETS).cast(DATASETS_SCHEMA)
            gone = pc.is_in(rows.column("uid"), value_set=pa.array(sorted(commit.replaces), pa.string()))
            tables.overwrite(DATASETS, pa.concat_tables([rows.filter(pc.invert(gone)), fresh]), version)
        elif any(record.zarr_group in known for record in commit.records):
            # Lance accepts two concurrent changes of different rows. Rewriting the first row unchanged makes them conflict.
            first = pa.Table.from_pylist([old[0].model_dump()], schema=DATASETS_SCHEMA)
            changes_first = any(record.zarr_group == old[0].zarr_group for record in commit.records)
            both = fresh if changes_first else pa.concat_tables([first, fresh])
            tables.merge(DATASETS, ["zarr_group"], both, update=True, retry=False, read_version=version)
        else:
            tables.append_alone(DATASETS, fresh, version)
        catalog.note_records(listed, datasets_from_table(fresh), commit.replaces)
        # Lance writes an overwrite as the version after the one that was read and does not check that it is the newest. If a complete purge has
        # run since and deleted that version, the datasets are still in the newest one.
        if commit.replaces:
            tables.refresh([DATASETS])
            if commit.replaces & {record.uid for record in read_records(catalog)}:
                raise ConflictError(f"{DATASETS} of {catalog.location.uri} changed")

    tables.retry(DATASETS, attempt)


def drop_dataset(catalog: Catalog, uid_or_name: str) -> "MaintenanceReport":
    """Remove a dataset from the tip; snapshots that contain it keep it, and `gc` frees what no snapshot needs.

    The record is removed first, which makes the dataset invisible at once; then its cells. If the process dies in
    between, the remaining cells are invisible and `repair` removes them.
    """
    catalog = catalog.session("drop_dataset()")
    records: list[DatasetRecord] = []

    def choose(old: list[DatasetRecord]) -> Commit:
        # By its name at the moment of the commit: another process may rename it meanwhile.
        records[:] = find_dataset(catalog, uid_or_name, old)
        return Commit((), frozenset({records[0].uid}))

    commit_records(catalog, choose)
    return dropped(records, delete_cells_of_datasets(catalog, [records[0].uid]))


def without_record(catalog: Catalog, uids: Iterable[str]) -> set[str]:
    """Return those of some datasets that have no record now; `restore` may have brought one back."""
    catalog.tables.refresh([DATASETS])
    return {*uids} - {record.uid for record in read_records(catalog)}


def delete_cells_without_record(catalog: Catalog, uids: Collection[str]) -> int:
    """Delete the cells of datasets that have no record, also at the moment of the commit; return their number."""

    def condition() -> str:
        # `restore` changes the table of cells once more after it has brought a record back, so that this conflicts.
        return in_list("dataset_uid", sorted(without_record(catalog, uids)))

    return catalog.tables.delete(CELLS, condition) if uids else 0


def delete_cells_of_datasets(catalog: Catalog, uids: Sequence[str]) -> int:
    """Delete the cells of datasets without a record, and remove the datasets from assets; return the number of cells."""
    n = delete_cells_without_record(catalog, uids)
    for kind in asset_kinds():
        kind.drop_datasets(catalog, {*uids})
    for uid in uids:
        release_lease(catalog, uid)
    return n


def purged(catalog: Catalog) -> dict[str, str]:
    """Return the log of purged datasets: uid -> time."""
    text = catalog.newest_tables().metadata(DATASETS).get(PURGED_KEY, "{}")
    return dict(read_json(dict[str, str], text, DATASETS, "table metadata", PURGED_KEY))


def was_purged(catalog: Catalog, earlier: Mapping[str, str], action: str) -> bool:
    """Return whether a purge has begun and ended since the log was as `earlier`, so that what a session has read may be deleted."""
    catalog.refuse_unfinished_purge(action)
    catalog.tables.refresh([DATASETS])
    return purged(catalog) != earlier


def read_specs(record: DatasetRecord) -> dict[str, ArraySpec]:
    """Return the array descriptions of a record: path below the group -> spec."""
    specs = {path: ArraySpec.from_json(json.dumps(spec)) for path, spec in record.array_specs.items()}
    for spec in specs.values():
        # For its errors: damaged codecs are refused here, and not by a later read.
        try:
            array_decoder(spec)
        except AtlasError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CorruptError(
                f"The description of the array {spec.path} does not parse ({error!r}). Run validate()."
            ) from error
    return specs


def read_links(record: DatasetRecord) -> dict[str, Link]:
    """Return what links arrays of a record to a file outside of the atlas: path below the group -> link."""
    # Most records have none, and need not be parsed for it.
    if '"linked"' not in record.arrays:
        return {}
    return {path: spec.linked for path, spec in read_specs(record).items() if spec.linked is not None}


def array_columns(specs: Mapping[str, ArraySpec], checksums: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a record, as JSON, that describe its arrays: what `read_specs` and `array_checksums` read."""
    described = {path: json.loads(spec.to_json()) for path, spec in specs.items()}
    return {"arrays": json.dumps(described, sort_keys=True), "checksums": json.dumps(checksums, sort_keys=True)}


def array_readers(catalog: Catalog, record: DatasetRecord) -> dict[str, ArrayReader]:
    """Return a reader of every array of a record, with its recorded checksum: path below the group -> reader.

    Column-sorted arrays in a file that may not be read are left out where all values are in the rows; any other array
    in such a file raises `StoreError`.
    """
    checksums, specs = record.array_checksums, read_specs(record)
    found: dict[str, ArrayReader] = {}
    for path, spec in specs.items():
        try:
            found[path] = open_array(catalog, record, spec, checksums.get(path, ""))
        except StoreError:
            if not path.startswith("csc/") or column_layers(specs):
                raise
    if has_complete_rows(record, specs):
        shape, path = (record.n_entries,), f"{record.zarr_group}/csr/indices"
        columns = ArraySpec(path, shape, "uint32", (record.n_features,), None, COLUMNS_CODEC)
        found["csr/indices"] = ArrayReader(catalog.arrays, columns)
    return with_transposed(found, record.zarr_group)


def with_transposed(readers: Mapping[str, ArrayReader], group: str) -> dict[str, ArrayReader]:
    """Return the readers of a group, and those that read its rows from its columns, where it has only these."""
    found = dict(readers)
    layers = column_layers(readers)
    if layers:
        of_rows = partial(
            TransposedReader.of, row_bounds=readers["csr/indptr"], column_bounds=readers["csc/indptr"], rows=readers["csc/indices"]
        )  # fmt: skip
        found["csr/indices"] = of_rows(f"{group}/csr/indices")
        for layer in layers:
            found[f"csr/layers/{layer}"] = of_rows(f"{group}/csr/layers/{layer}", values=readers[f"csc/layers/{layer}"])
    return found


def column_layers(paths: Collection[str]) -> list[str]:
    """Return the layers of a group that is stored by column alone, as one that is linked to a CSC matrix; else none."""
    if "csr/indices" in paths or not {"csr/indptr", "csc/indptr", "csc/indices"} <= {*paths}:
        return []
    names = [path.removeprefix("csc/layers/") for path in paths if path.startswith("csc/layers/")]
    return [name for name in names if f"csr/layers/{name}" not in paths]


def has_complete_rows(record: DatasetRecord, paths: Collection[str]) -> bool:
    """Return whether a sparse group has an entry for every column of every row, and so no array of columns: it is linked to a dense matrix, or was."""
    complete = record.n_entries == record.n_cells * record.n_features > 0
    return complete and "csr/indptr" in paths and "csr/indices" not in paths and not column_layers(paths)


def open_array(catalog: Catalog, record: DatasetRecord, spec: ArraySpec, checksum: str = "") -> ArrayReader:
    """Return the reader of one array of a record; see `array_readers`."""
    link = spec.linked
    source = None if link is None else catalog.sources.open_link(link, record.uid, record.name or record.uid)
    return ArrayReader(catalog.arrays, spec, checksum=checksum, source=source)
