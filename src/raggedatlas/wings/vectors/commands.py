"""What ``convert`` does with geometry, and its options for that."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from raggedatlas.cli.options import Strings, option, parse_integer, parse_pairs, refuse_unused, repeatable
from raggedatlas.cli.printing import print_status
from raggedatlas.model.choices import CrossLevel, Layout

if TYPE_CHECKING:
    from raggedatlas.store.location import AnyPath

ENDINGS = (
    ".zv", ".csv", ".tsv", ".parquet", ".obj", ".ply", ".stl", ".geojson", ".geoparquet",
)  # fmt: skip
"""File extensions of geometry, known without importing its readers."""


@dataclass(frozen=True)
class GeometryConversion:
    """Options that convert geometry."""

    format_in: str | None = option("FORMAT", "Geometry: what the source is", "--from")
    format_out: str | None = option("FORMAT", "Geometry: what to write, e.g. spatialdata, store", "--to")
    options: Strings = repeatable(
        "KEY=VALUE", "Geometry: for the reader, e.g. element=shapes/cells or objects=cell_id", "--option"
    )
    writing: Strings = repeatable("KEY=VALUE", "Geometry: for the writer, e.g. name=cells", "--write-option")
    level: int | None = option(None, "Geometry: which level of a store becomes a file", show="0", min=0)
    layout: Layout = option(None, "Geometry: layout of a store", default="0.9")
    chunk_shape: str | None = option("X,Y,...", "Geometry: edges of a chunk, world units", show="by the data")
    levels: int = option(None, "Geometry: how many coarser levels a store gets", default=0, min=0)
    factor: float = option(None, "Geometry: how many times fewer vertices each level has", default=8.0)
    sparsity: float = option(None, "Geometry: share of the objects that each level keeps", default=1.0)
    level_links: CrossLevel = option(None, "Geometry: links between levels", default="none")

    def takes(self, source: "AnyPath", target: "AnyPath") -> bool:
        """Return whether a conversion is one of geometry: by a format that is named, an ending, or what a folder is."""
        if self.format_in or self.format_out:
            return True
        if any(path.suffix.lower() in ENDINGS for path in (source, target)):
            return True
        # Names have decided nothing; the converters are imported, and a server asked, only for what may be a store.
        from raggedatlas.formats.containers import HDF5_ENDINGS

        if source.suffix in HDF5_ENDINGS or (isinstance(source, Path) and not (source / "zarr.json").is_file()):
            return False
        from raggedatlas.wings.vectors.converters.convert import is_store

        return is_store(source)

    def convert(
        self, source: "AnyPath", target: "AnyPath", *, strict: bool, overwrite: bool, as_json: bool
    ) -> tuple[Any, str]:
        """Convert, and report what was lost."""
        from raggedatlas.wings.vectors.builder import ChunkingOptions
        from raggedatlas.wings.vectors.converters.convert import Conversion, convert
        from raggedatlas.wings.vectors.pyramid import PyramidOptions

        if not self.levels:
            refuse_unused("without --levels", self, ("factor", "sparsity", "level_links"))
        options: dict[str, object] = dict(parse_pairs(self.options, "--option"))
        # Readers take a list for it, and the command line has only text.
        if "axes" in options:
            options["axes"] = str(options["axes"]).split(",")
        try:
            edges = None if self.chunk_shape is None else tuple(float(part) for part in self.chunk_shape.split(","))
        except ValueError:
            raise typer.BadParameter("expected numbers, e.g. 100,100,50", param_hint="--chunk-shape") from None
        writing: dict[str, object] = {
            key: text == "true" if text in ("true", "false") else parse_integer(text)
            for key, text in parse_pairs(self.writing, "--write-option").items()
        }
        how = Conversion(
            self.format_in,
            self.format_out,
            options,
            self.level,
            self.layout,
            PyramidOptions(self.levels, self.factor, sparsity=self.sparsity) if self.levels else None,
            ChunkingOptions(chunk_shape=edges, cross_level_storage=self.level_links),
            strict,
            overwrite,
            writing,
        )
        losses = convert(source, target, how)
        for loss in [] if as_json else losses:
            print_status(f"lost: {loss}" if not loss.startswith("rounded: ") else loss)
        return {"path": str(target), "losses": losses}, f"Wrote {target}"
