"""What a served page may ask for: comparisons, means, neighbours and labels, equal to the calls in Python; what is refused writes nothing."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raggedatlas as ra
from raggedatlas.errors import NotFoundError, QueryError
from raggedatlas.query.compare import CompareOptions
from raggedatlas.wings.viewer.analysis import pack_rows
from raggedatlas.wings.viewer.columns import read_column
from raggedatlas.wings.viewer.means import MOST_GROUPS, compute_means, groups_of
from raggedatlas.wings.viewer.scene import Scene, make_scene
from raggedatlas.wings.viewer.server import ViewerServer
from raggedatlas.wings.viewer.verbs import make_view, view, visualize

PBMC = Path(__file__).parents[2] / "data" / "pbmc68k_reduced.h5ad"


def make_atlas(folder: Path) -> ra.RaggedAtlas:
    """Make an atlas of a real file with two embeddings, and a snapshot."""
    atlas = ra.RaggedAtlas.create(str(folder / "blood.atlas"))
    atlas.add(PBMC, obs={"bulk_labels": "cell_type"}, embeddings=["X_umap", "X_pca"], progress=False)
    atlas.snapshot()
    return atlas


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> ra.RaggedAtlas:
    """An atlas that no test changes."""
    return make_atlas(tmp_path_factory.mktemp("analysis"))


@pytest.fixture(scope="module")
def scene(atlas: ra.RaggedAtlas) -> Scene:
    """Its cells."""
    return make_view(atlas, layer="raw")


@pytest.fixture(scope="module")
def server(scene: Scene) -> Iterator[ViewerServer]:
    """A server that writes nothing."""
    with ViewerServer(scene) as server:
        yield server


def ask(server: ViewerServer, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Post JSON as the page does."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request("POST", f"/{server.token}/{path}", data, sent)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if answer.status == 200 else text


def rows_of(scene: Scene, kind: str) -> Any:
    """Tell which points are of a type."""
    return np.array(scene.column("cell_type").values.to_pylist()) == kind


@pytest.mark.parametrize("method", ["t-test", "wilcoxon"])
def test_a_comparison_is_that_of_the_query(
    server: ViewerServer, scene: Scene, atlas: ra.RaggedAtlas, method: Any
) -> None:
    """All genes of the atlas are compared between the points that the page names, as `query.compare` does."""
    group, reference = rows_of(scene, "Dendritic"), rows_of(scene, "CD19+ B")
    body = {"scene": scene.key, "group": pack_rows(group), "reference": pack_rows(reference), "method": method}
    status, found = ask(server, "compare", body)
    assert status == 200
    query = atlas.checkout(1).query()
    wanted = query.compare({"cell_type": "Dendritic"}, {"cell_type": "CD19+ B"}, method=method, layer="raw")
    assert found["table"]["ids"] == wanted["names"].tolist()
    assert found["table"]["names"] == wanted["symbol"].tolist()
    for name in ("scores", "pvals", "pvals_adj", "pct_nz_group"):
        assert found["table"][name] == wanted[name].tolist()
    assert {name: found[name] for name in wanted.attrs["compare"]} == wanted.attrs["compare"]


def test_a_file_is_compared_as_an_atlas_of_it(atlas: ra.RaggedAtlas) -> None:
    """The page of a file compares all genes of the layer that it shows, with the numbers that an atlas of the file gives."""
    scene = make_view(PBMC, layer="raw")
    kinds = np.array(scene.column("bulk_labels").values.to_pylist())
    with ViewerServer(scene) as server:
        body = {"scene": scene.key, "group": pack_rows(kinds == "Dendritic"), "reference": pack_rows(kinds == "CD19+ B"), "method": "wilcoxon"}  # fmt: skip
        found = ask(server, "compare", body)[1]["table"]
    query = atlas.checkout(1).query()
    wanted = query.compare({"cell_type": "Dendritic"}, {"cell_type": "CD19+ B"}, method="wilcoxon", layer="raw")
    scores = dict(zip(found["names"], found["scores"], strict=True))
    assert scores == pytest.approx(dict(zip(wanted["names"], wanted["scores"], strict=True)))


def test_counts_of_a_file_are_normalized(tmp_path: Path) -> None:
    """Whole numbers kept as floats, as files have them, are compared as log1p of counts per 10,000."""
    rng = np.random.default_rng(0)
    file = ad.AnnData(rng.poisson(2, (40, 6)).astype(np.float32), obsm={"X_umap": rng.normal(size=(40, 2))})
    scene = make_view(file)
    assert scene.genes is not None
    half = scene.ids.slice(0, 20), scene.ids.slice(20)
    table = scene.genes.compare(*half, CompareOptions())  # type: ignore[attr-defined]
    assert table.attrs["compare"]["values"] == "log1p of X per 10,000"
    values = np.log1p(file.X / file.X.sum(axis=1, keepdims=True) * 1e4)
    rows = [file.obs_names.get_indexer(ids.to_pylist()) for ids in half]
    stats = pytest.importorskip("scipy.stats")
    score = stats.ttest_ind(values[rows[0], 3], values[rows[1], 3], equal_var=False).statistic
    assert float(table.set_index("names").loc["3", "scores"]) == pytest.approx(score, rel=1e-4)


def test_means_are_those_of_aggregate(server: ViewerServer, scene: Scene, atlas: ra.RaggedAtlas) -> None:
    """By a column, and by sets of points that may overlap, the page gets what the query adds up."""
    genes = ["LYZ", "CD79A", "NKG7"]
    query = atlas.checkout(1).query().layers("raw").features(genes)
    status, found = ask(server, "means", {"scene": scene.key, "genes": genes, "by": "cell_type"})
    assert status == 200
    wanted = query.aggregate("cell_type")
    order = [wanted.var["symbol"].tolist().index(gene) for gene in genes]
    assert sorted(found["groups"]) == sorted(wanted.obs_names)
    for name in ("mean", "count_nonzero", "n_measured"):
        table = dict(zip(found["groups"], found[name], strict=True))
        for group, row in zip(wanted.obs_names, wanted.layers[name][:, order], strict=True):
            assert table[group] == pytest.approx(row), name
    half = np.arange(scene.n) < scene.n // 2
    sets = [{"name": "B", "rows": pack_rows(rows_of(scene, "CD19+ B"))}, {"name": "half", "rows": pack_rows(half)}]
    found = ask(server, "means", {"scene": scene.key, "genes": genes, "sets": sets})[1]
    assert found["groups"] == ["B", "half"]
    assert found["mean"][0] == pytest.approx(wanted.layers["mean"][wanted.obs_names == "CD19+ B"][0, order])
    assert found["mean"][1] == pytest.approx([float(scene.gene(gene)[half].mean()) for gene in genes])


@given(
    st.lists(
        st.tuples(st.sampled_from(["B", "T", None]), st.sampled_from([0.0, 1.0, 2.5, np.nan])), min_size=1, max_size=30
    )
)
def test_means_are_of_the_points_that_have_a_value(cells: list[tuple[str | None, float]]) -> None:
    """As pandas groups them: points without a category last, NaN not counted, groups of NaN without a mean."""
    frame = pd.DataFrame(cells, columns=["type", "value"])
    column = read_column("type", pa.array([kind for kind, _ in cells]).dictionary_encode())
    assert column is not None
    genes = {"G": frame["value"].to_numpy(np.float32)}
    found = compute_means(genes, groups_of(column))
    groups = dict(list(frame["value"].groupby(frame["type"].fillna("missing"))))
    for i, name in enumerate(found["groups"]):
        own = groups[name]
        mean = None if own.isna().all() else pytest.approx(own.mean())
        assert (found["mean"][i], found["n_measured"][i]) == ([mean], [own.count()])
        assert found["count_nonzero"][i] == [int((own.dropna() != 0).sum())]
    assert len(found["groups"]) == len(groups)
    assert "missing" not in found["groups"][:-1]


def test_neighbours_are_the_nearest_elsewhere(server: ViewerServer, scene: Scene, atlas: ra.RaggedAtlas) -> None:
    """Each selected cell finds its k nearest among the points named, by an embedding that the map does not show."""
    group = rows_of(scene, "CD34+")
    among = ~group & ~rows_of(scene, "CD19+ B")
    body = {"scene": scene.key, "group": pack_rows(group), "among": pack_rows(among), "embedding": "pca", "k": 3}
    status, found = ask(server, "neighbors", body)
    assert status == 200
    assert scene.origin is not None
    ids, places = scene.origin.coordinates("pca")
    vectors = dict(zip(ids.to_pylist(), np.asarray(places, np.float64), strict=True))
    points = np.array([vectors[uid] for uid in scene.ids.to_pylist()])
    away = ((points[group][:, None] - points[None]) ** 2).sum(axis=2)
    away[:, ~among] = np.inf
    wanted = np.zeros(scene.n, bool)
    wanted[np.argsort(away, axis=1)[:, :3]] = True
    assert found["rows"] == pack_rows(wanted)
    assert found["n_asked"] == group.sum()
    assert found["elsewhere"] == {"uid": [], "dataset": [], "distance": []}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ra.RaggedAtlas:
    """An atlas of two datasets whose vectors can be compared, and a third of longer vectors."""
    folder, rng = tmp_path_factory.mktemp("pair"), np.random.default_rng(0)
    atlas = ra.RaggedAtlas.create(str(folder / "pair.atlas"))
    for name, n, width in (("here", 30, 4), ("there", 40, 4), ("wide", 20, 5)):
        obsm = {"X_umap": rng.normal(size=(n, 2)), "X_pca": rng.normal(size=(n, width))}
        file = ad.AnnData(rng.poisson(1, (n, 3)).astype(np.float32), obsm=obsm)
        file.obs_names, file.var_names = [f"{name}{i}" for i in range(n)], ["LYZ", "CD79A", "NKG7"]
        file.write_h5ad(folder / f"{name}.h5ad")
        atlas.add(folder / f"{name}.h5ad", embeddings=["X_umap", "X_pca"], progress=False)
    atlas.snapshot()
    return atlas


@pytest.mark.parametrize(("sampled", "other"), [(False, False), (True, False), (False, True)])
def test_neighbours_outside_the_page_are_those_of_brute_force(pair: ra.RaggedAtlas, sampled: bool, other: bool) -> None:
    """A page of one dataset, or of a sample of it, finds the nearest of all cells of the snapshot that have vectors of its length.

    Those that it shows are points, the others have uid, dataset and distance.
    """
    query = pair.checkout(1).query()
    scene = make_view(query.where({"dataset": "here"}), max_points=20 if sampled else 30)
    group = np.arange(scene.n) < 4
    among = np.zeros(scene.n, bool) if other else ~group
    body = {"scene": scene.key, "group": pack_rows(group), "among": pack_rows(among), "embedding": "pca", "k": 3, "other_datasets": other}  # fmt: skip
    with ViewerServer(scene) as server:
        status, found = ask(server, "neighbors", body)
    assert status == 200
    adata = query.where({"dataset": ["here", "there"]}).spaces("pca").to_anndata()
    vectors, uids = np.asarray(adata.X, np.float64), list(adata.obs_names)
    shown = scene.ids.to_pylist()
    own = [uids.index(uid) for uid in shown[:4]]
    away = ((vectors[own][:, None] - vectors[None]) ** 2).sum(axis=2)
    away[:, own] = np.inf
    if other:
        away[:, (adata.obs["dataset"] == "here").to_numpy()] = np.inf
    near = np.argsort(away, axis=1)[:, :3]
    wanted = {uids[row]: away[:, row].min() for row in np.unique(near)}
    assert found["rows"] == pack_rows(np.array([uid in wanted for uid in shown]))
    elsewhere = found["elsewhere"]
    outside = sorted((distance, uid) for uid, distance in wanted.items() if uid not in shown)
    assert elsewhere["uid"] == [uid for _, uid in outside]
    assert elsewhere["distance"] == pytest.approx([distance for distance, _ in outside])
    assert elsewhere["dataset"] == adata.obs["dataset"][elsewhere["uid"]].tolist()
    assert "there" in elsewhere["dataset"]


def test_neighbours_of_a_file_are_among_its_points() -> None:
    """The page of a file, or a sample of one, has no cells elsewhere."""
    scene = make_view(PBMC, max_points=50)
    group = np.arange(scene.n) < 2
    body = {
        "scene": scene.key,
        "group": pack_rows(group),
        "among": pack_rows(~group),
        "embedding": "obsm/X_pca",
        "k": 3,
    }
    with ViewerServer(scene) as server:
        status, found = ask(server, "neighbors", body)
    assert (status, found["elsewhere"]) == (200, None), found
    assert found["rows"] != pack_rows(np.zeros(scene.n, bool))


def test_a_label_is_an_annotation_with_its_origin(tmp_path: Path) -> None:
    """With the flag a label goes into the atlas: the cells of the points have it after the next snapshot, and its record names the snapshot shown."""
    atlas = make_atlas(tmp_path)
    with view(atlas, browser=False, allow_annotate=True) as server:
        scene = make_view(atlas)
        group = rows_of(scene, "Dendritic")
        body = {"scene": scene.key, "group": pack_rows(group), "column": "mine", "label": "my cells"}
        assert ask(server, "annotate", body)[0] == 200
        other = {**body, "label": "others"}
        status, why = ask(server, "annotate", other)
        assert status == 400
        assert "have another value of 'mine' already" in why
        assert ask(server, "annotate", {**other, "on_conflict": "replace"})[0] == 200
        assert ask(server, "annotate", body | {"group": pack_rows(~group), "label": "rest"})[0] == 200
        counted = atlas.checkout(atlas.snapshot()).query().count("mine")
        assert counted.to_dict() == {"others": int(group.sum()), "rest": int((~group).sum())}
        assert set(atlas.annotations()["snapshot"]) == {1}
        # the atlas has gone on, and the page has not
        status, why = ask(server, "annotate", body | {"label": "late"})
        assert (status, why) == (
            400,
            "This page shows snapshot 1, and the atlas has snapshot 2; start the server again, then label.",
        )
    assert len(atlas.annotations()) == 3


def bodies(scene: Scene) -> dict[str, Any]:
    """Give a request of each kind that would be answered."""
    group, rest = rows_of(scene, "Dendritic"), ~rows_of(scene, "Dendritic")
    sets = {"scene": scene.key, "group": pack_rows(group), "reference": pack_rows(rest), "among": pack_rows(rest)}
    return {
        "compare": {**sets, "method": "t-test"},
        "means": {"scene": scene.key, "genes": ["LYZ"], "by": "cell_type"},
        "neighbors": {**sets, "embedding": "pca", "k": 2},
        "annotate": {**sets, "column": "mine", "label": "x"},
    }


REFUSED: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("another atlas", "compare", {"scene": "0123456789abcdef"}, 400, "other cells than its server"),
    ("another atlas, label", "annotate", {"scene": "0123456789abcdef"}, 400, "other cells than its server"),
    ("no flag", "annotate", {}, 403, "start it with allow_annotate=True"),
    ("short set", "compare", {"group": "AA=="}, 400, "group is no set of the 300 points"),
    ("no base64", "compare", {"group": "<>"}, 400, "group is no set"),
    ("number as set", "compare", {"group": 7}, 400, "group is no set"),
    ("method", "compare", {"method": "logreg"}, 400, "knows the methods"),
    ("same cells", "compare", {"reference": None}, 400, "reference is no set"),
    ("cells on both sides", "compare", {"reference": pack_rows(np.ones(300, bool))}, 400, "cells are in both sets"),
    ("no gene", "means", {"genes": []}, 400, "genes is a list of 1 to 200 names"),
    ("unknown gene", "means", {"genes": ["LYZ", "NOGENE"]}, 400, "'NOGENE'"),
    ("unknown column", "means", {"by": "nothing"}, 400, "no column 'nothing'"),
    ("texts", "means", {"by": "cell_name"}, 400, f"at most {MOST_GROUPS} categories"),
    ("sets", "means", {"sets": ["AA=="]}, 400, "sets is a list of at most 64"),
    ("short set of means", "means", {"sets": [{"name": "x", "rows": "AA=="}]}, 400, "rows is no set of the 300 points"),
    ("k", "neighbors", {"k": 10_000}, 400, "1 to 200"),
    ("k as text", "neighbors", {"k": "2"}, 400, "1 to 200"),
    ("embedding", "neighbors", {"embedding": "nothing"}, 400, "no embedding 'nothing'"),
    ("path", "delete", {}, 404, "Not found"),
]


@pytest.mark.parametrize(
    ("path", "change", "status", "why"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_what_is_refused_writes_nothing(
    server: ViewerServer, scene: Scene, atlas: ra.RaggedAtlas, path: str, change: dict[str, Any], status: int, why: str
) -> None:
    """One clear line for each way to be wrong, and no annotation."""
    found, text = ask(server, path, {**bodies(scene).get(path, {"scene": scene.key}), **change})
    assert found == status
    assert why in text
    assert "\n" not in text
    assert len(atlas.annotations()) == 0


def test_only_json_of_the_page_itself_is_read(server: ViewerServer, scene: Scene) -> None:
    """Another type, another site's page, too many bytes, no object and a wrong token are refused."""
    body = bodies(scene)["compare"]
    assert ask(server, "compare", body, Content_Type="text/plain")[0] == 415
    assert ask(server, "compare", body, Origin="http://evil.example")[0] == 415
    assert ask(server, "compare", body, Origin=f"http://127.0.0.1:{server.port}")[0] == 200
    assert ask(server, "compare", b"x" * 200_000)[0] == 413
    assert ask(server, "compare", b"[" * 50_000)[0] == 400
    assert ask(server, "compare", b"[1]") == (400, "The body of this request is no JSON object.")
    assert ask(server, "../compare", body)[0] in {403, 404}


