"""AnnData through a CXG and back: equal, up to the conversions that `docs/reference/cxg.md` lists."""

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.formats.copying import copy
from raggedatlas.formats.cxg import validate
from raggedatlas.formats.registry import open_sink
from raggedatlas.testing.anndata_strategies import FORMS, KINDS, in_form, make_obs, make_values
from raggedatlas.testing.cxg_files import FORMS as CXG_FORMS
from raggedatlas.testing.cxg_files import write_cxg
from raggedatlas.testing.hypothesis_profile import examples
from reading import dense, read_source


@st.composite
def holdable(draw: st.DrawFn) -> ad.AnnData:
    """Draw an AnnData of types that a CXG can hold: any form of X, every kind of column, embeddings, uns."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, m = draw(st.integers(1, 30)), draw(st.integers(1, 9))
    dtype = draw(st.sampled_from(["bool", "uint8", "int32", "int64", "float16", "float32", "float64"]))
    values = make_values(draw(st.sampled_from(KINDS)), dtype, (n, m), rng)
    obs = make_obs(n, rng).drop(columns="big")
    obs["all"] = True
    obs["wide"] = rng.integers(-(2**31), 2**31, n)
    obs["__private"] = rng.integers(0, 2, n)
    obs["index"] = rng.random(n)
    obs["truth"] = pd.Categorical(rng.choice(["False", "True"], n), categories=["False", "True"])
    names = [f"g{i}" for i in range(m)]
    var = pd.DataFrame({"n": rng.integers(0, 9, m), "chrom": pd.Categorical(["x"] * m, ["y", "x"])}, index=names)
    if draw(st.booleans()):
        var["feature_name"] = [f"gene {i}" for i in range(m)]
    made = ad.AnnData(in_form(values, draw(st.sampled_from(FORMS)), rng), obs=obs, var=var)
    made.obsm["X_umap"] = rng.normal(size=(n, 2)).astype(draw(st.sampled_from(["float32", "float64"])))
    made.obsm["spatial"] = rng.integers(0, 2000, (n, draw(st.integers(2, 4))))
    made.uns["type_colors"] = np.array(["red", "#00FF00", "#0000ff", "#abc"])
    made.uns["title"] = "A title"
    made.uns["tissue"] = {"lib": {"scale": np.array([1.5, np.nan]), "image": rng.integers(0, 255, (2, 3, 3))}}
    made.uns["note"] = {"text": "é", "number": 3, "truth": False, "nothing": None}
    return made


def as_a_cxg_holds(column: "pd.Series[Any]", profile: str) -> Any:
    """Apply the documented conversions to one column of `obs`."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        kind = column.cat.categories.dtype
        if kind.kind in "iuf":
            return column.cat.remove_unused_categories().astype(float).tolist()
        known = [str(name) for name in column.cat.categories]
        values = [str(v) if isinstance(v, str) else None for v in column]
        if profile == "0.2.0" and None in values:
            known, values = [*known, "nan"], [v if v is not None else "nan" for v in values]
        return known, values
    if column.dtype == "boolean" and column.isna().any():
        values = [None if pd.isna(v) else str(v) for v in column]
        lost = profile == "0.2.0"
        return ["False", "True", *(["nan"] if lost else [])], ["nan" if v is None and lost else v for v in values]
    if column.dtype.kind == "b" or column.dtype == "boolean":
        return column.astype(bool).tolist()
    if column.dtype.kind in "iufm":
        return column.to_numpy(np.float64, na_value=np.nan).astype(np.float32).astype(np.float64).tolist()
    return ["nan" if pd.isna(v) else str(v) for v in column]


def as_read(column: "pd.Series[Any]") -> Any:
    if isinstance(column.dtype, pd.CategoricalDtype):
        if column.cat.categories.dtype.kind in "iuf":
            return column.astype(float).tolist()
        return list(column.cat.categories), [v if isinstance(v, str) else None for v in column]
    if column.dtype.kind in "iuf":
        return column.astype(np.float32).astype(np.float64).tolist()
    return column.tolist()


