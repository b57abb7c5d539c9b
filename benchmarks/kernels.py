"""Compare the compiled kernels with the last numba version, SciPy and homeobox, and print the measures of the kernels.

``python benchmarks/kernels.py --out`` uses 4 x 25,000 cells and five rounds. The numba version is checked out as a git
worktree, and both versions are installed with the same pinned libraries in environments of their own. Every
measurement is a fresh process; the systems of a row take turns, ratios are taken within each round, and the median
of the rounds is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import machine
from compare import processor, spread
from environments import ROOT, SYSTEMS, Environment
from maker import Recipe, make
from measurements import EVERY, Measurement
from measuring import bytes_on_disk
from sitting import COPIED_FROM, Run, Wanted, remove
from targets import add_rate, cells_per_second, warm_seconds
from union import make_union

NUMBA = "816938b"
"""The last commit whose gather, packed codec and ingest loops are all numba."""
PINS = "requirements/lock-3.11.txt"
CLI_FILES = ("lung_C144.h5", "lung_C149.h5")
CLI_GENES = ("--features", "CD3E", "--features", "CD79A")
PER_MEASURE = {"random": ("packed.512", "scipy.2", "numba.512"), "standard": ("standard.512", "numba.standard")}
PER_MEASURE |= {"add": ("add.packed", "add.homeobox"), "genes_csc": ("packed.genes_csc", "homeobox.genes_csc")}
COPY_KEYS = ("packed.copy", "homeobox.copy")


@dataclass(frozen=True)
class Measure:
    """One line of the table.

    Parameters
    ----------
    name
        What is measured.
    least, aim
        What is asked for, and what is hoped for.
    values
        One value per round; the median is compared with ``least``.
    unit
        Unit of the values.
    less
        Whether smaller is better.
    numba
        Values of the numba version, where the same thing was measured.
    """

    name: str
    least: float
    aim: float | None
    values: Sequence[float]
    unit: str = "x"
    less: bool = False
    numba: Sequence[float] = ()

    def cells(self) -> list[str]:
        """Format the line."""
        if not self.values:
            return [self.name, "not measured", "-", f"{self.least:g}", "-", ""]
        value = statistics.median(self.values)
        reached = value <= self.least if self.less else value >= self.least
        at_aim = self.aim is not None and (value <= self.aim if self.less else value >= self.aim)
        digits = 0 if value >= 100 else 2
        verdict = "reached, and the aim" if at_aim else "reached" if reached else "**not reached**"
        aim = "-" if self.aim is None else f"{self.aim:,g}"
        found = f"{spread(list(self.values), digits)} {self.unit}"
        return [self.name, found, spread(list(self.numba), digits), f"{self.least:,g}", aim, verdict]


@dataclass
class Commands:
    """Measure the processor seconds of commands: version and command to one value per round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def run(self, version: str, name: str, python: Path, arguments: Sequence[str]) -> None:
        """Run the command line of one version and record its processor time, children included."""
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
        command = [str(python.parent / "raggedatlas"), *arguments]
        with tempfile.TemporaryFile() as output:
            child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            if child.returncode:
                output.seek(0)
                raise RuntimeError(f"{version} {name}: {output.read().decode()[-400:]}")
        if name:
            self.seconds.setdefault(f"{version} {name}", []).append(used.ru_utime + used.ru_stime)
            print(f"  {version} {name}: {used.ru_utime + used.ru_stime:.2f} s of processor time", flush=True)


def make_version(folder: Path, source: Path) -> Path:
    """Install a source tree in a separate environment, unless it is installed there; its interpreter."""
    python, mark = folder / "bin/python", folder / "source.txt"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    files = sorted(p for part in ("src", "native") for p in (source / part).rglob("*.[pch]*") if p.is_file())
    state = hashlib.sha256(b"".join(p.read_bytes() for p in files if p.suffix in (".py", ".c", ".h"))).hexdigest()
    if mark.exists() and mark.read_text() == state:
        return python
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(source / PINS)]
    subprocess.run([*pip, str(source)], check=True, env=environment)
    # Again, as the version number does not change with the source.
    subprocess.run([*pip, "--force-reinstall", "--no-deps", str(source)], check=True, env=environment)
    mark.write_text(state)
    return python


def make_versions(folder: Path) -> dict[str, Path]:
    """Check out and install the numba version, install this one; their interpreters."""
    source = folder / "numba"
    if not source.exists():
        git = ["git", "-C", str(ROOT), "worktree", "add", "--force", "--detach"]
        subprocess.run([*git, str(source), NUMBA], check=True)
    found = {"numba": make_version(ROOT / ".venv-numba", source), "now": make_version(ROOT / ".venv-now", ROOT)}
    for system, version in (("numba", "numba"), ("raggedatlas", "now")):
        python = found[version]
        SYSTEMS[system] = Environment(
            python, ("raggedatlas",), ("raggedatlas", "numba", "numpy"), (packages_of(python),)
        )
    return found


