"""Readers of matrices in row blocks: CSR, CSC and dense, whether in HDF5, Zarr or memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import LimitError, SourceError
from raggedatlas.formats.containers import readable
from raggedatlas.formats.external_sort import ExternalRowSort
from raggedatlas.formats.hdf5_chunks import open_chunk_reader
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock, sparse_dtype
from raggedatlas.model.protocols import NARROW, MatrixForm

BLOCK_BYTES = 256 << 20
"""A step down the rows stops early rather than take more than this (one row is always taken)."""

ENTRIES = 1 << 20
"""Entries of a CSC matrix read at once."""

NUMBER_KINDS = "biufc"
"""NumPy's kinds of numbers and booleans, which matrices hold."""


@dataclass(frozen=True, slots=True)
class MatrixLocation:
    """Where a matrix stands, for messages.

    Parameters
    ----------
    uri : str
        The file.
    element : str
        The matrix in it.
    cell_name : callable
        Row -> the name of its cell.
    """

    uri: str
    element: str
    cell_name: Callable[[int], str]

    def cell(self, row: int) -> str:
        """Name one row."""
        return f"cell {self.cell_name(row)!r} (row {row:,})"


class RowReader(Protocol):
    """A matrix that can be read by rows; cheap when the rows are asked for downward."""

    form: MatrixForm
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    n_entries: int | None

    def stop(self, start: int, stop: int) -> int:
        """Return how far to read from `start`: `stop`, or earlier where that would take more than `BLOCK_BYTES`."""
        ...

    def read(self, start: int, stop: int) -> Block:
        """Read rows ``[start, stop)``."""
        ...

    def close(self) -> None:
        """Let go of what was kept."""
        ...


class SequentialArray:
    """Slices of an array's first axis; walked downward, each chunk is decoded once.

    Parameters
    ----------
    array : h5py.Dataset, zarr.Array, numpy.ndarray or alike
        Anything with a shape, a dtype and slices.
    place : MatrixLocation
        For messages.
    dtype : numpy.dtype, optional
        Of what is returned; the array's own in the machine's byte order if None.
    """

    def __init__(self, array: Any, place: MatrixLocation, dtype: np.dtype[Any] | None = None) -> None:  # noqa: ANN401
        self._array, self._place = array, place
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype = dtype or _plain_dtype(array.dtype, place)
        self._step = self._chunk_rows()
        with readable(place.uri, place.element):
            self._direct = open_chunk_reader(array)
        self._held: tuple[int, NDArray[Any]] | None = None

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)`` in the machine's byte order."""
        with readable(self._place.uri, self._place.element):
            if self._direct is not None:
                return np.asarray(self._direct.read(start, stop), dtype=self.dtype)
            if not self._step:
                return np.asarray(self._array[start:stop], dtype=self.dtype)
            return self._aligned(start, stop)

    def _chunk_rows(self) -> int:
        chunks = getattr(self._array, "chunks", None)
        if not chunks or not isinstance(chunks[0], int):
            return 0
        across = int(np.prod(self.shape[1:], dtype=object)) * self.dtype.itemsize
        return chunks[0] if 0 < chunks[0] * across <= BLOCK_BYTES else 0

    def _aligned(self, start: int, stop: int) -> NDArray[Any]:
        out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        at = start
        while at < stop:
            low = at - at % self._step
            if self._held is not None and self._held[0] == low:
                end = min(low + self._step, stop)
                out[at - start : end - start] = self._held[1][at - low : end - low]
            elif low == at and stop - at >= self._step:
                end = stop - stop % self._step
                self._into(at, end, out[at - start : end - start])
            else:
                chunk = np.empty((min(self._step, self.shape[0] - low), *self.shape[1:]), self.dtype)
                self._into(low, low + len(chunk), chunk)
                self._held = (low, chunk)
                continue
            at = end
        return out

    def _into(self, start: int, stop: int, out: NDArray[Any]) -> None:
        direct = getattr(self._array, "read_direct", None)
        if direct is not None and out.size and out.flags.c_contiguous:
            direct(out, np.s_[start:stop])
        else:
            out[...] = self._array[start:stop]


