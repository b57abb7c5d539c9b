"""The in-memory model of a geometry store: `Shapes` for users, `Geometry` divided into chunks (seed 002 §7).

`Shapes` is flat and ordered by object; converters produce it and reading returns it. `Geometry` is the content of a store,
level by level and chunk by chunk, and is the same for both layouts. `make_geometry` (``vectors/builder.py``) converts `Shapes`
to `Geometry`; reading assembles them again. Everything is a NumPy array; a list of lists is a flat array with offsets: member
``i`` is ``flat[offsets[i]:offsets[i + 1]]``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.shapes import Attributes, Groups, Strings

CONVENTIONS = ("explicit", "implicit_sequential", "implicit_sequential_with_branches")
INDEX_CONVENTIONS = ("standard", "identity")
# Values of `cross_chunk_strategy` in the root, `boundary` in `ChunkingOptions`.
CROSS_CHUNK = ("explicit_links", "boundary_deduplication", "both")
CROSS_LEVEL = ("none", "implicit", "explicit")
METHODS = ("per_object", "manual", "none")
CAPABILITIES = ("fragment_index", "shared_fragments", "preserved_object_ids", "multiscale_links")
"""Supported tokens of ``format_capabilities``."""


@dataclass(frozen=True)
class Fragments:
    """Lists of chunk-local rows in chunk order: the content of the ZVFG blobs of a level (§7.3).

    Parameters
    ----------
    bounds : (C + 1,) int64
        Fragments of chunk ``c`` are ``bounds[c]`` to ``bounds[c + 1]``.
    is_range : (F,) bool
        Whether a fragment is a range of rows; otherwise it is an explicit list.
    starts : (F,) int64
        First row of a range (chunk-local), or the start of an explicit list in `rows`.
    counts : (F,) int64
        Number of rows.
    rows : (T,) int64
        Chunk-local rows of the explicit lists; order and repetitions are preserved.
    """

    bounds: NDArray[np.int64]
    is_range: NDArray[np.bool_]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    rows: NDArray[np.int64]

    @property
    def n_fragments(self) -> int:
        """Number of fragments in all chunks."""
        return len(self.starts)


@dataclass(frozen=True)
class Objects:
    """The object index: for each object, blocks that refer to a chunk and fragments in it, in traversal order (§7.6).

    Parameters
    ----------
    ids : (B,) int64
        Object ids, ascending; 0 to B - 1 in a store whose ids are row numbers.
    bounds : (B + 1,) int64
        Blocks of object ``i`` are ``bounds[i]`` to ``bounds[i + 1]``; an object that is empty at this level has none.
    chunks : (K, D) int64
        Chunk of each block.
    modes : (K,) uint8
        0: one fragment, 1: a range of fragments, 2: a list.
    starts : (K,) int64
        The fragment, the first fragment of the range, or the start of the list in `fragments`.
    counts : (K,) int64
        Number of fragments (1 in mode 0).
    fragments : (T,) int64
        Chunk-local fragment numbers of the lists.
    """

    ids: NDArray[np.int64]
    bounds: NDArray[np.int64]
    chunks: NDArray[np.int64]
    modes: NDArray[np.uint8]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    fragments: NDArray[np.int64]

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
    """Links within one chunk, as chunk-local rows in chunk order (§7.5, delta 0).

    Parameters
    ----------
    bounds : (C + 1,) int64
        Links of chunk ``c``.
    rows : (M, L) integer array
        Rows of the chunk's vertices; stored with this dtype.
    fragments : Fragments or None
        Links of each vertex fragment; None if the store does not record it.
    attributes : mapping of str to Attribute
        M rows.
    """

    bounds: NDArray[np.int64]
    rows: NDArray[Any]
    fragments: Fragments | None = None
    attributes: Attributes = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Number of ends of a link."""
        return int(self.rows.shape[1])


