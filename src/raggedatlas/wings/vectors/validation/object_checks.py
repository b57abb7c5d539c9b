"""Checks of objects (index, attributes, groups) and of links across chunks and levels, in either layout."""

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.model.validation import DAMAGE
from raggedatlas.wings.vectors.geometry import Objects, level_scale
from raggedatlas.wings.vectors.shapes import counts_to_offsets
from raggedatlas.wings.vectors.storage.codecs import (
    Blobs,
    decode_groups,
    decode_manifests,
    decode_records,
    find_missing_blocks,
    from_bytes,
    split_manifests,
)
from raggedatlas.wings.vectors.storage.cross_links import (
    DELTA,
    OffsetSegment,
    decode_cross_links,
    decode_level_links,
    decode_stream,
    has_permutation,
    parse_segment,
)
from raggedatlas.wings.vectors.storage.zarr_reader import ChunkArray, VlenArray, read_array, read_array_bytes
from raggedatlas.wings.vectors.validation.chunk_checks import check_attributes
from raggedatlas.wings.vectors.validation.metadata_checks import check_bytes, check_channels, dtype_of
from raggedatlas.wings.vectors.validation.rules import LevelSummary, Place, StoreChecker

_ROWS = 16_384
_LAYOUTS = ("", "vlen_manifests_v1", "vlen_manifests_v2")


def check_objects(checker: StoreChecker, level: LevelSummary) -> None:
    """Check the object index of a level, its groups and object attributes."""
    place = Place(level.number, "object_index")
    identity = checker.root is not None and checker.root.index_convention == "identity"
    exists = checker.node(place) is not None
    if identity:
        if exists:
            checker.report("V070", place, "it exists, although ids are fragment numbers.")
        if len(level.keys) > 1:
            checker.report("V070", Place(level.number), f"there are {len(level.keys)} chunks.")
        # Ids are fragment numbers here; an unknown count of fragments is -1.
        level.ids = np.arange(max(0, int(level.fragments.sum())))
    if exists:
        with checker.guarded(place, "V066"):
            _check_index(checker, place, level)
    elif not identity:
        for name in sorted({"object_attributes", "groups"} & set(checker.children(Place(level.number)))):
            checker.report("V071", Place(level.number, name), "it exists, but there is no object index.")
    n_objects = None if level.ids is None else len(level.ids)
    _check_tables(checker, level, "object_attributes", "V090", n_objects)
    groups = Place(level.number, "groups")
    if checker.node(groups) is not None:
        with checker.guarded(groups, "V042"):
            _check_groups(checker, groups, level)
        _check_tables(checker, level, "group_attributes", "V044", level.n_groups)


def _check_index(checker: StoreChecker, place: Place, level: LevelSummary) -> None:
    """Check the manifests of all objects, in batches."""
    block = checker.block(place)
    declared, n_dims = block.get("num_objects"), block.get("sid_ndim", level.keys.shape[1])
    for key in ("num_objects", "sid_ndim"):
        if not isinstance(block.get(key), int) or block[key] < 0:
            checker.report("V068", place, f"{key} is {block.get(key)!r}; expected an integer.")
    if str(block.get("layout", "")) not in _LAYOUTS:
        checker.report(
            "V068", place, f"the layout is {block['layout']!r}; versions 1 and 2 of manifests are supported."
        )
        return
    # A wrong number of axes would misread every manifest.
    if n_dims != level.keys.shape[1]:
        checker.report("V068", place, f"sid_ndim is {n_dims}; chunk keys have {level.keys.shape[1]} parts.")
        return
    below = Place(level.number, "object_index/manifests")
    node = checker.node(below)
    if node is not None:
        check_bytes(checker, below)
        items = VlenArray(checker.files, below.path, node)
        # Before the manifests, whose problems name objects by id.
        level.ids = _ids_of(checker, place, items.n_items)
        present = 0
        for start in range(0, items.n_items, _ROWS):
            rows = np.arange(start, min(start + _ROWS, items.n_items))
            present += _check_manifests(checker, place, items.read(rows), level, rows)
        n_found = items.n_items
    else:
        blobs = _flat_manifests(checker, place, int(declared or 0), n_dims)
        if blobs is None:
            return
        n_found = len(blobs)
        level.ids = _ids_of(checker, place, n_found)
        present = _check_manifests(checker, place, blobs, level, np.arange(n_found))
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
            values = read_array(checker.files, below.path, sparse=True)
            if values is not None and values.shape == (n_objects,):
                ids = values.astype(np.int64)
                if len(np.unique(ids)) != n_objects:
                    checker.report("V068", below, "an id occurs twice.")
                return ids
            checker.report("V068", below, f"it does not have {n_objects} ids.")
    # Row numbers replace missing or damaged ids, so that manifests can still be checked.
    return np.arange(n_objects)


