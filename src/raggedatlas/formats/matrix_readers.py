"""Read matrices (CSR, CSC, dense) in blocks of rows from HDF5, Zarr or memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, LimitError, SourceError
from raggedatlas.formats.containers import readable
from raggedatlas.formats.external_sort import ExternalRowSort
from raggedatlas.formats.hdf5_chunks import open_chunk_reader
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock, machine_dtype, sparse_dtype
from raggedatlas.model.protocols import NARROW, MatrixForm
from raggedatlas.store.sparse import remap_csr

BLOCK_BYTES = 256 << 20
"""Maximum size of a block in bytes; a block holds at least one row."""

ENTRIES = 1 << 20
"""Entries of a CSC matrix read at once."""

NUMBER_KINDS = "biufc"
"""NumPy dtype kinds that a matrix may have: booleans, integers, floats, complex."""


@dataclass(frozen=True, slots=True)
class MatrixLocation:
    """File and element of a matrix, for error messages."""

    uri: str
    element: str
    cell_name: Callable[[int], str]  # row number -> name of its cell

    def cell(self, row: int) -> str:
        """Return the name of a row."""
        return f"cell {self.cell_name(row)!r} (row {row:,})"


class RowReader(Protocol):
    """Protocol of matrices that are read by rows; cheap if rows are requested in ascending order.

    Readers of stored arrays have these as `arrays`, a mapping by name: ``"data"``, of sparse matrices ``"indptr"`` and
    ``"indices"`` too.
    """

    form: MatrixForm
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    n_entries: int | None

    def stop(self, start: int, stop: int) -> int:
        """Return the end of a block that begins at `start`: `stop`, or less if the block would exceed `BLOCK_BYTES`."""
        ...

    def read(self, start: int, stop: int) -> Block:
        """Read rows ``[start, stop)``."""
        ...

    def close(self) -> None:
        """Release cached data and temporary files."""
        ...


class SequentialArray:
    """Slices along the first axis of an array; in ascending order, each chunk is decoded only once.

    `array` is any object with a shape, a dtype and slicing, such as those of h5py, zarr and NumPy. `dtype` is that of
    the result; by default the array's own in native byte order.
    """

    def __init__(self, array: Any, place: MatrixLocation, dtype: np.dtype[Any] | None = None) -> None:  # noqa: ANN401
        self._array, self._place = array, place
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype = dtype or _plain_dtype(array.dtype, place)
        # Rows are read by chunks, but for arrays without any and for large ones.
        rows = (getattr(array, "chunks", None) or (0,))[0]
        # `object` makes NumPy multiply Python integers, because declared sizes can overflow int64.
        across = int(np.prod(self.shape[1:], dtype=object)) * self.dtype.itemsize
        self._step = rows if isinstance(rows, int) and 0 < rows * across <= BLOCK_BYTES else 0
        with readable(place.uri, place.element):
            self._direct = open_chunk_reader(array)
        self._cached_chunk: tuple[int, NDArray[Any]] | None = None

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)`` in native byte order."""
        with readable(self._place.uri, self._place.element):
            if self._direct is not None:
                return np.asarray(self._direct.read(start, stop), dtype=self.dtype)
            if not self._step:
                return np.asarray(self._array[start:stop], dtype=self.dtype)
            return self._read_chunk_aligned(start, stop)

    def release(self) -> None:
        """Release the cached chunk."""
        self._cached_chunk = None
        if self._direct is not None:
            self._direct.release()

    def _read_chunk_aligned(self, start: int, stop: int) -> NDArray[Any]:
        out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        row = start
        while row < stop:
            low = row - row % self._step
            if self._cached_chunk is not None and self._cached_chunk[0] == low:
                end = min(low + self._step, stop)
                out[row - start : end - start] = self._cached_chunk[1][row - low : end - low]
            # Complete chunks go straight into the result; only a chunk that is cut is cached for the next call.
            elif low == row and stop - row >= self._step:
                end = stop - stop % self._step
                self._read_into(row, end, out[row - start : end - start])
            else:
                chunk = np.empty((min(self._step, self.shape[0] - low), *self.shape[1:]), self.dtype)
                self._read_into(low, low + len(chunk), chunk)
                # `row` does not move: the next iteration copies from the chunk that is now cached.
                self._cached_chunk = (low, chunk)
                continue
            row = end
        return out

    def _read_into(self, start: int, stop: int, out: NDArray[Any]) -> None:
        direct = getattr(self._array, "read_direct", None)
        if direct is not None and out.size and out.flags.c_contiguous:
            direct(out, np.s_[start:stop])
        else:
            out[...] = self._array[start:stop]


