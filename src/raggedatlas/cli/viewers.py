"""Verbs ``serve`` (CELLxGENE Explorer), ``view`` and ``visualize``."""

import signal
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.app import QUERY, command
from raggedatlas.cli.options import (
    AtlasOptions,
    AtSnapshot,
    Method,
    Overwrite,
    Selection,
    Strict,
    Strings,
    argument,
    make_embedder,
    option,
    print_losses,
    repeatable,
    repeatable_option,
    value_option,
)
from raggedatlas.cli.printing import print_result, print_status, progress

if TYPE_CHECKING:
    from raggedatlas.query.query import Query
    from raggedatlas.store.location import AnyPath
    from raggedatlas.wings.cxg.explorer import ExplorerServer, PreparedCxg


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
    at: AtSnapshot = None,
) -> None:
    """Serve cells in CELLxGENE Explorer to browsers on this machine until Ctrl-C."""
    source = _open_serve_source(atlas_options, selection, at)
    if prepare_only:
        _prepare(source, options, as_json=atlas_options.as_json)
        return
    if install:
        from raggedatlas.wings.cxg.explorer import install_explorer

        with progress("install cellxgene"):
            install_explorer()
    from raggedatlas.wings.cxg.explorer import serve as start

    _handle_signals_as_interrupt()  # before anything starts, so that no process outlives this one
    # With the stack the progress bar can end before the address is printed, and the server later.
    with ExitStack() as stack:
        with progress("prepare a CXG"):
            served = stack.enter_context(start(source, target=options.output, port=port, **options.choices()))
        with suppress(KeyboardInterrupt):  # also before `wait` is called
            _show(served, as_json=atlas_options.as_json, browser=browser)
            served.wait()


def _show(served: "ExplorerServer", *, as_json: bool, browser: bool) -> None:
    # Only this goes to stdout, so that a script can read the address.
    print_result({"url": served.url, "path": str(served.path)}, served.url, as_json=as_json)
    print_status("Only this machine can open it. Press Ctrl-C to stop.")
    if browser:
        import webbrowser

        webbrowser.open(served.url)


