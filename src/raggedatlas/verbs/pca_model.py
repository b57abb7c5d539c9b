"""Principal components of dense or sparse rows, the same for the same seed, kept in one ``.npz`` without pickle."""

import os
import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, NotFoundError, QueryError
from raggedatlas.results.folder import atomic_write
from raggedatlas.store.sparse import centred_svd

EXACT_WIDTH = 2048
"""Up to this width the full covariance is decomposed; beyond it, random projections find its range."""

_OVERSAMPLED = 16
_POWERS = 6


def check_seed(seed: int) -> None:
    """Refuse a seed that NumPy's generators do not take.

    Raises
    ------
    QueryError
        If it is negative or has more than 32 bits.
    """
    if not 0 <= seed < 2**32:
        raise QueryError(f"The seed {seed} is out of range; expected 0 to {2**32 - 1}.")


@dataclass(frozen=True, eq=False)
class PcaModel:
    """Fitted principal components.

    Parameters
    ----------
    mean : (width,) float64
        Mean of the sample.
    components : (n_components, width) float64
        Orthonormal rows; the entry of each that is largest in size is positive.
    explained_variance, explained_variance_ratio : (n_components,) float64
        Variance along each, descending, and its share of the total.
    features : (width,) text
        Feature uids of the columns; empty for results.
    target_sum : float
        What the counts of a cell were scaled to before log(1 + x); NaN where values were taken as they are.
    seed, n_rows : int
        Of the sample.
    """

    mean: NDArray[np.float64]
    components: NDArray[np.float64]
    explained_variance: NDArray[np.float64]
    explained_variance_ratio: NDArray[np.float64]
    features: NDArray[np.str_]
    target_sum: float
    seed: int
    n_rows: int

    @property
    def scaled_to(self) -> float | None:
        """The sum that counts are scaled to; None where values are taken as they are."""
        return None if np.isnan(self.target_sum) else float(self.target_sum)

    def transform(self, values: Any) -> NDArray[np.float32]:  # noqa: ANN401  (an array or a sparse one)
        """Project rows, ``(k, width)`` to ``(k, n_components)``.

        Raises
        ------
        QueryError
            If the rows have another width.
        """
        if values.shape[1] != len(self.mean):
            raise QueryError(f"The model was fitted to rows of {len(self.mean):,} values, not of {values.shape[1]:,}.")
        projected = values @ self.components.T - self.mean @ self.components.T
        return np.asarray(projected).astype(np.float32)

    def save(self, path: Path) -> None:
        """Write the model; an existing file is replaced atomically."""
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **{each.name: getattr(self, each.name) for each in fields(self)})


def load_pca(path: str | os.PathLike[str]) -> PcaModel:
    """Read what `PcaModel.save` wrote; without unpickling.

    Raises
    ------
    NotFoundError
        If there is no such file.
    CorruptError
        If it is no such model.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            stored_fields = {each.name: stored[each.name] for each in fields(PcaModel)}
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no model {os.fspath(path)}.") from error
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise CorruptError(f"{os.fspath(path)} is no model of principal components: {error}.") from error
    if stored_fields["components"].ndim != 2 or stored_fields["components"].shape[1:] != stored_fields["mean"].shape:
        raise CorruptError(f"{os.fspath(path)}: the components do not fit the mean.")
    plain: dict[str, Any] = {
        "target_sum": float(stored_fields.pop("target_sum")),
        "seed": int(stored_fields.pop("seed")),
        "n_rows": int(stored_fields.pop("n_rows")),
    }
    return PcaModel(**stored_fields, **plain)


def fit_pca(
    values: Any,  # noqa: ANN401  (an array or a sparse one)
    n_components: int,
    *,
    seed: int = 0,
    features: tuple[str, ...] = (),
    target_sum: float | None = None,
) -> PcaModel:
    """Fit principal components to rows.

    Parameters
    ----------
    values : (n, width) array, or sparse CSR
        The sample; it is not changed.
    n_components : int
        Number of components.
    seed : int
        Of the random projections for wide rows; narrow ones need none.
    features : tuple of str
        Kept with the model.
    target_sum : float or None
        Kept with the model.

    Raises
    ------
    QueryError
        If there are fewer rows or columns than components.

    Examples
    --------
    >>> fit_pca(np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 1.0], [2.0, 1.0]]), 1).explained_variance_ratio
    array([0.8])
    """
    n, width = values.shape
    if not 1 <= n_components <= min(n - 1, width):
        raise QueryError(
            f"{n_components} components of {n:,} rows of {width:,} values; there can be 1 to {min(n - 1, width)}."
        )
    wide = values.astype(np.float64)
    mean = np.asarray(wide.mean(axis=0)).reshape(-1)
    squared = wide.multiply(wide) if hasattr(wide, "multiply") else wide * wide
    # From sums of squares, because centring would make sparse values dense.
    total = (float(squared.sum()) - n * float(mean @ mean)) / (n - 1)
    if width <= EXACT_WIDTH:
        components, variance = _exact(wide, mean, n_components)
    else:
        _, lengths, components = centred_svd(
            lambda basis: np.asarray(wide @ basis), lambda basis: np.asarray(wide.T @ basis), mean, n, n_components,
            n_oversamples=_OVERSAMPLED, n_iter=_POWERS, seed=seed,
        )  # fmt: skip
        variance = lengths**2 / (n - 1)
    # The sign of a component is arbitrary; fixing it makes results comparable between machines.
    largest = np.take_along_axis(components, np.abs(components).argmax(axis=1)[:, None], axis=1)
    components = components * np.where(largest < 0, -1.0, 1.0)
    ratio = variance / total if total > 0 else np.zeros_like(variance)
    # An array without pickle cannot hold None; `scaled_to` turns NaN back.
    scaled = float("nan") if target_sum is None else float(target_sum)
    return PcaModel(mean, components, variance, ratio, np.array(features, np.str_), scaled, seed, n)


def _exact(wide: Any, mean: NDArray[np.float64], k: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:  # noqa: ANN401
    n = wide.shape[0]
    if hasattr(wide, "indptr"):
        scatter = np.asarray((wide.T @ wide).toarray()) - n * np.outer(mean, mean)
    else:
        centred = wide - mean
        scatter = centred.T @ centred
    values, vectors = np.linalg.eigh(scatter)
    # `eigh` sorts ascending. A variance of 0 may come out negative; the copy frees the other vectors.
    return vectors[:, ::-1][:, :k].T.copy(), np.maximum(values[::-1][:k], 0) / (n - 1)
