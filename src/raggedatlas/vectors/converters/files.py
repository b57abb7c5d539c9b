"""Any file of geometry, read and written by what it is."""

import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from raggedatlas.errors import AtlasError, DuplicateError, NotFoundError, SourceError, StoreError
from raggedatlas.model.arguments import checked
from raggedatlas.vectors.converters.content import Content, check_content
from raggedatlas.vectors.converters.precomputed import read_info
from raggedatlas.vectors.converters.precomputed_annotations import ANNOTATION_TYPE
from raggedatlas.vectors.converters.precomputed_draco import DRACO_TYPE
from raggedatlas.vectors.converters.precomputed_meshes import LEGACY_TYPE
from raggedatlas.vectors.converters.precomputed_skeletons import SKELETON_TYPE
from raggedatlas.vectors.converters.registry import CONVERTERS, ENDINGS, Converter
from raggedatlas.vectors.converters.spatialdata import is_spatialdata
from raggedatlas.vectors.objects import ORDER, PART, RING
from raggedatlas.vectors.shapes import SEQUENTIAL, Shapes

SCHEME = "precomputed://"
"""How Neuroglancer spells folders in its own formats; may stand before a path."""

INFO_TYPES = {
    SKELETON_TYPE: "precomputed-skeletons",
    LEGACY_TYPE: "precomputed-meshes",
    DRACO_TYPE: "precomputed-draco",
    ANNOTATION_TYPE: "precomputed-annotations",
}
"""``@type`` of an info -> converter."""

BY_KIND = {
    "skeleton": "precomputed-skeletons",
    "graph": "precomputed-skeletons",
    "mesh": "precomputed-meshes",
    "point_cloud": "precomputed-annotations",
    "line": "precomputed-annotations",
    "polyline": "precomputed-annotations",
}
"""Geometry type -> which precomputed format holds it."""

ROUNDED = "rounded: "
"""How a loss begins that ``strict`` lets pass: digits that the format's own width takes."""


def detect(path: str | os.PathLike[str]) -> str:
    """Say which converter reads a path: by its ending, or by what a folder holds.

    Raises
    ------
    NotFoundError
        If it does not exist.
    SourceError
        If it is of no known kind; with the kinds that are.
    """
    file = _path(path)
    if not file.exists():
        raise NotFoundError(f"There is no file or folder {file}; check the path.")
    found = _folder_kind(file) if file.is_dir() else _file_kind(file)
    if found is None:
        raise SourceError(f"{file} is of no kind of geometry that is read; {supported()} are.")
    return found


def supported() -> str:
    """Return the endings and folders that are read, as a text."""
    folders = [name for name, converter in CONVERTERS.items() if not converter.endings]
    return f"{', '.join(ENDINGS)} and folders of the kinds {', '.join(folders)}"


def _file_kind(file: Path) -> str | None:
    name = ENDINGS.get(file.suffix.lower())
    if name == "parquet" and _has_geometry(file):
        return "geoparquet"
    return name


def _has_geometry(file: Path) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as papq

    try:
        return b"geo" in (papq.read_schema(file).metadata or {})
    except (pa.ArrowInvalid, OSError) as error:
        raise SourceError(f"{file} is no Parquet file that can be read: {error}.") from None


def _folder_kind(folder: Path) -> str | None:
    if (folder / "info").is_file():
        return INFO_TYPES.get(str(read_info(folder).get("@type")))
    if is_spatialdata(folder):
        return "spatialdata"
    names = [found.name for found in folder.iterdir() if not found.name.startswith(".")]
    if "header.json" in names:
        return "trx"
    if any(name.endswith(".swc") for name in names):
        return "swc-folder"
    return "precomputed-meshes" if any(name.endswith(":0") for name in names) else None


def _path(path: str | os.PathLike[str]) -> Path:
    return Path(os.fspath(path).removeprefix(SCHEME))


@checked
def read_file(path: str | os.PathLike[str], *, format: str | None = None, **options: Any) -> Content:  # noqa: ANN401
    """Read a file or folder of geometry.

    Parameters
    ----------
    path : path
        The file or folder.
    format : str or None
        Name of a converter; None: by ending or content (`detect`).
    **options
        Of the format, e.g. ``axes=`` and ``objects=`` for tables, ``element=`` for SpatialData.

    Returns
    -------
    Content
        Shapes, what is said of the whole, and what is not taken.

    Raises
    ------
    NotFoundError
        If it does not exist.
    SourceError
        If it is of no known kind, damaged, or the options mean nothing; `ValuesError` for positions that are not finite.
    MissingExtraError
        Without the library that the format needs.
    """
    name = _known(format) if format is not None else detect(path)
    file = _path(path)
    if not file.exists():
        raise NotFoundError(f"There is no file or folder {file}; check the path.")
    _check_options(CONVERTERS[name].read, name, options)
    with _file_errors(f"read {file}"):
        content = CONVERTERS[name].read(file, **options)
    check_content(content.shapes, str(file))
    return content


