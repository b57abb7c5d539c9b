"""The rules of arrays: which there are, their axes, attributes, types, tiles and sizes."""

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError
from raggedatlas.formats.cxg.checks_values import check_values
from raggedatlas.formats.cxg.inspection import is_cxg, list_members, tiledb_kind
from raggedatlas.formats.cxg.rules import CxgChecker
from raggedatlas.formats.cxg.schema import (
    ANONYMOUS,
    CODE_TYPES,
    COLORS,
    CORPORA,
    EMB,
    GROUP_KEYS,
    GROUP_METADATA,
    HINT_TYPES,
    HINTS,
    INDEX,
    LIBRARY,
    OBS,
    OBSM_PREFIX,
    PROPERTIES,
    SHIFT,
    SPATIAL,
    TITLED_BY_PROPERTIES,
    UNNAMED,
    UNS,
    VAR,
    VERSION,
    VERSIONS,
    XC,
    XR,
    X,
)
from raggedatlas.formats.cxg.table_encoder import count_duplicates
from raggedatlas.formats.cxg.table_reader import NUMBERED
from raggedatlas.formats.cxg.tiledb_arrays import ArrayInfo, Attribute, attribute_files, check_text_offsets, open_array
from raggedatlas.formats.cxg.unstructured import parse_json
from raggedatlas.model.arguments import checked
from raggedatlas.model.validation import Depth, Level, Problems

MAX_TILE_BYTES = 128 << 20
"""Bytes of a decoded tile beyond which a reader of a part reads far too much."""

MAX_CAPACITY = 4 << 20
"""Cells of a tile of a sparse array, likewise; real files have up to 1,024,000."""

METADATA_ONLY = (GROUP_METADATA, UNS)
"""Arrays of one cell that nobody reads."""

FRAMES = {OBS: "C10", VAR: "C11"}
HALVES = {XR: ("C15", "var"), XC: ("C16", "obs")}


def check_members(checker: CxgChecker) -> None:
    """Check which arrays there are: C10, C11, C17, C18, C21, C22."""
    kinds = checker.members
    for name, rule in FRAMES.items():
        if kinds.get(name) != "array":
            what = "a group" if kinds.get(name) else "not there"
            checker.report(rule, name, f"it is {what}, where an array belongs.")
    _check_matrix(checker)
    if kinds.get(EMB) != "group":
        what = "an array" if kinds.get(EMB) else "not there"
        checker.report("C21", EMB, f"it is {what}, where a group belongs.")
    elif not any(name.startswith(f"{EMB}/") for name in (*checker.arrays, *_unopened(checker))):
        checker.report("C22", EMB, "there is no embedding in it.")


def _unopened(checker: CxgChecker) -> list[str]:
    return [problem.path for problem in checker.problems]


def _check_matrix(checker: CxgChecker) -> None:
    there = [name for name in (X, XR, XC) if checker.members.get(name) == "array"]
    halves = [name for name in (XR, XC) if name in there]
    if not there:
        checker.report("C17", "", f"there is neither {X} nor {XR} and {XC}.")
    elif len(halves) == 1:
        missing = XC if halves == [XR] else XR
        checker.report("C17", "", f"there is {halves[0]} without {missing}.")
    elif halves and X in there:
        checker.report("C17", "", f"there is {X} beside {XR} and {XC}; readers take the latter.")
    found = checker.arrays.get(X)
    if found is not None and found.sparse and checker.version == "0.3.0" and not halves:
        checker.report("C18", X, "it is sparse and has two axes, in version 0.3.0.")


def check_arrays(checker: CxgChecker) -> None:
    """Check each array by itself: C02 to C05, C10 to C12, C14 to C16, C23, C25, C40, C43."""
    for name, found in checker.arrays.items():
        _check_domain(checker, name, found)
        _check_tiles(checker, name, found)
    for name, rule in FRAMES.items():
        if name in checker.arrays:
            _check_frame(checker, name, rule)
    if X in checker.arrays:
        _check_x(checker, checker.arrays[X])
    for name in HALVES:
        if name in checker.arrays:
            _check_half(checker, name, checker.arrays[name])
    for name in checker.embeddings:
        _check_embedding(checker, name, checker.arrays[name])


