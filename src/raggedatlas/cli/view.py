"""Verbs that show: ``view`` and ``visualize``."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.app import ASK, app
from raggedatlas.cli.options import At, Place, unfold
from raggedatlas.cli.parameters import Strict, subject
from raggedatlas.cli.printing import progress, say, show, show_json
from raggedatlas.cli.query import Overwrite

if TYPE_CHECKING:
    from raggedatlas.query.query import Query

Where = Annotated[
    list[str],
    typer.Option(
        "--where", "-w", metavar="SQL", help="Keep cells that meet a condition; repeatable.", show_default=False
    ),
]
Embedding = Annotated[
    str,
    typer.Argument(
        help="Name of an embedding of the atlas or file, or a folder of results (of umap, say).", show_default=False
    ),
]


@dataclass(frozen=True)
class Shown:
    """What is shown, and how."""

    where: Where = field(default_factory=list)
    strict: Strict = False
    color: Annotated[
        str | None,
        typer.Option("--color", "-c", metavar="NAME", help="Column or gene to colour by first.", show_default=False),
    ] = None
    columns: Annotated[
        list[str],
        typer.Option("--column", metavar="COLUMN", help="Take only these columns; repeatable.", show_default=False),
    ] = field(default_factory=list)
    layer: Annotated[
        str | None, typer.Option(metavar="LAYER", help="Layer that genes are read of.", show_default="the usual one")
    ] = None
    title: Annotated[str | None, typer.Option(help="Title of the page.", show_default="the atlas' name")] = None
    theme: Annotated[
        Literal["light", "dark"] | None, typer.Option(help="Looks.", show_default="as the reader's system")
    ] = None
    max_points: Annotated[int, typer.Option(min=1, help="Sample more cells than this.")] = 2_000_000
    seed: Annotated[int, typer.Option(help="Another seed samples other cells.")] = 0

    def choices(self) -> dict[str, Any]:
        """Give the choices of `view` and `visualize`."""
        return {
            "color": self.color,
            "columns": self.columns or None,
            "layer": self.layer,
            "title": self.title,
            "theme": self.theme,
            "max_points": self.max_points,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Cells(Place):
    """Whose cells are shown, and how to print."""

    atlas: Annotated[str, subject("ATLAS|FILE", "An atlas; or an .h5ad, .h5mu, .zarr or any file that convert takes")]


def _cells(place: Cells, shown: Shown, at: str | None) -> "Query | str":
    from raggedatlas.cli.files import is_cell_file

    if is_cell_file(place.atlas, at=at, selected=bool(shown.where)):
        return place.atlas
    asked = place.open_snapshot(at).query()
    for condition in shown.where:
        asked = asked.where(condition)
    return asked


@app.command(rich_help_panel=ASK, epilog="Example: raggedatlas view pbmc.h5ad X_umap --color cell_type")
@unfold
def view(
    place: Cells,
    embedding: Embedding,
    *,
    shown: Shown,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")] = True,
    at: At = None,
) -> None:
    """Serve a map of cells to this machine's browser until Ctrl-C; any gene can be asked for."""
    from raggedatlas.verbs.visualize import view as serve

    with progress("read cells"):
        server = serve(embedding, _cells(place, shown, at), port=port, browser=browser, **shown.choices())
    with server, suppress(KeyboardInterrupt):  # also one that comes before it waits
        if place.as_json:
            show_json({"url": server.url})
        else:
            show(server.url)
        say("Only this machine can open it, and only with this address. Ctrl-C ends it.")
        server.wait()


@dataclass(frozen=True)
class Made:
    """What is written."""

    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="A .html page, a .png picture, a .parquet for Embedding Atlas, or a .vitessce folder.",
            show_default=False,
        ),
    ]
    genes: Annotated[
        list[str],
        typer.Option("--gene", "-f", metavar="NAME", help="Take a gene along; repeatable.", show_default=False),
    ] = field(default_factory=list)
    overwrite: Overwrite = False
    address: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Where a .vitessce folder will be served.", show_default="http://localhost:8000"
        ),
    ] = None


@app.command(
    rich_help_panel=ASK,
    epilog="Example: raggedatlas visualize pbmc.atlas umap -o cells.html --color cell_type --gene CD3D",
)
@unfold
def visualize(
    place: Cells,
    embedding: Annotated[str | None, Embedding.__metadata__[0]] = None,
    *,
    shown: Shown,
    made: Made,
    at: At = None,
) -> None:
    """Write a map of cells into a file; a folder of .npy results needs no atlas and takes its place."""
    from raggedatlas.verbs.visualize import visualize as write

    cells = None if embedding is None else _cells(place, shown, at)
    with progress(f"write {made.output}"):
        path = write(
            embedding or Path(place.atlas),
            cells,
            path=made.output,
            genes=made.genes,
            overwrite=made.overwrite,
            **{**shown.choices(), "address": made.address},
        )
    if place.as_json:
        show_json({"path": str(path)})
    else:
        show(f"Wrote {path}")
