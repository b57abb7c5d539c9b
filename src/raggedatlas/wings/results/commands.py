"""Commands for models: apply and test them, reduce results, find results and neighbours."""

import base64
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raggedatlas.cli.app import BUILD, MODELS, command, print_result
from raggedatlas.cli.options import (
    AsJson,
    AtlasOptions,
    AtSnapshot,
    Overwrite,
    Selection,
    Strict,
    Strings,
    argument,
    option,
    parse_pairs,
    repeatable,
    repeatable_option,
    value_option,
)
from raggedatlas.cli.printing import print_facts, print_json, print_table, print_text, progress
from raggedatlas.model.choices import Metric, OutputFormat, UmapMetric

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from raggedatlas.query.query import Query
    from raggedatlas.wings.results.dataset import ResultDataset
    from raggedatlas.wings.results.npy_results import ResultConversion
    from raggedatlas.wings.results.verbs.lookup import IndexReport

Output = Annotated[
    str | None,
    value_option("DIR", "Folder for the results", "--output", "-o", default="results/<time>-<verb>-<letters>"),
]


@dataclass(frozen=True)
class ModelOptions:
    """Options of the model."""

    weights: str | None = option(
        "FILE", "State of a PyTorch module: .pt from torch.save(module.state_dict(), ...), or .safetensors", "--weights"
    )
    options: Strings = repeatable("KEY=VALUE", "Argument of the model's class", "--option")
    output_name: Strings = repeatable("NAME", "Name of an output, if the model has several", "--output-name")
    values: OutputFormat | None = option(
        None, "Array type that the model receives", "--as", show="dense; torch-dense for PyTorch"
    )
    device: str | None = option("DEVICE", "Device of PyTorch, e.g. cuda")

    def choices(self) -> dict[str, Any]:
        """Return the keyword arguments of `infer`."""
        given = {
            "weights": self.weights,
            "options": {key: parse_value(text) for key, text in parse_pairs(self.options, "--option").items()},
            "outputs": self.output_name,
            "as_": self.values,
            "device": self.device,
        }
        # Empty lists are left out too, so that the defaults of `infer` hold.
        return {name: value for name, value in given.items() if value}


@dataclass(frozen=True)
class RunOptions:
    """Options of a run: snapshot, batch size, output."""

    batch_size: int = option(None, "Number of cells per batch", default=512, min=1)
    output: Output = None
    overwrite: Overwrite = False
    at: AtSnapshot = None

    def choices(self) -> dict[str, Any]:
        """Return the keyword arguments of the verbs."""
        return {"batch_size": self.batch_size, "folder": self.output, "overwrite": self.overwrite}


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


def _run(apply: Callable[..., Any], *inputs: Any, folder: str | None, **choices: Any) -> tuple[Any, str]:  # noqa: ANN401
    """Run a verb under a progress bar, and return its results and their folder."""
    # Without a name `result_folder` makes a new folder, in which there is nothing to resume.
    if choices.get("resume") and folder is None:
        raise typer.BadParameter("needs --output, the folder of the interrupted run", param_hint="--resume")
    folder = result_folder(folder, apply.__name__)
    with progress(f"{apply.__name__} {folder}") as callback:
        return apply(*inputs, folder, progress=callback, **choices), folder


def describe_results(found: "ResultDataset", folder: str, **more: Any) -> tuple[Any, str]:  # noqa: ANN401
    """Return the outputs and the folder of a run, as a document and as text."""
    columns = [{"name": each.name, "shape": list(each.shape), "dtype": each.dtype.name} for each in found.columns]
    outputs = ", ".join(f"{each['name']} {tuple(each['shape'])} {each['dtype']}" for each in columns)
    document = {"results_dir": folder, "n_rows": len(found), "columns": columns, **more}
    return document, f"Wrote {len(found):,} results ({outputs}) to {folder}"


