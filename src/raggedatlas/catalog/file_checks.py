"""Checks of stored files: every byte that the snapshots and the newest state reach against what is recorded of it, or what changed since."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from raggedatlas.catalog.array_checks import check_bytes, check_groups, check_specs
from raggedatlas.catalog.catalog import VERSIONS, Catalog
from raggedatlas.catalog.cells import check_bundle, check_frames
from raggedatlas.catalog.deletion import check_deleted_rows
from raggedatlas.catalog.integrity import read_head, read_manifest
from raggedatlas.catalog.inventory import dataset_folders, inventory
from raggedatlas.catalog.versions import list_versions, tip_versions
from raggedatlas.errors import AtlasError
from raggedatlas.model.assets import GeometryRecord
from raggedatlas.model.records import AtlasVersionRecord, DatasetRecord, utc_now
from raggedatlas.model.validation import Problem, Validation
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.ledger import Ledger, Stamps
from raggedatlas.store.location import Location, digest_file, digest_files
from raggedatlas.store.manifests import COPY, FileEntry, Files
from raggedatlas.store.runtime import map_requests
from raggedatlas.store.tables import Tables

RESTORE = "Restore the atlas from a copy, or a snapshot with restore()."

_FILES = 64
"""Table files that one task compares."""

Check = Callable[[], list[Problem]]


@dataclass(frozen=True)
class _Part:
    """Something whose bytes are checked together.

    Parameters
    ----------
    name : str
        What it is.
    digest : str
        Hash of all that is recorded of it.
    paths : tuple of str
        Where its files are, below the Zarr store.
    checks : tuple of callable
        They read it and return problems.
    """

    name: str
    digest: str
    paths: tuple[str, ...]
    checks: tuple[Check, ...]


def check_files(
    catalog: Catalog,
    found: Validation,
    before: Catalog | None = None,
    *,
    incremental: bool = False,
    executor: Executor | Workers | None = None,
) -> None:
    """Read all bytes once.

    Parameters
    ----------
    catalog : Catalog
        At the tip, which includes all snapshots, or pinned to one.
    found : Validation
        Gets what was read, and problems: of the rules of `recorded_files`, `compare_files`, `check_frames`, `check_deleted_rows`, `check_specs`
        and `check_bytes`, ``store-files``, and ``unreadable`` where a record cannot be read.
    before : Catalog or None
        A snapshot whose files are not read.
    incremental : bool
        Skip what an earlier call with this argument found sound and what has not changed since.
    executor : Executor, Workers or None
        Whose workers read.
    """
    records = _snapshots(catalog)
    files, problems = recorded_files(catalog, records, head=catalog.snapshot is None)
    found += problems
    parts: dict[str, list[_Part]] = {}
    for place, view in _views(catalog, records):
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
        old = read_manifest(before, before.snapshot.manifest)
        files = {path: entry for path, entry in files.items() if old.get(path) != entry}
    run = _Run(catalog, Ledger(catalog.location) if incremental else None)
    tasks = [*run.compare(files), *run.check(fresh)]
    each = run_tasks([partial(_all, task.checks) for task in tasks], executor, place=catalog.location)
    for task, problems in zip(tasks, in_order(each), strict=True):
        found += problems
        run.note(task, problems)
    run.save(everything=catalog.snapshot is None and before is None)
    found.snapshots = {record.version: record.root_hash for record in records}
    found.n_files, found.n_bytes, found.n_skipped, found.skipped_since = (
        run.n_files,
        run.n_bytes,
        run.n_skipped,
        run.since,
    )


def _snapshots(catalog: Catalog) -> list[AtlasVersionRecord]:
    return [catalog.snapshot] if catalog.snapshot is not None else list_versions(catalog)


def _views(catalog: Catalog, records: Sequence[AtlasVersionRecord]) -> Iterator["tuple[str, Callable[[], Catalog]]"]:
    """Return the newest state, if it is asked for, and the snapshots from the newest on, each with its name."""

    def tip() -> Catalog:
        current = catalog.current()
        return current.at(tip_versions(current))

    if catalog.snapshot is None:
        yield "newest state", tip
    for record in reversed(records):
        yield f"snapshot {record.version}", partial(catalog.at, record)


@dataclass(frozen=True)
class _Task:
    """Checks that one worker makes, and the token of each thing that they check, by its name in problems."""

    checks: tuple[Check, ...]
    tokens: dict[str, str]
    together: bool


@dataclass
class _Run:
    """What one call reads and skips.

    Parameters
    ----------
    catalog : Catalog
        The atlas.
    ledger : Ledger or None
        What is known from before; None skips nothing and remembers nothing.
    """

    catalog: Catalog
    ledger: Ledger | None
    sound: dict[str, str] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)
    n_files: int = 0
    n_bytes: int = 0
    n_skipped: int = 0
    since: str = ""

    def compare(self, files: Mapping[str, FileEntry]) -> Iterator[_Task]:
        """Return tasks that compare table files, without those that are known."""
        stamps, fresh = Stamps(self.catalog.tables.location), {}
        for path in sorted(files):
            token, known = self._known(path, files[path].sha256, stamps, (path,))
            if not known:
                fresh[path] = token
        paths = list(fresh)
        for at in range(0, len(paths), _FILES):
            some = {path: files[path] for path in paths[at : at + _FILES]}
            compare = partial(compare_files, self.catalog.tables.location, some)
            yield _Task((compare,), {path: fresh[path] for path in some}, together=False)

    def check(self, parts: Sequence[_Part]) -> Iterator[_Task]:
        """Return tasks that check parts, without those that are known."""
        stamps = Stamps(self.catalog.arrays)
        for part in parts:
            token, known = self._known(part.name, part.digest, stamps, part.paths)
            if not known:
                yield _Task(part.checks, {part.name: token}, together=True)

    def _known(self, name: str, digest: str, stamps: Stamps, paths: Sequence[str]) -> "tuple[str, bool]":
        """Return the token of something, and whether it was found sound before; count its files."""
        n_files, n_bytes, stamp = stamps.below(*paths)
        token = Ledger.token(name, digest, stamp)
        when = "" if self.ledger is None else self.ledger.when(token)
        # Several parts may share a folder, whose files are read or skipped once.
        first = not self.counted.issuperset(paths)
        self.counted |= set(paths)
        if when:
            self.sound[token] = when
            self.since = min(self.since or when, when)
            self.n_skipped += n_files * first
        else:
            self.n_files, self.n_bytes = self.n_files + n_files * first, self.n_bytes + n_bytes * first
        return token, bool(when)

    def note(self, task: _Task, problems: list[Problem]) -> None:
        """Remember what a task found sound."""
        bad = {problem.path for problem in problems}
        if not (task.together and problems):
            self.sound |= dict.fromkeys((token for path, token in task.tokens.items() if path not in bad), utc_now())

    def save(self, *, everything: bool) -> None:
        """Write the ledger; what is not part of an atlas any more is forgotten when everything was looked at."""
        if self.ledger is not None:
            self.ledger.save(self.sound if everything else self.ledger.found | self.sound)


def _all(checks: Sequence[Check]) -> list[Problem]:
    return [problem for check in checks for problem in check()]


def _parts(view: Catalog) -> Iterator[_Part]:
    """Return what a view reaches in the Zarr store."""
    there, arrays = inventory(view), view.arrays
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
    for store in there.visible_geometries:
        checks = partial(check_store, arrays, store), partial(check_groups, arrays, store.uid, [store.uid])
        yield _part(store.zarr_group, store.digest, (store.uid,), *checks)


def _part(name: str, recorded: object, paths: tuple[str, ...], *checks: Check) -> _Part:
    return _Part(name, hashlib.sha256(json.dumps(recorded, sort_keys=True).encode()).hexdigest(), paths, checks)


def _folders(record: DatasetRecord) -> tuple[str, ...]:
    """Return the folders of a group's arrays."""
    return tuple(sorted(dataset_folders([record])))