@dataclass(frozen=True)
class CrossLinks:
    """Links across several chunks or two levels: `links` with delta != 0 and `cross_chunk_links` (§7.5, §7.7).

    Parameters
    ----------
    delta : int
        0: all ends on the owning level. Otherwise end 0 is on it and the others are `delta` levels away (positive: coarser).
    chunks : (M, L, D) int64
        Chunk of each end, in the grid of its level.
    rows : (M, L) int64
        Row of each end in its chunk.
    directed : bool
        Whether the order of ends has a direction (0.9); the order is preserved either way.
    store : str
        ``"canonical"`` (each link once) or ``"duplicate"`` (0.9: under the chunk of each end).
    attributes : mapping of str to Attribute
        M rows.
    """

    delta: int
    chunks: NDArray[np.int64]
    rows: NDArray[np.int64]
    directed: bool = False
    store: str = "canonical"
    attributes: Attributes = field(default_factory=dict)

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

    Parameters
    ----------
    chunks : (C, K) int64
        Keys of the chunks with data, ascending: ``floor(position / chunk_shape)``, absolute, possibly negative. K = D, or more if
        chunks are also partitioned by an attribute (leading parts).
    bounds : (C + 1,) int64
        Vertices of chunk ``c`` are ``positions[bounds[c]:bounds[c + 1]]``.
    positions : (N, D) array
        Vertices, in chunk order.
    fragments : Fragments or None
        Vertex fragments; None if the store has none (each chunk is then one fragment).
    links : Links or None
        Links within chunks.
    cross_links : tuple of CrossLinks
        Links across chunks and levels, at most one for each delta.
    objects : Objects or None
        The object index; None without objects or with the identity convention.
    groups : Groups or None
        Sets of objects.
    vertex_attributes, fragment_attributes, object_attributes : mapping of str to Attribute
        N, F and B rows.
    encoding : str
        ``"raw"``, or ``"draco"`` for meshes.
    metadata : mapping
        ``zarr_vectors_level`` without what follows from the arrays: ``bin_shape``, ``bin_ratio``, ``chunk_shape``,
        ``parent_level``, ``coarsening_method``, ``object_sparsity``, ``preserves_object_ids``, ``inherited_num_objects``, ...
    """

    chunks: NDArray[np.int64]
    bounds: NDArray[np.int64]
    positions: NDArray[Any]
    fragments: Fragments | None = None
    links: Links | None = None
    cross_links: tuple[CrossLinks, ...] = ()
    objects: Objects | None = None
    groups: Groups | None = None
    vertex_attributes: Attributes = field(default_factory=dict)
    fragment_attributes: Attributes = field(default_factory=dict)
    object_attributes: Attributes = field(default_factory=dict)
    encoding: str = "raw"
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
    # Reading drops axes of any other type.
    type: str = "space"


@dataclass(frozen=True)
class Geometry:
    """A complete geometry store in memory, the same for both layouts.

    Parameters
    ----------
    types : tuple of str
        Members of `KINDS`.
    axes : tuple of Axis
        D space axes.
    chunk_shape : tuple of D floats
        Edge lengths of a chunk at level 0, in world units.
    bounds : ((float, ...), (float, ...))
        Minimum and maximum coordinates.
    levels : tuple of Level
        Finest first; level ``k`` is ``levels[k]``.
    bin_shape : tuple of D floats or None
        Edge lengths of a bin, which divide those of a chunk; None: one bin per chunk.
    links_convention, index_convention, cross_chunk, cross_level_storage : str
        Of `CONVENTIONS`, `INDEX_CONVENTIONS`, `CROSS_CHUNK`, `CROSS_LEVEL`.
    cross_level_depth : int
        Number of levels that links reach; -1: all.
    capabilities : tuple of str
        Tokens of ``format_capabilities`` that do not follow from the arrays.
    metadata : mapping
        Additional keys of ``zarr_vectors`` (``crs``, ``reduction_factor``, unknown ones), preserved unchanged.
    """

    types: Strings
    axes: tuple[Axis, ...]
    chunk_shape: tuple[float, ...]
    bounds: tuple[tuple[float, ...], tuple[float, ...]]
    levels: tuple[Level, ...]
    bin_shape: tuple[float, ...] | None = None
    links_convention: str = "implicit_sequential"
    index_convention: str = "standard"
    cross_chunk: str = "explicit_links"
    cross_level_storage: str = "none"
    cross_level_depth: int = 0
    capabilities: Strings = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_dims(self) -> int:
        """Number of space axes."""
        return len(self.axes)
