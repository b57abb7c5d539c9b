"""Verbs ``query``, ``export``, ``search``, ``sql``, ``aggregate`` and ``compare``."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, cast

import typer

from raggedatlas.cli.app import QUERY, command
from raggedatlas.cli.options import (
    AtlasOptions,
    AtSnapshot,
    BoxOptions,
    CxgOptions,
    Overwrite,
    Selection,
    Strict,
    WorkerCount,
    argument,
    flag,
    option,
    parse_integer,
    print_losses,
    process_pool,
    refuse_unused,
    repeatable,
    repeatable_option,
    value_option,
)
from raggedatlas.cli.printing import plain, print_json, print_status, print_table, print_text, progress
from raggedatlas.errors import SourceError
from raggedatlas.model.choices import Metric

if TYPE_CHECKING:
    import pyarrow as pa

    from raggedatlas.query.query import Query


@dataclass(frozen=True)
class QueryOutput:
    """Options for the output of a query."""

    count: bool = flag("--count", "Print only the number of cells")
    by: list[str] = repeatable("COLUMN", "Count cells per value")
    level: str | None = option(
        "LEVEL",
        "With --by: count cells under each term, by steps below the root or a curated list such as tissue_general",
    )
    tree: str | None = option("COLUMN", "Count cells under each term of an ontology, as a tree")
    explain: bool = flag("--explain", "Print the read plan without reading values")
    head: int = option(None, "Number of cells to show", default=10, min=0)
    output: str | None = option("FILE", "Also write the result to a file, as export does", "--output", "-o")
    overwrite: Overwrite = False
    at: AtSnapshot = None


@command(QUERY, "query pbmc.atlas \"cell_type = 'B'\" -f CD79A -f MS4A1")
def query(
    atlas_options: AtlasOptions,
    condition: Annotated[
        str | None,
        argument("Condition on cells, as SQL; by default all cells", "[SQL]"),
    ] = None,
    *,
    selection: Selection,
    box: BoxOptions,
    output_options: QueryOutput,
) -> tuple[Any, str] | None:
    """Query the cells of a snapshot (the newest, or --at), and show the first of them or write them to a file."""
    if output_options.output is None:
        refuse_unused("without --output", output_options, ("overwrite",))
    if not output_options.by:
        refuse_unused("without --by", output_options, ("level",))
    view = atlas_options.open_snapshot(output_options.at)
    selected = selection.ask(view)
    selected = selected if condition is None else selected.where(condition)
    selected = box.narrow(selected, selection.space)
    if selection.layers or selection.features:
        selected.explain()  # refuses unknown names, also if cells are only counted or shown
    if output_options.output is not None:
        _write(selected, output_options.output, {"overwrite": output_options.overwrite})
        print_status(f"Wrote {output_options.output}")
    if output_options.explain:
        text = selected.explain()
        return {"explain": text}, text
    if output_options.tree is not None:
        tree = selected.tree(output_options.tree)
        terms = tree.to_pandas().reset_index().to_dict("records") if atlas_options.as_json else []
        return {"n_cells": tree.n_cells, "terms": terms}, repr(tree)
    if output_options.by:
        level = None if output_options.level is None else parse_integer(output_options.level)
        counted: Any = selected.count(output_options.by, level=level)
        by = [*counted.index.names]
        rows: list[dict[str, Any]] = counted.reset_index().astype(object).to_dict("records")
        if atlas_options.as_json:
            print_json(rows)
        else:
            shown = [{**row, **{name: "(missing)" for name in by if plain(row[name]) is None}} for row in rows]
            print_table(shown, [*by, "n_cells"], empty="No cells.")
        return None
    if output_options.count:
        n = selected.count()
        return {"n_cells": n}, str(n)
    if output_options.output is not None:
        n = selected.count()
        return {"snapshot": view.version, "n_cells": n}, f"{n:,} cells at snapshot {view.version}"
    n = cast("int", selected.count())
    # A second `limit` replaces the first, so the smaller one is asked for.
    limit = output_options.head if selection.limit is None else min(output_options.head, selection.limit)
    few = selected.limit(limit)
    rows = few.to_arrow().to_pylist()
    columns = [name for name in (rows[0] if rows else {}) if name != "uid"]
    if selection.features and rows:
        values = _values(few, len(rows))
        rows = [{**row, "values": values.get(row["uid"])} for row in rows]
    if atlas_options.as_json:
        print_json({"snapshot": view.version, "n_cells": n, "cells": rows})
        return None
    shown = [{**row, **(row.get("values") or {})} for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row.get("values") or {}))
    # `print_table` needs every column in every row, and a cell without a space has no values of it.
    print_table([{**dict.fromkeys(names), **row} for row in shown], [*names, *columns], empty="")
    more = f", the first {len(rows):,} shown" if len(rows) < n else ""
    print_text(f"{n:,} cells at snapshot {view.version}{more}")
    return None


def _values(few: "Query", n: int) -> dict[str, dict[str, Any]]:
    """Return the selected features of a few cells: uid -> name -> value."""
    from raggedatlas.catalog.features import read_registry

    # One batch, since `n` is the number of these cells.
    (batch,) = few.batches(n)
    uids = batch.obs.column("uid").to_pylist()
    found: dict[str, dict[str, Any]] = {uid: {} for uid in uids}
    for space, part in batch.spaces.items():
        names = read_registry(few.catalog, space).names_of(part.features.tolist()) if len(part.features) else []
        rows = part.block.first_rows()
        for i in part.present.nonzero()[0].tolist():
            found[uids[i]].update(zip(names, rows[i].tolist(), strict=True))
    return found


@command(QUERY, "export pbmc.atlas b.h5ad --where \"cell_type = 'B'\"")
def export(
    atlas_options: AtlasOptions,
    output: Annotated[
        str,
        argument("A .h5ad, .zarr, .h5mu or .cxg; .parquet or .csv for the cells' metadata"),
    ],
    *,
    selection: Selection,
    box: BoxOptions,
    cxg: CxgOptions,
    overwrite: Overwrite = False,
    at: AtSnapshot = None,
    workers: WorkerCount = 1,
) -> tuple[Any, str]:
    """Write cells of a snapshot (the newest, or --at) to a file."""
    view = atlas_options.open_snapshot(at)
    selected = box.narrow(selection.ask(view), selection.space)
    with process_pool(workers) as executor:
        _write(selected, output, {"overwrite": overwrite, "executor": executor, **cxg.options(output, print_losses)})
    return {
        "path": output,
        "snapshot": view.version,
        "n_cells": selected.count(),
    }, f"Wrote {selected.count():,} cells of snapshot {view.version} to {output}"


def _write(selected: "Query", output: str, options: dict[str, Any]) -> None:
    from raggedatlas.formats.registry import find_writer, written_endings

    if Path(output).suffix not in TABLES and find_writer(output) is None:
        endings = ", ".join([*written_endings(), *TABLES])
        raise SourceError(f"{output} has the ending {Path(output).suffix!r}; {endings} can be written.")
    with progress(f"write {output}") as callback:
        callback("cells", 0, 1)
        if Path(output).suffix in TABLES:
            _write_table(selected.to_arrow, output, overwrite=options["overwrite"])
        else:
            selected.write(output, **options)
        callback("done", 1, 1)


def _write_table(made: Callable[[], "pa.Table"], output: str, *, overwrite: bool) -> None:
    from raggedatlas.formats.output_files import written_aside
    from raggedatlas.store.copies import local_target

    with local_target(output, overwrite=overwrite) as path, written_aside(path, overwrite=overwrite) as new:
        # Computed here, as a target that cannot be written is refused before.
        TABLES[path.suffix](made(), str(new))


def _write_parquet(table: "pa.Table", path: str) -> None:
    from pyarrow import parquet

    parquet.write_table(table, path)


def _write_csv(table: "pa.Table", path: "str | BinaryIO") -> None:
    import pyarrow as pa
    from pyarrow import csv

    for i, one in enumerate(table.schema):
        if pa.types.is_nested(one.type):
            texts = [None if value is None else json.dumps(value, default=str) for value in table.column(i).to_pylist()]
            table = table.set_column(i, one.name, pa.array(texts, pa.string()))
    flat = [f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in table.schema]
    csv.write_csv(table.cast(pa.schema(flat)), path)


TABLES: dict[str, Callable[["pa.Table", str], None]] = {".parquet": _write_parquet, ".csv": _write_csv}


@command(QUERY, "search pbmc.atlas 1f0c5a2b9d3e4f60 --column scvi_64 -w \"tissue = 'lung'\"")
def search(
    atlas_options: AtlasOptions,
    what: Annotated[str, argument("A cell, or words of a text column", "UID or TEXT")],
    *,
    column: Annotated[str, value_option(None, "Result, embedding or column to search")],
    k: Annotated[int, value_option(None, "Number of cells", "-k", default=True, min=1)] = 10,
    metric: Annotated[
        Metric,
        value_option(
            None, "Distance of vectors: squared Euclidean, or one minus the cosine or the dot product", default=True
        ),
    ] = "l2",
    where: Annotated[
        list[str] | None, repeatable_option("SQL", "Search only cells that satisfy a condition", "--where", "-w")
    ] = None,
    strict: Strict = False,
    obs: Annotated[list[str] | None, repeatable_option("COLUMN", "Show a cell column")] = None,
    at: AtSnapshot = None,
) -> None:
    """Print the nearest neighbours of a cell in a result or an embedding, or the best text matches."""
    del strict  # its callback has what it does
    query = atlas_options.open_snapshot(at).query()
    for condition in where or ():
        query = query.where(condition)
    query = query.obs(obs) if obs else query
    found = query.search(what, column=column, k=k, metric=metric).to_arrow()
    rows = found.to_pylist()
    print_table(rows, found.column_names, empty="No cells.", as_json=atlas_options.as_json)


@dataclass(frozen=True)
class TableOutput:
    """Options for a table of features."""

    layer: str | None = option("LAYER", "Layer; by default the usual one")
    head: int = option(None, "Number of rows to show", default=20, min=0)
    output: str | None = option("FILE", "Write all rows to a .csv or .parquet file", "--output", "-o")
    overwrite: Overwrite = False
    at: AtSnapshot = None

    def show(self, made: Callable[[], "pa.Table"], *, as_json: bool) -> None:
        """Compute a table and write it to a file, or print its first rows; JSON has all."""
        if self.output is not None:
            if Path(self.output).suffix not in TABLES:
                raise SourceError(f"{self.output} cannot be written; name a {' or '.join(TABLES)} file.")
            _write_table(made, self.output, overwrite=self.overwrite)
            print_status(f"Wrote {self.output}")
            return
        refuse_unused("without --output", self, ("overwrite",))
        table = made()
        rows = table if as_json else table.slice(0, self.head)
        print_table(rows.to_pylist(), table.column_names, empty="No features.", as_json=as_json)
        if not as_json and self.head < table.num_rows:
            print_text(f"{table.num_rows:,} rows, the first {self.head:,} shown")


@command(QUERY, 'sql pbmc.atlas "SELECT cell_type, count(*) AS n FROM cells GROUP BY 1"')
def sql(
    atlas_options: AtlasOptions,
    statement: Annotated[
        str,
        argument(
            "One statement that reads, on cells, datasets, features, results_NAME and expression(features := [...])",
            "SQL",
        ),
    ],
    *,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    output: Annotated[str | None, value_option("FILE", "Write a .csv or .parquet file", "--output", "-o")] = None,
    overwrite: Overwrite = False,
    at: AtSnapshot = None,
) -> None:
    """Answer a SQL statement on a snapshot, by DuckDB; it reads no other file."""
    view = atlas_options.open_snapshot(at)
    to_file = TableOutput(output=output, overwrite=overwrite)
    if output is not None:
        to_file.show(lambda: view.sql(statement, as_="arrow"), as_json=False)
        return
    refuse_unused("without --output", to_file, ("overwrite",))
    table = view.sql(statement, as_="arrow")
    if csv:
        _write_csv(table, sys.stdout.buffer)
    else:
        print_table(table.to_pylist(), table.column_names, empty="No rows.", as_json=atlas_options.as_json)


@command(QUERY, "aggregate pbmc.atlas --by cell_type -f CD79A -f LYZ")
def aggregate(
    atlas_options: AtlasOptions,
    *,
    by: Annotated[list[str], value_option("COLUMN", "Make a group of each value; several columns make combinations")],
    selection: Selection,
    output_options: TableOutput,
) -> None:
    """Add up the values of each feature in groups of cells: sum, mean, and in how many cells it was found and measured."""
    import numpy as np
    import pyarrow as pa

    query = selection.ask(atlas_options.open_snapshot(output_options.at))

    def table() -> pa.Table:
        groups = query.aggregate(by, output_options.layer)
        n_groups, n_features = groups.shape
        columns: dict[str, Any] = {
            name: np.repeat(groups.obs[name].astype(object).to_numpy(), n_features) for name in [*by, "n_cells"]
        }
        columns["feature"] = np.tile(groups.var_names.to_numpy(object), n_groups)
        columns["symbol"] = np.tile(groups.var["symbol"].to_numpy(object), n_groups)
        return pa.table(columns | {name: np.asarray(values).ravel() for name, values in groups.layers.items()})

    output_options.show(table, as_json=atlas_options.as_json)


@command(QUERY, "compare pbmc.atlas --by cell_type B T")
def compare(
    atlas_options: AtlasOptions,
    group: Annotated[str, argument("A condition on cells, as SQL; with --by a value of that column", "GROUP")],
    reference: Annotated[
        str | None, argument("The cells to compare with, likewise; by default all others", "[REFERENCE]")
    ] = None,
    *,
    by: Annotated[str | None, value_option("COLUMN", "Column of which GROUP and REFERENCE are values")] = None,
    method: Annotated[
        Literal["t-test", "wilcoxon"], value_option(None, "Welch's t-test, or Wilcoxon's rank-sum test")
    ] = "t-test",
    selection: Selection,
    output_options: TableOutput,
) -> None:
    """Compare two sets of cells by differential expression; the highest score comes first."""
    import pyarrow as pa

    query = selection.ask(atlas_options.open_snapshot(output_options.at))
    sets: list[Any] = [one if by is None or one is None else {by: one} for one in (group, reference)]

    def table() -> pa.Table:
        found = query.compare(*sets, method=method, layer=output_options.layer)
        return pa.Table.from_pandas(found, preserve_index=False)

    output_options.show(table, as_json=atlas_options.as_json)
