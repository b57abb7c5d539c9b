"""Scores of gene sets: brute force in NumPy, what was measured, order and workers, decoupler's own values, and refusals."""

import gzip
import itertools
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

import raggedatlas as ra
from raggedatlas.errors import ArgumentError, AtlasError, FeatureError, LimitError, QueryError, SourceError, StoreError
from raggedatlas.formats import gene_sets
from raggedatlas.formats.gene_sets import read_gmt
from raggedatlas.query import score as module
from raggedatlas.query.score import rank_shares

N_CELLS, N_GENES = 40, 60
SETS: dict[str, Any] = {
    "low": [f"GENE{i}" for i in range(8)],
    "mixed": [f"GENE{i}" for i in range(3, 58, 5)],
    "high": [f"GENE{i}" for i in range(50, 60)],
}
WEIGHTED: dict[str, Any] = {
    name: dict(zip(genes, np.linspace(-1.5, 2.3, len(genes)), strict=True)) for name, genes in SETS.items()
}
METHODS = ("mean", "aucell", "ulm")
FEW = pytest.mark.filterwarnings("ignore:Scores are missing")


def make_file(k: int, first: int = 0, *, floats: bool = False, n_genes: int = N_GENES) -> ad.AnnData:
    """Make counts, or numbers of both signs without ties; the genes begin with `first`, and cell 0 has no counts."""
    rng = np.random.default_rng(k)
    x = rng.normal(size=(N_CELLS, n_genes)) if floats else rng.poisson(1.2, (N_CELLS, n_genes))
    if not floats:
        x[0] = 0
    names = [f"GENE{i + first}" for i in range(n_genes)]
    obs = pd.DataFrame(index=[f"c{i}" for i in range(N_CELLS)])
    return ad.AnnData(sp.csr_matrix(x.astype(np.float32)), obs, pd.DataFrame(index=names))


FILES = {"one": make_file(1), "two": make_file(2, 20)}


def view_of(folder: Path, files: dict[str, ad.AnnData]) -> ra.AtlasView:
    atlas = ra.RaggedAtlas.create(folder / "a.atlas")
    for name, file in files.items():
        atlas.add(file, name, organism="human", progress=False)
    return atlas.checkout(atlas.snapshot())


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> ra.AtlasView:
    """Two files of counts; the second lacks the first 20 genes of the other and has 20 of its own."""
    return view_of(tmp_path_factory.mktemp("score"), FILES)


def scored(query: ra.Query, *given: Any, **options: Any) -> pd.DataFrame:
    """Score, and return a frame by uid."""
    frame: pd.DataFrame = query.score(*given, **options).to_pandas().set_index("uid")
    return frame


def logarithms(adata: ad.AnnData) -> Any:
    dense = adata.X.toarray().astype(np.float64)
    sums = dense.sum(axis=1, keepdims=True)
    return np.log1p(dense / np.where(sums == 0, 1, sums) * 1e4)


def weights_for(members: Any, genes: Any) -> Any:
    return np.array([float(members.get(g, 0)) if isinstance(members, dict) else float(g in members) for g in genes])


def brute_force(values: Any, weights: Any, method: str, n_top: int) -> float:
    """Score one cell over the features that it measured."""
    if method == "mean":
        return float((values * weights).sum() / np.abs(weights).sum())
    if np.ptp(values) == 0:
        return np.nan
    if method == "aucell":
        ranks = zip(rankdata(-values, "min")[weights != 0], rankdata(-values, "max")[weights != 0], strict=True)
        found = sum(np.mean([max(n_top - rank, 0) for rank in range(int(low), int(high) + 1)]) for low, high in ranks)
        return float(found / sum(max(n_top - rank, 0) for rank in range(1, int((weights != 0).sum()) + 1)))
    # By least squares on a design of two columns.
    design = np.column_stack([np.ones(len(values)), weights])
    solution, residuals, *_ = np.linalg.lstsq(design, values)
    variance = residuals[0] / (len(values) - 2)
    return float(solution[1] / np.sqrt(variance * np.linalg.inv(design.T @ design)[1, 1]))


