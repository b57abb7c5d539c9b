"""Cache folders on a local disk, bounded in size and shared by the processes of a machine."""

import contextlib
import os
import re
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self
from uuid import uuid4

from raggedatlas.errors import StoreError

CACHE_OPTIONS = ("cache_dir", "cache_size")
"""Storage options: the folder, and the maximal size of each kind of file in it."""

_DIR_VARIABLE, _SIZE_VARIABLE, _DEFAULT_SIZE = "RAGGEDATLAS_CACHE_DIR", "RAGGEDATLAS_CACHE_SIZE", "10GB"
_OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
"""As far as the system has them; without `O_NOFOLLOW` a symlink in a shared folder would lead to another file."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_UNFINISHED, _STALE_SECONDS = ".part", 24 * 3600
_KEPT_SHARE = 0.9
_BLOCK = 512


@dataclass(frozen=True)
class CacheFolder:
    """Files of one kind, each under a key; frozen and picklable.

    Notes
    -----
    A file appears under its name when it is complete. Least recently used files are removed first; a removed file that a process has open
    stays readable until it is closed. An unfinished file, which a killed process leaves, is removed after a day. Nothing else in the folder
    that a user names is read or removed.
    """

    folder: Path | None  # where they are; None keeps nothing
    n_bytes: int  # how much of the disk they may take

    kind: ClassVar[str]
    """Suffix of the files; the name of their folder is its plural."""
    by_default: ClassVar[bool] = True
    """Whether files are kept in the user's cache folder if neither option nor environment names another."""

    @classmethod
    def of_options(cls, options: Mapping[str, str]) -> Self:
        """Return the folder named by the storage options, else by the environment, else one in the user's cache; an empty name disables it."""
        named = options.get("cache_dir", os.environ.get(_DIR_VARIABLE))
        n_bytes = parse_size(options.get("cache_size") or os.environ.get(_SIZE_VARIABLE) or _DEFAULT_SIZE)
        try:
            root = Path(named).expanduser().absolute() if named else None
        except RuntimeError as error:
            raise StoreError(
                f"The cache folder {named} is in the home of a user who has none; name another one by cache_dir."
            ) from error
        if named is None and cls.by_default:
            root = user_cache()
        return cls(None if root is None else root / "raggedatlas" / f"{cls.kind}s", n_bytes)

    def file(self, key: str) -> Path:
        """Return the path of the file of a key."""
        assert self.folder is not None
        return self.folder / f"{key}.{self.kind}"

    @contextlib.contextmanager
    def open(self, key: str, flags: int = os.O_RDONLY) -> Iterator[int | None]:
        """Open the file of a key, yield its descriptor, and close it; None if there is no regular file."""
        try:
            handle = None if self.folder is None else os.open(self.file(key), flags | _OPEN_FLAGS)
        except OSError:
            handle = None
        if handle is None:
            yield None
            return
        try:
            # A folder can be opened as well.
            yield handle if stat.S_ISREG(os.fstat(handle).st_mode) else None
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def create(self, key: str) -> Iterator[tuple[int, Path]]:
        """Open a new file and yield its descriptor and path; at the end it is renamed to its key, unless it was removed before."""
        assert self.folder is not None
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = self.file(key).with_suffix(f".{uuid4().hex[:8]}{_UNFINISHED}")
        handle = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o600)
        try:
            try:
                yield handle, unfinished
            finally:
                # Before it is renamed: Windows renames no file that is open.
                os.close(handle)
            if unfinished.exists():
                unfinished.replace(self.file(key))
        finally:
            unfinished.unlink(missing_ok=True)

    def has_room(self, handle: int) -> bool:
        """Return whether an open file is small enough to be kept."""
        return _taken_bytes(os.fstat(handle)) <= _KEPT_SHARE * self.n_bytes

    def make_room(self) -> None:
        """If the files exceed the limit, remove the least recently used ones until the others take at most nine tenths of it.

        A folder that another process has removed has nothing to be removed.
        """
        assert self.folder is not None
        held, entries = [], list[os.DirEntry[str]]()
        with contextlib.suppress(OSError):
            entries = [*os.scandir(self.folder)]
        for entry in entries:
            with contextlib.suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                if entry.name.endswith(f".{self.kind}"):
                    held.append((info.st_mtime_ns, _taken_bytes(info), entry.path))
                elif entry.name.endswith(_UNFINISHED) and time.time() - info.st_mtime > _STALE_SECONDS:
                    Path(entry.path).unlink(missing_ok=True)
        total = sum(taken for _, taken, _ in held)
        if total <= self.n_bytes:
            return
        for _, taken, path in sorted(held):
            if total <= _KEPT_SHARE * self.n_bytes:
                return
            with contextlib.suppress(OSError):
                Path(path).unlink(missing_ok=True)
                total -= taken


def _taken_bytes(info: os.stat_result) -> int:
    """Return the bytes that a file, which may be sparse, takes on the disk."""
    return int(getattr(info, "st_blocks", -(-info.st_size // _BLOCK)) * _BLOCK)


def user_cache() -> Path | None:
    """Return the folder for caches of the user's programs; None for a user without a home directory, as in a container."""
    if sys.platform == "darwin":
        return user_folder("XDG_CACHE_HOME", "Library/Caches")
    if sys.platform == "win32":
        return user_folder("LOCALAPPDATA", "AppData/Local")
    return user_folder("XDG_CACHE_HOME", ".cache")


def user_folder(variable: str, below: str) -> Path | None:
    """Return the folder that an environment variable names, else one below the home; None for a user without a home."""
    if os.environ.get(variable):
        return Path(os.environ[variable])
    try:
        return Path.home() / below
    except RuntimeError:
        return None


def parse_size(text: str) -> int:
    """Read a number of bytes.

    `text` is a number, with ``K``, ``M``, ``G`` or ``T`` (powers of 1,000; ``Ki`` and so on of 1,024) and ``B`` behind
    it where wanted.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise StoreError(f"{text!r} is no size of a cache; expected e.g. '20GB', '512MiB', or a number of bytes.")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].upper()])
