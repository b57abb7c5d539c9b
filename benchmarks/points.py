"""Memory and time of adding transcripts from Parquet, with their counts: python benchmarks/points.py [N ...]

Each size runs in a process of its own, which reports its peak of anonymous memory: arrays in temporary files belong to the page cache.
Run with TMPDIR on a disk.
"""

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

N_GENES = 480
POINTS_PER_CELL = 100
PART = 2**20


def write_points(path: Path, n_points: int) -> None:
    """Write transcripts as Xenium does: text ids of cells, a tenth of the points without one."""
    rng = np.random.default_rng(0)
    n_cells = max(1, n_points // POINTS_PER_CELL)
    side = n_cells**0.5 * 10
    genes = np.array([f"GENE{i}" for i in range(N_GENES)])
    writer = None
    for start in range(0, n_points, PART):
        n = min(PART, n_points - start)
        cell = rng.integers(0, n_cells, n)
        middle = np.stack([cell % int(n_cells**0.5 + 1), cell // int(n_cells**0.5 + 1)], axis=1) * 10.0
        places = (middle + rng.normal(0, 3, (n, 2))).clip(0, side).astype(np.float32)
        names = np.char.add("cell-", cell.astype(str))
        names[rng.random(n) < 0.1] = "UNASSIGNED"
        columns = {"x_location": places[:, 0], "y_location": places[:, 1], "z_location": rng.random(n, np.float32)}
        columns |= {
            "cell_id": names,
            "feature_name": genes[rng.integers(0, N_GENES, n)],
            "qv": rng.random(n, np.float32),
        }
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def measure(path: Path) -> None:
    """Add the points, and print seconds, peak of anonymous memory, and what was added."""
    import raggedatlas as ra

    peak, done = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak.append(max(peak.pop(), anonymous_bytes()))

    atlas = ra.RaggedAtlas.create(str(path.parent / "spots.atlas"))
    first = anonymous_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    report = atlas.add(
        path,
        space="transcripts",
        counts=True,
        cells="cell_id",
        genes="feature_name",
        unassigned="UNASSIGNED",
        progress=False,
    )
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    print(f"{seconds:8.1f} s  {(peak[0] - first) / 2**20:8.0f} MiB above {first / 2**20:.0f}  {report.n_cells:,} cells")


def main(sizes: list[int]) -> None:
    """Measure every size."""
    for n_points in sizes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "transcripts.parquet"
            write_points(path, n_points)
            print(f"{n_points:>12,} points, {path.stat().st_size / 2**20:.0f} MiB", end=" ", flush=True)
            subprocess.run([sys.executable, __file__, "--measure", str(path)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]))
    else:
        main([int(size) for size in sys.argv[1:]] or [1_000_000, 5_000_000])
