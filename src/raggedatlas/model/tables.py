"""Tables whose columns are read when asked for, so that a long one is never whole in memory."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.model.frames import INDEX, ColumnFacts, arrow_to_series, facts_of, is_text, text_dtype_of

if TYPE_CHECKING:
    import pandas as pd

TEXT_ROWS = 1 << 17
"""Rows of one block of text: as Python objects they take some ten megabytes."""


@dataclass(frozen=True, slots=True)
class Texts:
    """A column of text without missing values that comes in blocks.

    Parameters
    ----------
    n_rows : int
        How many.
    blocks : callable
        Walks down them: (k,) object arrays of str, in order, of any lengths; every call is a walk of its own.
    dtype : pandas dtype
        What a pandas Series of them has: ``object``, or pandas' own ``str``.

    Examples
    --------
    >>> Texts(3, lambda: iter([np.array(["a", "b"], object), np.array(["c"], object)])).whole().tolist()
    ['a', 'b', 'c']
    """

    n_rows: int
    blocks: Callable[[], Iterator[NDArray[np.object_]]]
    dtype: Any = object

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
        """Give all of them, (n_rows,) object array of str."""
        return np.concatenate([np.empty(0, object), *self.blocks()])

    def take(self, rows: NDArray[np.int64]) -> "Texts":
        """Keep some rows, which ascend."""
        return Texts(len(rows), partial(_chosen, self.blocks, rows), self.dtype)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table, or its index.

    Parameters
    ----------
    name : str or None
        Its name; an index may have none.
    read : callable
        Gives its values: a pandas Series or Index, or `Texts`.
    """

    name: str | None
    read: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class ColumnTable:
    """A table of which one column is in memory at a time.

    Parameters
    ----------
    n_rows : int
        Its length.
    index : Column
        Names of its rows.
    columns : tuple of Column
        The others, in order.

    Examples
    --------
    >>> import pandas as pd
    >>> made = ColumnTable(2, Column("cell", lambda: pd.Index(["a", "b"])), (Column("n", lambda: pd.Series([1, 2])),))
    >>> made.take(np.array([1])).frame().to_dict()
    {'n': {'b': 2}}
    """

    n_rows: int
    index: Column
    columns: tuple[Column, ...]

    def __len__(self) -> int:
        return self.n_rows

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.n_rows, len(self.columns)

    def take(self, rows: NDArray[np.int64]) -> "ColumnTable":
        """Keep some rows, which ascend; nothing is read by this."""
        index, *columns = (replace(c, read=partial(_taken, c.read, rows)) for c in (self.index, *self.columns))
        return ColumnTable(len(rows), index, tuple(columns))

    def frame(self) -> "pd.DataFrame":
        """Read all columns."""
        import pandas as pd

        columns = {column.name: _values(column.read()) for column in self.columns}
        names = self.index.read()
        index: Any = pd.Index(names.whole() if isinstance(names, Texts) else names, name=self.index.name)
        return pd.DataFrame(columns, index=index, columns=[c.name for c in self.columns] or None, copy=False)


def arrow_table(schema: pa.Schema, n_rows: int, chunks_of: Callable[[int], Iterable[pa.Array]]) -> ColumnTable:
    """Make a table of an Arrow one as `frames.frame_to_arrow` makes it; `arrow_to_frame` gives the same values at once.

    Parameters
    ----------
    schema : pyarrow.Schema
        With the facts of the columns.
    n_rows : int
        Its length.
    chunks_of : callable
        Number of a column -> walks down its values.
    """
    found: list[Column] = []
    index = Column(None, lambda: _numbers(n_rows))
    for i, field in enumerate(schema):
        facts = facts_of(field) or ColumnFacts(field.name, "")
        read = partial(arrow_values, field, partial(chunks_of, i), n_rows)
        if field.name == INDEX:
            index = Column(facts.name or None, partial(_as_index, read))
        else:
            found.append(Column(facts.name or field.name, read))
    return ColumnTable(n_rows, index, tuple(found))


def arrow_values(field: pa.Field, chunks: Callable[[], Iterable[pa.Array]], n_rows: int) -> "pd.Series[Any] | Texts":
    """Turn one Arrow column into what its facts name: long text without missing values as `Texts`, else a pandas Series.

    Parameters
    ----------
    field : pyarrow.Field
        With its facts.
    chunks : callable
        Walks down its values; called more than once.
    n_rows : int
        How many there are.
    """
    import pandas as pd

    facts = facts_of(field) or ColumnFacts(field.name, "")
    if n_rows > TEXT_ROWS and _is_usual_text(field, facts) and not any(chunk.null_count for chunk in chunks()):
        return Texts(n_rows, partial(_objects, chunks), text_dtype_of(facts.kind))
    if facts.kind == "categorical":
        # Chunk by chunk, as the codes take much less than what they stand for.
        parts = [arrow_to_series(pa.chunked_array([chunk]), facts) for chunk in chunks()]
        if parts:
            kind: Any = parts[0].dtype
            codes = np.concatenate([part.cat.codes.to_numpy() for part in parts])
            return pd.Series(pd.Categorical.from_codes(codes, dtype=kind))
    return arrow_to_series(pa.chunked_array(list(chunks()), field.type), facts)


def _is_usual_text(field: pa.Field, facts: ColumnFacts) -> bool:
    """Say whether a column is text, and not of pandas' nullable type."""
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
        first, last = np.searchsorted(rows, [start, start + len(block)]).tolist()
        yield block[rows[first:last] - start]
        start += len(block)
