"""Checks of chunks: vertices, fragments, links and their attributes, a few chunks at a time."""

from collections.abc import Callable, Iterator
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
    VERSION,
    Blobs,
    Bytes,
    concat_blobs,
    decode_fragments,
)
from raggedatlas.vectors.storage.level_reader import EMPTY_INDEX
from raggedatlas.vectors.storage.zarr_reader import ChunkArray, KeyLookup
from raggedatlas.vectors.validation.context import STEP, LevelSummary, Place, StoreChecker
from raggedatlas.vectors.validation.metadata_checks import divides, is_numeric, is_text

_TOLERANCE = 1e-6


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


def level_bins(checker: StoreChecker, seen: LevelSummary) -> Bins | None:
    """Return the bins of points without objects; None for other shapes, or if a chunk is one bin."""
    root = checker.root
    if root is None or root.types != ("point_cloud",) or root.index_convention == "identity":
        return None
    if checker.node(Place(seen.number, "object_index")) is not None:
        return None
    with checker.guarded(Place(seen.number), "V100"):
        edges = level_chunk_shape(root, seen.facts)
        bins = seen.facts.get("bin_shape") if seen.number else root.bin_shape
        if bins is not None and divides(bins, edges):
            result = Bins(np.asarray(bins, np.float64), bins_per_chunk(edges, tuple(bins)))
            return result if result.n > 1 else None
    return None


def check_fragments(checker: StoreChecker, place: Place, found: Fragments, bins: Bins) -> None:
    """Check that a chunk has no more fragments than bins."""
    if found.n_fragments > bins.n:
        checker.report("V113", place, f"it has {found.n_fragments:,} fragments, but {bins.n:,} bins.")


def check_bin_positions(checker: StoreChecker, place: Place, points: NDArray[Any], of: tuple[Fragments, Bins]) -> None:
    """Check that the vertices of each fragment of a chunk are in its bin, within rounding."""
    found, bins = of
    if found.n_fragments != bins.n or not found.is_range.all():
        return
    key = np.asarray(place.chunk)[-points.shape[1] :]
    number = np.repeat(np.arange(bins.n), found.counts)
    own = points[concat_ranges(found.starts, found.counts)].astype(np.float64)
    low = (key * bins.ratio + np.stack(np.unravel_index(number, tuple(bins.ratio)), axis=1)) * bins.edges
    slack = _TOLERANCE * np.maximum(np.abs(low), bins.edges)
    out = ((own < low - slack) | (own > low + bins.edges + slack)).any(axis=1)
    if out.any():
        first = int(np.flatnonzero(out)[0])
        text = f"{np.count_nonzero(out):,} vertices are outside their bin, e.g. {own[first].tolist()} of bin {number[first]}."
        checker.report("V114", place, text)


def decode_fragment_indexes(
    checker: StoreChecker, place: Place, keys: NDArray[np.int64], raw: list[Bytes | None]
) -> list[Fragments | None]:
    """Return the fragments of each chunk; report undecodable blobs, and return None for them."""
    blobs = [EMPTY_INDEX if blob is None or not blob.size else blob for blob in raw]
    try:
        together = decode_fragments(concat_blobs(blobs))
    except DAMAGE:
        return [_decode(checker, place.at(key), blob) for key, blob in zip(keys, blobs, strict=True)]
    return [_chunk_fragments(together, c) for c in range(len(blobs))]


def _chunk_fragments(fragments: Fragments, c: int) -> Fragments:
    """Return the fragments of one chunk; explicit lists keep their offsets into all rows."""
    a, b = int(fragments.bounds[c]), int(fragments.bounds[c + 1])
    part = slice(a, b)
    return Fragments(
        *(
            np.array([0, b - a]),
            fragments.is_range[part],
            fragments.starts[part],
            fragments.counts[part],
            fragments.rows,
        )
    )


def _decode(checker: StoreChecker, place: Place, blob: Bytes) -> Fragments | None:
    """Decode one blob; report a fault by the rule that it breaks."""
    fault = find_fault(blob)
    if fault is not None:
        checker.report(fault[0], place, fault[1])
        return None
    with checker.guarded(place, "V041"):
        return decode_fragments(Blobs(blob, np.array([0, blob.size])))
    return None


