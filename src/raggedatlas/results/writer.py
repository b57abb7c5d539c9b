"""Results written by several processes: each writes a part, and one commit makes all of them one table."""

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
from raggedatlas.results.batch_writer import BatchWriter
from raggedatlas.results.folder import (
    DATABASE,
    GRACE,
    WriteLock,
    config_text,
    create_folder,
    is_committed,
    list_data_files,
    open_table,
    record_checksums,
    remove_empty_folders,
    remove_old_versions,
    results_location,
    write_config,
)
from raggedatlas.results.fragments import (
    Fragment,
    RunManifest,
    commit_fragments,
    read_manifest,
    verify_files,
    write_manifest,
)
from raggedatlas.results.schema import results_schema
from raggedatlas.store.location import store_errors

PARTS = ".parts"


@dataclass(frozen=True)
class ResultPart:
    """A share of one run that another process may write; it travels by pickle (see `ResultDatasetWriter.parts`).

    Parameters
    ----------
    result_dir : str
        Result folder, by the same path on every machine.
    run : str
        Which run it belongs to.
    number : int
        Which part, from 0; rows of the table stand in the order of the parts.
    """

    result_dir: str
    run: str
    number: int

    @property
    def folder(self) -> Path:
        """Where the parts of the run tell what they wrote; it is there as long as the run."""
        return Path(self.result_dir) / DATABASE / PARTS / self.run

    @property
    def receipt(self) -> Path:
        """The file that says what the part wrote; it is there once the part is finished."""
        return self.folder / f"{self.number}.json"

    @property
    def checkpoint(self) -> Path:
        """The file that says what is finished of the part while it is written."""
        return self.folder / f"{self.number}.partial"

    def writer(self) -> "ResultPartWriter":
        """Begin to write, in the process that this part is for."""
        return ResultPartWriter(self)


class ResultPartWriter(BatchWriter):
    """Writes one part of a run, in a process of its own; nothing is visible before the run's writer commits.

    Parameters
    ----------
    part : ResultPart
        Which part.

    Raises
    ------
    NotFoundError
        If the run has ended.
    DuplicateError
        If the part is written already.

    Examples
    --------
    >>> with part.writer() as writer:  # doctest: +SKIP
    ...     writer.write_batch(ids, values)
    """

    def __init__(self, part: ResultPart) -> None:
        super().__init__(Path(part.result_dir), {}, part.checkpoint)
        self.part = part
        self._refuse_ended()
        if part.receipt.exists():
            raise DuplicateError(self._twice())
        begun = read_manifest(part.checkpoint)
        if begun is not None:
            self._resume_from(begun)

    def commit(self) -> None:
        """Finish the part: say which files it wrote; a second call does nothing.

        Raises
        ------
        ReadOnlyError
            After `abort`.
        NotFoundError
            If the run has ended meanwhile; the files are removed.
        DuplicateError
            If another process has written the same part.
        """
        if self._state == "finished":
            return
        if self._state != "open":
            raise ReadOnlyError(f"Part {self.part.number} of the results in {self.result_dir} was given up.")
        self._refuse_ended()
        receipt = RunManifest(self.columns, tuple(self._finish_files()))
        beside = self.part.receipt.with_name(f".{self.part.number}.{os.getpid()}")
        try:
            with store_errors(f"write {self.part.receipt}"):
                beside.write_text(receipt.to_json(), encoding="utf-8")
            # unlike a renaming, a link never takes the place of another receipt
            os.link(beside, self.part.receipt)
        except FileExistsError as error:
            self.abort()
            raise DuplicateError(self._twice()) from error
        except FileNotFoundError as error:
            self.abort()
            raise NotFoundError(self._ended()) from error
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"{self.part.receipt} cannot be written: {error.strerror or error}.") from error
        finally:
            beside.unlink(missing_ok=True)
        self.part.checkpoint.unlink(missing_ok=True)
        self._state = "finished"

    def _refuse_ended(self) -> None:
        if not self.part.folder.is_dir():
            self.abort()
            raise NotFoundError(self._ended())

    def _ended(self) -> str:
        return (
            f"Part {self.part.number} belongs to a run into {self.result_dir} that has ended; its writer was committed or given "
            "up, or this machine does not see the folder."
        )

    def _twice(self) -> str:
        return f"Part {self.part.number} of the results in {self.result_dir} is written already; each part is written once."


