"""Models that come from files: ONNX, and PyTorch modules with their weights; nothing in them is run but numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raggedatlas import ResultDataset
from raggedatlas.errors import MissingExtraError, NotFoundError, QueryError, SourceError
from raggedatlas.wings.results import engine, infer

pytestmark = pytest.mark.fast

ENCODER = """
import torch


class Encoder(torch.nn.Module):
    def __init__(self, width, size=2):
        super().__init__()
        self.linear = torch.nn.Linear(width, size)
        self.dropout = torch.nn.Dropout(0.9)

    def forward(self, x):
        z = self.linear(x)
        return {"data": z.detach(), "kept": self.dropout(x).sum(dim=1)}


class Half(torch.nn.Module):
    def forward(self, x):
        return x.bfloat16()
"""


def onnx_file(folder: Path, name: str) -> Path:
    """Write one of the small models."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("onnx_bytes", Path(__file__).parent / "onnx_bytes.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    path = folder / f"{name.lower()}.onnx"
    path.write_bytes(getattr(module, name))
    return path


def linear(counts: Any) -> Any:
    """Compute what LINEAR does."""
    return counts @ np.arange(12, dtype=np.float32).reshape(6, 2) + np.array([0.5, -1], np.float32)


@pytest.mark.parametrize(("name", "batch_size"), [("LINEAR", 7), ("LINEAR", 512), ("BATCHES_OF_TEN", 512)])
def test_engine_computes_what_the_model_says(small: Any, tmp_path: Path, name: str, batch_size: int) -> None:
    """C53: `engine` gives the model's numbers for each cell, whatever the batches; a model for one size gets batches of it."""
    pytest.importorskip("onnxruntime")
    path = onnx_file(tmp_path, name)
    found = engine(path, small.query, tmp_path / "r", batch_size=batch_size)
    assert list(found.ids()) == small.uids
    assert np.allclose(found.to_numpy(), linear(small.counts))
    assert found.facts["result:model"] == str(path)
    assert len(found.facts["result:model_hash"]) == 64


def test_engine_feeds_inputs_by_name(small: Any, tmp_path: Path) -> None:
    """Several inputs take values and metadata codes by their names, in their dtypes; outputs become columns."""
    pytest.importorskip("onnxruntime")
    path = onnx_file(tmp_path, "TWO_INPUTS")
    found = engine(path, small.query, tmp_path / "r", inputs={"counts": "X", "kind": "kind"})
    assert [column.name for column in found.columns] == ["sum_out", "next"]
    assert np.array_equal(found.to_numpy(column="sum_out"), small.counts.sum(axis=1, dtype="f8"))
    assert np.array_equal(found.to_numpy(column="next"), small.obs["kind"].cat.codes + 1)


@pytest.mark.parametrize(
    ("name", "inputs", "error", "said"),
    [
        ("LINEAR", {"x": "X"}, NotFoundError, r"no input 'x'; it has \['genes'\]"),
        ("TWO_INPUTS", None, SourceError, r"inputs \['counts', 'kind'\]; say what each takes"),
        ("TWO_INPUTS", {"counts": "X"}, SourceError, "nothing is given for 'kind'"),
        ("TWO_INPUTS", {"counts": "X", "kind": "nobody"}, QueryError, "nobody"),
        ("TEXTS", None, SourceError, r"tensor\(string\)"),
    ],
)
def test_engine_refuses_other_inputs(
    small: Any, tmp_path: Path, name: str, inputs: dict[str, str] | None, error: type[Exception], said: str
) -> None:
    """An input that the model does not have, or that gets nothing, is refused by name before anything is written."""
    pytest.importorskip("onnxruntime")
    with pytest.raises(error, match=said):
        engine(onnx_file(tmp_path, name), small.query, tmp_path / "r", inputs=inputs)
    assert not (tmp_path / "r").exists()


def test_engine_refuses_other_widths_and_files(small: Any, tmp_path: Path) -> None:
    """Another number of features, a damaged file and a file that is not there are refused by name."""
    pytest.importorskip("onnxruntime")
    path = onnx_file(tmp_path, "LINEAR")
    with pytest.raises(SourceError, match="'genes' takes 6 features, and the query has 2"):
        engine(path, small.query.features("a", "b"), tmp_path / "r")
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(path.read_bytes()[:40])
    with pytest.raises(SourceError, match=r"damaged.onnx does not read"):
        engine(damaged, small.query, tmp_path / "r")
    with pytest.raises(NotFoundError, match="no file"):
        engine(tmp_path / "nowhere.onnx", small.query, tmp_path / "r")