class DenseRows:
    """A dense matrix or array of higher dimension; holds the block and one row of chunks in memory."""

    form: MatrixForm = "dense"
    n_entries: int | None = None

    def __init__(self, array: Any, place: MatrixLocation) -> None:  # noqa: ANN401
        self._rows = SequentialArray(array, place)
        self.shape, self.dtype = self._rows.shape, self._rows.dtype
        self.arrays = {"data": array}

    def stop(self, start: int, stop: int) -> int:
        """Return the end of the next block."""
        return _stop_if_dense(self, start, stop)

    def read(self, start: int, stop: int) -> DenseBlock:
        """Read rows ``[start, stop)``."""
        return DenseBlock({"values": self._rows.read(start, stop)})

    def close(self) -> None:
        """Release the cached chunk."""
        self._rows.release()


SparseArrays = Mapping[str, Any]
"""Arrays of a compressed sparse matrix by the names that files give them: ``"indptr"``, ``"indices"`` and ``"data"``."""


class CsrRows:
    """A CSR matrix of a shape ``(n_cells, n_features)``; holds the block, eight bytes per cell and one chunk of each array in memory.

    Lengths of the arrays that do not match raise `SourceError` at once, invalid row pointers when the first block is
    read, and a column index that is out of range with its block.
    """

    form: MatrixForm = "csr"

    def __init__(self, arrays: SparseArrays, shape: tuple[int, int], place: MatrixLocation) -> None:
        self.arrays, self._place = arrays, place
        self._indptr: NDArray[np.int64] | None = None
        self._indices = SequentialArray(arrays["indices"], place)
        self._data = SequentialArray(arrays["data"], place, sparse_dtype(_plain_dtype(arrays["data"].dtype, place)))
        self.shape: tuple[int, ...] = shape
        self.dtype = self._data.dtype
        self.n_entries: int | None = _entries(arrays, shape, shape[0], place)
        self.wide = needs_int64(arrays["indptr"], arrays["indices"])

    def stop(self, start: int, stop: int) -> int:
        """Return the end of the next block."""
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
            pointers = _checked_pointers(self.arrays["indptr"], self.n_entries, self._place, "row")
            n_cols = self.shape[1]
            lengths = np.diff(pointers)
            largest = int(lengths.argmax()) if len(lengths) else 0
            # Duplicates are allowed, so a row may have more entries than columns; far more would exhaust memory.
            if len(lengths) and lengths[largest] > max(4 * n_cols, 1 << 20):
                raise LimitError(
                    f"{self._place.uri}: {self._place.element} gives {self._place.cell(largest)} {int(lengths[largest]):,} entries "
                    f"in {n_cols:,} columns; the file is damaged. Write it again."
                )
            self._indptr = pointers
        return self._indptr

    def close(self) -> None:
        """Release the row pointers and cached chunks."""
        self._indptr = None
        self._indices.release()
        self._data.release()


