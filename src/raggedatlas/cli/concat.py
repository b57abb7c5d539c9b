"""The verb ``concat``: several files into one, without an atlas."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import typer

from raggedatlas.cli.app import BUILD, app
from raggedatlas.cli.convert import Written, sink_of
from raggedatlas.cli.options import unfold
from raggedatlas.cli.parameters import AsJson, Words, many, one
from raggedatlas.cli.printing import progress, show, show_json

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
