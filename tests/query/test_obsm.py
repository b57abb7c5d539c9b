"""Laws of what a joined result takes of the elements beside, and of embeddings that can be asked for and searched."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse as sp

import raggedatlas as ra
from raggedatlas.atlas import AtlasView, RaggedAtlas
from raggedatlas.catalog.catalog import DATASETS
from raggedatlas.errors import CorruptError, NotFoundError, QueryError, SchemaError

# anndata 0.13 asks pandas 3 for options that pandas 3 deprecates.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The '(future.infer_string|mode.chained_assignment)' option:DeprecationWarning"
)


def part(seed: int, n: int, kinds: list[str], genes: str = "abcd") -> ad.AnnData:
    rng = np.random.default_rng(seed)
    counts = rng.poisson(1, (n, len(genes))).astype(np.float32)
    counts[0] = 0  # a cell without any entry has its row too
    obs = pd.DataFrame(
        {"kind": pd.Categorical(rng.choice(kinds, n), categories=kinds)}, index=[f"{seed}-{i}" for i in range(n)]
    )
    adata = ad.AnnData(sp.csr_matrix(counts), obs=obs, var=pd.DataFrame(index=list(genes)))
    adata.obsm["X_pca"] = rng.normal(size=(n, 3)).astype(np.float32)
    return adata


@pytest.fixture
def atlas(tmp_path: Path) -> RaggedAtlas:
    """Three datasets: `X_pca` in all, once as a space; `spots` in two; `wide` in two widths; colours that agree, or not."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    one, two, three = part(1, 5, ["B", "T"]), part(2, 4, ["T", "NK"], "bcde"), part(3, 6, ["B"])
    for adata in (one, three):
        adata.obsm["spots"] = np.arange(adata.n_obs * 2, dtype=np.int16).reshape(-1, 2)
        adata.uns["kind_colors"] = np.array(
            ["#0000ff", "#00ff00"][: len(adata.obs["kind"].cat.categories)], dtype=object
        )
    one.obsm["wide"], two.obsm["wide"] = np.ones((5, 2)), np.ones((4, 3))
    one.obsm["graph"] = sp.csr_matrix(np.eye(5))
    two.uns["kind_colors"] = np.array(["#00FF00", "#ff0000"], dtype=object)
    atlas.add(one, "one", progress=False)
    atlas.add(two, "two", embeddings=["X_pca"], progress=False)
    atlas.add(three, "three", progress=False)
    return atlas


def given(atlas: RaggedAtlas, obs: pd.DataFrame, key: str) -> np.ndarray:
    """Look every cell's row up in what its dataset gives back."""
    rows = []
    for dataset, name in zip(obs["dataset"], obs["cell_name"], strict=True):
        whole = atlas.dataset(dataset).to_anndata()
        rows.append(np.asarray(whole.obsm[key])[whole.obs_names.get_loc(name)])
    return np.array(rows)


@pytest.mark.nightly
def test_members_of_one_name_and_width_join(atlas: RaggedAtlas, tmp_path: Path) -> None:
    """In any order of cells each has its own row, NaN where its dataset has none; other widths and kinds stay; files say the same."""
    query = atlas.checkout(atlas.snapshot()).query().sample(11, seed=1).order_by("kind")
    found = query.to_anndata()
    assert set(found.obsm) == {"X_pca", "spots"}
    assert found.obsm["X_pca"].dtype == np.float32
    np.testing.assert_array_equal(found.obsm["X_pca"], given(atlas, found.obs, "X_pca"))
    lacking = (found.obs["dataset"] == "two").to_numpy()
    assert np.isnan(found.obsm["spots"][lacking]).all()
    np.testing.assert_array_equal(found.obsm["spots"][~lacking], given(atlas, found.obs[~lacking], "spots"))
    with warnings.catch_warnings(action="ignore"):
        read = ad.read_h5ad(query.write(str(tmp_path / "x.h5ad")))
    for key in found.obsm:
        np.testing.assert_array_equal(read.obsm[key], found.obsm[key])
    assert list(read.uns["kind_colors"]) == list(found.uns["kind_colors"])
    whole = query.where({"dataset": "one"}).to_anndata()
    assert whole.obsm["spots"].dtype == np.int16
    assert whole.obsm["wide"].shape[1] == 2
    assert "graph" in atlas.dataset("one").to_anndata().obsm


