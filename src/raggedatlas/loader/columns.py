"""Metadata columns as arrays made once: numbers as they are, everything else as codes into its categories."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import QueryError
from raggedatlas.model.frames import facts_of


@dataclass(frozen=True, eq=False)
class ObsColumn:
    """One metadata column of all cells.

    Parameters
    ----------
    values : (n_cells,) array
        Numbers; integers with missing values are float64 with NaN. Or int32 codes, -1 where the value is missing.
    categories : (n_categories,) object array, or None
        What the codes mean; None for numbers.
    """

    values: NDArray[Any]
    categories: NDArray[np.object_] | None = None


def obs_column(table: pa.Table, name: str, categories: Sequence[Any] | None = None) -> ObsColumn:
    """Turn a column of a plan's `obs` into an array.

    Parameters
    ----------
    table : pyarrow.Table
        Metadata with facts.
    name : str
        A column of it.
    categories : sequence or None
        The categories, in the order of their codes. None takes those that the atlas knows for a categorical column, all of them
        and in their order, else the values that occur, sorted.

    Raises
    ------
    QueryError
        For a column of lists or structs, or categories that repeat or do not fit.

    Examples
    --------
    >>> column = obs_column(pa.table({"donor": ["b", None, "a"]}), "donor")
    >>> column.values, column.categories
    (array([ 1, -1,  0], dtype=int32), array(['a', 'b'], dtype=object))
    """
    column = table.column(name)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_nested(kind):
        raise QueryError(
            f"The metadata column {name!r} holds {kind}; batches carry columns of numbers, text, truth values or times."
        )
    facts = facts_of(table.schema.field(name))
    if categories is None and facts is not None and facts.categories is not None:
        categories = facts.categories
    if categories is None and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return ObsColumn(_numbers(column.cast(kind)))
    known = _known(column.cast(kind), kind) if categories is None else _given(name, kind, categories)
    codes = pc.index_in(column.cast(kind), value_set=known).fill_null(-1)
    return ObsColumn(codes.to_numpy().astype(np.int32), np.array(known.to_pylist(), dtype=object))


def obs_columns(
    table: pa.Table, names: Mapping[str, str], categories: Mapping[str, Sequence[Any]]
) -> dict[str, ObsColumn]:
    """Turn several columns into arrays: asked name -> column, for asked name -> name in the table."""
    unknown = sorted(set(categories) - set(names))
    if unknown:
        raise QueryError(f"categories names {unknown}, which obs={list(names)} does not ask for.")
    return {asked: obs_column(table, name, categories.get(asked)) for asked, name in names.items()}


def _numbers(column: pa.ChunkedArray) -> NDArray[Any]:
    if column.null_count and pa.types.is_integer(column.type):
        column = column.cast(pa.float64(), safe=False)
    if column.null_count:
        column = column.fill_null(float("nan"))
    values: NDArray[Any] = np.ascontiguousarray(column.to_numpy())
    return values


def _known(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    if pa.types.is_boolean(kind):
        return pa.array([False, True])
    distinct = pc.unique(column).drop_null()
    return distinct.take(pc.sort_indices(distinct))


def _given(name: str, kind: pa.DataType, categories: Sequence[Any]) -> pa.Array:
    if isinstance(categories, str) or len(set(categories)) != len(categories):
        raise QueryError(f"The categories of {name!r} are a list in which each stands once, not {categories!r}.")
    try:
        return pa.array(list(categories)).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise QueryError(
            f"The column {name!r} holds {kind}; the categories {list(categories)!r} do not fit."
        ) from error
