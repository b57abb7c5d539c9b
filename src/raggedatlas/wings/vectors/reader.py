"""Reader of geometry stores: all shapes, a box, objects or groups, on any level, with any attributes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raggedatlas.errors import CorruptError, NotFoundError, QueryError, SourceError
from raggedatlas.model.arguments import checked
from raggedatlas.store.location import Address, Location
from raggedatlas.store.untrusted import zarr_errors
from raggedatlas.wings.vectors.chunking import NO_OWNER, ORDERED_KINDS, OWNER_ATTRIBUTE
from raggedatlas.wings.vectors.geometry import CrossLinks, Geometry, Level, Objects, Root, parse_root
from raggedatlas.wings.vectors.shapes import (
    SEQUENTIAL,
    Attribute,
    Groups,
    Shapes,
    concat_ranges,
    counts_to_offsets,
    take_attributes,
)
from raggedatlas.wings.vectors.storage.assembly import FragmentReader, assemble_shapes, clip_shapes
from raggedatlas.wings.vectors.storage.codecs import expand_manifests, fragment_rows, take_manifests
from raggedatlas.wings.vectors.storage.cross_links import CrossLinkReader, level_deltas
from raggedatlas.wings.vectors.storage.level_reader import (
    LevelReader,
    ObjectIndex,
    attribute_filter,
    read_groups,
    read_table_attribute,
    read_tables,
)
from raggedatlas.wings.vectors.storage.zarr_reader import StoreFiles, node_attributes

_CHUNKS_AT_ONCE = 64

# Value of `OWNER_ATTRIBUTE` for a fragment of several objects, which only the object index names.
_SHARED = -2


class LevelQuery:
    """Queries on one level of an open store: objects and boxes."""

    def __init__(self, reader: LevelReader) -> None:
        self.reader, self.root, self.kind = reader, reader.root, reader.root.kind
        self.index = ObjectIndex(reader)
        # With the identity convention, object ids are the fragment numbers of the single chunk. An existing object index has
        # priority over the declared convention.
        self.identity = self.root.index_convention == "identity" and not self.index.is_there
        if self.identity and len(reader.keys.keys) > 1:
            raise CorruptError(f"{reader.where} has {len(reader.keys.keys)} chunks; the identity convention needs one.")
        self.crossings = CrossLinkReader(reader, None, 0)
        self._tables: dict[str, Attribute | None] = {}

    @property
    def has_objects(self) -> bool:
        """Whether the level has objects."""
        return self.identity or self.index.is_there

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """Ids of all objects, ascending."""
        if not self.identity:
            return self.index.ids
        fragments = self.reader.load(np.arange(len(self.reader.keys.keys)), parts=("fragments",)).fragments
        return np.arange(0 if fragments is None else fragments.n_fragments)

    def load(self, rows: NDArray[np.int64], names: Sequence[str] | None) -> tuple[Level, CrossLinks | None]:
        """Return some chunks, with links across them if the kind has its own links."""
        linked = self.kind not in SEQUENTIAL and self.kind != "point_cloud"
        parts = ("fragments", "links") if linked else ("fragments",)
        level = self._loaded(rows, names, parts)
        cross = self.crossings.read(level.chunks, attribute_filter(names)) if linked and len(rows) else None
        return level, cross

    def _loaded(self, rows: NDArray[np.int64], names: Sequence[str] | None, parts: Sequence[str]) -> Level:
        """Return some chunks, with the attribute that partitions them among the vertex attributes."""
        level, wanted = self.reader.load(rows, attribute_filter(names), parts), attribute_filter(names)
        lead = self.reader.read_partition_attribute(level.chunks, np.diff(level.bounds), wanted)
        return replace(level, vertex_attributes={**level.vertex_attributes, **lead}) if lead else level

    def object_attributes(self, names: Sequence[str] | None, ids: NDArray[np.int64] | None) -> dict[str, Attribute]:
        """Return the attributes of some objects, or of all."""
        wanted = attribute_filter(names)
        result = {}
        for name in filter(wanted, self.reader.attribute_names("object_attributes")):
            if name not in self._tables:
                self._tables[name] = read_table_attribute(self.reader, "object_attributes", name)
            attribute = self._tables[name]
            if attribute is None:
                continue
            if len(attribute.values) != len(self.ids):
                raise CorruptError(
                    f"{self.reader.where}/object_attributes/{name} has {len(attribute.values)} rows; "
                    f"expected {len(self.ids)}, one per object."
                )
            result[name] = (
                attribute if ids is None else attribute.take(ids if self.identity else self.index.rows_of(ids))
            )
        return result

    def manifests(self, ids: NDArray[np.int64]) -> Objects:
        """Return the manifests of some objects."""
        if not self.identity:
            return self.index.take(ids)
        bad = (ids < 0) | (ids >= len(self.ids))
        if bad.any():
            raise NotFoundError(
                f"Object {ids[bad][0]} does not exist in {self.reader.where}; it has {len(self.ids):,} objects."
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
        # Absent chunks stay -1; only blocks without fragments may refer to them.
        place = np.where(at >= 0, np.searchsorted(touched, at), -1)
        attributes = self.object_attributes(names, ids)
        # Links and Draco cells need complete chunks; otherwise only rows of the fragments are copied.
        if self.reader.is_draco or not (self.kind in SEQUENTIAL or self.kind == "point_cloud"):
            level, cross = self.load(touched, names)
            chosen, bounds = self._numbered(level, objects, place)
            shapes = assemble_shapes(level, self.root, chosen, bounds, ids, cross)
        else:
            chunks = FragmentReader(self.reader, self.reader.keys.keys[touched])
            limits = np.append(chunks.n_fragments, 0)[place]
            blocks, fragments, bounds = expand_manifests(objects, limits, self.reader.where)
            shapes = chunks.read(place[blocks], fragments, bounds, ids, attribute_filter(names))
        return replace(shapes, object_attributes=attributes)

    def _chunk_rows(self, objects: Objects) -> NDArray[np.int64]:
        """Return the row of the chunk that each block refers to; refuse missing chunks."""
        at = self.reader.keys.find(objects.chunks)
        bad = np.flatnonzero((at < 0) & (objects.counts > 0))
        if bad.size:
            raise CorruptError(
                f"{self.reader.where}/object_index refers to chunk {objects.chunks[bad[0]].tolist()}, which has no vertices."
            )
        return at

    def _numbered(
        self, level: Level, objects: Objects, place: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the fragments of objects as fragment numbers of the loaded level, and the bounds of each object.

        `place` is the row of each block's chunk in `level`, -1 if it is absent.
        """
        assert level.fragments is not None
        bounds = level.fragments.bounds
        limits = np.append(np.diff(bounds), 0)[place]
        blocks, fragments, owned = expand_manifests(objects, limits, self.reader.where)
        return bounds[place[blocks]] + fragments, owned

    def read(self, names: Sequence[str] | None, *, once: bool) -> Shapes:
        """Return all objects by ascending id, followed by the vertices that belong to no object.

        With `once`, a fragment shared by several objects is assigned to the first of them.
        """
        level, cross = self.load(np.arange(len(self.reader.keys.keys)), names)
        n_fragments = 0 if level.fragments is None else level.fragments.n_fragments
        if not self.has_objects:
            shapes = assemble_shapes(level, self.root, *self._all_of(n_fragments), cross)
            return replace(shapes, groups=read_groups(self.reader))
        every = self.manifests(self.ids) if self.identity else self.index.every
        chosen, bounds = self._numbered(level, every, self._chunk_rows(every))
        if once:
            chosen, bounds = self._without_repeats(chosen, bounds)
        # Appended after the last bound, where fragments belong to no object.
        loose = np.ones(n_fragments, bool)
        loose[chosen] = False
        chosen = np.concatenate([chosen, np.flatnonzero(loose)])
        shapes = assemble_shapes(level, self.root, chosen, bounds, every.ids, cross)
        attributes = self.object_attributes(names, None)
        return replace(shapes, object_attributes=attributes, groups=read_groups(self.reader))

    def _without_repeats(
        self, fragments: NDArray[np.int64], bounds: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the fragments of objects, each only at its first occurrence.

        Lines keep repeated fragments: they are assembled in vertex order, which would be wrong with some fragments
        missing.
        """
        if self.kind in SEQUENTIAL:
            return fragments, bounds
        first = np.zeros(len(fragments), bool)
        first[np.unique(fragments, return_index=True)[1]] = True
        return fragments[first], counts_to_offsets(first)[bounds]

    def _all_of(self, n_fragments: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]:
        """Return all fragments of a level without objects, as objects: each is a line, or all form one cloud, graph or mesh."""
        every = np.arange(n_fragments)
        if self.kind in SEQUENTIAL:
            return every, np.arange(n_fragments + 1), every
        return every, np.array([0, n_fragments]), None if self.kind == "point_cloud" else np.zeros(1, np.int64)

    def box(
        self, low: NDArray[np.float64], high: NDArray[np.float64], names: Sequence[str] | None, *, whole: bool
    ) -> Shapes:
        """Return the content of a box."""
        keys = self.reader.keys.keys
        edges = np.asarray(self.reader.chunk_shape)
        # The leading parts of keys are values of an attribute, not space.
        own = keys[:, keys.shape[1] - len(edges) :]
        rows = np.flatnonzero(((own >= np.floor(low / edges)) & (own <= np.floor(high / edges))).all(axis=1))
        if self.kind == "point_cloud" and not self.has_objects:
            # If fragments are the rows in order, points are found without them.
            level = self._loaded(rows, names, () if self.reader.tiles else ("fragments",))
            if level.fragments is not None:
                shapes = assemble_shapes(level, self.root, *self._all_of(level.fragments.n_fragments))
                return clip_shapes(shapes, _in_box(shapes.positions, low, high))
            kept = np.flatnonzero(_in_box(level.positions, low, high))
            attributes = take_attributes(level.vertex_attributes, kept)
            return Shapes("point_cloud", np.take(level.positions, kept, axis=0), vertex_attributes=attributes)
        near = self.reader.load(rows, attribute_filter((OWNER_ATTRIBUTE,)), ("fragments",))
        owners = self._owners(near, rows)
        if self.has_objects and (whole or self.kind in ORDERED_KINDS):
            shapes = self.take(self._hit(near, owners, _in_box(near.positions, low, high)), names)
            # Just the objects that were hit, while `_owned` returns all in these chunks.
            if whole:
                return shapes
        else:
            shapes = self._owned(rows, owners, names)
        inside = _in_box(shapes.positions, low, high)
        if whole:
            hits = np.diff(counts_to_offsets(inside)[shapes.offsets]) > 0
            inside = np.repeat(hits, shapes.vertex_counts)
        return clip_shapes(shapes, inside)

    def _owners(self, level: Level, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (fragment of the loaded level, object) for all of its fragments; `NO_OWNER` if a fragment has no object."""
        assert level.fragments is not None
        n_fragments = level.fragments.n_fragments
        every = np.arange(n_fragments)
        if not self.has_objects:
            return every, every if self.kind in SEQUENTIAL else np.zeros(n_fragments, np.int64)
        if self.identity:
            return every, every
        named = level.fragment_attributes.get(OWNER_ATTRIBUTE)
        if named is not None and not (named.values == _SHARED).any():
            return every, named.values.astype(np.int64)
        chunk, blocks = self.index.by_chunk
        # Blocks are sorted by chunk, and so found by bisection.
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
        hit_rows = inside[local + np.repeat(level.bounds[chunk], counts)]
        hit = np.diff(counts_to_offsets(hit_rows)[counts_to_offsets(counts)]) > 0
        ids: NDArray[np.int64] = np.unique(owners[1][hit])
        return np.compress(ids != NO_OWNER, ids)

    def _owned(
        self, rows: NDArray[np.int64], owners: tuple[NDArray[np.int64], NDArray[np.int64]], names: Sequence[str] | None
    ) -> Shapes:
        """Return the content of some chunks by object; vertices without an object come last."""
        level, cross = self.load(rows, names)
        fragments, ids = owners
        order = np.lexsort((fragments, ids.view(np.uint64)))  # as unsigned, NO_OWNER sorts last
        fragments, ids = fragments[order], ids[order]
        owned = int(np.count_nonzero(ids != NO_OWNER))
        unique, first = np.unique(ids[:owned], return_index=True)
        kept, bounds = self._without_repeats(fragments, np.append(first, owned))
        shapes = assemble_shapes(level, self.root, kept, bounds, unique, cross)
        if not self.has_objects:
            return shapes
        return replace(shapes, object_attributes=self.object_attributes(names, unique))


def _in_box(positions: NDArray[np.generic], low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which positions are in a box, both ends inclusive."""
    inside = np.ones(len(positions), bool)
    for axis in range(positions.shape[1]):
        values = positions[:, axis]
        inside &= (values >= low[axis]) & (values <= high[axis])
    return inside


@checked
class VectorStore:
    """An open geometry store. Metadata is read once; local shards are memory-mapped.

    Thread-safe. Pickling keeps the location only; the store is opened again on unpickling.

    Every reading method takes ``level`` (0 is the finest), or ``budget`` instead: the finest level with at most that many vertices
    (the coarsest, if none is small enough); and ``attributes``: names from any family, None for all.

    Parameters
    ----------
    location : Location
        Location of the store.
    layout : str or None
        The only layout accepted; None: both.

    Examples
    --------
    >>> import tempfile
    >>> from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
    >>> from raggedatlas.wings.vectors.writer import write
    >>> lines = Shapes("polyline", np.array([[0.0, 0], [9, 0], [0, 5], [1, 5]]), offsets=np.array([0, 2, 4]))
    >>> folder = tempfile.mkdtemp() + "/lines"
    >>> write(make_geometry(lines, ChunkingOptions(chunk_shape=(4, 4))), folder)
    >>> store = open_vectors(folder)
    >>> store.objects([1]).positions.tolist()
    [[0.0, 5.0], [1.0, 5.0]]
    >>> store.box([8, -1], [10, 1]).ids.tolist()
    [0]
    """

    def __init__(self, location: Location, layout: str | None = None) -> None:
        self.location = location
        self._asked = layout
        self.files = StoreFiles(location)
        node = self.files.node("")
        if node is None:
            raise NotFoundError(f"There is no geometry store at {location.uri}: it has no zarr.json.")
        self._root: Root = parse_root(node_attributes(node), location.uri)
        if layout is not None and layout != self._root.layout:
            raise SourceError(f"{location.uri} has layout {self._root.layout}; {layout} was requested.")
        numbers = self.files.levels()
        if numbers != list(range(len(numbers))) or not numbers:
            raise CorruptError(f"{location.uri} has the levels {numbers}; expected 0, 1, 2, ...")
        self._levels: dict[int, LevelQuery] = {}
        self.n_levels = len(numbers)
        # Arrays of another version are refused on opening, not on the first read.
        self._open(0)

    def __repr__(self) -> str:
        """Return a one-line summary."""
        types = ", ".join(self.geometry.types)
        return f"VectorStore({self.location.uri!r}, {types}, layout {self.layout}, {self.n_levels} levels)"

    def __reduce__(self) -> tuple[type["VectorStore"], tuple[Location, str | None]]:
        """Pickle the location only: workers map the shards themselves."""
        return type(self), (self.location, self._asked)

    def _repr_html_(self) -> str:
        from raggedatlas.wings.vectors.inspection import inspect

        return inspect(self.location)._repr_html_()

    @property
    def geometry(self) -> Geometry:
        """The root metadata: types, axes, chunks, bounds and conventions, without levels."""
        return self._root.geometry

    @property
    def layout(self) -> str:
        """``"0.7"`` or ``"0.9"``."""
        return self._root.layout

    @property
    def version(self) -> str:
        """``zv_version`` as stored."""
        return self._root.version

    @property
    def kind(self) -> str:
        """The geometry type; the first if there are several; unknown types are read as graphs."""
        return self.geometry.kind

    def _open(self, number: int) -> LevelQuery:
        """Return a level; it is opened once."""
        if number not in self._levels:
            if not 0 <= number < self.n_levels:
                raise QueryError(
                    f"Level {number} does not exist; {self.location.uri} has levels 0 to {self.n_levels - 1}."
                )
            with zarr_errors(f"{self.location.uri}/{number}"):
                self._levels[number] = LevelQuery(LevelReader(self.files, self.geometry, self.layout, number))
        return self._levels[number]

    def _choose(self, level: int | None, budget: int | None) -> LevelQuery:
        """Return the requested level, by number or by a budget of vertices."""
        if budget is None:
            return self._open(0 if level is None else level)
        if level is not None:
            raise QueryError("Pass either level or budget, not both.")
        for number in range(self.n_levels):
            if self._open(number).reader.n_vertices <= budget:
                return self._open(number)
        return self._open(self.n_levels - 1)

    @property
    def has_objects(self) -> bool:
        """Whether the finest level has objects."""
        return self._open(0).has_objects

    def point_blocks(self) -> Iterator[Shapes]:
        """Yield the points of the finest level of a point cloud, chunk by chunk, some chunks at once."""
        query = self._open(0)
        n = len(query.reader.keys.keys)
        for start in range(0, max(n, 1), _CHUNKS_AT_ONCE):
            with zarr_errors(self.location.uri):
                level, _ = query.load(np.arange(start, min(start + _CHUNKS_AT_ONCE, n)), None)
            yield Shapes("point_cloud", level.positions, vertex_attributes=level.vertex_attributes)

    def vertex_counts(self) -> list[int]:
        """Return the number of vertices of each level, from its metadata."""
        return [self._open(number).reader.n_vertices for number in range(self.n_levels)]

    def read(
        self,
        *,
        level: int | None = None,
        budget: int | None = None,
        attributes: Sequence[str] | None = None,
        shared: Literal["once", "each"] = "once",
    ) -> Shapes:
        """Return all of a level: objects by ascending id, their vertices in traversal order.

        Parameters
        ----------
        level, budget : int or None
            The level, or the maximum number of vertices.
        attributes : sequence of str or None
            Names from any family; None: all.
        shared : {"once", "each"}
            Fragments shared by several objects: once, with the first object, or with each of them, as `objects` returns them. Lines,
            polylines and streamlines always have all of their vertices.

        Raises
        ------
        QueryError
            If `shared` has another value.
        """
        if shared not in ("once", "each"):
            raise QueryError(f"read takes shared='once' or 'each', not {shared!r}.")
        with zarr_errors(self.location.uri):
            return self._choose(level, budget).read(attributes, once=shared == "once")

    def box(
        self,
        lo: ArrayLike,
        hi: ArrayLike,
        *,
        level: int | None = None,
        budget: int | None = None,
        attributes: Sequence[str] | None = None,
        whole: bool | None = None,
    ) -> Shapes:
        """Return the content of a box, both ends inclusive; only chunks that intersect it are read.

        Parameters
        ----------
        lo, hi : (D,) floats
            Corners in world units.
        level, budget : int or None
            The level, or the maximum number of vertices.
        attributes : sequence of str or None
            Names from any family; None: all.
        whole : bool or None
            True: complete objects that have a vertex in the box. False: the vertices in the box, and the links between them (for
            lines too, whose links are then explicit). None: complete objects for lines, polylines, streamlines and skeletons, vertices
            for points, graphs and meshes.

        Raises
        ------
        QueryError
            If a corner does not have D axes or has a NaN, or the corners are swapped. Infinite corners are valid.
        """
        n_dims = self.geometry.n_dims
        try:
            low, high = np.asarray(lo, np.float64), np.asarray(hi, np.float64)
        except (TypeError, ValueError) as error:
            raise QueryError(f"The corners of a box are {n_dims} numbers each: {error}.") from error
        if (
            low.shape != (n_dims,)
            or high.shape != (n_dims,)
            or np.isnan(low).any()
            or np.isnan(high).any()
            or (low > high).any()
        ):
            raise QueryError(
                f"A box from {low.tolist()} to {high.tolist()} is invalid on {n_dims} axes; expected two corners, the lower one first."
            )
        entire = self.kind in ORDERED_KINDS if whole is None else whole
        with zarr_errors(self.location.uri):
            return self._choose(level, budget).box(low, high, attributes, whole=entire)

    def objects(
        self,
        ids: Iterable[int],
        *,
        level: int | None = None,
        budget: int | None = None,
        attributes: Sequence[str] | None = None,
    ) -> Shapes:
        """Return objects by id, in the given order; one pass over the chunks that hold them.

        Parameters
        ----------
        ids : iterable of int
            Unique ids.
        level, budget, attributes
            As in `read`.

        Raises
        ------
        NotFoundError
            If an object does not exist, or there are no objects.
        """
        opened = self._choose(level, budget)
        requested = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
        if requested.ndim != 1 or (requested.size and requested.dtype.kind not in "iu"):
            raise QueryError(f"Object ids are {requested.dtype} of shape {requested.shape}; expected integers.")
        if not opened.has_objects:
            raise NotFoundError(f"{self.location.uri} has no objects; read all of it, or a box.")
        with zarr_errors(self.location.uri):
            return opened.take(requested.astype(np.int64), attributes)

    def group(
        self,
        group: int | str,
        *,
        level: int | None = None,
        budget: int | None = None,
        attributes: Sequence[str] | None = None,
    ) -> Shapes:
        """Return the objects of a group, given by its number or its value of the group attribute ``name``.

        Raises
        ------
        NotFoundError
            If the group does not exist.
        """
        opened = self._choose(level, budget)
        with zarr_errors(self.location.uri):
            groups = read_groups(opened.reader)
            numbers: list[int] = []
            if groups is not None and isinstance(group, str):
                names = groups.attributes.get("name")
                numbers = [] if names is None else np.flatnonzero(names.values.astype(str) == group).tolist()
            elif groups is not None and not isinstance(group, str) and 0 <= group < groups.n_groups:
                numbers = [int(group)]
            if groups is None or not numbers:
                raise NotFoundError(f"Group {group!r} does not exist in {opened.reader.where}.")
            members = groups.members(numbers[0])
            # Groups may repeat ids, but ids of shapes are unique; the order of the group is kept.
            _, first = np.unique(members, return_index=True)
            return opened.take(members[np.sort(first)], attributes)

    def load(self) -> Geometry:
        """Return the complete store with every level and array, as `write` takes it."""
        levels = []
        with zarr_errors(self.location.uri):
            for number in range(self.n_levels):
                opened = self._open(number)
                reader = opened.reader
                crossing = [self._crossing(number, delta).read() for delta in level_deltas(reader)]
                level = replace(
                    reader.load(np.arange(len(reader.keys.keys))),
                    cross_links=tuple(links for links in crossing if links is not None),
                    objects=opened.index.every if opened.index.is_there else None,
                    groups=read_groups(reader),
                    object_attributes=read_tables(reader, "object_attributes"),
                )
                levels.append(level)
        return replace(self.geometry, levels=tuple(levels))

    def _crossing(self, number: int, delta: int) -> CrossLinkReader:
        """Return the links from one level to another."""
        # Links to a level that does not exist (V058) are read in the grid of this level.
        target = self._open(number + delta).reader if 0 <= number + delta < self.n_levels else None
        return CrossLinkReader(self._open(number).reader, target, delta)

    def cross_links(self, delta: int, *, level: int = 0) -> CrossLinks | None:
        """Return the links from a level to the one `delta` levels away, or None if there are none."""
        with zarr_errors(self.location.uri):
            return self._crossing(level, delta).read()

    def object_ids(self, level: int = 0) -> NDArray[np.int64]:
        """Return the ids of all objects, ascending, (B,) int64."""
        opened = self._open(level)
        with zarr_errors(self.location.uri):
            return opened.ids if opened.has_objects else np.zeros(0, np.int64)

    def object_attributes(self, level: int = 0) -> Mapping[str, Attribute]:
        """Return the attributes of all objects."""
        with zarr_errors(self.location.uri):
            return self._open(level).object_attributes(None, None)

    def groups(self, level: int = 0) -> Groups | None:
        """Return the groups of a level with their attributes."""
        with zarr_errors(self.location.uri):
            return read_groups(self._open(level).reader)


@checked
def open_vectors(location: Address, *, layout: str | None = None) -> VectorStore:
    """Open a geometry store of either layout.

    Parameters
    ----------
    location : Location, str or path
        The store.
    layout : str or None
        ``"0.7"`` or ``"0.9"`` to refuse the other one; None: read both.

    Raises
    ------
    NotFoundError
        If there is no geometry store at the location.
    SourceError
        If its version is unsupported, it mixes two versions, or it requires an unknown capability.
    CorruptError
        If its metadata is inconsistent.

    References
    ----------
    zarr-vectors §7.1 to §7.11 (core arrays).
    """
    return VectorStore(Location.of(location), layout)
