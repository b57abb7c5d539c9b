"""The page in a headless Chromium: what a person does with it, through the page's own calls, keys and pointer."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from browser import Browser, find_browser
from raggedatlas.wings.viewer.page import write_page
from raggedatlas.wings.viewer.scene import Look, Scene, make_scene
from raggedatlas.wings.viewer.server import ViewerServer

PROGRAM = find_browser()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.skipif(
        PROGRAM is None, reason="no Chromium is installed; set CHROMIUM or install the package chromium"
    ),
]

EVIL = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>"
N = 600


@pytest.fixture(scope="module")
def scene() -> Scene:
    """Cells on a square, their type known from where they are, under names that try to be HTML."""
    rng = np.random.default_rng(0)
    places = rng.uniform(-10, 10, (N, 2))
    ids = pa.array([f"{i:016x}" for i in range(N)])
    kind = np.where(places[:, 0] < 0, "left", EVIL)
    shuffled = rng.permutation(N)
    obs = pa.table(
        {
            "uid": ids,
            "side": pa.array(kind),
            "height": places[:, 1],
            EVIL: pa.array(kind),
            "batch": pa.array([None if i % 3 == 0 else f"batch {i % 3}" for i in range(N)]),
            "cell_name": [f"AAAC-{i}" for i in range(N)],
        }
    ).take(shuffled)
    genes = {"MS4A1": np.where(places[:, 0] < 0, 5, 0), EVIL: np.arange(N)}
    return make_scene(ids, places, obs, genes=genes, look=Look(title=EVIL, color="side", theme="light"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests."""
    assert PROGRAM is not None
    with Browser(PROGRAM, width=1000, height=640) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(scene: Scene, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Browser:
    """The scene as one file, opened."""
    path = write_page(scene, tmp_path_factory.mktemp("page") / "x.html", genes=["MS4A1", EVIL])
    browser.open(path.as_uri())
    return browser


RECORD_CHOICES = """
window.chosen = [];
const own = Object.getOwnPropertyDescriptor(HTMLSelectElement.prototype, "value");
Object.defineProperty(HTMLSelectElement.prototype, "value", {
  ...own,
  set(value) {
    own.set.call(this, value);
    if (this.querySelector("option[value='column:side']")) window.chosen.push(this.value);
  },
});
"""


def test_the_first_picture_has_the_colours_of_the_column(scene: Scene, tmp_path: Path) -> None:
    """While a page loads, what colours the points is never "nothing": the first picture has its final colours."""
    assert PROGRAM is not None
    with Browser(PROGRAM) as fresh:
        fresh.before_pages(RECORD_CHOICES)
        fresh.open(write_page(scene, tmp_path / "x.html").as_uri())
        assert fresh.run("window.chosen") == ["", "column:side"]  # empty while the list is filled, before any picture


def ids_within(scene: Scene, left: float, right: float, bottom: float, top: float) -> set[str]:
    """Give the ids of the cells in a box."""
    x, y = scene.coordinates.T
    inside = (x > left) & (x < right) & (y > bottom) & (y < top)
    return {one for one, kept in zip(scene.ids.to_pylist(), inside, strict=True) if kept}


def test_nothing_from_the_data_runs_and_nothing_is_fetched(page: Browser) -> None:
    """The page asks for nothing but itself, its policy refuses nothing of it, and hostile names are shown as text."""
    for script in (
        f"viewer.colorBy({EVIL!r})",
        f"viewer.colorByGene({EVIL!r})",
        "viewer.hover(0)",
        "viewer.colorBy('side')",
    ):
        page.run(script)
    page.run("viewer.search('script')")
    assert page.run("window.pwned === undefined")
    assert page.messages == []
    assert all(address.startswith(("file:", "data:")) for address in page.requests)
    assert page.run("document.querySelector('h1').textContent") == EVIL
    assert page.run("document.querySelectorAll('main img, aside img').length") == 0


def test_a_lasso_gives_the_ids_inside(page: Browser, scene: Scene) -> None:
    """Cells within a polygon in the coordinates of the data are selected, and their ids are those of the data."""
    found = page.run("viewer.lasso([[-8, -6], [3, -6], [3, 5], [-8, 5]])")
    assert set(found) == ids_within(scene, -8, 3, -6, 5)
    assert len(found) == len(set(found)) > 50
    assert f"{len(found)} cells" in page.run("document.querySelector('.selection h2').textContent")
    assert sorted(page.run("viewer.selection()")) == sorted(found)
    page.run("viewer.clear()")
    assert page.run("viewer.selection()") == []


def test_a_lasso_drawn_with_the_pointer_selects(page: Browser) -> None:
    """Key L, a drag around the middle, and release: cells are selected, and Escape lets them go."""
    press_key(page, "l")
    corners = [(200, 200), (450, 200), (450, 450), (200, 450), (200, 210)]
    pointer(page, "mousePressed", *corners[0])
    for (x0, y0), (x1, y1) in pairwise(corners):
        for step in range(1, 6):
            pointer(page, "mouseMoved", x0 + (x1 - x0) * step / 5, y0 + (y1 - y0) * step / 5)
            page.run("new Promise(r => setTimeout(r, 12))")
    pointer(page, "mouseReleased", *corners[-1])
    page.run("new Promise(r => setTimeout(r, 100))")
    assert len(page.run("viewer.selection()")) > 20
    press_key(page, "l")
    press_key(page, "Escape")
    assert page.run("viewer.selection()") == []


def test_the_pointer_over_a_cell_tells_of_it(page: Browser, scene: Scene) -> None:
    """A card beside the pointer has the cell's id and its value of the column that is coloured by."""
    row = int(np.argmin(np.abs(scene.coordinates).sum(axis=1)))
    page.run("viewer.app.plot.fit({ transition: false })")
    x, y = page.run(f"viewer.app.plot.screen({row})")
    for away in (60, 3, 0):
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + away, y=y, button="none")
        page.run("viewer.drawn()")
    page.run("viewer.app.ids()")
    assert page.run("document.querySelector('.hover .id').textContent") == scene.ids[row].as_py()
    assert page.run("document.querySelector('.hover dd').textContent") == scene.column("side").values[row].as_py()
    assert page.run("document.querySelector('.hover').hidden") is False


