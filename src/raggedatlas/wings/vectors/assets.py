"""Geometry of cells as assets of an atlas: their table, and what checks, purges and repairs do with it."""

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import (
    GRACE,
    AssetKind,
    alive_among,
    asset_columns,
    dropped,
    find_dataset,
    read_records,
    without_record,
)
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.cells import in_datasets
from raggedatlas.catalog.inventory import Inventory
from raggedatlas.catalog.versions import UID
from raggedatlas.errors import AtlasError, ConflictError, NotFoundError, QueryError, StoreError
from raggedatlas.formats.containers import HDF5_ENDINGS
from raggedatlas.model.assets import GEOMETRY_SCHEMA, GeometryRecord, without_deleted
from raggedatlas.model.spaces import AXES, geometry_columns, pointer_columns
from raggedatlas.model.validation import Problem
from raggedatlas.store.location import Location, as_path
from raggedatlas.store.sql import equals, is_not_null
from raggedatlas.store.tables import LISTING, update_columns

if TYPE_CHECKING:
    from raggedatlas.model.reports import MaintenanceReport


_OBJECTS = {"raggedatlas.wings.vectors.geometry": "Geometry", "raggedatlas.wings.vectors.shapes": "Shapes"}
"""Modules -> class of objects in memory; before a module is imported there are no objects of its class."""

SHAPE_ENDINGS = (".geojson", ".geoparquet", ".obj", ".parquet", ".ply", ".stl")
"""Endings of files of shapes and points, as converters have them, but for tables of text."""

_ELEMENTS = ("points", "shapes")
"""Folders of SpatialData whose elements are geometry."""


