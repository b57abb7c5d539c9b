"""The one `Source` of this room: row readers and frames by key, wherever they come from."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, SourceError
from raggedatlas.formats.rows import RowReader
from raggedatlas.model.batch import Block
from raggedatlas.model.contracts import MatrixInfo, SourceSchema
from raggedatlas.model.frames import frame_to_arrow

if TYPE_CHECKING:
    import pandas as pd

SPACES = {
    "Gene Expression": "gene_expression",
    "Antibody Capture": "protein_abundance",
    "Peaks": "chromatin_accessibility",
}
"""10x feature type -> feature space."""


@dataclass(frozen=True, slots=True)
class Part:
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
    def of(cls, key: str, rows: RowReader, features: str = "", space: str = "") -> "Part":
        """Describe a reader."""
        return cls(MatrixInfo(key, rows.form, rows.dtype, rows.shape, features, space, rows.n_entries), rows)


@dataclass(frozen=True, slots=True)
class Parts:
    """What one source holds.

    Parameters
    ----------
    n_cells : int
        Number of cells.
    cells : callable
        Reads the frame of cells.
    matrices : tuple of Part
        Every matrix.
    features : mapping of str to callable
        Key -> reads that frame of features.
    left_out : mapping of str to str
        What else there is.
    present : mapping of str to (n_rows,) int64
        Matrix key -> cell of each row, for matrices that do not cover all cells in order.
    """

    n_cells: int
    cells: "Callable[[], pd.DataFrame]"
    matrices: tuple[Part, ...]
    features: "Mapping[str, Callable[[], pd.DataFrame]]"
    left_out: Mapping[str, str] = field(default_factory=dict)
    present: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    def under(self, prefix: str) -> "Parts":
        """Put a prefix such as ``"mod/rna/"`` before every key."""
        matrices = tuple(
            Part(
                replace(
                    part.info, key=prefix + part.info.key, features=part.info.features and prefix + part.info.features
                ),
                part.rows,
            )
            for part in self.matrices
        )
        features = {prefix + key: read for key, read in self.features.items()}
        left_out = {prefix + key: what for key, what in self.left_out.items()}
        return replace(self, matrices=matrices, features=features, left_out=left_out)


class PartsSource:
    """A `Source` made of parts.

    Parameters
    ----------
    parts : Parts
        What it holds.
    name, uri, format : str
        As in `SourceSchema`.
    close : callable, optional
        Lets go of the opened file.

    Raises
    ------
    SourceError
        If there are no cells.
    """

    def __init__(
        self, parts: Parts, *, name: str, uri: str, format: str, close: Callable[[], None] | None = None
    ) -> None:
        if not parts.n_cells:
            if close is not None:
                close()
            raise SourceError(f"{uri or name} has no cells; there is nothing to add.")
        self._parts, self._close = parts, close
        self._rows = {part.info.key: part.rows for part in parts.matrices}
        self._schema = SourceSchema(
            name,
            uri,
            parts.n_cells,
            tuple(p.info for p in parts.matrices),
            dict(sorted(parts.left_out.items())),
            format,
        )

    def describe(self) -> SourceSchema:
        """Say what is there; reads no values."""
        return self._schema

    def cells(self) -> pa.Table:
        """Return one row per cell: the index first, then the columns."""
        return frame_to_arrow(self._parts.cells())

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
        return frame_to_arrow(read())

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

    def present(self, key: str) -> "np.ndarray[Any, np.dtype[np.int64]] | None":
        """Return which cell each row of a matrix belongs to, or None when row i is cell i."""
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
