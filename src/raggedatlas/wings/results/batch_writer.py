"""Base of the result writers: validate batches, write them to Lance data files that a manifest lists, and take checkpoints."""

import contextlib
import json
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError, ConflictError, CorruptError, ReadOnlyError, SourceError
from raggedatlas.formats.output_files import atomic_write
from raggedatlas.store.location import file_digest
from raggedatlas.store.storage_errors import FILE_FORMAT, lance_errors, store_errors
from raggedatlas.wings.results.folder import DATABASE, table_path
from raggedatlas.wings.results.schema import OBJECT_ID, ResultColumn, as_ids, as_outputs, results_schema

if TYPE_CHECKING:
    import lance

MAX_ROWS = 2**20
"""Maximum number of rows per file: the target of Lance's compaction, so that there is nothing left to compact."""

MAX_BYTES = 4 * 2**30
_READ_ROWS, _READ_BYTES = 2**16, 2**24
"""Limits per read when verifying: for a whole file Lance would read ahead without a memory bound."""


@dataclass(frozen=True)
class Fragment:
    """One finished data file, invisible to readers until the commit."""

    name: str  # in the table's folder ``data``
    n_rows: int
    n_bytes: int
    sha256: str = ""  # hexadecimal


class FragmentWriter:
    """Writer of record batches to files of bounded length; memory does not grow with the number of rows.

    `folder` is the table's folder ``data``, which is created if missing; `schema` is that of every batch.
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
        """Append rows, starting a new file if the current one is full."""
        start = 0
        while start < batch.num_rows:
            if self._file is None:
                from lance.file import LanceFileWriter

                self._path = self.folder / f"{uuid4().hex}.lance"
                self._n_rows = self._n_bytes = 0
                with lance_errors(str(self._path)):
                    self._file = LanceFileWriter(str(self._path), self.schema, version=FILE_FORMAT)
            piece = batch.slice(start, MAX_ROWS - self._n_rows)
            with lance_errors(str(self._path)):
                self._file.write_batch(piece)
            start += piece.num_rows
            self._n_rows += piece.num_rows
            self._n_bytes += piece.nbytes
            if self._n_rows >= MAX_ROWS or self._n_bytes >= MAX_BYTES:
                self.finish()

    def finish(self) -> tuple[Fragment, ...]:
        """Finish the current file, and return all in row order; the next batch starts a new one."""
        if self._file is not None:
            # Cleared before closing, so that `discard` does not close a file again whose closing failed.
            file, self._file = self._file, None
            with lance_errors(str(self._path)):
                file.close()
            with store_errors(f"finish {self._path}"):
                size, digest = self._path.stat().st_size, file_digest(self._path)
            self.fragments.append(Fragment(self._path.name, self._n_rows, size, digest))
        return tuple(self.fragments)

    def discard(self, keep: int = 0) -> None:
        """Remove the files of this writer, including the current one, but not the first `keep` finished ones."""
        with contextlib.suppress(OSError, ConflictError):
            # Lance writes to a temporary name until a file is closed.
            self.finish()
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

    `columns` and `rows`, (k,) ascending, restrict what is read; None reads all.
    """
    from lance.file import LanceFileReader

    start = 0
    for fragment in fragments:
        path = str(folder / fragment.name)
        with lance_errors(path):
            reader = LanceFileReader(path, columns=columns)
            size = min(_READ_ROWS, max(1, _READ_BYTES * fragment.n_rows // fragment.n_bytes))
            # `rows` ascend, so two bisections cut out those of this file.
            ends = (start, start + fragment.n_rows)
            own = None if rows is None else rows[slice(*np.searchsorted(rows, ends))] - start
            n = fragment.n_rows if own is None else len(own)
            for first in range(0, n, size):
                if own is None:
                    read = reader.read_range(first, min(size, n - first), batch_size=size)
                else:
                    read = reader.take_rows(own[first : first + size].tolist(), batch_size=size)
                yield from read.to_batches()
        start += fragment.n_rows


def commit_fragments(
    table: Path, schema: pa.Schema, fragments: Sequence[Fragment], replaced: int | None
) -> "lance.LanceDataset":
    """Commit files as a new table, or as the next version of one, in a single commit.

    `fragments` are in row order; without any, the table is empty. `replaced` is the version that is replaced, None for
    a new table; if the table has a newer one, `ConflictError` is raised.
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
        # No retries, with which Lance could commit on top of a version newer than `replaced`.
        return lance.LanceDataset.commit(
            str(table), lance.LanceOperation.Overwrite(schema, metadata), read_version=replaced, max_retries=0
        )


@dataclass(frozen=True)
class RunManifest:
    """Finished work of a run, or of a part of one, from which another process can resume."""

    columns: tuple[ResultColumn, ...] = ()  # outputs; empty before the first batch
    fragments: tuple[Fragment, ...] = ()  # finished files in row order
    facts: Mapping[str, str] = field(default_factory=dict)  # table metadata that the run was started with
    run: str = ""  # name of the folder of the parts, if several processes share the run
    n_parts: int = 0

    @property
    def n_rows(self) -> int:
        """Number of rows in the finished files."""
        return sum(each.n_rows for each in self.fragments)

    def to_json(self) -> str:
        """Return the manifest as JSON."""
        columns = [{"name": each.name, "shape": each.shape, "dtype": each.dtype.name} for each in self.columns]
        files = [asdict(each) for each in self.fragments]
        more = {"facts": dict(self.facts), "run": self.run, "n_parts": self.n_parts}
        return json.dumps({"columns": columns, "files": files, **more})


def write_manifest(path: Path, manifest: RunManifest) -> None:
    """Write a manifest atomically."""
    with atomic_write(path) as beside:
        beside.write_text(manifest.to_json(), encoding="utf-8")


def read_manifest(path: Path) -> RunManifest | None:
    """Read a manifest; return None if the file does not exist. Raises `CorruptError` if it cannot be parsed."""
    if not path.is_file():
        return None
    try:
        document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        columns = tuple(
            ResultColumn(each["name"], tuple(each["shape"]), np.dtype(each["dtype"])) for each in document["columns"]
        )
        fragments = tuple(
            Fragment(str(each["name"]), int(each["n_rows"]), int(each["n_bytes"]), str(each.get("sha256", "")))
            for each in document["files"]
        )
        run, n_parts = str(document.get("run", "")), int(document.get("n_parts", 0))
        facts = {str(name): str(value) for name, value in document.get("facts", {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CorruptError(f"{path} cannot be parsed: {error}.") from error
    # Names become paths of files that are read and deleted; none may lead out of its folder.
    if Path(run).name != run or any(Path(each.name).name != each.name for each in fragments):
        raise CorruptError(f"{path} references files outside the result folder.")
    return RunManifest(columns, fragments, facts, run, n_parts)


def verify_files(manifest: RunManifest, data: Path, what: str, *, deep: bool = False) -> None:
    """Compare the sizes of the data files in `data`, and with `deep` their checksums, with a manifest; `what` names the writer in messages."""
    for fragment in manifest.fragments:
        path = data / fragment.name
        if not path.is_file() or path.stat().st_size != fragment.n_bytes:
            raise CorruptError(
                f"{what} wrote {path} with {fragment.n_bytes:,} bytes; the file is missing or has another size."
            )
        if deep and fragment.sha256 and file_digest(path) != fragment.sha256:
            raise CorruptError(f"{what} wrote {path}, whose content has changed since; start again without resume.")


CHECKPOINT_SECONDS = 60.0
"""Interval of checkpoints: longer runs finish their files periodically and record them, so that they can be resumed."""

CHECKPOINT_SHARE = 0.05
"""Minimum interval as a share of the elapsed time: long runs have few files, and lose at most this share of their work."""


class BatchWriter(ABC):
    """Writer of batches to the data files of a results table, in bounded memory.

    `facts` are table metadata; the file `checkpoint` records the finished work while the run is going on.
    """

    def __init__(self, result_dir: Path, facts: Mapping[str, str], checkpoint: Path) -> None:
        self.result_dir = result_dir
        self._table = table_path(result_dir)
        self.facts = dict(facts)
        self._columns: tuple[ResultColumn, ...] | None = None
        self._files: FragmentWriter | None = None
        self._resumed: tuple[Fragment, ...] = ()
        self._added: list[Fragment] = []
        self._checkpoint, self._manifest = checkpoint, RunManifest(facts=self.facts)
        self._started_at = self._saved_at = time.monotonic()
        self._n_saved = 0
        self._seen = IdHashSet(result_dir / DATABASE)
        self._n_batches = self._n_rows = 0
        self._state = "open"

    @property
    def columns(self) -> tuple[ResultColumn, ...]:
        """The outputs; empty before the first batch."""
        return self._columns or ()

    def __len__(self) -> int:
        """Return the number of rows written so far."""
        return self._n_rows

    def write_batch(self, object_ids: Iterable[Any], data: Any) -> None:  # noqa: ANN401  (what any model gives)
        """Append the results of one batch; an empty batch has no effect.

        Parameters
        ----------
        object_ids : iterable
            n ids: strings, bytes or numbers, stored as strings. Ids must be unique within a run.
        data : (n, ...) array or tensor, sequence of n of them, or mapping of str to these
            The model outputs: one output, called ``data``, or several by name. The first batch determines shape and dtype
            of the table. Values are stored bit by bit, NaN included.

        Raises
        ------
        ReadOnlyError
            If the writer was committed or aborted.
        SourceError
            If lengths differ, an id is missing or a duplicate, or outputs, shape or dtype differ from the first batch (also a
            ``ValueError``). The batch has no effect then, and further batches can be written.
        StoreError
            If writing fails; the writer is aborted then, since a part of the batch may have been written.
        """
        if self._state != "open":
            raise ReadOnlyError(
                f"The results in {self.result_dir} are {self._state}; create a new writer to write others (overwrite=True replaces them)."
            )
        number = self._n_batches
        ids, outputs = as_ids(object_ids, number), as_outputs(data, number)
        n = len(next(iter(outputs.values())))
        if len(ids) != n:
            raise SourceError(f"Batch {number}: got {len(ids)} ids for {n} rows; expected one id per row.")
        # An empty array has a shape, and an empty list has not.
        shaped = all(hasattr(each, "shape") for each in (data.values() if isinstance(data, Mapping) else [data]))
        if n or (self._columns is None and shaped):
            try:
                found = tuple(ResultColumn(name, each.shape[1:], each.dtype) for name, each in outputs.items())
            except SourceError as error:
                raise SourceError(f"Batch {number}: {error}") from error
            self._check_columns(found, f"Batch {number}")
        if n:
            self._write(ids, outputs, f"Batch {number}")
        self._n_batches += 1
        self._n_rows += n

    def _check_columns(self, found: tuple[ResultColumn, ...], what: str) -> None:
        """Set the columns of the table from the first batch, and compare those of later batches with them."""
        if self._files is None and not self._added and not self._resumed:
            # An empty batch defines the columns of an empty table, but does not bind the first batch with rows.
            self._columns = found
            return
        expected = {column.name: column for column in self.columns}
        if set(expected) != {column.name for column in found}:
            raise SourceError(
                f"{what} has outputs {sorted(column.name for column in found)}, but the run began with {sorted(expected)}; "
                "all batches must have the same outputs."
            )
        for column in found:
            if column != expected[column.name]:
                raise SourceError(
                    f"{what}: output {column.name!r} has shape {column.shape} and dtype {column.dtype} per object, "
                    f"but the run began with shape {expected[column.name].shape} and dtype {expected[column.name].dtype}; "
                    "all batches must agree."
                )

    def _write(self, ids: list[str], outputs: Mapping[str, NDArray[Any]], what: str) -> None:
        """Raise for duplicate ids, then write the batch."""
        schema = results_schema(self.columns, {})
        try:
            stored = [pa.array(ids, pa.string())]
        except UnicodeEncodeError as error:
            raise SourceError(f"An id is not valid Unicode text: {error}.") from error
        for column in self.columns:
            values = pa.array(outputs[column.name].reshape(-1))
            stored.append(pa.FixedSizeListArray.from_arrays(values, type=schema.field(column.name).type))
        batch, hashes = pa.RecordBatch.from_arrays(stored, schema=schema), hash_ids(ids)
        if self._seen.may_contain(hashes):
            self._raise_for_duplicates(ids, what)
        try:
            if self._files is None:
                self._files = FragmentWriter(self._table / "data", results_schema(self.columns, self.facts))
            self._files.write(batch)
            self._seen.add(hashes)
            if time.monotonic() - self._saved_at >= max(
                CHECKPOINT_SECONDS, CHECKPOINT_SHARE * (self._saved_at - self._started_at)
            ):
                self._save(self._files)
        except BaseException:
            # A part of the batch may already be written.
            self._fail()
            raise

    def _save(self, files: FragmentWriter) -> None:
        """Finish the current file and write a checkpoint."""
        finished = files.finish()
        self._write_checkpoint((*self._resumed, *finished))
        # After the checkpoint is written: `_fail` keeps exactly the files that it names.
        self._n_saved, self._saved_at = len(finished), time.monotonic()

    def _write_checkpoint(self, fragments: tuple[Fragment, ...]) -> None:
        write_manifest(self._checkpoint, replace(self._manifest, columns=self.columns, fragments=fragments))

    @property
    def is_saved(self) -> bool:
        """Whether a checkpoint exists from which the run can be resumed."""
        return self._checkpoint.is_file()

    def _resume_from(self, receipt: RunManifest) -> None:
        """Continue from the checkpoint of an interrupted run, whose files are verified."""
        verify_files(receipt, self._table / "data", "The interrupted run", deep=True)
        self._columns = receipt.columns or None
        self._register_ids(receipt.fragments, "The interrupted run")
        # After their ids: until then, they are not among the files of this run.
        self._resumed, self._n_rows = receipt.fragments, receipt.n_rows

    def _register_ids(self, fragments: tuple[Fragment, ...], what: str) -> None:
        """Register the ids of finished files that do not belong to this run yet, and raise for duplicates."""
        first = 0
        for batch in read_batches(self._table / "data", fragments, [OBJECT_ID]):
            ids: list[str] = batch.column(0).to_pylist()
            hashes = hash_ids(ids)
            if self._seen.may_contain(hashes):
                self._raise_for_duplicates(ids, what, fragments, first)
            self._seen.add(hashes)
            first += len(ids)

    def _raise_for_duplicates(
        self, ids: list[str], what: str, fragments: tuple[Fragment, ...] = (), first: int = 0
    ) -> None:
        """Compare the ids themselves, since only their hashes are kept, and raise for a duplicate.

        They are those of a batch; or of the rows from `first` on of the `fragments` that are added to the run.
        """
        asked, written = set(ids), set[str]()
        left = len(self._seen)
        for batch in read_batches(self._table / "data", [*self._finish_files(), *fragments], [OBJECT_ID]):
            # The rows after these are those that are compared.
            written |= asked.intersection(batch.column(0).slice(0, left).to_pylist())
            left -= min(left, batch.num_rows)
        for row, each in enumerate(ids, first):
            if each in written:
                raise SourceError(
                    f"{what}, row {row}: the id {each!r} already has a result; each object has a single result in a run."
                )
            written.add(each)

    def _finish_files(self) -> list[Fragment]:
        """Finish the current file, and return all files of the run in row order."""
        try:
            own = () if self._files is None else self._files.finish()
        except BaseException:
            # The rows of a file that could not be finished are lost, so nothing may be committed without them.
            self._fail()
            raise
        return [*self._resumed, *own, *self._added]

    def read_back(
        self, columns: list[str] | None = None, rows: NDArray[np.int64] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Iterate over the rows written so far, as read by Lance, before they become visible; arguments are those of `read_batches`."""
        return read_batches(self._table / "data", self._finish_files(), columns, rows)

    @abstractmethod
    def commit(self) -> None:
        """Finish; called at the end of a ``with`` block."""

    def abort(self) -> None:
        """Abort: remove the files of this run; earlier committed results are kept. No effect after `commit`."""
        if self._state != "open":
            return
        self._state = "aborted"
        if self._files is not None:
            self._files.discard()
        for each in self._resumed:
            (self._table / "data" / each.name).unlink(missing_ok=True)
        self._checkpoint.unlink(missing_ok=True)

    def _fail(self) -> None:
        """End after an error: keep the checkpoint, so that the run can be resumed; without a checkpoint, abort."""
        if self._state != "open":
            return
        if not self.is_saved:
            self.abort()
            return
        self._state = "aborted"
        if self._files is not None:
            self._files.discard(self._n_saved)

    def __enter__(self) -> Self:
        """Enter a context that commits at its end, and aborts after an error."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit; after an error keep the checkpoint of a long run, and abort otherwise."""
        if kind is not None:
            if self._state == "open" and self.is_saved and self._files is not None:
                # The error of the block counts; without this checkpoint, only the work since the last one is lost.
                with contextlib.suppress(AtlasError):
                    self._save(self._files)
            self._fail()
            return
        try:
            self.commit()
        except BaseException:
            self._fail()
            raise


MAX_RUN = 2**20
"""Maximum length of a sorted run in memory; longer runs are moved to a file and no longer merged."""

_RATIO = 8


class IdHashSet:
    """Set of id hashes, eight bytes per id, stored as few sorted runs of geometrically decreasing length.

    Long runs are stored in anonymous temporary files in `folder`; None uses the system's default.

    Examples
    --------
    >>> seen = IdHashSet()
    >>> seen.add(hash_ids(["a", "b"]))
    >>> seen.may_contain(hash_ids(["c", "a"])), seen.may_contain(hash_ids(["c", "d"])), len(seen)
    (True, False, 2)
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._runs: list[NDArray[np.int64]] = []
        self._stored: list[NDArray[np.int64]] = []

    def __len__(self) -> int:
        """Return the number of ids."""
        return sum(map(len, (*self._stored, *self._runs)))

    def may_contain(self, hashes: NDArray[np.int64]) -> bool:
        """Return whether sorted hashes contain a duplicate or a known hash; the ids themselves must be compared then."""
        if bool(np.any(hashes[1:] == hashes[:-1])):
            return True
        return any(
            # A hash above all of the run would be looked up one beyond its end.
            bool(np.any(run[np.minimum(np.searchsorted(run, hashes), len(run) - 1)] == hashes))
            for run in (*self._stored, *self._runs)
        )

    def add(self, hashes: NDArray[np.int64]) -> None:
        """Add sorted hashes, merging runs of similar length."""
        self._runs.append(hashes)
        while len(self._runs) > 1 and len(self._runs[-1]) * _RATIO >= len(self._runs[-2]):
            merged = np.concatenate([self._runs.pop(), self._runs.pop()])
            # A stable sort merges two sorted runs in a single pass.
            merged.sort(kind="stable")
            self._runs.append(merged)
        # Each run is more than `_RATIO` times as long as the next, so only the first can be too long.
        if len(self._runs[0]) >= MAX_RUN:
            run = self._runs.pop(0)
            with store_errors(f"write into {self._folder}"), tempfile.TemporaryFile(dir=self._folder) as file:
                run.tofile(file)
                file.flush()
                # The mapping keeps the deleted file alive.
                self._stored.append(np.memmap(file, np.int64, "r", shape=run.shape))


def hash_ids(ids: Sequence[str]) -> NDArray[np.int64]:
    """Return the sorted hashes of ids; equal ids have equal hashes within one process."""
    return np.sort(np.fromiter(map(hash, ids), np.int64, len(ids)))
