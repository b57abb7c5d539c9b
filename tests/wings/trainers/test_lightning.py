"""Laws of the Lightning data module: what the trainer sees is what the loader gives, on every rank and after every resume."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raggedatlas import Loader, SetLoader, Split
from raggedatlas.errors import QueryError
from raggedatlas.wings.trainers.lightning import AtlasDataModule, EpochBatches

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning")
# the warnings of Lightning about itself, and about runs that are as short as these
pytestmark = pytest.mark.filterwarnings("ignore")

SHARES = {"train": 0.7, "val": 0.3}


class Watch(lightning.LightningModule):  # type: ignore[misc]
    """A model that notes what it is shown."""

    def __init__(self, save_at: int = -1, path: str = "") -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)
        self.seen: list[Any] = []
        self.checked: list[str] = []
        self.save_at, self.path = save_at, path

    def training_step(self, batch: Any, _: int) -> Any:
        assert batch.X.shape == (len(batch), 6)
        self.seen.append((self.current_epoch, batch.uids.tolist()))
        return self.layer(batch.X).mean()

    def on_train_batch_end(self, *_: object) -> None:
        if len(self.seen) == self.save_at:
            self.trainer.save_checkpoint(self.path)

    def validation_step(self, batch: Any, _: int) -> None:
        self.checked += batch.uids.tolist()

    def predict_step(self, batch: Any, _: int) -> Any:
        return batch.uids.tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(**choices: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return lightning.Trainer(max_epochs=3, accelerator="cpu", num_sanity_val_steps=1, **quiet, **choices)


def module(small: Any, **choices: Any) -> AtlasDataModule:
    return AtlasDataModule(small.query, 8, split=Split.by(small.query, None, SHARES), obs=["kind"], seed=5, **choices)


def test_a_trainer_sees_what_the_loader_gives(small: Any) -> None:
    """Every epoch has the loader's next order, validation every held-out cell once, prediction every cell in order."""
    data, model, runs = module(small), Watch(), trainer()
    runs.fit(model, datamodule=data)
    part = data.loader("train")
    expected = [(epoch, batch.uids.tolist()) for epoch in range(3) for batch in part]
    assert model.seen == expected
    held_out = [uid for batch in data.loader("val") for uid in batch.uids.tolist()]
    assert model.checked == [*held_out[:8], *held_out * 3]
    predicted = [uid for batch in runs.predict(model, datamodule=data) for uid in batch]
    assert predicted == list(small.obs.index)


def test_a_run_resumes_in_the_middle_of_an_epoch(small: Any, tmp_path: Path) -> None:
    """From a checkpoint within an epoch come the batches of an uninterrupted run, also when workers read them."""
    path = str(tmp_path / "middle.ckpt")
    whole = Watch(save_at=9, path=path)
    trainer().fit(whole, datamodule=module(small))
    for num_workers in (0, 1):
        resumed = Watch()
        trainer().fit(resumed, datamodule=module(small, num_workers=num_workers), ckpt_path=path)
        assert resumed.seen == whole.seen[9:]
    other = AtlasDataModule(small.query, 8, split=Split.by(small.query, None, SHARES), obs=["kind"], seed=6)
    with pytest.raises(QueryError, match="taken with seed"):
        trainer().fit(Watch(), datamodule=other, ckpt_path=path)


def test_batches_go_on_where_a_state_was_taken(small: Any) -> None:
    """A state is for its epoch alone: the same epoch goes on after it, any other begins anew; so with workers that stay."""
    loader = Loader(small.query, 8, as_="torch", seed=1)
    expected = [[batch.rows.tolist() for batch in loader] for _ in range(3)]
    batches = EpochBatches(loader)
    batches.set_epoch(1)
    shown = iter(batches)
    taken = [next(shown).rows.tolist() for _ in range(4)]
    state = pickle.loads(pickle.dumps(batches.state_dict()))
    assert (state["epoch"], state["batch"]) == (1, 4)
    for num_workers in (0, 1):
        resumed = EpochBatches(Loader(small.query, 8, as_="torch", seed=1), num_workers)
        resumed.load_state_dict(state)
        resumed.set_epoch(1)
        assert [*taken, *(batch.rows.tolist() for batch in resumed)] == expected[1]
        for epoch in (2, 1):
            resumed.set_epoch(epoch)
            assert [batch.rows.tolist() for batch in resumed] == expected[epoch]
        resumed.close()


def test_ranks_share_the_cells(small: Any) -> None:
    """Ranks of the trainer have as many batches each, and see every cell; predictions are made once."""
    seen: dict[str, list[list[str]]] = {"train": [], "val": [], "predict": []}
    lengths: dict[str, set[int]] = {"train": set(), "val": set()}
    for rank in range(3):
        data = module(small)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=3)
        for name, own in seen.items():
            batches = getattr(data, f"{name}_dataloader")()
            own.append([uid for batch in batches for uid in batch.uids.tolist()])
            if name in lengths:
                lengths[name].add(len(own[-1]))
    assert all(len(found) == 1 for found in lengths.values())
    everyone = set(small.obs.index)
    train, val, predicted = ([uid for one in own for uid in one] for own in seen.values())
    assert set(train) | set(val) == everyone
    assert not set(train) & set(val)
    assert predicted == list(small.obs.index)


