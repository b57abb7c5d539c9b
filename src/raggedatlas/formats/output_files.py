"""Places where a sink writes: an HDF5 file or a Zarr folder beside its final name, moved there at the end."""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import DuplicateError, MissingExtraError, SchemaError, SourceError, StoreError
from raggedatlas.formats.containers import filter_available
from raggedatlas.formats.element_writer import write_any
from raggedatlas.formats.hdf5_chunks import deflate, shuffle
from raggedatlas.store.arrays import compose_shard
from raggedatlas.store.codecs import EncodedChunks
from raggedatlas.store.runtime import DECODE_THREADS, map_decode, submit, warnings_as

STEP_BYTES = 128 << 20
"""New bytes after which they are sent to the disk."""


class PageFlusher:
    """Sends what is new in a file to the disk on another thread, some of it at a time.

    Parameters
    ----------
    path : Path
        A file that is being written, by this or another descriptor.
    """

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_RDWR)
        self._waiting = 0
        self._running: Future[None] | None = None

    def note(self, n_bytes: int) -> None:
        """Say that so many bytes are new.

        Raises
        ------
        OSError
            If earlier ones could not be written.
        """
        self._waiting += n_bytes
        if self._waiting >= STEP_BYTES and (self._running is None or self._running.done()):
            self._settle()
            self._waiting = 0
            self._running = submit(_send, self.file)

    def finish(self, header: bytes = b"") -> None:
        """Put a header at the front, wait until all of the file is on the disk, and let go of it.

        Raises
        ------
        OSError
            If any of it could not be written.
        """
        try:
            self._settle()
            os.pwrite(self.file, header, 0)
            os.fsync(self.file)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the file; what is under way is waited for."""
        if self._running is not None:
            self._running.exception()
            self._running = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def _settle(self) -> None:
        """Wait for what is under way; a system tells of a failed write only once, so it must be asked about."""
        if self._running is not None:
            self._running.result()
            self._running = None


def _send(file: int) -> None:
    # macOS has no fdatasync.
    getattr(os, "fdatasync", os.fsync)(file)


@dataclass(frozen=True, slots=True)
class Compression:
    """One way to compress arrays.

    Parameters
    ----------
    name : str
        What people call it.
    level : int
        How hard it tries; 0 where that means nothing.
    hdf5 : mapping
        What h5py calls it.
    chunk : callable or None
        Shuffled bytes of a chunk -> what an HDF5 file keeps of them, where we compress; None where the library must.
    plugin : int
        HDF5's number of the filter where that is a plugin, else 0.
    """

    name: str
    level: int
    hdf5: dict[str, Any]
    chunk: Callable[[Any], bytes] | None = None
    plugin: int = 0

    def zarr(self, zarr_format: int, dtype: np.dtype[Any]) -> Any:  # noqa: ANN401  (a codec of zarr or numcodecs, or None)
        """Return the compressor of an array of values of this type in Zarr format 2 or 3.

        Raises
        ------
        SourceError
            If Zarr does not know the compression.
        """
        from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

        codec = self._codec(dtype)
        if codec is None or zarr_format == 2:
            return codec
        if codec.codec_id == "blosc":
            return BloscCodec(cname=codec.cname, clevel=codec.clevel, shuffle="shuffle")
        return (ZstdCodec if codec.codec_id == "zstd" else GzipCodec)(level=codec.level)

    def zarr_encoder(self, zarr_format: int, dtype: np.dtype[Any]) -> Callable[[Any], bytes] | None:
        """Return what encodes the values of one chunk as that compressor does; None where nothing is compressed."""
        from numcodecs import GZip

        codec = GZip(self.level) if (self.name, zarr_format) == ("gzip", 3) else self._codec(dtype)
        return None if codec is None else codec.encode

    def _codec(self, dtype: np.dtype[Any]) -> Any:  # noqa: ANN401
        """Return the codec of numcodecs."""
        from numcodecs import Blosc, Zlib, Zstd

        if self.name == "lzf":
            raise SourceError("Zarr knows no lzf; choose zstd, gzip or blosc, or None.")
        if self.name == "blosc":
            return Blosc("lz4", self.level, Blosc.SHUFFLE)
        if self.name == "zstd" and dtype.kind in "iu" and dtype.itemsize > 1:
            # The high bytes of indices are alike: shuffled they take a third less, in a quarter of the time. Floats repeat whole.
            # Blosc calls every second level of zstd one of its own.
            return Blosc("zstd", min((self.level + 1) // 2, 9), Blosc.SHUFFLE)
        if self.name == "none":
            return None
        return (Zstd if self.name == "zstd" else Zlib)(self.level)


def compression_of(asked: str | None) -> Compression:
    """Understand ``"gzip"``, ``"zstd:9"`` and so on; None is none.

    Parameters
    ----------
    asked : str or None
        One of gzip (levels 1 to 9, by default 1), zstd (1 to 22, by default 3), blosc (LZ4, 1 to 9, by default 5), lzf,
        and where given a level after a colon.

    Raises
    ------
    SourceError
        If there is no such compression or level.

    Examples
    --------
    >>> compression_of("zstd:9").level
    9
    >>> compression_of(None).name
    'none'
    """
    name, colon, text = ("none", "", "") if asked is None else asked.partition(":")
    known = _KNOWN.get(name)
    if known is None:
        raise SourceError(
            f"There is no compression {asked!r}; choose one of {[n for n in _KNOWN if n != 'none']}, or None."
        )
    usual, most, make = known
    if colon and not (text.isdecimal() and 1 <= int(text) <= most):
        levels = f"levels 1 to {most}" if most else "no levels"
        raise SourceError(f"There is no compression {asked!r}; {name} has {levels}, as in 'gzip:4'.")
    return make(int(text) if colon else usual)


def require_plugin(compression: Compression) -> None:
    """Refuse a compression of HDF5 whose plugin is not installed.

    Raises
    ------
    MissingExtraError
        Naming the extra.
    """
    if compression.plugin and not filter_available(compression.plugin):
        raise MissingExtraError(
            f"HDF5 files with {compression.name} need a plugin, to write as to read them; install raggedatlas[plugins]."
        )


def _none(level: int) -> Compression:
    return Compression("none", level, {})


def _gzip(level: int) -> Compression:
    # Shuffled gzip 1 is both smaller and faster than the plain gzip 4 of h5py.
    options = {"compression": "gzip", "compression_opts": level, "shuffle": True}
    return Compression("gzip", level, options, partial(deflate, level=level))


def _lzf(level: int) -> Compression:
    return Compression("lzf", level, {"compression": "lzf", "shuffle": True})


def _zstd(level: int) -> Compression:
    from numcodecs import Zstd

    options = {"compression": 32015, "compression_opts": (level,), "shuffle": True}
    return Compression("zstd", level, options, Zstd(level).encode, 32015)


def _blosc(level: int) -> Compression:
    # Four numbers that the filter fills in itself, the level, its own shuffling of bytes, and LZ4.
    options = {"compression": 32001, "compression_opts": (0, 0, 0, 0, level, 1, 1)}
    return Compression("blosc", level, options, plugin=32001)


_KNOWN: dict[str, tuple[int, int, Callable[[int], Compression]]] = {
    "none": (0, 0, _none),
    "gzip": (1, 9, _gzip),
    "zstd": (3, 22, _zstd),
    "blosc": (5, 9, _blosc),
    "lzf": (0, 0, _lzf),
}


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


CHUNK = 1 << 16
"""Elements per chunk of HDF5 data and of the inner chunks of a Zarr shard."""

SHARD_CHUNKS = 64
"""Chunks per shard of Zarr 3."""

TILE_CHUNKS = 4
"""Such chunks that are one of Zarr 2, which has a file for each: about as large as those of zarr-python."""


class OutputFile(Protocol):
    """A tree that is being written out of sight."""

    path: Path

    def group(self, path: str, encoding: tuple[str, str] | None = None) -> Any:  # noqa: ANN401
        """Return a group, made if need be, with these encoding attributes."""
        ...

    def array(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Appender:
        """Make an array to append to; a shape of None is one axis of unknown length. All rows of a known one must come."""
        ...

    def element(self, path: str, value: Any) -> None:  # noqa: ANN401
        """Write a whole element."""
        ...

    def publish(self, header: bytes) -> None:
        """Close it and move it to its name."""
        ...

    def discard(self) -> None:
        """Remove it."""
        ...


class Hdf5Output:
    """An HDF5 file in the making.

    Parameters
    ----------
    path : Path
        Its final name.
    compression : str or None
        Of the larger arrays, as `compression_of` takes it.
    overwrite : bool
        Whether a file there may be replaced.
    userblock : int
        Bytes kept free at the front, for the header that MuData files carry.

    Raises
    ------
    DuplicateError
        If there is such a file.
    StoreError
        If the folder refuses.
    """

    def __init__(self, path: Path, *, compression: str | None, overwrite: bool, userblock: int = 0) -> None:
        import h5py

        self._compression = compression_of(compression)
        require_plugin(self._compression)
        self.path, self._overwrite = path, overwrite
        self._hidden = _hidden(path, overwrite=overwrite)
        with writable(path):
            self._file = h5py.File(self._hidden, "x", userblock_size=userblock)
            self._writeback = PageFlusher(self._hidden)

    def group(self, path: str, encoding: tuple[str, str] | None = None) -> Any:  # noqa: ANN401
        """Return a group, made if need be, with these encoding attributes."""
        return _encoded(self._file.require_group(path) if path else self._file, encoding)

    def array(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Appender:
        """Make an array to append to."""
        with writable(self.path):
            if shape is None:
                made = self._file.create_dataset(
                    path, (0,), dtype, maxshape=(None,), chunks=(CHUNK,), **self._compression.hdf5
                )
                return self._chunked(made)
            if 0 in shape:
                return Appender(self._file.create_dataset(path, shape, dtype), 1, grows=False)
            if not self._compression.hdf5:
                return self._placed(path, dtype, shape)
            made = self._file.create_dataset(path, shape, dtype, chunks=_row_chunks(shape), **self._compression.hdf5)
            return self._chunked(made)

    def _chunked(self, made: Any) -> Appender:  # noqa: ANN401  (h5py.Dataset)
        grows = made.maxshape[0] is None
        if self._compression.chunk is not None or not self._compression.hdf5:
            return ChunkAppender(made, self._compression.chunk, self._writeback, grows=grows)
        return Appender(made, made.chunks[0], grows=grows)

    def _placed(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Appender:
        """Make an array in one piece, as anndata's are, and take its place in the file, which is filled past the library."""
        import h5py

        how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        how.set_layout(h5py.h5d.CONTIGUOUS)
        how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        parent, _, name = path.rpartition("/")
        group = self._file.require_group(parent) if parent else self._file
        kind, room = h5py.h5t.py_create(dtype, logical=True), h5py.h5s.create_simple(shape)
        made = h5py.Dataset(h5py.h5d.create(group.id, name.encode(), kind, room, how))
        return ContiguousAppender(made, self._writeback)

    def element(self, path: str, value: Any) -> None:  # noqa: ANN401
        """Write a whole element."""
        with writable(self.path, path):
            # Tables and names stay readable without plugins; anndata strips compression from scalars, but not the shuffle filter.
            options = {"compression": "gzip", "compression_opts": 1} if self._compression.hdf5 else {}
            write_any(self._file, path, value, options)

    def publish(self, header: bytes) -> None:
        """Close it and move it to its name."""
        with writable(self.path):
            self._file.close()
            self._writeback.finish(header)
            if not self._overwrite:
                _refuse_existing(self.path)
            self._hidden.replace(self.path)

    def discard(self) -> None:
        """Remove it."""
        self._file.close()
        self._writeback.close()
        self._hidden.unlink(missing_ok=True)


