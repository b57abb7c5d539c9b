"""Detect, read, write and convert files of geometry."""

import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from raggedatlas.errors import AtlasError, NotFoundError, SourceError, StoreError
from raggedatlas.formats.output_files import written_aside
from raggedatlas.model.arguments import checked
from raggedatlas.model.choices import refuse_unused
from raggedatlas.store.copies import local_copy, local_target
from raggedatlas.store.location import Address, AnyPath, Location, as_path
from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.wings.vectors.chunking import chunk_coordinates, row_blocks
from raggedatlas.wings.vectors.converters import content as tables
from raggedatlas.wings.vectors.converters import geospatial as geo
from raggedatlas.wings.vectors.converters import meshes
from raggedatlas.wings.vectors.converters.content import Capabilities, Content, check_content, read_errors
from raggedatlas.wings.vectors.converters.interop import ORDER, PART, RING
from raggedatlas.wings.vectors.geometry import Geometry
from raggedatlas.wings.vectors.inspection import is_geometry_store
from raggedatlas.wings.vectors.pyramid import PyramidOptions, make_pyramid
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import SEQUENTIAL, Shapes, take_objects
from raggedatlas.wings.vectors.writer import write

Losses = Callable[[Content], Iterable[str]]


@dataclass(frozen=True)
class Converter:
    """A file format of geometry."""

    endings: tuple[str, ...]  # suffixes of its files; empty for folders, which are detected by their content
    read: Callable[..., Content]  # `read(path, **options)`
    write: Callable[..., None]  # `write(content, path, **options)`; `path` does not exist yet
    holding: Capabilities
    losses: Losses = lambda content: ()  # returns further losses of a content, one line each


CONVERTERS: dict[str, Converter] = {
    "csv": Converter((".csv", ".tsv"), tables.read_csv, tables.write_csv, tables.TABLE_HOLDING, tables.csv_losses),
    "parquet": Converter(
        (".parquet",), tables.read_parquet, tables.write_parquet, tables.TABLE_HOLDING, tables.table_losses
    ),
    "obj": Converter((".obj",), meshes.read_obj, meshes.write_obj, meshes.OBJ_HOLDING, meshes.obj_losses),
    "ply": Converter((".ply",), meshes.read_ply, meshes.write_ply, meshes.PLY_HOLDING, meshes.ply_losses),
    "stl": Converter((".stl",), meshes.read_stl, meshes.write_stl, meshes.STL_HOLDING, meshes.stl_losses),
    "geojson": Converter((".geojson",), geo.read_geojson, geo.write_geojson, geo.BOUNDARY_HOLDING, geo.boundary_losses),
    "geoparquet": Converter(
        (".geoparquet",), geo.read_geoparquet, geo.write_geoparquet, geo.BOUNDARY_HOLDING, geo.boundary_losses
    ),
    "spatialdata": Converter(
        (), geo.read_spatialdata, geo.write_spatialdata, geo.SPATIALDATA_HOLDING, geo.spatialdata_losses
    ),
}
"""Name -> converter."""

ENDINGS = {ending: name for name, converter in CONVERTERS.items() for ending in converter.endings}
"""Ending -> name."""

ROUNDED = "rounded: "
"""Prefix of losses that ``strict`` accepts: rounding to the precision of the format."""


def detect(file: AnyPath) -> str:
    """Return the name of the converter that reads a path, by its suffix or by the content of a folder."""
    name = ENDINGS.get(file.suffix.lower())
    # The ending of a remote file is believed; a request for it would be one of two.
    if name is None or isinstance(file, Path):
        if not file.exists():
            raise NotFoundError(f"There is no file or folder {file}; check the path.")
        if file.is_dir():
            name = "spatialdata" if geo.is_spatialdata(file) else None
    if name == "parquet" and has_geometry(file):
        return "geoparquet"
    if name is None:
        folders = [name for name, converter in CONVERTERS.items() if not converter.endings]
        formats = f"{', '.join(ENDINGS)} and folders of the kinds {', '.join(folders)}"
        raise SourceError(f"{file} is in no known format of geometry; {formats} can be read.")
    return name


