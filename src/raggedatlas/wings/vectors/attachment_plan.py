"""What is added as geometry, and which cells get which shapes; every refusal is made here, before the first write."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import find_dataset, group_by_dataset, read_records
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.cells import in_datasets
from raggedatlas.errors import (
    CorruptError,
    DuplicateError,
    NameRefusedError,
    NotFoundError,
    SchemaError,
    SourceError,
    ValuesError,
)
from raggedatlas.model.assets import GeometryRecord
from raggedatlas.model.choices import refuse_unused
from raggedatlas.model.frames import find_column, metadata_columns
from raggedatlas.model.ids import COLUMN, check_given_name, integer_ids, new_uid
from raggedatlas.model.options import GeometryOptions
from raggedatlas.model.spaces import AXES, GEOMETRY_TYPES, PointerKind, known_spaces, pointer_columns
from raggedatlas.store.location import AnyPath, Location, as_path, digest_files
from raggedatlas.store.runtime import scratch_array
from raggedatlas.wings.vectors.assets import GEOMETRY
from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.wings.vectors.chunking import find_infinite, object_blocks, row_blocks, sort_vertices
from raggedatlas.wings.vectors.converters.content import OBJECT_ID, Content
from raggedatlas.wings.vectors.converters.convert import ENDINGS, has_geometry, order_losses, read_file
from raggedatlas.wings.vectors.converters.geospatial import INDEX, is_spatialdata, spatialdata_elements
from raggedatlas.wings.vectors.converters.interop import ORDER, PART, RING
from raggedatlas.wings.vectors.geometry import Geometry
from raggedatlas.wings.vectors.points import collect_points, read_points
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import SEQUENTIAL, Attribute, Shapes
from raggedatlas.wings.vectors.writer import write


@dataclass(frozen=True)
class GeometrySource:
    """What is to be added, with one object for each cell."""

    shapes: Shapes  # the finest level, by object; regrouped by cell where a vertex attribute tells the cells
    levels: NDArray[np.int16]  # (B,): coarsest level that still holds each object
    axes: tuple[str, ...]  # names of the space axes
    layout: str  # of the store
    n_levels: int
    uri: str
    name: str
    digest: str  # SHA-256 over what is stored
    location: Location | None = None  # the store on disk; None for shapes in memory and files of shapes
    geometry: Geometry | None = None  # shapes in memory; None for a store on disk
    n_unassigned: int = 0  # vertices that belong to no cell
    left: tuple[str, ...] = ()  # what was not read of the file, and whether its vertices are renumbered, one line each
    index: str = OBJECT_ID  # name of the ids in the file: of the index of a frame

    @cached_property
    def bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Least and greatest corner of every object, (B, D) each; NaN where it has no vertex."""
        return object_bounds(self.shapes)


