"""Finding results: by uid, by nearness, with metadata of the atlas; the recall of an index is measured."""

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas import RaggedAtlas, ResultDataset, ResultDatasetWriter
from raggedatlas.errors import NotFoundError, QueryError, SourceError
from raggedatlas.query import neighbors as search
from raggedatlas.query.neighbors import Neighbors
from raggedatlas.wings.results import lookup, neighbors, pca, save_to_database
from raggedatlas.wings.results.folder import open_table
from raggedatlas.wings.results.verbs.lookup import compute_recall
from support.atlases import npy_run

# The function `lookup` hides the module of this name.
module = import_module("raggedatlas.wings.results.verbs.lookup")

Write = Callable[..., ResultDataset]


def brute_force(values: Any, vector: Any, metric: str) -> Any:
    """Measure one vector against all rows, plainly."""
    wide, vector = values.reshape(len(values), -1).astype(np.float64), np.ravel(vector).astype(np.float64)
    if metric == "l2":
        return np.array([np.sum((row - vector) ** 2) for row in wide])
    if metric == "dot":
        return np.array([1 - np.dot(row, vector) for row in wide])
    return np.array([1 - np.dot(row, vector) / (np.linalg.norm(row) * np.linalg.norm(vector)) for row in wide])


def test_lookup_gives_the_rows_of_uids(write: Write) -> None:
    """C56: each uid gives its own row, None where it has none; one uid is one row."""
    values = np.random.default_rng(0).normal(size=(20, 2, 3))
    found = write(values)
    uids = [f"{i:016x}" for i in (7, 3, 19)]
    given_back = lookup(found, [*uids, "nobody"])
    assert list(given_back) == [*uids, "nobody"]
    assert given_back.pop("nobody") is None
    assert np.array_equal(np.stack(list(given_back.values())), values[[7, 3, 19]])
    assert np.array_equal(lookup(str(found.data_location), uids[0]), values[7])
    assert lookup(found, "nobody") is None
    assert lookup(found, []) == {}
    with pytest.raises(NotFoundError, match="no output 'other'; it has data"):
        lookup(found, uids, column="other")


def test_lookup_refuses_two_rows(tmp_path: Path) -> None:
    """C56: a uid with two results, as older tables may have, is refused by name."""
    import lance

    field = pa.field("data", pa.list_(pa.float32(), 1))
    schema = pa.schema([pa.field("object_id", pa.string()), field])
    rows = [{"object_id": each, "data": [0.0]} for each in ("a", "b", "a")]
    lance.write_dataset(pa.Table.from_pylist(rows, schema), str(tmp_path / "lance_db" / "results.lance"))
    assert lookup(tmp_path, "b").tolist() == [0.0]
    with pytest.raises(SourceError, match="2 results of 'a'"):
        lookup(tmp_path, ["b", "a"])


