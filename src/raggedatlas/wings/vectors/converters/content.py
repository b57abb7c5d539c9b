"""Content of a geometry file in any format, what a format can represent, and points as tables: CSV, TSV, Parquet."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError, ValuesError
from raggedatlas.model.ids import integer_ids
from raggedatlas.store.location import AnyPath
from raggedatlas.wings.vectors.chunking import find_infinite
from raggedatlas.wings.vectors.geometry import Axis
from raggedatlas.wings.vectors.shapes import (
    KINDS,
    SEQUENTIAL,
    Attribute,
    Shapes,
    counts_to_offsets,
    object_rows,
    take_attributes,
    translate_codes,
)

if TYPE_CHECKING:
    import pyarrow as pa

OBJECT_ID = "object_id"
"""Column that stores object ids in formats without ids."""


@dataclass(frozen=True)
class Content:
    """Content of a geometry file."""

    shapes: Shapes
    metadata: Mapping[str, Any] = field(default_factory=dict)  # of the file, for the root of a store: `crs`, ...
    axes: tuple[Axis, ...] | None = None  # names and units; None if the file has none
    left: tuple[str, ...] = ()  # what was not read, one line each


@dataclass(frozen=True)
class Capabilities:
    """What a format can represent; anything else is reported as a loss, or refused if nothing would remain."""

    kinds: tuple[str, ...] = KINDS  # geometry types that can be written
    dims: tuple[int, ...] = (2, 3, 4)  # numbers of axes that can be written
    links: bool = True  # whether links are written; links implied by the order of vertices need not be
    joined: bool = False  # whether all objects become one, without ids
    vertex: tuple[str, ...] | None = None  # names of the attributes that are written; None writes all
    link: tuple[str, ...] | None = None  # likewise
    object: tuple[str, ...] | None = None  # likewise
    strings: bool = True
    # whether vertex attributes of several channels are a column each, so that they come back as several
    columns: bool = False
    float32: bool = False  # whether positions are written as floats of 32 bits
    # objects one by one, as what their links draw: no links between objects, no objects and vertices without a link
    apart: bool = False

    def check(self, shapes: Shapes, name: str) -> None:
        """Raise `SourceError` for shapes that the format cannot represent."""
        if shapes.kind not in self.kinds:
            raise SourceError(
                f"{name} holds no {shapes.kind}; it holds {', '.join(self.kinds)}. Choose another format."
            )
        if shapes.n_dims not in self.dims:
            raise SourceError(
                f"{name} holds no positions of {shapes.n_dims} axes; expected {' or '.join(map(str, self.dims))}."
            )

    def losses(self, shapes: Shapes) -> Iterator[str]:
        """Yield the losses, one line each."""
        if shapes.kind in SEQUENTIAL and not self.links:
            yield f"links: a {shapes.kind} is read back as points"
        elif shapes.links is not None and not self.links:
            yield f"links: {shapes.n_links} are left out"
        yield from self._left_out(shapes)
        if self.joined and shapes.n_objects > 1:
            yield f"objects: {shapes.n_objects} are joined into one"
        elif self.joined and shapes.ids is not None and (shapes.ids != 0).any():
            yield "objects: their ids are left out; they are numbered from 0"
        for family, kept in (("vertex", self.vertex), ("link", self.link), ("object", self.object)):
            for name, attribute in getattr(shapes, f"{family}_attributes").items():
                if kept is not None and name not in kept:
                    yield f"{family} attribute {name!r} is left out"
                elif is_text(attribute) and not self.strings:
                    yield f"{family} attribute {name!r} is left out: it is text"
                elif family != "object" and attribute.present is not None and not attribute.present.all():
                    yield f"{family} attribute {name!r} has rows without a value, which get one"
        if shapes.groups is not None:
            yield f"groups: {shapes.groups.n_groups} are left out"
        for name, attribute in shapes.vertex_attributes.items() if self.columns else ():
            if attribute.values.ndim == 2:
                yield f"vertex attribute {name!r} becomes {attribute.n_channels} columns"
        yield from _rounding(shapes) if self.float32 else ()

    def _left_out(self, shapes: Shapes) -> Iterator[str]:
        """Yield the objects, vertices and links that have no place."""
        if self.joined or shapes.ids is None:
            return
        if shapes.offsets[-1] < shapes.n_vertices:
            yield f"vertices: {shapes.n_vertices - shapes.offsets[-1]} of no object are left out"
        kept = self.objects_written(shapes)
        if len(kept) < shapes.n_objects:
            yield f"objects: {shapes.n_objects - len(kept)} with nothing to draw are left out"
        edges = shapes.edges()
        links = _links_within(shapes) if self.apart else edges[(edges < shapes.offsets[-1]).all(1)]
        if self.links and len(links) < shapes.n_links:
            yield f"links: {shapes.n_links - len(links)} between objects, or of none, are left out"
        if self.apart and shapes.kind not in (*SEQUENTIAL, "point_cloud"):
            alone = np.isin(object_rows(shapes), kept)
            alone[links] = False
            if alone.any():
                yield f"vertices: {int(alone.sum())} of no link are left out"

    def objects_written(self, shapes: Shapes) -> NDArray[np.int64]:
        """Return the rows of the objects that have something to write."""
        if not self.apart or shapes.kind == "point_cloud":
            return np.flatnonzero(shapes.vertex_counts)
        if shapes.kind in SEQUENTIAL:
            return np.flatnonzero(shapes.vertex_counts > 1)
        return np.unique(object_rows(shapes)[_links_within(shapes)])


def _links_within(shapes: Shapes) -> NDArray[np.int64]:
    """Return the links whose ends are in one object."""
    links = shapes.edges()
    owner = object_rows(shapes)[links]
    return np.asarray(links[(owner == owner[:, :1]).all(1) & (owner[:, 0] < shapes.n_objects)])


def _rounding(shapes: Shapes) -> Iterator[str]:
    """Yield whether positions change as floats of 32 bits; `ValuesError` for those beyond them."""
    with np.errstate(over="ignore"):
        narrow = shapes.positions.astype(np.float32)
    beyond = ~np.isfinite(narrow).all(1) & np.isfinite(shapes.positions).all(1)
    if beyond.any():
        row = int(np.argmax(beyond))
        raise ValuesError(
            f"Vertex {row} is at {shapes.positions[row].tolist()}, beyond floats of 32 bits; scale the positions first."
        )
    if not np.array_equal(narrow.astype(shapes.positions.dtype), shapes.positions):
        yield f"rounded: positions, from {shapes.positions.dtype} to 32 bits"


def is_text(attribute: Attribute) -> bool:
    """Return whether an attribute is text, as strings or as codes of categories."""
    return attribute.values.dtype.kind not in "iufb" or "categories" in attribute.metadata


def is_id(text: str) -> bool:
    """Return whether a text is an id as it is written: decimal digits without leading zeros, below 2**63."""
    return text.isdecimal() and len(text) < 20 and str(int(text)) == text and int(text) < 2**63


def encode_categories(texts: NDArray[Any]) -> Attribute:
    """Return strings as codes of their sorted categories; None becomes -1."""
    there = np.array([text is not None for text in texts], bool)
    categories, codes = np.unique(np.array([str(text) for text in texts[there]], dtype=str), return_inverse=True)
    width: type[np.signedinteger[Any]] = np.int16 if len(categories) < 2**15 else np.int32
    values = np.full(len(texts), -1, width)
    values[there] = codes
    metadata = {"encoding": "dictionary", "categories": categories.tolist(), "ordered": False, "_FillValue": -1}
    return Attribute(values, metadata=metadata)


def decode_categories(attribute: Attribute) -> NDArray[Any]:
    """Return the values of an attribute; codes of categories become their strings, or None."""
    if "categories" not in attribute.metadata:
        return attribute.values
    return translate_codes(attribute.values, attribute.metadata["categories"], None, object)


@contextmanager
def read_errors(path: AnyPath, what: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise what a library raises for a damaged file (by default any exception) as `SourceError`."""
    caught = errors or (Exception,)
    try:
        yield
    except SourceError:
        raise
    except caught as error:
        text = f"{path} is no {what} that can be read: {type(error).__name__}: {error}."
        raise SourceError(text) from None


