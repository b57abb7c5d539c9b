"""One run shared by several processes: each computes neighbouring cells, and one commit makes them one table."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np

from raggedatlas.errors import QueryError
from raggedatlas.loader.loader import Loader
from raggedatlas.model.arguments import Progress, checked, no_progress
from raggedatlas.query.plan import provenance
from raggedatlas.query.query import Query
from raggedatlas.results.dataset import ResultDataset
from raggedatlas.results.writer import ResultDatasetWriter, ResultPart
from raggedatlas.store.executors import Workers, run_tasks, spawned
from raggedatlas.store.location import Location
from raggedatlas.verbs.inference_run import (
    InferenceRun,
    ModelOptions,
    ReadingOptions,
    open_previous_results,
    prepare_run,
    run_facts,
    split_options,
)
from raggedatlas.verbs.models import ModelSource
from raggedatlas.verbs.onnx_models import open_onnx

_BATCHES = 64
"""Batches of a part where workers share a run and nobody says in how many parts."""

_PARTS = 1024
"""Most parts of such a run: each is a file of its own."""


def default_parts(run: InferenceRun) -> int:
    """Choose in how many parts workers share a run."""
    return max(1, min(_PARTS, run.loader.n_cells // (_BATCHES * run.batch_size)))


def check_parts(n_parts: Any) -> int:  # noqa: ANN401  (checked here)
    """Refuse a number of parts that is none."""
    if isinstance(n_parts, bool) or not isinstance(n_parts, int | np.integer) or n_parts < 1:
        raise QueryError(f"n_parts={n_parts!r}; a run is shared by at least one process.")
    return int(n_parts)


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
    return _write_part(prepare_run(source.open(), query, batch_size, reading), part, n_parts)


def _write_part(run: InferenceRun, part: ResultPart, n_parts: int) -> int:
    own = select_part(run, part.number, n_parts)
    with part.writer() as writer:
        if own is not None:
            own.write(writer)
    return 0 if own is None else own.loader.n_cells


@dataclass(frozen=True)
class _PartTask:
    """What a process needs to write a part; it travels by pickle."""

    source: ModelSource
    part: ResultPart
    loader: Loader = field(repr=False)
    batch_size: int
    first: int
    known: ResultDataset | None

    def __call__(self) -> int:
        """Open the model here, and write, unless a worker that was lost afterwards has done so."""
        if self.part.receipt.is_file():
            return self.loader.n_cells
        with self.part.writer() as writer:
            InferenceRun(self.loader, self.source.open(), self.batch_size, self.first, self.known).write(writer)
        return self.loader.n_cells


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
            shares.append(_PartTask(source, part, own.loader, own.batch_size, own.first, own.known))
    lost = "Nothing is visible; resume=True (--resume) keeps what is finished."
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
        n = (1 if executor is None else default_parts(run)) if n_parts is None else check_parts(n_parts)
        # A resumed run that was shared stays shared, as its finished rows are in the manifests of its parts.
        if n == 1 and executor is None and not writer.n_parts:
            run.write(writer, progress)
        else:
            _check_resumable_in_parts(writer, n)
            run_parts(source, run, writer.parts(n), executor, query.catalog.location, progress)
    return ResultDataset({}, result_dir)


def _check_resumable_in_parts(writer: ResultDatasetWriter, n_parts: int) -> None:
    """Refuse to share a run that began in one process."""
    if len(writer):
        raise QueryError(
            f"The run that was interrupted in {writer.result_dir} was not shared by processes; resume it with n_parts=1, not {n_parts}."
        )


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
