"""A query as JSON: it is repeated from `Query.to_dict`, and from what a result and a written file record."""

import datetime as dt
import inspect
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raggedatlas as ra
from raggedatlas import col, under
from raggedatlas.errors import ArgumentError, NotFoundError, QueryError
from raggedatlas.query.query import Query
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.filters import Filter
from raggedatlas.store.sql_parser import filter_from_dict
from support.atlases import small_anndata
from support.spatial import make_slide

BIOMART = Path(__file__).parents[1] / "data" / "gene_tables" / "biomart_human_to_mouse.csv"


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> ra.AtlasView:
    """A slide with outlines, a dataset with a result of a model and columns of every kind, and a table of orthologs."""
    atlas = ra.RaggedAtlas.create(str(tmp_path_factory.mktemp("dict") / "atlas"))
    slide = make_slide(12, seed=3)
    atlas.add(slide.data, "slide", progress=False)
    atlas.add(slide.outlines, link="segment_id", dataset="slide", progress=False)
    file = small_anndata(1, 20)
    file.obs["day"] = [dt.date(2024, 1, 1 + i) for i in range(20)]
    file.obs["time"] = pd.date_range("2024-01-01", periods=20, freq="D")
    file.obs["span"] = pd.to_timedelta(np.arange(20), "min")
    file.obs["large"] = 2**60 + np.arange(20)
    file.layers["doubled"] = file.X * 2
    atlas.add(file, "plain", progress=False)
    atlas.identity.load(BIOMART, release="114")
    cells = atlas.checkout(atlas.snapshot()).query().where(dataset="plain").to_anndata()
    cells.obsm["z"] = np.arange(40, dtype=np.float32).reshape(20, 2)
    atlas.annotate(cells, columns=[], obsm=["z"])
    atlas.annotate(pd.DataFrame({"split": ["train", "test"] * 10}, index=cells.obs_names))
    return atlas.checkout(atlas.snapshot("asked"))


DAY, TIME, SPAN = dt.date(2024, 1, 9), pd.Timestamp("2024-01-09T00:00:00.000000001"), dt.timedelta(minutes=5)
CALLS: dict[str, Callable[[ra.AtlasView], Query]] = {
    "query": lambda view: view.query(identity="asked", on_merge="sum"),
    "query as given": lambda view: view.query(identity="as-given", on_merge="apart"),
    "query by pairs": lambda view: view.query(identity={"GENE1": "GENE2", "GENE3": "GENE2"}, on_merge="sum"),
    "where": lambda view: view.query().where("n_genes > 3 AND cell_type LIKE 'B%'", dataset=["plain", None]),
    "where nothing": lambda view: view.query().where(col("n_genes").isin([])),
    "where term": lambda view: view.query().where(cell_type=under("lymphocyte", ontology="CL")),
    "split": lambda view: view.query().split("train"),
    "within": lambda view: view.query().within((0, 0, 30, np.inf), by="centroid").where(dataset="slide").within((5, 5, 40, 40)),
    "features": lambda view: view.query().features([f"GENE{n}" for n in range(12)][::-1]),
    "features of a space": lambda view: view.query().spaces("gene_expression").features("GENE2", space="gene_expression"),
    "join": lambda view: view.query().join(min_datasets=2),
    "names": lambda view: view.query(names="symbol"),
    "join orthologs": lambda view: view.query().join("intersection", orthologs="human"),
    "spaces": lambda view: view.query().spaces([]),
    "layers": lambda view: view.query().where(dataset="plain").layers("doubled", "counts"),
    "obs": lambda view: view.query().obs("cell_type", "n_genes"),
    "obs of none": lambda view: view.query().obs([]),
    "order_by": lambda view: view.query().order_by("cell_type", "n_genes", descending=[True, np.True_]),
    "limit": lambda view: view.query().limit(0),
    "sample": lambda view: view.query().sample(3, by="cell_type", seed=7),
    "search": lambda view: view.query().search([0.1, 1 / 3], column="z", k=np.int64(4), metric="cosine"),
    "search of text": lambda view: view.query().search("B", column="cell_type", k=2),
    "with_results": lambda view: view.query().with_results("z", missing="drop"),
    "missing": lambda view: view.query().missing("nan"),
    "with_centroids": lambda view: view.query().with_centroids().with_centroids(key="centre"),
}  # fmt: skip


