"""Sinks for `.h5ad`, AnnData-Zarr and `.h5mu`: matrices appended in row blocks, small elements by anndata's writer."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, LimitError, SchemaError, SourceError
from raggedatlas.formats.anndata.validation import raise_if_invalid
from raggedatlas.formats.containers import GROUPS, MEMBERS, Container, open_hdf5, open_zarr
from raggedatlas.formats.element_writer import check_name
from raggedatlas.formats.external_sort import ExternalRowSort
from raggedatlas.formats.matrix_readers import NUMBER_KINDS
from raggedatlas.formats.modalities import MemoryOutput
from raggedatlas.formats.output_files import Hdf5Output, ZarrOutput, writable
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock, sparse_dtype
from raggedatlas.model.frames import ColumnTable
from raggedatlas.model.protocols import SinkMatrix

DICT = ("dict", "0.1.0")
ALIGNED = {name: MEMBERS[name][0] for name in GROUPS if MEMBERS[name]}
"""Group -> the table with whose rows its members are aligned."""

MEMORY_STEP_BYTES = 64 << 20
"""Approximate size in bytes of the blocks of rows of a matrix that is read into memory."""

MUDATA_VERSION = "0.1.0"
MUDATA_HEADER = f"MuData (format-version={MUDATA_VERSION};creator=raggedatlas)".encode()
"""First bytes of an `.h5mu` file, by which readers recognise it."""


def h5ad_sink(path: Path, compression: str | None = "gzip", *, overwrite: bool = False) -> "TreeSink":
    """Write an `.h5ad` file.

    `compression` is ``"gzip"`` (level 1, bytes shuffled), ``"zstd"``, ``"blosc"`` (both of the extra `plugins`) or
    ``"lzf"``, each but the last with an optional level, as in ``"zstd:9"``; None for none. Raises `DuplicateError` if
    the file exists and `overwrite` is False.
    """
    return TreeSink(Hdf5Output(path, compression=compression, overwrite=overwrite), multimodal=False)


def h5mu_sink(path: Path, compression: str | None = "gzip", *, overwrite: bool = False) -> "TreeSink":
    """Write an `.h5mu` file; keys are ``"mod/<m>/X"`` and so on, ``"obs"`` and ``"obsmap/<m>"`` are global.

    Arguments as of `h5ad_sink`.
    """
    # 512 bytes is the smallest user block of HDF5; `publish` writes `MUDATA_HEADER` there.
    target = Hdf5Output(path, compression=compression, overwrite=overwrite, userblock=512)
    return TreeSink(target, multimodal=True)


def zarr_sink(
    path: Path,
    zarr_format: int = 3,
    compression: str | None = "zstd",
    *,
    overwrite: bool = False,
    multimodal: bool = False,
) -> "TreeSink":
    """Write an AnnData or MuData as a Zarr folder with consolidated metadata.

    `multimodal` says that it is a MuData, with keys as of `h5mu_sink`. Of the Zarr formats 2 and 3, 3 is sharded.
    `compression` is ``"zstd"`` (level 3), ``"blosc"`` or ``"gzip"``, with an optional level; None for none. Raises
    `DuplicateError` if the folder exists and `overwrite` is False.
    """
    target = ZarrOutput(path, zarr_format=zarr_format, compression=compression, overwrite=overwrite)
    return TreeSink(target, multimodal=multimodal)


OutputFile = Hdf5Output | ZarrOutput | MemoryOutput
"""A tree that is being written out of sight."""


class TreeSink:
    """A `Sink` that writes a tree of AnnData elements, of a MuData if `multimodal`."""

    def __init__(self, target: OutputFile, *, multimodal: bool) -> None:
        self._target, self.multimodal = target, multimodal
        self.by_column = not target.in_memory
        """Whether tables may come as `ColumnTable`."""
        if target.in_memory:
            self.step_bytes = MEMORY_STEP_BYTES
            """Approximate size of the blocks of rows to write, if not that of `copy`."""
        self._writers: dict[str, SparseWriter | DenseWriter] = {}
        self._lengths: dict[str, int] = {}
        self._var_names: dict[str, NDArray[Any]] = {}
        self._maps: dict[str, NDArray[Any]] = {}
        self._mods: list[str] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._axis = 0

    def begin(self, matrices: tuple[SinkMatrix, ...]) -> None:
        """Announce the matrices to write; values of sparse ones are written in a type that SciPy supports."""
        for matrix in matrices:
            if matrix.dtype.kind not in NUMBER_KINDS:
                raise SchemaError(
                    f"{matrix.key} has values of type {matrix.dtype}; numbers and booleans can be written."
                )
            self._check_key(matrix.key)
            if matrix.form == "dense":
                self._writers[matrix.key] = DenseWriter(self._target, matrix)
            else:
                stored = replace(matrix, dtype=sparse_dtype(matrix.dtype))
                self._writers[matrix.key] = SparseWriter(self._target, stored)

    def write(self, key: str, block: Block) -> None:
        """Append rows to one matrix that was announced."""
        if key not in self._writers:
            raise SchemaError(f"Matrix {key!r} was not announced; begin() named {sorted(self._writers)}.")
        with writable(self._target.path, key):
            self._writers[key].append(block)

    def element(self, key: str, value: Any) -> None:  # noqa: ANN401  (any element that AnnData knows)
        """Write a complete element."""
        self._check_key(key)
        if self.multimodal and key == "axis":
            self._axis = int(value)
            return
        parent = key.rpartition("/")[0]
        if not self.multimodal or parent.startswith("mod/"):
            self._record_shape(key, value)
        inner = key.split("/", 2)[2] if self.multimodal and key.startswith("mod/") else key
        if inner in ("obs", "var", "raw/var"):
            self._lengths[key] = len(value)
            if inner == "var" and self.multimodal:
                frame = value.frame() if isinstance(value, ColumnTable) else value
                self._var_names[key] = frame.index.to_numpy(object)
        if parent in ("obsmap", "varmap"):
            self._maps[key] = np.asarray(value)
        if parent.rpartition("/")[2] in GROUPS:
            self._target.group(parent, DICT)
        self._target.element(key, value)

    def commit(self) -> str:
        """Move the file to its final path, and return that path.

        Before that, raises `SchemaError` if rows are missing, or `obs` and `var` do not fit the matrices, and
        `CorruptError` if the complete file cannot be read back.
        """
        with writable(self._target.path):
            # `finish` checks that all announced rows came, so the checks below can use the announced shapes.
            for writer in self._writers.values():
                writer.finish()
            if self.multimodal:
                n_obs = self._length("obs")
                for name in self._mods:
                    self._finish_anndata(f"mod/{name}/")
                for name in (*GROUPS[1:], "obsmap", "varmap"):
                    self._target.group(name, DICT)
                self._write_maps(n_obs)
                root = self._target.group("", ("MuData", MUDATA_VERSION))
                root.attrs["axis"] = self._axis
                self._target.group("mod").attrs["mod-order"] = [*self._mods]
            else:
                self._finish_anndata("")
        self._target.publish(MUDATA_HEADER if self.multimodal else b"", check_opens)
        return str(self._target.path)

    def abort(self) -> None:
        """Remove everything written so far."""
        for writer in self._writers.values():
            writer.close()
        self._target.discard()

    def _check_key(self, key: str) -> None:
        parts = key.split("/")
        if self.multimodal and parts[0] == "mod" and len(parts) > 2 and parts[1] not in self._mods:
            self._mods.append(parts[1])
        if self._target.in_memory:
            return
        for name in parts:
            check_name(name, f"{key!a}: {name!a}", zarr=isinstance(self._target, ZarrOutput))
        inner = parts[2:] if self.multimodal and parts[0] == "mod" else parts
        if len(inner) > (3 if inner[:2] == ["raw", "varm"] else 2):
            raise SchemaError(
                f"{key!r} has a '/' in its name, which files take for groups within groups; rename it, then write again."
            )
        if not self.multimodal and parts[0] not in MEMBERS:
            raise SchemaError(
                f"{key!r} has no place in an AnnData, whose readers stop at unknown members; put it into uns, e.g. as 'uns/{key}'."
            )

    def _record_shape(self, key: str, value: Any) -> None:  # noqa: ANN401
        """Record the shape of a member that is aligned with the cells or features; one without rows (number, text, mapping) is refused."""
        above, _, name = key.rpartition("/")
        group = above.rpartition("/")[2]
        if name in ALIGNED and group not in ALIGNED and isinstance(value, dict):
            for member, inner in value.items():
                self._record_shape(f"{key}/{member}", inner)
        elif group in ALIGNED:
            shape = getattr(value, "shape", None)
            # An awkward array has `ndim` and a length, but no shape.
            if not shape and (shape is not None or not hasattr(value, "ndim")):
                raise SchemaError(
                    f"{key} is of type {type(value).__name__}, where something with a row for each row of {ALIGNED[group]} "
                    "belongs; put it into uns."
                )
            self._shapes[key] = tuple(shape) if shape else (len(value),)

    def _finish_anndata(self, prefix: str) -> None:
        sizes = {name: self._length(f"{prefix}{name}") for name in ("obs", "var")}
        raw = f"{prefix}raw/X" in self._writers
        n_raw = self._length(f"{prefix}raw/var") if raw else 0
        axes = {name: tuple(sizes[axis] for axis in MEMBERS[name]) for name in ("X", *ALIGNED)}
        axes |= {"raw/X": (sizes["obs"], n_raw), "raw/varm": (n_raw,)}
        shapes = self._shapes | {key: writer.matrix.shape for key, writer in self._writers.items()}
        for key, shape in shapes.items():
            inner = key.removeprefix(prefix)
            expected = axes.get(inner, axes.get(inner.rpartition("/")[0], ())) if key.startswith(prefix) else ()
            # Obsm and the like may have more axes.
            exact = inner.partition("/")[0] in ("X", "layers")
            self._check_shape(key, shape if exact else shape[: len(expected)], expected)
        self._target.group(prefix.rstrip("/"), ("anndata", "0.1.0"))
        for name in GROUPS:
            self._target.group(f"{prefix}{name}", DICT)
        if raw:
            self._target.group(f"{prefix}raw", ("raw", "0.1.0"))
            self._target.group(f"{prefix}raw/varm", DICT)

    def _length(self, key: str) -> int:
        if key not in self._lengths:
            raise SchemaError(
                f"{key} was not written; every AnnData needs it. Call element({key!r}, frame) before commit()."
            )
        return self._lengths[key]

    def _check_shape(self, key: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise SchemaError(
                f"{key} has shape {shape}, but the tables beside it ask for {expected}; give frames that fit."
            )

    def _write_maps(self, n_obs: int) -> None:
        """Write for each modality the positions of its cells and features among all; absent ones are 0."""
        import pandas as pd

        names = [self._var_names[f"mod/{name}/var"] for name in self._mods]
        n_var = sum(len(part) for part in names)
        if "var" not in self._lengths:
            index = np.concatenate(names) if names else np.empty(0, object)
            self.element("var", pd.DataFrame(index=pd.Index(index, dtype=object)))
        start = 0
        for name, part in zip(self._mods, names, strict=True):
            rows = self._maps.get(f"obsmap/{name}")
            # A modality without a map must have all cells, in order.
            if rows is None:
                self._check_shape(f"mod/{name}/obs", (self._length(f"mod/{name}/obs"),), (n_obs,))
                rows = np.arange(1, n_obs + 1, dtype=np.uint32)
                self.element(f"obsmap/{name}", rows)
            columns = np.zeros(n_var, np.uint32)
            columns[start : start + len(part)] = np.arange(1, len(part) + 1)
            start += len(part)
            if f"varmap/{name}" not in self._maps:
                self.element(f"varmap/{name}", columns)
            self.element(f"obsm/{name}", rows > 0)
            self.element(f"varm/{name}", self._maps[f"varmap/{name}"] > 0)


def check_opens(path: Path) -> None:
    """Open a complete file as readers do and check its metadata by the rules that they rely on.

    Raises `CorruptError` if it breaks one, which is an error of the writer.
    """
    try:
        with closing(open_zarr(path) if path.is_dir() else open_hdf5(path)) as container:
            _open_members(container, "")
        raise_if_invalid(path, compare=False)
    except (SourceError, LimitError) as error:
        raise CorruptError(
            f"What was written cannot be read back ({error}), so nothing was kept. This is an error of raggedatlas; please report it."
        ) from error


def _open_members(container: Container, path: str) -> None:
    """Open every member by its name, of Zarr by the consolidated metadata."""
    for name in container.names(path):
        _open_members(container, f"{path}/{name}".lstrip("/"))


ENTRIES = 1 << 20
"""Entries of a CSC matrix that are sorted or written at once."""

NARROW_MOST = np.iinfo(np.int32).max
"""Most entries that pointers of 32 bits can count."""


class SparseWriter:
    """A CSR or CSC matrix that is written from rows.

    Values and minor indices are appended; pointers wait in memory (eight bytes each). Entries of a CSC matrix beyond
    one band are kept in temporary files until `finish`. Pointers and indices are int32, as SciPy makes them, unless
    more entries or columns need int64 or it is asked for.
    """

    def __init__(self, target: OutputFile, matrix: SinkMatrix) -> None:
        if len(matrix.shape) != 2:
            raise SchemaError(f"{matrix.key} has shape {matrix.shape}; a sparse matrix has two axes.")
        self.matrix, self._target = matrix, target
        # In memory the complete matrix is converted, which takes half the time of sorting its entries.
        by_row, (n_rows, n_columns) = matrix.form == "csr" or target.in_memory, matrix.shape
        self._small = (n_columns if by_row else n_rows) < 2**31
        self._index = np.dtype(np.int32 if self._small and not matrix.wide[1] else np.int64)
        group = target.group(matrix.key, (f"{matrix.form}_matrix", "0.1.0"))
        group.attrs["shape"] = list(matrix.shape) if hasattr(group, "store") else np.array(matrix.shape, np.int64)
        # Only an exact number fixes the length; with an upper bound the arrays grow.
        self._length = (matrix.n_entries,) if matrix.exact and matrix.n_entries is not None else None
        self._data = target.array(f"{matrix.key}/data", matrix.dtype, self._length)
        self._indices = target.array(f"{matrix.key}/indices", self._index, self._length)
        self._pointers = [np.zeros(1, np.int64)]
        self._n_rows = 0
        expected = min(n_rows * n_columns, 1 << 30) if matrix.n_entries is None else matrix.n_entries
        # Transposed: the rows of the sort are the columns of the matrix.
        self._sort = None if by_row else ExternalRowSort((n_columns, n_rows), matrix.dtype, expected)

    def append(self, block: Block) -> None:
        """Append rows of a `CsrBlock` of the announced width and type."""
        if not isinstance(block, CsrBlock) or block.n_cols != self.matrix.shape[1]:
            raise SchemaError(f"{self.matrix.key} takes CSR blocks of {self.matrix.shape[1]:,} columns.")
        values = _cast(block.layers["values"], self.matrix)
        if self._sort is None:
            self._append(block.indptr, block.indices, values)
        else:
            numbers = np.repeat(np.arange(self._n_rows, self._n_rows + block.n_rows), np.diff(block.indptr))
            for start in range(0, len(numbers), ENTRIES):
                part = slice(start, start + ENTRIES)
                self._sort.add(block.indices[part].astype(np.int64, copy=False), numbers[part], values[part])
        self._n_rows += block.n_rows

    def _append(self, pointers: NDArray[np.int64], indices: NDArray[Any], values: NDArray[Any]) -> None:
        """Append entries of rows (CSR) or columns (CSC) whose pointers start at 0."""
        self._pointers.append(pointers[1:] + self._pointers[-1][-1])
        self._data.append(values)
        self._indices.append(indices.astype(self._index, copy=False))

    def finish(self) -> None:
        """Write the remaining entries and the pointers."""
        _check_height(self.matrix, self._n_rows)
        if self._sort is not None:
            self._sort.finish()
            start, n_columns = 0, self.matrix.shape[1]
            while start < n_columns:
                reached = int(np.searchsorted(self._sort.indptr, self._sort.indptr[start] + ENTRIES, side="right")) - 1
                stop = min(n_columns, max(start + 1, reached))
                block = self._sort.read(start, stop)
                self._append(block.indptr, block.indices, block.layers["values"])
                start = stop
            self.close()
        pointers = np.concatenate(self._pointers)
        if self._length not in (None, (pointers[-1],)):
            raise SchemaError(
                f"{self.matrix.key} received {pointers[-1]:,} of its {self._length[0]:,} entries; write them all before commit()."
            )
        self._data.flush()
        self._indices.flush()
        # Known only at the end, which is why the pointers are kept in memory.
        small = pointers[-1] <= NARROW_MOST and self._small and not self.matrix.wide[0]
        stored = pointers.astype(np.int32 if small else np.int64)
        appender = self._target.array(f"{self.matrix.key}/indptr", stored.dtype, stored.shape)
        appender.append(stored)
        appender.flush()

    def close(self) -> None:
        """Remove the temporary files, if there are any."""
        if self._sort is not None:
            self._sort.close()


class DenseWriter:
    """A dense array of two or more axes that is written from rows."""

    def __init__(self, target: OutputFile, matrix: SinkMatrix) -> None:
        self.matrix = matrix
        target.group(matrix.key.rpartition("/")[0])
        self._rows = target.array(matrix.key, matrix.dtype, matrix.shape)
        attributes = self._rows.array.attrs
        attributes["encoding-type"], attributes["encoding-version"] = "array", "0.2.0"

    def append(self, block: Block) -> None:
        """Append rows of a `DenseBlock` of the announced shape and type."""
        if not isinstance(block, DenseBlock) or block.layers["values"].shape[1:] != self.matrix.shape[1:]:
            raise SchemaError(f"{self.matrix.key} takes dense rows of shape {self.matrix.shape[1:]}.")
        self._rows.append(_cast(block.layers["values"], self.matrix))

    def finish(self) -> None:
        """Write the remaining rows."""
        _check_height(self.matrix, self._rows.n_rows)
        self._rows.flush()

    def close(self) -> None:
        """Do nothing, since there are no temporary files."""


def _cast(values: NDArray[Any], matrix: SinkMatrix) -> NDArray[Any]:
    if not np.can_cast(values.dtype, matrix.dtype, "safe"):
        raise SchemaError(f"{matrix.key} was announced as {matrix.dtype}, which cannot take {values.dtype} unchanged.")
    return values.astype(matrix.dtype, copy=False)


def _check_height(matrix: SinkMatrix, n_rows: int) -> None:
    if n_rows != matrix.shape[0]:
        raise SchemaError(
            f"{matrix.key} received {n_rows:,} of its {matrix.shape[0]:,} rows; write them all before commit()."
        )
