"""Manifests: for each object, blocks of one chunk and fragments there (seed 002 §7.6)."""

from ctypes import byref, c_int64
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.store.native import I64, OUT_I64, OUT_U8, U8, Manifests, library
from raggedatlas.vectors.blobs import Blobs, Bytes, concat_ranges, counts_to_offsets, raise_fault
from raggedatlas.vectors.geometry import Objects

SINGLE, RUN, LIST = 0, 1, 2
"""Modes of a block."""


def encode_manifests(objects: Objects) -> Blobs:
    """Return one manifest for each object: u32 blocks, and of each int64 chunk, u8 mode, and what the mode asks."""
    body = np.where(objects.modes == LIST, 4 + 8 * objects.counts, 8 + 8 * (objects.modes == RUN))
    sizes = body + 8 * objects.chunks.shape[1] + 1
    bounds = counts_to_offsets(4 + np.diff(counts_to_offsets(sizes)[objects.bounds]))
    out = np.empty(bounds[-1], np.uint8)
    wide = (objects.bounds, objects.chunks, objects.starts, objects.counts, objects.fragments)
    first, chunks, starts, counts, items = (np.ascontiguousarray(column, np.int64) for column in wide)
    modes = np.ascontiguousarray(objects.modes, np.uint8)
    columns = (I64, first), (I64, chunks), (U8, modes), (I64, starts), (I64, counts), (I64, items)
    raise_fault(library().ra_write_manifests(byref(_build_objects(columns)), out, out.size), "An object index")
    return Blobs(out, bounds)


def _build_objects(columns: Any) -> Manifests:  # noqa: ANN401  (arrays of several types)
    """Describe checked columns of manifests, of which the second and the last tell the sizes, to compiled functions."""
    bounds, chunks, items = columns[0][1], columns[1][1], columns[-1][1]
    return Manifests(
        *(kind.address(column) for kind, column in columns), len(bounds) - 1, chunks.shape[1], len(chunks), len(items)
    )


def decode_manifests(blobs: Blobs, n_dims: int, ids: NDArray[np.int64]) -> Objects:
    """Return the object index of manifests.

    Parameters
    ----------
    blobs : Blobs
        One manifest for each object.
    n_dims : int
        How many coordinates a chunk has.
    ids : (n,) int64
        Ids of the objects.

    Raises
    ------
    CorruptError
        If a manifest has an unknown mode, is cut short, goes on after its end, or holds a negative number.
    """
    totals, where = np.zeros(2, np.int64), c_int64()
    data, first, n = np.ascontiguousarray(blobs.data), np.ascontiguousarray(blobs.bounds), len(blobs)
    fault = library().ra_count_manifests(data, data.size, first, n, n_dims, totals, byref(where))
    if fault:
        raise_fault(fault, f"The manifest of object {ids[where.value]}")
    n_blocks, n_items = totals.tolist()
    bounds, chunks, modes = (
        np.empty(n + 1, np.int64),
        np.empty((n_blocks, n_dims), np.int64),
        np.empty(n_blocks, np.uint8),
    )
    starts, counts, items = (np.empty(size, np.int64) for size in (n_blocks, n_blocks, n_items))
    wide = [(OUT_I64, column) for column in (starts, counts, items)]
    out = _build_objects([(OUT_I64, bounds), (OUT_I64, chunks), (OUT_U8, modes), *wide])
    raise_fault(library().ra_read_manifests(data, data.size, first, byref(out), byref(where)), "An object index")
    return Objects(ids=ids, bounds=bounds, chunks=chunks, modes=modes, starts=starts, counts=counts, fragments=items)


def split_manifests(data: Bytes, n_dims: int, n_objects: int) -> Blobs:
    """Find the manifests that stand back to back in ``object_index/data``.

    Raises
    ------
    CorruptError
        If there are not exactly `n_objects`.
    """
    if n_objects < 0 or 4 * n_objects > data.size:
        raise CorruptError(
            f"object_index/data has {data.size:,} bytes, too few for {n_objects:,} manifests; it was cut short."
        )
    bounds = np.zeros(n_objects + 1, np.int64)
    contents = np.ascontiguousarray(data)
    raise_fault(library().ra_measure_manifests(contents, contents.size, n_dims, bounds, n_objects), "object_index/data")
    return Blobs(data, bounds)


class ObjectFragments(NamedTuple):
    """Fragments of objects one by one: (P,) the block of each and its chunk-local number, (B + 1,) those of each object."""

    blocks: NDArray[np.int64]
    fragments: NDArray[np.int64]
    bounds: NDArray[np.int64]


def find_missing_blocks(objects: Objects, limits: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which blocks name a fragment that their chunk does not have, (K,) bool, without expanding the runs.

    Parameters
    ----------
    objects : Objects
        The index.
    limits : (K,) int64
        How many fragments the chunk of each block has; 0 for a chunk that is not there.
    """
    # compared by subtraction, because start + count may exceed int64
    absent = (objects.counts > 0) & ((objects.starts < 0) | (objects.starts > limits - objects.counts))
    lists = np.flatnonzero(objects.modes == LIST)
    sizes = objects.counts[lists]
    items = objects.fragments[concat_ranges(objects.starts[lists], sizes)]
    outside = (items < 0) | (items >= np.repeat(limits[lists], sizes))
    absent[lists] = np.diff(counts_to_offsets(outside)[counts_to_offsets(sizes)]) > 0
    return absent


def expand_manifests(objects: Objects, limits: NDArray[np.int64], where: str) -> ObjectFragments:
    """Return the fragments of an object index one by one, in order of traversal.

    Parameters
    ----------
    objects : Objects
        The index.
    limits : (K,) int64
        How many fragments the chunk of each block has. The counts of a damaged index are compared with it before memory is allocated.
    where : str
        The level, for the message.

    Raises
    ------
    CorruptError
        If a block names a fragment that its chunk does not have.
    """
    if find_missing_blocks(objects, limits).any():
        raise CorruptError(
            f"{where}/object_index names a fragment that its chunk does not have. Restore the store from a copy."
        )
    fragments = concat_ranges(objects.starts, objects.counts)
    listed = objects.modes == LIST
    if listed.any():
        explicit = np.repeat(listed, objects.counts)
        fragments[explicit] = objects.fragments[fragments[explicit]]
    blocks = np.repeat(np.arange(len(objects.starts)), objects.counts)
    return ObjectFragments(blocks, fragments, counts_to_offsets(objects.counts)[objects.bounds])


def take_manifests(objects: Objects, rows: NDArray[np.int64]) -> Objects:
    """Return the index of some objects, in the given order."""
    counts = np.diff(objects.bounds)[rows]
    blocks = concat_ranges(objects.bounds[rows], counts)
    starts, sizes, modes = objects.starts[blocks].copy(), objects.counts[blocks], objects.modes[blocks]
    listed = modes == LIST
    items = objects.fragments[concat_ranges(starts[listed], sizes[listed])]
    starts[listed] = counts_to_offsets(sizes[listed])[:-1]
    return Objects(objects.ids[rows], counts_to_offsets(counts), objects.chunks[blocks], modes, starts, sizes, items)