def repeated(view: ra.AtlasView, query: Query) -> Query:
    return Query.from_dict(view, json.loads(json.dumps(query.to_dict(), allow_nan=False)))


@pytest.mark.filterwarnings("ignore:No cell has")
@pytest.mark.parametrize("name", CALLS)
def test_a_query_is_repeated_from_its_dictionary(view: ra.AtlasView, name: str) -> None:
    """What is read from JSON asks the same, and chooses the same cells, features and values."""
    query = CALLS[name](view)
    again = repeated(view, query)
    assert again.to_dict() == query.to_dict()
    assert again.explain() == query.explain()
    assert again.to_pandas().equals(query.to_pandas())
    if query.spec.spaces != ():
        one, other = query.to_anndata(), again.to_anndata()
        assert one.var.equals(other.var)
        assert {*one.layers, *one.obsm} == {*other.layers, *other.obsm}
        for left, right in ((one.X, other.X), *((one.layers[name], other.layers[name]) for name in one.layers)):
            np.testing.assert_array_equal(left.toarray(), right.toarray())


def test_the_table_has_every_part_of_a_query(view: ra.AtlasView) -> None:
    """Each method that narrows a query is above, and each part of a query is written and differs from the default in some case."""
    methods = {
        name for name, method in inspect.getmembers(Query, inspect.isfunction)
        if inspect.signature(method).return_annotation == "Query" and not name.startswith("_")
    }  # fmt: skip
    assert methods <= {name.split(" ")[0] for name in CALLS}
    usual = QuerySpec().to_dict()
    assert {*usual} == {part.name for part in fields(QuerySpec)}
    differing = {key for call in CALLS.values() for key, value in call(view).to_dict().items() if value != usual[key]}
    assert differing == {*usual}


values = st.sampled_from([True, 3, 2**62 + 1, -0.1, 1e300, "it's", "é\n", DAY, TIME, SPAN, dt.datetime(2024, 1, 9, 1, 2, 3, 4),
    pd.Timedelta(1, "ns"), np.datetime64("2024-01-09T05"), np.datetime64("2024-01-09", "ns"), np.timedelta64(25, "s")])  # fmt: skip
names = st.sampled_from(["n", "percent.mt", "a`b"])
leaves = st.one_of(
    st.builds(lambda name, sign, value: getattr(col(name), f"__{sign}__")(value), names, st.sampled_from(["eq", "ne", "lt", "le", "gt", "ge"]), values),
    st.builds(lambda name, listed: col(name).isin(listed), names, st.lists(values | st.none() | st.just(under("T cell", part_of=False)), max_size=12)),
    st.builds(lambda name, how, text: getattr(col(name), how)(text), names, st.sampled_from(["startswith", "contains"]), st.text(max_size=3)),
    st.builds(lambda name: col(name).is_null(), names),
)  # fmt: skip
conditions = st.recursive(
    leaves,
    lambda inner: st.one_of(st.builds(lambda a, b: a & b, inner, inner), st.builds(lambda a, b: a | b, inner, inner), st.builds(lambda a: ~a, inner)),
    max_leaves=8,
)  # fmt: skip


@given(conditions)
def test_a_condition_is_read_as_it_was_written(condition: Filter) -> None:
    """Conditions of all kinds come back from JSON with every value, to the nanosecond and the last bit."""
    again = filter_from_dict(json.loads(json.dumps(condition.to_dict(), allow_nan=False)))
    assert again.to_dict() == condition.to_dict()
    assert type(again) is type(condition)


