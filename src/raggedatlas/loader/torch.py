"""All code that needs PyTorch: tensors, devices, and the dataset class for DataLoader."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import MissingExtraError, QueryError
from raggedatlas.model.batch import CsrBlock
from raggedatlas.store.runtime import warnings_as


class MovableBatch(Protocol):
    """A batch of tensors, as far as `move_ahead` needs it."""

    def to(self, device: Any, *, non_blocking: bool = False) -> Self:  # noqa: ANN401  (what torch takes)
        """Move every tensor to a device."""

    def tensors(self) -> list[Any]:
        """List every tensor."""


class BatchLoader(Protocol):
    """A loader, as far as PyTorch's DataLoader needs it."""

    @property
    def moves(self) -> bool:
        """Whether batches are moved to a device."""

    def __iter__(self) -> Iterator[Any]:
        """Start the next epoch."""

    def __len__(self) -> int:
        """Count the batches of an epoch."""

    def send(self, worker: int, n_workers: int) -> Iterator[Any]:
        """Iterate over the batches of one worker."""


B = TypeVar("B", bound=MovableBatch)


@cache
def require_torch() -> Any:  # noqa: ANN401  (a module)
    """Import PyTorch.

    Raises
    ------
    MissingExtraError
        If it is not installed.
    """
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
    """Raise if tensors are not available on this machine.

    Raises
    ------
    MissingExtraError
        Without PyTorch.
    QueryError
        For a device that PyTorch does not know or that is not there, or pinned memory without a GPU.
    """
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


def move_ahead(batches: Iterator[B], device: str) -> Iterator[B]:
    """Move batches to a device; on a GPU one batch ahead, from pinned memory, on a stream of its own."""
    torch = require_torch()
    target = torch.device(device)
    if target.type != "cuda":
        yield from (batch.to(target) for batch in batches)
        return
    stream = torch.cuda.Stream(target)
    moved: deque[tuple[B, Any]] = deque()
    for batch in batches:
        with torch.cuda.stream(stream):
            # PyTorch keeps pinned memory that a copy still reads, so the batch here may go
            moved.append((batch.to(target, non_blocking=True), stream.record_event()))
        if len(moved) > 1:
            yield _arrived(*moved.popleft(), torch.cuda.current_stream(target))
    while moved:
        yield _arrived(*moved.popleft(), torch.cuda.current_stream(target))


def _arrived(batch: B, copied: Any, stream: Any) -> B:  # noqa: ANN401  (torch's own types)
    """Make the consumer's stream wait for the copy, and keep its memory while that stream uses it."""
    stream.wait_event(copied)
    for tensor in batch.tensors():
        each_part(tensor, lambda part: part.record_stream(stream) or part)
    return batch


def torch_dataset(loader: BatchLoader) -> Any:  # noqa: ANN401  (an IterableDataset)
    """Wrap a loader into the type by which PyTorch's DataLoader knows that it is to be iterated.

    Raises
    ------
    QueryError
        If the loader moves batches to a device, which workers cannot share.
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

        def __init__(self, loader: BatchLoader) -> None:
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
