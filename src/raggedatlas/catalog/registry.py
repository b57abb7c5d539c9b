"""Registries of what is added beside datasets, geometry and results: read as they stand, changed by a checked commit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import pyarrow as pa

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import ConflictError, StoreError
from raggedatlas.model.records import Record, entries_from_table, entries_to_table
from raggedatlas.store.tables import Tables


@dataclass(frozen=True)
class AssetTable(Generic[Record]):
    """A registry: a table of which each row is one record.

    Parameters
    ----------
    table : str
        Its name.
    record : type
        What a row is.
    schema : pyarrow.Schema
        Of the table.
    """

    table: str
    record: type[Record]
    schema: pa.Schema


def read_assets(catalog: Catalog, of: AssetTable[Record]) -> list[Record]:
    """Read all rows of a registry, in the order of adding; none where the atlas, or the snapshot, has no such table."""
    memo = catalog._memo.get(of.table)
    if isinstance(memo, list):
        return memo
    found = (
        entries_from_table(of.record, catalog.tables.read(of.table), of.table) if catalog.tables.has(of.table) else []
    )
    if catalog.snapshot is not None:
        catalog._memo[of.table] = found
    return found


def change_assets(
    catalog: Catalog, of: AssetTable[Record], change: Callable[[list[Record]], list[Record]]
) -> list[Record]:
    """Replace the rows of a registry by a function of themselves, again when another writer came between.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    of : AssetTable
        The registry; its table is made where there is none.
    change : function
        Gets the list as it stands and returns the new one, or the same object for "nothing to do"; its errors change nothing.

    Returns
    -------
    list of records
        The list as it stands now.

    Raises
    ------
    ConflictError
        When it has lost too often, or a purge is unfinished.
    """
    catalog.refuse_unfinished_purge("A write")
    tables = Tables(catalog.tables.location)
    if not tables.has(of.table):
        try:
            tables.create(of.table, of.schema)
        except StoreError:
            if not tables.has(of.table):
                raise

    def once() -> list[Record]:
        at = tables.version(of.table)
        old = entries_from_table(of.record, Tables(tables.location, {of.table: at}).read(of.table), of.table)
        new = change(old)
        if new is not old and not tables.overwrite_if(of.table, entries_to_table(new, of.schema), at):
            raise ConflictError(f"{of.table} of {catalog.location.uri} changed")
        return new

    return tables.retry(of.table, once)
