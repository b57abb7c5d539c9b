"""The rules of arrays: which there are, their axes, attributes, types, tiles and sizes."""

from raggedatlas.formats.cxg.arrays import StoredArray
from raggedatlas.formats.cxg.checking import Checking
from raggedatlas.formats.cxg.schema import (
    ANONYMOUS,
    EMB,
    GROUP_METADATA,
    OBS,
    OBSM_PREFIX,
    SHIFT,
    UNS,
    VAR,
    XC,
    XR,
    X,
)
from raggedatlas.model.problems import Level

LARGEST_TILE = 128 << 20
"""Bytes of a decoded tile beyond which a reader of a part reads far too much."""

LARGEST_CAPACITY = 4 << 20
"""Cells of a tile of a sparse array, likewise; real files have up to 1,024,000."""

METADATA_ONLY = (GROUP_METADATA, UNS)
"""Arrays of one cell that nobody reads."""

FRAMES = {OBS: "C10", VAR: "C11"}
HALVES = {XR: ("C15", "var"), XC: ("C16", "obs")}


def check_members(checking: Checking) -> None:
    """Check which arrays there are: C10, C11, C17, C18, C21, C22."""
    kinds = checking.members
    for name, rule in FRAMES.items():
        if kinds.get(name) != "array":
            what = "a group" if kinds.get(name) else "not there"
            checking.report(rule, name, f"it is {what}, where an array belongs.")
    _check_matrix(checking)
    if kinds.get(EMB) != "group":
        what = "an array" if kinds.get(EMB) else "not there"
        checking.report("C21", EMB, f"it is {what}, where a group belongs.")
    elif not any(name.startswith(f"{EMB}/") for name in (*checking.arrays, *_unopened(checking))):
        checking.report("C22", EMB, "there is no embedding in it.")


def _unopened(checking: Checking) -> list[str]:
    return [problem.path for problem in checking.problems]


def _check_matrix(checking: Checking) -> None:
    there = [name for name in (X, XR, XC) if checking.members.get(name) == "array"]
    halves = [name for name in (XR, XC) if name in there]
    if not there:
        checking.report("C17", "", f"there is neither {X} nor {XR} and {XC}.")
    elif len(halves) == 1:
        missing = XC if halves == [XR] else XR
        checking.report("C17", "", f"there is {halves[0]} without {missing}.")
    elif halves and X in there:
        checking.report("C17", "", f"there is {X} beside {XR} and {XC}; readers take the latter.")
    found = checking.arrays.get(X)
    if found is not None and found.sparse and checking.version == "0.3.0" and not halves:
        checking.report("C18", X, "it is sparse and has two axes, in version 0.3.0.")


def check_arrays(checking: Checking) -> None:
    """Check each array by itself: C02 to C05, C10 to C12, C14 to C16, C23, C25, C40, C43."""
    for name, found in checking.arrays.items():
        _check_domain(checking, name, found)
        _check_tiles(checking, name, found)
    for name, rule in FRAMES.items():
        if name in checking.arrays:
            _check_frame(checking, name, rule)
    if X in checking.arrays:
        _check_x(checking, checking.arrays[X])
    for name in HALVES:
        if name in checking.arrays:
            _check_half(checking, name, checking.arrays[name])
    for name in checking.embeddings:
        _check_embedding(checking, name, checking.arrays[name])


def _check_domain(checking: Checking, name: str, found: StoredArray) -> None:
    for axis in found.axes:
        if axis.dtype == "uint32" and axis.low == 0:
            continue
        if name in METADATA_ONLY and axis.dtype == "uint64" and (axis.low, axis.high) == (0, 0):
            continue
        start = "" if axis.low == 0 else f" from {axis.low}"
        checking.report("C02", name, f"its dimension {axis.name} is {axis.dtype}{start}, where uint32 from 0 belongs.")


def _check_tiles(checking: Checking, name: str, found: StoredArray) -> None:
    if found.sparse and found.capacity > LARGEST_CAPACITY:
        checking.report("C05", name, f"its capacity is {found.capacity:,} cells a tile.")
    elif found.tile_bytes > LARGEST_TILE:
        checking.report("C05", name, f"a tile of it takes {found.tile_bytes / 2**20:,.0f} MiB.")


def _check_frame(checking: Checking, name: str, rule: str) -> None:
    found = checking.arrays[name]
    if found.sparse or len(found.axes) != 1:
        checking.report(rule, name, f"it is {_form(found)}, where a dense array of one axis belongs.")
    elif not found.is_whole:
        checking.report(rule, name, _part_written(found))
    for attribute in found.attributes:
        if not attribute.name:
            checking.report("C12", name, "one of its attributes has no name.")
        elif attribute.dtype.fields is not None or (attribute.variable and not attribute.is_text):
            checking.report("C12", f"{name}/{attribute.name}", "it holds several values per row.")
        elif attribute.nullable:
            checking.report("C12", f"{name}/{attribute.name}", "it may have rows without a value.", "practice")


def _form(found: StoredArray) -> str:
    axes = "one axis" if len(found.axes) == 1 else f"{len(found.axes)} axes"
    return f"{'sparse' if found.sparse else 'dense'} and has {axes}"


