"""Rows of sparse matrices: renumber, sort and count their columns, move their entries. The loops are in ``native/``."""

from ctypes import byref, c_int64
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, SourceError
from raggedatlas.model.batch import CsrBlock
from raggedatlas.store.native import BAD_BOUNDS, BAD_COLUMN, GOOD, REPEATED, csr_of, library
from raggedatlas.store.runtime import DECODE_THREADS, map_decode

_ENTRIES_PER_THREAD = 2**18
"""Fewer are mapped before another thread has begun."""


def count_columns(indices: NDArray[Any], n_columns: int) -> NDArray[np.int64]:
    """Count how often every column is named; columns outside ``0..n_columns - 1`` are not counted."""
    counts = np.zeros(n_columns, np.int64)
    columns = np.ascontiguousarray(indices)
    library().ra_count_columns(columns, columns.size, columns.itemsize, counts, n_columns)
    return counts


def count_kept(
    indptr: NDArray[np.int64], indices: NDArray[Any], column_map: NDArray[Any], what: str
) -> NDArray[np.int64]:
    """Count the entries of every row whose column is kept.

    `indptr`, (n_rows + 1,), need not start at 0. `column_map`, int32 or int64, has the new column of every old one, or
    -1 where it is left out. `what` names what has the columns in messages. Bounds that fall or go beyond the entries,
    and columns beyond the map, are a `CorruptError`.
    """
    counts, where = np.zeros(len(indptr) - 1, np.int64), c_int64()
    rows = csr_of(indptr, indices)
    fault = library().ra_count_kept(byref(rows), column_map, len(column_map), column_map.itemsize, counts, byref(where))
    refuse_rows(fault, what, where.value, len(column_map))
    return counts


def refuse_rows(fault: int, what: str, row: int | None, n_columns: int) -> None:
    """Raise the `CorruptError` that the status of a compiled function over rows stands for; other statuses pass."""
    says = {
        BAD_BOUNDS: "has bounds that fall or go beyond its entries",
        BAD_COLUMN: f"names a column that it has not got: there are {n_columns:,}",
        REPEATED: "names a column twice",
    }
    if fault in says:
        which = "a row" if row is None else f"row {row:,}"
        raise CorruptError(f"{what}: {which} {says[fault]}; run validate('deep').")


