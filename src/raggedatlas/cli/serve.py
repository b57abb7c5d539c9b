"""The verb ``serve``: cells in the web client of CELLxGENE Explorer."""

import signal
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raggedatlas.cli.app import ASK, app
from raggedatlas.cli.cxg import Method, tell_losses
from raggedatlas.cli.options import At, Place, Selection, unfold
from raggedatlas.cli.parameters import Words, many, one, subject
from raggedatlas.cli.printing import progress, say, show, show_json
from raggedatlas.cli.query import Overwrite

if TYPE_CHECKING:
    from raggedatlas.query.query import Query
    from raggedatlas.verbs.serving import Prepared, Served


@dataclass(frozen=True)
class Cells(Place):
    """What is served, and how to print."""

    atlas: Annotated[str, subject("ATLAS|FILE", "An atlas; or a .cxg, .h5ad, .zarr or any file that convert takes")]


@dataclass(frozen=True)
class Shown:
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
        from raggedatlas.verbs.embedding import embedder

        return None if self.compute_embedding is None else embedder(self.compute_embedding.value)


@app.command(
    rich_help_panel=ASK,
    epilog="Example: raggedatlas serve pbmc.atlas --where \"cell_type = 'B'\" --compute-embedding pca",
)
@unfold
def serve(
    place: Cells,
    *,
    selection: Selection,
    shown: Shown,
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
    what = _cells(place, selection, at)
    if prepare_only:
        _prepare(what, shown, as_json=place.as_json)
        return
    if install:
        from raggedatlas.verbs.explorer import install_explorer

        with progress("install cellxgene"):
            install_explorer()
    from raggedatlas.verbs.serving import serve as start

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


def _cells(place: Cells, selection: Selection, at: str | None) -> "Query | str":
    """Tell a file from an atlas; a selection is for the cells of an atlas."""
    from raggedatlas.cli.files import is_cell_file

    if is_cell_file(place.atlas, at=at, selected=selection != Selection()):
        return place.atlas
    return selection.ask(place.open_snapshot(at))


def _prepare(what: "Query | str", shown: Shown, *, as_json: bool) -> None:
    from raggedatlas.verbs.serving import prepare

    if shown.output is None:
        raise typer.BadParameter("it says where to write, and is missing", param_hint="--output")
    with progress(f"write {shown.output}"):
        found: Prepared = prepare(what, shown.output, **shown.choices())
    if as_json:
        show_json({"path": str(found.path), "made": found.made})
    else:
        show(f"Wrote {found.path}" if found.made else f"{found.path} can be served as it is")