def find_fault(blob: Bytes) -> tuple[str, str] | None:
    """Return the rule that a blob breaks and a message; None if it can be decoded."""
    if blob.size < HEADER_BYTES:
        return "V026", f"it has {blob.size} bytes; its header alone has {HEADER_BYTES}."
    magic, packed, n_all, n_runs = (int(value) for value in np.ascontiguousarray(blob[:HEADER_BYTES]).view("<u4"))
    if (magic, packed) != (MAGIC, VERSION):
        text = f"it begins with {magic:#010x}, version {packed & 0xFFFF}, flags {packed >> 16}"
        return "V026", f"{text}; expected {MAGIC:#010x}, 1, 0."
    if n_runs > n_all:
        return "V027", f"it declares {n_runs} runs among {n_all} fragments."
    if not n_all:
        return None if blob.size == HEADER_BYTES else ("V031", f"it has {blob.size} bytes, but no fragments.")
    padded = (n_all + 63) // 64 * 8
    n_lists = n_all - n_runs
    at_rows = HEADER_BYTES + padded + 16 * n_runs + 4 * (n_lists + 1)
    if blob.size < at_rows:
        return "V041", f"it has {blob.size} bytes; {n_all} fragments, {n_runs} of them runs, need at least {at_rows}."
    bits = np.unpackbits(blob[HEADER_BYTES : HEADER_BYTES + padded], bitorder="little")
    if bits[n_all:].any():
        return "V028", "bits after the last fragment are set."
    if int(bits.sum()) != n_runs:
        return "V027", f"{int(bits.sum())} bits are set, but {n_runs} runs are declared."
    return _fault_of_lists(blob, at_rows, n_lists)


def _fault_of_lists(blob: Bytes, at_rows: int, n_lists: int) -> tuple[str, str] | None:
    """Check offsets, the number of rows, and signs."""
    offsets = np.ascontiguousarray(blob[at_rows - 4 * (n_lists + 1) : at_rows]).view("<u4").astype(np.int64)
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        return "V030", f"its offsets are {offsets[:8].tolist()}."
    if blob.size != at_rows + 8 * int(offsets[-1]):
        return "V041", f"it has {blob.size} bytes; its explicit fragments need {at_rows + 8 * int(offsets[-1])}."
    return None


def names_missing_rows(fragments: Fragments, n_rows: int) -> bool:
    """Return whether a fragment refers to a row at or beyond `n_rows`, or a negative one."""
    runs = fragments.is_range
    starts, counts = fragments.starts[runs], fragments.counts[runs]
    if ((starts < 0) | (counts < 0) | (starts > n_rows) | (counts > n_rows - starts)).any():
        return True
    listed = _listed(fragments)
    return bool(listed.size) and bool(((listed < 0) | (listed >= n_rows)).any())


def _listed(fragments: Fragments) -> NDArray[np.int64]:
    """Return the rows of all explicit fragments of a chunk."""
    lists = np.flatnonzero(~fragments.is_range)
    if not lists.size:
        return np.zeros(0, np.int64)
    first, last = int(lists[0]), int(lists[-1])
    return fragments.rows[fragments.starts[first] : fragments.starts[last] + fragments.counts[last]]


def covers_once(fragments: Fragments, n_rows: int) -> bool:
    """Return whether fragments, whose rows are valid, hold every row exactly once."""
    steps = np.zeros(n_rows + 1, np.int64)
    runs = fragments.is_range
    np.add.at(steps, fragments.starts[runs], 1)
    np.add.at(steps, fragments.starts[runs] + fragments.counts[runs], -1)
    times = np.cumsum(steps)[:-1]
    np.add.at(times, _listed(fragments), 1)
    return bool((times == 1).all())


def tiles(fragments: Fragments, n_rows: int) -> bool:
    """Return whether fragments are the rows of a chunk in order."""
    ends = np.cumsum(fragments.counts)
    return bool(fragments.is_range.all() and (fragments.starts == ends - fragments.counts).all()) and n_rows == (
        int(ends[-1]) if len(ends) else 0
    )


_ONE_FRAGMENT = 1


