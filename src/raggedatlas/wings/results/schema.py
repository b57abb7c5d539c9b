"""Columns of results: ids, shapes and dtypes in Arrow, and conversion of model outputs and row indices to NumPy."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, NameRefusedError, RowIndexError, RowTypeError, SourceError
from raggedatlas.model.arguments import brief
from raggedatlas.model.ids import COLUMN, integer_ids

OBJECT_ID = "object_id"
DATA = "data"

_SHAPE, _DTYPE = "tensor_shape", "tensor_dtype"
# Store rows contiguously and uncompressed, however short they are, so that they can be memory-mapped.
_CONTIGUOUS_ROWS = {"lance-encoding:structural-encoding": "fullzip"}
_DTYPES = frozenset(
    ["bool", "float16", "float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
)


@dataclass(frozen=True)
class ResultColumn:
    """One model output: each row is a tensor of fixed shape and dtype, flattened in C order.

    Examples
    --------
    >>> ResultColumn("data", (2, 3), np.dtype("float32")).field().type
    FixedSizeListType(fixed_size_list<item: float>[6])
    """

    name: str  # ``data`` for a model with one output
    shape: tuple[int, ...]  # of one row; ``()`` for a scalar, which is stored as a list of length one
    dtype: "np.dtype[Any]"  # boolean, integer or floating point, up to 64 bits

    def __post_init__(self) -> None:
        """Validate name, dtype and shape."""
        if self.name == OBJECT_ID or not COLUMN.fullmatch(self.name):
            raise NameRefusedError(
                f"Invalid output name {self.name!r}; expected letters, digits and '_', and not {OBJECT_ID!r}."
            )
        if self.dtype.name not in _DTYPES:
            raise SourceError(
                f"Output {self.name!r} has dtype {self.dtype}; supported are bool, int8 to uint64 and float16 to float64. "
                "Convert it first, e.g. complex numbers with .view(float), bfloat16 with .float()."
            )
        if self.n_values == 0:
            raise SourceError(
                f"Output {self.name!r} has shape {self.shape} per object, which contains no values; there is nothing to store."
            )

    @property
    def n_values(self) -> int:
        """Number of values per row."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Size of one row in bytes."""
        return self.n_values * self.dtype.itemsize

    def field(self) -> pa.Field:
        """Return the Arrow field, with shape and dtype in its metadata."""
        # Full-zip rows consist of full bytes; Arrow packs booleans as bits.
        layout = {} if self.dtype == bool else _CONTIGUOUS_ROWS
        stored = pa.list_(pa.from_numpy_dtype(self.dtype), self.n_values)
        return pa.field(self.name, stored, metadata={**self.to_metadata(), **layout})

    def to_metadata(self) -> dict[str, str]:
        """Return shape and dtype under the two metadata keys of the results format."""
        return {_SHAPE: json.dumps(list(self.shape)), _DTYPE: self.dtype.name}

    def to_json(self) -> str:
        """Return shape and dtype as one JSON string, as newer public readers expect for tables with several outputs."""
        return json.dumps({_SHAPE: list(self.shape), _DTYPE: self.dtype.name})


def results_schema(columns: Sequence[ResultColumn], facts: Mapping[str, str]) -> pa.Schema:
    """Return the Arrow schema of a results table: ``object_id: string`` and one fixed-size list per output.

    `facts` are additional table metadata, e.g. the name of the model; keys of the results format take precedence. The
    keys ``tensor_shape`` and ``tensor_dtype`` describe ``data``; a table without ``data`` describes each output under
    its name.
    """
    named = {column.name: column for column in columns}
    described = (
        named[DATA].to_metadata() if DATA in named else {name: column.to_json() for name, column in named.items()}
    )
    fields = [pa.field(OBJECT_ID, pa.string()), *(column.field() for column in columns)]
    return pa.schema(fields, metadata={**facts, **described})


def read_columns(schema: pa.Schema, place: str) -> tuple[ResultColumn, ...]:
    """Return the outputs of a table's schema, in any of the three supported metadata conventions.

    They are in column order, with ``data`` first. `place` is the URI of the table, for messages. Raises `CorruptError`
    if ids or outputs are missing, or a shape does not match its column.
    """
    if OBJECT_ID not in schema.names:
        raise CorruptError(f"{place} has columns {schema.names} but no {OBJECT_ID!r}; it is not a table of results.")
    fields = [field for field in schema if pa.types.is_fixed_size_list(field.type)]
    if not fields:
        raise CorruptError(f"{place} has columns {schema.names}, and none of them holds tensors.")
    table = _decode_metadata(schema.metadata)
    columns = [_parse_column(field, table, place) for field in fields]
    return tuple(sorted(columns, key=lambda column: column.name != DATA))


def read_facts(schema: pa.Schema) -> dict[str, str]:
    """Return the metadata of a table, excluding the keys that describe its columns."""
    names = {*schema.names, _SHAPE, _DTYPE}
    return {key: value for key, value in _decode_metadata(schema.metadata).items() if key not in names}


