"""Verbs that find results: ``lookup``, ``save_to_database`` and ``neighbors``."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.app import MODELS, app
from raggedatlas.cli.options import At, Place, unfold
from raggedatlas.cli.parameters import AsJson, Strict
from raggedatlas.cli.printing import progress, show, show_json, show_table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from raggedatlas.query.query import Query

Results = Annotated[str, typer.Argument(metavar="RESULTS", help="Folder of results.", show_default=False)]
Column = Annotated[str, typer.Option(help="Output, where there are several.")]
Metric = Annotated[
    Literal["l2", "cosine", "dot"],
    typer.Option(help="Squared Euclidean distance, or one minus the cosine or the dot product."),
]
Uids = list[str]


@app.command(rich_help_panel=MODELS, epilog="Example: raggedatlas lookup results/z 1f0c5a2b9d3e4f60")
@unfold
def lookup(
    results: Results,
    uids: Annotated[Uids, typer.Argument(metavar="UID...", help="Cells.", show_default=False)],
    *,
    column: Column = "data",
    as_json: AsJson = False,
) -> None:
    """Print the results of cells; exit code 1 where one has none."""
    from raggedatlas.verbs.finding import lookup as find

    with progress(f"look up in {results}"):
        found = find(results, uids, column=column)
    told = {uid: None if values is None else values.tolist() for uid, values in found.items()}
    if as_json:
        show_json(told)
    else:
        for uid, values in told.items():
            show(f"{uid}  {'no result' if values is None else values}")
    if any(values is None for values in told.values()):
        raise typer.Exit(1)


@app.command(
    "save_to_database", rich_help_panel=MODELS, epilog="Example: raggedatlas save_to_database results/z --metric cosine"
)
@unfold
def save_to_database(
    results: Results,
    *,
    column: Column = "data",
    metric: Metric = "l2",
    least_rows: Annotated[
        int, typer.Option(min=0, help="Below, every row is compared, and no index is made.")
    ] = 50_000,
    least_recall: Annotated[float, typer.Option(min=0, max=1, help="Recall that a search is to reach.")] = 0.99,
    queries: Annotated[int, typer.Option(min=1, help="Rows with which the recall is measured.")] = 200,
    as_json: AsJson = False,
) -> None:
    """Give results an index for nearest neighbours, in place, and print its measured recall."""
    from raggedatlas.verbs.database import save_to_database as save

    with progress(f"index {results}") as callback:
        report = save(
            results, column=column, metric=metric, least_rows=least_rows, least_recall=least_recall, n_queries=queries,
            progress=callback,
        )  # fmt: skip
    if as_json:
        show_json(asdict(report))
    else:
        show(str(report))


@dataclass(frozen=True)
class Among:
    """Which cells can be neighbours."""

    atlas: Annotated[str | None, typer.Option(help="Atlas whose metadata are meant.", show_default=False)] = None
    where: Annotated[
        list[str],
        typer.Option(
            "--where", "-w", metavar="SQL", help="Cells that can be neighbours; repeatable.", show_default=False
        ),
    ] = field(default_factory=list)
    strict: Strict = False
    obs: Annotated[
        list[str], typer.Option(metavar="COLUMN", help="Show a cell column; repeatable.", show_default=False)
    ] = field(default_factory=list)
    at: At = None

    def query(self) -> "Query | None":
        """Ask the atlas, where one is named."""
        if self.atlas is None:
            if self.where or self.obs:
                raise typer.BadParameter("cell columns need --atlas", param_hint="--where, --obs")
            return None
        query = Place(self.atlas).open_snapshot(self.at).query()
        for condition in self.where:
            query = query.where(condition)
        return query.obs(self.obs) if self.obs else query


def read_vectors(path: Path) -> "NDArray[Any]":
    """Read vectors from a ``.npy`` file, or refuse it."""
    import numpy as np

    from raggedatlas.errors import SourceError

    try:
        found: NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SourceError(f"{path} is no .npy file that reads: {error}.") from error
    return found


@dataclass(frozen=True)
class Measured:
    """How near is measured."""

    k: Annotated[int, typer.Option("-k", min=1, help="Neighbours of each.")] = 10
    column: Column = "data"
    metric: Metric = "l2"
    exact: Annotated[bool, typer.Option("--exact", help="Compare every row even where there is an index.")] = False


@app.command(
    rich_help_panel=MODELS,
    epilog="Example: raggedatlas neighbors results/z 1f0c5a2b9d3e4f60 --atlas pbmc.atlas -w \"tissue = 'lung'\"",
)
@unfold
def neighbors(
    results: Results,
    uids: Annotated[list[str] | None, typer.Argument(metavar="[UID]...", help="Cells.", show_default=False)] = None,
    *,
    vectors: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead of cells: a .npy file of vectors.", show_default=False)
    ] = None,
    among: Among,
    measured: Measured,
    as_json: AsJson = False,
) -> None:
    """Print the cells whose results are nearest to those of some cells, or to some vectors."""
    from raggedatlas.verbs.finding import neighbors as find

    if bool(uids) == (vectors is not None):
        raise typer.BadParameter("name cells, or a file with --vectors", param_hint="UID")
    asked = uids or [] if vectors is None else read_vectors(vectors)
    query = among.query()
    with progress(f"search {results}"):
        found = find(results, asked, among=query, **asdict(measured))
    rows = found.to_pylist()
    if as_json:
        show_json(rows)
    else:
        show_table(rows, found.column_names, empty="No neighbours.")