def packages_of(python: Path) -> Path:
    """Return the folder that holds the packages of an environment."""
    return next((python.parent.parent / "lib").glob("python*")) / "site-packages"


def drop_compiled(python: Path) -> None:
    """Remove bytecode, and what numba has compiled, from an environment."""
    for path in python.parent.parent.glob("lib/**/__pycache__"):
        shutil.rmtree(path, ignore_errors=True)


def run_commands(versions: Mapping[str, Path], folder: Path, rounds: int) -> Commands:
    """Measure small commands, first without and then with compiled modules; the versions take turns."""
    commands = Commands()
    files = [str(ROOT / "tests/data" / name) for name in CLI_FILES]
    for number in range(rounds):
        for version in sorted(versions, reverse=bool(number % 2)):
            python, atlas = versions[version], folder / "small.atlas"
            warm_up = folder / "warm.atlas"
            for path in (atlas, warm_up):
                remove(path)
                commands.run(version, "", python, ["create", str(path)])
            drop_compiled(python)
            commands.run(version, "first add", python, ["add", str(atlas), files[0]])
            commands.run(version, "", python, ["add", str(warm_up), files[0]])
            for path in (atlas, warm_up):
                commands.run(version, "", python, ["snapshot", str(path)])
            drop_compiled(python)
            commands.run(version, "first query", python, ["query", str(atlas), *CLI_GENES, "-o", f"{folder}/0.h5ad"])
            # Uncounted commands compile the modules again.
            commands.run(version, "", python, ["add", str(warm_up), files[0], "--on-duplicate", "replace"])
            commands.run(version, "", python, ["query", str(warm_up), *CLI_GENES, "-o", f"{folder}/1.h5ad"])
            commands.run(version, "", python, ["ls", str(atlas)])
            commands.run(version, "add", python, ["add", str(atlas), files[1]])
            commands.run(version, "query", python, ["query", str(atlas), *CLI_GENES, "-o", f"{folder}/2.h5ad"])
            commands.run(version, "ls", python, ["ls", str(atlas)])
            for output in folder.glob("?.h5ad"):
                output.unlink()
    return commands


def measurements() -> dict[str, list[Measurement]]:
    """List the measurements of each row: those of the loader benchmark, and the numba version's."""
    known = {m.key: m for m in EVERY}
    for key, source, store in (("numba.512", "packed.512", "numba"), ("numba.standard", "standard.512", "numba-std")):
        known[key] = replace(known[source], key=key, system="numba", store=store)
    return {row: [known[key] for key in keys] for row, keys in PER_MEASURE.items()}


def run_reads_and_adds(run: Run) -> None:
    """Measure `add` and the reads; the order of the systems rotates with the rounds."""
    rows = {row: members for row, members in measurements().items() if row in run.wanted.rows}
    stores = {m.store: m for m in EVERY if m.key.startswith("add.")}
    for ours, other in (("packed", "numba"), ("standard", "numba-std")):
        stores[other] = replace(stores[ours], key=f"add.{other}", store=other, system="numba")
    copies = {m.store: m for m in EVERY if m.key in COPY_KEYS}
    for number in range(run.wanted.rounds):
        for row, members in rows.items():
            first = number % len(members)
            for one in (*members[first:], *members[:first]):
                if row == "add":
                    with new_store(run, one.store) as target:
                        run.take(one, number, target)
                    continue
                if one.store != "union" and not run.store(one.store).exists():
                    make_store(run, one.store, stores, copies)
                run.take(one, number, run.store(one.store))


