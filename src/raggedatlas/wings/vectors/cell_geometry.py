"""Cell geometry in queries: the shapes of selected cells, and boxes as filters."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.errors import CorruptError, QueryError
from raggedatlas.model.assets import GeometryRecord
from raggedatlas.model.choices import By
from raggedatlas.model.spaces import AXES
from raggedatlas.query.cells import Cells, cell_columns
from raggedatlas.query.plan import plan_rows
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.filters import Columns, Filter
from raggedatlas.store.location import Location
from raggedatlas.store.sql import all_of, any_of, comparison, in_list, is_not_null, negation
from raggedatlas.wings.vectors.assets import GEOMETRY, default_geometry, rows_of_stores
from raggedatlas.wings.vectors.converters.interop import PART
from raggedatlas.wings.vectors.reader import VectorStore, open_vectors
from raggedatlas.wings.vectors.shapes import (
    SEQUENTIAL,
    Attribute,
    Attributes,
    Shapes,
    counts_to_offsets,
    join_shapes,
    object_rows,
    pad_attribute,
    sequence_links,
    take_attributes,
    take_objects,
)

UID, OBJECT_ID, PRESENT = "uid", "object_id", "present"
"""Object attributes that `read_shapes` adds: the cell, its object in its own store (-1 without), and whether it has one."""


def read_shapes(
    spec: QuerySpec, catalog: Catalog, name: str | None, *, level: int | None = None, budget: int | None = None,
    attributes: Sequence[str] | None = None,
) -> Shapes:  # fmt: skip
    """Read the shapes of the cells that a query chooses.

    `name` is that of a geometry or its feature space; None takes the only one. `level` and `budget` are as in
    `VectorStore`; a store with fewer levels returns its coarsest, and both are ignored for points that carry the id of
    their cell. `attributes` None takes all.

    Object ``i`` is that of row ``i``, with the ids 0, 1, 2, ...; empty for a cell without. Object attributes ``uid``,
    ``object_id`` (-1 without) and ``present`` say whose it is. Raises `QueryError` if stores of several kinds or
    numbers of axes are touched, or a cell has shapes in several of them.
    """
    name = default_geometry(catalog) if name is None else name
    records = GEOMETRY.find(catalog, name)
    columns = dict.fromkeys(record.column for record in records)
    boxed = [f"{axis}_{end}" for axis in AXES for end in ("min", "max")] if any(r.owner for r in records) else []
    more = [f"{column}.{part}" for column in columns for part in ("zarr_group", "object_id", *boxed)]
    cells, obs = plan_rows(spec, catalog, cell_columns(catalog), (), tuple(more))
    uids = obs.column("uid").to_pylist()
    read: list[tuple[NDArray[np.int64], Shapes]] = []
    objects = np.full(cells.n, -1, np.int64)
    for record, rows in rows_of_stores(records, cells.table, name):
        ids = cells.table.column(f"{record.column}.object_id").take(pa.array(rows)).to_numpy().astype(np.int64)
        objects[rows] = ids
        if record.owner:
            at = pa.array(rows)
            ends = []
            for end, least in (("min", np.nanmin), ("max", np.nanmax)):
                parts = [
                    cells.table.column(f"{record.column}.{a}_{end}").take(at).to_numpy()
                    for a in AXES[: len(record.axes)]
                ]
                # Cells without points have no box. Of nothing but NaN, `nanmin` would be NaN, with a warning.
                ends.append([float(least(part)) if np.isfinite(part).any() else 0.0 for part in parts])
            shapes = read_points(catalog, record, ids, (ends[0], ends[1]), attributes)
        else:
            shapes = read_objects(catalog, record, ids, level=level, budget=budget, attributes=attributes)
        read.append((rows, shapes))
    # No cell has shapes: kind, axes and attributes of the empty result are those of the first store.
    if not read:
        record = records[0]
        nothing = read_objects(catalog, record, np.zeros(0, np.int64), level=0, attributes=attributes)
        read.append((np.zeros(0, np.int64), nothing))
    kinds = {(shapes.kind, shapes.n_dims, 0 if shapes.links is None else shapes.links.shape[1]) for _, shapes in read}
    # A store without links has width 0, which goes with any other.
    if len({kind[:2] for kind in kinds}) > 1 or len({kind[2] for kind in kinds} - {0}) > 1:
        shown = sorted(f"{kind} of {n} axes" for kind, n, _ in kinds)
        raise QueryError(
            f"The touched stores hold {', '.join(shown)}; choose datasets that agree with .where({{'dataset': [...]}})."
        )
    parts = [shapes for _, shapes in read]
    for family in ("vertex", "link", "object"):
        tables: list[Attributes] = [getattr(part, f"{family}_attributes") for part in parts]
        for key in dict.fromkeys(key for table in tables for key in table):
            same = [table[key] for table in tables if key in table]
            if len({(a.values.shape[1:], a.values.dtype.kind in "US", "categories" in a.metadata) for a in same}) > 1:
                raise QueryError(
                    f"The attribute {key!r} has different shapes or types in the touched stores; leave it out with attributes=[...]."
                )
    joined = parts[0] if len(parts) == 1 else join_shapes(parts)
    rows = np.concatenate([rows for rows, _ in read])
    order = np.argsort(rows, kind="stable")
    made = joined if np.array_equal(order, np.arange(len(order))) else take_objects(joined, order)
    made = _spread_objects(made, rows[order], len(objects), np.arange(len(objects)))
    own = {
        UID: Attribute(np.array(uids, dtype=str)),
        OBJECT_ID: Attribute(objects),
        PRESENT: Attribute((objects >= 0).astype(np.uint8)),
    }
    return replace(made, object_attributes={**made.object_attributes, **own})


def store_of(catalog: Catalog, record: GeometryRecord) -> VectorStore:
    """Open a store of the atlas; a snapshot caches it."""
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
    """Read some objects of one store, in the given order; objects that a coarse level dropped are empty."""
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
    # Levels drop objects, and `objects` raises for an id that is not there.
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
    """Read the points of some cells from a store whose points carry the id of their cell: those in a bounding box."""
    store = store_of(catalog, record)
    asked = None if attributes is None else list(dict.fromkeys([*attributes, record.owner]))
    points = store.box(*box, level=0, attributes=asked, whole=False)
    if record.owner not in points.vertex_attributes:
        raise CorruptError(
            f"The geometry {record.name!r} has the cells of its points in the attribute {record.owner!r}, which its store lacks; "
            "run validate('deep')."
        )
    cell = points.vertex_attributes[record.owner].values
    order = np.argsort(ids, kind="stable")
    at = np.searchsorted(ids, cell, sorter=order) if len(ids) else np.zeros(len(cell), np.int64)
    # An id beyond the largest is found at the end, which is no index; the comparison below leaves it out.
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


def _spread_objects(shapes: Shapes, at: NDArray[np.int64], n: int, ids: NDArray[np.int64]) -> Shapes:
    """Put objects at some of n places, in ascending order; the others are empty."""
    # Vertices and links stay where they are, because `at` ascends; only their bounds change.
    counts, links = np.zeros((2, n), np.int64)
    counts[at] = np.diff(shapes.offsets)
    if shapes.link_offsets is not None:
        links[at] = np.diff(shapes.link_offsets)
    return replace(
        shapes,
        offsets=counts_to_offsets(counts),
        ids=ids,
        link_offsets=None if shapes.link_offsets is None else counts_to_offsets(links),
        object_attributes={name: pad_attribute(one, at, n) for name, one in shapes.object_attributes.items()},
        fragment_offsets=None,
        fragment_attributes={},
    )


@dataclass(frozen=True, eq=False, repr=False)
class Within(Filter):
    """Cells whose shape intersects a box."""

    lo: tuple[float, ...]  # corners of the box, both inclusive, in world units and the order of the store's axes
    hi: tuple[float, ...]
    name: str  # of the geometry
    records: tuple[GeometryRecord, ...]  # the stores to compare
    by: By  # what is compared: boxes, centroids or exact shapes
    catalog: Catalog  # where shapes are read, for "exact"
    _memo: dict[str, str] = field(default_factory=dict)

    def _sql(self, columns: Columns, depth: int) -> str:
        if self.by != "exact":
            return self._either(self.by)
        # One query asks for its SQL several times; the shapes are read the first time.
        if "exact" not in self._memo:
            inside = self._either("bbox", inside=True)
            # A shape whose own box is inside meets the box for certain and is not read.
            where = all_of(self._either("bbox"), negation(inside))
            uids: list[str] = []
            for column in dict.fromkeys(record.column for record in self.records):
                rows = self.catalog.tables.read(CELLS, ["uid", f"{column}.zarr_group", f"{column}.object_id"], where)
                for record in self.records:
                    own = rows.filter(pc.fill_null(pc.equal(rows.column(1), record.zarr_group), False))  # noqa: FBT003
                    if record.column != column or not own.num_rows:
                        continue
                    shapes = read_objects(self.catalog, record, own.column(2).to_numpy(), level=0, attributes=(PART,))
                    closed = record.space == "segmentation_boundary"
                    met = intersects_box(shapes, np.array(self.lo), np.array(self.hi), closed=closed)
                    uids += own.column(0).filter(pa.array(met)).to_pylist()
            self._memo["exact"] = any_of(inside, in_list("uid", sorted(uids)))
        return self._memo["exact"]

    def _either(self, by: str, *, inside: bool = False) -> str:
        found: dict[str, list[str]] = {}
        for record in self.records:
            found.setdefault(record.column, []).append(record.zarr_group)
        conditions = []
        for column, groups in found.items():
            # Without a shape `x` is null, which makes the condition false, not null: `_sql` negates it, and NOT null
            # keeps no cell. Infinite ends need no comparison, but the box must be present.
            parts = [in_list(f"{column}.zarr_group", groups), is_not_null(f"{column}.x")]
            for axis, lo, hi in zip(AXES, self.lo, self.hi, strict=False):
                own = f"{column}.{axis}"
                least, greatest = (own, own) if by == "centroid" else (f"{own}_min", f"{own}_max")
                ends = (
                    ((least, ">=", lo), (greatest, "<=", hi)) if inside else ((greatest, ">=", lo), (least, "<=", hi))
                )
                parts += [comparison(side, sign, end) for side, sign, end in ends if np.isfinite(end)]
            conditions.append(all_of(*parts))
        return any_of(*conditions)

    def to_dict(self) -> dict[str, Any]:
        """Return the condition in JSON's types; JSON has no infinite numbers, so these are text."""
        bbox = [end if np.isfinite(end) else str(end) for end in (*self.lo, *self.hi)]
        return {"operator": "within", "bbox": bbox, "space": self.name, "by": self.by}

    def __repr__(self) -> str:
        return f"within({[*self.lo, *self.hi]}, space={self.name!r}, by={self.by!r})"


