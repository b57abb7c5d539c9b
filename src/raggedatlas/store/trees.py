"""All files below a location, as they are: list them, read one, and a digest over all; for stores that are copied byte for byte."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from raggedatlas.errors import NotFoundError, StoreError
from raggedatlas.store.location import Location, refuse_symlink, store_errors
from raggedatlas.store.shards import RecentlyUsed

_PIECE = 2**20
"""Bytes of a file that are hashed at once."""


def list_files(location: Location) -> list[tuple[str, int]]:
    """List every file below a location, whatever its name: (key, bytes), sorted.

    Raises
    ------
    StoreError
        If one of them is a symlink or no plain file.
    """
    return sorted(_walk(location))


def read_file(location: Location, key: str) -> bytes:
    """Read one of the files that `list_files` lists.

    Raises
    ------
    NotFoundError
        If it is gone.
    """
    try:
        with store_errors(f"read {location.uri}/{key}"):
            if location.is_local:
                return Path(location.checked_path(), key).read_bytes()
            import obstore

            return bytes(obstore.get(location.store(), key).bytes())
    except FileNotFoundError:
        raise NotFoundError(f"There is no {key!r} in {location.uri}.") from None


def digest_file(location: Location, key: str) -> tuple[int, str]:
    """Read one file in pieces, and give its bytes and its SHA-256.

    Raises
    ------
    NotFoundError
        If there is no such file.
    StoreError
        If it cannot be read, or is a symlink.

    Examples
    --------
    >>> import tempfile
    >>> place = Location(tempfile.mkdtemp())
    >>> _ = place.write_bytes("a", b"123")
    >>> digest_file(place, "a")[1][:8]
    'a665a459'
    """
    file = location.child(*key.split("/"))
    content, n_bytes = hashlib.sha256(), 0
    try:
        with store_errors(f"read {file.uri}"):
            if location.is_local:
                with file.checked_path().open("rb") as opened:
                    while piece := opened.read(_PIECE):
                        content.update(piece)
                        n_bytes += len(piece)
            else:
                import obstore

                for fetched in obstore.get(location.store(), key).stream(min_chunk_size=_PIECE):
                    content.update(memoryview(fetched))
                    n_bytes += len(fetched)
    except FileNotFoundError:
        raise NotFoundError(f"There is no {key!r} in {location.uri}.") from None
    return n_bytes, content.hexdigest()


def digest_files(location: Location) -> tuple[int, int, str]:
    """Read every file and give their number, their bytes, and a SHA-256 over names and contents.

    Examples
    --------
    >>> import tempfile
    >>> place = Location(tempfile.mkdtemp())
    >>> _ = place.write_bytes("a/b", b"123")
    >>> digest_files(place)[:2]
    (1, 3)
    """
    content = hashlib.sha256()
    n_bytes = 0
    files = list_files(location)
    for key, _ in files:
        data = read_file(location, key)
        n_bytes += len(data)
        content.update(f"{key}\0{len(data)}\0".encode())
        content.update(hashlib.sha256(data).digest())
    return len(files), n_bytes, content.hexdigest()


_SEEN: RecentlyUsed[tuple[int, list[str]]] = RecentlyUsed(4096)
"""Folder -> when it was changed last, and the folders in it, as they were when it was found to hold no symlink."""


def refuse_symlinks(location: Location) -> None:
    """Refuse a local tree that holds a symlink; folders that have not changed since are not listed again.

    Raises
    ------
    StoreError
        Naming the symlink.
    """
    if location.is_local:
        with store_errors(f"list {location.uri}"), contextlib.suppress(FileNotFoundError):
            _refuse_links(str(location.checked_path()))


def _refuse_links(folder: str) -> None:
    changed = os.stat(folder).st_mtime_ns  # noqa: PTH116 - at every opening of a table
    known = _SEEN.get(folder)
    if known is None or known[0] != changed:
        inside = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_symlink():
                    refuse_symlink(Path(entry.path))
                if entry.is_dir(follow_symlinks=False):
                    inside.append(entry.path)
        known = (changed, inside)
        _SEEN.put(folder, known)
    for path in known[1]:
        with contextlib.suppress(FileNotFoundError):
            _refuse_links(path)


def _walk(location: Location) -> Iterator[tuple[str, int]]:
    if not location.is_local:
        yield from ((key, size) for key, size, _ in location._objects())
        return
    root = location.checked_path()
    for folder, folders, names in os.walk(root):
        for name in [*folders, *names]:
            file = Path(folder, name)
            if file.is_symlink() or not (file.is_file() or name in folders):
                raise StoreError(f"{file} is no plain file; a store that is copied holds files and folders alone.")
        for name in names:
            file = Path(folder, name)
            yield file.relative_to(root).as_posix(), file.stat().st_size
