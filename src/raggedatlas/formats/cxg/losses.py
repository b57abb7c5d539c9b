"""What a CXG does not hold of what is to be written, told before anything is."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Fate = Literal["lost", "changed", "kept", "rounded", "converted"]

FATES: dict[Fate, str] = {
    "lost": "left out",
    "changed": "written with another meaning or value",
    "kept": "written as it is, though viewers do not cope with it",
    "rounded": "rounded to 32 bits",
    "converted": "written in another type, by which it can be told from the original but not in value",
}
"""Fate -> what it means, worst first."""

STRICT: tuple[Fate, ...] = ("lost", "changed")
"""What ``strict`` refuses. Everything that has 64 bits is rounded by the format, so that rounding is only told."""


@dataclass(frozen=True, slots=True)
class Loss:
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
    >>> print(Loss("raw", "lost", "a CXG has one matrix"))
    lost: raw (a CXG has one matrix)
    """

    key: str
    fate: Fate
    what: str

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.fate}: {self.key} ({self.what})"


def sorted_losses(losses: Iterable[Loss]) -> tuple[Loss, ...]:
    """Order losses: the worst first, then as they came."""
    order = list(FATES)
    return tuple(sorted(dict.fromkeys(losses), key=lambda loss: order.index(loss.fate)))
