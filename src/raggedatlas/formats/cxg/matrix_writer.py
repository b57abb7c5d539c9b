"""Writer of the expression matrix from rows: dense, sparse in tiles, or sparse once by rows and once by columns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import ValuesError
from raggedatlas.formats.cxg.array_writer import (
    SPARSE_TILE,
    DenseBandWriter,
    matrix_spec,
    open_sparse_writer,
    split_spec,
)
from raggedatlas.formats.cxg.matrix_reader import DenseArray, LazyArray, SparseRowReader
from raggedatlas.formats.cxg.options import CxgOptions
from raggedatlas.formats.cxg.schema import ANONYMOUS, OBS, VAR, XC, XR, X
from raggedatlas.formats.external_sort import ExternalColumnSort, merge_slices
from raggedatlas.formats.matrix_readers import DenseRows, MatrixLocation, RowReader
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock

READ_ENTRIES = 1 << 21
"""Number of entries that are read back at once, in complete rows."""


class LayoutWriter(Protocol):
    """Writer of a matrix in one layout."""

    def append(self, block: CsrBlock) -> None:
        """Append rows: float32 values without zeros, sorted by column, without duplicates."""
        ...

    def finish(self) -> None:
        """Write the remaining entries."""
        ...

    def abort(self) -> None:
        """Release files without finishing the matrix."""
        ...

    def rows(self) -> RowReader:
        """Return a reader of the written matrix."""
        ...


class MatrixWriter:
    """Writer of the rows of a matrix, which chooses the layout from the first rows.

    Parameters
    ----------
    folder, work : Path
        Folder of the CXG, and path for temporary files.
    shape : tuple of int
        ``(n_cells, n_features)``.
    n_entries : int or None
        Maximum number of entries, if known.
    options : CxgOptions
        Options of the writer.

    Attributes
    ----------
    n_nonfinite : int
        Number of NaN and infinite values.
    first_nonfinite : tuple of int, optional
        Cell and feature of the first of them.
    """

    def __init__(
        self, folder: Path, work: Path, shape: tuple[int, int], n_entries: int | None, options: CxgOptions
    ) -> None:
        self._folder, self._work, self.shape = folder, work, shape
        self._n_entries, self._options = n_entries, options
        self._writer: LayoutWriter | None = None
        self.n_rows = 0
        self.n_nonfinite = 0
        self.first_nonfinite: tuple[int, int] | None = None

    def append(self, block: Block) -> None:
        """Append rows.

        Raises
        ------
        ValuesError
            C03 for a value that float32 cannot represent.
        """
        rows = normalize_block(block, self.n_rows)
        if self._writer is None:
            self._writer = self._open_writer(len(rows.indices), rows.n_rows)
        self._count_nonfinite(rows)
        self._writer.append(rows)
        self.n_rows += rows.n_rows

    def _count_nonfinite(self, block: CsrBlock) -> None:
        nonfinite = np.flatnonzero(~np.isfinite(block.layers["values"]))
        if len(nonfinite) and self.first_nonfinite is None:
            # `right` skips empty rows, which share the pointer of the entry but do not contain it.
            row = int(np.searchsorted(block.indptr, nonfinite[0], side="right")) - 1
            self.first_nonfinite = (self.n_rows + row, int(block.indices[nonfinite[0]]))
        self.n_nonfinite += len(nonfinite)

    def finish(self) -> None:
        """Write the remaining entries."""
        if self._writer is None:
            self._writer = self._open_writer(0, 0)
        self._writer.finish()

    def abort(self) -> None:
        """Release open files."""
        if self._writer is not None:
            self._writer.abort()

    def blocks(self) -> Iterator[Block]:
        """Iterate over the written matrix, in blocks of rows."""
        assert self._writer is not None
        reader = self._writer.rows()
        per_row = max(1, (reader.n_entries or self.shape[0] * self.shape[1]) // self.shape[0])
        step = max(1, READ_ENTRIES // per_row)
        try:
            for start in range(0, self.shape[0], step):
                yield reader.read(start, min(start + step, self.shape[0]))
        finally:
            reader.close()

    def _open_writer(self, n_entries: int, n_rows: int) -> LayoutWriter:
        """Open the writer of the chosen layout, given the numbers of entries and rows of the first block."""
        if self._n_entries is not None:
            n_entries, n_rows = self._n_entries, self.shape[0]
        percentage = 100 * n_entries / (n_rows * self.shape[1]) if n_rows else 0.0
        sparse = self._options.layout == "sparse"
        if self._options.layout == "auto":
            sparse = percentage < self._options.sparse_below
        if not sparse:
            return _DenseLayout(self._folder, self.shape)
        layout = _SplitLayout if self._options.profile == "0.3.0" else _TiledLayout
        return layout(self._folder, self._work, self.shape)


class _DenseLayout:
    def __init__(self, folder: Path, shape: tuple[int, int]) -> None:
        self._path = folder / X
        self._bands = DenseBandWriter(self._path, matrix_spec(shape, sparse=False))

    def append(self, block: CsrBlock) -> None:
        values = block.layers["values"]

        def fill(band: NDArray[Any], rows: slice) -> None:
            # `rows` counts from the start of the block, which may be split over two bands.
            indptr = block.indptr[rows.start : rows.stop + 1]
            entries = slice(int(indptr[0]), int(indptr[-1]))
            at = np.repeat(np.arange(rows.stop - rows.start), np.diff(indptr))
            band[at, block.indices[entries]] = values[entries]

        self._bands.append(block.n_rows, fill)

    def finish(self) -> None:
        self._bands.close()

    def abort(self) -> None:
        """Do nothing, since nothing is open."""

    def rows(self) -> RowReader:
        return DenseRows(DenseArray(LazyArray(self._path), "C14"), MatrixLocation(str(self._path), X, str))


class _SplitLayout:
    """Writer of ``Xr`` from the rows, and of ``Xc`` from their sorted entries."""

    def __init__(self, folder: Path, work: Path, shape: tuple[int, int]) -> None:
        self._folder, self._shape, self._row = folder, shape, 0
        self._by_row = open_sparse_writer(folder / XR, split_spec(OBS, shape[0], VAR))
        self._sort = ExternalColumnSort(shape[1], work)

    def append(self, block: CsrBlock) -> None:
        rows = _row_numbers(block, self._row)
        columns, values = block.indices.astype(np.uint32), block.layers["values"]
        # Rows arrive in order, which is the global order of an array of one axis: `Xr` needs no sort.
        self._by_row.write({OBS: rows, ANONYMOUS: values, VAR: columns})
        self._sort.add(rows, columns, values)
        self._row += block.n_rows

    def finish(self) -> None:
        self._by_row.close()
        by_column = open_sparse_writer(self._folder / XC, split_spec(VAR, self._shape[1], OBS))
        try:
            for first, bounds, slices in self._sort.bands():
                rows, values = merge_slices(bounds, slices)
                columns = np.repeat(np.arange(first, first + len(bounds) - 1, dtype=np.uint32), np.diff(bounds))
                by_column.write({VAR: columns, ANONYMOUS: values, OBS: rows})
            by_column.close()
        # `abort` below knows `_by_row` only, so `Xc` must be closed here.
        except BaseException:
            by_column.abort()
            raise
        finally:
            self._sort.close()

    def abort(self) -> None:
        self._by_row.abort()
        self._sort.close()

    def rows(self) -> RowReader:
        return SparseRowReader(LazyArray(self._folder / XR), self._shape, "C15")


class _TiledLayout:
    """Writer of a two-dimensional ``X``, tile by tile down each band of columns, so that a feature is in few tiles."""

    def __init__(self, folder: Path, work: Path, shape: tuple[int, int]) -> None:
        self._path, self._shape, self._row = folder / X, shape, 0
        self._entries = open_sparse_writer(self._path, matrix_spec(shape, sparse=True))
        self._sort = ExternalColumnSort(shape[1], work)

    def append(self, block: CsrBlock) -> None:
        rows = _row_numbers(block, self._row)
        self._sort.add(rows, block.indices.astype(np.uint32), block.layers["values"])
        self._row += block.n_rows

    def finish(self) -> None:
        from scipy.sparse import csc_array

        try:
            for first, _, slices in self._sort.bands(min(SPARSE_TILE[1], self._shape[1])):
                for bounds, rows, values in slices:
                    if not len(rows):
                        continue
                    low = int(rows.min())
                    band = csc_array(
                        (values, rows.astype(np.int64) - low, bounds), (int(rows.max()) - low + 1, len(bounds) - 1)
                    )
                    # Tiles go down a band of columns, and cells in a tile by rows: a band sorted by rows is in global
                    # order. A row that is split over two runs has its lower columns in the first.
                    by_row = band.tocsr()
                    at = np.repeat(np.arange(low, low + by_row.shape[0], dtype=np.uint32), np.diff(by_row.indptr))
                    columns = by_row.indices.astype(np.uint32) + np.uint32(first)
                    self._entries.write({OBS: at, VAR: columns, ANONYMOUS: by_row.data})
            self._entries.close()
        finally:
            self._sort.close()

    def abort(self) -> None:
        self._entries.abort()
        self._sort.close()

    def rows(self) -> RowReader:
        return SparseRowReader(LazyArray(self._path), self._shape, "C40")


def _row_numbers(block: CsrBlock, first: int) -> NDArray[np.uint32]:
    return np.repeat(np.arange(first, first + block.n_rows, dtype=np.uint32), np.diff(block.indptr))


def normalize_block(block: Block, first: int) -> CsrBlock:
    """Return rows as float32 without zeros, sorted by column, with duplicate entries summed.

    Parameters
    ----------
    block : CsrBlock or DenseBlock
        Rows with the layer ``"values"``.
    first : int
        Number of its first row, for messages.

    Raises
    ------
    ValuesError
        C03 for a value that float32 cannot represent.

    Examples
    --------
    >>> rows = normalize_block(DenseBlock({"values": np.array([[0, 2], [3, 0]])}), 0)
    >>> rows.indices.tolist(), rows.layers["values"].tolist()
    ([1, 0], [2.0, 3.0])
    """
    if isinstance(block, DenseBlock):
        dense = block.layers["values"]
        rows, indices = np.nonzero(dense)
        indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))]).astype(np.int64)
        values, n_cols = dense[rows, indices], dense.shape[1]
    else:
        indptr, indices, values = _canonical(block)
        n_cols = block.n_cols
    small = _as_float32(values, indptr, first)
    # Tested after rounding, so that float64 values that became 0 are dropped too; NaN is kept.
    if not small.all():
        kept = small != 0
        # Entry `i` of the running count is the number of entries kept before `i`, hence the new pointer.
        indptr = np.concatenate([[0], np.cumsum(kept)])[indptr]
        indices, small = indices[kept], small[kept]
    return CsrBlock(indptr, indices, {"values": small}, n_cols)


def _canonical(block: CsrBlock) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
    indptr, indices, values = block.indptr, block.indices, block.layers["values"]
    steps = np.diff(indices.astype(np.int64, copy=False))
    starts = indptr[1:-1]
    # Steps from one row to the next mean nothing and count as ascending. Empty rows at either end have no
    # such step: they would address -1, or the place after the last step.
    steps[starts[(starts > 0) & (starts < len(indices))] - 1] = 1
    if not len(steps) or steps.min() > 0:
        return indptr, indices, values
    from scipy.sparse import csr_array

    # SciPy sums in the dtype of the values, where small integers wrap and True + True is True.
    wide = {"b": np.int64, "i": np.int64, "u": np.uint64}.get(values.dtype.kind, np.float64)
    # `sum_duplicates` sorts in place; the indices belong to the caller.
    matrix = csr_array((values.astype(wide), indices.copy(), indptr.copy()), shape=(block.n_rows, block.n_cols))
    matrix.sum_duplicates()
    return matrix.indptr.astype(np.int64), matrix.indices, matrix.data


def _as_float32(values: NDArray[Any], indptr: NDArray[np.int64], first: int) -> NDArray[np.float32]:
    if values.dtype == np.float32:
        return values
    with np.errstate(over="ignore"):
        small = values.astype(np.float32)
    if values.dtype.kind == "f":
        wrong = np.isinf(small) & np.isfinite(values)
    elif values.dtype.itemsize > 2 and len(values):
        # beyond 2**24 not every integer is a float32; longdouble compares integers of 64 bits exactly
        wrong = (
            small.astype(np.longdouble) != values.astype(np.longdouble)
            if np.abs(small).max() >= 2**24
            else np.zeros(0, bool)
        )
    else:
        return small
    if wrong.any():
        entry = int(np.flatnonzero(wrong)[0])
        row = first + int(np.searchsorted(indptr, entry, side="right")) - 1
        raise ValuesError(
            f"C03: the value {values[entry]} of cell {row:,} cannot be represented by float32, the type of the matrix of a CXG; scale the matrix, or "
            "write another one (x=)."
        )
    return small
