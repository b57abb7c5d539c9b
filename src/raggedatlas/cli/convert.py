"""Verbs ``convert`` and ``concat``: between file formats, without an atlas."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.app import BUILD, app
from raggedatlas.cli.options import (
    AsJson,
    CxgOptions,
    Overwrite,
    Strings,
    expand_option_groups,
    parse_pairs,
    print_losses,
    repeatable_option,
    value_option,
)
from raggedatlas.cli.printing import print_json, print_result, print_status, print_text, progress

if TYPE_CHECKING:
    from raggedatlas.formats.cxg.options import ConversionLoss
    from raggedatlas.model.protocols import Sink
    from raggedatlas.vectors.converters.convert import Conversion
    from raggedatlas.vectors.pyramid import PyramidOptions

ENDINGS = (
    ".zv", ".csv", ".tsv", ".parquet", ".xyz", ".swc", ".obj", ".ply", ".stl", ".trx", ".trk", ".tck", ".graphml",
    ".edgelist", ".geojson", ".geoparquet", ".precomputed",
)  # fmt: skip
"""File extensions of geometry, known without importing its readers."""


@dataclass(frozen=True)
class GeometryOptions:
    """Options that convert geometry."""

    format_in: Annotated[str | None, value_option("FORMAT", "Geometry: what the source is", "--from")] = None
    format_out: Annotated[
        str | None,
        value_option(
            "FORMAT", "Geometry: what to write, e.g. swc-folder, spatialdata, precomputed-meshes, store", "--to"
        ),
    ] = None
    options: Annotated[
        Strings,
        repeatable_option(
            "KEY=VALUE", "Geometry: for the reader, e.g. element=shapes/cells or objects=cell_id", "--option"
        ),
    ] = field(default_factory=list)
    writing: Annotated[
        Strings,
        repeatable_option("KEY=VALUE", "Geometry: for the writer, e.g. ascii=true", "--write-option"),
    ] = field(default_factory=list)
    level: Annotated[
        int | None, typer.Option(min=0, help="Geometry: which level of a store becomes a file.", show_default="0")
    ] = None
    layout: Annotated[Literal["0.9", "0.7"], typer.Option(help="Geometry: layout of a store.")] = "0.9"
    chunk_shape: Annotated[
        str | None,
        value_option("X,Y,...", "Geometry: edges of a chunk, world units", default="by the data"),
    ] = None
    levels: Annotated[int, typer.Option(min=0, help="Geometry: how many coarser levels a store gets.")] = 0
    factor: Annotated[float, typer.Option(help="Geometry: how many times fewer vertices each level has.")] = 8.0
    sparsity: Annotated[float, typer.Option(help="Geometry: share of the objects that each level keeps.")] = 1.0
    level_links: Annotated[
        Literal["none", "implicit", "explicit"], typer.Option(help="Geometry: links between levels.")
    ] = "none"

    def conversion(self, *, strict: bool, overwrite: bool) -> "Conversion":
        """Return how to convert."""
        from raggedatlas.vectors.builder import ChunkingOptions
        from raggedatlas.vectors.converters.convert import Conversion

        options: dict[str, object] = dict(parse_pairs(self.options, "--option"))
        # Readers take lists for these, and the command line has only text.
        for key in ("axes", "columns"):
            if key in options:
                options[key] = str(options[key]).split(",")
        return Conversion(
            self.format_in,
            self.format_out,
            options,
            self.level,
            self.layout,
            self._steps(),
            ChunkingOptions(chunk_shape=self._chunk_shape(), cross_level_storage=self.level_links),
            strict,
            overwrite,
            {key: _value(text) for key, text in parse_pairs(self.writing, "--write-option").items()},
        )

    def _steps(self) -> "PyramidOptions | None":
        from raggedatlas.vectors.pyramid import PyramidOptions

        return PyramidOptions(self.levels, self.factor, sparsity=self.sparsity) if self.levels else None

    def _chunk_shape(self) -> tuple[float, ...] | None:
        if self.chunk_shape is None:
            return None
        try:
            return tuple(float(part) for part in self.chunk_shape.split(","))
        except ValueError:
            raise typer.BadParameter("expected numbers, e.g. 100,100,50", param_hint="--chunk-shape") from None


def _value(text: str) -> object:
    """Read a number or a truth value; anything else is text."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.lstrip("-").isdecimal() else text


