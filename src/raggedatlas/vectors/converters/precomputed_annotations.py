"""Neuroglancer precomputed annotations: points and lines with values, in a spatial index and by id."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.content import Content, Holding, decoded
from raggedatlas.vectors.converters.precomputed import (
    TYPES,
    read_blobs,
    read_info,
    stored_type,
    take_bytes,
    value_losses,
    write_shard,
)
from raggedatlas.vectors.converters.stl import rounded
from raggedatlas.vectors.converters.tables import axis_names
from raggedatlas.vectors.geometry import Axis
from raggedatlas.vectors.shapes import Attribute, Attributes, Shapes

ANNOTATION_TYPE = "neuroglancer_annotations_v1"
ID, DIMENSIONS = "annotation_id", "dimensions"
ENDS = {"POINT": 1, "LINE": 2}
COLOURS = {"rgb": 3, "rgba": 4}
NAME = re.compile(r"[a-z][a-zA-Z0-9_]*")
PER_CELL = 5_000
"""About how many annotations a cell of the spatial index holds."""

ANNOTATION_HOLDING = Holding(kinds=("point_cloud", "line"), link=())


def read_annotations(path: Path) -> Content:
    """Read a folder of precomputed annotations: points or lines.

    Parameters
    ----------
    path : Path
        A folder whose ``info`` is of the type ``neuroglancer_annotations_v1``.

    Returns
    -------
    Content
        Points: a point cloud with the vertex attribute ``annotation_id``. Lines: objects of two vertices whose ids are the annotations'.
        Properties become attributes, labels of their values categories. Positions are as stored; their scale and unit stand in
        ``metadata["dimensions"]``, and as units of the axes where the scale is 1.

    Raises
    ------
    SourceError
        For boxes and ellipsoids, and if a file is cut off.
    """
    info = read_info(path)
    kind = str(info.get("annotation_type", "")).upper()
    if kind not in ENDS:
        raise SourceError(f"{path} holds annotations of the type {kind or 'unknown'}; {' and '.join(ENDS)} are read.")
    dimensions = dict(info["dimensions"])
    record = _record(info.get("properties", []), len(dimensions) * ENDS[kind], path)
    ids, rows = _stored(path, info, record)
    order = np.argsort(ids, kind="stable")
    ids, rows = ids[order], rows[order]
    attributes = {str(said["id"]): _property(rows[str(said["id"])], said) for said in info.get("properties", [])}
    positions = rows[""].reshape(-1, len(dimensions)).astype(np.float32)
    axes = tuple(
        Axis(name, _units().get(str(unit)) if scale == 1 else None) for name, (scale, unit) in dimensions.items()
    )
    left = tuple(f"relationship {said.get('id')!r} is left out" for said in info.get("relationships", []))
    if kind == "POINT":
        attributes = {ID: Attribute(ids), **attributes}
        shapes = Shapes("point_cloud", positions, vertex_attributes=attributes)
    else:
        shapes = Shapes("line", positions, np.arange(0, 2 * len(ids) + 1, 2), ids, object_attributes=attributes)
    return Content(shapes, {DIMENSIONS: dimensions}, axes, left)


def _units() -> dict[str, str]:
    return {"m": "meter", "s": "second"}


def _record(properties: list[dict[str, Any]], n_floats: int, path: Path) -> np.dtype[Any]:
    """Return the type of a stored annotation: position, values by falling width, filled up to four bytes."""
    fields: list[Any] = [("", "<f4", (n_floats,))]
    widths: dict[int, list[Any]] = {4: [], 2: [], 1: []}
    for said in properties:
        name, kind = str(said.get("id")), str(said.get("type"))
        if kind in COLOURS:
            widths[1].append((name, "u1", (COLOURS[kind],)))
        elif kind in TYPES:
            made = np.dtype(kind).newbyteorder("<")
            widths[made.itemsize].append((name, made))
        else:
            raise SourceError(
                f"{path}/info says the property {said}; expected a type of {', '.join((*TYPES, *COLOURS))}."
            )
    fields += widths[4] + widths[2] + widths[1]
    plain = _dtype(fields)
    return _dtype([*fields, ("\0", "u1", (-plain.itemsize % 4,))])


def _dtype(fields: list[Any]) -> np.dtype[Any]:
    """Return a structured type; a field without a name stands first under the name ''."""
    titled = [("position" if name == "" else f"p:{name}", *rest) for name, *rest in fields]
    return np.dtype(titled)


def _stored(path: Path, info: dict[str, Any], record: np.dtype[Any]) -> tuple[NDArray[np.int64], "_Rows"]:
    """Return ids and rows of all annotations: from the spatial index, else from the index of ids."""
    keys: list[NDArray[np.uint64]] = []
    rows: list[NDArray[Any]] = []
    for level in info.get("spatial", []):
        folder = path / str(level["key"])
        for name, data in _cells(folder, level):
            (count,), at = take_bytes(data, 0, 1, "<u8", name)
            if int(count) * (record.itemsize + 8) + 8 != len(data):
                raise SourceError(
                    f"{name} has {len(data)} bytes; expected {int(count) * (record.itemsize + 8) + 8}. It is cut off."
                )
            rows.append(np.frombuffer(data, record, int(count), at))
            keys.append(np.frombuffer(data, "<u8", int(count), at + record.itemsize * int(count)).astype(np.uint64))
    if not info.get("spatial"):
        said = info.get("by_id", {"key": "by_id"})
        for blob in read_blobs(path / str(said["key"]), said.get("sharding")):
            if len(blob.data) < record.itemsize:
                raise SourceError(
                    f"{path}, annotation {blob.key} has {len(blob.data)} bytes; expected {record.itemsize}."
                )
            rows.append(np.frombuffer(blob.data, record, 1))
            keys.append(np.array([blob.key], np.uint64))
    flat = np.concatenate([np.zeros(0, np.uint64), *keys])
    joined = np.concatenate([np.zeros(0, record), *rows])
    if len(flat) and flat.max() >= 2**63:
        raise SourceError(f"{path} has the annotation id {flat.max()}; expected less than 2**63.")
    ids, first = np.unique(flat.astype(np.int64), return_index=True)  # a line stands in every cell it touches
    return ids, _Rows(joined[first])


class _Rows:
    """Rows of annotations by the names of their properties; '' is the position."""

    def __init__(self, rows: NDArray[Any]) -> None:
        self.rows = rows

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401
        if isinstance(key, str):
            values = self.rows["position" if key == "" else f"p:{key}"]
            return values.astype(values.dtype.newbyteorder("="))
        return _Rows(self.rows[key])


def _cells(folder: Path, level: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    if "sharding" in level:
        for blob in read_blobs(folder, level["sharding"]):
            yield f"{folder}, cell {blob.key}", blob.data
        return
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if file.name.replace("_", "").isdecimal():
            yield str(file), file.read_bytes()


def _property(values: NDArray[Any], said: dict[str, Any]) -> Attribute:
    if said["type"] in COLOURS:
        return Attribute(values, ("red", "green", "blue", "alpha")[: COLOURS[said["type"]]])
    labels, codes = said.get("enum_labels"), said.get("enum_values")
    if not labels or not codes or len(labels) != len(codes) or not np.isin(values, codes).all():
        return Attribute(values)
    order = np.argsort(codes)
    found = order[np.searchsorted(np.array(codes)[order], values)]
    metadata = {
        "encoding": "dictionary",
        "categories": [str(label) for label in labels],
        "ordered": False,
        "_FillValue": -1,
    }
    return Attribute(found.astype(np.int32), metadata=metadata)


def write_annotations(content: Content, path: Path) -> None:
    """Write points or lines as a folder: a spatial index of as many levels as they need, and a shard by id."""
    shapes = content.shapes
    ends = 2 if shapes.kind == "line" else 1
    ids, positions, properties, columns = _annotations(shapes, ends)
    record = _record(properties, positions.shape[1], path)
    rows = np.zeros(len(ids), record)
    rows["position"] = positions
    for name, values in columns.items():
        rows[f"p:{name}"] = values
    names, n_dims = axis_names(content), shapes.n_dims
    low = shapes.positions.min(0).astype(np.float64) if len(ids) else np.zeros(n_dims)
    high = np.nextafter(shapes.positions.max(0).astype(np.float64) if len(ids) else np.ones(n_dims), np.inf)
    high = np.maximum(high, low + 1e-6 * np.maximum(1, np.abs(low)))
    path.mkdir()
    info = {
        "@type": ANNOTATION_TYPE,
        "dimensions": content.metadata.get(DIMENSIONS, {name: [1, ""] for name in names}),
        "lower_bound": low.tolist(),
        "upper_bound": high.tolist(),
        "annotation_type": "LINE" if ends == 2 else "POINT",
        "properties": properties,
        "relationships": [],
        "by_id": {"key": "by_id"},
        "spatial": _write_cells(path, (ids, rows), low, high),
    }
    blobs = rows.view(np.uint8).reshape(len(rows), -1)
    info["by_id"]["sharding"] = write_shard(path / "by_id", ids, [blob.tobytes() for blob in blobs])
    (path / "info").write_text(json.dumps(info), encoding="utf-8")


def _annotations(
    shapes: Shapes, ends: int
) -> tuple[NDArray[np.uint64], NDArray[Any], list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """Return ids, positions of all ends, what the info says of properties, and their values."""
    attributes = dict(shapes.object_attributes if ends == 2 else shapes.vertex_attributes)
    if ends == 2:
        counts = np.diff(shapes.offsets)
        if (counts != 2).any():
            row = int(np.argmax(counts != 2))
            raise SourceError(f"Line {np.asarray(shapes.ids)[row]} has {counts[row]} vertices; expected 2 in each.")
        ids = np.asarray(shapes.ids).astype(np.uint64)
    else:
        given = attributes.pop(ID, None)
        unique = (
            given is not None and given.values.dtype.kind in "iu" and len(np.unique(given.values)) == len(given.values)
        )
        ids = (
            given.values.astype(np.uint64)
            if given is not None and unique
            else np.arange(shapes.n_vertices, dtype=np.uint64)
        )
    properties, columns = [], {}
    for name, attribute in _written(attributes):
        said, values = _said(name, attribute)
        properties.append(said)
        columns[said["id"]] = values
    return ids, shapes.positions.reshape(len(ids), -1).astype(np.float32), properties, columns


def _written(attributes: Attributes) -> Iterator[tuple[str, Attribute]]:
    """Yield the attributes that are written; texts as codes."""
    from raggedatlas.vectors.converters.content import as_codes

    for name, attribute in attributes.items():
        made = attribute
        if attribute.values.dtype.kind not in "iuf":
            made = as_codes(attribute.values.astype(object))
        colour = made.values.dtype == np.uint8 and made.n_channels in COLOURS.values()
        if NAME.fullmatch(name) and (colour if made.values.ndim == 2 else stored_type(made)):
            yield name, made


def _said(name: str, attribute: Attribute) -> tuple[dict[str, Any], NDArray[Any]]:
    if attribute.values.ndim == 2:
        return {"id": name, "type": "rgb" if attribute.n_channels == 3 else "rgba"}, attribute.values
    if "categories" not in attribute.metadata:
        kind = str(stored_type(attribute))
        return {"id": name, "type": kind}, attribute.values.astype(kind)
    labels = [str(label) for label in attribute.metadata["categories"]]
    missing = [""] if any(value is None for value in decoded(attribute)) else []
    values = np.where(attribute.values < 0, len(labels), attribute.values).astype(np.int32)
    said = {
        "id": name,
        "type": "int32",
        "enum_values": [*range(len(labels) + len(missing))],
        "enum_labels": labels + missing,
    }
    return said, values


def _write_cells(
    path: Path, annotations: tuple[NDArray[np.uint64], NDArray[Any]], low: NDArray[Any], high: NDArray[Any]
) -> list[dict[str, Any]]:
    """Write the spatial index, coarse to fine; each annotation stands on one level, in the cells that its box touches."""
    ids, rows = annotations
    ends = rows["position"].reshape(len(rows), -1, len(low)).astype(np.float64)
    first, last = ends.min(1), ends.max(1)
    left = np.random.default_rng(0).permutation(len(ids))
    shape = np.ones(len(low), np.int64)
    levels: list[dict[str, Any]] = []
    while len(left) or not levels:
        size = (high - low) / shape
        cells = [np.clip(((corner[left] - low) / size).astype(np.int64), 0, shape - 1) for corner in (first, last)]
        codes = np.ravel_multi_index(tuple(cells[0].T), tuple(shape))
        most = int(np.bincount(np.unique(codes, return_inverse=True)[1], minlength=1).max()) if len(codes) else 0
        taken = left[: len(left) if most <= PER_CELL else int(len(left) * PER_CELL / most)]
        key = f"spatial{len(levels)}"
        (path / key).mkdir()
        found: dict[tuple[int, ...], list[int]] = {}
        for row, near, far in zip(taken.tolist(), cells[0].tolist(), cells[1].tolist(), strict=False):
            for cell in np.ndindex(*(b - a + 1 for a, b in zip(near, far, strict=True))):
                found.setdefault(tuple(a + c for a, c in zip(near, cell, strict=True)), []).append(row)
        for cell, members in found.items():
            data = np.uint64(len(members)).tobytes() + rows[members].tobytes() + ids[members].astype("<u8").tobytes()
            (path / key / "_".join(map(str, cell))).write_bytes(data)
        limit = max((len(members) for members in found.values()), default=1)
        levels.append({"key": key, "grid_shape": shape.tolist(), "chunk_size": size.tolist(), "limit": limit})
        left = left[len(taken) :]
        shape = np.where(size >= size.max() / 2, shape * 2, shape)
    return levels


def annotation_losses(shapes: Shapes) -> Iterator[str]:
    """Yield which values are not held: those with names Neuroglancer refuses, wide ones, several channels."""
    yield from rounded(shapes, np.float32, "32 bits")
    line = shapes.kind == "line"
    attributes = dict(shapes.object_attributes if line else shapes.vertex_attributes)
    other = shapes.vertex_attributes if line else shapes.object_attributes
    kept = {name for name, _ in _written(attributes)}
    for name, attribute in attributes.items():
        if name not in kept and (line or name != ID):
            yield f"attribute {name!r} is left out: its name, width or channels are none of the format's"
        else:
            yield from value_losses("vertex", name, replace(attribute))
    for name in other:
        yield f"attribute {name!r} is left out"
    if not line and shapes.ids is not None:
        yield f"objects: which of the {shapes.n_objects} a point belongs to is left out"
