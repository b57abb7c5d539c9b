"""Writing results: data files batch by batch, and one commit at the end (seed 003, step 1)."""

import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import DuplicateError, ReadOnlyError, SourceError
from raggedatlas.results.config import write_config
from raggedatlas.results.duplicates import SeenIds, hashes_of
from raggedatlas.results.folder import (
    DATABASE,
    WriteLock,
    is_committed,
    open_table,
    results_location,
    stored_files,
    table_path,
)
from raggedatlas.results.fragments import Fragment, FragmentWriter, commit_fragments, read_column
from raggedatlas.results.schema import OBJECT_ID, ResultColumn, results_schema
from raggedatlas.results.tensors import as_ids, as_outputs
from raggedatlas.store.lance_errors import lance_errors


class ResultDatasetWriter:
    """Writes what a model computes to ``<result_dir>/lance_db/results.lance``, batch by batch, in flat memory.

    Nothing is visible before `commit`, which is one commit of the table however many batches there were. A run that is
    killed leaves no table, and its files are removed by the next writer.

    Parameters
    ----------
    result_dir : str or path
        Local folder; made with its parents if it is missing. Other files in it are left alone.
    overwrite : bool
        Whether results that are committed there may be replaced; readers see the old ones or the new ones.
    facts : mapping of str to str, or None
        Further metadata of the table, e.g. which model made it.

    Attributes
    ----------
    original_dataset_config : mapping or None
        Configuration of the data that the model saw, for ``original_dataset_config.toml``; may be set before `commit`.
    original_dataset : object or None
        Instead of the configuration: a dataset that has it, or a `ResultDataset` whose folder has the file.

    Raises
    ------
    DuplicateError
        If the folder holds committed results and `overwrite` is not asked (also a ``FileExistsError``).
    ConflictError
        If another writer is writing there.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from raggedatlas import ResultDataset
    >>> folder = tempfile.mkdtemp()
    >>> with ResultDatasetWriter(folder) as writer:
    ...     writer.write_batch(["a", "b"], np.zeros((2, 3), np.float32))
    >>> len(ResultDataset({}, folder))
    2
    """

    def __init__(
        self, result_dir: str | os.PathLike[str], *, overwrite: bool = False, facts: Mapping[str, str] | None = None
    ) -> None:
        self.result_dir = Path(results_location(result_dir).path)
        self.original_dataset_config: Mapping[str, Any] | None = None
        self.original_dataset: Any = None
        self._table = table_path(self.result_dir)
        self._facts = dict(facts or {})
        self._columns: tuple[ResultColumn, ...] | None = None
        self._files: FragmentWriter | None = None
        self._added: list[Fragment] = []
        self._seen = SeenIds()
        self._n_batches = self._n_rows = 0
        self._state = "open"
        (self.result_dir / DATABASE).mkdir(parents=True, exist_ok=True)
        self._lock = WriteLock(self.result_dir / DATABASE)
        try:
            self._replaced = self._check_place(overwrite=overwrite)
        except BaseException:
            self._lock.release()
            raise

    def _check_place(self, *, overwrite: bool) -> int | None:
        """Refuse to write over results unasked, remove what dead writers left, and note the version to replace."""
        table = open_table(results_location(self.result_dir)) if is_committed(self.result_dir) else None
        if table is not None and not overwrite:
            raise DuplicateError(
                f"{self.result_dir} holds {table.count_rows():,} results already; choose another folder, or pass overwrite=True."
            )
        data = self._table / "data"
        if self._lock.exclusive and data.is_dir():
            needed = set() if table is None else stored_files(table)
            for path in data.iterdir():
                if path.name not in needed:
                    path.unlink(missing_ok=True)
        return None if table is None else int(table.version)

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
            After `commit` or `abort`.
        SourceError
            If the lengths differ, an id is missing or known, or shape, dtype or outputs differ from the first batch (also a
            ``ValueError``). The table is as it was then, and further batches can be written.
        StoreError
            If the disk refuses.
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
            self._settle(outputs, number)
        if n:
            self._write(ids, outputs, number)
        self._n_batches += 1
        self._n_rows += n

    def _settle(self, outputs: Mapping[str, NDArray[Any]], number: int) -> None:
        """Take the table's columns from the first batch, and compare those of later ones with them."""
        found = tuple(ResultColumn(name, values.shape[1:], values.dtype) for name, values in outputs.items())
        if self._files is None and not self._added:
            # an empty batch says what a table without rows looks like, but does not bind the first that has rows
            self._columns = found
            return
        told = {column.name: column for column in self.columns}
        if set(told) != set(outputs):
            raise SourceError(
                f"Batch {number} has the outputs {sorted(outputs)}, but batch 0 had {sorted(told)}; all batches are alike."
            )
        for column in found:
            if column != told[column.name]:
                raise SourceError(
                    f"Batch {number}: output {column.name!r} has shape {column.shape} and dtype {column.dtype} for each object, "
                    f"but the run began with shape {told[column.name].shape} and dtype {told[column.name].dtype}; "
                    "all batches are alike."
                )

    def _write(self, ids: list[str], outputs: Mapping[str, NDArray[Any]], number: int) -> None:
        """Refuse ids that are known, and write."""
        batch, hashes = _record_batch(ids, outputs, self.columns), hashes_of(ids)
        if self._seen.meets(hashes):
            self._refuse_known(ids, number)
        try:
            self._writing().write(batch)
        except BaseException:
            # part of the batch may be written
            self.abort()
            raise
        self._seen.add(hashes)

    def _refuse_known(self, ids: list[str], number: int) -> None:
        """Compare the ids themselves, as only their hashes are remembered."""
        files = self._writing()
        written = set(read_column(files.folder, [*self._added, *files.finish()], OBJECT_ID))
        for row, each in enumerate(ids):
            if each in written:
                raise SourceError(
                    f"Batch {number}, row {row}: the id {each!r} has a result already; each object has one result in a run."
                )
            written.add(each)

    def _writing(self) -> FragmentWriter:
        if self._files is None:
            self._files = FragmentWriter(self._table / "data", results_schema(self.columns, self._facts))
        return self._files

    def write_index(self) -> None:
        """Make all batches visible at once, and write ``original_dataset_config.toml``; a second call does nothing.

        Without any batch there is nothing to read later: the table is made only where an empty batch told its shape.

        Raises
        ------
        ReadOnlyError
            After `abort`.
        ConflictError
            If somebody committed other results here meanwhile.
        StoreError
            If the disk refuses.
        """
        if self._state == "committed":
            return
        if self._state != "open":
            raise ReadOnlyError(f"The results in {self.result_dir} were given up; make a new writer.")
        write_config(
            self.result_dir, self.original_dataset_config, self.original_dataset, replace=self._replaced is not None
        )
        if self._columns is not None:
            fragments = (*self._added, *self._writing().finish())
            schema = results_schema(self._columns, self._facts)
            table = commit_fragments(self._table, schema, fragments, self._replaced)
            if self._replaced is not None and self._lock.exclusive:
                with lance_errors(str(self._table)):
                    table.cleanup_old_versions(
                        older_than=timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
                    )
        self._state = "committed"
        self._lock.release()

    def commit(self) -> None:
        """Do what `write_index` does, under the other name that the seed has for it."""
        self.write_index()

    def abort(self) -> None:
        """Give up: remove the files of this run; what was committed before stays. After `commit` nothing happens."""
        if self._state != "open":
            return
        self._state = "given up"
        if self._files is not None:
            self._files.discard()
        self._lock.release()

    def __enter__(self) -> Self:
        """Write in a block; its end commits, and an error in it gives up."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit, or give up after an error."""
        if kind is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            self.abort()
            raise


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