def is_geometry(source: str, target: str, geometry: GeometryOptions) -> bool:
    """Return whether a conversion is one of geometry: by a format that is named, an ending, or what a folder is."""
    if (
        geometry.format_in
        or geometry.format_out
        or ("://" in source + target and "precomputed://" in (source + target))
    ):
        return True
    if any(Path(path.rstrip("/")).suffix.lower() in ENDINGS for path in (source, target)):
        return True
    # Names have decided nothing; the converters are imported only for what may be a store.
    if not (Path(source) / "zarr.json").is_file():
        return False
    from raggedatlas.vectors.converters.convert import is_store

    return is_store(source)


def convert_geometry(source: str, target: str, how: "Conversion", *, as_json: bool) -> None:
    """Convert, and tell what was lost."""
    from raggedatlas.vectors.converters.convert import convert

    losses = convert(source, target, how)
    if as_json:
        print_json({"path": target, "losses": losses})
        return
    for loss in losses:
        print_status(f"lost: {loss}" if not loss.startswith("rounded: ") else loss)
    print_text(f"Wrote {target}")


NONE = "none"


@dataclass(frozen=True)
class SubsetOptions:
    """Options that select a subset of the source."""

    where: Annotated[
        str | None,
        value_option(
            "SQL", "Keep cells that satisfy a condition on columns of obs; cell_name is the index", "--where", "-w"
        ),
    ] = None
    features: Annotated[
        Strings,
        repeatable_option("NAME", "Keep features, by name, id or symbol, in this order", "--features", "-f"),
    ] = field(default_factory=list)
    layers: Annotated[
        Strings,
        repeatable_option("LAYER", "Keep only these of X, raw and the layers", "--layers", "-l"),
    ] = field(default_factory=list)
    modality: Annotated[
        str | None, typer.Option(help="Read only one modality or feature type.", show_default=False)
    ] = None
    genome: Annotated[
        str | None, typer.Option(help="Genome to read from an old 10x file with several.", show_default=False)
    ] = None
    cxg_version: Annotated[
        str | None,
        value_option(
            "VERSION",
            "Read a .cxg as version unnamed, 0.1, 0.2.0 or 0.3.0, regardless of its metadata",
            "--cxg-version",
        ),
    ] = None
    no_uns: Annotated[bool, typer.Option("--no-uns", help="Do not read the uns of a .cxg.")] = False

    def reading(self) -> dict[str, Any]:
        """Return the options of `open_source` that are set."""
        given: dict[str, Any] = {"genome": self.genome, "version": self.cxg_version}
        asked = {name: value for name, value in given.items() if value is not None}
        # Only what is set is passed on, because readers refuse options of other formats.
        return {**asked, "uns": False} if self.no_uns else asked


@dataclass(frozen=True)
class OutputOptions:
    """Options that write the target."""

    compression: Annotated[
        str | None,
        value_option(
            "NAME[:LEVEL]",
            "gzip, zstd, blosc, lzf or none; HDF5 needs the extra plugins for zstd and blosc",
            default="gzip in HDF5, zstd in Zarr",
        ),
    ] = None
    zarr_format: Annotated[int | None, typer.Option(min=2, max=3, help="Zarr format.", show_default="3, in shards")] = (
        None
    )
    overwrite: Overwrite = False

    def options(self) -> dict[str, Any]:
        """Return the options of `open_sink`."""
        found: dict[str, Any] = {"overwrite": self.overwrite}
        if self.compression is not None:
            # None means uncompressed; without the key the sink chooses a compression.
            found["compression"] = None if self.compression == NONE else self.compression
        if self.zarr_format is not None:
            found["zarr_format"] = self.zarr_format
        return found


