"""Verbs for models: apply and test them, reduce results, find results and neighbours."""

import base64
import json
import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.app import MODELS, app
from raggedatlas.cli.options import (
    AsJson,
    AtlasOptions,
    AtSnapshot,
    Overwrite,
    Selection,
    Strict,
    expand_option_groups,
    parse_pairs,
    value_option,
)
from raggedatlas.cli.printing import print_facts, print_json, print_result, print_table, print_text, progress

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
Strings = list[str]


@dataclass(frozen=True)
class ModelOptions:
    """Options of the model."""

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
        Strings,
        typer.Option(metavar="KEY=VALUE", help="Argument of the model's class; repeatable.", show_default=False),
    ] = field(default_factory=list)
    output_name: Annotated[
        Strings,
        typer.Option(
            "--output-name",
            metavar="NAME",
            help="Name of an output, if the model has several; repeatable.",
            show_default=False,
        ),
    ] = field(default_factory=list)
    values: Annotated[
        Literal["csr", "dense", "torch", "torch-dense"] | None,
        typer.Option("--as", help="Array type that the model receives.", show_default="dense; torch-dense for PyTorch"),
    ] = None
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Device of PyTorch, e.g. cuda.", show_default=False)
    ] = None

    def choices(self) -> dict[str, Any]:
        """Return the keyword arguments of `infer`."""
        given = {
            "weights": self.weights,
            "options": {key: parse_value(text) for key, text in parse_pairs(self.option, "--option").items()},
            "outputs": self.output_name,
            "as_": self.values,
            "device": self.device,
        }
        # Empty lists are left out too, so that the defaults of `infer` hold.
        return {name: value for name, value in given.items() if value}


@dataclass(frozen=True)
class RunOptions:
    """Options of a run: snapshot, batch size, output."""

    batch_size: Annotated[int, typer.Option(min=1, help="Number of cells per batch.")] = 512
    output: Output = None
    overwrite: Overwrite = False
    at: AtSnapshot = None

    def choices(self) -> dict[str, Any]:
        """Return the keyword arguments of the verbs."""
        return {"batch_size": self.batch_size, "overwrite": self.overwrite}


Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run in the folder of --output.")]


def parse_value(text: str) -> Any:  # noqa: ANN401  (any JSON value)
    """Parse a value as JSON; return other text unchanged.

    Examples
    --------
    >>> parse_value("30"), parse_value("[1, 2]"), parse_value("relu")
    (30, [1, 2], 'relu')
    """
    try:
        return json.loads(text)
    except ValueError:
        return text


def result_folder(output: str | None, verb: str) -> str:
    """Return the output folder, or a new one: ``results/<YYYYMMDD-HHMMSS>-<verb>-<4 letters>`` (UTC).

    Examples
    --------
    >>> result_folder(None, "infer").split("-")[2]
    'infer'
    """
    while output is None:
        # Three bytes are four characters, which `find_newest_run` expects at the end of the name.
        letters = base64.urlsafe_b64encode(os.urandom(3)).decode()
        path = Path("results") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{verb}-{letters}"
        output = None if path.exists() else str(path)
    return output


def _require_output(run_options: RunOptions, *, resume: bool) -> None:
    # Without a name `result_folder` makes a new folder, in which there is nothing to resume.
    if resume and run_options.output is None:
        raise typer.BadParameter("needs --output, the folder of the interrupted run", param_hint="--resume")


def print_results(found: "ResultDataset", folder: str, *, as_json: bool, **more: Any) -> None:  # noqa: ANN401
    """Print the outputs and the folder of a run."""
    columns = [{"name": each.name, "shape": list(each.shape), "dtype": each.dtype.name} for each in found.columns]
    if as_json:
        print_json({"results_dir": folder, "n_rows": len(found), "columns": columns, **more})
    else:
        outputs = ", ".join(f"{each['name']} {tuple(each['shape'])} {each['dtype']}" for each in columns)
        print_text(f"Wrote {len(found):,} results ({outputs}) to {folder}")


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Import path of the model: package.module:name, or file.py:name.", show_default=False
    ),
]


