"""The long campaign behind the short one in tests/store/test_packed.py: damaged packed chunks by the million.

``python scripts/fuzz_packed.py --chunks 1000000 --seed 0`` ends with 0 when every damaged chunk was refused, or unpacked alike by
all the ways there are: whole, in ranges, and gathered by rows through a map of columns. Chunks lie against a page that may not be
read, outputs between guards, and what is left unwritten shows because each output is filled in two ways. Whatever goes wrong is
named with the group to repeat: ``--seed 0 --first 1234 --chunks 100``.
"""

import argparse
import ctypes
import faulthandler
import mmap
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.store.arrays import ArraySpec, ArrayWriter
from raggedatlas.store.codecs import decode_packed
from raggedatlas.store.gather import RowGatherer, RowGroup
from raggedatlas.store.location import Location
from raggedatlas.store.native import library
from raggedatlas.store.packing import encode_packed
from raggedatlas.store.ranges import ArrayReader, read_ranges
from raggedatlas.store.rings import BufferRing
from raggedatlas.store.runs import ChunkRun
from raggedatlas.store.shards import compose_shard

GROUP = 100
"""Damaged chunks made of one sound chunk; they lie in one stored shard."""
GUARD = 512
FILLS = (173, 86)
DTYPES = ("u1", "u2", "u4", "u8")
KEPT_SHARES = (1.0, 0.7, 0.02)
"""Of the columns; a gather has a loop of its own for where all, many or few of them are kept."""
SEARCHED = 32
_LARGEST_MAP = 5000


