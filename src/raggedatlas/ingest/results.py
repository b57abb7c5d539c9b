"""Add a model's result: values first, not yet visible; one commit of cells; its row of the registry last (seed 003)."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import RESULT_ASSETS, release_lease, take_lease
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.errors import AtlasError, DuplicateError, SchemaError, StoreError
from raggedatlas.ingest.group_writer import specs_json
from raggedatlas.ingest.options import open_progress, read_options
from raggedatlas.ingest.result_plan import BLOCK_ROWS, ResultOptions, ResultPlan, plan_result, result_exists
from raggedatlas.model.arguments import Progress
from raggedatlas.model.assets import VALUES, IndexFacts, ResultRecord, mark_result, result_columns
from raggedatlas.model.reports import ResultReport
from raggedatlas.model.spaces import PointerKind, pointer_field
from raggedatlas.store.arrays import ArrayWriter, create_group
from raggedatlas.store.storage_errors import lance_errors
from raggedatlas.store.tables import Tables

if TYPE_CHECKING:
    import lance

RESULT_STEPS = ("plan", "lease", "block", "arrays", "column", "index", "record", "done")
"""The steps of adding a result, in order; each is reported just before the next begins."""


def add_results(
    catalog: Catalog,
    source: Any,  # noqa: ANN401  (ResultDataset, InferenceDataSet, or a folder)
    choices: Mapping[str, Any],
    progress: Progress | bool | None = None,  # noqa: FBT001  (passed on as the caller gave it)
) -> ResultReport:
    """Add a model's result to existing cells, joined by uid.

    Nothing of it is visible before its row in ``_results``, which is the last write. A process killed on the way leaves
    nothing visible; the call can be run again, and `repair` and `gc` free what was left.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    source : ResultDataset, InferenceDataSet, str or path
        Committed results.
    choices : mapping
        Keyword arguments of `ResultOptions`.
    progress : callable, bool or None
        A callback; None draws a bar on a terminal, False draws nothing.

    Returns
    -------
    ResultReport
        What was done.

    Raises
    ------
    AtlasError
        As `plan_result` refuses; and if another process takes the name meanwhile. The atlas is as it was.
    """
    catalog.require_tip("add()")
    options = read_options(ResultOptions, choices, "add() of results")
    with open_progress(progress, options.name or "add") as callback:
        return _add(catalog, source, options, callback)


def _add(catalog: Catalog, source: Any, options: ResultOptions, progress: Progress) -> ResultReport:  # noqa: ANN401
    progress("plan", 0, 1)
    plan = plan_result(catalog, source, options)
    if plan.skipped or options.dry_run:
        return _report(plan, "skipped" if plan.skipped else "dry run")
    uid, written = plan.record.uid, plan.record
    try:
        take_lease(catalog, uid)
        progress("lease", 1, 1)
        if plan.record.kind == "space":
            written = _write_array(catalog, plan, progress)
        progress("arrays", 1, 1)
        written = _fill_column(catalog, plan, written)
        progress("column", 1, 1)
        written = index_result(catalog, plan, written)
        progress("index", 1, 1)
        gone = _commit(catalog, written, options)
        progress("record", 1, 1)
    except BaseException:
        _discard(catalog, uid)
        raise
    # Another process took the name since the plan, and duplicates are skipped.
    if gone is None:
        _discard(catalog, uid)
        return _report(plan, "skipped")
    with contextlib.suppress(StoreError):
        # The group of vectors holds nothing but the lease.
        if written.kind == "vector":
            catalog.arrays.child(uid).delete_prefix()
        else:
            release_lease(catalog, uid)
    # Only now: before the commit, queries used the columns of the replaced result.
    catalog.tables.drop_columns(CELLS, gone)
    progress("done", 1, 1)
    return _report(replace(plan, record=written), "replaced" if gone else "added")


def _write_array(catalog: Catalog, plan: ResultPlan, progress: Progress) -> ResultRecord:
    """Write the values in table order, so that cells of one dataset are stored together."""
    record = plan.record
    path = f"{record.zarr_group}/layers/{VALUES}"
    create_group(catalog.arrays, f"{record.zarr_group}/layers")
    writer = ArrayWriter(catalog.arrays, path, np.dtype(record.dtype), plan.shape, profile=catalog.codec())
    done = 0
    for block in plan.blocks():
        writer.append(block)
        done += len(block)
        progress("block", done, len(plan.rows))
    own = f"layers/{VALUES}"
    specs, checksums = specs_json({own: writer.close()}), json.dumps({own: writer.checksum})
    return record.model_copy(update={"arrays": specs, "checksums": checksums})


def _fill_column(catalog: Catalog, plan: ResultPlan, record: ResultRecord) -> ResultRecord:
    """Write the pointers or vectors of the cells in one commit, into a column with the result's name where that is free."""
    for column in (record.name, f"{record.name}_{record.uid[:8]}"):
        named = record.model_copy(update={"column": column})
        schema = pa.schema([mark_result(_field(named), named.uid, named.name)])

        # The first name may be taken by the result to be replaced, or by what a killed call left.
        with contextlib.suppress(DuplicateError):
            catalog.tables.fill_columns(CELLS, partial(_values, plan, record, schema))
            return named
    raise SchemaError(f"The cells have columns for {record.name!r} that nobody names; run repair(), and add it again.")