def _handle_signals_as_interrupt() -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that the server is stopped too."""
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.default_int_handler)


def _open_serve_source(atlas_options: ServeSource, selection: Selection, at: str | None) -> "Query | str":
    """Return the path of a file, or the query of an atlas."""
    from raggedatlas.cli.validate import is_cell_file

    # Any option that differs from its default is a selection, also `--missing` or `--seed`.
    if is_cell_file(atlas_options.atlas, at=at, selected=selection != Selection()):
        return atlas_options.atlas
    return selection.ask(atlas_options.open_snapshot(at))


def _prepare(source: "Query | str", options: ServeOptions, *, as_json: bool) -> None:
    from raggedatlas.wings.cxg.explorer import prepare

    if options.output is None:
        raise typer.BadParameter("is required with --prepare-only", param_hint="--output")
    with progress(f"write {options.output}"):
        found: PreparedCxg = prepare(source, options.output, **options.choices())
    print_result(
        {"path": str(found.path), "made": found.written},
        f"Wrote {found.path}" if found.written else f"{found.path} can be served unchanged",
        as_json=as_json,
    )


Where = Annotated[
    list[str],
    repeatable_option("SQL", "Keep cells that satisfy a condition", "--where", "-w"),
]
Embedding = Annotated[
    str | None,
    argument(
        "Name of an embedding of the atlas or file, or a folder of results (of umap, say); without, the first called umap, tsne, "
        "spatial or pca, else any"
    ),
]


@dataclass(frozen=True)
class ViewOptions:
    """Options shared by ``view`` and ``visualize``."""

    where: Where = field(default_factory=list)
    strict: Strict = False
    color: str | None = option("NAME", "Column or gene to colour by first", "--color", "-c")
    columns: list[str] = repeatable("COLUMN", "Include only these columns", "--column")
    layer: str | None = option("LAYER", "Layer of the gene values", show="the usual one")
    title: str | None = option(None, "Title of the page", show="the atlas' name")
    theme: Literal["light", "dark"] | None = option(None, "Looks", show="as the reader's system")
    max_points: int = option(None, "Sample if there are more cells than this", default=2000000, min=1)
    seed: int = option(None, "Seed of the random sample", default=0)

    def choices(self) -> dict[str, Any]:
        """Return the keyword arguments of `view` and `visualize`."""
        return {
            "color": self.color,
            "columns": self.columns or None,
            "layer": self.layer,
            "title": self.title,
            "theme": self.theme,
            "max_points": self.max_points,
            "seed": self.seed,
        }


ViewSource = Annotated[
    AtlasOptions, argument("An atlas; or an .h5ad, .h5mu, .zarr or any file that convert takes", "ATLAS|FILE")
]


def _what(
    atlas_options: ViewSource, embedding: str | None, options: ViewOptions, at: str | None
) -> "tuple[Query | str | AnyPath, Query | AnyPath | None]":
    """Return what is shown, and the cells of an embedding that is named."""
    from raggedatlas.wings.viewer.sources import is_cells_path

    if embedding is None and not is_cells_path(atlas_options.path):
        # A path can only be a folder of results, while a text may be the name of an embedding.
        return atlas_options.path, None
    cells = _open_view_source(atlas_options, options, at)
    # The path of a file comes as one, so that no name of an embedding is looked for.
    return (embedding, cells) if embedding is not None else (cells, None)


def _open_view_source(atlas_options: ViewSource, options: ViewOptions, at: str | None) -> "Query | AnyPath":
    from raggedatlas.cli.validate import is_cell_file

    if is_cell_file(atlas_options.atlas, at=at, selected=bool(options.where)):
        return atlas_options.path
    query = atlas_options.open_snapshot(at).query()
    for condition in options.where:
        query = query.where(condition)
    return query


@command(QUERY, "view pbmc.h5ad --color cell_type")
def view(
    atlas_options: ViewSource,
    embedding: Embedding = None,
    *,
    options: ViewOptions,
    allow_annotate: Annotated[
        bool, typer.Option("--allow-annotate", help="Write labels given on the page into the atlas, with provenance.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0 picks a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    at: AtSnapshot = None,
) -> None:
    """Serve a map of cells to browsers on this machine until Ctrl-C; genes are read on request."""
    from raggedatlas.wings.viewer.verbs import view as serve

    with progress("read cells"):
        server = serve(
            *_what(atlas_options, embedding, options, at),
            port=port,
            browser=browser,
            allow_annotate=allow_annotate,
            **options.choices(),
        )
    with server, suppress(KeyboardInterrupt):  # also before `wait` is called
        print_result({"url": server.url}, server.url, as_json=atlas_options.as_json)
        print_status("Only this machine can open it, and only with this address. Press Ctrl-C to stop.")
        server.wait()


@dataclass(frozen=True)
class VisualizeOptions:
    """Options of ``visualize``."""

    output: Annotated[
        str,
        value_option(
            "FILE",
            "A .html page, a .png picture, a .parquet for Embedding Atlas, or a .vitessce folder",
            "--output",
            "-o",
        ),
    ]
    genes: list[str] = repeatable("NAME", "Include a gene", "--gene", "-f")
    overwrite: Overwrite = False
    address: str | None = option(
        "URL", "Address at which a .vitessce folder will be served", show="http://localhost:8000"
    )


@command(QUERY, "visualize pbmc.atlas umap -o cells.html --color cell_type --gene CD3D")
def visualize(
    atlas_options: ViewSource,
    embedding: Embedding = None,
    *,
    options: ViewOptions,
    output_options: VisualizeOptions,
    at: AtSnapshot = None,
) -> tuple[Any, str]:
    """Write a map of cells to a file; a folder of .npy results can take the place of the atlas."""
    from raggedatlas.wings.viewer.verbs import visualize as write

    with progress(f"write {output_options.output}"):
        path = write(
            *_what(atlas_options, embedding, options, at),
            path=output_options.output,
            genes=output_options.genes,
            overwrite=output_options.overwrite,
            **{**options.choices(), "address": output_options.address},
        )
    return {"path": str(path)}, f"Wrote {path}"