class GeometryKind(AssetKind[GeometryRecord]):
    """Geometry stores whose objects are cells."""

    noun = "geometry"
    record = GeometryRecord
    schema = GEOMETRY_SCHEMA
    columns = (
        "uid", "name", "space", "types", "axes", "n_cells", "datasets", "n_objects", "n_vertices", "n_levels", "bounds", "n_bytes",
        "layout", "source", "created_at",
    )  # fmt: skip
    hint = "atlas.add('shapes.zv', link=..., space=...)"
    attachment = "raggedatlas.wings.vectors.attachment:geometry_attachment"

    def accepts(self, source: Any) -> bool:  # noqa: ANN401  (anything that can be added)
        """Return whether something is geometry: shapes in memory, or a zarr-vectors store, shapes or points by path or URI.

        Raises `StoreError` if an object store cannot be asked; anything else without a readable root is not geometry.
        """
        if not isinstance(source, str | os.PathLike):
            return any(
                isinstance(source, getattr(sys.modules[m], name)) for m, name in _OBJECTS.items() if m in sys.modules
            )
        place = as_path(source)
        if place.suffix.lower() in SHAPE_ENDINGS:
            return True
        # Named by the format, so that other folders need no import of converters. Members of a remote folder would be
        # listed; its root tells below what it is.
        in_store = isinstance(place, Path) and any((place / kind).is_dir() for kind in _ELEMENTS)
        if place.parent.name in _ELEMENTS or in_store:
            from raggedatlas.wings.vectors.converters.geospatial import is_spatialdata

            if is_spatialdata(place):
                return True
        # The ending of a file tells without a request that it is no store.
        if isinstance(place, Location) and (place.is_web or place.suffix in HDF5_ENDINGS):
            return False
        try:
            attributes = json.loads((place / "zarr.json").read_bytes())["attributes"]
            return isinstance(attributes.get("zarr_vectors"), Mapping) or (
                isinstance(place, Location) and "spatialdata_attrs" in attributes
            )
        # A store that does not answer would only be asked, and waited for, again.
        except StoreError:
            raise
        # What has no readable root is left to `open_source`, which names what is wrong with it.
        except (AtlasError, OSError, ValueError, LookupError, TypeError):
            return False

    def is_visible(self, record: GeometryRecord, datasets: AbstractSet[str]) -> bool:
        """Return whether the atlas contains a dataset of a store; if the store's objects are the cells of a dataset, that one."""
        own = record.cells_of
        return record.uid in datasets if record.uid in own else bool(datasets & set(own))

    def find(self, catalog: Catalog, name: str) -> list[GeometryRecord]:
        """Return the stores of a name or feature space over all datasets; a name that matches none is refused.

        If a dataset has a store with exactly this name, its other stores are not returned, so that cell outlines are
        not mixed with nuclei. For other datasets all stores of the feature space are returned; `rows_of_stores` refuses
        a cell that has shapes in two of them.
        """
        records = self.visible(catalog)
        having = {uid for record in records if record.name == name for uid in record.cells_of}
        matches = [
            record
            for record in records
            if record.name == name or (record.space == name and not having & set(record.cells_of))
        ]
        return matches or self.refuse(catalog, name)

    def facts(self, record: GeometryRecord) -> dict[str, Any]:
        """Return what is listed of a store."""
        shown = {"types": ", ".join(record.types), "axes": "".join(record.axes), "bounds": record.extent}
        return record.model_dump() | shown

    def describe(self, row: Mapping[Any, Any]) -> str:
        """Summarize the shapes in a few words."""
        return f"{row['types']} of {row['datasets']}, {row['n_vertices']:,} vertices"

    def digest(self, record: GeometryRecord) -> str:
        """Return the recorded hash of the files of a store."""
        return record.digest

    def drop_call(self, record: GeometryRecord) -> str:
        """Return the call that drops a store."""
        return f"drop_geometry({record.name!r})"

    def check_records(self, catalog: Catalog, records: Sequence[GeometryRecord]) -> list[Problem]:
        """Check that names are unique in each dataset, and that every store has its column and feature space."""
        schema, spaces = catalog.tables.schema(CELLS), catalog.spaces()
        pointers, columns = pointer_columns(schema), set(geometry_columns(schema))
        problems = []
        for (name, uid), n in Counter((r.name, uid) for r in records for uid in r.cells_of).items():
            if n > 1:
                text = f"{n} stores called {name!r} have shapes of the dataset {uid}"
                problems.append(Problem("duplicate-geometry", "must", name, text, "Run restore() of a snapshot."))
        for record in records:
            if record.column not in columns or pointers[record.column][0] != record.space:
                text = f"the cells have no column {record.column!r} of pointers into {record.space!r}"
                problems.append(self.problem(record, "geometry-column", text))
            if record.space not in spaces:
                text = f"its feature space {record.space!r} is unknown"
                problems.append(self.problem(record, "unknown-space", text))
            if record.zarr_group != f"{record.uid}/{record.space}":
                problems.append(self.problem(record, "group-name", f"the group is not {record.uid}/{record.space}"))
        return problems

    def check_cells(self, catalog: Catalog, records: Sequence[GeometryRecord], *, values: bool) -> list[Problem]:
        """Check every visible store's root, and the pointers of the cells to it.

        Pointers to an unregistered store are not a problem: nothing follows them, and `repair` removes them. The rules
        are ``missing-store``, ``geometry-count``, ``geometry-box`` and ``geometry-object``.
        """
        known = {record.uid for record in read_records(catalog)}
        schema = catalog.tables.schema(CELLS)
        problems = []
        for record in records:
            if not self.is_visible(record, known) or record.column not in schema.names:
                continue
            try:
                catalog.arrays.child(*record.zarr_group.split("/")).read_bytes("zarr.json")
            except AtlasError as error:
                problems.append(self.problem(record, "missing-store", f"its root cannot be read: {error}"))
            where = equals(f"{record.column}.zarr_group", record.zarr_group)
            rows = catalog.tables.read(CELLS, ["dataset_uid", record.column], where)
            rows = rows.filter(in_datasets(rows, known))
            found = {e["values"]: e["counts"] for e in pc.value_counts(rows.column("dataset_uid")).to_pylist()}
            problems += self.check_counts(catalog, record, found, known)
            pointers = rows.column(1).combine_chunks()
            ids = pc.struct_field(pointers, "object_id")
            n_twice = len(ids) - pc.count_distinct(ids, mode="all").as_py()
            level = pc.fill_null(pc.struct_field(pointers, "level"), -1).to_numpy()
            bad = ids.null_count + int(np.count_nonzero((level < 0) | (level >= record.n_levels)))
            if n_twice or bad:
                text = f"{n_twice:,} cells share an object with another cell, {bad:,} have no object or a level that does not exist"
                problems.append(self.problem(record, "geometry-object", text))
            wrong = 0
            for axis in AXES:
                least, greatest = (
                    pc.struct_field(pointers, f"{axis}_{end}").to_numpy(zero_copy_only=False) for end in ("min", "max")
                )
                # Both null, here NaN: an axis that the store lacks, or an object without vertices.
                there = ~(np.isnan(least) & np.isnan(greatest))
                is_box = (least <= greatest) & np.isfinite(least) & np.isfinite(greatest)
                wrong += int(np.count_nonzero(there & ~is_box))
            if wrong:
                text = f"{wrong:,} boxes are not finite, or end before they begin"
                problems.append(self.problem(record, "geometry-box", text))
        return problems

    def drop(self, catalog: Catalog, name: str, dataset: str | None = None) -> "MaintenanceReport":
        """Remove geometry from the tip; snapshots that contain it keep it, and `gc` frees what no snapshot needs.

        `name` is a name or a feature space, and `dataset`, by name or uid, restricts it to one dataset. Stores whose
        objects are the cells of a dataset are refused with a `QueryError`: only `drop_dataset` removes these. The
        record is removed first, which makes the shapes invisible at once; then the pointers of the cells. If the
        process dies in between, nothing follows the remaining pointers and `repair` removes them.
        """
        catalog = catalog.session("drop_geometry()")
        records = self.find(catalog, name)
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
        n_cells = sum(
            sum(without_deleted(record.cells_of, deletions, record.zarr_group).values()) for record in records
        )
        if not self.remove(catalog, {record.uid for record in records}):
            # Another process has dropped or replaced them meanwhile.
            return self.drop(catalog, name, dataset)
        clear_orphaned_pointers(catalog)
        return dropped(records, n_cells)

    def drop_datasets(self, catalog: Catalog, uids: AbstractSet[str]) -> None:
        """Remove deleted datasets from the registry, and stores that have no other dataset."""
        self._forget(catalog, uids)

    def _forget(self, catalog: Catalog, deleted: AbstractSet[str]) -> int:
        """Remove datasets that have no record, and return the number of stores that named one."""
        # Another writer may have added some since.
        catalog.tables.refresh([LISTING, self.table] if deleted else [])
        if not deleted or not any(deleted & set(record.cells_of) for record in self.read(catalog)):
            return 0
        n_changed = 0

        def without(old: list[GeometryRecord]) -> list[GeometryRecord]:
            nonlocal n_changed
            # `restore` brings records back before geometry, each in a commit of its own.
            gone = without_record(catalog, deleted)
            n_changed = sum(bool(gone & set(record.cells_of)) for record in old)
            kept = ((record, {u: n for u, n in record.cells_of.items() if u not in gone}) for record in old)
            left = [record.model_copy(update={"datasets": json.dumps(cells)}) for record, cells in kept if cells]
            return left if n_changed else old

        self.change(catalog, without)
        return n_changed

    def repair(self, catalog: Catalog, grace: timedelta) -> list[str]:
        """Remove datasets that are gone and not being added from the table, and pointers that nothing follows. Datasets are read last."""
        datasets = {record.uid for record in read_records(catalog)}
        stores = [store for store in self.read(catalog) if store.cells_of.keys() - datasets]
        alive = alive_among(catalog, [store.uid for store in stores], grace)
        gone = {uid for store in stores if store.uid not in alive for uid in store.cells_of}
        notes = []
        if n := self._forget(catalog, gone - datasets):
            notes.append(f"{n:,} geometry stores named datasets that are gone")
        if n := clear_orphaned_pointers(catalog, grace):
            notes.append(f"removed {n:,} pointers to unregistered shapes")
        return notes


