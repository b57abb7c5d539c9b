"""Laws of the loader under PyTorch: tensors hold what arrays hold, and workers change nothing."""

import pickle
from typing import Any

import numpy as np
import pytest

from raggedatlas import CellDataset, Loader
from raggedatlas.errors import QueryError, StoreError

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")


def rows(batches: Any) -> list[list[int]]:
    return [batch.rows.tolist() for batch in batches]


def workers(loader: Loader, n: int = 2) -> Any:
    return data.DataLoader(
        loader.torch_dataset(), batch_size=None, num_workers=n, multiprocessing_context="spawn" if n else None
    )


@pytest.mark.parametrize("as_", ["torch", "torch-dense"])
def test_tensors_hold_what_arrays_hold(small: Any, as_: Any) -> None:
    """Values come as float32, sparse or dense, codes as int64, and everything moves with the batch."""
    query = small.query.spaces("gene_expression", "protein_abundance").layers("counts", "log")
    for batch in Loader(query, 9, obs=["kind", "percent.mt"], as_=as_):
        found = batch.spaces["gene_expression"]
        dense = found.X.to_dense() if as_ == "torch" else found.X
        assert (found.X.layout == torch.sparse_csr) == (as_ == "torch")
        assert dense.dtype == torch.float32
        np.testing.assert_array_equal(dense.numpy(), small.counts[batch.rows])
        log = found.layer("log").to_dense() if as_ == "torch" else found.layer("log")
        np.testing.assert_allclose(log.numpy(), np.log1p(small.counts[batch.rows].astype(np.float32)), rtol=1e-6)
        assert batch.obs["kind"].dtype == torch.int64
        assert batch.obs["percent.mt"].dtype == torch.float64
        assert batch.labels("kind").shape == (len(batch),)
        moved = batch.to("meta")
        assert {tensor.device.type for tensor in moved.tensors()} == {"meta"}
        assert len(moved.tensors()) == len(batch.tensors()) == 7
    counts = next(iter(Loader(small.query, 9, as_=as_, dtype="int64", device="cpu"))).X
    assert counts.dtype == torch.int64


def test_workers_change_nothing(small: Any) -> None:
    """Spawned workers together give the batches of the loader, in its order, epoch by epoch and after a resume."""
    loader = Loader(small.query, 8, seed=2, obs=["kind"], as_="torch")
    expected = [rows(loader), rows(loader)]
    loader.set_epoch(0)
    dealt = workers(loader)
    assert len(dealt) == len(loader) == 9
    batches = list(dealt)
    assert rows(batches) == expected[0]
    for batch in batches:
        np.testing.assert_array_equal(batch.X.to_dense().numpy(), small.counts[batch.rows])
        assert batch.categories is loader.categories
    loader.set_epoch(1)
    state = loader.state_dict(taken=4)
    resumed = Loader(small.query, 8, seed=2, obs=["kind"], as_="torch")
    resumed.load_state_dict(state)
    assert rows(workers(resumed, 1)) == rows(workers(resumed, 0)) == expected[1][4:]


def test_samplers_of_pytorch_choose_cells(small: Any) -> None:
    """A map-style dataset serves any sampler: by `collate`, by whole batches of numbers, and for distributed training."""
    dataset = CellDataset(small.query, obs=["donor"], as_="torch-dense")
    weights = torch.ones(70)
    weights[:60] = 0
    drawn = data.WeightedRandomSampler(weights, 40, generator=torch.Generator().manual_seed(1))
    batches = list(data.DataLoader(dataset, 16, sampler=drawn, collate_fn=dataset.collate))
    assert [len(batch) for batch in batches] == [16, 16, 8]
    assert min(min(one) for one in rows(batches)) >= 60
    chosen = data.BatchSampler(data.SequentialSampler(dataset), 30, drop_last=False)
    whole = data.DataLoader(dataset, None, sampler=chosen, collate_fn=dataset.collate)
    assert rows(whole) == [list(range(30)), list(range(30, 60)), list(range(60, 70))]
    shares = [data.DistributedSampler(dataset, 2, rank, seed=3) for rank in range(2)]
    found = [rows(data.DataLoader(dataset, 8, sampler=own, collate_fn=dataset.collate)) for own in shares]
    assert sorted(row for own in found for one in own for row in one) == list(range(70))


def test_a_map_style_worker_sends_what_the_process_has(small: Any) -> None:
    """Batches of a spawned worker come without the facts that the process holds, and are whole."""
    dataset = CellDataset(small.query, obs=["donor"])
    served = data.DataLoader(dataset, 40, num_workers=1, multiprocessing_context="spawn", collate_fn=dataset.collate)
    for batch in served:
        assert batch.categories is dataset.categories
        np.testing.assert_array_equal(batch.X.toarray(), small.counts[batch.rows])


def test_what_cannot_be_had_is_refused(small: Any) -> None:
    """Forked workers, unknown devices, and a device in workers are refused by name."""
    forked = data.DataLoader(
        Loader(small.query).torch_dataset(), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(StoreError, match="spawn"):
        list(forked)
    with pytest.raises(QueryError, match="no device 'colour'"):
        Loader(small.query, as_="torch", device="colour")
    with pytest.raises(QueryError, match="pin_memory=True"):
        Loader(small.query, as_="torch", device="cpu").torch_dataset()
    if not torch.cuda.is_available():
        for choices in ({"device": "cuda"}, {"pin_memory": True}):
            with pytest.raises(QueryError, match="need a GPU"):
                Loader(small.query, as_="torch", **choices)
    assert pickle.loads(pickle.dumps(Loader(small.query).torch_dataset())).loader.n_cells == 70