def pointer(page: Browser, kind: str, x: float, y: float) -> None:
    """Move, press or release the pointer."""
    page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)


def press_key(page: Browser, key: str) -> None:
    """Press a key."""
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key, **({"text": key} if len(key) == 1 else {}))


def test_colours_and_counts_of_the_legend(page: Browser, scene: Scene) -> None:
    """The legend counts each category, cells without a value last; hiding one leaves the rest; the picture changes."""
    page.run("viewer.colorBy('batch')")
    legend = page.run("viewer.legend()")
    values = scene.column("batch").values.to_pylist()
    assert {row["label"]: row["n"] for row in legend} == {
        "batch 1": values.count("batch 1"),
        "batch 2": values.count("batch 2"),
        "missing": values.count(None),
    }
    assert len({row["color"] for row in legend}) == 3
    before = drawn_colors(page)
    page.run("viewer.hide(['batch 1'])")
    assert legend[0]["color"] in before
    assert legend[0]["color"] not in drawn_colors(page)
    page.run("viewer.hide([])")


def drawn_colors(page: Browser) -> set[str]:
    """Name the colours that many pixels of the plot have."""
    page.run("viewer.app.plot.look({ opacity: 1, size: 8 }); viewer.drawn()")
    found: dict[str, int] = page.run(
        """(async () => {
            const image = await viewer.app.plot.image();
            const data = image.getContext('2d').getImageData(0, 0, image.width, image.height).data;
            const seen = {};
            for (let i = 0; i < data.length; i += 4) {
                if (data[i + 3] < 250) continue;
                const color = '#' + [0, 1, 2].map((k) => data[i + k].toString(16).padStart(2, '0')).join('');
                seen[color] = (seen[color] ?? 0) + 1;
            }
            return seen;
        })()"""
    )
    return {color for color, n in found.items() if n > 100}


