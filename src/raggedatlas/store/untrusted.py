"""Untrusted Zarr files: metadata and compressed frames are checked before memory is allocated."""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError, CorruptError, LimitError, SourceError
from raggedatlas.model.arrays import DTYPES, MAX_CHUNK_BYTES, check_chunk_bytes, check_shapes
from raggedatlas.store.codecs import blosc_declared_bytes, refuse_unknown_codecs, with_checksum, zstd_declared_bytes
from raggedatlas.store.shards import index_bytes, parse_index

if TYPE_CHECKING:
    from zarr.abc.store import Store

_LARGEST_ITEM = 64 * 2**10
# Two bits of deflate decode to at most 258 bytes.
_MOST_DEFLATE_RATIO = 1032
_PIECE = 2**20
_BLOCK = 2**16
# What is left after the last stream is a checksum: no stream of any of these formats is as short.
_MOST_REST = 4
_VARIABLE = ("string", "variable_length_utf8", "bytes", "variable_length_bytes")
_RECORDS = ("struct", "structured")
_METADATA = ("zarr.json", ".zarray", ".zmetadata")
_NO_BYTES = (".zattrs", ".zgroup")


@dataclass(frozen=True)
class StoredArray:
    """Properties of one foreign array that its chunks are checked against."""

    path: str
    chunk_bytes: int  # decoded bytes of what is decoded at once (the inner chunk of a shard)
    compressors: tuple[str, ...]  # that a chunk passes through, outermost first
    checksum: bool = False  # whether a crc32c follows the compressed bytes
    slots: int = 0  # inner chunks of a shard; 0 where chunks are stored one by one
    index_first: bool = False  # whether the index of a shard is at its start, not at its end
    index_checksum: bool = True  # whether a crc32c follows the index

    @property
    def index_size(self) -> int:
        """Stored bytes of a shard's index."""
        return index_bytes(self.slots) - (0 if self.index_checksum else 4)


def check_array_metadata(path: str, metadata: Mapping[str, Any]) -> StoredArray:
    """Check the metadata of a foreign array (``.zarray`` or ``zarr.json``) before anything of it is read.

    Raises `SourceError` for a codec, compressor or filter that is not among those that are read (pickle never is),
    `LimitError` for chunks that decode to more than 512 MiB, and `CorruptError` for metadata that does not parse.
    """
    try:
        return _check_v2(path, metadata) if metadata.get("zarr_format") == 2 else _check_v3(path, metadata)
    except AtlasError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise CorruptError(f"The metadata of the Zarr array {path!r} does not parse: {error!r}.") from error


def check_frames(array: StoredArray, data: NDArray[np.uint8]) -> None:
    """Refuse a stored chunk (or shard) whose compressed frames would decode to more than the chunk holds, or do not say to how much."""
    if not array.slots:
        _check_frame(array, data)
        return
    for offset, size in shard_index(array, data, data.size).tolist():
        if size >= 0:
            _check_frame(array, data[offset : offset + size])


def shard_index(array: StoredArray, data: NDArray[np.uint8], shard_size: int) -> NDArray[np.int64]:
    """Return the index of a shard: offset and size of each inner chunk, size -1 where it is not stored.

    `data` are all bytes of the shard, or those at its end or start where the index is; `shard_size` is the size of all.
    """
    n = array.index_size
    if data.size < n:
        raise CorruptError(f"A shard of {array.path} has {data.size} bytes and no room for its index.")
    index = data[:n] if array.index_first else data[-n:]
    if not array.index_checksum:
        index = np.frombuffer(with_checksum(index.tobytes()), np.uint8)
    # `parse_index` expects an index with a checksum at the end and takes its size off the shard's.
    chunks_end = shard_size if array.index_first else shard_size - n
    entries = parse_index(index, chunks_end + index.size, array.path)
    # When zarr-python asks for the bytes of a chunk inside the index, nothing distinguishes it from the index.
    if array.index_first and (entries[entries[:, 1] >= 0, 0] < n).any():
        raise CorruptError(
            f"The index of a shard of {array.path} names a chunk inside the index itself; restore the file from a copy."
        )
    return entries


