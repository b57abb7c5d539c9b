"""The verb ``convert_results``: from the ``.npy`` files of old model runs to a table."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from raggedatlas.cli.app import BUILD, app
from raggedatlas.cli.options import unfold
from raggedatlas.cli.printing import progress, show, show_json


@app.command(
    "convert_results",
    rich_help_panel=BUILD,
    epilog="Example: raggedatlas convert_results --results-dir results/20250201-120000-infer-AbCd",
)
@unfold
def convert_results(
    results_dir: Annotated[
        Path, typer.Option(help="Folder of one run, with batch_index.npy in it.", show_default=False)
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a table that is there; readers see the old one until then.")
    ] = False,
    promote: Annotated[
        bool, typer.Option("--promote", help="Store batches of different dtypes in one that holds all of them.")
    ] = False,
    spot_check: Annotated[
        int | None, typer.Option(metavar="N", help="Compare N rows at random, and not all.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write the .npy results of a model run as a Lance table beside them; the .npy files are never changed."""
    from raggedatlas.results.convert import convert_results as convert

    with progress(f"convert {results_dir}") as callback:
        done = convert(results_dir, overwrite=overwrite, promote=promote, spot_check=spot_check, progress=callback)
    if as_json:
        show_json({**asdict(done), "results_dir": str(done.results_dir), "dtype": done.dtype.name})
    else:
        show(str(done))
