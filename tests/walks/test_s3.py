"""The whole main job on an object store, in a number of requests that is held (docs/reference/requests.md)."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
import pytest

import raggedatlas as ra
from raggedatlas.store.bundle import FILE as BUNDLE
from raggedatlas.store.runtime import process_cache
from support.atlases import GENES, small_anndata
from support.object_store import FaultyProxy, Remote, count_in_sequence

pytestmark = [
    pytest.mark.s3,
    pytest.mark.filterwarnings("ignore:The '(future.infer_string|mode.chained_assignment)' option:DeprecationWarning"),
]


@pytest.mark.long
def test_the_walk(remote: Remote, data_dir: Path, tmp_path: Path) -> None:
    """Everything that a person does with a folder works with the address of a bucket, and gives the same."""
    homes = {"remote": (remote.uri, remote.options), "local": (str(tmp_path / "local.atlas"), None)}
    results: dict[str, Any] = {}
    for home, (uri, options) in homes.items():
        atlas = ra.RaggedAtlas.create(uri, storage_options=options)
        atlas.add(data_dir / "lung_C144.h5")
        atlas.add(data_dir / "pbmc_10k_protein_v3.h5ad", organism="human")
        atlas.snapshot("first")
        view = ra.RaggedAtlas.checkout_latest(uri, storage_options=options)
        query = view.query().where("n_genes > 1000 OR n_genes IS NULL").features("CD79A", "SFTPC")
        results[home] = query.to_anndata()
        if home == "remote":
            query.write(str(tmp_path / "out.h5ad"))
            written = anndata.read_h5ad(tmp_path / "out.h5ad")
            np.testing.assert_array_equal(written.X.toarray(), results[home].X.toarray())
            assert view.validate("deep") == []
    ours, theirs = results["remote"], results["local"]
    np.testing.assert_array_equal(ours.X.toarray(), theirs.X.toarray())
    assert ours.obs["cell_name"].tolist() == theirs.obs["cell_name"].tolist()
    np.testing.assert_array_equal(np.asarray(ours.varm["measured"]), np.asarray(theirs.varm["measured"]))
    assert sorted(map(tuple, np.asarray(ours.varm["measured"]).T.tolist())) == [(True, False), (True, True)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An atlas of three datasets and a snapshot, in a folder."""
    folder = tmp_path_factory.mktemp("three") / "my.atlas"
    atlas = ra.RaggedAtlas.create(str(folder))
    for seed in (1, 2, 3):
        source = small_anndata(seed, 400 if seed == 1 else 10, GENES[seed : seed + 12])
        atlas.add(source, f"d{seed}", organism="human")
    atlas.snapshot()
    return folder


@pytest.mark.nightly
def test_dropped_datasets_leave_the_bucket(remote: Remote, three: Path) -> None:
    """A dataset that no snapshot holds is freed by gc, a purged one at once and from the snapshots too."""
    remote.upload(three)
    atlas = ra.RaggedAtlas.open(remote.uri, storage_options=remote.options)
    arrays = atlas._catalog.arrays
    kept = arrays.list_children()
    uid = atlas.add(small_anndata(4), "d4", organism="human").dataset_uid
    atlas.drop_dataset("d4")
    assert atlas.gc().groups == (uid,)
    atlas.gc(dry_run=False)
    assert arrays.list_children() == kept
    purged = atlas.list_datasets().index[1]
    atlas.purge("d2")
    assert arrays.list_children() == sorted(set(kept) - {purged})
    assert atlas.checkout(1).list_datasets()["name"].tolist() == ["d1", "d3"]
    assert [problem for problem in atlas.validate("deep") if problem.level == "must"] == []


LOST = (
    r"zarr_store/.*zarr\.json",
    r"/c/0",
    r"cells\.lance/_versions",
    r"_refs/tags",
    r"atlas_versions\.lance/_versions",
    r"head\.json",
)
"""Writes of a mirror whose acknowledgement is lost: the store has the object, the caller is not told."""


