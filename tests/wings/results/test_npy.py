"""Laws of reading ``.npy`` results, and of choosing between them and a table."""

import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from raggedatlas import (
    InferenceDataSet,
    ResultDataset,
    ResultDatasetWriter,
    create_results_writer,
    load_results_dataset,
)
from raggedatlas.errors import CorruptError, NotFoundError, RowIndexError, RowTypeError, SourceError
from raggedatlas.wings.results.data_request import HyraxDataset
from raggedatlas.wings.results.folder import find_results
from raggedatlas.wings.results.npy_results import NpyResults
from raggedatlas.wings.results.schema import import_torch
from support.atlases import npy_run

pytestmark = pytest.mark.fast

GENERATIONS = ["0.2", "0.3", "0.6"]
IDS = [30, 4, 11, 7, 100, 2]
VALUES = np.arange(36, dtype=np.float32).reshape(6, 2, 3)
BY_ID = np.argsort(IDS)


@pytest.fixture(params=GENERATIONS)
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return npy_run(tmp_path / "run", [(IDS[:4], VALUES[:4]), (IDS[4:], VALUES[4:])], request.param)


def opened(folder: Path, **options: Any) -> InferenceDataSet:
    with pytest.warns(DeprecationWarning, match=r"convert-results.*ResultDataset"):
        return InferenceDataSet({}, folder, **options)


