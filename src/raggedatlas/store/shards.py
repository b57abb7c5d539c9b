"""Shards, the stored objects of an array: which chunks rows are in, the index of these, bytes mapped or fetched, and hashes."""

import ctypes
import hashlib
import mmap
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, NotFoundError
from raggedatlas.model.records import Span
from raggedatlas.store.codecs import EncodedChunks, Piece, Stored, has_checksum, with_checksum
from raggedatlas.store.location import Location, refuse_symlink
from raggedatlas.store.native import library
from raggedatlas.store.runtime import LRUCache, process_cache
from raggedatlas.store.storage_errors import store_errors

ABSENT = np.iinfo(np.uint64).max

WAVE_BYTES = 64 * 2**20
"""Decoded bytes of the chunks that are fetched at once."""


@dataclass(frozen=True)
class ChunkPieces:
    """Which chunks a read touches, and the pieces of each."""

    chunks: NDArray[np.int64]  # numbers of the chunks, ascending
    bounds: NDArray[np.int64]  # (n_chunks + 1,): the pieces of each chunk
    sources: NDArray[np.int64]  # first row of each piece inside its chunk
    lengths: NDArray[np.int64]  # number of rows of each piece
    targets: NDArray[np.int64]  # first row of each piece in the output
    n_rows: int  # of all pieces


def plan_pieces(starts: NDArray[np.int64], ends: NDArray[np.int64], chunk_rows: int) -> ChunkPieces:
    """Cut ranges at chunk borders and sort the pieces by chunk."""
    starts, ends = np.ascontiguousarray(starts), np.ascontiguousarray(ends)
    n_pieces = library().ra_count_pieces(starts, ends, starts.size, chunk_rows)
    pieces = np.empty((4, n_pieces), np.int64)
    library().ra_split_ranges(starts, ends, starts.size, chunk_rows, pieces, n_pieces)
    chunks, sources, lengths, targets = pieces
    if chunks.size and (chunks[1:] < chunks[:-1]).any():
        order = np.argsort(chunks, kind="stable")
        chunks, sources, lengths, targets = (item[order] for item in (chunks, sources, lengths, targets))
    new = np.flatnonzero(np.concatenate([[True], chunks[1:] != chunks[:-1]])) if chunks.size else chunks
    bounds = np.append(new, chunks.size).astype(np.int64)
    return ChunkPieces(chunks[new], bounds, sources, lengths, targets, int((ends - starts).sum()))


