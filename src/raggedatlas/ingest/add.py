"""One door for everything that can be added: a path, a folder, an object, or several of them."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import ArgumentError, SourceError
from raggedatlas.formats.registry import list_left_out, list_sources
from raggedatlas.ingest.commit import Attachment, add_sources, attach, open_progress
from raggedatlas.ingest.options import IngestOptions, read_options
from raggedatlas.ingest.staging import Opener
from raggedatlas.model.arguments import Progress
from raggedatlas.model.reports import AddReport, IngestReport
from raggedatlas.model.wings import AssetKind, every_wing
from raggedatlas.store.executors import Workers
from raggedatlas.store.location import AnyPath, Location, as_path, with_options


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
    kind = asset_kind(source)
    if kind is not None:
        if executor is not None:
            raise ArgumentError(f"add() takes executor= for files of cells; {kind.noun} is added without.")
        made: Attachment[AddReport] = resolve_name(kind.attachment)(catalog, source, choices)
        return attach(made, progress)
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


def asset_kind(source: Any) -> AssetKind | None:  # noqa: ANN401  (anything that can be added)
    """Return what a source attaches to cells; None for a source of cells.

    Raises
    ------
    StoreError
        If an object store cannot be asked.
    """
    kinds = (kind for wing in every_wing() for kind in wing.assets)
    return next((kind for kind in kinds if resolve_name(kind.accepts)(source)), None)


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
