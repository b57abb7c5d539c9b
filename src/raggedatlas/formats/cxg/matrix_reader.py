"""Readers of the expression matrix in each of the three layouts, by rows and by columns."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.formats.cxg.schema import ANONYMOUS, OBS, VAR, XC, XR, X
from raggedatlas.formats.cxg.tiledb_arrays import (
    absolute_uri,
    attribute_names,
    check_file_sizes,
    context,
    import_tiledb,
    is_fully_written,
    query_attributes,
    tiledb_errors,
)
from raggedatlas.formats.matrix_readers import BLOCK_BYTES
from raggedatlas.model.batch import CsrBlock, DenseBlock
from raggedatlas.model.protocols import MatrixForm

ENTRY_BYTES = 16
"""Memory per entry while reading: two coordinates, a value, and its position in the sort order."""


class LazyArray:
    """An array that is opened at the first access.

    Parameters
    ----------
    path : Path
        Path of the array.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._array: Any = None

    @property
    def array(self) -> Any:  # noqa: ANN401
        """The TileDB array."""
        if self._array is None:
            with tiledb_errors(self.path):
                check_file_sizes(self.path)
                self._array = import_tiledb().open(absolute_uri(self.path), "r", ctx=context())
        return self._array

    def close(self) -> None:
        """Close the array; the next access reopens it."""
        if self._array is not None:
            self._array.close()
            self._array = None

    def shape(self) -> tuple[int, ...]:
        """Return the sizes of the dimensions.

        Raises
        ------
        SourceError
            C02 if a dimension does not start at 0 or is not of integers.
        """
        domain = self.array.schema.domain
        axes = [domain.dim(i) for i in range(domain.ndim)]
        for axis in axes:
            if axis.dtype.kind not in "iu" or int(axis.domain[0]):
                raise SourceError(
                    f"C02: {self.path}: dimension {axis.name!r} has the domain {axis.domain} of {axis.dtype}; expected integers from 0. "
                    "Write the CXG again."
                )
        return tuple(int(axis.domain[1]) + 1 for axis in axes)

    def attribute(self, name: str, rule: str) -> np.dtype[Any]:
        """Return the dtype of a numeric attribute.

        Raises
        ------
        SourceError
            `rule` if the attribute is missing, C04 if it is not numeric.
        """
        schema = self.array.schema
        names = attribute_names(schema)
        if name not in names:
            raise SourceError(f"{rule}: {self.path} has attributes {names}; expected {name!r}. Write the CXG again.")
        dtype: np.dtype[Any] = np.dtype(schema.attr(names.index(name)).dtype)
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise SourceError(
                f"C04: {self.path} holds values of {dtype}; expected numbers. Write the CXG again from its source."
            )
        return dtype

    def require_fully_written(self) -> None:
        """Raise if a dense array is not fully written.

        Raises
        ------
        SourceError
            C00, since missing values would be read as fill values.
        """
        if not is_fully_written(self.path, self.array.schema):
            raise SourceError(
                f"C00: {self.path} is declared with shape {self.shape()}, but is only partially written; it is incomplete. Fetch or "
                "write the CXG again."
            )

    def n_cells(self) -> int | None:
        """Return the number of stored cells, from the metadata of the fragments."""
        with tiledb_errors(self.path):
            fragments = import_tiledb().array_fragments(absolute_uri(self.path), ctx=context())
            return int(sum(fragments.cell_num)) if len(fragments) else 0

    def read_slice(self, first: int, stop: int, *, axis: int = 0) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Read the entries with coordinates ``[first, stop)`` along one dimension.

        Returns
        -------
        tuple of arrays
            Coordinates along that dimension, along the other, and values, unordered. In ``Xr`` and ``Xc`` the other is an attribute.
        """
        return self._entries(slice(first, stop), axis, inclusive=False)

    def read_points(
        self, places: NDArray[np.int64], *, axis: int = 0
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Read the entries at given coordinates along one dimension; returns the same as `read_slice`."""
        return self._entries(places.tolist(), axis, inclusive=True)

    def _entries(self, wanted: Any, axis: int, *, inclusive: bool) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:  # noqa: ANN401
        schema = self.array.schema
        names = [schema.domain.dim(i).name for i in range(schema.domain.ndim)]
        ranges: list[Any] = [slice(None)] * len(names)
        ranges[axis] = wanted
        others = [name for i, name in enumerate(names) if i != axis]
        taken = [name for name in attribute_names(schema) if name in (ANONYMOUS, OBS, VAR)]
        with tiledb_errors(self.path):
            # Any order is accepted and sorted in `compress_entries`, so TileDB is not asked to sort.
            query = query_attributes(self.array, *taken, dims=names, order="U")
            # A plain query excludes the end of a slice; `multi_index` includes it, and alone takes lists of points.
            reader = query.multi_index if inclusive else query
            columns = reader[tuple(ranges) if len(ranges) > 1 else ranges[0]]
        other = columns[others[0]] if others else columns[next(name for name in taken if name)]
        return columns[names[axis]], other, columns[ANONYMOUS]


