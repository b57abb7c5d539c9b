"""All files below a location, as they are: list them, read one, and a digest over all; for stores that are copied byte for byte."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from raggedatlas.errors import NotFoundError, StoreError
from raggedatlas.store.location import Location, store_errors


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


def _walk(location: Location) -> Iterator[tuple[str, int]]:
    if not location.is_local:
        yield from ((key, size) for key, size, _ in location._objects())
        return
    root = location.checked_path()
    for folder, _, names in os.walk(root):
        for name in names:
            file = Path(folder, name)
            if file.is_symlink() or not file.is_file():
                raise StoreError(f"{file} is no plain file; a store that is copied holds files and folders alone.")
            yield file.relative_to(root).as_posix(), file.stat().st_size
