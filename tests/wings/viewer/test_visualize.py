"""The verbs visualize and view: results and embeddings joined with an atlas by uid, files of every kind, refusals, the command."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse as sp
from pyarrow import parquet
from tests.command import ask, done, refused

import raggedatlas as ra
from raggedatlas.catalog.catalog import CELLS as CELL_TABLE
from raggedatlas.errors import DuplicateError, FeatureError, NotFoundError, QueryError, StoreError
from raggedatlas.wings.results.data_request import HyraxDataset
from raggedatlas.wings.results.dataset import ResultDataset
from raggedatlas.wings.results.writer import ResultDatasetWriter
from raggedatlas.wings.viewer.exports import CELLS, CONFIG
from raggedatlas.wings.viewer.scene import Look, make_scene, match_ids
from raggedatlas.wings.viewer.sources import FileCells
from raggedatlas.wings.viewer.verbs import make_view, view, visualize

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '(future.infer_string|mode.chained_assignment)' option:DeprecationWarning"
)

N = 40
GENES = ["CD3D", "MS4A1", "LYZ"]


def donor_file(seed: int, genes: list[str], colors: list[str]) -> ad.AnnData:
    """Make a dataset with counts, a map, and categories with colours of their own."""
    rng = np.random.default_rng(seed)
    kind = pd.Categorical(rng.choice(["B", "T"], N), categories=["B", "T"])
    adata = ad.AnnData(
        X=rng.poisson(2, (N, len(genes))).astype(np.float32),
        obs=pd.DataFrame(
            {"cell_type": kind, "n_genes": rng.random(N)},
            index=pd.Index([f"cell{seed}-{i}" for i in range(N)], dtype=object),
        ),
        var=pd.DataFrame(index=pd.Index(genes, dtype=object)),
        obsm={"X_umap": rng.normal(size=(N, 2)).astype(np.float32)},
    )
    adata.uns["cell_type_colors"] = np.array(colors, dtype=object)
    return adata


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A view of an atlas of two datasets with different genes, and a column of vectors that one lacks."""
    atlas = ra.RaggedAtlas.create(str(tmp_path_factory.mktemp("viewer") / "blood.atlas"))
    with warnings.catch_warnings(action="ignore"):
        atlas.add(
            donor_file(1, GENES, ["#ff0000", "#00ff00ff"]),
            "one",
            embeddings=["X_umap"],
            organism="human",
            progress=False,
        )
        atlas.add(donor_file(2, GENES[:2], ["#0000ff", "blue"]), "two", organism="human", progress=False)
    return atlas.checkout(atlas.snapshot())


@pytest.fixture
def results(snapshot: Any, tmp_path: Path) -> ResultDataset:
    """Places of every cell of dataset one but the last three, and of two strangers, in another order; x is known by uid."""
    frame = snapshot.query().where({"dataset": "one"}).to_pandas()
    uids = [*frame.index[:-3], "stranger-1", "stranger-2"]
    order = np.random.default_rng(5).permutation(len(uids))
    with ResultDatasetWriter(tmp_path / "results") as writer:
        writer.write_batch([uids[i] for i in order], np.array([[place_of(uids[i]), 1.0] for i in order], np.float32))
    return ResultDataset({}, tmp_path / "results")


def place_of(uid: str) -> float:
    """Give a place that follows from the uid."""
    return float(sum(map(ord, uid)))


@pytest.mark.long
def test_results_join_cells_by_uid(snapshot: Any, results: ResultDataset) -> None:
    """Whatever the order of results: each cell stands at its own place with its own metadata, gene and colour."""
    query = snapshot.query()
    scene = make_view(results, query)
    frame = query.to_pandas()
    assert scene.n == N - 3
    assert scene.notes == (
        f"{N + 3} of {2 * N} chosen cells have no result.",
        f"2 of {N - 1} results are of cells that are not among the chosen.",
    )
    types = scene.column("cell_type").values.to_pylist()
    adata = query.features("LYZ").missing("nan").to_anndata()
    values = dict(zip(adata.obs_names, np.asarray(adata.X.todense()).ravel(), strict=True))
    for uid, place, kind, gene in zip(scene.ids.to_pylist(), scene.coordinates, types, scene.gene("LYZ"), strict=True):
        assert place.tolist() == [place_of(uid), 1.0]
        assert kind == frame.loc[uid, "cell_type"]
        assert gene == values[uid]


