"""AnnData through a CXG and back: equal up to documented conversions; what a CXG does not hold is told before anything is written."""

import itertools
from decimal import Decimal
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

from raggedatlas.errors import SourceError
from raggedatlas.formats.copying import copy
from raggedatlas.formats.registry import open_sink, open_source
from raggedatlas.model.batch import DenseBlock
from raggedatlas.model.protocols import SinkMatrix
from raggedatlas.wings.cxg import validate
from raggedatlas.wings.cxg.options import ConversionLoss
from raggedatlas.wings.cxg.unstructured import as_hex
from reading import copy_with_losses, dense, read_element, read_source
from support.anndata_strategies import FORMS, KINDS, in_form, make_obs, make_values
from support.cxg_files import FORMS as CXG_FORMS
from support.cxg_files import write_cxg
from support.hypothesis_profile import examples


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
    assert "pca" not in back.uns


N = 12


def plain(**obs: Any) -> ad.AnnData:
    """An AnnData of which a CXG holds everything, and some columns."""
    columns = {"n": np.arange(N, dtype=np.int32), **obs}
    made = ad.AnnData(
        sp.csr_matrix(np.eye(N, 4, dtype=np.float32)),
        obs=pd.DataFrame(columns, index=[f"c{i}" for i in range(N)]),
        var=pd.DataFrame(index=list("abcd")),
    )
    made.obsm["X_umap"] = np.arange(2.0 * N).reshape(N, 2)
    return made


def told(given: Any, path: Path, **options: Any) -> dict[str, str]:
    """Write, and return what was told before anything was written: key -> fate."""
    heard: list[tuple[ConversionLoss, ...]] = []

    def hear(losses: tuple[ConversionLoss, ...]) -> None:
        assert not path.exists()
        heard.append(losses)

    _, losses = copy_with_losses(given, path, on_losses=hear, **options)
    assert heard == [losses]
    return {loss.key: loss.fate for loss in losses}


def test_nothing_is_told_where_nothing_is_lost(tmp_path: Path) -> None:
    """What fits is written without a word, also strictly; and so is what came from a CXG."""
    assert told(plain(), tmp_path / "a.cxg", strict=True) == {}
    assert told(write_cxg(tmp_path / "b.cxg"), tmp_path / "c.cxg", strict=True) == {}


def everything() -> ad.AnnData:
    """An AnnData with all that a CXG has no place for."""
    made = plain()
    made.layers["counts"] = made.X.copy()
    made.raw = made.copy()
    made.obsp["near"] = sp.eye_array(N, format="csr")
    made.varm["PCs"] = np.ones((4, 2))
    made.varp["corr"] = np.ones((4, 4))
    made.obsm["protein"] = np.ones((N, 14))
    made.obsm["X_one"] = np.ones((N, 1))
    made.obsm["X_sparse"] = sp.csr_matrix(np.ones((N, 3)))
    made.obsm["X_frame"] = pd.DataFrame({"a": np.ones(N), "b": "x"}, index=made.obs_names)
    made.obsm["X_cube"] = np.ones((N, 2, 2))
    made.uns["records"] = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")])
    made.uns["graph"] = {"inner": sp.eye_array(2, format="csr")}
    made.uns["text"] = "plain"
    return made


LOST = {
    "layers/counts", "raw", "obsp/near", "varm/PCs", "varp/corr", "obsm/protein", "obsm/X_one", "obsm/X_sparse", "obsm/X_frame",
    "obsm/X_cube", "uns/records", "uns/graph", "uns/text",
}  # fmt: skip


@pytest.mark.parametrize("stored", [False, True])
def test_what_has_no_place_is_listed(tmp_path: Path, stored: bool) -> None:
    """Each layer, raw, graph, loading and odd member of obsm and uns is listed as lost, from a file as from memory, worst first."""
    given: Any = everything()
    if stored:
        given.write_h5ad(tmp_path / "a.h5ad")
        given = tmp_path / "a.h5ad"
    _, losses = copy_with_losses(given, tmp_path / "a.cxg")
    assert {loss.key for loss in losses if loss.fate == "lost"} == LOST
    fates = [loss.fate for loss in losses]
    assert fates == sorted(fates, key=["lost", "changed", "rounded", "converted"].index)
    assert len({loss.key for loss in losses}) == len(losses)


def test_strictness_refuses_with_the_list(tmp_path: Path) -> None:
    """Strictly, all of it is refused by name, and nothing is left."""
    with pytest.raises(SourceError, match=r"strict is set: lost: layers/counts .*; and \d more") as refusal:
        copy(everything(), open_sink(tmp_path / "a.cxg", strict=True))
    assert "lost: raw (" in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_wanted_is_not_read(tmp_path: Path) -> None:
    """Matrices and elements that have no place are not read at all."""
    everything().write_h5ad(tmp_path / "a.h5ad")
    source: Any = open_source(tmp_path / "a.h5ad")
    read: list[str] = []

    def watched(real: Any) -> Any:
        def call(keys: Any, *rest: Any, **more: Any) -> Any:
            read.extend([keys] if isinstance(keys, str) else keys)
            return real(keys, *rest, **more)

        return call

    for name in ("blocks", "element", "table"):
        setattr(source, name, watched(getattr(source, name)))
    copy(source, open_sink(tmp_path / "a.cxg"))
    source.close()
    assert {key for key in read if not key.startswith("uns/")} == {"X", "obs", "var", "obsm/X_umap"}


