"""Drives the public package hyrax in its own environment: `python peer_hyrax.py <verb> <folder> <further>`; 0.13, or 0.6.10 for .npy.

Arrays come and go as .npz files; run by test_peers.py.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np


def quiet_torchvision() -> None:
    """Let hyrax import where torch has no compiled operators of torchvision, which are not used here."""
    import torch

    register = torch.library.register_fake

    def register_known(name: str, *args: Any, **named: Any) -> Any:
        return (lambda function: function) if name.startswith("torchvision::") else register(name, *args, **named)

    torch.library.register_fake = register_known


def write(folder: Path, given: Path) -> None:
    """Write a table in three batches, as the model's verbs do."""
    from hyrax.datasets.result_factories import create_results_writer

    arrays = np.load(given)
    writer = create_results_writer(folder)
    for rows in np.array_split(np.arange(len(arrays["ids"])), 3):
        data = {name: arrays[name][rows] for name in arrays.files if name != "ids"}
        writer.write_batch(arrays["ids"][rows], list(data["data"]) if set(data) == {"data"} else data)
    writer.commit()


def read(folder: Path, out: Path) -> None:
    """Read a table: all rows one by one and at once, ids, length."""
    from hyrax.datasets.result_factories import load_results_dataset

    dataset = load_results_dataset({"general": {}, "results": {}}, folder)
    rows = np.random.default_rng(0).permutation(len(dataset))
    several = dataset[rows]
    np.savez(
        out,
        ids=np.array(list(dataset.ids())),
        rows=rows,
        **{name: np.stack([row[name] for row in several]) for name in several[0]},
        one=np.stack([dataset.get_data(int(row)) for row in rows]) if "data" in several[0] else np.empty(0),
    )


def provide(folder: Path, out: Path) -> None:
    """Put two tables together by id, as a data request."""
    from hyrax.config_utils import ConfigManager
    from hyrax.datasets.data_provider import DataProvider

    config = ConfigManager().config
    common = {"dataset_class": "ResultDataset"}
    provider = DataProvider(config, {
        "left": {**common, "data_location": str(folder / "left"), "primary_id_field": "object_id", "fields": ["data"]},
        "right": {**common, "data_location": str(folder / "right"), "join_field": "object_id", "fields": ["data"]},
    })  # fmt: skip
    batch = provider.collate([provider[i] for i in range(len(provider))])
    np.savez(
        out,
        ids=batch["object_id"],
        left=batch["left"]["data"],
        right=batch["right"]["data"],
        matched=batch["right__matched"],
    )


def old_config() -> Any:
    from hyrax.config_utils import ConfigManager

    config = ConfigManager().config
    config["data_set"]["name"] = "HyraxRandomDataset"
    return config


class Original:
    """What the old writer asks for ids and configuration."""

    def __init__(self, ids: Any) -> None:
        self._ids = ids
        self.config = old_config()

    def ids(self) -> Any:
        return iter(self._ids)


def write_npy(folder: Path, given: Path) -> None:
    """Write .npy files in three batches; release 0.6.10."""
    from hyrax.data_sets.inference_dataset import InferenceDataSetWriter

    arrays = np.load(given)
    folder.mkdir(parents=True, exist_ok=True)
    writer = InferenceDataSetWriter(Original(arrays["ids"].tolist()), folder)
    for rows in np.array_split(np.arange(len(arrays["ids"])), 3):
        writer.write_batch(arrays["ids"][rows], list(arrays["data"][rows]))
    writer.write_index()


def read_npy(folder: Path, out: Path) -> None:
    """Read .npy files; release 0.6.10. It would also make the original dataset, which is not there and not needed."""
    import hyrax.pytorch_ignite
    from hyrax.data_sets.inference_dataset import InferenceDataSet

    hyrax.pytorch_ignite.setup_dataset = lambda config: None

    dataset = InferenceDataSet(old_config(), folder)
    rows = np.random.default_rng(0).permutation(len(dataset))
    one = np.stack([dataset[int(row)].numpy() for row in rows])
    np.savez(
        out, ids=np.array(list(dataset.ids())), rows=rows, data=dataset[rows].numpy(), one=one, last=dataset[-1].numpy()
    )


if __name__ == "__main__":
    quiet_torchvision()
    {"write": write, "read": read, "provide": provide, "write_npy": write_npy, "read_npy": read_npy}[sys.argv[1]](
        *map(Path, sys.argv[2:4])
    )
