"""Whether what is to be added is geometry, found out without importing the room of geometry: most adds are of none."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from raggedatlas.errors import AtlasError, CorruptError
from raggedatlas.store.location import REMOTE_SCHEMES, Location


def is_geometry(source: Any) -> bool:  # noqa: ANN401  (anything that can be added)
    """Return whether something is geometry: shapes in memory, or a zarr-vectors store by path or URI."""
    if not isinstance(source, str | os.PathLike):
        return _is_in_memory(source)
    text = os.fspath(source)
    if "://" in text and text.split("://", 1)[0].lower() not in (*REMOTE_SCHEMES, "file"):
        return False
    try:
        place = Location(text)
        return isinstance(root_attributes(place).get("zarr_vectors"), Mapping)
    except (AtlasError, OSError):
        return False


def _is_in_memory(source: Any) -> bool:  # noqa: ANN401
    """Return whether something is shapes; there are none before their module was imported."""
    if "raggedatlas.vectors.shapes" not in sys.modules:
        return False
    from raggedatlas.vectors.geometry import Geometry
    from raggedatlas.vectors.shapes import Shapes

    return isinstance(source, Shapes | Geometry)


def root_attributes(place: Location) -> dict[str, Any]:
    """Read the attributes of a store's root group."""
    try:
        found = json.loads(place.read_bytes("zarr.json")).get("attributes")
    except (ValueError, AttributeError) as error:
        raise CorruptError(f"{place.uri}/zarr.json is no JSON object: {error}") from error
    return found if isinstance(found, dict) else {}
