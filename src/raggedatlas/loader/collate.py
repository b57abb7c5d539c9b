"""Collation: rows become batches, with one read for several batches and values in the requested format."""

import os
from collections.abc import Callable, Mapping
from ctypes import byref, c_int64
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import StoreError
from raggedatlas.loader import torch as tensors
from raggedatlas.loader.batch import ModalityBatch, TensorBlock, TrainingBatch
from raggedatlas.loader.batch_plan import BatchPlan
from raggedatlas.loader.order import Batches
from raggedatlas.loader.torch import as_tensor
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.query.read import SpaceReader
from raggedatlas.store.native import csr_of, library
from raggedatlas.store.runtime import BufferPool
from raggedatlas.store.sparse import refuse_rows


class Collator:
    """Collates rows to batches, from any thread of a process.

    Parameters
    ----------
    plan : BatchPlan
        What to read and how to return it.
    threads : int
        Threads of one read.
    """

    def __init__(self, plan: BatchPlan, threads: int = 1) -> None:
        self._plan = plan
        self._ring = BufferPool(plan.options.buffers)
        self._readers = {name: SpaceReader(space, threads, self._ring) for name, space in plan.spaces.items()}
        self._form = FORMATTERS[plan.options.as_]
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
        blocks = {name: reader.read(rows, sort=self._sort) for name, reader in self._readers.items()}
        uids = plan.uids[rows]
        obs = {name: column.values[rows] for name, column in plan.columns.items()}
        marks = {name: (space.present[rows], space.layout_code[rows]) for name, space in plan.spaces.items()}
        if len(batches) == 1:
            return [self._batch(rows, uids, obs, blocks, marks)]
        made = []
        # Slices of sparse blocks are views: `BufferPool` reuses the memory when all batches of the read are gone.
        for start, stop in pairwise(batches.bounds.tolist()):
            own = slice(start, stop)
            columns = {name: values[own] for name, values in obs.items()}
            cut = {name: slice_rows(block, start, stop) for name, block in blocks.items()}
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

    def _space(self, name: str, block: Block, present: NDArray[np.bool_], layout: NDArray[np.int32]) -> ModalityBatch:
        options = self._plan.options
        formed = self._form(block, options.value_dtype, self._ring)
        given = as_tensor(present) if options.tensors else present
        return ModalityBatch(formed, given, layout, self._sort, self._plan.facts.spaces[name])

    def _column(self, name: str, values: NDArray[Any]) -> Any:  # noqa: ANN401  (a tensor)
        # Losses of PyTorch take classes as int64.
        return as_tensor(values if self._plan.columns[name].categories is None else values.astype(np.int64))


def check_process(pid: int) -> None:
    """Raise in a forked child process.

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


Formed = CsrBlock | DenseBlock | TensorBlock


def slice_rows(block: Block, start: int, stop: int) -> Block:
    """Return consecutive rows; values and columns are views of the block's."""
    if isinstance(block, DenseBlock):
        return DenseBlock({layer: values[start:stop] for layer, values in block.layers.items()})
    if start == 0 and stop == block.n_rows:
        return block
    # Values and columns are not copied; bounds are, as those of a block start at 0.
    first, last = int(block.indptr[start]), int(block.indptr[stop])
    layers = {layer: values[first:last] for layer, values in block.layers.items()}
    return CsrBlock(block.indptr[start : stop + 1] - first, block.indices[first:last], layers, block.n_cols)


def dense_layers(block: Block, dtype: np.dtype[Any] | None, pool: BufferPool) -> dict[str, NDArray[Any]]:
    """Return every layer as a dense array.

    Returns
    -------
    mapping of str to (n_rows, ...) array of `dtype`
    """
    if isinstance(block, DenseBlock):
        return {layer: _cast(values, dtype) for layer, values in block.layers.items()}
    found = {}
    for layer, values in block.layers.items():
        entries = np.ascontiguousarray(_cast(values, dtype))
        # Memory of the pool is not zeroed; `ra_write_dense` writes the zeros too.
        memory = pool.take(block.n_rows * block.n_cols, entries.dtype)
        found[layer] = memory.reshape(block.n_rows, block.n_cols)
        rows, where = csr_of(block.indptr, block.indices), c_int64()
        fault = library().ra_write_dense(
            byref(rows), entries, entries.itemsize, found[layer], block.n_cols, byref(where)
        )
        refuse_rows(fault, f"The layer {layer} of a batch", where.value, block.n_cols)
    return found


def _as_stored(block: Block, dtype: np.dtype[Any] | None, _: BufferPool) -> Formed:
    if dtype is None:
        return block
    layers = {layer: _cast(values, dtype) for layer, values in block.layers.items()}
    if isinstance(block, DenseBlock):
        return DenseBlock(layers)
    return CsrBlock(block.indptr, block.indices, layers, block.n_cols)


def _as_dense(block: Block, dtype: np.dtype[Any] | None, pool: BufferPool) -> Formed:
    return DenseBlock(dense_layers(block, dtype, pool))


def _as_tensors(block: Block, dtype: np.dtype[Any] | None, pool: BufferPool) -> Formed:
    if isinstance(block, DenseBlock):
        return _as_dense_tensors(block, dtype, pool)
    return TensorBlock({layer: tensors.sparse_tensor(block, _cast(v, dtype)) for layer, v in block.layers.items()})


def _as_dense_tensors(block: Block, dtype: np.dtype[Any] | None, pool: BufferPool) -> Formed:
    layers = dense_layers(block, dtype, pool)
    return TensorBlock({layer: tensors.as_tensor(values) for layer, values in layers.items()})


def _cast(values: NDArray[Any], dtype: np.dtype[Any] | None) -> NDArray[Any]:
    return values if dtype is None else values.astype(dtype, copy=False)


FORMATTERS: dict[str, Callable[[Block, np.dtype[Any] | None, BufferPool], Formed]] = {
    "csr": _as_stored,
    "dense": _as_dense,
    "torch": _as_tensors,
    "torch-dense": _as_dense_tensors,
}
"""Converters of a block by output format; the dtype is that of the values, None keeps theirs."""
