"""One run shared by several processes: each computes neighbouring cells, and one commit makes them one table."""

import os
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np

from raggedatlas.errors import QueryError
from raggedatlas.loader.loader import Loader
from raggedatlas.model.arguments import checked
from raggedatlas.query.query import Query
from raggedatlas.results.dataset import ResultDataset
from raggedatlas.results.writer import ResultPart
from raggedatlas.store.executors import Workers, run_tasks, spawned
from raggedatlas.store.location import Location
from raggedatlas.verbs.models import ModelSource
from raggedatlas.verbs.running import ModelChoices, Progress, Run, divide_choices, prepare

_BATCHES = 64
"""Batches of a part where workers share a run and nobody says in how many parts."""

_PARTS = 1024
"""Most parts of such a run: each is a file of its own."""


def usual_parts(run: Run) -> int:
    """Choose in how many parts workers share a run."""
    return max(1, min(_PARTS, run.loader.n_cells // (_BATCHES * run.batch_size)))


def whole_parts(n_parts: Any) -> int:  # noqa: ANN401  (checked here)
    """Refuse a number of parts that is none."""
    if isinstance(n_parts, bool) or not isinstance(n_parts, int | np.integer) or n_parts < 1:
        raise QueryError(f"n_parts={n_parts!r}; a run is shared by at least one process.")
    return int(n_parts)


def part_of(run: Run, number: int, n_parts: int) -> Run | None:
    """Take a part of a run: neighbouring cells, whole batches where there are enough; None where no cell is left for it."""
    n, size = run.loader.n_cells, run.batch_size
    per_part = -(-n // n_parts)
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
    **choices: Unpack[ModelChoices],
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
    source, reading, _ = divide_choices(model, weights, dict(choices))
    return _write_part(prepare(source.open(), query, batch_size, reading), part, n_parts)


def _write_part(run: Run, part: ResultPart, n_parts: int) -> int:
    own = part_of(run, part.number, n_parts)
    with part.writer() as writer:
        if own is not None:
            own.write(writer)
    return 0 if own is None else own.loader.n_cells


@dataclass(frozen=True)
class _Share:
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
            Run(self.loader, self.source.open(), self.batch_size, self.first, self.known).write(writer)
        return self.loader.n_cells


def share_out(
    source: ModelSource,
    run: Run,
    parts: Sequence[ResultPart],
    executor: Executor | Workers | None,
    place: Location,
    progress: Progress,
) -> None:
    """Let workers write the parts; the first error ends the run."""
    shares = []
    done, total = 0, run.loader.n_cells
    for part in parts:
        own = part_of(run, part.number, len(parts))
        if part.receipt.is_file():
            done += 0 if own is None else own.loader.n_cells
        elif own is None:
            part.writer().commit()
        else:
            shares.append(_Share(source, part, own.loader, own.batch_size, own.first, own.known))
    lost = "Nothing is visible; resume=True (--resume) keeps what is finished."
    progress("cells", done, total)
    with (
        nullcontext(executor) if executor is not None else spawned(len(parts)) as workers,
        closing(run_tasks(shares, workers, place=place, lost=lost)) as results,
    ):
        for _, n in results:
            done += n
            progress("cells", done, total)
