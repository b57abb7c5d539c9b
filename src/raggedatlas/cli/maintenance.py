"""Verbs for snapshots and maintenance."""

import datetime as dt
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raggedatlas.cli.app import MAINTENANCE, SNAPSHOTS, app, methods_to_commands
from raggedatlas.cli.browse import SUMMARY_COLUMNS, summary_row
from raggedatlas.cli.options import AtlasOptions, Space, expand_option_groups, parse_version
from raggedatlas.cli.printing import print_facts, print_json, print_result, print_table, print_text

if TYPE_CHECKING:
    from raggedatlas.model.reports import MaintenanceReport

Snapshot = Annotated[str, typer.Argument(help="Number or label of a snapshot.", show_default=False)]


@app.command(rich_help_panel=SNAPSHOTS, epilog="Example: raggedatlas snapshot pbmc.atlas --label first")
@expand_option_groups
def snapshot(
    atlas_options: AtlasOptions,
    label: Annotated[str | None, typer.Option(help="Label of the snapshot.", show_default=False)] = None,
) -> None:
    """Create an immutable snapshot of the atlas; queries run on snapshots."""
    number = atlas_options.open().snapshot(label)
    print_result(
        {"version": number, "label": label},
        f"Snapshot {number}{f' ({label})' if label else ''} of {atlas_options.atlas}",
        as_json=atlas_options.as_json,
    )


@app.command(rich_help_panel=SNAPSHOTS, epilog="Example: raggedatlas versions pbmc.atlas")
@expand_option_groups
def versions(atlas_options: AtlasOptions) -> None:
    """List the snapshots, oldest first."""
    records = atlas_options.open().list_versions()
    if atlas_options.as_json:
        print_json([record.model_dump() for record in records])
        return
    rows = [
        {
            # As text: a large number would get thousands separators, which `--at` does not take.
            "snapshot": str(r.version),
            "label": r.label,
            "created": r.created_at[:16].replace("T", " "),
            "datasets": r.n_datasets,
            "cells": r.n_cells,
        }
        for r in records
    ]
    columns = ["snapshot", "label", "created", "datasets", "cells"]
    print_table(rows, columns, empty=f"No snapshots yet; run: raggedatlas snapshot {atlas_options.atlas}")


@app.command(rich_help_panel=SNAPSHOTS, epilog="Example: raggedatlas checkout pbmc.atlas first")
@expand_option_groups
def checkout(atlas_options: AtlasOptions, version: Snapshot) -> None:
    """Show the contents of a snapshot; query, export, ls and info accept it with --at."""
    view = atlas_options.open().checkout(parse_version(version))
    rows: Any = view.list_datasets().reset_index().to_dict("records")
    if atlas_options.as_json:
        print_json({**view.record.model_dump(), "datasets": rows})
        return
    record = view.record
    print_facts(
        {
            "snapshot": str(record.version),
            "label": record.label or "none",
            "created": record.created_at,
            "cells": record.n_cells,
            "datasets": record.n_datasets,
            "tables": [f"{table} at {number}" for table, number in record.table_versions.items()],
        }
    )
    print_text("")
    print_table([summary_row(row) for row in rows], SUMMARY_COLUMNS, empty="No datasets.")


@app.command(rich_help_panel=SNAPSHOTS, epilog="Example: raggedatlas diff pbmc.atlas 1 2")
@expand_option_groups
def diff(atlas_options: AtlasOptions, old: Snapshot, new: Snapshot) -> None:
    """Show the differences between two snapshots."""
    found = atlas_options.open().diff(parse_version(old), parse_version(new))
    if atlas_options.as_json:
        print_json(found.to_dict())
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
    changes = {name: value for name, value in facts.items() if value}
    print_facts(changes) if changes else print_text(f"Snapshots {old} and {new} do not differ.")


@app.command(rich_help_panel=SNAPSHOTS, epilog="Example: raggedatlas restore pbmc.atlas first")
@expand_option_groups
def restore(atlas_options: AtlasOptions, version: Snapshot) -> None:
    """Restore the cells, datasets and results of a snapshot as the newest state; all snapshots are kept."""
    atlas_options.open().restore(parse_version(version))
    print_result(
        {"restored": parse_version(version)},
        f"The newest state of {atlas_options.atlas} is that of snapshot {version} again.",
        as_json=atlas_options.as_json,
    )


Dataset = Annotated[str, typer.Argument(help="Name or uid of a dataset.", show_default=False)]


@app.command(rich_help_panel=MAINTENANCE, epilog="Example: raggedatlas repair pbmc.atlas")
@expand_option_groups
def repair(atlas_options: AtlasOptions) -> None:
    """Remove leftovers of killed or failed calls."""
    _print_report(atlas_options.open().repair(), atlas_options)


@app.command(rich_help_panel=MAINTENANCE, epilog="Example: raggedatlas optimize pbmc.atlas")
@expand_option_groups
def optimize(atlas_options: AtlasOptions) -> None:
    """Compact the tables and rebuild their indexes; snapshots do not change."""
    atlas_options.open().optimize()
    print_result({"optimized": atlas_options.atlas}, f"Optimized {atlas_options.atlas}", as_json=atlas_options.as_json)


