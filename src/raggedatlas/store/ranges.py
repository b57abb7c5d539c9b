"""Batched reads of stored arrays: many row ranges in one call, every touched chunk decoded once."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raggedatlas.errors import CorruptError, LimitError, SchemaError
from raggedatlas.store.arrays import ArraySpec
from raggedatlas.store.checksums import extend_checksum
from raggedatlas.store.codecs import ChunkDecoder
from raggedatlas.store.limits import product
from raggedatlas.store.location import Location
from raggedatlas.store.shards import Shard, fetch_chunks, fetch_index, map_shard, shard_key
from raggedatlas.store.threads import DECODE_THREADS, map_decode, map_requests

WAVE_BYTES = 64 * 2**20
_LARGE_BYTES = 256 * 2**20
_MOST_ZERO_RATIO = 2**16
_CHUNKS_PER_TASK = 8
_MOST_PROBLEMS = 20
_FAULTS = {
    1: "its crc32c does not match",
    2: "it does not have the size it should",
    3: "its frame does not decode",
}


@dataclass(frozen=True)
class ArrayReader:
    """Reads one stored array; frozen, picklable, usable from any thread. It holds no handle.

    Parameters
    ----------
    location : Location
        The Zarr store.
    spec : ArraySpec
        What is stored; nothing is requested to open it.
    threads : int
        Threads that decode, at most 4; the result does not depend on them.
    """

    location: Location
    spec: ArraySpec
    threads: int = DECODE_THREADS

    def __getstate__(self) -> dict[str, Any]:
        """Leave what was looked up behind when pickled: another process checks paths for itself."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @property
    def name(self) -> str:
        """Where the array lies, for messages."""
        return f"{self.location.uri}/{self.spec.path}"

    @cached_property
    def target(self) -> Location:
        """The array's own location."""
        return self.location.child(*self.spec.path.split("/"))

    @cached_property
    def folder(self) -> Path | None:
        """The local folder of the array after the symlink check; None for an object store."""
        return self.target.checked_path() if self.location.is_local else None

    @cached_property
    def decoder(self) -> ChunkDecoder | None:
        """How one chunk is decoded; None where zarr-python must do it."""
        return self.spec.decoder()

    def shard(self, number: int) -> Shard:
        """Look up one shard: memory-mapped where local, else its index alone.

        Raises
        ------
        CorruptError
            If it is missing or its index is wrong.
        """
        key = shard_key(self.spec.row_shape, number)
        if self.folder is not None:
            return map_shard(self.folder / key, self.spec.chunks_per_shard)
        return fetch_index(self.target, key, self.spec.chunks_per_shard)


@dataclass(frozen=True)
class _Plan:
    """Which chunks a read touches, ascending, and the pieces of each.

    `bounds` has one entry more than `chunks`; the other three describe pieces: first row inside the chunk, number of
    rows, first row in the output.
    """

    chunks: NDArray[np.int64]
    bounds: NDArray[np.int64]
    sources: NDArray[np.int64]
    lengths: NDArray[np.int64]
    targets: NDArray[np.int64]
    n_rows: int


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

    Parameters
    ----------
    reader : ArrayReader
        The array.
    starts, ends : (k,) integers
        Half-open ranges along the first axis; any order, may overlap, repeat or be empty.
    out : (n, *row_shape), optional
        Contiguous output of the array's dtype, n the sum of all lengths.

    Returns
    -------
    (n, *row_shape) of the array's dtype

    Raises
    ------
    CorruptError
        If a range lies outside the array, a shard is missing, or stored bytes are not what was written.
    LimitError
        If more is asked than the stored bytes can hold.
    SchemaError
        If `out` does not fit.
    """
    first = np.ascontiguousarray(starts, dtype=np.int64)
    last = np.ascontiguousarray(ends, dtype=np.int64)
    _check_bounds(reader, first, last)
    plan = _plan(first, last, reader.spec.chunk_shape[0])
    _refuse_hollow(reader, plan)
    shape = (plan.n_rows, *reader.spec.row_shape)
    if out is None:
        out = np.empty(shape, dtype=reader.spec.dtype)
    elif out.shape != shape or out.dtype != reader.spec.dtype or not out.flags.c_contiguous:
        raise SchemaError(
            f"{reader.name} is read into a contiguous {reader.spec.dtype} array of shape {shape}, got {out.shape}."
        )
    if out.size:
        step = max(1, WAVE_BYTES // _chunk_bytes(reader.spec))
        for start in range(0, plan.chunks.size, step):
            _read_wave(reader, plan, slice(start, start + step), out)
    return out


def read_rows(reader: ArrayReader, rows: ArrayLike, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Read rows in the order asked; rows may repeat. See `read_ranges` for the errors.

    Parameters
    ----------
    reader : ArrayReader
        The array.
    rows : (k,) integers
        Row numbers.
    out : (k, *row_shape), optional
        Contiguous output.

    Returns
    -------
    (k, *row_shape) of the array's dtype
    """
    first = np.ascontiguousarray(rows, dtype=np.int64)
    return read_ranges(reader, first, first + 1, out)