def _part_written(found: StoredArray) -> str:
    if found.written is None:
        return "nothing of it is written."
    if all(span == (axis.low, axis.high) for span, axis in zip(found.written, found.axes, strict=True)):
        return "not all of it is written, and what is missing would read as fill values."
    spans = " and ".join(f"{low} to {high}" for low, high in found.written)
    return f"only {spans} of it is written; the rest would read as fill values."


def _check_values(checking: Checking, name: str, found: StoredArray, rule: str) -> None:
    """Check the anonymous attribute of a matrix or embedding."""
    values = found.attribute(ANONYMOUS)
    if values is None or (rule in ("C40", "C23", "C43") and len(found.attributes) > 1):
        listed = ", ".join(repr(one) for one in found.names)
        checking.report(rule, name, f"its attributes are {listed}, where one anonymous belongs.")
    if values is None:
        return
    if not values.is_number:
        checking.report("C04", name, f"its values are {_type_text(values.dtype, variable=values.variable)}.")
    elif values.dtype != "float32" and name != SHIFT:
        mild: Level | None = "practice" if name.startswith(f"{EMB}/") and values.dtype == "float64" else None
        checking.report("C03", name, f"its values are {values.dtype}.", mild)


def _type_text(dtype: object, *, variable: bool) -> str:
    return "of variable length" if variable else f"{dtype}"


def _check_x(checking: Checking, found: StoredArray) -> None:
    if len(found.axes) != 2:
        checking.report("C14", X, f"it is {_form(found)}, where two axes belong.")
    elif not found.sparse and not found.is_whole:
        checking.report("C14", X, _part_written(found))
    _check_values(checking, X, found, "C40")


def _check_half(checking: Checking, name: str, found: StoredArray) -> None:
    rule, other = HALVES[name]
    if not found.sparse or len(found.axes) != 1:
        checking.report(rule, name, f"it is {_form(found)}, where a sparse array of one axis belongs.")
    index = found.attribute(other)
    if index is None or index.dtype.kind not in "iu" or index.variable:
        what = "not there" if index is None else f"{index.dtype}"
        checking.report(rule, name, f"its attribute {other} is {what}, where an integer belongs.")
    more = [one for one in found.names if one not in (ANONYMOUS, other)]
    if more and index is not None:
        checking.report(rule, name, f"it has more attributes: {', '.join(map(repr, more))}.", "practice")
    _check_values(checking, name, found, rule)


def _check_embedding(checking: Checking, name: str, found: StoredArray) -> None:
    if found.sparse or len(found.axes) != 2 or found.shape[1] < 2:
        sizes = " x ".join(map(str, found.shape))
        checking.report(
            "C23",
            name,
            f"it is {_form(found)} of {sizes}, where a dense array of cells and two or more coordinates belongs.",
        )
    elif not found.is_whole:
        checking.report("C23", name, _part_written(found))
    _check_values(checking, name, found, "C23")
    if name.removeprefix(f"{EMB}/").startswith(OBSM_PREFIX):
        checking.report("C25", name, f"its name begins with {OBSM_PREFIX}.")


def check_shift(checking: Checking) -> None:
    """Check the shifts of columns and what they stand beside: C41, C42, C43."""
    found, x = checking.arrays.get(SHIFT), checking.arrays.get(X)
    if found is None:
        return
    if x is not None and not x.sparse:
        checking.report("C42", SHIFT, "it stands beside a dense X.")
    elif x is None or checking.version == "0.3.0":
        beside = f"{XR} and {XC}" if x is None else f"{X} of version 0.3.0"
        checking.report("C41", SHIFT, f"it stands beside {beside}.")
    if found.sparse or len(found.axes) != 1:
        checking.report("C43", SHIFT, f"it is {_form(found)}, where a dense array of one axis belongs.")
    elif not found.is_whole:
        checking.report("C43", SHIFT, _part_written(found))
    _check_values(checking, SHIFT, found, "C43")
    shift, values = found.attribute(ANONYMOUS), None if x is None else x.attribute(ANONYMOUS)
    if shift is not None and values is not None and shift.is_number and shift.dtype != values.dtype:
        checking.report("C43", SHIFT, f"it is {shift.dtype}, where X is {values.dtype}.", "practice")


def check_sizes(checking: Checking) -> None:
    """Check that all agree on how many cells and features there are: C71."""
    sizes = {OBS: checking.n_obs, VAR: checking.n_var}
    axes = {X: (OBS, VAR), XR: (OBS,), XC: (VAR,), SHIFT: (VAR,)} | dict.fromkeys(checking.embeddings, (OBS,))
    for name, along in axes.items():
        found = checking.arrays.get(name)
        if found is None or (name in (X, XR, XC, SHIFT) and len(found.axes) != len(along)):
            continue
        for frame, size in zip(along, found.shape, strict=False):
            wanted = sizes[frame]
            if wanted is not None and size != wanted:
                what = "cells" if frame == OBS else "features"
                checking.report("C71", name, f"it has {size:,} {what}, and {frame} has {wanted:,}.")
