"""The shapes of cells that a query chose, aligned to its rows: one pass over the touched chunks of every store."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.geometries import find_geometries, rows_of_stores
from raggedatlas.errors import QueryError
from raggedatlas.model.geometries import GeometryRecord
from raggedatlas.model.pointers import AXES
from raggedatlas.query.plan import plan_rows
from raggedatlas.query.rows import known_columns
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.location import Location
from raggedatlas.vectors.reader import VectorStore, open_vectors
from raggedatlas.vectors.shapes import (
    Attribute,
    Attributes,
    Shapes,
    counts_to_offsets,
    fill_value,
    take_attributes,
    take_objects,
)

UID, OBJECT_ID, PRESENT = "uid", "object_id", "present"
"""Object attributes that `read_shapes` adds: the cell, its object in its own store (-1 without), and whether it has one."""


def read_shapes(
    spec: QuerySpec, catalog: Catalog, name: str, *, level: int | None = None, budget: int | None = None,
    attributes: Sequence[str] | None = None,
) -> Shapes:  # fmt: skip
    """Read the shapes of the cells that a query chooses.

    Parameters
    ----------
    spec : QuerySpec
        Which cells, in which order.
    catalog : Catalog
        At a version.
    name : str
        Of the geometry, or its feature space.
    level, budget : int or None
        Which level, or how many vertices a store may have at most; see `VectorStore`. A store with fewer levels gives its coarsest.
    attributes : sequence of str or None
        Which attributes; None takes all.

    Returns
    -------
    Shapes
        Object ``i`` is that of row ``i``, with the ids 0, 1, 2, ...; empty for a cell without. Object attributes ``uid``,
        ``object_id`` (-1 without) and ``present`` say whose it is.

    Raises
    ------
    NotFoundError
        If there is no such geometry.
    QueryError
        If stores of several kinds or numbers of axes are touched, or a cell has shapes in several of them.
    """
    records = find_geometries(catalog, name)
    columns = dict.fromkeys(record.column for record in records)
    boxed = [f"{axis}_{end}" for axis in AXES for end in ("min", "max")] if any(r.owner for r in records) else []
    more = [f"{column}.{part}" for column in columns for part in ("zarr_group", "object_id", *boxed)]
    cells, obs = plan_rows(spec, catalog, known_columns(catalog), (), tuple(more))
    uids = obs.column("uid").to_pylist()
    read: list[tuple[NDArray[np.int64], Shapes]] = []
    objects = np.full(cells.n, -1, np.int64)
    for record, rows in rows_of_stores(records, cells.table, name):
        ids = cells.table.column(f"{record.column}.object_id").take(pa.array(rows)).to_numpy().astype(np.int64)
        objects[rows] = ids
        if record.owner:
            shapes = read_points(catalog, record, ids, _box(cells.table, record, rows), attributes)
        else:
            shapes = read_objects(catalog, record, ids, level=level, budget=budget, attributes=attributes)
        read.append((rows, shapes))
    if not read:
        record = records[0]
        nothing = read_objects(catalog, record, np.zeros(0, np.int64), level=0, attributes=attributes)
        read.append((np.zeros(0, np.int64), nothing))
    return _aligned(read, objects, uids)


def _box(table: pa.Table, record: GeometryRecord, rows: NDArray[np.int64]) -> tuple[Any, Any]:
    """Give the box around the shapes of some rows."""
    at = pa.array(rows)
    ends = []
    for end, least in (("min", np.nanmin), ("max", np.nanmax)):
        parts = [table.column(f"{record.column}.{a}_{end}").take(at).to_numpy() for a in AXES[: len(record.axes)]]
        ends.append([float(least(part)) if np.isfinite(part).any() else 0.0 for part in parts])
    return ends[0], ends[1]


def store_of(catalog: Catalog, record: GeometryRecord) -> VectorStore:
    """Open a store of the atlas; a snapshot keeps it open."""
    place: Location = catalog.arrays.child(*record.zarr_group.split("/"))
    return catalog.remember("geometry", record.zarr_group, lambda: open_vectors(place))


def read_objects(
    catalog: Catalog,
    record: GeometryRecord,
    ids: NDArray[np.int64],
    *,
    level: int | None = None,
    budget: int | None = None,
    attributes: Sequence[str] | None = None,
) -> Shapes:
    """Read some objects of one store, in the given order; objects that a coarse level dropped are empty.

    Raises
    ------
    QueryError
        If a level and a budget are asked for, or a level below 0.
    """
    store = store_of(catalog, record)
    if level is not None and budget is not None:
        raise QueryError("Give a level or a budget of vertices, not both.")
    if level is not None and level < 0:
        raise QueryError(f"There is no level {level}; 0 is the finest.")
    if record.owner:
        return read_points(catalog, record, ids, record.extent, attributes)
    if budget is not None:
        fitting = [k for k, n in enumerate(store.vertex_counts()) if n <= budget]
        level = fitting[0] if fitting else store.n_levels - 1
    level = min(level or 0, store.n_levels - 1)
    if level == 0:
        return store.objects(ids.tolist(), level=0, attributes=attributes)
    held = np.isin(ids, np.asarray(store.object_ids(level)))
    shapes = store.objects(ids[held].tolist(), level=level, attributes=attributes)
    return _spread_objects(shapes, np.flatnonzero(held), len(ids), ids)


def read_points(
    catalog: Catalog,
    record: GeometryRecord,
    ids: NDArray[np.int64],
    box: tuple[Any, Any],
    attributes: Sequence[str] | None = None,
) -> Shapes:
    """Read the points of some cells from a store whose points tell their cell themselves: those in a box around them."""
    store = store_of(catalog, record)
    asked = None if attributes is None else list(dict.fromkeys([*attributes, record.owner]))
    points = store.box(*box, level=0, attributes=asked, whole=False)
    cell = points.vertex_attributes[record.owner].values
    order = np.argsort(ids, kind="stable")
    at = np.searchsorted(ids, cell, sorter=order) if len(ids) else np.zeros(len(cell), np.int64)
    at = np.minimum(at, max(0, len(ids) - 1))
    mine = ids[order][at] == cell if len(ids) else np.zeros(len(cell), bool)
    rows = np.flatnonzero(mine)
    which = order[at[rows]] if len(ids) else rows
    rows = rows[np.argsort(which, kind="stable")]
    counts = np.bincount(which, minlength=len(ids))
    kept = {k: v for k, v in points.vertex_attributes.items() if attributes is None or k in attributes}
    return Shapes(
        "point_cloud", points.positions[rows], counts_to_offsets(counts), ids, vertex_attributes=take_attributes(kept, rows)
    )  # fmt: skip


def _spread_objects(shapes: Shapes, at: NDArray[np.int64], n: int, ids: NDArray[np.int64] | None) -> Shapes:
    """Put objects at some of n places, in ascending order; the others are empty."""
    counts = np.zeros(n, np.int64)
    counts[at] = np.diff(shapes.offsets)
    link_offsets = None
    if shapes.link_offsets is not None:
        links = np.zeros(n, np.int64)
        links[at] = np.diff(shapes.link_offsets)
        link_offsets = counts_to_offsets(links)
    return Shapes(
        shapes.kind, shapes.positions, counts_to_offsets(counts), ids, shapes.links, link_offsets, shapes.vertex_attributes,
        shapes.link_attributes, {k: _fill(v, at, n) for k, v in shapes.object_attributes.items()},
    )  # fmt: skip


def _fill(attribute: Attribute, at: NDArray[np.int64], n: int) -> Attribute:
    values = np.full((n, *attribute.values.shape[1:]), fill_value(attribute.values.dtype), attribute.values.dtype)
    values[at] = attribute.values
    return Attribute(values, attribute.channels, metadata=attribute.metadata)


def _aligned(read: Sequence[tuple[NDArray[np.int64], Shapes]], objects: NDArray[np.int64], uids: list[str]) -> Shapes:
    """Join what was read of several stores, in the order of the rows."""
    kinds = {(shapes.kind, shapes.n_dims, 0 if shapes.links is None else shapes.links.shape[1]) for _, shapes in read}
    if len({kind[:2] for kind in kinds}) > 1 or len({kind[2] for kind in kinds} - {0}) > 1:
        shown = sorted(f"{kind} of {n} axes" for kind, n, _ in kinds)
        raise QueryError(
            f"The touched stores hold {', '.join(shown)}; choose datasets that agree with .where({{'dataset': [...]}})."
        )
    joined = read[0][1] if len(read) == 1 else _joined([shapes for _, shapes in read])
    rows = np.concatenate([rows for rows, _ in read])
    order = np.argsort(rows, kind="stable")
    made = _reordered(joined, order)
    made = _spread_objects(made, rows[order], len(objects), np.arange(len(objects)))
    own = {
        UID: Attribute(np.array(uids, dtype=str)),
        OBJECT_ID: Attribute(objects),
        PRESENT: Attribute((objects >= 0).astype(np.uint8)),
    }
    return Shapes(
        made.kind, made.positions, made.offsets, made.ids, made.links, made.link_offsets, made.vertex_attributes,
        made.link_attributes, {**made.object_attributes, **own},
    )  # fmt: skip


def _reordered(shapes: Shapes, order: NDArray[np.int64]) -> Shapes:
    return shapes if np.array_equal(order, np.arange(len(order))) else take_objects(shapes, order)


def _joined(parts: Sequence[Shapes]) -> Shapes:
    """Put the objects of several stores after one another."""
    base = counts_to_offsets(np.array([part.n_vertices for part in parts]))
    links = link_offsets = None
    grouped = [_by_object(part) for part in parts]
    if any(part.links is not None for part in parts):
        width = max(part.links.shape[1] for part in parts if part.links is not None)
        moved = [
            np.zeros((0, width), np.int64) if part.links is None else part.links.astype(np.int64) + start
            for part, start in zip(grouped, base[:-1], strict=True)
        ]
        links = np.concatenate(moved)
        counts = [
            np.zeros(part.n_objects, np.int64) if part.link_offsets is None else np.diff(part.link_offsets)
            for part in grouped
        ]
        link_offsets = counts_to_offsets(np.concatenate(counts))
    return Shapes(
        parts[0].kind,
        np.concatenate([part.positions for part in parts]),
        counts_to_offsets(np.concatenate([part.vertex_counts for part in parts])),
        None,
        links,
        link_offsets,
        _joined_attributes([(part.vertex_attributes, part.n_vertices) for part in grouped]),
        _joined_attributes([(part.link_attributes, part.n_links) for part in grouped]),
        _joined_attributes([(part.object_attributes, part.n_objects) for part in grouped]),
    )


def _by_object(shapes: Shapes) -> Shapes:
    """Put links object by object, where they are not."""
    if shapes.links is None or shapes.link_offsets is not None:
        return shapes
    owner = np.searchsorted(shapes.offsets, shapes.links[:, 0], side="right") - 1
    order = np.argsort(owner, kind="stable")
    return Shapes(
        shapes.kind, shapes.positions, shapes.offsets, shapes.ids, shapes.links[order],
        counts_to_offsets(np.bincount(owner, minlength=shapes.n_objects)), shapes.vertex_attributes,
        take_attributes(shapes.link_attributes, order), shapes.object_attributes,
    )  # fmt: skip


def _joined_attributes(parts: Sequence[tuple[Attributes, int]]) -> dict[str, Attribute]:
    """Join attributes by name; where a store lacks one, its rows hold what marks an absent value."""
    names = dict.fromkeys(name for attributes, _ in parts for name in attributes)
    made = {}
    for name in names:
        having = [attributes[name] for attributes, _ in parts if name in attributes]
        if len({a.values.shape[1:] for a in having}) > 1 or len({a.values.dtype.kind in "US" for a in having}) > 1:
            raise QueryError(
                f"The attribute {name!r} has different shapes or types in the touched stores; leave it out with attributes=[...]."
            )
        categories = _categories(having)
        dtype = np.dtype(np.int64) if categories is not None else np.result_type(*(a.values.dtype for a in having))
        if len(having) < len(parts) and dtype.kind in "iu" and categories is None:
            dtype = np.result_type(dtype, np.int64) if dtype != np.uint64 else dtype
        pieces = [_piece(attributes.get(name), n, (having[0], dtype, categories)) for attributes, n in parts]
        metadata = dict(having[0].metadata) if categories is None else {**having[0].metadata, "categories": categories}
        made[name] = Attribute(np.concatenate(pieces), having[0].channels, metadata=metadata)
    return made


def _categories(having: Sequence[Attribute]) -> list[Any] | None:
    """Give the union of the categories of attributes that have some, in order of appearance."""
    if not all("categories" in a.metadata for a in having):
        return None
    return list(dict.fromkeys(label for a in having for label in a.metadata["categories"]))


def _piece(
    attribute: Attribute | None, n: int, like: tuple[Attribute, np.dtype[Any], list[Any] | None]
) -> NDArray[Any]:
    first, dtype, categories = like
    if attribute is None:
        return np.full((n, *first.values.shape[1:]), -1 if categories is not None else fill_value(dtype), dtype)
    if categories is None:
        return attribute.values.astype(dtype)
    place = {label: i for i, label in enumerate(categories)}
    codes = np.array([*(place[label] for label in attribute.metadata["categories"]), -1], np.int64)
    values = attribute.values.astype(np.int64)
    return codes[np.where((values < 0) | (values >= len(codes) - 1), len(codes) - 1, values)]


__all__ = ["OBJECT_ID", "PRESENT", "UID", "read_objects", "read_shapes", "store_of"]
