"""Unstructured metadata as JSON, the only form that is written, and the only one that is read: nothing is ever unpickled."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.formats.cxg.detecting import kind_of, list_members
from raggedatlas.formats.cxg.engine import answering, context, open_array, open_tiledb, uri_of
from raggedatlas.formats.cxg.soundness import refuse_broken_texts, refuse_wild_sizes

MOST_NESTED = 100
"""JSON that is nested deeper is refused: everything that walks through it calls itself."""


class NoJsonError(Exception):
    """A value has no form in JSON; its text says what stands in the way."""


def as_json(value: Any) -> str:  # noqa: ANN401  (anything that uns holds)
    """Write a value as strict JSON: arrays as lists, NaN as null.

    Raises
    ------
    NoJsonError
        For bytes, tables, sparse matrices, infinities, keys that are no text, and what is nested too deeply.

    Examples
    --------
    >>> as_json({"scale": np.array([1.0, np.nan])})
    '{"scale": [1.0, null]}'
    """
    try:
        plain = _plain(value)
    except RecursionError as error:
        raise NoJsonError(f"more than {MOST_NESTED} levels") from error
    if _is_deep(plain):
        raise NoJsonError(f"more than {MOST_NESTED} levels")
    return json.dumps(plain, allow_nan=False)


def from_json(text: str) -> Any:  # noqa: ANN401
    """Read JSON; lists of numbers, truths or texts, also nested evenly, become arrays, null among numbers NaN.

    Text that is no JSON stays text.

    Examples
    --------
    >>> from_json('{"a": [1, 2], "b": [1.5, null], "c": ["x"], "d": [1, "x"]}')
    {'a': array([1, 2]), 'b': array([1.5, nan]), 'c': array(['x'], dtype=object), 'd': '[1, "x"]'}
    """
    try:
        return rich(parse_json(text))
    except ValueError:
        return text


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401
    """Parse JSON; bytes are UTF-8.

    Raises
    ------
    ValueError
        If it is none, or nested deeper than `MOST_NESTED`.

    Examples
    --------
    >>> parse_json('[1, {"a": null}]')
    [1, {'a': None}]
    >>> parse_json(200 * "[" + 200 * "]")
    Traceback (most recent call last):
    ...
    ValueError: it is nested deeper than 100
    """
    text = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
    deep = f"it is nested deeper than {MOST_NESTED}"
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(deep) from error
    if _is_deep(value):
        raise ValueError(deep)
    return value


def rich(value: Any) -> Any:  # noqa: ANN401
    """Turn parsed JSON into what AnnData holds: see `from_json`.

    A list that is no array (of objects, of lists of different lengths, of different types) is its JSON text, since no AnnData file
    can hold it.

    Examples
    --------
    >>> rich({"genes": [{"symbol": "CD4"}]})
    {'genes': '[{"symbol": "CD4"}]'}
    """
    if isinstance(value, dict):
        return {key: rich(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    shape, kinds = _shape(value), _kinds(value)
    if shape is not None and kinds == {str}:
        out = np.empty(shape, object)
        out[...] = np.array(value, dtype=object)
        return out
    if shape is not None and kinds in ({int}, {bool}) and (found := np.array(value)).dtype.kind in "bi":
        return found
    if shape is not None and kinds <= {int, float, type(None)}:
        with suppress(OverflowError):
            return np.array(value, dtype=np.float64).reshape(shape)
    return json.dumps(value)


def has_arrays(value: Any) -> bool:  # noqa: ANN401
    """Say whether there is an array in a value, which comes back with another type of numbers.

    Examples
    --------
    >>> has_arrays({"a": {"b": np.zeros(2, np.float32)}}), has_arrays([1, 2])
    (True, False)
    """
    if isinstance(value, Mapping):
        return any(has_arrays(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(has_arrays(inner) for inner in value)
    return isinstance(value, np.ndarray) and value.ndim > 0


def read_unstructured(path: Path) -> dict[str, Any]:
    """Read ``uns``, whether its values are metadata of an array, as in all files that are known, or of a group.

    Parameters
    ----------
    path : Path
        The array or group.

    Returns
    -------
    dict of str to any
        JSON is parsed; arrays of a group are read whole.

    Raises
    ------
    SourceError
        C27 for bytes, which may be pickled and so could run code if they were read; C00 for damage.
    """
    if kind_of(path) == "array":
        with open_array(path) as array:
            stored = dict(array.meta.items())
    else:
        tiledb = open_tiledb()
        with answering(path):
            refuse_wild_sizes(path)
        with answering(path), tiledb.Group(uri_of(path), "r", ctx=context()) as group:
            stored = dict(group.meta.items())
    found = {key: _value(path, key, value) for key, value in stored.items()}
    for name, kind in list_members(path).items():
        if kind == "array":
            with open_array(path / name) as array:
                refuse_broken_texts(path / name, array.schema)
                found[name] = np.asarray(array[:]) if not array.schema.sparse else dict(array[:])
    return found


def _value(path: Path, key: str, value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, bytes):
        raise SourceError(
            f"C27: {path}: the value of {key!r} is bytes, which some old writers pickled; reading that could run code of a stranger. "
            "Have it written as JSON, or leave uns out with uns=False (raggedatlas convert --no-uns)."
        )
    return from_json(value) if isinstance(value, str) else value


def _is_deep(value: Any) -> bool:  # noqa: ANN401
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_NESTED):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
    return bool(level)


def _plain(value: Any) -> Any:  # noqa: ANN401
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise NoJsonError("an infinite number")
        return None if math.isnan(value) else value
    if isinstance(value, np.ndarray):
        return _listed(value)
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise NoJsonError(f"the key {odd[0]!r}, which is no text")
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    raise NoJsonError(f"a {type(value).__name__}")


def _listed(values: NDArray[Any]) -> Any:  # noqa: ANN401
    if values.dtype.names is not None:
        raise NoJsonError("a structured array")
    if values.dtype.kind in "biu":
        return values.tolist()
    if values.dtype.kind == "f":
        if np.isinf(values).any():
            raise NoJsonError("an infinite number")
        return _plain(values.tolist()) if np.isnan(values).any() else values.tolist()
    if values.dtype.kind in "UOT":
        return _plain(values.tolist())
    raise NoJsonError(f"an array of {values.dtype}")


def _shape(value: Any) -> tuple[int, ...] | None:  # noqa: ANN401
    """Return the shape of nested lists, None where they are uneven."""
    if not isinstance(value, list):
        return ()
    inner = {_shape(each) for each in value}
    if not inner:
        return (0,)
    only = inner.pop()
    return None if inner or only is None else (len(value), *only)


def _kinds(value: Any) -> set[type]:  # noqa: ANN401
    if not isinstance(value, list):
        return {type(value)}
    return set().union(*map(_kinds, value)) if value else set()
