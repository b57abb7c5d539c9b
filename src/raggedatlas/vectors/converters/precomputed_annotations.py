"""Neuroglancer precomputed annotations: points, lines, boxes, ellipsoids and polylines with values and relationships."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError, ValuesError
from raggedatlas.vectors.converters.annotation_codec import (
    VECTORS,
    Annotations,
    Boxes,
    Form,
    as_attribute,
    as_property,
    form_of,
    joined,
    pack_list,
    records_of,
    unpack_list,
    unpack_one,
    write_cells,
    written,
)
from raggedatlas.vectors.converters.content import Capabilities, Content
from raggedatlas.vectors.converters.meshes import rounded
from raggedatlas.vectors.converters.precomputed import (
    read_blobs,
    read_info,
    value_losses,
    write_shard,
)
from raggedatlas.vectors.converters.tables import axis_names
from raggedatlas.vectors.geometry import Axis
from raggedatlas.vectors.shapes import Attribute, Groups, Shapes, as_attributes, counts_to_offsets

RELATIONSHIPS = "relationships"
"""The key of a store's root that names the relationships, also those that no annotation has."""

RELATIONSHIP, RELATED, PLACE = "relationship", "related_id", "place"
"""Attributes of the groups: what relates, to which id, and which place it has in an annotation's list (optional on writing)."""

Lists = tuple[NDArray[np.int64], NDArray[np.uint64]]


def groups_of(names: Sequence[str], related: Sequence[Lists], ids: NDArray[np.int64]) -> Groups:
    """Return groups of annotations that are related to the same id.

    Parameters
    ----------
    names : sequence of str
        Of the relationships.
    related : sequence of ((N + 1,) int64, (R,) uint64)
        For each of them, the ids that each annotation names.
    ids : (N,) int64
        Of the annotations.

    Returns
    -------
    Groups
        By relationship, place and related id; a list comes back in its order, as what stands in it several times does.

    Examples
    --------
    >>> made = groups_of(["pre"], [(np.array([0, 2, 3]), np.array([7, 8, 7], np.uint64))], np.array([1, 5]))
    >>> made.attributes["related_id"].values.tolist(), made.members(0).tolist()
    ([7, 8], [1, 5])
    """
    columns = []
    for k, (offsets, one) in enumerate(related):
        counts = np.diff(offsets)
        within = np.arange(len(one)) - np.repeat(offsets[:-1], counts)
        columns.append((np.full(len(one), k), within, one, np.repeat(np.arange(len(ids)), counts)))
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.int64))
    number, place, named, owner = (np.concatenate(column) for column in zip(empty, *columns, strict=True))
    order = np.lexsort((owner, named, place, number))
    number, place, named, owner = number[order], place[order], named[order], owner[order]
    new = (np.diff(number) != 0) | (np.diff(place) != 0) | (named[1:] != named[:-1])
    first = np.flatnonzero(np.concatenate([np.ones(min(1, len(order)), bool), new]))
    attributes = {
        RELATIONSHIP: Attribute(np.array([names[k] for k in number[first].tolist()], dtype=str)),
        RELATED: Attribute(named[first]),
        PLACE: Attribute(place[first].astype(np.int32)),
    }
    return Groups(np.append(first, len(order)).astype(np.int64), ids[owner], attributes)


def relates(groups: Groups | None) -> bool:
    """Tell whether groups say what annotations are related to."""
    if groups is None or not {RELATIONSHIP, RELATED} <= set(groups.attributes):
        return False
    named = as_attributes(groups.attributes)[RELATED]
    return named.n_channels == 1 and named.values.dtype.kind in "iu" and named.values.ndim == 1


def lists_of(shapes: Shapes, names: Sequence[str]) -> tuple[list[str], tuple[Lists, ...]]:
    """Return the names of relationships and, for each, what each object is related to.

    Parameters
    ----------
    shapes : Shapes
        With ids, and maybe groups that `relates` is true of.
    names : sequence of str
        Relationships that are known; those of the groups come behind them.

    Raises
    ------
    SourceError
        If a group names an object that is not there, or a related id is negative.
    """
    groups = shapes.groups
    if groups is None or not relates(groups):
        return [*names], tuple((np.zeros(shapes.n_objects + 1, np.int64), np.zeros(0, np.uint64)) for _ in names)
    said = as_attributes(groups.attributes)
    labels = np.asarray(said[RELATIONSHIP].values).astype(str)
    found = [*dict.fromkeys([*names, *labels.tolist()])]
    named = said[RELATED].values
    if named.size and named.min() < 0:
        raise SourceError(f"A group is of the related id {named.min()}; expected 0 to 2**64 - 1.")
    ids = np.asarray(shapes.ids)
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids, groups.ids, sorter=order), max(len(ids) - 1, 0))
    rows = order[at] if len(ids) else np.zeros(len(groups.ids), np.int64)
    stray = np.flatnonzero(ids[rows] != groups.ids) if len(ids) else np.arange(len(groups.ids))
    if len(stray):
        raise SourceError(f"A group names annotation {groups.ids[stray[0]]}, which is not there.")
    owner = np.repeat(np.arange(groups.n_groups), np.diff(groups.offsets))
    place = said[PLACE].values if PLACE in said else np.zeros(groups.n_groups, np.int64)
    return found, tuple(_lists(rows, owner, place, (labels == name, named), len(ids)) for name in found)