@FEW
@pytest.mark.parametrize(
    ("method", "top"),
    [("mean", None), ("aucell", None), ("aucell", 0.3), ("aucell", 7), ("aucell", 1000), ("ulm", None)],
)
def test_scores_are_those_of_brute_force_over_what_was_measured(view: ra.AtlasView, method: Any, top: Any) -> None:
    """Counts with many ties: of each cell only the features of its dataset count, in the set and in the background."""
    for sets in (SETS,) if method == "aucell" else (SETS, WEIGHTED):
        found = scored(view.query(), sets, method, min_features=1, **({} if top is None else {"top": top}))
        obs = view.query().to_pandas()
        assert found.index.tolist() == obs.index.tolist()
        n_top = {None: 3, 0.3: 18, 7: 7, 1000: N_GENES}[top]
        for name, file in FILES.items():
            values = file.X.toarray().astype(float) if method == "aucell" else logarithms(file)
            own = found[(obs["dataset"] == name).to_numpy()]
            for set_name, members in sets.items():
                weights = weights_for(members, file.var_names)
                wanted = [brute_force(row, weights, method, n_top) if weights.any() else np.nan for row in values]
                np.testing.assert_allclose(own[set_name], wanted, rtol=1e-5, atol=1e-6)
                assert np.isnan(own[set_name]).any() == (not weights.any() or method != "mean")


@pytest.mark.parametrize("method", METHODS)
def test_values_of_both_signs_are_taken_as_they_are(tmp_path: Path, method: Any) -> None:
    """A layer of floats is not normalized; negative values rank behind zeros."""
    file = make_file(3, floats=True)
    file.X.data[::3] = 0
    file.X.eliminate_zeros()
    found = scored(view_of(tmp_path, {"one": file}).query(), {"mixed": SETS["mixed"]}, method)
    weights = weights_for(SETS["mixed"], file.var_names)
    wanted = [brute_force(row, weights, method, 3) for row in file.X.toarray().astype(float)]
    np.testing.assert_allclose(found["mixed"], wanted, rtol=1e-5, atol=1e-6)


@given(st.lists(st.integers(-2, 2), min_size=2, max_size=6), st.integers(2, 6), st.data())
def test_ties_have_what_a_random_order_gives_on_average(row: list[int], n_top: int, data: st.DataObject) -> None:
    """The shares of tied values are the means over all orders of the features."""
    values, n_top = np.array(row, float), min(n_top, len(row))
    members = np.array(data.draw(st.lists(st.booleans(), min_size=len(row), max_size=len(row))))
    shares, zero_share, varies = rank_shares(sp.csr_array(values[None]), np.array([len(row)]), np.array([n_top]))
    found = shares[members[values != 0]].sum() + members.sum() * zero_share[0]
    areas = []
    for order in itertools.permutations(range(len(row))):
        # A stable sort keeps the order of what is equal.
        ranking = np.array(order)[np.argsort(-values[list(order)], kind="stable")]
        areas.append(np.cumsum(members[ranking])[: n_top - 1].sum())
    assert found == pytest.approx(np.mean(areas))
    assert varies[0] == (len({*row}) > 1)


@pytest.mark.parametrize("method", METHODS)
@FEW
def test_datasets_do_not_depend_on_each_other(view: ra.AtlasView, tmp_path: Path, method: Any) -> None:
    """Each dataset in an atlas of its own, with its genes in another order, has the same scores."""
    together, obs = scored(view.query(), SETS, method), view.query().to_pandas()
    for name, file in FILES.items():
        genes = [*file.var_names[::-1]] if name == "one" else [*file.var_names]
        alone = view_of(tmp_path / name, {name: file[:, genes].copy()})
        sets = {key: [gene for gene in genes if gene in members] for key, members in SETS.items()}
        sets = {key: members for key, members in sets.items() if members}
        found = scored(alone.query(), sets, method).set_axis(alone.query().to_pandas()["cell_name"], axis=0)
        wanted = together[(obs["dataset"] == name).to_numpy()].set_axis(found.index, axis=0)[[*sets]]
        pd.testing.assert_frame_equal(found, wanted, rtol=1e-9)


