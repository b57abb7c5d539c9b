"""The verbs ``infer`` and ``engine``: a model applied to the cells of a query, by one process or by several that share the run."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import QueryError, SourceError
from raggedatlas.loader.batch import TrainingBatch
from raggedatlas.loader.loader import Loader
from raggedatlas.model.arguments import Progress, checked, no_progress
from raggedatlas.model.choices import OutputFormat
from raggedatlas.query.plan import provenance
from raggedatlas.query.query import Query
from raggedatlas.store.executors import Workers, run_tasks, spawned
from raggedatlas.store.location import Location
from raggedatlas.wings.results.batch_writer import BatchWriter
from raggedatlas.wings.results.dataset import ResultDataset
from raggedatlas.wings.results.schema import OBJECT_ID, as_outputs
from raggedatlas.wings.results.verbs.models import Inputs, Model, ModelSource, open_onnx
from raggedatlas.wings.results.verbs.vector_sources import atlas_facts, open_results
from raggedatlas.wings.results.writer import ResultDatasetWriter, ResultPart

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
    """A model and the cells that it is for."""

    loader: Loader  # gives each cell once, in the query's order
    model: Model
    batch_size: int  # number of cells
    first: int = 0  # number of the first cell in the query, where other processes compute those before
    known: ResultDataset | None = None  # results of the same model; cells in them are copied instead of computed

    def part(self, rows: NDArray[np.int64], first: int | None = None) -> "InferenceRun":
        """Return a run of some of the cells, in the given order."""
        loader = self.loader.part(rows, drawn=False)
        return replace(self, loader=loader, first=self.first if first is None else first)

    def results(self, cells: NDArray[np.int64] | None = None) -> Iterator[tuple[TrainingBatch, Any]]:
        """Compute batch by batch; yields the batch, and its outputs, (n, ...) by name.

        `cells`, (n,), are the numbers of the cells in the query, for messages; None counts on from `first`.
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

        Raises `QueryError` if the writer has the results of other cells.
        """
        total, first = self.loader.n_cells, 0
        # What an interrupted run has written must be of the first cells.
        for batch in writer.read_back([OBJECT_ID]) if len(writer) else ():
            wanted = self.loader.plan.uids[first : first + batch.num_rows].astype(str).tolist()
            if batch.column(0).to_pylist() != wanted:
                raise QueryError(
                    f"The run that was interrupted in {writer.result_dir} computed other cells than this one, near row {first:,}; "
                    "begin anew, without resume."
                )
            first += batch.num_rows
        progress("cells", first, total)
        # `Loader.part` raises for no cells, so a run that is complete ends here.
        if first == total:
            return
        rest = self.part(np.arange(first, total), self.first + first) if first else self
        batches = (
            ((batch.stored_uids, outputs) for batch, outputs in rest.results())
            if rest.known is None
            else rest._updated()
        )
        for number, (uids, outputs) in enumerate(batches):
            with annotate_errors(number, self.first + first, len(uids)):
                writer.write_batch(uids, outputs)
            first += len(uids)
            progress("cells", first, total)

    def _updated(self) -> Iterator[tuple[NDArray[Any], dict[str, NDArray[Any]]]]:
        """Iterate over the cells in order: known results are copied, those of other cells computed in full batches."""
        known: Any = self.known
        uids = self.loader.plan.uids
        texts = pa.array(uids.astype(str).tolist(), pa.large_string())
        # -1 marks cells without a known result, which are computed.
        rows = pc.index_in(texts, value_set=known.ids().to_arrow().cast(pa.large_string())).fill_null(-1).to_numpy()
        fresh = np.flatnonzero(rows < 0)
        names = [column.name for column in known.columns]
        wanted = {column.name: (column.shape, column.dtype) for column in known.columns}
        results = self.part(fresh).results(self.first + fresh) if len(fresh) else iter(())
        # Computed rows that were not taken yet: batches of fresh cells do not end where those of all cells end.
        left = {name: np.empty((0, *shape), dtype) for name, (shape, dtype) in wanted.items()}
        for start in range(0, len(uids), self.batch_size):
            here = rows[start : start + self.batch_size]
            old = here >= 0
            n_fresh = int((~old).sum())
            while len(left[names[0]]) < n_fresh:
                _, made = next(results)
                # Before the concatenation, which would promote another dtype without an error.
                given = {name: (values.shape[1:], values.dtype) for name, values in made.items()}
                if given != wanted:
                    raise SourceError(
                        f"The model gives {given}, and the results that are to be updated hold {wanted}; they are of another model. "
                        "Compute all cells, without update."
                    )
                left = {name: np.concatenate([values, made[name]]) for name, values in left.items()}
            outputs = {name: np.empty((len(here), *shape), dtype) for name, (shape, dtype) in wanted.items()}
            found = known.read_batch(here[old], names) if old.any() else {}
            for name, values in outputs.items():
                if old.any():
                    values[old] = found[name]
                values[~old], left[name] = left[name][:n_fresh], left[name][n_fresh:]
            yield uids[start : start + self.batch_size], outputs


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

    `given` is what `as_outputs` takes; `number` is that of the batch, for messages, and `n` is its number of cells.

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
    loader = run.loader
    digest = hashlib.sha256()
    for name, space in loader.plan.spaces.items():
        part = [name, [str(each) for each in loader.features.get(name, ())], [str(each) for each in space.layers]]
        digest.update(json.dumps(part).encode())
    digest.update(str(loader.plan.options.dtype).encode())
    return {
        "result:verb": verb,
        "result:model": run.model.name,
        "result:model_hash": run.model.digest,
        INPUTS: digest.hexdigest(),
        **atlas_facts(query),
    }


def open_previous_results(results: Any, facts: Mapping[str, str]) -> ResultDataset:  # noqa: ANN401  (results, or their folder)
    """Open the results that are to be updated, and refuse those of another model, other weights or other inputs."""
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


_BATCHES = 64
"""Batches of a part where workers share a run and nobody says in how many parts."""

_PARTS = 1024
"""Most parts of such a run: each is a file of its own."""


def select_part(run: InferenceRun, number: int, n_parts: int) -> InferenceRun | None:
    """Return a part of a run: consecutive cells, full batches where there are enough; None if no cell is left."""
    n, size = run.loader.n_cells, run.batch_size
    per_part = -(-n // n_parts)
    # Rounding up to full batches can leave nothing for the last parts, for which `first == last`.
    if n >= n_parts * size:
        per_part = -(-per_part // size) * size
    first, last = min(number * per_part, n), min((number + 1) * per_part, n)
    if first == last:
        return None
    return run.part(np.arange(first, last), first)


@checked
def infer_part(
    model: Any,  # noqa: ANN401  (as infer takes it)
    query: Query,
    part: ResultPart,
    n_parts: int,
    *,
    weights: str | os.PathLike[str] | None = None,
    batch_size: int = 512,
    **choices: Unpack[ModelOptions],
) -> int:
    """Write one part of a run that several processes share, as each rank of a distributed program does.

    Parameters
    ----------
    model, query, weights, batch_size, **choices
        As `infer` takes them, and the same in every process.
    part : ResultPart
        Of ``ResultDatasetWriter.parts(n_parts)``, which one process makes and hands to the others; that process commits when all are
        done.
    n_parts : int
        How many there are.

    Returns
    -------
    int
        Cells of the part. Together the parts have each cell once, and the table is that of one process.

    Examples
    --------
    Under ``torchrun``, with a process group::

        parts = [None] * n_ranks
        if rank == 0:
            writer = ResultDatasetWriter("results/z")
            parts = writer.parts(n_ranks)
        torch.distributed.broadcast_object_list(parts)
        infer_part("models.py:Encoder", query, parts[rank], n_ranks, weights="encoder.pt")
        torch.distributed.barrier()
        if rank == 0:
            writer.commit()
    """
    source, reading, _ = split_options(model, weights, dict(choices))
    own = select_part(prepare_run(source.open(), query, batch_size, reading), part.number, n_parts)
    with part.writer() as writer:
        if own is not None:
            own.write(writer)
    return 0 if own is None else own.loader.n_cells


def _write_part(source: ModelSource, part: ResultPart, run: Callable[[Model], InferenceRun], n_cells: int) -> int:
    """Open the model in a worker, and write a part there, unless a worker that was lost afterwards has done so."""
    if not part.receipt.is_file():
        with part.writer() as writer:
            run(source.open()).write(writer)
    return n_cells


def run_parts(
    source: ModelSource,
    run: InferenceRun,
    parts: Sequence[ResultPart],
    executor: Executor | Workers | None,
    place: Location,
    progress: Progress,
) -> None:
    """Write the parts by workers; the first error ends the run."""
    shares = []
    done, total = 0, run.loader.n_cells
    for part in parts:
        own = select_part(run, part.number, len(parts))
        if part.receipt.is_file():
            done += 0 if own is None else own.loader.n_cells
        elif own is None:
            # An empty part needs a receipt too: the run's `commit` refuses parts that are not finished.
            part.writer().commit()
        else:
            # Without the model, which is not picklable: each worker opens its own.
            made = partial(InferenceRun, own.loader, batch_size=own.batch_size, first=own.first, known=own.known)
            shares.append(partial(_write_part, source, part, made, own.loader.n_cells))
    lost = "Nothing is visible; resume=True keeps what is finished."
    progress("cells", done, total)
    with (
        # An executor of the caller is not shut down; `closing` cancels waiting tasks after an error.
        nullcontext(executor) if executor is not None else spawned(len(parts)) as workers,
        closing(run_tasks(shares, workers, place=place, lost=lost)) as results,
    ):
        for _, n in results:
            done += n
            progress("cells", done, total)


class InferOptions(ModelOptions, total=False):
    """Keyword arguments of `infer`, all optional.

    Attributes
    ----------
    n_parts : int or None
        In how many parts the run is shared. None is one, and with an executor as many as make parts of 64 batches.
    executor : Executor, Workers or None
        Whose workers compute the parts; without one, each part has a process that is spawned. The model must be importable, or picklable.
    resume : bool
        Whether to go on where an interrupted run of the same model over the same cells stopped, in the same folder. The code of a function
        is not compared.
    update : ResultDataset, str or path
        Results of the same model: cells that are in there are taken over bit by bit, others are computed. May be those that are replaced.
    """

    n_parts: int | None
    executor: Executor | Workers | None
    resume: bool
    update: ResultDataset | str | os.PathLike[str] | None


@checked
def infer(
    model: Any,  # noqa: ANN401  (a callable, a module, or where one is)
    query: Query,
    result_dir: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | None = None,
    batch_size: int = 512,
    progress: Progress = no_progress,
    **choices: Unpack[InferOptions],
) -> ResultDataset:
    """Apply a model to the cells of a query, batch by batch, and keep what it gives under the cells' uids.

    Parameters
    ----------
    model : callable, str or path
        A function of a batch's values, a PyTorch module, or where one is imported from: ``"my_package.models:Encoder"``.
    query : Query
        Which cells, features, layers and spaces; cells without the space are left out.
    result_dir : str or path
        Local folder; see `ResultDatasetWriter`.
    weights : str, path or None
        State of a PyTorch module: ``.pt`` as ``torch.save(module.state_dict(), ...)`` writes it, or ``.safetensors``.
    batch_size : int
        Cells of a batch.
    progress : callable
        Called as ``progress(step, done, total)``.
    **choices
        See `InferOptions`.

    Returns
    -------
    ResultDataset
        One row for each cell, in the query's order; a column for each output.

    Raises
    ------
    QueryError, NotFoundError, SourceError, DuplicateError
        For what cannot be had as asked, before anything is computed; and for a model that gives another number of rows, objects, or
        another shape than before, naming the batch. Nothing is visible then.

    Notes
    -----
    Nothing is visible before the end. A run that takes longer than a minute notes what is finished, so that ``resume=True`` goes on from there
    after a kill or an error; any other run into the folder begins anew. The table's facts say which atlas, snapshot and query the cells are of, and the SHA-256 of
    the weights. Code that the model is imported from runs; weights are read without running any.

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
    >>> infer(lambda X: X.sum(axis=1), query, f"{folder}/sums").get_data([0, 3])
    array([1., 0.], dtype=float32)
    >>> infer("numpy:sqrt", query, f"{folder}/roots", features=["b"], batch_size=3).to_numpy().ravel()
    array([0., 1., 0., 0.], dtype=float32)
    >>> found = infer("models.py:Encoder", query, "results/z", weights="encoder.pt")  # doctest: +SKIP
    """
    chosen: dict[str, Any] = dict(choices)
    n_parts, executor = chosen.pop("n_parts", None), chosen.pop("executor", None)
    resume, update = bool(chosen.pop("resume", False)), chosen.pop("update", None)
    source, reading, overwrite = split_options(model, weights, chosen)
    # Before the writer is made, so that a refused run leaves no folder.
    run = prepare_run(source.open(), query, batch_size, reading)
    facts = run_facts("infer", run, query)
    if update is not None:
        # Opened before the writer, as `update` may be the folder that is replaced: its version stays readable.
        run = replace(run, known=open_previous_results(update, facts))
    with ResultDatasetWriter(result_dir, overwrite=overwrite, facts=facts, resume=resume) as writer:
        writer.original_dataset_config = {"atlas": provenance(query.spec, query.catalog)}
        if n_parts is None:
            n = 1 if executor is None else max(1, min(_PARTS, run.loader.n_cells // (_BATCHES * run.batch_size)))
        elif isinstance(n_parts, bool) or not isinstance(n_parts, int | np.integer) or n_parts < 1:
            raise QueryError(f"n_parts={n_parts!r}; a run is shared by at least one process.")
        else:
            n = int(n_parts)
        # A resumed run that was shared stays shared, as its finished rows are in the manifests of its parts.
        if n == 1 and executor is None and not writer.n_parts:
            run.write(writer, progress)
        else:
            if len(writer):
                raise QueryError(
                    f"The run that was interrupted in {writer.result_dir} was not shared by processes; resume it with n_parts=1, not {n}."
                )
            run_parts(source, run, writer.parts(n), executor, query.catalog.location, progress)
    return ResultDataset({}, result_dir)


@checked
def engine(
    path: str | os.PathLike[str],
    query: Query,
    result_dir: str | os.PathLike[str],
    *,
    inputs: Mapping[str, str] | None = None,
    batch_size: int = 512,
    resume: bool = False,
    progress: Progress = no_progress,
    **choices: Unpack[ReadingOptions],
) -> ResultDataset:
    """Apply a model in an ONNX file to the cells of a query, as `infer` does, by ONNX Runtime on the CPU.

    Parameters
    ----------
    path : str or path
        The ``.onnx`` file.
    query : Query
        Which cells and features; their number must be what the model takes.
    result_dir : str or path
        Local folder.
    inputs : mapping of str to str, or None
        Input of the model -> what it takes: ``"X"`` or a metadata column. None is for a model with one input.
    batch_size : int
        Cells of a batch; a model for batches of one size gets these, the last one filled up.
    resume : bool
        As for `infer`.
    progress : callable
        Called as ``progress(step, done, total)``.
    **choices
        See `ReadingOptions`.

    Returns
    -------
    ResultDataset
        One row for each cell, in the query's order; a column for each output of the model.

    Raises
    ------
    NotFoundError
        If the model has no input of a given name; the message lists its inputs.
    SourceError
        If the file does not read, or takes another number of features.
    MissingExtraError
        Without ONNX Runtime (``pip install 'raggedatlas[onnx]'``).

    Examples
    --------
    >>> found = engine("encoder.onnx", view.query(), "results/z", inputs={"counts": "X"})  # doctest: +SKIP
    """
    reading = dict(choices)
    overwrite = bool(reading.pop("overwrite", False))
    run = prepare_run(open_onnx(path, inputs), query, batch_size, reading)
    facts = run_facts("engine", run, query)
    with ResultDatasetWriter(result_dir, overwrite=overwrite, facts=facts, resume=resume) as writer:
        writer.original_dataset_config = {"atlas": provenance(query.spec, query.catalog)}
        run.write(writer, progress)
    return ResultDataset({}, result_dir)
