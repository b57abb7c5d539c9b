"""PLY: points, meshes and edges with any columns of numbers, as text or bytes of either order."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.content import (
    OBJECT_ID,
    Capabilities,
    Content,
    group_vertices,
    is_id,
    number_rows,
    read_text,
    shortest,
    split_channels,
)
from raggedatlas.vectors.shapes import Attribute, Attributes, Shapes, counts_to_offsets, links_by_object, object_rows

PLY_HOLDING = Capabilities(kinds=("point_cloud", "mesh", "graph", "skeleton"), dims=(3,), object=(), strings=False)

TYPES = {
    "char": "i1",
    "uchar": "u1",
    "short": "i2",
    "ushort": "u2",
    "int": "i4",
    "uint": "u4",
    "float": "f4",
    "double": "f8",
    "int8": "i1",
    "uint8": "u1",
    "int16": "i2",
    "uint16": "u2",
    "int32": "i4",
    "uint32": "u4",
    "float32": "f4",
    "float64": "f8",
}
NAMES = {
    "i1": "char",
    "u1": "uchar",
    "i2": "short",
    "u2": "ushort",
    "i4": "int",
    "u4": "uint",
    "f4": "float",
    "f8": "double",
}
ORDERS = {"ascii": "=", "binary_little_endian": "<", "binary_big_endian": ">"}
JOINED = {
    "normal": ("nx", "ny", "nz"),
    "color": ("red", "green", "blue"),
    "color_alpha": ("red", "green", "blue", "alpha"),
}
"""Attributes that files conventionally store as several columns."""

CORNERS = ("vertex_indices", "vertex_index")
MAX_HEADER = 1 << 16


@dataclass(frozen=True)
class Element:
    """One kind of rows of a file: its columns and their types; a list has the types of its length and of its members."""

    name: str
    count: int
    columns: tuple[tuple[str, str, str], ...]

    @property
    def lists(self) -> tuple[str, ...]:
        """Names of the columns that are lists."""
        return tuple(name for name, length, _ in self.columns if length)


Table = dict[str, NDArray[Any]]


def read_ply(path: Path) -> Content:
    """Read a PLY file: a mesh if it has faces, a graph if it has edges, else points.

    Parameters
    ----------
    path : Path
        A ``.ply`` file, text or binary.

    Returns
    -------
    Content
        All further columns become attributes; ``red green blue (alpha)`` become ``color``, ``nx ny nz`` become ``normal``. A column
        ``object_id`` of the vertices puts them into objects.

    Raises
    ------
    SourceError
        If the header cannot be read, or the file ends too early.
    """
    data = path.read_bytes()
    order, elements, start = _header(data, path)
    rows = _Rows(data, start, order, path)
    tables = {element.name: rows.read(element) for element in elements}
    left = [f"element {name!r} is left out" for name in tables if name not in ("vertex", "face", "edge")]
    vertices = tables.get("vertex", {})
    if not {"x", "y", "z"} <= set(vertices):
        raise SourceError(f"{path} has no vertices with x, y and z.")
    positions = np.stack([vertices.pop(name) for name in "xyz"], 1)
    owner = vertices.pop(OBJECT_ID, None)
    kind, links, columns = _links(tables, left, path)
    own, between = _joined(vertices, left), _joined(columns, left)
    shapes = Shapes(kind, positions, links=links, vertex_attributes=own, link_attributes=between)
    return Content(shapes if owner is None else group_vertices(shapes, owner, str(path)), left=tuple(left))


def _links(tables: dict[str, Table], left: list[str], path: Path) -> tuple[str, NDArray[Any] | None, Table]:
    faces = tables.get("face", {})
    # Point clouds of other programs have a table of faces without rows.
    if any(len(column) for column in faces.values()):
        corners = next((faces.pop(name) for name in CORNERS if name in faces), None)
        if corners is None:
            raise SourceError(f"{path} has faces without {' or '.join(CORNERS)}.")
        # All faces have equally many corners. Faces of four or more are then not cut.
        if corners.dtype != object:
            return "mesh", corners.astype(np.int64), faces
        counts = np.array([len(face) for face in corners])
        if len(counts) and counts.min() < 3:
            raise SourceError(f"{path}: face {counts.argmin()} has {counts.min()} corners; expected 3 or more.")
        left.append(cut_loss(int((counts > 3).sum())))
        rows = np.repeat(np.arange(len(counts)), counts - 2)
        triangles = np.array([part for face in corners for part in cut_face(face)], np.int64).reshape(-1, 3)
        return "mesh", triangles, {name: column[rows] for name, column in faces.items()}
    edges = tables.get("edge", {})
    if {"vertex1", "vertex2"} <= set(edges):
        return "graph", np.stack([edges.pop("vertex1"), edges.pop("vertex2")], 1).astype(np.int64), edges
    return "point_cloud", None, {}


def cut_face(face: Sequence[Any]) -> list[list[Any]]:
    """Return a face of n corners as a fan of n - 2 triangles."""
    return [[face[0], face[k], face[k + 1]] for k in range(1, len(face) - 1)]


def cut_loss(count: int) -> str:
    """Say how many faces were cut."""
    return f"{count} faces of more than three corners are cut into triangles"


def _joined(table: Table, left: list[str]) -> dict[str, Attribute]:
    result = {}
    # Longest first: `color` would take its columns from `color_alpha` and leave `alpha` alone.
    for name, columns in sorted(JOINED.items(), key=lambda item: -len(item[1])):
        if set(columns) <= set(table) and len({table[column].dtype for column in columns}) == 1:
            result[name.split("_")[0]] = Attribute(np.stack([table.pop(column) for column in columns], 1), columns)
    for name, column in table.items():
        if column.dtype == object or column.ndim > 1:
            left.append(f"list {name!r} is left out")
        else:
            result[name] = Attribute(column)
    return result


def _header(data: bytes, path: Path) -> tuple[str, list[Element], int]:
    end = data.find(b"end_header", 0, MAX_HEADER)
    stop = data.find(b"\n", end)
    if not data.startswith(b"ply") or end < 0 or stop < 0:
        raise SourceError(f"{path} does not begin as a PLY file: 'ply', a header, 'end_header'.")
    order, elements = "", []
    for number, line in enumerate(data[:end].decode("ascii", "replace").splitlines(), 1):
        words = line.split()
        try:
            if words[:1] == ["format"]:
                order = ORDERS[words[1]]
            elif words[:1] == ["element"]:
                elements.append(Element(words[1], int(words[2]), ()))
            elif words[:1] == ["property"]:
                is_list = words[1] == "list"
                own = (words[4], TYPES[words[2]], TYPES[words[3]]) if is_list else (words[2], "", TYPES[words[1]])
                elements[-1] = replace(elements[-1], columns=(*elements[-1].columns, own))
        except (KeyError, IndexError, ValueError):
            raise SourceError(f"{path}, line {number} of the header is {line!r}, which means nothing in PLY.") from None
    if not order or any(element.count < 0 for element in elements):
        raise SourceError(f"{path} has no format that is known, or an element with a negative count.")
    return order, elements, stop + 1


class _Rows:
    """Reader of the rows after the header, as text or bytes."""

    def __init__(self, data: bytes, start: int, order: str, path: Path) -> None:
        self.data, self.offset, self.order, self.path = data, start, order, path
        self.words: list[bytes] = []

    def read(self, element: Element) -> Table:
        """Return the columns of an element; lists of one length have two axes, others are arrays of arrays."""
        if not element.count:
            return {name: np.zeros(0, kind) for name, length, kind in element.columns if not length}
        table = None if self.order == "=" else self._read_at_once(element)
        return self._read_one_by_one(element) if table is None else table

    def _read_at_once(self, element: Element) -> Table | None:
        """Return bytes as columns; None if not all lists are as long as in the first row."""
        start = self.offset
        first = self._read_one_by_one(replace(element, count=1))
        fields: list[Any] = []
        for name, length, kind in element.columns:
            # Lengths of lists are fields too; the NUL separates their names from those of columns.
            fields += [(f"{name}\0", self.order + length)] if length else []
            fields.append((name, self.order + kind, first[name].shape[1:]))
        row, self.offset = np.dtype(fields), start
        if start + row.itemsize * element.count <= len(self.data):
            rows = np.frombuffer(self.data, row, element.count, start)
            if all((rows[f"{name}\0"] == first[name].shape[1]).all() for name in element.lists):
                self.offset += row.itemsize * element.count
                return {name: rows[name].astype(rows[name].dtype.newbyteorder("=")) for name, *_ in element.columns}
        return None

    def _read_one_by_one(self, element: Element) -> Table:
        lists: dict[str, list[Any]] = {name: [] for name, *_ in element.columns}
        for number in range(element.count):
            try:
                self._begin()
                for name, length, kind in element.columns:
                    count = int(self._take(length, 1)[0]) if length else 1
                    values = self._take(kind, count)
                    lists[name].append(values if length else values[0])
            except (IndexError, ValueError):
                raise SourceError(
                    f"{self.path}, {element.name} {number} is not as its header says, or the file ends inside it."
                ) from None
        return {name: _column(lists[name], length, kind) for name, length, kind in element.columns}

    def _begin(self) -> None:
        """Begin a row, which in text is a line."""
        if self.order == "=":
            stop = self.data.find(b"\n", self.offset)
            stop = len(self.data) if stop < 0 else stop
            self.words, self.offset = self.data[self.offset : stop].split(), min(stop + 1, len(self.data))

    def _take(self, kind: str, count: int) -> NDArray[Any]:
        """Return the next values of the row."""
        if self.order == "=":
            words, self.words = self.words[:count], self.words[count:]
            if count < 0 or len(words) < count:
                raise IndexError
            # By way of float64, which holds all integers of PLY and also parses "1.0".
            return np.array(words, np.dtype("S")).astype(np.float64).astype(kind)
        # A negative count would be all of the remaining bytes.
        if count < 0:
            raise IndexError
        values = np.frombuffer(self.data, self.order + kind, count, self.offset)
        self.offset += values.nbytes
        return values


def _column(values: list[Any], length: str, kind: str) -> NDArray[Any]:
    if not length:
        return np.array(values, kind)
    if len({len(each) for each in values}) == 1:
        return np.stack(values).astype(kind)
    column = np.empty(len(values), object)
    column[:] = values
    return column


def write_ply(content: Content, path: Path, *, ascii: bool = False) -> None:
    """Write a PLY file, binary in little-endian order, or as text."""
    shapes = content.shapes
    vertices = dict(zip("xyz", shapes.positions.T, strict=True))
    if shapes.ids is not None and shapes.ids.tolist() != [0]:
        vertices[OBJECT_ID] = shapes.ids[object_rows(shapes)]
    vertices |= _columns(shapes.vertex_attributes)
    tables = [("vertex", {name: narrow(column) for name, column in vertices.items()})]
    if shapes.links is not None and shapes.kind == "mesh":
        faces = {CORNERS[0]: shapes.links.astype("<i4")}
        tables.append(("face", faces | {name: narrow(c) for name, c in _columns(shapes.link_attributes).items()}))
    elif shapes.links is not None:
        edges = {f"vertex{k + 1}": shapes.links[:, k].astype("<i4") for k in range(2)}
        tables.append(("edge", edges | {name: narrow(c) for name, c in _columns(shapes.link_attributes).items()}))
    lines = ["ply", f"format {'ascii' if ascii else 'binary_little_endian'} 1.0"]
    for name, table in tables:
        lines += [f"element {name} {len(next(iter(table.values())))}", *(_property(*item) for item in table.items())]
    with path.open("wb") as file:
        file.write("\n".join([*lines, "end_header", ""]).encode("ascii"))
        for _, table in tables:
            file.write(_text(table) if ascii else _bytes(table))


def _columns(attributes: Attributes) -> Table:
    """Return attributes as columns, with the conventional names where there are some."""
    result: Table = {}
    for name, attribute in attributes.items():
        custom = JOINED.get(f"{name}_alpha" if attribute.n_channels == 4 else name)
        if attribute.values.ndim == 2 and custom and len(custom) == attribute.n_channels:
            result |= dict(zip(custom, attribute.values.T, strict=True))
        elif "categories" not in attribute.metadata and attribute.values.dtype.kind in "iuf":
            result |= {column.replace(" ", "_"): values for column, values in split_channels(name, attribute)}
    return result


def narrow(column: NDArray[Any]) -> NDArray[Any]:
    """Return a column in a type that PLY has: 64-bit integers as 32-bit ones where they fit, half floats as floats.

    Raises
    ------
    SourceError
        If an integer needs 64 bits.
    """
    if column.dtype.kind == "f":
        return column.astype("<f4" if column.dtype.itemsize < 8 else "<f8")
    if column.dtype.itemsize < 8:
        return column.astype(column.dtype.newbyteorder("<"))
    for kind in ("<i4", "<u4"):
        if not len(column) or (np.iinfo(kind).min <= column.min() and column.max() <= np.iinfo(kind).max):
            return column.astype(kind)
    raise SourceError(
        f"PLY holds integers of 32 bits; a column goes from {column.min()} to {column.max()}. Leave it out."
    )


def ply_losses(shapes: Shapes) -> Iterator[str]:
    """Yield which attributes come back as several, because no convention joins them."""
    for name, attribute in shapes.vertex_attributes.items():
        custom = JOINED.get(f"{name}_alpha" if attribute.n_channels == 4 else name, ())
        if attribute.values.ndim == 2 and len(custom) != attribute.n_channels:
            yield f"vertex attribute {name!r} becomes {attribute.n_channels} columns"


def _property(name: str, column: NDArray[Any]) -> str:
    kind = NAMES[column.dtype.str[1:]]
    return f"property {f'list uchar {kind}' if column.ndim == 2 else kind} {name}"


def _bytes(table: Table) -> bytes:
    fields: list[Any] = []
    for name, column in table.items():
        if column.ndim == 2:
            # One name is enough, as only the corners of faces are a list.
            fields += [("\0", "u1"), (name, column.dtype, (column.shape[1],))]
        else:
            fields.append((name, column.dtype))
    rows = np.empty(len(next(iter(table.values()))), np.dtype(fields))
    for name, column in table.items():
        rows[name] = column
        if column.ndim == 2:
            rows["\0"] = column.shape[1]
    return rows.tobytes()


def _text(table: Table) -> bytes:
    texts = [
        [" ".join([str(len(row)), *map(repr, row)]) for row in column.tolist()]
        if column.ndim == 2
        else [repr(value) for value in shortest(column).tolist()]
        for column in table.values()
    ]
    return "".join(" ".join(row) + "\n" for row in zip(*texts, strict=True)).encode("ascii")


COLOR, NORMAL, TEXTURE = "color", "normal", "uv"

OBJ_HOLDING = Capabilities(kinds=("mesh",), dims=(3,), vertex=(COLOR, NORMAL, TEXTURE), link=(), object=("name",))


@dataclass
class Pieces:
    """Contents of the lines of an OBJ file, in their order.

    Parameters
    ----------
    vertices, normals, textures : list of rows of numbers
        ``v``, ``vn`` and ``vt``.
    corners : list of (vertex, texture, normal)
        Corners of the triangles; -1 if not given.
    objects : list of int
        For each triangle the row in `names`.
    names : list of str
        Names of the objects.
    cut : int
        Faces of more than three corners.
    other : set of str
        Keywords of lines that are not read.
    """

    vertices: list[list[float]] = field(default_factory=list)
    normals: list[list[float]] = field(default_factory=list)
    textures: list[list[float]] = field(default_factory=list)
    corners: list[tuple[int, int, int]] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    cut: int = 0
    other: set[str] = field(default_factory=set)


NUMBERS = {"v": "vertices", "vn": "normals", "vt": "textures"}


def read_obj(path: Path) -> Content:
    """Read a Wavefront OBJ file: triangles, and larger faces cut into triangles.

    Parameters
    ----------
    path : Path
        A ``.obj`` file.

    Returns
    -------
    Content
        One object for each ``o`` (or ``g``, where there is no ``o``) with faces, with its name; vertices that several objects use are
        repeated. Vertex attributes ``color``, ``normal`` and ``uv`` where each vertex has one; ids from names like ``object_7``.

    Raises
    ------
    SourceError
        If a line cannot be read, or a face names a vertex that is not there; with the line.
    """
    # A backslash continues a line; messages count joined lines as one.
    lines = [line.split("#")[0].split() for line in read_text(path).replace("\\\n", " ").splitlines()]
    grouping = "o" if any(line[:1] == ["o"] for line in lines) else "g"
    pieces = Pieces()
    for number, line in enumerate(lines, 1):
        if line:
            _take_line(pieces, line, grouping, f"{path}, line {number}")
    if len({len(vertex) for vertex in pieces.vertices}) > 1:
        raise SourceError(f"{path} has vertices of different lengths; expected x y z or x y z r g b in all.")
    return _content(pieces)


def _take_line(pieces: Pieces, line: list[str], grouping: str, where: str) -> None:
    word = line[0]
    try:
        if word in NUMBERS:
            row = [float(text) for text in line[1:]]
            if len(row) < 2 + (word != "vt"):
                raise ValueError
            getattr(pieces, NUMBERS[word]).append(row)
        elif word == "f":
            _take_face(pieces, line[1:], where)
        elif word == grouping:
            pieces.names.append(" ".join(line[1:]))
        elif word not in ("o", "g", "s"):
            pieces.other.add(word)
    except ValueError as error:
        # From `_take_face`, which names the place itself; `SourceError` is a ValueError.
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{where} is {' '.join(line)[:80]!r}; expected numbers after {word!r}.") from None


def _take_face(pieces: Pieces, texts: list[str], where: str) -> None:
    counts = (len(pieces.vertices), len(pieces.textures), len(pieces.normals))
    corners = []
    for text in texts:
        parts = [int(part) if part else 0 for part in text.split("/")] + [0, 0]
        # OBJ counts from 1, and negative numbers from the last row so far. A part left out becomes -1.
        rows = [
            part - 1 if part > 0 else count + part if part else -1 for part, count in zip(parts, counts, strict=False)
        ]
        if not 0 <= rows[0] < counts[0] or any(row >= count for row, count in zip(rows, counts, strict=True)):
            raise SourceError(f"{where}: a face names {text!r}, and there are {counts[0]} vertices before it.")
        corners.append((rows[0], rows[1], rows[2]))
    if len(corners) < 3:
        raise SourceError(f"{where}: a face has {len(corners)} corners; expected 3 or more.")
    pieces.cut += len(corners) > 3
    if not pieces.names:
        pieces.names.append("")
    for triangle in cut_face(corners):
        pieces.corners += triangle
        pieces.objects.append(len(pieces.names) - 1)


def _content(pieces: Pieces) -> Content:
    corners = np.array(pieces.corners, np.int64).reshape(-1, 3, 3)
    owner = np.array(pieces.objects, np.int64)
    vertices = np.array(pieces.vertices, np.float64).reshape(len(pieces.vertices), -1)
    used, first = np.unique(owner), corners[:, :, 0]
    if len(used) <= 1:
        rows, links, offsets = np.arange(len(vertices)), first, np.array([0, len(vertices)])
        link_offsets = np.array([0, len(first)])
    else:
        # Each pair of object and vertex becomes one vertex; the keys sort by object first.
        keys, links = np.unique(owner[:, None] * len(vertices) + first, return_inverse=True)
        rows, links = keys % len(vertices), links.reshape(first.shape)
        offsets = counts_to_offsets(np.bincount(keys // len(vertices), minlength=len(pieces.names))[used])
        order = np.argsort(owner, kind="stable")
        links, corners = links[order], corners[order]
        link_offsets = counts_to_offsets(np.bincount(owner, minlength=len(pieces.names))[used])
    names = [pieces.names[k] for k in used]
    attributes, left = _corner_attributes(pieces, corners, links, len(rows))
    if vertices.shape[1] >= 6:
        attributes[COLOR] = Attribute(vertices[rows, 3:6], ("red", "green", "blue"))
    if len(used) > 1 and len(np.unique(rows)) < len(vertices):
        left.append(f"{len(vertices) - len(np.unique(rows))} vertices of no face are left out")
    ids = _ids_of(names) if names else None
    named = {} if ids is not None or not any(names) else {"name": Attribute(np.array(names, dtype=str))}
    shapes = Shapes("mesh", vertices[rows, :3], offsets, ids, links, link_offsets, attributes, object_attributes=named)
    if pieces.cut:
        left.append(cut_loss(pieces.cut))
    if pieces.other:
        left.append(f"lines {', '.join(sorted(pieces.other))} are left out")
    return Content(shapes, left=tuple(left))


def _ids_of(names: list[str]) -> NDArray[np.int64] | None:
    """Return the ids in names like ``object_7``, or None."""
    numbers = [name.removeprefix(f"{OBJECT_ID[:6]}_") for name in names]
    ids = all(is_id(n) and n != name for n, name in zip(numbers, names, strict=True))
    if ids and len({*numbers}) == len(names):
        return np.array([int(number) for number in numbers], np.int64)
    return None


def _corner_attributes(
    pieces: Pieces, corners: NDArray[np.int64], links: NDArray[np.int64], n_vertices: int
) -> tuple[dict[str, Attribute], list[str]]:
    """Return normals and textures of vertices, where all corners of a vertex agree."""
    result: dict[str, Attribute] = {}
    left = []
    for name, rows, place in ((TEXTURE, pieces.textures, 1), (NORMAL, pieces.normals, 2)):
        if not rows:
            continue
        chosen, flat = np.full(n_vertices, -1, np.int64), corners[:, :, place].ravel()
        # The last corner of a vertex stays; the comparison below finds any that differ.
        chosen[links.ravel()] = flat
        if (chosen >= 0).all() and (chosen[links.ravel()] == flat).all() and len({len(row) for row in rows}) == 1:
            result[name] = Attribute(np.array(rows)[chosen])
        else:
            left.append(f"{name}: not one for each vertex, left out")
    return result, left


def write_obj(content: Content, path: Path) -> None:
    """Write meshes as OBJ, an ``o`` for each object: its name, else ``object_`` and its id."""
    shapes = content.shapes
    columns: dict[str, list[NDArray[Any]]] = {"v": [shapes.positions]}
    attributes = shapes.vertex_attributes
    for name, word in ((COLOR, "v"), (TEXTURE, "vt"), (NORMAL, "vn")):
        if name in attributes:
            column = attributes[name].values
            columns.setdefault(word, []).append(column if column.ndim == 2 else column[:, None])
    slots = [("vt" in columns) or ("vn" in columns), "vn" in columns]
    names = _object_names(shapes)
    links = shapes.edges(3)
    links = links[links_by_object(shapes.offsets, links)[0]]
    owner = object_rows(shapes)[links[:, 0]]
    with path.open("w", encoding="utf-8") as file:
        for word, parts in columns.items():
            texts = [[repr(value) for value in shortest(part).ravel().tolist()] for part in parts]
            widths = [part.shape[1] for part in parts]
            for i in range(shapes.n_vertices):
                values = [text for row, w in zip(texts, widths, strict=True) for text in row[i * w : (i + 1) * w]]
                file.write(f"{word} {' '.join(values)}\n")
        last = -1
        for face, row_owner in zip((links + 1).tolist(), owner.tolist(), strict=True):
            if row_owner != last and names:
                file.write(f"o {names[row_owner]}\n")
            last = row_owner
            file.write(f"f {' '.join(_corner(row, 'vt' in columns, slots[1]) for row in face)}\n")


def _corner(row: int, texture: bool, normal: bool) -> str:  # noqa: FBT001
    if not normal:
        return f"{row}/{row}" if texture else str(row)
    return f"{row}/{row if texture else ''}/{row}"


def _object_names(shapes: Shapes) -> list[str]:
    ids = np.asarray(shapes.ids).tolist()
    if "name" in shapes.object_attributes:
        return [
            " ".join(str(name).split()) or f"object_{i}"
            for name, i in zip(shapes.object_attributes["name"].values, ids, strict=True)
        ]
    return [] if ids == [0] else [f"object_{i}" for i in ids]


HEADER = 84
RECORD = np.dtype([("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")])

STL_HOLDING = Capabilities(
    kinds=("mesh",), dims=(3,), objects="one", vertex=(), link=("attribute",), object=(), float32=True
)


def read_stl(path: Path, *, merge: bool = True) -> Content:
    """Read an STL file, binary or text.

    Parameters
    ----------
    path : Path
        A ``.stl`` file.
    merge : bool
        Whether corners at the same position become one vertex, so that triangles are connected.

    Returns
    -------
    Content
        An object for each ``solid`` of a text; the two bytes of a binary triangle become the attribute ``attribute`` where any are set.

    Raises
    ------
    SourceError
        If the file ends too early or a line is no part of a solid.
    """
    data = path.read_bytes()
    count = int(np.frombuffer(data, "<u4", 1, 80)[0]) if len(data) >= HEADER else -1
    # The size decides first, as a binary file may begin with "solid" too.
    if count >= 0 and len(data) == HEADER + RECORD.itemsize * count:
        rows = np.frombuffer(data, RECORD, count, HEADER)
        words = {"attribute": Attribute(rows["attribute"].copy())} if rows["attribute"].any() else {}
        return Content(_merged(rows["corners"].reshape(-1, 3).astype(np.float32), [count], words, merge=merge))
    if data.lstrip()[:5].lower() != b"solid":
        raise SourceError(
            f"{path} has {len(data)} bytes; expected {HEADER + RECORD.itemsize * max(count, 0)} for its {max(count, 0)} "
            "triangles. It is cut off, or no STL."
        )
    return _read_ascii_triangles(path, merge=merge)


def _read_ascii_triangles(path: Path, *, merge: bool) -> Content:
    rows: list[tuple[int, list[str]]] = []
    counts: list[int] = []
    names: list[str] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.split()
        if words[:1] == ["vertex"]:
            rows.append((number, words[1:]))
            if len(words) != 4 or not names:
                raise SourceError(f"{path}, line {number} is {line.strip()!r}; expected 'vertex x y z' in a solid.")
        elif words and words[0].lower() == "solid":
            names.append(" ".join(words[1:]))
            # At `endsolid` the number of rows by then is added, which leaves that of this solid.
            counts.append(-len(rows))
        elif words and words[0].lower() == "endsolid" and counts:
            counts[-1] += len(rows)
        elif words and not re.fullmatch(r"facet|outer|endloop|endfacet", words[0].lower()):
            raise SourceError(f"{path}, line {number} is {line.strip()[:60]!r}; not part of an STL.")
    if not names or sum(counts) != len(rows) or any(count % 3 or count < 0 for count in counts):
        raise SourceError(f"{path} ends inside a solid or a triangle; it is cut off.")
    corners = number_rows(rows, path)
    shapes = _merged(corners, [count // 3 for count in counts], {}, merge=merge)
    attributes = {"name": Attribute(np.array(names, dtype=str))} if any(names) else {}
    return Content(replace(shapes, object_attributes=attributes))


def _merged(corners: NDArray[Any], counts: list[int], words: dict[str, Attribute], *, merge: bool) -> Shapes:
    """Make a mesh of triangles' corners; `counts` triangles of each object."""
    owner = np.repeat(np.arange(len(counts)), np.array(counts, np.int64) * 3)
    if merge and len(corners):
        keyed = np.column_stack([owner, corners.astype(np.float64)]) + 0.0  # -0.0 and 0.0 are one place
        # The owner is part of the key, so objects share no vertex.
        _, first, where = np.unique(keyed, axis=0, return_index=True, return_inverse=True)
        # From the sorted order back to that of first appearance, in which objects are contiguous for `offsets`.
        rank = np.empty(len(first), np.int64)
        order = np.argsort(first)
        rank[order] = np.arange(len(first))
        kept, links = first[order], rank[where.ravel()]
    else:
        kept = links = np.arange(len(corners))
    offsets = counts_to_offsets(np.bincount(owner[kept], minlength=len(counts)))
    return Shapes(
        "mesh",
        corners[kept],
        offsets,
        links=links.reshape(-1, 3),
        link_offsets=counts_to_offsets(np.array(counts)),
        link_attributes=words,
    )


def write_stl(content: Content, path: Path) -> None:
    """Write all triangles as one binary STL, with their normals."""
    shapes = content.shapes
    faces = shapes.edges(3)
    rows = np.zeros(len(faces), RECORD)
    corners = shapes.positions[faces].astype(np.float64)
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    lengths = np.linalg.norm(normals, axis=1, keepdims=True)
    rows["normal"] = normals / np.where(lengths > 0, lengths, 1)
    rows["corners"] = corners
    if "attribute" in shapes.link_attributes:
        rows["attribute"] = shapes.link_attributes["attribute"].values
    path.write_bytes(b"raggedatlas".ljust(80, b" ") + np.uint32(len(faces)).tobytes() + rows.tobytes())