def walk_level(checker: StoreChecker, number: int, facts: dict[str, Any]) -> LevelSummary:
    """Check all chunks of a level; return the summary that checks of objects and links need."""
    place = Place(number, "vertices")
    n_dims = 1 if checker.root is None else checker.root.n_dims
    n_parts = n_dims
    family = checker.open(place)
    if checker.node(Place(number, "vertex_group_offsets")) is not None:
        checker.report("V040", Place(number, "vertex_group_offsets"), "it exists; zarr-vectors before 0.6 wrote it.")
    keys = np.zeros((0, n_parts), np.int64)
    if family is not None:
        _check_chunk_names(checker, number)
        with checker.guarded(place, "V009"):
            n_parts = family.keys.shape[1] if len(family.keys) and _is_partitioned(facts) else n_dims
        keys = checker.keys(family, place, n_parts)
    counts = np.zeros((3, len(keys)), np.int64)
    counts[1] = _ONE_FRAGMENT
    seen = LevelSummary(number, facts, keys, *counts)
    if family is not None:
        _walk_vertices(checker, place, family, seen)
    _check_total(checker, seen)
    _check_attributes(checker, seen, "vertex_attributes", ("V019", seen.vertices))
    _walk_fragments(checker, seen)
    _check_attributes(checker, seen, "fragment_attributes", ("V092", seen.fragments))
    _walk_links(checker, seen)
    return seen


def _is_partitioned(facts: dict[str, Any]) -> bool:
    """Return whether chunks of a level are also partitioned by an attribute, so that keys have leading parts."""
    return bool(facts.get("chunk_dims") or facts.get("chunk_attribute_name"))


def _check_chunk_names(checker: StoreChecker, number: int) -> None:
    """Check that layout 0.7 has only chunks among those of its vertices; readers do not see others."""
    for name in checker.children(Place(number, "vertices")) if checker.layout == "0.7" else ():
        if not all(part.removeprefix("-").isdigit() for part in name.split(".")):
            checker.report("V009", Place(number, f"vertices/{name}"), "its name is not a list of integers.")


def _check_total(checker: StoreChecker, seen: LevelSummary) -> None:
    """Compare the number of vertices with the declared one."""
    declared, found = seen.facts.get("vertex_count"), int(seen.vertices.clip(0).sum())
    if declared != found and (seen.vertices >= 0).all():
        text = f"vertex_count is {declared}; its chunks have {found:,}."
        checker.report("V098", Place(seen.number), text)


def batches(keys: NDArray[np.int64]) -> Iterator[slice]:
    """Yield slices of `STEP` chunks."""
    for start in range(0, len(keys), STEP):
        yield slice(start, min(start + STEP, len(keys)))


def _walk_vertices(checker: StoreChecker, place: Place, family: ChunkArray, seen: LevelSummary) -> None:
    """Count the vertices of every chunk, and check their positions."""
    look = _position_checker(checker, seen)
    for part in batches(seen.keys):
        for i, blob in enumerate(checker.read(family, seen.keys[part], place), part.start):
            location = place.at(seen.keys[i])
            seen.vertices[i] = -1
            if location in checker.unread:
                continue
            if blob is None or not blob.size:
                seen.vertices[i] = 0
                checker.report("V009", location, "the chunk is listed, but empty.", "practice")
                continue
            with checker.guarded(location):
                points = _points_of(checker, location, family, blob)
                if points is not None:
                    seen.vertices[i] = len(points[0])
                    seen.links[i] = points[1]
                    look(location, points[0])


def _points_of(checker: StoreChecker, place: Place, family: ChunkArray, blob: Bytes) -> tuple[NDArray[Any], int] | None:
    """Return the positions of a chunk, and its number of faces in Draco; report incomplete rows and return None."""
    if family.attributes.get("encoding") == "draco":
        from raggedatlas.vectors.storage.codecs import decode_cell

        points, faces = decode_cell(blob, place.path)
        return points, len(faces)
    name = family.attributes.get("dtype")
    if not is_numeric(name) or checker.root is None:
        return None
    dtype = np.dtype(str(name)).newbyteorder("<")
    size = dtype.itemsize * checker.root.n_dims
    if blob.size % size:
        checker.report("V010", place, f"{blob.size:,} bytes are not a multiple of {size}.")
        return None
    return np.ascontiguousarray(blob).view(dtype).reshape(-1, checker.root.n_dims), 0