ModelArgument = Annotated[
    str,
    argument("Import path of the model: package.module:name, or file.py:name", "MODEL"),
]


@command(MODELS, "infer pbmc.atlas models.py:Encoder --weights e.pt")
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
) -> tuple[Any, str]:
    """Apply a model to each cell of a snapshot (the newest, or --at), and write its outputs."""
    from raggedatlas.wings.results.verbs.inference import infer as apply

    query = selection.ask(atlas_options.open_snapshot(run_options.at))
    own: dict[str, Any] = {"n_parts": parts, "resume": resume, "update": update}
    return describe_results(*_run(apply, model, query, **own, **model_options.choices(), **run_options.choices()))


@command(MODELS, "test pbmc.atlas models.py:Classifier cell_type", name="test")
def measure(
    atlas_options: AtlasOptions,
    model: ModelArgument,
    target: Annotated[str, argument("Cell column with the target values")],
    *,
    model_options: ModelOptions,
    run_options: RunOptions,
    selection: Selection,
    category: Annotated[list[str] | None, repeatable_option(None, "Class, in the order of the model's outputs")] = None,
    prediction: Annotated[str | None, value_option("NAME", "Output to evaluate, if the model has several")] = None,
) -> None:
    """Apply a model to labelled cells, and measure its accuracy."""
    from raggedatlas.wings.results.verbs.evaluation import test as apply

    query = selection.ask(atlas_options.open_snapshot(run_options.at))
    own: dict[str, Any] = {"target": target, "categories": category or None, "output": prediction}
    found, folder = _run(apply, model, query, **own, **model_options.choices(), **run_options.choices())
    scores = found.scores
    document, text = describe_results(found, folder, scores=asdict(scores))
    print_result((document, text), atlas_options.as_json)
    if atlas_options.as_json:
        return
    counted = {"cells": scores.n_cells, "without an answer": scores.n_unlabelled}
    print_facts({**counted, **({} if scores.loss is None else {"loss": scores.loss}), **scores.metrics})
    named = [
        {"target \\ predicted": name, **dict(zip(scores.categories, row, strict=True))}
        for name, row in zip(scores.categories, scores.confusion, strict=True)
    ]
    print_table(named, ["target \\ predicted", *scores.categories], empty="")


@command(MODELS, "engine pbmc.atlas encoder.onnx -f CD3D -f MS4A1")
def engine(
    atlas_options: AtlasOptions,
    model: Annotated[str, argument("An .onnx file", "FILE")],
    *,
    selection: Selection,
    inputs: Annotated[
        list[str] | None,
        repeatable_option("NAME=WHAT", "Source of an input of the model: X, or a cell column", "--input"),
    ] = None,
    run_options: RunOptions,
    resume: Resume = False,
) -> tuple[Any, str]:
    """Apply a model in an ONNX file to the cells of a snapshot."""
    from raggedatlas.wings.results.verbs.inference import engine as apply

    query = selection.ask(atlas_options.open_snapshot(run_options.at))
    own: dict[str, Any] = {"inputs": parse_pairs(inputs or [], "--input") or None, "resume": resume}
    return describe_results(*_run(apply, model, query, **own, **run_options.choices()))


Source = Annotated[str, argument("Folder of results, or an atlas")]


@dataclass(frozen=True)
class ReductionOptions:
    """Options shared by ``pca`` and ``umap``."""

    # Not `seed`: `Selection` has this field, and fields of one name become one option.
    seed_of_fit: int | None = option(None, "Seed of the fit", "--fit-seed", show="0", min=0)
    target_sum: float | None = option(None, "Normalize the counts of each cell to this sum, and apply log1p")
    column: str | None = option(None, "Output to reduce, if the results have several")
    model: str | None = option("FILE", "Apply the model of an earlier run (its .npz) instead of fitting one")
    batch_size: int = option(None, "Number of rows per batch", default=8192, min=1)
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
        return {"folder": self.output, **{name: value for name, value in given.items() if value is not None}}

    def open(self, source: str, selection: Selection) -> "str | Query":
        """Return the path of results, or the query of an atlas."""
        from raggedatlas.wings.results.assets import is_results

        # Everything else is taken for an atlas, whose `open` names what is missing.
        if is_results(source):
            if selection != Selection():
                raise typer.BadParameter(
                    f"{source} holds results, which are always reduced completely", param_hint="--where"
                )
            return source
        return selection.ask(AtlasOptions(source).open_snapshot(self.at))


