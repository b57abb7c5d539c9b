"""SpatialData: points and shapes of a SpatialData store, by a small reader and writer of our own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.boundaries import frame_content, shapes_of_geometries
from raggedatlas.vectors.converters.content import Capabilities, Content
from raggedatlas.vectors.converters.tables import split_channels, table_content, vertex_table
from raggedatlas.vectors.geometry import Axis
from raggedatlas.vectors.libraries import library
from raggedatlas.vectors.objects import to_geopandas
from raggedatlas.vectors.shapes import Attribute, Shapes

SPATIALDATA_HOLDING = Capabilities(kinds=("point_cloud", "polyline", "graph"), dims=(2, 3), link=())

KINDS = ("points", "shapes")
SYSTEM = "global"
KEY = "spatialdata"
"""Key of the metadata: ``feature_key`` and ``instance_key`` of points."""


def read_spatialdata(
    path: Path, *, element: str | None = None, system: str = SYSTEM, objects: str | None = None
) -> Content:
    """Read one points or shapes element of a SpatialData store.

    Parameters
    ----------
    path : Path
        The store, or the element's own folder below it, e.g. ``data.zarr/shapes/cells``.
    element : str or None
        ``"points/NAME"`` or ``"shapes/NAME"``; None: the only one there is.
    system : str
        The coordinate system; positions are moved into it (identity, scale, translation, affine, and sequences of them).
    objects : str or None
        Points: the column that says whose each is.

    Returns
    -------
    Content
        Points: a point cloud, columns as vertex attributes (texts as codes). Circles: one point an object with the vertex attribute ``radius``.
        Polygons: see `raggedatlas.vectors.converters.boundaries.shapes_of_geometries`.

    Raises
    ------
    SourceError
        If there is no such element, coordinate system or transformation, or the element cannot be read.
    MissingExtraError
        For shapes without the extra ``geometry``.
    """
    folder = _element(path, element)
    attributes = _attributes(folder)
    kind = str(attributes.get("encoding-type", f"ngff:{folder.parent.name}")).removeprefix("ngff:")
    content = _points(folder, attributes, objects) if kind == "points" else _shapes(folder, attributes)
    return _moved(content, attributes, system, folder)


def is_spatialdata(path: Path) -> bool:
    """Tell whether a folder is a SpatialData store, or one of its elements of points or shapes."""
    try:
        return bool(_elements(path)) or str(_attributes(path).get("encoding-type")) in {f"ngff:{k}" for k in KINDS}
    except SourceError:
        return False


def _elements(path: Path) -> list[str]:
    return [
        f"{kind}/{folder.name}"
        for kind in KINDS
        if (path / kind).is_dir()
        for folder in sorted((path / kind).iterdir())
        if (folder / "zarr.json").exists() or (folder / ".zattrs").exists()
    ]


def _element(path: Path, asked: str | None) -> Path:
    found = _elements(path)
    if not found and asked is None and path.parent.name in KINDS:
        return path
    if asked is None and len(found) == 1:
        return path / found[0]
    if asked not in found:
        what = f"no element {asked!r}" if asked else f"{len(found)} elements of points and shapes"
        raise SourceError(f"{path} has {what}; choose one: element= of {', '.join(found) or 'none'}.")
    return path / asked


def _attributes(folder: Path) -> dict[str, Any]:
    try:
        if (folder / "zarr.json").exists():
            return dict(json.loads((folder / "zarr.json").read_text(encoding="utf-8")).get("attributes", {}))
        return dict(json.loads((folder / ".zattrs").read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError):
        raise SourceError(
            f"{folder} has no zarr.json and no .zattrs that can be read; it is no SpatialData element."
        ) from None


def _points(folder: Path, attributes: Mapping[str, Any], objects: str | None) -> Content:
    import pyarrow as pa
    import pyarrow.dataset as pads

    try:
        table = pads.dataset(folder / "points.parquet", format="parquet").to_table()
    except (pa.ArrowInvalid, OSError) as error:
        raise SourceError(f"{folder} has no points.parquet that can be read: {error}.") from None
    content = table_content(
        table, str(folder), axes=[a for a in attributes.get("axes") or [] if a != "c"] or None, objects=objects
    )
    said = {key: value for key, value in attributes.get("spatialdata_attrs", {}).items() if key != "version"}
    return Content(content.shapes, {KEY: said} if said else {}, content.axes, content.left)


def _shapes(folder: Path, attributes: Mapping[str, Any]) -> Content:
    geopandas = library("geopandas")
    if str(attributes.get("spatialdata_attrs", {}).get("version")) == "0.1":
        return _old_shapes(folder, attributes)
    try:
        frame = geopandas.read_parquet(folder / "shapes.parquet")
    except Exception as error:  # noqa: BLE001 - the library raises whatever a damaged file leads to
        raise SourceError(f"{folder} has no shapes.parquet that can be read: {error}.") from None
    radius = frame.pop("radius") if "radius" in frame.columns else None
    content = frame_content(frame, str(folder))
    return content if radius is None else _circles(content, radius.to_numpy())


def _old_shapes(folder: Path, attributes: Mapping[str, Any]) -> Content:
    """Read the first format: arrays of coordinates and offsets."""
    import zarr

    shapely = library("shapely")
    try:
        group = zarr.open_group(folder, mode="r")
        coordinates, index = np.asarray(group["coords"]), np.asarray(group["Index"])
        kind = shapely.GeometryType(int(attributes["spatialdata_attrs"]["geos"]["type"]))
        names = sorted(name for name in group if name.startswith("offset"))
        offsets = tuple(np.asarray(group[name]).ravel() for name in names)
        geometries = np.asarray(shapely.from_ragged_array(kind, coordinates, offsets or None), object)
        radius = np.asarray(group["radius"]) if "radius" in group else None
    except Exception as error:  # noqa: BLE001 - zarr and shapely raise whatever a damaged element leads to
        raise SourceError(f"{folder} is no shapes element that can be read: {type(error).__name__}: {error}.") from None
    numbers = index.dtype.kind in "iu"
    column = Attribute(index if numbers else np.array([str(name) for name in index], dtype=str))
    shapes = shapes_of_geometries(geometries, {"object_id" if numbers else "name": column}, str(folder))
    content = Content(shapes)
    return content if radius is None else _circles(content, radius)


def _circles(content: Content, radius: NDArray[Any]) -> Content:
    """Make circles of points: an object each."""
    old = content.shapes
    columns = dict(old.object_attributes if old.ids is not None else old.vertex_attributes)
    ids = np.arange(old.n_vertices) if old.ids is None else old.ids
    shapes = Shapes(
        "point_cloud",
        old.positions,
        np.arange(old.n_vertices + 1),
        ids,
        vertex_attributes={"radius": Attribute(np.asarray(radius))},
        object_attributes=columns,
    )
    return Content(shapes, content.metadata, content.axes, content.left)


def _moved(content: Content, attributes: Mapping[str, Any], system: str, folder: Path) -> Content:
    """Move positions into a coordinate system."""
    transforms = attributes.get("coordinateTransformations") or []
    names = [said.get("output", {}).get("name", SYSTEM) for said in transforms]
    if transforms and system not in names:
        raise SourceError(f"{folder} is not in the coordinate system {system!r}; it is in {', '.join(names)}.")
    old = content.shapes
    matrix = _matrix(transforms[names.index(system)], old.n_dims, folder) if transforms else np.eye(old.n_dims + 1)
    if np.array_equal(matrix, np.eye(old.n_dims + 1)):
        return content
    positions = old.positions.astype(np.float64) @ matrix[:-1, :-1].T + matrix[:-1, -1]
    shapes = Shapes(
        old.kind,
        positions,
        old.offsets,
        old.ids,
        old.links,
        old.link_offsets,
        vertex_attributes=old.vertex_attributes,
        object_attributes=old.object_attributes,
    )
    return Content(shapes, content.metadata, content.axes, content.left)


def _matrix(said: Mapping[str, Any], n_dims: int, folder: Path) -> NDArray[np.float64]:
    """Return a transformation as a matrix over (x, y, z, 1), whatever the order of its own axes."""
    if said.get("type") == "sequence":
        made = np.eye(n_dims + 1)
        for part in said.get("transformations", []):
            made = _matrix(part, n_dims, folder) @ made
        return made
    orders = [[str(axis["name"]) for axis in said.get(end, {}).get("axes", [])] for end in ("input", "output")]
    rows = [[order.index(name) for name in "xyz"[:n_dims]] if order else list(range(n_dims)) for order in orders]
    kind, matrix = said.get("type"), np.eye(n_dims + 1)
    if kind == "scale":
        matrix[range(n_dims), range(n_dims)] = np.array(said["scale"], np.float64)[rows[0]]
    elif kind == "translation":
        matrix[:-1, -1] = np.array(said["translation"], np.float64)[rows[0]]
    elif kind == "affine":
        given = np.array(said["affine"], np.float64)
        matrix[:-1, :-1] = given[np.ix_(rows[1], rows[0])]
        matrix[:-1, -1] = given[rows[1], -1]
    elif kind != "identity":
        raise SourceError(
            f"{folder} has the transformation {kind!r}; identity, scale, translation, affine and sequence are read."
        )
    return matrix


def write_spatialdata(content: Content, path: Path, *, name: str = "elements") -> None:
    """Write a SpatialData store with one element: ``points/NAME`` or ``shapes/NAME``; circles where points have a ``radius``.

    Parameters
    ----------
    content : Content
        A point cloud (with objects of one point each and a ``radius``: circles), polylines that are closed, or polygons as a graph.
    path : Path
        The store.
    name : str
        Of the element.
    """
    import pyarrow.parquet as papq

    shapes = content.shapes
    axes = ["x", "y", "z"][: shapes.n_dims]
    circles = shapes.kind == "point_cloud" and shapes.ids is not None and "radius" in shapes.vertex_attributes
    kind = "shapes" if circles or shapes.kind != "point_cloud" else "points"
    element = path / kind / name
    element.mkdir(parents=True)
    said: dict[str, Any] = {"version": "0.2" if kind == "points" else "0.3"}
    if kind == "points":
        said |= content.metadata.get(KEY, {})
        named = Content(shapes, axes=tuple(Axis(axis) for axis in axes))
        (element / "points.parquet").mkdir()
        papq.write_table(vertex_table(named), element / "points.parquet" / "part.0.parquet", compression="zstd")
    else:
        frame = to_geopandas(shapes)
        kinds = {*frame.geometry.geom_type}
        if not kinds <= ({"Point"} if circles else {"Polygon", "MultiPolygon"}):
            raise SourceError(f"SpatialData holds circles and polygons; these are {', '.join(sorted(kinds))}.")
        if circles:
            frame["radius"] = next(split_channels("", shapes.vertex_attributes["radius"]))[1]
        frame.to_parquet(element / "shapes.parquet")
    space = [{"name": axis, "type": "space", "unit": "unit"} for axis in axes]
    identity = {
        "type": "identity",
        "input": {"name": "".join(axes), "axes": space},
        "output": {"name": SYSTEM, "axes": space},
    }
    _group(path, {"spatialdata_attrs": {"version": "0.2", "spatialdata_software_version": "0.7.0"}})
    _group(path / kind, {})
    _group(
        element,
        {
            "encoding-type": f"ngff:{kind}",
            "axes": axes,
            "spatialdata_attrs": said,
            "coordinateTransformations": [identity],
        },
    )


def _group(folder: Path, attributes: dict[str, Any]) -> None:
    text = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes})
    (folder / "zarr.json").write_text(text, encoding="utf-8")


def spatialdata_losses(shapes: Shapes) -> list[str]:
    """Say what is left out of the side that has no table: attributes of objects of points, of vertices of polygons."""
    if shapes.kind != "point_cloud":
        return [
            f"vertex attribute {n!r} is left out"
            for n in shapes.vertex_attributes
            if n not in ("part", "ring", "order")
        ]
    if "radius" in shapes.vertex_attributes and shapes.ids is not None:
        return [f"vertex attribute {name!r} is left out" for name in shapes.vertex_attributes if name != "radius"]
    return [f"object attribute {name!r} is left out" for name in shapes.object_attributes]
