"""Adding by the workers of an executor: the same atlas as without, and nothing lost or doubled when workers fail."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import ArgumentError, SourceError, WorkersError
from raggedatlas.formats.registry import open_source
from raggedatlas.ingest import add as adding
from raggedatlas.store.executors import Workers
from raggedatlas.wings.results import infer
from support.processes import POOLS, started


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    with POOLS["processes"]() as pool:
        yield pool


def made(number: int, n: int = 30, genes: int = 12) -> ad.AnnData:
    """Make a file's content: every second has the genes of the one before, in another order."""
    rng = np.random.default_rng(number)
    order = rng.permutation(genes)
    names = np.array([f"g{number // 2}-{i}" for i in range(genes)])[order]
    obs = pd.DataFrame(
        {"kind": pd.Categorical(rng.choice(["a", "b"], n)), "score": rng.random(n)},
        index=[f"c{number}-{i}" for i in range(n)],
    )
    counts = sp.csr_matrix(rng.poisson(np.arange(genes)[order] / genes, (n, genes)).astype(np.float32))
    data = ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=names))
    data.uns["kind_colors"] = np.array(["#ff0000", "#00ff00"])
    return data


class Faulty:
    """A source in memory whose worker fails in the middle of it."""

    def __init__(self, data: ad.AnnData, fault: str) -> None:
        self.data, self.fault = data, fault

    def describe(self) -> Any:
        return self._source.describe()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "_source":
            self._source = open_source(self.data)
            return self._source
        return getattr(self._source, name)

    def blocks(self, keys: tuple[str, ...], n_rows: int, rows: Any = None) -> Iterator[Any]:
        if rows is None and self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rows is None and self.fault == "hangs":
            time.sleep(600)
        if rows is None and self.fault == "disk is full":
            # From now on the operating system refuses to write more than this into a file of the worker.
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
        return self._source.blocks(keys, n_rows, rows)


def files(folder: Path, n: int) -> list[Path]:
    """Write some files."""
    folder.mkdir(exist_ok=True)
    paths = [folder / f"f{i}.h5ad" for i in range(n)]
    for i, path in enumerate(paths):
        made(i).write_h5ad(path)
    return paths


def told(reports: list[Any]) -> list[tuple[Any, ...]]:
    """Tell what reports say but for uids."""
    return [
        (r.name, r.status, r.columns, r.notes, r.elements, r.content_hash, [(s.layout_uid, s.layers) for s in r.spaces])
        for r in reports
    ]


def content(atlas: RaggedAtlas) -> list[Any]:
    """Tell what an atlas holds but for uids and times."""
    joined = atlas.checkout(atlas.snapshot()).query().to_anndata()
    values = joined.X.toarray().tolist(), joined.obs.reset_index(drop=True).to_csv(), list(joined.var_names)
    return [list(atlas.list_datasets()["name"]), *values]


def check_sound(atlas: RaggedAtlas, names: list[str]) -> None:
    """These datasets are there, each once, and nothing else."""
    assert sorted(atlas.list_datasets()["name"]) == sorted(names)
    assert [problem for problem in atlas.validate("deep") if problem.level == "must"] == []
    assert set(atlas._catalog.arrays.list_children()) - {"zarr.json"} == set(atlas.list_datasets().index)
    assert atlas._catalog.tables.count("cells") == int(atlas.list_datasets()["n_cells"].sum())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["processes", pytest.param("dask", marks=pytest.mark.nightly)])
