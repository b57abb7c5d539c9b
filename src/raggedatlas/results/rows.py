"""Rows of one column of a Lance table: from its files as they are mapped, from memory, or by `take` in the order asked."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.results.folder import result_errors
from raggedatlas.results.schema import ResultColumn

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

BLOCK_ROWS = 2048
"""Rows that are read ahead where somebody walks over a column row by row."""


class Rows(Protocol):
    """Flat rows of a column, by number; numbers are checked before."""

    def one(self, row: int) -> NDArray[Any]:
        """Give one row, ``(n_values,)``, not to be written to."""
        ...

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Copy rows, ``(k, n_values)``, in the order asked for."""
        ...

    def span(self, start: int, out: NDArray[Any]) -> None:
        """Copy the rows from `start` on into ``out``, ``(k, n_values)``."""
        ...


class PagedRows:
    """Rows that lie one after the other in pages, each page somewhere in a flat array of values.

    Parameters
    ----------
    values : sequence of (n,) arrays
        The values of each file, as they lie there, and whatever lies between the pages.
    starts : sequence of int
        First row of each page, ascending from 0.
    files : sequence of int
        Which of `values` each page is in.
    offsets : sequence of int
        Where each page begins there, counted in values.
    n_values : int
        Values of a row.

    Examples
    --------
    >>> PagedRows([np.arange(9)], [0, 2], [0, 0], [0, 5], 2).read(np.array([2, 0]))
    array([[5, 6],
           [0, 1]])
    """

    def __init__(
        self,
        values: Sequence[NDArray[Any]],
        starts: Sequence[int],
        files: Sequence[int],
        offsets: Sequence[int],
        n_values: int,
    ) -> None:
        self._values = tuple(values)
        self._n = n_values
        self._starts, self._files, self._offsets = list(starts), list(files), list(offsets)
        # where row 0 would begin if each page reached back to it: one addition finds a row
        self._bases = [offset - start * n_values for offset, start in zip(offsets, starts, strict=True)]
        self._page_starts, self._page_bases = np.array(starts, np.int64), np.array(self._bases, np.int64)
        self._page_files = np.array(files, np.int64)
        # every run of n values is a row of this view; nothing is copied
        self._windows = tuple(np.lib.stride_tricks.sliding_window_view(each, n_values) for each in self._values)

    def one(self, row: int) -> NDArray[Any]:
        """Give one row, ``(n_values,)``, not to be written to."""
        page = bisect_right(self._starts, row) - 1
        begin = self._bases[page] + row * self._n
        return self._values[self._files[page]][begin : begin + self._n]

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Copy rows, ``(k, n_values)``, in the order asked for."""
        pages = np.searchsorted(self._page_starts, rows, side="right") - 1
        begins = self._page_bases[pages] + rows * self._n
        if len(self._values) == 1:
            found: NDArray[Any] = self._windows[0][begins]
            return found
        out = np.empty((len(rows), self._n), self._values[0].dtype)
        files = self._page_files[pages]
        for file in np.unique(files):
            chosen = np.flatnonzero(files == file)
            out[chosen] = self._windows[file][begins[chosen]]
        return out

    def span(self, start: int, out: NDArray[Any]) -> None:
        """Copy the rows from `start` on into ``out``, ``(k, n_values)``."""
        done = 0
        while done < len(out):
            page = bisect_right(self._starts, start + done) - 1
            end = self._starts[page + 1] if page + 1 < len(self._starts) else start + len(out)
            k = min(end - start, len(out)) - done
            begin = self._bases[page] + (start + done) * self._n
            out[done : done + k] = self._values[self._files[page]][begin : begin + k * self._n].reshape(k, self._n)
            done += k


def rows_in_memory(values: NDArray[Any]) -> PagedRows:
    """Serve the rows of a ``(n, n_values)`` array."""
    return PagedRows([values.reshape(-1)], [0], [0], [0], values.shape[1])


class TakenRows:
    """Rows that Lance reads, in the order asked for; whoever walks row by row gets them from blocks read ahead.

    Parameters
    ----------
    table : lance.LanceDataset
        At its version.
    column : ResultColumn
        Which column.
    n_rows : int
        Rows of the table.
    """

    def __init__(self, table: "lance.LanceDataset", column: ResultColumn, n_rows: int) -> None:
        self._table, self._column, self._n_rows = table, column, n_rows
        self._block = np.empty((0, column.n_values), column.dtype)
        self._start = 0
        self._last = -2

    def one(self, row: int) -> NDArray[Any]:
        """Give one row, ``(n_values,)``, not to be written to."""
        walking, self._last = row == self._last + 1, row
        if not self._start <= row < self._start + len(self._block):
            if not walking:
                values: NDArray[Any] = self.read(np.array([row]))[0]
                return values
            self._start = row
            self._block = np.empty((min(BLOCK_ROWS, self._n_rows - row), self._column.n_values), self._column.dtype)
            self.span(row, self._block)
        found: NDArray[Any] = self._block[row - self._start]
        return found

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Copy rows, ``(k, n_values)``, in the order asked for."""
        if len(rows) == 0:
            return np.empty((0, self._column.n_values), self._column.dtype)
        with result_errors(self._table):
            taken = self._table.take(rows, columns=[self._column.name])
        found = flat_rows(taken.column(self._column.name).combine_chunks(), self._column)
        # Arrow's memory is not to be written to, and may be shared with what Lance keeps
        return found if found.flags.writeable else found.copy()

    def span(self, start: int, out: NDArray[Any]) -> None:
        """Copy the rows from `start` on into ``out``, ``(k, n_values)``."""
        if len(out) == 0:
            return
        done = 0
        with result_errors(self._table):
            for batch in self._table.to_batches(columns=[self._column.name], offset=start, limit=len(out)):
                out[done : done + batch.num_rows] = flat_rows(batch.column(0), self._column)
                done += batch.num_rows
        if done != len(out):
            raise CorruptError(
                f"{self._table.uri} gave {done} rows from row {start} on, and {len(out)} are said to be there."
            )


def flat_rows(stored: "pa.FixedSizeListArray", column: ResultColumn) -> NDArray[Any]:
    """Give Arrow's lists as rows, ``(k, n_values)``.

    Raises
    ------
    CorruptError
        If a value is missing: results have none.
    """
    values = stored.flatten()
    if stored.null_count or values.null_count:
        raise CorruptError(
            f"Column {column.name!r} holds {stored.null_count or values.null_count} missing values; results have none."
        )
    flat: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return flat.astype(column.dtype, copy=False).reshape(len(stored), column.n_values)
