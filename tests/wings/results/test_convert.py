"""Laws of converting ``.npy`` results: checked before, compared after, and the old files never touched."""

import hashlib
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.command import ask, done

from raggedatlas import InferenceDataSet, ResultDataset, ResultDatasetWriter, convert_results, load_results_dataset
from raggedatlas.errors import (
    AtlasError,
    CorruptError,
    DuplicateError,
    NotFoundError,
    QueryError,
    SourceError,
    StoreError,
)
from raggedatlas.wings.results import batch_writer, npy_results
from support.atlases import npy_run


def bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * np.dtype(dtype).itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def state_of(folder: Path) -> dict[str, str]:
    """Hash every file but those of the table."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() + str(path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "lance_db" not in path.parts
    }


def run_of(folder: Path, n_batches: int = 3, generation: str = "0.6", dtype: str = "float32") -> tuple[Path, Any, Any]:
    values = bits(dtype, (4 * n_batches, 2, 3), seed=3)
    ids = np.random.default_rng(1).permutation(10 * len(values))[: len(values)]
    batches = [(ids[4 * k : 4 * k + 4], values[4 * k : 4 * k + 4]) for k in range(n_batches)]
    return npy_run(folder, batches, generation), ids, values


@pytest.mark.parametrize("generation", ["0.2", "0.3", "0.6"])
def test_every_generation(tmp_path: Path, generation: str) -> None:
    """C61, C63, C64: twelve batches and more are converted in the order of their numbers, bit by bit; nothing else changes."""
    folder, ids, values = run_of(tmp_path, 12, generation)
    before = state_of(folder)
    steps: list[tuple[str, int, int]] = []
    made = convert_results(folder, progress=lambda *step: steps.append(step))
    assert (made.n_rows, made.n_batches, made.shape, made.dtype, made.n_verified) == (48, 12, (2, 3), np.float32, 48)
    dataset = load_results_dataset({}, folder)
    assert isinstance(dataset, ResultDataset)
    assert list(dataset.ids()) == [str(each) for each in ids]
    assert dataset.to_numpy().tobytes() == values.tobytes()
    assert (steps[11], steps[-1]) == (("write", 48, 48), ("compare", 48, 48))
    after = state_of(folder)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == ({"original_dataset_config.toml"} if generation == "0.2" else set())
    assert "compared all" in str(made)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4", ">i8", "int16", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(), (5,), (2, 1, 2)])
def test_bits_survive(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    """C65, R6: NaN, infinities, denormals and all other bits, of any dtype, byte order and shape."""
    values = bits("uint8", (5, *shape)) % 2 == 1 if dtype == "bool" else bits(dtype, (5, *shape))
    folder = npy_run(tmp_path, [(list("abc"), values[:3]), (list("de"), values[3:])])
    assert convert_results(folder).dtype == np.dtype(dtype).newbyteorder("=")
    native = values.astype(np.dtype(dtype).newbyteorder("="))
    assert ResultDataset({}, folder).to_numpy().tobytes() == native.tobytes()


@pytest.mark.parametrize(
    ("ids", "expected"),
    [([3, 1], ["3", "1"]), ([b"x", b"yy"], ["x", "yy"]), (["\u65e5\u672c", "\u00fc"], ["\u65e5\u672c", "\u00fc"])],
)
def test_ids_become_text(tmp_path: Path, ids: Any, expected: list[str]) -> None:
    """C65: ids that are numbers, bytes or any text become text, and stay with their values."""
    folder = npy_run(tmp_path, [(ids, np.array([[1.0], [2.0]]))])
    convert_results(folder)
    dataset = ResultDataset({}, folder)
    assert dict(zip(dataset.ids(), dataset.to_numpy()[:, 0].tolist(), strict=True)) == dict(
        zip(expected, [1.0, 2.0], strict=True)
    )


def bad_run(folder: Path, what: str) -> Path:
    one = np.ones((2, 3), np.float32)
    plain = [(["a", "b"], one), (["c", "d"], 2 * one)]
    if what == "repeated":
        return npy_run(folder, [(["a", "b"], one), (["c", "a"], one)])
    if what in {"complex64", "S3", "V5"}:
        return npy_run(folder, [(["a", "b"], np.zeros((2, 3), what))])
    if what == "dtypes":
        return npy_run(folder, [plain[0], (["c", "d"], one.astype(np.float64))])
    if what == "shapes":
        return npy_run(folder, [plain[0], (["c", "d"], np.ones((2, 4), np.float32))])
    if what == "zero":
        return npy_run(folder, [(["a", "b"], np.ones((2, 0)))])
    damage(npy_run(folder, plain), what)
    return folder


def damage(folder: Path, what: str) -> None:
    batch = folder / "batch_1.npy"
    if what == "missing":
        batch.unlink()
    elif what == "short":
        np.save(batch, np.load(batch)[:1])
    elif what == "truncated":
        batch.write_bytes(batch.read_bytes()[:-1])
    elif what == "extra":
        np.save(folder / "batch_7.npy", np.load(batch))
    elif what == "other ids":
        records = np.load(batch)
        records["id"][1] = "z"
        np.save(batch, records)
    elif what == "swapped":
        (folder / "batch_0.npy").rename(folder / "kept")
        batch.rename(folder / "batch_0.npy")
        (folder / "kept").rename(batch)
    elif what == "twice":
        records = np.load(batch)
        records["id"][1] = "c"
        np.save(batch, records)
    elif what == "unsorted":
        np.save(folder / "batch_index.npy", np.load(folder / "batch_index.npy")[::-1])
    elif what == "index":
        (folder / "batch_index.npy").unlink()
    elif what == "empty":
        np.save(folder / "batch_index.npy", np.load(folder / "batch_index.npy")[:0])
        batch.unlink()
        (folder / "batch_0.npy").unlink()


BAD = {
    "repeated": r"the id 'a' more than once \(batch 0, row 0; batch 1, row 1\)", "complex64": "complex64", "S3": r"\|?S3", "V5": "V5|void", "zero": "contains no values",
    "dtypes": r"batch_1\.npy holds float64, but batch 0 holds float32.*promote=True", "shapes": r"batch_1\.npy holds results of shape",
    "missing": "lacks the file of batch 1", "short": r"batch_1\.npy has 1 rows", "truncated": r"batch_1\.npy \(batch 1\) has .* truncated or damaged: row 1 is incomplete",
    "extra": "files of batch 7", "other ids": r"batch_1\.npy, row 1: batch_index\.npy does not list the id 'z'", "swapped": r"row 0: .* not list the id 'c' for batch 0",
    "unsorted": r"batch_index\.npy is not sorted", "twice": r"batch_1\.npy, row 1: the file has the id 'c' twice", "index": r"no batch_index\.npy", "empty": "holds no batch",
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_runs_are_refused_before_writing(tmp_path: Path, what: str) -> None:
    """C61, C63, C65: what cannot be converted is refused by name, and nothing is written."""
    folder = bad_run(tmp_path / "run", what)
    before = state_of(folder)
    with pytest.raises(AtlasError, match=BAD[what]) as caught:
        convert_results(folder)
    assert isinstance(caught.value, SourceError | CorruptError | NotFoundError)
    assert not (folder / "lance_db").exists()
    assert state_of(folder) == before


def test_dtypes_may_be_promoted(tmp_path: Path) -> None:
    """C65: batches of different dtypes are stored in one that holds all, when that is asked for."""
    folder = npy_run(tmp_path, [(["a"], np.ones((1, 2), np.float16)), (["b"], np.full((1, 2), 0.1)), (["c"], np.full((1, 2), 7, np.int32))])  # fmt: skip
    assert convert_results(folder, promote=True).dtype == np.float64
    assert ResultDataset({}, folder).to_numpy()[:, 0].tolist() == [1.0, 0.1, 7.0]


def test_a_second_run_is_refused(tmp_path: Path) -> None:
    """C65: results that are converted are not converted again unasked; with overwrite they are."""
    folder, _, values = run_of(tmp_path)
    convert_results(folder)
    with pytest.raises(DuplicateError):
        convert_results(folder)
    before = state_of(folder)
    assert convert_results(folder, overwrite=True, spot_check=5).n_verified == 5
    assert ResultDataset({}, folder).to_numpy().tobytes() == values.tobytes()
    assert state_of(folder) == before
    with pytest.raises(QueryError, match="spot_check=0"):
        convert_results(folder, overwrite=True, spot_check=0)


@pytest.mark.long
@pytest.mark.parametrize("place", [0.3, 0.6])
def test_a_wrong_byte_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: float) -> None:
    """C63, R6: a byte that changes between writing and reading back is found; nothing is committed, and the old files serve."""
    folder, _, _ = run_of(tmp_path, 400)
    finish = batch_writer.FragmentWriter.finish

    def finish_badly(self: Any) -> Any:
        made = finish(self)
        path = self.folder / made[0].name
        content = bytearray(path.read_bytes())
        content[int(place * 1600 * 24)] ^= 16
        path.write_bytes(content)
        return made

    monkeypatch.setattr(batch_writer.FragmentWriter, "finish", finish_badly)
    with pytest.raises((CorruptError, StoreError), match=r"differ from the \.npy files|corrupt"):
        convert_results(folder)
    with pytest.warns(DeprecationWarning, match="convert-results"):
        assert isinstance(load_results_dataset({}, folder), InferenceDataSet)
    monkeypatch.undo()
    assert convert_results(folder).n_verified == 1600


def test_a_long_index_is_walked_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C62, C63: an index of many blocks is counted, and ids that stand twice across two blocks are found."""
    monkeypatch.setattr(npy_results, "_BLOCK", 3)
    folder, ids, _ = run_of(tmp_path / "a")
    convert_results(folder)
    assert list(ResultDataset({}, folder).ids()) == [str(each) for each in ids]
    one = np.ones((4, 1))
    for twice in range(7):
        names = [min(each, each - (each > twice)) for each in range(8)]
        bad = npy_run(tmp_path / f"b{twice}", [(names[:4], one), (names[4:], one)])
        with pytest.raises(SourceError, match=f"the id '{twice}' more than once"):
            convert_results(bad)


