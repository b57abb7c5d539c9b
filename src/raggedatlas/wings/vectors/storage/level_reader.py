"""Reader of one level of an open store, in either layout: chunked arrays, object index, groups and tables of objects."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, NotFoundError, SourceError
from raggedatlas.store.untrusted import zarr_errors
from raggedatlas.wings.vectors.geometry import (
    OWN_LEVEL_KEYS,
    Fragments,
    Geometry,
    Level,
    Links,
    Objects,
    check_stored_edges,
    level_chunk_shape,
)
from raggedatlas.wings.vectors.shapes import Attribute, Groups, counts_to_offsets
from raggedatlas.wings.vectors.storage.codecs import (
    EMPTY,
    STRINGS,
    Blobs,
    Bytes,
    chunks_as_fragments,
    concat_blobs,
    decode_cell,
    decode_fragments,
    decode_groups,
    decode_manifests,
    from_bytes,
    lacks_rows,
    split_manifests,
    take_blobs,
    take_manifests,
)
from raggedatlas.wings.vectors.storage.zarr_reader import (
    CellArray,
    ChunkArray,
    ChunkGroup,
    KeyLookup,
    StoreFiles,
    VlenArray,
    node_attributes,
    read_array,
    read_array_bytes,
)

_BLOCK_KEYS = {
    *("zv_array", "zvf_array", "name", "dtype", "shape", "row_shape", "channel_names", "nonempty_chunks"),
    *("chunk_grid_origin", "offsets", "level_delta", "has_perm", "num_links"),
    *("fill_sentinel_meaning", "has_present_mask"),
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
    """Reader of the arrays of one level of a store; `root` is the root metadata, without levels.

    Raises `SourceError` if the version of its arrays is not that of the root, or is unsupported.
    """

    def __init__(self, files: StoreFiles, root: Geometry, layout: str, number: int) -> None:
        self.files, self.root, self.layout, self.number = files, root, layout, number
        self.where = f"{files.root}/{number}"
        node = files.node(str(number))
        if node is None:
            raise CorruptError(f"{self.where} is missing.")
        facts = node_attributes(node).get("zarr_vectors_level")
        if not isinstance(facts, Mapping):
            raise CorruptError(f"{self.where} has no 'zarr_vectors_level' attributes.")
        self.facts = dict(facts)
        self.n_vertices = int(self.facts.get("vertex_count") or 0)  # as declared
        self.chunk_shape = level_chunk_shape(root, self.facts)
        check_stored_edges(self.chunk_shape, root.n_dims, f"{self.where}: chunk_shape")
        self._families: dict[str, ChunkArray | None] = {}
        self.vertices = self._open_vertices()

    def _open_vertices(self) -> ChunkArray | None:
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

    @cached_property
    def keys(self) -> KeyLookup:
        """The chunks with vertices."""
        keys = np.zeros((0, 0), np.int64) if self.vertices is None else self.vertices.keys
        # In layout 0.7 a level without chunks does not tell how many parts their keys would have.
        return KeyLookup(keys if keys.shape[1] else np.zeros((0, len(self.chunk_shape)), np.int64))

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

        `rows`, (n,), are rows of the chunks in `keys`, ascending. `wanted` is a predicate on attribute names.
        """
        keys = self.keys.keys[rows]
        positions, bounds, faces = self._positions(keys)
        fragments = self._index("vertex_fragments", keys, np.diff(bounds)) if "fragments" in parts else None
        own = np.zeros(0, np.int64) if fragments is None else np.diff(fragments.bounds)
        return Level(
            chunks=keys,
            bounds=bounds,
            positions=positions,
            fragments=fragments,
            links=self._links(keys, faces, wanted) if "links" in parts else None,
            vertex_attributes=self.attributes("vertex_attributes", keys, np.diff(bounds), wanted),
            fragment_attributes={} if fragments is None else self.attributes("fragment_attributes", keys, own, wanted),
            encoding="draco" if self.is_draco else "raw",
            metadata={key: value for key, value in self.facts.items() if key not in OWN_LEVEL_KEYS},
        )

    def read_rows(
        self, family: ChunkArray, keys: NDArray[np.int64], columns: int, name: str
    ) -> tuple[list[Bytes], np.dtype[Any], NDArray[np.int64]]:
        """Return the bytes of some chunks of an array with rows of `columns` values.

        Also returns the dtype of the values, and the number of rows of each chunk. Raises `CorruptError` if the dtype
        is not numeric, or a chunk has an incomplete row.
        """
        dtype, raw = declared_dtype(family.attributes, f"{self.where}/{name}"), family.read(keys)
        sizes, size = blob_sizes(raw), dtype.itemsize * columns
        bad = np.flatnonzero(sizes % size)
        if bad.size:
            raise CorruptError(
                f"{self.where}/{name}, chunk {keys[bad[0]].tolist()}: {sizes[bad[0]]} bytes are not a multiple of {size}."
            )
        return raw, dtype, sizes // size

    def _positions(
        self, keys: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[np.int64], list[NDArray[np.int64]] | None]:
        """Return positions and bounds of chunks, and the faces stored in Draco cells."""
        n_dims = len(self.root.axes)
        if self.vertices is None:
            return np.zeros((0, n_dims), np.float32), np.zeros(len(keys) + 1, np.int64), None
        if not self.is_draco:
            raw, dtype, counts = self.read_rows(self.vertices, keys, n_dims, "vertices")
            return from_bytes(concat_bytes(raw), dtype, n_dims), counts_to_offsets(counts), None
        decoded = [decode_cell(blob, f"{self.where}/vertices") for blob in self.vertices.read(keys)]
        bounds = counts_to_offsets(np.array([len(points) for points, _ in decoded], np.int64))
        positions = np.concatenate([np.zeros((0, n_dims), np.float32), *(points for points, _ in decoded)])
        dtype = declared_dtype(self.vertices.attributes, f"{self.where}/vertices")
        return positions.astype(dtype), bounds, [faces for _, faces in decoded]

    def index_blobs(self, name: str, keys: NDArray[np.int64]) -> list[Bytes] | None:
        """Return the fragment index of each chunk; None if the level stores none."""
        family = self.family(name)
        # Where the array exists, a chunk without a blob has no fragments; it is not one fragment.
        return None if family is None else [blob if blob.size else EMPTY_INDEX for blob in family.read(keys)]

    def _index(self, name: str, keys: NDArray[np.int64], sizes: NDArray[np.int64]) -> Fragments:
        """Return fragments of chunks, after refusing rows that the chunks do not have; if none are stored, each chunk is one."""
        blobs = self.index_blobs(name, keys)
        if blobs is None:
            return chunks_as_fragments(sizes)
        fragments = decode_fragments(concat_blobs(blobs), f"{self.where}/{name}")
        if lacks_rows(fragments, sizes).any():
            raise CorruptError(
                f"{self.where}/{name} refers to a row that its chunk does not have. Restore it from a copy."
            )
        return fragments

    def _links(
        self, keys: NDArray[np.int64], faces: list[NDArray[np.int64]] | None, wanted: AttributeFilter
    ) -> Links | None:
        """Return the links within chunks."""
        family, parts = self.family(self.links_path), None
        # A `links` array, if there is one, has priority over the faces in Draco cells.
        if faces is not None and family is None:
            counts = np.array([len(part) for part in faces], np.int64)
            rows = np.concatenate([np.zeros((0, 3), np.int64), *faces])
        elif family is None or self.link_width is None:
            return None
        else:
            raw, dtype, counts = self.read_rows(family, keys, self.link_width, "links")
            rows = from_bytes(concat_bytes(raw), dtype, self.link_width)
            parts = None if self.family("link_fragments") is None else self._index("link_fragments", keys, counts)
        tail = self.links_path.removeprefix("links")
        attributes = self.attributes("link_attributes", keys, counts, wanted, tail)
        return Links(counts_to_offsets(counts), rows, parts, attributes)

    def attributes(
        self, group: str, keys: NDArray[np.int64], counts: NDArray[np.int64], wanted: AttributeFilter, tail: str = ""
    ) -> dict[str, Attribute]:
        """Return the requested attributes of chunks with `counts` rows each; only their arrays are read.

        The array of an attribute is ``group/name`` with `tail` appended, which names the arrays of links.
        """
        result = {}
        for name in filter(wanted, self.attribute_names(group)):
            family = self.family(f"{group}/{name}{tail}")
            if family is not None:
                where = f"{self.where}/{group}/{name}{tail}"
                result[name] = decode_attribute(family.attributes, family.read(keys), counts, where)
        return result

    def read_partition_attribute(
        self, keys: NDArray[np.int64], counts: NDArray[np.int64], wanted: AttributeFilter
    ) -> dict[str, Attribute]:
        """Return the attribute that the first part of chunk keys encodes, if requested and not stored in an array.

        That part is the index of a value in ``chunk_attribute_values``. `counts` is the number of vertices of each key, of
        chunks or fragments. Numbers are unchanged, texts become codes of categories.
        """
        name, values = str(self.facts.get("chunk_attribute_name") or ""), self.facts.get("chunk_attribute_values")
        if not name or not wanted(name) or name in self.attribute_names("vertex_attributes"):
            return {}
        if not isinstance(values, list) or keys.shape[1] != len(self.root.axes) + 1:
            return {}
        codes = keys[:, 0]
        bad = codes[(codes < 0) | (codes >= len(values))]
        if bad.size:
            raise CorruptError(
                f"{self.where} has a chunk with value {bad[0]} of {name!r}, which has {len(values)} values."
            )
        if all(isinstance(value, int | float) for value in values):
            return {name: Attribute(np.repeat(np.array(values)[codes] if values else codes, counts))}
        metadata = {"encoding": "dictionary", "categories": list(map(str, values)), "ordered": False, "_FillValue": -1}
        return {name: Attribute(np.repeat(codes, counts).astype(np.int32), metadata=metadata)}

    def attribute_names(self, group: str) -> list[str]:
        """Return the names of the attributes of a family; cached."""
        if group not in self._listed:
            self._listed[group] = self.files.children(f"{self.number}/{group}")
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
        dtype = np.dtype(str(name))
    except TypeError:
        dtype = np.dtype("O")
    if not (dtype.kind in "iuf" or (texts and dtype.kind in "US" and dtype.itemsize)):
        raise CorruptError(f"{where} declares the type {name!r}; expected integers or floats.")
    return dtype.newbyteorder("<")


