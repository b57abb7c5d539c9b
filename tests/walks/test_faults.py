"""An object store that loses acknowledgements or is busy: every write happens once."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import raggedatlas as ra
from raggedatlas.catalog import deletion
from raggedatlas.store.tables import Tables
from support.atlases import GENES, small_anndata
from support.object_store import Remote

pytestmark = pytest.mark.s3

GROUP = r"zarr_store/[0-9a-f]{16}"
LOST = {
    "lease": ("add", GROUP + r"/zarr\.json$"),
    "shard": ("add", r"/csr/indices/c/0$"),
    "shard of values": ("add", r"/csr/layers/counts/c/0$"),
    "metadata of the group": ("add", r"/gene_expression/zarr\.json$"),
    "bundle": ("add", GROUP + r"/bundle\.zip$"),
    "data of cells": ("add", r"/cells\.lance/data/"),
    "transaction of cells": ("add", r"/cells\.lance/_transactions/"),
    "commit of cells": ("add", r"/cells\.lance/_versions/"),
    "commit of records": ("add", r"/datasets\.lance/_versions/"),
    "commit of features": ("add", r"/gene_expression_registry\.lance/_versions/"),
    "commit of layouts": ("add", r"/_feature_layouts\.lance/_versions/"),
    "compaction of cells": ("optimize", r"/cells\.lance/_versions/"),
    "indices of features": ("optimize", r"/_feature_layouts\.lance/_versions/"),
    "data of snapshots": ("snapshot", r"/atlas_versions\.lance/data/"),
    "commit of snapshots": ("snapshot", r"/atlas_versions\.lance/_versions/"),
    "provisional tag": ("snapshot", r"/_refs/tags/pending"),
    "tag": ("snapshot", r"/_refs/tags/atlas-v"),
}
"""Write -> the call that makes it, and the object."""
USUAL = {"shard", "commit of cells", "commit of records", "commit of snapshots"}

LOST_IN_DELETION = {
    "rows": ("write_frame", r"/frames/deleted\."),
    "commit of the record": ("update_metadata_if", r"/cells\.lance/_versions/"),
    "deleted rows of cells": ("delete_at", r"/cells\.lance/_deletions/"),
    "transaction of cells": ("delete_at", r"/cells\.lance/_transactions/"),
    "commit of cells": ("delete_at", r"/cells\.lance/_versions/"),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An atlas of one dataset, in a folder."""
    folder = tmp_path_factory.mktemp("begun") / "my.atlas"
    atlas = ra.RaggedAtlas.create(str(folder))
    atlas.add(small_anndata(1, 6), "first", organism="human")
    return folder


