"""What is added as geometry: a store on disk, or shapes in memory; read, and turned into one object for each cell."""

import hashlib
import json
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, NotFoundError, SourceError, ValuesError
from raggedatlas.ingest.detection import root_attributes
from raggedatlas.store.location import Location, digest_files
from raggedatlas.vectors.builder import make_geometry
from raggedatlas.vectors.geometry import Geometry
from raggedatlas.vectors.metadata import parse_root
from raggedatlas.vectors.reader import open_vectors
from raggedatlas.vectors.shapes import Attribute, Shapes, counts_to_offsets, take_attributes
from raggedatlas.vectors.writer import write


@dataclass(frozen=True)
class GeometrySource:
    """What is to be added, with one object for each cell.

    Parameters
    ----------
    shapes : Shapes
        The finest level, by object; regrouped by cell where a vertex attribute tells the cells.
    levels : (B,) int16
        Coarsest level that still holds each object.
    axes : tuple of str
        Names of the space axes.
    layout, n_levels : str, int
        Of the store.
    uri, name : str
        Where it came from, and what it is called.
    digest : str
        SHA-256 over what is stored.
    location : Location or None
        The store on disk; None for shapes in memory.
    geometry : Geometry or None
        Shapes in memory.
    n_unassigned : int
        Vertices that belong to no cell.
    """

    shapes: Shapes
    levels: NDArray[np.int16]
    axes: tuple[str, ...]
    layout: str
    n_levels: int
    uri: str
    name: str
    digest: str
    location: Location | None = None
    geometry: Geometry | None = None
    n_unassigned: int = 0

    @property
    def bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Least and greatest corner of every object, (B, D) each; NaN where it has no vertex."""
        return object_bounds(self.shapes)


def open_geometry(source: Any, owner: str = "", unassigned: Any = None, layout: str = "0.9") -> GeometrySource:  # noqa: ANN401
    """Read what is to be added.

    Parameters
    ----------
    source : Shapes, Geometry, str or path
        Shapes in memory, or a store.
    owner : str
        Vertex attribute that tells the cell of a point; empty where objects are cells.
    unassigned : value, or None
        Value of this attribute where a point belongs to no cell, in addition to negative numbers, the greatest unsigned one, and missing
        ones.
    layout : str
        Of a store that is made of shapes in memory.

    Raises
    ------
    SourceError
        If there are no objects.
    NotFoundError
        If there is no such attribute, or no store.
    ValuesError
        If a position is not finite.
    """
    if isinstance(source, Shapes):
        # `make_geometry` refuses these positions too, but its message does not name the object.
        _refuse_infinite(source)
        geometry = make_geometry(source)
        found = _source(source, geometry, "shapes in memory", "shapes", layout)
        found = replace(found, digest=_hash_shapes(source))
    elif isinstance(source, Geometry):
        # Written and read back, so that levels and digest are found as for a store on disk.
        with tempfile.TemporaryDirectory() as folder:
            write(source, f"{folder}/store", layout=layout)
            kept = open_geometry(f"{folder}/store")
        found = replace(kept, location=None, geometry=source, uri="a geometry in memory", name="geometry")
    else:
        found = _open_store(Location.of(source))
    _refuse_infinite(found.shapes)
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


def group_by_owner(shapes: Shapes, owner: str, unassigned: Any = None) -> tuple[Shapes, int]:  # noqa: ANN401
    """Put points together by the cell that a vertex attribute tells.

    Parameters
    ----------
    shapes : Shapes
        Points.
    owner : str
        Vertex attribute: whole numbers, or categories.
    unassigned : value, or None
        What it holds for no cell.

    Returns
    -------
    (Shapes, int)
        One object for each cell, ascending by its number, with the categories as the object attribute `owner`; and how many points
        belong to none.

    Examples
    --------
    >>> points = Shapes("point_cloud", np.zeros((4, 2)), vertex_attributes={"cell": np.array([7, -1, 3, 7])})
    >>> made, lost = group_by_owner(points, "cell")
    >>> made.ids.tolist(), made.vertex_counts.tolist(), lost
    ([3, 7], [1, 2], 1)
    """
    attribute = shapes.vertex_attributes.get(owner)
    if attribute is None or attribute.n_channels != 1:
        raise NotFoundError(
            f"The points have no attribute {owner!r} of one value each that tells their cell; they have {sorted(shapes.vertex_attributes)}."
        )
    values, labels = owner_codes(attribute, owner, unassigned)
    mine = np.flatnonzero(values >= 0)
    ids, code, counts = np.unique(values[mine], return_inverse=True, return_counts=True)
    # Stable, so that the points of a cell keep their order.
    rows = mine[np.argsort(code, kind="stable")]
    names = {} if labels is None else {owner: Attribute(labels[ids])}
    made = Shapes(
        shapes.kind, shapes.positions[rows], counts_to_offsets(counts), ids,
        vertex_attributes=take_attributes(shapes.vertex_attributes, rows), object_attributes=names,
    )  # fmt: skip
    return made, shapes.n_vertices - len(mine)


def owner_codes(attribute: Attribute, name: str, unassigned: Any = None) -> tuple[NDArray[np.int64], Any]:  # noqa: ANN401
    """Return the cell of every point as a number, -1 for none; and the names of the numbers, where they are categories."""
    values = attribute.values
    if values.dtype.kind == "f":
        missing = ~np.isfinite(values)
        values = np.where(missing, -1, values)
        if (values != np.floor(values)).any():
            raise SourceError(f"The attribute {name!r} holds fractions; a cell is named by an integer.")
    elif values.dtype.kind == "u":
        # The greatest unsigned number marks a missing value in a store.
        missing = values == np.iinfo(values.dtype).max
        if (values[~missing] > np.iinfo(np.int64).max).any():
            raise SourceError(
                f"The attribute {name!r} holds numbers of 2**63 or more; a cell is named by a smaller one."
            )
        values = np.where(missing, -1, values.astype(np.int64))
    codes = values.astype(np.int64)
    categories = attribute.metadata.get("categories")
    labels = None if categories is None else np.array([str(label) for label in categories])
    if labels is not None and codes.size and codes.max() >= len(labels):
        raise CorruptError(f"The attribute {name!r} names category {codes.max()} of {len(labels)}.")
    for lost in [] if unassigned is None else np.atleast_1d(np.asarray(unassigned, object)).tolist():
        if labels is None:
            codes[codes == lost] = -1
        else:
            codes[np.isin(codes, np.flatnonzero(labels == str(lost)))] = -1
    return np.where(codes < 0, -1, codes), labels


def object_bounds(shapes: Shapes) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the least and the greatest corner of every object, (B, D) each; NaN where it has no vertex.

    Examples
    --------
    >>> lines = Shapes("line", np.array([[0.0, 5.0], [2.0, 1.0]]), offsets=np.array([0, 2, 2]))
    >>> object_bounds(lines)[0].tolist()
    [[0.0, 1.0], [nan, nan]]
    """
    return _per_object(shapes, np.minimum), _per_object(shapes, np.maximum)


