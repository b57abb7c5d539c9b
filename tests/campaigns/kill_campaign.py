"""Kill processes in the middle of writing calls, at any moment, and compare what is left with a plain model."""

import hashlib
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from anndata import AnnData

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.catalog import bundles
from raggedatlas.errors import ConflictError, NotFoundError
from raggedatlas.model.spaces import FeatureSpace, PointerKind
from raggedatlas.store.executors import spawned
from raggedatlas.wings.results import infer
from raggedatlas.wings.results.dataset import ResultDataset
from raggedatlas.wings.vectors.attachment import transcripts_to_counts
from raggedatlas.wings.vectors.shapes import Shapes, as_attributes
from support.atlases import GENES, small_anndata, write_results
from support.spatial import make_slide, spots, walk

N_CELLS = 5
KEPT = 6
"""Number of datasets from which on some are dropped or purged."""

_SHAPES = "shapes"
"""Content of a dataset that has cells and no values."""

Item = tuple[str, str, str]
"""What stands beside the datasets: kind, name, and the dataset that it belongs to (empty: none)."""


@dataclass(frozen=True)
class State:
    """What an atlas should hold.

    Parameters
    ----------
    datasets : dict of str to str
        Name -> hash of its content.
    items : frozenset of Item
        Results, annotations, geometry, links of features and gene tables: what snapshots hold too.
    snapshots : dict of int to State
        Number -> what it holds, without snapshots of its own.
    grown : frozenset of Item
        Feature spaces and features, which nothing takes away.
    """

    datasets: dict[str, str] = field(default_factory=dict)
    items: frozenset[Item] = frozenset()
    snapshots: "dict[int, State]" = field(default_factory=dict)
    grown: frozenset[Item] = frozenset()

    def without(self, name: str) -> "State":
        """Return the state without a dataset and what belongs to it."""
        kept = frozenset(item for item in self.items if item[2] != name)
        return replace(self, datasets={o: c for o, c in self.datasets.items() if o != name}, items=kept)

    def holding(self, name: str, content: str, *items: Item) -> "State":
        """Return the state with a dataset more, or with another content, and with further items."""
        return replace(self, datasets={**self.datasets, name: content}, items=self.items | set(items))

    def shown(self) -> "State":
        """Return what can be seen at the tip."""
        return State(self.datasets, self.items)


def content_of(data: AnnData) -> str:
    """Hash names, metadata and values."""
    found = hashlib.sha256(repr((list(data.obs_names), list(data.var_names))).encode())
    found.update(data.obs.to_csv().encode())
    matrix = data.X.toarray() if hasattr(data.X, "toarray") else data.X
    for values in (matrix, *(data.obsm[key] for key in sorted(data.obsm))):
        found.update(np.ascontiguousarray(values, np.float64).tobytes())
    return found.hexdigest()


def source_of(seed: int) -> AnnData:
    """Make the data of a seed: every third has a column of its own, every fourth an embedding."""
    made = small_anndata(seed, N_CELLS, extra=f"score{seed % 5}" if seed % 3 == 0 else None)
    if seed % 4 == 0:
        made.obsm["X_pca"] = np.full((N_CELLS, 2), seed, np.float32)
    return made


def shapes_of(seed: int) -> Shapes:
    """Make points that belong to the cells of a seed by their names."""
    names = {"cell_name": np.array([f"CELL{seed}-{i}" for i in range(N_CELLS)])}
    return Shapes(
        "point_cloud",
        walk(4 * N_CELLS),
        offsets=np.arange(0, 4 * N_CELLS + 1, 4),
        ids=np.arange(N_CELLS),
        object_attributes=as_attributes(names),
    )


def _add(atlas: RaggedAtlas, name: str, seed: int, **choices: Any) -> object:
    source = source_of(seed)
    embeddings = {"X_pca": f"pca{seed % 3}"} if "X_pca" in source.obsm else {}
    return atlas.add(source, name, organism="human", embeddings=embeddings, progress=False, **choices)