def _position_checker(checker: StoreChecker, seen: LevelSummary) -> Callable[[Place, NDArray[Any]], None]:
    """Return a function that checks the positions of a chunk's vertices."""
    root = checker.root
    assert root is not None
    with checker.guarded(Place(seen.number), "V097"):
        edges = level_chunk_shape(root, seen.facts)
    low, high = (np.asarray(end, np.float64) for end in root.bounds)
    repeated = root.cross_chunk != "explicit_links" or root.index_convention == "identity"
    rounded = checker.block(Place(seen.number, "vertices")).get("encoding") == "draco"

    def look(place: Place, points: NDArray[Any]) -> None:
        finite = np.isfinite(points).all(axis=1)
        if not finite.all():
            checker.report("V018", place, f"{np.count_nonzero(~finite):,} positions are not finite.")
        good = points[finite]
        key = np.asarray(place.chunk)[-points.shape[1] :]
        slack = _quantisation_step(good) if rounded else 0.0
        stray = _vertices_outside(good, key, edges, slack)
        if stray.any() and not repeated:
            text = f"{np.count_nonzero(stray):,} vertices are outside, e.g. {good[stray][0].tolist()}."
            checker.report("V016", place, text)
        tolerance = 1e-6 * np.maximum(np.abs(low), np.abs(high)) + slack
        out = ((good < low - tolerance) | (good > high + tolerance)).any(axis=1)
        if out.any():
            text = f"{np.count_nonzero(out):,} vertices are outside the bounds, e.g. {good[out][0].tolist()}."
            checker.report("V112", place, text)

    return look


def _quantisation_step(points: NDArray[Any]) -> float:
    """Return the position error of a Draco cell: one quantisation step of its widest axis."""
    from raggedatlas.vectors.storage.codecs import QUANTISATION_BITS

    return float(np.ptp(points, axis=0).max()) / (2**QUANTISATION_BITS - 1) if len(points) else 0.0


def _vertices_outside(
    points: NDArray[Any], key: NDArray[np.int64], edges: tuple[float, ...], slack: float
) -> NDArray[np.bool_]:
    """Return which vertices are outside a chunk by more than `slack`."""
    if not slack:
        return np.asarray((chunk_coordinates(points, edges) != key).any(axis=1))
    under, over = (chunk_coordinates(points + step, edges) for step in (-slack, slack))
    return np.asarray(((under > key) | (over < key)).any(axis=1))


def _check_attributes(
    checker: StoreChecker, seen: LevelSummary, group: str, asked: tuple[str, NDArray[np.int64]], tail: str = ""
) -> None:
    """Check the number of rows of attributes; `asked` is the rule and the expected rows of each chunk."""
    if group not in checker.children(Place(seen.number)):
        return
    for name in checker.children(Place(seen.number, group)):
        place = Place(seen.number, f"{group}/{name}{tail}")
        family = checker.open(place)
        if family is not None:
            walk_column(checker, place, family, (asked[0], seen.keys, asked[1]))


def walk_column(
    checker: StoreChecker,
    place: Place,
    family: ChunkArray,
    asked: tuple[str, NDArray[np.int64], NDArray[np.int64]],
) -> None:
    """Check the rows of one attribute; `asked` is the rule, the chunks, and their expected rows (-1: unknown)."""
    rule, keys, rows = asked
    dtype = family.attributes.get("dtype")
    if not is_numeric(dtype) and not is_text(dtype):
        return
    with checker.guarded(place, "V021"):
        shape = family.attributes.get("row_shape", family.attributes.get("shape")) or []
        size = np.dtype(str(dtype)).itemsize * int(np.prod(shape, dtype=np.int64))
        columns = 1 if shape else _columns_of(checker, place, family, asked, size)
        if columns > 1:
            text = f"its rows have {columns} values that its shape does not declare, as zarr-vectors writes them."
            checker.report("V021", place, text, "practice")
        size *= columns
        own = checker.keys(family, place, keys.shape[1])
        for key in own[KeyLookup(keys).find(own) < 0] if len(own) else ():
            checker.report(rule, place.at(key), "it has rows in a missing chunk.")
        for part in batches(keys):
            for i, blob in enumerate(checker.read(family, keys[part], place), part.start):
                found = 0 if blob is None else blob.size
                if place.at(keys[i]) in checker.unread:
                    continue
                if rows[i] >= 0 and found != rows[i] * size:
                    text = f"it has {found / max(size, 1):g} rows; expected {rows[i]:,}."
                    checker.report(rule, place.at(keys[i]), text)


