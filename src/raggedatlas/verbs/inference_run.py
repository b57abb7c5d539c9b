"""A model on its way over the cells of a query: choices, batches, checks of what it gives, and where results come from."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import QueryError, SourceError
from raggedatlas.loader.batch import TrainingBatch
from raggedatlas.loader.loader import Loader
from raggedatlas.loader.options import OutputFormat
from raggedatlas.model.arguments import Progress, no_progress
from raggedatlas.query.plan import provenance
from raggedatlas.query.query import Query
from raggedatlas.results.batch_writer import BatchWriter
from raggedatlas.results.dataset import ResultDataset
from raggedatlas.results.schema import OBJECT_ID
from raggedatlas.results.tensors import as_outputs
from raggedatlas.verbs.models import Inputs, Model, ModelSource
from raggedatlas.verbs.vector_sources import open_results

INPUTS = "result:inputs"
"""Fact of results: digest of the features, layers and dtype that the model was given."""


class ReadingOptions(TypedDict, total=False):
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


class ModelOptions(ReadingOptions, total=False):
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
    as_: OutputFormat
    device: str


@dataclass(frozen=True)
class InferenceRun:
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
    known : ResultDataset or None
        Results of the same model; cells that are in there are taken over instead of computed.
    """

    loader: Loader
    model: Model
    batch_size: int
    first: int = 0
    known: ResultDataset | None = None

    def part(self, rows: NDArray[np.int64], first: int | None = None) -> "InferenceRun":
        """Return a run of some of the cells, in the given order."""
        loader = self.loader.part(rows, drawn=False)
        return replace(self, loader=loader, first=self.first if first is None else first)

    def results(self, cells: NDArray[np.int64] | None = None) -> Iterator[tuple[TrainingBatch, Any]]:
        """Compute batch by batch.

        Parameters
        ----------
        cells : (n,) int64 or None
            Numbers of the cells in the query, for messages; None counts on from `first`.

        Yields
        ------
        tuple of TrainingBatch and mapping of str to (n, ...) array

        Raises
        ------
        SourceError
            If the model gives something that cannot be stored, naming the batch and the row.
        """
        done = 0
        for number, batch in enumerate(self.loader):
            own = self.first + np.arange(done, done + len(batch)) if cells is None else cells[done : done + len(batch)]
            with annotate_errors(number, int(own[0]), len(batch), int(own[-1])):
                given = self.model.call(batch)
                outputs = check_outputs(given, number, len(batch))
            yield batch, outputs
            done += len(batch)

    def write(self, writer: BatchWriter, progress: Progress = no_progress) -> None:
        """Compute what the writer does not have yet, and write it batch by batch.

        Raises
        ------
        QueryError
            If the writer has the results of other cells.
        SourceError
            If the model gives something that cannot be stored.
        """
        total, first = self.loader.n_cells, len(writer)
        self._refuse_others(writer)
        progress("cells", first, total)
        # `Loader.part` raises for no cells, so a run that is complete ends here.
        if first == total:
            return
        rest = self.part(np.arange(first, total), self.first + first) if first else self
        batches = (
            ((batch.uids, outputs) for batch, outputs in rest.results()) if rest.known is None else rest._updated()
        )
        for number, (uids, outputs) in enumerate(batches):
            with annotate_errors(number, self.first + first, len(uids)):
                writer.write_batch(uids, outputs)
            first += len(uids)
            progress("cells", first, total)

    def _refuse_others(self, writer: BatchWriter) -> None:
        """Compare the ids that an interrupted run has written with those of the first cells."""
        first = 0
        for batch in writer.read_back([OBJECT_ID]) if len(writer) else ():
            wanted = self.loader.plan.uids[first : first + batch.num_rows].astype(str).tolist()
            if batch.column(0).to_pylist() != wanted:
                raise QueryError(
                    f"The run that was interrupted in {writer.result_dir} computed other cells than this one, near row {first:,}; "
                    "begin anew, without resume."
                )
            first += batch.num_rows

    def _updated(self) -> Iterator[tuple[NDArray[Any], dict[str, NDArray[Any]]]]:
        """Iterate over the cells in order: known results are copied, those of other cells computed in full batches."""
        known: Any = self.known
        uids = self.loader.plan.uids
        texts = pa.array(uids.astype(str).tolist(), pa.large_string())
        # -1 marks cells without a known result, which are computed.
        rows = pc.index_in(texts, value_set=known.ids().to_arrow().cast(pa.large_string())).fill_null(-1).to_numpy()
        fresh = np.flatnonzero(rows < 0)
        names = [column.name for column in known.columns]
        computed = _ComputedRows(self.part(fresh), known, self.first + fresh) if len(fresh) else None
        for start in range(0, len(uids), self.batch_size):
            here = rows[start : start + self.batch_size]
            old = here >= 0
            # In the dtype of the known results; `_ComputedRows` refuses a model that gives another.
            outputs = {column.name: np.empty((len(here), *column.shape), column.dtype) for column in known.columns}
            found = known.read_batch(here[old], names) if old.any() else {}
            made = computed.take(int((~old).sum())) if computed is not None and not old.all() else {}
            for name in names:
                if old.any():
                    outputs[name][old] = found[name]
                if not old.all():
                    outputs[name][~old] = made[name]
            yield uids[start : start + self.batch_size], outputs