def test_a_query_narrows_what_is_shown(snapshot: Any, results: ResultDataset) -> None:
    """Only the cells that a query chooses are shown."""
    query = snapshot.query().where({"cell_type": "B"})
    scene = make_view(results, query)
    assert set(scene.column("cell_type").values.to_pylist()) == {"B"}
    assert set(scene.ids.to_pylist()) < set(query.to_pandas().index)


def test_colours_are_those_of_the_files(snapshot: Any, results: ResultDataset) -> None:
    """Categories take the colours that the first file names; a caller's come before; what is no hex colour is passed over."""
    assert make_view(results, snapshot).column("cell_type").colors == {"B": "#ff0000", "T": "#00ff00"}
    mine = {"cell_type": {"T": "#123456"}}
    assert make_view(results, snapshot, colors=mine).column("cell_type").colors == {"B": "#ff0000", "T": "#123456"}
    only_two = snapshot.query().where({"dataset": "two"})
    uids = only_two.to_pandas().index
    shown = make_scene(uids, np.zeros((N, 2)), only_two.to_arrow())
    assert shown.column("cell_type").colors == {}


def test_a_gene_that_a_dataset_did_not_measure_is_missing(snapshot: Any) -> None:
    """Cells whose dataset lacks a gene have NaN and not zero."""
    scene = make_view("umap", snapshot)
    assert np.isfinite(scene.gene("LYZ")).all()
    other = snapshot.query().where({"dataset": "two"}).to_pandas().index
    uids = snapshot.query().to_pandas().index
    both = make_scene(uids, np.zeros((2 * N, 2)), genes=scene.genes)
    assert [bool(np.isnan(v)) for v in both.gene("LYZ")] == [uid in set(other) for uid in both.ids.to_pylist()]
    with pytest.raises(FeatureError, match="NOGENE"):
        both.gene("NOGENE")