class DenseRows:
    """A dense matrix, or an array of more axes; memory: the block and one row of chunks.

    Parameters
    ----------
    array : array
        As `SequentialArray` takes it.
    place : MatrixLocation
        For messages.
    """

    form: MatrixForm = "dense"
    n_entries: int | None = None

    def __init__(self, array: Any, place: MatrixLocation) -> None:  # noqa: ANN401
        self._rows = SequentialArray(array, place)
        self.shape, self.dtype = self._rows.shape, self._rows.dtype

    def stop(self, start: int, stop: int) -> int:
        """Return how far one step may go."""
        row = max(1, int(np.prod(self.shape[1:], dtype=object)) * self.dtype.itemsize)
        return min(stop, start + max(1, BLOCK_BYTES // row))

    def read(self, start: int, stop: int) -> DenseBlock:
        """Read rows ``[start, stop)``."""
        return DenseBlock({"values": self._rows.read(start, stop)})

    def close(self) -> None:
        """Keep nothing."""


@dataclass(frozen=True, slots=True)
class SparseArrays:
    """The three arrays of a compressed sparse matrix, and its shape as ``(n_cells, n_features)``."""

    indptr: Any
    indices: Any
    data: Any
    shape: tuple[int, int]


class CsrRows:
    """A CSR matrix; memory: the block, eight bytes per cell, one chunk of each array.

    Parameters
    ----------
    arrays : SparseArrays
        Its parts.
    place : MatrixLocation
        For messages.

    Raises
    ------
    SourceError
        If the lengths of the parts do not fit; later, when the first block is read, if the row pointers are wrong, and
        with each block if a column is out of range.
    """

    form: MatrixForm = "csr"

    def __init__(self, arrays: SparseArrays, place: MatrixLocation) -> None:
        self._place = place
        self._pointers = arrays.indptr
        self._indptr: NDArray[np.int64] | None = None
        self._indices = SequentialArray(arrays.indices, place)
        self._data = SequentialArray(arrays.data, place, sparse_dtype(_plain_dtype(arrays.data.dtype, place)))
        self.shape: tuple[int, ...] = arrays.shape
        self.dtype = self._data.dtype
        self.n_entries: int | None = _entries(arrays, arrays.shape[0], place)
        self.wide = needs_int64(arrays.indptr, arrays.indices)

    def stop(self, start: int, stop: int) -> int:
        """Return how far one step may go."""
        entry = self.dtype.itemsize + self._indices.dtype.itemsize
        return stop_by_entries(self.indptr(), start, stop, BLOCK_BYTES // entry)

    def read(self, start: int, stop: int) -> CsrBlock:
        """Read rows ``[start, stop)``."""
        indptr = self.indptr()
        first, last = int(indptr[start]), int(indptr[stop])
        pointers = indptr[start : stop + 1] - first
        indices = self._indices.read(first, last)
        _check_columns(indices, pointers, start, self.shape[1], self._place)
        return CsrBlock(pointers, indices, {"values": self._data.read(first, last)}, self.shape[1])

    def indptr(self) -> NDArray[np.int64]:
        """Return the checked row pointers, (n_cells + 1,) int64."""
        if self._indptr is None:
            assert self.n_entries is not None
            pointers = _checked_pointers(self._pointers, self.n_entries, self._place, "row")
            _check_row_lengths(pointers, self.shape[1], self._place)
            self._indptr = pointers
        return self._indptr

    def close(self) -> None:
        """Keep nothing."""


class CscRows:
    """A CSC matrix turned to rows in one pass; memory: about ten times `spill.BAND_BYTES`, then as for CSR.

    Entries beyond one band wait in temporary files until `close`. Entries of a row come by column.

    Parameters
    ----------
    arrays : SparseArrays
        Its parts; `indices` are rows.
    place : MatrixLocation
        For messages.
    """

    form: MatrixForm = "csc"

    def __init__(self, arrays: SparseArrays, place: MatrixLocation) -> None:
        self._arrays, self._place = arrays, place
        self._indices = SequentialArray(arrays.indices, place)
        self._data = SequentialArray(arrays.data, place, sparse_dtype(_plain_dtype(arrays.data.dtype, place)))
        self._spill: ExternalRowSort | None = None
        self.shape: tuple[int, ...] = arrays.shape
        self.dtype = self._data.dtype
        self.n_entries: int | None = _entries(arrays, arrays.shape[1], place)
        self.wide = needs_int64(arrays.indptr, arrays.indices)

    def stop(self, start: int, stop: int) -> int:
        """Return how far one step may go."""
        return stop_by_entries(self._turned().indptr, start, stop, BLOCK_BYTES // (self.dtype.itemsize + 4))

    def read(self, start: int, stop: int) -> CsrBlock:
        """Read rows ``[start, stop)``."""
        return self._turned().read(start, stop)

    def close(self) -> None:
        """Remove the temporary files."""
        if self._spill is not None:
            self._spill.close()
            self._spill = None

    def _turned(self) -> ExternalRowSort:
        if self._spill is None:
            spill = ExternalRowSort(self._arrays.shape, self.dtype, self.n_entries or 0)
            try:
                for columns, rows, values in self._entries():
                    spill.add(rows, columns, values)
            except BaseException:
                spill.close()
                raise
            spill.finish()
            self._spill = spill
        return self._spill

    def _entries(self) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]]:
        assert self.n_entries is not None
        indptr = _checked_pointers(self._arrays.indptr, self.n_entries, self._place, "column")
        for start in range(0, self.n_entries, ENTRIES):
            stop = min(start + ENTRIES, self.n_entries)
            first = int(np.searchsorted(indptr, start, side="right")) - 1
            last = int(np.searchsorted(indptr, stop, side="left"))
            edges = np.clip(indptr[first : last + 1], start, stop)
            columns = np.repeat(np.arange(first, last), edges[1:] - edges[:-1])
            rows = self._indices.read(start, stop)
            wrong = np.flatnonzero((rows < 0) | (rows >= self.shape[0]))
            if len(wrong):
                raise SourceError(
                    f"{self._place.uri}: {self._place.element} has an entry in column {int(columns[wrong[0]]):,} for row "
                    f"{int(rows[wrong[0]]):,}, outside its {self.shape[0]:,} cells; the file is damaged. Write it again."
                )
            yield columns, rows.astype(np.int64, copy=False), self._data.read(start, stop)


class LazyRows:
    """Anything whose row slices SciPy or NumPy understand: a view of an AnnData, a lazy array.

    Parameters
    ----------
    rows : callable
        ``(start, stop)`` -> a sparse or dense matrix of those rows.
    shape : tuple of int
        Of the whole.
    place : MatrixLocation
        For messages.

    Raises
    ------
    SourceError
        If the rows are neither sparse nor dense numbers.
    """

    n_entries: int | None = None

    def __init__(self, rows: Callable[[int, int], Any], shape: tuple[int, ...], place: MatrixLocation) -> None:
        from scipy.sparse import issparse

        self._rows, self._place = rows, place
        self.shape = shape
        first: Any = rows(0, min(1, shape[0]))
        sparse: MatrixForm = "csc" if getattr(first, "format", "") == "csc" else "csr"
        self.form: MatrixForm = sparse if bool(issparse(first)) else "dense"
        self.dtype = _plain_dtype(np.dtype(getattr(first, "dtype", object)), place)
        self.wide = needs_int64(first.indptr, first.indices) if self.form != "dense" else NARROW

    def stop(self, start: int, stop: int) -> int:
        """Return how far one step may go, as if every entry were stored."""
        row = max(1, int(np.prod(self.shape[1:], dtype=object)) * self.dtype.itemsize)
        return min(stop, start + max(1, BLOCK_BYTES // row))

    def read(self, start: int, stop: int) -> Block:
        """Read rows ``[start, stop)``."""
        part = self._rows(start, stop)
        if self.form == "dense":
            return DenseBlock({"values": np.asarray(part, dtype=self.dtype)})
        part = part.tocsr()
        pointers = part.indptr.astype(np.int64)
        _check_columns(part.indices, pointers, start, self.shape[1], self._place)
        return CsrBlock(pointers, part.indices, {"values": part.data}, self.shape[1])

    def close(self) -> None:
        """Keep nothing."""


class ColumnSubset:
    """Some columns of a matrix that is read as CSR, renumbered in their order.

    Parameters
    ----------
    rows : RowReader
        All columns; read anew for each choice.
    columns : (n,) int64
        Which ones.
    """

    form: MatrixForm = "csr"
    n_entries: int | None = None

    def __init__(self, rows: RowReader, columns: NDArray[np.int64]) -> None:
        self._all = rows
        self._to = np.full(rows.shape[1], -1, np.int64)
        self._to[columns] = np.arange(len(columns))
        self.shape: tuple[int, ...] = (rows.shape[0], len(columns))
        self.dtype = rows.dtype

    def stop(self, start: int, stop: int) -> int:
        """Return how far one step may go."""
        return self._all.stop(start, stop)

    def read(self, start: int, stop: int) -> CsrBlock:
        """Read rows ``[start, stop)``."""
        block = self._all.read(start, stop)
        assert isinstance(block, CsrBlock)
        columns = self._to[block.indices]
        kept = columns >= 0
        pointers = np.concatenate([[0], np.cumsum(kept)])[block.indptr]
        return CsrBlock(pointers, columns[kept], {"values": block.layers["values"][kept]}, self.shape[1])

    def close(self) -> None:
        """Let go of what all columns kept."""
        self._all.close()


def needs_int64(indptr: Any, indices: Any) -> tuple[bool, bool]:  # noqa: ANN401  (arrays of any library)
    """Say whether the pointers and the indices of a sparse matrix take 64 bits."""
    return (np.dtype(indptr.dtype).itemsize == 8, np.dtype(indices.dtype).itemsize == 8)


def _plain_dtype(dtype: np.dtype[Any], place: MatrixLocation) -> np.dtype[Any]:
    if dtype.kind not in NUMBER_KINDS or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise SourceError(
            f"{place.uri}: {place.element} holds values of type {dtype}; booleans, integers, floats of up to 64 bits and "
            "complex numbers of two such floats can be read. Cast it, or leave it out."
        )
    return dtype.newbyteorder("=")


def _entries(arrays: SparseArrays, n_major: int, place: MatrixLocation) -> int:
    n_data, n_indices, n_pointers = (tuple(a.shape) for a in (arrays.data, arrays.indices, arrays.indptr))
    if len(n_data) != 1 or n_data != n_indices or n_pointers != (n_major + 1,):
        raise SourceError(
            f"{place.uri}: {place.element} has {n_data} values, {n_indices} indices and {n_pointers} pointers; for shape "
            f"{arrays.shape} there must be as many values as indices and {n_major + 1:,} pointers. Write the file again."
        )
    for name, array in (("indices", arrays.indices), ("pointers", arrays.indptr)):
        if np.dtype(array.dtype).kind not in "iu":
            raise SourceError(f"{place.uri}: {place.element} has {name} of type {array.dtype}, where integers belong.")
    return int(n_data[0])


def _checked_pointers(stored: Any, n_entries: int, place: MatrixLocation, what: str) -> NDArray[np.int64]:  # noqa: ANN401
    with readable(place.uri, place.element):
        pointers: NDArray[np.int64] = np.asarray(stored[...]).astype(np.int64)
    wrong = np.flatnonzero(np.diff(pointers, prepend=0) < 0)
    if pointers[0] == 0 and pointers[-1] == n_entries and not len(wrong):
        return pointers
    if pointers[0] != 0:
        said = f"start at {int(pointers[0]):,} instead of 0"
    elif len(wrong):
        row = int(wrong[0]) - 1
        said = f"go down at {place.cell(row) if what == 'row' else f'column {row:,}'}"
    else:
        over = np.flatnonzero(pointers > n_entries)
        at = int(over[0]) - 1 if len(over) else len(pointers) - 2
        said = f"end at {int(pointers[-1]):,} for {n_entries:,} entries" + (
            f", wrong from {place.cell(at)} on" if what == "row" else ""
        )
    raise SourceError(
        f"{place.uri}: {place.element} has {what} pointers that {said}; the file is damaged or was cut short. Write it again."
    )


def _check_row_lengths(pointers: NDArray[np.int64], n_cols: int, place: MatrixLocation) -> None:
    lengths = np.diff(pointers)
    largest = int(lengths.argmax()) if len(lengths) else 0
    if len(lengths) and lengths[largest] > max(4 * n_cols, 1 << 20):
        raise LimitError(
            f"{place.uri}: {place.element} gives {place.cell(largest)} {int(lengths[largest]):,} entries "
            f"in {n_cols:,} columns; the file is damaged. Write it again."
        )


def _check_columns(
    indices: NDArray[Any], pointers: NDArray[np.int64], start: int, n_cols: int, place: MatrixLocation
) -> None:
    if not len(indices) or _highest(indices) < n_cols:
        return
    entry = int(np.flatnonzero((indices < 0) | (indices >= n_cols))[0])
    row = start + int(np.searchsorted(pointers, entry, side="right")) - 1
    raise SourceError(
        f"{place.uri}: {place.element} has an entry of {place.cell(row)} in column {int(indices[entry]):,}, outside its "
        f"{n_cols:,} columns; the file is damaged. Write it again."
    )


def _highest(indices: NDArray[Any]) -> int:
    """Return the highest index; what is below zero counts as more than any number of columns."""
    return int(indices.view(f"u{indices.dtype.itemsize}").max())


def stop_by_entries(indptr: NDArray[np.int64], start: int, stop: int, limit: int) -> int:
    """Return how far rows from `start` go, at most to `stop`, with no more entries than `limit`; at least one row."""
    if indptr[stop] - indptr[start] <= limit:
        return stop
    reached = int(np.searchsorted(indptr, indptr[start] + limit, side="right")) - 1
    return min(stop, max(start + 1, reached))