@FEW
@pytest.mark.parametrize("method", METHODS)
def test_workers_change_no_bit(view: ra.AtlasView, monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    monkeypatch.setattr(module, "_BATCH", 7)
    monkeypatch.setattr("raggedatlas.query.compute.TASK_CELLS", 14)
    alone, steps = view.query().score(SETS, method), list[Any]()
    with ThreadPoolExecutor(2) as pool:
        together = view.query().score(SETS, method, executor=pool, progress=lambda *step: steps.append(step))
    assert together.equals(alone) or np.array_equal(  # `equals` of Arrow knows no equal NaN
        together.drop_columns("uid").to_pandas(), alone.drop_columns("uid").to_pandas(), equal_nan=True
    )
    assert steps[-1] == ("cells", 2 * N_CELLS, 2 * N_CELLS)


@FEW
def test_processes_score_too(view: ra.AtlasView) -> None:
    alone = scored(view.query(), SETS)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pd.testing.assert_frame_equal(scored(view.query(), SETS, executor=pool), alone, check_exact=True)


def test_sets_of_which_too_few_were_measured_have_no_score(view: ra.AtlasView) -> None:
    """The warning says which set, of how many cells, and what one dataset measured."""
    with pytest.warns(
        UserWarning, match=r"min_features=9.*'low' of 80 cells \(dataset 'one' measured 8 of its 8\)"
    ) as said:
        found = scored(view.query(), SETS, min_features=9)
    assert len(said) == 1
    assert "'mixed' of 40 cells (dataset 'two' measured 7 of its 11)" in str(said[0].message)
    assert "'high'" not in str(said[0].message)
    obs = view.query().to_pandas()
    assert found["low"].isna().all()
    assert (found["mixed"].isna() == (obs["dataset"] == "two")).all()
    assert found["high"].notna().all()


@FEW
def test_a_query_chooses_what_counts(view: ra.AtlasView) -> None:
    """Features that the query leaves out are in no mean and no ranking; sums of cells are over all features."""
    shared = [f"GENE{i}" for i in range(20, 60)]
    for method in METHODS:
        found = scored(view.query().join("intersection"), SETS, method, min_features=1)
        named = scored(view.query().features(shared), SETS, method, min_features=1)
        pd.testing.assert_frame_equal(found, named)
        file = FILES["one"]
        values = (file.X.toarray() if method == "aucell" else logarithms(file))[:, 20:]
        weights = weights_for(SETS["mixed"], shared)
        wanted = [brute_force(row, weights, method, 2) for row in values.astype(float)]
        np.testing.assert_allclose(found["mixed"].iloc[:N_CELLS], wanted, rtol=1e-5, atol=1e-6)


@FEW
def test_some_cells_in_another_order(view: ra.AtlasView) -> None:
    every = scored(view.query(), SETS, "ulm")
    some = scored(view.query().sample(11, seed=4).order_by("cell_name"), SETS, "ulm")
    assert len(some) == 11
    pd.testing.assert_frame_equal(some, every.loc[some.index])
    none = view.query().limit(0).score(SETS)
    assert none.column_names == ["uid", *SETS]
    assert none.num_rows == 0


@FEW
def test_the_table_is_an_annotation(tmp_path: Path) -> None:
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    for name, file in FILES.items():
        atlas.add(file, name, progress=False)
    scores = atlas.checkout(atlas.snapshot()).query().score(SETS)
    atlas.annotate(scores, "scores")
    back = atlas.checkout(atlas.snapshot()).query().to_pandas()
    pd.testing.assert_frame_equal(back[[*SETS]], scores.to_pandas().set_index("uid"), check_names=False)
    assert back.loc[back["dataset"] == "two", "low"].isna().all()


def test_names_mean_what_features_take_them_for(view: ra.AtlasView) -> None:
    """Uids, names, and a name twice: one feature counts once."""
    uid = view.features().reset_index().set_index("feature_id").loc["GENE30", "uid"]
    sets = {"a": ["GENE30", "GENE31", "GENE32"], "b": [uid, "GENE30", "GENE31", "GENE31", "GENE32", uid]}
    found = scored(view.query(), sets, min_features=3)
    np.testing.assert_array_equal(found["a"], found["b"])
    with pytest.raises(QueryError, match=r"'a'.*mean one feature, with the weights 2.0 and 1.0"):
        view.query().score({"a": {"GENE30": 1, uid: 2}})


def test_unknown_names_are_refused_or_left_out(view: ra.AtlasView) -> None:
    sets = {"a": ["GENE30", "NOGENE", "GENE31"], "b": ["NOGENE", "OTHER"]}
    with pytest.raises(FeatureError, match="unknown: \\['NOGENE', 'OTHER'\\]"):
        view.query().score(sets)
    with pytest.warns(UserWarning, match="Left out|missing") as said:
        found = scored(view.query(), sets, min_features=2, unknown="skip")
    assert "Left out of the sets, as the atlas does not know them: 2 of 4 names, 'NOGENE', 'OTHER'." in str(
        said[0].message
    )
    assert "'b' of 80 cells (dataset 'one' measured 0 of its 0)" in str(said[1].message)
    np.testing.assert_array_equal(found["a"], scored(view.query(), {"a": ["GENE30", "GENE31"]}, min_features=2)["a"])
    assert found["b"].isna().all()


def test_files_of_sets(view: ra.AtlasView, tmp_path: Path) -> None:
    """Plain and gzipped GMT files give what the mapping gives."""
    text = "".join(f"{name}\thttp://sets\t" + "\t".join(genes) + "\n" for name, genes in SETS.items()) + "\n"
    (tmp_path / "sets.gmt").write_text(text, encoding="utf-8-sig")
    (tmp_path / "sets.gmt.gz").write_bytes(gzip.compress(text.encode()))
    assert read_gmt(tmp_path / "sets.gmt") == {name: tuple(genes) for name, genes in SETS.items()}
    for name in ("sets.gmt", "sets.gmt.gz"):
        with pytest.warns(UserWarning, match="'low' of 40 cells"):
            found = scored(view.query(), tmp_path / name)
        assert [*found] == [*SETS]


BROKEN = [
    ("Line 2 of x.gmt is no gene set", b"a\tb\tGENE1\na\tb\n", SourceError),
    ("Line 1 of x.gmt is no gene set", b"\tb\tGENE1\n", SourceError),
    ("a second set 'a'", b"a\tb\tGENE1\na\tb\tGENE2\n", SourceError),
    ("no GMT file", b"\xff\xfe\x00", SourceError),
    ("no GMT file", gzip.compress(b"a\tb\tGENE1\n")[:-9], SourceError),
    ("no GMT file", b"\x1f\x8b" + bytes(20), SourceError),
    ("no GMT file.*CRC", gzip.compress(b"a\tb\tGENE1\n")[:-8] + bytes(8), SourceError),
    ("larger than", b"a\tb\t" + b"G" * 2000, LimitError),
]


@pytest.mark.parametrize(("message", "data", "error"), BROKEN, ids=range(len(BROKEN)))
def test_broken_files_are_refused(
    tmp_path: Path, message: str, data: bytes, error: type[AtlasError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gene_sets, "MOST_BYTES", 1000)
    (tmp_path / "x.gmt").write_bytes(data)
    with pytest.raises(error, match=message):
        read_gmt(tmp_path / "x.gmt")


REFUSED: list[Any] = [
    ("got no set", {}, {}, QueryError),
    ("'a' has no features", {"a": []}, {}, QueryError),
    ("'a' is 'GENE1'; a set is a list", {"a": "GENE1"}, {}, ArgumentError),
    ("'a' is 5; a set is a list", {"a": 5}, {}, ArgumentError),
    ("'a' is \\[5\\]; a set is a list", {"a": [5]}, {}, ArgumentError),
    ("a set called 'uid'", {"uid": ["GENE1"]}, {}, ArgumentError),
    ("takes sets as a mapping of texts", {5: ["GENE1"]}, {}, ArgumentError),
    ("no numbers", {"a": {"GENE1": "x"}}, {}, ArgumentError),
    ("'GENE1' has the weight 0.0", {"a": {"GENE1": 0}}, {}, QueryError),
    ("'GENE1' has the weight nan", {"a": {"GENE1": np.nan}}, {}, QueryError),
    ("does not know; give names", {"a": {"GENE1": 2}}, {"method": "aucell"}, QueryError),
    ("takes method as 'mean', 'aucell' or 'ulm'", SETS, {"method": "gsea"}, ArgumentError),
    ("min_features=0", SETS, {"min_features": 0}, QueryError),
    ("top=0.1 belongs to method='aucell'", SETS, {"top": 0.1}, ArgumentError),
    ("normalize does not change ranks", SETS, {"method": "aucell", "normalize": True}, ArgumentError),
    ("top=1:", SETS, {"method": "aucell", "top": 1}, QueryError),
    ("top=1.5:", SETS, {"method": "aucell", "top": 1.5}, QueryError),
    ("takes top as", SETS, {"method": "aucell", "top": np.nan}, ArgumentError),
    ("layer 'nothing'", SETS, {"layer": "nothing"}, QueryError),
]


@pytest.mark.parametrize(("message", "sets", "options", "error"), REFUSED, ids=[row[0][:20] for row in REFUSED])
def test_what_cannot_be_scored_is_refused(
    view: ra.AtlasView, message: str, sets: Any, options: Any, error: type[AtlasError]
) -> None:
    """Each refusal says what is wrong."""
    with pytest.raises(error, match=message):
        view.query().score(sets, **options)


def test_what_is_no_file_is_refused(view: ra.AtlasView, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="read gene sets"):
        view.query().score(tmp_path / "nothing.gmt")
    with pytest.raises(StoreError, match="read gene sets"):
        view.query().score(tmp_path)


def test_several_layers_and_columns_without_names_are_refused(tmp_path: Path) -> None:
    file = make_file(1)
    file.layers["more"], file.obsm["X_pca"] = file.X.copy(), np.ones((N_CELLS, 2), np.float32)
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    atlas.add(file, "one", spaces={"obsm/X_pca": "embedding"}, progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    with pytest.raises(QueryError, match="score reads one layer"):
        query.layers("counts", "more").score(SETS)
    with pytest.raises(QueryError, match="score reads one feature space"):
        query.spaces("gene_expression", "embedding").score(SETS)
    with pytest.raises(QueryError, match="'embedding' have no names"):
        query.spaces("embedding").score(SETS)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
def test_scores_are_those_of_decoupler(tmp_path: Path, method: Any) -> None:
    """Numbers without ties, as decoupler breaks ties by chance."""
    decoupler = pytest.importorskip("decoupler")
    file = make_file(3, floats=True, n_genes=200)
    file.X = sp.csr_matrix(np.abs(file.X.toarray()))
    sets = {name: dict.fromkeys(genes, 1.0) for name, genes in SETS.items()} if method == "aucell" else WEIGHTED
    found = scored(view_of(tmp_path, {"one": file}).query(), sets, method)
    net = pd.DataFrame(
        [(n, g, w) for n, m in sets.items() for g, w in m.items()], columns=["source", "target", "weight"]
    )
    data = pd.DataFrame(file.X.toarray().astype(np.float64), file.obs_names, file.var_names)
    call = {"mean": decoupler.mt.waggr, "aucell": decoupler.mt.aucell, "ulm": decoupler.mt.ulm}[method]
    answer = call(data, net, tmin=5, **({"fun": "wmean", "times": 1} if method == "mean" else {}))
    wanted = answer[0] if isinstance(answer, tuple) else answer
    np.testing.assert_allclose(found, wanted[[*sets]], rtol=1e-6, atol=1e-9)
