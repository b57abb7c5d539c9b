"""Shapes as the objects of other libraries: trimesh, shapely and geopandas (extra ``geometry``)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.wings.vectors.converters.content import split_channels
from raggedatlas.wings.vectors.libraries import load_library
from raggedatlas.wings.vectors.shapes import SEQUENTIAL, Shapes, each_object, object_rows, take_objects

PART, RING, ORDER = "part", "ring", "order"
"""Vertex attributes: polygon of the object, ring of the polygon (0 is the outer one), and place in the object."""


def to_trimesh(shapes: Shapes) -> dict[int, Any]:
    """Return meshes as `trimesh.Trimesh`, by object id; with unchanged vertices and faces, and their attributes.

    Parameters
    ----------
    shapes : Shapes
        Meshes of triangles in 3-D.

    Raises
    ------
    SourceError
        If they are of another kind.
    MissingExtraError
        Without trimesh.

    Examples
    --------
    >>> corner = Shapes("mesh", np.eye(3), links=np.array([[0, 1, 2]]), ids=np.array([7]))
    >>> to_trimesh(corner)[7].faces.tolist()
    [[0, 1, 2]]
    """
    if shapes.kind != "mesh" or shapes.n_dims != 3 or (shapes.links is not None and shapes.links.shape[1] != 3):
        raise SourceError(f"A {shapes.kind} of {shapes.n_dims} axes makes no trimesh; expected triangles in 3-D.")
    trimesh = load_library("trimesh")
    result = {}
    for number, one in each_object(shapes):
        # Processing is off below, as it would merge equal vertices: rows must stay those of the store.
        result[number] = trimesh.Trimesh(
            vertices=one.positions,
            faces=one.edges(3),
            vertex_attributes={name: a.values for name, a in one.vertex_attributes.items()},
            face_attributes={name: a.values for name, a in one.link_attributes.items()},
            metadata={name: a.values[0] for name, a in one.object_attributes.items()},
            process=False,
        )
    return result


def to_geopandas(shapes: Shapes, *, crs: Any = None) -> Any:  # noqa: ANN401  (a GeoDataFrame)
    """Return shapes as a GeoDataFrame, an object a row, with its id as index and its attributes as columns.

    Closed polylines, and graphs with ``part``, ``ring`` and ``order``, become polygons; other lines and graphs become lines; points become
    points. A point cloud without objects has a row for each point.

    Parameters
    ----------
    shapes : Shapes
        Anything but meshes, 2-D or 3-D.
    crs : anything that geopandas takes
        Coordinate reference system.

    Raises
    ------
    SourceError
        For meshes and other numbers of axes.
    MissingExtraError
        Without geopandas.

    Examples
    --------
    >>> square = Shapes("polyline", np.array([[0, 0], [2, 0], [2, 2], [0, 0]]), ids=np.array([7]))
    >>> to_geopandas(square).area
    7    2.0
    dtype: float64
    """
    geopandas = load_library("geopandas")
    geometries = shapely_geometries(shapes)
    alone = shapes.ids is None
    attributes = shapes.vertex_attributes if alone else shapes.object_attributes
    columns: dict[str, list[Any]] = {}
    for name, attribute in attributes.items():
        result = {key: column.tolist() for key, column in split_channels(name, attribute)}
        if attribute.present is not None:
            result = {
                key: [v if has else None for v, has in zip(c, attribute.present, strict=True)]
                for key, c in result.items()
            }
        columns |= result
    index = None if alone else shapes.ids
    return geopandas.GeoDataFrame(columns, geometry=list(geometries), index=index, crs=crs)


def shapely_geometries(shapes: Shapes) -> NDArray[Any]:
    """Return shapely geometries, one for each object, or for each point of a cloud without objects; see `to_geopandas`."""
    if shapes.kind == "mesh" or shapes.n_dims not in (2, 3):
        raise SourceError(
            f"A {shapes.kind} of {shapes.n_dims} axes makes no geometry of shapely; expected lines or points."
        )
    shapely = load_library("shapely")
    points = np.asarray(shapes.positions, np.float64)
    if shapes.ids is None:
        return np.asarray(shapely.points(points), object).reshape(-1)
    if {PART, RING, ORDER} <= set(shapes.vertex_attributes):
        return _polygons_of_rings(shapes, points)
    geometries = np.empty(shapes.n_objects, object)
    for row in range(shapes.n_objects):
        part = points[shapes.offsets[row] : shapes.offsets[row + 1]]
        if shapes.kind == "point_cloud":
            geometries[row] = shapely.Point(part[0]) if len(part) == 1 else shapely.MultiPoint(part)
        elif shapes.kind in SEQUENTIAL:
            # Shapely refuses a ring of fewer than four vertices and a line of one; the latter becomes an empty line.
            closed = len(part) >= 4 and bool((part[0] == part[-1]).all())
            geometries[row] = (
                shapely.Polygon(part) if closed else shapely.LineString(part if len(part) > 1 else part[:0])
            )
        else:
            edges = take_objects(shapes, np.array([row])).edges()
            geometries[row] = shapely.MultiLineString(list(part[edges]))
    return geometries


def _polygons_of_rings(shapes: Shapes, points: NDArray[np.float64]) -> NDArray[Any]:
    """Build polygons of rings whose vertices may be in any order."""
    shapely = load_library("shapely")
    owner = object_rows(shapes)
    part, ring, place = (shapes.vertex_attributes[name].values.astype(np.int64) for name in (PART, RING, ORDER))
    order = np.lexsort((place, ring, part, owner))
    keys = np.stack([owner[order], part[order], ring[order]], 1)
    # Row numbers of objects are not negative, so the first row differs from the prepended -1 and starts a ring.
    starts = np.any(np.diff(keys, axis=0, prepend=-1), axis=1)
    rings = shapely.linearrings(points[order], indices=np.cumsum(starts) - 1)
    firsts = np.any(np.diff(keys[starts, :2], axis=0, prepend=-1), axis=1)
    polygons = shapely.polygons(rings, indices=np.cumsum(firsts) - 1)
    owners = keys[starts][firsts, 0]
    geometries = np.full(shapes.n_objects, shapely.MultiPolygon(), object)
    owned, counts = np.unique(owners, return_counts=True)
    geometries[owned] = shapely.multipolygons(polygons, indices=np.repeat(np.arange(len(owned)), counts))
    single = np.isin(owners, owned[counts == 1])
    geometries[owners[single]] = polygons[single]
    return geometries
