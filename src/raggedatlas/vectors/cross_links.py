"""Links across chunks and levels of an open store, from either layout."""

import re
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.vectors.blobs import Bytes, counts_to_offsets, decode_ragged, decode_records, from_bytes
from raggedatlas.vectors.chunk_arrays import CellArray
from raggedatlas.vectors.cross_links_09 import OffsetSegment, decode_cross_links, has_permutation, parse_segment
from raggedatlas.vectors.geometry import CrossLinks
from raggedatlas.vectors.grids import encode_keys
from raggedatlas.vectors.level_reader import (
    AttributeFilter,
    LevelReader,
    all_attributes,
    declared_dtype,
    decode_attribute,
)
from raggedatlas.vectors.metadata import level_scale
from raggedatlas.vectors.shapes import Attribute, concat_attributes
from raggedatlas.vectors.store_files import node_attributes, read_small_array

_DELTA = re.compile(r"0|[+-]\d+")


def level_deltas(level: LevelReader) -> list[int]:
    """Return for which differences of levels a level has links, besides those within chunks."""
    names = {*level.files.children(f"{level.number}/links"), *level.files.children(f"{level.number}/cross_chunk_links")}
    return sorted(int(name) for name in names if _DELTA.fullmatch(name))


class CrossLinkReader:
    """Links across chunks (delta 0) or levels, as they are asked for.

    Parameters
    ----------
    level : LevelReader
        The owning level.
    target : LevelReader or None
        The level of the ends after the first; None where it is not there.
    delta : int
        The difference between them.
    """

    def __init__(self, level: LevelReader, target: LevelReader | None, delta: int) -> None:
        self.level, self.target, self.delta = level, target or level, delta
        self.name = f"{delta:+d}" if delta else "0"
        self.where = f"{level.where}/links/{self.name}"

    @cached_property
    def _policy(self) -> dict[str, Any]:
        node = self.level.files.node(f"{self.level.number}/links/{self.name}")
        return {} if node is None else node_attributes(node)

    @cached_property
    def _segments(self) -> list[tuple[str, CellArray, NDArray[np.int64]]]:
        """The arrays of layout 0.9 but for that of links within chunks."""
        if "link_width" not in self._policy:
            return []
        path = f"{self.level.number}/links/{self.name}"
        made = []
        for name in self.level.files.children(path):
            width = int(self._policy["link_width"])
            n_parts = int(self._policy.get("sid_ndim") or self.level.keys.keys.shape[1])
            offsets = parse_segment(name, width, n_parts)
            if self.delta == 0 and not offsets.any():
                continue
            node = self.level.files.node(f"{path}/{name}")
            if node is not None:
                made.append((name, CellArray(self.level.files, f"{path}/{name}", node), offsets))
        return made

    @cached_property
    def _scales(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How many root chunks a chunk of the owning level and of the other one spans on each part of a key."""
        n_parts = self.level.keys.keys.shape[1]
        own, other = (level_scale(level.root, level.facts, n_parts) for level in (self.level, self.target))
        return own, other

    @cached_property
    def _by_chunk(self) -> dict[tuple[int, ...], list[int]]:
        """For each source chunk, the arrays with links that begin there."""
        found: dict[tuple[int, ...], list[int]] = {}
        for i, (_, array, _) in enumerate(self._segments):
            for key in array.keys.tolist():
                found.setdefault(tuple(key), []).append(i)
        return found

    def read(
        self, chunks: NDArray[np.int64] | None = None, wanted: AttributeFilter = all_attributes
    ) -> CrossLinks | None:
        """Return the links that begin in some chunks (in layout 0.7: all), or None where there are none.

        Parameters
        ----------
        chunks : (n, K) int64 or None
            Source chunks; None: all.
        wanted : callable
            Tells by its name whether an attribute is asked for.
        """
        parts = self._read_07(wanted) if self.level.layout == "0.7" else self._read_09(chunks, wanted)
        parts = [part for part in parts if part.n_links]
        if not parts:
            return None
        if len(parts) == 1:
            return parts[0]
        if len({part.width for part in parts}) > 1:
            raise CorruptError(f"{self.where} has links of different numbers of ends. Restore it from a copy.")
        attributes = concat_attributes([part.attributes for part in parts], [part.n_links for part in parts])
        chunk = np.concatenate([part.chunks for part in parts])
        rows = np.concatenate([part.rows for part in parts])
        return CrossLinks(self.delta, chunk, rows, parts[0].directed, parts[0].store, attributes)

    def _read_09(self, chunks: NDArray[np.int64] | None, wanted: AttributeFilter) -> list[CrossLinks]:
        """Read cells of the arrays of layout 0.9."""
        asked: dict[int, list[tuple[int, ...]]] = {}
        for key in self._by_chunk if chunks is None else map(tuple, chunks.tolist()):
            for i in self._by_chunk.get(key, ()):
                asked.setdefault(i, []).append(key)
        return [self._read_segment(i, np.array(sorted(asked[i]), np.int64), wanted) for i in sorted(asked)]

    def _read_segment(self, i: int, cells: NDArray[np.int64], wanted: AttributeFilter) -> CrossLinks:
        """Read some cells of one array."""
        name, array, offsets = self._segments[i]
        directed, store = bool(self._policy.get("directed", False)), str(self._policy.get("store", "canonical"))
        ordered = bool(
            array.attributes.get("has_perm", has_permutation(offsets, self.delta, directed=directed, store=store))
        )
        columns = len(offsets) + 1 + ordered
        dtype = declared_dtype(array.attributes, self.where)
        streams = [_decode_stream(blob, self.where) for blob in array.read(cells)]
        rows = [from_bytes(stream, dtype, columns, self.where).astype(np.int64) for stream in streams]
        counts = np.array([len(part) for part in rows], np.int64)
        whole = np.concatenate(rows) if rows else np.zeros((0, columns), np.int64)
        segment = OffsetSegment(offsets, cells, counts_to_offsets(counts), whole, np.arange(len(whole)), ordered)
        chunk, found = decode_cross_links(segment, self._scales, self.where)
        made = CrossLinks(self.delta, chunk, found, directed, store, self._attributes_09(name, cells, counts, wanted))
        return _from_lowest_chunk(made, np.repeat(cells, counts, axis=0)) if store == "duplicate" else made

    def _attributes_09(
        self, segment: str, cells: NDArray[np.int64], counts: NDArray[np.int64], wanted: AttributeFilter
    ) -> dict[str, Attribute]:
        """Read the attributes of some cells."""
        made = {}
        for title in filter(wanted, self.level.attribute_names("link_attributes")):
            family = self.level.family(f"link_attributes/{title}/{self.name}/{segment}")
            if family is not None:
                raw = [np.zeros(0, np.uint8) if blob is None else blob for blob in family.read(cells)]
                made[title] = decode_attribute(family.attributes, raw, counts, f"{self.where}: {title}")
        return made

    def _read_07(self, wanted: AttributeFilter) -> list[CrossLinks]:
        """Read both places where layout 0.7 keeps such links."""
        made = [] if self.delta == 0 else self._read_level_links(wanted)
        path = f"{self.level.number}/cross_chunk_links/{self.name}"
        node = self.level.files.node(path)
        if node is None:
            return made
        block = node_attributes(node)
        raw = read_small_array(self.level.files, f"{path}/data")
        width, n_dims = int(block["link_width"]), int(block.get("sid_ndim") or self.level.keys.keys.shape[1])
        chunks, rows = decode_records(np.zeros(0, np.uint8) if raw is None else raw, width, n_dims, path)
        if len(rows) != int(block.get("num_links", len(rows))):
            raise CorruptError(f"{self.where}: {block['num_links']} links are declared, {len(rows)} are stored.")
        attributes = {}
        for title in filter(wanted, self.level.attribute_names("cross_chunk_link_attributes")):
            at = f"{self.level.number}/cross_chunk_link_attributes/{title}/{self.name}"
            own = self.level.files.node(at)
            data = read_small_array(self.level.files, f"{at}/data")
            if own is not None and data is not None:
                facts = node_attributes(own)
                facts["shape"] = list(facts.get("shape") or [])[1:]
                attributes[title] = decode_attribute(facts, [data], np.array([len(rows)]), f"{self.where}: {title}")
        directed, store = bool(block.get("directed", False)), str(block.get("store", "canonical"))
        return [*made, CrossLinks(self.delta, chunks, rows, directed, store, attributes)]

    def _read_level_links(self, wanted: AttributeFilter) -> list[CrossLinks]:
        """Read links across levels that stand in the chunk of their first end, in either encoding."""
        family = self.level.family(f"links/{self.name}")
        if family is None or not len(family.keys):
            return []
        block, keys = family.attributes, family.keys
        width = int(block.get("link_width", 2))
        raw = [np.zeros(0, np.uint8) if blob is None else blob for blob in family.read(keys)]
        encoding = block.get("record_encoding")
        rows, chunks = [], []
        for key, blob in zip(keys, raw, strict=True):
            part = None if encoding == "endpoints_v1" else _decode_ragged_rows(blob, width, block, self.where, encoding)
            if part is None:
                chunk, own = decode_records(blob, width, keys.shape[1], self.where)
            else:
                own, chunk = part, np.broadcast_to(key, (len(part), width, keys.shape[1]))
            rows.append(own)
            chunks.append(chunk)
        counts = np.array([len(part) for part in rows], np.int64)
        attributes = {}
        for title in filter(wanted, self.level.attribute_names("link_attributes")):
            column = self.level.family(f"link_attributes/{title}/{self.name}")
            if column is not None:
                data = [np.zeros(0, np.uint8) if blob is None else blob for blob in column.read(keys)]
                attributes[title] = decode_attribute(column.attributes, data, counts, f"{self.where}: {title}")
        return [CrossLinks(self.delta, np.concatenate(chunks), np.concatenate(rows), attributes=attributes)]


def _decode_stream(blob: Bytes | None, where: str) -> Bytes:
    """Return the rows of an inline stream, all groups together."""
    return np.zeros(0, np.uint8) if blob is None or not blob.size else decode_ragged(blob, where).data


def _decode_ragged_rows(
    blob: Bytes, width: int, block: dict[str, Any], where: str, encoding: str | None
) -> NDArray[np.int64] | None:
    """Return rows of an inline stream; None where it is none and nothing says that it must be."""
    try:
        rows = from_bytes(_decode_stream(blob, where), declared_dtype({"dtype": "int64", **block}, where), width, where)
    except CorruptError:
        if encoding == "ragged_rows":
            raise
        return None
    return rows.astype(np.int64)


def _from_lowest_chunk(links: CrossLinks, sources: NDArray[np.int64]) -> CrossLinks:
    """Return, of links that are filed under each chunk they touch, those filed under the least of them: each link once."""
    n, width, n_parts = links.chunks.shape
    codes, _ = encode_keys(np.concatenate([links.chunks.reshape(-1, n_parts), sources]))
    kept = np.flatnonzero(codes[: n * width].reshape(n, width).min(axis=1) == codes[n * width :])
    attributes = {name: attribute.take(kept) for name, attribute in links.attributes.items()}
    return replace(links, chunks=links.chunks[kept], rows=links.rows[kept], attributes=attributes)
