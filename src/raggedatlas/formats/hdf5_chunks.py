"""Read HDF5 datasets without the HDF5 library: where their chunks are, and their bytes in several threads."""

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.store.codecs import ChunkDecoder
from raggedatlas.store.file_arrays import FileArray, Ranges, read_file, read_pieces
from raggedatlas.store.ranges import RemoteFile
from raggedatlas.store.references import ChunkTable
from raggedatlas.store.runtime import DECODE_THREADS, LRUCache, find_shared, map_decode, shared_pool
from raggedatlas.store.shards import plan_pieces

SMALLEST = 1 << 12
"""Smaller chunks (bytes) are read through the HDF5 library, whose loop over them is faster than ours."""

COPY_BYTES = 1 << 22
"""Minimum work of one thread that reads bytes: handing over less costs more than copying it."""

LARGEST_BAND = 1 << 28
"""Larger rows of chunks (bytes) are read through the HDF5 library."""

AHEAD_BYTES = 64 << 20
"""Bytes of a remote file that a read asks for at most before it needs them: half of what is held of a file."""

KEPT_BYTES = 1 << 26
"""Larger blocks (bytes) do not come from the buffer pool, which would hold their memory as long as the reader exists."""

FILTERS = {
    1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf", 32001: "blosc",
    32004: "lz4", 32008: "bitshuffle", 32013: "zfp", 32015: "zstd", 32026: "blosc2",
}  # fmt: skip
"""Registered number of an HDF5 filter -> its name."""

_DEFLATE, _SHUFFLE = 1, 2


