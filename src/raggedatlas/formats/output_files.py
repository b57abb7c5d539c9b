"""Places where a sink writes: an HDF5 file or a Zarr folder beside its final name, moved there at the end."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import numpy as np

from raggedatlas.errors import DuplicateError, SchemaError, SourceError, StoreError
from raggedatlas.formats.array_writers import Appender, ChunkAppender, ContiguousAppender, ShardAppender
from raggedatlas.formats.columns import write_any
from raggedatlas.formats.compression import compression_of, require_plugin
from raggedatlas.formats.fsync import PageFlusher
from raggedatlas.store.runtime import warnings_as

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
