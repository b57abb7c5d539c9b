"""Checks of metadata: root, levels, the pyramid, and the attributes of every array."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from raggedatlas.errors import CorruptError, SourceError
from raggedatlas.model.validation import DAMAGE
from raggedatlas.wings.vectors.geometry import (
    CAPABILITIES,
    CONVENTIONS,
    CROSS_CHUNK,
    CROSS_LEVEL,
    INDEX_CONVENTIONS,
    VERSIONS,
    bins_per_chunk,
    check_edges,
    level_chunk_shape,
    parse_root,
)
from raggedatlas.wings.vectors.shapes import KINDS, POSITION_TYPES
from raggedatlas.wings.vectors.storage.cross_links import DELTA
from raggedatlas.wings.vectors.storage.level_reader import declared_dtype
from raggedatlas.wings.vectors.validation.rules import LevelSummary, Place, StoreChecker

_ROOT = Place()
_WORDS = {
    "links_convention": CONVENTIONS,
    "object_index_convention": INDEX_CONVENTIONS,
    "cross_chunk_strategy": CROSS_CHUNK,
    "cross_level_storage": CROSS_LEVEL,
}
_SEQUENTIAL = ("implicit_sequential",)
KIND_REQUIREMENTS = {
    "line": _SEQUENTIAL,
    "polyline": _SEQUENTIAL,
    "streamline": _SEQUENTIAL,
    "graph": ("explicit",),
    "mesh": ("explicit",),
    "skeleton": ("implicit_sequential_with_branches", "explicit"),
}
"""Geometry type -> allowed link conventions."""


def check_root(checker: StoreChecker) -> bool:
    """Check the root; return whether levels can be checked."""
    node = checker.node(_ROOT)
    if node is None:
        # A damaged `zarr.json` is reported by `node`.
        if not checker.problems:
            checker.report("V001", _ROOT, "there is no zarr.json.")
        return False
    if node.get("node_type") != "group":
        checker.report("V001", _ROOT, "it is an array; expected a group.")
        return False
    facts = checker.block(_ROOT).get("zarr_vectors")
    if not isinstance(facts, Mapping):
        checker.report("V096", _ROOT, "the root has no zarr_vectors attributes.")
        return False
    version = str(facts.get("zv_version"))
    layout = ".".join(version.split(".")[:2])
    if "zv_version" in facts and layout not in VERSIONS:
        checker.report("V007", _ROOT, f"zv_version is {version!r}; 0.7 and 0.9 are supported.")
        return False
    for key in ("zv_version", "chunk_shape", "bounds", "geometry_types"):
        if key not in facts:
            checker.report("V096", _ROOT, f"the root has no {key}.")
    for key, words in _WORDS.items():
        value = facts.get(key)
        if value is not None and value not in words:
            checker.report("V096", _ROOT, f"{key} is {value!r}; expected one of {', '.join(words)}.")
    types = facts.get("geometry_types")
    if types is not None and not isinstance(types, list):
        checker.report("V096", _ROOT, f"geometry_types is {types!r}; expected a list.")
    elif types == []:
        checker.report("V096", _ROOT, "geometry_types is empty.", "should")
    convention = facts.get("links_convention") or "implicit_sequential"
    for kind in types if isinstance(types, list) else ():
        # JSON may hold a list or an object here, which no dictionary can look up.
        allowed = KIND_REQUIREMENTS.get(kind, ()) if isinstance(kind, str) else ()
        if allowed and convention in CONVENTIONS and convention not in allowed:
            checker.report("V062", _ROOT, f"{kind} requires {' or '.join(allowed)}; links_convention is {convention}.")
        if kind not in KINDS:
            text = f"the geometry type {kind!r} is unknown; it is read as vertices and links."
            checker.report("V096", _ROOT, text, "should")
    for key, effect in (("format_capabilities", "it is ignored"), ("required_capabilities", "the store is refused")):
        tokens = facts.get(key) or []
        for token in tokens if isinstance(tokens, list) else [tokens]:
            if token not in CAPABILITIES:
                checker.report("V099", _ROOT, f"the token {token!r} of {key} is unknown; {effect}.")
    _check_numbers(checker, facts)
    before = len(checker.problems)
    try:
        root = parse_root(checker.block(_ROOT), checker.files.root)
    except DAMAGE as error:
        # The checks above may have reported the fault that `parse_root` stops at.
        if not any(problem.rule in {"V096", "V099"} for problem in checker.problems[:before]):
            checker.report("V096", _ROOT, str(error))
        return False
    checker.layout, checker.root = root.layout, root.geometry
    return True


def _check_numbers(checker: StoreChecker, facts: Mapping[str, Any]) -> None:
    """Check that chunks, bins, bounds and axes are consistent numbers."""
    edges = _numbers(checker, "chunk_shape", facts.get("chunk_shape"))
    if edges is None:
        return
    if not (edges > 0).all():
        checker.report("V096", _ROOT, f"chunk_shape is {edges.tolist()}; expected positive numbers.")
    bins = None if facts.get("base_bin_shape") is None else _numbers(checker, "bin_shape", facts["base_bin_shape"])
    if bins is not None and not divides(bins, edges):
        checker.report("V096", _ROOT, f"bins of {bins.tolist()} do not divide chunks of {edges.tolist()}.")
    bounds = facts.get("bounds")
    ends = [_numbers(checker, "bounds", end) for end in bounds] if isinstance(bounds, list) else []
    if bounds is not None and (len(ends) != 2 or any(end is None or len(end) != len(edges) for end in ends)):
        checker.report("V096", _ROOT, f"bounds do not have two corners of {len(edges)} numbers.")
    elif ends and ends[0] is not None and ends[1] is not None and (ends[0] > ends[1]).any():
        checker.report("V096", _ROOT, f"bounds are swapped: {bounds}.")
    scales = checker.block(_ROOT).get("multiscales") or [{}]
    with checker.guarded(_ROOT, "V096"):
        axes = [axis for axis in scales[0].get("axes", []) if axis.get("type", "space") == "space"]
        if axes and len(axes) != len(edges):
            checker.report("V096", _ROOT, f"there are {len(axes)} space axes, but chunks have {len(edges)} numbers.")


def _numbers(checker: StoreChecker, key: str, values: Any) -> np.ndarray[Any, np.dtype[np.float64]] | None:  # noqa: ANN401
    """Return numbers; report other values and return None."""
    if values is None:
        return None
    try:
        numbers = np.array([float(value) for value in values], np.float64)
    except DAMAGE:
        # Reported below, with numbers that are not finite.
        numbers = np.array([np.nan])
    if not len(numbers) or not np.isfinite(numbers).all():
        checker.report("V096", _ROOT, f"{key} is {values!r}; expected numbers.")
        return None
    return numbers


def divides(bins: Any, edges: Any) -> bool:  # noqa: ANN401 - arrays or lists
    """Return whether edges are integer multiples of bins."""
    try:
        check_edges(tuple(bins), len(edges), "bins")
        bins_per_chunk(tuple(edges), tuple(bins))
    except SourceError:
        return False
    return True


def check_level_metadata(checker: StoreChecker, number: int) -> dict[str, Any] | None:
    """Check the declarations of a level; None if its chunks cannot be checked."""
    place = Place(number)
    facts = checker.block(place).get("zarr_vectors_level")
    if not isinstance(facts, Mapping):
        checker.report("V097", place, "it has no zarr_vectors_level attributes.")
        return None
    for key in ("level", "vertex_count", "arrays_present"):
        if key not in facts:
            checker.report("V097", place, f"it has no {key}.")
    if facts.get("level", number) != number:
        checker.report("V097", place, f"it declares level {facts['level']!r}.")
    for key in ("bin_shape", "parent_level"):
        if number == 0 and facts.get(key) is not None:
            checker.report("V097", place, f"level 0 has {key}.")
        if number > 0 and facts.get(key) is None:
            # build_pyramid of zarr-vectors 0.2 and 0.9 omits bin_shape; the bins are then the chunks
            mild = key == "bin_shape"
            checker.report("V097", place, f"a level above 0 has no {key}.", "practice" if mild else None)
    listed = facts.get("arrays_present")
    for name in sorted(set(map(str, listed if isinstance(listed, list) else ())) - set(checker.children(place))):
        checker.report("V097", place, f"arrays_present names {name}, which does not exist.", "should")
    return dict(facts)


def check_pyramid(checker: StoreChecker) -> None:
    """Check each level against the root and its parent."""
    for number, level in sorted(checker.levels.items()):
        place = Place(number)
        with checker.guarded(place, "V100"):
            _check_nesting(checker, level)
        with checker.guarded(place, "V101"):
            _check_parent(checker, level)


def _check_nesting(checker: StoreChecker, level: LevelSummary) -> None:
    """Check chunks, bins and their ratio."""
    root, place = checker.root, Place(level.number)
    if root is None:
        return
    edges = level_chunk_shape(root, level.facts)
    if not divides(root.chunk_shape, edges):
        checker.report(
            "V100", place, f"chunks of {list(edges)} are not multiples of the root's {list(root.chunk_shape)}."
        )
    bins, ratio = level.facts.get("bin_shape"), level.facts.get("bin_ratio")
    if bins is None:
        return
    if not divides(bins, edges):
        checker.report("V100", place, f"bins of {bins} do not divide chunks of {list(edges)}.")
    base = root.bin_shape or root.chunk_shape
    if ratio is not None and not np.allclose(np.asarray(base) * np.asarray(ratio, np.float64), bins):
        checker.report(
            "V100", place, f"bin_ratio is {ratio}, but bins are {bins} and those of the base level {list(base)}."
        )


def _check_parent(checker: StoreChecker, level: LevelSummary) -> None:
    """Check a level against its parent level."""
    place, facts = Place(level.number), level.facts
    parent = checker.levels.get(-1 if facts.get("parent_level") is None else int(facts["parent_level"]))
    if level.number and (parent is None or parent.number >= level.number):
        checker.report("V101", place, f"its parent_level {facts.get('parent_level')!r} is not a finer level.")
        return
    # Unknown counts are -1 and must not reduce a sum.
    if parent is not None and level.vertices.clip(0).sum() > parent.vertices.clip(0).sum():
        text = f"it has {level.vertices.clip(0).sum():,} vertices, but its parent {parent.vertices.clip(0).sum():,}."
        checker.report("V101", place, text, "practice")
    if not facts.get("preserves_object_ids"):
        return
    inherited = facts.get("inherited_num_objects")
    if parent is None or inherited is None:
        checker.report("V101", place, "it preserves ids, but has no parent_level or no inherited_num_objects.")
        return
    if parent.ids is not None and inherited != len(parent.ids):
        text = f"inherited_num_objects is {inherited}, but its parent has {len(parent.ids)} objects."
        checker.report("V101", place, text)
    if parent.ids is not None and level.ids is not None and not np.isin(level.ids, parent.ids).all():
        other = level.ids[~np.isin(level.ids, parent.ids)][0]
        checker.report("V101", place, f"it declares that ids are preserved, but its parent has no object {other}.")


_FRAGMENT_KEYS = {"zv_array", "zvf_array", "encoding", "nonempty_chunks", "chunk_grid_origin"}
_VERTEX_KEYS = {*_FRAGMENT_KEYS, "dtype"}
FRAGMENT_INDEXES = ("vertex_fragments", "link_fragments")
_BY_NAME = (
    *("vertex_attributes", "fragment_attributes", "object_attributes", "group_attributes"),
    *("link_attributes", "cross_chunk_link_attributes"),
)


def level_arrays(checker: StoreChecker, number: int) -> Iterator[Place]:
    """Yield the per-chunk arrays of a level, and those of objects, with their locations."""
    top = checker.children(Place(number))
    for name in ("vertices", *FRAGMENT_INDEXES, "object_index", "groups"):
        if name in top:
            yield Place(number, name)
    for name in (name for name in _BY_NAME if name in top):
        for own in checker.children(Place(number, name)):
            place = Place(number, f"{name}/{own}")
            yield from _by_delta(checker, place) if "link" in name else (place,)
    for name in (name for name in ("links", "cross_chunk_links") if name in top):
        yield from _by_delta(checker, Place(number, name))


def _by_delta(checker: StoreChecker, above: Place) -> Iterator[Place]:
    """Yield the arrays of a family of links: one for each delta, in layout 0.9 also for each set of offsets."""
    for delta in checker.children(above):
        place = Place(above.resolution, f"{above.family}/{delta}")
        if not DELTA.fullmatch(delta):
            checker.report("V048", place, f"{delta!r} is not a level difference; expected 0, +1 or -1.")
            continue
        if checker.layout == "0.7" or above.family.startswith("cross_"):
            yield place
            continue
        for name in checker.children(place):
            yield Place(above.resolution, f"{place.family}/{name}")


def check_array_metadata(checker: StoreChecker, number: int) -> None:
    """Check the attributes of every array of a level."""
    for place in level_arrays(checker, number):
        node = checker.node(place)
        if node is None:
            # A node that `node` could not read, and has reported, is None too.
            if not any(problem.path == str(place) for problem in checker.problems):
                checker.report("V001", place, "there is no zarr.json.")
            continue
        block, family = checker.block(place), place.family.split("/", maxsplit=1)[0]
        names, check = _FAMILIES[family]
        with checker.guarded(place, "V021"):
            name = block.get("zv_array", block.get("zvf_array"))
            if "zv_array" not in block and "zvf_array" in block:
                checker.report("V002", place, "it declares its name as zvf_array, the older key.", "practice")
            if name is None and place.family == "link_fragments":
                checker.report("V002", place, "it does not declare its name; zarr-vectors 0.2 omits it.", "practice")
            elif name not in names:
                rule = "V044" if place.family.startswith("group_attributes/") else "V002"
                checker.report(rule, place, f"zv_array is {name!r}; expected {' or '.join(map(repr, names))}.")
            if check is not None:
                check(checker, place, block)


def _check_vertices(checker: StoreChecker, place: Place, block: Mapping[str, Any]) -> None:
    """Check the metadata of vertices."""
    if block.get("dtype") not in POSITION_TYPES:
        checker.report("V011", place, f"dtype is {block.get('dtype')!r}; expected floats or integers of 8 to 64 bits.")
    encoding = block.get("encoding", "raw")
    if encoding not in ("raw", "draco"):
        checker.report("V012", place, f"the encoding is {encoding!r}; expected 'raw' or 'draco'.")
    elif "encoding" not in block:
        checker.report("V012", place, "no encoding is declared; raw is assumed.", "practice")
    for key in sorted(set(block) - _VERTEX_KEYS):
        checker.report("V012", place, f"{key!r} is not a key of vertices.", "practice")
    types = checker.root.types if checker.root is not None else ()
    if encoding == "draco" and "mesh" not in types:
        checker.report("V014", place, f"the encoding is 'draco', but the geometry {', '.join(types) or 'unnamed'}.")


def _check_framed(checker: StoreChecker, place: Place, block: Mapping[str, Any]) -> None:
    """Check the metadata of fragment indexes, and that they are bytes."""
    for key in sorted(set(block) - _FRAGMENT_KEYS):
        counted = isinstance(block[key], int | float) and not isinstance(block[key], bool)
        rule = "V005" if counted and place.family == "vertex_fragments" else "V036"
        checker.report(rule, place, f"the attribute {key!r} is not allowed here.")
    if checker.layout == "0.9":
        check_bytes(checker, place)


def check_bytes(checker: StoreChecker, place: Place) -> None:
    """Check that an array has the type of bytes."""
    node = checker.node(place) or {}
    kind = node.get("data_type")
    name = kind.get("name") if isinstance(kind, dict) else kind
    if node.get("node_type") == "array" and name not in {"uint8", "variable_length_bytes", "bytes"}:
        checker.report("V004", place, f"its type is {name!r}; expected uint8 or byte strings.")


def dtype_of(block: Mapping[str, Any], *, texts: bool = False) -> np.dtype[Any] | None:
    """Return the declared dtype of numbers, or with `texts` also that of fixed-length NumPy strings; None if it is neither."""
    try:
        return declared_dtype(block, "", texts=texts)
    except CorruptError:
        return None


def _check_attribute(checker: StoreChecker, place: Place, block: Mapping[str, Any]) -> None:
    """Check the metadata of an attribute of vertices, fragments or links."""
    dtype = dtype_of(block, texts=True)
    if dtype is not None and dtype.kind in "US":
        # Other packages write such arrays.
        text = f"its type is {block['dtype']!r}; codes and categories are the standard."
        checker.report("V003", place, text, "practice")
    elif dtype is None:
        checker.report("V003", place, f"dtype is {block.get('dtype')!r}; expected integers or floats.")
    name = place.family.split("/")[1]
    if block.get("name") != name:
        checker.report("V021", place, f"name is {block.get('name')!r}; expected {name!r}.")
    shape = block.get("row_shape", block.get("shape"))
    if shape is None:
        checker.report("V021", place, "it declares no row shape; zarr-vectors 0.2 omits it.", "practice")
        return
    if not isinstance(shape, list) or not all(isinstance(size, int) and size > 0 for size in shape):
        checker.report("V021", place, f"the row shape is {shape!r}; expected [] or [channels].")
        return
    check_channels(checker, place, block, int(np.prod(shape)) if shape else 1)


def check_channels(checker: StoreChecker, place: Place, block: Mapping[str, Any], n_channels: int) -> None:
    """Check that each channel has a name, if channels are named."""
    names = block.get("channel_names")
    if names and len(names) != n_channels:
        checker.report("V022", place, f"there are {len(names)} channel names for {n_channels} values per row.")


def _check_links(checker: StoreChecker, place: Place, block: Mapping[str, Any]) -> None:
    """Check the metadata of links."""
    dtype = dtype_of(block)
    if dtype is None or dtype.kind == "f":
        checker.report("V055", place, f"dtype is {block.get('dtype')!r}; expected integers.")
    delta = place.family.split("/")[1]
    family = Place(place.resolution, f"links/{delta}")
    own = checker.block(family)
    if own.get("num_links") is None:
        checker.report("V055", family, "it does not declare num_links; zarr-vectors 0.2 omits it.", "practice")
    for key in ("level_delta", "link_width", *(("num_links",) if own.get("num_links") is not None else ())):
        if not isinstance(own.get(key), int):
            checker.report("V055", family, f"{key} is {own.get(key)!r}; expected an integer.")
    if isinstance(own.get("level_delta"), int) and own["level_delta"] != int(delta):
        checker.report("V055", family, f"level_delta is {own['level_delta']}; the folder is {delta}.")


_FAMILIES: dict[str, tuple[tuple[str, ...], Callable[[StoreChecker, Place, Mapping[str, Any]], None] | None]] = {
    "vertices": (("vertices",), _check_vertices),
    "vertex_fragments": (("vertex_fragments",), _check_framed),
    "link_fragments": (("link_fragments",), _check_framed),
    "vertex_attributes": (("attribute", "vertex_attribute"), _check_attribute),
    "fragment_attributes": (("fragment_attribute",), _check_attribute),
    "link_attributes": (("link_attribute", "attribute"), _check_attribute),
    "links": (("links",), _check_links),
    "object_index": (("object_index",), None),
    "object_attributes": (("object_attribute",), None),
    "groups": (("groups",), None),
    "group_attributes": (("groupings_attribute",), None),
    "cross_chunk_links": (("cross_chunk_links",), None),
    "cross_chunk_link_attributes": (("cross_chunk_link_attribute",), None),
}
"""Family of arrays -> names that ``zv_array`` may have, and the check of its other attributes; None leaves them to those of values."""