def open_geometry(source: Any, owner: str = "", unassigned: Any = None, layout: str = "0.9") -> GeometrySource:  # noqa: ANN401
    """Read what is to be added.

    `source` is Shapes, a Geometry, a file of shapes or points, an element of SpatialData, or a store. `owner` is the
    vertex attribute that tells the cell of a point; empty where objects are cells. `unassigned` is its value, or a list
    of values, where a point belongs to no cell, in addition to negative numbers, the greatest unsigned one, and missing
    ones. `layout` is that of a store that is made of shapes in memory.

    Raises `SourceError` if there are no objects, `NotFoundError` if there is no such attribute or store, and
    `ValuesError` if a position is not finite.
    """
    uri, name = "shapes in memory", "shapes"
    content = None
    if isinstance(source, str | os.PathLike):
        path = as_path(source)
        if path.suffix.lower() in ENDINGS or is_spatialdata(path):
            content, uri, name = _read_shapes(path), str(path), path.stem
    elif isinstance(source, Shapes):
        content = Content(source)
    if content is not None:
        shapes = content.shapes
        # `make_geometry` refuses these positions too, but its message does not name the object.
        _refuse_infinite(shapes)
        cutting = ChunkingOptions(axes=content.axes if len(content.axes or ()) == shapes.n_dims else None)
        geometry = make_geometry(shapes, cutting, metadata=dict(content.metadata))
        axes = tuple(axis.name for axis in geometry.axes)
        levels = np.zeros(shapes.n_objects, np.int16)
        found = GeometrySource(shapes, levels, axes, layout, len(geometry.levels), uri, name, "", None, geometry)
        found = replace(found, digest=_hash_shapes(shapes), left=(*content.left, *order_losses(shapes, geometry)))
        metadata = content.metadata
    elif isinstance(source, Geometry):
        # Written and read back, so that levels and digest are found as for a store on disk.
        with tempfile.TemporaryDirectory() as folder:
            write(source, f"{folder}/store", layout=layout)
            found, metadata = _open_store(Location.of(f"{folder}/store"))
        found = replace(found, location=None, geometry=source, uri="a geometry in memory", name="geometry")
    else:
        found, metadata = _open_store(Location.of(source))
        _refuse_infinite(found.shapes)
    found = replace(found, index=str(metadata.get(INDEX, OBJECT_ID)))
    if owner:
        shapes, lost = group_by_owner(found.shapes, owner, unassigned)
        found = replace(found, shapes=shapes, levels=np.zeros(shapes.n_objects, np.int16), n_unassigned=lost)
    if found.shapes.ids is None:
        raise SourceError(
            f"{found.uri} holds points without objects, so no cell has a shape there; name the vertex attribute that tells the cell "
            f"with cells=..., one of {sorted(found.shapes.vertex_attributes)}, or give every cell its object."
        )
    if not found.shapes.n_objects:
        raise SourceError(f"{found.uri} holds no objects; there is nothing to add.")
    return found


def _read_shapes(path: AnyPath) -> Content:
    """Read a file of shapes or points, or an element of SpatialData."""
    if path.suffix.lower() == ".parquet" and not (path.is_file() and has_geometry(path)):
        return Content(read_points(path))
    parts = () if path.suffix.lower() in ENDINGS else spatialdata_elements(path)
    if len(parts) > 1:
        raise SourceError(
            f"{path} is a SpatialData store of {len(parts)} elements: {', '.join(parts)}. Add each by its path, e.g. {path / parts[0]}."
        )
    return read_file(path)


def group_by_owner(shapes: Shapes, owner: str, unassigned: Any = None) -> tuple[Shapes, int]:  # noqa: ANN401
    """Put points together by the cell that a vertex attribute tells.

    The attribute `owner` has whole numbers or categories; `unassigned` is what it holds for no cell. The result has one
    object for each cell, ascending by its number, with the categories as the object attribute `owner`; and how many
    points belong to none.
    """
    if shapes.kind != "point_cloud":
        raise SourceError(
            f"cells={owner!r} names the cell of each point, and would take a {shapes.kind} apart; leave it out: each object is a cell."
        )
    attribute = shapes.vertex_attributes.get(owner)
    if attribute is None or attribute.n_channels != 1:
        raise NotFoundError(
            f"The points have no attribute {owner!r} of one value each that tells their cell; they have {sorted(shapes.vertex_attributes)}."
        )
    labels, codes, top = owner_labels(attribute), scratch_array((shapes.n_vertices,), np.int64), 1
    for rows in row_blocks(shapes.n_vertices):
        codes[rows] = owner_codes(attribute.take(rows), owner, labels, unassigned)
        top = max(top, int(codes[rows].max()) + 1)
    placed = sort_vertices(shapes, codes, top)
    names = {} if labels is None else {owner: Attribute(labels[placed.codes])}
    made = Shapes(
        shapes.kind, placed.positions, placed.bounds, placed.codes,
        vertex_attributes=placed.attributes, object_attributes=names,
    )  # fmt: skip
    return made, shapes.n_vertices - int(placed.bounds[-1])


def owner_labels(attribute: Attribute) -> NDArray[np.str_] | None:
    """Return the names of the numbers of an attribute, where they are categories."""
    categories = attribute.metadata.get("categories")
    return None if categories is None else np.array([str(label) for label in categories])


