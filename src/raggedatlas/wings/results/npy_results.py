"""Results in ``.npy`` files, as written by public releases up to 0.6: reading them, and their conversion to a Lance table.

Three generations exist: ids were integers at first and later had the dtype of the original dataset;
``batch_index_insertion_order.npy`` and ``original_dataset_config.toml`` were added in between. All share what is read here.
"""

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, NotFoundError, QueryError, SourceError
from raggedatlas.model.arguments import Progress, checked, no_progress
from raggedatlas.model.choices import refuse_unused
from raggedatlas.model.reports import Report
from raggedatlas.store.location import Location, as_path, local_path
from raggedatlas.store.runtime import warnings_as
from raggedatlas.wings.results.data_request import HyraxDataset, find_class, merge_config, parse_group
from raggedatlas.wings.results.dataset import ResultDataset
from raggedatlas.wings.results.folder import INDEX_FILE, find_results, is_committed, read_config
from raggedatlas.wings.results.row_readers import ObjectIds, to_matrix
from raggedatlas.wings.results.schema import (
    DATA,
    OBJECT_ID,
    ResultColumn,
    as_ids,
    as_numpy,
    as_rows,
    as_tensor,
    torch_dataset_class,
)
from raggedatlas.wings.results.writer import ResultDatasetWriter

_BATCH = re.compile(r"batch_(\d+)\.npy")
_ID, _TENSOR, _NUMBER = "id", "tensor", "batch_num"
_MAX_LISTED = 5
_BLOCK = 2**16
_OPEN_FILES = 64


def has_npy_results(folder: Path) -> bool:
    """Return whether a folder holds results in ``.npy`` files."""
    return (folder / INDEX_FILE).is_file()


@dataclass(frozen=True)
class RecordFile:
    """A ``.npy`` file of records, with its header read and its size verified."""

    path: Path
    number: int  # of the batch in the file name; -1 for an index
    dtype: "np.dtype[Any]"  # of a record
    n_rows: int
    offset: int  # of the first record in bytes

    def map(self) -> NDArray[Any]:
        """Memory-map the records, ``(n_rows,)``; the file stays open as long as the array is referenced."""
        if not self.n_rows:
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.n_rows,))

    @property
    def tensor(self) -> "np.dtype[Any]":
        """Data type of one result in native byte order, with its shape."""
        field = self.dtype[_TENSOR]
        return np.dtype((field.base.newbyteorder("="), field.shape))


