"""Batched reads of stored arrays: many row ranges in one call, every touched chunk decoded once, from mapped or remote shards."""

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raggedatlas.errors import CorruptError, LimitError, SchemaError, StaleSourceError, ValuesError
from raggedatlas.model.arrays import MAX_CHUNK_BYTES, ArraySpec
from raggedatlas.store.codecs import ChunkDecoder, array_decoder, extend_checksum
from raggedatlas.store.file_arrays import FileArray, read_pieces
from raggedatlas.store.linked import LinkedSource, check_sizes, damaged_chunk, open_linked
from raggedatlas.store.location import Location, list_files
from raggedatlas.store.native import (
    BLOSC,
    FAULTS,
    GOOD,
    I64,
    OTHER_FRAME,
    PACKED,
    PLAIN,
    U64,
    Chunks,
    Pieces,
    RaColumns,
    library,
)
from raggedatlas.store.runtime import DECODE_THREADS, map_decode, map_requests
from raggedatlas.store.shards import (
    SMALL_SHARD,
    WAVE_BYTES,
    ChunkPieces,
    Shard,
    fetch_chunks,
    fetch_index,
    fetch_part,
    fetch_shard,
    hash_shard,
    hash_shards,
    join_ranges,
    map_shard,
    plan_pieces,
    shard_key,
)
from raggedatlas.store.sparse import move_runs, scan_integers

_LARGE_BYTES = 256 * 2**20
_MOST_ZERO_RATIO = 2**16
_CHUNKS_PER_TASK = 8
_MOST_PROBLEMS = 20
_VALUES_AT_ONCE = 2**16
_COLUMN_ENTRIES = 2**22
"""Entries of the columns that are read at once to take some rows from them."""


@dataclass(frozen=True)
class ArrayReader:
    """Reads one stored array, without a handle or a request to open it; frozen, picklable, usable from any thread."""

    location: Location  # the Zarr store
    spec: ArraySpec
    threads: int = DECODE_THREADS  # that decode, at most 4; the result does not depend on them
    # crc32c of all values as recorded when they were written, compared by `read_all`; empty where it is not known
    checksum: str = ""
    source: LinkedSource | None = None  # the file that a linked array is in; None for arrays of the store

    def __getstate__(self) -> dict[str, Any]:
        """Leave what was looked up behind when pickled: another process checks paths for itself."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @property
    def name(self) -> str:
        """Address of the array, for messages."""
        if self.source is not None and self.spec.linked is not None:
            return self.source.name_array(self.spec.linked.array)
        return f"{self.location.uri}/{self.spec.path}"

    @property
    def remedy(self) -> str:
        """What to do where stored bytes are damaged, as a sentence."""
        if self.source is not None:
            return self.source.remedy
        return "Restore the array from a copy, or drop the dataset and add it again."

    @cached_property
    def target(self) -> Location:
        """The array's own location."""
        return self.location.child(*self.spec.path.split("/"))

    @cached_property
    def folder(self) -> Path | None:
        """The local folder of the array after the symlink check; None for an object store."""
        return self.target.checked_path() if self.location.is_local else None

    @cached_property
    def bundle(self) -> Path | None:
        """The local file that the array's shard is part of, after the symlink check."""
        within = self.spec.within
        if within is None or not self.location.is_local:
            return None
        return self.location.child(*within.file.split("/")).checked_path()

    @cached_property
    def decoder(self) -> ChunkDecoder | None:
        """How one chunk is decoded; None where zarr-python must do it."""
        return array_decoder(self.spec)

    def file(self, number: int) -> tuple[Location, str]:
        """Return where the file is that a shard is or is part of."""
        within = self.spec.within
        return (self.target, shard_key(self.spec.row_shape, number)) if within is None else (self.location, within.file)

    def shard(self, number: int, n_wanted: int = 0) -> Shard:
        """Look up one shard: memory-mapped where local, else only its index.

        A remote shard that is part of a file comes as a whole where `n_wanted`, the number of its chunks that will be
        read, is at least half of them, unless there is a disk cache, which keeps chunks.
        """
        n_chunks, within = self.spec.chunks_per_shard, self.spec.within
        if self.bundle is not None:
            return map_shard(self.bundle, n_chunks, within=self.bundle.parent, span=within)
        if self.folder is not None:
            return map_shard(self.folder / shard_key(self.spec.row_shape, number), n_chunks, within=self.folder)
        # A disk cache keeps chunks.
        most = 2 * n_wanted >= n_chunks and self.location.disk_cache is None
        if within is not None and most and within.n_bytes > SMALL_SHARD:
            return fetch_part(self.location, within, n_chunks)
        return fetch_index(*self.file(number), n_chunks, within)