def map_rows(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    column_map: NDArray[Any],
    n_columns: int,
    targets: NDArray[np.int64],
    out: NDArray[Any],
    at: NDArray[np.int64],
) -> int:
    """Write the new columns of every row, ascending, and where each entry came from; on several threads where it pays.

    `indices` are columns in any order. `column_map`, of the dtype of `out` (int32 or int64), has the new column of
    every old one, or -1 where it is left out. `targets`, (n_rows,), is the first output entry of every row; `out` gets
    the new columns, `at` positions in `indices`. Returns GOOD, UNSORTED where a row had to be sorted, or a fault:
    REPEATED, BAD_COLUMN, BAD_BOUNDS.
    """

    def fill(span: tuple[int, int]) -> int:
        first, last = span
        rows = csr_of(indptr[first : last + 1], indices)
        words, slots = np.zeros(n_columns // 64 + 1, np.uint64), np.empty(n_columns, np.int64)
        return int(
            library().ra_map_rows(
                byref(rows), column_map, len(column_map), column_map.itemsize, targets[first:last], out, at,
                len(at), words, slots, n_columns,
            )
        )  # fmt: skip

    counts = map_decode(fill, _spans(indptr))
    faults = [state for state in counts if state in (REPEATED, BAD_COLUMN, BAD_BOUNDS)]
    # Besides the faults there are GOOD (0) and UNSORTED (9), so the maximum tells whether any row was sorted.
    return faults[0] if faults else max(counts, default=GOOD)


def _spans(indptr: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut rows into runs of about equally many entries, one for each thread where there are enough."""
    first, last = int(indptr[0]), int(indptr[-1])
    n = min(DECODE_THREADS, 1 + (last - first) // _ENTRIES_PER_THREAD)
    cuts = np.searchsorted(indptr, np.linspace(first, last, max(n, 1) + 1)[1:-1])
    edges = [0, *cuts.tolist(), len(indptr) - 1]
    return [(low, high) for low, high in pairwise(edges) if high > low]


def remap_csr(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    values: NDArray[Any],
    column_map: NDArray[np.int64],
    n_out: int,
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
    """Send the columns of CSR rows through a map, drop those mapped to -1, and sort every row.

    `indptr` starts at 0, and `indices` may be in any order. `column_map` has the new column of every old one, of
    `n_out`, or -1 to drop it. Returns bounds, columns (int32 where that is enough for `n_out`, else int64) and values
    of the same dtype; entries of equal column keep their order.

    Bounds that fall or go beyond the entries, and columns that are beyond the map or mapped beyond `n_out`, are a
    `CorruptError`.
    """
    places = column_map.astype(np.int32 if n_out <= np.iinfo(np.int32).max else np.int64)
    bounds = np.zeros(len(indptr), np.int64)
    np.cumsum(count_kept(indptr, indices, places, "A sparse matrix"), out=bounds[1:])
    out, positions, moved = (np.empty(bounds[-1], dtype) for dtype in (places.dtype, np.int64, values.dtype))
    fault = map_rows(indptr, indices, places, n_out, bounds[:-1], out, positions)
    # The compiled code marks columns in a bitmap, which holds a column once. `count_kept` has checked `indices`, so
    # `places[indices]` stays inside.
    if fault == REPEATED:
        # Repeated columns are few, or a file is odd. `lexsort` is stable and sorts by its last key first.
        columns, rows = places[indices], np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        kept = np.flatnonzero(columns >= 0)
        positions = kept[np.lexsort((columns[kept], rows[kept]))]
        return bounds, places[indices[positions]], values[positions]
    refuse_rows(fault, "A sparse matrix with new columns", None, n_out)
    # each place is within; "clip" alone needs no second buffer
    return bounds, out, np.take(values, positions, out=moved, mode="clip")


def sorting_order(indptr: NDArray[np.int64], indices: NDArray[Any], n_columns: int) -> NDArray[np.int64]:
    """Find the order that sorts the entries of every row by column; equal columns keep their order.

    `indptr` starts at 0. With the result, ``indices[order]`` ascends in every row. Errors are those of `remap_csr`.
    """
    return remap_csr(indptr, indices, np.arange(len(indices)), np.arange(n_columns), n_columns)[2]


def move_runs(
    values: NDArray[Any],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    targets: NDArray[np.int64],
    out: NDArray[Any],
) -> None:
    """Copy runs of values, ``out[targets[i] : targets[i] + counts[i]] = values[starts[i] : starts[i] + counts[i]]``.

    `values` are converted to the dtype of `out`. If a run lies outside `values` or `out`, a `CorruptError` is raised,
    and some runs may have been copied.
    """
    values, size = np.ascontiguousarray(values, out.dtype), out.itemsize
    if library().ra_move_runs(values, len(values), starts, counts, targets, len(starts), size, out, len(out)) != GOOD:
        raise CorruptError("Rows of a sparse matrix lie outside its entries; run validate('deep').")


def scan_integers(values: NDArray[Any]) -> tuple[int, int, bool]:
    """Scan floats that are probably all whole numbers; several times faster than looking for those that are not.

    `values` are float32 or float64, at least one. Returns the smallest and the largest, and whether all are whole and
    within 32 bits; if not, the first two mean nothing.
    """
    bounds = np.empty(2, np.int64)
    whole = library().ra_scan_whole(values, values.size, values.itemsize, bounds)
    return int(bounds[0]), int(bounds[1]), bool(whole)


def canonicalize(block: CsrBlock, key: str, first_row: int, *, sum_duplicates: bool) -> tuple[CsrBlock, int]:
    """Sort the entries of each row by column and sum those that name a column twice.

    Without `sum_duplicates`, a row that names a column twice is a `SourceError`. Returns the block, its indices uint32
    and strictly ascending in each row, and how many entries were summed away. `key` names the matrix in messages;
    `first_row` is its row that the block starts at.
    """
    given, where = csr_of(block.indptr, block.indices), c_int64()
    fault = library().ra_check_order(byref(given), block.n_cols, byref(where))
    if fault == BAD_BOUNDS:
        raise SourceError(
            f"{key} has pointers that fall or go beyond its entries at cell {first_row + where.value}; fix the file."
        )
    if fault == GOOD:
        # The check compared columns as unsigned numbers below `n_cols`, so none is negative and the view is exact.
        four = block.indices.dtype.itemsize == 4
        indices = block.indices.view(np.uint32) if four else block.indices.astype(np.uint32)
        return CsrBlock(block.indptr, indices, block.layers, block.n_cols), 0
    try:
        order = sorting_order(block.indptr, block.indices, block.n_cols)
    except CorruptError as error:
        raise SourceError(f"{key} names a column outside its {block.n_cols:,} columns; fix the file.") from error
    indices, values = block.indices[order].astype(np.uint32), block.layers["values"][order]
    rows = np.repeat(np.arange(block.n_rows), np.diff(block.indptr))
    # Sorted by row and column, an entry is repeated if it equals the one before.
    first = np.ones(len(indices), bool)
    first[1:] = (rows[1:] != rows[:-1]) | (indices[1:] != indices[:-1])
    if first.all():
        return CsrBlock(block.indptr, indices, {"values": values}, block.n_cols), 0
    if not sum_duplicates:
        at = int(np.argmin(first))
        raise SourceError(
            f"{key} names feature {int(indices[at])} twice in cell {first_row + int(rows[at])} (both counted from 0); fix the file, or "
            "pass duplicate_entries='sum'."
        )
    # Sums of narrow integers could wrap; `LayerFit` chooses the stored type from the sums.
    wide = values if values.dtype.kind == "f" else values.astype(np.uint64 if values.dtype.kind in "bu" else np.int64)
    values = np.add.reduceat(wide, np.flatnonzero(first))
    indptr = np.zeros(block.n_rows + 1, np.int64)
    np.cumsum(np.bincount(rows[first], minlength=block.n_rows), out=indptr[1:])
    return CsrBlock(indptr, indices[first], {"values": values}, block.n_cols), int(len(first) - first.sum())
