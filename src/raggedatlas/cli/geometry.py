"""Options of ``convert`` for files and stores of geometry, and the conversion itself."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from raggedatlas.cli.options import pairs
from raggedatlas.cli.parameters import Words, many, one
from raggedatlas.cli.printing import say, show, show_json

if TYPE_CHECKING:
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
