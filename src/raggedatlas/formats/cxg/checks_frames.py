"""The rules of obs and var: what columns hold, and what cxg_schema says of them."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.formats.cxg.arrays import Attribute
from raggedatlas.formats.cxg.checking import Checking
from raggedatlas.formats.cxg.engine import open_array
from raggedatlas.formats.cxg.frames import NUMBERED
from raggedatlas.formats.cxg.naming import count_shared
from raggedatlas.formats.cxg.schema import CODE_TYPES, HINT_TYPES, HINTS, INDEX, OBS, VAR
from raggedatlas.formats.cxg.soundness import file_names, refuse_broken_texts
from raggedatlas.formats.cxg.unstructured import parse_json

ROWS = 1 << 18
"""Rows of a column that are read at once."""

NUMBERS = ("int32", "float32", "uint32", "uint8")
"""Types of columns that are neither text nor codes; uint32 is served as it is."""

_BOOLEAN_FITS = ("uint8",)
_ALL_TRUE = "Set its hint to categorical with the categories False and True."


def check_columns(checking: Checking) -> None:
    """Check both tables: C13, C28, C30, C31, C32."""
    for name in (OBS, VAR):
        if name not in checking.arrays:
            continue
        hints = _hints(checking, name)
        for attribute in checking.arrays[name].attributes:
            _check_column(checking, name, attribute, hints)
        if checking.full and len(checking.arrays[name].axes) == 1 and checking.arrays[name].is_readable:
            _read_columns(checking, name, hints, _named_index(checking, name))


def _hints(checking: Checking, name: str) -> dict[str, Any]:
    """Read and check cxg_schema; hints that are no objects are given as empty."""
    if HINTS not in checking.arrays[name].metadata:
        checking.report("C30", name, f"it has no {HINTS}.", "practice")
        return {}
    found = checking.json_of(name, HINTS, "C30")
    if found is None:
        return {}
    columns = checking.arrays[name].names
    index = found.get(INDEX)
    if index is None or isinstance(index, dict):
        checking.report("C30", name, f"{HINTS} does not say which column is the index.", "practice")
    elif index not in columns:
        checking.report("C30", name, f"{HINTS} names {index!r} as the index, which is no column.")
    for column, hint in found.items():
        if column != INDEX or isinstance(hint, dict):
            _check_hint(checking, name, column, hint)
    return {column: hint if isinstance(hint, dict) else {} for column, hint in found.items()}


def _check_hint(checking: Checking, name: str, column: str, hint: Any) -> None:  # noqa: ANN401
    where = f"{name}/{column}"
    if column not in checking.arrays[name].names:
        checking.report("C30", name, f"{HINTS} says something of {column!r}, which is no column.", "practice")
        return
    if not isinstance(hint, dict):
        checking.report("C30", where, f"its hint is {hint!r:.40}, where a JSON object belongs.")
        return
    if hint.get("type") not in HINT_TYPES:
        checking.report("C30", where, f"its hint has the type {hint.get('type')!r}, where one of {HINT_TYPES} belongs.")
    categories = hint.get("categories")
    if categories is None:
        return
    if not isinstance(categories, list):
        checking.report("C30", where, f"its categories are {categories!r:.40}, where a list belongs.")
    elif not all(isinstance(one, str | int | float) for one in categories):
        checking.report("C30", where, "its categories are neither text nor numbers.")
    elif len({str(one) for one in categories}) < len(categories):
        checking.report("C30", where, "its categories are not unique.")
    elif not all(isinstance(one, str) for one in categories):
        checking.report("C30", where, "its categories are not all text.", "practice")


def _check_column(checking: Checking, name: str, attribute: Attribute, hints: dict[str, Any]) -> None:
    hint = hints.get(attribute.name)
    where = f"{name}/{attribute.name}"
    kind = None if hint is None else hint.get("type")
    if hint is None and hints and attribute.name:
        checking.report("C30", where, f"it is not in {HINTS}.", "practice")
    if attribute.is_text:
        if attribute.dtype.kind == "S":
            checking.report("C28", where, "its text is bytes or ASCII, where UTF-8 belongs.", "practice")
        return
    if kind == "categorical" and attribute.dtype.kind in "iu":
        _check_coded(checking, name, attribute, hint or {})
    elif kind == "boolean" and attribute.dtype not in _BOOLEAN_FITS:
        checking.report("C28", where, f"it is a boolean stored as {attribute.dtype}, where uint8 belongs.")
    elif attribute.dtype not in NUMBERS:
        small = attribute.dtype in ("int8", "int16", "uint16", "float16")
        if hints or not small:  # without hints nobody can tell codes from numbers
            checking.report("C28", where, f"it is {attribute.dtype}.", "practice" if small else None)


def _check_coded(checking: Checking, name: str, attribute: Attribute, hint: dict[str, Any]) -> None:
    """Check integers that are hinted as categorical: codes where there are categories, else values of their own."""
    where = f"{name}/{attribute.name}"
    if hint.get("categories") is None:
        if attribute.dtype in ("int8", "int16"):
            checking.report("C13", where, f"it is of codes, {attribute.dtype}, and {HINTS} lists no categories.")
        elif attribute.dtype.itemsize == 8:
            checking.report("C28", where, f"it is {attribute.dtype}.")
    elif name == VAR:
        checking.report("C13", where, "it is of codes, which no reader decodes in var.", "practice")
    elif checking.is_old:
        checking.report("C13", where, f"it is of codes, in version {checking.version}.", "practice")
    elif attribute.dtype not in (*CODE_TYPES, "uint8"):
        checking.report(
            "C13", where, f"its codes are {attribute.dtype}, where int8, int16 or int32 belongs.", "practice"
        )


def blocks_of(checking: Checking, name: str, column: str) -> Iterator[NDArray[Any]]:
    """Read a column in blocks of `ROWS`."""
    found = checking.arrays[name]
    path = checking.path / name
    with open_array(path) as array:
        refuse_broken_texts(path, array.schema, file_names(array.schema, column))
        reader = array.query(attrs=[column])
        for start in range(0, found.shape[0], ROWS):
            read = reader[start : min(start + ROWS, found.shape[0])]
            yield np.asarray(read[column])


def _named_index(checking: Checking, name: str) -> Any:  # noqa: ANN401  (any JSON)
    stored = checking.arrays[name].metadata.get(HINTS, "{}")
    with suppress(ValueError, TypeError):
        found = parse_json(stored)
        return found.get(INDEX) if isinstance(found, dict) else None
    return None


def _read_columns(checking: Checking, name: str, hints: dict[str, Any], index: Any) -> None:  # noqa: ANN401
    for attribute in checking.arrays[name].attributes:
        hint = hints.get(attribute.name, {})
        categories = hint.get("categories")
        with checking.guarded(f"{name}/{attribute.name}"):
            if attribute.dtype.kind in "iu" and isinstance(categories, list) and hint.get("type") == "categorical":
                _read_codes(checking, name, attribute.name, len(categories))
            elif hint.get("type") == "boolean" and attribute.dtype.kind in "iu":
                _read_booleans(checking, name, attribute.name)
            elif attribute.name:
                is_index = attribute.is_text and (attribute.name == index or NUMBERED.fullmatch(attribute.name))
                _read_text(checking, name, attribute.name, hashed=bool(is_index))


def _read_text(checking: Checking, name: str, column: str, *, hashed: bool) -> None:
    """Read every value; of an index, also count the names that occur before."""
    if not hashed:
        for _ in blocks_of(checking, name, column):
            pass
        return
    shared = count_shared(partial(blocks_of, checking, name, column), checking.arrays[name].shape[0])
    if shared:
        checking.report("C32", f"{name}/{column}", f"{shared:,} of its names occur before.")


def _read_codes(checking: Checking, name: str, column: str, n_categories: int) -> None:
    low, high = 0, -1
    for codes in blocks_of(checking, name, column):
        low, high = min(low, int(codes.min())), max(high, int(codes.max()))
    where = f"{name}/{column}"
    if high >= n_categories:
        checking.report("C31", where, f"it has the code {high:,}, and {n_categories:,} categories.")
    if low < -1:
        checking.report("C31", where, f"it has the code {low:,}, where -1 is the lowest.")


def _read_booleans(checking: Checking, name: str, column: str) -> None:
    low, high = 1, 0
    for values in blocks_of(checking, name, column):
        low, high = min(low, int(values.min())), max(high, int(values.max()))
    where = f"{name}/{column}"
    if low < 0 or high > 1:
        checking.report("C28", where, f"it is a boolean with the value {high if high > 1 else low}.")
    elif low == 1 and name == OBS:
        checking.report("C28", where, "every value is true, which the Explorer cannot show.", "practice", _ALL_TRUE)
