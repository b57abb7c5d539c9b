"""The compiled loop that makes sparse rows dense. Imports numba: import it inside functions only."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])


def _compiled(function: F) -> F:
    """Compile for one thread, without the GIL, kept on disk between processes."""
    compiled: Any = numba.njit(cache=True, nogil=True)(function)
    return cast("F", compiled)


@_compiled
def fill_dense(indptr: NDArray[np.int64], indices: NDArray[Any], values: NDArray[Any], out: NDArray[Any]) -> None:
    """Write sparse rows into a dense array, zeros included.

    Parameters
    ----------
    indptr : (n_rows + 1,) int64
        Row bounds; need not start at 0.
    indices : (n_entries,) integer
        Columns, in any order.
    values : (n_entries,) number
        Values.
    out : (n_rows, n_cols) number
        Overwritten, row by row, so that each row is in the cache when its entries are placed.
    """
    for row in range(out.shape[0]):
        line = out[row]
        line[:] = 0
        for i in range(indptr[row], indptr[row + 1]):
            line[indices[i]] = values[i]
