"""Small AnnData objects with the shape of real ones: counts, named genes, a few columns of several kinds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import anndata as ad

GENES = tuple(f"GENE{number}" for number in range(30))
"""Symbols to choose from."""


def small_anndata(
    seed: int, n_cells: int = 10, genes: Sequence[str] = GENES[:12], extra: str | None = None
) -> "ad.AnnData":
    """Make a small dataset; equal arguments make equal ones, and another seed makes other counts.

    Parameters
    ----------
    seed : int
        Where chance starts.
    n_cells : int
        Rows.
    genes : sequence of str
        Symbols of the columns.
    extra : str or None
        Name of a further float column of `obs`, with missing values.

    Returns
    -------
    anndata.AnnData
        `X` (n_cells, n_genes) CSR float32 of whole counts, about three in ten not zero; `obs` with `cell_type` (category),
        `n_genes` (int64) and `good` (bool), indexed by barcodes.

    Examples
    --------
    >>> small_anndata(0, 3, ["CD3E", "MS4A1"]).shape
    (3, 2)
    """
    import anndata as ad
    import pandas as pd
    from scipy import sparse

    rng = np.random.default_rng([seed, n_cells, len(genes)])
    counts = rng.poisson(0.4, (n_cells, len(genes))).astype(np.float32)
    counts[0, 0] = seed + 1  # no two seeds make the same matrix
    kinds = pd.Categorical(np.array(["B", "NK", "T"])[rng.integers(0, 3, n_cells)], categories=["B", "NK", "T"])
    columns = {
        "cell_type": kinds,
        "n_genes": (counts > 0).sum(axis=1).astype(np.int64),
        "good": rng.random(n_cells) < 0.5,
    }
    obs = pd.DataFrame(columns, index=pd.Index([f"CELL{seed}-{i}" for i in range(n_cells)]))
    if extra is not None:
        obs[extra] = np.where(rng.random(n_cells) < 0.2, np.nan, rng.random(n_cells))
    return ad.AnnData(X=sparse.csr_matrix(counts), obs=obs, var=pd.DataFrame(index=pd.Index(list(genes))))
