"""What is read for a query, from which arrays into which columns, frozen and picklable; and its readers: one read per group and array."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import byref
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, QueryError, StaleSourceError
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.model.assets import VALUES
from raggedatlas.model.batch import Batch, Block, CsrBlock, DenseBlock, SpaceBatch
from raggedatlas.model.choices import FeatureNames
from raggedatlas.model.frames import arrow_to_frame
from raggedatlas.model.spaces import FeatureSpace, PointerKind
from raggedatlas.store.gather import RowGatherer, RowGroup
from raggedatlas.store.location import Location
from raggedatlas.store.native import I64, REPEATED, RaColumns, library
from raggedatlas.store.read import ArrayReader, TransposedReader, is_packed, read_bounds, read_ranges, read_rows
from raggedatlas.store.runtime import DECODE_THREADS, BufferPool, map_groups
from raggedatlas.store.sparse import move_runs, sorting_order

if TYPE_CHECKING:
    import pandas as pd

BLOCK_BYTES = 64 * 2**20
"""Approximate bytes of one step when a query is streamed."""


@dataclass(frozen=True)
class InMemoryRows(ArrayReader):
    """Rows that are already in memory, in place of a stored array."""

    values: NDArray[Any] = field(kw_only=True, repr=False, compare=False)  # (n, width)

    @classmethod
    def of(cls, values: NDArray[Any], location: Location) -> "InMemoryRows":
        """Wrap an array."""
        # An `ArraySpec` refuses chunks of width 0.
        width = max(1, values.shape[1])
        spec = ArraySpec("held", (len(values), width), values.dtype.name, (1, width), None, "[]")
        return cls(location, spec, values=values)


@dataclass(frozen=True)
class ColumnCopy:
    """The column-sorted copy of a sparse group, of which the layers of a part are all there."""

    row_indptr: ArrayReader  # bounds of the rows in the group's own arrays, `csr/indptr`
    indptr: ArrayReader  # bounds of the columns in the copy
    indices: ArrayReader  # row of every entry
    layers: Mapping[str, ArrayReader]  # values


@dataclass(frozen=True)
class GroupPlan:
    """One Zarr group of a part."""

    path: str  # in the Zarr store
    layout_uid: str  # its feature list; empty for spaces without features
    indices: ArrayReader | None  # columns of the entries; None for dense groups
    layers: Mapping[str, ArrayReader]  # values
    copy: ColumnCopy | None = None

    @property
    def entry_bytes(self) -> int:
        """Stored bytes of one entry (sparse) or one row (dense), decoded."""
        readers = [*self.layers.values(), *([self.indices] if self.indices is not None else [])]
        return sum(np.dtype(r.spec.dtype).itemsize * int(np.prod(r.spec.row_shape)) for r in readers)


@dataclass(frozen=True)
class PartPlan:
    """Layers of one space that share their entries in every dataset, so that indices are read once for all.

    `group_of` is pointer column -> the group into which it points, (n_datasets + 1,), by the position of a cell's
    dataset among those of the atlas; -1 where it is none of them. By it the places of other cells are found; parts of a
    plan do without.
    """

    layers: tuple[str, ...]
    groups: tuple[GroupPlan, ...]  # all that contain rows
    code: NDArray[np.int32]  # (n_cells,): group of each cell; -1 for none
    start: NDArray[np.int64]  # (n_cells,): entries (sparse) or rows (dense) of the cell in its group's arrays
    end: NDArray[np.int64]  # (n_cells,): equal to `start` where the cell has no group
    group_of: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)

    def take(self, rows: NDArray[np.int64]) -> "PartPlan":
        """Keep some cells, in the order given."""
        return PartPlan(self.layers, self.groups, self.code[rows], self.start[rows], self.end[rows])

    def narrow(self) -> "PartPlan":
        """Drop groups and in-memory rows that no cell needs; one group stays if none is needed."""
        used = np.unique(self.code[self.code >= 0]).tolist() or [*range(len(self.groups))][:1]
        # The additional last entry is what code -1 finds, so that it stays -1.
        place = np.full(len(self.groups) + 1, -1, np.int32)
        place[used] = np.arange(len(used))
        start, end, groups = self.start.copy(), self.end.copy(), []
        for number in used:
            group, here = self.groups[number], self.code == number
            held = {n: r for n, r in group.layers.items() if isinstance(r, InMemoryRows)}
            if held:
                # The kept rows move to the front; they are taken out here, before `start` is renumbered below.
                layers = {n: InMemoryRows.of(r.values[start[here]], r.location) for n, r in held.items()}
                start[here] = np.arange(int(here.sum()))
                end[here] = start[here] + 1
                group = replace(group, layers=layers)
            groups.append(group)
        return PartPlan(self.layers, tuple(groups), place[self.code], start, end)


@dataclass(frozen=True)
class SpacePlan:
    """What is read of one feature space, and onto which columns."""

    name: str  # as requested: a feature space or a pointer column
    space: FeatureSpace
    features: NDArray[np.object_]  # (n_features,): uids in column order; empty for spaces without features
    n_cols: int  # columns of the result; 0 where rows have more than one axis
    layouts: tuple[str, ...]  # of the touched datasets, sorted
    # (n_layouts, n_features): columns that each layout measured, after corrections of the registry
    measured: NDArray[np.bool_]
    # layout -> column of the result for each local column, -1 where it is left out; from `n_cols` on, see `merged`
    column_maps: Mapping[str, NDArray[np.int64]]
    parts: tuple[PartPlan, ...]
    dtypes: Mapping[str, np.dtype[np.generic]]  # layer -> dtype of the result
    # (n_cells,): position of each cell's layout in `layouts`; -1 where the cell lacks the space or it has no features
    layout_code: NDArray[np.int32]
    present: NDArray[np.bool_]  # (n_cells,): whether the cell has this space
    nan: bool = False  # whether unmeasured values are NaN, else zero
    # (n_more,): column of the result to which each column from `n_cols` on is added while reading
    merged: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    # (k,): columns of the result that are sums in some layout; of features kept apart, their columns
    repeated: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def n_read(self) -> int:
        """Number of columns that are read, before those that are one feature are added up."""
        return self.n_cols + len(self.merged)

    @property
    def sparse(self) -> bool:
        """Whether results are CSR."""
        return self.space.kind is PointerKind.SPARSE

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers in the asked order."""
        return tuple(self.dtypes)

    def take(self, rows: NDArray[np.int64]) -> "SpacePlan":
        """Keep some cells, in the order given."""
        parts = tuple(part.take(rows) for part in self.parts)
        return replace(self, parts=parts, layout_code=self.layout_code[rows], present=self.present[rows])

    def narrow(self) -> "SpacePlan":
        """Drop groups and layouts that no cell has, so that a plan of few cells pickles small."""
        parts = tuple(part.narrow() for part in self.parts)
        kept = {group.layout_uid for part in parts for group in part.groups}
        used = np.array([uid in kept for uid in self.layouts], bool)
        place = np.append(np.where(used, np.cumsum(used) - 1, -1), -1).astype(np.int32)
        return replace(
            self,
            layouts=tuple(uid for uid in self.layouts if uid in kept),
            measured=self.measured[used] if len(used) else self.measured,
            column_maps={uid: column_map for uid, column_map in self.column_maps.items() if uid in kept},
            parts=parts,
            layout_code=place[self.layout_code],
        )

    def columns_of(self, layout_uid: str) -> NDArray[np.int64]:
        """Return the columns of the result that a layout has, ascending, (k,) int64."""
        column_map = self.column_maps[layout_uid]
        return np.unique(column_map[(column_map >= 0) & (column_map < self.n_cols)])

    def row_bytes(self) -> NDArray[np.int64]:
        """Estimate the bytes of each row in the result, (n_cells,): an upper bound, reached when no column is left out."""
        total = np.zeros(len(self.present), np.int64)
        for part in self.parts:
            width = sum(self.dtypes[layer].itemsize for layer in part.layers)
            if self.sparse:
                # A row has at most one entry per column.
                entries = np.minimum(part.end - part.start, self.n_cols) if self.n_cols else part.end - part.start
                # Layout -1 finds the last layout: for a cell without the space that is too much, never too little.
                extra = (~self.measured).sum(axis=1)[self.layout_code] if self.nan and len(self.layouts) else 0
                entries = entries + extra
                # Columns and bounds of rows are int32, of results too large for that int64, for each layer its own.
                index = 4 if max(int(entries.sum()), self.n_cols) <= np.iinfo(np.int32).max else 8
                total += entries * (width + index * len(part.layers)) + 8 * len(part.layers)
            else:
                shapes = [r.spec.row_shape for g in part.groups for r in g.layers.values()]
                total += width * (self.n_cols or max((int(np.prod(shape)) for shape in shapes), default=0))
        return total

    def work_bytes(self) -> NDArray[np.int64]:
        """Estimate the bytes that reading each row takes, (n_cells,): what is decoded of the widest part, and the row in the result."""
        decoded = np.zeros(len(self.present), np.int64)
        for part in self.parts:
            stored = max((group.entry_bytes for group in part.groups), default=0)
            # Parts are read one after the other, so only the widest is in memory with the result.
            np.maximum(decoded, (part.end - part.start) * stored, out=decoded)
        return decoded + self.row_bytes()