class _ComputedRows:
    """What a run computes, in pieces of any length."""

    def __init__(self, run: InferenceRun, known: ResultDataset, cells: NDArray[np.int64]) -> None:
        self._results = run.results(cells)
        self._known = {column.name: column for column in known.columns}
        self._left: dict[str, NDArray[Any]] = {
            column.name: np.empty((0, *column.shape), column.dtype) for column in known.columns
        }

    def take(self, n: int) -> dict[str, NDArray[Any]]:
        """Compute the next n rows."""
        while len(next(iter(self._left.values()))) < n:
            _, outputs = next(self._results)
            # Before the concatenation, which would promote another dtype without an error.
            self._check(outputs)
            self._left = {name: np.concatenate([values, outputs[name]]) for name, values in self._left.items()}
        taken = {name: values[:n] for name, values in self._left.items()}
        self._left = {name: values[n:] for name, values in self._left.items()}
        return taken

    def _check(self, outputs: Mapping[str, NDArray[Any]]) -> None:
        found = {name: (values.shape[1:], values.dtype) for name, values in outputs.items()}
        wanted = {name: (column.shape, column.dtype) for name, column in self._known.items()}
        if found != wanted:
            raise SourceError(
                f"The model gives {found}, and the results that are to be updated hold {wanted}; they are of another model. "
                "Compute all cells, without update."
            )


@contextmanager
def annotate_errors(number: int, first: int, n: int, last: int | None = None) -> Iterator[None]:
    """Add the cells to the message of an error; `last` is needed where cells between them are of no or another batch."""
    last = first + n - 1 if last is None else last
    cells = f"the cells {first:,} to {last:,} of the query"
    if last - first >= n:
        cells = f"{n:,} of {cells}"
    try:
        yield
    except SourceError as error:
        raise SourceError(f"{error} Batch {number} holds {cells}.") from error
    except Exception as error:
        # A note keeps the type and the traceback of the model's own error.
        error.add_note(f"The model was given batch {number}: {cells}.")
        raise


def check_outputs(given: Any, number: int, n: int) -> dict[str, NDArray[Any]]:  # noqa: ANN401  (what any model gives)
    """Return what a model computed as arrays, one row for each cell.

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


def split_options(
    model: Any,  # noqa: ANN401
    weights: str | os.PathLike[str] | None,
    choices: Mapping[str, Any],
) -> tuple[ModelSource, dict[str, Any], bool]:
    """Return what is about the model from what is about reading, and whether old results may be replaced."""
    known = {*ModelOptions.__annotations__}
    unknown = sorted(set(choices) - known)
    if unknown:
        raise QueryError(f"There is no choice {unknown[0]!r}; there are {', '.join(sorted(known))}.")
    rest = dict(choices)
    overwrite = bool(rest.pop("overwrite", False))
    own: dict[str, Any] = {name: rest.pop(name) for name in ("options", "inputs", "as_") if name in rest}
    own["outputs"] = tuple(rest.pop("outputs", ()))
    # `device` also stays in `rest`: the loader moves batches to where the module is.
    return ModelSource(model, weights, device=rest.get("device"), **own), rest, overwrite


def prepare_run(model: Model, query: Query, batch_size: int, reading: Mapping[str, Any]) -> InferenceRun:
    """Create a loader that fits a model, and every refusal that needs no values."""
    chosen = {name: value for name, value in reading.items() if value is not None}
    # The loader refuses a device for anything but tensors.
    if model.form not in {"torch", "torch-dense"}:
        chosen.pop("device", None)
    if model.dtype is not None:
        chosen.setdefault("dtype", model.dtype)
    chosen["obs"] = list(dict.fromkeys([*chosen.get("obs", ()), *model.obs]))
    size = model.batch_size or batch_size
    loader = Loader(query, size, shuffle=None, as_=model.form, **chosen)
    model.check(loader.features)
    return InferenceRun(loader, model, size)


def run_facts(verb: str, run: InferenceRun, query: Query) -> dict[str, str]:
    """Return where results come from, for the metadata of their table."""
    source = provenance(query.spec, query.catalog)
    return {
        "result:verb": verb,
        "result:model": run.model.name,
        "result:model_hash": run.model.digest,
        INPUTS: _input_digest(run.loader),
        "atlas:uri": str(source["uri"]),
        "atlas:version": str(source["snapshot"]),
        "atlas:query": str(source["query"]),
    }


def _input_digest(loader: Loader) -> str:
    """Describe what a model is given of a cell: features in their order, layers and dtypes, as one digest."""
    digest = hashlib.sha256()
    for name, space in loader.plan.spaces.items():
        part = [name, [str(each) for each in loader.features.get(name, ())], [str(each) for each in space.layers]]
        digest.update(json.dumps(part).encode())
    digest.update(str(loader.plan.options.dtype).encode())
    return digest.hexdigest()


def open_previous_results(results: Any, facts: Mapping[str, str]) -> ResultDataset:  # noqa: ANN401  (results, or their folder)
    """Open the results that are to be updated, and refuse those of another model or other inputs.

    Raises
    ------
    NotFoundError
        If there are none.
    QueryError
        If model, weights or features differ.
    """
    known = open_results(results)
    if not isinstance(known, ResultDataset):
        raise QueryError(
            f"{known!r} are results in .npy files; convert them with convert_results before they are updated."
        )
    for name, what in (
        ("result:model", "model"),
        ("result:model_hash", "weights"),
        (INPUTS, "features, layers or dtype"),
    ):
        if known.facts.get(name) != facts.get(name):
            raise QueryError(
                f"{known!r} were computed with other {what} ({name} is {known.facts.get(name)!r} there, {facts.get(name)!r} here), so "
                "new cells would not fit to them. Compute all cells, without update; name the features where the atlas has grown by some."
            )
    return known
