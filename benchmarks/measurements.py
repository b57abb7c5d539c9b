"""Every measurement of the loader benchmark as data: which system does what, from which store.

A measurement runs in a separate process, once per round. ``row`` is what ``--only`` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Order = Literal["fully random", "block-shuffled", "in order", ""]

ROWS = ("add", "random", "standard", "batch", "row", "scan", "type", "genes", "genes_csc")


@dataclass(frozen=True)
class Measurement:
    """One thing that one system does.

    Parameters
    ----------
    key
        Unique name; the targets refer to it.
    row
        Group of measurements that are compared with each other; they take turns.
    system, script, op
        Who, by which file, and what the file calls it.
    store
        What it reads, or what an ``add`` leaves behind.
    label
        What a person reads.
    setting
        Arguments of the script, beyond batch size, seed and time limits.
    order
        Order in which cells come.
    once
        Measured in the first round only: no target rests on it.
    """

    key: str
    row: str
    system: str
    script: str
    op: str
    store: str
    label: str
    setting: Mapping[str, Any] = field(default_factory=dict)
    order: Order = ""
    once: bool = False


def _add(system: str, store: str, script: str, label: str, *, once: bool = False, **setting: Any) -> Measurement:
    return Measurement(f"add.{store}", "add", system, script, "add", store, label, setting, once=once)


def _ours(key: str, row: str, label: str, *, store: str = "packed", **setting: Any) -> Measurement:
    order: Order = "fully random" if setting.get("shuffled", True) else "in order"
    return Measurement(key, row, "raggedatlas", "ours_loader.py", "loader", store, label, setting, order)


def _homeobox(key: str, row: str, op: str, label: str, **setting: Any) -> Measurement:
    order: Order = "fully random" if setting.get("shuffled", True) else "in order"
    script = "peer_homeobox_loader.py"
    return Measurement(key, row, "homeobox", script, op, "homeobox", label, setting, order)


def _annbatch(key: str, row: str, label: str, **setting: Any) -> Measurement:
    order: Order = "block-shuffled" if setting.get("shuffled", True) else "in order"
    return Measurement(key, row, "annbatch", "peer_annbatch.py", "loader", "annbatch", label, setting, order)


def _cellstream(key: str, row: str, label: str, **setting: Any) -> Measurement:
    order: Order = "fully random" if setting.get("shuffled", True) else "in order"
    script = "peer_cellstream.py"
    return Measurement(key, row, "cellstream", script, "gather", "cellstream", label, setting, order)


def _scipy(key: str, row: str, label: str, **setting: Any) -> Measurement:
    return Measurement(key, row, "scipy", "peer_scipy.py", "slice", "union", label, setting, "fully random")


def _one(key: str, row: str, system: str, op: str, store: str) -> Measurement:
    script, label = CALLED[system, op in LOADER_OPS]
    return Measurement(key, row, system, script, op, store, label)


LOADER_OPS = ("row",)
CALLED = {
    ("raggedatlas", True): ("ours_loader.py", "raggedatlas"),
    ("raggedatlas", False): ("ours.py", "raggedatlas"),
    ("homeobox", True): ("peer_homeobox_loader.py", "homeobox"),
    ("homeobox", False): ("peer_homeobox.py", "homeobox"),
    ("cellstream", True): ("peer_cellstream.py", "cellstream, one union matrix"),
    ("cellstream", False): ("peer_cellstream.py", "cellstream, one union matrix"),
    ("scipy", True): ("peer_scipy.py", "scipy X[[i]] in memory"),
}

ADDS = (
    _add("raggedatlas", "packed", "ours.py", "raggedatlas, packed", codec="packed"),
    _add("raggedatlas", "standard", "ours.py", "raggedatlas, standard", codec="standard"),
    _add("raggedatlas", "archive", "ours.py", "raggedatlas, archive", codec="archive", once=True),
    _add("homeobox", "homeobox", "peer_homeobox.py", "homeobox"),
    _add("cellstream", "cellstream", "peer_cellstream.py", "cellstream, one union matrix"),
    _add("annbatch", "annbatch", "peer_annbatch.py", "annbatch, shuffled while written", once=True),
    _add("tiledbsoma-ml", "soma", "peer_tiledbsoma.py", "tiledbsoma, one dataset", once=True),
    _add("slafdb", "slaf", "peer_slafdb.py", "slafdb, one dataset", once=True),
    _add("bionemo-scdl", "scdl", "peer_scdl.py", "bionemo-scdl, one dataset", once=True),
)

RANDOM = (
    _ours("packed.512", "random", "raggedatlas", threads=2),
    _ours("packed.512.t1", "random", "raggedatlas, 1 thread", threads=1),
    _homeobox("homeobox.map", "random", "map", "homeobox map-style, no obs columns"),
    _homeobox("homeobox.map.obs", "random", "map", "homeobox map-style, two obs columns", obs=True),
    _homeobox("homeobox.iterable", "random", "iterable", "homeobox iterable, 65,536 x 2", io=65_536),
    _annbatch("annbatch.64", "random", "annbatch, chunk 64, preload 512", chunk=64, preload=512),
    _annbatch("annbatch.32", "random", "annbatch, chunk 32, preload 256", chunk=32, preload=256),
    _cellstream("cellstream.1", "random", "cellstream, 1 thread"),
    _cellstream("cellstream.n2", "random", "cellstream, n_threads=2", n_threads=2),
    _cellstream("cellstream.c2", "random", "cellstream, 2 callers x 1 thread", callers=2),
    _scipy("scipy.1", "random", "scipy X[idx] in memory, 1 thread"),
    _scipy("scipy.2", "random", "scipy X[idx] in memory, 2 callers", callers=2),
    Measurement(
        "tiledbsoma-ml",
        "random",
        "tiledbsoma-ml",
        "peer_tiledbsoma.py",
        "loader",
        "soma",
        "tiledbsoma-ml, 64-cell runs, one dataset",
        {"io": 65_536},
        "block-shuffled",
        once=True,
    ),
    Measurement(
        "slafdb",
        "random",
        "slafdb",
        "peer_slafdb.py",
        "loader",
        "slaf",
        "slafdb, mixture of 16 scanners, one dataset",
        {},
        "block-shuffled",
        once=True,
    ),
    Measurement(
        "scdataset",
        "random",
        "scdataset",
        "peer_scdataset.py",
        "loader",
        "union",
        "scDataset, blocks of 16, fetches of 16 batches, the union h5ad",
        {"block": 16, "fetch": 16},
        "block-shuffled",
        once=True,
    ),
    Measurement(
        "bionemo-scdl",
        "random",
        "bionemo-scdl",
        "peer_scdl.py",
        "loader",
        "scdl",
        "bionemo-scdl, torch DataLoader, one dataset",
        {},
        "fully random",
        once=True,
    ),
)

STANDARD = (_ours("standard.512", "standard", "raggedatlas, standard codec", store="standard", threads=2),)

BATCHES = (
    *(_ours(f"packed.{n}", "batch", f"raggedatlas, batch {n:,}", threads=2, batch=n) for n in (64, 4_096)),
    *(
        replace(measurement, once=True)
        for n in (64, 4_096)
        for measurement in (
            _homeobox(f"homeobox.map.{n}", "batch", "map", f"homeobox map-style, batch {n:,}", batch=n),
            _annbatch(f"annbatch.b{n}", "batch", f"annbatch, 64 x 512, batch {n:,}", chunk=64, preload=512, batch=n),
            _cellstream(f"cellstream.b{n}", "batch", f"cellstream, 2 callers, batch {n:,}", callers=2, batch=n),
        )
    ),
)

SINGLE = (
    _one("packed.row", "row", "raggedatlas", "row", "packed"),
    _one("homeobox.row", "row", "homeobox", "row", "homeobox"),
    _one("cellstream.row", "row", "cellstream", "row", "cellstream"),
    _one("scipy.row", "row", "scipy", "row", "union"),
)

SCANS = (
    _ours("packed.scan", "scan", "raggedatlas", threads=2, shuffled=False),
    _homeobox("homeobox.scan", "scan", "iterable", "homeobox iterable, 65,536 x 2", io=65_536, shuffled=False),
    _annbatch("annbatch.scan", "scan", "annbatch, chunk 64, preload 512", chunk=64, preload=512, shuffled=False),
    _cellstream("cellstream.scan", "scan", "cellstream, 2 callers", callers=2, shuffled=False),
)

TYPES = (
    _one("packed.type", "type", "raggedatlas", "cell_type", "packed"),
    _one("homeobox.type", "type", "homeobox", "cell_type", "homeobox"),
    _one("cellstream.type", "type", "cellstream", "cell_type", "cellstream"),
)

GENES = (
    _one("packed.genes", "genes", "raggedatlas", "genes", "packed"),
    _one("homeobox.genes", "genes", "homeobox", "genes", "homeobox"),
)

COPIES = (
    _one("packed.copy", "genes_csc", "raggedatlas", "add_csc", "packed-csc"),
    _one("homeobox.copy", "genes_csc", "homeobox", "add_csc", "homeobox-csc"),
)

GENES_CSC = (
    _one("packed.genes_csc", "genes_csc", "raggedatlas", "genes_csc", "packed-csc"),
    _one("homeobox.genes_csc", "genes_csc", "homeobox", "genes_csc", "homeobox-csc"),
)

READS = (*RANDOM, *STANDARD, *BATCHES, *SINGLE, *SCANS, *TYPES, *GENES, *GENES_CSC)
EVERY = (*ADDS, *COPIES, *READS)
