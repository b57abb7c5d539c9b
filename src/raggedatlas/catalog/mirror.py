"""Mirror the snapshots of an atlas to another place: only what differs, resumable, and never visible in part."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import uuid4

from raggedatlas.catalog.assets import GRACE, source_rows
from raggedatlas.catalog.catalog import CELLS, DATASETS, VERSIONS, Catalog, catalog_at, is_atlas
from raggedatlas.catalog.integrity import read_manifest, seal_versions
from raggedatlas.catalog.inventory import inventory
from raggedatlas.catalog.versions import NUMBERED, delete_manifest_log, list_versions
from raggedatlas.errors import ConflictError, CorruptError, NotFoundError, StoreError
from raggedatlas.model.arguments import Progress
from raggedatlas.model.records import AtlasVersionRecord
from raggedatlas.model.reports import MaintenanceReport
from raggedatlas.model.wings import asset_tables
from raggedatlas.store.location import Location, digest_file, read_blocks
from raggedatlas.store.manifests import FOLDER, FileEntry
from raggedatlas.store.runtime import map_requests
from raggedatlas.store.shards import hash_shards, shard_entry
from raggedatlas.store.storage_errors import store_errors
from raggedatlas.store.tables import Tables

PARTIAL = "_partial"
"""Folder of a mirror in which files lie while they are copied."""


@dataclass(frozen=True)
class _File:
    """One file that the target must have.

    Parameters
    ----------
    key : str
        Path below `lance_db` or `zarr_store`.
    n_bytes : int
        Length; -1 where it is not known.
    sha256 : str
        Empty where no hash is recorded.
    settled : bool
        Whether a snapshot of the target reaches the same file, so that one of the right length needs no comparison of contents.
    """

    key: str
    n_bytes: int = -1
    sha256: str = ""
    settled: bool = False


def sync(catalog: Catalog, target: Location, *, dry_run: bool, progress: Progress) -> MaintenanceReport:
    """Copy all snapshots of an atlas to another place, or bring an earlier mirror up to date.

    Returns
    -------
    MaintenanceReport
        Groups with files that were copied, and the bytes of all files that were.

    Raises
    ------
    NotFoundError
        If there is no snapshot.
    StoreError
        If the target is within the source or the reverse, or holds something else than a mirror of it, or cannot be written.
    CorruptError
        If a file of the source does not have its recorded hash.
    ConflictError
        If another process drops a snapshot meanwhile.

    Notes
    -----
    Files of snapshots never change, so a file is copied if the target has none of that length and hash. Arrays come first, then the files
    of tables, and the list of snapshots last: until it is written, the target shows what it showed before, and a call that died can be
    made again. Of linked datasets the references are copied, and not the files that they lead to.
    """
    catalog.refuse_unfinished_purge("sync")
    records = list_versions(catalog)
    if not records:
        raise NotFoundError(f"{catalog.location.uri} has no snapshot to copy; take one with snapshot().")
    one, other = (f"{place.uri.rstrip('/')}/" for place in (catalog.location, target))
    if one.startswith(other) or other.startswith(one):
        raise StoreError(
            f"{target.uri} cannot be a mirror of {catalog.location.uri}: one is within the other. Name another place."
        )
    try:
        return _copy_snapshots(catalog, records, catalog_at(target), dry_run=dry_run, progress=progress)
    except (NotFoundError, CorruptError) as error:
        dropped = sorted({record.version for record in records} - {record.version for record in list_versions(catalog)})
        if not dropped:
            raise
        raise ConflictError(
            f"Another process dropped the snapshots {dropped} of {catalog.location.uri} while sync() copied them; run it again."
        ) from error


def _copy_snapshots(
    catalog: Catalog, records: Sequence[AtlasVersionRecord], mirror: Catalog, *, dry_run: bool, progress: Progress
) -> MaintenanceReport:
    held = list_versions(mirror) if is_atlas(mirror.location) else []
    _refuse_foreign(catalog, mirror, records, held)
    partial = mirror.location.child(PARTIAL)
    if not dry_run:
        _remove_partial(partial, GRACE)
    groups, n_bytes, n_files = [], 0, 0
    known = {uid for record in held for uid in inventory(mirror.at(record)).folders}
    uids = sorted({uid for record in records for uid in inventory(catalog.at(record)).folders})
    # What snapshots that the mirror lacks record of the Zarr store: uid -> path below its folder -> hash.
    there, hashes = {record.root_hash for record in held}, dict[str, dict[str, str]]()
    for record in (record for record in records if record.root_hash not in there):
        for path, sha256 in inventory(catalog.at(record)).contents.items():
            uid, _, key = path.partition("/")
            hashes.setdefault(uid, {})[key] = sha256
    for done, uid in enumerate(uids):
        progress("arrays", done, len(uids))
        own = hashes.get(uid, {})
        # Metadata of a group are compared in any case: `add_csc` adds to them.
        files = [
            _File(key, size, own.get(key, ""), settled=uid in known and not key.endswith("zarr.json"))
            for key, size, _ in catalog.arrays.child(uid).list_objects()
        ]
        copied = _copy(files, catalog.arrays.child(uid), mirror.arrays.child(uid), partial, dry_run=dry_run)
        if not dry_run:
            _check_shards(mirror.arrays.child(uid), [file.key for file in files], copied, own)
        n_bytes, n_files = n_bytes + sum(one.n_bytes for one in copied.values()), n_files + len(copied)
        groups += [uid] if copied else []
    progress("arrays", len(uids), len(uids))
    if held and not dry_run:
        # Tags of a snapshot move when the source purges a dataset; the hashes of the old ones would be reported as damage.
        delete_manifest_log(mirror)
    for step in _table_steps(catalog, records, _entries(mirror, held)):
        copied = _copy(step, catalog.tables.location, mirror.tables.location, partial, dry_run=dry_run)
        n_bytes, n_files = n_bytes + sum(one.n_bytes for one in copied.values()), n_files + len(copied)
        progress("tables", 0, 1)
    if not dry_run:
        # Remove tags of snapshots that the source has dropped, so that `gc` frees what only they reached.
        kept, tables = {record.tag for record in records}, Tables(mirror.tables.location)
        for name in tables.names():
            for tag in tables.tags(name):
                if NUMBERED.fullmatch(tag) and tag not in kept:
                    tables.untag(name, tag)
        seal_versions(mirror)
        _remove_partial(partial, timedelta(0))
    progress("tables", 1, 1)
    notes = [f"{len(records)} snapshot(s); {n_files:,} file(s) {'differ' if dry_run else 'copied'}"]
    linked = {row["address"]: row["n_datasets"] for record in records for row in source_rows(catalog.at(record))}
    if linked:
        local = [address for address in linked if "://" not in address]
        text = f"the values of {sum(linked.values()):,} dataset(s) stay in {len(linked):,} linked file(s), which are not copied"
        place = f"; the mirror finds {local[0]} only where it lies at the same place from there: materialize() copies values, for the next snapshot"
        notes.append(text + (place if local else ""))
    return MaintenanceReport(groups=tuple(groups), n_bytes=n_bytes, dry_run=dry_run, notes=tuple(notes))


def _refuse_foreign(
    catalog: Catalog, mirror: Catalog, records: Sequence[AtlasVersionRecord], held: Sequence[AtlasVersionRecord]
) -> None:
    """Raise if the target holds something else than an earlier mirror of the source, or part of one."""
    way_out = "Name an empty place, or the mirror that was made of this atlas."
    made = {record.version: record.created_at for record in records}
    newest = max(made)
    for record in held:
        # A snapshot that the source has dropped since is gone from `made`; its number is not given again.
        if record.version > newest or made.get(record.version, record.created_at) != record.created_at:
            raise StoreError(
                f"{mirror.location.uri} has a snapshot {record.version} of {record.created_at}, which {catalog.location.uri} has not, so it is "
                f"no mirror of it. {way_out}"
            )
    if held and not made.keys() & {record.version for record in held}:
        raise StoreError(f"{mirror.location.uri} and {catalog.location.uri} have no snapshot in common. {way_out}")
    entries = _entries(mirror, held)
    for name in mirror.tables.names():
        if name != VERSIONS and mirror.tables.has(name):
            version = mirror.tables.version(name)
            paths = [p for p in mirror.tables.files(name, version) if p.startswith("_versions/")]
            key = f"{name}.lance/{paths[0]}"
            if key not in entries and not _same_file(catalog.tables.location, mirror.tables.location, key):
                raise StoreError(
                    f"{mirror.location.uri} was written to: version {version} of its table {name!r} is not one of {catalog.location.uri}, "
                    f"and would be lost. {way_out}"
                )


def _entries(catalog: Catalog, records: Iterable[AtlasVersionRecord]) -> dict[str, FileEntry]:
    """Return the files of tables that snapshots reach."""
    entries: dict[str, FileEntry] = {}
    for record in records:
        entries |= read_manifest(catalog, record.manifest)
    return entries


def _table_steps(
    catalog: Catalog, records: Sequence[AtlasVersionRecord], held: Mapping[str, FileEntry]
) -> list[list[_File]]:
    """Return the files below `lance_db` in the order in which they may become visible; each step follows the one before."""
    tables = Tables(catalog.tables.location)
    files = [_File(path, *entry, settled=held.get(path) == entry) for path, entry in _entries(catalog, records).items()]
    # New versions of these become visible after those of all others, in this order: a record comes after what it names.
    versions: dict[str, list[_File]] = {name: [] for name in ("", CELLS, *asset_tables(), DATASETS)}
    for file in files:
        name, _, path = file.key.partition(".lance/")
        if path.startswith("_versions/"):
            versions[name if name in versions else ""].append(file)
    newer = {file for step in versions.values() for file in step}
    steps = [[file for file in files if file not in newer], *versions.values()]
    tags = {f"{name}.lance/{tables.tag_file(record.tag)}" for record in records for name in record.table_versions}
    manifests = {f"{FOLDER}/{record.manifest}.json" for record in records}
    steps.append([_File(path) for path in sorted(tags | manifests)])
    own = {f"{VERSIONS}.lance/{path}" for path in tables.files(VERSIONS, tables.version(VERSIONS))}
    listed = {path for path in own if "/_versions/" in path}
    steps += [[_File(path) for path in sorted(part)] for part in (own - listed, listed)]
    return steps


def _check_shards(
    target: Location, keys: Sequence[str], copied: Mapping[str, FileEntry], hashes: Mapping[str, str]
) -> None:
    """Compare the arrays of which shards were copied with the hashes of their shards.

    Raises
    ------
    CorruptError
        If an array is not the one that was written; what was copied of it is removed.
    """
    for folder, sha256 in hashes.items():
        below = {key: key.removeprefix(f"{folder}/").partition("/")[0] for key in keys if key.startswith(f"{folder}/")}
        shards = {int(number): key for key, number in below.items() if number.isdigit()}
        fresh = [key for key in shards.values() if key in copied]
        if not fresh:
            continue
        each = {n: copied.get(key) or FileEntry(*digest_file(target, key)) for n, key in shards.items()}
        hashed = {n: shard_entry(file.n_bytes, bytes.fromhex(file.sha256)) for n, file in each.items()}
        if hash_shards(hashed) != sha256:
            target.delete_objects(fresh)
            raise CorruptError(
                f"The shards below {target.uri}/{folder} do not have the SHA-256 that was recorded when they were written, so those "
                "that were copied were removed again; run verify() on the source and restore the array from a copy."
            )


def _copy(
    files: Sequence[_File], source: Location, target: Location, partial: Location, *, dry_run: bool
) -> dict[str, FileEntry]:
    """Copy the files that the target lacks or has otherwise; return their lengths and hashes, which a dry run does not know."""
    there = {key: size for key, size, _ in target.list_objects()}

    def lacking(file: _File) -> bool:
        if file.key not in there or (file.n_bytes >= 0 and there[file.key] != file.n_bytes):
            return True
        if file.sha256 and not file.settled:
            return digest_file(target, file.key)[1] != file.sha256
        return not file.settled and not _same_file(source, target, file.key)

    def copy(file: _File) -> FileEntry:
        if dry_run:
            return FileEntry(max(file.n_bytes, 0), "")
        return _copy_file(source, file.key, target, partial, file.sha256)

    apply: Callable[..., Iterable[object]] = map if source.is_local and target.is_local else map_requests
    missing = [file for file, lacks in zip(files, apply(lacking, files), strict=True) if lacks]
    return dict(zip((file.key for file in missing), apply(copy, missing), strict=True))  # type: ignore[arg-type]


def _same_file(source: Location, target: Location, key: str) -> bool:
    try:
        return digest_file(source, key) == digest_file(target, key)
    except NotFoundError:
        return False


def _remove_partial(partial: Location, grace: timedelta) -> None:
    """Remove what calls that died have copied in part, from the time before `grace`."""
    if partial.is_local and partial.exists():
        oldest = datetime.now(UTC) - grace
        with store_errors(f"clean up {partial.uri}"):
            for key, _, when in partial.list_objects():
                if when <= oldest:
                    (partial.checked_path() / key).unlink(missing_ok=True)
            # Another call may be copying.
            with contextlib.suppress(OSError):
                partial.checked_path().rmdir()


def _copy_file(source: Location, key: str, target: Location, partial: Location, sha256: str = "") -> FileEntry:
    """Copy one file to the same key of another location, where readers see all of it or nothing; return length and hash.

    In a folder it is written to `partial` first: what a process that dies leaves must not lie among the files of a geometry store, whose
    digest is over all of them.

    Raises
    ------
    NotFoundError
        If the source has no such file.
    CorruptError
        If the source does not have the SHA-256 that is recorded, which is empty where none is; the target stays as it was.
    """
    n_bytes, content = 0, hashlib.sha256()

    def checked() -> Iterator[bytes]:
        nonlocal n_bytes
        for block in read_blocks(source, key):
            content.update(block)
            n_bytes += len(block)
            yield bytes(block)
        # An error at the end of the blocks also ends a multipart upload, whose object then never appears.
        if sha256 and content.hexdigest() != sha256:
            raise CorruptError(
                f"{source.uri}/{key} does not have the SHA-256 that was recorded when it was written; restore it from a copy. "
                "Nothing was written in its place."
            )

    file = target.child(*key.split("/"))
    with store_errors(f"write {file.uri}"):
        if target.is_local:
            path = file.checked_path()
            temporary = partial.checked_path() / f"{uuid4().hex}.tmp"
            for folder in (path.parent, temporary.parent):
                folder.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("wb") as opened:
                    opened.writelines(checked())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        else:
            import obstore

            obstore.put(target.store(), key, checked())
    return FileEntry(n_bytes, content.hexdigest())
