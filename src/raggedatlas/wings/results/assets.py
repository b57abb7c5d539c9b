"""Results of models as assets of an atlas: their table, and what checks, purges and repairs do with them."""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.assets import (
    AssetKind,
    alive_among,
    array_columns,
    asset_columns,
    read_records,
    read_specs,
)
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.model.assets import RESULTS_SCHEMA, ResultRecord, result_columns
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.spaces import pointer_columns
from raggedatlas.model.validation import Problem
from raggedatlas.store.arrays import ArrayWriter
from raggedatlas.store.location import AnyPath, Location, as_path
from raggedatlas.store.read import ArrayReader, read_slice
from raggedatlas.store.sql import all_of, equals, is_not_null
from raggedatlas.store.tables import LISTING

_BLOCK_BYTES = 2**24


class ResultKind(AssetKind[ResultRecord]):
    """Results of models."""

    noun = "result"
    record = ResultRecord
    schema = RESULTS_SCHEMA
    columns = (
        "name", "kind", "space", "column", "width", "dtype", "n_cells", "model", "model_hash", "query", "snapshot", "parent",
        "source", "created_at", "content_hash", "uid",
    )  # fmt: skip
    hint = "atlas.add(ResultDataset({}, folder), name=...)"
    attachment = "raggedatlas.wings.results.attachment:result_attachment"

    def accepts(self, source: Any) -> bool:  # noqa: ANN401  (anything that can be added)
        """Return whether a source is a model's results, or a folder of some."""
        return is_results(source)

    def describe(self, row: Mapping[Any, Any]) -> str:
        """Summarize the values in a few words."""
        where = f"in {row['space']}" if row["kind"] == "space" else "in the cell table"
        return f"{row['width']} x {row['dtype']} {where}"

    def group(self, record: ResultRecord) -> DatasetRecord | None:
        """Describe the array of a result that is one for all datasets."""
        return record.as_group(stored=True) if record.zarr_group else None

    def drop_call(self, record: ResultRecord) -> str:
        """Return the call that drops a result."""
        return f"drop_result({record.name!r})"

    def check_records(self, catalog: Catalog, records: Sequence[ResultRecord]) -> list[Problem]:
        """Check that every result has a unique name, its column, and matching array descriptions.

        Rules are ``duplicate-result``, ``result-column``, ``unknown-space``, ``array-spec``.
        """
        from raggedatlas.catalog.array_checks import check_specs

        schema, spaces = catalog.tables.schema(CELLS), catalog.spaces()
        problems = [
            Problem(
                "duplicate-result", "must", name, f"{n} results are called {name!r}", "Run restore() of a snapshot."
            )
            for name, n in Counter(record.name for record in records).items()
            if n > 1
        ]
        for record in records:
            wrong = _wrong_column(record, schema)
            problems += [self.problem(record, "result-column", wrong)] if wrong else []
            if record.kind == "space":
                if record.space not in spaces:
                    text = f"its feature space {record.space!r} is unknown"
                    fix = "Define it with register_space()."
                    problems.append(Problem("unknown-space", "must", record.name, text, fix))
                problems += check_specs(record.as_group(stored=True), spaces.get(record.space))
        return problems

    def check_cells(self, catalog: Catalog, records: Sequence[ResultRecord], *, values: bool) -> list[Problem]:
        """Check every vector that is stored in the cell table (rules ``result-values``, ``result-count``)."""
        # A column of another type is reported by `check_records`.
        there = {field.name for field in catalog.tables.schema(CELLS) if pa.types.is_fixed_size_list(field.type)}
        # Telling nulls from values needs the column to be decoded.
        vectors = {r.column: r for r in records if r.kind == "vector" and r.column in there} if values else {}
        datasets = {record.uid for record in read_records(catalog)}
        bad = dict.fromkeys(vectors, 0)
        counts: dict[str, Counter[str]] = {column: Counter() for column in vectors}
        for batch in catalog.tables.batches(CELLS, ["dataset_uid", *vectors]) if vectors else ():
            for column in vectors:
                owners = batch.column("dataset_uid").filter(pc.is_valid(batch.column(column)))
                counts[column].update({e["values"]: e["counts"] for e in pc.value_counts(owners).to_pylist()})
                flat = batch.column(column).drop_null().flatten().to_numpy(zero_copy_only=False)
                bad[column] += int(np.count_nonzero(~np.isfinite(flat)))
        problems = []
        for column, record in vectors.items():
            problems += self.check_counts(catalog, record, counts[column], datasets)
            if bad[column]:
                text = f"{bad[column]:,} of its values are not finite"
                problems.append(self.problem(record, "result-values", text))
        return problems

    def repair(self, catalog: Catalog, grace: timedelta) -> list[str]:
        """Drop cell columns of results that never became visible or were dropped, and that no process is writing. The table is read last."""
        marked = result_columns(catalog.tables.schema(CELLS))
        registered = {record.uid for record in self.read(catalog)}
        fresh = {column: uid for column, (uid, _) in marked.items() if uid not in registered}
        alive = alive_among(catalog, [*fresh.values()], grace)
        if fresh:
            catalog.tables.refresh([LISTING, self.table])
            registered = {record.uid for record in self.read(catalog)}
        stray = [column for column, uid in fresh.items() if uid not in {*alive, *registered}]
        if not stray:
            return []
        catalog.tables.drop_columns(CELLS, stray, partial(asset_columns, catalog))
        return [f"removed the cell columns {stray} of unregistered results"]

    def without_dataset(
        self, catalog: Catalog, uid: str, views: Sequence[Catalog]
    ) -> Callable[[ResultRecord], ResultRecord | None]:
        """Write a copy of each array with the rows of the dataset set to zero; the old arrays are deleted later."""
        records: dict[str, ResultRecord] = {}
        rows: dict[str, set[int]] = {}
        for view in views:
            for record in self.read(view):
                if record.zarr_group and uid in record.cells_of:
                    records[record.uid] = record
                    # If the dataset was dropped before, only older versions of the cell table know its rows.
                    where = all_of(equals("dataset_uid", uid), is_not_null(record.column))
                    own = view.tables.read(CELLS, [f"{record.column}.position"], where)
                    rows.setdefault(record.uid, set()).update(own.column(0).to_pylist())
        arrays: dict[str, dict[str, str]] = {}
        for one, record in records.items():
            ((_, spec),) = read_specs(record.as_group()).items()
            path, dtype = f"layers/without_{uid}", np.dtype(spec.dtype)
            reader = ArrayReader(catalog.arrays, spec)
            writer = ArrayWriter(
                catalog.arrays, f"{record.zarr_group}/{path}", dtype, spec.row_shape, profile=catalog.codec()
            )
            purged_rows = np.zeros(spec.n_rows, bool)
            purged_rows[list(rows[one])] = True
            step = max(1, _BLOCK_BYTES // max(1, int(np.prod(spec.row_shape)) * dtype.itemsize))
            for start in range(0, spec.n_rows, step):
                block = read_slice(reader, start, min(start + step, spec.n_rows))
                block[purged_rows[start : start + step]] = 0
                writer.append(block)
            arrays[one] = array_columns({path: writer.close()}, writer.checksums(path))

        def without(record: ResultRecord) -> ResultRecord:
            cells = record.cells_of
            n_gone = cells.pop(uid, None)
            if n_gone is None:
                return record
            changed = {"datasets": json.dumps(cells, sort_keys=True), "n_cells": record.n_cells - n_gone}
            return record.model_copy(update=changed | arrays.get(record.uid, {}))

        return without

    def build_indexes(self, catalog: Catalog, records: Iterable[ResultRecord]) -> None:
        """Build the indexes of vectors."""
        from raggedatlas.store.upkeep import index_vectors

        there = catalog.tables.schema(CELLS).names
        for record in records:
            facts = record.index_facts
            if facts is not None and record.column in there:
                index_vectors(catalog.tables, CELLS, record.column, record.metric, facts.n_partitions)


def _wrong_column(record: ResultRecord, schema: pa.Schema) -> str:
    """Return what is wrong with the column of a result, or nothing."""
    if record.column not in schema.names:
        return f"the cells have no column {record.column!r}"
    if result_columns(schema).get(record.column, ("", ""))[0] != record.uid:
        return f"the column {record.column!r} is not its own"
    kind = schema.field(record.column).type
    if record.kind == "space":
        pointed = pointer_columns(schema).get(record.column, ("", None))[0]
        return "" if pointed == record.space else f"the column {record.column!r} points into {pointed!r}"
    fits = pa.types.is_fixed_size_list(kind) and kind.list_size == record.width
    fits = fits and kind.value_type == pa.from_numpy_dtype(np.dtype(record.dtype))
    return "" if fits else f"the column {record.column!r} holds {kind}, not {record.width} x {record.dtype}"


RESULTS = ResultKind()
"""What `Wing.assets` names."""


_OBJECTS = {
    "raggedatlas.wings.results.dataset": "ResultDataset",
    "raggedatlas.wings.results.npy_results": "InferenceDataSet",
}
"""Modules -> class of objects in memory; before a module is imported there are no objects of its class."""


def is_results(source: Any) -> bool:  # noqa: ANN401  (anything that can be added)
    """Return whether a source is a model's results, or a folder of some."""
    if not isinstance(source, str | os.PathLike):
        return any(
            isinstance(source, getattr(sys.modules[m], name)) for m, name in _OBJECTS.items() if m in sys.modules
        )
    from raggedatlas.wings.results.folder import DATABASE, TABLE

    folder = as_path(source)
    if isinstance(folder, Location):
        # A path of its own, so that only the table is listed.
        table = f"{folder.uri}/{DATABASE}/{TABLE}.lance"
        return not (folder.is_web or folder.suffix) and Location(table, folder.storage_options).is_dir()
    return (folder / DATABASE / f"{TABLE}.lance").is_dir() or (folder / "batch_index.npy").is_file()


def is_local_results(path: AnyPath) -> bool:
    """Return whether a path is a folder of results on this machine, which alone is validated."""
    return isinstance(path, Path) and is_results(path)
