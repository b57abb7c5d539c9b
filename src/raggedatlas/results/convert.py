"""Conversion of ``.npy`` results to a Lance table: validated before writing, verified bit by bit before the commit."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, QueryError
from raggedatlas.model.arguments import Progress, checked
from raggedatlas.results.dataset import ResultDataset
from raggedatlas.results.npy_results import NpyResults
from raggedatlas.results.row_readers import to_matrix
from raggedatlas.results.schema import DATA, OBJECT_ID, ResultColumn
from raggedatlas.results.writer import ResultDatasetWriter

_CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Conversion:
    """Report of `convert_results`.

    Parameters
    ----------
    results_dir : pathlib.Path
        Result folder.
    n_rows, n_batches : int
        Number of rows, and of ``.npy`` files.
    shape : tuple of int
        Shape of one result.
    dtype : numpy.dtype
        Stored data type.
    n_verified : int
        Number of rows that were read back and compared bit by bit.
    """

    results_dir: Path
    n_rows: int
    n_batches: int
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    n_verified: int

    def __str__(self) -> str:
        """Return a one-sentence summary."""
        checked = "all" if self.n_verified == self.n_rows else f"{self.n_verified:,}"
        return (
            f"Converted {self.n_rows:,} results of shape {self.shape} and dtype {self.dtype} from {self.n_batches:,} .npy files in "
            f"{self.results_dir}, and compared {checked} of them bit by bit. The .npy files are unchanged and can be removed."
        )


@checked
def convert_results(
    results_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    promote: bool = False,
    spot_check: int | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Convert the ``.npy`` results of a folder to a Lance table in the same folder (seed 003, step 5).

    The ``.npy`` files are never changed. Rows are in batch order, which is the order in which they were computed.
    Until everything is written and verified, readers see the ``.npy`` files, or the previous table.

    Parameters
    ----------
    results_dir : str or path
        Result folder.
    overwrite : bool
        Whether an existing table may be replaced.
    promote : bool
        Whether batches of different dtypes may be stored in their common dtype.
    spot_check : int or None
        Number of rows to verify, chosen at random with a fixed seed; None verifies all.
    progress : callable or None
        Called with the step, the number of rows done, and the total number of rows.

    Returns
    -------
    Conversion
        Report of the conversion.

    Raises
    ------
    NotFoundError
        If the folder or its index does not exist.
    CorruptError
        If a file is truncated, missing, unexpected or contradicts the index, or if the data read back differ.
    SourceError
        If batches differ in shape or dtype, ids are duplicated, or a dtype is not supported (also a ``ValueError``).
    DuplicateError
        If the folder already has a table and `overwrite` is False (also a ``FileExistsError``).

    Examples
    --------
    >>> print(convert_results("results/20250201-120000-infer-AbCd"))  # doctest: +SKIP
    """
    files = NpyResults(Path(results_dir))
    tensor = files.tensor(promote=promote)
    ResultColumn(DATA, tensor.shape, tensor.base)  # Raises if a table cannot hold it.
    files.check_ids()
    rows = None if spot_check is None else _sample(files.n_rows, spot_check)
    written = _ProgressCounter(progress, "write", files.n_rows)
    compared = _ProgressCounter(progress, "compare", files.n_rows if rows is None else len(rows))
    with ResultDatasetWriter(files.folder, overwrite=overwrite) as writer:
        for ids, values in files.iter_chunks(_CHUNK_BYTES):
            writer.write_batch(ids, values.astype(tensor.base, copy=False))
            written.add(len(ids))
        # Within the block, whose end commits: after a difference nothing is committed.
        _compare(files, writer, rows, compared)
    dataset = ResultDataset({}, files.folder, mapped=False)
    if len(dataset) != files.n_rows:
        raise CorruptError(f"{files.folder}: the table has {len(dataset):,} rows, but the index has {files.n_rows:,}.")
    return Conversion(files.folder, files.n_rows, len(files.batches), tensor.shape, tensor.base, compared.done)


class _ProgressCounter:
    """Row counter of one step, for a progress bar."""

    def __init__(self, progress: Progress | None, step: str, total: int) -> None:
        self._progress = progress
        self._step = step
        self._total = total
        self.done = 0

    def add(self, n: int) -> None:
        self.done += n
        if self._progress is not None:
            self._progress(self._step, self.done, self._total)


def _sample(n_rows: int, size: int) -> NDArray[np.int64]:
    if size < 1:
        raise QueryError(f"spot_check={size}; expected at least 1, or None to verify all rows.")
    # Sorted, because `iter_chunks` and `read_back` need ascending rows.
    return np.sort(np.random.default_rng(0).choice(n_rows, min(size, n_rows), replace=False))


def _compare(
    files: NpyResults, writer: ResultDatasetWriter, rows: NDArray[np.int64] | None, compared: _ProgressCounter
) -> None:
    """Read the finished files back and compare them with the ``.npy`` files."""
    column = writer.columns[0]
    stored = _RowStream(writer.read_back(rows=rows), column)
    for ids, values in files.iter_chunks(_CHUNK_BYTES, rows):
        names, found = stored.take(len(ids))
        # Bytes, because NaN is not equal to itself and -0.0 equals 0.0.
        if names != ids or values.astype(column.dtype, copy=False).tobytes() != found.tobytes():
            raise CorruptError(
                f"{files.folder}: the data read back differ from the .npy files within {len(ids):,} rows starting at {ids[0]!r}; "
                "nothing was committed. Check the disk, and run the conversion again."
            )
        compared.add(len(ids))


class _RowStream:
    """Reader over record batches that returns any number of rows at a time."""

    def __init__(self, batches: Iterator[pa.RecordBatch], column: ResultColumn) -> None:
        self._batches = batches
        self._column = column
        self._rest: pa.RecordBatch | None = None

    def take(self, n: int) -> tuple[list[str], NDArray[Any]]:
        """Return ids and flattened values of the next `n` rows, or of fewer at the end."""
        names: list[str] = []
        values = [np.empty((0, self._column.n_values), self._column.dtype)]
        while len(names) < n and self.has_rows():
            assert self._rest is not None
            piece, self._rest = self._rest.slice(0, n - len(names)), self._rest.slice(n - len(names))
            names += piece.column(OBJECT_ID).to_pylist()
            values.append(to_matrix(piece.column(DATA), self._column))
        return names, np.concatenate(values)

    def has_rows(self) -> bool:
        """Return whether there are more rows."""
        while self._rest is None or not self._rest.num_rows:
            self._rest = next(self._batches, None)
            if self._rest is None:
                return False
        return True
