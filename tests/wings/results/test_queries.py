"""Results of models in queries: beside the values in every output, and searched by vector or cell under any filter."""

import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest

from raggedatlas import AtlasView, Loader
from raggedatlas.errors import NotFoundError, QueryError
from support.atlases import Modelled, make_modelled, small_anndata, write_results

FORMS = {"z": "space", "v": "vector"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Modelled, AtlasView]:
    """An atlas with the same result in both forms, and a dataset that came later."""
    own = make_modelled(tmp_path_factory.mktemp("asked"))
    atlas = own.open()
    for name, form in FORMS.items():
        atlas.add(own.folder / "z", name, as_=form, progress=False)
    write_results(own.folder / "labels", own.uids[own.known], np.arange(2**60, 2**60 + 20))
    atlas.add(own.folder / "labels", "labels", progress=False)
    later = small_anndata(7, 4)
    later.obsm["X_pca"] = np.ones((4, 2))
    atlas.add(later, "later", organism="human", embeddings=["X_pca"], progress=False)
    return own, atlas.checkout(atlas.snapshot("after"))


@pytest.mark.parametrize("ending", ["memory", ".h5ad", ".zarr", "batches", "mudata", ".h5mu", "loader"])
def test_every_output_has_them_aligned(made: Any, tmp_path: Path, ending: str) -> None:
    """Each output has each result row by row beside the cells of its query, in the query's order, NaN where there is none."""
    own, view = made
    query = view.query().order_by("n_genes").with_results("z", "v")
    if ending in {"mudata", ".h5mu"}:
        pytest.importorskip("mudata")
    if ending == "memory":
        found = query.to_anndata()
    elif ending == "mudata":
        found = query.to_mudata()
        assert list(found.mod) == ["gene_expression", "pca"]
    elif ending == ".h5mu":
        import mudata

        with warnings.catch_warnings(action="ignore"):  # what mudata asks of pandas, and how it will pull columns
            found = mudata.read_h5mu(query.write(str(tmp_path / "x.h5mu")))
    elif ending in {".h5ad", ".zarr"}:
        read = ad.read_h5ad if ending == ".h5ad" else ad.read_zarr
        found = read(query.write(str(tmp_path / f"x{ending}")))
    elif ending == "batches":
        parts = list(query.batches(7))
        uids = [uid for part in parts for uid in part.obs.column("uid").to_pylist()]
        found = ad.AnnData(obs={"uid": uids}, obsm={n: np.concatenate([p.obsm[n] for p in parts]) for n in FORMS})
        found.obs_names = uids
    else:
        parts = list(Loader(view.query(), 6, seed=3, results=list(FORMS)))
        uids = np.concatenate([part.uids for part in parts]).astype(str)
        values = {n: np.concatenate([p.spaces[n].block.layers["values"] for p in parts]) for n in FORMS}
        found = ad.AnnData(obs={"uid": uids}, obsm=values)
        found.obs_names = uids
    assert found.n_obs == 29
    expected = own.expected().reindex(found.obs_names)
    for name in FORMS:
        np.testing.assert_array_equal(np.asarray(found.obsm[name]), expected)


@pytest.mark.parametrize("name", FORMS)
def test_cells_without_a_result_can_be_dropped(made: Any, name: str) -> None:
    """`missing="drop"` leaves out cells without the result in every output, counts included."""
    own, view = made
    query = view.query().with_results(name, missing="drop")
    assert query.count() == 20
    assert set(query.to_pandas().index) == set(own.uids[own.known])
    np.testing.assert_array_equal(query.to_anndata().obsm[name], own.expected().loc[query.to_pandas().index])


@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("by", ["vector", "uid"])
def test_the_nearest_of_those_that_filters_keep(made: Any, name: str, metric: str, by: str) -> None:
    """A search ranks exactly the cells that all filters keep, by distance; a cell is never its own neighbour."""
    own, view = made
    uid = own.uids[own.known][2]
    vector = own.expected().loc[uid].to_numpy(np.float64)
    asked: Any = vector if by == "vector" else uid
    query = view.query().where({"cell_type": ["B", "T"]}).search(asked, column=name, k=4, metric=metric)
    query = query.where("n_genes > 2")
    found = query.to_pandas()
    kept = (
        view.query()
        .where({"cell_type": ["B", "T"]})
        .where("n_genes > 2")
        .with_results(name, missing="drop")
        .to_anndata()
    )
    values = kept.obsm[name].astype(np.float64)
    if metric == "l2":
        distance = ((values - vector) ** 2).sum(axis=1)
    else:
        scale = np.linalg.norm(values, axis=1) * np.linalg.norm(vector) if metric == "cosine" else 1
        distance = 1 - values @ vector / scale
    others = np.flatnonzero((kept.obs_names != uid) | (by == "vector"))
    best = others[np.argsort(distance[others], kind="stable")[:4]]
    assert found.index.tolist() == kept.obs_names[best].tolist()
    np.testing.assert_allclose(found["search_distance"], distance[best], rtol=1e-12, atol=1e-12)


