"""Validation at three levels: tables and inventory, every row, every byte. Damage is reported, never raised."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Literal

import numpy as np
import pyarrow as pa

from raggedatlas.catalog.array_checks import check_arrays, check_bytes, check_specs
from raggedatlas.catalog.asset_checks import (
    check_geometries,
    check_results,
    check_rows,
    check_shapes,
    check_store,
    check_values,
)
from raggedatlas.catalog.assets import (
    GEOMETRY_ASSETS,
    RESULT_ASSETS,
    asset_uids,
    group_by_dataset,
    is_visible,
    read_records,
)
from raggedatlas.catalog.catalog import (
    BASE_CELLS,
    CELLS,
    DATASETS,
    FACTS,
    GENE_TABLE,
    GEOMETRY,
    IDENTITY,
    LAYOUTS,
    LINKS,
    ORTHOLOG_TABLE,
    RESULTS,
    VERSIONS,
    Catalog,
)
from raggedatlas.catalog.features import Registry, read_registry
from raggedatlas.catalog.frames import check_frames
from raggedatlas.catalog.identity import FACTS_SCHEMA, IDENTITY_COLUMNS, LINKS_SCHEMA, check_identity
from raggedatlas.catalog.layouts import Layout, read_layouts
from raggedatlas.catalog.manifests import check_files
from raggedatlas.catalog.versions import consistent_versions, list_versions, registry_tables, versions_exist
from raggedatlas.errors import AtlasError, WorkersError
from raggedatlas.model.assets import GEOMETRY_SCHEMA, RESULTS_SCHEMA
from raggedatlas.model.genes import GENES_SCHEMA, ORTHOLOGS_SCHEMA
from raggedatlas.model.ids import NAME, layout_uid
from raggedatlas.model.pointers import pointer_columns
from raggedatlas.model.records import DATASETS_SCHEMA, LAYOUTS_SCHEMA, AtlasVersionRecord, DatasetRecord
from raggedatlas.model.schemas import FeatureBaseSchema
from raggedatlas.model.validation import AtlasProblem
from raggedatlas.store.executors import Workers, in_order, run_tasks
from raggedatlas.store.tables import Tables

Level = Literal["quick", "rows", "deep"]

NOTES = frozenset({"uncommitted-cells", "unassigned-index", "unverified-files", "duplicate-name", "seen-once"})
"""Rules for work in progress, files without a recorded hash, a name shared by several datasets, or a read that failed once: worth
knowing, but the stored data is correct."""

_COPY = "Restore the atlas from a copy, or a snapshot with restore()."
_IN_FLIGHT = "What is stored is sound: do not drop anything. Bytes were changed on their way, so look at the network, the memory and the disk."
_ATTEMPTS = 10


def is_note(problem: AtlasProblem) -> bool:
    """Return whether a problem is only a note, which does not prevent a snapshot."""
    return problem.rule in NOTES


def validate(
    catalog: Catalog, level: Level = "quick", executor: Executor | Workers | None = None
) -> list[AtlasProblem]:
    """Check the tip or a snapshot.

    Parameters
    ----------
    catalog : Catalog
        At the tip or pinned. The tip is looked at as it was when this began.
    level : {"quick", "rows", "deep"}
        ``quick`` reads the inventory, layouts and registries. ``rows`` also reads the ids and pointers of every cell, and looks
        whether every array is there. ``deep`` also reads every byte: hashes of table files and frames, checksums of arrays, feature
        numbers, layout hashes. At the tip it compares the table files of all snapshots; those that no snapshot reaches yet have no hash.

    Returns
    -------
    list of AtlasProblem
        Empty when all is well. Rule names are stable: ``unreadable``, ``missing-table``, ``table-columns``, ``lost-version``,
        ``unfinished-purge``, ``unknown-space``, ``space-kind``, ``missing-registry``, ``duplicate-record``, ``duplicate-dataset``,
        ``duplicate-name`` (note), ``seen-once`` (note), ``group-name``,
        ``array-spec``, ``missing-layout``, ``layout-size``, ``layout-features``, ``layout-index``,
        ``duplicate-feature``, ``feature-identity``, ``global-index``, ``unassigned-index`` (note), ``duplicate-result``, ``result-column``, ``duplicate-geometry``, ``geometry-column``; rows: ``missing-array``, ``pointer-bounds``,
        ``pointer-rows``, ``pointer-group``, ``cell-count``, ``cell-uid``, ``duplicate-uid``, ``uncommitted-cells`` (note),
        ``result-count``, ``missing-store``, ``geometry-count``, ``geometry-box``, ``geometry-object``; deep: ``table-file``, ``manifest``, ``unverified-files`` (note), ``frame``, ``store-files``, ``array-metadata``, ``array-damaged``, ``checksum``, ``entry-bounds``, ``feature-bounds``, ``column-order``, ``layout-hash``,
        ``result-values``.
    """
    first = _check_once(catalog, level, executor)
    if all(is_note(problem) for problem in first):
        return first
    # Nothing that was remembered of the first look may answer the second.
    again = _check_once(catalog.tip() if catalog.snapshot is None else catalog.at(catalog.snapshot), level, executor)
    known, there = {(p.rule, p.place) for p in first}, {(p.rule, p.place) for p in again}
    found = [problem for problem in again if is_note(problem) or (problem.rule, problem.place) in known]
    once = [p for p in first if not is_note(p) and (p.rule, p.place) not in there]
    if once and not catalog.read_only:
        # Problems of a dataset that was dropped and freed between two passes do not concern the current atlas.
        with contextlib.suppress(AtlasError):
            named = asset_uids(catalog.current())
            once = [problem for problem in once if _groups_in(problem) <= named]
    if once:
        text = f"{len(once):,} problems were found by a first read and not by a second; the first was: {once[0].place}: {once[0].message}"
        found.append(AtlasProblem("seen-once", catalog.location.uri, text, _IN_FLIGHT))
    return found


def _groups_in(problem: AtlasProblem) -> set[str]:
    """Return the uids of the datasets, results and geometry stores whose groups a problem names."""
    return set(re.findall(r"([0-9a-f]{16})/", f"{problem.place} {problem.message}"))


def _check_once(catalog: Catalog, level: Level, executor: Executor | Workers | None) -> list[AtlasProblem]:
    """Run all checks of a level once."""
    problems: list[AtlasProblem] = []
    try:
        catalog = catalog.current()
        problems += _check_files(catalog, executor) if level == "deep" else []
        _validate(catalog, level, problems, executor)
    except WorkersError:
        raise
    except AtlasError as error:
        problems.append(AtlasProblem("unreadable", catalog.location.uri, str(error), _COPY))
    return problems


def _check_files(catalog: Catalog, executor: Executor | Workers | None) -> list[AtlasProblem]:
    if catalog.snapshot is not None:
        return check_files(catalog, [catalog.snapshot], head=False, executor=executor)
    return check_files(catalog, list_versions(catalog), head=True, executor=executor)


def _validate(
    catalog: Catalog, level: Level, problems: list[AtlasProblem], executor: Executor | Workers | None
) -> None:
    """Check everything except the table files, and append the problems; stop at the first part that cannot be read."""
    if not catalog.read_only:
        problems += _check_tables(catalog, _schemas(catalog))
        if any(problem.rule in {"missing-table", "table-columns"} for problem in problems):
            return
        problems += _check_versions(catalog)
        catalog = catalog.at(_tip_versions(catalog))
    found = _check_pinned(catalog)
    problems += found
    if found:
        return
    records = read_records(catalog)
    problems += _check_records(catalog, records)
    registries = {space: read_registry(catalog, space) for space in registry_tables(catalog)}
    for space, registry in registries.items():
        problems += _check_registry(registry)
        problems += check_identity(catalog, space, registry.table.column("uid"))
    layouts = read_layouts(catalog, {record.layout_uid for record in records})
    for record in {(r.layout_uid, r.feature_space, r.n_features): r for r in records}.values():
        problems += _check_layout(record, layouts.get(record.layout_uid), registries.get(record.feature_space))
    results = RESULT_ASSETS.read(catalog)
    problems += check_results(catalog, results)
    shapes = GEOMETRY_ASSETS.read(catalog)
    problems += check_geometries(catalog, shapes)
    groups = [*records, *(result.as_group(stored=True) for result in results if result.zarr_group)]
    if level != "quick":
        problems += check_rows(catalog, records)
        problems += _shared(catalog, [partial(check_arrays, catalog.arrays, group) for group in groups], executor)
        problems += check_shapes(catalog, shapes)
    if level == "deep":
        known = {record.uid for record in records}
        frames = [partial(check_frames, catalog, own) for own in group_by_dataset(records).values()]
        stores = [partial(check_store, catalog.arrays, record) for record in shapes if is_visible(record, known)]
        problems += _shared(catalog, [*frames, *stores], executor)
        problems += check_values(catalog, results)
        problems += [_hash_problem(layout) for layout in layouts.values() if layout_uid(layout.features) != layout.uid]
        problems += _shared(catalog, [partial(check_bytes, catalog, group) for group in groups], executor)


def _shared(
    catalog: Catalog, checks: Sequence[Callable[[], list[AtlasProblem]]], executor: Executor | Workers | None
) -> list[AtlasProblem]:
    """Run checks that read arrays or files, on workers if given; problems are in the order of the checks."""
    return [problem for found in in_order(run_tasks(checks, executor, place=catalog.location)) for problem in found]


def _tip_versions(catalog: Catalog) -> AtlasVersionRecord:
    """Return consistent table versions of the tip, without writing."""
    draft = consistent_versions(catalog, assign=False)
    for _ in range(_ATTEMPTS):
        if versions_exist(catalog, draft):
            break
        draft = consistent_versions(catalog, assign=False)
    return draft


def _check_tables(catalog: Catalog, wanted: Mapping[str, pa.Schema]) -> list[AtlasProblem]:
    problems = []
    for name, schema in wanted.items():
        try:
            there = catalog.tables.schema(name)
        except AtlasError as error:
            problems.append(AtlasProblem("missing-table", name, str(error), _COPY))
            continue
        wrong = [f.name for f in schema if f.name not in there.names or there.field(f.name).type != f.type]
        if wrong:
            problems.append(
                AtlasProblem("table-columns", name, f"the columns {wrong} are missing or have another type", _COPY)
            )
    return problems


def _schemas(catalog: Catalog) -> dict[str, pa.Schema]:
    """Return the columns that every table must have; the tables of results and geometry are optional."""
    results = {RESULTS: RESULTS_SCHEMA} if catalog.tables.has(RESULTS) else {}
    results |= {GEOMETRY: GEOMETRY_SCHEMA} if catalog.tables.has(GEOMETRY) else {}
    results |= {IDENTITY: IDENTITY_COLUMNS} if catalog.tables.has(IDENTITY) else {}
    results |= {LINKS: LINKS_SCHEMA} if catalog.tables.has(LINKS) else {}
    results |= {FACTS: FACTS_SCHEMA} if catalog.tables.has(FACTS) else {}
    results |= {GENE_TABLE: GENES_SCHEMA} if catalog.tables.has(GENE_TABLE) else {}
    results |= {ORTHOLOG_TABLE: ORTHOLOGS_SCHEMA} if catalog.tables.has(ORTHOLOG_TABLE) else {}
    return {CELLS: BASE_CELLS, DATASETS: DATASETS_SCHEMA, LAYOUTS: LAYOUTS_SCHEMA, **results}


def _check_pinned(catalog: Catalog) -> list[AtlasProblem]:
    """Check what must hold before anything else can be read: tables, columns, spaces of pointers, tags."""
    names = _schemas(catalog)
    # Registries from before symbols had a source get that column with the next features.
    registry = pa.schema([f for f in FeatureBaseSchema.arrow_schema() if f.name not in ("symbol_source", "other_type")])
    problems = _check_tables(catalog, names | dict.fromkeys(registry_tables(catalog).values(), registry))
    if problems:
        return problems
    spaces = catalog.spaces()
    for column, (space, kind) in pointer_columns(catalog.tables.schema(CELLS)).items():
        if space not in spaces:
            problems.append(
                AtlasProblem(
                    "unknown-space", CELLS, f"column {column!r} points into the unknown feature space {space!r}", _COPY
                )
            )
        elif spaces[space].kind is not kind:
            text = f"column {column!r} holds {kind.value} pointers into the {spaces[space].kind.value} space {space!r}"
            problems.append(AtlasProblem("space-kind", CELLS, text, _COPY))
    return problems


def _check_versions(catalog: Catalog) -> list[AtlasProblem]:
    """Check that every snapshot's table versions are there, and that no purge is half done."""
    problems = []
    unfinished = catalog.unfinished_purge()
    if unfinished is not None:
        text = f"the purge of dataset {unfinished.shown} is not finished; nothing can be written before it is"
        problems.append(
            AtlasProblem("unfinished-purge", VERSIONS, text, f"Run repair(), or purge({unfinished.uid!r}) again.")
        )
    tags: dict[str, dict[str, int]] = {}
    for record in list_versions(catalog):
        for name, version in record.table_versions.items():
            if name not in tags:
                tags[name] = catalog.tables.tags(name) if catalog.tables.has(name) else {}
            if tags[name].get(record.tag) == version or Tables(catalog.tables.location, {name: version}).has(name):
                continue
            text = f"version {version} of table {name!r} is gone"
            fix = f"Something other than this library cleaned up; delete the snapshot with delete_version({record.version})."
            problems.append(AtlasProblem("lost-version", f"snapshot {record.version}", text, fix))
    return problems


