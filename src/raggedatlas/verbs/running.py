"""A model on its way over the cells of a query: choices, batches, checks of what it gives, and where results come from."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

from numpy.typing import NDArray

from raggedatlas.errors import QueryError, SourceError
from raggedatlas.loader.batch import TrainingBatch
from raggedatlas.loader.loader import Loader
from raggedatlas.loader.options import Form
from raggedatlas.query.plan import provenance
from raggedatlas.query.query import Query
from raggedatlas.results.batches import BatchWriter
from raggedatlas.results.tensors import as_outputs
from raggedatlas.verbs.models import Inputs, Model, ModelSource

Progress = Callable[[str, int, int], None]
"""Called with a step, how much of it is done, and how much there is."""


def silent(step: str, done: int, total: int) -> None:
    """Tell nobody."""


class ReadingChoices(TypedDict, total=False):
    """Keyword arguments of verbs that read a query, all optional.

    Attributes
    ----------
    layers, features : sequence of str
        As `Query.layers` and `Query.features`, which they replace.
    dtype : str or numpy dtype
        Of the values; float32 by default.
    obs : sequence of str
        Metadata columns that the model needs, in ``batch.obs``.
    threads : int or None
        Threads that read ahead; see `LoaderChoices`.
    overwrite : bool
        Whether results that are in the folder may be replaced; readers see the old ones or the new ones.
    """

    layers: Sequence[str]
    features: Sequence[str]
    dtype: Any
    obs: Sequence[str]
    threads: int | None
    overwrite: bool


class ModelChoices(ReadingChoices, total=False):
    """Keyword arguments of `infer` and `test`, all optional.

    Attributes
    ----------
    options : mapping of str to object
        Arguments with which a model's class is called.
    inputs : callable
        What of a batch the model is given; ``batch.X`` by default.
    outputs : sequence of str
        Names of what a model gives as a tuple; or which of its named outputs are kept.
    as_ : {"csr", "dense", "torch", "torch-dense"}
        What values come as; dense arrays by default, and dense tensors for PyTorch.
    device : str
        Where a PyTorch module computes, e.g. ``"cuda"``.
    """

    options: Mapping[str, Any]
    inputs: Inputs
    outputs: Sequence[str]
    as_: Form
    device: str


@dataclass(frozen=True)
class Run:
    """A model and the cells that it is for.

    Parameters
    ----------
    loader : Loader
        Gives each cell once, in the query's order.
    model : Model
        Ready to compute.
    batch_size : int
        Cells of a batch.
    first : int
        Number of the first of the cells, where others compute those before.
    """

    loader: Loader
    model: Model
    batch_size: int
    first: int = 0

    def results(self) -> Iterator[tuple[TrainingBatch, Any]]:
        """Compute batch by batch.

        Yields
        ------
        tuple of TrainingBatch and mapping of str to (n, ...) array

        Raises
        ------
        SourceError
            If the model gives something that cannot be stored, naming the batch and the row.
        """
        first = self.first
        for number, batch in enumerate(self.loader):
            with cells_named(number, first, len(batch)):
                given = self.model.call(batch)
                outputs = check_outputs(given, number, len(batch))
            yield batch, outputs
            first += len(batch)

    def write(self, writer: BatchWriter, progress: Progress = silent) -> None:
        """Compute everything, and write it batch by batch."""
        total, first = self.loader.n_cells, 0
        progress("cells", 0, total)
        for number, (batch, outputs) in enumerate(self.results()):
            with cells_named(number, self.first + first, len(batch)):
                writer.write_batch(batch.uids, outputs)
            first += len(batch)
            progress("cells", first, total)


@contextmanager
def cells_named(number: int, first: int, n: int) -> Iterator[None]:
    """Say of an error which cells it is about."""
    try:
        yield
    except SourceError as error:
        raise SourceError(
            f"{error} Batch {number} holds the cells {first:,} to {first + n - 1:,} of the query."
        ) from error
    except Exception as error:
        error.add_note(f"The model was given batch {number}: the cells {first:,} to {first + n - 1:,} of the query.")
        raise


def check_outputs(given: Any, number: int, n: int) -> dict[str, NDArray[Any]]:  # noqa: ANN401  (what any model gives)
    """Give what a model computed as arrays, one row for each cell.

    Parameters
    ----------
    given : array, tensor, sequence, or mapping of str to these
        From the model.
    number : int
        Of the batch, for messages.
    n : int
        Cells of the batch.

    Raises
    ------
    SourceError
        For another number of rows, objects, or rows that differ in shape.

    Examples
    --------
    >>> import numpy as np
    >>> check_outputs(np.zeros((2, 3)), 0, 3)
    Traceback (most recent call last):
    raggedatlas.errors.SourceError: Batch 0: the model gave 2 rows for 3 cells in the output 'data'; ...
    """
    outputs = as_outputs(given, number)
    for name, values in outputs.items():
        if len(values) != n:
            wrong = f"row {len(values):,} is missing" if len(values) < n else f"row {n:,} is one too many"
            raise SourceError(
                f"Batch {number}: the model gave {len(values):,} rows for {n:,} cells in the output {name!r}; {wrong}."
            )
    return outputs


def divide_choices(
    model: Any,  # noqa: ANN401
    weights: str | os.PathLike[str] | None,
    choices: Mapping[str, Any],
) -> tuple[ModelSource, dict[str, Any], bool]:
    """Tell what is about the model from what is about reading, and whether old results may be replaced."""
    known = {*ModelChoices.__annotations__}
    unknown = sorted(set(choices) - known)
    if unknown:
        raise QueryError(f"There is no choice {unknown[0]!r}; there are {', '.join(sorted(known))}.")
    rest = dict(choices)
    overwrite = bool(rest.pop("overwrite", False))
    own: dict[str, Any] = {name: rest.pop(name) for name in ("options", "inputs", "as_") if name in rest}
    own["outputs"] = tuple(rest.pop("outputs", ()))
    return ModelSource(model, weights, device=rest.get("device"), **own), rest, overwrite


def prepare(model: Model, query: Query, batch_size: int, reading: Mapping[str, Any]) -> Run:
    """Make a loader that fits a model, and every refusal that needs no values."""
    chosen = {name: value for name, value in reading.items() if value is not None}
    if model.form not in {"torch", "torch-dense"}:
        chosen.pop("device", None)
    if model.dtype is not None:
        chosen.setdefault("dtype", model.dtype)
    chosen["obs"] = list(dict.fromkeys([*chosen.get("obs", ()), *model.obs]))
    size = model.batch_size or batch_size
    loader = Loader(query, size, shuffle=None, as_=model.form, **chosen)
    model.check(loader.features)
    return Run(loader, model, size)


def run_facts(verb: str, model: Model, query: Query) -> dict[str, str]:
    """Say where results come from, for the metadata of their table."""
    told = provenance(query.spec, query.catalog)
    return {
        "result:verb": verb,
        "result:model": model.name,
        "result:model_hash": model.digest,
        "atlas:uri": str(told["uri"]),
        "atlas:version": str(told["snapshot"]),
        "atlas:query": str(told["query"]),
    }
