"""Laws of results written by several processes: one commit, every object once, and nothing of a run that fails."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import lance
import numpy as np
import pytest

from raggedatlas import ResultDataset, ResultDatasetWriter
from raggedatlas.errors import (
    AtlasError,
    ConflictError,
    CorruptError,
    DuplicateError,
    NotFoundError,
    QueryError,
    ReadOnlyError,
    SourceError,
)
from raggedatlas.wings.results.writer import ResultPart
from support.processes import started

CHILD = (
    "import pickle, sys, numpy as np\n"
    "part = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
    "with part.writer() as writer:\n"
    "    for batch in range(3):\n"
    "        rows = np.arange(part.number, 30, 3)[4 * batch : 4 * batch + 4]\n"
    "        writer.write_batch([f'cell{row}' for row in rows], np.outer(rows, [1, 2]).astype(np.float32))\n"
)


def data_of(folder: Path) -> list[Path]:
    return sorted((folder / "lance_db" / "results.lance" / "data").glob("*"))


def filled(part: ResultPart, *ids: str, dtype: str = "float64") -> None:
    with part.writer() as writer:
        writer.write_batch(ids, np.ones((len(ids), 2), dtype))


@pytest.mark.nightly
def test_processes_write_one_table(tmp_path: Path) -> None:
    """Three processes write every third row; one commit has each row once, in the order of the parts, and no trace else."""
    with ResultDatasetWriter(tmp_path) as writer:
        parts = writer.parts(3)
        with ExitStack() as stack:
            children = [
                stack.enter_context(started([sys.executable, "-c", CHILD, pickle.dumps(part).hex()]))
                for part in reversed(parts)
            ]
            told = [child.communicate()[1] for child in children]
        assert [child.returncode for child in children] == [0, 0, 0], told
        with pytest.raises(NotFoundError, match="incomplete"):
            ResultDataset({}, tmp_path)
    dataset = ResultDataset({}, tmp_path)
    rows = np.concatenate([np.arange(k, 30, 3) for k in range(3)])
    assert list(dataset.ids()) == [f"cell{row}" for row in rows]
    assert dataset.to_numpy().tolist() == np.outer(rows, [1, 2]).tolist()
    table = lance.dataset(str(tmp_path / "lance_db" / "results.lance"))
    assert (len(table.versions()), len(table.get_fragments()), len(writer)) == (1, 3, 30)
    assert {path.name for path in (tmp_path / "lance_db").iterdir()} == {"results.lance", "checksums.json"}


def test_the_writer_may_take_part(tmp_path: Path) -> None:
    """Batches of the run's own writer come first; parts may be asked for again, and one may have nothing."""
    with ResultDatasetWriter(tmp_path) as writer:
        filled(writer.parts(1)[0], "b")
        writer.write_batch(["a"], np.ones((1, 2)))
        more = writer.parts(2)
        assert [part.number for part in more] == [1, 2]
        filled(more[1], "c")
        with more[0].writer() as nothing:
            nothing.write_batch([], [])
    assert list(ResultDataset({}, tmp_path).ids()) == ["a", "b", "c"]


def test_an_empty_part_tells_the_shape(tmp_path: Path) -> None:
    """Where no part has a row, one that knows the shape makes an empty table."""
    with ResultDatasetWriter(tmp_path) as writer, writer.parts(1)[0].writer() as part:
        part.write_batch([], np.empty((0, 4), np.float16))
    assert ResultDataset({}, tmp_path).to_numpy().shape == (0, 4)


