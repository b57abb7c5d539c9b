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
from raggedatlas.formats.appenders import Appender, ChunkAppender
from raggedatlas.formats.compressions import compression_of, require_plugin
from raggedatlas.formats.containers import unknown_encoding

CHUNK = 1 << 16
"""Elements per chunk of HDF5 data and of the inner chunks of a Zarr shard."""

SHARD_CHUNKS = 64
"""Chunks per Zarr shard."""


class Target(Protocol):
    """A tree that is being written out of sight."""

    path: Path

    def group(self, path: str, encoding: tuple[str, str] | None = None) -> Any:  # noqa: ANN401
        """Return a group, made if need be, with these encoding attributes."""
        ...

    def array(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Appender:
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


class Hdf5Target:
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

    def group(self, path: str, encoding: tuple[str, str] | None = None) -> Any:  # noqa: ANN401
        """Return a group, made if need be, with these encoding attributes."""
        return _encoded(self._file.require_group(path) if path else self._file, encoding)

    def array(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Appender:
        """Make an array to append to."""
        chunks = (CHUNK,) if shape is None else _row_chunks(shape)
        options: dict[str, Any] = {} if shape is not None and 0 in shape else {"chunks": chunks}
        if options:
            options |= self._compression.hdf5
        with writable(self.path):
            if shape is None:
                made = self._file.create_dataset(path, (0,), dtype, maxshape=(None,), **options)
            else:
                made = self._file.create_dataset(path, shape, dtype, **options)
        ours = self._compression.chunk is not None or not self._compression.hdf5
        if options and ours:
            return ChunkAppender(made, self._compression.chunk, grows=shape is None)
        return Appender(made, chunks[0], grows=shape is None)

    def element(self, path: str, value: Any) -> None:  # noqa: ANN401
        """Write a whole element."""
        with writable(self.path, path):
            # Tables and names stay readable without plugins; anndata strips compression from scalars, but not the shuffle filter.
            options = {"compression": "gzip", "compression_opts": 1} if self._compression.hdf5 else {}
            write_element(self._file, path, value, options)

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
        self._compressor = compression_of(compression).zarr(zarr_format)
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
            made = self._root.create_array(
                path, shape=(0,) if shape is None else shape, dtype=dtype, compressors=self._compressor, **layout
            )
        return Appender(made, unit, grows=shape is None)

    def element(self, path: str, value: Any) -> None:  # noqa: ANN401
        """Write a whole element."""
        with writable(self.path, path):
            # The two generations of zarr-python name the type of records differently, and one cannot read the other's.
            write_element(self._root, path, value if self._format == 2 else records_as_tables(path, value), {})

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


def records_as_tables(path: str, value: Any) -> Any:  # noqa: ANN401
    """Turn structured arrays, also within mappings, into frames with a column per field.

    Raises
    ------
    SchemaError
        If a field has several values a row, which no column holds.

    Examples
    --------
    >>> records_as_tables("uns/r", np.array([(1, 2.0)], dtype=[("n", "i4"), ("x", "f4")]))["n"].tolist()
    [1]
    """
    if isinstance(value, dict):
        return {name: records_as_tables(f"{path}/{name}", inner) for name, inner in value.items()}
    if not isinstance(value, np.ndarray) or value.dtype.names is None:
        return value
    import pandas as pd

    odd = [name for name in value.dtype.names if value.dtype[name].shape or not name.strip("./") or "/" in name]
    if value.ndim != 1 or odd:
        raise SchemaError(
            f"{path} is a structured array which Zarr format 3 cannot hold so that every anndata reads it, nor can a table: it has "
            f"{value.ndim} axes and the fields {odd or value.dtype.names}. Write Zarr format 2 or .h5ad, or take it apart first."
        )
    return pd.DataFrame({name: _texts(value[name]) for name in value.dtype.names})


def _texts(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind not in "SUO":
        return values
    return np.array([v.decode(errors="replace") if isinstance(v, bytes) else str(v) for v in values], dtype=object)


def plain_text(frame: Any) -> Any:  # noqa: ANN401  (a pandas frame)
    """Turn text without missing values into object columns, which are written as plain string arrays.

    Text of pandas' own nullable type stays that: it is what the person chose, and what a file with such a column holds.

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
        elif isinstance(column.dtype, pd.StringDtype) and column.dtype.na_value is pd.NA:
            columns[name] = column.array
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