@command(MODELS, "pca pbmc.atlas --target-sum 10000 -o results/pca")
def pca(
    source: Source,
    *,
    reduction: ReductionOptions,
    selection: Selection,
    n_components: Annotated[int | None, typer.Option(min=1, help="Number of components; 50 by default.")] = None,
    sample_size: Annotated[
        int | None, typer.Option(min=2, help="Number of rows in the fit; 50,000 by default.")
    ] = None,
) -> tuple[Any, str]:
    """Compute principal components of results, or of cells of an atlas."""
    from raggedatlas.wings.results.verbs.reduction import pca as apply

    own: dict[str, Any] = {"n_components": n_components, "sample_size": sample_size}
    return describe_results(*_run(apply, reduction.open(source, selection), **own, **reduction.choices()))


@command(MODELS, "umap results/pca -o results/umap")
def umap(
    source: Source,
    *,
    reduction: ReductionOptions,
    selection: Selection,
    n_components: Annotated[int | None, typer.Option(min=1, help="Number of dimensions; 2 by default.")] = None,
    sample_size: Annotated[
        int | None, typer.Option(min=2, help="Number of rows in the fit; 10,000 by default.")
    ] = None,
    n_neighbors: Annotated[int | None, value_option(None, "Number of neighbours", default="15", min=2)] = None,
    min_dist: Annotated[
        float | None, value_option(None, "Minimum distance of points", default="0.1", min=0, max=1)
    ] = None,
    metric: Annotated[UmapMetric | None, value_option(None, "Distance between rows", default="euclidean")] = None,
) -> tuple[Any, str]:
    """Compute a UMAP of results, or of cells of an atlas."""
    from raggedatlas.wings.results.verbs.reduction import umap as apply

    # Not None: options that were not given are for `umap` to choose.
    layout = {"n_neighbors": n_neighbors, "min_dist": min_dist, "metric": metric}
    own: dict[str, Any] = {"n_components": n_components, "sample_size": sample_size}
    own |= {name: value for name, value in layout.items() if value is not None}
    return describe_results(*_run(apply, reduction.open(source, selection), **own, **reduction.choices()))


Results = Annotated[str, argument("Folder of results", "RESULTS")]
Column = Annotated[str, typer.Option(help="Output, if there are several.")]
Distance = Annotated[
    Metric,
    typer.Option(help="Squared Euclidean distance, or one minus the cosine or the dot product."),
]


@command(MODELS, "lookup results/z 1f0c5a2b9d3e4f60")
def lookup(
    results: Results,
    uids: Annotated[Strings, argument("Cells", "UID...")],
    *,
    column: Column = "data",
    as_json: AsJson = False,
) -> None:
    """Print the results of cells; exit code 1 if a cell has none."""
    from raggedatlas.wings.results.verbs.lookup import lookup as find

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


@command(MODELS, "save-to-database results/z --metric cosine")
def save_to_database(
    results: Results,
    *,
    column: Column = "data",
    metric: Distance = "l2",
    least_rows: Annotated[
        int, typer.Option(min=0, help="Below, every row is compared, and no index is made.")
    ] = 50_000,
    least_recall: Annotated[float, typer.Option(min=0, max=1, help="Recall that a search is to reach.")] = 0.99,
    queries: Annotated[int, typer.Option(min=1, help="Rows with which the recall is measured.")] = 200,
    as_json: AsJson = False,
) -> "IndexReport":
    """Give results an index for nearest neighbours, in place, and print its measured recall."""
    from raggedatlas.wings.results.verbs.lookup import save_to_database as save

    with progress(f"index {results}") as callback:
        return save(
            results, column=column, metric=metric, least_rows=least_rows, least_recall=least_recall, n_queries=queries,
            progress=callback,
        )  # fmt: skip


