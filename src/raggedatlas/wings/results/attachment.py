"""Add a model's result: values first, not yet visible; one commit of cells; its row of the registry last."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.assets import array_columns, read_records
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.cells import in_datasets
from raggedatlas.errors import (
    DuplicateError,
    NameRefusedError,
    SchemaError,
    SourceError,
    ValuesError,
)
from raggedatlas.ingest.attachment import Attachment, attach
from raggedatlas.ingest.columns import FILLED
from raggedatlas.model.arguments import Progress
from raggedatlas.model.assets import VALUES, IndexFacts, ResultRecord, mark_result, result_columns
from raggedatlas.model.frames import find_column, metadata_columns
from raggedatlas.model.ids import COLUMN, RESERVED, check_given_name, new_uid
from raggedatlas.model.options import AnnotateOptions, OnDuplicate, ResultOptions, read_options
from raggedatlas.model.reports import Done, ResultReport, Status
from raggedatlas.model.spaces import PointerKind, pointer_columns, pointer_field
from raggedatlas.store.arrays import ArrayWriter, create_group
from raggedatlas.store.storage_errors import lance_errors
from raggedatlas.store.tables import Tables
from raggedatlas.store.upkeep import index_vectors
from raggedatlas.wings.results.assets import RESULTS
from raggedatlas.wings.results.data_request import absolute_location, local_folder
from raggedatlas.wings.results.dataset import ResultDataset
from raggedatlas.wings.results.folder import read_config
from raggedatlas.wings.results.npy_results import load_results_dataset
from raggedatlas.wings.results.row_readers import ObjectIds
from raggedatlas.wings.results.schema import DATA
from raggedatlas.wings.results.validation import require_intact
from raggedatlas.wings.results.verbs.lookup import EXACT_ROWS, REFINE, choose_nprobes, count_partitions
from raggedatlas.wings.results.verbs.vector_sources import output_getter

if TYPE_CHECKING:
    import lance


BLOCK_ROWS = 8192


_TAKEN = {*FILLED, *RESERVED, "search_distance", "search_score"}


@dataclass(frozen=True, eq=False)
class ResultPlan:
    """Plan of what adding a result will write."""

    record: ResultRecord  # what will be committed, still without arrays
    shape: tuple[int, ...]  # of a cell's values
    uids: pa.Array  # cells that have a result, in table order
    rows: NDArray[np.int64]  # (n,): row of the results of each of these
    read: Callable[[NDArray[np.int64]], NDArray[Any]] = field(repr=False)  # gives some rows of the results, (k, *shape)
    skipped: bool = False  # whether there is a result of that name, and nothing is to be done
    notes: tuple[str, ...] = ()  # for the report

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield the values in table order, in bounded memory."""
        for start in range(0, len(self.rows), BLOCK_ROWS):
            yield self.read(self.rows[start : start + BLOCK_ROWS])


def plan_result(catalog: Catalog, source: Any, options: ResultOptions) -> ResultPlan:  # noqa: ANN401
    """Decide what adding a result will write; `catalog` is at the tip, and `source` holds committed results.

    Everything is checked here: the name against columns, feature spaces and results; ids, which must be unique and, by
    default, cells; the shape against the space; that every value is finite; and checksums of local files.
    """
    dataset = load_results_dataset({}, source) if isinstance(source, str | os.PathLike) else source
    # Readers map these files and do not compare checksums, so every byte is compared here.
    if isinstance(dataset, ResultDataset) and dataset.location.is_local:
        require_intact(dataset.location.path)
    name = _checked_name(catalog, options.name, dataset)
    there = next((record for record in RESULTS.read(catalog) if record.name == name), None)
    if there is not None and options.on_duplicate == "error":
        raise DuplicateError(
            f"The atlas has a result {name!r} already, added at {there.created_at}; choose another name, or pass "
            "on_duplicate='replace' to put this one in its place."
        )
    output = options.output or DATA
    get = output_getter(dataset, output)
    if not len(dataset):
        raise SourceError(f"{dataset!r} has no rows; there is nothing to add.")
    first = np.asarray(get(np.arange(1)))
    # A single number is a vector of length 1.
    shape, dtype = first.shape[1:] or (1,), first.dtype
    if dtype.kind not in "fiu":
        raise SourceError(f"The output {output!r} of {dataset!r} holds {dtype}; a result in an atlas holds numbers.")

    def read(rows: NDArray[np.int64]) -> NDArray[Any]:
        return np.asarray(get(rows)).reshape(len(rows), *shape)

    space = "" if options.as_ == "vector" else options.space or "embedding"
    _check_shape(catalog, shape, dtype, space)
    uids, rows, counts, notes = _match_cells(catalog, dataset, options)
    facts, folder = getattr(dataset, "facts", {}), local_folder(dataset.data_location)
    keys = {
        "verb": "result:verb", "model": "result:model", "model_hash": "result:model_hash", "parent": "result:parent",
        "query": "atlas:query", "snapshot": "atlas:version",
    }  # fmt: skip
    record = ResultRecord(
        uid=new_uid(), name=name, kind=options.as_, column=name, dtype=dtype.name, space=space,
        zarr_group="", width=shape[0], metric=options.metric if options.as_ == "vector" else "",
        n_cells=len(rows), datasets=json.dumps(counts, sort_keys=True),
        output=output, source=absolute_location(dataset.data_location),
        config=json.dumps({} if folder is None else read_config(folder), sort_keys=True, default=str),
        **{field: str(facts.get(key, "")) for field, key in keys.items()},
    )  # fmt: skip
    skipped = there is not None and options.on_duplicate == "skip"
    plan = ResultPlan(record, shape, uids, rows, read, skipped, notes)
    # Also where the result is skipped: the note and `annotate` compare this hash with that of the old one.
    content = _content_hash(plan, dataset)
    if skipped and there is not None:
        same = "with the same values" if there.content_hash == content else "with other values"
        notes = (*notes, f"there is a result of this name, {same}")
    group = f"{record.uid}/{name}" if space else ""
    return replace(plan, record=record.model_copy(update={"content_hash": content, "zarr_group": group}), notes=notes)


