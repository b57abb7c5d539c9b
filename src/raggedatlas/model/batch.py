"""The currency between readers and writers: blocks of rows, sparse or dense."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class CsrBlock:
    """Rows of a sparse matrix whose layers share one pattern of entries."""

    indptr: NDArray[np.int64]  # (n_rows + 1,): row i holds entries [indptr[i], indptr[i + 1]); starts at 0
    indices: NDArray[Any]  # (n_entries,) integer columns
    layers: Mapping[str, NDArray[Any]]  # (n_entries,) values
    n_cols: int

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.indptr) - 1

    def first_rows(self) -> NDArray[Any]:
        """Return the first layer as a dense array, (n_rows, n_cols); for few rows."""
        values = next(iter(self.layers.values()))
        rows = np.zeros((self.n_rows, self.n_cols), values.dtype)
        rows[np.repeat(np.arange(self.n_rows), np.diff(self.indptr)), self.indices] = values
        return rows


@dataclass(frozen=True, slots=True)
class DenseBlock:
    """Rows of dense arrays, (n_rows, ...); all layers share their shape."""

    layers: Mapping[str, NDArray[Any]]

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.first_rows())

    def first_rows(self) -> NDArray[Any]:
        """Return the first layer, (n_rows, ...)."""
        return next(iter(self.layers.values()))


Block = CsrBlock | DenseBlock


def sparse_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which a sparse matrix can hold values of a type: SciPy knows neither float16 nor foreign byte orders."""
    return np.dtype(np.float32) if dtype == np.float16 else machine_dtype(dtype)


def machine_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a type in the machine's byte order, of C's two 64-bit integers the one that Zarr knows.

    Examples
    --------
    >>> machine_dtype(np.dtype(">i4")), machine_dtype(np.dtype(np.longlong)).char
    (dtype('int32'), 'l')
    """
    plain = dtype.newbyteorder("=")
    return np.dtype(plain.str) if plain.kind in "iu" else plain


def assemble_csr(kind: Any, parts: tuple[Any, Any, Any], n_cols: int) -> Any:  # noqa: ANN401  (SciPy has no types)
    """Assemble a SciPy matrix from arrays known to fit, without the copies of its constructor.

    The constructor widens columns to the type of the bounds, and copies what is a small part of larger memory. `kind`
    is `scipy.sparse.csr_array` or `scipy.sparse.csr_matrix`; `parts` are (n_entries,) values, (n_entries,) integer
    columns and (n_rows + 1,) integer bounds. The bounds take the type of the columns where they fit; the result is on
    the same memory as values and columns.
    """
    values, indices, indptr = parts
    matrix = copy.copy(_empty_csr(kind, len(indptr) - 1, n_cols))
    # SciPy expects one integer type for both; bounds stay wide only where they do not fit.
    fits = indptr.dtype == indices.dtype or indptr[-1] <= np.iinfo(indices.dtype).max
    matrix.data, matrix.indices = values, indices
    matrix.indptr = indptr.astype(indices.dtype, copy=False) if fits else indptr
    return matrix


@lru_cache(maxsize=8)
def _empty_csr(kind: Any, n_rows: int, n_cols: int) -> Any:  # noqa: ANN401  (SciPy has no types)
    """Return the template that is copied for every batch of one shape: a constructor takes longer than reading a cell."""
    matrix = kind((n_rows, n_cols))
    # Each copy gets bounds of its own, so the cached template does not keep any for all its rows.
    matrix.indptr = matrix.indptr[:0].copy()
    return matrix


@dataclass(frozen=True, slots=True)
class SpaceBatch:
    """One feature space's part of a batch, aligned row by row with the batch's cells."""

    # One row per cell of the batch; cells without this modality have an empty or filled row.
    block: Block
    # (n_features,): feature uids in column order; empty for spaces without features.
    features: NDArray[np.str_]
    present: NDArray[np.bool_]  # (n_rows,): whether the cell has this modality
    layout_uids: NDArray[np.str_]  # (n_rows,): which layout measured the cell; empty where absent
    # Layout uid -> which columns it measured, (n_features,).
    measured: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """Some cells of a query, every modality aligned to one table of metadata.

    Parameters
    ----------
    obs : pa.Table
        One row per cell, with `uid`, `dataset`, `cell_name` and the asked metadata columns.
    spaces : mapping of str to SpaceBatch
        Per feature space.
    obsm : mapping of str to (n_rows, width) array
        Results of models that were asked for; NaN where a cell has none.
    """

    obs: pa.Table
    spaces: Mapping[str, SpaceBatch]
    obsm: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the number of cells and the spaces."""
        parts = ", ".join(f"{name}: {len(part.features)} features" for name, part in self.spaces.items())
        return f"Batch of {self.obs.num_rows:,} cells ({parts})"
