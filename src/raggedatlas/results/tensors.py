"""Conversion of model outputs, ids and row indices to NumPy arrays; the only module of the room that imports PyTorch."""

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import RowIndexError, RowTypeError, SourceError
from raggedatlas.model.arguments import brief
from raggedatlas.results.schema import DATA


def as_numpy(value: Any) -> Any:  # noqa: ANN401  (a tensor of any library, an array, or anything else)
    """Convert a tensor to an array, without a copy if possible; return other objects unchanged."""
    # By attribute, so that PyTorch is not imported to recognize its tensors.
    if not hasattr(value, "detach"):
        return value
    try:
        return value.detach().cpu().numpy()
    except TypeError as error:
        raise SourceError(f"A tensor of {value.dtype} has no NumPy dtype; convert it first, e.g. .float().") from error


def as_ids(object_ids: Iterable[Any] | None, batch: int) -> list[str]:
    """Convert ids to strings.

    Parameters
    ----------
    object_ids : iterable
        An array, list or tensor of strings, bytes (UTF-8), integers, or other objects with a string form.
    batch : int
        Number of the batch, for error messages.

    Raises
    ------
    SourceError
        If an id is missing or not valid text.

    Examples
    --------
    >>> as_ids(np.array([b"a", b"b"]), 0), as_ids([7, "c"], 0)
    (['a', 'b'], ['7', 'c'])
    """
    if object_ids is None:
        raise SourceError(f"Batch {batch}: object ids are missing; every result needs an object id.")
    given = as_numpy(object_ids)
    if isinstance(given, pa.Array | pa.ChunkedArray):
        given = given.to_pylist()
    elif isinstance(given, np.ndarray):
        given = given.reshape(-1).tolist()
    try:
        listed = list(given)
    except TypeError as error:
        raise SourceError(f"Batch {batch}: the ids are {brief(given)}; expected one id per row.") from error
    # Exact type: subclasses such as `np.str_` are converted below.
    if set(map(type, listed)) <= {str}:
        return listed
    return [_as_id(value, batch, row) for row, value in enumerate(listed)]


def _as_id(value: Any, batch: int, row: int) -> str:  # noqa: ANN401
    if type(value) is str:
        return value
    if (
        value is None
        or type(value).__name__ in {"NAType", "NaTType"}
        or (isinstance(value, float) and math.isnan(value))
    ):
        raise SourceError(f"Batch {batch}, row {row}: the id is missing ({value!r}); every result needs an object id.")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise SourceError(f"Batch {batch}, row {row}: the id {value!r} is not valid UTF-8.") from error
    return str(value.item()) if hasattr(value, "item") and not getattr(value, "ndim", 0) else str(value)


def as_outputs(data: Any, batch: int) -> dict[str, NDArray[Any]]:  # noqa: ANN401  (what any model gives)
    """Convert model outputs for one batch to contiguous arrays in native byte order.

    Parameters
    ----------
    data : array, tensor, sequence of them, or mapping of str to any of these
        Outputs by name; an unnamed output is called ``data``. The first axis is the row axis.
    batch : int
        Number of the batch, for error messages.

    Returns
    -------
    dict of str to (n_rows, ...) array
        Outputs by name, sharing memory with the input where it is already contiguous.

    Raises
    ------
    SourceError
        If rows of an output differ in shape or dtype, an output contains objects, or outputs differ in length.

    Examples
    --------
    >>> as_outputs([np.zeros(3), np.ones(3)], 0)["data"].shape
    (2, 3)
    """
    named = data if isinstance(data, Mapping) else {DATA: data}
    if not named:
        raise SourceError(
            f"Batch {batch}: the model returned no outputs; expected at least one, e.g. {{'data': array}}."
        )
    outputs = {str(name): _as_array(values, batch, str(name)) for name, values in named.items()}
    counts = {name: len(values) for name, values in outputs.items()}
    if len(set(counts.values())) > 1:
        raise SourceError(f"Batch {batch}: the outputs have different numbers of rows: {counts}.")
    return outputs


def _as_array(values: Any, batch: int, name: str) -> NDArray[Any]:  # noqa: ANN401
    values = as_numpy(values)
    if not isinstance(values, np.ndarray) and isinstance(values, Iterable) and not isinstance(values, str | bytes):
        values = _stacked([np.asarray(as_numpy(value)) for value in values], batch, name)
    if not isinstance(values, np.ndarray) or values.ndim == 0:
        raise SourceError(f"Batch {batch}: output {name!r} is {values!r:.60}; expected one row per object.")
    if values.dtype == object:
        row, kind = _first_object(values)
        raise SourceError(
            f"Batch {batch}, row {row}: output {name!r} is an object array ({kind}); results need one numeric dtype and shape."
        )
    native: NDArray[Any] = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    return native


