"""`InferenceDataSet`: results in ``.npy`` files, as they were before Lance; superseded by `ResultDataset` (seed 003, step 6)."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError
from raggedatlas.model.arguments import checked
from raggedatlas.results.config import read_config
from raggedatlas.results.discovery import find_results
from raggedatlas.results.identifiers import Ids
from raggedatlas.results.indexing import as_rows
from raggedatlas.results.npy import NpyResults
from raggedatlas.results.registry import HyraxDataset, find_class
from raggedatlas.results.requests import merged, read_group
from raggedatlas.results.schema import OBJECT_ID
from raggedatlas.results.tensors import as_ids, as_numpy
from raggedatlas.results.torch import as_tensor, dataset_class
from raggedatlas.store.runtime import warnings_as

_OPEN_FILES = 64


@checked
class InferenceDataSet(HyraxDataset, dataset_class()):  # type: ignore[misc]
    """The results of one run in ``.npy`` files, in the order of their ids; deprecated.

    Convert the folder with `convert_results`, and read it with `ResultDataset`.

    Parameters
    ----------
    config : mapping
        Configuration.
    results_dir : str, path or None
        Result folder; None takes the one that the configuration names, or the newest of `verb`.
    verb : str or None
        Which kind of run to look for; None looks for ``infer``.
    data_location : str, path or None
        The same as `results_dir`, as a data request calls it.

    Raises
    ------
    NotFoundError
        If there is no such folder, or no index in it.
    CorruptError
        If a file is truncated or missing, or does not agree with the index.

    Notes
    -----
    As ever, ``dataset[i]`` is of float64 whatever was stored, negative numbers count from the end, and rows stand in the
    order of the ids and not as they were written. `get_data` gives the stored dtype. Other than before, a list of one
    row keeps its first axis, a row may be asked for twice, and slices work.
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
            "`raggedatlas convert_results --results-dir DIR`, and read it with ResultDataset.",
            DeprecationWarning,
            stacklevel=3,
        )
        super().__init__(config)
        self.results_dir = find_results(config, results_dir if data_location is None else data_location, verb)
        self._files = NpyResults(self.results_dir, whole=False)
        self._mapped = lru_cache(_OPEN_FILES)(lambda position: self._files.batches[position].map()["tensor"])

    @property
    def data_location(self) -> Path:
        """The result folder."""
        return self.results_dir

    @property
    def original_config(self) -> dict[str, Any]:
        """Configuration of the data that the model saw; empty where nobody wrote it."""
        return read_config(self.results_dir)

    @cached_property
    def original_dataset(self) -> Any:  # noqa: ANN401
        """The data that the model saw, made again from their configuration.

        Raises
        ------
        NotFoundError
            If the configuration names no dataset class that is known here.
        QueryError
            If its data request does not read.
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
        asked = next(each for each in read_group(group) if each.primary_id_field is not None)
        own = merged(config, asked.dataset_config)
        return find_class(asked.dataset_class)(config=own, data_location=asked.data_location)

    def metadata_fields(self) -> list[str]:
        """Name the metadata that the original dataset has."""
        return list(self.original_dataset.metadata_fields())

    def metadata(self, idxs: Sequence[int], fields: Sequence[str]) -> Any:  # noqa: ANN401
        """Ask the original dataset for metadata of rows of this one, joined by id.

        Raises
        ------
        NotFoundError
            If the original dataset has lost the id of one of them.
        """
        places = {str(each): row for row, each in enumerate(self.original_dataset.ids())}
        asked = self.get_object_id(np.asarray(idxs))
        lost = [each for each in asked if each not in places]
        if lost:
            raise NotFoundError(f"The original dataset has no object {lost[0]!r}, which is in {self.results_dir}.")
        return self.original_dataset.metadata([places[each] for each in asked], list(fields))

    def __len__(self) -> int:
        """Count the rows."""
        return self._files.n_rows

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401  (a tensor)
        """Copy the tensor of a row, or a stack of several, as float64.

        Raises
        ------
        RowIndexError, RowTypeError
            For rows that are not there, or an index of another kind.
        """
        return as_tensor(self.get_data(index).astype(np.float64))

    def get_data(self, idx: Any) -> NDArray[Any]:  # noqa: ANN401
        """Copy the result of a row, or of several, in the dtype that was stored."""
        rows, single = self._rows(idx)
        found = self._read(self._files.by_id[1][rows])
        return found[0] if single else found

    def get_object_id(self, idx: Any) -> Any:  # noqa: ANN401  (one text, or an array of texts)
        """Give the id of a row, or an object array of those of several."""
        rows, single = self._rows(idx)
        names = as_ids(self._files.by_id[0][rows], 0)
        return names[0] if single else np.array(names, object)

    def ids(self) -> Ids:
        """Give all ids as text, in row order."""
        import pyarrow as pa

        return Ids(pa.array(as_ids(self._files.by_id[0], 0), pa.string()))

    def read_batch(self, rows: NDArray[np.int64], fields: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Read several fields of several rows at once."""
        return {field: self.get_object_id(rows) if field == OBJECT_ID else self.get_data(rows) for field in fields}

    def iter_batches(self, batch_size: int = 8192) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Walk over all rows in bounded memory: ids, and values in the stored dtype."""
        for start in range(0, len(self), batch_size):
            rows = np.arange(start, min(start + batch_size, len(self)))
            yield self.get_object_id(rows), self.get_data(rows)

    def __getstate__(self) -> dict[str, Any]:
        """Take along where the files are."""
        return {"config": self.config, "results_dir": self.results_dir}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open them again, in another process."""
        with warnings_as("ignore", DeprecationWarning):
            self.__init__(**state)  # type: ignore[misc]

    def _rows(self, index: Any) -> tuple[NDArray[np.int64], bool]:  # noqa: ANN401
        """Understand an index; negative numbers count from the end, but not further than there is."""
        try:
            given = np.asarray(as_numpy(index))
        except ValueError:
            given = np.empty(0)
        if given.dtype.kind == "i" and given.size:
            return as_rows(np.where(given < 0, given + len(self), given), len(self))
        return as_rows(index, len(self))

    def _read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Copy rows, counted in the order of the batches."""
        tensor = self._files.tensor(promote=True)
        out = np.empty((len(rows), *tensor.shape), tensor.base)
        positions = np.searchsorted(self._files.starts, rows, side="right") - 1
        for position in np.unique(positions):
            chosen = np.flatnonzero(positions == position)
            out[chosen] = self._mapped(int(position))[rows[chosen] - self._files.starts[position]]
        return out


InferenceDataset = InferenceDataSet
"""The name that later public releases have for it."""

HyraxDataset.registry["InferenceDataset"] = InferenceDataSet
