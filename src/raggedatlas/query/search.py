"""Ranked searches over cells: nearest vectors and full text."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.errors import ArgumentError, QueryError
from raggedatlas.model.arguments import brief
from raggedatlas.model.assets import ResultRecord
from raggedatlas.model.choices import METRICS, refuse_unused
from raggedatlas.query.cells import DATASET_UID, Cells, cell_columns, column_vectors, read_cells
from raggedatlas.query.modalities import SpacePointers, choose_layers, plan_parts, read_modalities, vector_results
from raggedatlas.query.neighbors import block_distances
from raggedatlas.query.spec import QuerySpec, Search, check_count
from raggedatlas.store.filters import Columns, to_sql
from raggedatlas.store.read import read_rows
from raggedatlas.store.sql import all_of, in_list
from raggedatlas.store.sql_parser import as_filter
from raggedatlas.store.storage_errors import filter_errors
from raggedatlas.store.tables import ROW_ID, index_serves

if TYPE_CHECKING:
    import lance

DISTANCE, SCORE = "search_distance", "search_score"
"""Columns that a search adds to `obs`."""

EXACT_CELLS = 50_000
"""Up to this many cells are compared exactly, even with an index."""

REFINE = 4
"""How many times as many candidates of an index are compared by their true vectors."""

_BLOCK_ROWS = 65_536
_WORD = re.compile(r"\w+")
_UID = re.compile("[0-9a-f]{16}")


def make_search(query: Any, column: str, k: int, metric: str, catalog: Catalog) -> Search:  # noqa: ANN401  (text or numbers)
    """Check the arguments of `Query.search`, which says what is refused."""
    if metric not in METRICS:
        raise QueryError(f"search knows the metrics {METRICS}, not {metric!r}.")
    try:
        asked: str | tuple[float, ...] = (
            query if isinstance(query, str) else tuple(np.asarray(query, np.float64).ravel().tolist())
        )
    except (TypeError, ValueError):
        raise ArgumentError(f"search() takes query as text or a vector of numbers, not {brief(query)}.") from None
    # NaN in a vector would make every distance NaN, and the search find nothing.
    if not asked or (not isinstance(asked, str) and not np.isfinite(asked).all()):
        raise QueryError("search needs some text, or a vector of finite numbers.")
    search = Search(asked, column, check_count("search", k), metric)
    known, vectors = read_modalities(catalog), vector_results(catalog)
    search_columns(search, cell_columns(catalog), known, vectors)
    is_text = isinstance(asked, str) and column not in known and column not in vectors
    refuse_unused("search", "in a column of text", metric=is_text and metric != "l2")
    return search


def search_columns(
    search: Search, columns: Columns, known: Mapping[str, SpacePointers], vectors: Mapping[str, ResultRecord]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the stored columns and the pointer columns that a search needs.

    `known` are the feature spaces, `vectors` the results in the cell table; the latter need none, as they are read when
    they are compared. Raises `QueryError` if the column is unknown, or cannot be searched in that way.
    """
    text = isinstance(search.query, str)
    if text and (search.column in known or search.column in vectors) and not _UID.fullmatch(str(search.query)):
        raise QueryError(
            f"{search.column!r} holds vectors, among which a vector or the uid of a cell (16 hex digits) is looked for, not "
            f"{search.query!r}; text is found in text columns."
        )
    if search.column in known:
        modality = known[search.column]
        if modality.space.has_features or modality.space.rank != 1:
            raise QueryError(
                f"{search.column!r} cannot be searched: only vectors are found in embeddings, and text in text columns."
            )
        return (), modality.pointers
    if search.column in vectors:
        return (), ()
    target = columns.target(search.column)
    if isinstance(search.query, str):
        if target.family != "text":
            raise QueryError(f"search({search.query!r}) needs a text column; {target.name!r} holds {target.type}.")
        return (target.name,), ()
    listed = (pa.types.is_list, pa.types.is_fixed_size_list, pa.types.is_large_list)
    if not any(is_list(target.type) for is_list in listed) or not pa.types.is_floating(target.type.value_type):
        raise QueryError(
            f"A vector cannot be searched for in {target.name!r}, which holds {target.type}; name an embedding or a column of vectors."
        )
    return (target.name,), ()


