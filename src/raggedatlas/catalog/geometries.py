"""The registry of geometry stores: read it, find them, change it by a checked commit, take away what nobody names."""

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import CELLS, GEOMETRY, Catalog
from raggedatlas.catalog.datasets import find_dataset, read_records
from raggedatlas.catalog.leases import GRACE, lease_alive
from raggedatlas.catalog.registry import AssetTable, change_assets, read_assets
from raggedatlas.errors import ConflictError, NotFoundError, QueryError
from raggedatlas.model.assets import GEOMETRY_SCHEMA, GeometryRecord
from raggedatlas.model.pointers import PointerKind, pointer_columns
from raggedatlas.model.reports import MaintenanceReport
from raggedatlas.store.sql import is_not_null
from raggedatlas.store.tables import Tables, update_columns

ENTRIES = AssetTable(GEOMETRY, GeometryRecord, GEOMETRY_SCHEMA)


def read_all_geometries(catalog: Catalog) -> list[GeometryRecord]:
    """Read all rows of the registry, in the order of adding; none where the atlas, or the snapshot, has no such table."""
    return read_assets(catalog, ENTRIES)


def read_geometries(catalog: Catalog) -> list[GeometryRecord]:
    """Read the geometry stores that are visible: those of which a dataset is in the inventory."""
    found = read_all_geometries(catalog)
    known = {record.uid for record in read_records(catalog)} if found else set()
    return [record for record in found if is_visible(record, known)]


def is_visible(record: GeometryRecord, known: AbstractSet[str]) -> bool:
    """Tell whether the inventory knows a dataset of a store; that of the store's own new cells must be known, where there are any."""
    own = record.cells_of
    return record.uid in known if record.uid in own else bool(known & set(own))


def find_geometries(catalog: Catalog, name: str) -> list[GeometryRecord]:
    """Find the stores that a name means, over all datasets: those called so, and those of the feature space called so.

    A dataset with a store of the very name gives no other store, so that its outlines are not mixed with its nuclei. Of a dataset
    without one, every store of the feature space is meant; `rows_of_stores` refuses a cell that has shapes in two of them.

    Raises
    ------
    NotFoundError
        If there is none; the message lists what there is.
    """
    records = read_geometries(catalog)
    having = {uid for record in records if record.name == name for uid in record.cells_of}
    found = [
        record
        for record in records
        if record.name == name or (record.space == name and not having & set(record.cells_of))
    ]
    if found:
        return found
    at = "" if catalog.snapshot is None else f" at snapshot {catalog.snapshot.version}"
    there = sorted({record.name for record in records})
    raise NotFoundError(
        f"{catalog.location.uri} has no geometry {name!r}{at}; it has {there}. Add one with "
        "atlas.add('shapes.zv', link=..., space=...), and take a snapshot."
    )


def rows_of_stores(
    records: Sequence[GeometryRecord], table: pa.Table, name: str
) -> list[tuple[GeometryRecord, NDArray[np.int64]]]:
    """Find the rows of cells whose shapes lie in each store.

    Parameters
    ----------
    records : sequence of GeometryRecord
        Stores that `find_geometries` found.
    table : pyarrow.Table
        Cells, with ``<column>.zarr_group`` of every record, and ``uid`` for the message.
    name : str
        What was asked for.

    Returns
    -------
    list of (GeometryRecord, (n,) int64)
        Stores that have some of the rows.

    Raises
    ------
    QueryError
        If a cell has shapes in several stores.
    """
    found = []
    taken = np.full(table.num_rows, -1, np.int64)
    for i, record in enumerate(records):
        groups = table.column(f"{record.column}.zarr_group")
        here = np.flatnonzero(pc.equal(groups, record.zarr_group).fill_null(fill_value=False).to_numpy())
        if (taken[here] >= 0).any():
            row = int(here[taken[here] >= 0][0])
            names = sorted([records[taken[row]].name, record.name])
            # columns that wait to be read leave the uid out
            cell = repr(table.column("uid")[row].as_py()) if "uid" in table.column_names else f"in row {row}"
            raise QueryError(
                f"The cell {cell} has the geometries {names} of the feature space {name!r}; name one "
                "of them with space=..., or choose cells that have one of them, with where(...) first."
            )
        taken[here] = i
        if len(here):
            found.append((record, here))
    return found


def change_geometries(
    catalog: Catalog, change: Callable[[list[GeometryRecord]], list[GeometryRecord]]
) -> list[GeometryRecord]:
    """Replace the rows of the registry by a function of themselves, again when another writer came between.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    change : function
        Gets the list as it stands and returns the new one, or the same object for "nothing to do"; its errors change nothing.

    Returns
    -------
    list of GeometryRecord
        The list as it stands now.
    """
    return change_assets(catalog, ENTRIES, change)


