"""Options of ``convert`` for files and stores of geometry, and the conversion itself."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.app import BUILD, app
from raggedatlas.cli.options import AsCxg, AsJson, Overwrite, Words, many, one, pairs, tell_losses, unfold
from raggedatlas.cli.printing import progress, say, show, show_json

if TYPE_CHECKING:
    from raggedatlas.formats.cxg.options import ConversionLoss
    from raggedatlas.model.protocols import Sink
    from raggedatlas.vectors.converters.convert import Conversion
    from raggedatlas.vectors.pyramid import PyramidOptions

ENDINGS = (
    ".zv", ".csv", ".tsv", ".parquet", ".xyz", ".swc", ".obj", ".ply", ".stl", ".trx", ".trk", ".tck", ".graphml",
    ".edgelist", ".geojson", ".geoparquet", ".precomputed",
)  # fmt: skip
"""Endings by which files of geometry are told from tables of cells, without loading what reads them."""


@dataclass(frozen=True)
class Shaped:
    """How geometry is converted."""

    format_in: Annotated[str | None, one("FORMAT", "Geometry: what the source is", "--from")] = None
    format_out: Annotated[
        str | None,
        one("FORMAT", "Geometry: what to write, e.g. swc-folder, spatialdata, precomputed-meshes, store", "--to"),
    ] = None
    options: Annotated[
        Words,
        many("KEY=VALUE", "Geometry: for the reader, e.g. element=shapes/cells or objects=cell_id", "--option"),
    ] = field(default_factory=list)
    writing: Annotated[
        Words,
        many("KEY=VALUE", "Geometry: for the writer, e.g. annotation_type=ELLIPSOID or depth=2", "--write-option"),
    ] = field(default_factory=list)
    level: Annotated[
        int | None, typer.Option(min=0, help="Geometry: which level of a store becomes a file.", show_default="0")
    ] = None
    layout: Annotated[Literal["0.9", "0.7"], typer.Option(help="Geometry: layout of a store.")] = "0.9"
    chunk_shape: Annotated[
        str | None,
        one("X,Y,...", "Geometry: edges of a chunk, world units", default="by the data"),
    ] = None
    levels: Annotated[int, typer.Option(min=0, help="Geometry: how many coarser levels a store gets.")] = 0
    factor: Annotated[float, typer.Option(help="Geometry: how many times fewer vertices each level has.")] = 8.0
    sparsity: Annotated[float, typer.Option(help="Geometry: share of the objects that each level keeps.")] = 1.0
    level_links: Annotated[
        Literal["none", "implicit", "explicit"], typer.Option(help="Geometry: links between levels.")
    ] = "none"

    def conversion(self, *, strict: bool, overwrite: bool) -> "Conversion":
        """Give how to convert."""
        from raggedatlas.vectors.builder import ChunkingOptions
        from raggedatlas.vectors.converters.convert import Conversion

        options: dict[str, object] = dict(pairs(self.options, "--option"))
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
            {key: _value(text) for key, text in pairs(self.writing, "--write-option").items()},
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


def is_geometry(source: str, target: str, shaped: Shaped) -> bool:
    """Tell whether a conversion is one of geometry: by a format that is named, an ending, or what a folder is."""
    if shaped.format_in or shaped.format_out or ("://" in source + target and "precomputed://" in (source + target)):
        return True
    if any(Path(path.rstrip("/")).suffix.lower() in ENDINGS for path in (source, target)):
        return True
    if not (Path(source) / "zarr.json").is_file():
        return False
    from raggedatlas.vectors.converters.convert import is_store

    return is_store(source)


def convert_geometry(source: str, target: str, how: "Conversion", *, as_json: bool) -> None:
    """Convert, and tell what was lost."""
    from raggedatlas.vectors.converters.convert import convert

    losses = convert(source, target, how)
    if as_json:
        show_json({"path": target, "losses": losses})
        return
    for loss in losses:
        say(f"lost: {loss}" if not loss.startswith("rounded: ") else loss)
    show(f"Wrote {target}")


NONE = "none"


@dataclass(frozen=True)
class Taken:
    """What is taken of the source."""

    where: Annotated[
        str | None,
        one("SQL", "Keep cells that meet a condition on columns of obs; cell_name is the index", "--where", "-w"),
    ] = None
    features: Annotated[
        Words,
        many("NAME", "Keep features, by name, id or symbol, in this order", "--features", "-f"),
    ] = field(default_factory=list)
    layers: Annotated[
        Words,
        many("LAYER", "Keep only these of X, raw and the layers", "--layers", "-l"),
    ] = field(default_factory=list)
    modality: Annotated[
        str | None, typer.Option(help="Take one modality or feature type of several.", show_default=False)
    ] = None
    genome: Annotated[
        str | None, typer.Option(help="Which genome of an old 10x file that holds several.", show_default=False)
    ] = None
    cxg_version: Annotated[
        str | None, one("VERSION", "Read a .cxg as unnamed, 0.1, 0.2.0 or 0.3.0, whatever it says", "--cxg-version")
    ] = None
    no_uns: Annotated[bool, typer.Option("--no-uns", help="Leave the uns of a .cxg unread.")] = False

    def reading(self) -> dict[str, Any]:
        """Give those options of `open_source` that were asked for."""
        given: dict[str, Any] = {"genome": self.genome, "version": self.cxg_version}
        asked = {name: value for name, value in given.items() if value is not None}
        return {**asked, "uns": False} if self.no_uns else asked


@dataclass(frozen=True)
class Written:
    """How the target is written."""

    compression: Annotated[
        str | None,
        one(
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
        """Give the options of `open_sink`."""
        found: dict[str, Any] = {"overwrite": self.overwrite}
        if self.compression is not None:
            found["compression"] = None if self.compression == NONE else self.compression
        if self.zarr_format is not None:
            found["zarr_format"] = self.zarr_format
        return found


@app.command(
    rich_help_panel=BUILD,
    epilog="Example: raggedatlas convert a.h5ad b.zarr --where \"cell_type = 'B'\" -l X; "
    "raggedatlas convert a.h5ad b.cxg --strict --title PBMC --compute-embedding pca",
)
@unfold
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
    taken: Taken,
    written: Written,
    cxg: AsCxg,
    shaped: Shaped,
    as_json: AsJson = False,
) -> None:
    """Copy a file into another format, whole or in part, in bounded memory; geometry is held whole."""
    if is_geometry(source, target, shaped):
        foreign = (taken, replace(cxg, strict=False)) != (Taken(), AsCxg())
        if foreign or written.compression is not None or written.zarr_format is not None:
            raise typer.BadParameter("--where, --features, --layers, --compression and their like are not for geometry")
        how = shaped.conversion(strict=cxg.strict, overwrite=written.overwrite)
        convert_geometry(source, target, how, as_json=as_json)
        return
    from raggedatlas.formats.copying import copy, is_multimodal
    from raggedatlas.formats.registry import open_source

    losses: list[ConversionLoss] = []

    def told(found: "tuple[ConversionLoss, ...]") -> None:
        losses.extend(found)
        if not as_json:
            tell_losses(found)

    more = cxg.options(target, told)
    opened = open_source(source, **taken.reading())
    try:
        several = taken.modality is None and is_multimodal(opened)
        with progress(f"write {target}") as callback:
            made = copy(
                opened,
                sink_of(target, {**written.options(), **more}, multimodal=several),
                where=taken.where,
                features=taken.features or None,
                layers=taken.layers or None,
                modality=taken.modality,
                progress=callback,
            )
    finally:
        opened.close()
    if as_json:
        show_json({"path": made, **({"losses": [asdict(loss) for loss in losses]} if more else {})})
    else:
        show(f"Wrote {made}")


def sink_of(target: str, options: dict[str, Any], *, multimodal: bool = False) -> "Sink":
    """Open the target of a verb that writes a file."""
    from raggedatlas.formats.registry import open_sink

    if multimodal and Path(target).suffix == ".zarr":
        options["multimodal"] = True
    return open_sink(target, **options)


Kept = Literal["same", "unique", "first", "only"]


@dataclass(frozen=True)
class Joined:
    """How files are joined; the fields are arguments of `raggedatlas.concat`."""

    join: Annotated[
        Literal["inner", "outer"], typer.Option(help="Keep features, layers and columns that all files have, or any.")
    ] = "inner"
    merge: Annotated[Kept | None, typer.Option(help="What to keep of var, varm and varp.", show_default="nothing")] = (
        None
    )
    uns_merge: Annotated[Kept | None, typer.Option(help="What to keep of uns.", show_default="nothing")] = None
    label: Annotated[str | None, one("COLUMN", "Write the key of each cell's file into a column of obs", "--label")] = (
        None
    )
    keys: Annotated[Words, many("KEY", "Key of a file, in their order; else 0, 1, ...", "--key")] = field(
        default_factory=list
    )
    index_unique: Annotated[
        str | None, one("TEXT", "Put TEXT and the key of its file behind each cell's name", "--index-unique")
    ] = None
    fill_value: Annotated[
        float | None,
        one("NUMBER", "What stands for what a file lacks", default="0 in sparse matrices, NaN in dense ones"),
    ] = None
    modality: Annotated[str | None, typer.Option(help="Take one modality of several.", show_default=False)] = None


@app.command(
    rich_help_panel=BUILD,
    epilog="Example: raggedatlas concat a.h5ad b.zarr -o both.h5ad --join outer --label batch --key a --key b",
)
@unfold
def concat(
    sources: Annotated[
        list[str], typer.Argument(help="h5ad, AnnData zarr, CXG, 10x h5, Market-matrix folders.", show_default=False)
    ],
    *,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="A .h5ad, .zarr, .h5mu or .cxg.", show_default=False)
    ],
    joined: Joined,
    written: Written,
    as_json: AsJson = False,
) -> None:
    """Write the cells of several files into one, in bounded memory, with the result of anndata.concat."""
    from raggedatlas.formats.concat import concat as write

    how = {**vars(joined), "keys": joined.keys or None}
    with progress(f"write {output}") as callback:
        made = write(sources, sink_of(output, written.options()), progress=callback, **how)
    if as_json:
        show_json({"path": made})
    else:
        show(f"Wrote {made}")
