"""Training batches: cells, their metadata as arrays or tensors, and their values in each modality; all code that needs PyTorch."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import MissingExtraError, NotFoundError, QueryError
from raggedatlas.model.batch import CsrBlock, DenseBlock, assemble_csr
from raggedatlas.store.runtime import find_shared, share, warnings_as


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """Rows as torch tensors."""

    layers: Mapping[str, Any]  # (n_rows, ...) tensors: dense, or sparse CSR with sorted columns


@dataclass(frozen=True, eq=False)
class ModalityMetadata:
    """Metadata of a modality, shared by all batches."""

    features: NDArray[np.object_]  # (n_features,): uids in column order; empty for spaces without features
    layouts: tuple[str, ...]  # uids of the datasets' layouts
    # (n_layouts + 1, n_features): the columns that each layout measured; a last row of False for cells without the space
    measured: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class BatchMetadata:
    """Metadata shared by all batches of a loader."""

    key: str  # identifies the query
    spaces: Mapping[str, ModalityMetadata]
    categories: Mapping[str, NDArray[np.object_]]  # (n_categories,) each: what the codes of a column mean


@dataclass(frozen=True, slots=True, eq=False)
class ModalityBatch:
    """One modality of a batch, aligned row by row."""

    # cells without this space have an empty row, or one of zeros (NaN where the query says so)
    block: CsrBlock | DenseBlock | TensorBlock
    present: Any  # (n_rows,) bool array or tensor: whether the cell has this space
    layout: NDArray[np.int32]  # (n_rows,): row of `facts.measured` for each cell; -1 where the cell lacks the space
    sorted: bool  # whether the columns of every sparse row are known to ascend
    facts: ModalityMetadata

    @property
    def X(self) -> Any:  # noqa: ANN401  (one of several matrix types, by the name that AnnData gave it)
        """The first layer: a `scipy.sparse.csr_array` without a copy, a NumPy array or a tensor."""
        return self.layer(next(iter(self.block.layers)))

    @property
    def features(self) -> NDArray[np.object_]:
        """Feature uids in column order."""
        return self.facts.features

    def layer(self, name: str) -> Any:  # noqa: ANN401  (one of several matrix types)
        """Return a layer in the same form as `X`."""
        if name not in self.block.layers:
            raise NotFoundError(f"The batch has the layers {list(self.block.layers)}, not {name!r}.")
        if not isinstance(self.block, CsrBlock):
            return self.block.layers[name]
        import scipy.sparse as sp

        block = self.block
        matrix = assemble_csr(sp.csr_array, (block.layers[name], block.indices, block.indptr), block.n_cols)
        # Set in advance, because SciPy otherwise looks at every row.
        matrix.has_sorted_indices = self.sorted
        return matrix

    def measured(self) -> NDArray[np.bool_]:
        """Return which features the dataset of each cell measured, (n_rows, n_features) bool."""
        found: NDArray[np.bool_] = self.facts.measured[self.layout]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """A batch of cells, with all parts aligned row by row.

    Parameters
    ----------
    rows : (n,) int64
        Position of each cell among the loader's cells.
    stored_uids : (n,) bytes
        Cell uids as the loader holds them.
    obs : mapping of str to (n,) array or tensor
        Metadata columns: numbers, or codes into ``categories``, -1 where the value is missing (int32, int64 in tensors).
    spaces : mapping of str to ModalityBatch
        Values, by feature space.
    facts : BatchMetadata
        Shared by all batches.
    """

    rows: NDArray[np.int64]
    stored_uids: NDArray[np.bytes_]
    obs: Mapping[str, Any]
    spaces: Mapping[str, ModalityBatch]
    facts: BatchMetadata

    def __len__(self) -> int:
        """Count the cells."""
        return len(self.rows)

    @property
    def uids(self) -> NDArray[np.str_]:
        """Cell uids, (n,) text, as the index of other outputs of a query; made anew each time."""
        return np.char.decode(self.stored_uids, "utf-8")

    @property
    def X(self) -> Any:  # noqa: ANN401  (see ModalityBatch.X)
        """The first layer of the first feature space."""
        if not self.spaces:
            raise NotFoundError("The batch holds no values, as its query asked for none with spaces([]).")
        return next(iter(self.spaces.values())).X

    @property
    def categories(self) -> Mapping[str, NDArray[np.object_]]:
        """What the codes of each metadata column mean."""
        return self.facts.categories

    def labels(self, column: str) -> NDArray[np.object_]:
        """Decode a column of codes to its values, None where missing, (n,) object."""
        if column not in self.facts.categories:
            raise NotFoundError(f"The batch has codes of {list(self.facts.categories)}, not of {column!r}.")
        # The None at the end is what code -1 finds.
        known = np.array([*self.facts.categories[column], None], dtype=object)
        labels: NDArray[np.object_] = known[np.asarray(self.obs[column])]
        return labels

    def pin_memory(self) -> "TrainingBatch":
        """Copy every tensor to pinned memory; a DataLoader with ``pin_memory=True`` calls this."""
        return self._each_tensor(lambda tensor: each_part(tensor, lambda part: part.pin_memory()))

    def to(self, device: Any, *, non_blocking: bool = False) -> "TrainingBatch":  # noqa: ANN401  (what torch takes)
        """Move every tensor to a device."""
        return self._each_tensor(
            lambda tensor: each_part(tensor, lambda part: part.to(device, non_blocking=non_blocking))
        )

    def tensors(self) -> list[Any]:
        """List every tensor of the batch."""
        found: list[Any] = []
        self._each_tensor(found.append)
        return found

    def __repr__(self) -> str:
        """Return the number of cells, the columns and the spaces."""
        parts = ", ".join(f"{name}: {', '.join(rows.block.layers)}" for name, rows in self.spaces.items())
        return f"TrainingBatch of {len(self):,} cells ({parts}; obs: {', '.join(self.obs) or 'none'})"

    def _each_tensor(self, change: Callable[[Any], Any]) -> "TrainingBatch":
        tensors = all(isinstance(rows.block, TensorBlock) for rows in self.spaces.values())
        if not tensors or any(isinstance(column, np.ndarray) for column in self.obs.values()):
            raise NotFoundError("This batch holds arrays; ask the loader for tensors with as_='torch'.")
        spaces = {
            name: replace(
                rows,
                block=TensorBlock({layer: change(tensor) for layer, tensor in rows.block.layers.items()}),
                present=change(rows.present),
            )
            for name, rows in self.spaces.items()
        }
        return replace(self, obs={name: change(column) for name, column in self.obs.items()}, spaces=spaces)


def remember_facts(facts: BatchMetadata) -> None:
    """Share the metadata of a loader in this process, for batches that its workers send without it."""
    # pickle can hand no context to what it calls, so the key must suffice to find it
    share(f"facts {facts.key}", lambda: facts)


@dataclass(frozen=True, slots=True, eq=False)
class WireBatch:
    """A batch sent from a worker: pickled without the metadata that the receiving process already has; unpickles as a `TrainingBatch`."""

    batch: TrainingBatch

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the shared metadata."""
        batch = self.batch
        spaces = {name: (r.block, r.present, r.layout, r.sorted) for name, r in batch.spaces.items()}
        return _receive, (batch.facts.key, batch.rows, batch.stored_uids, batch.obs, spaces)


