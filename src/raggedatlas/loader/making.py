"""Rows -> batches: one read for several of them, metadata by plain indexing, values in the asked form."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import StoreError
from raggedatlas.loader.batch import BatchFacts, SpaceRows, TrainingBatch
from raggedatlas.loader.columns import ObsColumn
from raggedatlas.loader.forms import FORMS, cut_rows
from raggedatlas.loader.options import ReadOptions
from raggedatlas.loader.order import Batches
from raggedatlas.loader.reading import CellReader
from raggedatlas.loader.torch import as_tensor
from raggedatlas.model.batch import Block
from raggedatlas.query.parts import SpacePlan
from raggedatlas.store.runtime import BufferPool


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """All that making batches needs, without the catalog: hand it to a thread or a process.

    Parameters
    ----------
    spaces : mapping of str to SpacePlan
        What is read.
    uids : (n_cells,) bytes
        Cell uids.
    columns : mapping of str to ObsColumn
        Metadata.
    facts : BatchFacts
        What all batches share.
    options : ReadOptions
        What values come as.
    """

    spaces: Mapping[str, SpacePlan]
    uids: NDArray[np.bytes_]
    columns: Mapping[str, ObsColumn]
    facts: BatchFacts
    options: ReadOptions

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return len(self.uids)


class BatchMaker:
    """Make batches of any rows, from any thread of a process.

    Parameters
    ----------
    plan : BatchPlan
        What to read and how to give it.
    threads : int
        Threads of one read.
    """

    def __init__(self, plan: BatchPlan, threads: int = 1) -> None:
        self._plan = plan
        self._ring = BufferPool(plan.options.buffers)
        self._reader = CellReader(plan.spaces, threads, self._ring)
        self._form = FORMS[plan.options.as_]
        # sparse tensors have to be sorted, dense ones need not
        self._sort = plan.options.sort or plan.options.as_ == "torch"

    def make(self, batches: Batches) -> list[TrainingBatch]:
        """Read several batches at once.

        Parameters
        ----------
        batches : Batches
            Rows, and where each batch begins.
        """
        plan, rows = self._plan, batches.rows
        blocks = self._reader.read(rows, sort=self._sort)
        uids = plan.uids[rows]
        obs = {name: column.values[rows] for name, column in plan.columns.items()}
        marks = {name: (space.present[rows], space.layout_code[rows]) for name, space in plan.spaces.items()}
        if len(batches) == 1:
            return [self._batch(rows, uids, obs, blocks, marks)]
        made = []
        for start, stop in pairwise(batches.bounds.tolist()):
            own = slice(start, stop)
            columns = {name: values[own] for name, values in obs.items()}
            cut = {name: cut_rows(block, start, stop) for name, block in blocks.items()}
            seen = {name: (present[own], layout[own]) for name, (present, layout) in marks.items()}
            made.append(self._batch(rows[own], uids[own], columns, cut, seen))
        return made

    def _batch(
        self,
        rows: NDArray[np.int64],
        uids: NDArray[np.bytes_],
        obs: Mapping[str, NDArray[Any]],
        blocks: Mapping[str, Block],
        marks: Mapping[str, tuple[NDArray[np.bool_], NDArray[np.int32]]],
    ) -> TrainingBatch:
        options = self._plan.options
        spaces = {name: self._space(name, block, *marks[name]) for name, block in blocks.items()}
        columns = {name: self._column(name, values) for name, values in obs.items()} if options.tensors else obs
        batch = TrainingBatch(rows, uids, columns, spaces, self._plan.facts)
        return batch.pin_memory() if options.pins else batch

    def _space(self, name: str, block: Block, present: NDArray[np.bool_], layout: NDArray[np.int32]) -> SpaceRows:
        options = self._plan.options
        formed = self._form(block, options.value_dtype, self._ring)
        given = as_tensor(present) if options.tensors else present
        return SpaceRows(formed, given, layout, self._sort, self._plan.facts.spaces[name])

    def _column(self, name: str, values: NDArray[Any]) -> Any:  # noqa: ANN401  (a tensor)
        return as_tensor(values if self._plan.columns[name].categories is None else values.astype(np.int64))


def refuse_fork(pid: int) -> None:
    """Refuse to read in a forked child.

    Parameters
    ----------
    pid : int
        The process in which the loader was made or unpickled.

    Raises
    ------
    StoreError
        In any other process.
    """
    if os.getpid() != pid:
        raise StoreError(
            f"A loader made in process {pid} is used in its forked child {os.getpid()}, where the threads and connections of the "
            "parent do not work. Start workers with the spawn method, e.g. DataLoader(..., multiprocessing_context='spawn')."
        )