def _link(atlas: RaggedAtlas, name: str, seed: int) -> object:
    """Link a file beside the atlas, which is written if it is not there."""
    file = Path(atlas.uri).parent / f"linked-{seed}.h5ad"
    if not file.exists():
        source_of(seed).write_h5ad(file, compression="gzip")
    return atlas.add(file, name, organism="human", copy=False, progress=False)


def _add_by_workers(atlas: RaggedAtlas, name: str, seed: int) -> object:
    with spawned(1) as executor:
        return _add(atlas, name, seed, executor=executor)


def _sums(values: Any) -> Any:
    return values.sum(axis=1)


def _labels(atlas: RaggedAtlas, name: str) -> pa.Table:
    """Make a column of labels for all cells."""
    uids = atlas._catalog.tables.read("cells", ["uid"]).column(0)
    return pa.table({"uid": uids, name: [name] * len(uids)})


def _optimize(atlas: RaggedAtlas) -> None:
    """Optimize so that the few datasets of a campaign come to share bundles."""
    bundles.WORTH = 2
    atlas.optimize()


CALLS: dict[str, Callable[..., object]] = {
    "create": lambda _, place: RaggedAtlas.create(place),
    "add": _add,
    "replace": lambda atlas, name, seed: _add(atlas, name, seed, on_duplicate="replace"),
    "add by workers": _add_by_workers,
    "add several": lambda atlas, names, seeds: [_add(atlas, *each) for each in zip(names, seeds, strict=True)],
    "add geometry": lambda atlas, name, dataset: atlas.add(spots(), name, dataset=dataset, progress=False),
    "link geometry": lambda atlas, name, dataset, seed: atlas.add(
        shapes_of(seed), name, dataset=dataset, link="cell_name", progress=False
    ),
    "add transcripts": lambda atlas, name, dataset, seed: atlas.add(
        make_slide(N_CELLS, seed=seed, first=1000 * seed).transcripts,
        name,
        dataset=dataset,
        cells="cell_id",
        counts=True,
        progress=False,
    ),
    "drop_geometry": lambda atlas, name: atlas.drop_geometry(name),
    "add result": lambda atlas, name, folder, as_: atlas.add(folder, name, as_=as_, progress=False),
    "drop_result": lambda atlas, name: atlas.drop_result(name),
    "annotate": lambda atlas, name: atlas.annotate(_labels(atlas, name), name, unknown="skip"),
    "drop_annotation": lambda atlas, name: atlas.drop_annotation(name),
    "infer": lambda atlas, version, folder: infer(_sums, atlas.checkout(version).query(), folder, batch_size=2),
    "add_csc": lambda atlas, name: atlas.add_csc(name),
    "link": _link,
    "materialize": lambda atlas: atlas.materialize(),
    "delete_cells": lambda atlas, names: atlas.delete_cells({"cell_name": names}),
    "drop_dataset": lambda atlas, name: atlas.drop_dataset(name),
    "purge": lambda atlas, name: atlas.purge(name),
    "snapshot": lambda atlas: atlas.snapshot(),
    "markers": lambda atlas: atlas.markers("dataset"),
    "drop_snapshot": lambda atlas, number: atlas.drop_snapshot(number),
    "expire_snapshots": lambda atlas: atlas.expire_snapshots(keep_last=1),
    "rename_dataset": lambda atlas, name, new: atlas.rename_dataset(name, new),
    "set_license": lambda atlas, name: atlas.set_license(name, "CC0-1.0"),
    "restore": lambda atlas, number: atlas.restore(number),
    "optimize": _optimize,
    "gc": lambda atlas: atlas.gc(dry_run=False),
    "repair": lambda atlas: atlas.repair(),
    "reindex_registry": lambda atlas: atlas.reindex_registry(),
    "register_space": lambda atlas, name: atlas.register_space(FeatureSpace(name=name, kind=PointerKind.DENSE)),
    "register_features": lambda atlas, uid: atlas.register_features(pa.table({"uid": [uid], "feature_id": [uid]})),
    "identity.link": lambda atlas, feature, target: atlas.identity.link(feature, target),
    "identity.unlink": lambda atlas, feature: atlas.identity.unlink(feature),
    "identity.update": lambda atlas: atlas.identity.update(),
    "identity.load": lambda atlas, path, name: atlas.identity.load(path, name=name),
    "identity.remove": lambda atlas, name: atlas.identity.remove(name),
    "load_terms": lambda atlas, name: atlas.load_terms({"id": [f"{name}:1"], "label": ["cell"]}, ontology=name),
}
"""Every call that writes: ``call(atlas, **arguments)``."""


