"""Byte codecs: vlen-bytes chunks, fragment indexes, manifests, groups, ragged rows, link records, Draco (§7.3-7.7)."""

from collections.abc import Sequence
from ctypes import byref, c_int64
from dataclasses import dataclass
from itertools import pairwise
from struct import unpack
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raggedatlas.errors import CorruptError, MissingExtraError, SourceError
from raggedatlas.store import native
from raggedatlas.store.native import I64, OUT_I64, OUT_U8, U8, Manifests, library
from raggedatlas.wings.vectors.geometry import Fragments, Level, Objects, range_fragments
from raggedatlas.wings.vectors.shapes import concat_ranges, counts_to_offsets

Bytes = NDArray[np.uint8]
EMPTY: Bytes = np.zeros(0, np.uint8)
MAGIC, VERSION, HEADER_BYTES = 0x5A564647, 1, 16
"""Magic number and version of a fragment index, and the size of its header."""
STRINGS = "raggedatlas_strings"
"""Metadata key that marks codes made from strings, as opposed to codes given as such."""

_FAULTS = {
    native.CUT_SHORT: "it is truncated",
    native.TRAILING: "bytes follow its end",
    native.BAD_MODE: "it holds an unknown mode",
    native.NEGATIVE: "it holds a negative number",
    native.BAD_BOUNDS: "it refers to missing data",
    native.OUTSIDE: "it exceeds the data",
    native.BAD_SIZE: "its size exceeds the integer range",
}


@dataclass(frozen=True)
class Blobs:
    """Concatenated byte strings."""

    data: Bytes
    bounds: NDArray[np.int64]  # (n + 1,): blob i is data[bounds[i]:bounds[i + 1]]

    def __len__(self) -> int:
        """Return the number of blobs."""
        return len(self.bounds) - 1

    def __getitem__(self, i: int) -> Bytes:
        """Return one blob."""
        return self.data[self.bounds[i] : self.bounds[i + 1]]


def to_bytes(array: NDArray[Any]) -> Bytes:
    """Return the little-endian bytes of an array in C order."""
    flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8)


def from_bytes(data: Bytes, dtype: DTypeLike, columns: int | None = None, what: str = "A chunk") -> NDArray[Any]:
    """Return bytes as values, or as rows of `columns` values; `CorruptError` if the size is not a multiple of the row size."""
    kind = np.dtype(dtype).newbyteorder("<")
    size = kind.itemsize * (columns or 1)
    if data.size % size:
        raise CorruptError(f"{what} has {data.size:,} bytes; expected a multiple of {size}. Restore it from a copy.")
    values = np.ascontiguousarray(data).view(kind)
    return values if columns is None else values.reshape(-1, columns)


def concat_blobs(parts: Sequence[Bytes | bytes | memoryview]) -> Blobs:
    """Concatenate byte strings."""
    data = np.frombuffer(b"".join(parts), np.uint8)  # type: ignore[arg-type] # byte arrays support the buffer protocol
    return Blobs(data, counts_to_offsets(np.fromiter((len(part) for part in parts), np.int64, len(parts))))


def interleave(*sections: Blobs) -> Blobs:
    """Concatenate the first blobs of all sections, then the second ones, and so on."""
    parts = [section.data.data for section in sections]
    table = np.stack([section.bounds for section in sections], axis=1).tolist()
    pieces = [
        part[a:b] for starts, stops in pairwise(table) for part, a, b in zip(parts, starts, stops, strict=True) if b > a
    ]
    sizes = sum((np.diff(section.bounds) for section in sections), np.zeros(len(sections[0]), np.int64))
    return Blobs(np.frombuffer(b"".join(pieces), np.uint8), counts_to_offsets(sizes))


