"""Rows of sparse matrices: renumber, sort and count their columns, gather rows of stored groups, find singular vectors. The loops are in ``native/``."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import byref, c_int64
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from raggedatlas.errors import CorruptError, SchemaError
from raggedatlas.store.native import (
    BAD_BOUNDS,
    BAD_COLUMN,
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
    PACKED,
    REPEATED,
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
from raggedatlas.store.read import ArrayReader, bad_chunk, fetch_frames, is_packed, native_kind
from raggedatlas.store.runtime import DECODE_THREADS, BufferPool, map_decode, map_groups

_ENTRIES_PER_THREAD = 2**18
"""Fewer are mapped before another thread has begun."""


def count_columns(indices: NDArray[Any], n_columns: int) -> NDArray[np.int64]:
    """Count how often every column is named.

    Parameters
    ----------
    indices : (nnz,) integers
        Columns; those outside ``0..n_columns - 1`` are not counted.
    n_columns : int
        Number of columns.

    Returns
    -------
    (n_columns,) int64

    Examples
    --------
    >>> count_columns(np.array([1, 1, 7, -1]), 3)
    array([0, 2, 0])
    """
    counts = np.zeros(n_columns, np.int64)
    columns = np.ascontiguousarray(indices)
    library().ra_count_columns(columns, columns.size, columns.itemsize, counts, n_columns)
    return counts


def count_kept(
    indptr: NDArray[np.int64], indices: NDArray[Any], column_map: NDArray[Any], what: str
) -> NDArray[np.int64]:
    """Count the entries of every row whose column is kept.

    Parameters
    ----------
    indptr : (n_rows + 1,) int64
        Row bounds; need not start at 0.
    indices : (nnz,) integers
        Columns as stored.
    column_map : (n_columns,) int32 or int64
        New column of every old one, or -1 where it is left out.
    what : str
        What has the columns, for messages.

    Returns
    -------
    (n_rows,) int64

    Raises
    ------
    CorruptError
        If the bounds fall or go beyond the entries, or a column is beyond the map.
    """
    counts, where = np.zeros(len(indptr) - 1, np.int64), c_int64()
    rows = csr_of(indptr, indices)
    fault = library().ra_count_kept(byref(rows), column_map, len(column_map), column_map.itemsize, counts, byref(where))
    refuse_rows(fault, what, where.value, len(column_map))
    return counts


def refuse_rows(fault: int, what: str, row: int | None, n_columns: int) -> None:
    """Raise the error of a compiled function over rows.

    Raises
    ------
    CorruptError
        If bounds fall or go beyond the entries, a column is beyond the last, or a row names one twice.
    """
    says = {
        BAD_BOUNDS: "has bounds that fall or go beyond its entries",
        BAD_COLUMN: f"names a column that it has not got: there are {n_columns:,}",
        REPEATED: "names a column twice",
    }
    if fault in says:
        which = "a row" if row is None else f"row {row:,}"
        raise CorruptError(f"{what}: {which} {says[fault]}; run validate('deep').")


def map_rows(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    column_map: NDArray[Any],
    n_columns: int,
    targets: NDArray[np.int64],
    out: NDArray[Any],
    at: NDArray[np.int64],
    offset: int = 0,
) -> int:
    """Write the new columns of every row, ascending, and where each entry came from; on several threads where it pays.

    Parameters
    ----------
    indptr : (n_rows + 1,) int64
        Row bounds.
    indices : (nnz,) integers
        Columns as stored, in any order.
    column_map : (n_stored,) int32 or int64
        New column of every old one, or -1 where it is left out; of the dtype of `out`.
    n_columns : int
        How many new columns there are.
    targets : (n_rows,) int64
        First output entry of every row.
    out, at : (n_out,) arrays
        Columns; and positions in `indices`, plus `offset`.
    offset : int
        Added to the positions.

    Returns
    -------
    int
        GOOD, UNSORTED where a row had to be sorted, or a fault: REPEATED, BAD_COLUMN, BAD_BOUNDS.
    """

    def fill(span: tuple[int, int]) -> int:
        first, last = span
        rows = csr_of(indptr[first : last + 1], indices)
        words, slots = np.zeros(n_columns // 64 + 1, np.uint64), np.empty(n_columns, np.int64)
        return int(
            library().ra_map_rows(
                byref(rows), column_map, len(column_map), column_map.itemsize, targets[first:last], offset, out, at,
                len(at), words, slots, n_columns,
            )
        )  # fmt: skip

    counts = map_decode(fill, _spans(indptr))
    faults = [state for state in counts if state in (REPEATED, BAD_COLUMN, BAD_BOUNDS)]
    # Besides the faults there are GOOD (0) and UNSORTED (9), so the maximum tells whether any row was sorted.
    return faults[0] if faults else max(counts, default=GOOD)


def _spans(indptr: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut rows into runs of about equally many entries, one for each thread where there are enough."""
    first, last = int(indptr[0]), int(indptr[-1])
    n = min(DECODE_THREADS, 1 + (last - first) // _ENTRIES_PER_THREAD)
    cuts = np.searchsorted(indptr, np.linspace(first, last, max(n, 1) + 1)[1:-1])
    edges = [0, *cuts.tolist(), len(indptr) - 1]
    return [(low, high) for low, high in pairwise(edges) if high > low]


def remap_csr(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    values: NDArray[Any],
    column_map: NDArray[np.int64],
    n_out: int,
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
    """Send the columns of CSR rows through a map, drop those mapped to -1, and sort every row.

    Parameters
    ----------
    indptr : (n_rows + 1,) int64
        Row bounds, starting at 0.
    indices : (nnz,) integers
        Column of every value, in any order.
    values : (nnz,) any fixed-size dtype
        The values.
    column_map : (n_columns,) int64
        New column of every old one, or -1 to drop it.
    n_out : int
        Number of new columns; columns are int32 where that is enough, else int64.

    Returns
    -------
    (indptr, indices, values)
        int64 bounds, int32 or int64 columns, values of the same dtype. Entries of equal column keep their order.

    Raises
    ------
    CorruptError
        If the bounds fall or go beyond the entries, or a column is beyond `column_map` or maps beyond `n_out`.
    """
    places = column_map.astype(np.int32 if n_out <= np.iinfo(np.int32).max else np.int64)
    bounds = np.zeros(len(indptr), np.int64)
    np.cumsum(count_kept(indptr, indices, places, "A sparse matrix"), out=bounds[1:])
    out, positions, moved = (np.empty(bounds[-1], dtype) for dtype in (places.dtype, np.int64, values.dtype))
    fault = map_rows(indptr, indices, places, n_out, bounds[:-1], out, positions)
    # The compiled code marks columns in a bitmap, which holds a column once. `count_kept` has checked `indices`, so
    # `places[indices]` stays inside.
    if fault == REPEATED:
        positions = _stable_order(indptr, places[indices])
        return bounds, places[indices[positions]], values[positions]
    refuse_rows(fault, "A sparse matrix with new columns", None, n_out)
    # each place is within; "clip" alone needs no second buffer
    return bounds, out, np.take(values, positions, out=moved, mode="clip")


def sorting_order(indptr: NDArray[np.int64], indices: NDArray[Any], n_columns: int) -> NDArray[np.int64]:
    """Find the order that sorts the entries of every row by column; equal columns keep their order.

    Parameters
    ----------
    indptr : (n_rows + 1,) int64
        Row bounds, starting at 0.
    indices : (nnz,) integers
        Columns.
    n_columns : int
        Number of columns.

    Returns
    -------
    (nnz,) int64
        ``indices[order]`` ascends in every row.

    Raises
    ------
    CorruptError
        If the bounds fall or go beyond the entries, or a column is beyond the last.

    Examples
    --------
    >>> sorting_order(np.array([0, 2, 4]), np.array([5, 3, 1, 1]), 6)
    array([1, 0, 2, 3])
    """
    return remap_csr(indptr, indices, np.arange(len(indices)), np.arange(n_columns), n_columns)[2]


def _stable_order(indptr: NDArray[np.int64], columns: NDArray[Any]) -> NDArray[np.int64]:
    """Order the entries with columns of 0 or more by row and column; they are few, or a file is odd, where this is called."""
    kept = np.flatnonzero(columns >= 0)
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    # `lexsort` is stable and sorts by its last key first: by row, then by column.
    order: NDArray[np.int64] = kept[np.lexsort((columns[kept], rows[kept]))]
    return order


_GATHER_ENTRIES_PER_THREAD = 2**19
_SEARCH_BELOW = 32
_BEYOND = 16
_MAP_TYPES = (I32, I64, U8, U32, I32, I64)
_INT32 = np.dtype(np.int32)


Frames: TypeAlias = tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint8]]
"""Addresses, sizes and states of chunks."""