def _check_domain(checker: CxgChecker, name: str, found: ArrayInfo) -> None:
    for axis in found.axes:
        if axis.dtype == "uint32" and axis.low == 0:
            continue
        if name in METADATA_ONLY and axis.dtype == "uint64" and (axis.low, axis.high) == (0, 0):
            continue
        start = "" if axis.low == 0 else f" from {axis.low}"
        checker.report("C02", name, f"its dimension {axis.name} is {axis.dtype}{start}, where uint32 from 0 belongs.")


def _check_tiles(checker: CxgChecker, name: str, found: ArrayInfo) -> None:
    if found.sparse and found.capacity > MAX_CAPACITY:
        checker.report("C05", name, f"its capacity is {found.capacity:,} cells a tile.")
    elif found.tile_bytes > MAX_TILE_BYTES:
        checker.report("C05", name, f"a tile of it takes {found.tile_bytes / 2**20:,.0f} MiB.")


def _check_frame(checker: CxgChecker, name: str, rule: str) -> None:
    found = checker.arrays[name]
    if found.sparse or len(found.axes) != 1:
        checker.report(rule, name, f"it is {_form(found)}, where a dense array of one axis belongs.")
    elif not found.is_fully_written:
        checker.report(rule, name, _part_written(found))
    for attribute in found.attributes:
        if not attribute.name:
            checker.report("C12", name, "one of its attributes has no name.")
        elif attribute.dtype.fields is not None or (attribute.variable and not attribute.is_text):
            checker.report("C12", f"{name}/{attribute.name}", "it holds several values per row.")
        elif attribute.nullable:
            checker.report("C12", f"{name}/{attribute.name}", "it may have rows without a value.", "practice")


def _form(found: ArrayInfo) -> str:
    axes = "one axis" if len(found.axes) == 1 else f"{len(found.axes)} axes"
    return f"{'sparse' if found.sparse else 'dense'} and has {axes}"


def _part_written(found: ArrayInfo) -> str:
    if found.written is None:
        return "nothing of it is written."
    if all(span == (axis.low, axis.high) for span, axis in zip(found.written, found.axes, strict=True)):
        return "not all of it is written, and what is missing would read as fill values."
    spans = " and ".join(f"{low} to {high}" for low, high in found.written)
    return f"only {spans} of it is written; the rest would read as fill values."


def _check_values(checker: CxgChecker, name: str, found: ArrayInfo, rule: str) -> None:
    """Check the anonymous attribute of a matrix or embedding."""
    values = found.attribute(ANONYMOUS)
    if values is None or (rule in ("C40", "C23", "C43") and len(found.attributes) > 1):
        listed = ", ".join(repr(one) for one in found.names)
        checker.report(rule, name, f"its attributes are {listed}, where one anonymous belongs.")
    if values is None:
        return
    if not values.is_number:
        checker.report("C04", name, f"its values are {_type_text(values.dtype, variable=values.variable)}.")
    elif values.dtype != "float32" and name != SHIFT:
        mild: Level | None = "practice" if name.startswith(f"{EMB}/") and values.dtype == "float64" else None
        checker.report("C03", name, f"its values are {values.dtype}.", mild)


def _type_text(dtype: object, *, variable: bool) -> str:
    return "of variable length" if variable else f"{dtype}"


def _check_x(checker: CxgChecker, found: ArrayInfo) -> None:
    if len(found.axes) != 2:
        checker.report("C14", X, f"it is {_form(found)}, where two axes belong.")
    elif not found.sparse and not found.is_fully_written:
        checker.report("C14", X, _part_written(found))
    _check_values(checker, X, found, "C40")


def _check_half(checker: CxgChecker, name: str, found: ArrayInfo) -> None:
    rule, other = HALVES[name]
    if not found.sparse or len(found.axes) != 1:
        checker.report(rule, name, f"it is {_form(found)}, where a sparse array of one axis belongs.")
    index = found.attribute(other)
    if index is None or index.dtype.kind not in "iu" or index.variable:
        what = "not there" if index is None else f"{index.dtype}"
        checker.report(rule, name, f"its attribute {other} is {what}, where an integer belongs.")
    more = [one for one in found.names if one not in (ANONYMOUS, other)]
    if more and index is not None:
        checker.report(rule, name, f"it has more attributes: {', '.join(map(repr, more))}.", "practice")
    _check_values(checker, name, found, rule)


