"""Arrays as they are written: their schemas, sparse ones in global order, dense ones in bands of rows."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from raggedatlas.formats.cxg.options import is_path_name
from raggedatlas.formats.cxg.schema import ANONYMOUS, COVERAGE, HINTS, MEMBERS, OBS, VAR
from raggedatlas.formats.cxg.table_encoder import Table
from raggedatlas.formats.cxg.tiledb_arrays import (
    absolute_uri,
    context,
    import_tiledb,
    low_level_module,
    open_array,
    tiledb_errors,
)

ZSTD_LEVEL = 3
"""Level 22, which others use, takes some 75 times as long for an eighth less."""

CAPACITY = 262_144
"""Cells of a sparse array that are compressed together; more make single rows slow to read, fewer do not make them faster."""

ROW_TILE, MATRIX_TILE = 256, (256, 2048)
SPARSE_TILE = (512, 2048)
TABLE_TILE = 1000
DENSE_CAPACITY = 10_000

BAND_BYTES = 64 << 20
"""Rows of a dense array that are written at once take about this much; each write is a fragment."""

TABLE_BYTES, TEXT_BYTES = 32 << 20, 128
"""Rows of a table that are written at once take about this much, where one text takes so much as Python's string."""

MAX_FRAGMENTS = 32
"""A dense array in more fragments is consolidated at the end."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension: its name, length, and tile."""

    name: str
    length: int
    tile: int
    shuffled: bool = False
    dtype: str = "uint32"


@dataclass(frozen=True, slots=True)
class Form:
    """The schema of an array.

    Parameters
    ----------
    axes : tuple of Axis
        From 0 to the length, exclusive.
    attributes : mapping of str to str
        Name -> NumPy dtype, ``"text"`` for text.
    sparse : bool
        Whether only some cells are there.
    by_columns : bool
        Whether tiles are laid out by columns.
    """

    axes: tuple[Axis, ...]
    attributes: Mapping[str, str]
    sparse: bool = False
    by_columns: bool = False


TEXT = "text"


def split_spec(name: str, n: int, other: str) -> Form:
    """Return the form of ``Xr`` (by ``obs``) or ``Xc`` (by ``var``): a value and the place on the other axis for every entry."""
    return Form((Axis(name, n, min(n, ROW_TILE), shuffled=True),), {ANONYMOUS: "float32", other: "uint32"}, sparse=True)


def matrix_spec(shape: tuple[int, int], *, sparse: bool) -> Form:
    """Return the form of ``X``."""
    tiles = SPARSE_TILE if sparse else MATRIX_TILE
    axes = tuple(
        Axis(name, n, min(n, tile), shuffled=sparse) for name, n, tile in zip((OBS, VAR), shape, tiles, strict=True)
    )
    return Form(axes, {ANONYMOUS: "float32"}, sparse=sparse, by_columns=sparse)


def embedding_spec(shape: tuple[int, int], dtype: str) -> Form:
    """Return the form of an embedding."""
    axes = tuple(Axis(f"__dim_{i}", n, min(n, TABLE_TILE)) for i, n in enumerate(shape))
    return Form(axes, {ANONYMOUS: dtype})


def table_spec(n: int, attributes: Mapping[str, str]) -> Form:
    """Return the form of a table."""
    return Form((Axis("__dim_0", n, min(n, TABLE_TILE)),), attributes)


def metadata_array_spec() -> Form:
    """Return the form of what only holds metadata."""
    return Form((Axis("__dim_0", 1, 1, dtype="uint64"),), {ANONYMOUS: "float64"})


def filters(*, shuffled: bool = False) -> Any:  # noqa: ANN401  (a tiledb.FilterList)
    """Return the filters of values, in the order of writing; the last one finds flipped bits when they are read."""
    tiledb = import_tiledb()
    first = [tiledb.ByteShuffleFilter()] if shuffled else []
    return tiledb.FilterList([*first, tiledb.ZstdFilter(level=ZSTD_LEVEL), tiledb.ChecksumMD5Filter()])