def test_an_embedding_of_the_atlas_is_shown(snapshot: Any) -> None:
    """A feature space without features is a map by its name; cells without a vector are counted."""
    scene = make_view("umap", snapshot, title="Blood")
    adata = snapshot.query().spaces("umap").to_anndata()
    places = dict(zip(adata.obs_names, np.asarray(adata.X).tolist(), strict=True))
    assert {uid: place.tolist() for uid, place in zip(scene.ids.to_pylist(), scene.coordinates, strict=True)} == places
    assert scene.notes == (f"{N} of {2 * N} chosen cells are not in umap.",)
    assert (scene.look.title, scene.look.subtitle) == ("Blood", "snapshot 1")


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A view of an atlas of a file with normalized values in X and counts in raw, into which a map was put back."""
    folder = tmp_path_factory.mktemp("layered")
    file = donor_file(3, GENES, ["#ff0000", "#00ff00"])
    file.raw = file.copy()
    file.X = np.log1p(file.X)
    del file.obsm["X_umap"]
    atlas = ra.RaggedAtlas.create(str(folder / "blood.atlas"))
    with warnings.catch_warnings(action="ignore"):
        atlas.add(file, "one", organism="human", progress=False)
    uids = list(atlas.checkout(atlas.snapshot()).query().to_pandas().index)
    with ResultDatasetWriter(folder / "map") as writer:
        writer.write_batch(uids, np.column_stack([np.arange(N), np.arange(N)]).astype(np.float32))
    atlas.add(ResultDataset({}, folder / "map"), "map", space="embedding")
    atlas.add(ResultDataset({}, folder / "map"), "held", as_="vector")
    return atlas.checkout(atlas.snapshot())


@pytest.mark.long
@pytest.mark.parametrize("name", ["map", "held"])
def test_a_layer_is_of_genes_only(name: str, layered: Any) -> None:
    """A result in the atlas is coloured by a gene of any layer, named by `layer` or by the query, in the same places."""
    query = layered.query()
    for layer in ("X", "counts"):
        adata = query.features("LYZ").layers(layer).to_anndata()
        values = dict(zip(adata.obs_names, np.asarray(adata.X.todense()).ravel(), strict=True))
        for scene in (
            make_view(name, layered, color="LYZ", layer=layer),
            make_view(name, query.layers(layer), color="LYZ"),
            make_view(name, query.layers(layer).features("CD3D").join("intersection"), color="LYZ"),
        ):
            assert dict(zip(scene.ids.to_pylist(), scene.gene("LYZ").tolist(), strict=True)) == values
            places = dict(zip(scene.ids.to_pylist(), scene.coordinates[:, 0].tolist(), strict=True))
            assert [places[uid] for uid in adata.obs_names] == list(range(N))
    usual, counts = make_view(name, layered).gene("LYZ"), make_view(name, layered, layer="counts").gene("LYZ")
    assert np.array_equal(usual, counts)


def test_the_command_colours_a_result_by_a_layer(layered: Any, tmp_path: Path) -> None:
    """``visualize ... --color GENE --layer X`` writes the page; a layer that no dataset has is refused with those there are."""
    words = ["visualize", layered.uri, "map", "--color", "LYZ", "-o", str(tmp_path / "x.html")]
    done(*words, "--layer", "X")
    said = refused(*words, "--layer", "spliced", "--overwrite")
    assert "['counts', 'X']" in said or "['X', 'counts']" in said


@pytest.mark.long
@pytest.mark.parametrize("form", ["h5ad", "zarr", "object", "csc"])
def test_a_file_is_shown_as_its_atlas_would_be(form: str, tmp_path: Path) -> None:
    """Coordinates, metadata, colours and genes of every layer of a file are those that an atlas of it shows."""
    file = donor_file(4, GENES, ["#ff0000", "#00ff00"])
    file.raw = file.copy()
    file.X = sp.csc_matrix(np.log1p(file.X)) if form == "csc" else np.log1p(file.X)
    path = tmp_path / f"cells.{'zarr' if form == 'zarr' else 'h5ad'}"
    atlas = ra.RaggedAtlas.create(str(tmp_path / "blood.atlas"))
    with warnings.catch_warnings(action="ignore"):
        (file.write_zarr if form == "zarr" else file.write_h5ad)(path)
        atlas.add(path, "one", organism="human", progress=False, embeddings=["X_umap"])
    expected = make_view("umap", atlas.checkout(atlas.snapshot()), layer="X")
    names = dict(zip(*cell_names(atlas), strict=True))
    for name in ("umap", "X_umap", "obsm/X_umap"):
        shown = make_view(name, file if form == "object" else path)
        order = match_ids(pa.array([names[uid] for uid in expected.ids.to_pylist()]), shown.ids)
        assert np.array_equal(shown.coordinates[order], expected.coordinates)
        ours, theirs = shown.column("cell_type"), expected.column("cell_type")
        assert ours.values.take(pa.array(order)).to_pylist() == theirs.values.to_pylist()
        assert ours.colors == theirs.colors == {"B": "#ff0000", "T": "#00ff00"}
        assert np.array_equal(shown.gene("LYZ")[order], expected.gene("LYZ"))
        ours, theirs = (scene.read_genes(["LYZ", "CD3D"]) for scene in (shown, expected))
        assert list(ours) == list(theirs) == ["LYZ", "CD3D"]
        assert np.array_equal(np.stack([*ours.values()])[:, order], np.stack([*theirs.values()]))
    raw = make_view("umap", path, layer="raw").gene("LYZ")
    assert np.array_equal(np.log1p(raw)[order], expected.gene("LYZ"))


def test_genes_of_several_modalities_are_read_at_once() -> None:
    """In the order asked for, each missing for the cells that its modality lacks, as when it is read alone."""
    mudata = pytest.importorskip("mudata")
    rna, adt = donor_file(6, GENES, ["#ff0000", "#00ff00"]), donor_file(7, ["CD3", "CD19"], ["#ff0000", "#00ff00"])
    adt.obs_names = rna.obs_names
    with warnings.catch_warnings(action="ignore"):
        both = mudata.MuData({"rna": rna[: N - 5].copy(), "adt": adt[5:].copy()})
    scene = make_view("mod/rna/obsm/X_umap", both)
    found = scene.read_genes(["CD19", "LYZ", "CD3"])
    assert list(found) == ["CD19", "LYZ", "CD3"]
    at = {name: i for i, name in enumerate(rna.obs_names)}
    rows = [at[name] for name in scene.ids.to_pylist()]
    assert found["LYZ"].tolist() == rna.X[rows, 2].tolist()
    for column, name in enumerate(["CD3", "CD19"]):
        wanted = [adt.X[row, column] if row >= 5 else np.nan for row in rows]
        np.testing.assert_array_equal(found[name], np.array(wanted, np.float32))
        np.testing.assert_array_equal(found[name], scene.gene(name))


def cell_names(atlas: Any) -> tuple[list[str], list[str]]:
    """Give the uids of all cells and what their files call them."""
    table = atlas.checkout(1).query().to_arrow()
    return table.column("uid").to_pylist(), table.column("cell_name").to_pylist()


def test_results_are_joined_with_a_file_by_the_names_of_its_cells(tmp_path: Path) -> None:
    """Results whose ids are names of `obs` are shown with the metadata and genes of the file."""
    file = donor_file(5, GENES, ["#ff0000", "#00ff00"])
    with ResultDatasetWriter(tmp_path / "map") as writer:
        writer.write_batch(list(file.obs_names[::-1]), np.column_stack([np.arange(N), np.arange(N)]).astype(np.float32))
    scene = make_view(tmp_path / "map", file)
    at = [list(file.obs_names).index(name) for name in scene.ids.to_pylist()]
    assert scene.coordinates[:, 0].tolist() == [N - 1 - i for i in at]
    assert scene.column("cell_type").values.to_pylist() == file.obs["cell_type"].iloc[at].tolist()
    assert scene.gene("MS4A1").tolist() == file.X[at, 1].tolist()


def test_an_atlas_is_shown_by_its_address(snapshot: Any) -> None:
    """The path of an atlas means its newest snapshot."""
    assert make_view("umap", snapshot.uri).ids.equals(make_view("umap", snapshot).ids)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["umap", "--color", "LYZ"], ""),
        ([], ""),
        (["tsne"], "has no embedding 'tsne'; it has ['obsm/X_umap']"),
        (["umap", "--color", "LYX"], "no gene 'LYX'"),
        (["umap", "--layer", "spliced"], "--layer has no effect without --gene or --color"),
        (["umap", "--layer", "spliced", "--gene", GENES[0]], "no layer 'spliced' of genes; there are ['X']"),
        (["umap", "--where", "n_genes > 1"], "--where"),
        (["umap", "--at", "1"], "a file has no snapshots"),
    ],
)
def test_the_command_shows_a_file(words: list[str], said: str, tmp_path: Path) -> None:
    """``visualize`` takes a file in the place of an atlas; refusals are one line that names what there is, and write nothing."""
    with warnings.catch_warnings(action="ignore"):
        donor_file(1, GENES, ["#ff0000", "#00ff00"]).write_h5ad(tmp_path / "cells.h5ad")
    out = tmp_path / "x.html"
    done = ask("visualize", str(tmp_path / "cells.h5ad"), *words, "-o", out)
    assert said in done.stderr
    assert (done.exit_code == 0) == out.exists() == (said == "")
    assert done.stderr.count("\n") <= 1


@pytest.mark.long
def test_the_command_adds_embeddings(tmp_path: Path) -> None:
    """What ``add --embedding`` names can be viewed, as the help of view shows."""
    with warnings.catch_warnings(action="ignore"):
        donor_file(1, GENES, ["#ff0000", "#00ff00"]).write_h5ad(tmp_path / "cells.h5ad")
    place = str(tmp_path / "a.atlas")
    for words in (["create", place], ["add", place, str(tmp_path / "cells.h5ad"), "--embedding", "X_umap=map"], ["snapshot", place],
                  ["visualize", place, "map", "-o", str(tmp_path / "x.html")]):  # fmt: skip
        done(*words)


def test_an_embedding_that_nobody_named_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the default embedding the first two dimensions are shown if it has more than three; it is read a single time."""
    adata = donor_file(1, GENES, ["#ff0000", "#00ff00"])
    adata.obsm = {"X_pca": np.arange(4.0 * N).reshape(N, 4)}
    adata.write_h5ad(tmp_path / "x.h5ad")
    read = FileCells.coordinates
    calls: list[str] = []
    monkeypatch.setattr(FileCells, "coordinates", lambda self, name: (calls.append(name), read(self, name))[1])
    scene = make_view(tmp_path / "x.h5ad")
    assert len(calls) == 1
    assert sorted(scene.coordinates.tolist()) == adata.obsm["X_pca"][:, :2].tolist()
    with pytest.raises(QueryError, match="has 4 dimensions"):
        make_view("X_pca", tmp_path / "x.h5ad")


