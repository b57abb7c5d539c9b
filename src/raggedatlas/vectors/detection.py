"""Telling a geometry store from what else lies in a folder or behind an address."""

import os

from raggedatlas.errors import AtlasError, NotFoundError
from raggedatlas.store.location import Location


def is_geometry_store(place: Location | str | os.PathLike[str]) -> bool:
    """Tell whether a folder or an object-store prefix holds a geometry store, also one whose metadata are damaged.

    Parameters
    ----------
    place : Location, str or path
        A `Location` where credentials are needed.

    Raises
    ------
    StoreError
        If an object store cannot be asked.

    Examples
    --------
    >>> is_geometry_store("tests/data")
    False
    """
    found = Location.of(place)
    try:
        return b'"zarr_vectors"' in found.read_bytes("zarr.json")
    except NotFoundError:
        return False
    except (AtlasError, OSError):
        if found.is_local:
            return False
        raise
