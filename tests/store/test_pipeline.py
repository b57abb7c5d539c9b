"""Reading ahead and writing behind: nothing lost, nothing out of order, errors in their turn, no job begun after one."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas.errors import StoreError
from raggedatlas.store.arrays import ArrayWriter
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader, read_slice
from raggedatlas.store.runtime import BackgroundWriter, prefetch

pytestmark = pytest.mark.fast


@given(n=st.integers(0, 9), depth=st.integers(1, 4))
def test_every_step_and_job_comes_once_and_in_order(n: int, depth: int) -> None:
    """However many may wait, steps come in order and jobs are done in order, all before the end of the context."""
    done: list[int] = []
    with BackgroundWriter(depth) as later:
        for step in prefetch(iter(range(n)), depth):
            later(lambda step=step: done.append(step))
    assert done == list(range(n))


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_jobs_wait_than_allowed(depth: int) -> None:
    """The call returns at once for `depth` jobs, and waits for the first of them with one more."""
    gate, asked = threading.Event(), threading.Event()
    given_over: list[int] = []

    def caller() -> None:
        with BackgroundWriter(depth) as later:
            for i in range(depth + 1):
                later(gate.wait)
                given_over.append(i)
                if i == depth - 1:
                    asked.set()

    thread = threading.Thread(target=caller)
    thread.start()
    assert asked.wait(10)
    thread.join(0.2)
    assert given_over == list(range(depth))
    gate.set()
    thread.join(10)
    assert given_over == list(range(depth + 1))


@pytest.mark.parametrize("where", ["call", "join", "end"])
def test_no_job_is_begun_after_one_that_failed(where: str) -> None:
    """The error of a job comes at the next call that has to wait, at `join`, or at the end; jobs behind it are not begun."""
    done: list[int] = []

    def fail() -> None:
        raise StoreError("the disk is full")

    def run() -> None:
        with BackgroundWriter(2) as later:
            later(fail)
            later(lambda: done.append(1))
            if where == "call":
                later(lambda: done.append(2))
                done.append(3)
            elif where == "join":
                later.join()
                done.append(3)

    with pytest.raises(StoreError, match="disk is full"):
        run()
    assert done == []


def test_an_error_of_the_caller_ends_what_waits() -> None:
    """Where the context is left with an error, the running job ends, those behind it are not begun, and the caller's error stays."""
    begun, gate, done = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        gate.wait(10)
        done.append("first")

    def run() -> None:
        with BackgroundWriter(3) as later:
            later(first)
            later(lambda: done.append("second"))
            assert begun.wait(10)
            threading.Timer(0.05, gate.set).start()
            raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        run()
    assert done == ["first"]


def test_an_early_end_reads_no_further() -> None:
    """Closing a walk waits for the step being made and makes none of those behind it."""
    gate, made = threading.Event(), []

    def steps() -> Iterator[int]:
        yield 0
        made.append("begun")
        gate.wait(10)
        yield 1
        made.append("further")
        yield 2

    walk = prefetch(steps(), 3)
    assert next(walk) == 0
    threading.Timer(0.05, gate.set).start()
    walk.close()
    assert made in (["begun"], [])


@given(sizes=st.lists(st.integers(0, 40), max_size=8), wide=st.integers(0, 8))
def test_an_array_written_behind_is_the_array(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], wide: int
) -> None:
    """Sent away or written at once, widened on the way or not, an array has the same files, byte for byte."""
    files = []
    for behind in (True, False):
        folder = tmp_path_factory.mktemp("sent")
        with BackgroundWriter(2) as send:
            writer = ArrayWriter(
                Location(str(folder)), "a/b", "uint8", profile="packed", chunk_rows=8, shard_rows=16
            )  # fmt: skip
            if behind:
                assert writer.behind(send) is writer
            for i, size in enumerate(sizes):
                if i == wide:
                    writer.promote("uint16")
                writer.append(np.arange(size, dtype=writer.dtype) * 3 % 251)
            spec = writer.close()
        files.append({p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()})
    assert files[0] == files[1]
    given_values = np.concatenate([np.zeros(0, int), *(np.arange(size) * 3 % 251 for size in sizes)])
    assert np.array_equal(read_slice(ArrayReader(Location(str(folder)), spec), 0, spec.n_rows), given_values)