def _check_embedding(checker: CxgChecker, name: str, found: ArrayInfo) -> None:
    if found.sparse or len(found.axes) != 2 or found.shape[1] < 2:
        sizes = " x ".join(map(str, found.shape))
        checker.report(
            "C23",
            name,
            f"it is {_form(found)} of {sizes}, where a dense array of cells and two or more coordinates belongs.",
        )
    elif not found.is_fully_written:
        checker.report("C23", name, _part_written(found))
    _check_values(checker, name, found, "C23")
    if name.removeprefix(f"{EMB}/").startswith(OBSM_PREFIX):
        checker.report("C25", name, f"its name begins with {OBSM_PREFIX}.")


def check_shift(checker: CxgChecker) -> None:
    """Check the shifts of columns and what they stand beside: C41, C42, C43."""
    found, x = checker.arrays.get(SHIFT), checker.arrays.get(X)
    if found is None:
        return
    if x is not None and not x.sparse:
        checker.report("C42", SHIFT, "it stands beside a dense X.")
    elif x is None or checker.version == "0.3.0":
        beside = f"{XR} and {XC}" if x is None else f"{X} of version 0.3.0"
        checker.report("C41", SHIFT, f"it stands beside {beside}.")
    if found.sparse or len(found.axes) != 1:
        checker.report("C43", SHIFT, f"it is {_form(found)}, where a dense array of one axis belongs.")
    elif not found.is_fully_written:
        checker.report("C43", SHIFT, _part_written(found))
    _check_values(checker, SHIFT, found, "C43")
    shift, values = found.attribute(ANONYMOUS), None if x is None else x.attribute(ANONYMOUS)
    if shift is not None and values is not None and shift.is_number and shift.dtype != values.dtype:
        checker.report("C43", SHIFT, f"it is {shift.dtype}, where X is {values.dtype}.", "practice")


def check_sizes(checker: CxgChecker) -> None:
    """Check that all agree on how many cells and features there are: C71."""
    sizes = {OBS: checker.n_obs, VAR: checker.n_var}
    axes = {X: (OBS, VAR), XR: (OBS,), XC: (VAR,), SHIFT: (VAR,)} | dict.fromkeys(checker.embeddings, (OBS,))
    for name, along in axes.items():
        found = checker.arrays.get(name)
        if found is None or (name in (X, XR, XC, SHIFT) and len(found.axes) != len(along)):
            continue
        for frame, size in zip(along, found.shape, strict=False):
            wanted = sizes[frame]
            if wanted is not None and size != wanted:
                what = "cells" if frame == OBS else "features"
                checker.report("C71", name, f"it has {size:,} {what}, and {frame} has {wanted:,}.")


ROWS = 1 << 18
"""Rows of a column that are read at once."""

NUMBERS = ("int32", "float32", "uint32", "uint8")
"""Types of columns that are neither text nor codes; uint32 is served as it is."""

_BOOLEAN_FITS = ("uint8",)
_ALL_TRUE = "Set its hint to categorical with the categories False and True."


def check_columns(checker: CxgChecker) -> None:
    """Check both tables: C13, C28, C30, C31, C32."""
    for name in (OBS, VAR):
        if name not in checker.arrays:
            continue
        hints = _hints(checker, name)
        for attribute in checker.arrays[name].attributes:
            _check_column(checker, name, attribute, hints)
        if checker.full and len(checker.arrays[name].axes) == 1 and checker.arrays[name].is_readable:
            _read_columns(checker, name, hints, _named_index(checker, name))


