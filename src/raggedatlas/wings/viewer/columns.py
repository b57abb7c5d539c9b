"""Columns of metadata as the viewer knows them: categories, numbers, and texts to read and search."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.errors import NotFoundError

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["category", "number", "text"]

MOST_CATEGORIES = 500
_FEW_WHOLE = 24
_EXACT = 2**24
_PARTS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class PointColumn:
    """One column, a value for every point."""

    name: str
    kind: Kind  # coloured by as categories or on a scale, or read and searched
    # ``dictionary<int32, string>`` in the order of the legend, floats with NaN for missing, or strings
    values: pa.Array
    colors: Mapping[str, str] = field(default_factory=dict)  # of categories that have one of their own


def read_column(
    name: str, values: pa.ChunkedArray | pa.Array, colors: Mapping[str, str] | None = None
) -> PointColumn | None:
    """Read a column, in the order of the points; None for what cannot be shown, such as lists.

    `colors` maps a category to its colour.

    Examples
    --------
    >>> read_column("donor", pa.array(["d10", "d2", None, "d2"])).values.dictionary.to_pylist()
    ['d2', 'd10']
    >>> read_column("n_genes", pa.array([1.5, None])).values.to_pylist()
    [1.5, nan]
    """
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    kind = array.type
    if pa.types.is_dictionary(kind):
        if pa.types.is_nested(kind.value_type) or pa.types.is_binary(kind.value_type):
            return None
        labels = array.dictionary.cast(pa.string())
        # An atlas declares all categories of all datasets; the legend lists those of the shown cells.
        used = set(pc.unique(array.indices).to_pylist())
        order = [label for i, label in enumerate(labels.to_pylist()) if i in used and label is not None]
        texts = labels.take(array.indices)
        if len(order) > MOST_CATEGORIES:
            return PointColumn(name, "text", texts.fill_null(""))
        return _category(name, texts, order, colors or {})
    if pa.types.is_boolean(kind):
        return _category(name, pc.cast(array, pa.string()), ["false", "true"], colors or {})
    if pa.types.is_integer(kind):
        n_distinct = pc.count_distinct(array).as_py()
        if 0 < n_distinct <= _FEW_WHOLE and len(array) > 2 * n_distinct:
            distinct = sorted(pc.unique(array).drop_null().to_pylist())
            return _category(name, array.cast(pa.string()), [str(value) for value in distinct], (colors or {}))
        return PointColumn(name, "number", _floats(array.cast(pa.float64(), safe=False)))
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return PointColumn(name, "number", _floats(array.cast(pa.float64())))
    if pa.types.is_temporal(kind) and not pa.types.is_duration(kind):
        array, kind = array.cast(pa.string()), pa.string()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        array = array.cast(pa.string())
        n_distinct = pc.count_distinct(array).as_py()
        if n_distinct > MOST_CATEGORIES or 2 * n_distinct > len(array) + 2:
            return PointColumn(name, "text", array.fill_null(""))
        distinct = [value for value in pc.unique(array).to_pylist() if value is not None]
        return _category(name, array, sorted(distinct, key=natural), colors or {})
    return None


def _category(name: str, texts: pa.Array, order: list[str], colors: Mapping[str, str]) -> PointColumn:
    codes = pc.index_in(texts, value_set=pa.array(order, pa.string()), skip_nulls=True)
    values = pa.DictionaryArray.from_arrays(codes, pa.array(order, pa.string()))
    return PointColumn(name, "category", values, {label: colors[label] for label in order if label in colors})


def _floats(array: pa.Array) -> pa.Array:
    """Return floats, in single precision where that is exact enough for a screen."""
    values = array.fill_null(np.nan).to_numpy(zero_copy_only=False)
    whole = np.abs(values[np.isfinite(values)])
    # Single precision holds whole numbers exactly only up to 2**24.
    wide = len(whole) > 0 and whole.max() >= _EXACT
    return pa.array(values if wide else values.astype(np.float32))


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts numbers within texts by their size.

    Examples
    --------
    >>> sorted(["c10", "c9", "b"], key=natural)
    ['b', 'c9', 'c10']
    """
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part.lower()) for part in _PARTS.split(text) if part]


def as_table(obs: "pa.Table | pd.DataFrame", id_column: str) -> pa.Table:
    """Return a frame as a table with its ids in `id_column`; of a pandas frame the index holds them."""
    if not isinstance(obs, pa.Table):
        # A copy, since assigning names below would rename the columns of the caller's frame.
        frame = obs.copy(deep=False)
        if id_column in frame.columns:
            frame = frame.drop(columns=id_column)
        frame.columns = frame.columns.map(str)
        index = pa.array([str(value) for value in frame.index], pa.string())
        # By position: names may be equal as text, and `frame[name]` would then be several columns.
        columns: dict[str, pa.Array] = {}
        for i, name in enumerate(frame.columns):
            series = frame.iloc[:, i]
            try:
                columns[name] = pa.Array.from_pandas(series)
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
                texts = [None if value is None else str(value) for value in series]
                columns[name] = pa.array(texts, pa.string())
        return pa.table({id_column: index, **columns})
    if id_column not in obs.column_names:
        raise NotFoundError(
            f"The table of metadata has no column {id_column!r} with the ids; it has {obs.column_names[:20]}."
        )
    return obs
