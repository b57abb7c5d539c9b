"""The verb ``test``: a model over cells whose answer is known, and how well it does."""

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, QueryError, SourceError
from raggedatlas.model.arguments import checked
from raggedatlas.query.plan import provenance
from raggedatlas.query.query import Query
from raggedatlas.results.dataset import ResultDataset
from raggedatlas.results.writer import ResultDatasetWriter
from raggedatlas.verbs.running import (
    ModelChoices,
    Progress,
    Run,
    cells_named,
    divide_choices,
    prepare,
    run_facts,
    silent,
)
from raggedatlas.verbs.scores import ClassSums, NumberSums, Scores, scores_of

SCORES = "result:scores"
"""Where the table's facts keep the scores."""

Loss = Callable[[NDArray[Any], NDArray[Any]], float]
"""Mean loss of a batch: outputs and targets of the cells that have one."""


class ScoringChoices(ModelChoices, total=False):
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
        """How well the model did.

        Raises
        ------
        NotFoundError
            If the results are not those of a test.
        """
        facts = self.facts
        if SCORES not in facts:
            raise NotFoundError(f"{self!r} has no scores; they are written by test.")
        return scores_of(facts[SCORES], repr(self))


@checked
def test(
    model: Any,  # noqa: ANN401  (as infer takes it)
    query: Query,
    result_dir: str | os.PathLike[str],
    target: str,
    *,
    batch_size: int = 512,  # noqa: PT028
    progress: Progress = silent,  # noqa: PT028
    **choices: Unpack[ScoringChoices],
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
        See `ScoringChoices`.

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
    source, reading, overwrite = divide_choices(model, own["weights"], chosen)
    reading["obs"] = list(dict.fromkeys([*reading.get("obs", ()), target]))
    if own["categories"] is not None:
        reading["categories"] = {target: list(own["categories"])}
    opened = source.open()
    run = prepare(opened, query, batch_size, reading)
    with ResultDatasetWriter(result_dir, overwrite=overwrite, facts=run_facts("test", run, query)) as writer:
        writer.original_dataset_config = {"atlas": provenance(query.spec, query.catalog)}
        scores = _measure(run, writer, target, own["output"], own["loss"], progress)
        writer.facts[SCORES] = scores.to_json()
    return ScoredResults({}, result_dir)


test.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test else


def _measure(
    run: Run,
    writer: ResultDatasetWriter,
    target: str,
    output: str | None,
    loss: Loss | None,
    progress: Progress,
) -> Scores:
    """Compute, write and count batch by batch."""
    categories = run.loader.categories.get(target)
    classes = () if categories is None else tuple(map(str, categories))
    sums: ClassSums | NumberSums = NumberSums() if categories is None else ClassSums(classes)
    first, total, lost = 0, run.loader.n_cells, 0.0
    for number, (batch, outputs) in enumerate(run.results()):
        with cells_named(number, first, len(batch)):
            predicted, wanted = _prediction(outputs, output), np.asarray(batch.obs[target])
            known = sums.add(predicted, wanted)
            writer.write_batch(batch.uids, outputs)
        if loss is not None and known.any():
            lost += float(loss(predicted[known], wanted[known])) * int(known.sum())
        first += len(batch)
        progress("cells", first, total)
    if not sums.n_cells:
        raise QueryError(f"None of the {total:,} cells has a value of {target!r}; there is nothing to test against.")
    own = sums.loss if loss is None else lost / sums.n_cells
    confusion = tuple(map(tuple, sums.confusion.tolist())) if isinstance(sums, ClassSums) else ()
    task = "regression" if categories is None else "classification"
    return Scores(task, target, sums.n_cells, sums.n_unlabelled, own, sums.metrics(), classes, confusion)


def _prediction(outputs: dict[str, NDArray[Any]], name: str | None) -> NDArray[Any]:
    if name is None and len(outputs) == 1:
        return next(iter(outputs.values()))
    if name not in outputs:
        raise SourceError(f"The model gives the outputs {list(outputs)}; say which is the prediction, output='...'.")
    return outputs[name]
