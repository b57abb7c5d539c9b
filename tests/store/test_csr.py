"""Laws of the compiled loops over sparse rows: equal to NumPy and SciPy on random matrices; bad bounds are refused."""

from ctypes import byref, c_int64
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from raggedatlas.errors import CorruptError
from raggedatlas.store.native import BAD_BOUNDS, BAD_COLUMN, GOOD, I64, REPEATED, UNSORTED, RaColumns, csr_of, library
from raggedatlas.store.sparse import count_columns, count_kept, map_rows, move_runs, remap_csr, sorting_order
from support.hypothesis_profile import examples

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def at_each_level(level: int) -> int:
    """Run every test of this file with each level of vector instructions."""
    return level


def random_csr(n_rows: int, n_columns: int, seed: int, dtype: str) -> sparse.csr_matrix:
    """Return a random sparse matrix with small positive values and sorted rows."""
    rng = np.random.default_rng(seed)
    dense = rng.integers(1, 100, (n_rows, n_columns)) * (rng.random((n_rows, n_columns)) < 0.4)
    return sparse.csr_matrix(dense.astype(dtype))


@examples(60)
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
    assert (np.diff(indices)[np.setdiff1d(np.arange(1, len(indices)), indptr) - 1] > 0).all()


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
    with pytest.raises(CorruptError, match="names a column that it has not got"):
        remap_csr(np.array([0, len(indices)]), np.array(indices), np.ones(len(indices)), np.array(column_map), 3)


rows = st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=6)


@settings(deadline=None)
@given(rows)
def test_rows_are_sorted_stably(lists: list[list[int]]) -> None:
    """Every row comes out sorted, and the order tells where each entry was, ties in their old order."""
    indptr = np.cumsum([0, *map(len, lists)])
    indices = np.array(list(chain(*lists)), dtype=np.int32)
    order = sorting_order(indptr, indices, 10)
    indices = indices[order]
    assert indices.tolist() == list(chain(*map(sorted, lists)))
    for start, stop in pairwise(indptr):
        ties = np.flatnonzero(np.diff(indices[start:stop]) == 0) + start
        assert all(order[tie] < order[tie + 1] for tie in ties)


@settings(deadline=None)
@given(st.lists(st.integers(-2, 12), max_size=30))
def test_columns_are_counted(columns: list[int]) -> None:
    """Counts are those of each column; entries outside are not counted."""
    counts = count_columns(np.array(columns, dtype=np.int32), 10)
    assert counts.tolist() == [columns.count(column) for column in range(10)]


@pytest.mark.parametrize("pointers", [[0, 2**40, 3], [0, -1, 3], [0, 3, 1], [2, 1, 3], [0, 1, 4]])
def test_bounds_that_leave_the_entries_are_refused(pointers: list[int]) -> None:
    """Bounds that are huge, negative, descending or swapped are a status of every function that takes rows."""
    indptr, columns = np.array(pointers), np.array([0, 1, 2], np.int32)
    rows, where, out = csr_of(indptr, columns), c_int64(), np.zeros((2, 3))
    with pytest.raises(CorruptError, match=r"A sparse matrix: row [01] has bounds that fall or go beyond"):
        remap_csr(indptr, columns, np.ones(3), np.arange(3), 3)
    found = np.zeros(3, np.int32), np.zeros(3, np.int64)
    assert map_rows(indptr, columns, np.arange(3, dtype=np.int32), 3, np.array([0, 1]), *found) == BAD_BOUNDS
    assert library().ra_check_order(byref(rows), 3, byref(where)) == BAD_BOUNDS
    assert library().ra_write_dense(byref(rows), np.ones(3), 8, out, 3, byref(where)) == BAD_BOUNDS
    assert library().ra_scan_entries(byref(rows), 0, None, 3, np.zeros(7, np.int64)) == BAD_BOUNDS


@given(st.lists(st.lists(st.integers(0, 199), unique=True, max_size=120), max_size=6), st.data())
def test_rows_come_out_sorted(rows: list[list[int]], data: st.DataObject) -> None:
    """Mapped columns of every row are sorted, left-out ones gone, and each entry knows where it came from."""
    column_map = np.array(data.draw(st.permutations(range(200))), np.int32)
    column_map[data.draw(st.sets(st.integers(0, 199)).map(sorted))] = -1
    indptr = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    local = np.array([c for row in rows for c in row], np.uint16)
    targets = np.cumsum([0, *count_kept(indptr, local, column_map, "Rows")])
    indices, at = np.empty(targets[-1], np.int32), np.empty(targets[-1], np.int64)
    state = map_rows(indptr, local, column_map, 200, targets[:-1], indices, at)
    assert state in {GOOD, UNSORTED}
    assert indices.tolist() == [c for row in rows for c in sorted(column_map[row][column_map[row] >= 0].tolist())]
    assert (column_map[local[at]] == indices).all()