def test_atlas_snapshot_query_and_file_are_shown_directly(atlas: ra.RaggedAtlas, tmp_path: Path) -> None:
    """Each is its own argument; the map is the first embedding called umap, and the points are the same."""
    whats = [atlas, atlas.checkout(1), atlas.checkout(1).query(), atlas.uri, Path(atlas.uri)]
    scenes = [make_view(what) for what in whats]
    assert {scene.key for scene in scenes} == {make_view("umap", atlas).key}
    assert {scene.look.title for scene in scenes} == {"blood"}
    file = make_view(str(PBMC))
    assert file.key == make_view(ad.read_h5ad(PBMC)).key == make_view("X_umap", PBMC).key
    assert visualize(PBMC, path=tmp_path / "x.html").is_file()
    bare = ad.AnnData(np.ones((3, 2), np.float32))
    with pytest.raises(NotFoundError, match="has no embedding to show"):
        make_view(bare)
    bare.obsm["X_pca"] = np.arange(15.0).reshape(3, 5)
    wide = make_view(bare)
    assert sorted(wide.coordinates.tolist()) == [[0.0, 1.0], [5.0, 6.0], [10.0, 11.0]]
    with pytest.raises(QueryError, match="no folder of results, no atlas and no file"):
        make_view(tmp_path / "nothing")


def test_labels_need_an_atlas() -> None:
    """A file, or points alone, cannot be annotated: refused before anything is served."""
    for scene in (make_view(PBMC), make_scene(["a"], [[0, 1]])):
        with pytest.raises(QueryError, match="allow_annotate=True"):
            ViewerServer(scene, allow_annotate=True)