@app.command(rich_help_panel=MODELS, epilog="Example: raggedatlas infer pbmc.atlas models.py:Encoder --weights e.pt")
@expand_option_groups
def infer(
    atlas_options: AtlasOptions,
    model: ModelArgument,
    *,
    model_options: ModelOptions,
    run_options: RunOptions,
    selection: Selection,
    parts: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
    resume: Resume = False,
    update: Annotated[
        str | None,
        value_option("RESULTS", "Copy results of known cells from an earlier run of the model; compute the others"),
    ] = None,
) -> None:
    """Apply a model to each cell of a snapshot (the newest, or --at), and write its outputs."""
    from raggedatlas.verbs.inference import infer as apply

    query = selection.ask(atlas_options.open_snapshot(run_options.at))
    _require_output(run_options, resume=resume)
    folder = result_folder(run_options.output, "infer")
    with progress(f"infer {folder}") as callback:
        found = apply(
            model, query, folder,
            progress=callback, n_parts=parts, resume=resume, update=update, **model_options.choices(), **run_options.choices(),
        )  # fmt: skip
    print_results(found, folder, as_json=atlas_options.as_json)


@dataclass(frozen=True)
class ScoringOptions:
    """Options of the evaluation."""

    category: Annotated[
        Strings, typer.Option(help="Class, in the order of the model's outputs; repeatable.", show_default=False)
    ] = field(default_factory=list)
    prediction: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Output to evaluate, if the model has several.", show_default=False),
    ] = None


@app.command(
    "test", rich_help_panel=MODELS, epilog="Example: raggedatlas test pbmc.atlas models.py:Classifier cell_type"
)
@expand_option_groups
def measure(
    atlas_options: AtlasOptions,
    model: ModelArgument,
    target: Annotated[str, typer.Argument(help="Cell column with the target values.", show_default=False)],
    *,
    model_options: ModelOptions,
    run_options: RunOptions,
    selection: Selection,
    scoring: ScoringOptions,
) -> None:
    """Apply a model to labelled cells, and measure its accuracy."""
    from raggedatlas.verbs.evaluation import test as apply

    query = selection.ask(atlas_options.open_snapshot(run_options.at))
    folder = result_folder(run_options.output, "test")
    with progress(f"test {folder}") as callback:
        found = apply(
            model, query, folder, target,
            progress=callback, categories=scoring.category or None, output=scoring.prediction, **model_options.choices(), **run_options.choices(),
        )  # fmt: skip
    scores = found.scores
    print_results(found, folder, as_json=atlas_options.as_json, scores=asdict(scores))
    if atlas_options.as_json:
        return
    counted = {"cells": scores.n_cells, "without an answer": scores.n_unlabelled}
    print_facts({**counted, **({} if scores.loss is None else {"loss": scores.loss}), **scores.metrics})
    named = [
        {"target \\ predicted": name, **dict(zip(scores.categories, row, strict=True))}
        for name, row in zip(scores.categories, scores.confusion, strict=True)
    ]
    print_table(named, ["target \\ predicted", *scores.categories], empty="")


@dataclass(frozen=True)
class EngineInputs:
    """Inputs of the model."""

    input_: Annotated[
        Strings,
        typer.Option(
            "--input",
            metavar="NAME=WHAT",
            help="Source of an input of the model: X, or a cell column; repeatable.",
            show_default=False,
        ),
    ] = field(default_factory=list)