def test_lookup_reads_older_results(tmp_path: Path) -> None:
    """C54, C55, C56: results in .npy files are looked up, searched and reduced the same way; few need no index."""
    dtype = [("id", "<U2"), ("tensor", "<f4", (2,))]
    np.save(tmp_path / "batch_0.npy", np.array([("c2", (1, 2)), ("c1", (3, 4))], dtype))
    index = np.array([("c1", 0), ("c2", 0)], [("id", "<U2"), ("batch_num", "<i8")])
    np.save(tmp_path / "batch_index.npy", index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert lookup(tmp_path, "c1").tolist() == [3, 4]
        assert neighbors(tmp_path, "c1").column("uid").to_pylist() == ["c2"]
        reduced = pca(tmp_path, tmp_path / "pca", n_components=1)
        assert save_to_database(tmp_path).kind == "exact"
        assert not (tmp_path / "lance_db").exists()
        with pytest.raises(SourceError, match="no output 'other'"):
            save_to_database(tmp_path, column="other")
    assert list(reduced.ids()) == ["c1", "c2"]
    assert np.abs(np.diff(reduced.to_numpy()[:, 0])) == pytest.approx(np.sqrt(8), rel=1e-6)


@given(
    n=st.integers(1, 30),
    k=st.integers(1, 12),
    seed=st.integers(0, 99),
    metric=st.sampled_from(["l2", "cosine", "dot"]),
    block=st.sampled_from([15, 2**22]),
)
def test_exact_neighbours_are_those_of_brute_force(n: int, k: int, seed: int, metric: str, block: int) -> None:
    """Distances, order and number are those of comparing each row plainly; rows with NaN are never found, nor zeros under cosine."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 4, (n, 3)).astype(np.float32) + np.float32(0.5)
    values[rng.random(n) < 0.2, 1] = rng.choice([np.nan, np.inf])
    offset = rng.choice([0, 1000])
    values += np.float32(offset)
    values[rng.random(n) < 0.1] = 0

    queries = rng.normal(size=(2, 3)) + offset
    among = np.flatnonzero(rng.random(n) < 0.7)
    without = np.array([rng.integers(0, n), -1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_BLOCK_VALUES", block)
        found = search.exact_neighbors(values.__getitem__, n, queries, k, metric=metric, among=among, without=without)
    for query, own, rows, distances in zip(queries, without, found.rows, found.distances, strict=True):
        with np.errstate(invalid="ignore"):
            true = brute_force(values, query, metric)
        kept = [row for row in among if row != own and np.isfinite(values[row]).all()]
        kept = [row for row in kept if metric != "cosine" or values[row].any()]
        kept.sort(key=lambda row: (true[row], row))
        got = rows[rows >= 0]
        assert np.allclose(distances[: len(got)], true[kept[:k]])
        assert sorted(np.round(true[got], 9)) == sorted(np.round(true[kept[:k]], 9))


@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
def test_neighbors_with_a_filter(small: Any, write: Write, metric: str) -> None:
    """Neighbours among cells of a query are those of brute force over its cells, with their metadata, never the cell itself."""
    values = np.random.default_rng(1).normal(size=(73, 5)).astype(np.float32)
    found = write(values, small.uids)
    lung = small.query.where({"tissue": "lung"}).obs("tissue", "kind")
    inside = small.obs["tissue"].to_numpy() == "lung"
    for of in (0, 40, 72):
        answer = neighbors(found, small.uids[of], k=6, among=lung, metric=metric)
        true = brute_force(values, values[of], metric)
        order = [row for row in np.argsort(true, kind="stable") if inside[row] and row != of][:6]
        assert answer.column("uid").to_pylist() == [small.uids[row] for row in order]
        assert np.allclose(answer.column("distance"), true[order])
        assert answer.column("tissue").to_pylist() == ["lung"] * 6
        assert answer.column("rank").to_pylist() == [1, 2, 3, 4, 5, 6]
        assert set(answer.column("query").to_pylist()) == {small.uids[of]}


def test_metadata_of_any_name_are_appended(tmp_path: Path, write: Write) -> None:
    """A column of the cells that is called "rank" stands beside the rank of the neighbours, and replaces nothing."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    obs = pd.DataFrame({"rank": ["low", "top", "top"]}, index=["a", "b", "c"])
    atlas.add(AnnData(np.eye(3, dtype=np.float32), obs, pd.DataFrame(index=["x", "y", "z"])), "s", progress=False)
    query = atlas.checkout(atlas.snapshot()).query().obs("rank")
    uids = query.to_arrow().column("uid").to_pylist()
    answer = neighbors(write(np.array([[0.0], [1.0], [3.0]]), uids), uids[0], among=query)
    assert answer.column_names == ["query", "rank", "uid", "distance", "rank"]
    assert (answer.column(1).to_pylist(), answer.column(4).to_pylist()) == ([1, 2], ["top", "top"])


def test_neighbors_of_vectors_and_of_several(small: Any, write: Write) -> None:
    """Vectors find the cell itself at distance 0; several questions are answered one by one; few cells give few neighbours."""
    values = np.random.default_rng(2).normal(size=(73, 2, 2)).astype(np.float32)
    found = write(values, small.uids)
    answer = neighbors(found, values[[3, 5]].reshape(2, 4), k=1)
    assert answer.column("uid").to_pylist() == [small.uids[3], small.uids[5]]
    assert answer.column("query").to_pylist() == [0, 1]
    assert answer.column("distance").to_pylist() == [0, 0]
    three = small.query.limit(3)
    assert neighbors(found, small.uids[0], k=10, among=three).num_rows == 2
    assert neighbors(found, small.uids[9], k=10, among=three).num_rows == 3
    each = [neighbors(found, uid, k=4) for uid in small.uids[:5]]
    together = neighbors(found, small.uids[:5], k=4)
    assert together.equals(pa.concat_tables(each))
    assert neighbors(found, [small.uids[0]] * 2, k=4).equals(pa.concat_tables([each[0], each[0]]))


@pytest.mark.parametrize(
    ("of", "choices", "error", "said"),
    [
        ("nobody", {}, NotFoundError, "no result of the cell 'nobody'"),
        ([1.0, 2.0], {}, QueryError, r"shape \(1, 2\); those of 'data' have 3"),
        ([1.0, 2.0, float("nan")], {}, QueryError, "not finite"),
        ([object()], {}, QueryError, "by uids or by vectors"),
        ([0.0] * 3, {"k": 0}, QueryError, "k=0"),
        ([0.0] * 3, {"metric": "hamming"}, QueryError, "no metric 'hamming'"),
        ([0.0] * 3, {"column": "other"}, NotFoundError, "no output 'other'"),
    ],
)
def test_neighbors_refuses(write: Write, of: Any, choices: dict[str, Any], error: type[Exception], said: str) -> None:
    """What cannot be asked is refused by name."""
    with pytest.raises(error, match=said):
        neighbors(write(np.eye(3)), of, **choices)


def clustered(n: int, seed: int) -> Any:
    """Make points in clusters, as embeddings have them; one is not finite."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(12, 16))[rng.integers(0, 12, n)] + 0.4 * rng.normal(size=(n, 16))
    values[n // 2] = np.nan
    return values


@pytest.mark.parametrize(("metric", "dtype"), [("l2", "f4"), ("cosine", "f2"), ("dot", "f8")])
def test_an_index_is_measured(write: Write, metric: str, dtype: str) -> None:
    """C55: the reported recall is that of the search against brute force; the index keeps each uid with its own vector."""
    values = clustered(3000, 3).astype(dtype)
    shuffled = np.random.default_rng(4).permutation(3000)
    uids = [f"{i:016x}" for i in shuffled]
    found = write(values, uids)
    report = save_to_database(found, metric=metric, least_rows=100, least_recall=0.9, n_queries=50)
    assert (report.kind, report.n_rows, report.n_queries) == ("IVF_SQ", 3000, 50)
    assert report.recall >= 0.9
    asked = [uid for uid in uids[:40] if uid != uids[1500]]
    by_index = neighbors(found, asked, k=10, metric=metric)
    exact = neighbors(found, asked, k=10, metric=metric, exact=True)
    hits = len(
        {*zip(by_index["query"].to_pylist(), by_index["uid"].to_pylist(), strict=True)}
        & {*zip(exact["query"].to_pylist(), exact["uid"].to_pylist(), strict=True)}
    )
    assert hits >= 0.85 * exact.num_rows
    assert by_index.num_rows == exact.num_rows
    row = {uid: values[i].astype(np.float64) for i, uid in enumerate(uids)}
    for query, uid, distance in zip(
        *(by_index[name].to_pylist() for name in ("query", "uid", "distance")), strict=True
    ):
        assert query != uid
        assert distance == pytest.approx(brute_force(row[uid][None], row[query], metric)[0], rel=0.01, abs=0.01)
    assert len(ResultDataset({}, found.data_location)) == 3000


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:InferenceDataSet:DeprecationWarning")
def test_older_results_become_a_table_that_has_an_index(tmp_path: Path) -> None:
    """C55: results in .npy files are made a table beside them for their index; each uid keeps its own vector, the files their bytes."""
    values = np.nan_to_num(clustered(400, 7)).astype("f4")
    uids = [f"c{i}" for i in np.random.default_rng(8).permutation(400)]
    npy_run(tmp_path, [(uids[:150], values[:150]), (uids[150:], values[150:])])
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.npy")}
    steps: list[str] = []
    report = save_to_database(tmp_path, least_rows=100, least_recall=1, progress=lambda step, *_: steps.append(step))
    assert (report.kind, report.recall, report.k, report.n_rows) == ("IVF_SQ", 1.0, 10, 400)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.npy")} == before
    assert set(steps) == {"write", "compare", "index"}
    assert all(np.array_equal(row, values[i]) for i, row in enumerate(lookup(tmp_path, uids).values()))
    by_index, exact = (neighbors(tmp_path, uids[:20], k=5, exact=exact) for exact in (False, True))
    assert by_index.column("uid").to_pylist() == exact.column("uid").to_pylist()


@pytest.mark.long
def test_a_row_is_no_neighbour_of_its_own(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recall counts other rows only: a search that finds nothing but the row that it is asked for has none."""
    found = write(clustered(200, 9).astype("f4"))
    searched = module.search_index

    def only_own(table: Any, vectors: Any, k: int, report: Any) -> Neighbors:
        all_found = searched(table, vectors, k, report)
        all_found.rows[:, 1:], all_found.distances[:, 1:] = -1, np.nan
        return all_found

    monkeypatch.setattr(module, "search_index", only_own)
    assert save_to_database(found, least_rows=10).recall == 0


@pytest.mark.long
def test_zeros_are_near_to_nothing_under_cosine(write: Write) -> None:
    """A vector of zeros is refused as a question, and never an answer, with an index and without; under another metric it is a place."""
    values = np.random.default_rng(2).normal(size=(300, 5)).astype("f4")
    values[[3, 7]] = 0
    found = write(values)
    uids = list(found.ids())
    for _ in range(2):
        assert set(uids) - {*neighbors(found, uids[0], k=300, metric="cosine")["uid"].to_pylist()} == {
            uids[i] for i in (0, 3, 7)
        }
        for of in (uids[3], np.zeros(5)):
            with pytest.raises(QueryError, match="no direction"):
                neighbors(found, of, metric="cosine")
        save_to_database(found, least_rows=10, metric="cosine")
    assert neighbors(found, uids[3], k=1, exact=True)["uid"].to_pylist() == [uids[7]]


@pytest.mark.nightly
def test_an_index_answers_only_its_own_question(write: Write) -> None:
    """Another metric, a filter or a newer table is compared exactly, and an index is made again or dropped by a second call."""
    values = clustered(600, 5).astype("f4")
    found = write(values)
    uids = list(found.ids())[:5]
    save_to_database(found, least_rows=10)
    exact = neighbors(found, uids, metric="cosine", exact=True)
    assert neighbors(found, uids, metric="cosine").equals(exact)
    assert save_to_database(found, least_rows=10, metric="cosine").metric == "cosine"
    assert save_to_database(found).kind == "exact"
    assert neighbors(found, uids, metric="cosine").equals(exact)
    with ResultDatasetWriter(found.data_location, overwrite=True) as writer:
        writer.write_batch(uids, values[:5])
    assert neighbors(str(found.data_location), uids[0]).num_rows == 4


def test_an_index_answers_only_the_rows_that_it_is_of(write: Write) -> None:
    """Results pinned to an older version are compared exactly where a newer one of the same length has an index."""
    values = np.nan_to_num(clustered(200, 10)).astype("f4")
    old = write(values)
    uids = list(old.ids())
    save_to_database(old, least_rows=10)
    assert old.has_rows_of(ResultDataset({}, old.data_location)._table)
    with ResultDatasetWriter(old.data_location, overwrite=True) as writer:
        writer.write_batch(uids, values[::-1])
    save_to_database(str(old.data_location), least_rows=10)
    assert neighbors(old, uids[3], k=5).equals(neighbors(old, uids[3], k=5, exact=True))


def test_a_new_index_has_no_record_of_the_old_one(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the second call dies before it has measured, rows are compared exactly; the old record would be of another index."""
    found = write(np.nan_to_num(clustered(200, 11)).astype("f4"))
    save_to_database(found, least_rows=10)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_measure_recall", die)
        with pytest.raises(KeyboardInterrupt):
            save_to_database(found, least_rows=10)
    assert module.read_index_report(open_table(found.location), "data", "l2") is None
    assert save_to_database(found, least_rows=10).kind == "IVF_SQ"
    assert module.read_index_report(open_table(found.location), "data", "l2") is not None


@pytest.mark.long
def test_an_index_over_several_files(tmp_path: Path) -> None:
    """Rows that several processes wrote to files of their own are found under their own uids."""
    values = clustered(900, 6)
    values = np.nan_to_num(values).astype("f4")
    with ResultDatasetWriter(tmp_path) as writer:
        for part, rows in zip(writer.parts(3), np.array_split(np.arange(900), [100, 650]), strict=True):
            with part.writer() as share:
                share.write_batch([f"c{row}" for row in rows], values[rows])
    assert save_to_database(tmp_path, least_rows=10, least_recall=1).recall == 1
    asked = [f"c{row}" for row in (0, 99, 100, 649, 650, 899)]
    found, exact = neighbors(tmp_path, asked, k=5), neighbors(tmp_path, asked, k=5, exact=True)
    assert found.column("uid").to_pylist() == exact.column("uid").to_pylist()
    assert np.allclose(found.column("distance"), exact.column("distance"), rtol=1e-4)


def test_few_rows_need_no_index(write: Write) -> None:
    """Below 50,000 rows every row is compared, and the report says so."""
    report = save_to_database(write(np.eye(4, dtype="f4")))
    assert (report.kind, report.recall, report.nprobes) == ("exact", 1.0, 0)
    assert "compared exactly" in str(report)


def test_what_cannot_be_indexed_is_refused(write: Write) -> None:
    """Whole numbers, unknown outputs and impossible settings are refused by name."""
    whole = write(np.eye(4, dtype="i4"))
    with pytest.raises(SourceError, match="no output 'data' of floats"):
        save_to_database(whole)
    with pytest.raises(SourceError, match="no output 'other'"):
        save_to_database(write(np.eye(4)), column="other")
    with pytest.raises(QueryError, match="least_recall=0"):
        save_to_database(whole, least_recall=0)


def test_recall_counts_what_is_missed() -> None:
    """Recall is the share of true neighbours found; rows as near as the last count, and rows that are none do not."""
    true = Neighbors(np.array([[1, 2], [3, -1]]), np.array([[0.0, 1.0], [2.0, np.nan]]))
    assert compute_recall(true, true) == 1
    assert compute_recall(Neighbors(np.array([[1, 9], [3, -1]]), np.array([[0.0, 1.0], [2.0, np.nan]])), true) == 1
    assert (
        compute_recall(Neighbors(np.array([[1, -1], [-1, -1]]), np.array([[0.0, np.nan], [np.nan, np.nan]])), true)
        == 1 / 3
    )
