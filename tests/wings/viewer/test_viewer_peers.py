"""Embedding Atlas and Vitessce open what is written for them: every cell at its place, in the colour of its metadata.

Asked for by ``-m peers``; needs a Chromium and the environment that ``benchmarks/peers.sh viewers`` makes.
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from browser import Browser, find_browser
from raggedatlas.wings.viewer.exports import CONFIG
from raggedatlas.wings.viewer.scene import Look, Scene, make_scene
from raggedatlas.wings.viewer.verbs import visualize

ROOT = Path(__file__).parents[3]
VENV = ROOT / ".venv-peers-viewers"
VITESSCE = VENV / "vitessce"
WEBGL = VENV / "embedding-atlas-0.22.0"
PAGE = '<!doctype html><meta charset="utf-8"><div id="root"></div><script type="module" src="built/main.js"></script>'
COLORS = {"left": "#ff0000", "middle": "#00ff00", "right": "#0000ff"}
N = 300

pytestmark = [
    pytest.mark.peers,
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (VENV / "bin" / "python").exists(),
        reason="Embedding Atlas is not installed; benchmarks/peers.sh viewers installs it",
    ),
    pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed"),
]
needs_vitessce = pytest.mark.skipif(
    not (VITESSCE / "made-of.txt").exists(), reason="Vitessce is not built; benchmarks/peers.sh viewers builds it"
)


@pytest.fixture(scope="module")
def scene() -> Scene:
    """Three clouds side by side, each of a kind; a gene that only the last has; numbers and missing values beside."""
    rng = np.random.default_rng(5)
    kind = np.repeat(list(COLORS), N // 3)
    places = rng.uniform(-1, 1, (N, 2)) + np.column_stack([np.repeat([-6, 0, 6], N // 3), np.zeros(N)])
    ids = pa.array([f"{i:016x}" for i in range(N)])
    obs = pa.table(
        {
            "uid": ids,
            "batch/no": pa.array([None if i % 3 == 0 else f"batch {i % 3}" for i in range(N)]),
            "kind": pa.array(kind),
            "score": rng.normal(size=N),
        }
    ).take(rng.permutation(N))
    genes = {"MS4A1": np.where(kind == "right", 9, 0), "LYZ": rng.poisson(2, N)}
    return make_scene(ids, places, obs, genes=genes, look=Look(title="Clouds", color="kind", colors={"kind": COLORS}))


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A browser for one test."""
    program = find_browser()
    assert program is not None
    with Browser(program, width=1200, height=760) as opened:
        yield opened


class Shared(SimpleHTTPRequestHandler):
    """Files that pages of other hosts may read, as Vitessce asks."""

    def end_headers(self) -> None:
        self.send_header("Access-Control-Allow-Origin", "*")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Shared, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def embedding_atlas(file: Path, old: bool) -> Iterator[str]:
    """Run its command on a file as the documentation says, and wait until it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"PYTHONPATH": str(WEBGL)} if old else {}
    told = [str(file), "--x", "x", "--y", "y", "--disable-projection", "--host", "127.0.0.1", "--port", str(port)]
    command = [str(VENV / "bin" / "python"), "-W", "ignore", "-m", "embedding_atlas.cli", *told]
    with (file.parent / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=file.parent)
    try:
        end = time.monotonic() + 120
        while not answers(f"http://127.0.0.1:{port}/"):
            said = (file.parent / "log.txt").read_text()
            assert process.poll() is None, said[-2000:]
            assert time.monotonic() < end, said[-2000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def answers(address: str) -> bool:
    """Tell whether something is served there."""
    try:
        with urlopen(address, timeout=10):
            return True
    except (URLError, ConnectionError, TimeoutError):
        return False


def look(browser: Browser, path: Path, box: tuple[int, int, int, int]) -> NDArray[np.int64]:
    """Take a picture, and give the pixels of a box: left, top, right, bottom."""
    image = pytest.importorskip("PIL.Image")
    left, top, right, bottom = box
    return np.asarray(image.open(browser.picture(path)).convert("RGB"), dtype=np.int64)[top:bottom, left:right]


def strangers(browser: Browser) -> set[str]:
    """Give the addresses that are not of this machine."""
    own = ("http://127.0.0.1:", "data:", "blob:", "about:")
    return {address for address in browser.requests if not address.startswith(own)}


def rgb(color: str) -> list[int]:
    """Read ``#rrggbb``."""
    return list(bytes.fromhex(color[1:]))


def spans(drawn: NDArray[np.int64], kinds: list[NDArray[np.bool_]]) -> list[tuple[int, int]]:
    """Give the columns of pixels from which to which each kind of pixel is found; none where there are few."""
    found = [np.nonzero(kind)[1] for kind in kinds]
    return [(int(x.min()), int(x.max())) for x in found if len(x) > 50]