@dataclass(frozen=True)
class TransposedReader(ArrayReader):
    """Reads entries row by row, columns ascending, from arrays that have them column by column; each read reads all of these."""

    row_bounds: ArrayReader = field(kw_only=True)  # of the entries of the rows (``csr/indptr``)
    column_bounds: ArrayReader = field(kw_only=True)  # of the entries of the columns (``csc/indptr``)
    rows: ArrayReader = field(kw_only=True)  # row of every entry (``csc/indices``)
    # Values in the same order; None where the columns of the entries are read
    values: ArrayReader | None = field(kw_only=True, default=None)

    @classmethod
    def of(
        cls,
        path: str,
        row_bounds: ArrayReader,
        column_bounds: ArrayReader,
        rows: ArrayReader,
        values: ArrayReader | None = None,
    ) -> "TransposedReader":
        """Make one that stands for the array at a path, which is not stored."""
        n, dtype = rows.spec.n_rows, np.dtype(np.uint32) if values is None else np.dtype(values.spec.dtype)
        # One chunk, as far as a chunk may be large: what a read of a few entries decodes.
        chunk = max(1, min(n, MAX_CHUNK_BYTES // dtype.itemsize))
        spec = ArraySpec(path, (n,), dtype.name, (chunk,), None, "[]")
        return cls(
            rows.location, spec, source=rows.source,
            row_bounds=row_bounds, column_bounds=column_bounds, rows=rows, values=values,
        )  # fmt: skip


@dataclass(frozen=True)
class Frames:
    """The stored bytes of some chunks: addresses and sizes (-1: not stored), and what keeps them alive."""

    addresses: NDArray[np.uint64]
    sizes: NDArray[np.int64]
    owners: list[Any]


def read_ranges(
    reader: ArrayReader, starts: ArrayLike, ends: ArrayLike, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Read many row ranges and join them in the order asked.

    `starts` and `ends`, (k,), are half-open ranges along the first axis; they may be in any order, overlap, repeat or
    be empty. The result is (n, *row_shape), n the sum of all lengths; `out` is a contiguous array of this shape and of
    the array's dtype.

    Raises `CorruptError` if a range is outside the array, a shard is missing or stored bytes are damaged; `LimitError`
    if more is asked than the stored bytes can hold; `StaleSourceError` if a linked file is not the one that was linked;
    and `ValuesError` if values of a linked file, of which only a sample was looked at, are no counts.
    """
    first = np.ascontiguousarray(starts, dtype=np.int64)
    last = np.ascontiguousarray(ends, dtype=np.int64)
    _check_bounds(reader, first, last)
    if isinstance(reader, TransposedReader):
        return _read_from_columns(reader, first, last, out)
    if reader.spec.is_columns or (reader.spec.linked is not None and reader.spec.linked.matrix is not None):
        return _read_complete_rows(reader, first, last, out)
    linked = _linked_array(reader)
    if linked is not None:
        first, last = join_ranges(first, last)
    plan = plan_pieces(first, last, (linked or reader.spec).chunk_shape[0])
    _refuse_hollow(reader, plan, linked)
    shape = (plan.n_rows, *reader.spec.row_shape)
    if out is None:
        out = np.empty(shape, dtype=reader.spec.dtype)
    elif out.shape != shape or out.dtype != reader.spec.dtype or not out.flags.c_contiguous:
        raise SchemaError(
            f"{reader.name} is read into a contiguous {reader.spec.dtype} array of shape {shape}, got {out.shape}."
        )
    if out.size and linked is not None:
        read_pieces(linked, plan, out, reader.threads)
    elif out.size:
        step = max(1, WAVE_BYTES // _chunk_bytes(reader.spec))
        for start in range(0, plan.chunks.size, step):
            _read_wave(reader, plan, slice(start, start + step), out)
    if reader.spec.linked is not None and reader.spec.linked.sampled:
        _refuse_other_than_counts(reader, out)
    return out


def read_rows(reader: ArrayReader, rows: ArrayLike, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Read rows, given by their numbers, in the order asked; rows may repeat. See `read_ranges` for `out` and the errors."""
    first = np.ascontiguousarray(rows, dtype=np.int64)
    return read_ranges(reader, first, first + 1, out)


def read_slice(reader: ArrayReader, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Read the rows ``start`` to ``stop``. See `read_ranges` for the errors."""
    return read_ranges(reader, [start], [stop], out)


def read_all(reader: ArrayReader) -> NDArray[Any]:
    """Read an entire array and compare its checksum, where the reader has one. See `read_ranges` for the other errors."""
    values = read_slice(reader, 0, reader.spec.n_rows)
    if reader.checksum and (found := f"{extend_checksum(0, values):08x}") != reader.checksum:
        raise CorruptError(
            f"The values of {reader.name} have the checksum {found}, {reader.checksum} was written. {reader.remedy}"
        )
    return values


def read_bounds(reader: ArrayReader, n_rows: int, n_entries: int) -> NDArray[np.int64]:
    """Read the bounds of sparse rows or columns (an ``indptr``) and check them: kernels index memory by these numbers.

    The result, (n_rows + 1,), ascends from 0 to `n_entries`; `n_rows` is the number of rows or columns. Anything else
    is a `CorruptError`; see `read_ranges` for the other errors.
    """
    spec = reader.spec
    if spec.shape != (n_rows + 1,) or np.dtype(spec.dtype).kind not in "iu":
        raise CorruptError(
            f"{reader.name} has shape {spec.shape} and dtype {spec.dtype}; the bounds of {n_rows:,} rows are {n_rows + 1:,} "
            f"integers. {reader.remedy}"
        )
    bounds: NDArray[np.int64] = read_all(reader).astype(np.int64, copy=False)
    # Numbers of uint64 from 2**63 on are negative by now, so this comparison finds them too.
    down = np.flatnonzero(bounds[1:] < bounds[:-1])
    if bounds[0] != 0 or bounds[-1] != n_entries or len(down):
        where = f"go down after row {int(down[0]):,}" if len(down) else f"go from {bounds[0]:,} to {bounds[-1]:,}"
        raise CorruptError(
            f"The bounds in {reader.name} {where}; they must ascend from 0 to {n_entries:,}. {reader.remedy}"
        )
    return bounds


class Verified(NamedTuple):
    """What `verify` found."""

    problems: list[str]  # at most 20 messages, one per bad chunk or shard; empty where all is well
    # crc32c of the little-endian bytes of all values, as in `ArrayWriter.checksum`; None if there are problems
    checksum: str | None
    # `hash_shards` of the bytes read; None if there are problems, zarr-python read them, or the array is linked
    shards: str | None


class _WholeReader(ArrayReader):
    """Reads shards whole, and hashes the bytes that it decodes."""

    @cached_property
    def hashed(self) -> dict[int, bytes]:
        """Number of each shard that was read -> its length and hash."""
        return {}

    @cached_property
    def held(self) -> dict[int, Shard]:
        """The remote shards of the rows that are read."""
        return {}

    def shard(self, number: int, n_wanted: int = 0) -> Shard:
        """Look up one shard and all its bytes."""
        if self.location.is_local:
            shard = super().shard(number)
        elif number in self.held:
            shard = self.held[number]
        else:
            fetched = fetch_shard(*self.file(number), self.spec.chunks_per_shard, self.spec.within)
            shard = self.held[number] = fetched
        if number not in self.hashed and shard.data is not None:
            self.hashed[number] = hash_shard([shard.data.data])
        return shard

    def release(self, row: int) -> None:
        """Forget the shards that end before a row."""
        first = row // self.spec.chunk_shape[0] // self.spec.chunks_per_shard
        for number in [number for number in self.held if number < first]:
            del self.held[number]


def verify(reader: ArrayReader) -> Verified:
    """Read every shard whole and check every chunk; of an object store, past all caches."""
    spec = reader.spec
    reader = _WholeReader(reader.location.uncached(), spec, reader.threads, source=reader.source)
    problems: list[str] = []
    crc = 0
    per_chunk = spec.chunk_shape[0]
    step = max(1, WAVE_BYTES // _chunk_bytes(spec)) * per_chunk
    for start in range(0, spec.n_rows, step):
        stop = min(start + step, spec.n_rows)
        reader.release(start)
        try:
            crc = extend_checksum(crc, read_slice(reader, start, stop))
        except StaleSourceError as error:
            return Verified([str(error)], None, None)
        except (CorruptError, LimitError, ValuesError):
            for row in range(start, stop, per_chunk):
                try:
                    read_slice(reader, row, min(row + per_chunk, stop))
                except (CorruptError, LimitError, ValuesError) as error:
                    if str(error) not in problems:
                        problems.append(str(error))
                if len(problems) >= _MOST_PROBLEMS:
                    return Verified(problems, None, None)
    if problems:
        return Verified(problems, None, None)
    has_shards = reader.decoder is not None and reader.source is None
    return Verified([], f"{crc:08x}", hash_shards(reader.hashed) if has_shards else None)


def _chunk_bytes(spec: ArraySpec) -> int:
    """Return the decoded bytes of one chunk (the full rows of one, where chunks are narrower)."""
    return max(1, spec.chunk_shape[0] * math.prod(spec.row_shape) * np.dtype(spec.dtype).itemsize)


def _check_bounds(reader: ArrayReader, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """Refuse invalid ranges and ranges outside the array."""
    if starts.ndim != 1 or starts.shape != ends.shape:
        raise SchemaError(
            f"{reader.name} is read by two equally long lists, got shapes {starts.shape} and {ends.shape}."
        )
    bad = (starts < 0) | (ends < starts) | (ends > reader.spec.n_rows)
    if bad.any():
        i = int(np.argmax(bad))
        raise CorruptError(
            f"Range {i} is [{starts[i]}, {ends[i]}); {reader.name} has {reader.spec.n_rows} rows. "
            "The pointer that led here does not belong to this array; run validate()."
        )


def _linked_array(reader: ArrayReader) -> FileArray | None:
    """Return the chunks of a linked array, None for others."""
    if reader.source is None:
        return None
    array = open_linked(reader.location, reader.spec, reader.source, reader.decoder)
    # Who reads an array whole decodes each chunk anew.
    return replace(array, kept=None) if isinstance(reader, _WholeReader) else array


class LinkedCost(NamedTuple):
    """What a read of a linked array takes."""

    n_chunks: int  # chunks that it touches
    n_fetched: int  # stored bytes that it fetches
    n_used: int  # bytes of the values that are asked for


def linked_cost(reader: ArrayReader, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> LinkedCost:
    """Estimate what a read of ranges, as of `read_ranges`, takes, from the references alone; the file is not looked at."""
    spec, link = reader.spec, reader.spec.linked
    if isinstance(reader, TransposedReader):
        every = np.zeros(1, np.int64), np.array([spec.n_rows])
        read = [linked_cost(part, *every) for part in (reader.rows, reader.values) if part is not None]
        n_used = int((ends - starts).sum()) * np.dtype(spec.dtype).itemsize
        return LinkedCost(sum(cost.n_chunks for cost in read), sum(cost.n_fetched for cost in read), n_used)
    if link is not None and link.matrix is not None and link.chunks is not None:
        width = link.matrix[1]
        spec = replace(spec, shape=link.matrix, chunk_shape=link.chunks, linked=replace(link, matrix=None, chunks=None))
        return linked_cost(replace(reader, spec=spec), starts // width, -(-ends // width))
    array = _linked_array(reader)
    if array is None:
        return LinkedCost(0, 0, 0)
    n_used = int((ends - starts).sum()) * array.dtype.itemsize * math.prod(spec.row_shape)
    bands = plan_pieces(starts, ends, array.chunk_shape[0]).chunks
    if array.in_rows:
        return LinkedCost(len(bands), n_used, n_used)
    sizes = array.table.sizes[array.numbers(bands)]
    return LinkedCost(len(sizes), int(sizes[sizes > 0].sum()), n_used)


def _refuse_hollow(reader: ArrayReader, plan: ChunkPieces, linked: FileArray | None) -> None:
    """Check, before large allocations, that the stored bytes exist and can hold the requested rows."""
    spec = reader.spec
    n_bytes = plan.chunks.size * (linked.n_bytes * linked.n_across if linked is not None else _chunk_bytes(spec))
    if linked is not None:
        assert reader.source is not None
        check_sizes(reader.source, linked, reader.name, linked.numbers(plan.chunks))
    if n_bytes <= _LARGE_BYTES or reader.decoder is None:
        return
    # Even a chunk that is not stored has 16 bytes in its shard's index, which bounds the ratio of usual arrays.
    if linked is not None:
        stored = int(np.maximum(linked.table.sizes[linked.numbers(plan.chunks)], 16).sum())
    else:
        numbers = np.unique(plan.chunks // spec.chunks_per_shard).tolist()
        shards = map(reader.shard, numbers) if reader.folder is not None else map_requests(reader.shard, numbers)
        stored = sum(shard.size for shard in shards)
    if stored * _MOST_ZERO_RATIO < n_bytes:
        raise LimitError(
            f"{reader.name} declares {spec.n_rows:,} rows; the {n_bytes:,} bytes asked for cannot come from {stored:,} "
            "stored bytes. The array is damaged or made to exhaust memory."
        )


def _read_wave(reader: ArrayReader, plan: ChunkPieces, wave: slice, out: NDArray[Any]) -> None:
    """Decode some chunks and place their pieces; the threads share the chunks in runs."""
    n, decoder, spec = len(plan.chunks[wave]), reader.decoder, reader.spec
    if decoder is None:
        _decode_foreign(reader, plan, range(wave.start, wave.start + n), out)
        return
    frames = fetch_frames(reader, plan.chunks[wave])
    n_tasks = min(reader.threads, -(-n // _CHUNKS_PER_TASK))
    edges = [n * task // n_tasks for task in range(n_tasks + 1)]
    kind = native_kind(reader)

    def decode(run: tuple[int, int]) -> None:
        target = _Target(plan, np.empty(spec.chunk_shape, spec.dtype), np.full(spec.chunk_shape[1:], spec.fill()), out)
        i, stop = run
        while i < stop:
            if kind is not None:
                # `frames` counts from the start of the wave, the plan from the first chunk of the read.
                stored = frames.addresses[i:stop], frames.sizes[i:stop]
                status, n_placed = target.place(*stored, wave.start + i, kind=kind, checksum=decoder.checksum)
                i += n_placed
                if status == GOOD:
                    return
                # Blosc with another compressor than LZ4: numcodecs decodes this chunk, and the library goes on after it.
                if status != OTHER_FRAME:
                    raise bad_chunk(reader, int(plan.chunks[wave.start + i]), FAULTS[status])
            size = int(frames.sizes[i])
            try:
                if size < 0:
                    target.scratch[:] = target.fill
                else:
                    raw = (ctypes.c_uint8 * size).from_address(int(frames.addresses[i]))
                    decoder(memoryview(raw), target.scratch)
            except CorruptError as error:
                raise bad_chunk(reader, int(plan.chunks[wave.start + i]), str(error)) from error
            target.place_scratch(wave.start + i)
            i += 1

    map_decode(decode, list(pairwise(edges)))


def _read_complete_rows(
    reader: ArrayReader, starts: NDArray[np.int64], ends: NDArray[np.int64], out: NDArray[Any] | None
) -> NDArray[Any]:
    """Read entries of a matrix that has one in every column of every row: its columns, or the values of a dense array."""
    spec = reader.spec
    link = spec.linked
    width = spec.chunk_shape[0] if link is None or link.matrix is None else link.matrix[1]
    some = starts < ends
    starts, ends = starts[some], ends[some]
    first, last = starts // width, -(-ends // width)
    lengths = (last - first) * width
    if link is None or link.matrix is None or link.chunks is None:
        values = np.tile(np.arange(width, dtype=spec.dtype), int((last - first).sum()))
    else:
        rows = replace(spec, shape=link.matrix, chunk_shape=link.chunks, linked=replace(link, matrix=None, chunks=None))
        values = read_ranges(replace(reader, spec=rows), first, last).reshape(-1)
    if int(lengths.sum()) != int((ends - starts).sum()):
        # Parts of rows, as a walk over all entries in steps has them.
        places = np.cumsum(lengths) - lengths + starts - first * width
        bounds = zip(places.tolist(), (places + ends - starts).tolist(), strict=True)
        values = np.concatenate([values[:0], *(values[start:stop] for start, stop in bounds)])
    if out is None:
        return values
    if out.shape != values.shape or out.dtype != values.dtype:
        raise SchemaError(f"{reader.name} is read into a {spec.dtype} array of shape {values.shape}, got {out.shape}.")
    out[:] = values
    return out


def _read_from_columns(
    reader: TransposedReader, starts: NDArray[np.int64], ends: NDArray[np.int64], out: NDArray[Any] | None
) -> NDArray[Any]:
    """Read entries row by row from arrays that have them column by column, in one walk over all columns."""
    n_rows, n_columns = (bounds.spec.n_rows - 1 for bounds in (reader.row_bounds, reader.column_bounds))
    n_entries, dtype = reader.spec.n_rows, np.dtype(reader.spec.dtype)
    of_rows = read_bounds(reader.row_bounds, n_rows, n_entries)
    of_columns = read_bounds(reader.column_bounds, n_columns, n_entries)
    some = starts < ends
    starts, ends = starts[some], ends[some]
    # Complete rows are assembled for all that the ranges touch; the ranges are copied out of these at the end.
    first = np.searchsorted(of_rows, starts, side="right") - 1
    touched = np.zeros(n_rows + 1, np.int64)
    np.add.at(touched, first, 1)
    np.add.at(touched, np.searchsorted(of_rows, ends, side="left"), -1)
    rows = np.flatnonzero(np.cumsum(touched)[:-1])
    slots = np.full(n_rows, -1, np.int32)
    slots[rows] = np.arange(len(rows), dtype=np.int32)
    after = np.cumsum(np.diff(of_rows)[rows])
    at = after - np.diff(of_rows)[rows]
    n, cursor, counts = int(after[-1]) if len(after) else 0, at.copy(), np.zeros(len(rows) + 1, np.int64)
    columns, values = np.empty(n, np.int32), np.empty(n, np.uint8 if reader.values is None else dtype)
    low = 0
    while low < n_columns and n:
        most = int(of_columns[low]) + _COLUMN_ENTRIES
        high = max(low + 1, int(np.searchsorted(of_columns, most, side="right")) - 1)
        begin, end = int(of_columns[low]), int(of_columns[high])
        stored = read_slice(reader.rows, begin, end)
        given = np.zeros(end - begin, np.uint8) if reader.values is None else read_slice(reader.values, begin, end)
        places, own, numbers = np.empty(end - begin, np.int32), of_columns[low : high + 1] - begin, np.arange(low, high)
        of = RaColumns(I64.address(own), I64.address(numbers), high - low, end - begin)
        last = np.zeros(len(rows), np.int32)
        fault = library().ra_count_places(
            stored, stored.size, stored.itemsize, slots, n_rows, counts, len(rows), places
        ) or library().ra_fill_places(
            ctypes.byref(of), places, given, given.itemsize, cursor, last, len(rows), columns, 0, values, n
        )  # fmt: skip
        if fault:
            raise CorruptError(
                f"Columns {low:,} to {high:,} of {reader.rows.name} name a row twice, or one that the matrix does not have. {reader.remedy}"
            )
        low = high
    if not np.array_equal(cursor, after):
        raise CorruptError(f"{reader.rows.name} has other rows than when they were counted. {reader.remedy}")
    assembled = columns.view(np.uint32) if reader.values is None else values
    lengths = ends - starts
    if out is None:
        out = np.empty(int(lengths.sum()), dtype)
    elif out.shape != (int(lengths.sum()),) or out.dtype != dtype or not out.flags.c_contiguous:
        raise SchemaError(f"{reader.name} is read into a contiguous {dtype} array of {int(lengths.sum()):,} entries.")
    move_runs(assembled, at[slots[first]] + starts - of_rows[first], lengths, np.cumsum(lengths) - lengths, out)
    return out


def _refuse_other_than_counts(reader: ArrayReader, values: NDArray[Any]) -> None:
    """Refuse values that are no counts, of a file of which only a sample was looked at."""
    flat, bad = values.reshape(-1), False
    if flat.size and flat.dtype in (np.float32, np.float64):
        smallest, _, whole = scan_integers(flat)
        if whole and smallest >= 0:
            return
    for start in range(0, flat.size, _VALUES_AT_ONCE):
        some = flat[start : start + _VALUES_AT_ONCE]
        with np.errstate(invalid="ignore"):
            whole = some.dtype.kind in "biu" or bool(((some == np.rint(some)) & (some < np.inf)).all())
            bad = bad or not whole or bool((some < 0).any())
    if bad:
        raise ValuesError(
            f"{reader.name} holds values that are no counts (whole numbers, not negative), although those looked at when it was linked "
            "were. Drop the dataset, and add the file with copy=True, which looks at all values, or name its matrices with layers={...}."
        )


def fetch_frames(reader: ArrayReader, chunks: NDArray[np.int64]) -> Frames:
    """Find the stored bytes of chunks, (c,) ascending; where remote, near ones share a request."""
    shards = chunks // reader.spec.chunks_per_shard
    numbers = np.unique(shards)
    # `numbers` is not empty: callers skip reads that touch no chunk.
    edges = np.searchsorted(shards, [*numbers.tolist(), numbers[-1] + 1])
    frames = Frames(np.zeros(chunks.size, np.uint64), np.zeros(chunks.size, np.int64), [])

    # Threads write to slices of their own; `owners` is shared, and appending to a list is atomic.
    def fetch(i: int) -> None:
        number, part = int(numbers[i]), slice(edges[i], edges[i + 1])
        shard = reader.shard(number, len(chunks[part]))
        index = shard.index[chunks[part] - number * reader.spec.chunks_per_shard]
        frames.sizes[part] = index[:, 1]
        if shard.data is not None:
            frames.owners.append(shard.data)
            frames.addresses[part] = index[:, 0].astype(np.uint64) + np.uint64(_address(shard.data))
            return
        stored = index[:, 1] >= 0
        data = fetch_chunks(*reader.file(number), shard, index[stored], reader.spec.within)
        # Compiled code trusts these sizes, so a response that ends early must not get there.
        if [item.size for item in data] != index[stored, 1].tolist():
            raise CorruptError(f"{reader.name}: the store gave fewer bytes of shard {number} than its index names.")
        frames.owners.extend(data)
        frames.addresses[np.arange(part.start, part.stop)[stored]] = [_address(item) for item in data]

    if reader.folder is not None:
        for i in range(len(numbers)):
            fetch(i)
    else:
        map_requests(fetch, range(len(numbers)))
    return frames


def _address(data: NDArray[np.uint8]) -> int:
    """Return the memory address of an array."""
    return int(data.__array_interface__["data"][0])


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """View a contiguous array as flat bytes, so that one compiled loop serves all element types."""
    return array.reshape(-1).view(np.uint8)


def is_packed(reader: ArrayReader) -> bool:
    """Return whether kernels can unpack an array block by block: packed, with checksums, at most 4 bytes per value."""
    decoder = reader.decoder
    # `ra_unpack_chunks` takes values of 1, 2 or 4 bytes and expects a crc32c after each chunk.
    small = np.dtype(reader.spec.dtype).itemsize <= 4 and len(reader.spec.shape) == 1 and reader.spec.linked is None
    return decoder is not None and decoder.compressor == "packed" and decoder.checksum and small


def native_kind(reader: ArrayReader) -> int | None:
    """Return the kind by which the library decodes an array's chunks; None where Python must, and for linked arrays."""
    decoder = reader.decoder
    if decoder is None or decoder.delta or not decoder.compiled or reader.spec.linked is not None:
        return None
    return PACKED if is_packed(reader) else {"none": PLAIN, "blosc": BLOSC}.get(decoder.compressor)


@dataclass(frozen=True)
class _Target:
    """Where the pieces of a plan go, and the room of one thread."""

    plan: ChunkPieces
    scratch: NDArray[Any]  # room for a decoded chunk
    fill: NDArray[Any]  # one row of fill values
    out: NDArray[Any]

    @cached_property
    def work(self) -> NDArray[np.uint8]:
        """Room for another decoded chunk."""
        return np.empty(self.scratch.nbytes, np.uint8)

    def place_scratch(self, at: int) -> None:
        """Place the pieces of chunk `at` of the plan, which is decoded in `scratch`."""
        stored = np.array([_address(self.scratch)], np.uint64), np.array([self.scratch.nbytes])
        # What is copied from and to must not overlap.
        _Target(self.plan, self.work, self.fill, self.out).place(*stored, at, kind=PLAIN, checksum=False)

    def place(
        self, addresses: NDArray[np.uint64], sizes: NDArray[np.int64], at: int, *, kind: int, checksum: bool
    ) -> tuple[int, int]:
        """Decode the plan's chunks from `at` on and place their pieces; return a status and how many chunks were good."""
        plan, where = self.plan, ctypes.c_int64(0)
        bounds = plan.bounds[at : at + sizes.size + 1]
        chunks = Chunks(U64.address(addresses), I64.address(sizes), sizes.size)
        parts = (bounds, plan.sources, plan.lengths, plan.targets)
        pieces = Pieces(*(I64.address(part) for part in parts), plan.sources.size)
        if kind == PACKED:
            one = self.scratch.size, self.scratch.itemsize
            status = library().ra_unpack_chunks(chunks, pieces, *one, self.out, self.out.size, where)
        else:
            status = library().ra_decode_chunks(
                chunks, pieces, kind, checksum, self.scratch.nbytes, _bytes_of(self.scratch), self.work,
                _bytes_of(self.fill), self.fill.nbytes, _bytes_of(self.out), self.out.nbytes, where,
            )  # fmt: skip
        return status, sizes.size if status == GOOD else where.value


def _decode_foreign(reader: ArrayReader, plan: ChunkPieces, chunks: range, out: NDArray[Any]) -> None:
    """Read chunks of an array that only zarr-python knows, and place their pieces."""
    from zarr import open_array

    from raggedatlas.store.untrusted import zarr_errors

    if reader.location.is_local:
        list_files(reader.target)  # refuses symlinks, which zarr-python follows
    with zarr_errors(reader.name):
        array = open_array(reader.location.zarr_store(), path=reader.spec.path, mode="r")
    spec = reader.spec
    rows = spec.chunk_shape[0]
    # Whole rows are read, also where the chunks are narrower.
    scratch = np.empty((rows, *spec.row_shape), spec.dtype)
    target = _Target(plan, scratch, np.zeros(spec.row_shape, spec.dtype), out)
    for i in chunks:
        start = int(plan.chunks[i]) * rows
        try:
            values = np.ascontiguousarray(array[start : start + rows], dtype=spec.dtype)
        except (ValueError, RuntimeError, OSError) as error:
            raise bad_chunk(reader, int(plan.chunks[i]), str(error)) from error
        scratch[: len(values)] = values
        target.place_scratch(i)


def bad_chunk(reader: ArrayReader, chunk: int, fault: str) -> CorruptError:
    """Return the error of a damaged chunk, with its file."""
    spec = reader.spec
    rows = spec.chunk_shape[0]
    if reader.source is not None and spec.linked is not None:
        return damaged_chunk(reader.source, spec.linked.array, chunk, fault)
    key = shard_key(spec.row_shape, chunk // spec.chunks_per_shard)
    span = f"rows {chunk * rows} to {min((chunk + 1) * rows, spec.n_rows)}"
    return CorruptError(
        f"Chunk {chunk} of {reader.name} ({span}, file {key}) is damaged: {fault}. "
        "Restore the file from a copy or drop the dataset and add it again."
    )


def iterate_slices(reader: ArrayReader, n_bytes: int = WAVE_BYTES) -> Iterator[NDArray[Any]]:
    """Iterate over the array in slices of full chunks, each of about `n_bytes`."""
    spec = reader.spec
    step = max(1, n_bytes // _chunk_bytes(spec)) * spec.chunk_shape[0]
    for start in range(0, spec.n_rows, step):
        yield read_slice(reader, start, min(start + step, spec.n_rows))