@dataclass(frozen=True, eq=False)
class VarTable:
    """The columns of a space: names first, as of `frame_to_arrow`."""

    table: pa.Table

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the frame."""
        return VarTable, (self.table,)

    @cached_property
    def _frame(self) -> "pd.DataFrame":
        return arrow_to_frame(self.table)

    def frame(self) -> "pd.DataFrame":
        """Return a frame that the caller owns; the texts of tens of thousands of features are turned into Python's once."""
        return self._frame.copy()

    def measured(self, space: SpacePlan) -> "pd.DataFrame":
        """Return which layout measured which feature, (n_vars, n_layouts) bool, layouts as columns."""
        import pandas as pd

        return pd.DataFrame(
            np.ascontiguousarray(space.measured.T), index=self._frame.index, columns=list(space.layouts)
        )


@dataclass(frozen=True)
class ReadPlan:
    """All that a reader needs, without the catalog; picklable for threads and processes."""

    # or a `LazyTable`; a row per cell in the order of the result: uid, cell_name, dataset, the asked columns
    obs: pa.Table
    spaces: Mapping[str, SpacePlan]
    n_without: int = 0  # cells that were chosen but have none of the spaces, and are left out
    provenance: Mapping[str, str | int] = field(default_factory=dict)  # uri, snapshot, label, query, ...
    # results of models to read as well, with the layer `VALUES`; NaN where a cell has none
    results: Mapping[str, SpacePlan] = field(default_factory=dict)
    # members of `obsm` that the datasets of the result share, with the layer `VALUES`; see `plan_elements`
    obsm: Mapping[str, SpacePlan] = field(default_factory=dict)
    # `<column>_colors` for `uns`, (n_categories,) each
    colors: Mapping[str, NDArray[np.object_]] = field(default_factory=dict)
    var: VarTable | None = None  # the columns of the only space; None in a plan that is not for an AnnData
    names: FeatureNames = "id"  # what names the columns
    # for a MuData: one plan for each space, of the cells that have it
    modalities: "Mapping[str, ReadPlan]" = field(default_factory=dict)

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return int(self.obs.num_rows)

    def part(self, start: int, stop: int) -> "ReadPlan":
        """Return the plan of the cells ``[start, stop)``, without the groups that only other cells need."""
        rows = np.arange(start, stop)
        # These plans are for `read_batches`, which reads spaces and results but no `obsm`; the text of a query may be long.
        return replace(
            self,
            obs=self.obs.take(pa.array(rows)),
            spaces={name: space.take(rows).narrow() for name, space in self.spaces.items()},
            results={name: space.take(rows).narrow() for name, space in self.results.items()},
            provenance={},
        )

    def single(self) -> SpacePlan:
        """Return the only space."""
        (space,) = self.spaces.values()
        return space


