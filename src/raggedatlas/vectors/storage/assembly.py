"""Assembly of shapes from the chunks of a level: fragments in object order, links with renumbered rows."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.store.native import library
from raggedatlas.vectors.geometry import CrossLinks, Level
from raggedatlas.vectors.shapes import (
    KINDS,
    SEQUENTIAL,
    Attribute,
    Attributes,
    Shapes,
    concat_attributes,
    concat_ranges,
    counts_to_offsets,
    take_attributes,
)
from raggedatlas.vectors.storage.codecs import Bytes, corrupt_index_error, fragment_rows, from_bytes, locate_fragments
from raggedatlas.vectors.storage.level_reader import (
    EMPTY_INDEX,
    AttributeFilter,
    AttributeStorage,
    LevelReader,
    attribute_storage,
)
from raggedatlas.vectors.storage.zarr_reader import KeyLookup


@dataclass(frozen=True)
class FragmentSelection:
    """Selected fragments, in object order.

    Parameters
    ----------
    fragments : (P,) int64
        Fragment numbers of the loaded level, in traversal order.
    bounds : (B + 1,) int64
        Fragments of each object; fragments after the last bound belong to no object.
    ids : (B,) int64 or None
        Ids of the objects; None if there are none.
    """

    fragments: NDArray[np.int64]
    bounds: NDArray[np.int64]
    ids: NDArray[np.int64] | None


@dataclass(frozen=True)
class LinkRules:
    """Link conventions of a store.

    Parameters
    ----------
    kind : str
        Geometry type.
    convention : str
        Convention of links that are not stored.
    boundary : str
        Policy for links across chunks.
    """

    kind: str
    convention: str
    boundary: str


def assemble_shapes(
    level: Level, chosen: FragmentSelection, rules: LinkRules, cross: CrossLinks | None = None
) -> Shapes:
    """Return the shapes of some fragments of a level.

    Parameters
    ----------
    level : Level
        Chunks with their fragments, and links if the kind has them.
    chosen : FragmentSelection
        Fragments to assemble.
    rules : LinkRules
        Kind and conventions.
    cross : CrossLinks or None
        Links across chunks; those with an end in another chunk are dropped.
    """
    fragments = level.fragments
    assert fragments is not None
    local, counts = fragment_rows(fragments, chosen.fragments)
    # Chunks without fragments share their bound with the next chunk; `side="right"` skips them.
    chunk = np.searchsorted(fragments.bounds, chosen.fragments, side="right") - 1
    rows = local + np.repeat(level.bounds[chunk], counts)
    bounds = counts_to_offsets(counts)
    if rules.kind in SEQUENTIAL and rules.boundary != "explicit_links":
        kept = mask_repeated_rows(level.positions, rows, bounds, chosen.bounds)
        # The number of kept rows before each fragment, of which `diff` gives the kept rows inside it.
        counts = np.diff(counts_to_offsets(kept)[bounds])
        rows, bounds = rows[kept], counts_to_offsets(counts)
    shapes = Shapes(
        rules.kind if rules.kind in KINDS else "graph",
        np.take(level.positions, rows, axis=0),
        offsets=bounds[chosen.bounds],
        ids=chosen.ids,
        vertex_attributes=take_attributes(level.vertex_attributes, rows),
        fragment_offsets=bounds,
        fragment_attributes=take_attributes(level.fragment_attributes, chosen.fragments),
    )
    if rules.kind in SEQUENTIAL or (level.links is None and cross is None):
        return _with_empty_links(shapes)
    return _add_links(shapes, level, rows, rules, cross)


def _with_empty_links(shapes: Shapes) -> Shapes:
    """Return the shapes with an empty array of links if their kind requires links."""
    if shapes.kind in {"graph", "skeleton", "mesh"}:
        width = 3 if shapes.kind == "mesh" else 2
        return replace(
            shapes, links=np.zeros((0, width), np.int64), link_offsets=np.zeros(len(shapes.offsets), np.int64)
        )
    return shapes


def mask_repeated_rows(
    positions: NDArray[Any], rows: NDArray[np.int64], bounds: NDArray[np.int64], objects: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which rows to keep of polylines in which a piece ends with the first vertex of the next piece.

    Parameters
    ----------
    positions : (N, D) array
        Vertices.
    rows : (R,) int64
        Rows of all fragments, in traversal order.
    bounds : (P + 1,) int64
        Rows of each fragment.
    objects : (B + 1,) int64
        Fragments of each object.
    """
    kept = np.ones(len(rows), bool)
    # A fragment that begins an object continues nothing, even at the position where the previous object ends.
    first = np.setdiff1d(np.arange(1, len(bounds) - 1), objects)
    # Empty fragments are left out, because their `bounds` refer to rows of other fragments.
    first = first[(bounds[first] < bounds[first + 1]) & (bounds[first - 1] < bounds[first])]
    begin = bounds[first]
    same = (positions[rows[begin]] == positions[rows[begin - 1]]).all(axis=1)
    # The copy is the last row of the earlier piece (see `_store` in `chunking`); the original stays.
    kept[begin[same] - 1] = False
    return kept