def test_numbers_and_genes_have_a_scale(page: Browser) -> None:
    """A measure's scale spans its values, a gene's begins at zero; both know how many cells have a value."""
    page.run("viewer.colorBy('height')")
    scale = page.run("viewer.legend()")
    assert -10.1 < scale["domain"][0] < -9 < 9 < scale["domain"][1] < 10.1
    page.run("viewer.colorByGene('MS4A1')")
    gene = page.run("viewer.legend()")
    assert (gene["name"], gene["domain"], gene["known"]) == ("MS4A1", [0, 5], N)
    page.run("viewer.colorByGene('NOGENE')")
    assert page.run("viewer.state().status") == "The page has no values of NOGENE."
    assert page.run("viewer.state().color") == "MS4A1"
    page.run("viewer.colorBy('side')")
    assert page.run("viewer.state().status") == ""


def test_a_range_of_numbers_is_selected(page: Browser, scene: Scene) -> None:
    """Moving the lower handle draws only what is above, and its link selects just that."""
    page.run("viewer.colorBy('height')")
    page.run(
        """(() => {
            const [low] = document.querySelectorAll('.handles input');
            low.value = 100;
            low.dispatchEvent(new Event('input'));
            document.querySelector('.legend .foot .link').click();
        })()"""
    )
    low, high = page.run("viewer.legend()")["domain"]
    heights = dict(zip(scene.ids.to_pylist(), scene.column("height").values.to_pylist(), strict=True))
    middle = (low + high) / 2
    assert set(page.run("viewer.selection()")) == {one for one, height in heights.items() if height >= middle}
    page.run("viewer.clear()")
    page.run("viewer.colorBy('side')")


def test_search_finds_columns_genes_values_and_cells(page: Browser, scene: Scene) -> None:
    """One field finds each kind of thing; choosing a cell selects it, a value selects its cells."""
    page.run("viewer.colorBy('side')")
    groups = {hit["group"] for hit in page.run("viewer.search('MS4')")}
    assert groups == {"Genes"}
    assert page.run("viewer.search('HEIGHT')")[0]["title"] == "height"
    one = scene.ids[7].as_py()
    page.run(f"viewer.choose('{one}')")
    assert page.run("viewer.selection()") == [one]
    named = [hit for hit in page.run("viewer.search('AAAC-59')") if hit["group"] == "Cells by cell_name"]
    assert named[0]["n"] == 11
    page.run("viewer.choose('left')")
    left = {
        i for i, v in zip(scene.ids.to_pylist(), scene.column("side").values.to_pylist(), strict=True) if v == "left"
    }
    assert set(page.run("viewer.selection()")) == left
    page.run("viewer.clear()")


def test_a_served_page_fetches_parts_and_genes_from_its_server_only(scene: Scene, browser: Browser) -> None:
    """With the policy of the server the page works, and asks for a gene when it is coloured by."""
    with ViewerServer(scene) as server:
        browser.messages.clear()
        browser.requests.clear()
        browser.open(server.url)
        assert not any("parts/gene" in address for address in browser.requests)
        browser.run("viewer.colorByGene('MS4A1')")
        state: dict[str, Any] = browser.run("viewer.state()")
        assert (state["n"], state["color"], state["status"]) == (N, "MS4A1", "")
        assert browser.run("viewer.search('ms4')")[0]["title"] == "MS4A1"
        found = browser.run("viewer.lasso([[-8, -6], [3, -6], [3, 5], [-8, 5]])")
        assert set(found) == ids_within(scene, -8, 3, -6, 5)
        asked = [address for address in browser.requests if not address.startswith("data:")]
        assert all(address.startswith(server.url) for address in asked)
        assert browser.messages == []
        browser.run("viewer.colorByGene('NOGENE')")
        assert "There are no values of 'NOGENE'" in browser.run("viewer.state().status")


