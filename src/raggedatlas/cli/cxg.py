"""Options of verbs that can write a CXG, and how what it does not hold is told."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raggedatlas.cli.printing import say

if TYPE_CHECKING:
    from raggedatlas.formats.cxg.losses import Loss

ENDING = ".cxg"


class CxgProfile(StrEnum):
    """Profiles of a CXG."""

    NEW = "0.3.0"
    OLD = "0.2.0"


class Method(StrEnum):
    """Ways to compute an embedding."""

    PCA = "pca"
    UMAP = "umap"


@dataclass(frozen=True)
class AsCxg:
    """How a CXG is written."""

    profile: Annotated[
        CxgProfile | None,
        typer.Option(
            help="Of a .cxg: 0.3.0 for the Explorer of today, 0.2.0 for cellxgene 0.15 to 0.16.8.", show_default="0.3.0"
        ),
    ] = None
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse to write a .cxg that would lose or change anything.")
    ] = False
    title: Annotated[str | None, typer.Option(help="Title in a .cxg.", show_default=False)] = None
    about: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of more about it, in a .cxg.", show_default=False)
    ] = None
    compute_embedding: Annotated[
        Method | None,
        typer.Option(help="Compute an embedding for a .cxg; umap needs the extra umap.", show_default=False),
    ] = None

    def options(self, target: str, told: Callable[[tuple["Loss", ...]], None]) -> dict[str, Any]:
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
            "strict": self.strict or None,
            "title": self.title,
            "about": self.about,
            "compute_embedding": None if self.compute_embedding is None else self._embedder(),
        }
        given = {name: value for name, value in given.items() if value is not None}
        if Path(target).suffix != ENDING:
            if given:
                names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
                raise typer.BadParameter(f"{names} are options of a .cxg; {target} is none")
            return {}
        return {**given, "on_losses": told}

    def _embedder(self) -> Any:  # noqa: ANN401
        from raggedatlas.verbs.embedding import embedder

        assert self.compute_embedding is not None
        return embedder(self.compute_embedding.value)


def tell_losses(losses: tuple["Loss", ...]) -> None:
    """Say on stderr, line by line, what a CXG does not hold."""
    for loss in losses:
        say(str(loss))
