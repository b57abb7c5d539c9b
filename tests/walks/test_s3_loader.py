"""Training from an object store: the batches of a folder, in a number of requests that is held, and from a disk cache in none."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raggedatlas as ra
from raggedatlas.query.query import Query
from raggedatlas.store.runtime import process_cache
from support.atlases import GENES, small_anndata
from support.object_store import Remote

pytestmark = pytest.mark.s3
N_GROUPS, N_ARRAYS = 3, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An atlas of three datasets with 700 cells in a snapshot."""
    made = tmp_path_factory.mktemp("loader") / "my.atlas"
    atlas = ra.RaggedAtlas.create(str(made))
    for seed, n in ((1, 400), (2, 200), (3, 100)):
        atlas.add(small_anndata(seed, n, GENES[seed : seed + 12]), f"d{seed}", organism="human")
    atlas.snapshot()
    return made


@dataclass(frozen=True)
class Place:
    """The same atlas in a folder and in a bucket."""

    remote: Remote
    here: Query
    there: Query

    def cost(self, action: Callable[[], Any]) -> tuple[int, Any]:
        """Count the requests of an action as in a fresh process, and give its result."""
        process_cache("indexes").entries.clear()
        before = len(self.remote.proxy.requests)
        result = action()
        return len(self.remote.proxy.requests) - before, result


@pytest.fixture
def place(remote: Remote, folder: Path) -> Place:
    remote.upload(folder)
    there = ra.RaggedAtlas.checkout_latest(remote.uri, storage_options=remote.options)
    return Place(remote, ra.RaggedAtlas.checkout_latest(str(folder)).query(), there.query())


def same(ours: list[Any], theirs: list[Any]) -> None:
    """Compare batches of two loaders."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.uids, other.uids)
        np.testing.assert_array_equal(one.X.toarray(), other.X.toarray())
        np.testing.assert_array_equal(one.labels("cell_type"), other.labels("cell_type"))


@pytest.mark.nightly
def test_batches_are_those_of_a_folder(place: Place) -> None:
    """An epoch gives the same batches; each read of 1,024 cells costs one request for each array of each dataset it touches."""
    for shuffle, size in (("full", 512), ("full", 64), ("blocks", 100), (None, 100)):
        loaders = [
            ra.Loader(query, size, shuffle=shuffle, seed=3, obs=["cell_type"]) for query in (place.there, place.here)
        ]
        requests, batches = place.cost(lambda: list(loaders[0]))  # noqa: B023
        same(batches, list(loaders[1]))
        n_reads = 1 if shuffle == "blocks" else 2
        assert requests <= (1 + n_reads) * N_GROUPS * N_ARRAYS


@pytest.mark.long
def test_a_map_style_batch_is_that_of_a_folder(place: Place) -> None:
    """Any rows in any order; a batch costs one request for each array of each dataset it touches, the first one two."""
    ours, theirs = (ra.CellDataset(query, obs=["cell_type"]) for query in (place.there, place.here))
    rng = np.random.default_rng(0)
    for number in range(4):
        rows = rng.integers(0, 700, 32)
        before = len(place.remote.proxy.requests)
        batch = ours[rows]
        assert len(place.remote.proxy.requests) - before <= (2 - min(number, 1)) * N_GROUPS * N_ARRAYS
        same([batch], [theirs[rows]])


@pytest.mark.nightly
def test_spawned_workers_share_a_cache(place: Place, tmp_path: Path) -> None:
    """Ranks in processes of their own give the batches of a folder, and what one has read costs no other a request."""
    options = {**place.remote.options, "cache_dir": str(tmp_path)}
    query = ra.RaggedAtlas.checkout_latest(place.remote.uri, storage_options=options).query()
    loaders = [ra.Loader(query, 64, seed=3, obs=["cell_type"], rank=rank, world_size=2) for rank in range(2)]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        batches = pool.map(list, loaders).__next__(), list(loaders[1])
    for rank, own in enumerate(batches):
        same(own, list(ra.Loader(place.here, 64, seed=3, obs=["cell_type"], rank=rank, world_size=2)))
    for loader in loaders:
        loader.set_epoch(0)
        assert place.cost(lambda: list(loader))[0] == 0  # noqa: B023
