"""Records of equal size in a file that is memory-mapped, which the processes of a machine share."""

import contextlib
import json
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import StoreError
from raggedatlas.store.cache_folder import CacheFolder

_MAGIC = b"RAPLAN01"


@dataclass(frozen=True, eq=False)
class Records:
    """Records in memory or in a file."""

    array: NDArray[Any]  # (n,) structured; read-only if it is mapped
    facts: Mapping[str, Any]  # what was stored with them, of types that JSON has
    # The file, by which other processes map the same memory; None if they are in memory, or in a file without a name
    path: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name of the file, or else the records."""
        if self.path is None:
            return Records, (np.ascontiguousarray(self.array), self.facts)
        return map_records, (self.path,)


def map_records(path: Path) -> Records:
    """Map a file of `RecordFolder`. Raises `StoreError` if it is gone or not complete."""
    try:
        with RecordFolder(path.parent, 0).open(path.stem) as handle:
            if handle is None:
                raise FileNotFoundError("there is no such file")
            return _map(handle, path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"The plan {path} cannot be read ({error}); make the loader again.") from error


def _map(handle: int, path: Path | None) -> Records:
    if hasattr(os, "getuid") and os.fstat(handle).st_uid != os.getuid():
        raise ValueError("it belongs to another user")
    mapped = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
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
class RecordFolder(CacheFolder):
    """Files of records, each under a key that stands for what is in it.

    Notes
    -----
    A file never changes. Without a folder, records are written to a temporary file.
    """

    kind: ClassVar[str] = "plan"

    def find(self, key: str) -> Records | None:
        """Map the file of a key; None if there is none that can be read."""
        if self.folder is None:
            return None
        with contextlib.suppress(StoreError, OSError):
            found = map_records(self.file(key))
            os.utime(self.file(key))
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
                    path, n_links = self.file(key).with_suffix(".lock"), 0
                    # Who had the lock has removed the file, and others may have made and locked a new one.
                    while not n_links:
                        file = stack.enter_context(path.open("wb"))
                        fcntl.flock(file, fcntl.LOCK_EX)
                        n_links = os.fstat(file.fileno()).st_nlink
                    stack.callback(path.unlink, missing_ok=True)
            yield

    def write(
        self, key: str, dtype: np.dtype[Any], blocks: Iterable[NDArray[Any]], facts: Mapping[str, Any]
    ) -> Records:
        """Write records block by block, and map them; `find` finds them under the key.

        `blocks` are iterated once; `facts` may be filled while they are made. Raises `OSError` if the disk is full.
        """
        with contextlib.ExitStack() as stack:
            unfinished = None
            with contextlib.suppress(OSError):
                if self.folder is not None:
                    handle, unfinished = stack.enter_context(self.create(key))
                    file = stack.enter_context(open(handle, "w+b", closefd=False))
            if unfinished is None:
                file = stack.enter_context(tempfile.TemporaryFile(prefix="raggedatlas-plan-"))
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
            if unfinished is None or not self.has_room(handle):
                if unfinished is not None:
                    unfinished.unlink()
                return _map(file.fileno(), None)
            # Its bytes before its name, so that a machine that stops leaves no complete-looking file of zeros.
            os.fsync(handle)
            made = _map(handle, self.file(key))
        self.make_room()
        return made
