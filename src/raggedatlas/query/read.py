"""Read the cells of a plan: one read per group and array, columns mapped, rows in the requested order."""

from collections.abc import Iterator, Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.model.assets import VALUES
from raggedatlas.model.batch import Batch, Block, CsrBlock, DenseBlock, SpaceBatch
from raggedatlas.query.read_plan import ColumnCopy, PartPlan, ReadPlan, SpacePlan, read_group_rows
from raggedatlas.store.gather import RowGatherer, RowGroup
from raggedatlas.store.native import I64, REPEATED, RaColumns, library
from raggedatlas.store.read import ArrayReader, is_packed, read_bounds, read_ranges
from raggedatlas.store.runtime import DECODE_THREADS, BufferPool, map_groups
from raggedatlas.store.sparse import move_runs, sorting_order

BLOCK_BYTES = 64 * 2**20
"""Approximate bytes of one step when a query is streamed."""


def read_batches(plan: ReadPlan, n: int) -> Iterator[Batch]:
    """Read the cells of every space and result of a plan in order, n at a time, aligned to one table of metadata."""
    readers = {name: SpaceReader(space) for name, space in plan.spaces.items()}
    results = {name: SpaceReader(space) for name, space in plan.results.items()}
    for start in range(0, plan.n_cells, n):
        rows = np.arange(start, min(start + n, plan.n_cells))
        spaces = {name: reader.read_batch(rows) for name, reader in readers.items()}
        obsm = {name: reader.read(rows).layers[VALUES] for name, reader in results.items()}
        yield Batch(plan.obs.take(rows), spaces, obsm)


class PartReader:
    """Reads the layers of one part, any cells in any order, any number of times and from any thread.

    Create one in every process: it holds memory maps.

    Parameters
    ----------
    space, part : SpacePlan, PartPlan
        From a plan.
    threads : int
        Threads of one call; the result does not depend on them.
    pool : BufferPool, optional
        Where the memory of results comes from.
    """

    def __init__(
        self, space: SpacePlan, part: PartPlan, threads: int = DECODE_THREADS, pool: BufferPool | None = None
    ) -> None:
        self.space, self.part, self.threads = space, part, threads
        self._gatherer: RowGatherer | None = None
        if space.sparse:
            groups = [
                RowGroup(group.indices, group.layers, space.column_maps[group.layout_uid])
                for group in part.groups if group.indices is not None
            ]  # fmt: skip
            dtypes = {layer: space.dtypes[layer] for layer in part.layers}
            self._gatherer = RowGatherer(groups, space.n_read, dtypes, threads=threads, pool=pool)

    @property
    def is_exact(self) -> bool:
        """Whether reading all cells at once takes no more memory than the result."""
        in_place = self._gatherer is not None and self._gatherer.in_place
        return in_place and not len(self.space.merged) and not self.space.nan

    def read(self, rows: NDArray[np.int64], *, sort: bool = True) -> Block:
        """Read some cells.

        Parameters
        ----------
        rows : (k,) integers
            Positions in the plan, any order; they may repeat.
        sort : bool
            Whether the columns of every row must ascend; leaving them as stored is faster.

        Returns
        -------
        CsrBlock or DenseBlock
            Layers in their result dtypes; no column twice in a row.

        Raises
        ------
        CorruptError
            If stored bytes are not what was written.
        """
        space, part = self.space, self.part
        if self._gatherer is None:
            return _read_dense(space, part, rows)
        code = part.code[rows]
        # Columns must ascend for the searches of `sum_merged_columns`; rows with NaN put in are always sorted.
        sort = sort or bool(len(space.merged)) or space.nan
        found = self._gatherer.gather(code, part.start[rows], part.end[rows], sort=sort)
        block = sum_merged_columns(CsrBlock(*found, space.n_read), space)
        return _with_unmeasured(block, space, part, code) if space.nan else block

    def column_copies(self, *, whole: bool = False) -> dict[int, NDArray[np.int64]]:
        """Return the groups that `read_blocks` reads from their column-sorted copies."""
        return choose_column_copies(self.space, self.part) if whole or is_one_block(self.space) else {}

    def read_blocks(
        self, *, whole: bool = False, n_bytes: int | None = None
    ) -> Iterator[tuple[NDArray[np.int64], Block]]:
        """Read all cells of a plan in which none repeats, in order, in runs of bounded size.

        Few features of many cells come from the column-sorted copies where that decodes less.

        Parameters
        ----------
        whole : bool
            Whether the memory of the full result may be allocated at once.
        n_bytes : int, optional
            About how much one step takes, instead of `BLOCK_BYTES`.
        """
        n = len(self.space.present)
        chosen = self.column_copies(whole=whole)
        if not chosen:
            runs = row_blocks(self.space) if n_bytes is None else row_blocks(self.space, n_bytes)
            runs = iter([np.arange(n)]) if whole and self.is_exact else runs
            return ((rows, self.read(rows)) for rows in runs)
        rows, block = read_column_copies(self.space, self.part, chosen)
        others = np.ones(n, bool)
        others[rows] = False
        rest = np.flatnonzero(others)
        if not len(rest):
            return iter([(rows, block)])
        other = self.read(rest)
        assert isinstance(other, CsrBlock)
        return iter([(np.arange(n), _place_rows([block, other], [rows, rest], n))])


