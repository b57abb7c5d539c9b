"""Laws of writing results: bits stay, order stays, nothing shows before the commit, and bad batches change nothing."""

import json
import pickle
import signal
import subprocess
import sys
import tomllib
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas import ResultDataset, ResultDatasetWriter
from raggedatlas.errors import (
    ConflictError,
    CorruptError,
    DuplicateError,
    NotFoundError,
    QueryError,
    ReadOnlyError,
    SourceError,
    StoreError,
)
from raggedatlas.wings.results import batch_writer

DTYPES = ["float16", "float32", "float64", "bool", *(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64))]


def any_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)


def ids_of(n: int, start: int = 0) -> list[str]:
    return [f"cell{i}" for i in range(start, start + n)]


def written(folder: Path, *batches: Any, **options: Any) -> ResultDataset:
    start = 0
    with ResultDatasetWriter(folder, **options) as writer:
        for batch in batches:
            writer.write_batch(ids_of(len(batch), start), batch)
            start += len(batch)
    return ResultDataset({}, folder)


def test_importing_results_loads_no_lance() -> None:
    """C01, R1: the package and the writer's module are imported without Lance, LanceDB or torch."""
    code = "import sys, raggedatlas, raggedatlas.wings.results.writer; print({'lance', 'lancedb', 'torch'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_bits_survive(tmp_path: Path, dtype: str) -> None:
    """C18, C82, C84, R6: whatever bits a value has, NaN payloads and negative zeros included, it comes back with them."""
    values = any_bits(dtype, (70, 3), seed=1)
    dataset = written(tmp_path, values[:33], values[33:])
    assert dataset.tensor_dtype == values.dtype
    assert dataset.to_numpy().tobytes() == values.tobytes()
    assert ResultDataset({}, tmp_path, mapped=False).get_data(slice(None)).tobytes() == values.tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (2, 1, 3), (2, 2, 2, 2)])