class SortedRows(ABC):
    """Base of readers of matrices stored in another order: the first access sorts all entries by row.

    Entries beyond one band are kept in temporary files until `close`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    n_entries: int | None
    entry_bytes: int
    _sort: ExternalRowSort | None = None

    @abstractmethod
    def fill(self, sort: ExternalRowSort) -> None:
        """Add all entries to a sort."""

    def stop(self, start: int, stop: int) -> int:
        """Return the end of the next block."""
        return stop_by_entries(self._sorted_entries().indptr, start, stop, BLOCK_BYTES // self.entry_bytes)

    def read(self, start: int, stop: int) -> CsrBlock:
        """Read rows ``[start, stop)``."""
        return self._sorted_entries().read(start, stop)

    def close(self) -> None:
        """Remove the temporary files."""
        if self._sort is not None:
            self._sort.close()
            self._sort = None

    def _sorted_entries(self) -> ExternalRowSort:
        if self._sort is None:
            sort = ExternalRowSort((self.shape[0], self.shape[1]), self.dtype, self.n_entries or 0)
            try:
                self.fill(sort)
            except BaseException:
                sort.close()
                raise
            sort.finish()
            # Assigned last: after a failed pass, the next call must not take some of the entries for all.
            self._sort = sort
        return self._sort


class CscRows(SortedRows):
    """A CSC matrix that is sorted by rows in one pass.

    The pass uses about ten times `external_sort.BAND_BYTES` of memory; after it, reading uses as much as for CSR.
    Entries of a row are ordered by column.
    """

    form: MatrixForm = "csc"

    def __init__(self, arrays: SparseArrays, shape: tuple[int, int], place: MatrixLocation) -> None:
        self.arrays, self._place = arrays, place
        self._indices = SequentialArray(arrays["indices"], place)
        self._data = SequentialArray(arrays["data"], place, sparse_dtype(_plain_dtype(arrays["data"].dtype, place)))
        self.shape = shape
        self.dtype = self._data.dtype
        self.entry_bytes = self.dtype.itemsize + 4
        self.n_entries = _entries(arrays, shape, shape[1], place)
        self.wide = needs_int64(arrays["indptr"], arrays["indices"])
        self._ascends = True

    def indptr(self) -> NDArray[np.int64]:
        """Return the checked column pointers, (n_columns + 1,) int64."""
        assert self.n_entries is not None
        return _checked_pointers(self.arrays["indptr"], self.n_entries, self._place, "column")

    def rows_ascend(self) -> bool:
        """Return whether the row numbers of every column ascend, none twice; the entries are sorted for it."""
        self._sorted_entries()
        return self._ascends

    def fill(self, sort: ExternalRowSort) -> None:
        """Add all entries to a sort."""
        last = -1, -1
        for columns, rows, values in self._entries():
            step = (columns[1:] != columns[:-1]) | (rows[1:] > rows[:-1])
            self._ascends &= bool(step.all()) and last < (int(columns[0]), int(rows[0]))
            last = int(columns[-1]), int(rows[-1])
            sort.add(rows, columns, values)
        # The sort has all of them.
        self._indices.release()
        self._data.release()

    def _entries(self) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]]:
        indptr = self.indptr()
        assert self.n_entries is not None
        for start in range(0, self.n_entries, ENTRIES):
            stop = min(start + ENTRIES, self.n_entries)
            # The last column that begins at or before `start`; empty columns before it are skipped.
            first = int(np.searchsorted(indptr, start, side="right")) - 1
            last = int(np.searchsorted(indptr, stop, side="left"))
            edges = np.clip(indptr[first : last + 1], start, stop)
            columns = np.repeat(np.arange(first, last), edges[1:] - edges[:-1])
            rows = self._indices.read(start, stop)
            # `ExternalRowSort.add` relies on this check.
            wrong = np.flatnonzero((rows < 0) | (rows >= self.shape[0]))
            if len(wrong):
                raise SourceError(
                    f"{self._place.uri}: {self._place.element} has an entry in column {int(columns[wrong[0]]):,} for row "
                    f"{int(rows[wrong[0]]):,}, outside its {self.shape[0]:,} cells; the file is damaged. Write it again."
                )
            yield columns, rows.astype(np.int64, copy=False), self._data.read(start, stop)


class LazyRows:
    """A matrix given by a function that slices its rows: a view of an AnnData, a lazy array.

    `rows` returns rows ``[start, stop)`` as a sparse or dense matrix; `shape` is that of the complete matrix.
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
        """Return the end of the next block, assuming that every entry is stored."""
        return _stop_if_dense(self, start, stop)

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
        """Do nothing; no state is kept."""