def _flat_manifests(checker: StoreChecker, place: Place, n_objects: int, n_dims: int) -> Blobs | None:
    """Return the manifests of ``object_index/data``; if they cannot be split, report it and return None."""
    below = Place(place.resolution, "object_index/data")
    node = checker.node(below)
    if node is None:
        if n_objects:
            checker.report("V065", place, f"{n_objects} objects are declared, but there are no manifests.")
        return None
    check_bytes(checker, below)
    data = read_array_bytes(checker.files, below.path)
    assert data is not None
    # Offsets are optional: the lengths of manifests follow from their bytes.
    starts = None
    with checker.guarded(Place(place.resolution, "object_index/offsets"), "V065"):
        starts = read_array_bytes(checker.files, f"{place.path}/offsets")
    try:
        scanned = split_manifests(data, n_dims, n_objects)
    except CorruptError as error:
        if starts is None:
            checker.report("V066", below, str(error).partition(" Restore it")[0])
            return None
        # With offsets, each manifest is still decoded alone, which finds the damaged ones.
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
    checker: StoreChecker, place: Place, blobs: Blobs, level: LevelSummary, rows: NDArray[np.int64]
) -> int:
    """Check the manifests in some rows; return the number of non-empty ones."""
    ids = level.ids[rows] if level.ids is not None else rows
    n_dims = level.keys.shape[1]
    try:
        objects = decode_manifests(blobs, n_dims, ids)
    except DAMAGE:
        present = 0
        for i in range(len(blobs)):
            own = blobs[i]
            with checker.guarded(place.at(object_id=int(ids[i])), "V066"):
                objects = decode_manifests(Blobs(own, np.array([0, own.size])), n_dims, ids[i : i + 1])
                _check_references(checker, place, objects, level)
                present += bool(len(objects.starts))
        return present
    _check_references(checker, place, objects, level)
    return int(np.count_nonzero(np.diff(objects.bounds)))


def _check_references(checker: StoreChecker, place: Place, objects: Objects, level: LevelSummary) -> None:
    """Check that blocks refer to existing chunks and fragments; ranges are not expanded, however large."""
    owner = np.repeat(objects.ids, np.diff(objects.bounds))
    at = level.chunk_rows.find(objects.chunks) if len(objects.chunks) else np.zeros(0, np.int64)
    for i in np.flatnonzero((at < 0) & (objects.counts > 0)).tolist():
        key = ".".join(map(str, objects.chunks[i].tolist()))
        checker.report("V067", place.at(object_id=int(owner[i])), f"it refers to chunk {key}, which does not exist.")
    # Missing chunks, found at -1, read the appended -1, like chunks whose fragments are unknown.
    limit = np.append(level.fragments, -1)[at]
    is_known = (at >= 0) & (limit >= 0)
    for i in np.flatnonzero(is_known & find_missing_blocks(objects, limit)).tolist():
        key = ".".join(map(str, objects.chunks[i].tolist()))
        text = f"it refers to a fragment of chunk {key} beyond its {limit[i]}."
        checker.report("V067", place.at(object_id=int(owner[i])), text)


