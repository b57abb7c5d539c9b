"""Matrices appended block by block in AnnData's encodings."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SchemaError
from raggedatlas.formats.targets import Target
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.model.contracts import SinkMatrix


class MatrixWriter(Protocol):
    """A matrix that is being written."""

    matrix: SinkMatrix

    def append(self, block: Block) -> None:
        """Take rows."""
        ...

    def finish(self) -> None:
        """Write what waits and what can only be known at the end."""
        ...


class CsrWriter:
    """A CSR matrix: values and columns are appended, row pointers wait in memory (eight bytes per row).

    Pointers are int32, as SciPy makes them, while the entries allow, int64 beyond 2**31 - 1 entries.

    Parameters
    ----------
    target : Target
        Where to.
    matrix : SinkMatrix
        What it is.
    """

    def __init__(self, target: Target, matrix: SinkMatrix) -> None:
        if len(matrix.shape) != 2:
            raise SchemaError(f"{matrix.key} has shape {matrix.shape}; a sparse matrix has two axes.")
        self.matrix, self._target = matrix, target
        self._index = np.dtype(np.int32 if matrix.shape[1] < 2**31 else np.int64)
        group = target.group(matrix.key, ("csr_matrix", "0.1.0"))
        group.attrs["shape"] = list(matrix.shape) if hasattr(group, "store") else np.array(matrix.shape, np.int64)
        self._data = target.array(f"{matrix.key}/data", matrix.dtype, None)
        self._indices = target.array(f"{matrix.key}/indices", self._index, None)
        self._pointers = [np.zeros(1, np.int64)]
        self._n_rows = 0

    def append(self, block: Block) -> None:
        """Take rows of a `CsrBlock` of the announced width and type."""
        if not isinstance(block, CsrBlock) or block.n_cols != self.matrix.shape[1]:
            raise SchemaError(f"{self.matrix.key} takes CSR blocks of {self.matrix.shape[1]:,} columns.")
        self._pointers.append(block.indptr[1:] + self._pointers[-1][-1])
        self._data.append(_cast(block.layers["values"], self.matrix))
        self._indices.append(block.indices.astype(self._index, copy=False))
        self._n_rows += block.n_rows

    def finish(self) -> None:
        """Write the rest and the row pointers."""
        _check_height(self.matrix, self._n_rows)
        self._data.flush()
        self._indices.flush()
        pointers = np.concatenate(self._pointers)
        small = pointers[-1] < 2**31 and self._index == np.int32
        stored = pointers.astype(np.int32 if small else np.int64)
        appender = self._target.array(f"{self.matrix.key}/indptr", stored.dtype, None)
        appender.append(stored)
        appender.flush()


class DenseWriter:
    """A dense array of two or more axes.

    Parameters
    ----------
    target : Target
        Where to.
    matrix : SinkMatrix
        What it is.
    """

    def __init__(self, target: Target, matrix: SinkMatrix) -> None:
        self.matrix = matrix
        target.group(matrix.key.rpartition("/")[0])
        self._rows = target.array(matrix.key, matrix.dtype, matrix.shape)
        attributes = self._rows.array.attrs
        attributes["encoding-type"], attributes["encoding-version"] = "array", "0.2.0"

    def append(self, block: Block) -> None:
        """Take rows of a `DenseBlock` of the announced shape and type."""
        if not isinstance(block, DenseBlock) or block.layers["values"].shape[1:] != self.matrix.shape[1:]:
            raise SchemaError(f"{self.matrix.key} takes dense rows of shape {self.matrix.shape[1:]}.")
        self._rows.append(_cast(block.layers["values"], self.matrix))

    def finish(self) -> None:
        """Write the rest."""
        _check_height(self.matrix, self._rows.n_rows)
        self._rows.flush()


WRITERS: dict[str, Callable[[Target, SinkMatrix], MatrixWriter]] = {"csr": CsrWriter, "dense": DenseWriter}
"""Form of the blocks -> what writes them."""


def _cast(values: NDArray[Any], matrix: SinkMatrix) -> NDArray[Any]:
    if not np.can_cast(values.dtype, matrix.dtype, "safe"):
        raise SchemaError(f"{matrix.key} was announced as {matrix.dtype}, which cannot take {values.dtype} unchanged.")
    return values.astype(matrix.dtype, copy=False)


def _check_height(matrix: SinkMatrix, n_rows: int) -> None:
    if n_rows != matrix.shape[0]:
        raise SchemaError(
            f"{matrix.key} received {n_rows:,} of its {matrix.shape[0]:,} rows; write them all before commit()."
        )
