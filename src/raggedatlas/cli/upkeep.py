"""Verbs of care: ``repair``, ``optimize``, ``add-csc``, ``drop``, ``purge``, ``gc``."""

import datetime as dt
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from raggedatlas.cli.app import CARE, app
from raggedatlas.cli.options import Place, Space, unfold
from raggedatlas.cli.printing import show, show_json
from raggedatlas.cli.spelling import as_commands

if TYPE_CHECKING:
    from raggedatlas.model.reports import MaintenanceReport

Dataset = Annotated[str, typer.Argument(help="Name or uid of a dataset.", show_default=False)]


@app.command(rich_help_panel=CARE, epilog="Example: raggedatlas repair pbmc.atlas")
@unfold
def repair(place: Place) -> None:
    """Remove what killed or failed calls left."""
    _show_upkeep(place.open().repair(), place)


@app.command(rich_help_panel=CARE, epilog="Example: raggedatlas optimize pbmc.atlas")
@unfold
def optimize(place: Place) -> None:
    """Compact the tables and rebuild their indexes; snapshots stay as they are."""
    place.open().optimize()
    if place.as_json:
        show_json({"optimized": place.atlas})
    else:
        show(f"Optimized {place.atlas}")


@app.command(rich_help_panel=CARE, epilog="Example: raggedatlas add-csc pbmc.atlas pbmc_10k --layer counts")
@unfold
def add_csc(
    place: Place,
    dataset: Dataset,
    space: Space = "gene_expression",
    layer: Annotated[
        list[str] | None, typer.Option(metavar="LAYER", help="Which layers; else all; repeatable.", show_default=False)
    ] = None,
) -> None:
    """Write a column-sorted copy of a dataset's sparse layers, for reading few features of many cells."""
    written = place.open().add_csc(dataset, space=space, layers=layer or None)
    if place.as_json:
        show_json({"dataset": dataset, "space": space, "layers": written})
    else:
        show(
            f"Wrote {', '.join(written)} of {dataset}"
            if written
            else f"{dataset} has its column-sorted copies already."
        )


@app.command(rich_help_panel=CARE, epilog="Example: raggedatlas drop pbmc.atlas pbmc_10k")
@unfold
def drop(place: Place, dataset: Dataset) -> None:
    """Take a dataset out of the newest state; snapshots that have it keep it."""
    _show_upkeep(place.open().drop_dataset(dataset), place)


@app.command(rich_help_panel=CARE, epilog="Example: raggedatlas purge pbmc.atlas pbmc_10k --yes")
@unfold
def purge(
    place: Place,
    dataset: Dataset,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a dataset from the newest state and every snapshot; this cannot be undone."""
    atlas = place.open()
    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("this cannot be undone, so say that you mean it", param_hint="--yes")
    if not yes and not typer.confirm(f"Remove {dataset} from every snapshot for ever?", err=True):
        raise typer.Abort
    _show_upkeep(atlas.purge(dataset), place)


@app.command(rich_help_panel=CARE, epilog="Example: raggedatlas gc pbmc.atlas --delete")
@unfold
def gc(
    place: Place,
    delete: Annotated[bool, typer.Option("--delete", help="Free it; else only say what would be freed.")] = False,
    grace: Annotated[
        int,
        typer.Option(
            min=0, metavar="MINUTES", help="How long an add elsewhere may be silent before it counts as dead."
        ),
    ] = 60,
) -> None:
    """Free what no snapshot, no dataset and no running add reaches."""
    _show_upkeep(place.open().gc(dry_run=not delete, grace=dt.timedelta(minutes=grace)), place)


def _show_upkeep(report: "MaintenanceReport", place: Place) -> None:
    if place.as_json:
        show_json(report.to_dict())
        return
    would = "Would remove" if report.dry_run else "Removed"
    show(f"{would} {report.n_cells:,} cells and {len(report.groups):,} groups of arrays ({report.n_bytes:,} bytes).")
    for group in report.groups:
        show(f"  {group}")
    for group in report.kept:
        show(f"  kept for a running add: {group}")
    for note in report.notes:
        show(as_commands(f"  {note}"))