class ZarrOutput:
    """A Zarr folder in the making.

    Parameters
    ----------
    path : Path
        Its final name.
    zarr_format : {2, 3}
        Format 3 is sharded.
    compression : str or None
        Of the larger arrays, as `compression_of` takes it.
    overwrite : bool
        Whether a folder there may be replaced.

    Raises
    ------
    DuplicateError
        If there is such a folder.
    StoreError
        If the place refuses.
    """

    def __init__(self, path: Path, *, zarr_format: int, compression: str | None, overwrite: bool) -> None:
        import zarr

        if zarr_format not in (2, 3):
            raise SourceError(f"There is no Zarr format {zarr_format!r}; choose 2 or 3.")
        self._compression = compression_of(compression)
        self._compression.zarr(zarr_format, np.dtype(np.float32))  # refuses what Zarr does not know
        self.path, self._overwrite, self._format = path, overwrite, zarr_format
        self._hidden = _hidden(path, overwrite=overwrite)
        with writable(path):
            self._root = zarr.open_group(store=str(self._hidden), mode="w-", zarr_format=2 if zarr_format == 2 else 3)

    def group(self, path: str, encoding: tuple[str, str] | None = None) -> Any:  # noqa: ANN401
        """Return a group, made if need be, with these encoding attributes."""
        return _encoded(self._root.require_group(path) if path else self._root, encoding)

    def array(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Appender:
        """Make an array to append to."""
        chunks = (CHUNK,) if shape is None else _row_chunks(shape)
        tiled = (chunks[0] * (TILE_CHUNKS if self._format == 2 else SHARD_CHUNKS), *chunks[1:])
        layout: dict[str, Any] = {"chunks": tiled} if self._format == 2 else {"chunks": chunks, "shards": tiled}
        compressor = self._compression.zarr(self._format, dtype)
        with writable(self.path):
            made = self._root.create_array(
                path, shape=(0,) if shape is None else shape, dtype=dtype, compressors=compressor, **layout
            )
        if 0 in (shape or ())[1:]:
            return Appender(made, tiled[0], grows=False)
        encode = self._compression.zarr_encoder(self._format, dtype)
        return ShardAppender(made, self._hidden, encode, grows=shape is None)

    def element(self, path: str, value: Any) -> None:  # noqa: ANN401
        """Write a whole element."""
        with writable(self.path, path):
            write_any(self._root, path, value, {})

    def publish(self, header: bytes) -> None:
        """Consolidate its metadata and move it to its name."""
        import zarr

        with writable(self.path), warnings_as("ignore"):
            zarr.consolidate_metadata(self._root.store)
            old = self._hidden.with_name(f"{self._hidden.name}.old")
            if self._overwrite and self.path.exists():
                self.path.rename(old)
            else:
                _refuse_existing(self.path)
            self._hidden.rename(self.path)
            if old.exists():
                _remove(old)

    def discard(self) -> None:
        """Remove it."""
        shutil.rmtree(self._hidden, ignore_errors=True)


@contextmanager
def writable(path: Path, element: str = "") -> Iterator[None]:
    """Turn a refusal of the file system into a `StoreError` that names the file."""
    try:
        yield
    except (SourceError, SchemaError, StoreError):
        raise
    except (OSError, RuntimeError) as error:
        raise StoreError(
            f"{path}{': ' + element if element else ''} cannot be written ({error}); check the folder, its permissions and "
            "the space left."
        ) from error


def _encoded(group: Any, encoding: tuple[str, str] | None) -> Any:  # noqa: ANN401
    if encoding is not None:
        group.attrs["encoding-type"], group.attrs["encoding-version"] = encoding
    return group


def _row_chunks(shape: tuple[int, ...]) -> tuple[int, ...]:
    across = max(1, int(np.prod(shape[1:], dtype=object)))
    return (max(1, min(CHUNK // across, shape[0])), *(max(1, n) for n in shape[1:]))


def _hidden(path: Path, *, overwrite: bool) -> Path:
    if not overwrite:
        _refuse_existing(path)
    if not path.parent.is_dir():
        raise StoreError(f"{path} cannot be written: there is no folder {path.parent}; make it first.")
    return path.with_name(f".{path.name}.{uuid4().hex[:8]}.partial")


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise DuplicateError(f"{path} exists; choose another name, or pass overwrite=True to replace it.")


def _remove(path: Path) -> None:
    remover: Callable[[Path], None] = shutil.rmtree if path.is_dir() else Path.unlink
    remover(path)
