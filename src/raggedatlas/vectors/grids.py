"""Chunk grids: chunk of a position, number of chunks, order of keys (seed 002 §7.1, ruling 17)."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raggedatlas.errors import SourceError, ValuesError
from raggedatlas.store.native import library

_MAX_CODES = 2**62


def chunk_coordinates(positions: NDArray[Any], edges: ArrayLike) -> NDArray[np.int64]:
    """Return ``floor(position / edge)`` for every vertex and axis, absolute and possibly negative: (N, D) int64.

    A position on a boundary belongs to the upper chunk. Integers are divided exactly if the edges are integers.

    Examples
    --------
    >>> chunk_coordinates(np.array([[-0.5, 10.0]]), [10, 10]).tolist()
    [[-1, 1]]
    """
    sizes = np.asarray(edges, np.float64)
    keys = np.empty(positions.shape, np.int64)
    for axis in range(positions.shape[1]):
        keys[:, axis] = _floor_divide(positions[:, axis], float(sizes[axis]))
    return keys


def _floor_divide(values: NDArray[Any], edge: float) -> NDArray[np.int64]:
    """Return the chunk of each value on one axis."""
    # As floats, integers above 2**53 could be rounded into a neighbouring chunk.
    if values.dtype.kind in "iu" and edge.is_integer() and edge < 2**63:
        divisor = int(edge)
        signed = values.dtype != np.uint64
        exact = (
            np.floor_divide(values.astype(np.int64), divisor) if signed else np.floor_divide(values, np.uint64(divisor))
        )
        return np.asarray(exact, np.int64)
    cells = np.floor(values.astype(np.float64) / edge)
    # The comparison is negated so that NaN is refused too.
    if cells.size and not max(-float(cells.min()), float(cells.max())) < 2**62:
        raise ValuesError(
            f"A position lies more than 2**62 chunks of {edge} from the origin, or is not a number; use larger chunks."
        )
    return cells.astype(np.int64)


def encode_keys(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Return an integer code for each key, increasing with the key (first axis first), and an exclusive upper bound of the codes."""
    if not len(keys):
        return np.zeros(0, np.int64), 1
    low = keys.min(axis=0)
    spans = [int(span) + 1 for span in keys.max(axis=0) - low]
    top = 1
    for span in spans:
        top *= span
    # If a span overflows int64, it is negative. `np.unique` numbers the keys in ascending order as well.
    if top >= _MAX_CODES or min(spans) < 1:
        codes = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
        return codes.astype(np.int64), int(codes.max()) + 1
    codes = keys[:, 0] - low[0]
    for axis in range(1, len(spans)):
        codes *= spans[axis]
        codes += keys[:, axis] - low[axis]
    return codes, top


def stable_order(codes: NDArray[np.int64], top: int) -> NDArray[np.int64]:
    """Return a stable argsort of codes below `top`; 16 bits at a time, for which NumPy uses a radix sort."""
    order = np.argsort((codes & 0xFFFF).astype(np.uint16), kind="stable")
    shift = 16
    while top > 1 << shift:
        order = order[np.argsort((codes[order] >> shift & 0xFFFF).astype(np.uint16), kind="stable")]
        shift += 16
    return order