def slice_bytes(data: Bytes, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Bytes:
    """Return byte ranges concatenated; a single one is not copied."""
    if len(starts) == 1:
        return data[int(starts[0]) : int(starts[0] + sizes[0])]
    pieces = [data[a:b] for a, b in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]
    return np.concatenate(pieces) if pieces else data[:0]


def take_blobs(blobs: Blobs, rows: NDArray[np.int64]) -> Blobs:
    """Return some byte strings, in the given order."""
    starts, sizes = blobs.bounds[rows], np.diff(blobs.bounds)[rows]
    return Blobs(slice_bytes(blobs.data, starts, sizes), counts_to_offsets(sizes))


# vlen-bytes


def encode_vlen(blobs: Blobs) -> bytes:
    """Return a chunk of Zarr's ``vlen-bytes`` codec: u32 count, then u32 length and bytes of each item."""
    sizes = np.diff(blobs.bounds)
    if (sizes >= 2**32).any():
        raise SourceError("An item of a vlen-bytes chunk has 4 GiB or more; use smaller chunks.")
    out = np.empty(4 + 4 * len(blobs) + int(blobs.bounds[-1] - blobs.bounds[0]), np.uint8)
    out[:4] = to_bytes(np.array([len(blobs)], np.uint32))
    at = 4 + blobs.bounds[:-1] - blobs.bounds[0] + 4 * np.arange(len(blobs))
    heads = at[:, None] + np.arange(4)
    is_data = np.ones(len(out), bool)
    is_data[:4] = False
    is_data[heads] = False
    out[heads] = to_bytes(sizes.astype(np.uint32)).reshape(-1, 4)
    out[is_data] = blobs.data[blobs.bounds[0] : blobs.bounds[-1]]
    return out.tobytes()


def decode_vlen(chunk: Bytes, what: str = "A vlen-bytes chunk") -> Blobs:
    """Return the items of a vlen-bytes chunk, without their length prefixes."""
    if chunk.size < 4:
        raise CorruptError(f"{what} has {chunk.size} bytes; expected at least 4.")
    count = int(chunk[:4].view("<u4")[0]) if chunk.flags.c_contiguous else int.from_bytes(chunk[:4].tobytes(), "little")
    # Each item takes at least 4 bytes, so a damaged count is refused before memory is allocated for it.
    if count > (chunk.size - 4) // 4:
        raise CorruptError(f"{what} declares {count:,} items in {chunk.size:,} bytes; it is truncated.")
    starts, stops = np.empty(count, np.int64), np.empty(count, np.int64)
    contents = np.ascontiguousarray(chunk)
    raise_fault(native.library().ra_frame_items(contents, contents.size, starts, stops, count), what)
    return Blobs(slice_bytes(chunk, starts, stops - starts), counts_to_offsets(stops - starts))


def decode_single_item(chunk: Bytes, what: str = "A cell") -> Bytes:
    """Return the item of a vlen-bytes chunk with exactly one item."""
    count, size = unpack("<II", chunk[:8].tobytes()) if chunk.size >= 8 else (0, 0)
    if count != 1:
        raise CorruptError(f"{what} is not a vlen-bytes chunk with one item.")
    if size != chunk.size - 8:
        raise CorruptError(f"{what} declares a length other than its {chunk.size - 8:,} bytes; it is truncated.")
    return chunk[8:]


def raise_fault(fault: int, what: str) -> None:
    """Raise the error of a compiled function's fault code, if there is one."""
    if fault:
        raise CorruptError(f"{what} does not decode: {_FAULTS[fault]}. Restore it from a copy.")


# Ragged rows: i64 K, i64 offset of each group of rows relative to the first, rows (§7.4, §7.5)


def encode_ragged(rows: Bytes, starts: NDArray[np.int64] | None = None) -> bytes:
    """Return an inline stream: number of groups of rows, byte offset of each, bytes of the rows.

    `starts`, (K,), is the byte offset of each group in `rows`; None: one group.
    """
    begin = np.zeros(1, np.int64) if starts is None else starts
    return to_bytes(np.concatenate([[len(begin)], begin]).astype(np.int64)).tobytes() + rows.tobytes()


def decode_ragged(blob: Bytes, what: str = "A stream of rows") -> Blobs:
    """Return the groups of rows of an inline stream, as bytes."""
    count = int(from_bytes(blob[:8], np.int64, what=what)[0]) if blob.size >= 8 else -1
    if count < 0 or 8 * (count + 1) > blob.size:
        raise CorruptError(f"{what} declares {count:,} groups of rows in {blob.size:,} bytes. Restore it from a copy.")
    begin = from_bytes(blob[8 : 8 * (count + 1)], np.int64)
    data = blob[8 * (count + 1) :]
    bounds = np.concatenate([begin, [data.size]])
    if (count == 0 and data.size) or (count and begin[0] != 0) or (np.diff(bounds) < 0).any():
        raise CorruptError(f"{what} has offsets that decrease or are out of range. Restore it from a copy.")
    return Blobs(data, bounds if count else np.zeros(1, np.int64))


def encode_single_groups(rows: Blobs) -> Blobs:
    """Return many inline streams, each with one group of rows."""
    heads = np.zeros((len(rows), 2), np.int64)
    heads[:, 0] = 1
    return interleave(Blobs(to_bytes(heads), np.arange(len(rows) + 1, dtype=np.int64) * 16), rows)


# Groups (§7.4)


def encode_groups(offsets: NDArray[np.int64], ids: NDArray[np.int64]) -> tuple[bytes, NDArray[np.int64]]:
    """Return ``groups/data`` (a ragged stream) and its sidecar, the byte offset of each group in the stream."""
    starts = 8 * offsets[:-1]
    # The stream begins with K and K offsets of 8 bytes: as many numbers as `offsets` has.
    return encode_ragged(to_bytes(ids), starts), starts + 8 * len(offsets)


def decode_groups(
    data: Bytes, starts: NDArray[np.int64] | None, n_groups: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return offsets (G + 1,) and ids of groups, from either encoding.

    `data` is a ragged stream if `starts`, the sidecar, is None or its first offset is not 0, else bare ids. `n_groups`
    is the number that the attributes declare.
    """
    # In a stream the first group begins after the header, so a first offset of 0 means bare ids.
    if starts is None or (len(starts) and starts[0] != 0):
        groups = decode_ragged(data, "groups/data")
        ids, bounds = from_bytes(groups.data, np.int64, what="groups/data"), groups.bounds
    else:
        ids, bounds = from_bytes(data, np.int64, what="groups/data"), np.append(starts, data.size)
    offsets = bounds // 8
    if len(offsets) - 1 != n_groups or (np.diff(offsets) < 0).any() or offsets[-1] != len(ids) or (bounds % 8).any():
        raise CorruptError(f"groups/data does not hold the {n_groups} declared groups. Restore it from a copy.")
    return offsets, ids


# Records of links (§7.5, §7.7)


def encode_records(chunks: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return records of link ends as (M, L, D + 1) int64: chunk and row of each end."""
    return np.concatenate([chunks, rows[:, :, None]], axis=2).astype(np.int64, copy=False)


def decode_records(data: Bytes, width: int, n_dims: int, what: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return chunks (M, L, D) and rows (M, L) of records; negative rows are refused."""
    table = from_bytes(data, np.int64, width * (n_dims + 1), what).reshape(-1, width, n_dims + 1)
    if (table[:, :, -1] < 0).any():
        raise CorruptError(f"{what} holds a negative row. Restore it from a copy.")
    return table[:, :, :-1], table[:, :, -1]


def encode_fragments(fragments: Fragments) -> Blobs:
    """Return one blob for each chunk."""
    n_all = np.diff(fragments.bounds)
    kinds = counts_to_offsets(fragments.is_range)
    n_runs = np.diff(kinds[fragments.bounds])
    heads = np.zeros((len(n_all), 4), "<u4")
    # The u16 version and the u16 flags, which are 0, form one u32.
    heads[:, 0], heads[:, 1], heads[:, 2], heads[:, 3] = MAGIC, VERSION, n_all, n_runs
    padded = (n_all + 63) // 64 * 64
    bits = np.zeros(padded.sum(), np.uint8)
    bits[concat_ranges(counts_to_offsets(padded)[:-1], n_all)] = fragments.is_range
    table = np.stack([fragments.starts[fragments.is_range], fragments.counts[fragments.is_range]], axis=1)
    # Starts of lists are not stored: the lists follow one another in fragment order, as they may not in `fragments.rows`.
    rows, _ = fragment_rows(fragments, np.flatnonzero(~fragments.is_range))
    n_lists = n_all - n_runs
    # A blob without fragments ends after its header: it does not even have the offset 0.
    sizes = np.where(n_all > 0, n_lists + 1, 0)
    begin = counts_to_offsets(sizes)
    steps = np.zeros(begin[-1], np.int64)
    steps[concat_ranges(begin[:-1] + 1, np.where(n_all > 0, n_lists, 0))] = fragments.counts[~fragments.is_range]
    # One sum over all chunks; the sum at the start of a chunk is subtracted below, so each starts at 0.
    total = np.cumsum(steps)
    some = n_all > 0
    offsets = (total - np.repeat(total[begin[:-1][some]], sizes[some])).astype(np.uint32)
    n_rows = np.diff(counts_to_offsets(np.where(fragments.is_range, 0, fragments.counts))[fragments.bounds])
    return interleave(
        Blobs(to_bytes(heads), np.arange(len(n_all) + 1, dtype=np.int64) * HEADER_BYTES),
        Blobs(np.packbits(bits, bitorder="little"), counts_to_offsets(padded // 8)),
        Blobs(to_bytes(table.astype(np.int64, copy=False)), counts_to_offsets(n_runs * 16)),
        Blobs(to_bytes(offsets), counts_to_offsets(sizes * 4)),
        Blobs(to_bytes(rows), counts_to_offsets(n_rows * 8)),
    )


def decode_fragments(blobs: Blobs, what: str = "A fragment index") -> Fragments:
    """Return the fragments of many chunks; every blob is validated first.

    Raises `CorruptError` if magic, version or flags are wrong, a count does not match the bitmap or the size, offsets
    decrease, or a number is negative.
    """
    result = try_decode_fragments(blobs)
    if isinstance(result, Fragments):
        return result
    raise corrupt_index_error(result[0], blobs[result[1]], what)


def try_decode_fragments(blobs: Blobs) -> Fragments | tuple[int, int]:
    """Return the fragments of many chunks, or the fault code of the first damaged blob and its number."""
    data, first, n, where = np.ascontiguousarray(blobs.data), np.ascontiguousarray(blobs.bounds), len(blobs), c_int64()
    # Counted first: arrays are allocated by what the blobs contain, not by what a damaged header declares.
    counts = np.empty((2, n), np.int64)
    fault = library().ra_count_fragments(data, data.size, first, n, counts, byref(where))
    if not fault:
        bounds = counts_to_offsets(counts[0])
        is_range, spans = np.empty(bounds[-1], bool), np.empty((2, bounds[-1]), np.int64)
        rows = np.empty(counts[1].sum(), np.int64)
        fault = library().ra_read_fragments(
            data, data.size, first, n, is_range.view(np.uint8), *spans, len(is_range), rows, len(rows), byref(where)
        )
    return (fault, where.value) if fault else Fragments(bounds, is_range, spans[0], spans[1], rows)


def corrupt_index_error(fault: int, blob: Bytes, what: str) -> CorruptError:
    """Return the error for a fault that a compiled function found in a blob."""
    if fault == native.BAD_VERSION:
        bad = int.from_bytes(blob[4:8].tobytes(), "little")
        return CorruptError(f"{what} has version {bad & 0xFFFF} and flags {bad >> 16}; expected 1 and 0.")
    says = {
        native.NO_HEAD: f"is shorter than its header of {HEADER_BYTES} bytes",
        native.NO_MAGIC: "does not begin with the magic number of ZVFG",
        native.BAD_RUNS: "declares more runs than fragments",
        native.CUT_SHORT: "is truncated: its header declares more data than it has",
        native.BAD_BITS: "has a bitmap whose number of bits is not the number of runs in the header",
        native.BAD_LISTS: "has a size that does not match its explicit lists",
        native.BAD_OFFSETS: "has offsets that decrease or do not start at 0",
        native.NEGATIVE: "holds a negative start, count or row",
        native.BEYOND: "refers to a row that its chunk does not have",
        native.MISSING: "does not have a requested fragment",
        native.BAD_BOUNDS: "exceeds the available bytes",
    }
    return CorruptError(f"{what} {says[fault]}. Restore it from a copy.")


def locate_fragments(
    blob: Bytes, which: NDArray[np.int64], n_rows: int, spans: NDArray[np.int64], what: str = "A fragment index"
) -> None:
    """Locate some fragments of one chunk; the others are not read.

    `which`, (P,), are fragment numbers, ascending, all in range. `spans`, (P, 3), is the output: first row of a range,
    or -1; byte offset of a list in the blob; number of rows. Raises `CorruptError` if what was read of the blob is
    invalid, a range exceeds `n_rows`, the rows of the chunk, or a fragment does not exist.
    """
    fault = library().ra_locate_fragments(blob, blob.size, which, len(which), n_rows, spans)
    if fault:
        raise corrupt_index_error(fault, blob, what)


def fragment_rows(fragments: Fragments, which: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the chunk-local rows of some fragments, concatenated, and the number of rows of each.

    Raises `CorruptError` if a requested fragment does not exist, or a list exceeds the available rows.
    """
    counts = fragments.counts[which]
    rows = np.empty(counts.sum(), np.int64)
    kinds = np.ascontiguousarray(fragments.is_range).view(np.uint8)
    starts, sizes, listed = map(np.ascontiguousarray, (fragments.starts, fragments.counts, fragments.rows))
    columns = native.RaFragments(
        U8.address(kinds), I64.address(starts), I64.address(sizes), len(kinds), I64.address(listed), len(listed)
    )
    if library().ra_expand_fragments(byref(columns), np.ascontiguousarray(which), len(which), rows, len(rows)):
        raise CorruptError("A list of fragments refers to a missing one. Restore the store from a copy.")
    return rows, counts


def chunks_as_fragments(sizes: NDArray[np.int64]) -> Fragments:
    """Return one fragment for each chunk, with all of its rows; `sizes` are their numbers."""
    return range_fragments(np.arange(len(sizes) + 1), np.zeros(len(sizes), np.int64), sizes)


def lacks_rows(fragments: Fragments, sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which fragments refer to a row that their chunk does not have: (F,) bool.

    `fragments` are those of all chunks; lists do not exceed its rows. `sizes` is the number of rows of each chunk.
    """
    limit = np.repeat(sizes, np.diff(fragments.bounds))
    listed = np.flatnonzero(~fragments.is_range)
    return _exceed(fragments.starts, fragments.counts, limit, listed, fragments.rows)


def _exceed(
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    limits: NDArray[np.int64],
    listed: NDArray[np.int64],
    items: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return which ranges are not within 0 and their limit; those that are `listed` are ranges of `items`, which are then compared."""
    # By subtraction, because start + count may exceed int64.
    outside = (starts < 0) | (counts < 0) | (counts > limits) | (starts > limits - counts)
    if listed.size:
        sizes = counts[listed]
        own = items[concat_ranges(starts[listed], sizes)]
        beyond = (own < 0) | (own >= np.repeat(limits[listed], sizes))
        outside[listed] = np.diff(counts_to_offsets(beyond)[counts_to_offsets(sizes)]) > 0
    return outside


def are_tiles(fragments: Fragments, bounds: NDArray[np.int64]) -> bool:
    """Return whether the fragments of every chunk, whose rows are given by `bounds`, are its rows in order."""
    if not fragments.is_range.all() or len(fragments.bounds) != len(bounds):
        return False
    ends = counts_to_offsets(fragments.counts)
    # Starts are chunk-local, while `ends` counts through all chunks.
    base = np.repeat(ends[fragments.bounds[:-1]], np.diff(fragments.bounds))
    return bool(
        np.array_equal(np.diff(ends[fragments.bounds]), np.diff(bounds))
        and (fragments.starts == ends[:-1] - base).all()
    )


SINGLE, RUN, LIST = 0, 1, 2
"""Modes of a block."""


def encode_manifests(objects: Objects) -> Blobs:
    """Return one manifest per object: u32 number of blocks; for each block int64 chunk, u8 mode and the data of the mode."""
    body = np.where(objects.modes == LIST, 4 + 8 * objects.counts, 8 + 8 * (objects.modes == RUN))
    sizes = body + 8 * objects.chunks.shape[1] + 1
    bounds = counts_to_offsets(4 + np.diff(counts_to_offsets(sizes)[objects.bounds]))
    out = np.empty(bounds[-1], np.uint8)
    wide = (objects.bounds, objects.chunks, objects.starts, objects.counts, objects.fragments)
    first, chunks, starts, counts, items = (np.ascontiguousarray(column, np.int64) for column in wide)
    modes = np.ascontiguousarray(objects.modes, np.uint8)
    columns = (I64, first), (I64, chunks), (U8, modes), (I64, starts), (I64, counts), (I64, items)
    raise_fault(library().ra_write_manifests(byref(_build_objects(columns)), out, out.size), "An object index")
    return Blobs(out, bounds)


def _build_objects(columns: Any) -> Any:  # noqa: ANN401  (arrays of several types)
    """Return the C struct of validated manifest columns; the sizes come from the second and the last."""
    bounds, chunks, items = columns[0][1], columns[1][1], columns[-1][1]
    return Manifests(
        *(kind.address(column) for kind, column in columns), len(bounds) - 1, chunks.shape[1], len(chunks), len(items)
    )


def decode_manifests(blobs: Blobs, n_dims: int, ids: NDArray[np.int64]) -> Objects:
    """Return the object index of encoded manifests, one for each object.

    `n_dims` is the number of coordinates of a chunk. Raises `CorruptError` if a manifest has an unknown mode, is
    truncated, has trailing bytes, or holds a negative number.
    """
    totals, where = np.zeros(2, np.int64), c_int64()
    data, first, n = np.ascontiguousarray(blobs.data), np.ascontiguousarray(blobs.bounds), len(blobs)
    fault = library().ra_count_manifests(data, data.size, first, n, n_dims, totals, byref(where))
    if fault:
        raise_fault(fault, f"The manifest of object {ids[where.value]}")
    n_blocks, n_items = totals.tolist()
    bounds, chunks, modes = (
        np.empty(n + 1, np.int64),
        np.empty((n_blocks, n_dims), np.int64),
        np.empty(n_blocks, np.uint8),
    )
    starts, counts, items = (np.empty(size, np.int64) for size in (n_blocks, n_blocks, n_items))
    wide = [(OUT_I64, column) for column in (starts, counts, items)]
    out = _build_objects([(OUT_I64, bounds), (OUT_I64, chunks), (OUT_U8, modes), *wide])
    raise_fault(library().ra_read_manifests(data, data.size, first, byref(out), byref(where)), "An object index")
    return Objects(ids=ids, bounds=bounds, chunks=chunks, modes=modes, starts=starts, counts=counts, fragments=items)


def split_manifests(data: Bytes, n_dims: int, n_objects: int) -> Blobs:
    """Return the concatenated manifests of ``object_index/data`` as separate blobs; `CorruptError` if they are not `n_objects`."""
    # A manifest takes at least 4 bytes, so a damaged count is refused before memory is allocated for it.
    if n_objects < 0 or 4 * n_objects > data.size:
        raise CorruptError(
            f"object_index/data has {data.size:,} bytes, too few for {n_objects:,} manifests; it is truncated."
        )
    bounds = np.zeros(n_objects + 1, np.int64)
    contents = np.ascontiguousarray(data)
    raise_fault(library().ra_measure_manifests(contents, contents.size, n_dims, bounds, n_objects), "object_index/data")
    return Blobs(data, bounds)


def find_missing_blocks(objects: Objects, limits: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which blocks refer to a fragment that their chunk does not have, (K,) bool, without expanding ranges.

    `limits`, (K,), is the number of fragments of each block's chunk; 0 for a missing chunk.
    """
    listed = np.flatnonzero(objects.modes == LIST)
    return (objects.counts > 0) & _exceed(objects.starts, objects.counts, limits, listed, objects.fragments)


def expand_manifests(
    objects: Objects, limits: NDArray[np.int64], where: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the fragments of an object index, expanded, in traversal order.

    Returns block and chunk-local number of each fragment, (P,) both, and the bounds of the objects among them, (B + 1,).
    `limits`, (K,), is the number of fragments of each block's chunk. Counts of a damaged index are checked against it
    before memory is allocated: a block that refers to a fragment that its chunk does not have is a `CorruptError`.
    `where` names the level in messages.
    """
    if find_missing_blocks(objects, limits).any():
        raise CorruptError(
            f"{where}/object_index refers to a fragment that its chunk does not have. Restore the store from a copy."
        )
    fragments = concat_ranges(objects.starts, objects.counts)
    listed = objects.modes == LIST
    # For a list, the expanded numbers are places in `objects.fragments`, not fragments.
    if listed.any():
        explicit = np.repeat(listed, objects.counts)
        fragments[explicit] = objects.fragments[fragments[explicit]]
    blocks = np.repeat(np.arange(len(objects.starts)), objects.counts)
    return blocks, fragments, counts_to_offsets(objects.counts)[objects.bounds]


def take_manifests(objects: Objects, rows: NDArray[np.int64]) -> Objects:
    """Return the index of some objects, in the given order."""
    counts = np.diff(objects.bounds)[rows]
    blocks = concat_ranges(objects.bounds[rows], counts)
    starts, sizes, modes = objects.starts[blocks].copy(), objects.counts[blocks], objects.modes[blocks]
    listed = modes == LIST
    items = objects.fragments[concat_ranges(starts[listed], sizes[listed])]
    starts[listed] = counts_to_offsets(sizes[listed])[:-1]
    return Objects(objects.ids[rows], counts_to_offsets(counts), objects.chunks[blocks], modes, starts, sizes, items)


QUANTISATION_BITS = 11
"""Positions are quantised to this many bits of the chunk's extent, as in other implementations."""


def _draco_library() -> Any:  # noqa: ANN401 - a module
    try:
        import DracoPy
    except ImportError as error:
        raise MissingExtraError(
            "This store has Draco meshes, which need DracoPy: pip install 'raggedatlas[draco]'."
        ) from error
    return DracoPy


def encode_cells(level: Level) -> Blobs:
    """Return one Draco bit stream per chunk; the order of vertices and faces is preserved. Links must be triangles."""
    library = _draco_library()
    if level.links is not None and level.links.width != 3:
        raise SourceError(
            f"Draco encodes triangles; these links have {level.links.width} ends. Use the encoding 'raw'."
        )
    cells = []
    for c in range(len(level.chunks)):
        points = level.positions[level.bounds[c] : level.bounds[c + 1]].astype(np.float32)
        faces = None
        if level.links is not None:
            faces = level.links.rows[level.links.bounds[c] : level.links.bounds[c + 1]].astype(np.uint32)
        # Links and attributes refer to vertices and faces by row, so Draco must keep their order.
        options: dict[str, Any] = {"quantization_bits": QUANTISATION_BITS, "preserve_order": True}
        cells.append(library.encode(points, faces if faces is not None and len(faces) else None, **options))
    return concat_blobs(cells)


def decode_cell(blob: Bytes, what: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return vertices (N, 3) and faces (M, 3) of a Draco bit stream."""
    library = _draco_library()
    try:
        mesh = library.decode(blob.tobytes())
    except (ValueError, RuntimeError, library.FileTypeException) as error:
        raise CorruptError(f"{what} does not decode as Draco: {error}") from error
    faces = getattr(mesh, "faces", None)
    points = np.asarray(mesh.points, np.float32).reshape(-1, 3)
    return points, np.zeros((0, 3), np.int64) if faces is None else np.asarray(faces, np.int64).reshape(-1, 3)