def _hints(checker: CxgChecker, name: str) -> dict[str, Any]:
    """Read and check cxg_schema; hints that are no objects are given as empty."""
    if HINTS not in checker.arrays[name].metadata:
        checker.report("C30", name, f"it has no {HINTS}.", "practice")
        return {}
    found = checker.read_json(name, HINTS, "C30")
    if found is None:
        return {}
    columns = checker.arrays[name].names
    index = found.get(INDEX)
    if index is None or isinstance(index, dict):
        checker.report("C30", name, f"{HINTS} does not say which column is the index.", "practice")
    elif index not in columns:
        checker.report("C30", name, f"{HINTS} names {index!r} as the index, which is no column.")
    for column, hint in found.items():
        if column != INDEX or isinstance(hint, dict):
            _check_hint(checker, name, column, hint)
    return {column: hint if isinstance(hint, dict) else {} for column, hint in found.items()}


def _check_hint(checker: CxgChecker, name: str, column: str, hint: Any) -> None:  # noqa: ANN401
    where = f"{name}/{column}"
    if column not in checker.arrays[name].names:
        checker.report("C30", name, f"{HINTS} says something of {column!r}, which is no column.", "practice")
        return
    if not isinstance(hint, dict):
        checker.report("C30", where, f"its hint is {hint!r:.40}, where a JSON object belongs.")
        return
    if hint.get("type") not in HINT_TYPES:
        checker.report("C30", where, f"its hint has the type {hint.get('type')!r}, where one of {HINT_TYPES} belongs.")
    categories = hint.get("categories")
    if categories is None:
        return
    if not isinstance(categories, list):
        checker.report("C30", where, f"its categories are {categories!r:.40}, where a list belongs.")
    elif not all(isinstance(one, str | int | float) for one in categories):
        checker.report("C30", where, "its categories are neither text nor numbers.")
    elif len({str(one) for one in categories}) < len(categories):
        checker.report("C30", where, "its categories are not unique.")
    elif not all(isinstance(one, str) for one in categories):
        checker.report("C30", where, "its categories are not all text.", "practice")


def _check_column(checker: CxgChecker, name: str, attribute: Attribute, hints: dict[str, Any]) -> None:
    hint = hints.get(attribute.name)
    where = f"{name}/{attribute.name}"
    kind = None if hint is None else hint.get("type")
    if hint is None and hints and attribute.name:
        checker.report("C30", where, f"it is not in {HINTS}.", "practice")
    if attribute.is_text:
        if attribute.dtype.kind == "S":
            checker.report("C28", where, "its text is bytes or ASCII, where UTF-8 belongs.", "practice")
        return
    if kind == "categorical" and attribute.dtype.kind in "iu":
        _check_coded(checker, name, attribute, hint or {})
    elif kind == "boolean" and attribute.dtype not in _BOOLEAN_FITS:
        checker.report("C28", where, f"it is a boolean stored as {attribute.dtype}, where uint8 belongs.")
    elif attribute.dtype not in NUMBERS:
        small = attribute.dtype in ("int8", "int16", "uint16", "float16")
        if hints or not small:  # without hints nobody can tell codes from numbers
            checker.report("C28", where, f"it is {attribute.dtype}.", "practice" if small else None)


def _check_coded(checker: CxgChecker, name: str, attribute: Attribute, hint: dict[str, Any]) -> None:
    """Check integers that are hinted as categorical: codes where there are categories, else values of their own."""
    where = f"{name}/{attribute.name}"
    if hint.get("categories") is None:
        if attribute.dtype in ("int8", "int16"):
            checker.report("C13", where, f"it is of codes, {attribute.dtype}, and {HINTS} lists no categories.")
        elif attribute.dtype.itemsize == 8:
            checker.report("C28", where, f"it is {attribute.dtype}.")
    elif name == VAR:
        checker.report("C13", where, "it is of codes, which no reader decodes in var.", "practice")
    elif checker.is_old:
        checker.report("C13", where, f"it is of codes, in version {checker.version}.", "practice")
    elif attribute.dtype not in (*CODE_TYPES, "uint8"):
        checker.report(
            "C13", where, f"its codes are {attribute.dtype}, where int8, int16 or int32 belongs.", "practice"
        )


