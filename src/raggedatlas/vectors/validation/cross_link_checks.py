"""Checks of links across chunks and levels, in either layout."""

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.geometry import level_scale
from raggedatlas.vectors.shapes import counts_to_offsets
from raggedatlas.vectors.storage.codecs import decode_records, from_bytes
from raggedatlas.vectors.storage.cross_links import (
    OffsetSegment,
    decode_cross_links,
    decode_level_links,
    decode_stream,
    has_permutation,
    parse_segment,
)
from raggedatlas.vectors.storage.zarr_reader import ChunkArray, KeyLookup, read_array_bytes
from raggedatlas.vectors.validation.chunk_checks import check_column
from raggedatlas.vectors.validation.context import LevelSummary, Place, StoreChecker
from raggedatlas.vectors.validation.metadata_checks import DELTA, is_numeric


def check_cross_links(checker: StoreChecker, level: LevelSummary) -> None:
    """Check all links of a level except those within chunks."""
    for family, name in _deltas(checker, level.number):
        _check_delta(checker, Place(level.number, f"{family}/{name}"), level, int(name))


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


def _check_delta(checker: StoreChecker, place: Place, level: LevelSummary, delta: int) -> None:
    """Check the links of one family to one level."""
    if level.number + delta not in checker.levels:
        checker.report("V058", place, f"it links to level {level.number + delta}, which does not exist.")
    with checker.guarded(place, "V064"):
        if place.family.startswith("cross_chunk_links"):
            _check_records(checker, place, level, delta)
        elif checker.layout == "0.9":
            _check_family(checker, place, level, delta)
        # In layout 0.7 `links/0` holds links within chunks, which `_walk_links` checks.
        elif delta:
            _check_streams(checker, place, level, delta)


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
        at = KeyLookup(target.keys).find(np.ascontiguousarray(chunks[:, end]))
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
            _check_record_column(checker, own, n_links)


def _check_record_column(checker: StoreChecker, place: Place, n_links: int) -> None:
    """Check the rows of one attribute of records."""
    block = checker.block(place)
    raw = read_array_bytes(checker.files, f"{place.path}/data")
    if raw is None or not is_numeric(block.get("dtype")):
        return
    n_columns = int(np.prod((block.get("shape") or [1])[1:], dtype=np.int64))
    size = np.dtype(str(block["dtype"])).itemsize * n_columns
    if raw.size != size * n_links:
        checker.report("V088", place, f"it has {raw.size / max(size, 1):g} rows; expected {n_links:,}.")


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
        with checker.guarded(own, "V064"):
            chunks, rows = decode_level_links(blob, keys[i], width, block, "a chunk")
            counts[i] = len(rows)
            _check_ends(checker, own, chunks, rows, level, delta)
    n_links = int(counts.clip(0).sum())
    if isinstance(block.get("num_links"), int) and block["num_links"] != n_links and (counts >= 0).all():
        checker.report("V055", place, f"num_links is {block['num_links']}; the chunks have {n_links}.")
    _check_attributes(checker, place, keys, counts)


def _check_attributes(checker: StoreChecker, place: Place, keys: NDArray[np.int64], n_links: NDArray[np.int64]) -> None:
    """Check the attributes of links, given the number of links of each chunk."""
    tail = place.family.split("/", 1)[1]
    for name in checker.children(Place(place.resolution, "link_attributes")):
        check_column(checker, Place(place.resolution, f"link_attributes/{name}/{tail}"), "V082", keys, n_links)


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
    if not is_numeric(array.attributes.get("dtype")) or checker.root is None:
        return counts
    target = checker.levels.get(level.number + delta, level)
    scales = (
        level_scale(checker.root, level.facts, keys.shape[1]),
        level_scale(checker.root, target.facts, keys.shape[1]),
    )
    for i, own, blob in checker.blobs(array, keys, place):
        with checker.guarded(own, "V064"):
            stream = decode_stream(blob, "a cell")
            # A column for each end, after that of the permutation if the ends were sorted.
            rows = from_bytes(stream, str(array.attributes["dtype"]), len(offsets) + 1 + ordered, "a cell")
            counts[i] = len(rows)
            bounds, record = counts_to_offsets(np.array([len(rows)])), np.arange(len(rows))
            segment = OffsetSegment(offsets, keys[i : i + 1], bounds, rows.astype(np.int64), record, ordered)
            _check_ends(checker, own, *decode_cross_links(segment, scales, "a cell"), level, delta)
    _check_attributes(checker, place, keys, counts)
    return counts
