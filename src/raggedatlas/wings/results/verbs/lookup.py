"""The verbs ``lookup``, ``neighbors`` and ``save_to_database``: results of some cells, nearest rows exactly or by an index."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, NotFoundError, QueryError, SourceError
from raggedatlas.model.arguments import Progress, checked, no_progress
from raggedatlas.model.choices import METRICS
from raggedatlas.model.reports import Report
from raggedatlas.query.neighbors import Neighbors, exact_neighbors
from raggedatlas.query.query import Query
from raggedatlas.store.storage_errors import lance_errors
from raggedatlas.wings.results.dataset import ResultDataset
from raggedatlas.wings.results.folder import open_table, record_checksums
from raggedatlas.wings.results.npy_results import convert_results
from raggedatlas.wings.results.row_readers import has_deletions, row_numbers
from raggedatlas.wings.results.schema import DATA, OBJECT_ID
from raggedatlas.wings.results.verbs.vector_sources import open_results, output_getter

if TYPE_CHECKING:
    import lance


def exclude_self(found: Neighbors, own: NDArray[np.int64], k: int) -> Neighbors:
    """Leave the row that each vector belongs to out of what was found, and keep k.

    `found` has one more than k for each vector; `own`, (q,), is the row that is not to be found, -1 for none.

    Examples
    --------
    >>> exclude_self(Neighbors(np.array([[4, 7, 2]]), np.array([[0.0, 1.0, 3.0]])), np.array([4]), 2).rows.tolist()
    [[7, 2]]
    """
    kept = (found.rows >= 0) & (found.rows != own[:, None])
    # False sorts first: kept rows move to the front and stay nearest first, as the sort is stable.
    order = np.argsort(~kept, axis=1, kind="stable")[:, :k]
    kept = np.take_along_axis(kept, order, axis=1)
    return Neighbors(
        np.where(kept, np.take_along_axis(found.rows, order, axis=1), -1),
        np.where(kept, np.take_along_axis(found.distances, order, axis=1), np.nan),
    )


def check_metric(metric: str) -> None:
    """Raise for an unknown distance."""
    if metric not in METRICS:
        raise QueryError(f"There is no metric {metric!r}; there are {', '.join(METRICS)}.")


EXACT_ROWS = 50_000
"""Up to this number of rows all are compared, which takes milliseconds."""

INDEX_KIND = "IVF_SQ"
_SETTINGS = "raggedatlas:index:"
_ROWS_OF_PARTITION = 1024
_SEED = 0

REFINE = 4
"""So many times as many rows as asked for are compared by their full vectors."""


def count_partitions(n_rows: int) -> int:
    """Return the number of parts of an index."""
    return max(1, round(n_rows / _ROWS_OF_PARTITION))


def choose_nprobes(measure: Callable[[int], float], n_partitions: int, least_recall: float) -> tuple[int, float]:
    """Probe twice as many partitions until their recall, by `measure`, suffices; return their number and the recall.

    Examples
    --------
    >>> choose_nprobes(lambda nprobes: nprobes / 20, 18, 0.99)
    (18, 0.9)
    """
    nprobes = min(8, n_partitions)
    while (recall := measure(nprobes)) < least_recall and nprobes < n_partitions:
        nprobes = min(2 * nprobes, n_partitions)
    return nprobes, recall


@dataclass(frozen=True)
class IndexReport(Report):
    """How searches are answered, and with which recall."""

    column: str
    metric: str
    kind: str  # ``"exact"``: every row is compared; or ``"IVF_SQ"``
    n_rows: int
    n_partitions: int = 0  # parts of the index; 0 where every row is compared
    nprobes: int = 0  # number of partitions that a search looks at
    k: int = 0  # number of nearest rows that the recall counts, the row itself not among them
    n_queries: int = 0  # number of rows taken by chance, for which it was measured
    recall: float = 1.0  # share of the true nearest rows that a search finds; 1 where every row is compared

    def __repr__(self) -> str:
        """Return one line."""
        if self.kind == "exact":
            return f"{self.n_rows:,} rows of {self.column!r} are compared exactly ({self.metric}); no index is needed"
        return (
            f"{self.kind} over {self.n_rows:,} rows of {self.column!r} ({self.metric}), {self.nprobes} of {self.n_partitions} "
            f"partitions probed: recall@{self.k} {self.recall:.4f} over {self.n_queries} rows"
        )


@checked
def save_to_database(
    results: ResultDataset | str | os.PathLike[str],
    *,
    column: str = DATA,
    metric: str = "l2",
    least_rows: int = EXACT_ROWS,
    least_recall: float = 0.99,
    n_queries: int = 200,
    progress: Progress = no_progress,
) -> IndexReport:
    """Index the vectors of results in their own table, without a second copy.

    Parameters
    ----------
    results : ResultDataset, InferenceDataSet, str or path
        Committed results on this machine, or their folder. Results in ``.npy`` files that are to have an index are converted
        first, as `convert_results` does: compared bit by bit; the files are not changed.
    column : str
        Output with vectors.
    metric : {"l2", "cosine", "dot"}
        Distance by which is searched; ``l2`` is squared.
    least_rows : int
        Below, every row is compared and no index is made.
    least_recall : float
        Partitions are probed until so large a share of the ten nearest rows is found.
    n_queries : int
        Rows taken by chance, whose neighbours by the index are compared with the true ones.
    progress : callable
        Called as ``progress(step, done, total)``.

    Returns
    -------
    IndexReport
        With the recall that was measured.

    Raises
    ------
    QueryError, SourceError
        For numbers out of range, a column that holds no floats, or a table with deleted rows.
    StoreError
        If the place refuses.

    Notes
    -----
    Called again, it replaces the index. The uids get an index too, for `lookup`. Rows with NaN are never found. A table that is
    written again has no index.

    Examples
    --------
    >>> import tempfile
    >>> from raggedatlas import ResultDatasetWriter
    >>> folder = tempfile.mkdtemp()
    >>> with ResultDatasetWriter(folder) as writer:
    ...     writer.write_batch(["a", "b"], np.eye(2, dtype=np.float32))
    >>> print(save_to_database(folder, metric="cosine"))
    2 rows of 'data' are compared exactly (cosine); no index is needed
    """
    check_metric(metric)
    if not 0 < least_recall <= 1 or n_queries < 1 or least_rows < 0:
        raise QueryError(f"least_recall={least_recall}, n_queries={n_queries}, least_rows={least_rows} cannot be.")
    dataset = open_results(results)
    if isinstance(dataset, ResultDataset):
        # The newest version, which alone can be given an index.
        dataset = ResultDataset(**{**dataset.__getstate__(), "version": None})
    elif len(dataset) < max(least_rows, 2):
        _check_vector_column(dataset, column, dataset.get_data(slice(0, 1)).dtype)
        return IndexReport(column, metric, "exact", len(dataset))
    else:
        convert_results(dataset.data_location, progress=progress)
        dataset = ResultDataset({}, dataset.data_location)
    chosen = next((each for each in dataset.columns if each.name == column), None)
    _check_vector_column(dataset, column, None if chosen is None else chosen.dtype)
    place, n = dataset.location, len(dataset)
    name = f"{column}_vectors"
    with lance_errors(place.uri):
        table = open_table(place)
        if n < least_rows or n < 2:
            # An older index would answer instead of the rows.
            if any(each.name == name for each in table.describe_indices()):
                table.drop_index(name)
            return IndexReport(column, metric, "exact", n)
        if has_deletions(table):
            raise SourceError(
                f"{place.uri} holds deleted rows, which an index would count; remove them from its files with Lance's "
                "compact_files(materialize_deletions_threshold=0), then call again."
            )
        progress("index", 0, 2)
        if _SETTINGS + column in table.config():
            # Else a crash before the end leaves the record of the old index to the new one.
            table.delete_config_keys([_SETTINGS + column])
        table.create_scalar_index(OBJECT_ID, "BTREE", replace=True)
        parts = count_partitions(n)
        table = open_table(place)
        table = table.create_index(column, INDEX_KIND, name=name, metric=metric, num_partitions=parts, replace=True)
        progress("index", 1, 2)
        report = _measure_recall(
            dataset, table, IndexReport(column, metric, INDEX_KIND, n, parts), least_recall, n_queries
        )
        # After the index is complete: `read_index_report` ignores an index without a record.
        table.update_config({_SETTINGS + column: json.dumps(asdict(report))})
        progress("index", 2, 2)
    if place.is_local:
        record_checksums(place.path)
    return report


def _check_vector_column(dataset: Any, column: str, dtype: "np.dtype[Any] | None") -> None:  # noqa: ANN401
    if dtype is None or dtype.kind != "f" or (column != DATA and not isinstance(dataset, ResultDataset)):
        raise SourceError(f"{dataset!r} has no output {column!r} of floats; vectors are searched among those.")


def _measure_recall(
    dataset: ResultDataset, table: "lance.LanceDataset", report: IndexReport, least_recall: float, n_queries: int
) -> IndexReport:
    """Choose how many partitions are probed, so that enough of the true neighbours are found."""
    k = min(10, report.n_rows - 1)
    rows = np.sort(np.random.default_rng(_SEED).choice(report.n_rows, min(n_queries, report.n_rows), replace=False))
    vectors = np.asarray(getattr(dataset, f"get_{report.column}")(rows), np.float64).reshape(len(rows), -1)
    finite = np.isfinite(vectors).all(axis=1)
    rows, vectors = rows[finite], vectors[finite]
    # a row is not its own neighbour; counting it would raise the recall
    true = exact_neighbors(
        getattr(dataset, f"get_{report.column}"), len(dataset), vectors, k, metric=report.metric, without=rows
    )

    def measure(nprobes: int) -> float:
        found = search_index(table, vectors, k + 1, replace(report, nprobes=nprobes))
        return compute_recall(exclude_self(found, rows, k), true)

    nprobes, recall = choose_nprobes(measure, report.n_partitions, least_recall)
    return replace(report, nprobes=nprobes, k=k, n_queries=len(rows), recall=recall)


def compute_recall(found: Neighbors, true: Neighbors) -> float:
    """Return the share of the true nearest rows among the result; rows at the distance of the last true one count too.

    Examples
    --------
    >>> true = Neighbors(np.array([[4, 7]]), np.array([[0.0, 1.0]]))
    >>> compute_recall(Neighbors(np.array([[4, 9]]), np.array([[0.0, 3.0]])), true)
    0.5
    """
    wanted = true.rows >= 0
    if not wanted.any():
        return 1.0
    last = np.nanmax(np.where(wanted, true.distances, -np.inf), axis=1, keepdims=True)
    same = (found.rows[:, :, None] == true.rows[:, None, :]).any(axis=2)
    with np.errstate(invalid="ignore"):
        as_near = found.distances <= last + 1e-6 * np.abs(last)
    hits = ((same | as_near) & (found.rows >= 0)).sum(axis=1)
    # Ties with the last true row can give more hits than there are true rows.
    return float(np.minimum(hits, wanted.sum(axis=1)).sum() / wanted.sum())


def read_index_report(table: "lance.LanceDataset", column: str, metric: str) -> IndexReport | None:
    """Return the search parameters of a column's index; None without a measured index for this distance."""
    if not any(each.name == f"{column}_vectors" for each in table.describe_indices()):
        return None
    stored = table.config().get(_SETTINGS + column)
    try:
        report = None if stored is None else IndexReport(**json.loads(stored))
    except (TypeError, ValueError, RecursionError) as error:
        raise CorruptError(f"{table.uri}: what is noted of the index of {column!r} does not read: {error}.") from error
    return report if report is not None and report.metric == metric else None


