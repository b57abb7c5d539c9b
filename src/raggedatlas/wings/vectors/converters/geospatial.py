"""Polygons with holes, lines and points with properties: GeoJSON, GeoParquet (shapely, geopandas) and SpatialData."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, SourceError, StoreError
from raggedatlas.model.ids import free_name, integer_ids
from raggedatlas.store.arrays import write_group_attributes
from raggedatlas.store.copies import local_copy
from raggedatlas.store.location import AnyPath, Location, refuse_symlink, refuse_symlinks
from raggedatlas.store.untrusted import guarded_zarr_store
from raggedatlas.wings.vectors.converters.content import (
    OBJECT_ID,
    TABLE_HOLDING,
    Capabilities,
    Content,
    decode_categories,
    encode_categories,
    read_errors,
    read_text,
    split_channels,
    table_content,
    table_losses,
    vertex_table,
)
from raggedatlas.wings.vectors.converters.interop import ORDER, PART, RING, shapely_geometries, to_geopandas
from raggedatlas.wings.vectors.geometry import Axis
from raggedatlas.wings.vectors.libraries import load_library
from raggedatlas.wings.vectors.shapes import Attribute, Attributes, Shapes, check_ids, counts_to_offsets, object_rows

OUTLINE = (PART, RING, ORDER)
RESERVED = (OBJECT_ID, "geometry")
"""Properties that are ids and geometries, so no attribute can have their names."""

INDEX = "index"
"""Key of the metadata: the object attribute that was the index of a frame, or the ids of features."""

BOUNDARY_HOLDING = Capabilities(
    kinds=("point_cloud", "line", "polyline", "streamline", "graph", "skeleton"), dims=(2, 3), link=(), apart=True
)

POLYGONS, POINTS = ("Polygon", "MultiPolygon"), ("Point", "MultiPoint")
LINES = ("LineString", "LinearRing", "MultiLineString")

KIND = "geometry_type"
"""Key of a file for a kind that geometries do not tell: a ``skeleton`` is drawn as a graph, a ``streamline`` or ``line`` as a polyline."""


def read_geojson(path: Path) -> Content:
    """Read a GeoJSON file; see `shapes_of_geometries`. A ``crs`` is kept where the file names one."""
    shapely = load_library("shapely")
    with read_errors(path, "GeoJSON", ValueError, KeyError, AttributeError, TypeError):
        document = json.loads(read_text(path))
        # QuPath also writes a plain list of features.
        if isinstance(document, list):
            document = {"type": "FeatureCollection", "features": document}
        features = document["features"] if document.get("type") == "FeatureCollection" else [document]
        geometries = np.empty(len(features), object)
    for row, feature in enumerate(features):
        try:
            drawn = feature.get("geometry") if feature.get("type") == "Feature" else feature
            geometries[row] = None if drawn is None else shapely.geometry.shape(drawn)
        except Exception as error:  # noqa: BLE001 - the library raises whatever a broken geometry leads to
            raise SourceError(f"{path}: feature {row} has no geometry that can be read: {error}.") from None
    with read_errors(path, "GeoJSON", ValueError, TypeError):
        records = [dict(feature.get("properties") or {}) for feature in features]
    # RFC 7946 dropped `crs`, but GDAL still writes it as in GeoJSON 2008.
    metadata = {"crs": document["crs"]} if document.get("crs") else {}
    members = Counter(name for feature in features if feature.get("type") == "Feature" for name in feature)
    if "id" in members and not any("id" in properties for properties in records):
        metadata[INDEX] = "id"
        for feature, properties in zip(features, records, strict=True):
            properties["id"] = feature.get("id")
    read = {"type", "geometry", "properties", "bbox", metadata.get(INDEX)}
    left = [f"{name!r} of {n:,} features is left out" for name, n in members.items() if name not in read]
    if document.get("type") == "FeatureCollection":
        whole = {"type", "features", "crs", "bbox", KIND}
        left += [f"{name!r} of the collection is left out" for name in document if name not in whole]
    names = list(dict.fromkeys(name for properties in records for name in properties))
    columns = {name: column_of([properties.get(name) for properties in records]) for name in names}
    shapes = _as_kind(shapes_of_geometries(geometries, columns, str(path)), document)
    return Content(shapes, metadata, left=tuple(left))


def _as_kind(shapes: Shapes, said: Any) -> Shapes:  # noqa: ANN401  (a JSON document, or attributes of a frame)
    """Return shapes as the kind that their file names, if they can be."""
    kind = said.get(KIND) if isinstance(said, Mapping) else None
    fits = {"graph": ("skeleton",), "polyline": ("line", "streamline")}.get(shapes.kind, ())
    return replace(shapes, kind=kind) if kind in fits else shapes


def read_geoparquet(path: Path) -> Content:
    """Read a GeoParquet file; see `shapes_of_geometries`. The ``crs`` is in the metadata as PROJJSON."""
    geopandas = load_library("geopandas")
    with read_errors(path, "GeoParquet"):
        frame = geopandas.read_parquet(path)
    content = frame_content(frame, str(path))
    return replace(content, shapes=_as_kind(content.shapes, frame.attrs))


def frame_content(frame: Any, what: str) -> Content:  # noqa: ANN401  (a GeoDataFrame)
    """Return the content of a GeoDataFrame.

    Its index becomes ids where it is integers, else an object attribute of its name (``name`` if it has none). The
    metadata name it, so that writers make it the index again.
    """
    others = [name for name in frame.columns if name != frame.geometry.name and str(frame[name].dtype) == "geometry"]
    columns = {
        str(name): column_of(frame[name].astype(object).where(frame[name].notna(), None).tolist(), frame[name].dtype)
        for name in frame.columns.drop([frame.geometry.name, *others])
    }
    left = tuple(f"geometries {name!r} are left out, beside {frame.geometry.name!r}" for name in others)
    metadata = {} if frame.crs is None else {"crs": json.loads(frame.crs.to_json())}
    index = frame.index.to_numpy()
    if index.dtype.kind in "iu":
        is_plain = np.array_equal(index, np.arange(len(index)))
        if OBJECT_ID not in columns and not (is_plain and frame.index.name is None):
            columns[OBJECT_ID] = Attribute(index)
            metadata[INDEX] = str(frame.index.name or OBJECT_ID)
    else:
        metadata[INDEX] = free_name(str(frame.index.name or "name"), columns)
        columns[metadata[INDEX]] = Attribute(np.array([str(name) for name in index], dtype=str))
    return Content(shapes_of_geometries(frame.geometry.to_numpy(), columns, what), metadata, left=left)


def column_of(values: Sequence[Any], kind: Any = None) -> Attribute:  # noqa: ANN401  (a dtype)
    """Return a column of properties: numbers if all are numbers, else texts; missing values are absent.

    Truth values are marked ``boolean`` in the metadata, and lists and mappings are JSON, marked ``json``, so that
    GeoJSON has them again.
    """
    there = np.array([value is not None and value == value for value in values], bool)  # noqa: PLR0124 - NaN
    present = None if there.all() else there
    having = [value for value, has in zip(values, there, strict=True) if has]
    kind = getattr(kind, "numpy_dtype", kind)
    narrow = kind if getattr(kind, "kind", "") in tuple("iuf") else None
    if having and all(isinstance(value, bool | np.bool_) for value in having):
        flags = np.array([bool(has and value) for value, has in zip(values, there, strict=True)])
        return Attribute(flags, present=present, metadata={"boolean": True})
    if having and all(isinstance(value, int | float | np.number | np.bool_) for value in having):
        # Missing floats become NaN; missing integers have no such value and become 0 under a mask.
        is_float = all(isinstance(value, float | np.floating) for value in having)
        filled = [value if has else (np.nan if is_float else 0) for value, has in zip(values, there, strict=True)]
        numbers = np.array(filled)
        return Attribute(numbers.astype(narrow or numbers.dtype), present=None if is_float else present)
    texts = [""] * len(there)
    for row in np.flatnonzero(there).tolist():
        value = values[row]
        is_date = hasattr(value, "isoformat")
        texts[row] = (
            value if isinstance(value, str) else value.isoformat() if is_date else json.dumps(value, default=str)
        )
    is_json = having and all(isinstance(value, list | dict) for value in having)
    return Attribute(np.array(texts, dtype=str), present=present, metadata={"json": True} if is_json else {})


def shapes_of_geometries(geometries: NDArray[Any], columns: Mapping[str, Attribute], what: str) -> Shapes:
    """Return shapely geometries as shapes, an object each.

    All are polygons, or all lines, or all points; each also multiple. `columns` are their properties, of which
    ``object_id`` becomes the ids, and `what` names the file in messages.

    Polygons of one ring each become polylines whose last vertex is the first again. Polygons with holes or of several
    parts become a graph, each ring a cycle of links, with the vertex attributes ``part``, ``ring`` (0 is the outer one)
    and ``order``. Lines become polylines; lines of several parts a graph, in which places that an object's lines share
    are one vertex. Points become a point cloud, without objects where each feature is one point (its properties are
    then vertex attributes).
    """
    shapely = load_library("shapely")
    geometries, family, deep = _of_one_family(geometries, what)
    columns = dict(columns)
    numbers = _take_ids(columns, what)
    # Refused by `to_ragged_array`, which infers a type from the geometries.
    if not len(geometries):
        return Shapes("polyline", np.zeros((0, 2)), np.zeros(1, np.int64), object_attributes=columns)
    _, positions, offsets = shapely.to_ragged_array(geometries, include_z=deep)
    offsets = tuple(np.asarray(part, np.int64) for part in offsets)
    if family is POLYGONS:
        return _polygons(positions, offsets, numbers, columns)
    if family is LINES and len(offsets) == 2:
        # Lines of several parts are a graph: each place of an object once, linked along the lines.
        lines, features = offsets
        n = len(features) - 1
        owner = np.repeat(np.arange(n), np.diff(lines[features]))
        # -0.0 and 0.0 are one place.
        places, rows = np.unique(np.column_stack([owner, positions + 0.0]), axis=0, return_inverse=True)
        ends = np.ones(len(positions), bool)
        ends[lines[1:] - 1] = False
        first = np.flatnonzero(ends)
        links = np.stack([rows.ravel()[first], rows.ravel()[first + 1]], 1)
        bounds = counts_to_offsets(np.bincount(places[:, 0].astype(np.int64), minlength=n))
        counts = counts_to_offsets(np.bincount(owner[first], minlength=n))
        return Shapes("graph", places[:, 1:], bounds, numbers, links, counts, object_attributes=columns)
    if family is LINES:
        return Shapes("polyline", positions, offsets[0], numbers, object_attributes=columns)
    # Without offsets every feature is one `Point`, so its properties can be values of vertices.
    if not offsets and numbers is None:
        attributes = {}
        for name, column in columns.items():
            if column.values.dtype.kind in "iuf":
                attributes[name] = column
                continue
            # Vertices hold numbers only, so texts become codes.
            texts = column.values.astype(object)
            texts[np.zeros(len(texts), bool) if column.present is None else ~column.present] = None
            coded = encode_categories(texts)
            attributes[name] = replace(coded, metadata={**coded.metadata, **column.metadata})
        return Shapes("point_cloud", positions, vertex_attributes=attributes)
    bounds = offsets[0] if offsets else np.arange(len(positions) + 1)
    return Shapes("point_cloud", positions, bounds, numbers, object_attributes=columns)


def _of_one_family(geometries: NDArray[Any], what: str) -> tuple[NDArray[Any], tuple[str, ...], bool]:
    """Return geometries in a form that has arrays, their kinds, and whether they have z; refuse empty and mixed ones."""
    shapely = load_library("shapely")
    for row, geometry in enumerate(geometries):
        if geometry is None or geometry.is_empty:
            raise SourceError(f"{what}: feature {row} has no geometry, or an empty one. Leave it out.")
    kinds = {geometry.geom_type for geometry in geometries}
    # A line that is closed and one that is not are both polylines.
    mixed = {"Polygon", "LineString"} <= kinds <= {"Polygon", "LineString", "LinearRing"}
    if mixed and not any(shapely.get_num_interior_rings(geometries)):
        geometries = np.array([g.exterior if g.geom_type == "Polygon" else g for g in geometries], object)
        kinds = {"LineString"}
    family = next((family for family in (POLYGONS, LINES, POINTS) if kinds <= {*family}), None)
    if family is None:
        raise SourceError(
            f"{what} has features of the kinds {', '.join(sorted(kinds))}; expected all polygons, lines or points."
        )
    deep = {bool(geometry.has_z) for geometry in geometries}
    # Otherwise `include_z` below, one for all, would silently drop the z of those that have it.
    if len(deep) > 1:
        raise SourceError(f"{what} has features with and without z; expected one or the other.")
    if family is LINES:  # Rings have no array form in shapely.
        rings = [shapely.LineString(g) if g.geom_type == "LinearRing" else g for g in geometries]
        geometries = np.array(rings, object)
    return geometries, family, deep == {True}


def _take_ids(columns: dict[str, Attribute], what: str) -> NDArray[np.int64] | None:
    """Take the ids of objects out of the columns; texts are no ids, and stay."""
    ids = columns.get(OBJECT_ID)
    if ids is None or ids.values.dtype.kind not in "iuf":
        return None
    missing = np.zeros(len(ids.values), bool) if ids.present is None else ~ids.present
    values = ids.values
    if values.dtype.kind == "f":
        found = integer_ids(values, f"{what}: the values of {OBJECT_ID!r}")
        missing |= found.is_null().to_numpy(zero_copy_only=False)
        values = found.fill_null(0).to_numpy()
    if missing.any():
        raise SourceError(
            f"{what}: feature {int(np.argmax(missing))} has no {OBJECT_ID!r}; expected one in each, or none."
        )
    del columns[OBJECT_ID]
    return check_ids(values, len(values))


def _polygons(
    positions: NDArray[Any],
    offsets: tuple[NDArray[np.int64], ...],
    ids: NDArray[np.int64] | None,
    columns: Mapping[str, Attribute],
) -> Shapes:
    # Starts of rings in `positions`, of polygons in `rings` and, for multipolygons, of features in `polygons`.
    rings, polygons = offsets[0], offsets[1]
    features = offsets[2] if len(offsets) == 3 else np.arange(len(polygons))
    if len(rings) == len(features):
        return Shapes("polyline", positions, rings, ids, object_attributes=columns)
    counts = np.diff(rings) - 1  # a ring of shapely ends where it begins
    kept = np.ones(len(positions), bool)
    kept[rings[1:] - 1] = False
    bounds = counts_to_offsets(counts)
    n, ring_of = int(bounds[-1]), np.repeat(np.arange(len(counts)), counts)
    follow = np.arange(1, n + 1)
    follow[bounds[1:] - 1] = bounds[:-1]
    part_of_ring = np.repeat(np.arange(len(polygons) - 1), np.diff(polygons))
    feature_of_part = np.repeat(np.arange(len(features) - 1), np.diff(features))
    # From feature to polygon to ring to vertex. Each vertex starts one link, so these are also the link offsets.
    vertex_bounds = bounds[polygons[features]]
    part = part_of_ring[ring_of] - features[feature_of_part[part_of_ring[ring_of]]]
    return Shapes(
        "graph",
        positions[kept],
        vertex_bounds,
        ids,
        np.stack([np.arange(n), follow], 1),
        vertex_bounds,
        {
            PART: Attribute(part.astype(np.int32)),
            RING: Attribute((ring_of - polygons[part_of_ring[ring_of]]).astype(np.int32)),
            ORDER: Attribute((np.arange(n) - np.repeat(vertex_bounds[:-1], np.diff(vertex_bounds))).astype(np.int32)),
        },
        object_attributes=columns,
    )


def write_geojson(content: Content, path: Path) -> None:
    """Write shapes as GeoJSON, an object a feature; ids are the property ``object_id``, missing values are null.

    Raises `SourceError` for infinite values, which JSON has no number for.
    """
    shapely = load_library("shapely")
    geometries, columns = features_of(content.shapes)
    # JSON has no NaN; it is the only value that differs from itself.
    values = {name: [v if v == v else None for v in column.tolist()] for name, column in columns.items()}  # noqa: PLR0124
    for name, attribute in _properties(content.shapes).items():
        if attribute.metadata.get("json") and name in values:
            values[name] = [None if text is None else json.loads(text) for text in values[name]]
    ids = values.pop("id") if content.metadata.get(INDEX) == "id" and "id" in values else None
    features = [
        {
            "type": "Feature",
            **({} if ids is None or ids[row] is None else {"id": ids[row]}),
            "properties": {name: column[row] for name, column in values.items()},
            "geometry": shapely.geometry.mapping(geometry),
        }
        for row, geometry in enumerate(geometries)
    ]
    document: dict[str, Any] = {"type": "FeatureCollection", "features": features, **_kind_of(content.shapes)}
    if "crs" in content.metadata:
        document["crs"] = content.metadata["crs"]
    try:
        text = json.dumps(document, allow_nan=False)
    except ValueError:
        raise SourceError(f"{path} cannot hold infinite numbers, as JSON has none. Replace or remove them.") from None
    path.write_text(text, encoding="utf-8")


def write_geoparquet(content: Content, path: Path) -> None:
    """Write shapes as GeoParquet, an object a row."""
    geopandas = load_library("geopandas")
    geometries, columns = features_of(content.shapes)
    crs = content.metadata.get("crs")
    # GeoJSON writes a name in its own form, which PROJ does not take.
    if isinstance(crs, Mapping) and crs.get("type") == "name" and isinstance(crs.get("properties"), Mapping):
        crs = crs["properties"].get("name")
    frame = _indexed(geopandas.GeoDataFrame(columns, geometry=list(geometries), crs=crs), content)
    frame.attrs.update(_kind_of(content.shapes))
    # None writes the index if it is not 0, 1, ...
    frame.to_parquet(path, index=None)


def _indexed(frame: Any, content: Content) -> Any:  # noqa: ANN401  (a GeoDataFrame)
    """Give a frame the index that it was read with."""
    name, ids = content.metadata.get(INDEX), content.shapes.ids
    if isinstance(name, str) and name in frame.columns and name != OBJECT_ID:
        return frame.set_index(name)
    if isinstance(name, str) and ids is not None:
        frame = frame.drop(columns=OBJECT_ID, errors="ignore").set_axis(ids)
        frame.index.name = None if name == OBJECT_ID else name
    return frame


def _kind_of(shapes: Shapes) -> dict[str, str]:
    return {KIND: shapes.kind} if shapes.kind in ("skeleton", "line", "streamline") else {}


def features_of(shapes: Shapes) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """Return shapely geometries and their properties, None where there is none."""
    geometries = shapely_geometries(shapes)
    attributes = _properties(shapes)
    columns = {name: plain_column(a) for name, a in attributes.items() if a.values.ndim == 1 and name not in RESERVED}
    # Points without ids would be read as one cloud without objects.
    if shapes.ids is not None and (
        shapes.kind == "point_cloud" or not np.array_equal(shapes.ids, np.arange(shapes.n_objects))
    ):
        columns[OBJECT_ID] = shapes.ids
    return geometries, columns


def _properties(shapes: Shapes) -> Mapping[str, Attribute]:
    """Return the attributes of features: objects, or points without objects."""
    return shapes.object_attributes if shapes.ids is not None else shapes.vertex_attributes


def plain_column(attribute: Attribute) -> NDArray[Any]:
    """Return an attribute's values; where an object has none, NaN among floats, else None."""
    values = decode_categories(attribute)
    if attribute.metadata.get("boolean"):
        values = values.astype(bool)
    if attribute.present is None or attribute.present.all():
        return values
    filled = values.copy() if values.dtype.kind == "f" else values.astype(object)
    filled[~attribute.present] = None
    return filled


