"""Words that arguments of several calls take, importable without any library: signatures and the command line share them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from raggedatlas.errors import ArgumentError

Metric = Literal["l2", "cosine", "dot"]
"""Distance of vectors: squared Euclidean, or one minus the cosine or the dot product."""

METRICS: tuple[Metric, ...] = get_args(Metric)

OnConflict = Literal["error", "replace", "keep"]
"""What to do with a cell that has another value."""

Unmatched = Literal["error", "skip"]
"""What to do with ids and rows that match no cell."""

CellKey = Literal["uid", "cell_name"]
"""How rows name cells."""

StoredAs = Literal["space", "vector"]
"""Where the values of a result are: in an array, or in the cell table."""

Curation = Literal["cellxgene", "cellxgene-strict"]
"""Schema whose required facts are looked for; the strict one refuses a file without them."""

OutputFormat = Literal["csr", "dense", "torch", "torch-dense"]
"""Compressed rows, dense arrays, sparse CSR tensors, or dense tensors."""

Level = Literal["quick", "rows", "files", "deep"]
"""How much of an atlas is validated."""

Missing = Literal["zero", "nan", "drop"]
"""Fill value of features that the dataset of a cell did not measure."""

OnMerge = Literal["counts", "sum", "refuse", "apart"]
"""How columns of one dataset that are the same feature are combined."""

FeatureNames = Literal["id", "symbol"]
"""By what the features of a result are named."""

By = Literal["bbox", "centroid", "exact"]
"""Part of a shape that must intersect a box."""

Layout = Literal["0.9", "0.7"]
"""Layout of a geometry store."""

CrossLevel = Literal["none", "implicit", "explicit"]
"""How a geometry store keeps the links between its levels."""

Profile = Literal["0.3.0", "0.2.0"]
"""Version of a CXG that is written."""

WideIntegers = Literal["refuse", "text"]
"""What to do with integers beyond 32 bits, which a CXG cannot hold."""

UmapMetric = Literal["euclidean", "cosine", "manhattan", "correlation", "chebyshev"]
"""Distance of the rows that a UMAP lays out."""


@dataclass(frozen=True, slots=True)
class Embedder:
    """Method to compute an embedding from principal components."""

    name: str  # name of the embedding in the CXG
    n_components: int = 2  # number of principal components to pass to `layout`
    # (n_cells, n_components) float32 -> (n_cells, >= 2); None uses the components themselves.
    layout: Callable[[Any], Any] | None = None


PCA = Embedder("pca")


def refuse_unused(call: str, why: str, **given: bool) -> None:
    """Refuse options that were given and have no effect together with the others.

    `why` says when they have none, or what they are for. `given` tells of each option whether it was given.
    """
    unused = [f"{name}=..." for name, there in given.items() if there]
    if unused:
        has, it = ("has", "it") if len(unused) == 1 else ("have", "them")
        raise ArgumentError(f"{call}(): {', '.join(unused)} {has} no effect {why}; leave {it} out.")
