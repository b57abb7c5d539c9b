"""Laws of results: every way out gives the same cells, features and values."""

import datetime as dt
import json
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import raggedatlas
from raggedatlas.catalog.catalog import CELLS, create_catalog
from raggedatlas.catalog.snapshots import snapshot
from raggedatlas.errors import FeatureError, LimitError, MissingExtraError, QueryError, SourceError
from raggedatlas.ingest.add import add
from raggedatlas.query.plan import plan_read
from raggedatlas.query.query import Query
from raggedatlas.query.read import SpaceReader
from raggedatlas.store.filters import col
from raggedatlas.store.location import Location
from raggedatlas.store.upkeep import compact


def variants(query: Query) -> dict[str, Query]:
    """Some queries that differ in what is read."""
    return {
        "plain": query,
        "few": query.features("LYZ", "GNLY").where(col("score") > 0),
        "layers": query.layers("lognorm", "scaled").join("intersection"),
        "nan": query.missing("nan").order_by("score", descending=True),
        "dense": query.spaces("protein_abundance").missing("nan"),
        "vectors": query.spaces("embedding").limit(20),
        "none": query.limit(0),
    }


def dense(matrix: Any) -> Any:
    return matrix.toarray() if sp.issparse(matrix) else np.asarray(matrix)


def assert_same(left: ad.AnnData, right: ad.AnnData) -> None:
    np.testing.assert_array_equal(dense(left.X), dense(right.X))
    assert {k for k in left.layers if k} == {k for k in right.layers if k}
    for name in left.layers:
        np.testing.assert_array_equal(dense(left.layers[name]), dense(right.layers[name]))
    for a, b in ((left.obs, right.obs), (left.var, right.var)):
        assert list(a.columns) == list(b.columns)
        assert list(a.index) == list(b.index)
        for name in a.columns:
            np.testing.assert_array_equal(a[name].isna(), b[name].isna())
            assert a[name].dropna().tolist() == b[name].dropna().tolist()
    assert set(left.varm) == set(right.varm)
    if "measured" in left.varm:
        pd.testing.assert_frame_equal(
            left.varm["measured"], right.varm["measured"], check_index_type=False, check_column_type=False
        )


@pytest.mark.parametrize("name", ["plain", "few", "layers", "nan", "dense", "vectors", "none"])
@pytest.mark.parametrize("ending", ["h5ad", "zarr"])
def test_a_written_file_equals_the_result(
    query: Query, tmp_path: Path, name: str, ending: str, monkeypatch: Any
) -> None:
    """`write` gives the file that `to_anndata` gives in memory, in several blocks too."""
    monkeypatch.setattr("raggedatlas.query.read.row_blocks.__defaults__", (200,))
    asked = variants(query)[name]
    path = asked.write(str(tmp_path / f"result.{ending}"))
    read = ad.read_h5ad(path) if ending == "h5ad" else ad.read_zarr(path)
    result = asked.to_anndata()
    assert_same(read, result)
    assert read.uns["atlas"]["query"] == result.uns["atlas"]["query"]


