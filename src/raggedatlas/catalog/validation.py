"""Validation of an atlas: its tables, features, snapshots, and everything that is attached to cells."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.array_checks import check_arrays, check_specs
from raggedatlas.catalog.assets import asset_kinds, group_by_dataset, read_assets, read_links, read_records
from raggedatlas.catalog.catalog import (
    BASE_CELLS,
    CELLS,
    DATASETS,
    FACTS,
    GENE_TABLE,
    IDENTITY,
    LAYOUTS,
    LINKS,
    ORTHOLOG_TABLE,
    REGISTRY_COLUMNS,
    TERM_TABLE,
    VERSIONS,
    Catalog,
    wrong_columns,
)
from raggedatlas.catalog.deletion import check_unfinished
from raggedatlas.catalog.features import Layout, Registry, read_ahead, read_layouts, read_registry
from raggedatlas.catalog.file_checks import RESTORE, check_files
from raggedatlas.catalog.identity import FACTS_SCHEMA, IDENTITY_SCHEMA, LINKS_SCHEMA, check_identity
from raggedatlas.catalog.inventory import Inventory
from raggedatlas.catalog.linked_values import check_linked
from raggedatlas.catalog.row_checks import (
    Changed,
    check_pointers,
    check_rows,
)
from raggedatlas.catalog.versions import find_version, list_versions, registry_tables, tip_versions
from raggedatlas.errors import ArgumentError, AtlasError, WorkersError
from raggedatlas.model.accessions import GENES_SCHEMA, ORTHOLOGS_SCHEMA
from raggedatlas.model.choices import Level
from raggedatlas.model.ids import NAME, layout_uid
from raggedatlas.model.records import DATASETS_SCHEMA, LAYOUTS_SCHEMA, DatasetRecord
from raggedatlas.model.spaces import POINTERS, pointer_columns
from raggedatlas.model.terms import TERMS_SCHEMA
from raggedatlas.model.validation import Problem, Validation
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.runtime import map_fetches, map_requests, submit_request
from raggedatlas.store.storage_errors import lance_errors
from raggedatlas.store.tables import Tables

_IN_FLIGHT = "What is stored is sound: do not drop anything. Bytes were changed on their way, so look at the network, the memory and the disk."

_READING = ("files", "deep")
"""Levels that read every byte."""


def validate(
    catalog: Catalog,
    level: Level = "quick",
    *,
    since: int | str | None = None,
    root_hash: str = "",
    incremental: bool = False,
    executor: Executor | Workers | None = None,
) -> Validation:
    """Check the tip or a snapshot; the tip is looked at as it was when this began.

    The level ``quick`` reads the records, layouts and registries. ``rows`` also reads the ids and pointers of every
    cell, and looks whether every array is there. ``files`` reads every byte: hashes of table files and frames,
    checksums of arrays. ``deep`` is all of that, and compares feature numbers, layout hashes and values of results; and
    it reads all values of datasets that are linked to files outside of the atlas. At the tip the files of all snapshots
    are read; table files that no snapshot reaches yet have no hash.

    `since` is number or label of a snapshot that is known to be sound: what it has unchanged is not looked at again.
    `root_hash` is what a snapshot must have (rule ``root``). `incremental`, with ``files`` and ``deep``, skips bytes
    that an earlier call with this argument found sound and whose files have not changed since. The workers of
    `executor` read arrays and files.

    The result is empty when all is well. Rules marked ``practice`` are for work in progress, files without a recorded
    hash, a name shared by several datasets, or a read that failed once: worth knowing, but the stored data are correct.
    Rule names are stable: ``unreadable``, ``missing-table``, ``table-columns``, ``lost-version``, ``unfinished-purge``,
    ``unfinished-deletion`` (practice), ``unknown-space``, ``space-kind``, ``missing-registry``, ``duplicate-record``,
    ``duplicate-dataset``, ``duplicate-name`` (practice), ``seen-once`` (practice), ``group-name``, ``array-spec``,
    ``missing-layout``, ``layout-size``, ``layout-features``, ``layout-index``, ``duplicate-feature``,
    ``feature-identity``, ``global-index``, ``unassigned-index`` (practice), ``duplicate-result``, ``result-column``,
    ``duplicate-geometry``, ``geometry-column``; rows: ``missing-array``, ``pointer-bounds``, ``pointer-rows``,
    ``pointer-group``, ``cell-count``, ``cell-uid``, ``duplicate-uid``, ``uncommitted-cells`` (practice),
    ``result-count``, ``missing-store``, ``geometry-count``, ``geometry-box``, ``geometry-object``; files and deep:
    ``table-file``, ``marker-table``, ``root``, ``manifest``, ``unverified-files`` (practice), ``frame``, ``bundle``,
    ``deleted-rows``, ``store-files``, ``group-metadata``, ``array-metadata``, ``array-damaged``, ``checksum``,
    ``shards``, ``entry-bounds``, ``feature-bounds``, ``column-order``; deep: ``layout-hash``, ``result-values``; of
    linked datasets ``references``, ``source-copy``, and by ``deep`` alone ``source-changed``, ``source-missing``,
    ``repeated-entries``, ``counts`` and ``content-hash``.

    Notes
    -----
    Of a dataset that is linked to a file outside of the atlas, a root hash covers the references (the place of each chunk) and the
    recorded size, time and ETag of the file. Its values are compared with nothing but that, unless it was added with ``hash="full"``, and
    only ``deep`` reads them, of the state that is validated; a snapshot keeps what a file was, not its bytes.
    Copies of linked files in a mirror are compared with the hashes of what was copied.
    """
    if incremental and level not in _READING:
        raise ArgumentError(
            f"incremental=True is of validate('deep') and verify(), which read every byte; {level!r} skips nothing."
        )
    if incremental and catalog.location.server is not None:
        raise ArgumentError(
            "incremental=True has no effect for a published atlas, where only reading all bytes finds a changed pack; leave it out."
        )
    if root_hash and catalog.snapshot is None:
        raise ArgumentError(
            "root_hash=... is that of a snapshot, and the newest state has none: call it on checkout(version), or pass the snapshot to verify()."
        )
    before = None if since is None else catalog.at(find_version(catalog, since))

    def check(at: Catalog) -> Validation:
        found = Validation()
        try:
            if root_hash and at.snapshot is not None and at.snapshot.root_hash != root_hash:
                text = f"its root hash is {at.snapshot.root_hash}, {root_hash} was expected"
                found.append(Problem("root", "must", f"snapshot {at.snapshot.version}", text, RESTORE))
            # Each table is opened once.
            at = at.current() if at.read_only else at.with_tables(at.tables.hold()).current()
            if level in _READING:
                check_files(at, found, before, incremental=incremental, executor=executor)
            readable = level != "files"
            if readable and not at.read_only:
                found += _check_tables(at, _schemas(at))
                readable = not any(problem.rule in {"missing-table", "table-columns"} for problem in found)
                if readable:
                    found += _check_versions(at) + check_unfinished(at)
                    # Fixed versions from here on, so that an `add` or a drop in the meantime cannot look like damage.
                    at = at.at(tip_versions(at))
            if readable:
                # One damage gives one problem: of arrays that `check_files` found damaged, nothing else is asked.
                damaged = {problem.path for problem in found}
                found += check_content(at, level, before, damaged=damaged, executor=executor).problems
        # Workers that fail say nothing about the atlas, so this is not a problem `unreadable`.
        except WorkersError:
            raise
        except AtlasError as error:
            found.append(Problem("unreadable", "must", at.location.uri, str(error), RESTORE))
        found[:] = dict.fromkeys(found)
        return found

    return _confirmed(catalog, check)


def _confirmed(catalog: Catalog, check: Callable[[Catalog], Validation]) -> Validation:
    """Run a check, and again if it finds something: what a second look does not find is a note (rule ``seen-once``)."""
    first = check(catalog)
    if not first.breaks_must:
        return first
    # Nothing that was remembered of the first look may answer the second.
    again = check(catalog.tip() if catalog.snapshot is None else catalog.at(catalog.snapshot))
    # Damaged files fail both reads; a byte that was changed on its way, or a commit in between, fails only one.
    known, there = {(p.rule, p.path) for p in first}, {(p.rule, p.path) for p in again}
    found = [p for p in again if p.level != "must" or (p.rule, p.path) in known]
    once = [p for p in first if p.level == "must" and (p.rule, p.path) not in there]
    if once and not catalog.read_only:
        # Problems of a dataset that was dropped and freed between two passes do not concern the current atlas.
        with contextlib.suppress(AtlasError):
            current = Inventory(catalog.current())
            named = current.uids | current.folders
            group = re.compile(r"((?:shared-)?[0-9a-f]{16})/")
            once = [problem for problem in once if {*group.findall(f"{problem.path} {problem.message}")} <= named]
    if once:
        text = f"{len(once):,} problems were found by a first read and not by a second; the first was: {once[0].path}: {once[0].message}"
        found.append(Problem("seen-once", "practice", catalog.location.uri, text, _IN_FLIGHT))
    again[:] = found
    return again


@dataclass(frozen=True)
class ContentCheck:
    """What a check of tables and cells found."""

    problems: list[Problem]  # those of `validate`, without those of files and of the list of snapshots
    n_cells: int = 0  # of the state that was checked; only of levels that read cells
    n_datasets: int = 0  # of the state that was checked
    # datasets that have cells and no record; only of levels that read cells
    ignored: list[str] = field(default_factory=list)


def check_content(
    catalog: Catalog,
    level: Level,
    before: Catalog | None,
    *,
    damaged: AbstractSet[str] = frozenset(),
    executor: Executor | Workers | None = None,
) -> ContentCheck:
    """Check the tables and cells of a view, without what an earlier snapshot has unchanged.

    `catalog` is pinned. `before` is a snapshot that is known to be sound; None checks everything. Not read again are
    records, feature lists and registries that it has, too, and rows of cells in the same data files and deletion files.
    `damaged` are places that are known to be damaged. The workers of `executor` read arrays.
    """
    # In an object store, the records are read while every table is opened for the first check.
    steps: list[Callable[[], Any]] = [partial(_check_pinned, catalog, before)]
    if not catalog.location.is_local:
        steps += [partial(read_ahead, catalog), partial(_read_early, read_assets, catalog)]
        steps += [partial(_read_early, read, before) for read in (read_records, read_assets) if before is not None]
    problems: list[Problem] = [*catalog.location.side_by_side(steps)[0]]
    if problems:
        return ContentCheck(problems)
    records, old = read_records(catalog), [] if before is None else read_records(before)
    there = {record.zarr_group: record for record in old}
    changed = [record for record in records if there.get(record.zarr_group) != record]
    assets, old_assets = read_assets(catalog), {} if before is None else read_assets(before)
    problems += _check_records(catalog, records, changed)
    problems += [problem for kind, found in assets.items() if found for problem in kind.check_records(catalog, found)]
    check_features = partial(_check_features, catalog, before, records, changed, hashed=level == "deep")
    uids = {record.uid for record in records}
    if level == "quick":
        return ContentCheck(problems + check_features(), n_datasets=len(uids))
    suspects = {record.uid for record in changed}
    suspects |= {there[group].uid for group in there.keys() - {record.zarr_group for record in records}}
    # A record that says something else of the same cells is compared with all of them.
    new_groups = [*changed]
    for kind, found in assets.items():
        known = old_assets.get(kind, [])
        differ = [one for one in (*found, *known) if one not in found or one not in known]
        grouped = [(one, group) for one in differ if (group := kind.group(one)) is not None]
        suspects |= {uid for one, _ in grouped for uid in one.cells_of}
        new_groups += [group for one, group in grouped if one in found]
    if catalog.location.is_local or executor is not None:
        problems += check_features()
        rows = check_rows(catalog, records, before, suspects)
        problems += rows.problems
        problems += _shared(catalog, [partial(check_arrays, catalog.arrays, group) for group in new_groups], executor)
    else:
        # Side by side, because each look at an array is a request.
        features, cells = (
            submit_request(lambda step: step(), check_features),
            submit_request(lambda given: check_rows(catalog, records, before, given), suspects),
        )
        problems += [p for found in map_fetches(partial(check_arrays, catalog.arrays), new_groups) for p in found]
        rows = cells.result()
        problems += features.result() + rows.problems
    for kind, found in assets.items():
        known, seen = old_assets.get(kind, []), rows.touched
        due = [one for one in found if one not in known or seen is None or seen & set(one.cells_of)]
        problems += kind.check_cells(catalog, due, values=level == "deep") if due else []
    if level == "deep":
        bad = damaged | {problem.path for problem in problems}
        sound = [record for record in changed if record.zarr_group not in bad]
        problems += _shared(catalog, [partial(check_pointers, catalog, record) for record in sound], executor)
        linked = [record for record in sound if read_links(record)]
        problems += _shared(catalog, [partial(check_linked, catalog, record) for record in linked], executor)
    n_cells = sum(n for uid, n in rows.counts.items() if uid in uids)
    ignored = set(rows.counts) - uids
    if before is not None and before.snapshot is not None and rows.touched is not None:
        were = {record.uid for record in old}
        n_cells += before.snapshot.n_cells - sum(n for uid, n in rows.before.items() if uid in were)
        ignored |= set(before.snapshot.ignored) - rows.touched
    return ContentCheck(problems, n_cells, len(uids), sorted(ignored))


def _read_early(read: Callable[[Catalog], Any], view: Catalog) -> None:
    """Read something that stays in memory; errors are raised by the code that uses it."""
    with contextlib.suppress(AtlasError):
        read(view)


def _check_features(
    catalog: Catalog,
    before: Catalog | None,
    records: Sequence[DatasetRecord],
    changed: Sequence[DatasetRecord],
    *,
    hashed: bool,
) -> list[Problem]:
    """Check the registries that changed, and the feature lists that did or whose records or registries did; `hashed` computes their hashes."""
    problems: list[Problem] = []
    same = {} if before is None else before.tables.pinned or {}
    now = catalog.tables.pinned or {}
    tables = registry_tables(catalog)
    identity_same = now.get(IDENTITY) == same.get(IDENTITY)
    due = {space: table for space, table in tables.items() if not (identity_same and now[table] == same.get(table))}

    def changed_lists() -> set[str]:
        if before is None or now[LAYOUTS] == same.get(LAYOUTS):
            return set()
        return Changed.between(LAYOUTS, catalog.tables, before.tables).values("layout_uid")

    def indices(table: str) -> pa.Table | None:
        if before is None or not before.tables.has(table):
            return None
        return before.tables.read(table, ["uid", "global_index"])

    steps: list[Callable[[], Any]] = [changed_lists, *(partial(indices, table) for table in due.values())]
    lists, *earlier = catalog.location.side_by_side(steps)
    read_ahead(catalog).result()
    layouts = {record.layout_uid for record in changed} | lists
    registries: dict[str, Registry] = {}
    for space, old in zip(due, earlier, strict=True):
        registry = registries[space] = read_registry(catalog, space)
        problems += _check_registry(registry)
        problems += check_identity(catalog, space, registry.table.column("uid"))
        if old is None or not _continues(registry, old):
            layouts |= {record.layout_uid for record in records if record.feature_space == space}
    wanted = {(r.layout_uid, r.feature_space, r.n_features): r for r in records if r.layout_uid in layouts}
    found = read_layouts(catalog, {record.layout_uid for record in wanted.values()}, checked=False) if wanted else {}
    for record in wanted.values():
        space = record.feature_space
        if space in tables and space not in registries:
            registries[space] = read_registry(catalog, space)
        problems += _check_layout(record, found.get(record.layout_uid), registries.get(space))
    if hashed:
        text = "its feature list is not the one that was written"
        wrong = [layout.uid for layout in found.values() if layout_uid(layout.features) != layout.uid]
        problems += [Problem("layout-hash", "must", f"layout {uid}", text, RESTORE) for uid in wrong]
    return problems


def _continues(registry: Registry, old: pa.Table) -> bool:
    """Return whether a registry has the features of an earlier one, with the same indices."""
    at = pc.index_in(old.column("uid"), value_set=registry.table.column("uid").combine_chunks())
    if at.null_count:
        return False
    index = registry.table.column("global_index").take(at)
    return bool(pc.all(pc.fill_null(pc.equal(index, old.column("global_index")), fill_value=False)).as_py())


def _shared(
    catalog: Catalog, checks: Sequence[Callable[[], list[Problem]]], executor: Executor | Workers | None
) -> list[Problem]:
    """Run checks that read arrays or files, on workers if given; problems are in the order of the checks."""
    return [problem for found in in_order(run_tasks(checks, executor, place=catalog.location)) for problem in found]


def _check_tables(catalog: Catalog, wanted: Mapping[str, pa.Schema]) -> list[Problem]:
    problems = []
    for name, schema in wanted.items():
        try:
            there = catalog.tables.schema(name)
        except AtlasError as error:
            problems.append(Problem("missing-table", "must", name, str(error), RESTORE))
            continue
        if wrong := wrong_columns(there, schema):
            text = f"the columns {wrong} are missing or have another type"
            problems.append(Problem("table-columns", "must", name, text, RESTORE))
    return problems


def _schemas(catalog: Catalog) -> dict[str, pa.Schema]:
    """Return the columns that every table must have, of optional ones those that are there."""
    optional = {
        **{kind.table: kind.schema for kind in asset_kinds()}, IDENTITY: IDENTITY_SCHEMA, LINKS: LINKS_SCHEMA, FACTS: FACTS_SCHEMA,
        GENE_TABLE: GENES_SCHEMA, ORTHOLOG_TABLE: ORTHOLOGS_SCHEMA, TERM_TABLE: TERMS_SCHEMA,
    }  # fmt: skip
    there = {name: schema for name, schema in optional.items() if catalog.tables.has(name)}
    return {CELLS: BASE_CELLS, DATASETS: DATASETS_SCHEMA, LAYOUTS: LAYOUTS_SCHEMA, **there}


def _check_pinned(catalog: Catalog, before: Catalog | None = None) -> list[Problem]:
    """Check what must hold before anything else can be read: tables, columns, spaces of pointers, tags."""
    wanted = _schemas(catalog) | dict.fromkeys(registry_tables(catalog).values(), REGISTRY_COLUMNS)
    problems = _check_tables(catalog, wanted)
    if problems:
        return problems

    def read_one_row(name: str) -> list[Problem]:
        table = catalog.tables.open(name)
        try:
            with lance_errors(table.uri):
                table.to_table(limit=1, with_row_id=True)
        except AtlasError as error:
            fix = f"{RESTORE} repair() drops columns that Lance cannot have."
            return [Problem("unreadable", "must", name, str(error), fix)]
        return []

    # Versions that an earlier snapshot has, too, were read for it.
    known = (before and before.tables.pinned) or {}
    changed = [name for name in wanted if known.get(name) != catalog.tables.version(name)]
    problems = [problem for found in map_requests(read_one_row, changed) for problem in found]
    if problems:
        return problems
    spaces = catalog.spaces()
    schema = catalog.tables.schema(CELLS)
    for column, (space, kind) in pointer_columns(schema).items():
        if schema.field(column).type != POINTERS[kind].arrow_type:
            text = f"column {column!r} of {kind.value} pointers has the type {schema.field(column).type}"
            problems.append(Problem("table-columns", "must", CELLS, text, RESTORE))
        elif space not in spaces:
            text = f"column {column!r} points into the unknown feature space {space!r}"
            problems.append(Problem("unknown-space", "must", CELLS, text, RESTORE))
        elif spaces[space].kind is not kind:
            text = f"column {column!r} holds {kind.value} pointers into the {spaces[space].kind.value} space {space!r}"
            problems.append(Problem("space-kind", "must", CELLS, text, RESTORE))
    return problems


def _check_versions(catalog: Catalog) -> list[Problem]:
    """Check that every snapshot's table versions are there, and that no purge is half done."""
    problems = []
    unfinished = catalog.tables.unfinished_purge()
    if unfinished is not None:
        text = f"the purge of dataset {unfinished.shown} is not finished; nothing can be written before it is"
        problems.append(
            Problem("unfinished-purge", "must", VERSIONS, text, f"Run repair(), or purge({unfinished.uid!r}) again.")
        )
    tags: dict[str, dict[str, int]] = {}
    for record in list_versions(catalog):
        for name, version in record.table_versions.items():
            if name not in tags:
                tags[name] = catalog.tables.tags(name) if catalog.tables.has(name) else {}
            # A tag keeps the version, so it need not be opened; without one it may still exist, and `repair` tags it.
            if tags[name].get(record.tag) == version or Tables(catalog.tables.location, {name: version}).has(name):
                continue
            text = f"version {version} of table {name!r} is gone"
            fix = f"Something other than this library cleaned up; delete the snapshot with drop_snapshot({record.version})."
            problems.append(Problem("lost-version", "must", f"snapshot {record.version}", text, fix))
    return problems


