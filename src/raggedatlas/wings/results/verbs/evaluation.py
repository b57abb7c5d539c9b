"""Metrics of predictions, accumulated batch by batch in sums."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, NotFoundError, QueryError, SourceError
from raggedatlas.model.arguments import Progress, checked, no_progress
from raggedatlas.query.plan import provenance
from raggedatlas.query.query import Query
from raggedatlas.wings.results.dataset import ResultDataset
from raggedatlas.wings.results.verbs.inference import (
    ModelOptions,
    annotate_errors,
    prepare_run,
    run_facts,
    split_options,
)
from raggedatlas.wings.results.writer import ResultDatasetWriter


@dataclass(frozen=True)
class Scores:
    """Scores that `test` measured."""

    task: str  # ``"classification"`` or ``"regression"``
    target: str  # metadata column
    n_cells: int  # cells with a target
    n_unlabelled: int  # cells without a target, which nothing here counts
    loss: float | None  # mean over the cells with a target; None where the model gives classes and no loss was named
    # ``accuracy`` and ``macro_f1``, mean over the classes that occur as targets or predictions; or ``mse`` and ``r2``
    metrics: dict[str, float]
    categories: tuple[str, ...] = ()  # in the order of the model's columns; empty for numbers
    confusion: tuple[tuple[int, ...], ...] = ()  # cells by class, (target, predicted); empty for numbers

    def to_json(self) -> str:
        """Return JSON text; NaN becomes null."""
        scores = asdict(self)
        for place in (scores, scores["metrics"]):
            place.update(
                {name: None for name, value in place.items() if isinstance(value, float) and math.isnan(value)}
            )
        return json.dumps(scores)


def parse_scores(text: str, place: str) -> Scores:
    """Read what `Scores.to_json` wrote; `place` is for the message of a `CorruptError`."""
    try:
        stored = json.loads(text)
        metrics = {
            str(name): float("nan") if value is None else float(value) for name, value in stored["metrics"].items()
        }
        confusion = tuple(tuple(map(int, row)) for row in stored["confusion"])
        return Scores(
            **{**stored, "metrics": metrics, "categories": tuple(stored["categories"]), "confusion": confusion}
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptError(f"The scores of {place} do not read: {error}.") from error


@dataclass
class ClassificationMetrics:
    """Metrics of predicted classes, accumulated so far.

    Examples
    --------
    >>> sums = ClassificationMetrics(["B", "T"])
    >>> known = sums.add(np.array([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]]), np.array([0, 1, -1]))
    >>> sums.metrics()["accuracy"], sums.n_cells, sums.n_unlabelled
    (1.0, 2, 1)
    """

    categories: Sequence[str]  # in the order of their codes
    n_cells: int = 0
    n_unlabelled: int = 0
    entropy: float = 0.0  # sum of the cross-entropies
    graded: bool = True  # whether all predictions were logits
    confusion: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        """Create the empty confusion matrix."""
        self.confusion = np.zeros((len(self.categories),) * 2, np.int64)

    def add(self, predicted: NDArray[Any], codes: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Count a batch, and return which cells have a target, (n,).

        `predicted` are logits, (n, n_classes), or codes, (n,); `codes` are the targets, (n,), -1 where there is none.
        """
        n = len(self.categories)
        # -1 marks a cell without a value, and one whose value is not among the named categories.
        known: NDArray[np.bool_] = codes >= 0
        given, wanted = predicted[known], codes[known].astype(np.int64)
        if predicted.ndim == 2:
            if predicted.shape[1] != n:
                listed = ", ".join(map(str, self.categories[:8])) + (", ..." if n > 8 else "")
                raise SourceError(
                    f"The model gives {predicted.shape[1]} numbers for each cell, and the target has {n} classes "
                    f"({listed}); name the model's classes in their order, categories=[...]."
                )
            from scipy.special import log_softmax

            classes = np.zeros(0, np.int64)
            if len(given):
                classes = given.argmax(axis=1)
                shares = log_softmax(given.astype(np.float64), axis=1)
                self.entropy -= float(shares[np.arange(len(wanted)), wanted].sum())
        else:
            if predicted.ndim != 1 or given.dtype.kind not in "iub":
                raise SourceError(
                    f"The model gives rows of shape {given.shape[1:]} and dtype {given.dtype}; classes are given by logits "
                    "(n_cells, n_classes), or by integers (n_cells,)."
                )
            self.graded, classes = False, given.astype(np.int64)
            outside = (classes < 0) | (classes >= n)
            if outside.any():
                raise SourceError(f"The model gives the class {classes[outside][0]}; the target's are 0 to {n - 1}.")
        # Adding by plain indexing would count a pair that repeats within the batch only once.
        np.add.at(self.confusion, (wanted, classes), 1)
        self.n_cells += len(wanted)
        self.n_unlabelled += len(codes) - len(wanted)
        return known

    @property
    def loss(self) -> float | None:
        """Mean cross-entropy of the logits, in nats; None for a model that gives classes."""
        return self.entropy / self.n_cells if self.graded and self.n_cells else None

    def metrics(self) -> dict[str, float]:
        """Return accuracy and macro F1."""
        hit = np.diag(self.confusion).astype(np.float64)
        either = self.confusion.sum(axis=0) + self.confusion.sum(axis=1)
        occurs = either > 0
        # `either` is 2 TP + FP + FN of each class, so this is 2 TP / (2 TP + FP + FN).
        f1 = 2 * hit[occurs] / either[occurs]
        n = max(self.n_cells, 1)
        return {"accuracy": float(hit.sum() / n), "macro_f1": float(f1.mean()) if len(f1) else 0.0}


