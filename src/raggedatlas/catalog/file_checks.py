"""Checks of stored files: every byte that the snapshots and the newest state reach against what is recorded of it, or what changed since."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

from raggedatlas.catalog.array_checks import check_bytes, check_groups, check_specs
from raggedatlas.catalog.assets import AssetKind
from raggedatlas.catalog.catalog import VERSIONS, Catalog
from raggedatlas.catalog.cells import check_bundle, check_frames
from raggedatlas.catalog.deletion import check_deleted_rows
from raggedatlas.catalog.integrity import read_head
from raggedatlas.catalog.inventory import Inventory, dataset_folders
from raggedatlas.catalog.kept_tables import AGAIN, kept_files
from raggedatlas.catalog.versions import list_versions, tip_versions
from raggedatlas.errors import AtlasError
from raggedatlas.model.assets import AssetRecord
from raggedatlas.model.records import AtlasVersionRecord, DatasetRecord, utc_now
from raggedatlas.model.validation import Problem, Validation
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.ledger import Ledger, Stamps
from raggedatlas.store.location import Location, digest_file, digest_files
from raggedatlas.store.manifests import COPY, FileEntry, Files, parse_manifest, read_manifest
from raggedatlas.store.runtime import map_requests
from raggedatlas.store.sources import copy_manifest
from raggedatlas.store.tables import Tables

RESTORE = "Restore the atlas from a copy, or a snapshot with restore()."

_FILES = 64
"""Table files that one task compares."""

Check = Callable[[], list[Problem]]


@dataclass(frozen=True)
class _Part:
    """Something whose bytes are checked together."""

    name: str
    digest: str  # hash of all that is recorded of it
    paths: tuple[str, ...]  # where its files are, below the Zarr store
    check: Check  # reads it and returns problems


def check_files(
    catalog: Catalog,
    found: Validation,
    before: Catalog | None = None,
    *,
    incremental: bool = False,
    executor: Executor | Workers | None = None,
) -> None:
    """Read all bytes once: of all snapshots and the newest state, or of the snapshot that `catalog` is pinned to.

    `found` gets what was read, and problems: of the records themselves, ``table-file``, ``marker-table``, of the rules
    of `check_copy`, `check_frames`, `check_bundle`, `check_deleted_rows`, `check_specs`, `check_bytes` and
    `check_groups`, ``store-files``, and ``unreadable`` where a record cannot be read.

    Files of the snapshot `before` are not read. `incremental` skips what an earlier call with this argument found sound
    and what has not changed since. The workers of `executor` read.
    """
    records = [catalog.snapshot] if catalog.snapshot is not None else list_versions(catalog)
    files, problems = _recorded_files(catalog, records, head=catalog.snapshot is None)
    found += problems

    def newest_state() -> Catalog:
        current = catalog.current()
        return current.at(tip_versions(current))

    views: list[tuple[str, Callable[[], Catalog]]]
    views = [("newest state", newest_state)] if catalog.snapshot is None else []
    views += [(f"snapshot {record.version}", partial(catalog.at, record)) for record in reversed(records)]
    parts: dict[str, list[_Part]] = {}
    for place, view in views:
        try:
            for part in _parts(view()):
                others = parts.setdefault(part.name, [])
                if not any(part.digest == other.digest for other in others):
                    others.append(part)
        except AtlasError as error:
            found.append(Problem("unreadable", "must", place, str(error), RESTORE))
    fresh = [part for others in parts.values() for part in others]
    if before is not None and before.snapshot is not None:
        known = {(part.name, part.digest) for part in _parts(before)}
        fresh = [part for part in fresh if (part.name, part.digest) not in known]
        old = read_manifest(before.tables.location, before.snapshot.manifest)
        files = {path: entry for path, entry in files.items() if old.get(path) != entry}
    # Token of what was found sound, by an earlier call or this one -> when.
    ledger, sound = Ledger(catalog.location) if incremental else None, dict[str, str]()
    counted: set[str] = set()

    def look_up(name: str, digest: str, stamps: Stamps, paths: Sequence[str]) -> str | None:
        """Return the token of something, or None if it was found sound before; count its files."""
        n_files, n_bytes, stamp = stamps.below(*paths)
        token = Ledger.token(name, digest, stamp)
        when = "" if ledger is None else ledger.when(token)
        # Several parts may share a folder, whose files are read or skipped once.
        first = not counted.issuperset(paths)
        counted.update(paths)
        if when:
            sound[token] = when
            found.skipped_since = min(found.skipped_since or when, when)
            found.n_skipped += n_files * first
            return None
        found.n_files, found.n_bytes = found.n_files + n_files * first, found.n_bytes + n_bytes * first
        return token

    checks, tokens_of = list[Check](), list[dict[str, str]]()
    stamps = Stamps(catalog.tables.location)
    looked_up = {path: look_up(path, files[path].sha256, stamps, (path,)) for path in sorted(files)}
    tokens = {path: token for path, token in looked_up.items() if token is not None}
    for at in range(0, len(tokens), _FILES):
        some = dict([*tokens.items()][at : at + _FILES])
        checks.append(partial(compare_files, catalog.tables.location, {path: files[path] for path in some}))
        tokens_of.append(some)
    kept = kept_files(catalog.tables.location, records)
    tokens = {path: token for path in kept if (token := look_up(path, kept[path].sha256, stamps, (path,)))}
    if tokens:
        tables = {path: kept[path] for path in tokens}
        checks.append(partial(compare_files, catalog.tables.location, tables, rule="marker-table", fix=AGAIN))
        tokens_of.append(tokens)
    stamps = Stamps(catalog.arrays)
    for part in fresh:
        token = look_up(part.name, part.digest, stamps, part.paths)
        if token is not None:
            checks.append(part.check)
            # No file has this name: any problem is one of the part.
            tokens_of.append({"": token})
    each = run_tasks(checks, executor, place=catalog.location)
    for tokens, problems in zip(tokens_of, in_order(each), strict=True):
        found += problems
        bad = {problem.path for problem in problems} | ({""} if problems else set())
        sound |= dict.fromkeys((token for path, token in tokens.items() if path not in bad), utc_now())
    if ledger is not None:
        # What is not part of an atlas any more is forgotten when everything was looked at.
        ledger.save(sound if catalog.snapshot is None and before is None else ledger.found | sound)
    found.snapshots = {record.version: record.root_hash for record in records}


def _all(checks: Sequence[Check]) -> list[Problem]:
    return [problem for check in checks for problem in check()]


def _parts(view: Catalog) -> Iterator[_Part]:
    """Return what a view reaches in the Zarr store."""
    there, arrays = Inventory(view), view.arrays
    for uid, own in there.datasets.items():
        yield _part(f"{uid}/frames", own[0].facts, _folders(own[0]), partial(check_frames, view, own))
        if gone := [(file, cells.rows, cells.n_cells) for file, cells in there.deleted.get(uid, {}).items()]:
            yield _part(f"{uid}/deleted", [own[0].facts, gone], (uid,), partial(check_deleted_rows, view, own))
    for file, facts in there.bundles.items():
        folder = file.partition("/")[0]
        yield _part(folder, [file, facts.n_bytes, facts.sha256], (folder,), partial(check_bundle, arrays, file, facts))
    for record in there.groups:
        recorded = record.model_dump(exclude={"created_at", "name", "source", "content_hash", "pointer"})
        checks = partial(check_specs, record, None), partial(check_bytes, arrays, record)
        yield _part(record.zarr_group, recorded, _folders(record), *checks)
    for path in view.sources.copies():
        if path.partition("/")[0] in there.datasets:
            yield _part(path, path, (path, copy_manifest(path)), partial(check_copy, arrays, path))
    for kind, one in there.visible_assets:
        if digest := kind.digest(one):
            checks = partial(_check_files, arrays, kind, one), partial(check_groups, arrays, one.uid, [one.uid])
            yield _part(one.zarr_group, digest, (one.uid,), *checks)


def _part(name: str, recorded: object, paths: tuple[str, ...], *checks: Check) -> _Part:
    digest = hashlib.sha256(json.dumps(recorded, sort_keys=True).encode()).hexdigest()
    return _Part(name, digest, paths, partial(_all, checks))


def _folders(record: DatasetRecord) -> tuple[str, ...]:
    """Return the folders of a group's arrays."""
    return tuple(sorted(dataset_folders([record])))


