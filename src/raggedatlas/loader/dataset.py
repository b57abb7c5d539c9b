"""The cells of a query as a map-style dataset: any row, any rows, in any order that a sampler asks for."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, QueryError
from raggedatlas.loader.batch import TrainingBatch, WireBatch, remember_facts
from raggedatlas.loader.batch_plan import BatchPlan, plan_batches
from raggedatlas.loader.collate import Collator, check_process
from raggedatlas.loader.options import OutputFormat, ReadChoices, split_choices
from raggedatlas.loader.order import Batches
from raggedatlas.loader.torch import require_torch, this_worker
from raggedatlas.model.arguments import checked
from raggedatlas.query.query import Query
from raggedatlas.store.runtime import DECODE_THREADS


@checked
class CellDataset:
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

    @classmethod
    def of_plan(cls, plan: BatchPlan) -> "CellDataset":
        """Make a dataset of an existing plan."""
        made = cls.__new__(cls)
        made.__setstate__({"_plan": plan})
        return made

    def _settle(self) -> None:
        """Create the state that belongs to this process."""
        self._pid = os.getpid()
        self._maker = Collator(self._plan, DECODE_THREADS)
        remember_facts(self._plan.facts)

    @property
    def features(self) -> Mapping[str, NDArray[np.object_]]:
        """Feature uids of every feature space, in column order."""
        return {name: facts.features for name, facts in self._plan.facts.spaces.items()}

    @property
    def categories(self) -> Mapping[str, NDArray[np.object_]]:
        """What the codes of every metadata column mean."""
        return self._plan.facts.categories

    def __len__(self) -> int:
        """Count the cells."""
        return self._plan.n_cells

    def __getitem__(self, index: Any) -> TrainingBatch:  # noqa: ANN401  (an integer, a slice, or integers)
        """Read a cell, or several, as one batch; negative numbers count from the end.

        Raises
        ------
        NotFoundError
            For a row that is not there.
        """
        n = len(self)
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
