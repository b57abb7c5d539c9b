"""Measure geometry against zarr-vectors 0.9.2 and Parquet (pyarrow), in one run.

    python benchmarks/vectors.py                    # 1,000,000 points, 20,000 streamlines, 2,000 meshes
    python benchmarks/vectors.py --scale 0.02 --rounds 1

Needs zarr-vectors' environment (benchmarks/peers.sh vectors); without it only the others are measured. Each figure is from a process of
its own, systems take turns, and figures are processor milliseconds, the best of the rounds. Prints a page in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare import child_environment, row
from environments import ROOT, Environment
from machine import Neighbours, cores

HERE = Path(__file__).parent
OURS, THEIRS, PARQUET = "raggedatlas", "zarr-vectors", "parquet"
SYSTEMS = {
    OURS: Environment(Path(sys.executable), ("raggedatlas",), ("raggedatlas", "numpy")),
    THEIRS: Environment(
        ROOT / ".venv-peers-vectors-0.9/bin/python",
        ("zarr_vectors",),
        ("zarr-vectors", "zarr", "numpy"),
        group="vectors",
    ),
    PARQUET: Environment(Path(sys.executable), ("pyarrow",), ("pyarrow",)),
}
WHAT = {"points": (1_000_000, (OURS, THEIRS, PARQUET)), "streamlines": (20_000, (OURS, THEIRS)), "meshes": (2_000, (OURS, THEIRS))}  # fmt: skip
Figures = dict[tuple[str, str], dict[str, Any]]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vectors-") as folder, Neighbours() as neighbours:
        figures = sit(Path(folder), asked.scale, asked.rounds)
    print(page(figures, asked.scale))
    print(f"\n{cores()} cores; others used {neighbours.cores:.2f} of them.")
    if asked.json:
        asked.json.write_text(json.dumps({"/".join(key): value for key, value in figures.items()}, indent=1))


def sit(folder: Path, scale: float, rounds: int) -> Figures:
    """Take every figure; systems take turns, and of the rounds the best is kept."""
    figures: Figures = {}
    there = {name for name, system in SYSTEMS.items() if not told(name, system.why_missing(name))}
    for turn in range(rounds):
        for what, (n, systems) in WHAT.items():
            for name in systems if turn % 2 == 0 else reversed(systems):
                if name in there:
                    found = run(name, what, folder / f"{name}-{what}", int(n * scale))
                    figures[name, what] = merged(figures.get((name, what), {}), found)
                    print(f"{what} {name}: {found}", file=sys.stderr, flush=True)
    return figures


def told(name: str, reason: str) -> str:
    """Tell why a system is left out."""
    print(f"{name} is left out: {reason}" if reason else f"{name}: {SYSTEMS[name].versions()}", file=sys.stderr)
    return reason


def merged(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Keep the smaller of two times; what is no time is the same in both."""
    numbers = {key: min(value, before.get(key, value)) for key, value in found.items() if isinstance(value, float)}
    return {**before, **found, **numbers}


