"""Run one sitting of the loader benchmark: stores first, then reads that take turns, round by round."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measuring
from compare import HERE, Campaign, System, measure
from environments import SYSTEMS
from machine import Neighbours, cores
from maker import Made
from measurements import ADDS, COPIES, GENES_CSC, READS, Measurement
from targets import Sitting
from union import UNION

QUERIES = ("add", "add_csc", "cell_type", "genes", "genes_csc")
PACE = ("seconds", "least", "warm")
ONE_DATASET = {"soma", "slaf", "scdl"}
COPIED_FROM = {"packed-csc": "packed", "homeobox-csc": "homeobox"}


@dataclass(frozen=True)
class Wanted:
    """What a sitting is asked for.

    Parameters
    ----------
    rows, systems
        What to measure; systems that are missing here are already left out.
    rounds
        Fresh processes per measurement.
    repeats
        Calls of a query inside its process.
    limit
        Seconds after which a process is given up.
    pace
        ``seconds``, ``least`` and ``warm`` of ``epochs.Pace``.
    """

    rows: frozenset[str]
    systems: frozenset[str]
    rounds: int = 5
    repeats: int = 3
    limit: float = 1_800.0
    pace: Mapping[str, float] = field(default_factory=dict)

    def has(self, measurement: Measurement) -> bool:
        """Whether a measurement is asked for."""
        return measurement.row in self.rows and measurement.system in self.systems


class Run:
    """One sitting: where things lie, and every figure so far."""

    def __init__(self, wanted: Wanted, made: Made, folder: Path) -> None:
        self.wanted = wanted
        self.made = made
        self.folder = folder
        self.figures: dict[str, list[dict[str, Any]]] = {}
        self.failures: dict[str, list[str]] = {}

    def store(self, name: str) -> Path:
        """Return the path of a store."""
        if name == "union":
            return self.folder / "data" / UNION
        return self.folder / "stores" / (f"{name}.csad" if name == "cellstream" else name)

    def take(self, measurement: Measurement, number: int, store: Path, *, keep: bool = True) -> bool:
        """Run one measurement in a separate process; whether it succeeded."""
        environment = SYSTEMS[measurement.system]
        loads = measurement.op not in QUERIES
        # homeobox imports torch wherever it finds it
        path = () if measurement.system == "homeobox" and not loads else environment.path
        system = System(measurement.system, environment.python, HERE / measurement.script, path)
        campaign = Campaign(
            self.folder / "data", self.folder, self.wanted.rounds, self.wanted.repeats, self.wanted.limit
        )
        setting = dict(measurement.setting)
        if loads:
            setting |= {"seed": number, **{k: v for k, v in self.wanted.pace.items() if k in PACE}}
        with Neighbours() as neighbours:
            outcome = measure(system, measurement.op, campaign, store, setting)
        if isinstance(outcome, str):
            self.failures.setdefault(measurement.key, []).append(outcome)
            print(f"  {measurement.key}: failed: {outcome}", flush=True)
            return False
        outcome |= {"round": number, "load_before": neighbours.load_before, "others_cores": neighbours.cores}
        if keep:
            self.figures.setdefault(measurement.key, []).append(outcome)
        print(f"  round {number + 1} {measurement.key}: {brief(outcome)}", flush=True)
        return True

    def sitting(self) -> Sitting:
        """Everything measured so far."""
        return Sitting(self.figures, self.sizes(), cores())

    def sizes(self) -> dict[str, dict[str, float]]:
        """Return the bytes per non-zero of each complete store."""
        found = {}
        for add in (*ADDS, *COPIES):
            path = self.store(add.store)
            if path.exists():
                _, nnz = self.totals().get(add.store, self.totals()[""])
                found[add.store] = {kind: size / nnz for kind, size in array_bytes(path).items()}
        return found

    def totals(self) -> dict[str, tuple[int, int]]:
        """Cells and non-zeros of the stores; the empty name means all stores with all data."""
        one = (self.made.cells[1], self.made.nnz[1])
        return {"": (sum(self.made.cells), sum(self.made.nnz)), **dict.fromkeys(ONE_DATASET, one)}


def brief(outcome: dict[str, Any]) -> str:
    """One figure in a few words."""
    total = sum(outcome["seconds"])
    rate = outcome["cells"] / total if total else 0.0
    return (
        f"{total:.2f} s, {rate:,.0f} cells/s, {outcome['peak_anon_rss_mb']:.0f} MB, "
        f"others {outcome['others_cores']:.2f} cores"
    )


def array_bytes(path: Path) -> dict[str, int]:
    """Bytes on disk of a store by kind of array; a store that is one file is ``whole``.

    ``csc`` is everything of column-sorted copies, ``other`` what is neither indices, values nor row pointers.
    """
    if path.is_file():
        return {"whole": path.stat().st_size}
    sizes: dict[str, int] = {}
    for file in path.rglob("*"):
        if file.is_file():
            kind = _kind(file.relative_to(path).parts)
            sizes[kind] = sizes.get(kind, 0) + file.stat().st_size
    if not sizes.get("indices"):
        return {"whole": sum(sizes.values())}
    return sizes


def _kind(parts: Sequence[str]) -> str:
    folders = parts[:-1]
    if "csc" in folders:
        return "csc"
    matrix = "csr" in folders or "X" in folders  # obs and var hold arrays of these names too
    for name, kind in {"indices": "indices", "layers": "values", "data": "values", "indptr": "indptr"}.items():
        if matrix and name in folders:
            return kind
    return "other"


def run_all(run: Run) -> None:
    """Write the stores, then read them."""
    run_adds(run)
    run_copies(run)
    run_reads(run)


def run_adds(run: Run) -> None:
    """Write every store that is needed and missing, and measure adding where that is asked for."""
    asked = [m for m in ADDS if run.wanted.has(m)]
    needed = {COPIED_FROM.get(m.store, m.store) for m in READS if run.wanted.has(m)}
    for number in range(run.wanted.rounds if asked else 0):
        for add in _turns(asked, number):
            if number == 0 or not add.once:
                _add(run, add, number, keep=True)
    for add in ADDS:
        if add.store in needed and add.system in run.wanted.systems and not run.store(add.store).exists():
            _add(run, add, 0, keep=False)


def _add(run: Run, add: Measurement, number: int, *, keep: bool) -> None:
    final = run.store(add.store)
    target = final.with_name("new-" + final.name)
    remove(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    if run.take(add, number, target, keep=keep) and not final.exists():
        target.rename(final)
    remove(target)
    os.sync()  # else the kernel writes out during the next measurement


def run_copies(run: Run) -> None:
    """Write the column-sorted copies, each next to the arrays of a copied store."""
    wanted = {m.store for m in GENES_CSC if run.wanted.has(m)}
    for copy in COPIES:
        target = run.store(copy.store)
        source = run.store(COPIED_FROM[copy.store])
        if copy.store not in wanted or target.exists() or not source.exists():
            continue
        part = target.with_name("new-" + target.name)
        remove(part)
        shutil.copytree(source, part)
        if run.take(copy, 0, part):
            part.rename(target)
        remove(part)
        os.sync()


def run_reads(run: Run) -> None:
    """Measure every read; the systems of a row take turns, and who begins changes with the round."""
    asked = [m for m in READS if run.wanted.has(m) and run.store(m.store).exists()]
    for number in range(run.wanted.rounds):
        for row in dict.fromkeys(m.row for m in asked):
            for measurement in _turns([m for m in asked if m.row == row], number):
                if number == 0 or not measurement.once:
                    run.take(measurement, number, run.store(measurement.store))


def _turns(measurements: Sequence[Measurement], number: int) -> list[Measurement]:
    """Begin with another one in every round."""
    if not measurements:
        return []
    first = number * 3 % len(measurements)
    return [*measurements[first:], *measurements[:first]]


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def as_json(run: Run, extra: Mapping[str, Any]) -> str:
    """Everything of a sitting, for the plot and for later."""
    manifest = measuring.manifest(run.folder / "data")
    kept = {"figures": run.figures, "failures": run.failures, "sizes": run.sizes(), "data": manifest}
    return json.dumps({**extra, **kept}, indent=1)