def _add_links(
    shapes: Shapes,
    level: Level,
    rows: NDArray[np.int64],
    rules: LinkRules,
    cross: CrossLinks | None,
) -> Shapes:
    """Add the links whose ends are all among the vertices, object by object."""
    finder = RowLookup(rows, shapes.offsets, level.n_vertices)
    parts: list[tuple[NDArray[np.int64], Attributes]] = []
    if level.links is not None:
        base = np.repeat(level.bounds[:-1], np.diff(level.links.bounds))
        parts.append((level.links.rows.astype(np.int64) + base[:, None], level.links.attributes))
        # Rows are chunk-local: without this check, a row beyond its chunk would be a vertex of the next chunk.
        limit = np.repeat(level.bounds[1:], np.diff(level.links.bounds))
        if (parts[0][0] >= limit[:, None]).any() or (level.links.rows < 0).any():
            raise CorruptError("A link refers to a row that its chunk does not have. Restore the store from a copy.")
    # With "both", these links are also stored within the chunk of their first end, by means of repeated vertices.
    if cross is not None and rules.boundary != "both":
        parts.append((_global_rows(level, cross), cross.attributes))
    found = [finder.place(ends) for ends, _ in parts]
    placed_links = [ends for ends, _ in found]
    values = [take_attributes(own, kept) for (_, own), (_, kept) in zip(parts, found, strict=True)]
    if rules.convention == "implicit_sequential_with_branches":
        placed_links.append(_implicit_links(shapes, np.concatenate([np.zeros((0, 2), np.int64), *placed_links])))
        values.append({})
    links = np.concatenate(placed_links) if placed_links else np.zeros((0, 2), np.int64)
    attributes = concat_attributes(values, [len(ends) for ends in placed_links])
    owner = np.searchsorted(shapes.offsets, links[:, 0], side="right") - 1
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=len(shapes.offsets))
    return replace(
        shapes,
        links=links[order],
        # Links between vertices without an object follow those of the last object; no offsets can describe them.
        link_offsets=None if counts[-1] else counts_to_offsets(counts[:-1]),
        link_attributes=take_attributes(attributes, order),
    )


def _global_rows(level: Level, cross: CrossLinks) -> NDArray[np.int64]:
    """Return the rows of link ends among all vertices of the loaded level; -1 in chunks that are not loaded."""
    place = KeyLookup(level.chunks).find(cross.chunks.reshape(-1, cross.chunks.shape[2])).reshape(cross.rows.shape)
    # Chunks that are not loaded have the place -1, which reads the appended 0.
    sizes = np.append(np.diff(level.bounds), 0)
    if ((place >= 0) & (cross.rows >= sizes[place])).any():
        raise CorruptError(
            "A link across chunks refers to a row that its chunk does not have. Restore the store from a copy."
        )
    return np.where(place >= 0, level.bounds[place] + cross.rows, -1)