def create(path: Path, form: Form) -> None:
    """Make an empty array.

    Raises
    ------
    StoreError
        If the place refuses.
    """
    tiledb = import_tiledb()
    packed, shuffled = filters(), filters(shuffled=True)
    with tiledb_errors(path, writes=True):
        axes = [
            tiledb.Dim(
                axis.name,
                domain=(0, axis.length - 1),
                tile=axis.tile,
                dtype=np.dtype(axis.dtype),
                filters=shuffled if axis.shuffled else None,
                ctx=context(),
            )
            for axis in form.axes
        ]
        attributes = [
            tiledb.Attr(name, dtype="U0", var=True, filters=packed, ctx=context())
            if dtype == TEXT
            else tiledb.Attr(
                name, dtype=np.dtype(dtype), filters=packed if dtype.endswith("int8") else shuffled, ctx=context()
            )
            for name, dtype in form.attributes.items()
        ]
        schema = tiledb.ArraySchema(
            domain=tiledb.Domain(*axes, ctx=context()),
            attrs=attributes,
            cell_order="row-major",
            tile_order="col-major" if form.by_columns else "row-major",
            capacity=CAPACITY if form.sparse else DENSE_CAPACITY,
            offsets_filters=packed,
            sparse=form.sparse,
            allows_duplicates=form.sparse,
            ctx=context(),
        )
        tiledb.Array.create(absolute_uri(path), schema, ctx=context())


def create_group(path: Path) -> None:
    """Make a group; its members are found by looking into it."""
    tiledb = import_tiledb()
    with tiledb_errors(path, writes=True):
        tiledb.group_create(absolute_uri(path), ctx=context())


def write_metadata(path: Path, values: Mapping[str, Any]) -> None:
    """Write metadata of an array."""
    if values:
        with open_array(path, "w") as array:
            for key, value in values.items():
                array.meta[key] = value