@pytest.mark.parametrize("width", [3, 100])
def test_bad_columns_are_noticed(width: int) -> None:
    """A column beyond the map, or twice in a row, is a status, and nothing is written beyond the output."""
    indptr, local = np.array([0, width]), np.arange(width, dtype=np.uint32)[::-1].copy()
    same, start = np.arange(width, dtype=np.int32), np.zeros(1, np.int64)
    found = np.full(width + 9, 7, np.int32), np.empty(width, np.int64)
    assert map_rows(indptr, local, same[1:].copy(), width, start, found[0][:width], found[1]) == BAD_COLUMN
    assert map_rows(indptr, local, same, width, start, found[0][: width - 1], found[1][: width - 1]) == BAD_COLUMN
    assert map_rows(indptr, local, same, width - 1, start, found[0][:width], found[1]) == BAD_COLUMN
    local[0] = local[1]
    assert map_rows(indptr, local, same, width, start, found[0][:width], found[1]) == REPEATED
    assert (found[0][width:] == 7).all()


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4), st.integers(0, 6)), max_size=5))
def test_moved_runs_are_slices(runs: list[tuple[int, int, int]]) -> None:
    """Runs are copied as assignments of slices are; one that leaves either array is refused."""
    values, out = np.arange(8, dtype=np.uint16), np.zeros(7, np.uint32)
    starts, counts, targets = np.array(runs, np.int64).reshape(-1, 3).T.copy()
    if (starts + counts > len(values)).any() or (targets + counts > len(out)).any():
        with pytest.raises(CorruptError, match="outside its entries"):
            move_runs(values, starts, counts, targets, out)
        return
    expected = out.copy()
    for start, count, target in runs:
        expected[target : target + count] = values[start : start + count]
    move_runs(values, starts, counts, targets, out)
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize("run", [(-1, 1, 0), (0, -1, 0), (0, 1, -1), (2**62, 2**62, 0), (0, 2**62, 2**62)])
def test_hostile_runs_are_refused(run: tuple[int, int, int]) -> None:
    """Negative numbers and those whose sum overflows are outside."""
    with pytest.raises(CorruptError, match="outside its entries"):
        move_runs(np.zeros(4), *(np.array([part]) for part in run), np.zeros(4))


def test_entries_of_a_copy_find_their_rows() -> None:
    """A row that is not stored, and a row that a column names twice, are told; what is not wanted is left out."""
    place, at = np.array([1, -1, 0], np.int32), np.array([0, 1, 2, 0], np.uint32)
    counts, places = np.zeros(3, np.int64), np.empty(4, np.int32)
    assert library().ra_count_places(at, 4, 4, place, 3, counts, 2, places) == GOOD
    assert counts.tolist() == [1, 1, 2]
    assert places.tolist() == [1, -1, 0, 1]
    assert library().ra_count_places(np.array([3], np.uint32), 1, 4, place, 3, counts, 2, places) == BAD_COLUMN
    values, columns, out = np.array([5, 6, 7, 8], np.uint16), np.zeros(3, np.int32), np.zeros(3, np.uint16)

    def fill(bounds: list[int], numbers: list[int], room: int = 3) -> int:
        arrays = np.array(bounds), np.array(numbers)
        of = RaColumns(*map(I64.address, arrays), len(numbers), 4)
        cursor, last = np.array([0, 1]), np.zeros(2, np.int32)
        status = library().ra_fill_places(byref(of), places, values, 2, cursor, last, 2, columns, False, out, room)
        return int(status)

    assert fill([0, 3, 4], [2, 4]) == GOOD
    assert columns.tolist() == [2, 2, 4]
    assert out.tolist() == [7, 5, 8]
    assert fill([0, 4], [2]) == REPEATED
    assert fill([0, 2**40], [2]) == BAD_BOUNDS
    assert fill([0, 3, 4], [2, 4], room=2) == BAD_BOUNDS
