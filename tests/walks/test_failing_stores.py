"""Stores that refuse, fail, lose answers, are full or not there: one error that says so, after few requests, and nothing half done."""

import datetime as dt
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import raggedatlas as ra
from raggedatlas.errors import AtlasError, StoreError
from raggedatlas.model.spaces import FeatureSpace
from support.atlases import small_anndata
from support.object_store import FaultyProxy, Remote

SPACE = FeatureSpace("scores", "dense")

CHANGES: dict[str, Callable[[ra.RaggedAtlas], object]] = {
    "add": lambda atlas: atlas.add(small_anndata(2, 6), "second", organism="human"),
    "delete_cells": lambda atlas: atlas.delete_cells({"cell_name": "CELL1-0"}),
    "drop_dataset": lambda atlas: atlas.drop_dataset("first"),
    "snapshot": lambda atlas: atlas.snapshot("x"),
    "optimize": lambda atlas: atlas.optimize(),
    "register_space": lambda atlas: atlas.register_space(SPACE),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An atlas of one dataset, in a folder."""
    folder = tmp_path_factory.mktemp("begun") / "my.atlas"
    ra.RaggedAtlas.create(str(folder)).add(small_anndata(1, 6), "first", organism="human")
    return folder


@pytest.mark.s3
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_bucket_without_write_access(remote: Remote, begun: Path, change: Callable[[ra.RaggedAtlas], object]) -> None:
    """Every change of an atlas that may only be read is refused for that reason, after few requests and not as a race."""
    remote.upload(begun)
    atlas = ra.RaggedAtlas.open(remote.uri, storage_options=remote.options)
    remote.proxy.requests.clear()
    for method in ("PUT", "POST", "DELETE"):
        remote.proxy.refuse(method, 403, "AccessDenied")
    with pytest.raises(StoreError, match=r"refuses access \(403 AccessDenied\). Check the credentials") as caught:
        change(atlas)
    assert len(remote.proxy.requests) < 60
    assert ".rs" not in str(caught.value)
    assert "retries" not in str(caught.value)


@pytest.mark.s3
def test_a_new_atlas_where_nothing_can_be_written(remote: Remote) -> None:
    """`create` says that the bucket refuses it, or that there is no such bucket."""
    remote.proxy.refuse("PUT", 403, "AccessDenied")
    with pytest.raises(StoreError, match=r"refuses access \(403 AccessDenied\)"):
        ra.RaggedAtlas.create(remote.uri, storage_options=remote.options)


@pytest.mark.s3
def test_a_server_that_is_not_there(remote: Remote) -> None:
    """Nobody listens at the endpoint: that is said, with its address."""
    options = {**remote.options, "aws_endpoint": "http://127.0.0.1:1"}
    with pytest.raises(StoreError, match=r"no answer from 127\.0\.0\.1:1\. Check the address, the endpoint"):
        ra.RaggedAtlas.open(remote.uri, storage_options=options)


def labels_of(atlas: ra.RaggedAtlas) -> pd.Series:
    """Make a label for each cell of the first dataset."""
    return pd.Series("x", index=[f"CELL1-{i}" for i in range(6)], name="label")


CALLS: dict[str, Callable[[ra.RaggedAtlas], object]] = {
    "add": CHANGES["add"],
    "annotate": lambda atlas: atlas.annotate(labels_of(atlas), "note", on="cell_name", dataset="first"),
    "drop_dataset": CHANGES["drop_dataset"],
    "snapshot": CHANGES["snapshot"],
    "query": lambda atlas: atlas.checkout(1).query().to_anndata(),
}
"""What meets every fault; each changes another part of `state_of`, but the last, which changes nothing."""

S3_FAULTS: dict[str, Callable[[FaultyProxy], object]] = {
    "answers of commits lost": lambda proxy: [proxy.cut_after("PUT", "_versions/") for _ in range(4)],
    "answers of data lost": lambda proxy: [
        proxy.cut_after("PUT", part) for part in ("/data/", "zarr_store/", "_refs/")
    ],
    "answers of reads lost": lambda proxy: [proxy.cut_after("GET", ".") for _ in range(5)],
    "500 at times": lambda proxy: vars(proxy).update(fail_every=5, failure=(500, "InternalError")),
    "503 at times": lambda proxy: vars(proxy).update(fail_every=5),
    "bodies cut at times": lambda proxy: vars(proxy).update(shorten_every=5),
    "500 on writes": lambda proxy: [proxy.refuse(method, 500, "InternalError") for method in ("PUT", "DELETE", "POST")],
    "503 on writes": lambda proxy: [proxy.refuse(method, 503, "SlowDown") for method in ("PUT", "DELETE", "POST")],
    "500 on reads": lambda proxy: proxy.refuse("GET", 500, "InternalError"),
}
"""What a bucket does; lost answers and errors at times are to be overcome by repeating the request. Lance does not repeat one whose body is cut."""

USUAL = [("answers of commits lost", "annotate"), ("503 at times", "drop_dataset")]
"""Those of the usual tests."""


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An atlas with a snapshot and a dataset more, in a folder."""
    folder = tmp_path_factory.mktemp("complete") / "my.atlas"
    atlas = ra.RaggedAtlas.create(str(folder))
    atlas.add(small_anndata(1, 6), "first", organism="human")
    atlas.snapshot()
    atlas.add(small_anndata(3, 6), "third", organism="human")
    return folder


def state_of(atlas: ra.RaggedAtlas) -> tuple[object, ...]:
    """What the calls change: datasets and their cells, annotations, snapshots."""
    listed = atlas.list_datasets()
    versions = [(record.version, record.label, record.n_cells) for record in atlas.list_versions()]
    return sorted(zip(listed["name"], listed["n_cells"], strict=True)), [*atlas.annotations().index], versions


@pytest.fixture(scope="module")
def after(complete: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[object, ...]]:
    """The states that the calls lead to where nothing fails; ``""`` is the one before."""
    found = {"": state_of(ra.RaggedAtlas.open(str(complete)))}
    for name, call in CALLS.items():
        folder = tmp_path_factory.mktemp(name) / "my.atlas"
        shutil.copytree(complete, folder)
        atlas = ra.RaggedAtlas.open(str(folder))
        call(atlas)
        found[name] = state_of(atlas)
    return found


def attempt(call: Callable[[ra.RaggedAtlas], object], atlas: ra.RaggedAtlas) -> AtlasError | None:
    """Make a call, and return the error of ours that it ended with."""
    try:
        call(atlas)
    except AtlasError as error:
        return error
    return None


def settle(folder: Path, name: str, error: AtlasError | None, after: Mapping[str, tuple[object, ...]]) -> None:
    """After a fault, an atlas is as before the call or as after it, which a call that was done says; it is sound, and the call can be made again."""
    atlas = ra.RaggedAtlas.open(str(folder))
    there = state_of(atlas)
    assert there == after[name] or (error and there == after[""]), (there, error)
    atlas.repair()
    if there != after[name]:
        CALLS[name](atlas)
    assert state_of(atlas) == after[name]
    assert [problem for problem in atlas.validate("deep") if problem.level == "must"] == []
    expected = small_anndata(1, 6).X.sum()
    assert atlas.checkout(1).query().to_anndata().X.sum() == expected


@pytest.mark.s3
@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        pytest.param(fault, name, marks=[] if (fault, name) in USUAL else [pytest.mark.nightly])
        for fault in S3_FAULTS
        for name in CALLS
    ],
)
def test_a_call_while_a_bucket_fails(
    remote: Remote, complete: Path, after: dict[str, tuple[object, ...]], tmp_path: Path, fault: str, name: str
) -> None:
    """Nothing is lost, doubled or left half done; what a repeated request overcomes is no error."""
    remote.upload(complete)
    atlas = ra.RaggedAtlas.open(remote.uri, storage_options=remote.options)
    S3_FAULTS[fault](remote.proxy)
    error = attempt(CALLS[name], atlas)
    remote.proxy.forget()
    overcome = "lost" in fault or fault in ("500 at times", "503 at times")
    assert not (error and overcome), error
    assert error is None or isinstance(error, StoreError), error
    settle(remote.download(tmp_path / "my.atlas"), name, error, after)


