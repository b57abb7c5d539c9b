"""State shared by all checks of a geometry store: its files, summaries of its levels, and the problems found."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError
from raggedatlas.model.validation import DAMAGE, Checker, Level, Problem, Rule
from raggedatlas.vectors.geometry import Geometry
from raggedatlas.vectors.storage.codecs import EMPTY, Bytes
from raggedatlas.vectors.storage.zarr_reader import (
    CellArray,
    ChunkArray,
    ChunkGroup,
    KeyLookup,
    StoreFiles,
    node_attributes,
)
from raggedatlas.vectors.validation.rules import DEPTH_OF, RULES

STEP = 64
"""Number of chunks read at once."""

Key = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacedProblem(Problem):
    """A rule broken at one location of a geometry store.

    Parameters
    ----------
    rule, level, path, message, fix
        As for any `Problem`; `path` describes the location in words.
    resolution : int or None
        The resolution level; None: the root.
    family : str
        The array of that level, ``""`` for the level itself.
    chunk : tuple of int or None
        Key of the chunk.
    object_id : int or None
        Id of the object.
    """

    resolution: int | None = None
    family: str = ""
    chunk: Key | None = None
    object_id: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a check: a level, an array of it, and a chunk or an object in the array."""

    resolution: int | None = None
    family: str = ""
    chunk: Key | None = None
    object_id: int | None = None

    @property
    def path(self) -> str:
        """Path of the array below the root."""
        return "/".join(part for part in ("" if self.resolution is None else str(self.resolution), self.family) if part)

    def __str__(self) -> str:
        """Describe the location in words."""
        words = [self.path]
        if self.chunk is not None:
            words.append("chunk " + ".".join(map(str, self.chunk)))
        if self.object_id is not None:
            words.append(f"object {self.object_id}")
        return ", ".join(word for word in words if word)

    def at(self, chunk: Sequence[int] | NDArray[np.int64] | None = None, object_id: int | None = None) -> "Place":
        """Return the location of a chunk or object of this array."""
        key = None if chunk is None else tuple(int(part) for part in chunk)
        return Place(self.resolution, self.family, key, object_id)


def batches(keys: NDArray[np.int64]) -> Iterator[slice]:
    """Yield slices of `STEP` chunks."""
    for start in range(0, len(keys), STEP):
        yield slice(start, min(start + STEP, len(keys)))


@dataclass(slots=True)
class LevelSummary:
    """Summary of one level after its chunks were checked; -1 for unknown counts.

    Parameters
    ----------
    number : int
        Number of the level.
    facts : dict
        Attributes of its group.
    keys : (C, K) int64
        Its chunks.
    vertices, fragments, links : (C,) int64
        Counts of each chunk.
    widest : int
        Maximum number of vertices of a fragment.
    ids : (B,) int64 or None
        Ids of its objects.
    n_groups : int
        Number of groups.
    """

    number: int
    facts: dict[str, Any]
    keys: NDArray[np.int64]
    vertices: NDArray[np.int64]
    fragments: NDArray[np.int64]
    links: NDArray[np.int64]
    widest: int = 0
    ids: NDArray[np.int64] | None = None
    n_groups: int = 0