def _columns_of(
    checker: StoreChecker,
    place: Place,
    family: ChunkArray,
    asked: tuple[str, NDArray[np.int64], NDArray[np.int64]],
    size: int,
) -> int:
    """Return the number of values of `size` bytes per row, from the first chunk with rows; 1 if rows are incomplete."""
    _, keys, rows = asked
    some = np.flatnonzero(rows > 0)
    if not some.size or not size:
        return 1
    blob = checker.read(family, keys[some[:1]], place)[0]
    unit = int(rows[some[0]]) * size
    return 1 if blob is None or blob.size % unit else max(1, blob.size // unit)


def _walk_fragments(checker: StoreChecker, seen: LevelSummary) -> None:
    """Count the fragments of every chunk, and check their rows."""
    place = Place(seen.number, "vertex_fragments")
    family = checker.open(place)
    claims = bool(seen.facts.get("fragments_tile"))
    if family is None:
        return
    bins = level_bins(checker, seen)
    vertices = checker.open(Place(seen.number, "vertices")) if bins is not None and checker.depth > 3 else None
    own = checker.keys(family, place, seen.keys.shape[1])
    for key in own[KeyLookup(seen.keys).find(own) < 0] if len(own) else ():
        checker.report("V034", place.at(key), "it has fragments in a chunk without vertices.")
    for part in batches(seen.keys):
        raw = checker.read(family, seen.keys[part], place)
        for i, found in enumerate(decode_fragment_indexes(checker, place, seen.keys[part], raw), part.start):
            unread = found is None or place.at(seen.keys[i]) in checker.unread
            seen.fragments[i] = -1 if found is None or unread else found.n_fragments
            n_rows = int(seen.vertices[i])
            if found is None or unread or n_rows < 0:
                continue
            location = place.at(seen.keys[i])
            if bins is not None:
                check_fragments(checker, location, found, bins)
            if names_missing_rows(found, n_rows):
                checker.report(
                    "V034", location, f"a fragment refers to rows beyond the {n_rows:,} vertices of the chunk."
                )
                continue
            seen.widest = max(seen.widest, int(found.counts.max(initial=0)))
            if bins is not None and vertices is not None and i < STEP:
                _look_into_bins(checker, Place(seen.number, "vertices").at(seen.keys[i]), vertices, (found, bins))
            if claims and not tiles(found, n_rows):
                claims = False
                checker.report("V110", location, "its fragments are not its rows in order.")


def _look_into_bins(checker: StoreChecker, place: Place, family: ChunkArray, of: tuple[Fragments, Bins]) -> None:
    """Check that the vertices of one chunk are in their bins."""
    with checker.guarded(place):
        blob = checker.read(family, np.array([place.chunk]), place)[0]
        points = None if blob is None else _points_of(checker, place, family, blob)
        if points is not None:
            check_bin_positions(checker, place, points[0], of)


def _walk_links(checker: StoreChecker, seen: LevelSummary) -> None:
    """Check the links within chunks, and their fragments and attributes."""
    zero = ".".join("0" for _ in range(seen.keys.shape[1]))
    top = Place(seen.number, "links/0")
    block = checker.block(top)
    width = block.get("link_width")
    place, own = top, Place(seen.number, "link_fragments")
    if checker.layout == "0.9":
        name = "_".join([zero] * (width - 1)) or "self" if isinstance(width, int) and width < 64 else zero
        place = Place(seen.number, f"links/0/{name}")
    family = checker.open(place) if checker.node(top) is not None else None
    index = checker.open(own)
    if family is None:
        if index is not None and seen.links.any():  # faces of Draco cells are counted by their chunks
            _walk_link_fragments(checker, own, index, seen)
        elif index is not None:
            checker.report("V057", own, "there are no links within chunks.")
        _check_attributes(checker, seen, "link_attributes", ("V082", seen.links), "/" + place.family.split("/", 1)[1])
        return
    if isinstance(width, int) and width > 0:
        _walk_rows(checker, place, family, (seen, width))
        declared = block.get("num_links")
        found = int(seen.links.clip(0).sum())
        if checker.layout == "0.7" and isinstance(declared, int) and declared != found and (seen.links >= 0).all():
            checker.report("V055", top, f"num_links is {declared}; the chunks have {found}.")
    if index is not None:
        _walk_link_fragments(checker, own, index, seen)
    _check_attributes(checker, seen, "link_attributes", ("V082", seen.links), "/" + place.family.split("/", 1)[1])


def _walk_rows(checker: StoreChecker, place: Place, family: ChunkArray, counted: tuple[LevelSummary, int]) -> None:
    """Count the links of every chunk, and check their rows."""
    seen, width = counted
    name = family.attributes.get("dtype")
    if not is_numeric(name):
        return
    dtype = np.dtype(str(name)).newbyteorder("<")
    most = int(seen.vertices.max(initial=0))
    if dtype.itemsize > smallest_unsigned_dtype(most).itemsize:
        checker.report(
            "V052",
            place,
            f"its type is {dtype.name}; {smallest_unsigned_dtype(most).name} is enough for {most:,} rows.",
        )
    own = checker.keys(family, place, seen.keys.shape[1])
    for key in own[KeyLookup(seen.keys).find(own) < 0] if len(own) else ():
        checker.report("V051", place.at(key), "it has links in a chunk without vertices.")
    size = dtype.itemsize * width
    for part in batches(seen.keys):
        for i, blob in enumerate(checker.read(family, seen.keys[part], place), part.start):
            if blob is None:
                seen.links[i] = -1 if place.at(seen.keys[i]) in checker.unread else 0
                continue
            if blob.size % size:
                seen.links[i] = -1
                checker.report("V051", place.at(seen.keys[i]), f"{blob.size:,} bytes are not a multiple of {size}.")
                continue
            rows = np.ascontiguousarray(blob).view(dtype)
            seen.links[i] = rows.size // width
            if rows.size and seen.vertices[i] >= 0 and (rows.min() < 0 or int(rows.max()) >= seen.vertices[i]):
                text = f"a link refers to row {int(rows.max() if rows.min() >= 0 else rows.min())} of {seen.vertices[i]:,}."
                checker.report("V051", place.at(seen.keys[i]), text)


def _walk_link_fragments(checker: StoreChecker, place: Place, family: ChunkArray, seen: LevelSummary) -> None:
    """Check that link fragments match vertex fragments, and hold every link exactly once."""
    for part in batches(seen.keys):
        raw = checker.read(family, seen.keys[part], place)
        found = decode_fragment_indexes(checker, place, seen.keys[part], raw)
        for i, one in enumerate(found, part.start):
            if one is not None and place.at(seen.keys[i]) not in checker.unread:
                _check_partition(checker, place.at(seen.keys[i]), one, (int(seen.fragments[i]), int(seen.links[i])))


def _check_partition(checker: StoreChecker, place: Place, found: Fragments, counts: tuple[int, int]) -> None:
    """Check the link fragments of one chunk; `counts` are its vertex fragments and links."""
    n_fragments, n_links = counts
    if n_fragments >= 0 and found.n_fragments != n_fragments and (n_links or found.n_fragments):
        text = f"it has {found.n_fragments} fragments for {n_fragments} vertex fragments."
        # zarr-vectors 0.9 omits trailing fragments without links
        short = checker.layout == "0.9" and found.n_fragments < n_fragments
        checker.report("V054", place, text, "practice" if short else None)
    if n_links < 0:
        return
    if names_missing_rows(found, n_links) or not covers_once(found, n_links):
        checker.report("V054", place, f"its fragments do not hold each of {n_links:,} links exactly once.")


_ENDS = {"mesh": 3, "graph": 2, "skeleton": 1}


def check_kind(checker: StoreChecker, seen: LevelSummary) -> None:
    """Check the links of a level against geometry type and convention."""
    root = checker.root
    if root is None:
        return
    inner, cross = Place(seen.number, "links/0"), Place(seen.number, "cross_chunk_links/0")
    n_inner = int(seen.links.clip(0).sum())
    blocks = [checker.block(place) for place in (inner, cross) if checker.node(place) is not None]
    widths = [block["link_width"] for block in blocks if isinstance(block.get("link_width"), int)]
    for kind in root.types:
        for width in widths:
            if width < _ENDS.get(kind, 0) and len(root.types) == 1:
                checker.report(
                    "V056", inner, f"its links have {width} ends; links of a {kind} have at least {_ENDS[kind]}."
                )
    if root.types == ("point_cloud",) and n_inner:
        checker.report("V056", inner, f"a point cloud has {n_inner:,} links.", "practice")
    if root.links_convention == "implicit_sequential" and n_inner and set(root.types) != {"point_cloud"}:
        checker.report("V060", inner, f"{n_inner:,} links are stored, although they follow from the vertex order.")
    linked = {"mesh", "graph"} & set(root.types)
    if root.links_convention == "explicit" and linked and not blocks and not n_inner and seen.widest > 1:
        text = (
            f"no links are stored, but they are explicit and a {min(linked)} has fragments of {seen.widest} vertices."
        )
        checker.report("V049", Place(seen.number), text)
