"""One door for everything that can be added: a path, a folder, an object, or several of them."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import ArgumentError, AtlasError, SourceError, StoreError
from raggedatlas.formats.containers import HDF5_ENDINGS
from raggedatlas.formats.registry import list_left_out, list_sources
from raggedatlas.ingest.commit import add_sources, attach, open_progress
from raggedatlas.ingest.options import GeometryOptions, IngestOptions, ResultOptions, read_options
from raggedatlas.ingest.staging import Opener
from raggedatlas.model.arguments import Progress
from raggedatlas.model.reports import AddReport, IngestReport
from raggedatlas.store.executors import Workers
from raggedatlas.store.location import AnyPath, Location, as_path, with_options
from raggedatlas.wings.results.folder import DATABASE, TABLE


def add(
    catalog: Catalog,
    source: Any,  # noqa: ANN401  (anything that can be added)
    choices: Mapping[str, Any],
    progress: Progress | bool | None = None,  # noqa: FBT001  (passed on as the caller gave it)
    executor: Executor | Workers | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> AddReport | list[IngestReport]:
    """Add whatever `source` is.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    source : path, AnnData, MuData, Source, ResultDataset, Shapes, Geometry, or sequence of these
        A folder that is no source itself means the files in it; a folder of results is a model's result; zarr-vectors stores, files of
        shapes or points, and elements of SpatialData are geometry.
    choices : mapping
        Keyword arguments of `IngestOptions`.
    progress : callable, bool or None
        A callback; None draws a bar on a terminal, False draws nothing.
    executor : Executor, Workers or None
        Whose workers read files and write their arrays.
    storage_options : mapping of str to str, optional
        Credentials and endpoint of files in an object store; by default those of the atlas.

    Returns
    -------
    IngestReport, ResultReport, GeometryReport, or list of IngestReport
        A list for a folder or a sequence.

    Raises
    ------
    SourceError
        If a choice is not understood or the source is refused.
    """
    catalog.require_tip("add()")
    # A file in an object store is usually near the atlas; the options of a local atlas are those of its files.
    storage_options = storage_options or catalog.location.storage_options
    # Before `open_source`, which takes a zarr-vectors store for an AnnData Zarr folder: both have a `zarr.json`.
    source = with_options(source, storage_options)
    geometry = is_geometry(source)
    if geometry or is_results(source):
        if executor is not None:
            raise ArgumentError("add() takes executor= for files of cells; results and geometry are added without.")
        return _attach(catalog, source, choices, progress, geometry=geometry)
    options = read_options(IngestOptions, choices, "add()")
    openers, several = _openers(source, storage_options)
    if several and options.name is not None:
        raise SourceError(
            f"name={options.name!r} is one name for {len(openers)} sources; leave it out, and each takes its file's name."
        )
    for opener in openers:
        opener.curate, opener.genome = options.curate, options.genome
    with open_progress(progress, options.name or "add") as callback:
        reports = add_sources(catalog, openers, options, callback, executor=executor)
    # `add_sources` raises where a source is refused, so there is one report for each opener here.
    # Workers that are threads share the opener, and their reports have its notes already.
    reports = [
        replace(r, notes=(*r.notes, *(note for note in o.notes if note not in r.notes)))
        for r, o in zip(reports, openers, strict=True)
    ]
    return reports if several else reports[0]


def _attach(
    catalog: Catalog,
    source: Any,  # noqa: ANN401  (anything that can be added)
    choices: Mapping[str, Any],
    progress: Progress | bool | None,  # noqa: FBT001
    *,
    geometry: bool,
) -> AddReport:
    """Add geometry or a result."""
    if not geometry:
        from raggedatlas.wings.results.attachment import ResultAttachment

        return attach(
            ResultAttachment(catalog, source, read_options(ResultOptions, choices, "add() of results")), progress
        )
    from raggedatlas.wings.vectors.attachment import GeometryAttachment, TranscriptAttachment

    options = read_options(GeometryOptions, choices, "add() of geometry")
    return attach((TranscriptAttachment if options.counts else GeometryAttachment)(catalog, source, options), progress)


def _openers(source: Any, storage_options: Mapping[str, str]) -> tuple[list[Opener], bool]:  # noqa: ANN401  (anything that can be added)
    if isinstance(source, list | tuple) and not hasattr(source, "describe"):
        parts: Sequence[Any] = source
        openers = [opener for part in parts for opener in _openers(part, storage_options)[0]]
        if not openers:
            raise SourceError("add() got an empty sequence; pass at least one source.")
        return openers, True
    if isinstance(source, str | os.PathLike | Location):
        path = as_path(source, storage_options)
        if _is_folder(path):
            files = list_sources(path)
            if files != [path]:
                left = list_left_out(path, files)
                more = f", and {len(left) - 10:,} more" if len(left) > 10 else ""
                note = f"of the folder, {', '.join(left[:10])}{more} are left out: no files of cells; add others by their own path"
                # A list also for one file: the type of the answer depends on the argument alone.
                return [Opener(file, notes=(note,) if left and file == files[0] else ()) for file in files], True
        return [Opener(path)], False
    return [Opener(source)], False


def _is_folder(path: AnyPath) -> bool:
    """Return whether a path may be a folder of several files; one in an object store that is a source itself is not listed."""
    if isinstance(path, Path):
        return path.is_dir()
    roots = ("zarr.json", ".zgroup")
    return not (path.is_web or path.suffix or any((path / name).is_file() for name in roots)) and path.is_dir()


SHAPES = {"raggedatlas.wings.vectors.geometry": "Geometry", "raggedatlas.wings.vectors.shapes": "Shapes"}
RESULTS = {
    "raggedatlas.wings.results.dataset": "ResultDataset",
    "raggedatlas.wings.results.npy_results": "InferenceDataSet",
}
"""Modules -> class of objects in memory that can be added."""


def is_geometry(source: Any) -> bool:  # noqa: ANN401  (anything that can be added)
    """Return whether something is geometry: shapes in memory, or a zarr-vectors store, shapes or points by path or URI.

    Raises
    ------
    StoreError
        If an object store cannot be asked.
    """
    if not isinstance(source, str | os.PathLike):
        return _is_instance(source, SHAPES)
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


def is_results(source: Any) -> bool:  # noqa: ANN401  (anything that can be added)
    """Return whether a source is a model's results, or a folder of some."""
    if not isinstance(source, str | os.PathLike):
        return _is_instance(source, RESULTS)
    folder = as_path(source)
    if isinstance(folder, Location):
        # A path of its own, so that only the table is listed.
        table = f"{folder.uri}/{DATABASE}/{TABLE}.lance"
        return not (folder.is_web or folder.suffix) and Location(table, folder.storage_options).is_dir()
    return (folder / DATABASE / f"{TABLE}.lance").is_dir() or (folder / "batch_index.npy").is_file()


def _is_instance(source: Any, classes: Mapping[str, str]) -> bool:  # noqa: ANN401
    """Return whether an object is of one of some classes, without importing their modules: before that there are no objects."""
    modules = {name: sys.modules[name] for name in classes if name in sys.modules}
    return any(isinstance(source, getattr(module, classes[name])) for name, module in modules.items())
