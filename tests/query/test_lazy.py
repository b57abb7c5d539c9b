"""`lazy` equals the result in memory, reads chunk by chunk, and keeps within a limit of memory that the result exceeds."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scanpy as sc
import scipy.sparse as sp
import zarr
from anndata.tests.helpers import assert_equal

from raggedatlas.errors import MissingExtraError, QueryError
from raggedatlas.query.lazy import to_lazy
from raggedatlas.query.plan import plan_elements, plan_read
from raggedatlas.query.query import Query
from raggedatlas.query.read import PartReader

ASKED = {
    "all": lambda q: q,
    "layers": lambda q: q.layers("counts", "scaled", "lognorm"),
    "features": lambda q: q.features("LYZ", "MS4A1"),
    "intersection": lambda q: q.join("intersection"),
    "nan": lambda q: q.missing("nan"),
    "order": lambda q: q.order_by("score").limit(20),
    "sample": lambda q: q.sample(13, seed=3),
    "none": lambda q: q.limit(0),
    "dense": lambda q: q.spaces("embedding"),
    "columns": lambda q: q.obs("donor", "percent.mt"),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("chunk_bytes", [1, 300, 2**30])
def test_it_equals_the_result_in_memory(query: Query, asked: str, chunk_bytes: int) -> None:
    asks = ASKED[asked](query)
    lazy = asks.lazy(chunk_bytes=chunk_bytes)
    assert type(lazy.X).__module__.startswith("dask.")
    found, expected = lazy.to_memory(), asks.to_anndata()
    if asked == "nan":  # anndata's comparison of sparse matrices takes NaN for unequal
        np.testing.assert_array_equal(found.X.toarray(), expected.X.toarray(), strict=True)
        del found.X, expected.X
    assert_equal(found, expected, exact=True)


@pytest.mark.parametrize("asked", ["all", "order", "columns", "dense"])
def test_columns_of_obs_read_on_access_have_the_same_values(query: Query, asked: str) -> None:
    asks = ASKED[asked](query)
    lazy = asks.lazy(lazy_obs=True)
    assert type(lazy.obs).__name__ == "Dataset2D"
    found, expected = lazy.to_memory().obs, asks.to_anndata().obs
    assert list(found.columns) == list(expected.columns)
    assert_equal(found, expected)


def test_columns_of_obs_announce_the_dtype_that_they_have(query: Query) -> None:
    """Whole numbers of which some are missing are announced as the nullable type that they are read as."""
    for asks in (query, query.where(dataset="first")):
        announced, expected = asks.lazy(lazy_obs=True).obs, asks.to_anndata().obs
        assert announced["n"].dtype == expected["n"].dtype
    assert announced["n"].dtype == np.int64


def test_a_wide_obs_is_read_on_access(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raggedatlas.query.lazy.WIDE_OBS", 5)
    assert type(query.lazy().obs).__name__ == "Dataset2D"
    assert type(query.obs("donor").lazy().obs).__name__ == "DataFrame"
    assert type(query.lazy(lazy_obs=False).obs).__name__ == "DataFrame"


@pytest.mark.parametrize("chunk_bytes", [1, 50, 137, 300, 700, 1500, 4000])
def test_chunks_are_cut_by_bytes_and_where_datasets_end(small: Any, chunk_bytes: int) -> None:
    plan = plan_elements(plan_read(small.query.spec, small.catalog), small.catalog)
    lazy = to_lazy(plan, chunk_bytes, lazy_obs=False)
    rows, columns = lazy.X.chunks
    assert sum(rows) == plan.n_cells
    assert columns == (lazy.n_vars,)
    sizes = plan.single().row_bytes()
    stops = np.cumsum(rows)
    datasets = {23, 40}
    for start, stop in zip([0, *stops], stops, strict=False):
        assert stop == start + 1 or sizes[start:stop].sum() <= chunk_bytes
        # A dataset that ends in the second half of a chunk ends it, but for the last chunk.
        inside = [end for end in datasets if start < end < stop < plan.n_cells]
        assert all(sizes[start:end].sum() <= chunk_bytes // 2 for end in inside)


def test_halves_are_widened_as_in_memory(tmp_path: Path) -> None:
    """SciPy computes nothing with sparse float16."""
    import raggedatlas as ra

    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    values = np.random.default_rng(0).random((9, 4)).astype(np.float16)
    atlas.add(ad.AnnData(values, var={"gene": list("abcd")}), progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    lazy, expected = query.lazy(chunk_bytes=1), query.to_anndata()
    assert lazy.X.dtype == expected.X.dtype == np.float32
    assert_equal(lazy.to_memory(), expected, exact=True)


REDUCED: dict[str, Any] = {
    "sum of cells": lambda x: x.sum(axis=1),
    "sum": lambda x: x.sum(),
    "sum of features, kept": lambda x: x.sum(axis=0, keepdims=True),
    "numpy's": lambda x: np.sum(x, axis=0),
    "mean of features": lambda x: x.mean(axis=0),
    "mean": lambda x: x.mean(),
    "largest": lambda x: x.max(axis=0),
    "smallest": lambda x: x.min(),
    "cells with it": lambda x: (x > 0).sum(axis=0),
    "doubled": lambda x: (x * 2).sum(axis=1),
    "chosen": lambda x: x[3:20, [0, 2, 1]].sum(axis=0),
}


@pytest.mark.parametrize("reduced", REDUCED)
@pytest.mark.parametrize("chunk_bytes", [300, 2**30])
def test_sums_and_means_are_those_of_arrays(query: Query, reduced: str, chunk_bytes: int) -> None:
    lazy, dense = query.lazy(chunk_bytes=chunk_bytes).X, query.to_anndata().X.toarray()
    expected = REDUCED[reduced](dense)
    for x in (lazy, lazy.rechunk((7, lazy.shape[1])), lazy.rechunk((lazy.shape[0], 2))):
        found = REDUCED[reduced](x).compute()
        assert np.shape(found) == np.shape(expected)
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:zarr v3 autosharding")
@pytest.mark.parametrize("chunk_bytes", [300, 2**30])
def test_anndata_writes_it(query: Query, tmp_path: Path, chunk_bytes: int) -> None:
    """Also what was computed from it."""
    lazy, expected = query.lazy(chunk_bytes=chunk_bytes), query.to_anndata().X.toarray()
    made = {"lazy": lazy, "in memory": lazy.to_memory(), "rows": ad.AnnData(lazy.X[2:9].compute())}
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    for name, one in made.items():
        one.write_h5ad(tmp_path / f"{name}.h5ad")
        ad.io.write_elem(group, name, one.X)
        for back in (ad.read_h5ad(tmp_path / f"{name}.h5ad").X, ad.io.read_elem(group[name])):
            np.testing.assert_array_equal(back.toarray(), expected[2:9] if name == "rows" else expected)


def test_parts_of_it_are_computed_alone(query: Query) -> None:
    lazy, whole = query.lazy(chunk_bytes=300), query.to_anndata()
    chosen = whole.obs["dataset"] == "second"
    assert (lazy[chosen.to_numpy()].X.compute() != whole[chosen].X).nnz == 0
    assert (lazy[:, ["LYZ", "CD8A"]].X.compute() != whole[:, ["LYZ", "CD8A"]].X).nnz == 0


def test_it_can_be_pickled_and_holds_the_plan_once(query: Query) -> None:
    one, many = (query.lazy(chunk_bytes=n) for n in (2**30, 1))
    for lazy in (many, query.lazy(lazy_obs=True)):
        assert_equal(pickle.loads(pickle.dumps(lazy)).to_memory(), lazy.to_memory())
    keys = [k for k in many.X.__dask_graph__() if str(k).startswith("raggedatlas-plan")]
    assert len(keys) == 1
    plan = len(pickle.dumps(one.X))
    assert len(pickle.dumps(many.X)) < plan + 1000 * many.X.npartitions


def test_readers_are_made_where_a_chunk_is_read(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the call, nor where the graph is only passed on, as a scheduler does: of many datasets they take gigabytes."""
    made = list[PartReader]()

    class Counted(PartReader):
        def __init__(self, *arguments: Any, **choices: Any) -> None:
            super().__init__(*arguments, **choices)
            made.append(self)

    monkeypatch.setattr("raggedatlas.query.lazy.PartReader", Counted)
    lazy = pickle.loads(pickle.dumps(query.lazy(chunk_bytes=300)))
    assert not made
    lazy.X[:1].compute()
    assert len(made) == 1


