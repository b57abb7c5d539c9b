"""Import of the libraries of the extra ``geometry``; each is imported only here, on first use."""

import importlib
from typing import Any

from raggedatlas.errors import MissingExtraError

LIBRARIES = {
    "fast_simplification": "Meshes are decimated by the package fast-simplification",
    "geopandas": "Tables of geometries are made by the package geopandas",
    "shapely": "Polygons are made by the package shapely",
    "trimesh": "Meshes as objects are made by the package trimesh",
}
"""Module -> use."""


def load_library(name: str) -> Any:  # noqa: ANN401  (a module)
    """Import a library of the extra ``geometry``: a member of `LIBRARIES` or a submodule; `MissingExtraError` without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        what = LIBRARIES[name.partition(".")[0]]
        raise MissingExtraError(f"{what}; install it with: pip install 'raggedatlas[geometry]'.") from error
