"""An object store that refuses, is full or is not there: one error that says so, after few requests."""

from collections.abc import Callable
from pathlib import Path

import pytest

import raggedatlas as ra
from raggedatlas.errors import StoreError
from raggedatlas.model.spaces import FeatureSpace
from support.atlases import small_anndata
from support.object_store import Remote

SPACE = FeatureSpace("scores", "dense")

pytestmark = pytest.mark.s3

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


def test_a_new_atlas_where_nothing_can_be_written(remote: Remote) -> None:
    """`create` says that the bucket refuses it, or that there is no such bucket."""
    remote.proxy.refuse("PUT", 403, "AccessDenied")
    with pytest.raises(StoreError, match=r"refuses access \(403 AccessDenied\)"):
        ra.RaggedAtlas.create(remote.uri, storage_options=remote.options)


def test_a_server_that_is_not_there(remote: Remote) -> None:
    """Nobody listens at the endpoint: that is said, with its address."""
    options = {**remote.options, "aws_endpoint": "http://127.0.0.1:1"}
    with pytest.raises(StoreError, match=r"no answer from 127\.0\.0\.1:1\. Check the address, the endpoint"):
        ra.RaggedAtlas.open(remote.uri, storage_options=options)