@pytest.mark.parametrize("verb", [["info"], ["ls"], ["create"], ["query", "-o", "x.h5ad"]])
def test_a_file_is_not_opened_as_an_atlas(verb: list[str], tmp_path: Path) -> None:
    """A verb of an atlas says that a file is none, not what a library could not do inside of it."""
    (tmp_path / "cells.h5ad").write_bytes(b"")
    assert "is a file, and an atlas is a folder" in refused(verb[0], tmp_path / "cells.h5ad", *verb[1:])


def test_a_column_of_vectors_is_shown(tmp_path: Path) -> None:
    """Vectors in the cell table are places by the column's name; cells without one are counted, three numbers are projected."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "vectors.atlas"))
    with warnings.catch_warnings(action="ignore"):
        atlas.add(donor_file(1, GENES, ["#ff0000", "#00ff00"]), "one", organism="human", progress=False)
    tables = atlas._catalog.tables
    uids = tables.read(CELL_TABLE, ["uid"]).column("uid").combine_chunks()[3:]
    flat = np.column_stack([np.arange(len(uids)), np.zeros(len(uids)), np.full(len(uids), 7)]).astype(np.float32)
    vectors = pa.FixedSizeListArray.from_arrays(flat.ravel(), 3)
    tables.open(CELL_TABLE).merge(pa.table({"uid": uids, "place": vectors}), "uid")
    scene = make_view("place", atlas.checkout(atlas.snapshot()))
    middle = (len(uids) - 1) / 2
    places = {uid: float(x) for uid, (x, _) in zip(scene.ids.to_pylist(), scene.coordinates.tolist(), strict=True)}
    assert places == {uid.as_py(): i - middle for i, uid in enumerate(uids)}
    assert scene.notes == (f"3 of {N} chosen cells are not in place.",)
    with ResultDatasetWriter(tmp_path / "run") as writer:
        writer.write_batch(uids.to_pylist(), flat)
    scene = make_view(tmp_path / "run", atlas.checkout(atlas.snapshot()))
    assert scene.notes == (f"3 of {N} chosen cells have no result.",)


def test_genes_are_found_by_name(snapshot: Any) -> None:
    """Search takes a part of a name in either case, those that begin with it first."""
    genes = make_view("umap", snapshot).genes
    assert genes is not None
    assert genes.find("d3", 5) == [("CD3D", "")]
    assert genes.find("l", 1) == [("LYZ", "")]
    assert genes.find("nothing", 5) == []


def test_lance_results_alone_are_refused_by_their_class_and_the_verb(results: ResultDataset, tmp_path: Path) -> None:
    """C57, R5, X13: results in Lance hold no metadata; class and verb say so, and the way out."""
    for call in (results.visualize, lambda: visualize(results, path=tmp_path / "x.html"), lambda: visualize(tmp_path / "results", path=tmp_path / "x.html")):  # fmt: skip
        with pytest.raises(QueryError, match=r"contain no metadata.*raggedatlas view"):
            call()
    assert not (tmp_path / "x.html").exists()


def npy_folder(folder: Path) -> None:
    """Write results of two objects as runs did before Lance."""
    dtype = np.dtype([("id", "<U2"), ("tensor", "<f4", (2,))])
    np.save(folder / "batch_0.npy", np.array([("b", (1, 2)), ("a", (3, 4))], dtype))
    index = np.array([("a", 0), ("b", 0)], [("id", "<U2"), ("batch_num", "<i8")])
    np.save(folder / "batch_index.npy", index)


@pytest.mark.filterwarnings("ignore:InferenceDataSet:DeprecationWarning")
def test_npy_results_are_shown_without_an_atlas(tmp_path: Path) -> None:
    """C57: .npy results are shown as they were; without their original dataset the page says that it has no metadata."""
    npy_folder(tmp_path)
    scene = make_view(tmp_path)
    places = {one: place.tolist() for one, place in zip(scene.ids.to_pylist(), scene.coordinates, strict=True)}
    assert places == {"a": [3, 4], "b": [1, 2]}
    assert scene.notes[0].startswith("Without metadata: ")
    assert visualize(tmp_path, path=tmp_path / "x.html").stat().st_size > 100_000


@pytest.mark.filterwarnings("ignore:InferenceDataSet:DeprecationWarning")
@pytest.mark.parametrize("records", [True, False])
def test_npy_results_are_shown_with_the_metadata_of_their_dataset(records: bool, tmp_path: Path) -> None:
    """C57: where the original dataset can be made again, its metadata are joined by id, in records or as values alone."""

    class Sky(HyraxDataset):
        ranks: ClassVar = {"b": 2, "x": 7, "a": 1}

        def __init__(self, config: Any, data_location: Any) -> None:
            super().__init__(config)

        def __len__(self) -> int:
            return len(self.ranks)

        def ids(self) -> list[str]:
            return list(self.ranks)

        def metadata_fields(self) -> list[str]:
            return ["rank"]

        def metadata(self, idxs: list[int], fields: list[str]) -> Any:
            values = np.array(list(self.ranks.values()))[idxs]
            return values.astype([(fields[0], np.int64)]) if records else values

    npy_folder(tmp_path)
    (tmp_path / "original_dataset_config.toml").write_text("[data_set]\nname = 'Sky'\n")
    scene = make_view(tmp_path)
    ranks = scene.column("rank").values.to_pylist()
    assert dict(zip(scene.ids.to_pylist(), ranks, strict=True)) == {"a": 1, "b": 2}
    assert scene.notes == ()


REFUSED: list[tuple[str, type[Exception], Callable[[Any, ResultDataset, Path], Any]]] = [
    ("ends in '.pdf'", QueryError, lambda s, r, p: visualize(r, s, path=p / "x.pdf")),
    ("no embedding 'tsne'; it has \\['umap'", NotFoundError, lambda s, r, p: visualize("tsne", s, path=p / "x.html")),
    ("name the atlas or the file too", QueryError, lambda s, r, p: visualize("umap", path=p / "x.html")),
    (
        "color='nothing'|NOGENE|nothing",
        Exception,
        lambda s, r, p: visualize("umap", s, path=p / "x.html", color="nothing"),
    ),
    ("no choice 'colour'", QueryError, lambda s, r, p: visualize("umap", s, path=p / "x.html", colour="cell_type")),
    ("layer='X'", QueryError, lambda s, r, p: visualize(p / "results", path=p / "x.html", layer="X", genes=["a"])),
    ("No dataset has", NotFoundError, lambda s, r, p: visualize("umap", s, path=p / "x.html", layer="Y", genes=["a"])),
    ("theme='blue'", QueryError, lambda s, r, p: visualize("umap", s, path=p / "x.html", theme="blue")),
    ("shows one gene", QueryError, lambda s, r, p: visualize("umap", s, path=p / "x.png", genes=["CD3D"])),
    ("takes neither", QueryError, lambda s, r, p: visualize(make_view("umap", s), s, path=p / "x.html")),
    (
        "is the uid of one of",
        QueryError,
        lambda s, r, p: visualize(r, s.query().where({"dataset": "two"}), path=p / "x.html"),
    ),
]


@pytest.mark.parametrize(("message", "kind", "call"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refusals(
    message: str, kind: type[Exception], call: Callable[..., Any], snapshot: Any, results: ResultDataset, tmp_path: Path
) -> None:
    """Each says what is wrong, and leaves no file."""
    with pytest.raises(kind, match=message):
        call(snapshot, results, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_parquet_has_what_embedding_atlas_reads(snapshot: Any, tmp_path: Path) -> None:
    """One row per cell with id, x and y; categories as texts, missing genes as nulls; names that differ in case only are parted."""
    scene = make_view("umap", snapshot)
    table = parquet.read_table(visualize(scene, path=tmp_path / "x.parquet", genes=["LYZ"]))
    assert table.column_names[:3] == ["id", "x", "y"]
    assert table.column("id").to_pylist() == scene.ids.to_pylist()
    assert np.array_equal(np.column_stack([table.column("x"), table.column("y")]), scene.coordinates)
    assert pa.types.is_string(table.schema.field("cell_type").type)
    assert table.column("LYZ").to_pylist() == scene.gene("LYZ").tolist()
    clash = make_scene(["a"], [[0, 1]], pa.table({"uid": ["a"], "X": [1.0], "obs:x": [2.0]}))
    assert parquet.read_table(visualize(clash, path=tmp_path / "y.parquet")).column_names == ["id", "x", "y", "obs:X", "obs:obs:x"]  # fmt: skip
    with pytest.raises(DuplicateError, match="exists"):
        visualize(clash, path=tmp_path / "y.parquet")


@pytest.mark.long
def test_vitessce_folder_is_what_its_configuration_says(snapshot: Any, tmp_path: Path) -> None:
    """Every path that the configuration names is in the AnnData-Zarr beside it, with the cells' places, sets and genes."""
    scene = make_view("umap", snapshot)
    folder = visualize(scene, path=tmp_path / "x.vitessce", genes=["LYZ", "CD3D"])
    config = json.loads((folder / CONFIG).read_text("utf-8"))
    file = config["datasets"][0]["files"][0]
    assert (file["fileType"], file["url"]) == ("anndata.zarr", f"http://localhost:8000/{CELLS}")
    colors = {tuple(one["path"]): one["color"] for one in config["coordinationSpace"]["obsSetColor"]["A"]}
    assert (colors["cell_type", "B"], colors["cell_type", "T"]) == ([255, 0, 0], [0, 255, 0])
    assert all(view["coordinationScopes"]["obsSetColor"] == "A" for view in config["layout"])
    with warnings.catch_warnings(action="ignore"):
        adata = ad.read_zarr(folder / CELLS)
    assert adata.obs_names.tolist() == scene.ids.to_pylist()
    assert np.array_equal(
        adata.obsm[file["options"]["obsEmbedding"][0]["path"].removeprefix("obsm/")], scene.coordinates
    )
    for named in file["options"]["obsSets"]:
        assert (
            adata.obs[named["path"].removeprefix("obs/")].astype(str).tolist()
            == scene.column(named["name"]).values.to_pylist()
        )
    assert np.array_equal(adata.X[:, 0], scene.gene("LYZ"))
    assert adata.var_names.tolist() == ["LYZ", "CD3D"]
    visualize(make_view("umap", snapshot), path=folder, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"x.vitessce"}


