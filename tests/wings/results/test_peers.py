"""The public package as an oracle, both ways: what it writes we read, and what we write it reads.

Asked for by ``-m peers``; needs the environment that ``benchmarks/peers.sh results`` makes.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raggedatlas import DataProvider, InferenceDataSet, ResultDataset, ResultDatasetWriter, convert_results
from support.atlases import npy_run

ROOT = Path(__file__).parents[3]
VENV = ROOT / ".venv-peers-hyrax"
NPY = "0.6.10"
SCRIPT = Path(__file__).with_name("peer_hyrax.py")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (VENV / "bin" / "python").exists(), reason="hyrax is not installed; benchmarks/peers.sh results installs it"
    ),
]


def hyrax(verb: str, *paths: Path, release: str | None = None) -> None:
    """Run the public package; its complaint is the failure."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"PYTHONPATH": str(VENV / f"hyrax-{release}")} if release else {}
    command = [str(VENV / "bin" / "python"), "-W", "ignore", str(SCRIPT), verb, *map(str, paths)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=paths[0].parent)
    assert run.returncode == 0, run.stderr[-2000:]


def values_of(dtype: str, *shape: int) -> Any:
    values = (np.random.default_rng(3).standard_normal(shape) * 40).astype(dtype)
    if dtype.startswith("float"):
        values.reshape(-1)[[0, 7]] = [np.nan, -np.inf]
    return values


IDS = np.array([f"cell{i * 7919 % 1000}" for i in range(50)])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_it_reads_what_we_write(tmp_path: Path, dtype: str) -> None:
    """C46: hyrax 0.13 opens a table of ours, metadata of our own included, and gives every row and id bit by bit."""
    values = values_of(dtype, 50, 3, 4)
    with ResultDatasetWriter(tmp_path / "run", facts={"model_hash": "abc"}) as writer:
        writer.write_batch(IDS[:20], values[:20])
        writer.write_batch(IDS[20:], values[20:])
    hyrax("read", tmp_path / "run", tmp_path / "out.npz")
    found = np.load(tmp_path / "out.npz")
    assert found["ids"].tolist() == IDS.tolist()
    for name in ("data", "one"):
        assert found[name].dtype == values.dtype
        assert found[name].tobytes() == values[found["rows"]].tobytes()


def test_it_reads_our_other_outputs(tmp_path: Path) -> None:
    """C46: a table with several outputs and none called data is read with all of them."""
    outputs = {"latent": values_of("float64", 50, 8), "label": np.arange(50)}
    with ResultDatasetWriter(tmp_path / "run") as writer:
        writer.write_batch(IDS, outputs)
    hyrax("read", tmp_path / "run", tmp_path / "out.npz")
    found = np.load(tmp_path / "out.npz")
    for name, values in outputs.items():
        assert found[name].tobytes() == values[found["rows"]].tobytes()


def test_we_read_what_it_writes(tmp_path: Path) -> None:
    """C45: a table of hyrax 0.13, of one output and of several, is read with every row and id bit by bit."""
    for place, outputs in {
        "one": {"data": values_of("float32", 50, 5, 2)},
        "several": {"latent": values_of("float16", 50, 300), "label": np.arange(50)},
    }.items():
        np.savez(tmp_path / "in.npz", ids=IDS, **outputs)
        hyrax("write", tmp_path / place, tmp_path / "in.npz")
        dataset = ResultDataset({}, tmp_path / place)
        assert list(dataset.ids()) == IDS.tolist()
        rows = np.random.default_rng(1).permutation(50)
        for name, values in outputs.items():
            found = getattr(dataset, f"get_{name}")(rows)
            assert found.dtype == values.dtype
            assert found.reshape(50, -1).tobytes() == values[rows].reshape(50, -1).tobytes()


