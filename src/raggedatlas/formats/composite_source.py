"""`CompositeSource`, the `Source` of all formats: matrix readers and tables by key."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, SourceError
from raggedatlas.formats.containers import Container, readable
from raggedatlas.formats.matrix_readers import CscRows, CsrRows, RowReader
from raggedatlas.model.batch import Block, CsrBlock
from raggedatlas.model.frames import ColumnTable, arrow_to_frame, frame_to_arrow
from raggedatlas.model.protocols import NARROW, MatrixForm, MatrixInfo, SourceSchema
from raggedatlas.store.location import AnyPath

if TYPE_CHECKING:
    import pandas as pd

SPACES = {
    "Gene Expression": "gene_expression",
    "Antibody Capture": "protein_abundance",
    "Peaks": "chromatin_accessibility",
}
"""10x feature type -> feature space."""


def space_of(types: Iterable[Any]) -> str:
    """Return the space of a matrix from the 10x types of its features; gene expression if they are mixed or unknown."""
    names = {str(name) for name in types}
    return SPACES.get(next(iter(names)), "gene_expression") if len(names) == 1 else "gene_expression"


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """One matrix: its description and its reader."""

    info: MatrixInfo
    rows: RowReader

    @classmethod
    def of(cls, key: str, rows: RowReader, features: str = "", space: str = "") -> "MatrixPart":
        """Create a part from a reader."""
        wide = getattr(rows, "wide", NARROW)
        return cls(MatrixInfo(key, rows.form, rows.dtype, rows.shape, features, space, rows.n_entries, wide), rows)

    def under(self, prefix: str) -> "MatrixPart":
        """Return the part with a prefix before its keys."""
        info = self.info
        return replace(
            self, info=replace(info, key=prefix + info.key, features=info.features and prefix + info.features)
        )


@dataclass(frozen=True, slots=True)
class SourceParts:
    """Contents of a source."""

    n_cells: int
    # Reads the cells: a frame, or the table that `frame_to_arrow` makes of one.
    cells: "Callable[[], pd.DataFrame | pa.Table]"
    matrices: tuple[MatrixPart, ...]  # of cells by features
    features: "Mapping[str, Callable[[], pd.DataFrame | pa.Table]]"  # key -> reads those features, as `cells`
    left_out: Mapping[str, str] = field(default_factory=dict)  # key -> description of an element that is not read
    # Matrix key -> cell of each row, (n_rows,), for matrices that do not cover all cells in order.
    present: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    others: tuple[MatrixPart, ...] = ()
    elements: Mapping[str, Callable[[], Any]] = field(default_factory=dict)  # key -> reads that element completely
    # Key -> opens that table of cells to be read column by column, or returns None if it must be read completely.
    tables: Mapping[str, Callable[[], ColumnTable | None]] = field(default_factory=dict)

    def under(self, prefix: str) -> "SourceParts":
        """Return the parts with a prefix such as ``"mod/rna/"`` before every key."""
        features = {prefix + key: read for key, read in self.features.items()}
        left_out = {prefix + key: what for key, what in self.left_out.items()}
        elements = {prefix + key: read for key, read in self.elements.items()}
        return replace(
            self,
            matrices=tuple(part.under(prefix) for part in self.matrices),
            features=features,
            left_out=left_out,
            others=tuple(part.under(prefix) for part in self.others),
            elements=elements,
            tables={prefix + key: open_table for key, open_table in self.tables.items()},
        )


class CompositeSource:
    """A `Source` composed of matrix readers and functions that read elements.

    `name`, `uri` and `format` are those of `SourceSchema`; `close` closes the open file.
    """

    def __init__(
        self, parts: SourceParts, *, name: str, uri: str, format: str, close: Callable[[], None] | None = None
    ) -> None:
        self._parts, self._close = parts, close
        self._rows = {part.info.key: part.rows for part in (*parts.matrices, *parts.others)}
        self._schema = SourceSchema(
            name,
            uri,
            parts.n_cells,
            tuple(p.info for p in parts.matrices),
            dict(sorted(parts.left_out.items())),
            format,
            tuple(p.info for p in parts.others),
            {key: parts.left_out.get(key, "table") for key in sorted(parts.elements)},
        )

    def describe(self) -> SourceSchema:
        """Return the schema of the source without reading values."""
        return self._schema

    def cells(self) -> pa.Table:
        """Return one row per cell: the index first, then the columns."""
        return _as_table(self._parts.cells())

    def features(self, key: str) -> pa.Table:
        """Return the table of features with this key, the index as first column."""
        read = self._parts.features.get(key)
        if read is None:
            raise NotFoundError(
                f"{self._schema.uri or self._schema.name} has no features {key!r}; there are {sorted(self._parts.features)}."
            )
        return _as_table(read())

    def blocks(
        self, keys: tuple[str, ...], n_rows: int, rows: tuple[int, int] | None = None
    ) -> Iterator[tuple[Block, ...]]:
        """Iterate over blocks of rows of several matrices, at most `n_rows` per block, fewer if rows are long.

        `rows` is the range ``(start, stop)``; None is all. The matrices must have equal numbers of rows. Wrong
        arguments raise in the call, not at the first step.
        """
        if n_rows < 1:
            raise SourceError(f"n_rows is {n_rows}; it must be at least 1.")
        readers = [self._reader(key) for key in keys]
        heights = {reader.shape[0] for reader in readers}
        if len(heights) > 1:
            raise SourceError(
                f"The matrices {list(keys)} have {sorted(heights)} rows and cannot be read together; read them one by one."
            )
        height = heights.pop() if heights else 0
        start, stop = rows or (0, height)
        if not 0 <= start <= stop <= height:
            raise SourceError(
                f"Rows {start:,} to {stop:,} of {list(keys)} were requested, but there are only {height:,}."
            )
        # `blocks` is no generator itself, so that wrong arguments raise here and not at the first step.
        return _iterate_blocks(readers, start, stop, n_rows)

    def element(self, key: str) -> Any:  # noqa: ANN401  (any element that AnnData knows)
        """Read a complete element: a matrix, ``"obs"``, a table of features, or any other."""
        tables = {"obs": self._parts.cells, **self._parts.features}
        # Elements first: a frame in obsm is also among the matrices, there without its names and dtypes.
        if key in self._parts.elements:
            return self._parts.elements[key]()
        # A matrix of obsm and the table of its features share a key.
        if key in self._rows:
            return self.matrix(key)
        if key in tables:
            table = tables[key]()
            return arrow_to_frame(table) if isinstance(table, pa.Table) else table
        raise NotFoundError(
            f"{self._schema.uri or self._schema.name} has no element {key!r}; there are {sorted({*self._parts.elements, *tables})}."
        )

    def table(self, key: str) -> ColumnTable | None:
        """Open a table of cells (``"obs"`` or that of a modality) for reading column by column; None if it must be read completely."""
        open_table = self._parts.tables.get(key)
        return None if open_table is None else open_table()

    def matrix(self, key: str) -> Any:  # noqa: ANN401  (a NumPy array or SciPy matrix)
        """Read a complete matrix in its stored form: a NumPy array, or a `csr_matrix` or `csc_matrix` of SciPy."""
        rows = self._reader(key)
        block = rows.read(0, rows.shape[0])
        values = block.layers["values"]
        if not isinstance(block, CsrBlock):
            return values
        most = np.iinfo(np.int32).max
        many, large = int(block.indptr[-1]) > most, max(rows.shape) > most
        pointers = block.indptr.astype(np.int64 if many or large else np.int32, copy=False)
        wide = getattr(rows, "wide", NARROW)
        csr = (values, block.indices, pointers)
        return scipy_matrix(rows.form, csr, rows.shape, (wide[0] or many, wide[1] or large))

    def indptr(self, key: str) -> NDArray[np.int64]:
        """Return the checked bounds of the rows of a CSR matrix, (n_rows + 1,) int64, or of the columns of a CSC matrix."""
        reader = self._reader(key)
        assert isinstance(reader, CsrRows | CscRows)
        return reader.indptr()

    def rows_ascend(self, key: str) -> bool:
        """Return whether the row numbers of every column of a CSC matrix ascend, none twice."""
        reader = self._reader(key)
        assert isinstance(reader, CscRows)
        return reader.rows_ascend()

    def arrays(self, key: str) -> Mapping[str, Any]:
        """Return the arrays of a matrix by name: ``"data"``, of a sparse one also ``"indptr"`` and ``"indices"``; none if it is made of others."""
        return getattr(self._reader(key), "arrays", {})

    def present(self, key: str) -> "np.ndarray[Any, np.dtype[np.int64]] | None":
        """Return which cell each row of a matrix (or of a modality's ``"obs"``) belongs to, or None when row i is cell i."""
        if key not in self._parts.present:
            self._reader(key)
        return self._parts.present.get(key)

    def close(self) -> None:
        """Close open files and remove temporary ones."""
        for reader in self._rows.values():
            reader.close()
        if self._close is not None:
            self._close()

    def _reader(self, key: str) -> RowReader:
        if key not in self._rows:
            raise NotFoundError(
                f"{self._schema.uri or self._schema.name} has no matrix {key!r}; there are {sorted(self._rows)}."
            )
        return self._rows[key]


def open_composite(
    container: Container, read_parts: Callable[[Container], SourceParts], path: AnyPath, form: str, name: str = ""
) -> CompositeSource:
    """Make the source of an open file, which is closed if `read_parts` cannot describe it."""
    try:
        with readable(container.uri, "its structure"):
            parts = read_parts(container)
        # The stem of `a.zarr.zip` is `a.zarr`.
        name = name or path.stem.removesuffix(".zarr")
        return CompositeSource(parts, name=name, uri=str(path), format=form, close=container.close)
    except BaseException:
        container.close()
        raise


def _iterate_blocks(readers: list[RowReader], start: int, end: int, n_rows: int) -> Iterator[tuple[Block, ...]]:
    while start < end:
        stop = min(start + n_rows, end)
        # A reader may only shorten the step, so the last `stop` fits all of them.
        for reader in readers:
            stop = reader.stop(start, stop)
        yield tuple(reader.read(start, stop) for reader in readers)
        start = stop


def scipy_matrix(form: MatrixForm, csr: Any, shape: Any, wide: tuple[bool, bool]) -> Any:  # noqa: ANN401
    """Make a `csr_matrix` or `csc_matrix` of values, columns and bounds of rows; `wide` says which of bounds and indices are int64, not int32."""
    from scipy.sparse import csr_matrix

    matrix: Any = csr_matrix(csr, shape=shape)
    if form == "csc":
        matrix = matrix.tocsc()
    # SciPy gives both arrays one dtype; a file may have stored only one of them as int64.
    for name, is_wide in zip(("indptr", "indices"), wide, strict=True):
        setattr(matrix, name, getattr(matrix, name).astype(np.int64 if is_wide else np.int32, copy=False))
    return matrix


def _as_table(frame: "pd.DataFrame | pa.Table") -> pa.Table:
    return frame if isinstance(frame, pa.Table) else frame_to_arrow(frame)