def owner_codes(
    attribute: Attribute,
    name: str,
    labels: NDArray[np.str_] | None = None,
    unassigned: Any = None,  # noqa: ANN401  (a value of the attribute, or several)
) -> NDArray[np.int64]:
    """Return the cell of every point as a number, -1 for none."""
    values = attribute.values
    if values.dtype.kind == "f":
        values = integer_ids(values, f"The values of {name!r}").fill_null(-1).to_numpy()
    elif values.dtype.kind == "u":
        # The greatest unsigned number marks a missing value in a store.
        missing = values == np.iinfo(values.dtype).max
        if (values[~missing] > np.iinfo(np.int64).max).any():
            raise SourceError(
                f"The attribute {name!r} holds numbers of 2**63 or more; a cell is named by a smaller one."
            )
        values = np.where(missing, -1, values.astype(np.int64))
    codes = values.astype(np.int64)
    if labels is not None and codes.size and codes.max() >= len(labels):
        raise CorruptError(f"The attribute {name!r} names category {codes.max()} of {len(labels)}.")
    for lost in [] if unassigned is None else np.atleast_1d(np.asarray(unassigned, object)).tolist():
        if labels is None:
            codes[codes == lost] = -1
        else:
            codes[np.isin(codes, np.flatnonzero(labels == str(lost)))] = -1
    return np.where(codes < 0, -1, codes)


def object_bounds(shapes: Shapes) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the least and the greatest corner of every object, (B, D) each; NaN where it has no vertex."""
    return _per_object(shapes, np.minimum), _per_object(shapes, np.maximum)


def object_centroids(shapes: Shapes, *, closed: bool = False) -> NDArray[np.float64]:
    """Return the centre of every object, (B, D); NaN where it has no vertex.

    Polygons, and lines that end where they begin, have the centre of their area, holes taken out; anything else, and
    what has no area, the mean of its vertices. If `closed`, every line is an outline, whose last vertex is joined with
    the first.
    """
    # Sums of objects without vertices are NaN; 1 only avoids dividing by zero.
    made = _per_object(shapes, np.add) / np.maximum(np.diff(shapes.offsets), 1)[:, None]
    if {PART, RING, ORDER} <= {*shapes.vertex_attributes} or shapes.kind in SEQUENTIAL:
        for objects in object_blocks(shapes.offsets):
            _to_area_centres(made[objects], *_rings(shapes, objects, closed=closed))
    return made


def _rings(
    shapes: Shapes, objects: slice, *, closed: bool
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Return the vertices of the rings of some objects in order: positions, object, whether it is a hole, and where each ring starts."""
    offsets = shapes.offsets[objects.start : objects.stop + 1]
    rows = slice(offsets[0], offsets[-1])
    points = shapes.positions[rows].astype(np.float64)
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    if shapes.kind in SEQUENTIAL:
        there = np.flatnonzero(np.diff(offsets))
        ends = np.full(len(offsets) - 1, closed)
        ends[there] |= (points[offsets[there] - rows.start] == points[offsets[there + 1] - 1 - rows.start]).all(axis=1)
        points, owner = points[ends[owner]], owner[ends[owner]]
        return points, owner, np.zeros(len(owner), bool), np.flatnonzero(np.diff(owner, prepend=-1))
    part, ring, place = (shapes.vertex_attributes[name].values[rows] for name in (PART, RING, ORDER))
    order = np.lexsort((place, ring, part, owner))
    keys = np.stack([owner[order], part[order], ring[order]])
    starts = np.flatnonzero(np.diff(keys, axis=1, prepend=-1).any(axis=0))
    return points[order], owner[order], ring[order] > 0, starts


def _to_area_centres(
    centres: NDArray[np.float64],
    points: NDArray[np.float64],
    owner: NDArray[np.int64],
    is_hole: NDArray[np.bool_],
    starts: NDArray[np.int64],
) -> None:
    """Replace the centres of objects that have an area; `starts` are the first vertices of their rings."""
    if not len(points):
        return
    follow = np.arange(1, len(points) + 1)
    follow[np.append(starts[1:], len(points)) - 1] = starts
    # Triangles of every edge with one point of the object, which is near, so that little precision cancels out.
    a = points - centres[owner]
    b = a[follow]
    cross = np.cross(a[:, :3], b[:, :3]) if points.shape[1] > 2 else a[:, :1] * b[:, 1:] - a[:, 1:] * b[:, :1]
    # Signed areas are measured along the normal of each ring, which makes all rings turn one way.
    normal = np.add.reduceat(cross, starts, axis=0)
    length = np.linalg.norm(normal, axis=1, keepdims=True)
    normal /= np.where(length > 0, length, 1)
    ring = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(points))))
    area = (cross * normal[ring]).sum(axis=1) * np.where(is_hole, -1, 1)
    total = np.bincount(owner, area, len(centres))
    extent = np.bincount(owner, np.abs(area), len(centres))
    flat = total <= 1e-12 * extent
    for axis in range(points.shape[1]):
        moment = np.bincount(owner, area * (a[:, axis] + b[:, axis]) / 3, len(centres))
        centres[:, axis] += np.where(flat, 0, moment / np.where(flat, 1, total))