def block_plans(
    space: SpacePlan, part: PartPlan, n_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[NDArray[np.int64], SpacePlan]]:
    """Plan each block that `PartReader.read_blocks` reads row by row, with the cells of the block, for `read_block` on a worker."""
    alone = replace(space, parts=(part,))
    return ((rows, alone.take(rows).narrow()) for rows in row_blocks(space, n_bytes))


def read_block(space: SpacePlan) -> Block:
    """Open the arrays of a space with one part, and read all of its cells."""
    return PartReader(space, space.parts[0]).read(np.arange(len(space.present)))


class SpaceReader:
    """Reads the cells of one space, all its parts put together; see `PartReader` for the parameters."""

    def __init__(self, space: SpacePlan, threads: int = DECODE_THREADS, pool: BufferPool | None = None) -> None:
        self.space = space
        self.parts = [PartReader(space, part, threads, pool) for part in space.parts]

    def read(self, rows: NDArray[np.int64], *, sort: bool = True) -> Block:
        """Read some cells in the order given; see `PartReader.read`. Several parts are always sorted."""
        layers = self.space.layers
        if len(self.parts) == 1:
            block = self.parts[0].read(rows, sort=sort)
            return replace(block, layers={layer: block.layers[layer] for layer in layers})
        blocks = [part.read(rows) for part in self.parts]
        if self.space.sparse:
            return _join_patterns([b for b in blocks if isinstance(b, CsrBlock)], layers)
        found = {layer: values for block in blocks for layer, values in block.layers.items()}
        return DenseBlock({layer: found[layer] for layer in layers})

    def read_batch(self, rows: NDArray[np.int64]) -> SpaceBatch:
        """Read some cells, in the order given, with what their layouts measured; rows may repeat.

        Parameters
        ----------
        rows : (k,) integers
            Positions in the plan.

        Returns
        -------
        SpaceBatch
            Layers share one pattern of entries: where they differ on disk, entries that a layer lacks are 0.
        """
        space = self.space
        return SpaceBatch(
            block=self.read(rows),
            features=space.features.astype(str),
            present=space.present[rows],
            layout_uids=np.array([*space.layouts, ""], dtype=str)[space.layout_code[rows]],
            measured=dict(zip(space.layouts, space.measured, strict=True)),
        )


def row_blocks(space: SpacePlan, n_bytes: int = BLOCK_BYTES) -> Iterator[NDArray[np.int64]]:
    """Split all cells of a space into runs of about `n_bytes` to read, at least one cell each."""
    total = np.cumsum(space.work_bytes())
    start, n = 0, len(total)
    while start < n:
        before = int(total[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(total, before + n_bytes, side="right")))
        yield np.arange(start, stop)
        start = stop