class Fence:
    """Memory that ends at a page which may not be read: a load beyond it ends the process."""

    def __init__(self, n_bytes: int) -> None:
        page = mmap.PAGESIZE
        self.n_bytes = -(-n_bytes // page) * page
        self.memory = np.frombuffer(mmap.mmap(-1, self.n_bytes + page), np.uint8)
        beyond = ctypes.c_void_p(self.memory.ctypes.data + self.n_bytes)
        if ctypes.CDLL(None, use_errno=True).mprotect(beyond, ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Copy bytes to where their end is the fence."""
        self.memory[self.n_bytes - raw.size : self.n_bytes] = raw
        return self.memory[self.n_bytes - raw.size : self.n_bytes]


class GuardedRing(BufferRing):
    """Gives outputs that lie between guards."""

    def __init__(self, fill: int) -> None:
        super().__init__(0)
        self.fill = fill
        self.rooms: list[NDArray[Any]] = []

    def take(self, n: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a filled (n,) array between guards."""
        self.rooms.append(np.full((n + 2 * GUARD) * dtype.itemsize, self.fill, np.uint8).view(dtype))
        return self.rooms[-1][GUARD : GUARD + n]

    def is_touched(self) -> bool:
        """Whether a guard was written over; forgets the outputs."""
        rooms, self.rooms = self.rooms, []
        edges = [side.view(np.uint8) for room in rooms for side in (room[:GUARD], room[-GUARD:])]
        return any(bool((edge != self.fill).any()) for edge in edges)


def sound_chunk(rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Pack values of a random kind; return the chunk and the values."""
    dtype = np.dtype(DTYPES[int(rng.integers(4))])
    n = int(rng.integers(1, 1500))
    top = min(int(rng.choice([1, 9, 300, 3_000, 70_000, 2**32 - 1])), int(np.iinfo(dtype).max))
    values = rng.integers(0, top, n, dtype=dtype, endpoint=True)
    if rng.random() < 0.5:
        values = np.concatenate([np.unique(part) for part in np.array_split(values, 1 + n // 300)])
    return encode_packed(values, np.empty(0, np.int64)).copy(), values


def damaged(raw: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Change up to four bytes, most often of the head and the tables; sometimes cut the end."""
    made = raw.copy()
    reach = made.size if rng.random() < 0.4 else min(made.size, 16 + made.size // 20)
    places = rng.integers(0, reach, int(rng.integers(1, 5)))
    made[places] = rng.integers(0, 256, places.size)
    return made[: int(rng.integers(0, made.size))].copy() if rng.random() < 0.05 else made


def unpacked_twice(
    unpack: Callable[[int], tuple[Sequence[NDArray[Any]], bool]], what: str
) -> Sequence[NDArray[Any]] | None:
    """Call with both fillings; give the result, None where it was refused, or say what is wrong."""
    results: list[Sequence[NDArray[Any]] | None] = []
    for fill in FILLS:
        try:
            found, touched = unpack(fill)
        except CorruptError:
            found, touched = (), False
            results.append(None)
        else:
            results.append(found)
        if touched:
            raise AssertionError(f"{what}: a guard was written over")
    first, second = results
    if (first is None) != (second is None):
        raise AssertionError(f"{what}: refused once and not again")
    if first is None or second is None:
        return None
    if not all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)):
        raise AssertionError(f"{what}: a part of the output was left unwritten")
    return first


def unpack_whole(raw: NDArray[np.uint8], like: NDArray[Any]) -> NDArray[Any] | None:
    """Unpack one chunk as a codec does."""

    def unpack(fill: int) -> tuple[Sequence[NDArray[Any]], bool]:
        ring = GuardedRing(fill)
        out = ring.take(like.size, like.dtype)
        try:
            decode_packed(raw, out)
        except CorruptError:
            if ring.is_touched() or (out.view(np.uint8) != fill).any():
                raise AssertionError("whole: refused after something was written") from None
            raise
        return [out], ring.is_touched()

    found = unpacked_twice(unpack, "whole")
    return None if found is None else found[0]


class StoredGroup:
    """The damaged chunks of a group as one stored array, each with a checksum that is right.

    Parameters
    ----------
    location : Location
        Where it is written.
    spec : ArraySpec
        Of a packed array of the same type.
    chunks : list of (k,) uint8
        Damaged chunks.
    wholes : list of (n,) arrays or None
        What unpacking each whole gave.
    n : int
        Values of a chunk.
    """

    def __init__(
        self,
        location: Location,
        spec: ArraySpec,
        chunks: Sequence[NDArray[np.uint8]],
        wholes: Sequence[NDArray[Any] | None],
        n: int,
    ) -> None:
        self.wholes, self.n = wholes, n
        shape = (len(chunks) * n,)
        self.reader = ArrayReader(location, replace(spec, shape=shape, chunk_shape=(n,), shard_shape=shape), threads=1)
        self.file = location.path / spec.path / "c" / "0"
        bytes_of = [chunk.tobytes() for chunk in chunks]
        summed = [raw + int(google_crc32c.value(raw)).to_bytes(4, "little") for raw in bytes_of]
        self.file.write_bytes(b"".join(compose_shard([ChunkRun.of(chunk) for chunk in summed], len(chunks))))

    def expected(self, start: int, end: int) -> NDArray[Any] | None:
        """Give the values of a range from the chunks unpacked whole; None where one of them is refused."""
        parts = []
        for chunk in range(start // self.n, -(-end // self.n)):
            whole = self.wholes[chunk]
            if whole is None:
                return None
            parts.append(whole[max(start - chunk * self.n, 0) : end - chunk * self.n])
        return np.concatenate(parts)

    def check_range(self, start: int, end: int) -> None:
        """Compare a range read with the same of the whole."""
        dtype = np.dtype(self.reader.spec.dtype)

        def unpack(fill: int) -> tuple[Sequence[NDArray[Any]], bool]:
            ring = GuardedRing(fill)
            out = read_ranges(self.reader, [start], [end], ring.take(end - start, dtype))
            return [out], ring.is_touched()

        expected = self.expected(start, end)
        _same(unpacked_twice(unpack, "range"), None if expected is None else [expected], "range")

    def gatherers(self, column_map: NDArray[np.int64], n_cols: int) -> list[tuple[RowGatherer, GuardedRing]]:
        """Make what reads rows, once for each filling; the array is both columns and values."""
        rings = [GuardedRing(fill) for fill in FILLS]
        groups, dtype = [RowGroup(self.reader, self.reader, column_map)], np.dtype("uint32")
        return [(RowGatherer(groups, n_cols, dtype, threads=1, ring=ring), ring) for ring in rings]

    def check_row(
        self,
        made: Sequence[tuple[RowGatherer, GuardedRing]],
        column_map: NDArray[np.int64],
        span: tuple[int, int],
        *,
        sort: bool,
    ) -> None:
        """Compare one row gathered with what NumPy makes of the whole."""
        pairs = dict(zip(FILLS, made, strict=True))
        row = np.zeros(1, np.int32), np.array([span[0]]), np.array([span[1]])

        def unpack(fill: int) -> tuple[Sequence[NDArray[Any]], bool]:
            gatherer, ring = pairs[fill]
            try:
                return gatherer.gather(*row, sort=sort), ring.is_touched()
            except CorruptError:
                if ring.is_touched():
                    raise AssertionError("gather: a guard was written over, then refused") from None
                raise

        found, whole = unpacked_twice(unpack, "gather"), self.expected(*span)
        if found is not None and found[1].size and not 0 <= found[1].min() <= found[1].max() < len(column_map):
            raise AssertionError("gather: gave a column that there is not")
        if whole is None:
            if found is not None:
                raise AssertionError("gather: gave what had to be refused")
        elif span[1] <= self.n or (whole.itemsize == 4 and not is_few(column_map)):
            # A damaged block of a narrower type may hold wider numbers, which only a map sees, and one that claims to
            # ascend may not, which only searching feels.
            _same(found, _row_of(whole, column_map, sort=sort), "gather")

    def check_file(self, rng: np.random.Generator) -> None:
        """Damage the stored file itself: what is read afterwards is right or refused."""
        raw = np.frombuffer(self.file.read_bytes(), np.uint8).copy()
        reach = raw.size if rng.random() < 0.5 else min(raw.size, 1700)
        raw[raw.size - 1 - rng.integers(0, reach, 3)] ^= rng.integers(1, 256, 3).astype(np.uint8)
        self.file.unlink()
        self.file.write_bytes((raw[: int(rng.integers(0, raw.size))] if rng.random() < 0.2 else raw).tobytes())
        for start, end in spans(rng, self.n, len(self.wholes), 3):
            expected = self.expected(start, end)
            try:
                found = read_ranges(self.reader, [start], [end])
            except CorruptError:
                continue
            _same([found], None if expected is None else [expected], "file")


def is_few(column_map: NDArray[np.int64]) -> bool:
    """Tell whether so few columns are kept that a gather searches for them, and sees no others."""
    return SEARCHED * int((column_map >= 0).sum()) <= len(column_map)


def _row_of(
    whole: NDArray[Any], column_map: NDArray[np.int64], *, sort: bool
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None:
    """Make of values what a gather makes of the row that has them as columns and values; None where it is refused."""
    if (whole >= len(column_map)).any() and not is_few(column_map):
        return None
    columns = np.append(column_map, -1)[np.minimum(whole.astype(np.int64), len(column_map))]
    values, columns = whole[columns >= 0], columns[columns >= 0]
    if sort or (column_map < 0).any():
        order = np.argsort(columns)
        values, columns = values[order], columns[order]
        if (columns[1:] == columns[:-1]).any():
            return None
    return np.array([0, columns.size]), columns, values


def _same(found: Sequence[NDArray[Any]] | None, expected: Sequence[NDArray[Any]] | None, what: str) -> None:
    """Refuse two results that differ."""
    if (found is None) != (expected is None):
        raise AssertionError(f"{what}: {'refused' if found is None else 'not refused'}, unlike the whole chunk")
    if not all(np.array_equal(a, b) for a, b in zip(found or (), expected or (), strict=True)):
        raise AssertionError(f"{what}: differs from the whole chunk")


def spans(rng: np.random.Generator, n: int, n_chunks: int, n_spans: int) -> list[tuple[int, int]]:
    """Draw ranges that begin in random chunks and reach into the next at times."""
    starts = rng.integers(0, n * n_chunks, n_spans)
    ends = np.minimum(starts + rng.integers(1, n + 2, n_spans), n * n_chunks)
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def check_group(number: int, seed: int, fence: Fence, location: Location, specs: dict[str, ArraySpec]) -> int:
    """Make a group of damaged chunks, unpack each in every way; return how many were refused."""
    rng = np.random.default_rng([seed, number])
    raw, values = sound_chunk(rng)
    chunks = [raw, *(damaged(raw, rng) for _ in range(GROUP - 1))]
    wholes = [unpack_whole(fence.place(chunk), values) for chunk in chunks]
    _same(None if wholes[0] is None else [wholes[0]], [values], "whole, undamaged")
    spec = specs[values.dtype.name]
    stored = StoredGroup(location, spec, chunks, wholes, values.size)
    for chunk in range(GROUP):
        start, end = sorted(rng.integers(0, values.size, 2).tolist())
        stored.check_range(chunk * values.size + start, chunk * values.size + end + 1)
    if values.itemsize <= 4:
        n_cols = int(min(int(values.max()) + 1, _LARGEST_MAP))
        column_map = rng.permutation(n_cols).astype(np.int64)
        column_map[rng.random(n_cols) > rng.choice(KEPT_SHARES)] = -1
        made = stored.gatherers(column_map, n_cols)
        for start, end in [*spans(rng, values.size, GROUP, GROUP // 2), *spans(rng, values.size, 1, 5)]:
            stored.check_row(made, column_map, (start, min(end, start + n_cols)), sort=bool(rng.random() < 0.5))
    if rng.random() < 0.2:
        stored.check_file(rng)
    stored.file.unlink()
    return sum(whole is None for whole in wholes)


def campaign(options: argparse.Namespace, at: "Synchronized[int]") -> None:
    """Run the campaign; `at` holds the group that is being checked."""
    faulthandler.enable()
    started, refused, done = time.monotonic(), 0, 0
    fence = Fence(library().ra_packed_room(1500, 8))
    with tempfile.TemporaryDirectory(prefix="fuzz-packed-") as folder:
        location, specs = Location(folder), {}
        for dtype in map(np.dtype, DTYPES):
            writer = ArrayWriter(location, dtype.name, dtype, profile="packed", chunk_rows=4, shard_rows=8)
            writer.append(np.arange(8, dtype=dtype))
            specs[dtype.name] = writer.close()
        for number in range(options.first, options.first + options.chunks // GROUP):
            if time.monotonic() - started > options.seconds:
                break
            at.value = number
            refused += check_group(number, options.seed, fence, location, specs)
            done += GROUP
            if done % 100_000 == 0:
                print(f"{done:,} damaged chunks, {refused:,} refused", flush=True)
    print(f"{done:,} damaged chunks, {refused:,} refused, nothing else found, {time.monotonic() - started:.0f} s")


def main() -> int:
    """Run the campaign in a process of its own, so that a crash can be told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="group to begin with")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="where to stop")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    at = context.Value("q", -1)
    child = context.Process(target=campaign, args=(options, at))
    child.start()
    child.join()
    if child.exitcode:
        print(f"ended with {child.exitcode}: repeat by --seed {options.seed} --first {at.value} --chunks {GROUP}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
