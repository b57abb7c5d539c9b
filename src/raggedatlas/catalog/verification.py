"""Verify stored bytes: every file that the snapshots and the newest state reach against what is recorded of it, or what changed since."""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.cells import check_bundle, check_frames
from raggedatlas.catalog.deletion import check_deleted_rows
from raggedatlas.catalog.integrity import (
    check_bytes,
    check_groups,
    check_specs,
    compare_files,
    recorded_files,
)
from raggedatlas.catalog.inventory import dataset_folders, inventory
from raggedatlas.catalog.versions import find_version, list_versions, tip_versions
from raggedatlas.errors import AtlasError, WorkersError
from raggedatlas.model.assets import GeometryRecord
from raggedatlas.model.records import AtlasVersionRecord, DatasetRecord, utc_now
from raggedatlas.model.reports import Verification
from raggedatlas.model.validation import Problem, Problems
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.ledger import Ledger, Stamps
from raggedatlas.store.location import Location, digest_files
from raggedatlas.store.manifests import FileEntry

COPY = "Restore the atlas from a copy, or a snapshot with restore()."
_IN_FLIGHT = "What is stored is sound: do not drop anything. Bytes were changed on their way, so look at the network, the memory and the disk."

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


def verify(
    catalog: Catalog,
    version: int | str | None = None,
    *,
    incremental: bool = False,
    executor: Executor | Workers | None = None,
) -> Verification:
    """Compare every byte of an atlas, or of a snapshot, with what is recorded of it; see `ReadOnlyAtlas.verify`."""
    if version is not None:
        catalog = catalog.at(find_version(catalog, version))
    found: list[Verification] = []

    def check(at: Catalog) -> Problems:
        try:
            found.append(check_stored(at, incremental=incremental, executor=executor))
        # Workers that fail say nothing about the atlas.
        except WorkersError:
            raise
        except AtlasError as error:
            found.append(Verification({}, problems=(Problem("unreadable", "must", at.location.uri, str(error), COPY),)))
        return Problems(found[-1].problems)

    problems = confirmed(catalog, check)
    return replace(found[-1], problems=tuple(dict.fromkeys(problems)))


def confirmed(catalog: Catalog, check: Callable[[Catalog], Problems]) -> Problems:
    """Run a check, and again if it finds something: what a second look does not find is a note (rule ``seen-once``)."""
    first = check(catalog)
    if not first.breaks_must:
        return first
    # Nothing that was remembered of the first look may answer the second.
    again = check(catalog.tip() if catalog.snapshot is None else catalog.at(catalog.snapshot))
    # Damaged files fail both reads; a byte that was changed on its way, or a commit in between, fails only one.
    known, there = {(p.rule, p.path) for p in first}, {(p.rule, p.path) for p in again}
    found = Problems(p for p in again if p.level != "must" or (p.rule, p.path) in known)
    once = [p for p in first if p.level == "must" and (p.rule, p.path) not in there]
    if once and not catalog.read_only:
        # Problems of a dataset that was dropped and freed between two passes do not concern the current atlas.
        with contextlib.suppress(AtlasError):
            current = catalog.current()
            named = inventory(current).uids | inventory(current).folders
            once = [problem for problem in once if _groups_in(problem) <= named]
    if once:
        text = f"{len(once):,} problems were found by a first read and not by a second; the first was: {once[0].path}: {once[0].message}"
        found.append(Problem("seen-once", "practice", catalog.location.uri, text, _IN_FLIGHT))
    return found


def _groups_in(problem: Problem) -> set[str]:
    """Return the uids of the datasets, results and geometry stores whose groups a problem names."""
    return set(re.findall(r"((?:shared-)?[0-9a-f]{16})/", f"{problem.path} {problem.message}"))


def check_stored(
    catalog: Catalog, *, incremental: bool = False, executor: Executor | Workers | None = None
) -> Verification:
    """Read all bytes once.

    Parameters
    ----------
    catalog : Catalog
        At the tip, which includes all snapshots, or pinned to one.
    incremental : bool
        Skip what an earlier call with this argument found sound and what has not changed since.
    executor : Executor, Workers or None
        Whose workers read.

    Returns
    -------
    Verification
        Rules of problems: those of `recorded_files`, `compare_files`, `check_frames`, `check_deleted_rows`, `check_specs`, `check_bytes`;
        ``store-files``, and ``unreadable`` where a record cannot be read.
    """
    records = _snapshots(catalog)
    files, problems = recorded_files(catalog, records, head=catalog.snapshot is None)
    parts: dict[str, list[_Part]] = {}
    for place, view in _views(catalog, records):
        try:
            for part in _parts(view()):
                others = parts.setdefault(part.name, [])
                if not any(part.digest == other.digest for other in others):
                    others.append(part)
        except AtlasError as error:
            problems.append(Problem("unreadable", "must", place, str(error), COPY))
    run = _Run(catalog, Ledger(catalog.location) if incremental else None)
    tasks = [*run.compare(files), *run.check([part for others in parts.values() for part in others])]
    each = run_tasks([partial(_all, task.checks) for task in tasks], executor, place=catalog.location)
    for task, found in zip(tasks, in_order(each), strict=True):
        problems += found
        run.note(task, found)
    run.save(everything=catalog.snapshot is None)
    roots = {record.version: record.root_hash for record in records}
    return Verification(roots, run.n_files, run.n_bytes, run.n_skipped, run.since, tuple(dict.fromkeys(problems)))


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
