"""Points as tables: CSV, TSV, Parquet, and XYZ (numbers between spaces)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.content import (
    OBJECT_ID,
    Capabilities,
    Content,
    decode_categories,
    encode_categories,
    group_vertices,
    is_text,
)
from raggedatlas.vectors.geometry import Axis
from raggedatlas.vectors.shapes import Attribute, Shapes, object_rows

if TYPE_CHECKING:
    import pyarrow as pa

AXIS_NAMES = (
    ("x", "y", "z"),
    ("x_location", "y_location", "z_location"),
    ("global_x", "global_y", "global_z"),
    ("x_global_px", "y_global_px", "z_global_px"),
)
"""Names of the columns of positions that are looked for, in turn, whatever their case; the third may be missing."""

DELIMITERS = {".csv": ",", ".tsv": "\t"}

TABLE_HOLDING = Capabilities(links=False, object=())
XYZ_HOLDING = Capabilities(kinds=("point_cloud",), links=False, objects="one", object=(), strings=False)


def read_table(path: Path, *, axes: Sequence[str] | None = None, objects: str | None = None) -> Content:
    """Read a table of points: CSV or TSV with a header, or Parquet.

    Parameters
    ----------
    path : Path
        Ends in ``.csv``, ``.tsv`` or ``.parquet``.
    axes : sequence of str or None
        Columns of positions; None: those of `AXIS_NAMES`.
    objects : str or None
        Column that says whose each point is; None: ``object_id``, if there is one.

    Raises
    ------
    SourceError
        If there are no such columns, rows differ in length, or a number is missing; with the row.
    """
    table = _parquet(path) if path.suffix == ".parquet" else _delimited(path)
    return table_content(table, str(path), axes=axes, objects=objects)


def table_content(
    table: "pa.Table", what: str, *, axes: Sequence[str] | None = None, objects: str | None = None
) -> Content:
    """Return the points of an Arrow table; see `read_table`."""
    names = _axis_columns(table.column_names, axes, what)
    positions = np.stack([_numbers(table, name, what) for name in names], 1)
    owner = objects or (OBJECT_ID if OBJECT_ID in table.column_names else None)
    if owner is not None and owner not in table.column_names:
        raise SourceError(f"{what} has no column {owner!r} of objects; it has {', '.join(table.column_names)}.")
    # Names with two leading underscores are indexes of dask or pandas, e.g. `__index_level_0__`.
    columns = {
        name: _attribute(table, name, what)
        for name in table.column_names
        if name not in names and name != owner and not name.startswith("__")
    }
    left = tuple(f"column {name!r} is left out: it is an index" for name in table.column_names if name.startswith("__"))
    made_axes = tuple(Axis(name) for name in "xyzw"[: len(names)])
    if owner is None:
        return Content(Shapes("point_cloud", positions, vertex_attributes=columns), axes=made_axes, left=left)
    whose = _owners(table, owner, what)
    return Content(group_vertices("point_cloud", positions, whose, columns), axes=made_axes, left=left)


def write_table(content: Content, path: Path) -> None:
    """Write the vertices as a table: positions, ``object_id`` where there are objects, and all vertex attributes."""
    import pyarrow.csv as pacsv
    import pyarrow.parquet as papq

    table = vertex_table(content)
    if path.suffix == ".parquet":
        papq.write_table(table, path, compression="zstd")
    else:
        pacsv.write_csv(table, path, pacsv.WriteOptions(delimiter=DELIMITERS[path.suffix]))


def vertex_table(content: Content) -> "pa.Table":
    """Return the vertices as an Arrow table; attributes of several channels become a column each."""
    import pyarrow as pa

    shapes = content.shapes
    columns = dict(zip(axis_names(content), shapes.positions.T, strict=False))
    if shapes.ids is not None:
        columns[OBJECT_ID] = shapes.ids[object_rows(shapes)]
    made = {name: pa.array(np.ascontiguousarray(column)) for name, column in columns.items()}
    for name, attribute in shapes.vertex_attributes.items():
        names = attribute.metadata.get("categories")
        if names is not None and attribute.values.ndim == 1 and all(isinstance(text, str) for text in names):
            made[name] = _dictionary(attribute)
        else:
            made |= {key: pa.array(np.ascontiguousarray(column)) for key, column in split_channels(name, attribute)}
    return pa.table(made)


def _dictionary(attribute: Attribute) -> "pa.DictionaryArray":
    """Return codes of categories as a dictionary that keeps all of them in their order; codes of none are null."""
    import pyarrow as pa

    names, codes = attribute.metadata["categories"], attribute.values.astype(np.int64)
    none = (codes < 0) | (codes >= len(names))
    # Codes that mean no text may be out of range, also for int32; the mask hides their 0.
    places = pa.array(np.where(none, 0, codes).astype(np.int32), mask=none)
    ordered = bool(attribute.metadata.get("ordered"))
    return pa.DictionaryArray.from_arrays(places, pa.array(names, pa.string()), ordered=ordered)


def split_channels(name: str, attribute: Attribute) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield an attribute's columns, texts in the place of codes."""
    if attribute.values.ndim == 1:
        yield name, decode_categories(attribute)
        return
    for k in range(attribute.n_channels):
        yield f"{name}.{attribute.channels[k] if attribute.channels else k}", attribute.values[:, k]