class Hdf5ChunkReader:
    """Reads rows of an HDF5 dataset directly from the file; in ascending order, each chunk is decoded only once.

    `dataset` is one that `open_chunk_reader` accepted. `chunks` is the shape of a chunk, for a contiguous dataset that
    of the dataset. `table` tells where the chunks are, and `as_is`, (n,), which of them skipped the filters. `filters`
    are HDF5's numbers in the order of encoding.
    """

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401
        chunks: tuple[int, ...],
        table: ChunkTable,
        as_is: NDArray[np.bool_],
        filters: tuple[int, ...],
    ) -> None:
        self._dataset, self._file = dataset, dataset.file
        self._remote = remote_file(self._file)
        self.shape: tuple[int, ...] = tuple(dataset.shape)
        dtype = dataset.dtype
        decoder = ChunkDecoder(
            "zlib" if _DEFLATE in filters else "none", checksum=False,
            shuffled=dtype.itemsize if _SHUFFLE in filters else 1,
        )  # fmt: skip
        self._array = FileArray(
            self.shape, dtype, chunks, table, decoder, np.asarray(dataset.fillvalue, dtype), self._fetch,
            lambda _, fault: ValueError(fault), as_is=as_is,
        )  # fmt: skip
        self.release()
        self._descriptor = -1
        self._ring = shared_pool()

    def release(self) -> None:
        """Release the chunks that are kept."""
        # One row of chunks, of which the next read takes the rest. Memory of those before is used again.
        kept: LRUCache[NDArray[Any]] = LRUCache(self._array.n_bytes * self._array.n_across, attrgetter("nbytes"))
        self._array = replace(self._array, kept=kept)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)`` in the stored dtype.

        A truncated file or a damaged chunk raises `OSError` or `ValueError`, for the caller to convert; a closed file
        `SourceError`.
        """
        shape, array = (stop - start, *self.shape[1:]), self._array
        # From the pool if small: the system zeroes new pages, which takes longer than reading.
        n = int(np.prod(shape, dtype=np.int64))
        if n * array.dtype.itemsize > KEPT_BYTES:
            out = np.empty(shape, array.dtype)
        else:
            out = self._ring.take(n, array.dtype).reshape(shape)
        if not out.size:
            return out
        # Asked for in each call: once the file is closed, the number may belong to another file.
        if not self._dataset.id.valid:
            raise SourceError("The file was closed while its matrices were still read; open it again.")
        self._descriptor = -1 if self._remote is not None else int(self._file.id.get_vfd_handle())
        # Matrices are read in order: what comes behind arrives while this is decoded.
        self._load(start, min(stop + (stop - start), self.shape[0]))
        plan = plan_pieces(np.array([start]), np.array([stop]), array.chunk_shape[0])
        read_pieces(array, plan, out, DECODE_THREADS)
        return out

    def _load(self, start: int, stop: int) -> None:
        """Begin to fetch rows of a remote file, as many as there is room for."""
        if self._remote is None:
            return
        array, table = self._array, self._array.table
        if array.in_rows and array.chunk_shape == self.shape:
            width = int(table.sizes[0]) // self.shape[0]
            self._remote.load([(int(table.offsets[0]) + start * width, min((stop - start) * width, AHEAD_BYTES))])
            return
        rows = array.chunk_shape[0]
        numbers = array.numbers(np.arange(start // rows, -(-stop // rows)))
        numbers = numbers[table.sizes[numbers] > 0]
        numbers = numbers[np.cumsum(table.sizes[numbers]) <= AHEAD_BYTES]
        self._remote.load(zip(table.offsets[numbers].tolist(), table.sizes[numbers].tolist(), strict=True))

    def _fetch(self, ranges: Ranges, _: Sequence[int]) -> None:
        """Read ranges of bytes."""
        if self._remote is not None and not self._array.in_rows:
            self._remote.load(zip(ranges.offsets.tolist(), ranges.sizes.tolist(), strict=True))

        def fetch(job: Ranges) -> None:
            # HDF5 owns the descriptor, whose position stays as it is.
            if not (read_file(self._descriptor, job) if self._remote is None else _read_remote(self._remote, job)):
                raise OSError("the file ends within a chunk")

        # Copying uses half of the threads, and leaves the others to the consumers of the rows.
        n = max(1, DECODE_THREADS // 2)
        map_decode(fetch, ranges.jobs(max(COPY_BYTES, -(-int(ranges.sizes.sum()) // n))))


def _read_remote(file: RemoteFile, job: Ranges) -> bool:
    columns = (column.tolist() for column in (job.offsets, job.sizes, job.targets))
    for offset, size, target in zip(*columns, strict=True):
        done = 0
        while done < size:
            n = file.read_at(offset + done, job.room[target + done : target + size].data)
            if not n:
                return False
            done += n
    return True


def open_chunk_reader(array: Any) -> Hdf5ChunkReader | None:  # noqa: ANN401  (any array)
    """Locate the chunks of an HDF5 dataset, if it can be read without the library.

    None for what must be left to its own library: other kinds of arrays, other filters than gzip and shuffle, tiny
    chunks, files that are being written, types that HDF5 and NumPy lay out differently.
    """
    if type(array).__module__.partition(".")[0] != "h5py":
        return None
    # Chunks in the cache of an open writer are not in the file yet.
    file, dtype = array.file, array.dtype
    if file.mode != "r" or not (file.driver == "sec2" or remote_file(file) is not None):
        return None
    if not array.shape or not array.size or array.is_virtual:
        return None
    if dtype.kind not in "iuf" or dtype.itemsize > 8 or not is_native(array):
        return None
    filters = tuple(code for code, _ in filters_of(array))
    if array.chunks is None:
        table, _ = locate_chunks(array)
        if filters or table.sizes[0] < 0:
            return None
        return Hdf5ChunkReader(array, tuple(array.shape), table, np.ones(1, np.bool_), ())
    if filters not in ((), (_DEFLATE,), (_SHUFFLE, _DEFLATE)):
        return None
    chunk_bytes = int(np.prod(array.chunks, dtype=object)) * array.dtype.itemsize
    band_bytes = chunk_bytes * int(
        np.prod([-(-n // c) for n, c in zip(array.shape[1:], array.chunks[1:], strict=True)])
    )
    if chunk_bytes < SMALLEST or band_bytes > LARGEST_BAND:
        return None
    table, skipped = locate_chunks(array)
    every = (1 << len(filters)) - 1
    # If a chunk skipped only some filters, HDF5 reads the dataset.
    if not np.isin(skipped, (0, every)).all():
        return None
    return Hdf5ChunkReader(array, tuple(array.chunks), table, skipped == every, filters)


def remote_file(file: Any) -> RemoteFile | None:  # noqa: ANN401  (an h5py.File)
    """Return the remote file that h5py reads through, which it names by its `repr`."""
    opened: RemoteFile | None = find_shared(f"file {file.filename}") if file.driver == "fileobj" else None
    return opened


def filters_of(dataset: Any) -> tuple[tuple[int, tuple[int, ...]], ...]:  # noqa: ANN401  (an h5py.Dataset)
    """Return the number and the settings of each filter of an HDF5 dataset, in the order of encoding."""
    plist = dataset.id.get_create_plist()
    found = (plist.get_filter(i) for i in range(plist.get_nfilters()))
    return tuple((int(code), tuple(map(int, settings))) for code, _, settings, _ in found)


def is_native(dataset: Any) -> bool:  # noqa: ANN401  (an h5py.Dataset)
    """Return whether the bytes of the values are those of NumPy's dtype: HDF5 also has types of other precision and padding."""
    import h5py

    return bool(dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype)))