def iter_column_blocks(checker: CxgChecker, name: str, column: str) -> Iterator[NDArray[Any]]:
    """Read a column in blocks of `ROWS`."""
    found = checker.arrays[name]
    path = checker.path / name
    with open_array(path) as array:
        check_text_offsets(path, array.schema, attribute_files(array.schema, column))
        reader = array.query(attrs=[column])
        for start in range(0, found.shape[0], ROWS):
            read = reader[start : min(start + ROWS, found.shape[0])]
            yield np.asarray(read[column])


def _named_index(checker: CxgChecker, name: str) -> Any:  # noqa: ANN401  (any JSON)
    stored = checker.arrays[name].metadata.get(HINTS, "{}")
    with suppress(ValueError, TypeError):
        found = parse_json(stored)
        return found.get(INDEX) if isinstance(found, dict) else None
    return None


def _read_columns(checker: CxgChecker, name: str, hints: dict[str, Any], index: Any) -> None:  # noqa: ANN401
    for attribute in checker.arrays[name].attributes:
        hint = hints.get(attribute.name, {})
        categories = hint.get("categories")
        with checker.guarded(f"{name}/{attribute.name}"):
            if attribute.dtype.kind in "iu" and isinstance(categories, list) and hint.get("type") == "categorical":
                _read_codes(checker, name, attribute.name, len(categories))
            elif hint.get("type") == "boolean" and attribute.dtype.kind in "iu":
                _read_booleans(checker, name, attribute.name)
            elif attribute.name:
                is_index = attribute.is_text and (attribute.name == index or NUMBERED.fullmatch(attribute.name))
                _read_text(checker, name, attribute.name, hashed=bool(is_index))


def _read_text(checker: CxgChecker, name: str, column: str, *, hashed: bool) -> None:
    """Read every value; of an index, also count the names that occur before."""
    if not hashed:
        for _ in iter_column_blocks(checker, name, column):
            pass
        return
    shared = count_duplicates(partial(iter_column_blocks, checker, name, column), checker.arrays[name].shape[0])
    if shared:
        checker.report("C32", f"{name}/{column}", f"{shared:,} of its names occur before.")


def _read_codes(checker: CxgChecker, name: str, column: str, n_categories: int) -> None:
    low, high = 0, -1
    for codes in iter_column_blocks(checker, name, column):
        low, high = min(low, int(codes.min())), max(high, int(codes.max()))
    where = f"{name}/{column}"
    if high >= n_categories:
        checker.report("C31", where, f"it has the code {high:,}, and {n_categories:,} categories.")
    if low < -1:
        checker.report("C31", where, f"it has the code {low:,}, where -1 is the lowest.")


def _read_booleans(checker: CxgChecker, name: str, column: str) -> None:
    low, high = 1, 0
    for values in iter_column_blocks(checker, name, column):
        low, high = min(low, int(values.min())), max(high, int(values.max()))
    where = f"{name}/{column}"
    if low < 0 or high > 1:
        checker.report("C28", where, f"it is a boolean with the value {high if high > 1 else low}.")
    elif low == 1 and name == OBS:
        checker.report("C28", where, "every value is true, which the Explorer cannot show.", "practice", _ALL_TRUE)


_SEMVER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
_COLOR = re.compile(r"#[0-9A-Fa-f]{6}")
_ENDING = "_colors"
_OWN = "cxg_"
_NAMED = "Name the table after its column, without _colors."


def check_metadata(checker: CxgChecker) -> None:
    """Check the metadata of the whole: C26, C27, C29, C50 to C53, C60, C61, C70."""
    _check_uns(checker)
    if GROUP_METADATA not in checker.arrays:
        kind = checker.members.get(GROUP_METADATA)
        if kind == "group":
            checker.report("C26", GROUP_METADATA, "it is a group, where an array belongs.")
        elif kind is None:
            checker.report("C26", GROUP_METADATA, "it is not there, so this is the unnamed version.", "practice")
        return
    _check_version(checker)
    for key in checker.arrays[GROUP_METADATA].metadata:
        if key.startswith(_OWN) and key not in GROUP_KEYS:
            checker.report("C52", GROUP_METADATA, f"it has the unknown key {key}.")
    properties = _check_properties(checker)
    _check_colors(checker)
    corpora = _check_corpora(checker)
    _compare(checker, properties or {}, corpora or {})


