"""Kill processes in the middle of writing calls, at any moment, and compare what is left with a plain model."""

import multiprocessing
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.catalog.checks import is_note
from raggedatlas.errors import ConflictError
from raggedatlas.testing.annotated import small_anndata
from raggedatlas.testing.geometry import spots
from raggedatlas.testing.modelled import write_results

N_CELLS = 5
KEPT = 6
"""Number of datasets from which on some are dropped or purged."""


@dataclass(frozen=True)
class State:
    """What an atlas should hold.

    Parameters
    ----------
    datasets : dict of str to int
        Name -> seed of its content; -1 for the new cells of a geometry store.
    results : frozenset of str
        Names of results.
    snapshots : dict of int to State
        Number -> what it holds, without snapshots of its own.
    """

    datasets: dict[str, int] = field(default_factory=dict)
    results: frozenset[str] = frozenset()
    snapshots: "dict[int, State]" = field(default_factory=dict)

    def without(self, name: str) -> "State":
        """Return the state without a dataset."""
        return replace(self, datasets={other: seed for other, seed in self.datasets.items() if other != name})

    def shown(self) -> "State":
        """Return what can be seen at the tip."""
        return replace(self, snapshots={})


def call(uri: str, what: str, arguments: dict[str, Any], ready: Connection | None = None) -> None:
    """Make one writing call, in a process of its own where it says that it is ready."""
    atlas = RaggedAtlas.open(uri)
    if ready is not None:
        ready.send(None)
    if what in ("add", "replace"):
        sources = {name: small_anndata(seed, N_CELLS) for name, seed in arguments["sources"].items()}
        for name, source in sources.items():
            atlas.add(
                source, name, organism="human", on_duplicate="replace" if what == "replace" else "error", progress=False
            )
    elif what == "geometry":
        atlas.add(spots(), arguments["name"], dataset=arguments["dataset"], progress=False)
    elif what == "result":
        atlas.add(arguments["folder"], arguments["name"], as_=arguments["as_"], progress=False)
    elif what == "gc":
        atlas.gc(dry_run=False)
    else:
        getattr(atlas, what)(*arguments.get("of", ()))


