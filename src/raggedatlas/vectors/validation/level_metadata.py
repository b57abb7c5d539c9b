"""Checks of what levels declare, and of levels together: the pyramid."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from raggedatlas.model.problems import Level as Severity
from raggedatlas.vectors.metadata import level_chunk_shape
from raggedatlas.vectors.validation.context import CheckLocation, LevelSummary, ValidationContext
from raggedatlas.vectors.validation.root_metadata import divides


def check_level_metadata(checking: ValidationContext, number: int) -> dict[str, Any] | None:
    """Check what a level declares; None where it cannot be walked."""
    place = CheckLocation(number)
    facts = checking.block(place).get("zarr_vectors_level")
    if not isinstance(facts, Mapping):
        checking.report("V097", place, "it has no zarr_vectors_level attributes.")
        return None
    for key in ("level", "vertex_count", "arrays_present"):
        if key not in facts:
            checking.report("V097", place, f"it lacks {key}.")
    if facts.get("level", number) != number:
        checking.report("V097", place, f"it says that it is level {facts['level']!r}.")
    for key in ("bin_shape", "parent_level"):
        if number == 0 and facts.get(key) is not None:
            checking.report("V097", place, f"level 0 has {key}.")
        if number > 0 and facts.get(key) is None:
            # build_pyramid of zarr-vectors 0.2 and 0.9 writes no bin_shape; the chunks are then the bins
            severity: Severity | None = "practice" if key == "bin_shape" else None
            checking.report("V097", place, f"a level above 0 has no {key}.", severity)
    _check_present(checking, place, facts)
    return dict(facts)


def _check_present(checking: ValidationContext, place: CheckLocation, facts: Mapping[str, Any]) -> None:
    """Compare ``arrays_present`` with what is there."""
    listed = facts.get("arrays_present")
    if not isinstance(listed, list):
        return
    there = set(checking.children(place))
    for name in sorted({str(name) for name in listed} - there):
        checking.report("V097", place, f"arrays_present names {name}, which is not there.", "should")


def check_pyramid(checking: ValidationContext) -> None:
    """Check each level against the root and its parent."""
    for number, seen in sorted(checking.levels.items()):
        place = CheckLocation(number)
        with checking.guarded("V100", place):
            _check_nesting(checking, seen)
        with checking.guarded("V101", place):
            _check_parent(checking, seen)


def _check_nesting(checking: ValidationContext, seen: LevelSummary) -> None:
    """Check chunks, bins and their ratio."""
    root, place = checking.root, CheckLocation(seen.number)
    if root is None:
        return
    edges = level_chunk_shape(root, seen.facts)
    if not divides(root.chunk_shape, edges):
        checking.report(
            "V100", place, f"chunks of {list(edges)} are no multiple of the root's {list(root.chunk_shape)}."
        )
    bins, ratio = seen.facts.get("bin_shape"), seen.facts.get("bin_ratio")
    if bins is None:
        return
    if not divides(bins, edges):
        checking.report("V100", place, f"bins of {bins} do not divide chunks of {list(edges)}.")
    base = root.bin_shape or root.chunk_shape
    if ratio is not None and not np.allclose(np.asarray(base) * np.asarray(ratio, np.float64), bins):
        checking.report("V100", place, f"bin_ratio is {ratio}, but bins of {bins} stand over {list(base)}.")


def _check_parent(checking: ValidationContext, seen: LevelSummary) -> None:
    """Check a level against the one it was made from."""
    place, facts = CheckLocation(seen.number), seen.facts
    parent = checking.levels.get(-1 if facts.get("parent_level") is None else int(facts["parent_level"]))
    if seen.number and (parent is None or parent.number >= seen.number):
        checking.report("V101", place, f"its parent_level {facts.get('parent_level')!r} is no level before it.")
        return
    if parent is not None and seen.vertices.clip(0).sum() > parent.vertices.clip(0).sum():
        text = f"it has {seen.vertices.clip(0).sum():,} vertices, its parent {parent.vertices.clip(0).sum():,}."
        checking.report("V101", place, text, "practice")
    if not facts.get("preserves_object_ids"):
        return
    inherited = facts.get("inherited_num_objects")
    if parent is None or inherited is None:
        checking.report("V101", place, "it preserves ids, but has no parent_level or no inherited_num_objects.")
        return
    if parent.ids is not None and inherited != len(parent.ids):
        text = f"inherited_num_objects is {inherited}, its parent has {len(parent.ids)} objects."
        checking.report("V101", place, text)
    if parent.ids is not None and seen.ids is not None and not np.isin(seen.ids, parent.ids).all():
        other = seen.ids[~np.isin(seen.ids, parent.ids)][0]
        checking.report("V101", place, f"it says that ids are preserved, but its parent has no object {other}.")