def guarded_zarr_store(store: "Store") -> "Store":
    """Wrap a zarr-python store so that metadata and chunks are checked as they are read.

    Arrays whose metadata were read through the wrapper have their chunks checked against their own chunk size; other
    reads against 512 MiB. Use it to open every Zarr file that is not ours. Reads through it raise `SourceError`,
    `LimitError` and `CorruptError`.
    """
    from zarr.abc.store import SuffixByteRequest
    from zarr.storage import WrapperStore

    arrays: dict[str, StoredArray] = {}

    def check(key: str, found: Any, byte_range: Any) -> Any:  # noqa: ANN401 - zarr's buffers
        if found is not None and not isinstance(byte_range, SuffixByteRequest):
            data = np.ascontiguousarray(found.as_numpy_array()).view(np.uint8)
            _check_stored(arrays, key, data, byte_range)
        return found

    # Every way in which one of the two zarr generations asks for bytes passes through `check`.
    class GuardedStore(WrapperStore[Any]):
        """Checks what is read."""

        _supports_sync_io = False

        async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:  # noqa: ANN401
            data = check(key, await self._store.get(key, prototype, byte_range), byte_range)
            return data if data is None else _readable_records(key, data, prototype)

        async def get_partial_values(self, prototype: Any, key_ranges: Any) -> Any:  # noqa: ANN401
            return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

        async def get_ranges(self, key: str, byte_ranges: Any, **options: Any) -> Any:  # noqa: ANN401
            async for group in self._store.get_ranges(key, byte_ranges, **options):
                yield [(i, check(key, found, byte_ranges[i])) for i, found in group]

        async def _get_many(self, requests: Any) -> Any:  # noqa: ANN401
            for request in requests:
                yield request[0], await self.get(*request)

        def get_sync(self, key: str, *, prototype: Any = None, byte_range: Any = None) -> Any:  # noqa: ANN401
            data = check(key, self._store.get_sync(key, prototype=prototype, byte_range=byte_range), byte_range)
            return data if data is None else _readable_records(key, data, prototype)

    return GuardedStore(store)


def _check_stored(arrays: dict[str, StoredArray], key: str, data: NDArray[np.uint8], byte_range: Any) -> None:  # noqa: ANN401 - zarr's
    """Check one object; metadata teach the guard what follows."""
    folder, _, name = key.rpartition("/")
    if name in _METADATA:
        if byte_range is None:
            try:
                metadata = json.loads(data.tobytes())
                nodes = _nodes(folder, name, metadata)
            except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
                raise CorruptError(f"{folder}/{name} is not Zarr metadata: {error!r}.") from error
            for path, node in nodes.items():
                arrays[path] = check_array_metadata(path, node)
        return
    array, path = None, "" if name in _NO_BYTES else key
    # How many parts of the key are below the array depends on its rank and key encoding.
    while path and array is None:
        path = path.rpartition("/")[0]
        array = arrays.get(path)
    if array is None:
        return
    # A part of a shard is an inner chunk and can be checked; a part of a plain chunk is no frame.
    if byte_range is None:
        check_frames(array, data)
    elif array.index_first and (byte_range.start, byte_range.end) == (0, array.index_size):
        # The length of the shard is unknown here; zarr-python gets no byte beyond its end.
        shard_index(array, data, 2**62)
    elif array.slots:
        _check_frame(array, data)


@contextmanager
def zarr_errors(where: str) -> Iterator[None]:
    """Raise `CorruptError` for what damaged metadata and chunks raise where they are read, here or in zarr-python."""
    try:
        yield
    except AtlasError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CorruptError(f"{where} has damaged metadata or chunks: {error!r}; restore it from a copy.") from error