def unfinished_parts(parts: list[ResultPart]) -> list[int]:
    """Number the parts that are not finished."""
    return [part.number for part in parts if not part.receipt.is_file()]


CHECKPOINT = ".checkpoint"
"""File in the database folder that notes what is finished of a run that goes on."""


@checked
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
    resume : bool
        Whether to go on from what an interrupted run with the same `facts` has noted here; `len` counts its rows, which come
        first. Without such a run it begins anew.
    grace : datetime.timedelta
        How long results that are replaced stay readable for those who have them open.

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
    QueryError
        If the interrupted run that is to be resumed was another one.
    CorruptError
        If its files are damaged.
    StoreError
        If the place refuses.

    Notes
    -----
    A run that takes longer than a minute finishes its files now and then, and notes them. An error or a kill after that leaves
    them in the folder, invisible to readers, for a writer with `resume`; any other writer removes them.

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
        folder = Path(results_location(result_dir).path)
        super().__init__(folder, facts or {}, folder / DATABASE / CHECKPOINT)
        self.original_dataset_config: Mapping[str, Any] | None = None
        self.original_dataset: Any = None
        self._parts: list[ResultPart] = []
        self._grace = grace
        self._manifest = RunManifest(facts=self.facts)
        self._made = create_folder(self.result_dir / DATABASE)
        self._replaced: int | None = None
        try:
            self._lock = WriteLock(self.result_dir / DATABASE)
        except BaseException:
            remove_empty_folders(self._made)
            raise
        try:
            noted = read_manifest(self._checkpoint) if resume else None
            self._check_place(noted, overwrite=overwrite)
            if noted is not None:
                self._manifest = noted
                self._resume_from(noted)
        except BaseException:
            self._release()
            raise

    def _check_place(self, noted: RunManifest | None, *, overwrite: bool) -> None:
        """Refuse to write over results unasked, or to mix two runs; remove what dead writers left."""
        table = open_table(results_location(self.result_dir)) if is_committed(self.result_dir) else None
        if table is not None and not overwrite:
            raise DuplicateError(
                f"{self.result_dir} holds {table.count_rows():,} results already; choose another folder, or pass overwrite=True."
            )
        told = {} if noted is None else noted.facts
        for name in sorted({*told, *self.facts} if noted is not None else ()):
            if told.get(name) != self.facts.get(name):
                raise QueryError(
                    f"The run that was interrupted in {self.result_dir} had {name} {told.get(name)!r}, and this one has "
                    f"{self.facts.get(name)!r}; results of both cannot be mixed. Begin anew, without resume."
                )
        self._replaced = None if table is None else int(table.version)
        self._remove_unused_files(noted)

    def _remove_unused_files(self, noted: RunManifest | None = None) -> None:
        """Remove what no reader can hold: files that no version of the table and no noted run needs, and versions replaced long ago."""
        if not self._lock.exclusive:
            return
        needed: set[str] = set()
        if is_committed(self.result_dir):
            table = open_table(results_location(self.result_dir))
            remove_old_versions(table, self._grace)
            needed = list_data_files(table)
        if noted is None:
            self._checkpoint.unlink(missing_ok=True)
            shutil.rmtree(self.result_dir / DATABASE / PARTS, ignore_errors=True)
        else:
            needed |= {each.name for each in noted.fragments} | self._files_of_parts(noted)
        data = self._table / "data"
        for path in data.iterdir() if data.is_dir() else ():
            if path.name not in needed:
                path.unlink(missing_ok=True)

    def _files_of_parts(self, noted: RunManifest) -> set[str]:
        """Name the files of the parts of an interrupted run."""
        parts = self._numbered(noted.run, noted.n_parts) if noted.run else []
        receipts = [read_manifest(path) for part in parts for path in (part.receipt, part.checkpoint)]
        return {each.name for receipt in receipts if receipt is not None for each in receipt.fragments}

    def _numbered(self, run: str, n: int, first: int = 0) -> list[ResultPart]:
        return [ResultPart(str(self.result_dir.absolute()), run, first + k) for k in range(n)]

    def _make_manifest(self, fragments: tuple[Fragment, ...]) -> RunManifest:
        return replace(self._manifest, columns=self.columns, fragments=fragments)

    @property
    def is_saved(self) -> bool:
        """Whether a part of the run is noted, from which another can go on."""
        if not self._parts:
            return super().is_saved
        return any(path.is_file() for part in self._parts for path in (part.receipt, part.checkpoint))

    @property
    def n_parts(self) -> int:
        """How many parts the interrupted run has that is gone on with; 0 where it was not shared."""
        return self._manifest.n_parts

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
        if self._manifest.run and not self._parts:
            if n != self._manifest.n_parts:
                raise QueryError(
                    f"The run that was interrupted in {self.result_dir} has {self._manifest.n_parts} parts, and {n} are asked for; ask for "
                    "as many, or begin anew, without resume."
                )
            self._parts = self._numbered(self._manifest.run, n)
            return list(self._parts)
        run = self._parts[0].run if self._parts else uuid4().hex
        made = self._numbered(run, n, len(self._parts))
        with store_errors(f"make {made[0].folder}"):
            made[0].folder.mkdir(parents=True, exist_ok=True)
        self._parts += made
        self._manifest = replace(self._manifest, run=run, n_parts=len(self._parts))
        own = () if self._files is None else self._files.fragments[: self._n_saved]
        write_manifest(self._checkpoint, self._make_manifest((*self._resumed, *own)))
        return made

    def _refuse_ended(self) -> None:
        if self._state != "open":
            raise ReadOnlyError(f"The results in {self.result_dir} are {self._state}; make a new writer.")

    def _collect(self) -> None:
        """Take the files of all parts, and refuse ids that two of them have."""
        missing = unfinished_parts(self._parts)
        if missing:
            raise ConflictError(
                f"Parts {missing} of the results in {self.result_dir} are not finished; wait for their processes, and commit then. "
                "If one of them died, write its part again."
            )
        try:
            for part in self._parts:
                receipt = read_manifest(part.receipt)
                if receipt is not None and receipt.columns:
                    verify_files(receipt, self._table / "data", f"Part {part.number}")
                    self._add(receipt, f"Part {part.number}")
        except BaseException:
            self.abort()
            raise

    def _add(self, receipt: RunManifest, what: str) -> None:
        """Add the files of one part."""
        if not receipt.fragments:
            self._columns = self._columns or receipt.columns
            return
        self._check_columns(receipt.columns, what)
        self._register_ids(receipt.fragments, what)
        self._added += receipt.fragments
        self._n_rows += receipt.n_rows

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
        self._collect()
        replaced = self._replaced is not None
        config = config_text(self.result_dir, self.original_dataset_config, self.original_dataset, replace=replaced)
        if not replaced:
            # new results are never there without it; the file of older ones stays until they are replaced
            write_config(self.result_dir, config)
        fragments: list[Fragment] = []
        if self._columns is not None:
            schema, fragments = results_schema(self._columns, self.facts), self._finish_files()
            commit_fragments(self._table, schema, fragments, self._replaced)
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
        """Let others write, and leave no empty folder."""
        self._lock.release()
        remove_empty_folders([self._table / "data", self._table, self._table.parent, *self._made])

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
                self._remove_unused_files()
        self._release()

    def _fail(self) -> None:
        super()._fail()
        self._release()


@checked
def create_results_writer(result_dir: str | os.PathLike[str]) -> ResultDatasetWriter:
    """Make the writer of new results, which are always a Lance table.

    Parameters
    ----------
    result_dir : str or path
        Result folder.

    Examples
    --------
    >>> import tempfile
    >>> create_results_writer(tempfile.mkdtemp()).columns
    ()
    """
    return ResultDatasetWriter(result_dir)
