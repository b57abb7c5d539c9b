"""Cutting shapes into the chunks of one level: one floor-divide, one stable sort, and the borders of runs."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.blobs import offsets_of, runs
from raggedatlas.vectors.geometry import CrossLinks, Fragments, Level, Links, Objects
from raggedatlas.vectors.grids import KeyIndex, bins_per_chunk, changes, chunk_coordinates, number_keys, stable_order
from raggedatlas.vectors.shapes import SEQUENTIAL, Attribute, Attributes, Shapes

OWNER = "object_id"
"""The fragment attribute that names the object of each fragment."""

NOBODY = -1
"""The owner of a fragment that belongs to no object."""

BY_RUN = (*SEQUENTIAL, "skeleton")
"""Kinds whose vertices come back in their order: a fragment for each run of vertices in one chunk."""


@dataclass(frozen=True)
class Grid:
    """How a level is cut.

    Parameters
    ----------
    chunk_shape : tuple of float
        Edges of a chunk.
    bin_shape : tuple of float or None
        Edges of a bin; None: as a chunk.
    boundary : str
        Policy for links across chunks.
    identity : bool
        Whether the object id is the number of the fragment.
    """

    chunk_shape: tuple[float, ...]
    bin_shape: tuple[float, ...] | None = None
    boundary: str = "explicit_links"
    identity: bool = False


@dataclass(frozen=True)
class Cut:
    """A level, and where each vertex went.

    chunk, row: (N,) chunk of the level and row in that chunk; repeated: (n, 3) the vertices that stand in a second chunk, as
    vertex, chunk, row.
    """

    level: Level
    chunk: NDArray[np.int64]
    row: NDArray[np.int64]
    repeated: NDArray[np.int64]


@dataclass(frozen=True)
class _Stored:
    """Vertices in their stored order, repeated ones included.

    source: (N',) the vertex of the shapes; keys, bounds: the chunks; chunk: (N',) the chunk of each stored row; where: (N',) the stored row
    of each vertex, and behind them of each repeated one.
    """

    source: NDArray[np.int64]
    keys: NDArray[np.int64]
    bounds: NDArray[np.int64]
    chunk: NDArray[np.int64]
    where: NDArray[np.int64]


def cut(shapes: Shapes, grid: Grid) -> Cut:
    """Cut shapes into one level.

    Raises
    ------
    SourceError
        If the identity convention is asked for and there is more than one chunk, or the bins do not divide the chunks.
    """
    if grid.identity:
        shapes = _by_id(shapes)
    keys = chunk_coordinates(shapes.positions, grid.chunk_shape)
    if shapes.n_objects == 0 and shapes.ids is None:
        return _cut_points(shapes, grid, keys)
    owner = owners_of(shapes)
    whole = np.arange(shapes.n_vertices), owner
    pieces = _pieces_by_run(shapes, keys, owner) if shapes.kind in BY_RUN else whole
    stored, owners, seams = _store(shapes, grid, keys, pieces)
    fragments, index, fragment_of = _fragments_of(shapes, grid, stored, owners)
    level = Level(
        chunks=stored.keys,
        bounds=stored.bounds,
        positions=shapes.positions[stored.source],
        fragments=fragments,
        objects=None if grid.identity else index[0],
        vertex_attributes=_take_all(shapes.vertex_attributes, stored.source),
        fragment_attributes={} if grid.identity else {OWNER: Attribute(index[1])},
        object_attributes=_take_all(shapes.object_attributes, np.argsort(_ids_of(shapes))),
        groups=shapes.groups,
    )
    n = shapes.n_vertices
    chunk = stored.chunk[stored.where]
    row = stored.where - stored.bounds[chunk]
    made = Cut(level, chunk[:n], row[:n], np.stack([seams[:, 0], chunk[n:], row[n:]], axis=1))
    return replace(made, level=_with_links(shapes, grid, made, fragment_of[stored.where]))


def _ids_of(shapes: Shapes) -> NDArray[np.int64]:
    """Return the ids of the objects, none where there are none."""
    return np.zeros(0, np.int64) if shapes.ids is None else shapes.ids


def owners_of(shapes: Shapes) -> NDArray[np.int64]:
    """Return the object of each vertex, B for those that belong to none: (N,) int64."""
    loose = shapes.n_vertices - int(shapes.offsets[-1])
    counts = np.append(shapes.vertex_counts, loose) if shapes.n_objects else np.array([shapes.n_vertices])
    return np.repeat(np.arange(len(counts)), counts)


def _by_id(shapes: Shapes) -> Shapes:
    """Return the same shapes with their objects by ascending id, which must be 0 to B - 1."""
    ids = shapes.ids
    if ids is None or not np.array_equal(np.sort(ids), np.arange(shapes.n_objects)):
        raise SourceError("The identity convention needs objects whose ids are 0 to B - 1.")
    if shapes.offsets[-1] != shapes.n_vertices:
        raise SourceError("The identity convention needs every vertex to belong to an object.")
    order = np.argsort(ids)
    vertices = runs(shapes.offsets[order], shapes.vertex_counts[order])
    place = np.empty_like(vertices)
    place[vertices] = np.arange(len(vertices))
    return replace(
        shapes,
        positions=shapes.positions[vertices],
        offsets=offsets_of(shapes.vertex_counts[order]),
        ids=ids[order],
        links=None if shapes.links is None else place[shapes.links],
        link_offsets=None,
        vertex_attributes=_take_all(shapes.vertex_attributes, vertices),
        object_attributes=_take_all(shapes.object_attributes, order),
    )


def _cut_points(shapes: Shapes, grid: Grid, keys: NDArray[np.int64]) -> Cut:
    """Cut points without objects: bin by bin in each chunk, one fragment for each bin, also for an empty one."""
    codes, top = number_keys(keys)
    n_bins = 1
    if grid.bin_shape is not None:
        ratio = bins_per_chunk(grid.chunk_shape, grid.bin_shape)
        n_bins = int(np.prod(ratio))
        inside = np.clip(chunk_coordinates(shapes.positions, grid.bin_shape) - keys * ratio, 0, ratio - 1)
        if top * n_bins >= 2**62:
            codes = np.unique(codes, return_inverse=True)[1].reshape(-1).astype(np.int64)
            top = len(codes) + 1
        codes = codes * n_bins + np.ravel_multi_index(tuple(inside.T), tuple(ratio.tolist()))
        top *= n_bins
    order = stable_order(codes, top)
    sorted_codes = codes[order]
    first = changes(sorted_codes // n_bins)
    bounds = np.append(first, len(order))
    chunk = np.repeat(np.arange(len(first)), np.diff(bounds))
    counts = np.bincount(chunk * n_bins + sorted_codes % n_bins, minlength=len(first) * n_bins).astype(np.int64)
    starts = offsets_of(counts)[:-1] - np.repeat(bounds[:-1], n_bins)
    fragment_bounds = np.arange(len(first) + 1, dtype=np.int64) * n_bins
    fragments = Fragments(fragment_bounds, np.ones(len(counts), bool), starts, counts, np.zeros(0, np.int64))
    where = np.empty_like(order)
    where[order] = np.arange(len(order))
    level = Level(
        chunks=keys[order[first]],
        bounds=bounds,
        positions=shapes.positions[order],
        fragments=fragments,
        vertex_attributes=_take_all(shapes.vertex_attributes, order),
    )
    return Cut(level, chunk[where], where - bounds[chunk[where]], np.zeros((0, 3), np.int64))


def _pieces_by_run(
    shapes: Shapes, keys: NDArray[np.int64], owner: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each vertex and the run of its: vertices of one object that follow each other in one chunk."""
    begins = np.ones(len(keys), bool)
    begins[1:] = (keys[1:] != keys[:-1]).any(axis=1) | (owner[1:] != owner[:-1])
    if shapes.kind == "skeleton" and shapes.links is not None:
        roots = np.ones(len(keys), bool)
        roots[shapes.links[:, 0]] = False
        begins |= roots
    return np.arange(len(keys)), np.cumsum(begins) - 1


def _store(
    shapes: Shapes, grid: Grid, keys: NDArray[np.int64], pieces: tuple[NDArray[np.int64], NDArray[np.int64]]
) -> tuple[_Stored, NDArray[np.int64], NDArray[np.int64]]:
    """Sort vertices by chunk, and within it by piece; with repeated ends where the policy asks for them.

    Returns the stored vertices, the piece of each stored row, and the repeated ends as (vertex, vertex in whose chunk it is repeated).
    """
    source, piece = pieces
    seams = np.zeros((0, 2), np.int64)
    all_keys = keys
    if grid.boundary != "explicit_links":
        seams = _seams(shapes, keys, piece)
        source = np.concatenate([source, seams[:, 0]])
        all_keys = np.concatenate([keys, keys[seams[:, 1]]])
        piece = np.concatenate([piece, piece[seams[:, 1]] if shapes.kind in BY_RUN else piece[seams[:, 0]]])
    codes, top = number_keys(all_keys)
    by_piece = stable_order(piece, int(piece.max(initial=0)) + 1)
    order = by_piece[stable_order(codes[by_piece], top)]
    first = changes(codes[order])
    bounds = np.append(first, len(order))
    chunk = np.repeat(np.arange(len(first)), np.diff(bounds))
    where = np.empty_like(order)
    where[order] = np.arange(len(order))
    return _Stored(source[order], all_keys[order[first]], bounds, chunk, where), piece[order], seams


def _seams(shapes: Shapes, keys: NDArray[np.int64], piece: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the vertices to repeat, each beside a vertex in whose chunk it is repeated: (n, 2)."""
    if shapes.kind in SEQUENTIAL:
        ends = np.flatnonzero(piece[1:] != piece[:-1])
        owner = owners_of(shapes)
        ends = ends[owner[ends] == owner[ends + 1]]
        return np.stack([ends + 1, ends], axis=1)
    if shapes.links is None:
        return np.zeros((0, 2), np.int64)
    near = np.repeat(shapes.links[:, :1], shapes.links.shape[1] - 1, axis=1).reshape(-1).astype(np.int64)
    far = shapes.links[:, 1:].reshape(-1).astype(np.int64)
    apart = (keys[near] != keys[far]).any(axis=1)
    near, far = near[apart], far[apart]
    codes = number_keys(keys)[0]
    _, kept = np.unique(np.stack([far, codes[near]], axis=1), axis=0, return_index=True)
    return np.stack([far[kept], near[kept]], axis=1)


def _fragments_of(
    shapes: Shapes, grid: Grid, stored: _Stored, piece: NDArray[np.int64]
) -> tuple[Fragments, tuple[Objects, NDArray[np.int64]], NDArray[np.int64]]:
    """Return fragments, the object index with the owner of each fragment, and the fragment of each stored row."""
    ids = _ids_of(shapes)
    owner = owners_of(shapes)[stored.source]
    begins = np.zeros(len(piece), bool)
    begins[changes(stored.chunk)] = True
    begins[changes(piece)] = True
    first = np.flatnonzero(begins)
    counts = np.diff(np.append(first, len(piece)))
    none = np.zeros(0, np.int64)
    if grid.identity:
        if len(stored.keys) > 1:
            raise SourceError(f"The identity convention needs exactly one chunk; there are {len(stored.keys)}.")
        if len(first) != np.count_nonzero(shapes.vertex_counts):
            raise SourceError("The identity convention needs one fragment for each object; a skeleton here has more.")
        each = shapes.vertex_counts
        fragments = Fragments(np.array([0, len(each)]), np.ones(len(each), bool), shapes.offsets[:-1], each, none)
        empty = Objects(
            none, np.zeros(1, np.int64), np.zeros((0, shapes.n_dims), np.int64), none.astype(np.uint8), none, none, none
        )
        return fragments, (empty, none), owner
    chunk = stored.chunk[first]
    bounds = np.searchsorted(chunk, np.arange(len(stored.keys) + 1)).astype(np.int64)
    fragments = Fragments(bounds, np.ones(len(first), bool), first - stored.bounds[chunk], counts, none)
    rank = np.full(len(ids) + 1, len(ids), np.int64)
    rank[np.argsort(ids)] = np.arange(len(ids))
    place = rank[owner[first]]
    turn = piece[first] if shapes.kind in BY_RUN else np.arange(len(first))
    order = np.lexsort((turn, place))
    sizes = np.bincount(place, minlength=len(ids))[: len(ids)]
    order = order[: sizes.sum()]
    index = Objects(
        ids=np.sort(ids),
        bounds=offsets_of(sizes),
        chunks=stored.keys[chunk[order]],
        modes=np.zeros(len(order), np.uint8),
        starts=(np.arange(len(first)) - bounds[chunk])[order],
        counts=np.ones(len(order), np.int64),
        fragments=none,
    )
    return fragments, (index, np.append(ids, NOBODY)[owner[first]]), np.cumsum(begins) - 1


def _with_links(shapes: Shapes, grid: Grid, made: Cut, fragment_of: NDArray[np.int64]) -> Level:
    """Return the level with its links: within chunks, and across them."""
    level = made.level
    if shapes.kind in SEQUENTIAL:
        if grid.boundary == "boundary_deduplication":
            return level
        last = np.flatnonzero(fragment_of[1 : shapes.n_vertices] != fragment_of[: shapes.n_vertices - 1])
        owner = owners_of(shapes)
        last = last[owner[last] == owner[last + 1]]
        return _with_cross(level, made, np.stack([last, last + 1], axis=1), {})
    if shapes.links is None:
        return level
    ends = shapes.links.astype(np.int64)
    chunk, row = made.chunk[ends], made.row[ends]
    apart = (chunk != chunk[:, :1]).any(axis=1)
    row = _repeated_rows(made, ends, chunk, row)
    stored = np.ones(len(ends), bool) if grid.boundary != "explicit_links" else ~apart
    if is_branching(shapes, grid):
        fragment = fragment_of[ends]
        sequel = (fragment[:, 0] == fragment[:, 1]) & (row[:, 0] == row[:, 1] + 1)
        stored &= ~sequel
    level = replace(level, links=_inner_links(level, (chunk[:, 0], row, fragment_of[ends[:, 0]]), shapes, stored))
    if grid.boundary == "boundary_deduplication":
        return level
    return _with_cross(level, made, ends[apart], _take_all(shapes.link_attributes, np.flatnonzero(apart)))


def is_branching(shapes: Shapes, grid: Grid) -> bool:
    """Tell whether links between neighbours are left out: in skeletons whose links have no attributes."""
    return shapes.kind == "skeleton" and not shapes.link_attributes and grid.boundary == "explicit_links"


def _repeated_rows(
    made: Cut, ends: NDArray[np.int64], chunk: NDArray[np.int64], row: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return rows of ends in the chunk of their first end, where they are repeated if they lie elsewhere."""
    if not len(made.repeated):
        return row
    order = np.lexsort((made.repeated[:, 1], made.repeated[:, 0]))
    far = chunk != chunk[:, :1]
    wanted = np.stack([ends[far], np.broadcast_to(chunk[:, :1], chunk.shape)[far]], axis=1)
    found = KeyIndex(made.repeated[order, :2]).find(wanted)
    rows = row.copy()
    rows[far] = made.repeated[order[found], 2]
    return rows


def _inner_links(
    level: Level, where: tuple[NDArray[np.int64], ...], shapes: Shapes, stored: NDArray[np.bool_]
) -> Links:
    """Sort the links within chunks by the fragment of their first end, in the narrowest type that holds their rows."""
    chunk, row, fragment = (part[stored] for part in where)
    fragments = level.fragments
    assert fragments is not None
    order = stable_order(fragment, fragments.n_fragments)
    counts = np.bincount(fragment, minlength=fragments.n_fragments).astype(np.int64)
    bounds = np.searchsorted(chunk[order], np.arange(len(level.chunks) + 1)).astype(np.int64)
    starts = offsets_of(counts)[:-1] - np.repeat(bounds[:-1], np.diff(fragments.bounds))
    own = Fragments(fragments.bounds, np.ones(len(counts), bool), starts, counts, np.zeros(0, np.int64))
    attributes = _take_all(shapes.link_attributes, np.flatnonzero(stored)[order])
    most = int(np.diff(level.bounds).max(initial=0))
    return Links(bounds, row[order].astype(narrowest(most)), own, attributes)


def narrowest(n_rows: int) -> np.dtype[Any]:
    """Return the narrowest type for rows of chunks with at most `n_rows` vertices (§7.5)."""
    for kind in (np.uint8, np.uint16, np.uint32):
        if n_rows <= int(np.iinfo(kind).max) + 1:
            return np.dtype(kind)
    return np.dtype(np.int64)


def _with_cross(level: Level, made: Cut, ends: NDArray[np.int64], attributes: Attributes) -> Level:
    """Add links whose ends lie in several chunks."""
    if not len(ends):
        return level
    links = CrossLinks(0, level.chunks[made.chunk[ends]], made.row[ends], attributes=attributes)
    return replace(level, cross_links=(*level.cross_links, links))


def _take_all(attributes: Attributes, rows: NDArray[np.int64]) -> dict[str, Attribute]:
    """Return attributes for some rows."""
    return {name: attribute.take(rows) for name, attribute in attributes.items()}
