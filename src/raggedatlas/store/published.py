"""Published atlases: snapshots of an atlas as a few large files, which any web server can serve; their format, and how they are read.

A published atlas is a flat folder. ``head.json`` names its snapshots, the index, and the packs with their lengths and hashes. A pack is files of
the atlas one after the other. The index says for each file of the atlas in which pack it is, where, and what its SHA-256 is. Nothing has to be
listed, and no file but ``head.json`` ever changes.
"""

import contextlib
import hashlib
import mmap
import os
import re
import shutil
import tempfile
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeAlias

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raggedatlas.errors import AtlasError, CorruptError, LimitError, NotFoundError, StoreError
from raggedatlas.model.records import AtlasVersionRecord
from raggedatlas.store.cache_folder import CacheFolder
from raggedatlas.store.location import Location, read_blocks, write_pieces
from raggedatlas.store.manifests import FileEntry
from raggedatlas.store.runtime import LRUCache
from raggedatlas.store.web import MOST_AT_ONCE, WebFolder

HEAD = "head.json"
"""The file that a reader begins with."""

FORMAT = "1"
"""Version of this form."""

PACK = re.compile(r"data-[0-9a-f]{16}\.pack")
INDEX = re.compile(r"index-[0-9a-f]{16}\.tsv\.zst")
"""Names of packs and indexes, which are made of what they hold."""

TABLES, ARRAYS = "lance_db/", "zarr_store/"

BLOCK = 1 << 18
"""Bytes of a block of tables; they are fetched and kept in complete blocks."""

MOST_OPENING = 8 << 20
"""Bytes of small table files at the start of a pack that are fetched at once when an atlas is opened."""

SPARE_BYTES, SPARE_SHARE = 16 << 20, 0.2
"""How many bytes of arrays may be fetched that were not asked for: at first, and of what was asked for."""

_MOST_HEAD, _MOST_INDEX, _MOST_RATIO = 64 << 20, 1 << 30, 64
"""Bytes of head and index, and how many times larger the index is before compression, at most."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_REQUEST_BYTES = 8 << 20
_LOOKED_AT = 16
_HELD_BYTES = 128 << 20


class PackedFile(NamedTuple):
    """Where a file of the atlas is."""

    pack: str  # name of the pack
    offset: int  # of its first byte in the pack
    n_bytes: int
    sha256: str  # of its bytes, in hex


class Head(BaseModel):
    """Content of ``head.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: str  # version of the published form
    atlas_format: str  # version of the on-disk format of the atlas
    snapshots: list[AtlasVersionRecord] = Field(min_length=1)  # published ones, oldest first
    index: str  # name of the index
    index_entry: FileEntry  # length and SHA-256 of the index
    index_bytes: int  # length of the index before compression
    packs: dict[str, FileEntry]  # length and SHA-256 of each pack, by name
    opening: tuple[str, int] = ("", 0)  # a pack, and the bytes at its start that opening needs
    n_bytes: int = 0  # of all files of the atlas

    def to_bytes(self) -> bytes:
        """Write it as JSON."""
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def parse(cls, data: bytes, address: str) -> "Head":
        """Parse the file; another version, and names and lengths that no published atlas has, are refused."""
        try:
            head = cls.model_validate_json(data)
        except ValidationError as error:
            raise CorruptError(
                f"{address}/{HEAD} is not that of a published atlas: {error.errors()[0]['msg']}. Check the address."
            ) from error
        if head.format != FORMAT:
            raise AtlasError(
                f"{address} was published in the form {head.format!r}, this version of raggedatlas reads {FORMAT!r}; use the version that "
                "wrote it."
            )
        wrong = [name for name in head.packs if not PACK.fullmatch(name)]
        wrong += [] if INDEX.fullmatch(head.index) else [head.index]
        # Names lead nowhere else: a reader fetches files of the folder alone.
        if wrong or (head.opening[0] and head.opening[0] not in head.packs):
            raise CorruptError(
                f"{address}/{HEAD} names {(wrong or head.opening)[0]!a}, which is no file of a published atlas."
            )
        n_bytes = head.index_entry.n_bytes
        fits = 0 <= n_bytes <= _MOST_INDEX and 0 <= head.index_bytes <= _MOST_RATIO * (n_bytes + 1024)
        if not fits or any(entry.n_bytes < 0 for entry in head.packs.values()):
            raise CorruptError(f"{address}/{HEAD} gives an impossible length of a file.")
        return head

    def find(self, at: str | int | None, address: str) -> AtlasVersionRecord:
        """Return the snapshot of a number or label, the newest for None or ``latest``."""
        if at is None or at == "latest":
            return self.snapshots[-1]
        for record in self.snapshots:
            if at in (record.version, record.label) or str(at) == str(record.version):
                return record
        shown = ", ".join(f"{r.version} ({r.label})" if r.label else str(r.version) for r in self.snapshots[-20:])
        raise NotFoundError(f"There is no snapshot {at!r} of {address}; published are {shown}.")


