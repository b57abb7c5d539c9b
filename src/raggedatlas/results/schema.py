"""The columns of a results table: what a tensor's shape and dtype become in Arrow, and back."""

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
# Rows lie one after the other in the file, however short they are, so that they can be mapped.
_ROWS_AS_THEY_ARE = {"lance-encoding:structural-encoding": "fullzip"}
_DTYPES = frozenset(
    ["bool", "float16", "float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
)


@dataclass(frozen=True)
class ResultColumn:
    """One output of a model: every row a tensor of this shape and dtype, flattened in C order (seed 003, step 1).

    Parameters
    ----------
    name : str
        Column; ``data`` for a model with one output.
    shape : tuple of int
        Shape of one row; ``()`` for a single number, which is stored as a list of one.
    dtype : numpy.dtype
        Boolean, or integer or float of up to 64 bits.

    Raises
    ------
    NameRefusedError
        If the name is no column name, or the one of the ids.
    SourceError
        For a dtype that Arrow has no list of, or a tensor without values.

    Examples
    --------
    >>> ResultColumn("data", (2, 3), np.dtype("float32")).field().type
    FixedSizeListType(fixed_size_list<item: float>[6])
    """

    name: str
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"

    def __post_init__(self) -> None:
        """Refuse what cannot be stored."""
        if self.name == OBJECT_ID or not COLUMN.fullmatch(self.name):
            raise NameRefusedError(
                f"An output cannot be called {self.name!r}; expected letters, digits and '_', and not {OBJECT_ID!r}."
            )
        if self.dtype.name not in _DTYPES:
            raise SourceError(
                f"Output {self.name!r} has dtype {self.dtype}; results hold bool, int8 to uint64 and float16 to float64. "
                "Convert it first, e.g. complex numbers with .view(float), bfloat16 with .float()."
            )
        if self.n_values == 0:
            raise SourceError(
                f"Output {self.name!r} has shape {self.shape} for each object, which holds no values; there is nothing to store."
            )

    @property
    def n_values(self) -> int:
        """Values of one row."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes of one row in memory."""
        return self.n_values * self.dtype.itemsize

    def field(self) -> pa.Field:
        """Give the Arrow field, with shape and dtype in its metadata."""
        # full-zip rows consist of whole bytes; Arrow's booleans do not
        layout = {} if self.dtype == bool else _ROWS_AS_THEY_ARE
        stored = pa.list_(pa.from_numpy_dtype(self.dtype), self.n_values)
        return pa.field(self.name, stored, metadata={**self.described(), **layout})

    def described(self) -> dict[str, str]:
        """Give shape and dtype under the seed's two keys."""
        return {_SHAPE: json.dumps(list(self.shape)), _DTYPE: self.dtype.name}

    def described_together(self) -> str:
        """Describe shape and dtype in one text, as newer public readers want tables of several outputs."""
        return json.dumps({_SHAPE: list(self.shape), _DTYPE: self.dtype.name})


def results_schema(columns: Sequence[ResultColumn], facts: Mapping[str, str]) -> pa.Schema:
    """Describe a table of results.

    Parameters
    ----------
    columns : sequence of ResultColumn
        Outputs.
    facts : mapping of str to str
        Further metadata of the table, e.g. which model made it; the seed's keys win.

    Returns
    -------
    pyarrow.Schema
        ``object_id: string`` and one fixed-size list for each output. The seed's keys ``tensor_shape`` and ``tensor_dtype``
        describe ``data``; a table without it describes every output under its name.
    """
    named = {column.name: column for column in columns}
    described = (
        named[DATA].described()
        if DATA in named
        else {name: column.described_together() for name, column in named.items()}
    )
    fields = [pa.field(OBJECT_ID, pa.string()), *(column.field() for column in columns)]
    return pa.schema(fields, metadata={**facts, **described})


def read_columns(schema: pa.Schema, place: str) -> tuple[ResultColumn, ...]:
    """Find the outputs in a table's schema: ours, the seed's, or with one JSON text for each column.

    Parameters
    ----------
    schema : pyarrow.Schema
        Of the table.
    place : str
        Where it lies, for messages.

    Returns
    -------
    tuple of ResultColumn
        In column order, but ``data`` first.

    Raises
    ------
    CorruptError
        If there are no ids, no outputs, or a shape does not fit its column.
    """
    if OBJECT_ID not in schema.names:
        raise CorruptError(f"{place} has the columns {schema.names}, and no {OBJECT_ID!r}; it is no table of results.")
    fields = [field for field in schema if pa.types.is_fixed_size_list(field.type)]
    if not fields:
        raise CorruptError(f"{place} has the columns {schema.names}, and none of them holds tensors.")
    table = _texts(schema.metadata)
    columns = [_column_of(field, table, place) for field in fields]
    return tuple(sorted(columns, key=lambda column: column.name != DATA))


def read_facts(schema: pa.Schema) -> dict[str, str]:
    """Give a table's metadata without what describes its columns."""
    names = {*schema.names, _SHAPE, _DTYPE}
    return {key: value for key, value in _texts(schema.metadata).items() if key not in names}


def _column_of(field: pa.Field, table: Mapping[str, str], place: str) -> ResultColumn:
    own = _texts(field.metadata)
    try:
        if field.name in table and _SHAPE not in own:
            own = {key: json.dumps(value) for key, value in json.loads(table[field.name]).items()}
        elif field.name == DATA and _SHAPE not in own:
            own = dict(table)
        shape = tuple(int(length) for length in json.loads(own.get(_SHAPE, f"[{field.type.list_size}]")))
        dtype = np.dtype(own[_DTYPE].strip('"') if _DTYPE in own else field.type.value_type.to_pandas_dtype())
    except (AttributeError, TypeError, ValueError, NotImplementedError, OverflowError, RecursionError) as error:
        raise CorruptError(f"{place}: the shape and dtype of column {field.name!r} do not read: {error}.") from error
    if math.prod(shape) != field.type.list_size or any(length < 1 for length in shape):
        raise CorruptError(
            f"{place}: column {field.name!r} is said to hold tensors of shape {shape}, but has {field.type.list_size} values a row."
        )
    try:
        return ResultColumn(field.name, shape, dtype)
    except (SourceError, NameRefusedError) as error:
        raise CorruptError(f"{place}: {error}") from error


def _texts(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    return {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in (metadata or {}).items()}
