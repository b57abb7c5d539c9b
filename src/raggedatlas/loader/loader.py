"""Training batches of a query: an iterable whose order resumes exactly, a map-style dataset for samplers, and the collation of rows to batches."""

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from ctypes import byref, c_int64
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, QueryError, StoreError
from raggedatlas.loader.batch import (
    ModalityBatch,
    TensorBlock,
    TrainingBatch,
    WireBatch,
    as_tensor,
    check_device,
    move_ahead,
    remember_facts,
    require_torch,
    sparse_tensor,
    this_worker,
    torch_dataset,
)
from raggedatlas.loader.linked import chunk_blocks
from raggedatlas.loader.order import (
    VALUED,
    Batches,
    Order,
    Share,
    Shuffle,
    Strategy,
    count_batches,
    epoch_batches,
    read_units,
    worker_batches,
)
from raggedatlas.loader.plan import (
    BatchPlan,
    LoaderChoices,
    LoaderOptions,
    ReadChoices,
    plan_batches,
    plan_order,
    split_choices,
    strategy_values,
)
from raggedatlas.model.arguments import checked
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.model.choices import OutputFormat
from raggedatlas.model.shown import Shown
from raggedatlas.query.query import Query
from raggedatlas.query.read import SpaceReader
from raggedatlas.store.native import csr_of, library
from raggedatlas.store.runtime import DECODE_THREADS, BufferPool, prefetch_map
from raggedatlas.store.sparse import refuse_rows


class Collator:
    """Collates rows to batches, from any thread of a process; `threads` are those of one read."""

    def __init__(self, plan: BatchPlan, threads: int = 1) -> None:
        self._plan = plan
        self._ring = BufferPool(plan.options.buffers)
        self._readers = {name: SpaceReader(space, threads, self._ring) for name, space in plan.spaces.items()}
        # sparse tensors have to be sorted, dense ones need not
        self._sort = plan.options.sort or plan.options.as_ == "torch"

    def make(self, batches: Batches) -> list[TrainingBatch]:
        """Read several batches at once."""
        rows, cells, options = batches.rows, self._plan.cells, self._plan.options
        at = self._plan.at(rows)
        blocks = {name: reader.read(at, sort=self._sort) for name, reader in self._readers.items()}
        uids = cells.uids[at]
        obs = {name: column.values[at] for name, column in cells.columns.items()}
        marks = {name: (space.present[at], space.layout_code[at]) for name, space in cells.spaces.items()}
        made = []
        # Slices of sparse blocks are views: `BufferPool` reuses the memory when all batches of the read are gone.
        for start, stop in pairwise(batches.bounds.tolist()):
            own, spaces = slice(start, stop), {}
            for name, block in blocks.items():
                formed = format_block(slice_rows(block, start, stop), options.as_, options.value_dtype, self._ring)
                present = as_tensor(marks[name][0][own]) if options.tensors else marks[name][0][own]
                facts = self._plan.facts.spaces[name]
                spaces[name] = ModalityBatch(formed, present, marks[name][1][own], self._sort, facts)
            columns: dict[str, Any] = {name: values[own] for name, values in obs.items()}
            if options.tensors:
                # Losses of PyTorch take classes as int64.
                columns = {
                    name: as_tensor(values if cells.columns[name].categories is None else values.astype(np.int64))
                    for name, values in columns.items()
                }
            batch = TrainingBatch(rows[own], uids[own], columns, spaces, self._plan.facts)
            made.append(batch.pin_memory() if options.pins else batch)
        return made


def check_process(pid: int) -> None:
    """Raise `StoreError` in a forked child; `pid` is the process in which the loader was made or unpickled."""
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


def format_block(block: Block, as_: OutputFormat, dtype: np.dtype[Any] | None, pool: BufferPool) -> Formed:
    """Return a block in the format of a loader's batches; the dtype is that of the values, None keeps theirs."""
    layers: dict[str, Any] = {
        layer: values if dtype is None else values.astype(dtype, copy=False) for layer, values in block.layers.items()
    }
    if as_ == "csr":
        return replace(block, layers=layers)
    if isinstance(block, CsrBlock):
        if as_ == "torch":
            return TensorBlock({layer: sparse_tensor(block, values) for layer, values in layers.items()})
        for layer, values in layers.items():
            entries = np.ascontiguousarray(values)
            # Memory of the pool is not zeroed; `ra_write_dense` writes the zeros too.
            dense = pool.take(block.n_rows * block.n_cols, entries.dtype).reshape(block.n_rows, block.n_cols)
            rows, where = csr_of(block.indptr, block.indices), c_int64()
            fault = library().ra_write_dense(byref(rows), entries, entries.itemsize, dense, block.n_cols, byref(where))
            refuse_rows(fault, f"The layer {layer} of a batch", where.value, block.n_cols)
            layers[layer] = dense
    return DenseBlock(layers) if as_ == "dense" else TensorBlock({k: as_tensor(v) for k, v in layers.items()})


