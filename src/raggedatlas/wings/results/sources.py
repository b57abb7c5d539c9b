"""What `add` takes for results of a model: recognised without importing Lance."""

import os
import sys
from pathlib import Path
from typing import Any

from raggedatlas.store.location import AnyPath, Location, as_path
from raggedatlas.wings.results.folder import DATABASE, TABLE

OBJECTS = {
    "raggedatlas.wings.results.dataset": "ResultDataset",
    "raggedatlas.wings.results.npy_results": "InferenceDataSet",
}
"""Modules -> class of objects in memory; before a module is imported there are no objects of its class."""


def is_results(source: Any) -> bool:  # noqa: ANN401  (anything that can be added)
    """Return whether a source is a model's results, or a folder of some."""
    if not isinstance(source, str | os.PathLike):
        return any(isinstance(source, getattr(sys.modules[m], name)) for m, name in OBJECTS.items() if m in sys.modules)
    folder = as_path(source)
    if isinstance(folder, Location):
        # A path of its own, so that only the table is listed.
        table = f"{folder.uri}/{DATABASE}/{TABLE}.lance"
        return not (folder.is_web or folder.suffix) and Location(table, folder.storage_options).is_dir()
    return (folder / DATABASE / f"{TABLE}.lance").is_dir() or (folder / "batch_index.npy").is_file()


def is_local_results(path: AnyPath) -> bool:
    """Return whether a path is a folder of results on this machine, which alone is validated."""
    return isinstance(path, Path) and is_results(path)