def within(spec: QuerySpec, catalog: Catalog, bbox: ArrayLike, name: str | None, by: str) -> Within:
    """Make the filter of `Query.within`, after checking the arguments; `bbox` is ``(xmin, ymin, xmax, ymax)`` or a pair of corners.

    Also raises `QueryError` if a cell that the query has chosen so far has shapes in several of the stores.
    """
    if by not in {"bbox", "centroid", "exact"}:
        raise QueryError(f"within takes by='bbox', 'centroid' or 'exact', not {by!r}.")
    try:
        flat = np.asarray(bbox, np.float64).ravel()
    except (TypeError, ValueError) as error:
        raise QueryError(f"within({bbox!r}): a box is numbers, (xmin, ymin, xmax, ymax).") from error
    n = len(flat) // 2
    if len(flat) % 2 or not 2 <= n <= len(AXES):
        raise QueryError(
            f"within() got {len(flat)} numbers; a box of 2 to 4 axes has 4, 6 or 8: (xmin, ymin, xmax, ymax), the least corner first."
        )
    lo, hi = flat[:n], flat[n:]
    if np.isnan(flat).any() or (lo > hi).any():
        raise QueryError(
            f"within({flat.tolist()}): the box ends before it begins, or holds NaN; the least corner comes first."
        )
    name = default_geometry(catalog) if name is None else name
    records = GEOMETRY.find(catalog, name)
    for record in records:
        if len(record.axes) < n:
            raise QueryError(
                f"within() got a box of {n} axes; the geometry {name!r} from {record.source} has the axes {record.axes}."
            )
    found = Within(tuple(lo.tolist()), tuple(hi.tolist()), name, tuple(records), by, catalog)  # type: ignore[arg-type]
    having = [(uid, record.name) for record in found.records for uid in record.cells_of]
    # The cells are read only if a dataset has several of the stores, as only then a cell can.
    if len({uid for uid, _ in having}) < len(set(having)):
        parts = tuple(dict.fromkeys(f"{record.column}.zarr_group" for record in found.records))
        cells, _ = plan_rows(QuerySpec(filters=spec.filters), catalog, cell_columns(catalog), (), parts)
        rows_of_stores(found.records, cells.table, found.name)
    return found