def test_vitessce_folder_tells_which_values_are_no_measurements(snapshot: Any, tmp_path: Path) -> None:
    """Vitessce knows no missing values: those of genes that a dataset did not measure are 0, and the folder and a warning say so."""
    uids = snapshot.query().to_pandas().index
    scene = make_scene(uids, np.zeros((2 * N, 2)), genes=make_view("umap", snapshot).genes, look=Look(subtitle="All."))
    with pytest.warns(UserWarning, match=r"x\.vitessce: Values that were not measured are 0 here: LYZ of 40 cells\."):
        folder = visualize(scene, path=tmp_path / "x.vitessce", genes=["CD3D", "LYZ"])
    config = json.loads((folder / CONFIG).read_text("utf-8"))
    assert config["description"] == "All. Values that were not measured are 0 here: LYZ of 40 cells."
    with warnings.catch_warnings(action="ignore"):
        adata = ad.read_zarr(folder / CELLS)
    assert np.array_equal(adata.X[:, 1], np.nan_to_num(scene.gene("LYZ")))


@pytest.mark.parametrize("address", ["cells", "/cells", "file:///cells", "http://", "localhost:8000", "http://a/?b=c"])
def test_vitessce_needs_an_address_with_a_host(snapshot: Any, tmp_path: Path, address: str) -> None:
    """An address that Vitessce reads nothing from is refused, and nothing is written."""
    with pytest.raises(QueryError, match="http://localhost:8000"):
        visualize("umap", snapshot, path=tmp_path / "x.vitessce", address=address)
    assert list(tmp_path.iterdir()) == []