def _per_object(shapes: Shapes, function: np.ufunc) -> NDArray[np.float64]:
    made = np.full((len(shapes.offsets) - 1, shapes.n_dims), np.nan)
    for objects in object_blocks(shapes.offsets):
        offsets = shapes.offsets[objects.start : objects.stop + 1]
        there = np.flatnonzero(np.diff(offsets))
        if len(there):
            positions = shapes.positions[offsets[0] : offsets[-1]].astype(np.float64)
            # `reduceat` gives the element at the start for an empty segment, so empty objects are left out.
            made[objects.start + there] = function.reduceat(positions, offsets[:-1][there] - offsets[0], axis=0)
    return made


def _open_store(place: Location) -> tuple[GeometrySource, Mapping[str, Any]]:
    store = open_vectors(place)
    # Points without objects may be more than fit into memory.
    is_cloud = store.kind == "point_cloud" and not store.has_objects
    shapes = collect_points(store.point_blocks()) if is_cloud else store.read(level=0, shared="each")
    axes = tuple(axis.name for axis in store.geometry.axes)
    levels = np.zeros(shapes.n_objects, np.int16)
    for level in range(1, 1 if shapes.ids is None else store.n_levels):
        coarse = store.read(level=level, attributes=(), shared="each")
        if coarse.ids is not None and shapes.ids is not None:
            # Levels come from fine to coarse, so the last one that still has an object wins.
            levels[np.isin(shapes.ids, coarse.ids[coarse.vertex_counts > 0])] = level
    digest = digest_files(place)[2]
    name = place.name.removesuffix(".zarr").removesuffix(".zv") or "shapes"
    found = GeometrySource(shapes, levels, axes, store.layout, store.n_levels, place.uri, name, digest, place)
    return found, store.geometry.metadata


def _refuse_infinite(shapes: Shapes) -> None:
    first, n_bad = find_infinite(shapes.positions)
    if first is not None:
        # `side="right"` passes over objects without vertices that begin at the same offset.
        row = int(np.searchsorted(shapes.offsets, first, side="right")) - 1
        who = f"point {first}" if shapes.ids is None else f"object {shapes.ids[row]}"
        raise ValuesError(
            f"{n_bad:,} positions are not finite, first in {who}: {shapes.positions[first].tolist()}; a shape without a "
            "finite box cannot be found. Leave these out."
        )


def _hash_shapes(shapes: Shapes) -> str:
    """Return the SHA-256 over what a store keeps of shapes."""
    content = hashlib.sha256(shapes.kind.encode())
    arrays: dict[str, Any] = {"positions": shapes.positions, "offsets": shapes.offsets}
    arrays |= {name: getattr(shapes, name) for name in ("ids", "links") if getattr(shapes, name) is not None}
    families = {family: getattr(shapes, f"{family}_attributes") for family in ("vertex", "link", "object")}
    if shapes.groups is not None:
        arrays |= {"groups/offsets": shapes.groups.offsets, "groups/ids": shapes.groups.ids}
        families["group"] = shapes.groups.attributes
    for family, attributes in families.items():
        for name, attribute in sorted(attributes.items()):
            arrays[f"{family}/{name}"] = attribute.values
            content.update(json.dumps(attribute.metadata, default=str, sort_keys=True).encode())
            # Only where there are some, so that hashes in the registries of older versions stay valid.
            if attribute.present is not None:
                arrays[f"{family}/{name}/present"] = attribute.present
            if attribute.channels:
                content.update(json.dumps(attribute.channels).encode())
    for name, values in arrays.items():
        content.update(f"{name} {values.dtype.str} {values.shape}".encode())
        # Objects are texts here; their bytes would be addresses.
        flat = np.ascontiguousarray(values if values.dtype.kind not in "OT" else values.astype(str)).reshape(-1)
        content.update(flat.view(np.uint8).data)
    return content.hexdigest()