def write_index(places: Mapping[str, PackedFile]) -> tuple[bytes, int]:
    """Write an index: lines of text sorted by path, compressed with Zstandard. Return it and its uncompressed length."""
    lines = (
        "\t".join([path, one.pack, str(one.offset), str(one.n_bytes), one.sha256])
        for path, one in sorted(places.items())
    )
    text = "".join(f"{line}\n" for line in lines).encode()
    return bytes(pa.compress(text, "zstd", asbytes=True)), len(text)


def parse_index(data: bytes, head: Head, address: str) -> dict[str, PackedFile]:
    """Parse an index after comparing its hash with the recorded one; paths and places that cannot be are refused."""
    where = f"{address}/{head.index}"
    if FileEntry(len(data), hashlib.sha256(data).hexdigest()) != head.index_entry:
        raise CorruptError(
            f"{where} does not have the SHA-256 that {HEAD} names; open the atlas again, or ask who published it."
        )
    places: dict[str, PackedFile] = {}
    try:
        # Of the declared length or an error: no more memory is taken.
        text = str(pa.decompress(data, head.index_bytes, "zstd", asbytes=True), "utf-8") if head.index_bytes else ""
        for line in text.split("\n")[:-1]:
            path, pack, offset, n_bytes, sha256 = line.split("\t")
            places[path] = place = PackedFile(pack, int(offset), int(n_bytes), sha256)
            known = head.packs.get(pack)
            if not path.startswith((TABLES, ARRAYS)) or any(not p.strip(".") or "\\" in p for p in path.split("/")):
                raise CorruptError(f"{where} names the path {path!a}, which is none of an atlas.")
            if known is None or place.offset < 0 or place.n_bytes < 0 or place.offset + place.n_bytes > known.n_bytes:
                raise CorruptError(f"{where} gives a place of {path!a} that no pack has.")
            if not _SHA256.fullmatch(sha256):
                raise CorruptError(f"{where} gives {path!a} no SHA-256.")
    except (pa.ArrowException, ValueError, OSError) as error:
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(f"{where} is not the index of a published atlas: {error}.") from error
    return places


@dataclass(frozen=True)
class StoredFolder:
    """A folder on this machine or in an object store."""

    location: Location

    @property
    def address(self) -> str:
        """The address."""
        return self.location.uri

    @property
    def merged_gap(self) -> int:
        """Bytes that are fetched in the time of another request."""
        return BLOCK if self.location.is_local else 1 << 20

    def read(self, name: str, most: int) -> bytes:
        """Return all bytes of a file; `LimitError` if it has more than `most`."""
        data = bytearray()
        for piece in read_blocks(self.location, name):
            data += piece
            if len(data) > most:
                raise LimitError(f"{self.address}/{name} has more than {most:,} bytes; a file of this kind has fewer.")
        return bytes(data)

    def read_range(self, name: str, start: int, stop: int, size: int) -> bytes:
        """Return a range of a file of a size."""
        return self.location.read_range(name, start, stop - start)


Folder: TypeAlias = StoredFolder | WebFolder
"""A flat folder of files somewhere."""


