"""The registry of results: read it, find one, change it by a checked commit, and take away what nobody names."""

from collections.abc import Callable
from datetime import timedelta

from raggedatlas.catalog.catalog import CELLS, RESULTS, Catalog
from raggedatlas.catalog.datasets import read_records
from raggedatlas.catalog.geometries import read_all_geometries
from raggedatlas.catalog.leases import GRACE, lease_alive
from raggedatlas.catalog.registry import AssetTable, change_assets, read_assets
from raggedatlas.errors import NotFoundError
from raggedatlas.model.assets import (
    RESULTS_SCHEMA,
    ResultRecord,
    result_columns,
)
from raggedatlas.model.reports import MaintenanceReport

ENTRIES = AssetTable(RESULTS, ResultRecord, RESULTS_SCHEMA)


def read_results(catalog: Catalog) -> list[ResultRecord]:
    """Read the results of an atlas, in the order of adding; none where the atlas, or the snapshot, has no such table."""
    return read_assets(catalog, ENTRIES)


def asset_uids(catalog: Catalog) -> set[str]:
    """Give the uids of all datasets and results, which are those of the groups that they need."""
    shapes = {record.uid for record in read_all_geometries(catalog)}
    return shapes | {record.uid for record in read_records(catalog)} | {record.uid for record in read_results(catalog)}


def find_result(catalog: Catalog, name: str) -> ResultRecord:
    """Find one result by its name.

    Raises
    ------
    NotFoundError
        If there is none; the message lists those there are.
    """
    records = read_results(catalog)
    for record in records:
        if record.name == name:
            return record
    at = "" if catalog.snapshot is None else f" at snapshot {catalog.snapshot.version}"
    raise NotFoundError(
        f"{catalog.location.uri} has no result {name!r}{at}; it has {[record.name for record in records]}. Add one with "
        "atlas.add(ResultDataset({}, folder), name=...), and take a snapshot."
    )


def change_results(catalog: Catalog, change: Callable[[list[ResultRecord]], list[ResultRecord]]) -> None:
    """Replace the list of results by a function of itself, again when another writer came between.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    change : function
        Gets the list as it stands and returns the new one, or the same object for "nothing to do"; its errors change nothing.
    """
    change_assets(catalog, ENTRIES, change)


def drop_result(catalog: Catalog, name: str) -> MaintenanceReport:
    """Take a result out of the atlas from now on; snapshots that hold it keep it, and `gc` frees what none holds.

    The row goes first, which makes the result invisible at once; then its column. A process that dies in between leaves a
    column that nobody sees, and `repair` removes it.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    name : str
        The result.

    Raises
    ------
    NotFoundError
        If there is none of that name.
    """
    catalog.require_tip("drop_result")
    find_result(catalog, name)
    gone: list[ResultRecord] = []

    def without(old: list[ResultRecord]) -> list[ResultRecord]:
        gone[:] = [record for record in old if record.name == name]
        return [record for record in old if record.name != name] if gone else old

    change_results(catalog, without)
    catalog.tables.drop_columns(CELLS, [record.column for record in gone])
    notes = ("the values stay until gc() finds that no snapshot needs them",)
    return MaintenanceReport(groups=tuple(r.zarr_group for r in gone if r.zarr_group), notes=notes)


def visible_columns(catalog: Catalog) -> dict[str, ResultRecord]:
    """Give the cell columns of the results that there are: column -> result."""
    return {record.column: record for record in read_results(catalog)}


def orphaned_columns(catalog: Catalog, grace: timedelta = GRACE) -> list[str]:
    """Find cell columns that were made for a result which never became visible, or is gone, and that nobody writes.

    The registry is read last, so that a result which is committed meanwhile is seen.
    """
    marked = result_columns(catalog.tables.schema(CELLS))
    idle = {column: uid for column, (uid, _) in marked.items() if not lease_alive(catalog, uid, grace)}
    known = {record.uid for record in read_results(catalog)} if idle else set()
    return [column for column, uid in idle.items() if uid not in known]
