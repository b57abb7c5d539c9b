"""Measure one operation on a CXG, in a separate process, and print one JSON document.

Seconds are processor seconds of the process (threads count, waiting for a disk does not), after one small run that loads
and starts whatever there is. ``plain`` is the straightforward way over tiledb-py: everything in memory, ``A[coordinates] = values``.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from measuring import MemoryWatch, bytes_on_disk

if TYPE_CHECKING:
    from collections.abc import Iterator

N_GENES = 10
REPEATS = 5
EMBEDDING = "X_umap"


def cpu_seconds() -> float:
    """Processor seconds of this process and of children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@contextmanager
def measured(figure: dict[str, Any]) -> Iterator[None]:
    """Note processor and wall seconds, and the peak of the process's own memory."""
    start, started = cpu_seconds(), time.perf_counter()
    with MemoryWatch() as watch:
        yield
        figure["cpu"], figure["wall"] = cpu_seconds() - start, time.perf_counter() - started
    figure["peak_mb"] = watch.peak_kib * 1024 / 1e6


def schema_of(tiledb: Any, axis: str, n: int, setting: dict[str, Any]) -> Any:
    """The schema that `Xr` and `Xc` have in ours, or with the Portal's level and capacity."""
    shuffled = tiledb.FilterList([tiledb.ByteShuffleFilter(), tiledb.ZstdFilter(level=setting["level"])])
    values = shuffled if setting["shuffle"] else tiledb.FilterList([tiledb.ZstdFilter(level=setting["level"])])
    dim = tiledb.Dim(axis, domain=(0, n - 1), tile=min(n, 256), dtype=np.uint32, filters=shuffled)
    other = "var" if axis == "obs" else "obs"
    return tiledb.ArraySchema(
        tiledb.Domain(dim),
        attrs=[
            tiledb.Attr("", dtype=np.float32, filters=values),
            tiledb.Attr(other, dtype=np.uint32, filters=shuffled),
        ],
        sparse=True,
        allows_duplicates=True,
        capacity=setting["capacity"],
    )


OURS_LIKE = {"level": 3, "capacity": 262_144, "shuffle": True}


def write_plain(source: Path, target: Path, setting: dict[str, Any]) -> None:
    """Read the file into memory, and write both halves of the matrix and the embedding."""
    import anndata
    import tiledb

    adata = anndata.read_h5ad(source)
    tiledb.group_create(str(target))
    by_row = adata.X.tocsr()
    rows = np.repeat(np.arange(adata.n_obs, dtype=np.uint32), np.diff(by_row.indptr))
    with _made(tiledb, target / "Xr", schema_of(tiledb, "obs", adata.n_obs, setting)) as array:
        array[rows] = {"": by_row.data, "var": by_row.indices.astype(np.uint32)}
    del rows
    by_column = by_row.tocsc()
    columns = np.repeat(np.arange(adata.n_vars, dtype=np.uint32), np.diff(by_column.indptr))
    with _made(tiledb, target / "Xc", schema_of(tiledb, "var", adata.n_vars, setting)) as array:
        array[columns] = {"": by_column.data, "obs": by_column.indices.astype(np.uint32)}
    tiledb.group_create(str(target / "emb"))
    tiledb.from_numpy(str(target / "emb" / "umap"), np.asarray(adata.obsm[EMBEDDING]))


@contextmanager
def _made(tiledb: Any, path: Path, schema: Any) -> Iterator[Any]:
    tiledb.Array.create(str(path), schema)
    with tiledb.open(str(path), "w") as array:
        yield array