def test_large_batches_are_walked_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C62: a batch is taken in pieces of bounded size, and small batches beside it in memory that does not grow with their number."""
    monkeypatch.setattr(npy_results, "_CHUNK_BYTES", 2000)
    folder, ids, values = run_of(tmp_path / "a", 100)
    big = npy_run(tmp_path / "b", [(np.arange(5000), bits("float64", (5000, 100)))])
    assert convert_results(folder).n_verified == 400
    assert ResultDataset({}, folder).to_numpy().tobytes() == values.tobytes()
    assert list(ResultDataset({}, folder).ids()) == [str(each) for each in ids]
    monkeypatch.setattr(npy_results, "_CHUNK_BYTES", 2**17)
    tracemalloc.start()
    convert_results(big)
    assert tracemalloc.get_traced_memory()[1] < 5000 * 800 / 2
    tracemalloc.stop()


def test_what_is_read_back_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C62: files are read back in pieces of bounded size, whole or some rows of them: Lance alone would hold as much as memory does."""
    values = bits("float64", (3000, 64))
    monkeypatch.setattr(batch_writer, "MAX_ROWS", 1100)
    monkeypatch.setattr(batch_writer, "_READ_BYTES", 50_000)
    rows = np.arange(5, 3000, 7)
    with ResultDatasetWriter(tmp_path) as writer:
        writer.write_batch(range(3000), values)
        for chosen, expected in ((None, values), (rows, values[rows])):
            read = list(writer.read_back(["data"], chosen))
            assert max(batch.nbytes for batch in read) <= 52_000
            assert sum(batch.num_rows for batch in read) == len(expected)
            flat = [batch.column(0).flatten().to_numpy() for batch in read]
            assert np.concatenate(flat).tobytes() == expected.tobytes()


