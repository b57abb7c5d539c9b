"""Checks of the root of a geometry store: version, vocabulary, axes, chunks, bounds, and what its geometry types ask."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from raggedatlas.vectors.geometry import CAPABILITIES, CONVENTIONS, CROSS_CHUNK, CROSS_LEVEL, INDEX_CONVENTIONS
from raggedatlas.vectors.metadata import VERSIONS, parse_root
from raggedatlas.vectors.shapes import KINDS
from raggedatlas.vectors.validation.context import DAMAGE, CheckLocation, ValidationContext

_ROOT = CheckLocation()
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
"""Geometry type -> conventions that go with it."""


def check_root(checking: ValidationContext) -> bool:
    """Check the root; tell whether levels can be looked at."""
    node = checking.node(_ROOT)
    if node is None:
        if not checking.problems:
            checking.report("V001", _ROOT, "there is no zarr.json.")
        return False
    if node.get("node_type") != "group":
        checking.report("V001", _ROOT, "it is an array, where a group belongs.")
        return False
    facts = checking.block(_ROOT).get("zarr_vectors")
    if not isinstance(facts, Mapping):
        checking.report("V096", _ROOT, "the root has no zarr_vectors attributes.")
        return False
    version = str(facts.get("zv_version"))
    known = ".".join(version.split(".")[:2])
    if "zv_version" in facts and known not in VERSIONS:
        checking.report("V007", _ROOT, f"zv_version is {version!r}; 0.7 and 0.9 are read.")
        return False
    _check_vocabulary(checking, facts)
    _check_numbers(checking, facts)
    _check_conventions(checking, facts)
    before = len(checking.problems)
    try:
        root = parse_root(checking.block(_ROOT), checking.files.root)
    except DAMAGE as error:
        if not any(problem.rule in {"V096", "V099"} for problem in checking.problems[:before]):
            checking.report("V096", _ROOT, str(error))
        return False
    checking.layout, checking.root = root.layout, root.geometry
    return True


def _check_vocabulary(checking: ValidationContext, facts: Mapping[str, Any]) -> None:
    """Check required keys, words and tokens."""
    for key in ("zv_version", "chunk_shape", "bounds", "geometry_types"):
        if key not in facts:
            checking.report("V096", _ROOT, f"the root lacks {key}.")
    for key, words in _WORDS.items():
        value = facts.get(key)
        if value is not None and value not in words:
            checking.report("V096", _ROOT, f"{key} is {value!r}; expected one of {', '.join(words)}.")
    types = facts.get("geometry_types")
    if types is not None and not isinstance(types, list):
        checking.report("V096", _ROOT, f"geometry_types is {types!r}; expected a list.")
    elif types == []:
        checking.report("V096", _ROOT, "geometry_types is empty.", "should")
    for kind in types if isinstance(types, list) else ():
        if kind not in KINDS:
            text = f"the geometry type {kind!r} is not known; it is read as vertices and links."
            checking.report("V096", _ROOT, text, "should")
    _check_tokens(checking, facts)


def _check_tokens(checking: ValidationContext, facts: Mapping[str, Any]) -> None:
    """Check tokens of capabilities."""
    for key, why in (("format_capabilities", "it is ignored"), ("required_capabilities", "the store is refused")):
        tokens = facts.get(key) or []
        for token in tokens if isinstance(tokens, list) else [tokens]:
            if token not in CAPABILITIES:
                checking.report("V099", _ROOT, f"the token {token!r} of {key} is not known; {why}.")


def _check_numbers(checking: ValidationContext, facts: Mapping[str, Any]) -> None:
    """Check that chunks, bins, bounds and axes are numbers that go together."""
    edges = _numbers(checking, "chunk_shape", facts.get("chunk_shape"))
    if edges is None:
        return
    if not (edges > 0).all():
        checking.report("V096", _ROOT, f"chunk_shape is {edges.tolist()}; expected positive numbers.")
    bins = None if facts.get("base_bin_shape") is None else _numbers(checking, "bin_shape", facts["base_bin_shape"])
    if bins is not None and not divides(bins, edges):
        checking.report("V096", _ROOT, f"bins of {bins.tolist()} do not divide chunks of {edges.tolist()}.")
    bounds = facts.get("bounds")
    ends = [_numbers(checking, "bounds", end) for end in bounds] if isinstance(bounds, list) else []
    if bounds is not None and (len(ends) != 2 or any(end is None or len(end) != len(edges) for end in ends)):
        checking.report("V096", _ROOT, f"bounds do not have two corners of {len(edges)} numbers.")
    elif ends and ends[0] is not None and ends[1] is not None and (ends[0] > ends[1]).any():
        checking.report("V096", _ROOT, f"bounds are crossed: {bounds}.")
    scales = checking.block(_ROOT).get("multiscales") or [{}]
    with checking.guarded("V096", _ROOT):
        axes = [axis for axis in scales[0].get("axes", []) if axis.get("type", "space") == "space"]
        if axes and len(axes) != len(edges):
            checking.report("V096", _ROOT, f"there are {len(axes)} space axes, and chunks of {len(edges)} numbers.")


def _numbers(checking: ValidationContext, key: str, values: Any) -> np.ndarray[Any, np.dtype[np.float64]] | None:  # noqa: ANN401
    """Return numbers; None, which is told, where they are none."""
    if values is None:
        return None
    try:
        found = np.array([float(value) for value in values], np.float64)
    except DAMAGE:
        found = np.array([np.nan])
    if not len(found) or not np.isfinite(found).all():
        checking.report("V096", _ROOT, f"{key} is {values!r}; expected numbers.")
        return None
    return found


def divides(bins: Any, edges: Any) -> bool:  # noqa: ANN401 - arrays or lists
    """Tell whether edges are whole multiples of bins."""
    small, large = np.asarray(bins, np.float64), np.asarray(edges, np.float64)
    if small.shape != large.shape or not (small > 0).all():
        return False
    ratio = large / small
    whole = np.rint(ratio)
    return bool(((whole >= 1) & (np.abs(ratio - whole) <= 1e-9 * np.maximum(whole, 1))).all())


def _check_conventions(checking: ValidationContext, facts: Mapping[str, Any]) -> None:
    """Check that the convention of links goes with each geometry type."""
    convention = facts.get("links_convention") or "implicit_sequential"
    types = facts.get("geometry_types")
    for kind in types if isinstance(types, list) else ():
        asked = KIND_REQUIREMENTS.get(kind, ()) if isinstance(kind, str) else ()
        if asked and convention in CONVENTIONS and convention not in asked:
            checking.report("V062", _ROOT, f"{kind} asks for {' or '.join(asked)}; links_convention is {convention}.")
