"""Bytes of many lists at once: blobs back to back, vlen-bytes chunks, groups, ragged rows, link records (seed 002 §7.3-7.7)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import unpack
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raggedatlas.errors import CorruptError, SourceError
from raggedatlas.store import native

Bytes = NDArray[np.uint8]
MAGIC, VERSION, HEADER_BYTES = 0x5A564647, 1, 16
"""A fragment index begins with these two, and has a head of so many bytes."""
_FAULTS = {
    native.CUT_SHORT: "it is cut short",
    native.TRAILING: "bytes follow its end",
    native.BAD_MODE: "it holds an unknown mode",
    native.NEGATIVE: "it holds a negative number",
    native.BAD_BOUNDS: "it names what is not there",
    native.OUTSIDE: "it goes on where nothing is",
    native.BAD_SIZE: "it is larger than its numbers can tell",
}


@dataclass(frozen=True)
class Blobs:
    """Byte strings, back to back.

    Parameters
    ----------
    data : (n_bytes,) uint8
        All bytes.
    bounds : (n + 1,) int64
        Blob ``i`` is ``data[bounds[i]:bounds[i + 1]]``.
    """

    data: Bytes
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        """How many blobs there are."""
        return len(self.bounds) - 1

    def __getitem__(self, i: int) -> Bytes:
        """Return one blob."""
        return self.data[self.bounds[i] : self.bounds[i + 1]]


def counts_to_offsets(counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return where members begin whose lengths are `counts`: (n + 1,) int64, from 0 to their sum."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def concat_ranges(starts: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return ``starts[i], starts[i] + 1, ...``, `counts[i]` of them for each ``i``, one after the other.

    Examples
    --------
    >>> concat_ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    offsets = counts_to_offsets(counts)
    return np.repeat(np.asarray(starts, np.int64) - offsets[:-1], counts) + np.arange(offsets[-1])


def to_bytes(array: NDArray[Any]) -> Bytes:
    """Return the little-endian bytes of an array, row after row."""
    flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8)


def from_bytes(data: Bytes, dtype: DTypeLike, columns: int | None = None, what: str = "A chunk") -> NDArray[Any]:
    """Return bytes as values, or as rows of `columns` values.

    Raises
    ------
    CorruptError
        If the bytes are no whole number of rows.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    size = kind.itemsize * (columns or 1)
    if data.size % size:
        raise CorruptError(f"{what} has {data.size:,} bytes; expected whole rows of {size}. Restore it from a copy.")
    values = np.ascontiguousarray(data).view(kind)
    return values if columns is None else values.reshape(-1, columns)


def concat_blobs(parts: Sequence[Bytes | bytes | memoryview]) -> Blobs:
    """Put byte strings back to back."""
    data = np.frombuffer(b"".join(parts), np.uint8)  # type: ignore[arg-type] # arrays of bytes are buffers
    return Blobs(data, counts_to_offsets(np.fromiter((len(part) for part in parts), np.int64, len(parts))))


def interleave(*sections: Blobs) -> Blobs:
    """Join the first blobs of all sections, then the second ones, and so on."""
    parts = [section.data.data for section in sections]
    table = np.stack([section.bounds for section in sections], axis=1).tolist()
    pieces = [
        part[a:b] for starts, stops in pairwise(table) for part, a, b in zip(parts, starts, stops, strict=True) if b > a
    ]
    sizes = sum((np.diff(section.bounds) for section in sections), np.zeros(len(sections[0]), np.int64))
    return Blobs(np.frombuffer(b"".join(pieces), np.uint8), counts_to_offsets(sizes))