def group_vertices(shapes: Shapes, owner: NDArray[Any], what: str) -> Shapes:
    """Group vertices by object; the order within each object is kept, and links keep theirs.

    `owner`, (N,), has the ids (whole numbers, not negative) or names of the objects, and `what` names the file in
    messages. Objects are in ascending order; names become the object attribute ``name``. Positions that are not finite
    and links to missing vertices are refused as in `check_content`.
    """
    if owner.dtype.kind == "f":
        owner = integer_ids(owner, f"{what}: the ids of objects").fill_null(-1).to_numpy()
    if owner.dtype.kind not in "iuUTO" or (owner.dtype.kind == "i" and owner.size and owner.min() < 0):
        raise SourceError(
            f"{what}: {OBJECT_ID} of vertices are {owner.dtype}, from {owner.min()}; expected whole numbers from 0."
        )
    names, codes = np.unique(owner, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    numbers = names.dtype.kind in "iu"
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    check_content(shapes, what)
    return replace(
        shapes,
        positions=shapes.positions[order],
        offsets=counts_to_offsets(np.bincount(codes, minlength=len(names))),
        ids=names if numbers else np.arange(len(names)),
        links=None if shapes.links is None else place[shapes.links],
        vertex_attributes=take_attributes(shapes.vertex_attributes, order),
        object_attributes={} if numbers else {"name": Attribute(names)},
    )


def check_content(shapes: Shapes, what: str) -> None:
    """Raise `ValuesError` for positions that are not finite, and `SourceError` for links to vertices that do not exist."""
    row = find_infinite(shapes.positions)[0]
    if row is not None:
        at = int(object_rows(shapes)[row])
        owner = "" if shapes.ids is None or at == shapes.n_objects else f" of object {shapes.ids[at]}"
        raise ValuesError(
            f"{what}: vertex {row}{owner} is at {shapes.positions[row].tolist()}; expected finite numbers. "
            "Correct or remove this vertex."
        )
    if shapes.links is None or not shapes.n_links:
        return
    out = (shapes.links < 0) | (shapes.links >= shapes.n_vertices)
    if out.any():
        row = int(np.argmax(out.any(1)))
        raise SourceError(
            f"{what}: link {row} has the ends {shapes.links[row].tolist()}; expected rows of the {shapes.n_vertices} "
            "vertices, counted from 0."
        )


# MERSCOPE also has `x` and `y`, which are positions within a field of view.
AXIS_NAMES = (
    ("x_location", "y_location", "z_location"),
    ("global_x", "global_y", "global_z"),
    ("x_global_px", "y_global_px", "z_global_px"),
    ("x", "y", "z"),
)
"""Names of the columns of positions that are looked for, in turn, whatever their case; the third may be missing."""

TABLE_HOLDING = Capabilities(links=False, link=(), object=(), columns=True)


def table_losses(content: Content) -> Iterator[str]:
    """Yield axes that are not found by their names, and attributes whose names have another meaning in a table."""
    names, written = axis_names(content), _with_columns(content)
    if list(names) != find_axes(names):
        yield f"axes: {', '.join(names)} are not found by their names; read them by axes="
    for name in content.shapes.vertex_attributes:
        if name not in written:
            yield f"vertex attribute {name!r} is left out: the table has another column of this name"


def csv_losses(content: Content) -> Iterator[str]:
    """Yield what `table_losses` does, and texts that are read back as something else, as text files have no types."""
    yield from table_losses(content)
    for name, attribute in content.shapes.vertex_attributes.items():
        kind, gaps = _kind_in_text(attribute)
        if gaps and kind != "string":
            yield f"vertex attribute {name!r} is left out: it would be read back as {kind}, and has rows without a text"
        elif kind != "string":
            yield f"vertex attribute {name!r} is text that is read back as {kind}"
        elif gaps:
            yield f"vertex attribute {name!r} has rows without a text, which get an empty one"


def _kind_in_text(attribute: Attribute) -> tuple[str, bool]:
    """Return the type that texts are read back as from a CSV file, and whether some are missing; "string" for numbers, too."""
    import pyarrow as pa
    import pyarrow.csv as pacsv

    if not is_text(attribute):
        return "string", False
    texts = pa.array(decode_categories(attribute).astype(object)).cast(pa.string())
    file = pa.BufferOutputStream()
    pacsv.write_csv(pa.table({"text": texts.unique().drop_null()}), file)
    return str(pacsv.read_csv(pa.BufferReader(file.getvalue())).column(0).type), bool(texts.null_count)


def _with_columns(content: Content) -> dict[str, Attribute]:
    """Return the vertex attributes whose columns have names of their own: not those of positions, ids, indexes or each other."""
    names = tuple(name.lower() for name in axis_names(content))
    attributes = content.shapes.vertex_attributes
    others = {key.lower() for name, attribute in attributes.items() for key in channel_names(name, attribute)}
    taken = {OBJECT_ID, *names}
    # Columns that would be found as positions before the own ones, or as their third axis.
    rank = next((i for i, usual in enumerate(AXIS_NAMES) if names == usual[: len(names)]), -1)
    for usual in AXIS_NAMES[: rank + 1]:
        if {*usual[:2]} <= {*others, *names}:
            taken |= {*usual}
    used, result = set[str](), {}
    for name, attribute in attributes.items():
        columns = channel_names(name, attribute)
        if not any(key.lower() in taken or key in used or key.startswith("__") for key in columns):
            result[name] = attribute
            used |= {*columns}
    return result


def read_csv(path: Path, *, axes: Sequence[str] | None = None, objects: str | None = None) -> Content:
    """Read a text table of points with a header; see `table_content`."""
    import pyarrow as pa
    import pyarrow.csv as pacsv

    with read_errors(path, "table with rows of one length", pa.ArrowInvalid):
        table = pacsv.read_csv(path, parse_options=pacsv.ParseOptions(delimiter=_delimiter(path)))
    return table_content(table, str(path), axes=axes, objects=objects)


def read_parquet(path: Path, *, axes: Sequence[str] | None = None, objects: str | None = None) -> Content:
    """Read a Parquet file of points; see `table_content`."""
    import pyarrow as pa
    import pyarrow.parquet as papq

    with read_errors(path, "Parquet file", pa.ArrowInvalid, OSError):
        table = papq.read_table(path)
    return table_content(table, str(path), axes=axes, objects=objects)


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def table_content(
    table: "pa.Table", what: str, *, axes: Sequence[str] | None = None, objects: str | None = None
) -> Content:
    """Return the points of an Arrow table.

    `axes` are the columns of positions; None: those of `AXIS_NAMES`. `objects` is the column with the object of each
    point; None: ``object_id``, if there is one. Raises `SourceError` if there are no such columns, or a number is
    missing.
    """
    repeated = sorted({name for name in table.column_names if table.column_names.count(name) > 1})
    if repeated:
        raise SourceError(
            f"{what} has several columns {', '.join(map(repr, repeated))}; expected different names. Rename them."
        )
    missing = [name for name in axes or () if name not in table.column_names]
    if missing:
        raise SourceError(f"{what} has no column {missing[0]!r}; it has {', '.join(table.column_names)}.")
    names = find_axes(table.column_names) if axes is None else list(axes)
    if axes is None and not names:
        raise SourceError(
            f"{what} has no columns x and y; it has {', '.join(table.column_names)}. Name those of the positions: axes=."
        )
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
    shapes = Shapes("point_cloud", positions, vertex_attributes=columns)
    if owner is not None:
        shapes = group_vertices(shapes, _owners(table, owner, what), what)
    return Content(shapes, axes=made_axes, left=left)


def write_csv(content: Content, path: Path) -> None:
    """Write what `vertex_table` returns as text, without texts that would be read back as numbers and have gaps."""
    import pyarrow.csv as pacsv

    kinds = {name: _kind_in_text(attribute) for name, attribute in content.shapes.vertex_attributes.items()}
    left = [name for name, (kind, gaps) in kinds.items() if gaps and kind != "string"]
    kept = {name: a for name, a in content.shapes.vertex_attributes.items() if name not in left}
    table = vertex_table(replace(content, shapes=replace(content.shapes, vertex_attributes=kept)))
    pacsv.write_csv(table, path, pacsv.WriteOptions(delimiter=_delimiter(path)))


def write_parquet(content: Content, path: Path) -> None:
    """Write what `vertex_table` returns as a Parquet file."""
    import pyarrow.parquet as papq

    papq.write_table(vertex_table(content), path, compression="zstd")


def vertex_table(content: Content) -> "pa.Table":
    """Return the vertices as an Arrow table: positions, ``object_id`` where there are objects, and vertex attributes.

    Attributes of several channels become a column each.
    """
    import pyarrow as pa

    shapes = content.shapes
    columns = dict(zip(axis_names(content), shapes.positions.T, strict=False))
    if shapes.ids is not None:
        columns[OBJECT_ID] = shapes.ids[object_rows(shapes)]
    arrays = {name: pa.array(np.ascontiguousarray(column)) for name, column in columns.items()}
    for name, attribute in _with_columns(content).items():
        names = attribute.metadata.get("categories")
        if names is not None and attribute.values.ndim == 1 and all(isinstance(text, str) for text in names):
            codes = attribute.values.astype(np.int64)
            none = (codes < 0) | (codes >= len(names))
            # Codes that mean no text may be out of range, also for int32; the mask hides their 0.
            places = pa.array(np.where(none, 0, codes).astype(np.int32), mask=none)
            ordered = bool(attribute.metadata.get("ordered"))
            arrays[name] = pa.DictionaryArray.from_arrays(places, pa.array(names, pa.string()), ordered=ordered)
        else:
            arrays |= {key: pa.array(np.ascontiguousarray(column)) for key, column in split_channels(name, attribute)}
    return pa.table(arrays)


def split_channels(name: str, attribute: Attribute) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield an attribute's columns, texts instead of codes."""
    if attribute.values.ndim == 1:
        yield name, decode_categories(attribute)
        return
    for k, key in enumerate(channel_names(name, attribute)):
        yield key, attribute.values[:, k]


def channel_names(name: str, attribute: Attribute) -> list[str]:
    """Return the names of an attribute's columns."""
    if attribute.values.ndim == 1:
        return [name]
    return [f"{name}.{channel}" for channel in attribute.channels or range(attribute.n_channels)]


def axis_names(content: Content) -> tuple[str, ...]:
    """Return the names of the axes."""
    n_dims = content.shapes.n_dims
    return tuple(axis.name for axis in content.axes) if content.axes else tuple("xyzw"[:n_dims])


def read_text(path: Path) -> str:
    """Return a text file's content; raise `SourceError` if it is not UTF-8 text."""
    try:
        # Without a byte order mark, which would become part of the first name or number.
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} is no text in UTF-8: byte {error.start} is {error.object[error.start]:#x}."
        ) from None


