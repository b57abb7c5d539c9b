"""`pca` and `umap`: the same numbers for the same seed, whatever the batches; models that come back without pickle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas import ResultDataset
from raggedatlas.errors import (
    ArgumentError,
    CorruptError,
    LimitError,
    MissingExtraError,
    NotFoundError,
    QueryError,
    SourceError,
)
from raggedatlas.wings.results import infer, pca, umap
from raggedatlas.wings.results.verbs import reduction
from raggedatlas.wings.results.verbs.reduction import fit_pca, load_pca, load_umap
from support.atlases import npy_run

pytestmark = pytest.mark.fast

Write = Callable[..., ResultDataset]


def plain_pca(values: Any, k: int) -> Any:
    """Reduce by a singular value decomposition of all rows."""
    centred = values - values.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    return np.abs(centred @ directions[:k].T)


@pytest.mark.parametrize("batch_size", [3, 8192])
def test_pca_of_a_query(small: Any, tmp_path: Path, batch_size: int) -> None:
    """C53: sparse genes are projected as a plain decomposition projects them, whatever the batches, up to signs."""
    found = pca(small.query, tmp_path / "r", n_components=3, batch_size=batch_size)
    assert list(found.ids()) == small.uids
    assert np.allclose(np.abs(found.to_numpy()), plain_pca(small.counts.astype("f8"), 3), atol=1e-4)
    assert found.facts["atlas:uri"] == str(small.folder)


def test_pca_of_log_counts(small: Any, tmp_path: Path) -> None:
    """With `target_sum`, counts are scaled and logged first, and a saved model does the same by itself."""
    found = pca(small.query, tmp_path / "r", n_components=2, target_sum=100)
    sums = small.counts.sum(axis=1, keepdims=True)
    logged = np.log1p(np.divide(100 * small.counts, sums, out=np.zeros_like(small.counts), where=sums > 0))
    assert np.allclose(np.abs(found.to_numpy()), plain_pca(logged.astype("f8"), 2), atol=1e-4)
    again = pca(small.query, tmp_path / "again", model=tmp_path / "r" / "pca.npz")
    assert np.array_equal(again.to_numpy(), found.to_numpy())


def test_pca_of_an_embedding_and_of_results(small: Any, tmp_path: Path) -> None:
    """C91: an embedding of the atlas and results are reduced alike; a chain of runs keeps the first data's configuration (C23)."""
    query = small.query.spaces("embedding")
    z = query.to_anndata().X
    found = infer(lambda X: X.reshape(-1, 2, 2), query, tmp_path / "z")
    a = pca(query, tmp_path / "a", n_components=2)
    b = pca(found, tmp_path / "b", n_components=2, batch_size=10)
    assert np.allclose(np.abs(a.to_numpy()), plain_pca(z.astype("f8"), 2), atol=1e-5)
    assert np.allclose(b.to_numpy(), a.to_numpy(), atol=1e-5)
    assert b.facts["result:parent"] == str(tmp_path / "z")
    texts = [(tmp_path / name / "original_dataset_config.toml").read_text() for name in ("z", "b")]
    assert texts[0] == texts[1]


def test_a_saved_model_takes_its_own_features(small: Any, tmp_path: Path) -> None:
    """A model fitted to some features finds them in any query, in its own order."""
    fitted = pca(small.query.features("d", "a", "c"), tmp_path / "r", n_components=2)
    model = tmp_path / "r" / "pca.npz"
    again = pca(small.query.features("a", "b", "c", "d"), tmp_path / "again", model=model)
    assert np.array_equal(again.to_numpy(), fitted.to_numpy())
    for verb, fit in (
        (pca, {"n_components": 2}),
        (pca, {"target_sum": 9.0}),
        (umap, {"seed": 0}),
        (umap, {"metric": "cosine"}),
    ):
        with pytest.raises(ArgumentError, match=f"{next(iter(fit))} have no effect"):
            verb(small.query, tmp_path / "none", model=model, **fit)
    with pytest.raises(QueryError, match="rows of 3 values, not of 2"):
        pca(infer(lambda X: X[:, :2], small.query, tmp_path / "z"), tmp_path / "other", model=model)


