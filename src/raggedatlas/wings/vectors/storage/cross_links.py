"""Links across chunks and levels: the offset arrays of layout 0.9, and a reader for both layouts."""

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.wings.vectors.chunking import encode_keys, run_starts, stable_order
from raggedatlas.wings.vectors.geometry import CrossLinks, level_scale
from raggedatlas.wings.vectors.shapes import concat_attributes, counts_to_offsets, take_attributes
from raggedatlas.wings.vectors.storage.codecs import EMPTY, Bytes, decode_ragged, decode_records, from_bytes
from raggedatlas.wings.vectors.storage.level_reader import (
    AttributeFilter,
    LevelReader,
    all_attributes,
    declared_dtype,
    decode_attribute,
)
from raggedatlas.wings.vectors.storage.zarr_reader import CellArray, node_attributes, read_array_bytes


@dataclass(frozen=True)
class OffsetSegment:
    """The links of one set of chunk offsets, one array of layout 0.9."""

    # (L - 1, D): offset of the chunks of the ends after the first, relative to the anchor of the source chunk
    offsets: NDArray[np.int64]
    cells: NDArray[np.int64]  # (C, D): source chunks, ascending
    bounds: NDArray[np.int64]  # (C + 1,): records of each cell
    # (M, L) or (M, L + 1): rows of the ends, preceded by the permutation number if ends were sorted
    rows: NDArray[np.int64]
    record: NDArray[np.int64]  # (M,): link of each record
    has_permutation: bool  # whether records have a permutation number

    @property
    def name(self) -> str:
        """The name of the array."""
        return segment_name(self.offsets)


def segment_name(offsets: NDArray[np.int64]) -> str:
    """Format offsets: signed parts joined by dots, ends joined by ``_``; ``self`` if there is only one end.

    Examples
    --------
    >>> segment_name(np.array([[0, 0, 0], [1, 0, -1]]))
    '0.0.0_+1.0.-1'
    """
    if not len(offsets):
        return "self"
    return "_".join(".".join(f"{part:+d}" if part else "0" for part in end) for end in offsets.tolist())


def parse_segment(name: str, width: int, n_dims: int) -> NDArray[np.int64]:
    """Parse the offsets of an array name; `CorruptError` if there are not ``width - 1`` ends of `n_dims` integers."""
    if width == 1 and name == "self":
        return np.zeros((0, n_dims), np.int64)
    try:
        offsets = np.array([[int(part) for part in end.split(".")] for end in name.split("_")], np.int64)
    except ValueError:
        offsets = np.zeros((0, 0), np.int64)
    if offsets.shape != (width - 1, n_dims):
        raise CorruptError(f"{name!r} is not a list of offsets of {width} ends on {n_dims} axes.")
    return offsets


def has_permutation(offsets: NDArray[np.int64], delta: int, *, directed: bool, store: str) -> bool:
    """Return whether records have a permutation number."""
    # Exactly the links that `encode_cross_links` reorders; a wrong answer shifts the columns of all rows.
    return delta == 0 and bool(offsets.any()) and (store == "duplicate" or not directed)