def search_index(table: "lance.LanceDataset", vectors: NDArray[np.float64], k: int, report: IndexReport) -> Neighbors:
    """Search the index for the nearest rows of each vector."""
    rows = np.full((len(vectors), k), -1, np.int64)
    distances = np.full((len(vectors), k), np.nan)
    numbers = row_numbers(table)
    settings = {
        "column": report.column, "k": k, "metric": report.metric, "nprobes": report.nprobes, "refine_factor": REFINE,
    }  # fmt: skip
    for query, vector in enumerate(vectors):
        nearest = {**settings, "q": vector.astype(np.float32)}
        found = table.to_table(columns=["_distance"], nearest=nearest, with_row_address=True)
        own, near = numbers(found), found.column("_distance").to_numpy()
        order = np.lexsort((own, near))
        rows[query, : len(own)] = own[order]
        distances[query, : len(own)] = near[order]
    return Neighbors(rows, distances)


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
    """Find the rows of uids, (n,) int64; -1 where there is none. Raises `SourceError` if a uid has several rows."""
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
        If the vectors do not fit the results, or hold NaN; or one is of zeros under ``cosine``.

    Notes
    -----
    An index (`save_to_database`) answers where it was made for this metric, and `among` is not given: cells of a query are
    always compared exactly. Rows with NaN are never found, nor rows of zeros under ``cosine``: they have no direction.

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
    if k < 1:
        raise QueryError(f"k={k!r}; at least one neighbour is asked for.")
    dataset = open_results(results)
    names, vectors, without = _query_vectors(dataset, of, column)
    if metric == "cosine" and not vectors.any(axis=1).all():
        bad = names[int(np.argmin(vectors.any(axis=1)))]
        raise QueryError(
            f"The vector of {bad!r} is of zeros and has no direction, so nothing is near it under cosine; take metric='l2'."
        )
    cells = None if among is None else among.to_arrow()
    rows = None
    if cells is not None:
        rows = find_rows(dataset, cells.column("uid").to_pylist())
        # `exact_neighbors` takes ascending rows; -1 marks cells of the query without a result.
        rows = np.sort(rows[rows >= 0])
    found: Neighbors | None = None
    if rows is None and not exact and isinstance(dataset, ResultDataset):
        with lance_errors(dataset.location.uri):
            table = open_table(dataset.location)
            report = read_index_report(table, column, metric)
            # The newest version has an index for this distance, and the rows of the dataset.
            if report is not None and dataset.has_rows_of(table) and not has_deletions(table):
                # the cell itself is among its neighbours
                found = exclude_self(search_index(table, vectors, int(k) + 1, report), without, int(k))
    if found is None:
        found = exact_neighbors(
            getattr(dataset, f"get_{column}"), len(dataset), vectors, int(k), metric=metric, among=rows, without=without
        )
    # In row-major order, so by query and then by rank; -1 fills rows with fewer than k neighbours.
    query, rank = np.nonzero(found.rows >= 0)
    uids = dataset.ids().to_arrow().take(pa.array(found.rows[query, rank])).cast(pa.string())
    answer = pa.table(
        {
            "query": pa.array(names).take(pa.array(query)),
            "rank": pa.array(rank + 1),
            "uid": uids,
            "distance": pa.array(found.distances[query, rank]),
        }
    )
    if cells is not None and among is not None and among.spec.obs:
        at = pc.index_in(uids, value_set=cells.column("uid").cast(pa.string()).combine_chunks())
        for name in dict.fromkeys(among.spec.obs):
            # Appended, because a column of the cells may be called "rank" or "distance" too.
            answer = answer if name == "uid" else answer.append_column(name, cells.column(name).take(at))
    return answer


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
