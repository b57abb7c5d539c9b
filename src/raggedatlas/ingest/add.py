"""One door for everything that can be added: a path, a folder, an object, or several of them."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import ArgumentError, AtlasError, SourceError
from raggedatlas.formats.registry import detect, list_sources, open_source
from raggedatlas.ingest.commit import add_sources
from raggedatlas.ingest.detection import is_geometry, is_results
from raggedatlas.ingest.options import IngestOptions, open_progress, read_options
from raggedatlas.model.arguments import Progress
from raggedatlas.model.protocols import Source
from raggedatlas.model.reports import GeometryReport, IngestReport, ResultReport
from raggedatlas.store.executors import Workers

ANNDATA_FORMATS = ("h5ad", "zarr", "h5mu")
"""Formats whose files are held against the rules of AnnData before they are opened."""


class Opener:
    """Opens one source, once it was found to keep the rules of its format.

    Parameters
    ----------
    what : path, AnnData, MuData or Source
        Anything that `open_source` takes.
    """

    def __init__(self, what: Any) -> None:  # noqa: ANN401  (anything that can be added)
        self.what = what
        self.notes: tuple[str, ...] = ()
        self._checked: Path | None = None

    def __call__(self) -> Source:
        """Open it.

        Raises
        ------
        SourceError
            If it breaks a rule that it cannot be added by, before anything is read that takes long.
        """
        path = Path(self.what) if isinstance(self.what, str | Path) else None
        if path is not None and detect(path) in ANNDATA_FORMATS:
            from raggedatlas.formats.anndata import raise_if_invalid

            self._checked = path
            self.notes = tuple(f"breaks {found}" for found in raise_if_invalid(path) if found.level == "must")
        return open_source(self.what)

    def explain(self, error: AtlasError) -> AtlasError:
        """Name the rule behind an error that came while the source was read, where there is one."""
        if self._checked is None:
            return error
        from raggedatlas.formats.anndata import with_rule_id

        return with_rule_id(self._checked, error)


def add(
    catalog: Catalog,
    source: Any,  # noqa: ANN401  (anything that can be added)
    choices: Mapping[str, Any],
    progress: Progress | bool | None = None,  # noqa: FBT001  (passed on as the caller gave it)
    executor: Executor | Workers | None = None,
) -> IngestReport | ResultReport | GeometryReport | list[IngestReport]:
    """Add whatever `source` is.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    source : path, AnnData, MuData, Source, ResultDataset, Shapes, Geometry, or sequence of these
        A folder that is no source itself means the files in it; a folder of results is a model's result, a zarr-vectors store
        is geometry.
    choices : mapping
        Keyword arguments of `IngestOptions`.
    progress : callable, bool or None
        A callback; None draws a bar on a terminal, False draws nothing.
    executor : Executor, Workers or None
        Whose workers read files and write their arrays.

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
    if executor is not None and (is_geometry(source) or is_results(source)):
        raise ArgumentError("add() takes executor= for files of cells; results and geometry are added without.")
    # Before `open_source`, which takes a zarr-vectors store for an AnnData Zarr folder: both have a `zarr.json`.
    if is_geometry(source):
        from raggedatlas.ingest.geometry import add_geometry, add_transcripts

        adds = add_transcripts if choices.get("counts") else add_geometry
        return adds(catalog, source, choices, progress)
    if is_results(source):
        from raggedatlas.ingest.results import add_results

        return add_results(catalog, source, choices, progress)
    options = read_options(IngestOptions, choices, "add()")
    openers, several = _openers(source)
    if several and options.name is not None:
        raise SourceError(
            f"name={options.name!r} is one name for {len(openers)} sources; leave it out, and each takes its file's name."
        )
    with open_progress(progress, options.name or "add") as callback:
        reports = add_sources(catalog, openers, options, callback, executor=executor)
    # `add_sources` raises where a source is refused, so there is one report for each opener here.
    # Workers that are threads share the opener, and their reports have its notes already.
    reports = [
        replace(r, notes=(*r.notes, *(note for note in o.notes if note not in r.notes)))
        for r, o in zip(reports, openers, strict=True)
    ]
    return reports if several else reports[0]


def _openers(source: Any) -> tuple[list[Opener], bool]:  # noqa: ANN401  (anything that can be added)
    if isinstance(source, list | tuple) and not hasattr(source, "describe"):
        parts: Sequence[Any] = source
        openers = [opener for part in parts for opener in _openers(part)[0]]
        if not openers:
            raise SourceError("add() got an empty sequence; pass at least one source.")
        return openers, True
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if path.is_dir():
            files = list_sources(path)
            if files != [path]:
                if not files:
                    raise SourceError(f"The folder {path} holds no file that can be added.")
                # A list also for one file: the type of the answer depends on the argument alone.
                return [Opener(file) for file in files], True
    return [Opener(source)], False
