"""Multi-resolution pyramids: coarser levels of shapes, object by object, with unchanged ids (zarr-vectors §7.6 and §9)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.store.native import library
from raggedatlas.wings.vectors.builder import CoarseLevel
from raggedatlas.wings.vectors.libraries import load_library
from raggedatlas.wings.vectors.shapes import (
    Shapes,
    counts_to_offsets,
    links_by_object,
    object_rows,
    take_attributes,
    take_objects,
    take_vertices,
)
from raggedatlas.wings.vectors.storage.codecs import raise_fault

KEEP = ("random", "largest")

LevelStep = tuple[Shapes, NDArray[np.int64]]
"""Shapes of a level, and for each vertex of the next finer level the row that represents it, or -1."""

LinkBuilder = Callable[[NDArray[np.bool_]], NDArray[Any] | None]
ParentFinder = Callable[[NDArray[np.bool_]], NDArray[np.int64]]


@dataclass(frozen=True)
class PyramidOptions:
    """Options of a pyramid.

    Parameters
    ----------
    n_levels : int
        Number of levels below the finest.
    factor : float
        Approximate ratio of vertex counts between consecutive levels (of the objects kept), above 1.
    bin_ratio : tuple of D ints or None
        Number of bins of the finer level that one bin spans per axis; None: the D-th root of `factor`, rounded, at least 2.
    tolerances : tuple of floats or None
        For lines, skeletons and graphs: Douglas-Peucker tolerance of each coarser level, in world
        units, increasing. None: derived from `factor`.
    sparsity : float
        Fraction of the objects of a level that the next level keeps, in (0, 1].
    keep : str
        Objects to keep: ``"random"``, or ``"largest"``, those with the most vertices.
    seed : int
        Random seed; equal seeds give equal pyramids.

    Examples
    --------
    >>> PyramidOptions(n_levels=3, factor=4).bins(2)
    (2, 2)
    """

    n_levels: int = 2
    factor: float = 8.0
    bin_ratio: tuple[int, ...] | None = None
    tolerances: tuple[float, ...] | None = None
    sparsity: float = 1.0
    keep: str = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate the options."""
        rising = self.tolerances is None or (
            len(self.tolerances) == self.n_levels and bool(np.all(np.diff([0, *self.tolerances]) >= 0))
        )
        for fits, what in (
            (self.n_levels >= 0, f"n_levels is {self.n_levels}; expected 0 or more"),
            (self.factor > 1, f"factor is {self.factor}; expected more than 1"),
            (0 < self.sparsity <= 1, f"sparsity is {self.sparsity}; expected more than 0, at most 1"),
            (self.keep in KEEP, f"keep is {self.keep!r}; expected one of {', '.join(KEEP)}"),
            (rising, f"tolerances are {self.tolerances}; expected {self.n_levels}, not negative, never decreasing"),
            (self.bin_ratio is None or min(self.bin_ratio) >= 1, f"bin_ratio is {self.bin_ratio}; expected 1 or more"),
        ):
            if not fits:
                raise SourceError(f"Invalid pyramid options: {what}.")

    def bins(self, n_dims: int) -> tuple[int, ...]:
        """Return how many bins of the finer level one bin spans on each axis."""
        if self.bin_ratio is not None:
            return tuple(int(ratio) for ratio in self.bin_ratio)
        return (max(2, round(self.factor ** (1 / n_dims))),) * n_dims


def select_objects(shapes: Shapes, steps: PyramidOptions) -> list[NDArray[np.bool_]]:
    """Return which objects each coarser level keeps; each level keeps a subset of the previous one."""
    n_objects = len(shapes.offsets) - 1
    order = np.random.default_rng(steps.seed).permutation(n_objects)
    if steps.keep == "largest":
        # Ties stay in random order, because the sort is stable.
        order = order[np.argsort(-np.diff(shapes.offsets)[order], kind="stable")]
    result = []
    for level in range(1, steps.n_levels + 1):
        kept = np.zeros(n_objects, bool)
        # Without 1e-9, a product rounded to just above an integer would keep one object too many.
        kept[order[: int(np.ceil(n_objects * steps.sparsity**level - 1e-9))]] = True
        result.append(kept)
    return result


