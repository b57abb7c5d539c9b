"""Readers of a CXG's arrays: the matrix in each of the three layouts, by rows and by columns, and the tables ``obs`` and ``var``."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import LimitError, SourceError
from raggedatlas.formats.containers import decode_texts
from raggedatlas.formats.matrix_readers import BLOCK_BYTES
from raggedatlas.model.batch import CsrBlock, DenseBlock
from raggedatlas.model.frames import TEXT_ROWS, ColumnTable, TableColumn, Texts
from raggedatlas.model.protocols import MatrixForm
from raggedatlas.store.location import AnyPath
from raggedatlas.wings.cxg.options import ANONYMOUS, HINTS, INDEX, MISSING_TEXT, OBS, TRUTHS, VAR, XC, XR, X
from raggedatlas.wings.cxg.tiledb_arrays import (
    absolute_uri,
    attribute_files,
    attribute_names,
    check_file_sizes,
    check_text_offsets,
    context,
    import_tiledb,
    is_fully_written,
    open_array,
    query_attributes,
    tiledb_errors,
    values_of,
    written_cells,
)
from raggedatlas.wings.cxg.unstructured import parse_json

if TYPE_CHECKING:
    import pandas as pd

ENTRY_BYTES = 16
"""Memory per entry while reading: two coordinates, a value, and its position in the sort order."""


class LazyArray:
    """An array that is opened at the first access."""

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self._array: Any = None

    @property
    def array(self) -> Any:  # noqa: ANN401
        """The TileDB array."""
        if self._array is None:
            with tiledb_errors(self.path):
                check_file_sizes(self.path)
                self._array = import_tiledb().open(absolute_uri(self.path), "r", ctx=context(self.path))
        return self._array

    def close(self) -> None:
        """Close the array; the next access reopens it."""
        if self._array is not None:
            self._array.close()
            self._array = None

    def shape(self) -> tuple[int, ...]:
        """Return the sizes of the dimensions; raise C02 if one does not start at 0 or is not of integers."""
        return _axis_sizes(self.path, self.array.schema)

    def attribute(self, name: str, rule: str) -> np.dtype[Any]:
        """Return the dtype of a numeric attribute; raise `rule` if it is missing, C04 if it is not numeric."""
        schema = self.array.schema
        names = attribute_names(schema)
        if name not in names:
            raise SourceError(f"{rule}: {self.path} has attributes {names}; expected {name!r}. Write the CXG again.")
        dtype: np.dtype[Any] = np.dtype(schema.attr(names.index(name)).dtype)
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise SourceError(
                f"C04: {self.path} holds values of {dtype}; expected numbers. Write the CXG again from its source."
            )
        return dtype

    def require_fully_written(self) -> None:
        """Raise C00 if a dense array is not fully written, since missing values would be read as fill values."""
        if not is_fully_written(self.path, self.array.schema):
            raise SourceError(
                f"C00: {self.path} is declared with shape {self.shape()}, but is only partially written; it is incomplete. Fetch or "
                "write the CXG again."
            )

    def entries(self, wanted: slice | list[int], *, axis: int = 0) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Read the entries at a slice or a list of coordinates along one dimension.

        Returns coordinates along that dimension, along the other, and values, unordered. In ``Xr`` and ``Xc`` the other
        is an attribute.
        """
        schema = self.array.schema
        names = [schema.domain.dim(i).name for i in range(schema.domain.ndim)]
        ranges: list[Any] = [slice(None)] * len(names)
        ranges[axis] = wanted
        others = [name for i, name in enumerate(names) if i != axis]
        taken = [name for name in attribute_names(schema) if name in (ANONYMOUS, OBS, VAR)]
        with tiledb_errors(self.path):
            # Any order is accepted and sorted in `compress_entries`, so TileDB is not asked to sort.
            query = query_attributes(self.array, *taken, dims=names, order="U")
            # A plain query excludes the end of a slice; `multi_index` includes it, and alone takes lists of points.
            reader = query if isinstance(wanted, slice) else query.multi_index
            columns = reader[tuple(ranges) if len(ranges) > 1 else ranges[0]]
        other = columns[others[0]] if others else columns[next(name for name in taken if name)]
        return columns[names[axis]], other, columns[ANONYMOUS]


