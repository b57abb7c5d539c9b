"""Arrow schema of a results table: how shape and dtype of a tensor are stored and read back."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from raggedatlas.errors import CorruptError, NameRefusedError, SourceError
from raggedatlas.model.ids import COLUMN

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
    """One model output: each row is a tensor of fixed shape and dtype, flattened in C order (seed 003, step 1).

    Parameters
    ----------
    name : str
        Column name; ``data`` for a model with one output.
    shape : tuple of int
        Shape of one row; ``()`` for a scalar, which is stored as a list of length one.
    dtype : numpy.dtype
        Boolean, integer or floating point, up to 64 bits.

    Raises
    ------
    NameRefusedError
        If the name is not a valid column name, or is reserved for the ids.
    SourceError
        If the dtype is not supported, or the tensor has no values.

    Examples
    --------
    >>> ResultColumn("data", (2, 3), np.dtype("float32")).field().type
    FixedSizeListType(fixed_size_list<item: float>[6])
    """

    name: str
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"

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
    """Return the Arrow schema of a results table.

    Parameters
    ----------
    columns : sequence of ResultColumn
        Outputs.
    facts : mapping of str to str
        Additional table metadata, e.g. the name of the model; keys of the results format take precedence.

    Returns
    -------
    pyarrow.Schema
        ``object_id: string`` and one fixed-size list per output. The keys ``tensor_shape`` and ``tensor_dtype`` describe
        ``data``; a table without ``data`` describes each output under its name.
    """
    named = {column.name: column for column in columns}
    described = (
        named[DATA].to_metadata() if DATA in named else {name: column.to_json() for name, column in named.items()}
    )
    fields = [pa.field(OBJECT_ID, pa.string()), *(column.field() for column in columns)]
    return pa.schema(fields, metadata={**facts, **described})


def read_columns(schema: pa.Schema, place: str) -> tuple[ResultColumn, ...]:
    """Return the outputs of a table's schema, in any of the three supported metadata conventions.

    Parameters
    ----------
    schema : pyarrow.Schema
        Schema of the table.
    place : str
        URI of the table, for error messages.

    Returns
    -------
    tuple of ResultColumn
        In column order, with ``data`` first.

    Raises
    ------
    CorruptError
        If ids or outputs are missing, or a shape does not match its column.
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
