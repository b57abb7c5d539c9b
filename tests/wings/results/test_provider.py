"""Laws of data requests: several datasets as one, joined by id, the same row by row and in batches."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas import DataProvider, ResultDatasetWriter
from raggedatlas.errors import NotFoundError, QueryError, RowIndexError, SourceError
from raggedatlas.wings.results.data_request import HyraxDataset
from raggedatlas.wings.results.provider import fill_nan, prepare
from support.atlases import npy_run

pytestmark = pytest.mark.fast

N = 30
VALUES = np.random.default_rng(0).standard_normal((N, 4)).astype(np.float32)
LEFT = [f"c{i}" for i in range(N)]
RIGHT = [f"c{i}" for i in range(N + 5) if i % 3][::-1]


class Table(HyraxDataset):
    """A dataset that somebody else wrote: getters row by row, and a configuration of its own."""

    def __init__(self, config: Any, data_location: Any) -> None:
        super().__init__(config)
        self.factor = config["data_set"]["Table"]["factor"]

    def __len__(self) -> int:
        return N

    def get_key(self, row: int) -> str:
        return LEFT[row]

    def get_weight(self, row: int) -> float:
        return row * self.factor

    def get_group(self, row: int) -> int:
        return row % 3

    def get_image(self, row: int) -> Any:
        return np.full((2, 2), row)

    def get_ragged(self, row: int) -> Any:
        return np.arange(row % 3)


class Padded(Table):
    """One that stacks its ragged field itself."""

    def collate_ragged(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"ragged": np.array([len(sample["ragged"]) for sample in samples]), "ragged_mask": np.ones(len(samples))}


class Whole(Table):
    """One that stacks everything itself."""

    def collate(self, samples: Sequence[dict[str, Any]]) -> Any:
        return np.array([sample["weight"] for sample in samples])


CONFIG = {"data_set": {"Table": {"factor": 2.0}, "nan_mode": False}}


def saved(folder: Path, ids: list[str], **outputs: Any) -> str:
    with ResultDatasetWriter(folder) as writer:
        writer.write_batch(ids, outputs)
    return str(folder)


@pytest.fixture(scope="module")
def request_of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")
    left = saved(folder / "left", LEFT, data=VALUES)
    right = saved(
        folder / "right", RIGHT, data=np.array([[int(each[1:])] * 2 for each in RIGHT]), score=np.ones(len(RIGHT))
    )
    return {
        "left": {"dataset_class": "ResultDataset", "data_location": left, "primary_id_field": "object_id"},
        "right": {
            "dataset_class": "ResultDataset",
            "data_location": right,
            "join_field": "object_id",
            "fields": ["data", "score"],
        },
    }


def test_one_dataset_needs_no_id_field(request_of_two: dict[str, Any]) -> None:
    """C92, X12: a ResultDataset in a data request, with primary_id_field and without it, gives its fields and ids."""
    one = dict(request_of_two["left"])
    for definition in (one, {key: value for key, value in one.items() if key != "primary_id_field"}):
        provider = prepare({**CONFIG, "data_request": {"infer": {"data": definition}}})["infer"]
        assert (len(provider), list(provider.ids()), provider.fields()) == (N, LEFT, {"data": ["data", "object_id"]})
        sample = provider[7]
        assert (sample["object_id"], sample["data"]["object_id"]) == ("c7", "c7")
        assert np.array_equal(sample["data"]["data"], VALUES[7])
        assert provider.get_object_id(3) == "c3"


@given(rows=st.lists(st.integers(0, N - 1), max_size=12))
def test_joins_give_what_a_dictionary_would(request_of_two: dict[str, Any], rows: list[int]) -> None:
    """C92: rows without a match are left out of the stacked arrays and told by a mask, in batches read at once and row by row."""
    provider = DataProvider(CONFIG, request_of_two)
    place = {each: row for row, each in enumerate(RIGHT)}
    matched = [LEFT[row] in place for row in rows]
    batch = provider.batch(rows)
    assert set(batch) == {"left", "right", "right__matched", "object_id"}
    assert batch["object_id"].tolist() == [LEFT[row] for row in rows]
    assert np.array_equal(batch["left"]["data"], VALUES[rows])
    assert (batch["right__matched"].dtype, batch["right__matched"].tolist()) == (bool, matched)
    assert batch["right"]["data"].tolist() == [[row, row] for row, there in zip(rows, matched, strict=True) if there]
    assert batch["right"]["data"].shape[1:] == (2,)
    samples = provider.__getitems__(rows)
    assert [sample["right"] is not None for sample in samples] == matched
    again = provider.collate(samples)
    assert set(again) == set(batch)
    for name in ("left", "right"):
        assert all(np.array_equal(again[name][field], batch[name][field]) for field in batch[name])
    assert np.array_equal(again["right__matched"], batch["right__matched"])


def test_one_sample_is_as_in_a_batch(request_of_two: dict[str, Any]) -> None:
    """C92: a sample by its number is that of the batch; a missing partner is None; rows outside are an IndexError."""
    provider = DataProvider(CONFIG, request_of_two)
    assert (provider[3]["right"], provider[4]["right"]["data"].tolist()) == (None, [4, 4])
    assert provider.unmatched() == {"right": 10}
    assert provider.batch(slice(0, 6, 3))["right"]["data"].shape == (0, 2)
    assert [sample["object_id"] for sample in provider] == LEFT
    assert provider.sample_data()["object_id"] == LEFT[0]
    for bad in (N, -1):
        with pytest.raises(RowIndexError):
            provider[bad]
    assert "left (ResultDataset: data, object_id); right" in repr(provider)
    assert len(pickle.loads(pickle.dumps(provider))) == N


def test_datasets_of_others(request_of_two: dict[str, Any]) -> None:
    """C92: a class with getters row by row joins too, by its name or where it is imported from, with a configuration of its own."""
    table = {"dataset_class": "Table", "primary_id_field": "key", "fields": ["weight", "image"]}
    right = request_of_two["right"]
    provider = DataProvider(CONFIG, {"table": table, "right": right})
    batch = provider.batch([4, 1])
    assert (batch["table"]["weight"].tolist(), batch["table"]["image"].shape) == ([8.0, 2.0], (2, 2, 2))
    assert batch["right"]["data"].tolist() == [[4, 4], [1, 1]]
    own = DataProvider(CONFIG, {"table": {**table, "dataset_config": {"Table": {"factor": 5}, "other": {"a": 1}}}})
    assert own[1]["table"]["weight"] == 5
    assert (own.datasets["table"].dataset.config["other"], CONFIG["data_set"]["Table"]) == ({"a": 1}, {"factor": 2.0})
    by_place = {
        **right,
        "dataset_class": "raggedatlas.wings.results.dataset.ResultDataset",
        "primary_id_field": "object_id",
    }
    del by_place["join_field"]
    assert len(DataProvider({}, {"right": by_place})) == len(RIGHT)
    beside = {"table": table, "left": {**request_of_two["left"], "primary_id_field": False}}
    assert np.array_equal(DataProvider(CONFIG, beside).batch([5])["left"]["data"], VALUES[[5]])


def test_datasets_may_stack_themselves() -> None:
    """C92: a dataset's own collate, for one field or for all, is used in batches either way; ragged values need one."""
    base = {"primary_id_field": "key", "fields": ["ragged", "weight"]}
    provider = DataProvider(CONFIG, {"padded": {**base, "dataset_class": "Padded"}})
    for batch in (provider.batch([0, 1, 2]), provider.collate([provider[i] for i in range(3)])):
        assert batch["padded"]["ragged"].tolist() == [0, 1, 2]
        assert batch["padded"]["ragged_mask"].tolist() == [1, 1, 1]
    assert DataProvider(CONFIG, {"w": {**base, "dataset_class": "Whole"}}).batch([1, 3])["w"].tolist() == [2.0, 6.0]
    with pytest.raises(SourceError, match=r"'ragged' of dataset 't' cannot be stacked.*collate_ragged"):
        DataProvider(CONFIG, {"t": {**base, "dataset_class": "Table"}}).batch([0, 1])