def slice_bytes(data: Bytes, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Bytes:
    """Return byte ranges back to back; without a copy where there is one."""
    if len(starts) == 1:
        return data[int(starts[0]) : int(starts[0] + sizes[0])]
    pieces = [data[a:b] for a, b in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]
    return np.concatenate(pieces) if pieces else data[:0]


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
    """Return the items of a vlen-bytes chunk, each with the four bytes of its length cut away.

    Raises
    ------
    CorruptError
        If it is cut short, or goes on after its last item.
    """
    if chunk.size < 4:
        raise CorruptError(f"{what} has {chunk.size} bytes; expected at least 4.")
    count = int(chunk[:4].view("<u4")[0]) if chunk.flags.c_contiguous else int.from_bytes(chunk[:4].tobytes(), "little")
    if count > (chunk.size - 4) // 4:
        raise CorruptError(f"{what} declares {count:,} items in {chunk.size:,} bytes; it is cut short.")
    starts, stops = np.empty(count, np.int64), np.empty(count, np.int64)
    contents = np.ascontiguousarray(chunk)
    raise_fault(native.library().ra_frame_items(contents, contents.size, starts, stops, count), what)
    return Blobs(slice_bytes(chunk, starts, stops - starts), counts_to_offsets(stops - starts))


def decode_single_item(chunk: Bytes, what: str = "A cell") -> Bytes:
    """Return the item of a vlen-bytes chunk that has exactly one."""
    count, size = unpack("<II", chunk[:8].tobytes()) if chunk.size >= 8 else (0, 0)
    if count != 1:
        raise CorruptError(f"{what} is no vlen-bytes chunk of one item.")
    if size != chunk.size - 8:
        raise CorruptError(f"{what} declares another length than its {chunk.size - 8:,} bytes; it is cut short.")
    return chunk[8:]


def raise_fault(fault: int, what: str) -> None:
    """Raise the error of what a compiled function found, if it found any."""
    if fault:
        raise CorruptError(f"{what} does not decode: {_FAULTS[fault]}. Restore it from a copy.")


# Ragged rows: i64 K, i64 offset of each group of rows relative to the first, rows (§7.4, §7.5)


def encode_ragged(rows: Bytes, starts: NDArray[np.int64] | None = None) -> bytes:
    """Return an inline stream: how many groups of rows, the byte where each begins, the bytes of the rows.

    Parameters
    ----------
    rows : (n_bytes,) uint8
        Rows of all groups.
    starts : (K,) int64 or None
        Where each group begins in `rows`, in bytes; None: one group.
    """
    begin = np.zeros(1, np.int64) if starts is None else starts
    return to_bytes(np.concatenate([[len(begin)], begin]).astype(np.int64)).tobytes() + rows.tobytes()


def decode_ragged(blob: Bytes, what: str = "A stream of rows") -> Blobs:
    """Return the groups of rows of an inline stream, as bytes.

    Raises
    ------
    CorruptError
        If a number is negative, the offsets fall or point outside.
    """
    count = int(from_bytes(blob[:8], np.int64, what=what)[0]) if blob.size >= 8 else -1
    if count < 0 or 8 * (count + 1) > blob.size:
        raise CorruptError(f"{what} declares {count:,} groups of rows in {blob.size:,} bytes. Restore it from a copy.")
    begin = from_bytes(blob[8 : 8 * (count + 1)], np.int64)
    data = blob[8 * (count + 1) :]
    bounds = np.concatenate([begin, [data.size]])
    if (count == 0 and data.size) or (count and begin[0] != 0) or (np.diff(bounds) < 0).any():
        raise CorruptError(f"{what} has offsets that fall or point outside of it. Restore it from a copy.")
    return Blobs(data, bounds if count else np.zeros(1, np.int64))


def encode_single_groups(rows: Blobs) -> Blobs:
    """Return many inline streams, each with one group of rows."""
    heads = np.zeros((len(rows), 2), np.int64)
    heads[:, 0] = 1
    return interleave(Blobs(to_bytes(heads), np.arange(len(rows) + 1, dtype=np.int64) * 16), rows)


# Groups (§7.4)


def encode_groups(offsets: NDArray[np.int64], ids: NDArray[np.int64]) -> tuple[bytes, NDArray[np.int64]]:
    """Return ``groups/data`` (a ragged stream) and its sidecar, the byte of the stream where each group begins."""
    starts = 8 * offsets[:-1]
    return encode_ragged(to_bytes(ids), starts), starts + 8 * len(offsets)


def decode_groups(
    data: Bytes, starts: NDArray[np.int64] | None, n_groups: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return offsets (G + 1,) and ids of groups, from either spelling.

    Parameters
    ----------
    data : (n_bytes,) uint8
        A ragged stream, or bare ids.
    starts : (G,) int64 or None
        The sidecar: with bare ids the first is 0. None: `data` is a ragged stream.
    n_groups : int
        How many groups the attributes declare.
    """
    if starts is None or (len(starts) and starts[0] != 0):
        groups = decode_ragged(data, "groups/data")
        ids, offsets = from_bytes(groups.data, np.int64, what="groups/data"), groups.bounds // 8
    else:
        ids, offsets = from_bytes(data, np.int64, what="groups/data"), np.append(starts, data.size) // 8
    if len(offsets) - 1 != n_groups or (np.diff(offsets) < 0).any() or offsets[-1] != len(ids):
        raise CorruptError(
            f"groups/data does not hold the {n_groups} groups that are declared. Restore it from a copy."
        )
    return offsets, ids


# Records of links (§7.5, §7.7)


def encode_records(chunks: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return records of ends as (M, L, D + 1) int64: the chunk of each end and its row."""
    return np.concatenate([chunks, rows[:, :, None]], axis=2).astype(np.int64, copy=False)


def decode_records(data: Bytes, width: int, n_dims: int, what: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return chunks (M, L, D) and rows (M, L) of records.

    Raises
    ------
    CorruptError
        If the bytes are no whole number of records, or a row is negative.
    """
    table = from_bytes(data, np.int64, width * (n_dims + 1), what).reshape(-1, width, n_dims + 1)
    if (table[:, :, -1] < 0).any():
        raise CorruptError(f"{what} holds a negative row. Restore it from a copy.")
    return table[:, :, :-1], table[:, :, -1]
