"""A result folder: where its table lies, what it holds, and who may write to it."""

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raggedatlas.errors import ConflictError, NotFoundError, StoreError
from raggedatlas.store.location import Location, store_errors
from raggedatlas.store.storage_errors import lance_errors
from raggedatlas.store.tables import Tables

if TYPE_CHECKING:
    import lance

DATABASE = "lance_db"
TABLE = "results"
INDEX_FILE = "batch_index.npy"
CONFIG_FILE = "original_dataset_config.toml"

GRACE = timedelta(hours=1)
"""How long results that were replaced stay readable, as `RaggedAtlas.gc` waits for an `add`."""

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def results_location(result_dir: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> Location:
    """Give the place of a result folder; `storage_options` are those of `RaggedAtlas.open`.

    Raises
    ------
    StoreError
        If it is no local folder and no object store that we know.
    """
    return Location.of(result_dir, storage_options)


def table_path(result_dir: Path) -> Path:
    """Give the folder of the table ``results`` (seed 003, A1)."""
    return result_dir / DATABASE / f"{TABLE}.lance"


def is_committed(result_dir: Path) -> bool:
    """Tell whether a folder holds results that were committed; a killed run leaves a table without versions."""
    return any((table_path(result_dir) / "_versions").glob("*.manifest"))


def is_begun(result_dir: Path) -> bool:
    """Tell whether a run has begun to write here, committed or not."""
    return table_path(result_dir).is_dir()


def open_table(location: Location, version: int | None = None) -> "lance.LanceDataset":
    """Open the table of results.

    Parameters
    ----------
    location : Location
        The result folder.
    version : int or None
        Version of the table; None opens the newest.

    Raises
    ------
    NotFoundError
        If the table, or the version of it, is not there.
    """
    pinned = None if version is None else {TABLE: version}
    return Tables(location.child(DATABASE), pinned).open(TABLE)


def stored_files(table: "lance.LanceDataset") -> set[str]:
    """Name the data files that any version of a table needs."""
    import lance

    with lance_errors(table.uri):
        versions = [lance.dataset(table.uri, version=entry["version"]) for entry in table.versions()]
        return {
            Path(file.path).name
            for each in versions
            for fragment in each.get_fragments()
            for file in fragment.data_files()
        }


def remove_old_versions(table: "lance.LanceDataset", grace: timedelta) -> None:
    """Remove the versions of a table that were replaced longer ago than a reader is expected to hold them.

    Parameters
    ----------
    table : lance.LanceDataset
        Of results; nobody else may write to it.
    grace : datetime.timedelta
        How long a version stays after another one took its place.
    """
    with lance_errors(table.uri):
        entries: list[Any] = sorted(table.versions(), key=lambda entry: int(entry["version"]))
        # a version is as old as the one that replaced it is, whenever it was written itself
        now = datetime.now(entries[-1]["timestamp"].tzinfo)
        gone = sum(now - after["timestamp"] >= grace for _, after in pairwise(entries))
        if gone:
            table.cleanup_old_versions(
                retain_versions=len(entries) - gone, delete_unverified=True, error_if_tagged_old_versions=False
            )


@contextlib.contextmanager
def result_errors(table: "lance.LanceDataset") -> Iterator[None]:
    """Turn Lance's errors into ours, and name a version that was removed while it was read.

    Raises
    ------
    NotFoundError
        If the version is not there any more.
    StoreError, ConflictError
        As `lance_errors`.
    """
    try:
        with lance_errors(table.uri):
            yield
    except StoreError as error:
        import lance

        with contextlib.suppress(OSError, ValueError, RuntimeError):
            newest = lance.dataset(table.uri)
            if table.version not in {entry["version"] for entry in newest.versions()}:
                raise NotFoundError(replaced_text(table.uri, int(table.version), int(newest.version))) from error
        raise


def replaced_text(uri: str, version: int, newest: int) -> str:
    """Say that a version of results is gone."""
    return (
        f"Version {version} of the results in {uri} was replaced by version {newest} and has been removed; open the results again. "
        "grace= of ResultDatasetWriter says how long replaced results stay."
    )


def make_folder(folder: Path) -> list[Path]:
    """Make a folder with its parents, and name those that were not there, the innermost first.

    Raises
    ------
    StoreError
        If the place refuses.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with store_errors(f"make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    return missing


def remove_empty(folders: list[Path]) -> None:
    """Remove folders that were made for nothing, the innermost first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


class WriteLock:
    """The claim of one writer on a result folder; the operating system drops it when the process dies.

    Parameters
    ----------
    database : pathlib.Path
        The folder ``lance_db``.

    Raises
    ------
    ConflictError
        If another writer has the claim.
    """

    def __init__(self, database: Path) -> None:
        import fcntl

        self.path = database / ".writing"
        # False on file systems without locks: rubbish of other writers is then left alone
        self.exclusive = True
        with store_errors(f"lock {self.path}"):
            self._file: int | None = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                self.exclusive = False
                return
            os.close(self._file)
            self._file = None
            if not isinstance(error, BlockingIOError):
                raise StoreError(f"{self.path} cannot be locked: {error}.") from error
            raise ConflictError(
                f"Results are being written to {database.parent} already, by this process or another; "
                "wait for that writer, or commit() or abort() it."
            ) from error
        if not self._holds_the_file():
            # the writer before removed its file between our opening and our locking
            os.close(self._file)
            self._file = None
            raise ConflictError(f"Results are being written to {database.parent} already; try again.")

    def _holds_the_file(self) -> bool:
        try:
            return self._file is not None and os.fstat(self._file).st_ino == self.path.stat().st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the claim up; a second time does nothing."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self._file)
        self._file = None


@contextlib.contextmanager
def removed_on_error(path: Path) -> Iterator[Path]:
    """Give a name beside a file to write to; it takes the file's place at the end, or goes with an error.

    Raises
    ------
    StoreError
        If the disk refuses.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with store_errors(f"write {path}"):
        try:
            yield beside
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
