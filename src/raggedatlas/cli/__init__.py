"""The command ``raggedatlas``: each verb parses, calls one library function, and prints."""

from raggedatlas.cli import (
    annotations,
    building,
    concat,
    convert,
    files,
    finding,
    genes,
    geometries,
    looking,
    models,
    query,
    reducing,
    results,
    serve,
    snapshots,
    upkeep,
    view,
)
from raggedatlas.cli.app import app
from raggedatlas.cli.starting import put_off_pandas

__all__ = [
    "annotations",
    "app",
    "building",
    "concat",
    "convert",
    "files",
    "finding",
    "genes",
    "geometries",
    "looking",
    "main",
    "models",
    "query",
    "reducing",
    "results",
    "serve",
    "snapshots",
    "upkeep",
    "view",
]


def main() -> None:
    """Run the command line; exit codes are 0 for done, 1 for refused or found wrong, 2 for a command that was not understood."""
    put_off_pandas()
    app(prog_name="raggedatlas")
