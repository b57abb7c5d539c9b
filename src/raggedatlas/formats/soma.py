"""SOMA experiments (TileDB-SOMA, CELLxGENE Census) as a source: one measurement, its X layers streamed by rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import LimitError, MissingExtraError, NotFoundError, SourceError
from raggedatlas.formats.composite_source import CompositeSource, MatrixPart, SourceParts
from raggedatlas.formats.containers import MAX_WHOLE, readable
from raggedatlas.formats.matrix_readers import BLOCK_BYTES, DenseRows, MatrixLocation
from raggedatlas.model.batch import CsrBlock
from raggedatlas.model.protocols import NARROW, MatrixForm
from raggedatlas.store.location import AnyPath

if TYPE_CHECKING:
    import pandas as pd

MEASUREMENT = "RNA"
"""Measurement that is read unless another is named."""

MAIN_LAYERS = ("data", "raw")
"""Names of the layer that becomes X: that of tiledbsoma, then that of Census; others become layers."""

JOINID = "soma_joinid"


TiledbKind = Literal["array", "group"]

# The last three identify an array that has lost its schema, which must be reported, not overlooked.
_ARRAY_MARKS = ("__schema", "__array_schema.tdb", "__fragments", "__commits", "__lock.tdb")
_GROUP_MARKS = ("__tiledb_group.tdb", "__group")


def tiledb_kind(path: AnyPath) -> TiledbKind | None:
    """Return whether a folder is a TileDB array or group, from its files; TileDB is not needed."""
    if any((path / mark).exists() for mark in _ARRAY_MARKS):
        return "array"
    return "group" if any((path / mark).exists() for mark in _GROUP_MARKS) else None


def is_soma(path: AnyPath) -> bool:
    """Return whether a folder is a SOMA experiment, by its members: TileDB is not needed."""
    kinds = (tiledb_kind(path), tiledb_kind(path / "obs"), tiledb_kind(path / "ms"))
    return kinds == ("group", "array", "group")


def soma_source(path: Path, measurement: str | None = None) -> CompositeSource:
    """Open a measurement of a SOMA experiment: obs, var, the layers of X, and obsm.

    `measurement` is by default ``RNA``, or the only one. Cells and features must be numbered from 0.
    """
    try:
        import tiledbsoma
    except ImportError as error:
        raise MissingExtraError(
            "Reading SOMA experiments needs tiledbsoma; install it with: pip install 'raggedatlas[soma]'."
        ) from error
    with _soma_errors(str(path), "the experiment"):
        experiment = tiledbsoma.Experiment.open(str(path.absolute()))
    try:
        with _soma_errors(str(path), "its structure"):
            parts = _parts(experiment, str(path), measurement)
        return CompositeSource(parts, name=path.stem, uri=str(path), format="soma", close=experiment.close)
    except BaseException:
        experiment.close()
        raise


@contextmanager
def _soma_errors(uri: str, what: str) -> Iterator[None]:
    """Convert errors of tiledbsoma into a `SourceError` that names the element."""
    import tiledbsoma

    try:
        with readable(uri, what):
            yield
    except tiledbsoma.SOMAError as error:
        reason = " ".join(str(error).split())
        raise SourceError(f"{uri}: {what} cannot be read ({reason:.300}); it is damaged. Write it again.") from error


def _parts(experiment: Any, uri: str, measurement: str | None) -> SourceParts:  # noqa: ANN401
    names = sorted(experiment.ms.keys())
    chosen = measurement or (names[0] if len(names) == 1 else MEASUREMENT)
    if chosen not in names:
        raise NotFoundError(f"{uri} has no measurement {chosen!r}; there are {names}. Name one with measurement=...")
    part = experiment.ms[chosen]
    cells, features = partial(_frame, experiment.obs, uri, "obs"), partial(_frame, part.var, uri, "var")
    shape = (experiment.obs.count, part.var.count)
    place = partial(MatrixLocation, uri, cell_name=lambda row: str(cells().index[row]))
    layers = sorted(part["X"].keys()) if "X" in part else []
    main = next((name for name in MAIN_LAYERS if name in layers), layers[0] if layers else "")
    left_out = {f"ms/{name}": "another measurement; name it by measurement=" for name in names if name != chosen}
    left_out |= {name: "a member of the measurement" for name in part if name not in ("var", "X", "obsm")}
    matrices = []
    for name in layers:
        key = "X" if name == main else f"layers/{name}"
        rows = SomaRows(part["X"][name], shape, place(f"ms/{chosen}/X/{name}"))
        matrices.append(MatrixPart.of(key, rows, "var", "gene_expression"))
    for name in sorted(part["obsm"].keys()) if "obsm" in part else ():
        at = place(f"ms/{chosen}/obsm/{name}")
        matrices.append(MatrixPart.of(f"obsm/{name}", DenseRows(_embedding(part["obsm"][name], shape[0], at), at)))
    return SourceParts(shape[0], cells, tuple(matrices), {"var": features}, left_out)


def _frame(stored: Any, uri: str, what: str) -> "pd.DataFrame":  # noqa: ANN401  (a tiledbsoma.DataFrame)
    with _soma_errors(uri, what):
        frame: pd.DataFrame = stored.read().concat().to_pandas()
    # Entries of matrices name these numbers; rows could not be read as ranges if some were missing.
    if not np.array_equal(frame[JOINID], np.arange(len(frame))):
        raise SourceError(f"{uri}: the rows of {what} are not numbered from 0 to {len(frame) - 1:,}; write it again.")
    frame = frame.drop(columns=JOINID)
    names = f"{what}_id"
    if names in frame:
        return frame.set_index(names).rename_axis(None)
    return frame.set_axis(frame.index.astype(str))


def _embedding(stored: Any, n_cells: int, place: MatrixLocation) -> NDArray[Any]:  # noqa: ANN401  (a sparse or dense array)
    if not stored.is_sparse:
        values = np.asarray(stored.read().to_numpy())
        if values.ndim != 2 or len(values) != n_cells:
            raise SourceError(
                f"{place.uri}: {place.element} has shape {values.shape}, where {n_cells:,} rows belong; write it again."
            )
        return values
    table = stored.read().tables().concat()
    rows, columns, values = (table[name].to_numpy() for name in ("soma_dim_0", "soma_dim_1", "soma_data"))
    if rows.max(initial=-1) >= n_cells:
        raise SourceError(f"{place.uri}: {place.element} has entries outside its {n_cells:,} cells; write it again.")
    # The shape may be larger than what was written.
    width = int(columns.max(initial=-1)) + 1
    if n_cells * width * values.dtype.itemsize > MAX_WHOLE:
        raise LimitError(
            f"{place.uri}: {place.element} has entries up to column {width:,}, which would take more than {MAX_WHOLE:,} bytes as an "
            "array. Write fewer columns, or leave it out."
        )
    out = np.zeros((n_cells, width), values.dtype)
    out[rows, columns] = values
    return out


class SomaRows:
    """A sparse array of cells by features, read by ranges of cells; `shape` may be smaller than that of the array.

    An entry outside the features raises `SourceError` when its rows are read.
    """

    form: MatrixForm = "csr"
    wide = NARROW

    def __init__(self, stored: Any, shape: tuple[int, int], place: MatrixLocation) -> None:  # noqa: ANN401
        if not stored.is_sparse:
            raise SourceError(f"{place.uri}: {place.element} is dense; sparse arrays are read. Write it sparse.")
        self._stored, self._place = stored, place
        self.shape: tuple[int, ...] = shape
        self.dtype = np.dtype(stored.schema.field("soma_data").type.to_pandas_dtype())
        self.n_entries: int | None = int(stored.nnz)

    def stop(self, start: int, stop: int) -> int:
        """Return the end of the next block, by the mean number of entries of a row."""
        per_row = max(1, (self.n_entries or 0) // max(1, self.shape[0])) * (self.dtype.itemsize + 16)
        return int(min(stop, start + max(1, BLOCK_BYTES // per_row)))

    def read(self, start: int, stop: int) -> CsrBlock:
        """Read rows ``[start, stop)``, entries of a row by column."""
        if start == stop:
            # SOMA's slices include their end, so none of them is empty.
            return CsrBlock(
                np.zeros(1, np.int64), np.empty(0, np.int32), {"values": np.empty(0, self.dtype)}, self.shape[1]
            )
        with _soma_errors(self._place.uri, self._place.element):
            # SOMA's slices include their end.
            table = self._stored.read((slice(start, stop - 1),)).tables().concat()
        rows, columns = table["soma_dim_0"].to_numpy(), table["soma_dim_1"].to_numpy()
        if columns.max(initial=-1) >= self.shape[1]:
            raise SourceError(
                f"{self._place.uri}: {self._place.element} has entries outside its {self.shape[1]:,} features."
            )
        # TileDB returns the entries of one tile after another.
        order = np.lexsort((columns, rows))
        pointers = np.searchsorted(rows[order], np.arange(start, stop + 1)).astype(np.int64)
        values = table["soma_data"].to_numpy()[order]
        return CsrBlock(pointers, columns[order].astype(np.int32), {"values": values}, self.shape[1])

    def close(self) -> None:
        """Do nothing; the experiment is closed by the source."""