def write_table(path: Path, table: Table, metadata: Mapping[str, Any]) -> None:
    """Write a table of cells or features with its hints and further metadata, in bands of whole tiles."""
    attributes = {c.name: TEXT if c.values.dtype == object else str(c.values.dtype) for c in table.columns}
    n_rows = len(table.columns[0].values)
    create(path, table_spec(n_rows, attributes))
    width = sum(
        TEXT_BYTES if column.values.dtype == object else column.values.dtype.itemsize for column in table.columns
    )
    step = max(1, TABLE_BYTES // (width * TABLE_TILE)) * TABLE_TILE
    with open_array(path, "w") as array:
        for start in range(0, n_rows, step):
            rows = slice(start, min(start + step, n_rows))
            array[rows] = {column.name: column.values[rows] for column in table.columns}
        array.meta[HINTS] = json.dumps(table.hints())
        for key, value in metadata.items():
            array.meta[key] = value
    consolidate(path, MAX_FRAGMENTS)


def write_metadata_array(path: Path, metadata: Mapping[str, Any]) -> None:
    """Write an array that holds metadata: one cell, as all real files have."""
    create(path, metadata_array_spec())
    with open_array(path, "w") as array:
        array[:] = np.zeros(1)
        for key, value in metadata.items():
            array.meta[key] = value


class SparseWriter(Protocol):
    """Takes the cells of a sparse array in the order of its tiles."""

    def write(self, parts: Mapping[str, NDArray[Any]]) -> None:
        """Append cells: a value for each dimension and attribute."""
        ...

    def close(self) -> None:
        """Finish the array."""
        ...

    def abort(self) -> None:
        """Let go of it."""
        ...


def open_sparse_writer(path: Path, form: Form) -> SparseWriter:
    """Make a sparse array, and return what writes its cells in order.

    The library's low-level query writes them as they come, as one fragment; where its private names are gone, each block is
    sorted and written by the public call, and fragments are consolidated at the end, which takes several times as long.
    """
    create(path, form)
    if low_level_module() is not None:
        with suppress(AttributeError, TypeError):
            return GlobalOrderWriter(path)
    return UnorderedWriter(path, tuple(axis.name for axis in form.axes))


class GlobalOrderWriter:
    """Writes cells in global order, as one fragment.

    Parameters
    ----------
    path : Path
        Of an array that is there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with tiledb_errors(path, writes=True):
            self._array, self._query = _global_query(path)
        self._begun = False

    def write(self, parts: Mapping[str, NDArray[Any]]) -> None:
        """Append cells; they come in the order of tiles, and go on where the last ones ended."""
        if not len(next(iter(parts.values()))):
            return
        with tiledb_errors(self._path, writes=True):
            self._begun = True
            held = {name: np.ascontiguousarray(values) for name, values in parts.items()}
            for name, values in held.items():
                self._query.set_data_buffer(name, values, values.size)
            self._query._submit()

    def close(self) -> None:
        """Finish the fragment."""
        with tiledb_errors(self._path, writes=True):
            if self._begun:
                self._query.finalize()
            self.abort()

    def abort(self) -> None:
        """Let go of the array; a fragment that is not finished is never seen."""
        self._query = None
        self._array.close()


def _global_query(path: Path) -> tuple[Any, Any]:
    engine = low_level_module()
    array = import_tiledb().open(absolute_uri(path), "w", ctx=context())
    # The handle below the public array; releases that had none were it themselves.
    query = engine.Query(array.ctx, getattr(array, "array", array), engine.QueryType.WRITE)
    query.layout = engine.LayoutType.GLOBAL_ORDER
    return array, query


class UnorderedWriter:
    """Writes cells by the public call, a fragment for each block, and consolidates them.

    Parameters
    ----------
    path : Path
        Of an array that is there.
    axes : tuple of str
        Names of its dimensions.
    """

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
        """Make one fragment of all."""
        consolidate(self._path, 1)

    def abort(self) -> None:
        """Nothing is open."""


def consolidate(path: Path, most: int) -> None:
    """Join the fragments of an array if they are more than so many."""
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
        tiledb.vacuum(absolute_uri(path), ctx=context())


class DenseBandWriter:
    """Writes the rows of a dense array from above, in bands of whole tiles.

    Parameters
    ----------
    path : Path
        Where the array is made.
    form : Form
        Of two dimensions and one attribute.
    """

    def __init__(self, path: Path, form: Form) -> None:
        create(path, form)
        self._path = path
        rows, columns = form.axes
        self.shape, self.dtype = (rows.length, columns.length), np.dtype(form.attributes[ANONYMOUS])
        tall = max(1, BAND_BYTES // (self.dtype.itemsize * columns.length * rows.tile)) * rows.tile
        self._band = np.zeros((min(tall, rows.length), columns.length), self.dtype)
        self._held = 0
        self.n_rows = 0

    def append(self, n: int, fill: Callable[[NDArray[Any], slice], None]) -> None:
        """Take `n` rows: `fill` is given zeroed rows of the band and which of the new rows belong there."""
        done = 0
        while done < n:
            take = min(n - done, len(self._band) - self._held)
            fill(self._band[self._held : self._held + take], slice(done, done + take))
            self._held += take
            done += take
            if self._held == len(self._band):
                self._flush()

    def close(self) -> None:
        """Write what is held, and join the fragments."""
        self._flush()
        consolidate(self._path, MAX_FRAGMENTS)

    def _flush(self) -> None:
        if self._held:
            with open_array(self._path, "w") as array:
                array[self.n_rows : self.n_rows + self._held, :] = self._band[: self._held]
            self.n_rows += self._held
            self._held = 0
            self._band[:] = 0


def write_sparse_table(path: Path, frame: Any, axes: list[dict[str, Any]]) -> None:  # noqa: ANN401  (a pandas frame)
    """Write a sparse array whose cells are the rows of a table: a column for each axis, the others its values.

    Parameters
    ----------
    path : Path
        Where to.
    frame : pandas.DataFrame
        The cells.
    axes : list of dict
        ``name`` and ``dtype`` of each axis, and ``domain`` and ``tile`` unless it is of text.
    """
    tiledb = import_tiledb()
    names = [axis["name"] for axis in axes]
    values = {str(name): frame[name].to_numpy() for name in frame.columns if name not in names}
    packed = filters()
    with tiledb_errors(path, writes=True):
        made = [
            tiledb.Dim(
                axis["name"],
                domain=tuple(axis["domain"]) if "domain" in axis else (None, None),
                tile=axis.get("tile"),
                dtype=np.dtype(axis["dtype"]) if "domain" in axis else "ascii",
                filters=packed,
                ctx=context(),
            )
            for axis in axes
        ]
        attributes = [
            tiledb.Attr(name, dtype="U0", var=True, filters=packed, ctx=context())
            if part.dtype.kind not in "biuf"
            else tiledb.Attr(name, dtype=part.dtype, filters=packed, ctx=context())
            for name, part in values.items()
        ]
        schema = tiledb.ArraySchema(
            tiledb.Domain(*made, ctx=context()),
            attributes,
            offsets_filters=packed,
            sparse=True,
            allows_duplicates=True,
            ctx=context(),
        )
        tiledb.Array.create(absolute_uri(path), schema, ctx=context())
    if len(frame):
        with open_array(path, "w") as array:
            coordinates = tuple(frame[name].to_numpy() for name in names)
            array[coordinates] = {n: v.astype(object) if v.dtype.kind not in "biuf" else v for n, v in values.items()}


KINDS = ("values", "table", "axes", "metadata")
"""Members of what stands for one array; anything else is a group of such."""


def write_extra_arrays(folder: Path, arrays: Any) -> None:  # noqa: ANN401
    """Write what `source` found in a CXG and no CXG has a name for; what is in another shape is passed over."""
    if not isinstance(arrays, Mapping):
        return
    for name, value in arrays.items():
        taken = name in MEMBERS and name != COVERAGE
        if isinstance(value, Mapping) and is_path_name(str(name)) and not taken:
            _write(folder / str(name), value)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    if "table" in value and isinstance(value.get("axes"), str):
        write_sparse_table(path, value["table"], json.loads(value["axes"]))
    elif "table" in value:
        _write_table(path, value["table"])
    elif isinstance(value.get("values"), np.ndarray):
        _write_values(path, value["values"])
    elif not set(value) & set(KINDS):
        create_group(path)
        write_extra_arrays(path, value)
        return
    else:
        return
    text = value.get("metadata")
    write_metadata(path, json.loads(text) if isinstance(text, str) else {})


def _write_values(path: Path, values: NDArray[Any]) -> None:
    text = values.dtype.kind in "OUS"
    if values.ndim == 0 or 0 in values.shape:
        return
    axes = tuple(Axis(f"__dim_{i}", n, min(n, 1000)) for i, n in enumerate(values.shape))
    create(path, Form(axes, {ANONYMOUS: TEXT if text else str(values.dtype)}))
    with open_array(path, "w") as array:
        array[:] = values.astype(object) if text else values


def _write_table(path: Path, frame: Any) -> None:  # noqa: ANN401  (a pandas frame)
    """Write a table with its row numbers as the only dimension."""
    if not len(frame):
        return
    columns = {str(name): frame[name].to_numpy() for name in frame.columns}
    plain = {
        name: values.astype(object) if values.dtype.kind not in "biuf" else values for name, values in columns.items()
    }
    create(path, table_spec(len(frame), {n: TEXT if v.dtype == object else str(v.dtype) for n, v in plain.items()}))
    with open_array(path, "w") as array:
        array[:] = plain