@pytest.mark.parametrize("condition", [
    col("day") > DAY, col("time") == dt.datetime(2024, 1, 9), col("time") <= TIME, col("time") > np.datetime64("2024-01-09"), col("span") <= SPAN, col("span") == pd.Timedelta(5, "min"),
    col("large") == 2**60 + 1, col("time").isin([dt.datetime(2024, 1, 9), None]),
], ids=repr)  # fmt: skip
def test_dates_and_large_numbers_choose_the_same_cells(view: ra.AtlasView, condition: Filter) -> None:
    """A value that JSON has no type for chooses exactly the cells that it chose before."""
    query = view.query().where(dataset="plain").where(condition)
    assert 0 < query.count() < 20
    assert repeated(view, query).to_pandas().index.equals(query.to_pandas().index)


@pytest.mark.parametrize("ending", ["h5ad", "zarr", "h5mu"])
def test_a_file_that_was_sent_is_read_again_from_the_atlas(view: ra.AtlasView, tmp_path: Path, ending: str) -> None:
    """`uns["atlas"]` of a written file names the atlas and the snapshot, and holds the query whole, however long its lists are."""
    uids = view.query().order_by("uid").to_pandas().index
    long = [*uids[:25], *(f"{number:016x}" for number in range(5000))]
    query = view.query().where(uid=long).features([f"GENE{n}" for n in range(12)]).order_by("n_genes")
    sent = ra.read(query.write(tmp_path / f"sent.{ending}"))
    facts = sent.uns["atlas"]
    source = ra.RaggedAtlas.open(facts["uri"]).checkout(int(facts["snapshot"]))
    again = Query.from_dict(source, json.loads(facts["query"])).to_anndata()
    sent = sent if isinstance(sent, ad.AnnData) else sent.mod["gene_expression"]
    assert (again.X != sent.X).nnz == 0
    assert again.obs_names.equals(sent.obs_names)
    assert again.uns["atlas"]["query"] == facts["query"]


@pytest.mark.parametrize(("asked", "named"), [
    ({"where": []}, "'where'"), ({"filters": 3}, "'filters'"), ({"filters": [{"operator": "~"}]}, "'~'"), ({"limit": "many"}, "n as a whole number"),
    ({"filters": [{"operator": "==", "column": "n_genes", "valeu": 3}]}, "valeu"), ({"filters": [{"operator": "==", "column": "n_genes", "value": [3]}]}, "list"),
    ({"filters": [{"operator": "<", "column": "day", "value": {"date": "soon"}}]}, "'filters'"), ({"sample": {"n": 3, "m": 3}}, "'m'"), ({"order": ["n_genes"]}, "'order'"),
    ({"features": [["GENE1"]]}, "'features'"), ({"identity": [3]}, "'identity'"), ({"on_merge": "add"}, "on_merge"), ({"join": "left"}, "'left'"),
    ({"filters": [{"operator": "within", "bbox": [0, 0, 1, 1], "how": "exact"}]}, "'how'"), ({"limit": True}, "True"),
], ids=str)  # fmt: skip
def test_what_is_no_query_is_refused_by_name(view: ra.AtlasView, asked: Any, named: str) -> None:
    """Unknown keys and values that a key does not take are refused in one line that names them."""
    with pytest.raises(QueryError, match=named) as refused:
        Query.from_dict(view, asked)
    assert "\n" not in str(refused.value)


def test_what_the_snapshot_lacks_is_refused_as_by_the_methods(view: ra.AtlasView) -> None:
    """Names are checked when the query is made, nesting is bounded, and something else than a snapshot is named."""
    with pytest.raises(QueryError, match="no column 'gone'"):
        Query.from_dict(view, {"filters": [{"operator": "is_null", "column": "gone"}]})
    with pytest.raises(NotFoundError, match="no result 'gone'"):
        Query.from_dict(view, {"results": ["gone"]})
    deep: dict[str, Any] = {"operator": "is_null", "column": "n_genes"}
    for _ in range(500):
        deep = {"operator": "not", "filter": deep}
    with pytest.raises(QueryError, match="levels deep"):
        Query.from_dict(view, {"filters": [deep]})
    with pytest.raises(ArgumentError, match="view"):
        Query.from_dict(view.query(), {})  # type: ignore[arg-type]
