"""Measure the results of one system, in a separate process: write, read, convert.

Runs in the interpreter of the system that it measures; prints one JSON document. Seconds are processor seconds of the
process, so threads count, and waiting for a disk does not; the best of some repeats.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measuring import MemoryWatch

BATCH = 512
REPEATS = 3


def quiet_torchvision() -> None:
    """Let the public package import where torch has no compiled operators of torchvision, which it does not use here."""
    import torch

    register = torch.library.register_fake

    def register_known(name: str, *args: Any, **named: Any) -> Any:
        return (lambda function: function) if name.startswith("torchvision::") else register(name, *args, **named)

    torch.library.register_fake = register_known


class Original:
    """The dataset that the old writer asks for ids and configuration."""

    def __init__(self, n: int, config: Any) -> None:
        self.n = n
        self.config = config

    def ids(self) -> Iterator[str]:
        return map(name_of, range(self.n))


def name_of(row: int) -> str:
    """Sixteen characters, as uids have."""
    return f"{row * 2654435761 % 2**64:016x}"


def blocks(n: int, shape: tuple[int, ...], dtype: str) -> Iterator[tuple[list[str], Any]]:
    """Ids and values of every batch; the values are the same each time, so that making them costs nothing."""
    values = np.random.default_rng(0).standard_normal((BATCH, *shape)).astype(dtype)
    for start in range(0, n, BATCH):
        k = min(BATCH, n - start)
        yield [name_of(row) for row in range(start, start + k)], values[:k]


def make_writer(system: str, folder: Path, n: int) -> tuple[Any, Callable[[], None]]:
    """The system's writer, and how it finishes."""
    if system == "raggedatlas":
        from raggedatlas import ResultDatasetWriter

        writer = ResultDatasetWriter(folder)
        return writer, writer.commit
    quiet_torchvision()
    if system == "hyrax":
        writer = importlib.import_module("hyrax.datasets.result_dataset").ResultDatasetWriter(folder)
        return writer, writer.commit
    module = importlib.import_module("hyrax.data_sets.inference_dataset")
    folder.mkdir(parents=True, exist_ok=True)
    writer = module.InferenceDataSetWriter(Original(n, old_config()), folder)
    return writer, writer.write_index


def old_config() -> Any:
    """The default configuration of the old release, with a dataset that needs no files."""
    config = importlib.import_module("hyrax.config_utils").ConfigManager().config
    config["data_set"]["name"] = "HyraxRandomDataset"
    return config


def open_results(system: str, folder: Path) -> Any:
    """The system's reader."""
    if system == "raggedatlas":
        from raggedatlas import ResultDataset

        return ResultDataset({}, folder)
    quiet_torchvision()
    if system == "hyrax":
        return importlib.import_module("hyrax.datasets.result_dataset").ResultDataset({}, folder)
    # it would also make the original dataset, which is not there and not needed
    importlib.import_module("hyrax.pytorch_ignite").setup_dataset = lambda config: None
    return importlib.import_module("hyrax.data_sets.inference_dataset").InferenceDataSet(old_config(), folder)


