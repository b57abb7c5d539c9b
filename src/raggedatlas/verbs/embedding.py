"""Two dimensions for viewers that show nothing without: principal components, or a UMAP of them."""

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import QueryError
from raggedatlas.model.arguments import checked
from raggedatlas.verbs.principal import check_seed

if TYPE_CHECKING:
    from raggedatlas.formats.cxg.options import Embedder

N_COMPONENTS = 30
"""Principal components that a UMAP is made of."""


@checked
def embedder(
    method: Literal["pca", "umap"], *, n_neighbors: int = 15, min_dist: float = 0.1, seed: int = 0
) -> "Embedder":
    """Give what computes an embedding while a CXG is written, for its option ``compute_embedding``.

    Parameters
    ----------
    method : {"pca", "umap"}
        Two principal components, or a UMAP of thirty.
    n_neighbors, min_dist, seed
        Of the UMAP, as in `umap`.

    Returns
    -------
    Embedder
        For ``write("x.cxg", compute_embedding=...)`` and `open_sink`.

    Raises
    ------
    QueryError
        For another method.
    MissingExtraError
        When it is used, if umap-learn is not installed.

    Examples
    --------
    >>> embedder("umap").name
    'umap'
    """
    from raggedatlas.formats.cxg.options import PCA, Embedder

    check_seed(seed)
    if method == PCA.name:
        return PCA
    if method != "umap":
        raise QueryError(f"There is no embedding {method!r}; choose 'pca' or 'umap'.")

    def layout(components: NDArray[np.float32]) -> NDArray[Any]:
        from raggedatlas.verbs.umap_models import UmapSettings, fit_umap

        neighbors = max(2, min(n_neighbors, len(components) - 1))
        settings = UmapSettings(n_neighbors=neighbors, min_dist=min_dist, seed=seed)
        return fit_umap(components, settings).layout

    return Embedder("umap", N_COMPONENTS, layout)
