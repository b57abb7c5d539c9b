"""The compiled gather: rows as plain Python reads them, whichever columns are kept and however the rows are stored."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.model.arrays import DTYPES, ArraySpec
from raggedatlas.model.batch import assemble_csr
from raggedatlas.query.modalities import join_dtypes
from raggedatlas.store.arrays import ArrayWriter, read_spec
from raggedatlas.store.codecs import PROFILES
from raggedatlas.store.gather import RowGatherer, RowGroup
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader
from raggedatlas.store.runtime import BufferPool
from support.hypothesis_profile import examples
from support.object_store import Remote

N_COLUMNS = 3000


def stored(folder: str, name: str, values: NDArray[Any], chunk: int, breaks: NDArray[np.int64]) -> ArrayReader:
    """Write one packed array in small chunks."""
    writer = ArrayWriter(Location(folder), name, values.dtype, profile="packed", chunk_rows=chunk, shard_rows=4 * chunk)
    writer.append(values, breaks)
    return ArrayReader(Location(folder), writer.close())


def made_rows(rng: np.random.Generator, lengths: list[int], *, ascend: bool) -> list[NDArray[np.uint16]]:
    """Draw distinct columns for every row, dense ones at the front as detection order has them."""
    weight = 1 / np.arange(1, N_COLUMNS + 1)
    rows = [rng.choice(N_COLUMNS, n, replace=False, p=weight / weight.sum()).astype(np.uint16) for n in lengths]
    return [np.sort(row) for row in rows] if ascend else rows


@pytest.mark.long
@examples(40)
@given(data=st.data())
def test_few_columns_are_found_as_many_are(data: st.DataObject) -> None:
    """Whatever is kept, of rows that ascend or not, across chunks: every kept entry comes once, by ascending column."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lengths = data.draw(st.lists(st.integers(0, 900), min_size=1, max_size=6))
    rows = made_rows(rng, lengths, ascend=data.draw(st.booleans()))
    ends = np.cumsum([0, *lengths])
    columns = np.concatenate(rows)
    values = rng.integers(0, data.draw(st.sampled_from([2, 200, 60_000])), len(columns)).astype(np.uint16)
    if data.draw(st.booleans()):
        values[: len(values) // 2] = 0  # whole chunks of zeros are not stored
    kept = rng.choice(N_COLUMNS, data.draw(st.sampled_from([0, 1, 7, 60, 90, 200, N_COLUMNS])), replace=False)
    column_map = np.full(N_COLUMNS, -1, np.int64)
    column_map[kept] = rng.permutation(len(kept))
    asked = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)), np.int64)
    with tempfile.TemporaryDirectory() as folder:
        group = RowGroup(
            stored(folder, "columns", columns, data.draw(st.sampled_from([100, 600])), ends[1:-1]),
            {"v": stored(folder, "values", values, data.draw(st.sampled_from([70, 600])), ends[1:-1])},
            column_map,
        )
        gatherer = RowGatherer([group], len(kept), {"v": np.dtype(np.uint16)}, threads=data.draw(st.integers(1, 2)))
        indptr, indices, layers = gatherer.gather(np.zeros(len(asked), np.int32), ends[asked], ends[asked + 1])
    for i, row in enumerate(asked.tolist()):
        own = slice(ends[row], ends[row + 1])
        right = {
            int(column_map[c]): int(v) for c, v in zip(columns[own], values[own], strict=True) if column_map[c] >= 0
        }
        span = slice(indptr[i], indptr[i + 1])
        assert indices[span].tolist() == sorted(right)
        assert layers["v"][span].tolist() == [right[c] for c in sorted(right)]
    assert len(indices) == indptr[-1]


