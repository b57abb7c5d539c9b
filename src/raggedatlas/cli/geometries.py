"""Verbs about the geometry of an atlas: ``geometries`` and ``drop-geometry``."""

from typing import Annotated

import typer

from raggedatlas.cli.app import CARE, LOOK, app
from raggedatlas.cli.options import At, Place, unfold
from raggedatlas.cli.parameters import one
from raggedatlas.cli.printing import show, show_added, show_json
from raggedatlas.cli.spelling import as_commands

SHOWN = ["name", "space", "types", "axes", "n_cells", "datasets", "n_objects", "n_vertices", "n_levels", "added"]


@app.command(rich_help_panel=LOOK, epilog="Example: raggedatlas geometries slide.atlas")
@unfold
def geometries(place: Place, at: At = None) -> None:
    """List the shapes of cells that an atlas holds."""
    show_added(
        place.open_at(at).geometries(), SHOWN, as_json=place.as_json,
        empty=f"No geometry yet; run: raggedatlas add {place.atlas} STORE --link COLUMN --space SPACE",
    )  # fmt: skip


@app.command(
    "drop-geometry",
    rich_help_panel=CARE,
    epilog="Example: raggedatlas drop-geometry slide.atlas segmentation_boundary --dataset slide1",
)
@unfold
def drop_geometry(
    place: Place,
    name: Annotated[str, typer.Argument(help="Name of the geometry, or its feature space.", show_default=False)],
    dataset: Annotated[str | None, one("DATASET", "Take that of one dataset only, by its name or uid")] = None,
) -> None:
    """Take shapes of cells out of the newest state; snapshots that have them keep them."""
    report = place.open().drop_geometry(name, dataset)
    if place.as_json:
        show_json(report.to_dict())
    else:
        show(f"Dropped the geometry {name} of {report.n_cells:,} cells; " + as_commands("; ".join(report.notes)))