class Campaign:
    """A series of writing calls, each in a process that is killed at a moment chosen at random.

    Parameters
    ----------
    folder : Path
        Where the atlas is made.
    seed : int
        Seed of all choices.

    Attributes
    ----------
    kills : Counter
        Call -> how often a process was killed in it, before it had finished.
    finished : Counter
        Call -> how often it was faster than the kill.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.atlas = RaggedAtlas.create(str(folder / "atlas"))
        self.state, self.number = State(), 0
        self.kills: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "lance", "anndata"])

    def step(self) -> None:
        """Make one call, kill it, and check that nothing is lost or doubled, also by what is added afterwards."""
        what, arguments, after = self._choose()
        self._kill(what, arguments)
        if what == "restore":
            # Its commits come one after the other; the same call finishes it.
            call(self.atlas.uri, what, arguments)
        self.state = self._settle(what, arguments, after)
        name, self.number = f"later-{self.number}", self.number + 1
        call(self.atlas.uri, "add", {"sources": {name: self.number}})
        self.atlas.repair()
        self.state = replace(self.state, datasets={**self.state.datasets, name: self.number})
        self._check(f"after {what}")
        while len(self.state.datasets) > KEPT:
            gone = next(iter(self.state.datasets))
            self.atlas.drop_dataset(gone)
            self.state = self.state.without(gone)

    def _settle(self, what: str, arguments: dict[str, Any], after: State) -> State:
        """Find which of the two states is there; finish a purge that was killed."""
        seen = self._read()
        assert seen in (self.state.shown(), after.shown()), (what, arguments, seen, self.state, after)
        mark = self.atlas._opened.unfinished_purge()
        if mark is not None:
            try:
                call(self.atlas.uri, "add", {"sources": {"refused": 1}})
            except ConflictError as error:
                assert arguments["of"][0] in str(error), error  # noqa: PT017
            else:
                raise AssertionError("a write was not refused during an unfinished purge")
            if self.random.random() < 0.5:
                self.atlas.repair()
            else:
                self.atlas.purge(arguments["of"][0])
            return after
        numbers = {record.version for record in self.atlas.list_versions()}
        if what == "snapshot":
            return after if numbers == set(after.snapshots) else self.state
        return after if seen == after.shown() else self.state

    def _choose(self) -> tuple[str, dict[str, Any], State]:
        """Choose a call, its arguments, and the state that it leads to."""
        state, names = self.state, list(self.state.datasets)
        self.number += 1
        new = {f"d{self.number}": 1000 + self.number}
        of = self.random.choice(names) if names else ""
        with_new = replace(state, datasets={**state.datasets, **new})
        choices: list[tuple[str, dict[str, Any], State]] = [("add", {"sources": new}, with_new)]
        if len(names) > 2:
            replaced = {k: v for k, v in state.datasets.items() if k != of} | {of: 1000 + self.number}
            purged = {n: s.without(of) for n, s in state.snapshots.items()}
            snapshot = {**state.snapshots, max(state.snapshots, default=0) + 1: state.shown()}
            result = f"r{self.number}"
            choices += [
                ("replace", {"sources": {of: 1000 + self.number}}, replace(state, datasets=replaced)),
                ("drop_dataset", {"of": [of]}, state.without(of)),
                ("purge", {"of": [of]}, replace(state.without(of), snapshots=purged)),
                ("purge", {"of": [of]}, replace(state.without(of), snapshots=purged)),
                ("snapshot", {}, replace(state, snapshots=snapshot)),
                ("optimize", {}, state),
                ("gc", {}, state),
                ("reindex_registry", {}, state),
                (
                    "geometry",
                    {"name": f"g{self.number}", "dataset": f"d{self.number}"},
                    replace(state, datasets={**state.datasets, f"d{self.number}": -1}),
                ),
                (
                    "result",
                    {"name": result, "as_": self.random.choice(["space", "vector"])},
                    replace(state, results=state.results | {result}),
                ),
            ]
            if state.datasets[of] >= 0:
                choices.append(("add_csc", {"of": [of]}, state))
            if state.results:
                gone = self.random.choice(sorted(state.results))
                choices.append(("drop_result", {"of": [gone]}, replace(state, results=state.results - {gone})))
            if state.snapshots:
                back = self.random.choice(list(state.snapshots))
                choices.append(("restore", {"of": [back]}, replace(state.snapshots[back], snapshots=state.snapshots)))
        least = min(self.kills[what] for what, _, _ in choices)
        what, arguments, after = self.random.choice([c for c in choices if self.kills[c[0]] == least])
        if what == "result":
            uids = self.atlas._catalog.tables.read("cells", ["uid"]).column(0).to_pylist()
            values = np.arange(2 * len(uids), dtype=np.float32).reshape(-1, 2)
            arguments = {**arguments, "folder": write_results(self.folder / arguments["name"], uids, values)}
        return what, arguments, after

    def _kill(self, what: str, arguments: dict[str, Any]) -> None:
        """Run a call in another process, and kill that at a moment before it is expected to end."""
        expected = self._seconds.get(what, 1.0)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=call, args=(self.atlas.uri, what, arguments, theirs))
        process.start()
        ours.recv()
        began = time.perf_counter()
        process.join(self.random.random() * expected)
        alive = process.is_alive()
        process.kill()
        process.join()
        if alive:
            self.kills[what] += 1
            self._seconds[what] = expected * 1.1
            return
        assert process.exitcode == 0, (what, arguments, process.exitcode)
        self.finished[what] += 1
        self._seconds[what] = time.perf_counter() - began

    def _read(self) -> State:
        """Read what can be seen at the tip, every value of it."""
        names = list(self.atlas.list_datasets()["name"])
        assert len(set(names)) == len(names), names
        found = {}
        for name in names:
            dataset, found[name] = self.atlas.dataset(name), -1
            if dataset.records[0].layers:
                values = dataset.to_anndata().X.toarray()
                found[name] = int(values[0, 0]) - 1
                np.testing.assert_array_equal(values, small_anndata(found[name], N_CELLS).X.toarray())
        return State(found, frozenset(self.atlas.results().index))

    def _check(self, when: str) -> None:
        """Compare the whole atlas, its cells and its snapshots with the model."""
        assert self._read() == self.state.shown(), (when, self.state)
        problems = [problem for problem in self.atlas.validate("rows") if not is_note(problem)]
        assert problems == [], (when, problems)
        n_cells = self.atlas._catalog.tables.count("cells")
        assert n_cells == int(self.atlas.list_datasets()["n_cells"].sum()), when
        assert {record.version for record in self.atlas.list_versions()} == set(self.state.snapshots), when
        for number, held in self.state.snapshots.items():
            view = self.atlas.checkout(number)
            assert set(view.list_datasets()["name"]) == set(held.datasets), (when, number)
            assert frozenset(view.results().index) == held.results, (when, number)
