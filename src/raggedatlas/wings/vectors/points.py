"""Points of Parquet files and other Arrow tables, read in parts into arrays on disk."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError, NotFoundError, SourceError
from raggedatlas.model.arguments import checked
from raggedatlas.store.location import Address, AnyPath, Location, as_path
from raggedatlas.store.runtime import ScratchFile
from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.wings.vectors.chunking import BLOCK_ROWS, row_blocks
from raggedatlas.wings.vectors.converters.content import AXIS_NAMES, find_axes
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.shapes import POSITION_TYPES, Attribute, Shapes, translate_codes
from raggedatlas.wings.vectors.writer import write


@checked
def read_points(
    source: str | os.PathLike[str] | pa.Table | pa.RecordBatchReader | Iterable[pa.RecordBatch],
    *,
    positions: Sequence[str] = (),
    columns: Sequence[str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Shapes:
    """Read points from Parquet, such as the transcripts of Xenium or the points of SpatialData, in memory that does not grow with them.

    The arrays are in temporary files (in ``TMPDIR``), which disappear with them. `RaggedAtlas.add` calls this for a path that ends in
    ``.parquet``, and sorts the points on disk too.

    Parameters
    ----------
    source : path, URI, pyarrow.Table, pyarrow.RecordBatchReader, or iterable of pyarrow.RecordBatch
        A Parquet file, or a folder of them.
    positions : sequence of str
        Columns with the coordinates, 2 or more numbers; by default the first of ``x_location, y_location, z_location`` (Xenium),
        ``global_x, global_y, global_z`` (MERSCOPE), ``x_global_px, y_global_px, z_global_px`` (CosMx) and ``x, y, z`` that is there, in
        any case, with or without the third.
    columns : sequence of str or None
        Further columns to read; None: all.
    storage_options : mapping of str to str, optional
        Credentials and endpoint of a URI.

    Returns
    -------
    Shapes
        A point cloud without objects. Coordinates are of one dtype that holds all. Of the vertex attributes text becomes categories,
        sorted, missing text the code -1, booleans uint8, missing floats NaN; other numbers keep their dtype.

    Raises
    ------
    NotFoundError
        If there is no such file or column, or no Parquet file in the folder.
    SourceError
        If a column holds something else than numbers and text, an integer or boolean is missing, or a part has other columns.

    References
    ----------
    zarr-vectors §7.1 (vertices), §7.2 (vertex attributes).

    Examples
    --------
    >>> table = pa.table({"x": [0.5, 2.0], "y": [1.0, 1.5], "feature_name": ["CD3E", "ACTB"]})
    >>> spots = read_points(table)
    >>> spots.positions.tolist(), spots.vertex_attributes["feature_name"].metadata["categories"]
    ([[0.5, 1.0], [2.0, 1.5]], ['ACTB', 'CD3E'])
    """
    if isinstance(source, str | os.PathLike):
        what, batches = str(source), _parquet_batches(as_path(source, storage_options))
    else:
        what = f"The {type(source).__name__}"
        batches = _checked_batches(source.to_batches(BLOCK_ROWS) if isinstance(source, pa.Table) else source)
    first = next(batches, None)
    if first is None:
        raise SourceError(f"{what} holds no points.")
    schema: pa.Schema = first.schema
    if len(positions) == 1:
        raise SourceError(f"positions={list(positions)}: points need two coordinates or more.")
    axes = list(positions) or find_axes(schema.names)
    if not axes:
        raise NotFoundError(
            f"{what} has no coordinates of a usual name ({', '.join(usual[0] for usual in AXIS_NAMES)}, ...); it has {schema.names}. Name "
            "them with read_points(..., positions=[...])."
        )
    names = [name for name in schema.names if name not in axes] if columns is None else list(columns)
    for name in (*axes, *names):
        if schema.get_field_index(name) < 0:
            raise NotFoundError(f"{what} has no column {name!r} (or several of that name); it has {schema.names}.")
    dtype = np.result_type(*(_number_type(schema.field(axis)) for axis in axes))

    def points(batch: pa.RecordBatch) -> Shapes:
        if not batch.schema.equals(schema):
            raise SourceError(
                f"{what} has parts of different columns: {schema.names} of {schema.types}, then "
                f"{batch.schema.names} of {batch.schema.types}; cast them to one schema first."
            )
        positions = np.stack([_numbers(axis, batch.column(axis), dtype) for axis in axes], axis=1)
        return Shapes(
            "point_cloud", positions, vertex_attributes={name: _attribute(name, batch.column(name)) for name in names}
        )

    made = collect_points(map(points, chain([first], batches)))
    attributes = {name: _with_sorted_categories(attribute) for name, attribute in made.vertex_attributes.items()}
    return Shapes("point_cloud", made.positions, vertex_attributes=attributes)


@checked
def append_points(location: Address, points: Shapes) -> None:
    """Append points to a store of points without objects, in memory that does not grow with either.

    The store is written anew, with chunks of the same size, and replaced when it is complete: readers see the old points or all. The time is that of
    writing all points.

    Parameters
    ----------
    location : Location, str or path
        A zarr-vectors store of one level.
    points : Shapes
        A point cloud without objects, as `read_points` returns it, of the same dtype, axes and attributes.

    Raises
    ------
    SourceError
        If the store or the points have objects, several levels, or other attributes or dtypes than the other.

    Examples
    --------
    >>> import tempfile
    >>> from raggedatlas.wings.vectors.builder import make_geometry
    >>> from raggedatlas.wings.vectors.writer import write
    >>> folder = tempfile.mkdtemp() + "/points"
    >>> write(make_geometry(Shapes("point_cloud", np.array([[1.0, 2.0], [3.0, 4.0]]))), folder)
    >>> append_points(folder, Shapes("point_cloud", np.array([[5.0, 6.0]])))
    >>> open_vectors(folder).read().n_vertices
    3
    """
    place = Location.of(location)
    store = open_vectors(place)
    for kind, has_objects, what in (
        (store.kind, store.has_objects, place.uri),
        (points.kind, points.ids is not None, "What is appended"),
    ):
        if kind != "point_cloud" or has_objects:
            raise SourceError(f"{what} is no point cloud without objects; only points are appended to.")
    root = store.geometry
    if store.n_levels > 1:
        raise SourceError(
            f"{place.uri} has {store.n_levels} levels; append to level 0 alone and build the others again."
        )
    blocks = (
        Shapes(
            "point_cloud",
            points.positions[rows],
            vertex_attributes={name: attribute.take(rows) for name, attribute in points.vertex_attributes.items()},
        )
        for rows in row_blocks(points.n_vertices)
    )
    grid = ChunkingOptions(root.chunk_shape, root.bin_shape, root.axes)
    geometry = make_geometry(collect_points(chain(store.point_blocks(), blocks)), grid, metadata=dict(root.metadata))
    write(geometry, place, layout=store.layout, overwrite=True)


def collect_points(parts: Iterable[Shapes]) -> Shapes:
    """Put parts of a point cloud without objects together in scratch arrays.

    Categories are the union, in order of appearance. Parts with other attributes or dtypes than the first are refused.
    """
    with ExitStack() as stack:
        files: dict[str, ScratchFile] = {}
        first, expected, codes = None, {}, dict[str, dict[Any, int]]()
        for part in parts:
            arrays = {"": part.positions} | {name: a.values for name, a in part.vertex_attributes.items()}
            coded = {name for name, a in part.vertex_attributes.items() if "categories" in a.metadata}
            form = {
                name or "positions": ("categories" if name in coded else str(values.dtype), values.shape[1:])
                for name, values in arrays.items()
            }
            if first is None:
                first, expected, codes = part, form, {name: {} for name in coded}
                for name, values in arrays.items():
                    dtype = np.int32 if name in coded else values.dtype
                    files[name] = stack.enter_context(ScratchFile(dtype, values.shape[1:]))
            if form != expected:
                raise SourceError(f"Points of other attributes or dtypes are no part of these: {expected} and {form}.")
            for name, values in arrays.items():
                stored = values
                if name in codes:
                    labels = part.vertex_attributes[name].metadata["categories"]
                    known = codes[name]
                    places = [known.setdefault(label, len(known)) for label in labels]
                    stored = translate_codes(values, places, -1, np.int32)
                files[name].append(stored)
        if first is None:
            raise SourceError("There are no points.")
        attributes = {}
        for name, attribute in first.vertex_attributes.items():
            labels = {"categories": list(codes[name])} if name in codes else {}
            metadata = {**attribute.metadata, **labels}
            attributes[name] = replace(attribute, values=files[name].array(), metadata=metadata)
        return Shapes("point_cloud", files[""].array(), vertex_attributes=attributes)


def _attribute(name: str, values: pa.Array) -> Attribute:
    """Return a column as an attribute; text as codes of the labels of this part."""
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not any(test(kind) for test in _TEXT):
        return Attribute(_numbers(name, values, _number_type(pa.field(name, values.type))))
    coded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    labels = coded.dictionary.cast(pa.string()).to_pylist()
    codes = pc.fill_null(coded.indices.cast(pa.int64()), -1).to_numpy()
    return Attribute(codes, metadata={"encoding": "dictionary", "categories": labels, "ordered": False})


def _with_sorted_categories(attribute: Attribute) -> Attribute:
    """Return an attribute whose codes count in sorted categories, which do not depend on the order of the points."""
    labels = attribute.metadata.get("categories")
    if labels is None:
        return attribute
    order = sorted(range(len(labels)), key=labels.__getitem__)
    place = np.full(len(labels) + 1, -1, np.int32)
    place[order] = np.arange(len(labels))
    for rows in row_blocks(len(attribute.values)):
        attribute.values[rows] = place[attribute.values[rows]]
    return replace(attribute, metadata={**attribute.metadata, "categories": [labels[i] for i in order]})


_TEXT = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


def _number_type(field: pa.Field) -> np.dtype[Any]:
    """Return the dtype of a column of numbers; booleans are uint8, and anything else is a `SourceError`."""
    if pa.types.is_boolean(field.type):
        return np.dtype(np.uint8)
    if pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
        dtype: np.dtype[Any] = np.dtype(field.type.to_pandas_dtype())
        if dtype.name in POSITION_TYPES:
            return dtype
    raise SourceError(
        f"The column {field.name!r} holds {field.type}; points have numbers, booleans and text. Leave it out by naming the others with "
        "read_points(..., columns=[...])."
    )


def _numbers(name: str, values: pa.Array, dtype: np.dtype[Any]) -> NDArray[Any]:
    if values.null_count and not pa.types.is_floating(values.type):
        raise SourceError(
            f"The column {name!r} of {values.type} has missing values; fill them first, or convert the column to floats."
        )
    return np.asarray(values.to_numpy(zero_copy_only=False)).astype(dtype, copy=False)


def _checked_batches(parts: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        if not isinstance(part, pa.RecordBatch):
            raise SourceError(f"A part of the points is a {type(part).__name__}; expected a pyarrow.RecordBatch.")
        yield from (part.slice(start, BLOCK_ROWS) for start in range(0, part.num_rows, BLOCK_ROWS))


def _parquet_batches(path: AnyPath) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    files = [path]
    if path.is_dir():
        # By length first: `part.10.parquet` comes after `part.9.parquet`.
        files = sorted(path.glob("*.parquet"), key=lambda file: (len(file.name), file.name))
        parts = sorted(str(file) for file in path.rglob("*.parquet") if file.parent != path)
        if parts:
            raise SourceError(f"{path} has Parquet files in folders, as {parts[0]}; read each folder by its own path.")
    if not files or not files[0].is_file():
        raise NotFoundError(f"There is no Parquet file at {path}.")
    for file in files:
        with file.open("rb") as opened:
            try:
                table = pq.ParquetFile(opened)
                # Dask and pandas store their row numbers as a column.
                index = {
                    name
                    for name in (table.schema_arrow.pandas_metadata or {}).get("index_columns", ())
                    if isinstance(name, str)
                }
                columns = [name for name in table.schema_arrow.names if name not in index]
                # One row group at a time: a reader of all keeps the bytes of those that it has read.
                for group in range(table.num_row_groups):
                    yield from table.iter_batches(BLOCK_ROWS // 4, row_groups=[group], columns=columns)
            except AtlasError:
                raise
            except (pa.ArrowException, OSError) as error:
                raise SourceError(f"{file} is not a Parquet file that can be read: {error}") from error