def _lists(
    rows: NDArray[np.int64],
    owner: NDArray[np.int64],
    place: NDArray[np.int64],
    groups: tuple[NDArray[np.bool_], NDArray[np.uint64]],
    n_objects: int,
) -> Lists:
    """Return what each object is related to by the groups that are meant."""
    meant, named = groups
    inside = np.flatnonzero(meant[owner])
    inside = inside[np.lexsort((owner[inside], place[owner[inside]], rows[inside]))]
    return counts_to_offsets(np.bincount(rows[inside], minlength=n_objects)), named[owner[inside]].astype(np.uint64)


def by_related(lists: Lists) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each related id and the rows of the annotations that name it, each once.

    Examples
    --------
    >>> [(key, rows.tolist()) for key, rows in by_related((np.array([0, 2, 3]), np.array([8, 7, 8], np.uint64)))]
    [(7, [0]), (8, [0, 1])]
    """
    offsets, named = lists
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    order = np.lexsort((owner, named))
    keys, first = np.unique(named[order], return_index=True)
    for key, rows in zip(keys.tolist(), np.split(owner[order], first[1:]), strict=False):
        yield key, np.unique(rows)


ANNOTATION_TYPE = "neuroglancer_annotations_v1"
ID, RADII = "annotation_id", "radii"
"""Vertex attributes of points: their ids, where they are no objects, and the radii of ellipsoids."""

DIMENSIONS, KIND, PROPERTIES = "dimensions", "annotation_type", "annotation_properties"
"""Keys of the root: scales and units, the type, and the order of the properties."""

KINDS = {
    "point_cloud": ("POINT", "ELLIPSOID"),
    "line": ("LINE", "AXIS_ALIGNED_BOUNDING_BOX"),
    "polyline": ("POLYLINE",),
}
"""Geometry type -> annotation types that it is written as, the usual one first."""

ANNOTATION_HOLDING = Capabilities(kinds=tuple(KINDS), link=(), groups=True)


def read_annotations(path: Path) -> Content:
    """Read a folder of precomputed annotations, of any of the five types.

    Parameters
    ----------
    path : Path
        A folder whose ``info`` is of the type ``neuroglancer_annotations_v1``.

    Returns
    -------
    Content
        Points and ellipsoids: a point cloud with the vertex attribute ``annotation_id``; the radii of ellipsoids are the vertex attribute
        ``radii``. Lines and boxes: lines, of a box the two corners as they stand; polylines as such; ids are those of the annotations.
        Properties become attributes, labels of their values categories. Relationships become groups (`groups_of`); points are objects
        then, whose ids are those of the annotations. Positions are as stored; ``metadata["dimensions"]`` has their scale and unit, and
        the axes have units where the scale is 1. ``metadata["annotation_type"]`` has the type, by which all comes back.

    Raises
    ------
    SourceError
        For another type, negative radii, polylines of less than two points, and if a file is cut off.
    """
    info = read_info(path)
    kind = str(info.get("annotation_type", "")).upper()
    if kind not in VECTORS:
        raise SourceError(f"{path} holds annotations of the type {kind or 'unknown'}; {', '.join(VECTORS)} are read.")
    dimensions = dict(info["dimensions"])
    properties = list(info.get("properties", []))
    names = [str(said.get("id")) for said in info.get("relationships", [])]
    form = form_of(kind, len(dimensions), properties, f"{path}/info")
    by_id = info.get("by_id") if info.get("spatial") else info.get("by_id", {"key": "by_id"})
    known = names if by_id is not None else []
    found = _stored(path, info, form, by_id if known or not info.get("spatial") else None)
    taken = {ID, RADII} if VECTORS[kind] == 1 or kind == "ELLIPSOID" else set()
    attributes = dict(as_attribute(found.values, said, taken) for said in properties)
    axes = tuple(
        Axis(name, _units().get(str(unit)) if scale == 1 else None) for name, (scale, unit) in dimensions.items()
    )
    metadata: dict[str, Any] = {DIMENSIONS: dimensions, KIND: kind}
    metadata |= {key: value for key, value in ((PROPERTIES, [*attributes]), (RELATIONSHIPS, known)) if value}
    shapes = _shapes(found, form, attributes, (known, [*dimensions], path))
    left = tuple(f"relationship {name!r} is left out: there is no index of ids" for name in names if not known)
    return Content(shapes, metadata, axes, left)


def _shapes(
    found: Annotations, form: Form, attributes: dict[str, Attribute], said: tuple[list[str], list[str], Path]
) -> Shapes:
    """Return annotations as the geometry that holds them."""
    (names, axes, path), ids = said, found.ids.astype(np.int64)
    groups = groups_of(names, found.related, ids) if names else None
    if form.kind in KINDS["point_cloud"]:
        positions, lead = found.vectors, {} if names else {ID: Attribute(ids)}
        if form.kind == "ELLIPSOID":
            both = found.vectors.reshape(len(ids), 2, form.rank)
            _check_radii(ids, both[:, 1], str(path))
            positions, lead = both[:, 0].copy(), {**lead, RADII: Attribute(both[:, 1].copy(), tuple(axes))}
        points = Shapes("point_cloud", positions, vertex_attributes={**lead, **attributes})
        return replace(points, offsets=np.arange(len(ids) + 1), ids=ids, groups=groups) if names else points
    kind = "polyline" if form.kind == "POLYLINE" else "line"
    return Shapes(kind, found.vectors, found.offsets, ids, object_attributes=attributes, groups=groups)


def _check_radii(ids: NDArray[Any], radii: NDArray[Any], where: str) -> None:
    bad = ~(np.isfinite(radii) & (radii >= 0)).all(1)
    if bad.any():
        row = int(np.argmax(bad))
        raise ValuesError(
            f"{where}: ellipsoid {ids[row]} has the radii {radii[row].tolist()}; expected finite numbers, none negative."
        )


def _units() -> dict[str, str]:
    return {"m": "meter", "s": "second"}


def _stored(path: Path, info: dict[str, Any], form: Form, by_id: dict[str, Any] | None) -> Annotations:
    """Return all annotations by ascending id: from the spatial index, or from the index of ids, which has relationships too."""
    n_related, parts = 0, []
    if by_id is not None:
        n_related = len(info.get("relationships", []))
        blobs = read_blobs(path / str(by_id["key"]), by_id.get("sharding"))
        parts = [unpack_one(one.key, one.data, form, n_related, f"{path}, annotation {one.key}") for one in blobs]
    else:
        for level in info["spatial"]:
            for name, data in _cells(path / str(level["key"]), level):
                parts.append(unpack_list(data, form, name))
    flat = joined(parts, form, n_related)
    if len(flat.ids) and flat.ids.max() >= 2**63:
        raise SourceError(f"{path} has the annotation id {flat.ids.max()}; expected less than 2**63.")
    return flat.take(np.unique(flat.ids, return_index=True)[1])  # one stands in every cell it touches


def _cells(folder: Path, level: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    if "sharding" in level:
        for blob in read_blobs(folder, level["sharding"]):
            yield f"{folder}, cell {blob.key}", blob.data
        return
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if file.name.replace("_", "").isdecimal():
            yield str(file), file.read_bytes()


def write_annotations(content: Content, path: Path, *, annotation_type: str | None = None) -> None:
    """Write points, lines or polylines as a folder: a spatial index of as many levels as they need, and shards by id and by related id.

    Parameters
    ----------
    content : Content
        Point clouds with the vertex attribute ``radii``, of a float for each axis, are written as ellipsoids.
    path : Path
        The folder.
    annotation_type : str or None
        ``"AXIS_ALIGNED_BOUNDING_BOX"`` makes boxes of lines. None: what ``content.metadata["annotation_type"]`` says, or else what the
        geometry says.

    Raises
    ------
    SourceError
        For a type that the geometry cannot be, lines that have not two vertices, and polylines of less.
    ValuesError
        For radii that are negative or not finite.
    """
    shapes = content.shapes
    kind = _kind(content, annotation_type)
    ids = _ids(shapes)
    names, related = lists_of(shapes, content.metadata.get(RELATIONSHIPS, ())) if _objects(shapes) else ([], ())
    properties, columns = [], {}
    order = {name: at for at, name in enumerate(content.metadata.get(PROPERTIES, ()))}
    for name, attribute in sorted(written(_attributes(shapes)), key=lambda one: order.get(one[0], len(order))):
        said, values = as_property(name, attribute)
        properties.append(said)
        columns[said["id"]] = values
    properties.sort(
        key=lambda said: -columns[said["id"]].itemsize
    )  # as they stand in bytes: not every reader sorts them
    form = form_of(kind, shapes.n_dims, properties, "What is to be written")
    stored = np.zeros(len(ids), form.values)
    for name, values in columns.items():
        stored[name] = values
    offsets, vectors = _vectors(shapes, kind, ids)
    annotations = Annotations(ids, offsets, vectors, stored, related)
    records, boxes = records_of(annotations, form), _boxes(annotations, kind)
    bounds = _bounds(boxes)
    path.mkdir()
    info = {
        "@type": ANNOTATION_TYPE,
        "dimensions": content.metadata.get(DIMENSIONS, {name: [1, ""] for name in axis_names(content)}),
        "lower_bound": bounds[0].tolist(),
        "upper_bound": bounds[1].tolist(),
        "annotation_type": kind,
        "properties": properties,
        "relationships": _write_related(path, annotations, records, names),
        "by_id": {"key": "by_id", "sharding": write_shard(path / "by_id", ids, _with_related(annotations, records))},
        "spatial": write_cells(path, (ids, records), boxes, bounds),
    }
    (path / "info").write_text(json.dumps(info), encoding="utf-8")


def _kind(content: Content, asked: str | None) -> str:
    """Decide the annotation type; refuse what the geometry cannot be."""
    shapes = content.shapes
    usual = "ELLIPSOID" if _has_radii(shapes) else KINDS[shapes.kind][0]
    kind = str(asked or content.metadata.get(KIND) or usual).upper()
    possible = (usual,) if shapes.kind == "point_cloud" else KINDS[shapes.kind]
    if kind not in possible:
        way = f" Ellipsoids are points with the vertex attribute {RADII!r}, of {shapes.n_dims} floats." * (
            kind == "ELLIPSOID"
        )
        raise SourceError(
            f"The annotation type is {kind!r}, and the geometry is a {shapes.kind}; expected {' or '.join(possible)}.{way}"
        )
    return kind


def _has_radii(shapes: Shapes) -> bool:
    radii = shapes.vertex_attributes.get(RADII) if shapes.kind == "point_cloud" else None
    return radii is not None and radii.values.dtype.kind == "f" and radii.values.shape[1:] == (shapes.n_dims,)


def _objects(shapes: Shapes) -> bool:
    """Tell whether each annotation is an object."""
    if shapes.kind != "point_cloud":
        return True
    return shapes.ids is not None and np.array_equal(shapes.offsets, np.arange(shapes.n_vertices + 1))


def _attributes(shapes: Shapes) -> dict[str, Attribute]:
    """Return what may become properties."""
    if shapes.kind != "point_cloud":
        return dict(shapes.object_attributes)
    own = {ID, RADII} if _has_radii(shapes) else {ID}
    return {name: attribute for name, attribute in shapes.vertex_attributes.items() if name not in own}


def _numbered(shapes: Shapes) -> bool:
    """Tell whether the vertex attribute ``annotation_id`` numbers points."""
    given = shapes.vertex_attributes.get(ID)
    if given is None or given.values.dtype.kind not in "iu" or given.values.ndim != 1:
        return False
    return len(np.unique(given.values)) == len(given.values) and not (given.values < 0).any()


def _ids(shapes: Shapes) -> NDArray[np.uint64]:
    if shapes.kind == "point_cloud" and _numbered(shapes):
        return shapes.vertex_attributes[ID].values.astype(np.uint64)
    return np.asarray(shapes.ids if _objects(shapes) else np.arange(shapes.n_vertices)).astype(np.uint64)


def _vectors(shapes: Shapes, kind: str, ids: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return offsets and vectors of the annotations; refuse wrong numbers of vertices, and radii that are none."""
    positions = shapes.positions.astype(np.float32)
    if shapes.kind == "point_cloud":
        if kind == "POINT":
            return np.arange(len(ids) + 1), positions
        with np.errstate(over="ignore"):
            radii = shapes.vertex_attributes[RADII].values.astype(np.float32)
        _check_radii(ids, radii, "What is to be written")
        return np.arange(len(ids) + 1) * 2, np.stack([positions, radii], 1).reshape(-1, shapes.n_dims)
    counts = shapes.vertex_counts
    bad = counts < 2 if kind == "POLYLINE" else counts != 2
    if bad.any():
        row, what = int(np.argmax(bad)), "Polyline" if kind == "POLYLINE" else "Line"
        raise SourceError(
            f"{what} {ids[row]} has {counts[row]} vertices; expected 2{' or more' * (kind == 'POLYLINE')} in each."
        )
    return shapes.offsets, positions[: shapes.offsets[-1]]