def version_of(checker: CxgChecker) -> str:
    """Return the version that a CXG says it is of, `UNNAMED` where it says none."""
    found = checker.arrays.get(GROUP_METADATA)
    said = None if found is None else found.metadata.get(VERSION)
    return said if isinstance(said, str) else UNNAMED


def _check_version(checker: CxgChecker) -> None:
    stored = checker.arrays[GROUP_METADATA].metadata.get(VERSION)
    known = VERSIONS[1:]
    if stored is None:
        checker.report("C50", GROUP_METADATA, f"it has no {VERSION}.")
    elif not isinstance(stored, str):
        checker.report("C50", GROUP_METADATA, f"{VERSION} is {stored!r:.40}, where text belongs.")
    elif stored not in known and not _SEMVER.fullmatch(stored):
        checker.report("C50", GROUP_METADATA, f"{VERSION} is {stored!r:.40}, which is no version.")
    elif stored not in known:
        checker.report("C50", GROUP_METADATA, f"{VERSION} is {stored}, and {', '.join(known)} are known.")
    if checker.version in (UNNAMED, "0.1", "0.2.0") and XR in checker.arrays and stored is not None:
        checker.report("C70", GROUP_METADATA, f"it says version {checker.version}, and {XR} is there.")
    if checker.version == "0.1" and CORPORA in checker.arrays[GROUP_METADATA].metadata:
        checker.report("C70", GROUP_METADATA, f"it says version 0.1, and {CORPORA} is there.")


def _check_properties(checker: CxgChecker) -> dict[str, Any] | None:
    if PROPERTIES not in checker.arrays[GROUP_METADATA].metadata:
        checker.report("C51", GROUP_METADATA, f"it has no {PROPERTIES}.", "practice")
        return None
    found: dict[str, Any] | None = checker.read_json(GROUP_METADATA, PROPERTIES, "C51")
    title, about = (found or {}).get("title"), (found or {}).get("about")
    if title is not None and not isinstance(title, str):
        checker.report("C51", GROUP_METADATA, f"the title is {title!r:.40}, where text belongs.")
    if about is not None and not _is_address(about):
        checker.report("C51", GROUP_METADATA, f"about is {about!r:.80}, where an http or https address belongs.")
    return found


def _is_address(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        parts = urlsplit(value)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)


def _check_colors(checker: CxgChecker) -> None:
    tables = checker.read_json(GROUP_METADATA, COLORS, "C53")
    if not tables:
        return
    columns = checker.arrays[OBS].names if OBS in checker.arrays else ()
    for name, table in tables.items():
        where = f"{GROUP_METADATA}/{COLORS}/{name}"
        if name not in columns and name.endswith(_ENDING) and name.removesuffix(_ENDING) in columns:
            checker.report("C53", where, "its name ends in _colors.", "practice", _NAMED)
        elif name not in columns and OBS in checker.arrays:
            checker.report("C53", where, "obs has no such column.", "practice")
        if not isinstance(table, dict):
            checker.report("C53", where, f"it is {table!r:.40}, where a JSON object belongs.")
            continue
        wrong = [one for one in table.values() if not (isinstance(one, str) and _COLOR.fullmatch(one))]
        if wrong:
            checker.report("C53", where, f"{wrong[0]!r:.40} is no colour of the form #RRGGBB.")


def _check_corpora(checker: CxgChecker) -> dict[str, Any] | None:
    found: dict[str, Any] | None = checker.read_json(GROUP_METADATA, CORPORA, "C60")
    if found is None:
        return None
    old = found.get("version")
    schema = found.get("schema_version") or (old.get("corpora_schema_version") if isinstance(old, dict) else None)
    needed = {"schema_version": schema, "title": found.get("title")}
    if isinstance(schema, str) and schema.startswith(("1.", "2.")):
        needed["X_normalization"] = found.get("X_normalization")
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        checker.report("C60", GROUP_METADATA, f"{CORPORA} has no {' and no '.join(missing)}.", "practice")
    default = found.get("default_embedding")
    names = {name.removeprefix(OBSM_PREFIX) for name in list_members(checker.path / EMB)}
    if isinstance(default, str) and names and default.removeprefix(OBSM_PREFIX) not in names:
        checker.report("C60", GROUP_METADATA, f"the default embedding {default} is not there.", "practice")
    return found


