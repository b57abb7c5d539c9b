"""Laws of reading results: every index gives what NumPy would, outside is an error, and the fast way gives the same."""

import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raggedatlas.wings.results.dataset
import raggedatlas.wings.results.row_readers
from raggedatlas import ResultDataset, ResultDatasetWriter
from raggedatlas.errors import CorruptError, NotFoundError, QueryError, RowIndexError, RowTypeError, SourceError
from raggedatlas.wings.results import lookup, save_to_database
from raggedatlas.wings.results.data_request import HyraxDataset
from raggedatlas.wings.results.schema import import_torch

pytestmark = pytest.mark.fast

N = 23
VALUES = np.random.default_rng(0).standard_normal((N, 2, 3)).astype(np.float32)
IDS = [f"id{i}" for i in range(N)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "run"
    with ResultDatasetWriter(folder) as writer:
        for a in range(0, N, 10):
            writer.write_batch(IDS[a : a + 10], VALUES[a : a + 10])
    return folder


@pytest.fixture(scope="module", params=["mapped", "memory", "take"])
def dataset(folder: Path, request: pytest.FixtureRequest) -> Any:
    made = ResultDataset({}, folder, mapped=request.param != "take")
    if request.param == "memory":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAGGEDATLAS_MAP_RESULTS", "0")
            assert not made.is_mapped()
            made.get_data(0)
    return made


def same(found: Any, expected: Any) -> bool:
    if import_torch() is not None:
        assert type(found) is import_torch().Tensor
    found = np.asarray(found)
    return bool(found.shape == expected.shape and found.dtype == expected.dtype and np.array_equal(found, expected))


def test_made_by_place_or_name(folder: Path) -> None:
    """C30, C31, C02: two arguments, text or path; a dataset of the project and of PyTorch; none of the old bridges."""
    for made in (ResultDataset({"a": 1}, str(folder)), ResultDataset(config={"a": 1}, data_location=folder)):
        assert (made.config, len(made)) == ({"a": 1}, N)
    assert issubclass(ResultDataset, HyraxDataset)
    if import_torch() is not None:
        assert issubclass(ResultDataset, import_torch().utils.data.Dataset)
    assert list(inspect.signature(ResultDataset).parameters)[:2] == ["config", "data_location"]
    assert not {"verb", "original_config", "original_dataset", "metadata"} & {
        *dir(ResultDataset), *inspect.signature(ResultDataset).parameters,
    }  # fmt: skip
    assert "batch_" not in inspect.getsource(raggedatlas.wings.results.dataset).replace("batch_size", "")


def test_missing_results_are_named(tmp_path: Path) -> None:
    """C32: no folder, no table, a table that was never committed, one of something else: each is said, with the path."""
    with pytest.raises(NotFoundError, match=r"esult folder .*nowhere does not exist"):
        ResultDataset({}, tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match="holds no results"):
        ResultDataset({}, tmp_path)
    (tmp_path / "lance_db" / "results.lance" / "data").mkdir(parents=True)
    with pytest.raises(NotFoundError, match="incomplete results"):
        ResultDataset({}, tmp_path)
    lance.write_dataset(pa.table({"a": [1]}), tmp_path / "lance_db" / "results.lance")
    with pytest.raises(CorruptError, match="no 'object_id'"):
        ResultDataset({}, tmp_path)


def test_the_length_is_of_the_version_opened(tmp_path: Path) -> None:
    """C33, C88: rows that come later are not seen by a dataset that is open."""
    with ResultDatasetWriter(tmp_path) as writer:
        writer.write_batch(["a"], [np.zeros(3)])
    made = ResultDataset({}, tmp_path)
    table = lance.dataset(str(tmp_path / "lance_db" / "results.lance"))
    table.insert(table.to_table())
    assert (len(made), len(ResultDataset({}, tmp_path)), len(ResultDataset({}, tmp_path, version=1))) == (1, 2, 1)
    assert ResultDataset({}, tmp_path).to_numpy().shape == (2, 3)


@pytest.mark.parametrize("index", [0, N - 1, np.int8(3), np.uint64(4), np.array(5)])
def test_one_row(dataset: Any, index: Any) -> None:
    """C34, C39, C85, C91: a whole number of any kind gives one tensor of the stored shape and dtype, which may be changed."""
    found = dataset[index]
    assert same(found, VALUES[int(index)])
    assert np.array_equal(dataset.get_data(index), VALUES[int(index)])
    assert dataset.get_object_id(index) == IDS[int(index)]
    found[:] = 0
    assert same(dataset[index], VALUES[int(index)])


@given(
    index=st.one_of(
        st.slices(N),
        st.slices(2 * N),
        st.lists(st.integers(0, N - 1)),
        st.lists(st.booleans(), min_size=N, max_size=N).map(np.array),
        st.lists(st.integers(0, N - 1), min_size=1).map(lambda rows: np.array(rows, np.uint8)),
    )
)
def test_several_rows(dataset: Any, index: Any) -> None:
    """C35, C36, C86: lists, slices, arrays and masks give what NumPy gives, with the first axis also for one row or none."""
    expected = VALUES[np.array(index, np.int64) if isinstance(index, list) else index]
    assert same(dataset[index], expected)
    assert np.array_equal(dataset.get_data(index), expected)
    assert len(dataset[index]) == len(expected)


@pytest.mark.parametrize(
    "index", [N, -1, N + 5, 2**62, [0, N], [-1], np.array([3, -7]), np.uint64(2**63), [True] * (N - 1)]
)
def test_rows_outside(dataset: Any, index: Any) -> None:
    """C36, C37, C87, R4: a row that is not there, negative ones included, is an IndexError that says how many there are."""
    for call in (dataset.__getitem__, dataset.get_data, dataset.get_object_id):
        with pytest.raises(RowIndexError, match="23") as caught:
            call(index)
        assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize("index", [True, np.True_, 1.5, "1", None, [0.0], [None], ["1"], [[0, 1]], [[0], [1, 2]], {1}])
def test_what_is_no_row(dataset: Any, index: Any) -> None:
    """C36, R4: what is no row number is a TypeError, and never silently another row."""
    with pytest.raises(RowTypeError) as caught:
        dataset[index]
    assert isinstance(caught.value, TypeError)


def test_iteration_ends(dataset: Any, folder: Path) -> None:
    """C38, R4: a loop over the dataset ends after its rows, also by number, and zip and list work."""
    assert len(list(dataset)) == N
    assert all(same(found, expected) for found, expected in zip(dataset, VALUES, strict=True))
    assert sum(1 for _, _ in zip(dataset, dataset.ids(), strict=True)) == N
    by_number = [np.asarray(dataset[i]) for i in range(N)]
    with pytest.raises(IndexError):
        dataset[N]
    assert np.array_equal(by_number, VALUES)
    assert [tuple(each.shape) for each in dataset.__getitems__([4, 4])] == [(2, 3), (2, 3)]


def test_fields_are_these(dataset: Any) -> None:
    """C40, C90: a table of one output has the getters of its data and ids, and no others."""
    assert {name for name in dir(dataset) if name.startswith("get_")} == {"get_data", "get_object_id"}
    with pytest.raises(AttributeError, match="get_logits"):
        dataset.get_logits(0)


def test_ids_are_a_sequence_and_an_iterator(dataset: Any) -> None:
    """C41, C89: ids come in row order as text, to lists, loops, NumPy and next."""
    ids = dataset.ids()
    assert (list(ids), len(ids), ids[2], ids[-1], ids[1:3]) == (IDS, N, "id2", "id22", ["id1", "id2"])
    assert np.array(ids).tolist() == IDS
    assert np.array(ids, dtype="U4").dtype == "U4"
    assert [next(ids), next(ids), *ids][:4] == ["id0", "id1", "id0", "id1"]
    assert len(list(iter(lambda: next(ids, None), None))) == N - 2
    assert dataset.get_object_id([3, 3]).tolist() == ["id3", "id3"]
    assert np.array(ids).dtype.kind == "U"
    assert ids == IDS == list(ids)
    assert ids == dataset.ids()
    assert ids == np.array(IDS)
    assert ids != IDS[:-1]
    assert ids != [*IDS[:-1], "other"]
    assert ids != "id0"


def test_ids_read_only_their_column(tmp_path: Path) -> None:
    """C41: asking for ids reads a small part of a table with long rows."""
    with ResultDatasetWriter(tmp_path) as writer:
        writer.write_batch(range(500), np.ones((500, 2000)))
    made = ResultDataset({}, tmp_path)
    made._table.io_stats_incremental()
    assert len(list(made.ids())) == 500
    assert made._table.io_stats_incremental().read_bytes < 100_000


def test_batches_and_the_whole(dataset: Any) -> None:
    """All rows come as one array, or in batches with their ids; a given array is filled if it fits."""
    batches = list(dataset.iter_batches(10))
    assert [len(values) for _, values in batches] == [10, 10, 3]
    assert np.array_equal(np.concatenate([values for _, values in batches]), VALUES)
    assert np.concatenate([names for names, _ in batches]).tolist() == IDS
    out = np.empty_like(VALUES)
    assert dataset.to_numpy(out) is out
    assert np.array_equal(out, VALUES)
    for bad in (np.empty((N, 6), np.float32), np.empty(VALUES.shape), out[:, :, ::-1]):
        with pytest.raises(QueryError, match="expected contiguous"):
            dataset.to_numpy(bad)
    with pytest.raises(QueryError, match="batch_size=0"):
        next(dataset.iter_batches(0))
    with pytest.raises(NotFoundError, match="no output 'x'"):
        dataset.to_numpy(column="x")


def test_pickled_datasets_read_the_same(dataset: Any) -> None:
    """C43: a dataset travels to another process by its place and version."""
    dataset[0]
    again = pickle.loads(pickle.dumps(dataset))
    assert (again.version, len(again)) == (dataset.version, N)
    assert same(again[[5, 2]], VALUES[[5, 2]])


@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_workers_of_a_data_loader(folder: Path, method: str | None) -> None:
    """C43: PyTorch's DataLoader, alone or with forked or spawned workers, gives every row in order."""
    data = pytest.importorskip("torch.utils.data")
    loader = data.DataLoader(
        ResultDataset({}, folder), batch_size=8, num_workers=2 if method else 0, multiprocessing_context=method
    )
    assert np.array_equal(np.concatenate([batch.numpy() for batch in loader]), VALUES)


def hyrax_table(folder: Path, kind: str, values: Any, batches: int, version: str) -> Path:
    """Make a table as public releases do: appended batch by batch."""
    shape = {"tensor_shape": list(values.shape[1:]), "tensor_dtype": str(values.dtype)}
    columns = {"0.7": {k: v if k == "tensor_dtype" else json.dumps(v) for k, v in shape.items()},
               "0.13": {"data": json.dumps(shape)}, "0.13-named": {"latent": json.dumps(shape)}}[kind]  # fmt: skip
    name = "latent" if kind == "0.13-named" else "data"
    size = int(np.prod(values.shape[1:]))
    schema = pa.schema(
        [pa.field("object_id", pa.string()), pa.field(name, pa.list_(pa.from_numpy_dtype(values.dtype), size))], columns
    )
    place = folder / "lance_db" / "results.lance"
    for number, rows in enumerate(np.array_split(np.arange(len(values)), batches)):
        flat = pa.array(values[rows].reshape(-1))
        table = pa.table(
            [pa.array([f"id{i}" for i in rows]), pa.FixedSizeListArray.from_arrays(flat, size)], schema=schema
        )
        lance.write_dataset(table, place, mode="append" if number else "overwrite", data_storage_version=version)
    return folder


@pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
@pytest.mark.parametrize("kind", ["0.7", "0.13", "0.13-named"])
@pytest.mark.parametrize("shape", [(2,), (4, 16)])
def test_tables_of_the_public_package(tmp_path: Path, kind: str, version: str, shape: tuple[int, ...]) -> None:
    """C45: tables of public releases are read, of either metadata, in many fragments, compacted or with deleted rows."""
    values = np.random.default_rng(1).standard_normal((20, *shape)).astype(np.float32)
    made = ResultDataset({}, hyrax_table(tmp_path, kind, values, 5, version))
    assert (made.tensor_shape, made.tensor_dtype, len(made)) == (shape, np.float32, 20)
    assert same(made[[19, 3, 3]], values[[19, 3, 3]])
    table = lance.dataset(str(tmp_path / "lance_db" / "results.lance"))
    table.optimize.compact_files()
    assert np.array_equal(ResultDataset({}, tmp_path).to_numpy(), values)
    table = lance.dataset(str(tmp_path / "lance_db" / "results.lance"))
    table.delete("object_id = 'id4'")
    left = ResultDataset({}, tmp_path)
    assert not left.is_mapped()
    assert np.array_equal(left.to_numpy(), np.delete(values, 4, axis=0))
    assert same(left[[4, 18]], values[[5, 19]])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "uint8"])
