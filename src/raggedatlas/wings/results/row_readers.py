"""Row access to one column of a Lance table: from memory-mapped data files, from memory, or through Lance's `take`."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.store.sql import in_list
from raggedatlas.wings.results.folder import result_errors
from raggedatlas.wings.results.schema import OBJECT_ID, ResultColumn

if TYPE_CHECKING:
    import lance

BLOCK_ROWS = 2048
"""Number of rows prefetched when a column is read sequentially, row by row."""


class PageRowReader:
    """Rows stored contiguously in pages, each page at some offset of a flat array of values.

    `values` are those of each file, (n,), including whatever is stored between pages. Of each page, `starts` is the
    first row, ascending from 0, `files` the index into `values` of its file, and `offsets` the position of its first
    value there, counted in values.

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
        self._starts, self._files = list(starts), list(files)
        # Offset that row 0 would have if the page extended back to it, so that one addition locates a row.
        self._bases = [offset - start * n_values for offset, start in zip(offsets, starts, strict=True)]
        self._page_starts, self._page_bases = np.array(starts, np.int64), np.array(self._bases, np.int64)
        self._page_files = np.array(files, np.int64)
        # Every window of n values is a row of this view; nothing is copied.
        self._windows = tuple(np.lib.stride_tricks.sliding_window_view(each, n_values) for each in self._values)

    def one(self, row: int) -> NDArray[Any]:
        """Return one row as a read-only ``(n_values,)`` array."""
        page = bisect_right(self._starts, row) - 1
        begin = self._bases[page] + row * self._n
        return self._values[self._files[page]][begin : begin + self._n]

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Copy rows into a new ``(k, n_values)`` array, in the requested order."""
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
        """Copy consecutive rows, beginning with `start`, into ``out``, ``(k, n_values)``."""
        done = 0
        while done < len(out):
            page = bisect_right(self._starts, start + done) - 1
            # No page follows the last one; the caller has validated the rows, so it has the rest.
            end = self._starts[page + 1] if page + 1 < len(self._starts) else start + len(out)
            k = min(end - start, len(out)) - done
            begin = self._bases[page] + (start + done) * self._n
            out[done : done + k] = self._values[self._files[page]][begin : begin + k * self._n].reshape(k, self._n)
            done += k


class LanceRowReader:
    """Rows read through Lance, in the requested order; sequential single-row reads are served from prefetched blocks.

    `table` is pinned to a version, and has `n_rows` rows.
    """

    def __init__(self, table: "lance.LanceDataset", column: ResultColumn, n_rows: int) -> None:
        self._table, self._column, self._n_rows = table, column, n_rows
        self._block = np.empty((0, column.n_values), column.dtype)
        self._start = 0
        # Not -1, after which row 0 would count as read in sequence.
        self._last = -2

    def one(self, row: int) -> NDArray[Any]:
        """Return one row as a read-only ``(n_values,)`` array."""
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
        """Copy rows into a new ``(k, n_values)`` array, in the requested order."""
        if len(rows) == 0:
            return np.empty((0, self._column.n_values), self._column.dtype)
        with result_errors(self._table):
            taken = self._table.take(rows, columns=[self._column.name])
        found = to_matrix(taken.column(self._column.name).combine_chunks(), self._column)
        # Arrow's buffers are read-only, and Lance may keep references to them.
        return found if found.flags.writeable else found.copy()

    def span(self, start: int, out: NDArray[Any]) -> None:
        """Copy consecutive rows, beginning with `start`, into ``out``, ``(k, n_values)``."""
        if len(out) == 0:
            return
        done = 0
        with result_errors(self._table):
            for batch in self._table.to_batches(columns=[self._column.name], offset=start, limit=len(out)):
                out[done : done + batch.num_rows] = to_matrix(batch.column(0), self._column)
                done += batch.num_rows
        if done != len(out):
            raise CorruptError(f"{self._table.uri} returned {done} rows starting at row {start}; expected {len(out)}.")


def to_matrix(stored: "pa.FixedSizeListArray", column: ResultColumn) -> NDArray[Any]:
    """Convert an Arrow list array to a ``(k, n_values)`` array.

    Raises `CorruptError` if a value is null; results never contain nulls.
    """
    # `flatten` respects the offset of a slice; `.values` does not.
    values = stored.flatten()
    if stored.null_count or values.null_count:
        raise CorruptError(
            f"Column {column.name!r} contains {stored.null_count or values.null_count} null values; results cannot contain nulls."
        )
    flat: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return flat.astype(column.dtype, copy=False).reshape(len(stored), column.n_values)


_WHITESPACE = re.compile(r"\s+")
# Lance's description of a page of plain rows, without white space; one that reads differently is not mapped.
_PLAIN_PAGE = (
    "PageLayout{{layout:Some(FullZipLayout(FullZipLayout{{bits_rep:0,bits_def:0,num_items:{n_rows},num_visible_items:{n_rows},"
    "value_compression:Some(CompressiveEncoding{{compression:Some(FixedSizeList(FixedSizeList{{items_per_value:{n_values},"
    "has_validity:false,values:Some(CompressiveEncoding{{compression:Some(Flat(Flat{{bits_per_value:{bits},data:None,}},),),}},"
    "),}},),),}},),layers:[RepdefAllValidItem,],details:Some(BitsPerValue({row_bits},),),}},),),}}"
)


def map_column(table: "lance.LanceDataset", column: ResultColumn, folder: Path) -> PageRowReader | None:
    """Memory-map the pages of a column of a table that is pinned to a version and lies in a local folder.

    Returns None if the rows are not stored uncompressed and contiguous, or any other expectation fails.
    """
    size = column.dtype.itemsize
    values: list[NDArray[Any]] = []
    starts, files, offsets, n_rows = list[int](), list[int](), list[int](), 0
    field = next(int(field.id()) for field in table.lance_schema.fields() if field.name() == column.name)
    with result_errors(table):
        for fragment in table.get_fragments():
            own = [file for file in fragment.data_files() if field in file.fields]
            # Deleted rows remain in the pages and would shift all rows after them.
            if fragment.num_deletions or len(own) != 1:
                return None
            path = folder / "data" / own[0].path
            at = own[0].column_indices[own[0].fields.index(field)] if own[0].column_indices else -1
            pages = _plain_pages(path, at, column)
            if pages is None or sum(n for _, n in pages) != fragment.count_rows():
                return None
            for position, n in pages:
                starts.append(n_rows)
                files.append(len(values))
                offsets.append(position // size)
                n_rows += n
            values.append(np.asarray(np.memmap(path, column.dtype, "r", shape=(path.stat().st_size // size,))))
    if not starts:
        return None
    rows = PageRowReader(values, starts, files, offsets, column.n_values)
    # First and last row of every page, where a wrong offset or length would show.
    edges = np.unique([*starts, *(start - 1 for start in starts[1:]), n_rows - 1])
    return rows if _matches_lance(table, column, rows, edges) else None


def _plain_pages(path: Path, index: int, column: ResultColumn) -> list[tuple[int, int]] | None:
    """Return position and number of rows of the pages of one column in a file; None if one of them is not plain rows."""
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
        plain = _WHITESPACE.sub("", str(page.encoding)) == expected
        if (
            not plain
            or length != n_rows * column.n_bytes
            or position % column.dtype.itemsize
            or position + length > size
        ):
            return None
        found.append((position, n_rows))
    return found


def _matches_lance(
    table: "lance.LanceDataset", column: ResultColumn, rows: PageRowReader, sample: NDArray[np.int64]
) -> bool:
    """Return whether some rows are bit-identical to those that Lance reads."""
    with result_errors(table):
        taken = table.take(sample, columns=[column.name])
    expected: bytes = to_matrix(taken.column(column.name).combine_chunks(), column).tobytes()
    return expected == rows.read(sample).tobytes()


_CHUNK_IDS = 2**16


class ObjectIds:
    """Object ids in row order: a sequence, an iterator with its own position, and a NumPy-compatible array.

    `values` are strings.

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
        """Return the number of ids, independent of the iterator position."""
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        """Compare with other ids or any sequence of strings, by length and element by element."""
        if isinstance(other, ObjectIds):
            return self is other or self._values.cast(pa.large_string()).equals(other._values.cast(pa.large_string()))
        if isinstance(other, Sequence | np.ndarray) and not isinstance(other, str | bytes):
            return len(self) == len(other) and all(own == each for own, each in zip(self, other, strict=True))
        return NotImplemented

    def __iter__(self) -> Iterator[str]:
        """Iterate from the first id."""
        for start in range(0, len(self._values), _CHUNK_IDS):
            yield from self._values.slice(start, _CHUNK_IDS).to_pylist()

    def __next__(self) -> str:
        """Return the next id."""
        if self._next >= len(self._values):
            raise StopIteration
        self._next += 1
        return self[self._next - 1]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return one id or a slice of ids, like a list."""
        if isinstance(index, slice):
            rows = np.arange(*index.indices(len(self)))
            found: list[str] = self._values.take(pa.array(rows)).to_pylist()
            return found
        value: str = self._values[index].as_py()
        return value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: ANN401, FBT001  (NumPy's protocol)
        """Return the ids as an array of fixed-width strings, or of another dtype."""
        values: NDArray[Any] = self._values.to_numpy(zero_copy_only=False)
        return values.astype(np.str_ if dtype is None else dtype)

    def to_arrow(self) -> pa.Array:
        """Return the underlying Arrow array, without a copy."""
        return self._values


def has_deletions(table: "lance.LanceDataset") -> bool:
    """Return whether rows were deleted, which row addresses still count; results written here have none."""
    return any(each.num_deletions for each in table.get_fragments())


def lookup_rows(table: "lance.LanceDataset", ids: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Look up the rows of some ids, at most a few thousand, in the table's scalar index.

    Returns row numbers, (k,), and for each row the position of its id in `ids`; one entry per occurrence. None if there
    is no index, or rows were deleted.
    """
    if not any(OBJECT_ID in map(str, index.field_names) for index in table.describe_indices()) or has_deletions(table):
        return None
    found = table.to_table(columns=[OBJECT_ID], filter=in_list(OBJECT_ID, ids), with_row_address=True)
    position = pc.index_in(found.column(OBJECT_ID), value_set=pa.array(list(ids), pa.string()))
    return row_numbers(table)(found), position.to_numpy().astype(np.int64)


def row_numbers(table: "lance.LanceDataset") -> Callable[[pa.Table], NDArray[np.int64]]:
    """Return a function of rows that were read with their addresses, which returns their numbers, (k,) int64."""
    fragments = table.get_fragments()
    starts = np.cumsum([0, *(each.count_rows() for each in fragments)])
    first = {each.fragment_id: start for each, start in zip(fragments, starts, strict=False)}

    def numbers(rows: pa.Table) -> NDArray[np.int64]:
        # A row address has the fragment's id in its upper 32 bits and the row within it in the lower ones.
        addresses = rows.column("_rowaddr").to_numpy()
        row: NDArray[np.int64] = (addresses & np.uint64(2**32 - 1)).astype(np.int64)
        row += np.array([first[int(address >> np.uint64(32))] for address in addresses], np.int64)
        return row

    return numbers
