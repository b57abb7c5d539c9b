"""Take, restore and drop snapshots, and compare two of them."""

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import (
    AssetKind,
    asset_columns,
    asset_kinds,
    group_by_dataset,
    purged,
    read_assets,
    read_records,
    refuse_unknown_assets,
    was_purged,
)
from raggedatlas.catalog.catalog import CELLS, DATASETS, VERSIONS, Catalog, open_held, wrong_columns
from raggedatlas.catalog.cells import complete_annotations, in_datasets, incomplete_columns, read_annotations
from raggedatlas.catalog.collectors import KEEP, Sweep
from raggedatlas.catalog.deletion import refuse_running_deletion
from raggedatlas.catalog.features import Registry, read_registry
from raggedatlas.catalog.genes import restore_tables
from raggedatlas.catalog.identity import restore_links, update_identity
from raggedatlas.catalog.integrity import last_manifest, recorded_hashes, seal_versions, write_manifest
from raggedatlas.catalog.optimization import WORTH_INDEXING, update_tables
from raggedatlas.catalog.versions import (
    change_versions,
    check_label,
    consistent_versions,
    find_version,
    for_tables,
    held_versions,
    list_versions,
    refuse_running_adds,
    registry_tables,
    untag_everywhere,
    versions_exist,
)
from raggedatlas.errors import (
    ArgumentError,
    AtlasError,
    ConflictError,
    CorruptError,
    DuplicateError,
    NotFoundError,
    SchemaError,
    StoreError,
)
from raggedatlas.model.assets import AnnotationRecord, AssetRecord
from raggedatlas.model.frames import column_stacks
from raggedatlas.model.records import DATASETS_SCHEMA, AtlasVersionRecord, datasets_from_table, utc_now
from raggedatlas.model.schemas import HoxBaseSchema
from raggedatlas.model.spaces import geometry_columns
from raggedatlas.model.wings import asset_tables
from raggedatlas.store.location import Location
from raggedatlas.store.runtime import submit
from raggedatlas.store.sources import Sources
from raggedatlas.store.sql import all_of, in_list, is_not_null
from raggedatlas.store.upkeep import count_old_versions

if TYPE_CHECKING:
    from raggedatlas.catalog.validation import ContentCheck
    from raggedatlas.model.reports import Difference, FileDifference, MaintenanceReport


def diff(catalog: Catalog, old: int | str, new: int | str) -> "Difference":
    """Compare two snapshots: datasets, cells, features, columns, results, geometry.

    Cells are matched by uid. One counts as changed when a metadata column that both snapshots have differs. Features
    count as changed when anything but their dense index and what they count as differs.
    """
    # Reports are imported where they are made, as a snapshot makes none.
    from raggedatlas.model.reports import Difference

    records = find_version(catalog, old), find_version(catalog, new)
    before, after = (catalog.at(record) for record in records)
    was, now = (group_by_dataset(read_records(view)) for view in (before, after))
    # Name as results show it -> stored name.
    stacks = [column_stacks(view.tables.schema(CELLS)) for view in (before, after)]
    columns = [{shown: stack[0] for shown, stack in found.items()} for found in stacks]
    shared = [(columns[0][name], columns[1][name]) for name in columns[0] if name in columns[1]]
    cells = _compare_cells(before, after, shared)
    assets = [
        {**{kind.table[1:]: kind.visible(view) for kind in asset_kinds()}, "annotations": read_annotations(view)}
        for view in (before, after)
    ]
    registries = [{space: read_registry(view, space) for space in registry_tables(view)} for view in (before, after)]
    features = {
        space: _compare_features(registries[0].get(space), registries[1].get(space))
        for space in sorted({*registries[0], *registries[1]})
    }
    return Difference(
        old=records[0].version,
        new=records[1].version,
        datasets_added=tuple(f"{r[0].name} ({uid})" for uid, r in now.items() if uid not in was),
        datasets_removed=tuple(f"{r[0].name} ({uid})" for uid, r in was.items() if uid not in now),
        cells_added=cells[0],
        cells_removed=cells[1],
        cells_changed=cells[2],
        features_added={space: found[0] for space, found in features.items() if found[0]},
        features_removed={space: found[1] for space, found in features.items() if found[1]},
        features_changed={space: found[2] for space, found in features.items() if found[2]},
        identity_added=_identity_beyond(registries[1], registries[0]),
        identity_removed=_identity_beyond(registries[0], registries[1]),
        columns_added=tuple(name for name in columns[1] if name not in columns[0]),
        columns_removed=tuple(name for name in columns[0] if name not in columns[1]),
        assets_added=_assets_beyond(assets[1], assets[0]),
        assets_removed=_assets_beyond(assets[0], assets[1]),
    )


