"""Checks of chunks: vertices, fragments, links and their attributes, a few chunks at a time."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.wings.vectors.chunking import chunk_coordinates, smallest_unsigned_dtype
from raggedatlas.wings.vectors.geometry import Fragments, level_chunk_shape
from raggedatlas.wings.vectors.storage.codecs import (
    QUANTISATION_BITS,
    Blobs,
    are_tiles,
    concat_blobs,
    corrupt_index_error,
    decode_cell,
    fragment_rows,
    lacks_rows,
    try_decode_fragments,
)
from raggedatlas.wings.vectors.storage.level_reader import EMPTY_INDEX
from raggedatlas.wings.vectors.storage.zarr_reader import ChunkArray
from raggedatlas.wings.vectors.validation.metadata_checks import dtype_of
from raggedatlas.wings.vectors.validation.rules import LevelSummary, Place, StoreChecker, batches


def walk_level(checker: StoreChecker, number: int, facts: dict[str, Any]) -> LevelSummary:
    """Check all chunks of a level; return the summary that checks of objects and links need."""
    place = Place(number, "vertices")
    n_parts = 1 if checker.root is None else checker.root.n_dims
    array = checker.open(place)
    old = Place(number, "vertex_group_offsets")
    if checker.node(old) is not None:
        checker.report("V040", old, "it exists; zarr-vectors before 0.6 wrote it.")
    keys = np.zeros((0, n_parts), np.int64)
    if array is not None:
        for name in checker.children(Place(number, "vertices")) if checker.layout == "0.7" else ():
            if not all(part.removeprefix("-").isdecimal() for part in name.split(".")):
                checker.report("V009", Place(number, f"vertices/{name}"), "its name is not a list of integers.")
        with checker.guarded(place, "V009"):
            # chunks that are also partitioned by an attribute have more parts than axes
            partitioned = facts.get("chunk_dims") or facts.get("chunk_attribute_name")
            n_parts = array.keys.shape[1] if len(array.keys) and partitioned else n_parts
        keys = checker.keys(array, place, n_parts)
    vertices, fragments, links = np.zeros((3, len(keys)), np.int64)
    fragments += 1  # a chunk without a fragment index is one fragment
    level = LevelSummary(number, facts, keys, vertices, fragments, links)
    if array is not None:
        _walk_vertices(checker, place, array, level)
    declared, n_vertices = facts.get("vertex_count"), int(vertices.clip(0).sum())
    if declared != n_vertices and (vertices >= 0).all():
        checker.report("V098", Place(number), f"vertex_count is {declared}; its chunks have {n_vertices:,}.")
    check_attributes(checker, Place(level.number, "vertex_attributes"), "V019", level.keys, vertices)
    _walk_fragments(checker, level)
    check_attributes(checker, Place(level.number, "fragment_attributes"), "V092", level.keys, fragments)
    _walk_links(checker, level)
    return level


def _walk_vertices(checker: StoreChecker, place: Place, array: ChunkArray, level: LevelSummary) -> None:
    """Count the vertices of every chunk, and check that their positions are finite, and in the chunk."""
    root = checker.root
    assert root is not None
    edges = None
    with checker.guarded(Place(level.number), "V097"):
        edges = level_chunk_shape(root, level.facts)
    # These conventions store a vertex in each chunk that it is used in.
    repeated = root.cross_chunk != "explicit_links" or root.index_convention == "identity"
    is_draco = array.attributes.get("encoding") == "draco"
    dtype = dtype_of(array.attributes)
    # A chunk that cannot be decoded keeps -1, with which later checks skip it.
    level.vertices[:] = -1
    for i, where, blob in checker.blobs(array, level.keys, place):
        if not blob.size:
            level.vertices[i] = 0
            checker.report("V009", where, "the chunk is listed, but empty.", "practice")
            continue
        with checker.guarded(where):
            points: NDArray[Any]
            if is_draco:
                points, faces = decode_cell(blob, where.path)
                level.links[i] = len(faces)
            elif dtype is None:
                continue
            elif blob.size % (size := dtype.itemsize * root.n_dims):
                checker.report("V010", where, f"{blob.size:,} bytes are not a multiple of {size}.")
                continue
            else:
                points = np.ascontiguousarray(blob).view(dtype).reshape(-1, root.n_dims)
            level.vertices[i] = len(points)
            finite = np.isfinite(points).all(axis=1)
            if not finite.all():
                checker.report("V018", where, f"{np.count_nonzero(~finite):,} positions are not finite.")
            # NaN has no chunk and would be reported as V016 again.
            points = points[finite]
            if repeated or edges is None:
                continue
            key = np.asarray(where.chunk)[-points.shape[1] :]
            under = over = chunk_coordinates(points, edges)
            if is_draco and len(points):
                # Draco rounds positions to steps of the widest axis of a cell.
                slack = float(np.ptp(points, axis=0).max()) / (2**QUANTISATION_BITS - 1)
                under, over = (chunk_coordinates(points + step, edges) for step in (-slack, slack))
            stray = ((under > key) | (over < key)).any(axis=1)
            if stray.any():
                text = f"{np.count_nonzero(stray):,} vertices are outside, e.g. {points[stray][0].tolist()}."
                checker.report("V016", where, text)


def check_attributes(
    checker: StoreChecker, above: Place, rule: str, keys: NDArray[np.int64], n_rows: NDArray[np.int64], tail: str = ""
) -> None:
    """Check that each attribute of a family has the expected number of rows in each chunk (-1: unknown).

    `tail` is the path from an attribute to its array; attributes without that array are left out.
    """
    for name in checker.children(above):
        place = Place(above.resolution, f"{above.family}/{name}{tail}")
        array = checker.open(place)
        dtype = None if array is None else dtype_of(array.attributes, texts=True)
        if array is None or dtype is None:
            continue
        with checker.guarded(place, "V021"):
            shape = array.attributes.get("row_shape", array.attributes.get("shape")) or []
            size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            some = np.flatnonzero(n_rows > 0)
            if not shape and some.size and size:
                # zarr-vectors does not declare the row shape; the first chunk with rows shows it
                blob = checker.read(array, keys[some[:1]], place)[0]
                n_columns, rest = divmod(blob.size, int(n_rows[some[0]]) * size)
                if n_columns > 1 and not rest:
                    text = f"its rows have {n_columns} values that its shape does not declare, as zarr-vectors writes them."
                    checker.report("V021", place, text, "practice")
                    size *= n_columns
            checker.check_own_keys(array, place, keys, rule, "it has rows in a missing chunk.")
            for i, where, blob in checker.blobs(array, keys, place):
                if n_rows[i] >= 0 and blob.size != n_rows[i] * size:
                    checker.report(rule, where, f"it has {blob.size / max(size, 1):g} rows; expected {n_rows[i]:,}.")


def _walk_fragments(checker: StoreChecker, level: LevelSummary) -> None:
    """Count the fragments of every chunk, and check their rows."""
    place = Place(level.number, "vertex_fragments")
    array = checker.open(place)
    if array is None:
        return
    in_order = bool(level.facts.get("fragments_tile"))
    checker.check_own_keys(array, place, level.keys, "V034", "it has fragments in a chunk without vertices.")
    level.fragments[:] = -1
    for i, where, fragments in _fragment_indexes(checker, array, level.keys, place):
        level.fragments[i] = fragments.n_fragments
        n_rows = int(level.vertices[i])
        if n_rows < 0:
            continue
        if lacks_rows(fragments, level.vertices[i : i + 1]).any():
            checker.report("V034", where, f"a fragment refers to rows beyond the {n_rows:,} vertices of the chunk.")
            continue
        level.widest = max(level.widest, int(fragments.counts.max(initial=0)))
        if in_order and not are_tiles(fragments, np.array([0, n_rows])):
            in_order = False  # reported once
            checker.report("V110", where, "its fragments are not its rows in order.")


def _fragment_indexes(
    checker: StoreChecker, array: ChunkArray, keys: NDArray[np.int64], place: Place
) -> Iterator[tuple[int, Place, Fragments]]:
    """Yield number, place and fragments of each chunk; report fragment indexes that cannot be decoded."""
    for part in batches(keys):
        stored = checker.read(array, keys[part], place)
        blobs = [blob if blob.size else EMPTY_INDEX for blob in stored]
        places = [place.at(key) for key in keys[part]]
        fragments: list[Fragments | None]
        together = try_decode_fragments(concat_blobs(blobs))
        if isinstance(together, Fragments):
            # Explicit lists keep their offsets into all rows.
            fragments = [
                Fragments(
                    np.array([0, b - a]),
                    together.is_range[a:b],
                    together.starts[a:b],
                    together.counts[a:b],
                    together.rows,
                )
                for a, b in pairwise(together.bounds.tolist())
            ]
        # One damaged index fails all of them; decoded one by one, only that one is reported.
        else:
            fragments = []
            for own, blob in zip(places, blobs, strict=True):
                result = try_decode_fragments(Blobs(blob, np.array([0, blob.size])))
                fragments.append(result if isinstance(result, Fragments) else None)
                if not isinstance(result, Fragments):
                    checker.report_error(own, corrupt_index_error(result[0], blob, "It"), "V026")
        for i, (own, each) in enumerate(zip(places, fragments, strict=True), part.start):
            if each is not None and own not in checker.unread:
                yield i, own, each


def _walk_links(checker: StoreChecker, level: LevelSummary) -> None:
    """Check the links within chunks, and their fragments and attributes."""
    top, own = Place(level.number, "links/0"), Place(level.number, "link_fragments")
    block = checker.block(top)
    width, place = block.get("link_width"), top
    if checker.layout == "0.9":
        # the array is named by the offsets of all ends but the first, which are 0 within a chunk
        zero = ".".join("0" for _ in range(level.keys.shape[1]))
        name = "_".join([zero] * (width - 1)) or "self" if isinstance(width, int) and width < 64 else zero
        place = Place(level.number, f"links/0/{name}")
    array = checker.open(place) if checker.node(top) is not None else None
    index = checker.open(own)
    if array is not None and isinstance(width, int) and width > 0:
        _walk_rows(checker, place, array, level, width)
        declared, n_links = block.get("num_links"), int(level.links.clip(0).sum())
        if checker.layout == "0.7" and isinstance(declared, int) and declared != n_links and (level.links >= 0).all():
            checker.report("V055", top, f"num_links is {declared}; the chunks have {n_links}.")
    # the faces of Draco cells are links without an array of links
    if index is not None and array is None and not level.links.any():
        checker.report("V057", own, "there are no links within chunks.")
    elif index is not None:
        for i, where, fragments in _fragment_indexes(checker, index, level.keys, own):
            n_fragments = int(level.fragments[i])
            n_links = int(level.links[i])
            if n_fragments >= 0 and fragments.n_fragments != n_fragments and (n_links or fragments.n_fragments):
                text = f"it has {fragments.n_fragments} fragments for {n_fragments} vertex fragments."
                # zarr-vectors 0.9 omits trailing fragments without links
                is_short = checker.layout == "0.9" and fragments.n_fragments < n_fragments
                checker.report("V054", where, text, "practice" if is_short else None)
            covers = n_links < 0
            if not covers and not lacks_rows(fragments, np.array([n_links])).any():
                rows, _ = fragment_rows(fragments, np.arange(fragments.n_fragments))
                covers = bool((np.bincount(rows, minlength=n_links) == 1).all())
            if not covers:
                checker.report("V054", where, f"its fragments do not hold each of {n_links:,} links exactly once.")
    check_attributes(
        checker,
        Place(level.number, "link_attributes"),
        "V082",
        level.keys,
        level.links,
        "/" + place.family.split("/", 1)[1],
    )


def _walk_rows(checker: StoreChecker, place: Place, array: ChunkArray, level: LevelSummary, width: int) -> None:
    """Count the links of every chunk, and check their rows."""
    dtype = dtype_of(array.attributes)
    if dtype is None:
        return
    most = int(level.vertices.max(initial=0))
    smallest = smallest_unsigned_dtype(most)
    if dtype.itemsize > smallest.itemsize:
        checker.report("V052", place, f"its type is {dtype.name}; {smallest.name} is enough for {most:,} rows.")
    checker.check_own_keys(array, place, level.keys, "V051", "it has links in a chunk without vertices.")
    level.links[:] = -1
    for i, where, blob in checker.blobs(array, level.keys, place):
        size = dtype.itemsize * width
        if blob.size % size:
            checker.report("V051", where, f"{blob.size:,} bytes are not a multiple of {size}.")
            continue
        level.links[i] = blob.size // size
        rows = np.ascontiguousarray(blob).view(dtype)
        low, high = (int(rows.min()), int(rows.max())) if rows.size else (0, -1)
        n_rows = int(level.vertices[i])
        if n_rows >= 0 and (low < 0 or high >= n_rows):
            checker.report("V051", where, f"a link refers to row {low if low < 0 else high} of {n_rows}.")


_ENDS = {"mesh": 3, "graph": 2, "skeleton": 1}


def check_kind(checker: StoreChecker, level: LevelSummary) -> None:
    """Check the links of a level against geometry type and convention."""
    root = checker.root
    if root is None:
        return
    place, cross = Place(level.number, "links/0"), Place(level.number, "cross_chunk_links/0")
    n_links = int(level.links.clip(0).sum())
    blocks = [checker.block(each) for each in (place, cross) if checker.node(each) is not None]
    least = _ENDS.get(root.types[0], 0) if len(root.types) == 1 else 0
    for width in (block.get("link_width") for block in blocks):
        if isinstance(width, int) and width < least:
            text = f"its links have {width} ends; links of a {root.types[0]} have at least {least}."
            checker.report("V056", place, text)
    if root.types == ("point_cloud",) and n_links:
        checker.report("V056", place, f"a point cloud has {n_links:,} links.", "practice")
    if root.links_convention == "implicit_sequential" and n_links and set(root.types) != {"point_cloud"}:
        checker.report("V060", place, f"{n_links:,} links are stored, although they follow from the vertex order.")
    linked = {"mesh", "graph"} & set(root.types)
    if root.links_convention == "explicit" and linked and not blocks and not n_links and level.widest > 1:
        kind = f"a {min(linked)} has fragments of {level.widest} vertices"
        checker.report("V049", Place(level.number), f"no links are stored, but they are explicit and {kind}.")