@pytest.mark.long
@pytest.mark.parametrize("step", ["write", "compare"])
def test_a_killed_conversion(tmp_path: Path, step: str) -> None:
    """C66: killed while it writes or compares, the .npy files serve as before; a second conversion succeeds."""
    folder, _, values = run_of(tmp_path)
    before = state_of(folder)
    code = (
        "import os, sys\nfrom raggedatlas import convert_results\n"
        "convert_results(sys.argv[1], progress=lambda step, *_: step == sys.argv[2] and os.kill(os.getpid(), 9))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder), step], check=False).returncode == -9
    assert state_of(folder) == before
    with pytest.warns(DeprecationWarning, match="convert-results"):
        served = load_results_dataset({}, folder)
    assert isinstance(served, InferenceDataSet)
    assert len(served) == 12
    convert_results(folder)
    assert ResultDataset({}, folder).to_numpy().tobytes() == values.tobytes()
    assert len(list((folder / "lance_db/results.lance/data").iterdir())) == 1


def test_the_command(tmp_path: Path) -> None:
    """C60, C64: the command converts and says so, or complains in one line with exit code 1."""
    folder, _, _ = run_of(tmp_path / "run")
    said = done("convert_results", "--results-dir", folder)
    assert "Converted 12 results of shape (2, 3) and dtype float32 from 3 .npy files" in said
    assert "unchanged" in said
    again = ["convert_results", "--results-dir", str(folder), "--json"]
    refused = ask(*again)
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
    said = json.loads(done(*again, "--overwrite", "--spot-check", "3", "--promote"))
    assert (said["n_verified"], said["dtype"]) == (3, "float32")
    assert ask("convert_results").exit_code == 2
