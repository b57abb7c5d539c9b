"""Reader of a store's Zarr nodes: small files, listings, arrays of byte strings, and a fallback to zarr-python."""

import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, LimitError, SourceError
from raggedatlas.model.arrays import MAX_SHARD_CHUNKS, check_chunk_bytes, check_shapes
from raggedatlas.store.codecs import blosc_declared_bytes, has_checksum, refuse_unknown_codecs, zstd_declared_bytes
from raggedatlas.store.location import Location, refuse_symlinks
from raggedatlas.store.runtime import LRUCache, map_requests
from raggedatlas.store.shards import Shard, fetch_chunks, fetch_index, map_shard
from raggedatlas.store.storage_errors import store_errors
from raggedatlas.store.untrusted import zarr_errors
from raggedatlas.wings.vectors.chunking import find_keys
from raggedatlas.wings.vectors.shapes import counts_to_offsets
from raggedatlas.wings.vectors.storage.codecs import (
    EMPTY,
    Blobs,
    Bytes,
    concat_blobs,
    decode_single_item,
    decode_vlen,
    to_bytes,
)


class StoreFiles:
    """Access to the files below a location, the root of a store; a symlink below a local one is a `StoreError`."""

    def __init__(self, location: Location) -> None:
        # Files below are opened by name.
        refuse_symlinks(location)
        self.location = location
        self.root = location.uri
        self._parsed: dict[bytes, dict[str, Any]] = {}

    def read(self, key: str) -> Bytes | None:
        """Return the bytes of a file, or None if it does not exist."""
        with store_errors(f"read {self.root}/{key}"):
            if self.location.is_local:
                # Caught inside `store_errors`, which would turn a missing file into `MissingFileError`.
                try:
                    with open(f"{self.root}/{key}", "rb", buffering=0) as file:  # noqa: PTH123 - many small ones
                        return np.frombuffer(file.read(), np.uint8)
                except (FileNotFoundError, NotADirectoryError):
                    return None
            import obstore

            try:
                result = obstore.get(self.location.store(), key).bytes()
            except FileNotFoundError:
                return None
            return np.frombuffer(memoryview(result), np.uint8)

    def node(self, path: str) -> dict[str, Any] | None:
        """Return the ``zarr.json`` of a node, or None if it does not exist; equal ones are parsed once."""
        raw = self.read(f"{path}/zarr.json" if path else "zarr.json")
        if raw is None:
            return None
        # Layout 0.7 has thousands of small arrays with equal metadata. The result is shared: do not change it.
        text = raw.tobytes()
        if text not in self._parsed:
            try:
                parsed = json.loads(text)
            except ValueError:
                raise CorruptError(f"{self.root}/{path}/zarr.json is not valid JSON. Restore it from a copy.") from None
            if not isinstance(parsed, dict) or parsed.get("zarr_format") != 3:
                raise CorruptError(f"{self.root}/{path} is not a Zarr v3 node.")
            if not isinstance(parsed.get("attributes") or {}, dict):
                raise CorruptError(f"{self.root}/{path} has attributes without names. Restore it from a copy.")
            self._parsed[text] = parsed
        return self._parsed[text]

    def children(self, path: str) -> list[str]:
        """Return the names of the folders below a path, sorted."""
        with store_errors(f"list {self.root}/{path}"):
            if self.location.is_local:
                try:
                    return sorted(entry.name for entry in os.scandir(f"{self.root}/{path}") if entry.is_dir())
                except FileNotFoundError:
                    return []
            import obstore

            listing = obstore.list_with_delimiter(self.location.store(), prefix=f"{path}/" if path else None)
            return sorted(prefix.rstrip("/").rsplit("/", 1)[-1] for prefix in listing["common_prefixes"])

    def levels(self) -> list[int]:
        """Return the numbers of the folders of levels, ascending."""
        # Superscript digits pass `isdigit`, but `int` refuses them.
        return sorted(int(name) for name in self.children("") if name.isascii() and name.isdigit())

    def foreign(self, path: str, cells: Sequence[tuple[slice, ...]] = ((),)) -> list[NDArray[Any]]:
        """Read parts of an array with zarr-python, by default all of it, for pipelines that are not supported here."""
        import zarr

        from raggedatlas.store.untrusted import guarded_zarr_store

        with zarr_errors(f"{self.root}/{path}"):
            array = zarr.open_array(guarded_zarr_store(self.location.zarr_store()), path=path, mode="r")
            return [np.asarray(array[cell or ...]) for cell in cells]