@pytest.fixture(scope="module")
def complete(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An atlas of two datasets without a snapshot, in a folder."""
    folder = tmp_path_factory.mktemp("complete") / "my.atlas"
    shutil.copytree(begun, folder)
    add_second(ra.RaggedAtlas.open(str(folder)))
    return folder


@pytest.fixture(scope="module")
def tidy(complete: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, optimized."""
    folder = tmp_path_factory.mktemp("tidy") / "my.atlas"
    shutil.copytree(complete, folder)
    ra.RaggedAtlas.open(str(folder)).optimize()
    return folder


def add_second(atlas: ra.RaggedAtlas) -> None:
    """Add a dataset with other genes and a new column."""
    atlas.add(small_anndata(2, 6, GENES[5:15], extra="age"), "second", organism="human")


def snapshot_first(atlas: ra.RaggedAtlas) -> None:
    assert atlas.snapshot("both") == 1


def assert_one_copy(remote: Remote, folder: Path) -> None:
    """Two datasets of six cells each, one snapshot of them, and nothing wrong."""
    atlas = ra.RaggedAtlas.open(str(remote.download(folder)))
    listed = atlas.list_datasets()
    assert listed["name"].tolist() == ["first", "second"]
    assert listed["n_cells"].tolist() == [6, 6]
    if not atlas.list_versions():
        atlas.snapshot("both")
    assert [(record.version, record.label) for record in atlas.list_versions()] == [(1, "both")]
    assert atlas.validate("deep") == []
    assert atlas.gc().groups == ()
    result = atlas.checkout("both").query().to_anndata()
    assert result.obs["dataset"].tolist() == ["first"] * 6 + ["second"] * 6
    assert result.obs.index.is_unique
    assert sorted(result.var["symbol"]) == sorted(GENES[:15])
    assert result.X.sum() == small_anndata(1, 6).X.sum() + small_anndata(2, 6, GENES[5:15]).X.sum()
    for table, version in atlas.checkout("both").record.table_versions.items():
        assert atlas._catalog.tables.tags(table) == {"atlas-v1": version}


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "pattern"),
    [pytest.param(*lost, id=name, marks=[] if name in USUAL else [pytest.mark.nightly]) for name, lost in LOST.items()],
)
def test_a_lost_acknowledgement(
    remote: Remote, begun: Path, complete: Path, tidy: Path, tmp_path: Path, call: str, pattern: str
) -> None:
    """The server has done a write of a call and its answer is lost: there is one dataset, with each row once, and one record, which is held."""
    before = {"add": begun, "optimize": complete, "snapshot": tidy}[call]
    remote.upload(before)
    atlas = ra.RaggedAtlas.open(remote.uri, storage_options=remote.options)
    remote.proxy.cut_after("PUT", pattern)
    {"add": add_second, "optimize": ra.RaggedAtlas.optimize, "snapshot": snapshot_first}[call](atlas)
    assert len(remote.proxy.lost) == 1
    assert_one_copy(remote, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "pattern"),
    [
        pytest.param(*lost, id=name, marks=[pytest.mark.nightly] if name in ("rows", "transaction of cells") else [])
        for name, lost in LOST_IN_DELETION.items()
    ],
)
def test_a_lost_acknowledgement_in_delete_cells(
    remote: Remote, complete: Path, tmp_path: Path, step: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has done a write of a deletion and its answer is lost: the cells of both datasets are deleted, once."""
    remote.upload(complete)
    atlas = ra.RaggedAtlas.open(remote.uri, storage_options=remote.options)
    owner: Any = deletion if step == "write_frame" else Tables
    usual, cut = getattr(owner, step), []

    def step_that_loses(*args: Any, **given: Any) -> Any:
        if not cut:
            cut.append(remote.proxy.cut_after("PUT", pattern))
        return usual(*args, **given)

    monkeypatch.setattr(owner, step, step_that_loses)
    assert atlas.delete_cells({"cell_name": ["CELL1-0", "CELL2-3"]}).n_cells == 2
    assert len(remote.proxy.lost) == 1
    there = ra.RaggedAtlas.open(str(remote.download(tmp_path)))
    assert there.list_datasets()["n_cells"].tolist() == [5, 5]
    assert len(there._catalog.deletions()) == len(there._catalog.recorded_deletions()) == 1
    assert [problem for problem in there.validate("rows") if problem.level == "must"] == []
    view = there.checkout(there.snapshot())
    assert view.query().count() == 10
    assert [problem for problem in view.validate("deep") if problem.level == "must"] == []


@pytest.mark.nightly
def test_a_busy_store(remote: Remote, begun: Path, tidy: Path, tmp_path: Path) -> None:
    """Every fourth request is answered 503: everything takes place all the same, once."""
    for before, act in ((begun, add_second), (tidy, snapshot_first)):
        there = Remote.make(remote.proxy)
        there.upload(before)
        atlas = ra.RaggedAtlas.open(there.uri, storage_options=there.options)
        remote.proxy.fail_every = 4
        act(atlas)
        assert sum(request.status == 503 for request in remote.proxy.requests) > 10
        assert_one_copy(there, tmp_path / before.parent.name)
