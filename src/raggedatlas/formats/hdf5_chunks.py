"""Read and encode chunks of HDF5 datasets without the HDF5 library: `pread`, deflate and byte shuffling in several threads."""

import functools
import os
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.store.ranges import RemoteFile
from raggedatlas.store.references import ChunkTable
from raggedatlas.store.runtime import DECODE_THREADS, find_shared, map_decode, shared_pool

SMALLEST = 1 << 12
"""Smaller chunks (bytes) are read through the HDF5 library, whose loop over them is faster than ours."""

SPAN_BYTES = 1 << 20
"""Minimum work of one thread, in decoded bytes."""

COPY_BYTES = 1 << 22
"""Minimum work of one thread for uncompressed data, in bytes: handing over less costs more than copying it."""

LARGEST_BAND = 1 << 28
"""Larger rows of chunks (bytes) are read through the HDF5 library."""

AHEAD_BYTES = 8 << 20
"""Bytes of a remote file that a thread asks for before it decodes the first of them."""

KEPT_BYTES = 1 << 26
"""Larger blocks (bytes) do not come from the buffer pool, which would hold their memory as long as the reader exists."""

_DEFLATE, _SHUFFLE = 1, 2


@dataclass(frozen=True, slots=True)
class _Placed:
    """Offsets and sizes of the chunks of a dataset by grid position; a size of -1 means that the chunk was never written."""

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    plain: NDArray[np.bool_]


