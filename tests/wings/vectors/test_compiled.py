"""The compiled loops over bytes of vector stores agree with NumPy, and damaged bytes never lead out of them."""

from collections.abc import Callable

import numpy as np
import pytest

from raggedatlas.errors import AtlasError, CorruptError, ValuesError
from raggedatlas.store.native import BAD_BOUNDS, BAD_SIZE, BEYOND, I64, OUTSIDE, U8, RaFragments, library
from raggedatlas.wings.vectors import geometry
from raggedatlas.wings.vectors.chunking import chunk_coordinates, encode_positions
from raggedatlas.wings.vectors.pyramid import vertex_tolerances
from raggedatlas.wings.vectors.shapes import counts_to_offsets
from raggedatlas.wings.vectors.storage.codecs import (
    Blobs,
    Bytes,
    decode_fragments,
    decode_manifests,
    decode_vlen,
    encode_fragments,
    encode_manifests,
    encode_vlen,
    locate_fragments,
    split_manifests,
)

RNG = np.random.default_rng


def an_index() -> Bytes:
    """Return an index of 70 fragments, every third a list."""
    is_range = np.arange(70) % 3 > 0
    counts = np.arange(70) % 5
    listed = np.where(is_range, 0, counts)
    starts = np.where(is_range, np.arange(70) * 2, counts_to_offsets(listed)[:-1])
    rows = RNG(1).integers(0, 300, listed.sum())
    return encode_fragments(geometry.Fragments(np.array([0, 70]), is_range, starts, counts, rows))[0]


def manifests() -> Blobs:
    """Return manifests of two objects, with a block of each mode."""
    counts = np.array([1, 4, 3])
    chunks, starts = np.arange(9).reshape(3, 3), np.array([7, 2, 0])
    modes = np.array([0, 1, 2], np.uint8)
    return encode_manifests(
        geometry.Objects(np.array([0, 1]), np.array([0, 2, 3]), chunks, modes, starts, counts, np.array([5, 6, 1]))
    )


def read_index(data: Bytes) -> None:
    whole = Blobs(data, np.array([0, len(data)]))
    n = len(decode_fragments(whole).starts)
    locate_fragments(data, np.arange(n), 2**40, np.zeros((n, 3), np.int64))


def read_manifests(data: Bytes) -> None:
    decode_manifests(split_manifests(data, 3, 2), 3, np.arange(2))


CORPUS: dict[str, tuple[Callable[[], Bytes], Callable[[Bytes], object]]] = {
    "index": (an_index, read_index),
    "manifests": (lambda: manifests().data, read_manifests),
    "vlen": (lambda: np.frombuffer(encode_vlen(manifests()), np.uint8), decode_vlen),
}


@pytest.mark.parametrize("name", CORPUS)
def test_damaged_bytes_are_refused_or_read(name: str) -> None:
    """Changed, cut and lengthened bytes give CorruptError or other contents, never a crash; both happen."""
    make, read = CORPUS[name]
    sound, rng, refused = make(), RNG(2), 0
    read(sound)
    for i in range(2000):
        data = sound.copy()
        for place in rng.integers(0, len(data), 1 + i % 3):
            data[place] = rng.choice([0, 1, 255, 128, data[place] ^ 1 << rng.integers(8)])
        if i % 5 == 0:
            data = data[: rng.integers(len(data))]
        elif i % 7 == 0:
            data = np.append(data, np.zeros(8, np.uint8))
        try:
            read(np.ascontiguousarray(data))
        except CorruptError:
            refused += 1
    assert 200 < refused < 2000


def test_numbers_of_cells_are_those_of_chunks() -> None:
    """Floats of both widths, in one to four dimensions and on seams, get the chunk that division by NumPy gives."""
    for n_dims in (1, 2, 3, 4):
        for dtype in (np.float32, np.float64):
            positions = RNG(n_dims).integers(-40, 40, (500, n_dims)).astype(dtype) / 4
            edges = np.array([2.5, 1.0, 0.75, 3.0])[:n_dims]
            numbered = encode_positions(positions, edges)
            assert np.array_equal(numbered.keys(numbered.codes), chunk_coordinates(positions, edges))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_positions_that_are_no_numbers_are_refused(bad: float) -> None:
    """A position that is not finite lies in no chunk."""
    with pytest.raises(ValuesError, match="from the origin, or is not a number"):
        encode_positions(np.array([[0.0, 1.0], [bad, 2.0]]), (1.0, 1.0))


def test_lines_beyond_their_points_are_refused() -> None:
    """Offsets that go beyond the points, or fall, are an error and no access."""
    for offsets in ([0, 4], [0, 3, 1], [-1, 2]):
        with pytest.raises(AtlasError):
            vertex_tolerances(np.zeros((3, 3)), np.array(offsets))


def test_rooms_that_do_not_fit_are_refused() -> None:
    """Bounds of indexes beyond the bytes, output that is too small, and rows beyond a cell give a status."""
    index = an_index()
    counts, where, lib = np.zeros((2, 1), np.int64), np.zeros(1, np.int64), library()
    pointer = where.ctypes.data_as(lib.ra_count_fragments.argtypes[-1])
    for bounds in ([0, len(index) + 1], [-1, len(index)], [8, 0]):
        args = index, len(index), np.array(bounds), 1
        assert lib.ra_count_fragments(*args, counts, pointer) == BAD_BOUNDS
    kinds, starts, sizes = np.zeros(3, np.uint8), np.array([0, 2**62, -1]), np.array([3, 3, 1])
    rows = np.arange(4)
    known = RaFragments(U8.address(kinds), I64.address(starts), I64.address(sizes), 3, I64.address(rows), 4)
    for wanted, n_out, status in [(0, 2, BAD_SIZE), (0, 4, BAD_SIZE), (1, 3, BEYOND), (2, 1, BEYOND), (3, 1, BEYOND)]:
        out = np.zeros(n_out, np.int64)
        assert lib.ra_expand_fragments(known, np.array([wanted]), 1, out, n_out) == status
    cell, out = np.zeros(40, np.uint8), np.zeros(16, np.uint8)
    for span, place in [
        ((9, 0, 2), 0),
        ((0, 0, 5), 0),
        ((0, 0, 1), 4),
        ((0, 0, 1), -1),
        ((-1, 8, 2**60), 0),
        ((-1, -8, 1), 0),
    ]:
        span_array, places = np.array([span]), np.array([place])
        assert lib.ra_copy_fragments(index, len(index), cell, 40, span_array, places, 1, 4, out, 16) == BEYOND


def test_walks_of_hostile_graphs_end() -> None:
    """Ends and edges that there are not, and chains that go on nowhere, give a status."""
    for adjacency, bounds in [
        ([[9, 0], [0, 0]], [0, 1, 2]),
        ([[1, 5], [0, 0]], [0, 1, 2]),
        ([[1, 0], [0, 0]], [0, 1, 2]),
    ]:
        room = np.zeros(1, np.uint8), np.zeros(2, np.int64), np.zeros((1, 2), np.int64), np.zeros(1, np.int64)
        fixed = np.array([1, 0], np.uint8)
        assert library().ra_walk_chains(np.array(adjacency), 1, np.array(bounds), fixed, 2, *room) == OUTSIDE
