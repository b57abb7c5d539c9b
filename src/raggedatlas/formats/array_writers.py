"""Arrays that grow along their first axis: through their library, as chunks compressed here, or as bytes put in their place."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SchemaError
from raggedatlas.formats.deflate import shuffle
from raggedatlas.formats.fsync import PageFlusher
from raggedatlas.store.arrays import compose_shard
from raggedatlas.store.codecs import EncodedChunks
from raggedatlas.store.runtime import DECODE_THREADS, map_decode

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
        start = self._n_written
        self._n_written += len(rows)
        self._lengthen()
        self._put(start, rows)

    def _lengthen(self) -> None:
        if self._grows:
            self.array.resize((self._n_written,))

    def _put(self, start: int, rows: NDArray[Any]) -> None:
        self.array[start : start + len(rows)] = rows


class ContiguousAppender(Appender):
    """Appends to an HDF5 dataset that lies in one piece, whose place in the file was taken when it was made.

    Parameters
    ----------
    dataset : h5py.Dataset
        Contiguous, of its final shape.
    writeback : PageFlusher
        Of the same file.
    """

    def __init__(self, dataset: Any, writeback: PageFlusher) -> None:  # noqa: ANN401
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
    writeback : PageFlusher
        Of the same file.
    grows : bool
        Whether it must be lengthened.
    """

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401
        compress: Callable[[Any], bytes] | None,
        writeback: PageFlusher,
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


class ShardAppender(Appender):
    """Appends to a Zarr array in a folder whose chunks span all but the first axis, on several threads.

    zarr-python encodes on one core; what is written here are the same bytes in the same files. Chunks are encoded as they come and
    wait for the others of their file, so that no more than a rest of the values is ever copied.

    Parameters
    ----------
    array : zarr.Array
        Where to; not empty in any but the first axis.
    folder : Path
        Of the root of its store.
    encode : callable or None
        Contiguous values of one chunk -> what the file keeps; None for chunks as they are.
    grows : bool
        Whether it must be lengthened.
    """

    def __init__(self, array: Any, folder: Path, encode: Callable[[Any], bytes] | None, *, grows: bool) -> None:  # noqa: ANN401
        self._folder, self._encode = folder / array.path, encode
        self._chunk_shape: tuple[int, ...] = array.chunks
        self._per_file = 1 if array.shards is None else array.shards[0] // array.chunks[0]
        self._sharded = array.shards is not None
        self._made: list[bytes] = []
        self._n_files = 0
        chunk_bytes = int(np.prod(array.chunks, dtype=np.int64)) * array.dtype.itemsize
        super().__init__(array, array.chunks[0] * max(1, -(-BATCH_BYTES // chunk_bytes)), grows=grows)

    def flush(self) -> None:
        """Write what waits, and lengthen the array, whose metadata is a file of its own, once."""
        super().flush()
        self._send(1)
        super()._lengthen()

    def _lengthen(self) -> None:
        """Wait for `flush`."""

    def _put(self, start: int, rows: NDArray[Any]) -> None:
        del start  # chunks come in order
        step = self._chunk_shape[0]
        rows = np.ascontiguousarray(rows, self.array.dtype.newbyteorder("<"))
        self._made += map_decode(lambda at: self._chunk(rows[at : at + step]), range(0, len(rows), step))
        self._send(self._per_file)

    def _send(self, least: int) -> None:
        """Write files of chunks while there are at least so many."""
        while len(self._made) >= least:
            chunks, self._made = self._made[: self._per_file], self._made[self._per_file :]
            place = (self._n_files, *(0 for _ in self._chunk_shape[1:]))
            path = self._folder / self.array.metadata.encode_chunk_key(place)
            path.parent.mkdir(parents=True, exist_ok=True)
            pieces = (
                compose_shard([EncodedChunks.single(c) for c in chunks], self._per_file) if self._sharded else chunks
            )
            with path.open("wb") as file:
                file.writelines(pieces)
            self._n_files += 1

    def _chunk(self, rows: NDArray[Any]) -> bytes:
        if len(rows) < self._chunk_shape[0]:
            # A chunk is stored in full, also where the array ends within it.
            padded = np.zeros(self._chunk_shape, rows.dtype)
            padded[: len(rows)] = rows
            rows = padded
        return rows.tobytes() if self._encode is None else bytes(self._encode(rows))
