"""Centroids of shapes beside the values of cells: read with the cells, given like the vectors of a result."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.geometries import find_geometries, rows_of_stores
from raggedatlas.model.pointers import AXES, PointerKind
from raggedatlas.model.results import VALUES
from raggedatlas.model.spaces import FeatureSpace
from raggedatlas.query.parts import GroupPlan, HeldRows, PartPlan, SpacePlan
from raggedatlas.query.rows import Cells


def centroid_columns(catalog: Catalog, asked: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Name the parts of pointer columns that hold the asked centroids."""
    columns = dict.fromkeys(record.column for name, _ in asked for record in find_geometries(catalog, name))
    return tuple(f"{column}.{part}" for column in columns for part in ("zarr_group", *AXES))


def centroid_plans(catalog: Catalog, asked: Sequence[tuple[str, str]], cells: Cells) -> dict[str, SpacePlan]:
    """Plan centroids that were read with the cells: name in `obsm` -> plan, NaN where a cell has no shape."""
    return {key: _plan(catalog, name, key, cells) for name, key in asked}


def _plan(catalog: Catalog, name: str, key: str, cells: Cells) -> SpacePlan:
    values = centroids_of(catalog, name, cells)
    group = GroupPlan(key, "", None, {VALUES: HeldRows.of(values, catalog.arrays)})
    start = np.arange(cells.n, dtype=np.int64)
    part = PartPlan((VALUES,), (group,), np.zeros(cells.n, np.int32), start, start + 1)
    space = FeatureSpace(key, PointerKind.DENSE, has_features=False, is_counts=False)
    return SpacePlan(
        key, space, np.empty(0, object), values.shape[1], (), np.empty((0, 0), bool), {}, (part,),
        {VALUES: np.dtype(np.float64)}, np.full(cells.n, -1, np.int32), np.ones(cells.n, bool),
    )  # fmt: skip


def centroids_of(catalog: Catalog, name: str, cells: Cells) -> NDArray[np.float64]:
    """Give the centroids of cells that were read with `centroid_columns`, (n_cells, D); NaN where one has none."""
    records = find_geometries(catalog, name)
    n_dims = max(len(record.axes) for record in records)
    made = np.full((cells.n, n_dims), np.nan)
    for record, here in rows_of_stores(records, cells.table, name):
        for i, axis in enumerate(AXES[:n_dims]):
            made[here, i] = cells.table.column(f"{record.column}.{axis}").to_numpy()[here]
    return made