def _checked_name(catalog: Catalog, given: str | None, dataset: Any) -> str:  # noqa: ANN401
    name = given if given is not None else Path(os.fspath(dataset.data_location)).name
    check_given_name(name, "name of a result")
    if not COLUMN.fullmatch(name) or "__" in name or name in _TAKEN:
        raise NameRefusedError(
            f"The name {name!r} cannot be a result's: letters, digits and single '_', not beginning with a digit, and none of "
            f"{sorted(_TAKEN)}; choose one with name='scvi_64'."
        )
    schema = catalog.tables.schema(CELLS)
    columns = metadata_columns(schema)
    if name in columns or name in {facts.name for facts in columns.values()}:
        raise SchemaError(f"The cells have a column {name!r} already; choose another name for the result.")
    # A result of the same name is no clash of names here; `on_duplicate` decides about it.
    pointers = {*pointer_columns(schema)} - {*result_columns(schema)}
    if name in catalog.spaces() or name in pointers:
        raise SchemaError(f"{name!r} is a feature space of this atlas; choose another name for the result.")
    return name


def _check_shape(catalog: Catalog, shape: tuple[int, ...], dtype: np.dtype[Any], space: str) -> None:
    """Refuse values that the feature space does not take, or, without a space, a vector index."""
    if not space:
        if len(shape) != 1 or dtype.name not in {"float16", "float32"}:
            raise SourceError(
                f"as_='vector' takes vectors of float16 or float32, not {dtype} of shape {shape}; write them as float32, or leave "
                "as_ out to keep them as they are."
            )
        return
    known = catalog.space(space)
    if known.kind is not PointerKind.DENSE or known.has_features:
        raise SchemaError(
            f"space={space!r}: the columns of this feature space are named features, and those of a result have no names; take "
            "space='embedding', or define a space with has_features=False."
        )
    if known.rank != len(shape):
        raise SourceError(
            f"The results have shape {shape} for each cell, the feature space {space!r} holds values of {known.rank} axes; choose "
            "another with space=..."
        )


