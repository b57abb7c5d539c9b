"""From ``.npy`` results to a table: checked before anything is written, and compared bit by bit before anybody sees it."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, QueryError
from raggedatlas.model.arguments import checked
from raggedatlas.results.dataset import ResultDataset
from raggedatlas.results.npy_results import NpyResults
from raggedatlas.results.row_readers import to_matrix
from raggedatlas.results.schema import DATA, OBJECT_ID, ResultColumn
from raggedatlas.results.writer import ResultDatasetWriter

Progress = Callable[[str, int, int], None]

_PIECE = 32 * 2**20


@dataclass(frozen=True)
class Conversion:
    """What `convert_results` did.

    Parameters
    ----------
    results_dir : pathlib.Path
        Result folder.
    n_rows, n_batches : int
        Rows, and the ``.npy`` files they came from.
    shape : tuple of int
        Shape of a result.
    dtype : numpy.dtype
        As it is stored.
    n_verified : int
        Rows that were read back and compared bit by bit.
    """

    results_dir: Path
    n_rows: int
    n_batches: int
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    n_verified: int

    def __str__(self) -> str:
        """Say it in a sentence."""
        checked = "all" if self.n_verified == self.n_rows else f"{self.n_verified:,}"
        return (
            f"Converted {self.n_rows:,} results of shape {self.shape} and dtype {self.dtype} from {self.n_batches:,} .npy files in "
            f"{self.results_dir}, and compared {checked} of them bit by bit. The .npy files are still there; remove them when you like."
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
    """Write the ``.npy`` results of a folder as a Lance table into the same folder (seed 003, step 5).

    The ``.npy`` files are never changed. Rows stand in the order of the batches, which is the order in which they were computed.
    Until all is written and compared readers see the ``.npy`` files, or the table that was there before.

    Parameters
    ----------
    results_dir : str or path
        Result folder.
    overwrite : bool
        Whether a table that is there may be replaced.
    promote : bool
        Whether batches of different dtypes may be stored in one that holds all of them.
    spot_check : int or None
        Compare so many rows, chosen at random with a fixed seed, and not all.
    progress : callable or None
        Called with the step, rows done, and rows in all.

    Returns
    -------
    Conversion
        What was done.

    Raises
    ------
    NotFoundError
        If there is no folder, or no index in it.
    CorruptError
        If a file is truncated, missing, left over or does not agree with the index, or if what is read back differs.
    SourceError
        If batches differ in shape or dtype, ids are repeated, or a dtype has no place in a table (also a ``ValueError``).
    DuplicateError
        If the folder has a table already and `overwrite` is not asked (also a ``FileExistsError``).

    Examples
    --------
    >>> print(convert_results("results/20250201-120000-infer-AbCd"))  # doctest: +SKIP
    """
    files = NpyResults(Path(results_dir))
    tensor = files.tensor(promote=promote)
    ResultColumn(DATA, tensor.shape, tensor.base)  # refuses what a table cannot hold
    files.check_ids()
    rows = None if spot_check is None else _sample(files.n_rows, spot_check)
    written = _Counter(progress, "write", files.n_rows)
    compared = _Counter(progress, "compare", files.n_rows if rows is None else len(rows))
    with ResultDatasetWriter(files.folder, overwrite=overwrite) as writer:
        for ids, values in files.pieces(_PIECE):
            writer.write_batch(ids, values.astype(tensor.base, copy=False))
            written.add(len(ids))
        _compare(files, writer, rows, compared)
    made = ResultDataset({}, files.folder, mapped=False)
    if len(made) != files.n_rows:
        raise CorruptError(f"{files.folder}: the table has {len(made):,} rows, and the index {files.n_rows:,}.")
    return Conversion(files.folder, files.n_rows, len(files.batches), tensor.shape, tensor.base, compared.done)


class _Counter:
    """Counts rows of one step for a progress bar."""

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
        raise QueryError(f"spot_check={size}; compare at least one row, or all by spot_check=None.")
    return np.sort(np.random.default_rng(0).choice(n_rows, min(size, n_rows), replace=False))


def _compare(
    files: NpyResults, writer: ResultDatasetWriter, rows: NDArray[np.int64] | None, compared: _Counter
) -> None:
    """Read the finished files back, and compare them with the ``.npy`` files."""
    column = writer.columns[0]
    stored = _Rows(writer.read_back(rows=rows), column)
    for ids, values in files.pieces(_PIECE, rows):
        names, found = stored.take(len(ids))
        if names != ids or values.astype(column.dtype, copy=False).tobytes() != found.tobytes():
            raise CorruptError(
                f"{files.folder}: what was read back differs from the .npy files within {len(ids):,} rows from the one of {ids[0]!r} on; "
                "nothing is committed. Check the disk, and run the conversion again."
            )
        compared.add(len(ids))


class _Rows:
    """Batches as they are read back, taken in any number of rows at a time."""

    def __init__(self, batches: Iterator[pa.RecordBatch], column: ResultColumn) -> None:
        self._batches = batches
        self._column = column
        self._rest: pa.RecordBatch | None = None

    def take(self, n: int) -> tuple[list[str], NDArray[Any]]:
        """Give the ids and flat values of the next rows, or of fewer where there are no more."""
        names: list[str] = []
        values = [np.empty((0, self._column.n_values), self._column.dtype)]
        while len(names) < n and self.left():
            assert self._rest is not None
            piece, self._rest = self._rest.slice(0, n - len(names)), self._rest.slice(n - len(names))
            names += piece.column(OBJECT_ID).to_pylist()
            values.append(to_matrix(piece.column(DATA), self._column))
        return names, np.concatenate(values)

    def left(self) -> bool:
        """Tell whether there are more rows."""
        while self._rest is None or not self._rest.num_rows:
            self._rest = next(self._batches, None)
            if self._rest is None:
                return False
        return True
