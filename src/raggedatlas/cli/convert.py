"""The verb ``convert``: from one file format into another, without an atlas."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raggedatlas.cli.app import BUILD, app
from raggedatlas.cli.cxg import AsCxg, tell_losses
from raggedatlas.cli.geometry import Shaped, convert_geometry, is_geometry
from raggedatlas.cli.options import unfold
from raggedatlas.cli.parameters import AsJson, Words, many, one
from raggedatlas.cli.printing import progress, show, show_json
from raggedatlas.cli.query import Overwrite

if TYPE_CHECKING:
    from raggedatlas.formats.cxg.options import ConversionLoss
    from raggedatlas.model.contracts import Sink

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