def write(system: str, folder: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """Write, and count only the calls of the writer, after one small run that loads and starts whatever there is."""
    warm_up(system, folder.with_name("warm"))
    shutil.rmtree(folder, ignore_errors=True)
    writer, finish = make_writer(system, folder, setting["n"])
    cpu = wall = 0.0
    idle = anonymous_kib()
    with MemoryWatch() as watch:
        for ids, values in blocks(setting["n"], tuple(setting["shape"]), setting["dtype"]):
            given = values if system == "raggedatlas" else list(values)
            ids_given = ids if system == "raggedatlas" else np.array(ids)
            start, started = cpu_seconds(), time.perf_counter()
            writer.write_batch(ids_given, given)
            cpu, wall = cpu + cpu_seconds() - start, wall + time.perf_counter() - started
        start, started = cpu_seconds(), time.perf_counter()
        finish()
        cpu, wall = cpu + cpu_seconds() - start, wall + time.perf_counter() - started
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    versions = len(list(folder.glob("lance_db/results.lance/_versions/*.manifest")))
    return {"cpu": cpu, "wall": wall, "peak_mb": (watch.peak_kib - idle) / 1024, "bytes": size, "versions": versions}


def warm_up(system: str, folder: Path) -> None:
    """Write a little, so that imports and pools of threads are there before anything is measured."""
    shutil.rmtree(folder, ignore_errors=True)
    writer, finish = make_writer(system, folder, BATCH)
    for ids, values in blocks(BATCH, (2,), "float32"):
        writer.write_batch(np.array(ids), list(values))
    finish()
    shutil.rmtree(folder, ignore_errors=True)


def anonymous_kib() -> int:
    """Memory of this process that no file holds."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def cpu_seconds() -> float:
    """Processor seconds of this process and of children that have ended."""
    return sum(os.times()[:4])


def best(call: Callable[[], object], count: int) -> float:
    """Microseconds for each of some calls, at best."""
    found = []
    for _ in range(REPEATS):
        start = time.process_time()
        call()
        found.append((time.process_time() - start) / count * 1e6)
    return min(found)


def read(system: str, folder: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """Single rows, batches, walks and ids, in microseconds a row."""
    dataset = open_results(system, folder)
    n = len(dataset)
    rng = np.random.default_rng(1)
    k = setting["rows"]
    single = rng.integers(0, n, k).tolist()
    several = [rng.permutation(n)[:BATCH] for _ in range(setting["batches"])]

    def values_of(found: Any) -> Any:
        return found[0]["data"] if isinstance(found, list) else found

    def walk() -> None:
        # what a loop over the dataset does; the public readers have no loop of their own
        for _ in itertools.islice(dataset, k) if system == "raggedatlas" else map(dataset.__getitem__, range(k)):
            pass

    dataset[0]
    return {
        "row": best(lambda: [dataset[i] for i in single], k),
        "rows512": best(lambda: [dataset[each] for each in several], BATCH * len(several)),
        "walk": best(walk, k),
        "walk_by_number": best(lambda: [dataset[i] for i in range(k)], k),
        "ids": best(lambda: list(dataset.ids()), n),
        "check": float(np.asarray(values_of(dataset[[5, 3]]))[0].reshape(-1)[0]),
    }


def convert(system: str, folder: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """From .npy to a table, every row compared; the public script is driven through the classes it uses."""
    warm_up(system, folder.with_name("warm"))
    n = len(np.load(folder / "batch_index.npy", mmap_mode="r"))
    if system == "raggedatlas":
        from raggedatlas import convert_results

        idle = anonymous_kib()
        start, started = cpu_seconds(), time.perf_counter()
        with MemoryWatch() as watch:
            done = convert_results(folder, overwrite=True)
        return {
            "cpu": cpu_seconds() - start, "wall": time.perf_counter() - started, "rows": n, "checked": done.n_verified,
            "peak_mb": (watch.peak_kib - idle) / 1024,
        }  # fmt: skip
    module = importlib.import_module("hyrax.datasets.result_dataset")
    target = folder.with_name(folder.name + "-public")
    shutil.rmtree(target, ignore_errors=True)
    start = cpu_seconds()
    writer = module.ResultDatasetWriter(target)
    batches = sorted(folder.glob("batch_[0-9]*.npy"), key=lambda path: int(path.stem.split("_")[1]))
    for path in batches:
        batch = np.load(path)
        writer.write_batch(batch["id"], list(batch["tensor"]))
    writer.commit()
    writing = cpu_seconds() - start
    dataset = module.ResultDataset({}, target)
    k = setting["rows"]
    start = cpu_seconds()
    for row, record in enumerate(itertools.islice(itertools.chain.from_iterable(map(np.load, batches)), k)):
        assert dataset.get_object_id(row) == str(record["id"])
        assert np.array_equal(dataset[row]["data"], record["tensor"], equal_nan=True)
    checking = (cpu_seconds() - start) / k * n
    return {"cpu": writing + checking, "writing": writing, "checking": checking, "rows": n, "checked": k}


OPERATIONS = {"write": write, "read": read, "convert": convert}


def main() -> None:
    """Take system, operation, folder and setting from the command line."""
    system, operation, folder, setting = sys.argv[1:5]
    print("\n" + json.dumps(OPERATIONS[operation](system, Path(folder), json.loads(setting))))


if __name__ == "__main__":
    main()