def _check_records(
    catalog: Catalog, records: Sequence[DatasetRecord], changed: Sequence[DatasetRecord]
) -> list[Problem]:
    """Check the records among each other, and some of them by themselves."""
    spaces, registries = catalog.spaces(), registry_tables(catalog)
    problems = []
    for group, n in Counter(record.zarr_group for record in records).items():
        if n > 1:
            text = f"{n} records name the group {group!r}"
            problems.append(Problem("duplicate-record", "must", DATASETS, text, "Run restore() of a snapshot."))
    content: dict[tuple[str, str], dict[str, str]] = {}
    names: dict[str, list[str]] = {}
    for uid, own in group_by_dataset(records).items():
        if own[0].content_hash:
            content.setdefault((own[0].content_hash, own[0].feature_space), {})[uid] = own[0].name
        names.setdefault(own[0].name, []).append(uid)
    for same in (same for same in content.values() if len(same) > 1):
        named = ", ".join(f"{name!r} ({uid})" for uid, name in same.items())
        text = f"{len(same)} datasets hold the same cells, features and values: {named}"
        way_out = f"Keep one, and drop the others by their uids, e.g. drop_dataset({list(same)[-1]!r})."
        problems.append(Problem("duplicate-dataset", "must", DATASETS, text, way_out))
    for name, uids in names.items():
        if name and len(uids) > 1:
            text = f"{len(uids)} datasets are called {name!r}: {uids}"
            problems.append(Problem("duplicate-name", "practice", DATASETS, text, "Use their uids."))
    for record in changed:
        space = spaces.get(record.feature_space)
        if space is None:
            text = f"its feature space {record.feature_space!r} is unknown"
            fix = "Define it with register_space()."
            problems.append(Problem("unknown-space", "must", record.zarr_group, text, fix))
        elif space.has_features and space.name not in registries:
            text = f"the features of {record.zarr_group} are not there"
            problems.append(Problem("missing-registry", "must", space.registry, text, RESTORE))
        # The group becomes a path: exactly two plain names, the first of them the dataset's own.
        parts = record.zarr_group.split("/")
        if len(parts) != 2 or parts[0] != record.uid or any(not NAME.fullmatch(part) or ".." in part for part in parts):
            text = f"the group {record.zarr_group!r} is not below its dataset {record.uid!r}"
            problems.append(Problem("group-name", "must", DATASETS, text, "Restore a snapshot."))
        problems += check_specs(record, space)
    return problems


