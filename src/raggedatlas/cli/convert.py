"""Verb ``convert``: between file formats, without an atlas."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raggedatlas.cli.app import BUILD, command
from raggedatlas.cli.options import (
    AsJson,
    CxgOptions,
    Overwrite,
    Strings,
    argument,
    flag,
    option,
    parse_pairs,
    print_losses,
    repeatable,
)
from raggedatlas.cli.printing import print_status, progress
from raggedatlas.model.choices import CrossLevel, Layout

if TYPE_CHECKING:
    from raggedatlas.model.protocols import Sink
    from raggedatlas.store.location import AnyPath
    from raggedatlas.wings.cxg.options import ConversionLoss
    from raggedatlas.wings.vectors.converters.convert import Conversion
    from raggedatlas.wings.vectors.pyramid import PyramidOptions

ENDINGS = (
    ".zv", ".csv", ".tsv", ".parquet", ".obj", ".ply", ".stl", ".geojson", ".geoparquet",
)  # fmt: skip
"""File extensions of geometry, known without importing its readers."""


@dataclass(frozen=True)
class GeometryOptions:
    """Options that convert geometry."""

    format_in: str | None = option("FORMAT", "Geometry: what the source is", "--from")
    format_out: str | None = option("FORMAT", "Geometry: what to write, e.g. spatialdata, store", "--to")
    options: Strings = repeatable(
        "KEY=VALUE", "Geometry: for the reader, e.g. element=shapes/cells or objects=cell_id", "--option"
    )
    writing: Strings = repeatable("KEY=VALUE", "Geometry: for the writer, e.g. ascii=true", "--write-option")
    level: int | None = option(None, "Geometry: which level of a store becomes a file", show="0", min=0)
    layout: Layout = option(None, "Geometry: layout of a store", default="0.9")
    chunk_shape: str | None = option("X,Y,...", "Geometry: edges of a chunk, world units", show="by the data")
    levels: int = option(None, "Geometry: how many coarser levels a store gets", default=0, min=0)
    factor: float = option(None, "Geometry: how many times fewer vertices each level has", default=8.0)
    sparsity: float = option(None, "Geometry: share of the objects that each level keeps", default=1.0)
    level_links: CrossLevel = option(None, "Geometry: links between levels", default="none")

    def conversion(self, *, strict: bool, overwrite: bool) -> "Conversion":
        """Return how to convert."""
        from raggedatlas.wings.vectors.builder import ChunkingOptions
        from raggedatlas.wings.vectors.converters.convert import Conversion

        options: dict[str, object] = dict(parse_pairs(self.options, "--option"))
        # Readers take a list for it, and the command line has only text.
        if "axes" in options:
            options["axes"] = str(options["axes"]).split(",")
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
        from raggedatlas.wings.vectors.pyramid import PyramidOptions

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


def is_geometry(source: "AnyPath", target: "AnyPath", geometry: GeometryOptions) -> bool:
    """Return whether a conversion is one of geometry: by a format that is named, an ending, or what a folder is."""
    if geometry.format_in or geometry.format_out:
        return True
    if any(path.suffix.lower() in ENDINGS for path in (source, target)):
        return True
    # Names have decided nothing; the converters are imported, and a server asked, only for what may be a store.
    from raggedatlas.formats.containers import HDF5_ENDINGS

    if source.suffix in HDF5_ENDINGS or (isinstance(source, Path) and not (source / "zarr.json").is_file()):
        return False
    from raggedatlas.wings.vectors.converters.convert import is_store

    return is_store(source)


def convert_geometry(source: "AnyPath", target: "AnyPath", how: "Conversion", *, as_json: bool) -> tuple[Any, str]:
    """Convert, and report what was lost."""
    from raggedatlas.wings.vectors.converters.convert import convert

    losses = convert(source, target, how)
    for loss in [] if as_json else losses:
        print_status(f"lost: {loss}" if not loss.startswith("rounded: ") else loss)
    return {"path": str(target), "losses": losses}, f"Wrote {target}"


NONE = "none"


@dataclass(frozen=True)
class SubsetOptions:
    """Options that select a subset of the source."""

    where: str | None = option(
        "SQL", "Keep cells that satisfy a condition on columns of obs; cell_name is the index", "--where", "-w"
    )
    features: Strings = repeatable("NAME", "Keep features, by name, id or symbol, in this order", "--features", "-f")
    layers: Strings = repeatable("LAYER", "Keep only these of X, raw and the layers", "--layers", "-l")
    modality: str | None = option(None, "Read only one modality or feature type")
    genome: str | None = option(None, "Genome to read from an old 10x file with several")
    cxg_version: str | None = option(
        "VERSION", "Read a .cxg as version unnamed, 0.1, 0.2.0 or 0.3.0, regardless of its metadata", "--cxg-version"
    )
    no_uns: bool = flag("--no-uns", "Do not read the uns of a .cxg")

    def reading(self) -> dict[str, Any]:
        """Return the options of `open_source` that are set."""
        given: dict[str, Any] = {"genome": self.genome, "version": self.cxg_version}
        asked = {name: value for name, value in given.items() if value is not None}
        # Only what is set is passed on, because readers refuse options of other formats.
        return {**asked, "uns": False} if self.no_uns else asked


@dataclass(frozen=True)
class OutputOptions:
    """Options that write the target."""

    compression: str | None = option(
        "NAME[:LEVEL]",
        "gzip, zstd, blosc, lzf or none; HDF5 needs the extra plugins for zstd and blosc",
        show="gzip in HDF5, zstd in Zarr",
    )
    zarr_format: int | None = option(None, "Zarr format", show="3, in shards", min=2, max=3)
    overwrite: Overwrite = False
    storage_option: Strings = repeatable("KEY=VALUE", "Credential or endpoint of an object store")

    @property
    def storage_options(self) -> dict[str, str]:
        """Storage options as a dictionary, of sources and target."""
        return parse_pairs(self.storage_option, "--storage-option")

    def options(self) -> dict[str, Any]:
        """Return the options of `open_sink`."""
        found: dict[str, Any] = {"overwrite": self.overwrite, "storage_options": self.storage_options}
        if self.compression is not None:
            # None means uncompressed; without the key the sink chooses a compression.
            found["compression"] = None if self.compression == NONE else self.compression
        if self.zarr_format is not None:
            found["zarr_format"] = self.zarr_format
        return found


@command(
    BUILD,
    "convert a.h5ad b.zarr --where \"cell_type = 'B'\" -l X; raggedatlas convert a.h5ad b.cxg --strict --title PBMC --compute-embedding pca",
)
def convert(
    source: Annotated[
        str,
        argument(
            "h5ad, h5mu, AnnData or MuData zarr, CXG, 10x h5, Market-matrix folder; or geometry: a store (.zv), geojson, obj, .."
        ),
    ],
    target: Annotated[str, argument("A .h5ad, .h5mu, .zarr or .cxg; or geometry")],
    *,
    subset: SubsetOptions,
    output_options: OutputOptions,
    cxg: CxgOptions,
    geometry: GeometryOptions,
    as_json: AsJson = False,
) -> tuple[Any, str]:
    """Convert a file, or a subset of it, to another format in bounded memory; geometry is read into memory."""
    from raggedatlas.store.location import as_path

    options = output_options.storage_options
    if is_geometry(as_path(source, options), as_path(target, options), geometry):
        # `--strict` is an option of geometry too, so it does not count here.
        foreign = (subset, replace(cxg, strict=False)) != (SubsetOptions(), CxgOptions())
        if foreign or output_options.compression is not None or output_options.zarr_format is not None:
            raise typer.BadParameter(
                "--where, --features, --layers, --compression and similar options do not apply to geometry"
            )
        how = geometry.conversion(strict=cxg.strict, overwrite=output_options.overwrite)
        return convert_geometry(as_path(source, options), as_path(target, options), how, as_json=as_json)
    from raggedatlas.formats.copying import copy
    from raggedatlas.formats.modalities import is_multimodal
    from raggedatlas.formats.registry import open_source

    losses: list[ConversionLoss] = []

    def report_losses(found: "tuple[ConversionLoss, ...]") -> None:
        losses.extend(found)
        if not as_json:
            print_losses(found)

    # Before the source is opened, so that options of a CXG are refused at once for another target.
    more = cxg.options(target, report_losses)
    opened = open_source(source, storage_options=output_options.storage_options, **subset.reading())
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
    return {"path": made, **({"losses": [asdict(loss) for loss in losses]} if more else {})}, f"Wrote {made}"


def sink_of(target: str, options: dict[str, Any], *, multimodal: bool = False) -> "Sink":
    """Return the sink of a target path."""
    from raggedatlas.formats.registry import open_sink

    # Only `.zarr` may be AnnData or MuData; `.h5ad` and `.h5mu` say which.
    if multimodal and Path(target).suffix == ".zarr":
        options["multimodal"] = True
    return open_sink(target, **options)
