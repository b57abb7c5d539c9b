"""What a CXG does not hold of what is to be written, told before anything is."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.formats.cxg.schema import OBSM_PREFIX, PROFILES, SPATIAL, Profile

LossKind = Literal["lost", "changed", "kept", "rounded", "converted"]

LOSS_KINDS: dict[LossKind, str] = {
    "lost": "left out",
    "changed": "written with another meaning or value",
    "kept": "written as it is, though viewers do not cope with it",
    "rounded": "rounded to 32 bits",
    "converted": "written in another type, by which it can be told from the original but not in value",
}
"""Fate -> what it means, worst first."""

STRICT_KINDS: tuple[LossKind, ...] = ("lost", "changed")
"""What ``strict`` refuses. Everything that has 64 bits is rounded by the format, so that rounding is only told."""


@dataclass(frozen=True, slots=True)
class ConversionLoss:
    """One thing that does not come through as it is.

    Parameters
    ----------
    key : str
        Where it stands: ``"layers/counts"``, ``"obs/n_genes"``.
    fate : {"lost", "changed", "kept", "rounded", "converted"}
        What becomes of it.
    what : str
        In a few words, with the way out where there is one.

    Examples
    --------
    >>> print(ConversionLoss("raw", "lost", "a CXG has one matrix"))
    lost: raw (a CXG has one matrix)
    """

    key: str
    fate: LossKind
    what: str

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.fate}: {self.key} ({self.what})"


def sort_losses(losses: Iterable[ConversionLoss]) -> tuple[ConversionLoss, ...]:
    """Order losses: the worst first, then as they came."""
    order = list(LOSS_KINDS)
    return tuple(sorted(dict.fromkeys(losses), key=lambda loss: order.index(loss.fate)))


OBSM = "obsm/"


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


def get_embedder(what: "str | Embedder | None") -> Embedder | None:
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
        f"compute_embedding={what!r} is not known here; 'pca' is, and raggedatlas.verbs.reduction.embedder('umap') gives what computes a UMAP."
    )


def embedding_name(name: str) -> str:
    """Name a member of ``obsm`` as an embedding: without ``X_``.

    Examples
    --------
    >>> cxg_name("X_umap"), cxg_name("spatial"), embedding_name("X_")
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


SPARSE_BELOW = 25.0
"""Percent of entries that are not zero, below which the matrix is written sparse."""


@dataclass(frozen=True, slots=True)
class CxgOptions:
    """How a CXG is written.

    Parameters
    ----------
    overwrite : bool
        Whether what is there may be replaced.
    profile : {"0.3.0", "0.2.0"}
        The newer one has codes for categories and, where the matrix is sparse, ``Xr`` and ``Xc``; the older one is what cellxgene 0.15 to
        0.16.8 serve: text for categories, one ``X``.
    strict : bool
        Whether anything that would be lost or changed is refused.
    title, about : str, optional
        Of the dataset; `about` is an address. Taken from ``uns["title"]`` and ``uns["cxg"]["properties"]`` where they are None.
    layout : {"auto", "dense", "sparse"}
        How the matrix is laid out; ``"auto"`` goes by `sparse_below`.
    sparse_below : float
        Percent of entries that are not zero, below which it is sparse. Where a source does not tell how many it has, those of the
        first rows count.
    x : str
        Which matrix becomes the one that a CXG has: ``"X"``, or ``"layers/<name>"``.
    embeddings : sequence of str, optional
        Which members of ``obsm`` become embeddings; None takes ``spatial`` and all whose names begin with ``X_``.
    compute_embedding : str or Embedder, optional
        ``"pca"`` computes two principal components where there is no embedding of that name; an `Embedder` can do more.
    var_index : str, optional
        The column of ``var`` by whose names viewers show features; where features share names, a column ``feature_name`` is made in which
        they have their ids too. None takes ``feature_name`` where its names are unique, else the index.
    sort_categories : bool
        Whether categories are sorted by name, instead of keeping their order.
    wide_integers : {"refuse", "text"}
        What becomes of integers that 32 bits do not hold.
    on_losses : callable, optional
        Called with what does not come through before anything is written, and again at the end where the matrix has NaN or infinite values.
    """

    overwrite: bool = False
    profile: Profile = "0.3.0"
    strict: bool = False
    title: str | None = None
    about: str | None = None
    layout: Literal["auto", "dense", "sparse"] = "auto"
    sparse_below: float = SPARSE_BELOW
    x: str = "X"
    embeddings: Sequence[str] | None = None
    compute_embedding: str | Embedder | None = None
    var_index: str | None = None
    sort_categories: bool = False
    wide_integers: Literal["refuse", "text"] = "refuse"
    on_losses: Callable[[tuple[ConversionLoss, ...]], None] | None = None

    @property
    def embedder(self) -> Embedder | None:
        """What computes an embedding."""
        return get_embedder(self.compute_embedding)

    @classmethod
    def of(cls, choices: dict[str, Any]) -> "CxgOptions":
        """Make them of keyword arguments.

        Raises
        ------
        SourceError
            For an unknown name or value.

        Examples
        --------
        >>> CxgOptions.of({"profile": "0.2.0"}).profile
        '0.2.0'
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(choices) - set(known))
        if unknown:
            raise SourceError(f"The options {unknown} mean nothing for a CXG; it takes {known}.")
        made = cls(**choices)
        values: dict[str, tuple[Any, ...]] = {
            "profile": PROFILES, "layout": ("auto", "dense", "sparse"), "wide_integers": ("refuse", "text")
        }  # fmt: skip
        for name, legal in values.items():
            if getattr(made, name) not in legal:
                raise SourceError(
                    f"There is no {name} {getattr(made, name)!r} for a CXG; choose one of {', '.join(legal)}."
                )
        _ = made.embedder
        return made
