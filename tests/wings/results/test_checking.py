"""Checks of result folders: every byte that a reader needs is covered by a recorded checksum."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tests.command import ask

import raggedatlas as ra
from raggedatlas.errors import CorruptError, NotFoundError, QueryError
from raggedatlas.wings.results import save_to_database
from raggedatlas.wings.results.folder import CHECKSUMS
from raggedatlas.wings.results.validation import validate_results
from support.atlases import npy_run

N = 300


def written(folder: Path, ids: list[str] | None = None) -> Path:
    """Write results with a configuration and an index, and replace them once."""
    ids = [f"{i:03d}" for i in range(N)] if ids is None else ids
    for seed in range(2):
        with ra.ResultDatasetWriter(folder, overwrite=True) as writer:
            writer.original_dataset_config = {"seed": seed}
            values = np.random.default_rng(seed).normal(size=(len(ids), 4)).astype(np.float32)
            writer.write_batch(ids[:100], values[:100])
            writer.write_batch(ids[100:], values[100:])
    return folder


@pytest.mark.long
def test_nothing_is_wrong_with_what_was_written(tmp_path: Path) -> None:
    """Results that were written, replaced and indexed have no problem; nor have .npy results that read."""
    save_to_database(written(tmp_path / "r"), least_rows=0)
    assert validate_results(tmp_path / "r", "quick") == validate_results(tmp_path / "r") == []
    np.save(tmp_path / "batch_0.npy", np.array([("a", (1, 2))], [("id", "<U2"), ("tensor", "<f4", (2,))]))
    np.save(tmp_path / "batch_index.npy", np.array([("a", 0)], [("id", "<U2"), ("batch_num", "<i8")]))
    assert validate_results(tmp_path) == []


@pytest.mark.parametrize("kind", ["data", "_versions", "_indices", "toml"])
def test_a_changed_byte_is_found(kind: str, tmp_path: Path) -> None:
    """A byte of any file of the table, its versions, its indexes or the configuration that differs is named, whichever it is."""
    folder = written(tmp_path)
    save_to_database(folder, least_rows=0)
    every = [path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS]
    files = [path for path in every if (kind in path.parts or path.suffix == f".{kind}") and path.suffix != ".json"]
    assert files
    for path in files:
        good = path.read_bytes()
        for at in (0, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
            problems = validate_results(folder)
            name = path.relative_to(folder).as_posix()
            assert [p.rule for p in problems if p.path == name and p.level == "must"][:1] in (["R03"], ["R06"])
        path.write_bytes(good[:-1])
        assert "R02" in {p.rule for p in validate_results(folder, "quick")}
        path.write_bytes(good)
    assert validate_results(folder) == []


def test_npy_results_are_compared_with_their_index(tmp_path: Path) -> None:
    """Ids of .npy files that occur twice or differ from the index, and batches that do not fit together, are problems."""
    one = np.ones((2, 3), np.float32)
    good = [(["a", "b"], one), (["c", "d"], one)]
    repeated = npy_run(tmp_path / "repeated", [(["a", "b"], one), (["c", "a"], one)])
    other = npy_run(tmp_path / "other", good)
    records = np.load(other / "batch_1.npy")
    records["id"] = ["c", "c"]
    np.save(other / "batch_1.npy", records)
    numbers = npy_run(tmp_path / "numbers", good)
    np.save(numbers / "batch_1.npy", np.zeros(2, [("id", "<i8"), ("tensor", "<f4", (3,))]))
    for folder, said in ((repeated, "'a' more than once"), (other, "has the id 'c' twice"), (numbers, "ids of int64")):
        assert validate_results(folder, "quick") == []
        (problem,) = validate_results(folder)
        assert (problem.rule, problem.level) == ("R05", "must")
        assert said in problem.message
    shapes = npy_run(tmp_path / "shapes", [good[0], (["c", "d"], np.ones((2, 4), np.float32))])
    (problem,) = validate_results(shapes)
    assert (problem.rule, problem.level) == ("R01", "must")
    assert "results of shape (4,)" in problem.message
    np.save(shapes / "batch_1.npy", np.zeros(2, [("id", "<i8", (2,)), ("tensor", "<f4", (3,))]))
    (problem,) = validate_results(shapes, "quick")
    assert "expected one number or text per row" in problem.message


def test_damaged_results_are_not_added(tmp_path: Path) -> None:
    """An atlas refuses results of which a byte differs, before anything is written."""
    import anndata as ad

    atlas = ra.RaggedAtlas.create(str(tmp_path / "a.atlas"))
    cells = pd.DataFrame(index=[f"c{i}" for i in range(N)])
    atlas.add(ad.AnnData(np.ones((N, 2), np.float32), obs=cells, var=pd.DataFrame(index=["x", "y"])), "one")
    uids = list(atlas.checkout(atlas.snapshot()).query().to_pandas().index)
    folder = written(tmp_path / "r", uids)
    newest = max((folder / "lance_db" / "results.lance" / "data").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    good = newest.read_bytes()
    newest.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(CorruptError, match="differs from what was written"):
        atlas.add(ra.ResultDataset({}, folder), "z")
    assert list(atlas.results().index) == []
    newest.write_bytes(good)
    assert atlas.add(ra.ResultDataset({}, folder), "z").status == "added"


def test_results_without_records_are_read_and_said_to_be(tmp_path: Path) -> None:
    """Results of older versions have no records: they open, and validate says that their bytes cannot be compared."""
    folder = written(tmp_path)
    (folder / "lance_db" / CHECKSUMS).unlink()
    assert [(p.rule, p.level) for p in validate_results(folder)] == [("R04", "practice")]
    assert len(ra.ResultDataset({}, folder)) == N


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": [Infinity, ""]}', "[]", '{"a": 1}'])
def test_records_that_hold_anything_are_a_problem(tmp_path: Path, text: str) -> None:
    """Whatever damaged records hold, validation reports that they cannot be parsed."""
    folder = written(tmp_path)
    (folder / "lance_db" / CHECKSUMS).write_text(text)
    (problem,) = validate_results(folder)
    assert (problem.rule, problem.level) == ("R01", "must")
    assert "cannot be parsed" in problem.message


def test_what_cannot_be_checked_is_refused(tmp_path: Path) -> None:
    """A folder without results and an unknown level are refused by name."""
    with pytest.raises(NotFoundError):
        validate_results(tmp_path)
    with pytest.raises(QueryError, match="'quick' or 'deep'"):
        validate_results(tmp_path, "full")  # type: ignore[arg-type]


def test_the_command_validates_results(tmp_path: Path) -> None:
    """``validate RESULTS`` compares every byte: exit code 0 where all is well, 1 with the file named where not, 2 for a level of others."""
    folder = written(tmp_path)
    said = ask("validate", folder)
    assert (said.exit_code, said.stdout) == (0, "Nothing is wrong (deep).\n")
    for path in (folder / "lance_db" / "results.lance" / "data").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    said = ask("validate", folder, "--json")
    assert said.exit_code == 1
    assert json.loads(said.stdout)[0]["path"].startswith("lance_db/results.lance/data/")
    said = ask("validate", folder, "--level", "rows")
    assert said.exit_code == 2
    assert "quick or deep" in said.stderr
