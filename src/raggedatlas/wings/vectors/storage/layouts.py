"""Writer of a store as Zarr v3 nodes: plain arrays, byte strings and sharded cells, and a level in layouts 0.7 and 0.9."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.store.shards import compose_index
from raggedatlas.wings.vectors.chunking import (
    chunk_coordinates,
    encode_keys,
    run_starts,
    smallest_unsigned_dtype,
    stable_order,
)
from raggedatlas.wings.vectors.geometry import CrossLinks, Geometry, Level, level_chunk_shape, level_json, level_scale
from raggedatlas.wings.vectors.shapes import Attribute, Attributes, counts_to_offsets, fill_value
from raggedatlas.wings.vectors.storage.codecs import (
    STRINGS,
    Blobs,
    are_tiles,
    concat_blobs,
    encode_cells,
    encode_fragments,
    encode_groups,
    encode_manifests,
    encode_ragged,
    encode_records,
    encode_single_groups,
    encode_vlen,
    to_bytes,
)
from raggedatlas.wings.vectors.storage.cross_links import delta_name, encode_cross_links, select_links

File: TypeAlias = tuple[str, Iterable[bytes | memoryview]]
"""A key and the parts of its content, which may be made while they are written."""

BYTES_CODEC: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
BYTE_CODEC: dict[str, Any] = {"name": "bytes"}
ZSTD_CODEC = {"name": "zstd", "configuration": {"level": 0, "checksum": False}}
VLEN_CODEC = {"name": "vlen-bytes", "configuration": {}}
_BLOSC = {"blosc": "zstd", "lz4": "lz4"}
"""Compressor inside Blosc, after the byte shuffle."""
COMPRESSORS = ("zstd", *_BLOSC)
MAX_SHARD_SLOTS = 4096
"""Maximum number of cells in a shard."""
_CELLS_AT_ONCE = 512
"""Cells of a shard that are composed together: one by one, the calls cost more than the writing."""
_MANIFESTS = 128


@dataclass(frozen=True)
class CellGridOptions:
    """File layout of cells."""

    origin: NDArray[np.int64]  # (K,): chunk key of the first cell
    shape: NDArray[np.int64]  # (K,): number of cells on each axis
    shards: bool = True  # whether many cells share a file
    compression: str | None = None  # a member of `COMPRESSORS`


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
    codecs = (
        [{"name": "vlen-utf8", "configuration": {}}]
        if is_text
        else [BYTES_CODEC if itemsize > 1 or chunk_rows is not None else BYTE_CODEC]
    )
    if compression is not None:
        codecs.append(compressor_codec(compression, itemsize))
    # JSON has no NaN; Zarr writes it as text.
    fill_json = "NaN" if isinstance(fill, float) and np.isnan(fill) else fill
    # Zarr does not allow chunks of length 0, not even for an empty array.
    chunk = [rows, *(max(1, size) for size in values.shape[1:])]
    yield f"{path}/zarr.json", [array_json(values.shape, chunk, kind, codecs, attributes, fill_json)]
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

    `keys`, (n, K), are chunk keys, ascending, with a blob each. The keys of cells and the origin are added to the
    attributes.
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
    if ((stops - starts) >= 2**32).any():
        raise SourceError("A chunk has 4 GiB or more in one array; use smaller chunks.")
    # Eight bytes before the string of each cell: u32 1, u32 length.
    lengths = np.ones((len(cells), 2), "<u4")
    lengths[:, 1] = stops - starts
    heads, data = to_bytes(lengths).data, blobs.data.data
    if not grid.shards:
        for i, cell in enumerate(cells.tolist()):
            pieces = [heads[8 * i : 8 * i + 8], data[starts[i] : stops[i]]]
            content = pieces if grid.compression is None else [compress(b"".join(pieces), grid.compression, itemsize)]
            yield "/".join([path, "c", *map(str, cell)]), content
        return
    slots = (
        np.ravel_multi_index(tuple((cells % shard).T), tuple(shard.tolist())) if len(cells) else np.zeros(0, np.int64)
    )
    # The inverse is flattened below, because NumPy 2.0 returns it with an additional axis.
    owners, owner = np.unique(cells // shard, axis=0, return_inverse=True)
    order = np.lexsort((slots, owner.reshape(-1)))
    bounds = np.searchsorted(owner.reshape(-1)[order], np.arange(len(owners) + 1)).tolist()
    codec = None if grid.compression is None else partial(compress, name=grid.compression, itemsize=itemsize)
    for coordinates, (a, b) in zip(owners.tolist(), pairwise(bounds), strict=True):
        mine = order[a:b]
        parts = _shard_pieces(heads, data, (mine, starts[mine], stops[mine]), slots[mine], int(np.prod(shard)), codec)
        yield "/".join([path, "c", *map(str, coordinates)]), parts


def shard_shape(shape: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many cells a shard spans on each axis: all, with the longest axis halved until there are at most 4,096."""
    spans = np.maximum(shape, 1)
    # As floats, because the product may exceed int64.
    while float(np.prod(spans.astype(np.float64))) > MAX_SHARD_SLOTS:
        longest = int(np.argmax(spans))
        spans[longest] = (spans[longest] + 1) // 2
    return spans


