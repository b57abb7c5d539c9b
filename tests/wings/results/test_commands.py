"""The verbs over an atlas as commands: each once done and once refused, on a small atlas."""

import json
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix

from command import ask, read, refused
from raggedatlas import RaggedAtlas, ResultDataset

MODEL = """
import numpy as np

class Columns:
    def __init__(self, first=0, n=2):
        self.first, self.n = first, n
    def __call__(self, X):
        return X[:, self.first:self.first + self.n]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an atlas of 40 cells, a model, and results of it."""
    folder = tmp_path_factory.mktemp("verbs")
    rng = np.random.default_rng(0)
    counts = csr_matrix(rng.poisson(1.0, (40, 5)).astype(np.float32))
    obs = pd.DataFrame(
        {"kind": rng.choice(["B", "T"], 40), "tissue": ["lung", "blood"] * 20}, index=[f"c{i}" for i in range(40)]
    )
    atlas = RaggedAtlas.create(str(folder / "atlas"))
    atlas.add(ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=list("abcde"))), name="one")
    atlas.snapshot()
    (folder / "model.py").write_text(MODEL)
    words = ("infer", folder / "atlas", f"{folder}/model.py:Columns", "-o", folder / "z", "--option", "n=3")
    assert read(*words)["n_rows"] == 40
    return folder


def test_infer(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`infer` writes the model's results of the chosen cells, by default to a folder named by time and verb."""
    monkeypatch.chdir(tmp_path)
    told = read("infer", place / "atlas", f"{place}/model.py:Columns", "-w", "tissue = 'lung'", "--batch-size", 7)
    assert told["n_rows"] == 20
    assert told["columns"] == [{"name": "data", "shape": [2], "dtype": "float32"}]
    assert "-infer-" in told["results_dir"]
    assert len(ResultDataset({}, told["results_dir"])) == 20
    assert "already holds 40 results" in refused(
        "infer", place / "atlas", f"{place}/model.py:Columns", "-o", place / "z"
    )
    assert "cannot be imported" in refused("infer", place / "atlas", "no_such_module:f")
    assert list(tmp_path.iterdir()) == [tmp_path / "results"]
    assert len(list((tmp_path / "results").iterdir())) == 1


@pytest.mark.nightly
def test_test(place: Path, tmp_path: Path) -> None:
    """`test` prints the scores, and the confusion as a table."""
    words = ("test", place / "atlas", f"{place}/model.py:Columns", "kind", "--category", "T", "--category", "B")
    told = read(*words, "-o", tmp_path / "a")
    assert told["scores"]["categories"] == ["T", "B"]
    assert sum(map(sum, told["scores"]["confusion"])) == 40
    shown = ask(*words, "-o", tmp_path / "b").stdout
    assert "macro_f1" in shown
    assert "target \\ predicted" in shown
    assert "2 classes" in refused(*words, "--option", "n=4", "-o", tmp_path / "c")


def test_engine(place: Path, tmp_path: Path) -> None:
    """`engine` refuses a file that is no model by name."""
    pytest.importorskip("onnxruntime")
    (tmp_path / "junk.onnx").write_bytes(b"junk")
    assert "does not read as an ONNX model" in refused("engine", place / "atlas", tmp_path / "junk.onnx")
    assert "key=value" in refused("engine", place / "atlas", "a.onnx", "--input", "x", code=2)


def test_pca_and_umap(place: Path, tmp_path: Path) -> None:
    """`pca` takes an atlas or results; a selection is for an atlas; `umap` refuses what cannot be."""
    told = read(
        "pca", place / "atlas", "--n-components", 2, "--target-sum", 100, "-o", tmp_path / "a", "-f", "a", "-f", "b"
    )
    assert (told["n_rows"], told["columns"][0]["shape"]) == (40, [2])
    told = read("pca", place / "z", "--n-components", 2, "-o", tmp_path / "b")
    assert told["n_rows"] == 40
    assert "always reduced completely" in refused("pca", place / "z", "-w", "tissue = 'lung'", code=2)
    assert "there can be 1 to 3" in refused("pca", place / "z", "-o", tmp_path / "c")
    assert "n_neighbors" in refused("umap", place / "z", "--n-neighbors", 40, "-o", tmp_path / "d")


def test_finding(place: Path) -> None:
    """`lookup`, `neighbors` and `save_to_database` say what they find, as text and JSON."""
    results = ResultDataset({}, place / "z")
    uid, other = results.get_object_id(0), results.get_object_id(1)
    assert read("lookup", place / "z", uid) == {uid: results.get_data(0).tolist()}
    lost = ask("lookup", place / "z", "nobody")
    assert (lost.exit_code, lost.stdout) == (1, "nobody  no result\n")
    words = ("neighbors", place / "z", uid, other, "-k", 3, "--metric", "cosine")
    assert len(read(*words)) == 6
    among = (*words, "--atlas", place / "atlas", "-w", "tissue = 'lung'", "--obs", "tissue")
    assert {row["tissue"] for row in read(*among)} == {"lung"}
    assert "lung" in ask(*among).stdout
    np.save(place / "asked.npy", results.to_numpy()[:2])
    told = read("neighbors", place / "z", "--vectors", place / "asked.npy", "-k", 1)
    assert [row["distance"] for row in told] == [0, 0]
    (place / "junk.npy").write_bytes(b"junk")
    assert "junk.npy is no .npy file" in refused("neighbors", place / "z", "--vectors", place / "junk.npy")
    assert "--vectors" in refused("neighbors", place / "z", code=2)
    assert "need --atlas" in refused(*words, "-w", "tissue = 'lung'", code=2)
    assert "no result of the cell 'nobody'" in refused("neighbors", place / "z", "nobody")
    assert read("save_to_database", place / "z")["kind"] == "exact"
    assert "compared exactly" in ask("save_to_database", place / "z").stdout
    assert "no output 'other'" in refused("save_to_database", place / "z", "--column", "other")


def test_progress_is_told(place: Path, tmp_path: Path) -> None:
    """A command that takes long says on stderr how far it is, and its result alone on stdout."""
    model = f"{place}/model.py:Columns"
    for words, step in (
        (("infer", place / "atlas", model, "-o", tmp_path / "a", "--batch-size", 5), "cells 20 of 40"),
        (("test", place / "atlas", model, "kind", "-o", tmp_path / "b", "--batch-size", 5), "cells 20 of 40"),
        (("pca", place / "z", "--n-components", 2, "-o", tmp_path / "c"), "of"),
        (("save_to_database", place / "z", "--least-rows", 10), "index 1 of 2"),
    ):
        said = ask(*words, "--json")
        assert said.exit_code == 0, said.stderr
        assert step in said.stderr
        json.loads(said.stdout)
