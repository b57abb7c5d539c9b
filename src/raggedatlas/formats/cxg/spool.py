"""Temporary files for columns until their table is written, so that memory is bounded for long tables."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.formats.cxg.tiledb_arrays import tiledb_errors
from raggedatlas.store.runtime import release_unused_memory

SPILL_ROWS = 1 << 17
"""Maximum rows of tables that stay in memory, where an encoded column takes about ten megabytes."""

BATCH_ROWS = 1 << 14
"""Rows of one batch in a file."""


@dataclass(frozen=True, slots=True)
class SpilledColumn:
    """A column in a file; rows are read on demand.

    Parameters
    ----------
    path : Path
        An Arrow file of one column.
    n_rows : int
        Its length.
    dtype : numpy.dtype
        Dtype of a slice; text as objects.
    """

    path: Path
    n_rows: int
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Read consecutive rows, (k,) of its dtype."""
        start, stop, _ = rows.indices(self.n_rows)
        with tiledb_errors(self.path, writes=True), pa.memory_map(str(self.path)) as file:
            # On a memory map `read_all` copies nothing; only the chosen rows become NumPy values.
            column = pa.ipc.open_file(file).read_all().column(0).slice(start, stop - start)
            values: NDArray[Any] = column.to_numpy().astype(self.dtype)
            return values


class ColumnSpill:
    """Writer of columns to files in a folder, which the owner of the folder removes.

    Parameters
    ----------
    folder : Path
        Created with the first column.

    Examples
    --------
    >>> import tempfile
    >>> kept = ColumnSpill(Path(tempfile.mkdtemp())).keep([np.array(["a", "b"], object), np.array(["c"], object)])
    >>> len(kept), kept[1:3].tolist()
    (3, ['b', 'c'])
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._n_columns = folder, 0

    def keep(self, parts: Iterable[NDArray[Any]]) -> SpilledColumn:
        """Write a column to a file.

        Parameters
        ----------
        parts : iterable of (k,) array
            Its rows, in parts of one dtype: numbers without missing values, or text as objects.

        Raises
        ------
        StoreError
            If the file cannot be written.
        """
        path = self._folder / f"{self._n_columns}.arrow"
        self._n_columns += 1
        writer, n_rows, dtype = None, 0, np.dtype(object)
        with tiledb_errors(path, writes=True):
            self._folder.mkdir(exist_ok=True)
            with pa.OSFile(str(path), "wb") as file:
                for part in _batches(parts):
                    dtype = part.dtype
                    # `large_string` has 64-bit offsets, which a batch of long texts may need.
                    values = pa.array(part, pa.large_string() if dtype.kind == "O" else None)
                    batch = pa.record_batch([values], ["values"])
                    writer = pa.ipc.new_file(file, batch.schema) if writer is None else writer
                    writer.write_batch(batch)
                    n_rows += len(part)
                if writer is not None:
                    writer.close()
        release_unused_memory()
        return SpilledColumn(path, n_rows, dtype)


def _batches(parts: Iterable[NDArray[Any]]) -> Iterable[NDArray[Any]]:
    for part in parts:
        for start in range(0, len(part), BATCH_ROWS):
            yield part[start : start + BATCH_ROWS]
