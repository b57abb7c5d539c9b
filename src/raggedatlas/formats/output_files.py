"""Write HDF5 files and Zarr folders under a temporary name and rename them when complete: compression, appenders, outputs."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import (
    AtlasError,
    DuplicateError,
    MissingExtraError,
    SchemaError,
    SourceError,
    StoreError,
)
from raggedatlas.formats.containers import filter_available
from raggedatlas.formats.element_writer import write_element
from raggedatlas.store.byte_filters import deflate, shuffle
from raggedatlas.store.codecs import EncodedChunks
from raggedatlas.store.runtime import DECODE_THREADS, map_decode, submit, warnings_as
from raggedatlas.store.shards import compose_shard
from raggedatlas.store.storage_errors import failure, store_errors

STEP_BYTES = 128 << 20
"""Number of new bytes after which they are flushed to disk."""


class PageFlusher:
    """Flushes new data of a file to disk in a background thread while the file is still being written, by this or another descriptor."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b", buffering=0)
        self._pending = 0
        self._running: Future[None] | None = None

    def note(self, n_bytes: int) -> None:
        """Record that `n_bytes` were written, and start a flush if enough are pending; raise the `OSError` of an earlier flush that failed."""
        self._pending += n_bytes
        if self._pending >= STEP_BYTES and (self._running is None or self._running.done()):
            self._join()
            self._pending = 0
            # macOS has no fdatasync.
            self._running = submit(getattr(os, "fdatasync", os.fsync), self._file.fileno())

    def write(self, at: int, left: memoryview) -> None:
        """Write bytes at an offset, and note them."""
        n_bytes = len(left)
        # Only one thread writes, and Windows has no `pwrite`.
        self._file.seek(at)
        while left:
            left = left[self._file.write(left) :]
        self.note(n_bytes)

    def finish(self, header: bytes = b"") -> None:
        """Write the header, wait until the complete file is on disk, and close it; raise the `OSError` of any write that failed."""
        try:
            self.write(0, memoryview(header))
            self._join()
            os.fsync(self._file.fileno())
        finally:
            self.close()

    def close(self) -> None:
        """Wait for a running flush and close the file."""
        if self._running is not None:
            # Waits as `result` does but raises nothing, because `close` also runs while an error is handled.
            self._running.exception()
            self._running = None
        self._file.close()

    def _join(self) -> None:
        """Wait for a running flush; the system reports a failed write only once, so its result must be checked."""
        if self._running is not None:
            self._running.result()
            self._running = None


