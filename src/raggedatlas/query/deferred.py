"""The `obs` of a plan whose columns are read when asked for, each time anew: a long one is never whole in memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import CELLS
from raggedatlas.store.tables import ROW_ID, Tables, walk

Rows = range | NDArray[np.uint64]
"""Row ids of the cell table; mostly they are all of a range."""


@dataclass(frozen=True)
class CellRows:
    """Which rows of the cell table some cells are.

    Parameters
    ----------
    tables : Tables
        At a version.
    where : str or None
        A condition that all of them meet.
    ids : range or (n_cells,) uint64
        Their stable row ids, in order.
    """

    tables: Tables
    where: str | None
    ids: Rows

    @classmethod
    def of(cls, tables: Tables, where: str | None, ids: NDArray[np.uint64]) -> "CellRows":
        """Keep row ids in the least memory."""
        return cls(tables, where, _short(ids))

    def take(self, rows: NDArray[np.int64]) -> "CellRows":
        """Keep some cells, in the order given."""
        ids = self.ids
        taken = rows.astype(np.uint64) + np.uint64(ids.start) if isinstance(ids, range) else ids[rows]
        return replace(self, ids=_short(taken))

    def read(self, column: str) -> pa.ChunkedArray:
        """Read a column of these cells whole."""
        table = self.tables.read(CELLS, [column], self.where, row_ids=True)
        found = table.column(ROW_ID).to_numpy()
        values = table.column(column)
        return (
            values
            if _same(_short(found), self.ids)
            else values.take(pa.array(np.searchsorted(found, _array(self.ids))))
        )

    def chunks(self, column: str) -> Iterator[pa.Array]:
        """Walk down a column of these cells; of what is stored in another order, all is read first."""
        if not self.in_order:
            yield from self.read(column).chunks
            return
        for batch in walk(self.tables, CELLS, [column], self.where):
            found = batch.column(ROW_ID).to_numpy()
            values = batch.column(column)
            if isinstance(self.ids, range):
                first, last = np.searchsorted(found, [self.ids.start, self.ids.stop]).tolist()
                yield values.slice(first, last - first)
            else:
                yield values.filter(pa.array(np.isin(found, self.ids, assume_unique=True)))

    @cached_property
    def in_order(self) -> bool:
        """Whether the cells, and the rows of the table among which they are, come in ascending order of row ids."""
        if not isinstance(self.ids, range) and not _ascends(self.ids):
            return False
        last = -1
        for batch in walk(self.tables, CELLS, [], self.where):
            found = batch.column(ROW_ID).to_numpy()
            if len(found) and (int(found[0]) <= last or not _ascends(found)):
                return False
            last = int(found[-1]) if len(found) else last
        return True


@dataclass(frozen=True)
class DeferredTable:
    """As much of a `pyarrow.Table` as the `obs` of a plan needs; its text and numbers stay in the cell table.

    Parameters
    ----------
    schema : pyarrow.Schema
        Its columns with their facts.
    rows : CellRows
        Where they are read.
    stored : mapping of str to str
        Column -> its name in the cell table.
    held : mapping of str to pyarrow.ChunkedArray
        Columns that are in memory: short ones, and those that stand in no table.
    """

    schema: pa.Schema
    rows: CellRows
    stored: Mapping[str, str]
    held: Mapping[str, pa.ChunkedArray]

    @property
    def num_rows(self) -> int:
        """Number of cells."""
        return len(self.rows.ids)

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, in order."""
        return list(self.schema.names)

    def column(self, which: int | str) -> pa.ChunkedArray:
        """Read one column."""
        name = self.schema.names[which] if isinstance(which, int) else which
        return self.held[name] if name in self.held else self.rows.read(self.stored[name])

    def chunks(self, which: int) -> Iterator[pa.Array]:
        """Walk down one column."""
        name = self.schema.names[which]
        yield from self.held[name].chunks if name in self.held else self.rows.chunks(self.stored[name])

    def take(self, rows: pa.Array) -> "DeferredTable":
        """Keep some cells, in the order given."""
        held = {name: column.take(rows) for name, column in self.held.items()}
        return replace(self, rows=self.rows.take(rows.to_numpy()), held=held)

    def select(self, names: Sequence[str]) -> "DeferredTable":
        """Keep some columns."""
        return replace(self, schema=pa.schema([self.schema.field(name) for name in names]))


def _short(ids: NDArray[np.uint64]) -> Rows:
    if len(ids) and int(ids[-1]) - int(ids[0]) == len(ids) - 1 and _ascends(ids):
        return range(int(ids[0]), int(ids[-1]) + 1)
    return ids


def _array(ids: Rows) -> NDArray[np.uint64]:
    return np.arange(ids.start, ids.stop, dtype=np.uint64) if isinstance(ids, range) else ids


def _ascends(ids: NDArray[np.uint64]) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def _same(one: Rows, other: Rows) -> bool:
    if isinstance(one, range) or isinstance(other, range):
        return one == other if isinstance(one, range) and isinstance(other, range) else False
    return np.array_equal(one, other)
