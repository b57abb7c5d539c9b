"""What linked files mean for the order of cells: blocks along their chunks, and what reading single cells of them costs."""

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.assets import array_readers, read_records
from raggedatlas.ingest.materialize import materialize
from raggedatlas.loader.cells import PlannedCells
from raggedatlas.query.cells import BLOCK_CELLS
from raggedatlas.query.read import GroupPlan, PartPlan
from raggedatlas.store.read import ArrayReader, TransposedReader
from raggedatlas.store.runtime import CACHE_SIZES, DECODE_THREADS

DECODED_BYTES = 2**30
"""Bytes that a core decodes in a second, by which the warning about random reads estimates: of gzip by isal, measured in benchmarks/linked.py."""


KEPT_BYTES = CACHE_SIZES["chunks"]
"""Decoded chunks that a process keeps: files that are no larger are decoded once, in whatever order cells come."""


def chunk_blocks(cells: PlannedCells, rows: NDArray[np.int64] | None, block_size: int) -> NDArray[np.int64] | None:
    """Cut the cells into blocks that end where a chunk of a linked file does, so that few chunks are in two blocks.

    `rows` are the cells to cut, (n,), in their order; None takes all. A block has about `block_size` cells, more where
    chunks are larger, and exactly as many of cells that are not linked. The result, (n_blocks + 1,), is where each
    block begins and the last ends; None where no cell is in a compressed linked file.
    """
    found = next(_linked_parts(cells), None)
    if found is None:
        return None
    part, groups = found
    n = cells.n if rows is None else len(rows)
    # The last element is that of cells without a group, whose code is -1.
    chunk_rows = np.zeros(len(part.groups) + 1, np.int64)
    for number, arrays in groups.items():
        chunk_rows[number] = max(reader.spec.chunk_shape[0] for reader in arrays)
    begins, last = [np.zeros(min(n, 1), np.int64)], (-2, -1)
    for start in range(0, n, BLOCK_CELLS):
        stop = min(n, start + BLOCK_CELLS)
        at = slice(start, stop) if rows is None else rows[start:stop]
        code, entry, positions = part.code[at], part.start[at], np.arange(start, stop)
        chunk = np.where(chunk_rows[code] > 0, entry // np.maximum(chunk_rows[code], 1), positions // block_size)
        new = (np.diff(code, prepend=last[0]) != 0) | (np.diff(chunk, prepend=last[1]) != 0)
        begins.append(positions[new])
        last = int(code[-1]), int(chunk[-1])
    starts = np.unique(np.concatenate(begins))
    # Of the chunks that begin within `block_size` cells, the first begins a block.
    _, first = np.unique(starts // block_size, return_index=True)
    return np.append(starts[first], n)


def warn_of_slow_reads(cells: PlannedCells, *, random: bool) -> None:
    """Warn of files that are linked by column, and, where cells are drawn one by one (`random`), of compressed ones; with an estimate."""
    by_column = {
        reader.source.dataset for reader in _readers(cells) if isinstance(reader, TransposedReader) and reader.source
    }
    if by_column:
        warnings.warn(
            f"The matrices of {_name(sorted(by_column))} are linked by column, of which each batch reads all. pack=True, or atlas.materialize(), copies "
            "the values into the atlas first; add(copy='rows') copies the rows and links the columns.",
            UserWarning,
            stacklevel=3,
        )
    if not random:
        return
    groups = [arrays for _, found in _linked_parts(cells) for arrays in found.values()]
    names = sorted({reader.source.dataset for arrays in groups for reader in arrays if reader.source is not None})
    if not names:
        return
    # Every cell needs a chunk of each array; those of a batch rarely share one.
    each = [(reader, arrays[0].spec.n_rows) for arrays in groups for reader in arrays]
    per_cell = sum(reader.spec.chunk_shape[0] * _row_bytes(reader) for reader, _ in each) / len(groups)
    rate = DECODE_THREADS * DECODED_BYTES
    total = sum(n_rows * _row_bytes(reader) for reader, n_rows in each)
    if total <= KEPT_BYTES:
        return
    warnings.warn(
        f"The values of {_name(names)} are in compressed files, of which a random cell decodes whole chunks: about {rate / per_cell:,.0f} cells per "
        f"second here. shuffle='blocks' decodes every chunk about once; atlas.materialize() copies the values into the atlas, which decodes "
        f"them once too (about {max(1, total / rate):,.0f} s), and reads random cells at full speed.",
        UserWarning,
        stacklevel=3,
    )


def _name(datasets: Sequence[str]) -> str:
    return f"{datasets[0]!r}" if len(datasets) == 1 else f"{len(datasets):,} datasets, first {datasets[0]!r},"


def pack_linked(cells: PlannedCells) -> PlannedCells:
    """Copy the values of linked datasets into the atlas, and return the cells as they are read from there.

    Entries are where they are in the file, so that the places of the cells stay; the snapshot of the query names the
    file as before.
    """
    linked = {reader.spec.path.split("/")[0] for reader in _readers(cells) if reader.source is not None}
    tip = cells.request.query.catalog.tip()
    # Of a dataset that was dropped since, the values are not copied.
    there = sorted(linked & {record.uid for record in read_records(tip)})
    if not there:
        return cells
    materialize(tip, there)
    packed = {
        reader.spec.path: reader
        for record in read_records(tip)
        if record.uid in there
        for reader in array_readers(tip, record).values()
    }

    def read_from_atlas(reader: ArrayReader) -> ArrayReader:
        return reader if reader.source is None else packed.get(reader.spec.path, reader)

    def replaced(group: GroupPlan) -> GroupPlan:
        layers = {name: read_from_atlas(reader) for name, reader in group.layers.items()}
        return replace(group, indices=group.indices and read_from_atlas(group.indices), layers=layers)

    spaces = {
        name: replace(
            space, parts=tuple(replace(part, groups=tuple(map(replaced, part.groups))) for part in space.parts)
        )
        for name, space in cells.spaces.items()
    }
    return replace(cells, spaces=spaces)


def _readers(cells: PlannedCells) -> Iterator[ArrayReader]:
    for space in cells.spaces.values():
        for group in (group for part in space.parts for group in part.groups):
            yield from filter(None, (group.indices, *group.layers.values()))


def _linked_parts(cells: PlannedCells) -> Iterator[tuple[PartPlan, dict[int, tuple[ArrayReader, ...]]]]:
    """Iterate over the parts that have groups in compressed linked files, whose position in the part leads to their arrays."""
    for space in cells.spaces.values():
        for part in space.parts:
            arrays = [tuple(filter(None, (group.indices, *group.layers.values()))) for group in part.groups]
            # Of compressed arrays a chunk must be decoded whole for one of its rows.
            groups = {
                number: own
                for number, own in enumerate(arrays)
                if all(r.spec.linked is not None and len(json.loads(r.spec.codecs)) > 1 for r in own)
            }
            if groups:
                yield part, groups


def _row_bytes(reader: ArrayReader) -> int:
    return int(np.prod(reader.spec.row_shape, dtype=np.int64)) * np.dtype(reader.spec.dtype).itemsize
