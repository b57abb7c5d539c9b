"""Places where a sink writes: an HDF5 file or a Zarr folder beside its final name, moved there at the end."""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import DuplicateError, SchemaError, SourceError, StoreError
from raggedatlas.formats.containers import unknown_encoding

CHUNK = 1 << 16
"""Elements per chunk of HDF5 data and of the inner chunks of a Zarr shard."""

SHARD_CHUNKS = 64
"""Chunks per Zarr shard."""

COMPRESSIONS: dict[str | None, dict[str, Any]] = {
    None: {},
    "gzip": {"compression": "gzip", "compression_opts": 1, "shuffle": True},
    "lzf": {"compression": "lzf", "shuffle": True},
}
"""Name of an HDF5 compression -> what h5py calls it; shuffled gzip 1 is both smaller and faster than plain gzip 4."""


class Target(Protocol):
    """A tree that is being written out of sight."""

    path: Path

    def group(self, path: str, encoding: tuple[str, str] | None = None) -> Any:  # noqa: ANN401
        """Return a group, made if need be, with these encoding attributes."""
        ...

    def array(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> "Appender":
        """Make an array to append to; a shape of None is one axis of unknown length."""
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
        """Take rows."""
        self.n_rows += len(values)
        self._waiting.append(values)
        if self.n_rows - self._n_written >= self._unit:
            self._write(self.n_rows - self.n_rows % self._unit)

    def flush(self) -> None:
        """Write what waits."""
        self._write(self.n_rows)

    def _write(self, stop: int) -> None:
        if stop <= self._n_written:
            return
        rows = np.concatenate(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        n = stop - self._n_written
        if self._grows:
            self.array.resize((stop,))
        self.array[self._n_written : stop] = rows[:n]
        self._waiting = [rows[n:].copy()] if n < len(rows) else []
        self._n_written = stop


class Hdf5Target:
    """An HDF5 file in the making.

    Parameters
    ----------
    path : Path
        Its final name.
    compression : {"gzip", "lzf", None}
        Of the larger arrays.
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

        if compression not in COMPRESSIONS:
            raise SourceError(f"There is no compression {compression!r}; choose one of {list(COMPRESSIONS)}.")
        self.path, self._overwrite = path, overwrite
        self._options = COMPRESSIONS[compression]
        self._hidden = _hidden(path, overwrite=overwrite)
        with writable(path):
            self._file = h5py.File(self._hidden, "x", userblock_size=userblock)

    def group(self, path: str, encoding: tuple[str, str] | None = None) -> Any:  # noqa: ANN401
        """Return a group, made if need be, with these encoding attributes."""
        return _encoded(self._file.require_group(path) if path else self._file, encoding)

    def array(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Appender:
        """Make an array to append to."""
        with writable(self.path):
            if shape is None:
                made = self._file.create_dataset(path, (0,), dtype, maxshape=(None,), chunks=(CHUNK,), **self._options)
                return Appender(made, CHUNK, grows=True)
            chunks = _row_chunks(shape)
            options = {**self._options, "chunks": chunks} if 0 not in shape else {}
            return Appender(self._file.create_dataset(path, shape, dtype, **options), chunks[0], grows=False)

    def element(self, path: str, value: Any) -> None:  # noqa: ANN401
        """Write a whole element."""
        with writable(self.path, path):
            # anndata strips compression from scalars, but not the shuffle filter.
            write_element(self._file, path, value, {k: v for k, v in self._options.items() if k != "shuffle"})

    def publish(self, header: bytes) -> None:
        """Close it and move it to its name."""
        with writable(self.path):
            self._file.close()
            with self._hidden.open("r+b") as file:
                file.write(header)
                file.flush()
                os.fsync(file.fileno())
            if not self._overwrite:
                _refuse_existing(self.path)
            self._hidden.replace(self.path)

    def discard(self) -> None:
        """Remove it."""
        self._file.close()
        self._hidden.unlink(missing_ok=True)


class ZarrTarget:
    """A Zarr folder in the making.

    Parameters
    ----------
    path : Path
        Its final name.
    zarr_format : {2, 3}
        Format 3 is sharded.
    overwrite : bool
        Whether a folder there may be replaced.

    Raises
    ------
    DuplicateError
        If there is such a folder.
    StoreError
        If the place refuses.
    """

    def __init__(self, path: Path, *, zarr_format: int, overwrite: bool) -> None:
        import zarr

        if zarr_format not in (2, 3):
            raise SourceError(f"There is no Zarr format {zarr_format!r}; choose 2 or 3.")
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
        unit = chunks[0] * SHARD_CHUNKS
        tiled = (unit, *chunks[1:])
        layout: dict[str, Any] = {"chunks": tiled} if self._format == 2 else {"chunks": chunks, "shards": tiled}
        with writable(self.path):
            made = self._root.create_array(path, shape=(0,) if shape is None else shape, dtype=dtype, **layout)
        return Appender(made, unit, grows=shape is None)

    def element(self, path: str, value: Any) -> None:  # noqa: ANN401
        """Write a whole element."""
        with writable(self.path, path):
            write_element(self._root, path, value, {})

    def publish(self, header: bytes) -> None:
        """Consolidate its metadata and move it to its name."""
        import zarr

        with writable(self.path), warnings.catch_warnings(action="ignore"):
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


def write_element(group: Any, path: str, value: Any, options: dict[str, Any]) -> None:  # noqa: ANN401
    """Write an element through anndata's own writer, text as plain string arrays, which every reader since 0.8 knows.

    Raises
    ------
    SchemaError
        If it cannot be written; the message names it.
    """
    import anndata
    from anndata.io import write_elem

    value = _plain(value)
    parent, _, name = path.rpartition("/")
    group = group.require_group(parent) if parent else group
    with warnings.catch_warnings(action="ignore"), anndata.settings.override(allow_write_nullable_strings=True):
        try:
            write_elem(group, name, value, dataset_kwargs=options)
        except (TypeError, ValueError, NotImplementedError, AttributeError, unknown_encoding()) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            where = next((note for note in getattr(error, "__notes__", []) if "key" in note), path)
            raise SchemaError(
                f"{path} cannot be written ({reason}; {where}); convert or remove what it holds, then write again."
            ) from error


def plain_text(frame: Any) -> Any:  # noqa: ANN401  (a pandas frame)
    """Turn text without missing values into object columns, which are written as plain string arrays.

    Examples
    --------
    >>> import pandas as pd
    >>> plain_text(pd.DataFrame({"a": ["x"]}, index=["i"])).dtypes["a"]
    dtype('O')
    """
    import pandas as pd

    columns = {}
    for i, name in enumerate(frame.columns):
        column = frame.iloc[:, i]
        if isinstance(column.dtype, pd.CategoricalDtype):
            kept = _object_index(column.cat.categories)
            codes = column.cat.codes.to_numpy()
            columns[name] = pd.Categorical.from_codes(codes, kept, ordered=bool(column.cat.ordered))
        elif column.dtype == object or isinstance(column.dtype, pd.StringDtype):
            columns[name] = column.astype("string").array if column.isna().any() else column.to_numpy(object)
        else:
            columns[name] = column.array
    out = pd.DataFrame({str(name): pd.Series(v) for name, v in columns.items()}, index=range(len(frame)))
    for name, values in columns.items():
        if isinstance(values, np.ndarray) and values.dtype == object:
            out[str(name)] = pd.Series(values, dtype=object)
    out.index = _object_index(frame.index)
    return out


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


def _plain(value: Any) -> Any:  # noqa: ANN401
    import pandas as pd

    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return plain_text(value) if isinstance(value, pd.DataFrame) else value


def _object_index(index: Any) -> Any:  # noqa: ANN401
    import pandas as pd

    if isinstance(index.dtype, np.dtype) and index.dtype.kind in "biuf":
        return index
    return pd.Index(index.to_numpy(object), dtype=object, name=index.name)


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
