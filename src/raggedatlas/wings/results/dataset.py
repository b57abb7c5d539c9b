"""Reading results: `ResultDataset`, random row access through memory-mapped files."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, NotFoundError, QueryError
from raggedatlas.model.arguments import brief, checked
from raggedatlas.store.location import Location
from raggedatlas.wings.results.data_request import HyraxDataset
from raggedatlas.wings.results.folder import (
    DATABASE,
    is_committed,
    open_table,
    replaced_message,
    result_errors,
    table_path,
)
from raggedatlas.wings.results.row_readers import (
    LanceRowReader,
    ObjectIds,
    PageRowReader,
    lookup_rows,
    map_column,
)
from raggedatlas.wings.results.schema import (
    DATA,
    OBJECT_ID,
    ResultColumn,
    as_rows,
    as_tensor,
    read_columns,
    read_facts,
    torch_dataset_class,
    unstack,
)

if TYPE_CHECKING:
    import lance

_MAX_IN_MEMORY = 64 * 2**20
_ITERATION_ROWS = 1024
_ENVIRONMENT = "RAGGEDATLAS_MAP_RESULTS"
"""Environment variable that disables memory mapping if it is 0."""

VectorReader = PageRowReader | LanceRowReader
"""Random access to the flattened rows of a column; row numbers are validated here."""


class ResultDataset(HyraxDataset, torch_dataset_class()):  # type: ignore[misc]
    """The results of one run, pinned to a version of their table; rows are in the order in which they were written.

    If PyTorch is installed, this is a map-style dataset and rows are tensors; otherwise rows are arrays.

    Parameters
    ----------
    config : mapping
        Configuration; available as `config`, otherwise unused.
    data_location : str or path
        The result folder, which contains ``lance_db``; local, or on an object store.
    version : int or None
        Version of the table; None opens the latest.
    mapped : bool
        Whether the files of the table may be memory-mapped. Values are the same either way; without mapping reads are slower.
    storage_options : mapping of str to str, or None
        Options of the object store, as for `RaggedAtlas.open`.

    Raises
    ------
    NotFoundError
        If there are no committed results.
    CorruptError
        If the table is not a results table.

    Notes
    -----
    Replaced results stay readable for an hour (`grace` of `ResultDatasetWriter`); after that, reading them or unpickling the
    dataset in another process raises a `NotFoundError` that says so.

    ``dataset[i]`` is a tensor of `tensor_shape`; a list, slice, mask, array or tensor of row numbers returns a stack
    ``(k, *tensor_shape)`` in the requested order. Row numbers outside ``0 <= i < len(dataset)`` raise an ``IndexError``, so that
    iteration ends; slices follow Python. Returned values are copies. A table with several outputs has ``get_<output>`` for each.

    References
    ----------
    Hyrax, Lance Storage Layer Design Document, Step 2.

    Examples
    --------
    >>> dataset = ResultDataset({}, "results/20260101-120000-infer-AbCd")  # doctest: +SKIP
    >>> dataset[5].shape, dataset[[7, 7, 2]].shape, dataset.get_object_id(5)  # doctest: +SKIP
    """

    @checked
    def __init__(
        self,
        config: Mapping[str, Any],
        data_location: str | os.PathLike[str],
        *,
        version: int | None = None,
        mapped: bool = True,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(config)
        self.data_location = data_location
        self._mapped = mapped
        self._storage_options = storage_options
        self._location = Location.of(data_location, storage_options)
        if self._location.is_local:
            require_results(self._location.path)
        if version is not None and version < 1:
            raise QueryError(f"version={version}; versions of results count from 1.")
        try:
            self._table = open_table(self._location, version)
        except NotFoundError as error:
            newest = None if version is None else int(open_table(self._location).version)
            # Only an older version can have been replaced; a higher one never existed.
            if version is None or newest is None or newest <= version:
                raise
            raise NotFoundError(replaced_message(self._location.uri, version, newest)) from error
        self.version = int(self._table.version)
        self.columns = read_columns(self._table.schema, self._location.uri)
        self._n_rows = int(self._table.count_rows())
        self._column = self.columns[0]
        self._readers: dict[str, VectorReader] = {}
        self._first: VectorReader | None = None

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of one row of ``data``."""
        return self._column.shape

    @property
    def tensor_dtype(self) -> "np.dtype[Any]":
        """Data type of ``data``."""
        return self._column.dtype

    @property
    def location(self) -> Location:
        """Location of the result folder."""
        return self._location

    @property
    def facts(self) -> dict[str, str]:
        """Metadata that the writer stored with the table, e.g. the name of the model."""
        return read_facts(self._table.schema)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._n_rows

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401  (a tensor)
        """Return a copy of one row, or a stack of several rows; see `Notes` of the class for valid indices and errors."""
        return as_tensor(self._read(self._column, index))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return copies of several rows as a list of tensors; called by PyTorch's DataLoader."""
        return unstack(self[indices])

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the tensors of all rows."""
        for _, values in self.iter_batches(_ITERATION_ROWS, ids=False):
            yield from unstack(as_tensor(values))

    def get_data(self, idx: Any) -> NDArray[Any]:  # noqa: ANN401
        """Return a copy of ``dataset[idx]`` as a NumPy array."""
        return self._read(self._column, idx)

    def get_object_id(self, idx: Any) -> Any:  # noqa: ANN401  (one text, or an array of texts)
        """Return the id of a row, or an object array of the ids of several rows.

        Raises
        ------
        RowIndexError, RowTypeError
            As for ``dataset[idx]``.
        """
        # Frequent case, without arrays. Exact type: a bool is no row number, and `as_rows` refuses it.
        if type(idx) is int and 0 <= idx < self._n_rows:
            return self._ids[idx].as_py()
        rows, single = as_rows(idx, self._n_rows)
        if single:
            return self._ids[int(rows[0])].as_py()
        return self._ids.take(pa.array(rows)).to_numpy(zero_copy_only=False)

    def ids(self) -> ObjectIds:
        """Return the ids in row order; only the id column is read."""
        return ObjectIds(self._ids)

    def find_indexed(self, ids: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Find the rows of a few ids in the table's index; return None without an index, or if all ids are already in memory.

        Returns
        -------
        tuple of (k,) int64 and (k,) int64, or None
            Row numbers, and the position in `ids` of the id of each row.
        """
        # A `cached_property` keeps its value there once it was read.
        if "_ids" in self.__dict__ or not ids:
            return None
        with result_errors(self._table):
            return lookup_rows(self._table, ids)

    def has_rows_of(self, table: "lance.LanceDataset") -> bool:
        """Return whether another version of the table has the same rows, as one has that differs only in its indices."""
        ours, theirs = ([each.metadata for each in one.get_fragments()] for one in (self._table, table))
        return ours == theirs

    def read_batch(self, rows: NDArray[np.int64], fields: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Read several fields of several rows.

        Parameters
        ----------
        rows : (k,) int
            Row numbers.
        fields : sequence of str
            ``object_id`` and names of outputs.

        Returns
        -------
        dict of str to (k, ...) array
            The fields.
        """
        return {
            field: self.get_object_id(rows) if field == OBJECT_ID else self._read(self._find(field), rows)
            for field in fields
        }

    @checked
    def to_numpy(self, out: NDArray[Any] | None = None, *, column: str | None = None) -> NDArray[Any]:
        """Copy all rows into an array.

        Parameters
        ----------
        out : array of shape ``(n, *shape)``, or None
            Contiguous array to fill; None allocates one.
        column : str or None
            Output to read; None means ``data``.

        Raises
        ------
        QueryError
            If `out` has the wrong shape or dtype, or is not contiguous.
        """
        chosen = self._column if column is None else self._find(column)
        shape = (self._n_rows, *chosen.shape)
        if out is None:
            out = np.empty(shape, chosen.dtype)
        if not isinstance(out, np.ndarray):
            raise QueryError(f"out is {brief(out)}; expected an array of shape {shape} and dtype {chosen.dtype}.")
        # Of an array that is not contiguous, `reshape` would make a copy, and the rows would go into that.
        if out.shape != shape or out.dtype != chosen.dtype or not out.flags.c_contiguous:
            raise QueryError(
                f"out has shape {out.shape} and dtype {out.dtype}; expected contiguous {shape} of {chosen.dtype}."
            )
        self._reader(chosen).span(0, out.reshape(self._n_rows, chosen.n_values))
        return out

    @checked
    def iter_batches(
        self, batch_size: int = 8192, *, column: str | None = None, ids: bool = True
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Iterate over all rows in bounded memory.

        Parameters
        ----------
        batch_size : int
            Number of rows per batch; the last batch may be smaller.
        column : str or None
            Output to read; None means ``data``.
        ids : bool
            Whether to read ids; otherwise row numbers are returned in their place.

        Yields
        ------
        tuple of (k,) object array and (k, *shape) array
            Ids and values.
        """
        if batch_size < 1:
            raise QueryError(f"batch_size={batch_size}; expected at least 1.")
        chosen = self._column if column is None else self._find(column)
        for start in range(0, self._n_rows, batch_size):
            rows = np.arange(start, min(start + batch_size, self._n_rows))
            values = np.empty((len(rows), chosen.n_values), chosen.dtype)
            self._reader(chosen).span(start, values)
            names = self._ids.slice(start, len(rows)).to_numpy(zero_copy_only=False) if ids else rows
            yield names, values.reshape(len(rows), *chosen.shape)

    def is_mapped(self, column: str | None = None) -> bool:
        """Return whether rows of a column are read from memory-mapped files."""
        chosen = self._column if column is None else self._find(column)
        return self._map(chosen) is not None

    def visualize(self) -> NoReturn:
        """Raise an error: a results table holds no metadata of its objects to show.

        Raises
        ------
        QueryError
            Always; the message names the alternatives.
        """
        raise QueryError(
            f"Lance results contain no metadata of their objects, so ResultDataset cannot be visualized alone: {self._location.uri}. "
            "Join them by id with the cells of an atlas: visualize(results, view.query(), path='cells.html'), or raggedatlas view "
            "ATLAS RESULTS. Results in .npy files can be visualized directly."
        )

    def __repr__(self) -> str:
        """Return a one-line summary."""
        outputs = ", ".join(f"{column.name} {column.shape} {column.dtype}" for column in self.columns)
        return f"ResultDataset of {self._n_rows:,} objects ({outputs}) in {self._location.uri}"

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Return the getter ``get_<output>`` of an output; HyraxQL discovers outputs by these names, known only from the table."""
        if name.startswith("get_"):
            # Before `__init__` has set it, `self.columns` would call this method again, without end.
            for column in self.__dict__.get("columns", ()):
                if name == f"get_{column.name}":
                    return partial(self._read, column)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        """List the attributes, including ``get_<output>`` for each output of this table."""
        return [*super().__dir__(), *(f"get_{column.name}" for column in self.columns if column.name != DATA)]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the location and version of the table."""
        return {
            "config": self.config,
            "data_location": self.data_location,
            "version": self.version,
            "mapped": self._mapped,
            "storage_options": self._storage_options,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Reopen the table in another process."""
        self.__init__(**state)  # type: ignore[misc]

    def _read(self, column: ResultColumn, index: Any) -> NDArray[Any]:  # noqa: ANN401
        source = self._first if column is self._column and self._first is not None else self._reader(column)
        if type(index) is int and 0 <= index < self._n_rows:
            # `one` may return a view of a mapped file or of a block that is shared.
            return source.one(index).reshape(column.shape).copy()
        rows, single = as_rows(index, self._n_rows)
        if single:
            return source.one(int(rows[0])).reshape(column.shape).copy()
        return source.read(rows).reshape(len(rows), *column.shape)

    def _find(self, name: str) -> ResultColumn:
        for column in self.columns:
            if column.name == name:
                return column
        raise NotFoundError(
            f"{self._location.uri} has no output {name!r}; available are {[column.name for column in self.columns]}."
        )

    def _reader(self, column: ResultColumn) -> VectorReader:
        """Return the row reader of a column; it is chosen at the first read."""
        if column.name not in self._readers:
            source: VectorReader | None = self._map(column)
            if source is None:
                source = LanceRowReader(self._table, column, self._n_rows)
                # `mapped=False` reads every row through Lance, so nothing is kept in memory either.
                if self._mapped and 0 < self._n_rows * column.n_bytes <= _MAX_IN_MEMORY:
                    values = np.empty((self._n_rows, column.n_values), column.dtype)
                    source.span(0, values)
                    source = PageRowReader([values.reshape(-1)], [0], [0], [0], column.n_values)
            self._readers[column.name] = source
            self._first = self._readers.get(self._column.name)
        return self._readers[column.name]

    def _map(self, column: ResultColumn) -> PageRowReader | None:
        allowed = os.environ.get(_ENVIRONMENT, "1").lower() not in {"0", "false", "no", "off"}
        if not (self._mapped and self._location.is_local and allowed):
            return None
        return map_column(self._table, column, table_path(self._location.path))

    @cached_property
    def _ids(self) -> pa.Array:
        """All ids in one array; as large strings if they may exceed two gigabytes together."""
        with result_errors(self._table):
            stored = self._table.to_table(columns=[OBJECT_ID]).column(0)
        if stored.null_count:
            raise CorruptError(f"{self._location.uri} has {stored.null_count} rows without an id.")
        small = stored.nbytes < 2**31 and pa.types.is_string(stored.type)
        return (stored if small else stored.cast(pa.large_string())).combine_chunks()


def require_results(folder: Path) -> None:
    """Raise `NotFoundError` if a local folder does not exist, holds no committed results, or only remains of an unfinished run."""
    if not folder.is_dir():
        raise NotFoundError(f"Result folder {folder} does not exist; check the path.")
    if is_committed(folder):
        return
    if table_path(folder).is_dir():
        raise NotFoundError(
            f"{folder} holds incomplete results: a run started to write {DATABASE} and did not commit. Run it again with this "
            "folder, which removes the remains."
        )
    raise NotFoundError(
        f"{folder} holds no results in {DATABASE}; a run without batches writes none, and .npy results are converted by "
        "convert_results or read by InferenceDataSet."
    )