class Hdf5ChunkReader:
    """Reads rows of an HDF5 dataset directly from the file; in ascending order, each chunk is decoded only once.

    Parameters
    ----------
    dataset : h5py.Dataset
        Dataset accepted by `open_chunk_reader`.
    chunks : tuple of int
        Chunk shape; for a contiguous dataset, a number of rows and the other axes.
    placed : _Placed
        Location of the chunks.
    filters : tuple of int
        HDF5 filter numbers in the order of encoding.
    """

    def __init__(self, dataset: Any, chunks: tuple[int, ...], placed: _Placed, filters: tuple[int, ...]) -> None:  # noqa: ANN401
        self._dataset, self._placed, self._filters = dataset, placed, filters
        self._file = dataset.file
        self._remote = remote_file(self._file)
        self.shape: tuple[int, ...] = tuple(dataset.shape)
        self._chunks, self._dtype = chunks, dataset.dtype
        self._grid = tuple(-(-n // c) for n, c in zip(self.shape, chunks, strict=True))
        self._across = int(np.prod(self._grid[1:], dtype=np.int64))
        self._step = chunks[0]
        self._row_bytes = int(np.prod(self.shape[1:], dtype=np.int64)) * self._dtype.itemsize
        self._contiguous = dataset.chunks is None
        self._whole_rows = self._across == 1 and self.shape[1:] == chunks[1:]
        self._held: tuple[int, NDArray[Any]] | None = None
        self._descriptor = -1
        self._ring = shared_pool()
        stored = np.maximum(placed.sizes, 0).sum() if not self._contiguous else dataset.size * dataset.dtype.itemsize
        # Bands that a remote file is asked for at once.
        self._portion = max(1, int(AHEAD_BYTES * len(placed.sizes) // self._across // max(int(stored), 1)))

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``[start, stop)`` in the stored dtype.

        Raises
        ------
        OSError, ValueError
            If the file is truncated or a chunk is damaged.
        SourceError
            If the file was closed.
        """
        shape = (stop - start, *self.shape[1:])
        # From the pool if small: the system zeroes new pages, which takes longer than reading.
        n = int(np.prod(shape, dtype=np.int64))
        if n * self._dtype.itemsize > KEPT_BYTES:
            out = np.empty(shape, self._dtype)
        else:
            out = self._ring.take(n, self._dtype).reshape(shape)
        if not out.size:
            return out
        # Asked for in each call: once the file is closed, the number may belong to another file.
        if not self._dataset.id.valid:
            raise SourceError("The file was closed while its matrices were still read; open it again.")
        self._descriptor = -1 if self._remote is not None else int(self._file.id.get_vfd_handle())
        first, last = start // self._step, -(-stop // self._step)
        if self._whole_rows and not self._filters:
            self._spread(first, last, lambda a, b: self._copy(a, b, start, out))
            self._load_ahead(first, last)
            return out
        kept: dict[int, NDArray[Any]] = {} if self._held is None else dict((self._held,))
        # Only the first and last band can be partly outside the block; the last one is kept for the next block.
        for band in {first, last - 1} - set(kept):
            low = band * self._step
            if low < start or low + self._step > stop:
                kept[band] = np.empty((min(self._step, self.shape[0] - low), *self.shape[1:]), self._dtype)
        old = self._held[0] if self._held is not None else -1

        # Threads only fill arrays that exist by now, and no two of them get the same band.
        def decode(a: int, b: int) -> None:
            for band in range(a, b):
                if not (band - a) % self._portion:
                    # The next portion too, which arrives while this one is decoded.
                    self._load(band, min(band + 2 * self._portion, b))
                low = band * self._step
                if band != old:
                    whole = kept.get(band)
                    self._band(band, out[low - start : low - start + self._step] if whole is None else whole)
                if band in kept:
                    end = min(low + self._step, stop, self.shape[0])
                    begin = max(low, start)
                    out[begin - start : end - start] = kept[band][begin - low : end - low]

        self._spread(first, last, decode)
        self._held = (last - 1, kept[last - 1]) if last - 1 in kept else None
        self._load_ahead(first, last)
        return out

    def _load_ahead(self, first: int, last: int) -> None:
        """Begin to fetch as many bands of a remote file as were read, since matrices are read in order."""
        self._load(last, min(last + min(last - first, 2 * self._portion), self._grid[0]))

    def _load(self, first: int, last: int) -> None:
        """Begin to fetch bands of a remote file."""
        if self._remote is None or last <= first:
            return
        part = slice(first * self._across, last * self._across)
        offsets, sizes = self._placed.offsets[part], self._placed.sizes[part]
        if self._contiguous:
            n_rows = min(last * self._step, self.shape[0]) - first * self._step
            self._remote.load([(int(offsets[0]), n_rows * self._row_bytes)])
        else:
            there = sizes > 0
            self._remote.load(zip(offsets[there].tolist(), sizes[there].tolist(), strict=True))

    def _spread(self, first: int, last: int, work: Callable[[int, int], None]) -> None:
        """Distribute ranges of bands over the threads."""
        n_bytes = (last - first) * self._step * max(self._row_bytes, 1)
        # Copying uses half of the threads, and leaves the others to the consumers of the rows.
        copying = max(1, DECODE_THREADS // 2), n_bytes // COPY_BYTES
        most = (4 * DECODE_THREADS, n_bytes // SPAN_BYTES) if self._filters else copying
        n = min(last - first, max(1, min(most)))
        edges = np.linspace(first, last, n + 1).astype(int).tolist()
        map_decode(lambda span: work(*span), list(pairwise(edges)))

    def _copy(self, first: int, last: int, start: int, out: NDArray[Any]) -> None:
        """Read bands that are stored as they are, neighbours in the file at once."""
        stop = start + len(out)
        rows = np.arange(first, last) * self._step
        low, high = np.maximum(rows, start), np.minimum(rows + self._step, stop)
        offsets = self._placed.offsets[first:last] + (low - rows) * self._row_bytes
        sizes = (high - low) * self._row_bytes
        absent = self._placed.sizes[first:last] < 0
        joined = (offsets[1:] == offsets[:-1] + sizes[:-1]) & ~absent[1:] & ~absent[:-1]
        edges = [0, *(np.flatnonzero(~joined) + 1).tolist(), last - first]
        for a, b in pairwise(edges):
            part = out[low[a] - start : high[b - 1] - start]
            if absent[a]:
                part[...] = self._dataset.fillvalue
            else:
                self._fetch_into(int(offsets[a]), part.reshape(-1).view(np.uint8).data)

    def _band(self, band: int, out: NDArray[Any]) -> None:
        """Decode one row of chunks."""
        for i in range(self._across):
            tile = self._tile(band * self._across + i, out if self._whole_rows else None)
            if tile is None:
                continue
            corner = np.unravel_index(i, self._grid[1:])
            spans = [slice(c * w, c * w + w) for c, w in zip(corner, self._chunks[1:], strict=True)]
            target = out[(slice(None), *spans)]
            target[...] = tile[tuple(slice(n) for n in target.shape)]

    def _tile(self, number: int, out: NDArray[Any] | None) -> NDArray[Any] | None:
        """Decode one chunk, into `out` where it fills that whole."""
        # The last chunk is stored at full size, while `out` ends with the array.
        if out is not None and len(out) != self._step:
            out = None
        tile = np.empty(self._chunks, self._dtype) if out is None else out
        size = int(self._placed.sizes[number])
        if size < 0:
            tile[...] = self._dataset.fillvalue
        else:
            data: Any = np.empty(size, np.uint8)
            self._fetch_into(int(self._placed.offsets[number]), data.data)
            filters = () if self._placed.plain[number] else self._filters
            if _DEFLATE in filters:
                data = inflate(data, tile.nbytes)
            if len(data) != tile.nbytes:
                raise ValueError(f"a chunk has {len(data):,} bytes instead of {tile.nbytes:,}")
            if _SHUFFLE in filters:
                unshuffle(data, tile.reshape(-1))
            else:
                tile.reshape(-1)[...] = np.frombuffer(data, self._dtype)
        return None if out is not None else tile

    def _fetch_into(self, offset: int, room: memoryview) -> None:
        while len(room):
            if self._remote is not None:
                n = self._remote.read_at(offset, room)
            else:
                # HDF5 owns the descriptor; pread does not move its position.
                n = os.preadv(self._descriptor, [room], offset)
            if not n:
                raise OSError("the file ends within a chunk")
            room, offset = room[n:], offset + n


def open_chunk_reader(array: Any) -> Hdf5ChunkReader | None:  # noqa: ANN401  (any array)
    """Locate the chunks of an HDF5 dataset, if it can be read without the library.

    Parameters
    ----------
    array : h5py.Dataset or anything
        What is to be read.

    Returns
    -------
    Hdf5ChunkReader or None
        None for what must be left to its own library: other kinds of arrays, other filters than gzip and shuffle,
        tiny chunks, files that are being written, types that HDF5 and NumPy lay out differently.
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
        piece = locate_chunks(array)[0]
        return None if piece.sizes[0] < 0 or filters else _contiguous(array, int(piece.offsets[0]))
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
    placed = _Placed(table.offsets, table.sizes, skipped == every)
    return Hdf5ChunkReader(array, tuple(array.chunks), placed, filters)


def remote_file(file: Any) -> RemoteFile | None:  # noqa: ANN401  (an h5py.File)
    """Return the remote file that h5py reads through, which it names by its `repr`."""
    opened: RemoteFile | None = find_shared(f"file {file.filename}") if file.driver == "fileobj" else None
    return opened


def _contiguous(dataset: Any, offset: int) -> Hdf5ChunkReader:  # noqa: ANN401
    row_bytes = int(np.prod(dataset.shape[1:], dtype=np.int64)) * dataset.dtype.itemsize
    step = max(1, SPAN_BYTES // max(1, row_bytes))
    n = -(-dataset.shape[0] // step)
    offsets = offset + np.arange(n, dtype=np.int64) * step * row_bytes
    # `_copy` computes sizes itself; here 0 only says that the rows are present, as -1 would not.
    placed = _Placed(offsets, np.zeros(n, np.int64), np.ones(n, np.bool_))
    return Hdf5ChunkReader(dataset, (step, *dataset.shape[1:]), placed, ())


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
    """Find the chunks of an HDF5 dataset in its file.

    Parameters
    ----------
    dataset : h5py.Dataset
        Contiguous or chunked.

    Returns
    -------
    table : ChunkTable
        Where they are; a contiguous dataset is in one piece, of size -1 if it was never written.
    skipped : (n,) uint32
        Filters that each chunk skipped, as HDF5's mask: bit i is the i-th filter.

    Examples
    --------
    >>> import h5py
    >>> with h5py.File("x", "w", driver="core", backing_store=False) as file:
    ...     table, _ = locate_chunks(file.create_dataset("x", (4, 4), "f4", chunks=(2, 2)))
    >>> table.sizes.tolist()
    [-1, -1, -1, -1]
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


@cache
def deflater() -> Any:  # noqa: ANN401  (a module with the functions of zlib)
    """Return `isal.isal_zlib` if the extra `isal` is installed, else `zlib`; both read each other's output.

    Examples
    --------
    >>> zlib.decompress(deflater().compress(b"cells", 1))
    b'cells'
    """
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


def inflate(data: Any, n_bytes: int) -> bytes:  # noqa: ANN401  (any buffer)
    """Decompress a zlib stream that must contain exactly `n_bytes`; never allocates more than that.

    Parameters
    ----------
    data : buffer
        Compressed bytes.
    n_bytes : int
        Expected decompressed size.

    Raises
    ------
    ValueError
        If the stream is damaged or contains more or fewer bytes.

    Examples
    --------
    >>> inflate(zlib.compress(b"cells"), 5)
    b'cells'
    """
    engine = deflater()
    stream = engine.decompressobj()
    try:
        # zlib takes a limit of 0 for none; chunks that get here have at least `SMALLEST` bytes.
        out: bytes = stream.decompress(data, n_bytes)
        # zlib verifies the checksum only when the end of the stream is reached.
        surplus = b"" if stream.eof else stream.decompress(stream.unconsumed_tail, 1)
    except engine.error as error:
        raise ValueError(f"a compressed chunk is damaged: {error}") from error
    if len(out) != n_bytes or surplus or not stream.eof:
        raise ValueError(
            f"a compressed chunk holds {'more' if surplus else 'fewer'} bytes than the {n_bytes:,} of a chunk"
        )
    return out


def deflate(data: Any, level: int) -> bytes:  # noqa: ANN401  (any buffer)
    """Compress to a zlib stream; ISA-L supports levels up to 3 and uses 3 for higher ones, zlib up to 9."""
    engine = deflater()
    made: bytes = engine.compress(data, level if engine is zlib else min(level, 3))
    return made


def shuffle(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Shuffle bytes: the first bytes of all values, then the second bytes, and so on.

    Parameters
    ----------
    values : (n,) array
        Values of any fixed width.

    Returns
    -------
    (itemsize, n) uint8

    Examples
    --------
    >>> shuffle(np.array([1, 2], "<u2")).tolist()
    [[1, 2], [0, 0]]
    """
    width = values.dtype.itemsize
    out = np.empty((width, len(values)), np.uint8)
    words = values.view(f"<u{width}") if width in (1, 2, 4, 8) else None
    if words is None:
        out[...] = values.view(np.uint8).reshape(-1, width).T
        return out
    for i in range(width):
        # Shifting words is several times faster than copying every fourth byte.
        np.copyto(out[i], words >> words.dtype.type(8 * i) if i else words, casting="unsafe")
    return out


def unshuffle(data: Any, out: NDArray[Any]) -> None:  # noqa: ANN401  (any buffer)
    """Reverse `shuffle` into an array.

    Parameters
    ----------
    data : buffer
        ``itemsize * n`` bytes.
    out : (n,) array
        Receives the values.

    Examples
    --------
    >>> out = np.empty(2, "<u2")
    >>> unshuffle(bytes([1, 2, 0, 0]), out)
    >>> out.tolist()
    [1, 2]
    """
    width = out.dtype.itemsize
    columns = np.frombuffer(data, np.uint8).reshape(width, len(out))
    if width not in (1, 2, 4, 8):
        out.view(np.uint8).reshape(-1, width)[...] = columns.T
        return
    words = out.view(f"<u{width}")
    words[...] = columns[width - 1]
    for i in range(width - 2, -1, -1):
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, columns[i], out=words)
