"""Tables as cellxgene sends them (FlatBuffers), decoded without its schema compiler: columns of numbers or of JSON, and their names."""

import json
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUMBERS: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i4"), 3: np.dtype("<u4"), 4: np.dtype("<f8")}
_JSON = 5

# Which field of the tables Matrix and Column is what; a union takes two fields, its type before itself.
_N_ROWS, _COLUMNS, _NAMES = 0, 2, 3
_KIND = 0


def decode_matrix(raw: bytes) -> dict[Any, Any]:
    """Decode the answer of cellxgene's routes for layouts, annotations and values.

    Parameters
    ----------
    raw : bytes
        What was sent.

    Returns
    -------
    dict
        Name of each column, or its number, -> array of numbers or list of texts, in order.

    Raises
    ------
    ValueError
        If a column has another length than the table says.
    """
    root = _uint32(raw, 0)
    n_rows = _uint32(raw, at) if (at := _field(raw, root, _N_ROWS)) else 0
    columns = [found for table in _tables(raw, root) if (found := _union(raw, table, _KIND)) is not None]
    names = _union(raw, root, _NAMES)
    if any(len(column) != n_rows for column in columns):
        raise ValueError(f"Columns of {[len(column) for column in columns]} values in a table of {n_rows} rows.")
    keys = list(range(len(columns))) if names is None else list(np.asarray(names).tolist())
    return dict(zip(keys, columns, strict=True))


def _tables(raw: bytes, root: int) -> list[int]:
    at = _field(raw, root, _COLUMNS)
    if not at:
        return []
    vector = at + _uint32(raw, at)
    places = [vector + 4 + 4 * i for i in range(_uint32(raw, vector))]
    return [place + _uint32(raw, place) for place in places]


def _union(raw: bytes, table: int, kind_field: int) -> "NDArray[Any] | list[Any] | None":
    kind_at, value_at = _field(raw, table, kind_field), _field(raw, table, kind_field + 1)
    if not kind_at or not value_at or raw[kind_at] == 0:
        return None
    inner = value_at + _uint32(raw, value_at)
    data_at = _field(raw, inner, 0)
    vector = data_at + _uint32(raw, data_at)
    n = _uint32(raw, vector)
    kind = raw[kind_at]
    if kind == _JSON:
        found: list[Any] = json.loads(raw[vector + 4 : vector + 4 + n])
        return found
    numbers: NDArray[Any] = np.frombuffer(raw, _NUMBERS[kind], n, vector + 4)
    return numbers


def _field(raw: bytes, table: int, number: int) -> int:
    """Give the place of a field of a table; 0 where it is not there."""
    vtable = table - int(struct.unpack_from("<i", raw, table)[0])
    slot = 4 + 2 * number
    if slot >= _uint16(raw, vtable):
        return 0
    offset = _uint16(raw, vtable + slot)
    return table + offset if offset else 0


def _uint32(raw: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", raw, at)[0])


def _uint16(raw: bytes, at: int) -> int:
    return int(struct.unpack_from("<H", raw, at)[0])