def _shard_pieces(
    heads: memoryview,
    data: memoryview,
    cells: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    slots: NDArray[np.int64],
    n_slots: int,
    codec: Callable[[bytes], bytes | memoryview] | None,
) -> Iterator[bytes | memoryview]:
    """Yield the cells of one shard, given by number, begin and end, some at a time and compressed when it is their turn, and the index."""
    sizes = 8 + cells[2] - cells[1]
    for at in range(0, len(slots), _CELLS_AT_ONCE):
        some = slice(at, at + _CELLS_AT_ONCE)
        pieces: list[bytes | memoryview] = []
        for i, low, high in zip(*(values[some].tolist() for values in cells), strict=True):
            pieces += (heads[8 * i : 8 * i + 8], data[low:high])
        if codec is not None:
            pieces = [codec(b"".join(pieces[k : k + 2])) for k in range(0, len(pieces), 2)]
            sizes[some] = [len(piece) for piece in pieces]
        yield from pieces
    index = np.full((n_slots, 2), -1, np.int64)
    index[slots] = np.stack([counts_to_offsets(sizes)[:-1], sizes], axis=1)
    yield compose_index(index)


@dataclass(frozen=True)
class ArrayData:
    """An array of a level, one byte string per chunk."""

    path: str  # below the level, e.g. "vertex_attributes/intensity"
    blobs: Blobs  # one per chunk of the level
    attributes: dict[str, Any]  # its metadata, as in layout 0.7
    dtype: np.dtype[Any] | None = None  # of the values; None for the framed formats
    columns: int | None = None  # values per row; None: rows are single values


def attribute_metadata(kind: str, name: str, attribute: Attribute, shape: list[int]) -> dict[str, Any]:
    """Return the attributes of an attribute's array."""
    block: dict[str, Any] = {
        "zv_array": kind,
        "name": name,
        "dtype": "string" if attribute.values.dtype.kind in "UTO" else str(attribute.values.dtype.name),
        "shape": shape,
    }
    if attribute.channels:
        block["channel_names"] = list(attribute.channels)
    return block | dict(attribute.metadata)


def encode_rows(values: NDArray[Any], bounds: NDArray[np.int64]) -> Blobs:
    """Return rows as bytes, one blob per chunk."""
    size = values.dtype.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))
    return Blobs(to_bytes(values), bounds * size)


def chunk_arrays(level: Level) -> Iterator[ArrayData]:
    """Yield every per-chunk array of a level; `path` is as in layout 0.7."""
    block: dict[str, Any] = {"zv_array": "vertices", "dtype": level.positions.dtype.name, "encoding": level.encoding}
    if level.encoding == "draco":
        # A cell of a mesh includes its faces.
        yield ArrayData("vertices", encode_cells(level), block)
    else:
        rows, dtype = encode_rows(level.positions, level.bounds), level.positions.dtype
        yield ArrayData("vertices", rows, block, dtype, level.positions.shape[1])
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


MIN_RANGE_LENGTH = 16
"""Minimum number of consecutive ids for which a group is stored as a range in ``group_ranges``."""

_ROWS = 65_536
"""Rows of a chunk of a table in layout 0.9."""