def read_vectors(path: str) -> "NDArray[Any]":
    """Read vectors from a ``.npy`` file, or refuse it."""
    import numpy as np

    from raggedatlas.errors import SourceError, StoreError
    from raggedatlas.store.copies import local_copy

    try:
        with local_copy(path) as local:
            found: NDArray[Any] = np.load(local, allow_pickle=False)
    except StoreError:
        raise
    # EOFError is what NumPy raises for an empty file.
    except (OSError, ValueError, EOFError) as error:
        raise SourceError(f"{path} is no .npy file that reads: {error}.") from error
    return found


@command(MODELS, "neighbors results/z 1f0c5a2b9d3e4f60 --atlas pbmc.atlas -w \"tissue = 'lung'\"")
def neighbors(
    results: Results,
    uids: Annotated[list[str] | None, argument("Cells", "[UID]...")] = None,
    *,
    vectors: Annotated[str | None, value_option("FILE", "Instead of cells: a .npy file of vectors")] = None,
    atlas: Annotated[str | None, value_option(None, "Atlas whose metadata are meant")] = None,
    where: Annotated[
        list[str] | None, repeatable_option("SQL", "Cells that can be neighbours", "--where", "-w")
    ] = None,
    strict: Strict = False,
    obs: Annotated[list[str] | None, repeatable_option("COLUMN", "Show a cell column")] = None,
    at: AtSnapshot = None,
    k: Annotated[int, value_option(None, "Neighbours of each", "-k", default=True, min=1)] = 10,
    column: Column = "data",
    metric: Distance = "l2",
    exact: Annotated[bool, typer.Option("--exact", help="Compare every row even where there is an index.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the cells whose results are nearest to those of some cells, or to some vectors."""
    from raggedatlas.wings.results.verbs.lookup import neighbors as find

    # True for both and for neither; exactly one must be given.
    if bool(uids) == (vectors is not None):
        raise typer.BadParameter("name cells, or a file with --vectors", param_hint="UID")
    asked = uids or [] if vectors is None else read_vectors(vectors)
    query = None
    if atlas is not None:
        query = AtlasOptions(atlas).open_snapshot(at).query()
        for condition in where or ():
            query = query.where(condition)
        query = query.obs(obs) if obs else query
    elif where or obs:
        raise typer.BadParameter("cell columns need --atlas", param_hint="--where, --obs")
    with progress(f"search {results}"):
        found = find(results, asked, among=query, k=k, column=column, metric=metric, exact=exact)
    rows = found.to_pylist()
    print_table(rows, found.column_names, empty="No neighbours.", as_json=as_json)


@command(BUILD, "convert-results --results-dir results/20250201-120000-infer-AbCd")
def convert_results(
    results_dir: Annotated[Path, value_option(None, "Folder of one run, with batch_index.npy in it")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing table; readers see the old one until then.")
    ] = False,
    promote: Annotated[
        bool, typer.Option("--promote", help="Promote batches of different dtypes to a common dtype.")
    ] = False,
    spot_check: Annotated[int | None, value_option("N", "Compare N random rows instead of all")] = None,
    as_json: AsJson = False,
) -> "ResultConversion":
    """Convert the .npy results of a model run to a Lance table in the same folder; the .npy files are never changed."""
    from raggedatlas.wings.results.npy_results import convert_results as convert

    with progress(f"convert {results_dir}") as callback:
        return convert(results_dir, overwrite=overwrite, promote=promote, spot_check=spot_check, progress=callback)