def has_geometry(file: AnyPath) -> bool:
    """Return whether a Parquet file has a column of geometries, which makes it GeoParquet; raise `SourceError` if it is not Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as papq

    with read_errors(file, "Parquet file", pa.ArrowInvalid, OSError), file.open("rb") as opened:
        return b"geo" in (papq.read_schema(opened).metadata or {})


@checked
def read_file(path: Address, *, format: str | None = None, **options: Any) -> Content:  # noqa: ANN401
    """Read a file or folder of geometry; one in an object store or on a web server is copied to a temporary folder first.

    Parameters
    ----------
    path : path
        The file or folder.
    format : str or None
        Name of a converter; None detects it (`detect`).
    **options
        Options of the reader, e.g. ``axes=`` and ``objects=`` for tables, ``element=`` for SpatialData.

    Returns
    -------
    Content
        Shapes, metadata, and what was not read.

    Raises
    ------
    NotFoundError
        If it does not exist.
    SourceError
        If the format is unknown, the file is damaged or an option is unknown; `ValuesError` for positions that are not finite.
    MissingExtraError
        If the library that the format needs is not installed.
    """
    file = as_path(path)
    name = _known(format) if format is not None else detect(file)
    if isinstance(file, Path) and not file.exists():
        raise NotFoundError(f"There is no file or folder {file}; check the path.")
    _check_options(CONVERTERS[name].read, name, options)
    # Of a SpatialData store one element is copied, which its reader chooses.
    opened = nullcontext(file) if name == "spatialdata" else local_copy(file)
    try:
        with opened as local:
            content = CONVERTERS[name].read(local, **options)
    # Some are errors of the operating system too.
    except AtlasError:
        raise
    except OSError as error:
        raise StoreError(f"Could not read {file}: {error}") from error
    # Once for all formats. A reader that renumbers links must check their range itself, before this.
    check_content(content.shapes, str(file))
    return content


def plan_losses(content: Content | Shapes, name: str) -> list[str]:
    """List what would be lost by writing in a format, by the name of its converter.

    Raises `SourceError` if the format cannot represent these shapes at all.
    """
    content = content if isinstance(content, Content) else Content(content)
    converter = CONVERTERS[_known(name)]
    converter.holding.check(content.shapes, name)
    losses = [*converter.holding.losses(content.shapes), *converter.losses(_without_the_left(content, converter))]
    return list(dict.fromkeys(losses))


def _without_the_left(content: Content, converter: Converter) -> Content:
    """Leave out vertices of no object and objects without any: files that separate objects have no place for them."""
    holding, shapes = converter.holding, content.shapes
    if not holding.joined and shapes.ids is not None:
        kept = holding.objects_written(shapes)
        if len(kept) < shapes.n_objects or shapes.offsets[-1] < shapes.n_vertices:
            return replace(content, shapes=take_objects(shapes, kept))
    return content


@checked
def write_file(
    content: Content | Shapes,
    path: Address,
    *,
    format: str | None = None,
    strict: bool = False,
    overwrite: bool = False,
    **options: Any,  # noqa: ANN401
) -> list[str]:
    """Write shapes in a file format; the file or folder appears when it is complete.

    Parameters
    ----------
    content : Content or Shapes
        What to write.
    path : path
        Target, also in an object store; its suffix chooses the format.
    format : str or None
        Name of a converter, where the path does not choose one.
    strict : bool
        Refuse to write if anything would be lost, rounding to the format's precision excepted.
    overwrite : bool
        Replace an existing file or folder.
    **options
        Options of the writer, e.g. ``name=`` for SpatialData.

    Returns
    -------
    list of str
        What the format cannot represent, one line each.

    Raises
    ------
    DuplicateError
        If the target exists.
    SourceError
        If the format cannot represent the shapes, or if something would be lost and `strict` is true.
    """
    content = content if isinstance(content, Content) else Content(content)
    shapes, target = content.shapes, as_path(path)
    # A table of vertices would be read as points; format="parquet" still asks for one.
    outlines = shapes.kind in SEQUENTIAL or {PART, RING, ORDER} <= set(shapes.vertex_attributes)
    name = ENDINGS.get(target.suffix.lower()) if format is None else _known(format)
    if name is None:
        raise SourceError(
            f"{path} has the ending {target.suffix!r}; {', '.join(ENDINGS)} can be written. "
            f"For a folder name the format: format= of {', '.join(n for n, c in CONVERTERS.items() if not c.endings)}."
        )
    if format is None and name == "parquet" and outlines and shapes.n_dims in (2, 3):
        name = "geoparquet"
    check_content(shapes, "What is to be written")
    losses = plan_losses(content, name)
    refused = [loss for loss in losses if not loss.startswith(ROUNDED)]
    if strict and refused:
        raise SourceError(
            f"{target} would not hold all: {'; '.join(refused)}. Leave these out first, or write without strict."
        )
    _check_options(CONVERTERS[name].write, name, options)
    content = _without_the_left(content, CONVERTERS[name])
    with local_target(target, overwrite=overwrite) as file, written_aside(file, overwrite=overwrite) as new:
        CONVERTERS[name].write(content, new, **options)
    return losses


def _known(name: str) -> str:
    if name not in CONVERTERS:
        raise SourceError(f"There is no format {name!r}; expected one of {', '.join(CONVERTERS)}.")
    return name


def _check_options(function: Callable[..., Any], name: str, options: dict[str, Any]) -> None:
    accepted = [
        key for key, value in inspect.signature(function).parameters.items() if value.kind is value.KEYWORD_ONLY
    ]
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise SourceError(
            f"The options {', '.join(unknown)} mean nothing for {name}; it takes {', '.join(accepted) or 'none'}."
        )


ENDING = ".zv"
"""Suffix of new geometry stores; existing ones are detected by their content."""


@dataclass(frozen=True)
class Conversion:
    """Options of `convert`.

    Parameters
    ----------
    read, written : str or None
        Formats of source and target, where the paths do not choose them; ``"store"`` is a geometry store.
    options : mapping
        Options of the reader of a file.
    level : int or None
        Level of a store to write to a file; None is the finest.
    layout : str
        Layout of a new store.
    steps : PyramidOptions or None
        Pyramid of a new store. None makes no coarser levels; from store to store it keeps the existing ones.
    cutting : ChunkingOptions
        Chunks of a new store.
    strict : bool
        Refuse to convert if anything would be lost.
    overwrite : bool
        Replace an existing target.
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


