"""Members of `obsm` and colors of a result: those that its datasets share, model results, and centroids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import find_geometries, group_by_dataset, read_records, read_specs, rows_of_stores
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.errors import CorruptError, QueryError
from raggedatlas.model.assets import VALUES, ResultRecord, annotation_columns
from raggedatlas.model.frames import column_stacks, facts_of
from raggedatlas.model.pointers import AXES, PointerKind
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.spaces import FeatureSpace
from raggedatlas.query.cells import Cells
from raggedatlas.query.modalities import join_dtypes
from raggedatlas.query.read_plan import GroupPlan, InMemoryRows, PartPlan, ReadPlan, SpacePlan
from raggedatlas.store.arrays import ArraySpec
from raggedatlas.store.read import ArrayReader
from raggedatlas.store.sql import in_list

if TYPE_CHECKING:
    pass

OBSM = "obsm/"


@dataclass(frozen=True, slots=True)
class _Member:
    """One dataset's member of `obsm`: its values, and the type that they had in the file."""

    spec: ArraySpec
    dtype: np.dtype[Any]

    @property
    def width(self) -> int:
        return self.spec.shape[1]


def plan_obsm(plan: ReadPlan, space: SpacePlan, catalog: Catalog) -> dict[str, SpacePlan]:
    """Plan the members of `obsm` that a result has.

    Parameters
    ----------
    plan : ReadPlan
        For the cells.
    space : SpacePlan
        The space in X; for multimodal files, `obsm` of its modality is used.
    catalog : Catalog
        At the version of the plan.

    Returns
    -------
    dict of str to SpacePlan
        Name -> a plan with the layer `VALUES`. These are dense matrices that have the same width in every dataset of the result
        that has one of the name; cells of the others have NaN. Names for which that does not hold, or whose types have no
        common one that is exact, are left to the datasets.
    """
    part = space.parts[0]
    used = np.unique(part.code[part.code >= 0]).tolist()
    datasets = group_by_dataset(read_records(catalog))
    by_path = {record.zarr_group: record for records in datasets.values() for record in records}
    offered: dict[str, dict[int, _Member]] = {}
    if any(part.groups[code].path not in by_path for code in used):
        return {}  # X is a model's result, which is no file's
    for code in used:
        record = by_path[part.groups[code].path]
        for name, member in _members(record, datasets[record.uid]).items():
            offered.setdefault(name, {})[code] = member
    rows: NDArray[np.int64] | None = None
    found = {}
    for name, members in offered.items():
        lacking = len(members) < len(used) or bool((part.code < 0).any())
        dtype = join_dtypes({member.dtype for member in members.values()}, nan=lacking)
        if dtype is None or len({member.width for member in members.values()}) > 1:
            continue
        if rows is None:
            rows = part.start if space.space.kind is PointerKind.DENSE else _rows_of(plan, part, by_path, catalog)
        found[name] = _plan(name, members, (part, rows), (dtype, lacking), catalog)
    return found


def plan_colors(plan: ReadPlan, catalog: Catalog) -> dict[str, NDArray[np.object_]]:
    """Return ``<column>_colors`` for every categorical column of a result whose colors are known and agree.

    The colors of the newest annotation of a column come first. Where two datasets of the result have different colors for one category,
    the column has none. Other categories take the color of the first dataset of the atlas that has one.

    Returns
    -------
    dict of str to (n_categories,) object array
        In the order of the categories.
    """
    datasets = group_by_dataset(read_records(catalog))
    names = {records[0].name or uid: uid for uid, records in datasets.items()}
    used = set(pc.unique(plan.obs.column("dataset")).to_pylist()) if "dataset" in plan.obs.column_names else set()
    near = [names[name] for name in names if name in used]
    colors = {uid: _colors(datasets[uid]) for uid in [*near, *(uid for uid in datasets if uid not in near)]}
    schema = catalog.tables.schema(CELLS)
    stacks, annotated = column_stacks(schema), annotation_columns(schema)
    found = {}
    for field in plan.obs.schema:
        facts = facts_of(field)
        if facts is None or facts.kind != "categorical" or not facts.categories:
            continue
        stack = stacks.get(field.name, (field.name,))
        merged = _merged([colors[uid].get(stack[-1], {}) for uid in near])
        own: dict[str, str] = {}
        for column in reversed([column for column in stack if column in annotated]):
            own |= annotated[column].columns[field.name].colors
        if merged is None and not own:
            continue
        merged = {**(merged or {}), **own}
        for uid in datasets:
            merged = {**colors[uid].get(stack[-1], {}), **merged}
        listed = [merged.get(str(category)) for category in facts.categories]
        if None not in listed:
            found[f"{field.name}_colors"] = np.array(listed, dtype=object)
    return found


