"""Checks of objects: their index, attributes and groups."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
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
from raggedatlas.vectors.validation.context import DAMAGE, CheckLocation, LevelSummary, ValidationContext
from raggedatlas.vectors.validation.metadata_checks import check_bytes, check_channels, is_numeric, is_text

_ROWS = 16_384
_LAYOUTS = ("", "vlen_manifests_v1", "vlen_manifests_v2")


def check_objects(checking: ValidationContext, seen: LevelSummary) -> None:
    """Check the object index of a level, its groups and object attributes."""
    place = CheckLocation(seen.number, "object_index")
    identity = checking.root is not None and checking.root.index_convention == "identity"
    there = checking.node(place) is not None
    if identity:
        if there:
            checking.report("V070", place, "it exists, although ids are fragment numbers.")
        if len(seen.keys) > 1:
            checking.report("V070", CheckLocation(seen.number), f"there are {len(seen.keys)} chunks.")
        seen.ids = np.arange(max(0, int(seen.fragments.sum())))
    if there:
        with checking.guarded("V066", place):
            _check_index(checking, place, seen)
    elif not identity:
        named = {"object_attributes", "groups"} & set(checking.children(CheckLocation(seen.number)))
        for name in sorted(named):
            checking.report("V071", CheckLocation(seen.number, name), "it exists, but there is no object index.")
    n_objects = None if seen.ids is None else len(seen.ids)
    _check_tables(checking, seen, ("object_attributes", "V090", n_objects))
    groups = CheckLocation(seen.number, "groups")
    if checking.node(groups) is not None:
        with checking.guarded("V042", groups):
            _check_groups(checking, groups, seen)
        _check_tables(checking, seen, ("group_attributes", "V044", seen.n_groups))


def _check_index(checking: ValidationContext, place: CheckLocation, seen: LevelSummary) -> None:
    """Check the manifests of all objects, in batches."""
    block = checking.block(place)
    declared, n_dims = block.get("num_objects"), block.get("sid_ndim", seen.keys.shape[1])
    for key in ("num_objects", "sid_ndim"):
        if not isinstance(block.get(key), int) or block[key] < 0:
            checking.report("V068", place, f"{key} is {block.get(key)!r}; expected an integer.")
    if str(block.get("layout", "")) not in _LAYOUTS:
        checking.report(
            "V068", place, f"the layout is {block['layout']!r}; versions 1 and 2 of manifests are supported."
        )
        return
    if n_dims != seen.keys.shape[1]:
        checking.report("V068", place, f"sid_ndim is {n_dims}; chunk keys have {seen.keys.shape[1]} parts.")
        return
    below = CheckLocation(seen.number, "object_index/manifests")
    node = checking.node(below)
    if node is not None:
        check_bytes(checking, below, node)
        items = VlenArray(checking.files, below.path, node)
        seen.ids = _ids_of(checking, place, items.n_items)
        present = 0
        for start in range(0, items.n_items, _ROWS):
            rows = np.arange(start, min(start + _ROWS, items.n_items))
            present += _check_manifests(checking, place, items.read(rows), (seen, rows))
        n_found = items.n_items
    else:
        blobs = _flat(checking, place, (int(declared or 0), n_dims))
        if blobs is None:
            return
        n_found = len(blobs)
        seen.ids = _ids_of(checking, place, n_found)
        present = _check_manifests(checking, place, blobs, (seen, np.arange(n_found)))
    if isinstance(declared, int) and declared != n_found:
        checking.report("V068", place, f"num_objects is {declared}; there are {n_found} manifests.")
    if block.get("num_present", present) != present:
        text = f"num_present is {block['num_present']}; {present} objects have fragments."
        checking.report("V068", place, text, "practice")


def _ids_of(checking: ValidationContext, place: CheckLocation, n_objects: int) -> NDArray[np.int64]:
    """Return the ids of objects in manifest order."""
    below = CheckLocation(place.resolution, "object_index/object_ids")
    if checking.node(below) is not None:
        with checking.guarded("V000", below):
            found = read_table(checking.files, below.path)
            if found is not None and found.shape == (n_objects,):
                ids = found.astype(np.int64)
                if len(np.unique(ids)) != n_objects:
                    checking.report("V068", below, "an id occurs twice.")
                return ids
            checking.report("V068", below, f"it does not hold {n_objects} ids.")
    return np.arange(n_objects)


def _flat(checking: ValidationContext, place: CheckLocation, counted: tuple[int, int]) -> Blobs | None:
    """Return the manifests of ``object_index/data``; if they cannot be split, report it and return None."""
    n_objects, n_dims = counted
    below = CheckLocation(place.resolution, "object_index/data")
    node = checking.node(below)
    if node is None:
        if n_objects:
            checking.report("V065", place, f"{n_objects} objects are declared, but there are no manifests.")
        return None
    check_bytes(checking, below, node)
    data = read_small_array(checking.files, below.path)
    assert data is not None
    starts = None
    with checking.guarded("V065", CheckLocation(place.resolution, "object_index/offsets")):
        starts = read_small_array(checking.files, f"{place.path}/offsets")
    try:
        scanned = split_manifests(data, n_dims, n_objects)
    except CorruptError as error:
        if starts is None:
            checking.report("V066", below, str(error).partition(" Restore it")[0])
            return None
        scanned = None
    if starts is None:
        return scanned
    bounds = np.append(from_bytes(starts, np.int64), data.size)
    fits = (
        bounds[0] == 0 and (np.diff(bounds) >= 0).all() and (scanned is None or np.array_equal(bounds, scanned.bounds))
    )
    if not fits:
        where = CheckLocation(place.resolution, "object_index/offsets")
        checking.report("V065", where, "the offsets do not match the manifests in data.")
        return scanned
    return Blobs(data, bounds)


def _check_manifests(
    checking: ValidationContext, place: CheckLocation, blobs: Blobs, of: tuple[LevelSummary, NDArray[np.int64]]
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
            with checking.guarded("V066", place.at(object_id=int(ids[i]))):
                one = decode_manifests(Blobs(own, np.array([0, own.size])), n_dims, ids[i : i + 1])
                _check_references(checking, place, one, seen)
                present += bool(len(one.starts))
        return present
    _check_references(checking, place, found, seen)
    return int(np.count_nonzero(np.diff(found.bounds)))


def _check_references(checking: ValidationContext, place: CheckLocation, found: Objects, seen: LevelSummary) -> None:
    """Check that blocks refer to existing chunks and fragments; ranges are not expanded, however large."""
    owner = np.repeat(found.ids, np.diff(found.bounds))
    at = KeyLookup(seen.keys).find(found.chunks) if len(found.chunks) else np.zeros(0, np.int64)
    for i in np.flatnonzero((at < 0) & (found.counts > 0)).tolist():
        key = ".".join(map(str, found.chunks[i].tolist()))
        checking.report("V067", place.at(object_id=int(owner[i])), f"it refers to chunk {key}, which does not exist.")
    limit = np.append(seen.fragments, -1)[at]
    known = (at >= 0) & (limit >= 0)
    for i in np.flatnonzero(known & find_missing_blocks(found, limit)).tolist():
        key = ".".join(map(str, found.chunks[i].tolist()))
        text = f"it refers to a fragment of chunk {key} beyond its {limit[i]}."
        checking.report("V067", place.at(object_id=int(owner[i])), text)


def _check_groups(checking: ValidationContext, place: CheckLocation, seen: LevelSummary) -> None:
    """Check groups and their members."""
    block = checking.block(place)
    declared = block.get("num_groups")
    if checking.layout == "0.9":
        node = checking.node(place) or {}
        check_bytes(checking, place, node)
        blobs = VlenArray(checking.files, place.path, node).read()
        seen.n_groups = len(blobs)
        parts = [from_bytes(blobs[i], np.int64, what=f"group {i}") for i in range(len(blobs))]
        for group, (start, stop) in (block.get("group_ranges") or {}).items():
            if not 0 <= int(group) < len(parts) or not 0 <= int(start) <= int(stop):
                checking.report("V042", place, f"group {group} is the range {start} to {stop}, which is invalid.")
            elif seen.ids is not None and int(stop) > int(seen.ids.max(initial=-1)) + 1:
                checking.report(
                    "V047", place, f"group {group} is the range {start} to {stop} of {len(seen.ids)} objects."
                )
        members = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    else:
        data = read_small_array(checking.files, f"{place.path}/data")
        starts = read_small_array(checking.files, f"{place.path}/offsets")
        below = CheckLocation(seen.number, "groups/data")
        check_bytes(checking, below, checking.node(below) or {})
        begin = None if starts is None else from_bytes(starts, np.int64)
        seen.n_groups = _count_groups(data, begin)
        members = decode_groups(np.zeros(0, np.uint8) if data is None else data, begin, seen.n_groups)[1]
    if declared != seen.n_groups:
        checking.report("V043", place, f"num_groups is {declared!r}; there are {seen.n_groups}.")
    if seen.ids is not None and not np.isin(members, seen.ids).all():
        other = members[~np.isin(members, seen.ids)][0]
        checking.report("V047", place, f"a group refers to object {other}, which does not exist.")


def _count_groups(data: Any, begin: NDArray[np.int64] | None) -> int:  # noqa: ANN401 - bytes or None
    """Return the number of groups of layout 0.7."""
    if begin is not None:
        return len(begin)
    return 0 if data is None or data.size < 8 else int(from_bytes(data[:8], np.int64)[0])


def _check_tables(checking: ValidationContext, seen: LevelSummary, asked: tuple[str, str, int | None]) -> None:
    """Check attributes of objects or groups; `asked` is the family, the rule and the expected number of rows."""
    family, rule, n_rows = asked
    top = checking.children(CheckLocation(seen.number))
    for name in checking.children(CheckLocation(seen.number, family)) if family in top else ():
        place = CheckLocation(seen.number, f"{family}/{name}")
        node, block = checking.node(place), checking.block(place)
        if node is None:
            continue
        if is_text(block.get("dtype")) and block.get("dtype") != "string":
            checking.report("V003", place, f"its type is {block['dtype']!r}; 'string' is the standard.", "practice")
        elif not is_numeric(block.get("dtype")) and block.get("dtype") != "string":
            checking.report("V003", place, f"dtype is {block.get('dtype')!r}; expected numbers or 'string'.")
        with checking.guarded("V000", place):
            rows = _table_shape(checking, place, (node, block))
            if rows is None:
                continue
            if n_rows is not None and rows[0] != n_rows:
                checking.report(rule, place, f"it has {rows[0]:,} rows; expected {n_rows:,}.")
            check_channels(checking, place, block, rows[1])


def _table_shape(
    checking: ValidationContext, place: CheckLocation, described: tuple[dict[str, Any], dict[str, Any]]
) -> tuple[int, int] | None:
    """Return rows and channels of a table; if it is missing, report it and return None."""
    node, block = described
    if node.get("node_type") == "array":
        values = read_table(checking.files, place.path)
        assert values is not None
        return len(values), 1 if values.ndim == 1 else int(values.shape[1])
    raw = read_small_array(checking.files, f"{place.path}/data")
    if raw is None:
        checking.report("V000", place, "it has no data.")
        return None
    shape = block.get("shape") or [-1]
    columns = int(np.prod(shape[1:])) if len(shape) > 1 else 1
    return len(from_bytes(raw, str(block.get("dtype")), columns, place.path)), columns
