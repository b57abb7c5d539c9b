"""Laws of the loader: its batches are the query's cells, any epoch can be resumed, and its threads end with it."""

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from raggedatlas import CellDataset, Loader, RaggedAtlas
from raggedatlas.errors import CorruptError, MissingExtraError, QueryError, StoreError
from raggedatlas.loader.batch import TrainingBatch, require_torch
from raggedatlas.loader.loader import Collator
from raggedatlas.store.runtime import prefetch_map
from support.atlases import GENES, small_anndata, write_dataset

pytestmark = pytest.mark.fast


def values(batch: TrainingBatch) -> Any:
    return batch.X.toarray() if hasattr(batch.X, "toarray") else batch.X


def threads_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("raggedatlas-prefetch")]


@pytest.mark.parametrize("as_", ["csr", "dense"])
@pytest.mark.parametrize(
    ("size", "shuffle", "threads"), [(8, "full", 2), (3, "blocks", 1), (64, None, 0), (1000, "full", None)]
)
def test_batches_hold_the_cells_of_the_query(small: Any, as_: Any, size: int, shuffle: Any, threads: Any) -> None:
    """Whatever the size, order, form and threads, every cell comes once, with its values, uid and metadata."""
    blocks = {"block_size": 4, "buffer_size": 16} if shuffle == "blocks" else {}
    loader = Loader(small.query, size, shuffle=shuffle, as_=as_, threads=threads, obs=["kind", "percent.mt"], **blocks)
    batches = list(loader)
    assert len(batches) == len(loader)
    rows = np.concatenate([batch.rows for batch in batches])
    assert sorted(rows) == list(range(70))
    assert shuffle is not None or rows.tolist() == list(range(70))
    for batch in batches:
        np.testing.assert_array_equal(values(batch), small.counts[batch.rows])
        assert batch.uids.astype(str).tolist() == small.obs.index[batch.rows].tolist()
        np.testing.assert_array_equal(batch.obs["percent.mt"], small.obs["percent.mt"].iloc[batch.rows])
        kinds = [None if pd.isna(kind) else kind for kind in small.obs["kind"].iloc[batch.rows]]
        assert batch.labels("kind").tolist() == kinds


def test_deleted_cells_are_in_no_epoch(tmp_path: Path) -> None:
    """Each epoch has the cells that are left, with the values they had before; a snapshot from before has all of them."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(small_anndata(1, 40, extra="score"), "first", organism="human", progress=False)
    atlas.add(small_anndata(2, 30, GENES[4:14], extra="score"), "second", organism="human", progress=False)
    before = atlas.checkout(atlas.snapshot())
    old = before.query().to_anndata()
    gone = old.obs_names[[*range(12), 39, 40, 55, 69]]
    atlas.delete_cells(uids=list(gone))
    after = atlas.checkout(atlas.snapshot())
    left = old[~old.obs_names.isin(gone)]
    for view, expected in ((after, left), (before, old)):
        for shuffle in ("full", "blocks", None):
            blocks = {"block_size": 4, "buffer_size": 16} if shuffle == "blocks" else {}
            loader = Loader(view.query(), 7, shuffle=shuffle, obs=["score"], **blocks)
            for _ in range(2):
                batches = list(loader)
                uids = np.concatenate([batch.uids for batch in batches]).astype(str)
                assert sorted(uids) == sorted(expected.obs_names)
                counts = sp.vstack([batch.X for batch in batches]).toarray()
                np.testing.assert_array_equal(counts, expected[uids].X.toarray())
                scores = np.concatenate([batch.obs["score"] for batch in batches])
                np.testing.assert_array_equal(scores, expected.obs.loc[uids, "score"])


def test_query_and_options_say_what_is_read(small: Any) -> None:
    """Features, layers and columns of the query or of the options arrive; options replace the query's."""
    query = small.query.where({"dataset": ["second"]}).features("f", "d").layers("log").obs("donor")
    batch = next(iter(Loader(query, 100, shuffle=None)))
    expected = query.to_anndata()
    np.testing.assert_array_equal(values(batch), expected.X.toarray())
    assert list(batch.obs) == ["donor"]
    assert batch.spaces["gene_expression"].features.tolist() == expected.var["uid"].tolist()
    loader = Loader(query, 100, shuffle=None, features=["d"], layers=["counts", "log"], obs=["n"], dtype="float64")
    batch = next(iter(loader))
    rows = batch.spaces["gene_expression"]
    assert (list(batch.obs), list(rows.block.layers), rows.X.shape) == (["n"], ["counts", "log"], (30, 1))
    assert rows.X.dtype == rows.layer("log").dtype == np.float64
    np.testing.assert_allclose(rows.layer("log").toarray(), np.log1p(rows.X.toarray()), rtol=1e-6)
    assert list(next(iter(Loader(small.query))).obs) == []


