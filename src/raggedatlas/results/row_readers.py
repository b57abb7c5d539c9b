"""Rows of one column of a Lance table: from its files as they are mapped, from memory, or by `take` in the order asked."""

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.results.folder import result_errors
from raggedatlas.results.schema import OBJECT_ID, ResultColumn
from raggedatlas.store.sql import in_list

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

BLOCK_ROWS = 2048
"""Rows that are read ahead where somebody walks over a column row by row."""


class RowReader(Protocol):
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


class PageRowReader:
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
    >>> PageRowReader([np.arange(9)], [0, 2], [0, 0], [0, 5], 2).read(np.array([2, 0]))
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


def array_reader(values: NDArray[Any]) -> PageRowReader:
    """Serve the rows of a ``(n, n_values)`` array."""
    return PageRowReader([values.reshape(-1)], [0], [0], [0], values.shape[1])


class LanceRowReader:
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
        found = to_matrix(taken.column(self._column.name).combine_chunks(), self._column)
        # Arrow's memory is not to be written to, and may be shared with what Lance keeps
        return found if found.flags.writeable else found.copy()

    def span(self, start: int, out: NDArray[Any]) -> None:
        """Copy the rows from `start` on into ``out``, ``(k, n_values)``."""
        if len(out) == 0:
            return
        done = 0
        with result_errors(self._table):
            for batch in self._table.to_batches(columns=[self._column.name], offset=start, limit=len(out)):
                out[done : done + batch.num_rows] = to_matrix(batch.column(0), self._column)
                done += batch.num_rows
        if done != len(out):
            raise CorruptError(
                f"{self._table.uri} gave {done} rows from row {start} on, and {len(out)} are said to be there."
            )


def to_matrix(stored: "pa.FixedSizeListArray", column: ResultColumn) -> NDArray[Any]:
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


_SPACE = re.compile(r"\s+")
_PLAIN_PAGE = (
    "PageLayout{{layout:Some(FullZipLayout(FullZipLayout{{bits_rep:0,bits_def:0,num_items:{n_rows},num_visible_items:{n_rows},"
    "value_compression:Some(CompressiveEncoding{{compression:Some(FixedSizeList(FixedSizeList{{items_per_value:{n_values},"
    "has_validity:false,values:Some(CompressiveEncoding{{compression:Some(Flat(Flat{{bits_per_value:{bits},data:None,}},),),}},"
    "),}},),),}},),layers:[RepdefAllValidItem,],details:Some(BitsPerValue({row_bits},),),}},),),}}"
)
_ENVIRONMENT = "RAGGEDATLAS_MAP_RESULTS"


@dataclass(frozen=True)
class _Page:
    file: int
    position: int
    n_rows: int


def is_mapping_enabled() -> bool:
    """Tell whether the environment leaves mapping on; ``RAGGEDATLAS_MAP_RESULTS=0`` switches it off."""
    return os.environ.get(_ENVIRONMENT, "1").lower() not in {"0", "false", "no", "off"}


