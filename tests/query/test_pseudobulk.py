"""Sums per sample against pandas in memory, what was left out and why, the checks of the design, and pydeseq2's own table."""

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
from raggedatlas.errors import MissingExtraError, QueryError
from raggedatlas.model.batch import CsrBlock, DenseBlock
from raggedatlas.query import pseudobulk as module
from raggedatlas.query.pseudobulk import _add_any, _add_counts, _add_sorted, _joined, check_design

N_CELLS = 120


def make_file(k: int, *, floats: bool = False) -> ad.AnnData:
    rng = np.random.default_rng(k)
    x = sp.random(N_CELLS, 30, 0.4, format="csr", random_state=k)
    x.data = np.ceil(x.data * 50).astype(np.float32) + (0.5 if floats else 0)
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical(rng.choice(["T", "B", "rare"], N_CELLS, p=[0.6, 0.37, 0.03])),
            "donor": f"d{k}",
            "condition": "ill" if k % 2 else "well",
            "age": 30 + k,
            "score": rng.random(N_CELLS),
        },
        index=[f"c{i}" for i in range(N_CELLS)],
    )
    obs.loc[obs.index[:3], "cell_type"] = np.nan
    # The last file lacks five features of the others, and has five of its own.
    first = 5 if k == 3 else 0
    return ad.AnnData(x, obs, pd.DataFrame(index=[f"GENE{i + first}" for i in range(30)]))


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> ra.AtlasView:
    atlas = ra.RaggedAtlas.create(tmp_path_factory.mktemp("samples") / "a.atlas")
    for k in range(4):
        atlas.add(make_file(k), f"file{k}")
    return atlas.checkout(atlas.snapshot())


def test_sums_are_those_of_pandas(view: ra.AtlasView) -> None:
    data = view.query().to_anndata()
    samples = view.query().pseudobulk(["donor", "cell_type"], min_cells=1)
    keys = [data.obs["donor"].astype(str), data.obs["cell_type"].astype(object)]
    frame = pd.DataFrame(data.X.toarray(), columns=data.var_names)
    frame.index = data.obs_names
    expected = frame.groupby([key.to_numpy() for key in keys]).sum()
    assert samples.obs_names.tolist() == [f"{donor}_{kind}" for donor, kind in expected.index]
    assert samples.X.dtype == np.int32
    np.testing.assert_array_equal(samples.to_df()[expected.columns], expected)
    detected = (frame > 0).groupby([key.to_numpy() for key in keys]).sum()
    shown = pd.DataFrame(samples.layers["count_nonzero"].toarray(), columns=samples.var_names)[detected.columns]
    np.testing.assert_array_equal(shown, detected)
    sizes = frame.groupby([key.to_numpy() for key in keys]).size()
    assert samples.obs["n_cells"].tolist() == sizes.tolist()
    assert samples.obs["n_counts"].tolist() == expected.sum(axis=1).tolist()
    assert samples.obs["n_features"].tolist() == (expected > 0).sum(axis=1).tolist()


def test_what_was_measured_is_known_for_each_sample(view: ra.AtlasView) -> None:
    samples = view.query().pseudobulk("donor")
    measured = pd.DataFrame(samples.layers["measured"], samples.obs_names, samples.var_names)
    assert measured.loc["d0", "GENE0"] and not measured.loc["d3", "GENE0"]  # noqa: PT018
    assert measured.loc["d3", "GENE34"] and not measured.loc["d0", "GENE34"]  # noqa: PT018
    assert samples.obs["measured_share"].tolist() == [30 / 35] * 4


def test_columns_that_are_constant_are_kept_and_others_listed(view: ra.AtlasView) -> None:
    samples = view.query().pseudobulk("donor")
    assert samples.obs["condition"].tolist() == ["well", "ill", "well", "ill"]
    assert samples.obs["age"].tolist() == [30, 31, 32, 33]
    assert samples.obs["dataset"].astype(str).tolist() == ["file0", "file1", "file2", "file3"]
    assert samples.uns["pseudobulk"]["varying"].tolist() == ["cell_type", "score"]
    chosen = view.query().obs(["age", "score"]).pseudobulk("donor")
    assert {"age"} < {*chosen.obs} and "condition" not in chosen.obs  # noqa: PT018
    assert chosen.uns["pseudobulk"]["varying"].tolist() == ["score"]


def test_columns_called_as_those_of_the_samples_are_told(tmp_path: Path) -> None:
    """A constant column of the cells that a column of the result hides is named in the notes; as what makes the groups it is refused."""
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    for k in range(2):
        file = make_file(k)
        file.obs["n_counts"] = file.obs["n_cells"] = 7
        atlas.add(file, f"file{k}")
    query = atlas.checkout(atlas.snapshot()).query()
    samples = query.pseudobulk("donor")
    assert samples.obs["n_cells"].tolist() == [N_CELLS] * 2
    assert samples.obs["n_counts"].tolist() == samples.X.sum(axis=1).ravel().tolist()[0]
    assert any("(n_counts, n_cells)" in note for note in samples.uns["pseudobulk"]["notes"])
    for name in ("n_cells", "n_counts"):
        with pytest.raises(QueryError, match=f"by '{name}'"):
            query.pseudobulk(name)
    for call in (query.aggregate, query.markers):
        with pytest.raises(QueryError, match="by 'n_cells'"):
            call("n_cells")
    assert query.aggregate("n_counts").obs["n_counts"].tolist() == [7]


