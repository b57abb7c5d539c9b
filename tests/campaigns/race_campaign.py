"""Two writing calls at one moment, in two processes, beside one that reads: either order explains what is left, or one call was refused."""

import itertools
import multiprocessing
import random
import re
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from campaigns.kill_campaign import CALLS, content_of, items_of, source_of
from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import AtlasError
from raggedatlas.loader.loader import Loader
from raggedatlas.store.tables import Tables
from support.atlases import GENES, write_results

UNTOUCHED = "third"
"""The dataset that only `restore` and `optimize` write."""

_TERMS = {"id": ["K:1", "K:2", "K:3"], "label": ["b", "nk", "t"]}
_CONFIRMED = ({"B": "b", "T": "t"}, {"B": "nk"})
"""Two mappings of labels to terms, which contradict each other."""

RACED: dict[str, Callable[..., object]] = {
    **CALLS,
    "map_terms": lambda atlas, number: atlas.map_terms("cell_type", "K", confirm=_CONFIRMED[number], on_conflict="replace"),
    "sync": lambda atlas, target: atlas.sync(target),
    "publish": lambda atlas, target: atlas.publish(target),
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A writing call of a pair: its key in `RACED`, and its arguments."""

    what: str
    arguments: dict[str, Any] = field(default_factory=dict)


def calls_of(folder: Path, side: int) -> dict[str, Call]:
    """Make all calls that are raced; those of the two sides take the same new names and datasets, with other content.

    Parameters
    ----------
    folder : Path
        Holds the files that they read.
    side : int
        0 or 1.
    """
    every = [
        Call("add", {"name": "new", "seed": 50 + side}),
        Call("replace", {"name": "first", "seed": 60 + side}),
        Call("add geometry", {"name": "g", "dataset": "slide"}),
        Call("link geometry", {"name": "g", "dataset": "first", "seed": 1}),
        Call("drop_geometry", {"name": "shapes"}),
        Call("add result", {"name": "r", "folder": str(folder / f"r{side}"), "as_": "space"}),
        Call("drop_result", {"name": "model"}),
        Call("annotate", {"name": "label"}),
        Call("drop_annotation", {"name": "note"}),
        Call("map_terms", {"number": side}),
        Call("add_csc", {"name": "first"}),
        Call("link", {"name": "new", "seed": 70 + side}),
        Call("materialize"),
        Call("delete_cells", {"names": [f"CELL1-{i}" for i in range(side, side + 2)]}),
        Call("drop_dataset", {"name": "first"}),
        Call("rename_dataset", {"name": ("first", "second")[side], "new": "new"}),
        Call("purge", {"name": "first"}),
        Call("snapshot"),
        Call("markers"),
        Call("drop_snapshot", {"number": 1}),
        Call("expire_snapshots"),
        Call("restore", {"number": 2}),
        Call("optimize"),
        Call("gc"),
        Call("repair"),
        Call("reindex_registry"),
        Call("register_space", {"name": "space"}),
        Call("register_features", {"uid": f"{7:016x}"}),
        Call("identity.link", {"feature": "GENE0", "target": "GENE1"}),
        Call("identity.unlink", {"feature": "GENE2"}),
        Call("identity.update"),
        Call("identity.load", {"path": str(folder / "genes.csv"), "name": "t"}),
        Call("load_terms", {"name": "T"}),
        Call("identity.remove", {"name": "K"}),
        Call("set_license", {"name": "first"}),
        Call("publish", {"target": str(folder / "web")}),
        Call("sync", {"target": str(folder / "mirror")}),
    ]
    return {call.what: call for call in every}


@dataclass(frozen=True)
class Outcome:
    """How a call ended: ``"done"``, or the class and text of one of our errors; anything else is a fault."""

    status: str
    text: str = ""
    foreign: bool = False


def attempt(uri: str, call: Call) -> Outcome:
    """Make a call, and return how it ended."""
    try:
        RACED[call.what](RaggedAtlas.open(uri), **call.arguments)
    except AtlasError as error:
        return Outcome(type(error).__name__, str(error))
    except BaseException:  # noqa: BLE001  (it is reported)
        return Outcome("foreign", traceback.format_exc()[-1500:], foreign=True)
    return Outcome("done")


def read_all(uri: str, out: Connection) -> Outcome:
    """Read an atlas in every way until told to stop: its tip, its newest snapshot, and a loader and a query over one that was opened before."""
    passes = 0
    try:
        view = RaggedAtlas.open(uri).checkout(2)
        out.send(None)
        while not passes or not out.poll():
            kept = view.dataset(UNTOUCHED).to_anndata()
            assert content_of(kept) == content_of(source_of(3)), "the snapshot shows other values"
            cells = set(view.query().where(dataset=UNTOUCHED).to_pandas().index)
            loader = Loader(view.query().where(dataset=UNTOUCHED), 4)
            loaded = {uid for batch in loader for uid in batch.uids.astype(str)}
            assert loaded == cells, "the loader gives other cells"
            tip = RaggedAtlas.open(uri)
            names = list(tip.list_datasets()["name"])
            assert len(set(names)) == len(names), names
            assert content_of(tip.dataset(UNTOUCHED).to_anndata()) == content_of(source_of(3)), (
                "the tip shows other values"
            )
            assert RaggedAtlas.checkout_latest(uri).query().where(dataset=UNTOUCHED).count() == len(cells)
            passes += 1
    except AtlasError as error:
        return Outcome(type(error).__name__, str(error) + traceback.format_exc()[-1500:])
    except BaseException:  # noqa: BLE001
        return Outcome("foreign", traceback.format_exc()[-1500:], foreign=True)
    return Outcome("done", str(passes))


def serve(pipe: Connection) -> None:
    """Do what comes through a pipe, until nothing more comes."""
    while (task := pipe.recv()) is not None:
        uri, call, delay, commit = task
        if call is None:
            outcome = read_all(uri, pipe)
            pipe.recv()
        else:
            pipe.send(None)
            pipe.recv()
            time.sleep(delay)
            with stopped_before(commit, pipe):
                outcome = attempt(uri, call)
        pipe.send(outcome)


@contextmanager
def stopped_before(commit: int | None, pipe: Connection) -> Iterator[None]:
    """Stop before a commit to a table, counted from 0; say so through a pipe, and go on when something comes."""
    counted, made = itertools.count(), Tables.attempt

    def attempt(tables: Tables, *words: Any, **choices: Any) -> Any:
        if next(counted) == commit:
            pipe.send(None)
            pipe.recv()
        return made(tables, *words, **choices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tables, "attempt", attempt)
        yield


def observe(uri: str) -> dict[str, str]:
    """Return what an atlas shows, each part under a key of its own, so that the changes of two calls can be compared; takes a snapshot."""
    atlas, found = RaggedAtlas.open(uri), dict[str, str]()
    for record in atlas.list_versions():
        view = atlas.checkout(record.version)
        found[f"snapshot {record.version}"] = repr(
            (sorted(view.list_datasets()["name"]), sorted(view.annotations().index))
        )
    for name in atlas.list_datasets()["name"]:
        dataset, key = atlas.dataset(name), f"dataset {name}"
        assert key not in found, f"two datasets are called {name!r}"
        found[key] = content_of(dataset.to_anndata()) if dataset.records[0].layers else "shapes"
        csc = any("csc" in record.arrays for record in dataset.records)
        found |= {f"csc {name}": ""} if csc else {}
    found |= {f"{kind} {name} {dataset}": "" for kind, name, dataset in items_of(atlas)}
    found |= {f"space {name}": "" for name in atlas.spaces} | {f"feature {uid}": "" for uid in atlas.features().index}
    cells = atlas.checkout(atlas.snapshot()).query().to_pandas()
    for name in sorted(set(cells["dataset"])):
        rows = cells[cells["dataset"] == name].sort_values("cell_name").drop(columns="dataset")
        found |= {f"cells {name} {c}": repr(rows[c].tolist()) for c in rows if rows[c].notna().any()}
    return found


class Campaign:
    """Races of pairs of writing calls; the first call of a pair begins at the moment that the second does, or a little later.

    Parameters
    ----------
    folder : Path
        Where the atlases are made.
    seed : int
        Seed of the moments.

    Attributes
    ----------
    ended : Counter
        How the races ended: ``"both"``, or ``"one refused"``.
    passes : int
        How often the third process has read the atlases.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.ended: Counter[str] = Counter()
        self.passes = 0
        self._made = 0
        self._alone: dict[tuple[int, str], tuple[Outcome, dict[str, str]]] = {}
        self._base = folder / "base"
        self._make()
        self.calls = [calls_of(folder, side) for side in (0, 1)]
        self._before = observe(str(self._copied(self._base)))

    def pairs(self) -> list[tuple[str, str]]:
        """Return all pairs of calls, a call beside itself included."""
        return [*itertools.combinations_with_replacement(self.calls[0], 2)]

    @contextmanager
    def processes(self) -> Iterator[list[Connection]]:
        """Start the three processes that make the calls and read."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "lance", "anndata"])
        pipes = [context.Pipe() for _ in range(3)]
        started = [context.Process(target=serve, args=(theirs,), daemon=True) for _, theirs in pipes]
        for process in started:
            process.start()
        try:
            yield [ours for ours, _ in pipes]
        finally:
            for process in started:
                process.kill()
                process.join()

    def race(self, pipes: list[Connection], names: tuple[str, str]) -> None:
        """Make two calls at once, and check how they ended and what is left."""
        calls = [self.calls[side][name] for side, name in enumerate(names)]
        atlas = self._copied(self._base)
        delays = [0.0, self.random.uniform(0, 0.06)]
        self.random.shuffle(delays)
        for pipe, call, delay in zip(pipes, [*calls, None], [*delays, 0.0], strict=True):
            pipe.send((str(atlas), call, delay, None))
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes[:2]:
            pipe.send(None)
        ended = [self._answer(pipe) for pipe in pipes[:2]]
        pipes[2].send(None)
        read = self._answer(pipes[2])
        told = {"calls": calls, "ended": ended, "read": read}
        assert not any(outcome.foreign for outcome in (*ended, read)), told
        assert read.status == "done" or ("purge" in names and "purge" in read.text), told
        self.passes += int(read.text) if read.status == "done" else 0
        self._check(atlas, calls, ended, told)

    def interrupt(self, pipes: list[Connection], names: tuple[str, str], commit: int) -> bool:
        """Make the second call, whole, before a commit of the first; return False if the first has fewer commits.

        A call that waits for the other gets five seconds, then the first goes on.
        """
        calls = [self.calls[side][name] for side, name in enumerate(names)]
        atlas = self._copied(self._base)
        first, second = pipes[:2]
        self._begin(first, atlas, calls[0], commit)
        assert first.poll(120), "a call has not ended within two minutes"
        if first.recv() is not None:
            shutil.rmtree(atlas)
            return False
        self._begin(second, atlas, calls[1], None)
        second.poll(5)
        first.send(None)
        ended = [self._answer(pipe) for pipe in (first, second)]
        told = {"calls": calls, "ended": ended, "commit": commit}
        assert not any(outcome.foreign for outcome in ended), told
        self._check(atlas, calls, ended, told)
        return True

    @staticmethod
    def _begin(pipe: Connection, atlas: Path, call: Call, commit: int | None) -> None:
        pipe.send((str(atlas), call, 0.0, commit))
        pipe.recv()
        pipe.send(None)

    def _check(self, atlas: Path, calls: list[Call], ended: list[Outcome], told: dict[str, Any]) -> None:
        """Check that deep validation finds nothing, that one of the orders explains what is left, and that a dataset can be added."""
        problems = [problem for problem in RaggedAtlas.open(str(atlas)).validate("deep") if problem.level == "must"]
        assert problems == [], (problems, told)
        left = observe(str(atlas))
        assert self._explained(calls, ended, left), (self._differences(calls, left), told)
        self.ended["both" if all(outcome.status == "done" for outcome in ended) else "one refused"] += 1
        later = RaggedAtlas.open(str(atlas))
        later.add(source_of(99), "later", organism="human", progress=False)
        assert content_of(later.dataset("later").to_anndata()) == content_of(source_of(99)), told
        shutil.rmtree(atlas)

    def _explained(self, calls: list[Call], ended: list[Outcome], left: dict[str, str]) -> bool:
        """Return whether the calls, made one after the other in either order, end and leave the same, or one of them was refused."""
        alone = [self._made_alone(side, call) for side, call in enumerate(calls)]
        refused = [side for side, outcome in enumerate(ended) if outcome.status == "ConflictError"]
        if refused:
            # A refusal that waits for the other call is one whether or not the other came later to nothing.
            assert all(_REFUSAL.search(ended[side].text) for side in refused), ended
            others = [alone[side] for side in (0, 1) if side not in refused]
            if left == (others[0][1] if others else self._before):
                return True
            # The only call whose commits come one after the other: it says so, and the same call finishes it.
            return any(calls[side].what == "restore" for side in refused) and self._follows(calls, left)
        if [outcome.status for outcome in ended] == [outcome.status for outcome, _ in alone]:
            changes = [_changes(self._before, after) for _, after in alone]
            if not changes[0].keys() & changes[1].keys() and left == _with_changes(self._before, changes):
                return True
        return any(self._in_order(calls, order) == ([o.status for o in ended], left) for order in ((0, 1), (1, 0)))

    def _follows(self, calls: list[Call], left: dict[str, str]) -> bool:
        return any(self._in_order(calls, order)[1] == left for order in ((0, 1), (1, 0)))

    def _in_order(self, calls: list[Call], order: tuple[int, int]) -> tuple[list[str], dict[str, str]]:
        atlas, status = self._copied(self._base), ["", ""]
        for side in order:
            status[side] = attempt(str(atlas), calls[side]).status
        left = observe(str(atlas))
        shutil.rmtree(atlas)
        return status, left

    def _differences(self, calls: list[Call], left: dict[str, str]) -> list[object]:
        return [_changes(self._in_order(calls, order)[1], left) for order in ((0, 1), (1, 0))]

    def _made_alone(self, side: int, call: Call) -> tuple[Outcome, dict[str, str]]:
        known = self._alone.get((side, call.what))
        if known is None:
            atlas = self._copied(self._base)
            outcome = attempt(str(atlas), call)
            assert outcome.status == "done", (call, outcome)
            known = self._alone[side, call.what] = (outcome, observe(str(atlas)))
            shutil.rmtree(atlas)
        return known

    @staticmethod
    def _answer(pipe: Connection) -> Outcome:
        assert pipe.poll(120), "a call has not ended within two minutes"
        found: Outcome = pipe.recv()
        return found

    def _copied(self, atlas: Path) -> Path:
        shutil.rmtree(self.folder / "mirror", ignore_errors=True)
        self._made += 1
        return Path(shutil.copytree(atlas, self.folder / f"atlas{self._made}"))

    def _make(self) -> None:
        """Make the atlas that all races begin with, and the files that calls read."""
        atlas = RaggedAtlas.create(str(self._base))
        for seed, name in enumerate(("first", "second", UNTOUCHED), 1):
            CALLS["add"](atlas, name, seed)
        atlas.snapshot()
        CALLS["link geometry"](atlas, "shapes", "first", 1)
        atlas.load_terms(_TERMS, ontology="K")
        atlas.identity.link("GENE2", "GENE3")
        uids = atlas._catalog.tables.read("cells", ["uid"]).column(0).to_pylist()
        for name in ("r0", "r1", "model"):
            values = np.arange(2 * len(uids), dtype=np.float32).reshape(-1, 2) + (name == "r1")
            write_results(self.folder / name, uids, values)
        CALLS["add result"](atlas, "model", str(self.folder / "model"), "vector")
        CALLS["annotate"](atlas, "note")
        rows = [f"ENSG{i:011d},{gene}" for i, gene in enumerate(GENES)]
        (self.folder / "genes.csv").write_text("\n".join(["Gene stable ID,Gene name", *rows, ""]))
        atlas.snapshot()
        # What `restore` takes away again.
        CALLS["add"](atlas, "fourth", 4)


_REFUSAL = re.compile(r"[Oo]ther writers|[Aa]nother|under way|running|purge|meanwhile|again")
"""How a refused call says that another one is the reason."""


def _changes(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    keys = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    return {key: (before.get(key), after.get(key)) for key in sorted(keys)}


def _with_changes(before: dict[str, str], changes: list[dict[str, tuple[str | None, str | None]]]) -> dict[str, str]:
    new = {key: after for part in changes for key, (_, after) in part.items()}
    return {key: value for key, value in {**before, **new}.items() if value is not None}