def test_several_spaces_come_with_their_presence(small: Any) -> None:
    """Each space of a batch is aligned to its cells, says who has it, and which features each dataset measured."""
    query = small.query.spaces("gene_expression", "protein_abundance")
    reference = query.spaces("protein_abundance").to_anndata()
    tall = reference.X.toarray() if hasattr(reference.X, "toarray") else np.asarray(reference.X)
    for batch in Loader(query, 9):
        genes, proteins = batch.spaces["gene_expression"], batch.spaces["protein_abundance"]
        np.testing.assert_array_equal(values(batch), small.counts[batch.rows])
        first = (small.obs["dataset"] == "first").to_numpy()[batch.rows]
        np.testing.assert_array_equal(proteins.present, first)
        assert genes.present.all()
        at = [reference.obs.index.get_loc(uid) for uid in batch.uids[first].astype(str)]
        dense = proteins.X.toarray() if hasattr(proteins.X, "toarray") else proteins.X
        np.testing.assert_array_equal(dense[first], tall[at])
        assert not dense[~first].any()
        assert not proteins.measured()[~first].any()
        assert genes.measured().sum(axis=1).tolist() == np.where(first, 5, 3).tolist()


def test_epochs_follow_each_other(small: Any) -> None:
    """Each iteration is the next epoch, also after one that was left; `set_epoch` names one; equal seeds are equal."""

    def rows(batches: Iterator[TrainingBatch]) -> list[list[int]]:
        return [batch.rows.tolist() for batch in batches]

    loader, other = Loader(small.query, 16, seed=4), Loader(small.query, 16, seed=4)
    first, second = rows(iter(loader)), rows(iter(loader))
    assert first != second
    assert rows(islice(other, 2)) == first[:2]
    assert rows(iter(other)) == second
    loader.set_epoch(0)
    assert rows(iter(loader)) == first
    assert rows(iter(Loader(small.query, 16, seed=5))) != first


@pytest.mark.parametrize("choices", [{}, {"group": "donor"}, {"shuffle": "blocks"}, {"weights": "percent.mt"}])
@pytest.mark.parametrize("stop", [0, 1, 5, 9])
def test_a_resumed_run_equals_an_uninterrupted_one(small: Any, choices: Any, stop: int) -> None:
    """A state taken after any batch, loaded into a new loader of any rank, gives exactly what was still to come."""
    whole = Loader(small.query, 16, seed=3, **choices)
    expected = [batch.rows.tolist() for _ in range(3) for batch in whole]
    taken: list[list[int]] = []
    interrupted = Loader(small.query, 16, seed=3, **choices)
    while len(taken) < stop:
        for batch in interrupted:
            taken.append(batch.rows.tolist())
            if len(taken) == stop:
                break
    state = json.loads(json.dumps(interrupted.state_dict()))
    resumed = Loader(small.query, 16, seed=3, threads=0, **choices)
    resumed.load_state_dict(state)
    taken += [batch.rows.tolist() for _ in range(3) for batch in resumed][: len(expected) - stop]
    assert taken == expected


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"batch_size": 8}, "batch_size"),
        ({"world_size": 2}, "world_size"),
        ({"shuffle": None}, "shuffle"),
        ({"group": "donor"}, "strategy"),
        ({"drop_last": True}, "drop_last"),
        ({"even": "pad"}, "even"),
        ({"features": ["a"]}, "query"),
    ],
)
def test_a_state_of_another_loader_is_refused(small: Any, other: Any, named: str) -> None:
    """A state fits only a loader whose batches would follow."""
    state = Loader(small.query, **{"batch_size": 16, **other}).state_dict()
    loader = Loader(small.query, 16)
    with pytest.raises(QueryError, match=f"taken with {named} "):
        loader.load_state_dict(state)
    with pytest.raises(QueryError, match="query None"):
        loader.load_state_dict({})
    with pytest.raises(QueryError, match="Epochs are whole numbers"):
        loader.set_epoch(-1)
    with pytest.raises(QueryError, match="beyond"):
        loader.load_state_dict({**loader.state_dict(), "batch": 6})