def refuse_arrays(space: SpacePlan, what: str) -> None:
    """Raise if the cells of a space hold more than vectors, which is all that `what` can hold."""
    if space.space.rank != 1:
        raise QueryError(
            f"{what} holds one vector per cell, {space.name!r} has arrays of {space.space.rank} axes; read it with .batches(n)."
        )


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

    Create one in every process: it holds memory maps. `threads` are those of one call; the result does not depend on
    them. `pool` is where the memory of results comes from.
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
        """Read some cells, by their positions in the plan, in any order; they may repeat.

        `sort` makes the columns of every row ascend; leaving them as stored is faster. Layers come in their result
        dtypes, and no column is twice in a row.
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

        Few features of many cells come from the column-sorted copies where that decodes less. `whole` allows
        allocating the memory of the full result at once. `n_bytes` is about how much one step takes; None takes
        `BLOCK_BYTES`.
        """
        n = len(self.space.present)
        chosen, copied = self.column_copies(whole=whole), None
        if chosen:
            # A copy whose file has changed or is gone is done without: the rows have the same values.
            with suppress(StaleSourceError):
                copied = read_column_copies(self.space, self.part, chosen)
        if copied is None:
            # Of groups that are linked by column, each step reads all.
            by_column = any(isinstance(group.indices, TransposedReader) for group in self.part.groups)
            runs = row_blocks(self.space, n_bytes or (4 if by_column else 1) * BLOCK_BYTES)
            runs = iter([np.arange(n)]) if whole and self.is_exact else runs
            return ((rows, self.read(rows)) for rows in runs)
        rows, block = copied
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
        """Read some cells, in the order given, with what their layouts measured; `rows` may repeat.

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
            array, wanted = part.groups[group].layers[layer], part.start[rows[here]]
            values = array.values[wanted] if isinstance(array, InMemoryRows) else read_rows(array, wanted)
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
    """The entries of the selected columns of one group, and the cells that they are of."""

    path: str  # the group, for messages
    copy: ColumnCopy
    here: NDArray[np.int64]  # (n,): positions of its cells in the plan, ascending
    columns: NDArray[np.int64]  # (k,): columns of the result, ascending
    starts: NDArray[np.int64]  # (k,): where the entries of these columns begin in the copy
    ends: NDArray[np.int64]  # (k,)
    places: NDArray[np.int32]  # (n_entries,): position in `here` of each entry's cell; -1 where not selected
    counts: NDArray[np.int64]  # (n,): number of entries of each cell


def is_one_block(space: SpacePlan) -> bool:
    """Return whether a result is small enough for one block of all cells, as column-sorted copies give it."""
    return int(space.row_bytes().sum()) <= 4 * BLOCK_BYTES


def choose_column_copies(space: SpacePlan, part: PartPlan) -> dict[int, NDArray[np.int64]]:
    """Choose the groups whose column-sorted copy is read, for a plan whose cells do not repeat.

    A group is chosen where the entries of its wanted columns take fewer bytes than those of its wanted rows, counting
    what is decoded for nothing at both ends of a run: a block of the packed codec, a chunk of others. One that is
    linked by column is chosen always. Returns positions in `part.groups`, ascending, and where the columns of the copy
    begin and end, (n_local + 1,) each.
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
        # Where the rows are read from the columns, these are read at least once in any case.
        by_column = isinstance(group.indices, TransposedReader)
        if group.copy is None or (bool((column_map >= 0).all()) and not by_column):
            continue
        by_row = _estimate_decoded(group.indices, int(n_entries[number + 1]), int(n_runs[number + 1]))
        if group.copy.indptr.spec.n_rows != len(column_map) + 1:
            continue
        bounds = read_bounds(group.copy.indptr, len(column_map), group.copy.indices.spec.n_rows)
        lengths = np.diff(bounds)[column_map >= 0]
        if by_column or _estimate_decoded(group.copy.indices, int(lengths.sum()), int((lengths > 0).sum())) < by_row:
            chosen[number] = bounds
    return chosen