def rank_cells(cells: Cells, spec: QuerySpec, catalog: Catalog, known: Mapping[str, SpacePointers]) -> Cells:
    """Keep the best cells of a search, best first; ties in table order.

    `rank` of the cells gets the column ``search_distance`` (vectors) or ``search_score`` (text).
    """
    search, vectors = spec.search, vector_results(catalog)
    assert search is not None
    name = DISTANCE
    if search.column in known or search.column in vectors:
        rows, values = _nearest_cells(cells, spec, catalog, known.get(search.column) or vectors[search.column])
    elif isinstance(search.query, str):
        name, texts = SCORE, cells.table.column(cells.columns.stored(search.column)).to_pylist()
        values = text_scores(texts, search.query)
        # A text without any of the words is no match; NaN leaves it out.
        rows = _best(np.where(values > 0, -values, np.nan), search.k)
        values = values[rows]
    else:
        values = np.full(cells.n, np.nan)
        stored = cells.table.column(cells.columns.stored(search.column)).combine_chunks()
        valid = np.flatnonzero(stored.is_valid().to_numpy(zero_copy_only=False))
        lengths = set(pc.list_value_length(stored).drop_null().unique().to_pylist())
        if len(lengths) > 1:
            raise QueryError(
                f"The vectors of {search.column!r} have different lengths: {sorted(lengths)}; choose cells that agree with .where(...)."
            )
        if len(valid):
            width = lengths.pop()
            flat = stored.drop_null().flatten().to_numpy(zero_copy_only=False).reshape(len(valid), width)
            values[valid] = distances(flat, _checked(search, width), search.metric)
        rows = _best(values, search.k)
        values = values[rows]
    return replace(cells.take(rows), rank=pa.table({name: pa.array(values, pa.float64())}))


def distances(vectors: NDArray[Any], query: NDArray[np.float64], metric: str) -> NDArray[np.float64]:
    """Return the distances of vectors, (n, d), to a query, (d,); smaller is nearer, NaN for what is never a neighbor.

    These are vectors with a number that is not finite, and under ``cosine`` those of zeros, which have no direction.
    The distance is squared Euclidean ("l2"), one minus the cosine, or one minus the dot product.
    """
    wide = vectors.astype(np.float64)
    sound = np.isfinite(wide).all(axis=1)
    made, wide = np.full(len(wide), np.nan), wide[sound]
    made[sound] = ((wide - query) ** 2).sum(axis=1) if metric == "l2" else block_distances(wide, query[None], metric)[0]
    return made


