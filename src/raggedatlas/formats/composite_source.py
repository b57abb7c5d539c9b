"""The one `Source` of this room: row readers and frames by key, wherever they come from."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, SourceError
from raggedatlas.formats.matrix_readers import RowReader
from raggedatlas.model.batch import Block, CsrBlock
from raggedatlas.model.frames import ColumnTable, frame_to_arrow
from raggedatlas.model.protocols import NARROW, MatrixInfo, SourceSchema

if TYPE_CHECKING:
    import pandas as pd

SPACES = {
    "Gene Expression": "gene_expression",
    "Antibody Capture": "protein_abundance",
    "Peaks": "chromatin_accessibility",
}
"""10x feature type -> feature space."""


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """One matrix: what it is and how its rows are read.

    Parameters
    ----------
    info : MatrixInfo
        What it is.
    rows : RowReader
        Reads it.
    """

    info: MatrixInfo
    rows: RowReader

    @classmethod
    def of(cls, key: str, rows: RowReader, features: str = "", space: str = "") -> "MatrixPart":
        """Describe a reader."""
        wide = getattr(rows, "wide", NARROW)
        return cls(MatrixInfo(key, rows.form, rows.dtype, rows.shape, features, space, rows.n_entries, wide), rows)

    def under(self, prefix: str) -> "MatrixPart":
        """Put a prefix before its keys."""
        info = self.info
        return replace(
            self, info=replace(info, key=prefix + info.key, features=info.features and prefix + info.features)
        )


@dataclass(frozen=True, slots=True)
class SourceParts:
    """What one source holds.

    Parameters
    ----------
    n_cells : int
        Number of cells.
    cells : callable
        Reads the cells: a frame, or the table that `frame_to_arrow` makes of one.
    matrices : tuple of MatrixPart
        Every matrix.
    features : mapping of str to callable
        Key -> reads those features, as `cells`.
    left_out : mapping of str to str
        What else there is.
    present : mapping of str to (n_rows,) int64
        Matrix key -> cell of each row, for matrices that do not cover all cells in order.
    others : tuple of MatrixPart
        Matrices that are not of cells by features.
    elements : mapping of str to callable
        Key -> reads that element whole.
    tables : mapping of str to callable
        Key -> opens the table of cells of that key to be read column by column, or says by None that it must be read whole.
    """

    n_cells: int
    cells: "Callable[[], pd.DataFrame | pa.Table]"
    matrices: tuple[MatrixPart, ...]
    features: "Mapping[str, Callable[[], pd.DataFrame | pa.Table]]"
    left_out: Mapping[str, str] = field(default_factory=dict)
    present: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    others: tuple[MatrixPart, ...] = ()
    elements: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    tables: Mapping[str, Callable[[], ColumnTable | None]] = field(default_factory=dict)

    def under(self, prefix: str) -> "SourceParts":
        """Put a prefix such as ``"mod/rna/"`` before every key."""
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
    """A `Source` made of parts.

    Parameters
    ----------
    parts : SourceParts
        What it holds.
    name, uri, format : str
        As in `SourceSchema`.
    close : callable, optional
        Lets go of the opened file.
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
        """Say what is there; reads no values."""
        return self._schema

    def cells(self) -> pa.Table:
        """Return one row per cell: the index first, then the columns."""
        return _as_table(self._parts.cells())

    def features(self, key: str) -> pa.Table:
        """Return one row per column of the matrices that name this key, the index first.

        Raises
        ------
        NotFoundError
            If there is no such key.
        """
        read = self._parts.features.get(key)
        if read is None:
            raise NotFoundError(
                f"{self._schema.uri or self._schema.name} has no features {key!r}; there are {sorted(self._parts.features)}."
            )
        return _as_table(read())

    def blocks(
        self, keys: tuple[str, ...], n_rows: int, rows: tuple[int, int] | None = None
    ) -> Iterator[tuple[Block, ...]]:
        """Walk down the rows of matrices with as many rows each, at most `n_rows` a step, fewer where rows are long.

        Parameters
        ----------
        keys : tuple of str
            Which matrices.
        n_rows : int
            Most rows of a step.
        rows : tuple of int or None
            First row and the one after the last; None walks over all.

        Raises
        ------
        NotFoundError
            If there is no such matrix.
        SourceError
            If the matrices differ in their number of rows, there are no such rows, or they are damaged.
        """
        if n_rows < 1:
            raise SourceError(f"{n_rows} rows a step are asked for; at least 1 is needed.")
        readers = [self._reader(key) for key in keys]
        heights = {reader.shape[0] for reader in readers}
        if len(heights) > 1:
            raise SourceError(
                f"The matrices {list(keys)} have {sorted(heights)} rows and cannot be read in step; read them one by one."
            )
        height = heights.pop() if heights else 0
        start, stop = rows or (0, height)
        if not 0 <= start <= stop <= height:
            raise SourceError(f"Rows {start:,} to {stop:,} of {list(keys)} are asked for; there are {height:,}.")
        return _walk(readers, start, stop, n_rows)

    def element(self, key: str) -> Any:  # noqa: ANN401  (any element that AnnData knows)
        """Read whole an element, a matrix, ``"obs"``, or a table of features.

        Raises
        ------
        NotFoundError
            If there is no such element.
        SourceError
            If it is damaged, or encoded in a way that nothing knows.
        """
        tables = {"obs": self._parts.cells, **self._parts.features}
        if key in self._parts.elements:
            return self._parts.elements[key]()
        # A matrix of obsm and the table of its features have one key.
        if key in self._rows:
            return self.matrix(key)
        if key in tables:
            return tables[key]()
        raise NotFoundError(
            f"{self._schema.uri or self._schema.name} has no element {key!r}; there are {sorted({*self._parts.elements, *tables})}."
        )

    def table(self, key: str) -> ColumnTable | None:
        """Open a table of cells, ``"obs"`` or that of a modality, to be read column by column; None if it must be read whole.

        Raises
        ------
        SourceError
            If it is damaged.
        """
        open_table = self._parts.tables.get(key)
        return None if open_table is None else open_table()

    def matrix(self, key: str) -> Any:  # noqa: ANN401  (a NumPy array or SciPy matrix)
        """Read a matrix whole, in the form that it is stored in.

        Raises
        ------
        NotFoundError
            If there is no such matrix.
        """
        return read_matrix(self._reader(key))

    def present(self, key: str) -> "np.ndarray[Any, np.dtype[np.int64]] | None":
        """Return which cell each row of a matrix (or of a modality's ``"obs"``) belongs to, or None when row i is cell i."""
        if key not in self._parts.present:
            self._reader(key)
        return self._parts.present.get(key)

    def close(self) -> None:
        """Let go of open and temporary files."""
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


