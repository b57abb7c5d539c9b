"""The verb ``serve``: cells in the web client of CELLxGENE Explorer."""

import signal
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.app import ASK, app
from raggedatlas.cli.options import (
    At,
    Method,
    Overwrite,
    Place,
    Selection,
    Strict,
    Words,
    many,
    one,
    subject,
    tell_losses,
    unfold,
)
from raggedatlas.cli.printing import progress, say, show, show_json

if TYPE_CHECKING:
    from raggedatlas.query.query import Query
    from raggedatlas.verbs.explorer import Prepared, Served


@dataclass(frozen=True)
class ServeSource(Place):
    """What is served, and how to print."""

    atlas: Annotated[str, subject("ATLAS|FILE", "An atlas; or a .cxg, .h5ad, .zarr or any file that convert takes")]


@dataclass(frozen=True)
class ServeOptions:
    """What the CXG holds, and where it is."""

    embedding: Annotated[
        Words,
        many("NAME", "Take only this member of obsm, such as X_umap", "--embedding", "-e"),
    ] = field(default_factory=list)
    compute_embedding: Annotated[
        Method | None,
        typer.Option(help="Compute an embedding where there is none; umap needs the extra umap.", show_default=False),
    ] = None
    x: Annotated[str, typer.Option("--x", metavar="MATRIX", help="Of a file: X, or layers/NAME.")] = "X"
    title: Annotated[str | None, typer.Option(help="Title of the page.", show_default=False)] = None
    output: Annotated[
        str | None,
        one("FOLDER", "Keep the CXG there (a .cxg)", "--output", "-o", default="a temporary folder"),
    ] = None
    overwrite: Overwrite = False

    def choices(self) -> dict[str, Any]:
        """Give the options of `prepare`."""
        return {
            "title": self.title,
            "embeddings": self.embedding or None,
            "compute_embedding": self._embedder(),
            "x": self.x,
            "overwrite": self.overwrite,
            "on_losses": tell_losses,
        }

    def _embedder(self) -> Any:  # noqa: ANN401  (an Embedder)
        from raggedatlas.verbs.reduction import embedder

        return None if self.compute_embedding is None else embedder(self.compute_embedding.value)


@app.command(
    rich_help_panel=ASK,
    epilog="Example: raggedatlas serve pbmc.atlas --where \"cell_type = 'B'\" --compute-embedding pca",
)
@unfold
def serve(
    place: ServeSource,
    *,
    selection: Selection,
    shown: ServeOptions,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")] = True,
    install: Annotated[
        bool,
        typer.Option(
            "--install", help="Install the client first where it is missing; needs Python 3.11 and the network."
        ),
    ] = False,
    prepare_only: Annotated[
        bool, typer.Option("--prepare-only", help="Write the CXG of --output, and serve nothing.")
    ] = False,
    at: At = None,
) -> None:
    """Serve cells in the web client of CELLxGENE Explorer to this machine's browser until Ctrl-C."""
    what = _open_serve_source(place, selection, at)
    if prepare_only:
        _prepare(what, shown, as_json=place.as_json)
        return
    if install:
        from raggedatlas.verbs.explorer import install_explorer

        with progress("install cellxgene"):
            install_explorer()
    from raggedatlas.verbs.explorer import serve as start

    _end_in_order()  # before anything is begun, so that nothing outlives it
    with ExitStack() as held:
        with progress("prepare a CXG"):
            served = held.enter_context(start(what, target=shown.output, port=port, **shown.choices()))
        with suppress(KeyboardInterrupt):  # also one that comes before it waits
            _show(served, as_json=place.as_json, browser=browser)
            served.wait()


def _show(served: "Served", *, as_json: bool, browser: bool) -> None:
    if as_json:
        show_json({"url": served.url, "path": str(served.path)})
    else:
        show(served.url)
    say("Only this machine can open it. Ctrl-C ends it.")
    if browser:
        import webbrowser

        webbrowser.open(served.url)


def _end_in_order() -> None:
    """End as by Ctrl-C when asked to end otherwise, so that the server ends too."""
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.default_int_handler)


def _open_serve_source(place: ServeSource, selection: Selection, at: str | None) -> "Query | str":
    """Tell a file from an atlas; a selection is for the cells of an atlas."""
    from raggedatlas.cli.validate import is_cell_file

    if is_cell_file(place.atlas, at=at, selected=selection != Selection()):
        return place.atlas
    return selection.ask(place.open_snapshot(at))


def _prepare(what: "Query | str", shown: ServeOptions, *, as_json: bool) -> None:
    from raggedatlas.verbs.explorer import prepare

    if shown.output is None:
        raise typer.BadParameter("it says where to write, and is missing", param_hint="--output")
    with progress(f"write {shown.output}"):
        found: Prepared = prepare(what, shown.output, **shown.choices())
    if as_json:
        show_json({"path": str(found.path), "made": found.made})
    else:
        show(f"Wrote {found.path}" if found.made else f"{found.path} can be served as it is")


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
class ViewOptions:
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
class ViewSource(Place):
    """Whose cells are shown, and how to print."""

    atlas: Annotated[str, subject("ATLAS|FILE", "An atlas; or an .h5ad, .h5mu, .zarr or any file that convert takes")]


def _open_view_source(place: ViewSource, shown: ViewOptions, at: str | None) -> "Query | str":
    from raggedatlas.cli.validate import is_cell_file

    if is_cell_file(place.atlas, at=at, selected=bool(shown.where)):
        return place.atlas
    asked = place.open_snapshot(at).query()
    for condition in shown.where:
        asked = asked.where(condition)
    return asked


@app.command(rich_help_panel=ASK, epilog="Example: raggedatlas view pbmc.h5ad X_umap --color cell_type")
@unfold
def view(
    place: ViewSource,
    embedding: Embedding,
    *,
    shown: ViewOptions,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")] = True,
    at: At = None,
) -> None:
    """Serve a map of cells to this machine's browser until Ctrl-C; any gene can be asked for."""
    from raggedatlas.verbs.visualize import view as serve

    with progress("read cells"):
        server = serve(embedding, _open_view_source(place, shown, at), port=port, browser=browser, **shown.choices())
    with server, suppress(KeyboardInterrupt):  # also one that comes before it waits
        if place.as_json:
            show_json({"url": server.url})
        else:
            show(server.url)
        say("Only this machine can open it, and only with this address. Ctrl-C ends it.")
        server.wait()


@dataclass(frozen=True)
class VisualizeOptions:
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
    place: ViewSource,
    embedding: Annotated[str | None, Embedding.__metadata__[0]] = None,
    *,
    shown: ViewOptions,
    made: VisualizeOptions,
    at: At = None,
) -> None:
    """Write a map of cells into a file; a folder of .npy results needs no atlas and takes its place."""
    from raggedatlas.verbs.visualize import visualize as write

    cells = None if embedding is None else _open_view_source(place, shown, at)
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