def test_many_cells_open_and_answer(browser: Browser, tmp_path: Path) -> None:
    """A hundred thousand cells are drawn, coloured and selected, each id once."""
    n = 100_000
    rng = np.random.default_rng(1)
    places = rng.normal(size=(n, 2)).astype(np.float32)
    places[np.abs(places[:, 0]) < 1e-3, 0] = 0.01  # no cell within a step of the lasso's edge
    ids = pa.array([f"{i:016x}" for i in range(n)])
    obs = pa.table({"uid": ids, "cluster": pa.array(rng.integers(0, 30, n)).cast(pa.string())})
    browser.open(write_page(make_scene(ids, places, obs), tmp_path / "x.html").as_uri())
    found = browser.run("viewer.lasso([[0, -9], [9, -9], [9, 9], [0, 9]])")
    assert len(set(found)) == len(found)
    assert set(found) == {f"{i:016x}" for i in np.flatnonzero(places[:, 0] > 0)}
    assert sum(row["n"] for row in browser.run("viewer.legend()")) == n


MOVED = """(async (step) => {
    const { detail, scatter } = viewer.app.plot;
    for (let frame = 0; frame < 20; frame++) {  // one of all points, still asked for, may come between
        detail.step = step;
        const drawn = new Promise((done) => scatter.subscribe('draw', done, 1));
        scatter.redraw();
        await drawn;
        if (detail.sampled) return true;
    }
    return false;
})"""
RESTED = """(async () => {
    for (let i = 0; i < 200 && viewer.app.plot.detail.sampled; i++) await new Promise((r) => setTimeout(r, 50));
    return !viewer.app.plot.detail.sampled;
})()"""
WAIT = "new Promise(r => setTimeout(r, 400))"


@pytest.fixture(scope="module")
def crowd(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> tuple[Browser, Any]:
    """A page of 200,000 cells, opened, and their places."""
    n = 200_000
    places = np.random.default_rng(2).normal(size=(n, 2)).astype(np.float32)
    scene = make_scene(pa.array([f"{i:016x}" for i in range(n)]), places, look=Look(theme="light"))
    browser.open(write_page(scene, tmp_path_factory.mktemp("crowd") / "x.html").as_uri())
    return browser, scene.coordinates


def test_fewer_points_are_drawn_while_the_picture_moves(crowd: tuple[Browser, Any], tmp_path: Path) -> None:
    """On a slow machine a moving picture is a sample of its points; at rest, and when saved, it is the same as before, to the pixel."""
    page, _ = crowd
    page.run("viewer.drawn()")
    before = page.picture(tmp_path / "before.png").read_bytes()
    assert page.run(f"{MOVED}(1)") is False
    page.run("viewer.app.plot.detail.held = true")
    assert page.run(f"{MOVED}(4)") is True
    assert page.picture(tmp_path / "moving.png").read_bytes() != before
    page.run(WAIT)
    assert page.run("viewer.app.plot.detail.sampled") is True
    page.run("window.dispatchEvent(new PointerEvent('pointerup'))")
    assert page.run(RESTED) is True
    assert page.picture(tmp_path / "after.png").read_bytes() == before
    assert page.run(f"{MOVED}(4)") is True
    assert page.run("viewer.app.plot.image().then(() => viewer.app.plot.detail.sampled)") is False


@pytest.mark.nightly
def test_the_pointer_finds_the_nearest_cell_and_draws_nothing(crowd: tuple[Browser, Any]) -> None:
    """Wherever the map was moved, the cell found is the nearest within reach, and passing over cells draws no frame."""
    page, places = crowd
    page.run(
        "viewer.app.plot.scatter.zoomToLocation([0.1, -0.05], 0.05, { transition: false }).then(() => viewer.drawn())"
    )
    rng = np.random.default_rng(3)
    asked = np.column_stack([rng.uniform(0, 600, 40), rng.uniform(0, 600, 40)]).tolist()
    found = page.run(f"{asked}.map(([x, y]) => viewer.app.plot.pick(x, y))")
    screen = np.array(page.run(f"Array.from({{ length: {len(places)} }}, (_, i) => viewer.app.plot.screen(i))"))
    reach = page.run("5 + viewer.app.plot.size / 2")
    for place, row in zip(asked, found, strict=True):
        away = np.hypot(*(screen - place).T)
        assert row == (int(away.argmin()) if away.min() <= reach else -1), (place, away.min())
    assert sum(row >= 0 for row in found) > 5
    page.run(
        "clearTimeout(viewer.app.plot.detail.timer); window.frames_drawn = 0; viewer.app.plot.scatter.subscribe('draw', () => window.frames_drawn++)"
    )
    for x in range(200, 500, 10):
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=300, button="none")
    page.run(WAIT)
    assert page.run("window.frames_drawn") == 0


