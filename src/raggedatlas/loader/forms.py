"""What values come as: compressed rows, dense arrays, or tensors of either."""

from collections.abc import Callable
from ctypes import byref, c_int64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.loader import torch as tensors
from raggedatlas.loader.batch import TensorBlock
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.store.native import csr_of, library
from raggedatlas.store.runtime import BufferPool
from raggedatlas.store.sparse import refuse_rows

Formed = CsrBlock | DenseBlock | TensorBlock


def cut_rows(block: Block, start: int, stop: int) -> Block:
    """Keep neighbouring rows; values and columns are views of the block's."""
    if isinstance(block, DenseBlock):
        return DenseBlock({layer: values[start:stop] for layer, values in block.layers.items()})
    if start == 0 and stop == block.n_rows:
        return block
    first, last = int(block.indptr[start]), int(block.indptr[stop])
    layers = {layer: values[first:last] for layer, values in block.layers.items()}
    return CsrBlock(block.indptr[start : stop + 1] - first, block.indices[first:last], layers, block.n_cols)


def dense_layers(block: Block, dtype: np.dtype[Any] | None, pool: BufferPool) -> dict[str, NDArray[Any]]:
    """Make every layer a dense array.

    Returns
    -------
    mapping of str to (n_rows, ...) array of `dtype`
    """
    if isinstance(block, DenseBlock):
        return {layer: _cast(values, dtype) for layer, values in block.layers.items()}
    found = {}
    for layer, values in block.layers.items():
        entries = np.ascontiguousarray(_cast(values, dtype))
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


FORMS: dict[str, Callable[[Block, np.dtype[Any] | None, BufferPool], Formed]] = {
    "csr": _as_stored,
    "dense": _as_dense,
    "torch": _as_tensors,
    "torch-dense": _as_dense_tensors,
}
"""How a block of numpy arrays is given to the caller; the dtype is that of the values, None for their own."""
