"""Embeddings: which members of ``obsm`` become one, under which name, and how one is computed where there is none."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.formats.cxg.schema import OBSM_PREFIX, SPATIAL
from raggedatlas.model.batch import Block, CsrBlock

OBSM = "obsm/"

_OVERSAMPLED = 10
_POWERS = 4
_SCALED_TO = 1e4


@dataclass(frozen=True, slots=True)
class Embedder:
    """A way to compute an embedding from principal components.

    Parameters
    ----------
    name : str
        Of the embedding in the CXG.
    n_components : int
        How many principal components it takes.
    layout : callable, optional
        ``(n_cells, n_components)`` float32 -> ``(n_cells, >= 2)``; None takes the components themselves.
    """

    name: str
    n_components: int = 2
    layout: Callable[[NDArray[np.float32]], NDArray[Any]] | None = None


PCA = Embedder("pca")


def embedder_of(what: "str | Embedder | None") -> Embedder | None:
    """Understand what is to compute an embedding.

    Raises
    ------
    SourceError
        For a name that is not known here.
    """
    if what is None or isinstance(what, Embedder):
        return what
    if what == PCA.name:
        return PCA
    raise SourceError(
        f"compute_embedding={what!r} is not known here; 'pca' is, and raggedatlas.verbs.embedding.embedder('umap') gives what computes a UMAP."
    )


def cxg_name(name: str) -> str:
    """Name a member of ``obsm`` as an embedding: without ``X_``.

    Examples
    --------
    >>> cxg_name("X_umap"), cxg_name("spatial"), cxg_name("X_")
    ('umap', 'spatial', 'X_')
    """
    return name.removeprefix(OBSM_PREFIX) or name


def is_embedding(name: str, width: int, dtype: np.dtype[Any]) -> bool:
    """Say whether a member of ``obsm`` is taken for an embedding: ``spatial``, ``X_...``, or two or three columns of reals.

    Examples
    --------
    >>> is_embedding("umap", 2, np.dtype("f4")), is_embedding("protein", 14, np.dtype("f4"))
    (True, False)
    """
    named = name == SPATIAL or (name.startswith(OBSM_PREFIX) and len(name) > len(OBSM_PREFIX))
    return named or (width in (2, 3) and dtype.kind == "f")


def is_path_name(name: str) -> bool:
    """Say whether a name can be that of an array: no slash, nothing that the file system or TileDB reserves."""
    return bool(name) and not name.startswith(("__", ".")) and not set(name) & set('/\\\0:*?"<>|')


def principal_components(
    blocks: Callable[[], Iterator[Block]], shape: tuple[int, int], n_components: int, seed: int = 0
) -> NDArray[np.float32]:
    """Find principal components by walking over the rows a few times; counts are scaled to 10,000 a cell and logged.

    Parameters
    ----------
    blocks : callable
        Each call walks over all rows, in blocks with the layer ``"values"``.
    shape : tuple of int
        ``(n_cells, n_features)``.
    n_components : int
        How many; where there are fewer, the rest is 0.
    seed : int
        Of the random projections; the same seed gives the same components.

    Returns
    -------
    (n_cells, n_components) float32
        Of each component, the entry that is largest in size is positive.

    Notes
    -----
    Memory: ``n_components + 10`` float64 per cell and per feature, twice, and a block.
    """
    matrix = _Centred(blocks, shape)
    size = min(n_components + _OVERSAMPLED, *shape)
    found = np.zeros((shape[0], n_components), np.float32)
    if size < 1:
        return found
    basis = np.linalg.qr(matrix.forward(np.random.default_rng(seed).standard_normal((shape[1], size))))[0]
    for _ in range(_POWERS):
        basis = np.linalg.qr(matrix.forward(np.linalg.qr(matrix.backward(basis))[0]))[0]
    left, lengths, _ = np.linalg.svd(matrix.backward(basis).T, full_matrices=False)
    n = min(n_components, len(lengths))
    scores = (basis @ left[:, :n]) * lengths[:n]
    largest = np.take_along_axis(scores, np.abs(scores).argmax(axis=0)[None, :], axis=0)
    found[:, :n] = scores * np.where(largest < 0, -1.0, 1.0)
    return found


class _Centred:
    """A matrix that is walked over, logged where it holds counts, minus the means of its columns."""

    def __init__(self, blocks: Callable[[], Iterator[Block]], shape: tuple[int, int]) -> None:
        self._blocks, self._shape = blocks, shape
        self._counts = all(_is_counts(block.layers["values"]) for block in blocks())
        total = np.zeros(shape[1])
        for part in self._parts():
            total += np.asarray(part.sum(axis=0)).reshape(-1)
        self._mean = total / shape[0]

    def forward(self, found: NDArray[np.float64]) -> NDArray[np.float64]:
        out = np.empty((self._shape[0], found.shape[1]))
        row = 0
        for part in self._parts():
            out[row : row + part.shape[0]] = part @ found
            row += part.shape[0]
        out -= self._mean @ found
        return out

    def backward(self, found: NDArray[np.float64]) -> NDArray[np.float64]:
        out = np.zeros((self._shape[1], found.shape[1]))
        row = 0
        for part in self._parts():
            out += part.T @ found[row : row + part.shape[0]]
            row += part.shape[0]
        out -= np.outer(self._mean, found.sum(axis=0))
        return out

    def _parts(self) -> Iterator[Any]:
        from scipy.sparse import csr_array

        for block in self._blocks():
            values = np.nan_to_num(block.layers["values"].astype(np.float64), posinf=0, neginf=0)
            if isinstance(block, CsrBlock):
                rows = np.repeat(np.arange(block.n_rows), np.diff(block.indptr))
                totals: NDArray[np.float64] = np.bincount(rows, values, block.n_rows).astype(np.float64)
                scaled = self._scaled(values, totals[rows])
                yield csr_array((scaled, block.indices, block.indptr), shape=(block.n_rows, block.n_cols))
            else:
                yield self._scaled(values, values.sum(axis=1, keepdims=True))

    def _scaled(self, values: NDArray[np.float64], totals: NDArray[np.float64]) -> NDArray[np.float64]:
        if not self._counts:
            return values
        return np.log1p(values * _SCALED_TO / np.where(totals > 0, totals, 1.0))


def _is_counts(values: NDArray[Any]) -> bool:
    return bool(np.all(values >= 0)) and bool(np.all(values == np.floor(values)))
