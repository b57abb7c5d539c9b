"""What can be chosen when a CXG is written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from raggedatlas.errors import SourceError
from raggedatlas.formats.cxg.embeddings import Embedder, embedder_of
from raggedatlas.formats.cxg.losses import Loss
from raggedatlas.formats.cxg.schema import PROFILES, Profile

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
    on_losses: Callable[[tuple[Loss, ...]], None] | None = None

    @property
    def embedder(self) -> Embedder | None:
        """What computes an embedding."""
        return embedder_of(self.compute_embedding)

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