@dataclass(frozen=True)
class AttributeStorage:
    """Storage of the rows of an attribute."""

    dtype: np.dtype[Any]  # of a value
    columns: int | None  # values per row; None: one, and the attribute has one axis
    channels: tuple[str, ...]  # names of the channels, if they are named
    extra: dict[str, Any]  # metadata besides array and name

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

    zarr-vectors 0.9.2 declares rows of one value (``"row_shape": []``) even for attributes with several columns, and
    0.2.0 declares no shape; the number of columns then follows from the bytes, if it is the same in every chunk. Raises
    `CorruptError` if a chunk does not have one row per vertex, fragment or link.
    """
    dtype = declared_dtype(block, where, texts=True)
    counts = blob_sizes(raw)
    shape = block.get("row_shape", block.get("shape"))
    channels = tuple(str(name) for name in block.get("channel_names") or ())
    columns: int | None = None
    if shape:
        columns = int(np.prod(shape))
    elif len(channels) > 1:
        columns = len(channels)
    else:
        total, n_values = int(rows.sum()), int(counts.sum()) // dtype.itemsize
        # Chunks without rows do not tell the number of columns; one axis is assumed.
        columns = n_values // total if total and n_values > total and n_values % total == 0 else None
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


def blob_sizes(parts: Sequence[Bytes]) -> NDArray[np.int64]:
    """Return the number of bytes of each part."""
    return np.array([part.size for part in parts], np.int64)


def concat_bytes(parts: Sequence[Bytes]) -> Bytes:
    """Concatenate bytes; a single part is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate([EMPTY, *parts])


