"""Sort of sparse entries by columns, from entries that come row by row: less memory than by rows, and their number need not be known."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import StoreError

RUN_ENTRIES = 1 << 21
"""Entries that `ExternalColumnSort` sorts at once, and the size of a default band; about 16 MB."""


class ColumnSlice(NamedTuple):
    """Consecutive columns of one sorted run: ``(n + 1,)`` int64 bounds, and the rows and values of the entries."""

    bounds: NDArray[np.int64]
    rows: NDArray[np.uint32]
    values: NDArray[np.float32]


class ExternalColumnSort:
    """Collect entries row by row and read them back by columns, from sorted runs in one temporary file.

    Memory is bounded by about four runs and sixteen bytes per column. Each run is sorted by column in the file, so a
    band of columns is one contiguous slice of each run. The file at `path` is created when the entries exceed one run.
    """

    def __init__(self, n_columns: int, path: Path) -> None:
        self._n_columns, self._path = n_columns, path
        self._pending: list[tuple[NDArray[np.uint32], NDArray[Any], NDArray[np.float32]]] = []
        self._n_pending = 0
        self._counts = np.zeros(n_columns, np.int64)
        self._runs: list[tuple[int, int]] = []
        self._last: ColumnSlice | None = None
        self._file: BinaryIO | None = None

    def add(self, rows: NDArray[np.uint32], columns: NDArray[Any], values: NDArray[np.float32]) -> None:
        """Add entries; row numbers must not decrease from call to call."""
        for start in range(0, len(rows), RUN_ENTRIES):
            part = slice(start, start + RUN_ENTRIES)
            if self._n_pending + len(rows[part]) > RUN_ENTRIES:
                self._sort(keep=False)
            self._pending.append((rows[part], columns[part], values[part]))
            self._n_pending += len(rows[part])

    def bands(self, width: int | None = None) -> Iterator[tuple[int, NDArray[np.int64], Iterator[ColumnSlice]]]:
        """Iterate over bands of columns, as ``(first column, bounds, slices)``.

        A band has `width` columns; by default as many as hold one run of entries, at least one. `bounds`, (n + 1,)
        int64, are those of the entries of its n columns over all runs. `slices` iterates over the slice of each run, in
        the order in which the runs were added, each read on demand.
        """
        self._sort(keep=True)
        first = 0
        while first < self._n_columns:
            if width is not None:
                stop = min(first + width, self._n_columns)
            else:
                total = np.cumsum(self._counts[first:])
                stop = first + max(1, int(np.searchsorted(total, RUN_ENTRIES, side="right")))
            bounds = np.zeros(stop - first + 1, np.int64)
            np.cumsum(self._counts[first:stop], out=bounds[1:])
            yield first, bounds, self._slices(first, stop)
            first = stop

    def close(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._path.unlink(missing_ok=True)
        self._pending, self._last = [], None

    def _slices(self, first: int, stop: int) -> Iterator[ColumnSlice]:
        # A run is its int64 bounds, then all uint32 rows, then all float32 values, as `_sort` writes them.
        for at, n in self._runs:
            bounds = self._read(np.int64, at + 8 * first, stop - first + 1)
            low, size = int(bounds[0]), int(bounds[-1] - bounds[0])
            entries = at + 8 * (self._n_columns + 1)
            rows = self._read(np.uint32, entries + 4 * low, size)
            yield ColumnSlice(bounds - low, rows, self._read(np.float32, entries + 4 * (n + low), size))
        if self._last is not None:
            indptr, rows, values = self._last
            low, high = indptr[first], indptr[stop]
            yield ColumnSlice(indptr[first : stop + 1] - low, rows[low:high], values[low:high])

    def _sort(self, *, keep: bool) -> None:
        """Sort the pending entries by column, stable in the row; write them to the file unless they are the last run."""
        if not self._pending:
            return
        from scipy.sparse import coo_array

        rows, columns, values = (np.concatenate(parts) for parts in zip(*self._pending, strict=True))
        self._pending, self._n_pending = [], 0
        first = int(rows[0])
        # SciPy transposes by counting sort, in time proportional to the entries; row numbers are relative to keep the matrix small.
        run = coo_array(
            (values, (rows.astype(np.int64) - first, columns)), (int(rows[-1]) - first + 1, self._n_columns)
        )
        transposed = run.tocsr().tocsc()
        indptr = transposed.indptr.astype(np.int64)
        self._counts += np.diff(indptr)
        sorted_rows = transposed.indices.astype(np.uint32)
        sorted_rows += np.uint32(first)
        run_slice = ColumnSlice(indptr, sorted_rows, transposed.data)
        if keep:
            self._last = run_slice
        else:
            try:
                if self._file is None:
                    self._file = self._path.open("w+b")
                self._runs.append((self._file.seek(0, 2), len(run_slice[1])))
                for part in run_slice:
                    self._file.write(np.ascontiguousarray(part).data)
            except OSError as error:
                raise StoreError(
                    f"Sorting entries by feature needs temporary disk space, and writing {self._path} failed ({error}); "
                    "free some space."
                ) from error

    def _read(self, kind: type[np.generic], at: int, n: int) -> NDArray[Any]:
        assert self._file is not None
        self._file.seek(at)
        return np.fromfile(self._file, kind, n)


def merge_slices(
    bounds: NDArray[np.int64], slices: Iterable[ColumnSlice]
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Merge the slices of a band, as `ExternalColumnSort.bands` yields them, into one, by column: rows and values.

    `bounds`, (n_columns + 1,), are those of the columns over all slices.
    """
    rows, values = np.empty(bounds[-1], np.uint32), np.empty(bounds[-1], np.float32)
    filled = bounds[:-1].copy()
    for own, slice_rows, slice_values in slices:
        if own[-1] == bounds[-1]:
            return slice_rows, slice_values
        counts = np.diff(own)
        # The k-th entry of a column in this slice goes to position `filled[column] + k`.
        to = np.repeat(filled - own[:-1], counts) + np.arange(own[-1])
        rows[to], values[to] = slice_rows, slice_values
        filled += counts
    return rows, values
