"""Links across chunks as layout 0.9 files them: one array for each set of offsets, one cell for each source chunk."""

import math
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.vectors.grids import encode_keys, run_starts, stable_order


@dataclass(frozen=True)
class OffsetSegment:
    """The links of one set of offsets.

    Parameters
    ----------
    offsets : (L - 1, D) int64
        How far the chunks of the ends after the first lie from the anchor of the source chunk.
    cells : (C, D) int64
        Source chunks, ascending.
    bounds : (C + 1,) int64
        Records of each cell.
    rows : (M, L) or (M, L + 1) int64
        Rows of the ends; before them the number of the permutation, where ends were sorted.
    record : (M,) int64
        Which link each record is.
    has_order : bool
        Whether that number is there.
    """

    offsets: NDArray[np.int64]
    cells: NDArray[np.int64]
    bounds: NDArray[np.int64]
    rows: NDArray[np.int64]
    record: NDArray[np.int64]
    has_permutation: bool

    @property
    def name(self) -> str:
        """The name of the array."""
        return segment_name(self.offsets)


def segment_name(offsets: NDArray[np.int64]) -> str:
    """Spell offsets: parts signed and joined by dots, ends joined by ``_``; ``self`` where there is but one end.

    Examples
    --------
    >>> segment_name(np.array([[0, 0, 0], [1, 0, -1]]))
    '0.0.0_+1.0.-1'
    """
    if not len(offsets):
        return "self"
    return "_".join(".".join(f"{part:+d}" if part else "0" for part in end) for end in offsets.tolist())


def parse_segment(name: str, width: int, n_dims: int) -> NDArray[np.int64]:
    """Read the offsets out of a name.

    Raises
    ------
    CorruptError
        If there are not ``width - 1`` ends of `n_dims` whole numbers.
    """
    if width == 1 and name == "self":
        return np.zeros((0, n_dims), np.int64)
    try:
        offsets = np.array([[int(part) for part in end.split(".")] for end in name.split("_")], np.int64)
    except ValueError:
        offsets = np.zeros((0, 0), np.int64)
    if offsets.shape != (width - 1, n_dims):
        raise CorruptError(f"{name!r} does not name the offsets of {width} ends on {n_dims} axes.")
    return offsets


@cache
def _permutations(width: int) -> NDArray[np.int64]:
    """Return all permutations of `width` ends, in the order of their numbers: (width!, width)."""
    return np.array(list(permutations(range(width))), np.int64)


@cache
def _inverse_permutations(width: int) -> NDArray[np.int64]:
    """Return what undoes each permutation: (width!, width)."""
    return np.argsort(_permutations(width), axis=1)


def has_permutation(offsets: NDArray[np.int64], delta: int, *, directed: bool, store: str) -> bool:
    """Tell whether records carry the number of a permutation."""
    return delta == 0 and bool(offsets.any()) and (store == "duplicate" or not directed)