def _check_files(arrays: Location, kind: AssetKind[Any], record: AssetRecord) -> list[Problem]:
    """Check every byte of the files of what is attached to cells (rule ``store-files``)."""
    fix = f"Restore the files from a copy, or drop the {kind.noun} with {kind.drop_call(record)} and add it again."
    try:
        n_files, n_bytes, digest = digest_files(arrays.child(*record.zarr_group.split("/")))
    except AtlasError as error:
        return [Problem("store-files", "must", record.zarr_group, f"it cannot be read: {error}", fix)]
    if digest == kind.digest(record):
        return []
    text = f"its {n_files:,} files of {n_bytes:,} bytes are not those that were written"
    return [Problem("store-files", "must", record.zarr_group, text, fix)]


def _recorded_files(
    catalog: Catalog, records: Sequence[AtlasVersionRecord], *, head: bool
) -> tuple[dict[str, FileEntry], list[Problem]]:
    """Return what is recorded of the table files that snapshots reach, by path, and what is wrong with the records.

    With `head`, the list of snapshots and their tags are included. Rules ``root``, ``manifest``, and the note
    ``unverified-files``.
    """
    problems, files = [], dict[str, FileEntry]()
    for record in records:
        place = f"snapshot {record.version}"
        if record.root and record.root != record.root_hash:
            text = f"its record is not the one that was written: the root hash is {record.root_hash}, {record.root} was recorded"
            problems.append(Problem("root", "must", place, text, COPY))
        try:
            files |= read_manifest(catalog.tables.location, record.manifest)
        except AtlasError as error:
            problems.append(Problem("manifest", "must", place, str(error), COPY))
    if head and records:
        try:
            sealed = read_head(catalog)
            if sealed.version == Tables(catalog.tables.location).version(VERSIONS):
                files |= sealed.files
            else:
                text = "the newest list of snapshots has no recorded hashes"
                problems.append(Problem("unverified-files", "practice", VERSIONS, text, "Run optimize()."))
        except AtlasError as error:
            problems.append(Problem("manifest", "must", VERSIONS, str(error), COPY))
    return files, problems


def check_copy(arrays: Location, path: str) -> list[Problem]:
    """Compare the copy of a linked file with its manifest (rule ``source-copy``)."""
    key = copy_manifest(path)
    try:
        files = parse_manifest(arrays.read_bytes(key), key).files
    except AtlasError as error:
        return [Problem("source-copy", "must", key, str(error), COPY)]
    return compare_files(arrays, files, rule="source-copy")


def compare_files(location: Location, files: Files, rule: str = "table-file", fix: str = COPY) -> list[Problem]:
    """Compare files with their recorded lengths and hashes."""

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
    return [Problem(rule, "must", path, text, fix) for path, text in zip(paths, each, strict=True) if text]
