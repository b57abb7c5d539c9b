"""Differential expression: equal to scanpy's rank_genes_groups on the same cells of real files, whatever the passes, and its refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

import raggedatlas as ra
from raggedatlas.errors import QueryError
from raggedatlas.query import compare

DATA = Path(__file__).parents[1] / "data"
FILTERED = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two files of real counts that share some genes, and one of logarithms."""
    atlas = ra.RaggedAtlas.create(str(tmp_path_factory.mktemp("compare") / "cells.atlas"))
    for name in ("pbmc_5k_protein_v3.h5ad", "lung_C144.h5"):
        atlas.add(DATA / name, organism="human", progress=False)
    atlas.add(DATA / "pbmc68k_reduced.h5ad", progress=False)
    return atlas.checkout(atlas.snapshot())


def from_scanpy(adata: ad.AnnData, *, method: str, tie_correct: bool = False, **options: Any) -> pd.DataFrame:
    """Rank the genes of the group "a" against "b" by scanpy, in the order of the genes."""
    scanpy = pytest.importorskip("scanpy")
    # the same values in double precision: scanpy squares single precision in single precision
    adata.X = adata.X.astype(np.float64)
    scanpy.tl.rank_genes_groups(
        adata, "side", groups=["a"], reference="b", method=method, tie_correct=tie_correct, pts=True, **options
    )
    return scanpy.get.rank_genes_groups_df(adata, "a").set_index("names")


def check_equal(found: pd.DataFrame, wanted: pd.DataFrame) -> None:
    """Compare two tables gene by gene; scanpy keeps scores and fold changes in single precision."""
    assert set(found["names"]) == set(wanted.index)
    assert (np.diff(found["scores"]) <= 0).all()
    wanted = wanted.loc[found["names"]]
    for name, exact in {"scores": 2e-6, "logfoldchanges": 2e-6, "pvals": 1e-7, "pvals_adj": 1e-7}.items():
        if name not in found:
            continue
        np.testing.assert_allclose(
            found[name].to_numpy(), wanted[name].to_numpy(), rtol=exact, atol=1e-12, err_msg=name
        )
    # scanpy gives the fractions of the reference only where it is the rest
    for name in {"pct_nz_group", "pct_nz_reference"} & set(wanted):
        np.testing.assert_allclose(found[name].to_numpy(), wanted[name].to_numpy(), rtol=1e-9)


