"""Results of models in queries: as feature spaces, as what comes along in `obsm`, and as a list."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.datasets import read_records
from raggedatlas.catalog.results import read_results
from raggedatlas.errors import QueryError
from raggedatlas.model.pointers import PointerKind
from raggedatlas.model.results import VALUES, ResultRecord
from raggedatlas.model.spaces import FeatureSpace
from raggedatlas.query.layers import Modality
from raggedatlas.query.parts import GroupPlan, HeldRows, PartPlan, SpacePlan
from raggedatlas.query.rows import Cells

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "name", "kind", "space", "column", "width", "dtype", "n_cells", "model", "model_hash", "query", "snapshot", "parent",
    "source", "created_at", "content_hash", "uid",
)  # fmt: skip
"""What is told of a result in a list."""


def result_modalities(catalog: Catalog) -> dict[str, Modality]:
    """Give the results that are feature spaces: name -> modality, in which all datasets share one group."""
    spaces, found = catalog.spaces(), {}
    inventory = {record.uid for record in read_records(catalog)} if read_results(catalog) else set()
    for result in read_results(catalog):
        if result.kind != "space" or result.space not in spaces:
            continue
        group = (result.as_group(),)
        # the empty uid stands in where no dataset of it is left: an empty answer has its width
        records = {uid: group for uid in result.cells_of if uid in inventory} or {"": group}
        found[result.name] = Modality(result.name, spaces[result.space], records, is_result=True)
    return found


def vector_results(catalog: Catalog) -> dict[str, ResultRecord]:
    """Give the results that lie in the cell table: name -> record."""
    return {record.name: record for record in read_results(catalog) if record.kind == "vector"}


def vectors_of(cells: Cells, column: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Give the vectors of a column that was read, and which cells have one.

    Returns
    -------
    tuple of (n_valid, width) array and (n_cells,) bool
    """
    stored = cells.table.column(column).combine_chunks()
    valid: NDArray[np.bool_] = stored.is_valid().to_numpy(zero_copy_only=False)
    flat = stored.drop_null().flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(int(valid.sum()), stored.type.list_size), valid


def held_plan(record: ResultRecord, cells: Cells, catalog: Catalog) -> SpacePlan:
    """Plan the vectors of a column of the cell table, which were read with the cells, like those of a feature space."""
    values, valid = vectors_of(cells, record.column)
    group = GroupPlan(record.column, "", None, {VALUES: HeldRows.of(values, catalog.arrays)})
    start = np.maximum(np.cumsum(valid) - 1, 0)
    part = PartPlan((VALUES,), (group,), np.where(valid, 0, -1).astype(np.int32), start, start + valid)
    space = FeatureSpace(record.name, PointerKind.DENSE, has_features=False, is_counts=False)
    return SpacePlan(
        record.name, space, np.empty(0, object), record.width, (), np.empty((0, 0), bool), {}, (part,),
        {VALUES: np.dtype(record.dtype)}, np.full(cells.n, -1, np.int32), valid,
    )  # fmt: skip


def with_nan(plan: SpacePlan, dtype: np.dtype[Any] | None) -> SpacePlan:
    """Let NaN stand for what a cell lacks, in a dtype that holds all values and NaN.

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


def list_results(catalog: Catalog) -> "pd.DataFrame":
    """List the results of an atlas, in the order of adding.

    Returns
    -------
    pandas.DataFrame
        Indexed by name: kind, space, column, width, dtype, n_cells (of the datasets that are still there), model, model_hash,
        query, snapshot, parent, source, created_at, content_hash, uid.
    """
    import pandas as pd

    inventory = {record.uid for record in read_records(catalog)}
    rows = [_told(record, inventory) for record in read_results(catalog)]
    return pd.DataFrame(rows, columns=list(COLUMNS)).set_index("name")


def _told(record: ResultRecord, inventory: set[str]) -> Mapping[str, Any]:
    told = {name: getattr(record, name) for name in COLUMNS}
    return {**told, "n_cells": sum(n for uid, n in record.cells_of.items() if uid in inventory)}
