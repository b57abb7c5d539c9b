"""Add an h5ad from an S3 server with latency, read by ranges, against downloading it and then adding it.

The server answers the requests for objects as S3 does and waits before each answer; it is a process of its own. (It is not moto, whose
own work for each request would be part of the figure.) Both ways run in turn in each round; the figure is
the median over the rounds of the time of the download and its add, divided by the time of the add from the server.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast

import anndata
import numpy as np
import obstore
import scipy.sparse as sp

import raggedatlas as ra
from raggedatlas.store.location import Location

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.object_store import WebServer, count_in_sequence


def make_cells(n_cells: int, n_genes: int = 20_000, per_cell: int = 1_500, seed: int = 0) -> anndata.AnnData:
    """Make counts as a sequencer gives them: few genes of most entries, small numbers."""
    rng = np.random.default_rng(seed)
    columns = np.sort((n_genes * rng.random((n_cells, per_cell)) ** 2).astype(np.int32), axis=1)
    values = rng.geometric(0.4, n_cells * per_cell).astype(np.float32)
    pointers = np.arange(0, n_cells * per_cell + 1, per_cell)
    counts = sp.csr_matrix((values, columns.reshape(-1), pointers), shape=(n_cells, n_genes))
    counts.sum_duplicates()
    adata = anndata.AnnData(counts)
    adata.obs["cell_type"] = rng.choice(["B cell", "T cell", "monocyte"], n_cells)
    adata.obsm["X_pca"] = rng.normal(size=(n_cells, 50)).astype(np.float32)
    return adata


def serve(folder: Path, latency: float) -> None:
    """Serve until the standard input ends; each line of it is answered by `Counts` of the requests since the last one."""
    with WebServer(folder, latency=latency, stamps=True) as server:
        sys.stdout.write(f"{server.address}\n")
        sys.stdout.flush()
        for _ in sys.stdin:
            seen = list(server.answered)
            sys.stdout.write(f"{len(seen)} {sum(one.n_bytes for one in seen)} {count_in_sequence(seen)}\n")
            sys.stdout.flush()
            server.answered.clear()


class Counts(NamedTuple):
    """Requests: all, the bytes of their answers, and how many came one after the other."""

    requests: int
    n_bytes: int
    in_sequence: int


class Server:
    """The server in its process.

    Parameters
    ----------
    process : subprocess.Popen
        Runs `serve`.
    """

    uri = "s3://bucket/cells.h5ad"

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._in, self._out = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
        self.address = self._out.readline().strip()
        self.options = {
            "aws_endpoint": self.address,
            "aws_access_key_id": "test",
            "aws_secret_access_key": "test",
            "aws_region": "us-east-1",
            "allow_http": "true",
        }

    def counts(self) -> Counts:
        """Return what was requested since the last call."""
        self._in.write("\n")
        self._in.flush()
        return Counts(*map(int, self._out.readline().split()))

    def count(self) -> int:
        """Return the number of requests since the last call."""
        return self.counts().requests


@contextlib.contextmanager
def running(folder: Path, latency: float) -> Iterator[Server]:
    """Run the server."""
    words = [sys.executable, __file__, "--serve", str(folder), "--latency", str(latency)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process)
        finally:
            process.terminate()


def add(source: "str | Path", options: dict[str, str]) -> None:
    """Add a file to a new atlas."""
    with tempfile.TemporaryDirectory() as folder:
        ra.RaggedAtlas.create(f"{folder}/a").add(source, storage_options=options, progress=False)


def download(server: Server, path: Path) -> Path:
    """Download the file by one request, as `aws s3 cp` of a small file does."""
    store, key = Location(server.uri, server.options).bucket()
    with path.open("wb") as file:
        for part in obstore.get(store, key).stream():
            file.write(part)
    return path


def main() -> None:
    """Print a table of the rounds and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--serve", type=Path)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve, asked.latency)
        return
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), asked.latency) as server:
        Path(folder, "bucket").mkdir()
        file = Path(folder, "bucket", "cells.h5ad")
        make_cells(asked.cells).write_h5ad(file, compression="gzip")
        add(file, {})
        size = file.stat().st_size
        print(f"{asked.cells:,} cells, {size / 1e6:.0f} MB, {asked.latency * 1000:.0f} ms before each answer\n")
        print(
            "| round | from the server (s) | requests | download (s) | add (s) | both (s) | ratio |\n|---|---|---|---|---|---|---|"
        )
        ratios, server_requests = [], []
        for number in range(asked.rounds):
            server.count()
            began = time.perf_counter()
            add(server.uri, server.options)
            remote = time.perf_counter() - began
            server_requests.append(server.count())
            began = time.perf_counter()
            local = download(server, Path(folder, "local.h5ad"))
            fetched = time.perf_counter() - began
            add(local, {})
            both = time.perf_counter() - began
            ratios.append(both / remote)
            print(
                f"| {number + 1} | {remote:.2f} | {server_requests[-1]} | {fetched:.2f} | {both - fetched:.2f} | {both:.2f} | {ratios[-1]:.2f} |",
                flush=True,
            )
        print(f"\nmedian ratio {statistics.median(ratios):.2f}, requests {statistics.median(server_requests):.0f}")


if __name__ == "__main__":
    main()
