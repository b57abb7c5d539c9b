"""Compiled loops over the entries of a sparse matrix."""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray


@numba.njit(nogil=True, cache=True)
def scan_entries(
    indices: NDArray[Any],
    bounds: NDArray[np.int64],
    first: int,
    seen: NDArray[np.int64],
    found: NDArray[np.int64],
    n: int,
) -> None:
    """Look for entries that are out of range, there twice, or out of order, in one block of a sparse matrix.

    Parameters
    ----------
    indices : (n_entries,) integers
        Their places on the minor axis.
    bounds : (n_rows + 1,) int64
        Where each row of the block starts and ends among them, from 0 up to n_entries.
    first : int
        Number of the block's first row.
    seen : (n,) or (0,) int64
        For each place of the minor axis one more than the last row that was found to have it, 0 at first; kept between
        blocks. Where it is empty, only neighbours are compared.
    found : (7,) int64
        Added to: how many entries are out of range, twice, out of order; the first row of each, -1 for none; and the last
        place, which a row that began in the block before continues from (-1 for none).
    n : int
        Length of the minor axis.
    """
    n_rows = bounds.size - 1
    for r in range(n_rows):
        start, stop = bounds[r], bounds[r + 1]
        # A row that may go on in another block is remembered place by place; of any other it is enough that it ascends.
        if 0 < r < n_rows - 1:
            if start == stop:
                continue
            before, after = indices[start : stop - 1], indices[start + 1 : stop]
            falls = 0
            for i in range(after.size):
                falls += after[i] <= before[i]
            if falls == 0 and indices[start] >= 0 and indices[stop - 1] < n:
                continue
        _scan_row(indices[start:stop], first + r, seen, found, n, found[6] if r == 0 else -1)


@numba.njit(nogil=True, cache=True)
def _scan_row(
    places: NDArray[Any], row: int, seen: NDArray[np.int64], found: NDArray[np.int64], n: int, before: int
) -> None:
    """Look at each entry of one row."""
    last = np.int64(before)
    for i in range(places.size):
        place = np.int64(places[i])
        if place < 0 or place >= n:
            if found[0] == 0:
                found[3] = row
            found[0] += 1
            continue
        twice = place == last
        if seen.size > 0:
            twice = seen[place] == row + 1
            seen[place] = row + 1
        if twice:
            if found[1] == 0:
                found[4] = row
            found[1] += 1
        elif place < last:
            if found[2] == 0:
                found[5] = row
            found[2] += 1
        last = place
    found[6] = last
