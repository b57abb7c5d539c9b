"""OBJ: meshes as text, several objects with names in one file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.content import OBJECT_ID, Capabilities, Content
from raggedatlas.vectors.converters.tables import read_text, shortest
from raggedatlas.vectors.selection import counts_to_offsets
from raggedatlas.vectors.shapes import Attribute, Shapes

COLOR, NORMAL, TEXTURE = "color", "normal", "uv"

OBJ_HOLDING = Capabilities(kinds=("mesh",), dims=(3,), vertex=(COLOR, NORMAL, TEXTURE), link=(), object=("name",))


@dataclass
class Pieces:
    """What the lines of a file say, in their order.

    Parameters
    ----------
    vertices, normals, textures : list of rows of numbers
        ``v``, ``vn`` and ``vt``.
    corners : list of (vertex, texture, normal)
        Corners of the triangles, -1 where none is named.
    objects : list of int
        For each triangle the row in `names`.
    names : list of str
        Of the objects.
    cut : int
        Faces of more than three corners.
    other : set of str
        Words of lines that are not taken.
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
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{where} is {' '.join(line)[:80]!r}; expected numbers after {word!r}.") from None


def _take_face(pieces: Pieces, texts: list[str], where: str) -> None:
    counts = (len(pieces.vertices), len(pieces.textures), len(pieces.normals))
    corners = []
    for text in texts:
        parts = [int(part) if part else 0 for part in text.split("/")] + [0, 0]
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
    for k in range(1, len(corners) - 1):
        pieces.corners += [corners[0], corners[k], corners[k + 1]]
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
        left.append(f"{pieces.cut} faces of more than three corners are cut into triangles")
    if pieces.other:
        left.append(f"lines {', '.join(sorted(pieces.other))} are left out")
    return Content(shapes, left=tuple(left))


def _ids_of(names: list[str]) -> NDArray[np.int64] | None:
    """Return the ids that names like ``object_7`` say, or None."""
    numbers = [name.removeprefix(f"{OBJECT_ID[:6]}_") for name in names]
    if all(n.isdecimal() and n != name for n, name in zip(numbers, names, strict=True)) and len({*numbers}) == len(
        names
    ):
        return np.array([int(number) for number in numbers], np.int64)
    return None


def _corner_attributes(
    pieces: Pieces, corners: NDArray[np.int64], links: NDArray[np.int64], n_vertices: int
) -> tuple[dict[str, Attribute], list[str]]:
    """Return normals and textures of vertices, where all corners of a vertex agree."""
    made: dict[str, Attribute] = {}
    left = []
    for name, rows, place in ((TEXTURE, pieces.textures, 1), (NORMAL, pieces.normals, 2)):
        if not rows:
            continue
        chosen, flat = np.full(n_vertices, -1, np.int64), corners[:, :, place].ravel()
        chosen[links.ravel()] = flat
        if (chosen >= 0).all() and (chosen[links.ravel()] == flat).all() and len({len(row) for row in rows}) == 1:
            made[name] = Attribute(np.array(rows)[chosen])
        else:
            left.append(f"{name}: not one for each vertex, left out")
    return made, left


def write_obj(content: Content, path: Path) -> None:
    """Write meshes as OBJ, an ``o`` for each object: its name, else ``object_`` and its id."""
    shapes = content.shapes
    columns: dict[str, list[NDArray[Any]]] = {"v": [shapes.positions]}
    attributes = shapes.vertex_attributes
    for name, word in ((COLOR, "v"), (TEXTURE, "vt"), (NORMAL, "vn")):
        if name in attributes:
            columns.setdefault(word, []).append(attributes[name].values.reshape(shapes.n_vertices, -1))
    slots = [("vt" in columns) or ("vn" in columns), "vn" in columns]
    names = _object_names(shapes)
    links, owner = _links_by_object(shapes)
    with path.open("w", encoding="utf-8") as file:
        for word, parts in columns.items():
            texts = [[repr(value) for value in shortest(part).ravel().tolist()] for part in parts]
            widths = [part.shape[1] for part in parts]
            for i in range(shapes.n_vertices):
                values = [text for row, w in zip(texts, widths, strict=True) for text in row[i * w : (i + 1) * w]]
                file.write(f"{word} {' '.join(values)}\n")
        last = -1
        for face, whose in zip((links + 1).tolist(), owner.tolist(), strict=True):
            if whose != last and names:
                file.write(f"o {names[whose]}\n")
            last = whose
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


def _links_by_object(shapes: Shapes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    links = np.zeros((0, 3), np.int64) if shapes.links is None else np.asarray(shapes.links, np.int64)
    owner = np.searchsorted(shapes.offsets, links[:, 0], side="right") - 1
    order = np.argsort(owner, kind="stable")
    return links[order], owner[order]
