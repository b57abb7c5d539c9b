"""The numbered rules of a geometry store, and the checker that collects the problems (zarr-vectors §7).

Rules below V110 check what zarr-vectors says, in the order of its sections; rules from V110 on follow from what readers do.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError
from raggedatlas.model.validation import DAMAGE, Checker, Level, Problem, Rule
from raggedatlas.wings.vectors.geometry import Geometry
from raggedatlas.wings.vectors.storage.codecs import EMPTY, Bytes
from raggedatlas.wings.vectors.storage.zarr_reader import (
    CellArray,
    ChunkArray,
    ChunkGroup,
    KeyLookup,
    StoreFiles,
    node_attributes,
)

LEVELS = ("structure", "metadata", "consistency", "conformance", "pyramid")
"""Levels of validation; each includes the previous ones."""

_REWRITE = "Write the store again from its source."
_RESTORE = "Restore it from a copy, or write the store again."
_ROWS = "Write the array again with one row each."
_META = "Correct the attributes in zarr.json."

# The tuple that a rule is in decides from which level on it is reported, whatever its number.
_STRUCTURE = (
    Rule("V000", "must", "Every node, chunk and blob can be opened and decoded: nothing is missing, damaged or truncated.", _RESTORE, stated=False),
    Rule("V001", "must", "Every node is Zarr v3: a zarr.json that is read, and no .zattrs, .zgroup or .zarray.", "Write the store again as Zarr v3."),
    Rule("V002", "must", "Each family declares its name in zv_array; the older key zvf_array is a matter of practice.", _META),
    Rule("V003", "must", "Values are of a standard numeric type that dtype declares; only objects and groups may have text.", _REWRITE),
    Rule("V004", "must", "Fragment indexes, manifests and groups are uint8 or byte strings.", _REWRITE),
    Rule("V007", "must", "A store has one supported version, 0.7 or 0.9, in its metadata and in its arrays.", _REWRITE, stated=False),
    Rule("V009", "must", "A chunk key has one integer per axis, inside the grid; a chunk that is listed but empty is a matter of practice.", "Write the family again, one key for each chunk with data."),
    Rule("V040", "must", "vertex_group_offsets does not exist: stores before 0.6 are not supported.", _REWRITE, stated=False),
    Rule("V048", "must", "Level differences are written 0, +N or -N; in 0.9 links are in arrays named by their offsets.", "Rename the folder."),
)  # fmt: skip

_METADATA = (
    Rule("V005", "must", "The attributes of vertex_fragments do not repeat counts of the blobs.", "Remove the key."),
    Rule("V012", "must", "vertices declares zv_array, dtype, and the encoding raw or draco; additional keys are a matter of practice.", _META),
    Rule("V021", "must", "An attribute declares zv_array, its name, dtype, and the shape of a row.", _META),
    Rule("V022", "must", "channel_names has as many names as a row has values.", "Name each channel once."),
    Rule("V036", "practice", "vertex_fragments declares nothing but zv_array and encoding.", "Remove the key."),
    Rule("V044", "must", "A group attribute declares groupings_attribute, and has one row for each group.", _ROWS),
    Rule("V050", "must", "Links across levels exist only if cross_level_storage is not none.", "Set cross_level_storage to implicit or explicit, or remove them."),
    Rule("V055", "must", "links declares level_delta, link_width, dtype and num_links, the number of links.", _META),
    Rule("V079", "must", "If links cross levels, format_capabilities has multiscale_links.", "Add the token."),
    Rule("V096", "must", "The root declares zv_version, chunk_shape, bounds and geometry_types, and known vocabulary; axes, chunks, bins and bounds agree.", _META),
    Rule("V097", "must", "A level declares level, vertex_count and arrays_present; above 0 also bin_shape and parent_level, which level 0 does not have.", _META),
    Rule("V099", "should", "Tokens of format_capabilities are known; unknown ones in required_capabilities are refused.", "Read it with a release that knows the token."),
)  # fmt: skip

_CONSISTENCY = (
    Rule("V010", "must", "A chunk of vertices consists of complete rows with one value per axis.", _RESTORE),
    Rule("V011", "must", "Positions are float16 to float64, or integers of 8 to 64 bits.", _REWRITE),
    Rule("V014", "must", "Draco is for meshes only.", _REWRITE),
    Rule("V016", "should", "A vertex is in the box of its chunk, unless a boundary policy repeats vertices.", "Write the store again."),
    Rule("V018", "should", "Positions are finite.", "Remove the vertices, or write their positions again."),
    Rule("V019", "must", "A vertex attribute has one row for each vertex of the chunk.", _ROWS),
    Rule("V026", "must", "A fragment index is what its header declares: magic number, version 1, flags 0; as many runs as bits of the bitmap, offsets that ascend from 0, no byte more.", _RESTORE),
    Rule("V034", "must", "Fragments refer to rows that the chunk has.", _RESTORE),
    Rule("V042", "must", "groups holds int64 object ids, split by ascending offsets.", _RESTORE),
    Rule("V043", "must", "groups declares num_groups, the number of groups.", _META),
    Rule("V047", "must", "Groups refer to existing objects.", "Remove the ids from the group."),
    Rule("V051", "must", "Links are complete rows of link_width integers, each a vertex row of the chunk.", _RESTORE),
    Rule("V052", "should", "Links have the smallest type that holds the rows of a chunk.", "Write the store again."),
    Rule("V054", "must", "link_fragments have one fragment for each vertex fragment, which together hold every link exactly once.", "Write link_fragments again."),
    Rule("V057", "must", "link_fragments belong to links within chunks; they exist neither without those, nor for other levels.", "Remove them."),
    Rule("V058", "must", "Links across levels refer to an existing level.", _REWRITE),
    Rule("V065", "must", "The object index is its manifests by ascending id without gaps; offsets, if stored, agree.", _RESTORE),
    Rule("V066", "must", "A manifest decodes: modes 0, 1 or 2, not truncated, no trailing bytes.", _RESTORE),
    Rule("V067", "must", "Manifests refer to existing chunks and fragments.", _RESTORE),
    Rule("V068", "must", "The object index declares num_objects and sid_ndim, has that many manifests, and ids are distinct; num_present is a matter of practice.", _RESTORE),
    Rule("V076", "must", "cross_chunk_links declares level_delta, link_width, num_links and sid_ndim, and its size matches them.", _RESTORE),
    Rule("V080", "must", "Links across chunks refer to existing chunks and rows.", _RESTORE),
    Rule("V081", "should", "The ends of a link across chunks are in different chunks.", "Store it with the links within the chunk."),
    Rule("V082", "must", "A link attribute has one row for each link of the chunk.", _ROWS),
    Rule("V088", "must", "An attribute of links across chunks has one row for each of them.", _ROWS),
    Rule("V090", "must", "An object attribute has one row for each object.", _ROWS),
    Rule("V092", "must", "A fragment attribute has one row for each fragment of the chunk.", _ROWS),
    Rule("V098", "must", "vertex_count is the number of vertices in the chunks of the level.", _META),
    Rule("V110", "must", "A level with fragments_tile has fragments that are the rows of each chunk in order.", "Remove fragments_tile from the level.", stated=False),
)  # fmt: skip

_CONFORMANCE = (
    Rule("V049", "must", "If links are explicit, a mesh or graph with fragments of several vertices has links.", "Write the links."),
    Rule("V056", "must", "A link of a mesh has at least 3 ends, of a graph or skeleton 2; a point cloud has no links (a matter of practice).", _REWRITE),
    Rule("V060", "must", "If links are implicit_sequential, no links within chunks are stored.", "Remove links/0, or set links_convention."),
    Rule("V062", "must", "The convention is allowed for the type: explicit for meshes and graphs, implicit_sequential for lines, explicit or with branches for skeletons.", _META),
    Rule("V070", "must", "With the identity convention there is one chunk and no object index.", "Write an object index."),
    Rule("V071", "must", "Objects with attributes or groups have an object index, except with the identity convention.", "Write an object index."),
)  # fmt: skip

_PYRAMID = (
    Rule("V100", "must", "Levels nest: chunks of a level are integer multiples of the root's, its bins divide its chunks, and bin_ratio matches the bins.", _META),
    Rule("V101", "must", "A level that preserves ids has parent_level, inherited_num_objects equal to the object count of its parent, and ids of its parent; having more vertices than its parent is a matter of practice.", _REWRITE),
)  # fmt: skip

_ALL = (_STRUCTURE, _METADATA, _CONSISTENCY, _CONFORMANCE, _PYRAMID)
DEPTH_OF: dict[str, int] = {rule.id: depth for depth, rules in enumerate(_ALL, 1) for rule in rules}
"""Id -> number of the level that checks it, from 1."""

RULES: dict[str, Rule] = {
    # Problems are listed in this order (`Checker.by_rule`).
    rule.id: rule
    for rule in sorted((rule for rules in _ALL for rule in rules), key=lambda r: r.id)
}
"""Id -> rule, in order."""

STEP = 64
"""Number of chunks read at once."""

Key = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacedProblem(Problem):
    """A rule broken at one location of a geometry store; `path` describes the location in words."""

    resolution: int | None = None  # the resolution level; None: the root
    family: str = ""  # the array of that level, "" for the level itself
    chunk: Key | None = None  # key of the chunk
    object_id: int | None = None  # id of the object


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


@dataclass
class LevelSummary:
    """Summary of one level after its chunks were checked; -1 for unknown counts."""

    number: int
    facts: dict[str, Any]  # attributes of its group
    keys: NDArray[np.int64]  # (C, K): its chunks
    vertices: NDArray[np.int64]  # (C,): counts of each chunk
    fragments: NDArray[np.int64]  # likewise
    links: NDArray[np.int64]  # likewise
    widest: int = 0  # maximum number of vertices of a fragment
    ids: NDArray[np.int64] | None = None  # (B,): ids of its objects
    n_groups: int = 0

    @cached_property
    def chunk_rows(self) -> KeyLookup:
        """Finds the rows of chunks; made once, since the links of each chunk ask."""
        return KeyLookup(self.keys)


@dataclass
class StoreChecker(Checker[Place]):
    """Checker of one geometry store."""

    rules: ClassVar[Mapping[str, Rule]] = RULES
    damage: ClassVar[str] = "V000"

    files: StoreFiles
    depth: int  # highest level of rules to check, 1 to 5
    layout: str = "0.9"  # "0.7" or "0.9"
    root: Geometry | None = None  # the root metadata; None if it cannot be parsed
    levels: dict[int, LevelSummary] = field(default_factory=dict)  # summaries of the levels checked so far
    nodes: dict[str, dict[str, Any] | None] = field(default_factory=dict)  # every `zarr.json` read so far, by path
    unread: set[Place] = field(default_factory=set)  # chunks that could not be read and are already reported

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
        self, array: ChunkArray, place: Place, expected: NDArray[np.int64], rule: str, message: str
    ) -> None:
        """Report the chunks of an array that are not among the known ones."""
        own = self.keys(array, place, expected.shape[1])
        for key in own[KeyLookup(expected).find(own) < 0] if len(own) else ():
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
