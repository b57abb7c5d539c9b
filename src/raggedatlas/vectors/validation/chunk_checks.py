"""Checks of what stands in chunks: vertices, fragments, links, and their attributes, a few chunks at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.blobs import Bytes
from raggedatlas.vectors.chunk_arrays import ChunkArray, KeyLookup
from raggedatlas.vectors.chunking import smallest_unsigned_dtype
from raggedatlas.vectors.geometry import Fragments
from raggedatlas.vectors.grids import chunk_coordinates
from raggedatlas.vectors.metadata import level_chunk_shape
from raggedatlas.vectors.validation.array_metadata import is_numeric, is_text
from raggedatlas.vectors.validation.bin_checks import Bins, check_bin_positions, check_fragments, level_bins
from raggedatlas.vectors.validation.context import STEP, CheckLocation, LevelSummary, ValidationContext
from raggedatlas.vectors.validation.fragment_checks import (
    covers_once,
    decode_fragment_indexes,
    names_missing_rows,
    tiles,
)

_ONE_FRAGMENT = 1


def walk_level(checking: ValidationContext, number: int, facts: dict[str, Any]) -> LevelSummary:
    """Walk all chunks of a level; what is counted there is kept for checks of objects and links."""
    place = CheckLocation(number, "vertices")
    n_dims = 1 if checking.root is None else checking.root.n_dims
    n_parts = n_dims
    family = checking.open(place)
    if checking.node(CheckLocation(number, "vertex_group_offsets")) is not None:
        checking.report(
            "V040", CheckLocation(number, "vertex_group_offsets"), "it is there; zarr-vectors before 0.6 wrote it."
        )
    keys = np.zeros((0, n_parts), np.int64)
    if family is not None:
        _check_chunk_names(checking, number)
        with checking.guarded("V009", place):
            n_parts = family.keys.shape[1] if len(family.keys) and _is_partitioned(facts) else n_dims
        keys = checking.keys(family, place, n_parts)
    counts = np.zeros((3, len(keys)), np.int64)
    counts[1] = _ONE_FRAGMENT
    seen = LevelSummary(number, facts, keys, *counts)
    if family is not None:
        _walk_vertices(checking, place, family, seen)
    _check_total(checking, seen)
    _check_attributes(checking, seen, "vertex_attributes", ("V019", seen.vertices))
    _walk_fragments(checking, seen)
    _check_attributes(checking, seen, "fragment_attributes", ("V092", seen.fragments))
    _walk_links(checking, seen)
    return seen


def _is_partitioned(facts: dict[str, Any]) -> bool:
    """Tell whether chunks of a level are also cut by an attribute, so that keys have leading parts."""
    return bool(facts.get("chunk_dims") or facts.get("chunk_attribute_name"))


def _check_chunk_names(checking: ValidationContext, number: int) -> None:
    """Check that layout 0.7 has nothing but chunks among those of its vertices; others are not seen by readers."""
    for name in checking.children(CheckLocation(number, "vertices")) if checking.layout == "0.7" else ():
        if not all(part.removeprefix("-").isdigit() for part in name.split(".")):
            checking.report("V009", CheckLocation(number, f"vertices/{name}"), "its name is no list of whole numbers.")


def _check_total(checking: ValidationContext, seen: LevelSummary) -> None:
    """Compare the number of vertices with what the level declares."""
    declared, found = seen.facts.get("vertex_count"), int(seen.vertices.clip(0).sum())
    if declared != found and (seen.vertices >= 0).all():
        text = f"vertex_count is {declared}; its chunks hold {found:,}."
        checking.report("V098", CheckLocation(seen.number), text)


def batches(keys: NDArray[np.int64]) -> Iterator[slice]:
    """Yield slices of a few chunks."""
    for start in range(0, len(keys), STEP):
        yield slice(start, min(start + STEP, len(keys)))


def _walk_vertices(checking: ValidationContext, place: CheckLocation, family: ChunkArray, seen: LevelSummary) -> None:
    """Count the vertices of every chunk, and check where they lie."""
    look = _position_checker(checking, seen)
    for part in batches(seen.keys):
        for i, blob in enumerate(checking.read(family, seen.keys[part], place), part.start):
            here = place.at(seen.keys[i])
            seen.vertices[i] = -1
            if here in checking.unread:
                continue
            if blob is None or not blob.size:
                seen.vertices[i] = 0
                checking.report("V009", here, "the chunk is listed, but holds nothing.", "practice")
                continue
            with checking.guarded("V000", here):
                points = _points_of(checking, here, family, blob)
                if points is not None:
                    seen.vertices[i] = len(points[0])
                    seen.links[i] = points[1]
                    look(here, points[0])


def _points_of(
    checking: ValidationContext, place: CheckLocation, family: ChunkArray, blob: Bytes
) -> tuple[NDArray[Any], int] | None:
    """Return the positions of a chunk, and how many faces stand with them; None, which is told, where they are not whole rows."""
    if family.attributes.get("encoding") == "draco":
        from raggedatlas.vectors.draco import decode_cell

        points, faces = decode_cell(blob, place.path)
        return points, len(faces)
    name = family.attributes.get("dtype")
    if not is_numeric(name) or checking.root is None:
        return None
    dtype = np.dtype(str(name)).newbyteorder("<")
    size = dtype.itemsize * checking.root.n_dims
    if blob.size % size:
        checking.report("V010", place, f"{blob.size:,} bytes are no whole rows of {size}.")
        return None
    return np.ascontiguousarray(blob).view(dtype).reshape(-1, checking.root.n_dims), 0


def _position_checker(checking: ValidationContext, seen: LevelSummary) -> Callable[[CheckLocation, NDArray[Any]], None]:
    """Return what checks where the vertices of a chunk lie."""
    root = checking.root
    assert root is not None
    with checking.guarded("V097", CheckLocation(seen.number)):
        edges = level_chunk_shape(root, seen.facts)
    low, high = (np.asarray(end, np.float64) for end in root.bounds)
    repeated = root.cross_chunk != "explicit_links" or root.index_convention == "identity"
    rounded = checking.block(CheckLocation(seen.number, "vertices")).get("encoding") == "draco"

    def look(place: CheckLocation, points: NDArray[Any]) -> None:
        finite = np.isfinite(points).all(axis=1)
        if not finite.all():
            checking.report("V018", place, f"{np.count_nonzero(~finite):,} positions are not finite.")
        good = points[finite]
        key = np.asarray(place.chunk)[-points.shape[1] :]
        slack = _quantisation_step(good) if rounded else 0.0
        stray = _vertices_outside(good, key, edges, slack)
        if stray.any() and not repeated:
            text = f"{np.count_nonzero(stray):,} vertices lie outside, e.g. {good[stray][0].tolist()}."
            checking.report("V016", place, text)
        tolerance = 1e-6 * np.maximum(np.abs(low), np.abs(high)) + slack
        out = ((good < low - tolerance) | (good > high + tolerance)).any(axis=1)
        if out.any():
            text = f"{np.count_nonzero(out):,} vertices lie beyond bounds, e.g. {good[out][0].tolist()}."
            checking.report("V112", place, text)

    return look


def _quantisation_step(points: NDArray[Any]) -> float:
    """Return how far the vertices of a Draco cell may lie from where they were: one step of its widest axis."""
    from raggedatlas.vectors.draco import QUANTISATION_BITS

    return float(np.ptp(points, axis=0).max()) / (2**QUANTISATION_BITS - 1) if len(points) else 0.0


def _vertices_outside(
    points: NDArray[Any], key: NDArray[np.int64], edges: tuple[float, ...], slack: float
) -> NDArray[np.bool_]:
    """Tell which vertices lie outside of a chunk by more than `slack`."""
    if not slack:
        return np.asarray((chunk_coordinates(points, edges) != key).any(axis=1))
    under, over = (chunk_coordinates(points + step, edges) for step in (-slack, slack))
    return np.asarray(((under > key) | (over < key)).any(axis=1))


def _check_attributes(
    checking: ValidationContext, seen: LevelSummary, group: str, asked: tuple[str, NDArray[np.int64]], tail: str = ""
) -> None:
    """Check that attributes have as many rows as what they stand beside; `asked` is the rule and the rows of each chunk."""
    if group not in checking.children(CheckLocation(seen.number)):
        return
    for name in checking.children(CheckLocation(seen.number, group)):
        place = CheckLocation(seen.number, f"{group}/{name}{tail}")
        family = checking.open(place)
        if family is not None:
            walk_column(checking, place, family, (asked[0], seen.keys, asked[1]))


def walk_column(
    checking: ValidationContext,
    place: CheckLocation,
    family: ChunkArray,
    asked: tuple[str, NDArray[np.int64], NDArray[np.int64]],
) -> None:
    """Check the rows of one attribute; `asked` is the rule, the chunks, and their rows (-1: not known)."""
    rule, keys, rows = asked
    dtype = family.attributes.get("dtype")
    if not is_numeric(dtype) and not is_text(dtype):
        return
    with checking.guarded("V021", place):
        shape = family.attributes.get("row_shape", family.attributes.get("shape")) or []
        size = np.dtype(str(dtype)).itemsize * int(np.prod(shape, dtype=np.int64))
        columns = 1 if shape else _columns_of(checking, place, family, asked, size)
        if columns > 1:
            text = f"its rows have {columns} values that its shape does not declare, as zarr-vectors writes them."
            checking.report("V021", place, text, "practice")
        size *= columns
        own = checking.keys(family, place, keys.shape[1])
        for key in own[KeyLookup(keys).find(own) < 0] if len(own) else ():
            checking.report(rule, place.at(key), "it has rows in a chunk that is not there.")
        for part in batches(keys):
            for i, blob in enumerate(checking.read(family, keys[part], place), part.start):
                found = 0 if blob is None else blob.size
                if place.at(keys[i]) in checking.unread:
                    continue
                if rows[i] >= 0 and found != rows[i] * size:
                    text = f"it has {found / max(size, 1):g} rows, where {rows[i]:,} belong."
                    checking.report(rule, place.at(keys[i]), text)


def _columns_of(
    checking: ValidationContext,
    place: CheckLocation,
    family: ChunkArray,
    asked: tuple[str, NDArray[np.int64], NDArray[np.int64]],
    size: int,
) -> int:
    """Return how many values of `size` bytes a row has by the first chunk with rows; 1 where they make no whole rows."""
    _, keys, rows = asked
    some = np.flatnonzero(rows > 0)
    if not some.size or not size:
        return 1
    blob = checking.read(family, keys[some[:1]], place)[0]
    unit = int(rows[some[0]]) * size
    return 1 if blob is None or blob.size % unit else max(1, blob.size // unit)


def _walk_fragments(checking: ValidationContext, seen: LevelSummary) -> None:
    """Count the fragments of every chunk, and check the rows that they name."""
    place = CheckLocation(seen.number, "vertex_fragments")
    family = checking.open(place)
    claims = bool(seen.facts.get("fragments_tile"))
    if family is None:
        return
    bins = level_bins(checking, seen)
    vertices = (
        checking.open(CheckLocation(seen.number, "vertices")) if bins is not None and checking.depth > 3 else None
    )
    own = checking.keys(family, place, seen.keys.shape[1])
    for key in own[KeyLookup(seen.keys).find(own) < 0] if len(own) else ():
        checking.report("V034", place.at(key), "it has fragments in a chunk without vertices.")
    for part in batches(seen.keys):
        raw = checking.read(family, seen.keys[part], place)
        for i, found in enumerate(decode_fragment_indexes(checking, place, seen.keys[part], raw), part.start):
            unread = found is None or place.at(seen.keys[i]) in checking.unread
            seen.fragments[i] = -1 if found is None or unread else found.n_fragments
            n_rows = int(seen.vertices[i])
            if found is None or unread or n_rows < 0:
                continue
            here = place.at(seen.keys[i])
            if bins is not None:
                check_fragments(checking, here, found, bins)
            if names_missing_rows(found, n_rows):
                checking.report("V034", here, f"a fragment names rows beyond the {n_rows:,} vertices of the chunk.")
                continue
            seen.widest = max(seen.widest, int(found.counts.max(initial=0)))
            if bins is not None and vertices is not None and i < STEP:
                _look_into_bins(
                    checking, CheckLocation(seen.number, "vertices").at(seen.keys[i]), vertices, (found, bins)
                )
            if claims and not tiles(found, n_rows):
                claims = False
                checking.report("V110", here, "its fragments are not its rows in order.")


def _look_into_bins(
    checking: ValidationContext, place: CheckLocation, family: ChunkArray, of: tuple[Fragments, Bins]
) -> None:
    """Check where the vertices of the bins of one chunk lie."""
    with checking.guarded("V000", place):
        blob = checking.read(family, np.array([place.chunk]), place)[0]
        points = None if blob is None else _points_of(checking, place, family, blob)
        if points is not None:
            check_bin_positions(checking, place, points[0], of)


def _walk_links(checking: ValidationContext, seen: LevelSummary) -> None:
    """Check the links within chunks, and what goes with them."""
    zero = ".".join("0" for _ in range(seen.keys.shape[1]))
    top = CheckLocation(seen.number, "links/0")
    block = checking.block(top)
    width = block.get("link_width")
    place, own = top, CheckLocation(seen.number, "link_fragments")
    if checking.layout == "0.9":
        name = "_".join([zero] * (width - 1)) or "self" if isinstance(width, int) and width < 64 else zero
        place = CheckLocation(seen.number, f"links/0/{name}")
    family = checking.open(place) if checking.node(top) is not None else None
    index = checking.open(own)
    if family is None:
        if index is not None and seen.links.any():  # faces of Draco cells
            _walk_link_fragments(checking, own, index, seen)
        elif index is not None:
            checking.report("V057", own, "there are no links within chunks.")
        _check_attributes(checking, seen, "link_attributes", ("V082", seen.links), "/" + place.family.split("/", 1)[1])
        return
    if isinstance(width, int) and width > 0:
        _walk_rows(checking, place, family, (seen, width))
        declared = block.get("num_links")
        found = int(seen.links.clip(0).sum())
        if checking.layout == "0.7" and isinstance(declared, int) and declared != found and (seen.links >= 0).all():
            checking.report("V055", top, f"num_links is {declared}; the chunks hold {found}.")
    if index is not None:
        _walk_link_fragments(checking, own, index, seen)
    _check_attributes(checking, seen, "link_attributes", ("V082", seen.links), "/" + place.family.split("/", 1)[1])


def _walk_rows(
    checking: ValidationContext, place: CheckLocation, family: ChunkArray, counted: tuple[LevelSummary, int]
) -> None:
    """Count the links of every chunk, and check the rows that they name."""
    seen, width = counted
    name = family.attributes.get("dtype")
    if not is_numeric(name):
        return
    dtype = np.dtype(str(name)).newbyteorder("<")
    most = int(seen.vertices.max(initial=0))
    if dtype.itemsize > smallest_unsigned_dtype(most).itemsize:
        checking.report(
            "V052", place, f"its type is {dtype.name}; {smallest_unsigned_dtype(most).name} holds {most:,} rows."
        )
    own = checking.keys(family, place, seen.keys.shape[1])
    for key in own[KeyLookup(seen.keys).find(own) < 0] if len(own) else ():
        checking.report("V051", place.at(key), "it has links in a chunk without vertices.")
    size = dtype.itemsize * width
    for part in batches(seen.keys):
        for i, blob in enumerate(checking.read(family, seen.keys[part], place), part.start):
            if blob is None:
                seen.links[i] = -1 if place.at(seen.keys[i]) in checking.unread else 0
                continue
            if blob.size % size:
                seen.links[i] = -1
                checking.report("V051", place.at(seen.keys[i]), f"{blob.size:,} bytes are no whole links of {size}.")
                continue
            rows = np.ascontiguousarray(blob).view(dtype)
            seen.links[i] = rows.size // width
            if rows.size and seen.vertices[i] >= 0 and (rows.min() < 0 or int(rows.max()) >= seen.vertices[i]):
                text = f"a link names row {int(rows.max() if rows.min() >= 0 else rows.min())} of {seen.vertices[i]:,}."
                checking.report("V051", place.at(seen.keys[i]), text)


def _walk_link_fragments(
    checking: ValidationContext, place: CheckLocation, family: ChunkArray, seen: LevelSummary
) -> None:
    """Check that link fragments go with vertex fragments, and hold every link once."""
    for part in batches(seen.keys):
        raw = checking.read(family, seen.keys[part], place)
        found = decode_fragment_indexes(checking, place, seen.keys[part], raw)
        for i, one in enumerate(found, part.start):
            if one is not None and place.at(seen.keys[i]) not in checking.unread:
                _check_partition(checking, place.at(seen.keys[i]), one, (int(seen.fragments[i]), int(seen.links[i])))


def _check_partition(
    checking: ValidationContext, place: CheckLocation, found: Fragments, counts: tuple[int, int]
) -> None:
    """Check the link fragments of one chunk; `counts` are its vertex fragments and links."""
    n_fragments, n_links = counts
    if n_fragments >= 0 and found.n_fragments != n_fragments and (n_links or found.n_fragments):
        text = f"it has {found.n_fragments} fragments for {n_fragments} vertex fragments."
        # zarr-vectors 0.9 leaves out the last fragments where they have no links
        short = checking.layout == "0.9" and found.n_fragments < n_fragments
        checking.report("V054", place, text, "practice" if short else None)
    if n_links < 0:
        return
    if names_missing_rows(found, n_links) or not covers_once(found, n_links):
        checking.report("V054", place, f"its fragments do not hold each of {n_links:,} links once.")
