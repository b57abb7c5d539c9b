"""Start an epoch and take its batches: the keyed permutation of the loader compared with an array of `numpy.random.Generator.permutation`.

    python benchmarks/order.py [CELLS ...]

Prints processor seconds to start, bytes per cell at the peak of starting, and nanoseconds per row while 400 batches of 512 are taken, best of five.
"""

import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from raggedatlas.loader.order import Order, epoch_batches

BATCH, TAKEN = 512, 400


def keyed(n: int) -> Callable[[int], Any]:
    """Return what takes two batches of an epoch of the loader."""
    batches = epoch_batches(Order(n, BATCH), 1)
    return lambda i: batches.take(np.arange(i, i + 2))


def listed(n: int) -> Callable[[int], Any]:
    """Return what takes two batches of an array of all cells."""
    rows = np.random.default_rng(1).permutation(n)
    return lambda i: rows[i * BATCH : (i + 2) * BATCH].copy()


def measure(n: int, start: Callable[[int], Callable[[int], Any]]) -> tuple[float, float, float]:
    """Return seconds to start, bytes per cell, and nanoseconds per row."""
    tracemalloc.start()
    start(n)
    peak = tracemalloc.get_traced_memory()[1] / n
    tracemalloc.stop()
    times = []
    for _ in range(5):
        before = time.process_time()
        take = start(n)
        started = time.process_time()
        for i in range(0, min(TAKEN, n // BATCH - 1), 2):
            take(i)
        times.append((started - before, (time.process_time() - started) / (min(TAKEN, n // BATCH - 1) * BATCH) * 1e9))
    return min(t[0] for t in times), peak, min(t[1] for t in times)


for n in map(int, sys.argv[1:] or ("1000000", "100000000")):
    for name, start in (("keyed", keyed), ("array", listed)):
        seconds, peak, row = measure(n, start)
        print(f"{n:>12,} cells, {name}: start {seconds:.4f} s, {peak:.2f} bytes a cell, {row:.0f} ns a row")
