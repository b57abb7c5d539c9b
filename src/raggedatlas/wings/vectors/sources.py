"""What `add` takes for geometry: recognised without importing the converters."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raggedatlas.errors import AtlasError, StoreError
from raggedatlas.formats.containers import HDF5_ENDINGS
from raggedatlas.store.location import Location, as_path

OBJECTS = {"raggedatlas.wings.vectors.geometry": "Geometry", "raggedatlas.wings.vectors.shapes": "Shapes"}
"""Modules -> class of objects in memory; before a module is imported there are no objects of its class."""


def is_geometry(source: Any) -> bool:  # noqa: ANN401  (anything that can be added)
    """Return whether something is geometry: shapes in memory, or a zarr-vectors store, shapes or points by path or URI.

    Raises
    ------
    StoreError
        If an object store cannot be asked.
    """
    if not isinstance(source, str | os.PathLike):
        return any(isinstance(source, getattr(sys.modules[m], name)) for m, name in OBJECTS.items() if m in sys.modules)
    if is_shapes(source):
        return True
    place = as_path(source)
    # The ending of a file tells without a request that it is no store.
    if isinstance(place, Location) and (place.is_web or place.suffix in HDF5_ENDINGS):
        return False
    try:
        attributes = json.loads((place / "zarr.json").read_bytes())["attributes"]
        return isinstance(attributes.get("zarr_vectors"), Mapping) or (
            isinstance(place, Location) and "spatialdata_attrs" in attributes
        )
    except StoreError:
        # A store that does not answer would only be asked, and waited for, again.
        if isinstance(place, Location):
            raise
        return False
    # What has no readable root is left to `open_source`, which names what is wrong with it.
    except (AtlasError, OSError, ValueError, LookupError, TypeError):
        return False


SHAPE_ENDINGS = (".geojson", ".geoparquet", ".obj", ".parquet", ".ply", ".stl")
"""Endings of files of shapes and points, as converters have them, but for tables of text."""


def is_shapes(source: Any) -> bool:  # noqa: ANN401  (anything that can be added)
    """Return whether a source is the path of a file of shapes or points, or a SpatialData store or element of them."""
    if not isinstance(source, str | os.PathLike):
        return False
    path = as_path(source)
    if path.suffix.lower() in SHAPE_ENDINGS:
        return True
    # Named by the format, so that other folders need no import of converters.
    # Members of a remote folder would be listed; its root tells `is_geometry` what it is.
    in_store = isinstance(path, Path) and any((path / kind).is_dir() for kind in KINDS)
    if not (path.parent.name in KINDS or in_store):
        return False
    from raggedatlas.wings.vectors.converters.geospatial import is_spatialdata

    return is_spatialdata(path)


KINDS = ("points", "shapes")
"""Folders of SpatialData whose elements are geometry."""
