"""Checks of objects: their index, attributes and groups."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.model.validation import DAMAGE
from raggedatlas.vectors.geometry import Objects
from raggedatlas.vectors.storage.codecs import (
    Blobs,
    decode_groups,
    decode_manifests,
    find_missing_blocks,
    from_bytes,
    split_manifests,
)
from raggedatlas.vectors.storage.zarr_reader import KeyLookup, VlenArray, read_small_array, read_table
from raggedatlas.vectors.validation.context import LevelSummary, Place, StoreChecker
from raggedatlas.vectors.validation.metadata_checks import check_bytes, check_channels, is_numeric, is_text

_ROWS = 16_384
_LAYOUTS = ("", "vlen_manifests_v1", "vlen_manifests_v2")


def check_objects(checker: StoreChecker, seen: LevelSummary) -> None:
    """Check the object index of a level, its groups and object attributes."""
    place = Place(seen.number, "object_index")
    identity = checker.root is not None and checker.root.index_convention == "identity"
    there = checker.node(place) is not None
    if identity:
        if there:
            checker.report("V070", place, "it exists, although ids are fragment numbers.")
        if len(seen.keys) > 1:
            checker.report("V070", Place(seen.number), f"there are {len(seen.keys)} chunks.")
        seen.ids = np.arange(max(0, int(seen.fragments.sum())))
    if there:
        with checker.guarded(place, "V066"):
            _check_index(checker, place, seen)
    elif not identity:
        named = {"object_attributes", "groups"} & set(checker.children(Place(seen.number)))
        for name in sorted(named):
            checker.report("V071", Place(seen.number, name), "it exists, but there is no object index.")
    n_objects = None if seen.ids is None else len(seen.ids)
    _check_tables(checker, seen, ("object_attributes", "V090", n_objects))
    groups = Place(seen.number, "groups")
    if checker.node(groups) is not None:
        with checker.guarded(groups, "V042"):
            _check_groups(checker, groups, seen)
        _check_tables(checker, seen, ("group_attributes", "V044", seen.n_groups))


def _check_index(checker: StoreChecker, place: Place, seen: LevelSummary) -> None:
    """Check the manifests of all objects, in batches."""
    block = checker.block(place)
    declared, n_dims = block.get("num_objects"), block.get("sid_ndim", seen.keys.shape[1])
    for key in ("num_objects", "sid_ndim"):
        if not isinstance(block.get(key), int) or block[key] < 0:
            checker.report("V068", place, f"{key} is {block.get(key)!r}; expected an integer.")
    if str(block.get("layout", "")) not in _LAYOUTS:
        checker.report(
            "V068", place, f"the layout is {block['layout']!r}; versions 1 and 2 of manifests are supported."
        )
        return
    if n_dims != seen.keys.shape[1]:
        checker.report("V068", place, f"sid_ndim is {n_dims}; chunk keys have {seen.keys.shape[1]} parts.")
        return
    below = Place(seen.number, "object_index/manifests")
    node = checker.node(below)
    if node is not None:
        check_bytes(checker, below, node)
        items = VlenArray(checker.files, below.path, node)
        seen.ids = _ids_of(checker, place, items.n_items)
        present = 0
        for start in range(0, items.n_items, _ROWS):
            rows = np.arange(start, min(start + _ROWS, items.n_items))
            present += _check_manifests(checker, place, items.read(rows), (seen, rows))
        n_found = items.n_items
    else:
        blobs = _flat(checker, place, (int(declared or 0), n_dims))
        if blobs is None:
            return
        n_found = len(blobs)
        seen.ids = _ids_of(checker, place, n_found)
        present = _check_manifests(checker, place, blobs, (seen, np.arange(n_found)))
    if isinstance(declared, int) and declared != n_found:
        checker.report("V068", place, f"num_objects is {declared}; there are {n_found} manifests.")
    if block.get("num_present", present) != present:
        text = f"num_present is {block['num_present']}; {present} objects have fragments."
        checker.report("V068", place, text, "practice")


def _ids_of(checker: StoreChecker, place: Place, n_objects: int) -> NDArray[np.int64]:
    """Return the ids of objects in manifest order."""
    below = Place(place.resolution, "object_index/object_ids")
    if checker.node(below) is not None:
        with checker.guarded(below):
            found = read_table(checker.files, below.path)
            if found is not None and found.shape == (n_objects,):
                ids = found.astype(np.int64)
                if len(np.unique(ids)) != n_objects:
                    checker.report("V068", below, "an id occurs twice.")
                return ids
            checker.report("V068", below, f"it does not hold {n_objects} ids.")
    return np.arange(n_objects)


def _flat(checker: StoreChecker, place: Place, counted: tuple[int, int]) -> Blobs | None:
    """Return the manifests of ``object_index/data``; if they cannot be split, report it and return None."""
    n_objects, n_dims = counted
    below = Place(place.resolution, "object_index/data")
    node = checker.node(below)
    if node is None:
        if n_objects:
            checker.report("V065", place, f"{n_objects} objects are declared, but there are no manifests.")
        return None
    check_bytes(checker, below, node)
    data = read_small_array(checker.files, below.path)
    assert data is not None
    starts = None
    with checker.guarded(Place(place.resolution, "object_index/offsets"), "V065"):
        starts = read_small_array(checker.files, f"{place.path}/offsets")
    try:
        scanned = split_manifests(data, n_dims, n_objects)
    except CorruptError as error:
        if starts is None:
            checker.report("V066", below, str(error).partition(" Restore it")[0])
            return None
        scanned = None
    if starts is None:
        return scanned
    bounds = np.append(from_bytes(starts, np.int64), data.size)
    fits = (
        bounds[0] == 0 and (np.diff(bounds) >= 0).all() and (scanned is None or np.array_equal(bounds, scanned.bounds))
    )
    if not fits:
        where = Place(place.resolution, "object_index/offsets")
        checker.report("V065", where, "the offsets do not match the manifests in data.")
        return scanned
    return Blobs(data, bounds)


def _check_manifests(
    checker: StoreChecker, place: Place, blobs: Blobs, of: tuple[LevelSummary, NDArray[np.int64]]
) -> int:
    """Check some manifests; return the number of non-empty ones."""
    seen, rows = of
    ids = seen.ids[rows] if seen.ids is not None else rows
    n_dims = seen.keys.shape[1]
    try:
        found = decode_manifests(blobs, n_dims, ids)
    except DAMAGE:
        present = 0
        for i in range(len(blobs)):
            own = blobs[i]
            with checker.guarded(place.at(object_id=int(ids[i])), "V066"):
                one = decode_manifests(Blobs(own, np.array([0, own.size])), n_dims, ids[i : i + 1])
                _check_references(checker, place, one, seen)
                present += bool(len(one.starts))
        return present
    _check_references(checker, place, found, seen)
    return int(np.count_nonzero(np.diff(found.bounds)))


def _check_references(checker: StoreChecker, place: Place, found: Objects, seen: LevelSummary) -> None:
    """Check that blocks refer to existing chunks and fragments; ranges are not expanded, however large."""
    owner = np.repeat(found.ids, np.diff(found.bounds))
    at = KeyLookup(seen.keys).find(found.chunks) if len(found.chunks) else np.zeros(0, np.int64)
    for i in np.flatnonzero((at < 0) & (found.counts > 0)).tolist():
        key = ".".join(map(str, found.chunks[i].tolist()))
        checker.report("V067", place.at(object_id=int(owner[i])), f"it refers to chunk {key}, which does not exist.")
    limit = np.append(seen.fragments, -1)[at]
    known = (at >= 0) & (limit >= 0)
    for i in np.flatnonzero(known & find_missing_blocks(found, limit)).tolist():
        key = ".".join(map(str, found.chunks[i].tolist()))
        text = f"it refers to a fragment of chunk {key} beyond its {limit[i]}."
        checker.report("V067", place.at(object_id=int(owner[i])), text)


def _check_groups(checker: StoreChecker, place: Place, seen: LevelSummary) -> None:
    """Check groups and their members."""
    block = checker.block(place)
    declared = block.get("num_groups")
    if checker.layout == "0.9":
        node = checker.node(place) or {}
        check_bytes(checker, place, node)
        blobs = VlenArray(checker.files, place.path, node).read()
        seen.n_groups = len(blobs)
        parts = [from_bytes(blobs[i], np.int64, what=f"group {i}") for i in range(len(blobs))]
        for group, (start, stop) in (block.get("group_ranges") or {}).items():
            if not 0 <= int(group) < len(parts) or not 0 <= int(start) <= int(stop):
                checker.report("V042", place, f"group {group} is the range {start} to {stop}, which is invalid.")
            elif seen.ids is not None and int(stop) > int(seen.ids.max(initial=-1)) + 1:
                checker.report(
                    "V047", place, f"group {group} is the range {start} to {stop} of {len(seen.ids)} objects."
                )
        members = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    else:
        data = read_small_array(checker.files, f"{place.path}/data")
        starts = read_small_array(checker.files, f"{place.path}/offsets")
        below = Place(seen.number, "groups/data")
        check_bytes(checker, below, checker.node(below) or {})
        begin = None if starts is None else from_bytes(starts, np.int64)
        seen.n_groups = _count_groups(data, begin)
        members = decode_groups(np.zeros(0, np.uint8) if data is None else data, begin, seen.n_groups)[1]
    if declared != seen.n_groups:
        checker.report("V043", place, f"num_groups is {declared!r}; there are {seen.n_groups}.")
    if seen.ids is not None and not np.isin(members, seen.ids).all():
        other = members[~np.isin(members, seen.ids)][0]
        checker.report("V047", place, f"a group refers to object {other}, which does not exist.")


def _count_groups(data: Any, begin: NDArray[np.int64] | None) -> int:  # noqa: ANN401 - bytes or None
    """Return the number of groups of layout 0.7."""
    if begin is not None:
        return len(begin)
    return 0 if data is None or data.size < 8 else int(from_bytes(data[:8], np.int64)[0])


def _check_tables(checker: StoreChecker, seen: LevelSummary, asked: tuple[str, str, int | None]) -> None:
    """Check attributes of objects or groups; `asked` is the family, the rule and the expected number of rows."""
    family, rule, n_rows = asked
    top = checker.children(Place(seen.number))
    for name in checker.children(Place(seen.number, family)) if family in top else ():
        place = Place(seen.number, f"{family}/{name}")
        node, block = checker.node(place), checker.block(place)
        if node is None:
            continue
        if is_text(block.get("dtype")) and block.get("dtype") != "string":
            checker.report("V003", place, f"its type is {block['dtype']!r}; 'string' is the standard.", "practice")
        elif not is_numeric(block.get("dtype")) and block.get("dtype") != "string":
            checker.report("V003", place, f"dtype is {block.get('dtype')!r}; expected numbers or 'string'.")
        with checker.guarded(place):
            rows = _table_shape(checker, place, (node, block))
            if rows is None:
                continue
            if n_rows is not None and rows[0] != n_rows:
                checker.report(rule, place, f"it has {rows[0]:,} rows; expected {n_rows:,}.")
            check_channels(checker, place, block, rows[1])


def _table_shape(
    checker: StoreChecker, place: Place, described: tuple[dict[str, Any], dict[str, Any]]
) -> tuple[int, int] | None:
    """Return rows and channels of a table; if it is missing, report it and return None."""
    node, block = described
    if node.get("node_type") == "array":
        values = read_table(checker.files, place.path)
        assert values is not None
        return len(values), 1 if values.ndim == 1 else int(values.shape[1])
    raw = read_small_array(checker.files, f"{place.path}/data")
    if raw is None:
        checker.report("V000", place, "it has no data.")
        return None
    shape = block.get("shape") or [-1]
    columns = int(np.prod(shape[1:])) if len(shape) > 1 else 1
    return len(from_bytes(raw, str(block.get("dtype")), columns, place.path)), columns