def _best(values: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Return the rows of the k smallest numbers, ascending, ties in order; NaN is skipped."""
    rows = np.flatnonzero(~np.isnan(values))
    return rows[np.argsort(values[rows], kind="stable")[:k]]


def _checked(search: Search, width: int) -> NDArray[np.float64]:
    vector = np.asarray(search.query, np.float64)
    if len(vector) != width:
        raise QueryError(f"The vector has {len(vector)} numbers, those of {search.column!r} have {width}.")
    if search.metric == "cosine" and not vector.any():
        raise QueryError(
            "A vector of zeros has no direction, so nothing is near it under cosine; search with metric='l2'."
        )
    return vector


def _nearest_cells(
    cells: Cells, spec: QuerySpec, catalog: Catalog, among: SpacePointers | ResultRecord
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Find the cells nearest to a vector, or to a cell that is named by its uid and never its own neighbour."""
    search = spec.search
    assert search is not None
    k, uid = search.k, search.query if isinstance(search.query, str) else None
    if uid is not None:
        vector = _vector_of(uid, search.column, catalog, cells.columns, among)
        if not np.isfinite(vector).all():
            raise QueryError(
                f"search({uid!r}, column={search.column!r}): the vector of this cell has numbers that are not finite, so it has no neighbors; "
                "give a vector, or another cell."
            )
        # One more, because the cell itself is found too, and removed below.
        search = replace(search, query=tuple(vector.astype(np.float64).tolist()), k=k + 1)
    if isinstance(among, SpacePointers):
        values = np.full(cells.n, np.nan)
        for block, vectors in _embedded(cells, catalog, among):
            values[block] = distances(vectors, _checked(search, vectors.shape[1]), search.metric)
        rows = _best(values, search.k)
        values = values[rows]
    else:
        # Hides cells of datasets without a record, which `read_cells` drops after reading.
        shown, where = in_list(DATASET_UID, cells.columns.datasets), to_sql(spec.filters, cells.columns)
        where = shown if where is None else all_of(where, shown)
        rows, values = _nearest_result(cells, search, where, catalog, among)
    if uid is not None:
        others = pc.not_equal(cells.table.column("uid").take(pa.array(rows)), uid).to_numpy()
        rows, values = rows[others], values[others]
    return rows[:k], values[:k]


def _vector_of(
    uid: str, name: str, catalog: Catalog, columns: Columns, among: SpacePointers | ResultRecord
) -> NDArray[np.floating[Any]]:
    """Read the vector of one cell; raises `QueryError` if there is no such cell, or it has none."""
    only = QuerySpec(filters=(as_filter({"uid": uid}),))
    if isinstance(among, ResultRecord):
        cell = read_cells(catalog, only, columns, (among.column,), ())
        found = column_vectors(cell, among.column)[0] if cell.n else np.empty((0, 0))
    else:
        cell = read_cells(catalog, only, columns, (), among.pointers)
        found = next((vectors for _, vectors in _embedded(cell, catalog, among)), np.empty((0, 0)))
    if not len(found):
        lacks = "has no vector there" if cell.n else "is no cell of this snapshot"
        raise QueryError(
            f"search({uid!r}, column={name!r}): {uid!r} {lacks}; name a cell by its uid, or give a vector."
        )
    return np.asarray(found[0])


def _nearest_result(
    cells: Cells, search: Search, where: str, catalog: Catalog, record: ResultRecord
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Compare the vectors of a column of the cell table: by its index where cells are many and it has one, else each."""
    table = catalog.tables.open(CELLS)
    vector = _checked(search, record.width)
    facts, is_indexed = record.index_facts, False
    if cells.n > EXACT_CELLS and facts and search.metric == record.metric:
        own = [index for index in table.describe_indices() if record.column in [str(f) for f in index.field_names]]
        is_indexed = any(kind in str(index.index_type).upper() for index in own for kind in ("IVF", "HNSW", "VECTOR"))
    if facts and is_indexed:
        return _from_index(cells, table, where, {
            "column": record.column, "q": vector.astype(np.float32), "k": search.k, "metric": search.metric,
            "minimum_nprobes": facts.nprobes, "refine_factor": REFINE,
        })  # fmt: skip
    values = np.full(cells.n, np.nan)
    row_ids = cells.table.column(ROW_ID).to_numpy()
    with filter_errors(where, table):
        serves = index_serves(table, where)
        for batch in table.to_batches(columns=[record.column], filter=where, with_row_id=True, use_scalar_index=serves):
            batch = batch.filter(batch.column(record.column).is_valid())  # noqa: PLW2901
            flat = batch.column(record.column).flatten().to_numpy(zero_copy_only=False)
            # Cells were read with the same conditions, in the order of row ids, so that every row here is among them.
            at = np.searchsorted(row_ids, batch.column(ROW_ID).to_numpy())
            values[at] = distances(flat.reshape(batch.num_rows, record.width), vector, search.metric)
    rows = _best(values, search.k)
    return rows, values[rows]


def _embedded(
    cells: Cells, catalog: Catalog, modality: SpacePointers
) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
    """Iterate over the vectors of a feature space, with the rows of their cells."""
    datasets = modality.touched(cells)
    if not datasets:
        return
    layers = choose_layers(modality, datasets, ())
    (part,) = plan_parts(modality, datasets, layers, cells, catalog)
    for i, group in enumerate(part.groups):
        (reader,) = group.layers.values()
        here = np.flatnonzero(part.code == i)
        # Ceiling division: the number of blocks, of which only one is in memory.
        for block in np.array_split(here, -(-len(here) // _BLOCK_ROWS)) if len(here) else ():
            yield block, read_rows(reader, part.start[block])


def text_scores(texts: list[str | None], query: str) -> NDArray[np.float64]:
    """Score texts by the words of a query that they hold (BM25 over these texts, case-insensitive, no stemming).

    The score, (n,), is 0 where a text holds none of the words.
    """
    wanted = set(_WORD.findall(query.casefold()))
    words = [_WORD.findall(text.casefold()) if text else [] for text in texts]
    lengths = np.array([len(w) for w in words], np.float64)
    mean = lengths.mean() if lengths.sum() else 1.0
    scores = np.zeros(len(texts))
    # Sorted: the order of a set of texts changes from process to process, and sums of floats with it.
    for word in sorted(wanted):
        counts = np.array([w.count(word) for w in words], np.float64)
        held = int((counts > 0).sum())
        weight = np.log(1 + (len(texts) - held + 0.5) / (held + 0.5))
        # BM25 with k1 = 1.2 and b = 0.75; 2.2 is k1 + 1.
        scores += weight * counts * 2.2 / (counts + 1.2 * (0.25 + 0.75 * lengths / mean))
    return scores


def _from_index(
    cells: Cells, table: "lance.LanceDataset", where: str, nearest: dict[str, Any]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Query an index and map its rows to the cells; ties in table order."""
    with filter_errors(where, table):
        # With `prefilter`, else Lance filters the k best of all rows and returns fewer than k.
        # The search asks its own index in any case; that of the filter only where it serves.
        found = table.to_table(
            columns=["uid", "_distance"], filter=where, prefilter=True, with_row_id=True, nearest=nearest,
            use_scalar_index=index_serves(table, where),
        )  # fmt: skip
    ids, values = found.column(ROW_ID).to_numpy(), found.column("_distance").to_numpy().astype(np.float64)
    # An index may hold vectors without a distance; Lance sorts them last.
    ids, values = ids[~np.isnan(values)], values[~np.isnan(values)]
    order = np.lexsort((ids, values))
    row_ids = cells.table.column(ROW_ID).to_numpy()
    at = np.searchsorted(row_ids, ids[order])
    # The search finds a place for any id; only ids that are there are kept.
    kept = at < len(row_ids)
    kept[kept] = row_ids[at[kept]] == ids[order][kept]
    return at[kept], values[order][kept]