def _members(record: DatasetRecord, records: Sequence[DatasetRecord]) -> dict[str, _Member]:
    """Return the dense members of `obsm` of a dataset for the modality of one group, including those stored as embeddings."""
    own = record.file_facts.layers
    first = next(iter(own.values())).key if own else ""
    prefix = "/".join(first.split("/")[:2]) + "/" if first.startswith("mod/") else ""
    found = {}
    kept = read_specs(records[0])
    for key, extra in records[0].file_facts.extras.items():
        spec = kept.get(f"{extra.path}/data")
        if key.startswith(prefix + OBSM) and extra.form == "dense" and spec is not None and len(spec.shape) == 2:
            found[key.removeprefix(prefix + OBSM)] = _Member(spec, np.dtype(extra.dtype))
    for other in records:
        if other.zarr_group == record.zarr_group:
            continue
        specs = read_specs(other)
        for layer, fact in other.file_facts.layers.items():
            spec = specs.get(f"layers/{layer}")
            if fact.key.startswith(prefix + OBSM) and spec is not None and len(spec.shape) == 2:
                found[fact.key.removeprefix(prefix + OBSM)] = _Member(spec, np.dtype(fact.dtype))
    return found


def _rows_of(
    plan: ReadPlan, part: PartPlan, by_path: Mapping[str, DatasetRecord], catalog: Catalog
) -> NDArray[np.int64]:
    """Look up which row of its group each cell is, (n_cells,) int64."""
    rows = np.zeros(plan.n_cells, np.int64)
    uids = plan.obs.column("uid")
    pointers: dict[str, list[int]] = {}
    for code in np.unique(part.code[part.code >= 0]).tolist():
        pointers.setdefault(by_path[part.groups[code].path].pointer, []).append(code)
    for pointer, codes in pointers.items():
        wanted = [by_path[part.groups[code].path].uid for code in codes]
        column = f"{pointer}.zarr_row"
        table = catalog.tables.read(CELLS, ["uid", column], in_list("dataset_uid", wanted))
        here = np.flatnonzero(np.isin(part.code, codes))
        at = pc.index_in(uids.take(pa.array(here)), value_set=table.column("uid").combine_chunks())
        if at.null_count:
            raise CorruptError(
                f"{at.null_count:,} cells are not among those of the datasets {wanted}; run validate('deep'), and restore the atlas from a "
                "copy or a snapshot with restore()."
            )
        rows[here] = table.column(column).fill_null(0).to_numpy()[at.to_numpy()]
    return rows


def _plan(
    name: str,
    members: Mapping[int, _Member],
    where: tuple[PartPlan, NDArray[np.int64]],
    what: tuple[np.dtype[Any], bool],
    catalog: Catalog,
) -> SpacePlan:
    (part, rows), (dtype, lacking) = where, what
    groups = tuple(
        GroupPlan(part.groups[code].path, "", None, {VALUES: ArrayReader(catalog.arrays, member.spec)})
        for code, member in members.items()
    )
    moved = np.full(len(part.groups) + 1, -1, np.int32)
    moved[list(members)] = np.arange(len(groups))
    code = moved[part.code]
    width = next(iter(members.values())).width
    one = PartPlan((VALUES,), groups, code, rows, rows + (code >= 0))
    space = FeatureSpace(name, PointerKind.DENSE, has_features=False, is_counts=False)
    nothing = np.full(len(code), -1, np.int32)
    return SpacePlan(
        name, space, np.empty(0, object), width, (), np.empty((0, 0), bool), {}, (one,), {VALUES: dtype}, nothing, code >= 0, lacking,
    )  # fmt: skip


def _colors(records: Sequence[DatasetRecord]) -> dict[str, dict[str, str]]:
    return records[0].file_facts.colors


def _merged(parts: Sequence[Mapping[str, str]]) -> dict[str, str] | None:
    """Merge color maps; None if two differ."""
    merged: dict[str, str] = {}
    for part in parts:
        if any(merged.get(category, color).lower() != color.lower() for category, color in part.items()):
            return None
        merged = {**part, **merged}
    return merged