def _check_groups(checker: StoreChecker, place: Place, level: LevelSummary) -> None:
    """Check groups and their members."""
    block = checker.block(place)
    declared = block.get("num_groups")
    if checker.layout == "0.9":
        node = checker.node(place) or {}
        check_bytes(checker, place)
        blobs = VlenArray(checker.files, place.path, node).read()
        level.n_groups = len(blobs)
        parts = [from_bytes(blobs[i], np.int64, what=f"group {i}") for i in range(len(blobs))]
        # A group of consecutive ids is stored as their two ends; its row is empty.
        for group, (start, stop) in (block.get("group_ranges") or {}).items():
            if not 0 <= int(group) < len(parts) or not 0 <= int(start) <= int(stop):
                checker.report("V042", place, f"group {group} is the range {start} to {stop}, which is invalid.")
            elif level.ids is not None and int(stop) > int(level.ids.max(initial=-1)) + 1:
                checker.report(
                    "V047", place, f"group {group} is the range {start} to {stop} of {len(level.ids)} objects."
                )
        members = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    else:
        data = read_array_bytes(checker.files, f"{place.path}/data")
        starts = read_array_bytes(checker.files, f"{place.path}/offsets")
        below = Place(level.number, "groups/data")
        check_bytes(checker, below)
        begin = None if starts is None else from_bytes(starts, np.int64)
        data = np.zeros(0, np.uint8) if data is None else data
        if begin is not None:
            level.n_groups = len(begin)
        else:
            # Without offsets, the data begin with the number of groups.
            level.n_groups = int(from_bytes(data[:8], np.int64)[0]) if data.size >= 8 else 0
        members = decode_groups(data, begin, level.n_groups)[1]
    if declared != level.n_groups:
        checker.report("V043", place, f"num_groups is {declared!r}; there are {level.n_groups}.")
    if level.ids is not None and not np.isin(members, level.ids).all():
        other = members[~np.isin(members, level.ids)][0]
        checker.report("V047", place, f"a group refers to object {other}, which does not exist.")


def _check_tables(checker: StoreChecker, level: LevelSummary, family: str, rule: str, n_rows: int | None) -> None:
    """Check that each attribute of objects or groups has the expected number of rows."""
    for name in checker.children(Place(level.number, family)):
        place = Place(level.number, f"{family}/{name}")
        node, block = checker.node(place), checker.block(place)
        if node is None:
            continue
        dtype, parsed = block.get("dtype"), dtype_of(block, texts=True)
        if parsed is not None and parsed.kind in "US" and dtype != "string":
            checker.report("V003", place, f"its type is {dtype!r}; 'string' is the standard.", "practice")
        elif parsed is None and dtype != "string":
            checker.report("V003", place, f"dtype is {dtype!r}; expected numbers or 'string'.")
        with checker.guarded(place):
            if node.get("node_type") == "array":
                values = read_array(checker.files, place.path, sparse=True)
                assert values is not None
                shape = (len(values), 1 if values.ndim == 1 else int(values.shape[1]))
            else:
                raw = read_array_bytes(checker.files, f"{place.path}/data")
                if raw is None:
                    checker.report("V000", place, "it has no data.")
                    continue
                # The declared shape begins with the number of rows.
                n_columns = int(np.prod((block.get("shape") or [-1])[1:], dtype=np.int64))
                shape = (len(from_bytes(raw, str(dtype), n_columns, place.path)), n_columns)
            if n_rows is not None and shape[0] != n_rows:
                checker.report(rule, place, f"it has {shape[0]:,} rows; expected {n_rows:,}.")
            check_channels(checker, place, block, shape[1])


def check_cross_links(checker: StoreChecker, level: LevelSummary) -> None:
    """Check all links of a level except those within chunks."""
    for family, name in _deltas(checker, level.number):
        place = Place(level.number, f"{family}/{name}")
        delta = int(name)
        if level.number + delta not in checker.levels:
            checker.report("V058", place, f"it links to level {level.number + delta}, which does not exist.")
        with checker.guarded(place):
            if place.family.startswith("cross_chunk_links"):
                _check_records(checker, place, level, delta)
            elif checker.layout == "0.9":
                _check_family(checker, place, level, delta)
            # In layout 0.7 `links/0` holds links within chunks, which `_walk_links` checks.
            elif delta:
                _check_streams(checker, place, level, delta)


def _deltas(checker: StoreChecker, number: int) -> list[tuple[str, str]]:
    """Return the families of links of a level, each with the names of its level differences."""
    families = ("links", "cross_chunk_links")
    return [(f, name) for f in families for name in checker.children(Place(number, f)) if DELTA.fullmatch(name)]


