"""Options of verbs that can write a CXG, and how what it does not hold is told."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raggedatlas.cli.parameters import Strict, Words, many, one
from raggedatlas.cli.printing import say

if TYPE_CHECKING:
    from raggedatlas.formats.cxg.options import ConversionLoss

ENDING = ".cxg"

_SPELLED = {"embeddings": "--embedding", "layout": "--dense or --sparse"}
"""Options whose names are others than those of `open_sink`."""


class CxgProfile(StrEnum):
    """Profiles of a CXG."""

    NEW = "0.3.0"
    OLD = "0.2.0"


class Method(StrEnum):
    """Ways to compute an embedding."""

    PCA = "pca"
    UMAP = "umap"


class WideIntegers(StrEnum):
    """What becomes of integers that 32 bits do not hold."""

    REFUSE = "refuse"
    TEXT = "text"


@dataclass(frozen=True)
class AsCxg:
    """How a CXG is written."""

    profile: Annotated[
        CxgProfile | None,
        typer.Option(
            help="Of a .cxg: 0.3.0 for the Explorer of today, 0.2.0 for cellxgene 0.15 to 0.16.8.", show_default="0.3.0"
        ),
    ] = None
    strict: Strict = False
    title: Annotated[str | None, typer.Option(help="Title in a .cxg.", show_default=False)] = None
    about: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of more about it, in a .cxg.", show_default=False)
    ] = None
    compute_embedding: Annotated[
        Method | None,
        typer.Option(help="Compute an embedding for a .cxg; umap needs the extra umap.", show_default=False),
    ] = None
    dense: Annotated[
        bool | None,
        typer.Option("--dense/--sparse", help="Of the matrix of a .cxg.", show_default="by its share of non-zeros"),
    ] = None
    sparse_below: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            help="Share of non-zeros below which a .cxg is sparse.",
            show_default="25",
            min=0,
            max=100,
        ),
    ] = None
    x: Annotated[str | None, one("MATRIX", "What a .cxg has for its matrix: X, or layers/NAME", "--x", default="X")] = (
        None
    )
    embedding: Annotated[
        Words,
        many("NAME", "Member of obsm that a .cxg takes, such as X_umap; others are left out", "--embedding", "-e"),
    ] = field(default_factory=list)
    var_index: Annotated[
        str | None, one("COLUMN", "Column of var by whose names a .cxg shows features", "--var-index")
    ] = None
    sort_categories: Annotated[bool, typer.Option("--sort-categories", help="Sort categories by name in a .cxg.")] = (
        False
    )
    wide_integers: Annotated[
        WideIntegers | None,
        typer.Option(help="Integers beyond 32 bits, which a .cxg does not hold.", show_default="refuse"),
    ] = None

    def options(self, target: str, told: Callable[[tuple["ConversionLoss", ...]], None]) -> dict[str, Any]:
        """Give the options of `open_sink` for a target.

        Parameters
        ----------
        target : str
            Where to; options of a CXG are refused for anything else.
        told : callable
            Is given what does not come through.
        """
        given = {
            "profile": None if self.profile is None else self.profile.value,
            "title": self.title,
            "about": self.about,
            "compute_embedding": None if self.compute_embedding is None else self._embedder(),
            "layout": {None: None, True: "dense", False: "sparse"}[self.dense],
            "sparse_below": self.sparse_below,
            "x": self.x,
            "embeddings": self.embedding or None,
            "var_index": self.var_index,
            "sort_categories": self.sort_categories or None,
            "wide_integers": None if self.wide_integers is None else self.wide_integers.value,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if Path(target).suffix != ENDING:
            if given:
                names = ", ".join(_SPELLED.get(name, f"--{name.replace('_', '-')}") for name in given)
                raise typer.BadParameter(f"{names} are options of a .cxg; {target} is none")
            return {}
        return {**given, **({"strict": True} if self.strict else {}), "on_losses": told}

    def _embedder(self) -> Any:  # noqa: ANN401
        from raggedatlas.verbs.embedding import embedder

        assert self.compute_embedding is not None
        return embedder(self.compute_embedding.value)


def tell_losses(losses: tuple["ConversionLoss", ...]) -> None:
    """Say on stderr, line by line, what a CXG does not hold."""
    for loss in losses:
        say(str(loss))