@given(seed=st.integers(0, 50), sparse=st.booleans())
def test_wide_rows_are_reduced_as_narrow_ones(seed: int, sparse: bool) -> None:
    """Solvers for few components find what the whole covariance shows; components are orthonormal, and variances descend."""
    rng = np.random.default_rng(seed)
    values = rng.poisson(1.0, (30, 40)) * np.linspace(4, 0.1, 40)
    given_back = sp.csr_array(values) if sparse else values
    exact = fit_pca(given_back, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "EXACT_WIDTH", 5)
        projected = fit_pca(given_back, 3, seed=seed)
        again = fit_pca(given_back, 3, seed=seed)
    assert np.array_equal(projected.components, again.components)
    assert np.allclose(exact.explained_variance, projected.explained_variance, rtol=1e-3)
    assert np.allclose(exact.components @ exact.components.T, np.eye(3))
    assert np.allclose(projected.components @ projected.components.T, np.eye(3))
    assert (np.diff(exact.explained_variance) <= 0).all()
    assert exact.explained_variance_ratio.sum() <= 1 + 1e-9


def test_samples_are_seeded(write: Write, tmp_path: Path) -> None:
    """Equal seeds choose equal samples and give equal numbers; another seed another sample."""
    found = write(np.random.default_rng(0).normal(size=(300, 5)))
    made = [
        pca(found, tmp_path / str(i), n_components=2, sample_size=50, seed=seed) for i, seed in enumerate((1, 1, 2))
    ]
    assert np.array_equal(made[0].to_numpy(), made[1].to_numpy())
    assert not np.allclose(made[0].to_numpy(), made[2].to_numpy())
    model = load_pca(tmp_path / "0" / "pca.npz")
    assert (model.n_rows, model.seed) == (50, 1)


@pytest.mark.parametrize(
    ("choices", "error", "said"),
    [
        ({"n_components": 6}, QueryError, "6 components of 20 rows of 5 values; there can be 1 to 5"),
        ({"sample_size": 1}, QueryError, "sample_size=1"),
        ({"batch_size": 0}, QueryError, "batch_size=0"),
        ({"target_sum": -1.0}, QueryError, "target_sum=-1"),
        ({"colour": 1}, QueryError, "no choice 'colour'"),
        ({"column": "other"}, NotFoundError, "no output 'other'"),
        ({"model": "nowhere.npz", "n_components": None}, NotFoundError, "no model nowhere.npz"),
    ],
)
def test_pca_refuses(write: Write, tmp_path: Path, choices: dict[str, Any], error: type[Exception], said: str) -> None:
    """What cannot be done is refused by name before anything is written."""
    found = write(np.random.default_rng(0).normal(size=(20, 5)))
    with pytest.raises(error, match=said):
        pca(found, tmp_path / "r", **{"n_components": 2, **choices})
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("sample_size", [5, 100])
def test_values_that_are_not_finite_are_refused(write: Write, tmp_path: Path, sample_size: int) -> None:
    """A row with NaN is refused by its number, in the sample and elsewhere, and nothing is visible."""
    values = np.random.default_rng(0).normal(size=(40, 3))
    values[33, 1] = np.nan
    found = write(values)
    with pytest.raises(SourceError, match="row 33 holds a value that is not finite"):
        pca(found, tmp_path / "r", n_components=1, sample_size=sample_size, batch_size=7)
    with pytest.raises(NotFoundError):
        ResultDataset({}, tmp_path / "r")