@dataclass
class StoreChecker(Checker[Place]):
    """Checker of one geometry store.

    Parameters
    ----------
    files : StoreFiles
        The store.
    depth : int
        Highest level of rules to check, 1 to 5.
    layout : str
        ``"0.7"`` or ``"0.9"``.
    root : Geometry or None
        The root metadata; None if it cannot be parsed.
    levels : dict of int to LevelSummary
        Summaries of the levels checked so far.
    nodes : dict of str to dict
        Every ``zarr.json`` read so far, by path.
    unread : set of Place
        Chunks that could not be read and are already reported.
    """

    rules: ClassVar[Mapping[str, Rule]] = RULES
    damage: ClassVar[str] = "V000"

    files: StoreFiles
    depth: int
    layout: str = "0.9"
    root: Geometry | None = None
    levels: dict[int, LevelSummary] = field(default_factory=dict)
    nodes: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    unread: set[Place] = field(default_factory=set)

    def report(self, rule: str, place: Place, message: str, level: Level | None = None, fix: str = "") -> None:
        """Report a broken rule, unless it belongs to a level of validation that was not requested."""
        if DEPTH_OF[rule] <= self.depth:
            super().report(rule, place, message, level, fix)
            # The base class appends a plain `Problem`; it is replaced by one with its place.
            problem = asdict(self.problems.pop())
            self.problems.append(PlacedProblem(**problem, **asdict(place)))

    def reason(self, error: AtlasError) -> str:
        """Return the message of an error without the location and the advice to restore the store."""
        return str(error).replace(f"{self.files.root}/", "").partition(" Restore it")[0]

    def node(self, place: Place) -> dict[str, Any] | None:
        """Return the ``zarr.json`` of a location, checked once to be Zarr v3; None if it is missing or unreadable."""
        path = place.path
        if path not in self.nodes:
            # Set first: after a failure it stays None, and the file is neither read nor reported again.
            self.nodes[path] = None
            with self.guarded(place, "V001"):
                self.nodes[path] = self.files.node(path)
                for name in (".zattrs", ".zgroup", ".zarray"):
                    if self.files.read(f"{path}/{name}" if path else name) is not None:
                        self.report("V001", place, f"there is a Zarr v2 file {name}.")
        return self.nodes[path]

    def block(self, place: Place) -> dict[str, Any]:
        """Return the attributes of a location; empty if there are none."""
        node = self.node(place)
        with self.guarded(place, "V001"):
            return {} if node is None else node_attributes(node)
        return {}

    def children(self, place: Place) -> list[str]:
        """Return the names of the folders below a location; empty if they cannot be listed."""
        with self.guarded(place):
            return self.files.children(place.path)
        return []

    def open(self, place: Place) -> ChunkArray | None:
        """Open a per-chunk array; None if it is missing or cannot be opened."""
        node = self.node(place)
        if node is None:
            return None
        # Opened as a group of layout 0.7, an array would have no chunks, without an error.
        kind = "group" if self.layout == "0.7" else "array"
        if node.get("node_type") != kind:
            self.report("V007", place, f"it is {node.get('node_type')!r}, but layout {self.layout} has {kind!r}.")
            return None
        with self.guarded(place):
            if self.layout == "0.7":
                return ChunkGroup(self.files, place.path, node)
            return CellArray(self.files, place.path, node)
        return None

    def keys(self, array: ChunkArray, place: Place, n_parts: int) -> NDArray[np.int64]:
        """Return the chunks of an array; none if they cannot be read or have an unexpected number of parts."""
        none = np.zeros((0, n_parts), np.int64)
        with self.guarded(place, "V009"):
            keys = array.keys
            if len(keys) and keys.shape[1] != n_parts:
                self.report("V009", place, f"chunk keys have {keys.shape[1]} parts; expected {n_parts}.")
                return none
            # A table without keys may have no columns; `none` has the expected number.
            return keys if len(keys) else none
        return none

    def check_own_keys(
        self, array: ChunkArray, place: Place, known: NDArray[np.int64], rule: str, message: str
    ) -> None:
        """Report the chunks of an array that are not among the known ones."""
        own = self.keys(array, place, known.shape[1])
        for key in own[KeyLookup(known).find(own) < 0] if len(own) else ():
            self.report(rule, place.at(key), message)

    def blobs(self, array: ChunkArray, keys: NDArray[np.int64], place: Place) -> Iterator[tuple[int, Place, Bytes]]:
        """Yield number, place and bytes (none if missing) of each readable chunk, a few chunks at a time."""
        for part in batches(keys):
            for i, blob in enumerate(self.read(array, keys[part], place), part.start):
                own = place.at(keys[i])
                if own not in self.unread:
                    yield i, own, blob

    def read(self, array: ChunkArray, keys: NDArray[np.int64], place: Place) -> list[Bytes]:
        """Return the bytes of some chunks; report unreadable ones, and return no bytes for them."""
        try:
            return array.read(keys)
        # One damaged chunk fails all of them; read one by one, only that chunk is reported.
        except DAMAGE:
            blobs: list[Bytes] = []
            for key in keys:
                blobs.append(EMPTY)
                # Marked first: `guarded` ends the block at an error, so only a successful read removes the mark.
                self.unread.add(place.at(key))
                with self.guarded(place.at(key)):
                    blobs[-1] = array.read(key[None])[0]
                    self.unread.discard(place.at(key))
            return blobs
