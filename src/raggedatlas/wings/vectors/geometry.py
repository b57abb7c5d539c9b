"""The in-memory model of a geometry store, and its metadata as JSON: `Shapes` for users, `Geometry` in chunks (zarr-vectors §7 and §8).

`Shapes` is flat and ordered by object; converters produce it and reading returns it. `Geometry` is the content of a store,
level by level and chunk by chunk, and is the same for both layouts. `make_geometry` (``vectors/builder.py``) converts `Shapes`
to `Geometry`; reading assembles them again. Everything is a NumPy array; a list of lists is a flat array with offsets: member
``i`` is ``flat[offsets[i]:offsets[i + 1]]``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, SourceError
from raggedatlas.model.choices import CrossLevel
from raggedatlas.wings.vectors.shapes import KINDS, Attributes, Groups, Strings

CONVENTIONS = ("explicit", "implicit_sequential", "implicit_sequential_with_branches")
INDEX_CONVENTIONS = ("standard", "identity")
# Values of `cross_chunk_strategy` in the root, `boundary` in `ChunkingOptions`.
CROSS_CHUNK = ("explicit_links", "boundary_deduplication", "both")
CROSS_LEVEL = get_args(CrossLevel)
METHODS = ("per_object", "manual", "none")
CAPABILITIES = ("fragment_index", "shared_fragments", "preserved_object_ids", "multiscale_links")
"""Supported tokens of ``format_capabilities``."""


@dataclass(frozen=True)
class Fragments:
    """Lists of chunk-local rows in chunk order: the content of the ZVFG blobs of a level (§7.3)."""

    bounds: NDArray[np.int64]  # (C + 1,): fragments of chunk c are bounds[c] to bounds[c + 1]
    is_range: NDArray[np.bool_]  # (F,): whether a fragment is a range of rows; otherwise it is an explicit list
    starts: NDArray[np.int64]  # (F,): first row of a range (chunk-local), or the start of an explicit list in `rows`
    counts: NDArray[np.int64]  # (F,): number of rows
    rows: NDArray[np.int64]  # (T,): chunk-local rows of the explicit lists; order and repetitions are preserved

    @property
    def n_fragments(self) -> int:
        """Number of fragments in all chunks."""
        return len(self.starts)


def range_fragments(bounds: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]) -> Fragments:
    """Return fragments that are all ranges of rows."""
    return Fragments(bounds, np.ones(len(starts), bool), starts, counts, np.zeros(0, np.int64))


@dataclass(frozen=True)
class Objects:
    """The object index: for each object, blocks that refer to a chunk and fragments in it, in traversal order (§7.6)."""

    ids: NDArray[np.int64]  # (B,): object ids, ascending; 0 to B - 1 in a store whose ids are row numbers
    # (B + 1,): blocks of object i are bounds[i] to bounds[i + 1]; an object that is empty at this level has none
    bounds: NDArray[np.int64]
    chunks: NDArray[np.int64]  # (K, D): chunk of each block
    modes: NDArray[np.uint8]  # (K,): 0: one fragment, 1: a range of fragments, 2: a list
    # (K,): the fragment, the first fragment of the range, or the start of the list in `fragments`
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]  # (K,): number of fragments (1 in mode 0)
    fragments: NDArray[np.int64]  # (T,): chunk-local fragment numbers of the lists

    @property
    def n_objects(self) -> int:
        """Number of objects."""
        return len(self.ids)

    @property
    def has_dense_ids(self) -> bool:
        """Whether the ids are 0 to B - 1."""
        # Ids ascend without repetition, so the first and the last one are enough.
        return not self.ids.size or bool(self.ids[0] == 0 and self.ids[-1] == len(self.ids) - 1)


@dataclass(frozen=True)
class Links:
    """Links within one chunk, as chunk-local rows in chunk order (§7.5, delta 0)."""

    bounds: NDArray[np.int64]  # (C + 1,): links of chunk c are bounds[c] to bounds[c + 1]
    rows: NDArray[Any]  # (M, L) integers: rows of the chunk's vertices; stored with this dtype
    fragments: Fragments | None = None  # links of each vertex fragment; None if the store does not record it
    attributes: Attributes = field(default_factory=dict)  # M rows

    @property
    def width(self) -> int:
        """Number of ends of a link."""
        return int(self.rows.shape[1])


@dataclass(frozen=True)
class CrossLinks:
    """Links across several chunks or two levels: `links` with delta != 0 and `cross_chunk_links` (§7.5, §7.7).

    With `delta` 0 all ends are on the owning level. Otherwise end 0 is on it and the others are `delta` levels away
    (positive: coarser).
    """

    delta: int
    chunks: NDArray[np.int64]  # (M, L, D): chunk of each end, in the grid of its level
    rows: NDArray[np.int64]  # (M, L): row of each end in its chunk
    directed: bool = False  # whether the order of ends has a direction (0.9); the order is preserved either way
    store: str = "canonical"  # "canonical" (each link once) or "duplicate" (0.9: under the chunk of each end)
    attributes: Attributes = field(default_factory=dict)  # M rows

    @property
    def width(self) -> int:
        """Number of ends of a link."""
        return int(self.rows.shape[1])

    @property
    def n_links(self) -> int:
        """Number of links."""
        return len(self.rows)


@dataclass(frozen=True)
class Level:
    """One resolution level, divided into chunks.

    Keys of chunks are ``floor(position / chunk_shape)``, absolute and possibly negative: K = D numbers, or more if
    chunks are also partitioned by an attribute (leading parts). `metadata` is ``zarr_vectors_level`` without what
    follows from the arrays: ``bin_shape``, ``bin_ratio``, ``chunk_shape``, ``parent_level``, ``coarsening_method``,
    ``object_sparsity``, ``preserves_object_ids``, ``inherited_num_objects``, ...
    """

    chunks: NDArray[np.int64]  # (C, K): keys of the chunks with data, ascending
    bounds: NDArray[np.int64]  # (C + 1,): vertices of chunk c are positions[bounds[c]:bounds[c + 1]]
    positions: NDArray[Any]  # (N, D): vertices, in chunk order
    fragments: Fragments | None = None  # vertex fragments; None if the store has none (each chunk is then one fragment)
    links: Links | None = None  # links within chunks
    cross_links: tuple[CrossLinks, ...] = ()  # links across chunks and levels, at most one for each delta
    objects: Objects | None = None  # None without objects or with the identity convention
    groups: Groups | None = None
    vertex_attributes: Attributes = field(default_factory=dict)  # N rows
    fragment_attributes: Attributes = field(default_factory=dict)  # F rows
    object_attributes: Attributes = field(default_factory=dict)  # B rows
    encoding: str = "raw"  # "raw", or "draco" for meshes
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_vertices(self) -> int:
        """Number of vertices."""
        return len(self.positions)


@dataclass(frozen=True)
class Axis:
    """A space axis: name and unit (UDUNITS-2) or None."""

    name: str
    unit: str | None = None


def default_axes(n_dims: int) -> tuple[Axis, ...]:
    """Return axes without units: x, y, z, w, axis4, ..."""
    return tuple(Axis(f"axis{i}" if i > 3 else "xyzw"[i]) for i in range(n_dims))


@dataclass(frozen=True)
class Geometry:
    """A complete geometry store in memory, the same for both layouts."""

    types: Strings  # members of `KINDS`
    axes: tuple[Axis, ...]  # D space axes
    chunk_shape: tuple[float, ...]  # edge lengths of a chunk at level 0, in world units
    bounds: tuple[tuple[float, ...], tuple[float, ...]]  # minimum and maximum coordinates
    levels: tuple[Level, ...]  # finest first
    # edge lengths of a bin, which divide those of a chunk; None: one bin per chunk
    bin_shape: tuple[float, ...] | None = None
    links_convention: str = "implicit_sequential"  # of `CONVENTIONS`
    index_convention: str = "standard"  # of `INDEX_CONVENTIONS`
    cross_chunk: str = "explicit_links"  # of `CROSS_CHUNK`
    cross_level_storage: str = "none"  # of `CROSS_LEVEL`
    cross_level_depth: int = 0  # number of levels that links reach; -1: all
    capabilities: Strings = ()  # tokens of `format_capabilities` that do not follow from the arrays
    # additional keys of `zarr_vectors` (`crs`, `reduction_factor`, unknown ones), preserved unchanged
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_dims(self) -> int:
        """Number of space axes."""
        return len(self.axes)

    @property
    def kind(self) -> str:
        """The geometry type; the first if there are several; unknown types are read as graphs."""
        kind = self.types[0] if self.types else "point_cloud"
        return kind if kind in KINDS else "graph"


def check_edges(edges: tuple[float, ...], n_dims: int, what: str) -> None:
    """Refuse edges that are not `n_dims` positive numbers."""
    if len(edges) != n_dims or not all(np.isfinite(edge) and edge > 0 for edge in edges):
        raise SourceError(f"{what} is {edges}; expected {n_dims} positive numbers, one per axis.")


def check_stored_edges(edges: tuple[float, ...], n_dims: int, what: str) -> None:
    """Refuse edges that a store declares as `check_edges` does, as `CorruptError`."""
    try:
        check_edges(edges, n_dims, what)
    except SourceError as error:
        raise CorruptError(f"{error} Restore the store from a copy.") from None


def bins_per_chunk(chunk_shape: tuple[float, ...], bin_shape: tuple[float, ...]) -> NDArray[np.int64]:
    """Return the number of bins of a chunk on each axis; raise `SourceError` if bins do not divide their chunk."""
    ratio = np.asarray(chunk_shape, np.float64) / np.asarray(bin_shape, np.float64)
    rounded = np.rint(ratio)
    if (rounded < 1).any() or (np.abs(ratio - rounded) > 1e-9 * np.maximum(rounded, 1)).any():
        raise SourceError(f"Bins of {tuple(bin_shape)} do not divide chunks of {tuple(chunk_shape)}.")
    return rounded.astype(np.int64)


VERSIONS = {"0.7": "0.7.0", "0.9": "0.9.2"}
"""Value of ``zv_version`` in each layout."""

# Keys with a field of their own in `Geometry`; all others are preserved in its `metadata`.
_OWN_KEYS = (
    *("zv_version", "chunk_shape", "bounds", "geometry_types", "links_convention", "object_index_convention"),
    *("cross_chunk_strategy", "base_bin_shape", "cross_level_depth", "cross_level_storage", "format_capabilities"),
)
OWN_LEVEL_KEYS = ("level", "vertex_count", "arrays_present", "fragments_tile")
"""Keys of a level that follow from its arrays."""


def root_json(geometry: Geometry, layout: str, name: str) -> dict[str, Any]:
    """Return the attributes of the root group."""
    facts: dict[str, Any] = {
        # First, so that no preserved key replaces one of those below.
        **geometry.metadata,
        "zv_version": VERSIONS[layout],
        "format_capabilities": list(geometry.capabilities),
        "chunk_shape": list(geometry.chunk_shape),
        "bounds": [list(end) for end in geometry.bounds],
        "geometry_types": list(geometry.types),
        "links_convention": geometry.links_convention,
        "object_index_convention": geometry.index_convention,
        "cross_chunk_strategy": geometry.cross_chunk,
        "cross_level_depth": geometry.cross_level_depth,
        "cross_level_storage": geometry.cross_level_storage,
    }
    if geometry.bin_shape is not None:
        facts["base_bin_shape"] = list(geometry.bin_shape)
    axes = [
        {"name": axis.name, "type": "space"} | ({} if axis.unit is None else {"unit": axis.unit})
        for axis in geometry.axes
    ]
    # The bins of each level, as other implementations write them (no coordinate transform).
    datasets = []
    for k, level in enumerate(geometry.levels):
        bins = level.metadata.get("bin_shape") or geometry.bin_shape or geometry.chunk_shape
        ratio = level.metadata.get("bin_ratio") or [1] * geometry.n_dims
        transforms = [
            {"type": "scale", "scale": [float(times) for times in ratio]},
            {"type": "translation", "translation": [float(edge) / 2 for edge in bins]},
        ]
        datasets.append({"path": str(k), "coordinateTransformations": transforms})
    scales = {
        "version": "0.4",
        "name": name,
        "axes": axes,
        "datasets": datasets,
        "metadata": {"format": "zarr_vectors"},
    }
    return {"zarr_vectors": facts, "multiscales": [scales]}


def level_json(level: Level, k: int, arrays: list[str]) -> dict[str, Any]:
    """Return the attributes of a level group, without those that the layout adds."""
    parent = level.metadata.get("parent_level")
    facts: dict[str, Any] = {
        "object_sparsity": 1.0,
        "coarsening_method": "none",
        **level.metadata,
        "level": k,
        "vertex_count": level.n_vertices,
        "parent_level": None if k == 0 else int(k - 1 if parent is None else parent),
        "arrays_present": arrays,
    }
    return {"zarr_vectors_level": facts}


@dataclass(frozen=True)
class Root:
    """Contents of the root attributes: a `Geometry` without levels, and the layout."""

    geometry: Geometry  # without levels
    layout: str  # "0.7" or "0.9", from `zv_version`
    version: str  # `zv_version`


def parse_root(attributes: Mapping[str, Any], where: str) -> Root:
    """Parse the attributes of a root group.

    Raises `SourceError` if it is not a zarr-vectors store, has an unsupported version or requires an unknown
    capability; `CorruptError` if a required key is missing or a value is invalid.
    """
    facts = attributes.get("zarr_vectors")
    if not isinstance(facts, Mapping):
        raise SourceError(f"{where} is not a geometry store: its root has no 'zarr_vectors' attributes.")
    for key in ("zv_version", "chunk_shape", "bounds", "geometry_types"):
        if facts.get(key) is None:
            raise CorruptError(f"{where}: the root has no {key!r}.")
    version = str(facts["zv_version"])
    # The third part of the version is ignored: 0.9.x is layout 0.9.
    layout = ".".join(version.split(".")[:2])
    if layout not in VERSIONS:
        raise SourceError(
            f"{where} is of zarr-vectors {version}; supported are 0.7 and 0.9. Write it again from its source in one of these."
        )
    # Unknown tokens of `format_capabilities` are tolerated (V099), so only required ones are refused.
    unknown = sorted(set(_parse_words(facts, "required_capabilities", where)) - set(CAPABILITIES))
    if unknown:
        raise SourceError(f"{where} requires {unknown[0]!r}, which is not supported; a newer raggedatlas may read it.")
    chunk_shape = _parse_numbers(facts["chunk_shape"], where)
    scales = attributes.get("multiscales") or [{}]
    try:
        # Axes of another type, such as time, are left out.
        space = [axis for axis in scales[0].get("axes", []) if axis.get("type", "space") == "space"]
        axes = tuple(Axis(str(axis["name"]), axis.get("unit")) for axis in space) or default_axes(len(chunk_shape))
    except (TypeError, KeyError, AttributeError):
        raise CorruptError(f"{where}: the axes of 'multiscales' cannot be parsed.") from None
    values, depth = facts["bounds"], facts.get("cross_level_depth", 1)
    # A boolean is an instance of int, but no number of levels.
    if type(depth) is not int:
        raise CorruptError(f"{where}: cross_level_depth is {depth!r}; expected a number of levels, or -1.")
    if not isinstance(values, list) or len(values) != 2:
        raise CorruptError(f"{where}: bounds are {values!r}; expected minimum and maximum coordinates.")
    geometry = Geometry(
        types=_parse_words(facts, "geometry_types", where),
        axes=axes,
        chunk_shape=chunk_shape,
        bounds=(_parse_numbers(values[0], where), _parse_numbers(values[1], where)),
        levels=(),
        bin_shape=None if facts.get("base_bin_shape") is None else _parse_numbers(facts["base_bin_shape"], where),
        links_convention=_parse_choice(facts, "links_convention", "implicit_sequential", CONVENTIONS, where),
        index_convention=_parse_choice(facts, "object_index_convention", "standard", INDEX_CONVENTIONS, where),
        cross_chunk=_parse_choice(facts, "cross_chunk_strategy", "explicit_links", CROSS_CHUNK, where),
        cross_level_storage=_parse_choice(facts, "cross_level_storage", "explicit", CROSS_LEVEL, where),
        cross_level_depth=depth,
        capabilities=_parse_words(facts, "format_capabilities", where),
        metadata={key: value for key, value in facts.items() if key not in _OWN_KEYS},
    )
    n_dims = len(geometry.chunk_shape)
    if len(geometry.bounds[0]) != n_dims or len(geometry.bounds[1]) != n_dims or len(geometry.axes) != n_dims:
        raise CorruptError(f"{where}: chunk_shape, bounds and axes do not have the same number of axes.")
    check_stored_edges(geometry.chunk_shape, n_dims, f"{where}: chunk_shape")
    if geometry.bin_shape is not None:
        check_stored_edges(geometry.bin_shape, n_dims, f"{where}: base_bin_shape")
        try:
            bins_per_chunk(geometry.chunk_shape, geometry.bin_shape)
        except SourceError as error:
            raise CorruptError(f"{where}: {error}") from None
    return Root(geometry, layout, version)


def level_chunk_shape(geometry: Geometry, metadata: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the edge lengths of a level's chunks."""
    own = metadata.get("chunk_shape")
    return geometry.chunk_shape if own is None else tuple(float(edge) for edge in own)


