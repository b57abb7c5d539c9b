"""Entries that arrive by rows, given back by columns in bounded memory, whatever their number."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import StoreError

RUN_ENTRIES = 1 << 21
"""Entries that are sorted at once, and given back at once; some 16 MB."""


Piece = tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.float32]]
"""Bounds of columns, the rows of their entries, and their values."""


class ColumnSort:
    """Takes rows, gives columns back; what is beyond one run waits in one temporary file.

    Memory: about four runs, and sixteen bytes for each column. Each run lies in the file by columns, so that a band of columns is read as one
    piece of each.

    Parameters
    ----------
    n_columns : int
        Number of columns.
    path : Path
        Of the temporary file, made when it is needed.
    """

    def __init__(self, n_columns: int, path: Path) -> None:
        self._n_columns, self._path = n_columns, path
        self._waiting: list[tuple[NDArray[np.uint32], NDArray[Any], NDArray[np.float32]]] = []
        self._n_waiting = 0
        self._counts = np.zeros(n_columns, np.int64)
        self._runs: list[tuple[int, int]] = []
        self._last: Piece | None = None
        self._file: BinaryIO | None = None
        self.n_entries = 0

    def add(self, rows: NDArray[np.uint32], columns: NDArray[Any], values: NDArray[np.float32]) -> None:
        """Take entries; rows never go down from call to call."""
        self.n_entries += len(rows)
        for start in range(0, len(rows), RUN_ENTRIES):
            part = slice(start, start + RUN_ENTRIES)
            if self._n_waiting + len(rows[part]) > RUN_ENTRIES:
                self._sort(keep=False)
            self._waiting.append((rows[part], columns[part], values[part]))
            self._n_waiting += len(rows[part])

    def bands(self, width: int | None = None) -> Iterator[tuple[int, NDArray[np.int64], Iterator[Piece]]]:
        """Walk over bands of columns, as ``(first column, indptr, pieces)``.

        Parameters
        ----------
        width : int, optional
            Columns of a band; as many as make a run where it is None, at least one.

        Yields
        ------
        tuple
            The first column; ``(n_columns + 1,)`` int64 bounds of the whole band; for each run the bounds, rows and values of its piece,
            in the order that the runs came, each read when it is asked for.
        """
        self._sort(keep=True)
        first = 0
        while first < self._n_columns:
            stop = min(first + width, self._n_columns) if width is not None else self._band_end(first)
            bounds = np.zeros(stop - first + 1, np.int64)
            np.cumsum(self._counts[first:stop], out=bounds[1:])
            yield first, bounds, self._pieces(first, stop)
            first = stop

    def close(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._path.unlink(missing_ok=True)
        self._waiting, self._last = [], None

    def _pieces(self, first: int, stop: int) -> Iterator[Piece]:
        for run in self._runs:
            yield self._piece(run, first, stop)
        if self._last is not None:
            indptr, rows, values = self._last
            low, high = indptr[first], indptr[stop]
            yield indptr[first : stop + 1] - low, rows[low:high], values[low:high]

    def _band_end(self, first: int) -> int:
        total = np.cumsum(self._counts[first:])
        return first + max(1, int(np.searchsorted(total, RUN_ENTRIES, side="right")))

    def _sort(self, *, keep: bool) -> None:
        """Sort what waits by column, rows in the order they came; put it into the file unless it is the last."""
        if not self._waiting:
            return
        from scipy.sparse import coo_array

        rows, columns, values = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._n_waiting = [], 0
        low = int(rows[0])
        # SciPy sorts by counting; what it sorts here are the values under a matrix of the run's rows.
        run = coo_array((values, (rows.astype(np.int64) - low, columns)), (int(rows[-1]) - low + 1, self._n_columns))
        turned = run.tocsr().tocsc()
        indptr = turned.indptr.astype(np.int64)
        self._counts += np.diff(indptr)
        sorted_rows = turned.indices.astype(np.uint32)
        sorted_rows += np.uint32(low)
        made = (indptr, sorted_rows, turned.data)
        if keep:
            self._last = made
        else:
            self._save(made)

    def _save(self, run: Piece) -> None:
        try:
            if self._file is None:
                self._file = self._path.open("w+b")
            self._runs.append((self._file.seek(0, 2), len(run[1])))
            for part in run:
                self._file.write(np.ascontiguousarray(part).data)
        except OSError as error:
            raise StoreError(
                f"Sorting entries by feature needs temporary space beside the CXG, and writing {self._path} failed ({error}); free some."
            ) from error

    def _piece(self, run: tuple[int, int], first: int, stop: int) -> Piece:
        at, n = run
        bounds = self._read(np.int64, at + 8 * first, stop - first + 1)
        low, size = int(bounds[0]), int(bounds[-1] - bounds[0])
        at += 8 * (self._n_columns + 1)
        rows = self._read(np.uint32, at + 4 * low, size)
        values = self._read(np.float32, at + 4 * (n + low), size)
        return bounds - low, rows, values

    def _read(self, kind: type[np.generic], at: int, n: int) -> NDArray[Any]:
        assert self._file is not None
        self._file.seek(at)
        return np.fromfile(self._file, kind, n)


def merged(bounds: NDArray[np.int64], pieces: Iterable[Piece]) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Merge the pieces of a band into one, column by column.

    Parameters
    ----------
    bounds : (n_columns + 1,) int64
        Of the whole band.
    pieces : iterable of Piece
        As `ColumnSort.bands` gives them.

    Returns
    -------
    tuple of (n,) uint32, (n,) float32
        Rows and values.
    """
    rows, values = np.empty(bounds[-1], np.uint32), np.empty(bounds[-1], np.float32)
    filled = bounds[:-1].copy()
    for own, piece_rows, piece_values in pieces:
        if own[-1] == bounds[-1]:
            return piece_rows, piece_values
        counts = np.diff(own)
        to = np.repeat(filled - own[:-1], counts) + np.arange(own[-1])
        rows[to], values[to] = piece_rows, piece_values
        filled += counts
    return rows, values