@dataclass(frozen=True)
class KeptBlocks(CacheFolder):
    """Blocks of published atlases on a local disk, each with its SHA-256 before it."""

    kind: ClassVar[str] = "block"

    def load(self, key: str) -> bytes | None:
        """Return a block, None where it is not held or is damaged."""
        with contextlib.suppress(OSError), self.open(key) as handle:
            if handle is not None:
                data = b"".join(iter(lambda: os.read(handle, 1 << 20), b""))
                os.utime(self.file(key))
                if hashlib.sha256(data[32:]).digest() == data[:32]:
                    return data[32:]
        return None

    def keep(self, key: str, data: bytes) -> None:
        """Keep a block; where the disk is full it is not kept."""
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            with self.create(key) as (handle, _):
                write_pieces(handle, [hashlib.sha256(data).digest(), data])
            # Looking at all files takes time, and the limit need not be exact.
            if int(key[:2], 16) < _LOOKED_AT:
                self.make_room()


class PublishedFiles:
    """The files of the atlas in a published folder.

    `cache` keeps what is read on a local disk; with `offline`, nothing is read from anywhere else.

    Opening raises `NotFoundError` if there is no published atlas, `StoreError` if the folder cannot be reached, or with
    `offline` is not in the cache, and `CorruptError` if it is damaged.

    Notes
    -----
    Tables are read in blocks that are kept, since Lance reads small parts of them again and again. Of arrays what is asked for is fetched as it
    is; the chunks are kept by `DiskCache`. After `trust`, a file is fetched and compared as a whole before any of it is given out.
    """

    def __init__(self, folder: Folder, cache: KeptBlocks | None = None, *, offline: bool = False) -> None:
        self._folder, self._cache, self.offline, self.address = folder, cache, offline, folder.address
        self._held: LRUCache[bytes] = LRUCache(_HELD_BYTES, len)
        self._coming: dict[tuple[str, int], Future[bytes]] = {}
        self._lock = threading.Lock()
        self._trusted: Mapping[str, str] | None = None
        self._whole: dict[str, Future[memoryview]] = {}
        # Bytes of arrays.
        self._n_asked = self._n_fetched = 0
        if offline:
            head = self._kept(HEAD, lambda: b"", self.address)
        else:
            head = folder.read(HEAD, _MOST_HEAD)
            # Without a connection, that which was read last is taken.
            if cache is not None:
                cache.keep(_key(self.address, HEAD), head)
        self.head = Head.parse(head, self.address)
        name, n_bytes = self.head.index, self.head.index_entry.n_bytes
        index = self._kept(name, lambda: folder.read_range(name, 0, n_bytes, n_bytes))
        self.places = parse_index(index, self.head, self.address)
        pack, n_opening = self.head.opening
        if pack and n_opening <= MOST_OPENING:
            self._load(pack, range(-(-n_opening // BLOCK)))

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        # Its own: threads of the shared pools wait for what these fetch.
        return ThreadPoolExecutor(MOST_AT_ONCE, "published")

    @property
    def merged_gap(self) -> int:
        """Bytes that are fetched in the time of another request."""
        return self._folder.merged_gap

    @cached_property
    def paths(self) -> list[str]:
        """Paths of all files, sorted."""
        return sorted(self.places)

    def below(self, prefix: str) -> Iterator[str]:
        """Yield the paths that begin so, sorted."""
        for i in range(bisect_left(self.paths, prefix), len(self.paths)):
            if not self.paths[i].startswith(prefix):
                return
            yield self.paths[i]

    def trust(self, hashes: Mapping[str, str]) -> None:
        """From now on give out only files that have these hashes, path -> SHA-256, each compared as a whole before it is used."""
        self._trusted = hashes

    def read(self, path: str, start: int, stop: int) -> bytes | memoryview:
        """Return the bytes of a file from `start` to `stop`, fewer where the file ends before."""
        place = self.places.get(path)
        if place is None:
            raise NotFoundError(f"There is no {path} in {self.address}.")
        stop = min(stop, place.n_bytes)
        if start >= stop:
            return b""
        if self._trusted is not None:
            return self._read_whole(path, place, self._trusted)[start:stop]
        begin, end = place.offset + start, place.offset + stop
        first, last = begin // BLOCK, -(-end // BLOCK)
        if not path.startswith(TABLES) and not self._may_fetch_blocks(place.pack, first, last, end - begin):
            return self._fetch(place.pack, begin, end)
        data = b"".join(self._load(place.pack, range(first, last)))
        return data[begin - first * BLOCK : end - first * BLOCK]

    def _may_fetch_blocks(self, pack: str, first: int, last: int, n_asked: int) -> bool:
        """Return whether to fetch complete blocks for a range of an array: while little more was fetched than asked.

        Neighbouring files, such as those of small datasets, then come with one request. What a query over large arrays
        fetches stays close to what it needs.
        """
        with self._lock:
            self._n_asked += n_asked
            fresh = [
                i for i in range(first, last) if self._held.get((pack, i)) is None and (pack, i) not in self._coming
            ]
            n_fetched = self._n_fetched + (len(fresh) * BLOCK)
            allowed = n_fetched <= SPARE_BYTES + (1 + SPARE_SHARE) * self._n_asked
            self._n_fetched = n_fetched if allowed else self._n_fetched + n_asked
        return allowed

    def read_file(self, path: str) -> Iterator[bytes]:
        """Yield the bytes of a file in order; the last piece comes after the whole file was compared with its hash."""
        place = self.places[path]
        hashed, at = hashlib.sha256(), 0
        while True:
            piece = self._fetch(place.pack, place.offset + at, place.offset + min(at + _REQUEST_BYTES, place.n_bytes))
            hashed.update(piece)
            at += len(piece)
            if at >= place.n_bytes:
                break
            yield piece
        if hashed.hexdigest() != place.sha256:
            raise CorruptError(
                f"{path} of {self.address} does not have the SHA-256 with which it was published; ask who published it to upload {place.pack} again."
            )
        yield piece

    def _read_whole(self, path: str, place: PackedFile, trusted: Mapping[str, str]) -> memoryview:
        """Return a file after comparing it with the hash that the root hash vouches for."""
        # Of groups `zarr.json` only says to others what the records say, and `validate` compares it with these.
        sha256 = place.sha256 if path.endswith("/zarr.json") else trusted.get(path)
        if sha256 is None:
            raise CorruptError(
                f"{path} of {self.address} is not among the files that the root hash of the snapshot covers; it is not read."
            )
        if sha256 != place.sha256:
            raise CorruptError(
                f"{path} of {self.address} is not the file that the root hash of the snapshot names; it is not read."
            )
        with self._lock:
            known = self._whole.get(path)
            made = self._whole.setdefault(path, Future())
        if known is None:
            try:
                with Path(self._scratch, _key(path)).open("wb+") as opened:
                    opened.writelines(self.read_file(path))
                    opened.flush()
                    made.set_result(memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)))
            except BaseException as error:  # noqa: BLE001  (who waits for the file gets it)
                with self._lock:
                    self._whole.pop(path, None)
                made.set_exception(error)
        return made.result()

    @cached_property
    def _scratch(self) -> Path:
        made = Path(tempfile.mkdtemp(prefix="raggedatlas-"))
        weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
        return made

    @staticmethod
    def read_head(folder: Folder) -> Head:
        """Return the head in a folder; see the class for errors."""
        return Head.parse(folder.read(HEAD, _MOST_HEAD), folder.address)

    def _kept(self, name: str, fetch: Callable[[], bytes], address: str = "") -> bytes:
        """Return what the cache keeps under a name, else fetch and keep it."""
        key = _key(address, name)
        data = None if self._cache is None else self._cache.load(key)
        if data is None:
            self._require_online(name)
            data = fetch()
            if self._cache is not None:
                self._cache.keep(key, data)
        return data

    def _require_online(self, name: str) -> None:
        if self.offline:
            raise StoreError(
                f"{self.address}/{name} is not in the cache, and offline=True asks for nothing else; open it without once."
            )

    def _fetch(self, pack: str, start: int, stop: int) -> bytes:
        """Return a range of a pack."""
        if start == stop:
            return b""
        self._require_online(pack)
        return self._folder.read_range(pack, start, stop, self.head.packs[pack].n_bytes)

    def _block_key(self, pack: str, block: int) -> str:
        # Names are those that a publisher gives: what was read from one address is not taken for what another one has.
        return _key(self.address, pack, self.head.packs[pack].sha256, block)

    def _load(self, pack: str, blocks: Sequence[int]) -> list[bytes]:
        """Return blocks of a pack; those that are not held are fetched, neighbours together, each once however many ask for it."""
        found: dict[int, bytes | Future[bytes]] = {}
        fresh: dict[int, Future[bytes]] = {}
        with self._lock:
            for block in blocks:
                key = pack, block
                held = self._held.get(key) or self._coming.get(key)
                if held is None:
                    self._coming[key] = held = fresh[block] = Future()
                found[block] = held
        lacking = []
        try:
            for block, waiting in fresh.items():
                data = None if self._cache is None else self._cache.load(self._block_key(pack, block))
                if data is None:
                    lacking.append(block)
                else:
                    self._settle(pack, block, waiting, data)
            starts = enumerate(lacking)
            runs = [[block for _, block in run] for _, run in groupby(starts, lambda item: item[1] - item[0])]
            n = _REQUEST_BYTES // BLOCK
            parts = [run[i : i + n] for run in runs for i in range(0, len(run), n)]
            for part in parts[1:]:
                self._threads.submit(self._fetch_blocks, pack, part, fresh)
        except BaseException as error:
            self._fail(pack, fresh, error)
            raise
        if parts:
            self._fetch_blocks(pack, parts[0], fresh)
        return [one.result() if isinstance(one, Future) else one for one in found.values()]

    def _fetch_blocks(self, pack: str, blocks: Sequence[int], waiting: Mapping[int, "Future[bytes]"]) -> None:
        size = self.head.packs[pack].n_bytes
        start, stop = blocks[0] * BLOCK, min((blocks[-1] + 1) * BLOCK, size)
        try:
            data = self._fetch(pack, start, stop)
            for i, block in enumerate(blocks):
                piece = data[i * BLOCK : (i + 1) * BLOCK]
                if self._cache is not None:
                    self._cache.keep(self._block_key(pack, block), piece)
                self._settle(pack, block, waiting[block], piece)
        except BaseException as error:
            self._fail(pack, {block: waiting[block] for block in blocks}, error)
            raise

    def _settle(self, pack: str, block: int, waiting: "Future[bytes]", data: bytes) -> None:
        with self._lock:
            self._held.put((pack, block), data)
            if self._coming.get((pack, block)) is waiting:
                del self._coming[pack, block]
                waiting.set_result(data)

    def _fail(self, pack: str, waiting: Mapping[int, "Future[bytes]"], error: BaseException) -> None:
        """Give an error to all who wait for those of some blocks that have not come."""
        with self._lock:
            for block, one in waiting.items():
                if self._coming.get((pack, block)) is one:
                    del self._coming[pack, block]
                    one.set_exception(error)


def _key(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:40]


def plan_packs(files: Iterable[tuple[str, int, str]], most: int) -> dict[str, list[str]]:
    """Distribute files over packs: name of a pack -> paths of its files, in order.

    `files` are path, length and SHA-256 of each, in order; the hash is empty where it is not known. A pack has at most
    `most` bytes, unless it is one larger file. A file never changes, so a pack of the same files has the same bytes and
    the same name.
    """
    parts: list[list[tuple[str, int, str]]] = []
    n_bytes = 0
    for file in files:
        if not parts or n_bytes + file[1] > most:
            parts.append([])
            n_bytes = 0
        parts[-1].append(file)
        n_bytes += file[1]
    return {f"data-{_key(*part)[:16]}.pack": [path for path, _, _ in part] for part in parts}