def _boxes(annotations: Annotations, kind: str) -> Boxes:
    """Return the least and greatest coordinates of each annotation."""
    vectors = annotations.vectors.astype(np.float64)
    if not len(annotations.ids):
        return vectors, vectors
    if kind == "ELLIPSOID":
        centres, radii = vectors[::2], vectors[1::2]
        return centres - radii, centres + radii
    starts = annotations.offsets[:-1]
    return np.minimum.reduceat(vectors, starts), np.maximum.reduceat(vectors, starts)


def _bounds(boxes: Boxes) -> Boxes:
    n_dims = boxes[0].shape[1]
    if not len(boxes[0]):
        return np.zeros(n_dims), np.ones(n_dims)
    low, high = boxes[0].min(0), np.nextafter(boxes[1].max(0), np.inf)
    return low, np.maximum(high, low + 1e-6 * np.maximum(1, np.abs(low)))


def _with_related(annotations: Annotations, records: list[bytes]) -> list[bytes]:
    """Return the records followed by what each annotation is related to."""
    if not annotations.related:
        return records
    tails = [b""] * len(records)
    for offsets, named in annotations.related:
        ends, data = (8 * offsets).tolist(), named.astype("<u8").tobytes()
        heads = np.diff(offsets).astype("<u4")
        tails = [
            tail + head.tobytes() + data[a:b]
            for tail, head, a, b in zip(tails, heads, ends[:-1], ends[1:], strict=True)
        ]
    return [record + tail for record, tail in zip(records, tails, strict=True)]


