"""Verbs for snapshots and maintenance."""

import datetime as dt
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raggedatlas.cli.app import EXIT_FAILURE, MAINTENANCE, SNAPSHOTS, command, to_command_line
from raggedatlas.cli.browse import summary_columns, summary_row
from raggedatlas.cli.options import (
    AtlasOptions,
    AtSnapshot,
    RootHash,
    SinceSnapshot,
    Space,
    WorkerCount,
    argument,
    parse_pairs,
    parse_version,
    process_pool,
    repeatable_option,
    value_option,
)
from raggedatlas.cli.printing import minute, print_facts, print_json, print_table, print_text, progress

if TYPE_CHECKING:
    from raggedatlas.model.reports import Report

Snapshot = Annotated[str, argument("Number or label of a snapshot")]
TargetOption = Annotated[
    list[str] | None, repeatable_option("KEY=VALUE", "Credential or endpoint of the target", "--target-option")
]


@command(SNAPSHOTS, "snapshot pbmc.atlas --label first")
def snapshot(
    atlas_options: AtlasOptions,
    label: Annotated[str | None, value_option(None, "Label of the snapshot")] = None,
) -> tuple[Any, str]:
    """Create an immutable snapshot of the atlas; queries run on snapshots."""
    number = atlas_options.open().snapshot(label)
    return {
        "version": number,
        "label": label,
    }, f"Snapshot {number}{f' ({label})' if label else ''} of {atlas_options.atlas}"


@command(SNAPSHOTS, "versions pbmc.atlas")
def versions(atlas_options: AtlasOptions) -> None:
    """List the snapshots, oldest first."""
    records = atlas_options.open_at(None).list_versions()
    if atlas_options.as_json:
        print_json([record.model_dump() for record in records])
        return
    rows = [
        {
            # As text: a large number would get thousands separators, which `--at` does not take.
            "snapshot": str(r.version),
            "label": r.label,
            "created": minute(r.created_at),
            "datasets": r.n_datasets,
            "cells": r.n_cells,
        }
        for r in records
    ]
    columns = ["snapshot", "label", "created", "datasets", "cells"]
    print_table(rows, columns, empty=f"No snapshots yet; run: raggedatlas snapshot {shlex.quote(atlas_options.atlas)}")


@command(SNAPSHOTS, "checkout pbmc.atlas first")
def checkout(atlas_options: AtlasOptions, version: Snapshot) -> None:
    """Show the contents of a snapshot; query, export, ls and info accept it with --at."""
    view = atlas_options.open_snapshot(version)
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
    print_table([summary_row(row) for row in rows], summary_columns(rows), empty="No datasets.")


@command(SNAPSHOTS, "diff pbmc.atlas 1 2")
def diff(
    atlas_options: AtlasOptions,
    old: Snapshot,
    new: Snapshot,
    files: Annotated[
        bool, typer.Option("--files", help="Compare their files by recorded hashes; no data are read.")
    ] = False,
    other: Annotated[
        str | None, value_option("ATLAS", "NEW is a snapshot of this atlas, e.g. a mirror; with --files")
    ] = None,
    other_option: Annotated[
        list[str] | None, repeatable_option("KEY=VALUE", "Credential or endpoint of the other atlas", "--other-option")
    ] = None,
) -> "Report":
    """Show the differences between two snapshots."""
    if other is not None and not files:
        raise typer.BadParameter("is used with --files", param_hint="--other")
    atlas, versions = atlas_options.open(), (parse_version(old), parse_version(new))
    if not files:
        return atlas.diff(*versions)
    return atlas.diff_files(*versions, other=other, storage_options=parse_pairs(other_option or [], "--other-option"))


@command(SNAPSHOTS, "restore pbmc.atlas first")
def restore(atlas_options: AtlasOptions, version: Snapshot) -> tuple[Any, str]:
    """Restore the cells, datasets and results of a snapshot as the newest state; all snapshots are kept."""
    atlas_options.open().restore(parse_version(version))
    return {
        "restored": parse_version(version)
    }, f"The newest state of {atlas_options.atlas} is that of snapshot {version} again."


Dataset = Annotated[str, argument("Name or uid of a dataset")]


@command(MAINTENANCE, "repair pbmc.atlas")
def repair(atlas_options: AtlasOptions) -> "Report":
    """Remove leftovers of killed or failed calls."""
    return atlas_options.open().repair()