def _check_records(catalog: Catalog, records: Sequence[DatasetRecord]) -> list[AtlasProblem]:
    spaces, registries = catalog.spaces(), registry_tables(catalog)
    problems = []
    for group, n in Counter(record.zarr_group for record in records).items():
        if n > 1:
            problems.append(
                AtlasProblem(
                    "duplicate-record",
                    DATASETS,
                    f"{n} records name the group {group!r}",
                    "Run restore() of a snapshot.",
                )
            )
    problems += _check_duplicates(records)
    for record in records:
        space = spaces.get(record.feature_space)
        if space is None:
            text = f"its feature space {record.feature_space!r} is unknown"
            problems.append(AtlasProblem("unknown-space", record.zarr_group, text, "Define it with register_space()."))
        elif space.has_features and space.name not in registries:
            problems.append(
                AtlasProblem(
                    "missing-registry", space.registry, f"the features of {record.zarr_group} are not there", _COPY
                )
            )
        parts = record.zarr_group.split("/")
        if len(parts) != 2 or parts[0] != record.uid or any(not NAME.fullmatch(part) or ".." in part for part in parts):
            text = f"the group {record.zarr_group!r} is not below its dataset {record.uid!r}"
            problems.append(AtlasProblem("group-name", DATASETS, text, "Restore a snapshot."))
        problems += check_specs(record, space)
    return problems


