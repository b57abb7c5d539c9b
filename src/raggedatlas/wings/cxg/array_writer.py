"""Writers of a CXG's arrays: schemas, tables, sparse arrays in global order, dense arrays in bands, and the matrix in each layout."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import ValuesError
from raggedatlas.formats.matrix_readers import DenseRows, MatrixLocation, RowReader
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.wings.cxg.array_reader import DenseArray, LazyArray, SparseRowReader
from raggedatlas.wings.cxg.column_sort import ExternalColumnSort, merge_slices
from raggedatlas.wings.cxg.options import (
    ANONYMOUS,
    HINTS,
    OBS,
    VAR,
    XC,
    XR,
    CxgOptions,
    X,
)
from raggedatlas.wings.cxg.table_encoder import Table
from raggedatlas.wings.cxg.tiledb_arrays import (
    absolute_uri,
    context,
    import_tiledb,
    low_level_module,
    open_array,
    tiledb_errors,
)

ZSTD_LEVEL = 3
"""Compression level; level 22, which other writers use, takes about 75 times as long and saves an eighth."""

CAPACITY = 262_144
"""Cells of a sparse array that are compressed together; single rows are slower to read with more, and not faster with fewer."""

ROW_TILE, MATRIX_TILE = 256, (256, 2048)
SPARSE_TILE = (512, 2048)
TABLE_TILE = 1000
DENSE_CAPACITY = 10_000

BAND_BYTES = 64 << 20
"""Size of the rows of a dense array that are written at once; each write is a fragment."""

TABLE_BYTES, TEXT_BYTES = 32 << 20, 128
"""Size of the rows of a table that are written at once, and the assumed size of a Python string."""

MAX_FRAGMENTS = 32
"""Number of fragments above which a dense array is consolidated at the end."""


@dataclass(frozen=True, slots=True)
class Form:
    """The schema of an array."""

    axes: Mapping[str, tuple[int, int]]  # name -> length and tile
    attributes: Mapping[str, str]  # name -> NumPy dtype, ``"text"`` for text
    sparse: bool = False
    by_columns: bool = False  # whether tiles are laid out by columns
    dtype: str = "uint32"  # of the axes


TEXT = "text"


def split_spec(name: str, n: int, other: str) -> Form:
    """Return the form of ``Xr`` (by ``obs``) or ``Xc`` (by ``var``): value and position on the other axis of every entry."""
    # TileDB refuses a tile that is longer than its axis, hence `min` here and in the forms below.
    return Form({name: (n, min(n, ROW_TILE))}, {ANONYMOUS: "float32", other: "uint32"}, sparse=True)


def matrix_spec(shape: tuple[int, int], *, sparse: bool) -> Form:
    """Return the form of ``X``."""
    tiles = SPARSE_TILE if sparse else MATRIX_TILE
    axes = {name: (n, min(n, tile)) for name, n, tile in zip((OBS, VAR), shape, tiles, strict=True)}
    return Form(axes, {ANONYMOUS: "float32"}, sparse=sparse, by_columns=sparse)


def grid_spec(shape: tuple[int, ...], attributes: Mapping[str, str], dtype: str = "uint32") -> Form:
    """Return the form of a table, an embedding, or any other dense array."""
    return Form({f"__dim_{i}": (n, min(n, TABLE_TILE)) for i, n in enumerate(shape)}, attributes, dtype=dtype)


def filters(*, shuffled: bool = False) -> Any:  # noqa: ANN401  (a tiledb.FilterList)
    """Return the filters of values, in the order of writing; the last one detects flipped bits when they are read."""
    tiledb = import_tiledb()
    shuffle = [tiledb.ByteShuffleFilter()] if shuffled else []
    return tiledb.FilterList([*shuffle, tiledb.ZstdFilter(level=ZSTD_LEVEL), tiledb.ChecksumMD5Filter()])


def create(path: Path, form: Form) -> None:
    """Create an empty array."""
    tiledb, packed, shuffled = import_tiledb(), filters(), filters(shuffled=True)
    with tiledb_errors(path, writes=True):
        axes = [
            tiledb.Dim(
                # Bounds are inclusive, so no axis can be empty: the sink refuses such shapes first (C71).
                # Filters of axes matter to sparse arrays only, which store coordinates.
                *(name, (0, length - 1), tile, shuffled if form.sparse else None),
                dtype=np.dtype(form.dtype),
                ctx=context(),
            )
            for name, (length, tile) in form.axes.items()
        ]
        attributes = [
            tiledb.Attr(name, dtype="U0", var=True, filters=packed, ctx=context())
            if dtype == TEXT
            # Shuffling regroups the bytes of a value, so it has no effect on types of one byte.
            else tiledb.Attr(
                name, dtype=np.dtype(dtype), filters=packed if dtype.endswith("int8") else shuffled, ctx=context()
            )
            for name, dtype in form.attributes.items()
        ]
        schema = tiledb.ArraySchema(
            tiledb.Domain(*axes, ctx=context()),
            attributes,
            sparse=form.sparse,
            # In `Xr` and `Xc` all entries of a row share their only coordinate, which TileDB takes for duplicates.
            allows_duplicates=form.sparse,
            offsets_filters=packed,
            tile_order="col-major" if form.by_columns else "row-major",
            capacity=CAPACITY if form.sparse else DENSE_CAPACITY,
            ctx=context(),
        )
        tiledb.Array.create(absolute_uri(path), schema, ctx=context())


def create_group(path: Path) -> None:
    """Create a group; its members are not registered, since readers list the folder."""
    tiledb = import_tiledb()
    with tiledb_errors(path, writes=True):
        tiledb.group_create(absolute_uri(path), ctx=context())


def write_table(path: Path, table: Table, metadata: Mapping[str, Any]) -> None:
    """Write a table of cells or features with its hints and further metadata, in bands of whole tiles."""
    attributes = {
        column.name: (TEXT if column.values.dtype == object else str(column.values.dtype)) for column in table.columns
    }
    n_rows = len(table.columns[0].values)
    create(path, grid_spec((n_rows,), attributes))
    width = sum(
        TEXT_BYTES if column.values.dtype == object else column.values.dtype.itemsize for column in table.columns
    )
    # Each assignment below is a fragment of whole tiles; a band that ended within a tile would store it twice.
    step = max(1, TABLE_BYTES // (width * TABLE_TILE)) * TABLE_TILE
    with open_array(path, "w") as array:
        for start in range(0, n_rows, step):
            rows = slice(start, min(start + step, n_rows))
            array[rows] = {column.name: column.values[rows] for column in table.columns}
        for key, value in {**metadata, HINTS: json.dumps(table.hints())}.items():
            array.meta[key] = value
    consolidate(path, MAX_FRAGMENTS)


def write_metadata_array(path: Path, metadata: Mapping[str, Any]) -> None:
    """Write an array of one cell for metadata, as all real files have."""
    create(path, grid_spec((1,), {ANONYMOUS: "float64"}, "uint64"))
    with open_array(path, "w") as array:
        array[:] = np.zeros(1)
        for key, value in metadata.items():
            array.meta[key] = value


def open_sparse_writer(path: Path, form: Form) -> "GlobalOrderWriter | UnorderedWriter":
    """Create a sparse array, and return a writer of its cells.

    The library's low-level query writes one fragment in global order. It uses private names; without them, each block
    is sorted and written by the public call, and fragments are consolidated at the end, which takes several times as
    long.
    """
    create(path, form)
    if low_level_module() is not None:
        with suppress(AttributeError, TypeError):
            return GlobalOrderWriter(path)
    return UnorderedWriter(path, tuple(form.axes))


class GlobalOrderWriter:
    """Writer of cells of an existing array in global order, as one fragment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with tiledb_errors(path, writes=True):
            self._array, self._query = _global_query(path)
        self._begun = False

    def write(self, parts: Mapping[str, NDArray[Any]]) -> None:
        """Append cells in the order of tiles, after the previous ones."""
        if not len(next(iter(parts.values()))):
            return
        with tiledb_errors(self._path, writes=True):
            self._begun = True
            # The query keeps bare pointers, so copies made here must live until `_submit` returns.
            buffers = {name: np.ascontiguousarray(values) for name, values in parts.items()}
            for name, values in buffers.items():
                self._query.set_data_buffer(name, values, values.size)
            self._query._submit()

    def close(self) -> None:
        """Finish the fragment."""
        with tiledb_errors(self._path, writes=True):
            if self._begun:
                # TileDB holds back the cells of the last incomplete tile; without this they are lost.
                self._query.finalize()
            self.abort()

    def abort(self) -> None:
        """Close the array; readers ignore an unfinished fragment."""
        self._query = None
        self._array.close()


