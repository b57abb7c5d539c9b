"""Commands for annotations: ``annotate``, ``annotations`` and ``drop-annotation``."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import typer

from raggedatlas.cli.app import BUILD, CARE, LOOK, app
from raggedatlas.cli.options import At, Place, pairs, unfold
from raggedatlas.cli.parameters import Words, many, one
from raggedatlas.cli.printing import show, show_added, show_json


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


SHOWN = ["name", "columns", "n_cells", "n_values", "source", "snapshot", "added"]


@app.command(rich_help_panel=LOOK, epilog="Example: raggedatlas annotations pbmc.atlas")
@unfold
def annotations(place: Place, at: At = None) -> None:
    """List the annotations that an atlas holds."""
    show_added(
        place.open_at(at).annotations(), SHOWN, as_json=place.as_json,
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
