"""pandas frames as Arrow tables and back, with what Arrow cannot say kept as field metadata."""

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raggedatlas.errors import AtlasError, CorruptError, SchemaError
from raggedatlas.model.entries import read_json

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

    Parameters
    ----------
    name : str
        Its original name, for instance ``percent.mt``.
    kind : str
        ``"categorical"``, ``"string"`` (the usual text of the machine's pandas), ``"object"`` or ``"string[...]"`` for other text,
        a NumPy dtype such as ``"int32"``, or a pandas nullable dtype such as ``"Int64"``.
    categories : tuple or None
        In order, unused ones included; None for other kinds.
    ordered : bool
        Whether the order of the categories means something.
    category_kind : str
        NumPy dtype of the categories, for text as in `kind`.
    """

    name: str
    kind: str
    categories: tuple[Any, ...] | None = None
    ordered: bool = False
    category_kind: str = "string"

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

    Raises
    ------
    CorruptError
        If they do not parse.

    Examples
    --------
    >>> facts_of(pa.field("x", pa.int64())) is None
    True
    """
    text = (field.metadata or {}).get(FACTS_KEY)
    if text is None:
        return None
    return read_json(ColumnFacts, text.decode(errors="replace"), "its schema", field.name, FACTS_KEY.decode())


def frame_to_arrow(frame: "pd.DataFrame") -> pa.Table:
    """Turn a frame into a table whose first column `_index` is its index.

    Parameters
    ----------
    frame : pandas.DataFrame
        Any columns that AnnData can hold.

    Returns
    -------
    pyarrow.Table
        Columns in order, each with its `ColumnFacts`; `arrow_to_frame` gives the frame back.

    Raises
    ------
    SchemaError
        If a column mixes types, repeats a name, has one that is no text, or is of a kind that no column can hold; the message
        names it.

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"n": [1, 2]}, index=["a", "b"])
    >>> frame_to_arrow(frame).column_names
    ['_index', 'n']
    """
    names: list[Any] = list(frame.columns)
    odd = [name for name in names if not isinstance(name, str)]
    if odd:
        raise SchemaError(
            f"The column name {odd[0]!r} is no text, which no file can hold; rename it, e.g. to {str(odd[0])!r}."
        )
    repeated = sorted({name for name in names if names.count(name) > 1} | {n for n in names if n == INDEX})
    if repeated:
        raise SchemaError(f"The columns {repeated} appear twice or bear the reserved name {INDEX!r}; rename them.")
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


def arrow_to_frame(table: pa.Table) -> "pd.DataFrame":
    """Turn a table of `frame_to_arrow` back into the frame it was.

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"t": pd.Categorical(["B", None], categories=["T", "B"])}, index=["a", "b"])
    >>> bool(arrow_to_frame(frame_to_arrow(frame)).equals(frame))
    True
    """
    import pandas as pd

    columns = {}
    index: Any = pd.RangeIndex(table.num_rows).astype(str)
    for i, field in enumerate(table.schema):
        facts = facts_of(field) or ColumnFacts(field.name, "")
        series = arrow_to_series(table.column(i), facts)
        if field.name == INDEX:
            index = pd.Index(series.array, dtype=series.dtype, name=facts.name or None)
        else:
            columns[facts.name or field.name] = series.set_axis(range(table.num_rows))
    frame = pd.DataFrame(columns, index=pd.RangeIndex(table.num_rows))
    frame.index = index
    return frame


def arrow_to_series(column: pa.ChunkedArray, facts: ColumnFacts) -> "pd.Series[Any]":
    """Turn one column into the pandas dtype that its facts name.

    Parameters
    ----------
    column : pyarrow.ChunkedArray
        Values; nulls are missing.
    facts : ColumnFacts
        What the column was. A NumPy integer or boolean kind that has nulls here becomes its nullable pandas dtype.

    Raises
    ------
    CorruptError
        If the values are not of the kind that the facts name.

    Examples
    --------
    >>> arrow_to_series(pa.chunked_array([[1, None]]), ColumnFacts("n", "int32")).dtype
    Int32Dtype()
    """
    try:
        return _typed_series(column, facts)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, pa.ArrowException) as error:
        if isinstance(error, AtlasError):
            raise
        reason = str(error).split("\n", 1)[0]
        raise CorruptError(
            f"The column {facts.name!r} holds {column.type} and is recorded as {facts.kind!r}, which does not fit ({reason}); run "
            "validate('deep') and restore the atlas from a copy."
        ) from error


