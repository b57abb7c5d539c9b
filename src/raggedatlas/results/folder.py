"""A result folder: where its table lies, what it holds, and who may write to it."""

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from raggedatlas.errors import ConflictError, StoreError
from raggedatlas.store.lance_errors import lance_errors
from raggedatlas.store.location import Location
from raggedatlas.store.tables import Tables

if TYPE_CHECKING:
    import lance

DATABASE = "lance_db"
TABLE = "results"
INDEX_FILE = "batch_index.npy"
CONFIG_FILE = "original_dataset_config.toml"

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def results_location(result_dir: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> Location:
    """Give the place of a result folder; `storage_options` are those of `RaggedAtlas.open`.

    Raises
    ------
    StoreError
        If it is no local folder and no object store that we know.
    """
    return Location(os.fspath(result_dir), dict(storage_options or {}))


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
    """Give a name beside a file to write to; it takes the file's place at the end, or goes with an error."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