def node_attributes(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's attributes."""
    return dict(node.get("attributes") or {})


def codec_names(codecs: list[Any]) -> list[str]:
    """Return the names of codecs, after refusing those that are not allowed."""
    refuse_unknown_codecs(codecs)
    return [str(codec.get("name") if isinstance(codec, dict) else codec) for codec in codecs]


def decompress(data: Bytes, names: list[str], where: str) -> Bytes:
    """Undo compressors and checksums; `names` are the codecs after the first.

    Raises `CorruptError` if a frame is damaged, and `LimitError` if it decodes to more than `check_chunk_bytes` allows.
    """
    from numcodecs import blosc, zstd

    for name in reversed(names):
        try:
            if name == "crc32c":
                if not has_checksum(data):
                    raise CorruptError(f"{where} has a chunk that does not match its crc32c. Restore it from a copy.")
                data = data[:-4]
            elif name == "zstd":
                # A damaged or hostile frame may declare any size; it is limited before memory is allocated for it.
                check_chunk_bytes(where, zstd_declared_bytes(data))
                data = np.frombuffer(zstd.decompress(np.ascontiguousarray(data)), np.uint8)
            elif name == "blosc":
                check_chunk_bytes(where, blosc_declared_bytes(data))
                data = np.frombuffer(blosc.decompress(np.ascontiguousarray(data)), np.uint8)
            else:
                # Piece by piece, because a gzip stream does not declare its size.
                pieces, total = list[bytes](), 0
                with gzip.GzipFile(fileobj=io.BytesIO(data.tobytes())) as stream:
                    while piece := stream.read(_GZIP_PIECE):
                        total += len(piece)
                        check_chunk_bytes(where, total)
                        pieces.append(piece)
                data = np.frombuffer(b"".join(pieces), np.uint8)
        except (RuntimeError, ValueError, OSError, EOFError, zlib.error) as error:
            raise CorruptError(f"{where} does not decode ({name}): {error}. Restore it from a copy.") from error
    return data


_GZIP_PIECE = 1 << 20


SUPPORTED_CODECS = {"zstd", "blosc", "gzip", "crc32c"}
"""Codecs that `decompress` supports."""


def read_array(files: StoreFiles, path: str, *, sparse: bool = False) -> NDArray[Any] | None:
    """Return a plain array of numbers or strings, or None if it does not exist.

    `sparse` tells whether a missing chunk stands for the fill value, as Zarr allows; otherwise it is refused. Raises
    `CorruptError` if the array is a group, its metadata are damaged, or the size of a stored chunk does not match it.
    """
    node = files.node(path)
    if node is None:
        return None
    where = f"{files.root}/{path}"
    with zarr_errors(where):
        if node.get("node_type") != "array":
            raise CorruptError(f"{where} is a group; expected an array.")
        shape = [int(size) for size in node["shape"]]
        if node.get("data_type") == "string" and len(shape) == 1:
            texts = VlenArray(files, path, node).read()
            return np.array([texts[i].tobytes().decode() for i in range(len(texts))], dtype=str).reshape(shape)
        names = codec_names(node["codecs"])
        key = _single_chunk_key(node, names, shape)
        raw = None
        if key is not None:
            dtype = np.dtype(str(node["data_type"])).newbyteorder("<")
            if not math.prod(shape):
                return np.zeros(shape, dtype)
            raw = files.read(f"{path}/{key}")
            if raw is None and not sparse:
                raise CorruptError(f"{where} declares {shape} values, but its chunk is missing.")
        if raw is None:
            (values,) = files.foreign(path)
            return values if values.dtype.kind not in "UTO" else values.astype(str)
        data = decompress(raw, names[1:], where)
        chunk = [int(size) for size in node["chunk_grid"]["configuration"]["chunk_shape"]]
        expected = math.prod(chunk) * dtype.itemsize
        if data.size != expected:
            raise CorruptError(f"{where} has {data.size:,} bytes; expected {expected:,}. It is truncated.")
        return np.ascontiguousarray(data).view(dtype).reshape(chunk)[: shape[0]]


def _single_chunk_key(node: Mapping[str, Any], names: list[str], shape: list[int]) -> str | None:
    """Return the key of the only chunk of an array of little-endian numbers; None if it is stored otherwise."""
    chunk = node["chunk_grid"]["configuration"]["chunk_shape"]
    endian = (node["codecs"][0].get("configuration") or {}).get("endian", "little")
    encoding = node.get("chunk_key_encoding") or {}
    # Keys of the encoding "default" begin with "c" and a slash, those of "v2" have no beginning and dots.
    name = encoding.get("name", "default")
    plain = names[0] == "bytes" and endian == "little" and set(names[1:]) <= SUPPORTED_CODECS
    plain = plain and isinstance(node["data_type"], str) and name in {"default", "v2"}
    # The chunk may be longer than the array, whose rows then come first.
    if not plain or not shape or list(chunk[1:]) != shape[1:] or shape[0] > chunk[0]:
        return None
    separator = (encoding.get("configuration") or {}).get("separator", "." if name == "v2" else "/")
    return str(separator.join([*(["c"] if name == "default" else []), *("0" for _ in shape)]))


def read_array_bytes(files: StoreFiles, path: str) -> Bytes | None:
    """Return the values of a plain array as little-endian bytes, or None if it does not exist."""
    values = read_array(files, path)
    return None if values is None else to_bytes(values)


# For few keys, `find_keys` does not pay: it encodes the complete table in each call.
_DICT_LOOKUP_LIMIT = 64
_CACHED_CHUNKS = 256
"""Number of decoded vlen-bytes chunks kept in memory."""


class KeyLookup:
    """Lookup in a table of chunk keys, (n, K), ascending: few keys through a dictionary, many through one search."""

    def __init__(self, keys: NDArray[np.int64]) -> None:
        self.keys = keys

    @cached_property
    def _rows(self) -> dict[tuple[int, ...], int]:
        return {tuple(key): i for i, key in enumerate(self.keys.tolist())}

    def find(self, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each key, or -1."""
        if len(wanted) > _DICT_LOOKUP_LIMIT:
            return find_keys(self.keys, wanted)
        rows = self._rows
        return np.array([rows.get(tuple(key), -1) for key in wanted.tolist()], np.int64)


def parse_keys(names: Sequence[str], where: str) -> NDArray[np.int64]:
    """Parse dotted keys as (n, K) int64, ascending; `CorruptError` if a key is not a list of integers, or lengths differ."""
    if not names:
        return np.zeros((0, 0), np.int64)
    n_parts = names[0].count(".") + 1
    try:
        flat = np.array(".".join(names).split("."), dtype=np.int64)
        keys = flat.reshape(len(names), n_parts)
    except ValueError:
        raise CorruptError(f"{where} has a chunk key that is not a list of integers.") from None
    # A reshape alone is not enough: the keys "1.2", "3.4.5" and "6" have as many parts as three keys of two.
    if n_parts > 1 and any(name.count(".") + 1 != n_parts for name in names):
        raise CorruptError(f"{where} has chunk keys of different lengths.")
    return keys[np.lexsort(keys.T[::-1])]


class _InnerChunks:
    """The encoded inner chunks of an array."""

    def __init__(self, files: StoreFiles, path: str, node: dict[str, Any]) -> None:
        self.files, self.path = files, path
        self.where = f"{files.root}/{path}"
        with zarr_errors(self.where):
            kind = node.get("data_type")
            name = kind.get("name") if isinstance(kind, dict) else kind
            if node.get("node_type") != "array" or name not in {"variable_length_bytes", "bytes", "string"}:
                raise CorruptError(f"{self.where} is not an array of byte strings.")
            shape = tuple(int(size) for size in node["shape"])
            outer = tuple(int(size) for size in node["chunk_grid"]["configuration"]["chunk_shape"])
            codecs, inner, is_sharded, at_end = node["codecs"], outer, False, True
            if codecs and isinstance(codecs[0], dict) and codecs[0].get("name") == "sharding_indexed":
                settings = codecs[0]["configuration"]
                inner = tuple(int(size) for size in settings["chunk_shape"])
                at_end = settings.get("index_location", "end") == "end"
                at_end &= codec_names(settings.get("index_codecs") or []) == ["bytes", "crc32c"]
                # Only an index at the end, with a crc32c, is read by `map_shard` and `fetch_index`.
                is_sharded, at_end = True, at_end and len(codecs) == 1
                codecs = settings["codecs"]
            check_shapes(self.where, shape, inner, outer if is_sharded else None)
            names = codec_names(codecs)
            is_supported = (
                names[:1] in (["vlen-bytes"], ["vlen-utf8"]) and set(names[1:]) <= SUPPORTED_CODECS and at_end
            )
            encoding = node.get("chunk_key_encoding") or {}
            separator = (encoding.get("configuration") or {}).get("separator", "/")
            is_supported &= encoding.get("name", "default") == "default"
        self.shape, self.inner, self.is_sharded, self.separator = shape, inner, is_sharded, str(separator)
        self.compressors = names[1:]  # of an inner chunk
        self.is_foreign = not is_supported  # whether only zarr-python reads it
        per_shard = [o // i for o, i in zip(outer, inner, strict=True)]
        self.per_shard = np.array(per_shard, np.int64)
        self.n_slots = math.prod(per_shard)
        self.strides = np.array([math.prod(per_shard[i + 1 :]) for i in range(len(per_shard))], np.int64)
        self._is_one_shard = all(a <= b for a, b in zip(shape, outer, strict=True))

    def read(self, chunks: NDArray[np.int64]) -> list[Bytes | None]:
        """Return the decompressed bytes of inner chunks, given by number as (m, rank); None for missing ones."""
        if not self.is_sharded:
            keys = [self._key(tuple(chunk)) for chunk in chunks.tolist()]
            raw = (
                list(map(self.files.read, keys))
                if self.files.location.is_local
                else map_requests(self.files.read, keys)
            )
        else:
            raw = self._from_shards(chunks)
        if not self.compressors:
            return raw
        return [None if data is None else decompress(data, self.compressors, self.where) for data in raw]

    def _key(self, chunk: tuple[int, ...]) -> str:
        return f"{self.path}/" + self.separator.join(["c", *map(str, chunk)])

    def _from_shards(self, chunks: NDArray[np.int64]) -> list[Bytes | None]:
        """Look up chunks in the indexes of their shards."""
        result: list[Bytes | None] = [None] * len(chunks)
        members_of: dict[tuple[int, ...], list[int]] = {}
        if self._is_one_shard:
            slots, members_of[(0,) * len(self.strides)] = chunks @ self.strides, list(range(len(chunks)))
        else:
            owners = chunks // self.per_shard
            slots = (chunks - owners * self.per_shard) @ self.strides
            for i, owner in enumerate(map(tuple, owners.tolist())):
                members_of.setdefault(owner, []).append(i)
        for owner, members in members_of.items():
            shard = self._shard(owner)
            if shard is None:
                continue
            spans = shard.index[slots[members]]
            if shard.data is not None:
                data = shard.data
                # Chunks are views of the mapped file; the size -1 means that a chunk is not stored.
                for i, (start, size) in zip(members, spans.tolist(), strict=True):
                    if size >= 0:
                        result[i] = data[start : start + size]
                continue
            stored = [k for k, size in enumerate(spans[:, 1].tolist()) if size >= 0]
            pieces = fetch_chunks(self.files.location, self._key(owner), shard, spans[stored])
            for k, piece in zip(stored, pieces, strict=True):
                result[members[k]] = piece
        return result

    def _shard(self, owner: tuple[int, ...]) -> Shard | None:
        """Return an open shard, or None if it is not stored."""
        key = self._key(owner)
        if not self.files.location.is_local:
            try:
                return fetch_index(self.files.location, key, self.n_slots)
            except CorruptError as error:
                # A shard without chunks is not stored. Only the message tells this case from a damaged index.
                if "is missing" in str(error):
                    return None
                raise
        file = f"{self.files.root}/{key}"
        try:
            return map_shard(file, self.n_slots)
        except CorruptError:
            if not Path(file).exists():
                return None
            raise


class CellArray:
    """A per-chunk array of layout 0.9: one byte string per cell of a grid."""

    def __init__(self, files: StoreFiles, path: str, node: dict[str, Any]) -> None:
        self.attributes = node_attributes(node)
        self._chunks = _InnerChunks(files, path, node)
        rank = len(self._chunks.shape)
        self.origin = np.array(self.attributes.get("chunk_grid_origin") or [0] * rank, np.int64)
        if self.origin.shape != (rank,) or set(self._chunks.inner) != {1}:
            raise CorruptError(f"{self._chunks.where} has an origin or cells that do not fit its {rank} axes.")
        self._shape = np.array(self._chunks.shape, np.uint64)

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """Chunks with data, ascending."""
        names = self.attributes.get("nonempty_chunks")
        if names is None:
            raise SourceError(
                f"{self._chunks.where} does not list its chunks; only arrays with 'nonempty_chunks' are supported."
            )
        keys = parse_keys(names, self._chunks.where)
        keys = keys if len(keys) else np.zeros((0, len(self.origin)), np.int64)
        # Keys with a wrong number of parts become a cell that the next check refuses.
        cells = keys - self.origin if keys.shape[1] == len(self.origin) else np.full((1, 1), -1)
        if (cells < 0).any() or (len(cells) and (cells.view(np.uint64) >= self._shape[: cells.shape[1]]).any()):
            raise CorruptError(f"{self._chunks.where} lists a chunk outside its grid.")
        return keys

    def read(self, keys: NDArray[np.int64]) -> list[Bytes]:
        """Return the byte strings of some cells; empty for missing ones."""
        cells = keys - self.origin
        beyond = cells.view(np.uint64) >= self._shape  # as unsigned, negative numbers are out of range too
        if beyond.any():
            result = [EMPTY] * len(keys)
            inside = np.flatnonzero(~beyond.any(axis=1))
            for i, data in zip(inside.tolist(), self.read(keys[inside]), strict=True):
                result[i] = data
            return result
        if self._chunks.is_foreign:
            places = [tuple(slice(i, i + 1) for i in cell) for cell in cells.tolist()]
            found = self._chunks.files.foreign(self._chunks.path, places)
            return [np.frombuffer(bytes(value.reshape(-1)[0]), np.uint8) for value in found]
        where = self._chunks.where
        return [EMPTY if chunk is None else decode_single_item(chunk, where) for chunk in self._chunks.read(cells)]


class VlenArray:
    """A one-dimensional array of byte strings: manifests, groups, texts."""

    def __init__(self, files: StoreFiles, path: str, node: dict[str, Any]) -> None:
        self.attributes = node_attributes(node)
        self._chunks = _InnerChunks(files, path, node)
        if len(self._chunks.shape) != 1:
            raise CorruptError(f"{self._chunks.where} has shape {self._chunks.shape}; expected one axis.")
        self.n_items = self._chunks.shape[0]
        # A chunk may be declared longer than the array; `_decode` allocates memory for `_inner` items.
        self._inner = min(self._chunks.inner[0], max(1, self.n_items))
        # An item takes at least four bytes in its chunk, so both limits bound the memory for the declared shape.
        check_chunk_bytes(self._chunks.where, 4 * self._inner)
        if self.n_items > MAX_SHARD_CHUNKS * self._inner:
            raise LimitError(
                f"{self._chunks.where} declares {self.n_items:,} items in chunks of {self._inner:,}; expected at most "
                f"{MAX_SHARD_CHUNKS:,} chunks. Write it again with larger chunks."
            )
        self._decoded: LRUCache[Blobs] = LRUCache(_CACHED_CHUNKS)

    def read(self, rows: NDArray[np.int64] | None = None) -> Blobs:
        """Return some items in the given order, or all of them."""
        if self._chunks.is_foreign:
            (values,) = self._chunks.files.foreign(self._chunks.path)
            every = concat_blobs([bytes(item) for item in values.tolist()])
            return every if rows is None else concat_blobs([every[i].tobytes() for i in rows.tolist()])
        inner = self._inner
        if rows is None:
            parts = [self._decode(i) for i in range(-(-self.n_items // inner))]
            sizes = np.concatenate([np.zeros(0, np.int64), *(np.diff(part.bounds) for part in parts)])
            data, bounds = np.concatenate([EMPTY, *(part.data for part in parts)]), counts_to_offsets(sizes)
            # The last chunk is padded with empty items.
            return Blobs(data[: bounds[self.n_items]], bounds[: self.n_items + 1])
        chunks = {i: self._decode(i) for i in sorted(set((rows // inner).tolist()))}
        return concat_blobs([chunks[row // inner][row % inner] for row in rows.tolist()])

    def _decode(self, chunk: int) -> Blobs:
        """Return the items of one inner chunk, cached."""
        cached = self._decoded.get(chunk)
        if cached is not None:
            return cached
        (raw,) = self._chunks.read(np.array([[chunk]], np.int64))
        inner = self._inner
        none = Blobs(EMPTY, np.zeros(inner + 1, np.int64))
        items = none if raw is None else decode_vlen(raw, self._chunks.where)
        # The last chunk may be padded; in any other, further items would shift those of later chunks.
        if not min(inner, self.n_items - chunk * inner) <= len(items) <= self._chunks.inner[0]:
            raise CorruptError(
                f"{self._chunks.where} has a chunk of {len(items)} items; expected {inner}. Restore it from a copy."
            )
        self._decoded.put(chunk, items)
        return items


class ChunkGroup:
    """A per-chunk array of layout 0.7: a group with one array per chunk."""

    def __init__(self, files: StoreFiles, path: str, node: dict[str, Any]) -> None:
        self.attributes = node_attributes(node)
        self._files, self._path = files, path

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """Chunks with data, ascending."""
        names = self._files.children(self._path)
        return parse_keys([name for name in names if name[-1].isdigit() and name[0] in "-0123456789"], self._path)

    def read(self, keys: NDArray[np.int64]) -> list[Bytes]:
        """Return the values of some chunks as bytes; empty for missing ones."""
        paths = [f"{self._path}/{'.'.join(map(str, key))}" for key in keys.tolist()]
        one_by_one = self._files.location.is_local
        result = map(self._read_one, paths) if one_by_one else map_requests(self._read_one, paths)
        return [EMPTY if data is None else data for data in result]

    def _read_one(self, path: str) -> Bytes | None:
        return read_array_bytes(self._files, path)


ChunkArray: TypeAlias = CellArray | ChunkGroup
"""A per-chunk array of a level, in either layout."""
