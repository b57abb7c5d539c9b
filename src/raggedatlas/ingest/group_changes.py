"""Changes of the arrays of a dataset that is there: the metadata of its groups, and all of its records in one commit."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from raggedatlas.catalog.assets import array_columns, read_specs
from raggedatlas.catalog.catalog import DATASETS, Catalog
from raggedatlas.errors import NotFoundError
from raggedatlas.model.arrays import ArraySpec, shards_path
from raggedatlas.model.records import DATASETS_SCHEMA, DatasetRecord, entries_from_table
from raggedatlas.store.arrays import GroupMetadata, describe_group, read_group
from raggedatlas.store.sql import equals


@dataclass(frozen=True)
class NewArrays:
    """Arrays of a group that its record is to get: by path below the group, descriptions and checksums."""

    specs: Mapping[str, ArraySpec] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)

    def only(self, paths: Collection[str]) -> "NewArrays":
        """Return some of them."""
        kept = {key for path in paths for key in (path, shards_path(path))}
        return NewArrays(
            {path: self.specs[path] for path in paths}, {k: sha for k, sha in self.checksums.items() if k in kept}
        )

    def add_to(self, record: DatasetRecord) -> DatasetRecord:
        """Return a record with these arrays, in place of those that it has at the same paths."""
        specs, checksums = read_specs(record) | dict(self.specs), record.array_checksums | dict(self.checksums)
        return record.model_copy(update=array_columns(specs, checksums))


def change_records(
    catalog: Catalog, uid: str, call: str, change: Callable[[list[DatasetRecord]], list[DatasetRecord]]
) -> None:
    """Replace records of a dataset in one commit, after their arrays are listed in the metadata of their groups.

    `change` gets the records as they are, none if the dataset was dropped, and returns those that differ. It is called
    again where another commit comes first. `call` names the caller's call in messages. Raises `ConflictError` if a
    purge is unfinished, or other writers win every retry.
    """

    def once() -> None:
        version = catalog.tables.version(DATASETS)
        fresh = change(records_of(catalog.with_tables(catalog.tables.at({DATASETS: version})), uid))
        for record in fresh:
            metadata = group_metadata_of(catalog, record)
            # List the arrays of the group in its metadata, unless each has metadata of its own. Before the record, and again whenever
            # another commit came first: so the one that comes last lists the arrays of all.
            if metadata.listed is not None:
                # Older snapshots name the files from before the dataset came into a shared bundle.
                describe_group(
                    catalog.arrays, record.zarr_group, metadata.attributes, read_specs(record), metadata.listed
                )
        if fresh:
            rows = pa.Table.from_pylist([record.model_dump() for record in fresh], schema=DATASETS_SCHEMA)
            catalog.tables.merge(DATASETS, ["zarr_group"], rows, update=True, retry=False, read_version=version)

    catalog.refuse_unfinished_purge(call)
    catalog.tables.retry(DATASETS, once)


def records_of(catalog: Catalog, uid: str) -> list[DatasetRecord]:
    """Return the records of a dataset as they are now, the first one first; none if it was dropped."""
    return entries_from_table(DatasetRecord, catalog.tables.read(DATASETS, where=equals("uid", uid)), DATASETS)


def group_metadata_of(catalog: Catalog, record: DatasetRecord) -> GroupMetadata:
    """Return the metadata of a group, or those that it gets, where it has none outside of a shared bundle."""
    try:
        return read_group(catalog.arrays, record.zarr_group)
    except NotFoundError:
        kind = catalog.space(record.feature_space).kind.value
        return GroupMetadata({"raggedatlas": {"feature_space": record.feature_space, "kind": kind}}, {})
