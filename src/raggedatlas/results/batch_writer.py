"""Batches of results on their way into data files: checked against the first of them, written, and not visible yet."""

import contextlib
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError, ReadOnlyError, SourceError
from raggedatlas.results.folder import DATABASE, table_path
from raggedatlas.results.fragments import (
    Fragment,
    FragmentWriter,
    RunManifest,
    read_batches,
    verify_files,
    write_manifest,
)
from raggedatlas.results.schema import OBJECT_ID, ResultColumn, results_schema
from raggedatlas.results.tensors import as_ids, as_outputs
from raggedatlas.store.location import store_errors

CHECKPOINT_SECONDS = 60.0
"""A run that takes longer finishes its files now and then, and notes them, so that it can be taken up again."""

CHECKPOINT_SHARE = 0.05
"""Of the time so far: long runs have few files, and lose at most so much of their work."""


class BatchWriter(ABC):
    """Writes batches to data files of a table of results, in flat memory.

    Parameters
    ----------
    result_dir : pathlib.Path
        Result folder.
    facts : mapping of str to str
        Metadata of the table.
    checkpoint : pathlib.Path
        File that notes what is finished while the run goes on.
    """

    def __init__(self, result_dir: Path, facts: Mapping[str, str], checkpoint: Path) -> None:
        self.result_dir = result_dir
        self._table = table_path(result_dir)
        self.facts = dict(facts)
        self._columns: tuple[ResultColumn, ...] | None = None
        self._files: FragmentWriter | None = None
        self._resumed: tuple[Fragment, ...] = ()
        self._added: list[Fragment] = []
        self._checkpoint = checkpoint
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
        """Count the rows so far."""
        return self._n_rows

    def write_batch(self, object_ids: Iterable[Any], data: Any) -> None:  # noqa: ANN401  (what any model gives)
        """Write the results of one batch after those of the batches before; an empty batch does nothing.

        Parameters
        ----------
        object_ids : iterable
            Of length n; texts, bytes or numbers, stored as text. No id may come twice in a run.
        data : (n, ...) array or tensor, sequence of n of them, or mapping of str to these
            What the model gave: one output, called ``data``, or several by name. Shape and dtype of the first batch are
            those of the table. Values are stored bit by bit, NaN included.

        Raises
        ------
        ReadOnlyError
            When the results are finished or given up.
        SourceError
            If the lengths differ, an id is missing or known, or shape, dtype or outputs differ from the first batch (also a
            ``ValueError``). The table is as it was then, and further batches can be written.
        StoreError
            If the disk refuses; the results are given up then, as part of a batch may be written.
        """
        if self._state != "open":
            raise ReadOnlyError(
                f"The results in {self.result_dir} are {self._state}; make a new writer to write others (overwrite=True replaces)."
            )
        number = self._n_batches
        ids, outputs = as_ids(object_ids, number), as_outputs(data, number)
        n = len(next(iter(outputs.values())))
        if len(ids) != n:
            raise SourceError(f"Batch {number}: {len(ids)} ids, but the model gave {n} rows; each row needs its id.")
        if n or (self._columns is None and _shape_told(data)):
            self._check_columns(_columns_of(outputs, number), f"Batch {number}")
        if n:
            self._write(ids, outputs, f"Batch {number}")
        self._n_batches += 1
        self._n_rows += n

    def _check_columns(self, found: tuple[ResultColumn, ...], what: str) -> None:
        """Take the table's columns from the first batch, and compare those of later ones with them."""
        if self._files is None and not self._added and not self._resumed:
            # an empty batch says what a table without rows looks like, but does not bind the first that has rows
            self._columns = found
            return
        told = {column.name: column for column in self.columns}
        if set(told) != {column.name for column in found}:
            raise SourceError(
                f"{what} has the outputs {sorted(column.name for column in found)}, but the run began with {sorted(told)}; "
                "all batches are alike."
            )
        for column in found:
            if column != told[column.name]:
                raise SourceError(
                    f"{what}: output {column.name!r} has shape {column.shape} and dtype {column.dtype} for each object, "
                    f"but the run began with shape {told[column.name].shape} and dtype {told[column.name].dtype}; "
                    "all batches are alike."
                )

    def _write(self, ids: list[str], outputs: Mapping[str, NDArray[Any]], what: str) -> None:
        """Refuse ids that are known, and write."""
        batch, hashes = _record_batch(ids, outputs, self.columns), hash_ids(ids)
        if self._seen.may_contain(hashes):
            self._refuse_known(ids, what)
        try:
            files = self._open_files()
            files.write(batch)
            self._seen.add(hashes)
            if time.monotonic() - self._saved_at >= max(
                CHECKPOINT_SECONDS, CHECKPOINT_SHARE * (self._saved_at - self._started_at)
            ):
                self._save(files)
        except BaseException:
            # part of the batch may be written
            self._fail()
            raise

    def _save(self, files: FragmentWriter) -> None:
        """Finish the file that is being written, and note all that is finished."""
        finished = files.finish()
        write_manifest(self._checkpoint, self._make_manifest((*self._resumed, *finished)))
        self._n_saved, self._saved_at = len(finished), time.monotonic()

    def _make_manifest(self, fragments: tuple[Fragment, ...]) -> RunManifest:
        """Say what is finished of this run."""
        return RunManifest(self.columns, fragments)

    @property
    def is_saved(self) -> bool:
        """Whether a part of the run is noted, from which another can go on."""
        return self._checkpoint.is_file()

    def _resume_from(self, receipt: RunManifest) -> None:
        """Go on from what an interrupted run had finished.

        Raises
        ------
        CorruptError
            If a file of it is damaged.
        """
        verify_files(receipt, self._table / "data", "The interrupted run", deep=True)
        self._columns, self._resumed, self._n_rows = receipt.columns or None, receipt.fragments, receipt.n_rows
        self._register_ids(receipt.fragments, "The interrupted run")

    def _register_ids(self, fragments: tuple[Fragment, ...], what: str) -> None:
        """Remember the ids of finished files, and refuse those that are known."""
        first = 0
        for batch in read_batches(self._table / "data", fragments, [OBJECT_ID]):
            ids: list[str] = batch.column(0).to_pylist()
            hashes = hash_ids(ids)
            if self._seen.may_contain(hashes):
                self._refuse_known(ids, what, first)
            self._seen.add(hashes)
            first += len(ids)

    def _refuse_known(self, ids: Iterable[str], what: str, first: int = 0) -> None:
        """Compare the ids themselves, as only their hashes are remembered."""
        written = {each for batch in self.read_back([OBJECT_ID]) for each in batch.column(0).to_pylist()}
        for row, each in enumerate(ids, first):
            if each in written:
                raise SourceError(
                    f"{what}, row {row}: the id {each!r} has a result already; each object has one result in a run."
                )
            written.add(each)

    def _open_files(self) -> FragmentWriter:
        if self._files is None:
            self._files = FragmentWriter(self._table / "data", results_schema(self.columns, self.facts))
        return self._files

    def _finish_files(self) -> list[Fragment]:
        """Finish the files so far, and name all of the run in row order."""
        return [*self._resumed, *([] if self._files is None else self._files.finish()), *self._added]

    def read_back(
        self, columns: list[str] | None = None, rows: NDArray[np.int64] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Walk over what the files hold so far, as Lance reads them, before anybody else can.

        Parameters
        ----------
        columns : list of str or None
            Which columns; None reads all.
        rows : (k,) int64 or None
            Which rows, ascending; None reads all.
        """
        return read_batches(self._table / "data", self._finish_files(), columns, rows)

    @abstractmethod
    def commit(self) -> None:
        """Finish; the end of a ``with`` block does it."""

    def abort(self) -> None:
        """Give up: remove the files of this run; what was committed before stays. After `commit` nothing happens."""
        if self._state != "open":
            return
        self._state = "given up"
        if self._files is not None:
            self._files.discard()
        for each in self._resumed:
            (self._table / "data" / each.name).unlink(missing_ok=True)
        self._checkpoint.unlink(missing_ok=True)

    def _fail(self) -> None:
        """End after an error: what is noted stays, so that it can be taken up again; without a note, all goes."""
        if self._state != "open":
            return
        if not self.is_saved:
            self.abort()
            return
        self._state = "given up"
        if self._files is not None:
            self._files.discard(self._n_saved)

    def __enter__(self) -> Self:
        """Write in a block; its end commits, and an error in it gives up."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit; after an error keep what a long run has noted, and give up otherwise."""
        if kind is not None:
            if self._state == "open" and self.is_saved and self._files is not None:
                with contextlib.suppress(AtlasError):
                    self._save(self._files)
            self._fail()
            return
        try:
            self.commit()
        except BaseException:
            self._fail()
            raise


def _columns_of(outputs: Mapping[str, NDArray[Any]], batch: int) -> tuple[ResultColumn, ...]:
    """Describe the outputs of a batch, or refuse those that no table holds."""
    try:
        return tuple(ResultColumn(name, values.shape[1:], values.dtype) for name, values in outputs.items())
    except SourceError as error:
        raise SourceError(f"Batch {batch}: {error}") from error


def _shape_told(data: Any) -> bool:  # noqa: ANN401
    """Tell whether a batch without rows still has a shape, as an array has and an empty list has not."""
    return all(hasattr(each, "shape") for each in (data.values() if isinstance(data, Mapping) else [data]))


def _record_batch(
    ids: list[str], outputs: Mapping[str, NDArray[Any]], columns: tuple[ResultColumn, ...]
) -> pa.RecordBatch:
    """Put a batch into Arrow; values are shared, not copied."""
    schema = results_schema(columns, {})
    try:
        stored = [pa.array(ids, pa.string())]
    except UnicodeEncodeError as error:
        raise SourceError(f"An id holds characters that are no text: {error}.") from error
    for column in columns:
        values = pa.array(outputs[column.name].reshape(-1))
        stored.append(pa.FixedSizeListArray.from_arrays(values, type=schema.field(column.name).type))
    return pa.RecordBatch.from_arrays(stored, schema=schema)


MAX_RUN = 2**20
"""Hashes of a run in memory; longer ones are put into a file and are not merged any more."""

_RATIO = 8


class IdHashSet:
    """The hashes of all ids so far, in few sorted runs; each run in memory is much longer than the next.

    Parameters
    ----------
    folder : pathlib.Path or None
        Where long runs are put, into files without a name, which go with the process; None takes the system's place.

    Examples
    --------
    >>> seen = IdHashSet()
    >>> seen.add(hash_ids(["a", "b"]))
    >>> seen.meets(hashes_of(["c", "a"])), seen.meets(hash_ids(["c", "d"])), len(seen)
    (True, False, 2)
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._runs: list[NDArray[np.int64]] = []
        self._stored: list[NDArray[np.int64]] = []

    def __len__(self) -> int:
        """Count the ids."""
        return sum(map(len, (*self._stored, *self._runs)))

    def may_contain(self, hashes: NDArray[np.int64]) -> bool:
        """Tell whether sorted hashes hold one twice, or one that is known: the ids themselves are to be compared then."""
        if bool(np.any(hashes[1:] == hashes[:-1])):
            return True
        return any(
            bool(np.any(run[np.minimum(np.searchsorted(run, hashes), len(run) - 1)] == hashes))
            for run in (*self._stored, *self._runs)
        )

    def add(self, hashes: NDArray[np.int64]) -> None:
        """Remember sorted hashes, merging runs that are not much longer than the next."""
        self._runs.append(hashes)
        while len(self._runs) > 1 and len(self._runs[-1]) * _RATIO >= len(self._runs[-2]):
            merged = np.concatenate([self._runs.pop(), self._runs.pop()])
            # a stable sort merges two sorted runs in one pass
            merged.sort(kind="stable")
            self._runs.append(merged)
        if len(self._runs[0]) >= MAX_RUN:
            self._stored.append(self._store(self._runs.pop(0)))

    def _store(self, run: NDArray[np.int64]) -> NDArray[np.int64]:
        with store_errors(f"write into {self._folder}"), tempfile.TemporaryFile(dir=self._folder) as file:
            run.tofile(file)
            file.flush()
            # the mapping keeps the file
            return np.memmap(file, np.int64, "r", shape=run.shape)


def hash_ids(ids: Sequence[str]) -> NDArray[np.int64]:
    """Hash ids, sorted; equal ids have equal hashes within one process."""
    return np.sort(np.fromiter(map(hash, ids), np.int64, len(ids)))