def test_another_matrix_may_be_the_one(tmp_path: Path) -> None:
    """A layer is written in the place of X, which then is told as lost."""
    given = plain()
    given.layers["counts"] = given.X * 2
    assert told(given, tmp_path / "a.cxg", x="layers/counts") == {"X": "lost"}
    assert read_element(tmp_path / "a.cxg", "X").toarray().max() == 2


CONVERTED: dict[str, tuple[Any, str, str]] = {
    "int64": (np.arange(N), "converted", "0.3.0"),
    "float64 that is exact": (np.arange(N) / 2, "converted", "0.3.0"),
    "float64": (np.arange(N) / 3, "rounded", "0.3.0"),
    "float16": (np.arange(N).astype(np.float16), "converted", "0.3.0"),
    "nullable integers": (pd.array(np.arange(N), dtype="Int32"), "converted", "0.3.0"),
    "holes among integers": (pd.array([1, None] * 6, dtype="Int8"), "converted", "0.3.0"),
    "nullable booleans": (pd.array([True, False] * 6, dtype="boolean"), "converted", "0.3.0"),
    "holes among booleans": (pd.array([True, None] * 6, dtype="boolean"), "converted", "0.3.0"),
    "holes in text": (np.array(["a", None] * 6, object), "converted", "0.3.0"),
    "holes in text without codes": (np.array(["a", None] * 6, object), "changed", "0.2.0"),
    "an order": (pd.Categorical(["a", "b"] * 6, ordered=True), "converted", "0.3.0"),
    "truths as categories": (pd.Categorical([True, False] * 6), "converted", "0.3.0"),
    "numbers that do not occur": (pd.Categorical([1, 2] * 6, [3, 2, 1]), "changed", "0.3.0"),
    "categories that read alike": (pd.Categorical(["1", 1] * 6, ["1", 1]), "changed", "0.3.0"),
    "holes among categories as text": (pd.Categorical(["a", None] * 6), "changed", "0.2.0"),
    "times": (pd.date_range("2026-01-01", periods=N), "converted", "0.3.0"),
    "complex numbers": (np.arange(N) * 1j, "lost", "0.3.0"),
}


@pytest.mark.parametrize("what", CONVERTED)
def test_each_conversion_of_a_column_is_told(tmp_path: Path, what: str) -> None:
    """A column of another type than a CXG has is told, and as worse where its values change."""
    values, fate, profile = CONVERTED[what]
    given = plain()
    sink: Any = open_sink(tmp_path / "a.cxg", profile=profile)
    matrices = {"X": given.X.toarray(), "obsm/X_umap": given.obsm["X_umap"]}
    sink.begin(tuple(SinkMatrix.of(key, "dense", v.dtype, v.shape) for key, v in matrices.items()))
    sink.element("obs", given.obs.assign(x=values))
    sink.element("var", given.var)
    for key, block in matrices.items():
        sink.write(key, DenseBlock({"values": block}))
    sink.commit()
    assert next(loss.fate for loss in sink.losses if loss.key == "obs/x") == fate


def test_wide_integers_become_text_where_asked(tmp_path: Path) -> None:
    """Integers beyond 32 bits are text when that is chosen, and told."""
    given = plain(big=np.arange(N) + 2**40)
    assert told(given, tmp_path / "a.cxg", wide_integers="text") == {"obs/big": "converted"}
    assert read_element(tmp_path / "a.cxg", "obs")["big"].tolist() == [str(2**40 + i) for i in range(N)]


def test_many_categories_are_text(tmp_path: Path) -> None:
    """More than a thousand categories, and more than three quarters of the cells, are written as text."""
    n = 1100
    given = ad.AnnData(np.ones((n, 2), np.float32), obsm={"X_umap": np.zeros((n, 2))})
    given.obs["name"] = pd.Categorical([f"n{i}" for i in range(n)])
    assert told(given, tmp_path / "a.cxg")["obs/name"] == "converted"
    assert read_element(tmp_path / "a.cxg", "obs")["name"].tolist() == [f"n{i}" for i in range(n)]


