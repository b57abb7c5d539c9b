"""Writing results: data files batch by batch, and one commit at the end (seed 003, step 1)."""

import contextlib
import os
import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from raggedatlas.errors import ConflictError, DuplicateError, QueryError, ReadOnlyError
from raggedatlas.results.batches import BatchWriter
from raggedatlas.results.config import config_text, write_config
from raggedatlas.results.duplicates import hashes_of
from raggedatlas.results.folder import DATABASE, WriteLock, is_committed, open_table, results_location, stored_files
from raggedatlas.results.fragments import commit_fragments, read_batches
from raggedatlas.results.parts import PARTS, Receipt, ResultPart, check_files, missing_parts, read_receipt
from raggedatlas.results.schema import OBJECT_ID, results_schema
from raggedatlas.store.lance_errors import lance_errors

if TYPE_CHECKING:
    import lance


class ResultDatasetWriter(BatchWriter):
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
    facts : dict of str to str
        Metadata of the table; may be added to before `commit`.

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
        super().__init__(Path(results_location(result_dir).path), facts or {})
        self.original_dataset_config: Mapping[str, Any] | None = None
        self.original_dataset: Any = None
        self._parts: list[ResultPart] = []
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
        self._remove_strays(table)
        return None if table is None else int(table.version)

    def _remove_strays(self, table: "lance.LanceDataset | None") -> None:
        """Remove the files that no version of the table needs: what dead writers and parts left."""
        if not self._lock.exclusive:
            return
        shutil.rmtree(self.result_dir / DATABASE / PARTS, ignore_errors=True)
        data = self._table / "data"
        if data.is_dir():
            needed = set() if table is None else stored_files(table)
            for path in data.iterdir():
                if path.name not in needed:
                    path.unlink(missing_ok=True)

    def parts(self, n: int) -> list[ResultPart]:
        """Share the run among processes: each writes one part, and `commit` of this writer makes all visible at once.

        Parameters
        ----------
        n : int
            How many parts; hand them to the processes by pickle, e.g. as arguments or by ``broadcast_object_list``.

        Returns
        -------
        list of ResultPart
            ``part.writer()`` begins one. The table has this writer's own batches first, then the parts by their numbers.

        Raises
        ------
        QueryError
            If `n` is less than one.
        ReadOnlyError
            After `commit` or `abort`.

        Examples
        --------
        >>> import tempfile
        >>> import numpy as np
        >>> with ResultDatasetWriter(tempfile.mkdtemp()) as writer:
        ...     for part in writer.parts(2):  # each in its own process
        ...         with part.writer() as share:
        ...             share.write_batch([f"cell{part.number}"], np.zeros((1, 3)))
        """
        self._refuse_ended()
        if n < 1:
            raise QueryError(f"{n} parts are asked for; a run has at least one.")
        run = self._parts[0].run if self._parts else uuid4().hex
        made = [ResultPart(str(self.result_dir.absolute()), run, len(self._parts) + k) for k in range(n)]
        made[0].folder.mkdir(parents=True, exist_ok=True)
        self._parts += made
        return made

    def _refuse_ended(self) -> None:
        if self._state != "open":
            raise ReadOnlyError(f"The results in {self.result_dir} are {self._state}; make a new writer.")

    def _collect(self) -> None:
        """Take the files of all parts, and refuse ids that two of them have."""
        missing = missing_parts(self._parts)
        if missing:
            raise ConflictError(
                f"Parts {missing} of the results in {self.result_dir} are not finished; wait for their processes, and commit then. "
                "If one of them died, write its part again."
            )
        try:
            for part in self._parts:
                receipt = read_receipt(part)
                if receipt is not None and receipt.columns:
                    check_files(part, receipt, self._table / "data")
                    self._add(receipt, f"Part {part.number}")
        except BaseException:
            self.abort()
            raise

    def _add(self, receipt: Receipt, what: str) -> None:
        """Add the files of one part."""
        if not receipt.fragments:
            self._columns = self._columns or receipt.columns
            return
        self._settle(receipt.columns, what)
        first = 0
        for batch in read_batches(self._table / "data", receipt.fragments, [OBJECT_ID]):
            ids: list[str] = batch.column(0).to_pylist()
            hashes = hashes_of(ids)
            if self._seen.meets(hashes):
                self._refuse_known(ids, what, first)
            self._seen.add(hashes)
            first += len(ids)
        self._added += receipt.fragments
        self._n_rows += sum(each.n_rows for each in receipt.fragments)

    def write_index(self) -> None:
        """Make all batches visible at once, and write ``original_dataset_config.toml``; a second call does nothing.

        Without any batch there is nothing to read later: the table is made only where an empty batch told its shape.

        Raises
        ------
        ReadOnlyError
            After `abort`.
        ConflictError
            If parts are not finished (the run stays open), or somebody committed other results here meanwhile.
        SourceError
            If an id is in two parts, or their outputs differ; the run is given up then.
        StoreError
            If the disk refuses.
        """
        if self._state == "committed":
            return
        self._refuse_ended()
        with_parts = bool(self._parts)
        self._collect()
        replaced = self._replaced is not None
        config = config_text(self.result_dir, self.original_dataset_config, self.original_dataset, replace=replaced)
        if not replaced:
            # new results are never there without it; the file of older ones stays until they are replaced
            write_config(self.result_dir, config)
        table = None
        if self._columns is not None:
            schema = results_schema(self._columns, self.facts)
            table = commit_fragments(self._table, schema, self._finish_files(), self._replaced)
        self._state = "committed"
        try:
            if replaced:
                write_config(self.result_dir, config)
            if table is not None and replaced and self._lock.exclusive:
                with lance_errors(str(self._table)):
                    table.cleanup_old_versions(
                        older_than=timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
                    )
            if with_parts:
                self._remove_strays(table)
        finally:
            self._lock.release()

    def commit(self) -> None:
        """Do what `write_index` does, under the other name that the seed has for it."""
        self.write_index()

    def abort(self) -> None:
        """Give up: remove the files of this run, parts included; what was committed before stays. After `commit` nothing happens."""
        if self._state != "open":
            return
        super().abort()
        with contextlib.suppress(OSError):
            if self._parts:
                self._remove_strays(
                    open_table(results_location(self.result_dir)) if self._replaced is not None else None
                )
        self._lock.release()
