"""Compiled loops that map the columns of CSR rows and leave every row sorted. Imports numba: import it inside functions only."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])

SORTED, MOVED, REPEATED = 0, 1, 2
"""What `fill_rows` found: every row in order as stored, some row reordered, a column twice in one row."""

_FEW = 24
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)


def _bit_places() -> NDArray[np.int64]:
    """Give the place of the single bit of a word, by the six top bits of its product with the de Bruijn number."""
    places = np.zeros(64, np.int64)
    for bit in range(64):
        places[((0x03F79D71B4CB0A89 << bit) & (2**64 - 1)) >> 58] = bit
    return places


BIT_PLACES = _bit_places()


def _compiled(function: F) -> F:
    """Compile for one thread, without the GIL, kept on disk between processes."""
    compiled: Any = numba.njit(cache=True, nogil=True)(function)
    return cast("F", compiled)


@_compiled
def count_rows(
    indptr: NDArray[np.int64], local: NDArray[Any], kept: NDArray[np.bool_], counts: NDArray[np.int64]
) -> bool:
    """Count the entries of every row whose column is kept.

    Parameters
    ----------
    indptr : (n_rows + 1,) int64
        Row bounds in `local`.
    local : (n_entries,) unsigned
        Columns as stored.
    kept : (n_local,) bool
        Whether a column is kept.
    counts : (n_rows,) int64
        Filled.

    Returns
    -------
    bool
        False if a column is beyond `kept`; then the counts mean nothing.
    """
    n = kept.size
    for row in range(indptr.size - 1):
        found = 0
        for i in range(indptr[row], indptr[row + 1]):
            if local[i] >= n:
                return False
            found += kept[local[i]]
        counts[row] = found
    return True


@_compiled
def fill_rows(
    rows: tuple[NDArray[np.int64], NDArray[Any]],
    column_map: NDArray[np.int32],
    targets: NDArray[np.int64],
    offset: int,
    found: tuple[NDArray[Any], NDArray[np.int64]],
    scratch: tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]],
) -> int:
    """Write the mapped columns of every row, sorted, and where each entry came from.

    Parameters
    ----------
    rows : (indptr, local)
        As `count_rows` takes them, which has checked that columns are inside the map.
    column_map : (n_local,) int32 or int64
        New column, -1 where it is left out.
    targets : (n_rows,) int64
        First output entry of every row.
    offset : int
        Position of ``local[0]`` among the entries of all groups.
    found : (indices, at)
        Output: columns, and positions among the entries of all groups.
    scratch : (words, slots, places)
        ``(n_out // 64 + 1,) uint64`` zeros, ``(n_out,) int64``, and `BIT_PLACES`. A wide row is sorted by setting a bit per
        column and walking the words.

    Returns
    -------
    int
        `SORTED`, `MOVED` or `REPEATED`.
    """
    indptr, local = rows
    indices, at = found
    state = 0
    for row in range(indptr.size - 1):
        start = targets[row]
        stop, previous, ascending = start, -1, True
        for i in range(indptr[row], indptr[row + 1]):
            column = column_map[local[i]]
            if column >= 0:
                ascending = ascending and column > previous
                previous = column
                indices[stop] = column
                at[stop] = offset + i
                stop += 1
        if not ascending:
            state = max(state, 1)
            if stop - start <= _FEW:
                repeated = _insert(indices, at, start, stop)
            else:
                repeated = _walk_bits(indices, at, (start, stop), scratch)
            if repeated:
                return 2
    return state


@_compiled
def _insert(indices: NDArray[Any], at: NDArray[np.int64], start: int, stop: int) -> bool:
    """Sort few entries by insertion; tell whether a column stands there twice."""
    repeated = False
    for i in range(start + 1, stop):
        column, place, j = indices[i], at[i], i
        while j > start and indices[j - 1] > column:
            indices[j], at[j] = indices[j - 1], at[j - 1]
            j -= 1
        repeated = repeated or (j > start and indices[j - 1] == column)
        indices[j], at[j] = column, place
    return repeated


@_compiled
def _walk_bits(
    indices: NDArray[Any],
    at: NDArray[np.int64],
    span: tuple[int, int],
    scratch: tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]],
) -> bool:
    """Sort many entries by setting bits; tell whether a column stands there twice. Words are left zero."""
    words, slots, places = scratch
    start, stop = span
    column, word = np.int64(0), np.int64(0)
    one = np.uint64(1)
    lowest, highest, repeated = np.int64(words.size), np.int64(-1), False
    for j in range(start, stop):
        column = np.int64(indices[j])
        word = column >> 6
        bit = one << np.uint64(column & 63)
        repeated = repeated or (words[word] & bit) != 0
        words[word] |= bit
        slots[column] = at[j]
        lowest, highest = min(lowest, word), max(highest, word)
    out = start
    for word in range(lowest, highest + 1):  # type: ignore[assignment]
        bits = words[word]
        words[word] = np.uint64(0)
        while bits != 0:
            rest = bits & (bits - one)
            place = places[np.int64(((bits ^ rest) * _DE_BRUIJN) >> np.uint64(58))]
            column = np.int64((word << 6) + place)
            indices[out] = column
            at[out] = slots[column]
            out += 1
            bits = rest
    return repeated


@_compiled
def count_places(
    at: NDArray[Any], place: NDArray[np.int32], counts: NDArray[np.int64], places: NDArray[np.int32]
) -> bool:
    """Find the output row of every entry of a column-sorted copy, and count those of every output row.

    Parameters
    ----------
    at : (n,) unsigned integers
        Stored row of every entry.
    place : (n_stored_rows,) int32
        Output row of every stored row, -1 where it is not wanted.
    counts : (n_rows,) int64
        Added to.
    places : (n,) int32
        Output.

    Returns
    -------
    bool
        False if an entry names a row that is not stored.
    """
    for i in range(at.size):
        stored = np.int64(at[i])
        if stored < 0 or stored >= place.size:
            return False
        row = place[stored]
        places[i] = row
        if row >= 0:
            counts[row] += 1
    return True


@_compiled
def fill_places(
    entries: tuple[NDArray[np.int32], NDArray[Any]],
    columns: tuple[NDArray[np.int64], NDArray[np.int64]],
    cursor: NDArray[np.int64],
    out: tuple[NDArray[Any], NDArray[Any]],
) -> bool:
    """Write entries that come column by column into their rows, so that the columns of every row ascend.

    Parameters
    ----------
    entries : two (n,) arrays
        Output row (-1 where it is not wanted) and value.
    columns : (bounds, numbers)
        Where the entries of each column begin and end, (k + 1,), and the column of the output, (k,), ascending.
    cursor : (n_rows + 1,) int64
        First output entry of every row; moved on.
    out : (indices, values)
        Output.

    Returns
    -------
    bool
        False if a column names a row twice.
    """
    places, values = entries
    last = np.full(cursor.size, -1, np.int32)
    for k in range(columns[1].size):
        for i in range(columns[0][k], columns[0][k + 1]):
            row = places[i]
            if row < 0:
                continue
            if last[row] == k:
                return False
            last[row] = k
            out[0][cursor[row]] = columns[1][k]
            out[1][cursor[row]] = values[i]
            cursor[row] += 1
    return True
