"""CELLxGENE Explorer itself (cellxgene 0.16.8) and we understand each other, and its web client draws what we write.

Asked for by ``-m peers``; needs the environment that ``benchmarks/peers.sh explorer`` makes. Values that it serves are decoded and compared
with the file that they came from, by anndata's own reader.
"""

import json
import struct
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy import stats

import raggedatlas as ra
from browser import Browser, find_browser
from raggedatlas.wings.cxg import inspect, validate
from raggedatlas.wings.cxg.explorer import ExplorerServer, find_explorer, serve

PROGRAM = find_explorer()
BROWSER = find_browser()
ROOT = Path(__file__).parents[3]
SCALED = ROOT / "tests/data/pbmc68k_reduced.h5ad"
COUNTS = ROOT / "tests/data/pbmc_5k_protein_v3.h5ad"

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(PROGRAM is None, reason="no cellxgene here; make it with benchmarks/peers.sh explorer"),
]

_NUMBERS: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i4"), 3: np.dtype("<u4"), 4: np.dtype("<f8")}
_JSON = 5
# Which field of the tables Matrix and Column is what; a union takes two fields, its type before itself.
_N_ROWS, _COLUMNS, _NAMES = 0, 2, 3
_KIND = 0


def decode_matrix(raw: bytes) -> dict[Any, Any]:
    """Decode the answer of cellxgene's routes for layouts, annotations and values.

    Parameters
    ----------
    raw : bytes
        What was sent.

    Returns
    -------
    dict
        Name of each column, or its number, -> array of numbers or list of texts, in order.

    Raises
    ------
    ValueError
        If a column has another length than the table says.
    """
    root = _uint32(raw, 0)
    n_rows = _uint32(raw, at) if (at := _field(raw, root, _N_ROWS)) else 0
    columns = [found for table in _tables(raw, root) if (found := _union(raw, table, _KIND)) is not None]
    names = _union(raw, root, _NAMES)
    if any(len(column) != n_rows for column in columns):
        raise ValueError(f"Columns of {[len(column) for column in columns]} values in a table of {n_rows} rows.")
    keys = list(range(len(columns))) if names is None else list(np.asarray(names).tolist())
    return dict(zip(keys, columns, strict=True))


def _tables(raw: bytes, root: int) -> list[int]:
    at = _field(raw, root, _COLUMNS)
    if not at:
        return []
    vector = at + _uint32(raw, at)
    places = [vector + 4 + 4 * i for i in range(_uint32(raw, vector))]
    return [place + _uint32(raw, place) for place in places]


def _union(raw: bytes, table: int, kind_field: int) -> "NDArray[Any] | list[Any] | None":
    kind_at, value_at = _field(raw, table, kind_field), _field(raw, table, kind_field + 1)
    if not kind_at or not value_at or raw[kind_at] == 0:
        return None
    inner = value_at + _uint32(raw, value_at)
    data_at = _field(raw, inner, 0)
    vector = data_at + _uint32(raw, data_at)
    n = _uint32(raw, vector)
    kind = raw[kind_at]
    if kind == _JSON:
        found: list[Any] = json.loads(raw[vector + 4 : vector + 4 + n])
        return found
    numbers: NDArray[Any] = np.frombuffer(raw, _NUMBERS[kind], n, vector + 4)
    return numbers


def _field(raw: bytes, table: int, number: int) -> int:
    """Give the place of a field of a table; 0 where it is not there."""
    vtable = table - int(struct.unpack_from("<i", raw, table)[0])
    slot = 4 + 2 * number
    if slot >= _uint16(raw, vtable):
        return 0
    offset = _uint16(raw, vtable + slot)
    return table + offset if offset else 0


