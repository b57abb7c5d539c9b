"""An index over a result that lies in the cell table, where its cells are many; its recall is measured, never assumed."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.ingest.result_plan import ResultPlan
from raggedatlas.model.results import IndexFacts, ResultRecord
from raggedatlas.store.storage_errors import lance_errors

if TYPE_CHECKING:
    import lance

INDEXED_CELLS = 50_000
"""Up to so many cells all are compared, which takes milliseconds."""

_ROWS_OF_PARTITION = 1024
_LEAST_RECALL = 0.99
_K, _QUERIES, _REFINE = 10, 50, 4


def index_result(catalog: Catalog, plan: ResultPlan, record: ResultRecord) -> ResultRecord:
    """Build an index where a result has many cells, and note how it must be asked.

    Partitions are probed until 99 % of the true neighbours of cells taken by chance are found.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    plan : ResultPlan
        For the vectors.
    record : ResultRecord
        With its column; nobody sees it yet.

    Returns
    -------
    ResultRecord
        With `index`: kind, n_partitions, nprobes, recall, k, n_queries; as it was where every cell is compared.
    """
    if record.kind != "vector" or record.n_cells <= INDEXED_CELLS:
        return record
    parts = max(1, round(record.n_cells / _ROWS_OF_PARTITION))
    catalog.tables.index_vectors(CELLS, record.column, record.metric, parts)
    chosen = np.sort(np.random.default_rng(0).choice(len(plan.rows), min(_QUERIES, len(plan.rows)), replace=False))
    vectors = plan.read(plan.rows[chosen])
    table = catalog.tables.open(CELLS)
    with lance_errors(table.uri):
        own = plan.uids.take(pa.array(chosen)).to_pylist()
        true = [_nearest(table, record, *each, {"use_index": False}) for each in zip(own, vectors, strict=True)]
        nprobes = min(8, parts)
        while True:
            asked = {"minimum_nprobes": nprobes, "maximum_nprobes": nprobes, "refine_factor": _REFINE}
            found = [_nearest(table, record, *each, asked) for each in zip(own, vectors, strict=True)]
            recall = float(np.mean([_recall(f, t) for f, t in zip(found, true, strict=True)]))
            if recall >= _LEAST_RECALL or nprobes >= parts:
                break
            nprobes = min(2 * nprobes, parts)
    facts = IndexFacts(kind="IVF_SQ", n_partitions=parts, nprobes=nprobes, recall=recall, k=_K, n_queries=len(chosen))
    return record.model_copy(update={"index": facts.model_dump_json()})


def _nearest(
    table: "lance.LanceDataset", record: ResultRecord, own: str, vector: NDArray[Any], asked: dict[str, Any]
) -> NDArray[np.float64]:
    """Give the distances of the nearest other cells, ascending: a cell is not its own neighbour."""
    nearest = {"column": record.column, "q": vector.astype(np.float32), "k": _K + 1, "metric": record.metric, **asked}
    found = table.to_table(columns=["uid", "_distance"], nearest=nearest)
    others = found.filter(pc.field("uid") != own)
    return np.sort(others.column("_distance").to_numpy().astype(np.float64))[:_K]


def _recall(found: NDArray[np.float64], true: NDArray[np.float64]) -> float:
    """Give the share of what was found that is as near as the last true neighbour."""
    if not len(true):
        return 1.0
    return float((found <= true[-1] + 1e-5 * (abs(true[-1]) + 1)).sum() / len(true))
