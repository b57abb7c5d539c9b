"""One level of an open store, by its objects: whole, by a box, by object."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, NotFoundError
from raggedatlas.vectors.assembly import FragmentSelection, LinkRules, assemble_shapes, clip_shapes
from raggedatlas.vectors.blobs import concat_ranges, counts_to_offsets
from raggedatlas.vectors.chunking import NO_OWNER, ORDERED_KINDS, OWNER_ATTRIBUTE
from raggedatlas.vectors.cross_links import CrossLinkReader
from raggedatlas.vectors.fragment_index import fragment_rows
from raggedatlas.vectors.fragment_slices import FragmentRequest, drop_repeated_rows, read_chunk_indexes, read_fragments
from raggedatlas.vectors.geometry import CrossLinks, Level, Objects
from raggedatlas.vectors.level_reader import LevelReader, attribute_filter
from raggedatlas.vectors.manifests import expand_manifests, take_manifests
from raggedatlas.vectors.object_index import ObjectIndex, read_groups, read_table_attribute
from raggedatlas.vectors.shapes import SEQUENTIAL, Attribute, Shapes

_SHARED = -2


class LevelQuery:
    """One level of an open store with its objects.

    Parameters
    ----------
    reader : LevelReader
        Its arrays.
    rules : Rules
        Kind and conventions of the store.
    identity : bool
        Whether object ids are the numbers of the fragments of the only chunk.
    """

    def __init__(self, reader: LevelReader, rules: LinkRules, *, identity: bool) -> None:
        self.reader, self.rules = reader, rules
        self.index = ObjectIndex(reader)
        self.identity = identity and not self.index.is_there
        if self.identity and len(reader.keys.keys) > 1:
            raise CorruptError(f"{reader.where} has {len(reader.keys.keys)} chunks; the identity convention needs one.")
        self.crossings = CrossLinkReader(reader, None, 0)
        self._tables: dict[str, Attribute | None] = {}

    @property
    def has_objects(self) -> bool:
        """Whether there are objects to ask for."""
        return self.identity or self.index.is_there

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """Ids of all objects, ascending."""
        if not self.identity:
            return self.index.ids
        fragments = self.reader.load(np.arange(len(self.reader.keys.keys)), parts=("fragments",)).fragments
        return np.arange(0 if fragments is None else fragments.n_fragments)

    def load(self, rows: NDArray[np.int64], names: Sequence[str] | None) -> tuple[Level, CrossLinks | None]:
        """Return some chunks, and the links across them where the kind has links of its own."""
        linked = self.rules.kind not in SEQUENTIAL and self.rules.kind != "point_cloud"
        parts = ("fragments", "links") if linked else ("fragments",)
        level = self._loaded(rows, names, parts)
        cross = self.crossings.read(level.chunks, attribute_filter(names)) if linked and len(rows) else None
        return level, cross

    def _loaded(self, rows: NDArray[np.int64], names: Sequence[str] | None, parts: Sequence[str]) -> Level:
        """Return some chunks, with the attribute by which they are cut among those of their vertices."""
        level, wanted = self.reader.load(rows, attribute_filter(names), parts), attribute_filter(names)
        lead = self.reader.read_partition_attribute(level.chunks, np.diff(level.bounds), wanted)
        return replace(level, vertex_attributes={**level.vertex_attributes, **lead}) if lead else level

    def object_attributes(self, names: Sequence[str] | None, ids: NDArray[np.int64] | None) -> dict[str, Attribute]:
        """Return the attributes of some objects, or of all."""
        wanted = attribute_filter(names)
        made = {}
        for name in filter(wanted, self.reader.attribute_names("object_attributes")):
            if name not in self._tables:
                self._tables[name] = read_table_attribute(self.reader, "object_attributes", name)
            attribute = self._tables[name]
            if attribute is None:
                continue
            if len(attribute.values) != len(self.ids):
                raise CorruptError(
                    f"{self.reader.where}/object_attributes/{name} has {len(attribute.values)} rows; "
                    f"expected {len(self.ids)}, one for each object."
                )
            made[name] = attribute if ids is None else attribute.take(self._rows_of(ids))
        return made

    def _rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return ids if self.identity else self.index.rows_of(ids)

    def manifests(self, ids: NDArray[np.int64]) -> Objects:
        """Return where the fragments of some objects lie."""
        if not self.identity:
            return self.index.take(ids)
        bad = (ids < 0) | (ids >= len(self.ids))
        if bad.any():
            raise NotFoundError(
                f"There is no object {ids[bad][0]} in {self.reader.where}; it has {len(self.ids):,} objects."
            )
        chunk = self.reader.keys.keys
        chunks = np.broadcast_to(chunk[:1], (len(ids), chunk.shape[1]))
        ones = np.ones(len(ids), np.int64)
        none = np.zeros(0, np.int64)
        return Objects(ids, np.arange(len(ids) + 1), chunks, np.zeros(len(ids), np.uint8), ids, ones, none)

    def take(self, ids: NDArray[np.int64], names: Sequence[str] | None) -> Shapes:
        """Return objects in the given order; each chunk that holds some of them is read once."""
        objects = self.manifests(ids)
        at = self._chunk_rows(objects)
        touched = np.unique(at[at >= 0])
        place = np.where(at >= 0, np.searchsorted(touched, at), -1)
        attributes = self.object_attributes(names, ids)
        if self.reader.is_draco or not (self.rules.kind in SEQUENTIAL or self.rules.kind == "point_cloud"):
            level, cross = self.load(touched, names)
            chosen, bounds = self._numbered(level, objects, place)
            return replace(
                assemble_shapes(level, FragmentSelection(chosen, bounds, ids), self.rules, cross),
                object_attributes=attributes,
            )
        keys = self.reader.keys.keys[touched]
        indexes = read_chunk_indexes(self.reader, keys)
        limits = np.append(indexes.n_fragments, 0)[place]
        blocks, fragments, bounds = expand_manifests(objects, limits, self.reader.where)
        picked = read_fragments(
            self.reader, FragmentRequest(keys, place[blocks], fragments), indexes, attribute_filter(names)
        )
        picked = drop_repeated_rows(picked, bounds, self.rules)
        return Shapes(
            self.rules.kind,
            picked.positions,
            offsets=picked.bounds[bounds],
            ids=ids,
            vertex_attributes=picked.vertex_attributes,
            object_attributes=attributes,
            fragment_offsets=picked.bounds,
            fragment_attributes=picked.fragment_attributes,
        )

    def _chunk_rows(self, objects: Objects) -> NDArray[np.int64]:
        """Return which chunk of the level each block names; a chunk that is not there is refused."""
        at = self.reader.keys.find(objects.chunks)
        bad = np.flatnonzero((at < 0) & (objects.counts > 0))
        if bad.size:
            raise CorruptError(
                f"{self.reader.where}/object_index names chunk {objects.chunks[bad[0]].tolist()}, which has no vertices."
            )
        return at

    def _numbered(
        self, level: Level, objects: Objects, place: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the fragments of objects as numbers among those of the level at hand, and the bounds of each object.

        `place` is the chunk of each block in `level`, -1 where it is absent.
        """
        assert level.fragments is not None
        bounds = level.fragments.bounds
        limits = np.append(np.diff(bounds), 0)[place]
        blocks, fragments, owned = expand_manifests(objects, limits, self.reader.where)
        return bounds[place[blocks]] + fragments, owned

    def read(self, names: Sequence[str] | None, *, once: bool) -> Shapes:
        """Return all objects by ascending id, and behind them the vertices that belong to none.

        With `once`, a fragment that several objects share goes to the first of them.
        """
        level, cross = self.load(np.arange(len(self.reader.keys.keys)), names)
        n_fragments = 0 if level.fragments is None else level.fragments.n_fragments
        if not self.has_objects:
            shapes = assemble_shapes(level, self._all_of(n_fragments), self.rules, cross)
            return replace(shapes, groups=read_groups(self.reader))
        every = self.manifests(self.ids) if self.identity else self.index.every
        chosen, bounds = self._numbered(level, every, self._chunk_rows(every))
        if once:
            chosen, bounds = self._without_repeats(chosen, bounds)
        loose = np.ones(n_fragments, bool)
        loose[chosen] = False
        chosen = np.concatenate([chosen, np.flatnonzero(loose)])
        shapes = assemble_shapes(level, FragmentSelection(chosen, bounds, every.ids), self.rules, cross)
        attributes = self.object_attributes(names, None)
        return replace(shapes, object_attributes=attributes, groups=read_groups(self.reader))

    def _without_repeats(
        self, fragments: NDArray[np.int64], bounds: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the fragments of objects, each only where it is named first.

        Lines keep their repeats: they are joined in the order of their vertices, and would be joined wrongly without some of them.
        """
        if self.rules.kind in SEQUENTIAL:
            return fragments, bounds
        first = np.zeros(len(fragments), bool)
        first[np.unique(fragments, return_index=True)[1]] = True
        return fragments[first], counts_to_offsets(first)[bounds]

    def _all_of(self, n_fragments: int) -> FragmentSelection:
        """Choose all fragments of a level without objects: each is a line, or all are one cloud, graph or mesh."""
        every = np.arange(n_fragments)
        if self.rules.kind in SEQUENTIAL:
            return FragmentSelection(every, np.arange(n_fragments + 1), every)
        ids = None if self.rules.kind == "point_cloud" else np.zeros(1, np.int64)
        return FragmentSelection(every, np.array([0, n_fragments]), ids)

    def box(
        self, low: NDArray[np.float64], high: NDArray[np.float64], names: Sequence[str] | None, *, whole: bool
    ) -> Shapes:
        """Return what lies in a box."""
        rows = self._chunks_in(low, high)
        if self.rules.kind == "point_cloud" and not self.has_objects:
            return self._points_in(rows, (low, high), names)
        if whole or self.rules.kind in ORDERED_KINDS:
            near = self.reader.load(rows, attribute_filter((OWNER_ATTRIBUTE,)), ("fragments",))
            owners = self._owners(near, rows)
            inside = _in_box(near.positions, low, high)
            ids = self._hit(near, owners, inside)
            shapes = self.take(ids, names) if self.has_objects else self._owned(rows, owners, names)
            if self.has_objects and whole:
                return shapes
            if whole:
                return _objects_in_box(shapes, low, high)
        else:
            near = self.reader.load(rows, attribute_filter((OWNER_ATTRIBUTE,)), ("fragments",))
            shapes = self._owned(rows, self._owners(near, rows), names)
        return clip_shapes(shapes, _in_box(shapes.positions, low, high))

    def _chunks_in(self, low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return which chunks may hold vertices of a box."""
        keys = self.reader.keys.keys
        edges = np.asarray(self.reader.chunk_shape)
        own = keys[:, keys.shape[1] - len(edges) :]
        return np.flatnonzero(((own >= np.floor(low / edges)) & (own <= np.floor(high / edges))).all(axis=1))

    def _points_in(
        self, rows: NDArray[np.int64], box: tuple[NDArray[np.float64], NDArray[np.float64]], names: Sequence[str] | None
    ) -> Shapes:
        """Return the points of a cloud without objects that lie in a box."""
        parts = () if self.reader.tiles else ("fragments",)
        level = self._loaded(rows, names, parts)
        if level.fragments is not None:
            shapes = assemble_shapes(level, self._all_of(level.fragments.n_fragments), self.rules)
            return clip_shapes(shapes, _in_box(shapes.positions, *box))
        kept = np.flatnonzero(_in_box(level.positions, *box))
        attributes = {name: attribute.take(kept) for name, attribute in level.vertex_attributes.items()}
        return Shapes("point_cloud", np.take(level.positions, kept, axis=0), vertex_attributes=attributes)

    def _owners(self, level: Level, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (fragment of the level at hand, object) for all of its fragments; `NO_OWNER` where they belong to none."""
        assert level.fragments is not None
        n_fragments = level.fragments.n_fragments
        every = np.arange(n_fragments)
        if not self.has_objects:
            return every, every if self.rules.kind in SEQUENTIAL else np.zeros(n_fragments, np.int64)
        if self.identity:
            return every, every
        named = level.fragment_attributes.get(OWNER_ATTRIBUTE)
        if named is not None and not (named.values == _SHARED).any():
            return every, named.values.astype(np.int64)
        chunk, blocks = self.index.by_chunk
        first, last = np.searchsorted(chunk, rows, side="left"), np.searchsorted(chunk, rows, side="right")
        near = take_manifests(blocks, concat_ranges(first, last - first))
        number, bounds = self._numbered(level, near, np.repeat(np.arange(len(rows)), last - first))
        ids = np.repeat(near.ids, np.diff(bounds))
        loose = np.setdiff1d(every, number)
        nobody = np.full(len(loose), NO_OWNER)
        return np.concatenate([number, loose]), np.concatenate([ids, nobody])

    def _hit(
        self, level: Level, owners: tuple[NDArray[np.int64], NDArray[np.int64]], inside: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Return the objects that have a vertex inside, by ascending id."""
        fragments = level.fragments
        assert fragments is not None
        local, counts = fragment_rows(fragments, owners[0])
        chunk = np.searchsorted(fragments.bounds, owners[0], side="right") - 1
        found = inside[local + np.repeat(level.bounds[chunk], counts)]
        hit = np.diff(counts_to_offsets(found)[counts_to_offsets(counts)]) > 0
        ids: NDArray[np.int64] = np.unique(owners[1][hit])
        return np.compress(ids != NO_OWNER, ids)

    def _owned(
        self, rows: NDArray[np.int64], owners: tuple[NDArray[np.int64], NDArray[np.int64]], names: Sequence[str] | None
    ) -> Shapes:
        """Return what some chunks hold, by object; vertices that belong to none come last."""
        level, cross = self.load(rows, names)
        fragments, ids = owners
        order = np.lexsort((fragments, ids.view(np.uint64)))  # NO_OWNER, as the greatest number, comes last
        fragments, ids = fragments[order], ids[order]
        owned = int(np.count_nonzero(ids != NO_OWNER))
        unique, first = np.unique(ids[:owned], return_index=True)
        kept, bounds = self._without_repeats(fragments, np.append(first, owned))
        shapes = assemble_shapes(level, FragmentSelection(kept, bounds, unique), self.rules, cross)
        if not self.has_objects:
            return shapes
        return replace(shapes, object_attributes=self.object_attributes(names, unique))


def _in_box(positions: NDArray[np.generic], low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Tell which positions lie in a box, both ends inclusive."""
    inside = np.ones(len(positions), bool)
    for axis in range(positions.shape[1]):
        values = positions[:, axis]
        inside &= (values >= low[axis]) & (values <= high[axis])
    return inside


def _objects_in_box(shapes: Shapes, low: NDArray[np.float64], high: NDArray[np.float64]) -> Shapes:
    """Return the objects that have a vertex in a box."""
    hits = np.diff(counts_to_offsets(_in_box(shapes.positions, low, high))[shapes.offsets]) > 0
    return clip_shapes(shapes, np.repeat(hits, shapes.vertex_counts))