def masks_from_weights(
    shapes: Shapes, weights: NDArray[np.float64], steps: PyramidOptions
) -> Iterator[NDArray[np.bool_]]:
    """Yield which vertices each level keeps by weight: those above a tolerance, or as many as `factor` implies.

    Vertices of weight zero are dropped at the first step; those of infinite weight stay as long as their object, or
    always if they belong to none.
    """
    owner, bar = object_rows(shapes), 0.0
    for level, objects in enumerate(select_objects(shapes, steps)):
        alive = np.append(objects, True)[owner]
        if steps.tolerances is not None:
            yield alive & (weights > steps.tolerances[level])
            continue
        there = weights[alive]
        wanted = int(np.ceil(len(there) / steps.factor ** (level + 1)))
        if 0 < wanted < len(there):
            # The bar never falls, so that each level is a subset of the finer one.
            bar = max(bar, float(np.partition(there, len(there) - wanted)[len(there) - wanted]))
        yield alive & (weights >= bar) & (weights > 0)


def build_coarse_levels(
    shapes: Shapes,
    kept: Iterator[NDArray[np.bool_]],
    stand_in: ParentFinder,
    relink: LinkBuilder = lambda _: None,
) -> Iterator[LevelStep]:
    """Yield levels whose vertices are a subset of those of the finest level, `shapes`.

    `kept` yields the vertices that each level keeps, (N,) bool. Of this mask, `stand_in` returns the vertex that
    represents each vertex (arbitrary if its object is dropped), and `relink` the links between kept vertices; by
    default none.
    """
    owner, finer = object_rows(shapes), np.arange(shapes.n_vertices)
    for mask in kept:
        places = np.cumsum(mask) - 1
        nearest = stand_in(mask)
        parents = np.where(mask[nearest] & (owner[nearest] == owner), places[nearest], -1)
        level = take_vertices(shapes, mask, relink(mask))
        # Dropped objects have no vertices left, so no row changes, and vertices without an object stay after the last one.
        kept_objects = np.flatnonzero((np.diff(shapes.offsets) == 0) | (np.diff(level.offsets) > 0))
        if shapes.ids is not None:
            level = replace(
                level,
                offsets=np.append(level.offsets[kept_objects], level.offsets[-1]),
                ids=shapes.ids[kept_objects],
                object_attributes=take_attributes(level.object_attributes, kept_objects),
            )
        yield level, parents[finer]
        finer = np.flatnonzero(mask)


