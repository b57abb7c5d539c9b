"""`test`: results of a model over cells whose answer is known, and scores that agree with the plain formulas."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas import ResultDataset
from raggedatlas.errors import CorruptError, NotFoundError, QueryError, SourceError
from raggedatlas.wings.results import infer
from raggedatlas.wings.results import test as evaluate
from raggedatlas.wings.results.verbs.evaluation import ClassificationMetrics, RegressionMetrics, parse_scores

pytestmark = pytest.mark.fast


def logits(X: Any) -> Any:
    """Give numbers for two classes."""
    return np.stack([X.sum(axis=1), X[:, 0] * 3], axis=1)


@pytest.mark.parametrize("batch_size", [5, 512])
def test_scores_of_classes(small: Any, tmp_path: Path, batch_size: int) -> None:
    """C94: accuracy, macro F1, confusion and cross-entropy are those of all labelled cells, whatever the batches; results are a table."""
    found = evaluate(logits, small.query, tmp_path / "r", "kind", batch_size=batch_size)
    scores, given_back = found.scores, logits(small.counts)
    assert np.array_equal(found.to_numpy(), given_back)
    assert list(found.ids()) == small.uids
    codes = small.obs["kind"].cat.codes.to_numpy()
    known = codes >= 0
    predicted = given_back.argmax(axis=1)
    assert scores.categories == ("T", "B")
    assert (scores.n_cells, scores.n_unlabelled) == (known.sum(), (~known).sum())
    confusion = [[int(((codes == i) & (predicted == j)).sum()) for j in range(2)] for i in range(2)]
    assert [list(row) for row in scores.confusion] == confusion
    assert scores.metrics["accuracy"] == pytest.approx((predicted == codes)[known].mean())
    f1 = [2 * confusion[i][i] / (sum(confusion[i]) + confusion[0][i] + confusion[1][i]) for i in range(2)]
    assert scores.metrics["macro_f1"] == pytest.approx(np.mean(f1))
    wide = np.exp(given_back[known].astype("f8"))
    chosen = wide[np.arange(known.sum()), codes[known]] / wide.sum(axis=1)
    assert scores.loss == pytest.approx(-np.log(chosen).mean())
    assert pickle.loads(pickle.dumps(found)).scores == scores


def test_scores_of_numbers(small: Any, tmp_path: Path) -> None:
    """MSE and R2 are those of the cells with a number; a loss of one's own is a mean over them."""
    found = evaluate(
        lambda X: X.sum(axis=1, keepdims=True), small.query, tmp_path / "r", "score",
        batch_size=10, loss=lambda given, wanted: float(np.abs(given[:, 0] - wanted).mean()),
    )  # fmt: skip
    true = small.obs["score"].to_numpy()
    known = ~np.isnan(true)
    given_back, true = small.counts.sum(axis=1)[known], true[known]
    assert found.scores.task == "regression"
    assert found.scores.n_unlabelled == (~known).sum()
    assert found.scores.metrics["mse"] == pytest.approx(((given_back - true) ** 2).mean())
    expected = 1 - ((given_back - true) ** 2).sum() / ((true - true.mean()) ** 2).sum()
    assert found.scores.metrics["r2"] == pytest.approx(expected)
    assert found.scores.loss == pytest.approx(np.abs(given_back - true).mean())


def test_classes_by_their_codes(small: Any, tmp_path: Path) -> None:
    """A model may give codes instead of logits, in the order of given categories; it then has no loss of its own."""
    found = evaluate(
        lambda X: {"class": np.zeros(len(X), np.int64), "z": X}, small.query, tmp_path / "r", "kind",
        categories=["B", "T"], output="class",
    )  # fmt: skip
    assert found.scores.loss is None
    assert found.scores.metrics["accuracy"] == pytest.approx((small.obs["kind"].dropna() == "B").mean())
    assert {column.name for column in found.columns} == {"class", "z"}


@pytest.mark.parametrize(
    ("model", "target", "choices", "error", "said"),
    [
        (lambda X: X, "kind", {}, SourceError, r"gives 6 numbers .* 2 classes \(T, B\)"),
        (lambda X: X[:, 0], "kind", {}, SourceError, "classes are given by logits"),
        (lambda X: np.full(len(X), 2), "kind", {}, SourceError, "class 2; the target's are 0 to 1"),
        (lambda X: X, "score", {}, SourceError, "one number for each cell"),
        (lambda X: {"a": X, "b": X}, "score", {}, SourceError, "say which is the prediction"),
        (logits, "kind", {"output": "other"}, SourceError, "say which is the prediction"),
        (logits, "nobody", {}, QueryError, "no column 'nobody'"),
        pytest.param(
            logits,
            "kind",
            {"categories": ["X", "Y"]},
            QueryError,
            "None of the 73 cells",
            marks=pytest.mark.filterwarnings("ignore:The categories of 'kind' lack"),
        ),
        (logits, "kind", {"n_parts": 2}, QueryError, "no choice 'n_parts'"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    small: Any, tmp_path: Path, model: Any, target: str, choices: dict[str, Any], error: type[Exception], said: str
) -> None:
    """Predictions that do not fit the target are refused by name, and no results are left."""
    with pytest.raises(error, match=said):
        evaluate(model, small.query, tmp_path / "r", target, **choices)
    with pytest.raises(NotFoundError):
        ResultDataset({}, tmp_path / "r")


def test_only_tests_have_scores(small: Any, tmp_path: Path) -> None:
    """Results of another verb say that they have no scores, and damaged scores are refused."""
    from raggedatlas.wings.results import ScoredResults

    infer(logits, small.query, tmp_path / "r")
    with pytest.raises(NotFoundError, match="no scores"):
        _ = ScoredResults({}, tmp_path / "r").scores
    for text in ("", "{}", '{"metrics": 1}'):
        with pytest.raises(CorruptError):
            parse_scores(text, "here")


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 99))
def test_sums_do_not_depend_on_the_batches(sizes: list[int], seed: int) -> None:
    """Sums over batches are those of one batch, also where the numbers are large and lie close together."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    codes = rng.integers(-1, 3, n).astype(np.int32)
    scores = rng.normal(size=(n, 3))
    true = 1e6 + rng.normal(size=n)
    near = true + rng.normal(size=n)
    whole, parts, far, far_parts = (
        ClassificationMetrics("abc"),
        ClassificationMetrics("abc"),
        RegressionMetrics(),
        RegressionMetrics(),
    )
    whole.add(scores, codes)
    far.add(near, true)
    start = 0
    for size in sizes:
        own = slice(start, start + size)
        parts.add(scores[own], codes[own])
        far_parts.add(near[own], true[own])
        start += size
    assert np.array_equal(whole.confusion, parts.confusion)
    assert whole.metrics() == parts.metrics()
    assert whole.entropy == pytest.approx(parts.entropy)
    assert far_parts.metrics()["mse"] == pytest.approx(far.metrics()["mse"])
    if n > 1:
        expected = 1 - ((near - true) ** 2).sum() / ((true - true.mean()) ** 2).sum()
        assert far_parts.metrics()["r2"] == pytest.approx(expected, rel=1e-6, abs=1e-6)
