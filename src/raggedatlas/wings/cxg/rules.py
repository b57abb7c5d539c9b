"""The numbered rules of a CXG, and the checker of a CXG."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

from raggedatlas.errors import AtlasError
from raggedatlas.formats.soma import TiledbKind
from raggedatlas.model.validation import Checker, Rule
from raggedatlas.store.location import AnyPath
from raggedatlas.wings.cxg.inspection import list_members
from raggedatlas.wings.cxg.options import (
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
from raggedatlas.wings.cxg.tiledb_arrays import (
    ArrayAttribute,
    ArrayInfo,
    read_array_info,
)
from raggedatlas.wings.cxg.unstructured import parse_json

_AGAIN = "Write the CXG again from its source."
_CONVERT = "Write it again, e.g. by raggedatlas convert."
_TYPED = "Write the column again as float32, int32, uint8 for booleans, or text."
_JSON = "Write it as JSON text."

_RULES = (
    Rule("C00", "must", "Every array can be opened and every value decoded: nothing is damaged or truncated.", "Fetch or write the CXG again.", stated=False),
    Rule("C01", "must", "A CXG is a TileDB group.", "Pass the folder with obs, var and X; if the mark of the group was lost in copying, copy it again with hidden and empty files."),
    Rule("C02", "must", "Every dimension is uint32 and begins at 0; the one cell of cxg_group_metadata and uns may be uint64, as in all real files.", _AGAIN),
    Rule("C03", "should", "Expression values and embeddings are float32; embeddings of float64 are a matter of practice.", "Write them as float32."),
    Rule("C04", "must", "Expression values and embeddings are numbers.", _AGAIN),
    Rule("C05", "practice", "Readers take any filter, order and tile; a tile is no larger than 128 MiB, and no more than 4 Mi cells are one tile of a sparse array, so that parts can be read.", "Write it again with smaller tiles, e.g. by raggedatlas convert."),
    Rule("C06", "should", "The matrix is dense or sparse as its values are: dense from 5 % of non-zero values on, sparse up to 60 %.", "Write it in the other form; raggedatlas convert chooses automatically.", depth="full"),
    Rule("C07", "practice", "Expression values are finite: viewers compute no differences of features with NaN or infinite values.", "Replace them, or leave the features out.", depth="full", stated=False),
    Rule("C10", "must", "obs is a dense array of one axis, the cells, and is completely written.", _AGAIN),
    Rule("C11", "must", "var is a dense array of one axis, the features, and is completely written.", _AGAIN),
    Rule("C12", "must", "Each attribute of obs and var is one named column with one value per row.", "Write each column as an attribute of its own."),
    Rule("C13", "must", "A column of obs that is stored as codes has its categories in cxg_schema; before 0.3.0, and in var, codes are not known.", "List the categories in cxg_schema, or write the column as text."),
    Rule("C14", "must", "X has two axes, cells and features; if it is dense, it is completely written.", _AGAIN),
    Rule("C15", "must", "Xr is a sparse array of one axis, the cells, with the attributes '' and var, an integer.", _AGAIN),
    Rule("C16", "must", "Xc is a sparse array of one axis, the features, with the attributes '' and obs, an integer.", _AGAIN),
    Rule("C17", "must", "There is either X, or Xr and Xc.", _AGAIN),
    Rule("C18", "practice", "In version 0.3.0 a sparse matrix is Xr and Xc; X with two sparse axes is what newer writers produce, and readers support it.", "Write it again as Xr and Xc if an older reader of 0.3.0 must read it.", stated=False),
    Rule("C19", "must", "Xr and Xc have the same values.", _AGAIN, depth="full", stated=False),
    Rule("C20", "must", "Each value is within both axes and occurs once; stored zeros are a matter of practice.", _AGAIN, depth="full", stated=False),
    Rule("C21", "must", "emb is a group.", "Create a group emb with at least one embedding."),
    Rule("C22", "must", "There is at least one embedding.", "Compute one, e.g. by raggedatlas convert --compute-embedding pca."),
    Rule("C23", "must", "An embedding is a dense array of all cells and two or more coordinates, with one anonymous attribute.", "Write the embedding again, or remove it."),
    Rule("C24", "practice", "No coordinate is infinite, and not all of them are missing; their meaning would be undefined.", "Write the embedding again with numbers.", depth="full"),
    Rule("C25", "practice", "Names of embeddings do not begin with X_.", "Rename the array."),
    Rule("C26", "must", "cxg_group_metadata is an array; without it a CXG is of the unnamed version, which is a matter of practice.", "Write the array with a cxg_version."),
    Rule("C27", "must", "uns is an array whose metadata are JSON texts; bytes are never read, since they would have to be unpickled. A group, as in the description of the format, is a matter of practice.", "Write its entries as JSON texts in the metadata of an array."),
    Rule("C28", "must", "Columns are text, 32-bit numbers, codes, or booleans as uint8.", _TYPED),
    Rule("C29", "practice", "spatial in uns is a JSON object of libraries, each with image_properties (resolution, crop_coords, width, height) and scalefactors (spot_diameter_fullres, tissue_hires_scalef), and {} if there is no image: the current Explorer cannot open a CXG with anything else.", _CONVERT, stated=False),
    Rule("C30", "must", "cxg_schema is a JSON object; index names a column; types are known; categories are unique texts. It is a matter of practice if it is missing, lacks a column, or describes something that is not a column.", "Write cxg_schema as {\"index\": column, column: {\"type\": ...}}."),
    Rule("C31", "must", "Codes are between -1, which is missing, and the last category.", _AGAIN, depth="full"),
    Rule("C32", "practice", "Names in the index of obs and var are unique: of several features with the same name, viewers show one.", "Make them unique, or name another column as the index.", depth="full", stated=False),
    Rule("C40", "must", "X has one attribute, which is anonymous.", _AGAIN),
    Rule("C41", "practice", "Only X with two sparse axes, before 0.3.0, has X_col_shift: the current Explorer does not add it and shows other values.", _CONVERT),
    Rule("C42", "must", "There is no X_col_shift with a dense X.", _CONVERT),
    Rule("C43", "must", "X_col_shift has one axis, all features, and one anonymous numeric attribute of the type of X; another type is a matter of practice.", _CONVERT),
    Rule("C44", "must", "Each value is the stored value plus the shift of its column, so every shift is finite.", _AGAIN, depth="full"),
    Rule("C45", "practice", "No X_col_shift is the same as zero for every column, so it does not exist if all are zero.", "Remove X_col_shift.", depth="full"),
    Rule("C50", "must", "cxg_version exists, is a version, and one of 0.1, 0.2.0 and 0.3.0.", "Set cxg_version to the actual version."),
    Rule("C51", "must", "cxg_properties is a JSON object. title is text and about an http or https address, or null; the Explorer needs them.", _JSON),
    Rule("C52", "practice", "Readers ignore unknown metadata; names that begin with cxg_ are the format's own.", "Rename the key, or correct its spelling."),
    Rule("C53", "must", "cxg_category_colors is a JSON object of tables, one for each category, from labels to #RRGGBB. Real files name a table after its column; with the suffix _colors of the description of the format, viewers find no colour.", _JSON),
    Rule("C60", "must", "corpora is a JSON object, with schema_version and title.", _JSON),
    Rule("C61", "practice", "If titles or addresses differ, corpora takes precedence over cxg_properties, in version 0.1 the reverse.", "Set both to the same value."),
    Rule("C70", "practice", "The version fits the arrays and metadata: Xr and Xc since 0.3.0, corpora since 0.2.0.", "Set cxg_version to the actual version.", stated=False),
    Rule("C71", "must", "All arrays agree on the number of cells and features.", _AGAIN, stated=False),
)  # fmt: skip

# Problems are sorted in this order (`Checker.by_rule`), and docs/reference/cxg-rules.md has one row each.
RULES: dict[str, Rule] = {rule.id: rule for rule in _RULES}
"""Id -> rule, in order."""

# `coverage` and unknown arrays are not opened: no rule is about them.
_KNOWN = {OBS, VAR, X, XR, XC, SHIFT, GROUP_METADATA, UNS}


@dataclass
class CxgChecker(Checker[str]):
    """Checker of one CXG."""

    rules: ClassVar[Mapping[str, Rule]] = RULES
    damage: ClassVar[str] = "C00"

    path: AnyPath
    full: bool  # whether values are read
    members: Mapping[str, TiledbKind]  # name of each member of the root -> kind
    # only those that could be opened; embeddings as ``"emb/NAME"``
    arrays: dict[str, ArrayInfo] = field(default_factory=dict)
    version: str = UNNAMED  # the declared version, `UNNAMED` if there is none
    hints: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each table that was checked, by column
    shown: dict[str, Any] = field(default_factory=dict)  # table -> what its hints name as the index

    def reason(self, error: AtlasError) -> str:
        """Return the first part of the message, without the rule id."""
        # Messages of readers end in `; ` and the fix, which a problem has as a field of its own.
        return f"{str(error).removeprefix('C00: ').partition('; ')[0]}."

    def open_arrays(self) -> None:
        """Read schema and metadata of every known array and embedding; report those that cannot be opened."""
        inner = list_members(self.path / EMB) if self.members.get(EMB) == "group" else {}
        kinds = {name: kind for name, kind in self.members.items() if name in _KNOWN}
        kinds |= {f"{EMB}/{name}": kind for name, kind in inner.items()}
        for name in (name for name, kind in kinds.items() if kind == "array"):
            with self.guarded(name):
                self.arrays[name] = read_array_info(self.path / name)
        info = self.arrays.get(GROUP_METADATA)
        version = None if info is None else info.metadata.get(VERSION)
        self.version = version if isinstance(version, str) else UNNAMED

    def read_json(self, where: str, key: str, rule: str) -> Any:  # noqa: ANN401  (any JSON)
        """Read a JSON object from the metadata of an array; None if it is missing, or not a JSON object, which is reported by `rule`."""
        stored = self.arrays[where].metadata.get(key)
        if stored is None:
            return None
        try:
            value = parse_json(stored)
        except (TypeError, ValueError) as error:
            self.report(rule, where, f"{key} is not JSON: {error}.")
            return None
        if not isinstance(value, dict):
            self.report(rule, where, f"{key} is {type(value).__name__} {value!r:.40}; expected a JSON object.")
            return None
        return value

    @property
    def is_old(self) -> bool:
        """Whether its version is known and before 0.3.0."""
        # A damaged `cxg_group_metadata` also leaves `UNNAMED`; only a missing one means the oldest version.
        return self.version in ("0.1", "0.2.0") or (self.version == UNNAMED and GROUP_METADATA not in self.members)

    @property
    def embeddings(self) -> tuple[str, ...]:
        """Names of the arrays in ``emb`` that could be opened, as ``"emb/NAME"``."""
        return tuple(name for name in self.arrays if name.startswith(f"{EMB}/"))


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
        for axis in info.axes:
            is_single_cell = axis.dtype == "uint64" and (axis.low, axis.high) == (0, 0)
            if not (axis.dtype == "uint32" and axis.low == 0) and not (name in METADATA_ONLY and is_single_cell):
                start = "" if axis.low == 0 else f" from {axis.low}"
                checker.report(
                    "C02", name, f"its dimension {axis.name} is {axis.dtype}{start}; expected uint32 from 0."
                )
        if info.sparse and info.capacity > MAX_CAPACITY:
            checker.report("C05", name, f"its capacity is {info.capacity:,} cells a tile.")
        elif info.tile_bytes > MAX_TILE_BYTES:
            checker.report("C05", name, f"a tile of it takes {info.tile_bytes / 2**20:,.0f} MiB.")
        if name in FRAMES:
            _check_dense(checker, name, info, FRAMES[name], fits=len(info.axes) == 1, form=DENSE_VECTOR)
            for attribute in info.attributes:
                if not attribute.name:
                    checker.report("C12", name, "one of its attributes has no name.")
                elif attribute.dtype.fields is not None or (attribute.variable and not attribute.is_text):
                    checker.report("C12", f"{name}/{attribute.name}", "it has several values per row.")
                elif attribute.nullable:
                    checker.report("C12", f"{name}/{attribute.name}", "it may have rows without a value.", "practice")
        elif name == X:
            is_matrix = len(info.axes) == 2
            if info.sparse and not is_matrix:
                checker.report("C14", X, f"it is {_form(info)}; expected two axes.")
            elif not info.sparse:
                _check_dense(checker, X, info, "C14", fits=is_matrix, form="two axes")
            _check_values(checker, X, info, "C40")
        elif name in HALVES:
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
        elif name in checker.embeddings:
            form = "a dense array of cells and two or more coordinates"
            _check_dense(checker, name, info, "C23", fits=len(info.axes) == 2 and info.shape[1] >= 2, form=form)
            _check_values(checker, name, info, "C23")
            if name.removeprefix(f"{EMB}/").startswith(OBSM_PREFIX):
                checker.report("C25", name, f"its name begins with {OBSM_PREFIX}.")


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
    sizes: dict[str, int] = {}
    for name in (OBS, VAR):
        info = checker.arrays.get(name)
        # An axis of text has the size 0, since it is not counted.
        if info is not None and len(info.axes) == 1 and info.shape[0]:
            sizes[name] = info.shape[0]
    axes = {X: (OBS, VAR), XR: (OBS,), XC: (VAR,), SHIFT: (VAR,)} | dict.fromkeys(checker.embeddings, (OBS,))
    for name, along in axes.items():
        info = checker.arrays.get(name)
        if info is None or (name in (X, XR, XC, SHIFT) and len(info.axes) != len(along)):
            continue
        for frame, size in zip(along, info.shape, strict=False):
            expected = sizes.get(frame)
            if expected is not None and size != expected:
                what = "cells" if frame == OBS else "features"
                checker.report("C71", name, f"it has {size:,} {what}, but {frame} has {expected:,}.")


NUMBERS = ("int32", "float32", "uint32", "uint8")
"""Types of columns that are neither text nor codes; viewers serve uint32 unchanged."""


def check_columns(checker: CxgChecker) -> None:
    """Check the columns of both tables: C13, C28, C30."""
    for name in (OBS, VAR):
        if name not in checker.arrays:
            continue
        hints = checker.hints[name] = _check_hints(checker, name)
        for attribute in checker.arrays[name].attributes:
            _check_column(checker, name, attribute, hints)


def _check_hints(checker: CxgChecker, name: str) -> dict[str, Any]:
    """Read and check cxg_schema; hints that are not objects are returned empty."""
    if HINTS not in checker.arrays[name].metadata:
        checker.report("C30", name, f"it has no {HINTS}.", "practice")
        return {}
    values = checker.read_json(name, HINTS, "C30")
    if values is None:
        return {}
    columns = checker.arrays[name].names
    index = checker.shown[name] = values.get(INDEX)
    # A column called `index` has its hint under the key that names the index column.
    if index is None or isinstance(index, dict):
        checker.report("C30", name, f"{HINTS} names no index column.", "practice")
    elif index not in columns:
        checker.report("C30", name, f"{HINTS} names {index!r} as the index, which is not a column.")
    for column, hint in values.items():
        where = f"{name}/{column}"
        if column == INDEX and not isinstance(hint, dict):
            continue
        if column not in columns:
            checker.report("C30", name, f"{HINTS} describes {column!r}, which is not a column.", "practice")
            continue
        if not isinstance(hint, dict):
            checker.report("C30", where, f"its hint is {hint!r:.40}; expected a JSON object.")
            continue
        if hint.get("type") not in HINT_TYPES:
            checker.report("C30", where, f"its hint has the type {hint.get('type')!r}; expected one of {HINT_TYPES}.")
        categories = hint.get("categories")
        if categories is None:
            continue
        if not isinstance(categories, list):
            checker.report("C30", where, f"its categories are {categories!r:.40}; expected a list.")
        elif not all(isinstance(one, str | int | float) for one in categories):
            checker.report("C30", where, "its categories are neither text nor numbers.")
        elif len({str(one) for one in categories}) < len(categories):
            checker.report("C30", where, "its categories are not unique.")
        elif not all(isinstance(one, str) for one in categories):
            checker.report("C30", where, "its categories are not all text.", "practice")
    return {column: hint if isinstance(hint, dict) else {} for column, hint in values.items()}


def _check_column(checker: CxgChecker, name: str, attribute: ArrayAttribute, hints: dict[str, Any]) -> None:
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
        # Codes if there are categories, else numbers.
        if (hint or {}).get("categories") is None:
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
    elif kind == "boolean" and attribute.dtype != "uint8":
        checker.report("C28", where, f"it is a boolean stored as {attribute.dtype}; expected uint8.")
    elif attribute.dtype not in NUMBERS:
        small = attribute.dtype in ("int8", "int16", "uint16", "float16")
        if hints or not small:  # without hints codes cannot be told from numbers
            checker.report("C28", where, f"it is {attribute.dtype}.", "practice" if small else None)


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
    for key in checker.arrays[GROUP_METADATA].metadata:
        if key.startswith(_OWN) and key not in GROUP_KEYS:
            checker.report("C52", GROUP_METADATA, f"it has the unknown key {key}.")
    properties = _check_properties(checker)
    _check_colors(checker)
    corpora = _check_corpora(checker)
    for key, corpora_key in (("title", "title"), ("about", "project_link")):
        a, b = properties.get(key), corpora.get(corpora_key)
        if isinstance(a, str) and isinstance(b, str) and a and b and a != b:
            right = PROPERTIES if checker.version in TITLED_BY_PROPERTIES else CORPORA
            text = f"{key} is {a!r:.60} in {PROPERTIES} and {b!r:.60} in {CORPORA}; {right} is right."
            checker.report("C61", GROUP_METADATA, text)


def _check_properties(checker: CxgChecker) -> dict[str, Any]:
    if PROPERTIES not in checker.arrays[GROUP_METADATA].metadata:
        checker.report("C51", GROUP_METADATA, f"it has no {PROPERTIES}.", "practice")
        return {}
    values: dict[str, Any] = checker.read_json(GROUP_METADATA, PROPERTIES, "C51") or {}
    title, about = values.get("title"), values.get("about")
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


def _check_corpora(checker: CxgChecker) -> dict[str, Any]:
    values: dict[str, Any] | None = checker.read_json(GROUP_METADATA, CORPORA, "C60")
    if values is None:
        return {}
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
            if key == SPATIAL and not isinstance(values, dict):
                checker.report("C29", where, f"it is {values!r:.40}; expected a JSON object.")
            elif key == SPATIAL:
                _check_libraries(checker, values)


def _check_libraries(checker: CxgChecker, libraries: dict[str, Any]) -> None:
    where = f"{UNS}/{SPATIAL}"
    for name, library in libraries.items():
        if not isinstance(library, dict):
            checker.report("C29", where, f"{name} is {library!r:.40}; expected a library.")
            continue
        for part, keys in LIBRARY.items():
            value = library.get(part)
            missing = [key for key in keys if key not in (value if isinstance(value, dict) else {})]
            if missing:
                checker.report("C29", where, f"{name} has no {part} with {', '.join(missing)}.")
