"""Manifests of snapshots, which hash every file, and what else is recorded of the files that they reach."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from raggedatlas.catalog.catalog import VERSIONS, Catalog
from raggedatlas.catalog.inventory import Inventory
from raggedatlas.catalog.versions import HEAD, list_versions
from raggedatlas.errors import CorruptError, NotFoundError
from raggedatlas.model.records import AtlasVersionRecord
from raggedatlas.store.location import Location, digest_file
from raggedatlas.store.manifests import FOLDER, FileEntry, Files, Manifest, parse_manifest, read_manifest
from raggedatlas.store.runtime import map_requests, submit_request
from raggedatlas.store.tables import Tables

_ATTEMPTS = 5


def last_manifest(catalog: Catalog, records: Sequence[AtlasVersionRecord]) -> tuple[Mapping[str, int], Files]:
    """Return the table versions of the newest of some snapshots with a readable manifest, and the entries of that."""
    for record in reversed(records):
        # `check_files` reports a damaged one; here it only means that files are hashed again.
        with contextlib.suppress(CorruptError, NotFoundError):
            return record.table_versions, read_manifest(catalog.tables.location, record.manifest)
    return {}, {}


def write_manifest(
    catalog: Catalog,
    versions: Mapping[str, int],
    before: Mapping[str, int],
    known: Files,
    hashed: dict[str, FileEntry] | None = None,
) -> str:
    """Write the manifest of some table versions, and return its SHA-256, which is also its name.

    Files never change once they are written, so those that an earlier snapshot reaches are not read again. Nothing
    refers to the manifest until a snapshot names it; `remove_manifests` removes one that no snapshot names.

    Each of the versions must be held by a tag. `before` and `known` are what `last_manifest` returned. `hashed` has
    files that were hashed for other manifests, and gets those that are hashed now.
    """
    tables = catalog.newest_tables()
    hashed = {} if hashed is None else hashed
    same = {name for name, version in versions.items() if before.get(name) == version}
    listed = _list_files(tables, {name: version for name, version in versions.items() if name not in same})
    paths = {path for path in known if path.partition(".lance/")[0] in same} | listed
    hashed |= _hash_files(tables.location, sorted(paths - known.keys() - hashed.keys()))
    data = Manifest(files={path: known.get(path) or hashed[path] for path in paths}).to_bytes()
    digest = hashlib.sha256(data).hexdigest()
    # Named by its content, so an existing file is this one.
    tables.location.write_bytes(f"{FOLDER}/{digest}.json", data, only_if_absent=True)
    return digest


def _list_files(tables: Tables, versions: Mapping[str, int]) -> set[str]:
    """List the files of some table versions: paths below ``lance_db``."""

    def files(name: str) -> list[str]:
        return [f"{name}.lance/{path}" for path in tables.files(name, versions[name])]

    each = map(files, versions) if tables.location.is_local else map_requests(files, [*versions])
    return {path for paths in each for path in paths}


def recorded_hashes(view: Catalog) -> dict[str, str]:
    """Return what is recorded of everything that a snapshot reaches: path below the atlas -> hash; no data are read."""
    files = {} if view.snapshot is None else read_manifest(view.tables.location, view.snapshot.manifest)
    found = {f"lance_db/{path}": entry.sha256 for path, entry in files.items()}
    return found | {f"zarr_store/{path}": identity for path, identity in Inventory(view).identities.items()}


def seal_versions(
    catalog: Catalog,
    written: Mapping[str, bytes] = MappingProxyType({}),
    records: Sequence[AtlasVersionRecord] | None = None,
    before: Callable[[], object] = list,
) -> Sequence[AtlasVersionRecord]:
    """Record the hashes of the current list of snapshots, and of the tags on the versions it names; return the list.

    The list cannot name its own hash, so these are in a file of their own, the head. One that does not cover the newest
    version of the list, because a process died before this call or another wrote since, says nothing; the next call
    writes it anew.

    `written` are files of tags that the caller has just written, by their paths below ``lance_db``, which need not be
    read. `records` are the snapshots at the version of their list that is held; None reads them. `before` is called
    before anything is written; the tags must be there when it returns.
    """
    tables = catalog.newest_tables()
    known_tags = {path: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for path, data in written.items()}
    for _ in range(_ATTEMPTS):
        version = tables.version(VERSIONS)
        listed = list_versions(catalog) if records is None else records
        records = None
        # Side by side with the listing.
        head = submit_request(read_head, catalog)
        # Each version of the list has files of its own, so the head knows none of them.
        own = _hash_files(tables.location, sorted(_list_files(tables, {VERSIONS: version})), missing_ok=True)
        tags = {f"{name}.lance/{tables.tag_file(record.tag)}" for record in listed for name in record.table_versions}
        try:
            known = head.result().files
        except CorruptError:
            known = {}
        # Tag files can change, but `delete_manifest_log` empties the head before a tag is moved.
        kept = {path: entry for path, entry in {**known, **known_tags}.items() if path in tags}
        # A snapshot that another process has just recorded may not have its final tags yet.
        fresh = _hash_files(tables.location, sorted(tags - kept.keys()), missing_ok=True)
        made = Manifest(files=own | kept | fresh, version=version).to_bytes()
        before()
        tables.location.write_bytes(f"{FOLDER}/{HEAD}", hashlib.sha256(made).hexdigest().encode() + b"\n" + made)
        tables.refresh([VERSIONS])
        if tables.version(VERSIONS) == version:
            break
    return listed


def read_head(catalog: Catalog) -> Manifest:
    """Return the head; a missing head covers nothing."""
    key = f"{FOLDER}/{HEAD}"
    try:
        digest, _, data = catalog.tables.location.read_bytes(key).partition(b"\n")
    except NotFoundError:
        return Manifest()
    # Empty since `delete_manifest_log`: tags are being moved, or the process that moved them died.
    if not digest and not data:
        return Manifest()
    if hashlib.sha256(data).hexdigest().encode() != digest:
        raise CorruptError(
            f"{catalog.tables.location.uri}/{key} is damaged: its content does not have the SHA-256 in its first line."
        )
    return parse_manifest(data, key)


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
