"""Several datasets as one: rows of a primary dataset joined with others by position or id (``data_request``).

Joins are computed once, in memory; nothing is cached in the data folders, and nothing found there is unpickled.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, QueryError, SourceError
from raggedatlas.model.arguments import checked
from raggedatlas.wings.results.data_request import (
    DatasetRequest,
    HyraxDataset,
    field_names,
    find_class,
    merge_config,
    parse_group,
)
from raggedatlas.wings.results.dataset import ResultDataset
from raggedatlas.wings.results.npy_results import InferenceDataSet
from raggedatlas.wings.results.row_readers import ObjectIds
from raggedatlas.wings.results.schema import OBJECT_ID, as_ids, as_rows, torch_dataset_class

Sample = dict[str, Any]

_MATCHED = "{}__matched"
_BUILTIN_CLASSES = (ResultDataset, InferenceDataSet)


class JoinedDataset:
    """One dataset of a group: its requested fields, and the mapping from rows of the primary dataset to its own rows.

    `config` is the general configuration, which that of the request overrides.
    """

    def __init__(self, request: DatasetRequest, config: Mapping[str, Any]) -> None:
        self.request = request
        made = find_class(request.dataset_class, _BUILTIN_CLASSES)
        own: dict[str, Any] = {}
        for key, value in request.dataset_config.items():
            # A table named like a dataset class configures that class, which looks for it below `data_set`.
            if key in HyraxDataset.registry:
                own.setdefault("data_set", {})[key] = value
            else:
                own[key] = value
        self.dataset: Any = made(config=merge_config(config, own), data_location=request.data_location)
        self.available = field_names(self.dataset)
        self.fields = self.available if request.fields is None else request.fields
        needed = (*self.fields, *(each for each in (request.primary_id_field, request.join_field) if each))
        for name in needed:
            if name not in self.available:
                raise NotFoundError(
                    f"Dataset {request.name!r} ({request.dataset_class}) has no field {name!r}; available are {', '.join(self.available)}."
                )
        # None: rows are matched by position; else one entry per row of the primary dataset (see `match`).
        self.rows: NDArray[np.int64] | None = None

    def column(self, name: str) -> pa.Array:
        """Read one field of all rows as strings."""
        # The `ids` of a user's class may return anything; only `ObjectIds` is known to be text in row order.
        if name == OBJECT_ID and isinstance(ids := getattr(self.dataset, "ids", lambda: None)(), ObjectIds):
            return ids.to_arrow().cast(pa.large_string())
        values = [sample[name] for sample in self.samples(np.arange(len(self.dataset)), (name,))]
        return pa.array(as_ids(values, 0), pa.large_string())

    def match(self, keys: pa.Array) -> None:
        """Find the row of each key; -1 if there is none."""
        request = self.request
        if request.join_field is None:
            if len(self.dataset) != len(keys):
                raise QueryError(
                    f"Dataset {request.name!r} has {len(self.dataset):,} rows and the primary dataset {len(keys):,}; without a join_field rows "
                    "are matched by position. Set join_field to the field with the ids."
                )
            return
        own = self.column(request.join_field)
        if pc.count_distinct(own).as_py() != len(own):
            counts = pc.value_counts(own)
            duplicate = counts.field("values").filter(pc.greater(counts.field("counts"), 1))[0].as_py()
            raise SourceError(
                f"Dataset {request.name!r} has {request.join_field} {duplicate!r} more than once; a join needs unique keys."
            )
        found = pc.index_in(keys, value_set=own)
        self.rows = pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)

    def places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of this dataset that match rows of the primary one; -1 if there is none."""
        return rows if self.rows is None else self.rows[rows]

    def read(self, rows: NDArray[np.int64], fields: Sequence[str]) -> dict[str, Any]:
        """Read fields of rows of this dataset: in one call if the dataset supports it, else row by row."""
        if hasattr(self.dataset, "read_batch"):
            return dict(self.dataset.read_batch(rows, fields))
        if not len(rows) and len(self.dataset):
            # Only values tell shape and dtype of a field.
            return dict(_without_rows(self.read(np.arange(1), fields)))
        samples = self.samples(rows, fields)
        return {name: self._stack(name, [sample[name] for sample in samples]) for name in fields}

    def samples(self, rows: NDArray[np.int64], fields: Sequence[str]) -> list[Sample]:
        """Read fields of rows of this dataset, as one sample per row."""
        if hasattr(self.dataset, "read_batch"):
            values = self.dataset.read_batch(rows, fields)
            return [{name: values[name][k] for name in fields} for k in range(len(rows))]
        getters = {name: getattr(self.dataset, f"get_{name}") for name in fields}
        return [{name: getter(int(row)) for name, getter in getters.items()} for row in rows]

    def collate(self, samples: Sequence[Sample]) -> Any:  # noqa: ANN401
        """Stack samples field by field, or with the dataset's own ``collate`` or ``collate_<field>``."""
        if not samples:
            # A dataset's own functions need a sample; the rows of the first one are cut off what they make of it.
            first = self.samples(np.arange(min(1, len(self.dataset))), self.fields)
            return _without_rows(self.collate(first)) if first else self.read(np.arange(0), self.fields)
        own = getattr(self.dataset, "collate", None)
        if own is not None:
            return own(list(samples))
        made: dict[str, Any] = {}
        for name in self.fields:
            special: Callable[[list[Sample]], Mapping[str, Any]] | None = getattr(self.dataset, f"collate_{name}", None)
            if special is not None:
                made.update(special(list(samples)))
            else:
                made[name] = self._stack(name, [sample[name] for sample in samples])
        return made

    @property
    def has_own_collate(self) -> bool:
        """Whether the dataset defines its own collate functions."""
        return any(hasattr(self.dataset, name) for name in ("collate", *(f"collate_{each}" for each in self.fields)))

    def _stack(self, name: str, values: list[Any]) -> NDArray[Any]:
        try:
            return np.stack(values) if values and isinstance(values[0], np.ndarray) else np.array(values)
        except ValueError as error:
            raise SourceError(
                f"Values of field {name!r} of dataset {self.request.name!r} cannot be stacked: {error}. Define a method collate_{name} of "
                f"{self.request.dataset_class} to combine them."
            ) from error