@FILTERED
@pytest.mark.long  # scanpy compiles
@pytest.mark.parametrize(
    ("method", "tie_correct"),
    [("t-test", False), ("wilcoxon", False), ("wilcoxon", True)],
    ids=["t", "wilcoxon", "ties"],
)
def test_counts_are_compared_as_scanpy_does(
    view: Any, method: Any, tie_correct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normalized counts of a real file, most of them ties at zero: scores, fold changes, p-values and fractions equal scanpy's, in one pass and in many."""
    scanpy = pytest.importorskip("scanpy")
    query = view.query().where({"dataset": "pbmc_5k_protein_v3"})
    adata = query.to_anndata()
    middle = float(adata.obs["n_genes"].median())
    adata.obs["side"] = pd.Categorical(np.where(adata.obs["n_genes"] > middle, "a", "b"))
    asked = {"method": method, "tie_correct": tie_correct}
    found = query.compare(f"n_genes > {middle}", f"n_genes <= {middle}", **asked)
    scanpy.pp.normalize_total(adata, target_sum=1e4)
    scanpy.pp.log1p(adata)
    wanted = from_scanpy(adata, **asked)
    check_equal(found, wanted)
    assert found.attrs["compare"]["values"] == "log1p of counts per 10,000"
    monkeypatch.setattr(compare, "ENTRIES", 200_000)
    uids = adata.obs_names[adata.obs["side"] == "a"]
    again = query.compare(list(uids), **asked)
    pd.testing.assert_frame_equal(again, found)


@FILTERED
@pytest.mark.long  # scanpy compiles
@pytest.mark.parametrize("method", ["t-test", "wilcoxon"])
def test_logarithms_are_compared_as_they_are(view: Any, method: Any) -> None:
    """A layer of floats with negative values is not normalized; types of cells of a real file."""
    query = view.query().where({"dataset": "pbmc68k_reduced"}).layers("X")
    adata = query.to_anndata()
    kinds = adata.obs["bulk_labels"].astype(str)
    adata = adata[kinds.isin(["Dendritic", "CD14+ Monocyte"]).to_numpy()].copy()
    adata.obs["side"] = pd.Categorical(np.where(adata.obs["bulk_labels"].astype(str) == "Dendritic", "a", "b"))
    adata.X = adata.X.tocsr()
    assert adata.X.min() < 0
    found = query.compare({"bulk_labels": "Dendritic"}, query.where({"bulk_labels": "CD14+ Monocyte"}), method=method)
    # of constant values scanpy's variance is a rounding error, by chance negative, where it gives no score
    varies = np.all([np.ptp(adata[adata.obs["side"] == side].X.toarray(), axis=0) > 0 for side in "ab"], axis=0)
    wanted = from_scanpy(adata, method=method)
    found = found[found["names"].isin(adata.var_names[varies])].drop(columns="pvals_adj")
    check_equal(found, wanted.loc[adata.var_names[varies]])
    assert found.attrs["compare"] == {
        "method": method,
        "values": "X",
        "n_group": 103,
        "n_reference": 51,
        "note": compare.NO_REPLICATES,
    }


@FILTERED
@pytest.mark.long  # scanpy compiles
def test_only_cells_that_measured_a_gene_count(view: Any) -> None:
    """Over two files with different genes: a gene that one lacks is compared among the cells of the other, and the sum of a cell is over all its genes."""
    scanpy = pytest.importorskip("scanpy")
    names = ["pbmc_5k_protein_v3", "lung_C144"]
    query = view.query().where({"dataset": names})
    uids = np.array(query.to_pandas().index)
    group = set(uids[::3])
    adata = query.to_anndata()
    measured = adata.varm["measured"]
    scanpy.pp.normalize_total(adata, target_sum=1e4)
    scanpy.pp.log1p(adata)
    adata.obs["side"] = pd.Categorical(["a" if uid in group else "b" for uid in adata.obs_names])
    found = query.compare(sorted(group), method="wilcoxon").set_index("names")
    for layout in measured.columns:
        alone = measured[layout] & (measured.sum(axis=1) == 1)
        own = adata[(adata.obs["layout_uid"] == layout).to_numpy(), alone.to_numpy()].copy()
        wanted = from_scanpy(own, method="wilcoxon")
        np.testing.assert_allclose(found.loc[wanted.index, "scores"], wanted["scores"], rtol=2e-6, atol=1e-12)
    shared = query.join("intersection").compare(sorted(group), method="wilcoxon")
    wanted = from_scanpy(adata[:, measured.all(axis=1).to_numpy()].copy(), method="wilcoxon")
    check_equal(shared, wanted)
    few = query.features("LYZ", "CD79A").compare(sorted(group), method="wilcoxon").set_index("symbol")
    assert sorted(few.index) == ["CD79A", "LYZ"]
    assert few.loc["LYZ", "scores"] == found[found["symbol"] == "LYZ"]["scores"].iloc[0]


def test_sets_are_among_the_cells_of_the_query(tmp_path: Path) -> None:
    """A condition chooses among what a sample or limit chose, as the uids do; cells that lack the space take no part."""
    rng = np.random.default_rng(0)
    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    obs = pd.DataFrame({"kind": [*"ab"] * 20}, index=[f"c{i}" for i in range(40)])
    genes = pd.DataFrame(index=[f"GENE{i}" for i in range(5)])
    atlas.add(ad.AnnData(rng.poisson(3, (40, 5)).astype(np.int32), obs, genes), "genes")
    proteins = pd.DataFrame(index=["CD3", "CD4"])
    file = ad.AnnData(np.ones((40, 2), np.int32), obs, proteins)
    atlas.add(file, "proteins", spaces={"X": "protein_abundance"})
    query = atlas.checkout(atlas.snapshot()).query()
    for some in (
        query,
        query.sample(30, seed=1),
        query.limit(15),
        query.order_by("cell_name", descending=True).limit(50),
    ):
        cells = some.to_pandas()
        own, others = (list(cells.index[(cells["kind"] == kind) & (cells["dataset"] == "genes")]) for kind in "ab")
        expected = some.compare(own, others)
        pd.testing.assert_frame_equal(some.compare({"kind": "a"}), expected)
        pd.testing.assert_frame_equal(some.compare("kind = 'a'", ra.col("kind") == "b"), expected)
        assert some.compare({"kind": "a"}).attrs["compare"]["n_group"] == len(own)
    pd.testing.assert_frame_equal(query.compare(query.where(kind="a")), query.compare({"kind": "a"}))
    with pytest.raises(QueryError, match="first set of compare\\(\\) has 0 cells"):
        query.compare({"dataset": "proteins"})


def test_values_that_are_not_read_need_no_type_for_nan(tmp_path: Path) -> None:
    """With missing="nan", a comparison of some features does not ask for a type that would hold NaN."""
    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    for name, first in (("one", 0), ("two", 2)):
        counts = np.arange(20, dtype=np.int64).reshape(5, 4)
        counts[0, 0] = 2**60
        genes = pd.DataFrame(index=[f"GENE{i + first}" for i in range(4)])
        atlas.add(ad.AnnData(counts, pd.DataFrame(index=[f"{name}{i}" for i in range(5)]), genes), name)
    query = atlas.checkout(atlas.snapshot()).query().features("GENE0", "GENE3")
    expected = query.compare({"dataset": "one"})
    pd.testing.assert_frame_equal(query.missing("nan").compare({"dataset": "one"}), expected)


def test_ranks_of_few_values_are_those_of_scipy() -> None:
    """Zeros, ties and negative values in any mixture: the rank sum and the factor for ties are those of scipy."""
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for _ in range(60):
        n = rng.integers(2, 9, 2)
        values = rng.integers(-2, 4, (int(n.sum()), 5)).astype(np.float32)
        codes = np.repeat([0, 1], n).astype(np.int8)
        mixed = rng.permutation(len(codes))
        values, codes = values[mixed], codes[mixed]
        block = compare.CsrBlock(*_csr_parts(values), 5)

        def blocks(block: Any = block) -> Iterator[tuple[Any, Any]]:
            yield np.arange(block.n_rows), block

        options = compare.CompareOptions("wilcoxon", normalize=False, tie_correct=True)
        measured = np.repeat(n[:, None], 5, axis=1)
        found = compare.rank_features(blocks, codes, measured, values.size, options)
        for i in range(5):
            ranks = stats.rankdata(values[:, i])
            deviation = np.sqrt(stats.tiecorrect(ranks) * n[0] * n[1] * (n.sum() + 1) / 12)
            over = ranks[codes == 0].sum() - n[0] * (n.sum() + 1) / 2
            assert found.scores[i] == pytest.approx(over / deviation if deviation else 0.0)


def _csr_parts(values: Any) -> Any:
    matrix = sp.csr_array(values)
    return matrix.indptr, matrix.indices, {"X": matrix.data}


REFUSED = [
    ("in both sets", lambda q, uids: q.compare(uids[:5], uids[4:9])),
    ("no cells of this query, the first is 'stranger'", lambda q, uids: q.compare(["stranger"], uids)),
    ("first set of compare\\(\\) has 1 cells", lambda q, uids: q.compare(uids[:1])),
    ("second set of compare\\(\\) has 0 cells", lambda q, uids: q.compare(uids)),
    ("takes method as 't-test' or 'wilcoxon'", lambda q, uids: q.compare(uids[:5], method="logreg")),
    ("a t-test has no ranks", lambda q, uids: q.compare(uids[:5], tie_correct=True)),
    ("reads one layer", lambda q, uids: q.layers("X", "counts").compare(uids[:5])),
    ("no column 'nothing'", lambda q, uids: q.compare({"nothing": 1})),
]


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=[row[0][:16] for row in REFUSED])
def test_what_cannot_be_compared_is_refused(view: Any, message: str, call: Any) -> None:
    """Each refusal says what is wrong."""
    query = view.query().where({"dataset": "pbmc_5k_protein_v3"})
    with pytest.raises(QueryError, match=message):
        call(query, list(query.to_pandas().index))