@dataclass
class RegressionMetrics:
    """Metrics of predicted numbers, accumulated so far.

    Examples
    --------
    >>> sums = RegressionMetrics()
    >>> known = sums.add(np.array([1.0, 2.0, 5.0]), np.array([1.0, 3.0, np.nan]))
    >>> sums.metrics(), sums.n_unlabelled
    ({'mse': 0.5, 'r2': 0.5}, 1)
    """

    n_cells: int = 0
    n_unlabelled: int = 0
    squares: float = 0.0  # sum of the squared errors
    mean: float = 0.0
    spread: float = 0.0  # sum of the squared deviations of the targets from their mean

    def add(self, predicted: NDArray[Any], wanted: NDArray[Any]) -> NDArray[np.bool_]:
        """Count a batch, and return which cells have a target, (n,).

        `predicted` is (n,) or (n, 1); `wanted`, (n,), are the targets, NaN where there is none.
        """
        if predicted.ndim > 1 and predicted[:1].size > 1:
            raise SourceError(
                f"The model gives rows of shape {predicted.shape[1:]}, and the target is one number for each cell."
            )
        true = wanted.astype(np.float64)
        known: NDArray[np.bool_] = ~np.isnan(true)
        given, true = predicted.reshape(-1)[known].astype(np.float64), true[known]
        if len(true):
            # the parallel update of a variance (Chan et al.): differences of large sums of squares would cancel
            n, step = self.n_cells + len(true), float(true.mean()) - self.mean
            self.spread += float(((true - true.mean()) ** 2).sum()) + step**2 * self.n_cells * len(true) / n
            self.mean += step * len(true) / n
            self.n_cells = n
        self.squares += float(((given - true) ** 2).sum())
        self.n_unlabelled += int((~known).sum())
        return known

    @property
    def loss(self) -> float | None:
        """Mean squared error."""
        return self.squares / self.n_cells if self.n_cells else None

    def metrics(self) -> dict[str, float]:
        """Return the mean squared error and R2, which is NaN where all targets are the same."""
        n = max(self.n_cells, 1)
        return {"mse": self.squares / n, "r2": 1 - self.squares / self.spread if self.spread > 0 else float("nan")}


SCORES = "result:scores"
"""Key of the scores in the table's facts."""

Loss = Callable[[NDArray[Any], NDArray[Any]], float]
"""Mean loss of a batch: outputs and targets of the cells that have one."""


class ScoringOptions(ModelOptions, total=False):
    """Keyword arguments of `test`, all optional.

    Attributes
    ----------
    categories : sequence
        Classes in the order of the model's columns; by default those that the atlas knows, in their order. With them, a column of
        whole numbers is one of classes.
    output : str
        Which of several outputs is the prediction.
    loss : callable
        Mean loss of a batch, from outputs and targets; cross-entropy of logits or mean squared error by default.
    weights : str or path
        State of a PyTorch module, as `infer` takes it.
    """

    categories: Sequence[Any] | None
    output: str | None
    loss: Loss | None
    weights: str | os.PathLike[str] | None


class ScoredResults(ResultDataset):
    """Results of `test`: a `ResultDataset` that also has the scores."""

    @cached_property
    def scores(self) -> Scores:
        """Scores of the model."""
        facts = self.facts
        if SCORES not in facts:
            raise NotFoundError(f"{self!r} has no scores; they are written by test.")
        return parse_scores(facts[SCORES], repr(self))