@pytest.mark.long
def test_cells_that_are_none_of_the_dataset_are_damage(atlas: RaggedAtlas) -> None:
    """A record that takes over another dataset's group, as damage may, is refused; IndexError came out of the look-up of its cells."""
    with pytest.raises(CorruptError, match="5 cells are not among those of the datasets"):
        rewritten(atlas, lambda rows: rows["one"].update(zarr_group=rows["three"]["zarr_group"])).query().to_anndata()


def rewritten(atlas: RaggedAtlas, change: Callable[[dict[str, Any]], object]) -> AtlasView:
    """Change the rows of the datasets' genes, by name, and return a view of them."""
    catalog, record = atlas._catalog, atlas.checkout(atlas.snapshot()).record
    rows = catalog.tables.read(DATASETS).to_pylist()
    change({row["name"]: row for row in rows if row["feature_space"] == "gene_expression"})
    table = pa.Table.from_pylist(rows, schema=catalog.tables.schema(DATASETS))
    assert catalog.tables.overwrite_if(DATASETS, table, catalog.tables.version(DATASETS))
    versions = record.table_versions | {DATASETS: catalog.tables.version(DATASETS)}
    return AtlasView(catalog.at(record.model_copy(update={"table_versions": versions})))


@pytest.mark.long
def test_records_from_before_pointers_were_named_are_read(atlas: RaggedAtlas) -> None:
    """A record whose column of pointers is null has that of its feature space: results, their `obsm` and `var` stay."""
    expected, var = atlas.checkout(atlas.snapshot()).query().to_anndata(), atlas.dataset("one").var()
    view = rewritten(atlas, lambda rows: [row.update(pointer=None) for row in rows.values()])
    found = view.query().to_anndata()
    assert (found.X != expected.X).nnz == 0
    assert {*found.obsm} == {"X_pca", "spots"}
    np.testing.assert_array_equal(found.obsm["X_pca"], expected.obsm["X_pca"])
    pd.testing.assert_frame_equal(view.dataset("one").var(), var)
    assert view.dataset("one").to_anndata().n_obs == 5


@pytest.mark.long
def test_members_of_a_modality_join_in_its_own_rows(tmp_path: Path) -> None:
    """obsm within a modality of MuData joins for the cells that have the modality, in memory and in a file; the others have none."""
    mudata = pytest.importorskip("mudata")
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    with warnings.catch_warnings(action="ignore"):
        for seed, name in ((1, "one"), (2, "two")):
            rna, prot = part(seed, 6, ["B", "T"]), part(seed, 6, ["B", "T"], "pq")[[4, 0, 2]].copy()
            prot.obsm = {"X_adt": rng_rows(seed), "only": np.ones((3, 1))} if seed == 1 else {"X_adt": rng_rows(seed)}
            whole = mudata.MuData({"rna": rna, "prot": prot})
            atlas.add(whole, name, progress=False)
        atlas.add(part(3, 2, ["B"]), "three", progress=False)
        query = atlas.checkout(atlas.snapshot()).query().order_by("cell_name")
        found = query.to_mudata()
        read = mudata.read_h5mu(query.write(str(tmp_path / "x.h5mu")))
    for result in (found, read):
        protein = result.mod["protein_abundance"]
        names = result.obs["cell_name"][result.obsmap["protein_abundance"].ravel() > 0].tolist()
        expected = {f"{seed}-{i}": row for seed in (1, 2) for i, row in zip((4, 0, 2), rng_rows(seed), strict=True)}
        assert names == sorted(expected)
        np.testing.assert_array_equal(protein.obsm["X_adt"], [expected[name] for name in names])
        assert np.isnan(protein.obsm["only"][[name.startswith("2") for name in names]]).all()
        assert (protein.obsm["only"][[name.startswith("1") for name in names]] == 1).all()
        gene = result.mod["gene_expression"]
        assert gene.obsm["X_pca"].shape == (14, 3)
        assert "X_adt" not in gene.obsm