@pytest.mark.parametrize("n_kept", [40, N_COLUMNS])
def test_a_column_twice_in_a_row_is_refused(n_kept: int) -> None:
    """A row that names a kept column twice is refused by name, by both ways of reading."""
    columns = np.tile(np.arange(400, dtype=np.uint16), 2)
    column_map = np.where(np.arange(N_COLUMNS) < n_kept, np.arange(N_COLUMNS), -1)
    with tempfile.TemporaryDirectory() as folder:
        none = np.empty(0, np.int64)
        parts = stored(folder, "c", columns, 1000, none), {"v": stored(folder, "v", columns, 1000, none)}
        gatherer = RowGatherer([RowGroup(*parts, column_map)], n_kept, {"v": np.dtype(np.uint16)}, threads=1)
        with pytest.raises(CorruptError, match="a feature twice in one cell"):
            gatherer.gather(np.zeros(1, np.int32), np.array([0]), np.array([800]))


@pytest.mark.usefixtures("level")
def test_bitmaps_at_the_end_of_their_map(tmp_path: Path) -> None:
    """Dense rows are right wherever their map ends within the last bits; a map that ends before their columns is refused."""
    none, group_of = np.empty(0, np.int64), np.zeros(1, np.int32)
    rng = np.random.default_rng(0)
    for n_columns in range(240, 258):
        columns = np.append(np.flatnonzero(rng.random(n_columns - 1) < 0.55), n_columns - 1).astype(np.uint16)
        folder = str(tmp_path / str(n_columns))
        parts = stored(folder, "c", columns, 300, none), {"v": stored(folder, "v", columns, 300, none)}
        column_map = np.arange(n_columns)[::-1].copy()
        span = np.array([3]), np.array([len(columns) - 1])
        for sizes in (n_columns, int(columns[-1]) - 1):
            group = RowGroup(*parts, column_map[:sizes])
            gatherer = RowGatherer([group], n_columns, {"v": np.dtype(np.uint16)}, threads=1)
            if sizes < n_columns:
                with pytest.raises(CorruptError):
                    gatherer.gather(group_of, span[0], np.array([len(columns)]))
            else:
                _, indices, layers = gatherer.gather(group_of, *span, sort=False)
                assert indices.tolist() == column_map[columns[3:-1]].tolist()
                assert layers["v"].tolist() == columns[3:-1].tolist()


N_ROWS, N_LOCAL, CHUNK = 14, 50, 40
VALUE_DTYPES = tuple(name for name in DTYPES if not name.startswith("complex"))
CODECS = (*PROFILES, "blosc", "big", "fill", "unsharded")
FILL = 3


class Stored:
    """One ragged matrix, its columns and values in every dtype and codec, written when first asked for."""

    def __init__(self, location: Location) -> None:
        rng = np.random.default_rng(5)
        lengths = [0, 1, N_LOCAL, *rng.integers(0, N_LOCAL, N_ROWS - 3).tolist()]
        self.location = location
        self.bounds = np.cumsum([0, *lengths])
        rows = [rng.choice(N_LOCAL, n, replace=False) for n in lengths]
        self.columns = np.concatenate([np.sort(row) if i % 2 else row for i, row in enumerate(rows)])
        self.numbers = rng.integers(-(2**63), 2**63 - 1, len(self.columns), endpoint=True)
        self.readers: dict[tuple[str, str, str], ArrayReader] = {}

    def values(self, dtype: str) -> NDArray[Any]:
        """Return the values as they are stored in a dtype: the first two chunks are zeros, the third is `FILL`."""
        kind = np.dtype(dtype)
        made = (self.numbers % 2000 - 1000) / 8 if kind.kind == "f" else self.numbers.view(np.uint64)
        made = made.astype(bool) if kind.kind == "b" else made.astype(kind)
        made[: 2 * CHUNK], made[2 * CHUNK : 3 * CHUNK] = 0, FILL
        return made

    def reader(self, what: str, dtype: str, codec: str) -> ArrayReader:
        """Return the reader of the columns or the values."""
        key = (what, dtype, codec)
        if key not in self.readers:
            values = self.columns.astype(dtype) if what == "columns" else self.values(dtype)
            self.readers[key] = ArrayReader(self.location, self._write("-".join(key), values, codec))
        return self.readers[key]

    def _write(self, name: str, values: NDArray[Any], codec: str) -> ArraySpec:
        sizes = {"chunk_rows": CHUNK, "shard_rows": 3 * CHUNK}
        if codec in PROFILES:
            writer = ArrayWriter(self.location, name, values.dtype, profile=codec, **sizes)
            writer.append(values)
            return writer.close()
        shapes: dict[str, Any] = {"shape": values.shape, "chunks": (CHUNK,), "shards": (3 * CHUNK,)}
        options: dict[str, Any] = {
            "blosc": {"compressors": zarr.codecs.BloscCodec(cname="zstd", shuffle="bitshuffle")},
            "big": {"serializer": zarr.codecs.BytesCodec(endian="big"), "compressors": zarr.codecs.GzipCodec()},
            "fill": {"fill_value": FILL, "compressors": None},
            "unsharded": {"shards": None},
        }[codec]
        if codec == "big" and values.itemsize == 1:
            del options["serializer"]
        root = zarr.open_group(self.location.zarr_store(read_only=False), mode="a")
        # Shards of nothing but the fill value too: an atlas has all of them.
        options = {"dtype": values.dtype, "config": {"write_empty_chunks": True}} | options
        root.create_array(name, **(shapes | options))[:] = values
        return read_spec(self.location, name)