class SparseRowReader:
    """Row reader of a sparse matrix, from ``Xr`` or a two-dimensional ``X``.

    The first dimension of `opened` is cells; `shape` is ``(n_cells, n_features)``. `rule` is the rule id for a missing
    attribute.
    """

    form: MatrixForm = "csr"

    def __init__(self, opened: LazyArray, shape: tuple[int, int], rule: str) -> None:
        self._opened = opened
        self.shape: tuple[int, ...] = shape
        self.dtype = opened.attribute(ANONYMOUS, rule)
        self.n_entries: int | None = written_cells(opened.path)

    def stop(self, start: int, stop: int) -> int:
        """Return the end of a block that begins at `start`, from the mean number of entries per row."""
        mean = max(1, (self.n_entries or 0) // max(self.shape[0], 1))
        return min(stop, start + max(1, BLOCK_BYTES // (ENTRY_BYTES * mean)))

    def read(self, start: int, stop: int) -> CsrBlock:
        """Read rows ``[start, stop)``; entries of a row are sorted by feature."""
        entries = self._opened.entries(slice(start, stop))
        indptr, minor, values = compress_entries(self._opened.path, entries, (start, stop), self.shape[1])
        return CsrBlock(indptr, minor, {"values": values}, self.shape[1])

    def close(self) -> None:
        """Close the array."""
        self._opened.close()


class ShiftedRowReader:
    """Row reader of a sparse matrix with column shifts, as the dense matrix that it represents.

    `shift`, (n_features,), was subtracted from each column when the matrix was stored, and so is the value of its
    missing entries.
    """

    form: MatrixForm = "dense"
    n_entries: int | None = None

    def __init__(self, rows: SparseRowReader, shift: NDArray[Any]) -> None:
        self._rows, self._shift = rows, shift.astype(np.float64)
        self.shape, self.dtype = rows.shape, rows.dtype

    def stop(self, start: int, stop: int) -> int:
        """Return the end of a block that begins at `start`."""
        return min(stop, start + max(1, BLOCK_BYTES // (8 * max(1, self.shape[1]))))

    def read(self, start: int, stop: int) -> DenseBlock:
        """Read rows ``[start, stop)``."""
        block = self._rows.read(start, stop)
        out = np.tile(self._shift, (stop - start, 1))
        rows = np.repeat(np.arange(stop - start), np.diff(block.indptr))
        # Fancy `+=` adds once per position: correct because `compress_entries` refuses repeated entries (C20).
        out[rows, block.indices] += block.layers["values"]
        return DenseBlock({"values": out.astype(self.dtype)})

    def close(self) -> None:
        """Close the array."""
        self._rows.close()


class DenseArray:
    """A two-dimensional dense array that can be sliced by rows; `rule` is the rule id for a missing attribute."""

    def __init__(self, opened: LazyArray, rule: str) -> None:
        self._opened = opened
        self.shape = opened.shape()
        self.dtype = opened.attribute(ANONYMOUS, rule)
        opened.require_fully_written()

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Read consecutive rows."""
        with tiledb_errors(self._opened.path):
            return values_of(query_attributes(self._opened.array, ANONYMOUS)[rows, :])


def compress_entries(
    path: AnyPath,
    entries: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    extent: tuple[int, int],
    n_minor: int,
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
    """Compress entries along the major coordinate, sorted by the minor one.

    `entries` are major coordinates, minor coordinates and values, (n,) each, unordered; `extent` is the first major
    coordinate and the end of the range. `path` is for error messages. Returns (n_major + 1,) indptr, minor coordinates
    as int32 (int64 if `n_minor` needs it) and values. Raises C20 for duplicate entries and minor coordinates out of
    range.
    """
    major, minor, values = entries
    # Checked before keys are made: a coordinate beyond the axis would look like one of the next or previous row.
    if len(minor) and (int(minor.max()) >= n_minor or int(minor.min()) < 0):
        at = int(minor.argmax() if int(minor.max()) >= n_minor else minor.argmin())
        raise SourceError(
            f"C20: {path} has an entry ({int(major[at]):,}, {int(minor[at]):,}), but the other dimension has size {n_minor:,}; "
            "write the CXG again."
        )
    # Coordinates are uint32, whose product would wrap; in int64 it fits, since `read_table_info` limits
    # both axes to 2**31.
    key = (major.astype(np.int64) - extent[0]) * n_minor + minor.astype(np.int64)
    steps = np.diff(key)
    if len(steps) and int(steps.min()) <= 0:
        order = np.argsort(key, kind="stable")
        key, minor, values = key[order], minor[order], values[order]
        duplicates = np.flatnonzero(np.diff(key) == 0)
        if len(duplicates):
            where = divmod(int(key[duplicates[0]]), n_minor)
            raise SourceError(
                f"C20: {path} has two entries at ({where[0] + extent[0]:,}, {where[1]:,}), and viewers use either; write the CXG again."
            )
    # Row `i` begins at the first key that is not below `i * n_minor`, also if it is empty.
    indptr = np.searchsorted(key, np.arange(extent[1] - extent[0] + 1, dtype=np.int64) * n_minor).astype(np.int64)
    return indptr, minor.astype(np.int32 if n_minor < 2**31 else np.int64), values


def columns_per_block(folder: AnyPath, n_rows: int, n_columns: int, *, shifted: bool) -> int:
    """Return the number of matrix columns that take about as much memory as a block of rows; shifted columns are dense."""
    with closing(LazyArray(folder / (XC if _is_split(folder) else X))) as opened:
        sparse = opened.array.schema.sparse and not shifted
        each = ENTRY_BYTES * written_cells(opened.path) // n_columns if sparse else 8 * n_rows
        return max(1, min(n_columns, BLOCK_BYTES // max(each, 1)))


def _is_split(folder: AnyPath) -> bool:
    return (folder / XC).is_dir() and (folder / XR).is_dir()


def read_columns(folder: AnyPath, columns: Sequence[int], shift: NDArray[Any] | None = None) -> Any:  # noqa: ANN401
    """Read columns of the matrix, in the order of `columns`, from ``Xc`` if it exists.

    Returns (n_cells, n_columns): a `scipy.sparse.csc_matrix`, or an array if the matrix is dense or shifted. For
    `shift` see `ShiftedRowReader`.
    """
    split = _is_split(folder)
    with closing(LazyArray(folder / (XC if split else X))) as opened:
        distinct = np.unique(np.asarray(columns, np.int64))
        if not split and not opened.array.schema.sparse:
            if not len(distinct):
                return np.empty((opened.shape()[0], 0), opened.attribute(ANONYMOUS, "C14"))
            # In one query, so that shared tiles are decoded once.
            runs = np.split(distinct, np.flatnonzero(np.diff(distinct) != 1) + 1)
            wanted = [slice(int(run[0]), int(run[-1])) for run in runs]
            with tiledb_errors(opened.path):
                read = query_attributes(opened.array, ANONYMOUS).multi_index[:, wanted][ANONYMOUS]
            return read[:, np.searchsorted(distinct, columns)]
        with closing(LazyArray(folder / XR)) as by_row:
            n_rows = (by_row if split else opened).shape()[0]
        try:
            matrix = _columns_at_once(opened, distinct, n_rows, axis=0 if split else 1)
        except SourceError:
            # Read columns one by one, so that the error names the damaged column by its own number.
            for column in distinct.tolist():
                entries = opened.entries(slice(column, column + 1), axis=0 if split else 1)
                compress_entries(opened.path, entries, (column, column + 1), n_rows)
            raise
        matrix = matrix[:, np.searchsorted(distinct, columns)] if list(columns) != distinct.tolist() else matrix
        return matrix if shift is None else matrix.toarray() + shift[list(columns)].astype(matrix.dtype)


def _columns_at_once(opened: LazyArray, columns: NDArray[np.int64], n_rows: int, *, axis: int) -> Any:  # noqa: ANN401
    """Read distinct, ascending columns in one query, so that shared tiles are decoded once."""
    from scipy.sparse import csc_matrix

    if not len(columns):
        return csc_matrix((n_rows, 0), dtype=opened.attribute(ANONYMOUS, "C14"))
    major, minor, values = opened.entries(columns.tolist(), axis=axis)
    # Requested columns may be far apart; their ranks make the compressed axis dense.
    ranks = np.searchsorted(columns, major)
    indptr, minor, values = compress_entries(opened.path, (ranks, minor, values), (0, len(columns)), n_rows)
    return csc_matrix((values, minor, indptr), (n_rows, len(columns)))


MAX_ROWS = 2**31
"""Maximum number of rows; larger tables are rejected before memory is allocated."""

NUMBERED = re.compile(r"name_(\d+)")


@dataclass(frozen=True, slots=True)
class TableInfo:
    """Description of a table, without its values."""

    path: AnyPath
    n_rows: int
    columns: tuple[str, ...]  # attribute names, in order
    hints: Mapping[str, Any] = field(default_factory=dict)  # the parsed ``cxg_schema``; empty if there is none
    metadata: Mapping[str, Any] = field(default_factory=dict)  # all other metadata

    @property
    def shown(self) -> str | None:
        """The column that viewers use as the index; None if the hints name no existing column."""
        named = self.hints.get(INDEX)
        return named if isinstance(named, str) and named in self.columns else None

    @property
    def index(self) -> str | None:
        """The column with the original index of the table; None if there is none.

        Writers of CXG store the index in a column ``name_0`` (or ``name_1`` and so on if that is taken) even if viewers
        are to show another column.
        """
        shown = self.shown
        numbered = sorted((int(m[1]), name) for name in self.columns if (m := NUMBERED.fullmatch(name)))
        if shown is not None and (NUMBERED.fullmatch(shown) or not numbered):
            return shown
        return numbered[-1][1] if numbered else None


def read_table_info(path: AnyPath) -> TableInfo:
    """Read the description of a table; raise C00 for damage, C02 for another form than one dimension from 0, C30 for invalid hints."""
    with open_array(path) as array:
        sizes = _axis_sizes(path, array.schema)
        if array.schema.sparse or len(sizes) != 1:
            raise SourceError(f"C02: {path} is not a one-dimensional dense array. Write the CXG again.")
        n_rows = sizes[0]
        # The size is declared in an untrusted schema: checked before anything is allocated by it.
        if n_rows > MAX_ROWS:
            raise LimitError(f"{path} declares {n_rows:,} rows; at most {MAX_ROWS:,} are read.")
        if not is_fully_written(path, array.schema):
            raise SourceError(
                f"C00: {path} declares {n_rows:,} rows, but not all of them are written; it is damaged or incomplete. Fetch or write "
                "the CXG again."
            )
        columns = tuple(array.schema.attr(i).name for i in range(array.schema.nattr))
        metadata = dict(array.meta.items())
    hints = parse_object(path, HINTS, metadata.pop(HINTS, "{}"), "C30")
    return TableInfo(path, n_rows, columns, hints, metadata)


def _axis_sizes(path: AnyPath, schema: Any) -> tuple[int, ...]:  # noqa: ANN401  (a tiledb.ArraySchema)
    axes = [schema.domain.dim(i) for i in range(schema.domain.ndim)]
    for axis in axes:
        if axis.dtype.kind not in "iu" or int(axis.domain[0]):
            raise SourceError(
                f"C02: {path}: dimension {axis.name!r} has the domain {axis.domain} of {axis.dtype}; expected integers from 0. "
                "Write the CXG again."
            )
    return tuple(int(axis.domain[1]) + 1 for axis in axes)


def parse_object(path: AnyPath, key: str, stored: Any, rule: str) -> dict[str, Any]:  # noqa: ANN401
    """Parse a metadata value as a JSON object, null as an empty one; raise `rule` for anything else."""
    try:
        value = parse_json(stored)
    except (TypeError, ValueError) as error:
        raise SourceError(f"{rule}: {path}: the metadata {key} is not valid JSON ({error}); write it again.") from error
    if value is not None and not isinstance(value, dict):
        raise SourceError(f"{rule}: {path}: the metadata {key} is not a JSON object; write it again.")
    return value or {}


def read_dataframe(stored: TableInfo) -> "pd.DataFrame":
    """Read a table, with the index of the original file.

    Raises C00 for damage, C13 for codes without categories, C30 for invalid categories, C31 for codes out of range.
    """
    import pandas as pd

    at = stored.index
    values = _read(stored, stored.columns)
    columns = {name: _decoded(stored, name, read) for name, read in values.items() if name != at}
    # A range matches the index of the columns and gives a table without any its rows; names would match nothing.
    frame = pd.DataFrame({name: pd.Series(column) for name, column in columns.items()}, index=range(stored.n_rows))
    names = (
        np.array([str(i) for i in range(stored.n_rows)], object)
        if at is None
        else _texts(values[at], _column_place(stored, at))
    )
    frame.index = pd.Index(names, dtype=str, name=_label(stored))
    return frame


def open_column_table(stored: TableInfo) -> ColumnTable:
    """Open a table for reading column by column, long text in blocks; values and errors are those of `read_dataframe`."""
    at = stored.index
    columns = [TableColumn(name, partial(_column, stored, name)) for name in stored.columns if name != at]
    return ColumnTable(stored.n_rows, TableColumn(_label(stored), partial(_index, stored)), tuple(columns))


def _label(stored: TableInfo) -> str | None:
    return None if stored.index is None or NUMBERED.fullmatch(stored.index) else stored.index


def _index(stored: TableInfo) -> "pd.Index[Any] | Texts":
    import pandas as pd

    if stored.index is None:
        return pd.Index([str(i) for i in range(stored.n_rows)], dtype=str)
    if _is_long_text(stored, stored.index):
        return Texts(stored.n_rows, partial(_text_blocks, stored, stored.index))
    return pd.Index(_texts(_read(stored, [stored.index])[stored.index], _column_place(stored, stored.index)), dtype=str)


def _column(stored: TableInfo, name: str) -> "pd.Series[Any] | Texts":
    import pandas as pd

    hint = stored.hints.get(name)
    # Categories need the complete column; only plain text can be read in blocks.
    is_text = not isinstance(hint, dict) or (hint.get("type") != "categorical" and "categories" not in hint)
    if is_text and _is_long_text(stored, name):
        # A short column is read as objects, whose dtype pandas infers.
        return Texts(stored.n_rows, partial(_text_blocks, stored, name), pd.Series(["text"]).dtype)
    return pd.Series(read_column(stored, name))


def _is_long_text(stored: TableInfo, name: str) -> bool:
    if stored.n_rows <= TEXT_ROWS:
        return False
    with open_array(stored.path) as array:
        return array.schema.attr(name).dtype.kind in "OUS"


def _text_blocks(stored: TableInfo, name: str) -> Iterator[NDArray[np.object_]]:
    with open_array(stored.path) as array:
        check_text_offsets(stored.path, array.schema, attribute_files(array.schema, name))
        query = array.query(attrs=[name])
        for start in range(0, stored.n_rows, TEXT_ROWS):
            yield _texts(
                values_of(query[start : min(start + TEXT_ROWS, stored.n_rows)], name), _column_place(stored, name)
            )


def read_column(stored: TableInfo, name: str) -> Any:  # noqa: ANN401  (an array or pandas.Categorical)
    """Read and decode one column."""
    return _decoded(stored, name, _read(stored, [name])[name])


def _decoded(stored: TableInfo, name: str, values: NDArray[Any]) -> Any:  # noqa: ANN401
    return decode_column(_column_place(stored, name), values, stored.hints.get(name))


def _column_place(stored: TableInfo, name: str) -> str:
    return f"{stored.path.name} column {name!r} of {stored.path.parent}"


def _read(stored: TableInfo, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Read columns, one by one: reading several columns of a damaged array at once crashes TileDB."""
    with open_array(stored.path) as array:
        files = [file for name in names for file in attribute_files(array.schema, name)]
        check_text_offsets(stored.path, array.schema, tuple(files))
        return {name: values_of(array.query(attrs=[name])[:], name) for name in names}


def decode_column(what: str, values: NDArray[Any], hint: Any) -> Any:  # noqa: ANN401  (an array or pandas.Categorical)
    """Decode a stored column, (n,) codes, numbers or text, with its hint ``{"type": ..., "categories": [...]}``.

    Returns an (n,) array, text as objects, or a `pandas.Categorical`. `what` names the column in messages; errors are
    those of `read_dataframe`.

    Examples
    --------
    >>> list(decode_column("x", np.array([1, -1], np.int8), {"type": "categorical", "categories": ["B", "T"]}))
    ['T', nan]
    """
    import pandas as pd

    hint = hint if isinstance(hint, dict) else {}
    kind, listed = hint.get("type"), hint.get("categories")
    unique = isinstance(listed, list) and len({str(name) for name in listed}) == len(listed)
    if listed is not None and not (unique and all(isinstance(name, str | int | float) for name in listed)):
        raise SourceError(
            f"C30: the categories of {what} are not a list of unique strings; correct the metadata {HINTS}."
        )
    text = values.dtype.kind in "OUS"
    plain: NDArray[Any] = _texts(values, what) if text else values
    if kind == "boolean" and plain.dtype.kind in "iub":
        return plain != 0
    if kind != "categorical":
        return plain
    if listed is None:
        # Numbers are stored as int32 or wider; narrower signed integers are codes, which mean nothing without a list.
        if plain.dtype.kind == "i" and plain.dtype.itemsize < 4:
            raise SourceError(
                f"C13: {what} holds codes ({plain.dtype}), but the metadata {HINTS} lists no categories for them, so their meaning is "
                "unknown. Write the CXG again from its source."
            )
        return pd.Categorical(plain)
    categories = [str(name) for name in listed]
    if text:
        # Values that are not listed are appended, except the text of a missing value.
        known = {*categories, MISSING_TEXT}
        unlisted = [value for value in dict.fromkeys(plain.tolist()) if value not in known]
        names = pd.Index([*categories, *unlisted], dtype=str)
        # `get_indexer` returns -1 for the only text that is not among the names, `nan`: a missing value.
        return pd.Categorical.from_codes(names.get_indexer(pd.Index(plain, dtype=str)), categories=names)
    if plain.dtype.kind not in "iub":
        return pd.Categorical(plain)
    # Codes may be unsigned; as int64 all types compare with -1 alike.
    codes = plain.astype(np.int64)
    # Booleans of a column without a False (`_Encoder._booleans`); codes of pandas are signed, so the type tells.
    if plain.dtype == np.uint8 and tuple(categories) == TRUTHS:
        return codes != 0
    wrong = np.flatnonzero((codes < -1) | (codes >= len(categories)))
    if len(wrong):
        raise SourceError(
            f"C31: {what} has code {int(codes[wrong[0]])} in row {int(wrong[0]):,}, but there are {len(categories):,} categories; "
            "write the CXG again from its source."
        )
    return pd.Categorical.from_codes(codes, categories=pd.Index(categories, dtype=str))


def _texts(values: NDArray[Any], what: str) -> NDArray[np.object_]:
    out = np.empty(len(values), object)
    out[:] = decode_texts(values.tolist(), f"C00: {what}")
    return out