@pytest.mark.parametrize("columns", [1, 2, 30, 700])
def test_what_we_write_is_mapped(tmp_path: Path, dtype: str, columns: int) -> None:
    """C42: our tables are mapped, short rows too, also after Lance compacted them: a new Lance that lays them out otherwise fails here."""
    values = np.random.default_rng(2).integers(0, 200, (64, columns)).astype(dtype)
    with ResultDatasetWriter(tmp_path) as writer:
        writer.write_batch(range(64), values)
    table = lance.dataset(str(tmp_path / "lance_db" / "results.lance"))
    assert ResultDataset({}, tmp_path).is_mapped()
    table.insert(table.to_table())
    table.optimize.compact_files()
    again = ResultDataset({}, tmp_path)
    assert again.is_mapped()
    assert np.array_equal(again.to_numpy(), np.concatenate([values, values]))


def test_pages_that_are_not_as_told_are_not_mapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C42: another layout in the file's description, or rows that differ from Lance's, and Lance reads them."""
    made = ResultDataset({}, folder)
    assert made.is_mapped()
    monkeypatch.setattr(raggedatlas.wings.results.row_readers, "_matches_lance", lambda *_: False)
    assert not made.is_mapped()
    assert same(made[[5, 1]], VALUES[[5, 1]])
    monkeypatch.undo()
    monkeypatch.setattr(raggedatlas.wings.results.row_readers, "_PLAIN_PAGE", "{n_rows}{n_values}{bits}{row_bits}")
    assert not made.is_mapped()


def test_ids_are_found_in_a_table_with_deleted_rows(tmp_path: Path) -> None:
    """Row addresses of the index count deleted rows, so that an id would have the result of another: the ids are read instead."""
    with ResultDatasetWriter(tmp_path) as writer:
        writer.write_batch(IDS, VALUES)
    assert ResultDataset({}, tmp_path).find_indexed(["id7"]) is None
    table = lance.dataset(tmp_path / "lance_db/results.lance")
    table.create_scalar_index("object_id", "BTREE")
    found = ResultDataset({}, tmp_path).find_indexed(["id7"])
    assert found is not None
    assert [each.tolist() for each in found] == [[7], [0]]
    lance.dataset(tmp_path / "lance_db/results.lance").delete("object_id = 'id3'")
    assert ResultDataset({}, tmp_path).find_indexed(["id7"]) is None
    assert np.array_equal(lookup(tmp_path, "id7"), VALUES[7])
    with pytest.raises(SourceError, match=r"holds deleted rows.*compact_files"):
        save_to_database(tmp_path, least_rows=2)


def test_missing_values_are_refused(tmp_path: Path) -> None:
    """A table with missing rows, values or ids is none of results, and is not read as zeros."""
    stored = pa.list_(pa.float32(), 2)
    for number, (ids, data) in enumerate([
        (["a", "b"], pa.array([[1, 2], None], stored)), (["a", "b"], pa.array([[1, 2], [None, 3]], stored)),
        (["a", None], pa.array([[1, 2], [3, 4]], stored)),
    ]):  # fmt: skip
        place = tmp_path / str(number)
        lance.write_dataset(pa.table({"object_id": ids, "data": data}), place / "lance_db" / "results.lance")
        made = ResultDataset({}, place)
        with pytest.raises(CorruptError, match=r"null values|without an id"):
            (made.to_numpy(), list(made.ids()))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [({"tensor_shape": "[3]"}, r"shape \(3,\)"), ({"tensor_shape": "{"}, "cannot be parsed"), ({"tensor_shape": "[" * 200_000}, "cannot be parsed"), ({"tensor_shape": "[1e999]"}, "cannot be parsed"), ({"data": "[1]"}, "cannot be parsed"),
     ({"tensor_shape": "[2]", "tensor_dtype": "nonsense"}, "cannot be parsed"), ({"tensor_shape": "[-1, -2]"}, r"\(-1, -2\)")],
)  # fmt: skip
def test_metadata_that_does_not_fit(tmp_path: Path, metadata: dict[str, str], message: str) -> None:
    """C32: a shape or dtype that does not fit the column is refused when the table is opened."""
    schema = pa.schema([("object_id", pa.string()), ("data", pa.list_(pa.float32(), 2))], metadata)
    lance.write_dataset(pa.table([["a"], [[1, 2]]], schema=schema), tmp_path / "lance_db" / "results.lance")
    with pytest.raises(CorruptError, match=message):
        ResultDataset({}, tmp_path)