def find_axes(names: Sequence[str]) -> list[str]:
    """Return the columns of positions among the names of all columns; none if they have no usual names."""
    # Reversed, so that the first of names that differ only in case is taken.
    lower = {name.lower(): name for name in reversed(names)}
    for x, y, z in AXIS_NAMES:
        if x in lower and y in lower:
            return [lower[name] for name in (x, y, z) if name in lower]
    return []


def _numbers(table: "pa.Table", name: str, what: str) -> NDArray[Any]:
    import pyarrow as pa

    column = table.column(name)
    if column.null_count:
        raise SourceError(f"{what}: column {name!r} has no number in row {_first_null(column)}; expected one in each.")
    # A text file without rows has no types.
    if not len(column):
        return np.zeros(0)
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
    if not len(column):
        return np.zeros(0, np.int64)
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        ids = np.asarray(column.to_numpy())
        if ids.dtype.kind == "f":
            ids = integer_ids(ids, f"{what}: the values of {name!r}").fill_null(-1).to_numpy()
        if len(ids) and ids.min() < 0:
            raise SourceError(
                f"{what}: column {name!r} has the id {ids.min()} in row {int(np.argmin(ids))}; expected ids from 0. "
                "Points without an object: leave them out, or read all without objects."
            )
        return ids
    return np.array(column.cast(pa.string()).to_pylist(), dtype=str)