def _receive(
    key: str, rows: NDArray[np.int64], uids: NDArray[np.bytes_], obs: Mapping[str, Any], spaces: Mapping[str, Any]
) -> TrainingBatch:
    facts = find_shared(f"facts {key}")
    if facts is None:
        raise NotFoundError(
            "A batch came from the worker of a loader that is gone in this process; keep the loader while its batches come."
        )
    parts = {name: ModalityBatch(p[0], p[1], p[2], p[3], facts.spaces[name]) for name, p in spaces.items()}
    return TrainingBatch(rows, uids, obs, parts, facts)


@cache
def require_torch() -> Any:  # noqa: ANN401  (a module)
    """Import PyTorch; raises `MissingExtraError` if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(
            "Tensors need PyTorch, which is not installed; pip install 'raggedatlas[ml]', or use as_='csr' or 'dense'."
        ) from error
    with warnings_as("ignore", message="Sparse (CSR tensor support|invariant checks)"):
        # said once per process, when the first such tensor is made
        torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([]), (1, 1))
    return torch


def check_device(device: str | None, *, pinned: bool) -> None:
    """Raise if PyTorch, the device, or the GPU that pinned memory needs is not available on this machine."""
    torch = require_torch()
    try:
        kind = None if device is None else torch.device(device).type
    except RuntimeError as error:
        raise QueryError(f"PyTorch knows no device {device!r}; e.g. 'cuda' or 'cuda:1'.") from error
    if (pinned or kind == "cuda") and not torch.cuda.is_available():
        raise QueryError(
            f"Loader: device={device!r} and pin_memory={pinned} need a GPU, and PyTorch finds none here; leave them out."
        )


def as_tensor(values: NDArray[Any]) -> Any:  # noqa: ANN401  (a tensor)
    """Convert an array to a tensor that shares its memory."""
    return require_torch().from_numpy(np.ascontiguousarray(values))


def sparse_tensor(block: CsrBlock, values: NDArray[Any]) -> Any:  # noqa: ANN401  (a tensor)
    """Return one layer of sorted sparse rows as a sparse CSR tensor; columns and values share the block's memory."""
    torch = require_torch()
    # PyTorch takes columns and bounds of one type; int32 bounds that overflow are replaced below.
    indptr = block.indptr.astype(block.indices.dtype, copy=False)
    if block.indices.dtype == np.int32 and block.indptr[-1] > np.iinfo(np.int32).max:
        block, indptr = CsrBlock(block.indptr, block.indices.astype(np.int64), {}, block.n_cols), block.indptr
    return torch.sparse_csr_tensor(
        torch.from_numpy(indptr),
        torch.from_numpy(block.indices),
        torch.from_numpy(np.ascontiguousarray(values)),
        (block.n_rows, block.n_cols),
        check_invariants=False,
    )