@contextlib.contextmanager
def new_store(run: Run, name: str) -> Iterator[Path]:
    """Keep the store that the body writes, or remove it where there is one already."""
    final = run.store(name)
    target = final.with_name(f"new-{name}")
    remove(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    yield target
    if target.exists() and not final.exists():
        target.rename(final)
    remove(target)
    os.sync()  # otherwise the kernel writes out during the next measurement


def make_store(run: Run, name: str, stores: Mapping[str, Measurement], copies: Mapping[str, Measurement]) -> None:
    """Write a store that a read needs; nothing of it is counted."""
    source = COPIED_FROM.get(name)
    if source and not run.store(source).exists():
        make_store(run, source, stores, copies)
    with new_store(run, name) as target:
        if source:
            shutil.copytree(run.store(source), target)
        run.take(copies[name] if source else stores[name], 0, target, keep=False)


Number = Callable[[dict[str, Any]], float]


def cpu_rate(figure: dict[str, Any]) -> float:
    """Return the cells for each second of processor time."""
    return float(figure["cells"] / (sum(figure["seconds"]) * figure["extra"]["cores"]))


def cpu_cost(figure: dict[str, Any]) -> float:
    """Return the processor seconds of the process."""
    return float(figure["process_cpu_seconds"])


def paired(run: Run, above: str, below: str, of: Number) -> list[float]:
    """Divide one figure by another within each round."""
    first, second = ({f["round"]: of(f) for f in run.figures.get(key, [])} for key in (above, below))
    return [first[number] / second[number] for number in sorted(first.keys() & second.keys())]


def installed_megabytes(python: Path) -> float:
    """Size of an environment's packages without bytecode, pip and setuptools."""
    left_out = ("pip", "setuptools", "_distutils_hack", "pkg_resources")
    parts = (p for p in packages_of(python).iterdir() if not p.name.startswith(left_out))
    return sum(bytes_without_bytecode(p) for p in parts) / 2**20


def bytes_without_bytecode(path: Path) -> int:
    """Size of a file or folder, bytecode left out."""
    if path.is_file():
        return path.stat().st_size
    cached = sum(bytes_on_disk(folder) for folder in path.rglob("__pycache__"))
    return bytes_on_disk(path) - (bytes_on_disk(path) if path.name == "__pycache__" else cached)


def kernel_lines() -> int:
    """Lines of the C sources that are installed and of the module that declares their functions."""
    files = [*(ROOT / "native").glob("*.[ch]"), ROOT / "src/raggedatlas/store/native.py"]
    return sum(path.read_text().count("\n") for path in files)


def numba_lines(source: Path) -> int:
    """Lines of the modules of the numba version that use numba or LLVM."""
    files = (p for p in (source / "src").rglob("*.py") if p.name != "umap_models.py")
    texts = [path.read_text() for path in files]
    return sum(text.count("\n") for text in texts if "numba" in text or "llvm" in text)


def measures(run: Run, commands: Commands, versions: Mapping[str, Path], source: Path) -> list[Measure]:
    """Collect the lines of the table."""

    def command(name: str, least: float, aim: float) -> Measure:
        values = [commands.seconds.get(f"{version} {name}", []) for version in ("now", "numba")]
        return Measure(f"`{name}`", least, aim, values[0], "s", less=True, numba=values[1])

    def rate(above: str, below: str) -> list[float]:
        return paired(run, above, below, cells_per_second)

    of_numba = rate("packed.512", "numba.512")
    cpu_numba = paired(run, "packed.512", "numba.512", cpu_rate)
    genes = paired(run, "homeobox.genes_csc", "packed.genes_csc", warm_seconds)
    sizes = [[installed_megabytes(versions[name]) / 1024] if versions else [] for name in ("now", "numba")]
    lines = [[kernel_lines()], [numba_lines(source)] if source.exists() else []]
    return [
        replace(command("first add", 2.5, 1.5), name="first `add` without bytecode, processor time"),
        replace(command("first query", 2.0, 1.2), name="first `query` of two genes without bytecode"),
        replace(command("add", 1.6, 1.0), name="warm `add` of the second file"),
        replace(command("query", 1.6, 1.0), name="warm `query` of two genes"),
        replace(command("ls", 0.7, 0.5), name="warm `ls`"),
        Measure("installed packages", 1.0, 0.8, sizes[0], "GiB", less=True, numba=sizes[1]),
        Measure("random batches of 512 vs scipy `X[idx]`, two threads", 0.55, 0.8, rate("packed.512", "scipy.2"),
                numba=rate("numba.512", "scipy.2")),
        Measure("the same by processor time", 0.55, 0.8, paired(run, "packed.512", "scipy.2", cpu_rate),
                numba=paired(run, "numba.512", "scipy.2", cpu_rate)),
        Measure("random batches of 512 vs the numba version", 1.25, 1.8, of_numba),
        Measure("the same by processor time", 1.25, 1.8, cpu_numba),
        Measure("standard codec vs the numba version", 0.8, None, rate("standard.512", "numba.standard")),
        Measure("the same by processor time", 0.8, None, paired(run, "standard.512", "numba.standard", cpu_rate)),
        Measure("`add` from h5ad vs homeobox", 4, 6, paired(run, "add.packed", "add.homeobox", add_rate)),
        Measure("the same by processor time of the process", 4, 6,
                paired(run, "add.homeobox", "add.packed", cpu_cost)),
        Measure("50 genes of all cells with the column-sorted copy vs homeobox", 5, 8, genes),
        Measure("lines of kernels and their declarations", 3_200, 2_500, lines[0], "", less=True, numba=lines[1]),
    ]  # fmt: skip


def page(run: Run, found: Sequence[Measure], loads: Sequence[float]) -> str:
    """Format the conditions, the table and the raw figures."""
    made = run.made
    busy = [figure["others_cores"] for figures in run.figures.values() for figure in figures]
    lines = [
        f"# Kernels, {dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "",
        f"- {machine.cores()} cores ({processor()}), {machine.memory_gib():.0f} GiB; warm page cache; made by "
        "`benchmarks/kernels.py`",
        f"- data: {len(made.files)} datasets, {sum(made.cells):,} cells, {sum(made.nnz):,} non-zeros; small commands: "
        f"`tests/data/{CLI_FILES[0]}`, then `{CLI_FILES[1]}`",
        "- rounds in turns, a fresh process each; ratios within each round, median (range)",
        f"- other processes used {statistics.mean(busy or [0]):.2f} cores on average, at most {max(busy, default=0):.2f}; "
        f"load averages {', '.join(f'{load:.1f}' for load in loads)}",
        f"- numba version: commit {NUMBA}, the same libraries; homeobox: {SYSTEMS['homeobox'].versions()}",
        "",
        "| measure | found | numba version | at least | aim | |",
        "|---|---|---|---|---|---|",
        *("| " + " | ".join(one.cells()) + " |" for one in found),
        "",
        "| row | cells/s, wall | cells/s of processor time |",
        "|---|---|---|",
    ]
    for key in (*PER_MEASURE["random"], *PER_MEASURE["standard"]):
        figures = run.figures.get(key, [])
        rates = [spread([of(f) for f in figures], 0) for of in (cells_per_second, cpu_rate)]
        lines.append(f"| {key} | {' | '.join(rates)} |")
    lines += ["", "| row | seconds | processor seconds of the process |", "|---|---|---|"]
    for key in PER_MEASURE["add"]:
        figures = run.figures.get(key, [])
        seconds = [f["seconds"][0] - f["extra"].get("snapshot_seconds", 0.0) for f in figures]
        lines.append(f"| {key} | {spread(seconds)} | {spread([cpu_cost(f) for f in figures], 2)} |")
    for key in PER_MEASURE["genes_csc"]:
        figures = run.figures.get(key, [])
        lines.append(
            f"| {key} | {spread([warm_seconds(f) for f in figures])} | {spread([cpu_cost(f) for f in figures], 2)} |"
        )
    failed = [f"- {key}: {text}" for key, texts in run.failures.items() for text in dict.fromkeys(texts)]
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else [])]) + "\n"