@command(MAINTENANCE, "optimize pbmc.atlas")
def optimize(atlas_options: AtlasOptions) -> tuple[Any, str]:
    """Compact the tables and rebuild their indexes; snapshots do not change."""
    atlas_options.open().optimize()
    return {"optimized": atlas_options.atlas}, f"Optimized {atlas_options.atlas}"


@command(MAINTENANCE, "add-csc pbmc.atlas pbmc_10k --layer counts")
def add_csc(
    atlas_options: AtlasOptions,
    dataset: Dataset,
    space: Space = "gene_expression",
    layer: Annotated[
        list[str] | None,
        repeatable_option("LAYER", "Layer to copy, by default all"),
    ] = None,
) -> tuple[Any, str]:
    """Write a column-sorted copy of a dataset's sparse layers, for reading few features of many cells."""
    written = atlas_options.open().add_csc(dataset, space=space, layers=layer or None)
    return {
        "dataset": dataset,
        "space": space,
        "layers": written,
    }, f"Wrote {', '.join(written)} of {dataset}" if written else f"{dataset} already has its column-sorted copies."


@command(MAINTENANCE, "materialize pbmc.atlas pbmc_10k --workers 4")
def materialize(
    atlas_options: AtlasOptions,
    datasets: Annotated[list[str] | None, argument("Names or uids of linked datasets; by default all")] = None,
    workers: WorkerCount = 1,
) -> tuple[Any, str]:
    """Copy the values of linked datasets into the atlas, which then needs their files no more."""
    with process_pool(workers) as executor:
        copied = atlas_options.open().materialize(datasets or None, executor=executor)
    return {
        "copied": copied
    }, f"Copied {', '.join(copied)} into {atlas_options.atlas}" if copied else "No dataset is linked."


@command(MAINTENANCE, "relink pbmc.atlas pbmc_10k /data/moved/pbmc_10k.h5ad")
def relink(
    atlas_options: AtlasOptions,
    dataset: Dataset,
    path: Annotated[
        str | None, argument("The file or Zarr folder, or its address; by default the recorded one")
    ] = None,
    full_hash: Annotated[
        bool, typer.Option("--full-hash", help="Record a hash of all values, which validate --level deep compares.")
    ] = False,
    source_option: Annotated[
        list[str] | None, repeatable_option("KEY=VALUE", "Credential or endpoint of the address", "--source-option")
    ] = None,
) -> tuple[Any, str]:
    """Name the place that the file of a linked dataset has moved to; its values are compared unless it is the recorded file."""
    options = parse_pairs(source_option or [], "--source-option")
    address = atlas_options.open().relink(
        dataset, path, hash="full" if full_hash else "metadata", storage_options=options
    )
    return {"dataset": dataset, "linked": address}, f"{dataset} is linked to {address} now."


@command(MAINTENANCE, "drop pbmc.atlas pbmc_10k")
def drop(atlas_options: AtlasOptions, dataset: Dataset) -> "Report":
    """Remove a dataset from the newest state; snapshots keep it."""
    return atlas_options.open().drop_dataset(dataset)


@command(MAINTENANCE, 'delete-cells pbmc.atlas "n_genes < 200" --dry-run')
def delete_cells(
    atlas_options: AtlasOptions,
    condition: Annotated[
        str | None,
        typer.Argument(metavar="[SQL]", help="Condition on the cells to delete, as SQL.", show_default=False),
    ] = None,
    uids: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Delete the cells that a file names: .txt with one uid a line, or a column uid in .csv, .tsv or .parquet.",
            show_default=False,
        ),
    ] = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report how many cells of which datasets.")] = False,
) -> "Report":
    """Delete cells from the newest state; snapshots keep them."""
    if (condition is None) == (uids is None):
        raise typer.BadParameter("name the cells by a condition or by a file, one of them", param_hint="[SQL], --uids")
    return atlas_options.open().delete_cells(condition, uids=uids, dry_run=dry_run)


@command(MAINTENANCE, "rename pbmc.atlas pbmc_10k pbmc_10k_v3")
def rename(
    atlas_options: AtlasOptions,
    dataset: Dataset,
    name: Annotated[str, argument("New name")],
) -> tuple[Any, str]:
    """Give a dataset another name; snapshots keep the old one."""
    atlas_options.open().rename_dataset(dataset, name)
    return {"dataset": dataset, "name": name}, f"Renamed {dataset} to {name}"


@command(SNAPSHOTS, "drop-snapshot pbmc.atlas 3")
def drop_snapshot(atlas_options: AtlasOptions, version: Snapshot) -> "Report":
    """Remove a snapshot; gc frees what only it reached."""
    return atlas_options.open().drop_snapshot(version)