def run(name: str, what: str, place: Path, n: int) -> dict[str, Any]:
    """One process; an empty answer where it failed."""
    system = SYSTEMS[name]
    command = [str(system.python), "-W", "ignore", str(HERE / "vectors_worker.py"), name, what, str(place), str(n)]
    done = subprocess.run(
        command, env=child_environment(HERE, *system.path), capture_output=True, text=True, check=False
    )
    shutil.rmtree(place, ignore_errors=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return {}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    os.sync()  # else the kernel writes out during the next measurement
    return answer


def value(figures: Figures, name: str, what: str, key: str) -> float | None:
    """One figure, or None."""
    found = figures.get((name, what), {}).get(key)
    return None if found is None else float(found)


def ratio(what: str, key: str, peer: str = THEIRS) -> Callable[[Figures], float | None]:
    """How many times less we need than a peer."""

    def of(figures: Figures) -> float | None:
        ours, theirs = value(figures, OURS, what, key), value(figures, peer, what, key)
        return None if not ours or theirs is None else theirs / ours

    return of


def own(what: str, key: str) -> Callable[[Figures], float | None]:
    """Our figure."""
    return lambda figures: value(figures, OURS, what, key)


TARGETS: list[tuple[str, str, Callable[[Figures], float | None], float, float | None, bool]] = [
    ("write points with an attribute, times zarr-vectors", "x", ratio("points", "write"), 5, 8, False),
    ("the same, CPU", "ms", own("points", "write"), 200, None, True),
    ("box of 100, times zarr-vectors", "x", ratio("points", "box"), 5, None, False),
    ("the same", "ms", own("points", "box"), 1, None, True),
    ("the same, times Parquet", "x", ratio("points", "box", PARQUET), 1, None, False),
    ("box of 500, times zarr-vectors", "x", ratio("points", "large"), 4, None, False),
    ("one streamline by id, times zarr-vectors", "x", ratio("streamlines", "one"), 20, None, False),
    ("the same", "ms", own("streamlines", "one"), 0.4, None, True),
    ("streamlines in a box of 100, times zarr-vectors", "x", ratio("streamlines", "box"), 30, None, False),
    ("write streamlines, times zarr-vectors", "x", ratio("streamlines", "write"), 20, None, False),
    ("one mesh by id (zarr-vectors refuses)", "ms", own("meshes", "one"), 2, None, True),
    ("4,096 fragments decoded, times zarr-vectors", "x", ratio("points", "decode"), 100, None, False),
    ("bytes on disk of points, zarr-vectors' over ours", "x", ratio("points", "disk"), 1, None, False),
    ("the same, lengths of files", "x", ratio("points", "bytes"), 1, None, False),
    ("bytes on disk of streamlines, zarr-vectors' over ours", "x", ratio("streamlines", "disk"), 1, None, False),
    ("the same, lengths of files", "x", ratio("streamlines", "bytes"), 1, None, False),
    ("bytes on disk of meshes, zarr-vectors' over ours", "x", ratio("meshes", "disk"), 1, None, False),
    ("the same, lengths of files", "x", ratio("meshes", "bytes"), 1, None, False),
    ("bytes on disk of mesh links, zarr-vectors' over ours", "x", ratio("meshes", "links_disk"), 3, None, False),
    ("the same, lengths of files", "x", ratio("meshes", "links"), 3, None, False),
]

ROWS = [
    ("points", "write", "write, ms"),
    ("points", "box", "box of 100, ms"),
    ("points", "opened", "open and box of 100, ms"),
    ("points", "large", "box of 500, ms"),
    ("points", "decode", "4,096 fragments, ms"),
    ("points", "bytes", "bytes, lengths of files"),
    ("points", "disk", "bytes on disk, in blocks"),
    ("points", "files", "files"),
    ("streamlines", "write", "write, ms"),
    ("streamlines", "one", "one by id, ms"),
    ("streamlines", "box", "box of 100, ms"),
    ("streamlines", "box10", "box of 10, ms"),
    ("streamlines", "bytes", "bytes, lengths of files"),
    ("streamlines", "disk", "bytes on disk, in blocks"),
    ("streamlines", "files", "files"),
    ("meshes", "write", "write, ms"),
    ("meshes", "one", "one by id, ms"),
    ("meshes", "bytes", "bytes, lengths of files"),
    ("meshes", "disk", "bytes on disk, in blocks"),
    ("meshes", "links", "bytes of links"),
]


def goals(figures: Figures) -> list[str]:
    """Every goal with its figure and whether it is reached."""
    lines = [row(["goal", "figure", "asked", ""]), row(["---"] * 4)]
    for title, unit, of, least, aim, less in TARGETS:
        found = of(figures)
        asked = f"{'at most' if less else 'at least'} {least:g} {unit}"
        shown = "" if found is None else f"{found:,.3g} {unit}"
        lines.append(row([title, shown, asked, verdict(found, least, aim, less=less)]))
    return lines


def verdict(found: float | None, least: float, aim: float | None, *, less: bool) -> str:
    """Return a figure against its target, in words."""
    if found is None:
        return "not measured"
    if found > least if less else found < least:
        return "NOT REACHED"
    return "reached" if aim is None or found < aim else "reached, and the aim"


def page(figures: Figures, scale: float) -> str:
    """Everything as Markdown."""
    sizes = ", ".join(f"{int(n * scale):,} {what}" for what, (n, _) in WHAT.items())
    lines = ["# Geometry", "", f"{sizes}; chunks of 100 in a cube of 1,000. CPU, best of some rounds.", ""]
    lines += [*goals(figures), "", row(["", "", OURS, "zarr-vectors 0.9.2", "Parquet"]), row(["---"] * 5)]
    for what, key, title in ROWS:
        cells = [value(figures, name, what, key) for name in (OURS, THEIRS, PARQUET)]
        shown = ["" if cell is None else f"{cell:,.0f}" if cell >= 1000 else f"{cell:,.3g}" for cell in cells]
        lines.append(row([what, title, *shown]))
    said = {
        name: figures[name, what]["answer"]
        for name, what in figures
        if what == "streamlines" and "answer" in figures[name, what]
    }
    lines += ["", f"Points in the first box agree: {_agree(figures)}. Streamlines found in the first box: {said}."]
    return "\n".join(lines)


def _agree(figures: Figures) -> str:
    answers = {tuple(found["answer"]) for (_, what), found in figures.items() if what == "points" and "answer" in found}
    return "yes" if len(answers) == 1 else f"NO, {sorted(answers)}"


if __name__ == "__main__":
    main()