def channel_losses(shapes: Shapes) -> Iterator[str]:
    """Yield which attributes are cut into columns and would come back as several."""
    for name, attribute in shapes.vertex_attributes.items():
        if attribute.values.ndim == 2:
            yield f"vertex attribute {name!r} becomes {attribute.n_channels} columns"


def axis_names(content: Content) -> tuple[str, ...]:
    """Return the names of the axes."""
    n_dims = content.shapes.n_dims
    return tuple(axis.name for axis in content.axes) if content.axes else tuple("xyzw"[:n_dims])


def read_xyz(path: Path, *, columns: Sequence[str] | None = None) -> Content:
    """Read points as lines of numbers between spaces or commas; names may stand in a first line after ``#`` or ``//``.

    Parameters
    ----------
    path : Path
        A text file.
    columns : sequence of str or None
        Names of all columns; None: those of the file, else ``x y z`` and ``column_4``, ...

    Raises
    ------
    SourceError
        If lines differ in length or hold something else; with the line.
    """
    lines = read_text(path).splitlines()
    header = next((line.lstrip("#/ ").split() for line in lines if line.startswith(("#", "//"))), [])
    rows = [(n, line.replace(",", " ").split()) for n, line in enumerate(lines, 1)]
    rows = [(n, row) for n, row in rows if row and not row[0].startswith(("#", "//"))]
    values = number_rows(rows, path)
    width = values.shape[1] if len(values) else 3
    if width < 2:
        raise SourceError(f"{path} has lines of {width} number; expected at least 2 coordinates.")
    standard = ["x", "y", "z"][:width] + [f"column_{k + 1}" for k in range(3, width)]
    names = list(columns or (header if len(header) == width else standard))
    if len(names) != width:
        raise SourceError(f"{path} has lines of {width} numbers, and {len(names)} names are given: {', '.join(names)}.")
    # Named axes may be columns in any order; without these names the first columns are the axes.
    places = [names.index(name) for name in ("x", "y", "z") if name in names] or list(range(min(width, 3)))
    attributes = {name: Attribute(values[:, k]) for k, name in enumerate(names) if k not in places}
    return Content(Shapes("point_cloud", values[:, places], vertex_attributes=attributes))


def write_xyz(content: Content, path: Path) -> None:
    """Write the positions and numbers of a point cloud as lines, under a line with their names."""
    columns = dict(zip(axis_names(content), content.shapes.positions.T, strict=False))
    for name, attribute in content.shapes.vertex_attributes.items():
        if not is_text(attribute):
            columns |= dict(split_channels(name.replace(" ", "_"), attribute))
    texts = [[repr(value) for value in column.tolist()] for column in map(shortest, columns.values())]
    with path.open("w", encoding="utf-8") as file:
        file.write(f"# {' '.join(columns)}\n")
        file.writelines(" ".join(row) + "\n" for row in zip(*texts, strict=True))


def shortest(column: NDArray[Any]) -> NDArray[Any]:
    """Return narrow floats as the doubles with the shortest text that means the same narrow float."""
    if column.dtype.kind == "f" and column.dtype.itemsize < 8:
        # Converted directly, float32 0.1 becomes the double 0.10000000149011612.
        return column.astype(str).astype(np.float64)
    return column


def read_text(path: Path) -> str:
    """Return a text file's content.

    Raises
    ------
    SourceError
        If it is no UTF-8 text.
    """
    try:
        # Without a byte order mark, which would become part of the first name or number.
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} is no text in UTF-8: byte {error.start} is {error.object[error.start]:#x}."
        ) from None