def join_ranges(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join ranges that follow each other, as those of neighbouring rows do; what is read is the same.

    Examples
    --------
    >>> joined = join_ranges(np.array([0, 3, 9, 1]), np.array([3, 5, 9, 2]))
    >>> [item.tolist() for item in joined]
    [[0, 1], [5, 2]]
    """
    some = starts < ends
    starts, ends = starts[some], ends[some]
    new = starts[1:] != ends[:-1]
    return starts[np.append(True, new)[: starts.size]], ends[np.append(new, True)[: ends.size]]


def shard_key(row_shape: tuple[int, ...], shard: int) -> str:
    """Return the key of a shard below its array (Zarr v3, default chunk keys)."""
    return "/".join(["c", str(shard), *("0" for _ in row_shape)])


def index_bytes(n_chunks: int) -> int:
    """Return the size of a shard index: two uint64 a chunk and a crc32c."""
    return 16 * n_chunks + 4


def compose_shard(runs: Sequence[EncodedChunks], n_slots: int) -> list[Piece]:
    """Return the parts of one shard of `n_slots` chunks: the encoded chunks, and their index with its crc32c."""
    sizes = np.concatenate([np.diff(run.ends, prepend=0) for run in runs])
    index = np.full((n_slots, 2), -1, dtype=np.int64)
    index[: len(sizes)] = np.stack([np.cumsum(sizes) - sizes, sizes], axis=1)
    return [*(run.data for run in runs), compose_index(index)]


def compose_index(index: NDArray[np.int64]) -> bytes:
    """Encode a shard index, as `parse_index` returns it."""
    entries = index.astype("<u8")
    entries[index[:, 1] < 0] = ABSENT
    table = entries.tobytes()
    return with_checksum(table)


def parse_index(tail: Stored, shard_size: int, where: str) -> NDArray[np.int64]:
    """Read a shard index and check it against its checksum and the size of the shard.

    `tail` has the last `index_bytes` bytes of the shard. The result, (n_chunks, 2), is offset and size of every chunk;
    size -1 where it is not stored. `where` names the shard in messages.
    """
    data = np.frombuffer(tail, dtype=np.uint8)
    if not has_checksum(data):
        raise CorruptError(f"The index of shard {where} does not match its crc32c; restore the file from a copy.")
    entries = data[:-4].view("<u8").reshape(-1, 2)
    absent = (entries == ABSENT).all(axis=1)
    data_size = shard_size - data.size
    stored = entries[~absent]
    # Each number is compared before the sum, which alone could wrap around in uint64.
    if ((stored > data_size) | (stored.sum(axis=1, keepdims=True) > data_size)).any():
        raise CorruptError(
            f"The index of shard {where} points outside its {shard_size:,} bytes; restore the file from a copy."
        )
    index: NDArray[np.int64] = entries.astype(np.int64)
    index[absent] = 0, -1
    return index


@dataclass(frozen=True)
class Shard:
    """One stored shard: its index, its size, and its bytes where they are mapped or were fetched with the index."""

    index: NDArray[np.int64]  # (n_chunks, 2): offset and size of every chunk; size -1 where it is not stored
    size: int  # bytes of the shard
    data: NDArray[np.uint8] | None = None  # (size,); None where chunks have to be fetched
    stamp: tuple[int, ...] = ()  # what tells that the file has changed since


def _map_file(descriptor: int, n_bytes: int) -> NDArray[np.uint8]:
    """Map the first bytes of an open file, read-only; the map stays when the file is closed, and takes no open file.

    A batch may touch thousands of shards, more than a process may have open.
    """
    # `mmap` of Python before 3.13 keeps a copy of the descriptor. On Windows, a map takes none.
    if os.name != "posix":
        return np.frombuffer(mmap.mmap(descriptor, n_bytes, access=mmap.ACCESS_READ), np.uint8)
    libc = _libc()
    address = libc.mmap(None, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * n_bytes).from_address(address)
    # Arrays may be in use until the process ends, which unmaps them itself.
    weakref.finalize(memory, libc.munmap, address, n_bytes).atexit = False
    data: NDArray[np.uint8] = np.frombuffer(memoryview(memory), np.uint8)
    data.flags.writeable = False
    return data


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library of the system, with the types of what is called."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.munmap.restype = ctypes.c_void_p, ctypes.c_int
    # The offset is always 0, so its width, which differs between systems, does not matter.
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


_NO_INDEX = np.empty((0, 2), np.int64)

_MERGED_GAP, _SPARE_SHARE = 1 << 20, 0.2
"""Bytes between ranges of one request: at most in an object store, and altogether of what is wanted from a published atlas."""

SMALL_SHARD = 32 * 2**10
"""Bytes of a remote shard that is fetched in one request, which takes about as long as one for its index alone."""


def map_shard(file: Path | str, n_chunks: int, *, within: Path | None = None, span: Span | None = None) -> Shard:
    """Map a local shard and read its index; kept among the 256 used last while the file does not change.

    A str as `file` is looked up faster than a Path. Neither the file nor a folder above it, up to `within`, may be a
    symlink (`StoreError`). `span` is the part of the file that is the shard; None for all of it. A shard that is
    missing or cut short, or has a wrong index, is a `CorruptError`.
    """
    try:
        info = os.stat(file)  # noqa: PTH116 - at every read of a shard
    except FileNotFoundError:
        raise CorruptError(f"The shard {file} is missing; restore it from a copy or drop its dataset.") from None
    # Writers replace files by a rename, so the inode differs even where time and size are the same.
    stamp = (info.st_mtime_ns, info.st_size, info.st_ino)
    mappings: LRUCache[Shard] = process_cache("mappings")
    cache_key = str(file) if span is None else (str(file), span)
    cached = mappings.get(cache_key)
    # Metadata that were written anew may give it another number of chunks.
    if cached is not None and cached.stamp == stamp and len(cached.index) == n_chunks:
        return cached
    # The parts of a file that many datasets share are cut from one mapping of it.
    bundles: LRUCache[Shard] = process_cache("bundles")
    there = None if span is None else bundles.get(str(file))
    if there is None or there.stamp != stamp or there.data is None:
        data = _open_file(Path(file), n_chunks, within)
        if span is not None:
            bundles.put(str(file), Shard(_NO_INDEX, data.size, data, stamp))
    else:
        data = there.data
    start, end = (0, data.size) if span is None else (span.offset, span.offset + span.n_bytes)
    size = min(data.size, end) - start
    if size < max(index_bytes(n_chunks), end - start):
        raise _cut_short(str(file), max(0, size), n_chunks)
    data = data[start:end]
    shard = Shard(parse_index(data[size - index_bytes(n_chunks) :], size, str(file)), size, data, stamp)
    mappings.put(cache_key, shard)
    return shard


def _open_file(file: Path, n_chunks: int, within: Path | None) -> NDArray[np.uint8]:
    """Map a local file that has at least one shard of so many chunks."""
    if within is not None:
        for part in (file, *file.parents):
            if part == within:
                break
            refuse_symlink(part)
    with store_errors(f"map {file}"), file.open("rb") as handle:
        # Of the file that is open, as the name may lead to a new one since `os.stat`.
        size = os.fstat(handle.fileno()).st_size
        if size < index_bytes(n_chunks):
            raise _cut_short(str(file), size, n_chunks)
        return _map_file(handle.fileno(), size)


def fetch_part(location: Location, span: Span, n_chunks: int) -> Shard:
    """Fetch a shard that is part of a remote file, in one request; kept among the 32 used last."""
    parts: LRUCache[Shard] = process_cache("parts")
    key = (location.uri, span, n_chunks, *location.storage_options.items())
    return parts.get_or_make(key, lambda: fetch_shard(location, span.file, n_chunks, span))


def fetch_shard(location: Location, key: str, n_chunks: int, span: Span | None = None) -> Shard:
    """Fetch all bytes of a remote shard in one request, past all caches."""
    name = f"{location.uri}/{key}"
    try:
        found = location.read_bytes(key) if span is None else location.read_range(key, span.offset, span.n_bytes)
    except NotFoundError:
        raise CorruptError(f"The shard {name} is missing; restore it from a copy or drop its dataset.") from None
    return parse_shard(found, n_chunks, name)


def parse_shard(stored: bytes, n_chunks: int, name: str) -> Shard:
    """Return a shard of which all bytes are given; `name` is for messages."""
    data = np.frombuffer(stored, np.uint8)
    if data.size < index_bytes(n_chunks):
        raise _cut_short(name, data.size, n_chunks)
    return Shard(parse_index(data[data.size - index_bytes(n_chunks) :], data.size, name), data.size, data)


def fetch_index(location: Location, key: str, n_chunks: int, span: Span | None = None) -> Shard:
    """Fetch the index of a remote shard, from the disk cache or else in one request; kept among the 4,096 used last.

    A shard of at most `SMALL_SHARD` bytes comes with it, and takes no further request; a disk cache keeps chunks
    instead. `span` is the part of the file that is the shard; None for all of it.
    """
    name = _shard_name(location, key, span)

    def fetch() -> Shard:
        cache, n_bytes = location.disk_cache, index_bytes(n_chunks)
        held = None if cache is None else cache.read_tail(_cache_name(location, name), n_bytes)
        if cache is not None and held is not None:
            try:
                return Shard(parse_index(*held, name), held[1])
            except CorruptError:
                cache.forget(_cache_name(location, name))
        wanted = n_bytes if cache else max(n_bytes, SMALL_SHARD)
        try:
            if span is None:
                tail, size = _fetch_tail(location, key, wanted)
            else:
                size = span.n_bytes
                tail = location.read_range(key, span.offset + max(0, size - wanted), min(size, wanted))
        except (FileNotFoundError, NotFoundError):
            raise CorruptError(f"The shard {name} is missing; restore it from a copy or drop its dataset.") from None
        if size < n_bytes:
            raise _cut_short(name, size, n_chunks)
        data = np.frombuffer(tail, np.uint8)
        return Shard(parse_index(data[-n_bytes:], size, name), size, data if len(data) == size else None)

    indexes: LRUCache[Shard] = process_cache("indexes")
    return indexes.get_or_make((name, n_chunks, *location.storage_options.items()), fetch)


def _shard_name(location: Location, key: str, span: Span | None) -> str:
    """Return the address of a shard, and where it begins if it is part of a file."""
    return f"{location.uri}/{key}" if span is None else f"{location.uri}/{key}@{span.offset}"


def forget_indexes(location: Location) -> None:
    """Forget the indexes of all remote shards below a location, as something else is written there."""
    indexes = process_cache("indexes")
    with indexes.lock:
        for cache_key in [
            key for key in indexes.entries if isinstance(key, tuple) and str(key[0]).startswith(f"{location.uri}/")
        ]:
            del indexes.entries[cache_key]


def fetch_chunks(
    location: Location, key: str, shard: Shard, index: NDArray[np.int64], span: Span | None = None
) -> list[NDArray[np.uint8]]:
    """Fetch stored chunks of one remote shard, from the disk cache where they are held; near ones share a request.

    `shard` is the result of `fetch_index`; `index`, (k, 2), has offset and size of the wanted chunks within the shard.
    `span` is the part of the file that is the shard; None for all of it. The result has the bytes of the k chunks, in
    this order.
    """
    cache, name = location.disk_cache, _cache_name(location, _shard_name(location, key, span))
    within = np.array([0 if span is None else span.offset, 0], np.int64)
    held = [None] * len(index) if cache is None else cache.read_chunks(name, index, shard.size)
    missing = np.array([i for i, data in enumerate(held) if data is None], np.int64)
    fetched = _get_ranges(location, key, index[missing] + within) if missing.size else []
    if cache is not None and fetched:
        cache.write_chunks(name, index[missing], fetched, shard.size, compose_index(shard.index))
    remaining = iter(fetched)
    return [next(remaining) if data is None else data for data in held]


def _cache_name(location: Location, name: str) -> str:
    """Return the cache key of a shard, which includes the server."""
    return f"{location.storage_options.get('aws_endpoint', '')} {name}"


def _get_ranges(location: Location, key: str, index: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
    """Request byte ranges of one object."""
    import obstore

    starts, ends = index[:, 0], index.sum(axis=1)
    try:
        with store_errors(f"read {location.uri}/{key}"):
            gap = _MERGED_GAP if location.server is None else location.server.merged_gap
            if location.server is not None and location.disk_cache is None:
                # What lies between is fetched for nothing, while a published atlas with a cache keeps it.
                gap = cheap_gap(starts, ends, gap)
            buffers = obstore.get_ranges(
                location.store(), key, starts=starts.tolist(), ends=ends.tolist(), coalesce=gap
            )
    except FileNotFoundError:
        raise CorruptError(f"The shard {location.uri}/{key} is missing; restore it from a copy.") from None
    return [np.frombuffer(memoryview(item), dtype=np.uint8) for item in buffers]


def cheap_gap(starts: NDArray[np.int64], ends: NDArray[np.int64], most: int) -> int:
    """Return up to which gap ranges are fetched by one request, so that at most a fifth more is fetched than wanted.

    `starts` and `ends`, (n,), are the ranges, in any order. `most` bytes are fetched in the time of another request;
    the gap is never larger.
    """
    order = np.argsort(starts)
    gaps = np.sort(np.clip(starts[order][1:] - np.maximum.accumulate(ends[order])[:-1], 0, None))
    # All gaps of a size are fetched or none.
    fetched = np.cumsum(gaps)[np.searchsorted(gaps, gaps, side="right") - 1]
    cheap = gaps[fetched <= _SPARE_SHARE * int((ends - starts).sum())]
    return int(min(cheap.max(initial=0), most))


def _fetch_tail(location: Location, key: str, n_bytes: int) -> tuple[bytes, int]:
    """Return the last bytes of a remote object, all if it has fewer, and its size; one request where the store knows suffix ranges."""
    import obstore
    from obstore.exceptions import BaseError

    store = location.store()
    with store_errors(f"read {location.uri}/{key}"):
        # Azure has no suffix ranges; where another store refuses them, size and range take two requests.
        if not location.uri.startswith("az://"):
            try:
                response = obstore.get(store, key, options={"range": {"suffix": n_bytes}})
                return bytes(response.bytes()), int(response.meta["size"])
            except BaseError as error:
                if isinstance(error, FileNotFoundError):
                    raise
        size = int(obstore.head(store, key)["size"])
        n_bytes = min(n_bytes, size)
        return bytes(obstore.get_range(store, key, start=size - n_bytes, end=size)) if n_bytes else b"", size


def _cut_short(name: str, size: int, n_chunks: int) -> CorruptError:
    """Return the error of a shard that is too short for its index."""
    return CorruptError(
        f"The shard {name} has {size:,} bytes and no room for its index of {index_bytes(n_chunks):,}; "
        "it was cut short. Restore it from a copy or drop its dataset."
    )


def hash_shard(pieces: Iterable[Piece]) -> bytes:
    """Return the length of a shard (uint64, little-endian) and the SHA-256 of its bytes: 40 bytes."""
    content, n_bytes = hashlib.sha256(), 0
    for piece in pieces:
        content.update(piece)
        n_bytes += memoryview(piece).nbytes
    return shard_entry(n_bytes, content.digest())


def shard_entry(n_bytes: int, sha256: bytes) -> bytes:
    """Return length and SHA-256 of a shard in the form of `hash_shard`."""
    return n_bytes.to_bytes(8, "little") + sha256


def shards_below(folder: str, keys: Iterable[str]) -> dict[int, str]:
    """Return which of some keys are the shards of an array in a folder: number -> key."""
    below = {key: key.removeprefix(f"{folder}/").partition("/")[0] for key in keys if key.startswith(f"{folder}/")}
    return {int(number): key for key, number in below.items() if number.isdecimal()}


def hash_shards(hashed: Mapping[int, bytes]) -> str:
    """Return the SHA-256 over what `hash_shard` gives for every shard of an array, in their order.

    `hashed` maps shard numbers to length and hash. Where the bytes are, in files of their own or in a bundle, is no
    part of it.

    Examples
    --------
    >>> hash_shards({1: hash_shard([b"b"]), 0: hash_shard([b"a"])})[:8]
    'feff8a9e'
    """
    return hashlib.sha256(b"".join(hashed[number] for number in sorted(hashed))).hexdigest()