@app.command(
    rich_help_panel=BUILD,
    epilog="Example: raggedatlas convert a.h5ad b.zarr --where \"cell_type = 'B'\" -l X; "
    "raggedatlas convert a.h5ad b.cxg --strict --title PBMC --compute-embedding pca",
)
@expand_option_groups
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="h5ad, h5mu, AnnData or MuData zarr, CXG, 10x h5, Market-matrix folder; or geometry: a store (.zv), swc, obj, trx, ...",
            show_default=False,
        ),
    ],
    target: Annotated[str, typer.Argument(help="A .h5ad, .h5mu, .zarr or .cxg; or geometry.", show_default=False)],
    *,
    subset: SubsetOptions,
    output_options: OutputOptions,
    cxg: CxgOptions,
    geometry: GeometryOptions,
    as_json: AsJson = False,
) -> None:
    """Convert a file, or a subset of it, to another format in bounded memory; geometry is read into memory."""
    if is_geometry(source, target, geometry):
        # `--strict` is an option of geometry too, so it does not count here.
        foreign = (subset, replace(cxg, strict=False)) != (SubsetOptions(), CxgOptions())
        if foreign or output_options.compression is not None or output_options.zarr_format is not None:
            raise typer.BadParameter(
                "--where, --features, --layers, --compression and similar options do not apply to geometry"
            )
        how = geometry.conversion(strict=cxg.strict, overwrite=output_options.overwrite)
        convert_geometry(source, target, how, as_json=as_json)
        return
    from raggedatlas.formats.copying import copy, is_multimodal
    from raggedatlas.formats.registry import open_source

    losses: list[ConversionLoss] = []

    def report_losses(found: "tuple[ConversionLoss, ...]") -> None:
        losses.extend(found)
        if not as_json:
            print_losses(found)

    # Before the source is opened, so that options of a CXG are refused at once for another target.
    more = cxg.options(target, report_losses)
    opened = open_source(source, **subset.reading())
    try:
        several = subset.modality is None and is_multimodal(opened)
        with progress(f"write {target}") as callback:
            made = copy(
                opened,
                sink_of(target, {**output_options.options(), **more}, multimodal=several),
                where=subset.where,
                features=subset.features or None,
                layers=subset.layers or None,
                modality=subset.modality,
                progress=callback,
            )
    finally:
        opened.close()
    print_result(
        {"path": made, **({"losses": [asdict(loss) for loss in losses]} if more else {})},
        f"Wrote {made}",
        as_json=as_json,
    )


def sink_of(target: str, options: dict[str, Any], *, multimodal: bool = False) -> "Sink":
    """Return the sink of a target path."""
    from raggedatlas.formats.registry import open_sink

    # Only `.zarr` may be AnnData or MuData; `.h5ad` and `.h5mu` say which.
    if multimodal and Path(target).suffix == ".zarr":
        options["multimodal"] = True
    return open_sink(target, **options)


MergeStrategy = Literal["same", "unique", "first", "only"]


@dataclass(frozen=True)
class ConcatOptions:
    """Arguments of `raggedatlas.concat`."""

    join: Annotated[
        Literal["inner", "outer"],
        typer.Option(help="Keep features, layers and columns of all files (inner) or of any (outer)."),
    ] = "inner"
    merge: Annotated[
        MergeStrategy | None, typer.Option(help="What to keep of var, varm and varp.", show_default="nothing")
    ] = None
    uns_merge: Annotated[MergeStrategy | None, typer.Option(help="What to keep of uns.", show_default="nothing")] = None
    label: Annotated[
        str | None, value_option("COLUMN", "Column of obs with the key of each cell's file", "--label")
    ] = None
    keys: Annotated[Strings, repeatable_option("KEY", "Key of a file, in order; by default 0, 1, ...", "--key")] = (
        field(default_factory=list)
    )
    index_unique: Annotated[
        str | None, value_option("TEXT", "Append TEXT and the key of the file to each cell name", "--index-unique")
    ] = None
    fill_value: Annotated[
        float | None,
        value_option(
            "NUMBER", "Value for entries that a file lacks", default="0 in sparse matrices, NaN in dense ones"
        ),
    ] = None
    modality: Annotated[str | None, typer.Option(help="Take one modality of several.", show_default=False)] = None


@app.command(
    rich_help_panel=BUILD,
    epilog="Example: raggedatlas concat a.h5ad b.zarr -o both.h5ad --join outer --label batch --key a --key b",
)
@expand_option_groups
def concat(
    sources: Annotated[
        list[str], typer.Argument(help="h5ad, AnnData zarr, CXG, 10x h5, Market-matrix folders.", show_default=False)
    ],
    *,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="A .h5ad, .zarr, .h5mu or .cxg.", show_default=False)
    ],
    concat_options: ConcatOptions,
    output_options: OutputOptions,
    as_json: AsJson = False,
) -> None:
    """Concatenate files in bounded memory, with the result of anndata.concat."""
    from raggedatlas.formats.concat import concat as write

    # Fields of `ConcatOptions` have the names of the arguments of `concat`.
    how = {**vars(concat_options), "keys": concat_options.keys or None}
    with progress(f"write {output}") as callback:
        made = write(sources, sink_of(output, output_options.options()), progress=callback, **how)
    print_result({"path": made}, f"Wrote {made}", as_json=as_json)
