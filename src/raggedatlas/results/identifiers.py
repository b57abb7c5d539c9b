"""The ids of a table of results: one sequence in row order, which also iterates as a generator would."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.results.schema import OBJECT_ID
from raggedatlas.store.sql import in_list

if TYPE_CHECKING:
    import lance

_PIECE = 2**16


class Ids:
    """Ids in row order: a sequence, an iterator with a place of its own, and an array for NumPy.

    Parameters
    ----------
    values : pyarrow.Array
        Texts.

    Examples
    --------
    >>> ids = Ids(pa.array(["a", "b"]))
    >>> next(ids), list(ids), len(ids), ids[1], np.array(ids)
    ('a', ['a', 'b'], 2, 'b', array(['a', 'b'], dtype='<U1'))
    >>> ids == ["a", "b"]
    True
    """

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none

    def __init__(self, values: pa.Array) -> None:
        self._values = values
        self._next = 0

    def __len__(self) -> int:
        """Count the ids, whatever `next` has given already."""
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        """Compare with other ids or any sequence of texts, by length and item by item."""
        if isinstance(other, Ids):
            return self is other or self._values.cast(pa.large_string()).equals(other._values.cast(pa.large_string()))
        if isinstance(other, Sequence | np.ndarray) and not isinstance(other, str | bytes):
            return len(self) == len(other) and all(own == each for own, each in zip(self, other, strict=True))
        return NotImplemented

    def __iter__(self) -> Iterator[str]:
        """Begin from the first."""
        for start in range(0, len(self._values), _PIECE):
            yield from self._values.slice(start, _PIECE).to_pylist()

    def __next__(self) -> str:
        """Give the next id."""
        if self._next >= len(self._values):
            raise StopIteration
        self._next += 1
        return self[self._next - 1]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Give one id or a slice of them, as a list does."""
        if isinstance(index, slice):
            rows = np.arange(*index.indices(len(self)))
            found: list[str] = self._values.take(pa.array(rows)).to_pylist()
            return found
        value: str = self._values[index].as_py()
        return value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: ANN401, FBT001  (NumPy's protocol)
        """Return the ids as an array of fixed-width texts, or of another dtype."""
        values: NDArray[Any] = self._values.to_numpy(zero_copy_only=False)
        return values.astype(np.str_ if dtype is None else dtype)

    def to_arrow(self) -> pa.Array:
        """Give the Arrow array, which is shared."""
        return self._values


def indexed_rows(table: "lance.LanceDataset", ids: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Ask the table's index over ids for the rows of some of them.

    Parameters
    ----------
    table : lance.LanceDataset
        Of results.
    ids : sequence of str
        At most some thousands.

    Returns
    -------
    tuple of (k,) int64 and (k,) int64, or None
        Rows, and which of the asked ids each has, a row for each time that one stands there; None where there is no index.
    """
    if not any(OBJECT_ID in map(str, index.field_names) for index in table.describe_indices()):
        return None
    found = table.to_table(columns=[OBJECT_ID], filter=in_list(OBJECT_ID, ids), with_row_address=True)
    addresses = found.column("_rowaddr").to_numpy()
    fragments = table.get_fragments()
    starts = np.cumsum([0, *(each.count_rows() for each in fragments)])
    first = {each.fragment_id: start for each, start in zip(fragments, starts, strict=False)}
    rows = (addresses & np.uint64(2**32 - 1)).astype(np.int64)
    rows += np.array([first[int(address >> np.uint64(32))] for address in addresses], np.int64)
    position = pc.index_in(found.column(OBJECT_ID), value_set=pa.array(list(ids), pa.string()))
    return rows, position.to_numpy().astype(np.int64)