def boundary_losses(content: Content) -> Iterator[str]:
    """Yield which attributes cannot be properties, and vertices of a graph that become one."""
    shapes = content.shapes
    outlines = {*OUTLINE} <= set(shapes.vertex_attributes)
    if shapes.ids is not None:
        yield from (
            f"vertex attribute {name!r} is left out"
            for name in shapes.vertex_attributes
            if name not in OUTLINE or not outlines
        )
    if shapes.kind in ("graph", "skeleton") and not outlines and shapes.n_links:
        used = np.unique(shapes.edges())
        places = np.column_stack([object_rows(shapes), shapes.positions])[used] + 0.0
        if len(np.unique(places, axis=0)) < len(used):
            yield "vertices: those of an object at one place become one"
    family = "vertex" if shapes.ids is None else "object"
    yield from _property_losses(family, getattr(shapes, f"{family}_attributes"), RESERVED)


def _property_losses(family: str, attributes: Attributes, reserved: Sequence[str]) -> Iterator[str]:
    """Yield which attributes cannot be properties of a feature."""
    for name, attribute in attributes.items():
        if attribute.values.ndim == 2:
            yield f"{family} attribute {name!r} is left out: it has {attribute.n_channels} channels"
        elif name in reserved:
            yield f"{family} attribute {name!r} is left out: the file has another property of this name"


