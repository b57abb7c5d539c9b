"""Verbs that ask: ``query`` and ``export``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from raggedatlas.cli.app import ASK, app
from raggedatlas.cli.options import (
    AsCxg,
    At,
    Inside,
    Overwrite,
    Place,
    Processes,
    Selection,
    shared_by,
    tell_losses,
    unfold,
)
from raggedatlas.cli.printing import plain, progress, say, show, show_json, show_table
from raggedatlas.errors import DuplicateError, SourceError

if TYPE_CHECKING:
    import pyarrow as pa

    from raggedatlas.query.query import Query


@dataclass(frozen=True)
class Answer:
    """What to print of an answer."""

    count: Annotated[bool, typer.Option("--count", help="Print only how many cells.")] = False
    by: Annotated[
        list[str], typer.Option(metavar="COLUMN", help="Count cells per value; repeatable.", show_default=False)
    ] = field(default_factory=list)
    explain: Annotated[bool, typer.Option("--explain", help="Say what would be read, and read no values.")] = False
    head: Annotated[int, typer.Option(min=0, help="How many cells to show.")] = 10
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Also write the answer to a file, as export does.",
            show_default=False,
        ),
    ] = None
    overwrite: Overwrite = False
    at: At = None


@app.command(rich_help_panel=ASK, epilog="Example: raggedatlas query pbmc.atlas \"cell_type = 'B'\" -f CD79A -f MS4A1")
@unfold
def query(
    place: Place,
    condition: Annotated[
        str | None, typer.Argument(metavar="[SQL]", help="Which cells, as SQL; else all.", show_default=False)
    ] = None,
    *,
    selection: Selection,
    inside: Inside,
    answer: Answer,
) -> None:
    """Ask a snapshot (the newest, or --at) for cells, and show the first of them."""
    view = place.open_snapshot(answer.at)
    asked = selection.ask(view)
    asked = asked if condition is None else asked.where(condition)
    asked = inside.narrow(asked, selection.space)
    if selection.layers or selection.features:
        asked.explain()  # refuses names that are not there, also where only cells are counted or shown
    if answer.output is not None:
        _write(asked, answer.output, {"overwrite": answer.overwrite})
        say(f"Wrote {answer.output}")
    if answer.explain:
        text = asked.explain()
        _tell(text, {"explain": text} if place.as_json else None)
    elif answer.by:
        _show_counts(asked, answer.by, as_json=place.as_json)
    elif answer.count:
        n = asked.count()
        _tell(str(n), {"n_cells": n} if place.as_json else None)
    else:
        _show_cells(asked, view.version, selection, answer.head, as_json=place.as_json)


def _tell(text: str, document: dict[str, Any] | None) -> None:
    if document is None:
        show(text)
    else:
        show_json(document)


def _show_counts(asked: "Query", by: list[str], *, as_json: bool) -> None:
    counted: Any = asked.count(by)
    rows: list[dict[str, Any]] = counted.reset_index().astype(object).to_dict("records")
    if as_json:
        show_json(rows)
    else:
        shown = [{**row, **{name: "(missing)" for name in by if plain(row[name]) is None}} for row in rows]
        show_table(shown, [*by, "n_cells"], empty="No cells.")


def _show_cells(asked: "Query", version: int, selection: Selection, head: int, *, as_json: bool) -> None:
    n = cast("int", asked.count())
    limit = head if selection.limit is None else min(head, selection.limit)
    few = asked.limit(limit)
    rows = few.to_arrow().to_pylist()
    columns = [name for name in (rows[0] if rows else {}) if name != "uid"]
    if selection.features and rows:
        values = _values(few, len(rows))
        rows = [{**row, "values": values.get(row["uid"])} for row in rows]
    if as_json:
        show_json({"snapshot": version, "n_cells": n, "cells": rows})
        return
    shown = [{**row, **(row.get("values") or {})} for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row.get("values") or {}))
    show_table([{**dict.fromkeys(names), **row} for row in shown], [*names, *columns], empty="")
    show(f"{n:,} cells at snapshot {version}" + (f", the first {len(rows):,} shown" if len(rows) < n else ""))


def _values(few: "Query", n: int) -> dict[str, dict[str, Any]]:
    """Give the asked features of a few cells: uid -> name -> value."""
    from raggedatlas.catalog.features import read_registry

    (batch,) = few.batches(n)
    uids = batch.obs.column("uid").to_pylist()
    found: dict[str, dict[str, Any]] = {uid: {} for uid in uids}
    for space, part in batch.spaces.items():
        names = read_registry(few.catalog, space).names_of(part.features.tolist()) if len(part.features) else []
        rows = part.block.first_rows()
        for i in part.present.nonzero()[0].tolist():
            found[uids[i]].update(zip(names, rows[i].tolist(), strict=True))
    return found


@app.command(rich_help_panel=ASK, epilog="Example: raggedatlas export pbmc.atlas b.h5ad --where \"cell_type = 'B'\"")
@unfold
def export(
    place: Place,
    output: Annotated[
        str,
        typer.Argument(
            help="A .h5ad, .zarr, .h5mu or .cxg; .parquet or .csv for the cells' metadata.", show_default=False
        ),
    ],
    *,
    selection: Selection,
    inside: Inside,
    cxg: AsCxg,
    overwrite: Overwrite = False,
    at: At = None,
    workers: Processes = 1,
) -> None:
    """Write cells of a snapshot (the newest, or --at) to a file."""
    view = place.open_snapshot(at)
    asked = inside.narrow(selection.ask(view), selection.space)
    with shared_by(workers) as executor:
        _write(asked, output, {"overwrite": overwrite, "executor": executor, **cxg.options(output, tell_losses)})
    if place.as_json:
        show_json({"path": output, "snapshot": view.version, "n_cells": asked.count()})
    else:
        show(f"Wrote {asked.count():,} cells of snapshot {view.version} to {output}")


def _write(asked: "Query", output: str, options: dict[str, Any]) -> None:
    from raggedatlas.formats.registry import WRITERS

    endings = [*WRITERS, *TABLES]
    if Path(output).suffix not in endings:
        raise SourceError(f"{output} has the ending {Path(output).suffix!r}; {', '.join(endings)} can be written.")
    with progress(f"write {output}") as callback:
        callback("cells", 0, 1)
        if Path(output).suffix in TABLES:
            _write_table(asked.to_arrow(), Path(output), overwrite=options["overwrite"])
        else:
            asked.write(output, **options)
        callback("done", 1, 1)


def _write_table(table: "pa.Table", path: Path, *, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise DuplicateError(f"{path} exists; choose another name, or pass --overwrite.")
    part = path.with_name(f".{path.name}.part")
    try:
        TABLES[path.suffix](table, str(part))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_parquet(table: "pa.Table", path: str) -> None:
    from pyarrow import parquet

    parquet.write_table(table, path)


def _write_csv(table: "pa.Table", path: str) -> None:
    import pyarrow as pa
    from pyarrow import csv

    flat = [f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in table.schema]
    csv.write_csv(table.cast(pa.schema(flat)), path)


TABLES: dict[str, Callable[["pa.Table", str], None]] = {".parquet": _write_parquet, ".csv": _write_csv}