class MatrixSubset:
    """Some rows and columns of a matrix, each (n,): `rows` ascend, and None is all; each subset reads the matrix again.

    Raises `CorruptError` if the matrix has fewer rows or columns than are selected from.
    """

    n_entries: int | None = None

    def __init__(self, matrix: RowReader, rows: NDArray[np.int64] | None, columns: NDArray[np.int64] | None) -> None:
        for selected, n in zip((rows, columns), matrix.shape, strict=False):
            refuse_beyond(selected, n, "A matrix")
        self._matrix, self._rows, self._columns = matrix, rows, columns
        self.form, self.dtype = matrix.form, matrix.dtype
        # Cells keep what is stored; features that are chosen are numbered anew.
        self.wide: tuple[bool, bool] = NARROW if rows is None else getattr(matrix, "wide", NARROW)
        height = matrix.shape[0] if rows is None else len(rows)
        self.shape: tuple[int, ...] = (height, *(matrix.shape[1:] if columns is None else (len(columns),)))

    def stop(self, start: int, stop: int) -> int:
        """Return the end of one step."""
        if self._rows is None or stop <= start:
            return self._matrix.stop(start, stop)
        # The rows between are read too, and count for what a step may hold.
        last = self._matrix.stop(int(self._rows[start]), int(self._rows[stop - 1]) + 1)
        return max(start + 1, int(np.searchsorted(self._rows, last)))

    def read(self, start: int, stop: int) -> Block:
        """Read rows ``[start, stop)`` of the selected ones."""
        if self._rows is None:
            return subset_block(self._matrix.read(start, stop), None, self._columns)
        rows = self._rows[start:stop]
        first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
        return subset_block(self._matrix.read(first, last), rows - first, self._columns)

    def close(self) -> None:
        """Close the matrix."""
        self._matrix.close()


def refuse_beyond(selected: NDArray[np.int64] | None, n: int, what: str) -> None:
    """Raise if rows or columns are selected that are not there: a damaged record can give a dataset the rows of another."""
    if selected is not None and len(selected) and selected[-1] >= n:
        raise CorruptError(
            f"{what} has {n:,} cells where {int(selected[-1]) + 1:,} or more are expected; run validate('deep')."
        )


def subset_block(block: Block, rows: NDArray[np.int64] | None, columns: NDArray[np.int64] | None) -> Block:
    """Return some rows and columns, each in the order given, of a block with the layer ``"values"``; None is all.

    If columns are selected, entries of a row are ordered by column.
    """
    values = block.layers["values"]
    if isinstance(block, DenseBlock):
        values = values if rows is None else values[rows]
        return DenseBlock({"values": values if columns is None else values[:, columns]})
    pointers, indices = block.indptr, block.indices
    if rows is not None:
        lengths = np.diff(pointers)[rows]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        # Source position of each entry: its position in the result, shifted to where its row begins in the block.
        entries = np.arange(starts[-1]) + np.repeat(pointers[rows] - starts[:-1], lengths)
        pointers, indices, values = starts, indices[entries], values[entries]
    if columns is None:
        return CsrBlock(pointers, indices, {"values": values}, block.n_cols)
    column_map = np.full(block.n_cols, -1, np.int64)
    column_map[columns] = np.arange(len(columns))
    pointers, indices, values = remap_csr(pointers, indices, values, column_map, len(columns))
    return CsrBlock(pointers, indices, {"values": values}, len(columns))


def needs_int64(indptr: Any, indices: Any) -> tuple[bool, bool]:  # noqa: ANN401  (arrays of any library)
    """Return whether the pointers and the indices of a sparse matrix are 64-bit."""
    return (np.dtype(indptr.dtype).itemsize == 8, np.dtype(indices.dtype).itemsize == 8)


