"""Sort of sparse entries by rows, for CSC and Market matrices: in memory if they are few, through temporary files if they are many."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import StoreError
from raggedatlas.model.batch import CsrBlock

BAND_BYTES = 64 << 20
"""Bytes of entries that `ExternalRowSort` sorts at once."""

READ_RECORDS = 1 << 20
"""Records read from a temporary file at once."""


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