def _join_patterns(blocks: Sequence[CsrBlock], layers: Sequence[str]) -> CsrBlock:
    """Align layers with different sparsity patterns to the union of their entries."""
    # At least 1, because the columns are taken back out of the keys by `% n_cols`.
    n_rows, n_cols = blocks[0].n_rows, max(1, blocks[0].n_cols)
    keys = [np.repeat(np.arange(n_rows), np.diff(b.indptr)) * n_cols + b.indices for b in blocks]
    union = np.unique(np.concatenate(keys))
    indptr = np.searchsorted(union, np.arange(n_rows + 1) * n_cols).astype(np.int64)
    found: dict[str, NDArray[Any]] = {}
    for block, key in zip(blocks, keys, strict=True):
        at = np.searchsorted(union, key)
        for layer, values in block.layers.items():
            found[layer] = np.zeros(len(union), values.dtype)
            found[layer][at] = values
    indices = (union % n_cols).astype(blocks[0].indices.dtype)
    return CsrBlock(indptr, indices, {layer: found[layer] for layer in layers}, blocks[0].n_cols)


def _with_unmeasured(block: CsrBlock, space: SpacePlan, part: PartPlan, code: NDArray[np.int32]) -> CsrBlock:
    """Add an explicit NaN for every column that the layout of a row, in group `code`, did not measure."""
    absent = [np.setdiff1d(np.arange(block.n_cols), space.column_maps[group.layout_uid]) for group in part.groups]
    added = np.array([*map(len, absent), 0])[code]
    if not added.any():
        return block
    before = np.concatenate([[0], np.cumsum(added)])
    indptr = block.indptr + before
    # Entries move on by the NaN of earlier rows; those of their own row go to its end until rows are sorted.
    old = np.arange(len(block.indices)) + np.repeat(before[:-1], np.diff(block.indptr))
    mixed = np.empty(int(indptr[-1]), np.uint32)
    mixed[old] = block.indices
    for number, columns in enumerate(absent):
        stop = indptr[1:][code == number]
        mixed[stop[:, None] - len(columns) + np.arange(len(columns))] = columns
    order = sorting_order(indptr, mixed, block.n_cols)
    layers = {}
    for layer, values in block.layers.items():
        wide = np.full(len(mixed), np.nan, values.dtype)
        wide[old] = values
        layers[layer] = wide[order]
    return CsrBlock(indptr, mixed[order].astype(block.indices.dtype), layers, block.n_cols)


def _place_rows(pieces: Sequence[CsrBlock], places: Sequence[NDArray[np.int64]], n: int) -> CsrBlock:
    """Concatenate blocks whose rows have given positions, which together are all n."""
    lengths = np.zeros(n, np.int64)
    for piece, place in zip(pieces, places, strict=True):
        lengths[place] = np.diff(piece.indptr)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    indices = np.empty(int(indptr[-1]), pieces[0].indices.dtype)
    layers = {layer: np.empty(len(indices), values.dtype) for layer, values in pieces[0].layers.items()}
    for piece, place in zip(pieces, places, strict=True):
        runs = piece.indptr[:-1], np.diff(piece.indptr), indptr[place]
        for array, out in [(piece.indices, indices), *((piece.layers[layer], layers[layer]) for layer in layers)]:
            move_runs(array, *runs, out)
    return CsrBlock(indptr, indices, layers, pieces[0].n_cols)


