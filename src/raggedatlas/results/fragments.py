"""Lance data files written batch by batch, and the one commit that makes them a table."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import ConflictError, CorruptError
from raggedatlas.results.folder import atomic_write
from raggedatlas.results.schema import ResultColumn
from raggedatlas.store.location import file_digest, store_errors
from raggedatlas.store.storage_errors import lance_errors
from raggedatlas.store.tables import FILE_FORMAT

if TYPE_CHECKING:
    import lance

MAX_ROWS = 2**20
"""Rows of a file: what Lance's own compaction aims at, so that it finds nothing to do."""

MAX_BYTES = 4 * 2**30
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
            piece = batch.slice(start, MAX_ROWS - self._n_rows)
            with lance_errors(str(self._path)):
                self._file.write_batch(piece)
            start += piece.num_rows
            self._n_rows += piece.num_rows
            self._n_bytes += piece.nbytes
            if self._n_rows >= MAX_ROWS or self._n_bytes >= MAX_BYTES:
                self.finish_file()

    def _begin(self) -> None:
        from lance.file import LanceFileWriter

        self._path = self.folder / f"{uuid4().hex}.lance"
        self._n_rows = self._n_bytes = 0
        with lance_errors(str(self._path)):
            self._file = LanceFileWriter(str(self._path), self.schema, version=FILE_FORMAT)

    def finish_file(self) -> None:
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
        self.finish_file()
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
            self.finish_file()
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


@dataclass(frozen=True)
class RunManifest:
    """What is finished of a run, or of a part of one.

    Parameters
    ----------
    columns : tuple of ResultColumn
        Outputs; none before the first batch.
    fragments : tuple of Fragment
        Finished files in row order.
    facts : mapping of str to str
        Metadata that the run began with.
    run : str
        Name of the folder of the parts, where several processes share the run.
    n_parts : int
        How many parts there are.
    """

    columns: tuple[ResultColumn, ...] = ()
    fragments: tuple[Fragment, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    n_parts: int = 0

    @property
    def n_rows(self) -> int:
        """Rows of the finished files."""
        return sum(each.n_rows for each in self.fragments)

    def to_json(self) -> str:
        """Return it as JSON."""
        columns = [{"name": each.name, "shape": each.shape, "dtype": each.dtype.name} for each in self.columns]
        files = [asdict(each) for each in self.fragments]
        told = {"columns": columns, "files": files, "facts": dict(self.facts), "run": self.run, "n_parts": self.n_parts}
        return json.dumps(told)


def write_manifest(path: Path, receipt: RunManifest) -> None:
    """Replace a receipt in one step.

    Raises
    ------
    StoreError
        If the disk refuses.
    """
    with atomic_write(path) as beside:
        beside.write_text(receipt.to_json(), encoding="utf-8")


def read_manifest(path: Path) -> RunManifest | None:
    """Read a receipt; None where there is none.

    Raises
    ------
    CorruptError
        If it does not read.
    """
    if not path.is_file():
        return None
    try:
        told: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        columns = tuple(
            ResultColumn(each["name"], tuple(each["shape"]), np.dtype(each["dtype"])) for each in told["columns"]
        )
        fragments = tuple(Fragment(**each) for each in told["files"])
        run, n_parts = str(told.get("run", "")), int(told.get("n_parts", 0))
        facts = {str(name): str(value) for name, value in told.get("facts", {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{path} does not read: {error}.") from error
    if Path(run).name != run or any(Path(each.name).name != each.name for each in fragments):
        raise CorruptError(f"{path} names files outside of the folder of the results.")
    return RunManifest(columns, fragments, facts, run, n_parts)


def verify_files(receipt: RunManifest, data: Path, what: str, *, deep: bool = False) -> None:
    """Compare the files of a receipt with what it says.

    Parameters
    ----------
    receipt : RunManifest
        What was finished.
    data : pathlib.Path
        The folder of the files.
    what : str
        Who wrote them, for messages.
    deep : bool
        Whether every byte is compared, and not the sizes alone.

    Raises
    ------
    CorruptError
        If one is missing or differs.
    """
    for fragment in receipt.fragments:
        path = data / fragment.name
        if not path.is_file() or path.stat().st_size != fragment.n_bytes:
            raise CorruptError(
                f"{what} wrote {path} with {fragment.n_bytes:,} bytes; it is not there any more, or has another size."
            )
        if deep and fragment.sha256 and file_digest(path) != fragment.sha256:
            raise CorruptError(f"{what} wrote {path} with other bytes than it has now; begin again without it.")
