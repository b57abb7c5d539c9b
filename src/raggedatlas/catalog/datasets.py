"""The inventory of datasets: read it, find one, commit one."""

import json
from collections.abc import Iterable, Sequence

import pyarrow as pa

from raggedatlas.catalog.catalog import DATASETS, Catalog
from raggedatlas.errors import NotFoundError
from raggedatlas.model.records import DATASETS_SCHEMA, DatasetRecord

PURGED_KEY = "raggedatlas.purged"
"""Table metadata of `datasets`: JSON object, purged dataset uid -> time."""


def read_records(catalog: Catalog) -> list[DatasetRecord]:
    """Read the records of every dataset, in the order in which they were added."""
    memo = catalog._memo.get("records")
    if isinstance(memo, list):
        return memo
    rows = catalog.tables.read(DATASETS).to_pylist()
    records = [DatasetRecord(**{k: v for k, v in row.items() if v is not None}) for row in rows]
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


def commit_records(catalog: Catalog, records: Sequence[DatasetRecord]) -> None:
    """Make datasets visible: one append, the last write of an `add` (its commit point)."""
    rows = [record.model_dump() for record in records]
    catalog.tables.append(DATASETS, pa.Table.from_pylist(rows, schema=DATASETS_SCHEMA))


def purged(catalog: Catalog) -> dict[str, str]:
    """Return the purged datasets: uid -> time, as the atlas's own log keeps them."""
    log: dict[str, str] = json.loads(catalog.tip().tables.metadata(DATASETS).get(PURGED_KEY, "{}"))
    return log
