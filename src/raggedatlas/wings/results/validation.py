"""Validation of a result folder: files against their recorded size and SHA-256, ids, and configuration."""

import os
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.errors import AtlasError, CorruptError, NotFoundError, QueryError, SourceError
from raggedatlas.model.validation import Problem, Problems
from raggedatlas.store.copies import local_copy
from raggedatlas.store.location import Location, file_digest
from raggedatlas.store.storage_errors import lance_errors
from raggedatlas.wings.results.dataset import require_results
from raggedatlas.wings.results.folder import (
    CHECKSUMS,
    CONFIG_FILE,
    DATABASE,
    INDEX_FILE,
    FileRecord,
    is_committed,
    list_table_files,
    open_table,
    read_checksums,
    read_config,
)
from raggedatlas.wings.results.npy_results import NpyResults, has_npy_results
from raggedatlas.wings.results.schema import OBJECT_ID, read_columns

Level = Literal["quick", "deep"]

_NPY_ROWS = 8192
_AGAIN = "Restore the folder from a copy, or run the model again."


def validate_results(result_dir: str | os.PathLike[str], level: Level = "deep") -> Problems:
    """Validate a folder of results: a Lance table, or ``.npy`` results.

    Level ``quick`` compares file sizes, ``deep`` every byte and value. Rules are ``R01``: the table cannot be read;
    ``R02``: a file is missing or has another size; ``R03``: the content of a file differs; ``R04``: no checksum is
    recorded; ``R05``: ids are missing or duplicated, or differ from the index of ``.npy`` results; ``R06``: the
    configuration of the original dataset cannot be parsed. Raises `NotFoundError` if the folder holds no results.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from raggedatlas import ResultDatasetWriter
    >>> folder = tempfile.mkdtemp()
    >>> with ResultDatasetWriter(folder) as writer:
    ...     writer.write_batch(["a"], np.zeros((1, 3)))
    >>> validate_results(folder)
    Nothing is wrong.
    """
    if level not in get_args(Level):
        raise QueryError(f"level={level!r}; expected 'quick' or 'deep'.")
    with local_copy(result_dir) as folder:
        if has_npy_results(folder) and not is_committed(folder):
            return Problems(_check_npy(folder, level))
        require_results(folder)
        try:
            table = open_table(Location.of(folder))
            read_columns(table.schema, str(folder))
            files = list_table_files(table, folder)
            problems = _compare_files(folder, files, level)
            # Damaged files are not read any further.
            if level == "deep" and not (problems and problems[0].level == "must"):
                with lance_errors(table.uri):
                    ids = table.to_table(columns=[OBJECT_ID]).column(0).cast(pa.large_string())
                # `count_distinct` does not count nulls, so they are subtracted as well.
                n_duplicates = len(ids) - ids.null_count - pc.count_distinct(ids).as_py()
                if ids.null_count or n_duplicates:
                    message = f"{ids.null_count:,} ids are missing, and {n_duplicates:,} are duplicates."
                    fix = "Write the results again, with one row per object."
                    problems.append(Problem("R05", "must", OBJECT_ID, message, fix))
        except NotFoundError:
            raise
        except AtlasError as error:
            # Of a table that cannot be opened, all recorded files are compared.
            try:
                records = read_checksums(folder) or {}
            except CorruptError:
                records = {}
            problems = [each for name in records for each in _compare_file(folder / name, name, records[name], level)]
            return Problems([*problems, Problem("R01", "must", str(folder), str(error), _AGAIN)])
        return Problems([*problems, *_check_config(folder)])


def _compare_files(folder: Path, files: list[Path], level: Level) -> list[Problem]:
    """Compare the files that readers need with their recorded checksums."""
    records = read_checksums(folder)
    if records is None:
        message = "no checksums are recorded; the results were written by an older version or by a run that was killed."
        fix = "Write the results again to record checksums."
        return [Problem("R04", "practice", f"{DATABASE}/{CHECKSUMS}", message, fix)]
    problems = []
    for path in [*files, *([folder / CONFIG_FILE] if (folder / CONFIG_FILE).exists() else [])]:
        name = path.relative_to(folder).as_posix()
        if name in records:
            problems += _compare_file(path, name, records[name], level)
        else:
            message = "no checksum is recorded for this file."
            problems.append(Problem("R04", "practice", name, message, "Write the results again to record checksums."))
    # The caller looks only at the first problem to decide whether files are damaged.
    return sorted(problems, key=lambda problem: problem.level != "must")


def _compare_file(path: Path, name: str, record: FileRecord, level: Level) -> list[Problem]:
    size = path.stat().st_size if path.is_file() else None
    if size != record.n_bytes:
        what = "is missing" if size is None else f"has {size:,} bytes"
        return [Problem("R02", "must", name, f"the file {what}; {record.n_bytes:,} were written.", _AGAIN)]
    if level == "deep" and file_digest(path) != record.sha256:
        return [Problem("R03", "must", name, "the content of the file differs from what was written.", _AGAIN)]
    return []


def _check_config(folder: Path) -> list[Problem]:
    try:
        read_config(folder)
    except CorruptError as error:
        return [Problem("R06", "must", CONFIG_FILE, str(error), _AGAIN)]
    return []


def _check_npy(folder: Path, level: Level) -> list[Problem]:
    try:
        files = NpyResults(folder, strict=False)
        for start in range(0, files.n_rows if level == "deep" else 0, _NPY_ROWS):
            files.read(np.arange(start, min(start + _NPY_ROWS, files.n_rows)))
    except (CorruptError, SourceError) as error:
        return [Problem("R01", "must", str(folder), str(error), _AGAIN)]
    try:
        if level == "deep":
            files.check_ids()
    except (CorruptError, SourceError) as error:
        return [Problem("R05", "must", INDEX_FILE, str(error), _AGAIN), *_check_config(folder)]
    return _check_config(folder)


def require_intact(result_dir: Path) -> None:
    """Raise `CorruptError`, which names the first file, if any file of the results differs from its recorded checksum."""
    wrong = [problem for problem in validate_results(result_dir) if problem.rule in {"R01", "R02", "R03"}]
    if wrong:
        raise CorruptError(f"{result_dir}: {wrong[0]}")
