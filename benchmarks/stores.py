"""Open, query, train from, add to and pin an atlas in an S3 bucket behind a server with latency: seconds, requests, and requests in sequence.

moto's S3 server is a process of its own, and so is the proxy before it, which waits before each answer and notes when each request
began and ended. Each operation runs in a fresh process that has imported what it needs. *In sequence* is the
largest number of requests of which no two overlap: what latency is paid for at least.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import lance  # noqa: F401  (imported before anything is timed, as is the next)
import obstore  # noqa: F401
from peer_stores import BATCH, step
from remote import make_cells

import raggedatlas as ra

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.object_store import FaultyProxy, Remote

HERE = Path(__file__).parent
PEERS = {"annbatch": HERE.parent / ".venv-peers", "tiledbsoma-ml": HERE.parent / ".venv-peers-3.11"}
"""Their environments, made by ``benchmarks/peers.sh loader``."""


class Recorder(FaultyProxy):
    """A proxy that notes the begin and end of each request."""

    def __init__(self, upstream: str, latency: float) -> None:
        super().__init__(upstream, latency=latency)
        self.spans: list[tuple[float, float]] = []
        self._own = threading.local()

    def begin(self, method: str) -> tuple[int, str] | None:
        """Note the begin, in the thread of its connection."""
        self._own.began = time.perf_counter()
        return super().begin(method)

    def end(self) -> None:
        """Note the end."""
        super().end()
        self.spans.append((self._own.began, time.perf_counter()))


def in_sequence(spans: list[tuple[float, float]]) -> int:
    """Return the size of the largest set of disjoint spans: those that end first, one after the other."""
    found, free = 0, float("-inf")
    for began, ended in sorted(spans, key=lambda span: span[1]):
        if began >= free:
            found, free = found + 1, ended
    return found


def serve(upstream: str, latency: float) -> None:
    """Pass requests on until the standard input ends; each line of it is answered by what was seen since the last one."""
    with Recorder(upstream, latency) as proxy:
        print(proxy.address, flush=True)
        for _ in sys.stdin:
            spans, proxy.spans = proxy.spans, []
            print(json.dumps([len(spans), in_sequence(spans)]), flush=True)
            for request in proxy.requests if "--verbose" in sys.argv else ():
                print(request.method, request.path, request.query, request.status, file=sys.stderr, flush=True)
            proxy.requests.clear()


def new_cells(seed: int, number: int) -> Any:
    """Make a dataset of 250 cells, with some features of its own."""
    made = make_cells(250, per_cell=500, seed=1_000 * seed + number)
    made.var_names = [f"{name}-{seed}-{number}" if i < 50 else name for i, name in enumerate(made.var_names)]
    return made


def commit(uri: str, options: dict[str, str], seed: int) -> None:
    """Run the steps of a process that writes: datasets of 250 cells, each with some features of its own."""

    sources = [new_cells(seed, number) for number in range(12)]
    atlas = step("open to write", lambda: ra.RaggedAtlas.open(uri, storage_options=options))
    add = partial(atlas.add, organism="human", progress=False)
    step("add, the first of the process", lambda: add(sources[0]))
    step("add, the second", lambda: add(sources[1]))
    step("add of a list of ten", lambda: add(sources[2:12]))
    step("snapshot", atlas.snapshot)
    step("snapshot of nothing new", atlas.snapshot)
    step("rename_dataset", lambda: atlas.rename_dataset(atlas.list_datasets().index[-1], f"renamed-{seed}"))
    step("drop_dataset", lambda: atlas.drop_dataset(f"renamed-{seed}"))


def perform(operation: str, uri: str, options: dict[str, str], seed: int) -> None:
    """Run the steps of an operation."""
    if operation == "commit":
        commit(uri, options, seed)
        return
    view = step("open", lambda: ra.RaggedAtlas.checkout_latest(uri, storage_options=options))
    if operation == "query":
        query = view.query()
        step("first query of 1,000 cells", lambda: query.sample(1_000, seed=seed).to_anndata(), len)
        step("later query of 1,000 cells", lambda: query.sample(1_000, seed=seed + 1).to_anndata(), len)
    elif operation == "snapshot":
        atlas = step("open to write", lambda: ra.RaggedAtlas.open(uri, storage_options=options))
        step("snapshot", atlas.snapshot)
    else:
        query = view.query()
        loader = step("loader", lambda: ra.Loader(query, BATCH, shuffle=operation, seed=seed, obs=["cell_type"]))
        step("epoch", lambda: sum(len(batch) for batch in loader), int)


class Bench:
    """The servers, and the figures of each step by operation.

    Parameters
    ----------
    proxy : subprocess.Popen
        Runs `serve`.
    uri : str
        Of the atlas.
    """

    def __init__(self, proxy: "subprocess.Popen[str]", uri: str) -> None:
        self._in, self._out = cast("IO[str]", proxy.stdin), cast("IO[str]", proxy.stdout)
        self.address, self.uri = self._out.readline().strip(), uri
        self.figures: dict[str, list[tuple[float, ...]]] = {}

    def count(self) -> list[int]:
        """Return the requests since the last call, and those in sequence."""
        self._in.write("\n")
        self._in.flush()
        return cast("list[int]", json.loads(self._out.readline()))

    def run(self, label: str, words: list[str]) -> None:
        """Run a process of steps, and note seconds, processor seconds, requests, requests in sequence and cells of each."""
        self.count()
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            for line in cast("IO[str]", process.stdout):
                name, seconds, worked, cells = json.loads(line)
                requests, sequence = self.count()
                self.figures.setdefault(f"{label}: {name}", []).append((seconds, worked, requests, sequence, cells))
                print(f"{label}: {name}: {seconds:.2f} s, {requests} requests", file=sys.stderr, flush=True)
                cast("IO[str]", process.stdin).write("\n")
                cast("IO[str]", process.stdin).flush()
        if process.returncode:
            raise SystemExit(f"{words} failed")

    def operation(self, label: str, name: str, seed: int, **options: str) -> None:
        """Run one of our operations."""
        asked = {
            "aws_access_key_id": "test", "aws_secret_access_key": "test", "aws_region": "us-east-1",
            "aws_endpoint": self.address, "allow_http": "true", **options,
        }  # fmt: skip
        self.run(label, [sys.executable, __file__, "--perform", name, self.uri, json.dumps(asked), str(seed)])

    def table(self) -> str:
        """Return the medians as a table of Markdown."""
        lines = [
            "| step | seconds | processor seconds | requests | in sequence | cells/s | requests a batch |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, rounds in self.figures.items():
            seconds, worked, requests, sequence, cells = (statistics.median(one) for one in zip(*rounds, strict=True))
            pace = f"{cells / seconds:,.0f}" if cells else ""
            each = f"{requests / (cells / BATCH):.1f}" if cells > BATCH * 2 else ""
            lines.append(
                f"| {name} | {seconds:.2f} | {worked:.2f} | {requests:.0f} | {sequence:.0f} | {pace} | {each} |"
            )
        return "\n".join(lines)


@contextlib.contextmanager
def running(words: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """Run a server."""
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": None if "--verbose" in words else subprocess.DEVNULL,
    }
    with subprocess.Popen(words, text=True, **cast("Any", pipes)) as process:
        try:
            yield process
        finally:
            process.terminate()


def moto_server() -> tuple[list[str], str]:
    """Return the command of moto's server at a free port, and its address."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], f"http://127.0.0.1:{port}"