def with_parent_groups(files: Iterable[File]) -> Iterator[File]:
    """Yield files, followed by those of the groups above their nodes that are not among them."""
    nodes: set[str] = set()
    for key, pieces in files:
        if key.endswith("/zarr.json"):
            nodes.add(key.removesuffix("/zarr.json"))
        yield key, pieces
    parents = {"/".join(parts[:i]) for parts in (node.split("/") for node in nodes) for i in range(1, len(parts))}
    for parent in sorted(parents - nodes):
        yield group_json(parent, {})


# Layout 0.7


def level_files_07(geometry: Geometry, k: int, *, compression: str | None) -> Iterator[File]:
    """Yield the files of one level."""
    level, root = geometry.levels[k], str(k)
    has_links = level.links is not None and level.encoding != "draco"  # Draco cells include the faces
    has_links = has_links or any(not _crosses_chunks(links).all() for links in level.cross_links)
    present = [name for name in present_families(level) if name != "links" or has_links]
    if any(_crosses_chunks(links).any() for links in level.cross_links):
        present += ["cross_chunk_links"]
    yield group_json(root, level_json(level, k, present))
    names = [".".join(map(str, key)) for key in level.chunks.tolist()]
    for family in chunk_arrays(level):
        yield group_json(f"{root}/{family.path}", family.attributes)
        for i, name in enumerate(names):
            blob = family.blobs[i]
            # The arrays of a group are the list of its chunks, so an empty chunk must not have one.
            if not blob.size:
                continue
            values = blob if family.dtype is None else blob.view(family.dtype.newbyteorder("<"))
            if family.columns is not None and family.dtype is not None:
                values = values.reshape(-1, family.columns)
            codec = None if family.dtype is None else compression
            yield from plain_array(f"{root}/{family.path}/{name}", values, {}, codec)
    for links in level.cross_links:
        yield from _cross_files_07(root, links, compression)
    yield from _object_files_07(root, level, compression)


def _crosses_chunks(links: CrossLinks) -> NDArray[np.bool_]:
    """Return which links are stored in ``cross_chunk_links``: those whose ends have different chunk keys."""
    # All links of delta 0 are stored there, also those whose ends share a chunk (V081 is a `should`).
    if links.delta == 0:
        return np.ones(links.n_links, bool)
    return np.asarray((links.chunks != links.chunks[:, :1]).any(axis=(1, 2)))


def _cross_files_07(root: str, links: CrossLinks, compression: str | None) -> Iterator[File]:
    """Yield links across chunks, and those across levels within one chunk key, in the order of their ends.

    Layout 0.9 sorts links by chunk and does not preserve their order, so any other order would be lost there.
    """
    ends = encode_records(links.chunks, links.rows).reshape(links.n_links, -1)
    # The last key of `lexsort` counts first, so the columns are reversed.
    links = select_links(links, np.lexsort(ends.T[::-1]) if links.n_links else np.zeros(0, np.int64))
    crosses_chunks, name = _crosses_chunks(links), delta_name(links.delta)
    block: dict[str, Any] = {"level_delta": links.delta, "link_width": links.width}
    inner = select_links(links, np.flatnonzero(~crosses_chunks))
    links = select_links(links, np.flatnonzero(crosses_chunks))
    if links.n_links:
        own: dict[str, Any] = {"num_links": links.n_links, "sid_ndim": int(links.chunks.shape[2])}
        if links.directed or links.store != "canonical":
            own |= {"directed": links.directed, "store": links.store}
        yield group_json(f"{root}/cross_chunk_links/{name}", {"zv_array": "cross_chunk_links", **block, **own})
        records = encode_records(links.chunks, links.rows)
        yield from plain_array(f"{root}/cross_chunk_links/{name}/data", records, {}, compression)
        for title, attribute in links.attributes.items():
            path = f"{root}/cross_chunk_link_attributes/{title}/{name}"
            facts = attribute_metadata("cross_chunk_link_attribute", title, attribute, list(attribute.values.shape))
            yield group_json(path, facts | {"num_links": links.n_links, "level_delta": links.delta})
            yield from plain_array(f"{path}/data", attribute.values, {}, compression)
    if inner.n_links:
        facts = {"num_links": inner.n_links, "dtype": "int64", "record_encoding": "ragged_rows"}
        yield group_json(f"{root}/links/{name}", {"zv_array": "links", **block, **facts})
        # Those across levels whose ends have the same chunk key: rows in that chunk, as an inline stream.
        codes, top = encode_keys(inner.chunks[:, 0])
        inner = select_links(inner, stable_order(codes, top))
        # Sorted codes have the same runs as the links, which are sorted by these codes.
        first = run_starts(np.sort(codes))
        parts = [slice(int(a), int(b)) for a, b in zip(first, [*first[1:], inner.n_links], strict=True)]
        keys = [".".join(map(str, inner.chunks[part.start, 0].tolist())) for part in parts]
        for key, part in zip(keys, parts, strict=True):
            stream = np.frombuffer(encode_ragged(to_bytes(inner.rows[part])), np.uint8)
            yield from plain_array(f"{root}/links/{name}/{key}", stream, {}, None)
        for title, attribute in inner.attributes.items():
            path = f"{root}/link_attributes/{title}/{name}"
            facts = attribute_metadata("link_attribute", title, attribute, list(attribute.values.shape[1:]))
            yield group_json(path, facts | {"level_delta": inner.delta})
            for key, part in zip(keys, parts, strict=True):
                yield from plain_array(f"{path}/{key}", attribute.values[part], {}, compression)