def rng_rows(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(3, 2))


@pytest.mark.long
def test_colours_join_where_they_agree(atlas: RaggedAtlas) -> None:
    """Every category has the colour that the datasets give it; where two of a result differ there are none."""
    found = atlas.checkout(atlas.snapshot()).query().to_anndata()
    colors = dict(zip(found.obs["kind"].cat.categories, found.uns["kind_colors"], strict=True))
    assert {k: v.lower() for k, v in colors.items()} == {"B": "#0000ff", "T": "#00ff00", "NK": "#ff0000"}
    other = part(4, 3, ["B"])
    other.uns["kind_colors"] = np.array(["#123456"], dtype=object)
    atlas.add(other, "other", progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    assert "kind_colors" not in query.to_anndata().uns
    assert "kind_colors" in query.where({"dataset": ["one", "two"]}).to_anndata().uns
    assert list(atlas.dataset("other").to_anndata().uns["kind_colors"]) == ["#123456"]


@pytest.mark.long
def test_embeddings_are_spaces(atlas: RaggedAtlas) -> None:
    """A chosen member of `obsm` is a space that gives its vectors as X and finds a cell by its own vector; the file keeps it too."""
    view = atlas.checkout(atlas.snapshot())
    two = view.dataset("two").to_anndata()
    vectors = view.query().spaces("pca").to_anndata()
    np.testing.assert_array_equal(vectors.X, two.obsm["X_pca"])
    best = view.query().search(two.obsm["X_pca"][2], column="pca", k=1).to_pandas()
    assert best["cell_name"].tolist() == [two.obs_names[2]]


@pytest.mark.parametrize(
    ("choice", "error", "said"),
    [
        ({"embeddings": ["X_tsne"]}, NotFoundError, "X_tsne"),
        ({"embeddings": {"X_pca": "gene_expression"}}, SchemaError, "no embedding"),
        ({"extras": ["uns/absent"]}, NotFoundError, "uns/absent"),
    ],
)
def test_wrong_choices_are_refused(atlas: RaggedAtlas, choice: dict, error: type[Exception], said: str) -> None:
    """What is not there, or is something else, is told by name; nothing is added."""
    with pytest.raises(error, match=said):
        atlas.add(part(9, 3, ["B"]), "nine", progress=False, **choice)
    assert "nine" not in atlas.list_datasets()["name"].tolist()


@pytest.mark.long
def test_what_no_file_can_hold_is_refused_by_name(atlas: RaggedAtlas) -> None:
    """An object in `uns` that AnnData has no encoding for is refused with its key and the way out; extras leaves it out."""
    odd = part(9, 3, ["B"])
    odd.uns["odd"] = {"deep": object()}
    with pytest.raises(SchemaError, match="uns/odd/deep"):
        atlas.add(odd, "nine", progress=False)
    atlas.add(odd, "nine", progress=False, extras=["obsm"])
    assert set(atlas.dataset("nine").to_anndata().obsm) == {"X_pca"}
    assert "uns/odd" in atlas.dataset("nine").left_out


@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
def test_incomplete_vectors_are_no_neighbors(tmp_path: Path, metric: str) -> None:
    """A vector with NaN is never found, one of zeros not by its direction; a search for either is refused."""
    vectors = np.array([[1, 0], [np.nan, 1], [0, 0], [0, 1]], np.float32)
    file = ad.AnnData(np.ones((4, 1), np.float32), pd.DataFrame(index=list("abcd")), pd.DataFrame(index=["g"]))
    file.obsm["X_pca"] = vectors
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(file, "d", embeddings={"X_pca": "pca"}, progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    found = query.search([1.0, 0.1], column="pca", k=9, metric=metric).to_pandas()
    assert sorted(found["cell_name"]) == (["a", "d"] if metric == "cosine" else ["a", "c", "d"])
    assert found["search_distance"].notna().all()
    uid = query.to_pandas().reset_index().set_index("cell_name").iloc[:, 0]
    with pytest.raises(QueryError, match="not finite"):
        query.search(uid["b"], column="pca", metric=metric).count()
    if metric == "cosine":
        with pytest.raises(QueryError, match="no direction"):
            query.search(uid["c"], column="pca", metric=metric).to_pandas()


@pytest.fixture(scope="module")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> AtlasView:
    """Two datasets with categories that are text, ordered, numbers, and of no cell, some of them with colours."""
    atlas = RaggedAtlas.create(str(tmp_path_factory.mktemp("coloured") / "atlas"))
    for seed, n in ((1, 9), (2, 7)):
        adata = part(seed, n, ["B", "T", "NK", "none"])
        adata.obs["kind"] = pd.Categorical(np.resize(["B", "NK", None, "T"], n), ["T", "B", "NK", "none"])
        adata.obs["stage"] = pd.Categorical(np.resize(["late", "early"], n), ["early", "never", "late"], ordered=True)
        adata.obs["n"] = np.arange(n)
        adata.obs["batch"] = pd.Categorical(np.resize([3, 1, 2], n), [1, 2, 3, 4])
        adata.uns["kind_colors"] = np.array(["#0000ff", "#00ff00", "#ff0000", "#000000"], dtype=object)
        adata.uns["stage_colors"] = np.array(["#111111", "#222222", "#333333"], dtype=object)
        atlas.add(adata, f"d{seed}", obs="all", progress=False)
    return atlas.checkout(atlas.snapshot())


WAYS_OUT: dict[str, Any] = {
    "to_anndata": lambda query, folder: query.to_anndata(),
    "to_pandas": lambda query, folder: ad.AnnData(obs=query.to_pandas()),
    "lazy": lambda query, folder: query.lazy().to_memory(),
    "h5ad": lambda query, folder: ra.read(query.write(folder / "x.h5ad")),
    "zarr": lambda query, folder: ra.read(query.write(folder / "x.zarr")),
    "to_mudata": lambda query, folder: query.to_mudata().mod["gene_expression"],
    "h5mu": lambda query, folder: ra.read(query.write(folder / "x.h5mu"), modality="gene_expression"),
}


@pytest.mark.parametrize("way", WAYS_OUT)
@pytest.mark.parametrize("condition", ["n < 3", "kind = 'B' AND stage = 'late'", "kind IS NULL", "batch <> 2"])
def test_categories_of_a_query_are_those_of_a_subset(
    coloured: AtlasView, tmp_path: Path, way: str, condition: str
) -> None:
    """Each way out gives the categories and colours that anndata gives a subset of the same cells, in the order of the atlas."""
    if way in {"to_mudata", "h5mu"}:
        pytest.importorskip("mudata")
    if way == "lazy":
        pytest.importorskip("xarray")
    query = coloured.query().where(condition)
    found = WAYS_OUT[way](query, tmp_path)
    whole = coloured.query().to_anndata()
    with warnings.catch_warnings(action="ignore"):
        wanted = whole[query.to_pandas().index].copy()
    for name in ("kind", "stage", "batch", "dataset"):
        assert found.obs[name].cat.categories.tolist() == wanted.obs[name].cat.categories.tolist(), name
        assert found.obs[name].cat.ordered == wanted.obs[name].cat.ordered
        assert list(map(str, found.obs[name])) == list(map(str, wanted.obs[name]))
        colors = f"{name}_colors"
        if way != "to_pandas":
            assert list(found.uns.get(colors, [])) == list(wanted.uns.get(colors, [])), name
    groups = query.aggregate("stage").obs["stage"]
    assert groups.cat.categories.tolist() == wanted.obs["stage"].cat.categories.tolist()
    assert query.count("stage").index.tolist() == groups.tolist()
    whole_file = coloured.dataset("d1").to_anndata()
    assert whole_file.obs["kind"].cat.categories.tolist() == ["T", "B", "NK", "none"]