def test_one_warning(run: Path) -> None:
    """C70: making one warns exactly once, by a DeprecationWarning that names the way out; reading and pickling do not warn."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = InferenceDataSet({}, run)
        assert [each.category for each in caught] == [DeprecationWarning]
        assert "test_npy" in caught[0].filename
        (made[0], made.ids(), pickle.loads(pickle.dumps(made))[1])
        assert len(caught) == 1


def test_all_generations_read_alike(run: Path) -> None:
    """C70, C02: rows stand in the order of the ids, as float64 as ever; the class knows nothing of Lance."""
    made = opened(run)
    assert (len(made), list(made.ids())) == (6, [str(each) for each in sorted(IDS)])
    found = np.asarray(made[[0, 1, 2, 3, 4, 5]])
    assert found.dtype == np.float64
    assert np.array_equal(found, VALUES[BY_ID])
    assert np.array_equal(made.get_data(slice(None)), VALUES[BY_ID])
    assert made.get_data(3).dtype == np.float32
    assert np.array_equal(made[-1], VALUES[BY_ID[-1]])
    assert made.get_object_id(np.array([1, 1])).tolist() == ["4", "4"]
    assert np.asarray(made[[]]).shape == (0, 2, 3)
    assert np.asarray(made[np.array([1])]).shape == (1, 2, 3)
    if import_torch() is not None:
        assert isinstance(made[0], import_torch().Tensor)
    walked = list(made.iter_batches(4))
    assert np.concatenate([ids for ids, _ in walked]).tolist() == list(made.ids())
    assert np.array_equal(np.concatenate([values for _, values in walked]), VALUES[BY_ID])
    assert not any("lance" in inspect.getsource(each).lower() for each in (InferenceDataSet, NpyResults))


@pytest.mark.parametrize("index", [6, -7, [0, 6]])
def test_rows_outside(run: Path, index: Any) -> None:
    """C70: a row that is not there is an IndexError; a negative one counts from the end, as ever."""
    with pytest.raises(RowIndexError):
        opened(run)[index]


def test_what_is_no_row(run: Path) -> None:
    """C70: what is no row number is a TypeError."""
    for index in ("1", 1.5, None, [[1], [2, 3]]):
        with pytest.raises(RowTypeError):
            opened(run)[index]


def test_the_original_data_are_found(tmp_path: Path) -> None:
    """C70: configuration and metadata of the original data are still there, joined by id."""

    class Catalog(HyraxDataset):
        rows: ClassVar = {"b": 2, "a": 1, "c": 3}

        def __init__(self, config: Any, data_location: Any) -> None:
            super().__init__(config)
            assert Path(data_location).name == "d"

        def __len__(self) -> int:
            return len(self.rows)

        def ids(self) -> list[str]:
            return list(self.rows)

        def metadata_fields(self) -> list[str]:
            return ["rank"]

        def metadata(self, idxs: list[int], fields: list[str]) -> Any:
            assert fields == ["rank"]
            return np.array(list(self.rows.values()))[idxs]

    folder = npy_run(tmp_path, [(["c", "a"], np.zeros((2, 1)))])
    made = opened(folder)
    assert made.original_config == {"x": 1, "general": {"data_dir": "d"}}
    with pytest.raises(NotFoundError, match=r"data_set\.name"):
        made.metadata_fields()
    (folder / "original_dataset_config.toml").write_text("[data_set]\nname = 'Catalog'\n[general]\ndata_dir = 'd'\n")
    made = opened(folder)
    assert made.metadata_fields() == ["rank"]
    assert made.metadata([1, 0], ["rank"]).tolist() == [3, 1]
    (folder / "original_dataset_config.toml").write_text(
        "[data_request.train.data]\ndataset_class = 'Nothing'\nprimary_id_field = 'object_id'\n"
        "[data_request.infer.images]\ndataset_class = 'Catalog'\ndata_location = 'd'\nprimary_id_field = 'object_id'\n"
        "[data_request.infer.others]\ndataset_class = 'Nothing'\n"
    )
    assert opened(folder).metadata([1, 0], ["rank"]).tolist() == [3, 1]
    Catalog.rows.pop("c")
    with pytest.raises(NotFoundError, match="no object 'c'"):
        made.metadata([1], ["rank"])
    assert opened(npy_run(tmp_path / "old", [([1], np.zeros((1, 1)))], "0.2")).original_config == {}


def damage(folder: Path, what: str) -> None:
    batch = folder / "batch_1.npy"
    if what == "truncated":
        batch.write_bytes(batch.read_bytes()[:-5])
    elif what == "no head":
        batch.write_bytes(b"PK")
    elif what == "missing":
        batch.unlink()
    elif what == "short":
        np.save(batch, np.load(batch)[:1])
    elif what == "objects":
        np.save(batch, np.array([{"a": 1}, 2], object), allow_pickle=True)
    elif what == "plain":
        np.save(batch, np.zeros(2))
    elif what == "index":
        (folder / "batch_index.npy").write_bytes(b"")


@pytest.mark.parametrize("what", ["truncated", "no head", "missing", "short", "objects", "plain", "index"])
def test_damaged_files_are_named(tmp_path: Path, what: str) -> None:
    """C63: a file that is truncated, missing, short, or holds Python objects is refused by name when the folder is opened."""
    folder = npy_run(tmp_path, [(IDS[:4], VALUES[:4]), (IDS[4:], VALUES[4:])])
    damage(folder, what)
    with pytest.raises(CorruptError, match=r"batch_1\.npy|batch 1|batch_index\.npy") as caught:
        opened(folder)
    assert str(tmp_path) in str(caught.value)


def test_batches_of_different_shapes(tmp_path: Path) -> None:
    """A run whose batches differ in shape is refused when rows are read, with the file; different dtypes are read as one."""
    folder = npy_run(tmp_path / "a", [([1], np.zeros((1, 2))), ([2], np.zeros((1, 3)))])
    with pytest.raises(SourceError, match=r"batch_1\.npy holds results of shape \(3,\)"):
        opened(folder)[0]
    folder = npy_run(tmp_path / "b", [([1], np.ones((1, 2), np.float16)), ([2], np.full((1, 2), 0.1))])
    assert opened(folder).get_data(1).tolist() == [0.1, 0.1]


def test_many_files_do_not_stay_open(tmp_path: Path) -> None:
    """However many batch files there are, few of them are open at once."""
    made = opened(npy_run(tmp_path, [([i], np.full((1, 2), i)) for i in range(300)]))
    assert made.get_data(slice(None))[:, 0].tolist() == list(range(300))
    held = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    assert len([path for path in held if path.is_relative_to(tmp_path) and "batch_" in path.name]) < 150


def test_the_factory_writes_tables(tmp_path: Path) -> None:
    """C50, C52, C03: the factory takes a folder and nothing else; there is no choice of a format."""
    assert list(inspect.signature(create_results_writer).parameters) == ["result_dir"]
    with create_results_writer(tmp_path) as writer:
        assert isinstance(writer, ResultDatasetWriter)
        writer.write_batch(["a"], np.zeros((1, 2)))
    assert isinstance(load_results_dataset({"storage_format": "npy"}, tmp_path), ResultDataset)


def test_what_lies_there_decides(tmp_path: Path) -> None:
    """C51, C59, X7: a committed table wins over .npy files, which win over a table that was never committed; else it is said."""
    folder = npy_run(tmp_path / "run", [(["a"], np.ones((1, 2)))])
    with pytest.warns(DeprecationWarning, match="convert-results"):
        assert isinstance(load_results_dataset({}, folder), InferenceDataSet)
    (folder / "lance_db/results.lance/data").mkdir(parents=True)
    with pytest.warns(DeprecationWarning, match="convert-results"):
        assert isinstance(load_results_dataset({}, str(folder)), InferenceDataSet)
    with create_results_writer(folder) as writer:
        writer.write_batch(["a"], np.zeros((1, 2)))
    assert isinstance(load_results_dataset({}, folder), ResultDataset)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="holds no results"):
        load_results_dataset({}, tmp_path / "empty")
    (tmp_path / "empty/lance_db/results.lance").mkdir(parents=True)
    with pytest.raises(NotFoundError, match="incomplete results"):
        load_results_dataset({}, tmp_path / "empty")
    with pytest.raises(NotFoundError, match=r"esult folder .* does not exist"):
        load_results_dataset({}, tmp_path / "nowhere")


def test_the_newest_run_is_found(tmp_path: Path) -> None:
    """C58, C59: the factory finds the newest run of a verb, of either format; what is told, or configured, goes before."""
    config = {"general": {"results_dir": str(tmp_path)}}
    with pytest.raises(NotFoundError, match="no run of infer"):
        find_results(config)
    npy_run(tmp_path / "20240101-000000-infer-AbC_", [(["a"], np.ones((1, 2)))])
    with create_results_writer(tmp_path / "20250201-120000-umap-Ab-d") as writer:
        writer.write_batch(["a"], np.zeros((1, 2)))
    (tmp_path / "20260101-000000-infer-file").write_text("")
    (tmp_path / "20260101-000000-infer").mkdir()
    assert find_results(config).name == "20240101-000000-infer-AbC_"
    with create_results_writer(tmp_path / "20250101-235959-infer-zzzz") as writer:
        writer.write_batch(["a"], np.zeros((1, 2)))
    assert load_results_dataset(config).data_location.name == "20250101-235959-infer-zzzz"
    assert load_results_dataset(config, verb="umap").data_location.name == "20250201-120000-umap-Ab-d"
    config["results"] = {"inference_dir": str(tmp_path / "20240101-000000-infer-AbC_")}
    assert opened_by(config).results_dir.name == "20240101-000000-infer-AbC_"
    assert find_results(config, tmp_path) == tmp_path
    with pytest.raises(NotFoundError, match=r"esult folder .* does not exist"):
        find_results({"results": {"inference_dir": str(tmp_path / "gone")}})


def opened_by(config: dict[str, Any]) -> InferenceDataSet:
    with pytest.warns(DeprecationWarning, match="convert-results"):
        return InferenceDataSet(config)