def _compare(checker: CxgChecker, properties: dict[str, Any], corpora: dict[str, Any]) -> None:
    for mine, theirs in (("title", "title"), ("about", "project_link")):
        a, b = properties.get(mine), corpora.get(theirs)
        if isinstance(a, str) and isinstance(b, str) and a and b and a != b:
            right = PROPERTIES if checker.version in TITLED_BY_PROPERTIES else CORPORA
            said = f"{mine} is {a!r:.60} in {PROPERTIES} and {b!r:.60} in {CORPORA}; {right} is right."
            checker.report("C61", GROUP_METADATA, said)


def _check_uns(checker: CxgChecker) -> None:
    kind = checker.members.get(UNS)
    if kind == "group":
        checker.report("C27", UNS, "it is a group, which no reader looks into.", "practice")
    if UNS not in checker.arrays:
        return
    for key, value in checker.arrays[UNS].metadata.items():
        where = f"{UNS}/{key}"
        if isinstance(value, bytes):
            checker.report("C27", where, "it is bytes, which are not read.")
        elif isinstance(value, str):
            try:
                found = parse_json(value)
            except ValueError as error:
                checker.report("C27", where, f"it is no JSON: {error}.")
                continue
            if key == SPATIAL:
                _check_spatial(checker, found)


def _check_spatial(checker: CxgChecker, libraries: Any) -> None:  # noqa: ANN401  (any JSON)
    where = f"{UNS}/{SPATIAL}"
    if not isinstance(libraries, dict):
        checker.report("C29", where, f"it is {libraries!r:.40}, where a JSON object belongs.")
        return
    for name, library in libraries.items():
        if not isinstance(library, dict):
            checker.report("C29", where, f"{name} is {library!r:.40}, where a library belongs.")
            continue
        for part, keys in LIBRARY.items():
            held = library.get(part)
            missing = [key for key in keys if key not in (held if isinstance(held, dict) else {})]
            if missing:
                checker.report("C29", where, f"{name} has no {part} with {', '.join(missing)}.")


@checked
def validate(path: str | Path, level: Depth = "metadata") -> Problems:
    """List the rules that a CXG breaks (seed 004; rules are named in the reference).

    Parameters
    ----------
    path : str or Path
        Its folder.
    level : {"metadata", "full"}
        ``metadata`` reads schemas and metadata. ``full`` reads every value as well, a block at a time: memory is bounded by the
        blocks and 16 bytes per cell and per feature.

    Returns
    -------
    Problems
        Sorted by rule; empty for a CXG without fault.

    Raises
    ------
    NotFoundError
        If there is no such folder.
    SourceError
        If there is no such level.
    MissingExtraError
        If tiledb is not installed.

    Examples
    --------
    >>> from raggedatlas.testing.cxg_files import write_cxg
    >>> import tempfile
    >>> validate(write_cxg(tempfile.mkdtemp() + "/x.cxg"), "full")
    []
    >>> print(validate("tests/data")[0])
    C01 must: it is no TileDB group, ...
    """
    path = Path(path)
    if not path.exists():
        raise NotFoundError(f"There is no file or folder {path}; check the path.")
    marked = tiledb_kind(path) == "group"
    checker = CxgChecker(path, level == "full", list_members(path))
    if not marked and not is_cxg(path):
        checker.report("C01", "", "it is no TileDB group, and has no arrays obs and var.")
        return checker.problems
    if not marked:
        checker.report("C01", "", "it is no TileDB group, though it has the arrays of a CXG.")
    checker.open_arrays()
    checker.version = version_of(checker)
    check_members(checker)
    check_arrays(checker)
    check_shift(checker)
    check_sizes(checker)
    check_columns(checker)
    check_metadata(checker)
    if checker.full:
        check_values(checker)
    return checker.by_rule()
