"""Chunks of remote shards kept on a local disk: a folder of bounded size, shared by any number of processes."""

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import StoreError
from raggedatlas.store.codecs import has_checksum
from raggedatlas.store.runtime import process_cache

CACHE_OPTIONS = ("cache_dir", "cache_size")
"""Storage options of the cache: its folder and its maximal size."""

CACHE_DIR_VARIABLE, CACHE_SIZE_VARIABLE = "RAGGEDATLAS_CACHE_DIR", "RAGGEDATLAS_CACHE_SIZE"
DEFAULT_SIZE = "10GB"
SUBFOLDER = "raggedatlas-shards-1"
"""The cache reads and removes nothing else in the folder that a user names."""

OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
"""What files of a shared folder are opened with, as far as the system has it; without `O_NOFOLLOW` a symlink would lead to another file."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_LEAST_STEP, _STEPS = 2**20, 64
_KEPT_SHARE = 0.9
_BLOCK = 512


@dataclass(frozen=True)
class DiskCache:
    """A folder of sparse copies of remote shards; frozen and picklable.

    Parameters
    ----------
    folder : Path
        Folder of the copies.
    n_bytes : int
        How much of the disk they may take.

    Notes
    -----
    A copy has the size of its shard and holds the shard index at its end; chunks have the same offsets as in the shard, and what was
    not fetched yet is a hole. A chunk counts as held when its own crc32c, which ends it, is right: so a hole, a half-written
    chunk, a damaged disk and a process that was killed all look alike, and the chunk is fetched again. Two processes that write
    the same chunk write the same bytes to the same place. Copies are removed entirely, least recently used first.

    Copies are identified by address only: an array is written once, to a folder with a random name, and never changes.
    """

    folder: Path
    n_bytes: int

    @classmethod
    def of_options(cls, options: Mapping[str, str]) -> "DiskCache | None":
        """Return the cache configured by storage options, or else by the environment; an empty ``cache_dir`` disables it.

        Raises
        ------
        StoreError
            If the size is none.

        Examples
        --------
        >>> DiskCache.of_options({"cache_dir": "/scratch", "cache_size": "2 GiB"}).n_bytes
        2147483648
        """
        folder = options.get("cache_dir", os.environ.get(CACHE_DIR_VARIABLE, ""))
        if not folder:
            return None
        size = options.get("cache_size") or os.environ.get(CACHE_SIZE_VARIABLE) or DEFAULT_SIZE
        try:
            return cls(Path(folder).expanduser().absolute() / SUBFOLDER, parse_size(size))
        except RuntimeError as error:
            raise StoreError(
                f"The cache folder {folder} is in the home of a user who has none; name another one by cache_dir."
            ) from error

    def read_tail(self, name: str, n_bytes: int) -> tuple[bytes, int] | None:
        """Return the last bytes of a held shard and its size, or None."""
        with _opened(self._file(name), os.O_RDONLY) as handle:
            if handle is None:
                return None
            size = os.fstat(handle).st_size
            tail = _read_at(handle, n_bytes, max(0, size - n_bytes))
            return (tail, size) if len(tail) == n_bytes else None

    def read_chunks(self, name: str, index: NDArray[np.int64], size: int) -> list[NDArray[np.uint8] | None]:
        """Return the chunks of a shard that are held and sound, None for the others.

        Parameters
        ----------
        name : str
            Address of the shard.
        index : (k, 2) int64
            Offset and size of each chunk.
        size : int
            Size of the shard in bytes.
        """
        with _opened(self._file(name), os.O_RDONLY) as handle:
            if handle is None or os.fstat(handle).st_size != size:
                return [None] * len(index)
            with contextlib.suppress(OSError):
                os.utime(self._file(name))
            chunks = [np.frombuffer(_read_at(handle, n, offset), np.uint8) for offset, n in index.tolist()]
            sound = [data.size == n and _is_sound(data) for data, n in zip(chunks, index[:, 1].tolist(), strict=True)]
            return [data if good else None for data, good in zip(chunks, sound, strict=True)]

    def write_chunks(
        self, name: str, index: NDArray[np.int64], chunks: Sequence[NDArray[np.uint8]], size: int, tail: bytes
    ) -> None:
        """Keep chunks of a shard; where the disk is full they are not kept.

        Parameters
        ----------
        name : str
            Address of the shard.
        index : (k, 2) int64
            Offset and size of each chunk.
        chunks : k uint8 arrays
            Their bytes.
        size, tail : int, bytes
            Size of the shard in bytes, and its index.

        Raises
        ------
        StoreError
            If the folder cannot be made.
        """
        file = self._file(name)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"The cache folder {self.folder} cannot be made ({error}); name another one by cache_dir."
            ) from error
        # A full disk, or a copy that another process removes meanwhile, costs a later request and not this read.
        with contextlib.suppress(OSError):
            if _plain_size(file) != size:
                _begin(file, size, tail)
            with _opened(file, os.O_WRONLY) as handle:
                for (offset, _), data in zip(index.tolist(), chunks, strict=True):
                    if handle is not None:
                        _write_at(handle, data.data, offset)
        if self._spend(int(index[:, 1].sum())):
            self._make_room()

    def forget(self, name: str) -> None:
        """Remove what is held of a shard."""
        self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        """Return the path of the copy of a shard."""
        return self.folder / f"{sha256(name.encode()).hexdigest()[:32]}.shard"

    def _spend(self, n_bytes: int) -> bool:
        """Count bytes that this process wrote, and tell whether the folder is to be measured; the first ones always say so."""
        allowances = process_cache("allowances")
        with allowances.lock:
            left = allowances.entries.get(self.folder, 0) - n_bytes
            # The folder is measured after each 1/64 of the size, so one process exceeds it by about that much.
            allowances.entries[self.folder] = left if left > 0 else max(_LEAST_STEP, self.n_bytes // _STEPS)
        return bool(left <= 0)

    def _make_room(self) -> None:
        """Remove the copies used longest ago until the others take nine tenths of what they may, if they took more."""
        held = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                held.append(
                    # Copies are sparse files: `st_size` is the size of the shard, blocks are what is on the disk.
                    (info.st_mtime_ns, getattr(info, "st_blocks", -(-info.st_size // _BLOCK)) * _BLOCK, entry.path)
                )
        total = sum(taken for _, taken, _ in held)
        if total <= self.n_bytes:
            return
        for _, taken, path in sorted(held):
            if total <= _KEPT_SHARE * self.n_bytes:
                return
            with contextlib.suppress(OSError):
                Path(path).unlink(missing_ok=True)
                total -= taken


def parse_size(text: str) -> int:
    """Read a number of bytes.

    Parameters
    ----------
    text : str
        A number, with ``K``, ``M``, ``G`` or ``T`` (powers of 1,000; ``Ki`` and so on of 1,024) and ``B`` behind it where wanted.

    Raises
    ------
    StoreError
        If it is none.

    Examples
    --------
    >>> parse_size("1.5GB"), parse_size("64 MiB"), parse_size("500")
    (1500000000, 67108864, 500)
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise StoreError(f"{text!r} is no size of a cache; expected e.g. '20GB', '512MiB', or a number of bytes.")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].upper()])