def is_store(path: Address) -> bool:
    """Return whether a path ends in ``.zv`` or is an existing geometry store, also one with damaged metadata."""
    folder = as_path(path)
    if folder.suffix == ENDING:
        return True
    # The ending of a remote file tells without a request that it is no store.
    if isinstance(folder, Location) and folder.suffix.lower() in ENDINGS:
        return False
    return is_geometry_store(folder)


@checked
def convert(source: Address, target: Address, how: Conversion = Conversion()) -> list[str]:
    """Convert a file or store of geometry into another; the target appears when it is complete.

    Parameters
    ----------
    source, target : path
        Files or folders of any format in `raggedatlas.wings.vectors.converters.convert.CONVERTERS`, or geometry stores, also in object stores;
        files are read from web servers too.
    how : Conversion
        Options.

    Returns
    -------
    list of str
        What was lost, one line each.

    Raises
    ------
    NotFoundError, DuplicateError
        If the source does not exist, or the target does.
    SourceError
        If something cannot be read or represented, or if something would be lost and `how.strict` is true.
    MissingExtraError
        If the library that a format needs is not installed.
    """
    # These would collide with the keywords that `convert` itself passes to `write_file`.
    own = sorted({"format", "overwrite", "strict"} & set(how.writing))
    if own:
        raise SourceError(
            f"The options {', '.join(own)} are not options of a writer; pass them to the conversion itself."
        )
    to_store = how.written == STORE or (how.written is None and is_store(target))
    if how.writing and to_store:
        raise SourceError(f"The options {', '.join(sorted(how.writing))} mean nothing for writing a geometry store.")
    from_store = how.read == STORE or (how.read is None and is_store(source))
    if from_store and how.options:
        raise SourceError(f"The options {', '.join(sorted(how.options))} mean nothing for a geometry store.")
    if not to_store:
        chunks, layout = how.cutting != ChunkingOptions(), how.layout != Conversion.layout
        why = "where the target is a file, as they are of a geometry store"
        refuse_unused("convert", why, steps=how.steps is not None, cutting=chunks, layout=layout)
    leveled = not from_store and how.level is not None
    refuse_unused("convert", "where the source is a file, which has no levels", level=leveled)
    if from_store:
        store = open_vectors(source)
        if to_store and how.steps is None and how.cutting == ChunkingOptions() and how.level is None:
            write(store.load(), target, layout=how.layout, overwrite=how.overwrite)
            return []
        others = store.n_levels - 1
        # Where a level was asked for, even level 0, leaving out the others is no loss.
        left = (f"levels: {others} coarser ones are left out",) if others and how.level is None else ()
        shapes = store.read(level=how.level or 0)
        content = Content(shapes, dict(store.geometry.metadata), store.geometry.axes, left)
    else:
        content = read_file(source, format=how.read, **how.options)
    losses = list(content.left)
    # Refused before anything is written; `write_file` knows the losses of the target format only.
    if how.strict and losses:
        raise SourceError(
            f"{source} would not be converted completely: {'; '.join(losses)}. Convert without strict to leave these out."
        )
    if not to_store:
        settings: dict[str, Any] = {"format": how.written, "strict": how.strict, "overwrite": how.overwrite}
        return losses + write_file(content, target, **settings, **how.writing)
    return losses + write_store(content, target, how)


