"""External sort of sparse entries: in memory if they are few, through temporary files if they are many.

`ExternalRowSort` takes entries in any order and distributes them over bands of rows: CSC to CSR, Market-matrix text.
`ExternalColumnSort` takes entries row by row and keeps sorted runs: CSR to CSC, with less memory and without their number.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import StoreError
from raggedatlas.model.batch import CsrBlock

BAND_BYTES = 64 << 20
"""Bytes of entries that `ExternalRowSort` sorts at once."""

READ_RECORDS = 1 << 20
"""Records read from a temporary file at once."""

RUN_ENTRIES = 1 << 21
"""Entries that `ExternalColumnSort` sorts at once, and the size of a default band; about 16 MB."""


class ExternalRowSort:
    """Collect (row, column, value) entries in any order and read them back by rows; entries of a row keep their order.

    Memory is bounded by about ten times `BAND_BYTES` (measured) and eight bytes per row, whatever the number of
    entries; if they exceed one band, they are stored in the system's temporary folder, one file per band of rows.
    `n_entries`, the number of entries to come, determines the number of bands.
    """

    def __init__(self, shape: tuple[int, int], dtype: np.dtype[Any], n_entries: int) -> None:
        self._shape = shape
        row, column = (np.int32 if n < 2**31 else np.int64 for n in shape)
        self._record = np.dtype([("row", row), ("column", column), ("value", dtype)])
        n_bands = max(1, -(-n_entries * self._record.itemsize // BAND_BYTES))
        self._band_rows = max(1, -(-shape[0] // n_bands))
        self._counts = np.zeros(shape[0], np.int64)
        self._in_memory: list[NDArray[Any]] = []
        self._folder = TemporaryDirectory(prefix="raggedatlas-") if n_bands > 1 else None
        self._band: tuple[int, CsrBlock] | None = None
        self.indptr: NDArray[np.int64] = np.zeros(shape[0] + 1, np.int64)

    def add(self, rows: NDArray[Any], columns: NDArray[Any], values: NDArray[Any]) -> None:
        """Add entries; the caller has checked that they are within the shape."""
        self._counts += np.bincount(rows, minlength=self._shape[0])
        if self._folder is None:
            self._in_memory.append(self._records(rows, columns, values))
            return
        bands = rows // self._band_rows
        order = stable_order(bands, int(bands.max(initial=0)) + 1)
        # Gathering field by field is several times faster than gathering records.
        records, bands = self._records(rows[order], columns[order], values[order]), bands[order]
        edges = np.flatnonzero(np.diff(bands)) + 1
        for start, stop in zip([0, *edges], [*edges, len(bands)], strict=True):
            if stop > start:
                band = int(bands[start])
                try:
                    with self._path(band).open("ab") as file:
                        records[start:stop].tofile(file)
                except OSError as error:
                    raise StoreError(
                        f"Sorting entries by cell needs temporary disk space, and writing {self._path(band)} failed ({error}); "
                        "free some space, or set TMPDIR to a larger disk."
                    ) from error

    def finish(self) -> None:
        """Finish adding; `indptr` and `read` are valid afterwards."""
        np.cumsum(self._counts, out=self.indptr[1:])

    def read(self, start: int, stop: int) -> CsrBlock:
        """Return rows ``[start, stop)`` with the layer ``"values"``."""
        parts: list[CsrBlock] = []
        row = start
        # `or not parts`: an empty range still gives a block, one without rows.
        while row < stop or not parts:
            band = row // self._band_rows
            end = min(stop, (band + 1) * self._band_rows)
            parts.append(self._read_band(band, row, end))
            row = end
        if len(parts) == 1:
            return parts[0]
        pointers = [parts[0].indptr]
        for part in parts[1:]:
            pointers.append(part.indptr[1:] + pointers[-1][-1])
        values = np.concatenate([part.layers["values"] for part in parts])
        indices = np.concatenate([part.indices for part in parts])
        return CsrBlock(np.concatenate(pointers), indices, {"values": values}, self._shape[1])

    def close(self) -> None:
        """Remove the temporary files."""
        self._in_memory, self._band = [], None
        if self._folder is not None:
            self._folder.cleanup()

    def _records(self, rows: NDArray[Any], columns: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
        records = np.empty(len(rows), self._record)
        records["row"], records["column"], records["value"] = rows, columns, values
        return records

    def _path(self, band: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"{band}.entries"

    def _read_band(self, band: int, start: int, stop: int) -> CsrBlock:
        low = band * self._band_rows
        high = min(low + self._band_rows, self._shape[0])
        if (self.indptr[high] - self.indptr[low]) * self._record.itemsize > 2 * BAND_BYTES:
            # A band with far more entries than planned is not kept: each call reads it again for the requested rows.
            selected = [part[(part["row"] >= start) & (part["row"] < stop)] for part in self._read_records(band)]
            return self._sort(selected, start, stop)
        if self._band is None or self._band[0] != band:
            self._band = (band, self._sort(list(self._read_records(band)), low, high))
        block = self._band[1]
        first, last = block.indptr[start - low], block.indptr[stop - low]
        values = block.layers["values"][first:last]
        pointers = block.indptr[start - low : stop - low + 1] - first
        return CsrBlock(pointers, block.indices[first:last], {"values": values}, block.n_cols)

    def _read_records(self, band: int) -> Iterator[NDArray[Any]]:
        if self._folder is None:
            yield from self._in_memory
        elif self._path(band).exists():
            with self._path(band).open("rb") as file:
                while len(part := np.fromfile(file, self._record, READ_RECORDS)):
                    yield part

    def _sort(self, parts: list[NDArray[Any]], start: int, stop: int) -> CsrBlock:
        records = np.concatenate(parts) if parts else np.empty(0, self._record)
        order = stable_order(records["row"] - start, stop - start)
        pointers = self.indptr[start : stop + 1] - self.indptr[start]
        columns, values = (np.ascontiguousarray(records[name])[order] for name in ("column", "value"))
        return CsrBlock(pointers, columns, {"values": values}, self._shape[1])


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


def stable_order(keys: NDArray[Any], n_keys: int) -> NDArray[np.intp]:
    """Return the stable order that sorts small integers, in time proportional to their number.

    `keys`, (n,), are in ``[0, n_keys)``; the result is that of ``numpy.argsort(keys, kind="stable")``.
    """
    if n_keys <= 1 << 16:
        # NumPy uses radix sort for 16-bit integers.
        return np.argsort(keys.astype(np.uint16), kind="stable")
    from scipy.sparse import csr_array

    n = len(keys)
    one_per_row = csr_array((np.ones(n, np.int8), keys, np.arange(n + 1)), shape=(n, n_keys))
    order: NDArray[np.intp] = one_per_row.tocsc().indices.astype(np.intp, copy=False)
    return order


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