def nearest_kept(points: NDArray[np.float64], kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return, for each vertex of a sequence, the nearer of the kept vertices before and after it.

    If there is none on one side, return the other one; if there are none at all, the vertex itself.
    """
    places = np.flatnonzero(kept)
    if not len(places):
        return np.arange(len(kept))
    counts = np.cumsum(kept)
    before, behind = places[np.maximum(counts - 1, 0)], places[np.minimum(counts - kept, len(places) - 1)]
    gaps = [((points - points[other]) ** 2).sum(1) for other in (before, behind)]
    return np.where(gaps[0] <= gaps[1], before, behind)


CURVE_BITS = 63


def z_order_ranks(positions: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the rank of each point on a Z-order curve through the bounding box, (N,)."""
    n_dims = positions.shape[1]
    # All bits together must leave the sign of an int64 free.
    bits = min(CURVE_BITS // n_dims, 21)
    low = positions.min(0) if len(positions) else np.zeros(n_dims)
    width = positions.max(0) - low if len(positions) else np.ones(n_dims)
    scale = (2**bits - 1) / np.where(width > 0, width, 1)
    cells = ((positions - low) * scale).astype(np.int64)
    code = np.zeros(len(positions), np.int64)
    for bit in range(bits):
        for d in range(n_dims):
            code |= (cells[:, d] >> bit & 1) << (bit * n_dims + d)
    return code


def point_levels(shapes: Shapes, steps: PyramidOptions) -> Iterator[LevelStep]:
    """Yield coarser levels of a point cloud.

    The points of each object (or of the cloud, or of no object) are ordered along a Z-order curve, randomly if they
    share a cell. Level k keeps every ``round(factor)**k``-th point, beginning with the first: an even share of every
    region, and at least one point per object. So each level is a subset of the finer one.
    """
    owner = object_rows(shapes)
    chance = np.random.default_rng(steps.seed).permutation(shapes.n_vertices)
    order = np.lexsort((chance, z_order_ranks(shapes.positions.astype(np.float64)), owner))
    # Owners are the first sort key, so each object has the same range in `order` as in the shapes.
    firsts = shapes.offsets[owner]
    stride = max(2, round(steps.factor))
    strides: list[int] = []

    def masks() -> Iterator[NDArray[np.bool_]]:
        rank = np.arange(len(order)) - firsts
        for level, objects in enumerate(select_objects(shapes, steps), 1):
            # Used by `stand_in`, which `build_coarse_levels` therefore calls before it draws the next mask.
            strides.append(stride**level)
            kept = np.zeros(len(order), bool)
            kept[order] = rank % strides[-1] == 0
            yield kept & np.append(objects, True)[owner]

    def stand_in(kept: NDArray[np.bool_]) -> NDArray[np.int64]:
        rank = np.arange(len(kept)) - firsts
        nearest = np.empty(len(kept), np.int64)
        nearest[order] = order[firsts + rank // strides[-1] * strides[-1]]
        return nearest

    yield from build_coarse_levels(shapes, masks(), stand_in)


def vertex_tolerances(positions: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return for each vertex the largest tolerance at which the Douglas-Peucker algorithm keeps it; infinity for ends.

    `positions`, (N, D), has the vertices of all lines, concatenated, and `offsets`, (lines + 1,), the start of each
    line.
    """
    weights, points = np.zeros(len(positions)), np.ascontiguousarray(positions, np.float64)
    # Space for the pieces of a line that are not yet split: never more than its points.
    room = int(np.diff(offsets).max(initial=0)) + 1
    pieces, bounds = np.empty((room, 2), np.int64), np.empty(room)
    fault = library().ra_weigh_lines(
        points, *points.shape, offsets.astype(np.int64), len(offsets) - 1, weights, pieces, bounds, room
    )
    raise_fault(fault, "A line")
    return weights


def keep_heaviest(weights: NDArray[np.float64], offsets: NDArray[np.int64], needed: NDArray[np.int64]) -> None:
    """Keep the `needed` heaviest inner vertices of each line, or all if there are fewer."""
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    inner = np.flatnonzero(np.isfinite(weights) & (needed[owner] > 0))
    order = inner[np.lexsort((-weights[inner], owner[inner]))]
    first = np.flatnonzero(np.diff(owner[order], prepend=-1))
    rank = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    weights[order[rank < needed[owner[order]]]] = np.inf


def line_levels(shapes: Shapes, steps: PyramidOptions) -> Iterator[LevelStep]:
    """Yield coarser levels of lines, polylines and streamlines.

    Kept vertices are unchanged, with their attributes. Both ends are always kept; a ring (both ends at one position)
    also keeps its two heaviest vertices. Vertices of no object stay.
    """
    weights = vertex_tolerances(shapes.positions, shapes.offsets)
    n_owned = shapes.offsets[-1]
    weights[n_owned:] = np.inf
    counts = np.diff(shapes.offsets)
    needed = np.zeros(len(counts), np.int64)
    long = np.flatnonzero(counts > 3)
    closed = (shapes.positions[shapes.offsets[long]] == shapes.positions[shapes.offsets[long + 1] - 1]).all(1)
    needed[long[closed]] = 2
    keep_heaviest(weights[:n_owned], shapes.offsets, needed)
    points = shapes.positions.astype(np.float64)
    masks = masks_from_weights(shapes, weights, steps)
    yield from build_coarse_levels(shapes, masks, lambda kept: nearest_kept(points, kept))


@dataclass(frozen=True)
class Paths:
    """Unbranched paths of a graph."""

    members: NDArray[np.int64]  # (T,): vertices, path by path, both ends included
    offsets: NDArray[np.int64]  # (paths + 1,): start of each path
    forward: NDArray[np.bool_]  # (paths,): whether links point along the path, or against it


def find_paths(links: NDArray[Any], n_vertices: int, fixed: NDArray[np.bool_]) -> Paths:
    """Split a graph at its fixed vertices into unbranched paths; cycles without one are split at their lowest vertex.

    `links` are edges, (M, 2). `fixed`, (N,), marks the ends of paths; it must include every vertex that does not have
    exactly two edges.
    """
    links = links.astype(np.int64).reshape(-1, 2)
    n_links = len(links)
    near, far = links.T.ravel(), links[:, ::-1].T.ravel()
    order = np.argsort(near, kind="stable")
    # Each link is listed from both of its ends, hence the number modulo `n_links`.
    adjacency = np.stack([far[order], order % max(n_links, 1)], 1)
    bounds = counts_to_offsets(np.bincount(near, minlength=n_vertices))
    members, ends = np.empty(2 * n_links, np.int64), np.empty((n_links, 2), np.int64)
    n_chains, fixed = np.zeros(1, np.int64), np.ascontiguousarray(fixed).view(np.uint8)
    fault = library().ra_walk_chains(
        adjacency, n_links, bounds, fixed, n_vertices, np.zeros(n_links, np.uint8), members, ends, n_chains
    )
    raise_fault(fault, "A graph")
    ends = ends[: n_chains[0]]
    offsets = np.concatenate([[0], ends[:, 0]]).astype(np.int64)
    members = members[: offsets[-1]]
    return Paths(members, offsets, links[ends[:, 1], 0] == members[offsets[:-1]])


def graph_levels(shapes: Shapes, steps: PyramidOptions) -> Iterator[LevelStep]:
    """Yield coarser levels of graphs and skeletons.

    Branch points, ends, isolated vertices and roots stay. The paths between them are simplified by the Douglas-Peucker
    algorithm; a loop keeps two inner vertices and parallel paths one each, so the numbers of components, branches and
    loops do not change. A new link has the direction of the links that it replaces; attributes of links are dropped,
    because links are merged.
    """
    links = shapes.edges()
    if links.shape[1] != 2:
        raise SourceError(f"Links of a {shapes.kind} have {links.shape[1]} ends; expected 2.")
    # These always stay: branch points, ends, isolated vertices, ends of loops, and roots of skeletons.
    degree = np.bincount(links.ravel(), minlength=shapes.n_vertices)
    fixed: NDArray[np.bool_] = degree != 2
    # A link from a vertex to itself counts twice, so that the vertex looks like an inner one.
    fixed[links[links[:, 0] == links[:, 1], 0]] = True
    if shapes.kind == "skeleton":
        has_parent = np.zeros(shapes.n_vertices, bool)
        has_parent[links[:, 0]] = True
        # Links on both sides of a root point to it, so no single link can replace them.
        fixed |= ~has_parent
    chains = find_paths(links, shapes.n_vertices, fixed)
    points = shapes.positions.astype(np.float64)
    along = vertex_tolerances(points[chains.members], chains.offsets)
    ends = np.sort(np.stack([chains.members[chains.offsets[:-1]], chains.members[chains.offsets[1:] - 1]], 1), 1)
    _, which, counts = np.unique(ends, axis=0, return_inverse=True, return_counts=True)
    # So many inner vertices of each path stay that no loop and no parallel path is lost.
    required = np.where(ends[:, 0] == ends[:, 1], 2, np.where(counts[which.ravel()] > 1, 1, 0))
    keep_heaviest(along, chains.offsets, required)
    weights = np.full(shapes.n_vertices, np.inf)
    weights[chains.members] = along
    chain = np.repeat(np.arange(len(chains.forward)), np.diff(chains.offsets))

    def stand_in(kept: NDArray[np.bool_]) -> NDArray[np.int64]:
        nearest = np.arange(len(kept))
        nearest[chains.members] = chains.members[nearest_kept(points[chains.members], kept[chains.members])]
        return nearest

    def relink(kept: NDArray[np.bool_]) -> NDArray[np.int64]:
        rows = np.flatnonzero(kept[chains.members])
        joined = chain[rows[:-1]] == chain[rows[1:]]
        near, far = chains.members[rows[:-1][joined]], chains.members[rows[1:][joined]]
        forward = chains.forward[chain[rows[:-1][joined]]]
        return np.stack([np.where(forward, near, far), np.where(forward, far, near)], 1)

    yield from build_coarse_levels(shapes, masks_from_weights(shapes, weights, steps), stand_in, relink)


AGGRESSIVENESS = (7.0, 4.0, 1.0)
"""Values passed to the library in turn, until a closed surface stays closed."""

MIN_FACES = 4


@dataclass(frozen=True)
class Surface:
    """A mesh: vertices, faces and the mapping from old to new vertices."""

    points: NDArray[np.float64]  # (n, 3)
    faces: NDArray[np.int64]  # (m, 3): vertex rows of each face
    mapping: NDArray[np.int64]  # (old,): for each old vertex the new vertex that represents it, or -1


def is_closed(faces: NDArray[Any]) -> bool:
    """Return whether every edge belongs to exactly two faces."""
    edges = np.sort(faces[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2), 1)
    return bool((np.unique(edges, axis=0, return_counts=True)[1] == 2).all()) and len(faces) > 0


def decimate(points: NDArray[np.float64], faces: NDArray[np.int64], n_faces: int) -> Surface:
    """Return a mesh with about `n_faces` faces, within the box of the old one; closed if the old one is.

    `points` and `faces`, (n, 3) and (m, 3), are as in `Surface`. If the library cannot keep a closed surface closed, or
    cannot reduce the faces, the mesh is returned unchanged.
    """
    fast = load_library("fast_simplification")
    same = Surface(points, faces, np.arange(len(points)))
    if len(faces) <= max(n_faces, MIN_FACES):
        return same
    # Only flat meshes keep their border, which is their outline.
    closed, flat = is_closed(faces), np.ptp(points, axis=0).min() == 0 if len(points) else True
    narrow = faces.astype(np.int32)
    for aggressiveness in AGGRESSIVENESS:
        collapses = fast.simplify(
            points,
            narrow,
            target_count=max(n_faces, MIN_FACES),
            agg=aggressiveness,
            return_collapses=True,
            preserve_border=bool(flat),
        )[2]
        if not len(collapses):
            return same
        result, left, mapping = fast.replay_simplification(points, narrow, collapses)
        if len(left) and (not closed or is_closed(left)):
            inside = np.clip(result, points.min(0), points.max(0))
            return Surface(inside, left.astype(np.int64), mapping.astype(np.int64))
    return same


def source_vertices(points: NDArray[np.float64], surface: Surface) -> NDArray[np.int64]:
    """Return for each new vertex the nearest of the old vertices that it represents, (new,)."""
    olds = np.flatnonzero(surface.mapping >= 0)
    news = surface.mapping[olds]
    gaps = ((points[olds] - surface.points[news]) ** 2).sum(1)
    order = np.lexsort((gaps, news))
    rows = np.zeros(len(surface.points), np.int64)
    values, first = np.unique(news[order], return_index=True)
    rows[values] = olds[order[first]]
    return rows


def mesh_levels(shapes: Shapes, steps: PyramidOptions) -> Iterator[LevelStep]:
    """Yield coarser levels of meshes, each decimated from the previous one.

    A new vertex has the attributes of the nearest vertex that it represents; attributes of faces are dropped.
    """
    if shapes.links is not None and shapes.links.shape[1] != 3:
        raise SourceError(
            f"Faces have {shapes.links.shape[1]} corners; only triangles are decimated. Triangulate the mesh first."
        )
    if shapes.n_dims > 3:
        raise SourceError(f"Meshes of {shapes.n_dims} dimensions cannot be decimated; expected 2 or 3.")
    if shapes.offsets[-1] < shapes.n_vertices:
        raise SourceError(
            f"{shapes.n_vertices - shapes.offsets[-1]} vertices belong to no object; meshes are decimated object by object. Put "
            "these vertices into an object, or leave them out."
        )
    objects = np.arange(len(shapes.offsets) - 1)
    faces = shapes.edges(3)
    order, offsets = links_by_object(shapes.offsets, faces)
    assert offsets is not None  # every vertex belongs to an object
    # The faces of each object, as rows of its own vertices.
    parts = zip(np.split(faces[order], offsets[1:-1]), shapes.offsets, strict=False)
    level, faces_before = shapes, [part - start for part, start in parts]
    for kept in select_objects(shapes, steps):
        alive = np.flatnonzero(kept[objects])
        surfaces = []
        for row in range(len(objects)):
            first, last = level.offsets[row], level.offsets[row + 1]
            points = _pad_to_3d(level.positions[first:last])
            faces = faces_before[row]
            # Meshes of dropped objects are passed through unchanged; `take_objects` removes them.
            wanted = int(np.ceil(len(faces) / steps.factor)) if kept[objects[row]] else len(faces)
            surfaces.append(decimate(points, faces, wanted))
        full = _replace_meshes(level, surfaces)
        mapping = np.concatenate(
            [np.where(s.mapping >= 0, s.mapping + start, -1) for s, start in zip(surfaces, full.offsets, strict=False)]
            or [np.zeros(0, np.int64)]
        )
        coarse = take_objects(full, alive)
        place = np.full(full.n_vertices + 1, -1, np.int64)
        rows = np.repeat(full.offsets[:-1][alive] - coarse.offsets[:-1], np.diff(coarse.offsets))
        place[rows + np.arange(coarse.n_vertices)] = np.arange(coarse.n_vertices)
        yield coarse, place[mapping]
        faces_before = [surfaces[row].faces for row in alive]
        level, objects = coarse, objects[alive]


def _pad_to_3d(positions: NDArray[Any]) -> NDArray[np.float64]:
    points = np.zeros((len(positions), 3))
    points[:, : positions.shape[1]] = positions
    return points


def _replace_meshes(level: Shapes, surfaces: list[Surface]) -> Shapes:
    """Replace the meshes of a level by decimated ones."""
    offsets = counts_to_offsets(np.array([len(surface.points) for surface in surfaces], np.int64))
    rows = [
        source_vertices(_pad_to_3d(level.positions[first:last]), surface) + first
        for surface, first, last in zip(surfaces, level.offsets, level.offsets[1:], strict=False)
    ]
    points = np.concatenate([surface.points for surface in surfaces] or [np.zeros((0, 3))])[:, : level.n_dims]
    if level.positions.dtype.kind in "iu":
        points = np.rint(points)
    faces = [surface.faces + start for surface, start in zip(surfaces, offsets, strict=False)]
    return replace(
        level,
        positions=points.astype(level.positions.dtype),
        offsets=offsets,
        links=np.concatenate(faces or [np.zeros((0, 3), np.int64)]),
        link_offsets=counts_to_offsets(np.array([len(surface.faces) for surface in surfaces], np.int64)),
        vertex_attributes=take_attributes(level.vertex_attributes, np.concatenate(rows or [np.zeros(0, np.int64)])),
        link_attributes={},
        fragment_offsets=None,
        fragment_attributes={},
    )


COARSENERS: dict[str, Callable[[Shapes, PyramidOptions], Iterator[LevelStep]]] = {
    "point_cloud": point_levels,
    "line": line_levels,
    "polyline": line_levels,
    "streamline": line_levels,
    "graph": graph_levels,
    "skeleton": graph_levels,
    "mesh": mesh_levels,
}
"""Geometry type -> generator of its coarser levels."""


def make_pyramid(shapes: Shapes, steps: PyramidOptions | None = None) -> tuple[CoarseLevel, ...]:
    """Make coarser levels of shapes, for ``make_geometry(..., coarser=...)``.

    Objects keep their ids, groups and attributes; objects that a level drops (`PyramidOptions.sparsity`) are absent from its shapes
    and empty in its index. Vertices of points, lines, graphs and skeletons are an unchanged subset of those of the finer level;
    those of meshes are new. Chunks grow with bins, so the number of vertices per chunk is similar on every level.

    Parameters
    ----------
    shapes : Shapes
        The finest level.
    steps : PyramidOptions or None
        Number of levels and their ratio; None: two levels, each with 8 times fewer vertices.

    Returns
    -------
    tuple of CoarseLevel
        Finest first, with parents, from which `make_geometry` makes links across levels if requested.

    Raises
    ------
    SourceError
        If objects are to be dropped but there are none, or faces are not triangles.
    MissingExtraError
        For meshes, if the extra ``geometry`` is not installed.

    References
    ----------
    zarr-vectors §7.6 (empty manifests keep ids), §9 (pyramids).

    Examples
    --------
    >>> import numpy as np
    >>> line = Shapes("streamline", np.array([[0, 0], [1, 0], [2, 0.1], [3, 2]]), ids=np.array([7]))
    >>> (level,) = make_pyramid(line, PyramidOptions(n_levels=1, tolerances=(0.5,)))
    >>> level.shapes.positions.tolist(), level.shapes.ids.tolist(), level.parents.tolist()
    ([[0.0, 0.0], [2.0, 0.1], [3.0, 2.0]], [7], [0, 0, 1, 2])
    """
    steps = PyramidOptions() if steps is None else steps
    if shapes.ids is None and steps.sparsity < 1:
        raise SourceError(f"sparsity is {steps.sparsity}, but there are no objects; expected 1.")
    ratio = steps.bins(shapes.n_dims)
    if len(ratio) != shapes.n_dims:
        raise SourceError(f"bin_ratio is {ratio}; expected {shapes.n_dims} numbers, one per axis.")
    result = []
    for number, (level, parents) in enumerate(COARSENERS[shapes.kind](shapes, steps), 1):
        spans = tuple(one**number for one in ratio)
        result.append(CoarseLevel(level, spans, spans, parents, "per_object", steps.sparsity**number))
    return tuple(result)