def test_the_atlas_is_the_same(kind: str, atlas: RaggedAtlas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports, layouts, names, columns and values are those of a call without workers, also over several commits."""
    paths = files(tmp_path / "files", 5)
    same = tmp_path / "files" / "more"
    same.mkdir()
    made(7).write_h5ad(same / "f0.h5ad")
    monkeypatch.setattr(adding, "COMMIT_DATASETS", 2)
    local = RaggedAtlas.create(str(tmp_path / "local"))
    steps: list[tuple[str, int, int]] = []
    if kind == "dask":
        pytest.importorskip("distributed")
    with POOLS[kind]() as executor:
        reports = atlas.add([*paths, same], progress=lambda *step: steps.append(step), executor=executor)
    assert told(reports) == told(local.add([*paths, same], progress=False))
    assert [step for step in steps if step[0] == "sources"] == [("sources", i, 6) for i in range(1, 7)]
    check_sound(atlas, ["f0", "f1", "f2", "f3", "f4", "f0-2"])
    assert content(atlas) == content(local)


@pytest.mark.long
def test_clashes_within_a_call_are_judged(processes: Executor, atlas: RaggedAtlas, tmp_path: Path) -> None:
    """A column of another type, content that comes twice and a file that does not open are refused as without workers."""
    paths = files(tmp_path / "files", 4)
    clashing = made(1)
    clashing.obs["score"] = "text"
    clashing.write_h5ad(paths[1])
    paths[2].write_bytes(paths[0].read_bytes())
    paths[3].write_bytes(b"nothing")
    said = []
    for executor, place in ((None, RaggedAtlas.create(str(tmp_path / "local"))), (processes, atlas)):
        with pytest.raises(SourceError, match="3 of 4 sources were refused, the other 1 are") as error:
            place.add(paths, progress=False, executor=executor)
        said.append(str(error.value))
        check_sound(place, ["f0"])
    assert said[0] == said[1]
    reports = atlas.add(paths[:3], progress=False, executor=processes, on_duplicate="skip", on_clash="rename")
    assert [report.status for report in reports] == ["skipped", "added", "skipped"]
    check_sound(atlas, ["f0", "f1"])


def test_a_dry_run_by_workers_writes_nothing(
    processes: Executor, atlas: RaggedAtlas, tmp_path: Path, unchanged: Any
) -> None:
    """Each source gets its report, and the atlas stays as it is."""
    with unchanged(atlas):
        reports = atlas.add(files(tmp_path / "files", 2), progress=False, executor=processes, dry_run=True)
    assert [report.status for report in reports] == ["dry run"] * 2


@pytest.mark.long
@pytest.mark.parametrize("fault", ["killed", pytest.param("hangs", marks=pytest.mark.nightly)])
def test_a_worker_that_is_lost(atlas: RaggedAtlas, tmp_path: Path, fault: str) -> None:
    """The call ends with one clear line, nothing that it wrote is left, and the same call finishes the work."""
    paths = files(tmp_path / "files", 3)
    with POOLS["processes"]() as pool:
        said, timeout = ("A worker died", None) if fault == "killed" else ("a worker hangs", 15)
        with pytest.raises(WorkersError, match=rf"{said}.*Nothing of sources that were not committed is visible"):
            atlas.add([*paths, Faulty(made(8), fault)], progress=False, executor=Workers(pool, timeout=timeout))
    atlas.repair()
    check_sound(atlas, [])
    with ThreadPoolExecutor(2) as threads:
        atlas.add([*paths, made(8)], progress=False, executor=threads)
    assert len(atlas.list_datasets()) == 4


@pytest.mark.nightly
def test_a_full_disk_on_one_worker(atlas: RaggedAtlas, tmp_path: Path) -> None:
    """The source of that worker is refused by name with nothing left of it; the others are added."""
    paths = files(tmp_path / "files", 3)
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(SourceError, match=rf"1 of 4 sources were refused, the other 3 are .*{os.strerror(errno.EFBIG)}"),
    ):
        atlas.add([*paths, Faulty(made(8), "disk is full")], progress=False, executor=pool)
    check_sound(atlas, ["f0", "f1", "f2"])


def test_upkeep_leaves_what_workers_write(processes: Executor, atlas: RaggedAtlas, tmp_path: Path) -> None:
    """repair() and gc() of others take nothing away between staging and commit."""
    paths = files(tmp_path / "files", 3)

    def tidy(step: str, done: int, total: int) -> None:
        if step == "sources":
            other = RaggedAtlas.open(atlas.uri)
            other.repair()
            other.gc(dry_run=False, grace=timedelta(0))

    atlas.add(paths, progress=tidy, executor=processes)
    check_sound(atlas, ["f0", "f1", "f2"])


ADD = """
import sys
from pathlib import Path
from raggedatlas.atlas import RaggedAtlas
from raggedatlas.store.executors import spawned
if __name__ == "__main__":
    atlas = RaggedAtlas.open(sys.argv[1])
    def told(step, done, total):
        print(step, flush=True)
        if step == sys.argv[3]:
            sys.stdin.read()
    with spawned(2) as pool:
        atlas.add(sorted(Path(sys.argv[2]).glob("*.h5ad")), progress=told, executor=pool)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "step",
    [
        *(
            pytest.param(step, marks=pytest.mark.nightly)
            for step in ("sources", "columns", "features", "layouts", "done")
        ),
        "cells",
        "records",
    ],
)
def test_a_caller_that_is_killed(atlas: RaggedAtlas, tmp_path: Path, step: str) -> None:
    """Nothing or all is visible after each kind of write, workers end, what they left is freed, and the call can be made again."""
    visible = step in {"records", "done"}
    paths = files(tmp_path / "files", 3)
    (tmp_path / "script.py").write_text(ADD)
    words = [sys.executable, str(tmp_path / "script.py"), atlas.uri, str(tmp_path / "files"), step]
    with started(words, stdin=subprocess.PIPE, stderr=None) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.strip() == step:
                break
        run.send_signal(signal.SIGKILL)
        assert not run.stdout.read()  # the workers had it open too, so they have ended
    assert len(atlas.list_datasets()) == (3 if visible else 0)
    atlas.repair()
    check_sound(atlas, ["f0", "f1", "f2"] if visible else [])
    reports = atlas.add(paths, progress=False, on_duplicate="skip")
    assert {report.status for report in reports} == ({"skipped"} if visible else {"added"})
    check_sound(atlas, ["f0", "f1", "f2"])