def read_column_copies(
    space: SpacePlan, part: PartPlan, chosen: Mapping[int, NDArray[np.int64]]
) -> tuple[NDArray[np.int64], CsrBlock]:
    """Read all cells that lie in some groups from the column-sorted copies, for a plan whose cells do not repeat.

    `chosen` is from `choose_column_copies`. Returns the positions of the cells in the plan, ascending, and their rows
    with ascending columns.
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
    assert group.indices is not None
    local = np.flatnonzero(column_map >= 0)
    # In the order of the result: rows get their columns in the order in which the columns are written.
    local = local[np.argsort(column_map[local], kind="stable")]
    here = np.flatnonzero(part.code == number)
    start, end, n = part.start[here], part.end[here], copy.row_indptr.spec.n_rows - 1
    # Of the rows: the copy of a dense matrix has fewer, as it leaves out zeros.
    n_entries = group.indices.spec.n_rows
    # Ranges that are contiguous and cover all entries are the stored rows in order.
    if len(start) == n and n and start[0] == 0 and end[-1] == n_entries and np.array_equal(start[1:], end[:-1]):
        cell_of = np.arange(n, dtype=np.int32)
    else:
        row_bounds = read_bounds(copy.row_indptr, n, n_entries)
        # Cells are found by where their entries begin; those without entries need no place.
        some = np.flatnonzero(end > start)
        cell_of = np.full(n, -1, np.int32)
        # Empty rows begin where the next row begins; of rows with one beginning, the last has the entries.
        cell_of[np.searchsorted(row_bounds, start[some], side="right") - 1] = some
    stored = np.ascontiguousarray(read_ranges(copy.indices, bounds[local], bounds[local + 1]))
    counts, places = np.zeros(len(here) + 1, np.int64), np.empty(len(stored), np.int32)
    if library().ra_count_places(stored, stored.size, stored.itemsize, cell_of, n, counts, len(here), places):
        raise CorruptError(f"The copy of {group.path} names a row that the group has not got; run validate().")
    return _ColumnEntries(
        group.path, copy, here, column_map[local], bounds[local], bounds[local + 1], places, counts[1:]
    )


def sum_merged_columns(block: CsrBlock, space: SpacePlan) -> CsrBlock:
    """Add the columns from `n_cols` on to those that they belong to.

    `block` has ``space.n_read`` columns, which ascend in every row if there are columns to add; the dtypes of its
    layers hold every sum. The result has ``space.n_cols`` columns, ascending as before.
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