_USUAL = {
    "skeleton": "morphology",
    "graph": "morphology",
    "mesh": "segmentation_mesh",
    "polyline": "segmentation_boundary",
    "line": "segmentation_boundary",
    "streamline": "tract",
}


@dataclass(frozen=True)
class GeometryPlan:
    """Plan of what adding geometry will write."""

    record: GeometryRecord  # its row, without what only writing finds out
    source: GeometrySource
    uids: pa.Array  # existing cells that get a pointer
    objects: NDArray[np.int64]  # (n,): row of the object of each of these cells
    fresh: NDArray[np.int64]  # (k,): rows of the objects that become new cells
    notes: tuple[str, ...] = ()  # for the report


def plan_geometry(catalog: Catalog, source: GeometrySource, options: GeometryOptions) -> GeometryPlan:
    """Decide what adding geometry will write.

    `catalog` is at the tip. Raises `NotFoundError` for an unknown feature space, dataset, link column or object
    attribute; `SchemaError` or `NameRefusedError` for a space that is not for geometry or takes other geometry types,
    or a name that cannot be a column's; `SourceError` for values of the link that occur twice, objects without a cell,
    cells without a shape, and more than four axes.
    """
    shapes = source.shapes
    if shapes.n_dims > len(AXES):
        raise SourceError(f"{source.uri} has {shapes.n_dims} axes; a pointer keeps boxes of at most {len(AXES)}.")
    space = choose_space(catalog, source, options.space)
    name = _checked_name(catalog, options.name or space, space)
    uids, objects, fresh = pa.array([], pa.string()), np.zeros(0, np.int64), np.arange(shapes.n_objects)
    counts, link, notes = dict[str, int](), dict[str, str](), list(source.left)
    # Without a link all objects become new cells.
    if options.link is not None:
        column, attribute = _link(source, options.link)
        link = {column: attribute}
        uids, objects, counts, fresh, said = _match(catalog, source, options, column, attribute)
        notes += said
    empty = int(np.count_nonzero(shapes.vertex_counts == 0))
    if empty:
        notes.append(f"{empty:,} objects have no vertices: their cells point to them, and no box finds them")
    if source.n_unassigned:
        notes.append(f"{source.n_unassigned:,} points belong to no cell; they stay in the store")
    refuse_unused(
        "add", "in this feature space, only for transcripts", genes=space != "transcripts" and options.genes != "gene"
    )
    lo, hi = source.bounds
    there = np.isfinite(lo).all(axis=1)
    extent = [lo[there].min(axis=0).tolist(), hi[there].max(axis=0).tolist()] if there.any() else [[], []]
    uid = new_uid()
    # Sorted, since equal links may list the cells in different orders.
    pairs = sorted(zip(uids.to_pylist(), objects.tolist(), strict=True))
    facts = [source.digest, options.cells, options.genes, len(fresh), sorted(counts)]
    record = GeometryRecord(
        uid=uid, name=name, space=space, column=name, zarr_group=f"{uid}/{space}", datasets=json.dumps(counts),
        types=[shapes.kind], axes=list(source.axes), layout=source.layout, n_objects=shapes.n_objects,
        n_vertices=shapes.n_vertices + source.n_unassigned, n_levels=source.n_levels, bounds=json.dumps(extent),
        link=json.dumps(link), owner=options.cells, genes=options.genes if space == "transcripts" else "",
        source=source.uri, content_hash=hashlib.sha256(json.dumps([facts, pairs]).encode()).hexdigest(),
    )  # fmt: skip
    return GeometryPlan(record, source, uids, objects, fresh, tuple(notes))