def test_engine_names_its_extra(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ONNX Runtime the message names the extra to install."""
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"raggedatlas\[onnx\]"):
        engine(onnx_file(tmp_path, "LINEAR"), small.query, tmp_path / "r")


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    """A file with a module."""
    path = tmp_path / "encoder.py"
    path.write_text(ENCODER)
    return str(path)


@pytest.mark.parametrize("kind", [".pt", ".ckpt", ".safetensors"])
def test_modules_with_weights(small: Any, tmp_path: Path, encoder: str, kind: str) -> None:
    """A module by import path with saved weights computes in evaluation mode; a checkpoint's state is found in it."""
    torch = pytest.importorskip("torch")
    weights = tmp_path / f"weights{kind}"
    state = {"linear.weight": torch.arange(12.0).reshape(2, 6), "linear.bias": torch.tensor([0.5, -1.0])}
    if kind == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(state, weights)
    else:
        torch.save({"state_dict": state, "epoch": 3} if kind == ".ckpt" else state, weights)
    found = infer(
        f"{encoder}:Encoder", small.query, tmp_path / "r", weights=weights, options={"width": 6}, batch_size=10
    )
    expected = small.counts @ state["linear.weight"].numpy().T + state["linear.bias"].numpy()
    assert np.allclose(found.to_numpy(), expected)
    assert np.allclose(found.to_numpy(column="kept"), small.counts.sum(axis=1))
    assert len(found.facts["result:model_hash"]) == 64


def test_a_live_module_and_its_gradients(small: Any, tmp_path: Path) -> None:
    """A module at hand is taken as it is, and no gradients are kept."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(6, 3)
    found = infer(module, small.query, tmp_path / "r")
    with torch.no_grad():
        assert np.allclose(found.to_numpy(), module(torch.from_numpy(small.counts)).numpy(), atol=1e-6)


def test_modules_are_shared_by_processes(small: Any, tmp_path: Path, encoder: str) -> None:
    """Each process of a shared run opens the module and its weights by itself."""
    torch = pytest.importorskip("torch")
    weights = tmp_path / "w.pt"
    torch.save({"linear.weight": torch.ones(2, 6), "linear.bias": torch.zeros(2)}, weights)
    found = infer(f"{encoder}:Encoder", small.query, tmp_path / "r", weights=weights, options={"width": 6}, n_parts=2)
    assert list(found.ids()) == small.uids
    assert np.allclose(found.to_numpy()[:, 0], small.counts.sum(axis=1))


class Evil:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path("evil").touch, ()


def test_weights_that_do_not_read(small: Any, tmp_path: Path, encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged, foreign and malicious weights are refused by name, whole modules too, and no code in them runs."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    torch.save({"linear.weight": Evil()}, "evil.pt")
    torch.save(torch.nn.Linear(6, 2), "module.pt")
    torch.save([1, 2], "list.pt")
    torch.save({"other": torch.zeros(1)}, "other.pt")
    torch.save({"linear.weight": torch.zeros(2, 5), "linear.bias": torch.zeros(2)}, "narrow.pt")
    for name in ("junk.pt", "junk.safetensors"):
        Path(name).write_bytes(b"\x00" * 20)
    said = {
        "evil.pt": "evil.pt do not read",
        "module.pt": "whole pickled module is never read",
        "list.pt": "hold a list",
        "other.pt": "other.pt do not fit Encoder",
        "narrow.pt": "size mismatch for linear.weight",
        "junk.pt": "junk.pt do not read",
        "junk.safetensors": "junk.safetensors do not read",
    }
    if not __import__("importlib.util").util.find_spec("safetensors"):
        said.pop("junk.safetensors")
    for weights, words in said.items():
        with pytest.raises(SourceError, match=words):
            infer(f"{encoder}:Encoder", small.query, "r", weights=weights, options={"width": 6})
    with pytest.raises(NotFoundError, match="no file"):
        infer(f"{encoder}:Encoder", small.query, "r", weights="nowhere.pt", options={"width": 6})
    with pytest.raises(SourceError, match="cannot be made with the options"):
        infer(f"{encoder}:Encoder", small.query, "r", options={"height": 6})
    with pytest.raises(SourceError, match="bfloat16 has no NumPy dtype"):
        infer(f"{encoder}:Half", small.query, "r")
    assert not Path("evil").exists()
    with pytest.raises(NotFoundError):
        ResultDataset({}, "r")