@pytest.mark.nightly
@given(holdable(), st.sampled_from(["0.3.0", "0.2.0"]), st.sampled_from(["sparse", "dense", "auto"]))
@examples(8)
def test_what_a_cxg_holds_comes_back(given: ad.AnnData, profile: str, layout: str) -> None:
    """No rule is broken, and names, order, values, categories and their order, colours, embeddings and metadata are what they were, up to documented types."""
    with TemporaryDirectory() as folder:
        made = copy(given, open_sink(f"{folder}/a.cxg", profile=profile, layout=layout))
        assert {p.rule for p in validate(made, "full") if p.level != "practice"} <= {"C06"}
        back = read_source(made)
    # Entries of one place count as their sum, which truth values and small integers could not hold.
    np.testing.assert_array_equal(dense(back.X), dense(given.X.astype(np.float64)).astype(np.float32))
    assert list(back.obs_names) == list(given.obs_names)
    assert list(back.var_names) == list(given.var_names)
    renamed = {"__private": "_private", "index": "index_"}
    assert list(back.obs.columns) == [renamed.get(name, name) for name in given.obs.columns]
    for name in given.obs.columns:
        np.testing.assert_equal(
            as_read(back.obs[renamed.get(name, name)]), as_a_cxg_holds(given.obs[name], profile), err_msg=name
        )
    assert list(back.var["chrom"].cat.categories) == ["y", "x"]
    assert back.var["chrom"].tolist() == given.var["chrom"].tolist()
    assert back.var["n"].tolist() == given.var["n"].tolist()
    assert back.obsm["X_umap"].dtype == given.obsm["X_umap"].dtype
    np.testing.assert_array_equal(back.obsm["X_umap"], given.obsm["X_umap"])
    np.testing.assert_array_equal(back.obsm["spatial"], given.obsm["spatial"])
    assert list(back.uns["type_colors"][:4]) == ["#ff0000", "#00ff00", "#0000ff", "#aabbcc"]
    assert back.uns["title"] == "A title"
    np.testing.assert_equal(back.uns["tissue"], given.uns["tissue"])
    assert back.uns["note"] == given.uns["note"]
    if "feature_name" in given.var:
        assert back.uns["cxg"] == {"var_index": "feature_name"}


@pytest.mark.parametrize("profile", ["0.3.0", "0.2.0"])
def test_a_second_trip_changes_nothing(tmp_path: Path, profile: str) -> None:
    """What came back from a CXG once is written again without any loss, and comes back equal to the last type."""
    rng = np.random.default_rng(1)
    obs = make_obs(20, rng).drop(columns=["big"])
    given = ad.AnnData(sp.random(20, 9, 0.2, "csr", rng=rng), obs=obs, obsm={"X_umap": rng.normal(size=(20, 2))})
    first = read_source(copy(given, open_sink(tmp_path / "a.cxg", profile=profile)))
    sink = open_sink(tmp_path / "b.cxg", profile=profile, strict=True)
    second = read_source(copy(first, sink))
    assert getattr(sink, "losses", None) == ()
    pd.testing.assert_frame_equal(second.obs, first.obs)
    pd.testing.assert_frame_equal(second.var, first.var)
    assert (second.X != first.X).nnz == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "ending"),
    # What lies in the middle has the matrix of "split" sparse, and that of all others dense.
    [*((form, "h5ad") for form in CXG_FORMS), *itertools.product(("split", "sparse"), ("zarr", "h5mu", "cxg"))],
)
def test_any_cxg_goes_through_any_format(tmp_path: Path, form: Any, ending: str) -> None:
    """A CXG of any version and layout becomes h5ad, Zarr, h5mu or CXG, and a CXG again, with all that it held."""
    given = write_cxg(tmp_path / "given.cxg", form)
    there = copy(given, open_sink(tmp_path / f"there.{ending}"))
    back = read_source(copy(there, open_sink(tmp_path / "back.cxg")))
    known = read_source(given)
    np.testing.assert_array_equal(dense(back.X), dense(known.X))
    assert list(back.obs_names) == list(known.obs_names)
    assert list(back.obs.columns) == list(known.obs.columns)
    assert [v if isinstance(v, str) else None for v in back.obs["kind"]] == [
        v if isinstance(v, str) else None for v in known.obs["kind"]
    ]
    assert sorted(back.obsm) == sorted(known.obsm)
    np.testing.assert_equal(
        {k: v for k, v in back.uns.items() if "colors" not in k},
        {k: v for k, v in known.uns.items() if "colors" not in k},
    )


@pytest.mark.parametrize("profile", ["0.3.0", "0.2.0"])
@pytest.mark.parametrize("layout", ["sparse", "dense"])
def test_real_data_both_ways(tmp_path: Path, data_dir: Path, profile: str, layout: str) -> None:
    """A real file becomes a CXG and an h5ad again: matrix, names, categories, colours and both embeddings to the last bit."""
    given = ad.read_h5ad(data_dir / "pbmc68k_reduced.h5ad")
    made = copy(data_dir / "pbmc68k_reduced.h5ad", open_sink(tmp_path / "p.cxg", profile=profile, layout=layout))
    back = ad.read_h5ad(copy(made, tmp_path / "p.h5ad"))
    assert {p.rule for p in validate(made, "full") if p.level != "practice"} <= {"C06"}
    np.testing.assert_array_equal(dense(back.X), dense(given.X))
    assert list(back.obs_names) == list(given.obs_names)
    assert list(back.var_names) == list(given.var_names)
    for name in ("bulk_labels", "louvain", "phase"):
        assert list(back.obs[name].cat.categories) == list(given.obs[name].cat.categories)
        assert list(back.obs[name]) == list(given.obs[name])
    assert list(back.uns["bulk_labels_colors"]) == list(given.uns["bulk_labels_colors"])
    for name in ("X_pca", "X_umap"):
        np.testing.assert_array_equal(back.obsm[name], given.obsm[name])
    np.testing.assert_allclose(back.uns["pca"]["variance"], given.uns["pca"]["variance"])