def test_cells_can_be_named_by_queries(small: Any) -> None:
    """Validation cells of a query of their own are read with the features and codes of training, and none is trained on less."""
    first, second = (small.query.where({"dataset": name}) for name in ("first", "second"))
    data = AtlasDataModule(first, 8, val=second, predict=second, obs=["kind"], balance="kind")
    assert data.loader("train").n_cells == 40
    (batch, *_) = data.val_dataloader()
    assert batch.X.shape == (8, 5)
    assert batch.categories["kind"].tolist() == data.loader().categories["kind"].tolist()
    uids = [uid for batch in data.predict_dataloader() for uid in batch.uids.tolist()]
    np.testing.assert_array_equal(uids, list(second.to_pandas().index))
    assert AtlasDataModule(first, split=Split.by(first, None, {"train": 1.0})).val_dataloader() == []


def test_a_module_is_picklable_and_can_be_extended(small: Any) -> None:
    """Another process makes the same batches; subclasses are Lightning's too."""
    data = module(small)
    again = pickle.loads(pickle.dumps(data))
    assert isinstance(again, AtlasDataModule)
    assert isinstance(again, lightning.LightningDataModule)
    first, second = ([batch.uids.tolist() for batch in one.train_dataloader()] for one in (data, again))
    assert first == second

    class Named(AtlasDataModule):
        """A module of somebody's own."""

    assert isinstance(Named(small.query), lightning.LightningDataModule)


def test_what_cannot_be_had_is_refused(small: Any) -> None:
    """What the trainer decides, contradictions, parts that are not there, and batches without tensors are refused."""
    with pytest.raises(QueryError, match=r"takes no \['device', 'rank'\]"):
        AtlasDataModule(small.query, rank=1, device="cpu")  # type: ignore[call-arg]
    with pytest.raises(QueryError, match="both say what to hold out"):
        AtlasDataModule(small.query, split=Split.by(small.query, None, SHARES), val=small.query)
    with pytest.raises(QueryError, match="not 'test'"):
        module(small).test_dataloader()
    with pytest.raises(QueryError, match="moves tensors"):
        module(small, as_="csr").setup()


class SetModule(lightning.LightningDataModule):  # type: ignore[misc]
    """Sets for a trainer, as the page on perturbations has it."""

    def __init__(self, query: Any, num_workers: int) -> None:
        super().__init__()
        self.query, self.num_workers = query, num_workers

    def train_dataloader(self) -> EpochBatches:
        ranks = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size, "even": "pad"}
        loader = SetLoader(
            self.query, "plate", "others", ["dataset"], set_size=4, sets=3, as_="torch-dense", seed=2, **ranks
        )
        return EpochBatches(loader, self.num_workers)


class WatchSets(Watch):
    """A model of sets."""

    def training_step(self, batch: Any, _: int) -> Any:
        assert batch.X.shape == batch.control.X.shape
        self.seen.append((self.current_epoch, batch.uids.tolist(), batch.control.uids.tolist()))
        return self.layer(batch.X).mean() - self.layer(batch.control.X).mean()


def test_sets_train_and_resume(small: Any, tmp_path: Path) -> None:
    """A trainer moves batches of sets, follows the epochs, and resumes in the middle of one, with workers too."""
    path = str(tmp_path / "sets.ckpt")
    whole = WatchSets(save_at=9, path=path)
    trainer().fit(whole, datamodule=SetModule(small.query, 0))
    assert len({epoch for epoch, *_ in whole.seen}) == 3
    for num_workers in (0, 1):
        resumed = WatchSets()
        trainer().fit(resumed, datamodule=SetModule(small.query, num_workers), ckpt_path=path)
        assert resumed.seen == whole.seen[9:]


SCRIPT = """
import json, sys
import lightning, torch
import raggedatlas as ra
from raggedatlas.wings.trainers.lightning import AtlasDataModule

class Watch(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(6, 1), []
    def training_step(self, batch, _):
        self.seen += batch.uids.tolist()
        return self.layer(batch.X).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    query = ra.RaggedAtlas.checkout_latest(sys.argv[1]).query()
    model = Watch()
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer.fit(model, datamodule=AtlasDataModule(query, 8, split=ra.Split.by(query, None, {"train": 1.0})))
    with open(f"{sys.argv[2]}/{trainer.global_rank}.json", "w") as file:
        json.dump(model.seen, file)
"""


def test_two_processes_train_together(small: Any, tmp_path: Path) -> None:
    """Under DDP two processes see every cell once between them."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", str(script), small.query.catalog.location.uri, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert run.returncode == 0, run.stderr
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [len(own) for own in seen] == [35, 35]
    assert sorted(seen[0] + seen[1]) == sorted(small.obs.index)