def map_column(table: "lance.LanceDataset", column: ResultColumn, folder: Path) -> PageRowReader | None:
    """Map a column's pages.

    Parameters
    ----------
    table : lance.LanceDataset
        At its version.
    column : ResultColumn
        Which column.
    folder : pathlib.Path
        The table's folder on this machine.

    Returns
    -------
    PagedRows or None
        None where the rows do not lie in the files as they are, or anything about them is not as expected.
    """
    found = _find_pages(table, column, folder)
    if not found:
        return None
    paths, pages = found
    values = []
    for path in paths:
        items = path.stat().st_size // column.dtype.itemsize
        values.append(np.asarray(np.memmap(path, column.dtype, "r", shape=(items,))))
    starts = np.concatenate([[0], np.cumsum([page.n_rows for page in pages])])
    offsets = [page.position // column.dtype.itemsize for page in pages]
    rows = PageRowReader(values, starts[:-1].tolist(), [page.file for page in pages], offsets, column.n_values)
    edges = np.unique(np.concatenate([starts[:-1], starts[1:] - 1]))
    return rows if _agrees(table, column, rows, edges) else None


def _find_pages(
    table: "lance.LanceDataset", column: ResultColumn, folder: Path
) -> tuple[list[Path], list[_Page]] | None:
    """List the files and their pages in row order; None where a page is not plain rows."""
    paths: list[Path] = []
    pages: list[_Page] = []
    field = _field_id(table, column.name)
    with result_errors(table):
        for fragment in table.get_fragments():
            files = [file for file in fragment.data_files() if field in file.fields]
            if fragment.num_deletions or len(files) != 1:
                return None
            path = folder / "data" / files[0].path
            at = files[0].column_indices[files[0].fields.index(field)] if files[0].column_indices else -1
            found = _plain_pages(path, at, column, len(paths))
            if found is None or sum(page.n_rows for page in found) != fragment.count_rows():
                return None
            paths.append(path)
            pages += found
    return (paths, pages) if pages else None


def _field_id(table: "lance.LanceDataset", name: str) -> int:
    return next(int(field.id()) for field in table.lance_schema.fields() if field.name() == name)


def _plain_pages(path: Path, index: int, column: ResultColumn, file: int) -> list[_Page] | None:
    """Read where the pages of one column are in one file; None where one of them is not plain rows."""
    from lance.file import LanceFileReader

    metadata = LanceFileReader(str(path)).metadata()
    if not 0 <= index < len(metadata.columns):
        return None
    size, bits = path.stat().st_size, 8 * column.dtype.itemsize
    found = []
    for page in metadata.columns[index].pages:
        if len(page.buffers) != 1:
            return None
        position, length = int(page.buffers[0].position), int(page.buffers[0].size)
        n_rows = length // column.n_bytes
        expected = _PLAIN_PAGE.format(
            n_rows=n_rows, n_values=column.n_values, bits=bits, row_bits=bits * column.n_values
        )
        plain = _SPACE.sub("", str(page.encoding)) == expected
        if (
            not plain
            or length != n_rows * column.n_bytes
            or position % column.dtype.itemsize
            or position + length > size
        ):
            return None
        found.append(_Page(file, position, n_rows))
    return found


def _agrees(table: "lance.LanceDataset", column: ResultColumn, rows: PageRowReader, sample: NDArray[np.int64]) -> bool:
    """Compare some rows, bit by bit, with those that Lance gives."""
    with result_errors(table):
        taken = table.take(sample, columns=[column.name])
    expected: bytes = to_matrix(taken.column(column.name).combine_chunks(), column).tobytes()
    return expected == rows.read(sample).tobytes()


_PIECE = 2**16


class ObjectIds:
    """Ids in row order: a sequence, an iterator with a place of its own, and an array for NumPy.

    Parameters
    ----------
    values : pyarrow.Array
        Texts.

    Examples
    --------
    >>> ids = ObjectIds(pa.array(["a", "b"]))
    >>> next(ids), list(ids), len(ids), ids[1], np.array(ids)
    ('a', ['a', 'b'], 2, 'b', array(['a', 'b'], dtype='<U1'))
    >>> ids == ["a", "b"]
    True
    """

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none

    def __init__(self, values: pa.Array) -> None:
        self._values = values
        self._next = 0

    def __len__(self) -> int:
        """Count the ids, whatever `next` has given already."""
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        """Compare with other ids or any sequence of texts, by length and item by item."""
        if isinstance(other, ObjectIds):
            return self is other or self._values.cast(pa.large_string()).equals(other._values.cast(pa.large_string()))
        if isinstance(other, Sequence | np.ndarray) and not isinstance(other, str | bytes):
            return len(self) == len(other) and all(own == each for own, each in zip(self, other, strict=True))
        return NotImplemented

    def __iter__(self) -> Iterator[str]:
        """Begin from the first."""
        for start in range(0, len(self._values), _PIECE):
            yield from self._values.slice(start, _PIECE).to_pylist()

    def __next__(self) -> str:
        """Give the next id."""
        if self._next >= len(self._values):
            raise StopIteration
        self._next += 1
        return self[self._next - 1]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Give one id or a slice of them, as a list does."""
        if isinstance(index, slice):
            rows = np.arange(*index.indices(len(self)))
            found: list[str] = self._values.take(pa.array(rows)).to_pylist()
            return found
        value: str = self._values[index].as_py()
        return value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: ANN401, FBT001  (NumPy's protocol)
        """Return the ids as an array of fixed-width texts, or of another dtype."""
        values: NDArray[Any] = self._values.to_numpy(zero_copy_only=False)
        return values.astype(np.str_ if dtype is None else dtype)

    def to_arrow(self) -> pa.Array:
        """Give the Arrow array, which is shared."""
        return self._values


def lookup_rows(table: "lance.LanceDataset", ids: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Ask the table's index over ids for the rows of some of them.

    Parameters
    ----------
    table : lance.LanceDataset
        Of results.
    ids : sequence of str
        At most some thousands.

    Returns
    -------
    tuple of (k,) int64 and (k,) int64, or None
        Rows, and which of the asked ids each has, a row for each time that one stands there; None where there is no index.
    """
    if not any(OBJECT_ID in map(str, index.field_names) for index in table.describe_indices()):
        return None
    found = table.to_table(columns=[OBJECT_ID], filter=in_list(OBJECT_ID, ids), with_row_address=True)
    addresses = found.column("_rowaddr").to_numpy()
    fragments = table.get_fragments()
    starts = np.cumsum([0, *(each.count_rows() for each in fragments)])
    first = {each.fragment_id: start for each, start in zip(fragments, starts, strict=False)}
    rows = (addresses & np.uint64(2**32 - 1)).astype(np.int64)
    rows += np.array([first[int(address >> np.uint64(32))] for address in addresses], np.int64)
    position = pc.index_in(found.column(OBJECT_ID), value_set=pa.array(list(ids), pa.string()))
    return rows, position.to_numpy().astype(np.int64)