SPATIALDATA_HOLDING = Capabilities(kinds=("point_cloud", "polyline", "graph"), dims=(2, 3), link=(), apart=True)

KINDS = ("points", "shapes")
SYSTEM = "global"
KEY = "spatialdata"
"""Key of the metadata: ``feature_key`` and ``instance_key`` of points."""


def read_spatialdata(
    path: AnyPath, *, element: str | None = None, system: str = SYSTEM, objects: str | None = None
) -> Content:
    """Read one points or shapes element of a SpatialData store.

    `path` is the store, or the element's own folder below it, e.g. ``data.zarr/shapes/cells``. `element` is
    ``"points/NAME"`` or ``"shapes/NAME"``; None: the only one there is. Positions are moved into the coordinate system
    `system` (identity, scale, translation, affine, and sequences of them). `objects` is, for points, the column with
    the object of each.

    Points become a point cloud, with their columns as vertex attributes (texts as codes). Circles become objects of one
    point with the vertex attribute ``radius``. For polygons see `shapes_of_geometries`. Symlinks in a local element are
    refused with a `StoreError`.
    """
    folder = _element(path, element)
    if isinstance(folder, Path):
        for part in (folder, folder.parent) if folder != path else ():
            refuse_symlink(part)
        refuse_symlinks(Location(str(folder)))
    attributes = _attributes(folder)
    kind = str(attributes.get("encoding-type", f"ngff:{folder.parent.name}")).removeprefix("ngff:")
    with local_copy(folder) as local:
        if kind == "points":
            import pyarrow as pa
            import pyarrow.dataset as pads

            with read_errors(local / "points.parquet", "Parquet folder", pa.ArrowInvalid, OSError):
                table = pads.dataset(local / "points.parquet", format="parquet").to_table()
            # Stores of the first format may declare null axes; `table_content` then looks for the usual columns.
            axes = [axis for axis in attributes.get("axes") or [] if axis != "c"] or None
            content = table_content(table, str(local), axes=axes, objects=objects)
            keys = {key: value for key, value in attributes.get("spatialdata_attrs", {}).items() if key != "version"}
            content = replace(content, metadata={KEY: keys} if keys else {})
        else:
            content = _read_shapes(local, attributes)
    # An element that was asked for, by name or path, leaves nothing out.
    others = spatialdata_elements(path) if element is None else []
    left = (f"element {name!r} is left out" for name in others if path / name != folder)
    return _moved(replace(content, left=(*content.left, *left)), attributes, system, folder)