def _analyse(adata: ad.AnnData) -> None:
    sc.pp.normalize_total(adata, target_sum=1e3)
    sc.pp.log1p(adata)
    sc.pp.highly_variable_genes(adata, n_top_genes=200)
    sc.pp.pca(adata, n_comps=5, svd_solver="covariance_eigh")
    # Up to scanpy 1.12, scores of genes in dask arrays need dense chunks.
    in_memory = isinstance(adata.X, sp.csr_matrix)
    empty = np.empty((0, 0), adata.X.dtype)
    adata.layers["dense"] = adata.X if in_memory else adata.X.map_blocks(lambda x: x.toarray(), meta=empty)
    sc.tl.score_genes(adata, list(adata.var_names[:20]), ctrl_size=10, layer="dense")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Query:
    """Two CITE-seq files in an atlas."""
    import raggedatlas as ra

    uri = str(tmp_path_factory.mktemp("lazy") / "atlas")
    atlas = ra.RaggedAtlas.create(uri)
    data = Path(__file__).parents[1] / "data"
    atlas.add([data / "pbmc_5k_protein_v3.h5ad", data / "pbmc_10k_protein_v3.h5ad"], progress=False)
    atlas.snapshot()
    return ra.RaggedAtlas.checkout_latest(uri).query()