def object_centroids(shapes: Shapes) -> NDArray[np.float64]:
    """Return the mean of every object's vertices, (B, D); NaN where it has none."""
    counts = np.diff(shapes.offsets)
    sums = _per_object(shapes, np.add)
    # Sums of objects without vertices are NaN; 1 only avoids dividing by zero.
    return sums / np.maximum(counts, 1)[:, None]


def _per_object(shapes: Shapes, function: np.ufunc) -> NDArray[np.float64]:
    counts = np.diff(shapes.offsets)
    made = np.full((len(counts), shapes.n_dims), np.nan)
    there = np.flatnonzero(counts)
    if len(there):
        # `reduceat` gives the element at the start for an empty segment, so empty objects are left out.
        made[there] = function.reduceat(shapes.positions.astype(np.float64), shapes.offsets[:-1][there], axis=0)
    return made


def _open_store(place: Location) -> GeometrySource:
    attributes = root_attributes(place)
    root = parse_root(attributes, place.uri)
    store = open_vectors(place)
    shapes = store.read(level=0, shared="each")
    n_levels = max(1, len(attributes.get("multiscales", [{}])[0].get("datasets", [])))
    axes = tuple(axis.name for axis in root.geometry.axes if axis.type == "space")
    levels = np.zeros(shapes.n_objects, np.int16)
    for level in range(1, 1 if shapes.ids is None else n_levels):
        coarse = store.read(level=level, attributes=(), shared="each")
        if coarse.ids is not None and shapes.ids is not None:
            # Levels come from fine to coarse, so the last one that still has an object wins.
            levels[np.isin(shapes.ids, coarse.ids[coarse.vertex_counts > 0])] = level
    digest = digest_files(place)[2]
    name = place.name.removesuffix(".zarr").removesuffix(".zv") or "shapes"
    return GeometrySource(shapes, levels, axes, root.layout, n_levels, place.uri, name, digest, place)


def _source(shapes: Shapes, geometry: Geometry, uri: str, name: str, layout: str) -> GeometrySource:
    axes = tuple(axis.name for axis in geometry.axes if axis.type == "space")
    levels = np.zeros(shapes.n_objects, np.int16)
    return GeometrySource(shapes, levels, axes, layout, len(geometry.levels), uri, name, "", None, geometry)


def _refuse_infinite(shapes: Shapes) -> None:
    bad = np.flatnonzero(~np.isfinite(shapes.positions).all(axis=1))
    if len(bad):
        # `side="right"` passes over objects without vertices that begin at the same offset.
        row = int(np.searchsorted(shapes.offsets, bad[0], side="right")) - 1
        who = f"point {bad[0]}" if shapes.ids is None else f"object {shapes.ids[row]}"
        raise ValuesError(
            f"{len(bad):,} positions are not finite, first in {who}: {shapes.positions[bad[0]].tolist()}; a shape without a "
            "finite box cannot be found. Leave these out."
        )


def _hash_shapes(shapes: Shapes) -> str:
    content = hashlib.sha256(shapes.kind.encode())
    arrays: dict[str, Any] = {"positions": shapes.positions, "offsets": shapes.offsets}
    arrays |= {name: getattr(shapes, name) for name in ("ids", "links") if getattr(shapes, name) is not None}
    for family in ("vertex", "link", "object"):
        for name, attribute in sorted(getattr(shapes, f"{family}_attributes").items()):
            arrays[f"{family}/{name}"] = attribute.values
            content.update(json.dumps(attribute.metadata, default=str, sort_keys=True).encode())
    for name, values in arrays.items():
        content.update(f"{name} {values.dtype.str} {values.shape}".encode())
        content.update(np.ascontiguousarray(values).tobytes())
    return content.hexdigest()