def _read_dense(space: SpacePlan, part: PartPlan, rows: NDArray[np.int64]) -> DenseBlock:
    code = part.code[rows]
    shape: tuple[int, ...] = (space.n_cols,)
    if not space.space.has_features and space.space.rank != 1:
        shapes = {reader.spec.row_shape for group in part.groups for reader in group.layers.values()}
        shape = next(iter(shapes)) if shapes else (0,) * space.space.rank
    layers: dict[str, NDArray[Any]] = {}
    for layer in part.layers:
        fill = np.nan if space.nan else 0
        out = np.full((len(rows), *shape), fill, space.dtypes[layer])
        for group in np.unique(code[code >= 0]).tolist():
            here = np.flatnonzero(code == group)
            values = read_group_rows(part.groups[group].layers[layer], part.start[rows[here]])
            if space.space.has_features:
                column_map = space.column_maps[part.groups[group].layout_uid]
                if values.shape[1:] != column_map.shape:
                    raise CorruptError(
                        f"The group {part.groups[group].path} has {values.shape[1:]} columns, its list {len(column_map)}."
                    )
                kept = np.flatnonzero((column_map >= 0) & (column_map < space.n_cols))
                out[np.ix_(here, column_map[kept])] = values[:, kept]
                # One column at a time: `+=` would add only one of several columns with the same target.
                # The first column of the feature is written above, so nothing is added to the fill value.
                for local in np.flatnonzero(column_map >= space.n_cols).tolist():
                    out[here, space.merged[column_map[local] - space.n_cols]] += values[:, local]
            else:
                out[here] = values
        layers[layer] = out
    return DenseBlock(layers)


_PACKED_BLOCK = 256


@dataclass(frozen=True)
class _ColumnEntries:
    """The entries of the selected columns of one group, and the cells that they are of.

    Parameters
    ----------
    path : str
        The group, for messages.
    copy : ColumnCopy
        Its column-sorted copy.
    here : (n,) int64
        Positions of its cells in the plan, ascending.
    columns : (k,) int64
        Columns of the result, ascending.
    starts, ends : (k,) int64
        Entries of these columns in the copy.
    places : (n_entries,) int32
        Position in `here` of the cell of every entry; -1 where it is not selected.
    counts : (n,) int64
        Number of entries of each cell.
    """

    path: str
    copy: ColumnCopy
    here: NDArray[np.int64]
    columns: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    places: NDArray[np.int32]
    counts: NDArray[np.int64]


def is_one_block(space: SpacePlan) -> bool:
    """Return whether a result is small enough for one block of all cells, as column-sorted copies give it."""
    return int(space.row_bytes().sum()) <= 4 * BLOCK_BYTES


def choose_column_copies(space: SpacePlan, part: PartPlan) -> dict[int, NDArray[np.int64]]:
    """Choose the groups whose column-sorted copy is read.

    A group is chosen where the entries of its wanted columns take fewer bytes than those of its wanted rows, counting what
    is decoded for nothing at both ends of a run: a block of the packed codec, a chunk of others.

    Parameters
    ----------
    space, part : SpacePlan, PartPlan
        From a plan whose cells do not repeat.

    Returns
    -------
    dict of int to (n_local + 1,) int64
        Positions in ``part.groups``, ascending, and where the columns of the copy begin and end.
    """
    if not space.sparse or space.nan or all(group.copy is None for group in part.groups):
        return {}
    # Slot 0 counts the cells without the space, whose code is -1.
    lengths, slot = part.end - part.start, part.code + 1
    n_entries = np.bincount(slot, lengths, len(part.groups) + 1).astype(np.int64)
    n_runs = np.bincount(slot, lengths > 0, len(part.groups) + 1).astype(np.int64)
    chosen = {}
    for number, group in enumerate(part.groups):
        column_map = space.column_maps[group.layout_uid]
        if group.copy is None or bool((column_map >= 0).all()):
            continue
        by_row = _estimate_decoded(group.indices, int(n_entries[number + 1]), int(n_runs[number + 1]))
        if group.copy.indptr.spec.n_rows != len(column_map) + 1:
            continue
        bounds = read_bounds(group.copy.indptr, len(column_map), group.copy.indices.spec.n_rows)
        lengths = np.diff(bounds)[column_map >= 0]
        if _estimate_decoded(group.copy.indices, int(lengths.sum()), int((lengths > 0).sum())) < by_row:
            chosen[number] = bounds
    return chosen


