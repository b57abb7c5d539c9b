"""Chunk grids (zarr-vectors §7.1), and the division of the shapes of one level into chunks: one floor division, one stable sort, runs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raggedatlas.errors import SourceError, ValuesError
from raggedatlas.store.native import library
from raggedatlas.store.runtime import scratch_array
from raggedatlas.wings.vectors.geometry import (
    CrossLinks,
    Fragments,
    Level,
    Links,
    Objects,
    bins_per_chunk,
    range_fragments,
)
from raggedatlas.wings.vectors.shapes import (
    SEQUENTIAL,
    Attribute,
    Shapes,
    concat_ranges,
    counts_to_offsets,
    object_rows,
    take_attributes,
    take_objects,
)

_MAX_CODES = 2**62

BLOCK_ROWS = 2**20
"""Vertices that are sorted or checked at once."""


def chunk_coordinates(positions: NDArray[Any], edges: ArrayLike) -> NDArray[np.int64]:
    """Return ``floor(position / edge)`` for every vertex and axis, absolute and possibly negative: (N, D) int64.

    A position on a boundary belongs to the upper chunk. Integers are divided exactly if the edges are integers.
    """
    sizes = np.asarray(edges, np.float64)
    keys = np.empty(positions.shape, np.int64)
    for axis in range(positions.shape[1]):
        keys[:, axis] = _floor_divide(positions[:, axis], float(sizes[axis]))
    return keys


def _floor_divide(values: NDArray[Any], edge: float) -> NDArray[np.int64]:
    """Return the chunk of each value on one axis."""
    # As floats, integers above 2**53 could be rounded into a neighbouring chunk.
    if values.dtype.kind in "iu" and edge.is_integer() and edge < 2**63:
        divisor = int(edge)
        signed = values.dtype != np.uint64
        exact = (
            np.floor_divide(values.astype(np.int64), divisor) if signed else np.floor_divide(values, np.uint64(divisor))
        )
        return np.asarray(exact, np.int64)
    cells = np.floor(values.astype(np.float64) / edge)
    # The comparison is negated so that NaN is refused too.
    if cells.size and not max(-float(cells.min()), float(cells.max())) < 2**62:
        raise ValuesError(
            f"A position is more than 2**62 chunks of {edge} from the origin, or is not a number; use larger chunks."
        )
    return cells.astype(np.int64)


def encode_keys(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Return an integer code for each key, increasing with the key (first axis first), and an exclusive upper bound of the codes."""
    if not len(keys):
        return np.zeros(0, np.int64), 1
    low = keys.min(axis=0)
    spans = [int(span) + 1 for span in keys.max(axis=0) - low]
    top = 1
    for span in spans:
        top *= span
    # If a span overflows int64, it is negative. `np.unique` numbers the keys in ascending order as well.
    if top >= _MAX_CODES or min(spans) < 1:
        codes = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
        return codes.astype(np.int64), int(codes.max()) + 1
    codes = keys[:, 0] - low[0]
    for axis in range(1, len(spans)):
        codes *= spans[axis]
        codes += keys[:, axis] - low[axis]
    return codes, top


def stable_order(codes: NDArray[np.int64], top: int) -> NDArray[np.int64]:
    """Return a stable argsort of codes below `top`; 16 bits at a time, for which NumPy uses a radix sort."""
    order = np.argsort((codes & 0xFFFF).astype(np.uint16), kind="stable")
    shift = 16
    while top > 1 << shift:
        order = order[np.argsort((codes[order] >> shift & 0xFFFF).astype(np.uint16), kind="stable")]
        shift += 16
    return order