@pytest.mark.parametrize("release", ["0.7.0", "0.8.3", "0.9.0", "0.10", "0.11", "0.12"])
def test_we_read_what_older_releases_wrote(tmp_path: Path, release: str) -> None:
    """C45: a table of each release before 0.13 is read with every row, id, dtype and shape bit by bit; those before 0.9 write no NaN."""
    if not (VENV / f"hyrax-{release}").exists():
        pytest.skip(f"hyrax {release} is not installed; benchmarks/peers.sh results installs it")
    values = values_of("float32", 50, 5, 2)
    if release in {"0.7.0", "0.8.3"}:
        values = np.nan_to_num(values)
    np.savez(tmp_path / "in.npz", ids=IDS, data=values)
    hyrax("write", tmp_path / "run", tmp_path / "in.npz", release=release)
    dataset = ResultDataset({}, tmp_path / "run")
    assert list(dataset.ids()) == IDS.tolist()
    assert dataset.to_numpy().shape == values.shape
    assert dataset.to_numpy().dtype == values.dtype
    assert dataset.to_numpy().tobytes() == values.tobytes()
    rows = np.random.default_rng(1).permutation(50)
    assert dataset[rows].tobytes() == values[rows].tobytes()


def test_it_joins_as_we_do(tmp_path: Path) -> None:
    """C92: a data request over two tables gives the same rows, ids and mask as hyrax 0.13's."""
    left, right = values_of("float32", 50, 3), values_of("float32", 40, 2)
    for place, ids, values in (
        ("left", IDS, left),
        ("right", np.append(IDS[::-1][:35], ["x1", "x2", "x3", "x4", "x5"]), right),
    ):
        with ResultDatasetWriter(tmp_path / place) as writer:
            writer.write_batch(ids, values)
    hyrax("provide", tmp_path, tmp_path / "out.npz")
    theirs = np.load(tmp_path / "out.npz")
    common = {"dataset_class": "ResultDataset", "fields": ["data"]}
    batch = DataProvider({}, {
        "left": {**common, "data_location": tmp_path / "left", "primary_id_field": "object_id"},
        "right": {**common, "data_location": tmp_path / "right", "join_field": "object_id"},
    }).batch(slice(None))  # fmt: skip
    assert batch["object_id"].tolist() == theirs["ids"].tolist()
    assert batch["right__matched"].tolist() == theirs["matched"].tolist()
    assert batch["left"]["data"].tobytes() == theirs["left"].tobytes()
    assert batch["right"]["data"].tobytes() == theirs["right"].tobytes()


@pytest.mark.parametrize("ids", [IDS, np.arange(50)[::-1] * 3])
def test_we_read_its_npy_files(tmp_path: Path, ids: Any) -> None:
    """C45, C63, C70: what 0.6.10 wrote is read as 0.6.10 reads it, and converted bit by bit in the order it was written."""
    values = values_of("float32", 50, 2, 3)
    np.savez(tmp_path / "in.npz", ids=ids, data=values)
    hyrax("write_npy", tmp_path / "run", tmp_path / "in.npz", release=NPY)
    hyrax("read_npy", tmp_path / "run", tmp_path / "out.npz", release=NPY)
    theirs = np.load(tmp_path / "out.npz")
    with pytest.warns(DeprecationWarning, match="convert-results"):
        ours = InferenceDataSet({}, tmp_path / "run")
    assert list(ours.ids()) == theirs["ids"].tolist()
    for found, expected in (
        (ours[theirs["rows"]], theirs["data"]), (ours[theirs["rows"]], theirs["one"]), (ours[-1], theirs["last"]),
    ):  # fmt: skip
        assert np.asarray(found).dtype == expected.dtype
        assert np.array_equal(np.asarray(found), expected, equal_nan=True)
    assert ours.original_config["data_set"]["name"] == "HyraxRandomDataset"
    assert convert_results(tmp_path / "run").n_verified == 50
    dataset = ResultDataset({}, tmp_path / "run")
    assert list(dataset.ids()) == ids.astype(str).tolist()
    assert dataset.to_numpy().tobytes() == values.tobytes()


def test_our_npy_files_are_its(tmp_path: Path) -> None:
    """The .npy files that the tests make are byte for byte those of 0.6.10."""
    values = values_of("float32", 50, 4)
    np.savez(tmp_path / "in.npz", ids=IDS, data=values)
    hyrax("write_npy", tmp_path / "theirs", tmp_path / "in.npz", release=NPY)
    split = np.array_split(np.arange(50), 3)
    npy_run(tmp_path / "ours", [(IDS[rows], values[rows]) for rows in split])
    for path in sorted((tmp_path / "theirs").glob("*.npy")):
        assert path.read_bytes() == (tmp_path / "ours" / path.name).read_bytes(), path.name
