"""Lance data files written batch by batch, and the one commit that makes them a table."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import ConflictError
from raggedatlas.store.location import file_digest, store_errors
from raggedatlas.store.storage_errors import lance_errors
from raggedatlas.store.tables import FILE_FORMAT

if TYPE_CHECKING:
    import lance

MOST_ROWS = 2**20
"""Rows of a file: what Lance's own compaction aims at, so that it finds nothing to do."""

MOST_BYTES = 4 * 2**30
_READ_ROWS, _READ_BYTES = 2**16, 2**24
"""What is read back at a time: of a whole file Lance would read as much ahead as memory holds."""


@dataclass(frozen=True)
class Fragment:
    """One finished data file, which no reader sees before the commit.

    Parameters
    ----------
    name : str
        File in the table's ``data`` folder.
    n_rows : int
        Rows.
    n_bytes : int
        Size of the file.
    sha256 : str
        Of the file, in hex.
    """

    name: str
    n_rows: int
    n_bytes: int
    sha256: str = ""


class FragmentWriter:
    """Writes batches to files of bounded length; memory does not grow with the rows.

    Parameters
    ----------
    folder : pathlib.Path
        The table's folder ``data``; made if it is missing.
    schema : pyarrow.Schema
        Of every batch.
    """

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self.folder = folder
        self.schema = schema
        self.fragments: list[Fragment] = []
        self._file: Any = None
        self._path = folder
        self._n_rows = self._n_bytes = 0
        with store_errors(f"make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows after all earlier ones, beginning a new file where the last is full.

        Raises
        ------
        StoreError
            If the disk refuses.
        """
        start = 0
        while start < batch.num_rows:
            if self._file is None:
                self._begin()
            piece = batch.slice(start, MOST_ROWS - self._n_rows)
            with lance_errors(str(self._path)):
                self._file.write_batch(piece)
            start += piece.num_rows
            self._n_rows += piece.num_rows
            self._n_bytes += piece.nbytes
            if self._n_rows >= MOST_ROWS or self._n_bytes >= MOST_BYTES:
                self.roll()

    def _begin(self) -> None:
        from lance.file import LanceFileWriter

        self._path = self.folder / f"{uuid4().hex}.lance"
        self._n_rows = self._n_bytes = 0
        with lance_errors(str(self._path)):
            self._file = LanceFileWriter(str(self._path), self.schema, version=FILE_FORMAT)

    def roll(self) -> None:
        """Finish the file that is being written; the next batch begins another."""
        if self._file is None:
            return
        file, self._file = self._file, None
        with lance_errors(str(self._path)):
            file.close()
        with store_errors(f"finish {self._path}"):
            size, digest = self._path.stat().st_size, file_digest(self._path)
        self.fragments.append(Fragment(self._path.name, self._n_rows, size, digest))

    def finish(self) -> tuple[Fragment, ...]:
        """Finish all files, and name them in row order."""
        self.roll()
        return tuple(self.fragments)

    def discard(self, keep: int = 0) -> None:
        """Remove the files of this writer, also the one that is being written.

        Parameters
        ----------
        keep : int
            How many of the finished files stay, the first ones.
        """
        with contextlib.suppress(OSError, ConflictError):
            # Lance writes under another name until a file is closed
            self.roll()
        for fragment in self.fragments[keep:]:
            (self.folder / fragment.name).unlink(missing_ok=True)
        del self.fragments[keep:]


def read_batches(
    folder: Path,
    fragments: Sequence[Fragment],
    columns: list[str] | None = None,
    rows: NDArray[np.int64] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Walk over finished files in row order, as Lance reads them.

    Parameters
    ----------
    folder : pathlib.Path
        Where they lie.
    fragments : sequence of Fragment
        Which.
    columns : list of str or None
        Which columns; None reads all.
    rows : (k,) int64 or None
        Which rows, ascending; None reads all.
    """
    from lance.file import LanceFileReader

    start = 0
    for fragment in fragments:
        path = str(folder / fragment.name)
        with lance_errors(path):
            reader = LanceFileReader(path, columns=columns)
            size = min(_READ_ROWS, max(1, _READ_BYTES * fragment.n_rows // fragment.n_bytes))
            if rows is None:
                for first in range(0, fragment.n_rows, size):
                    yield from reader.read_range(
                        first, min(size, fragment.n_rows - first), batch_size=size
                    ).to_batches()
            else:
                here = rows[np.searchsorted(rows, start) : np.searchsorted(rows, start + fragment.n_rows)] - start
                for first in range(0, len(here), size):
                    own = here[first : first + size].tolist()
                    yield from reader.take_rows(own, batch_size=size).to_batches()
        start += fragment.n_rows


def commit_fragments(
    table: Path, schema: pa.Schema, fragments: Sequence[Fragment], replaced: int | None
) -> "lance.LanceDataset":
    """Make files a table, or the next version of one, in a single commit.

    Parameters
    ----------
    table : pathlib.Path
        Its folder.
    schema : pyarrow.Schema
        Of every file.
    fragments : sequence of Fragment
        In row order; none makes an empty table.
    replaced : int or None
        Version that this one replaces; None for a new table.

    Raises
    ------
    ConflictError
        If there is a newer version than the replaced one.
    """
    import lance
    from lance.fragment import DataFile, FragmentMetadata
    from lance.schema import LanceSchema

    major, minor = map(int, FILE_FORMAT.split("."))
    fields = [field.id() for field in LanceSchema.from_pyarrow(schema).fields()]
    made = [
        FragmentMetadata(
            id=0,
            files=[DataFile(each.name, fields, list(range(len(fields))), major, minor, each.n_bytes)],
            physical_rows=each.n_rows,
        )
        for each in fragments
    ]
    with lance_errors(str(table)):
        return lance.LanceDataset.commit(
            str(table), lance.LanceOperation.Overwrite(schema, made), read_version=replaced, max_retries=0
        )