def _nodes(folder: str, name: str, metadata: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the metadata of every array in a metadata object, by path."""
    below = f"{folder}/" if folder else ""
    if name == ".zarray":
        return {folder: metadata}
    if name == ".zmetadata":
        entries = metadata["metadata"].items()
        return {below + key.removesuffix("/.zarray"): node for key, node in entries if key.endswith("/.zarray")}
    arrays = {folder: metadata} if metadata.get("node_type") == "array" else {}
    inner = (metadata.get("consolidated_metadata") or {}).get("metadata") or {}
    arrays.update({below + key: node for key, node in inner.items() if node.get("node_type") == "array"})
    return arrays


def _check_v3(path: str, metadata: Mapping[str, Any]) -> StoredArray:
    """Check Zarr v3 array metadata."""
    codecs = metadata["codecs"]
    refuse_unknown_codecs(codecs, path or "The Zarr array")
    shape = tuple(metadata["shape"])
    outer = tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])
    inner, slots, index_first, index_codecs = outer, 0, False, ["bytes", "crc32c"]
    if codecs[0]["name"] == "sharding_indexed":
        settings = codecs[0]["configuration"]
        inner = tuple(settings["chunk_shape"])
        codecs = settings["codecs"]
        index_codecs = [item["name"] for item in settings["index_codecs"]]
        big = (settings["index_codecs"][0].get("configuration") or {}).get("endian") == "big"
        if big or index_codecs not in (["bytes"], ["bytes", "crc32c"]):
            raise SourceError(
                f"{path or 'The Zarr array'} has shards whose index is encoded with {settings['index_codecs']}; only "
                "little-endian bytes, with or without a crc32c, are read. Write it again with those."
            )
        index_first = settings.get("index_location", "end") == "start"
        slots = math.prod(outer) // max(1, math.prod(inner))
        _check_axes(path, shape, inner, outer)
    else:
        _check_axes(path, shape, inner, None)
    n_bytes = math.prod(inner) * _itemsize_v3(path, metadata["data_type"])
    check_chunk_bytes(path, n_bytes)
    names = [str(item["name"]).removeprefix("numcodecs.") for item in codecs]
    # Codecs are listed in the order of encoding, so the last one is the outermost.
    compressors = tuple(name for name in reversed(names) if name in _FRAMES)
    # Text of variable length has no decoded size that metadata tell, so only the general limit holds.
    fixed = not any(name.startswith("vlen") for name in names)
    return StoredArray(
        path,
        n_bytes if fixed else MAX_CHUNK_BYTES,
        compressors,
        checksum=names[-1] == "crc32c",
        slots=slots,
        index_first=index_first,
        index_checksum=len(index_codecs) == 2,
    )


def _check_v2(path: str, metadata: Mapping[str, Any]) -> StoredArray:
    """Check Zarr v2 array metadata."""
    steps = [*(metadata.get("filters") or []), *([metadata["compressor"]] if metadata.get("compressor") else [])]
    refuse_unknown_codecs(steps, path or "The Zarr array")
    chunk = tuple(metadata["chunks"])
    _check_axes(path, tuple(metadata["shape"]), chunk, None)
    dtype = np.dtype(_dtype_v2(metadata["dtype"]))
    n_bytes = math.prod(chunk) * dtype.itemsize
    check_chunk_bytes(path, n_bytes)
    names = [str(step["id"]) for step in steps]
    compressors = tuple(name for name in reversed(names) if name in _FRAMES)
    return StoredArray(path, MAX_CHUNK_BYTES if dtype.hasobject or len(names) > 1 else n_bytes, compressors)


def _dtype_v2(kind: Any) -> Any:  # noqa: ANN401 - JSON
    """Convert a data type of ``.zarray`` to NumPy's form: records are lists of fields, which may be records."""
    if isinstance(kind, str):
        return kind
    return [(name, _dtype_v2(inner), *(tuple(size) for size in shape)) for name, inner, *shape in kind]


def _check_axes(path: str, shape: tuple[int, ...], chunk: tuple[int, ...], shard: tuple[int, ...] | None) -> None:
    """Check shapes; arrays without axes or without elements have nothing that could grow."""
    if shape:
        check_shapes(path, shape, tuple(1 if size == 0 else size for size in chunk), shard)


def _itemsize_v3(path: str, data_type: Any) -> int:  # noqa: ANN401 - JSON
    """Return the bytes of one element; variable ones count as a pointer."""
    name = data_type if isinstance(data_type, str) else data_type["name"]
    settings = {} if isinstance(data_type, str) else data_type.get("configuration") or {}
    if name in _RECORDS:
        return sum(_itemsize_v3(path, inner) for _, inner in _record_fields(data_type))
    if name in _VARIABLE or name in ("numpy.datetime64", "numpy.timedelta64"):
        return 8
    if "length_bytes" in settings:
        size = int(settings["length_bytes"])
    elif name.startswith("r") and name[1:].isdecimal():
        size = int(name[1:]) // 8
    elif name in DTYPES:
        size = np.dtype(name).itemsize
    else:
        raise SourceError(
            f"{path or 'The Zarr array'} has elements of the data type {name!r}, which is not read; write it again with "
            "numbers, text or records."
        )
    if not 0 <= size <= _LARGEST_ITEM:
        raise LimitError(f"An element of {size:,} bytes is declared; at most {_LARGEST_ITEM:,} are read.")
    return size


def _record_fields(data_type: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return names and data types of the fields of a record, which the two spellings of the type store differently."""
    fields = data_type["configuration"]["fields"]
    return [(f["name"], f["data_type"]) if isinstance(f, Mapping) else (f[0], f[1]) for f in fields]


def _readable_records(key: str, found: Any, prototype: Any) -> Any:  # noqa: ANN401 - zarr's buffers
    """Spell the data type of records in metadata as the installed zarr-python reads it.

    Since 3.2 zarr-python writes ``struct``, which earlier releases do not know; they write the same bytes as
    ``structured``.
    """
    import zarr.dtype

    if hasattr(zarr.dtype, "Struct") or not key.endswith("zarr.json"):
        return found
    data = found.to_bytes()
    if b'"struct"' not in data:
        return found
    metadata = json.loads(data)
    inner = (metadata.get("consolidated_metadata") or {}).get("metadata") or {}
    for node in (metadata, *inner.values()):
        data_type = node.get("data_type")
        if isinstance(data_type, Mapping) and data_type["name"] == "struct":
            node["data_type"] = _structured(data_type)
            kind: Any = zarr.dtype.parse_dtype(node["data_type"], zarr_format=3)
            fill = node.get("fill_value")
            if isinstance(fill, Mapping):
                values = tuple(
                    inner.from_json_scalar(fill[name], zarr_format=3) if name in fill else inner.default_scalar()
                    for name, inner in kind.fields
                )
                node["fill_value"] = kind.to_json_scalar(values, zarr_format=3)
    return prototype.buffer.from_bytes(json.dumps(metadata).encode())


def _structured(data_type: Any) -> Any:  # noqa: ANN401 - JSON
    """Spell a data type, and what is nested in it, as zarr-python before 3.2 does."""
    if isinstance(data_type, str) or data_type["name"] != "struct":
        return data_type
    fields = [[name, _structured(inner)] for name, inner in _record_fields(data_type)]
    return {"name": "structured", "configuration": {"fields": fields}}


def _check_frame(array: StoredArray, data: NDArray[np.uint8]) -> None:
    """Check the outermost compressed frame of one chunk."""
    if not array.compressors:
        return
    name = array.compressors[0]
    max_bytes = array.chunk_bytes if len(array.compressors) == 1 else MAX_CHUNK_BYTES
    # The crc32c follows the frame, and the frame's own length must not include it.
    declared = _FRAMES[name](data[:-4] if array.checksum else data, max_bytes)
    if declared > max_bytes:
        raise CorruptError(
            f"A chunk of {array.path} is a {name} frame of {data.size:,} bytes that holds {declared:,} or more; the "
            f"array's chunks have {max_bytes:,}. The file is damaged or made to exhaust memory and is not read."
        )


def _deflate_bytes(data: NDArray[np.uint8], room: int) -> int:
    """Count what a gzip or zlib stream holds, up to one byte more than `room`."""
    if data.size * _MOST_DEFLATE_RATIO <= room:
        return 0
    raw, total, at, stream = data.tobytes(), 0, 0, None
    try:
        while len(raw) - at > _MOST_REST and total <= room:
            block = raw[at : at + _BLOCK]
            if stream is None or stream.eof:
                # gzip decodes all streams that follow one another, with zeros between them or not.
                zeros = len(block) - len(block.lstrip(b"\0"))
                if zeros:
                    at += zeros
                    continue
                # 47 is 32 + 15: gzip or zlib by their heads, with windows up to the largest.
                stream = zlib.decompressobj(wbits=47)
            total += len(stream.decompress(block, _PIECE))
            at += len(block) - len(stream.unconsumed_tail) - len(stream.unused_data)
    except zlib.error as error:
        raise CorruptError(f"A deflate stream does not decode: {error}.") from error
    return total


def _counted_bytes(name: str) -> Callable[[NDArray[np.uint8], int], int]:
    """Return a counter for bz2 or lzma, whose frames do not say their size."""

    def count(data: NDArray[np.uint8], room: int) -> int:
        import bz2
        import lzma

        total, rest = 0, data.tobytes()
        try:
            # Both libraries decode all streams that follow one another.
            while len(rest) > _MOST_REST and total <= room:
                # An lzma stream declares the size of its dictionary, which would be allocated unseen without `memlimit`.
                stream: Any = (
                    bz2.BZ2Decompressor() if name == "bz2" else lzma.LZMADecompressor(memlimit=MAX_CHUNK_BYTES)
                )
                while total <= room and not stream.eof:
                    piece = stream.decompress(rest, _PIECE)
                    total, rest = total + len(piece), b""
                    # A stream that is cut short never reaches `eof` and would keep this loop running.
                    if not piece and stream.needs_input:
                        break
                rest = stream.unused_data.lstrip(b"\0")
        except (OSError, lzma.LZMAError, EOFError) as error:
            raise CorruptError(f"A {name} stream does not decode: {error}.") from error
        return total

    return count


_FRAMES: dict[str, Callable[[NDArray[np.uint8], int], int]] = {
    "blosc": lambda data, _: blosc_declared_bytes(data),
    "zstd": lambda data, _: zstd_declared_bytes(data),
    "gzip": _deflate_bytes,
    "zlib": _deflate_bytes,
    "lz4": lambda data, _: int.from_bytes(data[:4].tobytes(), "little"),
    "bz2": _counted_bytes("bz2"),
    "lzma": _counted_bytes("lzma"),
}