def anchor_chunks(chunks: NDArray[np.int64], scales: tuple[NDArray[np.int64], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return source chunks in the grid of the level where the other ends lie."""
    return chunks * scales[0] // scales[1]


def encode_cross_links(
    chunks: NDArray[np.int64],
    rows: NDArray[np.int64],
    policy: tuple[int, bool, str],
    scales: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> list[OffsetSegment]:
    """Sort links into segments and cells.

    Parameters
    ----------
    chunks, rows : (M, L, D) and (M, L) int64
        Ends of the links.
    policy : (delta, directed, store)
        As in `CrossLinks`.
    scales : (source, target)
        How many root chunks a chunk spans, on the level of the first end and of the others: (D,) each.

    Returns
    -------
    list of Segment
        By name.
    """
    delta, directed, store = policy
    n, width, n_dims = chunks.shape
    record = np.arange(n)
    order = np.broadcast_to(np.arange(width), (n, width)).copy()
    if delta == 0 and width > 1:
        apart = (chunks != chunks[:, :1]).any(axis=(1, 2))
        if store == "duplicate":
            order, record = _rotate_to_each_chunk(chunks, rows, apart)
        elif not directed:
            order[apart] = _sorted_ends(chunks[apart], rows[apart])
    chunks = np.take_along_axis(chunks[record], order[:, :, None], axis=1)
    rows = np.take_along_axis(rows[record], order, axis=1)
    offsets = (chunks[:, 1:] - anchor_chunks(chunks[:, 0], scales)[:, None]).reshape(len(record), -1)
    code, top = encode_keys(np.concatenate([offsets, chunks[:, 0]], axis=1))
    sort = stable_order(code, top)
    kinds, sources = offsets[sort], chunks[sort, 0]
    cells = run_starts(code[sort])
    borders = (
        np.flatnonzero(np.append(True, (kinds[cells[1:]] != kinds[cells[:-1]]).any(axis=1))) if len(cells) else cells
    )
    made = []
    numbers = _permutation_numbers(order[sort], width)
    for a, b in zip(borders.tolist(), [*borders[1:].tolist(), len(cells)], strict=True):
        begin, end = int(cells[a]), int(cells[b]) if b < len(cells) else len(sort)
        own = kinds[begin].reshape(width - 1, n_dims)
        ordered = has_permutation(own, delta, directed=directed, store=store)
        ends = rows[sort[begin:end]]
        if ordered:
            ends = np.concatenate([numbers[begin:end, None], ends], axis=1)
        bounds = np.append(cells[a:b], end) - begin
        made.append(OffsetSegment(own, sources[cells[a:b]], bounds, ends, record[sort[begin:end]], ordered))
    return sorted(made, key=lambda segment: segment.name)


def _sorted_ends(chunks: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the order that sorts the ends of each link by chunk and row: (M, L)."""
    n, width, n_dims = chunks.shape
    code, _ = encode_keys(np.concatenate([chunks.reshape(-1, n_dims), rows.reshape(-1, 1)], axis=1))
    return np.argsort(code.reshape(n, width), axis=1, kind="stable")


def _rotate_to_each_chunk(
    chunks: NDArray[np.int64], rows: NDArray[np.int64], apart: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return an order for each link and chunk that it touches, with an end there first, and which link it is."""
    n, width, _ = chunks.shape
    by_end = np.broadcast_to(np.arange(width), (n, width)).copy()
    by_end[apart] = _sorted_ends(chunks[apart], rows[apart])
    placed = np.take_along_axis(chunks, by_end[:, :, None], axis=1)
    new = np.ones((n, width), bool)
    new[:, 1:] = (placed[:, 1:] != placed[:, :-1]).any(axis=2)
    record, turn = np.nonzero(new)
    lead = by_end[record, turn]
    rest = np.broadcast_to(np.arange(width), (len(record), width))
    others = rest[rest != lead[:, None]].reshape(len(record), width - 1)
    order = np.concatenate([lead[:, None], others], axis=1)
    order[~apart[record]] = np.arange(width)
    return order, record


def _permutation_numbers(order: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return the number of each permutation among all of them in ascending order (its Lehmer code)."""
    number = np.zeros(len(order), np.int64)
    for i in range(width):
        smaller = (order[:, i + 1 :] < order[:, i : i + 1]).sum(axis=1)
        number += smaller * math.factorial(width - 1 - i)
    return number


def decode_cross_links(
    segment: OffsetSegment, scales: tuple[NDArray[np.int64], NDArray[np.int64]], what: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return chunks and rows of the ends of a segment's links, in the order in which the ends were given.

    Raises
    ------
    CorruptError
        If a permutation has no such number, or a row is negative.
    """
    width = len(segment.offsets) + 1
    source = np.repeat(segment.cells, np.diff(segment.bounds), axis=0)
    others = anchor_chunks(source, scales)[:, None] + segment.offsets[None]
    chunks = np.concatenate([source[:, None], others], axis=1)
    rows = segment.rows
    if segment.has_permutation:
        number, rows = rows[:, 0], rows[:, 1:]
        if ((number < 0) | (number >= math.factorial(width))).any():
            raise CorruptError(f"{what} holds a permutation that {width} ends do not have. Restore it from a copy.")
        back = _inverse_permutations(width)[number]
        every = np.arange(len(rows))[:, None]
        chunks, rows = chunks[every, back], rows[every, back]
    if (rows < 0).any():
        raise CorruptError(f"{what} holds a negative row. Restore it from a copy.")
    return chunks, rows
