"""Rows to reduce: of results that are there, or of cells as they are read; any of them, or all by the batch."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, QueryError, SourceError
from raggedatlas.loader.loader import Loader
from raggedatlas.query.plan import provenance
from raggedatlas.query.query import Query
from raggedatlas.wings.results.dataset import ResultDataset
from raggedatlas.wings.results.npy_results import load_results_dataset
from raggedatlas.wings.results.schema import DATA

VectorSource = ResultDataset | Query | str | os.PathLike[str]
"""Results, the folder of some, or a query."""


class ResultVectors:
    """Rows of an output of results, each flattened; a `column` of None takes ``data``."""

    def __init__(self, dataset: Any, column: str | None) -> None:  # noqa: ANN401  (a ResultDataset, or older results)
        self.dataset = dataset
        self._get = output_getter(dataset, DATA if column is None else column)
        self.n = len(dataset)
        if not self.n:
            raise SourceError(f"{dataset!r} has no rows; there is nothing to fit.")
        first = np.asarray(self._get(np.arange(1)))
        if first.dtype.kind not in "fiu":
            raise SourceError(f"{dataset!r} holds {first.dtype}; numbers are needed.")
        self.width = int(first[0].size)
        self.features: tuple[str, ...] = ()
        parent = os.fspath(dataset.data_location)
        kept = {name: value for name, value in getattr(dataset, "facts", {}).items() if name.startswith("atlas:")}
        self.facts: Mapping[str, str] = {**kept, "result:parent": parent}
        self.config: Mapping[str, Any] | None = None

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Read some rows, in the order given."""
        return np.asarray(self._get(rows)).reshape(len(rows), self.width)

    def batches(self, size: int) -> Iterator[tuple[Any, NDArray[Any]]]:
        """Iterate over ids and rows, in row order."""
        ids = self.dataset.ids()
        for start in range(0, self.n, size):
            rows = np.arange(start, min(start + size, self.n))
            yield ids[start : start + len(rows)], self.take(rows)


class QueryVectors:
    """Rows of one feature space of a query: an embedding's, or the values of features.

    `features` are the feature uids that a model was fitted with, in their order; none takes the query's.
    """

    def __init__(self, query: Query, features: Sequence[str] = ()) -> None:
        if features:
            query = query.features(list(features))
        self._query = query
        self._loader = Loader(query, 1024, shuffle=None, obs=[])
        self.n = self._loader.n_cells
        self.features = tuple(map(str, next(iter(self._loader.features.values()))))
        # Taken from one row, because an embedding has no features to count.
        self.width = int(self.take(np.arange(1)).shape[1])
        self.facts: Mapping[str, str] = atlas_facts(query)
        self.config: Mapping[str, Any] | None = {"atlas": provenance(query.spec, query.catalog)}
        self.dataset = None

    def take(self, rows: NDArray[np.int64]) -> Any:  # noqa: ANN401  (an array or a sparse one)
        """Read some rows, in the order given."""
        import scipy.sparse as sp

        parts = [batch.X for batch in self._loader.part(rows, drawn=False)]
        if sp.issparse(parts[0]):
            return sp.vstack(parts, format="csr")
        found = np.concatenate(parts)
        return found.reshape(len(found), -1)

    def batches(self, size: int) -> Iterator[tuple[Any, Any]]:
        """Iterate over ids and rows, in row order."""
        for batch in Loader(self._query, size, shuffle=None, obs=[]):
            yield batch.stored_uids, batch.X if hasattr(batch.X, "indptr") else batch.X.reshape(len(batch), -1)


def atlas_facts(query: Query) -> dict[str, str]:
    """Return where the cells of a query are from, for the metadata of a table of results."""
    source = provenance(query.spec, query.catalog)
    keys = {"atlas:uri": "uri", "atlas:version": "snapshot", "atlas:query": "summary"}
    return {name: str(source[key]) for name, key in keys.items()}


Vectors = ResultVectors | QueryVectors
"""Rows of numbers with ids, ``(n, width)``."""


def open_vectors(source: VectorSource, column: str | None = None, features: Sequence[str] = ()) -> Vectors:
    """Open what is to be reduced: results, the folder of some, or cells.

    `column` is an output of the results. `features` are the feature uids, in order, that the rows of a query must have;
    none where any will do.
    """
    if isinstance(source, Query):
        if column is not None:
            raise QueryError(f"A query has no output {column!r}; choose a feature space with .spaces(...).")
        return QueryVectors(source, features)
    return ResultVectors(open_results(source), column)


def open_results(results: Any) -> Any:  # noqa: ANN401  (a ResultDataset, or older results)
    """Open results by the folder that they are in; what is open already comes back as it is."""
    return load_results_dataset({}, results) if isinstance(results, str | os.PathLike) else results


def output_getter(dataset: Any, column: str) -> Any:  # noqa: ANN401  (a method)
    """Return the method that reads an output."""
    get = getattr(dataset, f"get_{column}", None)
    if get is None:
        offered = [each.name for each in getattr(dataset, "columns", ())] or [DATA]
        raise NotFoundError(f"{dataset!r} has no output {column!r}; it has {', '.join(offered)}.")
    return get


def log_normalize(values: Any, target_sum: float | None) -> Any:  # noqa: ANN401  (an array or a sparse one)
    """Scale the counts of each cell to a sum, and take log(1 + x); without a sum, values stay as they are.

    Examples
    --------
    >>> log_normalize(np.array([[1.0, 3.0]]), 4.0)
    array([[0.69314718, 1.38629436]])
    """
    if target_sum is None:
        return values
    sums = np.asarray(values.sum(axis=1), np.float64).reshape(-1)
    # A cell without counts keeps its zeros instead of becoming NaN.
    scale = np.divide(target_sum, sums, out=np.zeros_like(sums), where=sums > 0)
    if hasattr(values, "indptr"):
        import scipy.sparse as sp

        # As log(1 + 0) is 0, only stored entries change and the result stays sparse.
        data = np.log1p(values.data * np.repeat(scale, np.diff(values.indptr)))
        return sp.csr_array((data, values.indices, values.indptr), shape=values.shape)
    return np.log1p(values * scale[:, None])


def check_finite(values: Any, rows: NDArray[np.int64], what: str) -> None:  # noqa: ANN401  (an array or a sparse one)
    """Raise `SourceError`, which names the first such row, for values that are not finite.

    `values` are (k, width), dense or sparse CSR. `rows`, (k,), are the numbers of the rows, and `what` says who
    refuses, for the message.
    """
    sparse = hasattr(values, "indptr")
    held = np.isfinite(values.data if sparse else values)
    if held.all():
        return
    at = int(np.argmin(held)) if sparse else int(np.argmin(held.all(axis=1)))
    # The row of an entry; the right side skips empty rows, which begin at the same entry.
    row = int(np.searchsorted(values.indptr, at, side="right")) - 1 if sparse else at
    raise SourceError(f"{what}: row {rows[row]:,} holds a value that is not finite; leave such rows out, or fix them.")