@dataclass(frozen=True)
class RowGroup:
    """One sparse group of a gather.

    Parameters
    ----------
    columns, values : ArrayReader
        Columns and values of its entries, of equal length.
    column_map : (n_local,) integers
        Column of the result for every stored one, -1 where it is left out.
    """

    columns: ArrayReader
    values: ArrayReader
    column_map: NDArray[np.int64]


class _ChunkTable:
    """Addresses of all chunks of one array per group; local shards are mapped when first needed and stay mapped."""

    def __init__(self, readers: Sequence[ArrayReader]) -> None:
        self.readers = readers
        self.is_local = all(reader.folder is not None for reader in readers)
        counts = [-(-reader.spec.n_rows // reader.spec.chunk_shape[0]) for reader in readers]
        self.first_slot = np.cumsum([0, *counts])
        # As `struct ra_array` has it: first slot, entries of a chunk, kind, bytes of an entry.
        self.groups = np.array(
            [
                (slot, r.spec.chunk_shape[0], _kind(r), np.dtype(r.spec.dtype).itemsize)
                for slot, r in zip(self.first_slot.tolist(), readers, strict=False)
            ],
            np.int64,
        ).reshape(len(readers), 4)
        self.chunk_bytes = int((self.groups[:, 1] * self.groups[:, 3]).max(initial=1))
        shards = [-(-count // r.spec.chunks_per_shard) for count, r in zip(counts, readers, strict=True)]
        self.first_shard = np.cumsum([0, *shards])
        self.grid = np.array(
            [
                (r.spec.chunks_per_shard * r.spec.chunk_shape[0], shard)
                for r, shard in zip(readers, self.first_shard.tolist(), strict=False)
            ],
            np.int64,
        ).reshape(len(readers), 2)
        # Remote shards count as mapped; `frames_of` fetches their chunks at every call.
        self.mapped = np.full(self.first_shard[-1], not self.is_local)
        self.owners: list[Any] = []
        self.lock = threading.Lock()
        self.frames = self._fresh()

    def _fresh(self) -> Frames:
        """Return empty addresses, sizes and states; pages that are not touched cost nothing."""
        n = int(self.first_slot[-1])
        return np.zeros(n, np.uint64), np.zeros(n, np.int64), np.zeros(n, np.uint8)

    @property
    def shards(self) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Entries of a shard and first shard of every group, and which shards are mapped; of remote ones, all."""
        return self.grid, self.mapped.view(np.uint8)

    def frames_of(
        self, group: NDArray[np.int32], start: NDArray[np.int64], end: NDArray[np.int64]
    ) -> tuple[Frames, list[Any]]:
        """Return the frames of all chunks that rows touch, and what must be kept until they are read."""
        if not self.is_local:
            return self._fetch(group, start // self.groups[group, 1], (end - 1) // self.groups[group, 1])
        low = self.grid[group, 1] + start // self.grid[group, 0]
        high = self.grid[group, 1] + (end - 1) // self.grid[group, 0]
        # +1 at a row's first shard, -1 after its last: where the running sum is positive, rows touch the shard.
        begun = (
            np.bincount(low, minlength=len(self.mapped)) - np.bincount(high + 1, minlength=len(self.mapped) + 1)[:-1]
        )
        with self.lock:
            for shard in np.flatnonzero((np.cumsum(begun) > 0) & ~self.mapped).tolist():
                self._map(shard)
        return self.frames, self.owners

    def native(self, frames: Frames) -> Array:
        """Return what the library takes, of some frames."""
        addresses, sizes, states = frames
        return Array(
            U64.address(addresses), I64.address(sizes), OUT_U8.address(states), len(sizes), I64.address(self.groups)
        )

    def _map(self, shard: int) -> None:
        """Map one local shard."""
        if self.mapped[shard]:
            return
        g = int(np.searchsorted(self.first_shard, shard, side="right")) - 1
        per_shard = self.readers[g].spec.chunks_per_shard
        begin = (shard - int(self.first_shard[g])) * per_shard
        slot = int(self.first_slot[g]) + begin
        n = min(per_shard, int(self.first_slot[g + 1]) - slot)
        self._put(g, slot, np.arange(begin, begin + n), self.frames, self.owners)
        # Last, because `gather` reads it without the lock and then takes the frames of the shard as complete.
        self.mapped[shard] = True

    def _put(
        self, g: int, slot: int | NDArray[np.int64], chunks: NDArray[np.int64], frames: Frames, kept: list[Any]
    ) -> None:
        """Enter the frames of some chunks of a group."""
        found = fetch_frames(self.readers[g], chunks)
        positions = slot + np.arange(len(chunks)) if isinstance(slot, int) else slot
        frames[0][positions], frames[1][positions] = found.addresses, found.sizes
        kept.extend(found.owners)

    def _fetch(
        self, group: NDArray[np.int32], first: NDArray[np.int64], last: NDArray[np.int64]
    ) -> tuple[Frames, list[Any]]:
        """Fetch the chunks that rows touch; neighbouring rows and chunks share requests."""
        # Fresh states too: they say which chunks were checked, and newly fetched bytes were not.
        frames, kept = self._fresh(), list[Any]()

        def fetch(g: int) -> None:
            selected = group == g
            touched = np.zeros(int(self.first_slot[g + 1] - self.first_slot[g]) + 1, np.int64)
            np.add.at(touched, first[selected], 1)
            np.add.at(touched, last[selected] + 1, -1)
            chunks = np.flatnonzero(np.cumsum(touched)[:-1])
            self._put(g, self.first_slot[g] + chunks, chunks, frames, kept)

        map_groups(fetch, np.unique(group).tolist())
        return frames, kept

    def fault(self, slot: int, status: int) -> CorruptError:
        """Name a bad chunk."""
        g = int(np.searchsorted(self.first_slot, slot, side="right")) - 1
        return bad_chunk(self.readers[g], slot - int(self.first_slot[g]), FAULTS[status])


class RowGatherer:
    """Reads rows of ragged groups into one CSR, columns mapped, in any order and as often as asked.

    Usable from several threads at once. It holds memory maps, so every process creates its own.

    Parameters
    ----------
    groups : sequence of RowGroup
        For which `can_gather` is true.
    n_cols : int
        Columns of the result.
    dtype : dtype
        Of the result's values.
    threads : int
        Threads of one call; the result does not depend on them.
    pool : BufferPool, optional
        Where the memory of results comes from; fresh memory without one.

    Raises
    ------
    CorruptError
        If columns and values of a group differ in length.
    """

    def __init__(
        self,
        groups: Sequence[RowGroup],
        n_cols: int,
        dtype: np.dtype[Any],
        *,
        threads: int = DECODE_THREADS,
        pool: BufferPool | None = None,
    ) -> None:
        self.n_cols, self.dtype, self.threads = n_cols, dtype, threads
        self.pool = pool or BufferPool(0)
        for group in groups:
            if group.columns.spec.n_rows != group.values.spec.n_rows:
                raise CorruptError(f"{group.columns.name} and {group.values.name} differ in length; run validate().")
        self.columns = _ChunkTable([group.columns for group in groups])
        self.values = _ChunkTable([group.values for group in groups])
        # The -2 at the end of each map is what a column finds that the group does not have.
        ends = [np.append(group.column_map, -2).astype(np.int32) for group in groups]
        if any(int(m.max()) >= n_cols for m in ends):
            raise SchemaError(f"A column map leads beyond the {n_cols} columns of the result.")
        self.complete = all(-1 not in m for m in ends)
        bounds = np.cumsum([0, *map(len, ends)])
        kept_maps = [m[m >= 0] for m in ends]
        monotone = np.array([bool((m[1:] > m[:-1]).all()) for m in kept_maps], np.uint8)
        self.maps: tuple[NDArray[Any], ...] = (
            np.concatenate([np.empty(0, np.int32), *ends]),
            bounds,
            monotone,
            *_few_columns(groups),
        )
        n_entries = np.array([group.columns.spec.n_rows for group in groups], np.int64)
        kept = list(map(len, kept_maps))
        before = np.cumsum(n_entries) - n_entries
        self.facts = np.stack([n_entries, before, np.diff(bounds) - 1, np.array(kept, np.int64)], axis=1)
        # Stored floats are copied as bit patterns, numbers are converted to the result's type.
        self.as_bits = bool(groups) and all(np.dtype(g.values.spec.dtype).kind == "f" for g in groups)
        self.code = TYPE_CODES["uint32" if self.as_bits else dtype.name]
        self.own = threading.local()

    def gather(
        self, group: NDArray[np.int32], start: NDArray[np.int64], end: NDArray[np.int64], *, sort: bool = True
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
        """Read rows.

        Parameters
        ----------
        group : (n,) int32
            Group of every row; -1 for an empty row.
        start, end : (n,) int64
            Entries of every row in the arrays of its group.
        sort : bool
            Whether the columns of every row are sorted. If not, and no column is left out, they come as stored.

        Returns
        -------
        (indptr, indices, values)
            (n + 1,) int64, int32, and the result's dtype.

        Raises
        ------
        CorruptError
            If a range is outside its group, a chunk is damaged, or a column is not one of its group.
        """
        n = len(group)
        group, start, end = np.ascontiguousarray(group), np.ascontiguousarray(start), np.ascontiguousarray(end)
        order, places, at, counted = (np.empty(size, np.int64) for size in (n, n, n + 1, 3))
        shards = *self.columns.shards, *self.values.shards
        status = library().ra_arrange_rows(
            group, start, end, n, self.facts, len(self.facts), *shards, order, places, at, counted
        )
        found, longest, mapped = counted.tolist()
        if status != GOOD:
            raise self._misplaced(group, start, end, row=found, outside=status == OUTSIDE)
        order = order[:found][np.argsort(places[:found])] if found > 1 else order[:found]
        if mapped and self.columns.is_local and self.values.is_local:
            frames = [(table.frames, table.owners) for table in (self.columns, self.values)]
        else:
            touched = group[order], start[order], end[order]
            frames = [table.frames_of(*touched) for table in (self.columns, self.values)]
        # Without `counts` compiled code writes rows as stored, which is right only if it leaves no column out.
        plain = self.complete and not sort
        total = int(at[-1])
        indices, values = self.pool.take(total, _INT32), self.pool.take(total, self.dtype)
        counts = None if plain else np.zeros(n, np.int64)
        out = Result(
            OUT_I32.address(indices), OUT.address(values), 0 if counts is None else OUT_I64.address(counts), total, self.n_cols,
            self.code,
        )  # fmt: skip
        rows = (group, start, end, at)
        work = total if plain else int((end[order] - start[order]).sum())
        if found and (self.threads == 1 or work < 2 * _GATHER_ENTRIES_PER_THREAD):
            self._run(order, rows, frames, out, longest)
        elif found:
            map_decode(
                lambda run: self._run(run, rows, frames, out, longest),
                _cut(order, end - start, self.threads),
            )
        if counts is None:
            return at, indices, values
        return (at, indices, values) if int(counts.sum()) == total else _compact(at, counts, indices, values)

    def _run(
        self,
        order: NDArray[np.int64],
        rows: tuple[NDArray[Any], ...],
        frames: Sequence[tuple[Frames, list[Any]]],
        out: Result,
        longest: int,
    ) -> None:
        """Read a run of rows in the calling thread."""
        group, start, end, targets = rows
        given = Rows(
            I64.address(order), order.size, I32.address(group), *(I64.address(item) for item in (start, end, targets)), group.size,
            len(self.facts),
        )  # fmt: skip
        tables = (Array * 2)(self.columns.native(frames[0][0]), self.values.native(frames[1][0]))
        maps = Maps(*(kind.address(item) for kind, item in zip(_MAP_TYPES, self.maps, strict=True)))
        room, _kept = self._room(longest, sort=bool(out.counts))
        where, which = ctypes.c_int64(0), ctypes.c_int32(0)
        status = library().ra_gather(given, tables, maps, out, room, where, which)
        if status in {OUTSIDE, REPEATED}:
            path = self.columns.readers[int(group[where.value])].name
            fault = "a feature that its list has not got" if status == OUTSIDE else "a feature twice in one cell"
            raise CorruptError(f"{path} names {fault}; run validate().")
        if status != GOOD:
            raise (self.values if which.value else self.columns).fault(where.value, status)

    def _room(self, longest: int, *, sort: bool) -> tuple[Room, list[NDArray[Any]]]:
        """Return the scratch of the calling thread, made when it first reads, and what must be kept while it is used."""
        if not hasattr(self.own, "chunks"):
            n_bytes = max(self.columns.chunk_bytes, self.values.chunk_bytes)
            self.own.chunks = [np.empty(n_bytes, np.uint8) for _ in range(3)]
        chunks: list[NDArray[Any]] = self.own.chunks
        sizes = [longest + _BEYOND] * 3 + [self.n_cols // 64 + 1, self.n_cols + 1] if sort else [0] * 5
        slot = self.dtype if self.dtype.itemsize < 4 else np.dtype(np.uint32)
        kinds: list[DTypeLike] = [np.int32, np.uint32, np.int64, np.uint64, slot]
        extra = [np.empty(size, kind) for size, kind in zip(sizes, kinds, strict=True)]
        # The bitmap of columns must start as zeros; the other buffers may hold anything.
        extra[3][:] = 0
        kept: list[NDArray[Any]] = [*chunks, *extra]
        places = [OUT.address(item) for item in kept]
        return Room(*places[:3], chunks[0].size, *places[3:6], longest, *places[6:]), kept

    def _misplaced(
        self, group: NDArray[np.int32], start: NDArray[np.int64], end: NDArray[np.int64], *, row: int, outside: bool
    ) -> CorruptError:
        """Return the error of an invalid pointer."""
        g = int(group[row])
        name = self.columns.readers[g].name
        if outside:
            return CorruptError(
                f"A cell points to [{start[row]}, {end[row]}) of {name}, which has {self.facts[g, 0]} entries; run "
                "validate()."
            )
        return CorruptError(
            f"A cell points to {end[row] - start[row]:,} entries of {name}: it names a feature twice, or one that its list "
            "has not got; run validate()."
        )


def _cut(order: NDArray[np.int64], lengths: NDArray[np.int64], threads: int) -> list[NDArray[np.int64]]:
    """Cut ordered rows into runs of about equally many entries, one for each thread where there are enough."""
    total = np.cumsum(lengths[order])
    n = min(threads, 1 + int(total[-1]) // _GATHER_ENTRIES_PER_THREAD)
    cuts = np.searchsorted(total, np.linspace(0, int(total[-1]), n + 1)[1:-1])
    return [run for run in np.split(order, cuts) if run.size]


def _few_columns(groups: Sequence[RowGroup]) -> tuple[NDArray[np.uint32], NDArray[np.int32], NDArray[np.int64]]:
    """List the kept columns, and what they map to, of packed groups that keep so few that searching is faster than mapping."""
    wanted, targets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    bounds = [0]
    for group in groups:
        kept = np.flatnonzero(group.column_map >= 0)
        if _SEARCH_BELOW * len(kept) <= len(group.column_map) and is_packed(group.columns) and is_packed(group.values):
            wanted.append(kept)
            targets.append(group.column_map[kept])
        bounds.append(sum(map(len, wanted)))
    return np.concatenate(wanted).astype(np.uint32), np.concatenate(targets).astype(np.int32), np.array(bounds)


def can_gather(groups: Sequence[RowGroup], dtype: np.dtype[Any]) -> bool:
    """Return whether the compiled gather supports the arrays of all groups and the result's type; else use `read_ranges`."""
    if dtype.name not in TYPE_CODES:
        return False
    # Floats are copied as bits and cannot be converted: either all values are float32, or none is a float.
    floats = {np.dtype(group.values.spec.dtype).kind == "f" for group in groups}
    types = {group.values.spec.dtype for group in groups}
    return (
        all(_kind(group.columns) >= 0 and np.dtype(group.columns.spec.dtype).kind == "u" for group in groups)
        and all(_kind(group.values) >= 0 and np.dtype(group.values.spec.dtype).kind in "uf" for group in groups)
        and (floats <= {False} or types == {dtype.name} == {"float32"})
    )


def _kind(reader: ArrayReader) -> int:
    """Return how the library reads an array's chunks; -1 where it does not."""
    decoder, spec, kind = reader.decoder, reader.spec, native_kind(reader)
    narrow = np.dtype(spec.dtype).itemsize <= 4 and np.dtype(spec.dtype).kind in "uf" and len(spec.shape) == 1
    # Compiled code reads a chunk that is not stored as zeros, so any other fill value needs `read_ranges`.
    if decoder is None or kind is None or not narrow or spec.fill().tobytes().strip(b"\0"):
        return -1
    return kind if kind == PACKED else kind + CHECKED * decoder.checksum


def _compact(
    at: NDArray[np.int64], counts: NDArray[np.int64], indices: NDArray[np.int32], values: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
    """Close the gaps behind rows of which entries were left out."""
    indptr = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    kept = np.empty(int(indptr[-1]), np.int32), np.empty(int(indptr[-1]), values.dtype)
    for array, out in zip((indices, values), kept, strict=True):
        move_runs(array, at[:-1], counts, indptr[:-1], out)
    return indptr, *kept


def move_runs(
    values: NDArray[Any],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    targets: NDArray[np.int64],
    out: NDArray[Any],
) -> None:
    """Copy runs of values, ``out[targets[i] : targets[i] + counts[i]] = values[starts[i] : starts[i] + counts[i]]``.

    Parameters
    ----------
    values : (n,) any fixed-size dtype
        What is copied, converted to the dtype of `out`.
    starts, counts, targets : (n_runs,) int64
        The runs.
    out : (n_out,) any fixed-size dtype
        Written to.

    Raises
    ------
    CorruptError
        If a run lies outside `values` or `out`; then some runs may have been copied.

    Examples
    --------
    >>> out = np.zeros(3, np.int64)
    >>> move_runs(np.arange(5), np.array([3, 0]), np.array([2, 1]), np.array([0, 2]), out)
    >>> out
    array([3, 4, 0])
    """
    values, size = np.ascontiguousarray(values, out.dtype), out.itemsize
    if library().ra_move_runs(values, len(values), starts, counts, targets, len(starts), size, out, len(out)) != GOOD:
        raise CorruptError("Rows of a sparse matrix lie outside its entries; run validate('deep').")


def centred_svd(
    multiply: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    multiply_transposed: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    mean: NDArray[np.float64],
    n_rows: int,
    k: int,
    *,
    n_oversamples: int,
    n_iter: int,
    seed: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the first singular vectors and values of a matrix minus the means of its columns, by random projections.

    The matrix is only ever multiplied, so it may be sparse, or be read in blocks: it is centred in the products.

    Parameters
    ----------
    multiply, multiply_transposed : callable
        Product of the matrix, or of its transpose, with a dense one; a new array.
    mean : (n_columns,) float64
        Means of the columns.
    n_rows, k : int
        Rows of the matrix, and wanted vectors.
    n_oversamples, n_iter : int
        Additional random vectors, and power iterations: more of either give more exact vectors.
    seed : int
        Of the random vectors.

    Returns
    -------
    left, values, right : (n_rows, k), (k,) and (k, n_columns) float64
        Fewer than `k` of a smaller matrix.
    """

    def forward(basis: NDArray[np.float64]) -> NDArray[np.float64]:
        product = multiply(basis)
        product -= mean @ basis
        return product

    def backward(basis: NDArray[np.float64]) -> NDArray[np.float64]:
        product = multiply_transposed(basis)
        product -= np.outer(mean, basis.sum(axis=0))
        return product

    size = min(k + n_oversamples, n_rows, len(mean))
    basis = np.linalg.qr(forward(np.random.default_rng(seed).standard_normal((len(mean), size))))[0]
    for _ in range(n_iter):
        # Without QR in between, rounding would turn all vectors towards the first singular one.
        basis = np.linalg.qr(forward(np.linalg.qr(backward(basis))[0]))[0]
    left, values, right = np.linalg.svd(backward(basis).T, full_matrices=False)
    return basis @ left[:, :k], values[:k], right[:k]
