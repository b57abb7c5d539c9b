"""Reader of one level of an open store: its arrays, chunk by chunk, in either layout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, SourceError
from raggedatlas.vectors.geometry import Fragments, Geometry, Level, Links
from raggedatlas.vectors.metadata import extra_level_metadata, level_chunk_shape, parse_level
from raggedatlas.vectors.shapes import Attribute, counts_to_offsets
from raggedatlas.vectors.storage.codecs import Bytes, concat_blobs, decode_fragments, from_bytes
from raggedatlas.vectors.storage.zarr_reader import (
    CellArray,
    ChunkArray,
    ChunkGroup,
    KeyLookup,
    StoreFiles,
    node_attributes,
)


def read_partition_attribute(
    facts: Mapping[str, Any], keys: NDArray[np.int64], counts: NDArray[np.int64], n_dims: int, where: str
) -> dict[str, Attribute]:
    """Return the attribute encoded in the keys of chunks, by name; empty if chunks are partitioned by space only.

    Parameters
    ----------
    facts : mapping
        Metadata of the level: ``chunk_attribute_name`` and ``chunk_attribute_values``.
    keys : (n, K) int64
        Keys of chunks or fragments; the first part is the index of a value.
    counts : (n,) int64
        Number of vertices of each.
    n_dims : int
        Number of key parts that are space axes.
    where : str
        The level, for messages.

    Returns
    -------
    dict
        Numbers unchanged, texts as codes of categories.

    Raises
    ------
    CorruptError
        If the value index of a key is out of range.

    Examples
    --------
    >>> facts = {"chunk_attribute_name": "gene", "chunk_attribute_values": [5, 9]}
    >>> read_partition_attribute(facts, np.array([[0, 0, 0], [1, 0, 0]]), np.array([2, 1]), 2, "0")[
    ...     "gene"
    ... ].values.tolist()
    [5, 5, 9]
    """
    name, values = facts.get("chunk_attribute_name"), facts.get("chunk_attribute_values")
    if not name or not isinstance(values, list) or keys.shape[1] != n_dims + 1:
        return {}
    codes = keys[:, 0]
    if ((codes < 0) | (codes >= len(values))).any():
        bad = codes[(codes < 0) | (codes >= len(values))][0]
        raise CorruptError(f"{where} has a chunk with value {bad} of {name!r}, which has {len(values)} values.")
    numbers = all(isinstance(value, int | float) for value in values)
    if numbers:
        return {str(name): Attribute(np.repeat(np.array(values)[codes] if values else codes, counts))}
    categories = [str(value) for value in values]
    metadata = {"encoding": "dictionary", "categories": categories, "ordered": False, "_FillValue": -1}
    return {str(name): Attribute(np.repeat(codes, counts).astype(np.int32), metadata=metadata)}


_BLOCK_KEYS = {
    *("zv_array", "zvf_array", "name", "dtype", "shape", "row_shape", "channel_names", "nonempty_chunks"),
    *(
        "chunk_grid_origin",
        "offsets",
        "level_delta",
        "has_perm",
        "num_links",
        "fill_sentinel_meaning",
        "has_present_mask",
    ),
}
"""Keys of array metadata that repeat what the array or its path says."""

AttributeFilter = Callable[[str], bool]


def all_attributes(_: str) -> bool:
    """Select every attribute."""
    return True


def attribute_filter(names: Sequence[str] | None) -> AttributeFilter:
    """Return a predicate for the requested attributes."""
    return all_attributes if names is None else set(names).__contains__


class LevelReader:
    """Reader of the arrays of one level.

    Parameters
    ----------
    files : StoreFiles
        The store.
    root : Geometry
        The root metadata, without levels.
    layout : str
        ``"0.7"`` or ``"0.9"``.
    number : int
        Number of the level.

    Raises
    ------
    SourceError
        If the version of its arrays is not that of the root, or is unsupported.
    """

    def __init__(self, files: StoreFiles, root: Geometry, layout: str, number: int) -> None:
        self.files, self.root, self.layout, self.number = files, root, layout, number
        self.where = f"{files.root}/{number}"
        node = files.node(str(number))
        if node is None:
            raise CorruptError(f"{self.where} is missing.")
        self.facts = parse_level(node_attributes(node), self.where)
        self.chunk_shape = level_chunk_shape(root, self.facts)
        self._families: dict[str, ChunkArray | None] = {}
        self.vertices = self._vertices()

    def _vertices(self) -> ChunkArray | None:
        """Open the vertices; refuse a version other than that of the root."""
        node = self.files.node(f"{self.number}/vertices")
        if node is None:
            # Only a level without vertices may lack the array; otherwise it would be read as empty.
            if self.files.node(f"{self.number}/vertex_group_offsets") is not None or self.facts.get("vertex_count"):
                raise CorruptError(
                    f"{self.where} declares {self.facts.get('vertex_count')} vertices, but has no vertex array."
                )
            return None
        expected = "group" if self.layout == "0.7" else "array"
        # Arrays of the other layout would be listed as a level without chunks.
        if node.get("node_type") != expected:
            raise SourceError(
                f"{self.where} mixes two versions: the root declares {self.layout}, but its vertices are "
                f"{'an' if expected == 'group' else 'no'} array. Write the store again from its source."
            )
        if self.layout == "0.7" and self.files.node(f"{self.number}/vertex_group_offsets") is not None:
            raise SourceError(
                f"{self.where} has 'vertex_group_offsets', which zarr-vectors before 0.6 wrote; write the store again."
            )
        family = self.family("vertices")
        if family is not None and not len(family.keys) and self.facts.get("vertex_count"):
            raise CorruptError(f"{self.where} declares {self.facts['vertex_count']} vertices, but lists no chunk.")
        return family

    def family(self, path: str) -> ChunkArray | None:
        """Return a per-chunk array of the level, or None if it does not exist."""
        if path not in self._families:
            full = f"{self.number}/{path}"
            node = self.files.node(full)
            result: ChunkArray | None = None
            if node is not None:
                result = (
                    CellArray(self.files, full, node) if self.layout == "0.9" else ChunkGroup(self.files, full, node)
                )
            self._families[path] = result
        return self._families[path]

    def names(self, family: str) -> list[str]:
        """Return the names of the attributes of a family."""
        return self.files.children(f"{self.number}/{family}")

    @cached_property
    def n_vertices(self) -> int:
        """Number of vertices declared by the level."""
        return int(self.facts.get("vertex_count") or 0)

    @cached_property
    def keys(self) -> KeyLookup:
        """The chunks with vertices."""
        width = len(self.chunk_shape)
        return KeyLookup(self.vertices.keys if self.vertices is not None else np.zeros((0, width), np.int64))

    @cached_property
    def links_path(self) -> str:
        """Path of the links within chunks."""
        if self.layout == "0.7":
            return "links/0"
        node = self.files.node(f"{self.number}/links/0")
        width = int(node_attributes(node).get("link_width", 2)) if node is not None else 2
        # Links within chunks are in the array whose offsets are all 0.
        zero = ".".join("0" for _ in range(self.keys.keys.shape[1]))
        return "links/0/" + ("_".join([zero] * (width - 1)) or "self")

    @cached_property
    def link_width(self) -> int | None:
        """Number of ends of a link, or None if no links are stored."""
        # In layout 0.7, `links/0` does not exist if all links cross chunks.
        for path in ("links/0", "cross_chunk_links/0"):
            node = self.files.node(f"{self.number}/{path}")
            if node is not None and "link_width" in node_attributes(node):
                return int(node_attributes(node)["link_width"])
        return None

    @property
    def is_draco(self) -> bool:
        """Whether vertices are stored as Draco."""
        return self.vertices is not None and self.vertices.attributes.get("encoding", "raw") == "draco"

    @property
    def tiles(self) -> bool:
        """Whether the level declares that its fragments are its rows in order."""
        return bool(self.facts.get("fragments_tile"))

    def load(
        self,
        rows: NDArray[np.int64],
        wanted: AttributeFilter = all_attributes,
        parts: Sequence[str] = ("fragments", "links"),
    ) -> Level:
        """Return some chunks as a level: vertices, their attributes, and the fragments and links named in `parts`.

        Parameters
        ----------
        rows : (n,) int64
            Rows of the chunks in `keys`, ascending.
        wanted : callable
            Predicate on attribute names.
        parts : sequence of str
            ``"fragments"`` and ``"links"``.
        """
        keys = self.keys.keys[rows]
        positions, bounds, faces = self._positions(keys)
        fragments = self._fragments(keys, np.diff(bounds)) if "fragments" in parts else None
        links = self._links(keys, faces, wanted) if "links" in parts else None
        n_fragments = None if fragments is None else fragments.bounds
        return Level(
            chunks=keys,
            bounds=bounds,
            positions=positions,
            fragments=fragments,
            links=links,
            vertex_attributes=self._attributes("vertex_attributes", keys, bounds, wanted),
            fragment_attributes={}
            if n_fragments is None
            else self._attributes("fragment_attributes", keys, n_fragments, wanted),
            encoding="draco" if self.is_draco else "raw",
            metadata=extra_level_metadata(self.facts),
        )

    def _positions(
        self, keys: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[np.int64], list[NDArray[np.int64]] | None]:
        """Return positions and bounds of chunks, and the faces stored in Draco cells."""
        n_dims = len(self.root.axes)
        if self.vertices is None:
            return np.zeros((0, n_dims), np.float32), np.zeros(len(keys) + 1, np.int64), None
        raw = [np.zeros(0, np.uint8) if blob is None else blob for blob in self.vertices.read(keys)]
        dtype = declared_dtype(self.vertices.attributes, f"{self.where}/vertices")
        if self.is_draco:
            from raggedatlas.vectors.storage.codecs import decode_cell

            decoded = [decode_cell(blob, f"{self.where}/vertices") for blob in raw]
            bounds = counts_to_offsets(np.array([len(points) for points, _ in decoded], np.int64))
            found = np.concatenate([points for points, _ in decoded]) if decoded else np.zeros((0, n_dims), np.float32)
            return found.astype(dtype), bounds, [faces for _, faces in decoded]
        size = dtype.itemsize * n_dims
        counts = np.array([blob.size for blob in raw], np.int64)
        if (counts % size).any():
            bad = keys[int(np.flatnonzero(counts % size)[0])]
            raise CorruptError(
                f"{self.where}/vertices, chunk {bad.tolist()}: {counts[counts % size > 0][0]} bytes are not a multiple of {size}."
            )
        return from_bytes(concat_bytes(raw), dtype, n_dims), counts_to_offsets(counts // size), None

    def _fragments(self, keys: NDArray[np.int64], sizes: NDArray[np.int64]) -> Fragments:
        """Return the vertex fragments of chunks; if none are stored, each chunk is one."""
        family = self.family("vertex_fragments")
        return self._index(family, keys, sizes, "vertex_fragments")

    def _index(
        self, family: ChunkArray | None, keys: NDArray[np.int64], sizes: NDArray[np.int64], name: str
    ) -> Fragments:
        """Decode a fragment index; refuse rows that the chunks do not have."""
        if family is None:
            ones = np.ones(len(keys), bool)
            return Fragments(
                np.arange(len(keys) + 1), ones, np.zeros(len(keys), np.int64), sizes, np.zeros(0, np.int64)
            )
        blobs = concat_blobs([EMPTY_INDEX if blob is None or not blob.size else blob for blob in family.read(keys)])
        found = decode_fragments(blobs, f"{self.where}/{name}")
        limit = np.repeat(sizes, np.diff(found.bounds))
        listed = np.repeat(limit[~found.is_range], found.counts[~found.is_range])
        # By subtraction, because start + count may exceed int64. Starts of lists are no rows, hence the mask.
        beyond = (found.counts > limit) | (found.starts > limit - found.counts)
        if (beyond & found.is_range).any() or (found.rows >= listed).any():
            raise CorruptError(
                f"{self.where}/{name} refers to a row that its chunk does not have. Restore it from a copy."
            )
        return found

    def _links(
        self, keys: NDArray[np.int64], faces: list[NDArray[np.int64]] | None, wanted: AttributeFilter
    ) -> Links | None:
        """Return the links within chunks."""
        family = self.family(self.links_path)
        # A `links` array, if there is one, has priority over the faces in Draco cells.
        if faces is not None and family is None:
            bounds = counts_to_offsets(np.array([len(part) for part in faces], np.int64))
            rows = np.concatenate(faces) if faces else np.zeros((0, 3), np.int64)
            return Links(bounds, rows, attributes=self._attributes("link_attributes", keys, bounds, wanted))
        if family is None or self.link_width is None:
            return None
        dtype = declared_dtype(family.attributes, f"{self.where}/links")
        raw = [np.zeros(0, np.uint8) if blob is None else blob for blob in family.read(keys)]
        size = dtype.itemsize * self.link_width
        counts = np.array([blob.size for blob in raw], np.int64)
        if (counts % size).any():
            raise CorruptError(
                f"{self.where}/links has a chunk whose size is not a multiple of the link size, {size} bytes."
            )
        bounds = counts_to_offsets(counts // size)
        own = self.family("link_fragments")
        parts = None if own is None else self._index(own, keys, np.diff(bounds), "link_fragments")
        rows = from_bytes(concat_bytes(raw), dtype, self.link_width)
        return Links(bounds, rows, parts, self._attributes("link_attributes", keys, bounds, wanted))

    def _attributes(
        self, group: str, keys: NDArray[np.int64], bounds: NDArray[np.int64], wanted: AttributeFilter
    ) -> dict[str, Attribute]:
        """Return the requested attributes of chunks; only their arrays are read."""
        result = {}
        tail = self.links_path.removeprefix("links") if group == "link_attributes" else ""
        for name in filter(wanted, self.attribute_names(group)):
            family = self.family(f"{group}/{name}{tail}")
            if family is None:
                continue
            where = f"{self.where}/{group}/{name}"
            raw = [np.zeros(0, np.uint8) if blob is None else blob for blob in family.read(keys)]
            result[name] = decode_attribute(family.attributes, raw, np.diff(bounds), where)
        return result

    def read_partition_attribute(
        self, keys: NDArray[np.int64], counts: NDArray[np.int64], wanted: AttributeFilter
    ) -> dict[str, Attribute]:
        """Return the attribute that partitions the chunks, if requested and not stored in an array."""
        name = str(self.facts.get("chunk_attribute_name") or "")
        if not name or not wanted(name) or name in self.attribute_names("vertex_attributes"):
            return {}
        return read_partition_attribute(self.facts, keys, counts, len(self.root.axes), self.where)

    def attribute_names(self, group: str) -> list[str]:
        """Return the names of the attributes of a family; cached."""
        if group not in self._listed:
            self._listed[group] = self.names(group)
        return self._listed[group]

    @cached_property
    def _listed(self) -> dict[str, list[str]]:
        return {}


# Magic number in little-endian order, version 1 and flags 0; both counts are 0.
EMPTY_INDEX: Bytes = np.frombuffer(b"GFVZ\1\0\0\0" + bytes(8), np.uint8)
"""The fragment index of a chunk without fragments."""


def declared_dtype(attributes: Mapping[str, Any], where: str, *, texts: bool = False) -> np.dtype[Any]:
    """Return the declared dtype, little-endian; with `texts` also fixed-length NumPy strings."""
    name = attributes.get("dtype")
    try:
        # Without `str`, a missing dtype would be read as float64, which `np.dtype(None)` is.
        found = np.dtype(str(name))
    except TypeError:
        found = np.dtype("O")
    if not (found.kind in "iuf" or (texts and found.kind in "US" and found.itemsize)):
        raise CorruptError(f"{where} declares the type {name!r}; expected integers or floats.")
    return found.newbyteorder("<")


@dataclass(frozen=True)
class AttributeStorage:
    """Storage of the rows of an attribute.

    Parameters
    ----------
    dtype : dtype
        Dtype of a value.
    columns : int or None
        Values per row; None: one, and the attribute has one axis.
    channels : tuple of str
        Names of the channels, if they are named.
    extra : dict
        Metadata besides array and name.
    """

    dtype: np.dtype[Any]
    columns: int | None
    channels: tuple[str, ...]
    extra: dict[str, Any]

    @property
    def size(self) -> int:
        """Size of a row in bytes."""
        return self.dtype.itemsize * (self.columns or 1)

    def attribute(self, data: Bytes) -> Attribute:
        """Return rows as an attribute; strings become codes with categories, as in `Attribute`."""
        values = from_bytes(data, self.dtype, self.columns)
        if self.dtype.kind not in "US":
            return Attribute(values, self.channels, None, self.extra)
        try:
            # The categories are those of these rows: codes from two calls are not comparable.
            categories, codes = np.unique(values.astype(str), return_inverse=True)
            labels = categories.tolist()
        except (ValueError, UnicodeDecodeError) as error:
            raise CorruptError(f"A text attribute does not decode: {error}. Restore the store from a copy.") from error
        coded = {"encoding": "dictionary", "categories": labels, "ordered": False}
        return Attribute(codes.reshape(values.shape).astype(np.int32), self.channels, None, {**self.extra, **coded})


def attribute_storage(
    block: Mapping[str, Any], raw: Sequence[Bytes], rows: NDArray[np.int64], where: str
) -> AttributeStorage:
    """Return the storage of an attribute, after checking it against the bytes of chunks.

    zarr-vectors 0.9.2 declares rows of one value (``"row_shape": []``) even for attributes with several columns, and 0.2.0 declares
    no shape; the number of columns then follows from the bytes, if it is the same in every chunk.

    Raises
    ------
    CorruptError
        If a chunk does not have one row per vertex, fragment or link.
    """
    dtype = declared_dtype(block, where, texts=True)
    counts = np.array([blob.size for blob in raw], np.int64)
    shape = block.get("row_shape", block.get("shape"))
    channels = tuple(str(name) for name in block.get("channel_names") or ())
    columns: int | None = None
    if shape:
        columns = int(np.prod(shape))
    elif len(channels) > 1:
        columns = len(channels)
    else:
        total, found = int(rows.sum()), int(counts.sum()) // dtype.itemsize
        # Chunks without rows do not tell the number of columns; one axis is assumed.
        columns = found // total if total and found > total and found % total == 0 else None
    form = AttributeStorage(dtype, columns, channels if len(channels) == (columns or 1) else (), extra_metadata(block))
    if (counts != rows * form.size).any():
        bad = int(np.flatnonzero(counts != rows * form.size)[0])
        raise CorruptError(
            f"{where} has {counts[bad] / form.size:g} rows in a chunk; expected {rows[bad]}. Restore it from a copy."
        )
    return form


def decode_attribute(block: Mapping[str, Any], raw: Sequence[Bytes], rows: NDArray[np.int64], where: str) -> Attribute:
    """Return the rows of an attribute from the bytes of chunks, validated by `attribute_storage`."""
    return attribute_storage(block, raw, rows, where).attribute(concat_bytes(raw))


def extra_metadata(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of an attribute besides array and name."""
    return {key: value for key, value in block.items() if key not in _BLOCK_KEYS}


def concat_bytes(parts: Sequence[Bytes]) -> Bytes:
    """Concatenate bytes; a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)
