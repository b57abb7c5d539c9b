"""Verbs that apply a model: ``infer``, ``test`` and ``engine``."""

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raggedatlas.cli.app import MODELS, app
from raggedatlas.cli.options import At, Place, Selection, pairs, unfold
from raggedatlas.cli.parameters import one
from raggedatlas.cli.printing import progress, show, show_facts, show_json, show_table
from raggedatlas.cli.query import Overwrite

if TYPE_CHECKING:
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
