"""The inventory of datasets: read it, find one, commit one."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.catalog import DATASETS, Catalog
from raggedatlas.errors import ConflictError, NotFoundError
from raggedatlas.model.records import DATASETS_SCHEMA, DatasetRecord, datasets_from_table, read_json
from raggedatlas.store.arrays import ArraySpec
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader
from raggedatlas.store.tables import Tables

PURGED_KEY = "raggedatlas.purged"
"""Table metadata of `datasets`: JSON object, purged dataset uid -> time."""


def read_records(catalog: Catalog) -> list[DatasetRecord]:
    """Read the records of every dataset, in the order in which they were added.

    Raises
    ------
    CorruptError
        If one is damaged; the message names its row and field.
    """
    memo = catalog._memo.get("records")
    if isinstance(memo, list):
        return memo
    records = datasets_from_table(catalog.tables.read(DATASETS))
    if catalog.snapshot is not None:
        catalog._memo["records"] = records
    return records


def group_by_dataset(records: Iterable[DatasetRecord]) -> dict[str, list[DatasetRecord]]:
    """Put the records of one dataset together: uid -> records."""
    found: dict[str, list[DatasetRecord]] = {}
    for record in records:
        found.setdefault(record.uid, []).append(record)
    return found


def find_dataset(catalog: Catalog, uid_or_name: str) -> list[DatasetRecord]:
    """Return the records of one dataset, by uid or by name.

    Raises
    ------
    NotFoundError
        If no dataset, or more than one, goes by that name; the message lists them.
    """
    datasets = group_by_dataset(read_records(catalog))
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
    """What one commit does to the inventory.

    Parameters
    ----------
    records : tuple of DatasetRecord
        Records that become visible.
    replaces : frozenset of str
        Uids of datasets whose records go.
    """

    records: tuple[DatasetRecord, ...]
    replaces: frozenset[str] = frozenset()


def commit_records(catalog: Catalog, choose: Callable[[list[DatasetRecord]], Commit]) -> None:
    """Make datasets visible, in one commit: the last write of an `add` (its commit point).

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    choose : function
        Gets the inventory and returns what to do. When another writer changes the inventory before the commit, it is called again
        with the changed inventory, so a name or content that it found free is free when the commit is done. Its errors
        change nothing.

    Raises
    ------
    ConflictError
        When other writers were faster too often, or a purge is unfinished.
    """
    catalog.refuse_unfinished_purge("add()")
    tables, tried = Tables(catalog.tables.location), set[str]()

    def once() -> None:
        at = tables.version(DATASETS)
        rows = Tables(tables.location, {DATASETS: at}).read(DATASETS).cast(DATASETS_SCHEMA)
        old = datasets_from_table(rows)
        if any(record.uid in tried for record in old):
            return  # The commit before was done although its answer was lost.
        commit = choose(old)
        fresh = pa.Table.from_pylist([record.model_dump() for record in commit.records], schema=DATASETS_SCHEMA)
        tried.update(record.uid for record in commit.records)
        if not commit.records:
            return
        if commit.replaces or not old:
            kept = rows.filter(
                pc.invert(pc.is_in(rows.column("uid"), value_set=pa.array(sorted(commit.replaces), pa.string())))
            )
            if not tables.overwrite_if(DATASETS, pa.concat_tables([kept, fresh]), at):
                raise ConflictError(f"{DATASETS} of {catalog.location.uri} changed")
            return
        # Lance lets two appends to one version pass, so the first row is written again as it is: over this row all commits collide.
        both = pa.concat_tables([rows.slice(0, 1), fresh])
        tables.merge(DATASETS, ["zarr_group"], both, update=True, retry=False, read_version=at)

    tables.retry(DATASETS, once)


def purged(catalog: Catalog) -> dict[str, str]:
    """Return the purged datasets: uid -> time, as the atlas's own log keeps them."""
    text = catalog.tip().tables.metadata(DATASETS).get(PURGED_KEY, "{}")
    return dict(read_json(dict[str, str], text, DATASETS, "table metadata", PURGED_KEY))


def read_specs(record: DatasetRecord) -> dict[str, ArraySpec]:
    """Read the array descriptions of a record: path below the group -> spec.

    Raises
    ------
    CorruptError, LimitError, SchemaError
        If one of them makes no sense.
    """
    return {path: ArraySpec.from_json(json.dumps(spec)) for path, spec in record.array_specs.items()}


def array_readers(arrays: Location, record: DatasetRecord) -> dict[str, ArrayReader]:
    """Make a reader of every array of a record, with the checksum that was recorded for it: path below the group -> reader.

    Raises
    ------
    CorruptError, LimitError, SchemaError
        If the record describes arrays that make no sense.
    """
    checksums = record.array_checksums
    return {
        path: ArrayReader(arrays, spec, checksum=checksums.get(path, "")) for path, spec in read_specs(record).items()
    }