def test_a_batch_without_a_match_has_the_structure_of_others(request_of_two: dict[str, Any]) -> None:
    """C92: where no row of a batch has a match, fields have the names, dtypes and shapes of other batches, and no rows."""
    right = {**request_of_two["right"], "primary_id_field": "object_id"}
    del right["join_field"]
    for kind, fields in (("Table", ["image", "weight"]), ("Padded", ["ragged", "image"]), ("Whole", ["weight"])):
        joined = {"dataset_class": kind, "join_field": "key", "fields": fields}
        provider = DataProvider(CONFIG, {"right": right, "t": joined})
        # The ids of the first rows, c34 and c32, are beyond those of the table.
        for found, other in (
            (provider.batch([0, 1]), provider.batch([3])),
            (provider.collate([provider[0], provider[1]]), provider.collate([provider[3]])),
        ):
            assert found["t__matched"].tolist() == [False, False]
            shown, expected = found["t"], other["t"]
            if kind == "Whole":
                shown, expected = {"": shown}, {"": expected}
            assert shown.keys() == expected.keys()
            for name, values in shown.items():
                assert (values.shape, values.dtype) == ((0, *expected[name].shape[1:]), expected[name].dtype)


def test_npy_results_are_datasets_too(tmp_path: Path) -> None:
    """C59, C92: .npy results join with a table under either spelling of their class."""
    folder = npy_run(tmp_path / "npy", [(["c9", "c1"], np.array([[9.0], [1.0]], np.float32))])
    left = {"dataset_class": "ResultDataset", "data_location": saved(tmp_path / "left", LEFT, data=VALUES), "primary_id_field": "object_id"}  # fmt: skip
    for name in ("InferenceDataSet", "InferenceDataset"):
        old = {"dataset_class": name, "data_location": str(folder), "join_field": "object_id"}
        with pytest.warns(DeprecationWarning, match="convert-results"):
            provider = DataProvider({}, {"left": left, "old": old})
        batch = provider.batch([1, 2, 9])
        assert batch["old"]["data"].tolist() == [[1.0], [9.0]]
        assert batch["old__matched"].tolist() == [True, False, True]