def _check_registry(registry: Registry) -> list[Problem]:
    place = f"{registry.space}_registry"
    problems = []
    n_twice = len(registry.uids) - len(registry.row_of)
    if n_twice:
        text = f"{n_twice:,} features are registered more than once"
        problems.append(Problem("duplicate-feature", "must", place, text, "Restore the atlas from a copy."))
    index = registry.table.column("global_index")
    assigned = np.sort(index.drop_null().to_numpy())
    if not np.array_equal(assigned, np.arange(len(assigned))):
        text = f"the {len(assigned):,} assigned indices are not 0 to {len(assigned) - 1:,}, each once"
        problems.append(Problem("global-index", "must", place, text, "Restore the atlas from a copy."))
    if len(assigned) < len(index):
        text = f"{len(index) - len(assigned):,} features have no index yet"
        problems.append(Problem("unassigned-index", "practice", place, text, "Run optimize()."))
    return problems


def _check_layout(record: DatasetRecord, layout: Layout | None, registry: Registry | None) -> list[Problem]:
    if registry is None or record.n_features == 0:
        return []
    place = f"layout {record.layout_uid}"
    back = f"Drop the dataset with drop_dataset({record.uid!r}) and add it again."
    if layout is None:
        return [Problem("missing-layout", "must", place, f"the feature list of {record.zarr_group} is not there", back)]
    problems = []
    if len(layout.features) != record.n_features:
        text = f"it has {len(layout.features):,} features, {record.zarr_group} {record.n_features:,}"
        problems.append(Problem("layout-size", "must", place, text, back))
    rows = np.array([registry.row_of.get(uid, -1) for uid in layout.features.tolist()], dtype=np.int64)
    if (rows < 0).any():
        text = f"{int((rows < 0).sum()):,} of its features are not in the registry of {record.feature_space!r}"
        problems.append(Problem("layout-features", "must", place, text, back))
    known, has = rows[rows >= 0], layout.global_index[rows >= 0]
    if ((has != -1) & (has != registry.global_index[known])).any():  # -1: none yet
        text = "its feature indices are not those of the registry"
        problems.append(Problem("layout-index", "must", place, text, "Restore the atlas from a copy."))
    if (has < 0).any():
        text = f"{int((has < 0).sum()):,} of its features have no index yet"
        problems.append(Problem("unassigned-index", "practice", place, text, "Run optimize()."))
    return problems
