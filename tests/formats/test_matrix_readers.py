"""Laws of the row readers: any block size gives the same matrix, whatever it lives in."""

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from raggedatlas.errors import SourceError
from raggedatlas.formats import external_sort
from raggedatlas.formats.external_sort import ExternalRowSort, stable_order
from raggedatlas.formats.matrix_readers import (
    CscRows,
    CsrRows,
    DenseRows,
    MatrixLocation,
    MatrixSubset,
    RowReader,
    SequentialArray,
)
from raggedatlas.model.batch import CsrBlock
from support.hypothesis_profile import examples

pytestmark = pytest.mark.fast

PLACE = MatrixLocation("file.h5ad", "X", lambda row: f"cell-{row}")
DTYPES = st.sampled_from(["bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64", ">f4", ">i2"])


def by_name(indptr: Any, indices: Any, data: Any) -> dict[str, Any]:
    """Name the arrays of a sparse matrix as files do."""
    return {"indptr": indptr, "indices": indices, "data": data}


def in_memory(array: np.ndarray, chunk: int) -> Any:
    return array


def in_hdf5(array: np.ndarray, chunk: int) -> Any:
    file = h5py.File(uuid4().hex, "w", driver="core", backing_store=False)
    chunks = (min(chunk, len(array)), *array.shape[1:]) if array.size else None
    return file.create_dataset("x", data=array, chunks=chunks, compression="gzip" if chunks else None, maxshape=None)


def in_zarr(array: np.ndarray, chunk: int) -> Any:
    chunks = (chunk, *(max(1, n) for n in array.shape[1:]))
    dtype = array.dtype.newbyteorder("=")
    made = zarr.create_array(zarr.storage.MemoryStore(), shape=array.shape, dtype=dtype, chunks=chunks)
    made[...] = array
    return made


BACKENDS = [in_memory, in_hdf5, in_zarr]


@st.composite
def entries(draw: st.DrawFn) -> tuple[tuple[int, int], np.ndarray, np.ndarray, np.ndarray]:
    """Return entries of a small matrix in any order, duplicates included."""
    shape = (draw(st.integers(1, 12)), draw(st.integers(1, 9)))
    n = draw(st.integers(0, 40))
    rows = draw(hnp.arrays(np.int64, n, elements=st.integers(0, shape[0] - 1)))
    columns = draw(hnp.arrays(np.int64, n, elements=st.integers(0, shape[1] - 1)))
    dtype = np.dtype(draw(DTYPES))
    return shape, rows, columns, np.arange(1, n + 1).astype(dtype)


def as_arrays(
    shape: tuple[int, int], major: np.ndarray, minor: np.ndarray, values: np.ndarray, n_major: int
) -> tuple[np.ndarray, ...]:
    order = np.argsort(major, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(major, minlength=n_major))])
    return indptr, minor[order], values[order]