def _walk(readers: list[RowReader], start: int, end: int, n_rows: int) -> Iterator[tuple[Block, ...]]:
    while start < end:
        stop = min(start + n_rows, end)
        for reader in readers:
            stop = reader.stop(start, stop)
        yield tuple(reader.read(start, stop) for reader in readers)
        start = stop


def read_matrix(rows: RowReader) -> Any:  # noqa: ANN401  (a NumPy array or SciPy matrix)
    """Read a matrix whole, in the form that it is stored in.

    Returns
    -------
    numpy.ndarray or scipy.sparse.csr_matrix or csc_matrix
    """
    from scipy.sparse import csr_matrix

    block = rows.read(0, rows.shape[0])
    values = block.layers["values"]
    if not isinstance(block, CsrBlock):
        return values
    small = max(rows.shape[1], int(block.indptr[-1])) <= np.iinfo(np.int32).max
    pointers = block.indptr.astype(np.int32 if small else np.int64, copy=False)
    arrays: Any = (values, block.indices, pointers)
    made: Any = csr_matrix(arrays, shape=(rows.shape[0], rows.shape[1]))
    turned = made.tocsc() if rows.form == "csc" else made
    for name, wide in zip(("indptr", "indices"), getattr(rows, "wide", NARROW), strict=True):
        if wide:
            setattr(turned, name, getattr(turned, name).astype(np.int64, copy=False))
    return turned


def _as_table(frame: "pd.DataFrame | pa.Table") -> pa.Table:
    return frame if isinstance(frame, pa.Table) else frame_to_arrow(frame)