def choose_space(catalog: Catalog, source: GeometrySource, asked: str | None) -> str:
    """Decide the feature space of shapes, and refuse one that takes others."""
    kind = source.shapes.kind
    usual = _USUAL.get(kind)
    if RING in source.shapes.vertex_attributes:
        # Polygons with holes or of several parts, as converters make them.
        usual = "segmentation_boundary"
    elif usual is None:
        # A point cloud: at most one point for each object is its position, more are transcripts.
        usual = "position" if (source.shapes.vertex_counts <= 1).all() else "transcripts"
    if usual == "segmentation_mesh" and source.shapes.n_dims == 2:
        usual = "segmentation_boundary"
    space = asked or usual
    spaces = {**known_spaces(), **catalog.spaces()}
    if space not in spaces:
        shown = sorted(name for name, known in spaces.items() if known.kind is PointerKind.GEOMETRY)
        raise NotFoundError(f"The atlas knows no feature space {space!r} for shapes, only {shown}.")
    if spaces[space].kind is not PointerKind.GEOMETRY:
        raise SchemaError(
            f"The feature space {space!r} holds {spaces[space].kind.value} matrices, not shapes; leave space=... out, or name one of "
            f"{sorted(GEOMETRY_TYPES)}."
        )
    if kind not in GEOMETRY_TYPES.get(space, (kind,)):
        raise SchemaError(
            f"The feature space {space!r} takes {' or '.join(GEOMETRY_TYPES[space])}, and {source.uri} holds a {kind}; "
            f"its usual space is {usual!r}."
        )
    if space == "position" and (source.shapes.vertex_counts > 1).any():
        first = int(np.flatnonzero(source.shapes.vertex_counts > 1)[0])
        raise SchemaError(
            f"'position' takes one point a cell; object {first if source.shapes.ids is None else source.shapes.ids[first]} of "
            f"{source.uri} has {source.shapes.vertex_counts[first]}."
        )
    return space


def _checked_name(catalog: Catalog, name: str, space: str) -> str:
    check_given_name(name, "name of a geometry")
    # `__` is kept for names that the atlas composes, such as `<space>__<matrix>`.
    if not COLUMN.fullmatch(name) or "__" in name or name in {"uid", "dataset_uid", "cell_name", "dataset"}:
        raise NameRefusedError(
            f"The name {name!r} cannot be a geometry's: letters, digits and single '_', not beginning with a digit; choose one with "
            "name='nuclei'."
        )
    schema = catalog.tables.schema(CELLS)
    pointers = pointer_columns(schema)
    of = pointers.get(name)
    if of is not None and of != (space, PointerKind.GEOMETRY):
        raise SchemaError(f"The cells have a column {name!r} of {of[0]!r}; choose another name for the geometry.")
    columns = metadata_columns(schema)
    if name in columns or name in {facts.name for facts in columns.values()} or (of is None and name in schema.names):
        raise SchemaError(f"The cells have a column {name!r} already; choose another name for the geometry.")
    if name != space and name in {**known_spaces(), **catalog.spaces()}:
        raise SchemaError(f"{name!r} is another feature space; choose another name for the geometry.")
    taken = {record.space for record in GEOMETRY.visible(catalog) if record.name == name}
    if taken - {space}:
        raise SchemaError(f"{name!r} is geometry of {sorted(taken)[0]!r} already; choose another name.")
    return name


