"""The loops over fragment indexes (ZVFG, seed 002 §7.3): all of many blobs, some fragments of one, and the rows they name."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from raggedatlas.vectors.blobs import HEAD, MAGIC, VERSION
from raggedatlas.vectors.kernels import GOOD, NEGATIVE, SHORT, _int64, _uint32

NO_HEAD, NO_MAGIC, NO_VERSION, RUNS, BITS, BYTES, OFFSETS, BEYOND, MISSING = 10, 11, 12, 13, 14, 15, 16, 17, 18
"""What a kernel found, beside what those of `kernels` find."""


@njit(cache=True, nogil=True)
def _bits_of(byte: int) -> int:
    """Count the bits of a byte."""
    value = byte - (byte >> 1 & 0x55)
    value = (value & 0x33) + (value >> 2 & 0x33)
    return (value + (value >> 4)) & 0x0F


@njit(cache=True, nogil=True)
def _frame(data: NDArray[np.uint8], begin: int, end: int, frame: NDArray[np.int64]) -> int:
    """Check the head, the bitmap and the size of a blob; `frame` becomes fragments, runs, and where runs, offsets and rows begin."""
    if end - begin < HEAD:
        return NO_HEAD
    if _uint32(data, begin) != MAGIC:
        return NO_MAGIC
    if _uint32(data, begin + 4) != VERSION:
        return NO_VERSION
    n_all, n_runs = _uint32(data, begin + 8), _uint32(data, begin + 12)
    if n_runs > n_all:
        return RUNS
    n_bytes = (n_all + 63) // 64 * 8
    at_runs = begin + HEAD + n_bytes
    at_offsets = at_runs + 16 * n_runs
    at_rows = at_offsets + (4 * (n_all - n_runs + 1) if n_all else 0)
    if at_rows > end:
        return SHORT
    found = 0
    for i in range(n_bytes):
        byte = int(data[begin + HEAD + i])
        left = n_all - 8 * i
        if left < 8 and byte >> max(left, 0):
            return BITS
        found += _bits_of(byte)
    if found != n_runs:
        return BITS
    n_rows = _uint32(data, at_rows - 4) if n_all else 0
    frame[0], frame[1], frame[2], frame[3], frame[4] = n_all, n_runs, at_runs, at_offsets, at_rows
    return GOOD if at_rows + 8 * n_rows == end else BYTES


@njit(cache=True, nogil=True)
def count_fragments(data: NDArray[np.uint8], bounds: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[int, int]:
    """Count fragments and rows of lists of each blob, `counts` (2, C); return what was found, and in which blob."""
    frame = np.empty(5, np.int64)
    for c in range(bounds.size - 1):
        fault = _frame(data, bounds[c], bounds[c + 1], frame)
        if fault:
            return fault, c
        counts[0, c] = frame[0]
        counts[1, c] = (bounds[c + 1] - frame[4]) // 8
    return GOOD, 0


@njit(cache=True, nogil=True)
def read_fragments(
    data: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    is_range: NDArray[np.bool_],
    spans: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> tuple[int, int]:
    """Read blobs that `count_fragments` passed: starts and counts as `spans` (2, F), and the rows of lists."""
    frame = np.empty(5, np.int64)
    fragment, row = 0, 0
    for c in range(bounds.size - 1):
        _frame(data, bounds[c], bounds[c + 1], frame)
        n_rows = (bounds[c + 1] - frame[4]) // 8
        # Processors read numbers from any byte; byte by byte it takes twenty times as long.
        table = data[frame[2] : frame[3]].view(np.int64)
        offsets = data[frame[3] : frame[4]].view(np.uint32)
        listed = data[frame[4] : bounds[c + 1]].view(np.int64)
        if frame[0] and offsets[0]:
            return OFFSETS, c
        fault = _read_spans(data[bounds[c] + HEAD :], table, offsets, is_range[fragment:], spans[:, fragment:])
        if fault:
            return fault, c
        for f in range(fragment, fragment + frame[0]):
            if not is_range[f]:
                spans[0, f] += row
        sign = np.int64(0)
        for i in range(n_rows):
            rows[row + i] = listed[i]
            sign |= listed[i]
        if sign < 0:
            return NEGATIVE, c
        fragment, row = fragment + frame[0], row + n_rows
    return GOOD, 0


@njit(cache=True, nogil=True)
def _read_spans(
    bits: NDArray[np.uint8],
    table: NDArray[np.int64],
    offsets: NDArray[np.uint32],
    is_range: NDArray[np.bool_],
    spans: NDArray[np.int64],
) -> int:
    """Read starts and counts of one blob from its runs and the offsets of its lists."""
    run, listed, sign = 0, 0, np.int64(0)
    for f in range(table.size // 2 + max(offsets.size - 1, 0)):
        is_run = (bits[f // 8] >> np.uint8(f % 8)) & 1 == 1
        is_range[f] = is_run
        if is_run:
            spans[0, f], spans[1, f] = table[2 * run], table[2 * run + 1]
            sign |= table[2 * run] | table[2 * run + 1]
            run += 1
        else:
            low, high = np.int64(offsets[listed]), np.int64(offsets[listed + 1])
            if low > high:
                return OFFSETS
            spans[0, f], spans[1, f] = low, high - low
            listed += 1
    return NEGATIVE if sign < 0 else GOOD


@njit(cache=True, nogil=True)
def locate_fragments(blob: NDArray[np.uint8], which: NDArray[np.int64], n_rows: int, spans: NDArray[np.int64]) -> int:
    """Find some fragments, ascending, of one blob without reading the others; return what was found.

    `spans` (P, 3) becomes the first row of a run or -1, the byte of the blob where a list begins, and how many rows there are.
    """
    frame = np.empty(5, np.int64)
    fault = _frame(blob, 0, blob.size, frame)
    if fault:
        return fault
    byte, before = 0, 0
    for p in range(which.size):
        f = which[p]
        if f < 0 or f >= frame[0] or (p and f < which[p - 1]):
            return MISSING
        while byte < f // 8:
            before += _bits_of(int(blob[HEAD + byte]))
            byte += 1
        bits = int(blob[HEAD + byte])
        n_before = before + _bits_of(bits & ((1 << f % 8) - 1))
        if bits >> f % 8 & 1:
            at = frame[2] + 16 * n_before
            start, count = _int64(blob, at), _int64(blob, at + 8)
            if start < 0 or count < 0:
                return NEGATIVE
            if start > n_rows or count > n_rows - start:
                return BEYOND
            spans[p, 0], spans[p, 1], spans[p, 2] = start, 0, count
            continue
        at = frame[3] + 4 * (f - n_before)
        low, high = _uint32(blob, at), _uint32(blob, at + 4)
        if low > high or frame[4] + 8 * high > blob.size:
            return OFFSETS
        spans[p, 0], spans[p, 1], spans[p, 2] = -1, frame[4] + 8 * low, high - low
    return GOOD


@njit(cache=True, nogil=True)
def write_rows(
    is_range: NDArray[np.bool_],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    rows: NDArray[np.int64],
    which: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int:
    """Write the rows of some fragments one after the other; return what was found."""
    at = 0
    for p in range(which.size):
        f = which[p]
        if f < 0 or f >= is_range.size:
            return BEYOND
        start, count = starts[f], counts[f]
        if count < 0 or at + count > out.size:
            return BEYOND
        if is_range[f]:
            for k in range(count):
                out[at + k] = start + k
        else:
            if start < 0 or start + count > rows.size:
                return BEYOND
            for k in range(count):
                out[at + k] = rows[start + k]
        at += count
    return GOOD


@njit(cache=True, nogil=True)
def copy_rows(
    cell: NDArray[np.uint8],
    blob: NDArray[np.uint8],
    spans: NDArray[np.int64],
    places: NDArray[np.int64],
    size: int,
    out: NDArray[np.uint8],
) -> int:
    """Copy the rows, of `size` bytes, of located fragments of one cell to their places, in rows of `out`; return what was found."""
    n_rows = cell.size // size
    for p in range(places.size):
        start, count, to = spans[p, 0], spans[p, 2], places[p] * size
        if to < 0 or to + count * size > out.size or (start >= 0 and start + count > n_rows):
            return BEYOND
        if start >= 0:
            out[to : to + count * size] = cell[start * size : (start + count) * size]
            continue
        for k in range(count):
            row = _int64(blob, spans[p, 1] + 8 * k)
            if row < 0 or row >= n_rows:
                return BEYOND
            for b in range(size):
                out[to + k * size + b] = cell[row * size + b]
    return GOOD
