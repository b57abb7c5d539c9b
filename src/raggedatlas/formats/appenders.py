"""Arrays that grow along their first axis: through their library, as chunks compressed here, or as bytes put in their place."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SchemaError
from raggedatlas.formats.deflate import shuffle
from raggedatlas.formats.writeback import WriteBack
from raggedatlas.store.threads import DECODE_THREADS, map_decode

BATCH_BYTES = 4 << 20
"""Chunks of at least this size together are compressed at once."""


class Appender:
    """Appends along the first axis of an array, in whole chunks until `flush`.

    Parameters
    ----------
    array : h5py.Dataset or zarr.Array
        Where to.
    unit : int
        Rows that are written together.
    grows : bool
        Whether the array must be lengthened.
    """

    def __init__(self, array: Any, unit: int, *, grows: bool) -> None:  # noqa: ANN401
        self.array, self._unit, self._grows = array, unit, grows
        self.n_rows = 0
        self._n_written = 0
        self._waiting: list[NDArray[Any]] = []

    def append(self, values: NDArray[Any]) -> None:
        """Take rows.

        Raises
        ------
        SchemaError
            If they are more than the array has.
        """
        self.n_rows += len(values)
        if not self._grows and self.n_rows > self.array.shape[0]:
            raise SchemaError(
                f"{self.array.name} takes {self.array.shape[0]:,} rows or entries; more came. Announce all of them to begin()."
            )
        before = sum(len(part) for part in self._waiting)
        if before:
            # What waits is filled up to one unit, so that all beyond it is written without a copy.
            head = values[: self._unit - before]
            self._waiting.append(head.copy())
            values = values[len(head) :]
            if before + len(head) == self._unit:
                self._write(np.concatenate(self._waiting))
                self._waiting = []
        whole = len(values) - len(values) % self._unit
        self._write(values[:whole])
        if whole < len(values):
            # A small rest must not keep a large block alive.
            self._waiting.append(values[whole:].copy())

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            self._write(np.concatenate(self._waiting))
            self._waiting = []

    def _write(self, rows: NDArray[Any]) -> None:
        if not len(rows):
            return
        stop = self._n_written + len(rows)
        if self._grows:
            self.array.resize((stop,))
        self._put(self._n_written, rows)
        self._n_written = stop

    def _put(self, start: int, rows: NDArray[Any]) -> None:
        self.array[start : start + len(rows)] = rows


class PlaceAppender(Appender):
    """Appends to an HDF5 dataset that lies in one piece, whose place in the file was taken when it was made.

    Parameters
    ----------
    dataset : h5py.Dataset
        Contiguous, of its final shape.
    writeback : WriteBack
        Of the same file.
    """

    def __init__(self, dataset: Any, writeback: WriteBack) -> None:  # noqa: ANN401
        super().__init__(dataset, 1, grows=False)
        self._writeback, self._offset = writeback, int(dataset.id.get_offset())
        self._row_bytes = dataset.dtype.itemsize * int(np.prod(dataset.shape[1:], dtype=np.int64))

    def _put(self, start: int, rows: NDArray[Any]) -> None:
        left = memoryview(np.ascontiguousarray(rows, self.array.dtype).reshape(-1).view(np.uint8).data)
        at = self._offset + start * self._row_bytes
        self._writeback.note(len(left))
        while left:
            n = os.pwrite(self._writeback.file, left, at)
            left, at = left[n:], at + n


class ChunkAppender(Appender):
    """Appends to an HDF5 dataset whose chunks span all but the first axis, past the library's filters.

    Parameters
    ----------
    dataset : h5py.Dataset
        Where to.
    compress : callable or None
        Shuffled bytes of one chunk -> what the file keeps; None for a dataset without filters.
    writeback : WriteBack
        Of the same file.
    grows : bool
        Whether it must be lengthened.
    """

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401
        compress: Callable[[Any], bytes] | None,
        writeback: WriteBack,
        *,
        grows: bool,
    ) -> None:
        self._chunks: tuple[int, ...] = dataset.chunks
        self._compress, self._writeback = compress, writeback
        chunk_bytes = int(np.prod(self._chunks, dtype=np.int64)) * dataset.dtype.itemsize
        super().__init__(dataset, self._chunks[0] * max(1, -(-BATCH_BYTES // chunk_bytes)), grows=grows)

    def _put(self, start: int, rows: NDArray[Any]) -> None:
        step = self._chunks[0]
        rows = np.ascontiguousarray(rows)
        starts = range(0, len(rows), step)
        n_lots = max(1, min(len(starts), 2 * DECODE_THREADS))
        lots = [starts[i::n_lots] for i in range(n_lots)]
        made = dict(pair for lot in map_decode(lambda lot: self._made(rows, lot), lots) for pair in lot)
        beyond = (0,) * (len(self._chunks) - 1)
        for at in starts:
            self.array.id.write_direct_chunk((start + at, *beyond), made[at])
            self._writeback.note(len(made[at]))

    def _made(self, rows: NDArray[Any], lot: range) -> list[tuple[int, Any]]:
        return [(at, self._chunk(rows[at : at + self._chunks[0]])) for at in lot]

    def _chunk(self, rows: NDArray[Any]) -> Any:  # noqa: ANN401  (any buffer)
        if len(rows) < self._chunks[0]:
            # A chunk is whole in the file, also where the array ends within it.
            padded = np.zeros(self._chunks, rows.dtype)
            padded[: len(rows)] = rows
            rows = padded
        flat = rows.reshape(-1)
        return flat.view(np.uint8) if self._compress is None else self._compress(shuffle(flat))
