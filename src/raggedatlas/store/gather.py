"""The gather of sparse rows: of many ragged groups, in any codec, into one CSR. The loops are in ``native/gather.c``."""

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raggedatlas.errors import CorruptError, SchemaError
from raggedatlas.store.native import (
    ANY,
    AS_IS,
    CHECKED,
    FAULTS,
    GOOD,
    I32,
    I64,
    OUT,
    OUT_I32,
    OUT_I64,
    OUT_U8,
    OUTSIDE,
    REPEATED,
    STREAM,
    TYPE_CODES,
    U8,
    U32,
    U64,
    Array,
    Maps,
    Result,
    Room,
    Rows,
    csr_of,
    library,
)  # fmt: skip
from raggedatlas.store.read import ArrayReader, bad_chunk, fetch_frames, is_packed, native_kind, read_ranges
from raggedatlas.store.runtime import (
    DECODE_THREADS,
    BufferPool,
    map_decode,
    map_fetches,
    map_groups,
    prefetch_map,
    shared_pool,
)
from raggedatlas.store.sparse import move_runs

_ENTRIES_PER_THREAD = 2**19
_SEARCH_BELOW = 32
_BEYOND = 16
_ENDLESS = 2**62
"""Entries of a chunk that is a stream: what it has is said by its size."""

_MAP_TYPES = (I32, I64, U8, U32, I32, I64)
_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)
_SLOTS = tuple(map(np.dtype, ("uint8", "uint16", "uint32", "uint64", "uint32", "uint64")))
"""What of a row is noted by column, by type of the result."""


Frames: TypeAlias = tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint8]]
"""Addresses, sizes and states of chunks."""


@dataclass(frozen=True)
class RowGroup:
    """One sparse group of a gather."""

    columns: ArrayReader
    layers: Mapping[str, ArrayReader]
    column_map: NDArray[np.int64]  # (n_local,): column of the result for every stored one, -1 where it is left out


@dataclass(frozen=True)
class _Rows:
    """Rows of one gather."""

    group: NDArray[np.int32]  # (n,): of each row; -1 for an empty one
    start: NDArray[np.int64]  # (n,): first entry of each in its group
    length: NDArray[np.int64]  # (n,): entries of each there
    order: NDArray[np.int64]  # rows that have entries, as they are stored
    at: NDArray[np.int64]  # (n + 1,): first entry of each in the result
    longest: int  # most entries of one row


@dataclass(frozen=True)
class _Touched:
    """The chunks of an array that rows touch."""

    frames: Frames
    kept: list[Any]  # what must be kept until the chunks are read
    start: NDArray[np.int64]  # first entry of each row there
    # Of columns: whether those of every row of a linked file ascend strictly (none occurs twice); those of an atlas do.
    ascends: bool = True