def drop_geometry(catalog: Catalog, name: str, dataset: str | None = None) -> MaintenanceReport:
    """Take geometry out of the atlas; snapshots that hold it keep it, and `gc` frees what none holds.

    The row goes first, which makes the shapes invisible at once; then the pointers of the cells. A process that dies in between
    leaves pointers that nobody follows, and `repair` removes them.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    name : str
        Its name, or its feature space.
    dataset : str or None
        Only of this dataset, by name or uid; None takes every store of the name.

    Raises
    ------
    NotFoundError
        If there is none.
    QueryError
        If its objects became the cells of a dataset: that is dropped as a whole.
    """
    catalog.require_tip("drop_geometry")
    records = find_geometries(catalog, name)
    names = sorted({record.name for record in records})
    if len(names) > 1:
        # removal takes what is named and nothing more; only questions are answered over all names of a feature space
        records = [record for record in records if record.name == name]
        if not records:
            raise NotFoundError(f"Several geometries are of the feature space {name!r}: {names}; name one of them.")
    if dataset is not None:
        uid = find_dataset(catalog, dataset)[0].uid
        records = [record for record in records if uid in record.cells_of]
        if not records:
            raise NotFoundError(f"The dataset {dataset!r} has no geometry {name!r}.")
    own = next((r for r in read_records(catalog) if r.zarr_group in {record.zarr_group for record in records}), None)
    if own is not None:
        raise QueryError(
            f"The shapes {name!r} are the cells of the dataset {own.name or own.uid!r}, which would be left without any; take both out "
            f"with drop_dataset({own.uid!r})."
        )
    gone = {record.uid for record in records}
    change_geometries(catalog, lambda old: [record for record in old if record.uid not in gone])
    clear_orphaned_pointers(catalog)
    return MaintenanceReport(
        groups=tuple(record.zarr_group for record in records),
        n_cells=sum(record.n_cells for record in records),
        notes=("the shapes stay until gc() finds that no snapshot needs them",),
    )


def remove_datasets_from_geometries(catalog: Catalog, uids: Iterable[str]) -> int:
    """Take datasets that are gone out of the registry; a store without any other goes with them. Return how many stores changed."""
    gone = set(uids)
    if not gone or not any(gone & set(record.cells_of) for record in read_all_geometries(catalog)):
        return 0
    changed: list[str] = []

    def without(old: list[GeometryRecord]) -> list[GeometryRecord]:
        changed[:] = [record.uid for record in old if gone & set(record.cells_of)]
        kept = ((record, {u: n for u, n in record.cells_of.items() if u not in gone}) for record in old)
        left = [record.model_copy(update={"datasets": json.dumps(cells)}) for record, cells in kept if cells]
        return left if changed else old

    change_geometries(catalog, without)
    return len(changed)


def find_deleted_datasets(catalog: Catalog, grace: timedelta = GRACE) -> list[str]:
    """Find datasets that the registry names and the inventory does not, and that nobody is adding. The inventory is read last."""
    idle = [record for record in read_all_geometries(catalog) if not lease_alive(catalog, record.uid, grace)]
    known = {record.uid for record in read_records(catalog)}
    return sorted({uid for record in idle for uid in record.cells_of} - known)


def geometry_columns(schema: pa.Schema, space: str | None = None) -> list[str]:
    """Name the cell columns that hold geometry pointers, of one feature space or of all."""
    found = pointer_columns(schema).items()
    return [n for n, (of, kind) in found if kind is PointerKind.GEOMETRY and space in {None, of}]


def groups_in_use(catalog: Catalog, groups: Iterable[str], grace: timedelta = GRACE) -> set[str]:
    """Tell which groups have a row in the registry or are being written. The registry is read last."""
    candidates = set(groups)
    alive = {group for group in candidates if lease_alive(catalog, group.split("/")[0], grace)}
    return alive | (candidates & {record.zarr_group for record in read_all_geometries(catalog)})


def clear_orphaned_pointers(catalog: Catalog, grace: timedelta = GRACE) -> int:
    """Remove pointers that lead to no store, and columns that hold none and are no feature space's own; return how many cells lost one."""
    n_cleared = 0
    for column in geometry_columns(catalog.tables.schema(CELLS)):
        with contextlib.suppress(ConflictError):
            n_cleared += catalog.tables.retry(CELLS, lambda column=column: _clear(catalog, column, grace))  # type: ignore[misc]
    named = {record.column for record in read_all_geometries(catalog)}
    spare = [c for c in geometry_columns(catalog.tables.schema(CELLS)) if c not in named and c not in catalog.spaces()]
    idle = [c for c in spare if not catalog.tables.count(CELLS, is_not_null(f"{c}.zarr_group"))]
    if idle:
        catalog.tables.drop_columns(CELLS, idle)
    return n_cleared


def _clear(catalog: Catalog, column: str, grace: timedelta) -> int:
    at = catalog.tables.version(CELLS)
    then = Tables(catalog.tables.location, {CELLS: at})
    if column not in then.schema(CELLS).names:
        return 0
    rows = then.read(CELLS, ["uid", f"{column}.zarr_group"], is_not_null(f"{column}.zarr_group"))
    groups = rows.column(1)
    live = groups_in_use(catalog, pc.unique(groups).to_pylist(), grace)
    dead = rows.filter(pc.invert(pc.is_in(groups, value_set=pa.array(sorted(live), pa.string()))))
    if dead.num_rows:
        field = then.schema(CELLS).field(column)
        update_columns(
            catalog.tables, CELLS, "uid",
            pa.table([dead.column(0), pa.nulls(dead.num_rows, field.type)], schema=pa.schema([dead.schema.field(0), field])), at,
        )  # fmt: skip
    return int(dead.num_rows)
