"""Tell what a source is: geometry, or a model's results; the modules that read it are imported only then."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from raggedatlas.errors import AtlasError, CorruptError
from raggedatlas.results.folder import DATABASE, TABLE
from raggedatlas.store.location import REMOTE_SCHEMES, Location

SHAPES = {"raggedatlas.vectors.geometry": "Geometry", "raggedatlas.vectors.shapes": "Shapes"}
RESULTS = {"raggedatlas.results.dataset": "ResultDataset", "raggedatlas.results.npy_results": "InferenceDataSet"}
"""Modules -> class of objects in memory that can be added."""


def is_geometry(source: Any) -> bool:  # noqa: ANN401  (anything that can be added)
    """Return whether something is geometry: shapes in memory, or a zarr-vectors store by path or URI."""
    if not isinstance(source, str | os.PathLike):
        return _is_instance(source, SHAPES)
    text = os.fspath(source)
    if "://" in text and text.split("://", 1)[0].lower() not in (*REMOTE_SCHEMES, "file"):
        return False
    try:
        place = Location(text)
        return isinstance(root_attributes(place).get("zarr_vectors"), Mapping)
    # What has no readable root is left to `open_source`, which names what is wrong with it.
    except (AtlasError, OSError):
        return False


def is_results(source: Any) -> bool:  # noqa: ANN401  (anything that can be added)
    """Return whether a source is a model's results, or a folder of some."""
    if not isinstance(source, str | os.PathLike):
        return _is_instance(source, RESULTS)
    if "://" in os.fspath(source):
        return False
    folder = Location.of(source).path
    return (folder / DATABASE / f"{TABLE}.lance").is_dir() or (folder / "batch_index.npy").is_file()


def _is_instance(source: Any, classes: Mapping[str, str]) -> bool:  # noqa: ANN401
    """Return whether an object is of one of some classes, without importing their modules: before that there are no objects."""
    modules = {name: sys.modules[name] for name in classes if name in sys.modules}
    return any(isinstance(source, getattr(module, classes[name])) for name, module in modules.items())


def root_attributes(place: Location) -> dict[str, Any]:
    """Read the attributes of a store's root group."""
    try:
        found = json.loads(place.read_bytes("zarr.json")).get("attributes")
    except (ValueError, AttributeError) as error:
        raise CorruptError(f"{place.uri}/zarr.json is no JSON object: {error}") from error
    return found if isinstance(found, dict) else {}
