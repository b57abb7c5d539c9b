"""Checks of links across chunks and levels, in either layout."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.metadata import level_scale
from raggedatlas.vectors.shapes import counts_to_offsets
from raggedatlas.vectors.storage.codecs import Bytes, decode_ragged, decode_records, from_bytes
from raggedatlas.vectors.storage.cross_links import OffsetSegment, decode_cross_links, has_permutation, parse_segment
from raggedatlas.vectors.storage.zarr_reader import ChunkArray, KeyLookup, read_small_array
from raggedatlas.vectors.validation.chunk_checks import batches, walk_column
from raggedatlas.vectors.validation.context import LevelSummary, Place, StoreChecker
from raggedatlas.vectors.validation.metadata_checks import DELTA, is_numeric


def check_cross_links(checker: StoreChecker, seen: LevelSummary) -> None:
    """Check all links of a level except those within chunks."""
    deltas: set[int] = set()
    top = checker.children(Place(seen.number))
    for name in ("links", "cross_chunk_links"):
        for spelled in checker.children(Place(seen.number, name)) if name in top else ():
            if not DELTA.fullmatch(spelled):
                continue
            place, delta = Place(seen.number, f"{name}/{spelled}"), int(spelled)
            if delta:
                deltas.add(delta)
                _check_target(checker, place, seen.number + delta)
            with checker.guarded(place, "V064"):
                if name == "cross_chunk_links":
                    _check_records(checker, place, (seen, delta))
                elif checker.layout == "0.9":
                    _check_family(checker, place, (seen, delta))
                elif delta:
                    _check_streams(checker, place, (seen, delta))
    _check_policy(checker, Place(seen.number), deltas)


def _check_policy(checker: StoreChecker, place: Place, deltas: set[int]) -> None:
    """Check that the root declares links across levels."""
    root = checker.root
    if root is None or not deltas:
        return
    if root.cross_level_storage == "none":
        checker.report("V050", place, f"it has links to level {place.resolution} {min(deltas):+d}; storage is 'none'.")
    if "multiscale_links" not in root.capabilities:
        checker.report("V079", place, "it has links across levels, which the root does not declare.")


def _check_target(checker: StoreChecker, place: Place, number: int) -> None:
    """Check that the other level exists."""
    if number not in checker.levels:
        checker.report("V058", place, f"it links to level {number}, which does not exist.")


def _check_ends(
    checker: StoreChecker,
    place: Place,
    ends: tuple[NDArray[np.int64], NDArray[np.int64]],
    of: tuple[LevelSummary, int],
) -> None:
    """Check that every link end refers to an existing chunk and row."""
    chunks, rows = ends
    seen, delta = of
    other = checker.levels.get(seen.number + delta)
    for end in range(chunks.shape[1]):
        level = seen if end == 0 else other
        if level is None or level.keys.shape[1] != chunks.shape[2]:
            continue
        at = KeyLookup(level.keys).find(np.ascontiguousarray(chunks[:, end]))
        limit = np.append(level.vertices, 0)[at]
        bad = np.flatnonzero(((rows[:, end] < 0) | (rows[:, end] >= limit)) & (limit >= 0))
        if bad.size:
            i = int(bad[0])
            what = "which does not exist" if at[i] < 0 else f"which has {limit[i]} vertices"
            key = ".".join(map(str, chunks[i, end].tolist()))
            text = f"{bad.size:,} links refer to missing vertices, e.g. row {rows[i, end]} of chunk {key}, {what}."
            checker.report("V080", place, text)
    if delta == 0 and chunks.shape[1] > 1:
        same = (chunks == chunks[:, :1]).all(axis=(1, 2))
        if same.any():
            checker.report("V081", place, f"{np.count_nonzero(same):,} links have all their ends in one chunk.")


def _check_records(checker: StoreChecker, place: Place, of: tuple[LevelSummary, int]) -> None:
    """Check the records of layout 0.7, and their attributes."""
    seen = of[0]
    block = checker.block(place)
    for key in ("level_delta", "link_width", "num_links", "sid_ndim"):
        if not isinstance(block.get(key), int):
            checker.report("V076", place, f"{key} is {block.get(key)!r}; expected an integer.")
            return
    if block["level_delta"] != of[1]:
        checker.report("V076", place, f"level_delta is {block['level_delta']}; the folder is {of[1]:+d}.")
    width, n_dims, n_links = block["link_width"], block["sid_ndim"], block["num_links"]
    raw = read_small_array(checker.files, f"{place.path}/data")
    size, expected = (0 if raw is None else raw.size), 8 * width * (n_dims + 1) * n_links
    if size != expected:
        checker.report("V076", place, f"{size:,} bytes are stored; {n_links:,} links need {expected:,}.")
        return
    if raw is not None and size:
        _check_ends(checker, place, decode_records(raw, width, n_dims, place.path), of)
    delta = place.family.rsplit("/", maxsplit=1)[-1]
    family = Place(seen.number, "cross_chunk_link_attributes")
    for name in checker.children(family) if family.family in checker.children(Place(seen.number)) else ():
        own = Place(seen.number, f"{family.family}/{name}/{delta}")
        with checker.guarded(own):
            _check_column(checker, own, n_links)


def _check_column(checker: StoreChecker, place: Place, n_links: int) -> None:
    """Check the rows of one attribute of records."""
    block = checker.block(place)
    raw = read_small_array(checker.files, f"{place.path}/data")
    if raw is None or not is_numeric(block.get("dtype")):
        return
    columns = int(np.prod((block.get("shape") or [1])[1:], dtype=np.int64))
    size = np.dtype(str(block["dtype"])).itemsize * columns
    if raw.size != size * n_links:
        checker.report("V088", place, f"it has {raw.size / max(size, 1):g} rows; expected {n_links:,}.")


def _check_streams(checker: StoreChecker, place: Place, of: tuple[LevelSummary, int]) -> None:
    """Check links across levels that layout 0.7 stores with the chunk of their first end, in either encoding."""
    family = checker.open(place)
    if family is None:
        return
    seen, block = of[0], family.attributes
    width, found = int(block.get("link_width", 2)), 0
    keys = checker.keys(family, place, seen.keys.shape[1])
    counts = np.full(len(keys), -1, np.int64)
    for part in batches(keys):
        for i, blob in enumerate(checker.read(family, keys[part], place), part.start):
            if blob is None:
                continue
            with checker.guarded(place.at(keys[i]), "V064"):
                chunks, rows = _stream_ends(blob, (keys[i], width), block)
                counts[i] = len(rows)
                found += len(rows)
                _check_ends(checker, place.at(keys[i]), (chunks, rows), of)
    if isinstance(block.get("num_links"), int) and block["num_links"] != found and (counts >= 0).all():
        checker.report("V055", place, f"num_links is {block['num_links']}; the chunks have {found}.")
    _check_attributes(checker, place, (keys, counts))


def _stream_ends(
    blob: Bytes,
    at: tuple[NDArray[np.int64], int],
    block: dict[str, Any],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ends of the links of one chunk."""
    key, width = at
    if block.get("record_encoding") == "endpoints_v1":
        return decode_records(blob, width, len(key), "a chunk")
    stream = decode_ragged(blob, "a chunk").data if blob.size else blob
    rows = from_bytes(stream, str(block.get("dtype", "int64")), width).astype(np.int64)
    return np.broadcast_to(key, (len(rows), width, len(key))), rows