def _implicit_links(shapes: Shapes, links: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the implicit links: each vertex to the previous one in its fragment, unless a link names another parent."""
    begins = np.zeros(shapes.n_vertices + 1, bool)
    assert shapes.fragment_offsets is not None
    begins[shapes.fragment_offsets] = True
    begins[links[:, 0]] = True
    child = np.flatnonzero(~begins[:-1])
    return np.stack([child, child - 1], axis=1)


class RowLookup:
    """Mapping from rows of a level to rows of the shapes, including rows shared by several objects.

    Parameters
    ----------
    rows : (N,) int64
        Row of the level of each vertex of the shapes.
    offsets : (B + 1,) int64
        Vertices of each object.
    n_rows : int
        Number of rows of the level.
    """

    def __init__(self, rows: NDArray[np.int64], offsets: NDArray[np.int64], n_rows: int) -> None:
        # One entry more than rows: it stays -1, and is what an end of -1 (not loaded) reads.
        self._place = np.full(n_rows + 1, -1, np.int64)
        # NumPy keeps the last value of a repeated index; in reverse order, the first occurrence of a row wins.
        self._place[rows[::-1]] = np.arange(len(rows))[::-1]
        self.n_rows = n_rows
        self.is_shared = int(np.count_nonzero(self._place >= 0)) < len(rows)
        if self.is_shared:
            owner = np.searchsorted(offsets, np.arange(len(rows)), side="right") - 1
            self._owner = owner
            code = owner * n_rows + rows
            self._order = np.argsort(code, kind="stable")
            self._codes = code[self._order]
            by_row = np.argsort(rows, kind="stable")
            self._by_row, self._sorted_rows = by_row, rows[by_row]

    def _simple(self, ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return links with each end at its first occurrence."""
        found = self._place[ends]
        kept = np.flatnonzero((found >= 0).all(axis=1))
        return found[kept], kept

    def _within(self, ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return links once for each object that has all of their ends."""
        first = np.searchsorted(self._sorted_rows, ends[:, 0], side="left")
        count = np.searchsorted(self._sorted_rows, ends[:, 0], side="right") - first
        count[ends[:, 0] < 0] = 0
        which = np.repeat(np.arange(len(ends)), count)
        start = self._by_row[concat_ranges(first, count)]
        owner = self._owner[start]
        code = owner[:, None] * self.n_rows + ends[which]
        at = np.minimum(np.searchsorted(self._codes, code), len(self._codes) - 1)
        # An end of -1 gives the code of the last row of the previous object, so an equal code is not enough.
        good = ((self._codes[at] == code) & (ends[which] >= 0)).all(axis=1)
        placed = self._order[at]
        _, unique = np.unique(np.stack([which, owner], axis=1)[good], axis=0, return_index=True)
        kept = np.flatnonzero(good)[unique]
        return placed[kept], which[kept]

    def place(self, ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the links whose ends are all present, renumbered, and their indices among the given links.

        If objects share rows, a link is returned once for each object that has all of its ends; links between objects follow.
        """
        if not self.is_shared:
            return self._simple(ends)
        inside, which = self._within(ends)
        left = np.setdiff1d(np.arange(len(ends)), which)
        across, kept = self._simple(ends[left])
        return np.concatenate([inside, across]), np.concatenate([which, left[kept]])


def clip_shapes(shapes: Shapes, inside: NDArray[np.bool_]) -> Shapes:
    """Return the vertices that are inside and the links between them; objects without vertices are dropped.

    Lines, polylines and streamlines get explicit links between neighbours, because clipping may divide them.
    """
    place = np.cumsum(inside) - 1
    kept = np.flatnonzero(inside)
    counted = counts_to_offsets(inside)
    counts = np.diff(counted[shapes.offsets])
    some = counts > 0 if shapes.ids is not None else np.ones(len(counts), bool)
    links = shapes.links
    if links is None and shapes.kind in SEQUENTIAL:
        last = np.ones(shapes.n_vertices, bool)
        last[shapes.offsets[1:][shapes.vertex_counts > 0] - 1] = False
        row = np.flatnonzero(last)
        links = np.stack([row, row + 1], axis=1)
    new: dict[str, object] = {"links": None, "link_offsets": None}
    if links is not None:
        good = np.flatnonzero(inside[links].all(axis=1))
        ends = place[links[good]]
        offsets = counts_to_offsets(counts[some])
        owner = np.searchsorted(offsets, ends[:, 0], side="right") - 1
        order = np.argsort(owner, kind="stable")
        sizes = np.bincount(owner, minlength=len(offsets))
        new = {
            "links": ends[order],
            "link_offsets": None if sizes[-1] else counts_to_offsets(sizes[:-1]),
            "link_attributes": take_attributes(shapes.link_attributes, good[order]),
        }
    pieces, values = shapes.fragment_offsets, shapes.fragment_attributes
    if pieces is not None:
        sizes = np.diff(counted[pieces])
        values = take_attributes(values, np.flatnonzero(sizes > 0))
        pieces = counts_to_offsets(sizes[sizes > 0])
    return replace(
        shapes,
        positions=np.take(shapes.positions, kept, axis=0),
        offsets=counts_to_offsets(counts[some]),
        ids=None if shapes.ids is None else shapes.ids[some],
        vertex_attributes=take_attributes(shapes.vertex_attributes, kept),
        object_attributes=take_attributes(shapes.object_attributes, np.flatnonzero(some)),
        fragment_offsets=pieces,
        fragment_attributes=values,
        **new,  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class FragmentRequest:
    """Fragments of a level, by chunk.

    Parameters
    ----------
    keys : (n, K) int64
        Chunks that hold at least one of them, ascending.
    place : (P,) int64
        Index in `keys` of each fragment's chunk.
    fragments : (P,) int64
        Chunk-local number of each fragment.
    """

    keys: NDArray[np.int64]
    place: NDArray[np.int64]
    fragments: NDArray[np.int64]


@dataclass(frozen=True)
class ChunkIndexes:
    """The fragment indexes of some chunks.

    Parameters
    ----------
    blobs : list of uint8 arrays or None
        Blob of each chunk; None if the level stores none, so that each chunk is one fragment.
    n_fragments : (n,) int64
        Number of fragments of each chunk.
    """

    blobs: list[Bytes] | None
    n_fragments: NDArray[np.int64]


def read_chunk_indexes(reader: LevelReader, keys: NDArray[np.int64]) -> ChunkIndexes:
    """Read the fragment indexes of some chunks, and their numbers of fragments.

    Raises
    ------
    CorruptError
        If the header of an index does not match its bytes.
    """
    blobs = reader.index_blobs("vertex_fragments", keys)
    if blobs is None:
        return ChunkIndexes(None, np.ones(len(keys), np.int64))
    none = np.zeros(0, np.int64)
    for blob in blobs:
        locate_fragments(blob, none, 0, np.zeros((0, 3), np.int64), f"{reader.where}/vertex_fragments")
    return ChunkIndexes(blobs, np.array([int.from_bytes(blob[8:12].tobytes(), "little") for blob in blobs], np.int64))


@dataclass(frozen=True)
class FragmentRows:
    """Vertices of some fragments, in the requested order.

    Parameters
    ----------
    positions : (N, D) array
        Vertices.
    bounds : (P + 1,) int64
        Vertices of each fragment.
    vertex_attributes, fragment_attributes : dict of str to Attribute
        N and P rows.
    """

    positions: NDArray[np.generic]
    bounds: NDArray[np.int64]
    vertex_attributes: dict[str, Attribute]
    fragment_attributes: dict[str, Attribute]


@dataclass(frozen=True)
class _FragmentSpans:
    """Locations of fragments, by chunk: those of chunk `c` are ``cuts[c]`` to ``cuts[c + 1]``.

    Parameters
    ----------
    order : (P,) int64
        Index of each among the requested fragments.
    cuts : list of int
        First fragment of each chunk.
    blobs : list of uint8 arrays
        Fragment index of each chunk.
    n_fragments : (n,) int64
        Number of fragments of each chunk.
    spans : (P, 3) int64
        As filled by `locate_fragments`.
    """

    order: NDArray[np.int64]
    cuts: list[int]
    blobs: list[Bytes]
    n_fragments: NDArray[np.int64]
    spans: NDArray[np.int64]


def read_fragments(
    reader: LevelReader, parts: FragmentRequest, indexes: ChunkIndexes, wanted: AttributeFilter
) -> FragmentRows:
    """Return vertices and attributes of some fragments of a level with raw vertices.

    Raises
    ------
    CorruptError
        If a chunk does not have a fragment, or the data read is inconsistent.
    """
    n_dims = len(reader.root.axes)
    raw, dtype, rows = [], np.dtype(np.float32), np.zeros(0, np.int64)
    if reader.vertices is not None:
        raw, dtype, rows = reader.read_rows(reader.vertices, parts.keys, n_dims, "vertices")
    size = dtype.itemsize * n_dims
    located = _locate_spans(reader, parts, indexes, rows)
    counts = np.empty(len(parts.fragments), np.int64)
    counts[located.order] = located.spans[:, 2]
    bounds = counts_to_offsets(counts)
    places = bounds[:-1][located.order]
    positions = from_bytes(_copy_rows(raw, located, places, size, int(bounds[-1])), dtype, n_dims)
    own = {}
    for name in filter(wanted, reader.attribute_names("vertex_attributes")):
        found = _read_attribute(reader, f"vertex_attributes/{name}", parts.keys, rows)
        if found is not None:
            form, cells = found
            own[name] = form.attribute(_copy_rows(cells, located, places, form.size, int(bounds[-1])))
    own |= reader.read_partition_attribute(parts.keys[parts.place], counts, wanted)
    return FragmentRows(positions, bounds, own, _read_fragment_attributes(reader, parts, located, wanted))


def _read_fragment_attributes(
    reader: LevelReader, parts: FragmentRequest, located: _FragmentSpans, wanted: AttributeFilter
) -> dict[str, Attribute]:
    """Return the attributes of the fragments themselves."""
    result = {}
    # Each fragment is a range of one row, its own number, so that `_copy_rows` serves for these rows as well.
    spans = np.ones((len(parts.fragments), 3), np.int64)
    spans[:, 0] = parts.fragments[located.order]
    each = replace(located, spans=spans)
    for name in filter(wanted, reader.attribute_names("fragment_attributes")):
        found = _read_attribute(reader, f"fragment_attributes/{name}", parts.keys, located.n_fragments)
        if found is not None:
            form, cells = found
            result[name] = form.attribute(_copy_rows(cells, each, located.order, form.size, len(spans)))
    return result


def _locate_spans(
    reader: LevelReader, parts: FragmentRequest, indexes: ChunkIndexes, rows: NDArray[np.int64]
) -> _FragmentSpans:
    """Locate fragments in the indexes of their chunks; without an index, a chunk is one fragment."""
    # The compiled function counts bits of the bitmap as it goes, and refuses numbers that do not ascend.
    order = np.lexsort((parts.fragments, parts.place))
    cuts = np.searchsorted(parts.place[order], np.arange(len(parts.keys) + 1)).tolist()
    fragments, where = parts.fragments[order], f"{reader.where}/vertex_fragments"
    spans = np.zeros((len(fragments), 3), np.int64)
    if indexes.blobs is None:
        spans[:, 2] = rows[parts.place[order]]
        return _FragmentSpans(order, cuts, [EMPTY_INDEX] * len(rows), indexes.n_fragments, spans)
    for blob, n_rows, (a, b) in zip(indexes.blobs, rows.tolist(), pairwise(cuts), strict=True):
        locate_fragments(blob, fragments[a:b], n_rows, spans[a:b], where)
    return _FragmentSpans(order, cuts, indexes.blobs, indexes.n_fragments, spans)


def _copy_rows(cells: list[Bytes], located: _FragmentSpans, places: NDArray[np.int64], size: int, n_rows: int) -> Bytes:
    """Copy the rows of all fragments to their positions in the output."""
    out = np.empty(n_rows * size, np.uint8)
    for cell, blob, (a, b) in zip(cells, located.blobs, pairwise(located.cuts), strict=True):
        contents, index = np.ascontiguousarray(cell), np.ascontiguousarray(blob)
        fault = library().ra_copy_fragments(
            index, index.size, contents, contents.size, located.spans[a:b], places[a:b], b - a, size, out, out.size
        )
        if fault:
            raise corrupt_index_error(fault, blob, "A fragment index")
    return out


def _read_attribute(
    reader: LevelReader, path: str, keys: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[AttributeStorage, list[Bytes]] | None:
    """Return the storage of an attribute and its cells of some chunks; None if it does not exist."""
    family = reader.family(path)
    if family is None:
        return None
    cells = family.read(keys)
    return attribute_storage(family.attributes, cells, rows, f"{reader.where}/{path}"), cells


def drop_repeated_rows(picked: FragmentRows, objects: NDArray[np.int64], rules: LinkRules) -> FragmentRows:
    """Drop the vertices that are stored twice where a polyline continues in the next chunk, if the store repeats them.

    Parameters
    ----------
    picked : FragmentRows
        Fragments in traversal order.
    objects : (B + 1,) int64
        Fragments of each object.
    rules : LinkRules
        Kind and conventions of the store.
    """
    if rules.kind not in SEQUENTIAL or rules.boundary == "explicit_links":
        return picked
    kept = mask_repeated_rows(picked.positions, np.arange(len(picked.positions)), picked.bounds, objects)
    rows = np.flatnonzero(kept)
    attributes = take_attributes(picked.vertex_attributes, rows)
    bounds = counts_to_offsets(np.diff(counts_to_offsets(kept)[picked.bounds]))
    return FragmentRows(np.take(picked.positions, rows, axis=0), bounds, attributes, picked.fragment_attributes)