def _match_cells(
    catalog: Catalog,
    dataset: Any,  # noqa: ANN401
    options: ResultOptions,
) -> tuple[pa.Array, NDArray[np.int64], dict[str, int], tuple[str, ...]]:
    """Join ids with the cells whose dataset is visible: uids and result rows in table order, cells per dataset, notes."""
    ids = dataset.ids().to_arrow()
    # `mode="all"` counts null as a value; otherwise one missing id would look like a repeated one.
    if n_repeated := len(ids) - pc.count_distinct(ids, mode="all").as_py():
        counts = pc.value_counts(ids)
        twice = counts.filter(pc.greater(pc.struct_field(counts, "counts"), 1))[0].as_py()
        at = np.flatnonzero(pc.equal(ids, twice["values"]).to_numpy(zero_copy_only=False))
        raise SourceError(
            f"{dataset!r} has {n_repeated:,} ids more than once, the first {twice['values']!r} in the rows {at[:3].tolist()}; a cell has "
            "one result. Write the results again."
        )
    inventory = {record.uid: record.name for record in read_records(catalog)}
    cells = catalog.tables.read(CELLS, ["uid", "dataset_uid"])
    cells = cells.filter(in_datasets(cells, inventory))
    # `index_in` needs the same type on both sides.
    uids = cells.column("uid").cast(ids.type).combine_chunks()
    found = pc.index_in(uids, value_set=ids)
    kept = found.is_valid()
    rows: NDArray[np.int64] = found.drop_null().to_numpy().astype(np.int64)
    n_unknown = len(ids) - len(rows)
    if not len(rows):
        raise SourceError(
            f"None of the {len(ids):,} ids of {dataset!r} is the uid of one of the {len(uids):,} cells of this atlas; are they of "
            f"another one? The first is {ids[0].as_py()!r}."
        )
    if n_unknown and options.unknown == "error":
        known = np.zeros(len(ids), bool)
        known[rows] = True
        first = int(np.argmin(known))
        raise SourceError(
            f"{n_unknown:,} of the {len(ids):,} ids of {dataset!r} are no cells of this atlas, the first in row {first:,}: "
            f"{ids[first].as_py()!r}. Pass unknown='skip' to leave them out."
        )
    counted = pc.value_counts(cells.column("dataset_uid").filter(kept)).to_pylist()
    counts = {entry["values"]: entry["counts"] for entry in counted}
    notes = [f"{n_unknown:,} results of cells that this atlas has not got were left out"] if n_unknown else []
    without = len(uids) - len(rows)
    notes += [f"{without:,} cells of {len(uids):,} have no result"] if without else []
    return uids.filter(kept).cast(pa.string()), rows, counts, tuple(notes)


def _content_hash(plan: ResultPlan, dataset: Any) -> str:  # noqa: ANN401
    """Hash uids and values in table order, and refuse what is not finite on the way."""
    digest = hashlib.blake2b(f"{plan.record.dtype} {plan.shape}".encode(), digest_size=16)
    start = 0
    for block in plan.blocks():
        stop = start + len(block)
        finite = np.isfinite(block).reshape(len(block), -1).all(axis=1)
        if not finite.all():
            at = start + int(np.argmin(finite))
            raise ValuesError(
                f"{dataset!r}: the result of the cell {plan.uids[at].as_py()!r} (row {plan.rows[at]:,}) holds NaN or an infinity, "
                f"and so do others of this block ({int((~finite).sum()):,} cells); leave such cells out of the run, or fix the model."
            )
        # Uids have 16 characters each, so no separator is needed. They alternate with values block by block:
        # another `BLOCK_ROWS` would change the hash of results that are longer than a block.
        digest.update("".join(plan.uids.slice(start, len(block)).to_pylist()).encode())
        digest.update(np.ascontiguousarray(block).tobytes())
        start = stop
    return digest.hexdigest()


RESULT_STEPS = ("plan", "lease", "block", "arrays", "column", "index", "record", "done")
"""The steps of adding a result, in order; each is reported just before the next begins."""