def write_store(content: Content, target: Address, how: Conversion = Conversion()) -> list[str]:
    """Write the content of a file as a geometry store, with a pyramid if `how.steps` is set; return what was not kept."""
    cutting, shapes = how.cutting, content.shapes
    if cutting.axes is None and content.axes is not None and len(content.axes) == content.shapes.n_dims:
        cutting = replace(cutting, axes=content.axes)
    coarser = () if how.steps is None else make_pyramid(shapes, how.steps)
    geometry = make_geometry(shapes, cutting, coarser=coarser, metadata=dict(content.metadata))
    write(geometry, target, layout=how.layout, overwrite=how.overwrite)
    return order_losses(shapes, geometry)


REORDERED = "order: the vertices of an object are numbered anew, chunk by chunk, and links with them"
"""What is told of a store; no refusal of ``strict``, as nothing refers to these numbers."""


def order_losses(shapes: Shapes, geometry: Geometry) -> list[str]:
    """Return `REORDERED` if the store gives vertices in another order than these shapes: lines keep theirs, others go by chunk, points by bin."""
    edges = [geometry.chunk_shape]
    if shapes.ids is None and geometry.bin_shape is not None:
        edges.append(geometry.bin_shape)
    for rows in row_blocks(0 if shapes.kind in SEQUENTIAL else shapes.n_vertices):
        # From the last row of the block before.
        start = max(rows.start - 1, 0)
        owner = np.searchsorted(shapes.offsets, np.arange(start, rows.stop), side="right")
        places = (chunk_coordinates(shapes.positions[start : rows.stop], edge) for edge in edges)
        steps = np.diff(np.concatenate([owner[:, None], *places], axis=1), axis=0)
        # The first column that differs decides between two rows.
        first = np.argmax(steps != 0, axis=1)
        if (steps[np.arange(len(steps)), first] < 0).any():
            return [REORDERED]
    return []