@dataclass(frozen=True)
class ChunkCodes:
    """Chunks of positions, as integer codes that increase with the keys; they vary fastest on the last axis."""

    codes: NDArray[np.int64]  # (N,): code of the chunk of each vertex, below `top`
    top: int  # exclusive upper bound of the codes
    low: NDArray[np.int64]  # (D,): smallest key on each axis
    spans: NDArray[np.int64]  # (D,): number of chunks on each axis

    def keys(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the keys of some codes: (n, D)."""
        return np.stack(np.unravel_index(codes, tuple(self.spans.tolist())), axis=1) + self.low


def encode_positions(positions: NDArray[Any], edges: ArrayLike) -> ChunkCodes:
    """Return the chunks of positions, axis by axis, without building a table of keys.

    Raises `ValuesError` if there are 2**62 chunks or more between the smallest and the largest key, or a position is
    not finite.
    """
    sizes = np.asarray(edges, np.float64)
    n_dims = positions.shape[1]
    if not len(positions):
        return ChunkCodes(np.zeros(0, np.int64), 1, np.zeros(n_dims, np.int64), np.ones(n_dims, np.int64))
    # Division and rounding are monotone, so the extreme positions are in the extreme chunks. Axis by axis: all axes at
    # once take NumPy thirty times as long.
    axes = [(positions[:, k], float(sizes[k])) for k in range(n_dims)]
    ends = np.stack([_floor_divide(np.array([own.min(), own.max()]), edge) for own, edge in axes])
    low, counts = ends[:, 0], [last - first + 1 for first, last in ends.tolist()]
    top = math.prod(counts)
    if top >= _MAX_CODES:
        raise ValuesError("The positions span 2**62 chunks or more; use larger chunks.")
    spans = np.array(counts, np.int64)
    # The compiled function takes float32 and float64 only.
    if positions.dtype in {np.dtype(np.float32), np.dtype(np.float64)}:
        codes, points = scratch_array((len(positions),), np.int64), np.ascontiguousarray(positions)
        low = np.ascontiguousarray(low)
        if library().ra_number_cells(points, len(points), n_dims, points.itemsize, sizes, low, spans, codes):
            raise ValuesError("A position is not a finite number, so it belongs to no chunk.")
        return ChunkCodes(codes, top, low, spans)
    codes = np.zeros(len(positions), np.int64)
    for (own, edge), first, span in zip(axes, low, spans, strict=True):
        codes *= span
        codes += _floor_divide(own, edge) - first
    return ChunkCodes(codes, top, low, spans)


def run_starts(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return the start of each run of equal values."""
    if not len(values):
        return np.zeros(0, np.int64)
    return np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])


