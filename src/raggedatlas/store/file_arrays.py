"""Arrays in files that others have written (HDF5, and what datasets are linked to): their chunks, from bytes to rows."""

import math
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from ctypes import c_int64
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.store.codecs import ChunkDecoder
from raggedatlas.store.native import CUT_SHORT, GOOD, REFUSED, UNKNOWN_CALL, library
from raggedatlas.store.references import ChunkTable
from raggedatlas.store.runtime import LRUCache, map_decode, shared_pool
from raggedatlas.store.shards import WAVE_BYTES, ChunkPieces

_BYTES_PER_TASK = 2**18
_AS_IS = ChunkDecoder("none", checksum=False)


@dataclass(frozen=True, eq=False)
class Ranges:
    """Ranges of bytes of some files, and where each is written; as arrays, since a batch of rows has thousands."""

    numbers: NDArray[np.int64]  # (n,), as the next three: which of the files
    offsets: NDArray[np.int64]  # first byte in the file
    sizes: NDArray[np.int64]
    targets: NDArray[np.int64]  # where each begins in `room`
    room: NDArray[np.uint8]  # (n_bytes,): what is written to; the ranges do not overlap there

    @classmethod
    def of(
        cls,
        numbers: NDArray[Any],
        offsets: NDArray[Any],
        sizes: NDArray[Any],
        targets: NDArray[Any],
        room: NDArray[np.uint8],
    ) -> "Ranges":
        """Make them of integers of any type; empty ranges are left out."""
        some = sizes > 0
        first, second, third, fourth = (
            np.ascontiguousarray(column[some], np.int64) for column in (numbers, offsets, sizes, targets)
        )
        return cls(first, second, third, fourth, room)

    def __len__(self) -> int:
        """Count the ranges."""
        return len(self.sizes)

    def take(self, which: NDArray[np.int64] | slice) -> "Ranges":
        """Return some of them."""
        return Ranges(self.numbers[which], self.offsets[which], self.sizes[which], self.targets[which], self.room)

    def ordered(self) -> "Ranges":
        """Return them by file and offset."""
        return self.take(np.lexsort((self.offsets, self.numbers)))

    def split(self, n_bytes: int) -> "Ranges":
        """Return them with those cut that are longer than so many bytes."""
        if not (self.sizes > n_bytes).any():
            return self
        parts = -(-self.sizes // n_bytes)
        of = np.repeat(np.arange(len(self)), parts)
        begins = (np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)) * n_bytes
        sizes = np.minimum(self.sizes[of] - begins, n_bytes)
        return Ranges(self.numbers[of], self.offsets[of] + begins, sizes, self.targets[of] + begins, self.room)

    def jobs(self, n_bytes: int) -> "list[Ranges]":
        """Divide them into parts of one file and about so many bytes, in their order."""
        if not len(self):
            return []
        whole = self.split(n_bytes)
        ends = np.cumsum(whole.sizes)
        # A job ends with its file, and where the bytes so far go beyond the next multiple.
        new = (np.diff(whole.numbers) != 0) | (np.diff((ends - 1) // n_bytes) != 0)
        edges = [0, *(np.flatnonzero(new) + 1).tolist(), len(whole)]
        return [whole.take(slice(start, stop)) for start, stop in pairwise(edges)]


_SEEKING = threading.Lock()


def read_file(descriptor: int, ranges: Ranges) -> bool:
    """Read ranges of one open file; return whether it has all of them."""
    where = c_int64()
    status = library().ra_read_file(
        descriptor, ranges.offsets, ranges.sizes, ranges.targets, len(ranges), ranges.room, ranges.room.size, where
    )
    if status == UNKNOWN_CALL:
        return _read_in_turn(descriptor, ranges)
    if status == REFUSED:
        raise OSError(where.value, os.strerror(where.value))
    if status not in (GOOD, CUT_SHORT):
        raise CorruptError(f"Range {where.value:,} of a file lies outside of what was made room for; report this.")
    return bool(status == GOOD)


def _read_in_turn(descriptor: int, ranges: Ranges) -> bool:
    """Read ranges where the system reads at the position of the file alone, which its threads share."""
    columns = (column.tolist() for column in (ranges.offsets, ranges.sizes, ranges.targets))
    with _SEEKING:
        for offset, size, target in zip(*columns, strict=True):
            os.lseek(descriptor, offset, os.SEEK_SET)
            done = 0
            while done < size:
                part = os.read(descriptor, size - done)
                if not part:
                    return False
                ranges.room[target + done : target + done + len(part)] = np.frombuffer(part, np.uint8)
                done += len(part)
    return True


@dataclass(frozen=True, eq=False)
class FileArray:
    """An array in a file, and how its bytes are read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # of what is read
    chunk_shape: tuple[int, ...]  # of what is stored in one piece: a chunk, or all of a contiguous array
    table: ChunkTable
    decoder: ChunkDecoder
    fill: NDArray[Any]  # 0-d: value of elements that are not stored
    # Reads ranges of bytes; the numbers are the files of all chunks that are used, also of those that were kept.
    fetch: Callable[[Ranges, Sequence[int]], None]
    fault: Callable[[int, str], Exception]  # takes the number of a chunk and what is wrong with it, returns the error
    kept: LRUCache[NDArray[Any]] | None = None  # where decoded chunks are kept of which a part was read
    key: Hashable = None  # of the array in this cache
    as_is: NDArray[np.bool_] | None = None  # (n,): which chunks are stored without what `decoder` reverses

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def n_across(self) -> int:
        """Chunks that the same rows are in; 1 where chunks hold whole rows."""
        return math.prod(self.grid[1:])

    @property
    def n_bytes(self) -> int:
        """Decoded bytes of a chunk."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def in_rows(self) -> bool:
        """Whether any rows can be read alone, without the chunk that they are in."""
        return self.decoder.is_plain and self.chunk_shape[1:] == self.shape[1:]

    def numbers(self, bands: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the chunks of some rows of the grid."""
        return (bands[:, None] * self.n_across + np.arange(self.n_across)).reshape(-1)


def read_pieces(array: FileArray, plan: ChunkPieces, out: NDArray[Any], threads: int) -> None:
    """Read pieces of an array.

    `plan` was made for the rows of its chunks. `out`, (n, *row_shape), is contiguous, of its dtype, and has at least
    one element. `threads` are those that decode.
    """
    if array.in_rows:
        _read_rows(array, plan, out)
        return
    step = max(1, WAVE_BYTES // (array.n_bytes * array.n_across))
    for start in range(0, plan.chunks.size, step):
        _read_chunks(array, plan, range(start, min(start + step, plan.chunks.size)), out, threads)


def _read_rows(array: FileArray, plan: ChunkPieces, out: NDArray[Any]) -> None:
    """Read the rows of chunks that are stored as they are, and nothing else of these chunks."""
    chunks = np.repeat(plan.chunks, np.diff(plan.bounds))
    table, width = array.table, out.nbytes // len(out)
    stored = table.sizes[chunks] >= 0
    for i in np.flatnonzero(~stored).tolist():
        out[plan.targets[i] : plan.targets[i] + plan.lengths[i]] = array.fill
    # In the order of the output, where what follows in the file as well is one range.
    order = np.flatnonzero(stored)[np.argsort(plan.targets[stored])]
    chunks, sources, starts = chunks[order], plan.sources[order], plan.targets[order]
    stops = starts + plan.lengths[order]
    numbers, offsets = table.objects[chunks], table.offsets[chunks] + sources * width
    new = (
        (numbers[1:] != numbers[:-1])
        | (offsets[1:] - offsets[:-1] != (stops - starts)[:-1] * width)
        | (starts[1:] != stops[:-1])
    )
    first = np.append(True, new)[: order.size]
    starts, stops = starts[first], stops[np.append(new, True)[: order.size]]
    room = out.reshape(-1).view(np.uint8)
    array.fetch(Ranges.of(numbers[first], offsets[first], (stops - starts) * width, starts * width, room), ())
    if array.decoder.swapped:
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            out[start:stop].byteswap(inplace=True)


def _read_chunks(array: FileArray, plan: ChunkPieces, bands: range, out: NDArray[Any], threads: int) -> None:
    """Decode chunks, all that the same rows are in, and place their pieces."""
    table, across, kept = array.table, array.n_across, array.kept
    chunks = array.numbers(plan.chunks[bands.start : bands.stop])
    objects, offsets, sizes = (item[chunks] for item in (table.objects, table.offsets, table.sizes))
    numbers, stored = chunks.tolist(), np.flatnonzero(sizes >= 0)
    held = [None if kept is None else kept.get((array.key, number)) for number in numbers]
    wanted = [i for i in stored.tolist() if held[i] is None]
    ends = np.cumsum(sizes[wanted]).tolist()
    buffer = shared_pool().take(ends[-1] if ends else 0, np.dtype(np.uint8))
    raw = {i: buffer[start:end] for i, (start, end) in zip(wanted, pairwise([0, *ends]), strict=True)}
    ranges = Ranges.of(
        objects[wanted], offsets[wanted], sizes[wanted], np.array(ends, np.int64) - sizes[wanted], buffer
    )
    array.fetch(ranges, np.unique(objects[stored]).tolist())
    # Lists, of which an item takes a fraction of the time that one of an array does.
    bounds = plan.bounds[bands.start : bands.stop + 1].tolist()
    low, high = bounds[0], bounds[-1]
    sources, lengths, targets = (item[low:high].tolist() for item in (plan.sources, plan.lengths, plan.targets))
    n_rows, grid, complete = array.chunk_shape[0], array.grid, array.chunk_shape[1:] == array.shape[1:]

    def decode(i: int, chunk: NDArray[Any]) -> None:
        as_is = array.as_is is not None and array.as_is[numbers[i]]
        try:
            (_AS_IS if as_is else array.decoder)(raw[i], chunk)
        except CorruptError as error:
            raise array.fault(numbers[i], str(error)) from error

    def place(i: int) -> None:
        band = i // across
        first, last = bounds[band] - low, bounds[band + 1] - low
        chunk = held[i]
        if chunk is None and i in raw:
            whole = last == first + 1 and lengths[first] == n_rows
            # Rows that are read whole are decoded where they belong, and not kept: who reads in order does not come back.
            if whole and complete:
                decode(i, out[targets[first] : targets[first] + n_rows])
                return
            chunk = np.empty(array.chunk_shape, array.dtype)
            decode(i, chunk)
            if not whole and kept is not None:
                kept.put((array.key, numbers[i]), chunk)
        spans, left = list[slice](), numbers[i] % across
        for n, width in zip(grid[:0:-1], array.chunk_shape[:0:-1], strict=True):
            left, corner = divmod(left, n)
            spans.insert(0, slice(corner * width, (corner + 1) * width))
        for piece in range(first, last):
            target = out[(slice(targets[piece], targets[piece] + lengths[piece]), *spans)]
            # The last chunks of an axis may be larger than what is left of it.
            inside = slice(sources[piece], sources[piece] + lengths[piece]), *map(slice, target.shape[1:])
            target[...] = array.fill if chunk is None else chunk[inside]

    def work(run: tuple[int, int]) -> None:
        for i in range(*run):
            place(i)

    n_tasks = 1
    if threads > 1:
        n_tasks = max(1, min(4 * threads, len(numbers), len(wanted) * array.n_bytes // _BYTES_PER_TASK))
    map_decode(work, list(pairwise([len(numbers) * task // n_tasks for task in range(n_tasks + 1)])))