def is_spatialdata(path: AnyPath) -> bool:
    """Return whether a folder is a SpatialData store, or one of its elements of points or shapes."""
    try:
        attributes = _attributes(path)
    except SourceError:
        attributes = {}
    if str(attributes.get("encoding-type")) in {f"ngff:{kind}" for kind in KINDS}:
        return True
    # A remote folder is not listed to find out.
    return bool(_elements(path)) if isinstance(path, Path) else "spatialdata_attrs" in attributes


def _elements(path: AnyPath) -> list[str]:
    return [
        f"{kind}/{folder.name}"
        for kind in KINDS
        if (path / kind).is_dir()
        for folder in _members(path / kind)
        if (folder / "zarr.json").exists() or (folder / ".zattrs").exists()
    ]


def _members(folder: AnyPath) -> list[AnyPath]:
    return sorted(folder.iterdir(), key=str)


def spatialdata_elements(path: AnyPath) -> list[str]:
    """Return all elements of a SpatialData store, tables and images too; none for an element itself."""
    if not _elements(path):
        return []
    kinds = [kind for kind in ("table", "tables", "images", "labels") if (path / kind).is_dir()]
    others = [f"{kind}/{p.name}" for kind in kinds for p in _members(path / kind) if p.is_dir()]
    return [*_elements(path), *others]


