"""Manifests: length and SHA-256 of every table file that a snapshot references, and of the list of snapshots itself."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from raggedatlas.catalog.catalog import VERSIONS, Catalog
from raggedatlas.catalog.leases import GRACE
from raggedatlas.catalog.versions import FOLDER, HEAD, list_versions
from raggedatlas.errors import AtlasError, CorruptError, NotFoundError
from raggedatlas.model.records import AtlasVersionRecord
from raggedatlas.model.validation import AtlasProblem
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.location import Location, digest_file
from raggedatlas.store.runtime import map_requests
from raggedatlas.store.tables import Tables

_COPY = "Restore the file from a copy of the atlas, or go back to a sound snapshot with restore()."
_NEXT = "The next snapshot() records the hashes of what it reaches."
_ATTEMPTS = 5

FILES = 64
"""Table files whose hashes one task compares."""


class FileEntry(NamedTuple):
    """Length and hash of one file."""

    n_bytes: int
    sha256: str


Files = Mapping[str, FileEntry]
"""Path below ``lance_db`` -> entry."""


class Manifest(BaseModel):
    """A set of files, as stored.

    Attributes
    ----------
    files : dict of str to FileEntry
        Path below ``lance_db`` -> length and SHA-256.
    version : int
        Of the head: the version of the table `atlas_versions` that it covers; 0 for the manifest of a snapshot.

    Examples
    --------
    >>> Manifest(files={"cells.lance/data/a.lance": FileEntry(3, "f" * 64)}).to_bytes()[:10]
    b'{"files":{'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: dict[str, FileEntry] = {}
    version: int = 0

    def to_bytes(self) -> bytes:
        """Write it as JSON, paths sorted: equal content gives equal bytes."""
        return Manifest(files=dict(sorted(self.files.items())), version=self.version).model_dump_json().encode()


def write_manifest(catalog: Catalog, versions: Mapping[str, int]) -> str:
    """Write the manifest of some table versions, and return its SHA-256, which is also its name.

    Files never change once they are written, so those that an earlier snapshot reaches are not read again. Nothing refers to
    the manifest until a snapshot names it; `remove_manifests` removes one that no snapshot names.

    Parameters
    ----------
    catalog : Catalog
        At the tip or pinned.
    versions : mapping of str to int
        Table -> version, each held by a tag.
    """
    tables = Tables(catalog.tables.location)
    paths = {f"{name}.lance/{path}" for name, version in versions.items() for path in tables.files(name, version)}
    known = _newest(catalog)
    entries = {path: known[path] for path in paths if path in known}
    data = Manifest(files=entries | _hash_files(tables.location, sorted(paths - set(entries)))).to_bytes()
    digest = hashlib.sha256(data).hexdigest()
    tables.location.write_bytes(f"{FOLDER}/{digest}.json", data, only_if_absent=True)
    return digest


def read_manifest(catalog: Catalog, digest: str) -> Files:
    """Read the manifest of a snapshot.

    Raises
    ------
    NotFoundError
        If there is none of that name.
    CorruptError
        If its bytes do not have the hash in its name.
    """
    key = f"{FOLDER}/{digest}.json"
    data = catalog.tables.location.read_bytes(key)
    if hashlib.sha256(data).hexdigest() != digest:
        raise CorruptError(f"The manifest {catalog.tables.location.uri}/{key} is damaged: its SHA-256 is not its name.")
    return _parse(data, key).files


def seal_versions(catalog: Catalog) -> None:
    """Record the hashes of the current list of snapshots, and of the tags on the versions it names.

    The list cannot name its own hash, so these are in a file of their own, the head. One that does not cover the newest version of
    the list, because a process died before this call or another wrote since, says nothing; the next call writes it anew.
    """
    tables = Tables(catalog.tables.location)
    for _ in range(_ATTEMPTS):
        version = tables.version(VERSIONS)
        records = list_versions(catalog)
        paths = {f"{VERSIONS}.lance/{path}" for path in tables.files(VERSIONS, version)}
        tags = {f"{name}.lance/{tables.tag_file(record.tag)}" for record in records for name in record.table_versions}
        try:
            known = _read_head(catalog).files
        except CorruptError:
            known = {}
        kept = {path: entry for path, entry in known.items() if path in tags or path in paths}
        fresh = sorted((paths | tags) - set(kept))
        made = Manifest(files=kept | _hash_files(tables.location, fresh, missing_ok=True), version=version).to_bytes()
        tables.location.write_bytes(f"{FOLDER}/{HEAD}", hashlib.sha256(made).hexdigest().encode() + b"\n" + made)
        if tables.version(VERSIONS) == version:
            return


