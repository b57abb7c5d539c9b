"""Verbs for results, geometry and annotations: list, drop, search, annotate, convert."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer

from raggedatlas.cli.app import BUILD, INSPECT, MAINTENANCE, QUERY, app, methods_to_commands
from raggedatlas.cli.options import (
    AsJson,
    AtlasOptions,
    AtSnapshot,
    Strict,
    Strings,
    expand_option_groups,
    parse_pairs,
    repeatable_option,
    value_option,
)
from raggedatlas.cli.printing import print_assets, print_result, print_table, progress


@app.command(
    "convert_results",
    rich_help_panel=BUILD,
    epilog="Example: raggedatlas convert_results --results-dir results/20250201-120000-infer-AbCd",
)
@expand_option_groups
def convert_results(
    results_dir: Annotated[
        Path, typer.Option(help="Folder of one run, with batch_index.npy in it.", show_default=False)
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing table; readers see the old one until then.")
    ] = False,
    promote: Annotated[
        bool, typer.Option("--promote", help="Promote batches of different dtypes to a common dtype.")
    ] = False,
    spot_check: Annotated[int | None, value_option("N", "Compare N random rows instead of all")] = None,
    as_json: AsJson = False,
) -> None:
    """Convert the .npy results of a model run to a Lance table in the same folder; the .npy files are never changed."""
    from raggedatlas.results.convert import convert_results as convert

    with progress(f"convert {results_dir}") as callback:
        done = convert(results_dir, overwrite=overwrite, promote=promote, spot_check=spot_check, progress=callback)
    print_result(
        {**asdict(done), "results_dir": str(done.results_dir), "dtype": done.dtype.name}, str(done), as_json=as_json
    )


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search."""

    column: Annotated[str, typer.Option(help="Result, embedding or column to search.", show_default=False)]
    k: Annotated[int, typer.Option("-k", min=1, help="Number of cells.")] = 10
    metric: Annotated[
        Literal["l2", "cosine", "dot"],
        typer.Option(help="Distance of vectors: squared Euclidean, or one minus the cosine or the dot product."),
    ] = "l2"
    where: Annotated[
        Strings, repeatable_option("SQL", "Search only cells that satisfy a condition", "--where", "-w")
    ] = field(default_factory=list)
    strict: Strict = False
    obs: Annotated[Strings, repeatable_option("COLUMN", "Show a cell column")] = field(default_factory=list)


@app.command(
    rich_help_panel=QUERY,
    epilog="Example: raggedatlas search pbmc.atlas 1f0c5a2b9d3e4f60 --column scvi_64 -w \"tissue = 'lung'\"",
)
@expand_option_groups
def search(
    atlas_options: AtlasOptions,
    what: Annotated[
        str, typer.Argument(metavar="UID or TEXT", help="A cell, or words of a text column.", show_default=False)
    ],
    *,
    search_options: SearchOptions,
    at: AtSnapshot = None,
) -> None:
    """Print the nearest neighbours of a cell in a result or an embedding, or the best text matches."""
    query = atlas_options.open_snapshot(at).query()
    for condition in search_options.where:
        query = query.where(condition)
    query = query.obs(search_options.obs) if search_options.obs else query
    found = query.search(
        what, column=search_options.column, k=search_options.k, metric=search_options.metric
    ).to_arrow()
    rows = found.to_pylist()
    print_table(rows, found.column_names, empty="No cells.", as_json=atlas_options.as_json)


@app.command(
    "drop-geometry",
    rich_help_panel=MAINTENANCE,
    epilog="Example: raggedatlas drop-geometry slide.atlas segmentation_boundary --dataset slide1",
)
@expand_option_groups
def drop_geometry(
    atlas_options: AtlasOptions,
    name: Annotated[str, typer.Argument(help="Name of the geometry, or its feature space.", show_default=False)],
    dataset: Annotated[
        str | None, value_option("DATASET", "Only drop the geometry of this dataset (name or uid)")
    ] = None,
) -> None:
    """Remove geometry from the newest state; snapshots keep it."""
    report = atlas_options.open().drop_geometry(name, dataset)
    print_result(
        report.to_dict(),
        f"Dropped the geometry {name} of {report.n_cells:,} cells; " + methods_to_commands("; ".join(report.notes)),
        as_json=atlas_options.as_json,
    )


