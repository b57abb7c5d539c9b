"""Mirror the snapshots of an atlas to another place: only what differs, resumable, and never visible in part."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from uuid import uuid4

from raggedatlas.catalog.assets import GRACE, read_links
from raggedatlas.catalog.catalog import CELLS, DATASETS, VERSIONS, Catalog, catalog_at, is_atlas
from raggedatlas.catalog.integrity import seal_versions
from raggedatlas.catalog.inventory import Inventory
from raggedatlas.catalog.kept_tables import kept_files
from raggedatlas.catalog.versions import NUMBERED, delete_manifest_log, list_versions
from raggedatlas.errors import ConflictError, CorruptError, MissingFileError, NotFoundError, StoreError
from raggedatlas.model.arguments import Progress
from raggedatlas.model.records import AtlasVersionRecord, Link
from raggedatlas.model.reports import MaintenanceReport
from raggedatlas.model.wings import asset_tables
from raggedatlas.store.linked import iterate_object, load_references
from raggedatlas.store.location import Location, check_file_key, digest_file, local_file, read_blocks
from raggedatlas.store.manifests import FOLDER, FileEntry, Manifest, read_manifest
from raggedatlas.store.runtime import map_requests, prefetch
from raggedatlas.store.shards import hash_shards, shard_entry, shards_below
from raggedatlas.store.sources import copy_manifest, copy_path, read_copies, write_copies
from raggedatlas.store.storage_errors import store_errors
from raggedatlas.store.tables import Tables

PARTIAL = "_partial"
"""Folder of a mirror in which files lie while they are copied."""


@dataclass(frozen=True)
class _File:
    """One file that the target must have."""

    key: str  # path below `lance_db` or `zarr_store`
    n_bytes: int = -1  # -1 where it is not known
    sha256: str = ""  # empty where no hash is recorded
    # a snapshot of the target reaches the same file: with the right length, contents need no comparison
    settled: bool = False


def sync(
    catalog: Catalog, target: Location, *, values: bool = False, dry_run: bool, progress: Progress
) -> MaintenanceReport:
    """Copy all snapshots of an atlas to another place, or bring an earlier mirror up to date.

    The target is an empty place or an earlier mirror; neither place may be within the other. With `values`, the files
    that datasets are linked to are copied, too. The report has the groups with files that were copied, and the bytes of
    all files that were. Raises `ConflictError` if another process drops a snapshot or purges a dataset meanwhile, and
    `CorruptError` if a file of the source does not have its recorded hash.

    Notes
    -----
    Files of snapshots never change, so a file is copied if the target has none of that length and hash. Arrays come first, then the files
    of tables, and the list of snapshots last: until it is written, the target shows what it showed before, and a call that died can be
    made again. Of linked datasets the references are copied and, with `values`, the files that they lead to. The records stay as they are,
    and with them the root hashes of snapshots; which files the mirror has is in a list of its own (`store.sources.COPIES`).
    """
    catalog.refuse_unfinished_purge("sync()")
    records = list_versions(catalog)
    if not records:
        raise NotFoundError(f"{catalog.location.uri} has no snapshot to copy; take one with snapshot().")
    refuse_nested(catalog.location, target)
    try:
        return _copy_snapshots(catalog, records, catalog_at(target), values=values, dry_run=dry_run, progress=progress)
    except (NotFoundError, MissingFileError, CorruptError) as error:
        catalog.refuse_unfinished_purge("sync()")
        # A purge changes the root hashes of snapshots.
        roots = {record.version: record.root_hash for record in list_versions(catalog)}
        changed = sorted(record.version for record in records if roots.get(record.version) != record.root_hash)
        if not changed:
            raise
        raise ConflictError(
            f"Another process dropped the snapshots {changed} of {catalog.location.uri}, or purged datasets from them, while sync() copied them; "
            "run it again."
        ) from error


def refuse_nested(source: Location, target: Location) -> None:
    """Raise if one of two places is within the other."""
    one, other = (f"{place.uri.rstrip('/')}/" for place in (source, target))
    if one.startswith(other) or other.startswith(one):
        raise StoreError(f"{target.uri} cannot be a copy of {source.uri}: one is within the other. Name another place.")


def _copy_snapshots(
    catalog: Catalog, records: Sequence[AtlasVersionRecord], mirror: Catalog, *, values: bool, dry_run: bool, progress: Progress
) -> MaintenanceReport:  # fmt: skip
    held = list_versions(mirror) if is_atlas(mirror.location) else []
    entries = _refuse_foreign(catalog, mirror, records, held)
    scratch = mirror.location.child(PARTIAL)
    if not dry_run:
        remove_partial(scratch)
    groups, n_bytes, n_files = [], 0, 0
    known = {uid for record in held for uid in Inventory(mirror.at(record)).folders}
    roots, folders, links = {record.root_hash for record in held}, set[str](), dict[str, _Linked]()
    # What snapshots that the mirror lacks record of the Zarr store: uid -> path below its folder -> hash.
    hashes: dict[str, dict[str, str]] = {}
    for record in records:
        # Read once, and one at a time: an atlas may have a thousand snapshots.
        there = Inventory(catalog.at(record))
        folders |= there.folders
        own_links = (
            (uid, one, link) for uid, own in there.datasets.items() for one in own for link in read_links(one).values()
        )
        links |= {copy_path(uid, link.sha256): (link, one.name or uid, record) for uid, one, link in own_links}
        for path, sha256 in there.contents.items() if record.root_hash not in roots else ():
            uid, _, key = path.partition("/")
            hashes.setdefault(uid, {})[key] = sha256
    uids = sorted(folders)
    for done, uid in enumerate(uids):
        progress("arrays", done, len(uids))
        own = hashes.get(uid, {})
        # Metadata of a group are compared in any case: `add_csc` adds to them.
        files = [
            _File(key, size, own.get(key, ""), settled=uid in known and not key.endswith("zarr.json"))
            for key, size, _ in catalog.arrays.child(uid).list_objects()
        ]
        copied = _copy(files, catalog.arrays.child(uid), mirror.arrays.child(uid), scratch, dry_run=dry_run)
        if not dry_run:
            _check_shards(mirror.arrays.child(uid), [file.key for file in files], copied, own)
        n_bytes, n_files = n_bytes + sum(one.n_bytes for one in copied.values()), n_files + len(copied)
        groups += [uid] if copied else []
    progress("arrays", len(uids), len(uids))
    lost: dict[str, str] = {}
    sizes = _copy_linked(catalog, mirror, links, records[-1], lost, values=values, dry_run=dry_run, progress=progress)
    n_bytes, n_files = n_bytes + sum(sizes.values()), n_files + len(sizes)
    groups = sorted({*groups, *(path.partition("/")[0] for path in sizes)})
    if held and not dry_run:
        # Tags of a snapshot move when the source purges a dataset; the hashes of the old ones would be reported as damage.
        delete_manifest_log(mirror)
    for step in _table_steps(catalog, records, entries):
        copied = _copy(step, catalog.tables.location, mirror.tables.location, scratch, dry_run=dry_run)
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
        remove_partial(scratch)
    progress("tables", 1, 1)
    notes = [f"snapshots: {len(records)}; {n_files:,} file(s) {'differ' if dry_run else 'copied'}"]
    notes += [f"a file of older snapshots could not be copied: {text}" for text in lost.values()]
    # With `values`, all are there that are not lost; after a dry run they would be.
    copies = links.keys() if values else read_copies(mirror.location)
    outside = [link.source for path, (link, _, _) in links.items() if path not in copies and path not in lost]
    if outside:
        rest = sorted({*outside})
        text = f"the values of {len(outside):,} dataset(s) stay in {len(rest):,} linked file(s), which sync(values=True) copies"
        local = [address for address in rest if "://" not in address]
        place = f"; the mirror finds {local[0]} only where it lies at the same place from there"
        notes.append(text + (place if local else ""))
    return MaintenanceReport(groups=tuple(groups), n_bytes=n_bytes, dry_run=dry_run, notes=tuple(notes))


_Linked = tuple[Link, str, AtlasVersionRecord]
"""One of the links to a file, the name of the dataset, and the newest snapshot that has it."""


def _copy_linked(
    catalog: Catalog, mirror: Catalog, links: Mapping[str, _Linked], newest: AtlasVersionRecord, lost: dict[str, str], *,
    values: bool, dry_run: bool, progress: Progress,
) -> dict[str, int]:  # fmt: skip
    """Copy the files that datasets of snapshots are linked to and that the mirror lacks, with `values`, and list those that it has.

    `links` are by the path of the copy. Returns what was copied: path below the Zarr store of the mirror -> bytes. Files
    that only older snapshots than `newest` are linked to may be gone for good; why is noted in `lost`, by the path of
    the copy. A file of the newest snapshot that is not the recorded one, or cannot or may not be read, raises.
    """
    before = read_copies(mirror.location)
    links = links if values or before else {}
    copied, complete, scratch = dict[str, int](), set[str](), mirror.location.child(PARTIAL)
    for done, (path, (link, name, snapshot)) in enumerate(sorted(links.items())):
        progress("linked files", done, len(links))
        uid, objects = path.partition("/")[0], load_references(catalog.arrays, link).objects
        numbers = {f"{path}/{key}" if key else path: n for n, key in enumerate(objects.keys)}
        # Asked in any case: `gc` of the mirror may have freed copies. A file is there with all of its bytes or not at all.
        there = {f"{uid}/{key}": size for key, size, _ in mirror.arrays.child(uid).list_objects()}
        lacking = [key for key, n in numbers.items() if there.get(key) != objects.n_bytes[n]]
        is_complete = not lacking and copy_manifest(path) in there
        if values and not dry_run and not is_complete:
            try:
                source = catalog.sources.open_link(link, uid, name)
                blocks = {key: partial(iterate_object, source, objects, numbers[key]) for key in lacking}
                write = partial(_write_or_digest, blocks, mirror.arrays, scratch)
                files = dict(zip(numbers, map_requests(write, [*numbers]), strict=True))
            except StoreError as error:
                if snapshot is newest:
                    raise
                lost[path] = str(error)
                continue
            mirror.arrays.write_bytes(copy_manifest(path), Manifest(files=files).to_bytes())
            is_complete = True
        if values:
            copied |= {key: int(objects.n_bytes[numbers[key]]) for key in lacking}
        if is_complete:
            complete.add(path)
    if complete != before and not dry_run:
        write_copies(mirror.location, complete)
    progress("linked files", len(links), len(links))
    return copied


def _refuse_foreign(
    catalog: Catalog, mirror: Catalog, records: Sequence[AtlasVersionRecord], held: Sequence[AtlasVersionRecord]
) -> dict[str, FileEntry]:
    """Raise if the target holds something else than an earlier mirror of the source, or part of one; return the files of tables that its snapshots reach."""
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
    return entries


def _entries(catalog: Catalog, records: Iterable[AtlasVersionRecord]) -> dict[str, FileEntry]:
    """Return the files of tables that snapshots reach."""
    entries: dict[str, FileEntry] = {}
    for record in records:
        entries |= read_manifest(catalog.tables.location, record.manifest)
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
    steps.append([_File(path) for path in sorted(named_files(tables.location, records))])
    own = {f"{VERSIONS}.lance/{path}" for path in tables.files(VERSIONS, tables.version(VERSIONS))}
    listed = {path for path in own if "/_versions/" in path}
    steps += [[_File(path) for path in sorted(part)] for part in (own - listed, listed)]
    return steps


def named_files(place: Location, records: Sequence[AtlasVersionRecord]) -> set[str]:
    """Return the tags and manifests of snapshots, and the tables that are kept of them, which no manifest lists: paths below ``lance_db``."""
    tags = {f"{name}.lance/{Tables.tag_file(record.tag)}" for record in records for name in record.table_versions}
    return tags | {f"{FOLDER}/{record.manifest}.json" for record in records} | {*kept_files(place, records)}


def _check_shards(
    target: Location, keys: Sequence[str], copied: Mapping[str, FileEntry], hashes: Mapping[str, str]
) -> None:
    """Compare the arrays of which shards were copied with the hashes of their shards.

    Where one is not the array that was written, what was copied of it is removed.
    """
    for folder, sha256 in hashes.items():
        shards = shards_below(folder, keys)
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
    files: Sequence[_File], source: Location, target: Location, scratch: Location, *, dry_run: bool
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
        blocks, name = read_blocks(source, file.key), f"{source.uri}/{file.key}"
        return write_blocks(blocks, target, file.key, scratch, name, file.sha256)

    apply: Callable[..., Iterable[object]] = map if source.is_local and target.is_local else map_requests
    missing = [file for file, lacks in zip(files, apply(lacking, files), strict=True) if lacks]
    return dict(zip((file.key for file in missing), apply(copy, missing), strict=True))  # type: ignore[arg-type]


def _same_file(source: Location, target: Location, key: str) -> bool:
    try:
        return digest_file(source, key) == digest_file(target, key)
    except NotFoundError:
        return False


def remove_partial(scratch: Location) -> None:
    """Remove partial files of killed calls: those older than `GRACE`, because another call may be writing the younger ones."""
    if scratch.is_local and scratch.exists():
        oldest = datetime.now(UTC) - GRACE
        with store_errors(f"clean up {scratch.uri}"):
            for key, _, when in scratch.list_objects():
                if when <= oldest:
                    (scratch.checked_path() / key).unlink(missing_ok=True)
            # Another call may be copying.
            with contextlib.suppress(OSError):
                scratch.checked_path().rmdir()


def _write_or_digest(
    blocks: Mapping[str, Callable[[], Iterable[memoryview]]], target: Location, scratch: Location, key: str
) -> FileEntry:
    """Write the file of a key in `blocks`, or read what is there of another; return length and hash."""
    if key not in blocks:
        return FileEntry(*digest_file(target, key))
    # On a thread of its own: obstore takes the blocks of an upload where no other request can be made.
    with contextlib.closing(prefetch(blocks[key]())) as ahead:
        return write_blocks(ahead, target, key, scratch)


def write_blocks(
    blocks: Iterable[bytes | memoryview],
    target: Location,
    key: str,
    scratch: Location,
    name: str = "",
    sha256: str = "",
) -> FileEntry:
    """Write a file that readers see all of or nothing; return length and hash.

    In a folder it is written to `scratch` first: what a process that dies leaves must not lie among the files of a
    geometry store, whose digest is over all of them. `sha256` is what is recorded of what `name` holds, empty where
    nothing is; if the blocks do not have it, the target stays as it was.
    """
    n_bytes, content = 0, hashlib.sha256()

    def checked() -> Iterator[bytes | memoryview]:
        nonlocal n_bytes
        for block in blocks:
            content.update(block)
            n_bytes += len(block)
            yield block
        # An error at the end of the blocks also ends a multipart upload, whose object then never appears.
        if sha256 and content.hexdigest() != sha256:
            raise CorruptError(
                f"{name} does not have the SHA-256 that was recorded when it was written; restore it from a copy. "
                "Nothing was written in its place."
            )

    check_file_key(target, key)
    with store_errors(f"write {target.uri}/{key}"):
        if target.is_local:
            path = local_file(target, key)
            temporary = scratch.checked_path() / f"{uuid4().hex}.tmp"
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
