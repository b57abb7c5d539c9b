"""What a geometry store is, in memory: `Shapes` as people have them, `Geometry` as it is cut into chunks (seed 002 §7).

`Shapes` is flat and by object: what converters make and what reading gives. `Geometry` is what stands in a store, level
by level and chunk by chunk, and is the same for both layouts. `make_geometry` (``vectors/builder.py``) cuts the one into
the other; reading joins it again. All of it are NumPy arrays; lists of lists are one flat array and its offsets: member
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
CROSS_CHUNK = ("explicit_links", "boundary_deduplication", "both")
CROSS_LEVEL = ("none", "implicit", "explicit")
METHODS = ("per_object", "manual", "none")
CAPABILITIES = ("fragment_index", "shared_fragments", "preserved_object_ids", "multiscale_links")
"""Tokens of ``format_capabilities`` that are understood."""


@dataclass(frozen=True)
class Fragments:
    """Lists of chunk-local rows, chunk after chunk: what the ZVFG blobs of a level hold (§7.3).

    Parameters
    ----------
    bounds : (C + 1,) int64
        Fragments of chunk ``c`` are ``bounds[c]`` to ``bounds[c + 1]``.
    is_range : (F,) bool
        Whether a fragment is a run of rows; else it is an explicit list.
    starts : (F,) int64
        First row of a run (chunk-local), or where an explicit list begins in `rows`.
    counts : (F,) int64
        How many rows.
    rows : (T,) int64
        Chunk-local rows of the explicit lists; order and repetition are kept.
    """

    bounds: NDArray[np.int64]
    is_range: NDArray[np.bool_]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    rows: NDArray[np.int64]

    @property
    def n_fragments(self) -> int:
        """How many fragments there are in all chunks."""
        return len(self.starts)


@dataclass(frozen=True)
class Objects:
    """The object index: for each object, blocks that name one chunk and fragments there, in order of traversal (§7.6).

    Parameters
    ----------
    ids : (B,) int64
        Object ids, ascending. 0 to B - 1 in a store whose ids are row numbers.
    bounds : (B + 1,) int64
        Blocks of object ``i`` are ``bounds[i]`` to ``bounds[i + 1]``; none in an object that is empty here.
    chunks : (K, D) int64
        The chunk of each block.
    modes : (K,) uint8
        0: one fragment, 1: a run of fragments, 2: a list.
    starts : (K,) int64
        The fragment, the first one, or where the list begins in `fragments`.
    counts : (K,) int64
        How many fragments (1 in mode 0).
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
        """How many objects there are."""
        return len(self.ids)

    @property
    def has_dense_ids(self) -> bool:
        """Whether the ids are 0 to B - 1."""
        return not self.ids.size or bool(self.ids[0] == 0 and self.ids[-1] == len(self.ids) - 1)


@dataclass(frozen=True)
class Links:
    """Links whose ends lie in one chunk, as chunk-local rows, chunk after chunk (§7.5, delta 0).

    Parameters
    ----------
    bounds : (C + 1,) int64
        Links of chunk ``c``.
    rows : (M, L) integer array
        Rows of the chunk's vertices; stored in this type.
    fragments : Fragments or None
        Which links belong to which vertex fragment; None where the store does not say.
    attributes : mapping of str to Attribute
        M rows.
    """

    bounds: NDArray[np.int64]
    rows: NDArray[Any]
    fragments: Fragments | None = None
    attributes: Attributes = field(default_factory=dict)

    @property
    def width(self) -> int:
        """How many ends a link has."""
        return int(self.rows.shape[1])


@dataclass(frozen=True)
class CrossLinks:
    """Links whose ends lie in several chunks, or on two levels: `links` of delta != 0 and `cross_chunk_links` (§7.5, §7.7).

    Parameters
    ----------
    delta : int
        0: all ends on the owning level. Else end 0 is there and the others are `delta` levels further (positive: coarser).
    chunks : (M, L, D) int64
        Chunk of each end, in the grid of its level.
    rows : (M, L) int64
        Row of each end in its chunk.
    directed : bool
        Whether the order of ends says a direction (0.9); it is kept either way.
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
        """How many ends a link has."""
        return int(self.rows.shape[1])

    @property
    def n_links(self) -> int:
        """How many links there are."""
        return len(self.rows)


@dataclass(frozen=True)
class Level:
    """One resolution level as it is cut into chunks.

    Parameters
    ----------
    chunks : (C, K) int64
        Keys of the chunks with data, ascending: ``floor(position / chunk_shape)``, absolute, maybe negative. K = D, or more where
        chunks are also cut by an attribute (leading parts).
    bounds : (C + 1,) int64
        Vertices of chunk ``c`` are ``positions[bounds[c]:bounds[c + 1]]``.
    positions : (N, D) array
        Vertices, chunk after chunk.
    fragments : Fragments or None
        Vertex fragments; None where the store has none (then a chunk is one fragment).
    links : Links or None
        Links within chunks.
    cross_links : tuple of CrossLinks
        Links across chunks and levels, at most one for each delta.
    objects : Objects or None
        The object index; None without objects, and under the identity convention.
    groups : Groups or None
        Sets of objects.
    vertex_attributes, fragment_attributes, object_attributes : mapping of str to Attribute
        N, F and B rows.
    encoding : str
        ``"raw"``, or ``"draco"`` for meshes.
    metadata : mapping
        ``zarr_vectors_level`` but for what follows from the arrays: ``bin_shape``, ``bin_ratio``, ``chunk_shape``,
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
        """How many vertices there are."""
        return len(self.positions)


@dataclass(frozen=True)
class Axis:
    """One space axis: its name and its unit (UDUNITS-2) or None."""

    name: str
    unit: str | None = None
    type: str = "space"


@dataclass(frozen=True)
class Geometry:
    """A whole geometry store in memory, the same for both layouts.

    Parameters
    ----------
    types : tuple of str
        Of `KINDS`.
    axes : tuple of Axis
        D space axes.
    chunk_shape : tuple of D floats
        Edges of a chunk at level 0, world units.
    bounds : ((float, ...), (float, ...))
        Least and greatest coordinates.
    levels : tuple of Level
        Finest first; level ``k`` is ``levels[k]``.
    bin_shape : tuple of D floats or None
        Edges of a bin, which divide those of a chunk; None: as a chunk.
    links_convention, index_convention, cross_chunk, cross_level_storage : str
        Of `CONVENTIONS`, `INDEX_CONVENTIONS`, `CROSS_CHUNK`, `CROSS_LEVEL`.
    cross_level_depth : int
        How many levels links reach; -1: all.
    capabilities : tuple of str
        Tokens of ``format_capabilities`` besides those that follow from the arrays.
    metadata : mapping
        Further keys of ``zarr_vectors`` (``crs``, ``reduction_factor``, unknown ones), kept as they stand.
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
        """How many space axes there are."""
        return len(self.axes)