def _without_rows(batch: Any) -> Any:  # noqa: ANN401  (what a dataset's own collate gives)
    """Cut all rows off the arrays, tensors and lists of a batch."""
    if isinstance(batch, Mapping):
        return {name: _without_rows(values) for name, values in batch.items()}
    rows = isinstance(batch, list | tuple) or bool(getattr(batch, "ndim", False))
    return batch[:0] if rows else batch


@checked
class DataProvider(torch_dataset_class()):  # type: ignore[misc]
    """The datasets of one group of a ``data_request``, combined into one dataset.

    Parameters
    ----------
    config : mapping
        Configuration; ``data_set.nan_mode`` (false, ``"zero"``, ``"quantile"``) and ``data_set.nan_quantile`` control NaN in batches.
    request : mapping
        Name of a dataset -> ``dataset_class``, ``data_location``, and optionally ``fields``, ``primary_id_field``, ``join_field``,
        ``dataset_config``. Exactly one dataset has a ``primary_id_field``; a group of one dataset needs none.

    Raises
    ------
    QueryError
        If the request contradicts itself (also a ``ValueError``).
    NotFoundError
        If a class, location or field does not exist.
    SourceError
        If a dataset has duplicate join keys.

    Notes
    -----
    A sample is ``{name: {field: value}, "object_id": str}``; the entry of a joined dataset without a match is None. A batch is
    ``{name: {field: (k, ...) array}, "object_id": (n,) array of str}``, and for each joined dataset ``<name>__matched``, ``(n,)``
    bool: its fields have rows only where that is True.

    Examples
    --------
    >>> import tempfile
    >>> from raggedatlas import ResultDatasetWriter
    >>> folder = tempfile.mkdtemp()
    >>> with ResultDatasetWriter(folder) as writer:
    ...     writer.write_batch(["a", "b"], np.arange(4.0).reshape(2, 2))
    >>> provider = DataProvider({}, {"run": {"dataset_class": "ResultDataset", "data_location": folder}})
    >>> provider.batch([1, 0])["run"]["data"]
    array([[2., 3.],
           [0., 1.]])
    """

    def __init__(self, config: Mapping[str, Any], request: Mapping[str, Any]) -> None:
        self.config = config
        self.data_request = request
        options = config.get("data_set", {})
        mode, quantile = options.get("nan_mode") or False, float(options.get("nan_quantile", 0.05))
        if mode not in (False, "zero", "quantile"):
            raise QueryError(f"nan_mode is {mode!r}; expected false, 'zero' or 'quantile'.")
        if not 0 <= quantile <= 1:
            raise QueryError(f"nan_quantile is {quantile}; expected a number from 0 to 1.")
        self._fill = partial(fill_nan, mode=mode, quantile=quantile)
        requests = parse_group(request)
        self.datasets = {each.name: JoinedDataset(each, config) for each in requests}
        self.primary = next(self.datasets[each.name] for each in requests if each.primary_id_field)
        self._ids = self.primary.column(str(self.primary.request.primary_id_field))
        for each in self.datasets.values():
            if each is not self.primary:
                each.match(self._ids)

    def __len__(self) -> int:
        """Return the number of rows of the primary dataset."""
        return len(self._ids)

    def __getitem__(self, idx: int) -> Sample:
        """Return one sample."""
        return self.__getitems__([idx])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return several samples, read in one call; called by PyTorch's DataLoader. `collate` combines them to a batch."""
        rows, _ = as_rows(indices, len(self))
        samples: list[Sample] = [{} for _ in rows]
        for name, each in self.datasets.items():
            places = each.places(rows)
            matched = np.flatnonzero(places >= 0)
            for sample in samples:
                sample[name] = None
            for position, found in zip(matched, each.samples(places[matched], each.fields), strict=True):
                samples[position][name] = found
        for sample, identifier in zip(samples, self._ids.take(pa.array(rows)).to_pylist(), strict=True):
            sample[OBJECT_ID] = identifier
        return samples

    def batch(self, indices: Any) -> dict[str, Any]:  # noqa: ANN401  (whatever `as_rows` understands)
        """Read a batch of rows.

        Parameters
        ----------
        indices : sequence of int, slice, mask, or array
            Rows of the primary dataset.

        Returns
        -------
        dict
            The batch, as described in the notes of the class.
        """
        rows, _ = as_rows(indices, len(self))
        # A class's own collate expects a list of samples; without one, fields are read as arrays.
        if any(each.has_own_collate for each in self.datasets.values()):
            return self.collate(self.__getitems__(rows.tolist()))
        made: dict[str, Any] = {}
        for name, each in self.datasets.items():
            places = each.places(rows)
            made[name] = {
                field: self._fill(np.asarray(values))
                for field, values in each.read(places[places >= 0], each.fields).items()
            }
            if each.rows is not None:
                made[_MATCHED.format(name)] = places >= 0
        made[OBJECT_ID] = np.array(self._ids.take(pa.array(rows)).to_pylist(), dtype=str)
        return made

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Combine samples to a batch: `torch.utils.data.DataLoader(provider, collate_fn=provider.collate)`.

        Parameters
        ----------
        samples : sequence of dict
            Samples of this dataset.
        """
        made: dict[str, Any] = {}
        for name, each in self.datasets.items():
            found = [sample[name] for sample in samples if sample.get(name) is not None]
            made[name] = self._filled(each.collate(found))
            if each.rows is not None:
                made[_MATCHED.format(name)] = np.array([sample.get(name) is not None for sample in samples], bool)
        made[OBJECT_ID] = np.array([str(sample[OBJECT_ID]) for sample in samples], dtype=str)
        return made

    def _filled(self, collated: Any) -> Any:  # noqa: ANN401  (what a dataset's own collate gives)
        if isinstance(collated, Mapping):
            return {name: self._filled(value) for name, value in collated.items()}
        return self._fill(collated) if isinstance(collated, np.ndarray) else collated

    def sample_data(self) -> Sample:
        """Return the first sample, from which a model can infer shapes."""
        return self[0]

    def get_object_id(self, idx: int) -> str:
        """Return the id of a row."""
        rows, _ = as_rows(int(idx), len(self))
        found: str = self._ids[int(rows[0])].as_py()
        return found

    def ids(self) -> ObjectIds:
        """Return the ids of the primary dataset in row order."""
        return ObjectIds(self._ids)

    def fields(self) -> dict[str, list[str]]:
        """Return the available fields of each dataset, requested or not."""
        return {name: list(each.available) for name, each in self.datasets.items()}

    def unmatched(self) -> dict[str, int]:
        """Return the number of unmatched rows of the primary dataset, by joined dataset."""
        return {name: int((each.rows < 0).sum()) for name, each in self.datasets.items() if each.rows is not None}

    def __repr__(self) -> str:
        """Return a one-line summary."""
        parts = [
            f"{name} ({each.request.dataset_class}: {', '.join(each.fields)})" for name, each in self.datasets.items()
        ]
        return f"DataProvider of {len(self):,} objects: {'; '.join(parts)}"


def prepare(config: Mapping[str, Any]) -> dict[str, DataProvider]:
    """Create the providers of all groups of ``data_request``.

    Parameters
    ----------
    config : mapping
        Configuration with the table ``data_request``: group -> dataset -> definition.

    Returns
    -------
    dict of str to DataProvider
        Providers by group name, e.g. ``infer``.

    Raises
    ------
    QueryError
        If there is no data request.
    """
    groups = config.get("data_request")
    if not groups:
        raise QueryError(
            "The configuration has no data_request; define datasets, e.g. under [data_request.infer.results]."
        )
    return {name: DataProvider(config, group) for name, group in groups.items()}


def fill_nan(values: NDArray[Any], mode: Any, quantile: float) -> NDArray[Any]:  # noqa: ANN401  (of a configuration)
    """Fill NaN of a batch, (k, ...), in a copy: with zero, or with a quantile of the other values of the row.

    Mode False keeps NaN; arrays that are not floating point are returned unchanged. A row of only NaN is filled with zero.

    Examples
    --------
    >>> fill_nan(np.array([[1.0, np.nan, 3.0], [np.nan] * 3]), "quantile", 0.5)
    array([[1., 2., 3.],
           [0., 0., 0.]])
    """
    if mode is False or values.dtype.kind != "f" or not len(values):
        return values
    missing = np.isnan(values)
    if not missing.any():
        return values
    if mode == "zero":
        # Zero of the same type, so that the result has the dtype of the values.
        return np.where(missing, values.dtype.type(0), values)
    missing = missing.reshape(len(values), -1)
    out = values.copy()
    # A view of the copy, in which scalars are rows of one value too.
    filled = out.reshape(missing.shape)
    for row in np.flatnonzero(missing.any(axis=1)):
        known = filled[row][~missing[row]]
        filled[row][missing[row]] = np.quantile(known, quantile) if known.size else 0
    return out
