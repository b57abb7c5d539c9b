"""The loops that only a compiler can hurry: records whose lengths stand in the records before them."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

GOOD, SHORT, TRAILING, MODE, NEGATIVE = 0, 1, 2, 3, 4
"""What a kernel found."""


@njit(cache=True, nogil=True, inline="always")
def _uint32(data: NDArray[np.uint8], i: int) -> int:
    """Read four little-endian bytes."""
    low = np.int64(data[i]) | np.int64(data[i + 1]) << 8
    return low | np.int64(data[i + 2]) << 16 | np.int64(data[i + 3]) << 24  # type: ignore[return-value] # compiled


@njit(cache=True, nogil=True)
def _int64(data: NDArray[np.uint8], i: int) -> int:
    """Read eight little-endian bytes."""
    value = np.uint64(0)
    for k in range(8):
        value |= np.uint64(data[i + k]) << np.uint64(8 * k)
    return np.int64(value)  # type: ignore[return-value] # compiled


@njit(cache=True, nogil=True)
def _put(data: NDArray[np.uint8], i: int, value: int, n_bytes: int) -> int:
    """Write a little-endian integer; return the position behind it."""
    left = np.uint64(value)
    for k in range(n_bytes):
        data[i + k] = np.uint8(left & np.uint64(255))
        left >>= np.uint64(8)
    return i + n_bytes


@njit(cache=True, nogil=True)
def frame_items(data: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> int:
    """Find the items of a vlen-bytes chunk (u32 count, then u32 length and bytes of each); return what was found."""
    at = 4
    for i in range(starts.size):
        if at + 4 > data.size:
            return SHORT
        starts[i] = at + 4
        at += 4 + _uint32(data, at)
        if at > data.size:
            return SHORT
        stops[i] = at
    return GOOD if at == data.size else TRAILING


@njit(cache=True, nogil=True)
def _measure_block(data: NDArray[np.uint8], body: int, end: int) -> tuple[int, int, int]:
    """Return what was found, the bytes of what follows the mode before `body`, and how many fragments it names."""
    if body + 4 > end:
        return SHORT, 0, 0
    mode = np.int64(data[body - 1])
    if mode > 2:
        return MODE, 0, 0
    size = 4 + 8 * _uint32(data, body) if mode == 2 else 8 + 8 * mode
    if body + size > end:
        return SHORT, 0, 0
    if mode == 2:
        return GOOD, size, (size - 4) // 8  # type: ignore[return-value] # compiled
    many = _int64(data, body + 8) if mode == 1 else 1
    return (NEGATIVE if many < 0 or _int64(data, body) < 0 else GOOD), size, many  # type: ignore[return-value] # compiled


@njit(cache=True, nogil=True)
def measure_manifests(data: NDArray[np.uint8], n_dims: int, bounds: NDArray[np.int64]) -> int:
    """Find where the manifests end that stand back to back; return what was found."""
    at = 0
    for i in range(bounds.size - 1):
        bounds[i] = at
        at += 4
        if at > data.size:
            return SHORT
        for _ in range(_uint32(data, at - 4)):
            body = at + 8 * n_dims + 1
            fault, size, _many = _measure_block(data, body, data.size)
            if fault:
                return fault
            at = body + size
    bounds[-1] = at
    return GOOD if at == data.size else TRAILING


@njit(cache=True, nogil=True)
def read_manifests(
    data: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    n_dims: int,
    counts: NDArray[np.int64],
    blocks: NDArray[np.int64],
    items: NDArray[np.int64],
) -> tuple[int, int]:
    """Read manifests; with no room in `blocks`, only count their blocks and list items.

    `counts` is (2, n): blocks and list items of each manifest. A row of `blocks` has the chunk, the mode, the start and the count.
    Returns what was found, and in which manifest.
    """
    n_block, n_item = 0, 0
    for i in range(bounds.size - 1):
        at, end = bounds[i] + 4, bounds[i + 1]
        if at > end:
            return SHORT, i
        counts[0, i], counts[1, i] = _uint32(data, at - 4), 0
        for _ in range(counts[0, i]):
            body = at + 8 * n_dims + 1
            fault, size, many = _measure_block(data, body, end)
            if fault:
                return fault, i
            listed = many if data[body - 1] == 2 else 0
            counts[1, i] += listed
            if blocks.shape[0]:
                for k in range(n_dims):
                    blocks[n_block, k] = _int64(data, at + 8 * k)
                blocks[n_block, n_dims] = data[body - 1]
                blocks[n_block, n_dims + 1] = n_item if data[body - 1] == 2 else _int64(data, body)
                blocks[n_block, n_dims + 2] = many
                for k in range(listed):
                    items[n_item + k] = _int64(data, body + 4 + 8 * k)
                n_block, n_item = n_block + 1, n_item + listed
            at = body + size
        if at != end:
            return TRAILING, i
    return GOOD, 0


@njit(cache=True, nogil=True)
def write_manifests(
    out: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    chunks: NDArray[np.int64],
    modes: NDArray[np.uint8],
    spans: NDArray[np.int64],
    items: NDArray[np.int64],
) -> int:
    """Write manifests back to back; `spans` is (2, K), starts and counts; return the bytes written."""
    at = 0
    for i in range(bounds.size - 1):
        at = _put(out, at, bounds[i + 1] - bounds[i], 4)
        for b in range(bounds[i], bounds[i + 1]):
            for k in range(chunks.shape[1]):
                at = _put(out, at, chunks[b, k], 8)
            out[at] = modes[b]
            at += 1
            start, count = spans[0, b], spans[1, b]
            if modes[b] == 2:
                at = _put(out, at, count, 4)
                for k in range(start, start + count):
                    at = _put(out, at, items[k], 8)
            else:
                at = _put(out, at, start, 8)
                if modes[b] == 1:
                    at = _put(out, at, count, 8)
    return at


@njit(cache=True, nogil=True)
def find_extent(positions: NDArray[np.floating[Any]], low: NDArray[np.float64], high: NDArray[np.float64]) -> None:
    """Find the least and the greatest coordinate on each axis."""
    for k in range(positions.shape[1]):
        low[k] = high[k] = positions[0, k]
    for i in range(positions.shape[0]):
        for k in range(positions.shape[1]):
            value = np.float64(positions[i, k])
            low[k] = min(low[k], value)
            high[k] = max(high[k], value)


@njit(cache=True, nogil=True, error_model="numpy")
def number_cells(
    positions: NDArray[np.floating[Any]],
    edges: NDArray[np.float64],
    low: NDArray[np.int64],
    spans: NDArray[np.int64],
    codes: NDArray[np.int64],
) -> None:
    """Number the cells of a grid that positions lie in: the first axis first, each counted from its least cell."""
    for i in range(positions.shape[0]):
        code = np.int64(0)
        for k in range(positions.shape[1]):
            code = code * spans[k] + (np.int64(np.floor(np.float64(positions[i, k]) / edges[k])) - low[k])
        codes[i] = code