def _attribute(table: "pa.Table", name: str, what: str) -> Attribute:
    """Return a column as numbers, or as codes of categories."""
    import pyarrow as pa

    column = table.column(name)
    kind = column.type
    if pa.types.is_floating(kind) or pa.types.is_null(kind):
        return Attribute(np.asarray(column.cast(pa.float64() if pa.types.is_null(kind) else kind).to_numpy()))
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        if column.null_count:
            raise SourceError(
                f"{what}: column {name!r} has no value in row {_first_null(column)}, and integers have no NaN. "
                "Fill the column or make it a column of floats."
            )
        return Attribute(np.asarray(column.to_numpy()))
    if pa.types.is_dictionary(kind):
        # Chunks, e.g. of different row groups, may have different dictionaries.
        combined = column.unify_dictionaries().combine_chunks()
        names = combined.dictionary.to_pylist()
        is_text_kind = pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type)
        # A dictionary of texts stays as it is, order and unused categories included: a gene without a transcript was
        # measured too. Others are left to `encode_categories`, which makes distinct texts of them.
        if is_text_kind and None not in names and len(set(names)) == len(names):
            width = np.int16 if len(names) < 2**15 else np.int32
            # Wide first: indices may be unsigned, which cannot hold -1.
            codes = np.asarray(combined.indices.cast(pa.int64()).fill_null(-1)).astype(width)
            metadata = {"encoding": "dictionary", "categories": names, "ordered": kind.ordered, "_FillValue": -1}
            return Attribute(codes, metadata=metadata)
        column = column.cast(kind.value_type)
    return encode_categories(np.array(column.cast(pa.string()).to_pylist(), object))


def _first_null(column: Any) -> int:  # noqa: ANN401  (an Arrow column)
    return int(np.argmax(column.is_null().to_numpy()))
