"""Checks of what arrays say of themselves: their discriminator, type, shape, channels and counts."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from raggedatlas.vectors.shapes import POSITION_TYPES
from raggedatlas.vectors.validation.context import CheckLocation, ValidationContext

DELTA = re.compile(r"0|[+-][1-9]\d*")
_FRAGMENT_KEYS = {"zv_array", "zvf_array", "encoding", "nonempty_chunks", "chunk_grid_origin"}
_VERTEX_KEYS = {"zv_array", "zvf_array", "dtype", "encoding", "nonempty_chunks", "chunk_grid_origin"}
_NAMES = {
    "vertices": ("vertices",),
    "vertex_fragments": ("vertex_fragments",),
    "link_fragments": ("link_fragments",),
    "vertex_attributes": ("attribute", "vertex_attribute"),
    "fragment_attributes": ("fragment_attribute",),
    "link_attributes": ("link_attribute", "attribute"),
    "links": ("links",),
    "object_index": ("object_index",),
    "object_attributes": ("object_attribute",),
    "groups": ("groups",),
    "cross_chunk_links": ("cross_chunk_links",),
    "cross_chunk_link_attributes": ("cross_chunk_link_attribute",),
}
FRAGMENT_INDEXES = ("vertex_fragments", "link_fragments")
_BY_NAME = (
    *("vertex_attributes", "fragment_attributes", "object_attributes", "group_attributes"),
    *("link_attributes", "cross_chunk_link_attributes"),
)
_ATTRIBUTES = {"vertex_attributes", "fragment_attributes", "link_attributes"}


def level_arrays(checking: ValidationContext, number: int) -> Iterator[CheckLocation]:
    """Yield the arrays of a level that have a piece for each chunk, and those of objects, by their place."""
    top = checking.children(CheckLocation(number))
    for name in ("vertices", *FRAGMENT_INDEXES, "object_index", "groups"):
        if name in top:
            yield CheckLocation(number, name)
    for name in (name for name in _BY_NAME if name in top):
        for own in checking.children(CheckLocation(number, name)):
            place = CheckLocation(number, f"{name}/{own}")
            yield from _by_delta(checking, place) if "link" in name else (place,)
    for name in (name for name in ("links", "cross_chunk_links") if name in top):
        yield from _by_delta(checking, CheckLocation(number, name))


def _by_delta(checking: ValidationContext, above: CheckLocation) -> Iterator[CheckLocation]:
    """Yield what lies below a family of links: a place for each delta, in layout 0.9 for each set of offsets too."""
    for delta in checking.children(above):
        place = CheckLocation(above.resolution, f"{above.family}/{delta}")
        if not DELTA.fullmatch(delta):
            checking.report("V048", place, f"{delta!r} is no difference of levels; expected 0, +1 or -1.")
            continue
        if checking.layout == "0.7" or above.family.startswith("cross_"):
            yield place
            continue
        for name in checking.children(place):
            yield CheckLocation(above.resolution, f"{place.family}/{name}")


def check_array_metadata(checking: ValidationContext, number: int) -> None:
    """Check the attributes of every array of a level."""
    for place in level_arrays(checking, number):
        node = checking.node(place)
        if node is None:
            if not any(problem.path == str(place) for problem in checking.problems):
                checking.report("V001", place, "there is no zarr.json.")
            continue
        block = checking.block(place)
        with checking.guarded("V021", place):
            _check_name(checking, place, block)
            family = place.family.split("/", maxsplit=1)[0]
            if family == "vertices":
                _check_vertices(checking, place, block)
            elif family in FRAGMENT_INDEXES:
                _check_framed(checking, place, block, node)
            elif family in _ATTRIBUTES:
                _check_attribute(checking, place, block)
            elif family == "links":
                _check_links(checking, place, block)


def _check_name(checking: ValidationContext, place: CheckLocation, block: Mapping[str, Any]) -> None:
    """Check ``zv_array``."""
    family = place.family.split("/", maxsplit=1)[0]
    asked, rule = _NAMES.get(family, ()), "V002"
    if family == "group_attributes":
        asked, rule = ("groupings_attribute",), "V044"
    name = block.get("zv_array", block.get("zvf_array"))
    if "zv_array" not in block and "zvf_array" in block:
        checking.report("V002", place, "it names itself in zvf_array, the older key.", "practice")
    if name is None and family == "link_fragments":
        checking.report("V002", place, "it does not name itself, as zarr-vectors 0.2 writes it.", "practice")
    elif name not in asked:
        checking.report(rule, place, f"zv_array is {name!r}; expected {' or '.join(map(repr, asked))}.")


def _check_vertices(checking: ValidationContext, place: CheckLocation, block: Mapping[str, Any]) -> None:
    """Check what vertices declare."""
    if block.get("dtype") not in POSITION_TYPES:
        checking.report("V011", place, f"dtype is {block.get('dtype')!r}; expected floats or integers of 8 to 64 bits.")
    encoding = block.get("encoding", "raw")
    if encoding not in ("raw", "draco"):
        checking.report("V012", place, f"the encoding is {encoding!r}; expected 'raw' or 'draco'.")
    elif "encoding" not in block:
        checking.report("V012", place, "no encoding is declared; raw is taken.", "practice")
    for key in sorted(set(block) - _VERTEX_KEYS):
        checking.report("V012", place, f"{key!r} is no key of vertices.", "practice")
    types = checking.root.types if checking.root is not None else ()
    if encoding == "draco" and "mesh" not in types:
        checking.report("V014", place, f"the encoding is 'draco', and the geometry {', '.join(types) or 'unnamed'}.")


def _check_framed(
    checking: ValidationContext, place: CheckLocation, block: Mapping[str, Any], node: Mapping[str, Any]
) -> None:
    """Check what fragment indexes declare, and that they are bytes."""
    for key in sorted(set(block) - _FRAGMENT_KEYS):
        counted = isinstance(block[key], int | float) and not isinstance(block[key], bool)
        rule = "V005" if counted and place.family == "vertex_fragments" else "V036"
        checking.report(rule, place, f"the attribute {key!r} does not belong here.")
    if checking.layout == "0.9":
        check_bytes(checking, place, node)


def check_bytes(checking: ValidationContext, place: CheckLocation, node: Mapping[str, Any]) -> None:
    """Check that an array is one of bytes."""
    kind = node.get("data_type")
    name = kind.get("name") if isinstance(kind, dict) else kind
    if node.get("node_type") == "array" and name not in {"uint8", "variable_length_bytes", "bytes"}:
        checking.report("V004", place, f"its type is {name!r}; expected uint8 or byte strings.")


def is_numeric(name: Any) -> bool:  # noqa: ANN401 - whatever JSON holds
    """Tell whether a name is that of a type of numbers."""
    try:
        return np.dtype(str(name)).kind in "iuf"
    except TypeError:
        return False


def is_text(name: Any) -> bool:  # noqa: ANN401 - whatever JSON holds
    """Tell whether a name is that of a NumPy type of strings of one length, as the packages write them."""
    try:
        kind = np.dtype(str(name))
    except TypeError:
        return False
    return kind.kind in "US" and kind.itemsize > 0


def _check_attribute(checking: ValidationContext, place: CheckLocation, block: Mapping[str, Any]) -> None:
    """Check what an attribute of vertices, fragments or links declares."""
    if is_text(block.get("dtype")):
        checking.report(
            "V003", place, f"its type is {block['dtype']!r}; codes and categories are the standard.", "practice"
        )
    elif not is_numeric(block.get("dtype")):
        checking.report("V003", place, f"dtype is {block.get('dtype')!r}; expected integers or floats.")
    name = place.family.split("/")[1]
    if block.get("name") != name:
        checking.report("V021", place, f"name is {block.get('name')!r}; expected {name!r}.")
    shape = block.get("row_shape", block.get("shape"))
    if shape is None:
        checking.report("V021", place, "it declares no shape of a row, as zarr-vectors 0.2 writes it.", "practice")
        return
    if not isinstance(shape, list) or not all(isinstance(size, int) and size > 0 for size in shape):
        checking.report("V021", place, f"the shape of a row is {shape!r}; expected [] or [channels].")
        return
    check_channels(checking, place, block, int(np.prod(shape)) if shape else 1)


def check_channels(
    checking: ValidationContext, place: CheckLocation, block: Mapping[str, Any], n_channels: int
) -> None:
    """Check that each channel has a name, where channels have names."""
    names = block.get("channel_names")
    if names and len(names) != n_channels:
        checking.report("V022", place, f"there are {len(names)} channel names for {n_channels} values of a row.")


def _check_links(checking: ValidationContext, place: CheckLocation, block: Mapping[str, Any]) -> None:
    """Check what links declare."""
    if not is_numeric(block.get("dtype")) or np.dtype(str(block.get("dtype"))).kind == "f":
        checking.report("V055", place, f"dtype is {block.get('dtype')!r}; expected integers.")
    delta = place.family.split("/")[1]
    family = CheckLocation(place.resolution, f"links/{delta}")
    own = checking.block(family)
    if own.get("num_links") is None:
        checking.report("V055", family, "it does not declare num_links, as zarr-vectors 0.2 writes it.", "practice")
    for key in ("level_delta", "link_width", *(("num_links",) if own.get("num_links") is not None else ())):
        if not isinstance(own.get(key), int):
            checking.report("V055", family, f"{key} is {own.get(key)!r}; expected a whole number.")
    if isinstance(own.get("level_delta"), int) and own["level_delta"] != int(delta):
        checking.report("V055", family, f"level_delta is {own['level_delta']}; the folder is {delta}.")