def read_slice(reader: ArrayReader, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Read the rows ``start`` to ``stop``. See `read_ranges` for the errors."""
    return read_ranges(reader, [start], [stop], out)


def verify(reader: ArrayReader) -> tuple[list[str], str | None]:
    """Read every chunk and check it; of an object store, past the disk cache.

    Returns
    -------
    problems : list of str
        At most 20 messages, one per bad chunk or shard; empty where all is well.
    checksum : str or None
        crc32c of the little-endian bytes of all values, as `ArrayWriter.checksum` gives it; None beside problems.
    """
    spec = reader.spec
    reader = replace(reader, location=reader.location.uncached())
    problems: list[str] = []
    crc = 0
    per_chunk = spec.chunk_shape[0]
    step = max(1, WAVE_BYTES // _chunk_bytes(spec)) * per_chunk
    for start in range(0, spec.n_rows, step):
        stop = min(start + step, spec.n_rows)
        try:
            crc = extend_checksum(crc, read_slice(reader, start, stop))
        except (CorruptError, LimitError):
            for row in range(start, stop, per_chunk):
                try:
                    read_slice(reader, row, min(row + per_chunk, stop))
                except (CorruptError, LimitError) as error:
                    if str(error) not in problems:
                        problems.append(str(error))
                if len(problems) >= _MOST_PROBLEMS:
                    return problems, None
    return problems, None if problems else f"{crc:08x}"


def _chunk_bytes(spec: ArraySpec) -> int:
    """Return the decoded bytes of one chunk (the full rows of one, where chunks are narrower)."""
    return max(1, spec.chunk_shape[0] * product(spec.row_shape) * np.dtype(spec.dtype).itemsize)


def _check_bounds(reader: ArrayReader, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """Refuse ranges that are none or lie outside the array."""
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


def _plan(starts: NDArray[np.int64], ends: NDArray[np.int64], chunk_rows: int) -> _Plan:
    """Cut ranges at chunk borders and sort the pieces by chunk."""
    from raggedatlas.store.chunks import split_ranges

    chunks, sources, lengths, targets = split_ranges(starts, ends, chunk_rows)
    if chunks.size and (chunks[1:] < chunks[:-1]).any():
        order = np.argsort(chunks, kind="stable")
        chunks, sources, lengths, targets = (item[order] for item in (chunks, sources, lengths, targets))
    new = np.flatnonzero(np.concatenate([[True], chunks[1:] != chunks[:-1]])) if chunks.size else chunks
    bounds = np.append(new, chunks.size).astype(np.int64)
    return _Plan(chunks[new], bounds, sources, lengths, targets, int((ends - starts).sum()))


def _refuse_hollow(reader: ArrayReader, plan: _Plan) -> None:
    """Before much memory is taken, see that the shards are there and can hold what is asked."""
    spec = reader.spec
    asked = plan.chunks.size * _chunk_bytes(spec)
    if asked <= _LARGE_BYTES or reader.decoder is None:
        return
    stored = sum(reader.shard(int(number)).size for number in np.unique(plan.chunks // spec.chunks_per_shard))
    if stored * _MOST_ZERO_RATIO < asked:
        raise LimitError(
            f"{reader.name} declares {spec.n_rows:,} rows; the {asked:,} bytes asked for cannot come from {stored:,} "
            "stored bytes. The array is damaged or made to exhaust memory."
        )


def _read_wave(reader: ArrayReader, plan: _Plan, wave: slice, out: NDArray[Any]) -> None:
    """Decode some chunks and place their pieces; the threads share the chunks in runs."""
    n = len(plan.chunks[wave])
    if reader.decoder is None:
        _decode_foreign(reader, plan, range(wave.start, wave.start + n), out)
        return
    frames = fetch_frames(reader, plan.chunks[wave])
    n_tasks = min(reader.threads, -(-n // _CHUNKS_PER_TASK))
    edges = [n * task // n_tasks for task in range(n_tasks + 1)]
    runs = list(pairwise(edges))

    def decode(run: tuple[int, int]) -> None:
        _decode_run(reader, plan, wave.start, frames, run, out=out)

    map_decode(decode, runs)


def fetch_frames(reader: ArrayReader, chunks: NDArray[np.int64]) -> Frames:
    """Find the stored bytes of chunks, (c,) ascending; where remote, near ones share a request."""
    shards = chunks // reader.spec.chunks_per_shard
    numbers = np.unique(shards)
    edges = np.searchsorted(shards, [*numbers.tolist(), numbers[-1] + 1])
    frames = Frames(np.zeros(chunks.size, np.uint64), np.zeros(chunks.size, np.int64), [])
    jobs = [(int(number), slice(edges[i], edges[i + 1])) for i, number in enumerate(numbers)]

    def fetch(job: tuple[int, slice]) -> None:
        number, part = job
        shard = reader.shard(number)
        index = shard.index[chunks[part] - number * reader.spec.chunks_per_shard]
        frames.sizes[part] = index[:, 1]
        if shard.data is not None:
            frames.owners.append(shard.data)
            frames.addresses[part] = index[:, 0].astype(np.uint64) + np.uint64(_address(shard.data))
            return
        stored = index[:, 1] >= 0
        data = fetch_chunks(reader.target, shard_key(reader.spec.row_shape, number), shard, index[stored])
        if [item.size for item in data] != index[stored, 1].tolist():
            raise CorruptError(f"{reader.name}: the store gave fewer bytes of shard {number} than its index names.")
        frames.owners.extend(data)
        frames.addresses[np.arange(part.start, part.stop)[stored]] = [_address(item) for item in data]

    if reader.folder is not None:
        for job in jobs:
            fetch(job)
    else:
        map_requests(fetch, jobs)
    return frames


def _address(data: NDArray[np.uint8]) -> int:
    """Return where the bytes of an array lie."""
    return int(data.__array_interface__["data"][0])


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """View a contiguous array as flat bytes, so that one compiled loop serves all element types."""
    return array.reshape(-1).view(np.uint8)


def is_packed(reader: ArrayReader) -> bool:
    """Tell whether an array is packed with checksums at most 4 bytes a value, so that kernels unpack it block by block."""
    known = reader.decoder
    small = np.dtype(reader.spec.dtype).itemsize <= 4 and len(reader.spec.shape) == 1
    return known is not None and known.compressor == "packed" and known.checksum and small


def _decode_run(
    reader: ArrayReader,
    plan: _Plan,
    offset: int,
    frames: Frames,
    run: tuple[int, int],
    *,
    out: NDArray[Any],
) -> None:
    """Decode one run of a wave's chunks in the calling thread."""
    from raggedatlas.store import chunks as kernels

    decoder, spec = reader.decoder, reader.spec
    scratch = np.empty(spec.chunk_shape, spec.dtype)
    fill = _bytes_of(np.full(spec.chunk_shape[1:], spec.fill()))
    native = kernels.native_functions()
    pieces = (plan.sources, plan.lengths, plan.targets)
    part = slice(run[0], run[1])
    bounds = plan.bounds[offset + run[0] : offset + run[1] + 1]
    if native is not None and is_packed(reader):
        from raggedatlas.store.unpacking import check_chunk, unpack_pieces, unpack_range

        plain = (frames.addresses[part], frames.sizes[part])
        functions = (native.crc32c, check_chunk.address, unpack_range.address)
        status, bad = unpack_pieces(plain, (bounds, *pieces), spec.chunk_shape[0], functions, out)
        if status != kernels.GOOD:
            raise bad_chunk(reader, int(plan.chunks[offset + run[0] + bad]), _FAULTS[status])
        return
    kinds = {"none": kernels.PLAIN, "blosc": kernels.BLOSC}
    if native is not None and decoder is not None and decoder.compressor in kinds and not decoder.delta:
        status, bad = kernels.decode_chunks(
            (frames.addresses[part], frames.sizes[part]),
            _bytes_of(scratch),
            fill,
            _bytes_of(out),
            (bounds, *pieces),
            (kinds[decoder.compressor], decoder.checksum, native.decompress, native.crc32c),
        )
        if status != kernels.GOOD:
            raise bad_chunk(reader, int(plan.chunks[offset + run[0] + bad]), _FAULTS[status])
        return
    for i in range(*run):
        try:
            _decode_one(decoder, frames, i, scratch, fill)
        except CorruptError as error:
            raise bad_chunk(reader, int(plan.chunks[offset + i]), str(error)) from error
        here = (int(plan.bounds[offset + i]), int(plan.bounds[offset + i + 1]))
        kernels.copy_ranges(_bytes_of(scratch), _bytes_of(out), pieces, here, fill.size)


def _decode_one(
    decoder: ChunkDecoder | None, frames: Frames, i: int, scratch: NDArray[Any], fill: NDArray[Any]
) -> None:
    """Decode one chunk through Python, for codecs that no kernel knows."""
    import ctypes

    size = int(frames.sizes[i])
    if size < 0 or decoder is None:
        _bytes_of(scratch).reshape(-1, fill.size)[:] = fill
        return
    raw = (ctypes.c_uint8 * size).from_address(int(frames.addresses[i]))
    decoder(memoryview(raw), scratch)


def _decode_foreign(reader: ArrayReader, plan: _Plan, chunks: range, out: NDArray[Any]) -> None:
    """Read chunks of an array that only zarr-python knows, and place their pieces."""
    from zarr import open_array

    from raggedatlas.store import chunks as kernels

    array = open_array(reader.location.zarr_store(), path=reader.spec.path, mode="r")
    rows = reader.spec.chunk_shape[0]
    width = _bytes_of(np.empty(reader.spec.row_shape, reader.spec.dtype)).size
    for i in chunks:
        start = int(plan.chunks[i]) * rows
        try:
            values = np.ascontiguousarray(array[start : start + rows], dtype=reader.spec.dtype)
        except (ValueError, RuntimeError, OSError) as error:
            raise bad_chunk(reader, int(plan.chunks[i]), str(error)) from error
        here = (int(plan.bounds[i]), int(plan.bounds[i + 1]))
        pieces = (plan.sources, plan.lengths, plan.targets)
        kernels.copy_ranges(_bytes_of(values), _bytes_of(out), pieces, here, width)


def bad_chunk(reader: ArrayReader, chunk: int, fault: str) -> CorruptError:
    """Name a bad chunk and the file it lies in."""
    spec = reader.spec
    rows = spec.chunk_shape[0]
    key = shard_key(spec.row_shape, chunk // spec.chunks_per_shard)
    span = f"rows {chunk * rows} to {min((chunk + 1) * rows, spec.n_rows)}"
    return CorruptError(
        f"Chunk {chunk} of {reader.name} ({span}, file {key}) is damaged: {fault}. "
        "Restore the file from a copy or drop the dataset and add it again."
    )


def iterate_slices(reader: ArrayReader, n_bytes: int = WAVE_BYTES) -> Iterator[NDArray[Any]]:
    """Read the whole array in pieces of whole chunks, each of about `n_bytes`."""
    spec = reader.spec
    step = max(1, n_bytes // _chunk_bytes(spec)) * spec.chunk_shape[0]
    for start in range(0, spec.n_rows, step):
        yield read_slice(reader, start, min(start + step, spec.n_rows))
