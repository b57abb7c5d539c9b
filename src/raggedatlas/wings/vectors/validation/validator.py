"""Validator of geometry stores: `validate` checks a store once and lists every rule that it breaks."""

from raggedatlas.errors import NotFoundError, SourceError
from raggedatlas.model.arguments import checked
from raggedatlas.model.validation import Problems
from raggedatlas.store.location import Address, Location
from raggedatlas.wings.vectors.storage.zarr_reader import StoreFiles
from raggedatlas.wings.vectors.validation.chunk_checks import check_kind, walk_level
from raggedatlas.wings.vectors.validation.metadata_checks import (
    check_array_metadata,
    check_level_metadata,
    check_pyramid,
    check_root,
)
from raggedatlas.wings.vectors.validation.object_checks import check_cross_links, check_link_levels, check_objects
from raggedatlas.wings.vectors.validation.rules import LEVELS, Place, StoreChecker


@checked
def validate(location: Address, level: int | str = 5) -> Problems:
    """List the rules that a geometry store breaks, in either layout; the reference lists the rules.

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
    Problems
        Sorted by rule; empty for a valid store. Each has the location (resolution level, family, chunk, object), severity and fix.

    Raises
    ------
    NotFoundError
        If the location does not exist.
    SourceError
        If the level is unknown.

    References
    ----------
    zarr-vectors §7.1 to §7.11 (core arrays).

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from raggedatlas.wings.vectors.builder import make_geometry
    >>> from raggedatlas.wings.vectors.shapes import Shapes
    >>> from raggedatlas.wings.vectors.writer import write
    >>> folder = tempfile.mkdtemp() + "/points"
    >>> write(make_geometry(Shapes("point_cloud", np.zeros((3, 2), "f4"))), folder)
    >>> validate(folder)
    Nothing is wrong.
    """
    if isinstance(level, str) and level in LEVELS:
        depth = LEVELS.index(level) + 1
    elif isinstance(level, int) and 1 <= level <= len(LEVELS):
        depth = level
    else:
        raise SourceError(f"Unknown level {level!r}; expected 1 to 5 or one of {', '.join(LEVELS)}.")
    place = Location.of(location)
    if not place.holds_files():
        raise NotFoundError(f"{place.uri} does not exist; check the path.")
    checker = StoreChecker(StoreFiles(place), depth)
    if not check_root(checker):
        return checker.by_rule()
    numbers: list[int] = []
    with checker.guarded(Place()):
        numbers = checker.files.levels()
    if numbers != list(range(len(numbers))) or not numbers:
        checker.report("V097", Place(), f"there are the levels {numbers}; expected 0, 1, 2, ...")
    readable = []
    for number in numbers:
        node = checker.node(Place(number))
        if node is None or node.get("node_type") != "group":
            checker.report("V001", Place(number), "it is not a Zarr v3 group.")
            continue
        if checker.node(Place(number, "vertices")) is None:
            facts = checker.block(Place(number)).get("zarr_vectors_level") or {}
            with checker.guarded(Place(number), "V097"):
                if facts.get("vertex_count"):
                    text = f"vertex_count is {facts['vertex_count']}, but there is no vertex array."
                    checker.report("V000", Place(number, "vertices"), text)
        check_array_metadata(checker, number)
        check_link_levels(checker, number)
        facts = check_level_metadata(checker, number)
        if facts is not None:
            readable.append((number, facts))
    # From here on chunks are read. Some rules of level 2, e.g. V043 and V050, are checked only below.
    if checker.depth < 3:
        return checker.by_rule()
    for number, facts in readable:
        with checker.guarded(Place(number)):
            checker.levels[number] = walk_level(checker, number, facts)
    # After all walks: links across levels are checked against the counts of both levels.
    for number, seen in checker.levels.items():
        with checker.guarded(Place(number)):
            check_objects(checker, seen)
            check_cross_links(checker, seen)
            check_kind(checker, seen)
    check_pyramid(checker)
    return checker.by_rule()
