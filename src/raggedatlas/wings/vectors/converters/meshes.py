"""Meshes by trimesh: PLY (also points), OBJ and STL, with the ids and names of objects where the format has a place for them."""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.wings.vectors.converters.content import (
    OBJECT_ID,
    Capabilities,
    Content,
    group_vertices,
    is_id,
    is_text,
    read_errors,
)
from raggedatlas.wings.vectors.libraries import load_library
from raggedatlas.wings.vectors.shapes import Attribute, Attributes, Shapes, each_object, join_shapes, object_rows

COLOR, NORMAL, NAME = "color", "normal", "name"

_AS_TEXT = "binary files need faces of equally many corners: write it as text (ASCII), or with triangles only."

PLY_HOLDING = Capabilities(kinds=("point_cloud", "mesh"), dims=(3,), object=(), strings=False, float32=True)
OBJ_HOLDING = Capabilities(kinds=("mesh",), dims=(3,), vertex=(COLOR,), link=(), object=(NAME,), apart=True)
STL_HOLDING = Capabilities(kinds=("mesh",), dims=(3,), joined=True, vertex=(), link=(), object=(), float32=True)

JOINED = {
    "normal": ("nx", "ny", "nz"),
    "color": ("red", "green", "blue"),
    "color_alpha": ("red", "green", "blue", "alpha"),
}
"""Attributes that PLY files conventionally store as several columns."""

OWN_NAMES = {*"xyz", OBJECT_ID, *(column for columns in JOINED.values() for column in columns)}
CORNERS = ("vertex_indices", "vertex_index")

Table = dict[str, NDArray[Any]]


@contextmanager
def _parsing(path: Path, what: str) -> Iterator[None]:
    """Raise what trimesh raises for a damaged file as `SourceError`; NumPy only warns of text that is no number."""
    with read_errors(path, what), warnings.catch_warnings():
        warnings.filterwarnings("error", message="string or file could not be read")
        yield


def read_ply(path: Path) -> Content:
    """Read a PLY file, text or binary: a mesh if it has faces, else points.

    All further columns become attributes; ``red green blue (alpha)`` become ``color``, ``nx ny nz`` become ``normal``.
    A column ``object_id`` of the vertices puts them into objects. A binary file with faces of different numbers of
    corners is refused.
    """
    ply = load_library("trimesh.exchange.ply")
    with _parsing(path, f"complete PLY ({_AS_TEXT[:-1]})"):
        elements = ply.load_ply(io.BytesIO(path.read_bytes()), skip_materials=True, fix_texture=False)
        tables = {name: _table(name, one, path) for name, one in elements["metadata"]["_ply_raw"].items()}
    left = [f"element {name!r} is left out" for name in tables if name not in ("vertex", "face")]
    vertices, faces = tables.get("vertex", {}), tables.get("face", {})
    if not {*"xyz"} <= set(vertices):
        raise SourceError(f"{path} has no vertices with x, y and z.")
    positions = np.stack([vertices.pop(name) for name in "xyz"], 1)
    owner, links = vertices.pop(OBJECT_ID, None), None
    # Point clouds of other programs have a table of faces without rows.
    if any(len(column) for column in faces.values()):
        corners = next((faces.pop(name) for name in CORNERS if name in faces), None)
        if corners is None:
            raise SourceError(f"{path} has faces without {' or '.join(CORNERS)}.")
        links, rows = _as_array(corners, left, f"{path}: face")
        faces = {name: column[rows] for name, column in faces.items()}
    attributes, between = _joined(vertices, left), {} if links is None else _joined(faces, left)
    kind = "point_cloud" if links is None else "mesh"
    shapes = Shapes(kind, positions, links=links, vertex_attributes=attributes, link_attributes=between)
    return Content(shapes if owner is None else group_vertices(shapes, owner, str(path)), left=tuple(left))


