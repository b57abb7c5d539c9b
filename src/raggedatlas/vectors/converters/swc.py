"""SWC: neurons as trees of samples with a type, a radius and a parent; one file, or a folder of them."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.content import Capabilities, Content
from raggedatlas.vectors.converters.tables import number_rows, read_text, shortest
from raggedatlas.vectors.selection import counts_to_offsets, take_objects
from raggedatlas.vectors.shapes import Attribute, Shapes

COLUMNS = 7
"""Sample, type, x, y, z, radius, parent."""

TYPE, RADIUS, SAMPLE = "swc_type", "radius", "swc_id"

SWC_HOLDING = Capabilities(
    kinds=("skeleton",), dims=(3,), objects="one", vertex=(TYPE, RADIUS, SAMPLE), link=(), object=("header", "name")
)
SWC_FOLDER_HOLDING = Capabilities(
    kinds=("skeleton",), dims=(3,), vertex=(TYPE, RADIUS, SAMPLE), link=(), object=("header", "name")
)


def read_swc(path: Path) -> Content:
    """Read one SWC file, or a folder of them: each becomes a skeleton.

    Parameters
    ----------
    path : Path
        A ``.swc`` file, or a folder with such files.

    Returns
    -------
    Content
        Vertex attributes ``swc_type``, ``radius`` and ``swc_id`` (the sample's number); object attributes ``name`` (of the file) and
        ``header`` (its comments). Ids are the names where all are numbers, else 0, 1, ... by name.

    Raises
    ------
    SourceError
        If a line is no sample, a number stands twice, a parent is missing, or parents go round in a circle; with file and line.
    """
    files = sorted(path.glob("*.swc")) if path.is_dir() else [path]
    if not files:
        raise SourceError(f"{path} holds no .swc files.")
    trees = [_read_tree(file) for file in files]
    offsets = counts_to_offsets(np.array([len(tree[0]) for tree in trees]))
    names = [file.stem for file in files]
    numbers = all(name.isdecimal() and int(name) < 2**63 for name in names) and len({*map(int, names)}) == len(names)
    links = [np.stack([child, parent], 1) + start for (_, child, parent, _), start in zip(trees, offsets, strict=False)]
    values = np.concatenate([tree[0] for tree in trees])
    objects = {"name": Attribute(np.array(names, dtype=str))}
    if any(tree[3] for tree in trees):
        objects["header"] = Attribute(np.array([tree[3] for tree in trees], dtype=str))
    shapes = Shapes(
        "skeleton",
        values[:, 2:5],
        offsets,
        np.array([int(name) for name in names], np.int64) if numbers else np.arange(len(names)),
        np.concatenate(links),
        counts_to_offsets(np.array([len(part) for part in links])),
        {
            TYPE: Attribute(values[:, 1].astype(np.int32)),
            RADIUS: Attribute(values[:, 5]),
            SAMPLE: Attribute(values[:, 0].astype(np.int64)),
        },
        object_attributes=objects,
    )
    return Content(shapes)


def write_swc(content: Content, path: Path) -> None:
    """Write all skeletons as one SWC file; see `swc_text`."""
    path.write_text(swc_text(content.shapes), encoding="utf-8")


def write_swc_folder(content: Content, path: Path) -> None:
    """Write a folder with an SWC file for each skeleton, named by its name, else by its id."""
    shapes = content.shapes
    names = [str(number) for number in np.asarray(shapes.ids)]
    if "name" in shapes.object_attributes:
        given = [str(name) for name in shapes.object_attributes["name"].values]
        if len({*given}) == len(given) and all(name and not set(name) & set('/\\:*?"<>|') for name in given):
            names = given
    path.mkdir()
    for row, name in enumerate(names):
        (path / f"{name}.swc").write_text(swc_text(take_objects(shapes, np.array([row]))), encoding="utf-8")


def swc_text(shapes: Shapes) -> str:
    """Return skeletons as the text of an SWC file, every parent before its children.

    Samples stand as the vertices do, else by ``swc_id``, else by their distance from the root: the first of these orders that puts parents
    first. Their numbers are ``swc_id`` where each is there once, else 1, 2, ...; types default to 0, radii to 1.
    """
    parent = _parents(shapes)
    depths = _depths(parent)
    numbers = np.zeros(0, np.int64)
    if SAMPLE in shapes.vertex_attributes:
        numbers = shapes.vertex_attributes[SAMPLE].values.astype(np.int64)
    named = len(np.unique(numbers)) == len(parent) and bool((numbers >= 0).all())
    orders = [np.arange(len(parent)), *([np.argsort(numbers)] if named else []), np.argsort(depths, kind="stable")]
    order = next(order for order in orders if _parents_first(parent, order))
    if not named:
        numbers = np.empty(len(parent), np.int64)
        numbers[order] = np.arange(1, len(parent) + 1)
    types = shapes.vertex_attributes[TYPE].values if TYPE in shapes.vertex_attributes else np.zeros(len(parent), int)
    radii = shapes.vertex_attributes[RADIUS].values if RADIUS in shapes.vertex_attributes else np.ones(len(parent))
    parents = np.where(parent >= 0, numbers[parent], -1)
    columns = [shortest(column).tolist() for column in (*shapes.positions.T, radii)]
    lines = [f"# {line}" for line in _header(shapes).splitlines()]
    lines += [
        f"{numbers[i]} {types[i]} {columns[0][i]!r} {columns[1][i]!r} {columns[2][i]!r} {columns[3][i]!r} {parents[i]}"
        for i in order
    ]
    return "\n".join([*lines, ""])


def _parents_first(parent: NDArray[np.int64], order: NDArray[np.int64]) -> bool:
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    child = np.flatnonzero(parent >= 0)
    return bool((place[parent[child]] < place[child]).all())


def _header(shapes: Shapes) -> str:
    if "header" not in shapes.object_attributes:
        return ""
    return "\n".join(str(text) for text in shapes.object_attributes["header"].values if str(text))


def _parents(shapes: Shapes) -> NDArray[np.int64]:
    """Return each vertex's parent, -1 for roots, after checking that links make trees."""
    links = np.zeros((0, 2), np.int64) if shapes.links is None else np.asarray(shapes.links, np.int64)
    parent = np.full(shapes.n_vertices, -1, np.int64)
    parent[links[:, 0]] = links[:, 1]
    if len(np.unique(links[:, 0])) != len(links):
        children, counts = np.unique(links[:, 0], return_counts=True)
        raise SourceError(f"Vertex {children[counts.argmax()]} has {counts.max()} parents; SWC holds trees only.")
    return parent


def _depths(parent: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many ancestors each vertex has, by doubling; `SourceError` names a vertex of a circle."""
    depths, above = (parent >= 0).astype(np.int64), parent.copy()
    for _ in range(len(parent).bit_length() + 1):
        has = np.flatnonzero(above >= 0)
        if not len(has):
            return depths
        depths[has] += depths[above[has]]
        above[has] = above[above[has]]
    raise SourceError(f"Vertex {int(np.flatnonzero(above >= 0)[0])} is its own ancestor; expected trees.")


def _read_tree(path: Path) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], str]:
    """Return samples (n, 7), children and parents as rows, and the comments."""
    lines = read_text(path).splitlines()
    comments = [line.strip()[1:].strip() for line in lines if line.strip().startswith("#")]
    rows = [(n, line.split("#")[0].split()) for n, line in enumerate(lines, 1)]
    rows = [(n, row) for n, row in rows if row]
    if not rows:
        raise SourceError(f"{path} holds no samples.")
    for line, row in rows:
        if len(row) < COLUMNS:
            raise SourceError(
                f"{path}, line {line} has {len(row)} values; expected sample, type, x, y, z, radius, parent."
            )
    values = number_rows([(line, row[:COLUMNS]) for line, row in rows], path)
    numbers, parents = _whole(values[:, 0], rows, path), _whole(values[:, 6], rows, path)
    _whole(values[:, 1], rows, path)
    order = np.argsort(numbers, kind="stable")
    twice = np.flatnonzero(np.diff(numbers[order]) == 0)
    if len(twice):
        at = int(order[twice[0] + 1])
        raise SourceError(f"{path}, line {rows[at][0]} has the sample {numbers[at]} again.")
    child = np.flatnonzero(parents >= 0)
    place = np.minimum(np.searchsorted(numbers[order], parents[child]), len(order) - 1)
    found = order[place]
    missing = np.flatnonzero(numbers[found] != parents[child])
    if len(missing):
        at = int(child[missing[0]])
        raise SourceError(
            f"{path}, line {rows[at][0]}: sample {numbers[at]} has the parent {parents[at]}, which is not there. "
            "A root has the parent -1."
        )
    _refuse_circles(child, found, rows, path)
    return values, child, found, "\n".join(comments)


def _refuse_circles(
    child: NDArray[np.int64], parent: NDArray[np.int64], rows: list[tuple[int, list[str]]], path: Path
) -> None:
    above = np.full(len(rows), -1, np.int64)
    above[child] = parent
    try:
        _depths(above)
    except SourceError:
        for _ in range(len(rows).bit_length() + 1):
            has = above >= 0
            above[has] = above[above[has]]
        row = int(np.flatnonzero(above >= 0)[0])
        raise SourceError(
            f"{path}, line {rows[row][0]}: sample {rows[row][1][0]} is its own ancestor; expected trees."
        ) from None


def _whole(column: NDArray[np.float64], rows: list[tuple[int, list[str]]], path: Path) -> NDArray[Any]:
    broken = np.flatnonzero(column != np.rint(column))
    if len(broken):
        line = rows[int(broken[0])][0]
        raise SourceError(f"{path}, line {line} has {column[broken[0]]}; samples, types and parents are whole numbers.")
    return column.astype(np.int64)