def _plain_dtype(dtype: np.dtype[Any], place: MatrixLocation) -> np.dtype[Any]:
    if dtype.kind not in NUMBER_KINDS or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise SourceError(
            f"{place.uri}: {place.element} holds values of type {dtype}; booleans, integers, floats of up to 64 bits and "
            "complex numbers of two such floats can be read. Cast it, or leave it out."
        )
    return machine_dtype(dtype)


def _entries(arrays: SparseArrays, shape: tuple[int, int], n_major: int, place: MatrixLocation) -> int:
    n_data, n_indices, n_pointers = (tuple(arrays[name].shape) for name in ("data", "indices", "indptr"))
    if len(n_data) != 1 or n_data != n_indices or n_pointers != (n_major + 1,):
        raise SourceError(
            f"{place.uri}: {place.element} has {n_data} values, {n_indices} indices and {n_pointers} pointers; for shape "
            f"{shape} there must be as many values as indices and {n_major + 1:,} pointers. Write the file again."
        )
    for name, array in (("indices", arrays["indices"]), ("pointers", arrays["indptr"])):
        if np.dtype(array.dtype).kind not in "iu":
            raise SourceError(f"{place.uri}: {place.element} has {name} of type {array.dtype}; expected integers.")
    return int(n_data[0])


def _checked_pointers(stored: Any, n_entries: int, place: MatrixLocation, what: str) -> NDArray[np.int64]:  # noqa: ANN401
    with readable(place.uri, place.element):
        pointers: NDArray[np.int64] = np.asarray(stored[...]).astype(np.int64)
    # uint64 beyond int64 has become negative and counts as a decrease; `prepend` includes the first pointer.
    wrong = np.flatnonzero(np.diff(pointers, prepend=0) < 0)
    if pointers[0] == 0 and pointers[-1] == n_entries and not len(wrong):
        return pointers
    if pointers[0] != 0:
        problem = f"start at {int(pointers[0]):,} instead of 0"
    elif len(wrong):
        row = int(wrong[0]) - 1
        problem = f"decrease at {place.cell(row) if what == 'row' else f'column {row:,}'}"
    else:
        over = np.flatnonzero(pointers > n_entries)
        row = int(over[0]) - 1 if len(over) else len(pointers) - 2
        problem = f"end at {int(pointers[-1]):,} for {n_entries:,} entries" + (
            f", wrong from {place.cell(row)} on" if what == "row" else ""
        )
    raise SourceError(
        f"{place.uri}: {place.element} has {what} pointers that {problem}; the file is damaged or was cut short. Write it again."
    )


def _check_columns(
    indices: NDArray[Any], pointers: NDArray[np.int64], start: int, n_cols: int, place: MatrixLocation
) -> None:
    # Viewed as unsigned, a negative index exceeds any number of columns.
    if not len(indices) or int(indices.view(f"u{indices.dtype.itemsize}").max()) < n_cols:
        return
    entry = int(np.flatnonzero((indices < 0) | (indices >= n_cols))[0])
    row = start + int(np.searchsorted(pointers, entry, side="right")) - 1
    raise SourceError(
        f"{place.uri}: {place.element} has an entry of {place.cell(row)} in column {int(indices[entry]):,}, outside its "
        f"{n_cols:,} columns; the file is damaged. Write it again."
    )


def _stop_if_dense(rows: RowReader, start: int, stop: int) -> int:
    """Return the end of a block of rows of which every entry is stored."""
    row = max(1, int(np.prod(rows.shape[1:], dtype=object)) * rows.dtype.itemsize)
    return min(stop, start + max(1, BLOCK_BYTES // row))


def stop_by_entries(indptr: NDArray[np.int64], start: int, stop: int, limit: int) -> int:
    """Return the end of a block of rows from `start` with at most `limit` entries and at least one row, at most `stop`."""
    if indptr[stop] - indptr[start] <= limit:
        return stop
    reached = int(np.searchsorted(indptr, indptr[start] + limit, side="right")) - 1
    return min(stop, max(start + 1, reached))
