"""The difference between two snapshots."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.annotations import read_annotations
from raggedatlas.catalog.assets import RESULT_ASSETS, group_by_dataset, read_geometries, read_records
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.features import Registry, read_registry
from raggedatlas.catalog.versions import find_version, registry_tables
from raggedatlas.model.frames import column_stacks
from raggedatlas.model.reports import Difference


def diff(catalog: Catalog, old: int | str, new: int | str) -> Difference:
    """Compare two snapshots: datasets, cells, features, columns, results, geometry.

    Parameters
    ----------
    catalog : Catalog
        At the tip or pinned.
    old, new : int or str
        Numbers or labels.

    Returns
    -------
    Difference
        Cells are matched by uid. One counts as changed when a metadata column that both snapshots have differs. Features
        count as changed when anything but their dense index and what they count as differs.

    Raises
    ------
    NotFoundError
        If there is no such snapshot.
    """
    records = find_version(catalog, old), find_version(catalog, new)
    before, after = (catalog.at(record) for record in records)
    was, now = (group_by_dataset(read_records(view)) for view in (before, after))
    columns = [_columns(view) for view in (before, after)]
    shared = [(columns[0][name], columns[1][name]) for name in columns[0] if name in columns[1]]
    cells = _compare_cells(before, after, shared)
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
        results_added=_results_beyond(after, before),
        results_removed=_results_beyond(before, after),
        geometry_added=_geometry_beyond(after, before),
        geometry_removed=_geometry_beyond(before, after),
        annotations_added=_annotations_beyond(after, before),
        annotations_removed=_annotations_beyond(before, after),
    )


def _columns(view: Catalog) -> dict[str, str]:
    """Return the metadata columns of a snapshot: name as results show it -> stored name."""
    return {shown: stack[0] for shown, stack in column_stacks(view.tables.schema(CELLS)).items()}


def _annotations_beyond(view: Catalog, other: Catalog) -> tuple[str, ...]:
    """Return the annotations that only one of two snapshots has."""
    known = {record.uid for record in read_annotations(other)}
    return tuple(f"{record.name} ({record.uid})" for record in read_annotations(view) if record.uid not in known)


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


def _results_beyond(view: Catalog, other: Catalog) -> tuple[str, ...]:
    """Return the results that only one of two snapshots has; a replaced result counts as a new one."""
    known = {record.uid for record in RESULT_ASSETS.read(other)}
    return tuple(f"{record.name} ({record.uid})" for record in RESULT_ASSETS.read(view) if record.uid not in known)


def _geometry_beyond(view: Catalog, other: Catalog) -> tuple[str, ...]:
    """Return the geometry stores that only one of two snapshots has; a replaced store counts as a new one."""
    known = {record.uid for record in read_geometries(other)}
    return tuple(f"{record.name} ({record.uid})" for record in read_geometries(view) if record.uid not in known)


def _compare_cells(before: Catalog, after: Catalog, columns: list[tuple[str, str]]) -> tuple[int, int, int]:
    """Count the cells added, removed and changed, with one column at a time in memory."""
    uids = [_cell_uids(view) for view in (before, after)]
    at = pc.index_in(uids[1][0], value_set=uids[0][0])
    shared = at.is_valid().to_numpy(zero_copy_only=False)
    rows_before = uids[0][1][at.drop_null().to_numpy()]
    rows_after = uids[1][1][shared]
    changed = np.zeros(len(rows_before), bool)
    if _same_table(before, after):
        columns = []
    for old, new in (("cell_name", "cell_name"), *columns):
        changed |= _differs(_column(before, old, rows_before), _column(after, new, rows_after))
    n_shared = int(shared.sum())
    return len(uids[1][0]) - n_shared, len(uids[0][0]) - n_shared, int(changed.sum())


def _same_table(before: Catalog, after: Catalog) -> bool:
    return before.tables.version(CELLS) == after.tables.version(CELLS)


def _cell_uids(view: Catalog) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the uids of all visible cells, and their rows in the table."""
    rows = view.tables.read(CELLS, ["uid", "dataset_uid"])
    datasets = pa.array(sorted({record.uid for record in read_records(view)}), pa.string())
    seen = pc.is_in(rows.column("dataset_uid"), value_set=datasets)
    uids = rows.column("uid").filter(seen).combine_chunks()
    return uids, np.flatnonzero(seen.to_numpy(zero_copy_only=False))


def _column(view: Catalog, name: str, rows: NDArray[np.int64]) -> pa.Array:
    return view.tables.read(CELLS, [name]).column(name).take(pa.array(rows)).combine_chunks()


def _differs(old: pa.Array, new: pa.Array) -> NDArray[np.bool_]:
    """Compare two columns by value; missing values are equal, and so are NaNs."""
    if old.type != new.type or pa.types.is_nested(old.type):
        return np.array([not _equal(a, b) for a, b in zip(old.to_pylist(), new.to_pylist(), strict=True)], dtype=bool)
    same = pc.equal(old, new).fill_null(fill_value=False).to_numpy(zero_copy_only=False)
    both_null = old.is_null(nan_is_null=True).to_numpy(zero_copy_only=False) & new.is_null(nan_is_null=True).to_numpy(
        zero_copy_only=False
    )
    mixed = old.is_null().to_numpy(zero_copy_only=False) != new.is_null().to_numpy(zero_copy_only=False)
    differs: NDArray[np.bool_] = ~(same | (both_null & ~mixed))
    return differs


def _equal(a: Any, b: Any) -> bool:  # noqa: ANN401  (values of any column)
    return bool(a == b or (a != a and b != b))  # noqa: PLR0124  (NaN)


def _compare_features(
    old: Registry | None, new: Registry | None
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    was = {} if old is None else _rows(old)
    now = {} if new is None else _rows(new)
    added = [uid for uid in now if uid not in was]
    removed = [uid for uid in was if uid not in now]
    changed = [uid for uid in now if uid in was and was[uid] != now[uid]]
    name_new = [] if new is None else [new.names_of(added), new.names_of(changed)]
    name_old = [] if old is None else old.names_of(removed)
    return tuple(name_new[0] if name_new else ()), tuple(name_old), tuple(name_new[1] if name_new else ())


def _rows(registry: Registry) -> dict[str, dict[str, Any]]:
    return {
        row["uid"]: {k: v for k, v in row.items() if k not in ("global_index", "redirect")}
        for row in registry.table.to_pylist()
    }