class ResultAttachment(Attachment[ResultReport]):
    """A model's result for existing cells, joined by uid; nothing of it is visible before its row in ``_results``.

    `catalog` is at the tip, and `source` holds committed results.
    """

    def __init__(self, catalog: Catalog, source: Any, options: ResultOptions) -> None:  # noqa: ANN401
        super().__init__(catalog, options)
        self.source, self.choices = source, options
        self.replaces: list[str] = []

    def plan(self) -> bool:
        """Decide what is written; return False where there is a result of that name, and it is left."""
        self.decided = plan_result(self.catalog, self.source, self.choices)
        self.record, self.uid = self.decided.record, self.decided.record.uid
        return not self.decided.skipped

    def stage(self, progress: Progress) -> None:
        """Write the array, the column of pointers or vectors, and its index."""
        if self.record.kind == "space":
            self._write_array(progress)
        progress("arrays", 1, 1)
        # The name may be taken as a column by the result to be replaced, or by what a killed call left.
        for column in (self.record.name, f"{self.record.name}_{self.uid[:8]}"):
            named = self.record.model_copy(update={"column": column})
            if named.kind == "space":
                kind = pointer_field(column, PointerKind.DENSE, named.space)
            else:
                kind = pa.field(column, pa.list_(pa.from_numpy_dtype(np.dtype(named.dtype)), named.width))
            schema = pa.schema([mark_result(kind, named.uid, named.name)])
            with contextlib.suppress(DuplicateError):
                # Pointers or vectors of the cells, in one commit.
                self.catalog.tables.fill_columns(CELLS, partial(_values, self.catalog, self.decided, named, schema))
                self.record = named
                break
        else:
            raise SchemaError(
                f"The cells have columns for {self.record.name!r} that nobody names; run repair(), and add it again."
            )
        progress("column", 1, 1)
        self.record = index_result(self.catalog, self.decided, self.record)
        progress("index", 1, 1)

    def _write_array(self, progress: Progress) -> None:
        """Write the values in table order, so that cells of one dataset are stored together."""
        record, plan, arrays = self.record, self.decided, self.catalog.arrays
        own = f"layers/{VALUES}"
        create_group(arrays, f"{record.zarr_group}/layers")
        writer = ArrayWriter(
            arrays, f"{record.zarr_group}/{own}", np.dtype(record.dtype), plan.shape, profile=self.catalog.codec()
        )
        done, wide, largest = 0, writer.dtype in (np.int64, np.uint64), 0
        for block in plan.blocks():
            writer.append(block)
            done += len(block)
            if wide and block.size:
                largest = max(largest, -int(block.min()), int(block.max()))
            progress("block", done, len(plan.rows))
        spec = replace(writer.close(), largest=largest if wide else None)
        self.record = record.model_copy(update=array_columns({own: spec}, writer.checksums(own)))

    def commit(self, progress: Progress) -> Done:
        """Write the row of the registry; raise if another writer took the name since it was checked."""
        record = self.record
        done: Done = "added"
        schema = self.catalog.tables.schema(CELLS)
        if find_column(schema, record.name) in metadata_columns(schema):
            raise SchemaError(
                f"The cells have gained a column {record.name!r} meanwhile; choose another name for the result."
            )

        def change(old: list[ResultRecord]) -> list[ResultRecord]:
            nonlocal done
            if any(other.uid == record.uid for other in old):
                return old  # The commit before was done although its answer was lost.
            there = [other for other in old if other.name == record.name]
            if there and self.options.on_duplicate == "error":
                raise DuplicateError(
                    f"Another process has added a result {record.name!r} meanwhile; choose another name, or pass on_duplicate='replace'."
                )
            done = ("skipped" if self.options.on_duplicate == "skip" else "replaced") if there else "added"
            self.replaces = [other.column for other in there]
            return old if done == "skipped" else [*(other for other in old if other.name != record.name), record]

        RESULTS.change(self.catalog, change)
        return done

    def finish(self) -> None:
        """Drop the columns of the replaced result, which queries used before the commit."""
        self.catalog.tables.drop_columns(CELLS, self.replaces)
        # The group of vectors holds nothing but the lease.
        if self.record.kind == "vector":
            self.catalog.arrays.child(self.uid).delete_prefix()

    def discard(self) -> None:
        """Remove what did not become visible."""
        # The commit raised although it was done, for instance because its answer was lost.
        if any(record.uid == self.uid for record in RESULTS.read(self.catalog)):
            return
        marked = result_columns(self.catalog.tables.schema(CELLS))
        self.catalog.tables.drop_columns(CELLS, [column for column, (of, _) in marked.items() if of == self.uid])
        self.catalog.arrays.child(self.uid).delete_prefix()

    def report(self, status: Status) -> ResultReport:
        """Return the report of what was done, or would be done."""
        record = self.decided.record if status == "skipped" else self.record
        index, notes = record.index_facts, list(self.decided.notes)
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


def _values(
    catalog: Catalog, plan: ResultPlan, record: ResultRecord, schema: pa.Schema, at: Tables
) -> pa.RecordBatchReader:
    """Return the values of all cells, and refuse a result of cells that were deleted since the plan."""
    # Cells may have been added or dropped since the plan, so positions are looked up at this version.
    batches_there = [*at.batches(CELLS, ["uid", "dataset_uid"])]
    keys, owners = (pa.chunked_array([batch.column(i) for batch in batches_there], pa.string()) for i in (0, 1))
    places = pc.index_in(keys, value_set=plan.uids).combine_chunks()
    filled = {
        entry["values"]: entry["counts"] for entry in pc.value_counts(owners.filter(places.is_valid())).to_pylist()
    }
    fewer = {uid: n - filled.get(uid, 0) for uid, n in record.cells_of.items() if filled.get(uid, 0) < n}
    # A dataset that was dropped meanwhile takes its results with it.
    known = {one.uid for one in read_records(catalog.tip())} if fewer else set()
    if n_deleted := sum(n for uid, n in fewer.items() if uid in known):
        raise SourceError(
            f"{n_deleted:,} of the cells with the result {record.name!r} were deleted while it was added; add it again, with unknown='skip' to "
            "leave them out."
        )
    blocks = (places.slice(start, BLOCK_ROWS) for start in range(0, len(places), BLOCK_ROWS))
    batches = (pa.RecordBatch.from_arrays([_column(plan, record, block)], schema=schema) for block in blocks)
    return pa.RecordBatchReader.from_batches(schema, batches)


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