def _uint32(raw: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", raw, at)[0])


def _uint16(raw: bytes, at: int) -> int:
    return int(struct.unpack_from("<H", raw, at)[0])


def dense(x: Any) -> np.ndarray:
    return np.asarray(x.toarray() if sp.issparse(x) else x)


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real counts of 200 cells, sparse, with an embedding, in a file that old readers know."""
    adata = ad.read_h5ad(COUNTS)
    adata = adata[:, :3000].copy()
    rng = np.random.default_rng(0)
    made = ad.AnnData(
        sp.csr_matrix(dense(adata.X).astype(np.float32)),
        obs=pd.DataFrame(
            {
                "half": pd.Categorical.from_codes(np.arange(200) % 2, ["odd", "even"]),
                "flag": np.arange(200) % 3 == 0,
                "total": dense(adata.X).sum(axis=1).astype(np.float32),
            },
            index=adata.obs_names.astype(object),
        ),
        var=pd.DataFrame({"rank": np.arange(3000, dtype=np.int32)}, index=adata.var_names.astype(object)),
        obsm={"X_random": rng.normal(size=(200, 2)).astype(np.float32)},
    )
    path = tmp_path_factory.mktemp("counts") / "counts.h5ad"
    made.write_h5ad(path)
    return path


def convert(source: Path, target: Path, *words: str) -> Path:
    """Let cellxgene write a CXG."""
    assert PROGRAM is not None
    line = [str(PROGRAM), "convert", str(source), "-o", str(target), "--disable-corpora-schema", *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return target


@pytest.mark.parametrize(
    ("name", "words", "layout", "tolerance"),
    [
        ("scaled", (), "dense", 0),
        ("counts", (), "dense", 0),
        ("counts", ("-s", "60"), "sparse", 0),
        ("scaled", ("-s", "60"), "sparse", 1e-6),
    ],
)
def test_what_it_converts_is_read_equal(
    name: str, words: tuple[str, ...], layout: str, tolerance: float, counts: Path, tmp_path: Path
) -> None:
    """Its CXG breaks no must, and comes back as the file that it was made of: values, names, columns, categories, embeddings."""
    source = SCALED if name == "scaled" else counts
    path = convert(source, tmp_path / "x.cxg", *words)
    assert [str(p) for p in validate(path, "full") if p.level == "must"] == []
    found = inspect(path)
    assert found.version == "0.2.0"
    assert found.layout == layout
    want, got = ad.read_h5ad(source), ad.read_h5ad(ra.copy(path, tmp_path / "back.h5ad"))
    np.testing.assert_allclose(dense(got.X), dense(want.X), rtol=0, atol=tolerance)
    assert list(got.obs_names) == list(want.obs_names)
    assert list(got.var_names) == list(want.var_names)
    for column in want.obs:
        same_column(got.obs[column], want.obs[column])
    for column in want.var:
        same_column(got.var[column], want.var[column])
    for key in want.obsm:
        np.testing.assert_array_equal(got.obsm[key], np.asarray(want.obsm[key]))


def same_column(got: pd.Series, want: pd.Series) -> None:
    if want.dtype == "category":
        assert got.astype(str).tolist() == want.astype(str).tolist()
    elif want.dtype in (bool, object):
        assert got.tolist() == want.tolist()
    else:
        np.testing.assert_array_equal(got.to_numpy(np.float32), want.to_numpy(np.float32))


class Client:
    """What the web client asks of the server."""

    def __init__(self, page: ExplorerServer) -> None:
        self.url = page.url

    def get(self, path: str) -> bytes:
        request = urllib.request.Request(f"{self.url}api/v0.2/{path}", headers={"Accept": "application/octet-stream"})
        return bytes(urllib.request.urlopen(request, timeout=60).read())

    def json(self, path: str) -> Any:
        return json.loads(self.get(path))

    def table(self, path: str) -> dict[Any, Any]:
        return decode_matrix(self.get(path))

    def values(self, index: str, gene: str) -> np.ndarray:
        asked = urllib.parse.quote(urllib.parse.quote(gene))
        (column,) = self.table(f"data/var?var:{index}={asked}").values()
        return np.asarray(column)

    def differences(self, first: list[int], second: list[int], n: int) -> list[list[float]]:
        asked = {
            "mode": "topN",
            "count": n,
            "set1": {"filter": {"obs": {"index": first}}},
            "set2": {"filter": {"obs": {"index": second}}},
        }
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        request = urllib.request.Request(f"{self.url}api/v0.2/diffexp/obs", json.dumps(asked).encode(), headers)
        found: list[list[float]] = json.loads(urllib.request.urlopen(request, timeout=120).read())
        return found


@pytest.fixture(scope="module", params=["dense", "sparse"])
def served(
    request: pytest.FixtureRequest, counts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ExplorerServer, ad.AnnData]]:
    """A real file served by cellxgene from what we wrote, dense or sparse, and the file as anndata reads it."""
    source = SCALED if request.param == "dense" else counts
    with serve(source, target=tmp_path_factory.mktemp(request.param) / "x.cxg", title="Cells") as page:
        assert inspect(page.path).layout == request.param
        yield page, ad.read_h5ad(source)


def test_it_knows_every_column_and_embedding(served: tuple[ExplorerServer, ad.AnnData]) -> None:
    """The schema has the shape, each column with its type and its categories in their order, and each embedding."""
    page, want = served
    schema = Client(page).json("schema")["schema"]
    assert (schema["dataframe"]["nObs"], schema["dataframe"]["nVar"]) == want.shape
    columns = {one["name"]: one for one in schema["annotations"]["obs"]["columns"]}
    for name, column in want.obs.items():
        if column.dtype == "category":
            assert columns[name]["type"] == "categorical"
            assert columns[name]["categories"] == column.cat.categories.tolist()
        else:
            expected = {"b": "boolean", "i": "int32", "f": "float32"}[column.dtype.kind]
            assert columns[name]["type"] == expected
    assert {one["name"] for one in schema["layout"]["obs"]} == {key.removeprefix("X_") for key in want.obsm}


def test_it_serves_the_same_cells_and_features(served: tuple[ExplorerServer, ad.AnnData]) -> None:
    """Every column of obs and var that it serves is that of the file, the index too."""
    page, want = served
    client = Client(page)
    schema = client.json("schema")["schema"]["annotations"]
    for axis, frame, names in (("obs", want.obs, want.obs_names), ("var", want.var, want.var_names)):
        index = schema[axis]["index"]
        got = client.table(f"annotations/{axis}")
        assert list(got[index]) == list(names)
        for name, column in frame.items():
            same_column(pd.Series(got[name]), column.reset_index(drop=True))


def test_it_serves_the_same_layouts(served: tuple[ExplorerServer, ad.AnnData]) -> None:
    """The first two coordinates of each embedding come as the server scales them into a square: by one factor, centred."""
    page, want = served
    got = Client(page).table("layout/obs")
    for key, values in want.obsm.items():
        name, places = key.removeprefix("X_"), np.asarray(values)[:, :2].astype(np.float64)
        span = np.ptp(places, axis=0)
        scaled = (places - places.min(axis=0)) / span.max() + 0.5 - span / span.max() / 2
        for i in range(2):
            np.testing.assert_allclose(got[f"{name}_{i}"], scaled[:, i], atol=2e-6)


def test_it_serves_the_same_values(served: tuple[ExplorerServer, ad.AnnData]) -> None:
    """The values of genes from the first to the last are those of the file, bit by bit."""
    page, want = served
    client = Client(page)
    index = client.json("schema")["schema"]["annotations"]["var"]["index"]
    x = dense(want.X).astype(np.float32)
    for i in (0, 1, 7, want.n_vars // 2, want.n_vars - 1):
        np.testing.assert_array_equal(client.values(index, want.var_names[i]), x[:, i])


def test_it_finds_the_same_differences(served: tuple[ExplorerServer, ad.AnnData]) -> None:
    """The genes that differ most between two groups of cells, and by how much, are those of the file."""
    page, want = served
    first, second = list(range(60)), list(range(80, 190))
    found = Client(page).differences(first, second, 10)
    x = dense(want.X).astype(np.float64)
    a, b = x[first], x[second]
    means = a.mean(axis=0), b.mean(axis=0)
    spread = [part.var(axis=0, ddof=1) / 60 for part in (a, b)]  # it divides both by the smaller group
    t = (means[0] - means[1]) / np.sqrt(np.maximum(sum(spread), 1e-300))
    freedom = sum(spread) ** 2 / np.maximum(spread[0] ** 2 / 59 + spread[1] ** 2 / 109, 1e-300)
    changes = np.log2(np.abs((means[0] + 1e-9) / (means[1] + 1e-9)))
    assert len(found) == 10
    ranked = np.sort(np.abs(t[np.abs(changes) > 0.01]))[::-1]
    for (gene, change, p, adjusted), score in zip(found, ranked, strict=False):
        i = int(gene)
        np.testing.assert_allclose(abs(t[i]), score, rtol=1e-3)
        np.testing.assert_allclose(change, changes[i], rtol=1e-3)
        np.testing.assert_allclose(p, 2 * stats.t.sf(abs(t[i]), freedom[i]), rtol=2e-2)
        np.testing.assert_allclose(adjusted, min(1, p * want.n_vars), rtol=1e-6)


def test_it_takes_our_colours(served: tuple[ExplorerServer, ad.AnnData]) -> None:
    """Colours of categories are those of the file, under the name of the column."""
    page, want = served
    got = Client(page).json("colors")
    for name in want.obs:
        if f"{name}_colors" in want.uns:
            labels = want.obs[name].cat.categories
            assert {k: v.lower() for k, v in got[name].items()} == {
                label: str(color)[:7].lower() for label, color in zip(labels, want.uns[f"{name}_colors"], strict=False)
            }


def test_three_runs_are_drawn(tmp_path: Path) -> None:
    """Three real 10x runs of different cells and genes: atlas, query, CXG of 0.3.0, served, and drawn in the real client.

    The client says that all cells are there, and each run's are seen in a colour of their own; it speaks with its server only.
    """
    image = pytest.importorskip("PIL.Image")
    if BROWSER is None:
        pytest.skip("no Chromium is installed; set CHROMIUM or install the package chromium")
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a.atlas"))
    runs = ["lung_C144.h5", "lung_C149.h5", "pbmc_10k_protein_v3.h5ad"]
    atlas.add([str(ROOT / "tests/data" / run) for run in runs], progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    newest = query.write(str(tmp_path / "newest.cxg"), compute_embedding="pca", var_index="symbol")
    assert inspect(newest).version == "0.3.0"
    assert [str(p) for p in validate(newest, "full") if p.level == "must"] == []
    with serve(newest, target=tmp_path / "served.cxg") as page, Browser(BROWSER, width=1300, height=800) as browser:
        browser.call("Page.navigate", url=page.url)
        wait_for(browser, "!!document.body && document.body.innerText.includes('700 out of 700 cells')")
        drawn = picture(image, browser, tmp_path / "black.png")
        assert (drawn.max(axis=2) < 60).sum() > 400
        wait_for(browser, f"!!{_COLOR_BY}")
        browser.run(f"{_COLOR_BY}.click()")
        drawn = picture(image, browser, tmp_path / "coloured.png")
        pixels, counts = np.unique(drawn.reshape(-1, 3), axis=0, return_counts=True)
        bright = np.ptp(pixels.astype(int), axis=1) > 60
        assert (counts[bright] > 30).sum() >= 3
        assert all(address.startswith((page.url, "data:", "about:")) for address in browser.requests)


_COLOR_BY = "document.querySelector('[data-testid=\"colorby-dataset\"]')"


def wait_for(browser: Browser, condition: str) -> None:
    deadline = time.monotonic() + 60
    while not browser.run(condition):
        assert time.monotonic() < deadline, (
            condition,
            browser.messages,
            browser.run("document.body.innerText"),
        )
        time.sleep(0.2)


def picture(image: Any, browser: Browser, path: Path) -> np.ndarray:
    """Give the middle of the page, where the cells are drawn, once it does not change any more."""
    before = None
    for _ in range(40):
        drawn = np.asarray(image.open(browser.picture(path)).convert("RGB"))[60:740, 380:920]
        if before is not None and (drawn == before).all() and (drawn.max(axis=2) < 250).sum() > 100:
            break
        before = drawn
        time.sleep(0.5)
    return drawn