def _typed_series(column: pa.ChunkedArray, facts: ColumnFacts) -> "pd.Series[Any]":
    import pandas as pd

    if facts.kind == "categorical":
        return _categorical(column, facts)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        values = column.to_numpy(zero_copy_only=False)
        text: pd.Series[Any] = pd.Series(values, dtype=text_dtype_of(facts.kind))
        return text
    if facts.kind in _NULLABLE:
        return pd.Series(_nullable(column, facts.kind))
    if column.null_count and (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
        return pd.Series(_nullable(column, _nullable_name(facts.kind or str(column.type))))
    series: pd.Series[Any] = column.to_pandas()
    kind: Any = facts.kind
    if kind and kind != str(series.dtype):
        series = series.astype(kind)
    return series


def nan_to_null(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column in which NaN is null: a missing number is one thing wherever cells are compared, sorted or grouped.

    Examples
    --------
    >>> nan_to_null(pa.chunked_array([[1.0, float("nan"), None]])).null_count
    2
    """
    import pyarrow.compute as pc

    if not pa.types.is_floating(column.type):
        return column
    return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)


def is_text(kind: str) -> bool:
    """Say whether a kind of column or of categories is text.

    Examples
    --------
    >>> is_text("object"), is_text("string[pandas]"), is_text("Int64")
    (True, True, False)
    """
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


def _nullable_name(kind: str) -> str:
    if kind in {"bool", "boolean"}:
        return "boolean"
    return kind.replace("uint", "UInt").replace("int", "Int") if "uint" in kind else kind.replace("int", "Int")


def _nullable(column: pa.ChunkedArray, kind: str) -> Any:  # noqa: ANN401  (a pandas extension array)
    import pandas as pd

    mask = column.is_null().to_numpy()
    fill = False if kind == "boolean" else 0
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
    plain = codes.fill_null(-1).to_numpy()
    return pd.Series(pd.Categorical.from_codes(plain, categories=categories, ordered=facts.ordered))


def _series_to_arrow(name: str, series: "pd.Series[Any]") -> tuple[pa.Array, ColumnFacts]:
    import pandas as pd

    dtype = series.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return _categorical_to_arrow(name, series)
    if isinstance(dtype, pd.StringDtype) or dtype.kind == "O":
        return _text_to_arrow(name, series), ColumnFacts(name, _text_kind(dtype))
    kind = str(dtype)
    if kind in _NULLABLE:
        mask = series.isna().to_numpy()
        plain = series.array._data
        return pa.array(plain, mask=mask), ColumnFacts(name, kind)
    if isinstance(dtype, pd.DatetimeTZDtype):
        naive = series.dt.tz_convert("UTC").dt.tz_localize(None)
        instants = pa.array(naive.to_numpy(), from_pandas=True)
        return instants.cast(pa.timestamp(instants.type.unit, "UTC")), ColumnFacts(name, kind)
    if isinstance(dtype, np.dtype) and dtype.kind in "biufmM":
        return pa.array(series.to_numpy(), from_pandas=dtype.kind in "mM"), ColumnFacts(name, kind)
    raise SchemaError(
        f"Column {name!r} has dtype {kind}, which no cell table column can hold; cast it to text, numbers or a categorical, "
        "or leave it out with obs=[...]."
    )


def _text_to_arrow(name: str, series: "pd.Series[Any]") -> pa.Array:
    missing: Any = None
    values = series.to_numpy(dtype=object, na_value=missing)
    try:
        return pa.array(values, pa.string(), from_pandas=True)
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        types = sorted({type(v).__name__ for v in values if v is not None})
        raise SchemaError(
            f"Column {name!r} mixes {types}; a column holds one type. Cast it, e.g. obs[{name!r}] = obs[{name!r}].astype(str), "
            "or leave it out with obs=[...]."
        ) from error


def _categorical_to_arrow(name: str, series: "pd.Series[Any]") -> tuple[pa.Array, ColumnFacts]:
    import pandas as pd

    categories = series.cat.categories
    codes = series.cat.codes.to_numpy()
    if isinstance(categories.dtype, np.dtype) and categories.dtype.kind in "biuf":
        kind = str(categories.dtype)
        values = pa.array(categories.to_numpy())
        listed: tuple[Any, ...] = tuple(categories.tolist())
    else:
        kind = _text_kind(categories.dtype)
        values = _text_to_arrow(f"categories of {name}", pd.Series(categories))
        listed = tuple(values.to_pylist())
    indices = pa.array(codes.astype(np.int64), mask=codes < 0)
    taken = values.take(indices) if len(values) else pa.nulls(len(codes), values.type)
    return taken, ColumnFacts(name, "categorical", listed, bool(series.cat.ordered), kind)