def _match(
    catalog: Catalog, source: GeometrySource, options: GeometryOptions, column: str, attribute: str
) -> tuple[pa.Array, NDArray[np.int64], dict[str, int], NDArray[np.int64], list[str]]:
    """Find the cell of every object by the values of a column: cells, their objects, cells by dataset, new cells, notes."""
    stored = find_column(catalog.tables.schema(CELLS), column)
    if stored is None or stored in pointer_columns(catalog.tables.schema(CELLS)):
        offered = [
            "uid",
            "cell_name",
            *(f.name or n for n, f in metadata_columns(catalog.tables.schema(CELLS)).items()),
        ]
        raise NotFoundError(f"link={column!r}: the cells have no such column; they have {offered}.")
    records = read_records(catalog) if options.dataset is None else find_dataset(catalog, options.dataset)
    columns = list(dict.fromkeys(["uid", "dataset_uid", stored]))
    cells = catalog.tables.read(CELLS, columns)
    cells = cells.filter(in_datasets(cells, {record.uid for record in records}))
    keys = pa.array(source.shapes.ids) if not attribute else attribute_array(source.shapes.object_attributes[attribute])
    what = f"object attribute {attribute!r}" if attribute else "object ids"
    keys, values = comparable_keys(keys, cells.column(stored), column)
    _refuse_repeated(keys, f"The {what} of {source.uri}")
    # Object of each cell, null for none; `_lacking` below finds cells without a shape by these nulls.
    # A cell without a value belongs to no object, also not to one that has none either.
    at = pc.index_in(values, value_set=keys, skip_nulls=True)
    found = cells.filter(at.is_valid())
    objects = at.drop_null().to_numpy().astype(np.int64)
    names = {uid: records[0].name for uid, records in group_by_dataset(read_records(catalog)).items()}
    _refuse_shared(found, objects, keys, column, names)
    counts = {str(e["values"]): int(e["counts"]) for e in pc.value_counts(found.column("dataset_uid")).to_pylist()}
    notes, lone = list[str](), np.setdiff1d(np.arange(len(keys)), objects)
    if not len(objects):
        raise SourceError(
            f"No cell has a value of {column!r} that is among the {what} of {source.uri}: there "
            f"{pc.drop_null(values)[:3].to_pylist()}, here {keys[:3].to_pylist()}."
        )
    if len(lone):
        text = f"{len(lone):,} of {len(keys):,} objects of {source.uri} have no cell by {column!r}, first {keys[int(lone[0])]}"
        if options.unknown == "error" and not options.new_cells:
            raise SourceError(f"{text}; leave them out with unknown='skip', or make cells of them with new_cells=True.")
        notes.append(f"{text}; {'they become new cells' if options.new_cells else 'left out'}")
    notes += _lacking(cells, counts, at, names, options)
    fresh = (lone if options.new_cells else lone[:0]).astype(np.int64)
    return found.column("uid").combine_chunks(), objects, counts, fresh, notes


def attribute_array(attribute: Attribute) -> pa.Array:
    """Return an attribute of objects as Arrow; what is missing is null."""
    values = attribute.values
    missing = None if attribute.present is None else ~attribute.present
    if attribute.metadata.get("boolean"):
        values = values.astype(bool)
    return pa.array(values.tolist() if values.dtype.kind in "UST" else values, mask=missing)


def _link(source: GeometrySource, link: Any) -> tuple[str, str]:  # noqa: ANN401  (whatever a caller passed)
    """Return the cell column and the object attribute (empty: the ids) of a link."""
    attributes = source.shapes.object_attributes
    if isinstance(link, str):
        return link, link if link in attributes and attributes[link].n_channels == 1 else ""
    if not isinstance(link, Mapping) or len(link) != 1:
        raise SourceError(f"link={link!r} is not understood; pass a cell column, or {{column: object attribute}}.")
    ((column, attribute),) = link.items()
    if attribute == source.index and attribute not in attributes:
        return str(column), ""
    if attribute not in attributes or attributes[attribute].n_channels != 1:
        raise NotFoundError(
            f"link={link!r}: the objects of {source.uri} have no attribute {attribute!r} of one value each; they have {sorted(attributes)}."
        )
    return str(column), str(attribute)


def comparable_keys(keys: pa.Array, values: pa.ChunkedArray, column: str) -> tuple[pa.Array, pa.Array]:
    """Return ids of objects and values of cells in one type: integers unchanged, anything else as text.

    Raises `SourceError` if one of them is neither text nor integers; see `integer_ids` for floats.
    """
    sides = []
    for side, what in ((keys, "the objects' values"), (values, f"the cells' {column!r}")):
        made = side.combine_chunks() if isinstance(side, pa.ChunkedArray) else side
        if pa.types.is_floating(made.type):
            made = integer_ids(made, f"link={column!r}: {what}")
        if not (pa.types.is_integer(made.type) or pa.types.is_string(made.type) or pa.types.is_large_string(made.type)):
            raise SourceError(f"link={column!r}: {what} are {made.type}; whole numbers or text can be matched.")
        sides.append(made)
    # With text on one side, integers become text: 7 then matches "7" but not "07".
    numbers = all(pa.types.is_integer(side.type) for side in sides)
    # Nor can numbers beyond int64 be compared otherwise.
    numbers &= all((pc.max(side).as_py() or 0) < 2**63 for side in sides if side.type == pa.uint64())
    shared = pa.int64() if numbers else pa.string()
    return sides[0].cast(shared), sides[1].cast(shared)