def _element(path: AnyPath, requested: str | None) -> AnyPath:
    elements = _elements(path)
    if not elements and requested is None and path.parent.name in KINDS:
        return path
    if requested is None and len(elements) == 1:
        return path / elements[0]
    if requested not in elements:
        what = f"no element {requested!r}" if requested else f"{len(elements)} elements of points and shapes"
        raise SourceError(f"{path} has {what}; choose one: element= of {', '.join(elements) or 'none'}.")
    return path / requested


def _attributes(folder: AnyPath) -> dict[str, Any]:
    try:
        try:
            return dict(json.loads((folder / "zarr.json").read_bytes()).get("attributes", {}))
        except (NotFoundError, FileNotFoundError, NotADirectoryError):
            return dict(json.loads((folder / ".zattrs").read_bytes()))
    except StoreError:
        raise
    except (NotFoundError, OSError, ValueError, AttributeError):
        raise SourceError(
            f"{folder} has no zarr.json and no .zattrs that can be read; it is no SpatialData element."
        ) from None


def _read_shapes(folder: Path, attributes: Mapping[str, Any]) -> Content:
    geopandas, radius = load_library("geopandas"), None
    if str(attributes.get("spatialdata_attrs", {}).get("version")) == "0.1":
        import zarr

        shapely = load_library("shapely")
        with read_errors(folder, "shapes element"):
            group = zarr.open_group(guarded_zarr_store(zarr.storage.LocalStore(folder, read_only=True)), mode="r")
            coordinates, index = np.asarray(group["coords"]), np.asarray(group["Index"])
            kind = shapely.GeometryType(int(attributes["spatialdata_attrs"]["geos"]["type"]))
            names = sorted(name for name in group if name.startswith("offset"))
            offsets = tuple(np.asarray(group[name]).ravel() for name in names)
            geometries = np.asarray(shapely.from_ragged_array(kind, coordinates, offsets or None), object)
            radius = np.asarray(group[RADIUS]) if RADIUS in group else None
        frame = geopandas.GeoDataFrame(geometry=list(geometries), index=index)
    else:
        with read_errors(folder / "shapes.parquet", "GeoParquet"):
            frame = geopandas.read_parquet(folder / "shapes.parquet")
        if RADIUS in frame.columns and {*frame.geometry.geom_type} <= {"Point"}:
            radius = frame.pop(RADIUS).to_numpy()
    content = frame_content(frame, str(folder))
    if radius is None:
        return content
    # Points with a radius are circles, an object each.
    old = content.shapes
    shapes = replace(
        old,
        offsets=np.arange(old.n_vertices + 1),
        ids=np.arange(old.n_vertices) if old.ids is None else old.ids,
        vertex_attributes={RADIUS: Attribute(radius)},
        object_attributes=old.vertex_attributes if old.ids is None else old.object_attributes,
    )
    return replace(content, shapes=shapes)