def check_link_levels(checker: StoreChecker, number: int) -> None:
    """Check that the root allows and declares the links across levels that a level has."""
    root, place = checker.root, Place(number)
    deltas = {int(name) for _, name in _deltas(checker, number)} - {0}
    if root is None or not deltas:
        return
    if root.cross_level_storage == "none":
        checker.report("V050", place, f"it has links to level {place.resolution} {min(deltas):+d}; storage is 'none'.")
    if "multiscale_links" not in root.capabilities:
        checker.report("V079", place, "it has links across levels, which the root does not declare.")


def _check_ends(
    checker: StoreChecker,
    place: Place,
    chunks: NDArray[np.int64],
    rows: NDArray[np.int64],
    level: LevelSummary,
    delta: int,
) -> None:
    """Check that every link end refers to an existing chunk and row."""
    for end in range(chunks.shape[1]):
        target = level if end == 0 else checker.levels.get(level.number + delta)
        if target is None or target.keys.shape[1] != chunks.shape[2]:
            continue
        at = target.chunk_rows.find(np.ascontiguousarray(chunks[:, end]))
        # Missing chunks, found at -1, read the appended 0 and so have no row; an unknown count, -1, is not checked.
        limit = np.append(target.vertices, 0)[at]
        bad = np.flatnonzero(((rows[:, end] < 0) | (rows[:, end] >= limit)) & (limit >= 0))
        if bad.size:
            i = int(bad[0])
            what = "which does not exist" if at[i] < 0 else f"which has {limit[i]} vertices"
            key = ".".join(map(str, chunks[i, end].tolist()))
            text = f"{bad.size:,} links refer to missing vertices, e.g. row {rows[i, end]} of chunk {key}, {what}."
            checker.report("V080", place, text)
    # Across levels, keys belong to different grids and may be equal.
    if delta == 0 and chunks.shape[1] > 1:
        same = (chunks == chunks[:, :1]).all(axis=(1, 2))
        if same.any():
            checker.report("V081", place, f"{np.count_nonzero(same):,} links have all their ends in one chunk.")


def _check_records(checker: StoreChecker, place: Place, level: LevelSummary, delta: int) -> None:
    """Check the records of layout 0.7, and their attributes."""
    block = checker.block(place)
    for key in ("level_delta", "link_width", "num_links", "sid_ndim"):
        if not isinstance(block.get(key), int):
            checker.report("V076", place, f"{key} is {block.get(key)!r}; expected an integer.")
            return
    if block["level_delta"] != delta:
        checker.report("V076", place, f"level_delta is {block['level_delta']}; the folder is {delta:+d}.")
    width, n_dims, n_links = block["link_width"], block["sid_ndim"], block["num_links"]
    raw = read_array_bytes(checker.files, f"{place.path}/data")
    size, expected = (0 if raw is None else raw.size), 8 * width * (n_dims + 1) * n_links
    if size != expected:
        checker.report("V076", place, f"{size:,} bytes are stored; {n_links:,} links need {expected:,}.")
        return
    if raw is not None and size:
        _check_ends(checker, place, *decode_records(raw, width, n_dims, place.path), level, delta)
    family = "cross_chunk_link_attributes"
    for name in checker.children(Place(level.number, family)):
        own = Place(level.number, f"{family}/{name}/{place.family.rpartition('/')[2]}")
        with checker.guarded(own):
            facts = checker.block(own)
            raw = read_array_bytes(checker.files, f"{own.path}/data")
            dtype = dtype_of(facts)
            if raw is None or dtype is None:
                continue
            size = dtype.itemsize * int(np.prod((facts.get("shape") or [1])[1:], dtype=np.int64))
            if raw.size != size * n_links:
                checker.report("V088", own, f"it has {raw.size / max(size, 1):g} rows; expected {n_links:,}.")