def _write_related(
    path: Path, annotations: Annotations, records: list[bytes], names: list[str]
) -> list[dict[str, Any]]:
    """Write, for each relationship, the annotations by related id; return what the info says of them."""
    made = []
    for number, (name, lists) in enumerate(zip(names, annotations.related, strict=True)):
        found = dict(by_related(lists))
        blobs = [pack_list(annotations.ids, records, rows) for rows in found.values()]
        sharding = write_shard(path / f"related{number}", np.array([*found], np.uint64), blobs)
        made.append({"id": name, "key": f"related{number}", "sharding": sharding})
    return made


def annotation_losses(shapes: Shapes) -> Iterator[str]:
    """Yield what is not held: names that Neuroglancer refuses, wide values, several channels, groups that are no relationships."""
    yield from rounded(shapes, np.float32, "32 bits")
    points = shapes.kind == "point_cloud"
    attributes = _attributes(shapes)
    kept = {name for name, _ in written(attributes)}
    for name, attribute in attributes.items():
        if name not in kept:
            yield f"attribute {name!r} is left out: its name, width or channels are none of the format's"
        else:
            yield from value_losses("vertex" if points else "object", name, attribute)
    for name in shapes.object_attributes if points else shapes.vertex_attributes:
        yield f"attribute {name!r} is left out"
    if points:
        yield from _point_losses(shapes)
    yield from _group_losses(shapes)


def _point_losses(shapes: Shapes) -> Iterator[str]:
    if _has_radii(shapes):
        yield from value_losses("vertex", RADII, shapes.vertex_attributes[RADII])
    if ID in shapes.vertex_attributes and not _numbered(shapes):
        yield f"attribute {ID!r} is left out: ids are whole numbers, not negative, each once"
    if shapes.ids is not None and not _objects(shapes):
        yield f"objects: which of the {shapes.n_objects} a point belongs to is left out"
    elif shapes.ids is not None and not np.array_equal(_ids(shapes), shapes.ids.astype(np.uint64)):
        yield f"objects: their ids are left out; {ID!r} stands for them"


def _group_losses(shapes: Shapes) -> Iterator[str]:
    groups = shapes.groups
    if groups is None:
        return
    if not relates(groups) or not _objects(shapes):
        yield f"groups: {groups.n_groups} are left out; those with the attributes {RELATIONSHIP!r} and {RELATED!r} are held"
        return
    empty = int(np.count_nonzero(np.diff(groups.offsets) == 0))
    if empty:
        yield f"groups: {empty} without members are left out"
    for name in groups.attributes:
        if name not in (RELATIONSHIP, RELATED, PLACE):
            yield f"group attribute {name!r} is left out"