def _check_duplicates(records: Sequence[DatasetRecord]) -> list[AtlasProblem]:
    """Find datasets with the same content, and datasets with the same name."""
    content: dict[tuple[str, str], dict[str, str]] = {}
    names: dict[str, list[str]] = {}
    for uid, own in group_by_dataset(records).items():
        if own[0].content_hash:
            content.setdefault((own[0].content_hash, own[0].feature_space), {})[uid] = own[0].name
        names.setdefault(own[0].name, []).append(uid)
    problems = []
    for same in content.values():
        if len(same) > 1:
            text = f"{len(same)} datasets hold the same cells, features and values: {_named(same)}"
            way_out = f"Keep one, and drop the others by their uids, e.g. drop_dataset({list(same)[-1]!r})."
            problems.append(AtlasProblem("duplicate-dataset", DATASETS, text, way_out))
    for name, uids in names.items():
        if name and len(uids) > 1:
            text = f"{len(uids)} datasets are called {name!r}: {uids}"
            problems.append(AtlasProblem("duplicate-name", DATASETS, text, "Use their uids."))
    return problems


def _named(datasets: Mapping[str, str]) -> str:
    return ", ".join(f"{name!r} ({uid})" for uid, name in datasets.items())


def _check_registry(registry: Registry) -> list[AtlasProblem]:
    place = f"{registry.space}_registry"
    problems = []
    n_twice = len(registry.uids) - len(registry.row_of)
    if n_twice:
        text = f"{n_twice:,} features are registered more than once"
        problems.append(AtlasProblem("duplicate-feature", place, text, "Restore the atlas from a copy."))
    index = registry.table.column("global_index")
    assigned = np.sort(index.drop_null().to_numpy())
    if not np.array_equal(assigned, np.arange(len(assigned))):
        text = f"the {len(assigned):,} assigned indices are not 0 to {len(assigned) - 1:,}, each once"
        problems.append(AtlasProblem("global-index", place, text, "Restore the atlas from a copy."))
    if len(assigned) < len(index):
        text = f"{len(index) - len(assigned):,} features have no index yet"
        problems.append(AtlasProblem("unassigned-index", place, text, "Run optimize()."))
    return problems