class NpyResults:
    """The ``.npy`` results of one folder, validated against their index when opened.

    With `strict`, batch files that are missing in the index are refused. Raises `CorruptError`, which names the file,
    if one is truncated, missing or unexpected, or contradicts the index.
    """

    def __init__(self, folder: Path, *, strict: bool = True) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise NotFoundError(f"Result folder {folder} does not exist; check the path.")
        if not has_npy_results(folder):
            raise NotFoundError(
                f"{folder} has no {INDEX_FILE}: it holds no .npy results, or their run did not finish. Run it again."
            )
        self.index = read_npy_header(folder / INDEX_FILE, -1, (_ID, _NUMBER)).map()
        self.n_rows = len(self.index)
        found = {int(hit[1]): path for path in self.folder.iterdir() if (hit := _BATCH.fullmatch(path.name))}
        expected: Counter[int] = Counter()
        for block in self._blocks():
            numbers, counts = np.unique(block[_NUMBER], return_counts=True)
            expected.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        if missing:
            raise CorruptError(
                f"{self.folder} lacks the file of batch {_abbreviate(missing)}, which is listed in {INDEX_FILE}; the results are incomplete."
            )
        if extra and strict:
            raise CorruptError(
                f"{self.folder} has files of batch {_abbreviate(extra)}, which are not listed in {INDEX_FILE}; they belong to another run."
            )
        batches = [read_npy_header(found[number], number, (_ID, _TENSOR)) for number in sorted(expected)]
        for batch in batches:
            if batch.n_rows != expected[batch.number]:
                raise CorruptError(
                    f"{batch.path} has {batch.n_rows:,} rows; {INDEX_FILE} says {expected[batch.number]:,}."
                )
        self.batches = batches
        self.starts = np.cumsum([0, *(batch.n_rows for batch in self.batches)], dtype=np.int64)
        # A mapped file stays open as long as its array lives.
        self.open_batch = lru_cache(_OPEN_FILES)(lambda position: self.batches[position].map())

    def _blocks(self) -> Iterator[NDArray[Any]]:
        """Iterate over the index in blocks."""
        for start in range(0, self.n_rows, _BLOCK):
            yield self.index[start : start + _BLOCK]

    def check_ids(self) -> None:
        """Compare the ids of every batch with the index, one batch at a time.

        Raises `CorruptError` if the index is not sorted, or an id of a batch is not listed for it, and `SourceError` if
        an id occurs more than once in the index.
        """
        self._check_order()
        for batch in self.batches:
            names = batch.map()[_ID]
            if _comparable(names.dtype) != _comparable(self.index[_ID].dtype):
                raise CorruptError(
                    f"{batch.path} has ids of {names.dtype}, and {INDEX_FILE} has ids of {self.index[_ID].dtype}; the two belong to "
                    "different runs."
                )
            # An id after the last one gets the last place, where the comparison finds another id.
            low, high = np.zeros(len(names), np.int64), np.full(len(names), len(self.index), np.int64)
            while np.any(low < high):
                middle = (low + high) // 2
                open_ = low < high
                # Where the search has ended, `middle` may be one beyond the end; `open_` discards the comparison.
                less = open_ & (self.index[np.minimum(middle, len(self.index) - 1)][_ID] < names)
                low, high = np.where(less, middle + 1, low), np.where(open_ & ~less, middle, high)
            places = np.minimum(low, self.n_rows - 1)
            expected = self.index[places]
            wrong = np.flatnonzero((expected[_ID] != names) | (expected[_NUMBER] != batch.number))
            if len(wrong):
                name = as_ids(names[wrong[:1]], batch.number)[0]
                raise CorruptError(
                    f"{batch.path}, row {wrong[0]}: {INDEX_FILE} does not list the id {name!r} for batch {batch.number}; the two "
                    "belong to different runs."
                )
            # The counts were compared at opening, so different places are all that the index lists for the batch.
            if len(np.unique(places)) != len(places):
                again = np.setdiff1d(np.arange(len(places)), np.unique(places, return_index=True)[1])[0]
                name = as_ids(names[again : again + 1], batch.number)[0]
                raise CorruptError(
                    f"{batch.path}, row {again}: the file has the id {name!r} twice, and {INDEX_FILE} once; the two belong to different runs."
                )

    def _check_order(self) -> None:
        """Raise if the index is not sorted by id, or has duplicate ids."""
        last = self.index[_ID][:0]
        for block in self._blocks():
            # The last id of the previous block is compared with the first of this one.
            names = np.concatenate([last, block[_ID]])
            same = np.flatnonzero(names[1:] == names[:-1])
            if len(same):
                name = names[same[0]]
                places = [
                    (each.number, row) for each in self.batches for row in np.flatnonzero(each.map()[_ID] == name)
                ]
                listed = "; ".join(f"batch {number}, row {row}" for number, row in places)
                raise SourceError(
                    f"{self.folder} has the id {as_ids(names[same[:1]], 0)[0]!r} more than once ({listed}); a table "
                    "holds each object once. Old writers truncated ids to the longest known length."
                )
            if np.any(names[1:] < names[:-1]):
                raise CorruptError(f"{self.folder / INDEX_FILE} is not sorted by id; it is damaged.")
            last = names[-1:]

    def tensor(self, *, promote: bool = False) -> "np.dtype[Any]":
        """Return the data type of one result, with its shape; with `promote` the common one if batches differ in dtype.

        Raises `SourceError`, which names the batch, if batches differ in shape, or without `promote` in dtype, or if
        there are none.
        """
        if not self.batches:
            raise SourceError(f"{self.folder} holds no batches, so shape and dtype of its results are unknown.")
        first = self.batches[0].tensor
        for batch in self.batches:
            if batch.tensor.shape != first.shape:
                raise SourceError(
                    f"{batch.path} holds results of shape {batch.tensor.shape}, but batch {self.batches[0].number} has shape "
                    f"{first.shape}; a table holds a single shape."
                )
            if batch.tensor != first and not promote:
                raise SourceError(
                    f"{batch.path} holds {batch.tensor.base}, but batch {self.batches[0].number} holds {first.base}; a table holds a single "
                    "dtype. promote=True stores all batches in their common dtype."
                )
        return np.dtype((np.result_type(*{batch.tensor.base for batch in self.batches}), first.shape))

    def read(self, rows: NDArray[np.int64]) -> tuple[list[str], NDArray[Any]]:
        """Read ids and values, (k, ...) in the common dtype of all batches, of rows, (k,) counted over all batches in batch order."""
        tensor = self.tensor(promote=True)
        names, values = np.empty(len(rows), object), np.empty((len(rows), *tensor.shape), tensor.base)
        # Side `right` passes over batches without rows, which start where the next one does.
        positions = np.searchsorted(self.starts, rows, side="right") - 1
        for position in np.unique(positions):
            chosen = np.flatnonzero(positions == position)
            records = self.open_batch(int(position))[rows[chosen] - self.starts[position]]
            names[chosen] = as_ids(records[_ID], self.batches[position].number)
            values[chosen] = records[_TENSOR]
        return names.tolist(), values

    @cached_property
    def by_id(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """All ids, sorted, and for each the row number, counted over all batches."""
        # From the batches: the index gives the batch of an id, but not its row there.
        names = np.concatenate([batch.map()[_ID] for batch in self.batches]) if self.batches else self.index[_ID]
        rows = np.argsort(names, kind="stable")
        return names[rows], rows


def read_npy_header(path: Path, number: int, fields: tuple[str, str]) -> RecordFile:
    """Read and validate the header of a file.

    Raises `CorruptError` if the file is truncated or too long, contains Python objects, or is not an array of records
    with these fields.
    """
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            # Version 3 differs from 2 only in the encoding of field names, which are ASCII here.
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            offset = file.tell()
    except (OSError, ValueError, EOFError) as error:
        raise CorruptError(f"{path} is not a readable .npy file: {error}.") from error
    if len(shape) != 1 or dtype.names != fields:
        raise CorruptError(f"{path} holds {dtype} of shape {shape}; expected records with the fields {fields}.")
    if dtype[_ID].kind == "V":
        raise CorruptError(
            f"{path} has ids of {dtype[_ID]}; expected one number or text per row. Copy the file again from its origin."
        )
    if dtype.hasobject:
        raise CorruptError(f"{path} contains Python objects ({dtype}), which are never unpickled.")
    size, expected = path.stat().st_size, offset + shape[0] * dtype.itemsize
    if size != expected:
        wrong = f"row {max(0, size - offset) // dtype.itemsize} is incomplete" if size < expected else "it is too long"
        raise CorruptError(
            f"{path} (batch {number}) has {size:,} bytes; its header declares {expected:,}. It is truncated or damaged: {wrong}. Run the "
            "model again, or copy the file again from its origin."
        )
    return RecordFile(path, number, dtype, shape[0], offset)


def _comparable(dtype: "np.dtype[Any]") -> str:
    """Return the kind of ids; those of one kind can be compared."""
    return "number" if dtype.kind in "biufc" else dtype.kind


def _abbreviate(numbers: list[int]) -> str:
    more = f" and {len(numbers) - _MAX_LISTED} more" if len(numbers) > _MAX_LISTED else ""
    return ", ".join(map(str, numbers[:_MAX_LISTED])) + more


@checked
class InferenceDataSet(HyraxDataset, torch_dataset_class()):  # type: ignore[misc]
    """The results of one run in ``.npy`` files, sorted by id; deprecated.

    Convert the folder with `convert_results`, and read it with `ResultDataset`.

    Parameters
    ----------
    config : mapping
        Configuration.
    results_dir : str, path or None
        Result folder; None uses the one named by the configuration, or the newest run of `verb`.
    verb : str or None
        Kind of run to look for; None means ``infer``.
    data_location : str, path or None
        Alias of `results_dir`, used by data requests.

    Raises
    ------
    NotFoundError
        If the folder or its index does not exist.
    CorruptError
        If a file is truncated or missing, or contradicts the index.

    Notes
    -----
    As in the public releases, ``dataset[i]`` is float64 whatever the stored dtype, negative numbers count from the end, and rows
    are sorted by id rather than in write order. `get_data` returns the stored dtype. Unlike before, a list of one row keeps its
    first axis, a row may be requested twice, and slices work.

    References
    ----------
    Hyrax, Storage Layer Design Document, Step 6.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        results_dir: str | os.PathLike[str] | None = None,
        verb: str | None = None,
        *,
        data_location: str | os.PathLike[str] | None = None,
    ) -> None:
        warnings.warn(
            "InferenceDataSet reads results in .npy files, which are no longer written: convert the folder once with "
            "`raggedatlas convert-results --results-dir DIR`, and read it with ResultDataset.",
            DeprecationWarning,
            # `checked` puts a frame between this method and its caller.
            stacklevel=3,
        )
        super().__init__(config)
        self.results_dir = find_results(config, results_dir if data_location is None else data_location, verb)
        self._files = NpyResults(self.results_dir, strict=False)

    @property
    def data_location(self) -> Path:
        """The result folder."""
        return self.results_dir

    @property
    def original_config(self) -> dict[str, Any]:
        """Configuration of the data that the model was run on; empty if unknown."""
        return read_config(self.results_dir)

    @cached_property
    def original_dataset(self) -> Any:  # noqa: ANN401
        """The dataset that the model was run on, created from its configuration.

        Raises
        ------
        NotFoundError
            If the configuration names no known dataset class.
        QueryError
            If its data request is invalid.
        """
        config = self.original_config
        name = config.get("data_set", {}).get("name")
        if name:
            return find_class(str(name))(config=config, data_location=config.get("general", {}).get("data_dir"))
        groups = config.get("data_request")
        if not isinstance(groups, Mapping) or not groups:
            raise NotFoundError(
                f"The configuration in {self.results_dir} names no dataset class under data_set.name or data_request."
            )
        group = next((groups[each] for each in ("infer", "test") if each in groups), next(iter(groups.values())))
        asked = next(each for each in parse_group(group) if each.primary_id_field is not None)
        own = merge_config(config, asked.dataset_config)
        return find_class(asked.dataset_class)(config=own, data_location=asked.data_location)

    def metadata_fields(self) -> list[str]:
        """Return the names of the metadata fields of the original dataset."""
        return list(self.original_dataset.metadata_fields())

    def metadata(self, idxs: Sequence[int], fields: Sequence[str]) -> Any:  # noqa: ANN401
        """Return metadata of rows of this dataset, joined by id with the original dataset.

        Raises
        ------
        NotFoundError
            If an id is missing in the original dataset.
        """
        places = {str(each): row for row, each in enumerate(self.original_dataset.ids())}
        asked = self.get_object_id(np.asarray(idxs))
        lost = [each for each in asked if each not in places]
        if lost:
            raise NotFoundError(f"The original dataset has no object {lost[0]!r}, which is in {self.results_dir}.")
        return self.original_dataset.metadata([places[each] for each in asked], list(fields))

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._files.n_rows

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401  (a tensor)
        """Return a copy of one row, or a stack of several rows, as float64."""
        return as_tensor(self.get_data(index).astype(np.float64))

    def get_data(self, idx: Any) -> NDArray[Any]:  # noqa: ANN401
        """Return a copy of one row, or of several rows, in the stored dtype."""
        rows, single = self._rows(idx)
        _, found = self._files.read(self._files.by_id[1][rows])
        return found[0] if single else found

    def get_object_id(self, idx: Any) -> Any:  # noqa: ANN401  (one text, or an array of texts)
        """Return the id of a row, or an object array of the ids of several rows."""
        rows, single = self._rows(idx)
        names = as_ids(self._files.by_id[0][rows], 0)
        return names[0] if single else np.array(names, object)

    def ids(self) -> ObjectIds:
        """Return all ids as strings, in row order."""
        return ObjectIds(pa.array(as_ids(self._files.by_id[0], 0), pa.string()))

    def read_batch(self, rows: NDArray[np.int64], fields: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Read several fields of several rows at once."""
        return {field: self.get_object_id(rows) if field == OBJECT_ID else self.get_data(rows) for field in fields}

    def iter_batches(self, batch_size: int = 8192) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Iterate over all rows in bounded memory: ids, and values in the stored dtype."""
        for start in range(0, len(self), batch_size):
            rows = np.arange(start, min(start + batch_size, len(self)))
            yield self.get_object_id(rows), self.get_data(rows)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the location of the files."""
        return {"config": self.config, "results_dir": self.results_dir}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Reopen the files in another process."""
        with warnings_as("ignore", DeprecationWarning):
            self.__init__(**state)  # type: ignore[misc]

    def _rows(self, index: Any) -> tuple[NDArray[np.int64], bool]:  # noqa: ANN401
        """Convert an index to row numbers; negative numbers count from the end, within bounds."""
        try:
            given = np.asarray(as_numpy(index))
        except ValueError:
            given = np.empty(0)
        # Everything else (slices, masks, empty lists, unsigned numbers) is left to `as_rows`.
        if given.dtype.kind == "i" and given.size:
            return as_rows(np.where(given < 0, given + len(self), given), len(self))
        return as_rows(index, len(self))


InferenceDataset = InferenceDataSet
"""Alias used by later public releases."""

HyraxDataset.registry["InferenceDataset"] = InferenceDataSet


@checked
def load_results_dataset(
    config: Mapping[str, Any], results_dir: str | os.PathLike[str] | None = None, verb: str | None = None
) -> ResultDataset | InferenceDataSet:
    """Open results, stored either as a Lance table or as ``.npy`` files.

    Parameters
    ----------
    config : mapping
        Configuration.
    results_dir : str, path or None
        Result folder; None uses the one named by the configuration, or the newest run of `verb` (see `find_results`).
    verb : str or None
        Kind of run to look for; None means ``infer``.

    Returns
    -------
    ResultDataset or InferenceDataSet
        The Lance table if one was committed, else the ``.npy`` files, even next to an uncommitted table.

    Raises
    ------
    NotFoundError
        If there are neither, or only remains of an unfinished run.

    References
    ----------
    Hyrax, Lance Storage Layer Design Document, Step 3.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> folder = tempfile.mkdtemp()
    >>> from raggedatlas import create_results_writer
    >>> with create_results_writer(folder) as writer:
    ...     writer.write_batch(["a"], np.zeros((1, 3)))
    >>> load_results_dataset({}, folder).get_data(0)
    array([0., 0., 0.])
    """
    given = results_dir is not None and verb is not None
    refuse_unused("load_results_dataset", "with results_dir=...", verb=given)
    named = results_dir if results_dir is not None else config.get("results", {}).get("inference_dir")
    if named and isinstance(as_path(named), Location):
        return ResultDataset(config, named)
    folder = find_results(config, results_dir, verb)
    if has_npy_results(folder) and not is_committed(folder):
        return InferenceDataSet(config, folder)
    return ResultDataset(config, folder)


_CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True)
class ResultConversion(Report):
    """Report of `convert_results`."""

    results_dir: Path
    n_rows: int
    n_batches: int  # number of ``.npy`` files
    shape: tuple[int, ...]  # of one result
    dtype: "np.dtype[Any]"  # as stored
    n_verified: int  # number of rows that were read back and compared bit by bit

    def __repr__(self) -> str:
        """Return a one-sentence summary."""
        checked = "all" if self.n_verified == self.n_rows else f"{self.n_verified:,}"
        return (
            f"Converted {self.n_rows:,} results of shape {self.shape} and dtype {self.dtype} from {self.n_batches:,} .npy files in "
            f"{self.results_dir}, and compared {checked} of them bit by bit. The .npy files are unchanged and can be removed."
        )


@checked
def convert_results(
    results_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    promote: bool = False,
    spot_check: int | None = None,
    progress: Progress = no_progress,
) -> ResultConversion:
    """Convert the ``.npy`` results of a folder to a Lance table in the same folder.

    The ``.npy`` files are never changed. Rows are in batch order, which is the order in which they were computed.
    Until everything is written and verified, readers see the ``.npy`` files, or the previous table.

    Parameters
    ----------
    results_dir : str or path
        Result folder.
    overwrite : bool
        Whether an existing table may be replaced.
    promote : bool
        Whether batches of different dtypes may be stored in their common dtype.
    spot_check : int or None
        Number of rows to verify, chosen at random with a fixed seed; None verifies all.
    progress : callable
        Called with the step, the number of rows done, and the total number of rows.

    Returns
    -------
    ResultConversion
        Report of the conversion.

    Raises
    ------
    NotFoundError
        If the folder or its index does not exist.
    CorruptError
        If a file is truncated, missing, unexpected or contradicts the index, or if the data read back differ.
    SourceError
        If batches differ in shape or dtype, ids are duplicated, or a dtype is not supported (also a ``ValueError``).
    DuplicateError
        If the folder already has a table and `overwrite` is False (also a ``FileExistsError``).

    References
    ----------
    Hyrax, Lance Storage Layer Design Document, Step 5.

    Examples
    --------
    >>> print(convert_results("results/20250201-120000-infer-AbCd"))  # doctest: +SKIP
    """
    files = NpyResults(local_path(results_dir))
    tensor = files.tensor(promote=promote)
    ResultColumn(DATA, tensor.shape, tensor.base)  # Raises if a table cannot hold it.
    files.check_ids()
    rows = np.arange(files.n_rows)
    if spot_check is not None:
        if spot_check < 1:
            raise QueryError(f"spot_check={spot_check}; expected at least 1, or None to verify all rows.")
        # Sorted, because `read_back` needs ascending rows.
        rows = np.sort(np.random.default_rng(0).choice(files.n_rows, min(spot_check, files.n_rows), replace=False))
    step = max(1, _CHUNK_BYTES // max(1, tensor.itemsize))
    with ResultDatasetWriter(files.folder, overwrite=overwrite) as writer:
        for start, end in pairwise(files.starts.tolist()):
            for first in range(start, end, step):
                writer.write_batch(*files.read(np.arange(first, min(first + step, end))))
                progress("write", len(writer), files.n_rows)
        # Within the block, whose end commits: after a difference nothing is committed.
        for done in _compare(files, writer, rows, step):
            progress("compare", done, len(rows))
    dataset = ResultDataset({}, files.folder, mapped=False)
    if len(dataset) != files.n_rows:
        raise CorruptError(f"{files.folder}: the table has {len(dataset):,} rows, but the index has {files.n_rows:,}.")
    return ResultConversion(files.folder, files.n_rows, len(files.batches), tensor.shape, tensor.base, len(rows))


def _compare(files: NpyResults, writer: ResultDatasetWriter, rows: NDArray[np.int64], step: int) -> Iterator[int]:
    """Read the finished files back, compare them with the ``.npy`` files, and iterate over the number of rows compared so far."""
    column = writer.columns[0]
    done = 0
    for batch in writer.read_back(rows=None if len(rows) == files.n_rows else rows):
        for first in range(0, batch.num_rows, step):
            piece = batch.slice(first, step)
            own = rows[done : done + piece.num_rows]
            names, values = files.read(own)
            stored = to_matrix(piece.column(DATA), column)
            # Bytes, because NaN is not equal to itself and -0.0 equals 0.0.
            if piece.column(OBJECT_ID).to_pylist() != names or values.tobytes() != stored.tobytes():
                raise CorruptError(
                    f"{files.folder}: the data read back differ from the .npy files within {piece.num_rows:,} rows starting at "
                    f"{names[0]!r}; nothing was committed. Check the disk, and run the conversion again."
                )
            done += piece.num_rows
            yield done
    if done != len(rows):
        raise CorruptError(
            f"{files.folder}: {done:,} of {len(rows):,} rows could be read back; nothing was committed. Check the disk."
        )
