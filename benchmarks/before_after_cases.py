"""What `before_after.py` measures of atlases: each case prepares what it needs, and returns what is timed.

Only names that both versions have are used, or those of benchmarks that each version has of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

OBS = ["cell_type", "donor"]
CELLS, THIN, TINY = 6_000, 250_000, 200
DATASETS = [f"dataset{number}" for number in range(4)]


@dataclass
class Case:
    """Something to time: `run` may take what `setup` returned, which is not timed."""

    run: Callable[..., object]
    setup: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Place:
    """Folders of one version: `data` is shared by both, `own` is not."""

    data: Path
    own: Path

    @property
    def files(self) -> list[str]:
        """The four files of cells."""
        return [str(self.data / f"{name}.h5ad") for name in DATASETS]

    def fresh(self, suffix: str = "") -> Iterator[Path]:
        """Give new paths, and remove what is at the path before."""
        folder = self.own / f"fresh-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        for number in itertools.count():
            remove(folder / f"{number - 1}{suffix}")
            yield folder / f"{number}{suffix}"


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


Made = Callable[[Place], Case]
CASES: dict[str, tuple[str, Made]] = {}
"""Name -> (size, what prepares it)."""


def case(name: str, size: str) -> Callable[[Made], Made]:
    """Put a case into the table."""

    def put(made: Made) -> Made:
        CASES[name] = (size, made)
        return made

    return put


def put(name: str, size: str, made: Made) -> None:
    """Put a case that another function makes into the table."""
    CASES[name] = (size, made)


# ---- what cases read, made once for each version


def prepare(place: Place) -> None:
    """Make the atlases that cases read."""
    import raggedatlas as ra

    place.own.mkdir(parents=True)
    for codec in ("packed", "standard", "archive"):
        atlas = ra.RaggedAtlas.create(place.own / codec, codec=codec)
        atlas.add(place.files, progress=False)
        atlas.snapshot()
    shutil.copytree(place.own / "packed", place.own / "csc")
    atlas = ra.RaggedAtlas.open(place.own / "csc")
    for name in DATASETS:
        atlas.add_csc(name)
    atlas.snapshot()
    atlas = ra.RaggedAtlas.create(place.own / "thin")
    atlas.add([str(place.data / f"thin{i}.h5ad") for i in range(2)], organism="human", progress=False)
    atlas.snapshot()
    atlas = ra.RaggedAtlas.create(place.own / "tiny")
    atlas.add(tiny_files(place), progress=False)
    atlas.snapshot()
    atlas = ra.RaggedAtlas.create(place.own / "one")
    atlas.add(place.files[3], progress=False)
    atlas.snapshot()
    ra.copy(place.data / "cxg.h5ad", place.own / "cells.cxg")
    ra.copy(place.data / "cxg_small.h5ad", place.own / "small.cxg")
    atlas = ra.RaggedAtlas.create(place.own / "commands")
    atlas.add(place.data / "small0.h5", progress=False)
    atlas.snapshot()


def tiny_files(place: Place) -> list[str]:
    """Twenty files of 200 cells."""
    return [str(place.data / f"tiny{i:02}.h5ad") for i in range(20)]


def query(place: Place, atlas: str) -> Any:
    """A query of everything in the newest snapshot."""
    import raggedatlas as ra

    return ra.RaggedAtlas.checkout_latest(place.own / atlas).query()


def manifest(place: Place) -> dict[str, Any]:
    """Read what the maker noted."""
    found: dict[str, Any] = json.loads((place.data / "manifest.json").read_text())
    return found


# ---- loaders


def epochs(atlas: str, batch: int = 512, obs: list[str] | None = None, **choices: Any) -> Made:
    """Epochs of a loader."""

    def made(place: Place) -> Case:
        import raggedatlas as ra

        loader = ra.Loader(query(place, atlas), batch, obs=obs or OBS, **choices)
        numbers = itertools.count()

        def run() -> None:
            loader.set_epoch(next(numbers))
            for one in loader:
                _ = one.X

        return Case(run)

    return made


for _codec in ("packed", "standard"):
    put(f"random batches of 512, {_codec}", "24,000 cells", epochs(_codec))
put("sequential batches, archive", "24,000 cells", epochs("archive", shuffle=None))
put("random batches of 64", "24,000 cells", epochs("packed", 64))
put("random batches of 4,096", "24,000 cells", epochs("packed", 4096))
put("batches in blocks", "24,000 cells", epochs("packed", shuffle="blocks"))
put("sequential batches", "24,000 cells", epochs("packed", shuffle=None))
put("random batches, thin cells", "500,000 cells", epochs("thin"))
put("random batches, 20 datasets", "20 x 200 cells", epochs("tiny", obs=["cell_type"]))


@case("one random row", "200 rows")
def _(place: Place) -> Case:
    import raggedatlas as ra

    dataset = ra.CellDataset(query(place, "packed"), obs=OBS)
    rows = np.random.default_rng(0).integers(0, 4 * CELLS, 200).tolist()

    def run() -> None:
        for row in rows:
            _ = dataset.__getitems__([row]).X

    return Case(run)


def making(**choices: Any) -> Made:
    """Make a loader of thin cells."""

    def made(place: Place) -> Case:
        import raggedatlas as ra

        asked = query(place, "thin")
        return Case(lambda: next(iter(ra.Loader(asked, 512, obs=[*OBS, "score"], **choices))))

    return made


put("make a loader", "500,000 thin cells", making())
put("make a loader, balance", "500,000 thin cells", making(balance="cell_type"))
put("make a loader, weights", "500,000 thin cells", making(weights="score"))
put("make a loader, group", "500,000 thin cells", making(group="donor"))


# ---- queries


def asking(atlas: str, ask: Callable[[Any, dict[str, Any]], object]) -> Made:
    """Ask a new query of an open snapshot."""

    def made(place: Place) -> Case:
        import raggedatlas as ra

        view, noted = ra.RaggedAtlas.checkout_latest(place.own / atlas), manifest(place)
        return Case(lambda: ask(view.query(), noted))

    return made


put(
    "one cell type to AnnData",
    "1,200 of 24,000 cells",
    asking("packed", lambda q, m: q.where(f"cell_type = '{m['cell_type']}'").to_anndata()),
)
put("all to AnnData", "24,000 cells", asking("packed", lambda q, m: q.to_anndata()))
put("50 genes", "24,000 cells", asking("packed", lambda q, m: q.features(m["common_genes"]).to_anndata()))
put(
    "50 genes, column-sorted copy",
    "24,000 cells",
    asking("csc", lambda q, m: q.features(m["common_genes"]).to_anndata()),
)
put(
    "50 genes, standard codec",
    "24,000 cells",
    asking("standard", lambda q, m: q.features(m["common_genes"]).to_anndata()),
)
put("aggregate by type", "24,000 cells", asking("packed", lambda q, m: q.aggregate("cell_type")))
put("batches of a query", "24,000 cells", asking("packed", lambda q, m: list(q.batches(2_000))))
put(
    "lazy(), computed",
    "24,000 cells",
    asking("packed", lambda q, m: q.lazy().X.compute(scheduler="threads", num_workers=2)),
)
put("one dataset of 200 cells to AnnData", "200 cells", lambda place: dataset_case(place))  # noqa: PLW0108 (defined below)
put("query of 20 datasets", "20 x 200 cells", asking("tiny", lambda q, m: q.to_anndata()))
THIN_CALLS: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "count()": lambda q, m: q.count(),
    "count() where": lambda q, m: q.where("score < 0.5").count(),
    "count('cell_type')": lambda q, m: q.count("cell_type"),
    "limit(1000)": lambda q, m: q.limit(1000).to_arrow(),
    "sample(1000)": lambda q, m: q.sample(1000).to_arrow(),
    "sample(50, by=)": lambda q, m: q.sample(50, by="cell_type").to_arrow(),
    "order_by().limit(1000)": lambda q, m: q.order_by("score").limit(1000).to_arrow(),
    "obs to Arrow": lambda q, m: q.to_arrow(),
    "obs to pandas": lambda q, m: q.obs("cell_type", "score").to_pandas(),
}
for _name, _ask in THIN_CALLS.items():
    put(_name, "500,000 thin cells", asking("thin", _ask))
put("count('cell_type'), open snapshot", "24,000 cells", asking("packed", lambda q, m: q.count("cell_type")))


def dataset_case(place: Place) -> Case:
    """One dataset as it was added."""
    import raggedatlas as ra

    view = ra.RaggedAtlas.checkout_latest(place.own / "tiny")
    name = view.list_datasets()["name"].tolist()[0]
    return Case(lambda: view.dataset(name).to_anndata())


@case("checkout_latest", "24,000 cells")
def _(place: Place) -> Case:
    import raggedatlas as ra

    return Case(lambda: ra.RaggedAtlas.checkout_latest(place.own / "packed"))


@case("identity in the plan of a query", "100,000 features, 1,000 layouts")
def _(place: Place) -> Case:
    from dataclasses import replace

    import identity

    registry, layouts = identity.make_registry(100_000), identity.make_layouts(100_000, 1_000, 1_000)
    names = registry.table.column("uid").to_pylist()[::100]
    datasets = [(uid,) for uid in layouts]

    def run() -> None:
        identity.build_axis(
            identity.FeatureRows(replace(registry), layouts), datasets, main=list(layouts), join="union", asked=names
        )

    return Case(run)


# ---- adding, snapshots, upkeep


def adding(files: Callable[[Place], Any], **choices: Any) -> Made:
    """Add files to a new atlas."""

    def made(place: Place) -> Case:
        import raggedatlas as ra

        paths = place.fresh()
        return Case(
            lambda atlas: atlas.add(files(place), progress=False, **choices),
            lambda: ra.RaggedAtlas.create(next(paths)),
        )

    return made


put("add four h5ad", "24,000 cells", adding(lambda place: place.files))
put("add thin cells", "250,000 cells", adding(lambda place: str(place.data / "thin0.h5ad"), organism="human"))
put("add twenty tiny files", "20 x 200 cells", adding(tiny_files))
put("add one tiny file", "200 cells", adding(lambda place: tiny_files(place)[0]))
put("add gzip h5ad", "6,000 cells", adding(lambda place: str(place.data / "gzip.h5ad")))


@case("add by two worker processes", "4 x 6,000 cells")
def _(place: Place) -> Case:
    import raggedatlas as ra

    paths = place.fresh()

    def run(atlas: Any) -> None:
        # Workers have ended before the time is read, so that theirs is counted.
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            atlas.add(place.files, progress=False, executor=pool)

    return Case(run, lambda: ra.RaggedAtlas.create(next(paths)))


def copied(
    name: str, act: Callable[[Any], object], before: Callable[[Place, Any], object] = lambda place, atlas: None
) -> Made:
    """Act on a copy of an atlas."""

    def made(place: Place) -> Case:
        import raggedatlas as ra

        paths = place.fresh()

        def setup() -> Any:
            path = next(paths)
            shutil.copytree(place.own / name, path)
            atlas = ra.RaggedAtlas.open(path)
            before(place, atlas)
            return atlas

        return Case(act, setup)

    return made


def add_tiny(place: Place, atlas: Any) -> None:
    """Add a tiny file."""
    atlas.add(tiny_files(place)[0], progress=False)


def many_snapshots(place: Place, atlas: Any) -> None:
    """Take ten snapshots with a dataset more in each."""
    for file in tiny_files(place)[:10]:
        atlas.add(file, progress=False)
        atlas.snapshot()


@case("first snapshot", "24,000 cells")
def _(place: Place) -> Case:
    import raggedatlas as ra

    paths = place.fresh()

    def setup() -> Any:
        atlas = ra.RaggedAtlas.create(next(paths))
        atlas.add(place.files, progress=False)
        return atlas

    return Case(lambda atlas: atlas.snapshot(), setup)


put(
    "snapshot, nothing changed",
    "500,000 thin cells",
    copied("thin", lambda atlas: atlas.snapshot(), lambda place, atlas: atlas.snapshot()),
)
put("snapshot after a tiny dataset", "500,000 thin cells", copied("thin", lambda atlas: atlas.snapshot(), add_tiny))
put("add a tiny dataset beside many cells", "500,000 thin cells", lambda place: Case(
    lambda atlas: add_tiny(place, atlas), copied("thin", lambda atlas: None)(place).setup
))  # fmt: skip
put("add_csc", "6,000 cells", copied("packed", lambda atlas: atlas.add_csc("dataset0")))
put("purge a dataset of 10 snapshots", "24,000 cells", copied(
    "packed", lambda atlas: (atlas.drop_dataset("dataset0"), atlas.purge("dataset0")), many_snapshots
))  # fmt: skip
put(
    "gc",
    "20 x 200 cells",
    copied(
        "tiny",
        lambda atlas: atlas.gc(),
        lambda place, atlas: atlas.drop_dataset(atlas.list_datasets()["name"].tolist()[0]),
    ),
)


def validating(atlas: str, level: str) -> Made:
    """Validate an atlas."""

    def made(place: Place) -> Case:
        import raggedatlas as ra

        view = ra.RaggedAtlas.open(place.own / atlas)
        return Case(lambda: view.validate(level))

    return made


put('validate("deep")', "24,000 cells", validating("packed", "deep"))
put('validate("deep"), column-sorted copies', "24,000 cells", validating("csc", "deep"))
put('validate("deep"), many datasets', "20 x 200 cells", validating("tiny", "deep"))


@case("identity derived by snapshots", "20,000 features")
def _(place: Place) -> Case:
    import identity

    paths = place.fresh()
    return Case(lambda folder: identity.derived_row(20_000, 10_000, folder), lambda: str(next(paths)))