@pytest.mark.parametrize("load", [load_pca, load_umap])
def test_damaged_models_are_refused(tmp_path: Path, load: Callable[[Path], Any]) -> None:
    """A model's file is read without unpickling, and anything but a model is refused."""
    path = tmp_path / "model.npz"
    path.write_bytes(b"junk")
    with pytest.raises(CorruptError, match=r"model\.npz"):
        load(path)
    for content in ({"mean": np.zeros(2)}, {"settings": np.array("[]"), "sample": np.zeros(1), "layout": np.zeros(1)}):
        np.savez(path, **content)
        with pytest.raises(CorruptError, match=r"model\.npz"):
            load(path)
    np.savez(path, allow_pickle=True, settings=np.array([object()]), mean=np.array([object()]))
    with pytest.raises(CorruptError, match=r"model\.npz"):
        load(path)


@pytest.mark.nightly
def test_umap_is_seeded_and_comes_back(small: Any, tmp_path: Path) -> None:
    """C53, C54, C96: equal seeds lay out equally, uid by uid, of a query, of what `infer` left, and of .npy results; the saved model, built again without pickle, places rows exactly alike."""
    pytest.importorskip("umap")
    query = small.query.spaces("embedding")
    a = umap(query, tmp_path / "a", sample_size=40, n_neighbors=5, batch_size=30)
    b = umap(query, tmp_path / "b", sample_size=40, n_neighbors=5, batch_size=30)
    assert list(a.ids()) == small.uids
    assert a.tensor_shape == (2,)
    assert np.isfinite(a.to_numpy()).all()
    assert np.array_equal(a.to_numpy(), b.to_numpy())
    z = infer(lambda X: X, query, tmp_path / "z")
    old = npy_run(tmp_path / "old", [(small.uids[:30], z.to_numpy()[:30]), (small.uids[30:], z.to_numpy()[30:])])
    chained = umap(z, tmp_path / "chained", sample_size=40, n_neighbors=5, batch_size=30)
    assert np.array_equal(chained.to_numpy(), a.to_numpy())
    assert chained.facts["result:parent"] == str(tmp_path / "z")
    with pytest.warns(DeprecationWarning, match="convert-results"):
        of_files = umap(old, tmp_path / "of_files", sample_size=40, n_neighbors=5, batch_size=30)
    assert sorted(of_files.ids()) == sorted(small.uids)
    assert isinstance(of_files, ResultDataset)
    assert np.isfinite(of_files.to_numpy()).all()
    rows = reduction.sample_rows(73, 40, 0)
    model = load_umap(tmp_path / "a" / "umap.npz")
    assert np.array_equal(a.to_numpy()[rows], model.layout)
    others = np.setdiff1d(np.arange(30), rows)
    placed = model.transform(query.to_anndata().X[others])
    assert np.array_equal(placed, a.to_numpy()[others])
    assert model.transform(np.zeros((0, 4), np.float32)).shape == (0, 2)
    assert a.facts["result:model"] == "umap.npz"


def test_umap_refuses(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings out of range, rows too wide and a missing library are refused by name, and nothing is written."""
    found = write(np.random.default_rng(0).normal(size=(20, 5)))
    for choices, said in (
        ({"n_neighbors": 20}, "n_neighbors from 2 to 19"),
        ({"min_dist": 2.0}, "min_dist from 0 to 1"),
        ({"metric": "hamming"}, "metric 'hamming'"),
        ({"n_components": 0}, "n_components from 1"),
    ):
        with pytest.raises(QueryError, match=said):
            umap(found, tmp_path / "r", **choices)
    with monkeypatch.context() as patch:
        patch.setattr(reduction, "_MOST_BYTES", 10)
        with pytest.raises(LimitError, match="reduce them with pca first"):
            reduction._dense(sp.csr_array(np.eye(4)))
    monkeypatch.setitem(__import__("sys").modules, "umap", None)
    with pytest.raises(MissingExtraError, match=r"raggedatlas\[umap\]"):
        umap(found, tmp_path / "r")
    assert not (tmp_path / "r").exists()
