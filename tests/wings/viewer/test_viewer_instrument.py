"""The page as an instrument, in a headless Chromium: selections compared, counted and labelled, gene sets, neighbours, and links."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import raggedatlas as ra
from browser import Browser, find_browser
from raggedatlas.wings.viewer.page import write_page
from raggedatlas.wings.viewer.scene import Scene, make_scene
from raggedatlas.wings.viewer.verbs import make_view, view, visualize

PROGRAM = find_browser()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.skipif(
        PROGRAM is None, reason="no Chromium is installed; set CHROMIUM or install the package chromium"
    ),
]
PBMC = Path(__file__).parents[2] / "data" / "pbmc68k_reduced.h5ad"
GENES = ["LYZ", "CD79A", "NKG7", "IL32", "CST3"]
SELECT = """(async (label) => {
    const column = await viewer.app.load('cell_type');
    await viewer.app.selectCategory(column, column.labels.indexOf(label));
    return viewer.keep(label);
})"""
LASSO = "viewer.lasso([[-20, -20], [{x}, -20], [{x}, 20], [-20, 20]])"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests."""
    assert PROGRAM is not None
    with Browser(PROGRAM, width=1200, height=760) as opened:
        yield opened


@pytest.fixture(scope="module")
def blood(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an atlas of a real file, in a snapshot, and with a page of its cells and a few genes."""
    folder = tmp_path_factory.mktemp("blood")
    atlas = ra.RaggedAtlas.create(str(folder / "blood.atlas"))
    columns = {"bulk_labels": "cell_type", "n_genes": "n_genes"}
    atlas.add(PBMC, obs=columns, embeddings=["X_umap", "X_pca"], progress=False)
    atlas.snapshot()
    visualize(atlas, path=folder / "x.html", genes=GENES, layer="raw", color="cell_type", theme="light")
    return folder


@pytest.fixture
def atlas(blood: Path, tmp_path: Path) -> ra.RaggedAtlas:
    """A copy of the atlas."""
    return ra.RaggedAtlas.open(str(shutil.copytree(blood / "blood.atlas", tmp_path / "blood.atlas")))


@pytest.fixture
def page(blood: Path, browser: Browser) -> Browser:
    """The page, opened."""
    browser.go("about:blank")
    browser.open((blood / "x.html").as_uri())
    return browser


def middle(scene: Scene) -> float:
    """Choose where a lasso cuts the map: half-way between two cells, so that no rounding decides."""
    xs = np.sort(scene.coordinates[:, 0].astype(float))
    gap = 100 + int(np.argmax(np.diff(xs)[100:200]))
    return float(xs[gap] + xs[gap + 1]) / 2


def read_table(result: dict[str, Any]) -> pd.DataFrame:
    """Read what the page compared."""
    return pd.DataFrame(result["table"])


@pytest.mark.parametrize("method", ["t-test", "wilcoxon"])
def test_kept_selections_are_compared_by_the_server(
    browser: Browser, atlas: ra.RaggedAtlas, method: Any, tmp_path: Path
) -> None:
    """Two types kept by name are compared over all genes, as the query does; the table is shown, and the file has every gene."""
    with view(atlas, browser=False, layer="raw", color="cell_type") as server:
        browser.go("about:blank")
        browser.open(server.url)
        assert browser.run(f"{SELECT}('Dendritic')") == 103
        browser.run(f"{SELECT}('CD19+ B')")
        assert browser.run("viewer.sets()") == [{"name": "Dendritic", "n": 103}, {"name": "CD19+ B", "n": 40}]
        found = read_table(browser.run(f"viewer.compare('Dendritic', 'CD19+ B', '{method}')"))
        wanted = (
            atlas.checkout(1)
            .query()
            .compare({"cell_type": "Dendritic"}, {"cell_type": "CD19+ B"}, method=method, layer="raw")
        )
        assert found["names"].tolist() == wanted["symbol"].tolist()
        assert found["scores"].tolist() == wanted["scores"].tolist()
        assert browser.run("document.querySelectorAll('.ranks tbody tr').length") == 200
        (tmp_path / "t.csv").write_text(browser.run("viewer.app.drawer.tabs.Compare.text()"))
        saved = pd.read_csv(tmp_path / "t.csv", float_precision="round_trip")
        np.testing.assert_allclose(saved["pvals_adj"], wanted["pvals_adj"], rtol=1e-12)
        assert browser.messages == []
        browser.run("viewer.compare('Dendritic', 'Dendritic')")
        assert browser.run("viewer.state().status").startswith("103 cells are in both sets")


def test_a_file_shows_the_means_that_were_computed_when_it_was_written(page: Browser, atlas: ra.RaggedAtlas) -> None:
    """Of the genes that the page holds, by a column; it has nothing to compare with, and says where every gene is."""
    assert page.run("Object.keys(viewer.app.drawer.tabs)") == ["Counts", "Means", "Label"]
    page.run("viewer.open('Means')")
    saved = pd.read_csv(io.StringIO(page.run("viewer.app.drawer.tabs.Means.text()")))
    wanted = atlas.checkout(1).query().layers("raw").features(GENES).aggregate("cell_type")
    wanted.var_names = wanted.var["symbol"].tolist()
    for name in ("mean", "count_nonzero", "n_measured"):
        found = saved.pivot(index="group", columns="gene", values=name)
        pd.testing.assert_frame_equal(
            found, wanted.to_df(name).loc[found.index, found.columns], check_names=False, check_dtype=False
        )
    shown = "document.querySelector('.drawer').textContent"
    assert "Computed when this page was written" in page.run(shown)
    page.run("document.querySelector('.ranks th:nth-child(3) button').click()")
    page.wait(f"viewer.state().color === {GENES[1]!r}")  # reading the gene takes its time


def test_a_lasso_becomes_an_annotation_by_a_file(page: Browser, atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """Two lassos labelled on a page without a server: `annotate` takes the saved file as it is, and queries find the labels."""
    scene = make_view(atlas)
    cut = middle(scene)
    left = set(page.run(LASSO.format(x=cut)))
    page.run("viewer.open('Label').then(() => viewer.app.drawer.tabs.Label.give('side', 'left, \"west\"'))")
    everything = set(scene.ids.to_pylist())
    page.run(f"viewer.select({sorted(everything - left)[:50]})")
    page.run("viewer.app.drawer.tabs.Label.give('side', 'NA')")
    assert page.run("viewer.state().color") == "side"
    (tmp_path / "side.csv").write_text(page.run("viewer.app.drawer.tabs.Label.text('side')"))
    report = atlas.annotate(tmp_path / "side.csv")
    assert report.status == "added"
    counted = atlas.checkout(atlas.snapshot()).query().where("side IS NOT NULL")
    labels = counted.to_pandas()["side"]
    assert set(labels.index[labels == 'left, "west"']) == left
    assert (labels == "NA").sum() == 50
    assert len(labels) == len(left) + 50


def test_a_lasso_becomes_an_annotation_on_a_served_page(browser: Browser, atlas: ra.RaggedAtlas) -> None:
    """With the flag the label is written; without, the page offers the file, and the server refuses what a script sends."""
    with view(atlas, browser=False, allow_annotate=True) as server:
        browser.go("about:blank")
        browser.open(server.url)
        left = set(browser.run(LASSO.format(x=middle(make_view(atlas)))))
        browser.run("viewer.open('Label')")
        assert "Write to the atlas" in browser.run("document.querySelector('.drawer').textContent")
        browser.run("viewer.app.drawer.tabs.Label.give('side', 'left')")
        assert browser.run("viewer.state().status") == f"Wrote left for {len(left)} cells."
    frame = atlas.checkout(atlas.snapshot()).query().where({"side": "left"}).to_pandas()
    assert set(frame.index) == left
    with view(atlas, browser=False) as server:
        browser.go("about:blank")
        browser.open(server.url)
        browser.run(LASSO.format(x=0))
        browser.run("viewer.open('Label')")
        assert "Write to the atlas" not in browser.run("document.querySelector('.drawer').textContent")
        sent = "viewer.app.parts.post('annotate', { scene: viewer.app.manifest.scene }).catch((error) => error.message)"
        assert "start it with allow_annotate=True" in browser.run(sent)
    assert len(atlas.annotations()) == 1


def test_a_link_brings_the_state_back(page: Browser, atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """Colour, hidden values, palette, gene set, camera, kept selections by rule and by cells, and the selection: in another page of the same cells all are back."""
    scene = make_view(atlas)
    page.run(f"{SELECT}('Dendritic')")
    left = page.run(LASSO.format(x=middle(scene)))
    page.run("viewer.keep('left & \"west\" <b>')")
    page.run("viewer.colorByGene('LYZ'); viewer.app.geneSet = ['LYZ', 'CD79A']")
    page.run("viewer.theme('dark').then(() => viewer.app.setSafe(true))")
    page.run("viewer.app.plot.lookAt([0.25, -0.125, 0.5])")
    state = "({ ...viewer.state(), sets: viewer.sets(), safe: viewer.app.safe, genes: viewer.app.geneSet, camera: viewer.app.plot.camera().map((v) => Math.round(v * 1000)) })"
    before, ids = page.run(state), page.run("viewer.selection()")
    address = page.run("viewer.link()")
    assert set(ids) == set(left)
    other = visualize(atlas, path=tmp_path / "other.html", genes=GENES, layer="raw", theme="light")
    page.go("about:blank")
    page.open(f"{other.as_uri()}#{address.partition('#')[2]}")
    assert page.run(state) == before
    assert sorted(page.run("viewer.selection()")) == sorted(ids)
    assert (before["color"], before["theme"], before["safe"], before["genes"]) == (
        "LYZ",
        "dark",
        True,
        ["LYZ", "CD79A"],
    )
    assert [one["n"] for one in before["sets"]] == [103, len(left)]
    assert page.run("document.querySelectorAll('.kept b').length") == 0


BROKEN = [
    ("scene=0123456789abcdef", "The link is of a page of other cells, so it is not applied."),
    ("scene={scene}&color=nothing", "There is no column nothing."),
    ("scene={scene}&gene=NOGENE", "The page has no values of NOGENE."),
    ('scene={scene}&selected={{"bits":"AAAA"}}', None),
    ("scene={scene}&set=[", None),
    ("scene={scene}&genes=7", "The link has no list of genes."),
]


@pytest.mark.parametrize(("text", "why"), BROKEN, ids=[row[0][:24] for row in BROKEN])
def test_a_link_of_something_else_changes_nothing(
    page: Browser, atlas: ra.RaggedAtlas, text: str, why: str | None
) -> None:
    """A link of other cells, or one that was changed, is one line on a page that works; nothing is selected or kept."""
    asked = "v=1&" + text.format(scene=make_view(atlas).key)
    page.run(
        f"new Promise((done) => {{ window.addEventListener('hashchange', () => setTimeout(done, 300)); location.hash = {asked!r}; }})"
    )
    status = page.run("viewer.state().status")
    assert status if why is None else status == why
    assert page.run("viewer.state().color") == "cell_type"
    assert page.run("viewer.sets()") == []
    assert page.run("viewer.selection()") == []


def test_counts_are_those_of_the_cells(page: Browser, atlas: ra.RaggedAtlas) -> None:
    """Counts of a selection by every column equal what pandas gives, and means and medians of numbers are shown."""
    frame = atlas.checkout(1).query().to_pandas()
    left = page.run(LASSO.format(x=middle(make_view(atlas))))
    page.run("viewer.open('Counts')")
    lines = [line.split(",") for line in page.run("viewer.app.drawer.tabs.Counts.text()").strip().splitlines()]
    found = {label.strip('"'): (int(n), int(of)) for name, label, n, of in lines[1:] if name == '"cell_type"'}
    counts, totals = frame.loc[left, "cell_type"].value_counts(), frame["cell_type"].value_counts()
    assert found == {label: (int(n), int(totals[label])) for label, n in counts.items() if n}
    facts = page.run(
        "[...document.querySelectorAll('.facts dd')].slice(2, 6).map((one) => Number(one.textContent.replace(',', '')))"
    )
    wanted = [of(part["n_genes"]) for of in (np.mean, np.median) for part in (frame.loc[left], frame)]
    assert facts == pytest.approx(wanted, rel=5e-3)  # three digits are shown


def test_means_of_a_gene_set_are_asked_of_the_server(browser: Browser, atlas: ra.RaggedAtlas) -> None:
    """By a column, by kept selections and by labels given on the page; an unknown gene is refused in a line."""
    with view(atlas, browser=False, layer="raw", color="cell_type") as server:
        browser.go("about:blank")
        browser.open(server.url)
        for kind in ("Dendritic", "CD19+ B"):
            browser.run(f"{SELECT}('{kind}')")
        browser.run("viewer.app.drawer.tabs.Label.give('mine', 'chosen')")
        browser.run("viewer.app.geneSet = ['LYZ', 'CD79A']; viewer.open('Means')")
        find = "(async (by) => { const tab = viewer.app.drawer.tabs.Means; tab.by = by; await tab.find(); return tab.text(); })"
        by_type = pd.read_csv(io.StringIO(browser.run(f"{find}('cell_type')")))
        by_sets = pd.read_csv(io.StringIO(browser.run(f"{find}('\\u0000sets')")))
        by_label = pd.read_csv(io.StringIO(browser.run(f"{find}('mine')")))
        wanted = atlas.checkout(1).query().layers("raw").features("LYZ").aggregate("cell_type").to_df("mean")
        means = by_type[by_type["gene"] == "LYZ"].set_index("group")["mean"]
        assert means.to_dict() == pytest.approx(wanted.iloc[:, 0].to_dict())
        assert set(by_sets["group"]) == {"Dendritic", "CD19+ B", "chosen"}
        dendritic = by_sets[(by_sets["gene"] == "LYZ") & (by_sets["group"] == "Dendritic")]
        assert dendritic["mean"].item() == pytest.approx(means["Dendritic"])
        assert by_label["group"].tolist() == ["chosen", "chosen"]
        assert by_label["mean"].tolist() == by_sets[by_sets["group"] == "chosen"]["mean"].tolist()
        assert browser.messages == []
        browser.run("viewer.app.geneSet = ['LYZ', 'NOGENE']; viewer.app.drawer.tabs.Means.find()")
        assert "'NOGENE'" in browser.run("viewer.state().status")


def test_texts_are_counted_with_the_rest_as_other(browser: Browser, tmp_path: Path) -> None:
    """A column of more texts than categories: the most frequent of a selection beside all cells, the others as one line; unique ones as a number."""
    rng = np.random.default_rng(0)
    clones = np.where(rng.random(2000) < 0.3, "clone A", [f"clone {i % 700}" for i in range(2000)])
    obs = pd.DataFrame({"clone": clones, "name": [f"n{i}" for i in range(2000)]}, index=[f"c{i}" for i in range(2000)])
    scene = make_scene(obs.index, rng.normal(size=(2000, 2)), obs=obs)
    assert [column.kind for column in scene.columns] == ["text", "text"]
    browser.go("about:blank")
    browser.open(write_page(scene, tmp_path / "x.html").as_uri())
    some = obs.iloc[:1000]
    browser.run(f"viewer.select({some.index.tolist()})")
    browser.run("viewer.open('Counts')")
    lines = [line.split(",") for line in browser.run("viewer.app.drawer.tabs.Counts.text()").strip().splitlines()]
    found = {label.strip('"'): (int(n), int(of)) for name, label, n, of in lines[1:] if name == '"clone"'}
    counts, totals = some["clone"].value_counts(), obs["clone"].value_counts()
    (rest,) = [label for label in found if label.startswith("other")]
    others = found.pop(rest)
    assert rest == f"other ({len(counts) - 500} values)"
    assert len(found) == 500
    assert found["clone A"] == (counts["clone A"], totals["clone A"])
    assert found == {label: (int(counts[label]), int(totals[label])) for label in found}
    assert others == (1000 - sum(n for n, _ in found.values()), 2000 - sum(n for _, n in found.values()))
    shown = browser.run("document.querySelector('.drawer .cards').textContent")
    assert f"clone A{counts['clone A']} ·" in shown
    assert f"other ({len(counts) - 8} values)" in shown
    assert "1,000 different values" in shown


def test_neighbours_become_a_kept_selection(browser: Browser, atlas: ra.RaggedAtlas) -> None:
    """Of the cells nearest to a selection those of the page are kept by name and selected; the others are counted and saved as CSV."""
    query = atlas.checkout(1).query()
    with view(query.where("cell_type != 'Dendritic'"), browser=False, color="cell_type") as server:
        browser.go("about:blank")
        browser.open(server.url)
        browser.run(f"{SELECT}('CD34+')")
        own = set(browser.run("viewer.selection()"))
        browser.run("viewer.open('Neighbours').then(() => viewer.app.drawer.tabs.Neighbours.find())")
        near = browser.run("viewer.selection()")
        assert browser.run("viewer.sets()")[-1] == {"name": "neighbours 1", "n": len(near)}
        saved = pd.read_csv(io.StringIO(browser.run("viewer.app.drawer.tabs.Neighbours.text()")), index_col="uid")
        assert 15 <= len(near) + len(saved) <= 75
        assert not own & set(near)
        assert list(saved.columns) == ["dataset", "distance"]
        assert set(query.to_pandas().loc[saved.index, "cell_type"]) == {"Dendritic"}
        assert f"Outside this page: {len(saved)} (" in browser.run("document.querySelector('.drawer').textContent")


def test_one_switch_takes_the_safe_palette_for_all_columns(page: Browser) -> None:
    """Key C draws every column in colours that colour-blind eyes can tell apart, and again in those of the file."""
    own = [row["color"] for row in page.run("viewer.legend()")]
    page.call("Input.dispatchKeyEvent", type="keyDown", key="c", text="c")
    page.run("viewer.drawn()")
    safe = [row["color"] for row in page.run("viewer.legend()")]
    assert safe[:3] == ["#3573b9", "#e69f00", "#009e73"] != own[:3]
    assert page.run("document.querySelector('.legend .check input').checked") is False
    page.run("document.querySelector('.legend .check input').click(); viewer.drawn()")
    assert [row["color"] for row in page.run("viewer.legend()")] == own


@pytest.mark.nightly
def test_the_panel_is_drawn_light_and_dark(page: Browser, tmp_path: Path) -> None:
    """With the panel open the map and the table are drawn above each other, on a light and on a dark ground."""
    image = pytest.importorskip("PIL.Image")
    page.run(f"{SELECT}('Dendritic').then(() => viewer.open('Means'))")
    for theme, (low, high) in {"light": (235, 256), "dark": (0, 50)}.items():
        page.run(f"viewer.theme('{theme}').then(() => viewer.drawn())")
        drawn = np.asarray(image.open(page.picture(tmp_path / f"{theme}.png")).convert("RGB"))
        assert low <= np.median(drawn[430:, :800]) < high
        assert len(np.unique(drawn[:400, 100:800].reshape(-1, 3), axis=0)) > 60
