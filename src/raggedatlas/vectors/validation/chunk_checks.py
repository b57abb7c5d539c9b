"""Checks of chunks: vertices, fragments, links and their attributes, a few chunks at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.model.validation import DAMAGE
from raggedatlas.vectors.chunking import smallest_unsigned_dtype
from raggedatlas.vectors.geometry import Fragments
from raggedatlas.vectors.grids import bins_per_chunk, chunk_coordinates
from raggedatlas.vectors.metadata import level_chunk_shape
from raggedatlas.vectors.shapes import concat_ranges
from raggedatlas.vectors.storage.codecs import (
    HEADER_BYTES,
    MAGIC,
    QUANTISATION_BITS,
    VERSION,
    Blobs,
    Bytes,
    concat_blobs,
    decode_cell,
    decode_fragments,
)
from raggedatlas.vectors.storage.level_reader import EMPTY_INDEX
from raggedatlas.vectors.storage.zarr_reader import ChunkArray
from raggedatlas.vectors.validation.context import STEP, LevelSummary, Place, StoreChecker, batches
from raggedatlas.vectors.validation.metadata_checks import divides, is_numeric, is_text

_TOLERANCE = 1e-6


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
        _check_chunk_names(checker, number)
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
    _check_attributes(checker, level, "vertex_attributes", "V019", vertices)
    _walk_fragments(checker, level)
    _check_attributes(checker, level, "fragment_attributes", "V092", fragments)
    _walk_links(checker, level)
    return level


def _check_chunk_names(checker: StoreChecker, number: int) -> None:
    """Check that the vertices of layout 0.7 have no folders but chunks; readers do not see others."""
    for name in checker.children(Place(number, "vertices")) if checker.layout == "0.7" else ():
        if not all(part.removeprefix("-").isdigit() for part in name.split(".")):
            checker.report("V009", Place(number, f"vertices/{name}"), "its name is not a list of integers.")


def _walk_vertices(checker: StoreChecker, place: Place, array: ChunkArray, level: LevelSummary) -> None:
    """Count the vertices of every chunk, and check their positions."""
    positions = _PositionChecks(checker, level)
    # A chunk that cannot be decoded keeps -1, with which later checks skip it.
    level.vertices[:] = -1
    for i, where, blob in checker.blobs(array, level.keys, place):
        if blob is None or not blob.size:
            level.vertices[i] = 0
            checker.report("V009", where, "the chunk is listed, but empty.", "practice")
            continue
        with checker.guarded(where):
            points, n_faces = _decode_points(checker, where, array, blob)
            if points is not None:
                level.vertices[i], level.links[i] = len(points), n_faces
                positions.check(where, points)


def _decode_points(
    checker: StoreChecker, place: Place, array: ChunkArray, blob: Bytes
) -> tuple[NDArray[Any] | None, int]:
    """Return the positions of a chunk, or None if rows are incomplete, and its number of faces in Draco."""
    if array.attributes.get("encoding") == "draco":
        points, faces = decode_cell(blob, place.path)
        return points, len(faces)
    name = array.attributes.get("dtype")
    if not is_numeric(name) or checker.root is None:
        return None, 0
    dtype = np.dtype(str(name)).newbyteorder("<")
    size = dtype.itemsize * checker.root.n_dims
    if blob.size % size:
        checker.report("V010", place, f"{blob.size:,} bytes are not a multiple of {size}.")
        return None, 0
    return np.ascontiguousarray(blob).view(dtype).reshape(-1, checker.root.n_dims), 0


class _PositionChecks:
    """Checks of the positions of a level's vertices against its chunks and the bounds of the root."""

    def __init__(self, checker: StoreChecker, level: LevelSummary) -> None:
        root = checker.root
        assert root is not None
        self.checker = checker
        with checker.guarded(Place(level.number), "V097"):
            self.edges = level_chunk_shape(root, level.facts)
        self.low, self.high = (np.asarray(end, np.float64) for end in root.bounds)
        # these conventions store a vertex in each chunk that it is used in
        self.repeated = root.cross_chunk != "explicit_links" or root.index_convention == "identity"
        self.rounded = checker.block(Place(level.number, "vertices")).get("encoding") == "draco"

    def check(self, place: Place, points: NDArray[Any]) -> None:
        """Check that the positions of a chunk are finite, in the chunk, and within the bounds."""
        finite = np.isfinite(points).all(axis=1)
        if not finite.all():
            self.checker.report("V018", place, f"{np.count_nonzero(~finite):,} positions are not finite.")
        # NaN has no chunk and would be reported as V016 and V112 again.
        points = points[finite]
        # Draco rounds positions to steps of the widest axis of a cell
        rounded = self.rounded and len(points)
        slack = float(np.ptp(points, axis=0).max()) / (2**QUANTISATION_BITS - 1) if rounded else 0.0
        stray = self._outside_chunk(points, np.asarray(place.chunk)[-points.shape[1] :], slack)
        if stray.any() and not self.repeated:
            text = f"{np.count_nonzero(stray):,} vertices are outside, e.g. {points[stray][0].tolist()}."
            self.checker.report("V016", place, text)
        tolerance = _TOLERANCE * np.maximum(np.abs(self.low), np.abs(self.high)) + slack
        stray = np.asarray(((points < self.low - tolerance) | (points > self.high + tolerance)).any(axis=1))
        if stray.any():
            text = f"{np.count_nonzero(stray):,} vertices are outside the bounds, e.g. {points[stray][0].tolist()}."
            self.checker.report("V112", place, text)

    def _outside_chunk(self, points: NDArray[Any], key: NDArray[np.int64], slack: float) -> NDArray[np.bool_]:
        """Return which vertices are outside a chunk by more than `slack`."""
        if not slack:
            return np.asarray((chunk_coordinates(points, self.edges) != key).any(axis=1))
        under, over = (chunk_coordinates(points + step, self.edges) for step in (-slack, slack))
        return np.asarray(((under > key) | (over < key)).any(axis=1))


