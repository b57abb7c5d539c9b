"""Laws of the compiled loops: equal to numpy and scipy on random matrices."""

import weakref
from itertools import chain, pairwise

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from raggedatlas.store import lanes, rings
from raggedatlas.store.kernels import count_columns, has_sorted_unique_rows, remap_csr, sort_rows


def random_csr(n_rows: int, n_columns: int, seed: int, dtype: str) -> sparse.csr_matrix:
    """Return a random sparse matrix with small positive values and sorted rows."""
    rng = np.random.default_rng(seed)
    dense = rng.integers(1, 100, (n_rows, n_columns)) * (rng.random((n_rows, n_columns)) < 0.4)
    return sparse.csr_matrix(dense.astype(dtype))


@settings(deadline=None, max_examples=60)
@given(
    n_rows=st.integers(0, 6),
    n_columns=st.integers(1, 8),
    seed=st.integers(0, 100),
    dtype=st.sampled_from(["uint8", "int32", "float32", "float64"]),
    data=st.data(),
)
def test_remapped_columns_are_those_of_scipy(n_rows, n_columns, seed, dtype, data) -> None:  # noqa: ANN001
    """Each kept column lands where the map says, rows come out sorted, values keep their dtype."""
    matrix = random_csr(n_rows, n_columns, seed, dtype)
    n_out = n_columns + 3
    places = data.draw(st.permutations(range(n_out)))[:n_columns]
    column_map = np.array([place if data.draw(st.booleans()) else -1 for place in places], np.int64)
    indptr, indices, values = remap_csr(matrix.indptr.astype(np.int64), matrix.indices, matrix.data, column_map, n_out)
    expected = np.zeros((n_rows, n_out), dtype)
    kept = column_map >= 0
    expected[:, column_map[kept]] = matrix.toarray()[:, kept]
    found = sparse.csr_matrix((values, indices, indptr), shape=(n_rows, n_out))
    np.testing.assert_array_equal(found.toarray(), expected)
    assert values.dtype == dtype
    assert has_sorted_unique_rows(indptr, indices) == (True, True)


def test_equal_columns_keep_their_order() -> None:
    """Two columns that map to one stay two entries, in their old order."""
    indptr, indices, values = remap_csr(
        np.array([0, 3]), np.array([0, 1, 2], np.int32), np.array([5, 6, 7]), np.array([4, 1, 4]), 5
    )
    assert indptr.tolist() == [0, 3]
    assert indices.tolist() == [1, 4, 4]
    assert values.tolist() == [6, 5, 7]


@pytest.mark.parametrize(("indices", "column_map"), [([0, 3], [0, 1, 2]), ([-1], [0, 1, 2]), ([0], [7])])
def test_columns_outside_are_refused(indices: list[int], column_map: list[int]) -> None:
    """A column beyond the map, or a map beyond the output, is refused before a kernel runs."""
    with pytest.raises(IndexError):
        remap_csr(np.array([0, len(indices)]), np.array(indices), np.ones(len(indices)), np.array(column_map), 3)


rows = st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=6)


@settings(deadline=None)
@given(rows)
def test_row_flags_are_those_of_python(lists: list[list[int]]) -> None:
    """Sorted and unique are what they are called, rows taken one by one."""
    indptr = np.cumsum([0, *map(len, lists)])
    indices = np.array(list(chain(*lists)), dtype=np.int32)
    ascending = all(row == sorted(row) for row in lists)
    unique = all(len(row) == len(set(row)) for row in lists)
    assert has_sorted_unique_rows(indptr, indices) == (ascending, unique)


@settings(deadline=None)
@given(rows)
def test_rows_are_sorted_stably(lists: list[list[int]]) -> None:
    """Every row comes out sorted, and the order tells where each entry was, ties in their old order."""
    indptr = np.cumsum([0, *map(len, lists)])
    indices = np.array(list(chain(*lists)), dtype=np.int32)
    before = indices.copy()
    order = sort_rows(indptr, indices)
    assert indices.tolist() == list(chain(*map(sorted, lists)))
    np.testing.assert_array_equal(before[order], indices)
    for start, stop in pairwise(indptr):
        ties = np.flatnonzero(np.diff(indices[start:stop]) == 0) + start
        assert all(order[tie] < order[tie + 1] for tie in ties)


@settings(deadline=None)
@given(st.lists(st.integers(-2, 12), max_size=30))
def test_columns_are_counted(columns: list[int]) -> None:
    """Counts are those of each column; entries outside are not counted."""
    counts = count_columns(np.array(columns, dtype=np.int32), 10)
    assert counts.tolist() == [columns.count(column) for column in range(10)]


@numba.njit
def _above(values, limit):  # noqa: ANN001, ANN202
    return lanes.above(np.uint64(values.ctypes.data), np.uint32(limit))


@numba.njit
def _mark(values, first, bits):  # noqa: ANN001, ANN202
    lanes.mark_sixteen(np.uint64(values.ctypes.data), np.uint32(first), np.uint64(bits.ctypes.data))


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64), st.integers(0, 2**32 - 1))
def test_what_is_above_a_limit_is_told_by_bits(values: list[int], limit: int) -> None:
    """Bit i is set where value i is above the limit, without a sign."""
    for edge in (limit, values[0], 0, 2**32 - 1):
        assert _above(np.array(values, np.uint32), edge) == sum((v > edge) << i for i, v in enumerate(values))


@settings(deadline=None)
@given(st.lists(st.integers(0, 127), min_size=16, max_size=16), st.integers(0, 2**32 - 128), st.integers(0, 2**64 - 1))
def test_sixteen_bits_are_set_at_once(places: list[int], first: int, before: int) -> None:
    """Sixteen values set their bits in two words, counted from the first; what was set stays."""
    bits = np.array([before, 0], np.uint64)
    _mark(np.array(places, np.uint32) + np.uint32(first), first, bits)
    wanted = before
    for place in places:
        wanted |= 1 << place
    assert int(bits[0]) | int(bits[1]) << 64 == wanted


def test_a_ring_keeps_no_more_memory_than_it_may() -> None:
    """Of pieces that are let go, as many are kept as fit the number and the bytes that are allowed."""
    ring = rings.BufferRing(4, 2**20)
    held = [ring.take(2**18, np.dtype(np.uint8)) for _ in range(9)]
    del held
    assert 0 < sum(item.size for item in ring.free) <= 2**20
    ring = rings.BufferRing(4)
    held = [ring.take(2**18, np.dtype(np.uint8)) for _ in range(9)]
    del held
    assert len(ring.free) == 4


def test_large_blocks_share_a_ring_while_anyone_holds_it() -> None:
    """Whoever asks gets the same ring, until nobody has it any more."""
    one = rings.shared_ring()
    assert rings.shared_ring() is one
    memory = one.take(2**17, np.dtype(np.uint8))
    at = memory.ctypes.data
    del memory
    assert rings.shared_ring().take(2**17, np.dtype(np.uint8)).ctypes.data == at
    gone = weakref.ref(one)
    del one
    assert gone() is None