def _object_files_07(root: str, level: Level, compression: str | None) -> Iterator[File]:
    """Yield the object index, the groups, their sidecars, and the attributes of both."""
    objects, groups = level.objects, level.groups
    if objects is not None:
        block = {"num_objects": objects.n_objects, "sid_ndim": int(objects.chunks.shape[1])}
        yield group_json(f"{root}/object_index", {"zv_array": "object_index", **block})
        blobs = encode_manifests(objects)
        yield from plain_array(f"{root}/object_index/data", blobs.data, {}, None)
        # Optional for readers of this package, but zarr-vectors 0.2.0 needs them to find a manifest.
        yield from plain_array(f"{root}/object_index/offsets", blobs.bounds[:-1], {}, None)
        if not objects.has_dense_ids:
            yield from plain_array(f"{root}/object_index/object_ids", objects.ids, {}, None)
    yield from _tables_07(f"{root}/object_attributes", "object_attribute", level.object_attributes, compression)
    if groups is not None:
        yield group_json(f"{root}/groups", {"zv_array": "groups", "num_groups": groups.n_groups})
        data, starts = encode_groups(groups.offsets, groups.ids)
        yield from plain_array(f"{root}/groups/data", np.frombuffer(data, np.uint8), {}, None)
        yield from plain_array(f"{root}/groups/offsets", starts, {}, None)
        yield from _tables_07(f"{root}/group_attributes", "groupings_attribute", groups.attributes, compression)


def _tables_07(path: str, kind: str, attributes: Attributes, compression: str | None) -> Iterator[File]:
    """Yield attributes of objects or groups; strings are encoded as codes with categories."""
    for name, attribute in attributes.items():
        if attribute.values.dtype.kind not in "UTO":
            result = attribute
        else:
            texts = attribute.values.astype(str)
            categories, codes = np.unique(texts.reshape(-1), return_inverse=True)
            own = {"encoding": "dictionary", "categories": categories.tolist(), "ordered": False, STRINGS: True}
            values = codes.reshape(texts.shape).astype(np.int32)
            result = Attribute(values, attribute.channels, attribute.present, {**attribute.metadata, **own})
        block = attribute_metadata(kind, name, result, list(result.values.shape))
        if result.present is not None:
            block["has_present_mask"] = True
            yield from plain_array(f"{path}/{name}/present_mask", result.present.astype(np.uint8), {}, None)
        yield group_json(f"{path}/{name}", block)
        yield from plain_array(f"{path}/{name}/data", _filled(result), {}, compression)


def _filled(attribute: Attribute) -> NDArray[Any]:
    """Return the values of an attribute, with the fill value in absent rows."""
    if attribute.present is None:
        return attribute.values
    # The attribute may hold an array of the caller, which must not change.
    values = attribute.values.copy()
    values[~attribute.present] = fill_value(values.dtype)
    return values