Floats = NDArray[np.float64]


def intersects_box(shapes: Shapes, lo: Floats, hi: Floats, *, closed: bool = False) -> NDArray[np.bool_]:
    """Test which objects intersect a box, both ends inclusive: (B,) bool.

    `lo` and `hi` are (D',); D' may be fewer than the axes of the shapes, whose other axes are ignored. If `closed`,
    lines and graphs are outlines: the last vertex of a line is joined with the first, and for a box of two axes what
    they enclose counts. The vertex attribute ``part`` of a graph tells the parts of a polygon; what an even number of
    rings of a part encloses is a hole.
    """
    positions = shapes.positions[:, : len(lo)].astype(np.float64)
    owner = object_rows(shapes)
    met = np.zeros(len(shapes.offsets) - 1, bool)
    met[owner[((positions >= lo) & (positions <= hi)).all(axis=1)]] = True
    links, of = _links(shapes, owner, closed=closed)
    wanted = ~met[of]
    links, of = links[wanted], of[wanted]
    if len(links):
        met[of[simplices_intersect_box(positions[links], lo, hi)]] = True
    # Nothing of the remaining outlines meets the box, so it is inside one if its corner `lo` is.
    if closed and len(lo) == 2 and shapes.kind in (*SEQUENTIAL, "graph"):
        parts = shapes.vertex_attributes.get(PART)
        part = np.zeros(len(of), np.int64) if parts is None else parts.values[links[:, 0]].astype(np.int64)
        n_parts = int(part.max(initial=0)) + 1
        a, b = positions[links[:, 0]], positions[links[:, 1]]
        # Of two edges that meet at the height of the point, `>` counts one or both or none, as parity needs.
        spans = (a[:, 1] > lo[1]) != (b[:, 1] > lo[1])
        rise = np.where(spans, b[:, 1] - a[:, 1], 1.0)
        crossing = a[:, 0] + (lo[1] - a[:, 1]) * (b[:, 0] - a[:, 0]) / rise
        # A point is inside if an odd number of edges is to its right.
        right = (of * n_parts + part)[spans & (lo[0] < crossing)]
        odd = np.bincount(right, minlength=len(met) * n_parts) % 2 == 1
        met |= odd.reshape(len(met), n_parts).any(axis=1)
    return met


