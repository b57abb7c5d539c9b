"""State shared by all checks of a geometry store: its files, summaries of its levels, and the problems found."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError
from raggedatlas.model.reports import Level as Severity
from raggedatlas.model.reports import Problem
from raggedatlas.vectors.geometry import Geometry
from raggedatlas.vectors.storage.codecs import Bytes
from raggedatlas.vectors.storage.zarr_reader import CellArray, ChunkArray, ChunkGroup, StoreFiles, node_attributes
from raggedatlas.vectors.validation.rules import DEPTH_OF, RULES

DAMAGE = (
    *(AtlasError, OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, IndexError),
    *(OverflowError, NotImplementedError, AssertionError, MemoryError, ArithmeticError),
)
"""Exceptions of readers and libraries for damaged metadata and bytes."""

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
class CheckLocation:
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

    def at(
        self, chunk: Sequence[int] | NDArray[np.int64] | None = None, object_id: int | None = None
    ) -> "CheckLocation":
        """Return the location of a chunk or object of this array."""
        key = None if chunk is None else tuple(int(part) for part in chunk)
        return CheckLocation(self.resolution, self.family, key, object_id)


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


@dataclass(slots=True)
class ValidationContext:
    """Validation of one store.

    Parameters
    ----------
    files : Files
        The store.
    depth : int
        Highest level of rules to check, 1 to 5.
    problems : list of PlacedProblem
        Problems found.
    layout : str
        ``"0.7"`` or ``"0.9"``.
    root : Geometry or None
        The root metadata; None if it cannot be parsed.
    levels : dict of int to Seen
        Summaries of the levels checked so far.
    nodes : dict of str to dict
        Every ``zarr.json`` read so far, by path.
    unread : set of Place
        Chunks that could not be read and are already reported.
    """

    files: StoreFiles
    depth: int
    problems: list[PlacedProblem] = field(default_factory=list)
    layout: str = "0.9"
    root: Geometry | None = None
    levels: dict[int, LevelSummary] = field(default_factory=dict)
    nodes: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    unread: set[CheckLocation] = field(default_factory=set)

    def report(self, rule: str, place: CheckLocation, message: str, severity: Severity | None = None) -> None:
        """Report a broken rule; `severity` is given if it is milder than that of the rule."""
        if DEPTH_OF[rule] > self.depth:
            return
        known = RULES[rule]
        self.problems.append(
            PlacedProblem(
                *(rule, severity or known.level, str(place), message, known.fix),
                *(place.resolution, place.family, place.chunk, place.object_id),
            )
        )

    @contextmanager
    def guarded(self, rule: str, place: CheckLocation) -> Iterator[None]:
        """Report exceptions of opening and decoding as a problem."""
        try:
            yield
        except DAMAGE as error:
            self.report(rule, place, self._said(error))

    def _said(self, error: BaseException) -> str:
        """Return the first sentence of an error, without the location."""
        if not isinstance(error, AtlasError):
            return f"it cannot be read ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})."
        text = str(error).replace(f"{self.files.root}/", "")
        return text.partition(" Restore it")[0]

    def node(self, place: CheckLocation) -> dict[str, Any] | None:
        """Return the ``zarr.json`` of a location, checked once to be Zarr v3; None if it is missing or unreadable."""
        path = place.path
        if path not in self.nodes:
            self.nodes[path] = None
            with self.guarded("V001", place):
                self.nodes[path] = self.files.node(path)
                for name in (".zattrs", ".zgroup", ".zarray"):
                    if self.files.read(f"{path}/{name}" if path else name) is not None:
                        self.report("V001", place, f"there is a Zarr v2 file {name}.")
        return self.nodes[path]

    def block(self, place: CheckLocation) -> dict[str, Any]:
        """Return the attributes of a location; empty if there are none."""
        node = self.node(place)
        with self.guarded("V001", place):
            return {} if node is None else node_attributes(node)
        return {}

    def children(self, place: CheckLocation) -> list[str]:
        """Return the names of the folders below a location; empty if they cannot be listed."""
        with self.guarded("V000", place):
            return self.files.children(place.path)
        return []

    def open(self, place: CheckLocation) -> ChunkArray | None:
        """Open a per-chunk array; None if it is missing or cannot be opened."""
        node = self.node(place)
        if node is None:
            return None
        kind = "group" if self.layout == "0.7" else "array"
        if node.get("node_type") != kind:
            self.report("V007", place, f"it is {node.get('node_type')!r}, but layout {self.layout} has {kind!r}.")
            return None
        with self.guarded("V000", place):
            if self.layout == "0.7":
                return ChunkGroup(self.files, place.path, node)
            return CellArray(self.files, place.path, node)
        return None

    def keys(self, family: ChunkArray, place: CheckLocation, n_parts: int) -> NDArray[np.int64]:
        """Return the chunks of an array; none if they cannot be read or have an unexpected number of parts."""
        none = np.zeros((0, n_parts), np.int64)
        with self.guarded("V009", place):
            keys = family.keys
            if len(keys) and keys.shape[1] != n_parts:
                self.report("V009", place, f"chunk keys have {keys.shape[1]} parts; expected {n_parts}.")
                return none
            return keys if len(keys) else none
        return none

    def read(self, family: ChunkArray, keys: NDArray[np.int64], place: CheckLocation) -> list[Bytes | None]:
        """Return the bytes of some chunks; report unreadable ones, and return None for them."""
        try:
            return family.read(keys)
        except DAMAGE:
            found: list[Bytes | None] = []
            for key in keys:
                found.append(None)
                self.unread.add(place.at(key))
                with self.guarded("V000", place.at(key)):
                    found[-1] = family.read(key[None])[0]
                    self.unread.discard(place.at(key))
            return found