def _global_query(path: Path) -> tuple[Any, Any]:
    engine = low_level_module()
    array = import_tiledb().open(absolute_uri(path), "w", ctx=context())
    # The handle below the public array; in older releases the array itself.
    query = engine.Query(array.ctx, getattr(array, "array", array), engine.QueryType.WRITE)
    query.layout = engine.LayoutType.GLOBAL_ORDER
    return array, query


class UnorderedWriter:
    """Writer of cells of an existing array by the public call, one fragment for each block, which are consolidated at the end."""

    def __init__(self, path: Path, axes: tuple[str, ...]) -> None:
        self._path, self._axes = path, axes

    def write(self, parts: Mapping[str, NDArray[Any]]) -> None:
        """Write a block of cells."""
        coordinates = tuple(parts[name] for name in self._axes)
        values = {name: part for name, part in parts.items() if name not in self._axes}
        if len(coordinates[0]):
            with open_array(self._path, "w") as array:
                array[coordinates] = values if len(values) > 1 else next(iter(values.values()))

    def close(self) -> None:
        """Consolidate all fragments into one."""
        consolidate(self._path, 1)

    def abort(self) -> None:
        """Do nothing, since nothing is open."""


def consolidate(path: Path, most: int) -> None:
    """Consolidate the fragments of an array if there are more than `most`."""
    tiledb = import_tiledb()
    with tiledb_errors(path, writes=True):
        if len(tiledb.array_fragments(absolute_uri(path), ctx=context())) <= most:
            return
        config = tiledb.Config(
            {
                **context().config().dict(),
                "sm.consolidation.total_buffer_size": str(2 * BAND_BYTES),
                "sm.consolidation.buffer_size": str(BAND_BYTES),
            }
        )
        tiledb.consolidate(absolute_uri(path), config=config, ctx=context())
        # Consolidation leaves the old fragments in place, where `array_fragments` still counts them.
        tiledb.vacuum(absolute_uri(path), ctx=context())