def _moved(content: Content, attributes: Mapping[str, Any], system: str, folder: AnyPath) -> Content:
    """Move positions into a coordinate system."""
    old = content.shapes
    try:
        transforms = attributes.get("coordinateTransformations") or []
        names = [transform.get("output", {}).get("name", SYSTEM) for transform in transforms]
        if transforms and system not in names:
            raise SourceError(f"{folder} is not in the coordinate system {system!r}; it is in {', '.join(names)}.")
        matrix = _matrix(transforms[names.index(system)], old.n_dims, folder) if transforms else np.eye(old.n_dims + 1)
    except SourceError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"{folder} has a transformation that cannot be read: {type(error).__name__}: {error}; expected numbers for "
            "each axis. Correct coordinateTransformations in its attributes."
        ) from None
    if np.array_equal(matrix, np.eye(old.n_dims + 1)):
        return content
    linear = matrix[:-1, :-1]
    positions = old.positions.astype(np.float64) @ linear.T + matrix[:-1, -1]
    moved = replace(old, positions=positions)
    if _are_circles(old):
        gram = linear.T @ linear
        if not np.allclose(gram, np.eye(len(gram)) * gram[0, 0], rtol=1e-6, atol=1e-9 * np.abs(gram).max()):
            raise SourceError(
                f"{folder} holds circles, which its transformation to {system!r} makes ellipses: the axes are scaled by {linear.tolist()}. Make "
                "them polygons first (in geopandas `frame.buffer(frame.radius)`), or choose another coordinate system with system=."
            )
        radius = old.vertex_attributes["radius"]
        scaled = replace(radius, values=radius.values * np.sqrt(gram[0, 0]))
        moved = replace(moved, vertex_attributes={**old.vertex_attributes, "radius": scaled})
    return replace(content, shapes=moved)