def _first_object(values: NDArray[Any]) -> tuple[int, str]:
    """Return the first row of an object array that contains a non-number, and the type found there."""
    for row, value in enumerate(values):
        for each in np.asarray(value, object).flat:
            if not isinstance(each, int | float | np.number):
                return row, type(each).__name__
    return 0, "numbers of several kinds"


def _stacked(rows: list[NDArray[Any]], batch: int, name: str) -> NDArray[Any]:
    # Neither shape nor dtype are known; `_has_shape` of the writer keeps this array from defining a table.
    if not rows:
        return np.empty((0,))
    first = rows[0]
    for row, values in enumerate(rows):
        if values.shape != first.shape or values.dtype != first.dtype:
            raise SourceError(
                f"Batch {batch}, row {row}: output {name!r} has shape {values.shape} and dtype {values.dtype}, but row 0 has "
                f"shape {first.shape} and dtype {first.dtype}; all rows must have the same shape and dtype."
            )
    return np.stack(rows)


@cache
def import_torch() -> Any:  # noqa: ANN401  (a module)
    """Import PyTorch, or return None if it is not installed."""
    try:
        import torch.utils.data
    except ImportError:
        return None
    return torch


def torch_dataset_class() -> type:
    """Return PyTorch's map-style dataset class, or `object` if PyTorch is not installed."""
    torch = import_torch()
    return object if torch is None else torch.utils.data.Dataset


def as_tensor(values: NDArray[Any]) -> Any:  # noqa: ANN401  (a tensor or an array)
    """Convert an array to a tensor that shares its memory; without PyTorch, return the array."""
    torch = import_torch()
    return values if torch is None else torch.from_numpy(values)


def unstack(values: Any) -> list[Any]:  # noqa: ANN401
    """Split a stack into a list of rows, as PyTorch's collate function expects."""
    return list(values) if isinstance(values, np.ndarray) else list(values.unbind())


def as_rows(index: Any, n_rows: int) -> tuple[NDArray[np.int64], bool]:  # noqa: ANN401
    """Convert an index to validated row numbers.

    Parameters
    ----------
    index : int, slice, sequence of int, integer array, boolean array, or tensor
        Integers are non-negative row numbers; slices follow Python; a mask has one value per row.
    n_rows : int
        Number of rows.

    Returns
    -------
    (k,) int64
        Row numbers in the requested order, with duplicates.
    bool
        Whether the index is a single integer.

    Raises
    ------
    RowIndexError
        If a number is negative or too large, or a mask has the wrong length (also an ``IndexError``).
    RowTypeError
        For any other kind of index (also a ``TypeError``).

    Examples
    --------
    >>> as_rows([2, 2, 0], 3), as_rows(slice(None, None, -1), 3)
    ((array([2, 2, 0]), False), (array([2, 1, 0]), False))
    """
    if isinstance(index, slice):
        return np.arange(*index.indices(n_rows)), False
    given = as_numpy(index)
    # NumPy makes float64 of an empty list, which would be refused below.
    if isinstance(given, list | tuple | range) and len(given) == 0:
        return np.empty(0, np.int64), False
    try:
        rows = np.asarray(given)
    except ValueError as error:
        raise _refused(index) from error
    if rows.dtype == bool and rows.ndim == 1:
        if len(rows) != n_rows:
            raise RowIndexError(f"The mask has {len(rows)} values for {n_rows:,} rows; expected one value per row.")
        return np.flatnonzero(rows), False
    if rows.dtype.kind not in "iu" or rows.ndim > 1:
        raise _refused(index)
    single = rows.ndim == 0
    rows = rows.reshape(-1)
    outside = (rows < 0) | (rows >= n_rows)
    if outside.any():
        raise RowIndexError(
            f"Row {rows[outside][0]} is out of range for {n_rows:,} rows; valid rows are 0 to {n_rows - 1:,}, and negative numbers "
            "are not supported."
        )
    return rows.astype(np.int64, copy=False), single


def _refused(index: Any) -> RowTypeError:  # noqa: ANN401
    return RowTypeError(
        f"Invalid row index {index!r:.80} ({type(index).__name__}); expected an integer, a slice, a mask, or a "
        "one-dimensional array of integers."
    )
