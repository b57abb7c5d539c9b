"""Validator of CXG: checks of members, arrays, columns and metadata."""

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
from raggedatlas.formats.cxg.array_reader import NUMBERED
from raggedatlas.formats.cxg.checks_values import check_values
from raggedatlas.formats.cxg.inspection import is_cxg, list_members, tiledb_kind
from raggedatlas.formats.cxg.options import (
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
from raggedatlas.formats.cxg.rules import CxgChecker
from raggedatlas.formats.cxg.table_encoder import count_duplicates
from raggedatlas.formats.cxg.tiledb_arrays import ArrayInfo, Attribute, attribute_files, check_text_offsets, open_array
from raggedatlas.formats.cxg.unstructured import parse_json
from raggedatlas.model.arguments import checked
from raggedatlas.model.validation import Depth, Problems

MAX_TILE_BYTES = 128 << 20
"""Decoded size of a tile beyond which reading a part reads far too much."""

MAX_CAPACITY = 4 << 20
"""Cells per tile of a sparse array, likewise; real files have up to 1,024,000."""

METADATA_ONLY = (GROUP_METADATA, UNS)
"""Arrays of one cell that is never read."""

FRAMES = {OBS: "C10", VAR: "C11"}
HALVES = {XR: ("C15", "var"), XC: ("C16", "obs")}
DENSE_VECTOR = "a dense array of one axis"


def check_members(checker: CxgChecker) -> None:
    """Check which arrays exist: C10, C11, C17, C18, C21, C22."""
    kinds = checker.members
    for name, rule, kind in ((OBS, "C10", "array"), (VAR, "C11", "array"), (EMB, "C21", "group")):
        if kinds.get(name) != kind:
            text = f"it is {_with_article(kinds[name])}" if name in kinds else "it does not exist"
            checker.report(rule, name, f"{text}; expected {_with_article(kind)}.")
    # An embedding that cannot be opened is no array of the checker, but its C00 shows that `emb` is not empty.
    reported = (problem.path for problem in checker.problems)
    if kinds.get(EMB) == "group" and not any(name.startswith(f"{EMB}/") for name in (*checker.arrays, *reported)):
        checker.report("C22", EMB, "there is no embedding in it.")
    halves = [name for name in (XR, XC) if kinds.get(name) == "array"]
    if len(halves) == 1:
        checker.report("C17", "", f"there is {halves[0]} without {XC if halves == [XR] else XR}.")
    elif halves and kinds.get(X) == "array":
        checker.report("C17", "", f"there is {X} as well as {XR} and {XC}; readers use the latter.")
    elif not halves and kinds.get(X) != "array":
        checker.report("C17", "", f"there is neither {X} nor {XR} and {XC}.")
    x = checker.arrays.get(X)
    if x is not None and x.sparse and checker.version == "0.3.0" and not halves:
        checker.report("C18", X, "it is sparse and has two axes, in version 0.3.0.")


def _with_article(kind: str) -> str:
    return f"an {kind}" if kind == "array" else f"a {kind}"


def check_arrays(checker: CxgChecker) -> None:
    """Check each array by itself: C02 to C05, C10 to C12, C14 to C16, C23, C25, C40, C43."""
    for name, info in checker.arrays.items():
        _check_domain_and_tiles(checker, name, info)
        if name in FRAMES:
            _check_dense(checker, name, info, FRAMES[name], fits=len(info.axes) == 1, form=DENSE_VECTOR)
            _check_attributes(checker, name, info)
        elif name == X:
            is_matrix = len(info.axes) == 2
            if info.sparse and not is_matrix:
                checker.report("C14", X, f"it is {_form(info)}; expected two axes.")
            elif not info.sparse:
                _check_dense(checker, X, info, "C14", fits=is_matrix, form="two axes")
            _check_values(checker, X, info, "C40")
        elif name in HALVES:
            _check_half(checker, name, info)
        elif name in checker.embeddings:
            form = "a dense array of cells and two or more coordinates"
            _check_dense(checker, name, info, "C23", fits=len(info.axes) == 2 and info.shape[1] >= 2, form=form)
            _check_values(checker, name, info, "C23")
            if name.removeprefix(f"{EMB}/").startswith(OBSM_PREFIX):
                checker.report("C25", name, f"its name begins with {OBSM_PREFIX}.")


def _check_domain_and_tiles(checker: CxgChecker, name: str, info: ArrayInfo) -> None:
    for axis in info.axes:
        is_single_cell = axis.dtype == "uint64" and (axis.low, axis.high) == (0, 0)
        if not (axis.dtype == "uint32" and axis.low == 0) and not (name in METADATA_ONLY and is_single_cell):
            start = "" if axis.low == 0 else f" from {axis.low}"
            checker.report("C02", name, f"its dimension {axis.name} is {axis.dtype}{start}; expected uint32 from 0.")
    if info.sparse and info.capacity > MAX_CAPACITY:
        checker.report("C05", name, f"its capacity is {info.capacity:,} cells a tile.")
    elif info.tile_bytes > MAX_TILE_BYTES:
        checker.report("C05", name, f"a tile of it takes {info.tile_bytes / 2**20:,.0f} MiB.")


def _check_dense(checker: CxgChecker, name: str, info: ArrayInfo, rule: str, *, fits: bool, form: str) -> None:
    """Check that an array is dense, of the expected form (`fits`), and completely written."""
    if info.sparse or not fits:
        sizes = f" of {' x '.join(map(str, info.shape))}" if rule == "C23" else ""
        checker.report(rule, name, f"it is {_form(info)}{sizes}; expected {form}.")
    elif info.written is None:
        checker.report(rule, name, "nothing of it is written.")
    elif not info.is_fully_written:
        spans = " and ".join(f"{low} to {high}" for low, high in info.written)
        # `written` has outer bounds only; where they match the axes, what is missing lies in between.
        gaps = all(span == (axis.low, axis.high) for span, axis in zip(info.written, info.axes, strict=True))
        text = "not all of it" if gaps else f"only {spans} of it"
        checker.report(rule, name, f"{text} is written; the rest would be read as fill values.")


def _check_attributes(checker: CxgChecker, name: str, info: ArrayInfo) -> None:
    """Check that each attribute of a table is one column."""
    for attribute in info.attributes:
        if not attribute.name:
            checker.report("C12", name, "one of its attributes has no name.")
        elif attribute.dtype.fields is not None or (attribute.variable and not attribute.is_text):
            checker.report("C12", f"{name}/{attribute.name}", "it has several values per row.")
        elif attribute.nullable:
            checker.report("C12", f"{name}/{attribute.name}", "it may have rows without a value.", "practice")


def _form(info: ArrayInfo) -> str:
    axes = "one axis" if len(info.axes) == 1 else f"{len(info.axes)} axes"
    return f"{'sparse' if info.sparse else 'dense'} and has {axes}"


def _check_values(checker: CxgChecker, name: str, info: ArrayInfo, rule: str) -> None:
    """Check the anonymous attribute of a matrix or embedding."""
    values = info.attribute(ANONYMOUS)
    if values is None or (rule in ("C40", "C23", "C43") and len(info.attributes) > 1):
        listed = ", ".join(repr(one) for one in info.names)
        checker.report(rule, name, f"its attributes are {listed}; expected one, anonymous.")
    if values is None:
        return
    if not values.is_number:
        checker.report("C04", name, f"its values are {'of variable length' if values.variable else values.dtype}.")
    elif values.dtype != "float32" and name != SHIFT:
        is_mild = name in checker.embeddings and values.dtype == "float64"
        checker.report("C03", name, f"its values are {values.dtype}.", "practice" if is_mild else None)


def _check_half(checker: CxgChecker, name: str, info: ArrayInfo) -> None:
    rule, other = HALVES[name]
    if not info.sparse or len(info.axes) != 1:
        checker.report(rule, name, f"it is {_form(info)}; expected a sparse array of one axis.")
    index = info.attribute(other)
    if index is None or index.dtype.kind not in "iu" or index.variable:
        what = "missing" if index is None else f"{index.dtype}"
        checker.report(rule, name, f"its attribute {other} is {what}; expected an integer.")
    more = [one for one in info.names if one not in (ANONYMOUS, other)]
    if more and index is not None:
        checker.report(rule, name, f"it has more attributes: {', '.join(map(repr, more))}.", "practice")
    _check_values(checker, name, info, rule)


def check_shift(checker: CxgChecker) -> None:
    """Check the shifts of columns and the matrix that they belong to: C41, C42, C43."""
    info, x = checker.arrays.get(SHIFT), checker.arrays.get(X)
    if info is None:
        return
    if x is not None and not x.sparse:
        checker.report("C42", SHIFT, "it exists with a dense X.")
    elif x is None or checker.version == "0.3.0":
        matrix = f"{XR} and {XC}" if x is None else f"{X} of version 0.3.0"
        checker.report("C41", SHIFT, f"it exists with {matrix}.")
    _check_dense(checker, SHIFT, info, "C43", fits=len(info.axes) == 1, form=DENSE_VECTOR)
    _check_values(checker, SHIFT, info, "C43")
    shift, values = info.attribute(ANONYMOUS), None if x is None else x.attribute(ANONYMOUS)
    if shift is not None and values is not None and shift.is_number and shift.dtype != values.dtype:
        checker.report("C43", SHIFT, f"it is {shift.dtype}; X is {values.dtype}.", "practice")


def check_sizes(checker: CxgChecker) -> None:
    """Check that all arrays agree on the numbers of cells and features: C71."""
    sizes = {OBS: checker.n_obs, VAR: checker.n_var}
    axes = {X: (OBS, VAR), XR: (OBS,), XC: (VAR,), SHIFT: (VAR,)} | dict.fromkeys(checker.embeddings, (OBS,))
    for name, along in axes.items():
        info = checker.arrays.get(name)
        if info is None or (name in (X, XR, XC, SHIFT) and len(info.axes) != len(along)):
            continue
        for frame, size in zip(along, info.shape, strict=False):
            expected = sizes[frame]
            if expected is not None and size != expected:
                what = "cells" if frame == OBS else "features"
                checker.report("C71", name, f"it has {size:,} {what}, but {frame} has {expected:,}.")


ROWS = 1 << 18
"""Rows of a column read at once."""

NUMBERS = ("int32", "float32", "uint32", "uint8")
"""Types of columns that are neither text nor codes; viewers serve uint32 unchanged."""

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
            _read_columns(checker, name, hints)


def _hints(checker: CxgChecker, name: str) -> dict[str, Any]:
    """Read and check cxg_schema; hints that are not objects are returned empty."""
    if HINTS not in checker.arrays[name].metadata:
        checker.report("C30", name, f"it has no {HINTS}.", "practice")
        return {}
    values = checker.read_json(name, HINTS, "C30")
    if values is None:
        return {}
    columns = checker.arrays[name].names
    index = values.get(INDEX)
    # A column called `index` has its hint under the key that names the index column.
    if index is None or isinstance(index, dict):
        checker.report("C30", name, f"{HINTS} names no index column.", "practice")
    elif index not in columns:
        checker.report("C30", name, f"{HINTS} names {index!r} as the index, which is not a column.")
    for column, hint in values.items():
        if column != INDEX or isinstance(hint, dict):
            _check_hint(checker, name, column, hint)
    return {column: hint if isinstance(hint, dict) else {} for column, hint in values.items()}


def _check_hint(checker: CxgChecker, name: str, column: str, hint: Any) -> None:  # noqa: ANN401
    where = f"{name}/{column}"
    if column not in checker.arrays[name].names:
        checker.report("C30", name, f"{HINTS} describes {column!r}, which is not a column.", "practice")
        return
    if not isinstance(hint, dict):
        checker.report("C30", where, f"its hint is {hint!r:.40}; expected a JSON object.")
        return
    if hint.get("type") not in HINT_TYPES:
        checker.report("C30", where, f"its hint has the type {hint.get('type')!r}; expected one of {HINT_TYPES}.")
    categories = hint.get("categories")
    if categories is None:
        return
    if not isinstance(categories, list):
        checker.report("C30", where, f"its categories are {categories!r:.40}; expected a list.")
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
            checker.report("C28", where, "its text is bytes or ASCII; expected UTF-8.", "practice")
        return
    if kind == "categorical" and attribute.dtype.kind in "iu":
        _check_coded(checker, name, attribute, hint or {})
    elif kind == "boolean" and attribute.dtype != "uint8":
        checker.report("C28", where, f"it is a boolean stored as {attribute.dtype}; expected uint8.")
    elif attribute.dtype not in NUMBERS:
        small = attribute.dtype in ("int8", "int16", "uint16", "float16")
        if hints or not small:  # without hints codes cannot be told from numbers
            checker.report("C28", where, f"it is {attribute.dtype}.", "practice" if small else None)


def _check_coded(checker: CxgChecker, name: str, attribute: Attribute, hint: dict[str, Any]) -> None:
    """Check integers that are hinted as categorical: codes if there are categories, else numbers."""
    where = f"{name}/{attribute.name}"
    if hint.get("categories") is None:
        if attribute.dtype in ("int8", "int16"):
            checker.report("C13", where, f"it has codes of {attribute.dtype}, but {HINTS} lists no categories.")
        elif attribute.dtype.itemsize == 8:
            checker.report("C28", where, f"it is {attribute.dtype}.")
    elif name == VAR:
        checker.report("C13", where, "it has codes, which no reader decodes in var.", "practice")
    elif checker.is_old:
        checker.report("C13", where, f"it has codes, in version {checker.version}.", "practice")
    elif attribute.dtype not in (*CODE_TYPES, "uint8"):
        checker.report("C13", where, f"its codes are {attribute.dtype}; expected int8, int16 or int32.", "practice")


def iter_column_blocks(checker: CxgChecker, name: str, column: str) -> Iterator[NDArray[Any]]:
    """Read a column in blocks of `ROWS`."""
    values = checker.arrays[name]
    path = checker.path / name
    with open_array(path) as array:
        check_text_offsets(path, array.schema, attribute_files(array.schema, column))
        # One column at a time: TileDB crashes if several of a damaged array are read at once.
        reader = array.query(attrs=[column])
        for start in range(0, values.shape[0], ROWS):
            read = reader[start : min(start + ROWS, values.shape[0])]
            yield np.asarray(read[column])


def _read_index_name(checker: CxgChecker, name: str) -> Any:  # noqa: ANN401  (any JSON)
    # Hints that are not a JSON object were reported by `_hints`.
    with suppress(ValueError, TypeError, AttributeError):
        return parse_json(checker.arrays[name].metadata.get(HINTS, "{}")).get(INDEX)
    return None


def _read_columns(checker: CxgChecker, name: str, hints: dict[str, Any]) -> None:
    index = _read_index_name(checker, name)
    for attribute in checker.arrays[name].attributes:
        hint = hints.get(attribute.name, {})
        categories = hint.get("categories")
        # Within the loop: a damaged column must not hide problems of the others.
        with checker.guarded(f"{name}/{attribute.name}"):
            if attribute.dtype.kind in "iu" and isinstance(categories, list) and hint.get("type") == "categorical":
                _read_codes(checker, name, attribute.name, len(categories))
            elif hint.get("type") == "boolean" and attribute.dtype.kind in "iu":
                _read_booleans(checker, name, attribute.name)
            elif attribute.name:
                # The shown index and the original one (`TableInfo.index`) may be two columns.
                is_index = attribute.is_text and (attribute.name == index or NUMBERED.fullmatch(attribute.name))
                _read_text(checker, name, attribute.name, hashed=bool(is_index))


def _read_text(checker: CxgChecker, name: str, column: str, *, hashed: bool) -> None:
    """Read every value; of an index, also count repeated names."""
    if not hashed:
        # Reading is the check: damage raises, which `guarded` reports.
        for _ in iter_column_blocks(checker, name, column):
            pass
        return
    n_repeated = count_duplicates(partial(iter_column_blocks, checker, name, column), checker.arrays[name].shape[0])
    if n_repeated:
        checker.report("C32", f"{name}/{column}", f"{n_repeated:,} of its names occur before.")


def _read_extent(checker: CxgChecker, name: str, column: str) -> tuple[int, int]:
    """Return the lowest and highest value of a column, (0, -1) without rows."""
    extents = [(int(v.min()), int(v.max())) for v in iter_column_blocks(checker, name, column)]
    # The extent (0, -1) breaks none of the bounds that callers test.
    lows, highs = zip(*extents, strict=True) if extents else ((0,), (-1,))
    return min(lows), max(highs)


def _read_codes(checker: CxgChecker, name: str, column: str, n_categories: int) -> None:
    low, high = _read_extent(checker, name, column)
    where = f"{name}/{column}"
    if high >= n_categories:
        checker.report("C31", where, f"it has the code {high:,}, but {n_categories:,} categories.")
    if low < -1:
        checker.report("C31", where, f"it has the code {low:,}; expected -1 or more.")


def _read_booleans(checker: CxgChecker, name: str, column: str) -> None:
    low, high = _read_extent(checker, name, column)
    where = f"{name}/{column}"
    if low < 0 or high > 1:
        checker.report("C28", where, f"it is a boolean with the value {high if high > 1 else low}.")
    # Viewers number the values that occur: the code 1 is beyond the only one, see `_Encoder._booleans`.
    elif low == 1 and name == OBS:
        checker.report("C28", where, "every value is true, which the Explorer cannot show.", "practice", _ALL_TRUE)


_SEMVER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
_COLOR = re.compile(r"#[0-9A-Fa-f]{6}")
_ENDING = "_colors"
_OWN = "cxg_"
_NAMED = "Name the table after its column, without _colors."


def check_metadata(checker: CxgChecker) -> None:
    """Check the metadata of the CXG: C26, C27, C29, C50 to C53, C60, C61, C70."""
    _check_uns(checker)
    if GROUP_METADATA not in checker.arrays:
        kind = checker.members.get(GROUP_METADATA)
        if kind == "group":
            checker.report("C26", GROUP_METADATA, "it is a group; expected an array.")
        elif kind is None:
            checker.report("C26", GROUP_METADATA, "it does not exist, so this is the unnamed version.", "practice")
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
    """Return the declared version of a CXG, `UNNAMED` if there is none."""
    info = checker.arrays.get(GROUP_METADATA)
    version = None if info is None else info.metadata.get(VERSION)
    return version if isinstance(version, str) else UNNAMED


def _check_version(checker: CxgChecker) -> None:
    stored = checker.arrays[GROUP_METADATA].metadata.get(VERSION)
    known = VERSIONS[1:]
    if stored is None:
        checker.report("C50", GROUP_METADATA, f"it has no {VERSION}.")
    elif not isinstance(stored, str):
        checker.report("C50", GROUP_METADATA, f"{VERSION} is {stored!r:.40}; expected text.")
    elif stored not in known and not _SEMVER.fullmatch(stored):
        checker.report("C50", GROUP_METADATA, f"{VERSION} is {stored!r:.40}, which is not a version.")
    elif stored not in known:
        checker.report("C50", GROUP_METADATA, f"{VERSION} is {stored}; known are {', '.join(known)}.")
    # A missing version is reported above (C50) and claims nothing that `Xr` could contradict.
    if checker.version in (UNNAMED, "0.1", "0.2.0") and XR in checker.arrays and stored is not None:
        checker.report("C70", GROUP_METADATA, f"it declares version {checker.version}, but {XR} exists.")
    if checker.version == "0.1" and CORPORA in checker.arrays[GROUP_METADATA].metadata:
        checker.report("C70", GROUP_METADATA, f"it declares version 0.1, but {CORPORA} exists.")


def _check_properties(checker: CxgChecker) -> dict[str, Any] | None:
    if PROPERTIES not in checker.arrays[GROUP_METADATA].metadata:
        checker.report("C51", GROUP_METADATA, f"it has no {PROPERTIES}.", "practice")
        return None
    values: dict[str, Any] | None = checker.read_json(GROUP_METADATA, PROPERTIES, "C51")
    title, about = (values or {}).get("title"), (values or {}).get("about")
    if title is not None and not isinstance(title, str):
        checker.report("C51", GROUP_METADATA, f"the title is {title!r:.40}; expected text.")
    if about is not None and not _is_address(about):
        checker.report("C51", GROUP_METADATA, f"about is {about!r:.80}; expected an http or https address.")
    return values


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
            checker.report("C53", where, f"it is {table!r:.40}; expected a JSON object.")
            continue
        wrong = [one for one in table.values() if not (isinstance(one, str) and _COLOR.fullmatch(one))]
        if wrong:
            checker.report("C53", where, f"{wrong[0]!r:.40} is not a colour of the form #RRGGBB.")


def _check_corpora(checker: CxgChecker) -> dict[str, Any] | None:
    values: dict[str, Any] | None = checker.read_json(GROUP_METADATA, CORPORA, "C60")
    if values is None:
        return None
    # Old schemas keep their number in an object `version`.
    old = values.get("version")
    schema = values.get("schema_version") or (old.get("corpora_schema_version") if isinstance(old, dict) else None)
    needed = {"schema_version": schema, "title": values.get("title")}
    if isinstance(schema, str) and schema.startswith(("1.", "2.")):
        needed["X_normalization"] = values.get("X_normalization")
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        checker.report("C60", GROUP_METADATA, f"{CORPORA} has no {' and no '.join(missing)}.", "practice")
    default = values.get("default_embedding")
    names = {name.removeprefix(OBSM_PREFIX) for name in list_members(checker.path / EMB)}
    # Schemas name embeddings as AnnData does, `X_umap`; a CXG has `umap`.
    if isinstance(default, str) and names and default.removeprefix(OBSM_PREFIX) not in names:
        checker.report("C60", GROUP_METADATA, f"the default embedding {default} does not exist.", "practice")
    return values


def _compare(checker: CxgChecker, properties: dict[str, Any], corpora: dict[str, Any]) -> None:
    for key, corpora_key in (("title", "title"), ("about", "project_link")):
        a, b = properties.get(key), corpora.get(corpora_key)
        if isinstance(a, str) and isinstance(b, str) and a and b and a != b:
            right = PROPERTIES if checker.version in TITLED_BY_PROPERTIES else CORPORA
            text = f"{key} is {a!r:.60} in {PROPERTIES} and {b!r:.60} in {CORPORA}; {right} is right."
            checker.report("C61", GROUP_METADATA, text)


def _check_uns(checker: CxgChecker) -> None:
    kind = checker.members.get(UNS)
    if kind == "group":
        checker.report("C27", UNS, "it is a group, which no reader opens.", "practice")
    if UNS not in checker.arrays:
        return
    for key, value in checker.arrays[UNS].metadata.items():
        where = f"{UNS}/{key}"
        if isinstance(value, bytes):
            checker.report("C27", where, "it is bytes, which are not read.")
        elif isinstance(value, str):
            try:
                values = parse_json(value)
            except ValueError as error:
                checker.report("C27", where, f"it is not JSON: {error}.")
                continue
            if key == SPATIAL:
                _check_spatial(checker, values)


def _check_spatial(checker: CxgChecker, libraries: Any) -> None:  # noqa: ANN401  (any JSON)
    where = f"{UNS}/{SPATIAL}"
    if not isinstance(libraries, dict):
        checker.report("C29", where, f"it is {libraries!r:.40}; expected a JSON object.")
        return
    for name, library in libraries.items():
        if not isinstance(library, dict):
            checker.report("C29", where, f"{name} is {library!r:.40}; expected a library.")
            continue
        for part, keys in LIBRARY.items():
            value = library.get(part)
            missing = [key for key in keys if key not in (value if isinstance(value, dict) else {})]
            if missing:
                checker.report("C29", where, f"{name} has no {part} with {', '.join(missing)}.")


@checked
def validate(path: str | Path, level: Depth = "metadata") -> Problems:
    """List the rules that a CXG breaks (seed 004; the reference lists the rules).

    Parameters
    ----------
    path : str or Path
        Path of the folder.
    level : {"metadata", "full"}
        ``metadata`` reads schemas and metadata. ``full`` reads every value as well, a block at a time: memory is bounded by the
        blocks and 16 bytes per cell and per feature.

    Returns
    -------
    Problems
        Sorted by rule; empty for a valid CXG.

    Raises
    ------
    NotFoundError
        If the folder does not exist.
    SourceError
        If the level is unknown.
    MissingExtraError
        If tiledb is not installed.

    Examples
    --------
    >>> from raggedatlas.testing.cxg_files import write_cxg
    >>> import tempfile
    >>> validate(write_cxg(tempfile.mkdtemp() + "/x.cxg"), "full")
    []
    >>> print(validate("tests/data")[0])
    C01 must: it is not a TileDB group, ...
    """
    path = Path(path)
    if not path.exists():
        raise NotFoundError(f"File or folder {path} does not exist; check the path.")
    marked = tiledb_kind(path) == "group"
    checker = CxgChecker(path, level == "full", list_members(path))
    # Nothing else is checked here: every rule would be broken in any other folder.
    if not marked and not is_cxg(path):
        checker.report("C01", "", "it is not a TileDB group, and has no arrays obs and var.")
        return checker.problems
    if not marked:
        checker.report("C01", "", "it is not a TileDB group, although it has the arrays of a CXG.")
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
