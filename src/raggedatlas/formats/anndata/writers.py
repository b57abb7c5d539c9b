"""Matrices appended block by block in AnnData's encodings."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SchemaError
from raggedatlas.formats.external_sort import ExternalRowSort
from raggedatlas.formats.output_files import OutputFile
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.model.contracts import SinkMatrix

ENTRIES = 1 << 20
"""Entries of a CSC matrix that are turned at once."""

NARROW_MOST = np.iinfo(np.int32).max
"""Most entries that pointers of 32 bits can count."""


class MatrixWriter(Protocol):
    """A matrix that is being written."""

    matrix: SinkMatrix

    def append(self, block: Block) -> None:
        """Take rows."""
        ...

    def finish(self) -> None:
        """Write what waits and what can only be known at the end."""
        ...

    def close(self) -> None:
        """Let go of temporary files."""
        ...


class _Compressed:
    """The group of a sparse matrix: values and minor indices are appended, pointers wait in memory (eight bytes each).

    Pointers and indices are int32, as SciPy makes them, unless more entries or columns need int64 or it is asked for.
    """

    def __init__(self, target: OutputFile, matrix: SinkMatrix, encoding: str, n_minor: int) -> None:
        self._target, self._key = target, matrix.key
        self._wide = matrix.wide[0]
        self._index = np.dtype(np.int32 if n_minor < 2**31 and not matrix.wide[1] else np.int64)
        self._small = n_minor < 2**31
        group = target.group(matrix.key, (encoding, "0.1.0"))
        group.attrs["shape"] = list(matrix.shape) if hasattr(group, "store") else np.array(matrix.shape, np.int64)
        length = (matrix.n_entries,) if matrix.exact and matrix.n_entries is not None else None
        self._data = target.array(f"{matrix.key}/data", matrix.dtype, length)
        self._indices = target.array(f"{matrix.key}/indices", self._index, length)
        self._length = length
        self._pointers = [np.zeros(1, np.int64)]

    def append(self, pointers: NDArray[np.int64], indices: NDArray[Any], values: NDArray[Any]) -> None:
        """Take rows (or columns) whose pointers start at 0."""
        self._pointers.append(pointers[1:] + self._pointers[-1][-1])
        self._data.append(values)
        self._indices.append(indices.astype(self._index, copy=False))

    def finish(self) -> None:
        """Write the rest and the pointers."""
        pointers = np.concatenate(self._pointers)
        if self._length not in (None, (pointers[-1],)):
            raise SchemaError(
                f"{self._key} received {pointers[-1]:,} of its {self._length[0]:,} entries; write them all before commit()."
            )
        self._data.flush()
        self._indices.flush()
        small = pointers[-1] <= NARROW_MOST and self._small and not self._wide
        stored = pointers.astype(np.int32 if small else np.int64)
        appender = self._target.array(f"{self._key}/indptr", stored.dtype, stored.shape)
        appender.append(stored)
        appender.flush()


class CsrWriter:
    """A CSR matrix, appended row by row.

    Parameters
    ----------
    target : OutputFile
        Where to.
    matrix : SinkMatrix
        What it is.
    """

    def __init__(self, target: OutputFile, matrix: SinkMatrix) -> None:
        _check_axes(matrix)
        self.matrix = matrix
        self._group = _Compressed(target, matrix, "csr_matrix", matrix.shape[1])
        self._n_rows = 0

    def append(self, block: Block) -> None:
        """Take rows of a `CsrBlock` of the announced width and type."""
        rows = _csr(block, self.matrix)
        self._group.append(rows.indptr, rows.indices, _cast(rows.layers["values"], self.matrix))
        self._n_rows += rows.n_rows

    def finish(self) -> None:
        """Write the rest and the row pointers."""
        _check_height(self.matrix, self._n_rows)
        self._group.finish()

    def close(self) -> None:
        """Keep nothing."""


class CscWriter:
    """A CSC matrix that comes by rows; entries beyond one band wait in temporary files until `finish`.

    Parameters
    ----------
    target : OutputFile
        Where to.
    matrix : SinkMatrix
        What it is.
    """

    def __init__(self, target: OutputFile, matrix: SinkMatrix) -> None:
        _check_axes(matrix)
        self.matrix = matrix
        self._group = _Compressed(target, matrix, "csc_matrix", matrix.shape[0])
        n_rows, n_columns = matrix.shape
        expected = min(n_rows * n_columns, 1 << 30) if matrix.n_entries is None else matrix.n_entries
        self._spill = ExternalRowSort((n_columns, n_rows), matrix.dtype, expected)
        self._n_rows = 0

    def append(self, block: Block) -> None:
        """Take rows of a `CsrBlock` of the announced width and type."""
        rows = _csr(block, self.matrix)
        values = _cast(rows.layers["values"], self.matrix)
        numbers = np.repeat(np.arange(self._n_rows, self._n_rows + rows.n_rows), np.diff(rows.indptr))
        for start in range(0, len(numbers), ENTRIES):
            part = slice(start, start + ENTRIES)
            self._spill.add(rows.indices[part].astype(np.int64, copy=False), numbers[part], values[part])
        self._n_rows += rows.n_rows

    def finish(self) -> None:
        """Write all columns and their pointers."""
        _check_height(self.matrix, self._n_rows)
        self._spill.finish()
        start, n_columns = 0, self.matrix.shape[1]
        while start < n_columns:
            reached = int(np.searchsorted(self._spill.indptr, self._spill.indptr[start] + ENTRIES, side="right")) - 1
            stop = min(n_columns, max(start + 1, reached))
            block = self._spill.read(start, stop)
            self._group.append(block.indptr, block.indices, block.layers["values"])
            start = stop
        self.close()
        self._group.finish()

    def close(self) -> None:
        """Remove the temporary files."""
        self._spill.close()


class DenseWriter:
    """A dense array of two or more axes.

    Parameters
    ----------
    target : OutputFile
        Where to.
    matrix : SinkMatrix
        What it is.
    """

    def __init__(self, target: OutputFile, matrix: SinkMatrix) -> None:
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

    def close(self) -> None:
        """Keep nothing."""


WRITERS: dict[str, Callable[[OutputFile, SinkMatrix], MatrixWriter]] = {
    "csr": CsrWriter,
    "csc": CscWriter,
    "dense": DenseWriter,
}
"""How a matrix is to be stored -> what writes it."""


def _check_axes(matrix: SinkMatrix) -> None:
    if len(matrix.shape) != 2:
        raise SchemaError(f"{matrix.key} has shape {matrix.shape}; a sparse matrix has two axes.")


def _csr(block: Block, matrix: SinkMatrix) -> CsrBlock:
    if not isinstance(block, CsrBlock) or block.n_cols != matrix.shape[1]:
        raise SchemaError(f"{matrix.key} takes CSR blocks of {matrix.shape[1]:,} columns.")
    return block


def _cast(values: NDArray[Any], matrix: SinkMatrix) -> NDArray[Any]:
    if not np.can_cast(values.dtype, matrix.dtype, "safe"):
        raise SchemaError(f"{matrix.key} was announced as {matrix.dtype}, which cannot take {values.dtype} unchanged.")
    return values.astype(matrix.dtype, copy=False)


def _check_height(matrix: SinkMatrix, n_rows: int) -> None:
    if n_rows != matrix.shape[0]:
        raise SchemaError(
            f"{matrix.key} received {n_rows:,} of its {matrix.shape[0]:,} rows; write them all before commit()."
        )