@dataclass(frozen=True)
class AnnotateOptions:
    """Options of ``annotate``."""

    name: Annotated[str | None, value_option("NAME", "Name of the annotation; by default that of the file")] = None
    on: Annotated[
        Literal["uid", "cell_name"],
        typer.Option(help="How rows name cells; cell names need a column dataset, or --dataset."),
    ] = "uid"
    dataset: Annotated[str | None, value_option("DATASET", "Dataset of all rows, with --on cell_name")] = None
    column: Annotated[
        Strings,
        repeatable_option("COLUMN or OLD=NEW", "Write only these columns, under a new name with =", "--column", "-c"),
    ] = field(default_factory=list)
    obsm: Annotated[Strings, repeatable_option("KEY", "Add a member of obsm, such as X_umap, as a result")] = field(
        default_factory=list
    )
    cast: Annotated[Strings, repeatable_option("COLUMN=TYPE", "Convert a column to str, int, float or bool")] = field(
        default_factory=list
    )
    on_conflict: Annotated[
        Literal["error", "replace", "keep"], typer.Option(help="What to do if a cell already has another value.")
    ] = "error"
    unknown: Annotated[
        Literal["error", "skip"], typer.Option(help="What to do with rows that name no cell of the atlas.")
    ] = "error"
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and report; write nothing.")] = False


@app.command(
    rich_help_panel=BUILD,
    epilog="Example: raggedatlas annotate pbmc.atlas clusters.csv --column leiden --cast leiden=str",
)
@expand_option_groups
def annotate(
    atlas_options: AtlasOptions,
    file: Annotated[
        str, typer.Argument(help="CSV, TSV or Parquet, or a file of cells such as .h5ad.", show_default=False)
    ],
    *,
    choices: AnnotateOptions,
) -> None:
    """Add values of cells, such as clusters or labels, to an atlas as cell columns."""
    # `COLUMN` alone keeps its name. Without any word the mapping is empty, and None below means all columns.
    columns = {old: new or old for old, _, new in (word.partition("=") for word in choices.column)}
    report = atlas_options.open().annotate(
        file, choices.name, on=choices.on, dataset=choices.dataset, columns=columns or None, obsm=choices.obsm,
        cast=parse_pairs(choices.cast, "--cast"), on_conflict=choices.on_conflict, unknown=choices.unknown,
        dry_run=choices.dry_run,
    )  # fmt: skip
    print_result(report.to_dict(), repr(report), as_json=atlas_options.as_json)


@dataclass(frozen=True)
class _AssetList:
    """Command that lists one kind of asset."""

    command: str
    text: str
    columns: tuple[str, ...]
    empty: str


_LISTS = (
    _AssetList(
        "results",
        "List the model results of an atlas.",
        ("name", "kind", "space", "width", "dtype", "n_cells", "model", "added"),
        "No results yet; run: raggedatlas add {} RESULTS --name NAME",
    ),
    _AssetList(
        "geometries",
        "List the geometry of an atlas.",
        ("name", "space", "types", "axes", "n_cells", "datasets", "n_objects", "n_vertices", "n_levels", "added"),
        "No geometry yet; run: raggedatlas add {} STORE --link COLUMN --space SPACE",
    ),
    _AssetList(
        "annotations",
        "List the annotations of an atlas.",
        ("name", "columns", "n_cells", "n_values", "source", "snapshot", "added"),
        "No annotations yet; run: raggedatlas annotate {} FILE",
    ),
)


def _add_list_command(listing: _AssetList) -> None:
    # A function for each command: closures made in one loop would all see its last entry.
    @expand_option_groups
    def list_assets(atlas_options: AtlasOptions, at: AtSnapshot = None) -> None:
        frame = getattr(atlas_options.open_at(at), listing.command)()
        empty = listing.empty.format(atlas_options.atlas)
        print_assets(frame, listing.columns, as_json=atlas_options.as_json, empty=empty)

    list_assets.__doc__ = listing.text
    example = f"Example: raggedatlas {listing.command} pbmc.atlas"
    app.command(listing.command, rich_help_panel=INSPECT, epilog=example)(list_assets)


def _add_drop_command(noun: str, text: str, example: str) -> None:
    @expand_option_groups
    def drop_asset(
        atlas_options: AtlasOptions,
        name: Annotated[str, typer.Argument(help=f"Name of the {noun}.", show_default=False)],
    ) -> None:
        report = getattr(atlas_options.open(), f"drop_{noun}")(name)
        notes = methods_to_commands("; ".join(report.notes))
        print_result(report.to_dict(), f"Dropped the {noun} {name}; {notes}", as_json=atlas_options.as_json)

    drop_asset.__doc__ = text
    app.command(
        f"drop-{noun}", rich_help_panel=MAINTENANCE, epilog=f"Example: raggedatlas drop-{noun} pbmc.atlas {example}"
    )(drop_asset)


for _listing in _LISTS:
    _add_list_command(_listing)
_add_drop_command("result", "Remove a model result from the newest state; snapshots keep it.", "scvi_64")
_add_drop_command(
    "annotation",
    "Remove an annotation from the newest state; columns that it replaced reappear, and snapshots keep it.",
    "clusters",
)