def level_scale(geometry: Geometry, metadata: Mapping[str, Any], n_parts: int) -> NDArray[np.int64]:
    """Return how many root chunks a chunk of this level spans, per key part; 1 for parts that are not axes."""
    shape = level_chunk_shape(geometry, metadata)
    # A multiple of the root's chunk (V100), except for rounding of the stored edges.
    scale = np.rint(np.asarray(shape) / np.asarray(geometry.chunk_shape)).astype(np.int64)
    lead = np.ones(n_parts - len(scale), np.int64)
    return np.concatenate([lead, scale])


def _parse_numbers(values: Any, where: str) -> tuple[float, ...]:  # noqa: ANN401 - any JSON value
    try:
        if isinstance(values, list):
            return tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError):
        pass
    raise CorruptError(f"{where}: {values!r} is not a list of numbers.")


def _parse_words(facts: Mapping[str, Any], key: str, where: str) -> Strings:
    """Parse a list of words, which may be missing."""
    value = facts.get(key) or []
    if not isinstance(value, list):
        raise CorruptError(f"{where}: {key} is {value!r}; expected a list.")
    return tuple(map(str, value))


def _parse_choice(facts: Mapping[str, Any], key: str, default: str, choices: tuple[str, ...], where: str) -> str:
    """Parse a value from a fixed vocabulary."""
    value = facts.get(key) or default
    if value not in choices:
        raise CorruptError(f"{where}: {key} is {value!r}; expected one of {', '.join(choices)}.")
    return str(value)
