"""Zarr v3 nodes as files: groups, plain arrays, vlen-bytes arrays, sharded grids of cells, and the arrays of a level."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.store.arrays import compose_index
from raggedatlas.vectors.geometry import Level
from raggedatlas.vectors.shapes import Attribute, counts_to_offsets
from raggedatlas.vectors.storage.codecs import (
    Blobs,
    concat_blobs,
    encode_cells,
    encode_fragments,
    encode_vlen,
    to_bytes,
)

File: TypeAlias = tuple[str, Sequence[bytes | memoryview]]
"""A key and the parts of its content."""

BYTES_CODEC: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
BYTE_CODEC: dict[str, Any] = {"name": "bytes"}
ZSTD_CODEC = {"name": "zstd", "configuration": {"level": 0, "checksum": False}}
VLEN_CODEC = {"name": "vlen-bytes", "configuration": {}}
_BLOSC = {"blosc": "zstd", "lz4": "lz4"}
"""Compressor inside Blosc, after the byte shuffle."""
COMPRESSORS = ("zstd", *_BLOSC)
MAX_SHARD_SLOTS = 4096
"""Maximum number of cells in a shard."""
_MANIFESTS = 128


@dataclass(frozen=True)
class CellGridOptions:
    """File layout of cells.

    Parameters
    ----------
    origin : (K,) int64
        Chunk key of the first cell.
    shape : (K,) int64
        Number of cells on each axis.
    shards : bool
        Whether many cells share a file.
    compression : str or None
        A member of `COMPRESSORS`.
    """

    origin: NDArray[np.int64]
    shape: NDArray[np.int64]
    shards: bool = True
    compression: str | None = None


def to_json(value: Mapping[str, Any]) -> bytes:
    """Return metadata as JSON; NaN and infinities are refused, because JSON has none."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def group_json(path: str, attributes: Mapping[str, Any]) -> File:
    """Return a group's ``zarr.json``."""
    key = f"{path}/zarr.json" if path else "zarr.json"
    return key, [to_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})]


def array_json(
    shape: Sequence[int],
    chunks: Sequence[int],
    data_type: str,
    codecs: Sequence[Mapping[str, Any]],
    attributes: Mapping[str, Any],
    fill: Any = 0,  # noqa: ANN401 - a scalar of that type
) -> bytes:
    """Return an array's ``zarr.json``."""
    return to_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [int(size) for size in shape],
            "data_type": data_type,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [int(size) for size in chunks]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": fill,
            "codecs": list(codecs),
            "attributes": attributes,
            "storage_transformers": [],
        }
    )


def compressor_codec(name: str, itemsize: int) -> dict[str, Any]:
    """Return a member of `COMPRESSORS` as the codec for values of the given item size."""
    if name == "zstd":
        return ZSTD_CODEC
    own = {"typesize": itemsize, "cname": _BLOSC[name], "clevel": 5, "shuffle": "shuffle", "blocksize": 0}
    return {"name": "blosc", "configuration": own}


def compress(data: bytes | memoryview, name: str | None, itemsize: int) -> bytes | memoryview:
    """Return bytes compressed with `compressor_codec`, or unchanged."""
    if name is None:
        return data
    from numcodecs import blosc, zstd

    if name == "zstd":
        return bytes(zstd.compress(data, 0))
    return bytes(blosc.compress(bytes(data), _BLOSC[name].encode(), 5, blosc.SHUFFLE, typesize=itemsize))