# Layout 0.9


def level_files_09(geometry: Geometry, k: int, *, shards: bool, compression: str | None) -> Iterator[File]:
    """Yield the files of one level."""
    level, root = geometry.levels[k], str(k)
    # By default, links across chunks are not compressed; the others are chosen below.
    shape = level_chunk_shape(geometry, level.metadata)
    ends = chunk_coordinates(np.asarray(geometry.bounds, np.float64), shape)
    lead = level.chunks.shape[1] - len(shape)
    corners = np.concatenate([np.zeros((2, lead), np.int64), ends], axis=1)
    # Vertices may be outside the bounds, so the grid spans both.
    all_keys = np.concatenate([corners, level.chunks])
    low, high = all_keys.min(axis=0), all_keys.max(axis=0)
    grid = CellGridOptions(low, high - low + 1, shards, None if compression == "default" else compression)
    facts = level_json(level, k, present_families(level))
    if level.fragments is not None and are_tiles(level.fragments, level.bounds):
        facts["zarr_vectors_level"]["fragments_tile"] = True
    yield group_json(root, facts)
    zero = ".".join("0" for _ in range(level.chunks.shape[1]))
    for family in chunk_arrays(level):
        path, block = family.path, dict(family.attributes)
        if path in {"vertex_fragments", "link_fragments"}:
            block["encoding"] = "fragment_index_v1"
        if block["zv_array"] in {"attribute", "fragment_attribute", "link_attribute"}:
            block["row_shape"] = block.pop("shape")
        if path == "links/0" or path.startswith("link_attributes/"):
            width = 1 if level.links is None else level.links.width
            path += "/" + ("_".join([zero] * (width - 1)) or "self")
            block["offsets"] = [[0] * level.chunks.shape[1]] * (width - 1)
            # The number of links is declared once, by the group of the delta, see `_link_files_09`.
            block.pop("num_links", None)
            if family.path == "links/0":
                block["has_perm"] = False
        chosen = None if family.dtype is None else compression
        if chosen == "default":
            # Only vertex attributes of points without objects are compressed: they are read by chunk (those of objects by
            # row, directly from the file), and their values, such as the genes of transcripts, are often small integers.
            chosen = "lz4" if level.objects is None and path.startswith("vertex_attributes/") else None
        own = replace(grid, compression=chosen)
        yield from cell_array(f"{root}/{path}", level.chunks, family.blobs, block, own)
    yield from _link_files_09(geometry, k, grid)
    yield from _object_files_09(root, level)


def _link_files_09(geometry: Geometry, k: int, grid: CellGridOptions) -> Iterator[File]:
    """Yield the groups of links, and the arrays of those across chunks and levels."""
    level, root = geometry.levels[k], str(k)
    crossing = {links.delta: links for links in level.cross_links}
    n_parts = level.chunks.shape[1]
    for delta in sorted({*crossing, *([0] if level.links is not None else [])}):
        links = crossing.get(delta)
        inner = level.links if delta == 0 else None
        parts = [part for part in (links, inner) if part is not None]
        n_links = n_records = sum(len(part.rows) for part in parts)
        if links is not None:
            other = geometry.levels[k + delta] if 0 <= k + delta < len(geometry.levels) else level
            scales = level_scale(geometry, level.metadata, n_parts), level_scale(geometry, other.metadata, n_parts)
            segments = encode_cross_links(
                links.chunks, links.rows, delta, scales, directed=links.directed, store=links.store
            )
            n_records += sum(len(segment.rows) for segment in segments) - links.n_links
            # Of the records, not of `links.rows`: their first column may be a permutation number, up to width! - 1.
            most = max((int(segment.rows.max(initial=0)) for segment in segments), default=0)
            kind = smallest_unsigned_dtype(most + 1)
            for segment in segments:
                tail = f"{delta_name(delta)}/{segment.name}"
                offsets = segment.offsets.tolist()
                block = {"offsets": offsets, "has_perm": segment.has_permutation, "link_width": links.width}
                blobs = encode_single_groups(encode_rows(segment.rows.astype(kind), segment.bounds))
                facts = {"zv_array": "links", "dtype": kind.name, **block, "level_delta": delta}
                yield from cell_array(f"{root}/links/{tail}", segment.cells, blobs, facts, grid)
                for name, attribute in links.attributes.items():
                    values = attribute.values[segment.record]
                    facts = attribute_metadata("link_attribute", name, attribute, list(values.shape[1:]))
                    facts |= {"row_shape": facts.pop("shape"), "offsets": offsets, "level_delta": delta}
                    path = f"{root}/link_attributes/{name}/{tail}"
                    yield from cell_array(path, segment.cells, encode_rows(values, segment.bounds), facts, grid)
        block = {
            "zv_array": "links_family",
            "level_delta": delta,
            "link_width": parts[0].width,
            "directed": bool(links.directed) if links is not None else False,
            "store": links.store if links is not None else "canonical",
            "sid_ndim": int(n_parts),
            "num_links": n_links,
            "num_physical_records": n_records,
        }
        yield group_json(f"{root}/links/{delta_name(delta)}", block)
        for name in sorted({name for part in parts for name in part.attributes}):
            facts = {"zv_array": "link_attribute_family", "name": name, "level_delta": delta, "num_links": n_links}
            yield group_json(f"{root}/link_attributes/{name}/{delta_name(delta)}", facts)