@app.command(rich_help_panel=MODELS, epilog="Example: raggedatlas engine pbmc.atlas encoder.onnx -f CD3D -f MS4A1")
@expand_option_groups
def engine(
    atlas_options: AtlasOptions,
    model: Annotated[str, typer.Argument(metavar="FILE", help="An .onnx file.", show_default=False)],
    *,
    selection: Selection,
    engine_inputs: EngineInputs,
    run_options: RunOptions,
    resume: Resume = False,
) -> None:
    """Apply a model in an ONNX file to the cells of a snapshot."""
    from raggedatlas.verbs.inference import engine as apply

    query = selection.ask(atlas_options.open_snapshot(run_options.at))
    _require_output(run_options, resume=resume)
    folder = result_folder(run_options.output, "engine")
    with progress(f"engine {folder}") as callback:
        found = apply(
            model, query, folder,
            inputs=parse_pairs(engine_inputs.input_, "--input") or None, resume=resume, progress=callback, **run_options.choices(),
        )  # fmt: skip
    print_results(found, folder, as_json=atlas_options.as_json)


Source = Annotated[str, typer.Argument(help="Folder of results, or an atlas.", show_default=False)]


@dataclass(frozen=True)
class ReductionOptions:
    """Options shared by ``pca`` and ``umap``."""

    # Not `seed`: `Selection` has this field, and fields of one name become one option.
    seed_of_fit: Annotated[int, typer.Option("--fit-seed", min=0, help="Seed of the fit.")] = 0
    target_sum: Annotated[
        float | None,
        typer.Option(help="Normalize the counts of each cell to this sum, and apply log1p.", show_default=False),
    ] = None
    column: Annotated[
        str | None, typer.Option(help="Output to reduce, if the results have several.", show_default=False)
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Apply the model of an earlier run (its .npz) instead of fitting one.",
            show_default=False,
        ),
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Number of rows per batch.")] = 8192
    output: Output = None
    overwrite: Overwrite = False
    at: AtSnapshot = None
    as_json: AsJson = False

    def choices(self) -> dict[str, Any]:
        """Return the keyword arguments of `pca` and `umap`."""
        given = {
            "seed": self.seed_of_fit,
            "target_sum": self.target_sum,
            "column": self.column,
            "model": self.model,
            "batch_size": self.batch_size,
            "overwrite": self.overwrite,
        }
        # Compared with None, because 0 is a valid seed.
        return {name: value for name, value in given.items() if value is not None}

    def open(self, source: str, selection: Selection) -> "str | Query":
        """Return the path of results, or the query of an atlas."""
        from raggedatlas.results.folder import INDEX_FILE, has_table

        # Everything else is taken for an atlas, whose `open` names what is missing.
        if has_table(Path(source)) or (Path(source) / INDEX_FILE).is_file():
            if selection != Selection():
                raise typer.BadParameter(
                    f"{source} holds results, which are always reduced completely", param_hint="--where"
                )
            return source
        return selection.ask(AtlasOptions(source).open_snapshot(self.at))


@app.command(rich_help_panel=MODELS, epilog="Example: raggedatlas pca pbmc.atlas --target-sum 10000 -o results/pca")
@expand_option_groups
def pca(
    source: Source,
    *,
    reduction: ReductionOptions,
    selection: Selection,
    n_components: Annotated[int, typer.Option(min=1, help="Number of components.")] = 50,
    sample_size: Annotated[int, typer.Option(min=2, help="Number of rows in the fit.")] = 50_000,
) -> None:
    """Compute principal components of results, or of cells of an atlas."""
    from raggedatlas.verbs.reduction import pca as apply

    opened = reduction.open(source, selection)
    folder = result_folder(reduction.output, "pca")
    with progress(f"pca {folder}") as callback:
        found = apply(
            opened, folder, n_components=n_components, sample_size=sample_size, progress=callback, **reduction.choices()
        )
    print_results(found, folder, as_json=reduction.as_json)


@dataclass(frozen=True)
class UmapLayoutOptions:
    """Options of the layout."""

    n_neighbors: Annotated[int, typer.Option(min=2, help="Number of neighbours.")] = 15
    min_dist: Annotated[float, typer.Option(min=0, max=1, help="Minimum distance of points.")] = 0.1
    metric: Annotated[
        Literal["euclidean", "cosine", "manhattan", "correlation", "chebyshev"],
        typer.Option(help="Distance between rows."),
    ] = "euclidean"


