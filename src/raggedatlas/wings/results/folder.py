"""A result folder: where its table lies, what it holds, and who may write to it."""

import contextlib
import errno
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raggedatlas.errors import ConflictError, CorruptError, NotFoundError, SourceError, StoreError
from raggedatlas.formats.output_files import atomic_write
from raggedatlas.store.location import Location, file_digest, local_path
from raggedatlas.store.storage_errors import lance_errors, store_errors
from raggedatlas.store.tables import Tables
from raggedatlas.wings.results.data_request import local_folder

if TYPE_CHECKING:
    import lance

DATABASE = "lance_db"
TABLE = "results"
INDEX_FILE = "batch_index.npy"
CONFIG_FILE = "original_dataset_config.toml"

GRACE = timedelta(hours=1)
"""How long results that were replaced stay readable, as `RaggedAtlas.gc` waits for an `add`."""

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


def table_path(result_dir: Path) -> Path:
    """Return the folder of the table ``results``."""
    return result_dir / DATABASE / f"{TABLE}.lance"


def is_committed(result_dir: Path) -> bool:
    """Return whether a folder holds committed results; a killed run leaves a table without versions."""
    return any((table_path(result_dir) / "_versions").glob("*.manifest"))


def open_table(location: Location, version: int | None = None) -> "lance.LanceDataset":
    """Open a version of the table of results; None opens the latest. Raises `NotFoundError` if the table or version does not exist."""
    pinned = None if version is None else {TABLE: version}
    return Tables(location.child(DATABASE), pinned).open(TABLE)


def list_data_files(table: "lance.LanceDataset") -> set[str]:
    """Return the names of the data files that any version of a table references."""
    with lance_errors(table.uri):
        versions = [table.checkout_version(entry["version"]) for entry in table.versions()]
        return {
            Path(file.path).name
            for each in versions
            for fragment in each.get_fragments()
            for file in fragment.data_files()
        }


def remove_old_versions(table: "lance.LanceDataset", grace: timedelta) -> None:
    """Remove table versions that were replaced at least `grace` ago; the caller must be the only writer of the table."""
    with lance_errors(table.uri):
        entries: list[Any] = sorted(table.versions(), key=lambda entry: int(entry["version"]))
        # The age of a version counts from its replacement, whenever it was written itself.
        now = datetime.now(entries[-1]["timestamp"].tzinfo)
        gone = sum(now - after["timestamp"] >= grace for _, after in pairwise(entries))
        if gone:
            # Lance spares recent files that no version names, as another writer's; here the caller is the only one.
            table.cleanup_old_versions(
                retain_versions=len(entries) - gone, delete_unverified=True, error_if_tagged_old_versions=False
            )


@contextlib.contextmanager
def result_errors(table: "lance.LanceDataset") -> Iterator[None]:
    """Translate Lance errors as `lance_errors`; a version that was removed while it was being read becomes `NotFoundError`."""
    try:
        with lance_errors(table.uri):
            yield
    except StoreError as error:
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            if table.version not in {entry["version"] for entry in table.versions()}:
                raise NotFoundError(replaced_message(table.uri, int(table.version), table.latest_version)) from error
        raise


def replaced_message(uri: str, version: int, newest: int) -> str:
    """Return the error message for a version of results that was removed."""
    return (
        f"Version {version} of the results in {uri} was replaced by version {newest} and has been removed; reopen the results. "
        "grace= of ResultDatasetWriter sets how long replaced results are kept."
    )


