"""Assembly of shapes from the chunks of a level: fragments in object order, links with renumbered rows."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.store.native import library
from raggedatlas.wings.vectors.geometry import CrossLinks, Geometry, Level
from raggedatlas.wings.vectors.shapes import (
    SEQUENTIAL,
    Attribute,
    Attributes,
    Shapes,
    concat_attributes,
    concat_ranges,
    counts_to_offsets,
    links_by_object,
    sequence_links,
    take_attributes,
    take_vertices,
)
from raggedatlas.wings.vectors.storage.codecs import (
    Bytes,
    corrupt_index_error,
    fragment_rows,
    from_bytes,
    locate_fragments,
)
from raggedatlas.wings.vectors.storage.level_reader import EMPTY_INDEX, AttributeFilter, LevelReader, attribute_storage
from raggedatlas.wings.vectors.storage.zarr_reader import KeyLookup


def assemble_shapes(
    level: Level,
    root: Geometry,
    fragments: NDArray[np.int64],
    objects: NDArray[np.int64],
    ids: NDArray[np.int64] | None,
    cross: CrossLinks | None = None,
) -> Shapes:
    """Return the shapes of some fragments of a level, whose kind and conventions `root` tells.

    `fragments`, (P,), are fragment numbers of the level, in traversal order, and `objects`, (B + 1,), the bounds of
    each object among them; fragments after the last bound belong to no object. `ids` is None if there are no objects.
    Links across chunks, `cross`, with an end in a chunk that `level` does not have are dropped.
    """
    assert level.fragments is not None
    local, counts = fragment_rows(level.fragments, fragments)
    # Chunks without fragments share their bound with the next chunk; `side="right"` skips them.
    chunk = np.searchsorted(level.fragments.bounds, fragments, side="right") - 1
    rows = local + np.repeat(level.bounds[chunk], counts)
    bounds = counts_to_offsets(counts)
    if repeats_vertices(root):
        kept = mask_repeated_rows(level.positions, rows, bounds, objects)
        # The number of kept rows before each fragment, of which `diff` gives the kept rows inside it.
        counts = np.diff(counts_to_offsets(kept)[bounds])
        rows, bounds = rows[kept], counts_to_offsets(counts)
    shapes = Shapes(
        root.kind,
        np.take(level.positions, rows, axis=0),
        offsets=bounds[objects],
        ids=ids,
        vertex_attributes=take_attributes(level.vertex_attributes, rows),
        fragment_offsets=bounds,
        fragment_attributes=take_attributes(level.fragment_attributes, fragments),
    )
    if root.kind in SEQUENTIAL or (level.links is None and cross is None):
        if shapes.kind in {"graph", "skeleton", "mesh"}:
            width = 3 if shapes.kind == "mesh" else 2
            return replace(
                shapes, links=np.zeros((0, width), np.int64), link_offsets=np.zeros(len(shapes.offsets), np.int64)
            )
        return shapes
    return _add_links(shapes, level, rows, root, cross)


def repeats_vertices(root: Geometry) -> bool:
    """Return whether a line that continues in the next chunk ends there with a copy of its next vertex."""
    return root.kind in SEQUENTIAL and root.cross_chunk != "explicit_links"


def mask_repeated_rows(
    positions: NDArray[Any], rows: NDArray[np.int64], bounds: NDArray[np.int64], objects: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which rows to keep of polylines in which a piece ends with the first vertex of the next piece.

    `rows` are those of all fragments, in traversal order; `bounds`, (P + 1,), are the bounds of fragments among them,
    and `objects`, (B + 1,), the bounds of objects among the fragments.
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
    root: Geometry,
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
    if cross is not None and root.cross_chunk != "both":
        place = KeyLookup(level.chunks).find(cross.chunks.reshape(-1, cross.chunks.shape[2])).reshape(cross.rows.shape)
        # Chunks that are not loaded have the place -1, which reads the appended 0.
        sizes = np.append(np.diff(level.bounds), 0)
        if ((place >= 0) & (cross.rows >= sizes[place])).any():
            raise CorruptError(
                "A link across chunks refers to a row that its chunk does not have. Restore the store from a copy."
            )
        parts.append((np.where(place >= 0, level.bounds[place] + cross.rows, -1), cross.attributes))
    placed = [finder.place(ends) for ends, _ in parts]
    placed_links = [ends for ends, _ in placed]
    values = [take_attributes(own, kept) for (_, own), (_, kept) in zip(parts, placed, strict=True)]
    if root.links_convention == "implicit_sequential_with_branches":
        begins = np.zeros(shapes.n_vertices + 1, bool)
        assert shapes.fragment_offsets is not None
        begins[shapes.fragment_offsets] = True
        begins[np.concatenate([np.zeros((0, 2), np.int64), *placed_links])[:, 0]] = True
        child = np.flatnonzero(~begins[:-1])
        placed_links.append(np.stack([child, child - 1], axis=1))
        values.append({})
    links = np.concatenate(placed_links) if placed_links else np.zeros((0, 2), np.int64)
    attributes = concat_attributes(values, [len(ends) for ends in placed_links])
    order, link_offsets = links_by_object(shapes.offsets, links)
    return replace(
        shapes, links=links[order], link_offsets=link_offsets, link_attributes=take_attributes(attributes, order)
    )


class RowLookup:
    """Mapping from rows of a level to rows of the shapes, including rows shared by several objects.

    `rows`, (N,), is the row of the level of each vertex of the shapes; `offsets` are those of the objects, and `n_rows`
    is the number of rows of the level.
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
        rows = self._place[ends]
        kept = np.flatnonzero((rows >= 0).all(axis=1))
        return rows[kept], kept

    def place(self, ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the links whose ends are all present, renumbered, and their indices among the given links.

        If objects share rows, a link is returned once for each object that has all of its ends; links between objects
        follow.
        """
        if not self.is_shared:
            return self._simple(ends)
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
        inside = placed[kept]
        which = which[kept]
        left = np.setdiff1d(np.arange(len(ends)), which)
        across, kept = self._simple(ends[left])
        return np.concatenate([inside, across]), np.concatenate([which, left[kept]])


def clip_shapes(shapes: Shapes, inside: NDArray[np.bool_]) -> Shapes:
    """Return the vertices that are inside and the links between them; objects without vertices are dropped.

    Lines, polylines and streamlines get explicit links between neighbours, because clipping may divide them.
    """
    links = shapes.links
    if links is None and shapes.kind in SEQUENTIAL:
        links = sequence_links(shapes)
    good = np.zeros(0, np.int64) if links is None else np.flatnonzero(inside[links].all(axis=1))
    clipped = take_vertices(shapes, inside, None if links is None else links[good])
    if shapes.ids is not None:
        some = np.flatnonzero(clipped.vertex_counts)
        clipped = replace(
            clipped,
            offsets=counts_to_offsets(clipped.vertex_counts[some]),
            ids=shapes.ids[some],
            object_attributes=take_attributes(shapes.object_attributes, some),
        )
    if clipped.links is not None:
        order, link_offsets = links_by_object(clipped.offsets, clipped.links)
        attributes = take_attributes(shapes.link_attributes, good[order])
        clipped = replace(clipped, links=clipped.links[order], link_offsets=link_offsets, link_attributes=attributes)
    if clipped.fragment_offsets is None:
        return clipped
    sizes = np.diff(clipped.fragment_offsets)
    return replace(
        clipped,
        fragment_offsets=counts_to_offsets(sizes[sizes > 0]),
        fragment_attributes=take_attributes(shapes.fragment_attributes, np.flatnonzero(sizes)),
    )


class FragmentReader:
    """Reader of single fragments of a level with raw vertices; only their rows are copied.

    `keys`, (n, K), are chunks, ascending. The headers of their fragment indexes are checked at once; damaged ones are a
    `CorruptError`.
    """

    def __init__(self, reader: LevelReader, keys: NDArray[np.int64]) -> None:
        self.reader, self.keys = reader, keys
        self.where = f"{reader.where}/vertex_fragments"
        stored = reader.index_blobs("vertex_fragments", keys)
        self.is_indexed = stored is not None
        self.blobs = [EMPTY_INDEX] * len(keys) if stored is None else stored
        for blob in self.blobs:
            locate_fragments(blob, np.zeros(0, np.int64), 0, np.zeros((0, 3), np.int64), self.where)
        counts = [int.from_bytes(blob[8:12].tobytes(), "little") for blob in self.blobs]
        # Without an index, a chunk is one fragment.
        self.n_fragments = np.array(counts, np.int64) if self.is_indexed else np.ones(len(keys), np.int64)

    def read(
        self,
        place: NDArray[np.int64],
        fragments: NDArray[np.int64],
        objects: NDArray[np.int64],
        ids: NDArray[np.int64],
        wanted: AttributeFilter,
    ) -> Shapes:
        """Return the objects that some fragments form.

        `place` and `fragments`, (P,), are the index in `keys` of the chunk of each fragment, and its number there, in
        traversal order; `objects`, (B + 1,), are the bounds of objects among them. `wanted` is a predicate on attribute
        names.
        """
        reader, root = self.reader, self.reader.root
        raw: list[Bytes] = []
        dtype, rows = np.dtype(np.float32), np.zeros(0, np.int64)
        if reader.vertices is not None:
            raw, dtype, rows = reader.read_rows(reader.vertices, self.keys, root.n_dims, "vertices")
        # The compiled function counts bits of the bitmap as it goes, and refuses numbers that do not ascend.
        order = np.lexsort((fragments, place))
        cuts = np.searchsorted(place[order], np.arange(len(self.keys) + 1)).tolist()
        ascending = fragments[order]
        spans = np.zeros((len(fragments), 3), np.int64)
        if not self.is_indexed:
            spans[:, 2] = np.repeat(rows, np.diff(cuts))
        else:
            for blob, n_rows, (a, b) in zip(self.blobs, rows.tolist(), pairwise(cuts), strict=True):
                locate_fragments(blob, ascending[a:b], n_rows, spans[a:b], self.where)
        counts = np.empty(len(fragments), np.int64)
        counts[order] = spans[:, 2]
        bounds = counts_to_offsets(counts)
        places = bounds[:-1][order]
        size = dtype.itemsize * root.n_dims
        positions = from_bytes(self._copy_rows(raw, cuts, spans, places, size), dtype, root.n_dims)
        own = self._attributes("vertex_attributes", rows, cuts, spans, places, wanted)
        own |= reader.read_partition_attribute(self.keys[place], counts, wanted)
        # Each fragment is a range of one row of their attributes, its own number.
        each = np.ones((len(fragments), 3), np.int64)
        each[:, 0] = ascending
        shapes = Shapes(
            root.kind,
            positions,
            offsets=bounds[objects],
            ids=ids,
            vertex_attributes=own,
            fragment_offsets=bounds,
            fragment_attributes=self._attributes("fragment_attributes", self.n_fragments, cuts, each, order, wanted),
        )
        if not repeats_vertices(root):
            return shapes
        return take_vertices(shapes, mask_repeated_rows(positions, np.arange(len(positions)), bounds, objects))

    def _attributes(
        self,
        group: str,
        rows: NDArray[np.int64],
        cuts: list[int],
        spans: NDArray[np.int64],
        places: NDArray[np.int64],
        wanted: AttributeFilter,
    ) -> dict[str, Attribute]:
        """Return the rows of spans of each attribute of a family, whose chunks have `rows` rows."""
        result = {}
        for name in filter(wanted, self.reader.attribute_names(group)):
            family = self.reader.family(f"{group}/{name}")
            if family is not None:
                cells = family.read(self.keys)
                form = attribute_storage(family.attributes, cells, rows, f"{self.reader.where}/{group}/{name}")
                result[name] = form.attribute(self._copy_rows(cells, cuts, spans, places, form.size))
        return result

    def _copy_rows(
        self, cells: list[Bytes], cuts: list[int], spans: NDArray[np.int64], places: NDArray[np.int64], size: int
    ) -> Bytes:
        """Copy the rows of all spans to their positions in the output."""
        out = np.empty(int(spans[:, 2].sum()) * size, np.uint8)
        for cell, blob, (a, b) in zip(cells, self.blobs, pairwise(cuts), strict=True):
            contents, index = np.ascontiguousarray(cell), np.ascontiguousarray(blob)
            fault = library().ra_copy_fragments(
                index, index.size, contents, contents.size, spans[a:b], places[a:b], b - a, size, out, out.size
            )
            if fault:
                raise corrupt_index_error(fault, blob, "A fragment index")
        return out