def _equal_analyses(found: ad.AnnData, expected: ad.AnnData) -> None:
    assert expected.var["highly_variable"].sum() == 200
    np.testing.assert_array_equal(found.var["highly_variable"], expected.var["highly_variable"])
    np.testing.assert_allclose(found.obs["score"], expected.obs["score"], atol=1e-5)
    signs = np.sign((found.obsm["X_pca"] * expected.obsm["X_pca"]).sum(axis=0))
    np.testing.assert_allclose(found.obsm["X_pca"] * signs, expected.obsm["X_pca"], atol=1e-3)


@pytest.mark.nightly
def test_functions_of_scanpy_give_what_they_give_in_memory(real: Query) -> None:
    lazy, expected = real.lazy(chunk_bytes=200_000), real.to_anndata()
    assert lazy.X.npartitions > 4
    for adata in (lazy, expected):
        _analyse(adata)
    _equal_analyses(lazy.to_memory(), expected)


@pytest.mark.nightly
def test_workers_of_a_cluster_compute_it(real: Query) -> None:
    from distributed import Client, LocalCluster

    expected = real.to_anndata()
    _analyse(expected)
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster):
        lazy = real.lazy(chunk_bytes=200_000)
        _analyse(lazy)
        found = lazy.to_memory()
    _equal_analyses(found, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("ending", [".zarr", ".h5ad"])
def test_what_it_exports_is_read_lazily_by_anndata(real: Query, tmp_path: Path, ending: str) -> None:
    from anndata.experimental import read_lazy

    found, expected = read_lazy(real.write(tmp_path / f"result{ending}")).to_memory(), real.to_anndata()
    for adata in (found, expected):  # read_lazy has its own dtypes of text
        adata.obs, adata.var = adata.obs.astype(object), adata.var.astype(object)
        adata.obs_names, adata.var_names = list(adata.obs_names), list(adata.var_names)
        adata.obs_names.name = adata.var_names.name = None
    assert_equal(found, expected)


LIMITED = """
import resource, sys
import scanpy as sc
import raggedatlas as ra

query = ra.RaggedAtlas.checkout_latest(sys.argv[1]).query()

def analyse(adata):
    sc.pp.normalize_total(adata)
    sc.pp.log1p(adata)
    sc.pp.highly_variable_genes(adata, n_top_genes=20)
    return int(adata.var["highly_variable"].sum())

assert analyse(query.limit(100).lazy()) == 20  # what imports and thread pools take, they have taken
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 2**27, used + 2**27))
print(analyse(query.lazy(chunk_bytes=2**21)))
try:
    query.to_anndata()
except MemoryError:
    print("too large for memory")
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="counts private memory")
def test_data_larger_than_the_memory_allowed(tmp_path: Path) -> None:
    import raggedatlas as ra

    rng = np.random.default_rng(0)
    n, genes = 40_000, 1_000
    counts = np.tile(rng.integers(1, 9, (400, genes), dtype=np.uint8), (n // 400, 1))
    indptr, indices = np.arange(n + 1, dtype=np.int64) * genes, np.tile(np.arange(genes, dtype=np.int32), n)
    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    atlas.add(ad.AnnData(sp.csr_matrix((counts.ravel(), indices, indptr), (n, genes))), progress=False)
    atlas.snapshot()
    command = [sys.executable, "-W", "ignore", "-c", LIMITED, str(tmp_path / "atlas")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["20", "too large for memory"], done.stderr


def test_refusals(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QueryError, match="AnnData holds one feature space"):
        query.spaces("gene_expression", "embedding").lazy()
    with pytest.raises(QueryError, match="chunk_bytes=0; give at least 1"):
        query.lazy(chunk_bytes=0)
    monkeypatch.setitem(sys.modules, "dask.array", None)
    with pytest.raises(MissingExtraError, match=r"raggedatlas\[dask\]"):
        query.lazy()