@command(SNAPSHOTS, "expire-snapshots pbmc.atlas --older-than 90 --keep-last 10")
def expire_snapshots(
    atlas_options: AtlasOptions,
    older_than: Annotated[int | None, value_option("DAYS", "Only snapshots taken longer ago", min=0)] = None,
    keep_last: Annotated[int | None, value_option("N", "Keep the newest N", min=0)] = None,
    labels: Annotated[
        bool, typer.Option("--labels", help="Also snapshots with a label; by default they stay.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which would go.")] = False,
) -> "Report":
    """Remove old snapshots; the newest one stays, and gc frees what only the others reached."""
    if older_than is None and keep_last is None:
        raise typer.BadParameter(
            "nothing says which snapshots are old; give one of these", param_hint="--older-than, --keep-last"
        )
    span = None if older_than is None else dt.timedelta(days=older_than)
    return atlas_options.open().expire_snapshots(
        older_than=span, keep_last=keep_last, keep_labels=not labels, dry_run=dry_run
    )


@command(MAINTENANCE, "purge pbmc.atlas pbmc_10k --yes")
def purge(
    atlas_options: AtlasOptions,
    dataset: Dataset,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> "Report":
    """Remove a dataset from the newest state and every snapshot; this cannot be undone."""
    # Opened before the question, so that a wrong path is refused first.
    atlas = atlas_options.open()
    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("this cannot be undone; confirm it", param_hint="--yes")
    # On stderr, because stdout may be read as JSON.
    if not yes and not typer.confirm(f"Remove {dataset} from every snapshot permanently?", err=True):
        raise typer.Abort
    return atlas.purge(dataset)


@command(MAINTENANCE, "gc pbmc.atlas --delete")
def gc(
    atlas_options: AtlasOptions,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the data; by default only report it.")] = False,
    grace: Annotated[
        int,
        typer.Option(
            min=0, metavar="MINUTES", help="Time without activity after which an add in another process counts as dead."
        ),
    ] = 60,
) -> "Report":
    """Delete data that no snapshot, dataset or running add references."""
    return atlas_options.open().gc(dry_run=not delete, grace=dt.timedelta(minutes=grace))


@command(MAINTENANCE, "sync pbmc.atlas s3://bucket/pbmc.atlas --target-option aws_region=eu-central-1")
def sync(
    atlas_options: AtlasOptions,
    target: Annotated[str, argument("Empty place, or an earlier mirror: a folder or address")],
    target_option: TargetOption = None,
    values: Annotated[bool, typer.Option("--values", help="Also copy the files that datasets are linked to.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be copied.")] = False,
) -> "Report":
    """Mirror all snapshots to another place; only files that differ are copied."""
    options = parse_pairs(target_option or [], "--target-option")
    with progress("sync") as callback:
        return atlas_options.open().sync(
            target, values=values, storage_options=options, dry_run=dry_run, progress=callback
        )


@command(SNAPSHOTS, "publish pbmc.atlas /srv/www/pbmc.atlas --at v3 --license CC-BY-4.0")
def publish(
    atlas_options: AtlasOptions,
    target: Annotated[str, argument("Empty place, or one with earlier snapshots of the atlas: a folder or address")],
    at: AtSnapshot = None,
    keep: Annotated[
        list[str] | None, repeatable_option("SNAPSHOT", "Other snapshot to publish with it", "--keep")
    ] = None,
    readme: Annotated[str, value_option("FILE", "Text in Markdown that the README begins with", "--readme")] = "",
    license: Annotated[str, value_option("NAME", "Licence of the whole, such as CC-BY-4.0", "--license")] = "",
    citation: Annotated[str, value_option("TEXT", "How to cite it: a sentence, or a .cff file", "--citation")] = "",
    require_license: Annotated[
        bool, typer.Option("--require-license", help="Refuse if a dataset has no licence.")
    ] = False,
    target_option: TargetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be written.")] = False,
) -> "Report":
    """Write a snapshot into a folder of a few files that any web server can serve, and that is opened by its address."""
    options = parse_pairs(target_option or [], "--target-option")
    with progress("publish") as callback:
        return atlas_options.open().publish(
            target, parse_version(at) if at is not None else None, keep=[parse_version(one) for one in keep or []], readme=readme, license=license,
            citation=citation, require_license=require_license, storage_options=options, dry_run=dry_run, progress=callback,
        )  # fmt: skip


@command(SNAPSHOTS, "clone https://lab.org/lung.atlas@v3 lung.atlas --dataset donor_1")
def clone(
    atlas_options: Annotated[
        AtlasOptions,
        argument(
            "Published atlas, perhaps with @SNAPSHOT: https://, hf://, doi:, s3://, gs://, az:// or a folder", "ADDRESS"
        ),
    ],
    target: Annotated[str, argument("Empty place for the atlas")],
    dataset: Annotated[list[str] | None, repeatable_option("NAME", "Only this dataset", "--dataset")] = None,
    where: Annotated[str | None, value_option("SQL", "Only cells that satisfy this condition", "--where")] = None,
) -> tuple[Any, str]:
    """Copy a published atlas, or a part of it, into an atlas of your own."""
    from raggedatlas.atlas import clone as clone_atlas

    with progress("clone") as callback:
        made = clone_atlas(
            atlas_options.atlas, target, datasets=dataset or None, where=where, storage_options=atlas_options.storage_options, progress=callback,
        )  # fmt: skip
    newest = made.list_versions()[-1]
    return {"atlas": made.uri, "snapshot": newest.version}, f"{made.uri}: {newest}"


@command(MAINTENANCE, "set-license pbmc.atlas pbmc_10k CC-BY-4.0")
def set_license(
    atlas_options: AtlasOptions,
    dataset: Annotated[str, argument("Uid or name of the dataset")],
    license: Annotated[str, argument("The licence, such as CC-BY-4.0")],
) -> tuple[Any, str]:
    """Note the licence of a dataset, which publish lists; snapshots keep the old one."""
    atlas_options.open().set_license(dataset, license)
    return {"dataset": dataset, "license": license}, f"{dataset}: {license}"


@command(MAINTENANCE, "verify pbmc.atlas --incremental")
def verify(
    atlas_options: AtlasOptions,
    snapshot: Annotated[
        str | None,
        value_option("SNAPSHOT", "Only this snapshot, by number or label; by default everything", "--snapshot", "--at"),
    ] = None,
    since: SinceSnapshot = None,
    root_hash: RootHash = "",
    incremental: Annotated[
        bool,
        typer.Option(
            "--incremental",
            help="Skip files that an earlier call with this option found sound and that have not changed since.",
        ),
    ] = False,
    workers: WorkerCount = 1,
) -> None:
    """Compare every stored byte with what was recorded when it was written (validate --level files); exit code 1 if any differs."""
    version = None if snapshot is None else parse_version(snapshot)
    known = None if since is None else parse_version(since)
    published = atlas_options.open_published(snapshot)
    if published is None and version is None and root_hash:
        raise typer.BadParameter("is that of a snapshot; name it with --snapshot", param_hint="--root-hash")
    with process_pool(workers) as executor:
        opened, version = (atlas_options.open(), version) if published is None else (published, None)
        found = opened.verify(version, since=known, root_hash=root_hash, incremental=incremental, executor=executor)
    if atlas_options.as_json:
        print_json({**vars(found), "problems": found.to_dict(), "sound": found.sound})
    else:
        print_text(to_command_line(str(found)))
    if not found.sound:
        raise typer.Exit(EXIT_FAILURE)


@command(MAINTENANCE, "drop-geometry slide.atlas segmentation_boundary --dataset slide1")
def drop_geometry(
    atlas_options: AtlasOptions,
    name: Annotated[str, argument("Name of the geometry, or its feature space")],
    dataset: Annotated[
        str | None, value_option("DATASET", "Only drop the geometry of this dataset (name or uid)")
    ] = None,
) -> "Report":
    """Remove geometry from the newest state; snapshots keep it."""
    return atlas_options.open().drop_geometry(name, dataset)


def _add_drop_command(noun: str, text: str, example: str) -> None:
    def drop_asset(atlas_options: AtlasOptions, name: Annotated[str, argument(f"Name of the {noun}")]) -> "Report":
        report: Report = getattr(atlas_options.open(), f"drop_{noun}")(name)
        return report

    drop_asset.__doc__ = text
    command(MAINTENANCE, f"drop-{noun} pbmc.atlas {example}", name=f"drop-{noun}")(drop_asset)


_add_drop_command("result", "Remove a model result from the newest state; snapshots keep it.", "scvi_64")
_add_drop_command(
    "annotation",
    "Remove an annotation from the newest state; columns that it replaced reappear, and snapshots keep it.",
    "clusters",
)