def _check_streams(checker: StoreChecker, place: Place, level: LevelSummary, delta: int) -> None:
    """Check links across levels that layout 0.7 stores with the chunk of their first end, in either encoding."""
    array = checker.open(place)
    if array is None:
        return
    block = array.attributes
    width = int(block.get("link_width", 2))
    keys = checker.keys(array, place, level.keys.shape[1])
    counts = np.full(len(keys), -1, np.int64)
    for i, own, blob in checker.blobs(array, keys, place):
        with checker.guarded(own):
            chunks, rows = decode_level_links(blob, keys[i], width, block, "a chunk")
            counts[i] = len(rows)
            _check_ends(checker, own, chunks, rows, level, delta)
    n_links = int(counts.clip(0).sum())
    if isinstance(block.get("num_links"), int) and block["num_links"] != n_links and (counts >= 0).all():
        checker.report("V055", place, f"num_links is {block['num_links']}; the chunks have {n_links}.")
    tail = "/" + place.family.split("/", 1)[1]
    check_attributes(checker, Place(level.number, "link_attributes"), "V082", keys, counts, tail)


def _check_family(checker: StoreChecker, place: Place, level: LevelSummary, delta: int) -> None:
    """Check the arrays of layout 0.9 except the one for links within chunks, and count all links."""
    block = checker.block(place)
    width, n_parts = block.get("link_width"), int(block.get("sid_ndim") or level.keys.shape[1])
    if block.get("zv_array") != "links_family":
        checker.report("V002", place, f"zv_array is {block.get('zv_array')!r}; expected 'links_family'.")
    if not isinstance(width, int) or width < 1:
        return
    counts = []
    if delta == 0 and checker.block(Place(level.number, "vertices")).get("encoding") == "draco":
        counts.append(level.links)
    for name in checker.children(place):
        own = Place(level.number, f"{place.family}/{name}")
        with checker.guarded(own, "V048"):
            offsets = parse_segment(name, width, n_parts)
            # Links within chunks, which `_walk_links` counted.
            if delta == 0 and not offsets.any():
                counts.append(level.links)
                continue
            array = checker.open(own)
            if array is not None:
                counts.append(_check_segment(checker, own, array, offsets, level, delta))
    declared, n_links = block.get("num_links"), sum(int(each.clip(0).sum()) for each in counts)
    complete = all((each >= 0).all() for each in counts)
    # With `duplicate`, a link is stored under each chunk that it touches, so counts of the arrays are higher.
    if (
        complete
        and isinstance(declared, int)
        and declared != n_links
        and block.get("store", "canonical") == "canonical"
    ):
        checker.report("V055", place, f"num_links is {declared}; its arrays have {n_links}.")


def _check_segment(
    checker: StoreChecker, place: Place, array: ChunkArray, offsets: NDArray[np.int64], level: LevelSummary, delta: int
) -> NDArray[np.int64]:
    """Check the links of one set of offsets; return the number of links of each cell, -1 if unknown."""
    policy = checker.block(Place(level.number, "/".join(place.family.split("/")[:2])))
    directed, store = bool(policy.get("directed", False)), str(policy.get("store", "canonical"))
    ordered = bool(array.attributes.get("has_perm", has_permutation(offsets, delta, directed=directed, store=store)))
    keys = checker.keys(array, place, level.keys.shape[1])
    counts = np.full(len(keys), -1, np.int64)
    dtype = dtype_of(array.attributes)
    if dtype is None or checker.root is None:
        return counts
    target = checker.levels.get(level.number + delta, level)
    scales = (
        level_scale(checker.root, level.facts, keys.shape[1]),
        level_scale(checker.root, target.facts, keys.shape[1]),
    )
    for i, own, blob in checker.blobs(array, keys, place):
        with checker.guarded(own):
            stream = decode_stream(blob, "a cell")
            # A column for each end, after that of the permutation if the ends were sorted.
            rows = from_bytes(stream, dtype, len(offsets) + 1 + ordered, "a cell")
            counts[i] = len(rows)
            bounds, record = counts_to_offsets(np.array([len(rows)])), np.arange(len(rows))
            segment = OffsetSegment(offsets, keys[i : i + 1], bounds, rows.astype(np.int64), record, ordered)
            _check_ends(checker, own, *decode_cross_links(segment, scales, "a cell"), level, delta)
    tail = "/" + place.family.split("/", 1)[1]
    check_attributes(checker, Place(level.number, "link_attributes"), "V082", keys, counts, tail)
    return counts
