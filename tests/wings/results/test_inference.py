"""`infer`: a model over a query, each cell once, in any batches and parts; what it refuses; what a kill leaves."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raggedatlas import ResultDataset, ResultDatasetWriter
from raggedatlas.errors import DuplicateError, NotFoundError, QueryError, SourceError, StoreError
from raggedatlas.wings.results import batch_writer, infer, infer_part
from raggedatlas.wings.results.commands import result_folder
from raggedatlas.wings.viewer.scene import match_ids
from support.processes import dask_workers, started

HERE = Path(__file__).parent / "models_here.py"


def equal_to_reference(found: ResultDataset, small: Any) -> bool:
    """Compare results of `sums` with the same function applied to `to_anndata`, cell by cell."""
    same = np.array_equal(found.to_numpy(), small.counts / 2)
    return same and np.array_equal(found.to_numpy(column="total"), small.counts.sum(axis=1))


@pytest.mark.parametrize("batch_size", [1, 7, 64, 512])
@pytest.mark.parametrize("n_parts", [1, 2, 5])
def test_results_are_those_of_the_function(small: Any, tmp_path: Path, batch_size: int, n_parts: int) -> None:
    """C53: the results of a run are the function applied to the rows of `to_anndata`, by uid and in order, however shared."""
    with ThreadPoolExecutor(2) as executor:
        found = infer(
            f"{HERE}:sums", small.query, tmp_path / "r", batch_size=batch_size, n_parts=n_parts, executor=executor
        )
    assert list(found.ids()) == small.uids
    assert equal_to_reference(found, small)
    assert found.version == 1


@pytest.mark.long
def test_processes_share_a_run(small: Any, tmp_path: Path) -> None:
    """Spawned processes write one table, each cell once, and tell how far they are."""
    told: list[tuple[str, int, int]] = []
    found = infer(f"{HERE}:sums", small.query, tmp_path / "r", n_parts=2, progress=lambda *step: told.append(step))
    assert list(found.ids()) == small.uids
    assert equal_to_reference(found, small)
    assert told[0] == ("cells", 0, 73)
    assert told[-1] == ("cells", 73, 73)


@pytest.mark.nightly
def test_dask_shares_a_run(small: Any, tmp_path: Path) -> None:
    """Workers of a dask cluster give the table of one process bit for bit; without n_parts the run is cut by itself."""
    pytest.importorskip("distributed")
    local = infer(f"{HERE}:sums", small.query, tmp_path / "local", batch_size=1)
    with dask_workers() as executor:
        found = infer(f"{HERE}:sums", small.query, tmp_path / "shared", batch_size=1, executor=executor)
    assert list(found.ids()) == list(local.ids())
    assert found.to_numpy().tobytes() == local.to_numpy().tobytes()


def test_ranks_share_a_run(small: Any, tmp_path: Path) -> None:
    """Ranks that each write their own part make the table of one process, also where some have no cell."""
    few = small.query.limit(3)
    writer = ResultDatasetWriter(tmp_path / "r")
    parts = writer.parts(5)
    counts = [infer_part(f"{HERE}:sums", few, part, 5, batch_size=2) for part in reversed(parts)]
    with pytest.raises(NotFoundError):
        ResultDataset({}, tmp_path / "r")
    writer.commit()
    assert sum(counts) == 3
    assert list(ResultDataset({}, tmp_path / "r").ids()) == small.uids[:3]


def test_more_parts_than_cells(small: Any, tmp_path: Path) -> None:
    """A run of fewer cells than parts has them all."""
    with ThreadPoolExecutor(1) as executor:
        found = infer(lambda X: X, small.query.limit(2), tmp_path / "r", n_parts=4, executor=executor)
    assert list(found.ids()) == small.uids[:2]


@pytest.mark.nightly
def test_options_inputs_and_names(small: Any, tmp_path: Path) -> None:
    """A class is made with its options, gets what `inputs` chooses, and a tuple of outputs takes the given names."""
    scaled = infer(f"{HERE}:Scaled", small.query, tmp_path / "a", options={"by": 3.0})
    assert np.array_equal(scaled.to_numpy(), small.counts * 3)
    both = infer(
        lambda batch: (batch.X, batch.obs["kind"]), small.query, tmp_path / "b",
        inputs=lambda batch: batch, obs=["kind"], outputs=["values", "kind"], as_="dense",
    )  # fmt: skip
    assert np.array_equal(both.to_numpy(column="kind"), small.obs["kind"].cat.codes)
    few = infer(lambda X: X.sum(axis=1), small.query, tmp_path / "c", features=["d", "a"], as_="csr")
    assert np.allclose(few.to_numpy(), small.query.features("d", "a").to_anndata().X.sum(axis=1).A1)


def test_results_say_where_they_come_from(small: Any, tmp_path: Path) -> None:
    """The table names verb, model, atlas, snapshot and query, and the folder keeps the configuration of the data (C23)."""
    found = infer(f"{HERE}:sums", small.query.where({"tissue": "lung"}), tmp_path / "r")
    facts = found.facts
    assert facts["result:verb"] == "infer"
    assert facts["result:model"] == f"{HERE}:sums"
    assert (facts["atlas:uri"], facts["atlas:version"]) == (str(small.folder), "1")
    assert "tissue" in facts["atlas:query"]
    assert str(small.folder) in (tmp_path / "r" / "original_dataset_config.toml").read_text()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda X: X[:-1], r"Batch 0: the model gave 9 rows for 10 cells in the output 'data'; row 9 is missing"),
        (lambda X: np.vstack([X, X[:1]]), r"Batch 0: .* row 10 is one too many"),
        (lambda X: X[:, : 2 if len(X) == 10 else 1], r"Batch 7: .*shape \(1,\).*cells 70 to 72"),
        (lambda X: X.astype("f8" if X[0, 0] < 0 or len(X) < 10 else "f4"), r"Batch 7: .*float64"),
        (lambda X: np.array([1.0] * 4 + ["x"] * (len(X) - 4), object), r"Batch 0, row 4: .*object array \(str\)"),
        (
            lambda X: np.array([[1.0, 2.0]] * 6 + [[1.0, None]] * (len(X) - 6), object),
            r"Batch 0, row 6: .*object array \(NoneType\)",
        ),
        (lambda X: [[1]] * (len(X) - 1) + [[1, 2]], r"Batch 0, row 9: .*shape \(2,\)"),
        (lambda X: (X, X), "tuple of 2"),
        (lambda X: {"a": X} if len(X) == 10 else {"b": X}, r"Batch 7 has outputs \['b'\]"),
        (lambda X: X.astype("c8"), "complex64"),
        (lambda X: None, "expected one row per object"),
    ],
)
def test_what_cannot_be_stored_is_refused(small: Any, tmp_path: Path, model: Callable[[Any], Any], said: str) -> None:
    """Wrong numbers of rows, objects, changed shapes, dtypes and outputs are refused by batch and cells; nothing is visible."""
    with pytest.raises(SourceError, match=said):
        infer(model, small.query, tmp_path / "r", batch_size=10)
    with pytest.raises(NotFoundError):
        ResultDataset({}, tmp_path / "r")
    assert len(infer(lambda X: X, small.query, tmp_path / "r")) == 73


def test_an_error_of_the_model_says_where(small: Any, tmp_path: Path) -> None:
    """What a model raises comes through, with the batch and the cells noted; in a part too."""

    def fail(X: Any) -> Any:
        if len(X) < 10:
            raise ZeroDivisionError
        return X

    for n_parts in (1, 2):
        with ThreadPoolExecutor(1) as executor, pytest.raises(ZeroDivisionError) as error:
            infer(fail, small.query, tmp_path / "r", batch_size=10, n_parts=n_parts, executor=executor)
        assert "cells 70 to 72" in error.value.__notes__[0]
        with pytest.raises(NotFoundError):
            ResultDataset({}, tmp_path / "r")


@pytest.mark.parametrize(
    ("model", "choices", "error", "said"),
    [
        ("no_such_module:f", {}, NotFoundError, "cannot be imported"),
        (f"{HERE}:nothing", {}, NotFoundError, "nothing"),
        ("nowhere.py:f", {}, NotFoundError, "no file"),
        ("math", {}, QueryError, "names no model"),
        ("m.onnx", {}, QueryError, "run it with `engine`"),
        ("math:pi", {}, SourceError, "float"),
        ("math:sqrt", {"weights": "w.pt"}, SourceError, "no PyTorch module"),
        ("math:sqrt", {"options": {"a": 1}}, SourceError, "function already"),
        ("math:sqrt", {"colour": 1}, QueryError, "no choice 'colour'"),
        ("math:sqrt", {"n_parts": 0}, QueryError, "n_parts=0"),
        ("math:sqrt", {"features": ["nobody"]}, KeyError, "nobody"),
    ],
)
def test_choices_are_refused_first(
    small: Any, tmp_path: Path, model: str, choices: dict[str, Any], error: type[Exception], said: str
) -> None:
    """A model or choice that cannot be is refused before anything is computed."""
    with pytest.raises(error, match=said):
        infer(model, small.query, tmp_path / "r", **choices)


def test_old_results_stay_until_new_ones_are_whole(small: Any, tmp_path: Path) -> None:
    """C24: results are not replaced unasked, and a run that fails leaves the old ones."""
    infer(lambda X: X, small.query, tmp_path / "r")
    with pytest.raises(DuplicateError):
        infer(lambda X: X, small.query, tmp_path / "r")
    with pytest.raises(SourceError):
        infer(lambda X: X[:-1], small.query, tmp_path / "r", overwrite=True)
    assert np.array_equal(ResultDataset({}, tmp_path / "r").to_numpy(), small.counts)
    assert np.array_equal(infer(lambda X: -X, small.query, tmp_path / "r", overwrite=True).to_numpy(), -small.counts)


SCRIPT = """
import sys
import raggedatlas as ra
from raggedatlas.wings.results import infer
query = ra.RaggedAtlas.open(sys.argv[1]).checkout(1).query()
print("begun", flush=True)
infer(sys.argv[3], query, sys.argv[2], batch_size=1, overwrite=True)
"""


@pytest.mark.nightly
def test_a_killed_run_leaves_the_old_state(small: Any, tmp_path: Path) -> None:
    """C25: a run that is killed between batches leaves the results of before; run again, it replaces them and its rubbish."""
    folder = tmp_path / "r"
    infer(lambda X: X, small.query, folder)
    data = folder / "lance_db" / "results.lance" / "data"
    before = set(data.iterdir())
    end = time.monotonic() + 120
    with started([sys.executable, "-c", SCRIPT, str(small.folder), str(folder), f"{HERE}:slowly"], stderr=None) as run:
        while set(data.iterdir()) == before and time.monotonic() < end and run.poll() is None:
            time.sleep(0.02)
        run.send_signal(signal.SIGKILL)
        run.communicate()
    assert run.returncode == -signal.SIGKILL
    assert set(data.iterdir()) > before
    assert np.array_equal(ResultDataset({}, folder).to_numpy(), small.counts)
    assert np.array_equal(infer(lambda X: -X, small.query, folder, overwrite=True).to_numpy(), -small.counts)
    assert set(data.iterdir()) & before == before


@pytest.mark.nightly
def test_a_process_that_dies_ends_the_run(small: Any, tmp_path: Path) -> None:
    """C25: a process of a shared run that dies is told in one sentence, and the results of before stay."""
    folder = tmp_path / "r"
    infer(lambda X: X, small.query, folder)
    with pytest.raises(StoreError, match="A worker died"):
        infer(f"{HERE}:dying", small.query, folder, n_parts=2, batch_size=10, overwrite=True)
    assert np.array_equal(ResultDataset({}, folder).to_numpy(), small.counts)
    assert np.array_equal(infer(lambda X: -X, small.query, folder, overwrite=True).to_numpy(), -small.counts)


def counting(calls: list[int], *, fail_after: int | None = None) -> Callable[[Any], Any]:
    """Make a model that notes how many cells it was given, and fails once it had enough."""

    def model(X: Any) -> Any:
        if fail_after is not None and sum(calls) >= fail_after:
            raise KeyboardInterrupt
        calls.append(len(X))
        return {"data": X * 2, "sum": X.sum(axis=1)}

    return model


@pytest.mark.parametrize("n_parts", [1, 2])
def test_an_interrupted_run_goes_on(n_parts: int, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With resume, cells that were computed are not computed again, in one process or in parts; the table is that of one run."""
    monkeypatch.setattr(batch_writer, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(batch_writer, "CHECKPOINT_SHARE", 0.0)
    first: list[int] = []
    second: list[int] = []
    choices: dict[str, Any] = {"batch_size": 10, "n_parts": n_parts}
    with ThreadPoolExecutor(1) as executor:
        choices |= {"executor": executor} if n_parts > 1 else {}
        with pytest.raises(KeyboardInterrupt):
            infer(counting(first, fail_after=50), small.query, tmp_path / "r", **choices)
        with pytest.raises(QueryError, match=r"n_parts|parts, and"):
            infer(counting([]), small.query, tmp_path / "r", resume=True, **{**choices, "n_parts": n_parts + 1})
        with pytest.raises(QueryError, match="atlas:query"):
            infer(counting([]), small.query.where({"kind": "B"}), tmp_path / "r", resume=True, **choices)
        found = infer(counting(second), small.query, tmp_path / "r", resume=True, **choices)
    assert (sum(first), sum(second)) == (50, len(small.counts) - 50)
    assert list(found.ids()) == small.uids
    assert np.array_equal(found.to_numpy(), small.counts * 2)
    assert np.array_equal(found.get_sum(np.arange(len(found))), small.counts.sum(axis=1))


def test_only_new_cells_are_computed(small: Any, tmp_path: Path) -> None:
    """With update, known cells are taken over bit by bit and others computed, in the order of the query."""
    infer(counting([]), small.query.where({"tissue": "lung"}), tmp_path / "old")
    n_old = len(ResultDataset({}, tmp_path / "old"))
    for batch_size in (1, 7, 500):
        calls: list[int] = []
        found = infer(
            counting(calls), small.query, tmp_path / f"new{batch_size}", update=tmp_path / "old", batch_size=batch_size
        )
        assert sum(calls) == len(small.counts) - n_old > 0
        assert list(found.ids()) == small.uids
        assert np.array_equal(found.to_numpy(), small.counts * 2)
        assert np.array_equal(found.get_sum(np.arange(len(found))), small.counts.sum(axis=1))
    nothing: list[int] = []
    again = infer(counting(nothing), small.query, tmp_path / "new7", update=tmp_path / "new7", overwrite=True)
    assert nothing == []
    assert np.array_equal(again.to_numpy(), small.counts * 2)
    shared = infer(
        f"{HERE}:sums", small.query, tmp_path / "parts",
        n_parts=2, update=infer(f"{HERE}:sums", small.query.where({"tissue": "lung"}), tmp_path / "sums"),
    )  # fmt: skip
    assert np.array_equal(shared.to_numpy(), small.counts / 2)


def test_an_error_of_an_update_says_where(small: Any, tmp_path: Path) -> None:
    """With update, an error names cells of the query, not positions among those that are computed."""
    broken: list[bool] = []

    def model(X: Any) -> Any:
        return X[1:] if broken else X

    infer(model, small.query.where({"tissue": "lung"}), tmp_path / "old")
    fresh = np.flatnonzero((small.obs["tissue"] != "lung").to_numpy())
    assert fresh[-1] - fresh[0] >= len(fresh)

    broken.append(True)
    said = f"holds {len(fresh)} of the cells {fresh[0]} to {fresh[-1]} of the query"
    with pytest.raises(SourceError, match=said):
        infer(model, small.query, tmp_path / "new", update=tmp_path / "old", batch_size=len(fresh))


def test_known_cells_are_found_among_ids_of_two_gigabytes(small: Any, tmp_path: Path) -> None:
    """Ids that exceed two gigabytes together are large strings, which nothing makes plain strings."""
    old = infer(counting([]), small.query, tmp_path / "old")
    texts = "".join(small.uids).encode()
    # Only the end is touched, so that the zeros before it take no memory.
    data = np.zeros(2**31 + len(texts), np.uint8)
    data[2**31 :] = np.frombuffer(texts, np.uint8)
    offsets = 2**31 + np.concatenate([[0], np.cumsum([len(uid) for uid in small.uids])])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    old.__dict__["_ids"] = pa.Array.from_buffers(pa.large_string(), len(small.uids), buffers)
    calls: list[int] = []
    assert len(infer(counting(calls), small.query, tmp_path / "new", update=old)) == len(small.uids)
    assert calls == []
    assert match_ids(pa.array(small.uids[:2]), old.ids().to_arrow()).tolist() == [0, 1]


UNGUARDED = """
import sys
import raggedatlas as ra
from raggedatlas.wings.results import infer
query = ra.RaggedAtlas.open(sys.argv[1]).checkout(1).query()
infer("numpy:sqrt", query, sys.argv[2], n_parts=2)
"""


@pytest.mark.nightly
def test_a_script_without_a_guard_is_told_so(small: Any, tmp_path: Path) -> None:
    """A script that shares a run when it is imported is named as the cause, and memory is not."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    words = [sys.executable, str(tmp_path / "script.py"), str(small.folder), str(tmp_path / "r")]
    run = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 1
    said = run.stderr.strip().splitlines()[-1]
    assert "script.py starts the run when it is imported" in said
    assert "memory" not in said


def test_a_refused_run_leaves_no_folder(small: Any, tmp_path: Path) -> None:
    """A model that gives what cannot be stored leaves nothing where nothing was."""
    with pytest.raises(SourceError):
        infer(lambda X: X[:-1], small.query, tmp_path / "deep" / "r")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_of_ours(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the disk is full while results are written, the error is a StoreError that names the place; nothing is visible."""
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(*given: Any, **more: Any) -> Any:
        raise full

    places = [
        (Path, "mkdir"), (Path, "write_text"), (os, "open"), (Path, "replace"),
        (batch_writer.tempfile, "TemporaryFile"), ("lance.file.LanceFileWriter", "write_batch"), ("lance.file.LanceFileWriter", "close"),
    ]  # fmt: skip
    monkeypatch.setattr(batch_writer, "MAX_RUN", 1)
    monkeypatch.setattr(batch_writer, "CHECKPOINT_SECONDS", 0.0)
    for number, (owner, name) in enumerate(places):
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(*((f"{owner}.{name}",) if isinstance(owner, str) else (owner, name)), refuse)
            with pytest.raises(StoreError, match=r"No space left|space left"):
                infer(lambda X: X, small.query, folder)
        with pytest.raises(NotFoundError):
            ResultDataset({}, folder)


def test_results_of_another_model_are_not_updated(small: Any, tmp_path: Path) -> None:
    """Another model, other features or another dtype are refused by name, and nothing is written."""
    infer(f"{HERE}:sums", small.query, tmp_path / "old")
    with pytest.raises(QueryError, match="other model"):
        infer("numpy:sqrt", small.query, tmp_path / "new", update=tmp_path / "old")
    with pytest.raises(QueryError, match="other features, layers or dtype"):
        infer(f"{HERE}:sums", small.query, tmp_path / "new", update=tmp_path / "old", features=["a"])
    with pytest.raises(QueryError, match="other features, layers or dtype"):
        infer(f"{HERE}:sums", small.query, tmp_path / "new", update=tmp_path / "old", dtype="float64")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


RANK = """
import sys
import torch.distributed as dist
import raggedatlas as ra
from raggedatlas.wings.results import infer_part
meeting, rank, n_ranks, atlas, folder, model = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=n_ranks)
query = ra.RaggedAtlas.open(atlas).checkout(1).query()
parts = [None] * n_ranks
if rank == 0:
    writer = ra.ResultDatasetWriter(folder)
    parts = writer.parts(n_ranks)
dist.broadcast_object_list(parts)
infer_part(model, query, parts[rank], n_ranks, batch_size=7)
dist.barrier()
if rank == 0:
    writer.commit()
dist.destroy_process_group()
"""


def test_ranks_of_a_process_group_share_a_run(small: Any, tmp_path: Path) -> None:
    """Two processes of torch.distributed write to one folder: one commit, each cell exactly once, in the query's order."""
    pytest.importorskip("torch")
    folder = tmp_path / "r"
    words = [str(small.folder), str(folder), f"{HERE}:sums"]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started(
                    [sys.executable, "-c", RANK, str(tmp_path / "meeting"), str(rank), "2", *words],
                    stdout=subprocess.DEVNULL,
                )
            )
            for rank in range(2)
        ]
        told = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    found = ResultDataset({}, folder)
    assert list(found.ids()) == small.uids
    assert equal_to_reference(found, small)
    assert found.version == 1


def test_runs_are_named_by_time_and_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C58: the folder of a run is named as the search for the newest run expects it."""
    from raggedatlas.wings.results.folder import find_newest_run

    monkeypatch.chdir(tmp_path)
    folder = Path(result_folder(None, "infer"))
    folder.mkdir(parents=True)
    assert find_newest_run(Path("results"), "infer") == folder
    assert find_newest_run(Path("results"), "test") is None