@dataclass(frozen=True, slots=True)
class Compression:
    """A compression of arrays."""

    name: str
    level: int  # how hard it tries; 0 where that means nothing
    hdf5: dict[str, Any]  # what h5py calls it
    # Shuffled bytes of a chunk -> what an HDF5 file keeps of them, where we compress; None where the library must.
    chunk: Callable[[Any], bytes] | None = None
    plugin: int = 0  # HDF5's number of the filter where that is a plugin

    def zarr(self, zarr_format: int, dtype: np.dtype[Any]) -> Any:  # noqa: ANN401  (a codec of zarr or numcodecs, or None)
        """Return the compressor of an array of values of this type in Zarr format 2 or 3; None where nothing is compressed."""
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
            # The high bytes of indices are alike: shuffling makes them a third smaller, in a quarter of the time.
            # Each level of Blosc is two levels of zstd.
            return Blosc("zstd", min((self.level + 1) // 2, 9), Blosc.SHUFFLE)
        if self.name == "none":
            return None
        return (Zstd if self.name == "zstd" else Zlib)(self.level)


def compression_of(asked: str | None) -> Compression:
    """Parse a compression such as ``"gzip"`` or ``"zstd:9"``; None means uncompressed.

    One of gzip (levels 1 to 9, by default 1), zstd (1 to 22, by default 3), blosc (LZ4, 1 to 9, by default 5) and lzf;
    a level follows a colon.

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


def _zstd(level: int) -> Compression:
    from numcodecs import Zstd

    options = {"compression": 32015, "compression_opts": (level,), "shuffle": True}
    return Compression("zstd", level, options, Zstd(level).encode, 32015)


_KNOWN: dict[str, tuple[int, int, Callable[[int], Compression]]] = {
    "none": (0, 0, lambda level: Compression("none", level, {})),
    # Shuffled gzip 1 is both smaller and faster than the plain gzip 4 of h5py.
    "gzip": (
        1, 9,
        lambda level: Compression(
            "gzip", level, {"compression": "gzip", "compression_opts": level, "shuffle": True}, partial(deflate, level=level)
        ),
    ),
    "zstd": (3, 22, _zstd),
    # Options of the Blosc filter: four reserved numbers, the level, byte shuffling, LZ4.
    "blosc": (
        5, 9,
        lambda level: Compression(
            "blosc", level, {"compression": 32001, "compression_opts": (0, 0, 0, 0, level, 1, 1)}, plugin=32001
        ),
    ),
    "lzf": (0, 0, lambda level: Compression("lzf", level, {"compression": "lzf", "shuffle": True})),
}  # fmt: skip


BATCH_BYTES = 4 << 20
"""Chunks are compressed in batches of at least this many bytes."""


class Appender:
    """Appends rows to an array of h5py or zarr, in complete chunks until `flush`.

    `unit` is the number of rows per write; `grows` tells whether the array is resized as rows are appended. `put` takes
    the first row of each write and its rows; by default they are assigned.
    """

    def __init__(
        self,
        array: Any,  # noqa: ANN401
        unit: int,
        *,
        grows: bool,
        put: Callable[[int, NDArray[Any]], None] | None = None,
    ) -> None:
        self.array, self._unit, self._grows = array, unit, grows
        # None for the default: its bound method would be a cycle, which keeps the array until garbage is collected.
        self._given_put = put
        self.n_rows = 0
        self._n_written = 0
        self._pending: list[NDArray[Any]] = []

    def append(self, values: NDArray[Any]) -> None:
        """Append rows; `SchemaError` if they exceed the length of the array."""
        self.n_rows += len(values)
        if not self._grows and self.n_rows > self.array.shape[0]:
            raise SchemaError(
                f"{self.array.name} takes {self.array.shape[0]:,} rows or entries, but more were written. Announce all of them to begin()."
            )
        before = sum(len(part) for part in self._pending)
        if before:
            # Fill the pending rows up to one unit first; all complete units after that are written without a copy.
            head = values[: self._unit - before]
            self._pending.append(head.copy())
            values = values[len(head) :]
            if before + len(head) == self._unit:
                self._write(np.concatenate(self._pending))
                self._pending = []
        whole = len(values) - len(values) % self._unit
        self._write(values[:whole])
        if whole < len(values):
            # Copied so that a small remainder does not keep a large block alive.
            self._pending.append(values[whole:].copy())

    def flush(self) -> None:
        """Write pending rows."""
        if self._pending:
            self._write(np.concatenate(self._pending))
            self._pending = []

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
        if self._given_put is None:
            self.array[start : start + len(rows)] = rows
        else:
            self._given_put(start, rows)


class ShardAppender(Appender):
    """Appends to a Zarr array on disk whose chunks span all axes but the first, encoding in several threads.

    zarr-python encodes on one core; this writes the same bytes to the same files. Chunks are encoded as rows arrive and
    kept until their shard is complete, so at most one incomplete chunk of values is copied. Only the first axis of the
    array may be empty. `folder` is the root of its store. `encode` takes the contiguous values of one chunk; None
    stores them uncompressed.
    """

    def __init__(self, array: Any, folder: Path, encode: Callable[[Any], bytes] | None, *, grows: bool) -> None:  # noqa: ANN401
        self._folder, self._encode = folder / array.path, encode
        self._chunk_shape: tuple[int, ...] = array.chunks
        self._per_file = 1 if array.shards is None else array.shards[0] // array.chunks[0]
        self._sharded = array.shards is not None
        self._encoded_chunks: list[bytes] = []
        self._n_files = 0
        chunk_bytes = int(np.prod(array.chunks, dtype=np.int64)) * array.dtype.itemsize
        super().__init__(array, array.chunks[0] * max(1, -(-BATCH_BYTES // chunk_bytes)), grows=grows)

    def flush(self) -> None:
        """Write pending rows and resize the array once, because its metadata is a separate file."""
        super().flush()
        self._sync(1)
        super()._lengthen()

    def _lengthen(self) -> None:
        """Do nothing; `flush` resizes the array."""

    def _put(self, start: int, rows: NDArray[Any]) -> None:
        del start  # chunks are appended in order
        step = self._chunk_shape[0]
        rows = np.ascontiguousarray(rows, self.array.dtype.newbyteorder("<"))

        def encode(at: int) -> bytes:
            chunk = _whole_chunk(rows[at : at + step], self._chunk_shape)
            return chunk.tobytes() if self._encode is None else bytes(self._encode(chunk))

        self._encoded_chunks += map_decode(encode, range(0, len(rows), step))
        self._sync(self._per_file)

    def _sync(self, least: int) -> None:
        """Write shards while at least `least` chunks are pending."""
        while len(self._encoded_chunks) >= least:
            chunks, self._encoded_chunks = (
                self._encoded_chunks[: self._per_file],
                self._encoded_chunks[self._per_file :],
            )
            place = (self._n_files, *(0 for _ in self._chunk_shape[1:]))
            path = self._folder / self.array.metadata.encode_chunk_key(place)
            path.parent.mkdir(parents=True, exist_ok=True)
            pieces = (
                compose_shard([EncodedChunks.single(c) for c in chunks], self._per_file) if self._sharded else chunks
            )
            with path.open("wb") as file:
                file.writelines(pieces)
            self._n_files += 1


def _whole_chunk(rows: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    # Chunks are stored with their full size, also at the end of the array.
    return rows if len(rows) == shape[0] else np.pad(rows, [(0, shape[0] - len(rows)), *((0, 0) for _ in shape[1:])])


CHUNK = 1 << 16
"""Elements per chunk of HDF5 data and of the inner chunks of a Zarr shard."""

SHARD_CHUNKS = 64
"""Chunks per shard of Zarr 3."""

TILE_CHUNKS = 4
"""Such chunks that are one of Zarr 2, which has a file for each: about as large as those of zarr-python."""


class Hdf5Output:
    """An HDF5 file that is being written out of sight; `path` is its final path.

    `compression` is that of the larger arrays, as `compression_of` takes it. `userblock` bytes are kept free at the
    front, for the header that MuData files carry.
    """

    in_memory = False

    def __init__(self, path: Path, *, compression: str | None, overwrite: bool, userblock: int = 0) -> None:
        import h5py

        self._compression = compression_of(compression)
        if self._compression.plugin and not filter_available(self._compression.plugin):
            raise MissingExtraError(
                f"HDF5 files with {self._compression.name} need a plugin, to write as to read them; install raggedatlas[plugins]."
            )
        self.path, self._overwrite = path, overwrite
        self._hidden = partial_path(path, overwrite=overwrite)
        with writable(path):
            self._file = h5py.File(self._hidden, "x", userblock_size=userblock)
            self._writeback = PageFlusher(self._hidden)

    def group(self, path: str, encoding: tuple[str, str] | None = None) -> Any:  # noqa: ANN401
        """Return a group, created if necessary, with these encoding attributes."""
        return _encoded(self._file.require_group(path) if path else self._file, encoding)

    def array(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Appender:
        """Create an array to append to; a shape of None is one axis of unknown length. All rows of a known shape must be written."""
        with writable(self.path):
            if shape is None:
                made = self._file.create_dataset(
                    path, (0,), dtype, maxshape=(None,), chunks=(CHUNK,), **self._compression.hdf5
                )
                return self._chunked(made)
            if 0 in shape:
                return Appender(self._file.create_dataset(path, shape, dtype), 1, grows=False)
            if not self._compression.hdf5:
                import h5py

                # Contiguous, as anndata's, with its space allocated, so that it can be written without the library.
                how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                how.set_layout(h5py.h5d.CONTIGUOUS)
                how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                parent, _, name = path.rpartition("/")
                group = self._file.require_group(parent) if parent else self._file
                kind, room = h5py.h5t.py_create(dtype, logical=True), h5py.h5s.create_simple(shape)
                made = h5py.Dataset(h5py.h5d.create(group.id, name.encode(), kind, room, how))
                offset = int(made.id.get_offset())
                row_bytes = made.dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))

                def put(start: int, rows: NDArray[Any]) -> None:
                    left = memoryview(np.ascontiguousarray(rows, made.dtype).reshape(-1).view(np.uint8).data)
                    self._writeback.write(offset + start * row_bytes, left)

                return Appender(made, 1, grows=False, put=put)
            made = self._file.create_dataset(path, shape, dtype, chunks=_row_chunks(shape), **self._compression.hdf5)
            return self._chunked(made)

    def _chunked(self, made: Any) -> Appender:  # noqa: ANN401  (h5py.Dataset)
        """Return what appends to a dataset whose chunks span all axes but the first."""
        grows, chunks, compress = made.maxshape[0] is None, made.chunks, self._compression.chunk
        step = chunks[0]
        if compress is None and self._compression.hdf5:
            return Appender(made, step, grows=grows)

        def put(start: int, rows: NDArray[Any]) -> None:
            # In threads instead of by HDF5's filters.
            rows = np.ascontiguousarray(rows)
            starts = range(0, len(rows), step)
            n_batches = max(1, min(len(starts), 2 * DECODE_THREADS))
            batches = [starts[i::n_batches] for i in range(n_batches)]

            def encode(batch: range) -> list[tuple[int, Any]]:
                whole = ((at, _whole_chunk(rows[at : at + step], chunks).reshape(-1)) for at in batch)
                return [
                    (at, flat.view(np.uint8) if compress is None else compress(shuffle(flat))) for at, flat in whole
                ]

            encoded = dict(pair for batch in map_decode(encode, batches) for pair in batch)
            beyond = (0,) * (len(chunks) - 1)
            for at in starts:
                made.id.write_direct_chunk((start + at, *beyond), encoded[at])
                self._writeback.note(len(encoded[at]))

        chunk_bytes = int(np.prod(chunks, dtype=np.int64)) * made.dtype.itemsize
        return Appender(made, step * max(1, -(-BATCH_BYTES // chunk_bytes)), grows=grows, put=put)

    def element(self, path: str, value: Any) -> None:  # noqa: ANN401
        """Write a complete element."""
        with writable(self.path, path):
            # Tables use gzip so that they are readable without plugins; anndata removes compression from scalars, but not the shuffle filter.
            options = {"compression": "gzip", "compression_opts": 1} if self._compression.hdf5 else {}
            write_element(self._file, path, value, options)

    def publish(self, header: bytes, check: Callable[[Path], None]) -> None:
        """Close the file, check the complete one and rename it to its final path."""
        with writable(self.path):
            # HDF5 writes its metadata when it closes; only then can the flusher write the header and sync all.
            self._file.close()
            self._writeback.finish(header)
            check(self._hidden)
            if not self._overwrite:
                refuse_existing(self.path)
            self._hidden.replace(self.path)

    def discard(self) -> None:
        """Remove the temporary file or folder."""
        self._file.close()
        self._writeback.close()
        self._hidden.unlink(missing_ok=True)


class ZarrOutput:
    """A Zarr folder that is being written, format 3 sharded; `path` is its final path.

    `compression` is that of the larger arrays, as `compression_of` takes it.
    """

    in_memory = False

    def __init__(self, path: Path, *, zarr_format: int, compression: str | None, overwrite: bool) -> None:
        import zarr

        if zarr_format not in (2, 3):
            raise SourceError(f"There is no Zarr format {zarr_format!r}; choose 2 or 3.")
        self._compression = compression_of(compression)
        self._compression.zarr(zarr_format, np.dtype(np.float32))  # raises if Zarr does not support it
        self.path, self._overwrite, self._format = path, overwrite, zarr_format
        self._hidden = partial_path(path, overwrite=overwrite)
        with writable(path):
            self._root = zarr.open_group(store=str(self._hidden), mode="w-", zarr_format=2 if zarr_format == 2 else 3)

    def group(self, path: str, encoding: tuple[str, str] | None = None) -> Any:  # noqa: ANN401
        """Return a group, created if necessary, with these encoding attributes."""
        return _encoded(self._root.require_group(path) if path else self._root, encoding)

    def array(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Appender:
        """Create an array to append to."""
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
        """Write a complete element."""
        with writable(self.path, path):
            write_element(self._root, path, value, {})

    def publish(self, header: bytes, check: Callable[[Path], None]) -> None:
        """Consolidate the metadata, check the folder and rename it to its final path."""
        with writable(self.path), warnings_as("ignore"):
            consolidate(self._hidden)
            check(self._hidden)
            # A crash between the two renames leaves the former folder as `.old`.
            old = self._hidden.with_name(f"{self._hidden.name}.old")
            publish(self._hidden, self.path, old, overwrite=self._overwrite)
            if old.exists():
                if old.is_dir() and not old.is_symlink():
                    shutil.rmtree(old)
                else:
                    old.unlink()

    def discard(self) -> None:
        """Remove the temporary file or folder."""
        shutil.rmtree(self._hidden, ignore_errors=True)


def consolidate(folder: Path) -> None:
    """Consolidate the metadata of a Zarr folder.

    zarr-python writes the nodes in an order that ignores case, in which it reads members of `Study` and `study` as one
    group's. Here the members of a group follow each other.
    """
    import zarr

    with warnings_as("ignore"):
        zarr.consolidate_metadata(zarr.storage.LocalStore(folder))
    for path in (folder / ".zmetadata", folder / "zarr.json"):
        if path.exists():
            whole = json.loads(path.read_bytes())
            holder = whole if path.name == ".zmetadata" else whole["consolidated_metadata"]
            holder["metadata"] = dict(
                sorted(holder["metadata"].items(), key=lambda item: (item[0].count("/"), item[0]))
            )
            path.write_text(json.dumps(whole, indent=2))


@contextmanager
def writable(path: Path, element: str = "") -> Iterator[None]:
    """Convert errors of the file system into a `StoreError` that names the file."""
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


@contextmanager
def written_aside(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield where to write a file or folder: in a hidden folder beside its path, to which it is moved when it is complete."""
    work = partial_path(path, overwrite=overwrite)
    new, old = work / path.name, work / "replaced"
    try:
        work.mkdir()
        yield new
        publish(new, path, old, overwrite=overwrite)
    # Some are errors of the operating system too, e.g. `DuplicateError`.
    except AtlasError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {failure(error)}") from error
    finally:
        # What could not be put back is kept.
        if path.exists() or not old.exists():
            shutil.rmtree(work, ignore_errors=True)


def publish(new: Path, path: Path, old: Path, *, overwrite: bool) -> None:
    """Rename a complete file or folder to its final path.

    A folder that is there is renamed to `old`, and put back after an error. A rename cannot replace a folder with
    contents, so nothing is at the path between the two renames.
    """
    if not overwrite:
        refuse_existing(path)
    if new.is_file() and not path.is_dir():
        new.replace(path)
        return
    if overwrite and path.exists():
        path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        if old.exists():
            old.rename(path)
        # Made by another process meanwhile.
        if not overwrite:
            refuse_existing(path)
        raise


def partial_path(path: Path, *, overwrite: bool) -> Path:
    """Return a hidden path next to a new one, where it is written until it is complete; raise if it cannot be."""
    if not overwrite:
        refuse_existing(path)
    if not path.parent.is_dir():
        raise StoreError(f"{path} cannot be written: there is no folder {path.parent}; make it first.")
    return path.with_name(f".{path.name}.{uuid4().hex[:8]}.partial")


def refuse_existing(path: Path) -> None:
    """Raise for a path that exists."""
    if path.exists():
        raise DuplicateError(f"{path} exists; choose another name, or pass overwrite=True to replace it.")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path; it replaces `path` at the end, or is removed after an error."""
    # A name of its own for each call: two threads may write one path.
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    with store_errors(f"write {path}"):
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