def read_column_copies(
    space: SpacePlan, part: PartPlan, chosen: Mapping[int, NDArray[np.int64]]
) -> tuple[NDArray[np.int64], CsrBlock]:
    """Read all cells that lie in some groups from the column-sorted copies.

    Parameters
    ----------
    space, part : SpacePlan, PartPlan
        From a plan whose cells do not repeat.
    chosen : mapping of int to (n_local + 1,) int64
        From `choose_column_copies`.

    Returns
    -------
    rows : (k,) int64
        Positions of the cells in the plan, ascending.
    block : CsrBlock
        Their rows, columns ascending.

    Raises
    ------
    CorruptError
        If a copy contains a row index out of range, or a row twice in a column.
    """
    groups = list(map_groups(lambda one: _find_entries(space, part, *one), [*chosen.items()]))
    taken = np.zeros(len(part.code), bool)
    for one in groups:
        taken[one.here] = True
    rows = np.flatnonzero(taken)
    row_of = np.cumsum(taken) - 1
    indptr = np.zeros(len(rows) + 1, np.int64)
    for one in groups:
        indptr[1:][row_of[one.here]] = one.counts
    np.cumsum(indptr, out=indptr)
    indices = np.empty(int(indptr[-1]), np.int32 if space.n_read <= np.iinfo(np.int32).max else np.int64)
    layers = {layer: np.empty(len(indices), space.dtypes[layer]) for layer in part.layers}

    def fill(one: _ColumnEntries) -> None:
        # Groups share no row, so threads write to different places.
        bounds = np.zeros(len(one.starts) + 1, np.int64)
        np.cumsum(one.ends - one.starts, out=bounds[1:])
        columns = RaColumns(I64.address(bounds), I64.address(one.columns), len(one.columns), len(one.places))
        for layer, out in layers.items():
            values = read_ranges(one.copy.layers[layer], one.starts, one.ends).astype(out.dtype, copy=False)
            # Indexing `indptr` copies: each layer needs a cursor of its own, which `ra_fill_places` moves on.
            cursor = indptr[row_of[one.here]]
            last, wide = np.zeros(len(cursor), np.int32), indices.itemsize == 8
            fault = library().ra_fill_places(
                byref(columns), one.places, values, values.itemsize, cursor, last, len(cursor), indices, wide, out, len(indices)
            )  # fmt: skip
            if fault == REPEATED:
                raise CorruptError(f"The copy of {one.path} names a row twice in one column; run validate().")
            if fault:
                raise CorruptError(
                    f"The copy of {one.path} has other entries than it had when they were counted; run validate()."
                )

    map_groups(fill, groups)
    return rows, sum_merged_columns(CsrBlock(indptr, indices, layers, space.n_read), space)


def _estimate_decoded(reader: ArrayReader | None, n_entries: int, n_runs: int) -> int:
    """Estimate how many entries are decoded for `n_entries` in `n_runs` non-empty runs."""
    assert reader is not None
    extra = _PACKED_BLOCK if is_packed(reader) else reader.spec.chunk_shape[0]
    return min(n_entries + extra * n_runs, max(reader.spec.n_rows, n_entries))