def test_another_place_under_the_same_address(
    processes: Executor, atlas: RaggedAtlas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a worker wrote is looked for before it is committed."""
    monkeypatch.setattr(adding, "read_lease", lambda *_: None)
    with pytest.raises(WorkersError, match="A worker wrote 'f0' to a place that is not"):
        atlas.add(files(tmp_path / "files", 1), progress=False, executor=processes)
    assert not len(atlas.list_datasets())


def test_what_workers_cannot_take_is_refused(
    processes: Executor, atlas: RaggedAtlas, tmp_path: Path, unchanged: Any
) -> None:
    """An open file cannot be sent, and results are added by the caller alone."""
    (path,) = files(tmp_path / "files", 1)
    with unchanged(atlas), pytest.raises(ArgumentError, match="The work cannot be sent to workers"):
        atlas.add(ad.read_h5ad(path, backed="r"), "backed", progress=False, executor=processes)
    atlas.add(path, progress=False)
    results = infer("numpy:sqrt", atlas.checkout(atlas.snapshot()).query(), tmp_path / "z")
    with pytest.raises(ArgumentError, match="executor= for files of cells"):
        atlas.add(results, "z", progress=False, executor=processes)


@pytest.mark.nightly
def test_column_sorted_copies_are_the_same(processes: Executor, atlas: RaggedAtlas, tmp_path: Path) -> None:
    """A copy that a worker wrote has the bytes of one that was written here."""
    local = RaggedAtlas.create(str(tmp_path / "local"))
    found = []
    for place, executor in ((local, None), (atlas, processes)):
        data = made(3)
        data.layers["other"] = sp.csr_matrix(np.eye(30, 12, dtype=np.float32))
        uid = place.add(data, "one", progress=False).dataset_uid
        assert place.add_csc("one", executor=executor) == ("counts", "other")
        assert place.add_csc("one", executor=executor) == ()
        root = place._catalog.arrays.child(uid).path
        copies = sorted(path for path in root.rglob("csc/**/*") if path.is_file() and path.name != "zarr.json")
        found.append([(path.relative_to(root), path.read_bytes()) for path in copies])
    assert found[0] == found[1] != []
    check_sound(atlas, ["one"])