def anchor_chunks(chunks: NDArray[np.int64], scales: tuple[NDArray[np.int64], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return source chunks in the grid of the level of the other ends."""
    # Rounds down, so negative chunks nest as well; truncation would put them into the wrong chunk.
    return chunks * scales[0] // scales[1]


def encode_cross_links(
    chunks: NDArray[np.int64],
    rows: NDArray[np.int64],
    delta: int,
    scales: tuple[NDArray[np.int64], NDArray[np.int64]],
    *,
    directed: bool,
    store: str,
) -> list[OffsetSegment]:
    """Sort links into arrays by offset, and into cells by source chunk; the result is sorted by name.

    `chunks`, (M, L, D), and `rows`, (M, L), are the ends of the links; `delta`, `directed` and `store` are as in
    `CrossLinks`. `scales` are the numbers of root chunks that a chunk spans, (D,) each, on the level of the first end
    and on that of the others.
    """
    n, width, n_dims = chunks.shape
    record = np.arange(n)
    order = np.broadcast_to(np.arange(width), (n, width)).copy()
    if delta == 0 and width > 1:
        crosses_chunks = (chunks != chunks[:, :1]).any(axis=(1, 2))
        if store == "duplicate":
            order, record = _rotate_to_each_chunk(chunks, rows, crosses_chunks)
        elif not directed:
            order[crosses_chunks] = _sorted_ends(chunks[crosses_chunks], rows[crosses_chunks])
    chunks = np.take_along_axis(chunks[record], order[:, :, None], axis=1)
    rows = np.take_along_axis(rows[record], order, axis=1)
    offsets = (chunks[:, 1:] - anchor_chunks(chunks[:, 0], scales)[:, None]).reshape(len(record), -1)
    # Sorted by offsets, then by source chunk: each array is a run, in which each cell is a run.
    code, top = encode_keys(np.concatenate([offsets, chunks[:, 0]], axis=1))
    sort = stable_order(code, top)
    kinds, sources = offsets[sort], chunks[sort, 0]
    cells = run_starts(code[sort])
    borders = (
        np.flatnonzero(np.append(True, (kinds[cells[1:]] != kinds[cells[:-1]]).any(axis=1))) if len(cells) else cells
    )
    result = []
    numbers = _permutation_numbers(order[sort], width)
    for a, b in zip(borders.tolist(), [*borders[1:].tolist(), len(cells)], strict=True):
        begin, end = int(cells[a]), int(cells[b]) if b < len(cells) else len(sort)
        own = kinds[begin].reshape(width - 1, n_dims)
        ordered = has_permutation(own, delta, directed=directed, store=store)
        ends = rows[sort[begin:end]]
        if ordered:
            ends = np.concatenate([numbers[begin:end, None], ends], axis=1)
        bounds = np.append(cells[a:b], end) - begin
        result.append(OffsetSegment(own, sources[cells[a:b]], bounds, ends, record[sort[begin:end]], ordered))
    return sorted(result, key=lambda segment: segment.name)


def _sorted_ends(chunks: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the order that sorts the ends of each link by chunk and row: (M, L)."""
    n, width, n_dims = chunks.shape
    # All ends are encoded in one call, so their codes are comparable: by chunk, then by row.
    code, _ = encode_keys(np.concatenate([chunks.reshape(-1, n_dims), rows.reshape(-1, 1)], axis=1))
    return np.argsort(code.reshape(n, width), axis=1, kind="stable")


def _rotate_to_each_chunk(
    chunks: NDArray[np.int64], rows: NDArray[np.int64], apart: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return an order of ends for each link and chunk that it touches, with an end in that chunk first, and the link index."""
    n, width, _ = chunks.shape
    by_end = np.broadcast_to(np.arange(width), (n, width)).copy()
    by_end[apart] = _sorted_ends(chunks[apart], rows[apart])
    placed = np.take_along_axis(chunks, by_end[:, :, None], axis=1)
    # Marks one end for each chunk that a link touches: the first of that chunk among the sorted ends.
    new = np.ones((n, width), bool)
    new[:, 1:] = (placed[:, 1:] != placed[:, :-1]).any(axis=2)
    record, turn = np.nonzero(new)
    lead = by_end[record, turn]
    rest = np.broadcast_to(np.arange(width), (len(record), width))
    others = rest[rest != lead[:, None]].reshape(len(record), width - 1)
    order = np.concatenate([lead[:, None], others], axis=1)
    # Ends within one chunk stay as they are, since such records have no permutation number.
    order[~apart[record]] = np.arange(width)
    return order, record


def _permutation_numbers(order: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return the lexicographic number of each permutation (its Lehmer code)."""
    number = np.zeros(len(order), np.int64)
    for i in range(width):
        smaller = (order[:, i + 1 :] < order[:, i : i + 1]).sum(axis=1)
        number += smaller * math.factorial(width - 1 - i)
    return number


def _inverse_permutations(numbers: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return the inverse of each permutation with a lexicographic number, (n, width)."""
    order = np.zeros((len(numbers), width), np.int64)
    for i in reversed(range(width)):
        # Digit by digit, because a table of all permutations of a damaged width would take all memory. No number has
        # a digit at a factorial beyond int64.
        place = math.factorial(width - 1 - i)
        order[:, i] = numbers // place % (width - i) if place < 2**63 else 0
        order[:, i + 1 :] += order[:, i + 1 :] >= order[:, i : i + 1]
    return np.argsort(order, axis=1)


def decode_cross_links(
    segment: OffsetSegment, scales: tuple[NDArray[np.int64], NDArray[np.int64]], what: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return chunks and rows of the ends of a segment's links, with ends in their original order.

    `scales` are as in `encode_cross_links`. Permutation numbers out of range and negative rows are refused.
    """
    width = len(segment.offsets) + 1
    source = np.repeat(segment.cells, np.diff(segment.bounds), axis=0)
    others = anchor_chunks(source, scales)[:, None] + segment.offsets[None]
    chunks = np.concatenate([source[:, None], others], axis=1)
    rows = segment.rows
    if segment.has_permutation:
        number, rows = rows[:, 0], rows[:, 1:]
        if ((number < 0) | (number >= math.factorial(width))).any():
            raise CorruptError(f"{what} holds an invalid permutation of {width} ends. Restore it from a copy.")
        back = _inverse_permutations(number.astype(np.int64), width)
        every = np.arange(len(rows))[:, None]
        chunks, rows = chunks[every, back], rows[every, back]
    if (rows < 0).any():
        raise CorruptError(f"{what} holds a negative row. Restore it from a copy.")
    return chunks, rows


def delta_name(delta: int) -> str:
    """Format a level difference: 0, +1, -1."""
    return f"{delta:+d}" if delta else "0"


DELTA = re.compile(r"0|[+-][1-9][0-9]*")
"""Names that `delta_name` gives."""


def level_deltas(level: LevelReader) -> list[int]:
    """Return the deltas for which a level has links, besides those within chunks."""
    names = {*level.files.children(f"{level.number}/links"), *level.files.children(f"{level.number}/cross_chunk_links")}
    return sorted(int(name) for name in names if DELTA.fullmatch(name))


class CrossLinkReader:
    """Lazy reader of links across chunks (delta 0) or levels.

    `level` is the owning level, `target` that of the ends after the first; None if it does not exist. `delta` is the
    difference of their numbers.
    """

    def __init__(self, level: LevelReader, target: LevelReader | None, delta: int) -> None:
        self.level, self.target, self.delta = level, target or level, delta
        self.name = delta_name(delta)
        self.where = f"{level.where}/links/{self.name}"

    @cached_property
    def _policy(self) -> dict[str, Any]:
        node = self.level.files.node(f"{self.level.number}/links/{self.name}")
        return {} if node is None else node_attributes(node)

    @cached_property
    def _segments(self) -> list[tuple[str, CellArray, NDArray[np.int64]]]:
        """The arrays of layout 0.9, without the one for links within chunks."""
        if "link_width" not in self._policy:
            return []
        path = f"{self.level.number}/links/{self.name}"
        result = []
        for name in self.level.files.children(path):
            width = int(self._policy["link_width"])
            n_parts = int(self._policy.get("sid_ndim") or self.level.keys.keys.shape[1])
            offsets = parse_segment(name, width, n_parts)
            # Ends without an offset share a chunk; `LevelReader` reads these links with that chunk.
            if self.delta == 0 and not offsets.any():
                continue
            node = self.level.files.node(f"{path}/{name}")
            if node is not None:
                result.append((name, CellArray(self.level.files, f"{path}/{name}", node), offsets))
        return result

    @cached_property
    def _scales(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Number of root chunks spanned by a chunk of the owning and of the other level, per key part."""
        n_parts = self.level.keys.keys.shape[1]
        own, other = (level_scale(level.root, level.facts, n_parts) for level in (self.level, self.target))
        return own, other

    @cached_property
    def _by_chunk(self) -> dict[tuple[int, ...], list[int]]:
        """For each source chunk, the arrays that have links starting in it."""
        result: dict[tuple[int, ...], list[int]] = {}
        for i, (_, array, _) in enumerate(self._segments):
            for key in array.keys.tolist():
                result.setdefault(tuple(key), []).append(i)
        return result

    def read(
        self, chunks: NDArray[np.int64] | None = None, wanted: AttributeFilter = all_attributes
    ) -> CrossLinks | None:
        """Return the links that start in some chunks (in layout 0.7: all), or None if there are none.

        `chunks` are source chunks, (n, K); None: all. `wanted` is a predicate on attribute names.
        """
        if self.level.layout == "0.7":
            parts = self._read_07(wanted)
        else:
            cells: dict[int, list[tuple[int, ...]]] = {}
            for key in self._by_chunk if chunks is None else map(tuple, chunks.tolist()):
                for i in self._by_chunk.get(key, ()):
                    cells.setdefault(i, []).append(key)
            parts = [self._read_segment(i, np.array(sorted(cells[i]), np.int64), wanted) for i in sorted(cells)]
        parts = [part for part in parts if part.n_links]
        if not parts:
            return None
        if len(parts) == 1:
            return parts[0]
        if len({part.width for part in parts}) > 1:
            raise CorruptError(f"{self.where} has links with different numbers of ends. Restore it from a copy.")
        attributes = concat_attributes([part.attributes for part in parts], [part.n_links for part in parts])
        chunk = np.concatenate([part.chunks for part in parts])
        rows = np.concatenate([part.rows for part in parts])
        return CrossLinks(self.delta, chunk, rows, parts[0].directed, parts[0].store, attributes)

    def _read_segment(self, i: int, cells: NDArray[np.int64], wanted: AttributeFilter) -> CrossLinks:
        """Read some cells of one array."""
        name, array, offsets = self._segments[i]
        directed, store = bool(self._policy.get("directed", False)), str(self._policy.get("store", "canonical"))
        ordered = bool(
            array.attributes.get("has_perm", has_permutation(offsets, self.delta, directed=directed, store=store))
        )
        columns = len(offsets) + 1 + ordered
        dtype = declared_dtype(array.attributes, self.where)
        streams = [decode_stream(blob, self.where) for blob in array.read(cells)]
        rows = [from_bytes(stream, dtype, columns, self.where).astype(np.int64) for stream in streams]
        counts = np.array([len(part) for part in rows], np.int64)
        combined = np.concatenate([np.zeros((0, columns), np.int64), *rows])
        segment = OffsetSegment(offsets, cells, counts_to_offsets(counts), combined, np.arange(len(combined)), ordered)
        chunk, end_rows = decode_cross_links(segment, self._scales, self.where)
        attributes = self.level.attributes("link_attributes", cells, counts, wanted, f"/{self.name}/{name}")
        result = CrossLinks(self.delta, chunk, end_rows, directed, store, attributes)
        if store != "duplicate":
            return result
        # Such links are stored under each chunk that they touch; those under the lowest one are kept. A link whose lowest
        # chunk was not requested has an end that is not loaded, and would be dropped anyway.
        n, width, n_parts = chunk.shape
        codes, _ = encode_keys(np.concatenate([chunk.reshape(-1, n_parts), np.repeat(cells, counts, axis=0)]))
        lowest = codes[: n * width].reshape(n, width).min(axis=1) == codes[n * width :]
        return select_links(result, np.flatnonzero(lowest))

    def _read_07(self, wanted: AttributeFilter) -> list[CrossLinks]:
        """Read both places where layout 0.7 stores such links."""
        result = [] if self.delta == 0 else self._read_level_links(wanted)
        path = f"{self.level.number}/cross_chunk_links/{self.name}"
        node = self.level.files.node(path)
        if node is None:
            return result
        block = node_attributes(node)
        raw = read_array_bytes(self.level.files, f"{path}/data")
        width, n_dims = int(block["link_width"]), int(block.get("sid_ndim") or self.level.keys.keys.shape[1])
        chunks, rows = decode_records(EMPTY if raw is None else raw, width, n_dims, path)
        if len(rows) != int(block.get("num_links", len(rows))):
            raise CorruptError(f"{self.where} declares {block['num_links']} links, but {len(rows)} are stored.")
        attributes = {}
        for title in filter(wanted, self.level.attribute_names("cross_chunk_link_attributes")):
            at = f"{self.level.number}/cross_chunk_link_attributes/{title}/{self.name}"
            own = self.level.files.node(at)
            data = read_array_bytes(self.level.files, f"{at}/data")
            if own is not None and data is not None:
                facts = node_attributes(own)
                # The stored shape begins with the number of links (§7.9); `decode_attribute` expects that of a row.
                facts["shape"] = list(facts.get("shape") or [])[1:]
                attributes[title] = decode_attribute(facts, [data], np.array([len(rows)]), f"{self.where}: {title}")
        directed, store = bool(block.get("directed", False)), str(block.get("store", "canonical"))
        return [*result, CrossLinks(self.delta, chunks, rows, directed, store, attributes)]

    def _read_level_links(self, wanted: AttributeFilter) -> list[CrossLinks]:
        """Read links across levels that are stored with the chunk of their first end, in either encoding."""
        family = self.level.family(f"links/{self.name}")
        if family is None or not len(family.keys):
            return []
        block, keys = family.attributes, family.keys
        width = int(block.get("link_width", 2))
        pairs = zip(keys, family.read(keys), strict=True)
        ends = [decode_level_links(blob, key, width, block, self.where) for key, blob in pairs]
        counts = np.array([len(rows) for _, rows in ends], np.int64)
        attributes = self.level.attributes("link_attributes", keys, counts, wanted, f"/{self.name}")
        chunks, rows = (np.concatenate(parts) for parts in zip(*ends, strict=True))
        return [CrossLinks(self.delta, chunks, rows, attributes=attributes)]


def decode_stream(blob: Bytes, where: str) -> Bytes:
    """Return the rows of an inline stream, all groups concatenated."""
    return decode_ragged(blob, where).data if blob.size else EMPTY


def decode_level_links(
    blob: Bytes, key: NDArray[np.int64], width: int, block: dict[str, Any], where: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return chunks and rows of the link ends that layout 0.7 stores with a chunk, in either of its encodings."""
    encoding = block.get("record_encoding")
    if encoding != "endpoints_v1":
        try:
            dtype = declared_dtype({"dtype": "int64", **block}, where)
            rows = from_bytes(decode_stream(blob, where), dtype, width, where).astype(np.int64)
            return np.broadcast_to(key, (len(rows), width, len(key))), rows
        # Stores without `record_encoding` are distinguished by what parses.
        except CorruptError:
            if encoding == "ragged_rows":
                raise
    return decode_records(blob, width, len(key), where)


def select_links(links: CrossLinks, which: NDArray[np.int64]) -> CrossLinks:
    """Return some of the links, in the given order."""
    attributes = take_attributes(links.attributes, which)
    return replace(links, chunks=links.chunks[which], rows=links.rows[which], attributes=attributes)
