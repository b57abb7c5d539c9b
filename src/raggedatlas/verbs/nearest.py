"""Nearest rows: exactly, block by block, or by the table's index."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import QueryError
from raggedatlas.query.search import METRICS

_BLOCK_VALUES = 2**22


@dataclass(frozen=True, eq=False)
class Nearest:
    """Rows near some vectors, nearest first; equal distances in row order.

    Parameters
    ----------
    rows : (q, k) int64
        Row numbers, -1 where there are fewer than k.
    distances : (q, k) float64
        Squared Euclidean distance, one minus the cosine, or one minus the dot product; NaN where there is no row.
    """

    rows: NDArray[np.int64]
    distances: NDArray[np.float64]


def without_own(found: Nearest, own: NDArray[np.int64], k: int) -> Nearest:
    """Leave the row that each vector belongs to out of what was found, and keep k.

    Parameters
    ----------
    found : Nearest
        One more than k for each vector.
    own : (q,) int64
        A row that is not to be found, -1 for none.
    k : int
        How many are kept.

    Examples
    --------
    >>> without_own(Nearest(np.array([[4, 7, 2]]), np.array([[0.0, 1.0, 3.0]])), np.array([4]), 2).rows.tolist()
    [[7, 2]]
    """
    kept = (found.rows >= 0) & (found.rows != own[:, None])
    order = np.argsort(~kept, axis=1, kind="stable")[:, :k]
    kept = np.take_along_axis(kept, order, axis=1)
    return Nearest(
        np.where(kept, np.take_along_axis(found.rows, order, axis=1), -1),
        np.where(kept, np.take_along_axis(found.distances, order, axis=1), np.nan),
    )


def check_metric(metric: str) -> None:
    """Refuse a distance that nobody here computes."""
    if metric not in METRICS:
        raise QueryError(f"There is no metric {metric!r}; there are {', '.join(METRICS)}.")


def block_distances(block: NDArray[Any], vectors: NDArray[np.float64], metric: str) -> NDArray[np.float64]:
    """Measure the angle or the product of vectors and rows, ``(q, width)`` and ``(n, width)``: ``(q, n)`` float64.

    Examples
    --------
    >>> block_distances(np.array([[0.0, 3.0], [1.0, 0.0]]), np.array([[1.0, 0.0]]), "cosine")
    array([[1., 0.]])
    """
    wide = block.astype(np.float64, copy=False)
    products = vectors @ wide.T
    if metric == "dot":
        return 1 - products
    lengths = np.linalg.norm(vectors, axis=1)[:, None] * np.linalg.norm(wide, axis=1)
    return np.asarray(1 - np.divide(products, lengths, out=np.zeros_like(products), where=lengths != 0))


def _nearest_squares(block: NDArray[Any], vectors: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Measure squared distances of the rows that can be among the k nearest of this block; NaN for the others.

    One product tells them to within its rounding, so that few differences are computed.
    """
    wide = block.astype(np.float64, copy=False)
    centre = vectors.mean(axis=0) if len(vectors) else 0.0
    shifted, asked = wide - centre, vectors - centre
    lengths = np.einsum("ij,ij->i", shifted, shifted)
    about = lengths - 2 * (asked @ shifted.T)
    largest = lengths[np.isfinite(lengths)].max(initial=0) + np.einsum("ij,ij->i", asked, asked)
    rounding = 1e-13 * (wide.shape[1] + 8) * largest[:, None]
    limit = np.partition(about, k - 1, axis=1)[:, k - 1 : k] if k < len(wide) else np.full((len(about), 1), np.inf)
    near = about <= np.where(np.isnan(limit), np.inf, limit) + rounding
    measured = np.full(about.shape, np.nan)
    for query, row in enumerate(near):
        measured[query, row] = ((wide[row] - vectors[query]) ** 2).sum(axis=1)
    return measured


def nearest_exact(
    dataset: Any,  # noqa: ANN401  (a ResultDataset, or older results)
    column: str,
    vectors: NDArray[np.float64],
    k: int,
    *,
    metric: str = "l2",
    among: NDArray[np.int64] | None = None,
    without: NDArray[np.int64] | None = None,
) -> Nearest:
    """Compare vectors with every row, or with some, in bounded memory.

    Parameters
    ----------
    dataset : ResultDataset
        The results.
    column : str
        Output.
    vectors : (q, width) float64
        What is looked for.
    k : int
        Rows for each.
    metric : {"l2", "cosine", "dot"}
        Distance.
    among : (n,) int64 or None
        Row numbers, ascending; None takes all.
    without : (q,) int64 or None
        A row that each vector is not to find, -1 for none.

    Notes
    -----
    Rows with NaN or infinite values are never found.
    """
    rows = np.arange(len(dataset)) if among is None else among
    get = getattr(dataset, f"get_{column}")
    q, width = vectors.shape
    size = max(1, _BLOCK_VALUES // max(1, width + q))
    best, found = np.full((q, 0), np.nan), np.full((q, 0), -1, np.int64)
    for start in range(0, len(rows), size):
        own = rows[start : start + size]
        block = np.asarray(get(own)).reshape(len(own), width)
        # one more than k, as one may be the cell itself
        with np.errstate(invalid="ignore", over="ignore"):
            measured = (
                _nearest_squares(block, vectors, k + 1) if metric == "l2" else block_distances(block, vectors, metric)
            )
        measured[:, ~np.isfinite(block).all(axis=1)] = np.nan
        if without is not None:
            measured[without[:, None] == own] = np.nan
        best, found = np.hstack([best, measured]), np.hstack([found, np.broadcast_to(own, measured.shape)])
        # ties stay in row order, as earlier rows stand before later ones; NaN sorts last
        order = np.argsort(best, axis=1, kind="stable")[:, :k]
        best, found = np.take_along_axis(best, order, axis=1), np.take_along_axis(found, order, axis=1)
    return _filled(np.where(np.isnan(best), -1, found), best, k)


def _filled(rows: NDArray[np.int64], distances: NDArray[np.float64], k: int) -> Nearest:
    short = k - rows.shape[1]
    if short > 0:
        rows = np.pad(rows, ((0, 0), (0, short)), constant_values=-1)
        distances = np.pad(distances, ((0, 0), (0, short)), constant_values=np.nan)
    return Nearest(rows, distances)