def check_files(
    catalog: Catalog,
    records: Sequence[AtlasVersionRecord],
    *,
    head: bool,
    executor: Executor | Workers | None = None,
) -> list[AtlasProblem]:
    """Compare every table file that snapshots reference with its recorded length and hash.

    Parameters
    ----------
    catalog : Catalog
        At the tip or pinned.
    records : sequence of AtlasVersionRecord
        The snapshots.
    head : bool
        Whether to check the list of snapshots, too.
    executor : Executor, Workers or None
        Whose workers read the files.

    Returns
    -------
    list of AtlasProblem
        Rules ``table-file``, ``manifest``, and the note ``unverified-files``.
    """
    problems, files = [], dict[str, FileEntry]()
    for record in records:
        place = f"snapshot {record.version}"
        if not record.manifest:
            text = "its table files have no recorded hashes, because it was taken before they were recorded"
            problems.append(AtlasProblem("unverified-files", place, text, _NEXT))
            continue
        try:
            files |= read_manifest(catalog, record.manifest)
        except AtlasError as error:
            problems.append(AtlasProblem("manifest", place, str(error), _COPY))
    if head and records:
        try:
            sealed = _read_head(catalog)
            if sealed.version == Tables(catalog.tables.location).version(VERSIONS):
                files |= sealed.files
            else:
                text = "the newest list of snapshots has no recorded hashes"
                problems.append(AtlasProblem("unverified-files", VERSIONS, text, "Run optimize()."))
        except AtlasError as error:
            problems.append(AtlasProblem("manifest", VERSIONS, str(error), _COPY))
    location, paths = catalog.tables.location, sorted(files)
    tasks = (
        partial(_compare, location, {path: files[path] for path in paths[at : at + FILES]})
        for at in range(0, len(paths), FILES)
    )
    return problems + [
        problem for found in in_order(run_tasks(tasks, executor, place=catalog.location)) for problem in found
    ]


def remove_manifests(catalog: Catalog, grace: timedelta = GRACE) -> int:
    """Remove manifests older than `grace` that no snapshot names; return the bytes freed."""
    folder = catalog.tables.location.child(FOLDER)
    there = [(key, size, when) for key, size, when in folder.list_objects() if key != HEAD]
    # Snapshots are read last, so that a concurrently recorded one keeps its manifest.
    named = {f"{record.manifest}.json" for record in list_versions(catalog)} if there else set()
    oldest = datetime.now(UTC) - grace
    free = [(key, size) for key, size, when in there if key not in named and when <= oldest]
    folder.delete_objects([key for key, _ in free])
    return sum(size for _, size in free)


def _newest(catalog: Catalog) -> Files:
    """Return the entries of the newest readable manifest."""
    for record in reversed(list_versions(catalog)):
        if record.manifest:
            try:
                return read_manifest(catalog, record.manifest)
            except (CorruptError, NotFoundError):
                continue
    return {}


def _read_head(catalog: Catalog) -> Manifest:
    """Return the head; a missing head covers nothing."""
    key = f"{FOLDER}/{HEAD}"
    try:
        digest, _, data = catalog.tables.location.read_bytes(key).partition(b"\n")
    except NotFoundError:
        return Manifest()
    if not digest and not data:
        return Manifest()
    if hashlib.sha256(data).hexdigest().encode() != digest:
        raise CorruptError(
            f"{catalog.tables.location.uri}/{key} is damaged: its content does not have the SHA-256 in its first line."
        )
    return _parse(data, key)


def _parse(data: bytes, key: str) -> Manifest:
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        raise CorruptError(f"The manifest {key} does not parse: {error.errors()[0]['msg']}.") from error


def _hash_files(location: Location, paths: Sequence[str], *, missing_ok: bool = False) -> dict[str, FileEntry]:
    def entry(path: str) -> FileEntry | None:
        try:
            return FileEntry(*digest_file(location, path))
        except NotFoundError:
            if not missing_ok:
                raise
            return None

    each: Iterable[FileEntry | None] = map(entry, paths) if location.is_local else map_requests(entry, paths)
    return {path: found for path, found in zip(paths, each, strict=True) if found is not None}


def _compare(location: Location, files: Files) -> list[AtlasProblem]:
    def differs(path: str) -> str:
        try:
            found = FileEntry(*digest_file(location, path))
        except AtlasError as error:
            return str(error)
        if found.n_bytes != files[path].n_bytes:
            return f"it has {found.n_bytes:,} bytes, {files[path].n_bytes:,} were written"
        return "" if found == files[path] else "its SHA-256 is not the one that was recorded"

    paths = sorted(files)
    each = map(differs, paths) if location.is_local else map_requests(differs, paths)
    return [AtlasProblem("table-file", path, text, _COPY) for path, text in zip(paths, each, strict=True) if text]