class _Planned(Shown):
    """What a loader and a map-style dataset say of their plan."""

    _plan: BatchPlan

    @property
    def features(self) -> Mapping[str, NDArray[np.object_]]:
        """Feature uids of every feature space, in column order."""
        return {name: facts.features for name, facts in self._plan.facts.spaces.items()}

    @property
    def categories(self) -> Mapping[str, NDArray[np.object_]]:
        """What the codes of every metadata column mean."""
        return self._plan.facts.categories


@checked
class CellDataset(_Planned):
    """Cells as a map-style dataset, in the order of the query; rows are read when they are asked for.

    Parameters
    ----------
    query : Query
        Which cells, features, layers and feature spaces.
    obs : sequence of str, or None
        Metadata columns of a batch; None takes those of ``query.obs(...)``.
    as_ : {"csr", "dense", "torch", "torch-dense"}
        What values come as.
    **choices
        See `ReadChoices`.

    Notes
    -----
    PyTorch's DataLoader hands over a whole batch of indices at once; `collate` is its ``collate_fn``::

        DataLoader(dataset, 512, sampler=WeightedRandomSampler(weights, len(dataset)), collate_fn=dataset.collate)

    Examples
    --------
    >>> dataset = CellDataset(view.query(), obs=["cell_type"])  # doctest: +SKIP
    >>> dataset[5].obs["cell_type"], dataset[[7, 7, 2]].X.shape  # doctest: +SKIP
    """

    def __init__(
        self,
        query: Query,
        *,
        obs: Sequence[str] | None = None,
        as_: OutputFormat = "csr",
        **choices: Unpack[ReadChoices],
    ) -> None:
        options, _ = split_choices("CellDataset", {**choices, "obs": obs, "as_": as_})
        if options.tensors:
            require_torch()
        self._plan, _ = plan_batches(query, options)
        self._settle()

    def _settle(self) -> None:
        """Create the state that belongs to this process."""
        self._pid = os.getpid()
        self._maker = Collator(self._plan, DECODE_THREADS)
        remember_facts(self._plan.facts)

    def __len__(self) -> int:
        """Count the cells."""
        return self._plan.n_cells

    def __getitem__(self, index: Any) -> TrainingBatch:  # noqa: ANN401  (an integer, a slice, or integers)
        """Read a cell, or several, as one batch; negative numbers count from the end."""
        n = len(self)
        # The frequent case first; the type is compared because a bool is an `int` too, and is refused below.
        if type(index) is int and 0 <= index < n:
            return self._read(np.array([index]))
        if isinstance(index, slice):
            return self._read(np.arange(*index.indices(n)))
        rows = np.array(index, ndmin=1)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise QueryError(f"Cells are asked for by whole numbers, not {index!r}.")
        low, high = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
        if low < 0 or high >= max(n, 1):
            if low < -n or high >= n:
                raise NotFoundError(
                    f"The dataset has {n:,} cells; {rows[(rows < -n) | (rows >= n)][0]} is none of them."
                )
            rows = np.where(rows < 0, rows + n, rows)
        return self._read(rows.astype(np.int64, copy=False))

    def __getitems__(self, indices: Sequence[int]) -> TrainingBatch:
        """Read several cells as one batch, as PyTorch's DataLoader asks for them."""
        return self[indices]

    def __iter__(self) -> Iterator[TrainingBatch]:
        """Read cell by cell."""
        return (self[i] for i in range(len(self)))

    @staticmethod
    def collate(batch: TrainingBatch) -> Any:  # noqa: ANN401  (a batch, or its parcel on the way from a worker)
        """Return the batch of `__getitems__` unchanged: the ``collate_fn`` for a DataLoader."""
        return batch if this_worker() is None else WireBatch(batch)

    def __repr__(self) -> str:
        """Return the number of cells and the spaces."""
        return f"CellDataset of {len(self):,} cells ({', '.join(self._plan.spaces)}; as_={self._plan.options.as_!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the plan only."""
        return {"_plan": self._plan}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore in another process."""
        self._plan = state["_plan"]
        self._settle()

    def _read(self, rows: NDArray[np.int64]) -> TrainingBatch:
        check_process(self._pid)
        return self._maker.make(Batches(rows, np.array([0, len(rows)])))[0]


_READ_ROWS = 1024
"""About how many cells one read takes where batches are smaller, so that small batches cost no more per cell."""


@checked
class BatchIterator(_Planned):
    """What iterates over batches in an order: epochs, workers, resuming. `Loader` and `SetLoader` say which order.

    Parameters
    ----------
    plan : BatchPlan
        What is read.
    order : Order
        Which cells each batch has.
    options : LoaderOptions
        How it is read.
    """

    def __init__(self, plan: BatchPlan, order: Order, options: LoaderOptions) -> None:
        self._plan, self._order, self._options = plan, order, options
        self._next = (0, 0)
        self._now: tuple[int, int] | None = None
        self._settle()

    def _settle(self) -> None:
        """Create the state that belongs to this process."""
        self._pid = os.getpid()
        # Made by the first read: readers hold memory maps, and a loader that is only split reads nothing.
        self._maker: Collator | None = None
        remember_facts(self._plan.facts)

    @property
    def plan(self) -> BatchPlan:
        """What is read, frozen: feature spaces, cell uids, metadata and options."""
        return self._plan

    @property
    def n_cells(self) -> int:
        """Number of cells to choose from."""
        return self._plan.n_cells

    @property
    def moves(self) -> bool:
        """Whether batches are moved to a device."""
        return self._plan.options.device is not None

    def torch_dataset(self) -> Any:  # noqa: ANN401  (a torch.utils.data.IterableDataset)
        """Return the loader as a dataset for PyTorch's DataLoader.

        Returns
        -------
        torch.utils.data.IterableDataset
            For ``DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")``. Call `set_epoch` before each
            epoch: workers get copies of the loader.
        """
        return torch_dataset(self)

    def __len__(self) -> int:
        """Count the batches of an epoch on this rank."""
        return count_batches(self._order)

    def __iter__(self) -> Iterator[Any]:
        """Start the next epoch."""
        epoch, done = self._next
        batches, device = self.iterate(), self._plan.options.device
        return self._count(batches if device is None else move_ahead(batches, device), epoch, done)

    def iterate(self, worker: int = 0, n_workers: int = 1) -> Iterator[Any]:
        """Start the next epoch, and iterate over the share of one of several workers: every `n_workers`-th batch.

        Raises
        ------
        StoreError
            In a forked child, where the threads and connections of its parent do not work.
        QueryError
            If there is no such worker.
        """
        check_process(self._pid)
        if not 0 <= worker < n_workers:
            raise QueryError(f"worker {worker} is not one of {n_workers} workers; they are numbered from 0.")
        epoch, done = self._next
        # At the call and not in the generator: an epoch has begun even if no batch of it is taken.
        self._next, self._now = (epoch + 1, 0), (epoch, done)
        return self._read(epoch, done, worker, n_workers)

    def send(self, worker: int, n_workers: int) -> Iterator[Any]:
        """Iterate in a worker of a DataLoader: batches are pickled without what the process that trains has already."""
        return map(self._sent, self.iterate(worker, n_workers))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._next, self._now = (_epoch(epoch), 0), None

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        """Return the position of the iteration, from which another process can resume.

        Parameters
        ----------
        taken : int or None
            Batches taken of the epoch that `set_epoch` named, where a DataLoader with workers counts; None counts by itself.

        Returns
        -------
        dict
            Of strings and numbers. The state of one rank serves all.
        """
        epoch, done = self._now or self._next
        return {**self._facts(), "epoch": epoch, "batch": done if taken is None else int(taken)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the next iteration from a state.

        Raises
        ------
        QueryError
            If the state is of another query, seed, number of ranks or other choice that changes the order.
        """
        for name, value in self._facts().items():
            if state.get(name) != value:
                raise QueryError(
                    f"The state was taken with {name} {state.get(name)!r}, this loader has {value!r}: its batches would not "
                    "follow those before. Make the loader as it was."
                )
        epoch, done = _epoch(state.get("epoch")), state.get("batch")
        # All batches taken is a valid position: that after the last batch of the epoch.
        if not isinstance(done, int) or not 0 <= done <= len(self):
            raise QueryError(
                f"The state says {done!r} batches were taken, which is beyond the {len(self):,} of an epoch."
            )
        self._next, self._now = (epoch, done), None

    def _facts(self) -> dict[str, Any]:
        """Return all that determines the order of an epoch."""
        order, share, blocks = self._order, self._order.share, None
        if order.shuffle == "blocks":
            # Blocks of other sizes are those of a file that was linked and is copied now.
            digest = "" if order.blocks is None else blake2b(order.blocks.tobytes(), digest_size=8).hexdigest()
            blocks = [int(order.block_size), int(order.buffer_size), digest]
        return {
            "query": self._plan.facts.key,
            "n_cells": order.n_cells,
            "seed": int(order.seed),
            "batch_size": int(order.batch_size),
            "shuffle": order.shuffle,
            "blocks": blocks,
            "strategy": order.digest(),
            "world_size": int(share.world_size),
            "even": share.even,
            "drop_last": share.drop_last,
        }

    def _count(self, batches: Iterator[Any], epoch: int, done: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, done + 1):
            # Before the yield, so that a state taken during this batch counts it as taken.
            self._now = (epoch, number)
            yield batch
        self._now = None

    def _read(self, epoch: int, done: int, worker: int, n_workers: int) -> Iterator[Any]:
        options = self._options
        threads = options.threads
        if threads is None:
            # Several workers are parallel already and read without further threads.
            threads = DECODE_THREADS if n_workers == 1 else 0
        every = epoch_batches(self._order, epoch)
        own = worker_batches(len(every), done, worker, n_workers)
        sizes = every.bounds[own + 1] - every.bounds[own]
        # Neighbouring cells are scattered over one shuffle buffer, so a read takes as many cells as that has.
        edges = read_units(sizes, options.buffer_size if options.shuffle == "blocks" else _READ_ROWS)
        each = max(1, len(own) // max(1, len(edges) - 1))
        # The choice counts batches, the depth counts reads.
        ahead = max(1, threads) if options.prefetch is None else -(-options.prefetch // each)
        # Kept for the next epoch, with its maps and buffers.
        maker = self._maker = self._maker or Collator(self._plan)
        # Which cells a batch has is computed by the thread that reads them.
        read = prefetch_map(
            lambda unit: self._made(maker, every.take(own[slice(*unit)])),
            pairwise(edges.tolist()),
            threads=threads,
            depth=ahead,
        )
        for made in read:
            yield from made

    def _made(self, maker: Collator, batches: Batches) -> Sequence[Any]:
        """Read batches."""
        return maker.make(batches)

    def _sent(self, batch: Any) -> Any:  # noqa: ANN401  (what `_made` returns)
        """Return a batch as it is sent from a worker."""
        return WireBatch(batch)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        return {name: value for name, value in self.__dict__.items() if name not in {"_maker", "_pid"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore in another process."""
        self.__dict__.update(state)
        self._settle()


@checked
class Loader(BatchIterator):
    """Training batches of a query: an iterable with a length, a new order every epoch.

    Parameters
    ----------
    query : Query
        Which cells, features, layers and feature spaces.
    batch_size : int
        Cells of a batch.
    shuffle : {"full", "blocks"} or None
        A uniform permutation of all cells in each epoch; blocks of neighbours, shuffled within a buffer, for stores where single
        cells are slow to read; or the query's order.
    seed : int
        The same seed gives the same epochs.
    obs : sequence of str, or None
        Metadata columns of a batch; None takes those of ``query.obs(...)``.
    as_ : {"csr", "dense", "torch", "torch-dense"}
        What values come as: compressed rows, dense arrays, sparse CSR tensors or dense tensors.
    **choices
        See `LoaderChoices`: ranks, sampling strategies, dtype, devices, threads.

    Raises
    ------
    QueryError, FeatureError
        For what cannot be had as asked, before anything is read.
    MissingExtraError
        For tensors without PyTorch.

    Notes
    -----
    Each iteration is the next epoch, unless `set_epoch` says otherwise. Reading runs ahead in threads, by a bounded number of
    batches, and ends with the iteration. Any number of DataLoader workers gives the same batches in the same order.

    Examples
    --------
    >>> loader = Loader(view.query(), 512, obs=["cell_type"], as_="torch")  # doctest: +SKIP
    >>> for batch in loader:  # doctest: +SKIP
    ...     loss = model(batch.X, batch.obs["cell_type"])
    """

    def __init__(
        self,
        query: Query,
        batch_size: int = 512,
        *,
        shuffle: Shuffle = "full",
        seed: int = 0,
        obs: Sequence[str] | None = None,
        as_: OutputFormat = "csr",
        **choices: Unpack[LoaderChoices],
    ) -> None:
        own = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "obs": obs, "as_": as_}
        reading, options = split_choices("Loader", {**choices, **own})
        if reading.tensors:
            check_device(reading.device, pinned=reading.pins)
        plan, column = plan_batches(query, reading, options.strategy_column)
        super().__init__(plan, plan_order(plan, options, column), options)

    @property
    def dataset(self) -> CellDataset:
        """The same cells for a sampler of PyTorch's: map-style, in the query's order."""
        made = CellDataset.__new__(CellDataset)
        made.__setstate__({"_plan": self._plan})
        return made

    def part(self, rows: NDArray[np.int64], *, drawn: bool = True, share: Share | None = None) -> "Loader":
        """Create a loader of some of the cells, with the same features, codes and options.

        Parameters
        ----------
        rows : (k,) int64
            Positions among the cells.
        drawn : bool
            Whether the part draws its cells as this loader does; else each comes once, in the order of `rows`.
        share : Share or None
            Which rank of how many the part is for; None keeps that of this loader.

        Returns
        -------
        Loader
            At the start of its first epoch; ``batch.rows`` count within the part.

        Raises
        ------
        QueryError
            If no batch is left.

        Examples
        --------
        >>> first = loader.part(np.arange(1_000), drawn=False)  # doctest: +SKIP
        >>> ranks = [loader.part(rows, share=Share(rank, 2, "pad")) for rank in range(2)]  # doctest: +SKIP
        """
        order, options = self._order, self._options
        share, strategy = share or order.share, Strategy()
        if drawn:
            values, n_samples = order.strategy.values, options.n_samples or len(rows)
            strategy = replace(order.strategy, values=None if values is None else values[rows], n_samples=n_samples)
        shuffle = order.shuffle if drawn else None
        plan = self._plan.part(rows)
        blocks = (
            chunk_blocks(plan.cells, plan.at(np.arange(len(rows))), order.block_size) if shuffle == "blocks" else None
        )
        own = replace(order, n_cells=len(rows), shuffle=shuffle, strategy=strategy, share=share, blocks=blocks)
        if not len(rows) or not count_batches(own):
            raise QueryError(
                f"{len(rows):,} of {self.n_cells:,} cells in batches of {order.batch_size:,} leave no batch for rank {share.rank} of "
                f"{share.world_size} (even={share.even!r}, drop_last={share.drop_last}); take a smaller batch_size."
            )
        # Plan, order and options are replaced, not changed, so a shallow copy does.
        made = copy(self)
        made._plan, made._order = plan, own
        made._options = replace(
            options, rank=share.rank, world_size=share.world_size, even=share.even, drop_last=share.drop_last
        )
        made._next, made._now = (0, 0), None
        made._settle()
        return made

    def __repr__(self) -> str:
        """Return what is read and how."""
        options = self._options
        return (
            f"Loader of {self.n_cells:,} cells, {len(self):,} batches of {options.batch_size:,} "
            f"(shuffle={options.shuffle!r}, as_={self._plan.options.as_!r}, rank {options.rank} of {options.world_size})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process, and values of the strategy that are in the file of the cells."""
        state = super().__getstate__()
        if self._order.strategy.values is not None and self._plan.cells.keeps_extra:
            state["_order"] = replace(self._order, strategy=replace(self._order.strategy, values=None))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore in another process."""
        super().__setstate__(state)
        strategy = self._order.strategy
        if strategy.values is None and strategy.kind in VALUED:
            values = strategy_values(self._plan, self._options)
            self._order = replace(self._order, strategy=replace(strategy, values=values))


def _epoch(epoch: Any) -> int:  # noqa: ANN401  (checked here)
    if isinstance(epoch, bool) or not isinstance(epoch, int | np.integer) or epoch < 0:
        raise QueryError(f"Epochs are whole numbers from 0 on, not {epoch!r}.")
    return int(epoch)