def _object_files_09(root: str, level: Level) -> Iterator[File]:
    """Yield the object index, the groups, and the attributes of both."""
    objects, groups = level.objects, level.groups
    if objects is not None:
        block: dict[str, Any] = {
            "zv_array": "object_index",
            "num_objects": objects.n_objects,
            "num_present": int(np.count_nonzero(np.diff(objects.bounds))),
            "sid_ndim": int(objects.chunks.shape[1]),
            "layout": "vlen_manifests_v1" if objects.has_dense_ids else "vlen_manifests_v2",
        }
        if not objects.has_dense_ids:
            block["object_ids_sorted"] = True
            yield from plain_array(f"{root}/object_index/object_ids", objects.ids, {}, "zstd", _ROWS)
        yield group_json(f"{root}/object_index", block)
        yield from vlen_array(f"{root}/object_index/manifests", encode_manifests(objects), {})
    yield from _tables_09(f"{root}/object_attributes", "object_attribute", level.object_attributes)
    if groups is not None:
        block = {"zv_array": "groups", "num_groups": groups.n_groups}
        first, counts = groups.offsets[:-1], np.diff(groups.offsets)
        run = counts >= MIN_RANGE_LENGTH
        # Counts the steps other than 1: ids are consecutive between two places with equal counts.
        broken = np.concatenate([[0], np.cumsum(np.diff(groups.ids) != 1)])
        run[run] = broken[first[run]] == broken[first[run] + counts[run] - 1]
        ranges = np.stack([groups.ids[first[run]], groups.ids[groups.offsets[1:][run] - 1] + 1], axis=1)
        if run.any():
            block["group_ranges"] = dict(zip(map(str, np.flatnonzero(run).tolist()), ranges.tolist(), strict=True))
        # A group stored as a range keeps an empty row, so the numbers of the other groups do not change.
        listed = groups.ids[~np.repeat(run, counts)]
        yield from vlen_array(
            f"{root}/groups", Blobs(to_bytes(listed), counts_to_offsets(np.where(run, 0, counts)) * 8), block
        )
        yield from _tables_09(f"{root}/group_attributes", "groupings_attribute", groups.attributes)


def _tables_09(path: str, kind: str, attributes: Attributes) -> Iterator[File]:
    """Yield attributes as plain arrays; absent rows hold the array's fill value."""
    for name, attribute in attributes.items():
        block = attribute_metadata(kind, name, attribute, list(attribute.values.shape))
        # Readers then take every row equal to the fill value as absent, even if it was given as a value. Attributes of groups
        # have the key only if a row is absent.
        if kind == "object_attribute" or attribute.present is not None:
            block["fill_sentinel_meaning"] = "absent"
        fill = fill_value(attribute.values.dtype)
        yield from plain_array(f"{path}/{name}", _filled(attribute), block, "zstd", _ROWS, fill)
