"""Checks of results: their rows of the registry, their columns of the cell table, and the vectors in these."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from raggedatlas.catalog.array_checks import check_specs
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.cell_checks import check_counts, count_results
from raggedatlas.catalog.datasets import read_records
from raggedatlas.model.assets import ResultRecord, result_columns
from raggedatlas.model.pointers import pointer_columns
from raggedatlas.model.reports import AtlasProblem


def check_results(catalog: Catalog, records: Sequence[ResultRecord]) -> list[AtlasProblem]:
    """Check that every result has its own name, the column that it names, and arrays that fit it; reads no values.

    Returns
    -------
    list of AtlasProblem
        Rules ``duplicate-result``, ``result-column``, ``unknown-space``, ``array-spec``.
    """
    schema, spaces = catalog.tables.schema(CELLS), catalog.spaces()
    problems = [
        AtlasProblem("duplicate-result", name, f"{n} results are called {name!r}", "Run restore() of a snapshot.")
        for name, n in Counter(record.name for record in records).items()
        if n > 1
    ]
    for record in records:
        problems += _check_column(record, schema)
        if record.kind == "space":
            if record.space not in spaces:
                text = f"its feature space {record.space!r} is unknown"
                problems.append(AtlasProblem("unknown-space", record.name, text, "Define it with register_space()."))
            problems += check_specs(record.as_group(stored=True), spaces.get(record.space))
    return problems


def check_values(catalog: Catalog, records: Sequence[ResultRecord]) -> list[AtlasProblem]:
    """Read every vector of the results that lie in the cell table (rules ``result-values``, ``result-count``)."""
    there = catalog.tables.schema(CELLS).names
    vectors = {record.column: record for record in records if record.kind == "vector" and record.column in there}
    datasets = {record.uid for record in read_records(catalog)}
    bad = dict.fromkeys(vectors, 0)
    counts: dict[str, dict[str, int]] = {column: {} for column in vectors}
    for batch in catalog.tables.batches(CELLS, ["dataset_uid", *vectors]) if vectors else ():
        for column in vectors:
            count_results(batch, column, counts[column])
            flat = batch.column(column).drop_null().flatten().to_numpy(zero_copy_only=False)
            bad[column] += int(np.count_nonzero(~np.isfinite(flat)))
    problems = [problem for c, found in counts.items() for problem in check_counts(vectors[c], found, datasets)]
    return problems + [
        AtlasProblem(
            "result-values", column, f"{n:,} of its values are not finite", "Restore a snapshot, or add it again."
        )
        for column, n in bad.items()
        if n
    ]


def _check_column(record: ResultRecord, schema: pa.Schema) -> list[AtlasProblem]:
    fix = f"Drop the result with drop_result({record.name!r}) and add it again, or restore() a snapshot."

    def wrong(text: str) -> list[AtlasProblem]:
        return [AtlasProblem("result-column", record.name, text, fix)]

    if record.column not in schema.names:
        return wrong(f"the cells have no column {record.column!r}")
    if result_columns(schema).get(record.column, ("", ""))[0] != record.uid:
        return wrong(f"the column {record.column!r} is not its own")
    kind = schema.field(record.column).type
    if record.kind == "space":
        pointed = pointer_columns(schema).get(record.column, ("", None))[0]
        return [] if pointed == record.space else wrong(f"the column {record.column!r} points into {pointed!r}")
    fits = pa.types.is_fixed_size_list(kind) and kind.list_size == record.width
    fits = fits and kind.value_type == pa.from_numpy_dtype(np.dtype(record.dtype))
    return [] if fits else wrong(f"the column {record.column!r} holds {kind}, not {record.width} x {record.dtype}")
