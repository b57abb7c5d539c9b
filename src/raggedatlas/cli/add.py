"""Verbs ``create`` and ``add``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from raggedatlas.cli.app import BUILD, command, to_command_line
from raggedatlas.cli.options import (
    AtlasOptions,
    Strings,
    WorkerCount,
    argument,
    arguments_of,
    flag,
    like,
    option,
    parse_integer,
    parse_pairs,
    process_pool,
    refuse_unused,
    repeatable,
    value_option,
)
from raggedatlas.cli.printing import progress
from raggedatlas.model import options as library

if TYPE_CHECKING:
    from raggedatlas.ingest.term_mapping import TermMapping
    from raggedatlas.model.reports import AddReport, AnnotationReport, IngestReport


@dataclass(frozen=True)
class AddOptions:
    """What is added, and how."""

    files: Annotated[
        list[str],
        argument(
            "h5ad, h5mu, AnnData zarr, CXG, 10x h5, also on s3://, gs://, az:// or https://; Market-matrix folder, a folder of these, a geometry store, GeoJSON, GeoParquet, an element of SpatialData, PLY, OBJ, STL, points in Parquet, or a folder of a model's results"
        ),
    ]
    name: str | None = like(library.IngestOptions, "name")
    on_duplicate: str = like(library.IngestOptions, "on_duplicate")
    dry_run: bool = like(library.IngestOptions, "dry_run")
    space: Strings = repeatable(
        "KEY=SPACE or SPACE", "Feature space of a matrix or modality; for a result or geometry, only its name"
    )
    unknown: str = like(library.ResultOptions, "unknown")

    def one_space(self, noun: str, example: str) -> dict[str, str]:
        """Return the keyword argument of `RaggedAtlas.add` with the space of a result or geometry, if one is given."""
        if len(self.space) > 1 or "=" in "".join(self.space):
            raise typer.BadParameter(f"a {noun} has one feature space, e.g. --space {example}", param_hint="--space")
        return {"space": self.space[0]} if self.space else {}


@dataclass(frozen=True)
class CellFileOptions:
    """Options of files of cells."""

    panel: ClassVar[str] = "Files of cells"

    obs: Strings = repeatable(
        "COLUMN or OLD=NEW", "Add only these cell columns ('' for none); with =, add all and rename these"
    )
    cast: Strings = repeatable("COLUMN=TYPE", "Convert a column to str, int, float or bool")
    layer: Strings = repeatable(
        "KEY or KEY=NAME", "Add only these matrices (X, raw/X, layers/spliced), and name the layer"
    )
    embedding: Strings = repeatable(
        "KEY or KEY=NAME",
        "Add a member of obsm, such as X_umap, as an embedding to view and search",
        "--embedding",
        "-e",
    )
    feature_id: Strings = repeatable("COLUMN or SPACE=COLUMN", "Column with the feature ids, or index")
    organism: str = like(library.IngestOptions, "organism")
    nonfinite: str = like(library.IngestOptions, "nonfinite")
    duplicate_entries: str = like(library.IngestOptions, "duplicate_entries")
    on_clash: str = like(library.IngestOptions, "on_clash")
    max_columns: int = like(library.IngestOptions, "max_columns", min=0)
    column_order: str = like(library.IngestOptions, "column_order")
    curate: str | None = like(library.IngestOptions, "curate")
    genome: str | None = like(library.IngestOptions, "genome")
    license: str | None = like(library.IngestOptions, "license")
    link: bool = flag("--link", "Leave the matrices in the files, and read them from there")
    link_columns: bool = flag(
        "--link-columns", "Of CSC matrices, copy the rows, and read few features of many cells from the files"
    )
    hash: str = like(library.IngestOptions, "hash")

    def read_texts(self) -> dict[str, Any]:
        """Return the keyword arguments of `RaggedAtlas.add` for files of cells that are read from texts."""
        if self.link and self.link_columns:
            raise typer.BadParameter("--link copies no rows; give one of both", param_hint="--link-columns")
        copy = "rows" if self.link_columns else not self.link
        found: dict[str, Any] = {"cast": parse_pairs(self.cast, "--cast"), "copy": copy}
        # An empty list would take no column at all; without the argument `add` takes all of them.
        if self.obs:
            found["obs"] = [] if self.obs == [""] else _all_or_none(self.obs, "--obs")
        if self.layer:
            found["layers"] = _all_or_none(self.layer, "--layer")
        if self.embedding:
            found["embeddings"] = _all_or_none(self.embedding, "--embedding")
        if self.feature_id:
            ids = _all_or_none(self.feature_id, "--feature-id")
            if not isinstance(ids, dict) and len(ids) > 1:
                raise typer.BadParameter(
                    "one column at most, or SPACE=COLUMN for each space", param_hint="--feature-id"
                )
            found["feature_id"] = ids if isinstance(ids, dict) else ids[0]
        return found


@dataclass(frozen=True)
class ResultOptions:
    """Options of results of models."""

    panel: ClassVar[str] = "Results of models"

    as_: str = like(library.ResultOptions, "as_", "--as")
    output: str | None = like(library.ResultOptions, "output", metavar="NAME")
    metric: str = like(library.ResultOptions, "metric")


@dataclass(frozen=True)
class GeometryLinkOptions:
    """Options that link shapes with cells."""

    panel: ClassVar[str] = "Geometry and transcripts"

    link_by: str | None = option(
        "COLUMN or COLUMN=ATTRIBUTE",
        "Geometry: cell column with the ids of the objects (or with an attribute of them); without it, objects become new cells",
    )
    dataset: str | None = like(library.GeometryOptions, "dataset", metavar="DATASET")
    new_cells: bool = like(library.GeometryOptions, "new_cells")
    lacking: str = like(library.GeometryOptions, "lacking")
    counts: bool = like(library.GeometryOptions, "counts")
    genes: str = like(library.GeometryOptions, "genes", metavar="ATTRIBUTE")
    cells: str = like(library.GeometryOptions, "cells", metavar="ATTRIBUTE")
    unassigned: str | None = option("VALUE", "Transcripts: value that means no cell")

    def read_texts(self) -> dict[str, Any]:
        """Return the keyword arguments of `RaggedAtlas.add` that are read from texts."""
        found: dict[str, Any] = {}
        if self.link_by is not None:
            column, sign, attribute = self.link_by.partition("=")
            found["link"] = {column: attribute} if sign else column
        if self.unassigned is not None:
            found["unassigned"] = parse_integer(self.unassigned)
        return found


def _all_or_none(given: list[str], option: str) -> dict[str, str] | list[str]:
    named = [text for text in given if "=" in text]
    # A list selects and a mapping renames; `add` takes either, but no mixture.
    if named and len(named) < len(given):
        raise typer.BadParameter("use = in all values, or in none", param_hint=option)
    return parse_pairs(given, option) if named else given


Codec = Annotated[
    Literal["packed", "standard", "archive"] | None,
    value_option(
        None, "Encoding of arrays: packed (the default) reads fastest, standard needs no plug-in, archive is smallest"
    ),
]


@command(BUILD, "create pbmc.atlas")
def create(atlas_options: AtlasOptions, codec: Codec = None) -> tuple[Any, str]:
    """Create an empty atlas."""
    from raggedatlas.atlas import RaggedAtlas
    from raggedatlas.catalog.catalog import DEFAULT_CODEC

    atlas = RaggedAtlas.create(
        atlas_options.atlas, codec=codec or DEFAULT_CODEC, storage_options=atlas_options.storage_options
    )
    return {"uri": atlas.uri}, f"Created {atlas.uri}"


_OPTIONS_OF: dict[str, Any] = {"geometry": library.GeometryOptions, "result": library.ResultOptions}


@command(BUILD, "add pbmc.atlas a.h5ad b.h5ad --organism human")
def add(
    atlas_options: AtlasOptions,
    options: AddOptions,
    *,
    workers: WorkerCount = 1,
    cells: CellFileOptions,
    results: ResultOptions,
    links: GeometryLinkOptions,
) -> tuple[Any, str]:
    """Add files of cells or shapes, or model results for existing cells; a refused source leaves the atlas unchanged."""
    from raggedatlas.catalog.assets import find_kind
    from raggedatlas.store.location import with_options

    first, several = with_options(options.files[0], atlas_options.storage_options), len(options.files) > 1
    kind = None if several else find_kind(first)
    if workers > 1 and kind is not None:
        raise typer.BadParameter(f"of the kind {kind.noun!r} they are added by one process", param_hint="--workers")
    if kind is None:
        why, used = "for files of cells", {*options.__dataclass_fields__, *cells.__dataclass_fields__} - {"unknown"}
    else:
        why = f"for the kind {kind.noun!r}"
        used = {"files", *_OPTIONS_OF.get(kind.noun, library.AddOptions).__dataclass_fields__}
        # `link` of a geometry is the option `--link-by`; `--link` is of files of cells.
        if kind.noun == "geometry":
            used = {*used, "link_by"} - {"link"}
    for group in (options, cells, results, links):
        refuse_unused(why, group, {*group.__dataclass_fields__} - used)
    if kind is not None and kind.noun == "geometry":
        choices = arguments_of(library.GeometryOptions, options, cells, links) | links.read_texts()
        choices |= options.one_space("geometry", "morphology")
    elif kind is not None and kind.noun == "result":
        choices = arguments_of(library.ResultOptions, options, results) | options.one_space("result", "embedding")
    elif kind is not None:
        choices = arguments_of(library.AddOptions, options)
    else:
        choices = arguments_of(library.IngestOptions, options, cells) | cells.read_texts()
        choices["spaces"] = parse_pairs(options.space, "--space")
    with progress("add") as callback, process_pool(workers) as executor:
        choices |= {"progress": callback, "executor": executor}
        sources: Any = options.files if several else first
        added: AddReport | list[IngestReport] = atlas_options.open().add(sources, **choices)
    reports = added if isinstance(added, list) else [added]
    documents = [report.to_dict() for report in reports]
    text = to_command_line("\n".join(map(repr, reports)) or "Nothing to add.")
    return documents if kind is None else documents[0], text


@dataclass(frozen=True)
class AnnotateOptions:
    """Options of ``annotate``."""

    name: str | None = like(
        library.AnnotateOptions, "name", metavar="NAME", text="Name of the annotation; by default that of the file"
    )
    on: str = like(
        library.AnnotateOptions, "on", text="How rows name cells; cell names need a column dataset, or --dataset"
    )
    dataset: str | None = like(
        library.AnnotateOptions, "dataset", metavar="DATASET", text="Dataset of all rows, with --on cell_name"
    )
    column: Strings = repeatable(
        "COLUMN or OLD=NEW", "Write only these columns, under a new name with =", "--column", "-c"
    )
    obsm: Strings = repeatable("KEY", "Add a member of obsm, such as X_umap, as a result")
    cast: Strings = repeatable("COLUMN=TYPE", "Convert a column to str, int, float or bool")
    on_conflict: str = like(
        library.AnnotateOptions, "on_conflict", text="What to do if a cell already has another value"
    )
    unknown: str = like(library.AnnotateOptions, "unknown", text="What to do with rows that name no cell of the atlas")
    dry_run: bool = like(library.AnnotateOptions, "dry_run")


@command(BUILD, "annotate pbmc.atlas clusters.csv --column leiden --cast leiden=str")
def annotate(
    atlas_options: AtlasOptions,
    file: Annotated[str, argument("CSV, TSV or Parquet, or a file of cells such as .h5ad")],
    *,
    choices: AnnotateOptions,
) -> "AnnotationReport":
    """Add values of cells, such as clusters or labels, to an atlas as cell columns."""
    # `COLUMN` alone keeps its name. Without any word the mapping is empty, and None below means all columns.
    columns = {old: new or old for old, _, new in (word.partition("=") for word in choices.column)}
    return atlas_options.open().annotate(
        file, columns=columns or None, obsm=choices.obsm, cast=parse_pairs(choices.cast, "--cast"),
        **arguments_of(library.AnnotateOptions, choices),
    )  # fmt: skip


@dataclass(frozen=True)
class MapTermsOptions:
    """Options of ``map-terms``."""

    ontology: str | None = like(
        library.MapTermsOptions, "ontology", metavar="NAME", text="Ontology, e.g. CL; by default that of the column"
    )
    write: str | None = option(
        "FILE", "Write the labels with their terms and candidates to a .csv or .tsv file, to edit it"
    )
    confirm: str | None = option("FILE", "Take the terms of labels from such a file")
    on_conflict: str = like(library.MapTermsOptions, "on_conflict", text="What to do if a cell already has another id")
    apply: bool = flag("--apply", "Write the ids of the labels that are certain or confirmed")


@command(BUILD, "map-terms pbmc.atlas cell_type --ontology CL --write labels.tsv")
def map_terms(
    atlas_options: AtlasOptions, column: Annotated[str, argument("Column of labels")], *, choices: MapTermsOptions
) -> "TermMapping":
    """Propose a term of an ontology for each label of a column; write ids only with --apply."""
    report = atlas_options.open().map_terms(
        column, confirm=choices.confirm, dry_run=not choices.apply, **arguments_of(library.MapTermsOptions, choices)
    )
    if choices.write is not None:
        report.write(choices.write)
    return report


@command(BUILD, "load-terms pbmc.atlas own_terms.csv --release 2026-11")
def load_terms(
    atlas_options: AtlasOptions,
    source: Annotated[str, argument("CSV or TSV with id and label, or the name of a packaged ontology")],
    *,
    ontology: Annotated[
        str | None, value_option("NAME", "Name of the ontology; by default the prefix of the ids")
    ] = None,
    release: Annotated[str, value_option("RELEASE", "Release of the table")] = "",
) -> tuple[Any, str]:
    """Keep an ontology in the atlas; `genes tables` lists it and `genes remove` takes it away."""
    frame = atlas_options.open().load_terms(source, ontology=ontology, release=release).reset_index()
    rows = frame.to_dict("records")
    return rows, "\n".join(f"{row['name']}: {row['n_rows']:,} terms, sha256 {row['sha256'][:12]}" for row in rows)
