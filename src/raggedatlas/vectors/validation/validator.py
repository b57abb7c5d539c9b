"""Entry point of the validator: `validate` checks a geometry store once and lists every rule that it breaks."""

import os

from raggedatlas.errors import NotFoundError, SourceError
from raggedatlas.model.arguments import checked
from raggedatlas.model.reports import Problem
from raggedatlas.store.location import Location
from raggedatlas.vectors.storage.zarr_reader import StoreFiles
from raggedatlas.vectors.validation.chunk_checks import check_kind, walk_level
from raggedatlas.vectors.validation.context import CheckLocation, ValidationContext
from raggedatlas.vectors.validation.cross_link_checks import check_cross_links
from raggedatlas.vectors.validation.metadata_checks import (
    check_array_metadata,
    check_level_metadata,
    check_pyramid,
    check_root,
)
from raggedatlas.vectors.validation.object_checks import check_objects
from raggedatlas.vectors.validation.rules import LEVELS, RULES


@checked
def validate(location: Location | str | os.PathLike[str], level: int | str = 5) -> list[Problem]:
    """List the rules that a geometry store breaks, in either layout (seed 002 §7; the reference lists the rules).

    Parameters
    ----------
    location : Location, str or path
        The store.
    level : int or str
        Highest level to check, including the previous ones: 1 ``"structure"``, 2 ``"metadata"``, 3 ``"consistency"``, 4 ``"conformance"``,
        5 ``"pyramid"``. From 3 on every value is read, 64 chunks at a time; memory is bounded by those, the object index and the
        chunk counts.

    Returns
    -------
    list of Problem
        Sorted by rule; empty for a valid store. Each has the location (resolution level, family, chunk, object), severity and fix.

    Raises
    ------
    NotFoundError
        If the location does not exist.
    SourceError
        If the level is unknown.

    Examples
    --------
    >>> import tempfile
    >>> from raggedatlas.testing.spatial import cloud
    >>> from raggedatlas.vectors.builder import make_geometry
    >>> from raggedatlas.vectors.writer import write
    >>> folder = tempfile.mkdtemp() + "/points"
    >>> write(make_geometry(cloud()), folder)
    >>> validate(folder)
    []
    """
    depth = depth_of(level)
    place = Location.of(location)
    if not place.exists():
        raise NotFoundError(f"{place.uri} does not exist; check the path.")
    checking = ValidationContext(StoreFiles(place), depth)
    if check_root(checking):
        _check_levels(checking)
    order = {rule: i for i, rule in enumerate(RULES)}
    found = dict.fromkeys(checking.problems)
    return sorted(found, key=lambda problem: order[problem.rule])


def depth_of(level: int | str) -> int:
    """Return the number of a validation level; `SourceError` if it is unknown."""
    if isinstance(level, str) and level in LEVELS:
        return LEVELS.index(level) + 1
    if isinstance(level, int) and 1 <= level <= len(LEVELS):
        return level
    raise SourceError(f"Unknown level {level!r}; expected 1 to 5 or one of {', '.join(LEVELS)}.")


def _check_levels(checking: ValidationContext) -> None:
    """Check every level, then the links of each, then all levels together."""
    names = checking.children(CheckLocation())
    numbers = sorted(int(name) for name in names if name.isascii() and name.isdigit())
    if numbers != list(range(len(numbers))) or not numbers:
        checking.report("V097", CheckLocation(), f"there are the levels {numbers}; expected 0, 1, 2, ...")
    known = []
    for number in numbers:
        node = checking.node(CheckLocation(number))
        if node is None or node.get("node_type") != "group":
            checking.report("V001", CheckLocation(number), "it is not a Zarr v3 group.")
            continue
        if checking.node(CheckLocation(number, "vertices")) is None:
            _check_no_vertices(checking, number)
        check_array_metadata(checking, number)
        facts = check_level_metadata(checking, number)
        if facts is not None:
            known.append((number, facts))
    if checking.depth < 3:
        return
    for number, facts in known:
        with checking.guarded("V000", CheckLocation(number)):
            checking.levels[number] = walk_level(checking, number, facts)
    for number, seen in checking.levels.items():
        with checking.guarded("V000", CheckLocation(number)):
            check_objects(checking, seen)
            check_cross_links(checking, seen)
            check_kind(checking, seen)
    check_pyramid(checking)


def _check_no_vertices(checking: ValidationContext, number: int) -> None:
    """Report a level that declares vertices but has no vertex array."""
    facts = checking.block(CheckLocation(number)).get("zarr_vectors_level") or {}
    with checking.guarded("V097", CheckLocation(number)):
        if facts.get("vertex_count"):
            text = f"vertex_count is {facts['vertex_count']}, but there is no vertex array."
            checking.report("V000", CheckLocation(number, "vertices"), text)
