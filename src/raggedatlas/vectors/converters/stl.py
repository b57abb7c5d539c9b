"""STL: triangles without vertices of their own; equal corners are joined."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError, ValuesError
from raggedatlas.vectors.converters.content import Capabilities, Content
from raggedatlas.vectors.converters.tables import number_rows, read_text
from raggedatlas.vectors.selection import counts_to_offsets
from raggedatlas.vectors.shapes import Attribute, Shapes

HEADER = 84
RECORD = np.dtype([("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")])

STL_HOLDING = Capabilities(kinds=("mesh",), dims=(3,), objects="one", vertex=(), link=("attribute",), object=())


def read_stl(path: Path, *, merge: bool = True) -> Content:
    """Read an STL file, binary or text.

    Parameters
    ----------
    path : Path
        A ``.stl`` file.
    merge : bool
        Whether corners at the same place become one vertex, so that triangles hang together.

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
    if count >= 0 and len(data) == HEADER + RECORD.itemsize * count:
        rows = np.frombuffer(data, RECORD, count, HEADER)
        words = {"attribute": Attribute(rows["attribute"].copy())} if rows["attribute"].any() else {}
        return Content(_merged(rows["corners"].reshape(-1, 3).astype(np.float32), [count], words, merge=merge))
    if data.lstrip()[:5].lower() != b"solid":
        raise SourceError(
            f"{path} has {len(data)} bytes; expected {HEADER + RECORD.itemsize * max(count, 0)} for its {max(count, 0)} "
            "triangles. It is cut off, or no STL."
        )
    return _read_ascii(path, merge=merge)


def _read_ascii(path: Path, *, merge: bool) -> Content:
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
    return Content(
        Shapes(
            "mesh",
            shapes.positions,
            shapes.offsets,
            shapes.ids,
            shapes.links,
            shapes.link_offsets,
            object_attributes=attributes,
        )
    )


def _merged(corners: NDArray[Any], counts: list[int], words: dict[str, Attribute], *, merge: bool) -> Shapes:
    """Make a mesh of triangles' corners; `counts` triangles of each object."""
    owner = np.repeat(np.arange(len(counts)), np.array(counts, np.int64) * 3)
    if merge and len(corners):
        keyed = np.column_stack([owner, corners.astype(np.float64)]) + 0.0  # -0.0 and 0.0 are one place
        _, first, where = np.unique(keyed, axis=0, return_index=True, return_inverse=True)
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
    faces = np.zeros((0, 3), np.int64) if shapes.links is None else shapes.links
    rows = np.zeros(len(faces), RECORD)
    corners = shapes.positions[faces].astype(np.float64)
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    lengths = np.linalg.norm(normals, axis=1, keepdims=True)
    rows["normal"] = normals / np.where(lengths > 0, lengths, 1)
    rows["corners"] = corners
    if "attribute" in shapes.link_attributes:
        rows["attribute"] = shapes.link_attributes["attribute"].values
    path.write_bytes(b"raggedatlas".ljust(80, b" ") + np.uint32(len(faces)).tobytes() + rows.tobytes())


def stl_losses(shapes: Shapes) -> list[str]:
    """Say which positions are rounded."""
    return rounded(shapes, np.float32, "32 bits")


def rounded(shapes: Shapes, kind: type[np.floating[Any]], what: str) -> list[str]:
    """Say whether positions change when they are written as a narrower type; `ValuesError` for those beyond it."""
    with np.errstate(over="ignore"):
        narrow = shapes.positions.astype(kind)
    beyond = ~np.isfinite(narrow).all(1) & np.isfinite(shapes.positions).all(1)
    if beyond.any():
        row = int(np.argmax(beyond))
        raise ValuesError(
            f"Vertex {row} lies at {shapes.positions[row].tolist()}, beyond floats of {what}; scale the positions first."
        )
    if np.array_equal(narrow.astype(shapes.positions.dtype), shapes.positions):
        return []
    return [f"rounded: positions, from {shapes.positions.dtype} to {what}"]