def _matrix(transform: Mapping[str, Any], n_dims: int, folder: AnyPath) -> NDArray[np.float64]:
    """Return a transformation as a matrix over (x, y, z, 1), whatever the order of its own axes."""
    if transform.get("type") == "sequence":
        product = np.eye(n_dims + 1)
        # The first transformation is applied first, so each is multiplied from the left.
        for part in transform.get("transformations", []):
            product = _matrix(part, n_dims, folder) @ product
        return product
    orders = [[str(axis["name"]) for axis in transform.get(end, {}).get("axes", [])] for end in ("input", "output")]
    # Axes may be listed as (y, x); `rows` has the places of x, y and z among them.
    rows = [[order.index(name) for name in "xyz"[:n_dims]] if order else list(range(n_dims)) for order in orders]
    kind, matrix = transform.get("type"), np.eye(n_dims + 1)
    if kind == "scale":
        matrix[range(n_dims), range(n_dims)] = np.array(transform["scale"], np.float64)[rows[0]]
    elif kind == "translation":
        matrix[:-1, -1] = np.array(transform["translation"], np.float64)[rows[0]]
    elif kind == "affine":
        given = np.array(transform["affine"], np.float64)
        matrix[:-1, :-1] = given[np.ix_(rows[1], rows[0])]
        matrix[:-1, -1] = given[rows[1], -1]
    elif kind != "identity":
        raise SourceError(
            f"{folder} has the transformation {kind!r}; identity, scale, translation, affine and sequence are read."
        )
    return matrix


