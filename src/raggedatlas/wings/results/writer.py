"""Result writers: `ResultDatasetWriter` with a single commit at the end, and parts for several processes."""

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from raggedatlas.errors import ConflictError, DuplicateError, NotFoundError, QueryError, ReadOnlyError, StoreError
from raggedatlas.model.arguments import checked
from raggedatlas.store.location import Location
from raggedatlas.store.storage_errors import store_errors
from raggedatlas.wings.results.batch_writer import (
    BatchWriter,
    Fragment,
    RunManifest,
    commit_fragments,
    read_manifest,
    verify_files,
)
from raggedatlas.wings.results.folder import (
    DATABASE,
    GRACE,
    WriteLock,
    config_text,
    is_committed,
    list_data_files,
    open_table,
    record_checksums,
    remove_empty_folders,
    remove_old_versions,
    write_config,
)
from raggedatlas.wings.results.schema import results_schema

PARTS = ".parts"


@dataclass(frozen=True)
class ResultPart:
    """A part of one run to be written by another process; picklable (see `ResultDatasetWriter.parts`).

    Parameters
    ----------
    result_dir : str
        Result folder, under the same path on every machine.
    run : str
        Id of the run.
    number : int
        Number of the part, from 0; rows of the table are in the order of the parts.
    """

    result_dir: str
    run: str
    number: int

    @property
    def folder(self) -> Path:
        """Folder of the manifests of the parts; it exists as long as the run."""
        return Path(self.result_dir) / DATABASE / PARTS / self.run

    @property
    def receipt(self) -> Path:
        """Path of the manifest of the part; it exists once the part is finished."""
        return self.folder / f"{self.number}.json"

    @property
    def checkpoint(self) -> Path:
        """Path of the checkpoint of the part while it is being written."""
        return self.folder / f"{self.number}.partial"

    def writer(self) -> "ResultPartWriter":
        """Return a writer, in the process that writes this part."""
        return ResultPartWriter(self)


class ResultPartWriter(BatchWriter):
    """Writer of one part of a run, in its own process; nothing is visible before the run's writer commits.

    Raises `NotFoundError` if the run has ended, and `DuplicateError` if the part has already been written.

    Examples
    --------
    >>> with part.writer() as writer:  # doctest: +SKIP
    ...     writer.write_batch(ids, values)
    """

    def __init__(self, part: ResultPart) -> None:
        super().__init__(Path(part.result_dir), {}, part.checkpoint)
        self.part = part
        self._require_open()
        if part.receipt.exists():
            raise DuplicateError(self._already_written())
        begun = read_manifest(part.checkpoint)
        if begun is not None:
            self._resume_from(begun)

    def commit(self) -> None:
        """Finish the part by writing its manifest; further calls have no effect.

        Raises `ReadOnlyError` after `abort`, `NotFoundError` if the run has ended in the meantime, whereupon the files
        are removed, and `DuplicateError` if another process has written the same part.
        """
        if self._state == "finished":
            return
        if self._state != "open":
            raise ReadOnlyError(f"Part {self.part.number} of the results in {self.result_dir} was aborted.")
        self._require_open()
        receipt = RunManifest(self.columns, tuple(self._finish_files()))
        temporary = self.part.receipt.with_name(f".{self.part.number}.{os.getpid()}")
        try:
            with store_errors(f"write {self.part.receipt}"):
                temporary.write_text(receipt.to_json(), encoding="utf-8")
            # Unlike a rename, a link never replaces the manifest of another process.
            os.link(temporary, self.part.receipt)
        except FileExistsError as error:
            self.abort()
            raise DuplicateError(self._already_written()) from error
        # Before `StoreError`, because `MissingFileError` is both: the folder goes when the run ends.
        except FileNotFoundError as error:
            self.abort()
            raise NotFoundError(self._run_ended()) from error
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"{self.part.receipt} cannot be written: {error.strerror or error}.") from error
        finally:
            temporary.unlink(missing_ok=True)
        # After the receipt: a process that dies in between leaves both, and the receipt counts.
        self.part.checkpoint.unlink(missing_ok=True)
        self._state = "finished"

    def _require_open(self) -> None:
        if not self.part.folder.is_dir():
            self.abort()
            raise NotFoundError(self._run_ended())

    def _run_ended(self) -> str:
        return (
            f"Part {self.part.number} belongs to a run with results in {self.result_dir} that has ended; its writer was committed or "
            "aborted, or this machine does not see the folder."
        )

    def _already_written(self) -> str:
        return f"Part {self.part.number} of the results in {self.result_dir} has already been written."


CHECKPOINT = ".checkpoint"
"""File in the database folder that records the finished work of a running writer."""