def _check_attributes(
    checker: StoreChecker, level: LevelSummary, group: str, rule: str, n_rows: NDArray[np.int64], tail: str = ""
) -> None:
    """Check that each attribute of a group has the expected number of rows in each chunk."""
    for name in checker.children(Place(level.number, group)):
        check_column(checker, Place(level.number, f"{group}/{name}{tail}"), rule, level.keys, n_rows)


def check_column(
    checker: StoreChecker, place: Place, rule: str, keys: NDArray[np.int64], n_rows: NDArray[np.int64]
) -> None:
    """Check that an attribute, if it exists, has the expected number of rows in each chunk (-1: unknown)."""
    array = checker.open(place)
    dtype = None if array is None else array.attributes.get("dtype")
    if array is None or not (is_numeric(dtype) or is_text(dtype)):
        return
    with checker.guarded(place, "V021"):
        shape = array.attributes.get("row_shape", array.attributes.get("shape")) or []
        size = np.dtype(str(dtype)).itemsize * int(np.prod(shape, dtype=np.int64))
        some = np.flatnonzero(n_rows > 0)
        if not shape and some.size and size:
            # zarr-vectors does not declare the row shape; the first chunk with rows shows it
            blob = checker.read(array, keys[some[:1]], place)[0]
            n_columns, rest = (1, 0) if blob is None else divmod(blob.size, int(n_rows[some[0]]) * size)
            if n_columns > 1 and not rest:
                text = f"its rows have {n_columns} values that its shape does not declare, as zarr-vectors writes them."
                checker.report("V021", place, text, "practice")
                size *= n_columns
        checker.check_own_keys(array, place, keys, rule, "it has rows in a missing chunk.")
        for i, where, blob in checker.blobs(array, keys, place):
            n_bytes = 0 if blob is None else blob.size
            if n_rows[i] >= 0 and n_bytes != n_rows[i] * size:
                checker.report(rule, where, f"it has {n_bytes / max(size, 1):g} rows; expected {n_rows[i]:,}.")


@dataclass(frozen=True)
class Bins:
    """The bins of a level.

    Parameters
    ----------
    edges : (D,) float64
        Edge lengths of a bin.
    ratio : (D,) int64
        Number of bins of a chunk on each axis; fragment ``k`` of a chunk is bin ``k``, last axis fastest.
    """

    edges: NDArray[np.float64]
    ratio: NDArray[np.int64]

    @property
    def n(self) -> int:
        """Number of bins of a chunk."""
        return int(np.prod(self.ratio))