@dataclass(frozen=True)
class ChunkCodes:
    """Chunks of positions, as integer codes that increase with the keys.

    Parameters
    ----------
    codes : (N,) int64
        Code of the chunk of each vertex, below `top`.
    top : int
        Exclusive upper bound of the codes.
    low, spans : (D,) int64
        Smallest key, and number of chunks on each axis; codes vary fastest on the last axis.
    """

    codes: NDArray[np.int64]
    top: int
    low: NDArray[np.int64]
    spans: NDArray[np.int64]

    def keys(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the keys of some codes: (n, D)."""
        keys = np.empty((len(codes), len(self.low)), np.int64)
        left = codes
        for axis in range(len(self.low) - 1, -1, -1):
            left, keys[:, axis] = np.divmod(left, self.spans[axis])
        return keys + self.low


def encode_positions(positions: NDArray[Any], edges: ArrayLike) -> ChunkCodes:
    """Return the chunks of positions, axis by axis, without building a table of keys.

    Raises
    ------
    ValuesError
        If there are 2**62 chunks or more between the smallest and the largest key.
    """
    sizes = np.asarray(edges, np.float64)
    n_dims = positions.shape[1]
    if not len(positions):
        return ChunkCodes(np.zeros(0, np.int64), 1, np.zeros(n_dims, np.int64), np.ones(n_dims, np.int64))
    # The compiled function takes float32 and float64 only.
    if positions.dtype in {np.dtype(np.float32), np.dtype(np.float64)}:
        return _encode_float_positions(np.ascontiguousarray(positions), sizes)
    cells = [_floor_divide(positions[:, axis], float(sizes[axis])) for axis in range(n_dims)]
    low = np.array([own.min() for own in cells])
    spans, top = _grid_spans([int(own.min()) for own in cells], [int(own.max()) for own in cells])
    codes = np.zeros(len(positions), np.int64)
    for axis, own in enumerate(cells):
        codes *= spans[axis]
        codes += own - low[axis]
    return ChunkCodes(codes, top, low, spans)


def _encode_float_positions(positions: NDArray[Any], sizes: NDArray[np.float64]) -> ChunkCodes:
    """Return the chunks of floating-point positions, without building a table of keys."""
    axes = range(positions.shape[1])
    # Axis by axis: all axes at once take NumPy thirty times as long.
    ends = np.array([[positions[:, k].min() for k in axes], [positions[:, k].max() for k in axes]], np.float64)
    # Division and rounding are monotone, so the extreme positions are in the extreme chunks.
    first, last = (
        np.array([_floor_divide(end[k : k + 1], float(sizes[k]))[0] for k in range(len(sizes))]) for end in ends
    )
    spans, top = _grid_spans(first.tolist(), last.tolist())
    codes = np.empty(len(positions), np.int64)
    n, n_dims = positions.shape
    if library().ra_number_cells(positions, n, n_dims, positions.itemsize, sizes, first, spans, codes):
        raise ValuesError("A position is not a finite number, so it belongs to no chunk.")
    return ChunkCodes(codes, top, first, spans)


def _grid_spans(low: list[int], high: list[int]) -> tuple[NDArray[np.int64], int]:
    """Return the number of chunks on each axis, and the total."""
    spans = [last - first + 1 for first, last in zip(low, high, strict=True)]
    top = math.prod(spans)
    if top >= _MAX_CODES:
        raise ValuesError("The positions span 2**62 chunks or more; use larger chunks.")
    return np.array(spans, np.int64), top


def run_starts(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return the start of each run of equal values."""
    if not len(values):
        return np.zeros(0, np.int64)
    return np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])


@dataclass(frozen=True)
class KeyIndex:
    """Lookup of rows in a table of keys.

    Parameters
    ----------
    keys : (n, K) int64
        Unique, ascending.
    """

    keys: NDArray[np.int64]

    def find(self, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each wanted key, or -1: (m,) int64."""
        if not len(self.keys) or not len(wanted):
            return np.full(len(wanted), -1, np.int64)
        # Encoded in one call, because codes from two calls are not comparable.
        codes, _ = encode_keys(np.concatenate([self.keys, wanted]))
        own, requested = codes[: len(self.keys)], codes[len(self.keys) :]
        rows = np.minimum(np.searchsorted(own, requested), len(own) - 1)
        return np.where(own[rows] == requested, rows, -1)


def check_edges(edges: tuple[float, ...], n_dims: int, what: str) -> None:
    """Refuse edges that are not `n_dims` positive numbers."""
    if len(edges) != n_dims or not all(np.isfinite(edge) and edge > 0 for edge in edges):
        raise SourceError(f"{what} is {edges}; expected {n_dims} positive numbers, one per axis.")


def bins_per_chunk(chunk_shape: tuple[float, ...], bin_shape: tuple[float, ...]) -> NDArray[np.int64]:
    """Return the number of bins of a chunk on each axis.

    Raises
    ------
    SourceError
        If bins do not divide their chunk.
    """
    ratio = np.asarray(chunk_shape, np.float64) / np.asarray(bin_shape, np.float64)
    rounded = np.rint(ratio)
    if (rounded < 1).any() or (np.abs(ratio - rounded) > 1e-9 * np.maximum(rounded, 1)).any():
        raise SourceError(f"Bins of {tuple(bin_shape)} do not divide chunks of {tuple(chunk_shape)}.")
    return rounded.astype(np.int64)
