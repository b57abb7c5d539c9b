"""Show that adding a file takes a bounded amount of memory, whatever the size of its matrix.

One dataset of n, 4n and 16n cells is made and added, each in a fresh process, and the peak
anonymous memory of that process is printed with the size its matrix would have in memory.

Run ``python benchmarks/memory.py --cells 10000 --factors 1 4 16``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from compare import Campaign, System, child_environment, measure
from maker import Made, Recipe, make

HERE = Path(__file__).resolve().parent


def one_dataset(cells: int, seed: int) -> Recipe:
    """Make the widest of the four datasets alone."""
    return Recipe(cells=cells, seed=seed, genes=(30_000,), library=(5_200.0,))


def matrix_mb(made: Made) -> float:
    """Size of the CSR parts in memory: 4-byte values, 4-byte indices, 8-byte row pointers."""
    return (sum(made.nnz) * 8 + sum(made.cells) * 8) / 2**20


def make_apart(folder: Path, cells: int, seed: int) -> Made:
    """Make the data in a separate process, so that this one stays small."""
    code = (
        "import sys; from pathlib import Path\n"
        "from maker import make; from memory import one_dataset\n"
        "make(Path(sys.argv[1]), one_dataset(int(sys.argv[2]), int(sys.argv[3])))"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(folder), str(cells), str(seed)],
        cwd=HERE,
        env=child_environment(),
        check=True,
    )
    return make(folder, one_dataset(cells, seed))


def main() -> None:
    """Print one Markdown row per file size."""
    parser = argparse.ArgumentParser(description="Peak memory of add for files of growing size.")
    parser.add_argument("--cells", type=int, default=5_000, help="cells of the smallest file")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON line per file instead")
    asked = parser.parse_args()
    ours = System("raggedatlas", Path(sys.executable), HERE / "ours.py")
    if not asked.json:
        print("| cells | matrix in memory, MB | peak anonymous memory, MB | of the matrix | seconds |")
        print("| --- | --- | --- | --- | --- |")
    for factor in asked.factors:
        cells = asked.cells * factor
        with tempfile.TemporaryDirectory(prefix="raggedatlas-memory-") as work:
            folder = Path(work)
            made = make_apart(folder / "data", cells, asked.seed)
            campaign = Campaign(folder / "data", folder, rounds=1, repeats=1)
            outcome = measure(ours, "add", campaign, folder / "atlas")
        if isinstance(outcome, str):
            sys.exit(f"adding {cells:,} cells failed: {outcome}")
        held, peak = matrix_mb(made), outcome["peak_anon_rss_mb"]
        seconds = outcome["seconds"][0]
        if asked.json:
            record = {"cells": cells, "matrix_mb": held, "peak_anon_rss_mb": peak}
            print(json.dumps({**record, "seconds": seconds}), flush=True)
        else:
            print(
                f"| {cells:,} | {held:,.0f} | {peak:,.0f} | {peak / held:.2f} | {seconds:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
