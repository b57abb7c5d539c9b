"""Nearest rows of vectors, found by comparing with all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK_VALUES = 2**22


@dataclass(frozen=True, eq=False)
class Neighbors:
    """Rows near some vectors, nearest first; equal distances in row order."""

    rows: NDArray[np.int64]  # (q, k): row numbers, -1 where there are fewer than k
    # (q, k): squared Euclidean, one minus the cosine, or one minus the dot product; NaN where there is no row
    distances: NDArray[np.float64]


def block_distances(block: NDArray[Any], vectors: NDArray[np.float64], metric: str) -> NDArray[np.float64]:
    """Return one minus the cosine or the dot product of vectors, (q, width), and rows, (n, width), as (q, n).

    A vector of zeros has no direction: its distances under ``cosine`` are NaN.
    """
    wide = block.astype(np.float64, copy=False)
    products = vectors @ wide.T
    if metric == "dot":
        return 1 - products
    lengths = np.linalg.norm(vectors, axis=1)[:, None] * np.linalg.norm(wide, axis=1)
    return np.asarray(1 - np.divide(products, lengths, out=np.full_like(products, np.nan), where=lengths != 0))


def _candidate_squares(block: NDArray[Any], vectors: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Measure squared distances of the rows that can be among the k nearest of this block; NaN for the others.

    One matrix product gives them within its rounding error, so that exact differences are computed only for few rows.
    """
    wide = block.astype(np.float64, copy=False)
    # A shift changes no distance, but products of vectors near zero lose fewer digits by cancellation.
    centre = vectors.mean(axis=0) if len(vectors) else 0.0
    shifted, asked = wide - centre, vectors - centre
    lengths = np.einsum("ij,ij->i", shifted, shifted)
    # Without the square of the query, which is the same for all rows and so does not change their order.
    about = lengths - 2 * (asked @ shifted.T)
    largest = lengths[np.isfinite(lengths)].max(initial=0) + np.einsum("ij,ij->i", asked, asked)
    rounding = 1e-13 * (wide.shape[1] + 8) * largest[:, None]
    limit = np.partition(about, k - 1, axis=1)[:, k - 1 : k] if k < len(wide) else np.full((len(about), 1), np.inf)
    # NaN sorts last: a limit of NaN means fewer than k rows without NaN, so none of these is ruled out.
    near = about <= np.where(np.isnan(limit), np.inf, limit) + rounding
    measured = np.full(about.shape, np.nan)
    for query, row in enumerate(near):
        measured[query, row] = ((wide[row] - vectors[query]) ** 2).sum(axis=1)
    return measured


def exact_neighbors(
    read: Callable[[NDArray[np.int64]], NDArray[Any]],
    n_rows: int,
    vectors: NDArray[np.float64],
    k: int,
    *,
    metric: str = "l2",
    among: NDArray[np.int64] | None = None,
    without: NDArray[np.int64] | None = None,
) -> Neighbors:
    """Compare vectors, (q, width), with every row, or with some, in bounded memory.

    `read` takes ascending row numbers and returns these rows, (n, width). `k` is the number of rows for each vector.
    `metric` is "l2", "cosine" or "dot". `among`, (n,), are ascending row numbers; None takes all `n_rows`. `without`,
    (q,), is a row that each vector is not to find, -1 for none.
    Rows with NaN or infinite values are never found, nor rows of zeros under ``cosine``.
    """
    rows = np.arange(n_rows) if among is None else among
    q, width = vectors.shape
    # Bounds the rows of a block and their distances to all queries together: 32 MiB of float64.
    size = max(1, _BLOCK_VALUES // max(1, width + q))
    best, found = np.full((q, 0), np.nan), np.full((q, 0), -1, np.int64)
    for start in range(0, len(rows), size):
        own = rows[start : start + size]
        block = np.asarray(read(own)).reshape(len(own), width)
        # one more than k, as one may be the cell itself
        with np.errstate(invalid="ignore", over="ignore"):
            measured = (
                _candidate_squares(block, vectors, k + 1) if metric == "l2" else block_distances(block, vectors, metric)
            )
        measured[:, ~np.isfinite(block).all(axis=1)] = np.nan
        if without is not None:
            measured[without[:, None] == own] = np.nan
        best, found = np.hstack([best, measured]), np.hstack([found, np.broadcast_to(own, measured.shape)])
        # a stable sort keeps ties in row order, since blocks come in row order; NaN sorts last
        order = np.argsort(best, axis=1, kind="stable")[:, :k]
        best, found = np.take_along_axis(best, order, axis=1), np.take_along_axis(found, order, axis=1)
    missing = ((0, 0), (0, max(0, k - best.shape[1])))
    found = np.where(np.isnan(best), -1, found)
    return Neighbors(np.pad(found, missing, constant_values=-1), np.pad(best, missing, constant_values=np.nan))
