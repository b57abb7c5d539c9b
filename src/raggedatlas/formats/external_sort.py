"""Entries that arrive in any order, given back as rows: sorted in memory if few, through temporary files if many."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import StoreError
from raggedatlas.model.batch import CsrBlock

BAND_BYTES = 64 << 20
"""Entries of about this size are sorted at once."""

PIECE = 1 << 20
"""Records read from a temporary file at once."""


class ExternalRowSort:
    """Collect (row, column, value) entries in any order and read them back by rows, in the order they came.

    Memory is bounded by about ten times `BAND_BYTES` (measured) and eight bytes per row, whatever the number of entries;
    entries beyond one band wait in temporary files of the system's temporary folder.

    Parameters
    ----------
    shape : tuple of int
        ``(n_rows, n_columns)``.
    dtype : numpy dtype
        Of the values.
    n_entries : int
        How many will come; it decides the number of bands.
    """

    def __init__(self, shape: tuple[int, int], dtype: np.dtype[Any], n_entries: int) -> None:
        self._shape = shape
        row, column = (np.int32 if n < 2**31 else np.int64 for n in shape)
        self._record = np.dtype([("row", row), ("column", column), ("value", dtype)])
        n_bands = max(1, -(-n_entries * self._record.itemsize // BAND_BYTES))
        self._band_rows = max(1, -(-shape[0] // n_bands))
        self._counts = np.zeros(shape[0], np.int64)
        self._kept: list[NDArray[Any]] = []
        self._folder = TemporaryDirectory(prefix="raggedatlas-") if n_bands > 1 else None
        self._band: tuple[int, CsrBlock] | None = None
        self.indptr: NDArray[np.int64] = np.zeros(shape[0] + 1, np.int64)

    def add(self, rows: NDArray[Any], columns: NDArray[Any], values: NDArray[Any]) -> None:
        """Take entries; the caller has checked that they are within the shape."""
        self._counts += np.bincount(rows, minlength=self._shape[0])
        if self._folder is None:
            self._kept.append(self._records(rows, columns, values))
            return
        bands = rows // self._band_rows
        order = stable_order(bands, int(bands.max(initial=0)) + 1)
        # Gathering field by field is several times faster than gathering records.
        records, bands = self._records(rows[order], columns[order], values[order]), bands[order]
        edges = np.flatnonzero(np.diff(bands)) + 1
        for start, stop in zip([0, *edges], [*edges, len(bands)], strict=True):
            if stop > start:
                self._append(int(bands[start]), records[start:stop])

    def finish(self) -> None:
        """Say that all entries came; `indptr` and `read` are valid from here on."""
        np.cumsum(self._counts, out=self.indptr[1:])

    def read(self, start: int, stop: int) -> CsrBlock:
        """Return rows ``[start, stop)`` with one layer ``"values"``."""
        parts: list[CsrBlock] = []
        at = start
        while at < stop or not parts:
            band = at // self._band_rows
            end = min(stop, (band + 1) * self._band_rows)
            parts.append(self._rows_of_band(band, at, end))
            at = end
        return parts[0] if len(parts) == 1 else _stacked(parts)

    def close(self) -> None:
        """Remove the temporary files."""
        self._kept, self._band = [], None
        if self._folder is not None:
            self._folder.cleanup()

    def _records(self, rows: NDArray[Any], columns: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
        records = np.empty(len(rows), self._record)
        records["row"], records["column"], records["value"] = rows, columns, values
        return records

    def _path(self, band: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"{band}.entries"

    def _append(self, band: int, records: NDArray[Any]) -> None:
        try:
            with self._path(band).open("ab") as file:
                records.tofile(file)
        except OSError as error:
            raise StoreError(
                f"Sorting entries by cell needs temporary space, and writing there failed ({error}); "
                "free some, or set TMPDIR to a larger place."
            ) from error

    def _rows_of_band(self, band: int, start: int, stop: int) -> CsrBlock:
        low = band * self._band_rows
        high = min(low + self._band_rows, self._shape[0])
        if (self.indptr[high] - self.indptr[low]) * self._record.itemsize > 2 * BAND_BYTES:
            wanted = [piece[(piece["row"] >= start) & (piece["row"] < stop)] for piece in self._pieces(band)]
            return self._sorted(wanted, start, stop)
        if self._band is None or self._band[0] != band:
            self._band = (band, self._sorted(list(self._pieces(band)), low, high))
        block = self._band[1]
        first, last = block.indptr[start - low], block.indptr[stop - low]
        values = block.layers["values"][first:last]
        pointers = block.indptr[start - low : stop - low + 1] - first
        return CsrBlock(pointers, block.indices[first:last], {"values": values}, block.n_cols)

    def _pieces(self, band: int) -> Iterator[NDArray[Any]]:
        if self._folder is None:
            yield from self._kept
        elif self._path(band).exists():
            with self._path(band).open("rb") as file:
                while len(piece := np.fromfile(file, self._record, PIECE)):
                    yield piece

    def _sorted(self, pieces: list[NDArray[Any]], start: int, stop: int) -> CsrBlock:
        records = np.concatenate(pieces) if pieces else np.empty(0, self._record)
        order = stable_order(records["row"] - start, stop - start)
        pointers = self.indptr[start : stop + 1] - self.indptr[start]
        columns, values = (np.ascontiguousarray(records[name])[order] for name in ("column", "value"))
        return CsrBlock(pointers, columns, {"values": values}, self._shape[1])


def stable_order(keys: NDArray[Any], n_keys: int) -> NDArray[np.intp]:
    """Sort small integers, equal ones in the order they came, in time proportional to their number.

    Parameters
    ----------
    keys : (n,) integer
        Each in ``[0, n_keys)``.
    n_keys : int
        Number of different keys.

    Returns
    -------
    (n,) intp
        Positions in sorted order, as ``numpy.argsort(keys, kind="stable")``.

    Examples
    --------
    >>> stable_order(np.array([2, 0, 2, 1]), 3).tolist()
    [1, 3, 0, 2]
    """
    if n_keys <= 1 << 16:
        # NumPy sorts 16-bit integers by radix.
        return np.argsort(keys.astype(np.uint16), kind="stable")
    from scipy.sparse import csr_array

    n = len(keys)
    one_per_row = csr_array((np.ones(n, np.int8), keys, np.arange(n + 1)), shape=(n, n_keys))
    order: NDArray[np.intp] = one_per_row.tocsc().indices.astype(np.intp, copy=False)
    return order


def _stacked(parts: list[CsrBlock]) -> CsrBlock:
    pointers = [parts[0].indptr]
    for part in parts[1:]:
        pointers.append(part.indptr[1:] + pointers[-1][-1])
    values = np.concatenate([part.layers["values"] for part in parts])
    indices = np.concatenate([part.indices for part in parts])
    return CsrBlock(np.concatenate(pointers), indices, {"values": values}, parts[0].n_cols)
