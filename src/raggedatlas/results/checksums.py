"""Recorded size and SHA-256 of every file of a result's table."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raggedatlas.errors import CorruptError
from raggedatlas.results.folder import (
    CONFIG_FILE,
    DATABASE,
    open_table,
    removed_on_error,
    results_location,
    stored_files,
    table_path,
)
from raggedatlas.store.location import file_digest, store_errors

if TYPE_CHECKING:
    import lance

CHECKSUMS = "checksums.json"


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was written.

    Parameters
    ----------
    n_bytes : int
        Its size.
    sha256 : str
        Of its bytes, in hex.
    """

    n_bytes: int
    sha256: str


def record_checksums(result_dir: Path, digests: Mapping[str, str] | None = None) -> None:
    """Record the files of a committed table; files never change, so known records are kept.

    Parameters
    ----------
    result_dir : pathlib.Path
        Result folder; nobody else may write to it.
    digests : mapping of str to str, or None
        Name of a data file -> its SHA-256, where that is known.

    Raises
    ------
    StoreError
        If the disk refuses.
    """
    table = open_table(results_location(result_dir))
    known = read_checksums(result_dir) or {}
    found: dict[str, FileRecord] = {}
    for path in [*table_files(table, result_dir), result_dir / CONFIG_FILE]:
        if not path.is_file():
            continue
        name = path.relative_to(result_dir).as_posix()
        size = path.stat().st_size
        if name in known and path.name != CONFIG_FILE:
            found[name] = known[name]
        else:
            found[name] = FileRecord(size, (digests or {}).get(path.name) or file_digest(path))
    text = json.dumps({name: [record.n_bytes, record.sha256] for name, record in sorted(found.items())}, indent=0)
    path = result_dir / DATABASE / CHECKSUMS
    with store_errors(f"write {path}"), removed_on_error(path) as beside:
        beside.write_text(text, encoding="utf-8")


def read_checksums(result_dir: Path) -> dict[str, FileRecord] | None:
    """Read what was recorded: path within the folder -> size and SHA-256; None for results written before there were records.

    Raises
    ------
    CorruptError
        If the records do not read.
    """
    path = result_dir / DATABASE / CHECKSUMS
    if not path.is_file():
        return None
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): FileRecord(int(size), str(digest)) for name, (size, digest) in recorded.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptError(f"{path} does not read: {error}.") from error


def table_files(table: "lance.LanceDataset", result_dir: Path) -> list[Path]:
    """List the files that a reader of any version of the table may need."""
    folder = table_path(result_dir)
    data = [folder / "data" / name for name in sorted(stored_files(table))]
    manifests = sorted((folder / "_versions").glob("*.manifest"))
    others = [path for kind in ("_indices", "_deletions") for path in sorted((folder / kind).rglob("*"))]
    return [*data, *manifests, *(path for path in others if path.is_file())]