def drawn(browser: Browser, tmp_path: Path) -> Any:
    """Look at the page: (height, width, 3) bytes of its picture."""
    image = pytest.importorskip("matplotlib.image")
    browser.run("new Promise(r => setTimeout(r, 400))")
    picture = image.imread(browser.picture(tmp_path / "page.png"))
    return (picture[:, :, :3] * 255).round().astype(int)


def count_of(picture: Any, color: tuple[int, int, int]) -> int:
    """Count the pixels that have nearly a colour."""
    return int((np.abs(picture - np.array(color)).max(axis=2) < 12).sum())


def test_colours_of_the_data_can_be_switched_off(browser: Browser, tmp_path: Path) -> None:
    """Categories are drawn in the colours that come with the data until a switch in the legend takes the safe palette."""
    rng = np.random.default_rng(3)
    places = rng.uniform(-1, 1, (300, 2))
    ids = [f"c{i}" for i in range(300)]
    obs = pa.table({"uid": ids, "kind": ["a" if x < 0 else "b" for x in places[:, 0]], "plain": ["p", "q"] * 150})
    look = Look(color="kind", colors={"kind": {"a": "#ff0000", "b": "#00ff00"}}, theme="light")
    browser.open(write_page(make_scene(ids, places, obs, look=look), tmp_path / "x.html", genes=[]).as_uri())
    switch = "document.querySelector('.legend .check input, aside .check input')"
    before = drawn(browser, tmp_path)
    assert min(count_of(before, (255, 0, 0)), count_of(before, (0, 255, 0))) > 60
    browser.run(f"{switch}.click()")
    after = drawn(browser, tmp_path)
    assert max(count_of(after, (255, 0, 0)), count_of(after, (0, 255, 0))) < 20
    assert min(count_of(after, (0x35, 0x73, 0xB9)), count_of(after, (0xE6, 0x9F, 0))) > 60
    browser.run("viewer.colorBy('plain')")
    assert browser.run(
        "[...document.querySelectorAll('label.check')].every(l => l.textContent !== 'colours of the data')"
    )


@pytest.mark.nightly
def test_a_selection_keeps_the_colours_of_a_scale(browser: Browser, tmp_path: Path) -> None:
    """With a gene as colour, cells outside of a selection keep their colour: a light one would look like a low value."""
    xs = np.linspace(-1, 1, 40)
    places = np.array([(x, y) for x in xs for y in xs[::4]])
    ids = [f"c{i}" for i in range(len(places))]
    obs = pa.table({"uid": ids, "kind": ["a"] * len(ids)})
    scene = make_scene(ids, places, obs, genes={"g": np.full(len(ids), 9.0)}, look=Look(color="kind", theme="light"))
    browser.open(write_page(scene, tmp_path / "x.html", genes=["g"]).as_uri())
    browser.run("viewer.colorByGene('g')")
    before = drawn(browser, tmp_path)
    strong = before[(before.max(axis=2) - before.min(axis=2)) > 40]
    color = tuple(np.median(strong, axis=0).astype(int))
    browser.run("viewer.lasso([[-2, -2], [-0.8, -2], [-0.8, 2], [-2, 2]])")
    after = drawn(browser, tmp_path)
    middle = (slice(None), slice(before.shape[1] // 3, 2 * before.shape[1] // 3))
    assert count_of(after[middle], color) > 0.8 * count_of(before[middle], color) > 50
