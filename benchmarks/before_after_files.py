"""Cases of `before_after.py`: files, geometry, results, the viewer's page, complete processes, and an atlas in an object store."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from before_after_cases import Case, Made, Place, case, put, query, remove

# ---- files


def reading(file: str) -> Made:
    """Walk down X in blocks of rows."""

    def made(place: Place) -> Case:
        from contextlib import closing

        from raggedatlas.formats.registry import open_source

        def run() -> None:
            with closing(open_source(place.data / file)) as source:
                for _ in source.blocks(("X",), 2_000):
                    pass

        return Case(run)

    return made


def writing(
    write: Callable[[Place, Any, Path, dict[str, Any]], object],
    open_it: Callable[[Place], Any],
    suffix: str,
    **options: Any,
) -> Made:
    """Write a file."""

    def made(place: Place) -> Case:
        paths, opened = place.fresh(suffix), open_it(place)
        return Case(lambda target: write(place, opened, target, options), lambda: next(paths))

    return made


def write_copy(place: Place, opened: Any, target: Path, options: dict[str, Any]) -> None:
    """Copy a source into a file."""
    import raggedatlas as ra

    ra.copy(opened, ra.open_sink(target, **options))


def read_memory(place: Place) -> Any:
    """Read a file into an AnnData."""
    import anndata

    return anndata.read_h5ad(place.files[3])


def open_one(place: Place) -> Any:
    """Open the only dataset of an atlas."""
    import raggedatlas as ra

    return ra.RaggedAtlas.checkout_latest(place.own / "one").dataset("dataset3")


put("rows of an h5ad, gzip", "6,000 cells", reading("gzip.h5ad"))
put("rows of an h5ad, uncompressed", "6,000 cells", reading("dataset0.h5ad"))
for _label, _suffix, _options in (
    ("h5ad, gzip", ".h5ad", {"compression": "gzip"}),
    ("h5ad, uncompressed", ".h5ad", {"compression": None}),
    ("Zarr 3", ".zarr", {"zarr_format": 3}),
    ("Zarr 2", ".zarr", {"zarr_format": 2}),
):
    put(
        f"query to {_label}",
        "6,000 cells",
        writing(lambda p, q, t, o: q.write(str(t), **o), lambda p: query(p, "one"), _suffix, **_options),
    )
    put(f"memory to {_label}", "6,000 cells", writing(write_copy, read_memory, _suffix, **_options))
    put(f"file to {_label}", "6,000 cells", writing(write_copy, lambda p: p.files[3], _suffix, **_options))
put(
    "dataset to h5ad, gzip",
    "6,000 cells",
    writing(lambda p, d, t, o: d.write(t, **o), open_one, ".h5ad", compression="gzip"),
)


def validating_file(file: str) -> Made:
    """Validate a file in full."""

    def made(place: Place) -> Case:
        from raggedatlas.formats.anndata.validation import validate

        return Case(lambda: validate(place.data / file, level="full"))

    return made


put("validate h5ad in full, gzip", "6,000 cells", validating_file("gzip.h5ad"))
put("validate h5ad in full, uncompressed", "6,000 cells", validating_file("dataset0.h5ad"))


@case("h5ad to CXG", "6,000 cells")
def _(place: Place) -> Case:
    import raggedatlas as ra

    paths = place.fresh(".cxg")
    return Case(lambda target: ra.copy(place.data / "cxg.h5ad", target), lambda: next(paths))


@case("CXG to AnnData", "6,000 cells")
def _(place: Place) -> Case:
    import cxg_worker

    whole, _ = cxg_worker._readers("raggedatlas")
    return Case(lambda: whole(place.own / "cells.cxg"))


@case("ten genes of a CXG", "6,000 cells")
def _(place: Place) -> Case:
    import cxg_worker

    _, opened = cxg_worker._readers("raggedatlas")
    genes = opened(place.own / "cells.cxg").__enter__()
    return Case(lambda: genes(list(range(0, 5_000, 500))))


@case("CXG to h5ad", "6,000 cells")
def _(place: Place) -> Case:
    import raggedatlas as ra

    paths = place.fresh(".h5ad")
    return Case(lambda target: ra.copy(place.own / "cells.cxg", target), lambda: next(paths))


# ---- geometry, by each version's own vectors_worker

SHAPES = {"points": 200_000, "streamlines": 4_000, "meshes": 500}


def shapes(what: str, act: str) -> Made:
    """Write or read one kind of geometry."""

    def made(place: Place) -> Case:
        import vectors_worker

        ours, n, paths = vectors_worker.Ours(), SHAPES[what], place.fresh()
        ours.what = what  # type: ignore[attr-defined]
        if act == "write":
            return Case(lambda target: ours.write(what, target, n)(), lambda: next(paths))
        store_path = next(paths)
        ours.write(what, store_path, n)()
        if act == "validate":
            from raggedatlas.wings.vectors import validate

            return Case(lambda: validate(store_path))
        if act == "all":
            return Case(lambda: ours.open(store_path).box((-1, -1, -1), (1001, 1001, 1001)))
        if act == "open":
            return Case(lambda: ours.open(store_path))
        store = ours.open(store_path)
        if act == "one":
            which = np.random.default_rng(4).integers(0, n, 100).tolist()
            return Case(lambda: [ours.one(store, i) for i in which])
        edge, k = (500, 3) if act == "large box" else (100, 20)
        boxes = vectors_worker.boxes(edge, k)
        return Case(lambda: [ours.box(store, box) for box in boxes])

    return made


for _what, _n in SHAPES.items():
    for _act in (
        "write",
        "open",
        "validate",
        *(("box", "large box", "all") if _what != "meshes" else ()),
        *(("one",) if _what != "points" else ()),
    ):
        put(f"{_what}: {_act}", f"{_n:,}", shapes(_what, _act))


@case("4,096 fragments decoded", "4,096")
def _(place: Place) -> Case:
    import vectors_worker

    return Case(vectors_worker.Ours().decode)


# ---- results


@case("write results", "100,000 rows of 64 float32")
def _(place: Place) -> Case:
    import results_worker

    paths, given = place.fresh(), list(results_worker.blocks(100_000, (64,), "float32"))

    def run(folder: Path) -> None:
        writer, finish = results_worker.make_writer("raggedatlas", folder, 100_000)
        for ids, values in given:
            writer.write_batch(ids, values)
        finish()

    return Case(run, lambda: next(paths))


def of_results(act: Callable[[Any, Any], Callable[[], object]]) -> Made:
    """Read results."""

    def made(place: Place) -> Case:
        import results_worker

        folder = next(place.fresh())
        writer, finish = results_worker.make_writer("raggedatlas", folder, 100_000)
        for ids, values in results_worker.blocks(100_000, (64,), "float32"):
            writer.write_batch(ids, values)
        finish()
        dataset = results_worker.open_results("raggedatlas", folder)
        return Case(act(dataset, np.random.default_rng(1)))

    return made


def single_rows(dataset: Any, rng: Any) -> Callable[[], object]:
    """Rows one by one."""
    rows = rng.integers(0, 100_000, 1_000).tolist()
    return lambda: [dataset[row] for row in rows]


def row_batches(dataset: Any, rng: Any) -> Callable[[], object]:
    """Rows in batches."""
    batches = [rng.permutation(100_000)[:512] for _ in range(20)]
    return lambda: [dataset[each] for each in batches]


put("results: single rows", "100,000 rows", of_results(single_rows))
put("results: 512 rows", "100,000 rows", of_results(row_batches))
put(
    "results: walk",
    "5,000 rows",
    of_results(lambda dataset, rng: lambda: sum(1 for _ in itertools.islice(dataset, 5_000))),
)
put("results: ids", "100,000 rows", of_results(lambda dataset, rng: lambda: list(dataset.ids())))


@case("convert .npy results", "50,000 rows of 64 float32")
def _(place: Place) -> Case:
    import raggedatlas as ra

    paths, rng = place.fresh(), np.random.default_rng(0)
    names = np.array([f"{row:016x}" for row in range(50_000)])
    values = rng.standard_normal((50_000, 64)).astype(np.float32)

    def setup() -> Path:
        folder = next(paths)
        folder.mkdir()
        for batch, start in enumerate(range(0, 50_000, 5_000)):
            part = np.zeros(5_000, [("id", names.dtype), ("tensor", np.float32, 64)])
            part["id"], part["tensor"] = names[start : start + 5_000], values[start : start + 5_000]
            np.save(folder / f"batch_{batch}.npy", part)
        index = np.zeros(50_000, [("id", names.dtype), ("batch_num", np.int64)])
        index["id"], index["batch_num"] = names, np.arange(50_000) // 5_000
        np.save(folder / "batch_index.npy", index)
        return folder

    return Case(lambda folder: ra.convert_results(folder, overwrite=True), setup)


@case("neighbors, exact", "50,000 rows, 20 queries")
def _(place: Place) -> Case:
    return neighbors_case(place, indexed=False)


@case("neighbors by index", "50,000 rows, 100 queries")
def _(place: Place) -> Case:
    return neighbors_case(place, indexed=True)


def neighbors_case(place: Place, *, indexed: bool) -> Case:
    """Neighbours of rows of an embedding."""
    import recall

    from raggedatlas import ResultDataset
    from raggedatlas.wings.results import neighbors, save_to_database

    folder = next(place.fresh())
    recall.write(folder, 50_000, "clusters")
    if indexed:
        save_to_database(folder)
    dataset = ResultDataset({}, folder)
    uids = [dataset.get_object_id(int(each)) for each in range(0, 50_000, 500 if indexed else 2_500)]
    return Case(lambda: neighbors(dataset, uids, k=10, exact=not indexed))


@case("save_to_database", "50,000 rows of 64 float32")
def _(place: Place) -> Case:
    import recall

    from raggedatlas.wings.results import save_to_database

    paths = place.fresh()

    def setup() -> Path:
        folder = next(paths)
        recall.write(folder, 50_000, "clusters")
        return folder

    return Case(save_to_database, setup)


# ---- the viewer's page


@case("write the viewer's page", "200,000 cells")
def _(place: Place) -> Case:
    import pyarrow as pa

    from raggedatlas.wings.viewer.page import write_page
    from raggedatlas.wings.viewer.scene import make_scene

    rng, n, paths = np.random.default_rng(1), 200_000, place.fresh()
    ids, kinds = pa.array([f"{i:016x}" for i in range(n)]), pa.array([f"type {i}" for i in range(30)])
    places, counts = rng.normal(size=(n, 2)) * 6, rng.poisson(1, n)
    obs = pa.table(
        {"uid": ids, "cell_type": kinds.take(pa.array(rng.integers(0, 30, n))), "n_counts": rng.lognormal(8, 0.5, n)}
    )

    def run(folder: Path) -> None:
        write_page(make_scene(ids, places, obs, genes={"LYZ": counts}), folder / "cells.html", genes=["LYZ"])

    def setup() -> Path:
        folder = next(paths)
        folder.mkdir()
        return folder

    return Case(run, setup)


# ---- processes from start to end


def process(*words: str, copy: bool = False) -> Made:
    """Run Python with some words, where ATLAS and OUT stand for paths."""

    def made(place: Place) -> Case:
        paths, outputs = place.fresh(), itertools.count()

        def setup() -> Path:
            path = next(paths)
            if copy:
                shutil.copytree(place.own / "commands", path)
            return path if copy else place.own / "commands"

        def run(atlas: Path) -> None:
            given = {
                "ATLAS": str(atlas),
                "OUT": f"{place.own}/out-{os.getpid()}-{next(outputs)}.h5ad",
                "FILE": str(place.data / "small1.h5"),
            }
            line = [given.get(word, word) for word in words]
            subprocess.run([sys.executable, *line], check=True, stdout=subprocess.DEVNULL)
            remove(Path(given["OUT"]))

        return Case(run, setup)

    return made


CLI = ("-m", "raggedatlas")
put("process: import RaggedAtlas", "", process("-c", "from raggedatlas import RaggedAtlas"))
put("command: ls", "250 cells", process(*CLI, "ls", "ATLAS"))
put("command: add", "250 cells", process(*CLI, "add", "ATLAS", "FILE", copy=True))
put(
    "command: query to h5ad",
    "250 cells",
    process(*CLI, "query", "ATLAS", "--features", "CD3E", "--features", "CD79A", "-o", "OUT"),
)
put("command: snapshot", "250 cells", process(*CLI, "snapshot", "ATLAS", copy=True))
put("command: validate", "250 cells", process(*CLI, "validate", "ATLAS"))


# ---- in an object store


def stored(act: Callable[[Any], Callable[[], object]]) -> Made:
    """Act on an atlas in S3, on the server that S3 in the environment names."""

    def made(place: Place) -> Case:
        import urllib.request

        import obstore
        from obstore.store import S3Store

        import raggedatlas as ra

        address, bucket = os.environ["S3"], f"b{os.getpid()}"
        login = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
        with urllib.request.urlopen(urllib.request.Request(f"{address}/{bucket}", method="PUT")):
            store = S3Store(bucket, prefix="my.atlas", endpoint=address, client_options={"allow_http": True}, **login)
        for path in sorted((place.own / "tiny").rglob("*")):
            if path.is_file():
                obstore.put(store, path.relative_to(place.own / "tiny").as_posix(), path.read_bytes())
        options = {f"aws_{key}": value for key, value in login.items()} | {
            "aws_endpoint": address,
            "allow_http": "true",
        }
        return Case(act(lambda: ra.RaggedAtlas.checkout_latest(f"s3://{bucket}/my.atlas", storage_options=options)))

    return made


def stored_query(opened: Callable[[], Any]) -> Callable[[], object]:
    """Queries of random cells."""
    view, seeds = opened(), itertools.count()
    return lambda: view.query().sample(1_000, seed=next(seeds)).to_anndata()


def stored_epoch(opened: Callable[[], Any]) -> Callable[[], object]:
    """Epochs."""
    import raggedatlas as ra

    loader = ra.Loader(opened().query(), 512, obs=["cell_type"])
    return lambda: [batch.X for batch in loader]


put("S3: checkout_latest", "20 x 200 cells", stored(lambda opened: opened))
put("S3: query of 1,000 random cells", "20 x 200 cells", stored(stored_query))
put("S3: epoch", "20 x 200 cells", stored(stored_epoch))