@app.command(rich_help_panel=MODELS, epilog="Example: raggedatlas umap results/pca -o results/umap")
@expand_option_groups
def umap(
    source: Source,
    *,
    reduction: ReductionOptions,
    selection: Selection,
    n_components: Annotated[int, typer.Option(min=1, help="Number of dimensions.")] = 2,
    sample_size: Annotated[int, typer.Option(min=2, help="Number of rows in the fit.")] = 10_000,
    layout: UmapLayoutOptions,
) -> None:
    """Compute a UMAP of results, or of cells of an atlas."""
    from raggedatlas.verbs.reduction import umap as apply

    opened = reduction.open(source, selection)
    folder = result_folder(reduction.output, "umap")
    with progress(f"umap {folder}") as callback:
        found = apply(
            opened, folder,
            n_components=n_components, sample_size=sample_size, progress=callback, **asdict(layout), **reduction.choices(),
        )  # fmt: skip
    print_results(found, folder, as_json=reduction.as_json)


Results = Annotated[str, typer.Argument(metavar="RESULTS", help="Folder of results.", show_default=False)]
Column = Annotated[str, typer.Option(help="Output, if there are several.")]
Metric = Annotated[
    Literal["l2", "cosine", "dot"],
    typer.Option(help="Squared Euclidean distance, or one minus the cosine or the dot product."),
]
Uids = list[str]


@app.command(rich_help_panel=MODELS, epilog="Example: raggedatlas lookup results/z 1f0c5a2b9d3e4f60")
@expand_option_groups
def lookup(
    results: Results,
    uids: Annotated[Uids, typer.Argument(metavar="UID...", help="Cells.", show_default=False)],
    *,
    column: Column = "data",
    as_json: AsJson = False,
) -> None:
    """Print the results of cells; exit code 1 if a cell has none."""
    from raggedatlas.verbs.lookup import lookup as find

    with progress(f"look up in {results}"):
        found = find(results, uids, column=column)
    results_by_uid = {uid: None if values is None else values.tolist() for uid, values in found.items()}
    if as_json:
        print_json(results_by_uid)
    else:
        for uid, values in results_by_uid.items():
            print_text(f"{uid}  {'no result' if values is None else values}")
    if any(values is None for values in results_by_uid.values()):
        raise typer.Exit(1)


@app.command(
    "save_to_database", rich_help_panel=MODELS, epilog="Example: raggedatlas save_to_database results/z --metric cosine"
)
@expand_option_groups
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
    print_result(asdict(report), str(report), as_json=as_json)


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
    at: AtSnapshot = None

    def query(self) -> "Query | None":
        """Return a query of the atlas, if one is named."""
        if self.atlas is None:
            if self.where or self.obs:
                raise typer.BadParameter("cell columns need --atlas", param_hint="--where, --obs")
            return None
        query = AtlasOptions(self.atlas).open_snapshot(self.at).query()
        for condition in self.where:
            query = query.where(condition)
        return query.obs(self.obs) if self.obs else query


def read_vectors(path: Path) -> "NDArray[Any]":
    """Read vectors from a ``.npy`` file, or refuse it."""
    import numpy as np

    from raggedatlas.errors import SourceError

    try:
        found: NDArray[Any] = np.load(path, allow_pickle=False)
    # EOFError is what NumPy raises for an empty file.
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
@expand_option_groups
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

    # True for both and for neither; exactly one must be given.
    if bool(uids) == (vectors is not None):
        raise typer.BadParameter("name cells, or a file with --vectors", param_hint="UID")
    asked = uids or [] if vectors is None else read_vectors(vectors)
    query = among.query()
    with progress(f"search {results}"):
        # Fields of `Measured` have the names of the arguments of `neighbors`.
        found = find(results, asked, among=query, **asdict(measured))
    rows = found.to_pylist()
    print_table(rows, found.column_names, empty="No neighbours.", as_json=as_json)