@checked
def test(
    model: Any,  # noqa: ANN401  (as infer takes it)
    query: Query,
    result_dir: str | os.PathLike[str],
    target: str,
    *,
    batch_size: int = 512,  # noqa: PT028
    progress: Progress = no_progress,  # noqa: PT028
    **choices: Unpack[ScoringOptions],
) -> ScoredResults:
    """Apply a model to cells whose answer is a metadata column, and measure how well it does.

    Parameters
    ----------
    model, query, result_dir, batch_size, progress
        As `infer` takes them.
    target : str
        Metadata column. Text, truth values and categories are classes: the model gives logits (n, n_classes), or their codes (n,).
        Numbers are predicted as numbers (n,). Cells without a value are computed, and not counted.
    **choices
        See `ScoringOptions`.

    Returns
    -------
    ScoredResults
        The results, as `infer` writes them, and `scores`: loss, and accuracy, macro F1 and confusion; or mean squared error and R2.

    Raises
    ------
    QueryError, NotFoundError, SourceError, DuplicateError
        As `infer`; and if no cell has a target, or the model's classes are not the target's.

    Examples
    --------
    >>> import tempfile
    >>> import anndata as ad
    >>> import numpy as np
    >>> import pandas as pd
    >>> from raggedatlas import RaggedAtlas
    >>> folder = tempfile.mkdtemp()
    >>> atlas = RaggedAtlas.create(f"{folder}/atlas")
    >>> values, genes = np.eye(4, 3, dtype=np.float32), pd.DataFrame(index=["a", "b", "c"])
    >>> cells = pd.DataFrame({"kind": ["T", "B", "B", "B"]}, index=["w", "x", "y", "z"])
    >>> report = atlas.add(ad.AnnData(values, obs=cells, var=genes), name="eye")
    >>> query = atlas.checkout(atlas.snapshot()).query()
    >>> found = test(lambda X: np.arange(len(X)) > 0, query, f"{folder}/test", "kind", categories=["T", "B"])
    >>> found.scores.metrics, found.scores.confusion
    ({'accuracy': 1.0, 'macro_f1': 1.0}, ((1, 0), (0, 3)))
    """
    chosen: dict[str, Any] = dict(choices)
    own = {name: chosen.pop(name, None) for name in ("categories", "output", "loss", "weights")}
    source, reading, overwrite = split_options(model, own["weights"], chosen)
    reading["obs"] = list(dict.fromkeys([*reading.get("obs", ()), target]))
    if own["categories"] is not None:
        reading["categories"] = {target: list(own["categories"])}
    opened = source.open()
    run = prepare_run(opened, query, batch_size, reading)
    with ResultDatasetWriter(result_dir, overwrite=overwrite, facts=run_facts("test", run, query)) as writer:
        writer.original_dataset_config = {"atlas": provenance(query.spec, query.catalog)}
        categories = run.loader.categories.get(target)
        classes = () if categories is None else tuple(map(str, categories))
        sums: ClassificationMetrics | RegressionMetrics = (
            RegressionMetrics() if categories is None else ClassificationMetrics(classes)
        )
        output, loss = own["output"], own["loss"]
        first, total, lost = 0, run.loader.n_cells, 0.0
        for number, (batch, outputs) in enumerate(run.results()):
            with annotate_errors(number, first, len(batch)):
                if output is None and len(outputs) == 1:
                    output = next(iter(outputs))
                if output not in outputs:
                    raise SourceError(
                        f"The model gives the outputs {list(outputs)}; say which is the prediction, output='...'."
                    )
                predicted, wanted = outputs[output], np.asarray(batch.obs[target])
                known = sums.add(predicted, wanted)
                writer.write_batch(batch.stored_uids, outputs)
            # A mean over no cells would be NaN; others are weighted by their cells, as batches differ in size.
            if loss is not None and known.any():
                lost += float(loss(predicted[known], wanted[known])) * int(known.sum())
            first += len(batch)
            progress("cells", first, total)
        # Raised within the writer's `with` block, so the rows written so far never become visible.
        if not sums.n_cells:
            raise QueryError(
                f"None of the {total:,} cells has a value of {target!r}; there is nothing to test against."
            )
        mean = sums.loss if loss is None else lost / sums.n_cells
        confusion = tuple(map(tuple, sums.confusion.tolist())) if isinstance(sums, ClassificationMetrics) else ()
        task = "regression" if categories is None else "classification"
        scores = Scores(task, target, sums.n_cells, sums.n_unlabelled, mean, sums.metrics(), classes, confusion)
        writer.facts[SCORES] = scores.to_json()
    return ScoredResults({}, result_dir)


test.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test else