def _table(name: str, element: Mapping[str, Any], path: Path) -> Table:
    """Return the columns of an element; lists of one length have two axes, others are arrays of arrays."""
    data, length = element.get("data"), int(element["length"])
    if data is None:
        return {}
    result = {}
    for key, kind in element["properties"].items():
        is_list = "," in kind
        column = np.asarray(data[key]) if key in (data.dtype.names if isinstance(data, np.ndarray) else data) else None
        if column is not None and column.dtype.names:
            # trimesh takes the length of the first list for all, and notices only if the file has another length then.
            if len({*column["f0"].tolist()}) > 1:
                raise SourceError(f"{path}: the lists {key!r} of a {name} have different lengths; {_AS_TEXT}")
            column = column["f1"]
        # Text has an axis for the values of a row, one or, in a list, several.
        elif column is not None and column.ndim == 2 and not is_list:
            column = column[:, 0]
        if column is None or len(column) != length or (column.dtype == object and not is_list):
            raise SourceError(f"{path}, a {name} is not as its header says, or the file ends inside it.")
        # Text is parsed as float64.
        wide = not isinstance(data, np.ndarray) and column.dtype.kind in "iu" and column.dtype.itemsize == 8
        if wide and (np.abs(column.astype(np.float64)) >= 2**53).any():
            raise SourceError(f"{path}: {key!r} has integers of 2**53 and more as text; write the file as binary.")
        result[key] = column if column.dtype == object else column.astype(column.dtype.newbyteorder("="))
    return result


