"""Linked files against copied ones and against peers on the same file, in the same run.

Every figure is of a process of its own; those that are compared take turns within a round, and the median over the rounds counts. Processor time is
that of all threads. The files have the counts of `remote.make_cells`; they are read once before the first round (warm page cache).

Run ``python benchmarks/linked.py --cells 20000 --rounds 3``, with ``--remote-only`` for the files behind a network, and with ``--peers .venv-peers/bin/python`` for annbatch and
tiledbsoma (`peer_linked.py`).
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

BATCH = 512


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _add(file: str, atlas: str, *, copy: bool) -> dict[str, float]:
    from measuring import MemoryWatch

    import raggedatlas as ra

    made = ra.RaggedAtlas.create(atlas)
    began = _cpu()
    with MemoryWatch() as watch:
        made.add(file, copy=copy, organism="human", progress=False)
    seconds = _cpu() - began
    made.snapshot()
    peak = watch.peak_kib / 1024
    stored = sum(path.stat().st_size for path in Path(atlas).rglob("*") if path.is_file())
    return {"cpu": seconds, "peak_mb": peak, "stored": stored}


def _epoch(atlas: str, shuffle: str, seconds: float) -> dict[str, float]:
    import raggedatlas as ra

    warnings.simplefilter("ignore")
    loader = ra.Loader(ra.RaggedAtlas.checkout_latest(atlas).query(), BATCH, shuffle=shuffle, threads=2)
    return _rate(iter(loader), seconds)


def _backed(file: str, seconds: float) -> dict[str, float]:
    import h5py
    from anndata.io import sparse_dataset

    with h5py.File(file) as opened:
        matrix = sparse_dataset(opened["X"])
        order = np.random.default_rng(0).permutation(matrix.shape[0])
        batches = (matrix[np.sort(order[i : i + BATCH])] for i in range(0, len(order), BATCH))
        return _rate(batches, seconds, shape=lambda batch: batch.shape[0])


def _h5py(file: str, seconds: float) -> dict[str, float]:
    """Read the entries of random rows one row after the other."""
    import h5py

    with h5py.File(file) as opened:
        indptr, data, indices = opened["X/indptr"][...], opened["X/data"], opened["X/indices"]
        order = np.random.default_rng(0).permutation(len(indptr) - 1)

        def batches() -> Any:
            for i in range(0, len(order), BATCH):
                rows = np.sort(order[i : i + BATCH])
                yield [(data[a:b], indices[a:b]) for a, b in zip(indptr[rows], indptr[rows + 1], strict=True)]

        return _rate(batches(), seconds, shape=len)


def _genes(place: str, way: str) -> dict[str, float]:
    """Read 50 genes of all cells, then all of the matrix, from an atlas or with anndata from the file."""
    import h5py
    from anndata.io import read_elem, sparse_dataset

    import raggedatlas as ra

    numbers = np.linspace(0, 19_999, 50).astype(np.int64)
    if way == "sparse_dataset":
        began = _cpu()
        with h5py.File(place) as opened:
            n_genes = sparse_dataset(opened["X"])[:, numbers].nnz
            middle = _cpu()
            n_all = read_elem(opened["X"]).tocsr().nnz
    else:
        query = ra.RaggedAtlas.checkout_latest(place).query()
        began = _cpu()
        n_genes = query.features([str(number) for number in numbers]).to_anndata().X.nnz
        middle = _cpu()
        n_all = query.to_anndata().X.nnz
    return {"genes_cpu": middle - began, "all_cpu": _cpu() - middle, "n_genes": n_genes, "n_all": n_all}


def _rate(batches: Any, seconds: float, shape: Any = lambda batch: len(batch.rows)) -> dict[str, float]:
    """Return cells per second of wall time and of processor time, of at most one epoch."""
    next(batches)
    wall, cpu, cells = time.perf_counter(), _cpu(), 0
    for batch in batches:
        cells += shape(batch)
        if time.perf_counter() - wall > seconds:
            break
    return {"cells_per_cpu_s": cells / (_cpu() - cpu), "cells_per_s": cells / (time.perf_counter() - wall)}


def _one(case: str, *words: str) -> dict[str, float]:
    out = subprocess.run(
        [sys.executable, __file__, "--case", case, *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def _run_case(case: str, words: list[str]) -> dict[str, float]:
    if case in ("copy", "link"):
        return _add(words[0], words[1], copy=case == "copy")
    if case == "genes":
        return _genes(words[0], words[1])
    if case in ("full", "blocks"):
        return _epoch(words[0], case, float(words[1]))
    return (_h5py if case == "h5py" else _backed)(words[0], float(words[1]))


def _peer(python: str, name: str, file: Path, folder: Path, seconds: float) -> dict[str, float]:
    """Measure a peer in its environment."""
    words = [str(Path(__file__).with_name("peer_linked.py")), name, str(file), str(folder / name), str(seconds)]
    out = subprocess.run([python, *words], check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def _remote(file: Path, latency: float) -> list[tuple[str, str]]:
    """Link a file on a web server and read 64 random cells of it from an object store, both of which wait before each answer."""
    from remote import running

    import raggedatlas as ra

    rows, size = [], file.stat().st_size
    with tempfile.TemporaryDirectory() as folder, running(file.parent.parent, latency) as server:
        bucket = file.parent.name
        for number, address in enumerate((f"{server.address}/{bucket}/{file.name}", f"s3://{bucket}/{file.name}")):
            atlas = ra.RaggedAtlas.create(f"{folder}/atlas{number}")
            server.counts()
            began = time.perf_counter()
            atlas.add(address, copy=False, organism="human", storage_options=server.options, progress=False)
            seconds, seen = time.perf_counter() - began, server.counts()
            kind = address.partition(":")[0]
            text = f"{seen.requests} requests, {seen.n_bytes / size:.2%} of {size / 1e6:.0f} MB, {seconds:.2f} s"
            rows.append((f"link over {kind}, {latency * 1000:.0f} ms", text))
        view = atlas.checkout(atlas.snapshot())
        server.counts()
        for seed in range(2):
            began = time.perf_counter()
            view.query().sample(64, seed=seed).to_anndata()
            seconds, seen = time.perf_counter() - began, server.counts()
            text = f"{seen.requests} requests, {seen.in_sequence} in sequence, {seen.n_bytes / 1e6:.1f} MB, {seconds:.2f} s"
            rows.append((f"64 random cells, {'first' if not seed else 'second'} call", text))
    return rows


def _query_remote(folder: Path, latency: float, *, n_files: int = 20, n_cells: int = 1500) -> list[tuple[str, str]]:
    """Read 50 genes of one cell type, a tenth of the cells, out of many files: its cells next to each other, and anywhere."""
    from remote import make_cells, running

    import raggedatlas as ra
    from raggedatlas.catalog.assets import array_readers
    from raggedatlas.store.linked import load_references

    rows = []
    for order in ("sorted", "anywhere"):
        bucket = folder / order
        bucket.mkdir()
        kinds, bounds = {}, {}
        for number in range(n_files):
            adata, rng = make_cells(n_cells, seed=number), np.random.default_rng(number)
            kind = rng.integers(0, 10, n_cells)
            kinds[f"f{number}"] = kind = np.sort(kind) if order == "sorted" else kind
            bounds[f"f{number}"] = adata.X.indptr
            adata.obs["kind"] = kind.astype(str)
            adata.write_h5ad(bucket / f"f{number}.h5ad", compression="gzip")
        with tempfile.TemporaryDirectory() as place, running(folder, latency) as server:
            atlas = ra.RaggedAtlas.create(f"{place}/atlas")
            addresses = [f"s3://{order}/f{number}.h5ad" for number in range(n_files)]
            atlas.add(addresses, copy=False, organism="human", storage_options=server.options, progress=False)
            atlas.snapshot()
            view = ra.RaggedAtlas.open(f"{place}/atlas", sources=lambda address: server.options).checkout(1)
            needed = 0
            for record in view.list_datasets()["name"].map(lambda name: view.dataset(name).records[0]):  # noqa: B023
                start = bounds[record.name].astype(np.int64)
                cells = np.flatnonzero(kinds[record.name] == 3)
                for reader in array_readers(view._catalog, record).values():
                    link, chunk = reader.spec.linked, reader.spec.chunk_shape[0]
                    if link is None or not link.array.startswith("X/"):
                        continue
                    first, last = start[cells] // chunk, (start[cells + 1] - 1) // chunk
                    numbers = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last, strict=True)]))
                    table = load_references(reader.location, link).arrays[link.array]
                    needed += int(table.sizes[numbers].sum())
            genes = [str(i) for i in range(50)]
            server.counts()
            began = time.perf_counter()
            view.query().where(kind="3").features(genes).to_anndata()
            seconds, seen = time.perf_counter() - began, server.counts()
            text = (
                f"{seen.n_bytes / needed:.2f}x the {needed / 1e6:.1f} MB of the chunks, {seen.requests} requests, "
                f"{seen.in_sequence} in sequence, {seconds:.2f} s"
            )
            rows.append((f"50 genes of a cell type ({order}) of {n_files} files, {latency * 1000:.0f} ms", text))
    return rows


def _measure(
    asked: argparse.Namespace, folder: Path, files: dict[str, Path], columns: dict[str, Path]
) -> dict[str, list[dict[str, float]]]:
    """Measure every case once a round."""
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(asked.rounds):
        for kind, file in files.items():
            for way in ("copy", "link"):
                atlas = folder / f"{kind}-{way}"
                shutil.rmtree(atlas, ignore_errors=True)
                found.setdefault(f"{way} {kind}", []).append(_one(way, str(file), str(atlas)))
        for kind, file in files.items():
            for shuffle in ("full", "blocks"):
                for way in ("copy", "link"):
                    words = (str(folder / f"{kind}-{way}"), str(asked.seconds))
                    found.setdefault(f"{shuffle} {way} {kind}", []).append(_one(shuffle, *words))
            for way in ("sparse_dataset", "h5py"):
                found.setdefault(f"{way} {kind}", []).append(_one(way, str(file), str(asked.seconds)))
        for kind, file in columns.items():
            for way in ("copy", "link"):
                atlas = folder / f"{kind}-{way}"
                shutil.rmtree(atlas, ignore_errors=True)
                found.setdefault(f"{way} {kind}", []).append(_one(way, str(file), str(atlas)))
                found.setdefault(f"genes {way} {kind}", []).append(_one("genes", str(atlas), way))
            found.setdefault(f"genes sparse_dataset {kind}", []).append(_one("genes", str(file), "sparse_dataset"))
        for peer, file in {
            "annbatch": files["gzip"],
            "annbatch-zarr": folder / "same.zarr",
            "tiledbsoma": files["plain"],
        }.items():
            if asked.peers:
                found.setdefault(peer, []).append(_peer(asked.peers, peer, file, folder, asked.seconds))
        for way in ("copy", "link"):
            atlas = folder / f"zarr-{way}"
            if not atlas.exists():
                _one(way, str(folder / "same.zarr"), str(atlas))
            found.setdefault(f"blocks {way} zarr", []).append(_one("blocks", str(atlas), str(asked.seconds)))
    return found


def main() -> None:
    """Print a table of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--remote-only", action="store_true", help="measure files behind a network only")
    parser.add_argument("--peers", default="")
    parser.add_argument("--case", nargs="+")
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(_run_case(asked.case[0], asked.case[1:])))
        return
    from remote import make_cells

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bucket").mkdir()
        files = {kind: folder / "bucket" / f"{kind}.h5ad" for kind in ("plain", "gzip")}
        adata = make_cells(asked.cells)
        adata.write_h5ad(files["plain"])
        adata.write_h5ad(files["gzip"], compression="gzip")
        columns = {"csc plain": folder / "csc.h5ad", "csc gzip": folder / "csc-gzip.h5ad"}
        adata.write_zarr(folder / "same.zarr")
        adata.X = adata.X.tocsc()
        adata.write_h5ad(columns["csc plain"])
        adata.write_h5ad(columns["csc gzip"], compression="gzip")
        del adata
        found = {} if asked.remote_only else _measure(asked, folder, files, columns)
        sizes = {kind: file.stat().st_size for kind, file in {**files, **columns}.items()}
        print(
            f"{asked.cells:,} cells, {asked.rounds} rounds, "
            + ", ".join(f"{k} {n / 1e6:.0f} MB" for k, n in sizes.items())
        )

        def median(case: str, key: str) -> float:
            return statistics.median(one[key] for one in found[case])

        print("\n| | figure |\n|---|---|")
        for kind in sizes if found else ():
            link, copy = median(f"link {kind}", "cpu"), median(f"copy {kind}", "cpu")
            print(f"| link {kind}: processor s, against add with copy | {link:.2f} / {copy:.2f} = {link / copy:.2f}x |")
            print(f"| peak anonymous memory of linking {kind} (MB) | {median(f'link {kind}', 'peak_mb'):.0f} |")
            print(
                f"| bytes stored of the file's bytes, {kind} | {median(f'link {kind}', 'stored') / sizes[kind]:.2%} |"
            )
        for case in sorted(found):
            if "cells_per_cpu_s" in found[case][0]:
                print(
                    f"| {case}: cells per processor s (wall s) | {median(case, 'cells_per_cpu_s'):,.0f} ({median(case, 'cells_per_s'):,.0f}) |"
                )
        for case in (case for case in sorted(found) if case.startswith("genes")):
            print(
                f"| {case}: 50 genes, all (processor s) | {median(case, 'genes_cpu'):.2f}, {median(case, 'all_cpu'):.2f} |"
            )
        for title, text in (*_remote(files["gzip"], asked.latency), *_query_remote(folder, 0.05)):
            print(f"| {title} | {text} |")


if __name__ == "__main__":
    main()
