"""Records of equal size in a file that is memory-mapped: kept in a folder of bounded size, which processes of one machine share."""

import contextlib
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import StoreError
from raggedatlas.store.disk_cache import CACHE_DIR_VARIABLE, CACHE_SIZE_VARIABLE, DEFAULT_SIZE, OPEN_FLAGS, parse_size

SUBFOLDER = "raggedatlas-plans-1"
"""Nothing else of the cache folder is read or removed."""

_MAGIC = b"RAPLAN01"
_SUFFIX, _UNFINISHED = ".plan", ".part"
_STALE_SECONDS = 24 * 3600


@dataclass(frozen=True, eq=False)
class Records:
    """Records in memory or in a file.

    Parameters
    ----------
    array : (n,) structured array
        The records, read-only if they are mapped.
    facts : mapping
        What was stored with them, of types that JSON has.
    path : Path or None
        The file, by which other processes map the same memory; None if they are in memory, or in a file without a name.
    """

    array: NDArray[Any]
    facts: Mapping[str, Any]
    path: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name of the file, or else the records."""
        if self.path is None:
            return Records, (np.ascontiguousarray(self.array), self.facts)
        return map_records, (self.path,)


def map_records(path: Path) -> Records:
    """Map a file of `RecordFolder`.

    Raises
    ------
    StoreError
        If it is gone, or not complete.
    """
    try:
        handle = os.open(path, os.O_RDONLY | OPEN_FLAGS)
        with os.fdopen(handle, "rb") as file:
            return _map(file, path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"The plan {path} cannot be read ({error}); make the loader again.") from error


def _map(file: BinaryIO, path: Path | None) -> Records:
    info = os.fstat(file.fileno())
    if hasattr(os, "getuid") and info.st_uid != os.getuid():
        raise ValueError("it belongs to another user")
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    n_bytes = int.from_bytes(mapped[-16:-8], "little")
    if mapped[-8:] != _MAGIC or not 0 < n_bytes <= len(mapped) - 16:
        raise ValueError("it is not complete")
    facts = json.loads(mapped[-16 - n_bytes : -16])
    layout = facts.pop("dtype")
    dtype: np.dtype[Any] = np.dtype(layout)
    n = int(facts.pop("n"))
    if n * dtype.itemsize + n_bytes + 16 != len(mapped):
        raise ValueError("it has another length than it says")
    # `frombuffer` refuses no bytes at all.
    array = np.frombuffer(mapped, dtype, n) if n else np.empty(0, dtype)
    return Records(array, facts, path)


@dataclass(frozen=True)
class RecordFolder:
    """A folder of record files, each under a key that stands for what is in it; frozen and picklable.

    Parameters
    ----------
    folder : Path or None
        None keeps no file: records are written to a temporary file, or to memory where there is none.
    n_bytes : int
        How much of the disk the files may take.

    Notes
    -----
    A file appears under its name when it is complete, and never changes. The files used longest ago are removed; what a process has
    mapped stays until it ends. A process that was killed leaves an unfinished file, which is removed after a day.
    """

    folder: Path | None
    n_bytes: int

    @classmethod
    def of_options(cls, options: Mapping[str, str]) -> "RecordFolder":
        """Return the folder that storage options or the environment name, else one in the user's cache; an empty name keeps no file."""
        named = options.get("cache_dir", os.environ.get(CACHE_DIR_VARIABLE))
        size = options.get("cache_size") or os.environ.get(CACHE_SIZE_VARIABLE) or DEFAULT_SIZE
        if named == "":
            return cls(None, parse_size(size))
        with contextlib.suppress(RuntimeError):  # a user without a home
            return cls(Path(named or _user_cache()).expanduser().absolute() / SUBFOLDER, parse_size(size))
        return cls(None, parse_size(size))

    def find(self, key: str) -> Records | None:
        """Map the file of a key; None if there is none that can be read."""
        if self.folder is None:
            return None
        with contextlib.suppress(StoreError, OSError):
            found = map_records(self._file(key))
            os.utime(self._file(key))
            return found
        return None

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Let one process at a time make the file of a key; without locks or a folder, each makes it."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(ImportError, OSError):
                import fcntl

                if self.folder is not None:
                    self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    file = stack.enter_context(self._file(key).with_suffix(".lock").open("wb"))
                    fcntl.flock(file, fcntl.LOCK_EX)
                    # Who waits for this lock meanwhile finds the finished file.
                    stack.callback(self._file(key).with_suffix(".lock").unlink, missing_ok=True)
            yield

    def write(
        self, key: str, dtype: np.dtype[Any], blocks: Iterable[NDArray[Any]], facts: Mapping[str, Any]
    ) -> Records:
        """Write records block by block, and map them.

        Parameters
        ----------
        key : str
            Under which `find` finds them.
        dtype : numpy dtype
            Of a record.
        blocks : iterable of (k,) arrays
            The records; iterated once.
        facts : mapping
            What is stored with them; it may be filled while the blocks are made.

        Raises
        ------
        OSError
            If the disk is full.
        """
        file, temporary = self._open(key)
        with file:
            n = 0
            for block in blocks:
                file.write(np.ascontiguousarray(block).view(np.uint8).data if len(block) else b"")
                n += len(block)
            layout = {"names": list(dtype.names or ()), "formats": [dtype[name].str for name in dtype.names or ()]}
            places = [dtype.fields[name][1] for name in dtype.names or ()] if dtype.fields else []
            stored = {**facts, "n": n, "dtype": {**layout, "offsets": places, "itemsize": dtype.itemsize}}
            footer = json.dumps(stored).encode()
            file.write(footer + len(footer).to_bytes(8, "little") + _MAGIC)
            file.flush()
            if temporary is None or file.tell() > self.n_bytes:
                if temporary is not None:
                    temporary.unlink()
                return _map(file, None)
            # Its bytes before its name, so that a machine that stops leaves no complete-looking file of zeros.
            os.fsync(file.fileno())
            temporary.replace(self._file(key))
            made = _map(file, self._file(key))
        self._make_room()
        return made

    def _open(self, key: str) -> tuple[Any, Path | None]:
        """Open a file to write to, in the folder if that can be written to."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = self._file(key).with_suffix(f".{uuid4().hex[:8]}{_UNFINISHED}")
                return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b"), path
        return tempfile.TemporaryFile(prefix="raggedatlas-plan-"), None

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}{_SUFFIX}"

    def _make_room(self) -> None:
        """Remove the files used longest ago until the others take what they may, and unfinished ones of processes that are gone."""
        assert self.folder is not None
        held = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_SUFFIX):
                    held.append((info.st_mtime_ns, info.st_size, entry.path))
                elif entry.name.endswith(_UNFINISHED) and time.time() - info.st_mtime > _STALE_SECONDS:
                    Path(entry.path).unlink(missing_ok=True)
        total = sum(size for _, size, _ in held)
        for _, size, path in sorted(held):
            if total <= self.n_bytes:
                return
            with contextlib.suppress(OSError):
                Path(path).unlink(missing_ok=True)
                total -= size


def _user_cache() -> str:
    """Return the folder where programs of the user keep what can be made again."""
    if sys.platform == "darwin":
        return "~/Library/Caches"
    if sys.platform == "win32":
        return os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    return os.environ.get("XDG_CACHE_HOME") or "~/.cache"