def level_bins(checker: StoreChecker, level: LevelSummary) -> Bins | None:
    """Return the bins of points without objects; None for other shapes, or if a chunk is one bin."""
    root = checker.root
    if root is None or root.types != ("point_cloud",) or root.index_convention == "identity":
        return None
    if checker.node(Place(level.number, "object_index")) is not None:
        return None
    with checker.guarded(Place(level.number), "V100"):
        edges = level_chunk_shape(root, level.facts)
        bins = level.facts.get("bin_shape") if level.number else root.bin_shape
        if bins is not None and divides(bins, edges):
            result = Bins(np.asarray(bins, np.float64), bins_per_chunk(edges, tuple(bins)))
            return result if result.n > 1 else None
    return None


def check_bin_positions(
    checker: StoreChecker, place: Place, points: NDArray[Any], fragments: Fragments, bins: Bins
) -> None:
    """Check that the vertices of each fragment of a chunk are in its bin, within rounding."""
    if fragments.n_fragments != bins.n or not fragments.is_range.all():
        return
    key = np.asarray(place.chunk)[-points.shape[1] :]
    number = np.repeat(np.arange(bins.n), fragments.counts)
    own = points[concat_ranges(fragments.starts, fragments.counts)].astype(np.float64)
    # Lower corners of the bins, whose numbers count within the chunk, last axis fastest.
    low = (key * bins.ratio + np.stack(np.unravel_index(number, tuple(bins.ratio)), axis=1)) * bins.edges
    slack = _TOLERANCE * np.maximum(np.abs(low), bins.edges)
    stray = np.flatnonzero(((own < low - slack) | (own > low + bins.edges + slack)).any(axis=1))
    if stray.size:
        example = f"e.g. {own[stray[0]].tolist()} of bin {number[stray[0]]}"
        checker.report("V114", place, f"{stray.size:,} vertices are outside their bin, {example}.")


def _walk_fragments(checker: StoreChecker, level: LevelSummary) -> None:
    """Count the fragments of every chunk, and check their rows."""
    place, points_place = Place(level.number, "vertex_fragments"), Place(level.number, "vertices")
    array = checker.open(place)
    if array is None:
        return
    in_order = bool(level.facts.get("fragments_tile"))
    bins = level_bins(checker, level)
    vertices = checker.open(points_place) if bins is not None and checker.depth > 3 else None
    checker.check_own_keys(array, place, level.keys, "V034", "it has fragments in a chunk without vertices.")
    level.fragments[:] = -1
    for i, where, fragments in _fragment_indexes(checker, array, level.keys, place):
        level.fragments[i] = fragments.n_fragments
        n_rows = int(level.vertices[i])
        if n_rows < 0:
            continue
        if bins is not None and fragments.n_fragments > bins.n:
            checker.report("V113", where, f"it has {fragments.n_fragments:,} fragments, but {bins.n:,} bins.")
        if has_missing_rows(fragments, n_rows):
            checker.report("V034", where, f"a fragment refers to rows beyond the {n_rows:,} vertices of the chunk.")
            continue
        level.widest = max(level.widest, int(fragments.counts.max(initial=0)))
        # V114 needs the vertices a second time, so only the first chunks are checked.
        if bins is not None and vertices is not None and i < STEP:
            own = points_place.at(level.keys[i])
            with checker.guarded(own):
                blob = checker.read(vertices, level.keys[i : i + 1], own)[0]
                points = None if blob is None else _decode_points(checker, own, vertices, blob)[0]
                if points is not None:
                    check_bin_positions(checker, own, points, fragments, bins)
        if in_order and not is_tiling(fragments, n_rows):
            in_order = False  # reported once
            checker.report("V110", where, "its fragments are not its rows in order.")