class ObjectIndex:
    """The objects of a level and their fragments."""

    def __init__(self, level: LevelReader) -> None:
        self.level = level
        self.path = f"{level.number}/object_index"
        node = level.files.node(self.path)
        self.block: dict[str, Any] = {} if node is None else node_attributes(node)
        self.is_there = node is not None
        layout = str(self.block.get("layout", ""))
        if layout not in {"", "vlen_manifests_v1", "vlen_manifests_v2"}:
            raise SourceError(f"{level.where}/object_index has layout {layout!r}; versions 1 and 2 are supported.")

    @cached_property
    def n_dims(self) -> int:
        """Number of coordinates of a chunk in a manifest."""
        width = int(self.level.keys.keys.shape[1])
        n_dims = self.block.get("sid_ndim") or width
        if n_dims != width:
            raise CorruptError(
                f"{self.level.where}/object_index declares sid_ndim {n_dims!r}; expected {width}, as in chunk keys."
            )
        return width

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """Ids of all objects, ascending: (B,) int64."""
        stored = self._stored_ids
        return np.arange(self.n_objects) if stored is None else np.sort(stored)

    @cached_property
    def _stored_ids(self) -> NDArray[np.int64] | None:
        """Ids in manifest order, if they are not row numbers."""
        table = read_array(self.level.files, f"{self.path}/object_ids", sparse=True) if self.is_there else None
        if table is None:
            return None
        ids = table.astype(np.int64)
        if len(ids) != self.n_objects or len(np.unique(ids)) != len(ids):
            raise CorruptError(
                f"{self.level.where}/object_index/object_ids does not hold {self.n_objects} distinct ids."
            )
        return ids

    @cached_property
    def _order(self) -> NDArray[np.int64] | None:
        """Manifest of each object by ascending id, if they are stored in another order."""
        stored = self._stored_ids
        # Ids need not be stored in ascending order, while `ids`, `every` and `rows_of` are by ascending id.
        if stored is None or (np.diff(stored) > 0).all():
            return None
        return np.argsort(stored)

    @cached_property
    def n_objects(self) -> int:
        """Number of objects."""
        declared = self.block.get("num_objects", 0 if self.items is None else self.items.n_items)
        # A boolean is an instance of int, but no number of objects.
        if type(declared) is not int or declared < 0 or (self.items is not None and declared != self.items.n_items):
            stored = "" if self.items is None else f" and holds {self.items.n_items} manifests"
            raise CorruptError(
                f"{self.level.where}/object_index declares {declared!r} objects{stored}. Restore the store from a copy."
            )
        return declared

    @cached_property
    def items(self) -> VlenArray | None:
        """The manifests as an array of byte strings, if they are stored as one."""
        path = f"{self.path}/manifests"
        node = self.level.files.node(path) if self.is_there else None
        return None if node is None else VlenArray(self.level.files, path, node)

    @cached_property
    def _flat(self) -> Blobs:
        """The manifests of ``object_index/data``, split by the sidecar or by scanning."""
        data = read_array_bytes(self.level.files, f"{self.path}/data")
        if data is None:
            if self.n_objects:
                raise CorruptError(
                    f"{self.level.where}/object_index declares {self.n_objects} objects, but has no manifests."
                )
            return Blobs(EMPTY, np.zeros(1, np.int64))
        starts = read_array_bytes(self.level.files, f"{self.path}/offsets")
        if starts is None:
            return split_manifests(data, self.n_dims, self.n_objects)
        bounds = np.append(from_bytes(starts, np.int64), data.size)
        if len(bounds) != self.n_objects + 1 or bounds[0] != 0 or (np.diff(bounds) < 0).any():
            raise CorruptError(
                f"{self.level.where}/object_index/offsets does not split the data into {self.n_objects} manifests."
            )
        return Blobs(data, bounds)

    @cached_property
    def every(self) -> Objects:
        """The complete index."""
        blobs = self._flat if self.items is None else self.items.read()
        if self._order is not None:
            blobs = take_blobs(blobs, self._order)
        return decode_manifests(blobs, self.n_dims, self.ids)

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index rows of objects; raise `NotFoundError` if an id does not exist."""
        if self._stored_ids is None:
            rows, good = ids, (ids >= 0) & (ids < self.n_objects)
        else:
            # An id above all others is placed after the last row; the comparison refuses it.
            rows = np.minimum(np.searchsorted(self.ids, ids), max(len(self.ids) - 1, 0))
            good = self.ids[rows] == ids if len(self.ids) else np.zeros(len(ids), bool)
        if not good.all():
            raise NotFoundError(
                f"Object {ids[~good][0]} does not exist in {self.level.where}; it has {self.n_objects:,} objects."
            )
        return rows

    def take(self, ids: NDArray[np.int64]) -> Objects:
        """Return the index of some objects, in the given order; only their manifests are read."""
        rows = self.rows_of(ids)
        at = rows if self._order is None else self._order[rows]
        blobs = take_blobs(self._flat, at) if self.items is None else self.items.read(at)
        return decode_manifests(blobs, self.n_dims, ids)

    @cached_property
    def by_chunk(self) -> tuple[NDArray[np.int64], Objects]:
        """All blocks in chunk order.

        Row of each block's chunk among those of the level (-1: absent), and an index whose entries are one block each,
        with the id of its object.
        """
        every = self.every
        chunk = self.level.keys.find(every.chunks)
        # Chunks ascend in the result, because `LevelQuery._owners` searches it by bisection.
        order = np.argsort(chunk, kind="stable")
        ids = np.repeat(every.ids, np.diff(every.bounds))
        alone = replace(every, ids=ids, bounds=np.arange(len(ids) + 1))
        return chunk[order], take_manifests(alone, order)


def read_groups(level: LevelReader) -> Groups | None:
    """Return the groups of a level, or None if it has none."""
    path = f"{level.number}/groups"
    node = level.files.node(path)
    if node is None:
        return None
    block = node_attributes(node)
    if level.layout == "0.9":
        where, blobs = f"{level.where}/groups", VlenArray(level.files, path, node).read()
        # Group by group: sizes that are no multiples of 8 may add up to one.
        if not (blobs.bounds % 8).any() and not block.get("group_ranges"):
            offsets, ids = blobs.bounds // 8, from_bytes(blobs.data, np.int64, what=where)
        else:
            parts = [from_bytes(blobs[i], np.int64, what=where) for i in range(len(blobs))]
            index = ObjectIndex(level)
            n_objects = index.n_objects if index.is_there else level.n_vertices
            for group, (start, stop) in (block.get("group_ranges") or {}).items():
                # The length is limited before `arange` allocates memory for a damaged range.
                if not 0 <= int(group) < len(parts) or not 0 <= int(start) <= int(stop) <= int(start) + n_objects:
                    raise CorruptError(
                        f"{where} has a range {start} to {stop} for group {group}; expected groups 0 to {len(parts) - 1} and at "
                        f"most {n_objects:,} objects. Restore the store from a copy."
                    )
                parts[int(group)] = np.arange(int(start), int(stop))
            offsets, ids = counts_to_offsets(np.array([len(part) for part in parts], np.int64)), np.concatenate(parts)
    else:
        data = read_array_bytes(level.files, f"{path}/data")
        starts = read_array_bytes(level.files, f"{path}/offsets")
        content = EMPTY if data is None else data
        begin = None if starts is None else from_bytes(starts, np.int64)
        offsets, ids = decode_groups(content, begin, int(block.get("num_groups", 0)))
    return Groups(offsets, ids, read_tables(level, "group_attributes"))


def read_tables(level: LevelReader, family: str) -> dict[str, Attribute]:
    """Return the attributes of objects or groups."""
    result = {}
    for name in level.attribute_names(family):
        attribute = read_table_attribute(level, family, name)
        if attribute is not None:
            result[name] = attribute
    return result


def read_table_attribute(level: LevelReader, family: str, name: str) -> Attribute | None:
    """Return one attribute of objects or groups."""
    path = f"{level.number}/{family}/{name}"
    node = level.files.node(path)
    if node is None:
        return None
    with zarr_errors(f"{level.where}/{family}/{name}"):
        block = node_attributes(node)
        channels = tuple(str(channel) for channel in block.get("channel_names") or ())
        if node["node_type"] == "array":
            values = read_array(level.files, path, sparse=True)
            if values is None:
                return None
            present = None
            if block.get("fill_sentinel_meaning") == "absent":
                fill = node.get("fill_value")
                if values.dtype.kind == "f":
                    absent = np.isnan(values) if fill in {"NaN", None} else values == float(fill)
                else:
                    absent = values == np.asarray(fill).astype(values.dtype)
                rows = ~absent.reshape(len(values), -1).all(axis=1) if len(values) else np.zeros(0, bool)
                present = None if rows.all() else rows
            return Attribute(values, channels, present, extra_metadata(block))
        raw = read_array_bytes(level.files, f"{path}/data")
        if raw is None:
            return None
        dtype = str(block.get("dtype"))
        shape = block.get("shape") or [-1]
        columns = int(np.prod(shape[1:])) if len(shape) > 1 else None
        values = from_bytes(raw, np.dtype(dtype).newbyteorder("<"), columns, f"{level.where}/{family}/{name}")
        mask = read_array_bytes(level.files, f"{path}/present_mask") if block.get("has_present_mask") else None
        attribute = Attribute(values, channels, None if mask is None else mask.astype(bool), extra_metadata(block))
        if not block.get(STRINGS):
            return attribute
        # The appended empty string is what the code -1 of absent rows selects.
        categories = np.array([*attribute.metadata["categories"], ""], dtype=str)
        codes, there = attribute.values, attribute.present
        if there is not None:
            codes = np.where(there if codes.ndim == 1 else there[:, None], codes, -1)
        coded = {"encoding", "categories", "ordered", STRINGS}
        kept = {key: value for key, value in attribute.metadata.items() if key not in coded}
        return replace(attribute, values=categories[codes], metadata=kept)