@pytest.mark.long
@pytest.mark.parametrize("cached", [False, pytest.param(True, marks=pytest.mark.long)])
def test_datasets_share_a_bundle_in_a_bucket(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """They are packed there, read by ranges of it, in part and complete, with a disk cache and without, and purged."""
    monkeypatch.setattr("raggedatlas.catalog.bundles.WORTH", 2)
    monkeypatch.setattr("raggedatlas.store.read.SMALL_SHARD", 2**12)
    monkeypatch.setattr("raggedatlas.store.shards.SMALL_SHARD", 2**12)
    local = ra.RaggedAtlas.create(str(tmp_path / "my.atlas"))
    made = {f"d{seed}": small_anndata(seed, 40 if seed < 3 else 10_000) for seed in (1, 2, 3)}
    for name, adata in made.items():
        local.add(adata, name, progress=False)
    local.snapshot()
    remote.upload(tmp_path / "my.atlas")
    options = {**remote.options, **({"cache_dir": str(tmp_path / "cache")} if cached else {})}
    atlas = ra.RaggedAtlas.open(remote.uri, storage_options=options)
    atlas.optimize()
    atlas.snapshot()
    atlas.drop_snapshot(1)
    atlas.gc(dry_run=False, grace=timedelta(0))
    arrays = atlas._catalog.arrays
    assert len({key for key, _, _ in arrays.list_objects() if "shared-" not in key}) <= 1
    view = ra.RaggedAtlas.open(remote.uri, storage_options=options).checkout(2)
    for _ in range(2):
        few, same = (at.query().sample(5, seed=1).to_anndata() for at in (view, local.checkout(1)))
        assert few.obs_names.equals(same.obs_names)
        assert (few.X != same.X).nnz == 0
    for name, adata in made.items():
        assert (view.dataset(name).to_anndata().X != adata.X).nnz == 0
    atlas.purge("d2")
    assert (atlas.dataset("d3").to_anndata().X != made["d3"].X).nnz == 0
    assert not [problem for problem in atlas.validate("deep") if problem.level == "must"]


def test_an_atlas_is_mirrored_into_a_bucket(remote: Remote, three: Path) -> None:
    """The bucket has the snapshots, a second call copies nothing, and lost acknowledgements change nothing."""
    atlas = ra.RaggedAtlas.open(three)
    for pattern in LOST:
        remote.proxy.cut_after("PUT", pattern)
    assert len(atlas.sync(remote.uri, storage_options=remote.options).groups) == 3
    assert len(remote.proxy.lost) == len(LOST)
    view = ra.RaggedAtlas.checkout_latest(remote.uri, storage_options=remote.options)
    np.testing.assert_array_equal(
        view.query().to_anndata().X.toarray(), atlas.checkout(1).query().to_anndata().X.toarray()
    )
    assert [problem for problem in view.validate("deep") if problem.level == "must"] == []
    assert dict(view.verify().snapshots) == dict(atlas.verify().snapshots)
    assert atlas.sync(remote.uri, storage_options=remote.options).n_bytes == 0


@pytest.mark.long
def test_verification_of_a_bucket_skips_what_is_known(
    remote: Remote, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incremental call after another makes few requests; an object that is written again is read again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remote.upload(three)
    atlas = ra.RaggedAtlas.open(remote.uri, storage_options=remote.options)
    first = cost(remote.proxy, lambda: atlas.verify(incremental=True))
    again = cost(remote.proxy, lambda: atlas.verify(incremental=True))
    assert again < first / 2
    assert atlas.verify(incremental=True).n_files == 0
    uid = atlas.list_datasets().index[0]
    bundle = atlas._catalog.arrays.child(uid)
    good = bundle.read_bytes(BUNDLE)
    bundle.write_bytes(BUNDLE, good[:-1] + bytes([good[-1] ^ 1]))
    found = atlas.verify(incremental=True)
    assert [(problem.rule, problem.path) for problem in found] == [("bundle", uid)]
    bundle.write_bytes(BUNDLE, good)
    assert atlas.verify(incremental=True).sound


def cost(proxy: FaultyProxy, action: Callable[[], object]) -> int:
    """Count the requests of an action."""
    before = len(proxy.requests)
    action()
    return len(proxy.requests) - before


@pytest.mark.long
def test_a_query_makes_few_requests(remote: Remote, three: Path) -> None:
    """Opening a snapshot and reading k cells of g groups make at most the requests that the reference page says."""
    remote.upload(three)
    opened = {"storage_options": remote.options}
    view = ra.RaggedAtlas.checkout_latest(remote.uri, **opened)
    assert len(remote.proxy.requests) <= 5
    query = view.query()
    n_groups, n_arrays = 3, 2
    assert cost(remote.proxy, query.to_anndata) <= 18 + 2 * n_groups * n_arrays
    for asked, groups in (
        (query, 3),
        (query.where({"cell_type": "B"}), 3),
        (query.where({"dataset": ["d1", "d2"]}).features("GENE5"), 2),
        (query.where({"dataset": "d1"}).sample(50, seed=1), 1),
        (query.limit(1), 1),
    ):
        assert cost(remote.proxy, asked.to_anndata) <= 4 + groups * n_arrays
    assert cost(remote.proxy, lambda: query.count("dataset")) <= 2


@pytest.mark.long
def test_the_first_query_opens_tables_side_by_side(remote: Remote, three: Path) -> None:
    """The latency of an object store is not paid once for each table."""
    remote.upload(three)
    query = ra.RaggedAtlas.checkout_latest(remote.uri, storage_options=remote.options).query().limit(1)
    remote.proxy.latency, remote.proxy.most_at_once = 0.05, 0
    query.to_anndata()
    # One dataset, whose arrays are two at most.
    assert remote.proxy.most_at_once >= 4


def waits(remote: Remote, action: Callable[[], object], latency: float = 0.3) -> tuple[int, int]:
    """Count the requests of an action at a store with latency: one after the other, and all."""
    remote.proxy.forget()
    # Longer than what is computed between two requests, so that those that can be under way at once are.
    remote.proxy.latency = latency
    action()
    seen = [*remote.proxy.requests]
    remote.proxy.latency = 0.0
    return count_in_sequence(seen), len(seen)


@pytest.mark.parametrize(
    "latency", [pytest.param(0.0, marks=pytest.mark.long), pytest.param(0.4, marks=pytest.mark.nightly)]
)
def test_writes_make_few_requests(remote: Remote, three: Path, latency: float) -> None:
    """Calls that write make at most the requests that the reference page says, and, where they wait for these, as many of them one after the other."""
    opened = {"storage_options": remote.options}
    found = {"create": waits(remote, lambda: ra.RaggedAtlas.create(remote.uri, **opened), latency)}
    remote = Remote.make(remote.proxy)
    remote.upload(three)
    atlas = ra.RaggedAtlas.open(remote.uri, **opened)
    uids = atlas.checkout(1).query().obs([]).to_pandas().index
    scores = pd.DataFrame({"score": np.arange(len(uids), dtype=float)}, index=uids)
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: atlas.add(small_anndata(4), "d4", organism="human"),
        "add again": lambda: atlas.add(small_anndata(5), "d5", organism="human"),
        "list": lambda: atlas.add([small_anndata(20 + i) for i in range(10)], organism="human"),
        "annotate": lambda: atlas.annotate(scores),
        "delete": lambda: atlas.delete_cells(uids=list(uids[:1])),
        "rename": lambda: atlas.rename_dataset("d2", "second"),
        "drop": lambda: atlas.drop_dataset("d3"),
        "snapshot": atlas.snapshot,
        "unchanged": atlas.snapshot,
        "register_space": lambda: atlas.register_space(ra.FeatureSpace(name="mine", kind="dense", has_features=False)),
        "link": lambda: atlas.identity.link("GENE5", "GENE6"),
        "unlink": lambda: atlas.identity.unlink("GENE5"),
        "load": lambda: atlas.identity.load("tests/data/gene_tables/hgnc_complete_set_extract.txt"),
        "add_csc": lambda: atlas.add_csc("d1"),
        "drop_snapshot": lambda: atlas.drop_snapshot(1),
        "optimize": atlas.optimize,
        "gc": lambda: atlas.gc(dry_run=False),
        "repair": atlas.repair,
        "restore": lambda: atlas.restore(2),
        "purge": lambda: atlas.purge("d1"),
    }
    found |= {name: waits(remote, call, latency) for name, call in calls.items()}
    bounds = {
        "create": (13, 30), "add": (21, 60), "add again": (17, 45), "list": (50, 240), "annotate": (15, 45), "delete": (15, 40), "rename": (9, 25), "drop": (15, 30),
        "snapshot": (27, 175), "unchanged": (7, 30), "register_space": (6, 25), "link": (20, 40), "unlink": (18, 35), "load": (25, 45), "add_csc": (30, 50),
        "drop_snapshot": (11, 30), "optimize": (92, 400), "gc": (42, 330), "repair": (24, 90), "restore": (30, 80), "purge": (110, 480),
    }  # fmt: skip
    if not latency:
        # What is under way at once is chance.
        bounds = {name: (10_000, most) for name, (_, most) in bounds.items()}
    over = {name: n for name, n in found.items() if n[0] > bounds[name][0] or n[1] > bounds[name][1]}
    assert over == {}


@pytest.mark.long
def test_a_new_process_waits_for_few_requests(remote: Remote, three: Path) -> None:
    """A first query and a first batch wait as often as the reference page says."""
    remote.upload(three)
    options = {"storage_options": remote.options}

    def query() -> object:
        view = ra.RaggedAtlas.checkout_latest(remote.uri, **options)
        return view.query().features("GENE5", "GENE6").to_anndata()

    def batch() -> object:
        return next(iter(ra.Loader(ra.RaggedAtlas.checkout_latest(remote.uri, **options).query(), 64)))

    assert waits(remote, query)[0] <= 9
    # What the first one read of small shards is kept by the process.
    process_cache("indexes").entries.clear()
    assert waits(remote, batch)[0] <= 11


@pytest.mark.nightly
def test_adds_in_a_loop_wait_as_often_as_the_first(remote: Remote, three: Path) -> None:
    """Each brings features of its own, and no snapshot is taken between; one of sixteen merges the fragments of the small tables."""
    remote.upload(three)
    atlas = ra.RaggedAtlas.open(remote.uri, storage_options=remote.options)
    found = []
    for n in range(40):
        source = small_anndata(100 + n, 6, [f"L{n}G{i}" for i in range(12)])
        found.append(waits(remote, lambda: atlas.add(source, f"l{n}", organism="human"))[0])  # noqa: B023
    # Without the few that merge.
    usual = sorted(found[1:])[:-4]
    assert max(usual) <= found[1] + 4


@pytest.mark.nightly
def test_a_sample_of_many_datasets_waits_for_few_requests(remote: Remote, tmp_path: Path) -> None:
    """As often as the reference page says: small ranges of 64 datasets are under way at once."""
    atlas = ra.RaggedAtlas.create(tmp_path / "many.atlas")
    atlas.add([small_anndata(n, 10, GENES[n % 5 : n % 5 + 12]) for n in range(400)], organism="human", progress=False)
    atlas.snapshot()
    remote.upload(tmp_path / "many.atlas")

    def sample() -> object:
        view = ra.RaggedAtlas.checkout_latest(remote.uri, storage_options=remote.options)
        return view.query().sample(1000, seed=1).to_anndata()

    # Long beside what the server takes for 64 requests, so that those under way at once are counted as such.
    assert waits(remote, sample, latency=4.0)[0] <= 25


@pytest.mark.nightly
def test_groups_are_read_side_by_side(remote: Remote, three: Path) -> None:
    """The latency of an object store is not paid once for each group: several requests are under way at once."""
    remote.upload(three)
    query = ra.RaggedAtlas.checkout_latest(remote.uri, storage_options=remote.options).query()
    before = query.to_anndata()
    # Small shards are kept with their indexes, so a second read would request none.
    process_cache("indexes").entries.clear()
    remote.proxy.latency, remote.proxy.most_at_once = 0.05, 0
    after = query.to_anndata()
    assert remote.proxy.most_at_once > 1
    np.testing.assert_array_equal(before.X.toarray(), after.X.toarray())
