"""Fit what every operation costs to the numbers of cells and datasets, and predict an atlas that was not used for the fit.

    python benchmarks/growth.py make FOLDER --cells 1000000 --datasets 100
    python benchmarks/growth.py measure FOLDER [FOLDER ...] >> points.jsonl
    python benchmarks/growth.py requests FOLDER [FOLDER ...] >> requests.jsonl
    python benchmarks/growth.py fit points.jsonl --held-out FOLDER [--at 1000000000 10000]

An atlas is of thin cells: eight counts of 500 genes, three columns. Each operation runs in a process of its own on warm files; memory is the peak of
anonymous memory over that before the call. Seconds are of the wall clock. A cost is a + b cells + c datasets, none negative, fitted to relative errors;
of cells beyond a million, memory does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
from cells import anonymous, thin_cells

AT_ONCE, READ_CELLS = 50, 100_000
LATENCY = 1.0
"""Seconds of an answer of the object store: longer than the work between two requests, and than the server takes for 64 of them."""
BUFFERED = 1_000_000
"""Cells beyond which memory was found not to grow."""
ONE = thin_cells(1_000, time.time_ns() % 2**32)
"""The dataset that is added to each atlas; its content is new in every process."""


def make(folder: Path, n_cells: int, n_datasets: int) -> None:
    """Add datasets of equal size, some in one call, and take a snapshot; an atlas that was begun is continued."""
    import raggedatlas as ra

    exists = (folder / "lance_db").exists()
    atlas = ra.RaggedAtlas.open(folder) if exists else ra.RaggedAtlas.create(folder)
    done, each = len(atlas.list_datasets()), n_cells // n_datasets
    started = time.perf_counter()
    for start in range(done, n_datasets, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, n_datasets))
        if each * AT_ONCE > 2_000_000:
            for number in numbers:
                atlas.add(thin_cells(each, number), f"set {number}", organism="human", progress=False)
        else:
            atlas.add([thin_cells(each, number) for number in numbers], organism="human", progress=False)
        seconds = time.perf_counter() - started
        print(f"{numbers.stop:,} datasets, {seconds:.0f} s", file=sys.stderr, flush=True)
    atlas.snapshot()


def _loader(view: Any) -> Any:
    from raggedatlas.loader.loader import Loader

    return Loader(view.query(), 512, obs=["cell_type", "score"])


def _open(view: Any) -> Any:
    import raggedatlas as ra

    return ra.RaggedAtlas.checkout_latest(view.uri)


@dataclass(frozen=True)
class Call:
    """A call, made on the newest state of an atlas if it writes, else on its newest snapshot."""

    make: Callable[[Any], Any]
    writes: bool = False

    def open(self, uri: str, **options: Any) -> Any:
        """Open what the call is made on."""
        import raggedatlas as ra

        return (ra.RaggedAtlas.open if self.writes else ra.RaggedAtlas.checkout_latest)(uri, **options)


CALLS = {
    "open": Call(_open),
    "list_datasets": Call(lambda at: at.list_datasets()),
    "count": Call(lambda at: at.query().count()),
    "count by a column": Call(lambda at: at.query().count("cell_type")),
    "limit(1000)": Call(lambda at: at.query().limit(1000).to_anndata()),
    "sample(1000)": Call(lambda at: at.query().sample(1000).to_anndata()),
    "loader": Call(_loader),
    "validate quick": Call(lambda at: at.validate("quick"), writes=True),
    "snapshot, nothing changed": Call(lambda at: at.snapshot(), writes=True),
    "one more dataset": Call(lambda at: at.add(ONE, organism="human", progress=False), writes=True),
    "snapshot, one dataset more": Call(lambda at: at.snapshot(), writes=True),
}


def call(folder: str, name: str) -> dict[str, float]:
    """Make one call, and return its figures."""
    import raggedatlas as ra

    at = CALLS[name].open(folder)
    # What is imported and cached by the first calls is not measured.
    ra.RaggedAtlas.checkout_latest(folder).query().where("score < 0").to_anndata()
    peaks, done = [anonymous()], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peaks.append(anonymous())

    before, watcher = anonymous(), threading.Thread(target=watch, daemon=True)
    watcher.start()
    started, used = time.perf_counter(), time.process_time()
    made = CALLS[name].make(at)
    found = {"seconds": time.perf_counter() - started, "processor": time.process_time() - used}
    if name == "loader":
        batches = chain.from_iterable(repeat(made))
        next(batches)
        found["first batch"] = time.perf_counter() - started
        # The first cells of a shard map it and check its index; those after them show what an epoch takes.
        for figure in ("first cells a second", "cells a second"):
            started, n = time.perf_counter(), 0
            while n < READ_CELLS:
                n += len(next(batches))
            found[figure] = n / (time.perf_counter() - started)
    done.set()
    watcher.join()
    return {**found, "bytes": max(max(peaks) - before, 0)}


def measure(folder: Path) -> dict[str, Any]:
    """Make all calls on an atlas, each in a process of its own, and count its files."""
    found = count_files(folder)
    for name in CALLS:
        found[name] = json.loads(_apart("call", folder, name).splitlines()[-1])
        print(name, found[name], file=sys.stderr, flush=True)
    return found


def count_files(folder: Path) -> dict[str, Any]:
    """Return how many cells, datasets, files and bytes an atlas has."""
    import raggedatlas as ra

    view = ra.RaggedAtlas.checkout_latest(folder)
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    size = {"atlas": str(folder), "cells": view.query().count(), "datasets": len(view.list_datasets())}
    return {**size, "files": len(files), "disk": sum(files)}


def requests(folder: Path) -> dict[str, Any]:
    """Make all calls on a copy of an atlas in an S3 server, and count what they ask of it, opening included."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from support.object_store import FaultyProxy, Remote, count_in_sequence

    found = count_files(folder)
    serve = [sys.executable, str(Path(__file__).with_name("maintenance.py")), "serve"]
    with subprocess.Popen(serve, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as moto:
        assert moto.stdout is not None
        with FaultyProxy(moto.stdout.readline().strip()) as proxy:
            remote = Remote.make(proxy)
            remote.upload(folder)
            proxy.latency = LATENCY
            for name in CALLS:
                proxy.requests.clear()
                _apart("ask", remote.uri, name, json.dumps(remote.options))
                seen = list(proxy.requests)
                sent = sum(one.n_bytes for one in seen)
                found[name] = {"requests": len(seen), "in sequence": count_in_sequence(seen), "sent": sent}
                print(name, found[name], file=sys.stderr, flush=True)
        moto.terminate()
    return found


def ask(uri: str, name: str, options: dict[str, str]) -> None:
    """Make one call on an atlas in an object store."""
    os.environ["RAGGEDATLAS_CACHE_DIR"] = ""
    at = CALLS[name].open(uri, storage_options=options)
    # Opening is counted for every call, so there is nothing to add for itself.
    made = CALLS[name].make(at) if name != "open" else None
    if name == "loader":
        batches = iter(made)
        next(batches)
        batches.close()


def _apart(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def figures(point: dict[str, Any]) -> dict[str, float]:
    """Flatten a point to its figures."""
    found = {"files": float(point["files"]), "bytes on disk": float(point["disk"])}
    for name in CALLS:
        found |= {f"{name}: {key}": float(value) for key, value in point[name].items()}
    return found


def sizes(point: dict[str, Any], name: str) -> list[float]:
    """Return what a figure grows with; memory with the blocks that are read at once, which larger atlases do not have more of."""
    cells = float(point["cells"])
    return [1.0, min(cells, BUFFERED) if name.endswith(": bytes") else cells, float(point["datasets"])]


def fit(points: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    """Return the coefficients of 1, cells and datasets."""
    from scipy.optimize import nnls

    rows = np.array([sizes(point, name) for point in points])
    values = np.array([figures(point)[name] for point in points])
    # Next to nothing is not told from nothing.
    values = np.maximum(values, max(values.max() / 1000, 1e-9))
    scale = rows.max(axis=0)
    # Divided by the values, errors are relative; divided by their maxima, columns are of one size.
    coefficients, _ = nnls(rows / scale / values[:, None], np.ones(len(points)))
    return coefficients / scale


def page(points: Sequence[dict[str, Any]], held_out: str, at: Sequence[int]) -> None:
    """Print the formulas, the prediction for the point that was left out, and that for a larger atlas."""
    used = [point for point in points if point["atlas"] != held_out]
    (left,) = [point for point in points if point["atlas"] == held_out]
    print("Fitted to " + ", ".join(f"{point['cells']:,} cells in {point['datasets']:,}" for point in used) + ".\n")
    print(
        f"| figure | fixed | per million cells | per 1,000 datasets | predicted for {left['cells']:,} in {left['datasets']:,} | "
        f"measured | ratio | {at[0]:,} in {at[1]:,} |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, measured in figures(left).items():
        if "a second" in name:
            continue
        found = fit(used, name)
        predicted, further = (
            float(found @ sizes(point, name)) for point in (left, {"cells": at[0], "datasets": at[1]})
        )
        a, b, c = found
        parts = [a, b * 1e6, c * 1e3, predicted, measured, predicted / max(measured, 1e-9), further]
        print("| " + " | ".join([name, *map(_short, parts)]) + " |")


def _short(value: float) -> str:
    """Return a number in few characters."""
    for factor, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}" if abs(value) >= 0.0005 else "0"


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make")
    made.add_argument("folder", type=Path)
    made.add_argument("--cells", type=int, required=True)
    made.add_argument("--datasets", type=int, required=True)
    for name in ("measure", "requests"):
        commands.add_parser(name).add_argument("folders", type=Path, nargs="+")
    for name in ("call", "ask"):
        one = commands.add_parser(name)
        one.add_argument("uri")
        one.add_argument("name", choices=CALLS)
        one.add_argument("options", type=json.loads, nargs="?")
    fitted = commands.add_parser("fit")
    fitted.add_argument("points", type=Path)
    fitted.add_argument("--held-out", required=True)
    fitted.add_argument("--at", type=int, nargs=2, default=(10**9, 10**4))
    asked = parser.parse_args()
    if asked.command == "make":
        make(asked.folder, asked.cells, asked.datasets)
    elif asked.command in ("measure", "requests"):
        for folder in asked.folders:
            print(json.dumps((measure if asked.command == "measure" else requests)(folder)), flush=True)
    elif asked.command == "call":
        print(json.dumps(call(asked.uri, asked.name)))
    elif asked.command == "ask":
        ask(asked.uri, asked.name, asked.options)
    else:
        points = [json.loads(line) for line in asked.points.read_text(encoding="utf-8").splitlines()]
        page(points, asked.held_out, asked.at)


if __name__ == "__main__":
    main()