@pytest.fixture(scope="module", params=["local", pytest.param("remote", marks=pytest.mark.long)])
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The matrix on disk and in an object store."""
    if request.param == "local":
        return Stored(Location(str(tmp_path_factory.mktemp("forms"))))
    remote = Remote.make(request.getfixturevalue("s3_proxy"))
    return Stored(Location(remote.uri, remote.options))


any_columns = st.tuples(
    st.sampled_from(["uint8", "uint16", "uint32", "uint64", "int8", "int32", "int64"]), st.sampled_from(CODECS)
)
any_values = st.tuples(st.sampled_from(VALUE_DTYPES), st.sampled_from(CODECS))


@examples(40)
@given(data=st.data())
def test_every_form_is_gathered(matrix: Stored, data: st.DataObject) -> None:
    """Groups of any dtypes and codecs give what SciPy makes of their values, whatever is reordered, left out or repeated."""
    forms = data.draw(st.lists(st.tuples(any_columns, any_values, any_values), min_size=1, max_size=3))
    dtypes = {
        layer: join_dtypes({np.dtype(form[which][0]) for form in forms}) for layer, which in (("one", 1), ("two", 2))
    }
    dtypes = {layer: dtype for layer, dtype in dtypes.items() if dtype is not None}
    assume(dtypes)
    rng, n_cols = np.random.default_rng(data.draw(st.integers(0, 2**32))), 2 * N_LOCAL
    maps = []
    for _ in forms:
        column_map = rng.permutation(n_cols)[:N_LOCAL]
        maps.append(np.sort(column_map) if data.draw(st.booleans()) else column_map)
        maps[-1][rng.random(N_LOCAL) < data.draw(st.sampled_from([0, 0.5, 0.95]))] = -1
    # Of a result with more columns than int32 counts, every column is moved up.
    wide = data.draw(st.sampled_from([0, 2**31]))
    groups = [
        RowGroup(
            matrix.reader("columns", *columns),
            {"one": matrix.reader("values", *one), "two": matrix.reader("values", *two)},
            np.where(column_map < 0, -1, column_map + wide),
        )
        for (columns, one, two), column_map in zip(forms, maps, strict=True)
    ]
    asked = st.tuples(st.integers(-1, len(forms) - 1), st.integers(0, N_ROWS - 1))
    group, row = np.array([(0, 0), *data.draw(st.lists(asked, max_size=20))])[1:].T
    gatherer = RowGatherer(groups, wide + n_cols, dtypes, threads=data.draw(st.integers(1, 2)))
    sort = data.draw(st.booleans())
    start, end = matrix.bounds[row], matrix.bounds[row + 1]
    indptr, indices, layers = gatherer.gather(group.astype(np.int32), start, end, sort=sort)
    assert indices.dtype == (np.int64 if wide else np.int32)
    for layer, which in (("one", 1), ("two", 2)):
        if layer not in dtypes:
            continue
        stored = [matrix.values(form[which][0]).astype(dtypes[layer]) for form in forms]
        right = np.zeros((len(row), n_cols), dtypes[layer])
        for i in np.flatnonzero(group >= 0).tolist():
            column_map = maps[group[i]]
            columns = column_map[matrix.columns[start[i] : end[i]]]
            right[i, columns[columns >= 0]] = stored[group[i]][start[i] : end[i]][columns >= 0]
        found = sp.csr_array((layers[layer], indices - wide, indptr), shape=right.shape)
        assert found.data.dtype == dtypes[layer]
        assert found.has_canonical_format or not sort
        np.testing.assert_array_equal(found.toarray(), right)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint32", "uint64"])
@pytest.mark.parametrize("bad", [-1, 3])
def test_columns_outside_are_refused(dtype: str, bad: int, tmp_path: Path) -> None:
    """A column that is negative or beyond the list, in whatever dtype it is stored, is refused by name."""
    location = Location(str(tmp_path))
    root = zarr.open_group(location.zarr_store(read_only=False), mode="a")
    root.create_array("v", shape=(2,), chunks=(2,), dtype="float64")
    root.create_array("c", shape=(2,), chunks=(2,), dtype=dtype)[:] = np.array([1, bad]).astype(dtype)
    readers = [ArrayReader(location, read_spec(location, name)) for name in "cv"]
    gatherer = RowGatherer([RowGroup(readers[0], {"v": readers[1]}, np.arange(3))], 3, {"v": np.dtype("float64")})
    with pytest.raises(CorruptError, match="a feature that its list has not got"):
        gatherer.gather(np.zeros(1, np.int32), np.array([0]), np.array([2]))


@pytest.mark.parametrize(
    ("columns", "values", "shape", "message"),
    [
        ("float32", "float32", (2,), "columns are integers"),
        ("uint8", "complex64", (2,), "list of booleans, integers or floats"),
        ("uint8", "float32", (3,), "differ in length"),
    ],
)
def test_arrays_that_are_no_entries_are_refused(
    columns: str, values: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    """Arrays of a damaged catalogue that are no columns and values are refused before anything is read."""
    location = Location(str(tmp_path))
    root = zarr.open_group(location.zarr_store(read_only=False), mode="a")
    root.create_array("c", shape=(2,), chunks=(2,), dtype=columns)
    root.create_array("v", shape=shape, chunks=(2,), dtype=values)
    readers = [ArrayReader(location, read_spec(location, name)) for name in "cv"]
    with pytest.raises(CorruptError, match=message):
        RowGatherer([RowGroup(readers[0], {"v": readers[1]}, np.arange(3))], 3, {"v": np.dtype("float32")})


def test_results_are_taken_without_a_copy() -> None:
    """A SciPy matrix lies on the memory of a result, fresh or reused, and is what its constructor makes."""
    pool = BufferPool(2)
    for _ in range(3):
        indices, values = pool.take(60_000, np.dtype(np.int32)), pool.take(60_000, np.dtype(np.uint16))
        indices[:] = np.tile(np.arange(600), 100)
        values[:] = 1
        indptr = np.arange(0, 60_001, 600)
        made = assemble_csr(sp.csr_array, (values, indices, indptr), 700)
        assert np.shares_memory(made.indices, indices)
        assert np.shares_memory(made.data, values)
        right = sp.csr_array((values, indices, indptr), shape=(100, 700))
        assert np.shares_memory(right.data, values)
        assert (made != right).nnz == 0
        assert made.indptr.dtype == made.indices.dtype
        del indices, values, made, right