class SparseRowReader:
    """Row reader of a sparse matrix, from ``Xr`` or a two-dimensional ``X``.

    Parameters
    ----------
    opened : LazyArray
        The array; its first dimension is cells.
    shape : tuple of int
        ``(n_cells, n_features)``.
    rule : str
        Rule id for a missing attribute.
    """

    form: MatrixForm = "csr"

    def __init__(self, opened: LazyArray, shape: tuple[int, int], rule: str) -> None:
        self._opened = opened
        self.shape: tuple[int, ...] = shape
        self.dtype = opened.attribute(ANONYMOUS, rule)
        self.n_entries: int | None = opened.n_cells()

    def stop(self, start: int, stop: int) -> int:
        """Return the end of a block that begins at `start`, from the mean number of entries per row."""
        mean = max(1, (self.n_entries or 0) // max(self.shape[0], 1))
        return min(stop, start + max(1, BLOCK_BYTES // (ENTRY_BYTES * mean)))

    def read(self, start: int, stop: int) -> CsrBlock:
        """Read rows ``[start, stop)``; entries of a row are sorted by feature."""
        major, minor, values = self._opened.read_slice(start, stop)
        indptr, minor, values = compress_entries(
            self._opened.path, (major, minor, values), (start, stop), self.shape[1]
        )
        return CsrBlock(indptr, minor, {"values": values}, self.shape[1])

    def close(self) -> None:
        """Close the array."""
        self._opened.close()


class ShiftedRowReader:
    """Row reader of a sparse matrix with column shifts, as the dense matrix that it represents.

    Parameters
    ----------
    rows : SparseRowReader
        Reader of the stored matrix.
    shift : (n_features,) array
        Value subtracted from each column, and so the value of its missing entries.
    """

    form: MatrixForm = "dense"
    n_entries: int | None = None

    def __init__(self, rows: SparseRowReader, shift: NDArray[Any]) -> None:
        self._rows, self._shift = rows, shift.astype(np.float64)
        self.shape, self.dtype = rows.shape, rows.dtype

    def stop(self, start: int, stop: int) -> int:
        """Return the end of a block that begins at `start`."""
        return min(stop, start + max(1, BLOCK_BYTES // (8 * max(1, self.shape[1]))))

    def read(self, start: int, stop: int) -> DenseBlock:
        """Read rows ``[start, stop)``."""
        block = self._rows.read(start, stop)
        out = np.tile(self._shift, (stop - start, 1))
        rows = np.repeat(np.arange(stop - start), np.diff(block.indptr))
        # Fancy `+=` adds once per position: correct because `compress_entries` refuses repeated entries (C20).
        out[rows, block.indices] += block.layers["values"]
        return DenseBlock({"values": out.astype(self.dtype)})

    def close(self) -> None:
        """Close the array."""
        self._rows.close()


class DenseArray:
    """A dense array that can be sliced by rows.

    Parameters
    ----------
    opened : LazyArray
        A two-dimensional array.
    rule : str
        Rule id for a missing attribute.
    """

    def __init__(self, opened: LazyArray, rule: str) -> None:
        self._opened = opened
        self.shape = opened.shape()
        self.dtype = opened.attribute(ANONYMOUS, rule)
        opened.require_fully_written()

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Read consecutive rows."""
        with tiledb_errors(self._opened.path):
            read = query_attributes(self._opened.array, ANONYMOUS)[rows, :]
            return np.asarray(read[ANONYMOUS] if isinstance(read, dict) else read)


def compress_entries(
    path: Path,
    entries: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    extent: tuple[int, int],
    n_minor: int,
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
    """Compress entries along the major coordinate, sorted by the minor one.

    Parameters
    ----------
    path : Path
        Path of the array, for error messages.
    entries : tuple of (n,) arrays
        Major coordinates, minor coordinates and values; unordered.
    extent : tuple of int
        First major coordinate and the end of the range.
    n_minor : int
        Size of the minor dimension.

    Returns
    -------
    tuple
        ``(n_major + 1,)`` int64 indptr, minor coordinates as int32 (int64 if larger), values.

    Raises
    ------
    SourceError
        C20 for duplicate or out-of-range coordinates.
    """
    major, minor, values = entries
    # Checked before keys are made: a coordinate beyond the axis would look like one of the next or previous row.
    if len(minor) and (int(minor.max()) >= n_minor or int(minor.min()) < 0):
        at = int(minor.argmax() if int(minor.max()) >= n_minor else minor.argmin())
        raise SourceError(
            f"C20: {path} has an entry ({int(major[at]):,}, {int(minor[at]):,}), but the other dimension has size {n_minor:,}; "
            "write the CXG again."
        )
    # Coordinates are uint32, whose product would wrap; in int64 it fits, since `read_table_info` limits
    # both axes to 2**31.
    key = (major.astype(np.int64) - extent[0]) * n_minor + minor.astype(np.int64)
    steps = np.diff(key)
    if len(steps) and int(steps.min()) <= 0:
        order = np.argsort(key, kind="stable")
        key, minor, values = key[order], minor[order], values[order]
        duplicates = np.flatnonzero(np.diff(key) == 0)
        if len(duplicates):
            where = divmod(int(key[duplicates[0]]), n_minor)
            raise SourceError(
                f"C20: {path} has two entries at ({where[0] + extent[0]:,}, {where[1]:,}), and viewers use either; write the CXG again."
            )
    # Row `i` begins at the first key that is not below `i * n_minor`, also if it is empty.
    indptr = np.searchsorted(key, np.arange(extent[1] - extent[0] + 1, dtype=np.int64) * n_minor).astype(np.int64)
    return indptr, minor.astype(np.int32 if n_minor < 2**31 else np.int64), values


def columns_per_block(folder: Path, n_rows: int, n_columns: int, *, shifted: bool) -> int:
    """Return the number of matrix columns that take about as much memory as a block of rows.

    Parameters
    ----------
    folder : Path
        Folder of the CXG.
    n_rows, n_columns : int
        Numbers of cells and features.
    shifted : bool
        Whether columns are dense because of column shifts.
    """
    split = (folder / XC).is_dir() and (folder / XR).is_dir()
    opened = LazyArray(folder / (XC if split else X))
    try:
        sparse = opened.array.schema.sparse and not shifted
        each = ENTRY_BYTES * (opened.n_cells() or 0) // n_columns if sparse else 8 * n_rows
        return max(1, min(n_columns, BLOCK_BYTES // max(each, 1)))
    finally:
        opened.close()


def read_columns(folder: Path, columns: Sequence[int], shift: NDArray[Any] | None = None) -> Any:  # noqa: ANN401
    """Read columns of the matrix, from ``Xc`` if it exists.

    Parameters
    ----------
    folder : Path
        Folder of the CXG.
    columns : sequence of int
        Column numbers, in the order of the result.
    shift : (n_features,) array, optional
        See `ShiftedRowReader`.

    Returns
    -------
    scipy.sparse.csc_matrix or numpy.ndarray
        ``(n_cells, n_columns)``; an array if the matrix is dense or shifted.
    """
    split = (folder / XC).is_dir() and (folder / XR).is_dir()
    opened = LazyArray(folder / (XC if split else X))
    try:
        distinct = np.unique(np.asarray(columns, np.int64))
        if not split and not opened.array.schema.sparse:
            return _dense_columns(opened, distinct)[:, np.searchsorted(distinct, columns)]
        with closing(LazyArray(folder / XR)) as by_row:
            n_rows = (by_row if split else opened).shape()[0]
        try:
            matrix = _columns_at_once(opened, distinct, n_rows, axis=0 if split else 1)
        except SourceError:
            # Read columns one by one, so that the error names the damaged column by its own number.
            for column in distinct.tolist():
                entries = opened.read_slice(column, column + 1, axis=0 if split else 1)
                compress_entries(opened.path, entries, (column, column + 1), n_rows)
            raise
        matrix = matrix[:, np.searchsorted(distinct, columns)] if list(columns) != distinct.tolist() else matrix
        return matrix if shift is None else matrix.toarray() + shift[list(columns)].astype(matrix.dtype)
    finally:
        opened.close()


def _dense_columns(opened: LazyArray, columns: NDArray[np.int64]) -> NDArray[Any]:
    """Read distinct, ascending columns in one query, so that shared tiles are decoded once."""
    if not len(columns):
        return np.empty((opened.shape()[0], 0), opened.attribute(ANONYMOUS, "C14"))
    breaks = np.flatnonzero(np.diff(columns) != 1) + 1
    runs = [slice(int(run[0]), int(run[-1])) for run in np.split(columns, breaks)]
    with tiledb_errors(opened.path):
        read: NDArray[Any] = query_attributes(opened.array, ANONYMOUS).multi_index[:, runs][ANONYMOUS]
    return read


def _columns_at_once(opened: LazyArray, columns: NDArray[np.int64], n_rows: int, *, axis: int) -> Any:  # noqa: ANN401
    """Read distinct, ascending columns in one query, so that shared tiles are decoded once."""
    from scipy.sparse import csc_matrix

    if not len(columns):
        return csc_matrix((n_rows, 0), dtype=opened.attribute(ANONYMOUS, "C14"))
    major, minor, values = opened.read_points(columns, axis=axis)
    # Requested columns may be far apart; their ranks make the compressed axis dense.
    ranks = np.searchsorted(columns, major)
    indptr, minor, values = compress_entries(opened.path, (ranks, minor, values), (0, len(columns)), n_rows)
    return csc_matrix((values, minor, indptr), (n_rows, len(columns)))
