"""One door for everything that can be added: a path, a folder, an object, or several of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import SourceError
from raggedatlas.formats.registry import list_sources, open_source
from raggedatlas.ingest.options import IngestOptions, Progress, bar, no_progress
from raggedatlas.ingest.write import add_sources
from raggedatlas.model.contracts import Source
from raggedatlas.model.reports import IngestReport


def add(
    catalog: Catalog,
    source: Any,  # noqa: ANN401  (anything that can be added)
    choices: Mapping[str, Any],
    progress: Progress | bool | None = None,  # noqa: FBT001  (passed on as the caller gave it)
) -> IngestReport | list[IngestReport]:
    """Add whatever `source` is.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    source : path, AnnData, MuData, Source, or sequence of these
        A folder that is no source itself stands for the files in it.
    choices : mapping
        Keyword arguments of `IngestOptions`.
    progress : callable, bool or None
        A callback; None draws a bar on a terminal, False draws nothing.

    Returns
    -------
    IngestReport, or list of IngestReport
        A list for a folder or a sequence.

    Raises
    ------
    SourceError
        If a choice is not understood or the source is refused.
    """
    catalog.require_tip("add()")
    unknown = sorted(set(choices) - set(IngestOptions.__dataclass_fields__))
    if unknown:
        raise SourceError(f"add() does not know {unknown}; it takes {sorted(IngestOptions.__dataclass_fields__)}.")
    options = IngestOptions(**choices)
    openers, several = _openers(source)
    if several and options.name is not None:
        raise SourceError(
            f"name={options.name!r} is one name for {len(openers)} sources; leave it out, and each takes its file's name."
        )
    if callable(progress):
        reports = add_sources(catalog, openers, options, progress)
    elif progress is False:
        reports = add_sources(catalog, openers, options, no_progress)
    else:
        show, close = bar(options.name or "add")
        try:
            reports = add_sources(catalog, openers, options, show)
        finally:
            close()
    return reports if several else reports[0]


def _openers(source: Any) -> tuple[list[Callable[[], Source]], bool]:  # noqa: ANN401  (anything that can be added)
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
                return [partial(open_source, file) for file in files], True
    return [partial(open_source, source)], False
