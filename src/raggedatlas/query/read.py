"""Read cells of a plan: one read per group and array, columns mapped, rows put back into the asked order."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.model.batch import Batch, Block, CsrBlock, DenseBlock, SpaceBatch
from raggedatlas.query.parts import GroupPlan, PartPlan, ReadPlan, SpacePlan
from raggedatlas.store.ranges import read_ranges, read_rows

BLOCK_BYTES = 64 * 2**20
"""About how many bytes of a result one step holds when a query is streamed."""


def read_block(plan: ReadPlan, space: str, start: int, stop: int) -> SpaceBatch:
    """Read neighbouring cells of one space.

    Parameters
    ----------
    plan : ReadPlan
        From `plan_read`.
    space : str
        A name in ``plan.spaces``.
    start, stop : int
        Half-open range of cells in the order of the result.

    Returns
    -------
    SpaceBatch
        Layers share one pattern of entries: where they differ on disk, entries that a layer lacks are 0.
    """
    return read_cells(plan.spaces[space], np.arange(start, min(stop, plan.n_cells)))


def read_cells(space: SpacePlan, rows: NDArray[np.int64]) -> SpaceBatch:
    """Read some cells of one space, in the order given; rows may repeat.

    Parameters
    ----------
    space : SpacePlan
        Of a plan.
    rows : (k,) integers
        Positions in the plan.

    Returns
    -------
    SpaceBatch
        See `read_block`.
    """
    blocks = [read_part(space, part, rows) for part in space.parts]
    return SpaceBatch(
        block=_one_block(blocks, space),
        features=space.features.astype(str),
        present=space.present[rows],
        layout_uids=np.array([*space.layouts, ""], dtype=str)[space.layout_code[rows]],
        measured=dict(zip(space.layouts, space.measured, strict=True)),
    )


def read_batch(plan: ReadPlan, rows: NDArray[np.int64]) -> Batch:
    """Read some cells of every space of a plan, aligned to one table of metadata."""
    return Batch(plan.obs.take(rows), {name: read_cells(space, rows) for name, space in plan.spaces.items()})


def read_part(space: SpacePlan, part: PartPlan, rows: NDArray[np.int64]) -> Block:
    """Read the layers of one part for some cells.

    Returns
    -------
    CsrBlock or DenseBlock
        Layers in their result dtypes; CSR rows sorted, no column twice.

    Raises
    ------
    CorruptError
        If stored bytes are not what was written.
    """
    return _read_sparse(space, part, rows) if space.sparse else _read_dense(space, part, rows)


def row_blocks(space: SpacePlan, n_bytes: int = BLOCK_BYTES) -> Iterator[NDArray[np.int64]]:
    """Cut all cells of a space into runs of about so many bytes, at least one cell each."""
    total = np.cumsum(space.row_bytes())
    start, n = 0, len(total)
    while start < n:
        before = int(total[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(total, before + n_bytes, side="right")))
        yield np.arange(start, stop)
        start = stop


def _one_block(blocks: Sequence[Block], space: SpacePlan) -> Block:
    if len(blocks) == 1:
        block = blocks[0]
        ordered = {layer: block.layers[layer] for layer in space.layers}
        return (
            CsrBlock(block.indptr, block.indices, ordered, block.n_cols)
            if isinstance(block, CsrBlock)
            else DenseBlock(ordered)
        )
    if space.sparse:
        return _join_patterns([b for b in blocks if isinstance(b, CsrBlock)], space.layers)
    found = {layer: values for block in blocks for layer, values in block.layers.items()}
    return DenseBlock({layer: found[layer] for layer in space.layers})


def _join_patterns(blocks: Sequence[CsrBlock], layers: Sequence[str]) -> CsrBlock:
    """Put layers with different entries onto the union of their entries."""
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


def _read_sparse(space: SpacePlan, part: PartPlan, rows: NDArray[np.int64]) -> CsrBlock:
    code = part.code[rows]
    pieces: list[CsrBlock] = []
    places: list[NDArray[np.int64]] = []
    for group in np.unique(code[code >= 0]).tolist():
        here = np.flatnonzero(code == group)
        pieces.append(_read_group(space, part.groups[group], part.start[rows[here]], part.end[rows[here]]))
        places.append(here)
    dtypes = {layer: space.dtypes[layer] for layer in part.layers}
    if not pieces:
        empty = {layer: np.empty(0, dtype) for layer, dtype in dtypes.items()}
        return CsrBlock(np.zeros(len(rows) + 1, np.int64), np.empty(0, np.int32), empty, space.n_cols)
    if len(pieces) == 1 and pieces[0].n_rows == len(rows):
        return pieces[0]
    return _place_rows(pieces, places, len(rows), dtypes, space.n_cols)


def _read_group(space: SpacePlan, group: GroupPlan, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> CsrBlock:
    from raggedatlas.store.kernels import has_sorted_unique_rows, remap_csr, sort_rows

    assert group.indices is not None
    indptr = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(ends - starts, out=indptr[1:])
    local = read_ranges(group.indices, starts, ends)
    column_map = space.column_maps[group.layout_uid]
    layers: dict[str, NDArray[Any]] = {}
    try:
        if len(group.layers) == 1:
            ((layer, reader),) = group.layers.items()
            bounds, columns, values = remap_csr(
                indptr, local, read_ranges(reader, starts, ends), column_map, space.n_cols
            )
            layers[layer] = values
        else:
            bounds, columns, at = remap_csr(indptr, local, np.arange(len(local)), column_map, space.n_cols)
            layers = {layer: read_ranges(reader, starts, ends)[at] for layer, reader in group.layers.items()}
    except IndexError as error:
        raise CorruptError(
            f"The group {group.path} names a feature that its list {group.layout_uid} has not got: {error}"
        ) from error
    ascending, unique = has_sorted_unique_rows(bounds, columns)
    if not ascending:
        order = sort_rows(bounds, columns)
        layers = {layer: values[order] for layer, values in layers.items()}
    if not unique:
        raise CorruptError(f"The group {group.path} names a feature twice in one cell; add its source again.")
    layers = {layer: values.astype(space.dtypes[layer], copy=False) for layer, values in layers.items()}
    block = CsrBlock(bounds, columns, layers, space.n_cols)
    return _with_unmeasured(block, space.column_maps[group.layout_uid]) if space.nan else block


def _with_unmeasured(block: CsrBlock, column_map: NDArray[np.int64]) -> CsrBlock:
    """Add an explicit NaN for every column that the layout did not measure."""
    from raggedatlas.store.kernels import sort_rows

    absent = np.setdiff1d(np.arange(block.n_cols), column_map)
    if not len(absent):
        return block
    n, k = block.n_rows, len(absent)
    indptr = block.indptr + k * np.arange(n + 1)
    old = np.arange(len(block.indices)) + k * np.repeat(np.arange(n), np.diff(block.indptr))
    new = (indptr[1:, None] - k + np.arange(k)).ravel()
    indices = np.empty(int(indptr[-1]), block.indices.dtype)
    indices[old] = block.indices
    indices[new] = np.tile(absent, n)
    order = sort_rows(indptr, indices)
    layers = {}
    for layer, values in block.layers.items():
        wide = np.full(len(indices), np.nan, values.dtype)
        wide[old] = values
        layers[layer] = wide[order]
    return CsrBlock(indptr, indices, layers, block.n_cols)


def _place_rows(
    pieces: Sequence[CsrBlock],
    places: Sequence[NDArray[np.int64]],
    n: int,
    dtypes: Mapping[str, np.dtype[Any]],
    n_cols: int,
) -> CsrBlock:
    """Join pieces whose rows belong at given places; rows without a piece stay empty."""
    lengths = np.zeros(n, np.int64)
    for piece, place in zip(pieces, places, strict=True):
        lengths[place] = np.diff(piece.indptr)
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    indices = np.empty(int(indptr[-1]), pieces[0].indices.dtype)
    layers = {layer: np.empty(len(indices), dtype) for layer, dtype in dtypes.items()}
    for piece, place in zip(pieces, places, strict=True):
        at = np.repeat(indptr[place] - piece.indptr[:-1], np.diff(piece.indptr)) + np.arange(len(piece.indices))
        indices[at] = piece.indices
        for layer, values in piece.layers.items():
            layers[layer][at] = values
    return CsrBlock(indptr, indices, layers, n_cols)


def _read_dense(space: SpacePlan, part: PartPlan, rows: NDArray[np.int64]) -> DenseBlock:
    code = part.code[rows]
    shape = _dense_shape(space, part)
    layers: dict[str, NDArray[Any]] = {}
    for layer in part.layers:
        fill = np.nan if space.nan else 0
        out = np.full((len(rows), *shape), fill, space.dtypes[layer])
        for group in np.unique(code[code >= 0]).tolist():
            here = np.flatnonzero(code == group)
            values = read_rows(part.groups[group].layers[layer], part.start[rows[here]])
            if space.space.has_features:
                column_map = space.column_maps[part.groups[group].layout_uid]
                if values.shape[1:] != column_map.shape:
                    raise CorruptError(
                        f"The group {part.groups[group].path} has {values.shape[1:]} columns, its list {len(column_map)}."
                    )
                kept = np.flatnonzero(column_map >= 0)
                out[np.ix_(here, column_map[kept])] = values[:, kept]
            else:
                out[here] = values
        layers[layer] = out
    return DenseBlock(layers)


def _dense_shape(space: SpacePlan, part: PartPlan) -> tuple[int, ...]:
    if space.space.has_features or space.space.rank == 1:
        return (space.n_cols,)
    shapes = {reader.spec.row_shape for group in part.groups for reader in group.layers.values()}
    return next(iter(shapes)) if shapes else (0,) * space.space.rank