def settled(browser: Browser, path: Path, box: tuple[int, int, int, int]) -> NDArray[np.int64]:
    """Take pictures until two are alike: both programs draw some time after they have read."""
    before = look(browser, path, box)
    for _ in range(20):
        browser.run("new Promise(r => setTimeout(r, 1500))")
        drawn = look(browser, path, box)
        if np.array_equal(before, drawn):
            return drawn
        before = drawn
    raise AssertionError(f"The picture does not come to rest; the last is {path}.")


MAP = (25, 110, 775, 675)


@needs_vitessce
@pytest.mark.parametrize("genes", [["LYZ", "MS4A1"], []])
def test_vitessce_shows_cells_in_their_colours(
    scene: Scene, browser: Browser, tmp_path: Path, genes: list[str]
) -> None:
    """Served elsewhere than the program, as for vitessce.io: kinds side by side in the colours given for them, then a gene."""
    (tmp_path / "page.html").write_text(PAGE)
    (tmp_path / "built").symlink_to(VITESSCE / "built")
    folder = tmp_path / "cells.vitessce"
    folder.mkdir()
    browser.call("Network.setBlockedURLs", urls=["*vitessce.io*"])  # its own list of genes, which it does without
    with served(tmp_path) as program, served(tmp_path) as address:
        there = replace(scene, look=replace(scene.look, address=f"{address}/{folder.name}"))
        visualize(there, path=folder, genes=genes, overwrite=True)
        browser.go(f"{program}/page.html?config={address}/{folder.name}/{CONFIG}")
        browser.wait(f"document.body?.innerText.includes('{N} cells') && !document.body.innerText.includes('Loading')")
        assert {"kind", "batch/no", *genes} <= set(browser.run("document.body.innerText").split("\n"))
        drawn = settled(browser, tmp_path / "kinds.png", MAP)
        kinds = [(drawn == rgb(color)).all(axis=2) for color in COLORS.values()]
        found = spans(drawn, kinds)
        assert len(found) == len(COLORS)
        assert all(a < b for (_, a), (b, _) in pairwise(found))
        if genes:
            browser.run("[...document.querySelectorAll('*')].findLast(e => e.textContent === 'MS4A1').click()")
            browser.wait("!document.body.innerText.includes('Loading')")
            drawn = settled(browser, tmp_path / "gene.png", MAP)
            without, within = ({tuple(one) for one in drawn[kinds[i]].tolist()} for i in (0, 2))
            assert not without & within
            assert tuple(rgb(COLORS["right"])) not in within
        assert strangers(browser) <= {"https://data-1.vitessce.io/genes_filtered.json"}


CHOOSE = """(() => {
    for (const list of document.querySelectorAll('select')) {
        const wanted = [...list.options].find(o => o.text.startsWith('kind'))
        if (wanted) {
            list.value = wanted.value
            list.dispatchEvent(new Event('change', { bubbles: true }))
            return true
        }
    }
    return false
})()"""


@pytest.mark.skipif(not WEBGL.exists(), reason="release 0.22 is not there; benchmarks/peers.sh viewers installs it")
def test_embedding_atlas_draws_cells_in_the_colours_of_a_column(scene: Scene, browser: Browser, tmp_path: Path) -> None:
    """Release 0.22, the last that draws by WebGL: all points, and once coloured by kind a cloud of each in a colour of its own."""
    with embedding_atlas(visualize(scene, path=tmp_path / "cells.parquet", genes=["MS4A1"]), old=True) as address:
        browser.go(address)
        browser.wait(f"document.body?.innerText.includes('{N} / {N} points')")
        browser.wait(CHOOSE)
        drawn = settled(browser, tmp_path / "kinds.png", (45, 140, 780, 425))
        bright = drawn.max(axis=2) - drawn.min(axis=2) > 40
        found = spans(drawn, [bright & (drawn.argmax(axis=2) == channel) for channel in range(3)])
        assert len(found) == len(COLORS)
        assert all(a < b for (_, a), (b, _) in pairwise(sorted(found)))
        assert strangers(browser) == set()


def test_embedding_atlas_of_today_reads_all_columns(scene: Scene, browser: Browser, tmp_path: Path) -> None:
    """Release 0.26 serves every cell and column, and draws where WebGPU has half floats; Chromium's software renderer has none."""
    with embedding_atlas(visualize(scene, path=tmp_path / "cells.parquet", genes=["MS4A1"]), old=False) as address:
        browser.go(address)
        browser.wait(f"document.body?.innerText.includes('{N} / {N} points')")
        browser.wait("document.body.innerText.includes('MS4A1')")
        shown = set(browser.run("document.body.innerText").split("\n"))
        assert {
            "id (VARCHAR)",
            "x (FLOAT)",
            "y (FLOAT)",
            "kind (VARCHAR)",
            "batch/no (VARCHAR)",
            "score (FLOAT)",
        } <= shown
        assert strangers(browser) == set()