def test_no_pickle_of_a_data_folder_is_read(request_of_two: dict[str, Any]) -> None:
    """A pickled join that lies beside the data is neither read nor written, whatever it is called."""
    folder = Path(request_of_two["right"]["data_location"])
    before = sorted(folder.rglob("*"))
    DataProvider(CONFIG, request_of_two).batch([1])
    assert sorted(folder.rglob("*")) == before
    import raggedatlas.wings.results.provider as module

    assert "pickle" not in vars(module)


BAD: list[tuple[Any, str]] = [
    ({}, "names no datasets"),
    ({"a": 3}, "expected a table"),
    ({"a": {"data_location": "x"}}, "has no dataset_class"),
    ({"object_id": {"dataset_class": "Table"}}, "A dataset cannot be called"),
    ({"a": {"dataset_class": "Table", "augment": ["x"]}}, r"unknown keys \['augment'\]"),
    ({"a": {"dataset_class": "Table", "fields": "key", "primary_id_field": "key"}}, "expected a list of names"),
    ({"a": {"dataset_class": "Table", "join_field": "key"}}, "no other dataset"),
    ({"a": {"dataset_class": "Table", "join_field": "key", "primary_id_field": "key"}}, "only one of them"),
    ({"a": {"dataset_class": "Table"}, "b": {"dataset_class": "Table"}}, r"Exactly one dataset"),
    ({n: {"dataset_class": "Table", "primary_id_field": "key"} for n in "ab"}, r"\['a', 'b'\] have one"),
    ({"a": {"dataset_class": "Nothing"}}, "no dataset class 'Nothing'"),
    ({"a": {"dataset_class": "no.such.Thing"}}, r"ataset class 'no\.such\.Thing'"),
    ({"a": {"dataset_class": "Table"}}, "no field 'object_id'"),
    ({"a": {"dataset_class": "Table", "primary_id_field": "key", "fields": ["x"]}}, "no field 'x'"),
]


