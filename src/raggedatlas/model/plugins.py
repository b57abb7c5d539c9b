"""Extensions: what other installed packages register by entry point."""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

READERS, WRITERS = "raggedatlas.readers", "raggedatlas.writers"
"""Suffix -> callable that opens a path as a `Source`, and one that creates a `Sink` for a path."""
SPACES = "raggedatlas.feature_spaces"
"""Name -> `FeatureSpace`."""
COMMANDS = "raggedatlas.commands"
"""Name of a command -> function with typer's annotations."""


@cache
def plugins(group: str) -> dict[str, "EntryPoint"]:
    """Return the entry points of a group by name, not yet loaded.

    Callers look here only for names that are not built in: the search through all installed packages takes some 20 ms.

    Examples
    --------
    >>> plugins("no.such.group")
    {}
    """
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=group)}