def diff_files(catalog: Catalog, old: int | str, new: int | str, other: Catalog | None = None) -> "FileDifference":
    """Compare what two snapshots record of their files, without reading data.

    `new` is a snapshot of `other`, if given.
    """
    from raggedatlas.model.reports import FileDifference

    there = catalog if other is None else other
    records = find_version(catalog, old), find_version(there, new)
    roots = records[0].root_hash, records[1].root_hash
    if roots[0] == roots[1] != "":
        return FileDifference(records[0].version, records[1].version, *roots)
    was, now = recorded_hashes(catalog.at(records[0])), recorded_hashes(there.at(records[1]))
    return FileDifference(
        records[0].version,
        records[1].version,
        *roots,
        added=tuple(sorted(now.keys() - was)),
        removed=tuple(sorted(was.keys() - now)),
        changed=tuple(sorted(path for path in was.keys() & now if was[path] != now[path])),
    )


def _assets_beyond(
    of: Mapping[str, Sequence[AssetRecord | AnnotationRecord]],
    other: Mapping[str, Sequence[AssetRecord | AnnotationRecord]],
) -> dict[str, tuple[str, ...]]:
    """Return what only one of two snapshots has; what was replaced counts as new."""
    found: dict[str, tuple[str, ...]] = {}
    for noun, records in of.items():
        known = {record.uid for record in other[noun]}
        fresh = tuple(f"{record.name} ({record.uid})" for record in records if record.uid not in known)
        found |= {noun: fresh} if fresh else {}
    return found


def _identity_beyond(of: Mapping[str, Registry], other: Mapping[str, Registry]) -> dict[str, tuple[str, ...]]:
    """Return the features that count as another in one snapshot and not, or as yet another, in the other one."""
    found = {}
    for space, registry in of.items():
        known = other[space].redirects if space in other else {}
        fresh = {uid: into for uid, into in registry.redirects.items() if known.get(uid) != into}
        if fresh:
            names = zip(registry.names_of(fresh), registry.ids_of(fresh.values()), strict=True)
            found[space] = tuple(f"{name} = {identifier}" for name, identifier in names)
    return found


def _compare_cells(before: Catalog, after: Catalog, columns: list[tuple[str, str]]) -> tuple[int, int, int]:
    """Count the cells added, removed and changed, with one column at a time in memory."""
    uids: list[pa.Array] = []
    rows: list[NDArray[np.int64]] = []
    for view in (before, after):
        cells = view.tables.read(CELLS, ["uid", "dataset_uid"])
        visible = in_datasets(cells, {record.uid for record in read_records(view)})
        uids.append(cells.column("uid").filter(visible).combine_chunks())
        rows.append(np.flatnonzero(visible.to_numpy(zero_copy_only=False)))
    at = pc.index_in(uids[1], value_set=uids[0])
    shared = at.is_valid().to_numpy(zero_copy_only=False)
    rows_before, rows_after = rows[0][at.drop_null().to_numpy()], rows[1][shared]
    changed = np.zeros(len(rows_before), bool)
    # Two snapshots of one version can differ in which datasets are visible, but not in values.
    if before.tables.version(CELLS) == after.tables.version(CELLS):
        columns = []
    for old, new in (("cell_name", "cell_name"), *columns):
        changed |= _differs(_column(before, old, rows_before), _column(after, new, rows_after))
    n_shared = int(shared.sum())
    return len(uids[1]) - n_shared, len(uids[0]) - n_shared, int(changed.sum())