def plan_losses(content: Content | Shapes, name: str) -> list[str]:
    """Say what would be lost by writing in a format; an empty list if nothing would.

    Parameters
    ----------
    content : Content or Shapes
        What is to be written.
    name : str
        Name of the converter.

    Raises
    ------
    SourceError
        If the format cannot draw it at all.

    Examples
    --------
    >>> import numpy as np
    >>> points = Shapes("point_cloud", np.zeros((2, 3)), vertex_attributes={"gene": np.array([1, 2])})
    >>> plan_losses(points, "geojson")
    []
    """
    shapes = content if isinstance(content, Shapes) else content.shapes
    converter = CONVERTERS[_known(name)]
    converter.holding.check(shapes, name)
    found = [*converter.holding.losses(shapes), *converter.losses(shapes)]
    if isinstance(content, Content) and content.coarser and not converter.holding.levels:
        found.append(f"levels: {len(content.coarser)} coarser ones are left out")
    return list(dict.fromkeys(found))


@checked
def write_file(
    content: Content | Shapes,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    strict: bool = False,
    overwrite: bool = False,
    **options: Any,  # noqa: ANN401
) -> list[str]:
    """Write shapes in a file format; the file or folder appears when it is whole.

    Parameters
    ----------
    content : Content or Shapes
        What to write.
    path : path
        Where; its ending says the format, as does ``precomputed://`` before it.
    format : str or None
        Name of a converter, where the path does not say it.
    strict : bool
        Refuse what would lose anything (but digits by the format's own width).
    overwrite : bool
        Whether what is there is replaced.
    **options
        Of the format, e.g. ``ascii=True`` for PLY.

    Returns
    -------
    list of str
        What the format does not hold, one line each.

    Raises
    ------
    DuplicateError
        If something is there already.
    SourceError
        If the format cannot draw it, or `strict` and something would be lost.
    """
    made = content if isinstance(content, Content) else Content(content)
    file = _path(path)
    name = _known(format) if format is not None else _by_path(path, made.shapes)
    check_content(made.shapes, "What is to be written")
    losses = plan_losses(made, name)
    refused = [loss for loss in losses if not loss.startswith(ROUNDED)]
    if strict and refused:
        raise SourceError(
            f"{file} would not hold all: {'; '.join(refused)}. Leave these out first, or write without strict."
        )
    _check_options(CONVERTERS[name].write, name, options)
    if file.exists() and not overwrite:
        raise DuplicateError(f"{file} exists already; ask for overwriting, or choose another path.")
    with _file_errors(f"write {file}"):
        _write_aside(CONVERTERS[name], made, file, options, overwrite=overwrite)
    return losses


@contextmanager
def _file_errors(what: str) -> Iterator[None]:
    """Turn errors of the operating system into `StoreError`; errors raised on purpose pass."""
    try:
        yield
    except AtlasError:
        raise
    except OSError as error:
        raise StoreError(f"Could not {what}: {error}") from error


def _write_aside(
    converter: Converter, content: Content, file: Path, options: dict[str, Any], *, overwrite: bool
) -> None:
    """Write into a hidden folder beside the target, and move what came of it."""
    if not file.parent.is_dir():
        raise NotFoundError(f"There is no folder {file.parent} to write {file.name} into; make it first.")
    aside = file.parent / f".{uuid4().hex}.partial"
    aside.mkdir()
    try:
        converter.write(content, aside / file.name, **options)
        for made in sorted(aside.iterdir(), key=lambda made: made.name == file.name):
            target = file.parent / made.name
            if target.exists() and not overwrite:
                raise DuplicateError(f"{target} exists already; ask for overwriting, or choose another path.")
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            made.replace(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _by_path(path: str | os.PathLike[str], shapes: Shapes) -> str:
    text = os.fspath(path)
    if text.startswith(SCHEME) or Path(text).suffix == ".precomputed":
        if shapes.kind not in BY_KIND:
            raise SourceError(f"Neuroglancer's formats hold no {shapes.kind}; they hold {', '.join(BY_KIND)}.")
        return BY_KIND[shapes.kind]
    name = ENDINGS.get(Path(text).suffix.lower())
    if name is None:
        raise SourceError(
            f"{path} has the ending {Path(text).suffix!r}; {', '.join(ENDINGS)} can be written. "
            f"For a folder name the format: format= of {', '.join(n for n, c in CONVERTERS.items() if not c.endings)}."
        )
    # a table of vertices would be read as points; format="parquet" still asks for one
    outlines = shapes.kind in SEQUENTIAL or {PART, RING, ORDER} <= set(shapes.vertex_attributes)
    return "geoparquet" if name == "parquet" and outlines and shapes.n_dims in (2, 3) else name


def _known(name: str) -> str:
    if name not in CONVERTERS:
        raise SourceError(f"There is no format {name!r}; expected one of {', '.join(CONVERTERS)}.")
    return name


def _check_options(function: Callable[..., Any], name: str, options: dict[str, Any]) -> None:
    known = [key for key, value in inspect.signature(function).parameters.items() if value.kind is value.KEYWORD_ONLY]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise SourceError(
            f"The options {', '.join(unknown)} mean nothing for {name}; it takes {', '.join(known) or 'none'}."
        )
