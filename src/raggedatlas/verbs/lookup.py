"""The verbs ``lookup`` and ``neighbors``: results of some cells, and cells whose results are alike."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, QueryError, SourceError
from raggedatlas.model.arguments import checked
from raggedatlas.query.query import Query
from raggedatlas.results.dataset import ResultDataset
from raggedatlas.results.folder import open_table
from raggedatlas.results.row_readers import has_deletions
from raggedatlas.results.schema import DATA
from raggedatlas.store.storage_errors import lance_errors
from raggedatlas.verbs.vector_index import (
    Neighbors,
    check_metric,
    exact_neighbors,
    exclude_self,
    read_index_report,
    search_index,
)
from raggedatlas.verbs.vector_sources import open_results, output_getter

# More ids are found by one scan of the id column instead of a filter that lists them.
_MAX_INDEX_LOOKUPS = 1000

Results = ResultDataset | str | os.PathLike[str]
"""Results, or the folder of some."""


@checked
def lookup(results: Results, uids: str | Sequence[str], *, column: str = DATA) -> Any:  # noqa: ANN401  (says Returns)
    """Find the results of cells by their uids.

    Parameters
    ----------
    results : ResultDataset, str or path
        Results, or the folder of some, in either format.
    uids : str or sequence of str
        One uid, or several.
    column : str
        Output.

    Returns
    -------
    (...) array or None; or dict of str to (...) array or None
        The result of one cell, None where it has none; of several, by uid in the order asked.

    Raises
    ------
    SourceError
        If a uid has several results.
    NotFoundError
        If there is no such output.

    Notes
    -----
    Where `save_to_database` has made an index over the uids, few of them are found by it, without reading the others.

    Examples
    --------
    >>> import tempfile
    >>> from raggedatlas import ResultDatasetWriter
    >>> folder = tempfile.mkdtemp()
    >>> with ResultDatasetWriter(folder) as writer:
    ...     writer.write_batch(["a", "b"], np.array([[1.0, 2.0], [3.0, 4.0]]))
    >>> lookup(folder, "b"), lookup(folder, ["c", "a"])
    (array([3., 4.]), {'c': None, 'a': array([1., 2.])})
    """
    dataset = open_results(results)
    asked = [uids] if isinstance(uids, str) else list(dict.fromkeys(map(str, uids)))
    rows = find_rows(dataset, asked)
    values = output_getter(dataset, column)(rows[rows >= 0])
    found = dict.fromkeys(asked)
    found.update(zip([uid for uid, row in zip(asked, rows, strict=True) if row >= 0], values, strict=True))
    return found[uids] if isinstance(uids, str) else found


def find_rows(dataset: Any, uids: Sequence[str]) -> NDArray[np.int64]:  # noqa: ANN401  (a ResultDataset, or older results)
    """Find the rows of uids, (n,) int64; -1 where there is none.

    Raises
    ------
    SourceError
        If a uid has several rows.
    """
    asked = pa.array(list(uids), pa.large_string())
    rows: NDArray[np.int64] = np.full(len(uids), -1, np.int64)
    found = (
        dataset.find_indexed(uids) if isinstance(dataset, ResultDataset) and len(uids) <= _MAX_INDEX_LOOKUPS else None
    )
    if found is None:
        known = dataset.ids().to_arrow().cast(pa.large_string())
        # which of the asked each row is: a uid with two rows is seen too
        places = pc.index_in(known, value_set=asked).fill_null(-1).to_numpy()
        found = np.flatnonzero(places >= 0), places[places >= 0]
    hit, position = found
    if len(hit) > len(np.unique(position)):
        twice = int(np.flatnonzero(np.bincount(position) > 1)[0])
        raise SourceError(
            f"{dataset!r} has {int((position == twice).sum())} results of {uids[twice]!r}; one is expected."
        )
    rows[position] = hit
    # Of a uid that is asked for twice, only the first position was given the row.
    repeated: NDArray[np.int64] = rows[pc.index_in(asked, value_set=asked).to_numpy()]
    return repeated


@checked
def neighbors(
    results: Results,
    of: str | Sequence[str] | NDArray[Any],
    *,
    k: int = 10,
    among: Query | None = None,
    column: str = DATA,
    metric: str = "l2",
    exact: bool = False,
) -> pa.Table:
    """Find the cells whose results are nearest to those of some cells, or to vectors.

    Parameters
    ----------
    results : ResultDataset, str or path
        Results, or the folder of some.
    of : str, sequence of str, (width,) or (q, width) array
        Uids of cells, which are never their own neighbours; or vectors.
    k : int
        Neighbours of each.
    among : Query or None
        Only cells of this query can be neighbours, e.g. ``view.query().where({"tissue": "lung"})``; its metadata columns, where it
        names some with ``.obs(...)``, come with the answer.
    column : str
        Output.
    metric : {"l2", "cosine", "dot"}
        Squared Euclidean distance, one minus the cosine, or one minus the dot product.
    exact : bool
        Compare every row even where there is an index.

    Returns
    -------
    pyarrow.Table
        A row for each neighbour, nearest first: ``query`` (uid, or number of the vector), ``rank`` (from 1), ``uid``, ``distance``,
        and the columns of `among`. Fewer than k where there are no more.

    Raises
    ------
    NotFoundError
        If a cell has no result.
    QueryError
        If the vectors do not fit the results, or hold NaN.

    Notes
    -----
    An index (`save_to_database`) answers where it was made for this metric, and `among` is not given: cells of a query are
    always compared exactly. Rows with NaN are never found.

    Examples
    --------
    >>> import tempfile
    >>> from raggedatlas import ResultDatasetWriter
    >>> folder = tempfile.mkdtemp()
    >>> with ResultDatasetWriter(folder) as writer:
    ...     writer.write_batch(["a", "b", "c"], np.array([[0.0], [5.0], [1.0]]))
    >>> neighbors(folder, "a", k=2).select(["uid", "distance"]).to_pylist()
    [{'uid': 'c', 'distance': 1.0}, {'uid': 'b', 'distance': 25.0}]
    """
    check_metric(metric)
    _check_k(k)
    dataset = open_results(results)
    names, vectors, without = _query_vectors(dataset, of, column)
    cells = None if among is None else among.to_arrow()
    rows = None
    if cells is not None:
        rows = find_rows(dataset, cells.column("uid").to_pylist())
        # `exact_neighbors` takes ascending rows; -1 marks cells of the query without a result.
        rows = np.sort(rows[rows >= 0])
    found: Neighbors | None = None
    if rows is None and not exact and isinstance(dataset, ResultDataset):
        found = _search_index(dataset, column, vectors, int(k), metric, without)
    if found is None:
        found = exact_neighbors(dataset, column, vectors, int(k), metric=metric, among=rows, without=without)
    return _to_table(dataset, names, found, _obs_columns(among, cells))


def _check_k(k: Any) -> None:  # noqa: ANN401  (checked here)
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise QueryError(f"k={k!r}; at least one neighbour is asked for.")


def _query_vectors(
    dataset: Any,  # noqa: ANN401
    of: Any,  # noqa: ANN401
    column: str,
) -> tuple[list[Any], NDArray[np.float64], NDArray[np.int64]]:
    """Return what each query is called, its vector, and its own row."""
    get = output_getter(dataset, column)
    first = np.asarray(get(np.arange(min(1, len(dataset)))))
    if not len(dataset) or first.dtype.kind not in "fiu":
        raise SourceError(f"{dataset!r} holds no vectors in {column!r}.")
    width = first[0].size
    if isinstance(of, str) or (not isinstance(of, np.ndarray) and all(isinstance(each, str) for each in of)):
        uids = [of] if isinstance(of, str) else list(of)
        rows = find_rows(dataset, uids)
        if (rows < 0).any():
            # -1 is the smallest, so this is the first cell without a row.
            missing = uids[int(np.argmin(rows))]
            raise NotFoundError(f"{dataset!r} has no result of the cell {missing!r}.")
        names: list[Any] = uids
        vectors = np.asarray(get(rows), np.float64).reshape(len(rows), width)
    else:
        try:
            vectors = np.atleast_2d(np.asarray(of, np.float64))
        except (TypeError, ValueError) as error:
            raise QueryError(f"Neighbours are asked for by uids or by vectors: {error}.") from error
        # -1 is no row: a vector has no cell to exclude from its neighbours.
        names, rows = list(range(len(vectors))), np.full(len(vectors), -1, np.int64)
    if vectors.ndim != 2 or vectors.shape[1] != width:
        raise QueryError(f"The vectors have the shape {vectors.shape}; those of {column!r} have {width} numbers.")
    if not np.isfinite(vectors).all():
        bad = names[int(np.argmin(np.isfinite(vectors).all(axis=1)))]
        raise QueryError(f"The vector of {bad!r} holds a value that is not finite; nothing is near to it.")
    return names, vectors, rows


def _search_index(
    dataset: ResultDataset,
    column: str,
    vectors: NDArray[np.float64],
    k: int,
    metric: str,
    without: NDArray[np.int64],
) -> Neighbors | None:
    """Search the index, if the newest version has one for this distance, and the rows of the dataset."""
    place = dataset.location
    with lance_errors(place.uri):
        table = open_table(place)
        report = read_index_report(table, column, metric)
        if report is None or not dataset.has_rows_of(table) or has_deletions(table):
            return None
        # the cell itself is among its neighbours
        found = search_index(table, vectors, k + 1, report)
    return exclude_self(found, without, k)


def _obs_columns(among: Query | None, cells: pa.Table | None) -> pa.Table | None:
    """Return the columns of the named cells."""
    if among is None or not among.spec.obs or cells is None:
        return None
    return cells.select(list(dict.fromkeys(["uid", *among.spec.obs])))


def _to_table(dataset: Any, names: Sequence[Any], found: Neighbors, cells: pa.Table | None) -> pa.Table:  # noqa: ANN401
    """Write the answer as a table."""
    # In row-major order, so by query and then by rank; -1 fills rows with fewer than k neighbours.
    query, rank = np.nonzero(found.rows >= 0)
    uids = dataset.ids().to_arrow().take(pa.array(found.rows[query, rank])).cast(pa.string())
    columns: Mapping[str, Any] = {
        "query": pa.array(names).take(pa.array(query)),
        "rank": pa.array(rank + 1),
        "uid": uids,
        "distance": pa.array(found.distances[query, rank]),
    }
    table = pa.table(dict(columns))
    if cells is None:
        return table
    at = pc.index_in(uids, value_set=cells.column("uid").cast(pa.string()).combine_chunks())
    for name in cells.column_names[1:]:
        table = table.append_column(name, cells.column(name).take(at))
    return table