def number_rows(rows: Sequence[tuple[int, Sequence[str]]], path: Path) -> NDArray[np.float64]:
    """Return lines of texts as numbers, refusing lines of different lengths and what is no number, by line."""
    if not rows:
        return np.zeros((0, 3))
    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise SourceError(f"{path}, line {line} has {len(row)} values; expected {width} as in line {rows[0][0]}.")
    try:
        return np.array([row for _, row in rows], dtype=str).astype(np.float64)
    except ValueError:
        for line, row in rows:
            for text in row:
                if not _is_number(text):
                    raise SourceError(f"{path}, line {line} has {text!r}; expected a number.") from None
        raise


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _delimited(path: Path) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.csv as pacsv

    options = pacsv.ParseOptions(delimiter=DELIMITERS[path.suffix])
    try:
        return pacsv.read_csv(path, parse_options=options)
    except pa.ArrowInvalid as error:
        raise SourceError(f"{path} is no table with rows of one length: {error}.") from None


def _parquet(path: Path) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.parquet as papq

    try:
        return papq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise SourceError(f"{path} is no Parquet file that can be read: {error}.") from None


def _axis_columns(names: Sequence[str], asked: Sequence[str] | None, what: str) -> list[str]:
    if asked is not None:
        missing = [name for name in asked if name not in names]
        if missing:
            raise SourceError(f"{what} has no column {missing[0]!r}; it has {', '.join(names)}.")
        return list(asked)
    # Reversed, so that the first of names that differ only in case is taken.
    lower = {name.lower(): name for name in reversed(names)}
    for x, y, z in AXIS_NAMES:
        if x in lower and y in lower:
            return [lower[name] for name in (x, y, z) if name in lower]
    raise SourceError(f"{what} has no columns x and y; it has {', '.join(names)}. Name those of the positions: axes=.")


def _numbers(table: "pa.Table", name: str, what: str) -> NDArray[Any]:
    import pyarrow as pa

    column = table.column(name)
    if column.null_count:
        raise SourceError(f"{what}: column {name!r} has no number in row {_first_null(column)}; expected one in each.")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise SourceError(f"{what}: column {name!r} is {column.type}; expected numbers.")
    return np.asarray(column.to_numpy())


def _owners(table: "pa.Table", name: str, what: str) -> NDArray[Any]:
    import pyarrow as pa

    column = table.column(name)
    if column.null_count:
        raise SourceError(
            f"{what}: column {name!r} names no object in row {_first_null(column)}; expected one in each."
        )
    if pa.types.is_integer(column.type):
        found = np.asarray(column.to_numpy())
        if len(found) and found.min() < 0:
            raise SourceError(
                f"{what}: column {name!r} has the id {found.min()} in row {int(np.argmin(found))}; expected ids from 0. "
                "Points without an object: leave them out, or read all without objects."
            )
        return found
    return np.array(column.cast(pa.string()).to_pylist(), dtype=str)


def _attribute(table: "pa.Table", name: str, what: str) -> Attribute:
    """Return a column as numbers, or as codes of categories."""
    import pyarrow as pa

    column = table.column(name)
    kind = column.type
    if pa.types.is_floating(kind):
        return Attribute(np.asarray(column.to_numpy()))
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        if column.null_count:
            raise SourceError(
                f"{what}: column {name!r} has no value in row {_first_null(column)}, and integers have no NaN. "
                "Fill the column or make it a column of floats."
            )
        return Attribute(np.asarray(column.to_numpy()))
    if pa.types.is_dictionary(kind):
        found = _categories(column)
        if found is not None:
            return found
        column = column.cast(kind.value_type)
    return encode_categories(np.array(column.cast(pa.string()).to_pylist(), object))


def _categories(column: "pa.ChunkedArray") -> Attribute | None:
    """Return a dictionary of texts as it is, order and unused categories included: a gene without a transcript was measured too."""
    import pyarrow as pa

    # Chunks, e.g. of different row groups, may have different dictionaries.
    whole = column.unify_dictionaries().combine_chunks()
    names = whole.dictionary.to_pylist()
    if not (pa.types.is_string(column.type.value_type) or pa.types.is_large_string(column.type.value_type)):
        return None
    # Left to `encode_categories`, which makes distinct texts of them.
    if None in names or len(set(names)) < len(names):
        return None
    width = np.int16 if len(names) < 2**15 else np.int32
    # Wide first: indices may be unsigned, which cannot hold -1.
    codes = np.asarray(whole.indices.cast(pa.int64()).fill_null(-1)).astype(width)
    metadata = {"encoding": "dictionary", "categories": names, "ordered": column.type.ordered, "_FillValue": -1}
    return Attribute(codes, metadata=metadata)


def _first_null(column: Any) -> int:  # noqa: ANN401  (an Arrow column)
    return int(np.argmax(column.is_null().to_numpy()))