def _fragment_indexes(
    checker: StoreChecker, array: ChunkArray, keys: NDArray[np.int64], place: Place
) -> Iterator[tuple[int, Place, Fragments]]:
    """Yield number, place and fragments of each chunk; report fragment indexes that cannot be decoded."""
    for part in batches(keys):
        stored = checker.read(array, keys[part], place)
        blobs = [EMPTY_INDEX if blob is None or not blob.size else blob for blob in stored]
        places = [place.at(key) for key in keys[part]]
        fragments: list[Fragments | None]
        try:
            together = decode_fragments(concat_blobs(blobs))
            fragments = [_chunk_fragments(together, c) for c in range(len(blobs))]
        except DAMAGE:
            fragments = [_decode_fragments(checker, own, blob) for own, blob in zip(places, blobs, strict=True)]
        for i, (own, each) in enumerate(zip(places, fragments, strict=True), part.start):
            if each is not None and own not in checker.unread:
                yield i, own, each


def _chunk_fragments(fragments: Fragments, c: int) -> Fragments:
    """Return the fragments of one chunk; explicit lists keep their offsets into all rows."""
    a, b = int(fragments.bounds[c]), int(fragments.bounds[c + 1])
    part = slice(a, b)
    bounds = np.array([0, b - a])
    return Fragments(bounds, fragments.is_range[part], fragments.starts[part], fragments.counts[part], fragments.rows)


def _decode_fragments(checker: StoreChecker, place: Place, blob: Bytes) -> Fragments | None:
    """Decode one fragment index; report a fault by the rule that it breaks."""
    fault = find_fault(blob)
    if fault is not None:
        checker.report(fault[0], place, fault[1])
        return None
    with checker.guarded(place, "V041"):
        return decode_fragments(Blobs(blob, np.array([0, blob.size])))
    return None


def find_fault(blob: Bytes) -> tuple[str, str] | None:
    """Return the rule that a fragment index breaks and a message; None if it can be decoded."""
    if blob.size < HEADER_BYTES:
        return "V026", f"it has {blob.size} bytes; its header alone has {HEADER_BYTES}."
    magic, packed, n_all, n_runs = (int(value) for value in np.ascontiguousarray(blob[:HEADER_BYTES]).view("<u4"))
    # The u16 version and the u16 flags, which must be 0, are read as one u32.
    if (magic, packed) != (MAGIC, VERSION):
        text = f"it begins with {magic:#010x}, version {packed & 0xFFFF}, flags {packed >> 16}"
        return "V026", f"{text}; expected {MAGIC:#010x}, 1, 0."
    if n_runs > n_all:
        return "V027", f"it declares {n_runs} runs among {n_all} fragments."
    if not n_all:
        return None if blob.size == HEADER_BYTES else ("V031", f"it has {blob.size} bytes, but no fragments.")
    # header, bitmap in words of 64 bits, runs of two int64, offsets of lists as uint32, rows of lists as int64
    bitmap_bytes = (n_all + 63) // 64 * 8
    n_lists = n_all - n_runs
    at_rows = HEADER_BYTES + bitmap_bytes + 16 * n_runs + 4 * (n_lists + 1)
    if blob.size < at_rows:
        return "V041", f"it has {blob.size} bytes; {n_all} fragments, {n_runs} of them runs, need at least {at_rows}."
    bits = np.unpackbits(blob[HEADER_BYTES : HEADER_BYTES + bitmap_bytes], bitorder="little")
    if bits[n_all:].any():
        return "V028", "bits after the last fragment are set."
    if int(bits.sum()) != n_runs:
        return "V027", f"{int(bits.sum())} bits are set, but {n_runs} runs are declared."
    return _find_list_fault(blob, at_rows, n_lists)


def _find_list_fault(blob: Bytes, at_rows: int, n_lists: int) -> tuple[str, str] | None:
    """Return the fault of the offsets and rows of explicit fragments, as `find_fault` does."""
    offsets = np.ascontiguousarray(blob[at_rows - 4 * (n_lists + 1) : at_rows]).view("<u4").astype(np.int64)
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        return "V030", f"its offsets are {offsets[:8].tolist()}."
    if blob.size != at_rows + 8 * int(offsets[-1]):
        return "V041", f"it has {blob.size} bytes; its explicit fragments need {at_rows + 8 * int(offsets[-1])}."
    return None


def has_missing_rows(fragments: Fragments, n_rows: int) -> bool:
    """Return whether a fragment refers to a row at or beyond `n_rows`, or a negative one."""
    runs = fragments.is_range
    starts, counts = fragments.starts[runs], fragments.counts[runs]
    # By subtraction, because start + count may exceed int64.
    if ((starts < 0) | (counts < 0) | (starts > n_rows) | (counts > n_rows - starts)).any():
        return True
    rows = _listed_rows(fragments)
    return bool(((rows < 0) | (rows >= n_rows)).any())