def centroid_columns(catalog: Catalog, asked: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Name the parts of pointer columns that hold the asked centroids."""
    columns = dict.fromkeys(record.column for name, _ in asked for record in find_geometries(catalog, name))
    return tuple(f"{column}.{part}" for column in columns for part in ("zarr_group", *AXES))


def centroid_plans(catalog: Catalog, asked: Sequence[tuple[str, str]], cells: Cells) -> dict[str, SpacePlan]:
    """Plan centroids that were read with the cells: name in `obsm` -> plan, NaN where a cell has no shape."""
    return {key: _plan_centroids(catalog, name, key, cells) for name, key in asked}


def _plan_centroids(catalog: Catalog, name: str, key: str, cells: Cells) -> SpacePlan:
    values = read_centroids(catalog, name, cells)
    group = GroupPlan(key, "", None, {VALUES: InMemoryRows.of(values, catalog.arrays)})
    start = np.arange(cells.n, dtype=np.int64)
    part = PartPlan((VALUES,), (group,), np.zeros(cells.n, np.int32), start, start + 1)
    space = FeatureSpace(key, PointerKind.DENSE, has_features=False, is_counts=False)
    return SpacePlan(
        key, space, np.empty(0, object), values.shape[1], (), np.empty((0, 0), bool), {}, (part,),
        {VALUES: np.dtype(np.float64)}, np.full(cells.n, -1, np.int32), np.ones(cells.n, bool),
    )  # fmt: skip


def read_centroids(catalog: Catalog, name: str, cells: Cells) -> NDArray[np.float64]:
    """Return the centroids of cells that were read with `centroid_columns`, (n_cells, D); NaN for cells without."""
    records = find_geometries(catalog, name)
    n_dims = max(len(record.axes) for record in records)
    made = np.full((cells.n, n_dims), np.nan)
    for record, here in rows_of_stores(records, cells.table, name):
        for i, axis in enumerate(AXES[:n_dims]):
            made[here, i] = cells.table.column(f"{record.column}.{axis}").to_numpy()[here]
    return made


def column_vectors(cells: Cells, column: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the vectors of a column that was read, and a mask of the cells that have one.

    Returns
    -------
    tuple of (n_valid, width) array and (n_cells,) bool
    """
    stored = cells.table.column(column).combine_chunks()
    valid: NDArray[np.bool_] = stored.is_valid().to_numpy(zero_copy_only=False)
    flat = stored.drop_null().flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(int(valid.sum()), stored.type.list_size), valid


def plan_vectors(record: ResultRecord, cells: Cells, catalog: Catalog) -> SpacePlan:
    """Plan the vectors of a column of the cell table, which were read with the cells, like those of a feature space."""
    values, valid = column_vectors(cells, record.column)
    group = GroupPlan(record.column, "", None, {VALUES: InMemoryRows.of(values, catalog.arrays)})
    start = np.maximum(np.cumsum(valid) - 1, 0)
    part = PartPlan((VALUES,), (group,), np.where(valid, 0, -1).astype(np.int32), start, start + valid)
    space = FeatureSpace(record.name, PointerKind.DENSE, has_features=False, is_counts=False)
    return SpacePlan(
        record.name, space, np.empty(0, object), record.width, (), np.empty((0, 0), bool), {}, (part,),
        {VALUES: np.dtype(record.dtype)}, np.full(cells.n, -1, np.int32), valid,
    )  # fmt: skip


def with_nan(plan: SpacePlan, dtype: np.dtype[Any] | None) -> SpacePlan:
    """Fill cells without a value with NaN, in a dtype that holds all values and NaN.

    Parameters
    ----------
    plan : SpacePlan
        Of a result.
    dtype : numpy dtype or None
        That dtype; None where there is none.

    Raises
    ------
    QueryError
        If there is none, and cells lack the result.
    """
    stored = plan.dtypes[VALUES]
    if plan.present.all():
        return plan
    if stored.kind != "f" and dtype is None:
        raise QueryError(
            f"The result {plan.name!r} is stored as {stored}, and no type holds these exactly together with NaN for the "
            f"{int((~plan.present).sum()):,} cells without it; leave them out with with_results({plan.name!r}, missing='drop')."
        )
    return replace(plan, nan=True, dtypes={VALUES: stored if stored.kind == "f" or dtype is None else dtype})