@pytest.mark.parametrize(("request_", "message"), BAD)
def test_requests_that_contradict_themselves(request_: Any, message: str) -> None:
    """C92: what is missing, unknown or contradicts the rest is refused by the name of the dataset."""
    with pytest.raises((QueryError, NotFoundError), match=message):
        DataProvider(CONFIG, request_)
    with pytest.raises(QueryError, match="no data_request"):
        prepare({})


def test_joins_that_cannot_be(tmp_path: Path) -> None:
    """A key that stands twice, or rows by order of another number, are refused."""
    table = {"dataset_class": "Table", "primary_id_field": "key"}
    short = {"dataset_class": "ResultDataset", "data_location": saved(tmp_path / "s", ["a"], data=np.ones((1, 2)))}
    with pytest.raises(QueryError, match="'short' has 1 rows and the primary dataset 30"):
        DataProvider(CONFIG, {"table": table, "short": short})
    left = {"dataset_class": "ResultDataset", "data_location": saved(tmp_path / "l", LEFT, data=VALUES), "primary_id_field": "object_id"}  # fmt: skip
    with pytest.raises(SourceError, match="has group '0' more than once"):
        DataProvider(CONFIG, {"left": left, "t": {"dataset_class": "Table", "join_field": "group"}})


@pytest.mark.parametrize(
    ("mode", "expected"), [("zero", [[0, 1], [2, 3], [0, 0]]), ("quantile", [[1, 1], [2, 3], [0, 0]])]
)
def test_missing_values_are_filled(tmp_path: Path, mode: str, expected: list[list[int]]) -> None:
    """C93, R4: NaN are kept, made zero, or made a quantile of their row, from the table to the batch; a loop over the rows ends."""
    values = np.array([[np.nan, 1], [2, 3], [np.nan, np.nan]], np.float32)
    request = {
        "run": {"dataset_class": "ResultDataset", "data_location": saved(tmp_path, ["a", "b", "c"], data=values)}
    }
    kept = DataProvider({"data_set": {"nan_mode": False}}, request)
    assert np.array_equal(kept.batch([0, 1, 2])["run"]["data"], values, equal_nan=True)
    filled = DataProvider({"data_set": {"nan_mode": mode, "nan_quantile": 0.5}}, request)
    for batch in (filled.batch([0, 1, 2]), filled.collate(list(filled))):
        assert batch["run"]["data"].tolist() == expected
        assert batch["run"]["data"].dtype == np.float32
    assert np.isnan(filled[0]["run"]["data"][0])
    for bad in ({"nan_mode": "mean"}, {"nan_mode": "quantile", "nan_quantile": 2}):
        with pytest.raises(QueryError, match="nan_"):
            DataProvider({"data_set": bad}, request)
    assert fill_nan(np.arange(3), "zero", 0.05).tolist() == [0, 1, 2]


def test_missing_scalars_are_filled(tmp_path: Path) -> None:
    """A field of one number for each object has no other values in its row: a missing one becomes zero in either mode."""
    path = saved(tmp_path, ["a", "b"], data=VALUES[:2], score=np.array([np.nan, 2], np.float32))
    request = {"run": {"dataset_class": "ResultDataset", "data_location": path, "fields": ["score"]}}
    for mode in ("zero", "quantile"):
        filled = DataProvider({"data_set": {"nan_mode": mode, "nan_quantile": 0.5}}, request)
        for batch in (filled.batch([0, 1]), filled.collate(list(filled))):
            assert batch["run"]["score"].tolist() == [0, 2]


def test_a_data_loader_takes_a_provider(request_of_two: dict[str, Any]) -> None:
    """C43, C92: PyTorch's DataLoader, also with workers, gives the batches that the provider gives."""
    data = pytest.importorskip("torch.utils.data")
    provider = DataProvider(CONFIG, request_of_two)
    loader = data.DataLoader(provider, batch_size=8, num_workers=2, collate_fn=provider.collate)
    found = list(loader)
    assert np.concatenate([batch["left"]["data"] for batch in found]).tobytes() == VALUES.tobytes()
    assert sum(int(batch["right__matched"].sum()) for batch in found) == 20
