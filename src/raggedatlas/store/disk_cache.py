"""Chunks of remote shards kept on a local disk."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import StoreError
from raggedatlas.store.cache_folder import CacheFolder
from raggedatlas.store.codecs import has_checksum
from raggedatlas.store.runtime import process_cache

_LEAST_STEP, _STEPS = 2**20, 64


@dataclass(frozen=True)
class DiskCache(CacheFolder):
    """Sparse copies of remote shards, kept where a storage option or the environment names a folder.

    Notes
    -----
    A copy has the size of its shard and holds the shard index at its end; chunks have the same offsets as in the shard, and what was
    not fetched yet is a hole. A chunk counts as held when its own crc32c, which ends it, is right: so a hole, a half-written
    chunk, a damaged disk and a process that was killed all look alike, and the chunk is fetched again. Two processes that write
    the same chunk write the same bytes to the same place.

    Copies are identified by address only: an array is written once, to a folder with a random name, and never changes.
    """

    kind: ClassVar[str] = "shard"
    by_default: ClassVar[bool] = False

    def read_tail(self, name: str, n_bytes: int) -> tuple[bytes, int] | None:
        """Return the last bytes of a held shard and its size, or None."""
        with self.open(_key(name)) as handle:
            if handle is None:
                return None
            size = os.fstat(handle).st_size
            tail = _read_at(handle, n_bytes, max(0, size - n_bytes))
            return (tail, size) if len(tail) == n_bytes else None

    def read_chunks(self, name: str, index: NDArray[np.int64], size: int) -> list[NDArray[np.uint8] | None]:
        """Return the chunks of a shard that are held and sound, None for the others.

        `name` is the address of the shard and `size` its bytes; `index`, (k, 2), is offset and size of each chunk.
        """
        with self.open(_key(name)) as handle:
            if handle is None or os.fstat(handle).st_size != size:
                return [None] * len(index)
            with contextlib.suppress(OSError):
                os.utime(self.file(_key(name)))
            chunks = [np.frombuffer(_read_at(handle, n, offset), np.uint8) for offset, n in index.tolist()]
            # The crc32c at the end of each is compared; that of no bytes is 0, so a hole of 4 bytes would pass for a sound empty chunk.
            sound = [
                data.size == n and n > 4 and has_checksum(data)
                for data, n in zip(chunks, index[:, 1].tolist(), strict=True)
            ]
            return [data if good else None for data, good in zip(chunks, sound, strict=True)]

    def write_chunks(
        self, name: str, index: NDArray[np.int64], chunks: Sequence[NDArray[np.uint8]], size: int, tail: bytes
    ) -> None:
        """Keep chunks of a shard; where the disk is full they are not kept.

        `name`, `index` and `size` are as of `read_chunks`; `chunks` are the bytes of the k chunks, and `tail` is the
        shard index.
        """
        assert self.folder is not None
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"The cache folder {self.folder} cannot be made ({error}); name another one by cache_dir."
            ) from error
        key = _key(name)
        # A full disk, or a copy that another process removes meanwhile, costs a later request and not this read.
        with contextlib.suppress(OSError):
            with self.open(key) as handle:
                held_size = -1 if handle is None else os.fstat(handle).st_size
            if held_size != size:
                with self.create(key) as (new, _):
                    os.truncate(new, size)
                    _write_at(new, tail, size - len(tail))
            with self.open(key, os.O_WRONLY) as handle:
                for (offset, _), data in zip(index.tolist(), chunks, strict=True):
                    if handle is not None:
                        _write_at(handle, data.data, offset)
        # The folder is measured after each 1/64 of the size, so one process exceeds it by about that much.
        allowances = process_cache("allowances")
        with allowances.lock:
            left = allowances.entries.get(self.folder, 0) - int(index[:, 1].sum())
            allowances.entries[self.folder] = left if left > 0 else max(_LEAST_STEP, self.n_bytes // _STEPS)
        if left <= 0:
            self.make_room()

    def forget(self, name: str) -> None:
        """Remove what is held of a shard, if the folder can be written."""
        with contextlib.suppress(OSError):
            self.file(_key(name)).unlink()


def _key(name: str) -> str:
    """Return what a shard is kept under."""
    return sha256(name.encode()).hexdigest()[:32]


def _read_at(handle: int, n_bytes: int, offset: int) -> bytes:
    """Read from an offset; nothing where the disk fails. Windows has no `pread`, and a handle is of one thread here."""
    with contextlib.suppress(OSError):
        if hasattr(os, "pread"):
            return os.pread(handle, n_bytes, offset)
        os.lseek(handle, offset, os.SEEK_SET)
        return os.read(handle, n_bytes)
    return b""


def _write_at(handle: int, data: bytes | memoryview, offset: int) -> None:
    """Write at an offset, likewise."""
    if hasattr(os, "pwrite"):
        os.pwrite(handle, data, offset)
        return
    os.lseek(handle, offset, os.SEEK_SET)
    os.write(handle, data)