def _find_entries(space: SpacePlan, part: PartPlan, number: int, bounds: NDArray[np.int64]) -> _ColumnEntries:
    """Find the entries of the selected columns of a group, and the cell of each."""
    group = part.groups[number]
    copy, column_map = group.copy, space.column_maps[group.layout_uid]
    assert copy is not None
    local = np.flatnonzero(column_map >= 0)
    # In the order of the result: rows get their columns in the order in which the columns are written.
    local = local[np.argsort(column_map[local], kind="stable")]
    here = np.flatnonzero(part.code == number)
    start, end, n = part.start[here], part.end[here], copy.row_indptr.spec.n_rows - 1
    n_entries = copy.indices.spec.n_rows
    # Ranges that are contiguous and cover all entries are the stored rows in order.
    if len(start) == n and n and start[0] == 0 and end[-1] == n_entries and np.array_equal(start[1:], end[:-1]):
        cell_of = np.arange(n, dtype=np.int32)
    else:
        rows = read_bounds(copy.row_indptr, n, n_entries)
        # Cells are found by where their entries begin; those without entries need no place.
        some = np.flatnonzero(end > start)
        cell_of = np.full(n, -1, np.int32)
        # Empty rows begin where the next row begins; of rows with one beginning, the last has the entries.
        cell_of[np.searchsorted(rows, start[some], side="right") - 1] = some
    stored = np.ascontiguousarray(read_ranges(copy.indices, bounds[local], bounds[local + 1]))
    counts, places = np.zeros(len(here) + 1, np.int64), np.empty(len(stored), np.int32)
    if library().ra_count_places(stored, stored.size, stored.itemsize, cell_of, n, counts, len(here), places):
        raise CorruptError(f"The copy of {group.path} names a row that the group has not got; run validate().")
    return _ColumnEntries(
        group.path, copy, here, column_map[local], bounds[local], bounds[local + 1], places, counts[1:]
    )


def sum_merged_columns(block: CsrBlock, space: SpacePlan) -> CsrBlock:
    """Add the columns from `n_cols` on to those that they belong to.

    Parameters
    ----------
    block : CsrBlock
        With ``space.n_read`` columns, which ascend in every row if there are columns to add.
    space : SpacePlan
        Its plan; the dtypes of its layers hold every sum.

    Returns
    -------
    CsrBlock
        With ``space.n_cols`` columns, ascending as before.
    """
    n_cols = space.n_cols
    more = np.flatnonzero(block.indices >= n_cols) if len(space.merged) else np.empty(0, np.int64)
    if not len(more):
        return CsrBlock(block.indptr, block.indices, block.layers, n_cols)
    row = np.searchsorted(block.indptr, more, side="right") - 1
    column = space.merged[block.indices[more] - n_cols]
    n_more = np.bincount(row, minlength=block.n_rows)
    # Columns ascend, so those to be added are the last of their row; the others move up by what is taken out before them.
    stop = (block.indptr[1:] - n_more)[row]
    at = _search_rows(block.indices, block.indptr[row], stop, column)
    # At `stop` is another column or row, or no entry at all, so these must not be compared.
    there = at < stop
    there[there] = block.indices[at[there]] == column[there]
    at -= (np.cumsum(n_more) - n_more)[row]
    # Several columns may be added to a feature without an entry in the row: they share one new entry.
    keys, first, number = np.unique(row[~there] * n_cols + column[~there], return_index=True, return_inverse=True)
    # Places before the insertion, as `np.insert` takes them; where they are equal, it keeps the order of the keys.
    places = at[~there][first]
    own = block.indices < n_cols
    layers: dict[str, NDArray[Any]] = {}
    for layer, values in block.layers.items():
        kept, fresh = values[own], np.zeros(len(keys), values.dtype)
        np.add.at(kept, at[there], values[more[there]])
        np.add.at(fresh, number, values[more[~there]])
        layers[layer] = np.insert(kept, places, fresh)
    indices = np.insert(block.indices[own], places, (keys % n_cols).astype(block.indices.dtype))
    lengths = np.diff(block.indptr) - n_more + np.bincount(keys // n_cols, minlength=block.n_rows)
    return CsrBlock(np.concatenate([[0], np.cumsum(lengths)]), indices, layers, n_cols)


def _search_rows(
    indices: NDArray[Any], start: NDArray[np.int64], stop: NDArray[np.int64], wanted: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each wanted column where it is, or belongs, among the ascending columns ``indices[start:stop]``."""
    low, high = start.copy(), stop.copy()
    while (unsettled := np.flatnonzero(low < high)).size:
        middle = (low[unsettled] + high[unsettled]) // 2
        below = indices[middle] < wanted[unsettled]
        low[unsettled[below]] = middle[below] + 1
        high[unsettled[~below]] = middle[~below]
    return low