def _refuse_repeated(keys: pa.Array, what: str) -> None:
    counts = pc.value_counts(keys.drop_null())
    twice = counts.filter(pc.greater(pc.struct_field(counts, "counts"), 1))
    if len(twice):
        first = twice[0].as_py()
        raise SourceError(
            f"{what} hold {len(twice):,} values more than once, first {first['values']!r} ({first['counts']} times); every object needs "
            "its own."
        )


def _refuse_shared(
    found: pa.Table, objects: NDArray[np.int64], keys: pa.Array, column: str, names: Mapping[str, str]
) -> None:
    """Refuse objects that several cells claim."""
    counts = np.bincount(objects, minlength=len(keys))
    shared = np.flatnonzero(counts > 1)
    if not len(shared):
        return
    rows = np.flatnonzero(objects == shared[0])
    of = pc.unique(found.column("dataset_uid").take(pa.array(rows))).to_pylist()
    where = f"in the datasets {sorted(names[uid] for uid in of)}; say which with dataset=..." if len(of) > 1 else (
        f"in the dataset {names[of[0]]!r}; fix the column, or link by another"
    )  # fmt: skip
    raise SourceError(
        f"{len(shared):,} values of {column!r} stand in several cells, first {keys[int(shared[0])]} in {counts[shared[0]]} cells {where}."
    )


def _lacking(
    cells: pa.Table, counts: Mapping[str, int], at: pa.Array, names: Mapping[str, str], options: GeometryOptions
) -> Sequence[str]:
    """Refuse or report cells of these datasets that have no shape."""
    # Datasets without any match are not meant by the link, so their cells lack nothing.
    touched = in_datasets(cells, counts)
    without = cells.filter(pc.and_(touched, at.is_null()))
    if not without.num_rows:
        return []
    first = without.slice(0, 1).to_pylist()[0]
    text = (
        f"{without.num_rows:,} cells of {sorted(names[uid] for uid in counts)} have no shape, first {first['uid']} of "
        f"{names[first['dataset_uid']]!r}"
    )
    if options.lacking == "error":
        raise SourceError(f"{text}; pass lacking='allow' to leave them without.")
    return [text]


def find_replaced(
    record: GeometryRecord, old: Sequence[GeometryRecord], options: GeometryOptions
) -> list[GeometryRecord] | None:
    """Decide what existing geometry a store replaces; None where the store itself is skipped.

    `record` is the row of the registry of what is to be added, as far as it is known, and `old` is what can be seen.
    Raises `DuplicateError` if there is something that may be neither left nor replaced.
    """
    # The uid of the record itself is the dataset of new cells, which no other store can have.
    own = set(record.cells_of) - {record.uid}
    same = [r for r in old if r.content_hash == record.content_hash and r.name == record.name]
    clash = [r for r in old if r.name == record.name and own & set(r.cells_of)]
    if options.on_duplicate == "skip" and same:
        return None
    gone = list({r.uid: r for r in (*same, *clash)}.values())
    if options.on_duplicate != "replace" and gone:
        # 'skip' leaves the same shapes alone, and helps with no others.
        ways = "'skip' or 'replace'" if same else "'replace'"
        raise DuplicateError(
            f"There is geometry {gone[0].name!r} of the same cells already, added {gone[0].created_at} from {gone[0].source}; choose another "
            f"name=..., or pass on_duplicate={ways}."
        )
    for one in gone:
        beyond = set(one.cells_of) - own
        # A store is replaced as a unit, so cells of other datasets would lose their shapes.
        if own and beyond:
            raise DuplicateError(
                f"The geometry {one.name!r} that would be replaced also has shapes of other datasets ({sorted(beyond)}); take it out "
                f"with drop_geometry({one.name!r}) first."
            )
    return gone
