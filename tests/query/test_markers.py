"""Marker tables: each group equal to its comparison with the rest and to scanpy's table, what was measured, workers, and refusals."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import raggedatlas as ra
from raggedatlas.errors import ArgumentError, QueryError
from raggedatlas.query import markers as module
from raggedatlas.query.compare import Moments, rank_moments

DATA = Path(__file__).parents[1] / "data"
COLUMNS = [
    "group", "names", "scores", "logfoldchanges", "pvals", "pvals_adj", "pct_nz_group", "pct_nz_reference", "symbol",
]  # fmt: skip
N_CELLS = 90


def make_file(k: int) -> ad.AnnData:
    rng = np.random.default_rng(k)
    x = rng.poisson(0.8, (N_CELLS, 30)).astype(np.float32)
    kinds = rng.choice(["T", "B", "NK"], N_CELLS)
    x[kinds == "B", :4] += rng.poisson(3, (int((kinds == "B").sum()), 4))
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical(kinds, ["T", "NK", "B", "rare"]),
            "tissue": rng.choice(["blood", "lung"], N_CELLS),
        },
        index=[f"c{i}" for i in range(N_CELLS)],
    )
    obs.loc[obs.index[:5], "cell_type"] = np.nan
    if k == 1:
        obs.loc[obs.index[7], "cell_type"] = "rare"
    obs.loc[obs.index[8], "tissue"] = np.nan
    return ad.AnnData(sp.csr_matrix(x), obs, pd.DataFrame(index=[f"GENE{i + 5 * (k == 2)}" for i in range(30)]))


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> ra.AtlasView:
    """Three files; the last lacks five genes of the others and has five of its own."""
    atlas = ra.RaggedAtlas.create(tmp_path_factory.mktemp("markers") / "a.atlas")
    for k in range(3):
        atlas.add(make_file(k), f"file{k}", organism="human", progress=False)
    return atlas.checkout(atlas.snapshot())


def check_equal(found: pd.DataFrame, wanted: pd.DataFrame) -> None:
    """Compare two tables feature by feature; sums of other orders are rounded differently."""
    names = [name for name in COLUMNS if name != "group"]
    found, wanted = (table[names].set_index("names").sort_index() for table in (found, wanted))
    pd.testing.assert_frame_equal(found, wanted, rtol=1e-9, atol=1e-12)


def test_each_group_is_compared_with_the_rest(view: ra.AtlasView) -> None:
    """The rows of a group are those of `compare`; cells without a value take no part."""
    found = view.query().markers("cell_type")
    assert [*found] == COLUMNS
    assert [*found["group"].unique()] == ["T", "NK", "B"]
    labelled = view.query().where("cell_type IS NOT NULL")
    for group, table in found.groupby("group", observed=True):
        assert (np.diff(table["scores"]) <= 0).all()
        check_equal(table, labelled.compare({"cell_type": group}))
    assert found.iloc[0:0].dtypes["group"] == "category"
    assert found.attrs["markers"] == {
        "by": "cell_type", "within": None, "values": "log1p of counts per 10,000", "n_cells": 255, "n_unlabelled": 15,
        "not_compared": ["rare"], "note": module.NO_REPLICATES,
    }  # fmt: skip


def test_groups_within_a_column_are_compared_with_the_rest_of_its_value(view: ra.AtlasView) -> None:
    found = view.query().markers("cell_type", within="tissue")
    assert [*found] == [*COLUMNS, "tissue"]
    assert {*found["tissue"]} == {"blood", "lung"}
    for (tissue, group), table in found.groupby(["tissue", "group"], observed=True):
        query = view.query().where({"tissue": tissue}).where("cell_type IS NOT NULL")
        check_equal(table, query.compare({"cell_type": group}))


def test_the_features_of_a_query_are_its_rows(view: ra.AtlasView) -> None:
    """P-values are adjusted among them, and sums of cells are over all features."""
    labelled = view.query().where("cell_type IS NOT NULL")
    for query in (
        labelled.features("GENE3", "GENE7", "GENE33"),
        labelled.join("intersection"),
        labelled.missing("drop"),
    ):
        found = query.markers("cell_type")
        check_equal(found[found["group"] == "B"], query.compare({"cell_type": "B"}))
    assert {*labelled.features("GENE3", "GENE7").markers("cell_type")["names"]} == {"GENE3", "GENE7"}


def test_a_feature_is_compared_among_the_cells_that_measured_it(view: ra.AtlasView) -> None:
    """Where one side has fewer than two such cells, it is left out."""
    found = view.query().markers("dataset")
    own = found[found["names"] == "GENE0"]
    assert [*own["group"]] == ["file0", "file1"]
    assert "GENE34" not in {*found["names"]}


def test_values_that_are_no_counts_are_taken_as_they_are(tmp_path: Path) -> None:
    file = make_file(0)
    file.X = sp.csr_matrix(np.random.default_rng(0).normal(size=file.shape).astype(np.float32))
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    atlas.add(file, "one", progress=False)
    query = atlas.checkout(atlas.snapshot()).query().where("cell_type IS NOT NULL")
    with np.errstate(all="ignore"):
        found = query.markers("cell_type")
        check_equal(found[found["group"] == "T"], query.compare({"cell_type": "T"}))
    assert found.attrs["markers"]["values"] == "X"


def test_workers_and_blocks_change_no_bit(view: ra.AtlasView, monkeypatch: pytest.MonkeyPatch) -> None:
    query = view.query()
    alone = query.markers("cell_type", within="tissue")
    for n_bytes in (2000, 50_000):
        monkeypatch.setattr("raggedatlas.query.read.row_blocks.__defaults__", (n_bytes,))
        monkeypatch.setattr("raggedatlas.query.read.block_plans.__defaults__", (n_bytes,))
        blocks = query.markers("cell_type", within="tissue")
        with ThreadPoolExecutor(2) as pool:
            pd.testing.assert_frame_equal(
                query.markers("cell_type", within="tissue", executor=pool), blocks, check_exact=True
            )
        pd.testing.assert_frame_equal(blocks, alone, rtol=1e-9)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(-1, 3), min_size=3, max_size=3)), min_size=1, max_size=14
    )
)
def test_the_rest_is_all_other_groups(cells: Any) -> None:
    """By brute force: each group, and the cells of all others, added up directly."""
    groups, values = np.array([group for group, _ in cells]), np.array([row for _, row in cells], float)
    every = [np.stack([of[groups == g].sum(axis=0) for g in range(4)]) for of in (values, values**2, values != 0)]
    measured = np.repeat(np.bincount(groups, minlength=4)[:, None], 3, axis=1)
    for number, ranks in module._against_rest(Moments(*every), measured, np.arange(4)):
        sides = [groups == number, groups != number]
        wanted = rank_moments(
            Moments(*(np.stack([of[side].sum(axis=0) for side in sides]) for of in (values, values**2, values != 0))),
            np.stack([np.full(3, side.sum()) for side in sides]),
        )
        for name in ("scores", "logfoldchanges", "pvals", "fractions"):
            np.testing.assert_allclose(getattr(ranks, name), getattr(wanted, name), rtol=1e-12)


def test_nothing_has_an_empty_table(view: ra.AtlasView) -> None:
    """Without cells, and with one group."""
    for query in (view.query().limit(0), view.query().where(cell_type="B")):
        found = query.markers("cell_type", within="tissue")
        assert [*found] == [*COLUMNS, "tissue"]
        assert len(found) == 0


@pytest.mark.long  # scanpy compiles
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")
def test_the_table_is_that_of_scanpy(tmp_path: Path) -> None:
    """Types of cells of a real file, in all groups at once."""
    scanpy = pytest.importorskip("scanpy")
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    atlas.add(DATA / "pbmc_5k_protein_v3.h5ad", organism="human", progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    obs = query.to_pandas()
    obs["part"] = pd.cut(obs["n_genes"], 4, labels=["few", "some", "many", "most"]).astype(str)
    atlas.annotate(obs[["part"]], "parts")
    query = atlas.checkout(atlas.snapshot()).query()
    found = query.markers("part")
    adata = query.to_anndata()
    scanpy.pp.normalize_total(adata, target_sum=1e4)
    scanpy.pp.log1p(adata)
    adata.X = adata.X.astype(np.float64)
    adata.obs["part"] = adata.obs["part"].astype("category")
    scanpy.tl.rank_genes_groups(adata, "part", method="t-test", pts=True)
    for group in ("few", "some", "many", "most"):
        wanted = scanpy.get.rank_genes_groups_df(adata, group).set_index("names")
        own = found[found["group"] == group].set_index("names")
        wanted = wanted.loc[own.index]
        assert len(own) == adata.n_vars
        for name, exact in {"scores": 2e-6, "logfoldchanges": 2e-6, "pvals": 1e-6, "pvals_adj": 1e-6}.items():
            np.testing.assert_allclose(own[name], wanted[name], rtol=exact, atol=1e-12, err_msg=name)
        for name in ("pct_nz_group", "pct_nz_reference"):
            np.testing.assert_allclose(own[name], wanted[name], rtol=1e-9)


REFUSED = [
    ("column of the groups", ArgumentError, lambda q: q.markers("tissue", within="tissue")),
    ("'names' is a column of the table", ArgumentError, lambda q: q.markers("tissue", within="names")),
    ("'cell_typo'", QueryError, lambda q: q.markers("cell_typo")),
    ("'tisue'", QueryError, lambda q: q.markers("cell_type", within="tisue")),
    ("markers reads one layer", QueryError, lambda q: q.layers("counts", "X").markers("tissue")),
    ("layer 'nothing'", QueryError, lambda q: q.markers("tissue", layer="nothing")),
]


@pytest.mark.parametrize(("message", "error", "call"), REFUSED, ids=[row[0][:16] for row in REFUSED])
def test_what_cannot_be_marked_is_refused(view: ra.AtlasView, message: str, error: Any, call: Any) -> None:
    """Each refusal says what is wrong."""
    with pytest.raises(error, match=message):
        call(view.query())