def find_keys(keys: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row of each wanted key, (m,) int64, or -1; `keys`, (n, K), are unique and ascending."""
    if not len(keys) or not len(wanted):
        return np.full(len(wanted), -1, np.int64)
    # Encoded in one call, because codes from two calls are not comparable.
    codes, _ = encode_keys(np.concatenate([keys, wanted]))
    own, requested = codes[: len(keys)], codes[len(keys) :]
    rows = np.minimum(np.searchsorted(own, requested), len(own) - 1)
    return np.where(own[rows] == requested, rows, -1)


OWNER_ATTRIBUTE = "object_id"
"""The fragment attribute that names the object of each fragment."""

NO_OWNER = -1
"""Owner of a fragment that belongs to no object."""

ORDERED_KINDS = (*SEQUENTIAL, "skeleton")
"""Kinds whose vertex order is preserved: one fragment for each run of vertices in one chunk."""


@dataclass(frozen=True)
class Grid:
    """Chunk grid and link policy of a level."""

    chunk_shape: tuple[float, ...]  # edge lengths of a chunk
    bin_shape: tuple[float, ...] | None = None  # edge lengths of a bin; None: one bin per chunk
    boundary: str = "explicit_links"  # policy for links across chunks
    identity: bool = False  # whether object ids are fragment numbers


@dataclass(frozen=True)
class ChunkedLevel:
    """A level divided into chunks, and the position of each vertex in it."""

    level: Level
    source: NDArray[np.int64]  # (N',): vertex of each stored row
    repeated: NDArray[np.int64]  # (n, 2): vertex and stored row of rows stored again elsewhere

    @cached_property
    def where(self) -> NDArray[np.int64]:
        """Stored row of each vertex."""
        n = len(self.source) - len(self.repeated)
        # Repeated rows are left out, so each vertex has the one row in its own chunk.
        first = np.ones(len(self.source), bool)
        first[self.repeated[:, 1]] = False
        rows = np.empty(n, np.int64)
        rows[self.source[first]] = np.flatnonzero(first)
        return rows

    @cached_property
    def _chunk_of_row(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.level.chunks)), np.diff(self.level.bounds))

    def place(self, vertices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the chunk of some vertices, and their rows in it."""
        return self.split(self.where[vertices])

    def split(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the chunk of some stored rows, and their rows in it."""
        chunk = self._chunk_of_row[rows]
        return chunk, rows - self.level.bounds[chunk]


@dataclass(frozen=True)
class _StoredOrder:
    """Vertices and fragments in stored order."""

    source: NDArray[np.int64]  # (N',): vertex of each row
    keys: NDArray[np.int64]  # the chunks
    bounds: NDArray[np.int64]  # rows of the chunks
    first: NDArray[np.int64]  # (F,): first row of each fragment
    counts: NDArray[np.int64]  # (F,): rows of each fragment
    chunk: NDArray[np.int64]  # (F,): chunk of each fragment
    owner: NDArray[np.int64]  # (F,): object of each fragment
    path_order: NDArray[np.int64]  # (F,): rank of each fragment in the order of traversal
    repeated: NDArray[np.int64]  # as in `ChunkedLevel`


def chunk_shapes(shapes: Shapes, grid: Grid) -> ChunkedLevel:
    """Divide shapes into the chunks of one level.

    Raises `SourceError` if the identity convention is asked for with more than one chunk, or the bins do not divide the
    chunks.
    """
    if grid.identity:
        ids = shapes.ids
        if ids is None or not np.array_equal(np.sort(ids), np.arange(shapes.n_objects)):
            raise SourceError("The identity convention needs objects whose ids are 0 to B - 1.")
        if shapes.offsets[-1] != shapes.n_vertices:
            raise SourceError("The identity convention needs every vertex to belong to an object.")
        shapes = take_objects(shapes, np.argsort(ids))
    chunks = encode_positions(shapes.positions, grid.chunk_shape)
    if shapes.ids is None:
        return _chunk_points(shapes, grid, chunks)
    owner = object_rows(shapes)
    if shapes.kind in ORDERED_KINDS:
        codes = chunks.codes
        begins = np.ones(len(codes), bool)
        np.not_equal(codes[1:], codes[:-1], out=begins[1:])
        begins[1:] |= owner[1:] != owner[:-1]
        # A root inside a run would get the vertex before it as its implicit parent.
        if shapes.kind == "skeleton" and shapes.links is not None:
            roots = np.ones(len(codes), bool)
            roots[shapes.links[:, 0]] = False
            begins |= roots
        # Without repeated vertices, runs stay complete, so the runs are sorted instead of the vertices.
        by_run = grid.boundary == "explicit_links"
        stored = _store_runs(chunks, owner, begins) if by_run else _store(shapes, chunks, owner, np.cumsum(begins) - 1)
    else:
        stored = _store(shapes, chunks, owner, owner, seams=grid.boundary != "explicit_links")
    fragments, index = _build_fragments(shapes, grid, stored)
    level = Level(
        chunks=stored.keys,
        bounds=stored.bounds,
        positions=np.take(shapes.positions, stored.source, axis=0),
        fragments=fragments,
        objects=index,
        vertex_attributes=take_attributes(shapes.vertex_attributes, stored.source),
        fragment_attributes={}
        if grid.identity
        else {OWNER_ATTRIBUTE: Attribute(np.append(shapes.ids, NO_OWNER)[stored.owner])},
        object_attributes=take_attributes(shapes.object_attributes, np.argsort(shapes.ids)),
        groups=shapes.groups,
    )
    result = ChunkedLevel(level, stored.source, stored.repeated)
    return replace(result, level=_add_links(shapes, grid, result, stored))


def _chunk_points(shapes: Shapes, grid: Grid, chunks: ChunkCodes) -> ChunkedLevel:
    """Divide points without objects: sorted by bin in each chunk, one fragment per bin, including empty bins."""
    codes, top, n_bins = chunks.codes, chunks.top, 1
    if grid.bin_shape is not None:
        ratio = bins_per_chunk(grid.chunk_shape, grid.bin_shape)
        n_bins = int(np.prod(ratio))
        if top * n_bins >= 2**62:
            raise SourceError(
                f"Chunks of {n_bins} bins are too many for a store of this extent; use larger bins or chunks."
            )
        for rows in row_blocks(len(codes)):
            inside = chunk_coordinates(shapes.positions[rows], grid.bin_shape) - chunks.keys(codes[rows]) * ratio
            # Chunk and bin are rounded separately, so a vertex on a boundary may be outside the bins of its chunk.
            inner = np.ravel_multi_index(tuple(np.clip(inside, 0, ratio - 1).T), tuple(ratio.tolist()))
            codes[rows] = codes[rows] * n_bins + inner
        top *= n_bins
    placed = sort_vertices(shapes, codes, top)
    first = run_starts(placed.codes // n_bins)
    counts = np.zeros((len(first), n_bins), np.int64)
    # Empty bins count too: fragment numbers are bin numbers.
    chunk = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(placed.codes))))
    counts[chunk, placed.codes % n_bins] = np.diff(placed.bounds)
    bounds = counts_to_offsets(counts.sum(axis=1))
    starts = (np.cumsum(counts, axis=1) - counts).reshape(-1)
    fragment_bounds = np.arange(len(first) + 1, dtype=np.int64) * n_bins
    fragments = range_fragments(fragment_bounds, starts, counts.reshape(-1))
    level = Level(
        chunks=chunks.keys(placed.codes[first] // n_bins),
        bounds=bounds,
        positions=placed.positions,
        fragments=fragments,
        vertex_attributes=placed.attributes,
    )
    return ChunkedLevel(level, placed.source, np.zeros((0, 2), np.int64))


@dataclass(frozen=True)
class SortedVertices:
    """Vertices sorted by a code; those of one code keep their order."""

    codes: NDArray[np.int64]  # (n,): the codes that occur, ascending
    bounds: NDArray[np.int64]  # (n + 1,): offsets of the vertices of each code
    positions: NDArray[Any]  # (N, D): sorted
    attributes: dict[str, Attribute]  # sorted vertex attributes
    source: NDArray[np.int64]  # (N,): row of each vertex in the shapes


def sort_vertices(shapes: Shapes, codes: NDArray[np.int64], top: int) -> SortedVertices:
    """Sort vertices by code, which is below `top`; those with a negative code are left out.

    Memory is bounded, whatever their number: they are distributed block by block into scratch arrays.
    """
    arrays = {"": shapes.positions}
    for name, attribute in shapes.vertex_attributes.items():
        arrays[f"values/{name}"] = attribute.values
        if attribute.present is not None:
            arrays[f"present/{name}"] = attribute.present
    if len(codes) <= BLOCK_ROWS:
        source, known, counts = _sorted_runs(codes, top)
        out = {name: np.take(values, source, axis=0) for name, values in arrays.items()}
        bounds = counts_to_offsets(counts)
    else:
        known, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for rows in row_blocks(len(codes)):
            _, found, n = _sorted_runs(codes[rows], top)
            known, at = np.unique(np.concatenate([known, found]), return_inverse=True)
            counts = np.bincount(at, np.concatenate([counts, n])).astype(np.int64)
        bounds = counts_to_offsets(counts)
        out = {name: scratch_array((bounds[-1], *values.shape[1:]), values.dtype) for name, values in arrays.items()}
        source, cursor = scratch_array((bounds[-1],), np.int64), bounds[:-1].copy()
        for rows in row_blocks(len(codes)):
            order, found, counts = _sorted_runs(codes[rows], top)
            place = np.searchsorted(known, found)
            targets = concat_ranges(cursor[place], counts)
            cursor[place] += counts
            source[targets] = order + rows.start
            for name, values in arrays.items():
                out[name][targets] = np.take(values[rows], order, axis=0)
    attributes = {
        name: replace(attribute, values=out[f"values/{name}"], present=out.get(f"present/{name}"))
        for name, attribute in shapes.vertex_attributes.items()
    }
    return SortedVertices(known, bounds, out[""], attributes, source)


def _sorted_runs(codes: NDArray[np.int64], top: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the stable order of the codes that are not negative, each code that occurs, and how often."""
    if len(codes) and codes.min() < 0:
        kept = np.flatnonzero(codes >= 0)
        order = kept[stable_order(codes[kept], top)]
    else:
        order = stable_order(codes, top)
    own = codes[order]
    first = run_starts(own)
    return order, own[first], np.diff(np.append(first, len(own)))


def row_blocks(n_rows: int) -> Iterator[slice]:
    """Yield slices that cover some rows, few enough for their temporary arrays to be small."""
    for start in range(0, n_rows, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, n_rows))


def object_blocks(offsets: NDArray[np.int64]) -> Iterator[slice]:
    """Yield slices that cover all objects, each of one object or of so few vertices as `row_blocks` yields."""
    n_objects, start = len(offsets) - 1, 0
    while start < n_objects:
        stop = int(np.searchsorted(offsets, offsets[start] + BLOCK_ROWS, side="right")) - 1
        yield slice(start, stop := max(stop, start + 1))
        start = stop


def find_infinite(positions: NDArray[Any]) -> tuple[int | None, int]:
    """Return the first row with a coordinate that is not finite (None: there is none), and how many there are."""
    first, n = None, 0
    for rows in row_blocks(len(positions) if positions.dtype.kind == "f" else 0):
        finite = np.isfinite(positions[rows])
        # Of all values at once: by row NumPy takes ten times as long.
        if not finite.all():
            bad = np.flatnonzero(~finite.all(axis=1))
            first = rows.start + int(bad[0]) if first is None else first
            n += len(bad)
    return first, n


def _store_runs(chunks: ChunkCodes, owner: NDArray[np.int64], begins: NDArray[np.bool_]) -> _StoredOrder:
    """Sort runs by chunk; there are far fewer runs than vertices."""
    first = np.flatnonzero(begins)
    counts = np.diff(np.append(first, len(begins)))
    codes = chunks.codes[first]
    order = stable_order(codes, chunks.top)
    sizes = counts[order]
    rows = counts_to_offsets(sizes)
    new = run_starts(codes[order])
    chunk = np.repeat(np.arange(len(new)), np.diff(np.append(new, len(order))))
    return _StoredOrder(
        source=concat_ranges(first[order], sizes),
        keys=chunks.keys(codes[order[new]]),
        bounds=np.append(rows[:-1][new], rows[-1]),
        first=rows[:-1],
        counts=sizes,
        chunk=chunk,
        owner=owner[first[order]],
        path_order=order,
        repeated=np.zeros((0, 2), np.int64),
    )


def _store(
    shapes: Shapes, chunks: ChunkCodes, owner: NDArray[np.int64], piece: NDArray[np.int64], *, seams: bool = True
) -> _StoredOrder:
    """Sort vertices by chunk, then by piece; repeat end vertices if the policy requires it."""
    codes, source, n = chunks.codes, np.arange(shapes.n_vertices), shapes.n_vertices
    if seams:
        ends = _find_repeated_ends(shapes, codes, piece)
        # Copies are appended and all sorts are stable, so a copy is the last row of its piece.
        # Both `_add_sequence_links` and `mask_repeated_rows` rely on that.
        source = np.concatenate([source, ends[:, 0]])
        codes = np.concatenate([codes, codes[ends[:, 1]]])
        # A copy of an ordered kind ends the piece before the boundary; otherwise it belongs to its own object.
        piece = np.concatenate([piece, piece[ends[:, 1]] if shapes.kind in ORDERED_KINDS else piece[ends[:, 0]]])
        by_piece = stable_order(piece, int(piece.max(initial=0)) + 1)
        order = by_piece[stable_order(codes[by_piece], chunks.top)]
    else:
        order = stable_order(codes, chunks.top)
    sorted_codes, pieces = codes[order], piece[order]
    begins = np.ones(len(order), bool)
    np.not_equal(sorted_codes[1:], sorted_codes[:-1], out=begins[1:])
    new = np.flatnonzero(begins)
    begins[1:] |= pieces[1:] != pieces[:-1]
    first = np.flatnonzero(begins)
    rows = np.flatnonzero(order >= n) if seams else np.zeros(0, np.int64)
    source = source[order]
    return _StoredOrder(
        source=source,
        keys=chunks.keys(sorted_codes[new]),
        bounds=np.append(new, len(order)),
        first=first,
        counts=np.diff(np.append(first, len(order))),
        chunk=np.searchsorted(new, first, side="right") - 1,
        owner=owner[source[first]],
        path_order=pieces[first] if shapes.kind in ORDERED_KINDS else np.arange(len(first)),
        repeated=np.stack([source[rows], rows], axis=1),
    )


def _find_repeated_ends(shapes: Shapes, codes: NDArray[np.int64], piece: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the vertices to repeat, each with a vertex in whose chunk it is repeated: (n, 2)."""
    if shapes.kind in SEQUENTIAL:
        ends = np.flatnonzero(piece[1:] != piece[:-1])
        owner = object_rows(shapes)
        ends = ends[owner[ends] == owner[ends + 1]]
        return np.stack([ends + 1, ends], axis=1)
    if shapes.links is None:
        return np.zeros((0, 2), np.int64)
    # A link is stored in the chunk of its first end, where the other ends are repeated.
    near = np.repeat(shapes.links[:, :1], shapes.links.shape[1] - 1, axis=1).reshape(-1).astype(np.int64)
    far = shapes.links[:, 1:].reshape(-1).astype(np.int64)
    crosses_chunks = codes[near] != codes[far]
    near, far = near[crosses_chunks], far[crosses_chunks]
    # Once for each chunk, also if several links need the copy: `_repeated_rows` searches unique pairs.
    _, kept = np.unique(np.stack([far, codes[near]], axis=1), axis=0, return_index=True)
    return np.stack([far[kept], near[kept]], axis=1)


def _build_fragments(shapes: Shapes, grid: Grid, stored: _StoredOrder) -> tuple[Fragments, Objects | None]:
    """Return the fragments and the object index; the identity convention has none."""
    none = np.zeros(0, np.int64)
    ids = none if shapes.ids is None else shapes.ids
    if grid.identity:
        if len(stored.keys) > 1:
            raise SourceError(f"The identity convention needs exactly one chunk; there are {len(stored.keys)}.")
        if len(stored.first) != np.count_nonzero(shapes.vertex_counts):
            raise SourceError(
                "The identity convention needs one fragment for each object; a skeleton in this input has more."
            )
        each = shapes.vertex_counts
        return range_fragments(np.array([0, len(each)]), shapes.offsets[:-1], each), None
    n = len(stored.first)
    bounds = np.searchsorted(stored.chunk, np.arange(len(stored.keys) + 1)).astype(np.int64)
    starts = stored.first - stored.bounds[stored.chunk]
    fragments = range_fragments(bounds, starts, stored.counts)
    # Rank of each object by id. Vertices without an object have the rank B and are cut off below.
    rank = np.full(len(ids) + 1, len(ids), np.int64)
    rank[np.argsort(ids)] = np.arange(len(ids))
    place = rank[stored.owner]
    by_path_order = stable_order(stored.path_order, int(stored.path_order.max(initial=0)) + 1)
    order = by_path_order[stable_order(place[by_path_order], len(ids) + 1)]
    sizes = np.bincount(place, minlength=len(ids))[: len(ids)].astype(np.int64)
    order = order[: sizes.sum()]
    index = Objects(
        ids=np.sort(ids),
        bounds=counts_to_offsets(sizes),
        chunks=np.take(stored.keys, stored.chunk[order], axis=0),
        modes=np.zeros(len(order), np.uint8),
        starts=(np.arange(n) - bounds[stored.chunk])[order],
        counts=np.ones(len(order), np.int64),
        fragments=none,
    )
    return fragments, index


def _add_links(shapes: Shapes, grid: Grid, chunked: ChunkedLevel, stored: _StoredOrder) -> Level:
    """Return the level with its links within and across chunks."""
    level = chunked.level
    if shapes.kind in SEQUENTIAL:
        return level if grid.boundary == "boundary_deduplication" else _add_sequence_links(level, stored, grid)
    if shapes.links is None:
        return level
    ends = shapes.links.astype(np.int64)
    chunk, own_row = chunked.place(ends)
    crosses_chunks = (chunk != chunk[:, :1]).any(axis=1)
    row = _repeated_rows(chunked, ends, chunk, own_row)
    fragment_of = np.repeat(np.arange(len(stored.first)), stored.counts)
    # With the identity convention each object is a fragment, also an empty one, which `stored` does not list.
    owner = fragment_of[chunked.where[ends[:, :2]]] if not grid.identity else object_rows(shapes)[ends[:, :2]]
    # With repeated vertices, every link is within the chunk of its first end.
    inner = np.ones(len(ends), bool) if grid.boundary != "explicit_links" else ~crosses_chunks
    if omits_parent_links(shapes, grid):
        inner &= (owner[:, 0] != owner[:, 1]) | (row[:, 0] != row[:, 1] + 1)
    chosen = np.flatnonzero(inner)
    # Links within chunks are sorted by the fragment of their first end; fragments are numbered chunk by chunk.
    fragments = level.fragments
    assert fragments is not None
    order = stable_order(owner[chosen, 0], fragments.n_fragments)
    counts = np.bincount(owner[chosen, 0], minlength=fragments.n_fragments).astype(np.int64)
    chosen = chosen[order]
    bounds = np.searchsorted(chunk[chosen, 0], np.arange(len(level.chunks) + 1)).astype(np.int64)
    starts = counts_to_offsets(counts)[:-1] - np.repeat(bounds[:-1], np.diff(fragments.bounds))
    parts = range_fragments(fragments.bounds, starts, counts)
    narrow = row[chosen].astype(smallest_unsigned_dtype(int(np.diff(level.bounds).max(initial=0))))
    level = replace(level, links=Links(bounds, narrow, parts, take_attributes(shapes.link_attributes, chosen)))
    if grid.boundary == "boundary_deduplication" or not crosses_chunks.any():
        return level
    across = np.flatnonzero(crosses_chunks)
    attributes = take_attributes(shapes.link_attributes, across)
    links = CrossLinks(0, level.chunks[chunk[across]], own_row[across], attributes=attributes)
    return replace(level, cross_links=(links,))


def _add_sequence_links(level: Level, stored: _StoredOrder, grid: Grid) -> Level:
    """Add the links between consecutive pieces of a line, which cross chunks."""
    by_path_order = stable_order(stored.path_order, int(stored.path_order.max(initial=0)) + 1)
    owner = stored.owner[by_path_order]
    at = np.flatnonzero(owner[1:] == owner[:-1])
    if not len(at):
        return level
    before, after = by_path_order[at], by_path_order[at + 1]
    # With "both", the last row of a piece is the copy of the vertex to which the link leads.
    last = stored.first[before] + stored.counts[before] - (2 if grid.boundary == "both" else 1)
    ends = np.stack([last, stored.first[after]], axis=1)
    chunk = np.stack([stored.chunk[before], stored.chunk[after]], axis=1)
    links = CrossLinks(0, np.take(level.chunks, chunk, axis=0), ends - level.bounds[chunk])
    return replace(level, cross_links=(links,))


def omits_parent_links(shapes: Shapes, grid: Grid) -> bool:
    """Return whether links between neighbours are omitted: in skeletons whose links have no attributes."""
    return shapes.kind == "skeleton" and not shapes.link_attributes and grid.boundary == "explicit_links"


def _repeated_rows(
    chunked: ChunkedLevel, ends: NDArray[np.int64], chunk: NDArray[np.int64], row: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the rows of link ends in the chunk of the first end, using repeated rows for ends in other chunks."""
    if not len(chunked.repeated):
        return row
    chunks, rows_there = chunked.split(chunked.repeated[:, 1])
    order = np.lexsort((chunks, chunked.repeated[:, 0]))
    far = chunk != chunk[:, :1]
    wanted = np.stack([ends[far], np.broadcast_to(chunk[:, :1], chunk.shape)[far]], axis=1)
    rows_found = find_keys(np.stack([chunked.repeated[:, 0], chunks], axis=1)[order], wanted)
    rows = row.copy()
    rows[far] = rows_there[order[rows_found]]
    return rows


def smallest_unsigned_dtype(n_rows: int) -> np.dtype[Any]:
    """Return the smallest unsigned dtype for rows of chunks with at most `n_rows` vertices (§7.5)."""
    kind = np.min_scalar_type(max(n_rows - 1, 0))
    # After uint32, §7.5 names int64, not uint64.
    return np.dtype(np.int64) if kind.itemsize == 8 else kind