def check_store(arrays: Location, record: GeometryRecord) -> list[Problem]:
    """Check every byte of a visible geometry store (rule ``store-files``)."""
    fix = f"Restore the store from a copy, or drop it with drop_geometry({record.name!r}) and add it again."
    try:
        n_files, n_bytes, digest = digest_files(arrays.child(*record.zarr_group.split("/")))
    except AtlasError as error:
        return [Problem("store-files", "must", record.zarr_group, f"it cannot be read: {error}", fix)]
    if digest == record.digest:
        return []
    text = f"its {n_files:,} files of {n_bytes:,} bytes are not the {record.n_files:,} of {record.n_bytes:,} that were written"
    return [Problem("store-files", "must", record.zarr_group, text, fix)]


def recorded_files(
    catalog: Catalog, records: Sequence[AtlasVersionRecord], *, head: bool
) -> tuple[dict[str, FileEntry], list[Problem]]:
    """Return what is recorded of the table files that snapshots reach, and what is wrong with the records.

    Parameters
    ----------
    catalog : Catalog
        At the tip or pinned.
    records : sequence of AtlasVersionRecord
        The snapshots.
    head : bool
        Whether to include the list of snapshots and their tags.

    Returns
    -------
    files : dict of str to FileEntry
        Path below ``lance_db`` -> length and hash.
    problems : list of Problem
        Rules ``root``, ``manifest``, and the note ``unverified-files``.
    """
    problems, files = [], dict[str, FileEntry]()
    for record in records:
        place = f"snapshot {record.version}"
        if record.root and record.root != record.root_hash:
            text = f"its record is not the one that was written: the root hash is {record.root_hash}, {record.root} was recorded"
            problems.append(Problem("root", "must", place, text, COPY))
        try:
            files |= read_manifest(catalog, record.manifest)
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


def compare_files(location: Location, files: Files) -> list[Problem]:
    """Compare files with their recorded lengths and hashes (rule ``table-file``)."""

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
    return [Problem("table-file", "must", path, text, COPY) for path, text in zip(paths, each, strict=True) if text]
