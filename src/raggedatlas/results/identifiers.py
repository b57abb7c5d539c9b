"""The ids of a table of results: one sequence in row order, which also iterates as a generator would."""

from collections.abc import Iterator
from typing import Any, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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
    ('a', ['a', 'b'], 2, 'b', array(['a', 'b'], dtype=object))
    """

    def __init__(self, values: pa.Array) -> None:
        self._values = values
        self._next = 0

    def __len__(self) -> int:
        """Count the ids, whatever `next` has given already."""
        return len(self._values)

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
        """Give an array of texts."""
        values: NDArray[Any] = self._values.to_numpy(zero_copy_only=False)
        return values if dtype is None else values.astype(dtype)

    def to_arrow(self) -> pa.Array:
        """Give the Arrow array, which is shared."""
        return self._values