def test_strategies_choose_cells(small: Any) -> None:
    """Groups make the batches, weights and balance decide who comes; a sampler of one's own decides alone."""
    for batch in Loader(small.query, 8, group="kind", obs=["kind"]):
        assert len(set(batch.obs["kind"].tolist())) == 1
        assert batch.obs["kind"][0] >= 0
    weights = np.zeros(70)
    weights[[3, 50]] = 1
    drawn = {row for batch in Loader(small.query, 8, weights=weights, n_samples=30) for row in batch.rows.tolist()}
    assert drawn == {3, 50}
    for column in ("kind", "plate", "n"):
        balanced = list(Loader(small.query, 100, balance=column, n_samples=2000, obs=[column]))
        codes = np.concatenate([batch.obs[column] for batch in balanced])
        shares = np.unique(codes, return_counts=True)[1] / 2000
        np.testing.assert_allclose(shares, 1 / len(shares), atol=0.05)
    own = Loader(small.query, 8, sampler=lambda n, rng: np.array([5, 5, 7]), n_samples=3)
    assert [batch.rows.tolist() for batch in own] == [[5, 5, 7]]


def test_leaving_early_or_failing_ends_the_threads(small: Any, monkeypatch: Any) -> None:
    """No thread outlives its iteration; what fails in a thread fails in the loop, at its place in the order."""
    loader = Loader(small.query, 4, threads=3, prefetch=6)
    for _ in loader:
        assert threads_alive()
        break
    assert threads_alive() == []
    held = iter(loader)
    next(held)
    assert 0 < len(threads_alive()) <= 3
    del held
    assert threads_alive() == []
    make = Collator.make

    def broken(self: Collator, batches: Any) -> Any:
        if 69 in batches.rows:
            raise CorruptError("a chunk is damaged")
        return make(self, batches)

    monkeypatch.setattr(Collator, "make", broken)
    monkeypatch.setattr("raggedatlas.loader.loader._READ_ROWS", 4)
    seen: list[TrainingBatch] = []
    with pytest.raises(CorruptError, match="damaged"):
        seen.extend(Loader(small.query, 4, shuffle=None, threads=2))
    assert len(seen) == 17
    assert threads_alive() == []


def test_work_runs_ahead_by_a_bounded_number() -> None:
    """No more results are begun than were handed over and may be ahead."""
    begun: list[int] = []
    handed = 0
    for item in prefetch_map(lambda n: begun.append(n) or n, range(40), threads=2, depth=3):
        handed += 1
        assert item == handed - 1
        assert len(begun) <= handed + 3
    assert handed == 40


def test_a_pickled_loader_goes_on_elsewhere(small: Any) -> None:
    """A copy, as a spawned process gets it, gives what the loader would give, and brings its plan along."""
    loader = Loader(small.query, 16, obs=["kind"])
    next(iter(loader))
    copy = pickle.loads(pickle.dumps(loader))
    assert [batch.rows.tolist() for batch in copy] == [batch.rows.tolist() for batch in loader]
    batch = next(iter(copy))
    again = pickle.loads(pickle.dumps(batch))
    np.testing.assert_array_equal(values(again), values(batch))
    assert again.categories["kind"].tolist() == ["T", "B"]


def test_any_thread_count_gives_the_same_bytes(small: Any) -> None:
    """Batches do not depend on how many threads made them, nor on how many were read at once."""

    def content(**choices: Any) -> list[bytes]:
        loader = Loader(small.query, 8, as_="dense", **choices)
        return [batch.X.tobytes() + batch.uids.tobytes() for batch in loader]

    assert content(threads=0) == content(threads=1) == content(threads=3, prefetch=5, buffers=0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_batch_may_touch_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    """Mapped shards take no open files: many machines allow a process 1,024, macOS 256."""
    resource, listing = pytest.importorskip("resource"), Path("/proc/self/fd")
    if not listing.exists():
        pytest.skip("the system does not list open files")
    atlas = RaggedAtlas.create(tmp_path / "atlas")
    for n in range(40):
        write_dataset(atlas._catalog, f"d{n}", ["CD3E", "MS4A1"], np.full((2, 2), n + 1, np.uint8))
    atlas.snapshot()
    loader = Loader(RaggedAtlas.checkout_latest(tmp_path / "atlas").query(), 80, shuffle="full")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*listing.iterdir()]) + 50, hard))
    try:
        (batch,) = loader
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sorted(np.unique(batch.X.data).tolist()) == [*range(1, 41)]


