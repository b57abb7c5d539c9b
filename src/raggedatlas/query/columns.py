"""Reads few features of many cells from the column-sorted copy, where that takes fewer bytes than reading the rows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.model.batch import CsrBlock
from raggedatlas.query.parts import GroupPlan, PartPlan, SpacePlan
from raggedatlas.store.ranges import ArrayReader, is_packed, read_ranges, read_slice

_PACKED_BLOCK = 256


def prefer_columns(space: SpacePlan, part: PartPlan) -> tuple[int, ...]:
    """Choose the groups whose column-sorted copy is read.

    A group is chosen where the entries of its wanted columns take fewer bytes than those of its wanted rows, counting what
    is decoded for nothing at both ends of a run: a block of the packed codec, a chunk of others.

    Parameters
    ----------
    space, part : SpacePlan, PartPlan
        From a plan whose cells do not repeat.

    Returns
    -------
    tuple of int
        Positions in ``part.groups``.
    """
    if not space.sparse or space.nan:
        return ()
    chosen = []
    for number, group in enumerate(part.groups):
        column_map = space.column_maps[group.layout_uid]
        if group.copy is None or bool((column_map >= 0).all()):
            continue
        here = part.code == number
        by_row = _decoded(group.indices, (part.end - part.start)[here])
        bounds = _all(group.copy.indptr)
        if (
            len(bounds) == len(column_map) + 1
            and _decoded(group.copy.indices, np.diff(bounds)[column_map >= 0]) < by_row
        ):
            chosen.append(number)
    return tuple(chosen)


def read_columns(space: SpacePlan, part: PartPlan, groups: Sequence[int]) -> tuple[NDArray[np.int64], CsrBlock]:
    """Read all cells that lie in some groups from the column-sorted copies.

    Parameters
    ----------
    space, part : SpacePlan, PartPlan
        From a plan whose cells do not repeat.
    groups : sequence of int
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
        If a copy names a row that its group has not got.
    """
    from raggedatlas.query.kernels import count_places, fill_places

    rows = np.flatnonzero(np.isin(part.code, np.asarray(groups, part.code.dtype)))
    counts = np.zeros(len(rows), np.int64)
    found = [_entries(space, part, number, rows) for number in groups]
    for _, places, _, _ in found:
        if not count_places(places, counts):
            raise CorruptError(f"A column-sorted copy of {space.name} names a row twice; run validate().")
    indptr = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    indices = np.empty(int(indptr[-1]), np.int32 if space.n_cols <= np.iinfo(np.int32).max else np.int64)
    layers = {layer: np.empty(len(indices), space.dtypes[layer]) for layer in part.layers}
    for group, places, columns, (starts, ends) in found:
        assert group.copy is not None
        for layer in part.layers:
            values = read_ranges(group.copy.layers[layer], starts, ends)
            fill_places((places, columns, values), indptr[:-1].copy(), (indices, layers[layer]))
    return rows, CsrBlock(indptr, indices, layers, space.n_cols)


def _decoded(reader: ArrayReader | None, lengths: NDArray[np.int64]) -> int:
    """Estimate how many entries are decoded for runs of given lengths."""
    assert reader is not None
    extra = _PACKED_BLOCK if is_packed(reader) else reader.spec.chunk_shape[0]
    runs = lengths[lengths > 0]
    return int(min(runs.sum() + extra * runs.size, max(reader.spec.n_rows, runs.sum())))


def _all(reader: ArrayReader) -> NDArray[np.int64]:
    values: NDArray[np.int64] = read_slice(reader, 0, reader.spec.n_rows)
    return values


def _entries(
    space: SpacePlan, part: PartPlan, number: int, rows: NDArray[np.int64]
) -> tuple[GroupPlan, NDArray[np.int64], NDArray[np.int64], tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Find the entries of the wanted columns of one group: place in `rows` (-1: not wanted), column, ranges read."""
    group = part.groups[number]
    assert group.copy is not None
    column_map = space.column_maps[group.layout_uid]
    local = np.flatnonzero(column_map >= 0)
    local = local[np.argsort(column_map[local], kind="stable")]
    bounds, row_bounds = _all(group.copy.indptr), _all(group.copy.row_indptr)
    starts, ends = bounds[local], bounds[local + 1]
    # Cells are found by where their entries begin; those without entries need no place.
    here = np.flatnonzero((part.code[rows] == number) & (part.end[rows] > part.start[rows]))
    stored = np.searchsorted(row_bounds, part.start[rows][here], side="right") - 1
    place = np.full(len(row_bounds), -1, np.int64)
    place[stored] = here
    at = read_ranges(group.copy.indices, starts, ends)
    if at.size and int(at.max()) >= len(row_bounds) - 1:
        raise CorruptError(f"The copy of {group.path} names a row that the group has not got; run validate().")
    return group, place[at], np.repeat(column_map[local], ends - starts), (starts, ends)