INDEXED_CELLS = EXACT_ROWS
"""Up to so many cells all are compared."""

_LEAST_RECALL = 0.99
_K, _QUERIES = 10, 50


def index_result(catalog: Catalog, plan: ResultPlan, record: ResultRecord) -> ResultRecord:
    """Build an index if a result has many cells, and return its search parameters in the record.

    Partitions are probed until 99 % of the true neighbours of cells taken by chance are found. `record` has its column,
    which nobody sees yet; it is returned unchanged where every cell is compared.
    """
    if record.kind != "vector" or record.n_cells <= INDEXED_CELLS:
        return record
    parts = count_partitions(record.n_cells)
    index_vectors(catalog.tables, CELLS, record.column, record.metric, parts)
    chosen = np.sort(np.random.default_rng(0).choice(len(plan.rows), min(_QUERIES, len(plan.rows)), replace=False))
    vectors = plan.read(plan.rows[chosen])
    table = catalog.tables.open(CELLS)
    with lance_errors(table.uri):
        own = plan.uids.take(pa.array(chosen)).to_pylist()
        true = [_nearest(table, record, *each, {"use_index": False}) for each in zip(own, vectors, strict=True)]

        def measure(nprobes: int) -> float:
            asked = {"minimum_nprobes": nprobes, "maximum_nprobes": nprobes, "refine_factor": REFINE}
            found = [_nearest(table, record, *each, asked) for each in zip(own, vectors, strict=True)]
            # By distance, because equally near cells may be listed in another order. `dot` distances can be negative.
            shares = [
                (f <= t[-1] + 1e-5 * (abs(t[-1]) + 1)).sum() / len(t) if len(t) else 1.0
                for f, t in zip(found, true, strict=True)
            ]
            return float(np.mean(shares))

        nprobes, recall = choose_nprobes(measure, parts, _LEAST_RECALL)
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


def result_attachment(
    catalog: Catalog,
    source: Any,  # noqa: ANN401  (what `is_results` accepts)
    choices: Mapping[str, Any],
) -> ResultAttachment:
    """Prepare to add results."""
    return ResultAttachment(catalog, source, read_options(ResultOptions, choices, "add() of results"))


class _CellVectors:
    """A member of `obsm` in the form in which a model's results are added."""

    def __init__(self, key: str, values: NDArray[Any], uids: pa.Array, origin: Mapping[str, Any]) -> None:
        self.key, self._values, self._uids = key, values, uids
        self.data_location = f"obsm://{key}"
        self.facts = {
            "result:verb": "annotate",
            "atlas:version": origin.get("snapshot", ""),
            "atlas:query": origin.get("summary", ""),
        }

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"obsm[{self.key!r}]"

    def ids(self) -> ObjectIds:
        return ObjectIds(self._uids)

    def get_data(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        return self._values[rows]


def add_vectors(
    catalog: Catalog,
    key: str,
    values: NDArray[Any],
    uids: pa.Array,
    origin: Mapping[str, Any],
    options: AnnotateOptions,
    *,
    dry_run: bool,
) -> ResultReport:
    """Add a member of `obsm` that `annotate` got as a result, unless the atlas has the same already."""
    vectors = _CellVectors(key, values, uids, origin)
    there = {record.name: record for record in RESULTS.read(catalog)}.get(key)
    # Where the name is taken, "skip" writes nothing but still gives the hash, which tells equal from other values.
    policy: OnDuplicate = "replace" if options.on_conflict == "replace" and there is None else "skip"
    choices = ResultOptions(key, policy, dry_run, unknown=options.unknown)
    report = attach(ResultAttachment(catalog, vectors, choices))
    if there is None or report.content_hash == there.content_hash or options.on_conflict == "keep":
        return report
    if options.on_conflict == "error":
        raise DuplicateError(
            f"The atlas has a result {key!r} with other values already; pass on_conflict='replace', or rename the member of obsm."
        )
    return attach(ResultAttachment(catalog, vectors, replace(choices, on_duplicate="replace")))
