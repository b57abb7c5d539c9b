"""Commands ``view`` and ``visualize``."""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.app import QUERY, command, print_result
from raggedatlas.cli.options import (
    AtlasOptions,
    AtSnapshot,
    Overwrite,
    Strict,
    argument,
    option,
    repeatable,
    repeatable_option,
    value_option,
)
from raggedatlas.cli.printing import print_status, progress

if TYPE_CHECKING:
    from raggedatlas.query.query import Query
    from raggedatlas.store.location import AnyPath


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
    from raggedatlas.catalog.published import serves_atlas
    from raggedatlas.cli.validate import is_cell_file
    from raggedatlas.wings.viewer.sources import is_cells_path

    if embedding is None and not serves_atlas(atlas_options.atlas) and not is_cells_path(atlas_options.path):
        # A path can only be a folder of results, while a text may be the name of an embedding.
        return atlas_options.path, None
    if is_cell_file(atlas_options.atlas, at=at, selected=bool(options.where)):
        cells: Query | AnyPath = atlas_options.path
    else:
        # The address of an atlas, after which a snapshot may be named, is no path.
        query = atlas_options.open_snapshot(at).query()
        for condition in options.where:
            query = query.where(condition)
        cells = query
    # The path of a file comes as one, so that no name of an embedding is looked for.
    return (embedding, cells) if embedding is not None else (cells, None)


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
        print_result(({"url": server.url}, server.url), atlas_options.as_json)
        print_status("Only this machine can open it, and only with this address. Press Ctrl-C to stop.")
        server.wait()


@command(QUERY, "visualize pbmc.atlas umap -o cells.html --color cell_type --gene CD3D")
def visualize(
    atlas_options: ViewSource,
    embedding: Embedding = None,
    *,
    options: ViewOptions,
    output: Annotated[
        str,
        value_option(
            "FILE",
            "A .html page, a .png picture, a .parquet for Embedding Atlas, or a .vitessce folder",
            "--output",
            "-o",
        ),
    ],
    genes: Annotated[list[str] | None, repeatable_option("NAME", "Include a gene", "--gene", "-f")] = None,
    overwrite: Overwrite = False,
    address: Annotated[
        str | None,
        value_option("URL", "Address at which a .vitessce folder will be served", default="http://localhost:8000"),
    ] = None,
    at: AtSnapshot = None,
) -> tuple[Any, str]:
    """Write a map of cells to a file; a folder of .npy results can take the place of the atlas."""
    from raggedatlas.wings.viewer.verbs import visualize as write

    with progress(f"write {output}"):
        path = write(
            *_what(atlas_options, embedding, options, at),
            path=output,
            genes=genes or [],
            overwrite=overwrite,
            **{**options.choices(), "address": address},
        )
    return {"path": str(path)}, f"Wrote {path}"
