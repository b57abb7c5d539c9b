"""Lance data files of a results table: written batch by batch, listed in a manifest for resuming, committed at once."""

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
"""Maximum number of rows per file: the target of Lance's compaction, so that there is nothing left to compact."""

MAX_BYTES = 4 * 2**30
_READ_ROWS, _READ_BYTES = 2**16, 2**24
"""Limits per read when verifying: for a whole file Lance would read ahead without a memory bound."""


@dataclass(frozen=True)
class Fragment:
    """One finished data file, invisible to readers until the commit.

    Parameters
    ----------
    name : str
        File name in the table's ``data`` folder.
    n_rows : int
        Number of rows.
    n_bytes : int
        Size of the file in bytes.
    sha256 : str
        SHA-256 of the file, hexadecimal.
    """

    name: str
    n_rows: int
    n_bytes: int
    sha256: str = ""


class FragmentWriter:
    """Writer of record batches to files of bounded length; memory does not grow with the number of rows.

    Parameters
    ----------
    folder : pathlib.Path
        The table's folder ``data``; created if missing.
    schema : pyarrow.Schema
        Schema of every batch.
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
        """Append rows, starting a new file if the current one is full.

        Raises
        ------
        StoreError
            If writing fails.
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
        """Finish the current file; the next batch starts a new one."""
        if self._file is None:
            return
        file, self._file = self._file, None
        with lance_errors(str(self._path)):
            file.close()
        with store_errors(f"finish {self._path}"):
            size, digest = self._path.stat().st_size, file_digest(self._path)
        self.fragments.append(Fragment(self._path.name, self._n_rows, size, digest))

    def finish(self) -> tuple[Fragment, ...]:
        """Finish all files, and return them in row order."""
        self.finish_file()
        return tuple(self.fragments)

    def discard(self, keep: int = 0) -> None:
        """Remove the files of this writer, including the current one.

        Parameters
        ----------
        keep : int
            Number of finished files to keep, from the first.
        """
        with contextlib.suppress(OSError, ConflictError):
            # Lance writes to a temporary name until a file is closed.
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
    """Iterate over the rows of finished files in row order, as read by Lance.

    Parameters
    ----------
    folder : pathlib.Path
        Folder of the files.
    fragments : sequence of Fragment
        Which.
    columns : list of str or None
        Columns to read; None reads all.
    rows : (k,) int64 or None
        Rows to read, ascending; None reads all.
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
                own_rows = rows[np.searchsorted(rows, start) : np.searchsorted(rows, start + fragment.n_rows)] - start
                for first in range(0, len(own_rows), size):
                    chunk = own_rows[first : first + size].tolist()
                    yield from reader.take_rows(chunk, batch_size=size).to_batches()
        start += fragment.n_rows


def commit_fragments(
    table: Path, schema: pa.Schema, fragments: Sequence[Fragment], replaced: int | None
) -> "lance.LanceDataset":
    """Commit files as a new table, or as the next version of one, in a single commit.

    Parameters
    ----------
    table : pathlib.Path
        Its folder.
    schema : pyarrow.Schema
        Schema of every file.
    fragments : sequence of Fragment
        Files in row order; an empty sequence creates an empty table.
    replaced : int or None
        Version that is replaced; None for a new table.

    Raises
    ------
    ConflictError
        If the table has a newer version than `replaced`.
    """
    import lance
    from lance.fragment import DataFile, FragmentMetadata
    from lance.schema import LanceSchema

    major, minor = map(int, FILE_FORMAT.split("."))
    fields = [field.id() for field in LanceSchema.from_pyarrow(schema).fields()]
    metadata = [
        FragmentMetadata(
            id=0,
            files=[DataFile(each.name, fields, list(range(len(fields))), major, minor, each.n_bytes)],
            physical_rows=each.n_rows,
        )
        for each in fragments
    ]
    with lance_errors(str(table)):
        return lance.LanceDataset.commit(
            str(table), lance.LanceOperation.Overwrite(schema, metadata), read_version=replaced, max_retries=0
        )


@dataclass(frozen=True)
class RunManifest:
    """Finished work of a run, or of a part of one, from which another process can resume.

    Parameters
    ----------
    columns : tuple of ResultColumn
        Outputs; empty before the first batch.
    fragments : tuple of Fragment
        Finished files in row order.
    facts : mapping of str to str
        Table metadata that the run was started with.
    run : str
        Name of the folder of the parts, if several processes share the run.
    n_parts : int
        Number of parts.
    """

    columns: tuple[ResultColumn, ...] = ()
    fragments: tuple[Fragment, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    n_parts: int = 0

    @property
    def n_rows(self) -> int:
        """Number of rows in the finished files."""
        return sum(each.n_rows for each in self.fragments)

    def to_json(self) -> str:
        """Return the manifest as JSON."""
        columns = [{"name": each.name, "shape": each.shape, "dtype": each.dtype.name} for each in self.columns]
        files = [asdict(each) for each in self.fragments]
        document = {
            "columns": columns,
            "files": files,
            "facts": dict(self.facts),
            "run": self.run,
            "n_parts": self.n_parts,
        }
        return json.dumps(document)


def write_manifest(path: Path, manifest: RunManifest) -> None:
    """Write a manifest atomically.

    Raises
    ------
    StoreError
        If writing fails.
    """
    with atomic_write(path) as beside:
        beside.write_text(manifest.to_json(), encoding="utf-8")


def read_manifest(path: Path) -> RunManifest | None:
    """Read a manifest; return None if the file does not exist.

    Raises
    ------
    CorruptError
        If it cannot be parsed.
    """
    if not path.is_file():
        return None
    try:
        document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        columns = tuple(
            ResultColumn(each["name"], tuple(each["shape"]), np.dtype(each["dtype"])) for each in document["columns"]
        )
        fragments = tuple(Fragment(**each) for each in document["files"])
        run, n_parts = str(document.get("run", "")), int(document.get("n_parts", 0))
        facts = {str(name): str(value) for name, value in document.get("facts", {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{path} cannot be parsed: {error}.") from error
    if Path(run).name != run or any(Path(each.name).name != each.name for each in fragments):
        raise CorruptError(f"{path} references files outside the result folder.")
    return RunManifest(columns, fragments, facts, run, n_parts)


def verify_files(manifest: RunManifest, data: Path, what: str, *, deep: bool = False) -> None:
    """Compare data files with their manifest.

    Parameters
    ----------
    manifest : RunManifest
        The manifest.
    data : pathlib.Path
        Folder of the files.
    what : str
        Name of the writer, for error messages.
    deep : bool
        Whether to compare checksums in addition to sizes.

    Raises
    ------
    CorruptError
        If a file is missing or differs.
    """
    for fragment in manifest.fragments:
        path = data / fragment.name
        if not path.is_file() or path.stat().st_size != fragment.n_bytes:
            raise CorruptError(
                f"{what} wrote {path} with {fragment.n_bytes:,} bytes; the file is missing or has another size."
            )
        if deep and fragment.sha256 and file_digest(path) != fragment.sha256:
            raise CorruptError(f"{what} wrote {path}, whose content has changed since; start again without resume.")