@app.command(rich_help_panel=MAINTENANCE, epilog="Example: raggedatlas add-csc pbmc.atlas pbmc_10k --layer counts")
@expand_option_groups
def add_csc(
    atlas_options: AtlasOptions,
    dataset: Dataset,
    space: Space = "gene_expression",
    layer: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYER", help="Layer to copy, by default all; repeatable.", show_default=False),
    ] = None,
) -> None:
    """Write a column-sorted copy of a dataset's sparse layers, for reading few features of many cells."""
    written = atlas_options.open().add_csc(dataset, space=space, layers=layer or None)
    print_result(
        {"dataset": dataset, "space": space, "layers": written},
        f"Wrote {', '.join(written)} of {dataset}" if written else f"{dataset} already has its column-sorted copies.",
        as_json=atlas_options.as_json,
    )


@app.command(rich_help_panel=MAINTENANCE, epilog="Example: raggedatlas drop pbmc.atlas pbmc_10k")
@expand_option_groups
def drop(atlas_options: AtlasOptions, dataset: Dataset) -> None:
    """Remove a dataset from the newest state; snapshots keep it."""
    _print_report(atlas_options.open().drop_dataset(dataset), atlas_options)


@app.command(rich_help_panel=MAINTENANCE, epilog="Example: raggedatlas rename pbmc.atlas pbmc_10k pbmc_10k_v3")
@expand_option_groups
def rename(
    atlas_options: AtlasOptions,
    dataset: Dataset,
    name: Annotated[str, typer.Argument(help="New name.", show_default=False)],
) -> None:
    """Give a dataset another name; snapshots keep the old one."""
    atlas_options.open().rename_dataset(dataset, name)
    print_result({"dataset": dataset, "name": name}, f"Renamed {dataset} to {name}", as_json=atlas_options.as_json)


@app.command(rich_help_panel=SNAPSHOTS, epilog="Example: raggedatlas drop-snapshot pbmc.atlas 3")
@expand_option_groups
def drop_snapshot(
    atlas_options: AtlasOptions,
    version: Annotated[str, typer.Argument(help="Number or label of a snapshot.", show_default=False)],
) -> None:
    """Remove a snapshot; gc frees what only it reached."""
    _print_dropped(atlas_options.open().drop_snapshot(version), atlas_options)


@app.command(
    rich_help_panel=SNAPSHOTS, epilog="Example: raggedatlas expire-snapshots pbmc.atlas --older-than 90 --keep-last 10"
)
@expand_option_groups
def expire_snapshots(
    atlas_options: AtlasOptions,
    older_than: Annotated[
        int | None, typer.Option(min=0, metavar="DAYS", help="Only snapshots taken longer ago.", show_default=False)
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Keep the newest N.", show_default=False)
    ] = None,
    labels: Annotated[
        bool, typer.Option("--labels", help="Also snapshots with a label; by default they stay.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which would go.")] = False,
) -> None:
    """Remove old snapshots; the newest one stays, and gc frees what only the others reached."""
    if older_than is None and keep_last is None:
        raise typer.BadParameter(
            "nothing says which snapshots are old; give one of these", param_hint="--older-than, --keep-last"
        )
    span = None if older_than is None else dt.timedelta(days=older_than)
    report = atlas_options.open().expire_snapshots(
        older_than=span, keep_last=keep_last, keep_labels=not labels, dry_run=dry_run
    )
    _print_dropped(report, atlas_options)


def _print_dropped(report: "MaintenanceReport", atlas_options: AtlasOptions) -> None:
    if atlas_options.as_json:
        print_json(report.to_dict())
        return
    *dropped, rest = report.notes
    for snapshot_of in dropped:
        print_text(f"{'Would drop' if report.dry_run else 'Dropped'} {snapshot_of}")
    print_text(methods_to_commands(f"{rest[0].upper()}{rest[1:]}."))


@app.command(rich_help_panel=MAINTENANCE, epilog="Example: raggedatlas purge pbmc.atlas pbmc_10k --yes")
@expand_option_groups
def purge(
    atlas_options: AtlasOptions,
    dataset: Dataset,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a dataset from the newest state and every snapshot; this cannot be undone."""
    # Opened before the question, so that a wrong path is refused first.
    atlas = atlas_options.open()
    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("this cannot be undone; confirm it", param_hint="--yes")
    # On stderr, because stdout may be read as JSON.
    if not yes and not typer.confirm(f"Remove {dataset} from every snapshot permanently?", err=True):
        raise typer.Abort
    _print_report(atlas.purge(dataset), atlas_options)


@app.command(rich_help_panel=MAINTENANCE, epilog="Example: raggedatlas gc pbmc.atlas --delete")
@expand_option_groups
def gc(
    atlas_options: AtlasOptions,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the data; by default only report it.")] = False,
    grace: Annotated[
        int,
        typer.Option(
            min=0, metavar="MINUTES", help="Time without activity after which an add in another process counts as dead."
        ),
    ] = 60,
) -> None:
    """Delete data that no snapshot, dataset or running add references."""
    _print_report(atlas_options.open().gc(dry_run=not delete, grace=dt.timedelta(minutes=grace)), atlas_options)


def _print_report(report: "MaintenanceReport", atlas_options: AtlasOptions) -> None:
    if atlas_options.as_json:
        print_json(report.to_dict())
        return
    would = "Would remove" if report.dry_run else "Removed"
    print_text(
        f"{would} {report.n_cells:,} cells and {len(report.groups):,} groups of arrays ({report.n_bytes:,} bytes)."
    )
    for group in report.groups:
        print_text(f"  {group}")
    for group in report.kept:
        print_text(f"  kept for a running add: {group}")
    for note in report.notes:
        # Notes of the library name methods; a reader of the command needs the commands.
        print_text(methods_to_commands(f"  {note}"))