def plain_array(
    path: str,
    values: NDArray[Any],
    attributes: Mapping[str, Any],
    compression: str | None,
    chunk_rows: int | None = None,
    fill: Any = 0,  # noqa: ANN401 - a scalar of that type
) -> Iterator[File]:
    """Yield a plain array of numbers or strings, in chunks of at most `chunk_rows` rows; None: one chunk."""
    rows = max(1, min(len(values), chunk_rows or len(values)))
    is_text = values.dtype.kind in "UTO"
    kind, itemsize = ("string", 1) if is_text else (values.dtype.name, values.dtype.itemsize)
    codecs = [{"name": "vlen-utf8", "configuration": {}}] if is_text else [BYTES_CODEC if itemsize > 1 else BYTE_CODEC]
    if compression is not None:
        codecs.append(compressor_codec(compression, itemsize))
    # JSON has no NaN; Zarr writes it as text.
    said = "NaN" if isinstance(fill, float) and np.isnan(fill) else fill
    # Zarr does not allow chunks of length 0, not even for an empty array.
    chunk = [rows, *(max(1, size) for size in values.shape[1:])]
    yield f"{path}/zarr.json", [array_json(values.shape, chunk, kind, codecs, attributes, said)]
    for i in range(-(-len(values) // rows) if values.size else 0):
        part = values[i * rows : (i + 1) * rows]
        # Zarr stores all chunks at full size, so the last one is padded.
        short = rows - len(part)
        if is_text:
            texts = [str(text).encode() for text in part.reshape(-1).tolist()] + [b""] * short * part[0].size
            raw: bytes | memoryview = encode_vlen(concat_blobs(texts))
        else:
            padded = np.concatenate([part, np.full((short, *part.shape[1:]), fill, part.dtype)]) if short else part
            raw = to_bytes(padded).data
        key = "/".join([path, "c", str(i), *("0" for _ in values.shape[1:])])
        yield key, [compress(raw, compression, itemsize)]


def vlen_array(path: str, blobs: Blobs, attributes: Mapping[str, Any]) -> Iterator[File]:
    """Yield byte strings as one sharded array, with 128 items per inner chunk for random access."""
    inner = min(_MANIFESTS, max(1, len(blobs)))
    n_inner = -(-len(blobs) // inner)
    shard = inner * max(1, n_inner)
    codecs = [sharding_codec([inner], [VLEN_CODEC, ZSTD_CODEC])]
    yield f"{path}/zarr.json", [array_json([len(blobs)], [shard], "variable_length_bytes", codecs, attributes, "")]
    if not len(blobs):
        return
    chunks = []
    for i in range(n_inner):
        bounds = blobs.bounds[i * inner : (i + 1) * inner + 1]
        # Padding items are empty: they repeat the last bound.
        bounds = np.concatenate([bounds, np.full(inner + 1 - len(bounds), bounds[-1])])
        part = Blobs(blobs.data[bounds[0] : bounds[-1]], bounds - bounds[0])
        chunks.append(compress(encode_vlen(part), "zstd", 1))
    sizes = np.array([len(chunk) for chunk in chunks], np.int64)
    index = np.stack([np.cumsum(sizes) - sizes, sizes], axis=1)
    yield f"{path}/c/0", [*chunks, compose_index(index)]


def sharding_codec(inner: Sequence[int], codecs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sharding codec: chunks of `inner`, index at the end with crc32c."""
    return {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [int(size) for size in inner],
            "codecs": list(codecs),
            "index_codecs": [BYTES_CODEC, {"name": "crc32c"}],
            "index_location": "end",
        },
    }


def cell_array(
    path: str, keys: NDArray[np.int64], blobs: Blobs, attributes: Mapping[str, Any], grid: CellGridOptions
) -> Iterator[File]:
    """Yield an array with one byte string per cell of a grid (layout 0.9); empty strings are omitted.

    Parameters
    ----------
    path : str
        Path of the array.
    keys : (n, K) int64
        Chunk keys, ascending.
    blobs : Blobs
        One per key.
    attributes : mapping
        Attributes of the array; the keys of cells and the origin are added.
    grid : CellGridOptions
        Origin, shape and files.
    """
    # A cell that is not stored is the fill value, which is the empty string.
    some = np.diff(blobs.bounds) > 0
    names = [".".join(map(str, key)) for key in keys[some].tolist()]
    own: dict[str, Any] = {"nonempty_chunks": names}
    if grid.origin.any():
        own["chunk_grid_origin"] = grid.origin.tolist()
    itemsize = np.dtype(attributes.get("dtype", "uint8")).itemsize
    inner = [VLEN_CODEC] if grid.compression is None else [VLEN_CODEC, compressor_codec(grid.compression, itemsize)]
    ones = [1] * len(grid.shape)
    shard = shard_shape(grid.shape) if grid.shards else np.array(ones)
    codecs = [sharding_codec(ones, inner)] if grid.shards else inner
    meta = array_json(grid.shape.tolist(), shard.tolist(), "variable_length_bytes", codecs, {**own, **attributes}, "")
    yield f"{path}/zarr.json", [meta]
    cells = keys[some] - grid.origin
    starts, stops = blobs.bounds[:-1][some], blobs.bounds[1:][some]
    if not grid.shards:
        heads = cell_headers(stops - starts)
        data = blobs.data.data
        for i, cell in enumerate(cells.tolist()):
            pieces = [heads[8 * i : 8 * i + 8], data[starts[i] : stops[i]]]
            content = pieces if grid.compression is None else [compress(b"".join(pieces), grid.compression, itemsize)]
            yield "/".join([path, "c", *map(str, cell)]), content
        return
    yield from _shards(path, cells, (starts, stops), blobs, shard, grid.compression, itemsize)


def shard_shape(shape: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many cells a shard spans on each axis: all, with the longest axis halved until there are at most 4,096."""
    spans = np.maximum(shape, 1)
    # As floats, because the product may exceed int64.
    while float(np.prod(spans.astype(np.float64))) > MAX_SHARD_SLOTS:
        longest = int(np.argmax(spans))
        spans[longest] = (spans[longest] + 1) // 2
    return spans


def cell_headers(sizes: NDArray[np.int64]) -> memoryview:
    """Return the eight bytes before each cell's string: u32 1, u32 length."""
    if (sizes >= 2**32).any():
        raise SourceError("A chunk has 4 GiB or more in one array; use smaller chunks.")
    heads = np.ones((len(sizes), 2), "<u4")
    heads[:, 1] = sizes
    return to_bytes(heads).data


def _shards(
    path: str,
    cells: NDArray[np.int64],
    spans: tuple[NDArray[np.int64], NDArray[np.int64]],
    blobs: Blobs,
    shard: NDArray[np.int64],
    compression: str | None,
    itemsize: int,
) -> Iterator[File]:
    """Compose shards in memory; each is written once."""
    slots = (
        np.ravel_multi_index(tuple((cells % shard).T), tuple(shard.tolist())) if len(cells) else np.zeros(0, np.int64)
    )
    # The inverse is flattened below, because NumPy 2.0 returns it with an additional axis.
    owners, owner = np.unique(cells // shard, axis=0, return_inverse=True)
    order = np.lexsort((slots, owner.reshape(-1)))
    bounds = np.searchsorted(owner.reshape(-1)[order], np.arange(len(owners) + 1)).tolist()
    heads, data = cell_headers(spans[1] - spans[0]), blobs.data.data
    for coordinates, (a, b) in zip(owners.tolist(), pairwise(bounds), strict=True):
        mine = order[a:b]
        begin, end = spans[0][mine].tolist(), spans[1][mine].tolist()
        pieces: list[bytes | memoryview] = []
        for i, low, high in zip(mine.tolist(), begin, end, strict=True):
            pieces += (heads[8 * i : 8 * i + 8], data[low:high])
        sizes = 8 + spans[1][mine] - spans[0][mine]
        # Each cell has two pieces, its header and its string, which are one chunk.
        if compression is not None:
            pieces = [compress(b"".join(pieces[k : k + 2]), compression, itemsize) for k in range(0, len(pieces), 2)]
            sizes = np.array([len(piece) for piece in pieces], np.int64)
        index = np.full((int(np.prod(shard)), 2), -1, np.int64)
        index[slots[mine]] = np.stack([counts_to_offsets(sizes)[:-1], sizes], axis=1)
        yield "/".join([path, "c", *map(str, coordinates)]), [*pieces, compose_index(index)]


@dataclass(frozen=True)
class ArrayData:
    """An array of a level, one byte string per chunk.

    Parameters
    ----------
    path : str
        Below the level, e.g. ``vertex_attributes/intensity``.
    blobs : Blobs
        One per chunk of the level.
    attributes : dict
        Its metadata, as in layout 0.7.
    dtype : numpy dtype or None
        Dtype of the values; None for the framed formats.
    columns : int or None
        Values per row; None: rows are single values.
    """

    path: str
    blobs: Blobs
    attributes: dict[str, Any]
    dtype: np.dtype[Any] | None = None
    columns: int | None = None


def attribute_metadata(kind: str, name: str, attribute: Attribute, shape: list[int]) -> dict[str, Any]:
    """Return the attributes of an attribute's array."""
    block: dict[str, Any] = {
        "zv_array": kind,
        "name": name,
        "dtype": _type_name(attribute.values.dtype),
        "shape": shape,
    }
    if attribute.channels:
        block["channel_names"] = list(attribute.channels)
    return block | dict(attribute.metadata)


def _type_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype as in ``dtype``."""
    return "string" if dtype.kind in "UTO" else str(dtype.name)


def encode_rows(values: NDArray[Any], bounds: NDArray[np.int64]) -> Blobs:
    """Return rows as bytes, one blob per chunk."""
    size = values.dtype.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))
    return Blobs(to_bytes(values), bounds * size)


def vertex_array(level: Level, width: int | None) -> ArrayData:
    """Return the positions, raw or as Draco; a Draco cell of a mesh includes its faces."""
    block = {"zv_array": "vertices", "dtype": level.positions.dtype.name, "encoding": level.encoding}
    if level.encoding == "draco":
        return ArrayData("vertices", encode_cells(level, width), block)
    return ArrayData(
        "vertices",
        encode_rows(level.positions, level.bounds),
        block,
        level.positions.dtype,
        level.positions.shape[1],
    )


def chunk_arrays(level: Level) -> Iterator[ArrayData]:
    """Yield every per-chunk array of a level; `path` is as in layout 0.7."""
    yield vertex_array(level, None if level.links is None else level.links.width)
    for name, attribute in level.vertex_attributes.items():
        yield _attribute_array(f"vertex_attributes/{name}", "attribute", name, attribute, level.bounds)
    if level.fragments is not None:
        yield ArrayData("vertex_fragments", encode_fragments(level.fragments), {"zv_array": "vertex_fragments"})
        for name, attribute in level.fragment_attributes.items():
            path = f"fragment_attributes/{name}"
            yield _attribute_array(path, "fragment_attribute", name, attribute, level.fragments.bounds)
    links = level.links
    if links is None:
        return
    if level.encoding != "draco":
        block = {
            "zv_array": "links",
            "level_delta": 0,
            "link_width": links.width,
            "num_links": len(links.rows),
            "dtype": links.rows.dtype.name,
        }
        yield ArrayData("links/0", encode_rows(links.rows, links.bounds), block, links.rows.dtype, links.width)
    if links.fragments is not None:
        yield ArrayData("link_fragments", encode_fragments(links.fragments), {"zv_array": "link_fragments"})
    for name, attribute in links.attributes.items():
        family = _attribute_array(f"link_attributes/{name}/0", "link_attribute", name, attribute, links.bounds)
        family.attributes["level_delta"] = 0
        yield family


def _attribute_array(path: str, kind: str, name: str, attribute: Attribute, bounds: NDArray[np.int64]) -> ArrayData:
    """Return an attribute as one blob per chunk."""
    values = attribute.values
    if values.dtype.kind not in "iuf":
        raise SourceError(
            f"The attribute {path!r} has dtype {values.dtype}; vertices, fragments and links hold numbers only. "
            "Store codes, with the categories in its metadata."
        )
    columns = None if values.ndim == 1 else int(values.shape[1])
    block = attribute_metadata(kind, name, attribute, [] if columns is None else [columns])
    return ArrayData(path, encode_rows(values, bounds), block, values.dtype, columns)


def present_families(level: Level) -> list[str]:
    """Return the names of the families that a level has, for ``arrays_present``."""
    has = {
        "vertices": True,
        "vertex_fragments": level.fragments is not None,
        "vertex_attributes": bool(level.vertex_attributes),
        "fragment_attributes": bool(level.fragment_attributes),
        "links": level.links is not None or bool(level.cross_links),
        "link_fragments": level.links is not None and level.links.fragments is not None,
        "link_attributes": level.links is not None and bool(level.links.attributes),
        "object_index": level.objects is not None,
        "object_attributes": bool(level.object_attributes),
        "groups": level.groups is not None,
        "group_attributes": level.groups is not None and bool(level.groups.attributes),
    }
    return [name for name, there in has.items() if there]
