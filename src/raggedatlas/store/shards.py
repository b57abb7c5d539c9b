"""Shards as bytes: encoded chunks, their index, and the two ways to look one up (memory map, byte ranges)."""

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.store.checksums import has_checksum, with_checksum
from raggedatlas.store.codecs import Stored
from raggedatlas.store.files import Piece
from raggedatlas.store.location import Location, refuse_symlink, store_errors
from raggedatlas.store.runs import ChunkRun

V = TypeVar("V")

ABSENT = np.iinfo(np.uint64).max
_MAPS_KEPT = 256
_INDEXES_KEPT = 4096


@dataclass(frozen=True)
class Shard:
    """One stored shard: its index, its size, and its bytes where they are mapped.

    Parameters
    ----------
    index : (n_chunks, 2) int64
        Offset and size of every chunk; size -1 where the chunk is not stored.
    size : int
        Bytes of the whole shard.
    data : (size,) uint8 or None
        The mapped bytes of a local shard.
    stamp : tuple
        What tells that the file has changed since.
    """

    index: NDArray[np.int64]
    size: int
    data: NDArray[np.uint8] | None = None
    stamp: tuple[int, ...] = ()


class RecentlyUsed(Generic[V]):
    """A dictionary that keeps the entries used last; safe between threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.entries: OrderedDict[object, V] = OrderedDict()

    def get(self, key: object) -> V | None:
        """Return an entry and make it the youngest, or None."""
        with self.lock:
            if key not in self.entries:
                return None
            self.entries.move_to_end(key)
            return self.entries[key]

    def put(self, key: object, value: V) -> None:
        """Store an entry and drop the oldest ones beyond the size."""
        with self.lock:
            self.entries[key] = value
            self.entries.move_to_end(key)
            while len(self.entries) > self.size:
                self.entries.popitem(last=False)

    def put_first(self, key: object, value: V) -> V:
        """Store an entry where there is none, and return the one that is there."""
        with self.lock:
            found = self.entries.setdefault(key, value)
        self.put(key, found)
        return found


_MAPS: RecentlyUsed[Shard] = RecentlyUsed(_MAPS_KEPT)
_INDEXES: RecentlyUsed[Shard] = RecentlyUsed(_INDEXES_KEPT)
_FETCHING: RecentlyUsed[threading.Lock] = RecentlyUsed(_INDEXES_KEPT)


def shard_key(row_shape: tuple[int, ...], shard: int) -> str:
    """Return the key of a shard below its array (Zarr v3, default chunk keys)."""
    return "/".join(["c", str(shard), *("0" for _ in row_shape)])


def index_bytes(n_chunks: int) -> int:
    """Return the size of a shard index: two uint64 a chunk and a crc32c."""
    return 16 * n_chunks + 4


def compose_shard(runs: Sequence[ChunkRun], n_slots: int) -> list[Piece]:
    """Give the pieces of one shard of `n_slots` chunks: the encoded chunks, and their index with its crc32c."""
    sizes = np.concatenate([np.diff(run.ends, prepend=0) for run in runs])
    index = np.full((n_slots, 2), -1, dtype=np.int64)
    index[: len(sizes)] = np.stack([np.cumsum(sizes) - sizes, sizes], axis=1)
    return [*(run.data for run in runs), compose_index(index)]


def compose_index(index: NDArray[np.int64]) -> bytes:
    """Make the bytes of a shard index, the inverse of `parse_index`.

    Parameters
    ----------
    index : (n_chunks, 2) int64
        Offset and size of every chunk; size -1 where the chunk is not stored.
    """
    entries = index.astype("<u8")
    entries[index[:, 1] < 0] = ABSENT
    table = entries.tobytes()
    return with_checksum(table)


def parse_index(tail: Stored, shard_size: int, where: str) -> NDArray[np.int64]:
    """Read a shard index and check it against its checksum and the size of the shard.

    Parameters
    ----------
    tail : bytes-like
        The last `index_bytes` bytes of the shard.
    shard_size : int
        Bytes of the whole shard.
    where : str
        The shard's name for messages.

    Returns
    -------
    (n_chunks, 2) int64
        Offset and size of every chunk; size -1 where the chunk is not stored.

    Raises
    ------
    CorruptError
        If the checksum does not match or a chunk lies outside the shard.
    """
    data = np.frombuffer(tail, dtype=np.uint8)
    if not has_checksum(data):
        raise CorruptError(f"The index of shard {where} does not match its crc32c; restore the file from a copy.")
    entries = data[:-4].view("<u8").reshape(-1, 2)
    absent = (entries == ABSENT).all(axis=1)
    room = shard_size - data.size
    stored = entries[~absent]
    if ((stored > room) | (stored.sum(axis=1, keepdims=True) > room)).any():
        raise CorruptError(
            f"The index of shard {where} points outside its {shard_size:,} bytes; restore the file from a copy."
        )
    index: NDArray[np.int64] = entries.astype(np.int64)
    index[absent] = 0, -1
    return index


def map_shard(file: Path | str, n_chunks: int, *, within: Path | None = None) -> Shard:
    """Map a local shard and read its index; kept among the 256 used last while the file does not change.

    Parameters
    ----------
    file : Path or str
        Of the shard; a str is looked up faster.
    n_chunks : int
        How many chunks it has room for.
    within : Path or None
        A folder below which neither the file nor a folder above it may be a symlink.

    Raises
    ------
    CorruptError
        If the file is missing, too short, or its index is wrong.
    StoreError
        If it is reached by a symlink below `within`.
    """
    try:
        info = os.stat(file)  # noqa: PTH116 - at every read of a shard
    except FileNotFoundError:
        raise CorruptError(f"The shard {file} is missing; restore it from a copy or drop its dataset.") from None
    stamp = (info.st_mtime_ns, info.st_size, info.st_ino)
    known = _MAPS.get(str(file))
    if known is not None and known.stamp == stamp:
        return known
    if within is not None:
        for part in (Path(file), *Path(file).parents):
            if part == within:
                break
            refuse_symlink(part)
    with store_errors(f"map {file}"), Path(file).open("rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        if size < index_bytes(n_chunks):
            raise _cut_short(str(file), size, n_chunks)
        data = np.frombuffer(mmap.mmap(handle.fileno(), size, access=mmap.ACCESS_READ), dtype=np.uint8)
    shard = Shard(parse_index(data[size - index_bytes(n_chunks) :], size, str(file)), size, data, stamp)
    _MAPS.put(str(file), shard)
    return shard


def fetch_index(location: Location, key: str, n_chunks: int) -> Shard:
    """Fetch the index of a remote shard in one request; kept among the 4,096 used last, and in the disk cache if there is one.

    Raises
    ------
    CorruptError
        If the shard is missing, too short, or its index is wrong.
    """
    own = (f"{location.uri}/{key}", *location.storage_options.items())
    # One thread asks, the others that want the same index wait for it.
    with _FETCHING.put_first(own, threading.Lock()):
        known = _INDEXES.get(own) or _fetch_index(location, key, n_chunks)
        _INDEXES.put(own, known)
    return known


def forget_indexes(location: Location) -> None:
    """Forget the indexes of all remote shards below a location, as something else is written there."""
    with _INDEXES.lock:
        for own in [
            key for key in _INDEXES.entries if isinstance(key, tuple) and str(key[0]).startswith(f"{location.uri}/")
        ]:
            del _INDEXES.entries[own]


def _fetch_index(location: Location, key: str, n_chunks: int) -> Shard:
    """Fetch the index of a remote shard from the disk cache, or else from the store."""
    name = f"{location.uri}/{key}"
    known = _held_index(location, name, n_chunks)
    if known is not None:
        return known
    try:
        tail, size = _fetch_tail(location, key, index_bytes(n_chunks))
    except FileNotFoundError:
        raise CorruptError(f"The shard {name} is missing; restore it from a copy or drop its dataset.") from None
    if size < index_bytes(n_chunks):
        raise _cut_short(name, size, n_chunks)
    return Shard(parse_index(tail, size, name), size)


def fetch_chunks(location: Location, key: str, shard: Shard, index: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
    """Fetch stored chunks of one remote shard, from the disk cache where they are held; near ones share a request.

    Parameters
    ----------
    location : Location
        The array.
    key : str
        Key of the shard.
    shard : Shard
        What `fetch_index` gave.
    index : (k, 2) int64
        Offset and size of the wanted chunks.

    Returns
    -------
    list of k uint8 arrays
    """
    cache, name = location.disk_cache, _cache_name(location, f"{location.uri}/{key}")
    held = [None] * len(index) if cache is None else cache.read_chunks(name, index, shard.size)
    missing = np.array([i for i, data in enumerate(held) if data is None], np.int64)
    fetched = _get_ranges(location, key, index[missing]) if missing.size else []
    if cache is not None and fetched:
        cache.write_chunks(name, index[missing], fetched, shard.size, compose_index(shard.index))
    more = iter(fetched)
    return [next(more) if data is None else data for data in held]


def _held_index(location: Location, name: str, n_chunks: int) -> Shard | None:
    """Look a shard index up in the disk cache; what is wrong there is removed."""
    cache = location.disk_cache
    found = None if cache is None else cache.read_tail(_cache_name(location, name), index_bytes(n_chunks))
    if cache is None or found is None:
        return None
    try:
        return Shard(parse_index(*found, name), found[1])
    except CorruptError:
        cache.forget(_cache_name(location, name))
        return None


def _cache_name(location: Location, name: str) -> str:
    """Tell a shard from one of the same address on another server."""
    return f"{location.storage_options.get('aws_endpoint', '')} {name}"


def _get_ranges(location: Location, key: str, index: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
    """Request byte ranges of one object."""
    import obstore

    starts, ends = index[:, 0], index.sum(axis=1)
    try:
        with store_errors(f"read {location.uri}/{key}"):
            found = obstore.get_ranges(location.store(), key, starts=starts.tolist(), ends=ends.tolist())
    except FileNotFoundError:
        raise CorruptError(f"The shard {location.uri}/{key} is missing; restore it from a copy.") from None
    return [np.frombuffer(memoryview(item), dtype=np.uint8) for item in found]


def _fetch_tail(location: Location, key: str, n_bytes: int) -> tuple[bytes, int]:
    """Return the last bytes of a remote object and its size; one request where the store knows suffix ranges."""
    import obstore
    from obstore.exceptions import BaseError

    store = location.store()
    with store_errors(f"read {location.uri}/{key}"):
        if not location.uri.startswith("az://"):
            try:
                found = obstore.get(store, key, options={"range": {"suffix": n_bytes}})
                return bytes(found.bytes()), int(found.meta["size"])
            except BaseError as error:
                if isinstance(error, FileNotFoundError):
                    raise
        size = int(obstore.head(store, key)["size"])
        if size < n_bytes:
            return b"", size
        return bytes(obstore.get_range(store, key, start=size - n_bytes, end=size)), size


def _cut_short(name: str, size: int, n_chunks: int) -> CorruptError:
    """Say that a shard is too short for its index."""
    return CorruptError(
        f"The shard {name} has {size:,} bytes and no room for its index of {index_bytes(n_chunks):,}; "
        "it was cut short. Restore it from a copy or drop its dataset."
    )