def _check_layout(record: DatasetRecord, layout: Layout | None, registry: Registry | None) -> list[AtlasProblem]:
    if registry is None or record.n_features == 0:
        return []
    place = f"layout {record.layout_uid}"
    back = f"Drop the dataset with drop_dataset({record.uid!r}) and add it again."
    if layout is None:
        return [AtlasProblem("missing-layout", place, f"the feature list of {record.zarr_group} is not there", back)]
    problems = []
    if len(layout.features) != record.n_features:
        text = f"it has {len(layout.features):,} features, {record.zarr_group} {record.n_features:,}"
        problems.append(AtlasProblem("layout-size", place, text, back))
    rows = np.array([registry.row_of.get(uid, -1) for uid in layout.features.tolist()], dtype=np.int64)
    if (rows < 0).any():
        text = f"{int((rows < 0).sum()):,} of its features are not in the registry of {record.feature_space!r}"
        problems.append(AtlasProblem("layout-features", place, text, back))
    known, has = rows[rows >= 0], layout.global_index[rows >= 0]
    if ((has != -1) & (has != registry.global_index[known])).any():  # -1: none yet
        text = "its feature indices are not those of the registry"
        problems.append(AtlasProblem("layout-index", place, text, "Restore the atlas from a copy."))
    if (has < 0).any():
        problems.append(
            AtlasProblem(
                "unassigned-index",
                place,
                f"{int((has < 0).sum()):,} of its features have no index yet",
                "Run optimize().",
            )
        )
    return problems


def _hash_problem(layout: Layout) -> AtlasProblem:
    return AtlasProblem(
        "layout-hash", f"layout {layout.uid}", "its feature list is not the one that was written", _COPY
    )
