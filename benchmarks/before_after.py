"""Compare two checkouts of the package: processor time of every operation of docs/explanation/performance.md, in alternating pairs.

    git worktree add ../before 80172d1
    python benchmarks/before_after.py ../before .                       # all cases, half an hour
    python benchmarks/before_after.py ../before . --only add S3 --pairs 15

Both run in this environment, so its libraries are the same. Each case has two processes, one of each checkout, which prepare it, run it
once, and then run it in turns, the one and the other first. A turn repeats the case until it takes `--least` seconds of processor time.
What is compared is processor time with that of ended children, which neighbours on the machine disturb less than the clock; the
ratio of a pair is new by old. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import before_after_files  # noqa: F401  (puts its cases into the table)
from before_after_cases import CASES, CELLS, THIN, TINY, Case, Place, prepare, remove

HERE = Path(__file__).parent
VERSIONS = ("old", "new")
HEAD = "| benchmark | size | old, CPU s | new/old, CPU: median (quartiles) | pairs | new/old, clock |"


def make_data(folder: Path) -> None:
    """Make what both versions read, where it is not there yet."""
    import anndata as ad
    import cells
    import maker

    maker.make(folder, maker.Recipe(cells=CELLS))
    if (folder / "done").exists():
        return
    for number in range(2):
        cells.thin_cells(THIN, number).write_h5ad(folder / f"thin{number}.h5ad")
    whole = ad.read_h5ad(folder / "dataset0.h5ad")
    whole.write_h5ad(folder / "gzip.h5ad", compression="gzip")
    for number in range(20):
        part = ad.read_h5ad(folder / "dataset3.h5ad", backed="r")[
            number * TINY : (number + 1) * TINY, :2_000
        ].to_memory()
        part.obs_names = [f"{number}-{name}" for name in part.obs_names]
        part.write_h5ad(folder / f"tiny{number:02}.h5ad")
    part = whole[:, :5_000].copy()
    part.obsm["X_umap"] = part.X[:, :2].toarray()
    part.write_h5ad(folder / "cxg.h5ad")
    part[:200].write_h5ad(folder / "cxg_small.h5ad")
    for number, name in enumerate(("lung_C144.h5", "lung_C149.h5")):
        (folder / f"small{number}.h5").write_bytes((HERE.parent / "tests/data" / name).read_bytes())
    (folder / "done").touch()


@contextlib.contextmanager
def object_store() -> Iterator[None]:
    """Run moto's S3 server, and name it in the environment."""
    line = [sys.executable, str(HERE / "maintenance.py"), "serve"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as moto:
        assert moto.stdout is not None
        os.environ["S3"] = moto.stdout.readline().strip()
        yield
        moto.terminate()


def line_of(source: Path, case: str, work: Path, version: str) -> list[str]:
    """The command line of a process."""
    return [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        "--case",
        str(source),
        case,
        str(work / "data"),
        str(work / version),
    ]


def environment(source: Path) -> dict[str, str]:
    """The environment of a process, which imports one checkout, from bytecode as installed packages are."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(source / "src")}


class Worker:
    """A process that runs one case of one checkout."""

    def __init__(self, source: Path, case: str, work: Path, version: str) -> None:
        self._process = subprocess.Popen(
            line_of(source, case, work, version), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(source)
        )  # fmt: skip
        self.pid = self._process.pid

    def answer(self) -> dict[str, float]:
        """Return what the process answers next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            raise RuntimeError(self._process.stderr.read()[-2_000:])
        found: dict[str, float] = json.loads(line)
        return found

    def run(self, repeats: int) -> dict[str, float]:
        """Run the case some times, and return the means of its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{repeats}\n")
        self._process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        """End the process; it has written nothing that matters."""
        self._process.kill()
        self._process.communicate()


def measure(case: str, sources: dict[str, Path], work: Path, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure pairs."""
    workers = {version: Worker(sources[version], case, work, version) for version in VERSIONS}
    pairs: list[dict[str, Any]] = []
    try:
        for worker in workers.values():
            worker.answer()
        first = {version: worker.run(1) for version, worker in workers.items()}
        repeats = max(1, min(10_000, int(asked.least / max(1e-5, first["old"]["cpu"])) + 1))
        started = time.perf_counter()
        while len(pairs) < asked.pairs or (len(pairs) < asked.most and time.perf_counter() - started < asked.seconds):
            order = VERSIONS if len(pairs) % 2 == 0 else VERSIONS[::-1]
            found = {version: workers[version].run(repeats) for version in order}
            pairs.append({**found, "repeats": repeats})
    finally:
        for worker in workers.values():
            worker.end()
        for version in VERSIONS:
            remove(work / version / f"fresh-{workers[version].pid}")
    return pairs


def row(case: str, pairs: list[dict[str, Any]]) -> str:
    """A row of the table."""
    cpu = sorted(pair["new"]["cpu"] / pair["old"]["cpu"] for pair in pairs)
    wall = statistics.median(pair["new"]["wall"] / pair["old"]["wall"] for pair in pairs)
    low, _, high = statistics.quantiles(cpu, n=4)
    before = statistics.median(pair["old"]["cpu"] for pair in pairs)
    return f"| {case} | {CASES[case][0]} | {before:.3g} | {statistics.median(cpu):.2f} ({low:.2f} to {high:.2f}) | {len(pairs)} | {wall:.2f} |"


# ---- in the process of one version


def used() -> float:
    """Processor seconds of this process and of children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure_case(one: Case, repeats: int) -> dict[str, float]:
    """Run a case some times."""
    cpu = wall = 0.0
    for _ in range(repeats):
        given = () if one.setup is None else (one.setup(),)
        before, started = used(), time.perf_counter()
        one.run(*given)
        cpu, wall = cpu + used() - before, wall + time.perf_counter() - started
    return {"cpu": cpu / repeats, "wall": wall / repeats}


def work(source: str, name: str, data: str, own: str) -> None:
    """Prepare a case, and run it for each line of the standard input, which gives a number of repeats."""
    sys.path[:0] = [f"{source}/benchmarks"]
    place, out = Place(Path(data), Path(own)), sys.stdout
    sys.stdout = sys.stderr  # what a case prints is no answer
    if name == "prepare":
        prepare(place)
        return
    one = CASES[name][1](place)
    measure_case(one, 1)
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure_case(one, int(line))), file=out, flush=True)


def main() -> None:
    """Make what is missing, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", nargs="+", help="cases whose name has one of these words")
    parser.add_argument("--pairs", type=int, default=7, help="pairs at least")
    parser.add_argument("--most", type=int, default=15, help="pairs at most")
    parser.add_argument("--seconds", type=float, default=15, help="further pairs until this time has passed")
    parser.add_argument("--least", type=float, default=0.4, help="processor seconds of a turn")
    parser.add_argument(
        "--work", type=Path, help="where data and atlases are made and kept; by default a temporary folder"
    )
    parser.add_argument("--json", type=Path, help="add figures to this file")
    asked = parser.parse_args()
    sources = {"old": asked.old.resolve(), "new": asked.new.resolve()}
    with tempfile.TemporaryDirectory() as temporary, object_store():
        work = (asked.work or Path(temporary)).resolve()
        make_data(work / "data")
        for version, source in sources.items():
            if not (work / version).exists():
                subprocess.run(line_of(source, "prepare", work, version), check=True, env=environment(source))
        print(HEAD, "|---" * (HEAD.count("|") - 1) + "|", sep="\n", flush=True)
        for case in CASES:
            if asked.only and not any(word in case for word in asked.only):
                continue
            try:
                pairs = measure(case, sources, work, asked)
            except RuntimeError as error:
                print(f"| {case} | failed: {str(error).splitlines()[-1]} |", file=sys.stderr, flush=True)
                continue
            print(row(case, pairs), flush=True)
            if asked.json:
                with asked.json.open("a") as file:
                    file.write(json.dumps({"case": case, "pairs": pairs}) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--case":
        work(*sys.argv[2:])
    else:
        main()