def _listed_rows(fragments: Fragments) -> NDArray[np.int64]:
    """Return the rows of all explicit fragments of a chunk."""
    lists = np.flatnonzero(~fragments.is_range)
    if not lists.size:
        return np.zeros(0, np.int64)
    # Lists of a chunk lie in `rows` one after another, in the order of their fragments.
    first, last = int(lists[0]), int(lists[-1])
    return fragments.rows[fragments.starts[first] : fragments.starts[last] + fragments.counts[last]]


def covers_once(fragments: Fragments, n_rows: int) -> bool:
    """Return whether fragments, whose rows are valid, contain every row exactly once."""
    steps = np.zeros(n_rows + 1, np.int64)
    runs = fragments.is_range
    # A run adds 1 at its start and -1 after its end: the running sum counts how often each row is covered.
    np.add.at(steps, fragments.starts[runs], 1)
    np.add.at(steps, fragments.starts[runs] + fragments.counts[runs], -1)
    times = np.cumsum(steps)[:-1]
    np.add.at(times, _listed_rows(fragments), 1)
    return bool((times == 1).all())


def is_tiling(fragments: Fragments, n_rows: int) -> bool:
    """Return whether fragments are the rows of a chunk in order."""
    ends = np.cumsum(fragments.counts)
    in_order = fragments.is_range.all() and (fragments.starts == ends - fragments.counts).all()
    return bool(in_order) and n_rows == (int(ends[-1]) if len(ends) else 0)


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
            _check_link_fragments(checker, where, fragments, int(level.fragments[i]), int(level.links[i]))
    _check_attributes(checker, level, "link_attributes", "V082", level.links, "/" + place.family.split("/", 1)[1])


def _walk_rows(checker: StoreChecker, place: Place, array: ChunkArray, level: LevelSummary, width: int) -> None:
    """Count the links of every chunk, and check their rows."""
    name = array.attributes.get("dtype")
    if not is_numeric(name):
        return
    dtype = np.dtype(str(name)).newbyteorder("<")
    most = int(level.vertices.max(initial=0))
    smallest = smallest_unsigned_dtype(most)
    if dtype.itemsize > smallest.itemsize:
        checker.report("V052", place, f"its type is {dtype.name}; {smallest.name} is enough for {most:,} rows.")
    checker.check_own_keys(array, place, level.keys, "V051", "it has links in a chunk without vertices.")
    level.links[:] = -1
    for i, where, blob in checker.blobs(array, level.keys, place):
        n_bytes, size = 0 if blob is None else blob.size, dtype.itemsize * width
        if n_bytes % size:
            checker.report("V051", where, f"{n_bytes:,} bytes are not a multiple of {size}.")
            continue
        level.links[i] = n_bytes // size
        rows = np.zeros(0, dtype) if blob is None else np.ascontiguousarray(blob).view(dtype)
        low, high = (int(rows.min()), int(rows.max())) if rows.size else (0, -1)
        n_rows = int(level.vertices[i])
        if n_rows >= 0 and (low < 0 or high >= n_rows):
            checker.report("V051", where, f"a link refers to row {low if low < 0 else high} of {n_rows}.")


def _check_link_fragments(
    checker: StoreChecker, place: Place, fragments: Fragments, n_fragments: int, n_links: int
) -> None:
    """Check that the link fragments of a chunk match its vertex fragments, and contain every link exactly once."""
    if n_fragments >= 0 and fragments.n_fragments != n_fragments and (n_links or fragments.n_fragments):
        text = f"it has {fragments.n_fragments} fragments for {n_fragments} vertex fragments."
        # zarr-vectors 0.9 omits trailing fragments without links
        is_short = checker.layout == "0.9" and fragments.n_fragments < n_fragments
        checker.report("V054", place, text, "practice" if is_short else None)
    if n_links >= 0 and (has_missing_rows(fragments, n_links) or not covers_once(fragments, n_links)):
        checker.report("V054", place, f"its fragments do not hold each of {n_links:,} links exactly once.")


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
