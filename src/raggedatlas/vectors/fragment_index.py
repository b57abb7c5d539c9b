"""The fragment index ZVFG: for each chunk, lists of its rows, as runs or one by one (seed 002 §7.3).

A blob has a head of 16 bytes (magic, version, flags, F, R), a bitmap of F bits padded to 8 bytes (1: a run), R runs as
(int64 start, int64 count), E + 1 uint32 offsets of the E = F - R explicit lists, and their int64 rows. Without fragments it
is the head alone. All chunks of a level are encoded and decoded together.
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, QueryError
from raggedatlas.vectors.blobs import Blobs, Bytes, as_bytes, interleave, offsets_of, runs, sections_of
from raggedatlas.vectors.geometry import Fragments

MAGIC = 0x5A564647
VERSION = 1
HEAD = 16


def encode_fragments(fragments: Fragments) -> Blobs:
    """Return one blob for each chunk.

    Examples
    --------
    >>> one = Fragments(np.array([0, 1]), np.array([True]), np.array([0]), np.array([3]), np.zeros(0, np.int64))
    >>> len(encode_fragments(one)[0])
    44
    """
    n_all = np.diff(fragments.bounds)
    kinds = offsets_of(fragments.is_range)
    n_runs = np.diff(kinds[fragments.bounds])
    heads = np.zeros((len(n_all), 4), "<u4")
    heads[:, 0], heads[:, 1], heads[:, 2], heads[:, 3] = MAGIC, VERSION, n_all, n_runs
    padded = (n_all + 63) // 64 * 64
    bits = np.zeros(padded.sum(), np.uint8)
    bits[runs(offsets_of(padded)[:-1], n_all)] = fragments.is_range
    table = np.stack([fragments.starts[fragments.is_range], fragments.counts[fragments.is_range]], axis=1)
    offsets, sizes = _list_offsets(fragments, n_all, n_all - n_runs)
    n_rows = np.diff(offsets_of(np.where(fragments.is_range, 0, fragments.counts))[fragments.bounds])
    return interleave(
        Blobs(as_bytes(heads), np.arange(len(n_all) + 1, dtype=np.int64) * HEAD),
        Blobs(np.packbits(bits, bitorder="little"), offsets_of(padded // 8)),
        Blobs(as_bytes(table.astype(np.int64, copy=False)), offsets_of(n_runs * 16)),
        Blobs(as_bytes(offsets), offsets_of(sizes * 4)),
        Blobs(as_bytes(fragments.rows.astype(np.int64, copy=False)), offsets_of(n_rows * 8)),
    )


def _list_offsets(
    fragments: Fragments, n_all: NDArray[np.int64], n_lists: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the running offsets of the explicit lists of all chunks, and how many each chunk has."""
    sizes = np.where(n_all > 0, n_lists + 1, 0)
    begin = offsets_of(sizes)
    steps = np.zeros(begin[-1], np.int64)
    steps[runs(begin[:-1] + 1, np.where(n_all > 0, n_lists, 0))] = fragments.counts[~fragments.is_range]
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
    data, base, size = blobs.data, blobs.bounds[:-1], np.diff(blobs.bounds)
    if (size < HEAD).any():
        raise CorruptError(f"{what} is shorter than its head of {HEAD} bytes. Restore it from a copy.")
    heads = data[base[:, None] + np.arange(HEAD)].view("<u4").astype(np.int64)
    n_all, n_runs = heads[:, 2], heads[:, 3]
    _check_heads(heads, what)
    padded = (n_all + 63) // 64 * 8
    n_lists = n_all - n_runs
    n_offsets = np.where(n_all > 0, n_lists + 1, 0)
    at_offsets = HEAD + padded + 16 * n_runs
    at_rows = at_offsets + 4 * n_offsets
    if (at_rows > size).any():
        raise CorruptError(f"{what} is cut short: its head declares more than its bytes hold. Restore it from a copy.")
    bits = np.unpackbits(sections_of(data, base + HEAD, padded), bitorder="little")
    is_range = bits[runs(offsets_of(padded * 8)[:-1], n_all)].view(bool)
    bounds = offsets_of(n_all)
    if (np.diff(offsets_of(bits)[offsets_of(padded * 8)]) != n_runs).any() or is_range.sum() != n_runs.sum():
        raise CorruptError(f"{what}: the bitmap does not have as many bits as the head declares runs.")
    table = _values(sections_of(data, base + HEAD + padded, 16 * n_runs), "<i8").reshape(-1, 2)
    offsets = _values(sections_of(data, base + at_offsets, 4 * n_offsets), "<u4").astype(np.int64)
    ends = offsets_of(n_offsets)
    n_rows = np.zeros(len(size), np.int64)
    n_rows[n_all > 0] = offsets[ends[1:][n_all > 0] - 1]
    if (at_rows + 8 * n_rows != size).any():
        raise CorruptError(f"{what} has other bytes than its explicit lists need. Restore it from a copy.")
    counts_listed = _list_counts(offsets, ends[:-1][n_all > 0], what)
    rows = _values(sections_of(data, base + at_rows, 8 * n_rows), "<i8")
    if (table < 0).any() or (rows < 0).any():
        raise CorruptError(f"{what} holds a negative start, count or row. Restore it from a copy.")
    starts, counts = np.empty(bounds[-1], np.int64), np.empty(bounds[-1], np.int64)
    starts[is_range], counts[is_range] = table[:, 0], table[:, 1]
    starts[~is_range], counts[~is_range] = offsets_of(counts_listed)[:-1], counts_listed
    return Fragments(bounds, is_range, starts, counts, rows)