def _parse_column(field: pa.Field, table: Mapping[str, str], place: str) -> ResultColumn:
    own = _decode_metadata(field.metadata)
    try:
        # Columns without keys of their own: the table's metadata has one JSON text for each, or two keys for `data`.
        if field.name in table and _SHAPE not in own:
            own = {key: json.dumps(value) for key, value in json.loads(table[field.name]).items()}
        elif field.name == DATA and _SHAPE not in own:
            own = dict(table)
        shape = tuple(int(length) for length in json.loads(own.get(_SHAPE, f"[{field.type.list_size}]")))
        dtype = np.dtype(own[_DTYPE].strip('"') if _DTYPE in own else field.type.value_type.to_pandas_dtype())
    except (AttributeError, TypeError, ValueError, NotImplementedError, OverflowError, RecursionError) as error:
        raise CorruptError(
            f"{place}: the shape and dtype of column {field.name!r} cannot be parsed: {error}."
        ) from error
    if math.prod(shape) != field.type.list_size or any(length < 1 for length in shape):
        raise CorruptError(
            f"{place}: column {field.name!r} declares tensors of shape {shape}, but has {field.type.list_size} values per row."
        )
    try:
        return ResultColumn(field.name, shape, dtype)
    except (SourceError, NameRefusedError) as error:
        raise CorruptError(f"{place}: {error}") from error


def _decode_metadata(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in (metadata or {}).items()}


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

    Ids are an array, list or tensor of strings, bytes (UTF-8), integers, or other objects with a string form. `batch`
    is the number of the batch, for messages. Raises `SourceError` if an id is missing or not valid text.

    Examples
    --------
    >>> as_ids(np.array([b"a", b"b"]), 0), as_ids([7, "c"], 0)
    (['a', 'b'], ['7', 'c'])
    """
    if object_ids is None:
        raise SourceError(f"Batch {batch}: object ids are missing; every result needs an object id.")
    given = as_numpy(object_ids)
    if isinstance(given, pa.Array | pa.ChunkedArray):
        given = given.to_numpy(zero_copy_only=False) if pa.types.is_floating(given.type) else given.to_pylist()
    if isinstance(given, np.ndarray):
        given = given.reshape(-1)
        given = (integer_ids(given, f"Batch {batch}: the ids") if given.dtype.kind == "f" else given).tolist()
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
    if isinstance(value, float | np.floating):
        return str(integer_ids(np.array([value]), f"Batch {batch}, row {row}: the ids")[0])
    return str(value.item()) if hasattr(value, "item") and not getattr(value, "ndim", 0) else str(value)


def as_outputs(data: Any, batch: int) -> dict[str, NDArray[Any]]:  # noqa: ANN401  (what any model gives)
    """Convert model outputs for one batch to contiguous arrays in native byte order.

    `data` is an array, a tensor, a sequence of them, or a mapping of names to any of these; an unnamed output is called
    ``data``. The first axis is the row axis. `batch` is the number of the batch, for messages. The result, (n_rows,
    ...) by name, shares memory with the input where it is already contiguous.

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
    values = _unmasked(as_numpy(values), batch, name)
    if not isinstance(values, np.ndarray) and isinstance(values, Iterable) and not isinstance(values, str | bytes):
        rows = [np.asarray(_unmasked(as_numpy(value), batch, name)) for value in values]
        for row, value in enumerate(rows):
            if value.shape != rows[0].shape or value.dtype != rows[0].dtype:
                raise SourceError(
                    f"Batch {batch}, row {row}: output {name!r} has shape {value.shape} and dtype {value.dtype}, but row 0 has "
                    f"shape {rows[0].shape} and dtype {rows[0].dtype}; all rows must have the same shape and dtype."
                )
        # Without rows neither shape nor dtype are known; the writer lets no such array define a table.
        values = np.stack(rows) if rows else np.empty((0,))
    if not isinstance(values, np.ndarray) or values.ndim == 0:
        raise SourceError(f"Batch {batch}: output {name!r} is {values!r:.60}; expected one row per object.")
    if values.dtype == object:
        # The first row that contains a non-number, and its type.
        kinds = (
            (row, type(each).__name__)
            for row, value in enumerate(values)
            for each in np.asarray(value, object).flat
            if not isinstance(each, int | float | np.number)
        )
        row, kind = next(kinds, (0, "numbers of several kinds"))
        raise SourceError(
            f"Batch {batch}, row {row}: output {name!r} is an object array ({kind}); results need one numeric dtype and shape."
        )
    native: NDArray[Any] = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    return native


def _unmasked(values: Any, batch: int, name: str) -> Any:  # noqa: ANN401
    """Return masked floating-point numbers with NaN for what is missing; refuse other masked values, whose type has no missing one."""
    if not isinstance(values, np.ma.MaskedArray) or not np.ma.is_masked(values):
        return values
    if values.dtype.kind == "f":
        return values.filled(np.nan)
    raise SourceError(
        f"Batch {batch}: output {name!r} is a masked array of {values.dtype}, which has no missing value; fill it first, e.g. with "
        ".filled(-1), or convert it to float."
    )


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
    """Convert an index to validated row numbers, and return also whether it is a single integer.

    Row numbers, (k,), are in the requested order, with duplicates. The index is an integer, slice, sequence of int,
    integer or boolean array, or tensor. Integers are non-negative row numbers; slices follow Python; a mask has one
    value per row. Raises `RowIndexError` (also an ``IndexError``) if a number is negative or too large, or a mask has
    the wrong length, and `RowTypeError` (also a ``TypeError``) for any other kind of index.

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
