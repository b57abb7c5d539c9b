"""Verb ``convert``: between file formats, without an atlas."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

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
    refuse_unused,
    repeatable,
)
from raggedatlas.cli.printing import progress
from raggedatlas.model.wings import built_in_wings

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
    other: Any,  # noqa: ANN401  (the options of what a wing converts; `CONVERSION`)
    as_json: AsJson = False,
) -> tuple[Any, str]:
    """Convert a file, or a subset of it, to another format in bounded memory; geometry is read into memory."""
    from raggedatlas.store.location import as_path

    paths = [as_path(path, output_options.storage_options) for path in (source, target)]
    if other.takes(*paths):
        # `--strict` is an option of geometry too, so it does not count here.
        foreign = (subset, replace(cxg, strict=False)) != (SubsetOptions(), CxgOptions())
        if foreign or output_options.compression is not None or output_options.zarr_format is not None:
            raise typer.BadParameter(
                "--where, --features, --layers, --compression and similar options do not apply to geometry"
            )
        made: tuple[Any, str] = other.convert(
            *paths, strict=cxg.strict, overwrite=output_options.overwrite, as_json=as_json
        )
        return made
    refuse_unused("for files of cells", other, other.__dataclass_fields__)
    from raggedatlas.formats.copying import copy
    from raggedatlas.formats.modalities import is_multimodal
    from raggedatlas.formats.registry import open_sink, open_source

    losses: list[Any] = []

    def report_losses(found: tuple[Any, ...]) -> None:
        losses.extend(found)
        if not as_json:
            print_losses(found)

    # Before the source is opened, so that options of a CXG are refused at once for another target.
    more = cxg.options(target, report_losses)
    opened = open_source(source, storage_options=output_options.storage_options, **subset.reading())
    try:
        # Only `.zarr` may be AnnData or MuData; `.h5ad` and `.h5mu` say which.
        several = subset.modality is None and Path(target).suffix == ".zarr" and is_multimodal(opened)
        options = {**output_options.options(), **more, **({"multimodal": True} if several else {})}
        with progress(f"write {target}") as callback:
            written = copy(
                opened,
                open_sink(target, **options),
                where=subset.where,
                features=subset.features or None,
                layers=subset.layers or None,
                modality=subset.modality,
                progress=callback,
            )
    finally:
        opened.close()
    return {"path": written, **({"losses": [asdict(loss) for loss in losses]} if more else {})}, f"Wrote {written}"


@dataclass(frozen=True)
class NoConversion:
    """What a package without a wing that converts has in the place of its options."""

    def takes(self, *_: Any) -> bool:  # noqa: ANN401
        """Return False: every conversion is one of cells."""
        return False


CONVERSION: Any = next((resolve_name(wing.conversion) for wing in built_in_wings() if wing.conversion), NoConversion)

# The options of a wing are known only here, not where `convert` is written.
convert.__annotations__["other"] = CONVERSION
command(
    BUILD,
    "convert a.h5ad b.zarr --where \"cell_type = 'B'\" -l X; raggedatlas convert a.h5ad b.cxg --strict --title PBMC --compute-embedding pca",
)(convert)