def test_nan_and_null_are_one_value_within_a_sample(tmp_path: Path) -> None:
    """A column that is missing for all cells of a sample does not vary in it, whether its file has NaN or lacks the column."""
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    for k in range(2):
        file = make_file(k)
        file.obs["donor"] = "d"
        file.obs = file.obs.assign(depth=np.nan) if k else file.obs
        atlas.add(file, f"file{k}")
    samples = atlas.checkout(atlas.snapshot()).query().pseudobulk("donor")
    assert "depth" not in samples.uns["pseudobulk"]["varying"]
    assert samples.obs["depth"].isna().all()


def test_small_samples_and_cells_without_a_sample_are_left_out_and_told(view: ra.AtlasView) -> None:
    samples = view.query().pseudobulk(["donor", "cell_type"], min_cells=15)
    assert {*samples.obs["cell_type"]} == {"T", "B"}
    notes = "\n".join(samples.uns["pseudobulk"]["notes"])
    assert "left out: 4 cells without a value of what makes the samples (d0_(missing), " in notes
    assert "12 cells" in notes
    assert "samples of fewer than 15 cells" in notes
    assert samples.obs["n_cells"].min() >= 15
    none = view.query().pseudobulk("donor", min_cells=10_000)
    assert none.shape == (0, 35)


def test_the_result_is_the_same_by_workers_and_for_selections(view: ra.AtlasView) -> None:
    query = view.query().where("score > 0.3").features(["GENE6", "GENE9"])
    alone = query.pseudobulk(["donor", "cell_type"])
    with ThreadPoolExecutor(2) as pool:
        together = query.pseudobulk(["donor", "cell_type"], executor=pool)
    np.testing.assert_array_equal(alone.X.toarray(), together.X.toarray())
    sums = query.aggregate(["donor", "cell_type"])
    np.testing.assert_array_equal(alone.X.toarray(), sums[alone.obs_names].layers["sum"])
    part = view.query().sample(50, seed=1)
    assert part.pseudobulk("donor", min_cells=1).obs["n_cells"].sum() == 50


def test_it_is_written_and_read_as_any_anndata(view: ra.AtlasView, tmp_path: Path) -> None:
    samples = view.query().pseudobulk(["donor", "cell_type"])
    samples.write_h5ad(tmp_path / "samples.h5ad")
    back = ad.read_h5ad(tmp_path / "samples.h5ad")
    np.testing.assert_array_equal(back.X.toarray(), samples.X.toarray())
    np.testing.assert_array_equal(back.layers["measured"], samples.layers["measured"])


def test_what_is_no_count_is_refused(tmp_path: Path, view: ra.AtlasView) -> None:
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    atlas.add(make_file(0, floats=True))
    floats = atlas.checkout(atlas.snapshot()).query()
    with pytest.raises(QueryError, match="no count"):
        floats.pseudobulk("donor")
    with pytest.raises(QueryError, match="min_cells"):
        view.query().pseudobulk("donor", min_cells=0)
    with pytest.raises(QueryError, match="'doner'"):
        view.query().pseudobulk("doner")


@given(
    st.integers(1, 12).flatmap(
        lambda n: st.tuples(
            st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=n, max_size=n),
            st.lists(st.integers(0, 4), min_size=n, max_size=n),
            st.lists(st.integers(1, 5), min_size=1, max_size=4),
            st.booleans(),
            st.booleans(),
        )
    )
)
def test_blocks_add_up_however_they_are_cut(given: tuple[Any, ...]) -> None:
    rows, codes, cuts, dense, by_group = given
    values, groups = np.array(rows, np.float32), np.array(codes, np.int64)
    monkey, order = module._DENSE_SHARE, np.arange(len(groups)) if not by_group else np.argsort(groups, kind="stable")
    values, groups = values[order], groups[order]
    parts, start = [], 0
    for length in [*cuts, len(values)]:
        part, own = values[start : start + length], groups[start : start + length]
        start += length
        if not len(part):
            continue
        made = sp.csr_matrix(part)
        block = DenseBlock({"x": part}) if dense else CsrBlock(made.indptr, made.indices, {"x": made.data}, 4)
        # By products of sparse matrices, and in dense memory.
        module._DENSE, module._DENSE_SHARE = (0, 0) if start % 2 else (1 << 20, monkey)
        parts.append(_add_counts(block, own, 4))
    module._DENSE, module._DENSE_SHARE = 1 << 20, monkey
    expected, there = np.zeros((5, 4)), np.zeros((5, 4))
    np.add.at(expected, groups, values)
    np.add.at(there, groups, values > 0)
    found = _joined(_add_sorted(parts, 4)) if by_group else _joined(_add_any(parts, 5, 4))
    np.testing.assert_array_equal(found.matrix(found.sums, 4).toarray(), expected[found.groups])
    np.testing.assert_array_equal(found.matrix(found.nonzero, 4).toarray(), there[found.groups])
    assert found.groups.tolist() == (np.unique(groups).tolist() if by_group else [0, 1, 2, 3, 4])
    assert len(found.sums) == np.count_nonzero(expected)


