"""The command with all its verbs, in the order in which the help lists them."""

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
    "models",
    "query",
    "reducing",
    "results",
    "serve",
    "snapshots",
    "upkeep",
    "view",
]