class DenseBandWriter:
    """Writer of the rows of a new dense array in order, in bands of complete tiles.

    `form` has two dimensions and one attribute, the anonymous one.
    """

    def __init__(self, path: Path, form: Form) -> None:
        create(path, form)
        self._path = path
        (n_rows, tile), (n_columns, _) = form.axes.values()
        dtype = np.dtype(form.attributes[ANONYMOUS])
        tall = max(1, BAND_BYTES // (dtype.itemsize * n_columns * tile)) * tile
        self._band = np.zeros((min(tall, n_rows), n_columns), dtype)
        self._n_pending = 0
        self.n_rows = 0

    def append(self, n: int, fill: Callable[[NDArray[Any], slice], None]) -> None:
        """Append `n` rows; `fill` gets zeroed rows of the band, and the slice of the new rows to write there."""
        start = 0
        while start < n:
            k = min(n - start, len(self._band) - self._n_pending)
            fill(self._band[self._n_pending : self._n_pending + k], slice(start, start + k))
            self._n_pending += k
            start += k
            if self._n_pending == len(self._band):
                self._flush()

    def close(self) -> None:
        """Write the remaining rows, and consolidate the fragments."""
        self._flush()
        consolidate(self._path, MAX_FRAGMENTS)

    def _flush(self) -> None:
        if self._n_pending:
            with open_array(self._path, "w") as array:
                array[self.n_rows : self.n_rows + self._n_pending, :] = self._band[: self._n_pending]
            self.n_rows += self._n_pending
            self._n_pending = 0
            # `fill` of a sparse block sets its non-zeros only and relies on zeros everywhere else.
            self._band[:] = 0


READ_ENTRIES = 1 << 21
"""Number of entries that are read back at once, in complete rows."""


class MatrixWriter:
    """Writer of the rows of a matrix, which chooses the layout by `n_entries`, or from the first rows if that is None.

    `work` is the path for temporary files, `shape` is ``(n_cells, n_features)``, and `n_entries` is the maximum number
    of entries. `n_nonfinite` counts NaN and infinite values; `first_nonfinite` is cell and feature of the first of
    them.
    """

    def __init__(
        self, folder: Path, work: Path, shape: tuple[int, int], n_entries: int | None, options: CxgOptions
    ) -> None:
        self._folder, self._work, self.shape = folder, work, shape
        self._n_entries, self._options = n_entries, options
        self._writer: _DenseLayout | _SparseLayout | None = None
        self.n_rows = 0
        self.n_nonfinite = 0
        self.first_nonfinite: tuple[int, int] | None = None

    def append(self, block: Block) -> None:
        """Append rows; raise C03 for a value that float32 cannot represent."""
        rows = normalize_block(block, self.n_rows)
        if self._writer is None:
            self._writer = self._open_writer(len(rows.indices), rows.n_rows)
        nonfinite = np.flatnonzero(~np.isfinite(rows.layers["values"]))
        if len(nonfinite) and self.first_nonfinite is None:
            # `right` skips empty rows, which share the pointer of the entry but do not contain it.
            row = int(np.searchsorted(rows.indptr, nonfinite[0], side="right")) - 1
            self.first_nonfinite = (self.n_rows + row, int(rows.indices[nonfinite[0]]))
        self.n_nonfinite += len(nonfinite)
        self._writer.append(rows)
        self.n_rows += rows.n_rows

    def finish(self) -> None:
        """Write the remaining entries."""
        if self._writer is None:
            self._writer = self._open_writer(0, 0)
        self._writer.finish()

    def abort(self) -> None:
        """Release open files."""
        if self._writer is not None:
            self._writer.abort()

    def blocks(self) -> Iterator[Block]:
        """Iterate over the written matrix, in blocks of rows."""
        assert self._writer is not None
        reader = self._writer.rows()
        per_row = max(1, (reader.n_entries or self.shape[0] * self.shape[1]) // self.shape[0])
        step = max(1, READ_ENTRIES // per_row)
        try:
            for start in range(0, self.shape[0], step):
                yield reader.read(start, min(start + step, self.shape[0]))
        finally:
            reader.close()

    def _open_writer(self, n_entries: int, n_rows: int) -> "_DenseLayout | _SparseLayout":
        """Open the writer of the chosen layout, given the numbers of entries and rows of the first block."""
        if self._n_entries is not None:
            n_entries, n_rows = self._n_entries, self.shape[0]
        percentage = 100 * n_entries / (n_rows * self.shape[1]) if n_rows else 0.0
        sparse = self._options.layout == "sparse"
        if self._options.layout == "auto":
            sparse = percentage < self._options.sparse_below
        if not sparse:
            return _DenseLayout(self._folder, self.shape)
        return _SparseLayout(self._folder, self._work, self.shape, split=self._options.profile == "0.3.0")


class _DenseLayout:
    def __init__(self, folder: Path, shape: tuple[int, int]) -> None:
        self._path = folder / X
        self._bands = DenseBandWriter(self._path, matrix_spec(shape, sparse=False))

    def append(self, block: CsrBlock) -> None:
        values = block.layers["values"]

        def fill(band: NDArray[Any], rows: slice) -> None:
            # `rows` counts from the start of the block, which may be split over two bands.
            indptr = block.indptr[rows.start : rows.stop + 1]
            entries = slice(int(indptr[0]), int(indptr[-1]))
            at = np.repeat(np.arange(rows.stop - rows.start), np.diff(indptr))
            band[at, block.indices[entries]] = values[entries]

        self._bands.append(block.n_rows, fill)

    def finish(self) -> None:
        self._bands.close()

    def abort(self) -> None:
        """Do nothing, since nothing is open."""

    def rows(self) -> RowReader:
        return DenseRows(DenseArray(LazyArray(self._path), "C14"), MatrixLocation(str(self._path), X, str))


class _SparseLayout:
    """Writer of a sparse matrix, whose entries are sorted by column until `finish`: ``Xr`` and ``Xc``, or a two-dimensional ``X``."""

    def __init__(self, folder: Path, work: Path, shape: tuple[int, int], *, split: bool) -> None:
        self._path, self._shape, self._split, self._n_rows = folder / (XR if split else X), shape, split, 0
        form = split_spec(OBS, shape[0], VAR) if split else matrix_spec(shape, sparse=True)
        self._array = open_sparse_writer(self._path, form)
        self._sort = ExternalColumnSort(shape[1], work)

    def append(self, block: CsrBlock) -> None:
        first = self._n_rows
        rows = np.repeat(np.arange(first, first + block.n_rows, dtype=np.uint32), np.diff(block.indptr))
        columns, values = block.indices.astype(np.uint32), block.layers["values"]
        if self._split:
            # Rows arrive in order, which is the global order of an array of one axis: `Xr` needs no sort.
            self._array.write({OBS: rows, ANONYMOUS: values, VAR: columns})
        self._sort.add(rows, columns, values)
        self._n_rows += block.n_rows

    def finish(self) -> None:
        try:
            if self._split:
                self._write_columns()
            else:
                self._write_tiles()
        finally:
            self._sort.close()

    def abort(self) -> None:
        self._array.abort()
        self._sort.close()

    def rows(self) -> RowReader:
        return SparseRowReader(LazyArray(self._path), self._shape, "C15" if self._split else "C40")

    def _write_columns(self) -> None:
        """Close ``Xr``, which has the rows, and write the sorted entries to ``Xc``."""
        self._array.close()
        by_column = open_sparse_writer(self._path.with_name(XC), split_spec(VAR, self._shape[1], OBS))
        try:
            for first, bounds, slices in self._sort.bands():
                rows, values = merge_slices(bounds, slices)
                columns = np.repeat(np.arange(first, first + len(bounds) - 1, dtype=np.uint32), np.diff(bounds))
                by_column.write({VAR: columns, ANONYMOUS: values, OBS: rows})
            by_column.close()
        # `abort` of the layout knows `Xr` only, so `Xc` must be closed here.
        except BaseException:
            by_column.abort()
            raise

    def _write_tiles(self) -> None:
        """Write ``X`` tile by tile down each band of columns, so that a feature is in few tiles."""
        from scipy.sparse import csc_array

        for first, _, slices in self._sort.bands(min(SPARSE_TILE[1], self._shape[1])):
            for bounds, rows, values in slices:
                if not len(rows):
                    continue
                low = int(rows.min())
                shape = int(rows.max()) - low + 1, len(bounds) - 1
                # Tiles go down a band of columns, and cells in a tile by rows: a band sorted by rows is in global
                # order. A row that is split over two runs has its lower columns in the first.
                by_row = csc_array((values, rows.astype(np.int64) - low, bounds), shape).tocsr()
                at = np.repeat(np.arange(low, low + by_row.shape[0], dtype=np.uint32), np.diff(by_row.indptr))
                columns = by_row.indices.astype(np.uint32) + np.uint32(first)
                self._array.write({OBS: at, VAR: columns, ANONYMOUS: by_row.data})
        self._array.close()


def normalize_block(block: Block, first: int) -> CsrBlock:
    """Return rows as float32 without zeros, sorted by column, with duplicate entries summed.

    Reads the layer ``"values"``. Raises C03 for a value that float32 cannot represent; `first`, the number of the first
    row, is for its message.

    Examples
    --------
    >>> rows = normalize_block(DenseBlock({"values": np.array([[0, 2], [3, 0]])}), 0)
    >>> rows.indices.tolist(), rows.layers["values"].tolist()
    ([1, 0], [2.0, 3.0])
    """
    indices: NDArray[Any]
    if isinstance(block, DenseBlock):
        dense = block.layers["values"]
        rows, indices = np.nonzero(dense)
        indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))]).astype(np.int64)
        values, n_cols = dense[rows, indices], dense.shape[1]
    else:
        indptr, indices, values, n_cols = block.indptr, block.indices, block.layers["values"], block.n_cols
        steps = np.diff(indices.astype(np.int64, copy=False))
        starts = indptr[1:-1]
        # Steps from one row to the next mean nothing and count as ascending. Empty rows at either end have no
        # such step: they would address -1, or the place after the last step.
        steps[starts[(starts > 0) & (starts < len(indices))] - 1] = 1
        if len(steps) and steps.min() <= 0:
            from scipy.sparse import csr_array

            # SciPy sums in the dtype of the values, where small integers wrap and True + True is True.
            wide = {"b": np.int64, "i": np.int64, "u": np.uint64}.get(values.dtype.kind, np.float64)
            # `sum_duplicates` sorts in place; the indices belong to the caller.
            matrix = csr_array((values.astype(wide), indices.copy(), indptr.copy()), shape=(block.n_rows, n_cols))
            matrix.sum_duplicates()
            indptr, indices, values = matrix.indptr.astype(np.int64), matrix.indices, matrix.data
    small = _as_float32(values, indptr, first)
    # Tested after rounding, so that float64 values that became 0 are dropped too; NaN is kept.
    if not small.all():
        kept = small != 0
        # Entry `i` of the running count is the number of entries kept before `i`, hence the new pointer.
        indptr = np.concatenate([[0], np.cumsum(kept)])[indptr]
        indices, small = indices[kept], small[kept]
    return CsrBlock(indptr, indices, {"values": small}, n_cols)


def _as_float32(values: NDArray[Any], indptr: NDArray[np.int64], first: int) -> NDArray[np.float32]:
    if values.dtype == np.float32:
        return values
    with np.errstate(over="ignore"):
        small = values.astype(np.float32)
    if values.dtype.kind == "f":
        wrong = np.isinf(small) & np.isfinite(values)
    elif values.dtype.itemsize > 2 and len(values):
        # beyond 2**24 not every integer is a float32; longdouble compares integers of 64 bits exactly
        wrong = (
            small.astype(np.longdouble) != values.astype(np.longdouble)
            if np.abs(small).max() >= 2**24
            else np.zeros(0, bool)
        )
    else:
        return small
    if wrong.any():
        entry = int(np.flatnonzero(wrong)[0])
        row = first + int(np.searchsorted(indptr, entry, side="right")) - 1
        raise ValuesError(
            f"C03: the value {values[entry]} of cell {row:,} cannot be represented by float32, the type of the matrix of a CXG; scale the matrix, or "
            "write another one (x=)."
        )
    return small
