"""Means of genes by groups of points, as `Query.aggregate` gives them for groups of cells."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import QueryError
from raggedatlas.wings.viewer.columns import PointColumn

MOST_GROUPS = 60
"""Categories of a column that means are offered for."""

Groups = Sequence[tuple[str, NDArray[np.int64]]]
"""Names of groups and the rows of their points; a point may be in several."""


def has_groups(column: PointColumn) -> bool:
    """Return whether means are offered by the categories of a column."""
    return column.kind == "category" and len(column.values.dictionary) <= MOST_GROUPS


def groups_of(column: PointColumn) -> Groups:
    """Return the points of each category in the order of the legend, those without one last.

    Examples
    --------
    >>> import pyarrow as pa
    >>> from raggedatlas.wings.viewer.columns import read_column
    >>> [(name, rows.tolist()) for name, rows in groups_of(read_column("type", pa.array(["T", None, "B", "T"])))]
    [('B', [2]), ('T', [0, 3]), ('missing', [1])]
    """
    if not has_groups(column):
        raise QueryError(f"Means are by a column of at most {MOST_GROUPS} categories, which {column.name!r} is not.")
    names = [*column.values.dictionary.to_pylist(), "missing"]
    codes = column.values.indices.fill_null(len(names) - 1).to_numpy(zero_copy_only=False)
    found = [(name, np.flatnonzero(codes == code)) for code, name in enumerate(names)]
    return [(name, rows) for name, rows in found if len(rows)]


def compute_means(genes: Mapping[str, NDArray[np.float32]], groups: Groups) -> dict[str, Any]:
    """Return the mean of each gene in each group, among the points that have a value.

    `genes` are values for every point, (n,), NaN where they were not measured; `groups` are names and rows,
    (n_points,). The result is ready for JSON: `genes`, `groups`, and `mean` (None where no point has a value),
    `count_nonzero` and `n_measured`, each a list of the groups' lists of a number for each gene.

    Examples
    --------
    >>> genes = {"LYZ": np.array([0.0, 3.0, np.nan], np.float32)}
    >>> found = compute_means(genes, [("B", np.array([0, 1])), ("T", np.array([2]))])
    >>> found["mean"], found["count_nonzero"], found["n_measured"]
    ([[1.5], [None]], [[1], [0]], [[2], [0]])
    """
    table: dict[str, list[list[Any]]] = {"mean": [], "count_nonzero": [], "n_measured": []}
    for _, rows in groups:
        known = [own[~np.isnan(own)] for own in (values[rows] for values in genes.values())]
        table["mean"].append([float(own.mean(dtype=np.float64)) if len(own) else None for own in known])
        table["count_nonzero"].append([int(np.count_nonzero(own)) for own in known])
        table["n_measured"].append([len(own) for own in known])
    return {"genes": list(genes), "groups": [name for name, _ in groups], **table}