class _ChunkTable:
    """Addresses of all chunks of one array per group; local shards are mapped when first needed and stay mapped.

    What the library does not decode is read anew at every call, the entries of its rows one behind the other: a stream,
    which is one chunk.
    """

    def __init__(
        self, readers: Sequence[ArrayReader], dtype: np.dtype[Any], convert: Callable[..., NDArray[Any]]
    ) -> None:
        self.readers, self.convert = readers, convert
        self.is_local = all(reader.folder is not None for reader in readers)
        self.waits = any(reader.source is not None and not reader.source.location.is_local for reader in readers)
        forms = [_native_form(reader, dtype) for reader in readers]
        self.dtypes = [form[1] for form in forms]
        self.streamed = np.array([form[0] % CHECKED == STREAM for form in forms], bool)
        per_chunk = [
            _ENDLESS if stream else r.spec.chunk_shape[0] for r, stream in zip(readers, self.streamed, strict=True)
        ]
        per_shard = [1 if stream else r.spec.chunks_per_shard for r, stream in zip(readers, self.streamed, strict=True)]
        counts = [-(-reader.spec.n_rows // size) for reader, size in zip(readers, per_chunk, strict=True)]
        self.first_slot = np.cumsum([0, *counts])
        # As `struct ra_array` has it: first slot, entries of a chunk, kind, bytes of an entry.
        self.groups = np.array(
            [
                (slot, size, kind, held.itemsize)
                for slot, size, (kind, held) in zip(self.first_slot.tolist(), per_chunk, forms, strict=False)
            ],
            np.int64,
        ).reshape(len(readers), 4)
        self.chunk_bytes = int(self.groups[~self.streamed][:, [1, 3]].prod(axis=1).max(initial=1))
        self.per_shard = per_shard
        self.first_shard = np.cumsum([0, *(-(-n // size) for n, size in zip(counts, per_shard, strict=True))])
        self.grid = np.array(
            [
                (size * n, shard)
                for size, n, shard in zip(per_chunk, per_shard, self.first_shard.tolist(), strict=False)
            ],
            np.int64,
        ).reshape(len(readers), 2)
        # Remote shards count as mapped; `touched` fetches their chunks at every call.
        self.mapped = np.full(self.first_shard[-1], not self.is_local)
        self.owners: list[Any] = []
        self.lock = threading.Lock()
        self.frames = self._fresh()
        # Made once, as taking addresses is most of the time of a single row.
        self.array = self._array(self.frames)

    def _fresh(self) -> Frames:
        """Return empty addresses, sizes and states; pages that are not touched cost nothing."""
        n = int(self.first_slot[-1])
        return np.zeros(n, np.uint64), np.zeros(n, np.int64), np.zeros(n, np.uint8)

    @property
    def shards(self) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Entries of a shard and first shard of every group, and which shards are mapped; of remote ones, all."""
        return self.grid, self.mapped.view(np.uint8)

    def touched(self, rows: _Rows, *, mapped: bool) -> _Touched:
        """Return all chunks that rows touch; `mapped` says that no shard has to be mapped and no stream to be read."""
        if mapped and self.is_local:
            return _Touched(self.frames, self.owners, rows.start)
        group = rows.group[rows.order]
        streamed = self.streamed[group]
        places = {number: rows.order[group == number] for number in np.unique(group[streamed]).tolist()}
        native = rows.order[~streamed] if places else rows.order
        asked = rows.group[native], rows.start[native], rows.start[native] + rows.length[native]
        found = _Touched(*(self._map_shards(*asked) if self.is_local else self._fetch(*asked)), rows.start)
        return self._with_streams(rows, places, found) if places else found

    def _with_streams(self, rows: _Rows, places: Mapping[int, NDArray[np.int64]], found: _Touched) -> _Touched:
        """Read the streams of some groups, of which `places` are the rows."""
        (addresses, sizes, states), start = found.frames, rows.start.copy()
        # Streams are of one call, but chunks that it finds sound stay so.
        addresses, sizes, kept = addresses.copy(), sizes.copy(), list(found.kept)

        def read(number: int) -> NDArray[Any]:
            here, dtype, reader = places[number], self.dtypes[number], self.readers[number]
            # Reused memory: the system zeroes new pages, which takes longer than reading into them.
            room = shared_pool().take(int(rows.length[here].sum()), np.dtype(reader.spec.dtype))
            values = read_ranges(reader, rows.start[here], rows.start[here] + rows.length[here], room)
            return values if values.dtype == dtype else self.convert(values, dtype)

        # On a local disk as many threads as cores are enough.
        streams = (map_decode if self.is_local and not self.waits else map_groups)(read, list(places))
        for (number, here), values in zip(places.items(), streams, strict=True):
            start[here] = np.cumsum(rows.length[here]) - rows.length[here]
            slot = int(self.first_slot[number])
            addresses[slot], sizes[slot] = ANY.address(values), values.nbytes
            kept.append(values)
        return _Touched((addresses, sizes, states), kept, start, self._ascend(rows, places, streams))

    def _ascend(self, rows: _Rows, places: Mapping[int, NDArray[np.int64]], streams: Sequence[NDArray[Any]]) -> bool:
        """Return whether the columns of every row of linked files ascend strictly."""
        for (number, here), values in zip(places.items(), streams, strict=True):
            reader = self.readers[number]
            if reader.source is None or reader.spec.is_columns or self.convert is not _as_columns:
                continue
            bounds = np.zeros(len(here) + 1, np.int64)
            np.cumsum(rows.length[here], out=bounds[1:])
            given, where = csr_of(bounds, values), ctypes.c_int64()
            # Columns beyond the last are found where they are mapped.
            if library().ra_check_order(ctypes.byref(given), np.iinfo(np.int64).max, ctypes.byref(where)) != GOOD:
                return False
        return True

    def native(self, frames: Frames) -> ctypes.Structure:
        """Return what the library takes, of some frames."""
        return self.array if frames is self.frames else self._array(frames)

    def _array(self, frames: Frames) -> ctypes.Structure:
        addresses, sizes, states = frames
        return Array(
            U64.address(addresses), I64.address(sizes), OUT_U8.address(states), len(sizes), I64.address(self.groups)
        )

    def _map_shards(
        self, group: NDArray[np.int32], start: NDArray[np.int64], end: NDArray[np.int64]
    ) -> tuple[Frames, list[Any]]:
        """Map the local shards that rows touch."""
        low = self.grid[group, 1] + start // self.grid[group, 0]
        high = self.grid[group, 1] + (end - 1) // self.grid[group, 0]
        # +1 at a row's first shard, -1 after its last: where the running sum is positive, rows touch the shard.
        begun = (
            np.bincount(low, minlength=len(self.mapped)) - np.bincount(high + 1, minlength=len(self.mapped) + 1)[:-1]
        )
        with self.lock:
            for shard in np.flatnonzero((np.cumsum(begun) > 0) & ~self.mapped).tolist():
                g = int(np.searchsorted(self.first_shard, shard, side="right")) - 1
                chunk = (shard - int(self.first_shard[g])) * self.per_shard[g]
                slot = int(self.first_slot[g]) + chunk
                n = min(self.per_shard[g], int(self.first_slot[g + 1]) - slot)
                self._put(g, slot, np.arange(chunk, chunk + n), self.frames, self.owners)
                # Last, because `gather` reads it without the lock and then takes the frames of the shard as complete.
                self.mapped[shard] = True
        return self.frames, self.owners

    def _put(
        self, g: int, slot: int | NDArray[np.int64], chunks: NDArray[np.int64], frames: Frames, kept: list[Any]
    ) -> None:
        """Enter the frames of some chunks of a group."""
        found = fetch_frames(self.readers[g], chunks)
        positions = slot + np.arange(len(chunks)) if isinstance(slot, int) else slot
        frames[0][positions], frames[1][positions] = found.addresses, found.sizes
        kept.extend(found.owners)

    def _fetch(
        self, group: NDArray[np.int32], start: NDArray[np.int64], end: NDArray[np.int64]
    ) -> tuple[Frames, list[Any]]:
        """Fetch the chunks that rows touch; neighbouring rows and chunks share requests."""
        # Fresh states too: they say which chunks were checked, and newly fetched bytes were not.
        frames, kept = self._fresh(), list[Any]()
        first, last = start // self.groups[group, 1], (end - 1) // self.groups[group, 1]

        def fetch(g: int) -> None:
            selected = group == g
            touched = np.zeros(int(self.first_slot[g + 1] - self.first_slot[g]) + 1, np.int64)
            np.add.at(touched, first[selected], 1)
            np.add.at(touched, last[selected] + 1, -1)
            chunks = np.flatnonzero(np.cumsum(touched)[:-1])
            self._put(g, self.first_slot[g] + chunks, chunks, frames, kept)

        map_fetches(fetch, np.unique(group).tolist())
        return frames, kept

    def fault(self, slot: int, status: int) -> CorruptError:
        """Name a bad chunk."""
        g = int(np.searchsorted(self.first_slot, slot, side="right")) - 1
        return bad_chunk(self.readers[g], slot - int(self.first_slot[g]), FAULTS[status])


class RowGatherer:
    """Reads rows of ragged groups into one CSR, columns mapped, in any order and as often as asked.

    Arrays may have any codec and fill value; columns are integers, and values booleans, integers or floats that the
    dtype of the result holds. Usable from several threads at once. It holds memory maps, so every process creates its
    own.

    Each of `groups` has all layers. `n_cols` and `dtypes`, by layer, are those of the result. `threads` are those of
    one call; the result does not depend on them. The memory of results comes from `pool`, or is fresh without one.
    """

    def __init__(
        self,
        groups: Sequence[RowGroup],
        n_cols: int,
        dtypes: Mapping[str, np.dtype[Any]],
        *,
        threads: int = DECODE_THREADS,
        pool: BufferPool | None = None,
    ) -> None:
        self.threads, self.pool = threads, pool or BufferPool(0)
        self.dtypes = dtypes
        self.type_codes = {
            # Values of a type that C does not know are written as the integer of their size.
            layer: TYPE_CODES.get(dtype.name, TYPE_CODES[f"uint{8 * dtype.itemsize}"])
            for layer, dtype in dtypes.items()
        }
        for group in groups:
            _refuse_arrays(group)
        if any(int(group.column_map.max(initial=-1)) >= n_cols for group in groups):
            raise SchemaError(f"A column map leads beyond the {n_cols} columns of the result.")
        # Compiled code writes int32 columns; of a wider result it writes ranks, which `gather` replaces.
        self.wide_columns: NDArray[np.int64] | None = None
        if n_cols > np.iinfo(np.int32).max:
            every = [group.column_map for group in groups]
            wide = self.wide_columns = np.unique(np.concatenate([m[m >= 0] for m in every]))
            ranks = [np.where(m >= 0, np.searchsorted(wide, m), m) for m in every]
            groups = [replace(group, column_map=rank) for group, rank in zip(groups, ranks, strict=True)]
            n_cols = len(wide)
        self.n_cols = n_cols
        self.columns = _ChunkTable([group.columns for group in groups], _UINT32, _as_columns)
        self.values = {
            layer: _ChunkTable([group.layers[layer] for group in groups], dtype, np.ndarray.astype)
            for layer, dtype in dtypes.items()
        }
        # The -2 at the end of each map is what a column finds that the group does not have.
        ends = [np.append(group.column_map, -2).astype(np.int32) for group in groups]
        self.complete = all(-1 not in m for m in ends)
        bounds = np.cumsum([0, *map(len, ends)])
        kept_maps = [m[m >= 0] for m in ends]
        monotone = np.array([bool((m[1:] > m[:-1]).all()) for m in kept_maps], np.uint8)
        maps: list[NDArray[Any]] = [
            np.concatenate([np.empty(0, np.int32), *ends]),
            bounds,
            monotone,
            *_few_columns(groups),
        ]
        self.maps = Maps(*(kind.address(item) for kind, item in zip(_MAP_TYPES, maps, strict=True)))
        self.kept = maps  # what `self.maps` has the addresses of
        n_entries = np.array([group.columns.spec.n_rows for group in groups], np.int64)
        kept = list(map(len, kept_maps))
        before = np.cumsum(n_entries) - n_entries
        self.facts = np.stack([n_entries, before, np.diff(bounds) - 1, np.array(kept, np.int64)], axis=1)
        # Rows of dense matrices have an entry in every column, of which the result keeps those that are not zero.
        self.has_zeros = np.array([group.columns.spec.is_columns for group in groups] + [False], bool)
        self.own = threading.local()

    @property
    def in_place(self) -> bool:
        """Whether reading takes no memory that grows with the rows but that of the result."""
        tables = (self.columns, *self.values.values())
        return self.complete and all(table.is_local and not table.streamed.any() for table in tables)

    def gather(
        self, group: NDArray[np.int32], start: NDArray[np.int64], end: NDArray[np.int64], *, sort: bool = True
    ) -> tuple[NDArray[np.int64], NDArray[Any], dict[str, NDArray[Any]]]:
        """Read rows: indptr, indices, and the values of each layer in its dtype.

        `group`, (n,), is the group of every row, -1 for an empty one; `start` and `end`, (n,), are its entries in the
        arrays of this group. `sort` says whether the columns of every row are sorted; if not, they come as stored,
        unless a column is left out or those of a linked file do not ascend. indptr is (n + 1,); indices are int32, or
        int64 where the result is too wide for it. Raises `CorruptError` if a range is outside its group, a chunk is
        damaged, or a column is not one of its group.
        """
        group, start, end = np.ascontiguousarray(group), np.ascontiguousarray(start), np.ascontiguousarray(end)
        tables, indices = [*self.values.values()], np.empty(0, _INT32)
        layers: dict[str, NDArray[Any]] = {}
        arranged = [self._arrange(group, start, end, table) for table in tables]
        steps = [
            partial(table.touched, rows, mapped=mapped)
            for table, (rows, mapped) in zip((self.columns, *tables), (arranged[0], *arranged), strict=True)
        ]
        # Chunks in an object store are fetched at the same time. Streams are read each when its turn comes: they take memory, and many requests each.
        waits = not any(table.is_local or table.streamed.any() for table in (self.columns, *tables))
        ahead = prefetch_map(lambda step: step(), steps, threads=len(steps) if waits else 0, depth=len(steps))
        with closing(ahead) as found:
            columns = next(found)
            for (layer, table), (rows, _) in zip(self.values.items(), arranged, strict=True):
                at, total = rows.at, int(rows.at[-1])
                indices = indices if layers else self.pool.take(total, _INT32)
                layers[layer] = self.pool.take(total, self.dtypes[layer])
                # Without `counts` compiled code writes rows as stored, which is right only if it leaves no column out and none is named twice. What
                # this package has written names none twice; of other files that is seen only where columns are sorted.
                plain = self.complete and not sort and columns.ascends
                counts = None if plain else np.zeros(len(group), np.int64)
                out = Result(
                    OUT_I32.address(indices), OUT.address(layers[layer]), 0 if counts is None else OUT_I64.address(counts), total,
                    self.n_cols, self.type_codes[layer],
                )  # fmt: skip
                run = partial(self._run, rows, columns, table, next(found), out)
                work = total if plain else int(rows.length[rows.order].sum())
                if rows.order.size and (self.threads == 1 or work < 2 * _ENTRIES_PER_THREAD):
                    run(rows.order)
                elif rows.order.size:
                    map_decode(run, _cut(rows.order, rows.length, self.threads))
        if counts is not None and int(counts.sum()) < total:
            at, indices, layers = _compact(at, counts, indices, layers)
        if self.has_zeros.any() and layers:
            at, indices, layers = _drop_zeros(at, indices, layers, self.has_zeros[group])
        return at, indices if self.wide_columns is None else self.wide_columns[indices], layers

    def _arrange(
        self, group: NDArray[np.int32], start: NDArray[np.int64], end: NDArray[np.int64], table: _ChunkTable
    ) -> tuple[_Rows, bool]:
        """Check and order rows; also tell whether all shards of columns and values that they touch are mapped."""
        n = len(group)
        order, places, at, counted = (np.empty(size, np.int64) for size in (n, n, n + 1, 3))
        shards = *self.columns.shards, *table.shards
        status = library().ra_arrange_rows(
            group, start, end, n, self.facts, len(self.facts), *shards, order, places, at, counted
        )
        found, longest, mapped = counted.tolist()
        if status != GOOD:
            g, first, last = int(group[found]), start[found], end[found]
            reader = self.columns.readers[g]
            if status == OUTSIDE:
                raise CorruptError(
                    f"A cell points to [{first}, {last}) of {reader.name}, which has {self.facts[g, 0]} entries; run validate()."
                )
            raise CorruptError(
                f"A cell points to {last - first:,} entries of {reader.name}: it names a feature twice, or one that its list has not got"
                f"{_advice(reader)}"
            )
        order = order[:found][np.argsort(places[:found])] if found > 1 else order[:found]
        return _Rows(group, start, end - start, order, at, longest), bool(mapped)

    def _run(
        self,
        rows: _Rows,
        columns: _Touched,
        table: _ChunkTable,
        values: _Touched,
        out: ctypes.Structure,
        order: NDArray[np.int64],
    ) -> None:
        """Read some of the rows in the calling thread."""
        given = Rows(
            I64.address(order), order.size, I32.address(rows.group),
            *(I64.address(item) for item in (columns.start, values.start, rows.length, rows.at)), rows.group.size, len(self.facts),
        )  # fmt: skip
        tables = (Array * 2)(self.columns.native(columns.frames), table.native(values.frames))
        room, _kept = self._room(rows.longest, out)
        where, which = ctypes.c_int64(0), ctypes.c_int32(0)
        status = library().ra_gather(given, tables, self.maps, out, room, where, which)
        if status in {OUTSIDE, REPEATED}:
            reader = self.columns.readers[int(rows.group[where.value])]
            fault = "a feature that its list has not got" if status == OUTSIDE else "a feature twice in one cell"
            raise CorruptError(f"{reader.name} names {fault}{_advice(reader)}")
        if status != GOOD:
            raise (table if which.value else self.columns).fault(where.value, status)

    def _room(self, longest: int, out: ctypes.Structure) -> tuple[ctypes.Structure, list[NDArray[Any]]]:
        """Return the scratch of the calling thread, made when it first reads, and what must be kept while it is used."""
        if not hasattr(self.own, "chunks"):
            n_bytes = max(table.chunk_bytes for table in (self.columns, *self.values.values()))
            self.own.chunks = [np.empty(n_bytes, np.uint8) for _ in range(3)]
        chunks: list[NDArray[Any]] = self.own.chunks
        sizes = [longest + _BEYOND] * 3 + [self.n_cols // 64 + 1, self.n_cols + 1] if out.counts else [0] * 5
        slot = _SLOTS[out.type]
        kinds: list[DTypeLike] = [np.int32, np.uint64 if slot == np.uint64 else np.uint32, np.int64, np.uint64, slot]
        extra = [np.empty(size, kind) for size, kind in zip(sizes, kinds, strict=True)]
        # The bitmap of columns must start as zeros; the other buffers may hold anything.
        extra[3][:] = 0
        kept: list[NDArray[Any]] = [*chunks, *extra]
        places = [OUT.address(item) for item in kept]
        return Room(*places[:3], chunks[0].size, *places[3:6], longest, *places[6:]), kept


def _cut(order: NDArray[np.int64], lengths: NDArray[np.int64], threads: int) -> list[NDArray[np.int64]]:
    """Cut ordered rows into runs of about equally many entries, one for each thread where there are enough."""
    total = np.cumsum(lengths[order])
    n = min(threads, 1 + int(total[-1]) // _ENTRIES_PER_THREAD)
    cuts = np.searchsorted(total, np.linspace(0, int(total[-1]), n + 1)[1:-1])
    return [run for run in np.split(order, cuts) if run.size]


def _few_columns(groups: Sequence[RowGroup]) -> tuple[NDArray[np.uint32], NDArray[np.int32], NDArray[np.int64]]:
    """List the kept columns, and what they map to, of packed groups that keep so few that searching is faster than mapping."""
    wanted, targets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    bounds, n = [0], 0
    for group in groups:
        kept = np.flatnonzero(group.column_map >= 0)
        if _SEARCH_BELOW * len(kept) <= len(group.column_map) and all(
            map(is_packed, (group.columns, *group.layers.values()))
        ):
            wanted.append(kept)
            targets.append(group.column_map[kept])
            n += len(kept)
        bounds.append(n)
    return np.concatenate(wanted).astype(np.uint32), np.concatenate(targets).astype(np.int32), np.array(bounds)


def _refuse_arrays(group: RowGroup) -> None:
    """Refuse arrays that are not the columns and values of entries."""
    columns = group.columns
    for values in group.layers.values():
        if columns.spec.shape != values.spec.shape:
            raise CorruptError(f"{columns.name} and {values.name} differ in length; run validate().")
        if len(values.spec.shape) != 1 or np.dtype(values.spec.dtype).kind not in "biuf":
            raise CorruptError(
                f"{values.name} has shape {values.spec.shape} and dtype {values.spec.dtype}; the values of sparse rows are one "
                "list of booleans, integers or floats. Run validate()."
            )
    if np.dtype(columns.spec.dtype).kind not in "iu":
        raise CorruptError(f"{columns.name} has dtype {columns.spec.dtype}, but columns are integers. Run validate().")


def _native_form(reader: ArrayReader, dtype: np.dtype[Any]) -> tuple[int, np.dtype[Any]]:
    """Return how the library reads entries that become `dtype`, as in ``struct ra_array``, and the dtype that it finds."""
    spec, stored, kind = reader.spec, np.dtype(reader.spec.dtype), native_kind(reader)
    # Of small unsigned integers the library makes any type, all else it copies.
    number = stored.kind == "u" and stored.itemsize <= 4 and dtype != np.float16
    flags = 0 if number else AS_IS
    # A chunk that is not stored is zero to the library.
    if kind is None or spec.fill().tobytes().strip(b"\0") or not (number or stored == dtype):
        return STREAM + flags, stored if number else dtype
    assert reader.decoder is not None
    return kind + flags + CHECKED * reader.decoder.checksum, stored


def _advice(reader: ArrayReader) -> str:
    """Return the end of a message about columns that are wrong: what to do."""
    if reader.source is None:
        return "; run validate()."
    return (
        f". The file was added without looking at all of its columns: drop the dataset {reader.source.dataset!r} and add the file with "
        "copy=True, or correct the file (repeated columns with sum_duplicates()) and link it again."
    )


def _as_columns(columns: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert columns to an unsigned dtype; what is negative or too large becomes a number that no map has."""
    if columns.dtype.kind == "i" and columns.itemsize == dtype.itemsize:
        # Negative ones become more than half of what the type holds, and fewer columns are read.
        return columns.view(dtype)
    return np.minimum(columns.astype(np.uint64), np.iinfo(dtype).max).astype(dtype)


def _drop_zeros(
    at: NDArray[np.int64], indices: NDArray[np.int32], layers: Mapping[str, NDArray[Any]], rows: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int32], dict[str, NDArray[Any]]]:
    """Leave out the entries of some rows that are zero in every layer."""
    kept = np.repeat(~rows, np.diff(at))
    for values in layers.values():
        kept |= values != 0
    bounds = np.zeros(len(kept) + 1, np.int64)
    np.cumsum(kept, out=bounds[1:])
    return bounds[at], indices[kept], {layer: values[kept] for layer, values in layers.items()}


def _compact(
    at: NDArray[np.int64], counts: NDArray[np.int64], indices: NDArray[np.int32], layers: Mapping[str, NDArray[Any]]
) -> tuple[NDArray[np.int64], NDArray[np.int32], dict[str, NDArray[Any]]]:
    """Close the gaps behind rows of which entries were left out."""
    indptr = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])

    def close(array: NDArray[Any]) -> NDArray[Any]:
        out = np.empty(int(indptr[-1]), array.dtype)
        move_runs(array, at[:-1], counts, indptr[:-1], out)
        return out

    return indptr, close(indices), {layer: close(values) for layer, values in layers.items()}
