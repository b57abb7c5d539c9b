"""Between files and geometry stores, and from store to store."""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raggedatlas.errors import SourceError
from raggedatlas.model.arguments import checked
from raggedatlas.store.location import REMOTE_SCHEMES
from raggedatlas.vectors.builder import ChunkingOptions, CoarseLevel, make_geometry
from raggedatlas.vectors.coarsening.options import PyramidOptions
from raggedatlas.vectors.converters.content import Content
from raggedatlas.vectors.converters.files import read_file, write_file
from raggedatlas.vectors.converters.registry import CONVERTERS
from raggedatlas.vectors.pyramid import make_pyramid
from raggedatlas.vectors.reader import open_vectors
from raggedatlas.vectors.writer import write

ENDING = ".zv"
"""How the names of geometry stores end, by custom of ours; what is there already is told by what is in it."""


@dataclass(frozen=True)
class Conversion:
    """How something is converted.

    Parameters
    ----------
    read, written : str or None
        Names of the formats of the source and of the target, where paths do not say them; ``"store"`` is a geometry store.
    options : mapping
        Of the reader of a file.
    level : int
        Which level of a store becomes a file.
    layout : str
        Of a store that is written.
    steps : PyramidOptions or None
        The pyramid of a store that is written; None: none, and from store to store the levels that are there.
    cutting : ChunkingOptions
        How a store is cut.
    strict : bool
        Refuse what would lose anything.
    overwrite : bool
        Whether what is there is replaced.
    writing : mapping
        Options of the writer of a file.
    """

    read: str | None = None
    written: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    level: int | None = None
    layout: str = "0.9"
    steps: PyramidOptions | None = None
    cutting: ChunkingOptions = field(default_factory=ChunkingOptions)
    strict: bool = False
    overwrite: bool = False
    writing: dict[str, Any] = field(default_factory=dict)


STORE = "store"


def is_store(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is a geometry store, or is named as one: it ends in ``.zv``, or what is there says so."""
    text = os.fspath(path)
    if text.rstrip("/").endswith(ENDING):
        return True
    node = Path(text) / "zarr.json"
    if text.startswith(tuple(f"{scheme}://" for scheme in REMOTE_SCHEMES)) or not node.is_file():
        return False
    try:
        return "zarr_vectors" in json.loads(node.read_text(encoding="utf-8")).get("attributes", {})
    except (OSError, ValueError, AttributeError):
        return False


@checked
def convert(
    source: str | os.PathLike[str], target: str | os.PathLike[str], how: Conversion = Conversion()
) -> list[str]:
    """Convert a file or store of geometry into another; the target appears when it is whole.

    Parameters
    ----------
    source, target : path
        Files or folders of any format in `raggedatlas.vectors.converters.registry.CONVERTERS`, or geometry stores; stores also on
        object stores.
    how : Conversion
        What paths do not say.

    Returns
    -------
    list of str
        What of the source is not in the target, one line each.

    Raises
    ------
    NotFoundError, DuplicateError
        If there is no source, or a target already.
    SourceError
        If something cannot be read or drawn, or `how.strict` and something would be lost.
    MissingExtraError
        Without the library that a format needs.
    """
    _check_writing(how, target)
    from_store = how.read == STORE or (how.read is None and is_store(source))
    to_store = how.written == STORE or (how.written is None and is_store(target))
    if from_store and to_store and how.steps is None and how.cutting == ChunkingOptions() and how.level is None:
        write(open_vectors(os.fspath(source)).load(), os.fspath(target), layout=how.layout, overwrite=how.overwrite)
        return []
    content, left = _content_of_store(source, how) if from_store else (_content_of_file(source, how), [])
    told = [*left, *content.left]
    if how.strict and told:
        raise SourceError(
            f"{source} would not come through whole: {'; '.join(told)}. Convert without strict to leave these out."
        )
    if not to_store:
        if how.steps is not None and how.written in CONVERTERS and CONVERTERS[how.written].holding.levels:
            content = replace(content, coarser=tuple(step.shapes for step in make_pyramid(content.shapes, how.steps)))
        asked: dict[str, Any] = {"format": how.written, "strict": how.strict, "overwrite": how.overwrite}
        return told + write_file(content, target, **asked, **how.writing)
    write_store(content, target, how)
    return told


def _check_writing(how: Conversion, target: str | os.PathLike[str]) -> None:
    """Refuse options of a writer where a store is written, and those that have a place of their own."""
    own = sorted({"format", "overwrite", "strict"} & set(how.writing))
    if own:
        raise SourceError(f"The options {', '.join(own)} are none of a writer; say them of the conversion itself.")
    if how.writing and (how.written == STORE or (how.written is None and is_store(target))):
        raise SourceError(f"The options {', '.join(sorted(how.writing))} mean nothing for writing a geometry store.")


def write_store(content: Content, target: str | os.PathLike[str], how: Conversion = Conversion()) -> None:
    """Write what a file says as a geometry store, with a pyramid if `how.steps` asks for one."""
    cutting, shapes = how.cutting, content.shapes
    if cutting.axes is None and content.axes is not None and len(content.axes) == content.shapes.n_dims:
        cutting = replace(cutting, axes=content.axes)
    coarser = _given_levels(content) if how.steps is None else make_pyramid(shapes, how.steps)
    geometry = make_geometry(shapes, cutting, coarser=coarser, metadata=dict(content.metadata))
    write(geometry, os.fspath(target), layout=how.layout, overwrite=how.overwrite)


def _given_levels(content: Content) -> tuple[CoarseLevel, ...]:
    """Return the coarser levels that a file has, as levels of a store: each with chunks and bins of twice the edges."""
    ratios = [(2**number,) * content.shapes.n_dims for number in range(1, len(content.coarser) + 1)]
    return tuple(
        CoarseLevel(shapes, ratio, ratio, None, "manual", max(1, shapes.n_objects) / max(1, content.shapes.n_objects))
        for shapes, ratio in zip(content.coarser, ratios, strict=True)
    )


def _content_of_file(source: str | os.PathLike[str], how: Conversion) -> Content:
    return read_file(source, format=how.read, **how.options)


def _content_of_store(source: str | os.PathLike[str], how: Conversion) -> tuple[Content, list[str]]:
    if how.options:
        raise SourceError(f"The options {', '.join(sorted(how.options))} mean nothing for a geometry store.")
    store = open_vectors(os.fspath(source))
    content = Content(store.read(level=how.level or 0), dict(store.geometry.metadata), store.geometry.axes)
    others = store.n_levels - 1
    if how.level is None and how.written in CONVERTERS and CONVERTERS[how.written].holding.levels:
        return replace(content, coarser=tuple(store.read(level=level) for level in range(1, others + 1))), []
    return content, [f"levels: {others} coarser ones are left out"] if others and how.level is None else []
