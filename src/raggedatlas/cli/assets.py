"""Verbs about results: ``convert_results``, and those of an atlas: ``results``, ``drop-result``, ``search``."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from raggedatlas.cli.app import ASK, BUILD, CARE, LOOK, app, as_commands
from raggedatlas.cli.options import AsJson, At, Place, Strict, Words, many, one, pairs, unfold
from raggedatlas.cli.printing import progress, show, show_added, show_json, show_table


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


RESULT_COLUMNS = ["name", "kind", "space", "width", "dtype", "n_cells", "model", "added"]


@app.command(rich_help_panel=LOOK, epilog="Example: raggedatlas results pbmc.atlas")
@unfold
def results(place: Place, at: At = None) -> None:
    """List the results of models that an atlas holds."""
    show_added(
        place.open_at(at).results(), RESULT_COLUMNS, as_json=place.as_json,
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


GEOMETRY_COLUMNS = [
    "name",
    "space",
    "types",
    "axes",
    "n_cells",
    "datasets",
    "n_objects",
    "n_vertices",
    "n_levels",
    "added",
]


@app.command(rich_help_panel=LOOK, epilog="Example: raggedatlas geometries slide.atlas")
@unfold
def geometries(place: Place, at: At = None) -> None:
    """List the shapes of cells that an atlas holds."""
    show_added(
        place.open_at(at).geometries(), GEOMETRY_COLUMNS, as_json=place.as_json,
        empty=f"No geometry yet; run: raggedatlas add {place.atlas} STORE --link COLUMN --space SPACE",
    )  # fmt: skip


@app.command(
    "drop-geometry",
    rich_help_panel=CARE,
    epilog="Example: raggedatlas drop-geometry slide.atlas segmentation_boundary --dataset slide1",
)
@unfold
def drop_geometry(
    place: Place,
    name: Annotated[str, typer.Argument(help="Name of the geometry, or its feature space.", show_default=False)],
    dataset: Annotated[str | None, one("DATASET", "Take that of one dataset only, by its name or uid")] = None,
) -> None:
    """Take shapes of cells out of the newest state; snapshots that have them keep them."""
    report = place.open().drop_geometry(name, dataset)
    if place.as_json:
        show_json(report.to_dict())
    else:
        show(f"Dropped the geometry {name} of {report.n_cells:,} cells; " + as_commands("; ".join(report.notes)))


@dataclass(frozen=True)
class AnnotateChoices:
    """What is written back, and how."""

    name: Annotated[str | None, one("NAME", "Name of the annotation; else the file's")] = None
    on: Annotated[
        Literal["uid", "cell_name"],
        typer.Option(help="How rows name cells; cell names need a column dataset, or --dataset."),
    ] = "uid"
    dataset: Annotated[str | None, one("DATASET", "Dataset of all rows, with --on cell_name")] = None
    column: Annotated[
        Words, many("COLUMN or OLD=NEW", "Write only these columns, under a new name with =", "--column", "-c")
    ] = field(default_factory=list)
    obsm: Annotated[Words, many("KEY", "Add a member of obsm, such as X_umap, as a result")] = field(
        default_factory=list
    )
    cast: Annotated[Words, many("COLUMN=TYPE", "Convert a column to str, int, float or bool")] = field(
        default_factory=list
    )
    on_conflict: Annotated[
        Literal["error", "replace", "keep"], typer.Option(help="What to do where a cell has another value already.")
    ] = "error"
    unknown: Annotated[
        Literal["error", "skip"], typer.Option(help="What to do with rows that name no cell of the atlas.")
    ] = "error"
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and report; write nothing.")] = False


@app.command(
    rich_help_panel=BUILD,
    epilog="Example: raggedatlas annotate pbmc.atlas clusters.csv --column leiden --cast leiden=str",
)
@unfold
def annotate(
    place: Place,
    file: Annotated[
        str, typer.Argument(help="CSV, TSV or Parquet, or a file of cells such as .h5ad.", show_default=False)
    ],
    *,
    choices: AnnotateChoices,
) -> None:
    """Write values of cells, such as clusters or labels, back into an atlas as cell columns."""
    columns = {old: new or old for old, _, new in (word.partition("=") for word in choices.column)}
    report = place.open().annotate(
        file, choices.name, on=choices.on, dataset=choices.dataset, columns=columns or None, obsm=choices.obsm,
        cast=pairs(choices.cast, "--cast"), on_conflict=choices.on_conflict, unknown=choices.unknown,
        dry_run=choices.dry_run,
    )  # fmt: skip
    if place.as_json:
        show_json(report.to_dict())
    else:
        show(repr(report))


ANNOTATION_COLUMNS = ["name", "columns", "n_cells", "n_values", "source", "snapshot", "added"]


@app.command(rich_help_panel=LOOK, epilog="Example: raggedatlas annotations pbmc.atlas")
@unfold
def annotations(place: Place, at: At = None) -> None:
    """List the annotations that an atlas holds."""
    show_added(
        place.open_at(at).annotations(), ANNOTATION_COLUMNS, as_json=place.as_json,
        empty=f"No annotations yet; run: raggedatlas annotate {place.atlas} FILE",
    )  # fmt: skip


@app.command("drop-annotation", rich_help_panel=CARE, epilog="Example: raggedatlas drop-annotation pbmc.atlas clusters")
@unfold
def drop_annotation(
    place: Place, name: Annotated[str, typer.Argument(help="Name of the annotation.", show_default=False)]
) -> None:
    """Take an annotation out of the newest state; columns that it covered are shown again, and snapshots keep it."""
    report = place.open().drop_annotation(name)
    if place.as_json:
        show_json(report.to_dict())
    else:
        show(f"Dropped the annotation {name}; " + "; ".join(report.notes))