@contextlib.contextmanager
def _opened(file: Path, flags: int) -> Iterator[int | None]:
    """Open a plain file, give its number, and close it; None where there is none."""
    try:
        handle = os.open(file, flags | OPEN_FLAGS)
    except OSError:
        yield None
        return
    try:
        # A folder can be opened as well.
        yield handle if stat.S_ISREG(os.fstat(handle).st_mode) else None
    finally:
        os.close(handle)


def _is_sound(chunk: NDArray[np.uint8]) -> bool:
    """Return whether the crc32c at the end of a chunk matches its bytes."""
    # The crc32c of no bytes is 0, so a hole of 4 bytes would pass for a sound empty chunk.
    return chunk.size > 4 and has_checksum(chunk)


def _plain_size(file: Path) -> int:
    """Return the size of a plain file, -1 where there is none."""
    try:
        info = file.lstat()
    except FileNotFoundError:
        return -1
    return info.st_size if stat.S_ISREG(info.st_mode) else -1


def _begin(file: Path, size: int, tail: bytes) -> None:
    """Create the copy of a shard with its index only; the file appears atomically for other processes."""
    temporary = file.with_name(f"{file.name}.{uuid4().hex[:8]}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600)
    try:
        try:
            os.truncate(handle, size)
            _write_at(handle, tail, size - len(tail))
        finally:
            # Before it is renamed: Windows renames no file that is open.
            os.close(handle)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _read_at(handle: int, n_bytes: int, offset: int) -> bytes:
    """Read from an offset; Windows has no `pread`, and a handle is of one thread here."""
    if hasattr(os, "pread"):
        return os.pread(handle, n_bytes, offset)
    os.lseek(handle, offset, os.SEEK_SET)
    return os.read(handle, n_bytes)


def _write_at(handle: int, data: bytes | memoryview, offset: int) -> None:
    """Write at an offset, likewise."""
    if hasattr(os, "pwrite"):
        os.pwrite(handle, data, offset)
        return
    os.lseek(handle, offset, os.SEEK_SET)
    os.write(handle, data)


def user_folder(variable: str, below: str) -> Path | None:
    """Return the folder that an environment variable names, else one below the home; None for a user without a home, as in a container.

    Examples
    --------
    >>> user_folder("NO_SUCH_VARIABLE", ".cache").name
    '.cache'
    """
    if os.environ.get(variable):
        return Path(os.environ[variable])
    try:
        return Path.home() / below
    except RuntimeError:
        return None
