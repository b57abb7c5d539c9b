"""Verbs about results: ``convert_results``, and those of an atlas: ``results``, ``drop-result``, ``search``."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from raggedatlas.cli.app import ASK, BUILD, CARE, LOOK, app
from raggedatlas.cli.options import At, Place, unfold
from raggedatlas.cli.parameters import AsJson, Strict, Words, many, one
from raggedatlas.cli.printing import progress, show, show_added, show_json, show_table
from raggedatlas.cli.spelling import as_commands


@app.command(
    "convert_results",
    rich_help_panel=BUILD,
    epilog="Example: raggedatlas convert_results --results-dir results/20250201-120000-infer-AbCd",
)
@unfold
def convert_results(
    results_dir: Annotated[
        Path, typer.Option(help="Folder of one run, with batch_index.npy in it.", show_default=False)
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a table that is there; readers see the old one until then.")
    ] = False,
    promote: Annotated[
        bool, typer.Option("--promote", help="Store batches of different dtypes in one that holds all of them.")
    ] = False,
    spot_check: Annotated[int | None, one("N", "Compare N rows at random, and not all")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the .npy results of a model run as a Lance table beside them; the .npy files are never changed."""
    from raggedatlas.results.convert import convert_results as convert

    with progress(f"convert {results_dir}") as callback:
        done = convert(results_dir, overwrite=overwrite, promote=promote, spot_check=spot_check, progress=callback)
    if as_json:
        show_json({**asdict(done), "results_dir": str(done.results_dir), "dtype": done.dtype.name})
    else:
        show(str(done))


SHOWN = ["name", "kind", "space", "width", "dtype", "n_cells", "model", "added"]


@app.command(rich_help_panel=LOOK, epilog="Example: raggedatlas results pbmc.atlas")
@unfold
def results(place: Place, at: At = None) -> None:
    """List the results of models that an atlas holds."""
    show_added(
        place.open_at(at).results(), SHOWN, as_json=place.as_json,
        empty=f"No results yet; run: raggedatlas add {place.atlas} RESULTS --name NAME",
    )  # fmt: skip


@app.command("drop-result", rich_help_panel=CARE, epilog="Example: raggedatlas drop-result pbmc.atlas scvi_64")
@unfold
def drop_result(
    place: Place, name: Annotated[str, typer.Argument(help="Name of the result.", show_default=False)]
) -> None:
    """Take a model's result out of the newest state; snapshots that have it keep it."""
    report = place.open().drop_result(name)
    if place.as_json:
        show_json(report.to_dict())
    else:
        show(f"Dropped the result {name}; " + as_commands("; ".join(report.notes)))


@dataclass(frozen=True)
class Sought:
    """Where is looked, and among which cells."""

    column: Annotated[str, typer.Option(help="A result, an embedding, or a column.", show_default=False)]
    k: Annotated[int, typer.Option("-k", min=1, help="How many cells.")] = 10
    metric: Annotated[
        Literal["l2", "cosine", "dot"],
        typer.Option(help="Distance of vectors: squared Euclidean, or one minus the cosine or the dot product."),
    ] = "l2"
    where: Annotated[Words, many("SQL", "Only such cells", "--where", "-w")] = field(default_factory=list)
    strict: Strict = False
    obs: Annotated[Words, many("COLUMN", "Show a cell column")] = field(default_factory=list)


@app.command(
    rich_help_panel=ASK,
    epilog="Example: raggedatlas search pbmc.atlas 1f0c5a2b9d3e4f60 --column scvi_64 -w \"tissue = 'lung'\"",
)
@unfold
def search(
    place: Place,
    what: Annotated[
        str, typer.Argument(metavar="UID or TEXT", help="A cell, or words of a text column.", show_default=False)
    ],
    *,
    sought: Sought,
    at: At = None,
) -> None:
    """Print the cells nearest to one cell in a result or an embedding, or those whose text fits best."""
    query = place.open_snapshot(at).query()
    for condition in sought.where:
        query = query.where(condition)
    query = query.obs(sought.obs) if sought.obs else query
    found = query.search(what, column=sought.column, k=sought.k, metric=sought.metric).to_arrow()
    rows = found.to_pylist()
    if place.as_json:
        show_json(rows)
    else:
        show_table(rows, found.column_names, empty="No cells.")