def main() -> None:
    """Make the environments and the data, measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cells", type=int, default=25_000, help="cells per dataset, of four")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--least", type=float, default=3.0, help="seconds that each random read lasts at least")
    parser.add_argument(
        "--only",
        nargs="*",
        default=[*PER_MEASURE, "commands"],
        help="rows to measure; the figures of the others stay as the last run of the day left them",
    )
    parser.add_argument("--keep", type=Path, default=ROOT / "benchmarks/data/kernels", help="folder of data and stores")
    parser.add_argument("--out", action="store_true", help="write benchmarks/results/<date>-kernels.md and .json")
    asked = parser.parse_args()
    asked.keep.mkdir(parents=True, exist_ok=True)
    target = ROOT / "benchmarks" / ("results" if asked.out else "data") / f"{dt.datetime.now(dt.UTC):%Y-%m-%d}-kernels"
    kept_file = target.with_suffix(".json")
    kept = json.loads(kept_file.read_text()) if kept_file.exists() else {"figures": {}, "commands": {}, "loads": []}
    versions = make_versions(asked.keep)
    kept["loads"].append(os.getloadavg()[0])
    if "commands" in asked.only:
        kept["commands"] = run_commands(versions, asked.keep, asked.rounds).seconds
    made = make(asked.keep / "data", Recipe(cells=asked.cells))
    make_union(asked.keep / "data")
    pace = {"seconds": 4 * asked.least, "least": asked.least}
    rows = frozenset(PER_MEASURE) & frozenset(asked.only)
    run = Run(Wanted(rows, frozenset(SYSTEMS), asked.rounds, pace=pace), made, asked.keep)
    with contextlib.suppress(KeyboardInterrupt):  # stopped early, it still reports
        run_reads_and_adds(run)
    kept["loads"].append(os.getloadavg()[0])
    run.figures = kept["figures"] = kept["figures"] | run.figures  # rows that are not measured now keep their figures
    text = page(run, measures(run, Commands(kept["commands"]), versions, asked.keep / "numba"), kept["loads"])
    print(text)
    target.with_suffix(".md").write_text(text)
    kept_file.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
