"""Measure writing Zarr 3, Zarr 2 and h5ad against anndata, in one run, and write a page.

Every operation runs in a fresh process; all take turns, and who goes first changes with every round. What is compared is
processor time, which neighbours on the machine disturb less than the clock. ``python benchmarks/zarr_writing.py --out`` keeps
the page in ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import datetime as dt
import statistics
import sys
from pathlib import Path
from typing import Any

from anndata_io import OURS, PACKAGES, SCRIPTS, THEIRS, Measurement, Sitting, memory, prepare, take, wall, warm
from compare import HERE, Campaign, System, row, spread, versions
from machine import Neighbours, described

FORMATS: dict[str, dict[str, Any]] = {
    "Zarr 3": {"zarr_format": 3},
    "Zarr 2": {"zarr_format": 2},
    "h5ad, gzip": {"compression": "gzip"},
    "h5ad, uncompressed": {"compression": None},
}
"""What is written -> settings of each system; Zarr is compressed as each does by default."""

WAYS = {"from memory": {OURS: "memory", THEIRS: "write"}, "from a file": {OURS: "copy", THEIRS: "copy"}}
"""Where it comes from -> the operation of each system."""

COMPARED = [
    Measurement(f"{name} {way}", system, op, setting)
    for way, ops in WAYS.items()
    for name, setting in FORMATS.items()
    for system, op in ops.items()
] + [Measurement(f"{name} from an atlas", OURS, "write", setting) for name, setting in FORMATS.items()]


def sit(size: float, rounds: int, repeats: int, work: Path) -> Sitting:
    """Make what is missing, and measure everything, taking turns."""
    sitting = Sitting()
    systems = {name: System(name, Path(sys.executable), script) for name, script in SCRIPTS.items()}
    campaign = Campaign(work / f"{size:g}", work, rounds, repeats)
    with Neighbours() as others:
        prepare(systems, campaign, size)
        warm(campaign.data)
        for number in range(rounds):
            for measurement in COMPARED if number % 2 == 0 else COMPARED[::-1]:
                take(sitting, systems[measurement.system], measurement, campaign, size)
    sitting.other_cores = others.cores
    return sitting


def processor(figure: dict[str, Any]) -> float:
    """Processor seconds of the best repeat of a process."""
    return float(min(figure["cpu_seconds"]))


def megabytes(figure: dict[str, Any]) -> float:
    """Size of what was written, in MB (1,000,000 bytes)."""
    return float(figure["extra"]["bytes"]) / 1e6


def table(sitting: Sitting, size: float) -> list[str]:
    """Every measurement."""
    heads = ["what is written", "system", "processor s", "seconds", "file MB", "anonymous MB"]
    rows = [row(heads), row(["---"] * len(heads))]
    for measurement in COMPARED:
        shown = [(processor, 2), (wall, 2), (megabytes, 0), (memory, 0)]
        figures = [spread(sitting.of(size, measurement, what), digits) for what, digits in shown]
        rows.append(row([measurement.label, measurement.system, *figures]))
    return rows


def ratios(sitting: Sitting, size: float) -> list[str]:
    """Processor time and size of Zarr against h5ad with gzip, both ours, and against anndata's."""
    heads = ["ours", "processor time / our h5ad", "size / our h5ad", "processor time / anndata's", "size / anndata's"]
    rows = [row(heads), row(["---"] * len(heads))]
    known = {(m.label, m.system): m for m in COMPARED}
    for way in (*WAYS, "from an atlas"):
        for name in FORMATS:
            ours = known[f"{name} {way}", OURS]
            base, theirs = known[f"h5ad, gzip {way}", OURS], known.get((f"{name} {way}", THEIRS))
            cells = []
            for other in (base, theirs):
                cells += [
                    "-" if other is None else quotient(sitting, size, ours, other, what)
                    for what in (processor, megabytes)
                ]
            rows.append(row([ours.label, *cells]))
    return rows


def quotient(sitting: Sitting, size: float, ours: Measurement, other: Measurement, what: Any) -> str:
    """Our median by another's."""
    values = [sitting.of(size, m, what) for m in (ours, other)]
    return f"{statistics.median(values[0]) / statistics.median(values[1]):.2f}" if all(values) else "not measured"


def page(sitting: Sitting, size: float, rounds: int, repeats: int) -> str:
    """The page."""
    machine = ", ".join(f"{name} {value}" for name, value in described().items())
    heading = [
        "# Writing Zarr compared with h5ad and anndata",
        "",
        f"{machine}; other processes used {sitting.other_cores:.1f} cores meanwhile. {versions(Path(sys.executable), (*PACKAGES, 'zarr', 'numcodecs'))}.",
        f"{rounds} rounds at {size:g} GB of values and indices (float32 counts, int32 indices), {repeats} writes a process, of which the best",
        "counts; medians, with the range of the rounds in brackets. Zarr is compressed as each system does by default. anndata's h5ad from",
        "memory is what it holds already; from a file it is read whole. Ours waits until an h5ad is on the disk, anndata does not; nobody",
        "waits for Zarr. Where other processes used cores, seconds by the clock say little, and processor time is what to compare.",
    ]
    parts = [heading, ratios(sitting, size), table(sitting, size)]
    parts += [["Failed:", *(f"- {text}" for text in sitting.failures)]] if sitting.failures else []
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def main() -> None:
    """Parse, measure, print the page, and keep it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=0.25, help="GB of values and indices")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--work", type=Path, default=HERE / "data" / "anndata-io", help="where files are made and kept")
    parser.add_argument("--out", action="store_true", help="keep the page in benchmarks/results")
    asked = parser.parse_args()
    text = page(
        sit(asked.size, asked.rounds, asked.repeats, asked.work.resolve()), asked.size, asked.rounds, asked.repeats
    )
    print(text)
    folder = HERE / "results" if asked.out else asked.work
    (folder / f"{dt.datetime.now(dt.UTC).date()}-zarr_writing.md").write_text(text)


if __name__ == "__main__":
    main()
