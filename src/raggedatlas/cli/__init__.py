"""The command ``raggedatlas``: each verb parses, calls one library function, and prints."""

from raggedatlas.cli import building, convert, files, looking, query, results, snapshots, upkeep
from raggedatlas.cli.app import app

__all__ = ["app", "building", "convert", "files", "looking", "main", "query", "results", "snapshots", "upkeep"]


def main() -> None:
    """Run the command line; exit codes are 0 for done, 1 for refused or found wrong, 2 for a command that was not understood."""
    app(prog_name="raggedatlas")
