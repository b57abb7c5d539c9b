"""Verbs of snapshots: ``snapshot``, ``versions``, ``checkout``, ``diff``, ``restore``."""

import datetime as dt
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raggedatlas.cli.app import CARE, TIME, app, as_commands
from raggedatlas.cli.browse import SHORT, short
from raggedatlas.cli.options import Place, Space, unfold, version_of
from raggedatlas.cli.printing import show, show_facts, show_json, show_table

if TYPE_CHECKING:
    from raggedatlas.model.reports import MaintenanceReport

Snapshot = Annotated[str, typer.Argument(help="Number or label of a snapshot.", show_default=False)]


@app.command(rich_help_panel=TIME, epilog="Example: raggedatlas snapshot pbmc.atlas --label first")
@unfold
def snapshot(
    place: Place, label: Annotated[str | None, typer.Option(help="A name for it.", show_default=False)] = None
) -> None:
    """Record the state of everything, for ever; queries ask a snapshot."""
    number = place.open().snapshot(label)
    if place.as_json:
        show_json({"version": number, "label": label})
    else:
        show(f"Snapshot {number}{f' ({label})' if label else ''} of {place.atlas}")


@app.command(rich_help_panel=TIME, epilog="Example: raggedatlas versions pbmc.atlas")
@unfold
def versions(place: Place) -> None:
    """List the snapshots, oldest first."""
    records = place.open().list_versions()
    if place.as_json:
        show_json([record.model_dump() for record in records])
        return
    rows = [
        {
            "snapshot": str(r.version),
            "label": r.label,
            "created": r.created_at[:16].replace("T", " "),
            "datasets": r.n_datasets,
            "cells": r.n_cells,
        }
        for r in records
    ]
    columns = ["snapshot", "label", "created", "datasets", "cells"]
    show_table(rows, columns, empty=f"No snapshots yet; run: raggedatlas snapshot {place.atlas}")


@app.command(rich_help_panel=TIME, epilog="Example: raggedatlas checkout pbmc.atlas first")
@unfold
def checkout(place: Place, version: Snapshot) -> None:
    """Say what a snapshot holds; --at puts it to query, export, ls and info."""
    view = place.open().checkout(version_of(version))
    rows: Any = view.list_datasets().reset_index().to_dict("records")
    if place.as_json:
        show_json({**view.record.model_dump(), "datasets": rows})
        return
    record = view.record
    show_facts(
        {
            "snapshot": str(record.version),
            "label": record.label or "none",
            "created": record.created_at,
            "cells": record.n_cells,
            "datasets": record.n_datasets,
            "tables": [f"{table} at {number}" for table, number in record.table_versions.items()],
        }
    )
    show("")
    show_table([short(row) for row in rows], SHORT, empty="No datasets.")


@app.command(rich_help_panel=TIME, epilog="Example: raggedatlas diff pbmc.atlas 1 2")
@unfold
def diff(place: Place, old: Snapshot, new: Snapshot) -> None:
    """Say what changed between two snapshots."""
    found = place.open().diff(version_of(old), version_of(new))
    if place.as_json:
        show_json(found.to_dict())
        return
    facts = {
        "datasets added": list(found.datasets_added),
        "datasets removed": list(found.datasets_removed),
        "cells added": found.cells_added,
        "cells removed": found.cells_removed,
        "cells changed": found.cells_changed,
        "columns added": list(found.columns_added),
        "columns removed": list(found.columns_removed),
        "results added": list(found.results_added),
        "results removed": list(found.results_removed),
    }
    for what in ("added", "removed", "changed"):
        for space, names in getattr(found, f"features_{what}").items():
            more = f", ... ({len(names):,} in all)" if len(names) > 5 else ""
            facts[f"{space} features {what}"] = ", ".join(names[:5]) + more
    told = {name: value for name, value in facts.items() if value}
    show_facts(told) if told else show(f"Snapshots {old} and {new} do not differ.")


@app.command(rich_help_panel=TIME, epilog="Example: raggedatlas restore pbmc.atlas first")
@unfold
def restore(place: Place, version: Snapshot) -> None:
    """Make a snapshot's cells, datasets and results the newest state again; all snapshots stay."""
    place.open().restore(version_of(version))
    if place.as_json:
        show_json({"restored": version_of(version)})
    else:
        show(f"The newest state of {place.atlas} is that of snapshot {version} again.")


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