def mounted(folder: Path, *options: str) -> None:
    """Mount something on a folder, which takes root."""
    mount = shutil.which("mount")
    if not mount or subprocess.run([mount, *options, folder], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")


@pytest.mark.parametrize(
    "left", [pytest.param(0, marks=pytest.mark.nightly), pytest.param(4096, marks=pytest.mark.nightly), 40960]
)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_while_the_disk_is_full(
    complete: Path, after: dict[str, tuple[object, ...]], tmp_path: Path, name: str, left: int
) -> None:
    """The disk is said to be full, and once there is room everything is as before or as after."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted(disk, "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    try:
        shutil.copytree(complete, disk / "my.atlas")
        room = os.statvfs(disk)
        (disk / "full").write_bytes(bytes(room.f_bavail * room.f_frsize - left))
        error = attempt(CALLS[name], ra.RaggedAtlas.open(str(disk / "my.atlas")))
        (disk / "full").unlink()
        assert error is None or "No space left" in str(error), error
        settle(disk / "my.atlas", name, error, after)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_a_read_only_file_system(
    complete: Path, after: dict[str, tuple[object, ...]], tmp_path: Path, name: str
) -> None:
    """A query is answered; what writes is refused for that reason, and has changed nothing."""
    (tmp_path / "mount").mkdir()
    shutil.copytree(complete, tmp_path / "my.atlas")
    mounted(tmp_path / "mount", "--bind", "-o", "ro", str(tmp_path))
    try:
        error = attempt(CALLS[name], ra.RaggedAtlas.open(str(tmp_path / "mount" / "my.atlas")))
    finally:
        subprocess.run(["umount", "-l", tmp_path / "mount"], check=True)
    assert (error is None) == (name == "query")
    assert error is None or "Read-only file system" in str(error), error
    settle(tmp_path / "my.atlas", name, error, after)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_after_the_clock_was_set_back(
    complete: Path, after: dict[str, tuple[object, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A day earlier than what is there already: everything is done, and clean-up takes nothing that is needed."""

    class Earlier(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> "Earlier":
            return super().now(tz) - dt.timedelta(days=1)

    shutil.copytree(complete, tmp_path / "my.atlas")
    for module in [m for key, m in sys.modules.items() if key.startswith("raggedatlas.") and hasattr(m, "datetime")]:
        if module.datetime is dt.datetime:
            monkeypatch.setattr(module, "datetime", Earlier)
    atlas = ra.RaggedAtlas.open(str(tmp_path / "my.atlas"))
    error = attempt(CALLS[name], atlas)
    assert error is None
    atlas.optimize()
    atlas.gc(dry_run=False)
    monkeypatch.undo()
    settle(tmp_path / "my.atlas", name, error, after)


@pytest.mark.s3
@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("copied", "damaged", "read-only")]
    + ["of another atlas", "of folders"],
)
def test_a_disk_cache_of_another_machine(remote: Remote, complete: Path, tmp_path: Path, kind: str) -> None:
    """Whatever is in the folder of a cache, a query gives what the bucket has."""
    remote.upload(complete)
    options = {**remote.options, "cache_dir": str(tmp_path / "first")}

    def read(folder: str) -> float:
        view = ra.RaggedAtlas.open(remote.uri, storage_options={**options, "cache_dir": str(tmp_path / folder)})
        return float(view.checkout(1).query().to_anndata().X.sum())

    expected = read("first")
    assert expected == small_anndata(1, 6).X.sum()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    files = sorted(file for file in (tmp_path / "second").rglob("*") if file.is_file())
    rng = np.random.default_rng(0)
    for file in files:
        data = file.read_bytes()
        if kind == "of another atlas":
            file.write_bytes(rng.bytes(len(data)))
        elif kind == "damaged":
            file.write_bytes(data[: len(data) // 2] + bytes(3) + data[len(data) // 2 + 3 :])
        elif kind == "of folders":
            file.unlink()
            file.mkdir()
        elif kind == "read-only":
            file.chmod(0o444)
            file.parent.chmod(0o555)
    assert read("second") == expected
    for folder in (tmp_path / "second").rglob("*"):
        folder.chmod(0o755)