GEOMETRY = GeometryKind()
"""What `Wing.assets` names."""


def default_geometry(catalog: Catalog) -> str:
    """Return the only geometry of the atlas, or its only feature space; raise `QueryError` if there are several, or none."""
    records = GEOMETRY.visible(catalog)
    names = sorted({record.name for record in records})
    spaces = sorted({record.space for record in records})
    if not names:
        raise QueryError(
            f"{catalog.location.uri} has no geometry; add one with atlas.add('shapes.zv', link=...), and take a snapshot."
        )
    if len(names) > 1 and len(spaces) > 1:
        raise QueryError(f"The atlas has the geometries {names}; name one with space=...")
    return names[0] if len(names) == 1 else spaces[0]


def rows_of_stores(
    records: Sequence[GeometryRecord], table: pa.Table, name: str
) -> list[tuple[GeometryRecord, NDArray[np.int64]]]:
    """Return the rows of the cells that have shapes in each store; stores without any are left out.

    `records` are stores from `GEOMETRY.find`, and `name` is what was asked for. `table` has the cells, with
    ``<column>.zarr_group`` of every record, and ``uid`` for the message. A cell with shapes in several stores is a
    `QueryError`.
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


def groups_in_use(catalog: Catalog, groups: Iterable[str], grace: timedelta = GRACE) -> set[str]:
    """Return the groups that are registered or being written. The registry is read last."""
    candidates = set(groups)
    alive = alive_among(catalog, sorted({group.split("/")[0] for group in candidates}), grace)
    catalog.tables.refresh([LISTING, GEOMETRY.table])
    registered = {record.zarr_group for record in GEOMETRY.read(catalog)}
    return {group for group in candidates if group in registered or group.split("/")[0] in alive}


def clear_orphaned_pointers(catalog: Catalog, grace: timedelta = GRACE) -> int:
    """Set pointers to missing stores to null, and drop empty columns that belong to no store or feature space.

    The result is the number of cells that lost a pointer.
    """
    n_cleared = 0
    for column in geometry_columns(catalog.tables.schema(CELLS)):
        # Readers pass over orphaned pointers, so those of a column that others keep changing can stay.
        with contextlib.suppress(ConflictError):
            n_cleared += catalog.tables.retry(CELLS, partial(_clear, catalog, column, grace))
    named = {record.column for record in GEOMETRY.read(catalog)}
    spare = [c for c in geometry_columns(catalog.tables.schema(CELLS)) if c not in named and c not in catalog.spaces()]
    idle = [c for c in spare if not catalog.tables.count(CELLS, is_not_null(f"{c}.zarr_group"))]
    # An `add` creates the column of its pointers before it fills it; its lease is older than the column.
    known = Inventory(catalog).uids if idle else set()
    fresh = [name for name in catalog.arrays.list_children() if UID.fullmatch(name)] if idle else []
    if idle and not alive_among(catalog, [uid for uid in fresh if uid not in known], grace):
        catalog.tables.drop_columns(CELLS, idle, partial(asset_columns, catalog))
    return n_cleared


def _clear(catalog: Catalog, column: str, grace: timedelta) -> int:
    # Pointers are read at the version that `update_columns` checks: a later commit to these rows is a conflict.
    version = catalog.tables.version(CELLS)
    pinned = catalog.tables.at({CELLS: version})
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
