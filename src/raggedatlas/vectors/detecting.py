"""Telling a geometry store from what else lies in a folder."""

import os
from pathlib import Path


def is_vectors(path: str | os.PathLike[str]) -> bool:
    """Tell whether a local folder holds a geometry store, also one whose metadata are damaged.

    Examples
    --------
    >>> is_vectors("tests/data")
    False
    """
    try:
        return b'"zarr_vectors"' in (Path(path) / "zarr.json").read_bytes()
    except OSError:
        return False
