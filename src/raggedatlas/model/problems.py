"""Numbered rules of a format, and what it is to break one."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["must", "should", "practice"]
Depth = Literal["metadata", "full"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Parameters
    ----------
    id : str
        Stable, e.g. ``A01``.
    level : {"must", "should", "practice"}
        ``must``: a reader fails or returns something else than was meant. ``should``: the format recommends it.
        ``practice``: readers cope, some with a warning.
    sentence : str
        What holds in a good file.
    mend : str
        What to do about a file that breaks it.
    depth : {"metadata", "full"}
        Whether values must be read to tell.
    fixed : bool
        Whether a repaired copy can have it mended.
    stated : bool
        Whether the description of the format says so; else it follows from what readers and writers do.
    refused : bool
        Whether a file that breaks it cannot be added to an atlas.
    """

    id: str
    level: Level
    sentence: str
    mend: str
    depth: Depth = "metadata"
    fixed: bool = False
    stated: bool = True
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """One rule broken in one place.

    Parameters
    ----------
    rule : str
        Id of the rule.
    level : {"must", "should", "practice"}
        How bad it is here; never worse than the rule's own level.
    path : str
        The element in the file, ``""`` for its root.
    message : str
        What was found, and what was expected.
    mend : str
        The way out.

    Examples
    --------
    >>> print(Problem("A12", "must", "", "there is no var.", "Write a table of features."))
    A12 must: there is no var. Write a table of features.
    """

    rule: str
    level: Level
    path: str
    message: str
    mend: str

    def __str__(self) -> str:
        """Return it as one line."""
        place = f" {self.path}:" if self.path else ""
        return f"{self.rule} {self.level}:{place} {self.message} {self.mend}"