def call(uri: str, what: str, arguments: dict[str, Any], ready: Connection | None = None) -> None:
    """Make one writing call, in a process of its own where it says that it is ready."""
    atlas = RaggedAtlas.open(uri)
    if ready is not None:
        ready.send(None)
    CALLS[what](atlas, **arguments)


@dataclass(frozen=True)
class Choice:
    """A call with its arguments.

    Parameters
    ----------
    what : str
        A key of `CALLS`.
    arguments : dict
        Its arguments.
    after : State
        What the atlas holds after it.
    """

    what: str
    arguments: dict[str, Any]
    after: State


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
        self._seeds: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "lance", "anndata"])

    def step(self) -> None:
        """Make one call, kill it, and check that nothing is lost or doubled, also by what is added afterwards."""
        self._prepare()
        chosen = self._choose()
        self._kill(chosen.what, chosen.arguments)
        if chosen.what == "restore":
            # Its commits come one after the other; the same call finishes it.
            call(self.atlas.uri, chosen.what, chosen.arguments)
        self.state = self._settle(chosen)
        self._finish(chosen)
        name, self.number = f"later-{self.number}", self.number + 1
        call(self.atlas.uri, "add", {"name": name, "seed": self.number})
        self.atlas.repair()
        self.state = self.state.holding(name, content_of(source_of(self.number)))
        self._seeds[name] = self.number
        self._check(f"after {chosen.what}")
        while len(self.state.datasets) > KEPT:
            gone = next(iter(self.state.datasets))
            self.atlas.drop_dataset(gone)
            self.state = self.state.without(gone)

    def _settle(self, chosen: Choice) -> State:
        """Find which of the two states is there; finish a purge that was killed."""
        seen, before, after = self._read(), self.state, chosen.after
        between = [before.shown(), after.shown()]
        if chosen.what == "add several":
            first = chosen.arguments["names"][0]
            between.append(before.holding(first, after.datasets[first]).shown())
        assert seen in between, (chosen, seen, before)
        mark = self.atlas._opened.tables.unfinished_purge()
        if mark is not None:
            name = chosen.arguments["name"]
            try:
                call(self.atlas.uri, "add", {"name": "refused", "seed": 1})
            except ConflictError as error:
                assert name in str(error), error  # noqa: PT017
            else:
                raise AssertionError("a write was not refused during an unfinished purge")
            if self.random.random() < 0.5:
                self.atlas.repair()
            else:
                self.atlas.purge(name)
            return after
        numbers = {record.version for record in self.atlas.list_versions()}
        if chosen.what in ("snapshot", "drop_snapshot", "expire_snapshots"):
            return after if numbers == set(after.snapshots) else before
        if after.grown != before.grown:
            return after if after.grown <= self._grown() else before
        if between.index(seen) == 2:
            return replace(before, datasets=seen.datasets)
        return after if seen == after.shown() else before

    def _finish(self, chosen: Choice) -> None:
        """Make the same call again where it deletes cells, or makes something outside the atlas, and look at that."""
        if chosen.what == "delete_cells":
            call(self.atlas.uri, chosen.what, chosen.arguments)
            self.state = chosen.after
        if chosen.what == "create":
            place = chosen.arguments["place"]
            try:
                made = RaggedAtlas.open(place)
            except NotFoundError:
                made = RaggedAtlas.create(place)
            made.add(source_of(1), "first", organism="human", progress=False)
            assert content_of(made.dataset("first").to_anndata()) == content_of(source_of(1))
            assert not [problem for problem in made.validate("deep") if problem.level == "must"], place
        if chosen.what == "infer":
            folder, version = chosen.arguments["folder"], chosen.arguments["version"]
            expected = self.atlas.checkout(version).query().to_anndata()
            try:
                there = ResultDataset({}, folder)
            except NotFoundError:
                call(self.atlas.uri, "infer", chosen.arguments)
                there = ResultDataset({}, folder)
            assert list(there.ids()) == list(expected.obs_names)
            np.testing.assert_array_equal(
                there.get_data(range(len(expected))), np.asarray(expected.X.sum(axis=1)).ravel()
            )

    def _choose(self) -> Choice:
        """Choose a call, its arguments, and the state that it leads to: one of those that were killed least."""
        self.number += 1
        choices = [*self._additions(), *self._upkeep()]
        if len(self.state.datasets) > 2:
            choices += [*self._changes(), *self._beside(), *self._removals()]
        least = min(self.kills[choice.what] for choice in choices)
        chosen = self.random.choice([choice for choice in choices if self.kills[choice.what] == least])
        return self._written(chosen)

    def _prepare(self) -> None:
        """Make what calls that take something away need: two snapshots, and one item of each kind."""
        while len(self.state.snapshots) < 2:
            number = self.atlas.snapshot()
            self.state = replace(self.state, snapshots={**self.state.snapshots, number: self.state.shown()})
        if len(self.state.datasets) > 2:
            self.number += 1
            for choice in self._beside():
                [item] = choice.after.items - self.state.items or [("", "", "")]
                if item[0] not in {"", *(kind for kind, _, _ in self.state.items)}:
                    call(self.atlas.uri, choice.what, self._written(choice).arguments)
                    self.state = replace(self.state, items=self.state.items | {item})

    def _written(self, chosen: Choice) -> Choice:
        """Write the files that a call reads."""
        if chosen.what == "add result":
            uids = self.atlas._catalog.tables.read("cells", ["uid"]).column(0).to_pylist()
            values = np.arange(2 * len(uids), dtype=np.float32).reshape(-1, 2)
            write_results(Path(chosen.arguments["folder"]), uids, values)
        if chosen.what == "identity.load":
            rows = [f"ENSG{i:011d},{gene}" for i, gene in enumerate(GENES)]
            Path(chosen.arguments["path"]).write_text("\n".join(["Gene stable ID,Gene name", *rows, ""]))
        return chosen

    def _additions(self) -> Iterator[Choice]:
        """Offer calls that add datasets, or make another atlas."""
        n, state = self.number, self.state
        seed, name = 1000 + n, f"d{n}"
        self._seeds[name] = seed
        after = state.holding(name, content_of(source_of(seed)))
        yield Choice("add", {"name": name, "seed": seed}, after)
        yield Choice("add by workers", {"name": name, "seed": seed}, after)
        yield Choice("link", {"name": name, "seed": seed}, after)
        second = after.holding(f"e{n}", content_of(source_of(5000 + n)))
        yield Choice("add several", {"names": [name, f"e{n}"], "seeds": [seed, 5000 + n]}, second)
        item = ("geometry", f"g{n}", name)
        yield Choice("add geometry", {"name": item[1], "dataset": name}, state.holding(name, _SHAPES, item))
        slide = make_slide(N_CELLS, seed=seed, first=1000 * seed)
        counts = content_of(transcripts_to_counts(slide.transcripts, cells="cell_id"))
        arguments = {"name": item[1], "dataset": name, "seed": seed}
        yield Choice("add transcripts", arguments, state.holding(name, counts, item))
        yield Choice("create", {"place": str(self.folder / f"other{n}")}, state)

    def _upkeep(self) -> Iterator[Choice]:
        """Offer calls that change nothing that can be seen, or what nothing takes away."""
        n, state = self.number, self.state
        for what in ("optimize", "gc", "repair", "reindex_registry", "identity.update"):
            yield Choice(what, {}, state)
        for what, key, kind, value in (
            ("register_space", "name", "space", f"space{n}"),
            ("register_features", "uid", "feature", f"{n:016x}"),
        ):
            yield Choice(what, {key: value}, replace(state, grown=state.grown | {(kind, value, "")}))

    def _changes(self) -> Iterator[Choice]:
        """Offer calls that change datasets or snapshots."""
        n, state = self.number, self.state
        of = self.random.choice(list(state.datasets))
        gone = state.without(of)
        replaced = gone.holding(of, content_of(source_of(2000 + n)))
        yield Choice("replace", {"name": of, "seed": 2000 + n}, replaced)
        yield Choice("materialize", {}, state)
        yield Choice("drop_dataset", {"name": of}, gone)
        named = [name for name, content in state.datasets.items() if self._is_named(name, content)][:2]
        if named:
            # Of two datasets, whose cells go together or not at all.
            fewer = {name: content_of(source_of(self._seeds[name])[::2]) for name in named}
            cells = [f"CELL{self._seeds[name]}-{i}" for name in named for i in range(1, N_CELLS, 2)]
            yield Choice("delete_cells", {"names": cells}, replace(state, datasets={**state.datasets, **fewer}))
        purged = {number: held.without(of) for number, held in state.snapshots.items()}
        for _ in range(2):
            yield Choice("purge", {"name": of}, replace(gone, snapshots=purged))
        number = max(state.snapshots, default=0) + 1
        yield Choice("snapshot", {}, replace(state, snapshots={**state.snapshots, number: state.shown()}))
        if state.datasets[of] != _SHAPES:
            yield Choice("add_csc", {"name": of}, state)
        # The newest is kept, so that the model need not know which numbers were given before.
        for old in list(state.snapshots)[:-1][:1]:
            left = {other: held for other, held in state.snapshots.items() if other != old}
            yield Choice("drop_snapshot", {"number": old}, replace(state, snapshots=left))
        if any(content != _SHAPES for held in [*state.snapshots.values()][-1:] for content in held.datasets.values()):
            yield Choice("markers", {}, state)
        newest = dict(list(state.snapshots.items())[-1:])
        yield Choice("expire_snapshots", {}, replace(state, snapshots=newest))
        if state.datasets[of] != _SHAPES and not any(item[2] == of for item in state.items):
            self._seeds[f"d{n}"] = self._seeds.get(of, 0)
            renamed = {f"d{n}" if name == of else name: content for name, content in state.datasets.items()}
            yield Choice("set_license", {"name": of}, state)
            yield Choice("rename_dataset", {"name": of, "new": f"d{n}"}, replace(state, datasets=renamed))
        if state.snapshots:
            back = self.random.choice(list(state.snapshots))
            held = state.snapshots[back]
            yield Choice("restore", {"number": back}, replace(state, datasets=held.datasets, items=held.items))

    def _beside(self) -> Iterator[Choice]:
        """Offer calls that add results, annotations, geometry, links and gene tables."""
        n, state = self.number, self.state

        def with_item(item: Item) -> State:
            return replace(state, items=state.items | {item})

        result = {"name": f"r{n}", "folder": str(self.folder / f"r{n}"), "as_": self.random.choice(["space", "vector"])}
        yield Choice("add result", result, with_item(("result", f"r{n}", "")))
        yield Choice("annotate", {"name": f"a{n}"}, with_item(("annotation", f"a{n}", "")))
        named = [name for name, content in state.datasets.items() if self._is_named(name, content)]
        if named:
            of = self.random.choice(named)
            shapes = {"name": f"g{n}", "dataset": of, "seed": self._seeds[of]}
            yield Choice("link geometry", shapes, with_item(("geometry", f"g{n}", of)))
        linked = {name for kind, name, _ in state.items if kind == "link"}
        free = [gene for gene in GENES[:11] if gene not in linked]
        if free:
            gene = self.random.choice(free)
            yield Choice("identity.link", {"feature": gene, "target": GENES[11]}, with_item(("link", gene, "")))
        table = {"path": str(self.folder / f"t{n}.csv"), "name": f"t{n}"}
        yield Choice("identity.load", table, with_item(("table", f"t{n}", "")))
        yield Choice("load_terms", {"name": f"T{n}"}, with_item(("table", f"T{n}", "")))
        if state.snapshots:
            version = max(state.snapshots)
            if set(state.snapshots[version].datasets.values()) - {_SHAPES}:
                yield Choice("infer", {"version": version, "folder": str(self.folder / f"i{n}")}, state)

    def _removals(self) -> Iterator[Choice]:
        """Offer calls that take results, annotations, geometry, links and gene tables away."""
        removals = {
            "result": ("drop_result", "name"), "geometry": ("drop_geometry", "name"),
            "annotation": ("drop_annotation", "name"),
            "link": ("identity.unlink", "feature"), "table": ("identity.remove", "name"),
        }  # fmt: skip
        for kind, (what, key) in removals.items():
            # Shapes that are the cells of a dataset go with it alone.
            there = sorted(i for i in self.state.items if i[0] == kind and self.state.datasets.get(i[2]) != _SHAPES)
            if there:
                item = self.random.choice(there)
                yield Choice(what, {key: item[1]}, replace(self.state, items=self.state.items - {item}))

    def _is_named(self, name: str, content: str) -> bool:
        """Tell whether the cells of a dataset have the names that `shapes_of` gives its seed."""
        return name in self._seeds and content == content_of(source_of(self._seeds[name]))

    def _kill(self, what: str, arguments: dict[str, Any]) -> None:
        """Run a call in another process, and kill that at a moment before it is expected to end; the first of a kind is only timed."""
        expected = self._seconds.get(what)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=call, args=(self.atlas.uri, what, arguments, theirs))
        process.start()
        ours.recv()
        began = time.perf_counter()
        process.join(expected and self.random.random() * expected)
        alive = process.is_alive()
        process.kill()
        process.join()
        if alive and expected:
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
            dataset, found[name] = self.atlas.dataset(name), _SHAPES
            if dataset.records[0].layers:
                found[name] = content_of(dataset.to_anndata())
        return State(found, items_of(self.atlas))

    def _grown(self) -> frozenset[Item]:
        """Read which feature spaces and features are there."""
        features = self.atlas.features().index if self.atlas._catalog.tables.has("gene_expression_registry") else ()
        return frozenset({*(("space", s, "") for s in self.atlas.spaces), *(("feature", uid, "") for uid in features)})

    def _check(self, when: str) -> None:
        """Compare the whole atlas, its cells and its snapshots with the model."""
        assert self._read() == self.state.shown(), (when, self.state)
        assert self.state.grown <= self._grown(), when
        problems = [problem for problem in self.atlas.validate("rows") if problem.level == "must"]
        assert problems == [], (when, problems)
        n_cells = self.atlas._catalog.tables.count("cells")
        assert n_cells == int(self.atlas.list_datasets()["n_cells"].sum()), when
        assert {record.version for record in self.atlas.list_versions()} == set(self.state.snapshots), when
        for number, held in self.state.snapshots.items():
            view = self.atlas.checkout(number)
            assert set(view.list_datasets()["name"]) == set(held.datasets), (when, number)
            assert items_of(view) == held.items, (when, number)


def items_of(there: Any) -> frozenset[Item]:
    """Read which results, annotations, geometry, links and gene tables are there; each name must be there once."""
    links: pd.DataFrame = there.identity.history()
    links = links[links["revoked_at"].isna()]
    symbols = there.features()["feature_id"] if len(links) else pd.Series(dtype=object)
    geometries = there.geometries()
    found = [
        *(("result", name, "") for name in there.results().index),
        *(("geometry", *names) for names in zip(geometries["name"], geometries["datasets"], strict=True)),
        *(("link", symbols[uid], "") for uid in links["feature_uid"]),
        *(("annotation", name, "") for name in there.annotations().index),
        *(("table", name, "") for name in there.identity.tables().index),
    ]
    assert len(set(found)) == len(found), found
    return frozenset(found)