def test_shapes_survive(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """C14, C15, C16, C44, C81, C83: the table has exactly ids and data; shapes are flattened in C order and come back."""
    values = any_bits("float32", (9, *shape))
    dataset = written(tmp_path, np.asfortranarray(values))
    stored = lance.dataset(str(tmp_path / "lance_db" / "results.lance"))
    assert stored.schema.names == ["object_id", "data"]
    assert stored.schema.field("object_id").type == pa.string()
    assert stored.schema.field("data").type == pa.list_(pa.float32(), int(np.prod(shape)))
    assert json.loads(stored.schema.metadata[b"tensor_shape"]) == list(shape)
    assert stored.schema.metadata[b"tensor_dtype"] == b"float32"
    assert dataset.tensor_shape == shape
    assert dataset.to_numpy().tobytes() == values.tobytes()
    assert dataset.get_data(4).tobytes() == values[4].tobytes()


@pytest.mark.long
@given(sizes=st.lists(st.integers(0, 5), max_size=6))
def test_rows_come_in_the_order_written(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    """C20, C21, C80: rows and ids stand in write order across batches, and empty batches change nothing."""
    folder = tmp_path_factory.mktemp("results")
    values = np.arange(2 * sum(sizes), dtype=np.int32).reshape(-1, 2)
    edges = np.cumsum([0, *sizes])
    dataset = None
    batches = [values[a:b] for a, b in pairwise(edges)]
    if sizes:
        dataset = written(folder, *batches)
        assert len(dataset) == sum(sizes)
        assert dataset.to_numpy().tolist() == values.tolist()
        assert list(dataset.ids()) == ids_of(sum(sizes))


def test_a_run_without_batches(tmp_path: Path) -> None:
    """C20: without any batch there is nothing to read, and the reader says so; an empty array tells the shape."""
    with ResultDatasetWriter(tmp_path / "a") as writer:
        writer.write_batch([], [])
    with pytest.raises(NotFoundError, match="without batches"):
        ResultDataset({}, tmp_path / "a")
    dataset = written(tmp_path / "b", np.empty((0, 4, 2), np.float16))
    assert (len(dataset), list(dataset), dataset.to_numpy().shape) == (0, [], (0, 4, 2))


def test_an_empty_batch_binds_nothing(tmp_path: Path) -> None:
    """C17, C20: dtype and shape are those of the first batch that has rows."""
    assert written(tmp_path, np.empty((0, 3)), np.ones((2, 5), np.float32)).tensor_shape == (5,)


class Tensor:
    """What a tensor of PyTorch offers, on a GPU or not."""

    def __init__(self, values: Any) -> None:
        self.values, self.shape, self.dtype = values, values.shape, "bfloat16"

    def __len__(self) -> int:
        return len(self.values)

    def detach(self) -> "Tensor":
        return self

    cpu = detach

    def numpy(self) -> Any:
        if self.values.dtype == object:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.values


@pytest.mark.parametrize("form", [list, np.array, tuple, Tensor, lambda rows: [Tensor(row) for row in rows]])
def test_batches_of_any_form(tmp_path: Path, form: Any) -> None:
    """C11, C19: ids and data come as lists, arrays or tensors, big-endian too; ids become text."""
    values = np.arange(6, dtype=">f4").reshape(3, 2)
    with ResultDatasetWriter(tmp_path) as writer:
        writer.write_batch(np.array([b"a", "\u65e5".encode(), b"c"]), form(values))
        writer.write_batch(np.array([1, 2, 3]), form(values))
        writer.write_batch([4, "x", b"y"], form(values))
        writer.write_batch(Tensor(np.array([7, 8, 9])), form(values))
    dataset = ResultDataset({}, tmp_path)
    assert list(dataset.ids()) == ["a", "\u65e5", "c", "1", "2", "3", "4", "x", "y", "7", "8", "9"]
    assert dataset.tensor_dtype == np.float32
    assert dataset.get_data([0, 4]).tolist() == [[0, 1], [2, 3]]


def test_several_outputs(tmp_path: Path) -> None:
    """Several named outputs become further columns, each with its shape and dtype; data stays what the seed describes."""
    out = {"logits": np.ones((3, 4), np.float16), "data": np.zeros((3, 2, 2)), "label": np.arange(3)}
    with ResultDatasetWriter(tmp_path, facts={"model": "m"}) as writer:
        writer.write_batch("abc", out)
        with pytest.raises(SourceError, match="Batch 1 has outputs"):
            writer.write_batch("d", {"data": np.zeros((1, 2, 2))})
    dataset: Any = ResultDataset({}, tmp_path)
    assert (dataset.tensor_shape, dataset.facts) == ((2, 2), {"model": "m"})
    assert dataset.get_logits(1).dtype == np.float16
    assert dataset.get_label([2, 0]).tolist() == [2, 0]
    assert {name for name in dir(dataset) if name.startswith("get_")} == {
        "get_data", "get_object_id", "get_logits", "get_label",
    }  # fmt: skip


BAD = [
    (["a"], np.zeros((2, 3), np.float32), "Batch 1: got 1 ids for 2 rows"),
    (["a", None], np.zeros((2, 3), np.float32), "Batch 1, row 1: the id is missing"),
    (None, np.zeros((2, 3), np.float32), "Batch 1: object ids are missing"),
    (["a", float("nan")], np.zeros((2, 3), np.float32), "Batch 1, row 1: the id is missing"),
    ([b"\xff"], np.zeros((1, 3), np.float32), "not valid UTF-8"),
    (["\ud800"], np.zeros((1, 3), np.float32), "not valid Unicode text"),
    (["a", "a"], np.zeros((2, 3), np.float32), "Batch 1, row 1: the id 'a' already has a result"),
    (["cell1"], np.zeros((1, 3), np.float32), "Batch 1, row 0: the id 'cell1' already has a result"),
    (["a"], np.zeros((1, 4), np.float32), r"shape \(4,\) and dtype float32 .* began with shape \(3,\)"),
    (["a"], np.zeros((1, 3)), "dtype float64 .* began with .* dtype float32"),
    (["a", "b"], [np.zeros(3), np.zeros(2)], "Batch 1, row 1: output 'data' has shape"),
    (["a"], np.zeros((1, 3), np.complex64), "Batch 1: Output 'data' has dtype complex64"),
    (["a"], np.array([["x", "y", "z"]]), "dtype <U1"),
    (["a"], np.array([[{}, {}, {}]]), r"Batch 1, row 0: .* object array \(dict\)"),
    (["a"], np.zeros((1, 0), np.float32), "contains no values"),
    (["a"], np.float32(3), "one row per object"),
    (["a"], np.array(3.0), "one row per object"),
    (["a"], Tensor(np.array([None])), "bfloat16"),
    (["a"], {}, "no outputs"),
    (["a"], np.ma.array([[1, 2, 3]], mask=[[True, False, False]]), "masked array of int64"),
    (["a"], [np.ma.array([1, 2, 3], mask=[True, False, False])], "masked array of int64"),
    (["a"], {"data": np.zeros((1, 3)), "more": np.zeros((2, 3))}, "different numbers of rows"),
]


@pytest.mark.parametrize(("ids", "data", "message"), BAD)
def test_bad_batches_change_nothing(tmp_path: Path, ids: Any, data: Any, message: str) -> None:
    """C15, C17, C19, C20, C52: what cannot be stored, rows without ids too, is refused as a ValueError naming the batch; the run goes on without it."""
    first = np.ones((2, 3), np.float32)
    with ResultDatasetWriter(tmp_path) as writer:
        writer.write_batch(ids_of(2), first)
        with pytest.raises(SourceError, match=message):
            writer.write_batch(ids, data)
        writer.write_batch(["last"], first[:1])
    assert list(ResultDataset({}, tmp_path).ids()) == ["cell0", "cell1", "last"]


def test_masked_numbers_are_missing(tmp_path: Path) -> None:
    """The value below a mask is never stored: it is NaN among floating-point numbers."""
    dataset = written(tmp_path, np.ma.array([1.0, 7.0], mask=[False, True]))
    np.testing.assert_array_equal(dataset.to_numpy(), [1.0, np.nan])


def test_a_resumed_run_compares_ids_that_share_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are compared themselves where their hashes meet, also those of a resumed run; an id that its checkpoint really has twice is refused."""
    interrupted(tmp_path)
    monkeypatch.setattr(batch_writer, "hash", len, raising=False)
    checkpoint = tmp_path / "lance_db/.checkpoint"
    noted = json.loads(checkpoint.read_text())
    checkpoint.write_text(json.dumps({**noted, "files": [*noted["files"], noted["files"][1]]}))
    with pytest.raises(SourceError, match="The interrupted run, row 3: the id '001' already has a result"):
        ResultDatasetWriter(tmp_path, facts={"model": "m"}, resume=True)
    checkpoint.write_text(json.dumps(noted))
    with ResultDatasetWriter(tmp_path, facts={"model": "m"}, resume=True) as writer:
        writer.write_batch(["003"], np.zeros((1, 2)))
        for known in ("001", "003"):
            with pytest.raises(SourceError, match=f"'{known}' already has a result"):
                writer.write_batch(["004", known], np.zeros((2, 2)))
    assert list(ResultDataset({}, tmp_path).ids()) == ["000", "001", "002", "003"]


@pytest.mark.parametrize("text", ['{"columns": [], "files": [{"name": 5, "n_rows": null, "n_bytes": 1}]}', "[" * 100_000, '{"columns": [], "files": [{"name": "a", "n_rows": Infinity, "n_bytes": 1, "sha256": ""}]}'])  # fmt: skip
def test_a_checkpoint_that_holds_anything_is_refused(tmp_path: Path, text: str) -> None:
    """Whatever a damaged checkpoint holds, resuming from it says that it cannot be parsed."""
    (tmp_path / "r/lance_db").mkdir(parents=True)
    (tmp_path / "r/lance_db/.checkpoint").write_text(text)
    with pytest.raises(CorruptError, match="cannot be parsed"):
        ResultDatasetWriter(tmp_path / "r", resume=True)


@given(st.lists(st.lists(st.integers(0, 40), unique=True, max_size=8), max_size=30), st.sampled_from([3, 10, 2**20]))
def test_known_hashes_are_met(batches: list[list[int]], longest: int) -> None:
    """A hash is met exactly if it was added before, however the runs were merged or put into files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_writer, "MAX_RUN", longest)
        compare_with_a_set(batches)


def compare_with_a_set(batches: list[list[int]]) -> None:
    seen, known = batch_writer.IdHashSet(), set[int]()
    for batch in batches:
        hashes = np.array(sorted(batch), np.int64)
        assert seen.may_contain(hashes) == bool(known & set(batch))
        if not known & set(batch) and batch:
            seen.add(hashes)
            known |= set(batch)
    assert len(seen) == len(known)


def test_both_names_finish_once(tmp_path: Path) -> None:
    """C12: commit and write_index are the same, a second call does nothing, and writing after them is refused."""
    for first, second in (("commit", "write_index"), ("write_index", "commit")):
        writer = ResultDatasetWriter(tmp_path / first)
        writer.write_batch(["a"], [np.zeros(3)])
        getattr(writer, first)()
        getattr(writer, second)()
        writer.abort()
        with pytest.raises(ReadOnlyError, match="committed"):
            writer.write_batch(["b"], [np.zeros(3)])
        assert ResultDataset({}, tmp_path / first).version == 1
    writer = ResultDatasetWriter(tmp_path / "c")
    writer.abort()
    with pytest.raises(ReadOnlyError, match="aborted"):
        writer.commit()


def test_one_call_makes_a_writer(tmp_path: Path) -> None:
    """C10, C13, C22: one argument is enough, folders are made, and LanceDB opens the table by its name."""
    assert len(written(tmp_path / "named like this?", np.zeros((4, 2)))) == 4
    folder = tmp_path / "deep" / "with space and % and \u00fc"
    written(folder, np.zeros((4, 2)), np.ones((3, 2)))
    assert (folder / "lance_db" / "results.lance").is_dir()
    table = lancedb.connect(str(folder / "lance_db")).open_table("results")
    assert (table.count_rows(), len(table.to_lance().get_fragments())) == (7, 1)


def test_many_batches_are_one_commit(tmp_path: Path) -> None:
    """C22, C26: a thousand batches leave one version and one file, and manifests of less than one percent of the values."""
    with ResultDatasetWriter(tmp_path) as writer:
        for i in range(1000):
            writer.write_batch([f"{i:04d}"], np.full((1, 64), i, np.float64))
        assert not list((tmp_path / "lance_db" / "results.lance").glob("_versions/*"))
    table = lance.dataset(str(tmp_path / "lance_db" / "results.lance"))
    assert (len(table.versions()), len(table.get_fragments()), table.count_rows()) == (1, 1, 1000)
    names = {path.name for path in (tmp_path / "lance_db").iterdir()}
    assert names == {"results.lance", "checksums.json"}
    manifests = sum(path.stat().st_size for path in (tmp_path / "lance_db/results.lance/_versions").iterdir())
    assert manifests < 0.01 * 1000 * 64 * 8


def test_files_are_rolled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C05, C22: a batch may fill one file and begin the next; rows and their order are as without."""
    monkeypatch.setattr(batch_writer, "MAX_ROWS", 10)
    values = any_bits("float32", (37, 3))
    dataset = written(tmp_path, values[:25], values[25:])
    assert len(list((tmp_path / "lance_db/results.lance/data").iterdir())) == 4
    assert dataset.is_mapped()
    order = np.random.default_rng(0).permutation(37)
    assert dataset.get_data(order).tobytes() == values[order].tobytes()
    assert dataset.to_numpy().tobytes() == values.tobytes()
    assert all(dataset.get_data(i).tobytes() == values[i].tobytes() for i in range(37))


@pytest.mark.parametrize("columns", [512, 2048])
def test_disk_holds_little_beside_the_values(tmp_path: Path, columns: int) -> None:
    """R3: files are within one percent of values and ids at 512 columns and 2,048."""
    values = any_bits("float32", (2000, columns))
    written(tmp_path, values)
    used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert used < 1.01 * (values.nbytes + sum(map(len, ids_of(2000))))


@pytest.mark.long
def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    """C04, C05: ten times the rows are written in the same memory, but for eight bytes an id; no process is started."""
    code = (
        "import resource, sys, numpy as np\nfrom raggedatlas import ResultDatasetWriter\n"
        "x = np.ones((2000, 64))\npeaks = []\n"
        "for k in (20, 200):\n"
        "    with ResultDatasetWriter(f'{sys.argv[1]}/{k}') as writer:\n"
        "        for i in range(k):\n"
        "            writer.write_batch(np.arange(2000) + 2000 * i, x)\n"
        "    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
        "print(*peaks, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, 'multiprocessing.pool' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    few, many, children, pool = run.stdout.split()
    assert (int(many) - int(few)) * 1024 < 60 * 2**20 < 400_000 * 64 * 8 / 3
    assert (children, pool) == ("0", "False")


def test_results_are_not_overwritten_unasked(tmp_path: Path) -> None:
    """C24: committed results are kept (a FileExistsError), or replaced in one step when asked; old readers keep theirs."""
    old = written(tmp_path, np.zeros((5, 3)))
    assert old.is_mapped()
    assert old.get_data(0).tolist() == [0, 0, 0]
    with pytest.raises(DuplicateError, match="already holds 5 results") as caught:
        ResultDatasetWriter(tmp_path)
    assert isinstance(caught.value, FileExistsError)
    with ResultDatasetWriter(tmp_path, overwrite=True) as writer:
        writer.write_batch(["n"], [np.ones(7)])
        assert len(ResultDataset({}, tmp_path)) == 5
    new = ResultDataset({}, tmp_path)
    assert (len(new), new.tensor_shape, len(old), old.get_data(4).tolist()) == (1, (7,), 5, [0, 0, 0])


def test_replaced_results_stay_for_a_grace_time(tmp_path: Path) -> None:
    """Whoever holds replaced results reads them for the grace time, in this process and in another; after it they are told by name."""
    old = written(tmp_path, np.zeros((5, 3)))
    unmapped = ResultDataset({}, tmp_path, mapped=False)
    sent = pickle.dumps(old)
    with ResultDatasetWriter(tmp_path, overwrite=True) as writer:
        writer.write_batch(["n"], [np.ones(7)])
    for held in (old, unmapped, pickle.loads(sent)):
        assert held.to_numpy().tolist() == np.zeros((5, 3)).tolist()
        assert list(held.ids())
    late = ResultDataset({}, tmp_path, version=old.version, mapped=False)
    with ResultDatasetWriter(tmp_path, overwrite=True, grace=timedelta(0)) as writer:
        writer.write_batch(["m"], [np.ones(7)])
    assert len(list((tmp_path / "lance_db/results.lance/data").iterdir())) == 1
    calls = (lambda: pickle.loads(sent), lambda: late[[0, 3]], late.ids, lambda: next(late.iter_batches()))
    for call in calls:
        with pytest.raises(
            NotFoundError, match=r"was replaced by version \d+ and has been removed; reopen the results"
        ):
            call()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """A second writer of a folder is refused while the first has not finished."""
    first = ResultDatasetWriter(tmp_path)
    with pytest.raises(ConflictError, match="being written"):
        ResultDatasetWriter(tmp_path)
    first.abort()
    assert len(written(tmp_path, np.zeros((1, 1)))) == 1


def test_an_error_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    """C25: an error in the block gives up: no table and no files, and the next run succeeds."""

    def run() -> None:
        with ResultDatasetWriter(tmp_path) as writer:
            writer.write_batch(["a"], [np.zeros(3)])
            raise KeyError("model")

    with pytest.raises(KeyError):
        run()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotFoundError, match="holds no results"):
        ResultDataset({}, tmp_path)
    assert len(written(tmp_path, np.zeros((1, 1)))) == 1


INTERRUPTED = """
import os, sys, numpy as np
from raggedatlas import ResultDatasetWriter
from raggedatlas.wings.results import batch_writer
batch_writer.CHECKPOINT_SECONDS = batch_writer.CHECKPOINT_SHARE = 0.0
writer = ResultDatasetWriter(sys.argv[1], overwrite=True, facts={"model": "m"})
for i in range(3):
    writer.write_batch([f"{i:03d}"], np.full((1, 2), i, np.float64))
os.kill(os.getpid(), 9)
"""


def interrupted(folder: Path) -> None:
    """Leave what a killed run of three noted batches leaves."""
    run = subprocess.run([sys.executable, "-c", INTERRUPTED, str(folder)], check=False)
    assert run.returncode == -signal.SIGKILL


def test_an_interrupted_run_is_taken_up(tmp_path: Path) -> None:
    """What a killed run has noted comes first in the table of the run that resumes it; ids of it cannot be written again."""
    written(tmp_path, np.full((1, 2), 9.0))
    interrupted(tmp_path)
    assert ResultDataset({}, tmp_path).to_numpy().tolist() == [[9, 9]]
    with ResultDatasetWriter(tmp_path, overwrite=True, facts={"model": "m"}, resume=True) as writer:
        assert len(writer) == 3
        with pytest.raises(SourceError, match="the id '001' already has a result"):
            writer.write_batch(["001"], np.zeros((1, 2)))
        with pytest.raises(SourceError, match="shape"):
            writer.write_batch(["x"], np.zeros((1, 3)))
        writer.write_batch(["003"], np.full((1, 2), 3.0))
    found = ResultDataset({}, tmp_path)
    assert list(found.ids()) == ["000", "001", "002", "003"]
    assert found.to_numpy()[:, 0].tolist() == [0, 1, 2, 3]
    assert not (tmp_path / "lance_db" / ".checkpoint").exists()


def test_an_interrupted_run_outlives_older_versions(tmp_path: Path) -> None:
    """Versions whose grace is over go with the commit of the resumed run, not before: its own files would go with them."""
    for value in (8.0, 9.0):
        written(tmp_path, np.full((1, 2), value), overwrite=True)
    interrupted(tmp_path)
    options: dict[str, Any] = {"overwrite": True, "facts": {"model": "m"}, "grace": timedelta(0)}
    with ResultDatasetWriter(tmp_path, resume=True, **options) as writer:
        assert len(writer) == 3
    assert ResultDataset({}, tmp_path).to_numpy()[:, 0].tolist() == [0, 1, 2]
    assert len(lance.dataset(tmp_path / "lance_db/results.lance").versions()) == 1


@pytest.mark.long
def test_a_run_that_is_not_resumed_begins_anew(tmp_path: Path) -> None:
    """Without resume, or where nothing was noted, a writer begins with no rows, and what was left is removed."""
    interrupted(tmp_path)
    assert len(written(tmp_path, np.zeros((2, 2)))) == 2
    assert len(list((tmp_path / "lance_db/results.lance/data").iterdir())) == 1
    with ResultDatasetWriter(tmp_path, overwrite=True, resume=True) as writer:
        assert len(writer) == 0
        writer.write_batch(["a"], np.zeros((1, 2)))


@pytest.mark.long
def test_another_run_is_not_taken_up(tmp_path: Path) -> None:
    """Resuming with other facts, or from a damaged file, is refused; the interrupted run stays as it was."""
    interrupted(tmp_path)
    with pytest.raises(QueryError, match="had model 'm', and this one has 'other'"):
        ResultDatasetWriter(tmp_path, facts={"model": "other"}, resume=True)
    file = min((tmp_path / "lance_db/results.lance/data").iterdir())
    good = file.read_bytes()
    file.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(CorruptError, match="content has changed"):
        ResultDatasetWriter(tmp_path, facts={"model": "m"}, resume=True)
    file.write_bytes(good)
    with ResultDatasetWriter(tmp_path, facts={"model": "m"}, resume=True) as writer:
        assert len(writer) == 3


def test_an_error_keeps_what_was_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a run has noted something, an error in the block loses no finished batch; abort() removes all."""
    monkeypatch.setattr(batch_writer, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(batch_writer, "CHECKPOINT_SHARE", 0.0)

    def run(n: int, *, resume: bool) -> None:
        with ResultDatasetWriter(tmp_path, resume=resume) as writer:
            for i in range(len(writer), n):
                writer.write_batch([str(i)], np.zeros((1, 2)))
            raise KeyError("model")

    for n in (2, 4):
        with pytest.raises(KeyError):
            run(n, resume=True)
    writer = ResultDatasetWriter(tmp_path, resume=True)
    assert len(writer) == 4
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_finished_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the rows written so far cannot be read back, for they are lost, nothing is committed without them."""
    writer = ResultDatasetWriter(tmp_path)
    writer.write_batch(["a"], [np.zeros(3)])

    def fail(path: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batch_writer, "file_digest", fail)
    with pytest.raises(StoreError):
        list(writer.read_back())
    monkeypatch.undo()
    with pytest.raises(ReadOnlyError, match="aborted"):
        writer.write_batch(["b"], [np.zeros(3)])
    with pytest.raises(ReadOnlyError, match="aborted"):
        writer.commit()
    with pytest.raises(NotFoundError):
        ResultDataset({}, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_run_killed_at_its_commit(tmp_path: Path, moment: str, *, overwrite: bool) -> None:
    """C24, C25: killed right before or after the commit, readers see all of the old rows or all of the new; a rerun succeeds.

    Nothing else in the folder is touched: neither other files nor, before the commit, the configuration of the old rows.
    """
    (tmp_path / "weights.pth").write_bytes(b"w")
    if overwrite:
        written(tmp_path, np.zeros((3, 2)))
        (tmp_path / "original_dataset_config.toml").write_text("of = 'old'\n")
    code = (
        "import os, sys, numpy as np\nfrom raggedatlas import ResultDatasetWriter\nfrom raggedatlas.wings.results import writer as module\n"
        "commit = module.commit_fragments\n"
        "def killed(*given):\n"
        "    sys.argv[2] == 'before' and os.kill(os.getpid(), 9)\n    commit(*given)\n    os.kill(os.getpid(), 9)\n"
        "module.commit_fragments = killed\n"
        "with ResultDatasetWriter(sys.argv[1], overwrite=True) as writer:\n    writer.original_dataset_config = {'of': 'new'}\n"
        "    writer.write_batch(list('abcde'), np.ones((5, 4)))\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path), moment], check=False)
    assert run.returncode == -signal.SIGKILL
    if moment == "before" and not overwrite:
        with pytest.raises(NotFoundError, match="incomplete results"):
            ResultDataset({}, tmp_path)
    else:
        seen = ResultDataset({}, tmp_path)
        assert seen.to_numpy().tolist() == (np.zeros((3, 2)) if moment == "before" else np.ones((5, 4))).tolist()
    assert (tmp_path / "weights.pth").read_bytes() == b"w"
    assert {path.name for path in tmp_path.iterdir()} == {"lance_db", "weights.pth", "original_dataset_config.toml"}
    told = tomllib.loads((tmp_path / "original_dataset_config.toml").read_text())
    assert told == {"of": "old" if overwrite else "new"}
    again = written(tmp_path, np.full((2, 2), 7.0), overwrite=True, grace=timedelta(0))
    assert again.to_numpy().tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert len(list((tmp_path / "lance_db/results.lance/data").iterdir())) == 1


def test_the_configuration_stands_beside(tmp_path: Path) -> None:
    """C23: the configuration of the original data is written, and a chain of runs keeps the first one."""
    config = {"general": {"name": "a\"b\x7f", "path": Path("x"), "none": None, "n": 2}, "train": {"lr": 1e-3, "inf": float("inf"), "s": {"k k": [1, 2], "d": [{"a": True}]}}}  # fmt: skip
    writer = ResultDatasetWriter(tmp_path / "infer")
    writer.original_dataset_config = config
    writer.write_batch(["a"], [np.zeros(8)])
    writer.commit()
    expected = {"general": {"name": "a\"b\x7f", "path": "x", "n": 2}, "train": {"lr": 1e-3, "inf": float("inf"), "s": {"k k": [1, 2], "d": [{"a": True}]}}}  # fmt: skip
    assert tomllib.loads((tmp_path / "infer" / "original_dataset_config.toml").read_text()) == expected
    writer = ResultDatasetWriter(tmp_path / "umap")
    writer.original_dataset = ResultDataset({"other": 1}, tmp_path / "infer")
    writer.write_batch(["a"], [np.zeros(2)])
    writer.commit()
    assert tomllib.loads((tmp_path / "umap" / "original_dataset_config.toml").read_text()) == expected
    written(tmp_path / "alone", np.zeros((1, 1)))
    assert tomllib.loads((tmp_path / "alone" / "original_dataset_config.toml").read_text()) == {}