def bucket_of(upstream: str) -> Remote:
    """Create a bucket as soon as the server answers."""
    for _ in range(1_200):
        with contextlib.suppress(OSError):
            return Remote.make(FaultyProxy(upstream))
        time.sleep(0.05)
    raise SystemExit("the S3 server did not start")


def make_atlas(folder: str, n_datasets: int, n_cells: int) -> ra.RaggedAtlas:
    """Make an atlas of equal datasets, in one snapshot."""
    atlas = ra.RaggedAtlas.create(folder)
    for seed in range(n_datasets):
        atlas.add(make_cells(n_cells, per_cell=500, seed=seed), f"d{seed}", organism="human", progress=False)
    atlas.snapshot()
    return atlas


def upload_peers(upstream: str, folder: Path, n_datasets: int, n_cells: int) -> dict[str, list[str]]:
    """Make the stores of the peers from the same cells unless the folder has them, upload them, and return the commands that read them."""
    commands = {}
    for system, environment in PEERS.items():
        python = environment / "bin" / "python"
        if not python.exists():
            print(f"{system} left out: there is no {python}", file=sys.stderr)
            continue
        begin = [str(python), "-W", "ignore", str(HERE / "peer_stores.py"), system]
        if not (folder / system).exists():
            files = [folder / f"d{seed}.h5ad" for seed in range(n_datasets)]
            for seed, file in enumerate(files):
                make_cells(n_cells, per_cell=500, seed=seed).write_h5ad(file)
            subprocess.run([*begin, "make", str(folder / system), *map(str, files)], check=True)
        remote = bucket_of(upstream)
        remote.upload(folder / system)
        commands[system] = [*begin, "read", "ADDRESS", f"{remote.bucket}/my.atlas"]
    return commands