def remove_empty_folders(folders: list[Path]) -> None:
    """Remove folders that are still empty, innermost first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


class WriteLock:
    """Exclusive lock of one writer on a result folder; the operating system releases it when the process dies.

    `database` is the folder ``lance_db``. Raises `ConflictError` at once if another writer holds the lock.
    """

    def __init__(self, database: Path) -> None:
        import fcntl

        self.path = database / ".writing"
        # False on file systems without locks: files of other writers are then left alone.
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
                f"Results are already being written to {database.parent}, by this or another process; "
                "wait for that writer, or call its commit() or abort()."
            ) from error
        if not self._holds_the_file():
            # The previous writer removed its lock file after we opened it and before we locked it.
            os.close(self._file)
            self._file = None
            raise ConflictError(f"Results are already being written to {database.parent}; try again.")

    def _holds_the_file(self) -> bool:
        try:
            # The lock counts only on the file that the next writer will open by this path.
            return self._file is not None and os.fstat(self._file).st_ino == self.path.stat().st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock; further calls have no effect."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            # While the lock is still held: who has the file open then finds by `_holds_the_file` that it is gone.
            self.path.unlink()
        os.close(self._file)
        self._file = None


CHECKSUMS = "checksums.json"


@dataclass(frozen=True)
class FileRecord:
    """Recorded size and checksum of a file."""

    n_bytes: int
    sha256: str  # hexadecimal


def record_checksums(result_dir: Path, digests: Mapping[str, str] | None = None) -> None:
    """Record size and checksum of the files of a committed table; existing records are kept, since files are immutable.

    The caller must be the only writer. `digests` has the SHA-256 of data files by name, if already computed.
    """
    table = open_table(Location.of(result_dir))
    known = read_checksums(result_dir) or {}
    found: dict[str, FileRecord] = {}
    for path in [*list_table_files(table, result_dir), result_dir / CONFIG_FILE]:
        if not path.is_file():
            continue
        name = path.relative_to(result_dir).as_posix()
        size = path.stat().st_size
        # The configuration is the one file that is replaced under its name.
        if name in known and path.name != CONFIG_FILE:
            found[name] = known[name]
        else:
            found[name] = FileRecord(size, (digests or {}).get(path.name) or file_digest(path))
    text = json.dumps({name: [record.n_bytes, record.sha256] for name, record in sorted(found.items())}, indent=0)
    path = result_dir / DATABASE / CHECKSUMS
    with store_errors(f"write {path}"), atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_checksums(result_dir: Path) -> dict[str, FileRecord] | None:
    """Read the recorded size and SHA-256 by path; return None for results without records (written by old versions)."""
    path = result_dir / DATABASE / CHECKSUMS
    if not path.is_file():
        return None
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): FileRecord(int(size), str(digest)) for name, (size, digest) in recorded.items()}
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CorruptError(f"{path} cannot be parsed: {error}.") from error


def list_table_files(table: "lance.LanceDataset", result_dir: Path) -> list[Path]:
    """List the files that readers of any version of the table may need."""
    folder = table_path(result_dir)
    data = [folder / "data" / name for name in sorted(list_data_files(table))]
    manifests = sorted((folder / "_versions").glob("*.manifest"))
    others = [path for kind in ("_indices", "_deletions") for path in sorted((folder / kind).rglob("*"))]
    return [*data, *manifests, *(path for path in others if path.is_file())]


_UNKNOWN = "# The configuration of the original dataset was not told to the writer of these results.\n"


def config_text(result_dir: Path, config: Mapping[str, Any] | None, dataset: Any, *, replace: bool) -> str | None:  # noqa: ANN401
    """Return the content of ``original_dataset_config.toml``, or None if an existing file is to be kept.

    If `config` is None, `dataset` is used: an object with the attribute ``original_config``, or ``data_location`` with
    such a file, or ``config``, in this order. A chain of runs thus keeps the configuration of the first dataset.
    `replace` is whether an existing file is replaced if the configuration is known. Raises `SourceError` for what TOML
    cannot represent.
    """
    text = None
    if config is None and dataset is not None:
        config = getattr(dataset, "original_config", None)
        if config is None:
            location = getattr(dataset, "data_location", None)
            folder = local_folder(location) if isinstance(location, str | os.PathLike) else None
            if folder is not None and (folder / CONFIG_FILE).is_file():
                text = (folder / CONFIG_FILE).read_text(encoding="utf-8")
            else:
                config = getattr(dataset, "config", None)
        config = config if isinstance(config, Mapping) else None
    if config is not None:
        text = to_toml(config)
    if (result_dir / CONFIG_FILE).exists() and not (replace and text is not None):
        return None
    return _UNKNOWN if text is None else text


def write_config(result_dir: Path, text: str | None) -> None:
    """Write the result of `config_text` atomically."""
    if text is not None:
        with atomic_write(result_dir / CONFIG_FILE) as temporary:
            temporary.write_text(text, encoding="utf-8")


def read_config(result_dir: Path) -> dict[str, Any]:
    """Read the configuration of the original dataset; return an empty mapping if there is none."""
    path = result_dir / CONFIG_FILE
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path} is not valid TOML: {error}.") from error


def to_toml(config: Mapping[str, Any]) -> str:
    """Serialize a configuration as TOML; entries that are None are omitted, since TOML has no null.

    Raises `SourceError` for other values that TOML cannot represent.

    Examples
    --------
    >>> print(to_toml({"a": 1, "b": {"c": 0.5, "d": None}}))
    a = 1
    <BLANKLINE>
    [b]
    c = 0.5
    <BLANKLINE>
    """
    import tomli_w

    return tomli_w.dumps(_plain(config, ()))


def _plain(value: Any, names: tuple[str, ...]) -> Any:  # noqa: ANN401
    """Convert a value to TOML types; NumPy values, paths, sets and other sequences are converted."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each, (*names, str(key))) for key, each in value.items() if each is not None}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool | int | float | str | datetime | date | time):
        return value
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return [_plain(each, names) for each in value if each is not None]
    raise SourceError(
        f"Configuration entry {'.'.join(names)} is a {type(value).__name__}, which TOML cannot represent."
    )


_RUN = re.compile(r"(\d{8})-(\d{6})-(.+)-[\w-]{4}")
_ROOT = "./results"


def find_results(
    config: Mapping[str, Any], results_dir: str | os.PathLike[str] | None = None, verb: str | None = None
) -> Path:
    """Find a result folder; used by verbs and factories only, a dataset is given its location.

    Returns `results_dir` if given; else the folder that ``results.inference_dir`` of the configuration names; else that
    of the newest run of `verb` (None: ``infer``) below ``general.results_dir`` (by default ``./results``).
    """
    named = results_dir if results_dir is not None else config.get("results", {}).get("inference_dir")
    if named:
        folder = local_path(named)
        if not folder.is_dir():
            raise NotFoundError(f"Result folder {folder} does not exist; check the path.")
        return folder
    wanted = verb or "infer"
    root = local_path(config.get("general", {}).get("results_dir") or _ROOT)
    found = find_newest_run(root, wanted)
    if found is None:
        raise NotFoundError(
            f"There is no run of {wanted} in {root}; run it first, or pass results_dir, or set results.inference_dir."
        )
    return found


def find_newest_run(root: Path, verb: str) -> Path | None:
    """Return the folder of the newest run of a verb, or None; runs of the same second are ordered by name."""
    runs = [
        (hit[1], hit[2], path.name, path)
        for path in (root.iterdir() if root.is_dir() else ())
        if (hit := _RUN.fullmatch(path.name)) and hit[3] == verb and path.is_dir()
    ]
    return max(runs)[-1] if runs else None