def test_results_are_spaces_that_are_read_by_name_only(made: Any) -> None:
    """A result is X where it is named, in its own cells; no output takes it unasked."""
    own, view = made
    adata = view.query().spaces("z").to_anndata()
    np.testing.assert_array_equal(adata.X, own.expected().loc[adata.obs_names])
    assert adata.n_obs == 20
    plain = view.query().to_anndata()
    assert not {*FORMS, "labels"} & {*plain.obsm, *plain.obs}
    assert "with_results z, v" in view.query().with_results("z", "v").explain()


@pytest.mark.parametrize("name", FORMS)
def test_cells_none_of_which_has_a_result(made: Any, name: str) -> None:
    """Cells of a dataset without results get rows of NaN, of the result's width; nothing of them is near to anything."""
    _, view = made
    query = view.query().where({"dataset": "later"})
    values = query.with_results(name).to_anndata().obsm[name]
    assert values.shape == (4, 5)
    assert np.isnan(values).all()
    assert query.with_results(name, missing="drop").to_anndata().obsm[name].shape == (0, 5)
    assert query.search([0.0] * 5, column=name).count() == 0


REFUSED = [
    (lambda q: q.with_results("nope"), NotFoundError, r"no result 'nope' at snapshot 2; it has \['z', 'v', 'labels'\]"),
    (lambda q: q.with_results("z", missing="zero"), QueryError, "'zero'"),
    (lambda q: q.with_results(), QueryError, "names"),
    (lambda q: q.with_results("labels").to_anndata(), QueryError, "missing='drop'"),
    (lambda q: q.obs("v"), QueryError, "with_results"),
    (lambda q: q.obs("z"), QueryError, "spaces"),
    (lambda q: q.search([1.0, 2.0], column="v").count(), QueryError, "2 numbers"),
    (lambda q: q.search("lung", column="z"), QueryError, "16 hex digits"),
    (lambda q: q.search("0" * 16, column="v").count(), QueryError, "no cell of this snapshot"),
    (lambda q: q.search("0" * 16, column="z").count(), QueryError, "no cell of this snapshot"),
]


@pytest.mark.parametrize(("ask", "error", "words"), REFUSED)
def test_what_cannot_be_answered_is_refused(made: Any, ask: Any, error: type[Exception], words: str) -> None:
    """Each refusal names the fault and the way out."""
    with pytest.raises(error, match=words):
        ask(made[1].query())


@pytest.mark.parametrize("name", FORMS)
def test_a_cell_without_a_vector_is_refused(made: Any, name: str) -> None:
    """A cell that has no result cannot be searched with, and says so."""
    own, view = made
    lacking = own.expected().index[own.expected().isna().any(axis=1)][0]
    with pytest.raises(QueryError, match="has no vector there"):
        view.query().search(lacking, column=name).count()


def test_whole_numbers_come_exactly(made: Any) -> None:
    """Whole numbers that no float holds come as they are where no cell lacks one."""
    own, view = made
    adata = view.query().with_results("labels", missing="drop").to_anndata()
    expected = dict(zip(own.uids[own.known], range(2**60, 2**60 + 20), strict=True))
    assert adata.obsm["labels"][:, 0].tolist() == [expected[uid] for uid in adata.obs_names]
    assert adata.obsm["labels"].dtype == np.int64


def test_a_snapshot_from_before_has_none(made: Any) -> None:
    """The snapshot from before the results opens, lists none, and refuses their names."""
    own, _ = made
    before = own.open().checkout("before")
    assert len(before.results()) == 0
    assert before.validate("deep") == []
    with pytest.raises(NotFoundError, match="at snapshot 1"):
        before.query().with_results("z")
    with pytest.raises(QueryError, match="no column 'v'"):
        before.query().search([0.0] * 5, column="v")
