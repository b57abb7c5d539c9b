"""Training batches: cells, their metadata as arrays, and their values in each modality."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError
from raggedatlas.loader.torch import each_part
from raggedatlas.model.batch import CsrBlock, DenseBlock, assemble_csr
from raggedatlas.store.runtime import find_shared, share


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """Rows as torch tensors.

    Parameters
    ----------
    layers : mapping of str to (n_rows, ...) tensor
        Dense, or sparse CSR with sorted columns.
    """

    layers: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class ModalityMetadata:
    """Metadata of a modality, shared by all batches.

    Parameters
    ----------
    features : (n_features,) object array of str
        Feature uids in column order; empty for spaces without features.
    layouts : tuple of str
        Layout uids of the datasets.
    measured : (n_layouts + 1, n_features) bool
        Which columns each layout measured; the last row, for cells without the space, is False.
    """

    features: NDArray[np.object_]
    layouts: tuple[str, ...]
    measured: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class BatchMetadata:
    """Metadata shared by all batches of a loader.

    Parameters
    ----------
    key : str
        Identifies the query.
    spaces : mapping of str to ModalityMetadata
        By name.
    categories : mapping of str to (n_categories,) object array
        What the codes of a metadata column mean.
    """

    key: str
    spaces: Mapping[str, ModalityMetadata]
    categories: Mapping[str, NDArray[np.object_]]


@dataclass(frozen=True, slots=True, eq=False)
class ModalityBatch:
    """One modality of a batch, aligned row by row.

    Parameters
    ----------
    block : CsrBlock, DenseBlock or TensorBlock
        Values by layer; cells without this space have an empty row, or one of zeros (NaN where the query says so).
    present : (n_rows,) bool array or tensor
        Whether the cell has this space.
    layout : (n_rows,) int32
        Row of ``facts.measured`` for each cell; -1 where the cell lacks the space.
    sorted : bool
        Whether the columns of every sparse row are known to ascend.
    facts : ModalityMetadata
        Shared by all batches.
    """

    block: CsrBlock | DenseBlock | TensorBlock
    present: Any
    layout: NDArray[np.int32]
    sorted: bool
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
        """Return a layer in the same form as `X`.

        Raises
        ------
        NotFoundError
            If it was not read.
        """
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
    uids : (n,) bytes
        Cell uids.
    obs : mapping of str to (n,) array or tensor
        Metadata columns: numbers, or codes into ``categories``, -1 where the value is missing (int32, int64 in tensors).
    spaces : mapping of str to ModalityBatch
        Values, by feature space.
    facts : BatchMetadata
        Shared by all batches.
    """

    rows: NDArray[np.int64]
    uids: NDArray[np.bytes_]
    obs: Mapping[str, Any]
    spaces: Mapping[str, ModalityBatch]
    facts: BatchMetadata

    def __len__(self) -> int:
        """Count the cells."""
        return len(self.rows)

    @property
    def X(self) -> Any:  # noqa: ANN401  (see ModalityBatch.X)
        """The first layer of the first feature space."""
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
        if not all(isinstance(rows.block, TensorBlock) for rows in self.spaces.values()):
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
    """A batch sent from a worker: pickled without the metadata that the receiving process already has.

    Parameters
    ----------
    batch : TrainingBatch
        The batch that unpickling returns.
    """

    batch: TrainingBatch

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the shared metadata."""
        batch = self.batch
        spaces = {name: (r.block, r.present, r.layout, r.sorted) for name, r in batch.spaces.items()}
        return _receive, (batch.facts.key, batch.rows, batch.uids, batch.obs, spaces)


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
