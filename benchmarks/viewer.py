"""Measure the viewer's page on many cells in a headless Chromium: opening, memory, frames while it moves, colours, selecting.

    python benchmarks/viewer.py                # 1,000,000 cells in 30 types
    python benchmarks/viewer.py --cells 100000 --out

Chromium draws with its software renderer here, on the processor: a graphics card is faster by far. Every pointer event is sent by
the DevTools protocol, 16 ms after the one before was answered. Prints a page in Markdown.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from machine import cores

from raggedatlas.wings.viewer.page import write_page
from raggedatlas.wings.viewer.scene import make_scene

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from browser import Browser, find_browser

TYPES = 30
PAUSE = 0.016
STEPS = 60
BEGIN = """(() => {
    window.times = [];
    window.stop = viewer.app.plot.scatter.subscribe('draw', () => window.times.push(performance.now()));
})()"""
END = "viewer.app.plot.scatter.unsubscribe(window.stop)"
ACTS = {
    "colour by a number": "viewer.colorBy('n_counts')",
    "colour by a gene": "viewer.colorByGene('LYZ')",
    "colour by type": "viewer.colorBy('cell_type')",
    "lasso": "viewer.lasso([[-3, -3], [3, -3], [3, 3], [-3, 3]]).length",
    "select a type and zoom to it": "viewer.choose('type 7')",
}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cells", type=int, default=1_000_000)
    parser.add_argument("--out", action="store_true", help="keep benchmarks/results/<date>-viewer.md")
    asked = parser.parse_args()
    program = find_browser()
    if program is None:
        sys.exit("No Chromium is installed; set CHROMIUM or install the package chromium.")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="viewer-") as folder:
        start = time.perf_counter()
        path = make_page(Path(folder), asked.cells)
        rows = [("write the page, s", time.perf_counter() - start), ("its size, MB", path.stat().st_size / 1e6)]
        with Browser(program, width=1280, height=800) as browser:
            rows += measure(browser, path)
    text = page(asked.cells, rows, version(program), load)
    print(text)
    if asked.out:
        (Path(__file__).parent / "results" / f"{date.today()}-viewer.md").write_text(text + "\n")


def make_page(folder: Path, n: int) -> Path:
    """Write a page of cells in clusters, with a category, a number and a gene."""
    rng = np.random.default_rng(1)
    kind = rng.integers(0, TYPES, n)
    spread = rng.uniform(0.3, 1.2, TYPES)[kind][:, None]
    places = rng.normal(size=(TYPES, 2))[kind] * 6 + rng.normal(size=(n, 2)) * spread
    ids = pa.array([f"{i:016x}" for i in range(n)])
    names = pa.array([f"type {i}" for i in range(TYPES)])
    obs = pa.table({"uid": ids, "cell_type": names.take(pa.array(kind)), "n_counts": rng.lognormal(8, 0.5, n)})
    scene = make_scene(ids, places, obs, genes={"LYZ": rng.poisson(1, n)})
    return write_page(scene, folder / "cells.html", genes=["LYZ"])


def measure(browser: Browser, path: Path) -> list[tuple[str, float]]:
    """Open the page and use it."""
    start = time.perf_counter()
    browser.open(path.as_uri())
    rows = [("from opening to drawn, s", time.perf_counter() - start)]
    browser.run("viewer.drawn()")
    rows += [("values in JavaScript, MB", browser.run("performance.memory.usedJSHeapSize") / 1e6)]
    rows += [
        ("the page's process, MB", memory(browser, "renderer")),
        ("the drawing process, MB", memory(browser, "gpu")),
    ]
    rows.append(("all points once, ms", browser.run("viewer.drawn().then(() => viewer.app.plot.detail.cost)")))
    rows.append(("of which every so manyth is drawn while it moves", browser.run("viewer.app.plot.detail.step")))
    for name, act in {"moving": move, "zooming": zoom, "pointing": point}.items():
        rows += frames(browser, name, act)
    for name, script in ACTS.items():
        start = time.perf_counter()
        browser.run(f"Promise.resolve({script}).then(() => viewer.drawn()).then(() => 0)")
        rows.append((f"{name}, s", time.perf_counter() - start))
    return rows


def frames(browser: Browser, name: str, act: Callable[[Browser], None]) -> list[tuple[str, float]]:
    """Time between frames while something is done."""
    browser.run(BEGIN)
    start = time.perf_counter()
    act(browser)
    took = (time.perf_counter() - start) / STEPS * 1e3
    between = np.diff(browser.run("window.times"))
    browser.run(END)
    browser.run("new Promise(r => setTimeout(r, 1500))")
    rows = [(f"{name}: from event to event, ms", took)]
    if len(between):
        rows += [(f"{name}: between frames, median ms", float(np.median(between)))]
        rows += [(f"{name}: between frames, 95 of 100 below, ms", float(np.percentile(between, 95)))]
    return [*rows, (f"{name}: frames", float(len(between) + 1 if len(between) else 0))]


def pointer(browser: Browser, kind: str, x: float, y: float, **more: Any) -> None:
    """Send one event of the pointer."""
    browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
    time.sleep(PAUSE)


def move(browser: Browser) -> None:
    """Drag the map in a circle."""
    pressed = {"button": "left", "buttons": 1, "clickCount": 1}
    pointer(browser, "mousePressed", 400, 400, **pressed)
    for i in range(STEPS):
        pointer(browser, "mouseMoved", 400 + 100 * np.sin(i / 10), 400 + 80 * np.cos(i / 10), **pressed)
    pointer(browser, "mouseReleased", 400, 400, **pressed)


def zoom(browser: Browser) -> None:
    """Turn the wheel to and fro."""
    for i in range(STEPS):
        pointer(browser, "mouseWheel", 450, 400, deltaX=0, deltaY=-60 if i < STEPS / 2 else 60)


def point(browser: Browser) -> None:
    """Pass over cells."""
    for i in range(STEPS):
        pointer(browser, "mouseMoved", 300 + 4 * i, 400, button="none")


def memory(browser: Browser, kind: str) -> float:
    """Resident memory of Chromium's processes of one kind."""
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid,rss,args", "--no-headers"], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 3) for line in listed.stdout.splitlines()]
    below, total = {os.getpid()}, 0.0
    for pid, parent, size, line in sorted(rows, key=lambda row: int(row[0])):
        if int(parent) in below:
            below.add(int(pid))
            total += int(size) / 1024 if f"--type={kind}" in line else 0
    return total


def version(program: str) -> str:
    """Ask Chromium."""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def page(n: int, rows: list[tuple[str, float]], browser: str, load: float) -> str:
    """Everything as Markdown."""
    return "\n".join([
        f"# The viewer's page on {n:,} cells, {date.today()}",
        "",
        f"{browser}, headless, 1280 x 800, drawn by its software renderer on {cores()} cores (load of others before: {load:.1f});",
        f"{TYPES} clusters, one category, one number, one gene.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value:,.3g} |" for name, value in rows),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