def test_sums_beyond_32_bits_are_exact() -> None:
    large = DenseBlock({"x": np.full((2, 1), 2**31 - 1, np.uint32)})
    part = _add_counts(large, np.zeros(2, np.int64), 1)
    assert part.add(part, 1).sums.tolist() == [4 * (2**31 - 1)]
    assert part.sums.dtype == np.int64


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"a": ["x", "x", "y", "y"], "b": ["1", "1", "2", "2"]}, "a and b go together"),
        ({"a": ["x", "x", "x"]}, "a is 'x' in all samples"),
        ({"a": ["x", "x", "y"]}, "a = 'y' has a single sample"),
        ({"a": ["x", "x", "y", "z"]}, "a = 'y', 'z' have a single sample each"),
        ({"a": ["x", "x", "y", "y"], "measured_share": [1.0, 0.4, 1, 1]}, "fewer than half of the features: 1"),
    ],
)
def test_designs_that_do_not_tell_effects_apart_are_noted(table: dict[str, Any], text: str) -> None:
    columns = [name for name in table if name != "measured_share"]
    assert any(text in note for note in check_design(pd.DataFrame(table), columns))


def test_a_sound_design_has_no_note() -> None:
    frame = pd.DataFrame({"a": ["x", "x", "y", "y"], "b": ["1", "2", "1", "2"], "donor": ["p", "q", "r", "s"]})
    assert check_design(frame, ["a", "b", "donor"]) == []


def test_a_test_needs_its_extra(view: ra.AtlasView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pydeseq2.dds", None)
    with pytest.raises(MissingExtraError, match=r"raggedatlas\[stats\]"):
        view.query().test("~ condition", ("condition", "ill", "well"), by="donor")


@pytest.mark.filterwarnings("ignore")  # of pandas, about what pydeseq2 calls
def test_tests_are_those_of_pydeseq2(view: ra.AtlasView) -> None:
    dds = pytest.importorskip("pydeseq2.dds")
    from pydeseq2.ds import DeseqStats

    query, by = view.query().where(cell_type=["T", "B"]), ["donor", "cell_type"]
    found = query.test("~ condition + cell_type", ("condition", "ill", "well"), by=by)
    data = query.to_anndata()
    keys = [data.obs["donor"].astype(str).to_numpy(), data.obs["cell_type"].astype(str).to_numpy()]
    counts = pd.DataFrame(data.X.toarray(), columns=data.var_names).groupby(keys).sum().astype(int)
    counts = counts.loc[:, [f"GENE{i}" for i in range(5, 30)]]
    metadata = pd.DataFrame(
        {
            "condition": ["ill" if donor in ("d1", "d3") else "well" for donor, _ in counts.index],
            "cell_type": [kind for _, kind in counts.index],
        },
        index=[f"{donor}_{kind}" for donor, kind in counts.index],
    )
    counts.index = metadata.index
    model = dds.DeseqDataSet(counts=counts, metadata=metadata, design="~ condition + cell_type", quiet=True)
    model.deseq2()
    stats = DeseqStats(model, contrast=["condition", "ill", "well"], quiet=True)
    stats.summary()
    pd.testing.assert_frame_equal(found[stats.results_df.columns].sort_index(), stats.results_df.sort_index())
    assert found.attrs["pseudobulk"]["not_measured_by_all"] == 10
    assert found["padj"].dropna().is_monotonic_increasing


def test_tests_that_cannot_be_made_are_refused(view: ra.AtlasView) -> None:
    pytest.importorskip("pydeseq2")
    query = view.query()
    for design, contrast, text in (
        ("~ condition", ("condition", "ill"), "three parts"),
        ("~ score", ("score", "1", "2"), "vary within samples"),
        ("~ condition", ("donor", "d0", "d1"), "does not name"),
        ("~ condition", ("condition", "ill", "dead"), r"0 sample\(s\)"),
    ):
        with pytest.raises(QueryError, match=text):
            query.test(design, contrast, by="donor")


@pytest.mark.parametrize(
    ("design", "names"),
    [
        ("~ condition + C(batch, Treatment('a')) + log(age):sex", ["condition", "batch", "age", "sex"]),
        ("~ np.log(age) + percent.mt + np.log (depth)", ["age", "percent.mt", "depth"]),
        ("~ C(batch, contr.treatment(base='a'), levels=['a', 'b'])", ["batch"]),
        ("~ `cell type` + I(age == 1.5e3)", ["cell type", "age"]),
    ],
)
def test_names_of_a_formula(design: str, names: list[str]) -> None:
    """Columns are told from functions, their options and numbers."""
    assert module._names_in(design) == names
