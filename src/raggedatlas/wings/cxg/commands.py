"""Command ``serve``: cells in CELLxGENE Explorer."""

import signal
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raggedatlas.cli.app import QUERY, command, print_result
from raggedatlas.cli.options import (
    AtlasOptions,
    AtSnapshot,
    Method,
    Overwrite,
    Selection,
    Strings,
    argument,
    make_embedder,
    option,
    print_losses,
    repeatable,
)
from raggedatlas.cli.printing import print_status, progress

if TYPE_CHECKING:
    from raggedatlas.query.query import Query
    from raggedatlas.wings.cxg.explorer import PreparedCxg


ServeSource = Annotated[
    AtlasOptions, argument("An atlas; or a .cxg, .h5ad, .zarr or any file that convert takes", "ATLAS|FILE")
]


@dataclass(frozen=True)
class ServeOptions:
    """Options of the CXG that is served."""

    embedding: Strings = repeatable("NAME", "Include only this member of obsm, such as X_umap", "--embedding", "-e")
    compute_embedding: Method | None = option(None, "Compute an embedding if there is none; umap needs the extra umap")
    x: str = option("MATRIX", "Matrix of a file: X, or layers/NAME", "--x", default="X")
    title: str | None = option(None, "Title of the page")
    output: str | None = option(
        "FOLDER", "Keep the CXG in this folder (a .cxg)", "--output", "-o", show="a temporary folder"
    )
    overwrite: Overwrite = False

    def choices(self) -> dict[str, Any]:
        """Return the options of `prepare`."""
        return {
            "title": self.title,
            "embeddings": self.embedding or None,
            "compute_embedding": make_embedder(self.compute_embedding),
            "x": self.x,
            "overwrite": self.overwrite,
            "on_losses": print_losses,
        }


@command(QUERY, "serve pbmc.atlas --where \"cell_type = 'B'\" --compute-embedding pca")
def serve(
    atlas_options: ServeSource,
    *,
    selection: Selection,
    options: ServeOptions,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0 picks a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    install: Annotated[
        bool,
        typer.Option("--install", help="Install cellxgene first if it is missing; needs Python 3.11 and the network."),
    ] = False,
    prepare_only: Annotated[
        bool, typer.Option("--prepare-only", help="Write the CXG of --output without serving it.")
    ] = False,
    arrow: Annotated[
        bool,
        typer.Option("--arrow", help="Serve an atlas to programs such as R instead: tables and matrices, no page."),
    ] = False,
    at: AtSnapshot = None,
) -> tuple[Any, str] | None:
    """Serve cells in CELLxGENE Explorer to browsers on this machine until Ctrl-C; with --arrow, tables to other programs."""
    if arrow:
        if selection != Selection() or options != ServeOptions() or install or prepare_only:
            raise typer.BadParameter("serves the whole snapshot; requests select from it", param_hint="--arrow")
        from raggedatlas.query.tables_server import TablesServer

        for name in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, signal.default_int_handler)
        with suppress(KeyboardInterrupt), TablesServer(atlas_options.open_snapshot(at), port) as tables:
            print_result(({"url": tables.url}, tables.url), atlas_options.as_json)
            print_status("Only this machine can ask it. Press Ctrl-C to stop.")
            tables.wait()
        return None
    from raggedatlas.cli.validate import is_cell_file

    # Any option that differs from its default is a selection, also `--missing` or `--seed`.
    source: Query | str = atlas_options.atlas
    if not is_cell_file(atlas_options.atlas, at=at, selected=selection != Selection()):
        source = selection.ask(atlas_options.open_snapshot(at))
    if prepare_only:
        from raggedatlas.wings.cxg.explorer import prepare

        if options.output is None:
            raise typer.BadParameter("is required with --prepare-only", param_hint="--output")
        with progress(f"write {options.output}"):
            found: PreparedCxg = prepare(source, options.output, **options.choices())
        text = f"Wrote {found.path}" if found.written else f"{found.path} can be served unchanged"
        return {"path": str(found.path), "made": found.written}, text
    if install:
        from raggedatlas.wings.cxg.explorer import install_explorer

        with progress("install cellxgene"):
            install_explorer()
    from raggedatlas.wings.cxg.explorer import serve as start

    # As Ctrl-C, so that the server is stopped too; before anything starts, so that no process outlives this one.
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.default_int_handler)
    # With the stack the progress bar can end before the address is printed, and the server later.
    with ExitStack() as stack:
        with progress("prepare a CXG"):
            served = stack.enter_context(start(source, target=options.output, port=port, **options.choices()))
        with suppress(KeyboardInterrupt):  # also before `wait` is called
            # Only this goes to stdout, so that a script can read the address.
            print_result(({"url": served.url, "path": str(served.path)}, served.url), atlas_options.as_json)
            print_status("Only this machine can open it. Press Ctrl-C to stop.")
            if browser:
                import webbrowser

                webbrowser.open(served.url)
            served.wait()
    return None