def _as_array(faces: NDArray[Any], left: list[str], where: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return faces as an array, and the row of each; if they have different numbers of corners, they are cut into triangles."""
    mixed = faces.dtype == object
    counts = np.array([len(face) for face in faces]) if mixed else np.full(len(faces), faces.shape[1])
    if len(counts) and counts.min() < 3:
        raise SourceError(f"{where} {counts.argmin()} has {counts.min()} corners; expected 3 or more.")
    if not mixed:
        return faces.astype(np.int64), np.arange(len(faces))
    left.append(_cut_loss(int((counts > 3).sum())))
    return np.array([part for face in faces for part in _fan(face)], np.int64), np.repeat(
        np.arange(len(faces)), counts - 2
    )


def _fan(face: Sequence[Any] | NDArray[Any]) -> list[list[Any]]:
    """Return a face of n corners as a fan of n - 2 triangles."""
    return [[face[0], face[k], face[k + 1]] for k in range(1, len(face) - 1)]


def _cut_loss(count: int) -> str:
    return f"{count} faces of more than three corners are cut into triangles"


def _joined(table: Table, left: list[str]) -> dict[str, Attribute]:
    result = {}
    # Longest first: `color` would take its columns from `color_alpha` and leave `alpha` alone.
    for name, columns in sorted(JOINED.items(), key=lambda item: -len(item[1])):
        if set(columns) <= set(table) and len({table[column].dtype for column in columns}) == 1:
            result[name.split("_")[0]] = Attribute(np.stack([table.pop(column) for column in columns], 1), columns)
    for name, column in table.items():
        if column.dtype == object:
            left.append(f"list {name!r} is left out")
        else:
            result[name] = Attribute(column)
    return result


def write_ply(content: Content, path: Path) -> None:
    """Write a binary PLY file; ids of objects are the column ``object_id`` of the vertices."""
    shapes = content.shapes
    vertices: Table = {}
    if shapes.ids is not None and (not shapes.n_links or shapes.ids.tolist() != [0]):
        ids = shapes.ids if _narrow(shapes.ids) is not None else np.arange(shapes.n_objects)
        vertices[OBJECT_ID] = np.asarray(_narrow(ids))[object_rows(shapes)]
    mesh = _trimesh(shapes, vertices | _ply_columns(shapes.vertex_attributes), _ply_columns(shapes.link_attributes))
    path.write_bytes(load_library("trimesh.exchange.ply").export_ply(mesh, vertex_normal=False))


def _ply_columns(attributes: Attributes) -> Table:
    """Return the attributes that PLY holds as columns, with the conventional names where there are some."""
    result: Table = {}
    for name, attribute in attributes.items():
        if _ply_reason(name, attribute) is not None or is_text(attribute):
            continue
        column = np.asarray(_narrow(attribute.values))
        columns = JOINED.get(f"{name}_alpha" if attribute.n_channels == 4 else name, ())
        if column.ndim == 2 and len(columns) == attribute.n_channels:
            result |= dict(zip(columns, column.T, strict=True))
        else:
            result[name] = column
    return result


def _narrow(column: NDArray[Any]) -> NDArray[Any] | None:
    """Return a column in a type that PLY has: integers of at most 32 bits, floats of 32 or 64; None if an integer needs more."""
    if column.dtype.kind == "f":
        return column.astype("<f4" if column.dtype.itemsize < 8 else "<f8")
    if column.dtype.itemsize < 8:
        return column
    for kind in ("<i4", "<u4"):
        if not column.size or (np.iinfo(kind).min <= column.min() and column.max() <= np.iinfo(kind).max):
            return column.astype(kind)
    return None


def _ply_reason(name: str, attribute: Attribute) -> str | None:
    """Return why PLY has no column for an attribute of numbers, or None."""
    if not re.fullmatch(r"[^\s$]+", name) or name in OWN_NAMES or name in (*CORNERS, "end_header"):
        return "PLY gives this name another meaning, or has none such"
    if attribute.values.ndim == 2 and not 0 < attribute.n_channels < 256:
        return f"it has {attribute.n_channels} channels"
    if not is_text(attribute) and _narrow(attribute.values) is None:
        return "PLY holds integers of 32 bits"
    return "it has missing values" if attribute.present is not None and not attribute.present.all() else None


def ply_losses(content: Content) -> Iterator[str]:
    """Yield faces that are cut, and ids and attributes without a place."""
    shapes = content.shapes
    yield from cut_losses(content)
    if shapes.kind == "mesh" and not shapes.n_links:
        yield "links: a mesh without faces is read back as points"
    if shapes.ids is not None and _narrow(shapes.ids) is None:
        yield "objects: their ids are left out, as PLY holds integers of 32 bits; they are numbered from 0"
    for family in ("vertex", "link"):
        for name, attribute in getattr(shapes, f"{family}_attributes").items():
            reason = None if is_text(attribute) else _ply_reason(name, attribute)
            if reason is not None:
                yield f"{family} attribute {name!r} is left out: {reason}"


def cut_losses(content: Content) -> Iterator[str]:
    """Yield whether faces are cut into triangles; raise `SourceError` if they have fewer than three corners."""
    shapes = content.shapes
    width = 3 if shapes.links is None else shapes.links.shape[1]
    if shapes.kind == "mesh" and width < 3:
        raise SourceError(f"The faces of this mesh have {width} corners; expected 3 or more.")
    if width > 3 and shapes.n_links:
        yield _cut_loss(shapes.n_links)


def _trimesh(shapes: Shapes, vertices: Table | None = None, faces: Table | None = None) -> Any:  # noqa: ANN401  (a trimesh)
    """Return shapes as one `trimesh.Trimesh` of the same vertices, faces cut into triangles; points have no faces."""
    links = shapes.edges(3)
    fans = np.array(_fan(np.arange(links.shape[1])), np.int64)
    rows = np.repeat(np.arange(len(links)), len(fans))
    return load_library("trimesh").Trimesh(
        vertices=np.asarray(shapes.positions, np.float64),
        faces=links[:, fans].reshape(-1, 3),
        vertex_attributes=vertices or {},
        face_attributes={name: column[rows] for name, column in (faces or {}).items()},
        process=False,
    )


OBJECT = "object_"
"""An object is named ``object_7``, or ``object_7 name``: its id, and its name."""

OBJ_LINES = {b"v", b"vn", b"vt", b"f", b"o", b"g", b"s"}
BAD_FACE = rb"(?m)^f(?:[ \t]+\S+){0,2}[ \t\r]*$|^f(?:[ \t].*)?[ \t](?:0|-\d+)(?:[/ \t\r].*)?$"


def read_obj(path: Path) -> Content:
    """Read a Wavefront OBJ file: triangles, and larger faces cut into triangles.

    The result has one object for each ``o`` (or ``g``, where there is no ``o``) with faces, with its name; vertices
    that several objects use, or with several normals or textures, are repeated. Vertex attributes are ``color`` and
    ``normal``; ids come from names like ``object_7`` and ``object_7 name``. Vertices that are counted from the end are
    refused.
    """
    # In the one form that trimesh takes: no tabs, indents, continued lines and comments behind numbers.
    data = re.sub(rb"\\\r?\n|\t", b" ", path.read_bytes())
    data = re.sub(rb"(?m)^ +", b"", re.sub(rb"(?m)^( *(?:v[tn]?|f) [^#\n]*)#.*$", rb"\1", data))
    bad = re.search(BAD_FACE, data)
    if bad:
        line = data.count(b"\n", 0, bad.start()) + 1
        raise SourceError(
            f"{path}, line {line} is {bad[0][:60].decode('utf-8', 'replace')!r}; expected a face "
            "of 3 or more vertices, numbered from 1 on."
        )
    names = [bool(re.search(rb"(?m)^%s " % word, data)) for word in (b"o", b"g")]
    with _parsing(path, "OBJ"):
        found = load_library("trimesh.exchange.obj").load_obj(
            io.BytesIO(data), skip_materials=True, group_material=False, split_objects=names[0],
            split_groups=names == [False, True],
        )  # fmt: skip
        # The parser takes objects from the end.
        parts = dict(reversed(found["geometry"].items())) if "geometry" in found else {"": found}
    left: list[str] = []
    bodies = [_obj_part(part, left, str(path)) for part in parts.values()]
    shapes = _joined_meshes(bodies)
    cut = len(re.findall(rb"(?m)^f(?: +\S+){4,}", data))
    if cut:
        left.append(_cut_loss(cut))
    lines = [len(line.split()) for line in re.findall(rb"(?m)^v (.*)$", data)]
    if len(lines) > shapes.n_vertices:
        left.append(f"{len(lines) - shapes.n_vertices} vertices of no face are left out")
    if len({*lines}) > 1:
        left.append("numbers that only some vertices have, as colours, are left out")
    other = {*re.findall(rb"(?m)^([A-Za-z_]+)\s", data)} - OBJ_LINES
    if other:
        left.append(f"lines {', '.join(sorted(word.decode() for word in other))} are left out")
    if any(names):
        shapes = _named(shapes, list(parts))
    return Content(shapes, left=tuple(dict.fromkeys(left)))


def _obj_part(part: Mapping[str, Any], left: list[str], what: str) -> Shapes:
    """Return one object of an OBJ."""
    positions = np.asarray(part.get("vertices", np.zeros((0, 3))), np.float64)
    if positions.ndim != 2 or positions.shape[1] != 3:
        raise SourceError(f"{what} has vertices of {positions.shape[-1]} numbers; expected x y z, or x y z r g b.")
    faces = np.asarray(part.get("faces", np.zeros((0, 3), np.int64)))
    if faces.shape[1] > 3:
        faces = np.concatenate([faces[:, triangle] for triangle in _fan(range(faces.shape[1]))])
    attributes: dict[str, Attribute] = {}
    if part.get("vertex_colors") is not None:
        colors = np.asarray(part["vertex_colors"])
        # Colours are written from 0 to 1; some programs write bytes.
        scaled = np.rint(colors * 255) if colors.max(initial=0) <= 1 else colors
        attributes[COLOR] = Attribute(scaled.astype(np.uint8), JOINED[COLOR])
    if part.get("vertex_normals") is not None:
        attributes[NORMAL] = Attribute(np.asarray(part["vertex_normals"]))
    if part.get("visual") is not None:
        left.append("textures are left out")
    return _mesh(positions, faces, attributes)


def _mesh(positions: NDArray[Any], faces: NDArray[Any], attributes: Attributes | None = None) -> Shapes:
    """Return one mesh as one object; positions are float64, in which others compute."""
    bounds, wide = np.array([0, len(faces)]), positions.astype(np.float64)
    return Shapes("mesh", wide, links=faces, link_offsets=bounds, vertex_attributes=attributes or {})


def _joined_meshes(parts: Sequence[Shapes]) -> Shapes:
    """Return meshes of one object each as one, with the vertex attributes that all have."""
    if not parts:
        return Shapes("mesh", np.zeros((0, 3)), np.zeros(1, np.int64), links=np.zeros((0, 3), np.int64))
    shared = set.intersection(*(set(part.vertex_attributes) for part in parts))
    kept = [{name: a for name, a in part.vertex_attributes.items() if name in shared} for part in parts]
    return join_shapes([replace(part, vertex_attributes=own) for part, own in zip(parts, kept, strict=True)])


def _named(shapes: Shapes, names: list[str]) -> Shapes:
    """Return shapes with the ids and names of their objects, from names as `OBJECT` says or any others."""
    parts = [name.removeprefix(OBJECT).partition(" ") for name in names]
    numbers = [number for number, _, _ in parts]
    ids = all(name.startswith(OBJECT) for name in names) and all(map(is_id, numbers)) and len({*numbers}) == len(names)
    if ids:
        shapes = replace(shapes, ids=np.array([int(number) for number in numbers], np.int64))
        names = [name for _, _, name in parts]
    return replace(shapes, object_attributes={NAME: Attribute(np.array(names, dtype=str))}) if any(names) else shapes


def write_obj(content: Content, path: Path) -> None:
    """Write meshes as OBJ, an ``o`` for each object: ``object_``, its id and its name; colours of bytes as numbers from 0 to 1."""
    shapes = content.shapes
    names = shapes.object_attributes[NAME].values if NAME in shapes.object_attributes else np.full(shapes.n_objects, "")
    if _name_reason(shapes) is not None:
        names = np.full(shapes.n_objects, "")
    plain = shapes.n_objects == 1 and np.asarray(shapes.ids).tolist() == [0] and not any(names)
    trimesh, scene = load_library("trimesh"), {}
    for name, (number, one) in zip(names, each_object(shapes), strict=True):
        if one.n_links:
            mesh = _trimesh(one)
            if COLOR in one.vertex_attributes and _color_reason(one.vertex_attributes[COLOR]) is None:
                mesh.visual.vertex_colors = one.vertex_attributes[COLOR].values
            scene[f"{OBJECT}{number} {name}".rstrip()] = mesh
    # Fixed digits after the point: enough for the last bit of all but the smallest numbers.
    digits = 17 if shapes.positions.dtype.itemsize == 8 else 9
    made = next(iter(scene.values())) if plain and scene else trimesh.Scene(scene)
    text = load_library("trimesh.exchange.obj").export_obj(made, include_normals=False, header=None, digits=digits)
    path.write_text(text if scene else "", encoding="utf-8")


def obj_losses(content: Content) -> Iterator[str]:
    """Yield faces that are cut, and what has no place in OBJ."""
    shapes = content.shapes
    yield from cut_losses(content)
    if COLOR in shapes.vertex_attributes and (reason := _color_reason(shapes.vertex_attributes[COLOR])):
        yield f"vertex attribute {COLOR!r} is left out: {reason}"
    if reason := _name_reason(shapes):
        yield f"object attribute {NAME!r} is left out: {reason}"
    positions = np.asarray(shapes.positions)
    if (
        positions.dtype.kind == "f"
        and (np.round(positions, 17 if positions.dtype.itemsize == 8 else 9) != positions).any()
    ):
        yield "rounded: positions, to the digits of the text"


def _color_reason(color: Attribute) -> str | None:
    fits = color.values.dtype == np.uint8 and color.values.ndim == 2 and color.n_channels == 3 and color.present is None
    return None if fits else "OBJ holds three bytes for each vertex"


def _name_reason(shapes: Shapes) -> str | None:
    """Return why the names of objects cannot be in OBJ, whose lines end a name; None if they can, or there are none."""
    if NAME not in shapes.object_attributes:
        return None
    names = shapes.object_attributes[NAME]
    if (
        names.values.dtype.kind not in "UT"
        or names.values.ndim != 1
        or (names.present is not None and not names.present.all())
    ):
        return "it is no text for each object"
    texts = [str(name) for name in names.values]
    if not all(" ".join(text.split()) == text and "\\" not in text and "usemtl " not in text for text in texts):
        return "names with line breaks, backslashes or spaces at an end are no names in OBJ"
    return None if any(texts) else "all names are empty"


def stl_losses(content: Content) -> Iterator[str]:
    """Yield what becomes of vertices: STL has the corners of triangles only, and equal ones are joined; and of faces."""
    yield from cut_losses(content)
    shapes = content.shapes
    used = np.unique(shapes.edges(3))
    if len(used) < shapes.n_vertices:
        yield f"vertices: {shapes.n_vertices - len(used)} of no link are left out"
    if len(np.unique(shapes.positions[used].astype(np.float32) + 0.0, axis=0)) < len(used):
        yield "vertices: those at one place become one"
    if shapes.ids is not None and (used >= shapes.offsets[-1]).any():
        yield "objects: vertices of none are joined with the others"
    if shapes.ids is not None and not shapes.n_links:
        yield f"objects: {shapes.n_objects} with nothing to draw are left out"


def read_stl(path: Path) -> Content:
    """Read an STL file, binary or text.

    Corners at the same position become one vertex, so that triangles are connected. The result has an object for each
    ``solid`` of a text; the two bytes of a binary triangle become the link attribute ``attribute`` where any are set.
    """
    data = path.read_bytes()
    with _parsing(path, "STL"):
        found = load_library("trimesh.exchange.stl").load_stl(io.BytesIO(data))
    parts = list(found["geometry"].values()) if "geometry" in found else [found]
    binary = len(data) >= 84 and len(data) == 84 + 50 * int.from_bytes(data[80:84], "little")
    solids = [len(re.findall(rb"(?im)^[ \t]*%s\b" % word, data)) for word in (b"solid", b"endsolid")]
    n_corners = sum(len(part["vertices"]) for part in parts if "vertices" in part)
    complete = solids[0] == solids[1] > 0 and len(re.findall(rb"(?im)^[ \t]*vertex\b", data)) == n_corners
    if not binary and not complete:
        raise SourceError(f"{path} ends inside a solid or a triangle; it is cut off, or no STL.")
    words = found.get("face_attributes", {}).get("stl", np.zeros(0))
    bodies = []
    for part in parts:
        corners = np.asarray(part["vertices"])
        # -0.0 and 0.0 are one place.
        corners, rows = np.unique(corners + corners.dtype.type(0), axis=0, return_inverse=True)
        bodies.append(_mesh(corners, rows.reshape(-1, 3)))
    shapes = _joined_meshes(bodies)
    if words.any():
        shapes = replace(shapes, link_attributes={"attribute": Attribute(words.copy())})
    names = [part["metadata"].get(NAME) or "" for part in parts]
    return Content(shapes if binary else _named(shapes, names))


def write_stl(content: Content, path: Path) -> None:
    """Write all triangles as one binary STL, with their normals."""
    path.write_bytes(load_library("trimesh.exchange.stl").export_stl(_trimesh(content.shapes)))
