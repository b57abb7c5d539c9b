"""The fragment index ZVFG: for each chunk, lists of its rows, as runs or one by one (seed 002 §7.3).

A blob has a head of 16 bytes (magic, version, flags, F, R), a bitmap of F bits padded to 8 bytes (1: a run), R runs as
(int64 start, int64 count), E + 1 uint32 offsets of the E = F - R explicit lists, and their int64 rows. Without fragments it
is the head alone. All chunks of a level are encoded and decoded together.
"""

from ctypes import byref, c_int64

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, QueryError
from raggedatlas.store import native
from raggedatlas.store.native import I64, U8, library
from raggedatlas.vectors.blobs import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Blobs,
    Bytes,
    concat_ranges,
    counts_to_offsets,
    from_bytes,
    interleave,
    to_bytes,
)
from raggedatlas.vectors.geometry import Fragments


def encode_fragments(fragments: Fragments) -> Blobs:
    """Return one blob for each chunk.

    Examples
    --------
    >>> one = Fragments(np.array([0, 1]), np.array([True]), np.array([0]), np.array([3]), np.zeros(0, np.int64))
    >>> len(encode_fragments(one)[0])
    44
    """
    n_all = np.diff(fragments.bounds)
    kinds = counts_to_offsets(fragments.is_range)
    n_runs = np.diff(kinds[fragments.bounds])
    heads = np.zeros((len(n_all), 4), "<u4")
    heads[:, 0], heads[:, 1], heads[:, 2], heads[:, 3] = MAGIC, VERSION, n_all, n_runs
    padded = (n_all + 63) // 64 * 64
    bits = np.zeros(padded.sum(), np.uint8)
    bits[concat_ranges(counts_to_offsets(padded)[:-1], n_all)] = fragments.is_range
    table = np.stack([fragments.starts[fragments.is_range], fragments.counts[fragments.is_range]], axis=1)
    offsets, sizes = _list_offsets(fragments, n_all, n_all - n_runs)
    n_rows = np.diff(counts_to_offsets(np.where(fragments.is_range, 0, fragments.counts))[fragments.bounds])
    return interleave(
        Blobs(to_bytes(heads), np.arange(len(n_all) + 1, dtype=np.int64) * HEADER_BYTES),
        Blobs(np.packbits(bits, bitorder="little"), counts_to_offsets(padded // 8)),
        Blobs(to_bytes(table.astype(np.int64, copy=False)), counts_to_offsets(n_runs * 16)),
        Blobs(to_bytes(offsets), counts_to_offsets(sizes * 4)),
        Blobs(to_bytes(fragments.rows.astype(np.int64, copy=False)), counts_to_offsets(n_rows * 8)),
    )


def _list_offsets(
    fragments: Fragments, n_all: NDArray[np.int64], n_lists: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the running offsets of the explicit lists of all chunks, and how many each chunk has."""
    sizes = np.where(n_all > 0, n_lists + 1, 0)
    begin = counts_to_offsets(sizes)
    steps = np.zeros(begin[-1], np.int64)
    steps[concat_ranges(begin[:-1] + 1, np.where(n_all > 0, n_lists, 0))] = fragments.counts[~fragments.is_range]
    total = np.cumsum(steps)
    some = n_all > 0
    return (total - np.repeat(total[begin[:-1][some]], sizes[some])).astype(np.uint32), sizes


def decode_fragments(blobs: Blobs, what: str = "A fragment index") -> Fragments:
    """Return the fragments of many chunks; every blob is checked first.

    Raises
    ------
    CorruptError
        If magic, version or flags are wrong, a count does not agree with the bitmap or the bytes at hand, offsets fall, or a number is
        negative.
    """
    data, first, n, where = np.ascontiguousarray(blobs.data), np.ascontiguousarray(blobs.bounds), len(blobs), c_int64()
    counts = np.empty((2, n), np.int64)
    fault = library().ra_count_fragments(data, data.size, first, n, counts, byref(where))
    if not fault:
        bounds = counts_to_offsets(counts[0])
        is_range, spans = np.empty(bounds[-1], bool), np.empty((2, bounds[-1]), np.int64)
        rows = np.empty(counts[1].sum(), np.int64)
        fault = library().ra_read_fragments(
            data, data.size, first, n, is_range.view(np.uint8), *spans, len(is_range), rows, len(rows), byref(where)
        )
    if fault:
        raise corrupt_index_error(fault, blobs[where.value], what)
    return Fragments(bounds, is_range, spans[0], spans[1], rows)


def corrupt_index_error(fault: int, blob: Bytes, what: str) -> CorruptError:
    """Return the error that says what a compiled function found wrong with a blob."""
    if fault == native.BAD_VERSION:
        bad = int.from_bytes(blob[4:8].tobytes(), "little")
        return CorruptError(f"{what} has version {bad & 0xFFFF} and flags {bad >> 16}; expected 1 and 0.")
    says = {
        native.NO_HEAD: f"is shorter than its head of {HEADER_BYTES} bytes",
        native.NO_MAGIC: "does not begin with the magic number of ZVFG",
        native.BAD_RUNS: "declares more runs than fragments",
        native.CUT_SHORT: "is cut short: its head declares more than its bytes hold",
        native.BAD_BITS: "has a bitmap that does not have as many bits as the head declares runs",
        native.BAD_LISTS: "has other bytes than its explicit lists need",
        native.BAD_OFFSETS: "has offsets that fall or do not begin at 0",
        native.NEGATIVE: "holds a negative start, count or row",
        native.BEYOND: "names a row that its chunk does not have",
        native.MISSING: "is asked for a fragment that its chunk does not have",
        native.BAD_BOUNDS: "lies beyond the bytes at hand",
    }
    return CorruptError(f"{what} {says[fault]}. Restore it from a copy.")


def locate_fragments(
    blob: Bytes, which: NDArray[np.int64], n_rows: int, spans: NDArray[np.int64], what: str = "A fragment index"
) -> None:
    """Find some fragments of one chunk; the others are not read.

    Parameters
    ----------
    blob : (n_bytes,) uint8
        A ZVFG blob.
    which : (P,) int64
        Fragments, ascending; the chunk has them all.
    n_rows : int
        How many rows the chunk has.
    spans : (P, 3) int64
        Filled with the first row of a run, or -1; the byte of the blob where a list begins; how many rows.

    Raises
    ------
    CorruptError
        If what was read of the blob is wrong, a run goes beyond the rows, or there is no such fragment.
    """
    fault = library().ra_locate_fragments(blob, blob.size, which, len(which), n_rows, spans)
    if fault:
        raise corrupt_index_error(fault, blob, what)


class FragmentIndex:
    """Random access to the fragments of one chunk; nothing is decoded before it is asked for.

    Parameters
    ----------
    blob : (n_bytes,) uint8
        A ZVFG blob.

    Examples
    --------
    >>> one = Fragments(np.array([0, 1]), np.array([True]), np.array([2]), np.array([3]), np.zeros(0, np.int64))
    >>> index = FragmentIndex(encode_fragments(one)[0])
    >>> index.is_range(0), index.range(0), index.indices(0).tolist()
    (True, (2, 3), [2, 3, 4])
    """

    def __init__(self, blob: Bytes) -> None:
        self.blob = np.ascontiguousarray(blob)
        locate_fragments(self.blob, np.zeros(0, np.int64), 0, np.zeros((0, 3), np.int64))
        self.n_fragments, self.n_ranges = (int(value) for value in self.blob[8:HEADER_BYTES].copy().view("<u4"))

    def _span(self, f: int) -> tuple[int, int, int]:
        """Return the first row of a run or -1, the byte where a list begins, and how many rows there are."""
        if not 0 <= f < self.n_fragments:
            raise QueryError(f"There is no fragment {f}; the chunk has {self.n_fragments}.")
        spans = np.empty((1, 3), np.int64)
        locate_fragments(self.blob, np.array([f]), np.iinfo(np.int64).max, spans)
        first, byte, count = spans[0].tolist()
        return first, byte, count

    def is_range(self, f: int) -> bool:
        """Tell whether fragment `f` is a run."""
        return self._span(f)[0] >= 0

    def range(self, f: int) -> tuple[int, int]:
        """Return start and count of a run; `QueryError` for an explicit list."""
        first, _, count = self._span(f)
        if first < 0:
            raise QueryError(f"Fragment {f} is an explicit list and no run; ask for its indices.")
        return first, count

    def indices(self, f: int) -> NDArray[np.int64]:
        """Return the rows of a fragment, runs written out."""
        first, byte, count = self._span(f)
        if first >= 0:
            return np.arange(first, first + count)
        return from_bytes(self.blob[byte : byte + 8 * count], np.int64)


def fragment_rows(fragments: Fragments, which: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the chunk-local rows of some fragments, one after the other, and how many each has.

    Raises
    ------
    CorruptError
        If a fragment is asked for that is not there, or a list goes beyond the rows that are.
    """
    counts = fragments.counts[which]
    rows = np.empty(counts.sum(), np.int64)
    kinds = np.ascontiguousarray(fragments.is_range).view(np.uint8)
    starts, sizes, listed = map(np.ascontiguousarray, (fragments.starts, fragments.counts, fragments.rows))
    known = native.Fragments(
        U8.address(kinds), I64.address(starts), I64.address(sizes), len(kinds), I64.address(listed), len(listed)
    )
    if library().ra_expand_fragments(byref(known), np.ascontiguousarray(which), len(which), rows, len(rows)):
        raise CorruptError("A list of fragments names one that is not there. Restore the store from a copy.")
    return rows, counts


def detect_runs(fragments: Fragments) -> Fragments:
    """Return the same fragments with every explicit list that is a run written as one."""
    listed = np.flatnonzero(~fragments.is_range & (fragments.counts > 0))
    if not listed.size:
        return fragments
    rows, counts = fragment_rows(fragments, listed)
    begin = counts_to_offsets(counts)
    first = rows[begin[:-1]]
    off = rows != concat_ranges(first, counts)
    good = np.diff(counts_to_offsets(off)[begin]) == 0
    is_range, starts = fragments.is_range.copy(), fragments.starts.copy()
    is_range[listed[good]], starts[listed[good]] = True, first[good]
    left = np.flatnonzero(~is_range)
    kept, lengths = fragment_rows(fragments, left)
    starts[left] = counts_to_offsets(lengths)[:-1]
    return Fragments(fragments.bounds, is_range, starts, fragments.counts, kept)
