"""Manifests of snapshots: lengths and hashes of the files of tables, and the comparison of tables that are read whole."""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from raggedatlas.errors import CorruptError
from raggedatlas.store.location import Location, digest_file
from raggedatlas.store.storage_errors import store_errors

FOLDER = "_manifests"
"""Folder of the manifests below ``lance_db``."""

COPY = "Restore the file from a copy of the atlas, or go back to a sound snapshot with restore()."

_MOST_BYTES = {"cells": 0, "_feature_layouts": 1 << 24}
"""Tables of which single columns or rows are read, and up to how many bytes they are compared as a whole."""


class FileEntry(NamedTuple):
    """Length and hash of one file."""

    n_bytes: int
    sha256: str


Files = Mapping[str, FileEntry]
"""Path below ``lance_db`` -> entry."""


class Manifest(BaseModel):
    """A set of files, as stored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: dict[str, FileEntry] = {}  # path below ``lance_db`` -> length and SHA-256
    # Of the head: the version of the table `atlas_versions` that it covers; 0 for the manifest of a snapshot.
    version: int = 0

    def to_bytes(self) -> bytes:
        """Write it as JSON, paths sorted: equal content gives equal bytes."""
        return Manifest(files=dict(sorted(self.files.items())), version=self.version).model_dump_json().encode()


def read_manifest(location: Location, digest: str) -> Files:
    """Read the manifest of a snapshot in the folder ``lance_db``; `digest` is its name and its SHA-256."""
    key = f"{FOLDER}/{digest}.json"
    data = location.read_bytes(key)
    if hashlib.sha256(data).hexdigest() != digest:
        raise CorruptError(f"The manifest {location.uri}/{key} is damaged: its SHA-256 is not its name.")
    return parse_manifest(data, key).files


_kept_manifest = lru_cache(maxsize=4)(read_manifest)


def parse_manifest(data: bytes, key: str) -> Manifest:
    """Parse a manifest."""
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        raise CorruptError(f"The manifest {key} does not parse: {error.errors()[0]['msg']}.") from error


def compare_table(location: Location, digest: str, name: str) -> None:
    """Compare the files with the rows of a table with a manifest, each once a process.

    Only on a disk: Lance fetches ranges from an object store, and the whole files would have to be fetched a second
    time. The cells, and feature lists of more than 16 MB, are not compared. `location` is the folder ``lance_db``,
    `digest` the name of the manifest.
    """
    if not location.is_local:
        return
    folders = (f"{name}.lance/data/", f"{name}.lance/_deletions/")
    files = {path: entry for path, entry in _kept_manifest(location, digest).items() if path.startswith(folders)}
    if name in _MOST_BYTES and sum(entry.n_bytes for entry in files.values()) > _MOST_BYTES[name]:
        return
    folder = location.checked_path()
    for path, entry in files.items():
        file = folder / path
        with store_errors(f"read {file}"):
            changed_at = file.stat().st_mtime_ns
        if _digest(location, path, changed_at) != entry:
            raise CorruptError(
                f"{location.uri}/{path} is damaged: its SHA-256 is not the one that was recorded. {COPY}"
            )


@lru_cache(maxsize=1 << 14)
def _digest(location: Location, path: str, _changed_at: int) -> FileEntry:
    """Read a file; the time of its last change is part of the key."""
    return FileEntry(*digest_file(location, path))
