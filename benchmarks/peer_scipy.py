"""Measure slicing an uncompressed CSR matrix that is already in memory: what any reader is held against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import epochs
import measuring

if TYPE_CHECKING:
    from collections.abc import Callable

    from measuring import Asked, Figure


def _reader(asked: Asked) -> tuple[Callable[[Any], tuple[int, int]], int]:
    import h5py
    from scipy import sparse

    with h5py.File(asked.atlas) as file:
        parts = file["X"]
        shape = tuple(int(n) for n in parts.attrs["shape"])
        matrix = sparse.csr_matrix((parts["data"][:], parts["indices"][:], parts["indptr"][:]), shape)

    def fetch(rows: Any) -> tuple[int, int]:
        found = matrix[rows]
        return found.shape[0], found.nnz

    return fetch, shape[0]


def measure_slice(asked: Asked, figure: Figure) -> None:
    """Slice the rows of each batch."""
    fetch, n_rows = _reader(asked)
    epochs.timed_callers(figure, epochs.pace_of(asked), fetch, n_rows)


def measure_row(asked: Asked, figure: Figure) -> None:
    """Slice single random rows."""
    fetch, n_rows = _reader(asked)
    epochs.timed_rows(figure, epochs.pace_of(asked), fetch, n_rows)


if __name__ == "__main__":
    measuring.run("scipy", {"slice": measure_slice, "row": measure_row})
