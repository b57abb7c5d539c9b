"""Compiled CSR loops: remap columns, sort rows, count columns.

This module imports numba at the top, so it is imported inside functions only.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from raggedatlas.store.lanes import popcount, trailing_zeros
from raggedatlas.store.threads import DECODE_THREADS, map_decode

F = TypeVar("F", bound=Callable[..., Any])

Integer: TypeAlias = Any
"""An integer of any width, as compiled code passes it."""

Flag: TypeAlias = Any
"""A truth value, as compiled code passes it."""


def compiled(function: F) -> F:
    """Compile for one thread, without the GIL, kept on disk between processes."""
    make: Any = numba.njit(cache=True, nogil=True)
    return cast("F", make(function))


def address_function(n: int) -> Callable[[Callable[..., Integer]], Any]:
    """Compile a function of n int64 that returns one, once, to be called at its ``address`` or through its ``ctypes``."""
    make: Any = numba.cfunc(numba.types.int64(*(numba.types.int64,) * n), cache=True)
    return cast("Callable[[Callable[..., Integer]], Any]", make)


def remap_csr(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    values: NDArray[Any],
    column_map: NDArray[np.int64],
    n_out: int,
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
    """Send the columns of CSR rows through a map, drop those mapped to -1, and keep every row sorted.

    Parameters
    ----------
    indptr : (n_rows + 1,) int64
        Row bounds, starting at 0.
    indices : (nnz,) integers
        Column of every value; rows sorted where the map is monotone, else in any order.
    values : (nnz,) any fixed-size dtype
        The values.
    column_map : (n_columns,) int64
        New column of every old one, or -1 to drop it.
    n_out : int
        Number of new columns; columns are int32 where that is enough, else int64.

    Returns
    -------
    (indptr, indices, values)
        int64 bounds, int32 or int64 columns, values of the same dtype. Entries of equal column keep their order.

    Raises
    ------
    IndexError
        If a column is beyond `column_map`, or maps beyond `n_out`.
    """
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= column_map.size):
        raise IndexError(f"A column lies outside 0..{column_map.size - 1}.")
    if column_map.size and int(column_map.max()) >= n_out:
        raise IndexError(f"The map leads to column {int(column_map.max())}; there are {n_out}.")
    kept = column_map[column_map >= 0]
    monotone = bool(np.all(kept[1:] >= kept[:-1]))
    dtype = np.int32 if n_out <= np.iinfo(np.int32).max else np.int64
    bounds = _count_kept(indptr, indices, column_map)
    out_indices, out_values = np.empty(bounds[-1], dtype), np.empty(bounds[-1], values.dtype)
    if monotone:
        _fill_kept((indptr, indices), _bits(values), column_map, out_indices, _bits(out_values))
        return bounds, out_indices, out_values
    cuts = np.searchsorted(indptr, np.linspace(0, indptr[-1], 1 + min(DECODE_THREADS, indices.size >> 18))[1:-1])
    edges = [0, *cuts.tolist(), indptr.size - 1]

    def fill(span: tuple[int, int]) -> None:
        first, last = span
        rows = (indptr[first : last + 1], indices), (bounds[first : last + 1], out_indices)
        scratch = np.zeros(n_out // 64 + 1, np.uint64), np.empty(n_out, np.int64)
        _fill_sorted(rows, _bits(values), column_map, _bits(out_values), scratch)

    map_decode(fill, [span for span in pairwise(edges) if span[0] < span[1]])
    return bounds, out_indices, out_values


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    """View values of up to eight bytes as unsigned integers, so that few variants are compiled."""
    if values.dtype.itemsize in {1, 2, 4, 8}:
        return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
    return values


def sort_rows(indptr: NDArray[np.int64], indices: NDArray[Any]) -> NDArray[np.int64]:
    """Sort the columns of every row in place; return the stable order, to apply to values.

    Parameters
    ----------
    indptr : (n_rows + 1,) int64
        Row bounds.
    indices : (nnz,) integers
        Columns; sorted in place.

    Returns
    -------
    (nnz,) int64
        Old position of every new one: ``values[order]`` follows the sorted columns.
    """
    order = np.arange(indices.size, dtype=np.int64)
    _sort_rows(indptr, indices, order)
    return order


@compiled
def _sort_rows(indptr: NDArray[np.int64], indices: NDArray[Any], order: NDArray[np.int64]) -> None:
    """Sort rows that are not sorted yet."""
    for row in range(indptr.size - 1):
        first, last = indptr[row], indptr[row + 1]
        for i in range(first + 1, last):
            if indices[i] < indices[i - 1]:
                local = np.argsort(indices[first:last], kind="mergesort")
                indices[first:last] = indices[first:last][local]
                order[first:last] = local + first
                break


@compiled
def _fill_sorted(
    rows: tuple[tuple[NDArray[np.int64], NDArray[Any]], tuple[NDArray[np.int64], NDArray[Any]]],
    values: NDArray[Any],
    column_map: NDArray[np.int64],
    out_values: NDArray[Any],
    scratch: tuple[NDArray[np.uint64], NDArray[np.int64]],
) -> None:
    """Write the kept entries of every row by ascending column: one bit a column, then the bits in their order."""
    (indptr, indices), (bounds, out_indices) = rows
    words, slots = scratch
    one = np.uint64(1)
    for row in range(indptr.size - 1):
        repeated, lowest, highest = False, np.int64(words.size), np.int64(-1)
        for i in range(indptr[row], indptr[row + 1]):
            column = column_map[indices[i]]
            if column >= 0:
                word = np.uint64(column) >> np.uint64(6)
                bit = one << (np.uint64(column) & np.uint64(63))
                repeated = repeated or (words[word] & bit) != 0
                words[word] |= bit
                slots[np.uint64(column)] = i
                lowest, highest = min(lowest, np.int64(word)), max(highest, np.int64(word))
        at = np.uint64(bounds[row])
        for number in range(lowest, highest + 1):
            bits = words[np.uint64(number)]
            words[np.uint64(number)] = 0
            while bits != 0 and not repeated:
                place = np.uint64(number * 64 + trailing_zeros(bits))
                out_indices[at] = place
                out_values[at] = values[np.uint64(slots[place])]
                at += one
                bits &= bits - one
        if repeated:
            _fill_by_order(
                (indptr[row], indptr[row + 1], bounds[row]), indices, values, column_map, out_indices, out_values
            )


@compiled
def _fill_by_order(
    span: tuple[int, int, int],
    indices: NDArray[Any],
    values: NDArray[Any],
    column_map: NDArray[np.int64],
    out_indices: NDArray[Any],
    out_values: NDArray[Any],
) -> None:
    """Write a row that names a column twice; equal columns keep their order."""
    first, last, at = span
    columns = np.empty(last - first, np.int64)
    for i in range(first, last):
        columns[i - first] = column_map[indices[i]]
    for i in np.argsort(columns, kind="mergesort"):
        if columns[i] >= 0:
            out_indices[at] = columns[i]
            out_values[at] = values[first + i]
            at += 1


@compiled
def walk_bits(words: NDArray[np.uint64], out: NDArray[Any]) -> Integer:
    """List the set bits, ascending, and clear them; return how many.

    Eight bits of a word are listed whether they are set or not: that is faster than to guess wrongly how many are.

    Parameters
    ----------
    words : (n_words,) uint64
        Left zero.
    out : (n_set + 8,) integers
        Numbers of the bits; up to eight behind the last are overwritten.
    """
    n, one, eight = np.uint64(0), np.uint64(1), np.uint64(8)
    for w in range(words.size):
        bits = words[w]
        if bits == 0:
            continue
        words[w] = 0
        first, count, at = np.int64(64 * w), np.uint64(popcount(bits)), n
        n += count
        while True:
            for k in range(8):
                out[at + np.uint64(k)] = first + trailing_zeros(bits)
                bits &= bits - one
            if count <= eight:
                break
            count -= eight
            at += eight
    return np.int64(n)


@compiled
def has_sorted_unique_rows(indptr: NDArray[np.int64], indices: NDArray[Any]) -> tuple[bool, bool]:
    """Tell whether the columns of every row ascend, and whether no row names a column twice.

    Parameters
    ----------
    indptr : (n_rows + 1,) int64
        Row bounds.
    indices : (nnz,) integers
        Columns.

    Returns
    -------
    (bool, bool)
        Sorted (equal neighbours allowed), unique.
    """
    ascending, unique = True, True
    for row in range(indptr.size - 1):
        first, last = indptr[row], indptr[row + 1]
        row_ascending = True
        for i in range(first + 1, last):
            if indices[i] < indices[i - 1]:
                row_ascending = False
            elif indices[i] == indices[i - 1]:
                unique = False
        if not row_ascending:
            ascending = False
            if unique:
                ordered = np.sort(indices[first:last])
                for i in range(1, ordered.size):
                    if ordered[i] == ordered[i - 1]:
                        unique = False
    return ascending, unique


@compiled
def count_columns(indices: NDArray[Any], n_columns: int) -> NDArray[np.int64]:
    """Count how often every column is named.

    Parameters
    ----------
    indices : (nnz,) integers
        Columns; those outside ``0..n_columns - 1`` are not counted.
    n_columns : int
        Number of columns.

    Returns
    -------
    (n_columns,) int64
    """
    counts = np.zeros(n_columns, np.int64)
    for i in range(indices.size):
        column = np.int64(indices[i])
        if 0 <= column < n_columns:
            counts[column] += 1
    return counts


@compiled
def _count_kept(indptr: NDArray[np.int64], indices: NDArray[Any], column_map: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row bounds after dropping the columns that map to -1."""
    bounds = np.zeros(indptr.size, np.int64)
    for row in range(indptr.size - 1):
        kept = 0
        for i in range(indptr[row], indptr[row + 1]):
            kept += column_map[indices[i]] >= 0
        bounds[row + 1] = bounds[row] + kept
    return bounds


@compiled
def _fill_kept(
    rows: tuple[NDArray[np.int64], NDArray[Any]],
    values: NDArray[Any],
    column_map: NDArray[np.int64],
    out_indices: NDArray[Any],
    out_values: NDArray[Any],
) -> None:
    """Write the kept columns and values of every row."""
    indptr, indices = rows
    position = 0
    for row in range(indptr.size - 1):
        for i in range(indptr[row], indptr[row + 1]):
            column = column_map[indices[i]]
            if column >= 0:
                out_indices[position] = column
                out_values[position] = values[i]
                position += 1