def test_a_vitessce_folder_survives_a_failed_rename(
    snapshot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the new folder cannot get its name, the old one is back with its contents, and nothing else is left."""
    target = tmp_path / "x.vitessce"
    target.mkdir()
    (target / "notes.txt").write_text("old")
    rename = Path.rename

    def fail_for_new(self: Path, to: Path) -> Path:
        if self.name == "x.vitessce" and self != target:
            raise OSError(28, "No space left on device")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(StoreError, match="No space left"):
        visualize("umap", snapshot, path=target, address="http://localhost:8000", overwrite=True)
    assert (target / "notes.txt").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.long
def test_the_command_tells_vitessce_where_it_is_served(snapshot: Any, tmp_path: Path) -> None:
    """--address is the address in the configuration, a last slash or none."""
    place = [snapshot.query().catalog.location.uri, "umap"]
    for address in ("https://cells.example/maps/", "https://cells.example/maps"):
        asked = ["visualize", *place, "-o", str(tmp_path / "x.vitessce"), "--address", address, "--overwrite"]
        done(*asked)
        config = json.loads((tmp_path / "x.vitessce" / CONFIG).read_text("utf-8"))
        assert config["datasets"][0]["files"][0]["url"] == f"https://cells.example/maps/{CELLS}"


@pytest.mark.parametrize("color", ["cell_type", "LYZ"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_picture_is_drawn(color: str, snapshot: Any, tmp_path: Path) -> None:
    """A PNG of full size is drawn by category or number, and is the same every time."""
    pytest.importorskip("matplotlib")
    from matplotlib import image

    scene = make_view("umap", snapshot, color=color)
    first, second = (visualize(scene, path=tmp_path / name).read_bytes() for name in ("x.png", "y.png"))
    drawn = image.imread(tmp_path / "x.png")
    assert drawn.shape == (1120, 1600, 4)
    assert len(np.unique(drawn.reshape(-1, 4)[::7], axis=0)) > 20
    assert first == second


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hostile_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    """Names that would be formulas or HTML elsewhere are plain text in a picture."""
    pytest.importorskip("matplotlib")
    obs = pa.table({"uid": ["a", "b", "c"], "$x_{": ["$\\frac{1}{", "</script>", "$\\frac{1}{"]})
    scene = make_scene(["a", "b", "c"], [[0, 0], [1, 1], [2, 2]], obs, look=Look(title="$\\bad{", color="$x_{"))
    assert visualize(scene, path=tmp_path / "x.png").stat().st_size > 1000


def test_view_serves_and_ends(snapshot: Any) -> None:
    """`view` gives a running server whose address is dead after it."""
    from urllib.error import URLError
    from urllib.request import urlopen

    with view("umap", snapshot, browser=False) as server, urlopen(server.url) as answer:
        assert b"<title>blood</title>" in answer.read()
    with pytest.raises(URLError):
        urlopen(server.url)


def test_the_command_writes_a_page(snapshot: Any, tmp_path: Path) -> None:
    """``visualize`` writes what its options name, and says a refusal in one line."""
    out = tmp_path / "x.html"
    words = ["visualize", snapshot.uri, "umap", "-o", str(out), "--color", "cell_type", "--gene", "LYZ", "--where", "cell_type = 'B'", "--json"]  # fmt: skip
    assert json.loads(done(*words)) == {"path": str(out)}
    manifest = json.loads(out.read_text("utf-8").split('id="manifest">')[1].split("</script>")[0])
    assert manifest["color"] == "cell_type"
    assert manifest["n"] < N
    assert [gene["name"] for gene in manifest["genes"]] == ["LYZ"]
    assert "--overwrite" in refused(*words)


def test_the_command_serves_until_it_is_stopped(snapshot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``view`` prints the address, which answers while it waits; what it says beside goes to stderr."""
    from urllib.request import urlopen

    from raggedatlas.wings.viewer.server import ViewerServer

    pages = []
    monkeypatch.setattr(ViewerServer, "wait", lambda server: pages.append(urlopen(server.url).read()))
    said = ask("view", snapshot.uri, "umap", "--no-browser", "--title", "Blood", "--json")
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["url"].startswith("http://127.0.0.1:")
    assert b"<title>Blood</title>" in pages[0]
    assert "Ctrl-C" in said.stderr


def test_the_command_refuses_lance_results_alone(results: ResultDataset, tmp_path: Path) -> None:
    """C57: a folder of Lance results without an atlas is refused in one line."""
    assert "raggedatlas view" in refused("visualize", tmp_path / "results", "-o", tmp_path / "x.html")


@pytest.mark.parametrize("name", ["matrix.mtx", "cells_x_genes.mtx"])
@pytest.mark.parametrize("by_address", [False, True])
def test_the_command_takes_folders_of_matrices(tmp_path: Path, name: str, *, by_address: bool) -> None:
    """A folder with a Market matrix of any pipeline is read as cells, also by its address, and not taken for an atlas."""
    (tmp_path / name).write_text("%%MatrixMarket matrix coordinate integer general\n2 2 1\n1 1 1\n")
    for table in ("barcodes.tsv", "genes.tsv", "cells_x_genes.barcodes.txt", "cells_x_genes.genes.txt"):
        (tmp_path / table).write_text("a\nb\n")
    assert "has no embedding to show" in refused("view", tmp_path.as_uri() if by_address else tmp_path, "--no-browser")
