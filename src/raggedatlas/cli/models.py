"""Verbs that apply a model: ``infer``, ``test`` and ``engine``."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.app import MODELS, app
from raggedatlas.cli.options import AsJson, At, Overwrite, Place, Selection, Strict, one, pairs, unfold
from raggedatlas.cli.printing import progress, show, show_facts, show_json, show_table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from raggedatlas.query.query import Query
    from raggedatlas.results.dataset import ResultDataset

Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Folder for the results.",
        show_default="results/<time>-<verb>-<letters>",
    ),
]
Words = list[str]


@dataclass(frozen=True)
class Computed:
    """Which model, and how it computes."""

    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            metavar="FILE",
            help="State of a PyTorch module: .pt from torch.save(module.state_dict(), ...), or .safetensors.",
            show_default=False,
        ),
    ] = None
    option: Annotated[
        Words,
        typer.Option(metavar="KEY=VALUE", help="Argument of the model's class; repeatable.", show_default=False),
    ] = field(default_factory=list)
    output_name: Annotated[
        Words,
        typer.Option(
            "--output-name", metavar="NAME", help="Name of an output of several; repeatable.", show_default=False
        ),
    ] = field(default_factory=list)
    values: Annotated[
        Literal["csr", "dense", "torch", "torch-dense"] | None,
        typer.Option("--as", help="What values the model gets.", show_default="dense; torch-dense for PyTorch"),
    ] = None
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Where PyTorch computes, e.g. cuda.", show_default=False)
    ] = None

    def choices(self) -> dict[str, Any]:
        """Give the keyword arguments of `infer`."""
        given = {
            "weights": self.weights,
            "options": {key: value_of(text) for key, text in pairs(self.option, "--option").items()},
            "outputs": self.output_name,
            "as_": self.values,
            "device": self.device,
        }
        return {name: value for name, value in given.items() if value}


@dataclass(frozen=True)
class Kept:
    """Which snapshot is read, and where results go."""

    batch_size: Annotated[int, typer.Option(min=1, help="Cells of a batch.")] = 512
    output: Output = None
    overwrite: Overwrite = False
    at: At = None

    def choices(self) -> dict[str, Any]:
        """Give the keyword arguments of the verbs."""
        return {"batch_size": self.batch_size, "overwrite": self.overwrite}


Resume = Annotated[
    bool, typer.Option("--resume", help="Go on where an interrupted run into the folder of --output stopped.")
]


def value_of(text: str) -> Any:  # noqa: ANN401  (any JSON value)
    """Read a value as JSON; what is none is text.

    Examples
    --------
    >>> value_of("30"), value_of("[1, 2]"), value_of("relu")
    (30, [1, 2], 'relu')
    """
    try:
        return json.loads(text)
    except ValueError:
        return text


def folder_for(output: str | None, verb: str) -> str:
    """Name the folder of a run where nobody did."""
    from raggedatlas.verbs.runs import new_run

    return str(new_run("results", verb)) if output is None else output


def _need_output(kept: Kept, *, resume: bool) -> None:
    if resume and kept.output is None:
        raise typer.BadParameter("it goes on in the folder of --output, which is missing", param_hint="--resume")


def tell_results(found: "ResultDataset", folder: str, *, as_json: bool, **more: Any) -> None:  # noqa: ANN401
    """Print what was written where."""
    columns = [{"name": each.name, "shape": list(each.shape), "dtype": each.dtype.name} for each in found.columns]
    if as_json:
        show_json({"results_dir": folder, "n_rows": len(found), "columns": columns, **more})
    else:
        outputs = ", ".join(f"{each['name']} {tuple(each['shape'])} {each['dtype']}" for each in columns)
        show(f"Wrote {len(found):,} results ({outputs}) to {folder}")


Named = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Where it is imported from: package.module:name, or file.py:name.", show_default=False
    ),
]


@app.command(rich_help_panel=MODELS, epilog="Example: raggedatlas infer pbmc.atlas models.py:Encoder --weights e.pt")
@unfold
def infer(
    place: Place,
    model: Named,
    *,
    computed: Computed,
    kept: Kept,
    selection: Selection,
    parts: Annotated[int, typer.Option(min=1, help="How many processes share the run.")] = 1,
    resume: Resume = False,
    update: Annotated[
        str | None,
        one("RESULTS", "Take over what is known of cells from older results of the model; compute the others"),
    ] = None,
) -> None:
    """Apply a model to cells of a snapshot (the newest, or --at), each once, and keep what it gives."""
    from raggedatlas.verbs.inference import infer as run

    query = selection.ask(place.open_snapshot(kept.at))
    _need_output(kept, resume=resume)
    folder = folder_for(kept.output, "infer")
    with progress(f"infer {folder}") as callback:
        found = run(
            model, query, folder,
            progress=callback, n_parts=parts, resume=resume, update=update, **computed.choices(), **kept.choices(),
        )  # fmt: skip
    tell_results(found, folder, as_json=place.as_json)


@dataclass(frozen=True)
class Answer:
    """How the answers are told."""

    category: Annotated[
        Words, typer.Option(help="Class, in the order of the model's; repeatable.", show_default=False)
    ] = field(default_factory=list)
    prediction: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which of several outputs is meant.", show_default=False)
    ] = None


@app.command(
    "test", rich_help_panel=MODELS, epilog="Example: raggedatlas test pbmc.atlas models.py:Classifier cell_type"
)
@unfold
def measure(
    place: Place,
    model: Named,
    target: Annotated[str, typer.Argument(help="Cell column with the answers.", show_default=False)],
    *,
    computed: Computed,
    kept: Kept,
    selection: Selection,
    answer: Answer,
) -> None:
    """Apply a model to cells whose answer is known, and measure how well it does."""
    from dataclasses import asdict

    from raggedatlas.verbs.evaluation import test as run

    query = selection.ask(place.open_snapshot(kept.at))
    folder = folder_for(kept.output, "test")
    with progress(f"test {folder}") as callback:
        found = run(
            model, query, folder, target,
            progress=callback, categories=answer.category or None, output=answer.prediction, **computed.choices(), **kept.choices(),
        )  # fmt: skip
    scores = found.scores
    tell_results(found, folder, as_json=place.as_json, scores=asdict(scores))
    if place.as_json:
        return
    counted = {"cells": scores.n_cells, "without an answer": scores.n_unlabelled}
    show_facts({**counted, **({} if scores.loss is None else {"loss": scores.loss}), **scores.metrics})
    named = [
        {"target \\ predicted": name, **dict(zip(scores.categories, row, strict=True))}
        for name, row in zip(scores.categories, scores.confusion, strict=True)
    ]
    show_table(named, ["target \\ predicted", *scores.categories], empty="")


@dataclass(frozen=True)
class Fed:
    """What goes into the model."""

    input_: Annotated[
        Words,
        typer.Option(
            "--input",
            metavar="NAME=WHAT",
            help="What an input of the model takes: X, or a cell column; repeatable.",
            show_default=False,
        ),
    ] = field(default_factory=list)


@app.command(rich_help_panel=MODELS, epilog="Example: raggedatlas engine pbmc.atlas encoder.onnx -f CD3D -f MS4A1")
@unfold
def engine(
    place: Place,
    model: Annotated[str, typer.Argument(metavar="FILE", help="An .onnx file.", show_default=False)],
    *,
    selection: Selection,
    fed: Fed,
    kept: Kept,
    resume: Resume = False,
) -> None:
    """Apply a model in an ONNX file to cells of a snapshot, by ONNX Runtime."""
    from raggedatlas.verbs.inference import engine as run

    query = selection.ask(place.open_snapshot(kept.at))
    _need_output(kept, resume=resume)
    folder = folder_for(kept.output, "engine")
    with progress(f"engine {folder}") as callback:
        found = run(
            model, query, folder,
            inputs=pairs(fed.input_, "--input") or None, resume=resume, progress=callback, **kept.choices(),
        )  # fmt: skip
    tell_results(found, folder, as_json=place.as_json)


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
    from raggedatlas.verbs.lookup import lookup as find

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
    from raggedatlas.verbs.vector_index import save_to_database as save

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
    from raggedatlas.verbs.lookup import neighbors as find

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