def _column(view: Catalog, name: str, rows: NDArray[np.int64]) -> pa.Array:
    return view.tables.read(CELLS, [name]).column(name).take(pa.array(rows)).combine_chunks()


def _differs(old: pa.Array, new: pa.Array) -> NDArray[np.bool_]:
    """Compare two columns by value; missing values are equal, and so are NaNs."""
    if old.type != new.type or pa.types.is_nested(old.type):
        pairs = zip(old.to_pylist(), new.to_pylist(), strict=True)
        return np.array([not (a == b or (a != a and b != b)) for a, b in pairs], dtype=bool)  # noqa: PLR0124  (NaN)
    same = pc.equal(old, new).fill_null(fill_value=False).to_numpy(zero_copy_only=False)
    missing = [one.is_null(nan_is_null=True).to_numpy(zero_copy_only=False) for one in (old, new)]
    both_null = missing[0] & missing[1]
    # Null and NaN are different, although `both_null` counts either as missing.
    mixed = old.is_null().to_numpy(zero_copy_only=False) != new.is_null().to_numpy(zero_copy_only=False)
    differs: NDArray[np.bool_] = ~(same | (both_null & ~mixed))
    return differs


def _compare_features(
    old: Registry | None, new: Registry | None
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    was = {} if old is None else _rows(old)
    now = {} if new is None else _rows(new)
    added = [uid for uid in now if uid not in was]
    removed = [uid for uid in was if uid not in now]
    changed = [uid for uid in now if uid in was and was[uid] != now[uid]]
    return (
        () if new is None else tuple(new.names_of(added)),
        () if old is None else tuple(old.names_of(removed)),
        () if new is None else tuple(new.names_of(changed)),
    )


def _rows(registry: Registry) -> dict[str, dict[str, Any]]:
    return {row["uid"]: {k: v for k, v in row.items() if k != "global_index"} for row in registry.table.to_pylist()}


_ATTEMPTS = 20

_LOOKED_BACK = 3
"""Snapshots that are tried as the one whose checks need not be repeated; something other than this library may have removed versions."""


def snapshot(catalog: Catalog, label: str | None = None) -> AtlasVersionRecord:
    """Record the exact version of every table.

    Refreshes, optimizes, chooses table versions that belong together, holds them by a provisional tag, validates
    exactly those, hashes their files (`write_manifest`), records them by a checked commit (parallel snapshots get
    different numbers), and tags them ``atlas-v<N>``. A process that dies on the way leaves either nothing or a recorded
    snapshot with at least the provisional tag, which clean-up turns into the final one. Datasets whose `add` is under
    way are left out. If validation finds problems, nothing is recorded, and it raises `CorruptError`.
    """
    catalog.require_writable("snapshot()")
    check_label(label)
    held = catalog.session("snapshot()")
    earlier = purged(held)
    try:
        record, listed = _snapshot(held, label, earlier)
        # Lance writes an overwrite as the version after the one that was read and does not check that it is the newest. If a complete purge has
        # run since and deleted that version, the record is in an old version that nobody reads. Another process may also have dropped it.
        if listed or not was_purged(held, earlier, "snapshot()"):
            return record
    except AtlasError:
        # What it was reading may be in the midst of being rewritten.
        if not was_purged(held, earlier, "snapshot()"):
            raise
    # A purge has begun and ended meanwhile.
    return snapshot(catalog, label)


def _snapshot(held: Catalog, label: str | None, earlier: Mapping[str, str]) -> tuple[AtlasVersionRecord, bool]:
    """Take a snapshot, unless a purge comes between (the `earlier` datasets had been purged before), and return whether it is in the list then."""
    records = list_versions(held)
    # To refuse early; `_record` checks again in the commit, since another snapshot may take the label meanwhile.
    _refuse_taken(records, label, held)
    last = records[-1] if records else None
    now = held_versions(held)
    # The tables are as a snapshot names them, so that nothing need be optimized, checked or hashed.
    if last is not None and now.table_versions == last.table_versions and now.spaces == last.spaces:
        draft = last.model_copy(update={"label": label, "created_at": utc_now()})
        # Another process may have dropped that snapshot, whose tags keep the versions.
        with contextlib.suppress(NotFoundError):
            # The content of the tags does not depend on the record, so both are made at the same time.
            making = submit(partial(_make_tags, held), last)
            record, records = _record(held, draft, earlier, required=last)
            tags = making.result()
            return record, _seal(held, record, records, tags)
    # Files are checked as they are, and not as a session may remember them.
    fresh = held.with_tables(held.tables.hold())
    steps: list[Callable[[], Any]] = [
        partial(update_tables, held, WORTH_INDEXING), partial(_last_readable, fresh, records), partial(last_manifest, held, records),
    ]  # fmt: skip
    changed, before, known = held.location.side_by_side(steps)

    def check(pinned: Catalog, draft: AtlasVersionRecord) -> list[Any] | AtlasError:
        steps: list[Callable[[], Any]] = [
            partial(_check, pinned, before), partial(write_manifest, held, draft.table_versions, *known),
        ]  # fmt: skip
        try:
            return held.location.side_by_side(steps)
        except AtlasError as error:
            return error

    draft, tag, tags, found = _hold(held, fresh, check, as_held=not {DATASETS, *asset_tables()} & {*changed})
    names, (checked, manifest) = [*draft.table_versions], found
    counts = {"n_cells": checked.n_cells, "n_datasets": checked.n_datasets, "ignored": checked.ignored}
    draft = draft.model_copy(update={"label": label, "created_at": utc_now(), "manifest": manifest, **counts})
    try:
        record, records = _record(held, draft, earlier)
    # Nothing was recorded. After other errors it may have been, and the provisional tag keeps its versions.
    except (DuplicateError, ConflictError):
        untag_everywhere(held, tag, names)
        raise

    def count_old(watched: Sequence[str]) -> dict[str, int]:
        return for_tables(held, lambda name: count_old_versions(held.tables, name, KEEP), watched)

    counting = submit(count_old, [*changed, VERSIONS])
    listed = _seal(held, record, records, tags, tag)
    # Remove the table versions that are older than those of readers of the tip, if there are any.
    n_old = counting.result()
    kept = {name: len({record.table_versions.get(name) for record in records}) for name in n_old}
    old = [name for name in n_old if n_old[name] > kept[name]]
    if old:
        Sweep(held, "optimize", tables=old).run()
        seal_versions(held)
    return record, listed


def _make_tags(catalog: Catalog, record: AtlasVersionRecord) -> dict[str, bytes]:
    """Return the content of the tags that keep the table versions of a snapshot: table -> content."""
    names = [*record.table_versions]
    return for_tables(catalog, lambda name: catalog.tables.make_tag(name, record.table_versions[name]), names)


def _tag(catalog: Catalog, record: AtlasVersionRecord, tag: str, made: Mapping[str, bytes]) -> None:
    """Tag the table versions of a snapshot."""
    for_tables(catalog, lambda name: catalog.tables.tag(name, tag, record.table_versions[name], made[name]), [*made])


def _seal(
    catalog: Catalog,
    record: AtlasVersionRecord,
    records: Sequence[AtlasVersionRecord],
    tags: Mapping[str, bytes],
    provisional: str = "",
) -> bool:
    """Tag a snapshot, record the hashes of the list of snapshots and of its tags, and return whether it is in the list."""
    path = catalog.tables.tag_file(record.tag)
    written = {f"{name}.lance/{path}": data for name, data in tags.items()}
    tagged = submit(partial(_tag, catalog, record, record.tag), tags)

    def untag(tag: str) -> None:
        # The final tags are there before the provisional ones are removed: the versions are never without a tag.
        tagged.result()
        if tag:
            untag_everywhere(catalog, tag, [*tags])

    untagged = submit(untag, provisional)
    try:
        return record in seal_versions(catalog, written, records, before=tagged.result)
    finally:
        untagged.result()


def _last_readable(catalog: Catalog, records: Sequence[AtlasVersionRecord]) -> Catalog | None:
    """Return the last snapshot whose tables can be opened; they are open."""
    for record in reversed(records[-_LOOKED_BACK:]):
        view = catalog.at(record)
        view.tables.open_all([*record.table_versions])
        if {*record.table_versions} <= {*view.tables.held()}:
            return view
    return None


def _check(pinned: Catalog, before: Catalog | None) -> "ContentCheck":
    """Check what has changed since an earlier snapshot; raise if there are problems that prevent a snapshot."""
    from raggedatlas.catalog.validation import check_content, validate

    found = check_content(pinned, "rows", before)
    if any(problem.level == "must" for problem in found.problems):
        # Again and everything: bytes may have been changed on their way, and what is reported is complete.
        problems = [problem for problem in validate(pinned, "rows") if problem.level == "must"]
        if problems:
            shown = "; ".join(str(problem) for problem in problems[:3])
            more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise CorruptError(
                f"No snapshot was taken, because {pinned.location.uri} is not sound: {shown}{more}. Run validate() and repair()."
            )
    return found


def open_latest(
    location: Location, *, schema: type[HoxBaseSchema] | None = None, arrays: Location | None = None, sources: Sources = "allow",
) -> Catalog:  # fmt: skip
    """Open the newest snapshot of an atlas.

    The columns of `schema` must be in the cell table, with these types (`SchemaError`). `arrays` is the Zarr store, if
    it is not next to the tables. `sources` is the rule of `SourceAccess`.
    """
    held = open_held(location, sources)
    view = held.tip().at(find_version(held))
    if arrays is not None:
        view = replace(view, arrays=arrays)
    if schema is not None:
        there = view.tables.schema(CELLS)
        if wrong := wrong_columns(there, schema.arrow_schema()):
            raise SchemaError(
                f"{schema.__name__} names the columns {wrong}, which the cells of {location.uri} lack or hold in another type; "
                f"they have {dict(zip(there.names, map(str, there.types), strict=True))}. Omit the schema, or correct it."
            )
    return view


def restore(catalog: Catalog, version: int | str) -> AtlasVersionRecord:
    """Make a snapshot's cells, datasets, results and feature links the current content; later snapshots do not change.

    Registries and layouts are not rolled back: a feature's dense index must never be given to another feature, and the
    indices that were assigned since stand in later snapshots. They only ever grow, so what the snapshot needs is in
    them. Feature spaces that were defined since stay known for the same reason. Commits come in an order that leaves a
    complete atlas wherever the process dies: datasets and results that go lose their records, then the cells become the
    snapshot's, then its others get their records back. Running it again finishes the job. While an `add` is under way,
    whose cells would be lost, it raises `ConflictError`.
    """
    held = catalog.session("restore()")
    earlier = purged(held)
    try:
        record = _restore(held, version, earlier)
        # A commit that replaces a table may be of an old version that nobody reads, if a complete purge has run since.
        held.tables.refresh([DATASETS])
        if purged(held) == earlier:
            return record
    except AtlasError:
        # What it was reading may be in the midst of being rewritten.
        if not was_purged(held, earlier, "restore()"):
            raise
    # A purge has begun and ended meanwhile.
    return restore(catalog, version)


def _restore(catalog: Catalog, version: int | str, earlier: Mapping[str, str]) -> AtlasVersionRecord:
    """Restore a snapshot in a session, in which the `earlier` datasets had been purged."""
    place = catalog.location
    record = find_version(catalog, version)
    then = catalog.at(record)
    refuse_unknown_assets(catalog, "restore()")
    steps: list[Callable[[], Any]] = [
        partial(read_assets, then),
        partial(then.tables.read, DATASETS),
        partial(read_assets, catalog),
        partial(refuse_running_adds, catalog, "restore()"),
        partial(refuse_running_deletion, catalog, "restore()"),
    ]
    assets, rows, now, *_ = place.side_by_side(steps)
    wanted = {r.zarr_group for r in datasets_from_table(rows)}
    gone = sorted({r.uid for r in read_records(catalog) if r.zarr_group not in wanted})
    later = {kind: {one.uid for one in now[kind]} - {one.uid for one in records} for kind, records in assets.items()}
    steps = [partial(kind.remove, catalog, uids) for kind, uids in later.items() if uids]
    steps += [partial(catalog.tables.delete, DATASETS, in_list("uid", gone))] if gone else []
    place.side_by_side(steps)
    _restore_cells(catalog, record)

    def once() -> None:
        at = catalog.tables.version(DATASETS)
        # By the version that the commit is based on: the rows may be of a dataset that is purged.
        if purged(catalog) == earlier:
            catalog.tables.overwrite(DATASETS, rows.cast(DATASETS_SCHEMA), at)

    def put_back(kind: AssetKind[Any], records: list[Any]) -> None:
        # Also when nothing changes, so that a process that is removing one of the datasets conflicts.
        kind.change(catalog, lambda _: records)

    steps = [partial(restore_links, catalog, then), partial(restore_tables, catalog, then)]
    steps.insert(0, partial(catalog.tables.retry, DATASETS, once))
    place.side_by_side(steps)
    if purged(catalog) != earlier:
        return record
    there = {kind: records for kind, records in assets.items() if records or catalog.tables.has(kind.table)}
    place.side_by_side([partial(put_back, kind, records) for kind, records in there.items()])
    steps = [partial(_restore_cells_again, catalog, then, record, {*rows.column("uid").to_pylist()})]
    steps.append(partial(update_identity, catalog, registry_tables(catalog)))
    place.side_by_side(steps)
    return record


def _restore_cells_again(
    catalog: Catalog, then: Catalog, record: AtlasVersionRecord, datasets: AbstractSet[str]
) -> None:
    """Bring back what others took from the cells of datasets before these, results and geometry had records again.

    Raises `ConflictError` if datasets were added meanwhile, whose cells would be lost.
    """
    # From here on, whoever removes cells, columns or pointers finds the records, or conflicts with this.
    catalog.tables.fence(CELLS)
    schema = catalog.tables.schema(CELLS)
    if asset_columns(catalog) <= {*schema.names}:
        inside = in_list("dataset_uid", sorted(datasets))
        # A column that is gone was dropped by a call that found the records again.
        pointers = {*geometry_columns(then.tables.schema(CELLS))} & {*schema.names}
        counted = [inside, *(all_of(inside, is_not_null(f"{name}.zarr_group")) for name in pointers)]
        steps = [partial(view.tables.count, CELLS, where) for view in (catalog, then) for where in counted]
        counts = catalog.location.side_by_side(steps)
        if all(now >= before for now, before in zip(counts[: len(counted)], counts[len(counted) :], strict=True)):
            return
    refuse_running_adds(catalog, "restore()")
    catalog.tables.refresh([DATASETS])
    if {one.uid for one in read_records(catalog)} - datasets:
        raise ConflictError(
            f"Other processes added to {catalog.location.uri}, and removed datasets, results or geometry, during restore(); run it again."
        )
    _restore_cells(catalog, record)


def _restore_cells(catalog: Catalog, record: AtlasVersionRecord) -> None:
    """Make the cells of a snapshot the current ones, apart from those of adds that were under way, which have no record."""
    catalog.tables.restore(CELLS, record.table_versions[CELLS])
    if record.ignored:
        catalog.tables.delete(CELLS, in_list("dataset_uid", record.ignored))


def drop_snapshot(catalog: Catalog, version: int | str) -> "MaintenanceReport":
    """Remove a snapshot from the list; `gc` frees what only it referenced. Its number is not given again."""
    catalog = catalog.session("drop_snapshot()")
    dropped = find_version(catalog, version)
    return _report_dropped(
        _forget(
            catalog,
            "drop_snapshot()",
            # Another process may have dropped it meanwhile, which `find_version` then says.
            lambda records: (
                [r for r in records if r.version == dropped.version] or [find_version(catalog, dropped.version)]
            ),
        )
    )


def expire_snapshots(
    catalog: Catalog,
    *,
    older_than: timedelta | None = None,
    keep_last: int | None = None,
    keep_labels: bool = True,
    dry_run: bool = False,
) -> "MaintenanceReport":
    """Remove old snapshots from the list, in one commit; `gc` frees what only they referenced.

    A snapshot goes if every given condition says so. The newest snapshot always stays. The notes of the report name the
    snapshots.
    """
    catalog = catalog.session("expire_snapshots()")
    if older_than is None and keep_last is None:
        raise ArgumentError(
            "expire_snapshots() takes older_than, keep_last or both; without either nothing says which snapshots are old."
        )
    if (older_than is not None and older_than < timedelta(0)) or (keep_last is not None and keep_last < 0):
        raise ArgumentError(
            f"expire_snapshots() takes older_than and keep_last of 0 or more, not {older_than} and {keep_last}."
        )
    now = datetime.now(UTC)

    def expired(records: list[AtlasVersionRecord]) -> list[AtlasVersionRecord]:
        # Not below 0, where a slice would count from the end: with more to keep than there are, none is old.
        old = records[: max(0, len(records) - max(1, keep_last or 0))]
        return [
            record
            for record in old
            if not (keep_labels and record.label)
            and (older_than is None or now - datetime.fromisoformat(record.created_at) > older_than)
        ]

    if dry_run:
        return _report_dropped(expired(list_versions(catalog)), dry_run=True)
    return _report_dropped(_forget(catalog, "expire_snapshots()", expired))


def _forget(
    catalog: Catalog, action: str, choose: Callable[[list[AtlasVersionRecord]], list[AtlasVersionRecord]]
) -> list[AtlasVersionRecord]:
    """Remove the snapshots that `choose` picks from the list, then their tags; return them."""
    dropped: list[AtlasVersionRecord] = []

    def without(old: list[AtlasVersionRecord]) -> list[AtlasVersionRecord]:
        catalog.refuse_unfinished_purge(action)
        # Replaced, not extended: `change_versions` calls this again after a lost race.
        dropped[:] = choose([record for record in old if record.table_versions])
        numbers = {record.version for record in dropped}
        if not numbers:
            return old
        kept = [record for record in old if record.version not in numbers]
        highest = max(record.version for record in old)
        # A row without tables reserves the highest number, so that it is not given again.
        return kept if kept and kept[-1].version == highest else [*kept, AtlasVersionRecord(version=highest)]

    change_versions(catalog, without)
    # The list before the tags: if the process dies in between, `gc` removes tags that no snapshot names.
    for record in dropped:
        untag_everywhere(catalog, record.tag, list(record.table_versions))
    if dropped:
        seal_versions(catalog)
    return dropped


def _report_dropped(records: Sequence[AtlasVersionRecord], *, dry_run: bool = False) -> "MaintenanceReport":
    from raggedatlas.model.reports import MaintenanceReport

    notes = [
        f"snapshot {record.version}{f' ({record.label})' if record.label else ''} of {record.created_at[:16].replace('T', ' ')}"
        for record in records
    ]
    notes.append("what no other snapshot needs stays until gc()" if records else "no snapshot goes")
    return MaintenanceReport(dry_run=dry_run, notes=tuple(notes))


def _hold(
    held: Catalog,
    fresh: Catalog,
    check: Callable[[Catalog, AtlasVersionRecord], list[Any] | AtlasError],
    *,
    as_held: bool,
) -> tuple[AtlasVersionRecord, str, dict[str, bytes], list[Any]]:
    """Choose table versions, tag them provisionally and check them.

    Repeats this if datasets vanish or a concurrent clean-up removes a version. `fresh` is a session of which nothing is
    known yet, in which the versions are opened. `check` gets the chosen versions, whose tables are open, and returns
    what it found, or an error, which counts unless a dataset has vanished. `as_held` says that the versions that are
    held belong together: nothing was committed to the records, so they are from before all other tables.

    Returns the chosen versions, the provisional tag, the file of the tag for each table, and what `check` found.
    """
    refuse_unknown_assets(held, "snapshot()")
    for attempt in range(_ATTEMPTS):
        was = held_versions(held).table_versions
        draft = held_versions(held) if as_held and attempt == 0 else consistent_versions(held)
        fixed = {CELLS, DATASETS, *asset_tables()}
        if {n: v for n, v in was.items() if n not in fixed} != {
            n: v for n, v in draft.table_versions.items() if n not in fixed
        }:
            # An `add` has brought features meanwhile, whose indices are to be assigned.
            update_tables(held, WORTH_INDEXING)
            continue
        # By the time in it, `gc` recognizes the tag of a process that died.
        tag = f"pending-{int(time.time())}-{secrets.token_hex(4)}"
        names = [*draft.table_versions]
        pinned = fresh.at(draft)
        there, found = False, list[Any]()
        steps: list[Callable[[], Any]] = [
            partial(_tag_provisionally, held, draft, tag),
            partial(pinned.tables.open_all, names),
        ]
        try:
            tags, _ = held.location.side_by_side(steps)
            # An `add` may have committed values below an annotation.
            if incomplete_columns(held.at(draft)):
                complete_annotations(held)
            else:
                steps = [partial(versions_exist, held, draft), partial(check, pinned, draft)]
                there, found = held.location.side_by_side(steps)
        except NotFoundError:
            pass
        except StoreError:
            untag_everywhere(held, tag, names)
            raise
        if there and not isinstance(found, AtlasError):
            return draft, tag, tags, found
        untag_everywhere(held, tag, names)
        if there:
            raise found
    raise ConflictError(
        f"Datasets of {held.location.uri} kept vanishing while a snapshot was tried {_ATTEMPTS} times; nothing was recorded. Run it again."
    )


def _tag_provisionally(catalog: Catalog, draft: AtlasVersionRecord, tag: str) -> dict[str, bytes]:
    made = _make_tags(catalog, draft)
    _tag(catalog, draft, tag, made)
    return made


def _refuse_taken(records: list[AtlasVersionRecord], label: str | None, catalog: Catalog) -> None:
    taken = next((r for r in records if label is not None and r.label == label), None)
    if taken is not None:
        raise DuplicateError(
            f"Snapshot {taken.version} of {catalog.location.uri} is labelled {label!r} already; choose another label."
        )


def _record(
    catalog: Catalog, draft: AtlasVersionRecord, earlier: Mapping[str, str], required: AtlasVersionRecord | None = None
) -> tuple[AtlasVersionRecord, list[AtlasVersionRecord]]:
    """Append a snapshot under the next free number, and return it and all.

    If an attempt was recorded although its commit seemed to fail, that record is returned. Raises `NotFoundError` if
    the snapshot `required` is not in the list any more.
    """
    tried: list[AtlasVersionRecord] = []

    def append(old: list[AtlasVersionRecord]) -> list[AtlasVersionRecord]:
        there = [record for record in old if record in tried]
        if there:
            tried.append(there[0])
            return old
        if required is not None and required not in old:
            raise NotFoundError(f"Snapshot {required.version} of {catalog.location.uri} was dropped.")
        _refuse_taken(old, draft.label, catalog)
        # A purge that began in the meantime has already listed the snapshots to rewrite, without this one. Its mark is a commit to their list,
        # so it is in `old`, or what is written here conflicts.
        mark = catalog.tables.known_purge()
        if mark is not None:
            raise mark.refusal("snapshot()", catalog.location.uri)
        # One that has ended since the last attempt has logged that before it took its mark away, and has deleted versions that are not in the list.
        catalog.tables.refresh([DATASETS] if tried else [])
        if purged(catalog) != earlier:
            raise ConflictError(f"A dataset of {catalog.location.uri} was purged during snapshot(); run it again.")
        number = max((record.version for record in old), default=0) + 1
        tried.append(draft.model_copy(update={"version": number}).sealed())
        # The new row has the highest number, so rows that only reserved one can go.
        return [*(record for record in old if record.table_versions), tried[-1]]

    records = change_versions(catalog, append)
    return tried[-1], [record for record in records if record.table_versions]