def _values(plan: ResultPlan, record: ResultRecord, schema: pa.Schema, at: Tables) -> pa.RecordBatchReader:
    # Cells may have been added or dropped since the plan, so positions are looked up at this version.
    keys = pa.chunked_array([batch.column(0) for batch in at.batches(CELLS, ["uid"])], pa.string())
    places = pc.index_in(keys, value_set=plan.uids).combine_chunks()
    blocks = (places.slice(start, BLOCK_ROWS) for start in range(0, len(places), BLOCK_ROWS))
    batches = (pa.RecordBatch.from_arrays([_column(plan, record, block)], schema=schema) for block in blocks)
    return pa.RecordBatchReader.from_batches(schema, batches)


def _field(record: ResultRecord) -> pa.Field:
    if record.kind == "space":
        return pointer_field(record.column, PointerKind.DENSE, record.space)
    return pa.field(record.column, pa.list_(pa.from_numpy_dtype(np.dtype(record.dtype)), record.width))


def _column(plan: ResultPlan, record: ResultRecord, at: pa.Array) -> pa.Array:
    """Return a block of the column, for cells given by their position among those with a result; null for none."""
    lacking = at.is_null()
    if record.kind == "space":
        place = at.fill_null(0).cast(pa.int64())
        group = pa.array([record.zarr_group] * len(at), pa.string())
        return pa.StructArray.from_arrays([group, place], ["zarr_group", "position"], mask=lacking)
    # A fixed-size list has values for null rows too.
    values = np.zeros((len(at), record.width), np.dtype(record.dtype))
    here = at.is_valid().to_numpy(zero_copy_only=False)
    if here.any():
        values[here] = plan.read(plan.rows[at.drop_null().to_numpy()])
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), record.width, mask=lacking)


def _commit(catalog: Catalog, record: ResultRecord, options: ResultOptions) -> list[str] | None:
    """Make the result visible; return the columns of what it replaced, or None where it is skipped.

    Raises
    ------
    DuplicateError, SchemaError
        If another writer took the name since it was checked.
    """
    gone: list[str] | None = []
    if result_exists(catalog, record.name):
        raise SchemaError(
            f"The cells have gained a column {record.name!r} meanwhile; choose another name for the result."
        )

    def change(old: list[ResultRecord]) -> list[ResultRecord]:
        nonlocal gone
        if any(other.uid == record.uid for other in old):
            return old  # The commit before was done although its answer was lost.
        there = [other for other in old if other.name == record.name]
        if there and options.on_duplicate == "skip":
            gone = None
            return old
        if there and options.on_duplicate != "replace":
            raise DuplicateError(
                f"Another process has added a result {record.name!r} meanwhile; choose another name, or pass on_duplicate='replace'."
            )
        gone = [other.column for other in there]
        return [*(other for other in old if other.name != record.name), record]

    RESULT_ASSETS.change(catalog, change)
    return gone


def _discard(catalog: Catalog, uid: str) -> None:
    """Remove what did not become visible; where the registry cannot be read, `repair` will do so."""
    with contextlib.suppress(AtlasError):
        # The commit raised although it was done, for instance because its answer was lost.
        if any(record.uid == uid for record in RESULT_ASSETS.read(catalog)):
            return
        marked = result_columns(catalog.tables.schema(CELLS))
        catalog.tables.drop_columns(CELLS, [column for column, (of, _) in marked.items() if of == uid])
        catalog.arrays.child(uid).delete_prefix()


def _report(plan: ResultPlan, status: Literal["added", "skipped", "replaced", "dry run"]) -> ResultReport:
    record = plan.record
    index = record.index_facts
    notes = list(plan.notes)
    if index:
        notes.append(
            f"{index.kind} index, {index.nprobes} of {index.n_partitions} partitions probed: recall@{index.k} "
            f"{index.recall:.4f} over {index.n_queries} cells"
        )
    return ResultReport(
        name=record.name, kind=record.kind, space=record.space, column=record.column, width=record.width, dtype=record.dtype,
        n_cells=record.n_cells, n_datasets=len(record.cells_of), status=status, content_hash=record.content_hash,
        source=record.source, notes=tuple(notes),
    )  # fmt: skip


INDEXED_CELLS = 50_000
"""Up to so many cells all are compared, which takes milliseconds."""

_ROWS_OF_PARTITION = 1024
_LEAST_RECALL = 0.99
_K, _QUERIES, _REFINE = 10, 50, 4


def index_result(catalog: Catalog, plan: ResultPlan, record: ResultRecord) -> ResultRecord:
    """Build an index if a result has many cells, and return its search parameters in the record.

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
    """Return the distances of the nearest other cells, ascending: a cell is not its own neighbour."""
    nearest = {"column": record.column, "q": vector.astype(np.float32), "k": _K + 1, "metric": record.metric, **asked}
    found = table.to_table(columns=["uid", "_distance"], nearest=nearest)
    others = found.filter(pc.field("uid") != own)
    return np.sort(others.column("_distance").to_numpy().astype(np.float64))[:_K]


def _recall(found: NDArray[np.float64], true: NDArray[np.float64]) -> float:
    """Return the share of the neighbours that are as near as the last true one."""
    if not len(true):
        return 1.0
    # By distance, because equally near cells may be listed in another order. `dot` distances can be negative.
    return float((found <= true[-1] + 1e-5 * (abs(true[-1]) + 1)).sum() / len(true))
