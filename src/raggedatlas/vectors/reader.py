"""Reading a geometry store: whole, by a box, by object, by group; on any level; any of its attributes."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raggedatlas.errors import CorruptError, NotFoundError, QueryError, SourceError
from raggedatlas.model.arguments import checked
from raggedatlas.store.location import Location
from raggedatlas.vectors.assembly import LinkRules
from raggedatlas.vectors.cross_links import CrossLinkReader, level_deltas
from raggedatlas.vectors.geometry import CrossLinks, Geometry
from raggedatlas.vectors.level_query import LevelQuery
from raggedatlas.vectors.level_reader import LevelReader
from raggedatlas.vectors.metadata import Root, parse_root, with_levels
from raggedatlas.vectors.object_index import read_groups, read_tables
from raggedatlas.vectors.shapes import KINDS, SEQUENTIAL, Attribute, Groups, Shapes
from raggedatlas.vectors.store_files import StoreFiles, node_attributes

_WHOLE = (*SEQUENTIAL, "skeleton")


@checked
class VectorStore:
    """An open geometry store. Metadata are read once; local shards are memory-mapped.

    Many threads may read at once. Pickled, it is its place, which is opened again.

    Every call that reads takes ``level`` (0 is the finest), or ``budget`` instead: the finest level with at most so many vertices
    (the coarsest, if none has so few); and ``attributes``: names of any family, None for all.

    Parameters
    ----------
    location : Location
        Where it lies.
    layout : str or None
        Refuse any other layout than this; None: read both.

    Examples
    --------
    >>> import tempfile
    >>> from raggedatlas.vectors.builder import ChunkingOptions, make_geometry
    >>> from raggedatlas.vectors.writer import write
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
            raise SourceError(f"{location.uri} is of layout {self._root.layout}; {layout} was asked for.")
        numbers = sorted(int(name) for name in self.files.children("") if name.isdigit())
        if numbers != list(range(len(numbers))) or not numbers:
            raise CorruptError(f"{location.uri} has the levels {numbers}; expected 0, 1, 2, ...")
        self._levels: dict[int, LevelQuery] = {}
        self.n_levels = len(numbers)
        self._open(0)

    def __repr__(self) -> str:
        """Say in one line what it is."""
        types = ", ".join(self.geometry.types)
        return f"VectorStore({self.location.uri!r}, {types}, layout {self.layout}, {self.n_levels} levels)"

    def __reduce__(self) -> tuple[type["VectorStore"], tuple[Location, str | None]]:
        """Pickle the place, not what is open: workers map shards themselves."""
        return type(self), (self.location, self._asked)

    def _repr_html_(self) -> str:
        from raggedatlas.vectors.inspection import inspect

        return inspect(self.location)._repr_html_()

    @property
    def geometry(self) -> Geometry:
        """What the root says: types, axes, chunks, bounds and conventions, without levels."""
        return self._root.geometry

    @property
    def layout(self) -> str:
        """``"0.7"`` or ``"0.9"``."""
        return self._root.layout

    @property
    def version(self) -> str:
        """``zv_version`` as it stands."""
        return self._root.version

    @property
    def kind(self) -> str:
        """The geometry type; the first, if there are several; an unknown one is read as a graph."""
        kind = self.geometry.types[0] if self.geometry.types else "point_cloud"
        return kind if kind in KINDS else "graph"

    def _open(self, number: int) -> LevelQuery:
        """Return a level, opened once."""
        if number not in self._levels:
            if not 0 <= number < self.n_levels:
                raise QueryError(
                    f"There is no level {number}; {self.location.uri} has levels 0 to {self.n_levels - 1}."
                )
            root = self.geometry
            reader = LevelReader(self.files, root, self.layout, number)
            rules = LinkRules(self.kind, root.links_convention, root.cross_chunk)
            self._levels[number] = LevelQuery(reader, rules, identity=root.index_convention == "identity")
        return self._levels[number]

    def _choose(self, level: int | None, budget: int | None) -> LevelQuery:
        """Return the level that is asked for, by number or by a budget of vertices."""
        if budget is None:
            return self._open(0 if level is None else level)
        if level is not None:
            raise QueryError("Give a level or a budget of vertices, not both.")
        for number in range(self.n_levels):
            if self._open(number).reader.n_vertices <= budget:
                return self._open(number)
        return self._open(self.n_levels - 1)

    def vertex_counts(self) -> list[int]:
        """Return how many vertices each level has, by its metadata."""
        return [self._open(number).reader.n_vertices for number in range(self.n_levels)]

    def read(
        self,
        *,
        level: int | None = None,
        budget: int | None = None,
        attributes: Sequence[str] | None = None,
        shared: Literal["once", "each"] = "once",
    ) -> Shapes:
        """Return all of a level: objects by ascending id, their vertices in order of traversal.

        Parameters
        ----------
        level, budget : int or None
            Which level, or how many vertices at most.
        attributes : sequence of str or None
            Names of any family; None: all.
        shared : {"once", "each"}
            Fragments that several objects share: once, with the first of them, or with each of them, as `objects` gives them. Lines,
            polylines and streamlines always have all of their vertices.

        Raises
        ------
        QueryError
            If `shared` is neither.
        """
        if shared not in ("once", "each"):
            raise QueryError(f"read takes shared='once' or 'each', not {shared!r}.")
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
        """Return what lies in a box, both ends inclusive; only chunks that meet it are read.

        Parameters
        ----------
        lo, hi : (D,) floats
            Corners in world units.
        level, budget : int or None
            Which level, or how many vertices at most.
        attributes : sequence of str or None
            Names of any family; None: all.
        whole : bool or None
            True: whole objects that have a vertex in the box. False: the vertices in the box, and the links between them (also of
            lines, whose links are then given). None: whole objects for lines, polylines, streamlines and skeletons, vertices for
            points, graphs and meshes.

        Raises
        ------
        QueryError
            If the corners are not finite, not of D axes, or crossed.
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
                f"A box from {low.tolist()} to {high.tolist()} is none on {n_dims} axes; expected two corners, the least first."
            )
        entire = self.kind in _WHOLE if whole is None else whole
        return self._choose(level, budget).box(low, high, attributes, whole=entire)

    def objects(
        self,
        ids: Iterable[int],
        *,
        level: int | None = None,
        budget: int | None = None,
        attributes: Sequence[str] | None = None,
    ) -> Shapes:
        """Return objects by id, in the asked order; one pass over the chunks that hold them.

        Parameters
        ----------
        ids : iterable of int
            Each once.
        level, budget, attributes
            As in `read`.

        Raises
        ------
        NotFoundError
            If there is no such object, or there are no objects.
        """
        opened = self._choose(level, budget)
        asked = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
        if asked.ndim != 1 or (asked.size and asked.dtype.kind not in "iu"):
            raise QueryError(
                f"Objects are asked for by {asked.dtype} of the shape {asked.shape}; expected whole numbers."
            )
        if not opened.has_objects:
            raise NotFoundError(f"{self.location.uri} has no objects; read it whole or by a box.")
        return opened.take(asked.astype(np.int64), attributes)

    def group(
        self,
        group: int | str,
        *,
        level: int | None = None,
        budget: int | None = None,
        attributes: Sequence[str] | None = None,
    ) -> Shapes:
        """Return the objects of a group, by its number or by its value of the group attribute ``name``.

        Raises
        ------
        NotFoundError
            If there is no such group.
        """
        opened = self._choose(level, budget)
        groups = read_groups(opened.reader)
        number = _group_number(groups, group)
        if groups is None or number is None:
            raise NotFoundError(f"There is no group {group!r} in {opened.reader.where}.")
        members = groups.members(number)
        _, first = np.unique(members, return_index=True)
        return opened.take(members[np.sort(first)], attributes)

    def load(self) -> Geometry:
        """Return the whole store as it is cut, every level and array: what `write` takes."""
        made = []
        for number in range(self.n_levels):
            opened = self._open(number)
            reader = opened.reader
            level = reader.load(np.arange(len(reader.keys.keys)))
            crossing = [self._crossing(number, delta).read() for delta in level_deltas(reader)]
            made.append(
                replace(
                    level,
                    cross_links=tuple(links for links in crossing if links is not None),
                    objects=opened.index.every if opened.index.is_there else None,
                    groups=read_groups(reader),
                    object_attributes=read_tables(reader, "object_attributes"),
                )
            )
        return with_levels(self._root, made)

    def _crossing(self, number: int, delta: int) -> CrossLinkReader:
        """Return the links from one level to another."""
        target = self._open(number + delta).reader if 0 <= number + delta < self.n_levels else None
        return CrossLinkReader(self._open(number).reader, target, delta)

    def cross_links(self, delta: int, *, level: int = 0) -> CrossLinks | None:
        """Return the links from a level to the one `delta` further, or None where there are none."""
        return self._crossing(level, delta).read()

    def object_ids(self, level: int = 0) -> NDArray[np.int64]:
        """Return the ids of all objects, ascending, (B,) int64."""
        opened = self._open(level)
        return opened.ids if opened.has_objects else np.zeros(0, np.int64)

    def object_attributes(self, level: int = 0) -> Mapping[str, Attribute]:
        """Return the attributes of all objects."""
        return self._open(level).object_attributes(None, None)

    def groups(self, level: int = 0) -> Groups | None:
        """Return the groups of a level with their attributes."""
        return read_groups(self._open(level).reader)


def _group_number(groups: Groups | None, group: int | str) -> int | None:
    """Return the number of a group that is there."""
    if groups is None:
        return None
    if isinstance(group, str):
        names = groups.attributes.get("name")
        found = [] if names is None else np.flatnonzero(names.values.astype(str) == group).tolist()
        return found[0] if found else None
    return int(group) if 0 <= group < groups.n_groups else None


@checked
def open_vectors(location: Location | str | os.PathLike[str], *, layout: str | None = None) -> VectorStore:
    """Open a geometry store of either layout.

    Parameters
    ----------
    location : Location, str or path
        The store.
    layout : str or None
        ``"0.7"`` or ``"0.9"`` to refuse the other; None: read both.

    Raises
    ------
    NotFoundError
        If there is no geometry store.
    SourceError
        If it is of a generation that is not read, mixes two, or requires a capability that is unknown.
    CorruptError
        If its metadata do not hold together.
    """
    return VectorStore(Location.of(location), layout)