def main() -> None:
    """Print a table of the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datasets", type=int, default=20)
    parser.add_argument("--cells", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--only", help="one operation, once: query, snapshot, full, blocks")
    parser.add_argument(
        "--peers", type=Path, help="compare epochs with the peers; a folder for their stores, which are kept"
    )
    parser.add_argument(
        "--commits",
        action="store_true",
        help="measure calls that write, and those of homeobox, tiledbsoma and icechunk",
    )
    parser.add_argument("--verbose", action="store_true", help="list the requests of each step")
    parser.add_argument("--serve", metavar="UPSTREAM")
    parser.add_argument("--perform", nargs=4, metavar=("OPERATION", "URI", "OPTIONS", "SEED"))
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve, asked.latency)
        return
    if asked.perform:
        operation, uri, options, seed = asked.perform
        perform(operation, uri, json.loads(options), int(seed))
        return
    words, upstream = moto_server()
    proxy = [sys.executable, __file__, "--serve", upstream, "--latency", str(asked.latency)]
    proxy += ["--verbose"] * asked.verbose
    with tempfile.TemporaryDirectory() as folder, running(words), running(proxy) as process:
        remote = bucket_of(upstream)
        atlas = make_atlas(f"{folder}/my.atlas", asked.datasets, asked.cells)
        atlas.sync(remote.uri, storage_options={**remote.options, "aws_endpoint": upstream})
        bench = Bench(process, remote.uri)
        if asked.commits:
            commits(bench, upstream, asked.rounds, Path(folder))
        elif asked.peers:
            compare(bench, upload_peers(upstream, asked.peers, asked.datasets, asked.cells), asked.rounds)
        else:
            measure(bench, asked.only, asked.rounds, f"{folder}/cache")
        print(f"{asked.datasets} datasets x {asked.cells:,} cells, {asked.latency * 1000:.0f} ms before each answer\n")
        print(bench.table())


COMMITTERS = {"homeobox": ".venv-peers", "tiledbsoma": ".venv-peers-3.11", "icechunk": ".venv-peers-icechunk"}
"""System -> folder of its environment."""


def commits(bench: Bench, upstream: str, rounds: int, folder: Path) -> None:
    """Run the processes that write in turn in each round; peers get datasets of as many cells, each with some features of its own."""
    pythons = {system: HERE.parent / venv / "bin" / "python" for system, venv in COMMITTERS.items()}
    for seed in range(rounds):
        bench.operation("raggedatlas", "commit", seed)
        files = []
        for number in range(3):
            files.append(str(folder / f"commit{number}.h5ad"))
            cells = new_cells(seed, number)
            cells.obs["cell_type"] = "T cell"
            cells.obs_names = [f"{number}-{name}" for name in cells.obs_names]
            cells.write_h5ad(files[-1])
        for system, python in pythons.items():
            if python.exists():
                begin = [str(python), "-W", "ignore", str(HERE / "peer_stores.py"), system, "commit", bench.address]
                label = "icechunk, three arrays" if system == "icechunk" else system
                bench.run(label, [*begin, f"{bucket_of(upstream).bucket}/store", *files])
            elif not seed:
                print(f"{system} left out: there is no {python}", file=sys.stderr)


def measure(bench: Bench, only: str | None, rounds: int, cache: str) -> None:
    """Run the operations in turn in each round."""
    if only:
        bench.operation(only, only, 0)
        return
    for seed in range(rounds):
        bench.operation("query", "query", seed)
        bench.operation("full", "full", seed)
        bench.operation("blocks", "blocks", seed)
        bench.operation("full, disk cache " + ("warm" if seed else "cold"), "full", seed, cache_dir=cache)
        bench.operation("snapshot of nothing new", "snapshot", seed)


def compare(bench: Bench, peers: dict[str, list[str]], rounds: int) -> None:
    """Run our epochs and those of the peers in turn in each round."""
    for seed in range(rounds):
        bench.operation("raggedatlas, full", "full", seed)
        bench.operation("raggedatlas, blocks", "blocks", seed)
        for system, words in peers.items():
            bench.run(system, [bench.address if word == "ADDRESS" else word for word in words] + [str(seed)])


if __name__ == "__main__":
    main()
