"""Small geometry of every kind, with negative coordinates, objects without vertices and with one, and seams."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.vectors.geometry import Axis, Geometry
from raggedatlas.vectors.shapes import Attribute, Groups, Shapes, as_attributes

EDGE = (3.0, 3.0, 3.0)


def walk(n: int, n_dims: int = 3, seed: int = 0) -> NDArray[np.float32]:
    """Return a path about the origin, so that chunk keys have both signs."""
    return np.cumsum(np.random.default_rng(seed).normal(0, 1, (n, n_dims)), axis=0).astype(np.float32)


def cloud() -> Shapes:
    """Return points without objects."""
    values = {
        "a": np.arange(40, dtype=np.float32),
        "b": Attribute(np.arange(80, dtype=np.int16).reshape(40, 2), ("u", "v")),
    }
    return Shapes("point_cloud", walk(40), vertex_attributes=as_attributes(values))


def spots() -> Shapes:
    """Return points of objects: one empty, one with an id beyond 32 bits, two points that belong to none."""
    names = {"name": np.array(["x", "yy", "z"]), "v": np.arange(3.0)}
    sets = Groups(np.array([0, 2, 2, 3]), np.array([3, 4, 2**40]), {"name": Attribute(np.array(["A", "B", "C"]))})
    return Shapes(
        "point_cloud",
        walk(40),
        offsets=np.array([0, 5, 5, 38]),
        ids=np.array([2**40, 3, 4]),
        vertex_attributes=as_attributes({"a": np.arange(40, dtype=np.uint8)}),
        object_attributes=as_attributes(names),
        groups=sets,
    )


def paths(kind: str = "streamline") -> Shapes:
    """Return lines in pieces: one empty, one with a single vertex."""
    return Shapes(
        kind,
        walk(40),
        offsets=np.array([0, 5, 5, 6, 40]),
        ids=np.arange(4),
        vertex_attributes=as_attributes({"a": np.arange(40, dtype=np.float32)}),
        object_attributes=as_attributes({"v": np.arange(4, dtype=np.float32)}),
        groups=Groups(np.array([0, 2, 5]), np.array([3, 1, 0, 1, 2])),
    )


def lines() -> Shapes:
    """Return segments of two ends."""
    return Shapes("line", walk(40), offsets=np.arange(0, 41, 2))


def tree() -> Shapes:
    """Return two skeletons, each a binary tree."""
    links = [[i, (i - 1) // 2] for i in range(1, 20)] + [[i, (i - 21) // 2 + 20] for i in range(21, 40)]
    radius = {"radius": np.arange(40, dtype=np.float32)}
    return Shapes(
        "skeleton",
        walk(40),
        offsets=np.array([0, 20, 40]),
        links=np.array(links),
        vertex_attributes=as_attributes(radius),
    )


def graph() -> Shapes:
    """Return a graph with loops and parallel edges, each with a weight."""
    links = np.random.default_rng(1).integers(0, 40, (60, 2))
    return Shapes("graph", walk(40), links=links, link_attributes=as_attributes({"w": np.arange(60.0)}))


def mesh() -> Shapes:
    """Return two strips of triangles."""
    links = [[i, i + 1, i + 2] for i in range(18)] + [[i, i + 2, i + 1] for i in range(20, 38)]
    colours = {"c": np.arange(72, dtype=np.uint8).reshape(36, 2)}
    return Shapes(
        "mesh", walk(40), offsets=np.array([0, 20, 40]), links=np.array(links), link_attributes=as_attributes(colours)
    )


ALL = {
    "cloud": cloud,
    "spots": spots,
    "line": lines,
    "polyline": lambda: paths("polyline"),
    "streamline": paths,
    "skeleton": tree,
    "graph": graph,
    "mesh": mesh,
}


def by_kind(shapes: Shapes) -> Geometry:
    """Cut shapes of three axes by the kind of each vertex too (its row modulo 3): as if it were an axis, which is then left out."""
    kinds = np.arange(shapes.n_vertices)[:, None] % 3
    led = replace(shapes, positions=np.concatenate([kinds, shapes.positions], axis=1))
    made = make_geometry(led, ChunkingOptions(chunk_shape=(1.0, *EDGE)))
    level = made.levels[0]
    facts = {
        "chunk_dims": ["kind", "x", "y", "z"],
        "chunk_attribute_name": "kind",
        "chunk_attribute_values": ["a", "b", "c"],
    }
    level = replace(level, positions=np.ascontiguousarray(level.positions[:, 1:], np.float32), metadata=facts)
    low, high = made.bounds
    return replace(made, levels=(level,), axes=tuple(map(Axis, "xyz")), chunk_shape=EDGE, bounds=(low[1:], high[1:]))


def rows_of(values: NDArray[np.generic]) -> list[tuple[float, ...]]:
    """Return rows as a sorted list, for comparison without their order."""
    flat = np.asarray(values, np.float64)
    return sorted(map(tuple, flat.reshape(len(flat), -1).tolist())) if flat.size else []


def corners_of(shapes: Shapes) -> list[tuple[float, ...]]:
    """Return links by the positions of their ends, in the order of the ends, and with their attributes."""
    links = np.zeros((0, 2), np.int64) if shapes.links is None else shapes.links
    if not len(links):
        return []
    ends = np.asarray(shapes.positions, np.float64)[links].reshape(shapes.n_links, -1)
    extra = [
        np.asarray(value.values, np.float64).reshape(shapes.n_links, -1) for value in shapes.link_attributes.values()
    ]
    return rows_of(np.concatenate([ends, *extra], axis=1))