def simplices_intersect_box(corners: Floats, lo: Floats, hi: Floats) -> NDArray[np.bool_]:
    """Test which edges or triangles intersect a box: exact in two and three axes, by separating axes.

    `corners` is (n, k, D): k = 2 for edges, 3 for triangles. Beyond three axes, boxes along the further ones are
    compared.
    """
    met: NDArray[np.bool_] = ((corners.max(axis=1) >= lo) & (corners.min(axis=1) <= hi)).all(axis=1)
    n_dims = min(3, corners.shape[2])
    finite = np.isfinite(lo) & np.isfinite(hi)
    if not finite[:n_dims].all():
        # An infinite end would make `middle` infinite or NaN; an end beyond all corners gives the same answer.
        far = np.abs(corners).max(initial=0.0) + 1
        lo, hi = np.maximum(lo, -far), np.minimum(hi, far)
    points = corners[:, :, :n_dims]
    middle, half = (lo + hi)[:n_dims] / 2, (hi - lo)[:n_dims] / 2
    edges = np.roll(points, -1, axis=1) - points
    if points.shape[1] == 2:
        # The second is the first one reversed.
        edges = edges[:, :1]
    # The candidate separating axes other than those of the box.
    if n_dims == 2:
        axes = [np.stack([-edges[:, i, 1], edges[:, i, 0]], axis=1) for i in range(edges.shape[1])]
    else:
        axes = [np.cross(edges[:, i], unit) for i in range(edges.shape[1]) for unit in np.eye(3)]
        if edges.shape[1] == 3:
            axes.append(np.cross(edges[:, 0], edges[:, 1]))
    for axis in axes:
        reach = np.abs(axis) @ half
        along = np.einsum("nkd,nd->nk", points - middle, axis)
        met &= (along.min(axis=1) <= reach) & (along.max(axis=1) >= -reach)
    return met