def test_unfinished_parts_are_waited_for(tmp_path: Path) -> None:
    """A commit before all parts are finished is refused with their numbers, and succeeds afterwards."""
    writer = ResultDatasetWriter(tmp_path)
    parts = writer.parts(3)
    filled(parts[1], "b")
    with pytest.raises(ConflictError, match=r"Parts \[0, 2\]"):
        writer.commit()
    abandoned = parts[0].writer()
    abandoned.write_batch(["lost"], np.zeros((1, 2)))
    list(abandoned.read_back())  # finishes its file
    filled(parts[0], "a")
    filled(parts[2], "c")
    writer.commit()
    assert list(ResultDataset({}, tmp_path).ids()) == ["a", "b", "c"]
    assert len(data_of(tmp_path)) == 3


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda part: filled(part, "x", "a"), "Part 1, row 1: the id 'a' already has a result"),
        (lambda part: filled(part, "x", dtype="float32"), "Part 1: output 'data' has shape"),
        (lambda part: data_of(Path(part.result_dir))[0].unlink() or filled(part, "x"), "missing or has another size"),
        (lambda part: part.receipt.write_text("{"), "cannot be parsed"),
        (lambda part: part.receipt.write_text(json.dumps({"columns": [], "files": [{}]})), "cannot be parsed"),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, second: Callable[[ResultPart], object], message: str) -> None:
    """An id in two parts, other outputs, lost files and a broken receipt give the run up by name: no table, no files."""
    writer = ResultDatasetWriter(tmp_path)
    parts = writer.parts(2)
    filled(parts[0], "a")
    second(parts[1])
    with pytest.raises(AtlasError, match=message) as caught:
        writer.commit()
    assert isinstance(caught.value, SourceError | CorruptError)
    assert data_of(tmp_path) == []
    assert not (tmp_path / "lance_db" / ".parts").exists()
    with ResultDatasetWriter(tmp_path) as again:
        again.write_batch(["a"], np.ones((1, 2)))
    assert len(ResultDataset({}, tmp_path)) == 1


def test_a_part_is_written_once(tmp_path: Path) -> None:
    """Of two processes that write the same part, the second to finish is refused and its files go."""
    writer = ResultDatasetWriter(tmp_path)
    part = writer.parts(1)[0]
    second = part.writer()
    second.write_batch(["late"], np.ones((1, 2)))
    filled(part, "first")
    with pytest.raises(DuplicateError, match="already been written"):
        second.commit()
    with pytest.raises(DuplicateError, match="already been written"):
        part.writer()
    writer.commit()
    assert list(ResultDataset({}, tmp_path).ids()) == ["first"]
    assert len(data_of(tmp_path)) == 1


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_part_of_a_run_that_ended(tmp_path: Path, end: str) -> None:
    """When the run has ended a part can neither begin nor finish, and leaves no files."""
    with ResultDatasetWriter(tmp_path) as writer:
        writer.write_batch(["old"], np.zeros((1, 2)))
    writer = ResultDatasetWriter(tmp_path, overwrite=True, grace=timedelta(0))
    part = writer.parts(1)[0]
    late = part.writer()
    if end == "abort":
        late.write_batch(["x"], np.ones((1, 2)))
        writer.abort()
    else:
        filled(part, "new")
        writer.commit()
    with pytest.raises((NotFoundError, DuplicateError)):
        late.commit()
    with pytest.raises(NotFoundError, match="has ended"):
        part.writer()
    with pytest.raises(ReadOnlyError):
        late.commit()
    assert list(ResultDataset({}, tmp_path).ids()) == (["old"] if end == "abort" else ["new"])
    assert len(data_of(tmp_path)) == 1
    with pytest.raises(ReadOnlyError):
        writer.parts(1)


@pytest.mark.long
def test_a_run_that_was_killed_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """What a killed run with parts left is removed by the next writer."""
    code = (
        "import os, sys, numpy as np\nfrom raggedatlas import ResultDatasetWriter\n"
        "part = ResultDatasetWriter(sys.argv[1]).parts(2)[0]\n"
        "with part.writer() as share:\n    share.write_batch(['a'], np.ones((1, 2)))\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert len(data_of(tmp_path)) == 1
    with ResultDatasetWriter(tmp_path) as writer:
        assert data_of(tmp_path) == []
        assert not (tmp_path / "lance_db" / ".parts").exists()
        with pytest.raises(QueryError, match="at least one"):
            writer.parts(0)
        writer.write_batch(["b"], np.ones((1, 2)))
    assert list(ResultDataset({}, tmp_path).ids()) == ["b"]


def test_finishing_twice_does_nothing(tmp_path: Path) -> None:
    """A part that is finished stays finished; one that was given up cannot be."""
    with ResultDatasetWriter(tmp_path) as writer:
        parts = writer.parts(2)
        share = parts[0].writer()
        share.commit()
        share.commit()
        given_up = parts[1].writer()
        given_up.abort()
        with pytest.raises(ReadOnlyError, match="aborted"):
            given_up.commit()
        filled(parts[1], "a")
    assert len(ResultDataset({}, tmp_path)) == 1