def _check_attributes(checker: StoreChecker, place: Place, of: tuple[NDArray[np.int64], NDArray[np.int64]]) -> None:
    """Check the attributes of links stored in cells: `of` are the chunks and their numbers of links."""
    number = place.resolution
    if "link_attributes" not in checker.children(Place(number)):
        return
    for name in checker.children(Place(number, "link_attributes")):
        own = Place(number, f"link_attributes/{name}/" + place.family.split("/", 1)[1])
        family = checker.open(own)
        if family is not None:
            walk_column(checker, own, family, ("V082", *of))


def _check_family(checker: StoreChecker, place: Place, of: tuple[LevelSummary, int]) -> None:
    """Check the arrays of layout 0.9 except the one for links within chunks, and count all links."""
    seen, delta = of
    block = checker.block(place)
    width, n_parts = block.get("link_width"), int(block.get("sid_ndim") or seen.keys.shape[1])
    if block.get("zv_array") != "links_family":
        checker.report("V002", place, f"zv_array is {block.get('zv_array')!r}; expected 'links_family'.")
    if not isinstance(width, int) or width < 1:
        return
    found, complete = 0, True
    if delta == 0 and checker.block(Place(seen.number, "vertices")).get("encoding") == "draco":
        found, complete = int(seen.links.clip(0).sum()), bool((seen.links >= 0).all())
    for name in checker.children(place):
        own = Place(seen.number, f"{place.family}/{name}")
        with checker.guarded(own, "V048"):
            offsets = parse_segment(name, width, n_parts)
            if delta == 0 and not offsets.any():
                found += int(seen.links.clip(0).sum())
                complete &= bool((seen.links >= 0).all())
                continue
            family = checker.open(own)
            if family is not None:
                counts = _check_segment(checker, own, (family, offsets), of)
                found += int(counts.clip(0).sum())
                complete &= bool((counts >= 0).all())
    declared = block.get("num_links")
    if complete and isinstance(declared, int) and declared != found and block.get("store", "canonical") == "canonical":
        checker.report("V055", place, f"num_links is {declared}; its arrays have {found}.")


def _check_segment(
    checker: StoreChecker,
    place: Place,
    described: tuple[ChunkArray, NDArray[np.int64]],
    of: tuple[LevelSummary, int],
) -> NDArray[np.int64]:
    """Check the links of one set of offsets; return the number of links of each cell, -1 if unknown."""
    family, offsets = described
    seen, delta = of
    policy = checker.block(Place(seen.number, "/".join(place.family.split("/")[:2])))
    directed, store = bool(policy.get("directed", False)), str(policy.get("store", "canonical"))
    ordered = bool(family.attributes.get("has_perm", has_permutation(offsets, delta, directed=directed, store=store)))
    keys = checker.keys(family, place, seen.keys.shape[1])
    counts = np.full(len(keys), -1, np.int64)
    if not is_numeric(family.attributes.get("dtype")) or checker.root is None:
        return counts
    other = checker.levels.get(seen.number + delta, seen)
    scales = tuple(level_scale(checker.root, level.facts, keys.shape[1]) for level in (seen, other))
    for part in batches(keys):
        for i, blob in enumerate(checker.read(family, keys[part], place), part.start):
            location = place.at(keys[i])
            if location in checker.unread:
                continue
            with checker.guarded(location, "V064"):
                stream = decode_ragged(blob, "a cell").data if blob is not None and blob.size else np.zeros(0, np.uint8)
                rows = from_bytes(stream, str(family.attributes["dtype"]), len(offsets) + 1 + ordered, "a cell")
                counts[i] = len(rows)
                record = np.arange(len(rows))
                cells = keys[i : i + 1]
                segment = OffsetSegment(
                    offsets, cells, counts_to_offsets(np.array([len(rows)])), rows.astype(np.int64), record, ordered
                )
                _check_ends(checker, location, decode_cross_links(segment, (scales[0], scales[1]), "a cell"), of)
    _check_attributes(checker, replace(place), (keys, counts))
    return counts
