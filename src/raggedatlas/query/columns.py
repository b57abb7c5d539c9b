"""Reads few features of many cells from the column-sorted copy, where that takes fewer bytes than reading the rows."""

from collections.abc import Mapping
from ctypes import byref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.model.batch import CsrBlock
from raggedatlas.query.merging import add_merged
from raggedatlas.query.parts import ColumnCopy, PartPlan, SpacePlan
from raggedatlas.store.native import I64, REPEATED, Columns, library
from raggedatlas.store.read import ArrayReader, is_packed, read_bounds, read_ranges
from raggedatlas.store.runtime import map_groups

_PACKED_BLOCK = 256


@dataclass(frozen=True)
class _Wanted:
    """The wanted cells and columns of one group.

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
    """

    path: str
    copy: ColumnCopy
    here: NDArray[np.int64]
    columns: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def prefer_columns(space: SpacePlan, part: PartPlan) -> dict[int, NDArray[np.int64]]:
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
    lengths, slot = part.end - part.start, part.code + 1
    n_entries = np.bincount(slot, lengths, len(part.groups) + 1).astype(np.int64)
    n_runs = np.bincount(slot, lengths > 0, len(part.groups) + 1).astype(np.int64)
    chosen = {}
    for number, group in enumerate(part.groups):
        column_map = space.column_maps[group.layout_uid]
        if group.copy is None or bool((column_map >= 0).all()):
            continue
        by_row = _decoded(group.indices, int(n_entries[number + 1]), int(n_runs[number + 1]))
        if group.copy.indptr.spec.n_rows != len(column_map) + 1:
            continue
        bounds = read_bounds(group.copy.indptr, len(column_map), group.copy.indices.spec.n_rows)
        lengths = np.diff(bounds)[column_map >= 0]
        if _decoded(group.copy.indices, int(lengths.sum()), int((lengths > 0).sum())) < by_row:
            chosen[number] = bounds
    return chosen


def read_columns(
    space: SpacePlan, part: PartPlan, chosen: Mapping[int, NDArray[np.int64]]
) -> tuple[NDArray[np.int64], CsrBlock]:
    """Read all cells that lie in some groups from the column-sorted copies.

    Parameters
    ----------
    space, part : SpacePlan, PartPlan
        From a plan whose cells do not repeat.
    chosen : mapping of int to (n_local + 1,) int64
        From `prefer_columns`.

    Returns
    -------
    rows : (k,) int64
        Positions of the cells in the plan, ascending.
    block : CsrBlock
        Their rows, columns ascending.

    Raises
    ------
    CorruptError
        If a copy names a row that its group has not got, or one twice in a column.
    """
    wanted = [_wanted(space, part, number, bounds) for number, bounds in chosen.items()]
    taken = np.zeros(len(part.code), bool)
    for one in wanted:
        taken[one.here] = True
    rows = np.flatnonzero(taken)
    row_of = np.cumsum(taken) - 1
    found = map_groups(lambda one: _count(part, one), wanted)
    indptr = np.zeros(len(rows) + 1, np.int64)
    for one, (_, counts) in zip(wanted, found, strict=True):
        indptr[1:][row_of[one.here]] = counts
    np.cumsum(indptr, out=indptr)
    indices = np.empty(int(indptr[-1]), np.int32 if space.n_read <= np.iinfo(np.int32).max else np.int64)
    layers = {layer: np.empty(len(indices), space.dtypes[layer]) for layer in part.layers}

    def fill(job: tuple[_Wanted, NDArray[np.int32]]) -> None:
        one, places = job
        for layer, values in layers.items():
            _fill(one, layer, places, indptr[row_of[one.here]], (indices, values))

    map_groups(fill, [(one, places) for one, (places, _) in zip(wanted, found, strict=True)])
    return rows, add_merged(CsrBlock(indptr, indices, layers, space.n_read), space)


def _decoded(reader: ArrayReader | None, n_entries: int, n_runs: int) -> int:
    """Estimate how many entries are decoded for so many in runs that are not empty."""
    assert reader is not None
    extra = _PACKED_BLOCK if is_packed(reader) else reader.spec.chunk_shape[0]
    return min(n_entries + extra * n_runs, max(reader.spec.n_rows, n_entries))


def _wanted(space: SpacePlan, part: PartPlan, number: int, bounds: NDArray[np.int64]) -> _Wanted:
    group = part.groups[number]
    assert group.copy is not None
    column_map = space.column_maps[group.layout_uid]
    local = np.flatnonzero(column_map >= 0)
    local = local[np.argsort(column_map[local], kind="stable")]
    here = np.flatnonzero(part.code == number)
    return _Wanted(group.path, group.copy, here, column_map[local], bounds[local], bounds[local + 1])


def _count(part: PartPlan, one: _Wanted) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Find for every entry of the wanted columns the cell among those of the group (-1: not wanted), and count them."""
    place = _places(one.copy, part.start[one.here], part.end[one.here])
    at = read_ranges(one.copy.indices, one.starts, one.ends)
    counts, places = np.zeros(len(one.here), np.int64), np.empty(len(at), np.int32)
    columns, rows = np.ascontiguousarray(at), len(counts)
    if library().ra_count_places(columns, columns.size, columns.itemsize, place, place.size, counts, rows, places):
        raise CorruptError(f"The copy of {one.path} names a row that the group has not got; run validate().")
    return places, counts


def _places(copy: ColumnCopy, start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int32]:
    """Find for every stored row the wanted cell that lies in it, (n_stored_rows,) int32, -1 where there is none."""
    n = copy.row_indptr.spec.n_rows - 1
    if len(start) == n and _is_whole(start, end, copy.indices.spec.n_rows):
        return np.arange(n, dtype=np.int32)
    bounds = read_bounds(copy.row_indptr, n, copy.indices.spec.n_rows)
    # Cells are found by where their entries begin; those without entries need no place.
    here = np.flatnonzero(end > start)
    place = np.full(n, -1, np.int32)
    place[np.searchsorted(bounds, start[here], side="right") - 1] = here
    return place


def _is_whole(start: NDArray[np.int64], end: NDArray[np.int64], n_entries: int) -> bool:
    """Tell whether ranges follow each other from the first entry to the last: as many as there are rows are the rows."""
    return bool(len(start) and start[0] == 0 and end[-1] == n_entries and np.array_equal(start[1:], end[:-1]))


def _fill(
    one: _Wanted,
    layer: str,
    places: NDArray[np.int32],
    cursor: NDArray[np.int64],
    out: tuple[NDArray[Any], NDArray[Any]],
) -> None:
    """Write the entries of one layer of a group into the rows of its cells."""
    values = read_ranges(one.copy.layers[layer], one.starts, one.ends).astype(out[1].dtype, copy=False)
    bounds = np.zeros(len(one.starts) + 1, np.int64)
    np.cumsum(one.ends - one.starts, out=bounds[1:])
    columns = Columns(I64.address(bounds), I64.address(one.columns), len(one.columns), len(places))
    last, n = np.zeros(len(cursor), np.int32), len(cursor)
    wide, room = out[0].itemsize == 8, len(out[0])
    fault = library().ra_fill_places(
        byref(columns), places, values, values.itemsize, cursor, last, n, out[0], wide, out[1], room
    )
    if fault == REPEATED:
        raise CorruptError(f"The copy of {one.path} names a row twice in one column; run validate().")
    if fault:
        raise CorruptError(
            f"The copy of {one.path} has other entries than it had when they were counted; run validate()."
        )