def test_a_write_that_fails_early_leaves_nothing(query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema of a file may be refused once the file is open: it goes away, however soon that is."""

    def refuse(*_: Any) -> Any:
        raise MissingExtraError("No installed wing has it.")

    monkeypatch.setattr("raggedatlas.query.outputs.answer", refuse)
    with pytest.raises(MissingExtraError, match="wing"):
        query.write(tmp_path / "x.h5ad", schema="cellxgene")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["plain", "few", "layers", "nan", "dense", "vectors"])
@pytest.mark.parametrize("n", [1, 7, 1000])
def test_batches_joined_equal_the_result(query: Query, name: str, n: int) -> None:
    """Batches have one fixed set of columns, and joined they are the result."""
    asked = variants(query)[name]
    result = asked.to_anndata()
    batches = list(asked.batches(n))
    assert [b.obs.num_rows for b in batches[:-1]] == [n] * (len(batches) - 1)
    assert pa.concat_tables(b.obs for b in batches).column("uid").to_pylist() == list(result.obs_names)
    (space,) = batches[0].spaces
    for layer, matrix in zip(
        batches[0].spaces[space].block.layers, [result.X, *(v for k, v in result.layers.items() if k)], strict=True
    ):
        joined = np.concatenate([batch_layer(b.spaces[space].block, layer) for b in batches])
        np.testing.assert_array_equal(joined, dense(matrix))
    for batch in batches:
        part = batch.spaces[space]
        assert part.present.all()
        if "uid" in result.var:
            assert list(part.features) == list(result.var["uid"])
            uids = batch.obs.column("uid").to_pylist()
            assert list(part.layout_uids) == list(result.obs.loc[uids, "layout_uid"])
            assert all((part.measured[u] == result.varm["measured"][u].to_numpy()).all() for u in part.measured)


def batch_layer(block: Any, layer: str) -> Any:
    if not hasattr(block, "indptr"):
        return block.layers[layer]
    return sp.csr_matrix((block.layers[layer], block.indices, block.indptr), (block.n_rows, block.n_cols)).toarray()


@given(st.lists(st.integers(0, 58), max_size=40))
def test_any_cells_in_any_order(small: Any, rows: list[int]) -> None:
    """A plan gives any cells in the order asked, repeats included, and survives a pickle."""
    plan = plan_read(small.query.layers("counts", "scaled").spec, small.query.catalog)
    space = pickle.loads(pickle.dumps(plan)).single()
    whole = SpaceReader(space).read_batch(np.arange(plan.n_cells))
    some = SpaceReader(space).read_batch(np.array(rows, np.int64))
    for layer in ("counts", "scaled"):
        np.testing.assert_array_equal(batch_layer(some.block, layer), batch_layer(whole.block, layer)[rows])


def test_modalities_are_aligned(query: Query, small: Any) -> None:
    """Every modality holds its cells in the order of the result; `obsmap` finds them, and values are those of the files."""
    pytest.importorskip("mudata")
    result = query.order_by("score").to_mudata()
    frame = query.order_by("score").to_pandas()
    assert list(result.obs_names) == list(frame.index)
    assert set(result.mod) == {"gene_expression", "protein_abundance", "embedding"}
    for name, part in result.mod.items():
        at = result.obsmap[name]
        assert list(part.obs_names) == list(result.obs_names[at > 0])
        assert list(at[at > 0]) == list(range(1, part.n_obs + 1))
        for column in frame:
            expected = frame.loc[part.obs_names, column].astype(object)
            pd.testing.assert_series_equal(
                part.obs[column].astype(object), expected, check_names=False, check_index_type=False
            )
    proteins = result["protein_abundance"]
    named = frame.loc[proteins.obs_names]
    assert set(named["dataset"]) == {"first", "third"}
    for uid, values in zip(proteins.obs_names, proteins.to_df()["CD19"], strict=True):
        source = small.files[frame.loc[uid, "dataset"]]
        assert values == source.obsm["proteins"].loc[frame.loc[uid, "cell_name"], "CD19"]
    assert list(result.obs["cell_name"]) == list(frame["cell_name"])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:::mudata")
def test_a_written_mudata_equals_the_result(query: Query, tmp_path: Path) -> None:
    """A `.h5mu` has the modalities and the order of the result in memory."""
    mudata = pytest.importorskip("mudata")
    asked = query.where(col("dataset") != "first").order_by("percent.mt").missing("nan")
    read = mudata.read_h5mu(asked.write(str(tmp_path / "x.h5mu")))
    result = asked.to_mudata()
    assert list(read.obs_names) == list(result.obs_names)
    for name in result.mod:
        np.testing.assert_array_equal(np.ravel(read.obsmap[name]), np.ravel(result.obsmap[name]))
        assert_same(read[name], result[name])
        assert {"cell_type", "dataset", "percent.mt"} < set(read[name].obs)
    # mudata 0.3 copies columns of modalities into `obs` when it reads, as `modality:column`
    assert {name for name in read.obs if ":" not in name} == set(result.obs)


def test_batches_of_several_spaces_are_aligned(query: Query) -> None:
    """Cells without a modality stand in their row with nothing in it."""
    (batch,) = query.spaces("gene_expression", "protein_abundance").missing("nan").batches(100)
    proteins = batch.spaces["protein_abundance"]
    lacking = np.array(batch.obs.column("dataset").cast(pa.string()).to_pylist()) == "second"
    assert (proteins.present == ~lacking).all()
    assert np.isnan(proteins.block.layers["counts"][lacking]).all()
    assert (proteins.layout_uids[lacking] == "").all()
    assert batch.spaces["gene_expression"].present.all()


def test_dropping_what_is_missing_keeps_the_number_of_datasets(query: Query, small: Any) -> None:
    """Under ``missing("drop")`` a feature is there if every dataset measured it and at least as many as `join` asks for."""
    everywhere = set.intersection(*(set(file.var_names) for file in small.files.values()))
    for k, kept in ((1, everywhere), (2, everywhere), (3, everywhere), (4, set())):
        asked = query.join(min_datasets=k)
        assert set(asked.missing("drop").to_anndata().var_names) == kept
        some = asked.features("LYZ", "CD3D").missing("drop").to_anndata()
        assert list(some.var_names) == [name for name in ("LYZ", "CD3D") if name in kept]


def test_what_was_not_measured(query: Query, small: Any) -> None:
    """Zero, NaN or dropped: each as documented, the mask says it in every case, and stored values stay."""
    for space in ("gene_expression", "protein_abundance"):
        asked = query.spaces(space)
        zero, nan, drop = (asked.missing(how).to_anndata() for how in ("zero", "nan", "drop"))
        measured = zero.varm["measured"].loc[:, list(zero.obs["layout_uid"])].to_numpy().T
        values = dense(nan.X)
        assert np.isnan(values[~measured]).all()
        np.testing.assert_array_equal(values[measured], dense(zero.X)[measured])
        assert (dense(zero.X)[~measured] == 0).all()
        assert zero.X.dtype.kind == "u"
        assert nan.X.dtype == np.float32
        assert list(drop.var_names) == list(zero.var_names[zero.varm["measured"].all(axis=1)])
        assert drop.X.dtype == zero.X.dtype
    one = query.where(dataset="second").missing("nan").to_anndata()
    assert one.X.dtype == np.uint8


def test_an_empty_result_keeps_its_columns(query: Query) -> None:
    """No cells still have all features, metadata columns, layers and dtypes."""
    full = query.to_anndata()
    for empty in (query.limit(0), query.where({"cell_type": "unused"}), query.sample(0)):
        result = empty.to_anndata()
        assert result.shape == (0, full.n_vars)
        assert list(result.var_names) == list(full.var_names)
        assert list(result.obs.columns) == list(full.obs.columns)
        assert result.varm["measured"].shape == full.varm["measured"].shape
        assert empty.count() == 0
        assert list(empty.batches(5)) == []
    assert query.limit(0).aggregate("cell_type").shape == (0, full.n_vars)
    assert query.limit(0).count("cell_type").sum() == 0


def test_provenance_and_cells_left_out(query: Query) -> None:
    """A result says where it comes from, and how many chosen cells it leaves out."""
    facts = query.spaces("protein_abundance").where(col("score").is_null()).to_anndata().uns["atlas"]
    assert facts["uri"] == query.catalog.location.uri
    assert (facts["snapshot"], facts["label"]) == (1, "small")
    assert json.loads(facts["query"])["filters"] == [{"operator": "is_null", "column": "score"}]
    assert facts["summary"] == "where col('score').is_null(); spaces protein_abundance"
    assert list(facts["layers"]["protein_abundance"]) == ["counts"]
    frame = query.where(col("score").is_null()).to_pandas()
    assert facts["cells_without_space"] == (frame["dataset"] == "second").sum()


@pytest.mark.long
@given(st.integers(0, 70), st.integers(0, 5), st.sampled_from([None, "dataset", "donor", "stage"]))
def test_samples_are_stable(small: Any, n: int, seed: int, by: str | None) -> None:
    """The same seed chooses the same cells in table order; each group gives n or all it has; fewer are among more."""
    frame = small.query.to_pandas()
    found = small.query.sample(n, by=by, seed=seed).to_pandas()
    again = small.query.sample(n, by=by, seed=seed).to_pandas()
    assert list(found.index) == list(again.index) == [uid for uid in frame.index if uid in set(found.index)]
    if by is None:
        assert len(found) == min(n, len(frame))
    else:
        sizes = frame.groupby(by, dropna=False, observed=True).size().clip(upper=n)
        assert len(found) == sizes.sum()
    fewer = small.query.sample(n // 2, by=by, seed=seed).to_pandas()
    assert set(fewer.index) <= set(found.index)


def test_other_seeds_choose_other_cells(query: Query) -> None:
    """Seeds differ, and every cell has its chance."""
    found = [set(query.sample(10, seed=seed).to_pandas().index) for seed in range(60)]
    assert len({tuple(sorted(f)) for f in found}) == 60
    assert set().union(*found) == set(query.to_pandas().index)


@pytest.mark.long
def test_samples_outlive_compaction(own: Any) -> None:
    """Compaction and later datasets leave a sample of the same cells as it was."""
    catalog, freeze = own
    before = freeze(catalog).sample(5, seed=3).to_pandas()
    catalog.tables.delete(CELLS, f"uid = '{freeze(catalog).order_by('uid').limit(1).to_pandas().index[0]}'")
    compact(catalog.tables, CELLS)
    after = Query(catalog).sample(6, seed=3).to_pandas()
    assert len(set(before.index) & set(after.index)) >= 4


def test_vectors_are_found(query: Query, small: Any) -> None:
    """The nearest cells of an embedding come first, among those that the filters keep."""
    vectors = {
        (name, cell): v for name, f in small.files.items() for cell, v in zip(f.obs_names, f.obsm["X_pca"], strict=True)
    }
    target = np.array([0.3, -0.2, 1.0])
    frame = query.to_pandas()
    for metric in ("l2", "cosine", "dot"):
        found = query.where(dataset=["second", "third"]).search(target, column="embedding", k=6, metric=metric)
        distance = {
            "l2": lambda v: ((v - target) ** 2).sum(),
            "cosine": lambda v: 1 - v @ target / np.linalg.norm(v) / np.linalg.norm(target),
            "dot": lambda v: 1 - v @ target,
        }[metric]
        expected = sorted((k for k in vectors if k[0] != "first"), key=lambda k: distance(vectors[k].astype(float)))[:6]
        cells = found.to_pandas()
        assert list(zip(cells["dataset"], cells["cell_name"], strict=True)) == expected
        assert cells["search_distance"].is_monotonic_increasing
        assert list(found.to_anndata().obs_names) == list(cells.index)
    assert list(found.order_by("cell_name").to_pandas()["cell_name"]) == sorted(cells["cell_name"])
    assert len(query.search(target, column="embedding", k=10**6).to_pandas()) == len(frame)


@pytest.mark.long
def test_texts_are_found_whatever_indexes_a_user_made(own: Any) -> None:
    """A full-text search keeps filtered cells that hold the word; an index that somebody made does not change the scores."""
    catalog, freeze = own
    plain = freeze(catalog).where(dataset="first").search("d1", column="donor", k=50).to_pandas()
    assert set(plain["donor"]) == {"D1"}
    assert (plain["search_score"] > 0).all()
    catalog.tables.open(CELLS).create_scalar_index("donor", "INVERTED", base_tokenizer="simple")
    indexed = Query(catalog.tip()).where(dataset="first").search("d1", column="donor", k=50).to_pandas()
    pd.testing.assert_frame_equal(indexed, plain)


def test_vector_columns_are_found_whatever_indexes_a_user_made(own: Any) -> None:
    """Vectors in a cell column are searched; an index that somebody made does not change the distances."""
    catalog, _ = own
    table = catalog.tables.open(CELLS)
    uids = catalog.tables.read(CELLS, ["uid"]).column("uid")
    vectors = np.random.default_rng(0).normal(size=(len(uids), 2)).astype(np.float32)
    table.merge(pa.table({"uid": uids, "place": pa.FixedSizeListArray.from_arrays(vectors.ravel(), 2)}), "uid")
    query = Query(catalog.tip()).where(dataset="third").search([0.1, 0.2], column="place", k=3)
    plain = query.to_pandas()
    third = np.flatnonzero(np.array(Query(catalog.tip()).to_pandas()["dataset"]) == "third")
    order = third[np.argsort(((vectors[third] - [0.1, 0.2]) ** 2).sum(axis=1))][:3]
    assert list(plain.index) == [uids[int(i)].as_py() for i in order]
    catalog.tables.open(CELLS).create_index("place", "IVF_SQ", num_partitions=4, metric="cosine")
    pd.testing.assert_frame_equal(query.to_pandas(), plain)
    with pytest.raises(QueryError, match="3 numbers"):
        Query(catalog.tip()).search([1, 2, 3], column="place").count()


@pytest.mark.long
def test_cells_without_a_record_are_invisible(own: Any) -> None:
    """Cells of an add that is under way are in no result and no count."""
    catalog, freeze = own
    n = freeze(catalog).count()
    rows = catalog.tables.read(CELLS).slice(0, 3)
    ghosts = rows.set_column(1, rows.schema.field("dataset_uid"), pa.array(["f" * 16] * 3)).set_column(
        0, rows.schema.field("uid"), pa.array([c * 16 for c in "abc"])
    )
    catalog.tables.append(CELLS, ghosts)
    tip = Query(catalog.tip())
    assert tip.count() == n == len(tip.to_pandas()) == tip.to_anndata().n_obs == tip.count("dataset").sum()
    assert len(tip.search([0, 0, 0], column="embedding", k=1000).to_pandas()) == n


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda q: q.layers("only_here").to_anndata(), QueryError, "in 1 dataset"),
        (lambda q: q.layers("nope").to_anndata(), QueryError, "lognorm"),
        (lambda q: q.features("CD3D", "cd3dx").to_anndata(), FeatureError, "near 'cd3dx'"),
        (lambda q: q.features("LYZ", "LYZ").to_anndata(), FeatureError, "more than once"),
        (lambda q: q.features([]), QueryError, "names"),
        (lambda q: q.features("X1", space="embedding").to_anndata(), QueryError, "no names"),
        (lambda q: q.spaces("rna"), QueryError, "gene_expression"),
        (lambda q: q.spaces("gene_expression", "embedding").to_anndata(), QueryError, "to_mudata"),
        (lambda q: q.join("outer"), QueryError, "intersection"),
        (lambda q: q.join(min_datasets=0), QueryError, "min_datasets"),
        (lambda q: q.missing("NA"), QueryError, "drop"),
        (lambda q: q.limit(-1), QueryError, "limit"),
        (lambda q: q.limit(True), QueryError, "limit"),
        (lambda q: q.sample(1.5), QueryError, "sample"),
        (lambda q: q.sample(3, by="cell"), QueryError, "no column"),
        (lambda q: q.order_by("nope"), QueryError, "no column"),
        (lambda q: q.order_by("n", "score", descending=[True]), QueryError, "descending"),
        (lambda q: q.obs("gene_expression"), QueryError, "spaces"),
        (lambda q: q.obs("nope"), QueryError, "no column"),
        (lambda q: q.batches(0), QueryError, "never end"),
        (lambda q: q.search("B", column="score"), QueryError, "text column"),
        (lambda q: q.search([1.0], column="donor"), QueryError, "vector"),
        (lambda q: q.search("B", column="embedding"), QueryError, "vectors"),
        (lambda q: q.search([], column="embedding"), QueryError, "finite"),
        (lambda q: q.search([np.nan] * 3, column="embedding"), QueryError, "finite"),
        (lambda q: q.search([1.0], column="embedding").count(), QueryError, "1 numbers"),
        (lambda q: q.search([1.0], column="embedding", metric="l1"), QueryError, "metrics"),
        (lambda q: q.to_anndata(max_bytes=10), LimitError, "write"),
        (lambda q: q.aggregate("nope"), QueryError, "no column"),
        (lambda q: q.layers("counts", "lognorm").aggregate("donor"), QueryError, "one layer"),
        (lambda q: q.write("result.csv"), SourceError, "h5ad"),
        (lambda q: q.spaces("embedding", "gene_expression").write("result.h5ad"), QueryError, "h5mu"),
    ],
)
def test_what_cannot_be_answered_is_refused(query: Query, ask: Any, error: type[Exception], words: str) -> None:
    """Each refusal names the fault and the way out."""
    with pytest.raises(error, match=words):
        ask(query)


def test_layers_follow_the_rule(query: Query) -> None:
    """A layer that every touched dataset has can be read; the first becomes X."""
    result = query.where(dataset="first").layers("only_here", "counts").to_anndata()
    np.testing.assert_array_equal(result.X.toarray(), result.layers["counts"].toarray())
    many = query.spaces("gene_expression", "protein_abundance").layers("lognorm", "counts")
    plan = plan_read(many.spec, many.catalog)
    assert plan.spaces["gene_expression"].layers == ("lognorm", "counts")
    assert plan.spaces["protein_abundance"].layers == ("counts",)
    with pytest.raises(QueryError, match="nope"):
        plan_read(many.layers("nope").spec, many.catalog)


def test_the_caller_may_change_the_features_of_a_result(query: Query) -> None:
    """Frames of features are cached in a snapshot; what is done to one result is not in the next."""
    first = query.spaces("gene_expression").to_anndata()
    kept = first.var.copy()
    first.var["symbol"] = "changed"
    first.var.loc[first.var_names[0], "uid"] = "changed"
    pd.testing.assert_frame_equal(query.spaces("gene_expression").to_anndata().var, kept)


def test_queries_never_change(query: Query) -> None:
    """Every call gives a new query; the old one asks what it asked."""
    before = query.spec
    query.where(donor="D1").features("LYZ").limit(3).sample(2).missing("nan").obs("donor").layers("counts")
    assert query.spec == before
    assert list(query.obs("donor", "percent.mt").to_pandas().columns) == ["cell_name", "dataset", "donor", "percent.mt"]
    assert list(query.obs([]).to_pandas().columns) == ["cell_name", "dataset"]


@pytest.mark.filterwarnings("ignore::raggedatlas.errors.UnknownValueWarning")
def test_explain_and_repr_say_what_is_asked(query: Query) -> None:
    """The plan in words names filter, join, layers, groups and bytes."""
    asked = query.where(donor="<b>it's</b>").where({"dataset": ["first"]}).join("intersection").features("LYZ")
    text = asked.explain()
    for words in (
        "snapshot 1",
        "'<b>it''s</b>'",
        "intersection",
        "counts (uint8)",
        "chosen by rule",
        "bytes",
        "cells: 0",
    ):
        assert words in text
    assert "1 groups, 3 arrays" in query.where(dataset="first").layers("counts", "lognorm").explain()
    assert "features LYZ" in repr(asked)


def test_without_a_common_layer_all_that_reads_no_value_works(tmp_path: Path) -> None:
    """Counts beside logarithms: cells are counted, described and loaded; the refusal of values names the call that takes the most cells."""
    catalog = create_catalog(Location(str(tmp_path / "atlas")))
    for name, n, values in (("raw", 4, np.arange(8.0)), ("log", 6, np.arange(12) / 8), ("log2", 2, np.arange(4) / 8)):
        obs = pd.DataFrame({"kind": ["B", "T"] * (n // 2)}, index=[f"{name}{i}" for i in range(n)])
        made = ad.AnnData(values.reshape(n, 2), obs=obs, var=pd.DataFrame(index=["g", "h"]))
        add(catalog, made, {"name": name}, False)
    query = Query(catalog.at(snapshot(catalog)))
    assert query.count() == len(query.to_pandas()) == 12
    assert query.count("kind").tolist() == [6, 6]
    assert len(query.search("B", column="kind").to_arrow()) == 6
    assert (len(query.limit(3).to_pandas()), len(query.sample(5).to_pandas())) == (3, 5)
    alone = query.spaces([])
    assert [len(batch.obs) for batch in alone.batches(5)] == [5, 5, 2]
    for outcome in (query.explain, query.to_anndata):
        try:
            said = str(outcome())
        except QueryError as error:
            said = str(error)
        assert "'X' is in 2 datasets (8 cells); 'counts' is in 1 dataset (4 cells)" in said
        (call,) = re.findall(r"\)\. (.*) reads the most cells", said)
        assert eval(f"query{call}.to_anndata().n_obs", {"query": query, "ra": raggedatlas}) == 8
    with pytest.raises(QueryError, match=r"where\(\{'dataset': \['raw'\]\}\) reads the most"):
        query.layers("counts").to_anndata()
    for refused in (
        alone.to_anndata,
        alone.to_mudata,
        lambda: alone.layers("X").batches(2),
        lambda: alone.aggregate("kind"),
    ):
        with pytest.raises(QueryError, match=r"reads no|reads \[\]|names \[\]|no effect"):
            refused()


@pytest.mark.parametrize("space", ["protein_abundance", "embedding"])
def test_dense_aggregates_equal_those_of_pandas(query: Query, space: str) -> None:
    """Sums and means of dense spaces per group equal pandas' own; unmeasured values count for nothing."""
    result = query.spaces(space).missing("nan").to_anndata()
    values = result.to_df().astype(float).groupby(result.obs["stage"], observed=True)
    found = query.spaces(space).aggregate("stage")
    assert list(found.obs_names) == list(values.sum().index)
    np.testing.assert_allclose(found.layers["sum"], values.sum().to_numpy(), rtol=1e-6)
    np.testing.assert_allclose(found.layers["mean"], values.mean().to_numpy(), rtol=1e-6)
    np.testing.assert_array_equal(found.layers["n_measured"], values.count().to_numpy())


def test_mudata_is_asked_for_by_name(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mudata the error names what to install."""
    monkeypatch.setitem(sys.modules, "mudata", None)
    with pytest.raises(MissingExtraError, match=r"raggedatlas\[mudata\]"):
        query.to_mudata()


def test_times_are_written_as_text(tmp_path: Path) -> None:
    """Times come back as times in memory, can be compared and sorted, and are written as text."""
    catalog = create_catalog(Location(str(tmp_path / "atlas")))
    file = ad.AnnData(sp.csr_matrix(np.eye(3, dtype=np.float32)), var=pd.DataFrame(index=["g1", "g2", "g3"]))
    file.obs_names = ["c1", "c2", "c3"]
    file.obs["at"] = pd.to_datetime(["2024-03-01", "2024-01-01", "2024-02-01"])
    add(catalog, file, {"name": "a"}, False)
    query = Query(catalog.at(snapshot(catalog)))
    assert list(query.order_by("at").to_pandas()["cell_name"]) == ["c2", "c3", "c1"]
    assert (
        query.where(col("at") > dt.date(2024, 1, 15)).count()
        == query.where(col("at") >= np.datetime64("2024-02-01")).count()
        == 2
    )
    assert query.to_pandas()["at"].dtype.kind == "M"
    written = ad.read_h5ad(query.write(str(tmp_path / "x.h5ad")))
    assert [str(v)[:10] for v in written.obs["at"]] == ["2024-03-01", "2024-01-01", "2024-02-01"]


def test_infinite_values_of_dense_layers_stay_infinite(tmp_path: Path) -> None:
    """A sum over an infinite value is infinite in dense layers, as in sparse ones; NaN counts for nothing."""
    values = np.array([[np.inf, 1, -np.inf], [2, np.nan, 3]], np.float32)
    file = ad.AnnData(sp.csr_matrix((2, 1), dtype=np.float32), var=pd.DataFrame(index=["g"]), obsm={"X_pca": values})
    catalog = create_catalog(Location(str(tmp_path / "atlas")))
    add(catalog, file, {"name": "one", "spaces": {"obsm/X_pca": "embedding"}}, False)
    found = Query(catalog.at(snapshot(catalog))).spaces("embedding").aggregate("dataset")
    np.testing.assert_array_equal(found.layers["sum"], [[np.inf, 1, -np.inf]])


def test_the_estimate_of_a_result_is_never_too_low(query: Query) -> None:
    """Each layer counts columns and bounds of its own, in int64 where a result is too large for int32."""
    asked = query.layers("counts", "lognorm", "scaled")
    space, made = plan_read(asked.spec, query.catalog).single(), asked.to_anndata()
    matrices = [made.X, made.layers["lognorm"], made.layers["scaled"]]
    n_bytes = sum(array.nbytes for m in matrices for array in (m.data, m.indices))
    assert n_bytes <= space.row_bytes().sum() - len(matrices) * 4 * made.n_obs
    small, large = (replace(space, n_cols=n).row_bytes().sum() for n in (2**31 - 1, 2**31))
    entries = sum(int((part.end - part.start).sum()) * len(part.layers) for part in space.parts)
    assert large - small == 4 * entries


def test_a_search_hides_what_an_earlier_one_found(tmp_path: Path) -> None:
    """A column that a file has from an earlier search gives way to the distances of this one, in every output."""
    rng = np.random.default_rng(1)
    obs = pd.DataFrame({"search_distance": 9.0, "kind": [*"ab"] * 5}, index=[f"c{i}" for i in range(10)])
    file = ad.AnnData(rng.poisson(1, (10, 3)).astype(np.int32), obs, pd.DataFrame(index=["A", "B", "C"]))
    file.obsm["X_pca"] = rng.normal(size=(10, 2)).astype(np.float32)
    atlas = raggedatlas.RaggedAtlas.create(tmp_path / "atlas")
    atlas.add(file, "one", spaces={"obsm/X_pca": "embedding"})
    query = atlas.checkout(atlas.snapshot()).query()
    assert (query.to_pandas()["search_distance"] == 9).all()
    found = query.search([0.0, 0.0], column="embedding", k=4)
    expected = np.sort((file.obsm["X_pca"].astype(float) ** 2).sum(axis=1))[:4].tolist()
    for some in (found, found.obs("search_distance"), found.obs([])):
        assert some.to_pandas()["search_distance"].tolist() == pytest.approx(expected)
    frames = [found.to_anndata().obs, raggedatlas.read(found.write(tmp_path / "a.h5ad")).obs]
    assert all(frame["search_distance"].tolist() == pytest.approx(expected) for frame in frames)
    assert found.aggregate("search_distance").obs["search_distance"].tolist() == pytest.approx(expected)


def test_a_column_that_is_named_twice_counts_once(query: Query) -> None:
    """Groups by a column are those by the column named twice."""
    pd.testing.assert_series_equal(query.count(["donor", "donor"]), query.count("donor"))
    for call in (query.aggregate, query.pseudobulk):
        pd.testing.assert_frame_equal(call(["donor", "donor"]).obs, call("donor").obs)
