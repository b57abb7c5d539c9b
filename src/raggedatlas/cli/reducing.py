"""Verbs that reduce: ``pca`` and ``umap``."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.app import MODELS, app
from raggedatlas.cli.models import Output, folder_for, tell_results
from raggedatlas.cli.options import At, Place, Selection, unfold
from raggedatlas.cli.parameters import AsJson
from raggedatlas.cli.printing import progress
from raggedatlas.cli.query import Overwrite

if TYPE_CHECKING:
    from raggedatlas.query.query import Query

Source = Annotated[str, typer.Argument(help="Folder of results, or an atlas.", show_default=False)]


@dataclass(frozen=True)
class Fitted:
    """What is reduced, and how."""

    seed_of_fit: Annotated[int, typer.Option("--fit-seed", min=0, help="Another seed gives other numbers.")] = 0
    target_sum: Annotated[
        float | None,
        typer.Option(help="Scale the counts of a cell to this sum, and take log(1 + x).", show_default=False),
    ] = None
    column: Annotated[
        str | None, typer.Option(help="Output of the results, where there are several.", show_default=False)
    ] = None
    model: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Apply what an earlier run fitted (its .npz).", show_default=False),
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that are placed together.")] = 8192
    output: Output = None
    overwrite: Overwrite = False
    at: At = None
    as_json: AsJson = False

    def choices(self) -> dict[str, Any]:
        """Give the keyword arguments of `pca` and `umap`."""
        given = {
            "seed": self.seed_of_fit,
            "target_sum": self.target_sum,
            "column": self.column,
            "model": self.model,
            "batch_size": self.batch_size,
            "overwrite": self.overwrite,
        }
        return {name: value for name, value in given.items() if value is not None}

    def open(self, source: str, selection: Selection) -> "str | Query":
        """Tell results from an atlas; the selection is for the cells of an atlas."""
        from raggedatlas.results.folder import INDEX_FILE, has_table

        if has_table(Path(source)) or (Path(source) / INDEX_FILE).is_file():
            if selection != Selection():
                raise typer.BadParameter(f"{source} holds results, of which every row is taken", param_hint="--where")
            return source
        return selection.ask(Place(source).open_snapshot(self.at))


@app.command(rich_help_panel=MODELS, epilog="Example: raggedatlas pca pbmc.atlas --target-sum 10000 -o results/pca")
@unfold
def pca(
    source: Source,
    *,
    fitted: Fitted,
    selection: Selection,
    n_components: Annotated[int, typer.Option(min=1, help="Numbers of each row that are kept.")] = 50,
    sample_size: Annotated[int, typer.Option(min=2, help="Rows that the components are fitted to.")] = 50_000,
) -> None:
    """Reduce results, or cells of an atlas, to their principal components."""
    from raggedatlas.verbs.reduction import pca as run

    opened = fitted.open(source, selection)
    folder = folder_for(fitted.output, "pca")
    with progress(f"pca {folder}") as callback:
        found = run(
            opened, folder, n_components=n_components, sample_size=sample_size, progress=callback, **fitted.choices()
        )
    tell_results(found, folder, as_json=fitted.as_json)


@dataclass(frozen=True)
class Laid:
    """How a layout is made."""

    n_neighbors: Annotated[int, typer.Option(min=2, help="Neighbours that shape the layout.")] = 15
    min_dist: Annotated[float, typer.Option(min=0, max=1, help="How close points may lie.")] = 0.1
    metric: Annotated[
        Literal["euclidean", "cosine", "manhattan", "correlation", "chebyshev"], typer.Option(help="Distance of rows.")
    ] = "euclidean"


@app.command(rich_help_panel=MODELS, epilog="Example: raggedatlas umap results/pca -o results/umap")
@unfold
def umap(
    source: Source,
    *,
    fitted: Fitted,
    selection: Selection,
    n_components: Annotated[int, typer.Option(min=1, help="Dimensions of the layout.")] = 2,
    sample_size: Annotated[int, typer.Option(min=2, help="Rows that the layout is fitted to.")] = 10_000,
    laid: Laid,
) -> None:
    """Lay results, or cells of an atlas, out in few dimensions."""
    from raggedatlas.verbs.reduction import umap as run

    opened = fitted.open(source, selection)
    folder = folder_for(fitted.output, "umap")
    with progress(f"umap {folder}") as callback:
        found = run(
            opened, folder,
            n_components=n_components, sample_size=sample_size, progress=callback, **asdict(laid), **fitted.choices(),
        )  # fmt: skip
    tell_results(found, folder, as_json=fitted.as_json)