def write_spatialdata(content: Content, path: Path, *, name: str = "elements") -> None:
    """Write a SpatialData store with one element: ``points/NAME`` or ``shapes/NAME``.

    The content is a point cloud (with objects of one point each and a ``radius``: circles), polylines that are closed,
    or polygons as a graph. `name` is that of the element.
    """
    import pyarrow.parquet as papq

    shapes = content.shapes
    axes = ["x", "y", "z"][: shapes.n_dims]
    circles = _are_circles(shapes)
    kind = "shapes" if circles or shapes.kind != "point_cloud" else "points"
    element = path / kind / name
    element.mkdir(parents=True)
    versions: dict[str, Any] = {"version": "0.2" if kind == "points" else "0.3"}
    if kind == "points":
        versions |= content.metadata.get(KEY, {})
        # The columns need the names that the element declares as its `axes`, whatever those of the content are.
        named = Content(shapes, axes=tuple(Axis(axis) for axis in axes))
        (element / "points.parquet").mkdir()
        papq.write_table(vertex_table(named), element / "points.parquet" / "part.0.parquet", compression="zstd")
    else:
        lost = {*RESERVED, RADIUS} if circles else {*RESERVED}
        own = {n: a for n, a in shapes.object_attributes.items() if n not in lost and a.values.ndim == 1}
        frame = to_geopandas(replace(shapes, object_attributes=own))
        kinds = {*frame.geometry.geom_type}
        # Refused after folders were made; `written_aside` removes them.
        if not kinds <= ({"Point"} if circles else {"Polygon", "MultiPolygon"}):
            raise SourceError(f"SpatialData holds circles and polygons; these are {', '.join(sorted(kinds))}.")
        if circles:
            frame[RADIUS] = next(split_channels("", shapes.vertex_attributes[RADIUS]))[1]
        _indexed(frame, content).to_parquet(element / "shapes.parquet")
    space = [{"name": axis, "type": "space", "unit": "unit"} for axis in axes]
    identity = {
        "type": "identity",
        "input": {"name": "".join(axes), "axes": space},
        "output": {"name": SYSTEM, "axes": space},
    }
    store = Location.of(path)
    write_group_attributes(
        store, "", {"spatialdata_attrs": {"version": "0.2", "spatialdata_software_version": "0.7.0"}}
    )
    write_group_attributes(store, kind, {})
    facts = {"encoding-type": f"ngff:{kind}", "axes": axes, "spatialdata_attrs": versions}
    write_group_attributes(store, f"{kind}/{name}", {**facts, "coordinateTransformations": [identity]})


RADIUS = "radius"
"""Vertex attribute and column of circles."""


def _are_circles(shapes: Shapes) -> bool:
    """Return whether shapes are objects of one point each with a radius."""
    if shapes.kind != "point_cloud" or shapes.ids is None or RADIUS not in shapes.vertex_attributes:
        return False
    alone = len(shapes.ids) == shapes.n_vertices and bool((shapes.vertex_counts == 1).all())
    return alone and shapes.vertex_attributes[RADIUS].values.ndim == 1


def spatialdata_losses(content: Content) -> list[str]:
    """Return what is left out: attributes of vertices of polygons and circles, and what a table of points does not hold."""
    shapes, circles = content.shapes, _are_circles(content.shapes)
    if shapes.kind == "point_cloud" and not circles:
        table = replace(content, axes=None)
        losses = [*TABLE_HOLDING.losses(replace(shapes, groups=None)), *table_losses(table)]
        return list(dict.fromkeys(losses))
    kept = (RADIUS,) if circles else OUTLINE
    lost = [f"vertex attribute {name!r} is left out" for name in shapes.vertex_attributes if name not in kept]
    reserved = (*RESERVED, RADIUS) if circles else RESERVED
    return [*lost, *_property_losses("object", shapes.object_attributes, reserved)]