def _links(shapes: Shapes, owner: NDArray[np.int64], *, closed: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the edges or faces of all objects as rows of vertices, and the object of each; polygons become triangle fans."""
    if shapes.kind in SEQUENTIAL:
        links = sequence_links(shapes)
        if closed:
            some = np.flatnonzero(np.diff(shapes.offsets) > 2)
            back = np.stack([shapes.offsets[1:][some] - 1, shapes.offsets[:-1][some]], axis=1)
            links = np.concatenate([links, back])
    elif shapes.links is None:
        return np.zeros((0, 2), np.int64), np.zeros(0, np.int64)
    else:
        links = shapes.links.astype(np.int64)
        if links.shape[1] > 3:
            fans = [links[:, [0, i, i + 1]] for i in range(1, links.shape[1] - 1)]
            links = np.concatenate(fans)
    return links, owner[links[:, 0]]


def choose_centroids(catalog: Catalog, space: str | None) -> str:
    """Return the name of the geometry whose centroids are asked for; None takes the only one.

    Raises `QueryError` if its stores have different numbers of axes.
    """
    name = default_geometry(catalog) if space is None else space
    axes = {len(record.axes) for record in GEOMETRY.find(catalog, name)}
    if len(axes) > 1:
        raise QueryError(f"The stores of {name!r} have {sorted(axes)} axes; choose geometry that agrees.")
    return name


def read_centroids(catalog: Catalog, name: str, cells: Cells) -> NDArray[np.float64]:
    """Return the centroids of cells that were read with `centroid_columns`, (n_cells, D); NaN for cells without."""
    records = GEOMETRY.find(catalog, name)
    n_dims = max(len(record.axes) for record in records)
    made = np.full((cells.n, n_dims), np.nan)
    for record, here in rows_of_stores(records, cells.table, name):
        for i, axis in enumerate(AXES[:n_dims]):
            # Arrow turns nulls of float columns into NaN.
            made[here, i] = cells.table.column(f"{record.column}.{axis}").to_numpy()[here]
    return made