def test_names_that_cannot_be_are_told(tmp_path: Path) -> None:
    """Columns whose names are reserved are renamed, and told."""
    given = plain(__x=1.0, index=2.0)
    given.obs.index.name = "index"
    fates = told(given, tmp_path / "a.cxg")
    assert {key for key in fates if key.startswith("obs/")} >= {"obs/__x", "obs/index"}
    back = read_element(tmp_path / "a.cxg", "obs")
    assert list(back.columns) == ["n", "_x", "index_"]
    try:
        given, half = plain(**{"a\0b": 1.0, "h\udc80": 2.0}), True
    except UnicodeEncodeError:  # pandas 3 takes no such name
        given, half = plain(**{"a\0b": 1.0}), False
    given.obs.index.name = "h\0i"
    given.obsm["X_\udc80"] = given.obsm["X_umap"]
    fates = told(given, tmp_path / "b.cxg")
    assert (fates["obs/a\0b"], fates["obsm/X_\udc80"]) == ("converted", "lost")
    assert fates.get("obs/h\udc80") == ("converted" if half else None)
    back = read_element(tmp_path / "b.cxg", "obs")
    assert (list(back.columns), back.index.tolist()) == (["n", "ab", *["h?"] * half], given.obs_names.tolist())


def test_side_data_of_other_kinds_is_told(tmp_path: Path) -> None:
    """What stands under the key of side data without being read from a CXG is listed as lost; the version is that of the writer."""
    given = plain()
    given.uns["cxg"] = {"metadata": {"cxg_version": "9", "odd": {"a": 1}, "n": 3}, "properties": "x", "mine": 1}
    fates = told(given, tmp_path / "a.cxg")
    assert {key for key, fate in fates.items() if fate == "lost"} == {
        "uns/cxg/metadata/cxg_version", "uns/cxg/metadata/odd", "uns/cxg/properties", "uns/cxg/mine",
    }  # fmt: skip
    assert read_element(tmp_path / "a.cxg", "uns/cxg") == {"metadata": {"n": 3}}
    given.uns["cxg"] = "mine"
    assert told(given, tmp_path / "b.cxg")["uns/cxg"] == "lost"


@pytest.mark.parametrize("dtype", ["int64[pyarrow]", "uint8[pyarrow]", "Sparse[int64]", "Int16"])
def test_integers_of_every_extension_type_are_written(tmp_path: Path, dtype: str) -> None:
    """Integers of Arrow, sparse and nullable dtypes are written as int32, and told."""
    given = plain()
    given.obs["k"] = pd.Series(range(N), given.obs_names, dtype)
    assert told(given, tmp_path / "a.cxg")["obs/k"] == "converted"
    back = read_element(tmp_path / "a.cxg", "obs")["k"]
    assert (back.dtype, back.tolist()) == (np.int32, list(range(N)))


def test_text_for_other_values_is_told(tmp_path: Path) -> None:
    """Decimal numbers become text, times with missing ones categories; both are told."""
    given = plain(times=[pd.NaT, *pd.to_datetime(["2020-01-01"] * (N - 1))])
    given.obs["exact"] = pd.Series([Decimal("0.1")] * N, given.obs_names)
    _, losses = copy_with_losses(given, tmp_path / "a.cxg")
    fates = {(loss.key, loss.fate) for loss in losses}
    assert fates >= {("obs/exact", "converted"), ("obs/times", "converted")}
    found = read_element(tmp_path / "a.cxg", "obs")
    assert found["exact"].tolist() == ["0.1"] * N
    assert found["times"].isna().tolist() == [True] + [False] * (N - 1)


def test_colours_that_do_not_fit_are_told(tmp_path: Path) -> None:
    """Too few colours, and what is no colour, are lost; other spellings are written as #rrggbb; both are told."""
    given = plain(
        kind=pd.Categorical(["a", "b"] * 6), other=pd.Categorical(["a", "b"] * 6), third=pd.Categorical(["a"] * N)
    )
    given.uns = {"kind_colors": ["#000000"], "other_colors": ["red", "#00ff0080"], "third_colors": ["reddish"]}
    fates = told(given, tmp_path / "a.cxg")
    assert {key: fate for key, fate in fates.items() if "colors" in key} == {
        "uns/kind_colors": "lost", "uns/other_colors": "converted", "uns/third_colors": "lost",
    }  # fmt: skip
    source = open_source(tmp_path / "a.cxg")
    assert source.element("uns/other_colors").tolist() == ["#ff0000", "#00ff00"]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("#ABC", "#aabbcc"), ("#AABBCC", "#aabbcc"), ("#aabbccdd", "#aabbcc"), ("SlateGrey", "#708090"), ((0.0, 0.5, 1.0), "#0080ff"),
        ([0, 128, 255], "#0080ff"), ((0.1, 0.2, 0.3, 0.4), "#1a334c"), ("#ab", None), ("", None), (3, None), ((1, 2), None), ((2.0, 0, 0), None),
        ((np.nan, 0.5, 0.5), None),
    ],
)  # fmt: skip
def test_every_spelling_of_a_colour(given: Any, made: str | None) -> None:
    """Names, short and long hexadecimals, and triples of either scale are one colour; anything else is none."""
    assert as_hex(given) == made