def _check_heads(heads: NDArray[np.int64], what: str) -> None:
    """Refuse heads with another magic, version or flags, or with more runs than fragments."""
    if (heads[:, 0] != MAGIC).any():
        raise CorruptError(f"{what} does not begin with the magic number of ZVFG. Restore it from a copy.")
    if (heads[:, 1] != VERSION).any():
        bad = int(heads[heads[:, 1] != VERSION][0, 1])
        raise CorruptError(f"{what} has version {bad & 0xFFFF} and flags {bad >> 16}; expected 1 and 0.")
    if (heads[:, 3] > heads[:, 2]).any():
        raise CorruptError(f"{what} declares more runs than fragments. Restore it from a copy.")


def _list_counts(offsets: NDArray[np.int64], begin: NDArray[np.int64], what: str) -> NDArray[np.int64]:
    """Return the lengths of explicit lists from the offsets of all chunks, which begin at `begin`."""
    if not len(offsets):
        return offsets
    steps = np.diff(offsets)
    inner = np.ones(len(offsets), bool)
    inner[begin] = False
    counts: NDArray[np.int64] = steps[inner[1:]]
    if (offsets[begin] != 0).any() or (counts < 0).any():
        raise CorruptError(f"{what} has offsets that fall or do not begin at 0. Restore it from a copy.")
    return counts


def _values(data: Bytes, dtype: str) -> NDArray[np.int64]:
    """View bytes as integers, wherever they lie."""
    return np.ascontiguousarray(data).view(dtype)


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
        self.blob = blob
        if blob.size < HEAD:
            raise CorruptError(f"A fragment index of {blob.size} bytes is shorter than its head of {HEAD}.")
        heads = np.ascontiguousarray(blob[:HEAD]).view("<u4").astype(np.int64)[None]
        _check_heads(heads, "A fragment index")
        self.n_fragments, self.n_ranges = int(heads[0, 2]), int(heads[0, 3])

    @cached_property
    def _fragments(self) -> Fragments:
        return decode_fragments(Blobs(self.blob, np.array([0, self.blob.size])))

    def _check(self, f: int) -> None:
        if not 0 <= f < self.n_fragments:
            raise QueryError(f"There is no fragment {f}; the chunk has {self.n_fragments}.")

    def is_range(self, f: int) -> bool:
        """Tell whether fragment `f` is a run, by its bit alone."""
        self._check(f)
        at = HEAD + f // 8
        if at >= self.blob.size:
            raise CorruptError("A fragment index is cut short in its bitmap. Restore it from a copy.")
        return bool(self.blob[at] >> (f % 8) & 1)

    def range(self, f: int) -> tuple[int, int]:
        """Return start and count of a run; `QueryError` for an explicit list."""
        if not self.is_range(f):
            raise QueryError(f"Fragment {f} is an explicit list and no run; ask for its indices.")
        return int(self._fragments.starts[f]), int(self._fragments.counts[f])

    def indices(self, f: int) -> NDArray[np.int64]:
        """Return the rows of a fragment, runs written out."""
        self._check(f)
        start, count = int(self._fragments.starts[f]), int(self._fragments.counts[f])
        if self._fragments.is_range[f]:
            return np.arange(start, start + count)
        return self._fragments.rows[start : start + count]


def fragment_rows(fragments: Fragments, which: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the chunk-local rows of some fragments, one after the other, and how many each has."""
    counts, starts = fragments.counts[which], fragments.starts[which]
    rows = runs(starts, counts)
    listed = ~fragments.is_range[which]
    if listed.any():
        explicit = np.repeat(listed, counts)
        rows[explicit] = fragments.rows[rows[explicit]]
    return rows, counts


def as_runs(fragments: Fragments) -> Fragments:
    """Return the same fragments with every explicit list that is a run written as one."""
    listed = np.flatnonzero(~fragments.is_range & (fragments.counts > 0))
    if not listed.size:
        return fragments
    rows, counts = fragment_rows(fragments, listed)
    begin = offsets_of(counts)
    first = rows[begin[:-1]]
    off = rows != runs(first, counts)
    good = np.diff(offsets_of(off)[begin]) == 0
    is_range, starts = fragments.is_range.copy(), fragments.starts.copy()
    is_range[listed[good]], starts[listed[good]] = True, first[good]
    left = np.flatnonzero(~is_range)
    kept, lengths = fragment_rows(fragments, left)
    starts[left] = offsets_of(lengths)[:-1]
    return Fragments(fragments.bounds, is_range, starts, fragments.counts, kept)