def each_part(tensor: Any, change: Callable[[Any], Any]) -> Any:  # noqa: ANN401  (tensors)
    """Change a tensor; of a sparse one, each of the dense tensors that it is made of."""
    torch = require_torch()
    if tensor.layout is not torch.sparse_csr:
        return change(tensor)
    parts = (change(tensor.crow_indices()), change(tensor.col_indices()), change(tensor.values()))
    return torch.sparse_csr_tensor(*parts, tensor.shape, check_invariants=False)


def move_ahead(batches: Iterator[TrainingBatch], device: str) -> Iterator[TrainingBatch]:
    """Move batches to a device; on a GPU one batch ahead, from pinned memory, on a stream of its own."""
    torch = require_torch()
    target = torch.device(device)
    if target.type != "cuda":
        yield from (batch.to(target) for batch in batches)
        return
    stream = torch.cuda.Stream(target)
    moved: deque[tuple[TrainingBatch, Any]] = deque()
    for batch in batches:
        with torch.cuda.stream(stream):
            # PyTorch keeps pinned memory that a copy still reads, so the batch here may go
            moved.append((batch.to(target, non_blocking=True), stream.record_event()))
        if len(moved) > 1:
            yield _arrived(*moved.popleft(), torch.cuda.current_stream(target))
    while moved:
        yield _arrived(*moved.popleft(), torch.cuda.current_stream(target))


def _arrived(batch: TrainingBatch, copied: Any, stream: Any) -> TrainingBatch:  # noqa: ANN401  (torch's own types)
    """Make the consumer's stream wait for the copy, and keep its memory while that stream uses it."""
    stream.wait_event(copied)
    for tensor in batch.tensors():
        each_part(tensor, lambda part: part.record_stream(stream) or part)
    return batch


def torch_dataset(loader: Any) -> Any:  # noqa: ANN401  (a Loader, which imports this file; an IterableDataset)
    """Wrap a loader into the type by which PyTorch's DataLoader knows that it is to be iterated.

    Raises `QueryError` for a loader that moves batches to a device, which workers cannot share.
    """
    return _dataset_class()(loader)


def this_worker() -> tuple[int, int] | None:
    """Return the worker id and the number of workers of a DataLoader; None outside of workers."""
    require_torch()
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return None if info is None else (int(info.id), int(info.num_workers))


@cache
def _dataset_class() -> Any:  # noqa: ANN401  (a class made from one of torch's)
    require_torch()
    from torch.utils.data import IterableDataset

    class LoaderDataset(IterableDataset):  # type: ignore[misc]
        """A loader as an `IterableDataset`; every worker yields its share of the batches."""

        def __init__(self, loader: Any) -> None:  # noqa: ANN401
            if loader.moves:
                raise QueryError(
                    "A loader with device=... moves batches in the process that iterates; for a DataLoader leave it out, "
                    "and pass DataLoader(..., pin_memory=True)."
                )
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            place = this_worker()
            return iter(self.loader) if place is None else self.loader.send(*place)

        def __len__(self) -> int:
            return len(self.loader)

        def __reduce__(self) -> tuple[Any, ...]:
            # the class is made on demand, so that nothing imports torch before: pickle cannot find it by name
            return torch_dataset, (self.loader,)

    return LoaderDataset