def read_all(reader: RowReader, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, columns, values = [], [], []
    for start in range(0, reader.shape[0], step):
        block = reader.read(start, min(start + step, reader.shape[0]))
        assert isinstance(block, CsrBlock)
        assert block.indptr.dtype == np.int64
        assert block.indptr[0] == 0
        rows.append(start + np.repeat(np.arange(block.n_rows), np.diff(block.indptr)))
        columns.append(block.indices)
        values.append(block.layers["values"])
    return np.concatenate(rows), np.concatenate(columns), np.concatenate(values)


@pytest.mark.parametrize("backend", BACKENDS)
@given(made=entries(), step=st.integers(1, 13), chunk=st.integers(1, 20))
@examples(20)
def test_csr_rows_keep_every_entry_in_order(backend: Callable[..., Any], made: Any, step: int, chunk: int) -> None:
    """Whatever the block and chunk size, the entries come row by row in the stored order, duplicates included, in a type that SciPy holds."""
    shape, rows, columns, values = made
    indptr, indices, data = as_arrays(shape, rows, columns, values, shape[0])
    reader = CsrRows(by_name(indptr, backend(indices, chunk), backend(data, chunk)), shape, PLACE)
    _, got_columns, got = read_all(reader, step)
    np.testing.assert_array_equal(got_columns, indices)
    np.testing.assert_array_equal(got, data)
    assert got.dtype == (np.float32 if data.dtype == np.float16 else data.dtype.newbyteorder("="))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("band", [32, 64 << 20])
@given(made=entries(), step=st.integers(1, 13))
@examples(15)
def test_csc_rows_are_the_same_matrix_by_rows(backend: Callable[..., Any], band: int, made: Any, step: int) -> None:
    """A CSC matrix read by rows has the same entries, within a row by column, whether sorted in memory or through files."""
    shape, rows, columns, values = made
    indptr, indices, data = as_arrays(shape, columns, rows, values, shape[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(external_sort, "BAND_BYTES", band)
        reader = CscRows(by_name(indptr, backend(indices, 7), backend(data, 7)), shape, PLACE)
        got = read_all(reader, step)
        reader.close()
    order = np.argsort(indices, kind="stable")
    by_column = np.repeat(np.arange(shape[1]), np.diff(indptr))
    for found, expected in zip(got, (indices[order], by_column[order], data[order]), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    array=hnp.arrays(
        st.sampled_from(["float32", "int8", "bool"]), hnp.array_shapes(min_dims=2, max_dims=3, min_side=1, max_side=9)
    ),
    step=st.integers(1, 10),
    chunk=st.integers(1, 9),
)
@examples(20)
def test_dense_rows_are_the_array(backend: Callable[..., Any], array: np.ndarray, step: int, chunk: int) -> None:
    """Whatever the block and chunk size, dense rows one after the other are the array."""
    reader = DenseRows(backend(array, min(chunk, len(array))), PLACE)
    parts = [reader.read(i, min(i + step, len(array))).layers["values"] for i in range(0, len(array), step)]
    np.testing.assert_array_equal(np.concatenate(parts), array)


def test_walking_down_decodes_each_chunk_once() -> None:
    """Blocks that do not fit the chunks still read each row of the file once."""

    class Counting:
        shape, dtype, chunks = (100, 3), np.dtype("f4"), (10, 3)
        n_rows = 0

        def __getitem__(self, rows: slice) -> np.ndarray:
            self.n_rows += rows.stop - rows.start
            return np.zeros((rows.stop - rows.start, 3), np.float32)

    counting = Counting()
    array = SequentialArray(counting, PLACE)
    for start in range(0, 100, 7):
        array.read(start, min(start + 7, 100))
    assert counting.n_rows == 100


def in_file(path: Path, array: np.ndarray) -> Any:
    """Store an array in large chunks that are read without the HDF5 library."""
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=array, chunks=(len(array) // 2, *array.shape[1:]), compression="gzip")
    return h5py.File(path)["x"]


@pytest.mark.parametrize("form", ["dense", "csr", "csc"])
@pytest.mark.parametrize("stored", ["zarr", "hdf5"])
def test_closed_readers_hold_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, stored: str) -> None:
    """After `close` a reader holds no values that it decoded."""
    # Larger reads take their memory from a pool that all readers share.
    monkeypatch.setattr("raggedatlas.formats.matrix_readers.ENTRIES", 1000)
    n, width = 20_000, 8

    def kept(name: str, array: np.ndarray) -> Any:
        return in_file(tmp_path / name, array) if stored == "hdf5" else in_zarr(array, len(array) // 2)

    if form == "dense":
        reader: RowReader = DenseRows(kept("data", np.ones((n, width))), PLACE)
    else:
        ones, places = kept("data", np.ones(n * width)), kept("indices", np.tile(np.arange(width), n))
        shape = (n, width) if form == "csr" else (width, n)
        pointers = np.arange(0, n * width + 1, width)
        reader = (CsrRows if form == "csr" else CscRows)(by_name(pointers, places, ones), shape, PLACE)
    # What the libraries keep of their first call is not the reader's.
    reader.read(1, 3)
    reader.close()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        reader.read(1, 3)
        reader.close()
        # Less than the values of one chunk; a thread of zarr's may hold one for a moment longer.
        deadline = time.monotonic() + 10
        while (held := tracemalloc.get_traced_memory()[0] - before) >= n // 2 * width * 8:
            assert time.monotonic() < deadline, held
            time.sleep(0.01)
    finally:
        tracemalloc.stop()


def test_steps_shrink_where_rows_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is cut short rather than take more bytes than a block may, but takes at least one row."""
    monkeypatch.setattr("raggedatlas.formats.matrix_readers.BLOCK_BYTES", 160)
    matrix = sp.csr_array(np.ones((10, 10)))
    reader = CsrRows(by_name(matrix.indptr, matrix.indices, matrix.data), (10, 10), PLACE)
    assert reader.stop(3, 9) == 4
    assert DenseRows(np.ones((10, 10)), PLACE).stop(0, 5) == 2


@given(keys=hnp.arrays(np.int64, st.integers(0, 50), elements=st.integers(0, 6)), n_keys=st.sampled_from([7, 1 << 17]))
def test_stable_order_is_a_stable_sort(keys: np.ndarray, n_keys: int) -> None:
    """The linear-time order equals NumPy's stable sort, for few and for many different keys."""
    np.testing.assert_array_equal(stable_order(keys, n_keys), np.argsort(keys, kind="stable"))


def test_spilled_files_go_when_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Temporary files stand only between the first entry and close."""
    monkeypatch.setattr(external_sort, "BAND_BYTES", 64)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = ExternalRowSort((8, 4), np.dtype("f4"), 30)
    made.add(np.arange(30) % 8, np.arange(30) % 4, np.arange(30, dtype=np.float32))
    assert list(tmp_path.rglob("*.entries"))
    made.finish()
    assert made.read(2, 2).n_rows == 0
    made.close()
    assert not list(tmp_path.iterdir())


def test_one_heavy_row_is_read_without_its_whole_band(monkeypatch: pytest.MonkeyPatch) -> None:
    """A band far over its size is read row by row, with equal results."""
    monkeypatch.setattr(external_sort, "BAND_BYTES", 64)
    rows = np.zeros(50, np.int64)
    made = ExternalRowSort((6, 50), np.dtype("i4"), 50)
    made.add(rows, np.arange(50), np.arange(50, dtype=np.int32))
    made.finish()
    np.testing.assert_array_equal(made.read(0, 6).layers["values"], np.arange(50))
    made.close()


def test_chosen_columns_are_renumbered() -> None:
    """Choosing columns equals SciPy's column choice, in the order given."""
    matrix = sp.random_array((9, 7), density=0.5, rng=np.random.default_rng(0), format="csr")
    reader = CsrRows(by_name(matrix.indptr, matrix.indices, matrix.data), (9, 7), PLACE)
    chosen = np.array([1, 4, 6])
    block = MatrixSubset(reader, None, chosen).read(0, 9)
    got = sp.csr_array((block.layers["values"], block.indices, block.indptr), shape=(9, 3))
    np.testing.assert_array_equal(got.toarray(), matrix[:, chosen].toarray())


GOOD = {"indptr": np.array([0, 2, 3, 5]), "indices": np.array([0, 3, 1, 0, 2]), "data": np.ones(5)}
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "decrease": ({"indptr": np.array([0, 3, 2, 5])}, "cell-1"),
    "start": ({"indptr": np.array([1, 2, 3, 5])}, ""),
    "end": ({"indptr": np.array([0, 2, 3, 9])}, "cell-2"),
    "outside its 4 columns": ({"indices": np.array([0, 3, 4, 0, 2])}, "cell-1"),
    "pointers": ({"indptr": np.array([0, 5])}, ""),
    "expected integers": ({"indices": GOOD["indices"].astype(float)}, ""),
    "type datetime64": ({"data": GOOD["data"].astype("M8[s]")}, ""),
}


@pytest.mark.parametrize("said", BROKEN)
def test_broken_sparse_matrices_are_refused_by_name(said: str) -> None:
    """Each way for a sparse matrix to be wrong is told with the file, the element and the first cell concerned."""
    changes, cell = BROKEN[said]
    with pytest.raises(SourceError, match=said) as caught:
        CsrRows({**GOOD, **changes}, (3, 4), PLACE).read(0, 3)
    assert "file.h5ad: X" in str(caught.value)
    assert cell in str(caught.value)


def test_csc_with_rows_out_of_range_is_refused() -> None:
    """A CSC entry for a row beyond the cells is told with its column."""
    arrays = by_name(np.array([0, 1, 2]), np.array([0, 7]), np.ones(2))
    with pytest.raises(SourceError, match="column 1 for row 7"):
        CscRows(arrays, (3, 2), PLACE).read(0, 3)
