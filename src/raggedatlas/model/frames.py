"""pandas frames as Arrow tables and back, with what Arrow cannot say kept as field metadata."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError, CorruptError, SchemaError
from raggedatlas.model.assets import annotation_columns, result_columns
from raggedatlas.model.ids import is_unicode
from raggedatlas.model.records import read_json
from raggedatlas.model.spaces import pointer_columns

if TYPE_CHECKING:
    import pandas as pd

INDEX = "_index"
"""Name of the first column of a table made from a frame: its index."""

FACTS_KEY = b"raggedatlas.column"
"""Arrow field metadata key that holds a column's facts as JSON."""

_NULLABLE = {
    "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float32", "Float64", "boolean",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """What a column was in its file.

    `kind` is ``"categorical"``, ``"string"`` (the usual text of the machine's pandas), ``"object"`` or
    ``"string[...]"`` for other text, a NumPy dtype such as ``"int32"``, or a pandas nullable dtype such as ``"Int64"``.
    """

    name: str  # its original name, for instance "percent.mt"
    kind: str
    # In order, unused ones included; None for other kinds.
    categories: tuple[Any, ...] | None = None
    ordered: bool = False  # whether the order of the categories means something
    category_kind: str = "string"  # NumPy dtype of the categories, for text as in `kind`
    # Whether it has no value, so that its type is that of the first values that come. Only cell columns say so.
    empty: bool = False

    def __post_init__(self) -> None:
        """Refuse categories of text that are none, which filters and frames would stumble over."""
        if self.categories and is_text(self.category_kind):
            odd = [value for value in self.categories if not isinstance(value, str)]
            if odd:
                raise SchemaError(f"Among the categories of {self.name!r}, which are text, is {odd[0]!r}.")

    def to_metadata(self) -> dict[bytes, bytes]:
        """Write as Arrow field metadata."""
        return {FACTS_KEY: json.dumps(asdict(self), sort_keys=True).encode()}


def facts_of(field: pa.Field) -> ColumnFacts | None:
    """Read the facts of a column, or None if it carries none.

    Raises `CorruptError` if they do not parse.
    """
    text = (field.metadata or {}).get(FACTS_KEY)
    if text is None:
        return None
    return read_json(ColumnFacts, text.decode(errors="replace"), "its schema", field.name, FACTS_KEY.decode())


def frame_to_arrow(frame: "pd.DataFrame") -> pa.Table:
    """Convert a frame to a table whose first column `_index` is its index.

    The columns keep their order and each gets its `ColumnFacts`; `arrow_to_frame` restores the frame.
    """
    names = checked_names(frame.columns)
    import pandas as pd

    arrays, fields = [], []
    # Without its dtype, pandas 3 would take objects that are all text for text of its own.
    index = pd.Series(frame.index.array, dtype=frame.index.dtype)
    index_name = "" if frame.index.name is None else str(frame.index.name)
    for name, series in [(INDEX, index), *((n, frame.iloc[:, i]) for i, n in enumerate(names))]:
        array, facts = _series_to_arrow(name, series)
        facts = replace(facts, name=index_name) if name == INDEX else facts
        arrays.append(array)
        fields.append(pa.field(name, array.type, metadata=facts.to_metadata()))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def checked_names(columns: Iterable[Any]) -> list[str]:
    """Return the names of columns if a table can have them."""
    names: list[Any] = list(columns)
    odd = [name for name in names if not isinstance(name, str)]
    if odd:
        raise SchemaError(
            f"The column name {odd[0]!r} is no text, which no file can hold; rename it, e.g. to {str(odd[0])!r}."
        )
    broken = [name for name in names if not is_unicode(name)]
    if broken:
        raise SchemaError(f"The column name {broken[0]!a} is not Unicode; rename it.")
    repeated = sorted({name for name in names if names.count(name) > 1} | {n for n in names if n == INDEX})
    if repeated:
        raise SchemaError(f"The columns {repeated} appear twice or bear the reserved name {INDEX!r}; rename them.")
    return names


def arrow_to_frame(table: pa.Table) -> "pd.DataFrame":
    """Convert a table of `frame_to_arrow` back to the original frame."""
    import pandas as pd

    columns = {}
    index: Any = None
    for i, field in enumerate(table.schema):
        facts = facts_of(field) or ColumnFacts(field.name, "")
        series = arrow_to_series(table.column(i), facts)
        if field.name == INDEX:
            index = pd.Index(series.array, dtype=series.dtype, name=facts.name or None)
        else:
            # One index for all columns, as `pd.DataFrame` aligns them by theirs; the real one is set at the end.
            columns[facts.name or field.name] = series.set_axis(range(table.num_rows))
    frame = pd.DataFrame(columns, index=pd.RangeIndex(table.num_rows))
    frame.index = pd.RangeIndex(table.num_rows).astype(str) if index is None else index
    return frame


def arrow_to_series(column: pa.ChunkedArray, facts: ColumnFacts) -> "pd.Series[Any]":
    """Convert one column to the pandas dtype named by its facts.

    Nulls are missing values. A NumPy integer or boolean kind that has nulls here becomes its nullable pandas dtype.
    """
    import pandas as pd

    try:
        if facts.kind == "categorical":
            return _categorical(column, facts)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            values = column.to_numpy(zero_copy_only=False)
            text: pd.Series[Any] = pd.Series(values, dtype=text_dtype_of(facts.kind))
            return text
        if facts.kind in _NULLABLE:
            return pd.Series(_nullable(column, facts.kind))
        # pandas would turn integers with nulls into float64, which is exact only up to 2**53.
        if column.null_count and (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
            nullable = (facts.kind or str(column.type)).replace("uint", "UInt").replace("int", "Int")
            return pd.Series(_nullable(column, "boolean" if nullable == "bool" else nullable))
        series: pd.Series[Any] = column.to_pandas()
        kind: Any = facts.kind
        if kind and kind != str(series.dtype):
            series = series.astype(kind)
        return series
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, pa.ArrowException) as error:
        if isinstance(error, AtlasError):
            raise
        reason = str(error).split("\n", 1)[0]
        raise CorruptError(
            f"The column {facts.name!r} holds {column.type} and is recorded as {facts.kind!r}, which does not fit ({reason}); run "
            "validate('deep') and restore the atlas from a copy."
        ) from error


S = TypeVar("S")


def remove_unused_categories(values: S) -> S:
    """Return a categorical Series with only the categories that occur, in their order; anything else as it is."""
    if not hasattr(values, "cat"):
        return values
    series: Any = values
    codes, used = used_codes(series.cat.codes.to_numpy(), len(series.cat.categories))
    # pandas' own method sorts the codes of all rows.
    made = type(series.array).from_codes(codes, series.cat.categories[used], series.cat.ordered)
    found: S = type(series)(made, index=series.index, name=series.name, copy=False)
    return found


def used_codes(codes: NDArray[Any], n: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return codes that count only the categories that occur, -1 where a value is missing, and which of the n these are."""
    used = np.zeros(n + 1, bool)
    used[codes] = True
    # The entry behind the last is that of -1.
    numbers = np.append(np.cumsum(used[:-1]) - 1, -1)
    return numbers[codes], used[:-1]


def nan_to_null(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column in which NaN is null: a missing number is one thing wherever cells are compared, sorted or grouped."""
    import pyarrow.compute as pc

    if not pa.types.is_floating(column.type):
        return column
    return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)


def is_text(kind: str) -> bool:
    """Return whether a kind of column or of categories is text."""
    return kind == "object" or kind.startswith("string")


def _text_dtype() -> Any:  # noqa: ANN401  (a dtype object or a name)
    import pandas as pd

    return object if int(pd.__version__.split(".")[0]) < 3 else "str"


def text_dtype_of(kind: str) -> Any:  # noqa: ANN401  (a dtype object or a name)
    """Return the pandas dtype of a kind of text; ``"string[pandas]"`` is the nullable one of the machine's pandas."""
    if kind == "object":
        return object
    return kind.removesuffix("[pandas]") if kind.startswith("string[") else _text_dtype()


def _text_kind(dtype: Any) -> str:  # noqa: ANN401  (a pandas dtype)
    import pandas as pd

    if isinstance(dtype, pd.StringDtype) and dtype.na_value is pd.NA:
        return "string[pandas]" if dtype == pd.StringDtype() else f"string[{dtype.storage}]"
    usual = dtype == _text_dtype() or isinstance(dtype, pd.StringDtype)
    return "string" if usual else "object"


def _nullable(column: pa.ChunkedArray, kind: str) -> Any:  # noqa: ANN401  (a pandas extension array)
    import pandas as pd

    mask = column.is_null().to_numpy()
    fill = False if kind == "boolean" else 0
    # `to_numpy` would return floats or objects for a column with nulls; `mask` marks them again.
    values = column.fill_null(pa.scalar(fill, column.type) if kind == "boolean" else pa.scalar(fill).cast(column.type))
    plain = values.to_numpy().astype("bool" if kind == "boolean" else kind.lower())
    arrays: Any = pd.arrays
    if kind == "boolean":
        return arrays.BooleanArray(plain, mask)
    maker = arrays.FloatingArray if kind.startswith("Float") else arrays.IntegerArray
    return maker(plain, mask)


def _categorical(column: pa.ChunkedArray, facts: ColumnFacts) -> "pd.Series[Any]":
    import pandas as pd

    known = facts.categories or ()
    if is_text(facts.category_kind):
        categories = pd.Index(np.array(known, dtype=object), dtype=text_dtype_of(facts.category_kind))
        value_set = pa.array(known, pa.string())
        column = column.cast(pa.string())
    else:
        categories = pd.Index(np.array(known, dtype=facts.category_kind))
        value_set = pa.array(categories.to_numpy()).cast(column.type)
    import pyarrow.compute as pc

    codes = pc.index_in(column, value_set=value_set)
    # -1 is pandas' code of a missing value; values that are no category get it as well.
    plain = codes.fill_null(-1).to_numpy()
    return pd.Series(pd.Categorical.from_codes(plain, categories=categories, ordered=facts.ordered))


def _series_to_arrow(name: str, series: "pd.Series[Any]") -> tuple[pa.Array, ColumnFacts]:
    import pandas as pd

    dtype = series.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return _categorical_to_arrow(name, series)
    if isinstance(dtype, pd.StringDtype) or dtype.kind == "O":
        return _objects_to_arrow(name, series)
    kind = str(dtype)
    if kind in _NULLABLE:
        mask = series.isna().to_numpy()
        # `to_numpy` would return objects where values are missing; `_data` has the numbers under the mask.
        plain = series.array._data
        return pa.array(plain, mask=mask), ColumnFacts(name, kind)
    if isinstance(dtype, pd.DatetimeTZDtype):
        naive = series.dt.tz_convert("UTC").dt.tz_localize(None)
        instants = pa.array(naive.to_numpy(), from_pandas=True)
        return instants.cast(pa.timestamp(instants.type.unit, "UTC")), ColumnFacts(name, kind)
    if isinstance(dtype, np.dtype) and dtype.kind in "biufmM":
        # NaT becomes null, but NaN of floats stays a value, so that the column comes back as it was.
        native = dtype.newbyteorder("=")  # Arrow has no other byte order
        values = series.to_numpy().astype(native, copy=False)
        return pa.array(values, from_pandas=dtype.kind in "mM"), ColumnFacts(name, str(native))
    raise _not_held(name, f"has dtype {kind}")


def _objects_to_arrow(name: str, series: "pd.Series[Any]") -> tuple[pa.Array, ColumnFacts]:
    """Convert texts, or objects that are of one kind but for the missing ones: booleans, integers, numbers, dates or spans."""
    import pandas as pd

    missing: Any = None
    values = series.to_numpy(dtype=object, na_value=missing)
    try:
        return pa.array(values, pa.string(), from_pandas=True), ColumnFacts(name, _text_kind(series.dtype))
    except UnicodeEncodeError as error:
        raise SchemaError(
            f"Column {name!r} has text that is not Unicode ({error.reason}); correct it, or leave it out with obs=[...]."
        ) from error
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        types = sorted({type(v).__name__ for v in values if v is not None})
        refusal = _not_held(name, f"mixes {types}" if len(types) > 1 else f"holds {types[0]} objects", error)
    found = pd.api.types.infer_dtype(values, skipna=True)
    try:
        if found in _OBJECTS:
            arrow, kind = _OBJECTS[found]
            return pa.array(values, arrow, from_pandas=True), ColumnFacts(name, kind)
        if found in {"date", "datetime", "datetime64"}:
            return _series_to_arrow(name, pd.Series(pd.to_datetime(values).as_unit("ns")))
        if found in {"timedelta", "timedelta64"}:
            return _series_to_arrow(name, pd.Series(pd.to_timedelta(values).as_unit("ns")))
    except (pa.ArrowInvalid, OverflowError, TypeError, ValueError) as error:
        raise refusal from error
    raise refusal


_OBJECTS = {
    "boolean": (pa.bool_(), "boolean"),
    "integer": (pa.int64(), "Int64"),
    "floating": (pa.float64(), "float64"),
    "mixed-integer-float": (pa.float64(), "float64"),
}
"""What objects of one kind become, by the word of pandas for it."""


def _not_held(name: str, reason: str, error: Exception | None = None) -> SchemaError:
    advice = f"obs[{name!r}] = obs[{name!r}].astype('string')"
    if name == INDEX:
        name, advice = "index", "obs.index = obs.index.astype('string')"
    refusal = SchemaError(
        f"Column {name!r} {reason}, which no column of an atlas can hold. Make it text, in which what is missing stays missing, with "
        f"{advice}, or leave it out with obs=[...]."
    )
    refusal.__cause__ = error
    return refusal


def _categorical_to_arrow(name: str, series: "pd.Series[Any]") -> tuple[pa.Array, ColumnFacts]:
    import pandas as pd

    categories = series.cat.categories
    codes = series.cat.codes.to_numpy()
    if isinstance(categories.dtype, np.dtype) and categories.dtype.kind in "biuf":
        kind = str(categories.dtype)
        values = pa.array(categories.to_numpy())
        listed: tuple[Any, ...] = tuple(categories.tolist())
    else:
        values, facts = _objects_to_arrow(name, pd.Series(categories))
        kind, listed = facts.kind.lower(), tuple(values.to_pylist())
        if pa.types.is_temporal(values.type):
            raise _not_held(name, "has categories that are times")
    indices = pa.array(codes.astype(np.int64), mask=codes < 0)
    taken = values.take(indices) if len(values) else pa.nulls(len(codes), values.type)
    return taken, ColumnFacts(name, "categorical", listed, bool(series.cat.ordered), kind)


DATASET = "dataset"
"""Column of a result that holds the name of each cell's dataset; the cell table stores ``dataset_uid``."""

LAYOUT = "layout_uid"
"""Column of a result that holds the feature layout of each cell's dataset."""

IDS = ("uid", "cell_name", "dataset_uid")
"""Columns of every cell table that identify cells."""


def metadata_columns(schema: pa.Schema) -> dict[str, ColumnFacts]:
    """Return the metadata columns that results show: stored name -> facts.

    These are all columns but ids, pointers and results, and of several columns of one name only the newest (see `column_stacks`).
    """
    tops = {stack[0] for stack in column_stacks(schema).values()}
    return {name: facts for name, facts in _stored_columns(schema).items() if name in tops}


def column_stacks(schema: pa.Schema) -> dict[str, tuple[str, ...]]:
    """Return the columns of each name that results show: name -> stored names, newest first.

    A name has several columns where an annotation gave values to a column that was there. The newest holds the values of all of
    them; the older ones are shown again when it is dropped.

    Examples
    --------
    >>> from raggedatlas.model.assets import AnnotationRecord
    >>> file = pa.field("stage", pa.string())
    >>> facts = ColumnFacts("stage", "string").to_metadata()
    >>> mine = AnnotationRecord(uid="0" * 16, name="mine").mark(
    ...     pa.field("stage__00000000", pa.string(), metadata=facts)
    ... )
    >>> column_stacks(pa.schema([file, mine]))
    {'stage': ('stage__00000000', 'stage')}
    """
    annotated = annotation_columns(schema)
    facts = _stored_columns(schema)
    taken, stacks = {"uid", "cell_name", DATASET, LAYOUT}, dict[str, tuple[str, ...]]()
    # Annotated columns share their names on purpose and take no part in keeping names apart.
    for stored in (one for one in facts if one not in annotated):
        given = facts[stored].name
        name = given if given and given not in taken else stored
        while name in taken:
            name += "_"
        stacks[name] = (stored,)
        taken.add(name)
    # The oldest annotation comes first, so the newest ends in front of its stack.
    for stored in annotated:
        name = facts[stored].name
        stacks[name] = (stored, *stacks.get(name, ()))
    return stacks


def _stored_columns(schema: pa.Schema) -> dict[str, ColumnFacts]:
    others = {*pointer_columns(schema), *result_columns(schema), *IDS}
    return {f.name: facts_of(f) or ColumnFacts(f.name, "") for f in schema if f.name not in others}


def shown_names(schema: pa.Schema) -> dict[str, str]:
    """Return the name under which a result shows each metadata column: stored name -> shown name.

    A column is shown under the name that it had in its file, unless an earlier column or the atlas uses that name.
    """
    shown = {stack[0]: name for name, stack in column_stacks(schema).items()}
    return {stored: shown[stored] for stored in schema.names if stored in shown}


def find_column(schema: pa.Schema, name: str) -> str | None:
    """Return the stored column of a name: the name that results show, the stored name, or the name in a file; else None."""
    stack = column_stacks(schema).get(name)
    if stack is not None:
        return stack[0]
    if name in schema.names:
        return name
    return next((stored for stored, facts in metadata_columns(schema).items() if facts.name == name), None)


TEXT_ROWS = 1 << 17
"""Rows of one block of text: as Python objects they take some ten megabytes."""


@dataclass(frozen=True, slots=True)
class Texts:
    """A column of text without missing values that comes in blocks."""

    n_rows: int
    # Walks down them: (k,) object arrays of str, in order, of any lengths; every call is a walk of its own.
    blocks: Callable[[], Iterator[NDArray[np.object_]]]
    dtype: Any = object  # what a pandas Series of them has: `object`, or pandas' own `str`

    def even(self, n_rows: int) -> Iterator[NDArray[np.object_]]:
        """Walk down them in blocks of exactly so many rows, but for the last one."""
        waiting: list[NDArray[np.object_]] = []
        for block in self.blocks():
            waiting.append(block)
            while sum(map(len, waiting)) >= n_rows:
                joined = np.concatenate(waiting) if len(waiting) > 1 else waiting[0]
                waiting = [joined[n_rows:]] if len(joined) > n_rows else []
                yield joined[:n_rows]
        if waiting:
            yield np.concatenate(waiting)

    def whole(self) -> NDArray[np.object_]:
        """Return all texts, (n_rows,) object array of str."""
        # `concatenate` refuses an empty list, which there would be without blocks.
        return np.concatenate([np.empty(0, object), *self.blocks()])

    def take(self, rows: NDArray[np.int64]) -> "Texts":
        """Keep some rows, which ascend."""
        return Texts(len(rows), partial(_chosen, self.blocks, rows), self.dtype)


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column of a table, or its index.

    `read` gives its values: a pandas Series or Index, or `Texts`. `arrow` gives the same values as an Arrow array, or
    None if only pandas has their type; see `plain_array`. Writers that can use it need no pandas, whose import takes
    longer than writing a few cells.
    """

    name: str | None  # an index may have none
    read: Callable[[], Any]
    arrow: Callable[[], pa.Array | None] | None = None


@dataclass(frozen=True, slots=True)
class ColumnTable:
    """A table of which one column is in memory at a time."""

    n_rows: int
    index: TableColumn  # names of its rows
    columns: tuple[TableColumn, ...]  # the others, in order

    def __len__(self) -> int:
        return self.n_rows

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.n_rows, len(self.columns)

    def take(self, rows: NDArray[np.int64]) -> "ColumnTable":
        """Keep some rows, which ascend; nothing is read by this."""
        index, *columns = (
            # `arrow` would return all rows.
            replace(c, read=partial(_taken, c.read, rows), arrow=None)
            for c in (self.index, *self.columns)
        )
        return ColumnTable(len(rows), index, tuple(columns))

    def frame(self) -> "pd.DataFrame":
        """Read all columns."""
        import pandas as pd

        columns = {column.name: _values(column.read()) for column in self.columns}
        names = self.index.read()
        index: Any = pd.Index(names.whole() if isinstance(names, Texts) else names, name=self.index.name)
        return pd.DataFrame(columns, index=index, columns=[c.name for c in self.columns] or None, copy=False)


def arrow_table(schema: pa.Schema, n_rows: int, chunks_of: Callable[[int], Iterable[pa.Array]]) -> ColumnTable:
    """Return a lazy table over an Arrow table of `frame_to_arrow`; `arrow_to_frame` returns the same values at once.

    `schema` carries the facts of the columns; `chunks_of` walks down the values of the column of a number.
    """
    found: list[TableColumn] = []
    index = TableColumn(None, lambda: _numbers(n_rows))
    for i, field in enumerate(schema):
        facts = facts_of(field) or ColumnFacts(field.name, "")
        chunks = partial(chunks_of, i)
        read, plain = partial(arrow_values, field, chunks, n_rows), partial(plain_array, field, chunks, n_rows)
        if field.name == INDEX:
            index = TableColumn(facts.name or None, partial(_as_index, read), plain)
        else:
            found.append(TableColumn(facts.name or field.name, read, plain))
    return ColumnTable(n_rows, index, tuple(found))


def arrow_values(field: pa.Field, chunks: Callable[[], Iterable[pa.Array]], n_rows: int) -> "pd.Series[Any] | Texts":
    """Convert one Arrow column to the type named by the facts of `field`.

    Long text without missing values becomes `Texts`, everything else a pandas Series. `chunks` walks down the values
    and is called more than once.
    """
    facts = facts_of(field) or ColumnFacts(field.name, "")
    if n_rows > TEXT_ROWS and _is_usual_text(field, facts) and not any(chunk.null_count for chunk in chunks()):
        return Texts(n_rows, partial(_objects, chunks), text_dtype_of(facts.kind))
    if facts.kind == "categorical":
        import pandas as pd

        # Chunk by chunk, as codes take much less memory than their categories.
        parts = [arrow_to_series(pa.chunked_array([chunk]), facts) for chunk in chunks()]
        if parts:
            kind: Any = parts[0].dtype
            codes = np.concatenate([part.cat.codes.to_numpy() for part in parts])
            return pd.Series(pd.Categorical.from_codes(codes, dtype=kind))
    return arrow_to_series(pa.chunked_array(list(chunks()), field.type), facts)


def plain_array(field: pa.Field, chunks: Callable[[], Iterable[pa.Array]], n_rows: int) -> pa.Array | None:
    """Return a column as one Arrow array where that says all that pandas would.

    That is so for text, integers and booleans without missing values; for floating-point numbers, in which nulls stand
    for NaN; and for a categorical of text, which becomes a dictionary array with the categories of the facts, in order.
    None for any other column, no rows, and text of more than `TEXT_ROWS` rows. `field` carries the facts, `chunks`
    walks down the values.
    """
    facts = facts_of(field) or ColumnFacts(field.name, "")
    text, dtype = _is_usual_text(field, facts), field.type
    number = pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype)
    # In NumPy and in the file that the column came from they have the same type.
    number = number and (not facts.kind or facts.kind == str(np.dtype(dtype.to_pandas_dtype())))
    labels = facts.kind == "categorical" and facts.category_kind in {"string", "object"} and bool(facts.categories)
    if not n_rows or not (labels or number or (text and n_rows <= TEXT_ROWS)):
        return None
    column = pa.chunked_array(list(chunks()), field.type).combine_chunks()
    if not labels:
        return None if column.null_count and not pa.types.is_floating(column.type) else column
    import pyarrow.compute as pc

    known = pa.array(facts.categories, pa.string())
    codes = pc.index_in(column.cast(pa.string()), value_set=known)
    return pa.DictionaryArray.from_arrays(codes, known, ordered=facts.ordered)


def is_pandas(value: Any, kind: str) -> bool:  # noqa: ANN401
    """Return whether a value is of a class of pandas, without importing pandas."""
    # Where pandas was never imported, no value can be one of its objects.
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, getattr(pandas, kind))


def _is_usual_text(field: pa.Field, facts: ColumnFacts) -> bool:
    """Return whether a column is text, and not of pandas' nullable type."""
    text = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
    return text and (not facts.kind or is_text(facts.kind)) and not facts.kind.startswith("string[")


def _objects(chunks: Callable[[], Iterable[pa.Array]]) -> Iterator[NDArray[np.object_]]:
    for chunk in chunks():
        for start in range(0, len(chunk), TEXT_ROWS):
            yield chunk.slice(start, TEXT_ROWS).to_numpy(zero_copy_only=False)


def _as_index(read: Callable[[], Any]) -> Any:  # noqa: ANN401  (a pandas Index or texts)
    import pandas as pd

    values = read()
    return values if isinstance(values, Texts) else pd.Index(values.array, dtype=values.dtype)


def _numbers(n_rows: int) -> "pd.Index[Any]":
    import pandas as pd

    return pd.RangeIndex(n_rows).astype(str)


def _values(column: Any) -> Any:  # noqa: ANN401  (a pandas Series or texts)
    """Return the array of a column, in memory, with the dtype that a Series of it has."""
    import pandas as pd

    return pd.Series(column.whole(), dtype=column.dtype).array if isinstance(column, Texts) else pd.Series(column).array


def _taken(read: Callable[[], Any], rows: NDArray[np.int64]) -> Any:  # noqa: ANN401
    values = read()
    if isinstance(values, Texts):
        return values.take(rows)
    return values.iloc[rows] if hasattr(values, "iloc") else values[rows]


def _chosen(
    blocks: Callable[[], Iterator[NDArray[np.object_]]], rows: NDArray[np.int64]
) -> Iterator[NDArray[np.object_]]:
    start = 0
    for block in blocks():
        # `rows` ascend, so those of one block are a single run of them.
        first, last = np.searchsorted(rows, [start, start + len(block)]).tolist()
        yield block[rows[first:last] - start]
        start += len(block)
