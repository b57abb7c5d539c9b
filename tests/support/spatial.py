"""Small geometry of every kind, with negative coordinates, objects without vertices and with one, and seams."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raggedatlas.wings.vectors.attachment import make_transcripts
from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.wings.vectors.geometry import Axis, Geometry
from raggedatlas.wings.vectors.shapes import Attribute, Groups, Shapes, as_attributes

if TYPE_CHECKING:
    from anndata import AnnData

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
    # Parents as in a binary heap: that of `i` is `(i - 1) // 2`, in the second tree counted from 20.
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
    # Kinds are integers, so chunks of edge 1 on the first axis separate them.
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


GENES = ("EPCAM", "CD3E", "MS4A1", "LYZ", "COL1A1", "ACTA2", "PECAM1", "KRT8")


@dataclass(frozen=True)
class Slide:
    """A segmented slide.

    Parameters
    ----------
    data : AnnData
        Cells x genes, with ``segment_id`` in obs.
    outlines : Shapes
        One closed outline of two axes for each cell; the last vertex is not the first again.
    transcripts : Shapes
        Points with ``gene`` and ``cell_id`` (the segment, -1 for none).
    """

    data: "AnnData"
    outlines: Shapes
    transcripts: Shapes


def make_slide(n_cells: int = 60, *, width: float = 100.0, seed: int = 0, n_loose: int = 40, first: int = 100) -> Slide:
    """Create a slide: cells on a jittered grid, some tens of transcripts in each, some between them; nothing of it is measured.

    Parameters
    ----------
    n_cells : int
        How many.
    width : float
        Edge of the slide.
    seed : int
        Another seed gives another slide.
    n_loose : int
        Transcripts of no cell.
    first : int
        Id of the first segment.

    Examples
    --------
    >>> slide = make_slide(9)
    >>> int(slide.data.X.sum()) == int((slide.transcripts.vertex_attributes["cell_id"].values >= 0).sum())
    True
    """
    import pandas as pd
    from anndata import AnnData
    from scipy.sparse import csr_matrix

    rng = np.random.default_rng(seed)
    ids = first + rng.permutation(n_cells)
    centres, radius = _centres(n_cells, width, rng)
    outlines = _outlines(centres, radius, ids, rng)
    kind = (centres[:, 0] / width * 3).astype(int).clip(0, 2)
    weights = rng.dirichlet(np.full(len(GENES), 0.4), size=3)[kind]
    counts = rng.poisson(weights * rng.integers(15, 45, n_cells)[:, None])
    cell = np.repeat(np.arange(n_cells), counts.sum(axis=1))
    gene = np.concatenate([np.repeat(np.arange(len(GENES)), row) for row in counts])
    # The root spreads points evenly over the disk; at most 0.78 of the radius, they lie within the outline.
    angle, far = rng.uniform(0, 2 * np.pi, len(cell)), np.sqrt(rng.uniform(0, 0.6, len(cell)))
    inside = centres[cell] + (radius * far)[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    loose = rng.uniform(0, width, (n_loose, 2))
    order = rng.permutation(len(cell) + n_loose)
    labels = np.array(GENES)[np.concatenate([gene, rng.integers(0, len(GENES), n_loose)])][order]
    owner = np.concatenate([ids[cell], np.full(n_loose, -1)])[order]
    spots = make_transcripts(np.concatenate([inside, loose])[order], labels.tolist(), owner.tolist())
    obs = pd.DataFrame(
        {"segment_id": ids, "region": pd.Categorical(np.array(["tumour", "border", "stroma"])[kind])},
        index=[f"cell-{i}" for i in range(n_cells)],
    )
    data = AnnData(csr_matrix(counts.astype(np.float32)), obs=obs, var=pd.DataFrame(index=list(GENES)))
    return Slide(data, outlines, spots)


def _centres(n: int, width: float, rng: np.random.Generator) -> tuple[NDArray[np.float64], float]:
    side = int(np.ceil(np.sqrt(n)))
    step = width / side
    grid = np.stack(np.divmod(np.arange(n), side), axis=1)[:, ::-1]
    # Jitter and the widest outline add up to 0.12 + 0.33 * 1.12 < 0.5 steps, so cells never overlap.
    return (grid + 0.5) * step + rng.uniform(-0.12, 0.12, (n, 2)) * step, 0.33 * step


def _outlines(centres: NDArray[np.float64], radius: float, ids: NDArray[np.int64], rng: np.random.Generator) -> Shapes:
    n, corners = len(centres), 16
    angle = np.linspace(0, 2 * np.pi, corners, endpoint=False)
    far = radius * (1 + 0.12 * np.sin(angle[None] * rng.integers(2, 5, n)[:, None] + rng.uniform(0, 6, n)[:, None]))
    ring = centres[:, None] + far[:, :, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    # Shoelace formula; `roll` pairs the last corner with the first.
    area = 0.5 * np.abs(
        (ring[..., 0] * np.roll(ring[..., 1], -1, 1) - np.roll(ring[..., 0], -1, 1) * ring[..., 1]).sum(1)
    )
    return Shapes(
        "polyline", ring.reshape(-1, 2), np.arange(n + 1) * corners, ids, object_attributes={"area": area}
    )  # fmt: skip
