"""What every check of a geometry store shares: its files, what is known of its levels, and the list of problems."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError
from raggedatlas.model.problems import Level as Severity
from raggedatlas.model.problems import Problem
from raggedatlas.vectors.geometry import Geometry
from raggedatlas.vectors.storage.codecs import Bytes
from raggedatlas.vectors.storage.zarr_reader import CellArray, ChunkArray, ChunkGroup, StoreFiles, node_attributes
from raggedatlas.vectors.validation.rules import DEPTH_OF, RULES

DAMAGE = (
    *(AtlasError, OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, IndexError),
    *(OverflowError, NotImplementedError, AssertionError, MemoryError, ArithmeticError),
)
"""What readers and libraries raise on damaged metadata and bytes."""

STEP = 64
"""How many chunks are read at once."""

Key = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacedProblem(Problem):
    """One rule broken in one place of a geometry store.

    Parameters
    ----------
    rule, level, path, message, mend
        As of any `Problem`; `path` says the place in words.
    resolution : int or None
        The level of resolution; None: the root.
    family : str
        The array below that level, ``""`` for the level itself.
    chunk : tuple of int or None
        Its chunk.
    object_id : int or None
        Its object.
    """

    resolution: int | None = None
    family: str = ""
    chunk: Key | None = None
    object_id: int | None = None


@dataclass(frozen=True, slots=True)
class CheckLocation:
    """Where a check looks: a level, an array there, and a chunk or an object in it."""

    resolution: int | None = None
    family: str = ""
    chunk: Key | None = None
    object_id: int | None = None

    @property
    def path(self) -> str:
        """The array below the root."""
        return "/".join(part for part in ("" if self.resolution is None else str(self.resolution), self.family) if part)

    def __str__(self) -> str:
        """Say it in words."""
        words = [self.path]
        if self.chunk is not None:
            words.append("chunk " + ".".join(map(str, self.chunk)))
        if self.object_id is not None:
            words.append(f"object {self.object_id}")
        return ", ".join(word for word in words if word)

    def at(
        self, chunk: Sequence[int] | NDArray[np.int64] | None = None, object_id: int | None = None
    ) -> "CheckLocation":
        """Return the place of one chunk or object here."""
        key = None if chunk is None else tuple(int(part) for part in chunk)
        return CheckLocation(self.resolution, self.family, key, object_id)


@dataclass(slots=True)
class LevelSummary:
    """What is known of one level once its chunks were walked; -1 where a count could not be told.

    Parameters
    ----------
    number : int
        Which level.
    facts : dict
        What its group declares.
    keys : (C, K) int64
        Its chunks.
    vertices, fragments, links : (C,) int64
        How many each chunk has.
    widest : int
        Most vertices of a fragment.
    ids : (B,) int64 or None
        Ids of its objects.
    n_groups : int
        How many groups there are.
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
    """One walk over one store.

    Parameters
    ----------
    files : Files
        The store.
    depth : int
        Which levels of rules are looked for, 1 to 5.
    problems : list of PlacedProblem
        What was found.
    layout : str
        ``"0.7"`` or ``"0.9"``.
    root : Geometry or None
        What the root says; None where that cannot be told.
    levels : dict of int to Seen
        Levels that were walked.
    nodes : dict of str to dict
        Every ``zarr.json`` that was looked at, by its path.
    unread : set of Place
        Chunks that could not be read, which is told already.
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
        """Note that a rule is broken; `severity` is given where it is milder than the rule's own."""
        if DEPTH_OF[rule] > self.depth:
            return
        known = RULES[rule]
        self.problems.append(
            PlacedProblem(
                *(rule, severity or known.level, str(place), message, known.mend),
                *(place.resolution, place.family, place.chunk, place.object_id),
            )
        )

    @contextmanager
    def guarded(self, rule: str, place: CheckLocation) -> Iterator[None]:
        """Turn what cannot be opened or decoded into a problem."""
        try:
            yield
        except DAMAGE as error:
            self.report(rule, place, self._said(error))

    def _said(self, error: BaseException) -> str:
        """Return the first sentence of an error, as it reads below its place."""
        if not isinstance(error, AtlasError):
            return f"it cannot be read ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})."
        text = str(error).replace(f"{self.files.root}/", "")
        return text.partition(" Restore it")[0]

    def node(self, place: CheckLocation) -> dict[str, Any] | None:
        """Return the ``zarr.json`` of a place, checked once to be Zarr v3; None where there is none, or it is not read."""
        path = place.path
        if path not in self.nodes:
            self.nodes[path] = None
            with self.guarded("V001", place):
                self.nodes[path] = self.files.node(path)
                for name in (".zattrs", ".zgroup", ".zarray"):
                    if self.files.read(f"{path}/{name}" if path else name) is not None:
                        self.report("V001", place, f"there is a file {name} of Zarr v2.")
        return self.nodes[path]

    def block(self, place: CheckLocation) -> dict[str, Any]:
        """Return the attributes of a place; empty where there are none."""
        node = self.node(place)
        with self.guarded("V001", place):
            return {} if node is None else node_attributes(node)
        return {}

    def children(self, place: CheckLocation) -> list[str]:
        """Return the names of the folders below a place; none where they cannot be listed."""
        with self.guarded("V000", place):
            return self.files.children(place.path)
        return []

    def open(self, place: CheckLocation) -> ChunkArray | None:
        """Open an array with a piece for each chunk; None where there is none, or it cannot be opened."""
        node = self.node(place)
        if node is None:
            return None
        kind = "group" if self.layout == "0.7" else "array"
        if node.get("node_type") != kind:
            self.report("V007", place, f"it is {node.get('node_type')!r}, where layout {self.layout} has {kind!r}.")
            return None
        with self.guarded("V000", place):
            if self.layout == "0.7":
                return ChunkGroup(self.files, place.path, node)
            return CellArray(self.files, place.path, node)
        return None

    def keys(self, family: ChunkArray, place: CheckLocation, n_parts: int) -> NDArray[np.int64]:
        """Return the chunks of a family; none where they are not read, or have another number of parts."""
        none = np.zeros((0, n_parts), np.int64)
        with self.guarded("V009", place):
            keys = family.keys
            if len(keys) and keys.shape[1] != n_parts:
                self.report("V009", place, f"chunk keys have {keys.shape[1]} parts; expected {n_parts}.")
                return none
            return keys if len(keys) else none
        return none

    def read(self, family: ChunkArray, keys: NDArray[np.int64], place: CheckLocation) -> list[Bytes | None]:
        """Return the bytes of some chunks; what cannot be read is told chunk by chunk, and None."""
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