def write(system: str, place: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """From h5ad to CXG, once the libraries are loaded."""
    source, small = Path(setting["source"]), Path(setting["small"])
    act: Callable[[Path, Path], Any]
    if system == "raggedatlas":
        import raggedatlas as ra

        def act(given: Path, target: Path) -> Any:
            return ra.copy(given, target)
    else:

        def act(given: Path, target: Path) -> Any:
            return write_plain(given, target, {**OURS_LIKE, **setting.get("schema", {})})

    figure: dict[str, Any] = {}
    shutil.rmtree(place, ignore_errors=True)
    warm = place.with_name("warm.cxg")
    shutil.rmtree(warm, ignore_errors=True)
    act(small, warm)
    shutil.rmtree(warm)
    with measured(figure):
        act(source, place)
    figure["bytes"] = bytes_on_disk(place)
    figure["matrix_bytes"] = sum(bytes_on_disk(place / name) for name in ("Xr", "Xc", "X") if (place / name).exists())
    return figure


def convert(system: str, place: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """Run cellxgene's own command, a process that cannot be warmed; its start is also measured alone."""
    del system
    shutil.rmtree(place, ignore_errors=True)
    away = ("PYTHONPATH", "PYTHONHOME")
    environment = {key: value for key, value in os.environ.items() if key not in away}
    program = setting["program"]
    begun = _watched([program, "convert", "--help"], environment)
    line = [program, "convert", setting["source"], "-o", str(place), "--disable-corpora-schema", *setting["words"]]
    figure = _watched(line, environment)
    figure["cpu"] -= begun["cpu"]
    figure["wall"] -= begun["wall"]
    figure["start_cpu"] = begun["cpu"]
    figure["bytes"] = bytes_on_disk(place)
    figure["matrix_bytes"] = bytes_on_disk(place / "X")
    return figure


def _watched(line: list[str], environment: dict[str, str]) -> dict[str, Any]:
    import subprocess

    before, started, peak = cpu_seconds(), time.perf_counter(), 0
    with subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        while child.poll() is None:
            try:
                status = Path(f"/proc/{child.pid}/status").read_text()
                peak = max(peak, next((int(r.split()[1]) for r in status.splitlines() if r.startswith("RssAnon")), 0))
            except OSError:
                break
            time.sleep(0.01)
        if child.wait():
            raise SystemExit(f"{line[1]} failed with exit code {child.returncode}")
    return {"cpu": cpu_seconds() - before, "wall": time.perf_counter() - started, "peak_mb": peak * 1024 / 1e6}


def read(system: str, place: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """Read a complete CXG as AnnData, and ten genes of it once it is open; return the answers for comparison."""
    whole, opened = _readers(system)
    chosen = np.linspace(0, setting["n_genes"] - 1, N_GENES).astype(int).tolist()
    whole(Path(setting["small"]))
    with opened(Path(setting["small"])) as genes:
        genes([0, 1])
    figure: dict[str, Any] = {}
    with measured(figure):
        adata = whole(place)
    figure["nnz"], figure["sum"] = int(adata.X.nnz), float(adata.X.sum(dtype=np.float64))
    figure["shape"] = list(adata.shape)
    del adata
    times = []
    with opened(place) as genes:
        for _ in range(REPEATS):
            start = cpu_seconds()
            found = genes(chosen)
            times.append(cpu_seconds() - start)
    figure["genes_ms"] = 1000 * min(times)
    figure["genes_sum"] = float(found.sum(dtype=np.float64))
    return figure


Genes = Callable[[list[int]], Any]
Opener = Callable[[Path], AbstractContextManager[Genes]]


def _readers(system: str) -> tuple[Callable[[Path], Any], Opener]:
    if system != "raggedatlas":
        return _plain_whole, _plain_genes
    from raggedatlas.formats.copying import read_source
    from raggedatlas.formats.registry import open_source

    def whole(path: Path) -> Any:
        with closing(open_source(path)) as source:
            return read_source(source)

    @contextmanager
    def opened(path: Path) -> Iterator[Genes]:
        source: Any
        with closing(open_source(path)) as source:
            yield source.columns

    return whole, opened


def _plain_whole(path: Path) -> Any:
    """Everything by slices over all of it, and a frame of each table."""
    import anndata
    import pandas as pd
    import scipy.sparse as sp
    import tiledb

    frames = {}
    for name in ("obs", "var"):
        with tiledb.open(str(path / name)) as array:
            frames[name] = pd.DataFrame.from_dict(dict(array[:]))
            frames[name] = frames[name].set_index(json.loads(array.meta["cxg_schema"])["index"])
    with tiledb.open(str(path / "Xr")) as array:
        found = array[:]
    shape = (len(frames["obs"]), len(frames["var"]))
    x = sp.csr_matrix((found[""], (found["obs"], found["var"])), shape=shape)
    with tiledb.open(str(path / "emb" / "umap")) as array:
        places = array[:]
    return anndata.AnnData(x, obs=frames["obs"], var=frames["var"], obsm={EMBEDDING: places})


@contextmanager
def _plain_genes(path: Path) -> Iterator[Genes]:
    """Ten genes by ranges of Xc."""
    import scipy.sparse as sp
    import tiledb

    with tiledb.open(str(path / "obs")) as array:
        n = array.shape[0]
    with tiledb.open(str(path / "Xc")) as array:

        def genes(chosen: list[int]) -> Any:
            found = array.multi_index[chosen]
            places = np.searchsorted(chosen, found["var"])
            return sp.csc_matrix((found[""], (found["obs"], places)), shape=(n, len(chosen)))

        yield genes


OPERATIONS = {"write": write, "convert": convert, "read": read}


def main() -> None:
    """Take system, operation, folder and setting from the command line."""
    system, operation, folder, setting = sys.argv[1:5]
    print("\n" + json.dumps(OPERATIONS[operation](system, Path(folder), json.loads(setting))))


if __name__ == "__main__":
    main()