def test_a_forked_child_is_refused(small: Any) -> None:
    """A loader or dataset that came into a process by a fork refuses to read, and names the fix."""
    loader, dataset = Loader(small.query, 16), CellDataset(small.query)
    asked: list[Any] = [lambda: next(iter(loader)), lambda: dataset[0]]
    context = multiprocessing.get_context("fork")
    for ask in asked:
        answers = context.SimpleQueue()

        def child(ask: Any = ask, answers: Any = answers) -> None:
            try:
                ask()
            except StoreError as error:
                answers.put(str(error))
            else:
                answers.put("read")

        process = context.Process(target=child)
        process.start()
        assert "multiprocessing_context='spawn'" in answers.get()
        process.join()


@pytest.mark.long
def test_the_loader_needs_no_torch(small: Any, tmp_path: Path) -> None:
    """Arrays come without PyTorch, pandas or AnnData being loaded in the process that reads."""
    path = tmp_path / "loader.pickle"
    path.write_bytes(pickle.dumps(Loader(small.query, 16, obs=["kind"])))
    script = (
        "import pickle, sys\n"
        f"loader = pickle.loads(open({str(path)!r}, 'rb').read())\n"
        "assert sum(len(batch) for batch in loader) == 70\n"
        "print(sorted({'torch', 'pandas', 'anndata', 'lance', 'lancedb'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"batch_size": 0}, "batch_size as a whole number from 1"),
        ({"batch_size": 2.5}, "batch_size as a whole number"),
        ({"shuffle": "some"}, "shuffle as"),
        ({"shuffle": True}, "shuffle as"),
        ({"seed": -1}, "seed as a whole number from 0"),
        ({"as_": "coo"}, "as_ as"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not one of 2"),
        ({"even": True}, "even as"),
        ({"threads": -1}, "threads as a whole number from 0"),
        ({"prefetch": 0}, "prefetch as a whole number from 1"),
        ({"buffers": -1}, "buffers as a whole number"),
        ({"obs": ["colour"]}, "colour"),
        ({"obs": "kind"}, "obs as a list"),
        ({"layers": "log"}, "layers as a list"),
        ({"layers": ["none"]}, "none"),
        ({"dtype": "colour"}, "dtype 'colour'"),
        ({"dtype": "U3"}, "gives numbers"),
        ({"speed": 3}, r"does not know \['speed'\]"),
        ({"weights": "donor"}, "holds no numbers"),
        ({"weights": np.ones(3)}, "one weight for each cell"),
        ({"weights": "n"}, "finite numbers from 0"),
        ({"weights": -np.ones(70)}, "finite numbers from 0"),
        ({"weights": np.zeros(70)}, "at least one of them above 0"),
        ({"weights": ["a"] * 70}, "one number for each cell"),
        ({"weights": "percent.mt", "group": "donor"}, "one of"),
        ({"balance": "donor", "shuffle": "blocks"}, "leave it out"),
        ({"balance": "donor", "shuffle": None}, "draws by chance"),
        ({"group": "donor", "n_samples": 5}, "n_samples is for"),
        ({"sampler": 5}, "sampler as a function"),
        ({"categories": {"kind": ["T"]}}, "does not ask for"),
        ({"obs": ["kind"], "categories": {"kind": ["T", "T"]}}, "without duplicates"),
        ({"obs": ["plate"], "categories": {"plate": ["x"]}}, "do not fit"),
        ({"batch_size": 100, "drop_last": True}, "leave no batch"),
        ({"world_size": 80, "even": "drop"}, "leave no batch"),
    ],
)
def test_what_means_nothing_is_refused(small: Any, choices: dict[str, Any], said: str) -> None:
    """Every choice that cannot be had is refused when the loader is made."""
    with pytest.raises(QueryError, match=said):
        Loader(small.query, **choices)


def test_tensors_without_pytorch_are_refused(small: Any, monkeypatch: Any) -> None:
    """Where PyTorch is not installed, asking for tensors names what to install, before anything is read."""
    monkeypatch.setitem(sys.modules, "torch", None)
    require_torch.cache_clear()
    asked: list[Any] = [lambda: Loader(small.query, as_="torch"), lambda: CellDataset(small.query, as_="torch-dense")]
    for ask in [*asked, Loader(small.query).torch_dataset]:
        with pytest.raises(MissingExtraError, match=r"raggedatlas\[ml\]"):
            ask()


def test_a_query_without_cells_is_refused(small: Any) -> None:
    """There is nothing to train on in an empty result, nor to balance where no cell has a value."""
    with pytest.raises(QueryError, match="no cells"):
        Loader(small.query.limit(0))
    with pytest.raises(QueryError, match="has no value in any"):
        Loader(small.query.where("kind IS NULL"), balance="kind")