@checked
class ResultDatasetWriter(BatchWriter):
    """Writer of model outputs to ``<result_dir>/lance_db/results.lance``, batch by batch, in bounded memory.

    Nothing is visible before `commit`, which is a single commit of the table for any number of batches. A killed run
    leaves no table, and its files are removed by the next writer.

    Parameters
    ----------
    result_dir : str or path
        Local folder; created with its parents if missing. Other files in it are left alone.
    overwrite : bool
        Whether committed results may be replaced; readers see either the old or the new ones.
    facts : mapping of str to str, or None
        Additional table metadata, e.g. the name of the model.
    resume : bool
        Whether to continue from the checkpoint of an interrupted run with the same `facts`; `len` counts its rows, which come
        first. Without a checkpoint the run starts from the beginning.
    grace : datetime.timedelta
        How long replaced results stay readable for those who have them open.

    Attributes
    ----------
    original_dataset_config : mapping or None
        Configuration of the original dataset, for ``original_dataset_config.toml``; may be set before `commit`.
    original_dataset : object or None
        Alternative to the configuration: a dataset that has it, or a `ResultDataset` whose folder has the file.
    facts : dict of str to str
        Table metadata; may be extended before `commit`.

    Raises
    ------
    DuplicateError
        If the folder holds committed results and `overwrite` is False (also a ``FileExistsError``).
    ConflictError
        If another writer is writing to the folder.
    QueryError
        If the interrupted run has different `facts`.
    CorruptError
        If files of the interrupted run are damaged.
    StoreError
        If writing fails.

    Notes
    -----
    A run of more than a minute finishes its files periodically and records them in a checkpoint. An error or a kill after that
    leaves them in the folder, invisible to readers, for a writer with `resume`; any other writer removes them.

    References
    ----------
    Hyrax, Lance Storage Layer Design Document, Step 1.

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
        self,
        result_dir: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        facts: Mapping[str, str] | None = None,
        resume: bool = False,
        grace: timedelta = GRACE,
    ) -> None:
        folder = Location.of(result_dir).path
        super().__init__(folder, facts or {}, folder / DATABASE / CHECKPOINT)
        self.original_dataset_config: Mapping[str, Any] | None = None
        self.original_dataset: Any = None
        self._parts: list[ResultPart] = []
        self._grace = grace
        database = self.result_dir / DATABASE
        # Those that are missing, innermost first.
        self._created_folders = [path for path in (database, *database.parents) if not path.exists()]
        with store_errors(f"make {database}"):
            database.mkdir(parents=True, exist_ok=True)
        self._replaced: int | None = None
        try:
            # Before the folder is looked at, so that what is found there does not change afterwards.
            self._lock = WriteLock(database)
        except BaseException:
            remove_empty_folders(self._created_folders)
            raise
        try:
            checkpoint = read_manifest(self._checkpoint) if resume else None
            table = open_table(Location.of(self.result_dir)) if is_committed(self.result_dir) else None
            if table is not None and not overwrite:
                raise DuplicateError(
                    f"{self.result_dir} already holds {table.count_rows():,} results; choose another folder, or pass overwrite=True."
                )
            resumed = {} if checkpoint is None else checkpoint.facts
            for name in sorted({*resumed, *self.facts} if checkpoint is not None else ()):
                if resumed.get(name) != self.facts.get(name):
                    raise QueryError(
                        f"The interrupted run in {self.result_dir} had {name} {resumed.get(name)!r}, and this one has "
                        f"{self.facts.get(name)!r}; their results cannot be mixed. Start again without resume."
                    )
            # The commit fails if the table has a newer version by then.
            self._replaced = None if table is None else int(table.version)
            self._remove_unused_files(checkpoint)
            if checkpoint is not None:
                self._manifest = checkpoint
                self._resume_from(checkpoint)
        except BaseException:
            self._release()
            raise

    def _remove_unused_files(self, checkpoint: RunManifest | None = None) -> None:
        """Remove files that no table version and no resumable run needs, and versions replaced longer than `grace` ago.

        Versions stay while a run is resumed; its commit removes them.
        """
        if not self._lock.exclusive:
            return
        needed: set[str] = set()
        if is_committed(self.result_dir):
            table = open_table(Location.of(self.result_dir))
            # Lance's clean-up removes every file that no version names, so also those of a run that is to be resumed.
            if checkpoint is None:
                remove_old_versions(table, self._grace)
            # Of all versions that are left: readers may have an older one open until its grace is over.
            needed = list_data_files(table)
        if checkpoint is None:
            self._checkpoint.unlink(missing_ok=True)
            shutil.rmtree(self.result_dir / DATABASE / PARTS, ignore_errors=True)
        else:
            needed |= {each.name for each in checkpoint.fragments}
            for part in self._make_parts(checkpoint.run, checkpoint.n_parts) if checkpoint.run else ():
                for path in (part.receipt, part.checkpoint):
                    receipt = read_manifest(path)
                    needed |= set() if receipt is None else {each.name for each in receipt.fragments}
        data = self._table / "data"
        for path in data.iterdir() if data.is_dir() else ():
            if path.name not in needed:
                path.unlink(missing_ok=True)

    def _make_parts(self, run: str, n: int, first: int = 0) -> list[ResultPart]:
        return [ResultPart(str(self.result_dir.absolute()), run, first + k) for k in range(n)]

    @property
    def is_saved(self) -> bool:
        """Whether a checkpoint exists from which the run can be resumed."""
        if not self._parts:
            return super().is_saved
        return any(path.is_file() for part in self._parts for path in (part.receipt, part.checkpoint))

    @property
    def n_parts(self) -> int:
        """Number of parts of the resumed run; 0 if it was not shared among processes."""
        return self._manifest.n_parts

    def parts(self, n: int) -> list[ResultPart]:
        """Divide the run among processes: each writes one part, and `commit` of this writer makes all visible at once.

        Parameters
        ----------
        n : int
            Number of parts; send them to the processes by pickle, e.g. as arguments or with ``broadcast_object_list``.

        Returns
        -------
        list of ResultPart
            ``part.writer()`` opens one. The table has this writer's own batches first, then the parts in order.

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
        self._require_open()
        if n < 1:
            raise QueryError(f"n={n}; a run has at least one part.")
        # A resumed run keeps its parts: finished ones have a receipt, others perhaps a checkpoint.
        if self._manifest.run and not self._parts:
            if n != self._manifest.n_parts:
                raise QueryError(
                    f"The interrupted run in {self.result_dir} has {self._manifest.n_parts} parts, and {n} were requested; request the "
                    "same number, or start again without resume."
                )
            self._parts = self._make_parts(self._manifest.run, n)
            return list(self._parts)
        run = self._parts[0].run if self._parts else uuid4().hex
        parts = self._make_parts(run, n, len(self._parts))
        with store_errors(f"make {parts[0].folder}"):
            parts[0].folder.mkdir(parents=True, exist_ok=True)
        self._parts += parts
        self._manifest = replace(self._manifest, run=run, n_parts=len(self._parts))
        own = () if self._files is None else self._files.fragments[: self._n_saved]
        # Before the parts are handed out: only a checkpoint that names the run lets their files be resumed.
        self._write_checkpoint((*self._resumed, *own))
        return parts

    def _require_open(self) -> None:
        if self._state != "open":
            raise ReadOnlyError(f"The results in {self.result_dir} are {self._state}; create a new writer.")

    def write_index(self) -> None:
        """Commit all batches at once, and write ``original_dataset_config.toml``; further calls have no effect.

        Without any batch no table is created, unless an empty batch defined its shape.

        Raises
        ------
        ReadOnlyError
            After `abort`.
        ConflictError
            If parts are not finished (the run stays open), or other results were committed here in the meantime.
        SourceError
            If an id occurs in two parts, or their outputs differ; the run is aborted then.
        StoreError
            If writing fails.
        """
        if self._state == "committed":
            return
        self._require_open()
        missing = [part.number for part in self._parts if not part.receipt.is_file()]
        if missing:
            raise ConflictError(
                f"Parts {missing} of the results in {self.result_dir} are not finished; wait for their processes before commit(). "
                "If one of them died, write its part again."
            )
        try:
            for part in self._parts:
                receipt = read_manifest(part.receipt)
                if receipt is not None and receipt.columns:
                    what = f"Part {part.number}"
                    verify_files(receipt, self._table / "data", what)
                    if receipt.fragments:
                        self._check_columns(receipt.columns, what)
                        self._register_ids(receipt.fragments, what)
                        self._added += receipt.fragments
                        self._n_rows += receipt.n_rows
                    else:
                        self._columns = self._columns or receipt.columns
        except BaseException:
            self.abort()
            raise
        replaced = self._replaced is not None
        config = config_text(self.result_dir, self.original_dataset_config, self.original_dataset, replace=replaced)
        if not replaced:
            # New results never exist without this file; the file of older results is kept until they are replaced.
            write_config(self.result_dir, config)
        fragments: list[Fragment] = []
        if self._columns is not None:
            schema, fragments = results_schema(self._columns, self.facts), self._finish_files()
            commit_fragments(self._table, schema, fragments, self._replaced)
        # From here on nothing may abort: the files belong to the table.
        self._state = "committed"
        try:
            if replaced:
                write_config(self.result_dir, config)
            self._remove_unused_files()
            if is_committed(self.result_dir):
                record_checksums(self.result_dir, {each.name: each.sha256 for each in fragments})
        finally:
            self._release()

    def _release(self) -> None:
        """Release the lock, and remove empty folders."""
        self._lock.release()
        remove_empty_folders([self._table / "data", self._table, self._table.parent, *self._created_folders])

    def commit(self) -> None:
        """Alias of `write_index`."""
        self.write_index()

    def abort(self) -> None:
        """Abort: remove the files of this run, parts included; earlier committed results are kept. No effect after `commit`."""
        if self._state != "open":
            return
        super().abort()
        with contextlib.suppress(OSError):
            # The files of parts are not known to this writer; all that no version needs are removed.
            if self._parts:
                self._remove_unused_files()
        self._release()

    def _fail(self) -> None:
        super()._fail()
        self._release()


@checked
def create_results_writer(result_dir: str | os.PathLike[str]) -> ResultDatasetWriter:
    """Return a writer of new results, which are always stored as a Lance table.

    Parameters
    ----------
    result_dir : str or path
        Result folder.

    References
    ----------
    Hyrax, Lance Storage Layer Design Document, Step 3.

    Examples
    --------
    >>> import tempfile
    >>> create_results_writer(tempfile.mkdtemp()).columns
    ()
    """
    return ResultDatasetWriter(result_dir)
