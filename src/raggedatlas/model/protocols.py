"""Protocols of what can be read (`Source`) and what can be written (`Sink`)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike

from raggedatlas.model.batch import Block

MatrixForm = Literal["csr", "csc", "dense"]

NARROW = (False, False)
"""Pointers and indices of a sparse matrix in 32 bits, as SciPy makes them where that is enough."""


NO_MATRIX = ""
"""Key by which a dataset that was added without a matrix is held: a group of no rows and no features."""


@dataclass(frozen=True, slots=True)
class MatrixInfo:
    """One matrix of a source, known without reading its values.

    Parameters
    ----------
    key : str
        Its path: ``"X"``, ``"raw/X"``, ``"layers/<name>"``, ``"obsm/<name>"``; within MuData ``"mod/<m>/X"`` and so on.
    form : {"csr", "csc", "dense"}
        How it is stored.
    dtype : numpy dtype
        Of its values.
    shape : tuple of int
        ``(n_cells, n_features)``, or more axes for tiles.
    features : str
        Key under which `Source.features` returns its columns; empty when they have no names.
    space : str
        Feature space it belongs to by the source's own knowledge; empty when unknown.
    n_entries : int or None
        Stored entries of a sparse matrix.
    wide : tuple of bool
        Whether the pointers, and the indices, of a sparse matrix are stored in 64 bits.
    exact : bool
        Whether there are exactly `n_entries`, rather than at most so many.
    """

    key: str
    form: MatrixForm
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    features: str
    space: str = ""
    n_entries: int | None = None
    wide: tuple[bool, bool] = NARROW
    exact: bool = True


@dataclass(frozen=True, slots=True)
class SourceSchema:
    """What a source holds, known without reading its values.

    Parameters
    ----------
    name : str
        What people would call it: the file's name without its ending.
    uri : str
        Where it is; empty for an object in memory.
    n_cells : int
        Number of cells.
    matrices : tuple of MatrixInfo
        Every matrix that can be read in row blocks.
    left_out : mapping of str to str
        Everything else it holds (``"uns/neighbors"``, ...) -> what it is; the report lists it.
    format : str
        For instance ``"h5ad"``.
    others : tuple of MatrixInfo
        Matrices that are not of cells by features (``"obsp/<name>"``, ``"varm/<name>"``, ``"varp/<name>"``); `Source.blocks`
        reads them too.
    elements : mapping of str to str
        Everything else that `Source.element` reads whole (``"uns/<name>"``, tables in ``"obsm/<name>"``, ...) -> what it is.
    """

    name: str
    uri: str
    n_cells: int
    matrices: tuple[MatrixInfo, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    format: str = ""
    others: tuple[MatrixInfo, ...] = ()
    elements: Mapping[str, str] = field(default_factory=dict)

    def matrix(self, key: str) -> MatrixInfo | None:
        """Return the matrix with that key, or None."""
        return next((m for m in self.matrices if m.key == key), None)


class Source(Protocol):
    """Something that can be read: a file, an object in memory, a query."""

    def describe(self) -> SourceSchema:
        """Return the schema without reading values."""
        ...

    def cells(self) -> pa.Table:
        """Return one row per cell: the index as the first column, then the columns; facts as field metadata (`model.frames`)."""
        ...

    def features(self, key: str) -> pa.Table:
        """Return one row per column of a matrix, in column order: the index as the first column; facts as field metadata."""
        ...

    def blocks(
        self, keys: tuple[str, ...], n_rows: int, rows: tuple[int, int] | None = None
    ) -> Iterator[tuple[Block, ...]]:
        """Walk down the rows of some matrices together, at most `n_rows` rows a step, each as one block with the layer ``"values"``.

        The walk is over ``rows[0]`` to ``rows[1]`` (exclusive), or over all rows where `rows` is None. Sparse matrices and dense ones that are read as such come in the form they have in the source, CSC as CSR; entries of
        a row come in the source's order, duplicates included. Every call starts a new iteration.
        """
        ...

    def element(self, key: str) -> Any:  # noqa: ANN401  (any element that AnnData knows)
        """Read one of the `elements` or `others` entirely, ``"obs"``, or a table of features as a pandas frame."""
        ...

    def present(self, key: str) -> "np.ndarray[Any, np.dtype[np.int64]] | None":
        """Return which cell each row of a matrix, or of the ``"mod/<m>/obs"`` of a modality, belongs to, as (n_rows,) int64.

        None means that row i is cell i.
        """
        ...

    def close(self) -> None:
        """Close open files."""
        ...


@dataclass(frozen=True, slots=True)
class SinkMatrix:
    """A matrix that a sink is about to receive.

    Parameters
    ----------
    key : str
        ``"X"``, ``"layers/<name>"``, ``"obsm/<name>"``; within MuData ``"mod/<m>/X"`` and so on.
    form : {"csr", "csc", "dense"}
        How it is to be stored; blocks of both sparse forms are rows.
    dtype : numpy dtype
        Of the values.
    shape : tuple of int
        Final shape.
    n_entries : int or None
        How many entries will come at most, where that is known.
    wide : tuple of bool
        Whether the pointers, and the indices, of a sparse matrix take 64 bits even where 32 would do.
    exact : bool
        Whether exactly `n_entries` will come, so that their place can be taken at once.
    """

    key: str
    form: MatrixForm
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    n_entries: int | None = None
    wide: tuple[bool, bool] = NARROW
    exact: bool = False

    @classmethod
    def of(cls, key: str, form: MatrixForm, dtype: DTypeLike, shape: tuple[int, ...]) -> "SinkMatrix":
        """Create one; `dtype` is anything that NumPy accepts as a dtype."""
        return cls(key, form, np.dtype(dtype), shape)


@runtime_checkable
class Sink(Protocol):
    """Something that can be written in row blocks; nothing is visible under its name before `commit`."""

    def begin(self, matrices: tuple[SinkMatrix, ...]) -> None:
        """Prepare for these matrices."""
        ...

    def write(self, key: str, block: Block) -> None:
        """Append rows to one matrix; its block has one layer, ``"values"``."""
        ...

    def element(self, key: str, value: Any) -> None:  # noqa: ANN401  (any element that AnnData knows)
        """Write an element: ``"obs"`` and ``"var"`` as pandas frames, ``"uns"``, ``"varm"``, ... as AnnData takes them.

        A sink whose attribute `by_column` is true gets tables as `model.frames.ColumnTable` where the source has them.
        """
        ...

    def commit(self) -> str:
        """Publish the result under its name, and return that name."""
        ...

    def abort(self) -> None:
        """Remove what was written so far."""
        ...