def locate_chunks(dataset: Any) -> tuple[ChunkTable, NDArray[np.uint32]]:  # noqa: ANN401  (an h5py.Dataset)
    """Find the chunks of an HDF5 dataset in its file: where they are, and which filters each skipped.

    A contiguous dataset is in one piece, of size -1 if it was never written. Skipped filters, (n,), are HDF5's mask:
    bit i is the i-th filter.
    """
    if dataset.chunks is None:
        # In a file with a user block, HDF5 gives an offset for what was never written, too.
        offset = dataset.id.get_offset() if dataset.id.get_storage_size() else None
        size = -1 if offset is None else dataset.size * dataset.dtype.itemsize
        return ChunkTable(np.zeros(1, np.int32), np.array([offset or 0]), np.array([size])), np.zeros(1, np.uint32)
    chunks = dataset.chunks
    grid = [-(-n // c) for n, c in zip(dataset.shape, chunks, strict=True)]
    n_chunks = int(np.prod(grid, dtype=np.int64))
    strides = np.cumprod([1, *grid[:0:-1]])[::-1].tolist()
    table = ChunkTable(np.zeros(n_chunks, np.int32), np.zeros(n_chunks, np.int64), np.full(n_chunks, -1, np.int64))
    skipped = np.zeros(n_chunks, np.uint32)

    def note(info: Any) -> None:  # noqa: ANN401
        number = sum(o // c * s for o, c, s in zip(info.chunk_offset, chunks, strides, strict=True))
        table.offsets[number], table.sizes[number] = info.byte_offset, info.size
        skipped[number] = info.filter_mask

    dataset.id.chunk_iter(note)
    user_block = dataset.file.userblock_size
    if user_block and _offsets_leave_out_the_user_block():
        table.offsets[:] += np.where(table.sizes >= 0, user_block, 0)
    return table, skipped


@functools.cache
def _offsets_leave_out_the_user_block() -> bool:
    """Ask the installed HDF5: releases differ in whether a chunk's address counts from the file's start (1.14.2 does not)."""
    import h5py

    marker = np.frombuffer(b"where is a chunk", np.uint8)
    told: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.h5"
        with h5py.File(path, "w", userblock_size=512) as file:
            dataset = file.create_dataset("x", data=marker, chunks=marker.shape)
            file.flush()
            dataset.id.chunk_iter(lambda info: told.append(info.byte_offset))
        return path.read_bytes().find(marker.tobytes()) == told[0] + 512
